//! `downbeat bench scheduler`: how many requests a second the scheduler's threads plan, and how late its timers are
//! (Symphony, section 5.5 and Figure 13).
//!
//! Real threads and real mailboxes; the load is generated within the ModelThreads and GPUs are emulated by the end of
//! their batches, so that nothing but the scheduler is measured. This is a driver: it owns threads and reads the clock.
#![allow(clippy::disallowed_methods)]

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::atomic::{AtomicBool, AtomicI64, Ordering},
    thread,
    time::{Duration, Instant},
};

use clap::Args as ClapArgs;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};
use scheduler::{
    GpuUpdate, ModelConfig, ModelThread, NetworkBudget, Policy, RankThread, Task,
    mailbox::{self, FromModelThread, ModelEnd, RankEnd},
    model_thread::Output,
};
use serde::Serialize;
use sim::command::{CommandError, positive};

use crate::Percentiles;

/// DenseNet121 on an A100 (Symphony, Table 4), in milliseconds.
const ALPHA_MS: f64 = 0.054;
const BETA_MS: f64 = 10.546;
const SLO: Span = Span::from_millis(100);
/// Tasks that may wait for one model.
const QUEUE_MAX: usize = 65_536;
/// Requests that one turn of a ModelThread takes in at most, as from one poll of its receive queue.
const BURST_MAX: u64 = 64;
/// Looks without anything to do after which a thread offers its core to others.
const IDLE_LOOKS_MAX: u32 = 64;
/// A load that falls short of `--rate` by more than a fiftieth is another load.
const GENERATED_PART_MIN: f64 = 0.98;

/// Measure the scheduler's throughput and the lateness of its timers.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// ModelThreads, each pinned to a core where there are enough; the RankThread has one more.
    #[arg(long, default_value_t = 1)]
    pub model_threads: u32,
    /// Models, spread over the ModelThreads.
    #[arg(long, default_value_t = 10)]
    pub models: u32,
    /// Emulated GPUs; each hosts all models.
    #[arg(long, default_value_t = 600)]
    pub gpus: u32,
    /// Aggregate requests per second; as many as can be planned by default.
    #[arg(long)]
    pub rate: Option<f64>,
    /// Measured span in seconds, after a warm-up of a tenth of it.
    #[arg(long, default_value_t = 5.0)]
    pub seconds: f64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// The result.
#[derive(Debug, Clone, Serialize)]
pub struct Throughput {
    /// Requests a second that were planned in batches.
    pub rate_rps: f64,
    /// Time that ModelThreads were busy for each planned request.
    pub ns_per_request: f64,
    /// From the instant the first timer of the RankThread's turn was due to the final batch in the ModelThread.
    pub lateness_us: Percentiles,
    /// Time that the RankThread was busy, of the measured time.
    pub rank_busy_fraction: f64,
    /// As asked for.
    pub model_threads: u32,
    /// As asked for.
    pub models: u32,
    /// As asked for.
    pub gpus: u32,
    /// Refused or given up, of all requests: above 0 the load was more than the GPUs could take.
    #[serde(skip)]
    pub dropped_fraction: f64,
    /// Requests a second that were generated.
    #[serde(skip)]
    pub generated_rps: f64,
}

/// Runs the command and prints its result on stdout.
///
/// # Errors
/// On bad input (exit code 2).
pub fn run(args: &Args) -> Result<(), CommandError> {
    positive("--model-threads", args.model_threads.into(), 256.0)?;
    positive("--models", args.models.into(), 100_000.0)?;
    positive("--gpus", args.gpus.into(), 1_000_000.0)?;
    positive("--seconds", args.seconds, 3600.0)?;
    if let Some(rate) = args.rate {
        positive("--rate", rate, 1e9)?;
    }
    if args.models < args.model_threads {
        return Err(CommandError::Flag {
            flag: "--models",
            expected: format!("at least one for each of the {} ModelThreads", args.model_threads),
            found: args.models.to_string(),
        });
    }
    let result = measure(args);
    if let Some(rate) = args.rate.filter(|rate| result.generated_rps < GENERATED_PART_MIN * rate) {
        return Err(CommandError::Flag {
            flag: "--rate",
            expected: format!("what this machine can generate now, at most {:.0}", result.generated_rps),
            found: rate.to_string(),
        });
    }
    if args.json {
        println!("{}", serde_json::to_string(&result).expect("plain data"));
    } else {
        println!("{}", result.text());
    }
    Ok(())
}

