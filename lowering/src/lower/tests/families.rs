//! Small models of the families that are served.

use super::*;

/// A convolution with its normalisation.
fn conv(net: &mut Net, x: &str, (c, k, size): (usize, usize, usize), stride: i64, groups: usize) -> String {
    let weights = net.weight(&[k, c / groups, size, size], 0.6);
    let pad = (size / 2) as i64;
    let attributes =
        [("strides", Ints(&[stride, stride])), ("pads", Ints(&[pad, pad, pad, pad])), ("group", Int(groups as i64))];
    let y = net.node("Conv", &[x, &weights], &attributes);
    batch_norm(net, &y, k)
}

fn batch_norm(net: &mut Net, x: &str, k: usize) -> String {
    let (scale, shift, mean, variance) = (net.gain(&[k]), net.weight(&[k], 0.5), net.weight(&[k], 0.5), net.gain(&[k]));
    net.node("BatchNormalization", &[x, &scale, &shift, &mean, &variance], &[])
}

fn relu(net: &mut Net, x: &str) -> String {
    net.node("Relu", &[x], &[])
}

fn classifier(net: &mut Net, x: &str, channels: usize) {
    let pooled = net.node("GlobalAveragePool", &[x], &[]);
    let flat = net.node("Flatten", &[&pooled], &[]);
    let (weights, bias) = (net.weight(&[10, channels], 0.5), net.weight(&[10], 0.5));
    let logits = net.node("Gemm", &[&flat, &weights, &bias], &[("transB", Int(1))]);
    let output = net.node("Softmax", &[&logits], &[("axis", Int(1))]);
    net.output(&output);
}

fn bottleneck(net: &mut Net, x: &str, (c, middle, k): (usize, usize, usize), stride: i64) -> String {
    let y = conv(net, x, (c, middle, 1), 1, 1);
    let y = relu(net, &y);
    let y = conv(net, &y, (middle, middle, 3), stride, 1);
    let y = relu(net, &y);
    let y = conv(net, &y, (middle, k, 1), 1, 1);
    let skipped = if c == k && stride == 1 { x.to_owned() } else { conv(net, x, (c, k, 1), stride, 1) };
    let sum = net.node("Add", &[&y, &skipped], &[]);
    relu(net, &sum)
}

#[test]
fn a_residual_network_is_its_convolutions() {
    let mut net = Net::new(21);
    let x = net.input("image", FLOAT, &[-1, 3, 20, 20]);
    let y = conv(&mut net, &x, (3, 8, 7), 2, 1);
    let y = relu(&mut net, &y);
    let attributes = [("kernel_shape", Ints(&[3, 3])), ("strides", Ints(&[2, 2])), ("pads", Ints(&[1, 1, 1, 1]))];
    let mut y = net.node("MaxPool", &[&y], &attributes);
    let mut channels = 8;
    for (middle, k, stride) in [(8, 16, 1), (8, 16, 1), (16, 32, 2), (16, 32, 1)] {
        y = bottleneck(&mut net, &y, (channels, middle, k), stride);
        channels = k;
    }
    classifier(&mut net, &y, 32);
    for plan in agrees(&net) {
        let [convs, products, pointwise, others] = counts(&plan);
        // 15 convolutions and the last product; the image becomes NHWC; pooling, the mean and the softmax.
        assert_eq!((convs + products, pointwise, others), (16, 1, 3), "{}", listed(&plan));
    }
}

#[test]
fn an_inception_network_joins_its_branches() {
    let mut net = Net::new(22);
    let x = net.input("image", FLOAT, &[-1, 3, 15, 15]);
    let y = conv(&mut net, &x, (3, 8, 3), 2, 1);
    let y = relu(&mut net, &y);
    let first = conv(&mut net, &y, (8, 4, 1), 1, 1);
    let first = relu(&mut net, &first);
    let second = conv(&mut net, &y, (8, 4, 1), 1, 1);
    let second = relu(&mut net, &second);
    let second = conv(&mut net, &second, (4, 6, 3), 1, 1);
    let second = relu(&mut net, &second);
    let window = [("kernel_shape", Ints(&[3, 3])), ("pads", Ints(&[1, 1, 1, 1]))];
    let third = net.node("AveragePool", &[&y], &window);
    let third = conv(&mut net, &third, (8, 4, 1), 1, 1);
    let third = relu(&mut net, &third);
    let joined = net.node("Concat", &[&first, &second, &third], &[("axis", Int(1))]);
    // As in Inception-ResNet: a scaled residual.
    let up = conv(&mut net, &joined, (14, 8, 1), 1, 1);
    let scale = net.scalar(0.17);
    let scaled = net.node("Mul", &[&up, &scale], &[]);
    let sum = net.node("Add", &[&scaled, &y], &[]);
    let sum = relu(&mut net, &sum);
    classifier(&mut net, &sum, 8);
    for plan in agrees(&net) {
        let [convs, products, pointwise, others] = counts(&plan);
        // tract multiplies each of the branches instead of joining them.
        assert_eq!((convs + products, others), (9, 3), "{}", listed(&plan));
        assert!(pointwise <= 4, "{}", listed(&plan));
    }
}

