//! A frontend in the simulated fabric: the real core and arena, driven as `frontend::drive` drives them, and its
//! clients.

mod graphs;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
};

use frontend::{
    InferError,
    arena::Arena,
    core::{Core, CoreConfig, Destination, Output},
    tasks::{CheckedRequest, Reply, RequestId, WORD_WAIT},
};
use proto::{
    Application, ChangeId, SlotDescriptor, Span, TaskId, Timestamp,
    backend_to_frontend::LinkWelcome,
    frame::{Addressed, FrameWriter, read_frame},
    frontend_to_scheduler::{FrontendToModelThread, FrontendToScheduler, ModelChange},
    scheduler_to_frontend::{DropReason, SchedulerToFrontend},
};
use rand::{Rng, RngExt};
use repository::{Model, emulated::digest};
use transport::{ConnectionId, DisconnectReason, Event, PostError};

use super::{
    env::{Env, Happening},
    models::{self, APPLICATIONS, MODELS},
    mutation::Mutation,
    network::{ARENA_ADDRESS, Network},
    oracle::Violation,
};
use crate::{
    node::{Life, Node},
    scheduler::encode,
};
use graphs::{Ended, Graphs};

/// Small, so that slots are reused soon.
const ARENA_BYTES: usize = 48 * 1024;
/// What clocks that drift, and timers that fire a little late, add to a bound.
const ENDS_LATE: Span = Span::from_millis(5);
/// When frames are tried again for which there was no room.
const UNSENT_AGAIN: Span = Span::from_millis(1);
/// Requests whose inputs come later than they are submitted ...
const LATER_PERCENT: u32 = 25;
/// ... at most by this: some after their deadline, which is 30 to 80 milliseconds off.
const DECODING_MICROS_MAX: i64 = 50_000;
/// Tasks that planted bugs choose from.
const LATELY_MAX: usize = 16;

/// A frontend's process and its clients.
pub(super) struct FrontendNode {
    pub(super) node: Node,
    pub(super) life: Life,
    /// By rank.
    schedulers: Vec<Node>,
    process: Option<Process>,
    graphs: Graphs,
    pub(super) clients: Clients,
}

/// What clients saw.
#[derive(Debug, Default)]
pub(super) struct Clients {
    /// Requests sent.
    pub(super) sent: u64,
    /// Of them, those answered with outputs.
    pub(super) served: u64,
    /// Of these, those of which an input came so late that its task was submitted twice.
    pub(super) late: u64,
    /// How the others ended, and how often.
    pub(super) failed: BTreeMap<String, u64>,
    /// Requests that have not ended.
    open: BTreeMap<RequestId, Open>,
    /// Changes that have not ended.
    changes: BTreeSet<ChangeId>,
}

struct Process {
    core: Core,
    /// Frames that the scheduler has no room for yet.
    unsent: VecDeque<(ConnectionId, Vec<u8>)>,
    /// Its connections to schedulers, the newest last, and to which.
    schedulers: Vec<(ConnectionId, usize)>,
    /// The last tasks that were submitted.
    lately: VecDeque<TaskId>,
    /// Inputs of the rows that have just been admitted and come later.
    later: VecDeque<Vec<u8>>,
}

/// A request that has not ended.
#[derive(Debug)]
struct Open {
    input: Vec<u8>,
    input_bytes: usize,
    admitted_at: Timestamp,
    slo: Span,
    /// How far the frontend was off the scheduler's clock then.
    error: Span,
}

/// The registered memory, as the core sees it.
struct Registered<'a>(RefCell<(&'a mut Network, Node)>);

impl Arena for Registered<'_> {
    fn write(&self, offset: usize, bytes: &[u8]) {
        let mut guard = self.0.borrow_mut();
        let (network, node) = &mut *guard;
        network.write_arena(*node, offset, bytes);
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let guard = self.0.borrow();
        let (network, node) = &*guard;
        into.copy_from_slice(&network.arena(*node)[offset..][..into.len()]);
    }

    fn open(&self, inputs: Range<usize>, answers: Range<usize>) -> u32 {
        let mut guard = self.0.borrow_mut();
        let (network, node) = &mut *guard;
        network.open_window(*node, [inputs, answers])
    }

    fn close(&self, key: u32) {
        let mut guard = self.0.borrow_mut();
        let (network, node) = &mut *guard;
        network.close_window(*node, key);
    }
}

fn arena(env: &mut Env, node: Node) -> Registered<'_> {
    Registered(RefCell::new((&mut env.network, node)))
}

/// What is served of a model while this version is the newest.
fn versions(name: &str, newest: u32) -> impl Iterator<Item = Model> {
    models::served(newest).map(move |version| models::model(name, version))
}

