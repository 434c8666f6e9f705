//! One rate on the scheduler's threads as they run in production, without the network: the load is generated within the
//! ModelThreads, which have production's planner and mailboxes, and the RankThread is production's driver. GPUs are
//! emulated by the end of their batches, so that nothing but the scheduler is measured.
//!
//! A request's wait counts from the instant it was due, whatever kept its ModelThread from taking it in, and its
//! deadline does too. This is a driver: it owns threads and reads the clock, once for each turn.
#![allow(clippy::disallowed_methods)]

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use crossbeam_channel::unbounded;
use hdrhistogram::Histogram;
use proto::{GpuId, LatencyProfile, ModelId, ModelThreadId, Span, TaskId, Timestamp};
use scheduler::{
    Doorbell, MODELS_MAX, ModelConfig, NetworkBudget, Planner, PlannerOutput, Policy, Task, mailbox,
    news::ControlToRank,
    process::{
        threads::RankDriver,
        turns::{self, Bed, Idleness},
    },
    rank_loop::RankLoop,
};

use crate::percentiles::{Tail, nanoseconds};

/// DenseNet121 on an A100 (Symphony, Table 4), in milliseconds.
const ALPHA_MS: f64 = 0.054;
const BETA_MS: f64 = 10.546;
const SLO: Span = Span::from_millis(100);
/// Tasks that may wait for one model.
const QUEUE_MAX: usize = 65_536;
/// Requests that one turn of a ModelThread takes in at most, as from one poll of its receive queue.
const BURST_MAX: u64 = 64;
/// The longest sleep of a thread with nothing to do.
const NAP_MAX: Span = Span::from_millis(10);

/// How threads wait for work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Polling {
    /// They have a core each, and look for work for a while before they sleep.
    Spin,
    /// They sleep as soon as they have nothing to do.
    Adaptive,
}

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Shards; at least 1, and at most `models`.
    pub model_threads: u32,
    /// Spread over the shards.
    pub models: u32,
    /// Each hosts all models.
    pub gpus: u32,
    /// Aggregate requests a second; as many as can be planned if `None`.
    pub rate_rps: Option<f64>,
    /// Measured span in seconds, after a warm-up of a tenth of it.
    pub seconds: f64,
    /// How threads wait.
    pub polling: Polling,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Requests a second that were generated.
    pub generated_rps: f64,
    /// Requests a second that were planned in batches.
    pub planned_rps: f64,
    /// Refused or given up, of all requests: above 0 the load was more than the GPUs could take.
    pub dropped_fraction: f64,
    /// Batches that were planned.
    pub batches: u64,
    /// Those that left their ModelThread after their `latest`.
    pub batches_late: u64,
    /// From the instant a request was due to the end of the turn that took it in; empty without a rate. Requests of
    /// one turn all count with the wait of the first.
    pub wait_us: Tail,
    /// From the instant the first timer of the RankThread's turn was due to the final batch in the ModelThread.
    pub lateness_us: Tail,
    /// Time that ModelThreads were busy for each planned request.
    pub ns_per_request: f64,
    /// Time that the RankThread was busy, of the measured time.
    pub rank_busy_fraction: f64,
    /// Time that threads were ready to run but had no core, of the measured time of all; `None` where the system does
    /// not tell.
    pub no_core_fraction: Option<f64>,
    /// The longest turn of a thread, in which it is interrupted at worst.
    pub turn_us_max: f64,
}

/// What all threads share.
struct Run {
    setup: Setup,
    started: Instant,
    /// Counts are taken from here to `stop`.
    warm: AtomicBool,
    stop: AtomicBool,
}

impl Run {
    fn has_cores(&self) -> bool {
        self.setup.polling == Polling::Spin
    }

    fn now(&self) -> Timestamp {
        Timestamp::ZERO + Span::from(self.started.elapsed())
    }
}

