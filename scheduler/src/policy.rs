//! Batch policies: which tasks form the next batch, and from when on it may run.
//!
//! A policy is asked whenever a model's queue changes and once more when a GPU was granted. It decides three things
//! and nothing else: which heads to pass over and how many tasks to take ([`BatchPolicy::gather`]), when the window of
//! that batch opens ([`BatchPolicy::opens_at`]; it always ends at `deadline - l(b)`), and which of the batches that
//! wait goes first ([`BatchPolicy::urgency`]). Queues,
//! timers, matchmaking and the bookkeeping of GPUs are the same for all policies.

use std::{collections::VecDeque, fmt, str::FromStr};

use proto::{LatencyProfile, Span, Timestamp, scheduler_to_scheduler::LearnedAverages};
use thiserror::Error;

use crate::{
    estimates::Learning,
    messages::{Price, Traffic},
    task_queue::Queued,
};

mod downbeat;
mod losses;
mod symphony;
mod tuning;

pub use tuning::Tuning;

/// What a policy sees of a model.
#[derive(Debug)]
pub struct View<'a> {
    /// Now.
    pub now: Timestamp,
    /// When the granted GPU is free; `PAST` while there is no grant.
    pub free_at: Timestamp,
    /// Nearest deadline first.
    pub queue: &'a VecDeque<Queued>,
    /// l(b).
    pub profile: &'a LatencyProfile,
    /// `lead_times[b - 1]` is delay(b) + l(b): from a grant to the end of its batch, on an idle GPU.
    pub lead_times: &'a [Span],
    /// How much earlier the frontrun moment is, because timers are late (`NetworkBudget::jitter`).
    pub jitter: Span,
    /// What GPU time is worth at the moment.
    pub price: Price,
}

impl View<'_> {
    /// The earliest start of a batch (Figure 18, `earliest`).
    #[must_use]
    pub fn earliest_start(&self, batch: usize) -> Timestamp {
        (self.now + (self.lead_times[batch - 1] - self.profile.latency(batch))).max(self.free_at)
    }

    /// When a batch ends that starts as early as it can.
    #[must_use]
    pub fn earliest_end(&self, batch: usize) -> Timestamp {
        (self.now + self.lead_times[batch - 1]).max(self.free_at + self.profile.latency(batch))
    }

    /// The longest run of tasks from the `skip`-th that can finish by the deadline of the first of them; 0 if none.
    #[must_use]
    pub fn longest_batch(&self, skip: usize) -> usize {
        self.queue.get(skip).map_or(0, |head| self.longest_batch_by(head.deadline, self.queue.len() - skip))
    }

    /// The most of so many tasks, at least one, that can finish by an instant; 0 if none.
    #[must_use]
    pub fn longest_batch_by(&self, end: Timestamp, tasks: usize) -> usize {
        let bound = tasks.min(self.profile.max_batch());
        if self.earliest_end(bound) <= end {
            return bound;
        }
        let on_idle_gpu = self.lead_times.partition_point(|&lead| self.now + lead <= end);
        bound.min(on_idle_gpu).min(self.profile.largest_batch_within(end - self.free_at))
    }
}

/// A batch as gathered: `size` tasks after the first `skip`, which it gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gathered {
    /// Heads that are passed over. They are dropped when the batch is granted a GPU, or when they can no longer be met.
    pub skip: usize,
    /// Tasks in the batch; 0 if no queued task can be met any more.
    pub size: usize,
}

/// What came of a gathered batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Granted {
    /// When it starts.
    pub start: Timestamp,
    /// How long it has waited since its window opened.
    pub waited: Span,
    /// GPUs that host the model, this one and others.
    pub gpus: u32,
}

/// One model's policy. It sees one model and may learn from it.
pub trait BatchPolicy: fmt::Debug + Send {
    /// The next batch, if it started as early as it can. By default the longest prefix that can finish in time, which
    /// gives up a head only when even a batch of one would be late (Symphony, section 3.2, GetBatch).
    fn gather(&self, view: &View<'_>) -> Gathered {
        longest_prefix(view)
    }

    /// When the window of a gathered batch (of at least one task) opens; `PAST` for at once.
    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp;