impl FrontendNode {
    pub(super) fn new(seed: u64, node: Node, schedulers: &[Node]) -> Self {
        let (schedulers, graphs) = (schedulers.to_vec(), Graphs::new(seed, node));
        Self { node, life: 0, schedulers, process: None, graphs, clients: Clients::default() }
    }

    /// The process starts, with memory of its own.
    pub(super) fn start(&mut self, env: &mut Env) {
        self.life += 1;
        env.reset_clock(self.node);
        env.network.register(self.node, ARENA_BYTES, None);
        env.network.listen(self.node);
        let (arena_bytes, arena_rkey) = (ARENA_BYTES as u64, SlotDescriptor::NO_KEY);
        let config = CoreConfig {
            arena_bytes: ARENA_BYTES,
            arena: LinkWelcome {
                arena_address: ARENA_ADDRESS,
                arena_bytes,
                arena_rkey,
                guards_offset: 0,
                guards_rkey: 0,
            },
            name: "frontend".to_owned(),
            link_address: Network::address(self.node).to_string(),
            links_max: 16,
            schedulers: self.schedulers.len(),
            token_seed: env.rng.random(),
        };
        let models = env.repository.iter().flat_map(|(name, &newest)| versions(name, newest)).collect();
        let mut core = Core::new(config, models).expect("the arena has room for all models");
        core.open_guards(&arena(env, self.node));
        let (unsent, lately, later) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        self.process = Some(Process { core, unsent, schedulers: Vec::new(), lately, later });
        env.trace(self.node, || "starts".to_owned());
        env.wake(self.node);
    }

    /// The process ends, and what its clients wait for with it.
    pub(super) fn die(&mut self, env: &mut Env, tells: bool) {
        env.trace(self.node, || format!("dies{}", if tells { "" } else { " in silence" }));
        self.process = None;
        let lost = (self.clients.open.len() + self.graphs.open().0) as u64;
        if lost > 0 {
            *self.clients.failed.entry("Died".to_owned()).or_default() += lost;
        }
        self.clients.open.clear();
        self.graphs.clear();
        self.clients.changes.clear();
        env.close_endpoint(self.node, tells);
        env.close_listener(self.node);
        env.oracle.handle_died(self.node);
    }

    pub(super) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// Whether every model can be asked for, in some version.
    pub(super) fn is_ready(&self) -> bool {
        let Some(Process { core, .. }) = &self.process else { return false };
        let is_ready = |index| core.is_model_ready(core.models().get(index));
        MODELS.iter().all(|(name, _)| core.models().find(name, None).is_ok_and(is_ready))
    }

    /// How many lower epochs this process was told.
    pub(super) fn lower_epochs(&self) -> u64 {
        self.process.as_ref().map_or(0, |process| process.core.takeovers().lower_epochs)
    }

    /// Looks at everything once.
    pub(super) fn turn(&mut self, env: &mut Env) {
        let node = self.node;
        let Some(process) = &mut self.process else { return };
        while let Some(event) = env.network.poll_event(node) {
            if let Event::Message { frame, .. } = &event {
                for message in read_frame::<SchedulerToFrontend>(frame).flatten() {
                    env.trace(node, || format!("hears {message:?}"));
                }
            }
            let now = env.local(node);
            process.core.handle_event(now, event, &arena(env, node));
        }
        if env.mutation == Some(Mutation::ReuseEarly) && env.chance(1) {
            process.free_early(env, node);
        }
        process.core.handle_timeout(env.local(node));
        self.settle(env);
    }

