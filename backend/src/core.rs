//! Steps 7 to 9: the backend as a state machine, for one life with one scheduler. It takes transport events, executions
//! and loads that have ended, and the time; it gives what the driver is to do. It does no IO and reads no clock.
//!
//! It connects, is welcomed under a name, and connects to the scheduler's ModelThreads if these have connections of
//! their own. Frontends are linked once the scheduler's clock is known. What the scheduler or a frontend says is
//! checked: a scheduler that breaks the protocol, or is lost, ends this life with a reason, and the driver drops all
//! connections and begins another with memory of its own.
//!
//! Instants that go in and out are on this process's clock, but for those of executions, which are on the scheduler's.

mod hosting;
mod routes;
mod transfers;
mod watchdog;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::SocketAddr,
    ops::Range,
    sync::Arc,
};

use proto::{
    BackendId, FrontendId, LoadId, ModelId, ModelThreadId, Span, TaskId, Timestamp,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, LinkHello, LinkWelcome},
    backend_to_scheduler::{BackendHello, BackendToScheduler},
    clock::{ClockOffset, ClockSync},
    frame::read_frame,
    frontend_to_scheduler::NAME_BYTES_MAX,
    hello::{Member, MemberHello, SchedulerHello},
    scheduler_to_backend::{BackendWelcome, BatchPlan, SchedulerToBackend},
};
use thiserror::Error;
use transport::{ConnectionId, Event, HELLO_BYTES_MAX, Transfer};
use wincode::SchemaWrite;

use crate::{
    executor::Executor,
    links::{Broken, LinkAction, Links},
    loaded::Loaded,
    staging::{ModelShape, Place, Staging},
    worker::{self, Action, Execution, Worker},
};
use routes::{Reader, Routes};
use watchdog::{Verdict, Watchdog};

/// A batch is handed to its GPU's thread this much ahead: two threads wake up one after the other, each in 50 to 100 us
/// on a small virtual machine.
const HANDOVER: Span = Span::from_micros(250);
/// What a backend's core must know.
#[derive(Debug, Clone, Copy)]
pub struct CoreConfig {
    /// The scheduler's bootstrap listener.
    pub scheduler: SocketAddr,
    /// Where what lies in the staging memory, for as many GPUs as are offered.
    pub staging: Staging,
    /// The staging memory, as registered.
    pub lkey: u32,
}

/// Whom a connection is to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// The scheduler, where members join.
    Scheduler,
    /// One of its ModelThreads.
    ModelThread(ModelThreadId),
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
        to: SocketAddr,
        /// An encoded [`SchedulerHello`] or [`LinkHello`].
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
    /// Step 8: execute a batch, then call [`Core::handle_executed`]. A GPU is given one at a time.
    Execute {
        /// The GPU's index.
        gpu: usize,
        /// What to run when.
        job: Job,
    },
    /// Load a model, then call [`Core::handle_loaded`].
    Load {
        /// Comes back with the result.
        load: LoadId,
        /// The model's name in the repository.
        name: String,
    },
}

/// A batch to execute. Whoever executes it looks at the clock: if `latest` has passed, it does not start.
#[derive(Clone)]
pub struct Job {
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
    /// One estimate for all instants of a batch: with a better one in between, it could seem to start outside its
    /// window.
    pub offset: ClockOffset,
}

/// Tasks whose inputs lie one after another in staging memory, and whose outputs go there in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// How many.
    pub tasks: usize,
    /// Where the first one's input lies.
    pub input_offset: usize,
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

/// What a backend offers does not fit its first message.
#[derive(Debug, PartialEq, Eq, Error)]
#[error(
    "{models} models with their latency profiles make a hello of {found} bytes, expected at most {HELLO_BYTES_MAX}; \
     load fewer models here"
)]
pub struct HelloTooLarge {
    models: usize,
    found: usize,
}

