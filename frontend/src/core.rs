//! Step 1, Step 2, Step 3, Step 10.
//! The frontend as a state machine. It takes requests and transport events with the time, and
//! gives replies and what the driver is to do with connections. It does no IO and reads no clock.
//!
//! It has a session with each scheduler of a list, and obeys one of them (`schedulers`). Losing that one for good ends
//! every request and disconnects every backend; once the last link is down no slot can be reached, so all are free, and
//! it waits to connect again. A task is submitted to the ModelThread that owns its model then, and cancelled there,
//! whoever owns the model later.

mod schedulers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use member::{Membership, encode};
use proto::{
    BackendId, ChangeId, Claim, FrontendId, LinkId, LinkPass, TaskId, Timestamp, Wait,
    backend_to_frontend::{LinkHello, LinkWelcome},
    brought::{Brought, CONFIG_BYTES_MAX},
    frame::read_frame,
    frontend_to_scheduler::{FrontendToControl, FrontendToModelThread, ModelChange, NAME_BYTES_MAX},
    request_times::RequestTimes,
    scheduler_to_frontend::{
        ANSWERED_TASKS_MAX, DropReason, FENCED_TASKS_MAX, ModelState, REASON_BYTES_MAX, SchedulerLoad,
        SchedulerToFrontend,
    },
    slot::GUARD_BYTES,
};
use repository::{Ensemble, Refused};
use transport::{ConnectionId, Event, Notes};

pub use self::schedulers::Takeovers;
pub use member::Destination;

use crate::{
    arena::Arena,
    changes::{ChangeOutput, Changes},
    error::InferError,
    models::{ModelTable, Offer, ServedModel, excerpt},
    rope::Rope,
    slots::{ArenaTooSmall, SlotSize},
    spoken::Word,
    tasks::{AdmitInstants, CheckedRequest, Counters, Reply, RequestId, Tasks},
};

/// Backends of which it is remembered that links were fenced off. Ids ascend and a lost backend tries for a few seconds
/// at most, so the smallest can be forgotten.
const FENCED_MAX: usize = 4_096;

/// Why somebody is refused who is no backend.
const NO_LINK_HELLO: &str =
    "this is a frontend's link, and this no backend's hello; expected a scheduler (keys scheduler, schedulers)";
/// Why a backend is refused that comes before there is a primary.
const NO_SCHEDULER: &str = "this frontend has no scheduler now";

/// What a frontend's core must know.
#[derive(Debug, Clone)]
pub struct CoreConfig {
    /// Length of the arena.
    pub arena_bytes: usize,
    /// Where the arena is for backends that are linked; where its guards are is known once it is laid out.
    pub arena: LinkWelcome,
    /// How operators call this frontend.
    pub name: String,
    /// Where backends reach our bootstrap listener.
    pub link_address: String,
    /// Backends linked at once.
    pub links_max: usize,
    /// How many schedulers there are; at least 1.
    pub schedulers: usize,
    /// Drawn at random. From this come the tokens by which schedulers tell one life of this frontend from another.
    pub token_seed: u64,
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
        /// What it is told; where slots have no keys of their own, with a key that opens the arena to it alone.
        welcome: LinkWelcome,
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
        /// What it was loaded with, if not what is there.
        brought: Option<Brought>,
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
    /// Sessions with all schedulers, and what each has said in its present one.
    membership: Membership<Word>,
    takeovers: Takeovers,
    /// Lives before this one.
    lives: u64,
    /// This life is over, and not all links are down.
    is_ending: bool,
    /// An operator has drained us, in whatever life.
    is_drained: bool,
    /// Connections of backends, until they are reported down.
    links: BTreeMap<ConnectionId, (BackendId, LinkId)>,
    /// Links up to these were fenced off, and are not taken again; at most [`FENCED_MAX`] backends.
    fenced: BTreeMap<BackendId, LinkId>,
    /// Backends that came before there was a primary.
    early: VecDeque<(ConnectionId, LinkHello)>,
    fences: Vec<Fence>,
    told: Told,
    outputs: VecDeque<Output>,
}

/// What schedulers say of models, of which there may be thousands, and of backends, which may give a task back as often
/// as it is planned there.
#[derive(Debug, Default)]
struct Told {
    offered: Notes,
    lacking: Notes,
    doubted: Notes,
}