    /// What is asked for, if batches start early by the price of GPU time.
    fn traffic(&self, _view: &View<'_>) -> Option<Traffic> {
        None
    }

    /// The same for whoever looks from afar, and not at who waits just now. By default nothing.
    fn usual_traffic(&self, _view: &View<'_>) -> Option<Traffic> {
        None
    }

    /// When it opens on a GPU that may start batches early, with what [`Self::traffic`] says of this view: not after
    /// [`Self::opens_at`], which is the default.
    fn ready_at(&self, view: &View<'_>, batch: Gathered, _traffic: Option<&Traffic>) -> Timestamp {
        self.opens_at(view, batch)
    }

    /// Batches that wait for a GPU go in the order of the end of their window less this. By default zero (Symphony,
    /// Algorithm 1: the nearest `latest`).
    fn urgency(&self) -> Span {
        Span::ZERO
    }

    /// A task has come.
    fn handle_arrived(&mut self, _now: Timestamp) {}

    /// A task was given up: it was passed over, or could not be met any more.
    fn handle_lost(&mut self, _task: &Queued) {}

    /// A gathered batch was granted a GPU.
    fn handle_granted(&mut self, _view: &View<'_>, _batch: Gathered, _granted: Granted) {}

    /// What it has learned, for whoever plans the model next. By default it learns nothing.
    fn learned(&self) -> Option<LearnedAverages> {
        None
    }

    /// What another one had learned. Averages that cannot be are left out.
    fn handle_learned(&mut self, _now: Timestamp, _learned: &LearnedAverages) {}
}

/// A choice of policy, as written on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Policy {
    /// Symphony: the window opens at the frontrun moment.
    Deferred,
    /// Symphony, section 3.1: the window opens at the latest moment.
    DeferredLatest,
    /// Symphony, section 3.2: as deferred, but heads are given up early to keep the batch at a target size.
    DeferredTarget,
    /// Symphony as its authors run it (`policy/symphony.rs`): the target follows the measured rate.
    Symphony,
    /// The eager policy of its evaluation: the same batches, and the window is always open.
    SymphonyEager,
    /// Ours: batches by the price of GPU time, heads given up early, a fair order (`policy/downbeat.rs`). Models have
    /// lanes where what a batch takes depends on its tasks (`model_thread/dynamic.rs`).
    #[default]
    Downbeat,
    /// The same with other constants, for experiments.
    DownbeatTuned(Tuning),
    /// The window is always open.
    Eager,
    /// The window opens this long after the batch's first task arrived (Symphony, section 3.4).
    Timeout(Span),
    /// The same with a timeout of so many per cent of the time that the task's client gave it.
    TimeoutPercent(f64),
    /// Clockwork (`planners/clockwork.rs`).
    Clockwork,
    /// Nexus (`planners/nexus.rs`).
    Nexus,
    /// Shepherd's Flex (`planners/shepherd.rs`).
    Shepherd,
    /// Clipper (`planners/clipper.rs`).
    Clipper,
    /// Orloj (`planners/orloj.rs`), with b for a millisecond.
    Orloj(f64),
}

/// Orloj's b, if nothing else is said (section 4.4).
const ORLOJ_RATE: f64 = 1e-4;

/// What a policy may be called, for errors and help.
pub const POLICIES: &str = "downbeat, downbeat:CONSTANT=VALUE,.., deferred, deferred:latest, deferred:target, \
                            symphony, symphony:eager, eager, timeout:MS, timeout:P%, clockwork, nexus, shepherd, \
                            clipper, orloj or orloj:B";

