use lowering::plan::{
    Binary, CODE_MAX, DIMS_MAX, INPUTS_MAX, Instruction, Numbers, Pointwise, TEMPORARIES, Unary, Value,
};

use super::{
    emulated::{Bench, tolerance},
    *,
};

const TYPES: [Type; 6] = [Type::F32, Type::F16, Type::I64, Type::I32, Type::U8, Type::Bool];
/// Those whose results do not jump.
const SMOOTH: [Unary; 10] = [
    Unary::Neg,
    Unary::Abs,
    Unary::Exp,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::Erf,
    Unary::Sin,
    Unary::Cos,
    Unary::Sqrt,
    Unary::Not,
];
const BINARY: [Binary; 14] = [
    Binary::Add,
    Binary::Sub,
    Binary::Mul,
    Binary::Div,
    Binary::Rem,
    Binary::Pow,
    Binary::Min,
    Binary::Max,
    Binary::Equal,
    Binary::Less,
    Binary::LessEqual,
    Binary::And,
    Binary::Or,
    Binary::Xor,
];

/// A dense tensor's strides, with its dimensions in a random order in memory.
fn shuffled(bench: &mut Bench, shape: &[usize]) -> Vec<i64> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    for index in (1..order.len()).rev() {
        order.swap(index, bench.below(index + 1));
    }
    let (mut strides, mut stride) = (vec![0; shape.len()], 1);
    for dimension in order.into_iter().rev() {
        strides[dimension] = stride;
        stride *= shape[dimension] as i64;
    }
    strides
}

/// An input of random numbers: dense in some order, repeated in some dimensions, walked backwards in others.
fn input(bench: &mut Bench, ty: Type, shape: &[usize], order: &[i64]) -> View {
    let mut strides = if bench.is() { order.to_vec() } else { shuffled(bench, shape) };
    let count: usize = shape.iter().product();
    let base = bench.input(ty, count);
    let Place::Arena(mut at) = base.place else { panic!("inputs are in the arena") };
    for (stride, &length) in strides.iter_mut().zip(shape) {
        match bench.below(8) {
            0 => *stride = 0,
            1 => {
                at += *stride as usize * (length - 1) * ty.bytes();
                *stride = -*stride;
            }
            _ => {}
        }
    }
    View { base: in_arena(at, ty), strides }
}

fn value(bench: &mut Bench, numbers: Numbers, inputs: usize) -> Value {
    match (bench.below(4), numbers) {
        (0, _) => Value::Temporary(bench.below(TEMPORARIES) as u8),
        (1, Numbers::Float) => Value::Float(bench.below(9) as f32 / 2. - 2.),
        (1, Numbers::Integer) => Value::Integer(bench.below(9) as i64 - 4),
        _ => Value::Input(bench.below(inputs) as u8),
    }
}

fn code(bench: &mut Bench, numbers: Numbers, inputs: usize, length: usize, ops: &[Binary]) -> Vec<Instruction> {
    let mut code = vec![Instruction::Load(Value::Input(0))];
    let unary = match numbers {
        Numbers::Float => &SMOOTH[..],
        Numbers::Integer => &[Unary::Neg, Unary::Abs, Unary::Sign, Unary::Not, Unary::Through(Type::U8)],
    };
    for _ in 1..length {
        let value = value(bench, numbers, inputs);
        code.push(match bench.below(6) {
            0 => Instruction::Save(bench.below(TEMPORARIES) as u8),
            1 => Instruction::Unary(bench.one_of(unary)),
            2 => Instruction::Reversed(bench.one_of(ops), value),
            3 => Instruction::Select(value, Value::Input(0)),
            4 => Instruction::Load(value),
            _ => Instruction::Binary(bench.one_of(ops), value),
        });
    }
    code
}

fn step(bench: &mut Bench, numbers: Numbers, types: &[Type], ops: &[Binary]) -> Pointwise {
    let dimensions = bench.length(DIMS_MAX);
    let most = [400, 40, 12, 6, 4, 4][dimensions - 1];
    // Often of a length that makes groups of four, or tiles.
    let shape: Vec<usize> = (0..dimensions)
        .map(|_| if bench.is() { bench.length(most) } else { bench.length(most.div_ceil(4)) * 4 })
        .collect();
    let order = shuffled(bench, &shape);
    let count = shape.iter().product();
    let inputs = bench.length(INPUTS_MAX);
    let ty = bench.one_of(types);
    let views: Vec<View> = (0..inputs)
        .map(|_| {
            let ty = if bench.is() { ty } else { bench.one_of(types) };
            input(bench, ty, &shape, &order)
        })
        .collect();
    let length = bench.length(CODE_MAX.min(9));
    let code = code(bench, numbers, inputs, length, ops);
    let output = output(bench, &views, (bench_type(numbers, ty), count), order);
    Pointwise { shape, inputs: views, output, numbers, code }
}

/// A tensor of its own, or the first input if it lies as the output would.
fn output(bench: &mut Bench, inputs: &[View], (ty, count): (Type, usize), order: Vec<i64>) -> View {
    if inputs[0].strides == order && inputs[0].base.ty == ty && bench.is() {
        return View { base: bench.overwritten(inputs[0].base), strides: order };
    }
    View { base: bench.output(ty, count), strides: order }
}

