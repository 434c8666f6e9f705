//! What must hold on every run, whatever the policy: the invariants of ARCHITECTURE.md that a scheduler can break.

use proto::{Span, TaskId, Timestamp};
use thiserror::Error;

/// A broken invariant: a bug of ours. The run's seed replays it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Violation {
    /// Invariant 1.
    #[error("invariant 1: task {0:?} ended twice, or was never submitted")]
    EndedTwice(TaskId),
    /// Invariant 1.
    #[error("invariant 1: {0} tasks never ended")]
    NeverEnded(u64),
    /// Invariant 2.
    #[error("invariant 2: GPU {gpu} starts a batch at {started_at:?}, outside of [{exec_at:?}, {latest:?}]")]
    OutsideWindow {
        /// The GPU.
        gpu: u32,
        /// The start.
        started_at: Timestamp,
        /// The window's start.
        exec_at: Timestamp,
        /// The window's end.
        latest: Timestamp,
    },
    /// Invariant 2.
    #[error("invariant 2: GPU {gpu} starts a batch at {started_at:?} while one runs until {busy_until:?}")]
    Overlap {
        /// The GPU.
        gpu: u32,
        /// The start.
        started_at: Timestamp,
        /// The end of the batch before.
        busy_until: Timestamp,
    },
    /// Invariant 2, where memory is short.
    #[error("invariant 2: GPU {gpu} is to run model {model}, whose weights are not in its memory")]
    WeightsMissing {
        /// The GPU.
        gpu: u32,
        /// The model.
        model: u32,
    },
    /// Invariant 5, where memory is short.
    #[error("invariant 5: GPU {gpu} is to {action} model {model}, which it cannot")]
    Memory {
        /// The GPU.
        gpu: u32,
        /// Load or unload.
        action: &'static str,
        /// The model.
        model: u32,
    },
    /// Invariant 4.
    #[error("invariant 4: task {task:?} was planned to end {late} after its deadline")]
    PlannedLate {
        /// The task.
        task: TaskId,
        /// How much.
        late: Span,
    },
    /// Invariant 7.
    #[error(
        "invariant 7: a batch without an objective leaves no GPU free before {frees_at:?}, task {task:?} must start by \
         {starts_by:?}"
    )]
    Displaced {
        /// A task with an objective that waits.
        task: TaskId,
        /// The latest start of a batch of it alone.
        starts_by: Timestamp,
        /// When the first GPU frees.
        frees_at: Timestamp,
    },
    /// Invariant 5.
    #[error("invariant 5: {what} holds {found}, its bound is {bound}")]
    Unbounded {
        /// What.
        what: &'static str,
        /// What it holds.
        found: usize,
        /// Its bound.
        bound: usize,
    },
}

/// Watches one run. Task ids are dense from 0.
#[derive(Debug)]
pub struct Checker {
    /// One bit for each submitted task: it has ended.
    ended: Vec<u64>,
    submitted: u64,
    ended_count: u64,
    /// By GPU.
    busy_until: Vec<Timestamp>,
}

impl Checker {
    /// For a cluster of this many GPUs.
    #[must_use]
    pub fn new(gpus: usize) -> Self {
        Self { ended: Vec::new(), submitted: 0, ended_count: 0, busy_until: vec![Timestamp::PAST; gpus] }
    }

    /// A task enters; its id is the returned one.
    pub fn submit(&mut self) -> TaskId {
        let id = TaskId(self.submitted);
        if self.submitted.is_multiple_of(64) {
            self.ended.push(0);
        }
        self.submitted += 1;
        id
    }

    /// A task ends.
    ///
    /// # Errors
    /// If it has ended before.
    pub fn end(&mut self, task: TaskId) -> Result<(), Violation> {
        let bit = 1 << (task.0 % 64);
        match self.ended.get_mut((task.0 / 64) as usize) {
            Some(word) if *word & bit == 0 && task.0 < self.submitted => *word |= bit,
            _ => return Err(Violation::EndedTwice(task)),
        }
        self.ended_count += 1;
        Ok(())
    }

    /// A GPU runs a batch whose window is `[exec_at, latest]`.
    ///
    /// # Errors
    /// If it is not allowed to start then.
    pub fn execute(
        &mut self,
        gpu: u32,
        window: (Timestamp, Timestamp),
        started_at: Timestamp,
        finished_at: Timestamp,
    ) -> Result<(), Violation> {
        let (exec_at, latest) = window;
        if started_at < exec_at || started_at > latest {
            return Err(Violation::OutsideWindow { gpu, started_at, exec_at, latest });
        }
        let busy_until = &mut self.busy_until[gpu as usize];
        if started_at < *busy_until {
            return Err(Violation::Overlap { gpu, started_at, busy_until: *busy_until });
        }
        *busy_until = finished_at;
        Ok(())
    }

    /// The run is over.
    ///
    /// # Errors
    /// If a task has not ended.
    pub fn finish(&self) -> Result<(), Violation> {
        match self.submitted - self.ended_count {
            0 => Ok(()),
            missing => Err(Violation::NeverEnded(missing)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_broken_invariant_is_seen() {
        let mut checker = Checker::new(1);
        let task = checker.submit();
        assert_eq!(checker.finish(), Err(Violation::NeverEnded(1)));
        assert_eq!(checker.end(task), Ok(()));
        assert_eq!(checker.end(task), Err(Violation::EndedTwice(task)));
        assert_eq!(checker.end(TaskId(1)), Err(Violation::EndedTwice(TaskId(1))));
        assert_eq!(checker.finish(), Ok(()));
        let window = (Timestamp(10), Timestamp(20));
        assert!(checker.execute(0, window, Timestamp(9), Timestamp(30)).is_err());
        assert!(checker.execute(0, window, Timestamp(21), Timestamp(30)).is_err());
        assert_eq!(checker.execute(0, window, Timestamp(20), Timestamp(30)), Ok(()));
        let later = (Timestamp(29), Timestamp(40));
        assert!(matches!(checker.execute(0, later, Timestamp(29), Timestamp(50)), Err(Violation::Overlap { .. })));
        assert_eq!(checker.execute(0, later, Timestamp(30), Timestamp(50)), Ok(()));
    }
}
