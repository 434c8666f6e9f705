//! Models for tests of what needs no process.

use proto::Span;
use repository::{Configuration, Executor, Launch, Model, Priorities, Program, ProgramLimits, Tensor, WeightsSize};

/// A model with these tensors.
pub(super) fn model(inputs: Vec<Tensor>, outputs: Vec<Tensor>, max_batch: usize) -> Model {
    let limits = ProgramLimits {
        memory_bytes: 1 << 32,
        files: 64,
        processes: 16,
        network: false,
        start: Span::from_millis(10_000),
    };
    let launch = Launch::Program(vec!["none".into()]);
    let program = Program { launch, folder: ".".into(), instances: 1, limits, calls: false, samples: true };
    Model {
        name: "model".into(),
        version: "1".into(),
        inputs,
        outputs,
        max_batch,
        rows_max: max_batch,
        is_batched: true,
        slo: Span::from_millis(100),
        priorities: Priorities::default(),
        queue: repository::QueuePolicies::default(),
        weights: WeightsSize::default(),
        executor: Executor::Process { program, profile: None },
        labels: vec![],
        image: None,
        configuration: Configuration::default(),
        files: None,
    }
}
