//! Pointwise steps: their dimensions are put in the output's order and joined where they can be, then the program is
//! written as the kernel reads it.

use lowering::plan::{
    Binary, CODE_MAX, DIMS_MAX, INPUTS_MAX, Instruction, Numbers, Operand, Pointwise, TEMPORARIES, Type, Unary, Value,
};

use crate::{
    driver::{Bases, DriverError},
    kernels::call::{Call, GROUP, Parameters, THREADS, address, elements, is_aligned, refused, small, spread},
};

const WHAT: &str = "a pointwise step";
/// Length and width of a tile of the kernel for transpositions.
const TILE: usize = 32;
/// A dimension that is shorter wastes more of a tile than scattered reads cost.
const TILED_MIN: usize = 16;

/// A dimension: its length, and the strides of the inputs, then of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Dimension {
    length: usize,
    strides: Vec<i64>,
}

impl Dimension {
    fn output_stride(&self) -> i64 {
        self.strides[self.strides.len() - 1]
    }
}

pub(super) fn pointwise(step: &Pointwise, at: Bases) -> Result<Option<Call>, DriverError> {
    let mut dimensions = normalised(step)?;
    let total = elements(WHAT, &step.shape)?;
    if total == 0 {
        return Ok(None);
    }
    for view in 0..=step.inputs.len() {
        let reach = dimensions.iter().map(|of| of.strides[view].saturating_abs().saturating_mul(of.length as i64 - 1));
        small(WHAT, reach.fold(0, i64::saturating_add))?;
    }
    let is_float = step.numbers == Numbers::Float;
    if is_float && let Some((input, dimension)) = turned(&dimensions) {
        // The kernel has them side by side.
        let moved = dimensions.remove(dimension);
        dimensions.insert(dimensions.len() - 1, moved);
        return tiled(step, &dimensions, input, at).map(Some);
    }
    let (last, groups) = (dimensions.len() - 1, dimensions[dimensions.len() - 1].length / GROUP);
    let is_dense = is_float && is_dense(step.output.base, &dimensions, step.inputs.len(), at);
    let mut lengths: Vec<usize> = dimensions.iter().map(|dimension| dimension.length).collect();
    let (kernel, threads) = match (is_dense, is_float) {
        (true, _) => ("pointwise_float_dense", total / GROUP as u32),
        (false, true) => ("pointwise_float", total),
        (false, false) => ("pointwise_integer", total),
    };
    if is_dense {
        lengths[last] = groups;
    }
    let parameters = parameters(step, &dimensions, &lengths, at)?;
    Ok(Some(spread(kernel, threads, parameters.u32(threads).u32(0).u32(0).u32(0))))
}

/// The dimensions in descending order of the output's strides, without those of one index, and neighbours joined that
/// all tensors walk through alike. There is at least one.
fn normalised(step: &Pointwise) -> Result<Vec<Dimension>, DriverError> {
    let views = step.inputs.iter().chain([&step.output]);
    if views.clone().any(|view| view.strides.len() != step.shape.len()) {
        return Err(refused(WHAT, "a tensor has strides for another number of dimensions"));
    }
    let strides = |dimension: usize| views.clone().map(|view| view.strides[dimension]).collect();
    let all = step.shape.iter().enumerate();
    let mut dimensions: Vec<Dimension> = all
        .filter(|(_, length)| **length != 1)
        .map(|(index, &length)| Dimension { length, strides: strides(index) })
        .collect();
    dimensions.sort_by_key(|dimension| std::cmp::Reverse(dimension.output_stride().saturating_abs()));
    let mut joined: Vec<Dimension> = Vec::new();
    for dimension in dimensions {
        let length = dimension.length as i64;
        let continues = |outer: &i64, inner: &i64| inner.checked_mul(length) == Some(*outer);
        match joined.last_mut() {
            Some(outer) if outer.strides.iter().zip(&dimension.strides).all(|(o, i)| continues(o, i)) => {
                *outer = Dimension { length: outer.length * dimension.length, ..dimension };
            }
            _ => joined.push(dimension),
        }
    }
    if joined.is_empty() {
        joined.push(Dimension { length: 1, strides: vec![0; step.inputs.len() + 1] });
    }
    if joined.len() > DIMS_MAX {
        return Err(refused(
            WHAT,
            &format!("it has {} dimensions, and at most {DIMS_MAX} can be walked", joined.len()),
        ));
    }
    Ok(joined)
}

