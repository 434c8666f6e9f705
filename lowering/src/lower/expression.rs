//! Chains of elementwise operators as one expression, and the code of the one step that computes it.

use std::{collections::HashMap, rc::Rc};

use tract_onnx::{
    prelude::*,
    tract_core::ops::{binary::TypedBinOp, cast::Cast, element_wise::ElementWiseOp, logic::Iff},
};

use super::layout::Layout;
use crate::{
    lower::stored::Stored,
    plan::{Binary, CODE_MAX, INPUTS_MAX, Instruction, Numbers, TEMPORARIES, Type, Unary, Value},
};

/// What an element is. Parts that several have in common are one, and computed once.
#[derive(Debug)]
pub(super) enum Expression {
    /// An element of a tensor, laid out as the whole expression.
    Leaf(Stored),
    /// A constant, which is an integer where it is computed with integers.
    Number(f64),
    Unary(Unary, Rc<Self>),
    Binary(Binary, Rc<Self>, Rc<Self>),
    /// The second where the first is not 0, otherwise the third.
    Select(Rc<Self>, Rc<Self>, Rc<Self>),
}

/// A tensor that has not been computed.
#[derive(Debug, Clone)]
pub(super) struct Lazy {
    pub(super) shape: Vec<usize>,
    pub(super) expression: Rc<Expression>,
    /// What it is computed with; `None` if either will do.
    pub(super) numbers: Option<Numbers>,
    /// What it is stored as.
    pub(super) ty: Type,
}

impl Lazy {
    pub(super) fn leaf(stored: Stored) -> Self {
        let (shape, ty) = (stored.layout.shape.clone(), stored.ty);
        Self { shape, ty, numbers: None, expression: Rc::new(Expression::Leaf(stored)) }
    }

