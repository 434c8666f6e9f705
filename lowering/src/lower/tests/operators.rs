//! One operator, or a few.

use super::*;

/// A net of one input that `make` adds nodes to.
fn net_of(shape: &[i64], make: impl FnOnce(&mut Net, &str) -> String) -> Net {
    let mut net = Net::new(3);
    let x = net.input("x", FLOAT, shape);
    let output = make(&mut net, &x);
    net.output(&output);
    net
}

#[test]
fn activations_are_what_tract_computes() {
    for operator in [
        "Relu",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Abs",
        "Neg",
        "Exp",
        "Floor",
        "Ceil",
        "Round",
        "Sign",
        "Sin",
        "Cos",
        "Softplus",
        "Softsign",
        "Elu",
        "Selu",
        "Celu",
        "LeakyRelu",
        "HardSigmoid",
        "HardSwish",
        "Sqrt",
        "Log",
        "Reciprocal",
        "Tan",
        "Sinh",
        "Cosh",
        "ThresholdedRelu",
        "Mish",
    ] {
        let net = net_of(&[-1, 5, 7], |net, x| {
            let three = net.scalar(3.0);
            let positive = net.node("Add", &[x, &three], &[]);
            let x = if ["Sqrt", "Log", "Reciprocal"].contains(&operator) { &positive } else { x };
            net.node(operator, &[x], &[])
        });
        let plans = agrees(&net);
        assert!(plans[0].steps.len() <= 2, "{operator}: {:?}", plans[0].steps);
    }
}

#[test]
fn binary_operators_repeat_what_has_one_element() {
    for operator in ["Add", "Sub", "Mul", "Div", "Min", "Max", "Pow"] {
        let net = net_of(&[-1, 4, 6], |net, x| {
            let half = net.scalar(2.5);
            let positive = net.node("Add", &[x, &half], &[]);
            let (row, column) = (net.gain(&[6]), net.gain(&[4, 1]));
            let first = net.node(operator, &[&positive, &row], &[]);
            let second = net.node(operator, &[&column, &first], &[]);
            let sum = net.node("ReduceSum", &[&second], &[]);
            net.node("Add", &[&second, &sum], &[])
        });
        agrees(&net);
    }
}

#[test]
fn comparisons_choose() {
    for operator in ["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"] {
        let net = net_of(&[-1, 9], |net, x| {
            let (zero, one) = (net.scalar(0.0), net.scalar(1.0));
            let is_less = net.node(operator, &[x, &zero], &[]);
            let is_small = net.node("Less", &[x, &one], &[]);
            let both = net.node("And", &[&is_less, &is_small], &[]);
            let not = net.node("Not", &[&both], &[]);
            let chosen = net.node("Where", &[&not, x, &one], &[]);
            let number = net.node("Cast", &[&is_less], &[("to", Int(1))]);
            net.node("Add", &[&chosen, &number], &[])
        });
        assert_eq!(agrees(&net)[0].steps.len(), 1);
    }
}

#[test]
fn integers_keep_all_their_bits() {
    let mut net = Net::new(3);
    let x = net.input("x", INT64, &[-1, 6]);
    let large = net.ints(&[1], &[(1 << 40) + 1]);
    let three = net.ints(&[1], &[3]);
    let sum = net.node("Add", &[&x, &large], &[]);
    let product = net.node("Mul", &[&sum, &three], &[]);
    let output = net.node("Sub", &[&product, &large], &[]);
    net.output(&output);
    let (graph, batch) = net.graph();
    let lowered = lower(&graph, Some(&batch), &[2], Precision::Fp16).unwrap();
    let x = tensor2(&[[0_i64, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]]);
    let (found, _) = interpreted(&lowered.plans[0], &lowered.weights, std::slice::from_ref(&x));
    let expected =
        image::integers(&x).unwrap().iter().map(|x| (x + (1 << 40) + 1) * 3 - (1 << 40) - 1).collect::<Vec<_>>();
    assert_eq!(image::integers(&found[0]).unwrap(), expected);
}

