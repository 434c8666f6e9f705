//! What people put into a version's folder that is no ONNX file, and the call that makes one of it.

use std::{fs, path::Path};

/// What files end in, and what exports them.
const EXPORTS: [(&[&str], &str); 4] = [
    (&["pt", "pth", "ckpt"], "torch.onnx.export(model, (example,), \"model.onnx\", dynamo=True)"),
    (&["safetensors", "bin"], "optimum-cli export onnx --model FOLDER OUT"),
    (&["pkl", "pickle", "joblib"], "skl2onnx.to_onnx(model, example[:1]).SerializeToString()"),
    (
        &["json", "ubj", "txt"],
        "onnxmltools.convert_xgboost(model, initial_types=[(\"input\", FloatTensorType([None, FEATURES]))]), or \
         convert_lightgbm",
    ),
];

/// Names the first such file of a folder, in the order of the table.
pub(super) fn advice(folder: &Path) -> Option<String> {
    let entries =
        fs::read_dir(folder).ok()?.filter_map(Result::ok).filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = entries.take(FILES_LOOKED_AT).collect();
    names.sort_unstable();
    EXPORTS.iter().find_map(|(ends, export)| {
        let is_one = |name: &&String| name.rsplit_once('.').is_some_and(|(_, end)| ends.contains(&end));
        let name = names.iter().find(is_one)?;
        Some(format!("found {name}, of which `{export}` makes one"))
    })
}

/// Of a folder with more, some are not looked at.
const FILES_LOOKED_AT: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exports_a_file_is_told_by_its_end() {
        let with = |names: &[&str]| {
            let folder = tempfile::tempdir().unwrap();
            names.iter().for_each(|name| fs::write(folder.path().join(name), "").unwrap());
            advice(folder.path())
        };
        for (name, export) in [
            ("model.pt", "torch.onnx.export"),
            ("model.safetensors", "optimum-cli export onnx"),
            ("forest.pkl", "skl2onnx.to_onnx"),
            ("forest.joblib", "skl2onnx.to_onnx"),
            ("model.json", "onnxmltools.convert_xgboost"),
        ] {
            let told = with(&["config.yaml", name]).unwrap();
            assert!(told.starts_with(&format!("found {name}, of which `{export}")), "{told}");
        }
        assert!(with(&["config.json", "model.pt"]).unwrap().contains("model.pt"), "weights come first");
        assert_eq!((with(&["model.plan", "pt"]), advice(Path::new("/nowhere"))), (None, None));
    }
}