/// Whether threads can have groups of neighbouring elements of this view.
fn is_dense(base: Operand, dimensions: &[Dimension], view: usize, at: Bases) -> bool {
    let (last, outer) = dimensions.split_last().expect("there is one at least");
    let is_group = |dimension: &Dimension| dimension.strides[view] % GROUP as i64 == 0;
    let is_last_dense = last.strides[view] == 1 && last.length.is_multiple_of(GROUP);
    is_last_dense && outer.iter().all(is_group) && is_aligned(base, GROUP, at)
}

/// An input that is dense in another dimension than the output, and that one.
fn turned(dimensions: &[Dimension]) -> Option<(usize, usize)> {
    let (last, outer) = dimensions.split_last()?;
    if last.output_stride() != 1 || last.length < TILED_MIN {
        return None;
    }
    let inputs = last.strides.len() - 1;
    (0..inputs).filter(|&input| !matches!(last.strides[input], 0 | 1)).find_map(|input| {
        let is_dense = |dimension: &Dimension| dimension.strides[input] == 1 && dimension.length >= TILED_MIN;
        Some((input, outer.iter().position(is_dense)?))
    })
}

/// The last two dimensions in tiles, of which `input` is turned.
fn tiled(step: &Pointwise, dimensions: &[Dimension], input: usize, at: Bases) -> Result<Call, DriverError> {
    let lengths: Vec<usize> = dimensions.iter().map(|dimension| dimension.length).collect();
    let (outer, inner) = lengths.split_at(lengths.len() - 2);
    let [tiles1, tiles0] = [inner[0].div_ceil(TILE) as u32, inner[1].div_ceil(TILE) as u32];
    let grid = elements(WHAT, &[tiles0 as usize, tiles1 as usize, outer.iter().product()])?;
    let parameters = parameters(step, dimensions, &lengths, at)?;
    let parameters = parameters.u32(grid).u32(input as u32).u32(tiles0).u32(tiles1).finish();
    Ok(Call { kernel: "pointwise_tiled", grid, threads: THREADS, parameters })
}

/// All but the last members, which depend on the kernel. `lengths` are what the threads' numbers are divided by.
fn parameters(
    step: &Pointwise,
    dimensions: &[Dimension],
    lengths: &[usize],
    at: Bases,
) -> Result<Parameters, DriverError> {
    if step.inputs.len() > INPUTS_MAX || step.code.len() > CODE_MAX {
        return Err(refused(WHAT, &format!("it has more than {INPUTS_MAX} inputs or {CODE_MAX} instructions")));
    }
    let mut parameters = Parameters::default();
    let views = step.inputs.iter().map(Some).chain(std::iter::repeat_n(None, INPUTS_MAX - step.inputs.len()));
    for (index, view) in views.chain([Some(&step.output)]).enumerate() {
        let Some(view) = view else {
            parameters = parameters.i64(0).i64(0).i32s(&[0; DIMS_MAX]);
            continue;
        };
        let index = index.min(step.inputs.len());
        let mut strides = [0; DIMS_MAX];
        for (to, dimension) in strides.iter_mut().zip(dimensions.iter().rev()) {
            // Neighbours have been joined, and what they reach fits.
            *to = small(WHAT, dimension.strides[index])?;
        }
        let is_dense = is_dense(view.base, dimensions, index, at);
        parameters = parameters.address(address(view.base, at)).ty(view.base).flag(is_dense).i32s(&strides);
    }
    let (code, constants) = program(step)?;
    let constants = constants.into_iter().chain(std::iter::repeat(0)).take(2 * CODE_MAX);
    parameters = constants.fold(parameters, Parameters::i64);
    let code = code.into_iter().chain(std::iter::repeat([0; 4])).take(CODE_MAX);
    parameters = code.fold(parameters, |parameters, word| parameters.u32(u32::from_le_bytes(word)));
    let lengths = lengths.iter().rev().copied().chain(std::iter::repeat(1)).take(DIMS_MAX);
    parameters = lengths.fold(parameters, |parameters, length| parameters.divisor(length as u32));
    Ok(parameters.u32(dimensions.len() as u32).u32(step.inputs.len() as u32).u32(step.code.len() as u32))
}

