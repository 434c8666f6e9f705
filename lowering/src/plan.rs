//! What a lowered model is made of.
//!
//! A plan is for one batch size. Its steps run in order; each reads and writes places of the *arena*, which all plans
//! of a GPU share as they run one after another, and reads the model's *weights*, which all its batch sizes share.
//! Tensors are dense unless a step says strides; strides and lengths count elements, places count bytes and are
//! aligned to [`ALIGNMENT`] unless a step addresses a part of a tensor.
//!
//! Images are NHWC, as tensor cores want them, with filters `[k, r, s, c / groups]`.

/// A lowered model.
#[derive(Debug, Clone, PartialEq)]
pub struct Lowered {
    /// What all plans read, as one image.
    pub weights: Vec<u8>,
    /// One for each batch size, in ascending order of sizes; or as they were added.
    pub plans: Vec<Plan>,
}

/// Bytes that a tensor's place is a multiple of: what cuDNN, cuBLASLt and vector loads want at most.
pub const ALIGNMENT: usize = 256;
/// Dimensions of a [`Pointwise`] step at most; neighbouring ones that can be one are one.
pub const DIMS_MAX: usize = 6;
/// Inputs of a [`Pointwise`] step at most.
pub const INPUTS_MAX: usize = 6;
/// Instructions of a [`Pointwise`] step at most.
pub const CODE_MAX: usize = 24;
/// Temporaries of a [`Pointwise`] step.
pub const TEMPORARIES: usize = 4;
/// Elements of a vector of an [`Attention`] step at most.
pub const ATTENTION_WIDTH_MAX: usize = 128;

/// Element types of tensors in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// Signed, 64 bits.
    I64,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 8 bits.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

impl Type {
    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 => 2,
            Self::U8 | Self::Bool => 1,
        }
    }

    /// Whether it is a floating-point type.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16)
    }
}

/// Where a tensor, or its first element, lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// So many bytes into the arena.
    Arena(usize),
    /// So many bytes into the model's weights.
    Weights(usize),
}

/// A tensor, dense unless it is said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its first element.
    pub place: Place,
    /// Its elements.
    pub ty: Type,
}

/// A tensor that is walked with strides.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct View {
    /// The element of index zero in every dimension, and the type.
    pub base: Operand,
    /// Elements from one index to the next, for each dimension of the step; 0 repeats, negative ones walk backwards.
    pub strides: Vec<i64>,
}

/// How numbers are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Precision {
    /// Binary32 throughout.
    Fp32,
    /// Binary32 in memory, TF32 in tensor cores.
    Tf32,
    /// Binary16 in memory and tensor cores, sums in binary32.
    Fp16,
}

/// A model's plan for one batch size.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Tasks of a batch.
    pub batch: usize,
    /// How numbers are multiplied.
    pub precision: Precision,
    /// The model's inputs, in its order: the batch's tensors one after another.
    pub inputs: Vec<Port>,
    /// The model's outputs, likewise.
    pub outputs: Vec<Port>,
    /// A `u32` for each task, cleared before the first step: what is not 0 afterwards has had an input that the model
    /// cannot take (an index out of range), and has no output. `None` if no step can find one.
    pub faults: Option<usize>,
    /// What runs, in order.
    pub steps: Vec<Step>,
    /// Bytes of the arena that it uses, ports and faults included.
    pub arena_bytes: usize,
}

/// An input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its name in the file.
    pub name: String,
    /// Where it lies in the arena, in bytes.
    pub offset: usize,
    /// What clients send or get.
    pub ty: Type,
    /// Its shape, the batch's dimension included, in the model's order of dimensions.
    pub shape: Vec<usize>,
}

impl Port {
    /// Bytes of the whole batch's.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.ty.bytes()
    }
}

/// One kernel, or one call of a library.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Convolution of images.
    Conv(Conv),
    /// Matrix product.
    Matmul(Matmul),
    /// An expression for each element; also copies, transpositions, slices and fills.
    Pointwise(Pointwise),
    /// Reduction of one dimension.
    Reduce(Reduce),
    /// Softmax of rows.
    Softmax(Softmax),
    /// Layer or RMS normalisation of rows.
    Norm(Norm),
    /// Scaled dot-product attention.
    Attention(Attention),
    /// Pooling of images.
    Pool(Pool),
    /// Rows by their indexes.
    Gather(Gather),
    /// Images of another size.
    Resize(Resize),
}

