//! Matrix products by cuBLASLt.
//!
//! It thinks in columns, and our matrices lie in memory row by row: what it sees is each one's transpose. So it is
//! asked for the transposed product, `output^T = b^T a^T`: our b is its first factor, and our n its rows, which a bias
//! goes along.
//!
//! This module has `unsafe` because it calls cuBLASLt with addresses.

use std::{ffi::c_void, ptr::null_mut};

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t as Epilogue, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasLtReductionScheme_t, cublasStatus_t, cudaDataType,
};
use cudarc::driver::sys::CUstream;
use lowering::plan::{Activation, Factor, Matmul, Operand, Precision, Type};

use super::{check::blas, convolution::alignment};
use crate::{DriverError, driver::Address};

/// Algorithms that cuBLASLt is asked for, the most promising first.
const PROPOSALS_MAX: usize = 8;

/// cuBLASLt, for one context.
#[derive(Debug)]
pub(super) struct Lt(cublasLtHandle_t);

// SAFETY: a handle may be used from any thread.
unsafe impl Send for Lt {}

impl Lt {
    /// For the context that is current.
    pub(super) fn new() -> Result<Self, DriverError> {
        let mut raw = null_mut();
        // SAFETY: a context is current; the handle is destroyed when it is dropped.
        blas("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut raw) })?;
        Ok(Self(raw))
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { sys::cublasLtDestroy(self.0) };
    }
}

/// A matrix as cuBLASLt sees it: columns that lie one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Columns {
    rows: usize,
    columns: usize,
    /// Elements from one column to the next.
    stride: usize,
    /// Elements from one matrix to the next.
    batch_stride: usize,
    ty: Type,
}

impl Columns {
    /// Of a matrix of ours, whose rows and columns are those of what is multiplied.
    fn new(factor: &Factor, rows: usize, columns: usize) -> Self {
        let (rows, columns) = if factor.transposed { (rows, columns) } else { (columns, rows) };
        Self {
            rows,
            columns,
            stride: factor.row_stride.max(rows),
            batch_stride: factor.batch_stride,
            ty: factor.base.ty,
        }
    }
}

/// All that decides which algorithm is the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// What cuBLASLt multiplies first: our b.
    first: Columns,
    is_first_transposed: bool,
    /// Our a.
    second: Columns,
    is_second_transposed: bool,
    output: Columns,
    batches: usize,
    bias: Option<Type>,
    has_residual: bool,
    has_relu: bool,
    precision: Precision,
    /// What the addresses of first, second, residual and output are multiples of.
    alignments: [u64; 4],
}

impl Key {
    pub(super) fn new(matmul: &Matmul, precision: Precision, at: &Addresses) -> Self {
        let output = Columns::new(&Factor { transposed: false, ..matmul.output }, matmul.m, matmul.n);
        Self {
            first: Columns::new(&matmul.b, matmul.k, matmul.n),
            is_first_transposed: matmul.b.transposed,
            second: Columns::new(&matmul.a, matmul.m, matmul.k),
            is_second_transposed: matmul.a.transposed,
            output,
            batches: matmul.batches,
            bias: matmul.bias.map(|bias| bias.ty),
            has_residual: matmul.residual.is_some(),
            has_relu: matmul.activation == Activation::Relu,
            precision,
            alignments: [at.b, at.a, at.residual.unwrap_or(at.output), at.output].map(|at| alignment(at.0)),
        }
    }

    fn epilogue(&self) -> Epilogue {
        match (self.bias.is_some(), self.has_relu) {
            (false, false) => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
            (false, true) => Epilogue::CUBLASLT_EPILOGUE_RELU,
            (true, false) => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            (true, true) => Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS,
        }
    }

    fn compute(&self) -> cublasComputeType_t {
        match self.precision {
            Precision::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            Precision::Fp32 | Precision::Fp16 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        }
    }
}

