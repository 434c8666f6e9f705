//! Steps of plans as calls with fixed parameters. Which algorithm computes a convolution or a product is found
//! out by trying what the libraries propose; the same parameters recur in a model, across its batch sizes and across
//! models, and are tried once.

use std::{collections::HashMap, sync::Arc};

use lowering::{
    Place, Plan, Step,
    plan::{
        ALIGNMENT, Activation, Binary, Conv, Factor, Instruction, Matmul, Numbers, Operand, Pointwise, Precision,
        Value, View,
    },
};
use proto::Span;

use super::{
    context::{Context, Queue},
    convolution::{self, Convolution, Dnn},
    kernels::{Kernels, Launch},
    memory::{self, Workspace},
    product::{self, Lt, Product},
    timer::Timer,
};
use crate::{
    DriverError,
    driver::{Address, Bases},
};

/// What cuBLASLt and cuDNN may use while they run; plans run one after another and share it. NVIDIA recommends 32 MiB
/// for cuBLAS on Hopper; a padded image ([`pad`]) has to have room, too, and what asks for more is not tried.
const WORKSPACE_BYTES: usize = 64 << 20;

/// One call, ready to be made any number of times.
#[derive(Debug)]
pub(super) enum Call {
    /// Fills with zeros.
    Clear(Address, usize),
    /// One of our own kernels.
    Launch(Launch),
    /// cuBLASLt.
    Product(Product),
    /// cuDNN.
    Convolution(Convolution),
}

/// How a convolution is computed.
#[derive(Debug, Clone, Copy)]
enum Choice {
    /// As a matrix product.
    Product,
    /// By cuDNN as a whole.
    Whole(convolution::Algorithm),
    /// By cuDNN, without bias, residual and activation, which come in a step of their own.
    Bare(convolution::Algorithm),
    /// By our own kernels.
    Own,
}

/// The libraries, and what has been found out about them.
#[derive(Debug)]
pub(super) struct Steps {
    algorithms: HashMap<product::Key, Option<(product::Algorithm, Span)>>,
    choices: HashMap<convolution::Key, Choice>,
    timer: Timer,
    kernels: Kernels,
    dnn: Dnn,
    lt: Lt,
    workspace: Workspace,
    queue: Arc<Queue>,
    _context: Arc<Context>,
}

impl Steps {
    /// For one stream of the context, which is current.
    pub(super) fn new(context: &Arc<Context>, queue: &Arc<Queue>) -> Result<Self, DriverError> {
        Ok(Self {
            algorithms: HashMap::new(),
            choices: HashMap::new(),
            timer: Timer::new(context)?,
            kernels: Kernels::load()?,
            dnn: Dnn::new(queue.raw())?,
            lt: Lt::new()?,
            workspace: Workspace::new(context, WORKSPACE_BYTES)?,
            queue: Arc::clone(queue),
            _context: Arc::clone(context),
        })
    }

    /// Puts a call on the stream.
    pub(super) fn enqueue(&self, call: &Call) -> Result<(), DriverError> {
        match call {
            Call::Clear(at, bytes) => memory::clear(&self.queue, *at, *bytes),
            Call::Launch(launch) => launch.enqueue(self.queue.raw()),
            Call::Product(product) => product.enqueue(&self.lt, self.queue.raw()),
            Call::Convolution(convolution) => convolution.enqueue(&self.dnn),
        }
    }

    /// All of a plan's calls, in order.
    pub(super) fn prepare(&mut self, plan: &Plan, at: Bases) -> Result<Vec<Call>, DriverError> {
        let mut calls = Vec::new();
        if let Some(faults) = plan.faults {
            calls.push(Call::Clear(at.arena.plus(faults as u64), plan.batch * size_of::<u32>()));
        }
        for (index, step) in plan.steps.iter().enumerate() {
            let made = match step {
                Step::Conv(conv) => self.convolution(conv, plan.precision, at),
                Step::Matmul(matmul) => self.matmul(matmul, plan.precision, at),
                other => self.own(other, plan.faults, at),
            };
            calls.extend(made.map_err(|error| DriverError(format!("step {index}, {}: {error}", kind(step))))?);
        }
        // What was tried is done, and what it wrote is garbage.
        self.queue.synchronize()?;
        Ok(calls)
    }

