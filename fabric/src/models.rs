//! The models that a simulated fabric serves: emulated ones, whose outputs are digests of their inputs, so that an
//! input or output that is not the task's own is seen.

use std::sync::Arc;

use backend::{executor::Emulated, loaded::Loaded, staging::ModelShape};
use proto::{LatencyProfile, Span, Weights};
use repository::{
    DataType, Executor, Model, Priorities, Tensor,
    emulated::{OUTPUT, OUTPUT_ELEMENTS},
};

/// What each model is called, and the bytes of one task's input.
pub(super) const MODELS: [(&str, usize); 2] = [("small", 64), ("large", 200)];
/// What every model takes, where memory is short.
pub(super) const WEIGHTS: Weights = Weights { pages: 2, load: Span::from_millis(4), read: Span::from_millis(6) };
/// Pages of each GPU there: for one model, and half of another.
pub(super) const MEMORY_PAGES: u32 = 3;
/// The largest batch of every model.
const BATCH_MAX: usize = 8;

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
pub(super) fn loaded(name: &str, version: u32, gpus: u32) -> Loaded {
    let model = model(name, version);
    let executor = Arc::new(Emulated::new(&model, profile()));
    let shape = ModelShape::from(&model);
    Loaded {
        model,
        shape,
        gpu_indexes: (0..gpus).collect(),
        executor,
        profile: profile(),
        cost: None,
        weights: WEIGHTS,
        is_pinned: false,
    }
}

fn profile() -> LatencyProfile {
    LatencyProfile::linear(0.5, 3.0, BATCH_MAX).expect("l(b) grows")
}
