//! The models that a simulated fabric serves: emulated ones, whose outputs are digests of their inputs, so that an
//! input or output that is not the task's own is seen.

use std::sync::Arc;

use backend::{
    executor::{Basis, Emulated, Loaded},
    staging::ModelShape,
};
use proto::{BatchCost, LatencyProfile, Span, Weights};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::{
    DataType, Executor, Model, Priorities, Tensor,
    emulated::{OUTPUT, OUTPUT_ELEMENTS},
};

/// What each model is called, and the bytes of one task's input; at least two, and of each model another number.
pub(super) const MODELS: [(&str, usize); 2] = [("small", 64), ("large", 200)];
/// What every model takes, where memory is short.
pub(super) const WEIGHTS: Weights = Weights { pages: 2, load: Span::from_millis(4), read: Span::from_millis(6) };
/// Pages of each GPU there: for one model, and half of another.
pub(super) const MEMORY_PAGES: u32 = 3;
/// The largest batch of every model.
const BATCH_MAX: usize = 8;

/// What a batch of a dynamic model costs.
const COST: BatchCost = BatchCost { fixed: Span::from_millis(2), per_task_ppm: 500_000 };
/// The mean work of tasks in microseconds, by the workload that their clients name; each has a quarter more or less.
const WORK_MICROS: [i64; APPLICATIONS as usize] = [500, 1_000, 2_000, 5_000];
/// Workloads that clients name; the first has no name.
pub(super) const APPLICATIONS: u8 = 4;

/// The dynamic models of a world: the last so many of [`MODELS`]. The others are static, on the same GPUs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Dynamic(usize);

impl Dynamic {
    /// Half of the worlds have none, with randomness of its own: the others stay what they were.
    pub(super) fn draw(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(!seed).random_range(0..2 * MODELS.len()).saturating_sub(MODELS.len() - 1))
    }

    fn models(self) -> &'static [(&'static str, usize)] {
        &MODELS[MODELS.len() - self.0..]
    }

    /// Whether batches of this model take what their tasks do.
    fn has(self, name: &str) -> bool {
        self.models().iter().any(|(known, _)| *known == name)
    }

    /// What is to be done for the task with this input, which begins with its workload, if its model is dynamic.
    pub(super) fn mark(self, name: &str, input: &mut [u8], workload: u8) {
        if self.has(name) {
            input[0] = workload;
        }
    }

    /// How long a batch of tasks with these inputs takes, of so many bytes each, if their model is dynamic.
    pub(super) fn takes(self, inputs: &[u8], input_bytes: usize) -> Option<Span> {
        self.models().iter().find(|(_, bytes)| *bytes == input_bytes)?;
        let work = |input: &[u8]| {
            let mean = WORK_MICROS[usize::from(input[0] % APPLICATIONS)];
            Span::from_micros(mean * (750 + 2 * i64::from(input[1])) / 1000)
        };
        let longest = inputs.chunks(input_bytes).map(work).max()?;
        let others = (inputs.len() / input_bytes - 1) as i64 * i64::from(COST.per_task_ppm);
        let millionths = i64::from(BatchCost::PER_TASK_MAX) + others;
        Some(COST.fixed + Span(longest.as_nanos() * millionths / i64::from(BatchCost::PER_TASK_MAX)))
    }
}

/// The versions that are served while this is the newest: it, and the one before.
pub(super) fn served(newest: u32) -> impl Iterator<Item = u32> {
    newest.saturating_sub(1).max(1)..=newest
}

/// A model as the repository holds it in this version.
pub(super) fn model(name: &str, version: u32) -> Model {
    let &(_, input_bytes) = MODELS.iter().find(|(known, _)| *known == name).expect("the repository has two models");
    let tensor = |name: &str, datatype, elements| Tensor::new(name, datatype, vec![elements]);
    Model {
        name: name.into(),
        version: version.to_string(),
        inputs: vec![tensor("x", DataType::Uint8, input_bytes)],
        outputs: vec![tensor(OUTPUT, DataType::Uint64, OUTPUT_ELEMENTS)],
        max_batch: BATCH_MAX,
        rows_max: BATCH_MAX,
        is_batched: true,
        slo: Span::from_millis(50),
        priorities: Priorities::default(),
        queue: repository::QueuePolicies::default(),
        weights: repository::WeightsSize::default(),
        executor: Executor::Emulated { profile: profile() },
        labels: vec![],
        image: None,
        configuration: repository::Configuration::default(),
        files: None,
    }
}

/// The same, as a backend has it ready on all of its GPUs.
pub(super) fn loaded(dynamic: Dynamic, name: &str, version: u32, gpus: u32) -> Loaded {
    let model = model(name, version);
    let executor = Arc::new(Emulated::new(&model, profile()));
    let shape = ModelShape::from(&model);
    Loaded {
        model,
        shape,
        gpu_indexes: (0..gpus).collect(),
        executor,
        profile: in_turn(),
        cost: dynamic.has(name).then_some(COST),
        basis: Basis::One,
        weights: WEIGHTS,
        is_pinned: false,
        is_guest: false,
    }
}

/// l(b) as it is offered before it is measured.
fn in_turn() -> LatencyProfile {
    let table = (1..=BATCH_MAX as i64).map(|batch| profile().latency(1) * batch).collect();
    LatencyProfile::from_table(table).expect("l(b) grows")
}

/// l(b) as it is measured then.
pub(super) fn profile() -> LatencyProfile {
    LatencyProfile::linear(0.5, 3.0, BATCH_MAX).expect("l(b) grows")
}