    fn own(&self, step: &Step, faults: Option<usize>, at: Bases) -> Result<Vec<Call>, DriverError> {
        Ok(self.kernels.prepare(step, faults, at)?.into_iter().map(Call::Launch).collect())
    }

    fn matmul(&mut self, matmul: &Matmul, precision: Precision, at: Bases) -> Result<Vec<Call>, DriverError> {
        if let Some((product, _)) = self.product(matmul, precision, at)? {
            return Ok(vec![Call::Product(product)]);
        }
        let bare = Matmul { bias: None, activation: Activation::None, ..matmul.clone() };
        if bare != *matmul
            && let Some((product, _)) = self.product(&bare, precision, at)?
        {
            let mut calls = vec![Call::Product(product)];
            calls.extend(self.own(&Step::Pointwise(finish_product(matmul)), None, at)?);
            return Ok(calls);
        }
        Err(DriverError(format!("cuBLASLt has no algorithm for {matmul:?}")))
    }

    /// The fastest way that cuBLASLt has, and how long it takes; `None` if it has none.
    fn product(
        &mut self,
        matmul: &Matmul,
        precision: Precision,
        at: Bases,
    ) -> Result<Option<(Product, Span)>, DriverError> {
        let addresses = product::Addresses::new(matmul, |operand| resolve(operand, at));
        let key = product::Key::new(matmul, precision, &addresses);
        let workspace = (self.workspace.address(), WORKSPACE_BYTES);
        let mut product = Product::new(&key, &addresses, matmul.alpha, workspace)?;
        let known = self.algorithms.get(&key).copied();
        let best = match known {
            Some(best) => best,
            None => {
                let mut tried = Vec::new();
                for algorithm in product.proposals(&self.lt, &key)? {
                    product.algorithm = Some(algorithm);
                    match self.timer.time(&self.queue, || product.enqueue(&self.lt, self.queue.raw())) {
                        Ok(time) => tried.push((algorithm, time)),
                        Err(error) => tracing::debug!(%error, ?key, "cuBLASLt refuses an algorithm of its own"),
                    }
                }
                tracing::debug!(times = ?tried.iter().map(|tried| tried.1).collect::<Vec<_>>(), ?key, "products");
                let best = tried.into_iter().min_by_key(|&(_, time)| time);
                self.algorithms.insert(key, best);
                best
            }
        };
        product.algorithm = best.map(|(algorithm, _)| algorithm);
        Ok(best.map(|(_, time)| (product, time)))
    }

    fn convolution(&mut self, conv: &Conv, precision: Precision, at: Bases) -> Result<Vec<Call>, DriverError> {
        let tensors = addresses(conv, at);
        let key = convolution::Key::new(conv, precision, &tensors);
        let choice = match self.choices.get(&key) {
            Some(choice) => *choice,
            None => {
                let choice = self.choose(conv, &key, precision, at)?;
                tracing::debug!(?choice, ?key, "chose");
                self.choices.insert(key, choice);
                choice
            }
        };
        match choice {
            Choice::Product => self.matmul(&as_product(conv), precision, at),
            Choice::Whole(algorithm) => self.by_dnn(&key, algorithm, conv, at),
            Choice::Bare(algorithm) => {
                let mut calls = self.by_dnn(&key.bare(), algorithm, conv, at)?;
                calls.extend(self.own(&Step::Pointwise(finish_convolution(conv)), None, at)?);
                Ok(calls)
            }
            Choice::Own => self.own(&Step::Conv(conv.clone()), None, at),
        }
    }