#[test]
fn convolutions_have_any_pads_strides_dilations_and_groups() {
    let mut random = Random(11);
    for case in 0..24 {
        let groups = [1, 1, 2, 4][random.below(4)];
        let (c, k) = (groups * (1 + random.below(3)), groups * (1 + random.below(3)));
        let kernel = [1 + random.below(3), 1 + random.below(3)];
        let (strides, dilations) =
            ([1 + random.below(2) as i64, 1 + random.below(2) as i64], [1, 1 + random.below(2) as i64]);
        let pads = [random.below(3), random.below(2), random.below(2), random.below(3)].map(|pad| pad as i64);
        let net = net_of(&[-1, c as i64, 9, 8], |net, x| {
            let weights = net.weight(&[k, c / groups, kernel[0], kernel[1]], 0.5);
            let bias = net.weight(&[k], 0.5);
            let attributes =
                [("group", Int(groups as i64)), ("strides", Ints(&strides)), ("dilations", Ints(&dilations))];
            let padding = if case % 3 == 0 { ("auto_pad", Text("SAME_UPPER")) } else { ("pads", Ints(&pads)) };
            let attributes: Vec<_> = attributes.into_iter().chain([padding]).collect();
            let y = net.node("Conv", &[x, &weights, &bias], &attributes);
            net.node("Relu", &[&y], &[])
        });
        agrees(&net);
    }
}

#[test]
fn a_convolution_takes_its_normalisation_its_sum_and_its_relu_with_it() {
    for groups in [1_i64, 8] {
        let net = net_of(&[-1, 8, 6, 6], |net, x| {
            let conv = |net: &mut Net, x: &str, size: usize| {
                let weights = net.weight(&[8, 8 / groups as usize, size, size], 0.5);
                let pad = (size / 2) as i64;
                let attributes = [("group", Int(groups)), ("pads", Ints(&[pad, pad, pad, pad]))];
                let y = net.node("Conv", &[x, &weights], &attributes);
                let (scale, shift, mean, variance) =
                    (net.gain(&[8]), net.weight(&[8], 1.0), net.weight(&[8], 1.0), net.gain(&[8]));
                net.node("BatchNormalization", &[&y, &scale, &shift, &mean, &variance], &[])
            };
            let first = conv(net, x, 3);
            let first = net.node("Relu", &[&first], &[]);
            let second = conv(net, &first, 3);
            let sum = net.node("Add", &[&second, &first], &[]);
            net.node("Relu", &[&sum], &[])
        });
        // The input becomes NHWC, the output NCHW.
        assert_eq!(counts(&agrees(&net)[1]), [2, 0, 2, 0], "{groups}");
    }
}

#[test]
fn what_repeats_otherwise_than_the_columns_of_a_product_is_no_part_of_it() {
    for (operator, last) in [("Mul", 3), ("Add", 3), ("Mul", 4), ("Add", 6), ("Mul", 8)] {
        let net = net_of(&[-1, 6, 4], |net, x| {
            let (weights, vector) = (net.weight(&[4, 8], 0.5), net.weight(&[last], 0.5));
            let product = net.node("MatMul", &[x, &weights], &[]);
            let lengths = net.ints(&[3], &[0, 48 / last as i64, last as i64]);
            let reshaped = net.node("Reshape", &[&product, &lengths], &[]);
            net.node(operator, &[&reshaped, &vector], &[])
        });
        agrees(&net);
    }
}

