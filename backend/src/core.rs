//! Step 7, Step 8, Step 9.
//! The backend as a state machine, for one life under one name. It takes transport events, executions
//! and loads that have ended, and the time; it gives what the driver is to do. It does no IO and reads no clock.
//!
//! It connects to each scheduler of a list, is welcomed under a name, and connects to the scheduler's ModelThreads if
//! these have connections of their own. One of the schedulers is the primary, whom it obeys: frontends are linked once
//! that one's clock is known, and its plans are run. What a scheduler or a frontend says is checked: a scheduler that
//! breaks the protocol, or ends, is lost. If no other becomes the primary soon this life ends with a reason, and the
//! driver drops all connections and begins another with memory of its own.
//!
//! Instants that go in and out are on this process's clock, but for those of executions, which are on the scheduler's.
//! All schedulers that a life obeys keep the same clock.

mod execution;
mod hosting;
mod leaving;
mod measuring;
mod offers;
mod primary;
mod transfers;
mod trials;
mod unmeasured;
mod watchdog;
mod weights;
mod word;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Weak},
};

use member::{Destination, Membership, Reader, encode, excerpt};
use proto::{
    BackendId, Claim, FrontendId, LoadId, ModelId, ModelThreadId, PlanId, Span, TaskId, Timestamp, Wait,
    backend_to_frontend::{AnswerHeader, LinkHello, LinkWelcome},
    backend_to_scheduler::{BackendToControl, BackendToModelThread},
    brought::{Brought, CONFIG_BYTES_MAX},
    clock::ClockOffset,
    frame::read_frame,
    frontend_to_scheduler::NAME_BYTES_MAX,
    hello::Member,
    scheduler_to_backend::{BatchPlan, SchedulerToBackend},
};
use repository::Refused;
use transport::{Address, ConnectionId, DisconnectReason, Event, Transfer};

use crate::{
    executor::{Executor, Loaded},
    links::{Broken, LinkAction, Links, Target},
    memory::LoadOrder,
    staging::{ModelShape, Place, Staging},
    worker::{self, Action, Worker},
};
use hosting::Hosting;
use leaving::Leaving;
use primary::Inheritance;
pub use primary::Kept;
use watchdog::{Verdict, Watchdog};
use weights::Memories;
use word::Word;

/// A batch is handed to its GPU's thread this much ahead: two threads wake up one after the other, each in 50 to 100 us
/// on a small virtual machine.
pub(crate) const HANDOVER: Span = Span::from_micros(250);
/// A process that has left goes on for so long: a scheduler to which one connection ends closes the others, and what is
/// on its way there would be lost, as if plans had not ended.
pub const LAST_WORDS_SPAN: Span = Span::from_millis(20);
/// How long the report that a batch is answered waits for another to go with: nobody plans by it.
const ANSWERED_WAITS: Span = Span::from_millis(1);

/// What a backend's core must know.
#[derive(Debug, Clone)]
pub struct CoreConfig {
    /// How operators call this backend.
    pub name: String,
    /// The schedulers' bootstrap listeners; at least one.
    pub schedulers: Vec<Address>,
    /// Drawn at random for this life: no other member that claims its name knows it.
    pub token: u64,
    /// Where what lies in the staging memory, for as many GPUs as are offered.
    pub staging: Staging,
    /// The staging memory, as registered.
    pub lkey: u32,
    /// GPUs with memory of their own that inputs are READ into, as registered: of models that take their inputs from
    /// there ([`OnGpus::takes_inputs_ahead`](crate::executor::OnGpus::takes_inputs_ahead)).
    pub landings: BTreeMap<usize, u32>,
    /// Pages for weights in each GPU's memory; `None` if all weights are there all the time.
    pub memory_pages: Option<u32>,
    /// Pages for weights in host memory, if that is bounded; as many as what all GPUs load at once takes, or more.
    pub host_pages: Option<u32>,
    /// What it hosts is the scheduler's to choose.
    pub is_auto: bool,
}

/// Whom a connection is to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// A scheduler, by its index in the list, where members join.
    Scheduler(usize),
    /// One of its ModelThreads.
    ModelThread(usize, ModelThreadId),
    /// A frontend.
    Frontend(FrontendId),
}

