//! ONNX Runtime as what computes a graph: what runs models wherever its library is found ([`places`]), as it has all of
//! ONNX's operators, and those of others. The library is loaded once ([`library`]).
//!
//! Each GPU that hosts a model, or each thread that stands for one, has a session of its own: sessions run one batch at
//! a time, on their own few threads, which do not spin while they wait. What a graph's lengths are called is what its
//! file says of inputs and outputs; what it does not say is unknown, and found out when a batch has run.

pub(in crate::executor) mod library;
pub(in crate::executor) mod places;
#[allow(unsafe_code)]
mod strings;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use half::{
    bf16, f16,
    slice::{HalfBitsSliceExt as _, HalfFloatSliceExt as _},
};
use ort::{
    ep,
    logging::LogLevel,
    session::{RunOptions, Session, SessionInputValue, builder::SessionBuilder},
    value::{DynMapValueType, DynValue, Outlet, TensorElementType, TensorRef, ValueType},
};
use repository::{
    DataType, Precision,
    onnx::{self, Signature},
};
use zerocopy::{IntoBytes as _, TryFromBytes as _};

use super::{
    binding::{Binding, Port, input_names},
    engine::{Engine, Output},
    source::{Source, one_line},
    tensor::{Elements, Length, Tensor},
    turns::Turn,
};
use crate::{
    config::onnxruntime::{Provider, Sessions},
    error::ExecutorError,
};

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
    /// Of outputs that have a map for each row, by name: the keys in the order of a row's elements.
    keys: BTreeMap<String, Vec<String>>,
}

impl OnnxRuntime {
    /// # Errors
    /// If the library cannot be had, or cannot use the file or a GPU, or the file does not fit the configuration.
    pub(super) fn load(source: &Source, sessions: &Sessions) -> Result<(Self, Binding), ExecutorError> {
        let opened = open(source, sessions)?;
        let Source { model, batching, .. } = source;
        let session = opened.values().next().expect("a model is hosted on one GPU at least");
        let session = session.lock().unwrap_or_else(PoisonError::into_inner);
        let keys = keys(&session, source).map_err(|cause| source.refused(&cause))?;
        let binding = bind(&session, source, &keys).map_err(|cause| source.refused(&cause))?;
        drop(session);
        let inputs = input_names(model, batching).into_iter().map(str::to_owned).collect();
        let outputs = model.outputs.iter().map(|tensor| (tensor.name.clone(), tensor.datatype)).collect();
        let opened = RwLock::new(Some(Arc::new(opened)));
        Ok((Self { opened, sessions: sessions.clone(), inputs, outputs, keys }, binding))
    }

