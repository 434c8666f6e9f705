//! One life under one name, on the network thread: the endpoint and the memory, and between them and the GPUs'
//! threads the core, which decides everything.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use admin::{Heart, Vitals};
use proto::{
    Brought, LoadId, ModelId, Span, TaskId, Timestamp, backend_to_frontend::ANSWER_HEADER_BYTES, slot::GUARD_BYTES,
    turns::TurnWatch,
};
use repository::Refused;
use transport::{Access, Address, Arm, Clock, Endpoint, EndpointConfig, Memory, Region, Waker};
use zerocopy::IntoBytes;

use super::{
    copies::{self, Copies},
    epochs::LowerEpochs,
    gpu::{End, Gpus, Job, JobAhead},
    loader::{self, Done, Load, Loader},
    measuring::Measure,
    pinned::Staged,
    turns::{Turns, Wanted},
};
use crate::{
    config::{Config, Lanes},
    core::{self, Core, CoreConfig, Kept, LAST_WORDS_SPAN, Output},
    error::BackendError,
    executor::{Executor, Loaded, gpus::Devices},
    staging::{BUFFERS, ModelShape, Staging},
};

/// The longest wait: `stop` is looked at this often.
const WAIT_MAX: Span = Span::from_millis(100);

/// How a session ended.
pub(super) struct Ended {
    pub(super) reason: String,
    /// Whether there had been a primary.
    pub(super) joined: bool,
    /// What the next one goes on with.
    pub(super) kept: Kept,
    /// What is hosted now.
    pub(super) models: Vec<Arc<Loaded>>,
}

/// The threads that outlive a session.
#[derive(Clone, Copy)]
pub(super) struct Threads<'a> {
    pub(super) gpus: &'a Gpus,
    pub(super) copies: &'a Copies,
    pub(super) loader: &'a Loader,
    pub(super) devices: &'a Devices,
    pub(super) turns: &'a Turns,
    pub(super) lanes: &'a Lanes,
    /// How this process is, and its network thread.
    pub(super) vital: (&'a Vitals, &'a Heart),
    pub(super) lower_epochs: &'a LowerEpochs,
}

pub(super) struct Session<'a> {
    number: u64,
    clock: Clock,
    threads: Threads<'a>,
    endpoint: Endpoint,
    waker: Waker,
    staged: Arc<Staged>,
    core: Core,
    /// What runs the batches that each GPU has, in their order.
    executing: BTreeMap<usize, VecDeque<Arc<dyn Executor>>>,
    drain_timeout: Span,
}

/// Batches have inputs, and answers, of so many bytes at most if their model comes later, where memory has as much.
const LATER_BYTES_MAX: usize = 64 << 20;
/// The same where it has not, and where all memory is pinned.
const LATER_BYTES_MIN: usize = 256 << 10;

/// Room in a staging buffer for each side of a batch of a model that comes later. What nobody writes to takes no memory
/// unless a network device has it pinned: an eighth of the memory at most.
fn later_bytes((config, gpus): (&Config, usize), arm: &Arm) -> usize {
    let default = || match arm {
        Arm::Verbs(_) => LATER_BYTES_MIN,
        Arm::Soft { .. } => {
            let sides = 2 * BUFFERS * gpus;
            let most = sides * LATER_BYTES_MAX;
            (Memory::here().map_or(0, |memory| memory.eighth_of(most)) / sides).max(LATER_BYTES_MIN)
        }
    };
    config.staging_bytes.unwrap_or_else(default)
}

