//! What goes wrong in a run, from its seed: executions that take longer or shorter than l(b), GPUs that throttle, GPUs
//! that die and return.

use std::collections::VecDeque;

use proto::{GpuId, Span, Timestamp};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, StandardNormal};
use scheduler::{Batch, indexed_heap::IndexedHeap};

use crate::{arrivals::Request, workload::Workload};

/// The workload's key `faults`. None by default.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Faults {
    /// Standard deviation of execution times, as a part of l(b); normal, cut off at [`DEVIATIONS_MAX`].
    pub execution_jitter: f64,
    /// The same of the time that weights take to load.
    pub load_jitter: f64,
    /// GPUs that throttle; `None` if none ever does.
    pub slowdown: Option<Slowdown>,
    /// Mean time that a GPU is up, exponential; zero if none ever dies.
    pub up_mean: Span,
    /// Mean time until a dead GPU returns, exponential.
    pub down_mean: Span,
}

/// GPUs that take longer than l(b) from some instant on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slowdown {
    /// Their execution times as a part of l(b), in addition to what jitter makes of them; at least 1.
    pub factor: f64,
    /// Batches that start from here on.
    pub from: Timestamp,
    /// The first places of the cluster, so many of them; who returns to one is as slow.
    pub gpus: u32,
}

/// Deviations of an execution time from l(b) are cut off at so many standard deviations.
pub const DEVIATIONS_MAX: f64 = 3.0;

// Streams of the run's seed; those of models count from 0 (`arrivals`).
const EXECUTION_STREAM: u64 = u64::MAX;
const FAILURE_STREAM: u64 = u64::MAX - 1;
const LOAD_STREAM: u64 = u64::MAX - 2;

/// A GPU changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It died, with all that it was given.
    Down(GpuId),
    /// It is back, under an id that no GPU had before.
    Up(GpuId),
}

/// Draws the faults of one run.
#[derive(Debug)]
pub struct FaultSource {
    faults: Faults,
    execution: ChaCha8Rng,
    load: ChaCha8Rng,
    failure: ChaCha8Rng,
    /// By place: when its GPU dies or returns.
    timers: IndexedHeap,
    /// By place: the id of its GPU, and whether it is up.
    gpus: Vec<(GpuId, bool)>,
    due: VecDeque<Fault>,
}

impl FaultSource {
    /// For a cluster of GPUs with ids from 0.
    #[must_use]
    pub fn new(faults: Faults, gpus: u32, seed: u64) -> Self {
        let stream = |stream| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(stream);
            rng
        };
        let mut source = Self {
            faults,
            execution: stream(EXECUTION_STREAM),
            load: stream(LOAD_STREAM),
            failure: stream(FAILURE_STREAM),
            timers: IndexedHeap::default(),
            gpus: (0..gpus).map(|id| (GpuId(id), true)).collect(),
            due: VecDeque::new(),
        };
        if faults.up_mean > Span::ZERO {
            for place in 0..gpus {
                source.set_timer(Timestamp::ZERO, place, faults.up_mean);
            }
        }
        source
    }

    /// How long a batch runs that starts now.
    pub fn duration(&mut self, now: Timestamp, workload: &Workload, batch: &Batch<Request>) -> Span {
        let kind = workload.kind_of(self.place(batch.gpu) as u32);
        let model = &workload.models[batch.model.0 as usize];
        let latency = match &model.dynamic {
            None => model.offers[kind].latency(batch.tasks.len()),
            Some(dynamic) => {
                let longest = batch.tasks.iter().map(|(_, request)| request.work).max().unwrap_or(Span::ZERO);
                let alike = dynamic.cost.latency(batch.tasks.len(), longest);
                Span((alike.as_nanos() as f64 * workload.gpu_kinds[kind].factor) as i64)
            }
        };
        let mut part = jitter(self.faults.execution_jitter, &mut self.execution);
        if let Some(slowdown) = self.faults.slowdown
            && now >= slowdown.from
            && (self.place(batch.gpu) as u32) < slowdown.gpus
        {
            part *= slowdown.factor;
        }
        scaled(latency, part)
    }

    /// How long weights take to load that should take so long.
    pub fn load_duration(&mut self, load: Span) -> Span {
        scaled(load, jitter(self.faults.load_jitter, &mut self.load))
    }

    /// False once a GPU has died: the one that takes its place has another id.
    #[must_use]
    pub fn is_up(&self, gpu: GpuId) -> bool {
        self.gpus[self.place(gpu)] == (gpu, true)
    }

    fn place(&self, gpu: GpuId) -> usize {
        gpu.0 as usize % self.gpus.len()
    }

    /// When the next GPU dies or returns.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.timers.peek().map(|(at, _)| at)
    }

    /// The next GPU that died or returned until `now`.
    pub fn poll_fault(&mut self, now: Timestamp) -> Option<Fault> {
        while let Some((at, place)) = self.timers.peek()
            && at <= now
        {
            let places = self.gpus.len() as u32;
            let (id, is_up) = &mut self.gpus[place as usize];
            *is_up = !*is_up;
            let mean = if *is_up {
                *id = GpuId(id.0 + places);
                self.due.push_back(Fault::Up(*id));
                self.faults.up_mean
            } else {
                self.due.push_back(Fault::Down(*id));
                self.faults.down_mean
            };
            self.set_timer(at, place, mean);
        }
        self.due.pop_front()
    }

    fn set_timer(&mut self, now: Timestamp, place: u32, mean: Span) {
        let factor: f64 = Exp1.sample(&mut self.failure);
        self.timers.set(place, now + Span((mean.as_nanos() as f64 * factor) as i64 + 1));
    }
}