/// Measures. `progress` is told what part has passed, from 0 to 1.
pub fn measure(setup: Setup, progress: &mut dyn FnMut(f64)) -> Measured {
    let run = Run { setup, started: Instant::now(), warm: AtomicBool::new(false), stop: AtomicBool::new(false) };
    let links = (0..setup.model_threads).map(|_| mailbox::link(MODELS_MAX));
    let (model_ends, rank_ends): (Vec<_>, Vec<_>) = links.unzip();
    let bed = |_| {
        let (bed, bell) = Bed::new();
        (bed, Arc::new(bell))
    };
    let beds: Vec<_> = (0..setup.model_threads).map(bed).collect();
    let (rank_bed, rank_bell) = bed(0);
    let bells = beds.iter().map(|(_, bell)| Arc::clone(bell)).collect();
    let rank = rank_driver(
        &run,
        RankLoop::new(NetworkBudget::default(), rank_ends),
        (rank_bed, Arc::clone(&rank_bell)),
        bells,
    );
    // Only where a core is left for everything else: a pinned thread cannot give way to what runs on its core.
    let cores = Some(turns::cores()).filter(|cores| cores.len() > setup.model_threads as usize + 1);
    let pin = |index: usize| turns::pin(cores.as_ref().map(|cores| cores[index]));
    thread::scope(|scope| {
        let (run, rank_bell) = (&run, &rank_bell);
        let rank = scope.spawn(move || {
            pin(0);
            rank_thread(run, rank)
        });
        let spawn = |(index, (end, bed))| {
            scope.spawn(move || {
                pin(index + 1);
                let planner = Policy::Deferred.sharded_planner(NetworkBudget::default(), end);
                model_thread(run, index as u32, planner.expect("a policy of windows"), (bed, rank_bell))
            })
        };
        let shards: Vec<_> = model_ends.into_iter().zip(beds).enumerate().map(spawn).collect();
        let measured = wait(run, progress);
        let joined = shards.into_iter().map(|shard| shard.join().expect("a ModelThread panicked"));
        let (counts, mut turns): (Vec<_>, Vec<_>) = joined.unzip();
        let rank = rank.join().expect("the RankThread panicked");
        let rank_busy = rank.busy;
        turns.push(rank);
        summarize(&counts, &turns, rank_busy, measured)
    })
}

/// Sleeps through warm-up and measurement; returns how long was measured.
fn wait(run: &Run, progress: &mut dyn FnMut(f64)) -> Duration {
    thread::sleep(Duration::from_secs_f64(run.setup.seconds / 10.0));
    run.warm.store(true, Ordering::Relaxed);
    let start = Instant::now();
    let length = Duration::from_secs_f64(run.setup.seconds);
    while let Some(left) = length.checked_sub(start.elapsed()) {
        thread::sleep(left.min(Duration::from_millis(100)));
        progress((start.elapsed().as_secs_f64() / run.setup.seconds).min(1.0));
    }
    run.stop.store(true, Ordering::Relaxed);
    start.elapsed()
}

/// A thread's turns: when each started, and how long those took that had something to do.
struct Turns<'a> {
    run: &'a Run,
    now: Timestamp,
    is_warm: bool,
    busy: Span,
    longest: Span,
    /// From the end of the warm-up on, once the last turn has ended.
    no_core: Option<Span>,
}

impl<'a> Turns<'a> {
    fn new(run: &'a Run) -> Self {
        let now = run.now();
        Self { run, now, is_warm: false, busy: Span::ZERO, longest: Span::ZERO, no_core: None }
    }

    /// Starts the next turn. False after the last.
    fn next(&mut self) -> bool {
        if !self.is_warm && self.run.warm.load(Ordering::Relaxed) {
            self.is_warm = true;
            self.no_core = without_core();
        }
        let goes_on = !self.run.stop.load(Ordering::Relaxed);
        if !goes_on {
            self.no_core = self.no_core.zip(without_core()).map(|(before, after)| after - before);
        }
        goes_on
    }

    /// Ends a turn; returns when.
    fn end(&mut self, is_busy: bool) -> Timestamp {
        let end = self.run.now();
        if self.is_warm {
            self.longest = self.longest.max(end - self.now);
            if is_busy {
                self.busy += end - self.now;
            }
        }
        self.now = end;
        end
    }
}

/// How long this thread has been ready to run without a core, in its life.
fn without_core() -> Option<Span> {
    // Linux, Documentation/scheduler/sched-stats.rst: time on a core, time waited for one, both in nanoseconds.
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().nth(1)?.parse().ok().map(Span)
}

/// What one ModelThread counted while it was warm.
struct Counts {
    generated: u64,
    planned: u64,
    dropped: u64,
    batches: u64,
    batches_late: u64,
    /// Nanoseconds.
    wait: Histogram<u64>,
    /// Nanoseconds.
    lateness: Histogram<u64>,
}

