//! What calls are made of, and whether they do what the steps mean: on the kernels as they compile for a CPU, for
//! random steps of all kinds.

mod attention;
#[allow(unsafe_code, reason = "runs kernels, which take addresses")]
mod emulated;
mod images;
mod pointwise;
mod rows;

use lowering::{
    Place, Type,
    plan::{Gather, Instruction, Numbers, Operand, Pointwise, Softmax, Value, View},
};

use super::{call::*, *};
use crate::driver::Address;

const BASES: Bases = Bases { arena: Address(1 << 40), weights: Address(1 << 41) };

fn in_arena(at: usize, ty: Type) -> Operand {
    Operand { place: Place::Arena(at), ty }
}

fn only(step: &Step) -> Call {
    let [call] = <[Call; 1]>::try_from(calls(step, None, BASES).unwrap()).expect("one call");
    call
}

/// A copy of a tensor with those strides to a dense one.
fn copy(shape: &[usize], strides: &[i64], ty: Type) -> Step {
    let mut dense = vec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        dense[dimension - 1] = dense[dimension] * shape[dimension] as i64;
    }
    Step::Pointwise(Pointwise {
        shape: shape.to_vec(),
        inputs: vec![View { base: in_arena(0, ty), strides: strides.to_vec() }],
        output: View { base: in_arena(1 << 30, ty), strides: dense },
        numbers: Numbers::Float,
        code: vec![Instruction::Load(Value::Input(0))],
    })
}

#[test]
fn all_kernels_are_in_their_modules() {
    for (module, (name, ptx)) in MODULES.iter().enumerate() {
        let entries: Vec<&str> =
            ptx.lines().filter_map(|line| line.strip_prefix(".visible .entry ")?.strip_suffix('(')).collect();
        for entry in &entries {
            assert!(KERNELS.contains(&(*entry, module)), "{entry} of {name}");
        }
        let known = KERNELS.iter().filter(|(_, of)| *of == module);
        assert_eq!(known.count(), entries.len(), "{name}");
    }
}

#[test]
fn parameters_have_the_bytes_that_kernels_take() {
    let softmax = Softmax {
        input: in_arena(0, Type::F16),
        output: in_arena(4096, Type::F16),
        rows: 3,
        columns: 5,
        scale: 1.,
        is_log: false,
    };
    for step in [copy(&[8, 8], &[8, 1], Type::F32), Step::Softmax(softmax)] {
        let call = only(&step);
        // `.param .align 8 .b8 softmax_rows_param_0[40]`
        let declared = format!(".param .align 8 .b8 {}_param_0[{}]", call.kernel, call.parameters.len());
        assert!(MODULES.iter().any(|(_, ptx)| ptx.contains(&declared)), "{declared}");
    }
}

#[test]
fn copies_take_the_kernel_that_fits_them() {
    let kernel = |shape: &[usize], strides: &[i64]| {
        let call = only(&copy(shape, strides, Type::F16));
        (call.kernel, call.grid)
    };
    // A dense one is one dimension, of groups of four.
    assert_eq!(kernel(&[64, 8, 12], &[96, 12, 1]), ("pointwise_float_dense", 6));
    // A row that repeats stays dense; an odd number of elements does not.
    assert_eq!(kernel(&[64, 64], &[0, 1]), ("pointwise_float_dense", 4));
    assert_eq!(kernel(&[64, 63], &[0, 1]), ("pointwise_float", 16));
    // A transposition of 2 x (48 x 40): 2 x 2 tiles each.
    assert_eq!(kernel(&[2, 40, 48], &[40 * 48, 1, 40]), ("pointwise_tiled", 8));
    // Three channels are no tile.
    assert_eq!(kernel(&[2, 100, 3], &[300, 1, 100]), ("pointwise_float", 3));
}

#[test]
fn what_has_no_elements_has_no_call() {
    assert_eq!(calls(&copy(&[4, 0, 4], &[0, 4, 1], Type::F32), None, BASES), Ok(Vec::new()));
}

#[test]
fn what_kernels_cannot_count_is_refused() {
    let refused = |step: Step| calls(&step, None, BASES).unwrap_err().0;
    assert!(refused(copy(&[1 << 16, 1 << 15], &[1 << 15, 1], Type::F32)).contains("smaller batches"));
    // Few elements, far from each other.
    assert!(refused(copy(&[2, 2], &[1 << 31, 1], Type::F32)).contains("32 bits"));
    let gather = Gather {
        input: in_arena(0, Type::F32),
        indices: in_arena(4096, Type::F32),
        output: in_arena(8192, Type::F32),
        outer: 1,
        length: 1,
        inner: 1,
        count: 1,
        indices_per_task: 0,
    };
    assert!(refused(Step::Gather(gather)).contains("I64 or I32"));
}

#[test]
fn rows_are_gathered_in_the_largest_units() {
    let unit = |inner: usize, input: usize, ty: Type| {
        let gather = Gather {
            input: in_arena(input, ty),
            indices: in_arena(1 << 20, Type::I64),
            output: in_arena(1 << 21, ty),
            outer: 1,
            length: 10,
            inner,
            count: 3,
            indices_per_task: 0,
        };
        u32::from_le_bytes(only(&Step::Gather(gather)).parameters[36..40].try_into().unwrap())
    };
    assert_eq!(unit(64, 0, Type::F32), 16);
    assert_eq!(unit(6, 0, Type::F32), 8);
    assert_eq!(unit(64, 4, Type::F32), 4);
    assert_eq!(unit(5, 0, Type::F16), 2);
    assert_eq!(unit(3, 0, Type::U8), 1);
}

#[test]
fn divisors_divide() {
    for divisor in [1, 2, 3, 5, 7, 8, 641, 1 << 20, (1 << 20) + 7, i32::MAX as u32] {
        let words = Parameters::default().divisor(divisor).0;
        let word = |index: usize| u32::from_le_bytes(words[4 * index..][..4].try_into().unwrap());
        for n in [0, 1, divisor - 1, divisor, divisor.saturating_mul(2) - 1, 1_000_003, i32::MAX as u32] {
            let n = n.min(i32::MAX as u32);
            let high = ((u64::from(n) * u64::from(word(1))) >> 32) as u32;
            assert_eq!((high + n) >> word(2), n / divisor, "{n} / {divisor}");
        }
    }
}
