//! Work for `bench/instructions`, which counts it: requests through ModelThread and RankThread in virtual time, so that
//! one build always executes the same instructions.
//!
//! Every model gets the same rate whatever their number, so batches are alike and only the structures grow. Where GPUs
//! have room for a part of the models, every GPU gets the same rate, and nearly every request needs a load.

use std::{cmp::Reverse, collections::BinaryHeap};

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};
use scheduler::{GpuMemory, LoadEnd, ModelConfig, NetworkBudget, Planner, PlannerOutput, Policy, Task, Weights};

/// DenseNet121 on an A100 (Symphony, Table 4), in milliseconds.
const ALPHA_MS: f64 = 0.054;
const BETA_MS: f64 = 10.546;
const SLO: Span = Span::from_millis(100);
/// From one request of a model to its next one, on average: about nine gather in a batch.
const GAP_NS: i64 = 10_000_000;
/// Requests of each model before counting begins: more than an SLO holds.
const WARM_UP: u64 = 100;
/// The same of each GPU, where memory is short: twice what a load takes.
const COLD_GAP_NS: i64 = 16_660_000;
/// Requests for each model that there is room for, until the memory is full.
const COLD_WARM_UP: u64 = 4;
/// ResNet50 (Clockwork, appendix A).
const WEIGHTS: Weights = Weights::new(7, Span::from_micros(8_330));

struct Load {
    planner: Box<dyn Planner<()>>,
    models: u64,
    /// From one request to the next.
    gap: Span,
    /// Requests submitted.
    submitted: u64,
    /// Batches that run, by their ends.
    running: BinaryHeap<Reverse<(Timestamp, GpuId)>>,
    /// Loads under way, by their ends.
    loading: BinaryHeap<Reverse<(Timestamp, GpuId, ModelId)>>,
    loads: u64,
    dropped: u64,
}

impl Load {
    /// GPUs have room for so many models each; `None`: for all.
    fn new(models: u32, gpus: u32, room: Option<u32>) -> Self {
        let mut planner = Policy::Downbeat.planner(NetworkBudget::default());
        let profile = LatencyProfile::linear(ALPHA_MS, BETA_MS, LatencyProfile::MAX_BATCH).expect("a constant profile");
        for id in 0..models {
            let weights = room.map_or(Weights::default(), |_| WEIGHTS);
            let config = ModelConfig { weights, ..ModelConfig::new(profile.clone(), 1024) };
            planner.handle_model(Timestamp::ZERO, ModelId(id), config);
        }
        for gpu in 0..gpus {
            let memory = room.map(|room| GpuMemory::empty(room * WEIGHTS.pages));
            planner.handle_gpu_joined(Timestamp::ZERO, GpuId(gpu), (0..models).map(ModelId).collect(), memory);
        }
        let gap = Span(room.map_or(GAP_NS / i64::from(models), |_| COLD_GAP_NS / i64::from(gpus)));
        let (running, loading) = (BinaryHeap::new(), BinaryHeap::new());
        Self { planner, models: models.into(), gap, submitted: 0, running, loading, loads: 0, dropped: 0 }
    }

    /// Named in `bench/instructions`: only what happens in here is counted.
    #[inline(never)]
    fn handle_counted_requests(&mut self, count: u64) {
        for _ in 0..count {
            self.handle_request();
        }
    }

    /// Submits the next request, to a model that a fixed sequence of numbers names, after all timers before it.
    fn handle_request(&mut self) {
        self.submitted += 1;
        let at = Timestamp::ZERO + self.gap * self.submitted as i64;
        self.run_until(at);
        // Knuth's multiplicative hash.
        let model = ModelId((self.submitted.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % self.models as u32);
        let task = Task {
            id: TaskId(self.submitted),
            deadline: at + SLO,
            priority: 0,
            application: 0,
            length: 0,
            payload: (),
        };
        self.planner.handle_submit(at, model, task);
        self.decide(at);
    }

    fn run_until(&mut self, end: Timestamp) {
        loop {
            let finish = self.running.peek().map(|&Reverse((at, _))| at);
            let loaded = self.loading.peek().map(|&Reverse((at, ..))| at);
            let timers = [finish, loaded, self.planner.poll_timeout()];
            let Some(now) = timers.into_iter().flatten().min() else { return };
            if now > end {
                return;
            }
            while let Some(&Reverse((at, gpu))) = self.running.peek()
                && at <= now
            {
                self.running.pop();
                self.planner.handle_finished(gpu, at);
            }
            while let Some(&Reverse((finished_at, gpu, model))) = self.loading.peek()
                && finished_at <= now
            {
                self.loading.pop();
                self.planner.handle_loaded(now, gpu, model, LoadEnd { finished_at, is_loaded: true });
            }
            self.decide(now);
        }
    }

    fn decide(&mut self, now: Timestamp) {
        self.planner.handle_timeout(now);
        while let Some(output) = self.planner.poll_output() {
            match output {
                PlannerOutput::Batch(batch) => {
                    let latency_ms = BETA_MS + ALPHA_MS * batch.tasks.len() as f64;
                    self.running.push(Reverse((batch.exec_at + Span::from_millis_f64(latency_ms), batch.gpu)));
                }
                PlannerOutput::Dropped { .. } => self.dropped += 1,
                PlannerOutput::Preempt(_) => unreachable!("this policy lets batches run to their end"),
                PlannerOutput::Load { gpu, model, earliest, .. } => {
                    self.loads += 1;
                    self.loading.push(Reverse((earliest.max(now) + WEIGHTS.load, gpu, model)));
                }
                PlannerOutput::Unload { .. } => {}
            }
        }
    }
}

fn main() {
    let numbers: Vec<u32> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let (models, gpus, requests, room) = match numbers[..] {
        [models, gpus, requests] => (models, gpus, requests, None),
        [models, gpus, requests, room] => (models, gpus, requests, Some(room)),
        _ => {
            eprintln!("usage: instructions MODELS GPUS REQUESTS [MODELS_THAT_FIT_A_GPU]");
            std::process::exit(2);
        }
    };
    let mut load = Load::new(models, gpus, room);
    let warm_up = room.map_or(WARM_UP * u64::from(models), |room| COLD_WARM_UP * u64::from(room * gpus));
    for _ in 0..warm_up {
        load.handle_request();
    }
    load.loads = 0;
    load.handle_counted_requests(requests.into());
    if room.is_some() {
        assert!(load.loads * 2 >= u64::from(requests), "{} loads for {requests} requests", load.loads);
    }
    // All models begin at once, so some tasks find no GPU at first.
    assert!(load.dropped * 20 <= load.submitted, "{} of {} were dropped", load.dropped, load.submitted);
}