/// What the driver is to do.
#[derive(Debug)]
pub enum Output {
    /// Connect, then call [`Core::handle_connecting`].
    Connect {
        /// Whom to.
        peer: Peer,
        /// Its bootstrap listener.
        to: Address,
        /// An encoded [`SchedulerHello`](proto::hello::SchedulerHello) or [`LinkHello`].
        hello: Vec<u8>,
    },
    /// Disconnect. No event need follow.
    Disconnect {
        /// The connection.
        connection: ConnectionId,
    },
    /// Send a frame; if that cannot be done, call [`Core::handle_send_failed`].
    Send {
        /// The connection.
        connection: ConnectionId,
        /// Encoded messages.
        frame: Vec<u8>,
    },
    /// Step 7: READ a task's input; if that cannot be posted, call [`Core::handle_read_failed`].
    Read {
        /// The connection.
        connection: ConnectionId,
        /// The first of those whose inputs are read.
        task: TaskId,
        /// From where to where.
        transfer: Transfer,
    },
    /// The same for the guards of some tasks' slots. Once it is done, [`Output::LookAtGuards`] follows.
    ReadGuards {
        /// The connection.
        connection: ConnectionId,
        /// The first of those whose guards are read.
        task: TaskId,
        /// From where to where.
        transfer: Transfer,
    },
    /// Guards have been read: call [`Core::handle_guards`] with what lies there.
    LookAtGuards {
        /// Comes back with the words.
        token: u64,
        /// Where the first one lies in staging memory.
        offset: usize,
        /// How many, one after another.
        guards: usize,
    },
    /// Step 9: put the header and the text, if any, at the start of the transfer's local end, one after the other; then
    /// WRITE_WITH_IMM all of it. If that cannot be posted, call [`Core::handle_write_failed`].
    Write {
        /// The connection.
        connection: ConnectionId,
        /// From where to where.
        transfer: Transfer,
        /// Packed slot, of a run its first, and attempt.
        immediate: u32,
        /// What stands in front of the outputs.
        header: AnswerHeader,
        /// Why there are no outputs, in words.
        text: Option<String>,
    },
    /// Step 8: execute a batch, then call [`Core::handle_executed`]. A GPU is given [`worker::HANDED_MAX`] at most, and
    /// executes them one after another in this order.
    Execute {
        /// The GPU's index.
        gpu: usize,
        /// What to run when.
        job: Job,
    },
    /// Take back the batch that a GPU was given last, unless it executes or is about to: then call
    /// [`Core::handle_taken_back`] at once, and it is not executed. Otherwise nothing comes of this.
    TakeBack {
        /// The GPU's index.
        gpu: usize,
    },
    /// The inputs of a batch that is about to be next are all here: they can go to the GPU while it runs another one.
    /// Nothing need come of it.
    SendAhead {
        /// The GPU's index.
        gpu: usize,
        /// As in [`Job::ahead`].
        number: u64,
        /// What runs it.
        executor: Arc<dyn Executor>,
        /// All its tasks, in order.
        runs: Vec<Run>,
    },
    /// What a GPU executes does not come back: end it if that can be done. Then [`Core::handle_executed`] as ever.
    Interrupt {
        /// The GPU's index.
        gpu: usize,
    },
    /// Copy a model's weights from host memory into a GPU's, then call [`Core::handle_copied`]. A GPU is given one at
    /// a time.
    CopyWeights {
        /// The GPU's index.
        gpu: usize,
        /// The model, by our name, as in [`Job::model`].
        model: ModelId,
        /// What runs it.
        executor: Arc<dyn Executor>,
        /// How long that should take.
        takes: Span,
        /// If the weights are not in host memory: read them from disk before, which should take so long.
        read: Option<Span>,
    },
    /// A model is neither in host memory nor in any GPU's: call [`Executor::release`].
    ReleaseWeights {
        /// What runs it.
        executor: Arc<dyn Executor>,
    },
    /// Weights that were copied make room: no batch needs them any more.
    FreeWeights {
        /// The GPU's index.
        gpu: usize,
        /// The model.
        model: ModelId,
        /// What ran it; `None` if that has gone with all that it held.
        executor: Option<Arc<dyn Executor>>,
    },
    /// What [`Core::handle_trial`] waits for can begin, or is put off.
    Try {
        /// Whether it can begin.
        has_turn: bool,
    },
    /// Measure what larger batches of a model take, while nothing else runs, then call [`Core::handle_measured`]. There
    /// is one at a time.
    Measure {
        /// The model, by our name.
        model: ModelId,
        /// What is hosted under it, unless that has gone.
        loaded: Weak<Loaded>,
    },
    /// Load a model, then call [`Core::handle_loaded`].
    Load {
        /// Comes back with the result.
        load: LoadId,
        /// The model's name in the repository.
        name: String,
        /// What is to be loaded instead of what the repository has.
        brought: Option<Brought>,
        /// On all GPUs, as a guest, where the configuration places it on none.
        is_placed: bool,
    },
}

