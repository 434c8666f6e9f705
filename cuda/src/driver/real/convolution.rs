//! Convolutions by cuDNN: with bias, residual and activation in one call where there is a bias.
//!
//! Images lie as n, h, w, c, and filters as k, r, s, c, which cuDNN names n, c, h, w and k, c, r, s all the same.
//!
//! This module has `unsafe` because it calls cuDNN with addresses.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use cudarc::cudnn::sys::{
    self, cudnnActivationDescriptor_t, cudnnActivationMode_t, cudnnConvolutionDescriptor_t, cudnnConvolutionFwdAlgo_t,
    cudnnConvolutionFwdAlgoPerf_t, cudnnConvolutionMode_t, cudnnDataType_t, cudnnDeterminism_t,
    cudnnFilterDescriptor_t, cudnnHandle_t, cudnnMathType_t, cudnnNanPropagation_t, cudnnStatus_t,
    cudnnTensorDescriptor_t, cudnnTensorFormat_t,
};
use cudarc::driver::sys::CUstream;
use lowering::plan::{Activation, Conv, Precision, Type};

use super::check::dnn;
use crate::{DriverError, driver::Address};

/// Algorithms that cuDNN knows.
const ALGORITHMS: usize = cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_COUNT as usize;

/// cuDNN, for one stream of one context.
#[derive(Debug)]
pub(super) struct Dnn(cudnnHandle_t);

// SAFETY: a handle may be used from any thread, by one at a time.
unsafe impl Send for Dnn {}

impl Dnn {
    /// For the context that is current; whoever has it keeps the stream.
    pub(super) fn new(stream: CUstream) -> Result<Self, DriverError> {
        let mut raw = null_mut();
        // SAFETY: a context is current; the handle is destroyed when it is dropped.
        dnn("cudnnCreate", unsafe { sys::cudnnCreate(&raw mut raw) })?;
        let made = Self(raw);
        // SAFETY: both live.
        dnn("cudnnSetStream", unsafe { sys::cudnnSetStream(raw, stream.cast()) })?;
        Ok(made)
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { sys::cudnnDestroy(self.0) };
    }
}

/// All that decides which algorithm is the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    n: usize,
    size: [usize; 2],
    c: usize,
    k: usize,
    out: [usize; 2],
    kernel: [usize; 2],
    strides: [usize; 2],
    dilations: [usize; 2],
    pads: [usize; 2],
    groups: usize,
    ty: Type,
    precision: Precision,
    /// What all tensors' addresses are multiples of.
    alignment: u64,
    has_bias: bool,
    has_residual: bool,
    has_relu: bool,
    /// Whether the residual is where the output will be.
    is_in_place: bool,
}

impl Key {
    pub(super) fn new(conv: &Conv, precision: Precision, addresses: &Addresses) -> Self {
        Self {
            n: conv.n,
            size: conv.size,
            c: conv.c,
            k: conv.k,
            out: conv.out,
            kernel: conv.kernel,
            strides: conv.strides,
            dilations: conv.dilations,
            pads: conv.pads,
            groups: conv.groups,
            ty: conv.input.ty,
            precision,
            alignment: addresses.alignment(),
            has_bias: conv.bias.is_some(),
            has_residual: conv.residual.is_some(),
            has_relu: conv.activation == Activation::Relu,
            is_in_place: addresses.residual == Some(addresses.output),
        }
    }

    /// The product and its sum alone.
    pub(super) fn bare(self) -> Self {
        Self { has_bias: false, has_residual: false, has_relu: false, is_in_place: false, ..self }
    }

    /// Whether what a bare call leaves out can be added behind it: a residual that is there still.
    pub(super) fn can_be_finished(&self) -> bool {
        !self.is_bare() && !self.is_in_place
    }

    fn is_bare(&self) -> bool {
        !(self.has_bias || self.has_residual || self.has_relu)
    }

    /// Whether it is nothing but a product of the images' pixels with the filters.
    pub(super) fn is_product(&self) -> bool {
        self.kernel == [1, 1]
            && self.strides == [1, 1]
            && self.pads == [0, 0]
            && self.groups == 1
            && self.out == self.size
    }

    pub(super) fn is_depthwise(&self) -> bool {
        self.groups > 1 && self.groups == self.c
    }

    /// Rows and columns of the input that the filter sees, those of zeros included.
    pub(super) fn seen(&self) -> [usize; 2] {
        std::array::from_fn(|i| (self.out[i] - 1) * self.strides[i] + (self.kernel[i] - 1) * self.dilations[i] + 1)
    }