/// Why a policy was not understood.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum PolicyError {
    /// No such name.
    #[error("unknown policy `{0}`; expected {POLICIES}")]
    Unknown(String),
    /// A constant of `downbeat:CONSTANT=VALUE,..`.
    #[error(
        "policy downbeat:CONSTANT=VALUE,.. needs numbers above 0 for {}, or a number from 0 to inf for gpu_price, \
         found `{_0}`", Tuning::NAMES.join(", ")
    )]
    Tuning(String),
    /// The time of `timeout:MS`.
    #[error(
        "policy timeout:MS needs a number of milliseconds from 0 to 60000, or of per cent of the SLO as in \
         timeout:30%, found `{0}`"
    )]
    Timeout(String),
    /// The key `gpu_price`.
    #[error("gpu_price must be a number from 0 to inf, found {0}")]
    GpuPrice(f64),
    /// A price of the key `gpu_prices`.
    #[error("gpu_prices.{model} must be a number from 0 to inf, found {found}")]
    ModelPrice {
        /// Whose it is.
        model: String,
        /// What was given.
        found: f64,
    },
    /// A policy that has no price.
    #[error("gpu_price and gpu_prices need the policy downbeat, found {0}")]
    NoPrice(String),
    /// The rate of `orloj:B`.
    #[error("policy orloj:B needs a number from 1e-9 to 1 for a millisecond, found `{0}`")]
    Orloj(String),
    /// Not with real backends.
    #[error(
        "policy {0} kills running batches, which backends cannot do; it is for sim and bench goodput, expected another"
    )]
    Preempts(String),
    /// Not with several ModelThreads.
    #[error("policy {0} needs one queue for all models, so model_threads must be 1")]
    OneQueue(String),
}

impl Policy {
    /// Reads the policy of a real cluster.
    ///
    /// # Errors
    /// If there is no such policy, or backends cannot do what it asks of them.
    pub fn of_cluster(text: &str) -> Result<Self, PolicyError> {
        match text.parse()? {
            Self::Shepherd => Err(PolicyError::Preempts(text.to_owned())),
            policy => Ok(policy),
        }
    }

    /// The same with another price of GPU time, if one is said.
    ///
    /// # Errors
    /// If the price cannot be, or the policy has none.
    pub fn with_gpu_price(self, gpu_price: Option<f64>) -> Result<Self, PolicyError> {
        let Some(gpu_price) = gpu_price else { return Ok(self) };
        if gpu_price.is_nan() || gpu_price < 0.0 {
            return Err(PolicyError::GpuPrice(gpu_price));
        }
        match self {
            Self::Downbeat => Ok(Self::of_tuning(Tuning { gpu_price, ..Tuning::default() })),
            Self::DownbeatTuned(tuning) => Ok(Self::of_tuning(Tuning { gpu_price, ..tuning })),
            other => Err(PolicyError::NoPrice(other.to_string())),
        }
    }