/// Where a product's matrices are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Addresses {
    pub(super) a: Address,
    pub(super) b: Address,
    pub(super) output: Address,
    pub(super) residual: Option<Address>,
    pub(super) bias: Option<Address>,
}

impl Addresses {
    pub(super) fn new(matmul: &Matmul, resolve: impl Fn(&Operand) -> Address) -> Self {
        Self {
            a: resolve(&matmul.a.base),
            b: resolve(&matmul.b.base),
            output: resolve(&matmul.output.base),
            residual: matmul.residual.as_ref().map(&resolve),
            bias: matmul.bias.as_ref().map(&resolve),
        }
    }
}

fn data(ty: Type) -> Result<cudaDataType, DriverError> {
    match ty {
        Type::F32 => Ok(cudaDataType::CUDA_R_32F),
        Type::F16 => Ok(cudaDataType::CUDA_R_16F),
        other => Err(DriverError(format!("no matrix product of {other:?}"))),
    }
}

/// How cuBLASLt calls a matrix.
#[derive(Debug)]
struct Layout(cublasLtMatrixLayout_t);

impl Layout {
    fn new(columns: &Columns, batches: usize) -> Result<Self, DriverError> {
        let mut raw = null_mut();
        let (rows, count, stride) = (columns.rows as u64, columns.columns as u64, columns.stride as i64);
        let ty = data(columns.ty)?;
        // SAFETY: one pointer is written; the layout is destroyed when it is dropped.
        let status = unsafe { sys::cublasLtMatrixLayoutCreate(&raw mut raw, ty, rows, count, stride) };
        blas("cublasLtMatrixLayoutCreate", status)?;
        let layout = Self(raw);
        if batches > 1 {
            let batches = i32::try_from(batches).map_err(|_| DriverError(format!("{batches} products at once")))?;
            layout.set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batches)?;
            let stride = columns.batch_stride as i64;
            layout.set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride)?;
        }
        Ok(layout)
    }

    fn set<T: Copy>(&self, attribute: LayoutAttribute, value: T) -> Result<(), DriverError> {
        let at = (&raw const value).cast();
        // SAFETY: the layout lives; so many bytes are read.
        let status = unsafe { sys::cublasLtMatrixLayoutSetAttribute(self.0, attribute, at, size_of::<T>()) };
        blas("cublasLtMatrixLayoutSetAttribute", status)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What is done with the matrices.
#[derive(Debug)]
struct Operation(cublasLtMatmulDesc_t);

impl Operation {
    fn new(key: &Key, bias: Option<Address>) -> Result<Self, DriverError> {
        let mut raw = null_mut();
        // SAFETY: one pointer is written; the description is destroyed when it is dropped.
        let status = unsafe { sys::cublasLtMatmulDescCreate(&raw mut raw, key.compute(), cudaDataType::CUDA_R_32F) };
        blas("cublasLtMatmulDescCreate", status)?;
        let operation = Self(raw);
        // `cublasOperation_t`: CUBLAS_OP_N is 0, and CUBLAS_OP_T is 1.
        let transposed = i32::from;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transposed(key.is_first_transposed))?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transposed(key.is_second_transposed))?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue())?;
        if let (Some(at), Some(ty)) = (bias, key.bias) {
            operation.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.0)?;
            operation.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data(ty)?)?;
        }
        Ok(operation)
    }

    fn set<T: Copy>(&self, attribute: Attribute, value: T) -> Result<(), DriverError> {
        let at = (&raw const value).cast();
        // SAFETY: the description lives; so many bytes are read.
        let status = unsafe { sys::cublasLtMatmulDescSetAttribute(self.0, attribute, at, size_of::<T>()) };
        blas(&format!("cublasLtMatmulDescSetAttribute {attribute:?}"), status)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// What an algorithm is asked to be: within the workspace, and with parts of sums added up in binary32 as [`Precision`]
/// promises, not as they are stored.
struct Wishes(cublasLtMatmulPreference_t);

impl Wishes {
    fn new(key: &Key, workspace_bytes: usize) -> Result<Self, DriverError> {
        let mut raw = null_mut();
        // SAFETY: one pointer is written; the preference is destroyed when it is dropped.
        let status = unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut raw) };
        blas("cublasLtMatmulPreferenceCreate", status)?;
        let wishes = Self(raw);
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes as u64)?;
        let reductions = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions)?;
        let names = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (name, alignment) in names.into_iter().zip(key.alignments) {
            wishes.set(name, u32::try_from(alignment).unwrap_or(1))?;
        }
        Ok(wishes)
    }

    fn set<T: Copy>(&self, attribute: Preference, value: T) -> Result<(), DriverError> {
        let at = (&raw const value).cast();
        // SAFETY: the preference lives; so many bytes are read.
        let status = unsafe { sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, at, size_of::<T>()) };
        blas("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for Wishes {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Algorithm(cublasLtMatmulAlgo_t);

/// A product with its addresses; [`Self::algorithm`] decides how it is computed.
#[derive(Debug)]
pub(super) struct Product {
    operation: Operation,
    first: Layout,
    second: Layout,
    output: Layout,
    at: Addresses,
    alpha: f32,
    workspace: (Address, usize),
    pub(super) algorithm: Option<Algorithm>,
}

// SAFETY: descriptions are plain memory, which calls only read.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

impl Product {
    pub(super) fn new(key: &Key, at: &Addresses, alpha: f32, workspace: (Address, usize)) -> Result<Self, DriverError> {
        Ok(Self {
            operation: Operation::new(key, at.bias)?,
            first: Layout::new(&key.first, key.batches)?,
            second: Layout::new(&key.second, key.batches)?,
            output: Layout::new(&key.output, key.batches)?,
            at: *at,
            alpha,
            workspace,
            algorithm: None,
        })
    }

    /// Algorithms that can compute it, the most promising first; none if cuBLASLt cannot.
    pub(super) fn proposals(&self, lt: &Lt, key: &Key) -> Result<Vec<Algorithm>, DriverError> {
        let wishes = Wishes::new(key, self.workspace.1)?;
        let none = cublasLtMatmulHeuristicResult_t {
            algo: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut results = [none; PROPOSALS_MAX];
        let mut count = 0;
        // SAFETY: all descriptions live; at most so many results are written.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                lt.0,
                self.operation.0,
                self.first.0,
                self.second.0,
                self.output.0,
                self.output.0,
                wishes.0,
                PROPOSALS_MAX as i32,
                results.as_mut_ptr(),
                &raw mut count,
            )
        };
        if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        blas("cublasLtMatmulAlgoGetHeuristic", status)?;
        let found = results.into_iter().take(usize::try_from(count).unwrap_or(0));
        let usable = found.filter(|result| result.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(usable.map(|result| Algorithm(result.algo)).collect())
    }

    /// Puts it on a stream.
    pub(super) fn enqueue(&self, lt: &Lt, stream: CUstream) -> Result<(), DriverError> {
        let beta = f32::from(u8::from(self.at.residual.is_some()));
        let pointer = |at: Address| at.0 as *mut c_void;
        let algorithm = self.algorithm.as_ref().map_or(std::ptr::null(), |algorithm| &raw const algorithm.0);
        // SAFETY: handle, descriptions and algorithm live; the addresses are a prepared plan's.
        let status = unsafe {
            sys::cublasLtMatmul(
                lt.0,
                self.operation.0,
                (&raw const self.alpha).cast(),
                pointer(self.at.b),
                self.first.0,
                pointer(self.at.a),
                self.second.0,
                (&raw const beta).cast(),
                pointer(self.at.residual.unwrap_or(self.at.output)),
                self.output.0,
                pointer(self.at.output),
                self.output.0,
                algorithm,
                pointer(self.workspace.0),
                self.workspace.1,
                stream.cast(),
            )
        };
        blas("cublasLtMatmul", status)
    }
}

#[cfg(test)]
mod tests {
    use lowering::Place;

    use super::*;

    fn factor(row_stride: usize, batch_stride: usize, transposed: bool) -> Factor {
        let base = Operand { place: Place::Arena(0), ty: Type::F16 };
        Factor { base, row_stride, batch_stride, transposed }
    }

    fn matmul() -> Matmul {
        Matmul {
            a: factor(64, 3 * 64, false),
            b: factor(70, 0, false),
            bias: None,
            residual: None,
            output: factor(8, 3 * 8, false),
            alpha: 1.0,
            activation: Activation::None,
            batches: 2,
            m: 3,
            n: 5,
            k: 64,
        }
    }

    fn key(matmul: &Matmul) -> Key {
        let resolve = |operand: &Operand| match operand.place {
            Place::Arena(offset) => Address(offset as u64),
            Place::Weights(offset) => Address(1 << 40).plus(offset as u64),
        };
        Key::new(matmul, Precision::Fp16, &Addresses::new(matmul, resolve))
    }

    /// Element (row, column) of `op(matrix)`, in elements of memory: what cuBLASLt's documentation says of a layout.
    fn offset(columns: &Columns, is_transposed: bool, row: usize, column: usize) -> usize {
        let (row, column) = if is_transposed { (column, row) } else { (row, column) };
        assert!(row < columns.rows && column < columns.columns, "({row}, {column}) of {columns:?}");
        row + column * columns.stride
    }

    /// The same of our own matrices.
    fn ours(factor: &Factor, row: usize, column: usize) -> usize {
        let (row, column) = if factor.transposed { (column, row) } else { (row, column) };
        row * factor.row_stride + column
    }

    #[test]
    fn every_element_is_where_cublas_looks_for_it() {
        for (a, b) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut matmul = matmul();
            matmul.a.transposed = a;
            matmul.b.transposed = b;
            let key = key(&matmul);
            for i in 0..matmul.k {
                for row in 0..matmul.m {
                    let seen = offset(&key.second, key.is_second_transposed, i, row);
                    assert_eq!(seen, ours(&matmul.a, row, i), "a transposed: {a}");
                }
                for column in 0..matmul.n {
                    let seen = offset(&key.first, key.is_first_transposed, column, i);
                    assert_eq!(seen, ours(&matmul.b, i, column), "b transposed: {b}");
                }
            }
            for (row, column) in [(0, 0), (2, 4), (1, 3)] {
                assert_eq!(offset(&key.output, false, column, row), ours(&matmul.output, row, column));
            }
            assert_eq!((key.first.batch_stride, key.second.batch_stride, key.output.batch_stride), (0, 192, 24));
        }
    }

    #[test]
    fn what_decides_the_algorithm_is_in_the_key() {
        let plain = matmul();
        let bias = Operand { place: Place::Weights(512), ty: Type::F16 };
        let others = [
            Matmul { bias: Some(bias), ..plain.clone() },
            Matmul { residual: Some(bias), ..plain.clone() },
            Matmul { activation: Activation::Relu, ..plain.clone() },
            Matmul { m: 4, ..plain.clone() },
            Matmul {
                a: Factor { base: Operand { place: Place::Arena(8), ..plain.a.base }, ..plain.a },
                ..plain.clone()
            },
        ];
        for other in &others {
            assert_ne!(key(other), key(&plain), "{other:?}");
        }
        assert_eq!(key(&Matmul { alpha: 2.0, ..plain.clone() }), key(&plain));
        assert_eq!(key(&others[0]).epilogue(), Epilogue::CUBLASLT_EPILOGUE_BIAS);
        assert_eq!(key(&others[2]).epilogue(), Epilogue::CUBLASLT_EPILOGUE_RELU);
    }
}
