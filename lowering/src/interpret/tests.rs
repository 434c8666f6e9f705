//! Small numbers worked by hand.

use super::*;
use crate::plan::{
    Activation, Attention, Binary, Conv, Factor, Gather, Instruction, Matmul, Norm, Numbers, Operand, Place, Pointwise,
    Pool, PoolKind, Reduce, Reduction, Resize, ResizeKind, Softmax, Type, Unary, Value, View,
};

/// An arena in which tensors are put one after another.
#[derive(Default)]
struct Bench {
    arena: Vec<u8>,
}

impl Bench {
    fn put(&mut self, ty: Type, values: &[f32]) -> Operand {
        let operand = self.room(ty, values.len());
        self.memory().put_floats(operand, 0, values);
        operand
    }

    fn put_integers(&mut self, ty: Type, values: &[i64]) -> Operand {
        let operand = self.room(ty, values.len());
        self.memory().put_integers(operand, 0, values);
        operand
    }

    fn room(&mut self, ty: Type, count: usize) -> Operand {
        let at = self.arena.len().next_multiple_of(8);
        self.arena.resize(at + count * ty.bytes(), 0xaa);
        Operand { place: Place::Arena(at), ty }
    }

    fn memory(&mut self) -> Memory<'_> {
        Memory { arena: &mut self.arena, weights: &[] }
    }

    fn floats(&mut self, step: &Step, output: Operand, count: usize) -> Vec<f32> {
        run_step(step, None, &mut self.memory());
        self.memory().floats(output, 0, count)
    }
}

fn view(base: Operand, strides: &[i64]) -> View {
    View { base, strides: strides.to_vec() }
}

#[test]
fn a_convolution_pads_strides_and_adds() {
    let mut bench = Bench::default();
    // A 3 x 3 image of one channel, filters of ones and of twos, 2 x 2, the output at every second position.
    let conv = Conv {
        input: bench.put(Type::F32, &[1., 2., 3., 4., 5., 6., 7., 8., 9.]),
        weights: bench.put(Type::F32, &[1., 1., 1., 1., -2., -2., -2., -2.]),
        bias: Some(bench.put(Type::F32, &[0.5, 20.])),
        residual: Some(bench.put(Type::F32, &[0., 0., 0., 0., 0., 0., 100., 40.])),
        output: bench.room(Type::F32, 8),
        activation: Activation::Relu,
        n: 1,
        size: [3, 3],
        c: 1,
        k: 2,
        out: [2, 2],
        kernel: [2, 2],
        strides: [2, 2],
        dilations: [1, 1],
        pads: [1, 1],
        groups: 1,
    };
    // Sums of the windows: 1, 2 + 3, 4 + 7, 5 + 6 + 8 + 9.
    let output = bench.floats(&Step::Conv(conv.clone()), conv.output, 8);
    assert_eq!(output, [1.5, 18., 5.5, 10., 11.5, 0., 128.5, 4.]);
    // In two groups of one channel each: the second sees only the second channel.
    let grouped = Conv {
        n: 1,
        size: [1, 2],
        c: 2,
        out: [1, 1],
        kernel: [1, 2],
        strides: [1, 1],
        pads: [0, 0],
        groups: 2,
        residual: None,
        ..conv
    };
    // Pixels (1, 2) and (3, 4): 1 + 3 + 0.5 and -2 * (2 + 4) + 20, the filters being (1, 1) and (-2, -2).
    let weights = bench.put(Type::F32, &[1., 1., -2., -2.]);
    let output = bench.floats(&Step::Conv(Conv { weights, ..grouped.clone() }), grouped.output, 2);
    assert_eq!(output, [4.5, 8.]);
}

