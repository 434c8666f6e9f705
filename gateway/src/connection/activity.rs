//! Whether a connection does anything: it ends when no request is under way and none comes, however its client keeps
//! it busy otherwise (part of a head, pings, half a preface), and when its client takes no reply in.

use std::{
    cell::Cell,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use crate::{config::Limits, server::Caller};

/// What goes on on one connection.
#[derive(Debug)]
pub(super) struct Activity {
    /// Requests that wait for us: for their answer, or for more of it.
    answering: Cell<usize>,
    /// Replies that wait for the client to take them in.
    replying: Cell<usize>,
    last: Cell<Instant>,
}

/// A request that is under way.
#[derive(Debug)]
pub(super) struct Open {
    activity: Rc<Activity>,
    is_reply: bool,
}

impl Activity {
    pub(super) fn new() -> Rc<Self> {
        Rc::new(Self { answering: Cell::new(0), replying: Cell::new(0), last: Cell::new(Instant::now()) })
    }

    /// A request came.
    pub(super) fn open(self: &Rc<Self>) -> Open {
        self.answering.set(self.answering.get() + 1);
        self.last.set(Instant::now());
        Open { activity: Rc::clone(self), is_reply: false }
    }

    /// Returns when the connection has been idle for as long as it may.
    pub(super) async fn idle(&self, limits: Limits) {
        loop {
            let allowed = if self.replying.get() > 0 { limits.body_timeout } else { limits.head_timeout };
            let deadline = self.last.get() + allowed;
            if self.answering.get() > 0 {
                // Bounded by its own deadline, and by that of its body.
                tokio::time::sleep(allowed).await;
            } else if deadline <= Instant::now() {
                return;
            } else {
                tokio::time::sleep_until(deadline).await;
            }
        }
    }
}

impl Open {
    fn count(&self) -> &Cell<usize> {
        if self.is_reply { &self.activity.replying } else { &self.activity.answering }
    }

    /// Whether the client is next, or we are.
    fn set_reply(&mut self, is_reply: bool) {
        self.count().set(self.count().get() - 1);
        self.is_reply = is_reply;
        self.count().set(self.count().get() + 1);
        self.activity.last.set(Instant::now());
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.count().set(self.count().get() - 1);
        self.activity.last.set(Instant::now());
    }
}

/// A reply's body that counts as under way until the client has taken it in.
pub(super) struct Watched<B> {
    body: B,
    open: Open,
    /// Whose; nobody's if the request was refused.
    _caller: Option<Rc<Caller>>,
}

impl<B> Watched<B> {
    pub(super) fn new(body: B, mut open: Open, caller: Option<Rc<Caller>>) -> Self {
        open.set_reply(true);
        Self { body, open, _caller: caller }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Watched<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        // Nobody asks for a frame that there is no room for.
        self.open.set_reply(frame.is_ready());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
