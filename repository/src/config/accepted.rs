//! Which fields of Triton's configuration are not used: those that change nothing here, with what is done instead, and
//! those without which a model would answer otherwise than under Triton. The latter are refused, each by its name.

use prost_reflect::{DynamicMessage, Value};

use super::{ConfigFile, get};
use crate::RepositoryError;

/// Fields that change no answer, and what is done here instead.
const ACCEPTED: [(&str, &str); 7] = [
    ("instance_group", "each backend says which GPUs host a model"),
    ("optimization", "graphs are optimised for the machine that loads them"),
    ("runtime", "each backend has its own executors"),
    ("metric_tags", "metrics are labelled by model and version"),
    ("model_metrics", "histograms are those of docs/operations.md"),
    ("response_cache", "every request is executed"),
    ("model_transaction_policy", "every request has one answer"),
];
/// The same of `dynamic_batching`.
const ACCEPTED_OF_BATCHING: [(&str, &str); 3] = [
    ("preferred_batch_size", "objective and latency profile decide how batches form"),
    ("max_queue_delay_microseconds", "objective and latency profile decide how batches form"),
    ("preserve_ordering", "an answer leaves when it is there"),
];
/// Fields whose models are refused, and why.
const REFUSED: [(&str, &str); 5] = [
    ("sequence_batching", "the requests of a sequence would not be kept together"),
    ("ensemble_scheduling", "models are not run one after another here"),
    ("cc_model_filenames", "one file serves all processors: default_model_filename"),
    ("model_operations", "no libraries are loaded"),
    ("model_repository_agents", "no agents change the files"),
];
/// The same of an input or output.
const REFUSED_OF_TENSORS: [(&str, &str); 2] = [
    ("is_shape_tensor", "no executor here takes shapes as tensors"),
    ("is_non_linear_format_io", "elements are in row-major order"),
];

impl ConfigFile<'_> {
    /// Refuses what would change answers, and says in one line each what becomes of the rest that is not used.
    pub(super) fn check_fields(&self) -> Result<(), RepositoryError> {
        let refuse = |key: &str, why: &str| Err(self.error(key, "it", format_args!("none: {why}")));
        let is_set = |message: &DynamicMessage, key: &str| message.has_field_by_name(key);
        if let Some((key, why)) = REFUSED.into_iter().find(|(key, _)| is_set(&self.message, key)) {
            return refuse(key, why);
        }
        for kind in ["input", "output"] {
            let tensors = get(&self.message, kind);
            let tensors = tensors.as_list().unwrap_or_default().iter().filter_map(Value::as_message);
            for (index, tensor) in tensors.enumerate() {
                let refused = REFUSED_OF_TENSORS
                    .into_iter()
                    .find(|(key, _)| tensor.get_field_by_name(key).is_some_and(|value| value.as_bool() == Some(true)));
                if let Some((key, why)) = refused {
                    return refuse(&format!("{kind}[{index}].{key}"), why);
                }
            }
        }
        let transactions = get(&self.message, "model_transaction_policy");
        if get(transactions.as_message().expect("the schema says message"), "decoupled").as_bool() == Some(true) {
            return refuse("model_transaction_policy.decoupled", "every request has one answer");
        }
        for (key, instead) in ACCEPTED.into_iter().filter(|(key, _)| is_set(&self.message, key)) {
            self.note(key, instead);
        }
        let batching = get(&self.message, "dynamic_batching");
        let batching = batching.as_message().expect("the schema says message");
        for (key, instead) in ACCEPTED_OF_BATCHING.into_iter().filter(|(key, _)| is_set(batching, key)) {
            self.note(&format!("dynamic_batching.{key}"), instead);
        }
        Ok(())
    }

    pub(super) fn note(&self, key: &str, instead: &str) {
        tracing::info!("{}: {key} changes nothing: {instead}", self.path.display());
    }
}