/// A batch to execute. Whoever executes it looks at the clock: if `latest` has passed, it does not start.
#[derive(Clone)]
pub struct Job {
    /// The model, by our name.
    pub model: ModelId,
    /// What runs it.
    pub executor: Arc<dyn Executor>,
    /// Sizes of a task's inputs and outputs.
    pub shape: ModelShape,
    /// All tasks, in order.
    pub runs: Vec<Run>,
    /// It must not start earlier than this, on the scheduler's clock.
    pub exec_at: Timestamp,
    /// It must not start later than this, on the scheduler's clock.
    pub latest: Timestamp,
    /// A task that is to be run again when the batch has ended, alone, if nothing else waits for the GPU: its place
    /// among all, and the plan's name. Then [`Core::handle_ran_alone`] is called.
    pub sample: Option<(usize, PlanId)>,
    /// One estimate for all instants of a batch: with a better one in between, it could seem to start outside its
    /// window.
    pub offset: ClockOffset,
    /// Its inputs went ahead under this number ([`Output::SendAhead`]).
    pub ahead: Option<u64>,
}

/// Tasks whose inputs lie one after another in staging memory, and whose outputs go there in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// How many.
    pub tasks: usize,
    /// Where the first one's input lies: in staging memory, or in the GPU's own if it was READ into that.
    pub input_offset: usize,
    /// Bytes of each one's input.
    pub input_bytes: usize,
    /// Where the first one's output goes.
    pub output_offset: usize,
}

impl Job {
    /// Tasks in all runs.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.runs.iter().map(|run| run.tasks).sum()
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (tasks, exec_at, latest) = (self.tasks(), self.exec_at, self.latest);
        write!(f, "{tasks} tasks to start in [{exec_at:?}, {latest:?}]")
    }
}

/// The backend.
pub struct Core {
    config: CoreConfig,
    /// Sessions with all schedulers of the list, and what each has said in its present one.
    membership: Membership<Word>,
    inheritance: Inheritance,
    /// An operator has drained us, by a primary's word.
    is_drained: bool,
    /// The sub-cluster that a primary has put us in.
    sub_cluster: Option<u16>,
    hosting: Hosting,
    /// Models that could not be loaded at the start, and have not been since.
    not_loaded: Vec<Refused>,
    /// What clients can have the log say by having models loaded and unloaded.
    told: hosting::Told,
    memories: Memories,
    links: Links,
    /// The latest instant that workers were told, on the scheduler's clock: a better estimate must not turn it back.
    scheduler_now: Timestamp,
    watchdog: Watchdog,
    trial: Option<Trial>,
    /// If we are about to leave.
    leaving: Option<Leaving>,
    outputs: VecDeque<Output>,
    /// Why this life is over.
    ended: Option<String>,
}

impl Core {
    /// A backend that hosts `models`, about to connect.
    ///
    /// # Panics
    /// If there is no scheduler.
    #[must_use]
    pub fn new(config: CoreConfig, models: Vec<Arc<Loaded>>) -> Self {
        let gpus = config.staging.gpus();
        let hosting = Hosting::new(gpus, models);
        let hosted = hosting.models.iter().map(|(&id, loaded)| (id, &**loaded));
        let memories = Memories::new(gpus, (config.memory_pages, config.host_pages), hosted);
        Self {
            membership: Membership::new(config.schedulers.len()),
            config,
            inheritance: Inheritance::default(),
            is_drained: false,
            sub_cluster: None,
            hosting,
            not_loaded: Vec::new(),
            told: hosting::Told::default(),
            memories,
            links: Links::default(),
            scheduler_now: Timestamp::PAST,
            watchdog: Watchdog::new(gpus),
            trial: None,
            leaving: None,
            outputs: VecDeque::new(),
            ended: None,
        }
    }

    /// Whether there is a scheduler that is obeyed now.
    #[must_use]
    pub fn has_primary(&self) -> bool {
        self.primary().is_some()
    }

