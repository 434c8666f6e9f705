//! Elementwise operators as expressions.

use std::rc::Rc;

use tract_onnx::{
    prelude::*,
    tract_core::ops::{
        binary::TypedBinOp,
        element_wise::ElementWiseOp,
        logic::{BitNot, Iff},
        math::{IsInf, PowConst},
        nn::{GeluApproximate, LeakyRelu},
    },
};

use super::{
    LowerError,
    expression::{Expression, Lazy, compile},
    walk::{Value, Walk},
};
use crate::plan::{Binary, Numbers, Type, Unary};

type Part = Rc<Expression>;

fn number(value: f64) -> Part {
    Rc::new(Expression::Number(value))
}

fn unary(unary: Unary, a: &Part) -> Part {
    Rc::new(Expression::Unary(unary, a.clone()))
}

fn binary(binary: Binary, a: &Part, b: &Part) -> Part {
    Rc::new(Expression::Binary(binary, a.clone(), b.clone()))
}

/// The function of two numbers of this name, whether its operands are swapped, and whether its result is negated.
fn binary_of(name: &str) -> Option<(Binary, bool, bool)> {
    Some(match name {
        "Add" => (Binary::Add, false, false),
        "Sub" => (Binary::Sub, false, false),
        "SubF" => (Binary::Sub, true, false),
        "Mul" => (Binary::Mul, false, false),
        "Div" => (Binary::Div, false, false),
        "Rem" => (Binary::Rem, false, false),
        "Pow" => (Binary::Pow, false, false),
        "Min" => (Binary::Min, false, false),
        "Max" => (Binary::Max, false, false),
        "And" => (Binary::And, false, false),
        "Or" => (Binary::Or, false, false),
        "Xor" => (Binary::Xor, false, false),
        "Eq" => (Binary::Equal, false, false),
        "NE" => (Binary::Equal, false, true),
        "LT" => (Binary::Less, false, false),
        "GT" => (Binary::Less, true, false),
        "LTE" => (Binary::LessEqual, false, false),
        "GTE" => (Binary::LessEqual, true, false),
        _ => return None,
    })
}

/// What is computed with when elements of this type are.
fn numbers_of(ty: Type) -> Option<Numbers> {
    match ty {
        Type::F32 | Type::F16 => Some(Numbers::Float),
        Type::I64 | Type::I32 | Type::U8 => Some(Numbers::Integer),
        Type::Bool => None,
    }
}