impl<'a> Session<'a> {
    /// Opens the network and starts to connect. Staging memory has room for batches of the models and of `shapes`.
    pub(super) fn open(
        (config, schedulers, endpoint): (&Config, &[Address], EndpointConfig),
        clock: Clock,
        (models, shapes): (Vec<Arc<Loaded>>, &[ModelShape]),
        not_loaded: Vec<Refused>,
        threads: Threads<'a>,
        number: u64,
    ) -> Result<Self, BackendError> {
        let gpus = threads.lanes.with_gpus() as usize;
        let later_bytes = later_bytes((config, gpus), &endpoint.arm);
        let mut endpoint = Endpoint::open(EndpointConfig {
            connections_max: config.connections_max,
            read_budget_bytes: config.read_budget_bytes,
            ..endpoint
        })?;
        let shapes = models.iter().map(|model| model.shape).chain(shapes.iter().copied());
        let staging = Staging::new(gpus, &shapes.collect::<Vec<_>>(), later_bytes);
        let bytes = staging.bytes();
        let region = Region::allocate(bytes).map_err(|cause| BackendError::Memory { bytes, cause })?;
        staging.populated().for_each(|part| region.populate(part));
        let lkey = endpoint.register(&region, Access::default())?.lkey;
        let mut staged = Staged::pinned(region, threads.devices, gpus)?;
        let landings = staged.land(&mut endpoint, threads.devices, (gpus, staging.landing_bytes()));
        let staged = Arc::new(staged);
        // What an earlier session had copied nobody knows of any more.
        for model in &models {
            let gpus = model.gpu_indexes.iter().map(|&gpu| gpu as usize);
            gpus.for_each(|gpu| threads.copies.free(gpu, Arc::clone(&model.executor)));
        }
        let token = rand::random();
        let (memory_pages, host_pages) = (config.memory_pages()?, config.host_pages()?);
        let (name, schedulers) = (config.network.member_name(), schedulers.to_vec());
        let is_auto = config.placement.is_auto();
        let core_config =
            CoreConfig { name, schedulers, token, staging, lkey, landings, memory_pages, host_pages, is_auto };
        let mut core = Core::new(core_config, models);
        core.handle_not_loaded(not_loaded);
        let waker = endpoint.waker();
        let drain_timeout = Span::from_millis(i64::try_from(config.drain_timeout_ms).unwrap_or(i64::MAX / 1_000_000));
        let executing = BTreeMap::new();
        Ok(Self { number, clock, threads, endpoint, waker, staged, core, executing, drain_timeout })
    }

    /// As the session before left it.
    pub(super) fn set_kept(&mut self, kept: Kept) {
        self.core.handle_kept(kept);
    }

    /// Serves until there is no scheduler to obey, or `stop` is set and all plans are finished, or take too long.
    pub(super) fn run(mut self, stop: &AtomicBool) -> Ended {
        self.threads.turns.open(self.waker.clone());
        let mut leaves_by: Option<Timestamp> = None;
        let (mut watch, mut due, mut told) = (TurnWatch::default(), Timestamp::PAST, None);
        let ((vitals, heart), mut lower_epochs) = (self.threads.vital, 0);
        while self.core.ended().is_none() {
            heart.beat(self.clock.now());
            self.tell_health(leaves_by.is_some(), &mut told);
            self.threads.lower_epochs.handle_counted(self.core.lower_epochs(), &mut lower_epochs);
            if let Some(silence) = watch.handle_turn(due, self.clock.now()) {
                tracing::warn!("this thread has done nothing for {silence}: the machine is too busy");
            }
            self.endpoint.drive(self.clock.now());
            self.turn();
            let now = self.clock.now();
            if leaves_by.is_none() && stop.load(Ordering::Relaxed) {
                tracing::info!("about to end: plans under way are finished");
                vitals.set_ending();
                leaves_by = Some(now + self.drain_timeout);
                self.core.handle_leaving(now, self.drain_timeout);
                // What is said of it leaves at once.
                due = now;
                continue;
            }
            if leaves_by.is_some_and(|by| by <= now) {
                break;
            }
            if self.core.has_left() {
                leaves_by = leaves_by.map(|by| by.min(now + LAST_WORDS_SPAN));
            }
            due = self.core.poll_timeout().min(leaves_by.unwrap_or(Timestamp::NEVER)).min(now + WAIT_MAX).max(now);
            self.endpoint.wait(now, due);
        }
        // Nothing of it hangs for the next one.
        heart.rest();
        vitals.set_trouble(None);
        vitals.set_ready(Err("it has no scheduler"));
        self.threads.gpus.end_session(self.number);
        self.threads.turns.close();
        let reason = self.core.ended().unwrap_or("asked to stop").to_owned();
        let (joined, kept) = (self.core.has_joined(), self.core.kept());
        Ended { joined, kept, reason, models: self.core.into_models() }
    }

