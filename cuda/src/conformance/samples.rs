//! Models that are small enough to be computed on the CPU beside. Their numbers are small integers, so what they
//! compute is exact on any device, in any precision and in any order.

use std::sync::Arc;

use lowering::{
    Place, Plan, Port, Step, Type, interpret,
    plan::{
        ALIGNMENT, Activation, Binary, Factor, Gather, Instruction, Matmul, Numbers, Operand, Pointwise, Precision,
        Unary, Value, View,
    },
};
use proto::weights::PAGE_BYTES;

use crate::random::Random;

/// What a sample computes for each task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `x * w + c`, with w and c as far from each other as the weights are long.
    Affine,
    /// Rows of a table by indexes, some of which there may not be, and `-x`: two inputs, two outputs, faults.
    Table,
    /// `relu(x w + c)`.
    Product,
    /// `-x`: no weights.
    Negation,
}

/// A model.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    /// Elements of x.
    width: usize,
    pub(crate) weights: Vec<u8>,
}

/// Indexes of a task of [`Kind::Table`].
const INDEXES: usize = 2;
/// Rows of its table.
const ROWS: usize = 5;
/// Outputs of a task of [`Kind::Product`].
const COLUMNS: usize = 3;

impl Sample {
    /// A model with random weights, of at least so many pages if it is affine.
    pub(crate) fn new(kind: Kind, width: usize, pages: usize, random: &mut Random) -> Self {
        let aligned = |elements: usize| elements.next_multiple_of(ALIGNMENT / 4);
        let elements = match kind {
            // The last vector begins on the last page.
            Kind::Affine => ((pages.max(1) - 1) * PAGE_BYTES as usize / 4).max(aligned(width)) + width,
            Kind::Table => ROWS * width,
            Kind::Product => aligned(width * COLUMNS) + COLUMNS,
            Kind::Negation => 0,
        };
        // Nothing is read of what lies between the two vectors.
        let front = if kind == Kind::Affine { width } else { elements };
        let mut weights = vec![0; elements * 4];
        for element in (0..front).chain((elements - width.min(elements)).max(front)..elements) {
            weights[4 * element..][..4].copy_from_slice(&small(random).to_le_bytes());
        }
        Self { kind, width, weights }
    }

    /// The same for narrower tasks, with a part of the same weights.
    pub(crate) fn narrowed(&self, width: usize) -> Self {
        Self { width, ..self.clone() }
    }

    /// Its plans for these sizes.
    pub(crate) fn plans(&self, sizes: &[usize]) -> Vec<Arc<Plan>> {
        sizes.iter().map(|&batch| Arc::new(self.plan(batch))).collect()
    }

    pub(crate) fn input_bytes(&self) -> usize {
        4 * self.width + if self.kind == Kind::Table { 8 * INDEXES } else { 0 }
    }

    pub(crate) fn output_bytes(&self) -> usize {
        4 * match self.kind {
            Kind::Affine | Kind::Negation => self.width,
            Kind::Table => (INDEXES + 1) * self.width,
            Kind::Product => COLUMNS,
        }
    }

    /// Inputs of so many tasks, and which of them the model cannot take.
    pub(crate) fn inputs(&self, batch: usize, random: &mut Random) -> (Vec<u8>, Vec<usize>) {
        let (mut bytes, mut faults) = (Vec::new(), Vec::new());
        for task in 0..batch {
            if self.kind == Kind::Table {
                let has_fault = random.below(4) == 0;
                let indexes = (0..INDEXES).map(|_| random.below(ROWS) as i64 + if has_fault { 100 } else { 0 });
                bytes.extend(indexes.flat_map(i64::to_le_bytes));
                faults.extend(has_fault.then_some(task));
            }
            bytes.extend((0..self.width).flat_map(|_| small(random).to_le_bytes()));
        }
        (bytes, faults)
    }

    /// What the model makes of these tasks, by the interpreter and a plan of exactly that size.
    pub(crate) fn outputs(&self, inputs: &[u8]) -> Vec<f32> {
        let batch = inputs.len() / self.input_bytes();
        let plan = self.plan(batch);
        let mut arena = vec![0; plan.arena_bytes];
        let mut tasks = inputs;
        for task in 0..batch {
            for port in &plan.inputs {
                let bytes = port.bytes() / batch;
                let (tensor, rest) = tasks.split_at(bytes);
                arena[port.offset + task * bytes..][..bytes].copy_from_slice(tensor);
                tasks = rest;
            }
        }
        interpret::run(&plan, &mut lowering::interpret::Memory { arena: &mut arena, weights: &self.weights });
        let tensors = (0..batch).flat_map(|task| plan.outputs.iter().map(move |port| (task, port)));
        let bytes = tensors.flat_map(|(task, port)| {
            let bytes = port.bytes() / batch;
            arena[port.offset + task * bytes..][..bytes].iter().copied()
        });
        floats(&bytes.collect::<Vec<_>>())
    }

