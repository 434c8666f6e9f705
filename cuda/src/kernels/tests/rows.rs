use lowering::plan::{Gather, Norm, Reduce, Reduction, Softmax};

use super::{
    emulated::{Bench, tolerance},
    *,
};

const FLOATS: [Type; 2] = [Type::F32, Type::F16];

#[test]
fn random_reductions() {
    const ALL: [Reduction; 8] = [
        Reduction::Sum,
        Reduction::Mean,
        Reduction::MeanOfSquares,
        Reduction::Product,
        Reduction::Max,
        Reduction::Min,
        Reduction::ArgMax,
        Reduction::ArgMin,
    ];
    for seed in 0..160 {
        let mut bench = Bench::new(seed);
        let reduction = ALL[seed as usize % ALL.len()];
        let ty = bench.one_of(&[Type::F32, Type::F16, Type::F32, Type::I64, Type::I32, Type::U8, Type::Bool]);
        let inner = if bench.is() { 1 } else { bench.length(70) };
        // Products of many numbers leave the range; long rows have a block.
        let most = if reduction == Reduction::Product { 6 } else { bench.one_of(&[5, 80, 1500]) };
        let (outer, length) = (bench.length(12), bench.length(most));
        let is_index = matches!(reduction, Reduction::ArgMax | Reduction::ArgMin);
        let to = match ty {
            _ if is_index => Type::I64,
            Type::U8 | Type::Bool => Type::I64,
            ty => ty,
        };
        let (input, output) = (bench.input(ty, outer * length * inner), bench.output(to, outer * inner));
        let step = Reduce { input, output, reduction, outer, length, inner };
        // Sums of 1,500 numbers of size 4 in another order.
        bench.check(&format!("reduction, seed {seed}"), &Step::Reduce(step), to, 20. * tolerance(to));
    }
}

#[test]
fn the_first_of_equal_numbers_is_the_largest() {
    for (length, inner) in [(3000, 1), (70, 1), (70, 3)] {
        let mut bench = Bench::new(3);
        let numbers: Vec<f32> = (0..length * inner).map(|at| ((at / inner * 7) % 5) as f32).collect();
        let (input, output) = (bench.floats(Type::F16, &numbers), bench.output(Type::I64, inner));
        let step = Reduce { input, output, reduction: Reduction::ArgMax, outer: 1, length, inner };
        bench.check("equal numbers", &Step::Reduce(step), Type::I64, 0.);
    }
}

#[test]
fn random_softmaxes() {
    for seed in 0..60 {
        let mut bench = Bench::new(seed);
        let ty = bench.one_of(&FLOATS);
        let most = bench.one_of(&[3, 130, 1800]);
        let (rows, columns) = (bench.length(11), bench.length(most));
        let mut numbers: Vec<f32> = (0..rows * columns).map(|_| bench.below(2000) as f32 / 100. - 10.).collect();
        // Some are masked, and the first row is nothing else.
        for (at, number) in numbers.iter_mut().enumerate() {
            if bench.below(5) == 0 || at < columns {
                *number = f32::NEG_INFINITY;
            }
        }
        let (input, output) = (bench.floats(ty, &numbers), bench.output(ty, rows * columns));
        let step = Softmax { input, output, rows, columns, scale: 0.5, is_log: bench.is() };
        bench.check(&format!("softmax, seed {seed}"), &Step::Softmax(step), ty, 2. * tolerance(ty));
    }
}

#[test]
fn random_norms() {
    for seed in 0..60 {
        let mut bench = Bench::new(seed);
        let ty = bench.one_of(&FLOATS);
        let most = bench.one_of(&[3, 130, 1800]);
        let (rows, columns) = (bench.length(11), bench.length(most));
        // Often of groups of four; some of them so many that a row has a block.
        let columns = if bench.is() { 4 * columns } else { columns };
        let residual = bench.optional(ty, rows * columns);
        let (scale_type, shift_type) = (bench.one_of(&FLOATS), bench.one_of(&FLOATS));
        let step = Norm {
            input: bench.input(ty, rows * columns),
            residual,
            sum: if residual.is_some() && bench.is() { Some(bench.output(ty, rows * columns)) } else { None },
            scale: bench.optional(scale_type, columns),
            shift: bench.optional(shift_type, columns),
            output: bench.output(ty, rows * columns),
            rows,
            columns,
            epsilon: 1e-3,
            is_rms: bench.is(),
        };
        bench.check(&format!("norm, seed {seed}"), &Step::Norm(step), ty, 4. * tolerance(ty));
    }
}

#[test]
fn random_gatherings() {
    for seed in 0..60 {
        let mut bench = Bench::new(seed);
        let ty = bench.one_of(&[Type::F32, Type::F16, Type::I64, Type::I32, Type::U8, Type::Bool]);
        let (outer, length, inner) = (bench.length(3), bench.length(20), bench.length(40));
        let (tasks, indices_per_task) = (bench.length(4), bench.below(6));
        let count = tasks * indices_per_task.max(1);
        let indices: Vec<f32> = (0..count).map(|_| bench.below(3 * length) as f32 - 1.5 * length as f32).collect();
        if bench.is() {
            bench.faults(tasks);
        }
        let index_type = bench.one_of(&[Type::I64, Type::I32]);
        let step = Gather {
            input: bench.input(ty, outer * length * inner),
            indices: bench.floats(index_type, &indices),
            output: bench.output(ty, outer * count * inner),
            outer,
            length,
            inner,
            count,
            indices_per_task,
        };
        bench.check(&format!("gathering, seed {seed}"), &Step::Gather(step), ty, 0.);
    }
}
