//! ONNX Runtime as what computes a graph: for models with operators that neither tract nor our own plans have. Its
//! library is loaded when the first of them comes ([`library`]).
//!
//! Each GPU that hosts a model, or each thread that stands for one, has a session of its own: sessions run one batch at
//! a time, on their own few threads, which do not spin while they wait. What a graph's lengths are called is what its
//! file says of inputs and outputs; what it does not say is unknown, and found out when a batch has run.

pub(in crate::executor) mod library;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use half::slice::HalfFloatSliceExt as _;
use ort::{
    ep,
    logging::LogLevel,
    session::{RunOptions, Session, SessionInputValue, builder::SessionBuilder},
    value::{DynValue, Outlet, TensorElementType, TensorRef, ValueType},
};
use repository::{DataType, Precision};
use tract_onnx::prelude::*;
use zerocopy::IntoBytes as _;

use super::{
    Elements, Engine, Output, Source, Turn,
    binding::{self, Binding, Fact, Port},
};
use crate::{
    config::onnxruntime::{Provider, Sessions},
    error::ExecutorError,
};

/// Bytes of a reason, which the library makes as long as it likes.
const REASON_BYTES_MAX: usize = 400;

/// The sessions of a model, by the index of their GPU.
type Opened = BTreeMap<usize, Mutex<Session>>;

/// A graph.
pub(super) struct OnnxRuntime {
    /// `None` while its weights are not needed.
    opened: RwLock<Option<Arc<Opened>>>,
    sessions: Sessions,
    /// The file's inputs in the order of the binding, and its outputs in the configuration's.
    inputs: Vec<String>,
    outputs: Vec<(String, DataType)>,
}

impl OnnxRuntime {
    /// # Errors
    /// If the library cannot be had, or cannot use the file or a GPU, or the file does not fit the configuration.
    pub(super) fn load(source: &Source, sessions: &Sessions) -> Result<(Self, Binding), ExecutorError> {
        let opened = open(source, sessions)?;
        let Source { model, batching, .. } = source;
        let session = opened.values().next().expect("a model is hosted on one GPU at least");
        let session = session.lock().unwrap_or_else(PoisonError::into_inner);
        let binding = bind(&session, source).map_err(|cause| source.refused(&cause))?;
        drop(session);
        let inputs = binding::input_names(model, batching).into_iter().map(str::to_owned).collect();
        let outputs = model.outputs.iter().map(|tensor| (tensor.name.clone(), tensor.datatype)).collect();
        let opened = RwLock::new(Some(Arc::new(opened)));
        Ok((Self { opened, sessions: sessions.clone(), inputs, outputs }, binding))
    }

