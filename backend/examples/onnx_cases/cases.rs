//! A case: a model, what it is asked, and what must come out.

use std::{collections::BTreeSet, fs, iter, path::Path};

use prost::Message as _;
use repository::{
    DataType,
    onnx::{
        Signature, datatype,
        proto::{ModelProto, TensorProto},
    },
};

use crate::Error;

/// The configuration of a case that brings none.
const WITHOUT_BATCHES: &str = "max_batch_size: 0\n";

/// A model, with one or more requests.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) proto: ModelProto,
    /// As it is, with what no message of ours declares.
    pub(crate) file: Vec<u8>,
    /// Of a kind that users bring: how far numbers may be off, as a part of each or in all.
    pub(crate) tolerance: Option<[f64; 2]>,
    /// Its `config.pbtxt`. Where that has batches, tensors of requests have a row for each task.
    pub(crate) config: String,
    pub(crate) requests: Vec<Request>,
    /// What may come out as well, if anything may: of each request.
    pub(crate) unfused: Vec<Vec<Value>>,
}

/// Inputs, and what must come out.
pub(crate) type Request = [Vec<Value>; 2];

impl Case {
    /// `None` if its tensors are no tensors, or of a type that no client can send.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, Error> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let file = fs::read(folder.join("model.onnx"))?;
        let proto = ModelProto::decode(&*file)?;
        let Signature { inputs, outputs } = Signature::of(proto.graph.as_ref().ok_or("no graph")?);
        let are_tensors = inputs.iter().chain(&outputs).all(|value| value.datatype.is_some());
        let (mut requests, mut unfused) = (Vec::new(), Vec::new());
        for number in 0.. {
            let set = folder.join(format!("test_data_set_{number}"));
            if !are_tensors || !set.is_dir() {
                break;
            }
            let Some(sides) = ["input", "output"].iter().map(|side| values(&set, side)).collect::<Option<Vec<_>>>()
            else {
                return Ok(None);
            };
            requests.push(sides.try_into().map_err(|_| "two sides")?);
            unfused.extend(values(&set, "unfused").filter(|values| !values.is_empty()));
        }
        let config = fs::read_to_string(folder.join("config.pbtxt")).unwrap_or_else(|_| WITHOUT_BATCHES.to_owned());
        let tolerance = fs::read_to_string(folder.join("tolerance")).ok();
        let tolerance = tolerance.map(|text| text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>());
        let tolerance = tolerance.transpose()?.map(|both| both.try_into().map_err(|_| "tolerance: expected two"));
        let tolerance = tolerance.transpose()?;
        Ok(Some(Self { name, proto, file, tolerance, config, requests, unfused })
            .filter(|case| !case.requests.is_empty()))
    }

    /// A network without a folder: its input is known, and what must come out lies beside it.
    pub(crate) fn network(file: &Path) -> Result<Self, Error> {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = fs::read(file)?;
        let proto = ModelProto::decode(&*bytes)?;
        let graph = proto.graph.as_ref().ok_or("no graph")?;
        let weights: BTreeSet<_> = graph.initializer.iter().map(|weight| &weight.name).collect();
        let input = graph.input.iter().find(|input| !weights.contains(&input.name)).ok_or("no input")?;
        let kind = input.r#type.as_ref().and_then(|kind| kind.tensor_type.as_ref());
        let shape = kind.and_then(|kind| kind.shape.as_ref()).ok_or("an input without a shape")?;
        let lengths = shape.dim.iter().map(|dim| dim.dim_value.map_or(1, |length| length as usize));
        let shape: Vec<usize> = lengths.collect();
        let count = shape.iter().product::<usize>();
        let data = (0..count).flat_map(|at| ((at as f64 / count as f64) as f32).to_le_bytes()).collect();
        let output = TensorProto::decode(&*fs::read(file.with_file_name(format!("{name}_output_0.pb")))?)?;
        let output = value(output).ok_or("an output that is no tensor")?;
        let requests = vec![[vec![Value { datatype: DataType::Fp32, shape, data }], vec![output]]];
        let config = WITHOUT_BATCHES.to_owned();
        Ok(Self { name, proto, file: bytes, tolerance: None, config, requests, unfused: Vec::new() })
    }

    /// The same with all inputs but the first as weights, which is how exporters write axes, pads, scales and kernels;
    /// `None` if there is but one input, another one in each request, or a configuration that names them.
    pub(crate) fn exported(&self) -> Option<Self> {
        let [[inputs, expected]] = &self.requests[..] else { return None };
        if self.config != WITHOUT_BATCHES || self.tolerance.is_some() {
            return None;
        }
        let mut case = self.clone();
        let graph = case.proto.graph.as_mut()?;
        let weights: BTreeSet<_> = graph.initializer.iter().map(|weight| weight.name.clone()).collect();
        let asked = graph.input.iter().map(|input| input.name.clone()).filter(|name| !weights.contains(name));
        let [_, rest @ ..] = &asked.collect::<Vec<_>>()[..] else { return None };
        let (first, others) = inputs.split_first().filter(|(_, others)| !others.is_empty())?;
        graph.input.retain(|input| !rest.contains(&input.name));
        for (name, value) in iter::zip(rest, others) {
            graph.initializer.push(value.weight(name)?);
        }
        case.file = case.proto.encode_to_vec();
        case.name += " (exported)";
        case.requests = vec![[vec![first.clone()], expected.clone()]];
        Some(case)
    }

    /// Which kind it is of, if users bring such: what its name begins with.
    pub(crate) fn kind(&self) -> Option<&str> {
        self.tolerance.and(self.name.split('-').next())
    }

    /// The operators of its graph.
    pub(crate) fn operators(&self) -> BTreeSet<&str> {
        let nodes = self.proto.graph.iter().flat_map(|graph| &graph.node);
        nodes.map(|node| node.op_type.as_str()).collect()
    }
}