#[test]
fn pooling_is_what_tract_computes() {
    for (operator, attributes) in [
        ("MaxPool", vec![("kernel_shape", Ints(&[3, 3])), ("strides", Ints(&[2, 2])), ("pads", Ints(&[1, 1, 1, 1]))]),
        ("MaxPool", vec![("kernel_shape", Ints(&[2, 2])), ("strides", Ints(&[2, 2])), ("ceil_mode", Int(1))]),
        ("AveragePool", vec![("kernel_shape", Ints(&[3, 2])), ("pads", Ints(&[1, 0, 1, 1]))]),
        (
            "AveragePool",
            vec![("kernel_shape", Ints(&[3, 3])), ("pads", Ints(&[1, 1, 1, 1])), ("count_include_pad", Int(1))],
        ),
        // The last windows end behind the padding, which is counted.
        (
            "AveragePool",
            vec![
                ("kernel_shape", Ints(&[2, 3])),
                ("strides", Ints(&[3, 2])),
                ("pads", Ints(&[0, 1, 0, 1])),
                ("ceil_mode", Int(1)),
                ("count_include_pad", Int(1)),
            ],
        ),
        ("GlobalAveragePool", vec![]),
        ("GlobalMaxPool", vec![]),
    ] {
        let net = net_of(&[-1, 5, 7, 9], |net, x| net.node(operator, &[x], &attributes));
        agrees(&net);
    }
}

#[test]
fn rows_are_reduced_over_any_axes() {
    for operator in ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"] {
        for axes in [&[1][..], &[2], &[3], &[1, 2], &[2, 3], &[1, 3], &[1, 2, 3]] {
            for keep in [0, 1] {
                let net = net_of(&[-1, 3, 4, 5], |net, x| {
                    let (third, one) = (net.scalar(0.3), net.scalar(1.0));
                    let x = net.node("Mul", &[x, &third], &[]);
                    let x = net.node("Add", &[&x, &one], &[]);
                    if operator == "ReduceSum" {
                        let axes = net.ints(&[axes.len()], axes);
                        net.node(operator, &[&x, &axes], &[("keepdims", Int(keep))])
                    } else {
                        net.node(operator, &[&x], &[("keepdims", Int(keep)), ("axes", Ints(axes))])
                    }
                });
                agrees(&net);
            }
        }
    }
}

#[test]
fn the_largest_is_found_along_any_axis() {
    for axis in 1..4 {
        let net =
            net_of(&[-1, 3, 4, 5], |net, x| net.node("ArgMax", &[x], &[("axis", Int(axis)), ("keepdims", Int(0))]));
        agrees_within(&net, 0.0, 4.0);
        let net = net_of(&[-1, 3, 4, 5], |net, x| net.node("Softmax", &[x], &[("axis", Int(axis))]));
        agrees(&net);
        let net = net_of(&[-1, 3, 4, 5], |net, x| net.node("LogSoftmax", &[x], &[("axis", Int(axis))]));
        agrees(&net);
    }
}

#[test]
fn products_are_of_any_operands() {
    // Of a constant on either side, of two inputs, of vectors, transposed.
    for (a, b) in [(&[4, 6][..], &[6, 5][..]), (&[2, 4, 6], &[6, 5]), (&[2, 4, 6], &[2, 6, 5]), (&[4, 6], &[2, 6, 5])] {
        for constant in 0..3 {
            let shape = |shape: &[usize]| [-1].into_iter().chain(shape.iter().map(|&it| it as i64)).collect::<Vec<_>>();
            let mut net = Net::new(5);
            let whole = |rank: usize, shape: &[usize]| [vec![1; rank - shape.len()], shape.to_vec()].concat();
            let rank = a.len().max(b.len());
            let (a, b) = (whole(rank, a), whole(rank, b));
            let x = if constant == 0 { net.weight(&a, 0.5) } else { net.input("a", FLOAT, &shape(&a)) };
            let y = if constant == 1 { net.weight(&b, 0.5) } else { net.input("b", FLOAT, &shape(&b)) };
            let product = net.node("MatMul", &[&x, &y], &[]);
            let bias = net.weight(&[5], 1.0);
            let sum = net.node("Add", &[&product, &bias], &[]);
            let output = net.node("Relu", &[&sum], &[]);
            net.output(&output);
            agrees(&net);
        }
    }
}

