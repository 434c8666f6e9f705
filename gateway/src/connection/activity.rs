//! Whether a connection does anything: it ends when no request is under way and none comes, however its client keeps
//! it busy otherwise (part of a head, pings, half a preface), when its client does not take a reply in, whatever else
//! it asks for meanwhile, and when it is told to.

use std::{
    cell::{Cell, RefCell},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use hyper::body::{Body, Frame, SizeHint};
use tokio::{sync::Notify, time::Instant};

use crate::{
    access::client::{Client, Load, add, sub},
    config::Limits,
    server::Caller,
};

/// Turns in which a piece of a reply may have moved last: this one, the one before, and the one in which it is given
/// up.
const TURNS: usize = 3;

/// Less than any client takes to hear an answer and ask again.
const PIPELINED: Duration = Duration::from_micros(10);

/// What goes on on one connection.
#[derive(Debug)]
pub(crate) struct Activity {
    /// Whose it is, as far as that is known without a token.
    client: Cell<Client>,
    load: RefCell<Rc<Load>>,
    /// Beyond those that clients may have: it answers health only.
    pub(crate) is_spare: bool,
    /// Requests under way.
    open: Cell<usize>,
    has_asked: Cell<bool>,
    last: Cell<Instant>,
    /// Pieces of replies that have not gone into the socket, by the turn in which they last moved.
    untaken: [Cell<usize>; TURNS],
    turn: Cell<usize>,
    leave: Cell<Option<Leave>>,
    told: Notify,
}

/// Why a connection is told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Its place is needed.
    Room,
    /// The process is about to end.
    Drain,
}

/// Why a connection is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Nothing has been under way for as long as that may be.
    Idle,
    /// A reply has not moved for as long as that may be.
    Slow,
    /// It was told to.
    Told(Leave),
}

/// A request that is under way.
#[derive(Debug)]
pub(super) struct Open(Rc<Activity>);

impl Activity {
    pub(crate) fn new(client: Client, load: Rc<Load>, is_spare: bool) -> Rc<Self> {
        Rc::new(Self {
            client: Cell::new(client),
            load: RefCell::new(load),
            is_spare,
            open: Cell::new(0),
            has_asked: Cell::new(false),
            last: Cell::new(Instant::now()),
            untaken: Default::default(),
            turn: Cell::new(0),
            leave: Cell::new(None),
            told: Notify::new(),
        })
    }

    /// Whose it is if its requests have no token.
    pub(crate) fn client(&self) -> Client {
        self.client.get()
    }

    /// What that client takes up.
    pub(crate) fn load(&self) -> Rc<Load> {
        Rc::clone(&self.load.borrow())
    }

    /// It is this client's, now that it has shown who it is.
    pub(crate) fn set_client(&self, client: Client, load: Rc<Load>) {
        self.client.set(client);
        self.load.replace(load);
    }

    /// Whether the next request was there before the last one was answered: nobody asks again so soon.
    pub(super) fn is_pipelined(&self) -> bool {
        self.last.get().elapsed() < PIPELINED
    }

    /// A request came.
    pub(super) fn open(self: &Rc<Self>) -> Open {
        add(&self.open, 1);
        self.has_asked.set(true);
        self.last.set(Instant::now());
        Open(Rc::clone(self))
    }

    /// Whether the request that came last is the only one under way.
    pub(crate) fn is_alone(&self) -> bool {
        self.open.get() <= 1
    }

    /// Since when nothing has been under way.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let is_idle = self.open.get() == 0 && self.untaken.iter().all(|pieces| pieces.get() == 0);
        is_idle.then(|| self.last.get())
    }

    /// Tells it to end; what it was told first stays.
    pub(crate) fn tell(&self, leave: Leave) {
        self.leave.set(Some(self.leave.get().unwrap_or(leave)));
        self.told.notify_one();
    }

    /// Returns when the connection is told to end.
    pub(super) async fn told(&self) -> Leave {
        loop {
            if let Some(leave) = self.leave.take() {
                return leave;
            }
            self.told.notified().await;
        }
    }

    /// Returns when the connection is to end.
    pub(super) async fn end(&self, limits: Limits) -> End {
        let half = limits.body_timeout / 2;
        let mut turn_at = Instant::now() + half;
        loop {
            let now = Instant::now();
            if turn_at <= now {
                if self.is_slow_after_turn() {
                    return End::Slow;
                }
                turn_at = now + half;
            }
            let allowed = if self.has_asked.get() { limits.idle_timeout } else { limits.head_timeout };
            let idle_at = self.idle_since().map(|since| since + allowed);
            if idle_at.is_some_and(|at| at <= now) {
                return End::Idle;
            }
            tokio::select! {
                leave = self.told() => return End::Told(leave),
                () = tokio::time::sleep_until(idle_at.map_or(turn_at, |at| at.min(turn_at))) => {}
            }
        }
    }

    /// Begins the next turn: true if a piece of a reply has not moved during this one and the one before.
    fn is_slow_after_turn(&self) -> bool {
        self.turn.set((self.turn.get() + 1) % TURNS);
        self.untaken[self.turn.get()].get() > 0
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        sub(&self.0.open, 1);
        self.0.last.set(Instant::now());
    }
}