/// What all threads share.
struct Run<'a> {
    args: &'a Args,
    started: Instant,
    /// Busy times and counts are taken from here to `stop`.
    warm: AtomicBool,
    stop: AtomicBool,
    /// By model: when the first timer of the turn that granted it was due. At most one grant is under way for a model.
    granted_due_ns: Vec<AtomicI64>,
}

impl Run<'_> {
    fn now(&self) -> Timestamp {
        Timestamp::ZERO + Span::from(self.started.elapsed())
    }
}

/// Measures with flags that [`run`] would take.
#[must_use]
pub fn measure(args: &Args) -> Throughput {
    let run = Run {
        args,
        started: Instant::now(),
        warm: AtomicBool::new(false),
        stop: AtomicBool::new(false),
        granted_due_ns: (0..args.models).map(|_| AtomicI64::new(0)).collect(),
    };
    let (model_ends, rank_ends): (Vec<_>, Vec<_>) =
        (0..args.model_threads).map(|_| mailbox::link(args.models as usize)).unzip();
    // Only where a core is left for everything else: a pinned thread cannot give way to what runs on its core.
    let cores = core_affinity::get_core_ids().filter(|cores| cores.len() > args.model_threads as usize + 1);
    let pin = |index: usize| cores.as_ref().map(|cores| core_affinity::set_for_current(cores[index]));
    let (counts, rank_busy, measured) = thread::scope(|scope| {
        let run = &run;
        let rank = scope.spawn(move || {
            pin(0);
            rank_thread(run, rank_ends)
        });
        let spawn = |(index, end)| {
            scope.spawn(move || {
                pin(index + 1);
                model_thread(run, index as u32, end)
            })
        };
        let shards: Vec<_> = model_ends.into_iter().enumerate().map(spawn).collect();
        let measured = wait(run);
        let join = |shard: thread::ScopedJoinHandle<'_, Counts>| shard.join().expect("a ModelThread panicked");
        let counts: Vec<_> = shards.into_iter().map(join).collect();
        (counts, rank.join().expect("the RankThread panicked"), measured)
    });
    summarize(args, &counts, rank_busy, measured)
}

/// Sleeps through warm-up and measurement; returns how long was measured.
fn wait(run: &Run<'_>) -> Duration {
    thread::sleep(Duration::from_secs_f64(run.args.seconds / 10.0));
    run.warm.store(true, Ordering::Relaxed);
    let start = Instant::now();
    let bar = ProgressBar::new((run.args.seconds * 10.0).ceil() as u64);
    let style = ProgressStyle::with_template("measuring [{bar:40}] {percent} %");
    bar.set_style(style.expect("a constant template").progress_chars("=> "));
    let length = Duration::from_secs_f64(run.args.seconds);
    while let Some(left) = length.checked_sub(start.elapsed()) {
        thread::sleep(left.min(Duration::from_millis(100)));
        bar.set_position((start.elapsed().as_secs_f64() * 10.0) as u64);
    }
    bar.finish_and_clear();
    run.stop.store(true, Ordering::Relaxed);
    start.elapsed()
}

/// What one ModelThread counted while it was warm.
struct Counts {
    generated: u64,
    planned: u64,
    dropped: u64,
    busy: Span,
    /// Nanoseconds.
    lateness: Histogram<u64>,
}