    /// A GPU whose executor, or whose way to its memory, was given up and has not come back.
    #[must_use]
    pub fn hanging_gpu(&self) -> Option<usize> {
        self.watchdog.hanging()
    }

    /// Models that could not be loaded: schedulers are told when they take us in, so that clients can be told why.
    pub fn handle_not_loaded(&mut self, refused: Vec<Refused>) {
        self.not_loaded = refused;
    }

    /// Why this life is over, once it is; there is nothing more to do then.
    #[must_use]
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Whether there has been a primary in this life: it had taken us in, and we were connected to its ModelThreads.
    #[must_use]
    pub fn has_joined(&self) -> bool {
        self.membership.has_obeyed()
    }

    /// What was claimed by the scheduler that we obey; `None` if there is none now.
    #[must_use]
    pub fn obeys(&self) -> Option<Claim> {
        self.primary().map(|_| self.membership.obeys())
    }

    /// The schedulers' name for us, once we know it.
    #[must_use]
    pub fn backend(&self) -> Option<BackendId> {
        let Some(Member::Backend(backend)) = self.membership.name() else { return None };
        Some(backend)
    }

    /// Plans that have not ended: they wait, execute, or have answers on their way.
    #[must_use]
    pub fn plans(&self) -> usize {
        self.hosting.workers.iter().map(Worker::plans).sum()
    }

    /// The driver did what [`Output::Connect`] asked for.
    pub fn handle_connecting(&mut self, peer: Peer, connection: ConnectionId) {
        match peer {
            Peer::Scheduler(index) => self.membership.handle_connecting(index, Reader::Scheduler, connection),
            Peer::ModelThread(index, id) => {
                self.membership.handle_connecting(index, Reader::ModelThread(id), connection);
            }
            Peer::Frontend(frontend) => self.links.handle_opened(frontend, connection),
        }
    }

    /// Takes in what happened on the transport.
    pub fn handle_event(&mut self, now: Timestamp, event: Event) {
        if self.ended.is_some() {
            return;
        }
        match event {
            Event::Connected { connection, welcome } => match self.membership.session_of(connection) {
                Some(_) => self.on_up(now, connection, &welcome),
                None => self.on_link_up(connection, &welcome),
            },
            Event::Message { connection, frame } => match self.membership.session_of(connection) {
                Some(index) => self.on_frame(now, index, &frame),
                None => self.on_stray(connection),
            },
            Event::Disconnected { connection, reason } => match self.membership.handle_disconnected(connection) {
                Some(index) => self.lose(now, index, reason.text),
                None => self.on_link_broken(now, connection, &reason),
            },
            Event::ReadDone { token, result, .. } => self.on_fetched(now, token, result.is_ok()),
            Event::WriteDone { token, result, .. } => self.on_pushed(now, token, result.is_ok()),
            Event::Immediate { connection, .. } => self.on_stray(connection),
            // We do not listen, and no peer may reach our memory.
            Event::Incoming { .. } | Event::KeyChanged { .. } => {}
        }
        self.settle(now);
    }

    /// A READ could not be posted.
    pub fn handle_read_failed(&mut self, now: Timestamp, token: u64) {
        self.on_fetched(now, token, false);
        self.settle(now);
    }

    /// What guards say, as [`Output::LookAtGuards`] asked for.
    pub fn handle_guards(&mut self, now: Timestamp, token: u64, words: &[u64]) {
        let (scheduler_now, place) = (self.scheduler_now(now), Place::from_token(token));
        if let Some(worker) = self.worker(place.gpu) {
            worker.handle_guards(scheduler_now, place, words);
        }
        self.settle(now);
    }

    /// A WRITE_WITH_IMM could not be posted.
    pub fn handle_write_failed(&mut self, now: Timestamp, token: u64) {
        self.on_pushed(now, token, false);
        self.settle(now);
    }

    /// A frame could not be sent. A report that is lost would leave tasks without an end; a scheduler that has lost us
    /// finds out what has become of them.
    pub fn handle_send_failed(&mut self, now: Timestamp, connection: ConnectionId, reason: &str) {
        if let Some(index) = self.membership.session_of(connection) {
            self.lose(now, index, format!("a report cannot be sent to the scheduler: {reason}"));
        }
    }