/// The backend.
pub struct Core {
    config: CoreConfig,
    /// What was hosted when this life began, in the order of the hello.
    models: Vec<Arc<Loaded>>,
    routes: Routes,
    joined: Option<Joined>,
    links: Links,
    clock: ClockSync,
    /// The latest instant that workers were told, on the scheduler's clock: a better estimate must not turn it back.
    scheduler_now: Timestamp,
    watchdog: Watchdog,
    /// ModelThreads that may still send plans, if we are about to leave.
    leaving: Option<usize>,
    outputs: VecDeque<Output>,
    /// Why this life is over.
    ended: Option<String>,
}

/// What exists once the scheduler has taken us in.
struct Joined {
    backend: BackendId,
    /// One for each GPU.
    workers: Vec<Worker>,
    /// What is hosted.
    models: BTreeMap<ModelId, Arc<Loaded>>,
    /// What is loaded, and waits for the scheduler's word.
    ready: BTreeMap<LoadId, Arc<Loaded>>,
    /// Hosted models that go when their last batch is finished.
    leaving: BTreeSet<ModelId>,
}

impl Core {
    /// A backend that hosts `models`, about to connect.
    ///
    /// # Errors
    /// If they are too many for one hello.
    pub fn new(config: CoreConfig, models: Vec<Arc<Loaded>>) -> Result<Self, HelloTooLarge> {
        let offers = models.iter().map(|loaded| loaded.offer()).collect();
        let hello = SchedulerHello::Backend(BackendHello { gpus: config.staging.gpus() as u32, models: offers });
        let hello = encode(&hello);
        if hello.len() > HELLO_BYTES_MAX {
            return Err(HelloTooLarge { models: models.len(), found: hello.len() });
        }
        let connect = Output::Connect { peer: Peer::Scheduler, to: config.scheduler, hello };
        Ok(Self {
            config,
            models,
            routes: Routes::new(),
            joined: None,
            links: Links::default(),
            clock: ClockSync::default(),
            scheduler_now: Timestamp::PAST,
            watchdog: Watchdog::new(config.staging.gpus()),
            leaving: None,
            outputs: VecDeque::from([connect]),
            ended: None,
        })
    }

    /// Why this life is over, once it is; there is nothing more to do then.
    #[must_use]
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Whether the scheduler has taken us in, and we are connected to all its ModelThreads.
    #[must_use]
    pub fn has_joined(&self) -> bool {
        self.joined.is_some() && self.routes.are_up()
    }

    /// The scheduler's name for us, once we know it.
    #[must_use]
    pub fn backend(&self) -> Option<BackendId> {
        Some(self.joined.as_ref()?.backend)
    }

    /// Plans that have not ended: they wait, execute, or have answers on their way.
    #[must_use]
    pub fn plans(&self) -> usize {
        self.joined.iter().flat_map(|joined| &joined.workers).map(Worker::plans).sum()
    }

    /// The driver did what [`Output::Connect`] asked for.
    pub fn handle_connecting(&mut self, peer: Peer, connection: ConnectionId) {
        match peer {
            Peer::Scheduler => self.routes.handle_opened(Reader::Scheduler, connection),
            Peer::ModelThread(id) => self.routes.handle_opened(Reader::ModelThread(id), connection),
            Peer::Frontend(frontend) => self.links.handle_opened(frontend, connection),
        }
    }