#[test]
fn a_dense_network_reads_all_that_was_before() {
    let mut net = Net::new(23);
    let x = net.input("image", FLOAT, &[-1, 3, 8, 8]);
    let mut features = vec![conv(&mut net, &x, (3, 4, 3), 1, 1)];
    for layer in 0..3 {
        let channels = 4 + 4 * layer;
        let names: Vec<&str> = features.iter().map(String::as_str).collect();
        let joined = if layer == 0 { features[0].clone() } else { net.node("Concat", &names, &[("axis", Int(1))]) };
        let y = batch_norm(&mut net, &joined, channels);
        let y = relu(&mut net, &y);
        let y = conv(&mut net, &y, (channels, 8, 1), 1, 1);
        let y = relu(&mut net, &y);
        let weights = net.weight(&[4, 8, 3, 3], 0.3);
        features.push(net.node("Conv", &[&y, &weights], &[("pads", Ints(&[1, 1, 1, 1]))]));
    }
    let names: Vec<&str> = features.iter().map(String::as_str).collect();
    let joined = net.node("Concat", &names, &[("axis", Int(1))]);
    let y = batch_norm(&mut net, &joined, 16);
    let y = relu(&mut net, &y);
    let window = [("kernel_shape", Ints(&[2, 2])), ("strides", Ints(&[2, 2]))];
    let y = net.node("AveragePool", &[&y], &window);
    classifier(&mut net, &y, 16);
    for plan in agrees(&net) {
        let [convs, products, pointwise, others] = counts(&plan);
        assert_eq!((convs + products, others), (8, 3), "{}", listed(&plan));
        // The image, each of four features once, and each of four normalisations.
        assert_eq!(pointwise, 1 + 4 + 4, "{}", listed(&plan));
    }
}

#[test]
fn a_mobile_network_has_depthwise_convolutions_and_gates() {
    for activation in ["silu", "HardSwish", "clip"] {
        let mut net = Net::new(24);
        let x = net.input("image", FLOAT, &[-1, 3, 12, 12]);
        let activate = |net: &mut Net, x: &str| match activation {
            "silu" => {
                let gate = net.node("Sigmoid", &[x], &[]);
                net.node("Mul", &[x, &gate], &[])
            }
            "clip" => {
                let (low, high) = (net.scalar(0.0), net.scalar(6.0));
                net.node("Clip", &[x, &low, &high], &[])
            }
            other => net.node(other, &[x], &[]),
        };
        let y = conv(&mut net, &x, (3, 8, 3), 2, 1);
        let stem = activate(&mut net, &y);
        let y = conv(&mut net, &stem, (8, 16, 1), 1, 1);
        let y = activate(&mut net, &y);
        let y = conv(&mut net, &y, (16, 16, 5), 1, 16);
        let y = activate(&mut net, &y);
        let pooled = net.node("ReduceMean", &[&y], &[("axes", Ints(&[2, 3])), ("keepdims", Int(1))]);
        let (down, up) = (net.weight(&[4, 16, 1, 1], 0.5), net.weight(&[16, 4, 1, 1], 0.5));
        let gate = net.node("Conv", &[&pooled, &down], &[]);
        let gate = activate(&mut net, &gate);
        let gate = net.node("Conv", &[&gate, &up], &[]);
        let gate = net.node("Sigmoid", &[&gate], &[]);
        let y = net.node("Mul", &[&y, &gate], &[]);
        let y = conv(&mut net, &y, (16, 8, 1), 1, 1);
        let y = net.node("Add", &[&y, &stem], &[]);
        classifier(&mut net, &y, 8);
        let plan = agrees(&net).remove(1);
        let [convs, products, pointwise, others] = counts(&plan);
        // The image, four activations, the gate.
        assert_eq!((convs + products, others), (7, 3), "{}", listed(&plan));
        assert!(pointwise <= 6, "{}", listed(&plan));
    }
}

const HIDDEN: usize = 24;
const HEADS: i64 = 3;
const LENGTH: i64 = 5;