/// A tensor as clients send it.
#[derive(Clone)]
pub(crate) struct Value {
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

impl Value {
    /// What belongs to one of several tasks.
    pub(crate) fn row(&self, task: usize, tasks: usize) -> Self {
        let own = self.shape[1..].iter().product::<usize>();
        let data = match self.datatype {
            DataType::Bytes => self.strings().skip(task * own).take(own).flatten().copied().collect(),
            _ => self.data.chunks_exact((self.data.len() / tasks).max(1)).nth(task).unwrap_or_default().to_vec(),
        };
        Self { datatype: self.datatype, shape: self.shape[1..].to_vec(), data }
    }

    /// Each string, with its length before it.
    fn strings(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.data[..];
        iter::from_fn(move || {
            let (head, _) = rest.split_first_chunk::<4>()?;
            let (string, others) = rest.split_at_checked(head.len() + u32::from_le_bytes(*head) as usize)?;
            rest = others;
            Some(string)
        })
    }

    fn weight(&self, name: &str) -> Option<TensorProto> {
        if self.datatype == DataType::Bytes {
            return None;
        }
        Some(TensorProto {
            name: name.to_owned(),
            data_type: (1..17).find(|&number| datatype(number) == Some(self.datatype))?,
            dims: self.shape.iter().map(|&length| length as i64).collect(),
            raw_data: self.data.clone().into(),
            ..TensorProto::default()
        })
    }
}

/// One side of a request; `None` if it has what no client can send.
fn values(set: &Path, side: &str) -> Option<Vec<Value>> {
    let files = (0..).map(|number| set.join(format!("{side}_{number}.pb"))).take_while(|file| file.is_file());
    files.map(|file| value(TensorProto::decode(&*fs::read(file).ok()?).ok()?)).collect()
}

/// A tensor has its elements as bytes, or in a list of numbers that are at least as wide.
fn value(tensor: TensorProto) -> Option<Value> {
    let shape = tensor.dims.iter().map(|&length| usize::try_from(length).ok()).collect::<Option<_>>()?;
    let integers =
        |bytes: usize| tensor.int32_data.iter().flat_map(move |number| number.to_le_bytes()[..bytes].to_vec());
    let datatype = datatype(tensor.data_type)?;
    let listed: Vec<u8> = match datatype {
        DataType::Fp32 => tensor.float_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DataType::Fp64 => tensor.double_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DataType::Int64 => tensor.int64_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DataType::Uint64 => tensor.uint64_data.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DataType::Uint32 => tensor.uint64_data.iter().flat_map(|&number| (number as u32).to_le_bytes()).collect(),
        DataType::Bytes => {
            let strings = tensor.string_data.iter();
            strings.flat_map(|text| (text.len() as u32).to_le_bytes().into_iter().chain(text.iter().copied())).collect()
        }
        other => integers(other.bytes()).collect(),
    };
    let data = if tensor.raw_data.is_empty() { listed } else { tensor.raw_data.to_vec() };
    Some(Value { datatype, shape, data })
}
