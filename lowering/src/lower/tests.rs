//! Models of a few nodes, and small ones of each family, lowered and interpreted: what comes out is what tract
//! computes.

use tract_onnx::{
    pb::{
        AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
        TypeProto, ValueInfoProto, attribute_proto::AttributeType, tensor_shape_proto::Dimension,
        tensor_shape_proto::dimension, type_proto,
    },
    prelude::*,
};

use super::*;
use crate::{
    interpret::{self, Memory},
    plan::Step,
};

mod checks;
mod families;
mod operators;
mod properties;
mod random;
mod siblings;

const FLOAT: i32 = 1;
const INT64: i32 = 7;
const BOOL: i32 = 9;

/// Numbers that look random, from a seed.
struct Random(u64);

impl Random {
    /// From 0 to 1.
    fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f32::from(u16::try_from(self.0 >> 48).unwrap()) / 65536.0
    }

    fn below(&mut self, end: usize) -> usize {
        ((self.unit() * end as f32) as usize).min(end - 1)
    }

    fn around_zero(&mut self, scale: f32) -> f32 {
        (self.unit() - 0.5) * 2.0 * scale
    }
}

/// An attribute of a node.
enum Attribute<'a> {
    Int(i64),
    Ints(&'a [i64]),
    Float(f32),
    Text(&'a str),
}

use Attribute::{Float, Int, Ints, Text};

/// An ONNX graph in the making. Its names are those of tensors; those of weights are made up.
struct Net {
    graph: GraphProto,
    random: Random,
}

impl Net {
    fn new(seed: u64) -> Self {
        Self { graph: GraphProto { name: "net".into(), ..GraphProto::default() }, random: Random(seed) }
    }

    /// An input; -1 is the batch.
    fn input(&mut self, name: &str, kind: i32, shape: &[i64]) -> String {
        self.graph.input.push(value(name, kind, shape));
        name.into()
    }

    fn output(&mut self, name: &str) {
        self.graph.output.push(ValueInfoProto { name: name.into(), ..ValueInfoProto::default() });
    }

    fn node(&mut self, operator: &str, inputs: &[&str], attributes: &[(&str, Attribute<'_>)]) -> String {
        let name = format!("{}_{}", operator.to_lowercase(), self.graph.node.len());
        self.graph.node.push(NodeProto {
            name: name.clone(),
            op_type: operator.into(),
            input: inputs.iter().map(|&input| input.into()).collect(),
            output: vec![name.clone()],
            attribute: attributes.iter().map(|(name, attribute)| attribute_of(name, attribute)).collect(),
            ..NodeProto::default()
        });
        name
    }

    fn tensor(&mut self, mut tensor: TensorProto, shape: &[usize]) -> String {
        tensor.name = format!("weight_{}", self.graph.initializer.len());
        tensor.dims = shape.iter().map(|&length| length as i64).collect();
        self.graph.initializer.push(tensor);
        self.graph.initializer.last().unwrap().name.clone()
    }

    fn floats(&mut self, shape: &[usize], values: Vec<f32>) -> String {
        let raw_data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(TensorProto { data_type: FLOAT, raw_data, ..TensorProto::default() }, shape)
    }

    fn ints(&mut self, shape: &[usize], values: &[i64]) -> String {
        let raw_data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(TensorProto { data_type: INT64, raw_data, ..TensorProto::default() }, shape)
    }

    fn bools(&mut self, shape: &[usize], values: &[bool]) -> String {
        let raw_data = values.iter().map(|&value| u8::from(value)).collect();
        self.tensor(TensorProto { data_type: BOOL, raw_data, ..TensorProto::default() }, shape)
    }

    fn scalar(&mut self, value: f32) -> String {
        self.floats(&[], vec![value])
    }

    fn weight(&mut self, shape: &[usize], scale: f32) -> String {
        let values = (0..shape.iter().product()).map(|_| self.random.around_zero(scale)).collect();
        self.floats(shape, values)
    }

    /// A weight of numbers around one.
    fn gain(&mut self, shape: &[usize]) -> String {
        let values = (0..shape.iter().product()).map(|_| 1.0 + self.random.around_zero(0.3)).collect();
        self.floats(shape, values)
    }

    fn graph(&self) -> (TypedModel, Symbol) {
        self.try_graph().unwrap()
    }

    fn try_graph(&self) -> TractResult<(TypedModel, Symbol)> {
        let (graph, batch) = self.typed()?;
        Ok((graph.into_decluttered()?, batch))
    }

    fn typed(&self) -> TractResult<(TypedModel, Symbol)> {
        let version = OperatorSetIdProto { domain: String::new(), version: 17 };
        let model = ModelProto {
            ir_version: 8,
            opset_import: vec![version],
            graph: Some(self.graph.clone()),
            ..ModelProto::default()
        };
        let graph = tract_onnx::onnx().model_for_proto_model(&model)?;
        let batch = graph.symbols.sym("batch");
        Ok((graph.into_typed()?, batch))
    }
}

fn value(name: &str, elem_type: i32, shape: &[i64]) -> ValueInfoProto {
    let length = |&length: &i64| match length {
        -1 => dimension::Value::DimParam("batch".into()),
        length => dimension::Value::DimValue(length),
    };
    let dim = shape.iter().map(|it| Dimension { value: Some(length(it)), ..Dimension::default() }).collect();
    let tensor = type_proto::Tensor { elem_type, shape: Some(TensorShapeProto { dim }) };
    let r#type = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    ValueInfoProto { name: name.into(), r#type: Some(r#type), ..ValueInfoProto::default() }
}

fn attribute_of(name: &str, attribute: &Attribute<'_>) -> AttributeProto {
    let mut proto = AttributeProto { name: name.into(), ..AttributeProto::default() };
    let kind = match *attribute {
        Int(value) => {
            proto.i = value;
            AttributeType::Int
        }
        Ints(values) => {
            proto.ints = values.to_vec();
            AttributeType::Ints
        }
        Float(value) => {
            proto.f = value;
            AttributeType::Float
        }
        Text(value) => {
            proto.s = value.as_bytes().to_vec();
            AttributeType::String
        }
    };
    proto.r#type = kind.into();
    proto
}

/// Inputs of the graph for a batch: numbers around zero, indexes below `indices`.
fn inputs_of(graph: &TypedModel, batch: (&Symbol, usize), random: &mut Random, indices: usize) -> Vec<Tensor> {
    let symbols = SymbolValues::default().with(batch.0, batch.1 as i64);
    let input = |index: usize| {
        let fact = graph.input_fact(index).unwrap();
        let shape = fact.shape.eval_to_usize(&symbols).unwrap().into_owned();
        let mut tensor = Tensor::zero_dt(fact.datum_type, &shape).unwrap();
        let mut plain = tensor.try_as_plain_ram_mut().unwrap();
        match fact.datum_type {
            DatumType::F32 => {
                plain.as_slice_mut::<f32>().unwrap().iter_mut().for_each(|it| *it = random.around_zero(1.5));
            }
            DatumType::I64 => {
                plain.as_slice_mut::<i64>().unwrap().iter_mut().for_each(|it| *it = random.below(indices) as i64);
            }
            other => panic!("an input of {other:?}"),
        }
        tensor
    };
    (0..graph.inputs.len()).map(input).collect()
}

/// What tract makes of inputs.
fn computed(graph: &TypedModel, batch: (&Symbol, usize), inputs: &[Tensor]) -> TractResult<TVec<TValue>> {
    let subs = std::collections::HashMap::from([(batch.0.clone(), batch.1.to_dim())]);
    let graph = graph.set_symbols(&subs)?.into_decluttered()?.into_runnable()?;
    graph.run(inputs.iter().map(|it| it.clone().into_tvalue()).collect())
}

/// What the plan makes of inputs, and its faults.
fn interpreted(plan: &Plan, weights: &[u8], inputs: &[Tensor]) -> (Vec<Tensor>, Vec<u32>) {
    // What is read before it is written shows.
    let mut arena = vec![0x7f; plan.arena_bytes];
    for (port, tensor) in plan.inputs.iter().zip(inputs) {
        assert_eq!(port.shape, tensor.shape(), "{}", port.name);
        arena[port.offset..][..port.bytes()].copy_from_slice(tensor.as_bytes());
    }
    interpret::run(plan, &mut Memory { arena: &mut arena, weights });
    let tensor = |port: &Port| {
        let datum_type = match port.ty {
            Type::F32 => DatumType::F32,
            Type::F16 => DatumType::F16,
            Type::I64 => DatumType::I64,
            Type::I32 => DatumType::I32,
            Type::U8 => DatumType::U8,
            Type::Bool => DatumType::Bool,
        };
        let mut tensor = Tensor::zero_dt(datum_type, &port.shape).unwrap();
        tensor.as_bytes_mut().copy_from_slice(&arena[port.offset..][..port.bytes()]);
        tensor
    };
    let faults = plan.faults.map_or(Vec::new(), |at| {
        let words = arena[at..][..4 * plan.batch].chunks_exact(4);
        words.map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    });
    (plan.outputs.iter().map(tensor).collect(), faults)
}

/// The furthest that two tensors are apart, relative to the largest number.
fn distance(found: &Tensor, expected: &Tensor) -> f32 {
    assert_eq!(found.shape(), expected.shape());
    assert_eq!(found.datum_type(), expected.datum_type());
    let (found, expected) = (image::floats(found).unwrap(), image::floats(expected).unwrap());
    let largest = expected.iter().fold(1e-3_f32, |largest, value| largest.max(value.abs()));
    let apart = found.iter().zip(&expected).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
    apart.fold(0.0_f32, |most, apart| if apart.is_nan() { f32::INFINITY } else { most.max(apart) }) / largest
}

/// Numbers that binary16 has, too.
fn round_to_half(tensor: &mut Tensor) {
    let own = tensor.datum_type();
    let half = tensor.cast_to_dt(DatumType::F16).unwrap().into_owned();
    *tensor = half.cast_to_dt(own).unwrap().into_owned();
}

/// That lowered plans compute what tract does, for two sizes and both precisions; the plans of binary32.
fn agrees(net: &Net) -> Vec<Plan> {
    agrees_within(net, 1e-4, 2e-2)
}

fn agrees_within(net: &Net, single: f32, half: f32) -> Vec<Plan> {
    let (graph, batch) = net.graph();
    let mut plans = Vec::new();
    for (precision, limit) in [(Precision::Fp32, single), (Precision::Fp16, half)] {
        let lowered =
            lower(&graph, Some(&batch), &[3, 1], precision).unwrap_or_else(|error| panic!("{error}\n{graph}"));
        assert_eq!(lowered.plans.iter().map(|plan| plan.batch).collect::<Vec<_>>(), [1, 3]);
        for plan in &lowered.plans {
            checks::check(plan, &lowered.weights);
            let mut inputs = inputs_of(&graph, (&batch, plan.batch), &mut Random(7), 5);
            if precision == Precision::Fp16 {
                // What cancels out in a sum is as far off as its terms were rounded, however small it is.
                inputs.iter_mut().filter(|input| input.datum_type().is_float()).for_each(round_to_half);
            }
            let expected = computed(&graph, (&batch, plan.batch), &inputs).unwrap();
            let (found, faults) = interpreted(plan, &lowered.weights, &inputs);
            assert!(faults.iter().all(|&fault| fault == 0), "{faults:?}");
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let apart = distance(found, expected);
                assert!(
                    apart <= limit,
                    "output {index}, {precision:?}, batch {}: {apart} apart\n{found:?}\n{expected:?}\n{graph}\n{}",
                    plan.batch,
                    listed(plan)
                );
            }
        }
        if precision == Precision::Fp32 {
            plans = lowered.plans;
        }
    }
    plans
}

/// The steps, a line each.
fn listed(plan: &Plan) -> String {
    plan.steps.iter().map(|step| format!("{step:?}\n")).collect()
}

/// How many steps of each kind a plan has: convolutions, products, pointwise ones, and others.
fn counts(plan: &Plan) -> [usize; 4] {
    let mut counts = [0; 4];
    for step in &plan.steps {
        let kind = match step {
            Step::Conv(_) => 0,
            Step::Matmul(_) => 1,
            Step::Pointwise(_) => 2,
            _ => 3,
        };
        counts[kind] += 1;
    }
    counts
}