    /// Tells whoever looks after the process how it is, if that is another than was told last.
    fn tell_health(&self, leaves: bool, told: &mut Option<(bool, Option<usize>)>) {
        let now = (self.core.has_primary() && !leaves, self.core.hanging_gpu());
        if told.replace(now) == Some(now) {
            return;
        }
        let (vitals, (is_ready, hanging)) = (self.threads.vital.0, now);
        vitals.set_trouble(hanging.map(|gpu| format!("the executor of GPU {gpu} does not come back")));
        vitals.set_ready(if is_ready { Ok(()) } else { Err("it obeys no scheduler, or is about to end") });
    }

    /// Takes in what has happened and does what comes of it.
    fn turn(&mut self) {
        while let Some(event) = self.endpoint.poll_event() {
            self.core.handle_event(self.clock.now(), event);
        }
        self.take_finished(|_| {});
        while let Some(copied) = self.threads.copies.poll_copied() {
            if copied.session == self.number {
                if let Err(reason) = &copied.read {
                    tracing::warn!(gpu = copied.gpu, %reason, "weights could not be loaded");
                }
                self.core.handle_copied(self.clock.now(), copied.gpu, copied.read.ok());
            }
        }
        while let Some(done) = self.threads.loader.poll_done() {
            let (session, now) = (self.number, self.clock.now());
            match done {
                Done::Loaded { session: of, load, result } if of == session => match result.transpose() {
                    None => self.core.handle_ensemble(now, load),
                    Some(result) => self.core.handle_loaded(now, load, result),
                },
                Done::Measured { session: of, model, of: loaded, measured } if of == session => {
                    self.core.handle_measured(now, (model, &loaded), measured);
                }
                _ => {}
            }
        }
        while let Some(Wanted { gpus, takes, patience, put_off }) = self.threads.turns.poll_wanted() {
            self.core.handle_trial(self.clock.now(), gpus, takes, patience, put_off);
        }
        self.core.handle_timeout(self.clock.now());
        while let Some(output) = self.core.poll_output() {
            self.perform(output);
        }
    }

    /// Takes in what GPUs' threads have ended, and tells the GPU of each batch.
    fn take_finished(&mut self, mut ended: impl FnMut(usize)) {
        while let Some(finished) = self.threads.gpus.poll_finished() {
            // What an earlier session asked for is of no use: its staging memory is gone, and who asked for it.
            if finished.session != self.number {
                continue;
            }
            match finished.end {
                End::Batch(execution) => {
                    self.executing.entry(finished.gpu).or_default().pop_front();
                    self.core.handle_executed(self.clock.now(), finished.gpu, execution);
                    ended(finished.gpu);
                }
                End::Alone(plan, took) => self.core.handle_ran_alone(self.clock.now(), plan, took),
            }
        }
    }

