use lowering::plan::{ATTENTION_WIDTH_MAX, Attention};

use super::{emulated::Bench, *};

/// Vectors of a tensor `[batch, position, head, width]` or `[batch, head, position, width]`, with something behind
/// each.
fn view(bench: &mut Bench, ty: Type, lengths: [usize; 3], width: usize, is_output: bool) -> View {
    let [batch, heads, positions] = lengths;
    let padded = if bench.is() { width } else { width + bench.length(9) } as i64;
    let count = batch * heads * positions * padded as usize;
    let base = if is_output { bench.output(ty, count) } else { bench.input(ty, count) };
    let image = padded * (heads * positions) as i64;
    let strides = if bench.is() {
        vec![image, padded, padded * heads as i64]
    } else {
        vec![image, padded * positions as i64, padded]
    };
    View { base, strides }
}

fn mask(bench: &mut Bench, lengths: [usize; 4]) -> View {
    let [batch, _, queries, keys] = lengths;
    let ty = bench.one_of(&[Type::F32, Type::F16]);
    let is_of_keys = bench.is();
    let rows = if is_of_keys { batch } else { batch * queries };
    let mut numbers = vec![0.; rows * keys];
    for number in &mut numbers {
        *number = if bench.below(3) == 0 { f32::NEG_INFINITY } else { bench.below(5) as f32 / 4. };
    }
    // One row sees nothing.
    numbers[..keys].fill(f32::NEG_INFINITY);
    let base = bench.floats(ty, &numbers);
    let keys = keys as i64;
    let strides = if is_of_keys { vec![keys, 0, 0, 1] } else { vec![keys * queries as i64, 0, keys, 1] };
    View { base, strides }
}

fn check(seed: u64, ty: Type, widths: &[usize], tolerance: f32) {
    let mut bench = Bench::new(seed);
    let (batch, heads, width) = (bench.length(2), bench.length(2), bench.one_of(widths));
    let (most_queries, most_keys) = (bench.one_of(&[3, 80]), bench.one_of(&[5, 150]));
    let (queries, keys) = (bench.length(most_queries), bench.length(most_keys));
    let step = Attention {
        query: view(&mut bench, ty, [batch, heads, queries], width, false),
        key: view(&mut bench, ty, [batch, heads, keys], width, false),
        value: view(&mut bench, ty, [batch, heads, keys], width, false),
        mask: if bench.is() { Some(mask(&mut bench, [batch, heads, queries, keys])) } else { None },
        output: view(&mut bench, ty, [batch, heads, queries], width, true),
        batch,
        heads,
        queries,
        keys,
        width,
        scale: 1. / (width as f32).sqrt(),
        is_causal: bench.is(),
    };
    bench.check(&format!("attention, seed {seed}"), &Step::Attention(step), ty, tolerance);
}

#[test]
fn random_attentions_of_binary32() {
    for seed in 0..24 {
        check(seed, Type::F32, &[1, 7, 32, 64, 100, ATTENTION_WIDTH_MAX], 2e-5);
    }
}

#[test]
fn random_attentions_of_binary16() {
    for seed in 0..24 {
        // Shares are rounded to binary16 before they are multiplied: values of size 4, shares with 11 bits.
        check(seed, Type::F16, &[1, 7, 16, 64, 72, 100, ATTENTION_WIDTH_MAX], 4e-3);
    }
}

#[test]
fn wider_attention_is_refused() {
    let mut bench = Bench::new(1);
    let width = ATTENTION_WIDTH_MAX + 8;
    let view = view(&mut bench, Type::F16, [1, 1, 1], width, false);
    let step = Attention {
        query: view.clone(),
        key: view.clone(),
        value: view.clone(),
        mask: None,
        output: view,
        batch: 1,
        heads: 1,
        queries: 1,
        keys: 1,
        width,
        scale: 1.,
        is_causal: false,
    };
    let error = calls(&Step::Attention(step), None, BASES).unwrap_err().0;
    assert!(error.contains("136 elements"), "{error}");
}