    /// Whether the output's size follows if the end is padded as the beginning is, which is all that cuDNN can do.
    pub(super) fn is_symmetric(&self) -> bool {
        let filter = |i: usize| (self.kernel[i] - 1) * self.dilations[i] + 1;
        (0..2).all(|i| {
            let room = (self.size[i] + 2 * self.pads[i]).checked_sub(filter(i));
            room.is_some_and(|room| room / self.strides[i] + 1 == self.out[i])
        })
    }

    /// The same of an input that holds all the zeros, and nothing that is not seen.
    pub(super) fn padded(&self) -> Self {
        Self { size: self.seen(), pads: [0, 0], ..*self }
    }

    /// Bytes of the input.
    pub(super) fn input_bytes(&self) -> usize {
        self.n * self.size[0] * self.size[1] * self.c * self.ty.bytes()
    }

    /// Whether cuDNN has one call for all of it: those with bias, and those with nothing.
    pub(super) fn is_one_call(&self) -> bool {
        self.has_bias || self.is_bare()
    }

    fn data(&self) -> Result<cudnnDataType_t, DriverError> {
        match self.ty {
            Type::F32 => Ok(cudnnDataType_t::CUDNN_DATA_FLOAT),
            Type::F16 => Ok(cudnnDataType_t::CUDNN_DATA_HALF),
            other => Err(DriverError(format!("no convolution of {other:?}"))),
        }
    }

    /// What may multiply: the default is to round binary32 to TF32.
    fn math(&self) -> cudnnMathType_t {
        match (self.ty, self.precision) {
            (Type::F32, Precision::Tf32) => cudnnMathType_t::CUDNN_DEFAULT_MATH,
            (Type::F32, _) => cudnnMathType_t::CUDNN_FMA_MATH,
            _ => cudnnMathType_t::CUDNN_TENSOR_OP_MATH,
        }
    }

    fn allows(&self, result: &cudnnConvolutionFwdAlgoPerf_t, workspace_bytes: usize) -> bool {
        // cudnnConvolutionBiasActivationForward takes no other without an activation.
        let only = cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;
        let is_plain_sum = self.has_bias && !self.has_relu;
        result.status == cudnnStatus_t::CUDNN_STATUS_SUCCESS
            && result.determinism == cudnnDeterminism_t::CUDNN_DETERMINISTIC
            && result.memory <= workspace_bytes
            && (!is_plain_sum || result.algo == only)
    }
}

/// Where a convolution's tensors are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Addresses {
    pub(super) input: Address,
    pub(super) weights: Address,
    pub(super) output: Address,
    pub(super) residual: Option<Address>,
    pub(super) bias: Option<Address>,
}

impl Addresses {
    fn alignment(&self) -> u64 {
        let all = [Some(self.input), Some(self.weights), Some(self.output), self.residual, self.bias];
        all.into_iter().flatten().map(|address| alignment(address.0)).min().unwrap_or(ALIGNMENT_MAX)
    }
}

/// No algorithm is faster for more.
pub(super) const ALIGNMENT_MAX: u64 = 256;

/// The power of two that an address is a multiple of.
pub(super) fn alignment(address: u64) -> u64 {
    if address == 0 { ALIGNMENT_MAX } else { (1 << address.trailing_zeros().min(8)).min(ALIGNMENT_MAX) }
}

fn int(value: usize) -> Result<c_int, DriverError> {
    c_int::try_from(value).map_err(|_| DriverError(format!("{value} is more than cuDNN counts")))
}

fn ints<const N: usize>(values: [usize; N]) -> Result<[c_int; N], DriverError> {
    let mut converted = [0; N];
    for (to, from) in converted.iter_mut().zip(values) {
        *to = int(from)?;
    }
    Ok(converted)
}

/// A description that is destroyed when it is dropped.
macro_rules! descriptor {
    ($name:ident, $raw:ty, $create:ident, $destroy:ident) => {
        #[derive(Debug)]
        struct $name($raw);

        impl $name {
            fn new() -> Result<Self, DriverError> {
                let mut raw = null_mut();
                // SAFETY: one pointer is written.
                dnn(stringify!($create), unsafe { sys::$create(&raw mut raw) })?;
                Ok(Self(raw))
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: nobody else has it.
                let _ = unsafe { sys::$destroy(self.0) };
            }
        }
    };
}