    fn perform(&mut self, output: Output) {
        let now = self.clock.now();
        match output {
            Output::Connect { peer, to, hello } => {
                let connection = self.endpoint.connect(now, to, hello);
                self.core.handle_connecting(peer, connection);
            }
            Output::Disconnect { connection } => self.endpoint.disconnect(connection),
            Output::Send { connection, frame } => {
                if let Err(error) = self.endpoint.send(connection, &frame) {
                    self.core.handle_send_failed(now, connection, &error.to_string());
                }
            }
            Output::Read { connection, task, transfer } => {
                if let Err(error) = self.endpoint.read(connection, transfer) {
                    self.core.note_not_posted(task.frontend(), format_args!("an input cannot be read: {error}"));
                    self.core.handle_read_failed(now, transfer.token);
                }
            }
            Output::ReadGuards { connection, task, transfer } => {
                if let Err(error) = self.endpoint.read(connection, transfer) {
                    self.core.note_not_posted(task.frontend(), format_args!("a guard cannot be read: {error}"));
                    self.core.handle_read_failed(now, transfer.token);
                }
            }
            Output::LookAtGuards { token, offset, guards } => {
                let mut bytes = vec![0; guards * GUARD_BYTES];
                self.staged.region().read(offset, &mut bytes);
                let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
                self.core.handle_guards(now, token, &words);
            }
            Output::Write { connection, transfer, immediate, header, text } => {
                self.staged.region().write(transfer.local_offset, header.as_bytes());
                if let Some(text) = text {
                    self.staged.region().write(transfer.local_offset + ANSWER_HEADER_BYTES, text.as_bytes());
                }
                if let Err(error) = self.endpoint.write_with_immediate(connection, transfer, immediate) {
                    let frontend = TaskId(header.task).frontend();
                    self.core.note_not_posted(frontend, format_args!("an answer cannot be written: {error}"));
                    self.core.handle_write_failed(now, transfer.token);
                }
            }
            Output::SendAhead { gpu, number, executor, runs } => {
                let (session, staged) = (self.number, Arc::clone(&self.staged));
                self.threads.gpus.post_ahead(gpu, JobAhead { session, number, executor, runs, staged });
            }
            Output::Execute { gpu, job } => self.execute(gpu, job),
            Output::TakeBack { gpu } => {
                if self.threads.gpus.take_back(gpu, self.number) {
                    self.executing.entry(gpu).or_default().pop_back();
                    self.core.handle_taken_back(now, gpu);
                }
            }
            Output::Interrupt { gpu } => self.interrupt(gpu),
            Output::CopyWeights { gpu, executor, takes, read, .. } => self.copy(gpu, executor, (takes, read)),
            Output::FreeWeights { gpu, executor, .. } => {
                executor.into_iter().for_each(|executor| self.threads.copies.free(gpu, executor));
            }
            Output::ReleaseWeights { executor } => executor.release(),
            Output::Try { has_turn } => self.threads.turns.give(has_turn),
            Output::Measure { model, loaded } => self.measure(model, loaded),
            Output::Load { load, name, brought, is_placed } => self.load(load, name, brought, is_placed),
        }
    }

    /// Ends what a GPU executes, unless that has ended since it was given up: what was behind it runs then.
    fn interrupt(&mut self, gpu: usize) {
        let mut has_ended = false;
        self.take_finished(|other| has_ended |= other == gpu);
        if !has_ended && let Some(executor) = self.executing.get(&gpu).and_then(VecDeque::front) {
            executor.interrupt(gpu);
        }
    }

    fn execute(&mut self, gpu: usize, batch: core::Job) {
        self.executing.entry(gpu).or_default().push_back(Arc::clone(&batch.executor));
        let job = Job { session: self.number, batch, staged: Arc::clone(&self.staged), waker: self.waker.clone() };
        self.threads.gpus.post(gpu, job);
    }

    fn copy(&mut self, gpu: usize, executor: Arc<dyn Executor>, (takes, read): (Span, Option<Span>)) {
        let job = copies::Job { session: self.number, takes, executor, read, waker: self.waker.clone() };
        if !self.threads.copies.post(gpu, job) {
            tracing::warn!(gpu, "weights of earlier sessions are still on their way to the GPU");
            self.core.handle_copy_stuck(self.clock.now(), gpu);
        }
    }

    fn load(&mut self, load: LoadId, name: String, brought: Option<Brought>, is_placed: bool) {
        let (asked_at, waker) = (self.clock.now(), self.waker.clone());
        let job = Load { session: self.number, load, name, brought, is_placed, asked_at, waker };
        if !self.threads.loader.post(loader::Job::Load(job)) {
            let reason = "too many models wait to be loaded here; try again".to_owned();
            self.core.handle_loaded(self.clock.now(), load, Err(reason));
        }
    }

    fn measure(&mut self, model: ModelId, loaded: Weak<Loaded>) {
        let (of, waker) = (loaded.clone(), self.waker.clone());
        let job = Measure { session: self.number, model, loaded, waker };
        if !self.threads.loader.post(loader::Job::Measure(job)) {
            self.core.handle_measured(self.clock.now(), (model, &of), None);
        }
    }
}
