//! A backend in the simulated fabric: the real core, driven as `backend::drive` drives it, with GPUs that take the time
//! of their profile, or longer, or fail.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use backend::{
    core::{Core, CoreConfig, Job, Kept, LAST_WORDS_SPAN, Output},
    executor::{Executor, Loaded},
    staging::{ModelShape, Staging},
    worker::{Execution, HANDED_MAX, Outputs},
};
use proto::{
    LoadId, ModelId, PlanId, Span, TaskId, Timestamp,
    backend_to_frontend::ANSWER_HEADER_BYTES,
    backend_to_scheduler::{BackendToControl, BackendToModelThread, BackendToScheduler},
    backoff::Backoff,
    frame::{Addressed, FrameWriter, read_frame},
    scheduler_to_backend::SchedulerToBackend,
    slot::{GUARD_BYTES, guard_word},
};
use rand::RngExt;
use transport::Event;
use zerocopy::IntoBytes;

use super::{
    env::{Env, Happening},
    models,
    mutation::Mutation,
    network::Network,
    oracle::Violation,
};
use crate::{
    fault::Trouble,
    node::{Life, Node},
};

/// As in `backend::drive`: waits before the scheduler is tried again.
const BACKOFF_MIN: Span = Span::from_millis(50);
const BACKOFF_MAX: Span = Span::from_millis(1_000);
/// How far a standby's clock may be off its primary's: half a round trip.
const FOLLOWING_ERROR: Span = Span::from_micros(1_500);
/// What a backend that leaves says of how long it stays at most. It may be killed before.
const LEAVES_WITHIN: Span = Span::from_millis(200);
/// What a clock that drifts adds to the error of its estimate until that is renewed.
const DRIFT_SPAN_SECONDS: i64 = 10;

/// A backend's process.
pub(super) struct BackendNode {
    pub(super) node: Node,
    /// Counts sessions, over all processes.
    pub(super) life: Life,
    /// Counts processes: a GPU's thread lives on from session to session.
    pub(super) process_life: Life,
    /// By rank.
    schedulers: Vec<Node>,
    gpus: Vec<Gpu>,
    /// What the next session starts with.
    models: Vec<Arc<Loaded>>,
    shapes: Vec<ModelShape>,
    process: Option<Process>,
    backoff: Backoff,
    /// Pages of each GPU, if memory is short.
    memory_pages: Option<u32>,
    /// Pages of host memory, if that is short, too.
    host_pages: Option<u32>,
    /// What it hosts is the scheduler's to choose.
    is_auto: bool,
    /// What the next session goes on with.
    kept: Kept,
    /// What has let its weights go in the present session, as they were in neither.
    released: Vec<Arc<dyn Executor>>,
    /// How executors behave now.
    pub(super) trouble: Trouble,
    /// The first task of each READ of guards, by its token.
    guarded: BTreeMap<u64, TaskId>,
    /// As [`Mutation::SkipWrite`] says.
    pub(super) lies: bool,
}

/// A session with a scheduler; none while the next is waited for.
struct Process {
    core: Option<Core>,
    /// The operator wants it to end.
    leaves: bool,
    /// It has left, and ends then.
    ends_at: Option<Timestamp>,
}

/// A GPU's thread: it lives on from session to session, in one process.
#[derive(Default)]
struct Gpu {
    /// Batches that wait, and the session that they are of.
    jobs: VecDeque<(Life, Job)>,
    /// What it has taken, and begins in its window.
    taken: Option<(Life, Job)>,
    /// What runs; its inputs were read when it started.
    running: Option<Running>,
    /// What has ended, and the core has yet to hear of.
    ended: VecDeque<(Life, Execution)>,
    /// Until when it runs a sample again.
    samples_until: Option<Timestamp>,
    /// The copy of weights that is under way, and how much of it is reading from disk.
    copying: Option<(ModelId, Span)>,
    /// What is in its memory, in the present session.
    weights: BTreeSet<ModelId>,
}