impl Walk<'_> {
    /// Lowers an operator that [`is_elementwise`].
    pub(super) fn elementwise(&mut self, node: &TypedNode) -> Result<Value, LowerError> {
        let shape = self.shape_of(node.id.into())?;
        let ty = self.builder.type_of(node.outputs[0].fact.datum_type)?;
        if let Some(op) = node.op_as::<TypedBinOp>() {
            return self.binary(node, (op.0.name(), &shape, ty));
        }
        if node.op_is::<Iff>() {
            return self.select(node, &shape, ty);
        }
        let operand = self.lazy(node.inputs[0])?;
        if let Some(op) = node.op_as::<ElementWiseOp>() {
            return self.unary(op, operand, ty);
        }
        self.cast(operand, ty)
    }

    /// A tensor as an operand of numbers of this kind: one that is computed with others is stored before.
    fn operand(&mut self, lazy: Lazy, numbers: Option<Numbers>) -> Result<Lazy, LowerError> {
        if numbers.is_none() || lazy.numbers.is_none() || lazy.numbers == numbers {
            return Ok(lazy);
        }
        Ok(Lazy::leaf(self.builder.store_natural(&lazy)?))
    }

    /// An expression of operands, of which the longest are stored until the whole fits a step.
    fn compose(
        &mut self,
        mut operands: Vec<Lazy>,
        (shape, ty, numbers): (&[usize], Type, Option<Numbers>),
        make: &dyn Fn(&[Part]) -> Part,
    ) -> Result<Value, LowerError> {
        let numbers = numbers.or_else(|| operands.iter().find_map(|operand| operand.numbers));
        for operand in &mut operands {
            *operand = self.operand(operand.clone(), numbers)?;
        }
        loop {
            let parts: Vec<Part> = operands.iter().map(|operand| operand.expression.clone()).collect();
            let lazy = Lazy { shape: shape.to_vec(), expression: make(&parts), numbers, ty };
            if compile(&lazy).is_some() {
                return Ok(Value::Lazy(lazy));
            }
            let length = |lazy: &Lazy| compile(lazy).map_or(usize::MAX, |(code, inputs)| code.len() + 8 * inputs.len());
            let is_open = |lazy: &&mut Lazy| !matches!(&*lazy.expression, Expression::Leaf(_) | Expression::Number(_));
            let Some(longest) = operands.iter_mut().filter(is_open).max_by_key(|lazy| length(lazy)) else {
                return Err(self.builder.unsupported("it is too long for a step"));
            };
            let stored = self.builder.store_natural(longest)?;
            *longest = Lazy::leaf(stored);
        }
    }

    fn binary(&mut self, node: &TypedNode, (name, shape, ty): (&str, &[usize], Type)) -> Result<Value, LowerError> {
        let is_bool = node.outputs[0].fact.datum_type == DatumType::Bool;
        let name = match name {
            "BitAnd" if is_bool => "And",
            "BitOr" if is_bool => "Or",
            "BitXor" if is_bool => "Xor",
            name => name,
        };
        let Some((function, is_swapped, is_negated)) = binary_of(name) else { return Err(self.missing(node)) };
        let (mut first, mut second) = (node.inputs[0], node.inputs[1]);
        if is_swapped {
            std::mem::swap(&mut first, &mut second);
        }
        if let Some(pending) = self.absorbed(function, (first, second), shape)? {
            return Ok(pending);
        }
        let operands = [first, second].map(|outlet| self.broadcast(outlet, shape));
        let [a, b] = operands;
        let operands = vec![a?, b?];
        let found = self.builder.type_of(self.fact(first)?.datum_type)?;
        let numbers = numbers_of(found);
        let exponent = operands[1].number().filter(|_| function == Binary::Pow);
        self.compose(operands, (shape, ty, numbers), &|parts| {
            let value = exponent.and_then(|exponent| power(&parts[0], exponent));
            let value = value.unwrap_or_else(|| binary(function, &parts[0], &parts[1]));
            if is_negated { unary(Unary::Not, &value) } else { value }
        })
    }

    /// The step that one of the operands is still to be, with the operator as a part of it.
    fn absorbed(
        &mut self,
        function: Binary,
        (first, second): (OutletId, OutletId),
        shape: &[usize],
    ) -> Result<Option<Value>, LowerError> {
        for (own, other, is_reversed) in [(first, second, false), (second, first, true)] {
            if !self.is_pending(own) || self.shape_of(own)? != shape {
                continue;
            }
            if self.is_pending(other) && function != Binary::Add {
                continue;
            }
            let operand = self.broadcast(other, shape)?;
            let Value::Pending(mut pending) = self.take(own)? else { continue };
            if pending.absorb(function, &operand, is_reversed) {
                return Ok(Some(Value::Pending(pending)));
            }
            self.put_back(own, Value::Pending(pending));
        }
        Ok(None)
    }

    fn select(&mut self, node: &TypedNode, shape: &[usize], ty: Type) -> Result<Value, LowerError> {
        let mut operands = Vec::new();
        for &input in &node.inputs {
            operands.push(self.broadcast(input, shape)?);
        }
        self.compose(operands, (shape, ty, numbers_of(ty)), &|parts| {
            Rc::new(Expression::Select(parts[0].clone(), parts[1].clone(), parts[2].clone()))
        })
    }

    fn cast(&mut self, operand: Lazy, ty: Type) -> Result<Value, LowerError> {
        let from = operand.ty;
        let shape = operand.shape.clone();
        match (from.is_float(), ty.is_float()) {
            _ if ty == Type::Bool && from != Type::Bool => {
                self.compose(vec![operand], (&shape, ty, numbers_of(from)), &|parts| {
                    unary(Unary::Not, &unary(Unary::Not, &parts[0]))
                })
            }
            (true, true) => Ok(Value::Lazy(Lazy { ty, ..operand })),
            _ if from == Type::Bool => Ok(Value::Lazy(Lazy { ty, ..operand })),
            (false, true) => {
                let operand = self.operand(operand, Some(Numbers::Float))?;
                Ok(Value::Lazy(Lazy { ty, numbers: Some(Numbers::Float), ..operand }))
            }
            (true, false) => self.compose(vec![operand], (&shape, ty, Some(Numbers::Float)), &|parts| {
                unary(Unary::Through(ty), &parts[0])
            }),
            (false, false) if ty.bytes() >= from.bytes() => Ok(Value::Lazy(Lazy { ty, ..operand })),
            (false, false) => self.compose(vec![operand], (&shape, ty, Some(Numbers::Integer)), &|parts| {
                unary(Unary::Through(ty), &parts[0])
            }),
        }
    }

    fn unary(&mut self, op: &ElementWiseOp, operand: Lazy, ty: Type) -> Result<Value, LowerError> {
        let (name, from, shape) = (op.0.name(), operand.ty, operand.shape.clone());
        if matches!(name.as_str(), "Ceil" | "Floor" | "Round") && !from.is_float() {
            return Ok(Value::Lazy(operand));
        }
        let is_not = name == "Not" || (op.0.is::<BitNot>() && from == Type::Bool);
        let make: Box<dyn Fn(&Part) -> Part> = if let Some(function) = simple(&name) {
            Box::new(move |x| unary(function, x))
        } else if is_not {
            Box::new(|x| unary(Unary::Not, x))
        } else if let Some(op) = op.0.downcast_ref::<LeakyRelu>() {
            let alpha = f64::from(op.alpha);
            Box::new(move |x| {
                let negative = binary(Binary::Mul, &binary(Binary::Min, x, &number(0.0)), &number(alpha));
                binary(Binary::Add, &binary(Binary::Max, x, &number(0.0)), &negative)
            })
        } else if let Some(op) = op.0.downcast_ref::<PowConst>() {
            let exponent = f64::from(op.exponent);
            Box::new(move |x| power(x, exponent).unwrap_or_else(|| binary(Binary::Pow, x, &number(exponent))))
        } else if let Some(op) = op.0.downcast_ref::<GeluApproximate>() {
            let is_square = op.fast_impl;
            Box::new(move |x| gelu_tanh(x, is_square))
        } else if let Some(op) = op.0.downcast_ref::<IsInf>() {
            let (positive, negative) = (op.detect_positive, op.detect_negative);
            Box::new(move |x| is_infinite(x, positive, negative))
        } else if let Some(function) = composed(&name) {
            Box::new(function)
        } else {
            return Err(self.missing_operator(&name));
        };
        self.compose(vec![operand], (&shape, ty, numbers_of(from)), &|parts| make(&parts[0]))
    }
}

