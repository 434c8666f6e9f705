//! Why a model cannot be lowered.

/// What a GPU's plan cannot be made of, and where that is in the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// There is no kernel for an operator.
    #[error(
        "node {node} is a {operator}, which GPUs do not run here: use the CPU's executor, or an operator of {OPERATORS}"
    )]
    Operator {
        /// The node's name.
        node: String,
        /// What it is.
        operator: String,
    },
    /// There is a kernel, but not for this.
    #[error("node {node} ({operator}): {reason}")]
    Unsupported {
        /// The node's name.
        node: String,
        /// What it is.
        operator: String,
        /// What to change.
        reason: String,
    },
    /// A length is not known.
    #[error(
        "dimension {dimension} of {tensor} is {found}, expected a number: plans have one shape for each batch size"
    )]
    Dimension {
        /// The tensor's name.
        tensor: String,
        /// Which one, from 0.
        dimension: usize,
        /// What the model has there.
        found: String,
    },
    /// A port has a type that GPUs do not have here.
    #[error("{tensor} is of type {found}, expected FP32, FP16, INT64, INT32, UINT8 or BOOL")]
    Type {
        /// The tensor's name.
        tensor: String,
        /// What it is of.
        found: String,
    },
    /// A weight does not fit the type that it is kept in.
    #[error("weight {tensor} has {value}, which FP16 cannot hold: use tf32 or fp32")]
    Overflow {
        /// The weight's name.
        tensor: String,
        /// The number.
        value: String,
    },
    /// The graph itself is not sound.
    #[error("{0}")]
    Graph(String),
}

/// The operators that there are, by the names that tract has for them once a model is read.
pub const OPERATORS: &str = "Conv, Deconv (ConvTranspose), EinSum (MatMul, Gemm), MaxPool, SumPool (AveragePool), \
    Reduce, Softmax, RmsNorm, LayerNormalization, Lrn, attention, Gather, Resize, Concat, Slice, Pad, Tile, \
    broadcasts, reshapes, transpositions, Cast, Where, arithmetic, comparisons, activations, and whatever does not \
    depend on inputs";