fn dense(net: &mut Net, x: &str, (from, to): (usize, usize)) -> String {
    let (weights, bias) = (net.weight(&[from, to], 0.4), net.weight(&[to], 0.4));
    let y = net.node("MatMul", &[x, &weights], &[]);
    net.node("Add", &[&bias, &y], &[])
}

/// As exporters before opset 17 write it, or as one node.
fn layer_norm(net: &mut Net, x: &str, is_one: bool) -> String {
    let (scale, shift) = (net.gain(&[HIDDEN]), net.weight(&[HIDDEN], 0.4));
    if is_one {
        return net.node("LayerNormalization", &[x, &scale, &shift], &[("epsilon", Float(1e-6))]);
    }
    let mean = [("axes", Ints(&[-1]))];
    let average = net.node("ReduceMean", &[x], &mean);
    let centred = net.node("Sub", &[x, &average], &[]);
    let two = net.scalar(2.0);
    let squares = net.node("Pow", &[&centred, &two], &[]);
    let variance = net.node("ReduceMean", &[&squares], &mean);
    let epsilon = net.scalar(1e-6);
    let sum = net.node("Add", &[&variance, &epsilon], &[]);
    let root = net.node("Sqrt", &[&sum], &[]);
    let normal = net.node("Div", &[&centred, &root], &[]);
    let scaled = net.node("Mul", &[&normal, &scale], &[]);
    net.node("Add", &[&scaled, &shift], &[])
}

fn heads(net: &mut Net, x: &str, permutation: &[i64]) -> String {
    let shape = net.ints(&[4], &[0, LENGTH, HEADS, HIDDEN as i64 / HEADS]);
    let split = net.node("Reshape", &[x, &shape], &[]);
    net.node("Transpose", &[&split], &[("perm", Ints(permutation))])
}

/// Self-attention with what `mask` makes of scores.
fn attention(net: &mut Net, x: &str, mask: &mut dyn FnMut(&mut Net, &str) -> String) -> String {
    let [q, k, v] = [0, 1, 2].map(|_| dense(net, x, (HIDDEN, HIDDEN)));
    let (q, v) = (heads(net, &q, &[0, 2, 1, 3]), heads(net, &v, &[0, 2, 1, 3]));
    let k = heads(net, &k, &[0, 2, 3, 1]);
    let scores = net.node("MatMul", &[&q, &k], &[]);
    let root = net.scalar((HIDDEN as f32 / HEADS as f32).sqrt());
    let scaled = net.node("Div", &[&scores, &root], &[]);
    let masked = mask(net, &scaled);
    let weights = net.node("Softmax", &[&masked], &[("axis", Int(-1))]);
    let mixed = net.node("MatMul", &[&weights, &v], &[]);
    let turned = net.node("Transpose", &[&mixed], &[("perm", Ints(&[0, 2, 1, 3]))]);
    let shape = net.ints(&[3], &[0, LENGTH, HIDDEN as i64]);
    let merged = net.node("Reshape", &[&turned, &shape], &[]);
    dense(net, &merged, (HIDDEN, HIDDEN))
}

fn gelu(net: &mut Net, x: &str, is_tanh: bool) -> String {
    let (half, one) = (net.scalar(0.5), net.scalar(1.0));
    let gate = if is_tanh {
        let (three, slope, root) =
            (net.scalar(3.0), net.scalar(0.044_715), net.scalar((2.0 / std::f32::consts::PI).sqrt()));
        let cube = net.node("Pow", &[x, &three], &[]);
        let small = net.node("Mul", &[&cube, &slope], &[]);
        let sum = net.node("Add", &[x, &small], &[]);
        let scaled = net.node("Mul", &[&sum, &root], &[]);
        net.node("Tanh", &[&scaled], &[])
    } else {
        let root = net.scalar(std::f32::consts::SQRT_2);
        let scaled = net.node("Div", &[x, &root], &[]);
        net.node("Erf", &[&scaled], &[])
    };
    let sum = net.node("Add", &[&gate, &one], &[]);
    let product = net.node("Mul", &[x, &sum], &[]);
    net.node("Mul", &[&product, &half], &[])
}