    /// Takes in what happened on the transport.
    pub fn handle_event(&mut self, now: Timestamp, event: Event) {
        if self.ended.is_some() {
            return;
        }
        match event {
            Event::Connected { connection, welcome } => match self.routes.handle_up(connection) {
                Some(Reader::Scheduler) => self.on_welcome(now, &welcome),
                Some(Reader::ModelThread(id)) => tracing::info!(model_thread = id.0, "connected"),
                None => self.on_link_up(connection, &welcome),
            },
            Event::Message { connection, frame } => match self.routes.reader(connection) {
                Some(_) => self.on_frame(now, &frame),
                None => self.on_stray(connection),
            },
            Event::Disconnected { connection, reason } => match self.routes.reader(connection) {
                Some(_) => self.end(reason.0),
                None => self.on_link_broken(now, connection, &reason.0),
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

    /// A frame could not be sent. A report that is lost would leave tasks without an end; a life that is over ends them
    /// all.
    pub fn handle_send_failed(&mut self, reason: &str) {
        self.end(format!("a report cannot be sent to the scheduler: {reason}"));
    }

    /// An execution that [`Output::Execute`] asked for has ended.
    pub fn handle_executed(&mut self, now: Timestamp, gpu: usize, execution: Execution) {
        let scheduler_now = self.scheduler_now(now);
        if let Some(joined) = self.joined.as_mut().filter(|_| self.ended.is_none()) {
            self.watchdog.handle_ended(scheduler_now, gpu, &execution);
            joined.workers[gpu].handle_executed(scheduler_now, execution);
            self.settle(now);
        }
    }

    /// A batch that [`Output::Execute`] gave out was not taken: the GPU still runs what earlier lives gave it.
    pub fn handle_stuck(&mut self, now: Timestamp, gpu: usize) {
        let rejected_at = self.scheduler_now(now);
        self.watchdog.handle_stuck(rejected_at, gpu);
        self.handle_executed(now, gpu, Execution::WindowMissed { rejected_at });
    }

    /// The operator wants this process to end: the scheduler is told, and what is under way is finished. It is over
    /// once [`Self::has_left`] says so.
    pub fn handle_leaving(&mut self, now: Timestamp) {
        if self.leaving.is_none() && self.has_joined() {
            self.leaving = Some(self.routes.plan_senders());
            self.report(Reader::Scheduler, &BackendToScheduler::Leaving);
            self.settle(now);
        }
    }

    /// Whether nothing is under way any more and nothing comes, or there is nobody to leave.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.ended.is_some() || !self.has_joined() || (self.leaving == Some(0) && self.plans() == 0)
    }

    /// Runs every timer that is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.ended.is_some() {
            return;
        }
        let scheduler_now = self.scheduler_now(now);
        self.links.handle_timeout(now);
        self.watchdog.handle_timeout(scheduler_now);
        if let Some(joined) = &mut self.joined {
            let due = joined.workers.iter_mut().filter(|worker| worker.poll_timeout() <= scheduler_now);
            due.for_each(|worker| worker.handle_timeout(scheduler_now));
        }
        if let Some(sent_at) = self.clock.poll_request(now) {
            self.report(Reader::Scheduler, &BackendToScheduler::ClockRequest { sent_at });
        }
        self.settle(now);
    }

    /// When [`Self::handle_timeout`] must be called; [`Timestamp::NEVER`] if not at all.
    #[must_use]
    pub fn poll_timeout(&self) -> Timestamp {
        if self.ended.is_some() {
            return Timestamp::NEVER;
        }
        let workers = self.joined.iter().flat_map(|joined| &joined.workers);
        let workers = workers.map(Worker::poll_timeout).fold(self.watchdog.poll_timeout(), Timestamp::min);
        let workers = self.clock.offset().to_local(workers).unwrap_or(workers);
        workers.min(self.links.poll_timeout()).min(self.clock.poll_timeout())
    }

    /// What the driver is to do next. All messages since the last `None` are packed into as few frames as hold them.
    pub fn poll_output(&mut self) -> Option<Output> {
        if self.ended.is_some() {
            return None;
        }
        let frame = |(connection, frame)| Output::Send { connection, frame };
        self.outputs.pop_front().or_else(|| self.routes.poll_frame().map(frame))
    }