/// One ModelThread: generates its part of the load, and does what production's does in each turn.
fn model_thread<'a>(
    run: &'a Run,
    index: u32,
    mut planner: Box<dyn Planner<()>>,
    ((bed, bell), rank_bell): ((Bed, Arc<Doorbell>), &Doorbell),
) -> (Counts, Turns<'a>) {
    let Setup { model_threads, models, gpus, .. } = run.setup;
    let models: Vec<_> = (0..models).filter(|model| model % model_threads == index).map(ModelId).collect();
    for &model in &models {
        let config = ModelConfig::new(profile(), QUEUE_MAX);
        planner.handle_model(Timestamp::ZERO, model, config);
    }
    for gpu in 0..gpus {
        planner.handle_gpu_joined(Timestamp::ZERO, GpuId(gpu), models.clone(), None);
    }
    let mut counts = Counts::new();
    let mut turns = Turns::new(run);
    let mut idleness = Idleness::default();
    let mut load = Load::new(run.setup, models, turns.now);
    let mut running: BinaryHeap<Reverse<(Timestamp, GpuId)>> = BinaryHeap::new();
    let mut left_at_latest = Vec::new();
    while turns.next() {
        let now = turns.now;
        let burst = load.due(now);
        let first_due = load.next_due(now);
        for _ in 0..burst {
            let (due, id, model) = load.next(now);
            planner.handle_submit(
                now,
                model,
                Task { id, deadline: due + SLO, priority: 0, application: 0, length: 0, payload: () },
            );
        }
        let mut is_busy = burst > 0 || planner.has_mail();
        while let Some(&Reverse((finished_at, gpu))) = running.peek()
            && finished_at <= now
        {
            is_busy = true;
            running.pop();
            planner.handle_finished(gpu, finished_at);
        }
        planner.handle_timeout(now);
        let (mut planned, mut dropped) = (0, 0);
        while let Some(output) = planner.poll_output() {
            match output {
                PlannerOutput::Batch(batch) => {
                    planned += batch.tasks.len() as u64;
                    left_at_latest.push(batch.latest);
                    if turns.is_warm {
                        record(&mut counts.lateness, run.now() - batch.timer_at, 1);
                    }
                    let execution = profile().latency(batch.tasks.len());
                    running.push(Reverse((batch.exec_at + execution, batch.gpu)));
                }
                PlannerOutput::Dropped { .. } => dropped += 1,
                PlannerOutput::Preempt(_) => unreachable!("this policy lets batches run to their end"),
                PlannerOutput::Load { .. } | PlannerOutput::Unload { .. } => {
                    unreachable!("all weights are in memory")
                }
            }
        }
        if is_busy {
            rank_bell.ring();
        }
        load.waiting -= planned + dropped;
        let end = turns.end(is_busy);
        if turns.is_warm {
            counts.generated += burst;
            counts.planned += planned;
            counts.dropped += dropped;
            counts.batches += left_at_latest.len() as u64;
            counts.batches_late += left_at_latest.iter().filter(|&&latest| latest < end).count() as u64;
            if run.setup.rate_rps.is_some() && burst > 0 {
                record(&mut counts.wait, end - first_due, burst);
            }
        }
        left_at_latest.clear();
        if idleness.looks_again(is_busy, run.has_cores()) {
            continue;
        }
        let ends = running.peek().map(|Reverse((at, _))| *at);
        let until = [planner.poll_timeout(), ends, load.wakes_at()].into_iter().flatten().min();
        let until = until.unwrap_or(Timestamp::NEVER);
        bell.nap(|| planner.has_mail(), || bed.sleep(end, until, NAP_MAX));
        turns.now = run.now();
    }
    (counts, turns)
}

impl Counts {
    fn new() -> Self {
        let (wait, lateness) = (nanoseconds(), nanoseconds());
        Self { generated: 0, planned: 0, dropped: 0, batches: 0, batches_late: 0, wait, lateness }
    }
}

fn record(histogram: &mut Histogram<u64>, span: Span, count: u64) {
    histogram.record_n(span.as_nanos().max(0) as u64, count).expect("the histogram resizes");
}

/// The requests of one shard, to its models in turn: at equal gaps, or as many as can be planned.
struct Load {
    models: Vec<ModelId>,
    generated: u64,
    waiting: u64,
    started: Timestamp,
    gap_ns: Option<f64>,
    /// Without a rate: requests that may wait. Enough that each model has a full batch ready while its last one is
    /// granted, and few enough that none expires when the threads must share a core.
    waiting_max: u64,
}

impl Load {
    fn new(setup: Setup, models: Vec<ModelId>, started: Timestamp) -> Self {
        let share = models.len() as f64 / f64::from(setup.models);
        let gap_ns = setup.rate_rps.map(|rate| 1e9 / (rate * share));
        let waiting_max = 4 * (models.len() * LatencyProfile::MAX_BATCH) as u64;
        Self { models, generated: 0, waiting: 0, started, gap_ns, waiting_max }
    }

