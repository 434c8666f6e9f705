//! A model's file and its configuration brought together: the graph's inputs and outputs in the configuration's order,
//! with its types, and which of the graph's lengths are which, so that what is padded can be cut back.

use std::fmt;

use repository::{BatchLengths, Batching, DataType, Generated, GeneratedKind, Model};

use super::tensor::Length;
use crate::error::ExecutorError;

/// Dimensions of a tensor as the model has it, the batch dimension left out, each with the number of its length.
pub(in crate::executor) type Axes = Vec<(usize, usize)>;

/// What is known of an input or an output of the graph.
#[derive(Debug, Clone)]
pub(in crate::executor) struct Port {
    pub(in crate::executor) name: String,
    pub(in crate::executor) datatype: Option<DataType>,
    /// Each of its lengths, if that is known; `None` if not even their number is.
    pub(in crate::executor) shape: Option<Vec<Option<Length>>>,
}

impl Port {
    fn first(&self) -> Option<&Length> {
        self.shape.as_ref()?.first()?.as_ref()
    }

    /// The lengths behind the batch dimension, if it has one.
    fn rest(&self, is_batched: bool) -> Option<&[Option<Length>]> {
        self.shape.as_ref()?.get(usize::from(is_batched)..)
    }
}

/// Lengths and the type, as in `batch,10,FP32`.
impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.shape {
            Some(shape) => shape.iter().try_for_each(|length| match length {
                Some(length) => write!(f, "{length},"),
                None => f.write_str("?,"),
            })?,
            None => f.write_str("..,")?,
        }
        match self.datatype {
            Some(datatype) => datatype.fmt(f),
            None => f.write_str("?"),
        }
    }
}

/// Type and shape that an input is given.
pub(in crate::executor) type Fact = (DataType, Vec<Length>);

/// Where a file and its configuration say different things of an input.
pub(in crate::executor) struct Difference {
    /// Both sides, in one line.
    pub(in crate::executor) text: String,
    /// As it would be if the file were right.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a front end asks what if"))]
    pub(in crate::executor) in_file: Fact,
}

impl Difference {
    /// Compares fixed lengths and types. Lengths with names may be any, and that of the batch is nobody's to say.
    pub(in crate::executor) fn of(
        port: &Port,
        tensor: &repository::Tensor,
        fact: &Fact,
        is_batched: bool,
    ) -> Option<Self> {
        let mut in_file = fact.clone();
        let mut texts = Vec::new();
        if let Some(found) = port.datatype.filter(|found| *found != fact.0) {
            let (configured, known) = (tensor.datatype.config_name(), found.config_name());
            texts.push(format!("data_type {configured}, the file has {known}"));
            in_file.0 = found;
        }
        let before = usize::from(is_batched);
        let behind = fact.1.get(before..).unwrap_or_default();
        if let Some(found) = port.rest(is_batched) {
            let fixed = |length: &Option<Length>| length.as_ref().filter(|length| length.fixed().is_some()).cloned();
            let differs = |(found, configured): (&Option<Length>, &Length)| {
                fixed(found).is_some_and(|found| configured.fixed().is_some() && found != *configured)
            };
            if found.len() != behind.len() || found.iter().zip(behind).any(differs) {
                texts.push(format!("{}, the file has {}", configured_dims(tensor), file_dims(found)));
                let any = |at: usize| behind.get(at).cloned().unwrap_or(Length::Fixed(1));
                in_file.1.truncate(before);
                in_file.1.extend(found.iter().enumerate().map(|(at, found)| fixed(found).unwrap_or_else(|| any(at))));
            }
        }
        let text = format!("input {}: config.pbtxt says {}", tensor.name, texts.join(", and "));
        (!texts.is_empty()).then_some(Self { text, in_file })
    }
}

/// As `dims [3, -1]`, or the `reshape` that the model is given instead.
fn configured_dims(tensor: &repository::Tensor) -> String {
    let mut dims: Vec<String> = tensor.model_shape().iter().map(ToString::to_string).collect();
    tensor.model_variable_dims().iter().for_each(|&dim| dims[dim] = "-1".to_owned());
    let dims = dims.join(", ");
    let clients: Vec<String> = tensor.dims().map(|dim| dim.to_string()).collect();
    if clients.join(", ") == dims { format!("dims [{dims}]") } else { format!("reshape [{dims}]") }
}