    fn on_welcome(&mut self, now: Timestamp, welcome: &[u8]) {
        let welcome = match wincode::deserialize::<BackendWelcome>(welcome) {
            Ok(welcome) if welcome.models.len() == self.models.len() => welcome,
            _ => {
                return self.end("the scheduler's welcome does not decode; do both sides run the same version?".into());
            }
        };
        let BackendWelcome { backend, models, model_threads } = welcome;
        let named = match self.routes.handle_named(&model_threads) {
            Ok(named) => named,
            Err(reason) => return self.end(reason),
        };
        tracing::info!(backend = backend.0, model_threads = named.len().max(1), "joined");
        for (id, to) in named {
            let hello = MemberHello { member: Member::Backend(backend), pass: model_threads.pass };
            let hello = encode(&SchedulerHello::Member(hello));
            self.outputs.push_back(Output::Connect { peer: Peer::ModelThread(id), to, hello });
        }
        let models: BTreeMap<ModelId, Arc<Loaded>> = models.into_iter().zip(self.models.iter().cloned()).collect();
        let hosted = |gpu: u32| {
            let hosted = models.iter().filter(|(_, loaded)| loaded.gpu_indexes.contains(&gpu));
            hosted.map(|(&id, loaded)| (id, loaded.shape)).collect()
        };
        let gpus = self.config.staging.gpus();
        let workers = (0..gpus).map(|gpu| Worker::new(gpu, hosted(gpu as u32), HANDOVER)).collect();
        let (ready, leaving) = (BTreeMap::new(), BTreeSet::new());
        self.joined = Some(Joined { backend, workers, models, ready, leaving });
        self.clock = ClockSync::start(now);
    }

    fn on_frame(&mut self, now: Timestamp, frame: &[u8]) {
        for message in read_frame::<SchedulerToBackend>(frame) {
            match message {
                _ if self.ended.is_some() => return,
                _ if self.joined.is_none() => self.end("the scheduler spoke before its welcome".into()),
                Ok(message) => self.on_message(now, message),
                Err(error) => self.end(error.to_string()),
            }
        }
    }

    fn on_message(&mut self, now: Timestamp, message: SchedulerToBackend) {
        match message {
            SchedulerToBackend::FrontendLeft { frontend } => {
                self.links.handle_left(frontend);
                self.cut_off(now, frontend);
            }
            SchedulerToBackend::Clock(reply) => {
                self.clock.handle_reply(now, reply);
                if self.clock.offset().error_bound().is_some() {
                    self.links.handle_clock(now);
                }
            }
            SchedulerToBackend::FrontendJoined { frontend, link_address } => match link_address.parse() {
                Ok(address) => {
                    self.cut_off(now, frontend);
                    if let Err(reason) = self.links.handle_joined(now, frontend, address) {
                        self.end(reason.to_string());
                    }
                }
                Err(_) => {
                    let frontend = frontend.0;
                    let link_address = excerpt(&link_address);
                    tracing::warn!(frontend, link_address, "the frontend's address is not ip:port; it is not served");
                }
            },
            SchedulerToBackend::Load { name, .. } if name.len() > NAME_BYTES_MAX => {
                self.end(format!("it wants a model loaded whose name has {} bytes", name.len()));
            }
            SchedulerToBackend::Load { load, name } => self.outputs.push_back(Output::Load { load, name }),
            SchedulerToBackend::Host { load, model } => self.on_host(load, model),
            SchedulerToBackend::Discard { load } => {
                self.joined.as_mut().and_then(|joined| joined.ready.remove(&load));
            }
            SchedulerToBackend::Unload { model } => {
                self.joined.as_mut().map(|joined| joined.leaving.insert(model));
            }
            SchedulerToBackend::Cancel { plan, task } => {
                let scheduler_now = self.scheduler_now(now);
                self.workers().for_each(|worker| worker.handle_cancel(scheduler_now, plan, task));
            }
            SchedulerToBackend::Dismissed => self.leaving = self.leaving.map(|senders| senders.saturating_sub(1)),
            SchedulerToBackend::Plan(plan) => self.on_plan(now, plan),
        }
    }