/// Words of op, first and second register, whether it is reversed; and constants.
fn program(step: &Pointwise) -> Result<(Vec<[u8; 4]>, Vec<i64>), DriverError> {
    let (mut code, mut constants) = (Vec::new(), Vec::new());
    for instruction in &step.code {
        let mut register = |value: &Value| register(value, step, &mut constants);
        code.push(match instruction {
            Instruction::Load(value) => [0, register(value)?, 0, 0],
            Instruction::Save(temporary) if usize::from(*temporary) < TEMPORARIES => [1, *temporary, 0, 0],
            Instruction::Save(_) => return Err(refused(WHAT, &format!("it has more than {TEMPORARIES} temporaries"))),
            Instruction::Select(first, second) => [2, register(first)?, register(second)?, 0],
            Instruction::Unary(op) => [unary_number(*op, step.numbers)?, 0, 0, 0],
            Instruction::Binary(op, value) => [binary_number(*op), register(value)?, 0, 0],
            Instruction::Reversed(op, value) => [binary_number(*op), register(value)?, 0, 1],
        });
    }
    Ok((code, constants))
}

fn register(value: &Value, step: &Pointwise, constants: &mut Vec<i64>) -> Result<u8, DriverError> {
    let constant = match *value {
        Value::Input(input) if usize::from(input) < step.inputs.len() => return Ok(input),
        Value::Temporary(temporary) if usize::from(temporary) < TEMPORARIES => return Ok(INPUTS_MAX as u8 + temporary),
        Value::Float(number) if step.numbers == Numbers::Float => i64::from(number.to_bits()),
        Value::Integer(number) if step.numbers == Numbers::Integer => number,
        _ => return Err(refused(WHAT, &format!("{value:?} is nothing that it has"))),
    };
    constants.push(constant);
    Ok((INPUTS_MAX + TEMPORARIES + constants.len() - 1) as u8)
}

/// As `enum Op` of `pointwise.cu`.
fn unary_number(op: Unary, numbers: Numbers) -> Result<u8, DriverError> {
    let number = match op {
        Unary::Neg => 3,
        Unary::Abs => 4,
        Unary::Sign => 5,
        Unary::Not => 6,
        Unary::Through(Type::F32) => 7,
        Unary::Through(Type::F16) => 8,
        Unary::Through(Type::I64) => 9,
        Unary::Through(Type::I32) => 10,
        Unary::Through(Type::U8) => 11,
        Unary::Through(Type::Bool) => 12,
        Unary::Exp => 13,
        Unary::Log => 14,
        Unary::Sqrt => 15,
        Unary::Rsqrt => 16,
        Unary::Reciprocal => 17,
        Unary::Tanh => 18,
        Unary::Sigmoid => 19,
        Unary::Erf => 20,
        Unary::Sin => 21,
        Unary::Cos => 22,
        Unary::Floor => 23,
        Unary::Ceil => 24,
        Unary::Round => 25,
    };
    if numbers == Numbers::Integer && number >= 13 {
        return Err(refused(WHAT, &format!("{op:?} is not for integers")));
    }
    Ok(number)
}

/// As `enum Op` of `pointwise.cu`.
fn binary_number(op: Binary) -> u8 {
    match op {
        Binary::Add => 26,
        Binary::Sub => 27,
        Binary::Mul => 28,
        Binary::Div => 29,
        Binary::Rem => 30,
        Binary::Pow => 31,
        Binary::Min => 32,
        Binary::Max => 33,
        Binary::Equal => 34,
        Binary::Less => 35,
        Binary::LessEqual => 36,
        Binary::And => 37,
        Binary::Or => 38,
        Binary::Xor => 39,
    }
}
