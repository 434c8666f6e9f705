//! Step 10: what has become of each model's requests, counted in Triton's terms.
//!
//! A request counts once, with the time of its row that came last. An execution counts once for each batch that this
//! frontend saw an answer of; other frontends may have seen the same batch. A request for an ensemble, which is in no
//! batch, is an execution of its own, of as many rows as it has. A request that is answered by what was kept succeeds,
//! and is neither an inference nor an execution.

use std::collections::BTreeMap;

use frontend::tasks::{Reply, Timing};
use proto::{BackendId, Span, Timestamp};

use crate::api::{InferBatchStatistics, InferStatistics, ModelStatistics, StatisticDuration};

/// One model's counts.
#[derive(Debug, Default)]
pub struct Statistics {
    last_at: Option<Timestamp>,
    inferences: u64,
    executions: u64,
    success: Total,
    fail: Total,
    queue: Total,
    cache_hit: Total,
    cache_miss: Total,
    stages: Stages,
    by_batch_size: BTreeMap<u16, Stages>,
    /// When the last counted execution of each GPU started. Answers of one batch come from one start, and a GPU's
    /// starts only grow, so an answer that comes late is not counted again.
    last_started: BTreeMap<(BackendId, u32), i64>,
}

/// A count and the sum of its durations.
#[derive(Debug, Clone, Copy, Default)]
struct Total {
    count: u64,
    ns: u64,
}

/// The stages of an execution.
#[derive(Debug, Clone, Copy, Default)]
struct Stages {
    input: Total,
    infer: Total,
    output: Total,
}

impl Statistics {
    /// A request was answered at `now`. How many executions are known by it that were not before.
    pub fn handle_success(&mut self, now: Timestamp, reply: &Reply) -> u64 {
        let known = self.executions;
        let timing = &reply.timing;
        self.last_at = Some(now);
        self.inferences += reply.rows as u64;
        self.success.add_ns((timing.answered_at - timing.admitted_at).0);
        self.queue.add_ns(timing.stamps.granted_at_ns - timing.admitted_at.0);
        self.stages.add(timing);
        // As in Triton, each request for an ensemble is an execution of it.
        if reply.batches.is_empty() {
            self.executions += 1;
            self.by_batch_size.entry(timing.batch_size).or_default().add(timing);
        }
        for batch in &reply.batches {
            let (backend, gpu, started_at_ns) = batch.execution();
            let last = self.last_started.entry((backend, gpu)).or_insert(i64::MIN);
            if started_at_ns > *last {
                *last = started_at_ns;
                self.executions += 1;
                self.by_batch_size.entry(batch.batch_size).or_default().add(batch);
            }
        }
        self.executions - known
    }

    /// A request was answered at `now` by what was kept.
    pub fn handle_cache_hit(&mut self, now: Timestamp, timing: &Timing) {
        self.last_at = Some(now);
        let took = timing.answered_at - timing.admitted_at;
        self.success.add_ns(took.0);
        self.queue.add_ns(0);
        self.cache_hit.add_ns(took.0);
    }

    /// A request's answer was looked for so long, and its model is asked.
    pub fn handle_cache_miss(&mut self, took: Span) {
        self.cache_miss.add_ns(took.0);
    }

    /// A request ended without an answer at `now`, `after` its admission.
    pub fn handle_failure(&mut self, now: Timestamp, after: Span) {
        self.last_at = Some(now);
        self.fail.add_ns(after.0);
    }

    /// When the last request ended.
    #[must_use]
    pub fn last_at(&self) -> Option<Timestamp> {
        self.last_at
    }

    /// All counts; the model's name and version and the instant of `last_at` are the caller's to add.
    #[must_use]
    pub fn report(&self) -> ModelStatistics {
        let batch = |(&batch_size, stages): (&u16, &Stages)| InferBatchStatistics {
            batch_size: batch_size.into(),
            compute_input: stages.input.report(),
            compute_infer: stages.infer.report(),
            compute_output: stages.output.report(),
        };
        ModelStatistics {
            inference_count: self.inferences,
            execution_count: self.executions,
            inference_stats: Some(InferStatistics {
                success: self.success.report(),
                fail: self.fail.report(),
                queue: self.queue.report(),
                compute_input: self.stages.input.report(),
                compute_infer: self.stages.infer.report(),
                compute_output: self.stages.output.report(),
                cache_hit: self.cache_hit.report(),
                cache_miss: self.cache_miss.report(),
            }),
            batch_stats: self.by_batch_size.iter().map(batch).collect(),
            ..ModelStatistics::default()
        }
    }
}

impl Stages {
    fn add(&mut self, timing: &Timing) {
        let stamps = &timing.stamps;
        self.input.add_ns(stamps.fetched_at_ns - stamps.planned_at_ns);
        self.infer.add_ns(stamps.finished_at_ns - stamps.started_at_ns);
        self.output.add_ns(timing.answered_at.0 - stamps.finished_at_ns);
    }
}

impl Total {
    /// Clocks of members agree within an error, so a short stage can seem to end before it began.
    fn add_ns(&mut self, ns: i64) {
        self.count += 1;
        self.ns += u64::try_from(ns).unwrap_or(0);
    }

    fn report(self) -> Option<StatisticDuration> {
        Some(StatisticDuration { count: self.count, ns: self.ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::stages::AnswerStamps;

    fn timing(gpu: u32, started_at_ns: i64, batch_size: u16) -> Timing {
        let stamps = AnswerStamps {
            granted_at_ns: 100,
            planned_at_ns: 110,
            fetched_at_ns: 130,
            started_at_ns,
            finished_at_ns: started_at_ns + 40,
            ..AnswerStamps::default()
        };
        Timing {
            admitted_at: Timestamp(10),
            deadline: Timestamp(1000),
            stamps,
            answered_at: Timestamp(started_at_ns + 45),
            batch_size,
            backend: BackendId(0),
            gpu,
        }
    }

    fn reply(rows: usize, batches: Vec<Timing>) -> Reply {
        let timing = *batches.last().unwrap();
        Reply { outputs: vec![], shapes: vec![], rows, timing, batches, was_late: false }
    }

    #[test]
    fn a_batch_that_many_requests_share_is_one_execution() {
        let mut statistics = Statistics::default();
        statistics.handle_success(Timestamp(300), &reply(3, vec![timing(0, 200, 4)]));
        statistics.handle_success(Timestamp(301), &reply(1, vec![timing(0, 200, 4)]));
        // Two rows in two batches, of which the one on another GPU is new.
        statistics.handle_success(Timestamp(302), &reply(2, vec![timing(1, 200, 1), timing(0, 200, 4)]));
        statistics.handle_failure(Timestamp(303), Span(7));
        let report = statistics.report();
        assert_eq!((report.inference_count, report.execution_count), (6, 2));
        let stats = report.inference_stats.unwrap();
        let found = |total: Option<StatisticDuration>| total.map(|total| (total.count, total.ns)).unwrap();
        assert_eq!(found(stats.success), (3, 3 * 235));
        assert_eq!((found(stats.fail), found(stats.queue)), ((1, 7), (3, 3 * 90)));
        assert_eq!((found(stats.compute_input), found(stats.compute_infer)), ((3, 60), (3, 120)));
        assert_eq!(found(stats.compute_output), (3, 15));
        let sizes: Vec<_> = report.batch_stats.iter().map(|b| (b.batch_size, found(b.compute_infer))).collect();
        assert_eq!(sizes, [(1, (1, 40)), (4, (1, 40))]);
        assert_eq!(statistics.last_at(), Some(Timestamp(303)));
    }
}