/// What is done with a result before it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(x, 0)`.
    Relu,
}

/// `output[n, y, x, k] = activation(sum over r, s, c of input[n, y * stride + r * dilation - pad, .., c] *
/// weights[k, r, s, c] + bias[k] + residual[n, y, x, k])`; what lies outside the image is zero. Pads are those at
/// the beginning; the end is padded as far as the output's size needs. All tensors have one type.
#[derive(Debug, Clone, PartialEq)]
pub struct Conv {
    /// `[n, h, w, c]`.
    pub input: Operand,
    /// `[k, r, s, c / groups]`.
    pub weights: Operand,
    /// `[k]`.
    pub bias: Option<Operand>,
    /// `[n, out_h, out_w, k]`.
    pub residual: Option<Operand>,
    /// `[n, out_h, out_w, k]`.
    pub output: Operand,
    /// The last thing done.
    pub activation: Activation,
    /// Images.
    pub n: usize,
    /// Height and width of the input.
    pub size: [usize; 2],
    /// Channels of the input; a multiple of `groups`.
    pub c: usize,
    /// Channels of the output; a multiple of `groups`.
    pub k: usize,
    /// Height and width of the output.
    pub out: [usize; 2],
    /// Height and width of the filters.
    pub kernel: [usize; 2],
    /// Between positions of the filter.
    pub strides: [usize; 2],
    /// Between elements of the filter.
    pub dilations: [usize; 2],
    /// Rows and columns of zeros before the image.
    pub pads: [usize; 2],
    /// Groups of channels; `groups == c` is depthwise.
    pub groups: usize,
}

/// One factor of a [`Matmul`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factor {
    /// Of the first batch.
    pub base: Operand,
    /// Elements from one row, as it lies in memory, to the next: at least its length.
    pub row_stride: usize,
    /// Elements from one batch to the next; 0 if all have the same.
    pub batch_stride: usize,
    /// Whether memory holds the transposed matrix.
    pub transposed: bool,
}

/// `output[i] = activation(alpha * a[i] b[i] + bias + residual[i])` for so many batches i, with a of m x k, b of k x n.
#[derive(Debug, Clone, PartialEq)]
pub struct Matmul {
    /// m x k, or k x m in memory if it is transposed.
    pub a: Factor,
    /// k x n, or n x k in memory if it is transposed.
    pub b: Factor,
    /// `[n]`, added to each row.
    pub bias: Option<Operand>,
    /// Laid out as the output.
    pub residual: Option<Operand>,
    /// m x n, not transposed.
    pub output: Factor,
    /// Of the product.
    pub alpha: f32,
    /// The last thing done.
    pub activation: Activation,
    /// Products.
    pub batches: usize,
    /// Rows of a.
    pub m: usize,
    /// Columns of b.
    pub n: usize,
    /// Columns of a.
    pub k: usize,
}

/// For each index of `shape`: an accumulator is computed by `code` from the inputs' elements, and stored as the
/// output's.
#[derive(Debug, Clone, PartialEq)]
pub struct Pointwise {
    /// 1 to [`DIMS_MAX`] lengths.
    pub shape: Vec<usize>,
    /// At most [`INPUTS_MAX`].
    pub inputs: Vec<View>,
    /// No two indexes have the same element. It may be one of the inputs, walked with the same strides.
    pub output: View,
    /// What numbers are while they are computed with: elements are converted when they are loaded and stored.
    pub numbers: Numbers,
    /// At most [`CODE_MAX`].
    pub code: Vec<Instruction>,
}

/// What a [`Pointwise`] step computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Numbers {
    /// Binary32. Stored as an integer, a number is truncated to the nearest in range (NaN to 0); as `Bool`, it is
    /// whether it is not 0.
    Float,
    /// 64-bit integers that wrap, as they do in narrower integers where they are stored. Floating-point elements are
    /// truncated when they are loaded.
    Integer,
}