    /// Requests to submit now, at most a burst.
    fn due(&self, now: Timestamp) -> u64 {
        let due = match self.gap_ns {
            Some(gap_ns) => {
                (((now - self.started).as_nanos() as f64 / gap_ns) as u64 + 1).saturating_sub(self.generated)
            }
            None => self.waiting_max.saturating_sub(self.waiting),
        };
        due.min(BURST_MAX)
    }

    /// When there is something to submit again; without a rate when something else has happened.
    fn wakes_at(&self) -> Option<Timestamp> {
        self.gap_ns.map(|_| self.next_due(Timestamp::NEVER))
    }

    /// When the next request is due; without a rate whenever it is taken in.
    fn next_due(&self, now: Timestamp) -> Timestamp {
        self.gap_ns.map_or(now, |gap_ns| self.started + Span((self.generated as f64 * gap_ns) as i64))
    }

    fn next(&mut self, now: Timestamp) -> (Timestamp, TaskId, ModelId) {
        let due = self.next_due(now);
        self.generated += 1;
        self.waiting += 1;
        (due, TaskId(self.generated), self.models[(self.generated % self.models.len() as u64) as usize])
    }
}

/// Production's driver, which has heard from control of all models and GPUs.
fn rank_driver(run: &Run, rank: RankLoop, bed: (Bed, Arc<Doorbell>), bells: Vec<Arc<Doorbell>>) -> RankDriver {
    let Setup { model_threads, models, gpus, .. } = run.setup;
    let (control, news) = unbounded();
    let models = (0..models).map(ModelId);
    let owners = models.clone().map(|model| (model, ModelThreadId((model.0 % model_threads) as u16)));
    let owners = owners.map(|(model, owner)| ControlToRank::Model(model, owner));
    let hosts = (0..gpus).map(|gpu| ControlToRank::GpuJoined {
        gpu: GpuId(gpu),
        models: models.clone().collect(),
        memory: None,
    });
    for message in owners.chain(hosts) {
        control.send(message).expect("the receiver is here");
    }
    RankDriver::new(rank, news, bed, bells)
}

fn rank_thread(run: &Run, mut rank: RankDriver) -> Turns<'_> {
    let mut turns = Turns::new(run);
    while turns.next() {
        let is_busy = rank.turn(turns.now);
        let end = turns.end(is_busy);
        rank.rest(end, is_busy, run.has_cores());
        turns.now = run.now();
    }
    turns
}

fn profile() -> LatencyProfile {
    LatencyProfile::linear(ALPHA_MS, BETA_MS, LatencyProfile::MAX_BATCH).expect("a constant profile")
}

fn summarize(counts: &[Counts], turns: &[Turns<'_>], rank_busy: Span, measured: Duration) -> Measured {
    let sum = |count: fn(&Counts) -> u64| counts.iter().map(count).sum::<u64>();
    let (planned, dropped) = (sum(|counts| counts.planned), sum(|counts| counts.dropped));
    let seconds = measured.as_secs_f64();
    let busy: Span = turns.iter().map(|turns| turns.busy).sum::<Span>() - rank_busy;
    let (mut wait, mut lateness) = (nanoseconds(), nanoseconds());
    for shard in counts {
        wait.add(&shard.wait).expect("all histograms are alike and resize");
        lateness.add(&shard.lateness).expect("all histograms are alike and resize");
    }
    let no_core = turns.iter().map(|turns| turns.no_core).sum::<Option<Span>>();
    let longest = turns.iter().map(|turns| turns.longest).max().unwrap_or(Span::ZERO);
    Measured {
        generated_rps: sum(|counts| counts.generated) as f64 / seconds,
        planned_rps: planned as f64 / seconds,
        dropped_fraction: dropped as f64 / (planned + dropped).max(1) as f64,
        batches: sum(|counts| counts.batches),
        batches_late: sum(|counts| counts.batches_late),
        wait_us: Tail::of(&wait),
        lateness_us: Tail::of(&lateness),
        ns_per_request: busy.as_nanos() as f64 / planned.max(1) as f64,
        rank_busy_fraction: rank_busy.as_secs_f64() / seconds,
        no_core_fraction: no_core.map(|no_core| no_core.as_secs_f64() / (seconds * turns.len() as f64)),
        turn_us_max: longest.as_nanos() as f64 / 1e3,
    }
}