    /// A client sends a request.
    pub(super) fn request(&mut self, env: &mut Env) {
        self.clients.sent += 1;
        let Some(process) = &mut self.process else { return self.clients.fail("NotRunning") };
        if self.graphs.is_next() {
            let ended = self.graphs.request(env, &mut process.core, self.node);
            self.clients.handle_graph(ended);
            return self.settle(env);
        }
        let (name, input_bytes) = MODELS[env.rng.random_range(0..MODELS.len())];
        let rows = env.rng.random_range(1..=3);
        let mut input = vec![0; rows * input_bytes];
        env.rng.fill_bytes(&mut input);
        let slo = Span::from_millis(if env.chance(2) { 1 } else { env.rng.random_range(30..80) });
        let mut model = process.core.models().find(name, None).expect("it is in the repository");
        if env.chance(30) && env.loads_fail {
            // An older one, if it is hosted: a backend that starts has what the repository holds then. Once faults have
            // ended those that started meanwhile do not host it, and memory is short for what the others do.
            let core = &process.core;
            let is_ready = |&index: &usize| core.is_model_ready(core.models().get(index));
            model = core.models().versions(name).find(is_ready).unwrap_or(model);
        }
        let comes_later = env.chance(LATER_PERCENT);
        let (waited, workload) = (Span::ZERO, env.rng.random_range(0..u32::from(APPLICATIONS)));
        input.chunks_mut(input_bytes).for_each(|row| env.dynamic.mark(name, row, workload as u8));
        let inputs = if comes_later { vec![] } else { vec![input.clone().into()] };
        let application = Application(workload);
        let request = CheckedRequest { model, rows, inputs, slo, waited, priority: 0, application, client: None };
        let now = env.local(self.node);
        match process.core.handle_request(now, &request, &arena(env, self.node)) {
            Ok(id) => {
                env.trace(self.node, || format!("admits {id:?}: {rows} rows for '{name}' within {slo}"));
                let error = clock_error(env, &process.core, self.node);
                if comes_later {
                    process.later = input.chunks(input_bytes).map(<[u8]>::to_owned).collect();
                    let takes = env.micros(DECODING_MICROS_MAX);
                    env.after(takes, Happening::Inputs(self.node, self.life, id));
                }
                self.clients.open.insert(id, Open { input, input_bytes, admitted_at: env.now, slo, error });
                if env.chance(8) {
                    let patience = env.micros(60_000);
                    env.after(patience, Happening::HangUp(self.node, self.life, id));
                }
            }
            Err(error) => self.clients.fail(kind(&error)),
        }
        self.settle(env);
    }

    /// The inputs of a request have been decoded, or cannot be; now and then neither is ever heard of.
    pub(super) fn handle_inputs(&mut self, env: &mut Env, request: RequestId) {
        let Some(process) = &mut self.process else { return };
        let luck = env.rng.random_range(0..20);
        let input = self.clients.open.get(&request).map_or_else(Vec::new, |open| open.input.clone());
        match luck {
            0 => {}
            1 => {
                env.trace(self.node, || format!("{request:?} cannot be decoded"));
                process.core.handle_cancel(request);
                if self.clients.open.remove(&request).is_some() {
                    self.clients.fail("Undecodable");
                }
            }
            _ => {
                env.trace(self.node, || format!("{request:?} is decoded"));
                let now = env.local(self.node);
                process.core.handle_inputs(now, request, &[input.into()], &arena(env, self.node));
            }
        }
        self.settle(env);
    }

    /// A client does not wait any longer.
    pub(super) fn hang_up(&mut self, env: &mut Env, request: RequestId) {
        let Some(process) = &mut self.process else { return };
        if self.clients.open.remove(&request).is_some() {
            env.trace(self.node, || format!("{request:?} is hung up"));
            process.core.handle_cancel(request);
            self.clients.fail("HungUp");
            self.settle(env);
        }
    }

    /// A client wants a model loaded or unloaded.
    pub(super) fn change(&mut self, env: &mut Env, to: ModelChange, name: &str) {
        let Some(process) = &mut self.process else { return };
        if let Ok(change) = process.core.handle_change(env.now, to, name, None) {
            env.trace(self.node, || format!("asks to {to:?} '{name}' as {change:?}"));
            self.clients.changes.insert(change);
        }
        self.settle(env);
    }

    /// The repository has been read.
    pub(super) fn handle_model_read(&mut self, env: &mut Env, name: &str) {
        let Some(process) = &mut self.process else { return };
        process.core.handle_model_read(name, Ok(versions(name, env.repository[name]).collect()));
        self.settle(env);
    }

    /// Does what the core wants, and checks what must hold after every step.
    fn settle(&mut self, env: &mut Env) {
        let Some(mut process) = self.process.take() else { return };
        process.send_unsent(env);
        while let Some(output) = process.core.poll_output() {
            self.perform(env, &mut process, output);
        }
        while let Some(ended) = self.graphs.handle_timeout(env, &mut process.core, self.node) {
            self.clients.handle_graph(Some(ended));
        }
        while let Some(output) = process.core.poll_output() {
            self.perform(env, &mut process, output);
        }
        let counters = process.core.counters();
        let ended = counters.answered + counters.failed + counters.dropped + counters.abandoned;
        if counters.admitted != ended + process.core.outstanding() as u64 {
            let text = format!("{} counts {counters:?}", env.members[self.node.0].name);
            env.oracle.report(Violation::Ends(text));
        }
        let overdue = |open: &Open| env.now > open.admitted_at + open.slo + WORD_WAIT + ENDS_LATE;
        if let Some((id, _)) = self.clients.open.first_key_value().filter(|(_, open)| overdue(open)) {
            env.oracle.report(Violation::Ends(format!("{id:?} has not ended five seconds after its deadline")));
        }
        if let Some(number) = self.graphs.overdue(env.now) {
            env.oracle.report(Violation::Ends(format!("graph request {number} has not ended at its deadline")));
        }
        for at in [process.core.poll_timeout(), self.graphs.poll_timeout()].into_iter().flatten() {
            env.wake_at_local(self.node, at);
        }
        if !process.unsent.is_empty() {
            env.wake_at_local(self.node, env.local(self.node) + UNSENT_AGAIN);
        }
        self.process = Some(process);
    }