    fn on_plan(&mut self, now: Timestamp, plan: BatchPlan) {
        let (id, reader) = (plan.plan.0, Reader::ModelThread(plan.plan.model_thread()));
        if !self.routes.is_up(reader) {
            let thread = plan.plan.model_thread().0;
            return self.end(format!("plan {id} is of ModelThread {thread}, which is not connected"));
        }
        let scheduler_now = self.scheduler_now(now);
        let Some(worker) = self.worker(plan.gpu_index as usize) else {
            tracing::warn!(plan = id, gpu = plan.gpu_index, "a plan names a GPU that was not offered");
            return worker::refuse(scheduler_now, &plan).iter().for_each(|report| self.report(reader, report));
        };
        if let Err(error) = worker.handle_plan(scheduler_now, plan) {
            tracing::warn!(plan = id, %error, "refused a plan");
        }
    }

    fn on_link_up(&mut self, connection: ConnectionId, welcome: &[u8]) {
        let Ok(welcome) = wincode::deserialize::<LinkWelcome>(welcome) else {
            tracing::warn!(?connection, "a frontend's welcome does not decode; do both sides run the same version?");
            return self.outputs.push_back(Output::Disconnect { connection });
        };
        let Some((frontend, link)) = self.links.handle_up(connection, welcome) else {
            return self.outputs.push_back(Output::Disconnect { connection });
        };
        tracing::info!(frontend = frontend.0, "linked");
        self.workers().for_each(|worker| worker.handle_linked(frontend, link));
        self.report(Reader::Scheduler, &BackendToScheduler::Linked { frontend });
    }

    fn on_link_broken(&mut self, now: Timestamp, connection: ConnectionId, reason: &str) {
        match self.links.handle_broken(now, connection) {
            Some(Broken::Link(frontend)) => {
                tracing::warn!(frontend = frontend.0, reason, "the link to a frontend broke");
                self.cut_off(now, frontend);
                self.report(Reader::Scheduler, &BackendToScheduler::Unlinked { frontend });
            }
            Some(Broken::Attempt(frontend)) => {
                tracing::warn!(frontend = frontend.0, reason, "a frontend cannot be reached; trying again");
            }
            None => {}
        }
    }

    /// Frontends say nothing on a link, and nobody writes our memory.
    fn on_stray(&mut self, connection: ConnectionId) {
        tracing::warn!(?connection, "a frontend sent what no frontend sends; its link is closed");
        self.outputs.push_back(Output::Disconnect { connection });
    }

