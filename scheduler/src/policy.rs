//! Batch policies: which tasks form the next batch, and from when on it may run.
//!
//! A policy is asked whenever a model's queue changes and once more when a GPU was granted. It decides two things
//! and nothing else: which heads to pass over and how many tasks to take ([`BatchPolicy::gather`]), and when the
//! window of that batch opens ([`BatchPolicy::opens_at`]); the window always ends at `deadline - l(b)`. Queues,
//! timers, matchmaking and the bookkeeping of GPUs are the same for all policies.

use std::{collections::VecDeque, fmt, str::FromStr};

use proto::{LatencyProfile, Span, Timestamp};
use thiserror::Error;

use crate::{matchmaker::Matchmaker, messages::NetworkBudget, planner::Planner, task_queue::Queued};

mod downbeat;

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
        let Some(head) = self.queue.get(skip) else { return 0 };
        let bound = (self.queue.len() - skip).min(self.profile.max_batch());
        if self.earliest_end(bound) <= head.deadline {
            return bound;
        }
        let on_idle_gpu = self.lead_times.partition_point(|&lead| self.now + lead <= head.deadline);
        bound.min(on_idle_gpu).min(self.profile.largest_batch_within(head.deadline - self.free_at))
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

/// One model's policy. It sees one model and may learn from it.
pub trait BatchPolicy: fmt::Debug + Send {
    /// The next batch, if it started as early as it can. By default the longest prefix that can finish in time, which
    /// gives up a head only when even a batch of one would be late (Symphony, section 3.2, GetBatch).
    fn gather(&self, view: &View<'_>) -> Gathered {
        longest_prefix(view)
    }

    /// When the window of a gathered batch (of at least one task) opens; `PAST` for at once.
    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp;

    /// A gathered batch was granted a GPU and starts at `start`; it has `waited` since its window opened.
    fn handle_granted(&mut self, _view: &View<'_>, _batch: Gathered, _start: Timestamp, _waited: Span) {}
}

/// A choice of policy, as written on the command line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Policy {
    /// Symphony: the window opens at the frontrun moment.
    Deferred,
    /// Ours: as deferred, but it gives heads up early and opens the window earlier (`policy/downbeat.rs`).
    Downbeat,
    /// The window is always open.
    Eager,
    /// The window opens this long after the batch's first task arrived (Symphony, section 3.4).
    Timeout(Span),
    /// The same with a timeout that is this part, from 0 to 1, of the time that the task's client gave it.
    TimeoutPart(f64),
}

/// Why a policy was not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PolicyError {
    /// No such name.
    #[error("unknown policy `{0}`; expected downbeat, deferred, eager or timeout:MS, such as timeout:5")]
    Unknown(String),
    /// The time of `timeout:MS`.
    #[error(
        "policy timeout:MS needs a number of milliseconds from 0 to 60000, or of per cent of the SLO as in timeout:30%, \
         found `{0}`"
    )]
    Timeout(String),
}

impl Policy {
    /// All that turns tasks into batches under this policy.
    #[must_use]
    pub fn planner<P: Send + 'static>(self, budget: NetworkBudget) -> Box<dyn Planner<P>> {
        Box::new(Matchmaker::new(budget, self))
    }

    /// The policy's state for one model.
    #[must_use]
    pub fn instantiate(self) -> Box<dyn BatchPolicy> {
        match self {
            Self::Deferred => Box::new(Deferred),
            Self::Downbeat => Box::<downbeat::Downbeat>::default(),
            Self::Eager => Box::new(Timeout { after: Span::ZERO, part: 0.0 }),
            Self::Timeout(after) => Box::new(Timeout { after, part: 0.0 }),
            Self::TimeoutPart(part) => Box::new(Timeout { after: Span::ZERO, part }),
        }
    }
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        match text.split_once(':') {
            None if text == "deferred" => Ok(Self::Deferred),
            None if text == "downbeat" => Ok(Self::Downbeat),
            None if text == "eager" => Ok(Self::Eager),
            Some(("timeout", time)) => {
                let within = |text: &str, max: f64| text.parse().ok().filter(|value| (0.0..=max).contains(value));
                let timeout = match time.strip_suffix('%') {
                    Some(part) => within(part, 100.0).map(|part| Self::TimeoutPart(part / 100.0)),
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
            Self::Downbeat => f.write_str("downbeat"),
            Self::Eager => f.write_str("eager"),
            Self::Timeout(timeout) => write!(f, "timeout:{}", timeout.as_millis_f64()),
            Self::TimeoutPart(part) => write!(f, "timeout:{}%", 100.0 * part),
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

    #[test]
    fn policies_read_as_they_are_written() {
        for text in ["downbeat", "deferred", "eager", "timeout:2.5", "timeout:30%"] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_bad_policy_says_what_is_expected() {
        let error = |text: &str| text.parse::<Policy>().unwrap_err().to_string();
        assert_eq!(
            error("lazy"),
            "unknown policy `lazy`; expected downbeat, deferred, eager or timeout:MS, such as timeout:5"
        );
        for bad in ["x", "", "-1", "NaN", "inf", "101%", "%"] {
            let expected = format!(
                "policy timeout:MS needs a number of milliseconds from 0 to 60000, or of per cent of the SLO as in \
                 timeout:30%, found `{bad}`"
            );
            assert_eq!(error(&format!("timeout:{bad}")), expected);
        }
    }

    #[test]
    fn a_timeout_runs_from_the_first_arrival() {
        let profile = LatencyProfile::from_table(vec![Span(10), Span(15)]).unwrap();
        let task = |id, queued_at, deadline| Queued {
            id: proto::TaskId(id),
            queued_at: Timestamp(queued_at),
            deadline: Timestamp(deadline),
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
        };
        let opens_at = |policy: Policy| policy.instantiate().opens_at(&view, Gathered { skip: 0, size: 2 });
        assert_eq!(opens_at(Policy::Eager), Timestamp::PAST);
        assert_eq!(opens_at(Policy::Timeout(Span(7))), Timestamp(17));
        assert_eq!(opens_at(Policy::TimeoutPart(0.3)), Timestamp(40));
    }
}
