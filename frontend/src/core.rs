//! Steps 1 to 3 and 10: the frontend as a state machine. It takes requests and transport events with the time, and
//! gives replies and what the driver is to do with connections. It does no IO and reads no clock.
//!
//! Losing the scheduler (`session`) ends every request and disconnects every backend; once the last
//! link is down no slot can be reached, so all are free, and it waits to connect again. A task is submitted to the
//! ModelThread that owns its model then, and cancelled there, whoever owns the model later.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::{
    BackendId, ChangeId, FrontendId, LinkId, TaskId, Timestamp,
    backend_to_frontend::{LinkHello, LinkWelcome},
    frame::read_frame,
    frontend_to_scheduler::{FrontendToScheduler, ModelChange, NAME_BYTES_MAX},
    scheduler_to_frontend::{
        DropReason, FENCED_TASKS_MAX, ModelState, REASON_BYTES_MAX, SchedulerLoad, SchedulerToFrontend,
    },
    slot::GUARD_BYTES,
};
use transport::{ConnectionId, Event};

pub use crate::session::Destination;

use crate::{
    arena::Arena,
    changes::{ChangeOutput, Changes},
    error::InferError,
    models::{ModelTable, Offer, ServedModel, excerpt},
    rope::Rope,
    session::{Session, SessionOutput, encode},
    slots::{ArenaTooSmall, SlotSize},
    tasks::{AdmitInstants, CheckedRequest, Counters, Reply, RequestId, Tasks},
};

/// Backends of which it is remembered that links were fenced off. Ids ascend and a lost backend tries for a few seconds
/// at most, so the smallest can be forgotten.
const FENCED_MAX: usize = 4_096;

/// What a frontend's core must know.
#[derive(Debug, Clone)]
pub struct CoreConfig {
    /// Length of the arena.
    pub arena_bytes: usize,
    /// Where the arena is for backends; where its guards are is known once it is laid out.
    pub arena: LinkWelcome,
    /// Where backends reach our bootstrap listener.
    pub link_address: String,
    /// Backends linked at once.
    pub links_max: usize,
}

/// What the driver is to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// Connect, then call [`Core::handle_connecting`].
    Connect {
        /// The scheduler, or one of its ModelThreads.
        to: Destination,
        /// An encoded [`SchedulerHello`](proto::hello::SchedulerHello).
        hello: Vec<u8>,
    },
    /// Accept a backend.
    Accept {
        /// Its connection.
        connection: ConnectionId,
        /// An encoded [`LinkWelcome`].
        welcome: Vec<u8>,
    },
    /// Refuse a backend.
    Refuse {
        /// Its connection.
        connection: ConnectionId,
        /// What it is told.
        reason: String,
    },
    /// Disconnect; `Disconnected` must follow as an event, after everything that landed before.
    Disconnect {
        /// The connection.
        connection: ConnectionId,
    },
    /// Send a frame.
    Send {
        /// The connection.
        connection: ConnectionId,
        /// Encoded messages.
        frame: Vec<u8>,
    },
    /// A request ended.
    Reply {
        /// The request.
        request: RequestId,
        /// How.
        result: Result<Reply, InferError>,
    },
    /// Read a model from the repository, then call [`Core::handle_model_read`].
    ReadModel {
        /// Its name.
        name: String,
    },
    /// A change of a model ended.
    ModelChanged {
        /// The change.
        change: ChangeId,
        /// How.
        result: Result<(), InferError>,
    },
}

/// The frontend.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    models: ModelTable,
    changes: Changes,
    tasks: Tasks,
    session: Session,
    scheduler_load: SchedulerLoad,
    /// It is about to end, and takes nothing more.
    scheduler_leaves: bool,
    /// Connections of backends, until they are reported down.
    links: BTreeMap<ConnectionId, (BackendId, LinkId)>,
    /// Links up to these were fenced off, and are not taken again; at most [`FENCED_MAX`] backends.
    fenced: BTreeMap<BackendId, LinkId>,
    /// Backends that came before the scheduler's welcome.
    early: VecDeque<(ConnectionId, LinkHello)>,
    fences: Vec<Fence>,
    outputs: VecDeque<Output>,
}

/// A backend that the scheduler suspects.
#[derive(Debug)]
struct Fence {
    /// Who asked.
    connection: ConnectionId,
    backend: BackendId,
    tasks: Vec<TaskId>,
    /// Its links at the time of the fence that are not reported down yet.
    links: Vec<ConnectionId>,
}