#[test]
fn gemm_multiplies_transposed_matrices_by_constants() {
    for (trans_a, trans_b) in [(0, 0), (0, 1)] {
        let net = net_of(&[-1, 6], |net, x| {
            let weights = net.weight(if trans_b == 1 { &[5, 6] } else { &[6, 5] }, 0.5);
            let bias = net.weight(&[5], 1.0);
            let attributes =
                [("transA", Int(trans_a)), ("transB", Int(trans_b)), ("alpha", Float(0.5)), ("beta", Float(2.0))];
            net.node("Gemm", &[x, &weights, &bias], &attributes)
        });
        let plans = agrees(&net);
        assert_eq!(plans[1].steps.len(), 1, "{:?}", plans[1].steps);
    }
}

#[test]
fn shapes_change_without_copies_where_strides_can_say_it() {
    let net = net_of(&[-1, 4, 6], |net, x| {
        let heads = net.ints(&[4], &[0, 4, 2, 3]);
        let split = net.node("Reshape", &[x, &heads], &[]);
        let turned = net.node("Transpose", &[&split], &[("perm", Ints(&[0, 2, 1, 3]))]);
        let exp = net.node("Exp", &[&turned], &[]);
        let back = net.node("Transpose", &[&exp], &[("perm", Ints(&[0, 2, 1, 3]))]);
        let merged = net.ints(&[3], &[0, 4, 6]);
        net.node("Reshape", &[&back, &merged], &[])
    });
    assert_eq!(agrees(&net)[1].steps.len(), 1);
    // This one mixes.
    let net = net_of(&[-1, 4, 6], |net, x| {
        let turned = net.node("Transpose", &[x], &[("perm", Ints(&[0, 2, 1]))]);
        let flat = net.ints(&[2], &[0, 24]);
        let flat = net.node("Reshape", &[&turned, &flat], &[]);
        net.node("Exp", &[&flat], &[])
    });
    agrees(&net);
}

#[test]
fn tensors_are_sliced_joined_padded_and_repeated() {
    let net = net_of(&[-1, 6, 5], |net, x| {
        let vectors = [[1_i64], [5], [1], [2]].map(|it| net.ints(&[1], &it));
        let slice = net.node("Slice", &[x, &vectors[0], &vectors[1], &vectors[2], &vectors[3]], &[]);
        let exp = net.node("Exp", &[x], &[]);
        let joined = net.node("Concat", &[&slice, &exp, x], &[("axis", Int(1))]);
        let pads = net.ints(&[6], &[0, 1, 2, 0, 0, 1]);
        let value = net.scalar(0.5);
        let padded = net.node("Pad", &[&joined, &pads, &value], &[]);
        let times = net.ints(&[3], &[1, 2, 3]);
        net.node("Tile", &[&padded, &times], &[])
    });
    let (graph, _) = net.graph();
    drop(graph);
    agrees(&net);
    for mode in ["edge", "reflect"] {
        let net = net_of(&[-1, 6, 5], |net, x| {
            let pads = net.ints(&[6], &[0, 2, 1, 0, 1, 3]);
            net.node("Pad", &[x, &pads], &[("mode", Text(mode))])
        });
        agrees(&net);
    }
}

#[test]
fn a_slice_may_skip_and_go_backwards() {
    for (start, end, step) in [(0_i64, 9, 2), (1, 8, 3), (8, 0, -1), (7, -20, -2)] {
        let net = net_of(&[-1, 9, 2], |net, x| {
            let vectors = [[start], [end], [1], [step]].map(|it| net.ints(&[1], &it));
            let sliced = net.node("Slice", &[x, &vectors[0], &vectors[1], &vectors[2], &vectors[3]], &[]);
            net.node("Neg", &[&sliced], &[])
        });
        agrees(&net);
    }
}

