//! tract as the front end of plans for GPUs: it reads a file, and finds out which shapes follow from those of the
//! inputs. Of a model whose batch is a symbol there is one graph for all sizes; where tract cannot compute a file's
//! shapes with a symbol there is one for each size.

use lowering::{Lowered, Lowering};
use repository::{
    DataType, Model, Precision,
    onnx::{self, proto::NodeProto},
};
use tract_onnx::{
    prelude::*,
    tract_core::{internal::DimLike as _, ops::cast::Cast},
    tract_hir::infer::Factoid,
};

use super::{Forms, rungs::Rungs};
use crate::{
    error::ExecutorError,
    executor::onnx::{
        Groups, Source,
        binding::{self, BATCH, Binding, Difference, Fact, Port},
        tensor::Length,
    },
};

const ELSE: &str = "parameters: executor \"onnx\" runs it on the CPU";

/// Plans for batches of these sizes.
pub(super) fn lower(source: &Source, sizes: &[usize], precision: Precision) -> Result<(Lowered, Forms), ExecutorError> {
    let precision = match precision {
        Precision::Fp32 => lowering::plan::Precision::Fp32,
        Precision::Tf32 => lowering::plan::Precision::Tf32,
        Precision::Fp16 => lowering::plan::Precision::Fp16,
    };
    let (graph, groups) = match decluttered(source) {
        Ok(read) => read,
        Err(error) if may_have_one_size(source) => return lower_each(source, sizes, precision).unwrap_or(Err(error)),
        Err(error) => return Err(error),
    };
    let batch = source.is_batched().then(|| graph.symbols.sym(BATCH));
    if groups.binding.lengths.is_empty() {
        let lowered = lowering::lower(&graph, batch.as_ref(), sizes, precision);
        return Ok((lowered.map_err(|error| refused(source, &error))?, None));
    }
    let refused = |error: ExecutorError| source.refused(&error);
    let rungs = Rungs::of(&groups, sizes.last().copied().unwrap_or(1)).map_err(refused)?;
    let named = named_lengths(&graph, &groups.binding).map_err(refused)?;
    let mut lowering = Lowering::new(precision);
    for form in rungs.forms() {
        for &size in &form.sizes {
            let batch = batch.iter().map(|batch| (batch.clone(), size));
            let symbols: Vec<_> = batch.chain(named.iter().cloned().zip(form.lengths.iter().copied())).collect();
            lowering.add(&graph, size, &symbols).map_err(|error| {
                let lengths = &form.lengths;
                source.refused(&format_args!(
                    "executor = \"cuda\": {error}, with lengths {lengths:?}; {ELSE}, and max_dims says how long \
                     they are"
                ))
            })?;
        }
    }
    Ok((lowering.finish(), Some((groups, rungs))))
}

/// The same where there is a graph for each size alone; `None` if there is none either.
fn lower_each(
    source: &Source,
    sizes: &[usize],
    precision: lowering::plan::Precision,
) -> Option<Result<(Lowered, Forms), ExecutorError>> {
    let mut lowering = Lowering::new(precision);
    for &size in sizes {
        let graph = decluttered_for(source, size).ok()?;
        if let Err(error) = lowering.add(&graph, size, &[]) {
            return Some(Err(refused(source, &error)));
        }
    }
    Some(Ok((lowering.finish(), None)))
}

fn refused(source: &Source, error: &lowering::LowerError) -> ExecutorError {
    source.refused(&format_args!("executor = \"cuda\": {error}; {ELSE}"))
}

/// The lengths that requests choose, where the file gives each a name of its own.
fn named_lengths(graph: &TypedModel, binding: &Binding) -> Result<Vec<Symbol>, ExecutorError> {
    let named = |length: &Length| {
        graph
            .symbols
            .get(&length.to_string())
            .ok_or_else(|| ExecutorError(format!("an input's length is {length} in the file, expected a name")))
    };
    binding.lengths.iter().map(named).collect()
}

/// Whether there may be a graph for each size of batches where there is none for all: lengths that follow from a batch
/// are numbers then, which tract can compute with as the file says.
fn may_have_one_size(source: &Source) -> bool {
    source.is_batched() && !source.is_in_groups()
}

/// The graph as it is before anything is known of what runs it, checked against the configuration, and what becomes of
/// its tensors.
fn decluttered(source: &Source) -> Result<(TypedModel, Groups), ExecutorError> {
    let Source { model, batching, .. } = source;
    let refused = |cause: TractError| source.refused(&format_args!("{cause:#}"));
    let (graph, mut binding) = typed(source, None).map_err(refused)?;
    let graph = graph.into_decluttered().map_err(refused)?;
    let ports = output_ports(&graph, model).map_err(refused)?;
    binding.bind_parts(&ports, model, batching).map_err(|error| source.refused(&error))?;
    source.check_stamp()?;
    Ok((graph, Groups::new(model, batching, binding)))
}