/// What is computed with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// The present element of an input.
    Input(u8),
    /// What has been saved in a temporary.
    Temporary(u8),
    /// A constant of a [`Numbers::Float`] step.
    Float(f32),
    /// A constant of a [`Numbers::Integer`] step.
    Integer(i64),
}

/// One instruction; `acc` is the accumulator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Instruction {
    /// `acc = value`.
    Load(Value),
    /// `temporary = acc`.
    Save(u8),
    /// `acc = op(acc)`.
    Unary(Unary),
    /// `acc = op(acc, value)`.
    Binary(Binary, Value),
    /// `acc = op(value, acc)`.
    Reversed(Binary, Value),
    /// `acc = acc != 0 ? first : second`.
    Select(Value, Value),
}

/// Functions of one number. Those from `Exp` on are of [`Numbers::Float`] only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "their names say it")]
pub enum Unary {
    Neg,
    Abs,
    /// -1, 0 or 1.
    Sign,
    /// 1 for 0, otherwise 0.
    Not,
    /// Through a narrower type and back: as if it had been stored there.
    Through(Type),
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Tanh,
    Sigmoid,
    Erf,
    Sin,
    Cos,
    Floor,
    Ceil,
    /// To the nearest integer, halves to the even one.
    Round,
}

/// Functions of two numbers; those that compare yield 0 or 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "their names say it")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// Of integers, towards zero; by 0 it is 0.
    Div,
    /// Of the sign of the first; by 0 it is 0 for integers.
    Rem,
    Pow,
    Min,
    Max,
    Equal,
    Less,
    LessEqual,
    /// Whether both are not 0.
    And,
    Or,
    Xor,
}

/// `output[o, i]` of `input[o, j, i]` for all j. Floating-point sums are in binary32 whatever the type; those of
/// integers wrap, and their means are towards zero. NaN is neither the largest nor the smallest.
#[derive(Debug, Clone, PartialEq)]
pub struct Reduce {
    /// `[outer, length, inner]`.
    pub input: Operand,
    /// `[outer, inner]`; of type I64 for [`Reduction::ArgMax`] and [`Reduction::ArgMin`].
    pub output: Operand,
    /// What is made of them.
    pub reduction: Reduction,
    /// Before the dimension.
    pub outer: usize,
    /// Of the dimension; at least 1.
    pub length: usize,
    /// Behind it.
    pub inner: usize,
}

/// What is made of many numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "their names say it")]
pub enum Reduction {
    Sum,
    Mean,
    /// The mean of the squares.
    MeanOfSquares,
    Product,
    Max,
    Min,
    /// The first index of the largest.
    ArgMax,
    /// The first index of the smallest.
    ArgMin,
}

/// `output[row] = softmax(scale * input[row])`, or its logarithm. The softmax of a row of nothing but negative
/// infinities is all zeros. Input and output have one floating-point type.
#[derive(Debug, Clone, PartialEq)]
pub struct Softmax {
    /// `[rows, columns]`.
    pub input: Operand,
    /// `[rows, columns]`.
    pub output: Operand,
    /// Rows.
    pub rows: usize,
    /// Columns; at least 1.
    pub columns: usize,
    /// Of the input.
    pub scale: f32,
    /// Whether the logarithm is stored.
    pub is_log: bool,
}

/// `output[row] = (x - mean(x)) / sqrt(variance(x) + epsilon) * scale + shift` with `x = input[row] + residual[row]`;
/// with `is_rms`, `x / sqrt(mean(x * x) + epsilon) * scale + shift`. Input, residual, sum and output have one
/// floating-point type, scale and shift have any.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// `[rows, columns]`.
    pub input: Operand,
    /// `[rows, columns]`.
    pub residual: Option<Operand>,
    /// If there is a residual: x is stored here, too, of the input's type.
    pub sum: Option<Operand>,
    /// `[columns]`.
    pub scale: Option<Operand>,
    /// `[columns]`.
    pub shift: Option<Operand>,
    /// `[rows, columns]`.
    pub output: Operand,
    /// Rows.
    pub rows: usize,
    /// Columns; at least 1.
    pub columns: usize,
    /// Added to the variance.
    pub epsilon: f32,
    /// Whether the mean is taken for zero.
    pub is_rms: bool,
}