    /// Holds the prices of single models against what they can be.
    ///
    /// # Errors
    /// If one cannot be, or the policy has none.
    pub fn check_gpu_prices<'a>(
        self,
        prices: impl IntoIterator<Item = (&'a String, &'a f64)>,
    ) -> Result<(), PolicyError> {
        for (model, &price) in prices {
            self.with_gpu_price(Some(price)).map_err(|error| match error {
                PolicyError::GpuPrice(found) => PolicyError::ModelPrice { model: model.clone(), found },
                other => other,
            })?;
        }
        Ok(())
    }

    /// The policy of a model with a price of its own; policies that have none stay as they are.
    #[must_use]
    pub(crate) fn of_model(self, gpu_price: Option<f64>) -> Self {
        self.with_gpu_price(gpu_price).unwrap_or(self)
    }

    /// As it is written, whatever was said.
    fn of_tuning(tuning: Tuning) -> Self {
        if tuning == Tuning::default() { Self::Downbeat } else { Self::DownbeatTuned(tuning) }
    }

    /// Whether it decides over all models at once, so that they cannot be dealt to several ModelThreads.
    #[must_use]
    pub fn needs_one_queue(self) -> bool {
        matches!(self, Self::Clockwork | Self::Shepherd | Self::Nexus | Self::Clipper | Self::Orloj(_))
    }

    /// Whether it loads weights into memory that holds but a part of all models.
    #[must_use]
    pub fn loads_weights(self) -> bool {
        !matches!(self, Self::Nexus | Self::Clipper | Self::Orloj(_))
    }

    /// How what it plans with follows executions, if it is to.
    #[must_use]
    pub fn learning(self, reestimate: bool) -> Learning {
        match self {
            _ if !reestimate => Learning::Off,
            Self::Clockwork => Learning::Longest,
            _ => Learning::Factors,
        }
    }

    /// The policy's state for one model.
    ///
    /// # Panics
    /// If the policy has no windows, and so is a planner of its own.
    #[must_use]
    pub fn instantiate(self) -> Box<dyn BatchPolicy> {
        match self {
            Self::Deferred => Box::new(Deferred),
            Self::DeferredLatest => Box::new(DeferredLatest),
            Self::DeferredTarget => Box::new(DeferredTarget),
            Self::Symphony => Box::new(symphony::Symphony::new(false)),
            Self::SymphonyEager => Box::new(symphony::Symphony::new(true)),
            Self::Downbeat => Box::new(downbeat::Downbeat::new(Tuning::default())),
            Self::DownbeatTuned(tuning) => Box::new(downbeat::Downbeat::new(tuning)),
            Self::Eager => Box::new(Timeout { after: Span::ZERO, part: 0.0 }),
            Self::Timeout(after) => Box::new(Timeout { after, part: 0.0 }),
            Self::TimeoutPercent(percent) => Box::new(Timeout { after: Span::ZERO, part: percent / 100.0 }),
            Self::Clockwork | Self::Nexus | Self::Shepherd | Self::Clipper | Self::Orloj(_) => {
                unreachable!("{self} is a planner, not a choice of windows")
            }
        }
    }
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        match text.split_once(':') {
            None if text == "deferred" => Ok(Self::Deferred),
            Some(("deferred", "latest")) => Ok(Self::DeferredLatest),
            Some(("deferred", "target")) => Ok(Self::DeferredTarget),
            None if text == "symphony" => Ok(Self::Symphony),
            Some(("symphony", "eager")) => Ok(Self::SymphonyEager),
            None if text == "downbeat" => Ok(Self::Downbeat),
            Some(("downbeat", tuning)) => {
                let tuning = Tuning::parse(tuning).map_err(PolicyError::Tuning)?;
                Ok(Self::of_tuning(tuning))
            }
            None if text == "eager" => Ok(Self::Eager),
            None if text == "clockwork" => Ok(Self::Clockwork),
            None if text == "nexus" => Ok(Self::Nexus),
            None if text == "shepherd" => Ok(Self::Shepherd),
            None if text == "clipper" => Ok(Self::Clipper),
            None if text == "orloj" => Ok(Self::Orloj(ORLOJ_RATE)),
            Some(("orloj", rate)) => match rate.parse() {
                Ok(rate) if (1e-9..=1.0).contains(&rate) => Ok(Self::Orloj(rate)),
                _ => Err(PolicyError::Orloj(rate.to_owned())),
            },
            Some(("timeout", time)) => {
                let within = |text: &str, max: f64| text.parse().ok().filter(|value| (0.0..=max).contains(value));
                let timeout = match time.strip_suffix('%') {
                    Some(percent) => within(percent, 100.0).map(Self::TimeoutPercent),
                    None => within(time, 60_000.0).map(|ms| Self::Timeout(Span::from_millis_f64(ms))),
                };
                timeout.ok_or_else(|| PolicyError::Timeout(time.to_owned()))
            }
            _ => Err(PolicyError::Unknown(text.to_owned())),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deferred => f.write_str("deferred"),
            Self::DeferredLatest => f.write_str("deferred:latest"),
            Self::DeferredTarget => f.write_str("deferred:target"),
            Self::Symphony => f.write_str("symphony"),
            Self::SymphonyEager => f.write_str("symphony:eager"),
            Self::Downbeat => f.write_str("downbeat"),
            Self::DownbeatTuned(tuning) => write!(f, "downbeat:{tuning}"),
            Self::Eager => f.write_str("eager"),
            Self::Timeout(timeout) => write!(f, "timeout:{}", timeout.as_millis_f64()),
            Self::TimeoutPercent(percent) => write!(f, "timeout:{percent}%"),
            Self::Clockwork => f.write_str("clockwork"),
            Self::Nexus => f.write_str("nexus"),
            Self::Shepherd => f.write_str("shepherd"),
            Self::Clipper => f.write_str("clipper"),
            Self::Orloj(ORLOJ_RATE) => f.write_str("orloj"),
            Self::Orloj(rate) => write!(f, "orloj:{rate:e}"),
        }
    }
}