    fn perform(&mut self, env: &mut Env, process: &mut Process, output: Output) {
        let node = self.node;
        match output {
            Output::Connect { to, hello } => {
                let (scheduler, address) = match to {
                    Destination::Scheduler(index) => (index, Network::address(self.schedulers[index])),
                    Destination::ModelThread { scheduler, address, .. } => (scheduler, address),
                };
                let connection = env.connect(node, address, hello);
                env.trace(node, || format!("connects to {to:?} on {}", connection.0));
                process.schedulers.retain(|(_, other)| *other != scheduler || !matches!(to, Destination::Scheduler(_)));
                process.schedulers.push((connection, scheduler));
                process.core.handle_connecting(to, connection);
            }
            Output::Accept { connection, welcome } => {
                env.trace(node, || format!("accepts a backend on {}", connection.0));
                env.accept(connection, encode(&welcome));
            }
            Output::Refuse { connection, reason } => {
                env.trace(node, || format!("refuses a backend on {}: {reason}", connection.0));
                env.refuse(connection, &reason);
            }
            Output::Disconnect { connection } => process.disconnect(env, node, connection),
            Output::Send { connection, frame } => {
                for message in read_frame::<FrontendToScheduler>(&frame).map(|message| message.expect("it is ours")) {
                    if let Addressed::ModelThread(message) = &message {
                        process.note_said(env, node, message);
                    }
                    env.trace(node, || format!("tells the scheduler {message:?}"));
                }
                process.unsent.push_back((connection, frame));
                process.send_unsent(env);
            }
            Output::Reply { request, result } => self.on_reply(env, process, request, result),
            Output::ReadModel { name, brought: _ } => {
                let takes = env.micros(30_000);
                env.after(takes, Happening::ModelRead(node, self.life, name));
            }
            Output::ModelChanged { change, result } => {
                env.trace(node, || format!("{change:?} ended: {result:?}"));
                if !self.clients.changes.remove(&change) {
                    env.oracle.report(Violation::Ends(format!("{change:?} ended twice")));
                }
            }
        }
    }

    fn on_reply(&mut self, env: &mut Env, process: &mut Process, id: RequestId, result: Result<Reply, InferError>) {
        let output = result.as_ref().map(|reply| reply.outputs[0].to_vec()).map_err(InferError::clone);
        if let Some(ended) = self.graphs.handle_reply(env, (&mut process.core, self.node), id, output) {
            return self.clients.handle_graph(ended);
        }
        env.trace(self.node, || match &result {
            Ok(reply) => format!("answers {id:?}, late by {}", reply.timing.lateness()),
            Err(error) => format!("ends {id:?}: {error}"),
        });
        let Some(open) = self.clients.open.remove(&id) else {
            return env.oracle.report(Violation::Ends(format!("{id:?} ended twice")));
        };
        match result {
            Err(InferError::BadAnswer(what)) => {
                env.oracle.report(Violation::Slot(format!("{id:?} was answered by what is no answer: {what}")));
            }
            Err(error) => self.clients.fail(kind(&error)),
            Ok(reply) => {
                self.clients.served += 1;
                self.clients.late += u64::from(reply.was_late);
                let expected = open.input.chunks(open.input_bytes).flat_map(|row| digest(row).map(u64::to_le_bytes));
                if !expected.flatten().eq(reply.outputs[0].iter().copied()) {
                    env.oracle.report(Violation::Slot(format!("{id:?} was answered with another task's output")));
                }
                let error = clock_error(env, &process.core, self.node);
                let allowed = error + open.error + ENDS_LATE;
                let lateness = (env.now - open.admitted_at) - open.slo;
                let told = reply.timing.lateness();
                if Span((lateness - told).0.abs()) > allowed {
                    let text = format!("{id:?} is told to be late by {told}, and is by {lateness}");
                    env.oracle.report(Violation::Late(text));
                }
            }
        }
    }