/// The same of a model without lengths that requests choose, for batches of this size alone.
fn decluttered_for(source: &Source, batch: usize) -> Result<TypedModel, ExecutorError> {
    let refused = |cause: TractError| source.refused(&format_args!("{cause:#}"));
    let (graph, mut binding) = typed(source, Some(batch)).map_err(refused)?;
    let graph = graph.into_decluttered().map_err(refused)?;
    let ports = output_ports_for(batch, &graph, &source.model).map_err(refused)?;
    binding.bind_parts(&ports, &source.model, &source.batching).map_err(|error| source.refused(&error))?;
    source.check_stamp()?;
    Ok(graph)
}

/// Which lengths and types inputs have where a file says others than the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inputs {
    AsConfigured,
    AsInFile,
}

/// As [`typed_noted`], and what keeps a file from being computed with is said in the configuration's words where that
/// is what it says of inputs.
fn typed(source: &Source, batch: Option<usize>) -> TractResult<(TypedModel, Binding)> {
    check(source)?;
    typed_noted(source, batch, Inputs::AsConfigured).map_err(|cause| explained(source, batch, cause))
}

/// What tract computes otherwise than ONNX has it is refused by name.
fn check(source: &Source) -> TractResult<()> {
    let file = onnx::read(&source.file).map_err(TractError::new)?;
    let mut nodes = file.graph.iter().flat_map(|graph| &graph.node);
    let is_max = |node: &&NodeProto| {
        let mut attributes = node.attribute.iter();
        node.op_type == "Normalizer"
            && attributes.all(|attribute| attribute.name != "norm" || attribute.s == b"MAX"[..])
    };
    match nodes.find(is_max) {
        Some(node) => {
            Err(TractError::msg(format!("Normalizer ({}): norm is MAX, which comes out otherwise", node.name)))
        }
        None => Ok(()),
    }
}

/// Configurations may say other lengths than a file's inputs have. Those are to blame if all goes well without.
fn explained(source: &Source, batch: Option<usize>, cause: TractError) -> TractError {
    let differences = tract_onnx::onnx().model_for_path(&source.file).and_then(|graph| {
        let (_, facts) = bound(&graph, source)?;
        let found = source.model.inputs.iter().zip(&facts);
        let found = found.map(|(tensor, fact)| difference(source, &graph, tensor, fact));
        Ok(found.flatten().map(|difference| difference.text).collect::<Vec<_>>())
    });
    match differences {
        Ok(texts) if !texts.is_empty() && typed_noted(source, batch, Inputs::AsInFile).is_ok() => {
            TractError::msg(texts.join("; "))
        }
        _ => cause,
    }
}

fn bound(graph: &InferenceModel, source: &Source) -> TractResult<(Binding, Vec<Fact>)> {
    binding::bind(&input_ports(graph)?, &source.model, &source.batching).map_err(TractError::new)
}

/// What a file says of an input that is configured otherwise, but for those that are joined.
fn difference(source: &Source, graph: &InferenceModel, tensor: &repository::Tensor, fact: &Fact) -> Option<Difference> {
    let index = source.model.inputs.iter().position(|input| input.name == tensor.name)?;
    let ports = input_ports(graph).ok()?;
    let port = ports.iter().find(|port| port.name == tensor.name)?;
    let is_joined = source.batching.ragged[index];
    (!is_joined).then(|| Difference::of(port, tensor, fact, source.model.is_batched)).flatten()
}

/// Files note what exporters took shapes between operators and of outputs to be, by names of their own or before a
/// length was fixed. Where that contradicts what inputs are, inputs count: all others follow from these.
fn typed_noted(source: &Source, batch: Option<usize>, inputs: Inputs) -> TractResult<(TypedModel, Binding)> {
    typed_with(source, &tract_onnx::onnx(), batch, inputs).or_else(|contradicted| {
        let unnoted = tract_onnx::onnx().with_ignore_value_info(true).with_ignore_output_shapes(true);
        typed_with(source, &unnoted, batch, inputs).map_err(|_| contradicted)
    })
}

