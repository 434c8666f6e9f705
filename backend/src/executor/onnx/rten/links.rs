//! A file that is a link, as caches of models have them: its weights are beside the link, and rten looks beside what
//! that stands for.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Component, Path},
};

use repository::onnx::proto::{GraphProto, ModelProto, TensorProto};
use rten::{LoadError, Model, ModelOptions};

use super::check::all_graphs;

/// Reads a file and what it names beside it.
///
/// # Errors
/// If that cannot be read, or not be run.
pub(super) fn load(options: &mut ModelOptions, file: &Path) -> io::Result<Result<Model, LoadError>> {
    if !fs::symlink_metadata(file)?.is_symlink() {
        return Ok(options.load_file(file));
    }
    let graph = repository::onnx::read(file).map_err(io::Error::other)?;
    let folder = file.parent().unwrap_or(Path::new("."));
    for name in names(&graph) {
        options.external_data(&name, fs::read(folder.join(&name))?);
    }
    Ok(options.load(fs::read(file)?))
}

/// Files that hold weights, which are beside it.
fn names(file: &ModelProto) -> BTreeSet<String> {
    let mut graphs: Vec<&GraphProto> = Vec::new();
    file.graph.iter().for_each(|graph| all_graphs(graph, &mut graphs));
    let constants = graphs.iter().flat_map(|graph| &graph.node).flat_map(|node| &node.attribute);
    let constants = constants.filter_map(|attribute| attribute.t.as_ref());
    let tensors = graphs.iter().flat_map(|graph| &graph.initializer).chain(constants);
    tensors.filter_map(location).filter(|name| is_beside(name)).map(str::to_owned).collect()
}

fn location(tensor: &TensorProto) -> Option<&str> {
    let entry = tensor.external_data.iter().find(|entry| entry.key == "location")?;
    Some(&entry.value)
}

fn is_beside(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}