#[test]
fn rows_are_gathered_and_what_is_out_of_range_is_a_fault_of_its_task() {
    let mut net = Net::new(3);
    let indices = net.input("indices", INT64, &[-1, 4]);
    let table = net.weight(&[5, 3], 1.0);
    let output = net.node("Gather", &[&table, &indices], &[]);
    net.output(&output);
    agrees(&net);
    let (graph, batch) = net.graph();
    let lowered = lower(&graph, Some(&batch), &[3], Precision::Fp32).unwrap();
    let indices = tensor2(&[[0_i64, 1, -1, -5], [4, 3, 5, 0], [-6, 0, 0, 0]]);
    let (_, faults) = interpreted(&lowered.plans[0], &lowered.weights, &[indices]);
    assert_eq!(faults.iter().map(|&fault| fault != 0).collect::<Vec<_>>(), [false, true, true]);
    for index in [0, 3, -1] {
        let net = net_of(&[-1, 4, 5], |net, x| {
            let index = net.ints(&[], &[index]);
            net.node("Gather", &[x, &index], &[("axis", Int(1))])
        });
        agrees(&net);
    }
    let net = net_of(&[-1, 4, 5], |net, x| {
        let indices = net.ints(&[3], &[3, 0, -1]);
        net.node("Gather", &[x, &indices], &[("axis", Int(2))])
    });
    assert_eq!(agrees(&net)[0].faults, None);
}

#[test]
fn images_are_resized() {
    for (mode, transformation, nearest) in [
        ("nearest", "asymmetric", "floor"),
        ("nearest", "half_pixel", "ceil"),
        ("nearest", "half_pixel", "round_prefer_ceil"),
        ("nearest", "half_pixel", "round_prefer_floor"),
        ("linear", "half_pixel", "floor"),
        ("linear", "align_corners", "floor"),
        ("linear", "pytorch_half_pixel", "floor"),
    ] {
        for size in [[9_i64, 4], [10, 12]] {
            let net = net_of(&[-1, 3, 5, 6], |net, x| {
                let scales: Vec<f32> = vec![1.0, 1.0, size[0] as f32 / 5.0, size[1] as f32 / 6.0];
                let (none, scales) = (net.floats(&[0], Vec::new()), net.floats(&[4], scales));
                let attributes = [
                    ("mode", Text(mode)),
                    ("coordinate_transformation_mode", Text(transformation)),
                    ("nearest_mode", Text(nearest)),
                ];
                net.node("Resize", &[x, &none, &scales], &attributes)
            });
            agrees(&net);
        }
    }
}

#[test]
fn images_are_doubled_by_transposed_convolutions() {
    for (kernel, strides) in [([2, 2], [2, 2]), ([3, 1], [3, 1]), ([1, 4], [1, 4])] {
        let net = net_of(&[-1, 5, 3, 4], |net, x| {
            let filters = net.weight(&[5, 7, kernel[0], kernel[1]], 0.5);
            let bias = net.weight(&[7], 0.5);
            let lengths = kernel.map(|length| length as i64);
            let attributes = [("kernel_shape", Ints(&lengths)), ("strides", Ints(&strides))];
            let image = net.node("ConvTranspose", &[x, &filters, &bias], &attributes);
            net.node("Relu", &[&image], &[])
        });
        agrees(&net);
    }
}

#[test]
fn responses_are_normalised_over_channels() {
    for (shape, size) in [(&[-1, 6, 3, 2][..], 3), (&[-1, 5, 4], 4), (&[-1, 3, 2, 2], 9)] {
        let net = net_of(shape, |net, x| {
            let x = &net.node("Abs", &[x], &[]);
            net.node(
                "LRN",
                &[x],
                &[("size", Int(size)), ("alpha", Float(0.5)), ("beta", Float(0.75)), ("bias", Float(2.0))],
            )
        });
        agrees(&net);
    }
}

