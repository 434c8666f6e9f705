//! A model's file and its configuration brought together: the graph's inputs and outputs in the configuration's order,
//! with its types, and which of the graph's lengths are which, so that what is padded can be cut back.

use repository::{BatchLengths, Batching, DataType, Generated, GeneratedKind, Model};
use tract_onnx::{prelude::*, tract_core::internal::DimLike, tract_hir::infer::Factoid};

use super::datum_type;

/// Dimensions of a tensor as the model has it, the batch dimension left out, each with the number of its length.
pub(in crate::executor) type Axes = Vec<(usize, usize)>;

/// What the graph's dimensions mean.
#[derive(Debug)]
pub(in crate::executor) struct Binding {
    /// The lengths that requests choose, each once: where the file says that some are equal they are one.
    pub(in crate::executor) lengths: Vec<TDim>,
    /// For each input which of its dimensions have which of these lengths; none of one that is joined.
    pub(in crate::executor) inputs: Vec<Axes>,
    /// Dimensions of each input that is joined: one, or two of which the first is one.
    pub(in crate::executor) joined_ranks: Vec<usize>,
    /// Types of the inputs that are made for each run.
    pub(in crate::executor) generated: Vec<DatumType>,
    /// How each output is taken apart.
    pub(in crate::executor) outputs: Vec<Parts>,
}

/// How an output of a run becomes those of its tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::executor) enum Parts {
    /// It has a row for each task, of which these dimensions are cut to the task's own lengths.
    Rows(Axes),
    /// It is that of all tasks one after another, each of the lengths that this input has.
    Joined(usize),
}

/// Gives the graph's inputs and outputs the configuration's order, types and shapes. What outputs are is known when the
/// graph is typed ([`bind_parts`]).
pub(super) fn bind(graph: &mut InferenceModel, model: &Model, batching: &Batching) -> TractResult<Binding> {
    let found: Vec<String> = graph.inputs.iter().map(|outlet| graph.node(outlet.node).name.clone()).collect();
    let generated = batching.generated.iter().map(|generated| generated.name.as_str());
    let names: Vec<&str> = model.inputs.iter().map(|tensor| tensor.name.as_str()).chain(generated).collect();
    same_names("input", &names, &found)?;
    graph.set_input_names(&names)?;
    let mut binding = Binding {
        lengths: Vec::new(),
        inputs: Vec::new(),
        joined_ranks: vec![0; model.inputs.len()],
        generated: Vec::new(),
        outputs: Vec::new(),
    };
    for (index, tensor) in model.inputs.iter().enumerate() {
        let shape = match batching.ragged[index] {
            true => binding.joined_shape(graph, (index, tensor))?,
            false => binding.stacked_shape(graph, (index, tensor), model.is_batched)?,
        };
        graph.set_input_fact(index, InferenceFact::dt_shape(datum_type(tensor.datatype), shape))?;
    }
    if let Some(length) = binding.lengths.iter().find(|length| batching.is_padded() && !matches!(length, TDim::Sym(_)))
    {
        return Err(TractError::msg(format!(
            "an input's length is {length} in the file, expected a name where batch_lengths pads"
        )));
    }
    for (index, generated) in (model.inputs.len()..).zip(&batching.generated) {
        let (datum_type, shape) = binding.generated_fact(graph, (index, generated), model)?;
        graph.set_input_fact(index, InferenceFact::dt_shape(datum_type, shape))?;
        binding.generated.push(datum_type);
    }
    bind_outputs(graph, model)?;
    Ok(binding)
}

fn batch_of(graph: &InferenceModel) -> TDim {
    graph.symbols.sym("batch").into()
}

fn file_rank(graph: &InferenceModel, index: usize) -> TractResult<Option<usize>> {
    Ok(graph.input_fact(index)?.shape.rank().concretize().and_then(|rank| usize::try_from(rank).ok()))
}

impl Binding {
    /// The lengths that requests choose, where the file gives each a name of its own.
    pub(in crate::executor) fn named_lengths(&self) -> TractResult<Vec<Symbol>> {
        let named = |length: &TDim| match length {
            TDim::Sym(symbol) => Ok(symbol.clone()),
            other => Err(TractError::msg(format!("an input's length is {other} in the file, expected a name"))),
        };
        self.lengths.iter().map(named).collect()
    }

    fn stacked_shape(
        &mut self,
        graph: &InferenceModel,
        (index, tensor): (usize, &repository::Tensor),
        is_batched: bool,
    ) -> TractResult<TVec<TDim>> {
        let mut shape: TVec<TDim> = is_batched.then(|| batch_of(graph)).into_iter().collect();
        let before = shape.len();
        shape.extend(tensor.model_shape().iter().map(|&length| TDim::from(length)));
        let mut axes = Axes::new();
        for &dim in tensor.model_variable_dims() {
            let length = variable_length(graph, (index, tensor), before + dim)?;
            shape[before + dim] = length.clone();
            let known = self.lengths.iter().position(|known| *known == length);
            axes.push((dim, known.unwrap_or(self.lengths.len())));
            if known.is_none() {
                self.lengths.push(length);
            }
        }
        self.inputs.push(axes);
        Ok(shape)
    }