#[test]
fn a_product_takes_transposed_factors_and_skips_what_lies_between_rows() {
    let mut bench = Bench::default();
    let factor = |base, row_stride, batch_stride, transposed| Factor { base, row_stride, batch_stride, transposed };
    // a is [[1, 2], [3, 4]] and [[0, 1], [1, 0]], with a column that is skipped; b is [[1, 0], [1, 1]] for both,
    // transposed in memory.
    let a = bench.put(Type::F32, &[1., 2., 99., 3., 4., 99., 0., 1., 99., 1., 0., 99.]);
    let b = bench.put(Type::F32, &[1., 1., 0., 1.]);
    let output = bench.room(Type::F16, 8);
    let step = Matmul {
        a: factor(a, 3, 6, false),
        b: factor(b, 2, 0, true),
        bias: Some(bench.put(Type::F32, &[0., -20.])),
        residual: Some(bench.put(Type::F32, &[0., 0., 0., 1., 0., 30., 0., 0.])),
        output: factor(output, 2, 4, false),
        alpha: 2.,
        activation: Activation::Relu,
        batches: 2,
        m: 2,
        n: 2,
        k: 2,
    };
    assert_eq!(bench.floats(&Step::Matmul(step), output, 8), [6., 0., 14., 0., 2., 12., 2., 0.]);
}

fn pointwise(numbers: Numbers, shape: &[usize], inputs: Vec<View>, output: View, code: &[Instruction]) -> Step {
    Step::Pointwise(Pointwise { shape: shape.to_vec(), inputs, output, numbers, code: code.to_vec() })
}

/// The results of a program on one column of numbers.
fn computed(numbers: Numbers, from: Type, to: Type, values: &[f32], code: &[Instruction]) -> Vec<f32> {
    let mut bench = Bench::default();
    let (input, output) = (bench.put(from, values), bench.room(to, values.len()));
    let step = pointwise(numbers, &[values.len()], vec![view(input, &[1])], view(output, &[1]), code);
    bench.floats(&step, output, values.len())
}

const LOAD: Instruction = Instruction::Load(Value::Input(0));

#[test]
fn views_walk_backwards_repeat_and_transpose() {
    let mut bench = Bench::default();
    let matrix = bench.put(Type::F32, &[1., 2., 3., 4., 5., 6.]);
    let row = bench.put(Type::F16, &[10., 20.]);
    let output = bench.room(Type::F32, 6);
    let Place::Arena(at) = matrix.place else { panic!("put into the arena") };
    let last = Operand { place: Place::Arena(at + 8), ty: Type::F32 };
    // The 2 x 3 matrix, transposed and read from the last column, plus the row, for each of three rows.
    let inputs = vec![view(last, &[-1, 3]), view(row, &[0, 1])];
    let code = [LOAD, Instruction::Binary(Binary::Add, Value::Input(1))];
    let step = pointwise(Numbers::Float, &[3, 2], inputs, view(output, &[2, 1]), &code);
    assert_eq!(bench.floats(&step, output, 6), [13., 26., 12., 25., 11., 24.]);
}

#[test]
fn conversions_round_ties_to_even_truncate_and_stay_in_range() {
    let computed = |from, to, values: &[f32]| computed(Numbers::Float, from, to, values, &[LOAD]);
    // Binary16 has 11 bits: 2049 lies between 2048 and 2050, 2051 between 2050 and 2052.
    assert_eq!(computed(Type::F32, Type::F16, &[2049., 2051., 65520., -1e-9]), [2048., 2052., f32::INFINITY, -0.]);
    assert_eq!(computed(Type::F32, Type::U8, &[-3., 2.9, 300., f32::NAN]), [0., 2., 255., 0.]);
    assert_eq!(computed(Type::F32, Type::I32, &[-2.9, 1e20]), [-2., 2147483647.]);
    assert_eq!(computed(Type::F32, Type::Bool, &[0., -0.5, f32::NAN]), [0., 1., 1.]);
    let round = [LOAD, Instruction::Unary(Unary::Round)];
    let rounded = super::tests::computed(Numbers::Float, Type::F32, Type::F32, &[0.5, 1.5, -2.5, 2.6], &round);
    assert_eq!(rounded, [0., 2., -2., 3.]);
}