descriptor!(Tensor, cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor);
descriptor!(Filter, cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor);
descriptor!(
    Geometry,
    cudnnConvolutionDescriptor_t,
    cudnnCreateConvolutionDescriptor,
    cudnnDestroyConvolutionDescriptor
);
descriptor!(Function, cudnnActivationDescriptor_t, cudnnCreateActivationDescriptor, cudnnDestroyActivationDescriptor);

/// What cuDNN is told of a convolution.
#[derive(Debug)]
struct Description {
    input: Tensor,
    weights: Filter,
    bias: Tensor,
    output: Tensor,
    geometry: Geometry,
    function: Function,
}

impl Description {
    fn new(key: &Key, math: cudnnMathType_t) -> Result<Self, DriverError> {
        let ty = key.data()?;
        let made = Self {
            input: tensor(ty, [key.n, key.c, key.size[0], key.size[1]])?,
            weights: Filter::new()?,
            bias: tensor(ty, [1, key.k, 1, 1])?,
            output: tensor(ty, [key.n, key.k, key.out[0], key.out[1]])?,
            geometry: Geometry::new()?,
            function: Function::new()?,
        };
        let format = cudnnTensorFormat_t::CUDNN_TENSOR_NHWC;
        let [k, c, r, s] = ints([key.k, key.c / key.groups, key.kernel[0], key.kernel[1]])?;
        // SAFETY: the description lives.
        let status = unsafe { sys::cudnnSetFilter4dDescriptor(made.weights.0, ty, format, k, c, r, s) };
        dnn("cudnnSetFilter4dDescriptor", status)?;
        made.describe_geometry(key, math)?;
        let mode = if key.has_relu {
            cudnnActivationMode_t::CUDNN_ACTIVATION_RELU
        } else {
            cudnnActivationMode_t::CUDNN_ACTIVATION_IDENTITY
        };
        let nan = cudnnNanPropagation_t::CUDNN_NOT_PROPAGATE_NAN;
        // SAFETY: the description lives.
        let status = unsafe { sys::cudnnSetActivationDescriptor(made.function.0, mode, nan, 0.0) };
        dnn("cudnnSetActivationDescriptor", status)?;
        Ok(made)
    }

    fn describe_geometry(&self, key: &Key, math: cudnnMathType_t) -> Result<(), DriverError> {
        let [[up, left], [down, right], [dilation, along]] =
            [ints(key.pads)?, ints(key.strides)?, ints(key.dilations)?];
        let mode = cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
        let sums = cudnnDataType_t::CUDNN_DATA_FLOAT;
        let groups = int(key.groups)?;
        let at = self.geometry.0;
        // SAFETY: the description lives.
        unsafe {
            let status = sys::cudnnSetConvolution2dDescriptor(at, up, left, down, right, dilation, along, mode, sums);
            dnn("cudnnSetConvolution2dDescriptor", status)?;
            dnn("cudnnSetConvolutionGroupCount", sys::cudnnSetConvolutionGroupCount(at, groups))?;
            dnn("cudnnSetConvolutionMathType", sys::cudnnSetConvolutionMathType(at, math))
        }
    }
}

/// A tensor of n, c, h, w of which c is the innermost in memory.
fn tensor(ty: cudnnDataType_t, lengths: [usize; 4]) -> Result<Tensor, DriverError> {
    let tensor = Tensor::new()?;
    let [n, c, h, w] = ints(lengths)?;
    let format = cudnnTensorFormat_t::CUDNN_TENSOR_NHWC;
    // SAFETY: the description lives.
    let status = unsafe { sys::cudnnSetTensor4dDescriptor(tensor.0, format, ty, n, c, h, w) };
    dnn("cudnnSetTensor4dDescriptor", status)?;
    Ok(tensor)
}

/// How a convolution is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Algorithm {
    algorithm: cudnnConvolutionFwdAlgo_t,
    math: cudnnMathType_t,
    memory_bytes: usize,
}