fn typed_with(
    source: &Source,
    reader: &tract_onnx::Onnx,
    batch: Option<usize>,
    inputs: Inputs,
) -> TractResult<(TypedModel, Binding)> {
    let Source { model, batching, .. } = source;
    let mut graph = reader.model_for_path(&source.file)?;
    let (binding, mut facts) = bound(&graph, source)?;
    if inputs == Inputs::AsInFile {
        for (tensor, fact) in model.inputs.iter().zip(&mut facts) {
            if let Some(difference) = difference(source, &graph, tensor, fact) {
                *fact = difference.in_file;
            }
        }
    }
    graph.set_input_names(binding::input_names(model, batching))?;
    for (index, (datatype, shape)) in facts.into_iter().enumerate() {
        let mut shape: TVec<TDim> = shape.iter().map(|length| dimension(length, &graph.symbols)).collect();
        if let (Some(batch), true) = (batch, model.is_batched) {
            shape[0] = batch.into();
        }
        let own_type = datum_type(datatype).ok_or_else(|| TractError::msg(format!("an input is {datatype}")))?;
        graph.set_input_fact(index, InferenceFact::dt_shape(own_type, shape))?;
    }
    let outlets = graph.outputs.clone();
    let found = outlets.iter().map(|&outlet| graph.outlet_label(outlet).unwrap_or_default().to_owned());
    let places = binding::output_places(&found.collect::<Vec<_>>(), model).map_err(TractError::new)?;
    graph.select_output_outlets(&places.into_iter().map(|place| outlets[place]).collect::<Vec<_>>())?;
    let mut graph = graph.into_typed()?;
    give_numbers(&mut graph)?;
    Ok((graph, binding))
}

/// Gives outputs back as numbers: what ONNX calls INT64 may be symbolic lengths for tract.
fn give_numbers(graph: &mut TypedModel) -> TractResult<()> {
    let mut outlets = graph.outputs.clone();
    for (index, outlet) in outlets.iter_mut().enumerate() {
        if graph.outlet_fact(*outlet)?.datum_type == TDim::datum_type() {
            let cast = Cast { to: DatumType::I64 };
            *outlet = graph.wire_node(format!("output-{index}.int64"), cast, &[*outlet])?[0];
        }
    }
    graph.select_output_outlets(&outlets)
}

/// What a file says of its inputs.
fn input_ports(graph: &InferenceModel) -> TractResult<Vec<Port>> {
    let port = |(index, outlet): (usize, &OutletId)| {
        let fact = graph.input_fact(index)?;
        let rank = fact.shape.rank().concretize().and_then(|rank| usize::try_from(rank).ok());
        let length = |at| fact.shape.dim(at).and_then(|length| length.concretize()).map(|length| known(&length));
        Ok(Port {
            name: graph.node(outlet.node).name.clone(),
            datatype: fact.datum_type.concretize().and_then(datatype),
            shape: rank.map(|rank| (0..rank).map(length).collect()),
        })
    };
    graph.inputs.iter().enumerate().map(port).collect()
}

/// What follows of the outputs, which are in the configuration's order.
fn output_ports(graph: &TypedModel, model: &Model) -> TractResult<Vec<Port>> {
    let port = |(index, tensor): (usize, &repository::Tensor)| {
        let fact = graph.output_fact(index)?;
        let shape = Some(fact.shape.iter().map(|length| Some(known(length))).collect());
        Ok(Port { name: tensor.name.clone(), datatype: datatype(fact.datum_type), shape })
    };
    model.outputs.iter().enumerate().map(port).collect()
}

/// The same of a graph for batches of this size alone: what is so long in front is as long as a batch.
fn output_ports_for(batch: usize, graph: &TypedModel, model: &Model) -> TractResult<Vec<Port>> {
    let mut ports = output_ports(graph, model)?;
    for first in ports.iter_mut().filter_map(|port| port.shape.as_mut()?.first_mut()) {
        if *first == Some(Length::Fixed(batch)) {
            *first = Some(Length::Named(BATCH.to_owned()));
        }
    }
    Ok(ports)
}

fn known(length: &TDim) -> Length {
    length.to_usize().map_or_else(|_| Length::Named(length.to_string()), Length::Fixed)
}

/// A length for tract. Names are symbols, but for those that are computed, as 2*batch.
fn dimension(length: &Length, symbols: &SymbolScope) -> TDim {
    match length {
        Length::Fixed(length) => TDim::from(*length),
        Length::Named(name) => match (symbols.get(name), symbols.parse_tdim(name)) {
            (None, Ok(computed)) => computed,
            (Some(symbol), _) => symbol.into(),
            (None, Err(_)) => symbols.sym(name).into(),
        },
    }
}

fn datatype(found: DatumType) -> Option<DataType> {
    DataType::ALL.into_iter().find(|&datatype| datum_type(datatype) == Some(found))
}

/// What tract calls it, unless it lacks it.
fn datum_type(datatype: DataType) -> Option<DatumType> {
    Some(match datatype {
        DataType::Bool => DatumType::Bool,
        DataType::Uint8 => DatumType::U8,
        DataType::Uint16 => DatumType::U16,
        DataType::Uint32 => DatumType::U32,
        DataType::Uint64 => DatumType::U64,
        DataType::Int8 => DatumType::I8,
        DataType::Int16 => DatumType::I16,
        DataType::Int32 => DatumType::I32,
        DataType::Int64 => DatumType::I64,
        DataType::Fp16 => DatumType::F16,
        DataType::Fp32 => DatumType::F32,
        DataType::Fp64 => DatumType::F64,
        DataType::Bytes => DatumType::String,
        DataType::Bf16 => return None,
    })
}