/// One shard: generates its part of the load, and does what a ModelThread does in each turn.
fn model_thread(run: &Run<'_>, index: u32, mut link: ModelEnd) -> Counts {
    let mut shard = ModelThread::<()>::new(NetworkBudget::default(), Policy::Deferred);
    let models: Vec<_> =
        (0..run.args.models).filter(|model| model % run.args.model_threads == index).map(ModelId).collect();
    for &model in &models {
        shard.handle_model(
            Timestamp::ZERO,
            model,
            ModelConfig { profile: profile(), queue_max: QUEUE_MAX, budget: None },
        );
    }
    let mut load = Load::new(run.args, models);
    let mut counts = Counts {
        generated: 0,
        planned: 0,
        dropped: 0,
        busy: Span::ZERO,
        lateness: Histogram::new(3).expect("three digits are within hdrhistogram's bounds"),
    };
    let mut idle_looks = 0;
    let mut waiting: u64 = 0;
    let mut now = run.now();
    while !run.stop.load(Ordering::Relaxed) {
        let burst = load.due(now, waiting);
        for _ in 0..burst {
            let (id, model) = load.next();
            shard.handle_submit(now, model, Task { id, deadline: now + SLO, payload: () });
        }
        waiting += burst;
        let mut is_busy = burst > 0;
        while let Some(grant) = link.poll_grant() {
            is_busy = true;
            let due = run.granted_due_ns[grant.model.0 as usize].load(Ordering::Relaxed);
            let late = (run.now() - Timestamp(due)).as_nanos().max(0) as u64;
            if run.warm.load(Ordering::Relaxed) {
                counts.lateness.record(late).expect("the histogram resizes");
            }
            shard.handle_grant(now, grant);
        }
        shard.handle_timeout(now);
        let (mut planned, mut dropped) = (0, 0);
        while let Some(output) = shard.poll_output() {
            match output {
                Output::Candidate(model, candidate) => link.post_candidate(model, candidate),
                Output::Gpu(gpu, update) => link.post_gpu(gpu, update),
                Output::Batch(batch) => planned += batch.tasks.len() as u64,
                Output::Dropped { .. } => dropped += 1,
            }
        }
        waiting -= planned + dropped;
        let turn_end = run.now();
        if run.warm.load(Ordering::Relaxed) {
            counts.generated += burst;
            counts.planned += planned;
            counts.dropped += dropped;
            if is_busy {
                counts.busy += turn_end - now;
            }
        }
        now = turn_end;
        idle(is_busy, &mut idle_looks);
    }
    counts
}

/// The requests of one shard, to its models in turn.
struct Load {
    models: Vec<ModelId>,
    generated: u64,
    /// In requests a nanosecond; as many as can be planned if `None`.
    rate: Option<f64>,
    /// Without a rate: requests that may wait. Enough that each model has a full batch ready while its last one is
    /// granted, and few enough that none expires when the threads must share a core.
    waiting_max: u64,
}

impl Load {
    fn new(args: &Args, models: Vec<ModelId>) -> Self {
        let share = models.len() as f64 / f64::from(args.models);
        let rate = args.rate.map(|rate| rate * share / 1e9);
        let waiting_max = 4 * (models.len() * LatencyProfile::MAX_BATCH) as u64;
        Self { models, generated: 0, rate, waiting_max }
    }

    /// Requests to submit now.
    fn due(&self, now: Timestamp, waiting: u64) -> u64 {
        match self.rate {
            Some(rate) => ((now.as_nanos() as f64 * rate) as u64).saturating_sub(self.generated).min(BURST_MAX),
            None => self.waiting_max.saturating_sub(waiting).min(BURST_MAX),
        }
    }

    fn next(&mut self) -> (TaskId, ModelId) {
        self.generated += 1;
        (TaskId(self.generated), self.models[(self.generated % self.models.len() as u64) as usize])
    }
}

/// The RankThread, and the ends of batches on emulated GPUs. Returns how long it was busy while warm.
fn rank_thread(run: &Run<'_>, mut links: Vec<RankEnd>) -> Span {
    let mut rank = RankThread::new(NetworkBudget::default());
    let models: Vec<_> = (0..run.args.models).map(ModelId).collect();
    for gpu in 0..run.args.gpus {
        rank.handle_gpu_joined(Timestamp::ZERO, GpuId(gpu), models.clone());
    }
    let mut running: BinaryHeap<Reverse<(Timestamp, GpuId)>> = BinaryHeap::new();
    let mut busy = Span::ZERO;
    let mut idle_looks = 0;
    let mut now = run.now();
    while !run.stop.load(Ordering::Relaxed) {
        let mut is_busy = false;
        for link in &mut links {
            while let Some(message) = link.poll() {
                is_busy = true;
                match message {
                    FromModelThread::Gpu(gpu, update) => {
                        if let GpuUpdate::Planned { free_at, .. } = update {
                            running.push(Reverse((free_at, gpu)));
                        }
                        rank.handle_gpu(gpu, update);
                    }
                    FromModelThread::Candidate(model, candidate) => rank.handle_candidate(now, model, candidate),
                }
            }
        }
        while let Some(&Reverse((finished_at, gpu))) = running.peek()
            && finished_at <= now
        {
            is_busy = true;
            running.pop();
            rank.handle_gpu(gpu, GpuUpdate::Finished { finished_at });
        }
        if let Some(due) = rank.poll_timeout().filter(|&due| due <= now) {
            is_busy = true;
            rank.handle_timeout(now);
            while let Some(grant) = rank.poll_grant() {
                // Published by the grant's mailbox.
                run.granted_due_ns[grant.model.0 as usize].store(due.as_nanos(), Ordering::Relaxed);
                links[(grant.model.0 % run.args.model_threads) as usize].post_grant(grant);
            }
        }
        let turn_end = run.now();
        if is_busy && run.warm.load(Ordering::Relaxed) {
            busy += turn_end - now;
        }
        now = turn_end;
        idle(is_busy, &mut idle_looks);
    }
    busy
}

