//! What rten lacks and does not say so, or computes otherwise than ONNX has it. Such files are refused by name. Whether
//! that is all there is to refuse is what `tests/onnx/run` finds out.

use repository::onnx::{
    datatype,
    proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto},
};

use super::values::{ELSE, EMBEDDED, TYPES};
use crate::error::ExecutorError;

/// `TensorProto.DataType`.
const INT64: i32 = 7;

/// # Errors
/// The first thing that is not computed as the file says.
pub(super) fn check(file: &ModelProto) -> Result<(), ExecutorError> {
    let mut graphs = Vec::new();
    file.graph.iter().for_each(|graph| all_graphs(graph, &mut graphs));
    let nodes: Vec<&NodeProto> = graphs.iter().flat_map(|graph| &graph.node).collect();
    let mut weights: Vec<(&str, &TensorProto)> =
        graphs.iter().flat_map(|graph| &graph.initializer).map(|tensor| (&*tensor.name, tensor)).collect();
    for node in &nodes {
        let name = node.output.first().map_or("", String::as_str);
        let constants = node.attribute.iter().filter_map(|attribute| attribute.t.as_ref());
        weights.extend(constants.map(|tensor| (name, tensor)));
    }
    let reason = nodes
        .iter()
        .find_map(|node| {
            otherwise(node, &weights).map(|reason| format!("{} ({}): {reason}", node.op_type, name_of(node)))
        })
        .or_else(|| weights.iter().find_map(|(name, tensor)| weight(name, tensor, &nodes)));
    reason.map_or(Ok(()), |reason| Err(ExecutorError(format!("{reason}; {ELSE}"))))
}

/// A graph and those within.
pub(super) fn all_graphs<'a>(graph: &'a GraphProto, found: &mut Vec<&'a GraphProto>) {
    found.push(graph);
    let within = graph.node.iter().flat_map(|node| &node.attribute).filter_map(|attribute| attribute.g.as_ref());
    within.for_each(|graph| all_graphs(graph, found));
}

fn name_of(node: &NodeProto) -> &str {
    let output = node.output.first().map_or("", String::as_str);
    if node.name.is_empty() { output } else { &node.name }
}

fn attribute<'a>(node: &'a NodeProto, name: &str) -> Option<&'a AttributeProto> {
    node.attribute.iter().find(|attribute| attribute.name == name)
}

/// What is computed otherwise of an operator, or fails when it runs.
fn otherwise(node: &NodeProto, weights: &[(&str, &TensorProto)]) -> Option<String> {
    let has_output = |at: usize| node.output.get(at).is_some_and(|name| !name.is_empty());
    let has_input = |at: usize| node.input.get(at).is_some_and(|name| !name.is_empty());
    let is = |name: &str, text: &[u8]| attribute(node, name).is_some_and(|found| found.s == text);
    let without = |name: &str| attribute(node, name).is_none();
    let reason = match node.op_type.as_str() {
        "Cast" => {
            let to = attribute(node, "to").map(|to| to.i as i32).filter(|&to| !has(to))?;
            return Some(format!("to {}, which {EMBEDDED} lacks", type_name(to)));
        }
        "Resize" if is("mode", b"cubic") => "mode is cubic, which comes out otherwise",
        "Resize"
            if is("coordinate_transformation_mode", b"align_corners")
                && has_input(2)
                && !is_whole(&node.input[2], weights) =>
        {
            "corners are aligned, and scales may be no whole numbers"
        }
        "NonMaxSuppression" => "boxes whose corners are swapped come out otherwise",
        "Sign" => "0 has the sign 1",
        "Dropout" if has_input(2) => "training is for others",
        "RandomNormal" | "RandomNormalLike" | "RandomUniform" | "RandomUniformLike" | "Multinomial" | "Bernoulli" => {
            "rows of a batch would share their random numbers"
        }
        "MaxPool" if has_output(1) => "indices are not given",
        "AveragePool" | "MaxPool" | "ConvInteger" | "ConvTranspose" if without("strides") => "strides are not noted",
        // Of how many there are it knows from the kernel's lengths, and from nothing else.
        "Conv" if without("kernel_shape") && (without("strides") || without("dilations")) => {
            "kernel_shape is not noted, nor strides and dilations"
        }
        "ConvTranspose" if without("dilations") => "dilations are not noted",
        "ConvTranspose" if without("pads") && without("auto_pad") => "pads are not noted",
        "LayerNormalization" if has_output(1) || has_output(2) => "means and deviations are not given",
        "Pad" if has_input(3) => "axes are not taken",
        "GRU" if attribute(node, "linear_before_reset").is_none_or(|found| found.i == 0) => "linear_before_reset is 0",
        operator if operator.contains("Sequence") && operator != "ReverseSequence" => "sequences are not taken",
        _ => return None,
    };
    Some(format!("{reason}, in {EMBEDDED}"))
}

/// Whether all numbers of a constant are whole.
fn is_whole(name: &str, weights: &[(&str, &TensorProto)]) -> bool {
    weights.iter().find(|(found, _)| *found == name).is_some_and(|(_, tensor)| {
        let raw = tensor.raw_data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        tensor.data_location == 0 && raw.chain(tensor.float_data.iter().copied()).all(|number| number.fract() == 0.0)
    })
}

fn has(elem_type: i32) -> bool {
    datatype(elem_type).is_some_and(|datatype| TYPES.contains(&datatype))
}

/// Why a constant would not be what the file says: its type, or a number that its own type has here no room for.
fn weight(name: &str, tensor: &TensorProto, nodes: &[&NodeProto]) -> Option<String> {
    if !has(tensor.data_type) {
        return Some(format!("{name} is {}, which {EMBEDDED} lacks", type_name(tensor.data_type)));
    }
    if tensor.data_type != INT64 {
        return None;
    }
    let raw = tensor.raw_data.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
    let beyond = raw.chain(tensor.int64_data.iter().copied()).find(|&number| i32::try_from(number).is_err())?;
    // What is beyond a tensor is its end.
    let is_bound = |node: &&&NodeProto| node.op_type == "Slice" && node.input.first().is_some_and(|of| of != name);
    let mut users = nodes.iter().filter(|node| node.input.iter().any(|input| input == name));
    let is_sliced_by = users.clone().next().is_some() && users.all(|node| is_bound(&node));
    (!is_sliced_by).then(|| format!("{name} has {beyond}, and {EMBEDDED} computes INT64 in 32 bits"))
}

/// As clients or onnx.proto have it.
fn type_name(elem_type: i32) -> String {
    datatype(elem_type).map_or_else(|| format!("of ONNX's type {elem_type}"), |datatype| datatype.name().to_owned())
}
