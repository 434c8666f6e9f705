//! What a GPU was given and has not reported yet, and with it when the GPU will be free.

use std::collections::VecDeque;

use proto::{Span, Timestamp};

/// The batches of one GPU that no report has come of.
#[derive(Debug)]
pub struct GpuWork {
    /// When the last reported batch ended.
    idle_since: Timestamp,
    unreported: VecDeque<Planned>,
}

#[derive(Debug, Clone, Copy)]
struct Planned {
    exec_at: Timestamp,
    execution: Span,
}

impl GpuWork {
    /// None, from `idle_since` on.
    #[must_use]
    pub fn new(idle_since: Timestamp) -> Self {
        Self { idle_since, unreported: VecDeque::new() }
    }

    /// A batch was planned behind all others.
    pub fn push(&mut self, exec_at: Timestamp, execution: Span) {
        self.unreported.push_back(Planned { exec_at, execution });
    }

    /// The oldest batch ended, or was rejected.
    pub fn handle_finished(&mut self, finished_at: Timestamp) {
        if self.unreported.pop_front().is_some() {
            self.idle_since = finished_at;
        }
    }

    /// The oldest batch, if it runs, is killed; its report is on the way.
    pub fn handle_preempted(&mut self, now: Timestamp) {
        if let Some(plan) = self.unreported.front_mut() {
            plan.execution = (now - plan.exec_at.max(self.idle_since)).max(Span::ZERO);
        }
    }

    /// Batches without a report.
    #[must_use]
    pub fn len(&self) -> usize {
        self.unreported.len()
    }

    /// No batch is without a report.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.unreported.is_empty()
    }

    /// Each batch starts when its time has come and the one before it has ended.
    #[must_use]
    pub fn free_at(&self) -> Timestamp {
        let run = |free_at: Timestamp, plan: &Planned| free_at.max(plan.exec_at) + plan.execution;
        self.unreported.iter().fold(self.idle_since, run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_move_what_is_planned_behind() {
        let mut work = GpuWork::new(Timestamp(5));
        work.push(Timestamp(10), Span(20));
        work.push(Timestamp(30), Span(5));
        assert_eq!((work.free_at(), work.len()), (Timestamp(35), 2));
        work.handle_finished(Timestamp(33));
        assert_eq!(work.free_at(), Timestamp(38));
        work.handle_preempted(Timestamp(36));
        assert_eq!(work.free_at(), Timestamp(36));
        work.handle_finished(Timestamp(36));
        work.handle_finished(Timestamp(90));
        assert_eq!((work.free_at(), work.is_empty()), (Timestamp(36), true));
    }
}
