//! What `bench fabric` is asked for, and what it found.

use std::collections::BTreeMap;

use bench::{Percentiles, Tail, nanoseconds};
use clap::Args as ClapArgs;
use cli::{CommandError, positive, within};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use transport::{ArmName, LocalPath};

use crate::tools::cluster::SCHEDULERS_MAX;

/// Members of one role.
const MEMBERS_MAX: usize = 16;
/// GPUs of one backend.
const GPUS_MAX: u32 = 64;
/// Models of the cluster.
const MODELS_MAX: usize = 256;
/// Rows of one request: the largest batch.
const ROWS_MAX: usize = proto::LatencyProfile::MAX_BATCH;
/// Bytes of the inputs of all requests that may be under way at a frontend.
const BYTES_MAX: usize = 1 << 30;
/// Tasks a second of all frontends.
const RATE_MAX: f64 = 1e7;
/// Requests under way of one frontend.
const CLOSED_MAX: usize = 4096;
/// Requests under way of one frontend, if neither a rate nor anything else is asked for: enough to keep all busy.
const CLOSED_BY_DEFAULT: usize = 64;
/// The name of the models' only input.
pub(super) const INPUT: &str = "row";
/// Before the measured span, as a part of it: connections, caches and estimates warm up.
const WARM_UP_FRACTION: f64 = 0.2;

/// Measure the whole path as processes, without HTTP.
#[derive(Debug, Clone, ClapArgs)]
pub(crate) struct Args {
    /// Schedulers, of which one is the primary and the others its standbys; 1 to 4
    #[arg(long, default_value_t = 1)]
    pub schedulers: u16,
    /// Frontends, each a process that also generates its share of the load
    #[arg(long, default_value_t = 1)]
    pub frontends: usize,
    /// Backends, each a process
    #[arg(long, default_value_t = 1)]
    pub backends: usize,
    /// Emulated GPUs of each backend; each hosts all models
    #[arg(long, default_value_t = 2)]
    pub gpus: u32,
    /// Models, to which requests go in turn
    #[arg(long, default_value_t = 1)]
    pub models: usize,
    /// Rows of a request, each of which is a task
    #[arg(long, default_value_t = 64)]
    pub rows: usize,
    /// Bytes of a row
    #[arg(long, default_value_t = 16)]
    pub bytes: usize,
    /// Open loop: tasks a second of all frontends, whose requests leave as a Poisson process
    #[arg(long, conflicts_with = "closed")]
    pub rate: Option<f64>,
    /// Closed loop: requests that are always under way at each frontend [default: 64, without --rate]
    #[arg(long)]
    pub closed: Option<usize>,
    /// Measured span; a warm-up of a fifth of it comes before
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// The objective of every request
    #[arg(long, default_value_t = 100.0)]
    pub slo_ms: f64,
    /// The scheduler's policy; what defers batches shows in the latency where they do not fill
    #[arg(long, default_value = "downbeat")]
    pub policy: String,
    /// The network: `soft`, or `verbs:DEVICE`
    #[arg(long, default_value_t)]
    pub arm: ArmName,
    /// How packets go on this host with the network `soft`: `ring` or `udp`
    #[arg(long, default_value_t)]
    pub path: LocalPath,
    /// Decides arrivals and inputs
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// What one process sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Load {
    /// Requests go to them in turn.
    pub models: Vec<String>,
    /// Rows of a request.
    pub rows: usize,
    /// Bytes of a row.
    pub bytes: usize,
    /// The objective of every request, in nanoseconds.
    pub slo_ns: u64,
    /// When requests are sent.
    pub pace: Pace,
    /// What is sent before the measured span, in seconds.
    pub warm_up: f64,
    /// The measured span, in seconds.
    pub seconds: f64,
    /// Decides arrivals and inputs.
    pub seed: u64,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pace {
    /// A Poisson process of so many requests a second; latency counts from when a request was to be sent.
    Open(f64),
    /// So many are always under way.
    Closed(usize),
}

impl Args {
    /// Checks all that can be wrong.
    ///
    /// # Errors
    /// Names the flag, what is expected and what was found.
    pub(crate) fn check(&self) -> Result<(), CommandError> {
        within("--schedulers", f64::from(self.schedulers), 1.0, f64::from(SCHEDULERS_MAX))?;
        positive("--frontends", self.frontends as f64, MEMBERS_MAX as f64)?;
        positive("--backends", self.backends as f64, MEMBERS_MAX as f64)?;
        positive("--gpus", f64::from(self.gpus), f64::from(GPUS_MAX))?;
        positive("--models", self.models as f64, MODELS_MAX as f64)?;
        positive("--rows", self.rows as f64, ROWS_MAX as f64)?;
        positive("--bytes", self.bytes as f64, BYTES_MAX as f64)?;
        positive("--seconds", self.seconds, 3600.0)?;
        positive("--slo-ms", self.slo_ms, repository::SLO_MAX.as_millis_f64())?;
        if let Some(rate) = self.rate {
            positive("--rate", rate, RATE_MAX)?;
        }
        if let Some(closed) = self.closed {
            positive("--closed", closed as f64, CLOSED_MAX as f64)?;
        }
        if self.input_bytes() > BYTES_MAX {
            return Err(CommandError::flag(
                "--closed x --rows x --bytes",
                format!("at most {BYTES_MAX} bytes in all"),
                format!("{} bytes", self.input_bytes()),
            ));
        }
        Ok(())
    }