/// A reply's body that counts as under way until the client has taken it in.
pub(super) struct Watched<B> {
    body: B,
    open: Open,
    /// Whose; nobody's if the request was refused.
    caller: Option<Rc<Caller>>,
}

impl<B> Watched<B> {
    pub(super) fn new(body: B, open: Open, caller: Option<Rc<Caller>>) -> Self {
        Self { body, open, caller }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Watched<B> {
    type Data = Piece;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Piece>, B::Error>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else { return Poll::Pending };
        let piece = |bytes| Piece::new(bytes, Rc::clone(&self.open.0), self.caller.clone());
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A piece of a reply: its client is charged for it, and its request is under way, until it has gone into the socket.
/// hyper and h2 keep it for as long as the client has no room for it, whatever has become of the body that it is from.
pub(super) struct Piece {
    bytes: Bytes,
    charged: usize,
    /// When it last moved.
    turn: usize,
    activity: Rc<Activity>,
    caller: Option<Rc<Caller>>,
}

impl Piece {
    fn new(bytes: Bytes, activity: Rc<Activity>, caller: Option<Rc<Caller>>) -> Self {
        let (charged, turn) = (bytes.len(), activity.turn.get());
        add(&activity.untaken[turn], 1);
        if let Some(caller) = &caller {
            caller.charge(charged);
        }
        Self { bytes, charged, turn, activity, caller }
    }
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        let now = self.activity.turn.get();
        if now != self.turn {
            sub(&self.activity.untaken[self.turn], 1);
            add(&self.activity.untaken[now], 1);
            self.turn = now;
        }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        sub(&self.activity.untaken[self.turn], 1);
        self.activity.last.set(Instant::now());
        if let Some(caller) = &self.caller {
            caller.discharge(self.charged);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity() -> Rc<Activity> {
        Activity::new(Client::at([127, 0, 0, 1].into()), Rc::default(), false)
    }

    #[test]
    fn a_piece_that_does_not_move_for_two_turns_is_slow_whatever_else_goes_on() {
        let activity = activity();
        let piece = |bytes: &'static [u8]| Piece::new(Bytes::from_static(bytes), Rc::clone(&activity), None);
        let mut moving = piece(b"abcdef");
        for _ in 0..5 {
            // Requests come and are answered, and one reply trickles.
            drop((activity.open(), piece(b"xyz")));
            assert!(!activity.is_slow_after_turn());
            moving.advance(1);
        }
        let stuck = piece(b"stuck");
        assert!(!activity.is_slow_after_turn());
        moving.advance(1);
        drop((activity.open(), piece(b"xyz")));
        assert!(!activity.is_slow_after_turn());
        assert!(activity.is_slow_after_turn(), "it is as it was two turns ago");
        drop((stuck, moving));
        assert!(!activity.is_slow_after_turn() && activity.idle_since().is_some());
    }

    #[test]
    fn a_connection_is_idle_when_nothing_is_open_or_untaken() {
        let activity = activity();
        assert!(activity.idle_since().is_some());
        let open = activity.open();
        assert!(activity.idle_since().is_none() && activity.is_alone());
        let second = activity.open();
        assert!(!activity.is_alone());
        let piece = Piece::new(Bytes::from_static(b"x"), Rc::clone(&activity), None);
        drop((open, second));
        assert!(activity.idle_since().is_none(), "its last reply has not been taken in");
        drop(piece);
        assert!(activity.idle_since().is_some());
    }
}