#[test]
fn an_encoder_is_products_attention_and_norms() {
    for is_one in [false, true] {
        let mut net = Net::new(25);
        let tokens = net.input("tokens", INT64, &[-1, LENGTH]);
        let seen = net.input("mask", INT64, &[-1, LENGTH]);
        let (words, places) = (net.weight(&[5, HIDDEN], 1.0), net.weight(&[1, LENGTH as usize, HIDDEN], 1.0));
        let embedded = net.node("Gather", &[&words, &tokens], &[]);
        let embedded = net.node("Add", &[&embedded, &places], &[]);
        let mut x = layer_norm(&mut net, &embedded, is_one);
        let axes = net.ints(&[2], &[1, 2]);
        let wide = net.node("Unsqueeze", &[&seen, &axes], &[]);
        let one = net.ints(&[], &[1]);
        let wide = net.node("Min", &[&wide, &one], &[]);
        let wide = net.node("Cast", &[&wide], &[("to", Int(1))]);
        let (whole, far) = (net.scalar(1.0), net.scalar(-1e4));
        let hidden = net.node("Sub", &[&whole, &wide], &[]);
        let hidden = net.node("Mul", &[&hidden, &far], &[]);
        for _ in 0..2 {
            let y = attention(&mut net, &x, &mut |net, scores| net.node("Add", &[scores, &hidden], &[]));
            let sum = net.node("Add", &[&y, &x], &[]);
            x = layer_norm(&mut net, &sum, is_one);
            let y = dense(&mut net, &x, (HIDDEN, 40));
            let y = gelu(&mut net, &y, false);
            let y = dense(&mut net, &y, (40, HIDDEN));
            let sum = net.node("Add", &[&y, &x], &[]);
            x = layer_norm(&mut net, &sum, is_one);
        }
        let first = net.ints(&[], &[0]);
        let pooled = net.node("Gather", &[&x, &first], &[("axis", Int(1))]);
        let pooled = dense(&mut net, &pooled, (HIDDEN, HIDDEN));
        let pooled = net.node("Tanh", &[&pooled], &[]);
        net.output(&x);
        net.output(&pooled);
        for plan in agrees(&net) {
            let [convs, products, pointwise, others] = counts(&plan);
            // A layer has four products (queries, keys and values are one), a GELU, and attention and two norms.
            assert_eq!((convs, products), (0, 9), "{}", listed(&plan));
            assert_eq!(others, 2 + 2 * 3, "{}", listed(&plan));
            assert!(pointwise <= 3 + 2 + 1, "{}", listed(&plan));
        }
    }
}

#[test]
fn a_decoder_sees_what_was_before() {
    let mut net = Net::new(26);
    let tokens = net.input("tokens", INT64, &[-1, LENGTH]);
    let words = net.weight(&[5, HIDDEN], 1.0);
    let mut x = net.node("Gather", &[&words, &tokens], &[]);
    let length = LENGTH as usize;
    let seen: Vec<bool> = (0..length * length).map(|at| at % length <= at / length).collect();
    let seen = net.bools(&[1, 1, length, length], &seen);
    let far = net.scalar(f32::MIN);
    for _ in 0..2 {
        let y = layer_norm(&mut net, &x, true);
        let y = attention(&mut net, &y, &mut |net, scores| net.node("Where", &[&seen, scores, &far], &[]));
        x = net.node("Add", &[&y, &x], &[]);
        let y = layer_norm(&mut net, &x, true);
        let y = dense(&mut net, &y, (HIDDEN, 40));
        let y = gelu(&mut net, &y, true);
        let y = dense(&mut net, &y, (40, HIDDEN));
        x = net.node("Add", &[&y, &x], &[]);
    }
    let y = layer_norm(&mut net, &x, true);
    let turned = net.node("Transpose", &[&words], &[]);
    let logits = net.node("MatMul", &[&y, &turned], &[]);
    net.output(&logits);
    for plan in agrees(&net) {
        let causal =
            plan.steps.iter().filter(|step| matches!(step, Step::Attention(it) if it.is_causal && it.mask.is_none()));
        assert_eq!(causal.count(), 2, "{}", listed(&plan));
        let [convs, products, pointwise, others] = counts(&plan);
        assert_eq!((convs, products, others), (0, 9, 1 + 2 * 3 + 1), "{}", listed(&plan));
        assert!(pointwise <= 2, "{}", listed(&plan));
    }
}

#[test]
fn rms_norms_and_gated_layers_are_a_step_each() {
    let mut net = Net::new(27);
    let x = net.input("x", FLOAT, &[-1, LENGTH, HIDDEN as i64]);
    let two = net.scalar(2.0);
    let squares = net.node("Pow", &[&x, &two], &[]);
    let mean = net.node("ReduceMean", &[&squares], &[("axes", Ints(&[-1]))]);
    let epsilon = net.scalar(1e-5);
    let sum = net.node("Add", &[&mean, &epsilon], &[]);
    let root = net.node("Sqrt", &[&sum], &[]);
    let inverse = net.node("Reciprocal", &[&root], &[]);
    let normal = net.node("Mul", &[&x, &inverse], &[]);
    let gain = net.gain(&[HIDDEN]);
    let y = net.node("Mul", &[&normal, &gain], &[]);
    let (a, b) = (dense(&mut net, &y, (HIDDEN, 32)), dense(&mut net, &y, (HIDDEN, 32)));
    let gate = net.node("Sigmoid", &[&a], &[]);
    let a = net.node("Mul", &[&a, &gate], &[]);
    let gated = net.node("Mul", &[&a, &b], &[]);
    let y = dense(&mut net, &gated, (32, HIDDEN));
    let output = net.node("Add", &[&x, &y], &[]);
    net.output(&output);
    for plan in agrees(&net) {
        assert_eq!(counts(&plan), [0, 2, 1, 1], "{}", listed(&plan));
    }
}

