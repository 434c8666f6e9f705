//! What becomes of tasks of unequal sizes in one batch of an ONNX model: whether they are padded or joined, and what
//! the model is told of it (`batch_input` and `batch_output` of Triton's ModelConfig, and `parameters`).

use crate::tensor::DataType;

/// How tasks whose tensors differ in size run together.
#[derive(Debug, Clone, PartialEq)]
pub struct Batching {
    /// What becomes of dimensions of unequal lengths (`parameters: batch_lengths`).
    pub lengths: BatchLengths,
    /// For each input the number that it is padded with, which its type has (`parameters: pad_values`); 0 or 1 of BOOL.
    pub pads: Vec<f64>,
    /// For each input whether the tasks' tensors are joined, one after another in one dimension (`allow_ragged_batch`).
    pub ragged: Vec<bool>,
    /// Inputs of the model's file that no request has.
    pub generated: Vec<Generated>,
    /// For each output the input whose dimensions it has where its own are -1 (`batch_output`); of a joined one it is
    /// cut apart by them.
    pub follows: Vec<Option<usize>>,
    /// Elements of all inputs of one run, padding included, unless one task alone has more (`parameters:
    /// batch_elements_max`).
    pub elements_max: usize,
}

/// What becomes of dimensions whose lengths requests choose.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BatchLengths {
    /// Tasks of equal lengths run together.
    #[default]
    Equal,
    /// Tasks are padded to the longest that they run with.
    Padded,
    /// Tasks are padded to the next of these bounds, ascending and not empty, and run with those of the same one.
    Bucketed(Vec<usize>),
}

/// An input that is made for each run of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// As the model's file has it.
    pub name: String,
    /// Its type: INT32, INT64 or FP32; `None` if it is whatever the file says.
    pub datatype: Option<DataType>,
    /// What it says.
    pub kind: GeneratedKind,
    /// Of which input.
    pub source: usize,
}

/// What a generated input says of another input, for a run of n tasks. All but the mask are Triton's `BatchInput.Kind`,
/// where each of our tasks is a request of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GeneratedKind {
    /// `[n, each dimension that requests choose]`: 1 where elements are, 0 where padding is (`mask_inputs`).
    Mask,
    /// `[n]`: elements of each task.
    ElementCount,
    /// `[n]`: elements of each task and of all before it.
    AccumulatedElementCount,
    /// `[n + 1]`: the same, with a zero before.
    AccumulatedElementCountWithZero,
    /// `[most elements that a task of the run has, padding included]`: zeros.
    MaxElementCountAsShape,
    /// `[n, dimensions]`: the lengths of each task's dimensions.
    ItemShape,
    /// `[n * dimensions]`: the same.
    ItemShapeFlatten,
}

impl GeneratedKind {
    /// `BatchInput.Kind` by its number.
    pub(crate) fn of_batch_input(number: i32) -> Option<Self> {
        let kinds = [
            Self::ElementCount,
            Self::AccumulatedElementCount,
            Self::AccumulatedElementCountWithZero,
            Self::MaxElementCountAsShape,
            Self::ItemShape,
            Self::ItemShapeFlatten,
        ];
        usize::try_from(number).ok().and_then(|number| kinds.get(number).copied())
    }
}

impl Batching {
    /// Of a model with so many inputs and outputs whose tasks run with those of their own shapes.
    #[must_use]
    pub fn equal(inputs: usize, outputs: usize) -> Self {
        Self {
            lengths: BatchLengths::Equal,
            pads: vec![0.0; inputs],
            ragged: vec![false; inputs],
            generated: Vec::new(),
            follows: vec![None; outputs],
            elements_max: usize::MAX,
        }
    }

    /// Whether tasks may be padded.
    #[must_use]
    pub fn is_padded(&self) -> bool {
        self.lengths != BatchLengths::Equal
    }

    /// Whether any input's tensors are joined.
    #[must_use]
    pub fn is_joined(&self) -> bool {
        self.ragged.contains(&true)
    }

    /// Whether a run takes the tasks' tensors as they are, and as many as there are.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        !self.is_padded() && !self.is_joined() && self.generated.is_empty() && self.elements_max == usize::MAX
    }
}
