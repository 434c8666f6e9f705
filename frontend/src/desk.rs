//! The core, its arena and those who wait for replies, shared by the parts of one thread: the transport's loop, the
//! in-process client, and what serves others. A request costs no hop between threads.

use std::{
    cell::RefCell,
    collections::{BTreeMap, btree_map::Entry},
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use proto::{
    Brought, ChangeId, Span, Timestamp, frontend_to_scheduler::ModelChange, scheduler_to_frontend::DropReason,
};
use repository::Model;
use tokio::sync::{Notify, oneshot};
use transport::{ConnectionId, Event};

use crate::{
    arena::Arena,
    core::{Core, Destination, Output},
    error::InferError,
    models::ServedModel,
    rope::Rope,
    tasks::{CheckedRequest, Reply, RequestId},
};

/// Counts what becomes of requests; called on the frontend's thread, with models by their index in the model table.
pub trait Observer {
    /// A version of a model is served: one that is known, read anew, or the next one of the table.
    fn handle_model(&self, index: usize, model: &Model);
    /// A request was answered.
    fn handle_success(&self, now: Timestamp, model: usize, reply: &Reply);
    /// A request ended without an answer, `after` its admission; zero if it was not admitted.
    fn handle_failure(&self, now: Timestamp, model: usize, after: Span, error: &InferError);
    /// The thread has been silent for 0.1 s or more so many times since its start.
    fn handle_silences(&self, count: u64);
}

/// Nobody counts.
impl Observer for () {
    fn handle_model(&self, _: usize, _: &Model) {}
    fn handle_success(&self, _: Timestamp, _: usize, _: &Reply) {}
    fn handle_failure(&self, _: Timestamp, _: usize, _: Span, _: &InferError) {}
    fn handle_silences(&self, _: u64) {}
}

/// What the parts of a frontend's thread share.
pub struct Desk {
    state: RefCell<State>,
    arena: Box<dyn Arena>,
    clock: Box<dyn Fn() -> Timestamp>,
    /// Something was put in that the transport's loop must look at. Many requests of one turn are one notice, so their
    /// messages share frames.
    wake: Notify,
    observer: Rc<dyn Observer>,
}

struct State {
    core: Core,
    /// Requests that are under way without being the core's, by index in the model table: those for ensembles, and
    /// those that wait for the answer to an equal one.
    graphs: BTreeMap<usize, usize>,
    waiting: BTreeMap<RequestId, Waiting>,
    changing: BTreeMap<ChangeId, oneshot::Sender<Result<(), InferError>>>,
}

/// Who waits for a request's end.
struct Waiting {
    model: usize,
    admitted_at: Timestamp,
    sender: oneshot::Sender<Result<Reply, InferError>>,
}

/// A request that is under way. Dropping it cancels the request.
pub struct PendingReply {
    desk: Rc<Desk>,
    request: RequestId,
    reply: oneshot::Receiver<Result<Reply, InferError>>,
}

/// A request that is under way and not submitted itself. Dropping it means that it was cancelled.
pub struct Counted {
    desk: Rc<Desk>,
    model: usize,
    began: Timestamp,
    is_ended: bool,
}

impl Desk {
    /// A desk over this core, whose slots lie in `arena`, told the time by `clock`. The observer is told of every model
    /// at once.
    #[must_use]
    pub fn new(
        core: Core,
        arena: Box<dyn Arena>,
        clock: Box<dyn Fn() -> Timestamp>,
        observer: Rc<dyn Observer>,
    ) -> Rc<Self> {
        for (index, served) in core.models().iter().enumerate() {
            observer.handle_model(index, &served.model);
        }
        let state =
            RefCell::new(State { core, graphs: BTreeMap::new(), waiting: BTreeMap::new(), changing: BTreeMap::new() });
        Rc::new(Self { state, arena, clock, wake: Notify::new(), observer })
    }

    /// Now, on our clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Looks at the core.
    pub fn with_core<T>(&self, look: impl FnOnce(&Core) -> T) -> T {
        look(&self.state.borrow().core)
    }

    /// Looks at a model and whether it is ready.
    ///
    /// # Errors
    /// If there is no such model or version.
    pub fn with_model<T>(
        &self,
        name: &str,
        version: Option<&str>,
        look: impl FnOnce(usize, &ServedModel, bool) -> T,
    ) -> Result<T, InferError> {
        self.with_core(|core| {
            let index = core.models().find(name, version)?;
            let served = core.models().get(index);
            Ok(look(index, served, core.is_model_ready(served)))
        })
    }

    /// Requests without an answer yet, by their model's index in the model table; models without any are left out.
    #[must_use]
    pub fn pending(&self) -> BTreeMap<usize, usize> {
        let state = self.state.borrow();
        let mut pending = state.graphs.clone();
        for waiting in state.waiting.values() {
            *pending.entry(waiting.model).or_default() += 1;
        }
        pending
    }

    /// Step 1: admits a request.
    ///
    /// # Errors
    /// As [`Core::handle_request`].
    pub fn submit(self: &Rc<Self>, request: &CheckedRequest) -> Result<PendingReply, InferError> {
        let mut state = self.state.borrow_mut();
        let (now, model) = (self.now(), request.model);
        let admitted = state.core.handle_request(now, request, &*self.arena);
        let id = admitted.inspect_err(|error| self.observer.handle_failure(now, model, Span::ZERO, error))?;
        let (sender, reply) = oneshot::channel();
        state.waiting.insert(id, Waiting { model, admitted_at: now, sender });
        self.wake.notify_one();
        Ok(PendingReply { desk: Rc::clone(self), request: id, reply })
    }

    /// Counts a request that is not submitted itself until it [ends](Counted::end): one for an ensemble, whose steps
    /// are, or one that waits for the answer to an equal one.
    #[must_use]
    pub fn count(self: &Rc<Self>, model: usize) -> Counted {
        *self.state.borrow_mut().graphs.entry(model).or_default() += 1;
        Counted { desk: Rc::clone(self), model, began: self.now(), is_ended: false }
    }

    /// A request for an ensemble was refused before it was under way.
    pub fn handle_refused(&self, ensemble: usize, error: &InferError) {
        self.observer.handle_failure(self.now(), ensemble, Span::ZERO, error);
    }

    /// Loads a model, perhaps with something brought along instead of what the repository has, or unloads it, and waits
    /// until that is done.
    ///
    /// # Errors
    /// Why nothing was changed.
    pub async fn change_model(&self, to: ModelChange, name: &str, brought: Option<Brought>) -> Result<(), InferError> {
        let (sender, answer) = oneshot::channel();
        {
            let (mut state, now) = (self.state.borrow_mut(), self.now());
            let change = state.core.handle_change(now, to, name, brought)?;
            state.changing.insert(change, sender);
        }
        self.wake.notify_one();
        answer.await.unwrap_or(Err(InferError::ShuttingDown))
    }

    /// A model was read from the repository, as [`Output::ReadModel`] asked for.
    pub fn handle_model_read(&self, name: &str, versions: Result<Vec<Model>, String>) {
        let mut state = self.state.borrow_mut();
        for index in state.core.handle_model_read(name, versions) {
            self.observer.handle_model(index, &state.core.models().get(index).model);
        }
        self.wake.notify_one();
    }

    /// Takes in what happened on the transport.
    pub fn handle_event(&self, event: Event) {
        self.state.borrow_mut().core.handle_event(self.now(), event, &*self.arena);
    }

    /// Runs every timer that is due.
    pub fn handle_timeout(&self) {
        self.state.borrow_mut().core.handle_timeout(self.now());
    }

    /// The thread has been silent too long so many times.
    pub fn handle_silences(&self, count: u64) {
        self.observer.handle_silences(count);
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.with_core(Core::poll_timeout)
    }

    /// What the transport's loop is to do next; replies are handed to those who wait for them on the way.
    pub fn poll_output(&self) -> Option<Output> {
        loop {
            let mut state = self.state.borrow_mut();
            match state.core.poll_output()? {
                Output::Reply { request, result } => {
                    if let Some(waiting) = state.waiting.remove(&request) {
                        let Waiting { model, admitted_at, .. } = waiting;
                        let now = self.now();
                        match &result {
                            Ok(reply) => self.observer.handle_success(now, model, reply),
                            Err(error) => self.observer.handle_failure(now, model, now - admitted_at, error),
                        }
                        // A waiter that is gone has cancelled.
                        let _ = waiting.sender.send(result);
                    }
                }
                Output::ModelChanged { change, result } => {
                    // A client that is gone does not care.
                    let _ = state.changing.remove(&change).map(|waiting| waiting.send(result));
                }
                output => return Some(output),
            }
        }
    }

    /// The driver did what [`Output::Connect`] asked for.
    pub fn handle_connecting(&self, to: Destination, connection: ConnectionId) {
        self.state.borrow_mut().core.handle_connecting(to, connection);
    }

    /// Returns when something was put in since the last call.
    pub async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl PendingReply {
    /// The inputs of a request that was submitted without, as in [`CheckedRequest`].
    pub fn give_inputs(&self, inputs: &[Rope]) {
        let now = self.desk.now();
        self.desk.state.borrow_mut().core.handle_inputs(now, self.request, inputs, &*self.desk.arena);
        self.desk.wake.notify_one();
    }

    /// The inputs of a request that was submitted without do not come, for this reason: it ends.
    pub fn fail(&self, error: &InferError) {
        self.end(error);
    }

    fn end(&self, error: &InferError) {
        let mut state = self.desk.state.borrow_mut();
        if let Some(waiting) = state.waiting.remove(&self.request) {
            let now = self.desk.now();
            self.desk.observer.handle_failure(now, waiting.model, now - waiting.admitted_at, error);
            state.core.handle_cancel(self.request);
            self.desk.wake.notify_one();
        }
    }

    /// Waits for the request's end.
    ///
    /// # Errors
    /// Why it has no answer.
    pub async fn wait(mut self) -> Result<Reply, InferError> {
        self.ended().await
    }

    /// The same for whoever has something else to do meanwhile; it yields once.
    ///
    /// # Errors
    /// Why it has no answer.
    pub async fn ended(&mut self) -> Result<Reply, InferError> {
        poll_fn(|context| self.poll_ended(context)).await
    }

    /// The same for whoever waits for several.
    ///
    /// # Errors
    /// Why it has no answer.
    pub fn poll_ended(&mut self, context: &mut Context<'_>) -> Poll<Result<Reply, InferError>> {
        Pin::new(&mut self.reply).poll(context).map(|ended| ended.unwrap_or(Err(InferError::ShuttingDown)))
    }
}

impl Counted {
    /// It has ended so.
    pub fn end(mut self, result: &Result<Reply, InferError>) {
        self.on_ended(result.as_ref());
    }

    /// It is under way no longer, and what becomes of it is counted elsewhere.
    pub fn leave(mut self) {
        self.on_left();
    }

    fn on_left(&mut self) {
        self.is_ended = true;
        if let Entry::Occupied(mut under_way) = self.desk.state.borrow_mut().graphs.entry(self.model) {
            *under_way.get_mut() -= 1;
            if *under_way.get() == 0 {
                under_way.remove();
            }
        }
    }

    fn on_ended(&mut self, result: Result<&Reply, &InferError>) {
        self.on_left();
        let Self { desk, model, began, .. } = self;
        let now = desk.now();
        match result {
            Ok(reply) => desk.observer.handle_success(now, *model, reply),
            Err(error) => desk.observer.handle_failure(now, *model, now - *began, error),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_ended {
            self.on_ended(Err(&InferError::Dropped(DropReason::Cancelled)));
        }
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        self.end(&InferError::Dropped(DropReason::Cancelled));
    }
}