/// What results are compared as: a float that is truncated may jump.
fn bench_type(numbers: Numbers, ty: Type) -> Type {
    if numbers == Numbers::Float && !ty.is_float() { Type::F32 } else { ty }
}

#[test]
fn random_programs_of_floats() {
    // What compares and divides jumps where nearly equal numbers differ in their last place: it comes below.
    let smooth = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Min, Binary::Max];
    for seed in 0..150 {
        let mut bench = Bench::new(seed);
        let step = step(&mut bench, Numbers::Float, &TYPES, &smooth);
        let ty = step.output.base.ty;
        bench.check(&format!("floats, seed {seed}"), &Step::Pointwise(step), ty, 2. * tolerance(ty));
    }
}

#[test]
fn random_programs_of_integers() {
    for seed in 0..80 {
        let mut bench = Bench::new(seed);
        let step = step(&mut bench, Numbers::Integer, &TYPES, &BINARY);
        let ty = step.output.base.ty;
        bench.check(&format!("integers, seed {seed}"), &Step::Pointwise(step), ty, tolerance(ty));
    }
}

/// A program of one instruction on two columns of numbers.
fn check_one(name: &str, instruction: Instruction, [from, to]: [Type; 2], [first, second]: [&[f32]; 2]) {
    let mut bench = Bench::new(7);
    let pairs: Vec<(f32, f32)> = first.iter().flat_map(|&x| second.iter().map(move |&y| (x, y))).collect();
    let (x, y): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
    let step = Pointwise {
        shape: vec![x.len()],
        inputs: [x.as_slice(), y.as_slice()]
            .map(|numbers| View { base: bench.floats(from, numbers), strides: vec![1] })
            .to_vec(),
        output: View { base: bench.output(to, x.len()), strides: vec![1] },
        numbers: if from.is_float() { Numbers::Float } else { Numbers::Integer },
        code: vec![Instruction::Load(Value::Input(0)), instruction],
    };
    bench.check(name, &Step::Pointwise(step), to, 1e-6);
}

const SPECIAL: [f32; 14] =
    [0.0, -0.0, 0.5, 1.5, -2.5, -1.0, 3.0, 1e-7, 300.7, -1e10, 3e20, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

#[test]
fn every_instruction_on_special_numbers() {
    let one = [1.0];
    for op in SMOOTH.into_iter().chain([
        Unary::Sign,
        Unary::Log,
        Unary::Rsqrt,
        Unary::Reciprocal,
        Unary::Floor,
        Unary::Ceil,
        Unary::Round,
    ]) {
        // Sines of large numbers are their libraries' own.
        let numbers = if matches!(op, Unary::Sin | Unary::Cos) { &SPECIAL[..9] } else { &SPECIAL };
        check_one(&format!("{op:?}"), Instruction::Unary(op), [Type::F32; 2], [numbers, &one]);
    }
    for ty in TYPES {
        let through = Instruction::Unary(Unary::Through(ty));
        check_one(&format!("through {ty:?}"), through, [Type::F32; 2], [&SPECIAL, &one]);
        check_one(&format!("integers through {ty:?}"), through, [Type::I64; 2], [&[0., -1., 300., -70000., 3e9], &one]);
        let nothing = Instruction::Load(Value::Input(0));
        check_one(&format!("stored as {ty:?}"), nothing, [Type::F32, ty], [&SPECIAL, &one]);
        check_one(&format!("{ty:?} as a float"), nothing, [ty, Type::F32], [&[0., 1., 2., 200.], &one]);
    }
    for op in BINARY {
        let binary = Instruction::Binary(op, Value::Input(1));
        check_one(&format!("{op:?}"), binary, [Type::F32; 2], [&SPECIAL, &SPECIAL]);
        let integers = [0., 1., -1., 2., -7., 40., 1e15, -9.3e18];
        check_one(&format!("{op:?} of integers"), binary, [Type::I64; 2], [&integers, &integers]);
    }
}

#[test]
fn transpositions_by_tiles() {
    for seed in 0..20 {
        let mut bench = Bench::new(seed);
        let [n, rows, columns] = [bench.length(3), 16 + bench.below(60), 16 + bench.below(60)];
        let (from, to) = (bench.one_of(&TYPES), bench.one_of(&[Type::F32, Type::F16]));
        let count = n * rows * columns;
        let area = (rows * columns) as i64;
        let turned = View { base: bench.input(from, count), strides: vec![area, 1, rows as i64] };
        let straight = View { base: bench.input(to, count), strides: vec![area, columns as i64, 1] };
        let step = Step::Pointwise(Pointwise {
            shape: vec![n, rows, columns],
            inputs: vec![straight, turned],
            output: View { base: bench.output(to, count), strides: vec![area, columns as i64, 1] },
            numbers: Numbers::Float,
            code: vec![Instruction::Load(Value::Input(0)), Instruction::Binary(Binary::Add, Value::Input(1))],
        });
        assert_eq!(calls(&step, None, BASES).unwrap()[0].kernel, "pointwise_tiled");
        bench.check(&format!("tiles, seed {seed}"), &step, to, tolerance(to));
    }
}