#[test]
fn tensors_are_repeated_in_dimensions_that_they_do_not_have() {
    let net = net_of(&[-1, 3], |net, x| {
        let (twice, first) = (net.ints(&[3], &[2, 1, 1]), net.ints(&[1], &[0]));
        let both = net.node("Expand", &[x, &twice], &[]);
        net.node("ReduceSum", &[&both, &first], &[("keepdims", Int(0))])
    });
    agrees(&net);
}

#[test]
fn what_cannot_be_lowered_is_refused_by_name() {
    let refused = |net: &Net| {
        let (graph, batch) = net.graph();
        lower(&graph, Some(&batch), &[2], Precision::Fp16).unwrap_err().to_string()
    };
    let net = net_of(&[-1, 4, 5], |net, x| {
        let axis = net.ints(&[], &[1]);
        net.node("CumSum", &[x, &axis], &[])
    });
    let text = refused(&net);
    assert!(text.contains("cumsum_0") && text.contains("GPUs do not run here") && text.contains("EinSum"), "{text}");
    let shifted = net_of(&[-1, 3, 4, 5], |net, x| {
        let filters = net.weight(&[3, 3, 3, 3], 0.5);
        let attributes = [("strides", Ints(&[3, 3])), ("pads", Ints(&[1, 1, 1, 1])), ("output_padding", Ints(&[2, 2]))];
        net.node("ConvTranspose", &[x, &filters], &attributes)
    });
    let text = refused(&shifted);
    assert!(text.contains("a Deconv whose windows overlap, or are cut off, which GPUs do not run here"), "{text}");
    let net = net_of(&[-1, 4], |net, x| {
        let weights = net.floats(&[4, 2], vec![1e6; 8]);
        net.node("MatMul", &[x, &weights], &[])
    });
    let text = refused(&net);
    assert!(text.contains("FP16 cannot hold") && text.contains("1000000"), "{text}");
    let net = net_of(&[-1, 4], |net, x| {
        let pads = net.ints(&[4], &[0, 1, 0, -2]);
        net.node("Pad", &[x, &pads], &[])
    });
    let text = refused(&net);
    assert!(text.contains("pad_0") && text.contains("its pads are negative"), "{text}");
    let (graph, _) = net_of(&[-1, 4], |net, x| net.node("Exp", &[x], &[])).graph();
    let text = lower(&graph, None, &[1], Precision::Fp32).unwrap_err().to_string();
    assert!(text.contains("dimension 0 of x is batch, expected a number"), "{text}");
}

#[test]
fn plans_share_weights_and_equal_weights_are_there_once() {
    let net = net_of(&[-1, 16], |net, x| {
        let values: Vec<f32> = (0..256).map(|at| at as f32 / 256.0).collect();
        let (first, second) = (net.floats(&[16, 16], values.clone()), net.floats(&[16, 16], values));
        let y = net.node("MatMul", &[x, &first], &[]);
        net.node("MatMul", &[&y, &second], &[])
    });
    let (graph, batch) = net.graph();
    let one = lower(&graph, Some(&batch), &[1], Precision::Fp32).unwrap_or_else(|error| panic!("{error}\n{graph}"));
    let many = lower(&graph, Some(&batch), &[5, 1, 2, 9], Precision::Fp32).unwrap();
    assert_eq!(one.weights.len(), 1024);
    assert_eq!(one.weights, many.weights);
    assert_eq!(many.plans.iter().map(|plan| plan.batch).collect::<Vec<_>>(), [1, 2, 5, 9]);
}

#[test]
fn sequences_are_images_of_one_row() {
    let net = net_of(&[-1, 4, 11], |net, x| {
        let weights = net.weight(&[6, 2, 3], 0.5);
        let attributes =
            [("group", Int(2)), ("pads", Ints(&[2, 1])), ("strides", Ints(&[2])), ("dilations", Ints(&[2]))];
        let y = net.node("Conv", &[x, &weights], &attributes);
        let y = net.node("Relu", &[&y], &[]);
        net.node("MaxPool", &[&y], &[("kernel_shape", Ints(&[2])), ("strides", Ints(&[1]))])
    });
    agrees(&net);
}