/// Algorithms that can compute it within a workspace of so many bytes, the most promising first.
pub(super) fn proposals(dnn_handle: &Dnn, key: &Key, workspace_bytes: usize) -> Result<Vec<Algorithm>, DriverError> {
    let told = Description::new(key, key.math())?;
    // SAFETY: plain numbers, all of which may be zero.
    let mut results: [cudnnConvolutionFwdAlgoPerf_t; ALGORITHMS] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // SAFETY: handle and descriptions live; at most so many results are written.
    let status = unsafe {
        sys::cudnnGetConvolutionForwardAlgorithm_v7(
            dnn_handle.0,
            told.input.0,
            told.weights.0,
            told.geometry.0,
            told.output.0,
            ALGORITHMS as c_int,
            &raw mut count,
            results.as_mut_ptr(),
        )
    };
    dnn("cudnnGetConvolutionForwardAlgorithm_v7", status)?;
    let found = results.iter().take(usize::try_from(count).unwrap_or(0));
    let usable = found.filter(|result| key.allows(result, workspace_bytes));
    let is_exact = key.math() == cudnnMathType_t::CUDNN_FMA_MATH;
    Ok(usable
        .map(|result| Algorithm {
            algorithm: result.algo,
            math: if is_exact { key.math() } else { result.mathType },
            memory_bytes: result.memory,
        })
        .collect())
}

/// A convolution with its addresses.
#[derive(Debug)]
pub(super) struct Convolution {
    told: Description,
    algorithm: Algorithm,
    at: Addresses,
    has_bias: bool,
    workspace: Address,
}

// SAFETY: descriptions are plain memory, which calls only read.
unsafe impl Send for Convolution {}
// SAFETY: as above.
unsafe impl Sync for Convolution {}

impl Convolution {
    /// One that is one call ([`Key::is_one_call`]).
    pub(super) fn new(
        key: &Key,
        algorithm: Algorithm,
        at: &Addresses,
        workspace: Address,
    ) -> Result<Self, DriverError> {
        let told = Description::new(key, algorithm.math)?;
        let residual = at.residual.filter(|_| key.has_residual);
        Ok(Self { told, algorithm, at: Addresses { residual, ..*at }, has_bias: key.has_bias, workspace })
    }

    /// Puts it on the handle's stream.
    pub(super) fn enqueue(&self, dnn_handle: &Dnn) -> Result<(), DriverError> {
        let pointer = |at: Address| std::ptr::with_exposed_provenance_mut::<c_void>(usize::try_from(at.0).unwrap_or(0));
        let (one, zero) = (1.0_f32, 0.0_f32);
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        let Addresses { input, weights, output, residual, bias } = self.at;
        let told = &self.told;
        let Algorithm { algorithm, memory_bytes, .. } = self.algorithm;
        let workspace = pointer(self.workspace);
        let Some(bias) = bias.filter(|_| self.has_bias) else {
            // SAFETY: the handle and all descriptions live. The addresses are a prepared plan's.
            let status = unsafe {
                sys::cudnnConvolutionForward(
                    dnn_handle.0,
                    one,
                    told.input.0,
                    pointer(input),
                    told.weights.0,
                    pointer(weights),
                    told.geometry.0,
                    algorithm,
                    workspace,
                    memory_bytes,
                    zero,
                    told.output.0,
                    pointer(output),
                )
            };
            return dnn("cudnnConvolutionForward", status);
        };
        let beta = if residual.is_some() { one } else { zero };
        // SAFETY: as above; the residual may be the output itself.
        let status = unsafe {
            sys::cudnnConvolutionBiasActivationForward(
                dnn_handle.0,
                one,
                told.input.0,
                pointer(input),
                told.weights.0,
                pointer(weights),
                told.geometry.0,
                algorithm,
                workspace,
                memory_bytes,
                beta,
                told.output.0,
                pointer(residual.unwrap_or(output)),
                told.bias.0,
                pointer(bias),
                told.function.0,
                told.output.0,
                pointer(output),
            )
        };
        dnn("cudnnConvolutionBiasActivationForward", status)
    }
}

#[cfg(test)]
mod tests {
    use lowering::{Place, plan::Operand};

    use super::*;

    fn key(change: impl FnOnce(&mut Conv)) -> Key {
        let at = |offset| Operand { place: Place::Arena(offset), ty: Type::F16 };
        let mut conv = Conv {
            input: at(0),
            weights: at(256),
            bias: Some(at(512)),
            residual: None,
            output: at(768),
            activation: Activation::Relu,
            n: 2,
            size: [224, 15],
            c: 3,
            k: 64,
            out: [112, 8],
            kernel: [7, 7],
            strides: [2, 2],
            dilations: [1, 1],
            pads: [3, 3],
            groups: 1,
        };
        change(&mut conv);
        let residual =
            conv.residual.map(|residual| Address(if residual.place == conv.output.place { 0x3000 } else { 0x5000 }));
        let addresses = Addresses {
            input: Address(0x1000),
            weights: Address(0x2000),
            output: Address(0x3000),
            residual,
            bias: Some(Address(0x4010)),
        };
        Key::new(&conv, Precision::Fp16, &addresses)
    }