    /// The shape of a tensor whose tasks are joined: as in Triton one dimension, or two of which the first is one.
    fn joined_shape(
        &mut self,
        graph: &InferenceModel,
        (index, tensor): (usize, &repository::Tensor),
    ) -> TractResult<TVec<TDim>> {
        let rank = file_rank(graph, index)?.unwrap_or(1);
        if !(1..=2).contains(&rank) {
            return Err(TractError::msg(format!(
                "input {} has {rank} dimensions in the file, expected one, or two of which the first is 1, as \
                 config.pbtxt says allow_ragged_batch",
                tensor.name
            )));
        }
        self.joined_ranks[index] = rank;
        self.inputs.push(Axes::new());
        let mut shape: TVec<TDim> = tvec!(TDim::from(1); rank);
        shape[rank - 1] = variable_length(graph, (index, tensor), rank - 1)?;
        Ok(shape)
    }

    /// Type and shape of an input that is made for each run.
    fn generated_fact(
        &self,
        graph: &InferenceModel,
        (index, generated): (usize, &Generated),
        model: &Model,
    ) -> TractResult<(DatumType, TVec<TDim>)> {
        let Generated { name, kind, source, datatype } = generated;
        let (batch, source) = (batch_of(graph), &model.inputs[*source]);
        let shape: TVec<TDim> = match kind {
            GeneratedKind::Mask => {
                let lengths = self.inputs[generated.source].iter().map(|&(_, length)| self.lengths[length].clone());
                std::iter::once(batch).chain(lengths).collect()
            }
            GeneratedKind::ElementCount | GeneratedKind::AccumulatedElementCount => tvec!(batch),
            GeneratedKind::AccumulatedElementCountWithZero => tvec!(batch + 1),
            GeneratedKind::MaxElementCountAsShape => tvec!(graph.symbols.sym(&format!("{name}_0")).into()),
            GeneratedKind::ItemShape => tvec!(batch, source.shape.len().into()),
            GeneratedKind::ItemShapeFlatten => tvec!(batch * source.shape.len()),
        };
        let wrong = |found: &dyn std::fmt::Display, expected: &dyn std::fmt::Display| {
            let of = if *kind == GeneratedKind::Mask { "mask_inputs" } else { "batch_input" };
            TractError::msg(format!("input {name} of {of} {found} in the file, expected {expected}"))
        };
        if let Some(rank) = file_rank(graph, index)?.filter(|&rank| rank != shape.len()) {
            let expected = format!("{}: {shape:?}", shape.len());
            return Err(wrong(&format_args!("has {rank} dimensions"), &expected));
        }
        let found = graph.input_fact(index)?.datum_type.concretize();
        let found = found.or(datatype.map(datum_type)).unwrap_or(DatumType::F32);
        let is_right = match datatype {
            Some(datatype) => found == datum_type(*datatype),
            None => found == DatumType::Bool || found.is_integer() || found.is_float(),
        };
        if !is_right {
            let expected = datatype.map_or("numbers or BOOL".to_owned(), DataType::config_name);
            return Err(wrong(&format_args!("is {found:?}"), &expected));
        }
        Ok((found, shape))
    }

    /// Learns from the typed graph how outputs are taken apart, and checks that all that it must be is known.
    pub(super) fn bind_parts(&mut self, graph: &TypedModel, model: &Model, batching: &Batching) -> TractResult<()> {
        for (index, tensor) in model.outputs.iter().enumerate() {
            let fact = graph.output_fact(index)?;
            let parts = match batching.follows[index] {
                Some(source) if batching.ragged[source] => {
                    check_type(fact, tensor)?;
                    Parts::Joined(source)
                }
                source => {
                    check_rows(graph, (fact, tensor), batching)?;
                    check_output(fact, tensor, model.is_batched)?;
                    let is_padded = batching.lengths != BatchLengths::Equal;
                    let source = source.map(|source| (source, &model.inputs[source]));
                    Parts::Rows(if is_padded { self.cuts(fact, tensor, source)? } else { Axes::new() })
                }
            };
            self.outputs.push(parts);
        }
        Ok(())
    }

    /// Which dimensions of an output have which lengths: those of the same name, or those of the input that
    /// `batch_output` names.
    fn cuts(
        &self,
        fact: &TypedFact,
        tensor: &repository::Tensor,
        source: Option<(usize, &repository::Tensor)>,
    ) -> TractResult<Axes> {
        let mut axes = Axes::new();
        let chosen = tensor.model_variable_dims();
        for (dim, found) in fact.shape.iter().skip(1).enumerate().filter(|(_, found)| found.to_usize().is_err()) {
            let refuse = |expected: &str| {
                let lengths: Vec<String> = self.lengths.iter().map(ToString::to_string).collect();
                let (name, lengths) = (&tensor.name, lengths.join(", "));
                TractError::msg(format!(
                    "dimension {} of output {name} is {found} in the file, whose inputs have {lengths}: expected \
                     {expected}, as batch_lengths pads",
                    dim + 1
                ))
            };
            let Some(at) = chosen.iter().position(|&chosen| chosen == dim) else {
                return Err(refuse("-1 for it in config.pbtxt"));
            };
            if tensor.datatype == DataType::Bytes {
                return Err(refuse("numbers"));
            }
            let named = source.and_then(|(input, source)| {
                let own = tensor.variable.as_ref()?.dims[at];
                let at = source.variable.as_ref()?.dims.iter().position(|&dim| dim == own)?;
                self.inputs[input].get(at).map(|&(_, length)| length)
            });
            let same = || self.lengths.iter().position(|length| length == found);
            let length = named.or_else(same).ok_or_else(|| {
                refuse("one of these, or a batch_output in config.pbtxt that names the input whose lengths it has")
            })?;
            axes.push((dim, length));
        }
        Ok(axes)
    }
}