    fn plan(&self, batch: usize) -> Plan {
        let mut layout = Layout(0);
        let width = self.width;
        let x = layout.port("x", Type::F32, &[batch, width]);
        let last = self.weights.len() / 4;
        let mut plan = Plan {
            batch,
            precision: Precision::Fp32,
            inputs: vec![x.clone()],
            outputs: Vec::new(),
            faults: None,
            steps: Vec::new(),
            arena_bytes: 0,
        };
        match self.kind {
            Kind::Affine => {
                let scaled = layout.port("", Type::F32, &[batch, width]);
                let y = layout.port("y", Type::F32, &[batch, width]);
                let weights = |element: usize| row(float(Place::Weights(4 * element)));
                plan.steps.push(pointwise(&[dense(&x), weights(0)], &scaled, Binary::Mul));
                plan.steps.push(pointwise(&[dense(&scaled), weights(last - width)], &y, Binary::Add));
                plan.outputs = vec![y];
            }
            Kind::Table => self.table(&mut layout, &mut plan),
            Kind::Product => {
                let y = layout.port("y", Type::F32, &[batch, COLUMNS]);
                plan.steps.push(product(&x, &y, width, batch));
                plan.outputs = vec![y];
            }
            Kind::Negation => {
                let y = layout.port("y", Type::F32, &[batch, width]);
                plan.steps.push(negation(&x, &y));
                plan.outputs = vec![y];
            }
        }
        Plan { arena_bytes: layout.0, ..plan }
    }

    fn table(&self, layout: &mut Layout, plan: &mut Plan) {
        let (batch, width) = (plan.batch, self.width);
        let indexes = layout.port("indexes", Type::I64, &[batch, INDEXES]);
        let rows = layout.port("rows", Type::F32, &[batch, INDEXES, width]);
        let negated = layout.port("negated", Type::F32, &[batch, width]);
        plan.faults = Some(layout.place(4 * batch));
        plan.steps.push(Step::Gather(Gather {
            input: float(Place::Weights(0)),
            indices: Operand { place: Place::Arena(indexes.offset), ty: Type::I64 },
            output: float(Place::Arena(rows.offset)),
            outer: 1,
            length: ROWS,
            inner: width,
            count: batch * INDEXES,
            indices_per_task: INDEXES,
        }));
        plan.steps.push(negation(&plan.inputs[0], &negated));
        plan.inputs.insert(0, indexes);
        plan.outputs = vec![rows, negated];
    }
}

/// Bytes as numbers.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|element| f32::from_le_bytes(element.try_into().expect("four bytes"))).collect()
}

fn small(random: &mut Random) -> f32 {
    random.below(17) as f32 - 8.0
}

/// How much of the arena is dealt.
struct Layout(usize);

impl Layout {
    fn place(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 += bytes.next_multiple_of(ALIGNMENT);
        at
    }

    fn port(&mut self, name: &str, ty: Type, shape: &[usize]) -> Port {
        let offset = self.place(shape.iter().product::<usize>() * ty.bytes());
        Port { name: name.to_owned(), offset, ty, shape: shape.to_vec() }
    }
}

fn float(place: Place) -> Operand {
    Operand { place, ty: Type::F32 }
}

/// All rows.
fn dense(port: &Port) -> View {
    View { base: float(Place::Arena(port.offset)), strides: vec![port.shape[1] as i64, 1] }
}

/// One row for all.
fn row(base: Operand) -> View {
    View { base, strides: vec![0, 1] }
}

fn pointwise(inputs: &[View], output: &Port, op: Binary) -> Step {
    Step::Pointwise(Pointwise {
        shape: output.shape.clone(),
        inputs: inputs.to_vec(),
        output: dense(output),
        numbers: Numbers::Float,
        code: vec![Instruction::Load(Value::Input(0)), Instruction::Binary(op, Value::Input(1))],
    })
}

fn negation(input: &Port, output: &Port) -> Step {
    Step::Pointwise(Pointwise {
        shape: output.shape.clone(),
        inputs: vec![dense(input)],
        output: dense(output),
        numbers: Numbers::Float,
        code: vec![Instruction::Load(Value::Input(0)), Instruction::Unary(Unary::Neg)],
    })
}

fn product(x: &Port, y: &Port, width: usize, batch: usize) -> Step {
    let factor = |place, row_stride| Factor { base: float(place), row_stride, batch_stride: 0, transposed: false };
    Step::Matmul(Matmul {
        a: factor(Place::Arena(x.offset), width),
        b: factor(Place::Weights(0), COLUMNS),
        bias: Some(float(Place::Weights((4 * width * COLUMNS).next_multiple_of(ALIGNMENT)))),
        residual: None,
        output: factor(Place::Arena(y.offset), COLUMNS),
        alpha: 1.0,
        activation: Activation::Relu,
        batches: 1,
        m: batch,
        n: COLUMNS,
        k: width,
    })
}
