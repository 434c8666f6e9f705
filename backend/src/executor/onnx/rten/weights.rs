//! Weights in files beside a model's own, where rten does not find them and ONNX Runtime does. Beside a file that is a
//! link, as caches of models have them, rten looks beside what that stands for. It wants an offset, a length and a name
//! of a certain kind of each tensor; ONNX wants the file's name, and takes as many bytes as the tensor has.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Component, Path},
};

use repository::onnx::{
    self, datatype,
    proto::{GraphProto, StringStringEntryProto, TensorProto},
};
use rten::{LoadError, Model, ModelOptions};

/// `TensorProto.DataLocation`.
const EXTERNAL: i32 = 1;

/// Reads a file and what it names beside it.
///
/// # Errors
/// If that cannot be read, or not be run.
pub(super) fn load(options: &mut ModelOptions, file: &Path) -> io::Result<Result<Model, LoadError>> {
    let is_link = fs::symlink_metadata(file)?.is_symlink();
    let mut read = onnx::read(file).map_err(io::Error::other)?;
    let mut tensors = Vec::new();
    read.graph.iter_mut().for_each(|graph| all_external(graph, &mut tensors));
    if tensors.is_empty() || !is_link && tensors.iter().all(|tensor| is_as_rten_has_it(tensor)) {
        return Ok(options.load_file(file));
    }
    let mut names = BTreeSet::new();
    for tensor in tensors {
        names.extend(complete(tensor));
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    for name in names {
        let weights = fs::read(folder.join(&name));
        let weights = weights.map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
        options.external_data(&rten_name(&name), weights);
    }
    Ok(options.load(onnx::encode(&read)))
}

/// The tensors of a graph, and of those within, whose elements are elsewhere.
fn all_external<'a>(graph: &'a mut GraphProto, found: &mut Vec<&'a mut TensorProto>) {
    let is_external = |tensor: &&mut TensorProto| tensor.data_location == EXTERNAL;
    for attribute in graph.node.iter_mut().flat_map(|node| &mut node.attribute) {
        found.extend(attribute.t.as_mut().filter(is_external));
        attribute.g.iter_mut().for_each(|graph| all_external(graph, found));
    }
    found.extend(graph.initializer.iter_mut().filter(is_external));
}

fn entry<'a>(tensor: &'a TensorProto, key: &str) -> Option<&'a str> {
    tensor.external_data.iter().find(|entry| entry.key == key).map(|entry| &*entry.value)
}

fn is_as_rten_has_it(tensor: &TensorProto) -> bool {
    let extension = |name| Path::new(name).extension()?.to_str();
    let is_named = |name: &str| ["data", "onnx_data"].iter().any(|prefix| name.starts_with(prefix));
    let is_known =
        |entry: &StringStringEntryProto| ["location", "offset", "length", "checksum"].contains(&entry.key.as_str());
    entry(tensor, "location").and_then(extension).is_some_and(is_named)
        && ["offset", "length"].iter().all(|key| entry(tensor, key).is_some())
        && tensor.external_data.iter().all(is_known)
}

/// Says of a tensor's elements what rten wants to know; yields the file that they are in, if it is beside the model's.
fn complete(tensor: &mut TensorProto) -> Option<String> {
    let name = entry(tensor, "location").filter(|name| is_beside(name))?.to_owned();
    let offset = entry(tensor, "offset").unwrap_or("0").to_owned();
    let length = match entry(tensor, "length") {
        Some(length) => length.to_owned(),
        None => bytes(tensor)?.to_string(),
    };
    let pairs = [("location", rten_name(&name)), ("offset", offset), ("length", length)];
    let entries = pairs.map(|(key, value)| StringStringEntryProto { key: key.to_owned(), value });
    tensor.external_data = entries.into();
    Some(name)
}

/// Bytes of a tensor's elements.
fn bytes(tensor: &TensorProto) -> Option<usize> {
    let element = datatype(tensor.data_type)?.bytes();
    let mut lengths = tensor.dims.iter().map(|&length| usize::try_from(length).ok());
    lengths.try_fold(element, |bytes, length| bytes.checked_mul(length?))
}

/// It takes no others.
fn rten_name(name: &str) -> String {
    format!("{name}.data")
}

fn is_beside(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}