#[test]
fn programs_save_select_and_reverse() {
    let float = |values: &[f32], code: &[Instruction]| computed(Numbers::Float, Type::F32, Type::F32, values, code);
    // x > 0 ? x : 1 / x - x
    let code = [
        LOAD,
        Instruction::Unary(Unary::Reciprocal),
        Instruction::Binary(Binary::Sub, Value::Input(0)),
        Instruction::Save(2),
        Instruction::Load(Value::Float(0.)),
        Instruction::Binary(Binary::Less, Value::Input(0)),
        Instruction::Select(Value::Input(0), Value::Temporary(2)),
    ];
    assert_eq!(float(&[2., -4., -0.5], &code), [2., 3.75, -1.5]);
    let reversed = [LOAD, Instruction::Reversed(Binary::Pow, Value::Float(2.))];
    assert_eq!(float(&[3., -1.], &reversed), [8., 0.5]);
    let remainder = [LOAD, Instruction::Binary(Binary::Rem, Value::Float(3.))];
    assert_eq!(float(&[7., -7.], &remainder), [1., -1.]);
    let through = [LOAD, Instruction::Unary(Unary::Through(Type::F16))];
    assert_eq!(float(&[2049.], &through), [2048.]);
}

#[test]
fn the_error_function_is_that_of_the_tables() {
    let code = [LOAD, Instruction::Unary(Unary::Erf)];
    let values = computed(Numbers::Float, Type::F32, Type::F32, &[0., 0.5, -1., 2., 3.9, 9., -9.], &code);
    // Abramowitz and Stegun, table 7.1.
    let table = [0., 0.520_499_9, -0.842_700_8, 0.995_322_3, 1., 1., -1.];
    for (value, table) in values.iter().zip(table) {
        assert!((value - table).abs() < 1e-7, "{value} {table}");
    }
}

#[test]
fn integers_wrap_and_divide_towards_zero() {
    let integer = |values: &[f32], code: &[Instruction]| computed(Numbers::Integer, Type::I64, Type::I64, values, code);
    let by = |op, value| [LOAD, Instruction::Binary(op, Value::Integer(value))];
    assert_eq!(integer(&[7., -7.], &by(Binary::Div, 2)), [3., -3.]);
    assert_eq!(integer(&[7., -7.], &by(Binary::Rem, 2)), [1., -1.]);
    assert_eq!(integer(&[7., 0.], &by(Binary::Div, 0)), [0., 0.]);
    assert_eq!(integer(&[7.], &by(Binary::Rem, 0)), [0.]);
    assert_eq!(integer(&[3., -2., 1.], &by(Binary::Pow, 3)), [27., -8., 1.]);
    assert_eq!(integer(&[3., -1., 1.], &by(Binary::Pow, -3)), [0., -1., 1.]);
    let mut bench = Bench::default();
    let input = bench.put_integers(Type::I64, &[i64::MIN, 300]);
    let output = bench.room(Type::U8, 2);
    let code = by(Binary::Div, -1);
    let step = pointwise(Numbers::Integer, &[2], vec![view(input, &[1])], view(output, &[1]), &code);
    // The smallest number is its own opposite, and -300 is 212 modulo 256.
    assert_eq!(bench.floats(&step, output, 2), [0., 212.]);
}

#[test]
fn reductions_of_a_middle_dimension() {
    let reduced = |reduction, from, to| {
        let mut bench = Bench::default();
        // [2, 3, 2]
        let input = bench.put(from, &[1., -2., 3., 4., 3., -6., 0., 1., 0., 2., 0., 4.]);
        let output = bench.room(to, 4);
        bench.floats(&Step::Reduce(Reduce { input, output, reduction, outer: 2, length: 3, inner: 2 }), output, 4)
    };
    let float = |reduction| reduced(reduction, Type::F32, Type::F32);
    assert_eq!(float(Reduction::Sum), [7., -4., 0., 7.]);
    assert_eq!(float(Reduction::MeanOfSquares), [19. / 3., 56. / 3., 0., 7.]);
    assert_eq!(float(Reduction::Product), [9., 48., 0., 8.]);
    assert_eq!(float(Reduction::Max), [3., 4., 0., 4.]);
    assert_eq!(reduced(Reduction::Min, Type::F16, Type::F16), [1., -6., 0., 1.]);
    assert_eq!(reduced(Reduction::ArgMax, Type::F32, Type::I64), [1., 1., 0., 2.]);
    assert_eq!(reduced(Reduction::ArgMin, Type::I32, Type::I64), [0., 2., 0., 0.]);
    // -4 / 3 and 7 / 3, towards zero.
    assert_eq!(reduced(Reduction::Mean, Type::I64, Type::I64), [2., -1., 0., 2.]);
}

