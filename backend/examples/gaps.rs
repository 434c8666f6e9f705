//! How long a GPU with a full queue does nothing between two batches, as the backend stamps them: from `finished_at` to
//! the next `started_at`. A scheduler and a frontend are played here, over real sockets, and see to it that more
//! batches wait all the time. The GPU is emulated, and takes the same time for each batch; or it is the first of the
//! host, and runs a model. What the backend takes for a batch holds its launch and the way of its outputs then, while
//! the GPU does nothing, either: the time from end to end has all of it.
//!
//! ```text
//! cargo run -p backend --example gaps -- [BATCH_MS [SECONDS]]
//! cargo run -p backend --example gaps -- MODEL_FOLDER [SECONDS [BATCH]]
//! ```
#![allow(clippy::disallowed_methods)] // It is a driver: it has a thread, sockets and a clock.

use std::{
    fs,
    net::Ipv4Addr,
    os::unix::fs::symlink,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use backend::{config::Config, drive};
use proto::{
    BackendId, Claim, Epoch, Era, FrontendId, LinkPass, ModelId, PlanId, SlotDescriptor, Span, TaskId, Timestamp,
    backend_to_frontend::{ANSWER_HEADER_BYTES, LinkWelcome},
    backend_to_scheduler::{BackendToControl, BackendToModelThread, BackendToScheduler, PlanOutcome},
    clock::ClockReply,
    frame::{Addressed, FrameWriter, read_frame},
    hello::ModelThreads,
    scheduler_to_backend::{BackendWelcome, BatchPlan, PlannedTask, SchedulerToBackend},
    stages::SchedulerStamps,
};
use transport::{
    Access, Clock, ConnectionId, Endpoint, EndpointConfig, Event, ROCE_PORT, Region, RegionKey, random_loopback,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const SECRET: &str = "what all members of this run share";
const FRONTEND: FrontendId = FrontendId(1);
const CLAIM: Claim = Claim { era: Era(1), epoch: Epoch { number: 1, scheduler: 0 } };
const MODEL: ModelId = ModelId(0);
/// Plans at the backend: one that executes, one that is next, and one whose input is being fetched.
const PLANS: u64 = 3;
/// Batches whose slots there are: none is used again while its answer is under way.
const SLOTS: u64 = 16;
/// Batches that are not counted.
const WARM_UP: usize = 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let first = arguments.first().map_or("5", String::as_str);
    let seconds: f64 = arguments.get(1).map_or(Ok(10.0), |text| text.parse())?;
    let repository = tempfile::tempdir()?;
    let is_emulated = match first.parse() {
        Ok(batch_ms) => write_model(repository.path(), batch_ms).map(|()| true)?,
        Err(_) => link_model(Path::new(first), repository.path()).map(|()| false)?,
    };
    let batch: usize = arguments.get(2).map_or(Ok(1), |text| text.parse())?;
    let models = repository::load(repository.path())?.whole()?;
    let model = models.first().ok_or("expected a folder with a config.pbtxt")?;
    if !(1..=model.max_batch).contains(&batch) {
        return Err(format!("batch: found {batch}, expected 1 to {} (max_batch_size)", model.max_batch).into());
    }
    let mut members = Members::open((model.input_bytes(), model.output_bytes()), batch)?;
    let executor = if is_emulated { "cpu" } else { "cuda" };
    let config: Config = toml::from_str(&format!(
        "scheduler = {:?}\nsecret = {SECRET:?}\nrepository = {:?}\nexecutor = {executor:?}\ndrain_timeout_ms = 100",
        members.scheduler.listen_address().ok_or("the scheduler does not listen")?.to_string(),
        repository.path()
    ))?;
    let stop = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        let backend = scope.spawn(|| drive::run(&config, &stop));
        members.run(Span::from_secs_f64(seconds), || backend.is_finished());
        stop.store(true, Ordering::Relaxed);
        backend.join()
    });
    ended.map_err(|_| "the backend panicked")??;
    members.report(&if is_emulated { format!("of {first} ms") } else { format!("of {batch}") });
    Ok(())
}

