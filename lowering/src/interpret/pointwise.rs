//! The accumulator machine of [`Pointwise`] steps.

use half::f16;

use crate::{
    interpret::{
        Memory,
        memory::{float_of, integer_of, put_float, put_integer},
    },
    plan::{Binary, Instruction, Numbers, Operand, Pointwise, TEMPORARIES, Type, Unary, Value, View},
};

pub(super) fn pointwise(step: &Pointwise, memory: &mut Memory<'_>) {
    match step.numbers {
        Numbers::Float => each_element::<f32>(step, memory),
        Numbers::Integer => each_element::<i64>(step, memory),
    }
}

/// What the machine computes with.
trait Number: Copy + Default {
    fn load(ty: Type, element: &[u8]) -> Self;
    fn store(self, ty: Type, element: &mut [u8]);
    fn constant(value: Value) -> Self;
    fn is_true(self) -> bool;
    fn unary(self, op: Unary) -> Self;
    fn binary(self, op: Binary, other: Self) -> Self;
}

fn each_element<T: Number>(step: &Pointwise, memory: &mut Memory<'_>) {
    let mut index = vec![0; step.shape.len()];
    for _ in 0..step.shape.iter().product::<usize>() {
        let at = |view: &View| -> i64 { view.strides.iter().zip(&index).map(|(stride, index)| stride * index).sum() };
        let load = |view: &View| T::load(view.base.ty, memory.bytes(view.base, at(view), 1));
        let mut inputs = [T::default(); crate::plan::INPUTS_MAX];
        inputs.iter_mut().zip(&step.inputs).for_each(|(input, view)| *input = load(view));
        let result = computed(&step.code, &inputs);
        let Operand { ty, .. } = step.output.base;
        result.store(ty, memory.bytes_mut(step.output.base, at(&step.output), 1));
        advance(&mut index, &step.shape);
    }
}

/// To the next index, the last dimension first.
fn advance(index: &mut [i64], shape: &[usize]) {
    for (index, &length) in index.iter_mut().zip(shape).rev() {
        *index += 1;
        if *index < length as i64 {
            return;
        }
        *index = 0;
    }
}

fn computed<T: Number>(code: &[Instruction], inputs: &[T]) -> T {
    let (mut acc, mut temporaries) = (T::default(), [T::default(); TEMPORARIES]);
    for instruction in code {
        let of = |value: Value| match value {
            Value::Input(input) => inputs[usize::from(input)],
            Value::Temporary(temporary) => temporaries[usize::from(temporary)],
            Value::Float(_) | Value::Integer(_) => T::constant(value),
        };
        acc = match *instruction {
            Instruction::Load(value) => of(value),
            Instruction::Save(temporary) => {
                temporaries[usize::from(temporary)] = acc;
                acc
            }
            Instruction::Unary(op) => acc.unary(op),
            Instruction::Binary(op, value) => acc.binary(op, of(value)),
            Instruction::Reversed(op, value) => of(value).binary(op, acc),
            Instruction::Select(first, second) => of(if acc.is_true() { first } else { second }),
        };
    }
    acc
}

impl Number for f32 {
    fn load(ty: Type, element: &[u8]) -> Self {
        float_of(ty, element)
    }

    fn store(self, ty: Type, element: &mut [u8]) {
        put_float(ty, self, element);
    }

    fn constant(value: Value) -> Self {
        match value {
            Value::Float(value) => value,
            other => panic!("{other:?} in a step of floats"),
        }
    }

    fn is_true(self) -> bool {
        self != 0.0
    }

    fn unary(self, op: Unary) -> Self {
        match op {
            Unary::Neg => -self,
            Unary::Abs => self.abs(),
            Unary::Sign => f32::from(i8::from(self > 0.0) - i8::from(self < 0.0)),
            Unary::Not => truth(self == 0.0),
            Unary::Through(ty) => through(ty, self),
            Unary::Exp => self.exp(),
            Unary::Log => self.ln(),
            Unary::Sqrt => self.sqrt(),
            Unary::Rsqrt => self.sqrt().recip(),
            Unary::Reciprocal => self.recip(),
            Unary::Tanh => self.tanh(),
            Unary::Sigmoid => ((-self).exp() + 1.0).recip(),
            Unary::Erf => erf(f64::from(self)) as f32,
            Unary::Sin => self.sin(),
            Unary::Cos => self.cos(),
            Unary::Floor => self.floor(),
            Unary::Ceil => self.ceil(),
            Unary::Round => self.round_ties_even(),
        }
    }