    /// The constant that it is.
    pub(super) fn number(&self) -> Option<f64> {
        match &*self.expression {
            Expression::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The same with each tensor laid out otherwise, if all can be.
    pub(super) fn mapped(&self, shape: &[usize], map: &dyn Fn(&Layout) -> Option<Layout>) -> Option<Self> {
        let expression = map_leaves(&self.expression, map, &mut HashMap::new())?;
        Some(Self { shape: shape.to_vec(), expression, ..self.clone() })
    }

    /// All tensors that it reads.
    pub(super) fn leaves(&self) -> Vec<Stored> {
        let mut leaves = Vec::new();
        collect(&self.expression, &mut leaves, &mut HashMap::new());
        leaves
    }
}

fn map_leaves(
    expression: &Rc<Expression>,
    map: &dyn Fn(&Layout) -> Option<Layout>,
    known: &mut HashMap<*const Expression, Rc<Expression>>,
) -> Option<Rc<Expression>> {
    if let Some(mapped) = known.get(&Rc::as_ptr(expression)) {
        return Some(mapped.clone());
    }
    let mut inner = |expression| map_leaves(expression, map, known);
    let mapped = Rc::new(match &**expression {
        Expression::Leaf(stored) => Expression::Leaf(Stored { layout: map(&stored.layout)?, ..stored.clone() }),
        Expression::Number(number) => Expression::Number(*number),
        Expression::Unary(unary, a) => Expression::Unary(*unary, inner(a)?),
        Expression::Binary(binary, a, b) => Expression::Binary(*binary, inner(a)?, inner(b)?),
        Expression::Select(a, b, c) => Expression::Select(inner(a)?, inner(b)?, inner(c)?),
    });
    known.insert(Rc::as_ptr(expression), mapped.clone());
    Some(mapped)
}

fn collect(expression: &Rc<Expression>, into: &mut Vec<Stored>, seen: &mut HashMap<*const Expression, usize>) {
    let times = seen.entry(Rc::as_ptr(expression)).or_default();
    *times += 1;
    if *times > 1 {
        return;
    }
    match &**expression {
        Expression::Leaf(stored) if !into.contains(stored) => into.push(stored.clone()),
        Expression::Leaf(_) | Expression::Number(_) => {}
        Expression::Unary(_, a) => collect(a, into, seen),
        Expression::Binary(_, a, b) => [a, b].into_iter().for_each(|part| collect(part, into, seen)),
        Expression::Select(a, b, c) => [a, b, c].into_iter().for_each(|part| collect(part, into, seen)),
    }
}

/// The code of an expression, and the tensors that it names; `None` if it is more than a step holds.
pub(super) fn compile(lazy: &Lazy) -> Option<(Vec<Instruction>, Vec<Stored>)> {
    let mut uses = HashMap::new();
    collect(&lazy.expression, &mut Vec::new(), &mut uses);
    let numbers = lazy.numbers.unwrap_or_else(|| numbers_of(lazy));
    let mut compiler = Compiler {
        code: Vec::new(),
        inputs: lazy.leaves(),
        uses,
        saved: HashMap::new(),
        free: (0..TEMPORARIES).rev().filter_map(|index| u8::try_from(index).ok()).collect(),
        is_integer: numbers == Numbers::Integer,
    };
    if compiler.inputs.len() > INPUTS_MAX {
        return None;
    }
    compiler.evaluate(&lazy.expression)?;
    (compiler.code.len() <= CODE_MAX).then_some((compiler.code, compiler.inputs))
}

/// What copies and choices that compute nothing are done with: integers do not all fit binary32.
pub(super) fn numbers_of(lazy: &Lazy) -> Numbers {
    let is_integer = |ty: Type| matches!(ty, Type::I64 | Type::I32);
    match lazy.numbers {
        Some(numbers) => numbers,
        None if is_integer(lazy.ty) => Numbers::Integer,
        None => Numbers::Float,
    }
}

struct Compiler {
    code: Vec<Instruction>,
    inputs: Vec<Stored>,
    /// How often each part is still needed.
    uses: HashMap<*const Expression, usize>,
    saved: HashMap<*const Expression, u8>,
    free: Vec<u8>,
    is_integer: bool,
}

impl Compiler {
    /// The operand that a part is without any code.
    fn operand(&mut self, part: &Rc<Expression>) -> Option<Value> {
        match &**part {
            Expression::Leaf(stored) => {
                let index = self.inputs.iter().position(|input| input == stored)?;
                u8::try_from(index).ok().map(Value::Input)
            }
            #[allow(clippy::cast_possible_truncation, reason = "it computes with these")]
            Expression::Number(number) if self.is_integer => Some(Value::Integer(*number as i64)),
            #[allow(clippy::cast_possible_truncation, reason = "it computes with these")]
            Expression::Number(number) => Some(Value::Float(*number as f32)),
            _ => {
                let temporary = *self.saved.get(&Rc::as_ptr(part))?;
                let left = self.uses.get_mut(&Rc::as_ptr(part))?;
                *left -= 1;
                if *left == 0 {
                    self.saved.remove(&Rc::as_ptr(part));
                    self.free.push(temporary);
                }
                Some(Value::Temporary(temporary))
            }
        }
    }

    /// Computes a part into the accumulator.
    fn evaluate(&mut self, part: &Rc<Expression>) -> Option<()> {
        if let Some(value) = self.operand(part) {
            self.code.push(Instruction::Load(value));
            return Some(());
        }
        match &**part {
            Expression::Leaf(_) | Expression::Number(_) => return None,
            Expression::Unary(unary, a) => {
                self.evaluate(a)?;
                self.code.push(Instruction::Unary(*unary));
            }
            Expression::Binary(binary, a, b) => self.evaluate_binary(*binary, a, b)?,
            Expression::Select(condition, a, b) => {
                let a = self.settle(a)?;
                let b = self.settle(b)?;
                self.evaluate(condition)?;
                self.code.push(Instruction::Select(a.0, b.0));
                self.release([a, b]);
            }
        }
        let left = self.uses.get_mut(&Rc::as_ptr(part))?;
        *left -= 1;
        if *left > 0 {
            let temporary = self.free.pop()?;
            self.code.push(Instruction::Save(temporary));
            self.saved.insert(Rc::as_ptr(part), temporary);
        }
        Some(())
    }

    fn evaluate_binary(&mut self, binary: Binary, a: &Rc<Expression>, b: &Rc<Expression>) -> Option<()> {
        if Rc::ptr_eq(a, b) {
            self.evaluate(a)?;
            let again = self.operand(a)?;
            self.code.push(Instruction::Binary(binary, again));
        } else if let Some(value) = self.plain(b) {
            self.evaluate(a)?;
            self.code.push(Instruction::Binary(binary, value));
        } else if let Some(value) = self.plain(a) {
            self.evaluate(b)?;
            self.code.push(Instruction::Reversed(binary, value));
        } else {
            let value = self.settle(b)?;
            self.evaluate(a)?;
            self.code.push(Instruction::Binary(binary, value.0));
            self.release([value]);
        }
        Some(())
    }

    /// What needs neither code nor a temporary.
    fn plain(&mut self, part: &Rc<Expression>) -> Option<Value> {
        matches!(&**part, Expression::Leaf(_) | Expression::Number(_)).then(|| self.operand(part)).flatten()
    }

    /// Puts a part where the next instructions leave it: the flag says whether a temporary is to be released.
    fn settle(&mut self, part: &Rc<Expression>) -> Option<(Value, bool)> {
        if let Some(value) = self.plain(part) {
            return Some((value, false));
        }
        self.evaluate(part)?;
        let temporary = self.free.pop()?;
        self.code.push(Instruction::Save(temporary));
        Some((Value::Temporary(temporary), true))
    }

    fn release<const N: usize>(&mut self, values: [(Value, bool); N]) {
        for value in values {
            if let (Value::Temporary(temporary), true) = value {
                self.free.push(temporary);
            }
        }
    }
}

/// Whether what it gives is an expression of elements, one for one.
pub(super) fn is_elementwise(node: &TypedNode) -> bool {
    node.op_is::<TypedBinOp>()
        || node.op_is::<ElementWiseOp>()
        || node.op_is::<Cast>()
        || node.op_is::<Iff>()
        || node.op().name() == "ToLength"
}