fn file_dims(found: &[Option<Length>]) -> String {
    let dims = found.iter().map(|length| length.as_ref().map_or("?".to_owned(), ToString::to_string));
    format!("[{}]", dims.collect::<Vec<_>>().join(", "))
}

/// What the graph's dimensions mean.
#[derive(Debug)]
pub(in crate::executor) struct Binding {
    /// The lengths that requests choose, each once: where the file says that some are equal they are one.
    pub(in crate::executor) lengths: Vec<Length>,
    /// For each input which of its dimensions have which of these lengths; none of one that is joined.
    pub(in crate::executor) inputs: Vec<Axes>,
    /// Dimensions of each input that is joined: one, or two of which the first is one.
    pub(in crate::executor) joined_ranks: Vec<usize>,
    /// How long each of these is: the sum of its tasks' lengths, by the name that the file has for it.
    joined_lengths: Vec<Option<Length>>,
    /// Types of the inputs that are made for each run.
    pub(in crate::executor) generated: Vec<DataType>,
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

/// Brings inputs that a file has into the configuration's order, and says of what type and shape each is: those that
/// requests have, and then those that are made for each run. What outputs are is learnt when these are known
/// ([`Binding::bind_parts`]).
pub(in crate::executor) fn bind(
    found: &[Port],
    model: &Model,
    batching: &Batching,
) -> Result<(Binding, Vec<Fact>), ExecutorError> {
    let ports = in_order(found, model, batching)?;
    let mut binding = Binding {
        lengths: Vec::new(),
        inputs: Vec::new(),
        joined_ranks: vec![0; model.inputs.len()],
        joined_lengths: vec![None; model.inputs.len()],
        generated: Vec::new(),
        outputs: Vec::new(),
    };
    let mut facts = Vec::with_capacity(ports.len());
    for (index, tensor) in model.inputs.iter().enumerate() {
        let port = ports[index];
        let shape = match batching.ragged[index] {
            true => binding.joined_shape(port, (index, tensor))?,
            false => binding.stacked_shape(port, tensor, model.is_batched)?,
        };
        facts.push((tensor.datatype, shape));
    }
    for (port, generated) in ports[model.inputs.len()..].iter().zip(&batching.generated) {
        let fact = binding.generated_fact(port, generated, model)?;
        binding.generated.push(fact.0);
        facts.push(fact);
    }
    Ok((binding, facts))
}

/// The names of a model's inputs, as they are given to it.
pub(in crate::executor) fn input_names<'a>(model: &'a Model, batching: &'a Batching) -> Vec<&'a str> {
    let generated = batching.generated.iter().map(|generated| generated.name.as_str());
    model.inputs.iter().map(|tensor| tensor.name.as_str()).chain(generated).collect()
}

fn in_order<'a>(found: &'a [Port], model: &Model, batching: &Batching) -> Result<Vec<&'a Port>, ExecutorError> {
    let names = input_names(model, batching);
    let found_names: Vec<String> = found.iter().map(|port| port.name.clone()).collect();
    same_names("input", &names, &found_names)?;
    Ok(names.iter().filter_map(|name| found.iter().find(|port| port.name == *name)).collect())
}

/// What the length of the batch is called.
pub(in crate::executor) const BATCH: &str = "batch";

fn batch() -> Length {
    Length::Named(BATCH.to_owned())
}