    /// Bytes of the inputs of all requests that are under way at a frontend, unless an open loop does not keep up.
    #[must_use]
    pub(crate) fn input_bytes(&self) -> usize {
        self.closed.unwrap_or(CLOSED_BY_DEFAULT) * self.rows * self.bytes
    }

    /// The models' names.
    #[must_use]
    pub(crate) fn model_names(&self) -> Vec<String> {
        (0..self.models).map(|index| format!("fabric_{index}")).collect()
    }

    /// What the process of a frontend sends.
    #[must_use]
    pub(crate) fn load(&self, frontend: usize) -> Load {
        let pace = match self.rate {
            Some(tasks_per_s) => Pace::Open(tasks_per_s / (self.rows * self.frontends) as f64),
            None => Pace::Closed(self.closed.unwrap_or(CLOSED_BY_DEFAULT)),
        };
        Load {
            models: self.model_names(),
            rows: self.rows,
            bytes: self.bytes,
            slo_ns: (self.slo_ms * 1e6) as u64,
            pace,
            warm_up: self.seconds * WARM_UP_FRACTION,
            seconds: self.seconds,
            seed: self.seed + frontend as u64,
        }
    }
}

/// What came of a load.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Tasks whose right answer came within the measured span.
    pub tasks_answered: u64,
    /// Tasks that were to be sent within the measured span.
    pub tasks_sent: u64,
    /// Of these, those whose right answer came within the objective.
    pub tasks_on_time: u64,
    /// Tasks, whenever they were sent, whose answer was not the digest of their input.
    pub tasks_wrong: u64,
    /// Tasks, whenever they were sent, that ended without an output, by the reason.
    pub tasks_failed: BTreeMap<String, u64>,
    /// Requests that were to be sent within the measured span and have been answered right.
    pub requests: u64,
    /// The sizes of the batches in which their last rows ran, added up.
    pub batch_sizes: u64,
    /// The time of these requests in nanoseconds, as pairs of a value and how often it was found.
    pub latencies_ns: Vec<(u64, u64)>,
}

impl Tally {
    /// Adds another frontend's.
    pub(super) fn add(&mut self, other: Self) {
        self.tasks_answered += other.tasks_answered;
        self.tasks_sent += other.tasks_sent;
        self.tasks_on_time += other.tasks_on_time;
        self.tasks_wrong += other.tasks_wrong;
        self.requests += other.requests;
        self.batch_sizes += other.batch_sizes;
        self.latencies_ns.extend(other.latencies_ns);
        for (reason, tasks) in other.tasks_failed {
            *self.tasks_failed.entry(reason).or_default() += tasks;
        }
    }

    fn latency(&self) -> Histogram<u64> {
        let mut latency = nanoseconds();
        for &(value, count) in &self.latencies_ns {
            latency.record_n(value, count).expect("the histogram resizes");
        }
        latency
    }
}

