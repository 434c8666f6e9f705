//! Local response normalisation: elements are divided by the mean of squares in a window over channels.

use tract_onnx::prelude::*;
use tract_onnx_opl::lrn::Lrn;

use super::{
    LowerError,
    expression::{Expression, Lazy},
    walk::{Value, Walk},
};
use crate::{
    lower::stored::Stored,
    plan::{Binary, Numbers, Pool, PoolKind, Step, Type},
};

impl Walk<'_> {
    /// x / (bias + alpha * mean of x^2) ^ beta, where the mean is that of `size` channels, of which those outside are
    /// zero (ONNX, `LRN`).
    pub(super) fn response(&mut self, node: &TypedNode, op: &Lrn) -> Result<Value, LowerError> {
        let shape = self.shape_of(node.inputs[0])?;
        if shape.len() < 2 || op.size == 0 {
            return Err(self.builder.unsupported("only channels of images are normalised, over a window"));
        }
        let order: Vec<usize> = [0].into_iter().chain(2..shape.len()).chain([1]).collect();
        let input = self.packed(node.inputs[0], &order, self.builder.float())?;
        let means = self.means_of_squares(&input, &order, op.size)?;
        let number = |number: f32| Expression::Number(number.into()).into();
        let binary = |binary, a, b| Expression::Binary(binary, a, b).into();
        let leaf = Lazy::leaf(input);
        let scaled = binary(Binary::Mul, Lazy::leaf(means).expression, number(op.alpha));
        let power = binary(Binary::Pow, binary(Binary::Add, scaled, number(op.bias)), number(op.beta));
        let expression = binary(Binary::Div, leaf.expression.clone(), power);
        Ok(Value::Lazy(Lazy { expression, numbers: Some(Numbers::Float), ..leaf }))
    }

    /// In binary32: a square may be more than binary16 holds.
    fn means_of_squares(&mut self, input: &Stored, order: &[usize], size: usize) -> Result<Stored, LowerError> {
        let leaf = Lazy::leaf(input.clone());
        let expression = Expression::Binary(Binary::Mul, leaf.expression.clone(), leaf.expression.clone()).into();
        let squares = Lazy { expression, numbers: Some(Numbers::Float), ty: Type::F32, ..leaf };
        let squares = self.builder.store(&squares, order, Type::F32)?;
        let shape = &squares.layout.shape;
        let channels = shape[1];
        let means = self.builder.tensor(shape, order, Type::F32);
        // Each place of each image is an image of its own, whose width are its channels.
        let step = Pool {
            input: self.builder.operand(&squares)?,
            output: self.builder.operand(&means)?,
            kind: PoolKind::AveragePadded,
            n: shape.iter().product::<usize>() / channels.max(1),
            size: [1, channels],
            c: 1,
            out: [1, channels],
            kernel: [1, size],
            strides: [1, 1],
            dilations: [1, 1],
            pads: [0, (size - 1) / 2],
        };
        self.builder.steps.push(Step::Pool(step));
        Ok(means)
    }
}