    /// What is still open, if anything is: there must be nothing once all faults and requests have ended.
    pub(super) fn unfinished(&self) -> Option<String> {
        let Some(process) = &self.process else { return Some("it is not running".to_owned()) };
        let (open, tasks) = (self.clients.open.len(), process.core.outstanding());
        let load = process.core.scheduler_load();
        if !process.core.has_scheduler() {
            return Some("it has no scheduler".to_owned());
        }
        let graphs = self.graphs.open();
        let is_idle = open == 0 && tasks == 0 && graphs == (0, 0) && (load.queued, load.batches) == (0, 0);
        let changes = self.clients.changes.len();
        (!is_idle || changes > 0).then(|| {
            format!(
                "{open} requests, {graphs:?} of graphs, {tasks} tasks and {changes} changes have not ended; the \
                 scheduler has {load:?}"
            )
        })
    }
}

impl Clients {
    /// A request for a graph has ended, if it has.
    fn handle_graph(&mut self, ended: Option<Ended>) {
        match ended {
            None => {}
            Some(Ok(())) => self.served += 1,
            Some(Err(error)) => self.fail(kind(&error)),
        }
    }

    fn fail(&mut self, kind: &str) {
        *self.failed.entry(kind.to_owned()).or_default() += 1;
    }
}

impl Process {
    /// A frame is about to leave with this message.
    fn note_said(&mut self, env: &mut Env, node: Node, message: &FrontendToModelThread) {
        let is_guarded = matches!(message, FrontendToModelThread::Submit { slot, .. } if slot.is_guarded());
        let later = if is_guarded { self.later.pop_front() } else { None };
        env.oracle.handle_submitted(node, message, (env.network.arena(node), later.as_deref()));
        if let FrontendToModelThread::Submit { task, .. } = message {
            self.lately.push_back(*task);
            if self.lately.len() > LATELY_MAX {
                self.lately.pop_front();
            }
        }
    }

    fn disconnect(&mut self, env: &mut Env, node: Node, connection: ConnectionId) {
        let is_link = !self.schedulers.iter().any(|(own, _)| *own == connection);
        if is_link && self.core.has_scheduler() && env.mutation == Some(Mutation::SkipFence) {
            env.trace(node, || format!("only says that {} is disconnected", connection.0));
            let event = Event::Disconnected { connection, reason: DisconnectReason::new("we disconnected") };
            let now = env.local(node);
            return self.core.handle_event(now, event, &arena(env, node));
        }
        env.disconnect(connection);
    }

    fn send_unsent(&mut self, env: &mut Env) {
        while let Some((connection, frame)) = self.unsent.front() {
            if env.send(*connection, frame) == Err(PostError::QueueFull) {
                return;
            }
            self.unsent.pop_front();
        }
    }

    /// Believes that the scheduler dropped a task that it did not drop.
    fn free_early(&mut self, env: &mut Env, node: Node) {
        let (Some(&(connection, _)), Some(task)) = (self.schedulers.last(), self.lately.pop_back()) else { return };
        env.trace(node, || format!("frees the slot of {task:?}, which has not ended"));
        let mut frame = FrameWriter::default();
        let dropped = SchedulerToFrontend::Dropped { task, reason: DropReason::Deadline };
        frame.push(&dropped).expect("it fits");
        let frame = frame.take().expect("just pushed");
        let now = env.local(node);
        self.core.handle_event(now, Event::Message { connection, frame }, &arena(env, node));
    }
}

/// How far a frontend's estimate of the primary's clock is off.
fn clock_error(env: &Env, core: &Core, node: Node) -> Span {
    let estimate = env.primary_era().and_then(|at| core.to_local(at));
    estimate.map_or(Span::ZERO, |estimate| Span((estimate - env.local(node)).0.abs()))
}

/// The name of an error, without what it says.
fn kind(error: &InferError) -> &'static str {
    match error {
        InferError::Dropped(DropReason::BackendLost) => "BackendLost",
        InferError::Dropped(DropReason::InputLate) => "InputLate",
        InferError::Dropped(_) => "Dropped",
        InferError::WindowMissed => "WindowMissed",
        InferError::SchedulerLost => "SchedulerLost",
        InferError::NoScheduler => "NoScheduler",
        InferError::NeverMet { .. } => "NeverMet",
        InferError::NoBackend { .. } | InferError::NotLoaded { .. } => "NoBackend",
        InferError::Unloaded { .. } => "Unloaded",
        InferError::ArenaFull { .. } => "ArenaFull",
        InferError::ArenaShare { .. } => "ArenaShare",
        InferError::Failed(_) => "Failed",
        InferError::NotWritten { .. } => "NotWritten",
        InferError::NoAnswer { .. } => "NoAnswer",
        _ => "Other",
    }
}