impl Core {
    /// A frontend for these models that connects at its first [`Self::handle_timeout`].
    ///
    /// # Errors
    /// If the arena is too small for the models.
    pub fn new(config: CoreConfig, models: Vec<repository::Model>) -> Result<Self, ArenaTooSmall> {
        let models = ModelTable::new(models);
        let sizes: Vec<SlotSize> = models.iter().map(|served| served.slot_size).collect();
        let tasks = Tasks::new(config.arena_bytes, &sizes)?;
        let arena = LinkWelcome { guards_offset: tasks.guards_offset() as u64, ..config.arena };
        Ok(Self {
            tasks,
            session: Session::new(config.link_address.clone()),
            config: CoreConfig { arena, ..config },
            models,
            changes: Changes::default(),
            scheduler_load: SchedulerLoad::default(),
            scheduler_leaves: false,
            links: BTreeMap::new(),
            fenced: BTreeMap::new(),
            early: VecDeque::new(),
            fences: Vec::new(),
            outputs: VecDeque::new(),
        })
    }

    /// The models of the repository.
    #[must_use]
    pub fn models(&self) -> &ModelTable {
        &self.models
    }

    /// An instant of the scheduler's clock on ours; `None` before that is known.
    #[must_use]
    pub fn to_local(&self, at: Timestamp) -> Option<Timestamp> {
        self.session.to_local(at)
    }

