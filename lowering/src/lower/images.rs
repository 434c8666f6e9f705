//! Convolutions, pooling and resizing of images.

use tract_onnx::{
    prelude::*,
    tract_core::ops::{
        cnn::{Conv as ConvOp, KernelFormat, MaxPool, PaddingSpec, PoolSpec, SumPool},
        nn::{CoordTransformer, DataFormat, Interpolator, Nearest, Resize as ResizeOp},
    },
};
use tract_onnx_opl::resize as onnx;

use super::{
    LowerError,
    expression::{Expression, Lazy},
    image,
    layout::Layout,
    pending::{Kind, Pending, UNSET},
    walk::{Value, Walk},
};
use crate::{
    lower::stored::{Base, Stored},
    plan::{Activation, Binary, Conv, Numbers, Operand, Pool, PoolKind, Resize, ResizeKind, Step},
};

/// An image in memory, rows of width one if it has one dimension, and where a window goes over it.
struct Windows {
    input: Stored,
    /// The order of the result's dimensions in memory.
    order: Vec<usize>,
    n: usize,
    size: [usize; 2],
    c: usize,
    out: [usize; 2],
    kernel: [usize; 2],
    strides: [usize; 2],
    dilations: [usize; 2],
    pads: [usize; 2],
}

/// The dimensions of images from the outermost to the innermost, as NHWC has them.
fn order_of(format: DataFormat, rank: usize) -> Vec<usize> {
    let first = usize::from(format.has_n());
    let images = format.has_n().then_some(0);
    let (channel, spatial) = match format.c_is_last() {
        true => (rank - 1, first..rank - 1),
        false => (first, first + 1..rank),
    };
    images.into_iter().chain(spatial).chain([channel]).collect()
}

/// Two numbers for height and width.
fn pair(found: &[usize], filler: usize) -> [usize; 2] {
    match found {
        [width] => [filler, *width],
        found => [found[0], found[1]],
    }
}

