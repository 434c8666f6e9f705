//! Whether this host's NVIDIA GPUs are used, and what would use them, in one line.

use std::{fs, path::Path};

use backend::config::onnxruntime::Provider;
use repository::{Executor, Model, Processor};

use super::{BackendLayout, Layout};

/// Where NVIDIA's driver tells of its GPUs, whatever this build can do with them.
const DRIVER: &str = "/proc/driver/nvidia/gpus";
const PROGRAMS: &str = "programs of models, if they do";

/// How many this host has, and what needs one for each GPU of a backend; `None` if nothing that is known of does.
pub(super) fn needed(layout: &Layout, models: &[Model]) -> Option<(usize, &'static str)> {
    let user = users(layout, models).into_iter().find(|user| *user != PROGRAMS)?;
    Some((here(), user))
}

fn here() -> usize {
    fs::read_dir(Path::new(DRIVER)).map_or(0, Iterator::count)
}

/// This host's; `None` where there is no GPU, and no model asks for one.
pub(super) fn line(layout: &Layout, models: &[Model]) -> Option<String> {
    line_of(here(), layout, models)
}

fn line_of(gpus: usize, layout: &Layout, models: &[Model]) -> Option<String> {
    let mut asking: Vec<&str> =
        models.iter().filter(|model| model.configuration.names_gpus()).map(|m| &*m.name).collect();
    asking.dedup();
    let asking = match asking.is_empty() {
        true => String::new(),
        false => format!("; KIND_GPU of {} changes nothing of that", asking.join(", ")),
    };
    let users = users(layout, models);
    match (gpus, users.is_empty()) {
        (0, _) if asking.is_empty() => None,
        (0, _) => Some(format!("GPUs: none here{asking}")),
        (_, false) => Some(format!("GPUs: {gpus} here, used by {}{asking}", users.join(" and "))),
        (_, true) => Some(format!(
            "GPUs: {gpus} here, and none is used; what would use them: executor = \"cuda\" (a build with the feature \
             cuda), onnxruntime.provider = \"cuda\" (PyPI's onnxruntime-gpu), or a model in Python{asking}"
        )),
    }
}

fn users(layout: &Layout, models: &[Model]) -> Vec<&'static str> {
    let wants = |processor| {
        let is_wanted = |model: &Model| match model.executor {
            Executor::Onnx { wanted, .. } => wanted.processor == Some(processor),
            Executor::Emulated { .. } | Executor::Process { .. } | Executor::Ensemble(_) => false,
        };
        models.iter().any(is_wanted)
    };
    let by_plans = |backend: &BackendLayout| backend.executor == Processor::Cuda;
    let by_runtime = |backend: &BackendLayout| {
        let runs = [Processor::Auto, Processor::Onnxruntime].contains(&backend.executor);
        backend.onnxruntime.provider == Provider::Cuda && (runs || wants(Processor::Onnxruntime))
    };
    let is_program = |model: &Model| matches!(model.executor, Executor::Process { .. });
    let used = [
        ("plans for GPUs", wants(Processor::Cuda) || layout.backend.iter().any(by_plans)),
        ("ONNX Runtime", layout.backend.iter().any(by_runtime)),
        (PROGRAMS, models.iter().any(is_program)),
    ];
    used.into_iter().filter(|(_, is_used)| *is_used).map(|(user, _)| user).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_uses_gpus_is_told_where_there_are_some_or_a_model_asks_for_them() {
        let folder = tempfile::tempdir().unwrap();
        let model = |more: &str| {
            let config = format!(
                r#"backend: "emulated" {more} max_batch_size: 8
                   input {{ name: "x" data_type: TYPE_UINT8 dims: 4 }}
                   output {{ name: "digest" data_type: TYPE_UINT64 dims: 2 }}
                   parameters {{ key: "alpha_ms" value {{ string_value: "1" }} }}
                   parameters {{ key: "beta_ms" value {{ string_value: "1" }} }}"#
            );
            fs::create_dir_all(folder.path().join("m/1")).unwrap();
            fs::write(folder.path().join("m/config.pbtxt"), config).unwrap();
            repository::load_model(&folder.path().join("m")).unwrap()
        };
        let plain = [model("")];
        let mut layout = Layout { backend: vec![BackendLayout::new(1, Vec::new())], ..Layout::default() };
        assert_eq!(line_of(0, &layout, &plain), None);
        let unused = line_of(2, &layout, &plain).unwrap();
        assert!(
            unused.starts_with("GPUs: 2 here, and none is used; what would use them: executor = \"cuda\""),
            "{unused}"
        );
        let asking = [model("instance_group { kind: KIND_GPU }")];
        assert_eq!(line_of(0, &layout, &asking).unwrap(), "GPUs: none here; KIND_GPU of m changes nothing of that");
        assert_eq!(line_of(0, &layout, &[model("instance_group { kind: KIND_CPU }")]), None);
        layout.backend[0].onnxruntime.provider = Provider::Cuda;
        assert_eq!(line_of(1, &layout, &plain).unwrap(), "GPUs: 1 here, used by ONNX Runtime");
        layout.backend[0].executor = Processor::Cuda;
        assert_eq!(line_of(1, &layout, &plain).unwrap(), "GPUs: 1 here, used by plans for GPUs");
    }
}