    fn choose(
        &mut self,
        conv: &Conv,
        key: &convolution::Key,
        precision: Precision,
        at: Bases,
    ) -> Result<Choice, DriverError> {
        // A depthwise convolution has no product in it that a tensor core could compute.
        if key.is_depthwise() {
            return Ok(Choice::Own);
        }
        let tried = if key.is_one_call() { self.fastest(key, conv, at)? } else { None };
        if key.is_product()
            && let Some((_, time)) = self.product(&as_product(conv), precision, at)?
            && tried.is_none_or(|(_, other)| time <= other)
        {
            return Ok(Choice::Product);
        }
        if let Some((algorithm, _)) = tried {
            return Ok(Choice::Whole(algorithm));
        }
        if key.can_be_finished()
            && let Some((algorithm, _)) = self.fastest(&key.bare(), conv, at)?
        {
            return Ok(Choice::Bare(algorithm));
        }
        Ok(Choice::Own)
    }

    /// The fastest of cuDNN's algorithms, and how long it takes; `None` if it has none.
    fn fastest(
        &self,
        key: &convolution::Key,
        conv: &Conv,
        at: Bases,
    ) -> Result<Option<(convolution::Algorithm, Span)>, DriverError> {
        let Some((seen, workspace_bytes)) = room(key) else { return Ok(None) };
        let proposals = match convolution::proposals(&self.dnn, &seen, workspace_bytes) {
            Ok(proposals) => proposals,
            Err(error) => {
                tracing::debug!(%error, ?key, "cuDNN proposes nothing");
                return Ok(None);
            }
        };
        let mut tried = Vec::new();
        for algorithm in proposals {
            let calls = self.by_dnn(key, algorithm, conv, at)?;
            match self.timer.time(&self.queue, || calls.iter().try_for_each(|call| self.enqueue(call))) {
                Ok(time) => tried.push((algorithm, time)),
                Err(error) => tracing::debug!(%error, ?key, ?algorithm, "cuDNN refuses an algorithm of its own"),
            }
        }
        tracing::debug!(?tried, ?key, "cuDNN's algorithms");
        Ok(tried.into_iter().min_by_key(|&(_, time)| time))
    }

    /// By cuDNN; of an image in the workspace with all the zeros that the filter sees where cuDNN would not see them.
    fn by_dnn(
        &self,
        key: &convolution::Key,
        algorithm: convolution::Algorithm,
        conv: &Conv,
        at: Bases,
    ) -> Result<Vec<Call>, DriverError> {
        let tensors = addresses(conv, at);
        let workspace = self.workspace.address();
        if key.is_symmetric() {
            return Ok(vec![Call::Convolution(Convolution::new(key, algorithm, &tensors, workspace)?)]);
        }
        let padded = key.padded();
        let bytes = padded.input_bytes().next_multiple_of(ALIGNMENT);
        let mut calls = vec![Call::Clear(workspace, bytes)];
        let bases = Bases { arena: tensors.input, weights: workspace };
        calls.extend(self.own(&Step::Pointwise(pad(conv, key.seen())), None, bases)?);
        let tensors = convolution::Addresses { input: workspace, ..tensors };
        let rest = workspace.plus(bytes as u64);
        calls.push(Call::Convolution(Convolution::new(&padded, algorithm, &tensors, rest)?));
        Ok(calls)
    }
}

/// What cuDNN is asked for, and the bytes of workspace that are left to it; `None` if a padded image has no room there.
fn room(key: &convolution::Key) -> Option<(convolution::Key, usize)> {
    if key.is_symmetric() {
        return Some((*key, WORKSPACE_BYTES));
    }
    let padded = key.padded();
    let rest = WORKSPACE_BYTES.checked_sub(padded.input_bytes().next_multiple_of(ALIGNMENT))?;
    Some((padded, rest))
}