#[test]
fn shapes_are_constants_once_the_batch_has_a_number() {
    let net = net_of(&[-1, 4, 6], |net, x| {
        let shape = net.node("Shape", &[x], &[]);
        let zeros = net.node("ConstantOfShape", &[&shape], &[]);
        let zeros = net.node("Cast", &[&zeros], &[("to", Int(1))]);
        let (zero, one, last) = (net.ints(&[], &[0]), net.ints(&[], &[1]), net.ints(&[], &[2]));
        let length = net.node("Gather", &[&shape, &last], &[]);
        let range = net.node("Range", &[&zero, &length, &one], &[]);
        let range = net.node("Cast", &[&range], &[("to", Int(1))]);
        let sum = net.node("Add", &[x, &range], &[]);
        let sum = net.node("Add", &[&sum, &zeros], &[]);
        let row = net.gain(&[1, 4, 1]);
        let wide = net.node("Expand", &[&row, &shape], &[]);
        net.node("Mul", &[&sum, &wide], &[])
    });
    assert_eq!(agrees(&net)[0].steps.len(), 1);
}

#[test]
fn outputs_may_be_inputs_constants_and_each_other() {
    let mut net = Net::new(4);
    let x = net.input("x", FLOAT, &[-1, 5]);
    net.input("unused", FLOAT, &[-1, 2]);
    let same = net.node("Identity", &[&x], &[]);
    let y = net.node("Exp", &[&x], &[]);
    let again = net.node("Identity", &[&y], &[]);
    let flat = net.ints(&[2], &[-1, 1]);
    let turned = net.node("Reshape", &[&y, &flat], &[]);
    let constant = net.weight(&[3], 1.0);
    let constant = net.node("Exp", &[&constant], &[]);
    for output in [&same, &y, &again, &turned, &constant] {
        net.output(output);
    }
    let (graph, batch) = net.graph();
    let lowered = lower(&graph, Some(&batch), &[2], Precision::Fp32).unwrap();
    let plan = &lowered.plans[0];
    checks::check(plan, &lowered.weights);
    let inputs = inputs_of(&graph, (&batch, 2), &mut Random(7), 5);
    let (found, _) = interpreted(plan, &lowered.weights, &inputs);
    for (found, expected) in found.iter().zip(computed(&graph, (&batch, 2), &inputs).unwrap()) {
        assert!(distance(found, &expected) <= 1e-6);
    }
    let mut offsets: Vec<usize> = plan.outputs.iter().map(|port| port.offset).collect();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets.len(), 5, "each output has a place of its own");
}

