//! Work for `bench/instructions`, which counts it: requests of a dynamic model for one GPU, in virtual time, while so
//! many wait (Orloj, section 4.4 and Figure 12). Each request is scored, waits among the others, and leaves in a batch
//! when its score is among the highest; as many come as leave. What ran is learned from, so that all that wait are
//! scored anew from time to time.

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};
use scheduler::{ModelConfig, NetworkBudget, Planner, PlannerOutput, Policy, Task, dynamic::BatchCost};

const COST: BatchCost = BatchCost { fixed: Span::from_millis(6), per_task: 0.3 };
/// What requests of the applications take alone, in milliseconds, each 20 % more or less.
const APPLICATIONS_MS: [f64; 3] = [20.0, 60.0, 100.0];
const BATCH_MAX: usize = 16;
const MODEL: ModelId = ModelId(0);
const GPU: GpuId = GpuId(0);

struct Load {
    planner: Box<dyn Planner<()>>,
    queued: u64,
    now: Timestamp,
    submitted: u64,
    planned: u64,
    dropped: u64,
}

/// A fixed sequence of numbers from 0 to 1 (Knuth's multiplicative hash).
fn number(index: u64) -> f64 {
    (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1u64 << 24) as f64
}

/// What a request of an application takes alone.
fn alone(application: u8, number: f64) -> Span {
    Span::from_millis_f64(APPLICATIONS_MS[usize::from(application)] * (0.8 + 0.4 * number))
}

impl Load {
    fn new(policy: Policy, queued: u64) -> Self {
        let mut planner = policy.planner(NetworkBudget::default());
        let profile = LatencyProfile::linear(20.0, 50.0, BATCH_MAX).expect("a constant profile");
        let config = ModelConfig { dynamic: Some(COST), ..ModelConfig::new(profile, 2 * queued as usize) };
        planner.handle_model(Timestamp::ZERO, MODEL, config);
        for application in 0..APPLICATIONS_MS.len() as u8 {
            for sample in 0..192 {
                planner.handle_alone(Timestamp::ZERO, MODEL, (application, 0), alone(application, number(sample)));
            }
        }
        planner.handle_gpu_joined(Timestamp::ZERO, GPU, vec![MODEL], None);
        Self { planner, queued, now: Timestamp::ZERO, submitted: 0, planned: 0, dropped: 0 }
    }

    fn submit(&mut self) {
        self.submitted += 1;
        // Nearly all can wait for all others; deadlines are spread over the time that they wait.
        let batches = self.queued as f64 / BATCH_MAX as f64;
        let waits = Span::from_secs_f64(batches * 0.6 * (1.0 + number(self.submitted)));
        let application = (self.submitted % APPLICATIONS_MS.len() as u64) as u8;
        let deadline = self.now + Span::from_millis(1_000) + waits;
        let task = Task { id: TaskId(self.submitted), deadline, priority: 0, application, length: 0, payload: () };
        self.planner.handle_submit(self.now, MODEL, task);
    }

    /// A batch takes the GPU, and runs to its end.
    fn run_batch(&mut self) {
        self.planner.handle_timeout(self.now);
        let (mut execution, mut executed, mut ran) = (Span::from_millis(1), None, Vec::new());
        while let Some(output) = self.planner.poll_output() {
            match output {
                PlannerOutput::Batch(batch) => {
                    self.planned += batch.tasks.len() as u64;
                    execution = batch.execution;
                    // One request in eight is run again alone, and all batches tell of c0 and c1.
                    let tasks: Vec<_> = batch.tasks.iter().map(|(key, _)| (key.application, key.length)).collect();
                    let samples = batch.tasks.iter().filter(|(key, _)| key.id.0.is_multiple_of(8));
                    ran.extend(samples.map(|(key, _)| (key.application, key.length, number(key.id.0))));
                    executed = Some((tasks, execution));
                }
                PlannerOutput::Dropped { .. } => self.dropped += 1,
                _ => unreachable!("neither is memory short, nor is a batch taken back"),
            }
        }
        self.now += execution;
        self.planner.handle_finished(GPU, self.now);
        if let Some((tasks, took)) = executed {
            self.planner.handle_executed(self.now, MODEL, GPU, &tasks, took);
        }
        for (application, length, number) in ran {
            self.planner.handle_alone(self.now, MODEL, (application, length), alone(application, number));
        }
    }

    /// Named in `bench/instructions`: only what happens in here is counted.
    #[inline(never)]
    fn handle_counted_requests(&mut self, count: u64) {
        let until = self.submitted + count;
        while self.submitted < until {
            self.run_batch();
            while self.submitted - self.planned - self.dropped < self.queued && self.submitted < until {
                self.submit();
            }
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match &arguments[..] {
        [policy, queued, requests] => policy.parse().ok().zip(queued.parse().ok()).zip(requests.parse().ok()),
        _ => None,
    };
    let Some(((policy, queued), requests)) = parsed else {
        eprintln!("usage: queued_instructions POLICY QUEUED REQUESTS");
        std::process::exit(2);
    };
    let mut load = Load::new(policy, queued);
    for _ in 0..queued {
        load.submit();
    }
    let (planned, dropped) = (load.planned, load.dropped);
    load.handle_counted_requests(requests);
    let planned = load.planned - planned;
    eprintln!("{planned} of {requests} in batches, {} given up", load.dropped - dropped);
    assert!(planned * 2 >= requests, "{planned} of {requests} requests were planned");
}