/// `output[b, h, q] = sum over j of softmax over j of (scale * query[b, h, q] . key[b, h, j] + mask[b, h, q, j]) *
/// value[b, h, j]`, zeros if no key is seen. Vectors of `width` elements are dense; queries, keys, values and outputs
/// have one floating-point type, the mask has any.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Strides over batch, head, position.
    pub query: View,
    /// Strides over batch, head, position.
    pub key: View,
    /// Strides over batch, head, position.
    pub value: View,
    /// Strides over batch, head, query, key.
    pub mask: Option<View>,
    /// Strides over batch, head, position.
    pub output: View,
    /// Batches.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Queries.
    pub queries: usize,
    /// Keys; at least 1.
    pub keys: usize,
    /// Elements of a vector, at most [`ATTENTION_WIDTH_MAX`].
    pub width: usize,
    /// Of the products.
    pub scale: f32,
    /// Whether query i sees keys up to `i + keys - queries` only.
    pub is_causal: bool,
}

/// Pooling of NHWC images, of one floating-point type. What lies outside is never the maximum; the mean of nothing is
/// 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Pool {
    /// `[n, h, w, c]`.
    pub input: Operand,
    /// `[n, out_h, out_w, c]`.
    pub output: Operand,
    /// What is made of a window.
    pub kind: PoolKind,
    /// Images.
    pub n: usize,
    /// Height and width of the input.
    pub size: [usize; 2],
    /// Channels.
    pub c: usize,
    /// Height and width of the output.
    pub out: [usize; 2],
    /// Height and width of the window.
    pub kernel: [usize; 2],
    /// Between windows.
    pub strides: [usize; 2],
    /// Between elements of a window.
    pub dilations: [usize; 2],
    /// Rows and columns before the image.
    pub pads: [usize; 2],
}

/// What is made of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// The largest.
    Max,
    /// The mean of those inside the image.
    Average,
    /// The sum, divided by the window's elements wherever they lie.
    AveragePadded,
}

/// `output[o, j, i] = input[o, indices[j], i]`. A negative index counts from the end. One that is out of range yields
/// zeros, and sets the fault of its task.
#[derive(Debug, Clone, PartialEq)]
pub struct Gather {
    /// `[outer, length, inner]`.
    pub input: Operand,
    /// `[count]`, of type I64 or I32.
    pub indices: Operand,
    /// `[outer, count, inner]`.
    pub output: Operand,
    /// Before the dimension.
    pub outer: usize,
    /// Of the dimension.
    pub length: usize,
    /// Behind it.
    pub inner: usize,
    /// Indices.
    pub count: usize,
    /// Indices of one task: index j is of task `j / indices_per_task`, where the plan has faults; 0 if they are the
    /// model's own, and in range.
    pub indices_per_task: usize,
}

/// NHWC images of another size: position y of the output is position `(y + offset) * scale - shift` of the input, for
/// each of the two dimensions, kept inside the image.
#[derive(Debug, Clone, PartialEq)]
pub struct Resize {
    /// `[n, h, w, c]`.
    pub input: Operand,
    /// `[n, out_h, out_w, c]`.
    pub output: Operand,
    /// How values between elements are made.
    pub kind: ResizeKind,
    /// Images.
    pub n: usize,
    /// Height and width of the input.
    pub size: [usize; 2],
    /// Channels.
    pub c: usize,
    /// Height and width of the output.
    pub out: [usize; 2],
    /// 0.5 for half pixels.
    pub offset: [f32; 2],
    /// The input's elements for one of the output.
    pub scale: [f32; 2],
    /// 0.5 for half pixels.
    pub shift: [f32; 2],
}

/// How values between elements are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResizeKind {
    /// The element below.
    Floor,
    /// The element above.
    Ceil,
    /// The nearest one, of two the lower.
    NearestLow,
    /// The nearest one, of two the upper.
    NearestHigh,
    /// Linearly in both dimensions.
    Linear,
}