    /// Whether requests for some model can be taken.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.models.iter().any(|served| self.is_model_ready(served))
    }

    /// Whether requests for this model can be taken.
    #[must_use]
    pub fn is_model_ready(&self, served: &ServedModel) -> bool {
        self.session.joined().is_some()
            && !self.scheduler_leaves
            && self.session.knows_clock()
            && served.offer.is_some_and(|offer| offer.gpus > 0)
    }

    /// What was counted since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.tasks.counters()
    }

    /// Tasks that have not ended; each holds a slot.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.tasks.outstanding()
    }

    /// Backends that can reach our slots.
    #[must_use]
    pub fn backends_linked(&self) -> usize {
        self.links.len()
    }

    /// Whether we have joined the scheduler.
    #[must_use]
    pub fn has_scheduler(&self) -> bool {
        self.session.joined().is_some()
    }

    /// How much the scheduler had to do when it last said so, about a second ago; nothing while there is none.
    #[must_use]
    pub fn scheduler_load(&self) -> SchedulerLoad {
        if self.has_scheduler() { self.scheduler_load } else { SchedulerLoad::default() }
    }

    /// Step 1: admits a request and submits its tasks. The reply comes as [`Output::Reply`]. A request without inputs
    /// is to be given them by [`Self::handle_inputs`], or to be cancelled.
    ///
    /// # Errors
    /// If it cannot be served now, or never in time. Nothing has happened then.
    pub fn handle_request(
        &mut self,
        now: Timestamp,
        request: &CheckedRequest,
        arena: &dyn Arena,
    ) -> Result<RequestId, InferError> {
        let (frontend, scheduler_now) =
            self.session.joined().zip(self.session.to_scheduler(now)).ok_or(InferError::NoScheduler)?;
        if self.scheduler_leaves {
            return Err(InferError::NoScheduler);
        }
        let served = self.models.get(request.model);
        let model = || served.model.name.clone();
        let offer = served.offer.filter(|offer| offer.gpus > 0).ok_or_else(|| match served.state {
            ModelState::Unloading | ModelState::Unloaded => InferError::Unloaded { model: model() },
            ModelState::Serving | ModelState::Loading => InferError::NoBackend { model: model() },
        })?;
        if request.inputs.is_empty() && (served.slot_size.input_bytes as usize) < GUARD_BYTES {
            let (found, name) = (served.slot_size.input_bytes, &served.model.name);
            let text = format!("inputs: found none yet, expected all for model '{name}', which has {found} bytes");
            return Err(InferError::Invalid(text));
        }
        if request.slo < offer.least_latency {
            return Err(InferError::NeverMet { model: model(), slo: request.slo, least: offer.least_latency });
        }
        if request.slo - request.waited < offer.least_latency {
            return Err(DropReason::InputLate.into());
        }
        if self.tasks.ids_used_up(2 * request.rows) {
            self.leave("task ids are used up, joining again gives new ones");
            self.settle(now);
            return Err(InferError::NoScheduler);
        }
        self.tasks.admit(AdmitInstants { now, scheduler_now }, frontend, (served, offer), request, arena)
    }

    /// Step 2 for a request that was admitted without inputs: they are as in [`CheckedRequest`]. They may come too
    /// late, or after the request has ended.
    pub fn handle_inputs(&mut self, now: Timestamp, request: RequestId, inputs: &[Rope], arena: &dyn Arena) {
        self.tasks.handle_inputs(now, request, inputs, arena);
    }

    /// The client hung up: its request's tasks are cancelled and no reply comes.
    pub fn handle_cancel(&mut self, request: RequestId) {
        self.tasks.handle_cancel(request);
    }

    /// A client wants a model loaded or unloaded. The answer comes as [`Output::ModelChanged`].
    ///
    /// # Errors
    /// If nobody can be asked now.
    pub fn handle_change(&mut self, to: ModelChange, name: &str) -> Result<ChangeId, InferError> {
        self.session.joined().ok_or(InferError::NoScheduler)?;
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let expected = format!("1 to {NAME_BYTES_MAX} bytes");
            return Err(InferError::Invalid(format!(
                "model: found a name of {} bytes, expected {expected}",
                name.len()
            )));
        }
        let change = self.changes.handle_asked(to, name)?;
        self.session.post(&FrontendToScheduler::ChangeModel { change, to, name: name.to_owned() });
        Ok(change)
    }

    /// The driver did what [`Output::ReadModel`] asked for. Yields the model's index if it is served anew.
    pub fn handle_model_read(&mut self, name: &str, model: Result<repository::Model, String>) -> Option<usize> {
        let model = model.and_then(|model| {
            let size = SlotSize::new(model.input_bytes(), model.output_bytes());
            let reason = "its tensors are larger than those of any model this frontend started with; restart it";
            if self.tasks.fits(size) { Ok(model) } else { Err(reason.to_owned()) }
        });
        let result = model.as_ref().map(|_| ()).map_err(String::clone);
        let counts = self.changes.handle_read(name, &result);
        match model {
            _ if !counts => None,
            Ok(model) => Some(self.models.handle_model(model)),
            Err(reason) => {
                tracing::warn!("model '{name}' was loaded, and cannot be served here: {reason}");
                None
            }
        }
    }

    /// The driver did what [`Output::Connect`] asked for.
    pub fn handle_connecting(&mut self, to: Destination, connection: ConnectionId) {
        self.session.handle_connecting(to, connection);
    }

    /// Takes in what happened on the transport.
    pub fn handle_event(&mut self, now: Timestamp, event: Event, arena: &dyn Arena) {
        match event {
            Event::Incoming { connection, hello, .. } => self.on_incoming(connection, &hello),
            Event::Connected { connection, welcome } => self.on_connected(now, connection, &welcome),
            Event::Message { connection, frame } => self.on_frame(now, connection, &frame),
            Event::Immediate { connection, immediate, bytes } => {
                if let Some(&(backend, _)) = self.links.get(&connection)
                    && let Some(answered_at) = self.session.to_scheduler(now)
                {
                    self.tasks.handle_immediate(answered_at, backend, immediate, bytes, arena);
                }
            }
            Event::Disconnected { connection, reason } => self.on_disconnected(connection, &reason.0),
            // The slots' region is the only one; backends that come again are told the key as it is now.
            Event::KeyChanged { rkey, .. } => self.config.arena.arena_rkey = rkey,
            // A frontend posts neither.
            Event::ReadDone { .. } | Event::WriteDone { .. } => {}
        }
        self.settle(now);
    }

    /// Runs every timer that is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.tasks.handle_timeout(now);
        self.session.handle_timeout(now);
        self.request_clock(now);
        self.settle(now);
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        [self.session.poll_timeout(), self.tasks.poll_timeout()].into_iter().flatten().min()
    }

    /// What the driver is to do next. All messages since the last `None` are packed into as few frames as hold them.
    pub fn poll_output(&mut self) -> Option<Output> {
        while let Some((model_thread, message)) = self.tasks.poll_message() {
            self.session.post_to_thread(model_thread, &message);
        }
        if let Some(output) = self.session.poll_output() {
            return Some(output.into());
        }
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        match self.changes.poll_output() {
            Some(ChangeOutput::Read(name)) => return Some(Output::ReadModel { name }),
            Some(ChangeOutput::Ended(change, result)) => return Some(Output::ModelChanged { change, result }),
            None => {}
        }
        if let Some((request, result)) = self.tasks.poll_reply() {
            return Some(Output::Reply { request, result });
        }
        self.session.poll_frame().map(Output::from)
    }

    /// Asks for the scheduler's clock when it is time, and tells it what answers took of late.
    fn request_clock(&mut self, now: Timestamp) {
        if let Some(sent_at) = self.session.poll_clock_request(now) {
            let resp = self.tasks.take_way_back();
            self.session.post(&FrontendToScheduler::ClockRequest { sent_at, resp });
        }
    }

    fn on_connected(&mut self, now: Timestamp, connection: ConnectionId, welcome: &[u8]) {
        match self.session.handle_connected(now, connection, welcome) {
            Ok(false) => {}
            Ok(true) => {
                self.scheduler_load = SchedulerLoad::default();
                self.scheduler_leaves = false;
                self.request_clock(now);
                for (connection, hello) in std::mem::take(&mut self.early) {
                    self.on_hello(connection, hello);
                }
            }
            Err(reason) => self.leave(&reason),
        }
    }

    fn on_frame(&mut self, now: Timestamp, connection: ConnectionId, frame: &[u8]) {
        if self.links.contains_key(&connection) {
            tracing::warn!("a backend sent a message, which only a scheduler does; its link is closed");
            self.outputs.push_back(Output::Disconnect { connection });
            return;
        }
        for message in read_frame::<SchedulerToFrontend>(frame) {
            // A message can end the session; what follows in the frame is then void.
            if !self.session.hears(connection) {
                return;
            }
            match message {
                Ok(message) => self.on_message(now, connection, message),
                Err(error) => self.leave(&error.to_string()),
            }
        }
    }

    fn on_message(&mut self, now: Timestamp, connection: ConnectionId, message: SchedulerToFrontend) {
        match message {
            SchedulerToFrontend::Dropped { task, reason } => self.tasks.handle_dropped(now, task, reason),
            SchedulerToFrontend::Clock(reply) => self.session.handle_clock(now, reply),
            SchedulerToFrontend::Load(load) => self.scheduler_load = load,
            SchedulerToFrontend::Leaving => {
                tracing::info!("the scheduler is about to end; what it has is finished");
                self.scheduler_leaves = true;
            }
            SchedulerToFrontend::Fence { tasks, .. } if tasks.len() > FENCED_TASKS_MAX => {
                self.leave(&format!("a fence asks about {} tasks, at most {FENCED_TASKS_MAX} fit", tasks.len()));
            }
            SchedulerToFrontend::Fence { backend, link, tasks } => self.on_fence(connection, (backend, link), tasks),
            SchedulerToFrontend::ModelState { name, state, loads } => {
                if self.models.handle_state(&name, state, loads) {
                    self.changes.handle_loaded(&name);
                }
            }
            SchedulerToFrontend::ModelChanged { change, mut refused } => {
                if let Some(reason) = &mut refused {
                    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
                }
                self.changes.handle_changed(change, refused);
            }
            SchedulerToFrontend::Model { model_thread, .. } if !self.session.has_thread(model_thread) => {
                self.leave(&format!(
                    "a model is said to belong to ModelThread {}, which is none of its own",
                    model_thread.0
                ));
            }
            SchedulerToFrontend::Model { model, name, version, gpus, least_latency, network, model_thread } => {
                let offer = Offer { id: model, model_thread, gpus, least_latency, network };
                if self.models.handle_offer(&name, &version, offer) {
                    tracing::info!("model '{name}' version {version}: {gpus} GPUs, at least {least_latency}");
                } else {
                    let (name, version) = (excerpt(&name), excerpt(&version));
                    tracing::warn!("backends offer model '{name}' version '{version}', which our repository lacks");
                }
            }
        }
    }

    /// What failed on one link is no reason to cut off a newer one.
    fn on_fence(&mut self, connection: ConnectionId, (backend, up_to): (BackendId, LinkId), tasks: Vec<TaskId>) {
        let is_meant = |&(other, link): &(BackendId, LinkId)| other == backend && link <= up_to;
        let links: Vec<ConnectionId> =
            self.links.iter().filter(|(_, link)| is_meant(link)).map(|(connection, _)| *connection).collect();
        tracing::warn!("backend {} is fenced off, {} tasks are asked about", backend.0, tasks.len());
        let fenced = self.fenced.entry(backend).or_insert(up_to);
        *fenced = up_to.max(*fenced);
        if self.fenced.len() > FENCED_MAX {
            self.fenced.pop_first();
        }
        self.outputs.extend(links.iter().map(|&connection| Output::Disconnect { connection }));
        self.fences.push(Fence { connection, backend, tasks, links });
    }

    fn on_incoming(&mut self, connection: ConnectionId, hello: &[u8]) {
        let Ok(hello) = wincode::deserialize::<LinkHello>(hello) else {
            self.refuse(connection, "the hello does not decode; do both sides run the same version?");
            return;
        };
        if self.session.is_connecting() && self.early.len() < self.config.links_max {
            self.early.push_back((connection, hello));
        } else {
            self.on_hello(connection, hello);
        }
    }

    fn on_hello(&mut self, connection: ConnectionId, hello: LinkHello) {
        match self.session.frontend() {
            Some(frontend) if frontend == hello.frontend => {}
            Some(FrontendId(id)) => {
                self.refuse(connection, &format!("found frontend {}, expected {id}", hello.frontend.0));
                return;
            }
            None => {
                self.refuse(connection, "this frontend has no scheduler now");
                return;
            }
        }
        if self.links.len() >= self.config.links_max {
            self.refuse(connection, &format!("links_max: {} backends are linked already", self.links.len()));
            return;
        }
        if self.fenced.get(&hello.backend).is_some_and(|&fenced| hello.link <= fenced) {
            self.refuse(connection, "the scheduler has fenced this link off");
            return;
        }
        // It noticed before us that its former link is broken.
        let former = self.links.iter().filter(|(_, (backend, _))| *backend == hello.backend);
        self.outputs.extend(former.map(|(&connection, _)| Output::Disconnect { connection }));
        self.links.insert(connection, (hello.backend, hello.link));
        self.outputs.push_back(Output::Accept { connection, welcome: encode(&self.config.arena) });
    }

    fn refuse(&mut self, connection: ConnectionId, reason: &str) {
        tracing::warn!("a backend is refused: {reason}");
        self.outputs.push_back(Output::Refuse { connection, reason: reason.to_owned() });
    }

    fn on_disconnected(&mut self, connection: ConnectionId, reason: &str) {
        if self.session.owns(connection) {
            self.leave(reason);
            return;
        }
        self.early.retain(|(early, _)| *early != connection);
        if let Some((BackendId(backend), _)) = self.links.remove(&connection) {
            tracing::info!("the link of backend {backend} is down: {reason}");
        }
        self.fences.iter_mut().for_each(|fence| fence.links.retain(|link| *link != connection));
    }

    /// Ends the session with the scheduler and everything that depends on it.
    fn leave(&mut self, reason: &str) {
        tracing::warn!("the scheduler is lost: {reason}");
        self.session.leave();
        self.outputs.extend(self.links.keys().map(|&connection| Output::Disconnect { connection }));
        for (connection, _) in std::mem::take(&mut self.early) {
            self.refuse(connection, "this frontend has no scheduler now");
        }
        self.tasks.abandon(&InferError::SchedulerLost);
        self.models.clear_offers();
        self.changes.abandon();
        self.fences.clear();
        self.fenced.clear();
    }

    /// The next fence that can be confirmed. Who has asked about a backend twice is answered in that order, or it takes
    /// one answer for the other.
    fn take_fence(&mut self) -> Option<Fence> {
        let mut waiting = BTreeSet::new();
        let index = self.fences.iter().position(|fence| {
            let asked = (fence.connection, fence.backend);
            let is_next = fence.links.is_empty() && !waiting.contains(&asked);
            waiting.insert(asked);
            is_next
        })?;
        Some(self.fences.remove(index))
    }

    /// Does what waited for links to be down.
    fn settle(&mut self, now: Timestamp) {
        if self.session.is_leaving() && self.links.is_empty() {
            self.tasks.release_abandoned();
            self.session.handle_left(now);
        }
        while let Some(fence) = self.take_fence() {
            let unanswered = self.tasks.handle_fenced(fence.tasks);
            let fenced = FrontendToScheduler::Fenced { backend: fence.backend, unanswered };
            self.session.post_back(fence.connection, &fenced);
        }
    }
}

impl From<SessionOutput> for Output {
    fn from(output: SessionOutput) -> Self {
        match output {
            SessionOutput::Connect { to, hello } => Self::Connect { to, hello },
            SessionOutput::Disconnect { connection } => Self::Disconnect { connection },
            SessionOutput::Send { connection, frame } => Self::Send { connection, frame },
        }
    }
}

#[cfg(test)]
mod tests;