fn simple(name: &str) -> Option<Unary> {
    Some(match name {
        "Abs" => Unary::Abs,
        "Exp" => Unary::Exp,
        "Ln" => Unary::Log,
        "Sqrt" => Unary::Sqrt,
        "Recip" => Unary::Reciprocal,
        "Rsqrt" => Unary::Rsqrt,
        "Ceil" => Unary::Ceil,
        "Floor" => Unary::Floor,
        "RoundHalfToEven" => Unary::Round,
        "Cos" => Unary::Cos,
        "Sin" => Unary::Sin,
        "Tanh" => Unary::Tanh,
        "Erf" => Unary::Erf,
        "Neg" => Unary::Neg,
        "Sign" => Unary::Sign,
        "Sigmoid" => Unary::Sigmoid,
        _ => return None,
    })
}

/// Functions that are made of others.
fn composed(name: &str) -> Option<fn(&Part) -> Part> {
    Some(match name {
        "Square" => |x| binary(Binary::Mul, x, x),
        "Silu" => |x| binary(Binary::Mul, &unary(Unary::Sigmoid, x), x),
        "GeluExact" => |x| {
            let erf = unary(Unary::Erf, &binary(Binary::Mul, x, &number(std::f64::consts::FRAC_1_SQRT_2)));
            let sum = binary(Binary::Add, &erf, &number(1.0));
            binary(Binary::Mul, &binary(Binary::Mul, &sum, &number(0.5)), x)
        },
        "HardSwish" => |x| {
            let line = binary(Binary::Add, &binary(Binary::Mul, x, &number(1.0 / 6.0)), &number(0.5));
            let gate = binary(Binary::Max, &binary(Binary::Min, &line, &number(1.0)), &number(0.0));
            binary(Binary::Mul, &gate, x)
        },
        // Halves away from zero.
        "Round" => |x| {
            let above = binary(Binary::Add, &unary(Unary::Abs, x), &number(0.5));
            binary(Binary::Mul, &unary(Unary::Floor, &above), &unary(Unary::Sign, x))
        },
        "Tan" => |x| binary(Binary::Div, &unary(Unary::Sin, x), &unary(Unary::Cos, x)),
        "Sinh" => |x| hyperbolic(Binary::Sub, x),
        "Cosh" => |x| hyperbolic(Binary::Add, x),
        "IsNan" => |x| unary(Unary::Not, &binary(Binary::Equal, x, x)),
        _ => return None,
    })
}

/// Powers that are products.
fn power(x: &Part, exponent: f64) -> Option<Part> {
    let square = || binary(Binary::Mul, x, x);
    match exponent {
        2.0 => Some(square()),
        3.0 => Some(binary(Binary::Mul, &square(), x)),
        _ => None,
    }
}

fn hyperbolic(function: Binary, x: &Part) -> Part {
    let sum = binary(function, &unary(Unary::Exp, x), &unary(Unary::Exp, &unary(Unary::Neg, x)));
    binary(Binary::Mul, &sum, &number(0.5))
}

/// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`; with `is_square`, tract has a square in place of the cube.
fn gelu_tanh(x: &Part, is_square: bool) -> Part {
    let square = binary(Binary::Mul, x, x);
    let power = if is_square { square } else { binary(Binary::Mul, &square, x) };
    let sum = binary(Binary::Add, &binary(Binary::Mul, &power, &number(0.044_715)), x);
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let tanh = unary(Unary::Tanh, &binary(Binary::Mul, &sum, &number(root)));
    let gate = binary(Binary::Mul, &binary(Binary::Add, &tanh, &number(1.0)), &number(0.5));
    binary(Binary::Mul, &gate, x)
}

fn is_infinite(x: &Part, positive: bool, negative: bool) -> Part {
    let is = |value: f64| binary(Binary::Equal, x, &number(value));
    match (positive, negative) {
        (true, true) => binary(Binary::Equal, &unary(Unary::Abs, x), &number(f64::INFINITY)),
        (true, false) => is(f64::INFINITY),
        (false, true) => is(f64::NEG_INFINITY),
        (false, false) => binary(Binary::Mul, &is(f64::INFINITY), &number(0.0)),
    }
}