    fn binary(self, op: Binary, other: Self) -> Self {
        match op {
            Binary::Add => self + other,
            Binary::Sub => self - other,
            Binary::Mul => self * other,
            Binary::Div => self / other,
            Binary::Rem => self % other,
            Binary::Pow => self.powf(other),
            Binary::Min => self.min(other),
            Binary::Max => self.max(other),
            Binary::Equal => truth(self == other),
            Binary::Less => truth(self < other),
            Binary::LessEqual => truth(self <= other),
            Binary::And => truth(self.is_true() && other.is_true()),
            Binary::Or => truth(self.is_true() || other.is_true()),
            Binary::Xor => truth(self.is_true() != other.is_true()),
        }
    }
}

fn truth(is_true: bool) -> f32 {
    f32::from(u8::from(is_true))
}

fn through(ty: Type, value: f32) -> f32 {
    match ty {
        Type::F32 => value,
        Type::F16 => f16::from_f32(value).to_f32(),
        Type::I64 => value as i64 as f32,
        Type::I32 => value as i32 as f32,
        Type::U8 => f32::from(value as u8),
        Type::Bool => truth(value != 0.0),
    }
}

/// By a series whose terms all have one sign (Abramowitz and Stegun, 7.1.6); beyond 4 it is 1 in binary32.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() >= 4.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > sum.abs() * 1e-17 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

impl Number for i64 {
    fn load(ty: Type, element: &[u8]) -> Self {
        integer_of(ty, element)
    }

    fn store(self, ty: Type, element: &mut [u8]) {
        put_integer(ty, self, element);
    }

    fn constant(value: Value) -> Self {
        match value {
            Value::Integer(value) => value,
            other => panic!("{other:?} in a step of integers"),
        }
    }

    fn is_true(self) -> bool {
        self != 0
    }

    fn unary(self, op: Unary) -> Self {
        match op {
            Unary::Neg => self.wrapping_neg(),
            Unary::Abs => self.wrapping_abs(),
            Unary::Sign => self.signum(),
            Unary::Not => i64::from(self == 0),
            Unary::Through(Type::I64) => self,
            Unary::Through(Type::I32) => i64::from(self as i32),
            Unary::Through(Type::U8) => i64::from(self as u8),
            Unary::Through(Type::Bool) => i64::from(self != 0),
            Unary::Through(ty) => through(ty, self as f32) as i64,
            other => panic!("{other:?} in a step of integers"),
        }
    }

    fn binary(self, op: Binary, other: Self) -> Self {
        match op {
            Binary::Add => self.wrapping_add(other),
            Binary::Sub => self.wrapping_sub(other),
            Binary::Mul => self.wrapping_mul(other),
            Binary::Div if other == 0 => 0,
            Binary::Div => self.wrapping_div(other),
            Binary::Rem if other == 0 => 0,
            Binary::Rem => self.wrapping_rem(other),
            Binary::Pow => power(self, other),
            Binary::Min => self.min(other),
            Binary::Max => self.max(other),
            Binary::Equal => i64::from(self == other),
            Binary::Less => i64::from(self < other),
            Binary::LessEqual => i64::from(self <= other),
            Binary::And => i64::from(self != 0 && other != 0),
            Binary::Or => i64::from(self != 0 || other != 0),
            Binary::Xor => i64::from((self != 0) != (other != 0)),
        }
    }
}

/// Wraps; what is no integer is truncated, and 0 to a negative power is 0.
fn power(base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 if exponent % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        };
    }
    let (mut result, mut square, mut rest) = (1i64, base, exponent);
    while rest > 0 {
        if rest % 2 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        rest /= 2;
    }
    result
}