impl Told {
    /// Logs what is due.
    fn settle(&mut self, now: Timestamp) {
        if let Some((count, last)) = self.offered.poll_line(now) {
            tracing::info!(count, "backends offer; the last one: {last}");
        }
        if let Some((count, last)) = self.lacking.poll_line(now) {
            tracing::warn!(count, "backends offer what our repository lacks; the last one: {last}");
        }
        if let Some((count, last)) = self.doubted.poll_line(now) {
            tracing::warn!(count, "tasks of backends are asked about; the last ones: {last}");
        }
    }
}

/// A backend that the primary suspects, or that has broken its word to us.
#[derive(Debug)]
struct Fence {
    /// Who asked; nobody, if we cut it off ourselves.
    connection: Option<ConnectionId>,
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
    ///
    /// # Panics
    /// If there is no scheduler.
    pub fn new(config: CoreConfig, models: Vec<repository::Model>) -> Result<Self, ArenaTooSmall> {
        let models = ModelTable::new(models);
        let with_slots = models.iter().filter(|served| !served.is_ensemble());
        let sizes: Vec<SlotSize> = with_slots.map(|served| served.slot_size).collect();
        let tasks = Tasks::new(config.arena_bytes, &sizes)?;
        let arena = LinkWelcome { guards_offset: tasks.guards_offset() as u64, ..config.arena };
        Ok(Self {
            tasks,
            membership: Membership::new(config.schedulers),
            takeovers: Takeovers::default(),
            lives: 0,
            is_ending: false,
            is_drained: false,
            config: CoreConfig { arena, ..config },
            models,
            changes: Changes::default(),
            links: BTreeMap::new(),
            fenced: BTreeMap::new(),
            early: VecDeque::new(),
            fences: Vec::new(),
            told: Told::default(),
            outputs: VecDeque::new(),
        })
    }

    /// A model of the repository, or one version of it, cannot be served.
    pub fn handle_refused(&mut self, refused: Refused) {
        self.models.handle_refused(refused);
    }

    /// The models of the repository.
    #[must_use]
    pub fn models(&self) -> &ModelTable {
        &self.models
    }

    /// An instant of the scheduler's clock on ours; `None` before that is known.
    #[must_use]
    pub fn to_local(&self, at: Timestamp) -> Option<Timestamp> {
        self.membership.clock().to_local(at)
    }