/// Symphony, section 3.1: the window opens when one more task would no longer fit.
#[derive(Debug)]
struct Deferred;

impl BatchPolicy for Deferred {
    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        frontrun(view, batch)
    }
}

/// Symphony, section 3.1: at the latest moment, which leaves GPUs idle for longer.
#[derive(Debug)]
struct DeferredLatest;

impl BatchPolicy for DeferredLatest {
    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        view.queue[batch.skip].deadline - view.profile.latency(batch.size) - view.jitter
    }
}

/// Symphony, section 3.2: batches are gathered as in Nexus, which gives up heads that would keep a batch below its
/// target: the largest batch that a GPU of its own can run, `2 l(b) <= SLO` (section 5.3).
#[derive(Debug)]
struct DeferredTarget;

impl BatchPolicy for DeferredTarget {
    fn gather(&self, view: &View<'_>) -> Gathered {
        let Some(head) = view.queue.front() else { return longest_prefix(view) };
        whole_batch(view, view.profile.largest_batch_within((head.deadline - head.queued_at) / 2))
    }

    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        frontrun(view, batch)
    }
}

/// The longest batch from the first head on from which on `target` tasks, or all, can be on time.
pub(crate) fn whole_batch(view: &View<'_>, target: usize) -> Gathered {
    let first = longest_prefix(view);
    give_up_heads(view, first, |skip| view.longest_batch(skip) >= target.min(view.queue.len() - skip))
}

/// The longest batch from the first head on, `first.skip` or a later one, that `is_enough`; that holds for all heads
/// behind one that it holds for, and for the last task alone.
fn give_up_heads(view: &View<'_>, first: Gathered, is_enough: impl Fn(usize) -> bool) -> Gathered {
    if first.size == 0 || is_enough(first.skip) {
        return first;
    }
    let (mut short, mut enough) = (first.skip, view.queue.len() - 1);
    while enough - short > 1 {
        let middle = usize::midpoint(short, enough);
        if is_enough(middle) { enough = middle } else { short = middle }
    }
    Gathered { skip: enough, size: view.longest_batch(enough) }
}

/// The longest run of tasks that can finish by the deadline of its first one, from the first task that even alone can.
fn longest_prefix(view: &View<'_>) -> Gathered {
    let mut skip = 0;
    while skip < view.queue.len() {
        match view.longest_batch(skip) {
            0 => skip += 1,
            size => return Gathered { skip, size },
        }
    }
    Gathered { skip, size: 0 }
}

/// `deadline - l(b + 1)`: from here on no later task can join the batch. `PAST` at the largest batch. Earlier by what
/// timers are late.
fn frontrun(view: &View<'_>, batch: Gathered) -> Timestamp {
    if batch.size == view.profile.max_batch() {
        return Timestamp::PAST;
    }
    view.queue[batch.skip].deadline - view.profile.latency(batch.size + 1) - view.jitter
}

/// Symphony, section 3.4: `exec = a + k`, with `a` the first arrival in the batch; k = 0 is eager.
#[derive(Debug)]
struct Timeout {
    after: Span,
    /// Of the first task's time, added to `after`.
    part: f64,
}

