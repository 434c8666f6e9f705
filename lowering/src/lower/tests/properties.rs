//! One operator with whatever shapes and attributes it may have.

use proptest::{prelude::*, sample::select};

use super::*;

/// Few, as each is lowered four times; `PROPTEST_CASES` does not change it.
const CASES: u32 = 32;

/// A window along one axis of an image.
#[derive(Debug, Clone, Copy)]
struct Window {
    length: usize,
    kernel: usize,
    stride: i64,
    dilation: i64,
    pads: [i64; 2],
}

fn window(dilations: i64) -> impl Strategy<Value = Window> {
    let pads = (0..3_i64, 0..3_i64);
    let window = (1..10_usize, 1..4_usize, 1..4_i64, 1..=dilations, pads);
    let window = window.prop_map(|(length, kernel, stride, dilation, (before, after))| {
        // What lies in the padding alone is a maximum of nothing.
        let pads = [before, after].map(|pad| pad.min(kernel as i64 - 1));
        Window { length, kernel, stride, dilation, pads }
    });
    window.prop_filter("the window fits", |it| {
        (it.kernel as i64 - 1) * it.dilation < it.length as i64 + it.pads[0] + it.pads[1]
    })
}

/// A shape without its batch.
fn shape() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(1..6_usize, 1..4)
}

/// That a net of one input computes what tract does, if tract takes it.
fn check(shape: &[usize], make: impl FnOnce(&mut Net, &str) -> String) -> Result<(), TestCaseError> {
    let lengths: Vec<i64> = [-1].into_iter().chain(shape.iter().map(|&length| length as i64)).collect();
    let mut net = Net::new(3);
    let x = net.input("x", FLOAT, &lengths);
    let output = make(&mut net, &x);
    net.output(&output);
    let Ok((graph, batch)) = net.try_graph() else { return Err(TestCaseError::reject("tract refuses it")) };
    for size in [1, 3] {
        let inputs = inputs_of(&graph, (&batch, size), &mut Random(7), 5);
        prop_assume!(computed(&graph, (&batch, size), &inputs).is_ok());
    }
    agrees(&net);
    Ok(())
}

fn each<T>(windows: [Window; 2], of: impl Fn(&Window) -> T) -> [T; 2] {
    [of(&windows[0]), of(&windows[1])]
}