impl Binding {
    fn stacked_shape(
        &mut self,
        port: &Port,
        tensor: &repository::Tensor,
        is_batched: bool,
    ) -> Result<Vec<Length>, ExecutorError> {
        let mut shape: Vec<Length> = is_batched.then(batch).into_iter().collect();
        let before = shape.len();
        shape.extend(tensor.model_shape().iter().map(|&length| Length::Fixed(length)));
        let mut axes = Axes::new();
        for &dim in tensor.model_variable_dims() {
            let length = variable_length(port, before + dim)?;
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
        port: &Port,
        (index, tensor): (usize, &repository::Tensor),
    ) -> Result<Vec<Length>, ExecutorError> {
        let rank = port.shape.as_ref().map_or(1, |shape| shape.len());
        if !(1..=2).contains(&rank) {
            return Err(ExecutorError(format!(
                "input {} has {rank} dimensions in the file, expected one, or two of which the first is 1, as \
                 config.pbtxt says allow_ragged_batch",
                tensor.name
            )));
        }
        self.joined_ranks[index] = rank;
        self.inputs.push(Axes::new());
        let mut shape = vec![Length::Fixed(1); rank];
        let length = variable_length(port, rank - 1)?;
        self.joined_lengths[index] = Some(length.clone());
        shape[rank - 1] = length;
        Ok(shape)
    }

    /// Type and shape of an input that is made for each run.
    fn generated_fact(&self, port: &Port, generated: &Generated, model: &Model) -> Result<Fact, ExecutorError> {
        let Generated { name, kind, source, datatype } = generated;
        let source = &model.inputs[*source];
        let of_batch = |text: &str| Length::Named(format!("{text}{BATCH}"));
        let shape: Vec<Length> = match kind {
            GeneratedKind::Mask => {
                let lengths = self.inputs[generated.source].iter().map(|&(_, length)| self.lengths[length].clone());
                std::iter::once(batch()).chain(lengths).collect()
            }
            GeneratedKind::ElementCount | GeneratedKind::AccumulatedElementCount => vec![batch()],
            GeneratedKind::AccumulatedElementCountWithZero => vec![of_batch("1+")],
            GeneratedKind::MaxElementCountAsShape => vec![Length::Named(format!("{name}_0"))],
            GeneratedKind::ItemShape => vec![batch(), Length::Fixed(source.shape.len())],
            GeneratedKind::ItemShapeFlatten => vec![of_batch(&format!("{}*", source.shape.len()))],
        };
        let wrong = |found: &dyn std::fmt::Display, expected: &dyn std::fmt::Display| {
            let of = if *kind == GeneratedKind::Mask { "mask_inputs" } else { "batch_input" };
            ExecutorError(format!("input {name} of {of} {found} in the file, expected {expected}"))
        };
        let rank = port.shape.as_ref().map(|shape| shape.len());
        if let Some(rank) = rank.filter(|&rank| rank != shape.len()) {
            let lengths: Vec<String> = shape.iter().map(ToString::to_string).collect();
            let expected = format!("{}: [{}]", shape.len(), lengths.join(", "));
            return Err(wrong(&format_args!("has {rank} dimensions"), &expected));
        }
        let found = port.datatype.or(*datatype).unwrap_or(DataType::Fp32);
        let is_right = match datatype {
            Some(datatype) => found == *datatype,
            None => found != DataType::Bytes,
        };
        if !is_right {
            let expected = datatype.map_or("numbers or BOOL".to_owned(), DataType::config_name);
            return Err(wrong(&format_args!("is {found}"), &expected));
        }
        Ok((found, shape))
    }

    /// Learns from what follows of the outputs, in the configuration's order, how they are taken apart, and checks that
    /// all is known that must be.
    pub(in crate::executor) fn bind_parts(
        &mut self,
        ports: &[Port],
        model: &Model,
        batching: &Batching,
    ) -> Result<(), ExecutorError> {
        for (index, (tensor, port)) in model.outputs.iter().zip(ports).enumerate() {
            let parts = match batching.follows[index] {
                Some(source) if batching.ragged[source] => {
                    check_type(port, tensor)?;
                    Parts::Joined(source)
                }
                source => {
                    self.check_rows(port, tensor)?;
                    check_output(port, tensor, model.is_batched)?;
                    let is_padded = batching.lengths != BatchLengths::Equal;
                    let source = source.map(|source| (source, &model.inputs[source]));
                    Parts::Rows(if is_padded { self.cuts(port, tensor, source)? } else { Axes::new() })
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
        port: &Port,
        tensor: &repository::Tensor,
        source: Option<(usize, &repository::Tensor)>,
    ) -> Result<Axes, ExecutorError> {
        let mut axes = Axes::new();
        let chosen = tensor.model_variable_dims();
        let Some(shape) = port.rest(true) else {
            let name = &port.name;
            return Err(ExecutorError(format!(
                "how many dimensions output {name} has is unknown, expected it in the file, as batch_lengths pads"
            )));
        };
        for (dim, found) in shape.iter().enumerate().filter(|(_, found)| found.as_ref().is_none_or(varies)) {
            let refuse = |expected: &str| {
                let lengths: Vec<String> = self.lengths.iter().map(ToString::to_string).collect();
                let (name, lengths) = (&tensor.name, lengths.join(", "));
                let found = found.as_ref().map_or("unknown".to_owned(), ToString::to_string);
                ExecutorError(format!(
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
            let same = || self.lengths.iter().position(|length| Some(length) == found.as_ref());
            let length = named.or_else(same).ok_or_else(|| {
                refuse("one of these, or a batch_output in config.pbtxt that names the input whose lengths it has")
            })?;
            axes.push((dim, length));
        }
        Ok(axes)
    }

    /// That an output which is as long as all tasks together is said to be so.
    fn check_rows(&self, port: &Port, tensor: &repository::Tensor) -> Result<(), ExecutorError> {
        let is_joined = self.joined_lengths.iter().flatten().any(|sum| port.first() == Some(sum));
        if is_joined {
            return Err(ExecutorError(format!(
                "output {} is as long as all tasks together, expected a batch_output in config.pbtxt that names the \
                 input whose lengths it has",
                tensor.name
            )));
        }
        Ok(())
    }
}

/// What the file calls a length that requests choose, so that equal ones stay equal; a symbol of its own if it does not
/// say.
fn variable_length(port: &Port, at: usize) -> Result<Length, ExecutorError> {
    let found = port.shape.as_ref().and_then(|shape| shape.get(at)?.clone());
    match found {
        Some(length) if length.fixed().is_some() => Err(ExecutorError(format!(
            "config.pbtxt says -1 for dimension {at} of input {}, the file has {length}",
            port.name
        ))),
        Some(length) => Ok(length),
        None => Ok(Length::Named(format!("{}_{at}", port.name))),
    }
}

/// Where the configuration's outputs are among those that the file has; others are not wanted.
pub(in crate::executor) fn output_places(found: &[String], model: &Model) -> Result<Vec<usize>, ExecutorError> {
    let place = |tensor: &repository::Tensor| {
        found.iter().position(|name| *name == tensor.name).ok_or_else(|| {
            ExecutorError(format!("config.pbtxt names output {}, the file has {}", tensor.name, found.join(", ")))
        })
    };
    model.outputs.iter().map(place).collect()
}

fn same_names(kind: &str, configured: &[&str], found: &[String]) -> Result<(), ExecutorError> {
    let mut configured: Vec<&str> = configured.to_vec();
    let mut found: Vec<&str> = found.iter().map(String::as_str).collect();
    configured.sort_unstable();
    found.sort_unstable();
    if configured == found {
        return Ok(());
    }
    Err(ExecutorError(format!(
        "config.pbtxt names {kind}s {}, the file has {}",
        configured.join(", "),
        found.join(", ")
    )))
}

/// Types and shapes of the outputs follow from the graph; where they are known, they must be the configured ones.
fn check_output(port: &Port, tensor: &repository::Tensor, is_batched: bool) -> Result<(), ExecutorError> {
    let has_batch = match &port.shape {
        Some(shape) if is_batched => shape.first().is_some_and(|first| first.as_ref().is_none_or(varies)),
        _ => true,
    };
    let rest = port.rest(is_batched).unwrap_or(&[None]).iter();
    let shape: Option<Vec<usize>> = rest.map(|length| length.as_ref()?.fixed()).collect();
    let fits = port.datatype == Some(tensor.datatype)
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
    Err(ExecutorError(format!(
        "output {} is {port}, expected {:?} of shape [{batch}{shape}]{question}",
        tensor.name, tensor.datatype
    )))
}

fn varies(length: &Length) -> bool {
    length.fixed().is_none()
}

fn check_type(port: &Port, tensor: &repository::Tensor) -> Result<(), ExecutorError> {
    if port.datatype == Some(tensor.datatype) {
        return Ok(());
    }
    Err(ExecutorError(format!("output {} is {port}, expected {:?}", tensor.name, tensor.datatype)))
}