impl BatchPolicy for Timeout {
    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        if self.after == Span::ZERO && self.part == 0.0 {
            return Timestamp::PAST;
        }
        let tasks = view.queue.range(batch.skip..batch.skip + batch.size);
        let first = tasks.min_by_key(|task| task.queued_at).expect("a gathered batch has a task");
        let slo_ns = (first.deadline - first.queued_at).as_nanos() as f64;
        first.queued_at + self.after + Span((slo_ns * self.part) as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::NetworkBudget;

    #[test]
    fn policies_read_as_they_are_written() {
        for text in [
            "downbeat",
            "downbeat:reserve=1.5,gpu_price=4",
            "downbeat:gpu_price=inf",
            "deferred",
            "deferred:latest",
            "deferred:target",
            "symphony",
            "symphony:eager",
            "eager",
            "timeout:2.5",
            "timeout:30%",
            "timeout:7%",
            "clockwork",
            "nexus",
            "shepherd",
            "clipper",
        ] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
        for tenths in 0..=1000 {
            for unit in ["", "%"] {
                let text = format!("timeout:{}{unit}", f64::from(tenths) / 10.0);
                assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
            }
        }
    }

    #[test]
    fn a_bad_policy_says_what_is_expected() {
        let error = |text: &str| text.parse::<Policy>().unwrap_err().to_string();
        assert_eq!(error("lazy"), format!("unknown policy `lazy`; expected {POLICIES}"));
        for bad in ["x", "", "-1", "NaN", "inf", "101%", "%"] {
            let expected = format!(
                "policy timeout:MS needs a number of milliseconds from 0 to 60000, or of per cent of the SLO as in \
                 timeout:30%, found `{bad}`"
            );
            assert_eq!(error(&format!("timeout:{bad}")), expected);
        }
    }

    #[test]
    fn a_real_cluster_does_not_preempt() {
        let expected = "policy shepherd kills running batches, which backends cannot do; it is for sim and bench \
                        goodput, expected another";
        assert_eq!(Policy::of_cluster("shepherd").unwrap_err().to_string(), expected);
        assert_eq!(Policy::of_cluster("clockwork"), Ok(Policy::Clockwork));
    }

    /// l(b) = b + 5 and an SLO of 16.
    #[test]
    fn variants_of_deferred_differ_in_the_window_and_in_what_heads_cost() {
        let profile = LatencyProfile::linear(1e-6, 5e-6, 64).unwrap();
        let task = |id, queued_at| Queued {
            id: proto::TaskId(id),
            queued_at: Timestamp(queued_at),
            deadline: Timestamp(queued_at + 16),
            priority: 0,
            application: 0,
            length: 0,
        };
        let queue: VecDeque<_> = [task(0, 0), task(1, 3), task(2, 6), task(3, 7)].into();
        let lead_times = NetworkBudget::default().lead_times(&profile);
        let gather = |policy: Policy, now, free_at| {
            let (now, free_at) = (Timestamp(now), Timestamp(free_at));
            let view = View {
                now,
                free_at,
                queue: &queue,
                profile: &profile,
                lead_times: &lead_times,
                jitter: Span(0),
                price: Price::default(),
            };
            let policy = policy.instantiate();
            let batch = policy.gather(&view);
            (batch.skip, batch.size, policy.opens_at(&view, batch).0)
        };
        assert_eq!(gather(Policy::Deferred, 7, 7), (0, 4, 6));
        assert_eq!(gather(Policy::DeferredLatest, 7, 7), (0, 4, 7));
        assert_eq!(gather(Policy::DeferredTarget, 7, 7), (0, 4, 6));
        // From 9 on the first task allows two; a GPU of its own would run three, 2 l(3) = 16, and from the second head
        // on there is time for all three that are left.
        assert_eq!(gather(Policy::Deferred, 9, 9), (0, 2, 8));
        assert_eq!(gather(Policy::DeferredTarget, 9, 9), (1, 3, 10));
    }

    #[test]
    fn a_timeout_runs_from_the_first_arrival() {
        let profile = LatencyProfile::from_table(vec![Span(10), Span(15)]).unwrap();
        let task = |id, queued_at, deadline| Queued {
            id: proto::TaskId(id),
            queued_at: Timestamp(queued_at),
            deadline: Timestamp(deadline),
            priority: 0,
            application: 0,
            length: 0,
        };
        // The second task arrived first, and was given 100.
        let queue = VecDeque::from([task(0, 20, 90), task(1, 10, 110)]);
        let lead_times = [Span(10), Span(15)];
        let view = View {
            now: Timestamp(20),
            free_at: Timestamp::PAST,
            queue: &queue,
            profile: &profile,
            lead_times: &lead_times,
            jitter: Span::ZERO,
            price: Price::default(),
        };
        let opens_at = |policy: Policy| policy.instantiate().opens_at(&view, Gathered { skip: 0, size: 2 });
        assert_eq!(opens_at(Policy::Eager), Timestamp::PAST);
        assert_eq!(opens_at(Policy::Timeout(Span(7))), Timestamp(17));
        assert_eq!(opens_at(Policy::TimeoutPercent(30.0)), Timestamp(40));
    }
}
