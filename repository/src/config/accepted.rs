//! Which fields of Triton's configuration are not used: those that change nothing here, with what is done instead, and
//! those without which a model would answer otherwise than under Triton. The latter are refused, each by its name.

use prost_reflect::{DynamicMessage, Value};

use crate::{
    config::file::{ConfigFile, get},
    error::RepositoryError,
    model::{ENSEMBLE, PROCESS, PYTHON},
};

/// Fields that change no answer, and what is done here instead.
const ACCEPTED: [(&str, &str); 5] = [
    ("optimization", "graphs are optimised for the machine that loads them"),
    ("runtime", "each backend has its own executors"),
    ("metric_tags", "metrics are labelled by model and version"),
    ("model_metrics", "histograms are those of docs/operations.md"),
    ("model_transaction_policy", "every request has one answer"),
];
/// The same of models that no program runs, whose processes it counts.
const ACCEPTED_OF_FILES: [(&str, &str); 1] = [("instance_group", "each backend says which GPUs host a model")];
/// The same of ensembles.
const ACCEPTED_OF_ENSEMBLES: [(&str, &str); 1] = [("model_warmup", "its members are warmed up, each by its own")];
/// The same of `dynamic_batching`.
const ACCEPTED_OF_BATCHING: [(&str, &str); 3] = [
    ("preferred_batch_size", "objective and latency profile decide how batches form"),
    ("max_queue_delay_microseconds", "objective and latency profile decide how batches form"),
    ("preserve_ordering", "an answer leaves when it is there"),
];
/// Fields whose models are refused, and why.
const REFUSED: [(&str, &str); 4] = [
    ("sequence_batching", "the requests of a sequence would not be kept together"),
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
        self.check_ensemble()?;
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
        self.unused().iter().for_each(|(key, instead)| self.note(key, instead));
        Ok(())
    }

    /// The fields that are set and change nothing, and what is done instead.
    fn unused(&self) -> Vec<(String, &'static str)> {
        let of_files = ACCEPTED_OF_FILES.into_iter().filter(|_| !self.is_of_program());
        let all = of_files.chain(ACCEPTED).filter(|(key, _)| self.message.has_field_by_name(key));
        let batching = get(&self.message, "dynamic_batching");
        let batching = batching.as_message().expect("the schema says message");
        let of_batching = ACCEPTED_OF_BATCHING.into_iter().filter(|(key, _)| batching.has_field_by_name(key));
        let of_ensembles = ACCEPTED_OF_ENSEMBLES.into_iter().filter(|_| self.executor_name() == ENSEMBLE);
        let of_ensembles = of_ensembles.filter(|(key, _)| self.message.has_field_by_name(key));
        let all = all.chain(of_ensembles).map(|(key, instead)| (key.to_owned(), instead));
        all.chain(of_batching.map(|(key, instead)| (format!("dynamic_batching.{key}"), instead))).collect()
    }

    /// Whether a program runs it, in all versions as far as nothing says so.
    fn is_of_program(&self) -> bool {
        match self.executor_name().as_str() {
            "" => self.version_folders().is_ok_and(|versions| {
                !versions.is_empty() && versions.iter().all(|version| self.is_python_in(&version.to_string()))
            }),
            name => [PYTHON, PROCESS].contains(&name),
        }
    }

    pub(super) fn note(&self, key: &str, instead: &str) {
        tracing::info!("{}: {key} changes nothing: {instead}", self.path.display());
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::config::file::parse;

    /// The keys that are said to change nothing in a model that has such a file.
    fn unused(config: &str, file: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("1")).unwrap();
        fs::write(folder.path().join("1").join(file), "").unwrap();
        let (message, path) = (parse(config).unwrap(), PathBuf::from("config.pbtxt"));
        let file = ConfigFile::new(folder.path(), path, message, true);
        file.unused().into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn instances_are_said_to_change_nothing_only_where_they_do() {
        let of = |start: &str, file| {
            unused(
                &format!("{start} instance_group {{ count: 2 }} dynamic_batching {{ preserve_ordering: true }}"),
                file,
            )
        };
        let ordering = "dynamic_batching.preserve_ordering";
        for (start, file) in
            [("backend: 'onnxruntime'", "model.onnx"), ("", "model.onnx"), ("backend: 'emulated'", "x")]
        {
            assert_eq!(of(start, file), ["instance_group", ordering], "{start} {file}");
        }
        for (start, file) in [("backend: 'python'", "a.py"), ("backend: 'process'", "model"), ("", "model.py")] {
            assert_eq!(of(start, file), [ordering], "{start} {file}");
        }
    }
}