#[test]
fn softmax_of_equal_numbers_is_even_and_of_nothing_zero() {
    let infinity = f32::NEG_INFINITY;
    let softmax = |is_log| {
        let mut bench = Bench::default();
        let input = bench.put(Type::F32, &[5., 5., 0., 2f32.ln(), infinity, infinity, infinity, 1.]);
        let output = bench.room(Type::F32, 8);
        bench.floats(&Step::Softmax(Softmax { input, output, rows: 4, columns: 2, scale: 2., is_log }), output, 8)
    };
    let close = |values: Vec<f32>, expected: [f32; 8]| {
        for (value, expected) in values.iter().zip(expected) {
            assert!(value == &expected || (value - expected).abs() < 1e-6, "{values:?} {expected}");
        }
    };
    close(softmax(false), [0.5, 0.5, 0.2, 0.8, 0., 0., 0., 1.]);
    let (half, fifth) = (0.5f32.ln(), 0.2f32.ln());
    close(softmax(true), [half, half, fifth, 0.8f32.ln(), infinity, infinity, infinity, 0.]);
}

#[test]
fn normalisation_adds_the_residual_first() {
    let mut bench = Bench::default();
    let step = Norm {
        input: bench.put(Type::F32, &[1., 3., 3., 4.]),
        residual: Some(bench.put(Type::F32, &[0., 2., 0., 0.])),
        sum: Some(bench.room(Type::F32, 4)),
        scale: Some(bench.put(Type::F32, &[2., 2.])),
        shift: Some(bench.put(Type::F16, &[0., 1.])),
        output: bench.room(Type::F32, 4),
        rows: 2,
        columns: 2,
        epsilon: 0.,
        is_rms: false,
    };
    assert_eq!(bench.floats(&Step::Norm(step.clone()), step.output, 4), [-2., 3., -2., 3.]);
    let sum = step.sum.expect("given");
    assert_eq!(bench.memory().floats(sum, 0, 4), [1., 5., 3., 4.]);
    // sqrt((9 + 16) / 2 + 3.5) = 4
    let rms = Norm { is_rms: true, epsilon: 3.5, scale: None, shift: None, ..step };
    assert_eq!(bench.floats(&Step::Norm(rms.clone()), rms.output, 4)[2..], [0.75, 1.]);
}

fn attention(bench: &mut Bench, mask: Option<&[f32]>, is_causal: bool) -> Vec<f32> {
    // One head of width 2, two queries, three keys; keys and values lie in one row after another.
    let query = bench.put(Type::F32, &[0., 0., 0., 0.]);
    let pairs = bench.put(Type::F32, &[1., 0., 3., 30., 0., 1., 6., 60., 1., 1., 9., 90.]);
    let Place::Arena(at) = pairs.place else { panic!("put into the arena") };
    let values = Operand { place: Place::Arena(at + 8), ty: Type::F32 };
    let output = bench.room(Type::F32, 4);
    let step = Attention {
        query: view(query, &[0, 0, 2]),
        key: view(pairs, &[0, 0, 4]),
        value: view(values, &[0, 0, 4]),
        mask: mask.map(|mask| view(bench.put(Type::F16, mask), &[0, 0, 3, 1])),
        output: view(output, &[0, 0, 2]),
        batch: 1,
        heads: 1,
        queries: 2,
        keys: 3,
        width: 2,
        scale: 1.,
        is_causal,
    };
    bench.floats(&Step::Attention(step), output, 4)
}

#[test]
fn attention_of_a_query_of_zeros_is_the_mean_of_what_it_sees() {
    let infinity = f32::NEG_INFINITY;
    assert_eq!(attention(&mut Bench::default(), None, false), [6., 60., 6., 60.]);
    // Query 0 sees keys 0 and 1, query 1 all.
    assert_eq!(attention(&mut Bench::default(), None, true), [4.5, 45., 6., 60.]);
    let mask = [infinity, infinity, infinity, infinity, 0., 0.];
    assert_eq!(attention(&mut Bench::default(), Some(&mask), false), [0., 0., 7.5, 75.]);
}