/// Copies the images of a convolution, whose place is the arena's beginning, to the weights' beginning, into images
/// that are as large as what the filter sees.
fn pad(conv: &Conv, seen: [usize; 2]) -> Pointwise {
    let ty = conv.input.ty;
    let kept: [usize; 2] = std::array::from_fn(|i| conv.size[i].min(seen[i].saturating_sub(conv.pads[i])));
    let strides = |size: [usize; 2]| vec![(size[0] * size[1] * conv.c) as i64, (size[1] * conv.c) as i64, 1];
    let first = (conv.pads[0] * seen[1] + conv.pads[1]) * conv.c * ty.bytes();
    Pointwise {
        shape: vec![conv.n, kept[0], kept[1] * conv.c],
        inputs: vec![View { base: Operand { place: Place::Arena(0), ty }, strides: strides(conv.size) }],
        output: View { base: Operand { place: Place::Weights(first), ty }, strides: strides(seen) },
        numbers: Numbers::Float,
        code: vec![Instruction::Load(Value::Input(0))],
    }
}

fn kind(step: &Step) -> &'static str {
    match step {
        Step::Conv(_) => "a convolution",
        Step::Matmul(_) => "a matrix product",
        Step::Pointwise(_) => "an expression",
        Step::Reduce(_) => "a reduction",
        Step::Softmax(_) => "a softmax",
        Step::Norm(_) => "a normalisation",
        Step::Attention(_) => "attention",
        Step::Pool(_) => "pooling",
        Step::Gather(_) => "a gather",
        Step::Resize(_) => "a resize",
    }
}

/// Where an operand is.
fn resolve(operand: &Operand, at: Bases) -> Address {
    match operand.place {
        Place::Arena(offset) => at.arena.plus(offset as u64),
        Place::Weights(offset) => at.weights.plus(offset as u64),
    }
}

fn addresses(conv: &Conv, at: Bases) -> convolution::Addresses {
    convolution::Addresses {
        input: resolve(&conv.input, at),
        weights: resolve(&conv.weights, at),
        output: resolve(&conv.output, at),
        residual: conv.residual.as_ref().map(|residual| resolve(residual, at)),
        bias: conv.bias.as_ref().map(|bias| resolve(bias, at)),
    }
}

/// A convolution with filters of one element: all images' pixels times the filters.
fn as_product(conv: &Conv) -> Matmul {
    let factor = |base, row_stride, transposed| Factor { base, row_stride, batch_stride: 0, transposed };
    Matmul {
        a: factor(conv.input, conv.c, false),
        b: factor(conv.weights, conv.c, true),
        bias: conv.bias,
        residual: conv.residual,
        output: factor(conv.output, conv.k, false),
        alpha: 1.0,
        activation: conv.activation,
        batches: 1,
        m: conv.n * conv.out[0] * conv.out[1],
        n: conv.k,
        k: conv.c,
    }
}

/// What a product without bias and activation lacks.
fn finish_product(matmul: &Matmul) -> Pointwise {
    let output = matmul.output;
    let strides = vec![output.batch_stride as i64, output.row_stride as i64, 1];
    let shape = vec![matmul.batches, matmul.m, matmul.n];
    finish(shape, View { base: output.base, strides }, matmul.bias, None, matmul.activation)
}

/// What a convolution without bias, residual and activation lacks.
fn finish_convolution(conv: &Conv) -> Pointwise {
    let shape = vec![conv.n * conv.out[0] * conv.out[1], conv.k];
    let output = View { base: conv.output, strides: vec![conv.k as i64, 1] };
    finish(shape, output, conv.bias, conv.residual, conv.activation)
}

/// Adds a bias to rows and a residual to all, and applies the activation, in place.
fn finish(
    shape: Vec<usize>,
    output: View,
    bias: Option<Operand>,
    residual: Option<Operand>,
    activation: Activation,
) -> Pointwise {
    let mut inputs = vec![output.clone()];
    let mut code = vec![Instruction::Load(Value::Input(0))];
    let mut add = |view: View| {
        inputs.push(view);
        #[allow(clippy::cast_possible_truncation, reason = "three at most")]
        code.push(Instruction::Binary(Binary::Add, Value::Input(inputs.len() as u8 - 1)));
    };
    if let Some(base) = bias {
        let mut strides = vec![0; shape.len()];
        strides[shape.len() - 1] = 1;
        add(View { base, strides });
    }
    if let Some(base) = residual {
        add(View { base, strides: output.strides.clone() });
    }
    if activation == Activation::Relu {
        code.push(Instruction::Binary(Binary::Max, Value::Float(0.0)));
    }
    Pointwise { shape, inputs, output, numbers: Numbers::Float, code }
}