/// One that is emulated.
fn write_model(repository: &Path, batch_ms: f64) -> Result<()> {
    let folder = repository.join("fixed");
    fs::create_dir(&folder)?;
    let text = format!(
        r#"name: "fixed"
backend: "emulated"
max_batch_size: 1
input [ {{ name: "row" data_type: TYPE_UINT8 dims: [ 1024 ] }} ]
output [ {{ name: "digest" data_type: TYPE_UINT64 dims: [ 2 ] }} ]
parameters {{ key: "slo_ms" value: {{ string_value: "1000" }} }}
parameters {{ key: "alpha_ms" value: {{ string_value: "0.001" }} }}
parameters {{ key: "beta_ms" value: {{ string_value: "{batch_ms}" }} }}
"#
    );
    Ok(fs::write(folder.join("config.pbtxt"), text)?)
}

/// A model and nothing else.
fn link_model(model: &Path, repository: &Path) -> Result<()> {
    let name = model.file_name().ok_or("expected a model's folder")?;
    Ok(symlink(fs::canonicalize(model)?, repository.join(name))?)
}

/// Both sides of the backend.
struct Members {
    clock: Clock,
    scheduler: Endpoint,
    frontend: Endpoint,
    /// Of a task.
    input_bytes: usize,
    answer_bytes: usize,
    /// Tasks of a batch.
    batch: usize,
    /// Inputs, and behind them answers.
    arena: Region,
    arena_key: RegionKey,
    backend: Option<ConnectionId>,
    is_linked: bool,
    sent: u64,
    done: u64,
    /// When batches that ran started and ended.
    ran: Vec<(Timestamp, Timestamp)>,
    missed: usize,
}

impl Members {
    fn open((input_bytes, output_bytes): (usize, usize), batch: usize) -> Result<Self> {
        let answer_bytes = ANSWER_HEADER_BYTES + output_bytes.max(240);
        let slots = SLOTS as usize * batch;
        let open = |ip: Ipv4Addr| {
            let config = EndpointConfig::soft((ip, ROCE_PORT).into()).listening((ip, 0).into()).with_secret(SECRET);
            Endpoint::open(config)
        };
        let mut frontend = open(random_loopback())?;
        let arena = Region::allocate(slots * (input_bytes + answer_bytes) + 8 * slots)?;
        let arena_key = frontend.register(&arena, Access { remote_read: true, remote_write: true })?;
        Ok(Self {
            clock: Clock::start(),
            scheduler: open(random_loopback())?,
            frontend,
            input_bytes,
            answer_bytes,
            batch,
            arena,
            arena_key,
            backend: None,
            is_linked: false,
            sent: 0,
            done: 0,
            ran: Vec::new(),
            missed: 0,
        })
    }

    /// Keeps the queue full for so long, once there is a link.
    fn run(&mut self, span: Span, is_over: impl Fn() -> bool) {
        let mut until = Timestamp::NEVER;
        loop {
            let now = self.clock.now();
            let mut busy = self.scheduler.drive(now) | self.frontend.drive(now);
            while let Some(event) = self.scheduler.poll_event() {
                busy = true;
                self.handle_scheduler_event(event);
            }
            while let Some(event) = self.frontend.poll_event() {
                busy = true;
                self.handle_frontend_event(event);
            }
            if self.is_linked && until == Timestamp::NEVER {
                until = now + span;
            }
            while self.is_linked && now < until && self.sent < self.done + PLANS {
                self.plan(now);
            }
            if is_over() || (now >= until && self.done == self.sent) {
                return;
            }
            if !busy {
                self.scheduler.wait(now, now + Span::from_micros(200));
            }
        }
    }

    fn handle_scheduler_event(&mut self, event: Event) {
        match event {
            Event::Incoming { connection, .. } => {
                let model_threads = ModelThreads::default();
                let welcome =
                    BackendWelcome { backend: BackendId(1), models: vec![MODEL], model_threads, claim: CLAIM };
                self.scheduler.accept(self.clock.now(), connection, encode(wincode::serialize(&welcome)));
                self.backend = Some(connection);
                let link_address = self.frontend.listen_address().expect("it listens").to_string();
                self.tell(&SchedulerToBackend::FrontendJoined { frontend: FRONTEND, link_address, pass: LinkPass(0) });
            }
            Event::Message { frame, .. } => {
                for report in read_frame::<BackendToScheduler>(&frame) {
                    self.handle_report(report.expect("a backend says what schedulers know"));
                }
            }
            _ => {}
        }
    }

