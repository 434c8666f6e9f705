//! The demo's models, as part of the binary: `demo` and `up` serve them wherever they run, without a source tree.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// What is read of a file of `models`, and its place there.
macro_rules! files {
    ($($path:literal),* $(,)?) => { [$(($path, include_bytes!(concat!("../../models/", $path)))),*] };
}

/// The repository's files, but for how its real model was made.
const FILES: [(&str, &[u8]); 8] = files![
    "digits/1/model.onnx",
    "digits/config.pbtxt",
    "digits/heldout.csv",
    "digits/labels.txt",
    "digits/seven.json",
    "digits/seven.png",
    "inception_resnet_v2/config.pbtxt",
    "resnet50/config.pbtxt",
];

/// Writes the repository into a folder of `folder`, and yields that.
pub(super) fn write(folder: &Path) -> Result<PathBuf> {
    let repository = folder.join("models");
    for (path, bytes) in FILES {
        let path = repository.join(path);
        let parent = path.parent().expect("it is in a model's folder");
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&path, bytes))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(repository)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model that is added to the folder must come along.
    #[test]
    fn what_is_written_is_what_the_source_tree_serves() {
        let folder = tempfile::tempdir().unwrap();
        let written = repository::load(&write(folder.path()).unwrap()).unwrap().whole().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
        let source = repository::load(&source).unwrap().whole().unwrap();
        let shapes = |models: Vec<repository::Model>| -> Vec<_> {
            models.into_iter().map(|model| (model.name, model.version, model.inputs, model.outputs)).collect()
        };
        assert_eq!(shapes(written), shapes(source));
    }
}