    /// Runs every timer that is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.ended.is_some() {
            return;
        }
        let scheduler_now = self.scheduler_now(now);
        self.links.handle_timeout(now);
        self.watchdog.handle_timeout(scheduler_now);
        self.memories.handle_timeout(scheduler_now);
        let due = self.hosting.workers.iter_mut().filter(|worker| worker.poll_timeout() <= scheduler_now);
        due.for_each(|worker| worker.handle_timeout(scheduler_now));
        self.on_time(now);
        self.settle(now);
    }

    /// When [`Self::handle_timeout`] must be called; [`Timestamp::NEVER`] if not at all.
    #[must_use]
    pub fn poll_timeout(&self) -> Timestamp {
        if self.ended.is_some() {
            return Timestamp::NEVER;
        }
        let workers = self.hosting.workers.iter().map(Worker::poll_timeout);
        let workers = workers.fold(self.watchdog.poll_timeout(), Timestamp::min).min(self.memories.poll_timeout());
        let workers = self.membership.clock().to_local(workers).unwrap_or(workers);
        let tells_at = if self.primary().is_some() { self.memories.tells_at() } else { Timestamp::NEVER };
        let members = self.membership.poll_timeout().min(self.inheritance.until);
        workers.min(self.links.poll_timeout()).min(members).min(tells_at).min(self.trial_timeout())
    }

    /// What the driver is to do next. All messages since the last `None` are packed into as few frames as hold them.
    pub fn poll_output(&mut self) -> Option<Output> {
        if self.ended.is_some() {
            return None;
        }
        // Who is cut off is so before anybody else is told.
        if let Some(output) = self.membership.poll_output() {
            return Some(self.on_wanted(output));
        }
        let frame = |(connection, frame)| Output::Send { connection, frame };
        self.outputs.pop_front().or_else(|| self.membership.poll_frame().map(frame))
    }

    /// What sessions want done.
    fn on_wanted(&mut self, output: member::Output) -> Output {
        let (to, hello) = match output {
            member::Output::Connect { to, hello } => (to, hello),
            member::Output::Disconnect { connection } => return Output::Disconnect { connection },
        };
        let index = to.scheduler();
        let hello = hello.unwrap_or_else(|| self.hello(index));
        match to {
            Destination::Scheduler(_) => {
                Output::Connect { peer: Peer::Scheduler(index), to: self.config.schedulers[index].clone(), hello }
            }
            Destination::ModelThread { id, address, .. } => {
                Output::Connect { peer: Peer::ModelThread(index, id), to: address.into(), hello }
            }
        }
    }

    fn on_up(&mut self, now: Timestamp, connection: ConnectionId, welcome: &[u8]) {
        match self.membership.handle_connected(connection) {
            Some((index, Reader::Scheduler)) => self.on_welcome(now, index, welcome),
            Some((index, Reader::ModelThread(id))) => {
                tracing::info!(scheduler = %self.config.schedulers[index], model_thread = id.0, "connected");
                self.on_claim(now, index);
            }
            None => {}
        }
    }

    fn on_frame(&mut self, now: Timestamp, index: usize, frame: &[u8]) {
        self.membership.handle_heard(index);
        for message in read_frame::<SchedulerToBackend>(frame) {
            // What follows a message that loses the session does not count.
            let is_over = self.ended.is_some() || self.membership[index].is_waiting();
            match message {
                _ if is_over => return,
                _ if !self.membership[index].is_welcomed() => {
                    self.lose(now, index, "the scheduler spoke before its welcome".into());
                }
                Ok(message) => self.on_message(now, index, message),
                Err(error) => self.lose(now, index, error.to_string()),
            }
        }
    }

    /// What every scheduler can say; the rest is the primary's.
    fn on_message(&mut self, now: Timestamp, index: usize, message: SchedulerToBackend) {
        let is_primary = self.primary() == Some(index);
        match message {
            SchedulerToBackend::Clock(reply) => self.on_clock(now, index, reply),
            SchedulerToBackend::FrontendJoined { frontend, link_address, pass } => match link_address.parse() {
                Ok(address) => self.on_frontend(now, index, frontend, Target { address, pass }),
                Err(_) => {
                    let frontend = frontend.0;
                    let link_address = excerpt(&link_address);
                    tracing::warn!(frontend, link_address, "the frontend's address is not ip:port; it is not served");
                }
            },
            SchedulerToBackend::FrontendLeft { frontend } => {
                self.membership[index].word.frontends.remove(&frontend);
                if is_primary {
                    self.leave_frontend(now, frontend);
                }
            }
            SchedulerToBackend::Takeover { epoch } => {
                if self.membership.handle_takeover(index, epoch) {
                    self.on_claim(now, index);
                }
            }
            SchedulerToBackend::AskPrimary => self.on_question(now, index),
            SchedulerToBackend::Offered { models } => self.on_offered(now, index, models),
            message if is_primary => self.on_order(now, index, message),
            message => self.on_early(index, message),
        }
    }

    /// What only the primary can say.
    fn on_order(&mut self, now: Timestamp, index: usize, message: SchedulerToBackend) {
        match message {
            SchedulerToBackend::Load { brought: Some(Brought { config, .. }), .. }
                if config.len() > CONFIG_BYTES_MAX =>
            {
                let found = config.len();
                let reason = format!("a configuration has {found} bytes, expected at most {CONFIG_BYTES_MAX}");
                self.lose(now, index, reason);
            }
            SchedulerToBackend::Load { name, .. } if name.len() > NAME_BYTES_MAX => {
                self.lose(now, index, format!("it wants a model loaded whose name has {} bytes", name.len()));
            }
            SchedulerToBackend::Load { load, name, brought, is_placed } => {
                self.on_load(load, name, brought, is_placed);
            }
            SchedulerToBackend::Host { load, version, model } => self.on_host(now, index, (load, &version), model),
            SchedulerToBackend::Discard { load } => self.on_discard(load),
            SchedulerToBackend::Unload { model } => self.on_unload(index, model),
            SchedulerToBackend::Cancel { plan, task } => {
                let scheduler_now = self.scheduler_now(now);
                let workers = &mut self.hosting.workers;
                workers.iter_mut().for_each(|worker| worker.handle_cancel(scheduler_now, plan, task));
            }
            SchedulerToBackend::Drain { is_drained } => self.on_drain(is_drained),
            SchedulerToBackend::Assign { sub_cluster } => self.on_assign(sub_cluster),
            SchedulerToBackend::Dismissed => self.on_dismissed(),
            SchedulerToBackend::AskResident { gpu_index, gpu } => self.on_ask_resident(now, index, gpu_index, gpu),
            SchedulerToBackend::LoadWeights { gpu, model: theirs, earliest, latest } => {
                self.on_load_weights(now, index, LoadOrder { gpu, theirs, model: None, earliest, latest });
            }
            SchedulerToBackend::UnloadWeights { gpu, model } => self.on_unload_weights(now, index, (gpu, model)),
            SchedulerToBackend::Plan(plan) => self.on_plan(now, index, plan),
            _ => unreachable!("every scheduler can say it"),
        }
    }

    fn on_plan(&mut self, now: Timestamp, index: usize, mut plan: BatchPlan) {
        let (id, thread) = (plan.plan.0, plan.plan.model_thread());
        let session = &self.membership[index];
        if !session.is_up(Reader::ModelThread(thread)) {
            let text = format!("plan {id} is of ModelThread {}, which is not connected", thread.0);
            return self.lose(now, index, text);
        }
        let ours = session.word.models.get(&plan.model).copied();
        let scheduler_now = self.scheduler_now(now);
        let refuse = |core: &mut Self, plan: &BatchPlan, why: &str| {
            tracing::warn!(plan = id, gpu = plan.gpu_index, model = plan.model.0, "a plan names {why}");
            worker::refuse(scheduler_now, plan).into_iter().for_each(|report| core.report_to_thread(now, report));
        };
        let Some(ours) = ours else { return refuse(self, &plan, "a model that is not hosted") };
        let Some(worker) = self.worker(plan.gpu_index as usize) else {
            return refuse(self, &plan, "a GPU that was not offered");
        };
        plan.model = ours;
        if let Err(error) = worker.handle_plan(scheduler_now, plan) {
            tracing::warn!(plan = id, %error, "refused a plan");
        }
    }

    fn on_link_up(&mut self, connection: ConnectionId, welcome: &[u8]) {
        if !self.links.has(connection) {
            return self.outputs.push_back(Output::Disconnect { connection });
        }
        let Ok(welcome) = wincode::deserialize::<LinkWelcome>(welcome) else {
            tracing::warn!(?connection, "a frontend's welcome does not decode; do both sides run the same version?");
            return self.outputs.push_back(Output::Disconnect { connection });
        };
        let Some((frontend, link)) = self.links.handle_up(connection, welcome) else {
            return self.outputs.push_back(Output::Disconnect { connection });
        };
        tracing::info!(frontend = frontend.0, "linked");
        self.hosting.workers.iter_mut().for_each(|worker| worker.handle_linked(frontend, link));
        self.tell_all(&BackendToControl::Linked { frontend, link });
    }

    fn on_link_broken(&mut self, now: Timestamp, connection: ConnectionId, reason: &DisconnectReason) {
        match self.links.handle_broken(now, connection, reason.is_starved) {
            Some(Broken::Link(frontend)) => {
                tracing::warn!(frontend = frontend.0, %reason, "the link to a frontend broke");
                self.cut_off(now, frontend);
                self.tell_all(&BackendToControl::Unlinked { frontend });
            }
            Some(Broken::Attempt(frontend)) => {
                tracing::warn!(frontend = frontend.0, %reason, "a frontend cannot be reached; trying again");
            }
            None => {}
        }
    }

    /// Frontends say nothing on a link, and nobody writes our memory. What still comes on a connection that was closed
    /// does not count.
    fn on_stray(&mut self, connection: ConnectionId) {
        if !self.links.has(connection) {
            return;
        }
        tracing::warn!(?connection, "a frontend sent what no frontend sends; its link is closed");
        self.outputs.push_back(Output::Disconnect { connection });
    }

    fn cut_off(&mut self, now: Timestamp, frontend: FrontendId) {
        let scheduler_now = self.scheduler_now(now);
        let workers = &mut self.hosting.workers;
        workers.iter_mut().for_each(|worker| worker.handle_unlinked(scheduler_now, frontend));
    }

    fn on_fetched(&mut self, now: Timestamp, token: u64, arrived: bool) {
        let (scheduler_now, place) = (self.scheduler_now(now), Place::from_token(token));
        let Some(worker) = self.worker(place.gpu) else { return };
        match worker.reads_guards(place).filter(|_| arrived) {
            None => worker.handle_fetched(scheduler_now, place, arrived),
            Some((guards, model)) => {
                let offset = self.config.staging.input_offset(place, self.loaded(model).shape);
                self.outputs.push_back(Output::LookAtGuards { token, offset, guards });
            }
        }
    }

    fn on_pushed(&mut self, now: Timestamp, token: u64, arrived: bool) {
        let (scheduler_now, place) = (self.scheduler_now(now), Place::from_token(token));
        if let Some(worker) = self.worker(place.gpu) {
            worker.handle_pushed(scheduler_now, place, arrived);
        }
    }

    /// Turns what workers and links want into outputs and reports.
    fn settle(&mut self, now: Timestamp) {
        while let Some(verdict) = self.watchdog.poll_verdict() {
            self.on_verdict(now, verdict);
        }
        for gpu in 0..self.config.staging.gpus() {
            while let Some(action) = self.worker(gpu).and_then(Worker::poll_action) {
                self.perform(now, gpu, action);
            }
            self.send_ahead(gpu);
            self.hand_over_next(now, gpu);
        }
        while let Some(action) = self.links.poll_action() {
            self.perform_link(action);
        }
        self.release_models(now);
        self.told.settle(now);
        self.settle_weights(now);
        self.settle_measured();
        self.settle_trial(now);
        self.membership.handle_due(now);
        self.answer_questions();
    }

    fn perform(&mut self, now: Timestamp, gpu: usize, action: Action) {
        match action {
            Action::Fetch { place, tasks, model, task, input } => {
                let Some(read) = self.read((place, tasks), model, task, input) else {
                    return self.on_fetched(now, place.token(), false);
                };
                self.outputs.push_back(read);
            }
            Action::Guard { place, tasks, model, task, slot } => {
                let Some(read) = self.read_guards((place, tasks), model, task, slot) else {
                    return self.on_fetched(now, place.token(), false);
                };
                self.outputs.push_back(read);
            }
            Action::Push(push) => {
                let token = push.place.token();
                let Some(write) = self.write(push) else { return self.on_pushed(now, token, false) };
                self.outputs.push_back(write);
            }
            Action::Execute { .. } => self.execute(now, gpu, action),
            Action::TellWaited(frontend) => {
                let text = format_args!("its READs or WRITEs were waited for for {}", Wait::Input.bound());
                self.told.transfers.note(frontend, text);
            }
            Action::TakeBack => self.outputs.push_back(Output::TakeBack { gpu }),
            Action::Report(report) => self.report_to_thread(now, report),
        }
    }

    /// A GPU goes out of use before what it had is given up, so that nothing is planned there in between.
    fn on_verdict(&mut self, now: Timestamp, verdict: Verdict) {
        let (gpu, is_usable) = match verdict {
            Verdict::Hangs(gpu) => {
                tracing::error!(gpu, "the executor does not come back; its batch is given up");
                let scheduler_now = self.scheduler_now(now);
                self.outputs.push_back(Output::Interrupt { gpu });
                return self.worker(gpu).into_iter().for_each(|worker| worker.handle_hangs(scheduler_now));
            }
            Verdict::Unusable(gpu) => (gpu, false),
            Verdict::Usable(gpu) => (gpu, true),
        };
        tracing::warn!(gpu, is_usable, "whether the GPU can be used has changed");
        self.report(&BackendToControl::Usable { gpu_index: gpu as u32, is_usable });
    }

    fn perform_link(&mut self, action: LinkAction) {
        match action {
            LinkAction::Open { frontend, target: Target { address, pass }, link } => {
                // There are no links before there has been a primary.
                let Some(backend) = self.backend() else { return };
                let epoch = self.membership.obeys().epoch;
                let hello = encode(&LinkHello { backend, frontend, link, epoch, pass });
                self.outputs.push_back(Output::Connect { peer: Peer::Frontend(frontend), to: address.into(), hello });
            }
            LinkAction::Close { connection } => self.outputs.push_back(Output::Disconnect { connection }),
        }
    }

    /// What becomes of a plan is told to the ModelThread that made it. One that an earlier primary made is control's to
    /// pass on, unless there is but one ModelThread, which shares our connection.
    fn report_to_thread(&mut self, now: Timestamp, report: BackendToModelThread) {
        let Some(primary) = self.primary() else { return };
        let first = ModelThreadId(0);
        let session = &mut self.membership[primary];
        let thread = match report.plan().map_or(first, PlanId::model_thread) {
            ModelThreadId::INHERITED if session.has_own_threads() => {
                return self.report(&BackendToControl::Inherited(report));
            }
            ModelThreadId::INHERITED => first,
            thread => thread,
        };
        let may_wait = matches!(&report, BackendToModelThread::Answered { undelivered, .. } if undelivered.is_empty());
        let pushed = match may_wait {
            true => session.push_by(now + ANSWERED_WAITS, Reader::ModelThread(thread), &report),
            false => session.push(Reader::ModelThread(thread), &report),
        };
        if let Err(error) = pushed {
            self.end(error.to_string());
        }
    }

    /// Tells the primary. What an orphan would say is lost: the next primary is told what has not ended by then.
    fn report(&mut self, message: &BackendToControl) {
        if let Some(primary) = self.primary() {
            self.tell(primary, message);
        }
    }

    fn tell(&mut self, index: usize, message: &BackendToControl) {
        if let Err(error) = self.membership[index].push(Reader::Scheduler, message) {
            self.end(error.to_string());
        }
    }

    /// Tells every scheduler that has taken us in.
    fn tell_all(&mut self, message: &BackendToControl) {
        for index in 0..self.config.schedulers.len() {
            self.tell(index, message);
        }
    }

    fn end(&mut self, reason: String) {
        self.ended.get_or_insert(reason);
    }

    /// Now, on the scheduler's clock; never earlier than before. Until the scheduler has answered, our own: no plan can
    /// be for a frontend that is linked then.
    fn scheduler_now(&mut self, now: Timestamp) -> Timestamp {
        let Some(scheduler_now) = self.membership.clock().to_scheduler(now) else { return now };
        self.scheduler_now = self.scheduler_now.max(scheduler_now);
        self.scheduler_now
    }

    fn worker(&mut self, gpu: usize) -> Option<&mut Worker> {
        self.hosting.workers.get_mut(gpu)
    }

    /// A model that a batch names: it stays until its last batch is finished.
    fn loaded(&self, model: ModelId) -> &Arc<Loaded> {
        &self.hosting.models[&model]
    }
}

/// A trial that waits.
#[derive(Debug)]
pub(crate) struct Trial {
    gpus: Vec<usize>,
    takes: Span,
    /// When its wait is over, on this process's clock,
    patience_ends: Timestamp,
    /// and whether it is not made then.
    put_off: bool,
}

#[cfg(test)]
mod tests;