impl Walk<'_> {
    fn windows(&mut self, node: &TypedNode, spec: &PoolSpec) -> Result<Windows, LowerError> {
        let shape = self.shape_of(node.inputs[0])?;
        let order = order_of(spec.data_format, shape.len());
        let ty = self.builder.float();
        let input = self.packed(node.inputs[0], &order, ty)?;
        let spatial = &order[order.len() - 1 - spec.rank()..order.len() - 1];
        let size: Vec<usize> = spatial.iter().map(|&dim| shape[dim]).collect();
        let padding = spec.computed_padding(&size[..]);
        // tract leaves dimensions of one where shapes change around it.
        let is_one = |at: usize| size[at] == 1 && spec.kernel_shape[at] == 1 && padding[at].convoluted == 1;
        let (ones, mut kept): (Vec<usize>, Vec<usize>) = (0..spec.rank()).partition(|&at| is_one(at));
        kept.extend(ones.iter().take(1_usize.saturating_sub(kept.len())));
        if kept.len() > 2 {
            return Err(self.builder.unsupported("images of more than two dimensions are for the CPU's executor"));
        }
        let of = |all: &dyn Fn(usize) -> usize| pair(&kept.iter().map(|&at| all(at)).collect::<Vec<_>>(), 1);
        let pads = pair(&kept.iter().map(|&at| padding[at].pad_before).collect::<Vec<_>>(), 0);
        Ok(Windows {
            n: if spec.data_format.has_n() { shape[0] } else { 1 },
            c: shape[order[order.len() - 1]],
            size: of(&|at| size[at]),
            out: of(&|at| padding[at].convoluted),
            kernel: of(&|at| spec.kernel_shape[at]),
            strides: of(&|at| spec.stride(at)),
            dilations: of(&|at| spec.dilation(at)),
            pads,
            input,
            order,
        })
    }

    pub(super) fn convolution(&mut self, node: &TypedNode, op: &ConvOp) -> Result<Value, LowerError> {
        if op.q_params.is_some() {
            return Err(self.missing(node));
        }
        let kernel = self.stored(node.inputs[1])?;
        let bias = self.stored(node.inputs[2])?;
        let (Some(_), Some((bias, _))) = (kernel.constant(), bias.constant()) else {
            return Err(self.builder.unsupported("its weights depend on an input"));
        };
        let bias = image::floats(bias)?;
        let windows = self.windows(node, &op.pool_spec)?;
        let rank = kernel.layout.rank();
        let dims: Vec<usize> = match op.kernel_fmt {
            KernelFormat::OIHW => [0].into_iter().chain(2..rank).chain([1]).collect(),
            KernelFormat::HWIO if op.group == 1 => [rank - 1].into_iter().chain(0..rank - 1).collect(),
            KernelFormat::OHWI if op.group == 1 => (0..rank).collect(),
            _ => return Err(self.builder.unsupported("groups are for filters of the form OIHW")),
        };
        let layout = Layout {
            shape: dims.iter().map(|&dim| kernel.layout.shape[dim]).collect(),
            strides: dims.iter().map(|&dim| kernel.layout.strides[dim]).collect(),
            offset: kernel.layout.offset,
        };
        let [r, s] = windows.kernel;
        let layout = layout.reshaped(&[op.pool_spec.output_channels, r, s, windows.c / op.group]);
        let layout = layout.ok_or_else(|| self.builder.unsupported("its filters are not those of an image"))?;
        let ty = windows.input.ty;
        let target = self.builder.tensor(&self.shape_of(node.id.into())?, &windows.order, ty);
        let step = Conv {
            input: self.builder.operand(&windows.input)?,
            weights: Operand { place: UNSET, ty },
            bias: None,
            residual: None,
            output: self.builder.operand(&target)?,
            activation: Activation::None,
            n: windows.n,
            size: windows.size,
            c: windows.c,
            k: op.pool_spec.output_channels,
            out: windows.out,
            kernel: windows.kernel,
            strides: windows.strides,
            dilations: windows.dilations,
            pads: windows.pads,
            groups: op.group,
        };
        let kernel = Stored { layout, ty, ..kernel };
        let pending = Pending::new(target, Kind::Conv(step, kernel), op.pool_spec.output_channels);
        Ok(pending.with_bias(bias).into())
    }

    pub(super) fn max_pool(&mut self, node: &TypedNode, op: &MaxPool) -> Result<Value, LowerError> {
        if op.with_index_outputs.is_some() {
            return Err(self.builder.unsupported("its indexes are for the CPU's executor"));
        }
        self.pool(node, &op.pool_spec, PoolKind::Max).map(Value::Stored)
    }

    pub(super) fn sum_pool(&mut self, node: &TypedNode, op: &SumPool) -> Result<Value, LowerError> {
        let kind = if op.normalize && !op.count_include_pad { PoolKind::Average } else { PoolKind::AveragePadded };
        let stored = self.pool(node, &op.pool_spec, kind)?;
        let cut = if op.normalize && op.count_include_pad { self.cut_windows(node, &op.pool_spec)? } else { None };
        let factor = match cut {
            Some(cut) => Expression::Leaf(cut),
            None if op.normalize => return Ok(Value::Stored(stored)),
            #[allow(clippy::cast_precision_loss, reason = "windows are small")]
            None => Expression::Number(op.pool_spec.kernel_shape.iter().product::<usize>() as f64),
        };
        let mean = Lazy::leaf(stored);
        let expression = Expression::Binary(Binary::Mul, mean.expression.clone(), factor.into()).into();
        Ok(Value::Lazy(Lazy { expression, numbers: Some(Numbers::Float), ..mean }))
    }

    /// What the means of whole windows are multiplied with, for each place of an image, where windows that `ceil_mode`
    /// has added end behind the padding: padding is counted, and what lies behind it is not.
    fn cut_windows(&self, node: &TypedNode, spec: &PoolSpec) -> Result<Option<Stored>, LowerError> {
        let PaddingSpec::ExplicitOnnxPool(before, after, true) = &spec.padding else { return Ok(None) };
        let (input, output) = (self.shape_of(node.inputs[0])?, self.shape_of(node.id.into())?);
        let order = order_of(spec.data_format, output.len());
        let spatial = &order[usize::from(spec.data_format.has_n())..order.len() - 1];
        let mut layout = Layout { shape: output.clone(), strides: vec![0; output.len()], offset: 0 };
        let mut factors = vec![1.0_f32];
        for (axis, &dim) in spatial.iter().enumerate() {
            let (kernel, end) = (spec.kernel_shape[axis], before[axis] + input[dim] + after[axis]);
            let is_counted = |at: usize, tap: usize| at * spec.stride(axis) + tap * spec.dilation(axis) < end;
            let counted = |at: usize| (0..kernel).filter(|&tap| is_counted(at, tap)).count().max(1);
            #[allow(clippy::cast_precision_loss, reason = "windows are small")]
            let along: Vec<f32> = (0..output[dim]).map(|at| kernel as f32 / counted(at) as f32).collect();
            factors = factors.iter().flat_map(|factor| along.iter().map(move |other| factor * other)).collect();
            layout.strides[dim] = spatial[axis + 1..].iter().map(|&inner| output[inner] as i64).product();
        }
        if factors.iter().all(|&factor| factor == 1.0) {
            return Ok(None);
        }
        let ty = self.builder.type_of(DatumType::F32)?;
        let base = Base::Constant(tensor1(&factors).into_arc_tensor(), node.name.as_str().into());
        Ok(Some(Stored { base, ty, layout }))
    }

    fn pool(&mut self, node: &TypedNode, spec: &PoolSpec, kind: PoolKind) -> Result<Stored, LowerError> {
        if !node.outputs[0].fact.datum_type.is_float() {
            return Err(self.builder.unsupported("pooling of integers is for the CPU's executor"));
        }
        let windows = self.windows(node, spec)?;
        let target = self.builder.tensor(&self.shape_of(node.id.into())?, &windows.order, windows.input.ty);
        let step = Pool {
            input: self.builder.operand(&windows.input)?,
            output: self.builder.operand(&target)?,
            kind,
            n: windows.n,
            size: windows.size,
            c: windows.c,
            out: windows.out,
            kernel: windows.kernel,
            strides: windows.strides,
            dilations: windows.dilations,
            pads: windows.pads,
        };
        self.builder.steps.push(Step::Pool(step));
        Ok(target)
    }

    pub(super) fn resize(&mut self, node: &TypedNode, op: &ResizeOp) -> Result<Value, LowerError> {
        let kind = match (&op.interpolator, op.nearest) {
            (Interpolator::Linear, _) => ResizeKind::Linear,
            (Interpolator::Nearest, Nearest::Floor) => ResizeKind::Floor,
            (Interpolator::Nearest, Nearest::RoundPreferCeil) => ResizeKind::NearestHigh,
            (Interpolator::Cubic, _) => return Err(self.missing_operator("Resize<cubic>")),
        };
        let mut scales = self.ratios(node)?;
        if let Some(given) = self.numbers_of(node, op.optional_scales_input)?.filter(|it| it.len() == scales.len()) {
            scales = given;
        }
        self.resample(node, kind, &op.coord_transformer, &scales)
    }

    /// The same with what only files of ONNX say.
    pub(super) fn resize_of_onnx(&mut self, node: &TypedNode, op: &onnx::Resize) -> Result<Value, LowerError> {
        let kind = match (&op.interpolator, op.nearest) {
            (Interpolator::Linear, _) => ResizeKind::Linear,
            (Interpolator::Nearest, onnx::Nearest::Floor) => ResizeKind::Floor,
            (Interpolator::Nearest, onnx::Nearest::Ceil) => ResizeKind::Ceil,
            (Interpolator::Nearest, onnx::Nearest::RoundPreferFloor) => ResizeKind::NearestLow,
            (Interpolator::Nearest, onnx::Nearest::RoundPreferCeil) => ResizeKind::NearestHigh,
            (Interpolator::Cubic, _) => return Err(self.missing_operator("Resize<cubic>")),
        };
        let onnx::CoordTransform::Plain(transformer) = &op.coord_transformer else {
            return Err(self.missing_operator("Resize<tf_crop_and_resize>"));
        };
        if op.antialias || op.exclude_outside {
            let what = if op.antialias { "Resize<antialias>" } else { "Resize<exclude_outside>" };
            return Err(self.missing_operator(what));
        }
        let (shape, mut scales) = (self.shape_of(node.inputs[0])?, self.ratios(node)?);
        let axes = op.resized_axes(shape.len()).map_err(|error| self.builder.unsupported(&error.to_string()))?;
        let has_one_each = |numbers: &Vec<f32>| numbers.len() == axes.len();
        if let Some(given) = self.numbers_of(node, op.optional_scales_input)?.filter(has_one_each) {
            std::iter::zip(&axes, given).for_each(|(&axis, scale)| scales[axis] = scale);
        } else if let Some(pick) = match op.keep_aspect_ratio_policy {
            onnx::AspectRatio::Stretch => None,
            onnx::AspectRatio::NotLarger => Some(f32::min as fn(f32, f32) -> f32),
            onnx::AspectRatio::NotSmaller => Some(f32::max as fn(f32, f32) -> f32),
        } {
            // One for all: what is wished for one dimension decides how long the others become.
            let sizes = self.numbers_of(node, op.optional_sizes_input)?.filter(has_one_each);
            let sizes = sizes.ok_or_else(|| self.builder.unsupported("its sizes depend on an input"))?;
            #[allow(clippy::cast_precision_loss, reason = "images are small")]
            let ratios = std::iter::zip(&axes, sizes).map(|(&axis, size)| size / shape[axis] as f32);
            let scale = ratios.reduce(pick).unwrap_or(1.0);
            axes.iter().for_each(|&axis| scales[axis] = scale);
        }
        self.resample(node, kind, transformer, &scales)
    }

    /// How much longer each dimension becomes.
    #[allow(clippy::cast_precision_loss, reason = "images are small")]
    fn ratios(&self, node: &TypedNode) -> Result<Vec<f32>, LowerError> {
        let (shape, output) = (self.shape_of(node.inputs[0])?, self.shape_of(node.id.into())?);
        Ok(std::iter::zip(shape, output).map(|(from, to)| to as f32 / from as f32).collect())
    }

    /// An optional input's elements; `None` if it is not there, or depends on a request.
    fn numbers_of(&self, node: &TypedNode, slot: Option<usize>) -> Result<Option<Vec<f32>>, LowerError> {
        let outlet = slot.and_then(|slot| node.inputs.get(slot).copied());
        let tensor = outlet.and_then(|outlet| self.fact(outlet).ok()?.konst.clone());
        tensor.map(|tensor| image::floats(&tensor)).transpose()
    }

    fn resample(
        &mut self,
        node: &TypedNode,
        kind: ResizeKind,
        transformer: &CoordTransformer,
        scales: &[f32],
    ) -> Result<Value, LowerError> {
        let (shape, output) = (self.shape_of(node.inputs[0])?, self.shape_of(node.id.into())?);
        let changed: Vec<usize> = (0..shape.len()).filter(|&dim| shape[dim] != output[dim]).collect();
        let is_image = shape.len() == 4 && changed.iter().all(|dim| [2, 3].contains(dim));
        if !is_image || !node.outputs[0].fact.datum_type.is_float() {
            return Err(self.builder.unsupported("only heights and widths of NCHW images can be resized"));
        }
        let order = order_of(DataFormat::NCHW, 4);
        let input = self.packed(node.inputs[0], &order, self.builder.float())?;
        let target = self.builder.tensor(&output, &order, input.ty);
        let mut axes = [[0.0; 3]; 2];
        for (axis, dim) in axes.iter_mut().zip(2..) {
            *axis = coordinates(transformer, scales[dim], shape[dim], output[dim]);
        }
        let step = Resize {
            input: self.builder.operand(&input)?,
            output: self.builder.operand(&target)?,
            kind,
            n: shape[0],
            size: [shape[2], shape[3]],
            c: shape[1],
            out: [output[2], output[3]],
            offset: axes.map(|axis| axis[0]),
            scale: axes.map(|axis| axis[1]),
            shift: axes.map(|axis| axis[2]),
        };
        self.builder.steps.push(Step::Resize(step));
        Ok(Value::Stored(target))
    }
}

/// Offset, scale and shift of positions, as ONNX's coordinate transformations have them.
#[allow(clippy::cast_precision_loss, reason = "images are small")]
fn coordinates(transformer: &CoordTransformer, scale: f32, length: usize, output: usize) -> [f32; 3] {
    let (length, inverse) = (length as f32, 1.0 / scale);
    match transformer {
        CoordTransformer::HalfPixel => [0.5, inverse, 0.5],
        CoordTransformer::AlignCorners if scale * length == 1.0 => [0.0, 0.0, 0.0],
        CoordTransformer::AlignCorners => [0.0, (length - 1.0) / (scale * length - 1.0), 0.0],
        CoordTransformer::Asymmetric => [0.0, inverse, 0.0],
        CoordTransformer::PytorchHalfPixel if output <= 1 => [0.0, 0.0, 0.5],
        CoordTransformer::PytorchHalfPixel => [0.5, inverse, 0.5],
        CoordTransformer::HalfPixelSymmetric => {
            let adjustment = output as f32 / (scale * length);
            [0.5, inverse, 0.5 - length / 2.0 * (1.0 - adjustment)]
        }
        CoordTransformer::TfHalfPixelForNn => [0.5, inverse, 0.0],
    }
}