    /// The outputs of a run, in the configuration's order.
    fn take(
        &self,
        results: &ort::session::SessionOutputs<'_>,
        take: &mut dyn FnMut(&[Output<'_>]) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        let mut values = Vec::with_capacity(self.outputs.len());
        for (name, datatype) in &self.outputs {
            let value = results.get(name).ok_or_else(|| ExecutorError(format!("it gave no output {name}")))?;
            let taken = match (self.keys.get(name), datatype) {
                (Some(keys), _) => Taken::Rows(rows_of_maps(value, keys)?),
                (None, DataType::Bytes) => Taken::Strings(value.try_extract_strings().map_err(failed)?.1),
                (None, _) => Taken::InPlace,
            };
            values.push((value, *datatype, taken));
        }
        let outputs = values.iter().map(|(value, datatype, taken)| output(value, *datatype, taken));
        take(&outputs.collect::<Result<Vec<_>, ExecutorError>>()?)
    }
}

impl Engine for OnnxRuntime {
    fn run(
        &self,
        turn: &Turn,
        inputs: &[Tensor],
        take: &mut dyn FnMut(&[Output<'_>]) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner).clone();
        let opened = opened.ok_or_else(|| ExecutorError("its weights are not in memory".to_owned()))?;
        let session = turn.gpu.map_or_else(|| opened.values().next(), |gpu| opened.get(&gpu));
        let session = session.ok_or_else(|| ExecutorError("that GPU does not host it".to_owned()))?;
        let values: Vec<SessionInputValue<'_>> = inputs.iter().map(value).collect::<Result<_, ExecutorError>>()?;
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

/// A session as a model gets one for its first GPU, without an executor.
pub(in crate::executor) fn session(source: &Source, sessions: &Sessions) -> Result<Session, ExecutorError> {
    let (_, session) = open(source, sessions)?.pop_first().expect("a model is hosted on one GPU at least");
    Ok(session.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Reads the file and optimises it for each GPU. It is what it was.
fn open(source: &Source, sessions: &Sessions) -> Result<Opened, ExecutorError> {
    let Sessions { settings, gpus, threads, precision } = sessions;
    let environment = library::environment(settings)
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
        let builder = configure(builder, source, (*threads, cuda));
        let session = builder.map_err(refused)?.commit_from_file(&source.file);
        opened.insert(gpu, Mutex::new(session.map_err(refused)?));
    }
    source.check_stamp()?;
    Ok(opened)
}

fn check_cuda(precision: Precision) -> Result<(), ExecutorError> {
    if precision == Precision::Fp16 {
        return Err(ExecutorError(
            "precision is fp16, expected fp32 or tf32, as ONNX Runtime computes what the file says".to_owned(),
        ));
    }
    if !library::has_cuda() {
        return Err(ExecutorError(
            "onnxruntime.provider is cuda, expected cpu, as the library was built without CUDA (PyPI's \
             onnxruntime-gpu has it)"
                .to_owned(),
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

/// What an output's elements are taken from.
enum Taken {
    /// Its numbers stay where they are.
    InPlace,
    Strings(Vec<String>),
    /// What maps had for their keys.
    Rows(Tensor),
}

/// The keys of outputs that are sequences of maps, as the file has them.
fn keys(session: &Session, source: &Source) -> Result<BTreeMap<String, Vec<String>>, ExecutorError> {
    let has_maps =
        |outlet: &Outlet| matches!(outlet.dtype(), ValueType::Sequence(of) if matches!(**of, ValueType::Map { .. }));
    if !session.outputs().iter().any(has_maps) {
        return Ok(BTreeMap::new());
    }
    let file = onnx::read(&source.file).map_err(|error| ExecutorError(error.to_string()))?;
    let outputs = Signature::of(&file.graph.unwrap_or_default()).outputs;
    Ok(outputs.into_iter().filter_map(|output| Some((output.name, output.keys?))).collect())
}

/// A row for each map of a sequence, with the numbers of these keys.
fn rows_of_maps(value: &DynValue, keys: &[String]) -> Result<Tensor, ExecutorError> {
    let maps = value.try_extract_sequence::<DynMapValueType>().map_err(failed)?;
    let mut numbers = Vec::with_capacity(maps.len() * keys.len());
    for map in &maps {
        let of_map: BTreeMap<String, f32> = match map.dtype() {
            ValueType::Map { key: TensorElementType::String, .. } => {
                map.try_extract_key_values::<String, f32>().map_err(failed)?.into_iter().collect()
            }
            _ => {
                let pairs = map.try_extract_key_values::<i64, f32>().map_err(failed)?;
                pairs.into_iter().map(|(key, number)| (key.to_string(), number)).collect()
            }
        };
        for key in keys {
            let number = of_map.get(key).ok_or_else(|| ExecutorError(format!("a map has no key {key}")))?;
            numbers.push(f64::from(*number));
        }
    }
    Ok(Tensor::of_numbers(DataType::Fp32, &[maps.len(), keys.len()], &numbers))
}

/// Brings the file's inputs and outputs together with the configuration's.
fn bind(session: &Session, source: &Source, keys: &BTreeMap<String, Vec<String>>) -> Result<Binding, ExecutorError> {
    let of_maps = |name: &str, keys: &Vec<String>| Port {
        name: name.to_owned(),
        datatype: Some(DataType::Fp32),
        shape: Some(vec![None, Some(Length::Fixed(keys.len()))]),
    };
    let as_clients_see_it = |outlet: &Outlet| match keys.get(outlet.name()) {
        Some(keys) => of_maps(outlet.name(), keys),
        None => port(outlet),
    };
    let inputs: Vec<Port> = session.inputs().iter().map(port).collect();
    let outputs: Vec<Port> = session.outputs().iter().map(as_clients_see_it).collect();
    source.bind(&inputs, &outputs)
}

/// What a file says of an input or an output.
fn port(outlet: &Outlet) -> Port {
    let (datatype, shape) = match outlet.dtype() {
        ValueType::Tensor { ty, shape, dimension_symbols } => {
            let length = |(at, &length): (usize, &i64)| match dimension_symbols.get(at).map(|name| onnx::name_of(name))
            {
                _ if length >= 0 => usize::try_from(length).ok().map(Length::Fixed),
                None | Some("") => None,
                Some(name) => Some(Length::Named(name.to_owned())),
            };
            // A file that says nothing of a shape is no different from one that says that it is a scalar.
            let is_known = !shape.is_empty();
            (datatype(*ty), is_known.then(|| shape.iter().enumerate().map(length).collect()))
        }
        _ => (None, None),
    };
    Port { name: outlet.name().to_owned(), datatype, shape }
}

fn datatype(found: TensorElementType) -> Option<DataType> {
    Some(match found {
        TensorElementType::Bool => DataType::Bool,
        TensorElementType::Uint8 => DataType::Uint8,
        TensorElementType::Uint16 => DataType::Uint16,
        TensorElementType::Uint32 => DataType::Uint32,
        TensorElementType::Uint64 => DataType::Uint64,
        TensorElementType::Int8 => DataType::Int8,
        TensorElementType::Int16 => DataType::Int16,
        TensorElementType::Int32 => DataType::Int32,
        TensorElementType::Int64 => DataType::Int64,
        TensorElementType::Float16 => DataType::Fp16,
        TensorElementType::Bfloat16 => DataType::Bf16,
        TensorElementType::Float32 => DataType::Fp32,
        TensorElementType::Float64 => DataType::Fp64,
        TensorElementType::String => DataType::Bytes,
        _ => return None,
    })
}

/// A tensor as an input; numbers stay where they are.
fn value(tensor: &Tensor) -> Result<SessionInputValue<'_>, ExecutorError> {
    let shape = &tensor.shape[..];
    macro_rules! view {
        ($numbers:expr) => {
            Ok(TensorRef::from_array_view((shape, $numbers)).map_err(failed)?.into())
        };
    }
    if let Elements::Strings(strings) = tensor.elements() {
        return Ok(strings::tensor(shape, strings).map_err(failed)?.into());
    }
    match tensor.datatype {
        DataType::Bool => {
            let bools = <[bool]>::try_ref_from_bytes(tensor.bytes());
            view!(bools.map_err(|_| ExecutorError("it has bytes that are no BOOL".to_owned()))?)
        }
        DataType::Uint8 => view!(tensor.numbers::<u8>()),
        DataType::Uint16 => view!(tensor.numbers::<u16>()),
        DataType::Uint32 => view!(tensor.numbers::<u32>()),
        DataType::Uint64 => view!(tensor.numbers::<u64>()),
        DataType::Int8 => view!(tensor.numbers::<i8>()),
        DataType::Int16 => view!(tensor.numbers::<i16>()),
        DataType::Int32 => view!(tensor.numbers::<i32>()),
        DataType::Int64 => view!(tensor.numbers::<i64>()),
        DataType::Fp16 => view!(tensor.numbers::<u16>().reinterpret_cast::<f16>()),
        DataType::Bf16 => view!(tensor.numbers::<u16>().reinterpret_cast::<bf16>()),
        DataType::Fp32 => view!(tensor.numbers::<f32>()),
        DataType::Fp64 => view!(tensor.numbers::<f64>()),
        DataType::Bytes => Err(ExecutorError("it has numbers, expected strings".to_owned())),
    }
}

fn output<'a>(value: &'a DynValue, datatype: DataType, taken: &'a Taken) -> Result<Output<'a>, ExecutorError> {
    let elements = match taken {
        Taken::Rows(rows) => return Ok(Output::of(rows)),
        Taken::Strings(strings) => Elements::Strings(strings),
        Taken::InPlace => Elements::Numbers(numbers(value, datatype)?),
    };
    let lengths = value.dtype().tensor_shape().map(|shape| shape.iter());
    let shape = lengths.into_iter().flatten().map(|&length| usize::try_from(length).unwrap_or(0)).collect();
    Ok(Output { shape, elements })
}

/// An output's elements.
fn numbers(value: &DynValue, datatype: DataType) -> Result<&[u8], ExecutorError> {
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
        DataType::Bf16 => elements!(bf16).reinterpret_cast().as_bytes(),
        DataType::Fp32 => elements!(f32).as_bytes(),
        DataType::Fp64 => elements!(f64).as_bytes(),
        DataType::Bytes => return Err(ExecutorError("it has strings, expected numbers".to_owned())),
    })
}

fn failed(error: ort::Error) -> ExecutorError {
    ExecutorError(one_line(&error))
}

#[cfg(test)]
pub(super) mod tests;