/// All that the repository holds now.
fn loaded(env: &Env, gpus: u32) -> Vec<Arc<Loaded>> {
    let versions =
        env.repository.iter().flat_map(|(name, &newest)| models::served(newest).map(move |version| (*name, version)));
    versions.map(|(name, version)| Arc::new(models::loaded(env.dynamic, name, version, gpus))).collect()
}

struct Running {
    life: Life,
    job: Job,
    outputs: Vec<u8>,
    /// A task that is run again if nothing else waits then: for which plan, and how long that takes.
    alone: Option<(PlanId, Span)>,
}

impl BackendNode {
    pub(super) fn new(
        node: Node,
        schedulers: &[Node],
        gpus: u32,
        (memory_pages, host_pages): (Option<u32>, Option<u32>),
        is_auto: bool,
        env: &Env,
    ) -> Self {
        let models = loaded(env, gpus);
        Self {
            node,
            life: 0,
            process_life: 0,
            schedulers: schedulers.to_vec(),
            gpus: (0..gpus).map(|_| Gpu::default()).collect(),
            shapes: models.iter().map(|loaded| loaded.shape).collect(),
            models,
            process: None,
            backoff: Backoff::new(BACKOFF_MIN, BACKOFF_MAX),
            memory_pages,
            host_pages,
            is_auto,
            kept: Kept::default(),
            released: Vec::new(),
            trouble: Trouble::None,
            guarded: BTreeMap::new(),
            lies: false,
        }
    }

    /// The process starts: it loads what the repository holds now.
    pub(super) fn start(&mut self, env: &mut Env) {
        let gpus = self.gpus.len() as u32;
        self.gpus = (0..gpus).map(|_| Gpu::default()).collect();
        self.models = loaded(env, gpus);
        self.kept = Kept::default();
        self.backoff.handle_success();
        self.process = Some(Process { core: None, leaves: false, ends_at: None });
        env.reset_clock(self.node);
        env.trace(self.node, || "starts".to_owned());
        self.open_session(env);
    }

    /// The process ends.
    pub(super) fn die(&mut self, env: &mut Env, tells: bool) {
        env.trace(self.node, || format!("dies{}", if tells { "" } else { " in silence" }));
        self.process_life += 1;
        self.process = None;
        self.gpus.iter_mut().for_each(|gpu| *gpu = Gpu::default());
        env.close_endpoint(self.node, tells);
    }