/// Attributes of an operator that goes over an image.
fn attributes(windows: [Window; 2]) -> ([i64; 2], [i64; 2], [i64; 4]) {
    let [[top, bottom], [left, right]] = each(windows, |it| it.pads);
    (each(windows, |it| it.kernel as i64), each(windows, |it| it.stride), [top, left, bottom, right])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn convolutions(
        windows in [window(2), window(2)],
        (groups, c, k) in (1..4_usize, 1..4_usize, 1..4_usize),
        is_depthwise in any::<bool>(),
        has_bias in any::<bool>(),
    ) {
        let c = if is_depthwise { 1 } else { c };
        let [height, width] = each(windows, |it| it.length);
        let (kernel, strides, pads) = attributes(windows);
        let dilations = each(windows, |it| it.dilation);
        check(&[groups * c, height, width], |net, x| {
            let weights = net.weight(&[groups * k, c, kernel[0] as usize, kernel[1] as usize], 0.5);
            let bias = net.weight(&[groups * k], 0.5);
            let operands = if has_bias { vec![x, &weights, &bias] } else { vec![x, &weights] };
            net.node("Conv", &operands, &[
                ("group", Int(groups as i64)),
                ("strides", Ints(&strides)),
                ("dilations", Ints(&dilations)),
                ("pads", Ints(&pads)),
            ])
        })?;
    }

    #[test]
    fn pools(
        windows in [window(1), window(1)],
        channels in 1..6_usize,
        operator in select(vec!["MaxPool", "AveragePool"]),
        (rounds_up, counts_pads) in (any::<bool>(), any::<bool>()),
    ) {
        let [height, width] = each(windows, |it| it.length);
        let (kernel, strides, pads) = attributes(windows);
        check(&[channels, height, width], |net, x| {
            let mut attributes = vec![
                ("kernel_shape", Ints(&kernel)),
                ("strides", Ints(&strides)),
                ("pads", Ints(&pads)),
                ("ceil_mode", Int(rounds_up.into())),
            ];
            if operator == "AveragePool" {
                attributes.push(("count_include_pad", Int(counts_pads.into())));
            }
            net.node(operator, &[x], &attributes)
        })?;
    }

    #[test]
    fn reductions(
        shape in shape(),
        chosen in 1..8_usize,
        keeps in any::<bool>(),
        operator in select(vec!["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"]),
    ) {
        let axes: Vec<i64> = (1..=shape.len() as i64).filter(|axis| chosen >> (axis - 1) & 1 == 1).collect();
        prop_assume!(!axes.is_empty());
        check(&shape, |net, x| {
            let keeps = ("keepdims", Int(keeps.into()));
            if operator == "ReduceSum" {
                let axes = net.ints(&[axes.len()], &axes);
                return net.node(operator, &[x, &axes], &[keeps]);
            }
            net.node(operator, &[x], &[keeps, ("axes", Ints(&axes))])
        })?;
    }

    #[test]
    fn softmaxes(shape in shape(), axis in 0..3_usize, operator in select(vec!["Softmax", "LogSoftmax"])) {
        let axis = (axis % shape.len()) as i64 - shape.len() as i64;
        check(&shape, |net, x| net.node(operator, &[x], &[("axis", Int(axis))]))?;
    }

    #[test]
    fn slices(shape in shape(), parts in proptest::collection::vec((0..6_usize, 1..6_usize, 1..4_i64), 3)) {
        let parts: Vec<_> = shape.iter().zip(parts).map(|(&length, (start, more, step))| {
            let start = start % length;
            [start as i64, (start + more).min(length) as i64, step]
        }).collect();
        check(&shape, |net, x| {
            let column = |of: usize| parts.iter().map(|part| part[of]).collect::<Vec<_>>();
            let axes: Vec<i64> = (1..=shape.len() as i64).collect();
            let vectors = [column(0), column(1), axes, column(2)].map(|values| net.ints(&[values.len()], &values));
            let operands: Vec<&str> = [x].into_iter().chain(vectors.iter().map(String::as_str)).collect();
            net.node("Slice", &operands, &[])
        })?;
    }

    #[test]
    fn joints(shape in shape(), axis in 0..3_usize, others in proptest::collection::vec((1..5_usize, 0..3), 1..4)) {
        let axis = axis % shape.len();
        check(&shape, |net, x| {
            let mut parts = vec![x.to_owned()];
            for (length, what) in others {
                let part = match what {
                    // The same once more, something that is computed, and a part.
                    0 => x.to_owned(),
                    1 => net.node("Tanh", &[x], &[]),
                    _ => {
                        let vectors = [0, length.min(shape[axis]) as i64, axis as i64 + 1];
                        let [start, end, axes] = vectors.map(|value| net.ints(&[1], &[value]));
                        net.node("Slice", &[x, &start, &end, &axes], &[])
                    }
                };
                parts.push(part);
            }
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            net.node("Concat", &parts, &[("axis", Int(axis as i64 + 1))])
        })?;
    }

    #[test]
    fn transpositions(shape in shape(), orders in [0..6_usize, 0..6_usize], is_between in any::<bool>()) {
        let rank = shape.len();
        check(&shape, |net, x| {
            let mut y = x.to_owned();
            for order in orders {
                let mut axes: Vec<i64> = (1..=rank as i64).collect();
                axes.rotate_left(order % rank);
                if order >= 3 {
                    axes.reverse();
                }
                axes.insert(0, 0);
                y = net.node("Transpose", &[&y], &[("perm", Ints(&axes))]);
                if is_between {
                    y = net.node("Sigmoid", &[&y], &[]);
                }
            }
            y
        })?;
    }
}