/// What a duration is multiplied by.
fn jitter(deviation: f64, rng: &mut ChaCha8Rng) -> f64 {
    if deviation == 0.0 {
        return 1.0;
    }
    let drawn: f64 = StandardNormal.sample(rng);
    1.0 + deviation * drawn.clamp(-DEVIATIONS_MAX, DEVIATIONS_MAX)
}

fn scaled(span: Span, part: f64) -> Span {
    Span((span.as_nanos() as f64 * part).round() as i64)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proto::{ModelId, TaskId};
    use scheduler::task_queue::Queued;

    use super::*;

    const REQUEST: Request = Request::new(Timestamp(0), ModelId(0), 0);

    const SECOND: Span = Span::from_millis(1000);

    #[test]
    fn gpus_die_and_return_under_new_ids_as_often_as_asked() {
        let faults = Faults { up_mean: SECOND * 30, down_mean: SECOND * 10, ..Faults::default() };
        let mut source = FaultSource::new(faults, 4, 7);
        let mut up_since = [Some(Timestamp::ZERO); 4];
        let (mut up, mut last_id) = (Span::ZERO, [0u32, 1, 2, 3]);
        let end = Timestamp::ZERO + SECOND * 40_000;
        while let Some(at) = source.poll_timeout().filter(|&at| at < end) {
            while let Some(fault) = source.poll_fault(at) {
                match fault {
                    Fault::Down(id) => {
                        assert_eq!(id.0, last_id[id.0 as usize % 4]);
                        up += at - up_since[id.0 as usize % 4].take().expect("only what is up dies");
                    }
                    Fault::Up(id) => {
                        assert_eq!(id.0, last_id[id.0 as usize % 4] + 4);
                        last_id[id.0 as usize % 4] = id.0;
                        assert_eq!(up_since[id.0 as usize % 4].replace(at), None);
                    }
                }
            }
        }
        // Up for 30 of 40 seconds on average; a thousand cycles of each GPU are within 5 %.
        let part = up.as_secs_f64() / (4.0 * 40_000.0);
        assert!((part / 0.75 - 1.0).abs() < 0.05, "{part}");
    }

    #[test]
    fn execution_times_spread_as_asked() {
        let text =
            "gpus = 1\nfaults = { execution_jitter = 0.1 }\n[[model]]\nname = \"m\"\nlatency_ms = [10]\nslo_ms = 30";
        let workload = Workload::parse(text, "test", "test", Path::new(".")).unwrap();
        let mut source = FaultSource::new(workload.faults, 1, 3);
        let task = Queued {
            id: TaskId(0),
            deadline: Timestamp(0),
            queued_at: Timestamp(0),
            priority: 0,
            application: 0,
            length: 0,
        };
        let (exec_at, latest) = (Timestamp(0), Timestamp(0));
        let batch = Batch {
            model: ModelId(0),
            gpu: GpuId(0),
            due_at: exec_at,
            timer_at: exec_at,
            exec_at,
            latest,
            execution: Span::ZERO,
            tasks: vec![(task, REQUEST)],
        };
        let times: Vec<f64> =
            (0..10_000).map(|_| source.duration(Timestamp(0), &workload, &batch).as_millis_f64()).collect();
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let variance = times.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / times.len() as f64;
        assert!((mean - 10.0).abs() < 0.05, "{mean}");
        assert!((variance.sqrt() - 1.0).abs() < 0.05, "{variance}");
        assert!(times.iter().all(|time| (7.0..=13.0).contains(time)));
    }

    #[test]
    fn only_slow_gpus_take_longer_and_only_from_their_time_on() {
        let text = "gpus = 3\nfaults = { gpu_slowdown = 1.5, slow_from_s = 2, slow_gpus = 2 }\n\
                    [[model]]\nname = \"m\"\nlatency_ms = [10]\nslo_ms = 30";
        let workload = Workload::parse(text, "test", "test", Path::new(".")).unwrap();
        let mut source = FaultSource::new(workload.faults, 3, 3);
        let from = Timestamp::ZERO + SECOND * 2;
        // The fifth id is the second one of the place in the middle.
        for (gpu, now, milliseconds) in
            [(0, from - Span(1), 10), (0, from, 15), (1, from, 15), (2, from, 10), (4, from + SECOND, 15)]
        {
            let task = Queued { id: TaskId(0), deadline: now, queued_at: now, priority: 0, application: 0, length: 0 };
            let batch = Batch {
                model: ModelId(0),
                gpu: GpuId(gpu),
                due_at: now,
                timer_at: now,
                exec_at: now,
                latest: now,
                execution: Span::ZERO,
                tasks: vec![(task, REQUEST)],
            };
            assert_eq!(source.duration(now, &workload, &batch), Span::from_millis(milliseconds), "{gpu} at {now:?}");
        }
    }
}