    /// The operator wants the process to end: it does once its plans are finished.
    pub(super) fn leave(&mut self, env: &mut Env) {
        let Some(process) = &mut self.process else { return };
        env.trace(self.node, || "is about to leave".to_owned());
        process.leaves = true;
        match &mut process.core {
            Some(core) => core.handle_leaving(env.local(self.node), LEAVES_WITHIN),
            None => return self.die(env, true),
        }
        self.settle(env);
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.leaves)
    }

    pub(super) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// A session begins, with an endpoint and memory of its own.
    pub(super) fn open_session(&mut self, env: &mut Env) {
        let Some(process) = &mut self.process else { return };
        self.life += 1;
        let shapes: Vec<_> = self.models.iter().map(|model| model.shape).chain(self.shapes.iter().copied()).collect();
        let staging = Staging::new(self.gpus.len(), &shapes, 0);
        env.network.register(self.node, staging.bytes(), Some(self.life));
        let schedulers = self.schedulers.iter().map(|&node| Network::address(node).into()).collect();
        // A way that hangs ends what it was given in the session before; it is not in the way of the next one here.
        for gpu in &mut self.gpus {
            (gpu.copying, gpu.weights) = (None, BTreeSet::new());
        }
        self.released.clear();
        let (memory_pages, host_pages, token) = (self.memory_pages, self.host_pages, env.rng.random());
        let (lkey, landings) = (self.life, BTreeMap::new());
        let name = "backend".to_owned();
        let is_auto = self.is_auto;
        let config = CoreConfig { name, schedulers, staging, lkey, landings, memory_pages, host_pages, token, is_auto };
        let mut core = Core::new(config, std::mem::take(&mut self.models));
        core.handle_kept(self.kept);
        process.core = Some(core);
        self.settle(env);
    }

    /// How many lower epochs it was told in this session.
    pub(super) fn lower_epochs(&self) -> u64 {
        let core = self.process.as_ref().and_then(|process| process.core.as_ref());
        core.map_or(0, Core::lower_epochs)
    }

    /// Looks at everything once.
    pub(super) fn turn(&mut self, env: &mut Env) {
        let node = self.node;
        let Some(core) = self.process.as_mut().and_then(|process| process.core.as_mut()) else { return };
        while let Some(event) = env.network.poll_event(node) {
            if let Event::Message { frame, .. } = &event {
                for message in read_frame::<SchedulerToBackend>(frame).flatten() {
                    env.trace(node, || format!("hears {message:?}"));
                }
            }
            core.handle_event(env.local(node), event);
        }
        core.handle_timeout(env.local(node));
        self.settle(env);
    }

    fn settle(&mut self, env: &mut Env) {
        let Some(mut core) = self.process.as_mut().and_then(|process| process.core.take()) else { return };
        while let Some(output) = core.poll_output() {
            self.perform(env, &mut core, output);
        }
        let bound = self.gpus.len() * (backend::worker::WAITING_MAX + backend::staging::BUFFERS);
        if core.plans() > bound {
            env.oracle.report(Violation::Bound(format!("{} plans are under way, {bound} may be", core.plans())));
        }
        if let Some(reason) = core.ended() {
            env.trace(self.node, || format!("has lost the scheduler: {reason}"));
            if core.has_joined() {
                self.backoff.handle_success();
            }
            self.kept = core.kept();
            self.models = core.into_models();
            self.gpus.iter_mut().for_each(|gpu| gpu.jobs.retain(|(life, _)| *life != self.life));
            env.close_endpoint(self.node, true);
            let at = self.backoff.handle_failure(env.now);
            env.schedule(at, Happening::Session(self.node, self.life));
            return;
        }
        let process = self.process.as_mut().expect("looked at above");
        let mut wake_at = core.poll_timeout();
        if process.leaves && core.has_left() {
            let now = env.local(self.node);
            let ends_at = *process.ends_at.get_or_insert(now + LAST_WORDS_SPAN);
            if ends_at <= now {
                return self.die(env, true);
            }
            wake_at = wake_at.min(ends_at);
        }
        env.wake_at_local(self.node, wake_at);
        process.core = Some(core);
    }

    fn perform(&mut self, env: &mut Env, core: &mut Core, output: Output) {
        let node = self.node;
        let now = env.local(node);
        match output {
            Output::Connect { peer, to, hello } => {
                let to = to.ip().expect("simulated hosts have no names");
                let connection = env.connect(node, to, hello);
                env.trace(node, || format!("connects to {peer:?} on {}", connection.0));
                core.handle_connecting(peer, connection);
            }
            Output::Disconnect { connection } => env.disconnect(connection),
            Output::Send { connection, frame } => {
                let frame = self.mutate(env, frame);
                for message in read_frame::<BackendToScheduler>(&frame).flatten() {
                    env.trace(node, || format!("tells the scheduler {message:?}"));
                }
                if let Err(error) = env.send(connection, &frame) {
                    core.handle_send_failed(now, connection, &error.to_string());
                }
            }
            Output::Read { connection, task, transfer } => {
                env.trace(node, || format!("reads {task:?} on {}", connection.0));
                if env.read(connection, Some(task), transfer).is_err() {
                    core.handle_read_failed(now, transfer.token);
                }
            }
            Output::ReadGuards { connection, task, transfer } => {
                env.trace(node, || format!("reads the guards from {task:?} on {}", connection.0));
                self.guarded.insert(transfer.token, task);
                if env.read(connection, None, transfer).is_err() {
                    core.handle_read_failed(now, transfer.token);
                }
            }
            Output::LookAtGuards { token, offset, guards } => {
                let bytes = &env.network.arena(node)[offset..][..guards * GUARD_BYTES];
                let mut words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
                if env.mutation == Some(Mutation::SkipGuard) {
                    let tasks = self.guarded[&token].0..;
                    words = words.iter().zip(tasks).map(|(_, task)| guard_word(TaskId(task))).collect();
                }
                env.trace(node, || format!("looks at guards: {words:x?}"));
                core.handle_guards(now, token, &words);
            }
            Output::Write { connection, transfer, immediate, header, text } => {
                let (task, tasks) = (TaskId(header.task), header.tasks);
                env.trace(node, || format!("answers {tasks} from {task:?} on {}: {:?}", connection.0, header.status));
                env.network.write_arena(node, transfer.local_offset, header.as_bytes());
                if let Some(text) = text {
                    let at = transfer.local_offset + ANSWER_HEADER_BYTES;
                    env.network.write_arena(node, at, text.as_bytes());
                }
                if self.lies && env.chance(20) {
                    env.trace(node, || "does not write that".to_owned());
                    return core
                        .handle_event(now, Event::WriteDone { connection, token: transfer.token, result: Ok(()) });
                }
                let bytes = env.network.arena(node)[transfer.local_offset..][..transfer.bytes].to_owned();
                if env.write_with_immediate(connection, ((task, tasks), transfer, immediate), &bytes).is_err() {
                    core.handle_write_failed(now, transfer.token);
                }
            }
            Output::Execute { gpu, job } => self.execute(env, gpu, job),
            Output::TakeBack { gpu } => {
                let jobs = &mut self.gpus[gpu].jobs;
                if jobs.pop_back_if(|(life, _)| *life == self.life).is_some() {
                    env.trace(node, || format!("GPU {gpu} gives a batch back"));
                    core.handle_taken_back(now, gpu);
                }
            }
            // What hangs in the simulation comes back when it does.
            Output::Interrupt { .. } => {}
            Output::SendAhead { .. } => unreachable!("GPUs of the simulation have no memory for inputs"),
            Output::CopyWeights { gpu, model, executor, takes, read } => {
                let is_it = |other: &Arc<dyn Executor>| Arc::ptr_eq(other, &executor);
                let was_released = self.released.extract_if(.., |other| is_it(other)).count() > 0;
                if was_released && read.is_none() {
                    let what = format!("GPU {gpu} copies {model:?} from host memory, which it has left");
                    env.oracle.report(Violation::Weights(what));
                }
                self.copy(env, (gpu, model), takes, read);
            }
            Output::ReleaseWeights { executor } => self.released.push(executor),
            Output::FreeWeights { gpu, model, .. } => {
                if !self.gpus[gpu].weights.remove(&model) {
                    env.oracle.report(Violation::Weights(format!("GPU {gpu} frees {model:?}, which is not there")));
                }
            }
            Output::Try { .. } => unreachable!("what is emulated is not tried"),
            Output::Measure { model, .. } => {
                let takes = Span::from_millis(5) + env.micros(200_000);
                env.after(takes, Happening::Measured(node, self.life, model));
            }
            Output::Load { load, name, brought: _, is_placed: _ } => {
                let takes = Span::from_millis(2) + env.micros(100_000);
                env.after(takes, Happening::Loaded(node, self.life, load, name));
            }
        }
    }

    /// Weights are on their way.
    fn copy(&mut self, env: &mut Env, (index, model): (usize, ModelId), takes: Span, read: Option<Span>) {
        let gpu = &mut self.gpus[index];
        if let Some((other, _)) = gpu.copying.replace((model, read.unwrap_or(Span::ZERO))) {
            env.oracle.report(Violation::Weights(format!("GPU {index} copies {other:?} and {model:?} at once")));
        }
        let takes = takes + read.unwrap_or(Span::ZERO);
        let takes = match self.trouble {
            Trouble::None | Trouble::Fail => takes,
            Trouble::Slow(times) => takes * times,
            Trouble::Hang(longer) => takes + longer,
        };
        let jitter = env.micros(100);
        env.after(takes + jitter, Happening::Copied(self.node, self.life, index));
    }

    /// They are there, or, if executors fail, are not.
    pub(super) fn handle_copied(&mut self, env: &mut Env, index: usize) {
        let Some(core) = self.process.as_mut().and_then(|process| process.core.as_mut()) else { return };
        let is_done = self.trouble != Trouble::Fail;
        let gpu = &mut self.gpus[index];
        let (model, read) = gpu.copying.take().expect("it was under way");
        if is_done {
            gpu.weights.insert(model);
        }
        let (pages, max) = (gpu.weights.len() as u32 * models::WEIGHTS.pages, self.memory_pages.unwrap_or(0));
        if pages > max {
            env.oracle.report(Violation::Weights(format!("GPU {index} has {pages} pages in use, of {max}")));
        }
        env.trace(self.node, || format!("GPU {index} has copied {model:?}: {is_done}"));
        core.handle_copied(env.local(self.node), index, is_done.then_some(read));
        self.settle(env);
    }

    fn execute(&mut self, env: &mut Env, index: usize, job: Job) {
        let gpu = &mut self.gpus[index];
        let running = gpu.running.as_ref().map(|running| running.life);
        let ended = gpu.ended.iter().map(|(life, _)| *life);
        let lives = gpu.jobs.iter().chain(&gpu.taken).map(|(life, _)| *life).chain(running).chain(ended);
        if lives.filter(|life| *life == self.life).count() >= HANDED_MAX {
            env.oracle.report(Violation::Bound(format!("GPU {index} is given more than {HANDED_MAX} batches")));
        }
        gpu.jobs.push_back((self.life, job));
        self.await_start(env, index);
    }

    /// The GPU's thread takes its next batch, if it is free, and sleeps until that may start.
    fn await_start(&mut self, env: &mut Env, index: usize) {
        let gpu = &mut self.gpus[index];
        if gpu.running.is_some() || gpu.taken.is_some() {
            return;
        }
        gpu.taken = gpu.jobs.pop_front();
        let Some((_, job)) = &gpu.taken else { return };
        let local = job.offset.to_local(job.exec_at).unwrap_or(job.exec_at);
        let at = env.members[self.node.0].clock.when(local).max(env.now);
        let at = self.gpus[index].samples_until.map_or(at, |until| at.max(until));
        let late = env.micros(60);
        env.schedule(at + late, Happening::Execute(self.node, self.process_life, index));
    }

    /// The GPU's thread looks at the clock: it starts its batch, or rejects it.
    pub(super) fn handle_due(&mut self, env: &mut Env, index: usize) {
        let node = self.node;
        let Some((life, job)) = self.gpus[index].taken.take() else { return };
        if self.gpus[index].running.is_some() {
            env.oracle.report(Violation::Window(format!("GPU {index} runs two batches at once")));
        }
        let now = env.local(node);
        let started_at = job.offset.to_scheduler(now).unwrap_or(now);
        if started_at > job.latest {
            env.trace(node, || format!("GPU {index} comes too late for {job:?}"));
            return self.end(env, index, life, Execution::WindowMissed { rejected_at: started_at });
        }
        env.trace(node, || format!("GPU {index} starts {job:?}"));
        self.check_window(env, life, &job);
        if life == self.life && self.memory_pages.is_some() && !self.gpus[index].weights.contains(&job.model) {
            let model = job.model;
            env.oracle.report(Violation::Weights(format!("GPU {index} runs {model:?}, whose weights are not there")));
        }
        if life == self.life && self.released.iter().any(|executor| Arc::ptr_eq(executor, &job.executor)) {
            let what = format!("GPU {index} runs {:?}, which is in no memory", job.model);
            env.oracle.report(Violation::Weights(what));
        }
        let ModelShape { input_bytes, output_bytes, .. } = job.shape;
        let mut outputs = vec![0; job.tasks() * output_bytes];
        let profile = job.executor.emulated_profile().expect("all models are emulated");
        let (mut takes, mut alone) = (profile.latency(job.tasks()), None);
        if life == self.life {
            let arena = env.network.arena(node);
            let inputs = job.runs.iter().map(|run| &arena[run.input_offset..][..run.tasks * input_bytes]);
            let inputs = inputs.collect::<Vec<_>>().concat();
            let failed = job.executor.execute(&inputs, &mut outputs).expect("a digest can be taken of everything");
            assert_eq!(failed, []);
            takes = env.dynamic.takes(&inputs, input_bytes).unwrap_or(takes);
            alone = job.sample.and_then(|(place, plan)| {
                let input = &inputs[place * input_bytes..][..input_bytes];
                Some((plan, env.dynamic.takes(input, input_bytes)?))
            });
        }
        let takes = match self.trouble {
            Trouble::None | Trouble::Fail => takes,
            Trouble::Slow(times) => takes * times,
            Trouble::Hang(longer) => takes + longer,
        };
        let finished_at = started_at + takes;
        let execution = if self.trouble == Trouble::Fail {
            Execution::Failed { started_at, finished_at, reason: "out of memory".to_owned() }
        } else {
            Execution::Done { started_at, finished_at, outputs: Outputs::default() }
        };
        self.gpus[index].running = Some(Running { life, job, outputs, alone });
        let late = env.micros(10);
        env.after(takes + late, Happening::Executed(node, self.process_life, index, execution));
    }

    /// Invariant 2, on the clock of the primary's era: that of the scheduler that made the plan, or one that followed
    /// it.
    fn check_window(&self, env: &mut Env, life: Life, job: &Job) {
        let core = self.process.as_ref().and_then(|process| process.core.as_ref());
        let obeys = core.and_then(Core::obeys).filter(|_| life == self.life);
        let Some((claim, primary)) = env.primary.filter(|(claim, _)| obeys.is_some_and(|obeys| obeys.era == claim.era))
        else {
            return;
        };
        let Some(bound) = job.offset.error_bound() else { return };
        let drifts = env.members[self.node.0].clock.drift.0.abs() + env.members[primary.0].clock.drift.0.abs();
        let followed = if obeys == Some(claim) && self.schedulers.len() == 1 { Span::ZERO } else { FOLLOWING_ERROR };
        let error = bound + Span(drifts * DRIFT_SPAN_SECONDS) + followed;
        let at = env.primary_era().expect("there is a primary");
        env.oracle.handle_started(at, (job.exec_at, job.latest), error);
    }

    /// The GPU's thread ends its batch.
    pub(super) fn handle_executed(&mut self, env: &mut Env, index: usize, execution: Execution) {
        let Some(Running { life, job, outputs, alone }) = self.gpus[index].running.take() else { return };
        if life == self.life && matches!(execution, Execution::Done { .. }) {
            if let Some((plan, took)) = alone.filter(|_| self.gpus[index].jobs.is_empty()) {
                self.gpus[index].samples_until = Some(env.now + took);
                env.after(took, Happening::RanAlone(self.node, life, plan, took));
            }
            let mut outputs = &outputs[..];
            for run in &job.runs {
                let output = outputs.split_off(..run.tasks * job.shape.output_bytes).expect("outputs of all tasks");
                env.network.write_arena(self.node, run.output_offset, output);
            }
        }
        self.end(env, index, life, execution);
    }

    /// The GPU's thread has run a sample.
    pub(super) fn handle_ran_alone(&mut self, env: &mut Env, plan: PlanId, took: Span) {
        let Some(core) = self.process.as_mut().and_then(|process| process.core.as_mut()) else { return };
        env.samples += 1;
        core.handle_ran_alone(env.local(self.node), plan, took);
        self.settle(env);
    }

    /// The GPU's thread wakes the core's, and goes on.
    fn end(&mut self, env: &mut Env, index: usize, life: Life, execution: Execution) {
        env.trace(self.node, || format!("GPU {index} ends: {execution:?}"));
        self.gpus[index].ended.push_back((life, execution));
        let late = env.micros(100);
        env.after(late, Happening::Ended(self.node, self.process_life, index));
        self.await_start(env, index);
    }

    /// The core hears of what has ended.
    pub(super) fn handle_ended(&mut self, env: &mut Env, index: usize) {
        let now = env.local(self.node);
        while let Some((life, execution)) = self.gpus[index].ended.pop_front() {
            let is_ours = life == self.life;
            if let Some(core) = self.process.as_mut().and_then(|process| process.core.as_mut()).filter(|_| is_ours) {
                core.handle_executed(now, index, execution);
            }
        }
        self.settle(env);
    }

    /// The loader has ended: mostly well.
    pub(super) fn handle_loaded(&mut self, env: &mut Env, load: LoadId, name: &str) {
        let Some(core) = self.process.as_mut().and_then(|process| process.core.as_mut()) else { return };
        let version = env.repository.get(name).copied();
        let luck = if env.loads_fail { env.rng.random_range(0..10) } else { 10 };
        let result = match (luck, version) {
            (0, _) | (_, None) => Err("bad luck".to_owned()),
            (1, _) => Ok(Vec::new()),
            (_, Some(newest)) => {
                let gpus = self.gpus.len() as u32;
                let loaded = |version| models::loaded(env.dynamic, name, version, gpus);
                Ok(models::served(newest).map(loaded).collect())
            }
        };
        core.handle_loaded(env.local(self.node), load, result);
        self.settle(env);
    }

    pub(super) fn handle_measured(&mut self, env: &mut Env, model: ModelId) {
        let Some(core) = self.process.as_mut().and_then(|process| process.core.as_mut()) else { return };
        // Its cost, if it has any, was right from the start.
        let Some(loaded) = core.hosted(model) else { return };
        let (of, measured) = (Arc::downgrade(loaded), (models::profile(), loaded.cost));
        core.handle_measured(env.local(self.node), (model, &of), Some(measured));
        self.settle(env);
    }

    /// Forgets how a plan ended, now and then, if that bug is planted.
    fn mutate(&self, env: &mut Env, frame: Vec<u8>) -> Vec<u8> {
        if env.mutation != Some(Mutation::DropOutcome) {
            return frame;
        }
        let mut writer = FrameWriter::default();
        for message in read_frame::<BackendToScheduler>(&frame).map(|message| message.expect("it is ours")) {
            let mut is_kept = |report: &BackendToModelThread| {
                let is_outcome =
                    matches!(report, BackendToModelThread::PlanDone { .. } | BackendToModelThread::Answered { .. });
                !(is_outcome && env.chance(1))
            };
            let pushed = match &message {
                Addressed::Control(BackendToControl::Inherited(report)) if !is_kept(report) => continue,
                Addressed::ModelThread(report) if !is_kept(report) => continue,
                Addressed::Control(message) => writer.push(message),
                Addressed::ModelThread(report) => writer.push(report),
            };
            pushed.expect("it fitted before");
        }
        writer.take().unwrap_or_default()
    }

    /// What is still open, if anything is: there must be nothing once all faults and requests have ended.
    pub(super) fn unfinished(&self) -> Option<String> {
        let core = self.process.as_ref().and_then(|process| process.core.as_ref());
        match core {
            None => Some("it has no session".to_owned()),
            Some(core) if !core.has_joined() => Some("it has not joined".to_owned()),
            Some(core) => (core.plans() > 0).then(|| format!("{} plans have not ended", core.plans())),
        }
    }
}