    /// The outputs of a run, in the configuration's order.
    fn take(
        &self,
        results: &ort::session::SessionOutputs<'_>,
        take: &mut dyn FnMut(&[Output<'_>]) -> TractResult<()>,
    ) -> TractResult<()> {
        let mut values = Vec::with_capacity(self.outputs.len());
        for (name, datatype) in &self.outputs {
            let value = results.get(name).ok_or_else(|| TractError::msg(format!("it gave no output {name}")))?;
            let strings = match datatype {
                DataType::Bytes => value.try_extract_strings().map_err(failed)?.1,
                _ => Vec::new(),
            };
            values.push((value, *datatype, strings));
        }
        let outputs = values.iter().map(|(value, datatype, strings)| output(value, *datatype, strings));
        take(&outputs.collect::<TractResult<Vec<_>>>()?)
    }
}

impl Engine for OnnxRuntime {
    fn run(
        &self,
        turn: &Turn,
        inputs: Vec<Tensor>,
        take: &mut dyn FnMut(&[Output<'_>]) -> TractResult<()>,
    ) -> TractResult<()> {
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner).clone();
        let opened = opened.ok_or_else(|| TractError::msg("its weights are not in memory"))?;
        let session = turn.gpu.map_or_else(|| opened.values().next(), |gpu| opened.get(&gpu));
        let session = session.ok_or_else(|| TractError::msg("that GPU does not host it"))?;
        let values: Vec<SessionInputValue<'_>> = inputs.iter().map(value).collect::<TractResult<_>>()?;
        let named: Vec<_> = self.inputs.iter().map(String::as_str).zip(values).collect();
        let options = Arc::new(RunOptions::new().map_err(failed)?);
        let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = Arc::clone(&options);
        let end = move || {
            if let Err(error) = ended.terminate() {
                tracing::warn!("a run of ONNX Runtime cannot be ended: {}", one_line(&error));
            }
        };
        let results = turn.run(end, || session.run_with_options(named, &*options).map_err(failed))?;
        self.take(&results, take)
    }

    fn release(&self) {
        *self.opened.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn read(&self, source: &Source) -> Result<(), ExecutorError> {
        // Whoever needs it, too, waits here.
        let mut opened = self.opened.write().unwrap_or_else(PoisonError::into_inner);
        if opened.is_none() {
            *opened = Some(Arc::new(open(source, &self.sessions)?));
        }
        Ok(())
    }
}

/// Reads the file and optimises it for each GPU. It is what it was.
fn open(source: &Source, sessions: &Sessions) -> Result<Opened, ExecutorError> {
    let Sessions { settings, gpus, precision } = sessions;
    let environment = library::environment(settings.library.as_deref())
        .map_err(|error| ExecutorError(format!("model {}: {error}", source.model.name)))?;
    if settings.provider == Provider::Cuda {
        check_cuda(*precision).map_err(|cause| source.refused(&cause))?;
    }
    let refused = |error: ort::Error| source.refused(&failed(error));
    let mut opened = Opened::new();
    for &(gpu, device) in gpus {
        let builder = Session::builder(&environment).map_err(refused)?;
        let cuda = device.map(|device| {
            let provider = ep::CUDA::default().with_device_id(device).with_tf32(*precision == Precision::Tf32);
            provider.build().error_on_failure()
        });
        let builder = configure(builder, source, (settings.threads, cuda));
        let session = builder.map_err(refused)?.commit_from_file(&source.file);
        opened.insert(gpu, Mutex::new(session.map_err(refused)?));
    }
    source.check_stamp()?;
    Ok(opened)
}

fn check_cuda(precision: Precision) -> TractResult<()> {
    if precision == Precision::Fp16 {
        return Err(TractError::msg(
            "precision is fp16, expected fp32 or tf32, as ONNX Runtime computes what the file says",
        ));
    }
    if !library::has_cuda() {
        return Err(TractError::msg(
            "onnxruntime.provider is cuda, expected cpu, as the library was built without CUDA (PyPI's \
             onnxruntime-gpu has it)",
        ));
    }
    Ok(())
}

fn configure(
    builder: SessionBuilder,
    source: &Source,
    (threads, provider): (usize, Option<ep::ExecutionProviderDispatch>),
) -> ort::Result<SessionBuilder> {
    // Patterns of memory are kept for each shape that has come, which requests choose.
    let has_few_shapes = !source.is_in_groups();
    let builder = builder
        .with_log_level(LogLevel::Warning)?
        .with_intra_threads(threads)?
        .with_inter_threads(1)?
        .with_parallel_execution(false)?
        .with_intra_op_spinning(false)?
        .with_memory_pattern(has_few_shapes)?;
    Ok(builder.with_execution_providers(provider.as_slice())?)
}

/// Brings the file's inputs and outputs together with the configuration's.
fn bind(session: &Session, source: &Source) -> TractResult<Binding> {
    let Source { model, batching, .. } = source;
    let symbols = SymbolScope::default();
    let ports = |outlets: &[Outlet]| outlets.iter().map(|outlet| port(outlet, &symbols)).collect::<Vec<_>>();
    let (inputs, outputs) = (ports(session.inputs()), ports(session.outputs()));
    let (mut binding, facts) = binding::bind(&inputs, &symbols, model, batching)?;
    for (name, fact) in binding::input_names(model, batching).into_iter().zip(&facts) {
        inputs.iter().filter(|port| port.name == name).try_for_each(|port| check_input(port, fact))?;
    }
    let names: Vec<String> = outputs.iter().map(|port| port.name.clone()).collect();
    let places = binding::output_places(&names, model)?;
    let outputs: Vec<Port> = places.into_iter().map(|place| outputs[place].clone()).collect();
    binding.bind_parts(&outputs, model, batching)?;
    Ok(binding)
}

/// That a file takes what it will be given: unlike tract's, its lengths stay what they are.
fn check_input(port: &Port, (datum_type, shape): &Fact) -> TractResult<()> {
    let fits = |(found, given): (&Option<TDim>, &TDim)| match found {
        Some(found) => found.to_i64().is_err() || found == given,
        None => true,
    };
    let has_shape = |found: &TVec<Option<TDim>>| found.len() == shape.len() && found.iter().zip(shape).all(fits);
    if port.datum_type == Some(*datum_type) && port.shape.as_ref().is_none_or(has_shape) {
        return Ok(());
    }
    let given: String = shape.iter().map(|length| format!("{length},")).collect();
    Err(TractError::msg(format!(
        "input {} is {port} in the file, and config.pbtxt gives it {given}{datum_type:?}",
        port.name
    )))
}

/// What a file says of an input or an output.
fn port(outlet: &Outlet, symbols: &SymbolScope) -> Port {
    let (datum_type, shape) = match outlet.dtype() {
        ValueType::Tensor { ty, shape, dimension_symbols } => {
            let length = |(at, &length): (usize, &i64)| match dimension_symbols.get(at).map(String::as_str) {
                _ if length >= 0 => Some(TDim::from(length)),
                None | Some("") => None,
                Some(name) => Some(symbols.sym(name).into()),
            };
            // A file that says nothing of a shape is no different from one that says that it is a scalar.
            let is_known = !shape.is_empty();
            (datum_type(*ty), is_known.then(|| shape.iter().enumerate().map(length).collect()))
        }
        _ => (None, None),
    };
    Port { name: outlet.name().to_owned(), datum_type, shape }
}

fn datum_type(found: TensorElementType) -> Option<DatumType> {
    Some(match found {
        TensorElementType::Bool => DatumType::Bool,
        TensorElementType::Uint8 => DatumType::U8,
        TensorElementType::Uint16 => DatumType::U16,
        TensorElementType::Uint32 => DatumType::U32,
        TensorElementType::Uint64 => DatumType::U64,
        TensorElementType::Int8 => DatumType::I8,
        TensorElementType::Int16 => DatumType::I16,
        TensorElementType::Int32 => DatumType::I32,
        TensorElementType::Int64 => DatumType::I64,
        TensorElementType::Float16 => DatumType::F16,
        TensorElementType::Float32 => DatumType::F32,
        TensorElementType::Float64 => DatumType::F64,
        TensorElementType::String => DatumType::String,
        _ => return None,
    })
}

/// A tensor as an input; numbers stay where they are.
fn value(tensor: &Tensor) -> TractResult<SessionInputValue<'_>> {
    let (shape, plain) = (tensor.shape(), tensor.try_as_plain_ram()?);
    macro_rules! view {
        ($type:ty) => {
            Ok(TensorRef::from_array_view((shape, plain.as_slice::<$type>()?)).map_err(failed)?.into())
        };
    }
    match tensor.datum_type() {
        DatumType::Bool => view!(bool),
        DatumType::U8 => view!(u8),
        DatumType::U16 => view!(u16),
        DatumType::U32 => view!(u32),
        DatumType::U64 => view!(u64),
        DatumType::I8 => view!(i8),
        DatumType::I16 => view!(i16),
        DatumType::I32 => view!(i32),
        DatumType::I64 => view!(i64),
        DatumType::F16 => view!(f16),
        DatumType::F32 => view!(f32),
        DatumType::F64 => view!(f64),
        DatumType::String => {
            let strings = (shape, plain.as_slice::<String>()?);
            Ok(ort::value::Tensor::from_string_array(strings).map_err(failed)?.into())
        }
        other => Err(TractError::msg(format!("it has no inputs of type {other:?}"))),
    }
}

fn output<'a>(value: &'a DynValue, datatype: DataType, strings: &'a [String]) -> TractResult<Output<'a>> {
    let lengths = value.dtype().tensor_shape().map(|shape| shape.iter());
    let shape = lengths.into_iter().flatten().map(|&length| usize::try_from(length).unwrap_or(0)).collect();
    let elements = match datatype {
        DataType::Bytes => Elements::Strings(strings),
        _ => Elements::Numbers(numbers(value, datatype)?),
    };
    Ok(Output { shape, elements })
}

/// An output's elements.
fn numbers(value: &DynValue, datatype: DataType) -> TractResult<&[u8]> {
    macro_rules! elements {
        ($type:ty) => {
            value.try_extract_tensor::<$type>().map_err(failed)?.1
        };
    }
    Ok(match datatype {
        DataType::Bool => elements!(bool).as_bytes(),
        DataType::Uint8 => elements!(u8).as_bytes(),
        DataType::Uint16 => elements!(u16).as_bytes(),
        DataType::Uint32 => elements!(u32).as_bytes(),
        DataType::Uint64 => elements!(u64).as_bytes(),
        DataType::Int8 => elements!(i8).as_bytes(),
        DataType::Int16 => elements!(i16).as_bytes(),
        DataType::Int32 => elements!(i32).as_bytes(),
        DataType::Int64 => elements!(i64).as_bytes(),
        DataType::Fp16 => elements!(f16).reinterpret_cast().as_bytes(),
        DataType::Fp32 => elements!(f32).as_bytes(),
        DataType::Fp64 => elements!(f64).as_bytes(),
        DataType::Bytes => return Err(TractError::msg("it has strings, expected numbers")),
    })
}

fn failed(error: ort::Error) -> TractError {
    TractError::msg(one_line(&error))
}

/// The library's reasons have lines of their own.
fn one_line(error: &dyn fmt::Display) -> String {
    let mut line = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > REASON_BYTES_MAX {
        line.truncate(line.floor_char_boundary(REASON_BYTES_MAX));
        line.push_str("..");
    }
    line
}

#[cfg(test)]
pub(super) mod tests;