    #[test]
    fn the_end_is_padded_as_far_as_the_output_needs() {
        // 2 * 111 + 7 rows are seen: three before the image, 224, and two behind. cuDNN sees a third, and uses it not.
        let stem = key(|_| {});
        assert!(stem.is_symmetric());
        assert_eq!(stem.seen(), [229, 21]);
        // As TensorFlow pads: nothing before and one behind.
        let same = key(|conv| (conv.pads, conv.kernel, conv.out) = ([0, 0], [3, 3], [112, 7]));
        assert!(!same.is_symmetric());
        let padded = same.padded();
        assert_eq!((padded.size, padded.pads, padded.out), ([225, 15], [0, 0], [112, 7]));
        assert!(padded.is_symmetric());
        assert_eq!(padded.input_bytes(), 2 * 225 * 15 * 3 * 2);
    }

    #[test]
    fn only_a_filter_of_one_element_is_a_product() {
        let product = |conv: &mut Conv| {
            (conv.kernel, conv.strides, conv.pads, conv.out) = ([1, 1], [1, 1], [0, 0], [224, 15]);
        };
        assert!(key(product).is_product());
        assert!(!key(|conv| (product(conv), conv.groups = 3).1).is_product());
        assert!(!key(|conv| (product(conv), conv.strides = [2, 2], conv.out = [112, 8]).2).is_product());
        assert!(!key(|_| {}).is_product());
    }

    #[test]
    fn binary32_is_not_rounded_unless_that_was_asked_for() {
        let of = |ty, precision| Key { ty, precision, ..key(|_| {}) }.math();
        assert_eq!(of(Type::F32, Precision::Fp32), cudnnMathType_t::CUDNN_FMA_MATH);
        // What a model of another precision has left in binary32 is meant to be exact.
        assert_eq!(of(Type::F32, Precision::Fp16), cudnnMathType_t::CUDNN_FMA_MATH);
        assert_eq!(of(Type::F32, Precision::Tf32), cudnnMathType_t::CUDNN_DEFAULT_MATH);
        assert_eq!(of(Type::F16, Precision::Fp16), cudnnMathType_t::CUDNN_TENSOR_OP_MATH);
    }

    #[test]
    fn algorithms_that_do_not_fit_are_left_out() {
        let usable = cudnnConvolutionFwdAlgoPerf_t {
            algo: cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM,
            status: cudnnStatus_t::CUDNN_STATUS_SUCCESS,
            time: 1.0,
            memory: 100,
            determinism: cudnnDeterminism_t::CUDNN_DETERMINISTIC,
            mathType: cudnnMathType_t::CUDNN_TENSOR_OP_MATH,
            reserved: [0; 3],
        };
        assert!(key(|_| {}).allows(&usable, 100));
        assert!(!key(|_| {}).allows(&usable, 99));
        let by_chance =
            cudnnConvolutionFwdAlgoPerf_t { determinism: cudnnDeterminism_t::CUDNN_NON_DETERMINISTIC, ..usable };
        assert!(!key(|_| {}).allows(&by_chance, 100));
        assert!(!key(|conv| conv.activation = Activation::None).allows(&usable, 100));
    }

    #[test]
    fn a_residual_that_is_overwritten_cannot_be_added_later() {
        let beside = key(|conv| conv.residual = Some(conv.input));
        let in_place = key(|conv| conv.residual = Some(conv.output));
        assert_ne!(beside, in_place);
        assert!(beside.can_be_finished() && !in_place.can_be_finished());
        assert!(!beside.bare().can_be_finished(), "nothing is left out");
    }

    #[test]
    fn what_decides_the_algorithm_is_in_the_key() {
        assert_ne!(key(|conv| conv.n = 3), key(|_| {}));
        assert_ne!(key(|conv| conv.activation = Activation::None), key(|_| {}));
        assert_eq!(key(|conv| conv.input.place = Place::Arena(4096)), key(|_| {}), "where it lies does not");
        assert_eq!(key(|_| {}).alignment, 16);
        assert_eq!((alignment(0x8), alignment(0x300), alignment(0x10000)), (8, 256, 256));
    }
}
