//! Models that several tests share.

use proto::{LatencyProfile, Span};
use repository::{DataType, Executor, Model, Priorities, Tensor};

pub(crate) fn tensor(name: &str, datatype: DataType, shape: &[usize]) -> Tensor {
    Tensor::new(name, datatype, shape.to_vec())
}

pub(crate) fn model(name: &str, inputs: Vec<Tensor>, outputs: Vec<Tensor>) -> Model {
    let profile = LatencyProfile::linear(1.0, 4.0, 8).unwrap();
    Model {
        name: name.to_owned(),
        version: "1".to_owned(),
        inputs,
        outputs,
        max_batch: 8,
        rows_max: 8,
        is_batched: true,
        slo: Span::from_millis(25),
        priorities: Priorities { levels: 3, default: 2 },
        queue: repository::QueuePolicies::default(),
        weights: repository::WeightsSize::default(),
        executor: Executor::Emulated { profile },
        labels: Vec::new(),
        image: None,
        configuration: repository::Configuration::default(),
        files: None,
    }
}