    /// Whether an operator has drained this frontend: it serves, and is not to be given more.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Whether requests for some model can be taken, or could, had clients not unloaded all of them. Who misses a
    /// primary takes them, and is better given none.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let can_take = self.models.iter().any(|served| self.is_model_ready(served)) || self.has_nothing_to_serve();
        can_take && !self.membership.is_missing()
    }

    /// The same, for whoever needs each of these models; `*` is all there are, those that cannot be served among them.
    /// What clients have unloaded is needed no more.
    #[must_use]
    pub fn is_ready_with(&self, names: &[String]) -> bool {
        let is_needed = |name: &str| names.iter().any(|needed| needed == "*" || needed == name);
        let needed = |served: &&ServedModel| is_needed(&served.model.name) && served.state != ModelState::Unloaded;
        let can_take = self.models.iter().filter(needed).all(|served| self.is_model_ready(served));
        let is_refused = self.models.refused().any(|(name, ..)| is_needed(name));
        self.is_joined() && can_take && !is_refused && !self.membership.is_missing()
    }

    /// Whether it has joined, clients have unloaded all models that there are, if there are any, and a backend is there
    /// that could load one.
    fn has_nothing_to_serve(&self) -> bool {
        let mut models = self.models.iter().filter(|served| !served.is_ensemble());
        let can_load = self.is_joined() && self.scheduler_load().gpus > 0;
        can_load && models.all(|served| served.state == ModelState::Unloaded)
    }

    /// Whether a scheduler is there, and its clock known.
    fn is_joined(&self) -> bool {
        self.admits_as().is_some() && self.membership.clock().error_bound().is_some()
    }

    /// Whether requests for this model can be taken.
    #[must_use]
    pub fn is_model_ready(&self, served: &ServedModel) -> bool {
        match served.is_ensemble() {
            true => self.is_joined() && self.reason_against_ensemble(served).is_none(),
            false => self.is_joined() && served.offer.is_some_and(|offer| offer.gpus > 0),
        }
    }

    /// What can answer for a model now: the numbers of its own load and, of an ensemble, of its members'. Nothing while
    /// it cannot be asked, or while one of them is being loaded or unloaded.
    #[must_use]
    pub fn loads(&self, served: &ServedModel) -> Option<Vec<u64>> {
        let is_settled = |served: &ServedModel| served.state == ModelState::Serving;
        if !is_settled(served) || !self.is_model_ready(served) {
            return None;
        }
        let mut loads = vec![served.load];
        for (name, version) in served.model.ensemble().into_iter().flat_map(Ensemble::asked) {
            let (_, member) = self.models.member(name, version)?;
            loads.extend(is_settled(member).then_some([member.load])?);
        }
        Some(loads)
    }

    /// Why requests for an ensemble cannot be taken, if so: clients have unloaded it, or one of its members cannot be
    /// asked; all of them, if they are models of one task.
    #[must_use]
    pub fn reason_against_ensemble(&self, served: &ServedModel) -> Option<String> {
        if matches!(served.state, ModelState::Unloading | ModelState::Unloaded) {
            return Some("unloaded".to_owned());
        }
        if let Err(reason) = self.models.check_members(&served.model) {
            return Some(reason);
        }
        let ensemble = served.model.ensemble()?;
        let mut against = ensemble.steps.iter().map(|step| {
            let (_, member) = self.models.member(&step.model, step.version.as_deref())?;
            let error = self.offer(member).err()?;
            Some(format!("its step '{}' is not ready: {error}", step.model))
        });
        match ensemble.selection {
            // Of models of one task those answer that can.
            Some(_) => against.collect::<Option<Vec<_>>>()?.into_iter().next(),
            None => against.find_map(|against| against),
        }
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

    /// How operators call this frontend.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Bytes of registered memory for slots, and of those that are leased.
    #[must_use]
    pub fn arena_bytes(&self) -> (usize, usize) {
        self.tasks.arena_bytes()
    }

    /// Backends that can reach our slots.
    #[must_use]
    pub fn backends_linked(&self) -> usize {
        self.links.len()
    }

    /// Whether we have joined a scheduler that is the primary.
    #[must_use]
    pub fn has_scheduler(&self) -> bool {
        self.primary().is_some()
    }

    /// Whom we obey, or obeyed last; no primary's claim before there was one.
    #[must_use]
    pub fn obeys(&self) -> Claim {
        self.membership.obeys()
    }

    /// The index of the scheduler that is the primary and that we have joined.
    #[must_use]
    pub fn primary(&self) -> Option<usize> {
        self.membership.primary()
    }

    /// Schedulers that we have joined, the primary among them.
    #[must_use]
    pub fn schedulers_joined(&self) -> usize {
        self.membership.iter().filter(|session| session.has_joined()).count()
    }

    /// How primaries came and went.
    #[must_use]
    pub fn takeovers(&self) -> Takeovers {
        let mut takeovers = self.takeovers;
        takeovers.lower_epochs = self.membership.lower_epochs();
        takeovers
    }

    /// How much the primary had to do when it last said so, about a second ago; nothing while there is none.
    #[must_use]
    pub fn scheduler_load(&self) -> SchedulerLoad {
        self.primary().map_or(SchedulerLoad::default(), |primary| self.membership[primary].word.load)
    }

    /// What requests of a model of the table take, as the primary has learned it; nothing if they are all alike.
    #[must_use]
    pub fn request_times(&self, model: usize) -> Option<&RequestTimes> {
        let (primary, offer) = self.primary().zip(self.models.get(model).offer)?;
        self.membership[primary].word.request_times(offer.id)
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
        let (frontend, scheduler_now) = self.admits_as().zip(self.to_scheduler(now)).ok_or(InferError::NoScheduler)?;
        let served = self.models.get(request.model);
        let model = || served.model.name.clone();
        let offer = self.offer(served)?;
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
            self.start_over("task ids are used up, joining again gives new ones");
            self.settle(now);
            return Err(InferError::NoScheduler);
        }
        self.tasks.admit(AdmitInstants { now, scheduler_now }, frontend, (served, offer), request, arena)
    }

    /// What backends offer of a model.
    ///
    /// # Errors
    /// Why none does.
    pub fn offer(&self, served: &ServedModel) -> Result<Offer, InferError> {
        let model = || served.model.name.clone();
        served.offer.filter(|offer| offer.gpus > 0).ok_or_else(|| match served.state {
            ModelState::Unloading | ModelState::Unloaded => InferError::Unloaded { model: model() },
            ModelState::Serving | ModelState::Loading => match self.models.reason_against(&served.model) {
                Some(reason) => InferError::NotLoaded { model: model(), reason: reason.to_owned() },
                None => InferError::NoBackend { model: model() },
            },
        })
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
    pub fn handle_change(
        &mut self,
        now: Timestamp,
        to: ModelChange,
        name: &str,
        brought: Option<Brought>,
    ) -> Result<ChangeId, InferError> {
        let primary = self.primary().ok_or(InferError::NoScheduler)?;
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let expected = format!("1 to {NAME_BYTES_MAX} bytes");
            return Err(InferError::Invalid(format!(
                "model: found a name of {} bytes, expected {expected}",
                name.len()
            )));
        }
        let config_bytes = brought.as_ref().map(|brought| brought.config.len());
        if let Some(found) = config_bytes.filter(|&found| found > CONFIG_BYTES_MAX) {
            let expected = format!("at most {CONFIG_BYTES_MAX}");
            return Err(InferError::Invalid(format!("config: found {found} bytes, expected {expected}")));
        }
        let change = self.changes.handle_asked(now, to, name)?;
        self.post(primary, &FrontendToControl::ChangeModel { change, to, name: name.to_owned(), brought });
        Ok(change)
    }

    /// The driver did what [`Output::ReadModel`] asked for: these are all versions that are to be served. Yields the
    /// indexes of those that are served anew.
    pub fn handle_model_read(&mut self, name: &str, versions: Result<Vec<repository::Model>, String>) -> Vec<usize> {
        let versions = versions.and_then(|versions| {
            let size = |model: &repository::Model| SlotSize::new(model.input_bytes(), model.output_bytes());
            let mut with_slots = versions.iter().filter(|model| model.ensemble().is_none());
            with_slots.try_for_each(|model| self.tasks.make_room(size(model)))?;
            self.models.check(&versions).map(|()| versions)
        });
        let result = versions.as_ref().map(|_| ()).map_err(String::clone);
        if !self.changes.handle_read(name, &result) {
            return Vec::new();
        }
        match versions {
            Ok(versions) => self.models.handle_model(versions),
            Err(reason) => {
                tracing::warn!("model '{name}' was loaded, and cannot be served here: {reason}");
                self.models.handle_refused(Refused { name: name.to_owned(), version: String::new(), reason });
                Vec::new()
            }
        }
    }

    /// The driver did what [`Output::Connect`] asked for.
    pub fn handle_connecting(&mut self, to: Destination, connection: ConnectionId) {
        self.membership.handle_connecting(to.scheduler(), to.reader(), connection);
    }

    /// Opens the slots' guards to backends: before the first of them links.
    pub fn open_guards(&mut self, memory: &dyn Arena) {
        let LinkWelcome { arena_bytes, guards_offset, guards_rkey, .. } = &mut self.config.arena;
        *guards_rkey = memory.open(*guards_offset as usize..*arena_bytes as usize, 0..0);
    }

    /// Takes in what happened on the transport.
    pub fn handle_event(&mut self, now: Timestamp, event: Event, arena: &dyn Arena) {
        match event {
            Event::Incoming { connection, hello, .. } => self.on_incoming(connection, &hello),
            Event::Connected { connection, welcome } => self.on_connected(now, connection, &welcome),
            Event::Message { connection, frame } => self.on_frame(now, connection, &frame),
            Event::Immediate { connection, immediate, bytes } => {
                if let Some(&(backend, _)) = self.links.get(&connection)
                    && let Some(answered_at) = self.to_scheduler(now)
                {
                    self.tasks.handle_immediate(answered_at, backend, immediate, bytes, arena);
                }
            }
            Event::Disconnected { connection, reason } => self.on_disconnected(now, connection, &reason.text),
            // A frontend posts neither, and what it opens is opened to single links.
            Event::ReadDone { .. } | Event::WriteDone { .. } | Event::KeyChanged { .. } => {}
        }
        self.settle(now);
    }

    /// Runs every timer that is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.tasks.handle_timeout(now);
        self.changes.handle_timeout(now);
        for (backend, tasks) in self.tasks.take_missed(now) {
            self.on_not_written(backend, tasks);
        }
        self.tend_schedulers(now);
        self.settle(now);
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let schedulers = Some(self.membership.poll_timeout()).filter(|at| *at < Timestamp::NEVER);
        schedulers.into_iter().chain(self.tasks.poll_timeout()).chain(self.changes.poll_timeout()).min()
    }

    /// What the driver is to do next. All messages since the last `None` are packed into as few frames as hold them.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.post_messages();
        // What is to be cut off comes before what is sent.
        if let Some(output) = self.membership.poll_output() {
            return Some(match output {
                member::Output::Connect { to, hello } => {
                    Output::Connect { to, hello: hello.unwrap_or_else(|| self.hello()) }
                }
                member::Output::Disconnect { connection } => Output::Disconnect { connection },
            });
        }
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        match self.changes.poll_output() {
            Some(ChangeOutput::Read(name)) => {
                let brought = self.models.brought(&name).cloned();
                return Some(Output::ReadModel { name, brought });
            }
            Some(ChangeOutput::Ended(change, result)) => return Some(Output::ModelChanged { change, result }),
            None => {}
        }
        if let Some((request, result)) = self.tasks.poll_reply() {
            return Some(Output::Reply { request, result });
        }
        self.membership.poll_frame().map(|(connection, frame)| Output::Send { connection, frame })
    }

    fn on_frame(&mut self, now: Timestamp, connection: ConnectionId, frame: &[u8]) {
        if self.links.contains_key(&connection) {
            tracing::warn!("a backend sent a message, which only a scheduler does; its link is closed");
            self.outputs.push_back(Output::Disconnect { connection });
            return;
        }
        let Some(index) = self.membership.iter().position(|session| session.hears(connection)) else { return };
        self.membership.handle_heard(index);
        for message in read_frame::<SchedulerToFrontend>(frame) {
            // A message can end the session; what follows in the frame is then void.
            if !self.membership[index].hears(connection) {
                return;
            }
            match message {
                Ok(message) => self.on_message(now, index, connection, message),
                Err(error) => self.leave(now, index, &error.to_string()),
            }
        }
    }

    /// What any scheduler may say; the rest counts from the primary only.
    fn on_message(&mut self, now: Timestamp, index: usize, connection: ConnectionId, message: SchedulerToFrontend) {
        let is_primary = self.primary() == Some(index);
        match message {
            SchedulerToFrontend::Clock(reply) => {
                self.membership.handle_clock(now, index, reply);
            }
            SchedulerToFrontend::Takeover { epoch } => self.on_takeover(now, index, epoch),
            SchedulerToFrontend::AskPrimary => self.on_asked(now, index),
            SchedulerToFrontend::PageEnd => self.post(index, &FrontendToControl::PageRead),
            SchedulerToFrontend::Load(load) => self.membership[index].word.load = *load,
            SchedulerToFrontend::RequestTimes { model, times } => {
                self.membership[index].word.handle_request_times(model, *times);
            }
            SchedulerToFrontend::Leaving => {
                tracing::info!("scheduler {index} is about to end; what it has is finished");
                self.membership[index].word.leaves = true;
            }
            SchedulerToFrontend::Model { model_thread, .. }
                if self.membership[index].threads().all(|thread| thread != model_thread) =>
            {
                let thread = model_thread.0;
                let reason = format!("a model is said to belong to ModelThread {thread}, which is none of its own");
                self.leave(now, index, &reason);
            }
            SchedulerToFrontend::Model {
                model,
                name,
                version,
                gpus,
                least_latency,
                batching,
                network,
                model_thread,
            } => {
                let offer = Offer { id: model, model_thread, gpus, least_latency, batching, network };
                if is_primary {
                    self.on_offer(&name, &version, offer);
                } else {
                    self.membership[index].word.spoken.handle_offer(&name, &version, offer);
                }
            }
            SchedulerToFrontend::ModelState { name, state, loads, brought } if is_primary => {
                if self.models.handle_state(&name, (state, loads), brought) {
                    self.changes.handle_loaded(&name);
                }
            }
            SchedulerToFrontend::ModelState { name, state, loads, brought } => {
                self.membership[index].word.spoken.handle_state(&name, (state, loads), brought);
            }
            SchedulerToFrontend::NotLoaded { name, version, reason } if is_primary => {
                self.models.handle_not_loaded(name, version, reason);
            }
            SchedulerToFrontend::NotLoaded { name, version, reason } => {
                self.membership[index].word.spoken.handle_not_loaded(name, version, reason);
            }
            SchedulerToFrontend::Dropped { .. }
            | SchedulerToFrontend::Answered { .. }
            | SchedulerToFrontend::Drain { .. }
            | SchedulerToFrontend::Fence { .. }
            | SchedulerToFrontend::ModelChanged { .. } => {
                if is_primary {
                    self.on_order(now, index, connection, message);
                }
            }
        }
    }

    /// What only the primary may say.
    fn on_order(&mut self, now: Timestamp, index: usize, connection: ConnectionId, message: SchedulerToFrontend) {
        match message {
            SchedulerToFrontend::Drain { is_drained } => self.on_drain(is_drained),
            SchedulerToFrontend::Dropped { task, reason } => self.tasks.handle_dropped(now, task, reason),
            SchedulerToFrontend::Answered { tasks, .. } if tasks.len() > ANSWERED_TASKS_MAX => {
                let reason = format!("{} tasks are said to be answered, at most {ANSWERED_TASKS_MAX} fit", tasks.len());
                self.leave(now, index, &reason);
            }
            SchedulerToFrontend::Answered { backend, tasks } => self.tasks.handle_claimed(now, backend, &tasks),
            SchedulerToFrontend::Fence { tasks, .. } if tasks.len() > FENCED_TASKS_MAX => {
                let reason = format!("a fence asks about {} tasks, at most {FENCED_TASKS_MAX} fit", tasks.len());
                self.leave(now, index, &reason);
            }
            SchedulerToFrontend::Fence { backend, link, tasks } => self.on_fence(connection, (backend, link), tasks),
            SchedulerToFrontend::ModelChanged { change, mut refused } => {
                if let Some(reason) = &mut refused {
                    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
                }
                self.changes.handle_changed(change, refused);
            }
            other => unreachable!("{other:?} is what anybody may say"),
        }
    }

    fn on_offer(&mut self, name: &str, version: &str, offer: Offer) {
        if self.models.handle_offer(name, version, offer) {
            let Offer { gpus, least_latency, .. } = offer;
            let text = format_args!("model '{name}' version {version}: {gpus} GPUs, at least {least_latency}");
            self.told.offered.note(text);
        } else {
            let (name, version) = (excerpt(name), excerpt(version));
            self.told.lacking.note(format_args!("model '{name}' version '{version}'"));
        }
    }

    /// What failed on one link is no reason to cut off a newer one.
    fn on_fence(&mut self, connection: ConnectionId, (backend, up_to): (BackendId, LinkId), tasks: Vec<TaskId>) {
        if backend == BackendId::NOBODY {
            tracing::info!("{} tasks are asked about", tasks.len());
            self.fences.push(Fence { connection: Some(connection), backend, tasks, links: Vec::new() });
            return;
        }
        let (id, count) = (backend.0, tasks.len());
        match up_to {
            LinkId::NONE => self.told.doubted.note(format_args!("{count}, which backend {id} has given back")),
            _ => self.told.doubted.note(format_args!("{count} of backend {id}, which is fenced off")),
        }
        self.fence(Some(connection), (backend, up_to), tasks);
    }

    /// A backend says that it has answered these tasks, and that is not so. It may still write what it likes: its link
    /// ends for good, and their slots are free once it is down.
    fn on_not_written(&mut self, backend: BackendId, tasks: Vec<TaskId>) {
        Wait::Written.note_reached();
        let count = tasks.len();
        tracing::warn!(
            "backend {} says that it has answered {count} tasks, and no answer came: it is not taken any more",
            backend.0
        );
        self.fence(None, (backend, LinkId::ALL), tasks);
        if let Some(primary) = self.primary() {
            self.post(primary, &FrontendToControl::Refuses { backend });
        }
    }

    /// Cuts off a backend's links up to this one.
    fn fence(&mut self, connection: Option<ConnectionId>, (backend, up_to): (BackendId, LinkId), tasks: Vec<TaskId>) {
        let is_meant = |&(other, link): &(BackendId, LinkId)| other == backend && link <= up_to;
        let links: Vec<ConnectionId> =
            self.links.iter().filter(|(_, link)| is_meant(link)).map(|(connection, _)| *connection).collect();
        let fenced = self.fenced.entry(backend).or_insert(up_to);
        *fenced = up_to.max(*fenced);
        if self.fenced.len() > FENCED_MAX {
            self.fenced.pop_first();
        }
        self.outputs.extend(links.iter().map(|&connection| Output::Disconnect { connection }));
        self.fences.push(Fence { connection, backend, tasks, links });
    }

    fn on_incoming(&mut self, connection: ConnectionId, hello: &[u8]) {
        let Ok(hello) = wincode::deserialize_exact::<LinkHello>(hello) else {
            self.refuse(connection, NO_LINK_HELLO);
            return;
        };
        // Ids and epochs are told to those alone that a scheduler has sent.
        if hello.pass != LinkPass::of(self.token(), hello.backend) {
            self.refuse(connection, "pass: found none of this frontend, expected the one that a scheduler gave");
            return;
        }
        if self.membership.awaits_primary() && self.early.len() < self.config.links_max {
            self.early.push_back((connection, hello));
        } else {
            self.on_hello(connection, hello);
        }
    }

    fn on_hello(&mut self, connection: ConnectionId, hello: LinkHello) {
        let Some(FrontendId(id)) = self.frontend().filter(|_| self.membership.has_obeyed()) else {
            self.refuse(connection, NO_SCHEDULER);
            return;
        };
        if hello.frontend.0 != id {
            self.refuse(connection, &format!("found frontend {}, expected {id}", hello.frontend.0));
            return;
        }
        let epoch = self.membership.obeys().epoch;
        if hello.epoch != epoch {
            self.refuse(connection, &format!("obeys epoch {}, expected {epoch}", hello.epoch));
            return;
        }
        if self.links.len() >= self.config.links_max {
            self.refuse(connection, &format!("links_max: {} backends are linked already", self.links.len()));
            return;
        }
        if self.fenced.get(&hello.backend).is_some_and(|&fenced| hello.link <= fenced) {
            self.refuse(connection, "this link has been fenced off");
            return;
        }
        // It noticed before us that its former link is broken.
        let former = self.links.iter().filter(|(_, (backend, _))| *backend == hello.backend);
        self.outputs.extend(former.map(|(&connection, _)| Output::Disconnect { connection }));
        self.models.renew_loads();
        self.links.insert(connection, (hello.backend, hello.link));
        self.outputs.push_back(Output::Accept { connection, welcome: self.config.arena.clone() });
    }

    fn refuse(&mut self, connection: ConnectionId, reason: &str) {
        tracing::warn!("a backend is refused: {reason}");
        self.outputs.push_back(Output::Refuse { connection, reason: reason.to_owned() });
    }

    fn on_disconnected(&mut self, now: Timestamp, connection: ConnectionId, reason: &str) {
        if let Some(index) = self.membership.handle_disconnected(connection) {
            self.leave(now, index, reason);
            return;
        }
        self.early.retain(|(early, _)| *early != connection);
        if let Some((BackendId(backend), _)) = self.links.remove(&connection) {
            tracing::info!("the link of backend {backend} is down: {reason}");
        }
        self.fences.iter_mut().for_each(|fence| fence.links.retain(|link| *link != connection));
    }

    /// The next fence that can be confirmed. Who has asked twice is answered in that order: it takes one answer for the
    /// other, or takes the last one for the end of all.
    fn take_fence(&mut self) -> Option<Fence> {
        let mut waiting = BTreeSet::new();
        let index = self.fences.iter().position(|fence| {
            let is_next = fence.links.is_empty() && !waiting.contains(&fence.connection);
            waiting.insert(fence.connection);
            is_next
        })?;
        Some(self.fences.remove(index))
    }

    /// Does what waited for links to be down.
    fn settle(&mut self, now: Timestamp) {
        self.told.settle(now);
        if self.is_ending && self.links.is_empty() {
            self.begin_life(now);
        }
        self.answer_questions();
        while let Some(fence) = self.take_fence() {
            let Fence { connection, backend, tasks, .. } = fence;
            let Some(connection) = connection else {
                self.tasks.handle_not_written(backend, &tasks);
                continue;
            };
            let fenced = FrontendToModelThread::Fenced { backend, unanswered: self.tasks.handle_fenced(tasks) };
            // Only the primary's fences are kept.
            if let Some(primary) = self.primary() {
                self.membership[primary]
                    .push_back(connection, &fenced)
                    .expect("a fence is no longer than its question");
            }
        }
    }
}

#[cfg(test)]
mod tests;