/// Spins for a while, then lets others run: there may be fewer cores than threads.
fn idle(is_busy: bool, idle_looks: &mut u32) {
    if is_busy {
        *idle_looks = 0;
    } else if *idle_looks < IDLE_LOOKS_MAX {
        *idle_looks += 1;
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

fn profile() -> LatencyProfile {
    LatencyProfile::linear(ALPHA_MS, BETA_MS, LatencyProfile::MAX_BATCH).expect("a constant profile")
}

fn summarize(args: &Args, counts: &[Counts], rank_busy: Span, measured: Duration) -> Throughput {
    let sum = |count: fn(&Counts) -> u64| counts.iter().map(count).sum::<u64>();
    let planned = sum(|counts| counts.planned);
    let dropped = sum(|counts| counts.dropped);
    let busy: Span = counts.iter().map(|counts| counts.busy).sum();
    let mut lateness = Histogram::<u64>::new(3).expect("three digits are within hdrhistogram's bounds");
    for shard in counts {
        lateness.add(&shard.lateness).expect("all histograms are alike and resize");
    }
    Throughput {
        rate_rps: planned as f64 / measured.as_secs_f64(),
        ns_per_request: busy.as_nanos() as f64 / planned.max(1) as f64,
        lateness_us: Percentiles::of(&lateness),
        rank_busy_fraction: rank_busy.as_secs_f64() / measured.as_secs_f64(),
        model_threads: args.model_threads,
        models: args.models,
        gpus: args.gpus,
        generated_rps: sum(|counts| counts.generated) as f64 / measured.as_secs_f64(),
        dropped_fraction: dropped as f64 / (planned + dropped).max(1) as f64,
    }
}

impl Throughput {
    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let late = &self.lateness_us;
        format!(
            "{:.0} requests/s planned on {} ModelThreads, {} models, {} GPUs; {:.3} % dropped\n\
             {:.1} ns of a ModelThread per request; RankThread busy {:.1} % of the time\n\
             lateness us: p50 {:.1}, p99 {:.1}, p99.9 {:.1}, max {:.1}",
            self.rate_rps,
            self.model_threads,
            self.models,
            self.gpus,
            100.0 * self.dropped_fraction,
            self.ns_per_request,
            100.0 * self.rank_busy_fraction,
            late.p50,
            late.p99,
            late.p999,
            late.max
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_planned() {
        let args = Args { model_threads: 2, models: 4, gpus: 16, rate: Some(20_000.0), seconds: 0.3, json: true };
        let result = measure(&args);
        assert!(result.rate_rps > 0.0 && result.ns_per_request > 0.0, "{}", result.text());
        let json = serde_json::to_value(&result).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        let documented =
            ["gpus", "lateness_us", "model_threads", "models", "ns_per_request", "rank_busy_fraction", "rate_rps"];
        assert_eq!(keys, documented);
    }

    #[test]
    fn a_rate_that_no_machine_generates_is_refused() {
        let args = Args { model_threads: 1, models: 1, gpus: 1, rate: Some(1e9), seconds: 0.2, json: true };
        let error = run(&args).unwrap_err().to_string();
        assert!(error.starts_with("--rate: expected what this machine can generate now, at most "), "{error}");
        assert!(error.ends_with(", found 1000000000"), "{error}");
    }

    #[test]
    fn bad_flags_say_what_is_expected() {
        let args = Args { model_threads: 3, models: 2, gpus: 1, rate: None, seconds: 0.1, json: false };
        assert_eq!(
            run(&args).unwrap_err().to_string(),
            "--models: expected at least one for each of the 3 ModelThreads, found 2"
        );
    }
}