#[test]
fn pools_ignore_what_lies_outside() {
    let pool = |kind| {
        let mut bench = Bench::default();
        let step = Pool {
            input: bench.put(Type::F32, &[-1., -2., -3., -4.]),
            output: bench.room(Type::F32, 4),
            kind,
            n: 1,
            size: [2, 2],
            c: 1,
            out: [2, 2],
            kernel: [2, 2],
            strides: [1, 1],
            dilations: [1, 1],
            pads: [1, 1],
        };
        bench.floats(&Step::Pool(step.clone()), step.output, 4)
    };
    assert_eq!(pool(PoolKind::Max), [-1., -1., -1., -1.]);
    assert_eq!(pool(PoolKind::Average), [-1., -1.5, -2., -2.5]);
    assert_eq!(pool(PoolKind::AveragePadded), [-0.25, -0.75, -1., -2.5]);
}

#[test]
fn rows_that_are_not_there_are_zeros_and_faults_of_their_task() {
    let mut bench = Bench::default();
    let step = |bench: &mut Bench, indices: &[i64], indices_per_task| Gather {
        input: bench.put(Type::F16, &[1., 2., 3., 4., 5., 6.]),
        indices: bench.put_integers(Type::I64, indices),
        output: bench.room(Type::F16, indices.len() * 2),
        outer: 1,
        length: 3,
        inner: 2,
        count: indices.len(),
        indices_per_task,
    };
    let gather = step(&mut bench, &[2, -3, 3, 0, i64::MIN, 1], 2);
    let faults = bench.put_integers(Type::I32, &[7, 7, 7]);
    let Place::Arena(at) = faults.place else { panic!("put into the arena") };
    let plan = Plan {
        batch: 3,
        precision: crate::plan::Precision::Fp16,
        inputs: Vec::new(),
        outputs: Vec::new(),
        faults: Some(at),
        steps: vec![Step::Gather(gather.clone())],
        arena_bytes: bench.arena.len(),
    };
    run(&plan, &mut bench.memory());
    assert_eq!(bench.memory().floats(gather.output, 0, 12), [5., 6., 1., 2., 0., 0., 1., 2., 0., 0., 3., 4.]);
    assert_eq!(bench.memory().integers(faults, 0, 3), [0, 1, 1]);
    // The model's own indices, of two outer rows: [[1], [2]], [[3], [4]].
    let own = Gather { outer: 2, length: 2, inner: 1, ..step(&mut bench, &[1, 0], 0) };
    assert_eq!(bench.floats(&Step::Gather(own.clone()), own.output, 4), [2., 1., 4., 3.]);
}

#[test]
fn resizing_knows_halves() {
    let resize = |kind, offset: f32, scale: f32| {
        let mut bench = Bench::default();
        let step = Resize {
            input: bench.put(Type::F32, &[0., 10., 20.]),
            output: bench.room(Type::F32, 4),
            kind,
            n: 1,
            size: [1, 3],
            c: 1,
            out: [1, 4],
            offset: [0.5, offset],
            scale: [1., scale],
            shift: [0.5, offset],
        };
        bench.floats(&Step::Resize(step.clone()), step.output, 4)
    };
    // Positions 0, 0.5, 1, 1.5.
    assert_eq!(resize(ResizeKind::Floor, 0., 0.5), [0., 0., 10., 10.]);
    assert_eq!(resize(ResizeKind::Ceil, 0., 0.5), [0., 10., 10., 20.]);
    assert_eq!(resize(ResizeKind::NearestLow, 0., 0.5), [0., 0., 10., 10.]);
    assert_eq!(resize(ResizeKind::NearestHigh, 0., 0.5), [0., 10., 10., 20.]);
    assert_eq!(resize(ResizeKind::Linear, 0., 0.5), [0., 5., 10., 15.]);
    // Half pixels: -0.25, 0.25, 0.75, 1.25.
    assert_eq!(resize(ResizeKind::Linear, 0.5, 0.5), [0., 2.5, 7.5, 12.5]);
}
