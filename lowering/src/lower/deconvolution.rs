//! Transposed convolutions whose windows lie side by side, as where an image is doubled: each element of the input
//! becomes a window of the output by itself, so they are a product whose columns are rows and columns of an image.

use tract_onnx::{
    prelude::*,
    tract_core::ops::cnn::{Deconv, KernelFormat},
};

use super::{
    LowerError,
    expression::Lazy,
    image,
    layout::Layout,
    pending::{Kind, Pending, UNSET},
    walk::{Value, Walk},
};
use crate::{
    lower::stored::Stored,
    plan::{Activation, Factor, Matmul, Operand},
};

impl Walk<'_> {
    pub(super) fn deconvolution(&mut self, node: &TypedNode, op: &Deconv) -> Result<Value, LowerError> {
        let (shape, output) = (self.shape_of(node.inputs[0])?, self.shape_of(node.id.into())?);
        let spec = &op.pool_spec;
        let is_apart = |axis: usize| spec.kernel_shape[axis] == spec.stride(axis) && spec.dilation(axis) == 1;
        // As long as that it may be, too, where as much is cut off in front as there is behind.
        let is_whole = |axis: usize| {
            op.adjustments[axis] == 0
                && spec.padding.valid_dim(axis, false)
                && output[2 + axis] == shape[2 + axis] * spec.kernel_shape[axis]
        };
        let is_image = spec.data_format.has_n() && !spec.data_format.c_is_last() && spec.rank() == 2;
        if !is_image || op.group != 1 || !(0..2).all(|axis| is_apart(axis) && is_whole(axis)) {
            return Err(self.missing_operator("Deconv whose windows overlap, or are cut off"));
        }
        let (kernel, bias) = (self.stored(node.inputs[1])?, self.stored(node.inputs[2])?);
        let (Some(_), Some((bias, _))) = (kernel.constant(), bias.constant()) else {
            return Err(self.builder.unsupported("its weights depend on an input"));
        };
        let bias = image::floats(bias)?;
        let windows = self.windows_as_columns((node, &shape), op, &kernel)?;
        let (n, h, w, k) = (shape[0], shape[2], shape[3], output[1]);
        let [r, s] = [spec.kernel_shape[0], spec.kernel_shape[1]];
        // The product's columns, and then the image's dimensions, each behind that whose elements it divides.
        let apart = windows.target.layout.reshaped(&[n, h, w, r, s, k]).expect("it is packed");
        let biases: Vec<f32> = (0..r * s * k).map(|column| bias.get(column % k).copied().unwrap_or(bias[0])).collect();
        let stored = windows.with_bias(biases).flush(&mut self.builder)?;
        let ty = stored.ty;
        let windows = Lazy::leaf(Stored { layout: apart, ..stored });
        let image = self.builder.store(&windows, &[0, 1, 3, 2, 4, 5], ty)?;
        let layout = Layout::ordered(&output, &[0, 2, 3, 1]);
        Ok(Value::Stored(Stored { layout, ..image }))
    }

    /// Each element of an image by all of the kernel: columns are rows, columns and channels of a window.
    fn windows_as_columns(
        &mut self,
        (node, shape): (&TypedNode, &[usize]),
        op: &Deconv,
        kernel: &Stored,
    ) -> Result<Pending, LowerError> {
        let ty = self.builder.float();
        let input = self.packed(node.inputs[0], &[0, 2, 3, 1], ty)?;
        // Rows, columns, outputs and inputs of the kernel.
        let dims = match op.kernel_format {
            KernelFormat::OIHW => [2, 3, 0, 1],
            KernelFormat::HWIO => [0, 1, 3, 2],
            KernelFormat::OHWI => [1, 2, 0, 3],
        };
        let of = |lengths: &[usize]| dims.map(|dim| lengths[dim]);
        let lengths = of(&kernel.layout.shape);
        let (m, n, k) = (shape[0] * shape[2] * shape[3], lengths[..3].iter().product::<usize>(), lengths[3]);
        let strides = dims.map(|dim| kernel.layout.strides[dim]).to_vec();
        let layout = Layout { shape: lengths.to_vec(), strides, offset: kernel.layout.offset };
        let target = self.builder.tensor(&[m, n], &[0, 1], ty);
        let unset = Operand { place: UNSET, ty };
        let factor = |base, row_stride, transposed| Factor { base, row_stride, batch_stride: 0, transposed };
        let step = Matmul {
            a: factor(self.builder.operand(&input)?, k, false),
            b: factor(unset, 0, true),
            bias: None,
            residual: None,
            output: factor(self.builder.operand(&target)?, n, false),
            alpha: 1.0,
            activation: Activation::None,
            batches: 1,
            m,
            n,
            k,
        };
        let weights = Stored { layout, ty, ..kernel.clone() };
        Ok(Pending::new(target, Kind::Weighted(step, weights, false), n))
    }
}