#[cfg(test)]
mod tests {
    use lowering::{
        Type,
        interpret::{Memory, run_step},
    };

    use super::*;

    const SIZE: usize = 1024;

    fn operand(place: Place) -> Operand {
        Operand { place, ty: Type::F32 }
    }

    /// One of two images of 2 x 3 pixels and 4 channels; 5 channels come out.
    fn conv(residual: bool) -> Conv {
        Conv {
            input: operand(Place::Arena(0)),
            weights: operand(Place::Weights(0)),
            bias: Some(operand(Place::Weights(256))),
            residual: residual.then(|| operand(Place::Arena(512))),
            output: operand(Place::Arena(768)),
            activation: Activation::Relu,
            n: 2,
            size: [2, 3],
            c: 4,
            k: 5,
            out: [2, 3],
            kernel: [1, 1],
            strides: [1, 1],
            dilations: [1, 1],
            pads: [0, 0],
            groups: 1,
        }
    }

    /// Small numbers of both signs, so that sums are exact in any order.
    fn numbers(factor: usize) -> Vec<u8> {
        (0..SIZE).flat_map(|i| ((i * factor % 17) as f32 - 8.0).to_le_bytes()).collect()
    }

    fn after(steps: &[Step]) -> Vec<u8> {
        let (mut arena, weights) = (numbers(7), numbers(5));
        for step in steps {
            run_step(step, None, &mut Memory { arena: &mut arena, weights: &weights });
        }
        arena
    }

    #[test]
    fn a_filter_of_one_element_is_a_product() {
        for residual in [false, true] {
            let conv = conv(residual);
            assert_eq!(after(&[Step::Matmul(as_product(&conv))]), after(&[Step::Conv(conv)]));
        }
    }

    #[test]
    fn what_libraries_leave_out_is_a_step_of_its_own() {
        for residual in [false, true] {
            let conv = conv(residual);
            let bare = Conv { bias: None, residual: None, activation: Activation::None, ..conv.clone() };
            let finished = after(&[Step::Conv(bare), Step::Pointwise(finish_convolution(&conv))]);
            let product = Matmul { batches: 2, m: 6, ..as_product(&conv) };
            let factor = |factor: Factor, batch_stride| Factor { batch_stride, ..factor };
            let product = Matmul { a: factor(product.a, 24), output: factor(product.output, 30), ..product };
            let bare = Matmul { bias: None, activation: Activation::None, ..product.clone() };
            let finished_product = after(&[Step::Matmul(bare), Step::Pointwise(finish_product(&product))]);
            assert_eq!(finished, after(&[Step::Conv(conv)]));
            assert_eq!(finished_product, finished);
        }
    }

    #[test]
    fn an_image_with_its_zeros_needs_no_padding() {
        // One row is seen before the image and none behind, and two columns behind.
        let conv = Conv { kernel: [2, 3], pads: [1, 0], k: 2, bias: None, ..conv(false) };
        let wanted = after(&[Step::Conv(conv.clone())]);
        let seen = [3, 5];
        let weights = numbers(5);
        let arena = numbers(7);
        let bytes = arena.len();
        // The workspace is behind the arena here.
        let mut both = [arena, vec![0; bytes]].concat();
        let mut copy = pad(&conv, seen);
        let Place::Weights(first) = copy.output.base.place else { unreachable!("the copy goes to the workspace") };
        copy.output.base.place = Place::Arena(bytes + first);
        let image = operand(Place::Arena(bytes));
        let padded = Conv { input: image, size: seen, pads: [0, 0], ..conv.clone() };
        for step in [Step::Pointwise(copy), Step::Conv(padded)] {
            run_step(&step, None, &mut Memory { arena: &mut both, weights: &weights });
        }
        assert_eq!(both[..bytes], wanted);
    }
}