#[test]
fn ports_have_the_types_of_the_model() {
    let mut net = Net::new(4);
    let half = net.input("half", 10, &[-1, 6]);
    let byte = net.input("byte", 2, &[-1, 6]);
    let small = net.input("small", 6, &[-1, 6]);
    let wide = net.node("Cast", &[&half], &[("to", Int(1))]);
    let number = net.node("Cast", &[&byte], &[("to", Int(1))]);
    let sum = net.node("ReduceSum", &[&half], &[]);
    let product = net.node("Mul", &[&wide, &number], &[]);
    let weights = net.weight(&[6, 3], 0.5);
    let product = net.node("MatMul", &[&product, &weights], &[]);
    let back = net.node("Cast", &[&product], &[("to", Int(10))]);
    let truncated = net.node("Cast", &[&product], &[("to", Int(6))]);
    let odd = net.ints(&[1], &[2]);
    let odd = net.node("Cast", &[&odd], &[("to", Int(6))]);
    let rest = net.node("Mod", &[&small, &odd], &[]);
    for output in [&back, &truncated, &rest, &sum] {
        net.output(output);
    }
    let (graph, batch) = net.graph();
    let half: Vec<half::f16> = (0..12).map(|at| half::f16::from_f32(at as f32 * 0.5 - 2.0)).collect();
    let inputs = [
        tract_ndarray::Array2::from_shape_vec((2, 6), half).unwrap().into_tensor(),
        tract_ndarray::Array2::from_shape_fn((2, 6), |(row, at)| (row * 40 + at * 3) as u8).into_tensor(),
        tract_ndarray::Array2::from_shape_fn((2, 6), |(row, at)| row as i32 * 7 + at as i32).into_tensor(),
    ];
    let expected = computed(&graph, (&batch, 2), &inputs).unwrap();
    for (precision, limit) in [(Precision::Fp32, 2e-3), (Precision::Fp16, 2e-2)] {
        let lowered = lower(&graph, Some(&batch), &[2], precision).unwrap();
        checks::check(&lowered.plans[0], &lowered.weights);
        let (found, _) = interpreted(&lowered.plans[0], &lowered.weights, &inputs);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(distance(found, expected) <= limit, "{index}: {found:?} {expected:?}");
        }
    }
    let mut net = Net::new(4);
    let x = net.input("x", 11, &[-1, 6]);
    let y = net.node("Exp", &[&x], &[]);
    net.output(&y);
    let (graph, batch) = net.graph();
    let text = lower(&graph, Some(&batch), &[2], Precision::Fp32).unwrap_err().to_string();
    assert!(text.contains("x is of type F64, expected FP32"), "{text}");
}

#[test]
fn lengths_that_are_given_by_inputs_are_refused_by_name() {
    let mut net = Net::new(4);
    let x = net.input("x", FLOAT, &[-1, 6]);
    let y = net.node("NonZero", &[&x], &[]);
    let y = net.node("Cast", &[&y], &[("to", Int(1))]);
    net.output(&y);
    let (graph, batch) = net.graph();
    let text = lower(&graph, Some(&batch), &[2], Precision::Fp32).unwrap_err().to_string();
    assert!(text.contains("nonzero_0"), "{text}");
}

#[test]
fn lengths_may_take_arithmetic_with_the_batch() {
    let net = net_of(&[-1, 4, 6], |net, x| {
        let shape = net.node("Shape", &[x], &[]);
        let (zero, axis, three) = (net.ints(&[1], &[0]), net.ints(&[1], &[2]), net.scalar(3.0));
        let batch = net.node("Gather", &[&shape, &zero], &[]);
        let batch = net.node("Cast", &[&batch], &[("to", Int(1))]);
        let one = net.node("Div", &[&batch, &batch], &[]);
        let end = net.node("Mul", &[&one, &three], &[]);
        let end = net.node("Cast", &[&end], &[("to", Int(7))]);
        let sliced = net.node("Slice", &[x, &zero, &end, &axis], &[]);
        net.node("Exp", &[&sliced], &[])
    });
    agrees(&net);
}

#[test]
fn a_graph_that_is_not_simple_enough_is_simplified() {
    let net = net_of(&[-1, 9, 2], |net, x| {
        let vectors = [1_i64, 8, 1, 3].map(|value| net.ints(&[1], &[value]));
        let (weights, bias) = (net.weight(&[2, 3], 1.0), net.weight(&[9, 1], 1.0));
        let sum = net.node("Add", &[x, &bias], &[]);
        let sliced = net.node("Slice", &[&sum, &vectors[0], &vectors[1], &vectors[2], &vectors[3]], &[]);
        net.node("MatMul", &[&sliced, &weights], &[])
    });
    let (typed, batch) = net.typed().unwrap();
    let is_there = |graph: &TypedModel| graph.nodes.iter().any(|node| node.op().name() == "StridedSlice");
    assert!(is_there(&typed), "{typed}");
    let simple = typed.clone().into_decluttered().unwrap();
    assert!(!is_there(&simple), "{simple}");
    let lowered = |graph: &TypedModel| lower(graph, Some(&batch), &[2], Precision::Fp32).unwrap();
    assert_eq!(lowered(&typed), lowered(&simple));
}