    fn cut_off(&mut self, now: Timestamp, frontend: FrontendId) {
        let scheduler_now = self.scheduler_now(now);
        self.workers().for_each(|worker| worker.handle_unlinked(scheduler_now, frontend));
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
        }
        while let Some(action) = self.links.poll_action() {
            self.perform_link(action);
        }
        self.release_models();
    }

    fn perform(&mut self, now: Timestamp, gpu: usize, action: Action) {
        match action {
            Action::Fetch { place, tasks, model, task, input_offset } => {
                let Some(read) = self.read((place, tasks), model, task, input_offset) else {
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
            Action::Execute { buffer, model, runs, exec_at, latest } => {
                let Loaded { shape, executor, .. } = &**self.loaded(model);
                let staging = self.config.staging;
                let run = |run: Range<usize>| {
                    let place = Place { gpu, buffer, task: run.start };
                    let input_offset = staging.input_offset(place, *shape);
                    let output_offset = staging.answer_offset(place, *shape) + ANSWER_HEADER_BYTES;
                    Run { tasks: run.len(), input_offset, output_offset }
                };
                let job = Job {
                    executor: executor.clone(),
                    shape: *shape,
                    runs: runs.into_iter().map(run).collect(),
                    exec_at,
                    latest,
                    offset: self.clock.offset().clone(),
                };
                self.watchdog.handle_started(gpu, latest, self.loaded(model).profile.latency(job.tasks()));
                self.outputs.push_back(Output::Execute { gpu, job });
            }
            Action::Report(report) => self.report_plan(&report),
        }
    }

    /// A GPU goes out of use before what it had is given up, so that nothing is planned there in between.
    fn on_verdict(&mut self, now: Timestamp, verdict: Verdict) {
        let (gpu, is_usable) = match verdict {
            Verdict::Hangs(gpu) => {
                tracing::error!(gpu, "the executor does not come back; its batch is given up");
                let scheduler_now = self.scheduler_now(now);
                return self.worker(gpu).into_iter().for_each(|worker| worker.handle_hangs(scheduler_now));
            }
            Verdict::Unusable(gpu) => (gpu, false),
            Verdict::Usable(gpu) => (gpu, true),
        };
        tracing::warn!(gpu, is_usable, "whether the GPU can be used has changed");
        self.report(Reader::Scheduler, &BackendToScheduler::Usable { gpu_index: gpu as u32, is_usable });
    }

    fn perform_link(&mut self, action: LinkAction) {
        match action {
            LinkAction::Open { frontend, address, link } => {
                let Some(joined) = &self.joined else { return };
                let hello = encode(&LinkHello { backend: joined.backend, frontend, link });
                self.outputs.push_back(Output::Connect { peer: Peer::Frontend(frontend), to: address, hello });
            }
            LinkAction::Close { connection } => self.outputs.push_back(Output::Disconnect { connection }),
        }
    }

    /// What becomes of a plan is told to the ModelThread that made it.
    fn report_plan(&mut self, report: &BackendToScheduler) {
        let reader = match report {
            BackendToScheduler::PlanDone { plan, .. }
            | BackendToScheduler::Answered { plan, .. }
            | BackendToScheduler::Cancelled { plan, .. }
            | BackendToScheduler::InputLate { plan, .. } => Reader::ModelThread(plan.model_thread()),
            _ => Reader::Scheduler,
        };
        self.report(reader, report);
    }

    fn report(&mut self, to: Reader, message: &BackendToScheduler) {
        if let Err(error) = self.routes.push(to, message) {
            self.end(error.to_string());
        }
    }

    fn end(&mut self, reason: String) {
        self.ended.get_or_insert(reason);
    }

    /// Now, on the scheduler's clock; never earlier than before. Until the scheduler has answered, our own: no plan can
    /// be for a frontend that is linked then.
    fn scheduler_now(&mut self, now: Timestamp) -> Timestamp {
        let Some(scheduler_now) = self.clock.offset().to_scheduler(now) else { return now };
        self.scheduler_now = self.scheduler_now.max(scheduler_now);
        self.scheduler_now
    }

    fn workers(&mut self) -> impl Iterator<Item = &mut Worker> {
        self.joined.iter_mut().flat_map(|joined| &mut joined.workers)
    }

    fn worker(&mut self, gpu: usize) -> Option<&mut Worker> {
        self.joined.as_mut()?.workers.get_mut(gpu)
    }

    /// A model that a batch names: it stays until its last batch is finished.
    fn loaded(&self, model: ModelId) -> &Arc<Loaded> {
        &self.joined.as_ref().expect("workers exist once the scheduler's welcome is in").models[&model]
    }
}

/// A peer's text for our log: short, and on one line whatever is in it.
fn excerpt(text: &str) -> String {
    text.chars().take(64).map(|char| if char.is_control() { char::REPLACEMENT_CHARACTER } else { char }).collect()
}

fn encode<M>(message: &M) -> Vec<u8>
where
    M: SchemaWrite<wincode::config::DefaultConfig, Src = M>,
{
    wincode::serialize(message).expect("encoding into memory cannot fail")
}

#[cfg(test)]
mod tests;