    fn handle_report(&mut self, report: BackendToScheduler) {
        match report {
            Addressed::Control(BackendToControl::ClockRequest { sent_at }) => {
                let now = self.clock.now();
                self.tell(&SchedulerToBackend::Clock(ClockReply { sent_at, received_at: now, replied_at: now }));
            }
            Addressed::Control(BackendToControl::Linked { .. }) => self.is_linked = true,
            Addressed::ModelThread(BackendToModelThread::PlanDone { outcome, .. }) => {
                self.done += 1;
                match outcome {
                    PlanOutcome::Executed { started_at, finished_at } => self.ran.push((started_at, finished_at)),
                    PlanOutcome::WindowMissed { .. } | PlanOutcome::Abandoned { .. } => self.missed += 1,
                }
            }
            _ => {}
        }
    }

    fn handle_frontend_event(&mut self, event: Event) {
        if let Event::Incoming { connection, .. } = event {
            let welcome = LinkWelcome {
                arena_address: self.arena_key.address,
                arena_bytes: self.arena.len() as u64,
                arena_rkey: self.arena_key.rkey,
                guards_offset: self.slots() * (self.input_bytes + self.answer_bytes) as u64,
                guards_rkey: self.arena_key.rkey,
            };
            self.frontend.accept(self.clock.now(), connection, encode(wincode::serialize(&welcome)));
        }
    }

    fn tell(&mut self, message: &SchedulerToBackend) {
        let mut writer = FrameWriter::default();
        writer.push(message).expect("it fits a frame");
        let (backend, frame) = (self.backend.expect("it has joined"), writer.take().expect("there is a message"));
        self.scheduler.send(backend, &frame).expect("the backend is there");
    }

    fn slots(&self) -> u64 {
        SLOTS * self.batch as u64
    }

    /// A task in one of the slots that have been free for longest.
    fn task(&self, number: u64, now: Timestamp) -> PlannedTask {
        let slot = number % self.slots();
        PlannedTask {
            task: TaskId::new(FRONTEND, number),
            attempt: 0,
            slot: SlotDescriptor {
                slot: slot as u32,
                input_offset: slot * self.input_bytes as u64,
                input_bytes: self.input_bytes as u32,
                answer_offset: self.slots() * self.input_bytes as u64 + slot * self.answer_bytes as u64,
                answer_bytes_max: self.answer_bytes as u32,
                key: SlotDescriptor::NO_KEY,
            },
            stamps: SchedulerStamps { queued_at: now, due_at: now, granted_at: now },
        }
    }

    /// Another batch, whose window is open.
    fn plan(&mut self, now: Timestamp) {
        let first = self.sent * self.batch as u64;
        let tasks = (0..self.batch as u64).map(|index| self.task(first + index, now)).collect();
        self.tell(&SchedulerToBackend::Plan(BatchPlan {
            plan: PlanId(self.sent),
            gpu_index: 0,
            model: MODEL,
            exec_at: now,
            latest: now + Span::from_millis(10_000),
            tasks,
            sample: None,
        }));
        self.sent += 1;
    }

    fn report(&self, batches: &str) {
        let counted = self.ran.get(WARM_UP..).unwrap_or_default();
        let between = |of: fn(&[(Timestamp, Timestamp)]) -> Span| {
            let mut us: Vec<f64> = counted.windows(2).map(|pair| of(pair).as_nanos() as f64 / 1e3).collect();
            us.sort_unstable_by(f64::total_cmp);
            us
        };
        let at = |us: &[f64], share: f64| {
            let place = ((us.len() as f64 * share) as usize).min(us.len().saturating_sub(1));
            us.get(place).copied().unwrap_or(f64::NAN)
        };
        let gaps = between(|pair| pair[1].0 - pair[0].1);
        let ends = between(|pair| pair[1].1 - pair[0].1);
        println!(
            "batches {batches}: {} ran, {} missed; us between two: p50 {:.1}, p90 {:.1}, p99 {:.1}, max {:.1}; \
             from end to end: p50 {:.1}",
            self.ran.len(),
            self.missed,
            at(&gaps, 0.5),
            at(&gaps, 0.9),
            at(&gaps, 0.99),
            at(&gaps, 1.0),
            at(&ends, 0.5)
        );
    }
}

fn encode<E: std::fmt::Debug>(message: std::result::Result<Vec<u8>, E>) -> Vec<u8> {
    message.expect("encoding into memory cannot fail")
}