/// Processor time, in nanoseconds; `None` where the system does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct CpuNs {
    /// All schedulers.
    pub scheduler: Option<f64>,
    /// All frontends, without what generates load and checks answers.
    pub frontend: Option<f64>,
    /// All backends, with what emulates GPUs.
    pub backend: Option<f64>,
    /// What generates load and checks answers.
    pub load: Option<f64>,
}

/// The result.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Fabric {
    /// Tasks answered right, over the measured span.
    pub tasks_per_s: f64,
    /// Of the tasks that were to be sent within the measured span, those answered right within the objective.
    pub on_time_fraction: f64,
    /// Of requests; in open loop from the instant at which one was to be sent.
    pub latency_us: Percentiles,
    /// Processor time of all processes of a role for each answered task.
    pub cpu_ns_per_task: CpuNs,
    /// The mean size of the batches in which requests' last rows ran.
    pub batch_mean: f64,
    /// Tasks answered right.
    pub tasks_answered: u64,
    /// Tasks with a wrong answer; anything but 0 is a bug.
    pub tasks_wrong: u64,
    /// Tasks without an output, by the reason.
    pub tasks_failed: BTreeMap<String, u64>,
    /// As asked for.
    pub schedulers: u16,
    /// As asked for.
    pub frontends: usize,
    /// As asked for; of each backend.
    pub gpus: u32,
    /// As asked for.
    pub backends: usize,
    /// As asked for.
    pub models: usize,
    /// As asked for.
    pub rows: usize,
    /// As asked for.
    pub bytes: usize,
    /// As asked for; tasks a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// As asked for; of each frontend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closed: Option<usize>,
    /// As asked for.
    pub seconds: f64,
    /// As asked for.
    pub slo_ms: f64,
    /// As asked for.
    pub policy: String,
    /// As asked for.
    pub arm: String,
    /// What this machine makes threads wait for that only look at the clock, one for each core, right after the load.
    pub idle_wait_us: Tail,
}

impl Fabric {
    /// Of what was asked for, what came of it, the processor time of the measured span, and what the machine did.
    #[must_use]
    pub(super) fn new(args: &Args, tally: Tally, cpu: CpuNs, idle_wait_us: Tail) -> Self {
        let per_task = |ns: Option<f64>| ns.map(|ns| ns / tally.tasks_answered.max(1) as f64);
        let CpuNs { scheduler, frontend, backend, load } = cpu;
        let closed = args.rate.is_none().then(|| args.closed.unwrap_or(CLOSED_BY_DEFAULT));
        Self {
            tasks_per_s: tally.tasks_answered as f64 / args.seconds,
            on_time_fraction: tally.tasks_on_time as f64 / tally.tasks_sent.max(1) as f64,
            latency_us: Percentiles::of(&tally.latency()),
            cpu_ns_per_task: CpuNs {
                scheduler: per_task(scheduler),
                frontend: per_task(frontend),
                backend: per_task(backend),
                load: per_task(load),
            },
            batch_mean: tally.batch_sizes as f64 / tally.requests.max(1) as f64,
            tasks_answered: tally.tasks_answered,
            tasks_wrong: tally.tasks_wrong,
            tasks_failed: tally.tasks_failed,
            schedulers: args.schedulers,
            frontends: args.frontends,
            gpus: args.gpus,
            backends: args.backends,
            models: args.models,
            rows: args.rows,
            bytes: args.bytes,
            rate: args.rate,
            closed,
            seconds: args.seconds,
            slo_ms: args.slo_ms,
            policy: args.policy.clone(),
            arm: args.arm.to_string(),
            idle_wait_us,
        }
    }