#[test]
fn a_vision_transformer_splits_one_product_into_its_heads() {
    let mut net = Net::new(28);
    let image = net.input("image", FLOAT, &[-1, 3, 8, 8]);
    let (weights, bias) = (net.weight(&[HIDDEN, 3, 4, 4], 0.4), net.weight(&[HIDDEN], 0.4));
    let patches = net.node("Conv", &[&image, &weights, &bias], &[("strides", Ints(&[4, 4]))]);
    // As exporters write shapes that depend on the batch.
    let shape = net.node("Shape", &[&patches], &[]);
    let (zero, axis) = (net.ints(&[], &[0]), net.ints(&[1], &[0]));
    let batch = net.node("Gather", &[&shape, &zero], &[]);
    let batch = net.node("Unsqueeze", &[&batch, &axis], &[]);
    let (hidden, rest) = (net.ints(&[1], &[HIDDEN as i64]), net.ints(&[1], &[-1]));
    let flat = net.node("Concat", &[&batch, &hidden, &rest], &[("axis", Int(0))]);
    let flat = net.node("Reshape", &[&patches, &flat], &[]);
    let rows = net.node("Transpose", &[&flat], &[("perm", Ints(&[0, 2, 1]))]);
    let class = net.weight(&[1, 1, HIDDEN], 0.5);
    let (one, one_again) = (net.ints(&[1], &[1]), net.ints(&[1], &[HIDDEN as i64]));
    let wide = net.node("Concat", &[&batch, &one, &one_again], &[("axis", Int(0))]);
    let class = net.node("Expand", &[&class, &wide], &[]);
    let joined = net.node("Concat", &[&class, &rows], &[("axis", Int(1))]);
    let places = net.weight(&[1, 5, HIDDEN], 0.5);
    let x = net.node("Add", &[&joined, &places], &[]);
    let y = layer_norm(&mut net, &x, true);
    let all = dense(&mut net, &y, (HIDDEN, 3 * HIDDEN));
    let heads = net.ints(&[5], &[0, 5, 3, HEADS, HIDDEN as i64 / HEADS]);
    let heads = net.node("Reshape", &[&all, &heads], &[]);
    let heads = net.node("Transpose", &[&heads], &[("perm", Ints(&[2, 0, 3, 1, 4]))]);
    let [q, k, v] = [0, 1, 2].map(|part| {
        let index = net.ints(&[], &[part]);
        net.node("Gather", &[&heads, &index], &[("axis", Int(0))])
    });
    let k = net.node("Transpose", &[&k], &[("perm", Ints(&[0, 1, 3, 2]))]);
    let scale = net.scalar(0.3);
    let q = net.node("Mul", &[&q, &scale], &[]);
    let scores = net.node("MatMul", &[&q, &k], &[]);
    let weights = net.node("Softmax", &[&scores], &[("axis", Int(-1))]);
    let mixed = net.node("MatMul", &[&weights, &v], &[]);
    let turned = net.node("Transpose", &[&mixed], &[("perm", Ints(&[0, 2, 1, 3]))]);
    let merged = net.ints(&[3], &[0, 5, HIDDEN as i64]);
    let merged = net.node("Reshape", &[&turned, &merged], &[]);
    let y = dense(&mut net, &merged, (HIDDEN, HIDDEN));
    let x = net.node("Add", &[&y, &x], &[]);
    let first = net.ints(&[], &[0]);
    let class = net.node("Gather", &[&x, &first], &[("axis", Int(1))]);
    let output = dense(&mut net, &class, (HIDDEN, 10));
    net.output(&output);
    for plan in agrees(&net) {
        let [convs, products, pointwise, others] = counts(&plan);
        // The norm and the attention; the image, two parts of the rows with their places, and scaled queries.
        assert_eq!((convs, products, others), (1, 3, 2), "{}", listed(&plan));
        assert!(pointwise <= 5, "{}", listed(&plan));
    }
}