/// What the file calls a length that requests choose, so that equal ones stay equal; a symbol of its own if it does not
/// say.
fn variable_length(
    graph: &InferenceModel,
    (index, tensor): (usize, &repository::Tensor),
    at: usize,
) -> TractResult<TDim> {
    let found = graph.input_fact(index)?.shape.dim(at).and_then(|length| length.concretize());
    match found {
        Some(length) if length.to_i64().is_ok() => Err(TractError::msg(format!(
            "config.pbtxt says -1 for dimension {at} of input {}, the file has {length}",
            tensor.name
        ))),
        Some(length) => Ok(length),
        None => Ok(graph.symbols.sym(&format!("{}_{at}", tensor.name)).into()),
    }
}

/// Puts the graph's outputs into the configuration's order, and drops those that it does not name.
fn bind_outputs(graph: &mut InferenceModel, model: &Model) -> TractResult<()> {
    let outlets = graph.outputs.clone();
    let found: Vec<String> = outlets.iter().map(|&o| graph.outlet_label(o).unwrap_or_default().to_owned()).collect();
    let position = |tensor: &repository::Tensor| {
        found.iter().position(|name| *name == tensor.name).ok_or_else(|| {
            TractError::msg(format!("config.pbtxt names output {}, the file has {}", tensor.name, found.join(", ")))
        })
    };
    let bound = model.outputs.iter().map(|tensor| Ok(outlets[position(tensor)?])).collect::<TractResult<Vec<_>>>()?;
    graph.select_output_outlets(&bound)
}

fn same_names(kind: &str, configured: &[&str], found: &[String]) -> TractResult<()> {
    let mut configured: Vec<&str> = configured.to_vec();
    let mut found: Vec<&str> = found.iter().map(String::as_str).collect();
    configured.sort_unstable();
    found.sort_unstable();
    if configured == found {
        return Ok(());
    }
    Err(TractError::msg(format!(
        "config.pbtxt names {kind}s {}, the file has {}",
        configured.join(", "),
        found.join(", ")
    )))
}

/// That an output which is as long as all tasks together is said to be so.
fn check_rows(
    graph: &TypedModel,
    (fact, tensor): (&TypedFact, &repository::Tensor),
    batching: &Batching,
) -> TractResult<()> {
    let joined = (0..batching.ragged.len()).filter(|&input| batching.ragged[input]);
    for input in joined {
        let sum = graph.input_fact(input)?.shape.last();
        if fact.shape.first() == sum {
            return Err(TractError::msg(format!(
                "output {} is as long as all tasks together, expected a batch_output in config.pbtxt that names the \
                 input whose lengths it has",
                tensor.name
            )));
        }
    }
    Ok(())
}

/// Types and shapes of the outputs follow from the graph; where they are known, they must be the configured ones.
fn check_output(fact: &TypedFact, tensor: &repository::Tensor, is_batched: bool) -> TractResult<()> {
    let first = fact.shape.first().filter(|_| is_batched);
    let has_batch = !is_batched || first.is_some_and(|batch| batch.to_usize().is_err());
    let rest = fact.shape.iter().skip(usize::from(is_batched));
    let shape: Option<Vec<usize>> = rest.map(|length| length.to_usize().ok()).collect();
    let fits = fact.datum_type == datum_type(tensor.datatype)
        && has_batch
        && shape.is_none_or(|shape| tensor.client_shape_of(&shape).is_some());
    if fits {
        return Ok(());
    }
    let (batch, question) = match is_batched {
        true => ("batch, ", "; does the first dimension vary?"),
        false => ("", ""),
    };
    let dims: Vec<i64> = tensor.dims().collect();
    let shape = if tensor.reshape.is_some() { format!("{:?}", tensor.model_shape()) } else { format!("{dims:?}") };
    Err(TractError::msg(format!(
        "output {} is {fact:?}, expected {:?} of shape [{batch}{shape}]{question}",
        tensor.name, tensor.datatype
    )))
}

fn check_type(fact: &TypedFact, tensor: &repository::Tensor) -> TractResult<()> {
    if fact.datum_type == datum_type(tensor.datatype) {
        return Ok(());
    }
    Err(TractError::msg(format!("output {} is {fact:?}, expected {:?}", tensor.name, tensor.datatype)))
}