    /// The result as a table.
    #[must_use]
    pub(super) fn text(&self) -> String {
        let pace = match (self.rate, self.closed) {
            (Some(rate), _) => format!("{rate} tasks/s offered"),
            (None, closed) => format!("{} requests under way at each frontend", closed.unwrap_or_default()),
        };
        let roles = self.cpu_ns_per_task;
        let fabric = roles.scheduler.zip(roles.frontend).zip(roles.backend).map(|((a, b), c)| a + b + c);
        let roles = [
            ("scheduler", roles.scheduler),
            ("frontend", roles.frontend),
            ("backend", roles.backend),
            ("all three", fabric),
            ("load", roles.load),
        ];
        let roles = roles.map(|(role, ns)| {
            let ns = ns.map_or("unknown".to_owned(), |ns| format!("{ns:.0}"));
            format!("{role:<12}{ns:>12}\n")
        });
        let failed = self.tasks_failed.iter().map(|(reason, tasks)| format!("{tasks} tasks failed: {reason}\n"));
        let Percentiles { p50, p99, p999, max } = self.latency_us;
        let idle = self.idle_wait_us;
        format!(
            "{} arm, {}: {} schedulers, {} frontends, {} backends of {} GPUs, {} models; \
             requests of {} rows x {} bytes, {pace}, {} s\n\
             tasks/s     {:>12.0}\n\
             on time     {:>12.4} within {} ms\n\
             batch mean  {:>12.1}\n\
             us          {:>12}{:>12}{:>12}{:>12}\n\
             request     {p50:>12.1}{p99:>12.1}{p999:>12.1}{max:>12.1}\n\
             idle        {:>12.1}{:>12.1}{:>12.1}{:>12.1}\n\
             CPU ns a task\n{}{}\
             {} tasks answered, {} wrong\n",
            self.arm,
            self.policy,
            self.schedulers,
            self.frontends,
            self.backends,
            self.gpus,
            self.models,
            self.rows,
            self.bytes,
            self.seconds,
            self.tasks_per_s,
            self.on_time_fraction,
            self.slo_ms,
            self.batch_mean,
            "p50",
            "p99",
            "p99.9",
            "max",
            idle.p50,
            idle.p99,
            idle.p999,
            idle.max,
            roles.concat(),
            failed.collect::<String>(),
            self.tasks_answered,
            self.tasks_wrong,
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn args(text: &str) -> Args {
        Cli::parse_from(["bench"].into_iter().chain(text.split_whitespace())).args
    }

    #[test]
    fn what_cannot_be_is_named() {
        let error = |text| args(text).check().unwrap_err().to_string();
        assert!(error("--frontends 0").starts_with("--frontends: expected a number above 0 and at most 16"));
        assert_eq!(error("--schedulers 5"), "--schedulers: expected 1 to 4, found 5");
        assert!(error("--rows 257").starts_with("--rows: "));
        assert!(error("--rate 0").starts_with("--rate: "));
        assert!(error("--closed 4096 --rows 256 --bytes 2048").contains("at most 1073741824 bytes in all"));
        assert!(Cli::try_parse_from(["bench", "--rate", "1", "--closed", "1"]).is_err());
        args("--closed 4096 --rows 256 --bytes 1024").check().unwrap();
    }

    #[test]
    fn a_rate_is_shared_by_frontends_and_counts_rows() {
        let args = args("--rate 6400 --rows 32 --frontends 2 --models 3");
        let load = args.load(1);
        assert_eq!((load.pace, load.seed), (Pace::Open(100.0), 2));
        assert_eq!(load.models, ["fabric_0", "fabric_1", "fabric_2"]);
    }

    #[test]
    fn what_frontends_got_adds_up() {
        let tally = |tasks, value| Tally {
            tasks_answered: tasks,
            tasks_sent: tasks,
            tasks_on_time: tasks / 2,
            requests: 1,
            batch_sizes: 4,
            tasks_failed: [("late".to_owned(), 3)].into(),
            latencies_ns: vec![(value, 1)],
            ..Tally::default()
        };
        let mut sum = tally(10, 1_000);
        sum.add(tally(30, 3_000));
        let cpu = CpuNs { scheduler: Some(400.0), frontend: Some(80.0), backend: None, load: Some(0.0) };
        let idle = Tail { p50: 1.0, p99: 1.0, p999: 1.0, p9999: 1.0, max: 1.0 };
        let fabric = Fabric::new(&args("--seconds 2"), sum, cpu, idle);
        assert_eq!((fabric.tasks_per_s, fabric.on_time_fraction, fabric.batch_mean), (20.0, 0.5, 4.0));
        let expected = CpuNs { scheduler: Some(10.0), frontend: Some(2.0), backend: None, load: Some(0.0) };
        assert_eq!(fabric.cpu_ns_per_task, expected);
        assert_eq!((fabric.latency_us.p50, fabric.tasks_failed["late"]), (1.0, 6));
    }
}
