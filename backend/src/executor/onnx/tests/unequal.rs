//! Tasks of unequal lengths in one batch: padded, in buckets, or joined, each as if it had run alone.

use proptest::prelude::*;

use super::*;

const INT32: i32 = 6;
const BOOL: i32 = 9;
const FP16: i32 = 10;
pub(crate) const WIDTH: usize = 2;

/// A node that takes its axes as an input, as operators do since opset 13.
fn along(op_type: &str, input: &str, axis: i64, output: &str, attributes: &[(&str, i64)]) -> NodeProto {
    node(op_type, &[input, ["axis0", "axis1", "axis2"][axis as usize]], output, attributes)
}

fn axes() -> Vec<TensorProto> {
    let axis = |axis: i64| TensorProto {
        name: format!("axis{axis}"),
        data_type: INT64,
        dims: vec![1],
        int64_data: vec![axis],
        ..TensorProto::default()
    };
    (0..3).map(axis).collect()
}

fn turned(input: &str, output: &str) -> NodeProto {
    let perm = AttributeProto { name: "perm".into(), r#type: INTS, ints: vec![0, 2, 1], ..AttributeProto::default() };
    NodeProto { attribute: vec![perm], ..node("Transpose", &[input], output, &[]) }
}

/// Attention of x to itself, with a mask: its states and weights have x's length in one and in two dimensions, `pooled`
/// has none, and `width` is the length that x had in the run.
pub(crate) fn attention_graph() -> GraphProto {
    let nodes = vec![
        turned("x", "turned"),
        node("MatMul", &["x", "turned"], "likeness", &[]),
        node("Exp", &["likeness"], "raised", &[]),
        along("Unsqueeze", "mask", 1, "columns", &[]),
        node("Mul", &["raised", "columns"], "real", &[]),
        along("ReduceSum", "real", 2, "sums", &[("keepdims", 1)]),
        node("Div", &["real", "sums"], "weights", &[]),
        node("MatMul", &["weights", "x"], "states", &[]),
        along("Unsqueeze", "mask", 2, "rows", &[]),
        node("Mul", &["states", "rows"], "states_there", &[]),
        along("ReduceSum", "states_there", 1, "pooled", &[("keepdims", 0)]),
        node("Sub", &["mask", "mask"], "zeros", &[]),
        node("Exp", &["zeros"], "ones", &[]),
        along("ReduceSum", "ones", 1, "width", &[("keepdims", 1)]),
    ];
    let inputs: [Value<'_>; 2] = [("x", FP32, &[-1, -2, WIDTH as i64]), ("mask", FP32, &[-1, -2])];
    let outputs: [Value<'_>; 4] = [
        ("states", FP32, &[-1, -2, WIDTH as i64]),
        ("weights", FP32, &[-1, -2, -2]),
        ("pooled", FP32, &[-1, WIDTH as i64]),
        ("width", FP32, &[-1, 1]),
    ];
    GraphProto {
        name: "attention".into(),
        node: nodes,
        initializer: axes(),
        input: inputs.iter().map(value).collect(),
        output: outputs.iter().map(value).collect(),
        ..GraphProto::default()
    }
}

fn attention(config: &str) -> Result<Onnx, String> {
    model_of(config, attention_graph())
}

pub(crate) fn parameter(key: &str, value: &str) -> String {
    format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }} ")
}

fn lengths(how: &str) -> String {
    [parameter("batch_lengths", how), parameter("max_dims", "64")].concat()
}

fn masked(how: &str) -> Onnx {
    let pads = if how == "equal" { String::new() } else { parameter("pad_values", "{ x = 3.5 }") };
    attention(&[lengths(how), pads, parameter("mask_inputs", "{ mask = 'x' }")].concat()).unwrap()
}

pub(crate) fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// A task whose mask, if its request has one, is all ones.
fn task(model: &Onnx, x: &[f32]) -> Vec<u8> {
    let (length, data, ones) = (x.len() / WIDTH, floats(x), floats(&vec![1.0; x.len() / WIDTH]));
    let cells: [(&[usize], &[u8]); 2] = [(&[length, WIDTH], &data), (&[length], &ones)];
    record(&model.groups.inputs, &cells[..model.groups.inputs.len()])
}

fn xs() -> impl Strategy<Value = Vec<Vec<f32>>> {
    let x = prop_oneof![1usize..8, 1usize..=64]
        .prop_flat_map(|length| proptest::collection::vec(-1.0f32..1.0, length * WIDTH));
    proptest::collection::vec(x, 1..20)
}

/// That each task is answered as if it had run alone; yields how long each was in its run.
fn judge(model: &Onnx, xs: &[Vec<f32>]) -> Result<Vec<usize>, TestCaseError> {
    let tasks: Vec<Vec<u8>> = xs.iter().map(|x| task(model, x)).collect();
    let together = run_records(model, &tasks);
    let alone = tasks.iter().flat_map(|task| run_records(model, std::slice::from_ref(task)));
    let mut widths = Vec::new();
    for ((x, found), alone) in xs.iter().zip(together).zip(alone) {
        let (found, alone, length) = (found.unwrap(), alone.unwrap(), x.len() / WIDTH);
        let shapes: Vec<&[usize]> = found.iter().map(|(shape, _)| &shape[..]).collect();
        prop_assert_eq!(shapes, [&[length, WIDTH][..], &[length, length], &[WIDTH], &[1]]);
        for ((_, found), (_, alone)) in found.iter().zip(&alone).take(3) {
            for (found, alone) in floats_of(found).into_iter().zip(floats_of(alone)) {
                prop_assert!((found - alone).abs() < 1e-4, "{found} beside {alone}, length {length}");
            }
        }
        widths.push(floats_of(&found[3].1)[0] as usize);
    }
    Ok(widths)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn padded_tasks_are_answered_as_if_alone(xs in xs()) {
        static MODEL: std::sync::LazyLock<Onnx> = std::sync::LazyLock::new(|| masked("padded"));
        let widths = judge(&MODEL, &xs)?;
        // These are small: all run together.
        let longest = xs.iter().map(|x| x.len() / WIDTH).max().unwrap();
        for (x, width) in xs.iter().zip(widths) {
            prop_assert_eq!(width, longest, "length {}", x.len() / WIDTH);
        }
    }

    #[test]
    fn tasks_in_buckets_are_answered_as_if_alone(xs in xs()) {
        static MODEL: std::sync::LazyLock<Onnx> = std::sync::LazyLock::new(|| masked("bucketed:4,16,64"));
        for (x, width) in xs.iter().zip(judge(&MODEL, &xs)?) {
            let length = x.len() / WIDTH;
            prop_assert_eq!(width, [4, 16, 64].into_iter().find(|&bound| bound >= length).unwrap());
        }
    }

    #[test]
    fn a_mask_that_requests_have_is_padded_with_zeros(xs in xs()) {
        static MODEL: std::sync::LazyLock<Onnx> = std::sync::LazyLock::new(|| attention(&lengths("padded")).unwrap());
        prop_assert_eq!(MODEL.groups.inputs.len(), 2);
        judge(&MODEL, &xs)?;
    }

    #[test]
    fn two_dimensions_are_padded_in_the_shape_that_the_model_has(
        shapes in proptest::collection::vec((0usize..6, 0usize..6), 1..12),
    ) {
        static MODEL: std::sync::LazyLock<Onnx> = std::sync::LazyLock::new(|| {
            let reshaped = "data_type: TYPE_FP32 dims: [ -1, 2, -1 ] reshape { shape: [ -1, -1, 2 ] }";
            let tensors = ["input { name: \"x\" ", reshaped, " } output { name: \"y\" ", reshaped, " }"].concat();
            let shape: &[i64] = &[-1, -2, -3, 2];
            let nodes = vec![node("Neg", &["x"], "y", &[])];
            let config = ["max_batch_size: 12 ", &lengths("padded"), &tensors].concat();
            model(&config, &[("x", FP32, shape)], nodes, &[("y", FP32, shape)]).unwrap()
        });
        let x = |(rows, columns)| (0..rows * 2 * columns).map(|at| 1.0 + at as f32).collect::<Vec<f32>>();
        let inputs = &MODEL.groups.inputs;
        let tasks = shapes.iter().map(|&shape| record(inputs, &[(&[shape.0, 2, shape.1], &floats(&x(shape)))]));
        let found = run_records(&MODEL, &tasks.collect::<Vec<_>>());
        for (&shape, found) in shapes.iter().zip(found) {
            let negated: Vec<f32> = x(shape).iter().map(|x| -x).collect();
            prop_assert_eq!(found, Ok(vec![(vec![shape.0, 2, shape.1], floats(&negated))]));
        }
    }

    #[test]
    fn joined_tasks_are_answered_as_if_alone(xs in xs()) {
        static MODEL: std::sync::LazyLock<Onnx> = std::sync::LazyLock::new(|| joined(JOINED, &[-1]).unwrap());
        judge_joined(&MODEL, &xs)?;
    }
}

#[test]
fn without_padding_lengths_run_apart() {
    let xs = [3, 7, 3].map(|length| vec![0.5; length * WIDTH]);
    assert_eq!(judge(&masked("equal"), &xs).unwrap(), [3, 7, 3]);
}

#[test]
fn padding_is_what_the_configuration_says_and_masks_have_the_type_of_the_file() {
    let sum = |elem_type: i32, pad: &str| {
        let graph = GraphProto {
            name: "sum".into(),
            node: vec![along("ReduceSum", "x", 1, "y", &[("keepdims", 1)])],
            initializer: axes(),
            input: vec![value(&("x", elem_type, &[-1, -2]))],
            output: vec![value(&("y", elem_type, &[-1, 1]))],
            ..GraphProto::default()
        };
        model_of(&[parameter("batch_lengths", "padded"), parameter("pad_values", pad)].concat(), graph).unwrap()
    };
    let real = sum(FP32, "{ x = -2.5 }");
    let tasks = [1, 3].map(|length| record(&real.groups.inputs, &[(&[length], &floats(&vec![1.0; length]))]));
    assert_eq!(run_records(&real, &tasks), [-4.0, 3.0].map(|sum| Ok(vec![(vec![1], floats(&[sum]))])));
    let whole = sum(INT64, "{ x = -7 }");
    let tasks = [1, 2].map(|length| {
        record(&whole.groups.inputs, &[(&[length], &[1i64.to_le_bytes(), 1i64.to_le_bytes()].concat()[..8 * length])])
    });
    let expected = [-6, 2].map(|sum: i64| Ok(vec![(vec![1], sum.to_le_bytes().to_vec())]));
    assert_eq!(run_records(&whole, &tasks), expected);

    for elem_type in [FP32, INT32, INT64, BOOL, FP16] {
        let inputs: [Value<'_>; 2] = [("x", FP32, &[-1, -2]), ("mask", elem_type, &[-1, -2])];
        let config = [lengths("padded"), parameter("mask_inputs", "{ mask = 'x' }")].concat();
        let model = model(&config, &inputs, vec![node("Neg", &["x"], "y", &[])], &[("y", FP32, &[-1, -2])]).unwrap();
        let tasks = [1, 3].map(|length| record(&model.groups.inputs, &[(&[length], &floats(&vec![1.0; length]))]));
        let read: Vec<_> = tasks.iter().map(|task| model.groups.read_task(0, task).unwrap()).collect();
        let mask = model.groups.generate(0, &Group { tasks: read.iter().collect(), lengths: vec![3] }).unwrap();
        let datatype = model.groups.binding.generated[0];
        assert_eq!(mask, Tensor::of_numbers(datatype, &[2, 3], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]));
    }
}

#[test]
fn what_has_no_length_is_not_padded() {
    let negate = |how: &str| {
        let nodes = vec![node("Neg", &["x"], "y", &[])];
        model(&lengths(how), &[("x", FP32, &[-1, -2])], nodes, &[("y", FP32, &[-1, -2])]).unwrap()
    };
    for negate in ["padded", "bucketed:8,64"].map(negate) {
        let tasks =
            [0, 3, 0, 5].map(|length| record(&negate.groups.inputs, &[(&[length], &floats(&vec![1.0; length]))]));
        let expected = [0, 3, 0, 5].map(|length| Ok(vec![(vec![length], floats(&vec![-1.0; length]))]));
        assert_eq!(run_records(&negate, &tasks), expected);
        let sizes = tasks.iter().map(|task| negate.groups.size(&negate.groups.read_task(0, task).unwrap()));
        let dealt = runs::deal(&sizes.collect::<Vec<_>>(), &negate.groups.batching, true, |lengths| lengths[0]);
        assert_eq!(dealt.iter().map(|run| run.tasks.len()).collect::<Vec<_>>(), [2, 2]);
    }
}

#[test]
fn a_task_that_cannot_be_padded_fails_alone() {
    let model = attention(&lengths("bucketed:4,16")).unwrap();
    let short = task(&model, &[0.5; 6]);
    let uneven = record(&model.groups.inputs, &[(&[2, WIDTH], &floats(&[1.0; 4])), (&[3], &floats(&[1.0; 3]))]);
    // What frontends refuse, since no bound is so long.
    let mut long = vec![0; cell::HEAD_BYTES];
    for tensor in &model.groups.inputs {
        let shape: Vec<usize> = [17].into_iter().chain(tensor.shape[1..].iter().copied()).collect();
        let data = vec![0; 4 * shape.iter().product::<usize>()];
        cell::push_head(tensor, Some((&shape, data.len())), &mut long);
        long.extend(data);
    }
    cell::set_record_bytes(&mut long);
    let found = run_records(&model, &[short.clone(), uneven, long, short]);
    assert!(found[0].is_ok() && found[0] == found[3]);
    let reasons = [&found[1], &found[2]].map(|found| found.as_ref().unwrap_err());
    assert!(reasons[0].starts_with("input 'mask' has length 3 in dimension 0, expected 2"), "{}", reasons[0]);
    assert!(reasons[1].starts_with("tensor 'x': found shape [17, 2], expected [-1, 2] within"), "{}", reasons[1]);
}

#[test]
fn a_long_task_beside_many_short_ones_costs_little_memory() {
    let config = [parameter("batch_lengths", "padded"), parameter("max_dims", "1000000")].concat();
    let nodes = vec![node("Neg", &["x"], "y", &[])];
    let negate = model(&config, &[("x", FP32, &[-1, -2])], nodes, &[("y", FP32, &[-1, -2])]).unwrap();
    let mut tasks: Vec<Vec<u8>> = (0..40).map(|_| record(&negate.groups.inputs, &[(&[1], &floats(&[1.0]))])).collect();
    tasks[7] = record(&negate.groups.inputs, &[(&[1_000_000], &floats(&vec![2.0; 1_000_000]))]);
    let sizes = tasks.iter().map(|task| negate.groups.size(&negate.groups.read_task(0, task).unwrap()));
    let dealt = runs::deal(&sizes.collect::<Vec<_>>(), &negate.groups.batching, true, |lengths| lengths[0]);
    let found: Vec<_> = dealt.iter().map(|run| (run.tasks.len(), run.lengths[0])).collect();
    assert_eq!(found, [(1, 1_000_000), (39, 1)]);
}

/// A model that gives its joined input back, once negated and once twice, and where each task ends.
fn joined(config: &str, shape: &[i64]) -> Result<Onnx, String> {
    let nodes = vec![
        node("Neg", &["x"], "y", &[]),
        node("Identity", &["ends"], "end", &[]),
        node("Concat", &["x", "x"], "twice", &[("axis", shape.len() as i64 - 1)]),
    ];
    let shapes: Vec<i64> = shape.iter().map(|&length| if length == -1 { -2 } else { length }).collect();
    let inputs: [Value<'_>; 2] = [("x", FP32, &shapes), ("ends", INT32, &[-1])];
    let outputs: [Value<'_>; 3] = [("y", FP32, &shapes), ("end", INT32, &[-1]), ("twice", FP32, &[-3])];
    model(config, &inputs, nodes, &outputs)
}

const JOINED: &str = r#"
    max_batch_size: 64
    input { name: "x" dims: [ -1, 2 ] allow_ragged_batch: true }
    batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32 source_input: "x" }
    batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
    output { name: "y" dims: [ -1, 2 ] }
    output { name: "end" }
"#;

fn judge_joined(model: &Onnx, xs: &[Vec<f32>]) -> Result<(), TestCaseError> {
    let tasks = xs.iter().map(|x| record(&model.groups.inputs, &[(&[x.len() / WIDTH, WIDTH], &floats(x))]));
    let mut end = 0;
    for (x, found) in xs.iter().zip(run_records(model, &tasks.collect::<Vec<_>>())) {
        let negated: Vec<f32> = x.iter().map(|x| -x).collect();
        end += x.len();
        let expected =
            [(vec![x.len() / WIDTH, WIDTH], floats(&negated)), (vec![], (end as i32).to_le_bytes().to_vec())];
        prop_assert_eq!(found.unwrap(), expected);
    }
    Ok(())
}

#[test]
fn a_joined_input_may_have_a_first_dimension_of_one() {
    judge_joined(&joined(JOINED, &[1, -1]).unwrap(), &[vec![0.5; 6], vec![1.5; 2]]).unwrap();
    let error = joined(JOINED, &[1, 1, -1]).err().unwrap();
    assert!(error.contains("input x has 3 dimensions in the file, expected one, or two"), "{error}");
}

#[test]
fn a_joined_output_of_another_length_fails() {
    let twice = JOINED.replace("\"y\"", "\"twice\"");
    let model = joined(&twice, &[-1]).unwrap();
    let task = record(&model.groups.inputs, &[(&[3, WIDTH], &floats(&[1.0; 6]))]);
    let error = run_records(&model, &[task.clone(), task]).remove(1).unwrap_err();
    let expected = "output twice has 12 elements, expected 6, as its tasks' input x gives (batch_output)";
    assert!(error.contains(expected), "{error}");
}

/// Words by their ids, of which there are four.
fn lookup(ids: &[i64]) -> GraphProto {
    let words = TensorProto {
        name: "words".into(),
        data_type: INT64,
        dims: vec![4],
        int64_data: vec![10, 11, 12, 13],
        ..TensorProto::default()
    };
    GraphProto {
        name: "lookup".into(),
        node: vec![node("Gather", &["words", "ids"], "found", &[])],
        initializer: vec![words],
        input: vec![value(&("ids", INT64, ids))],
        output: vec![value(&("found", INT64, ids))],
        ..GraphProto::default()
    }
}

/// An index beyond a table: its client is told why, and all others have their answers.
#[test]
fn an_index_beyond_a_table_is_a_reason_and_fails_one_task() {
    let load = |graph| model_of("max_batch_size: 8", graph).unwrap();
    let is_reason = |reason: &str| {
        let text = reason.strip_prefix("execution failed: ").unwrap_or_else(|| panic!("`{reason}`"));
        assert!((5..=500).contains(&text.len()) && !text.contains('\n'), "{reason}");
    };
    let fixed = load(lookup(&[-1, 2]));
    let ids = [0, 1, 2, 3, 99, 0, 3, 2, 1, 99];
    let inputs = ids.map(i64::to_le_bytes).concat();
    let mut outputs = vec![0xaa; inputs.len()];
    let failed = fixed.execute(&inputs, &mut outputs).unwrap();
    assert_eq!(failed.iter().map(|failed| failed.task).collect::<Vec<_>>(), [2, 4]);
    failed.iter().for_each(|failed| is_reason(&failed.reason));
    let found = int64s(&outputs);
    assert_eq!((&found[..4], &found[6..8]), (&[10, 11, 12, 13][..], &[13, 12][..]));
    let none = fixed.execute(&inputs[64..], &mut outputs[64..]).unwrap_err();
    is_reason(&none.0);
    let any = load(lookup(&[-1, -2]));
    let task = |ids: &[i64]| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        record(&any.groups.inputs, &[(&[ids.len()], &bytes)])
    };
    let answers = run_records(&any, &[task(&[1]), task(&[99]), task(&[2])]);
    is_reason(answers[1].as_ref().unwrap_err());
    let found = [0, 2].map(|at| int64s(&answers[at].as_ref().unwrap()[0].1));
    assert_eq!(found, [[11], [12]]);
}

/// ReduceSum of nothing, by whose length an engine may divide.
#[test]
fn a_length_of_zero_that_a_model_cannot_compute_fails_alone() {
    let nodes = vec![along("ReduceSum", "x", 1, "y", &[("keepdims", 0)])];
    let mut graph = graph(&[("x", FP32, &[-1, -2])], nodes, &[("y", FP32, &[-1])]);
    graph.initializer = axes();
    let sum = model_of("max_batch_size: 8", graph).unwrap();
    let task = |x: &[f32]| record(&sum.groups.inputs, &[(&[x.len()], &floats(x))]);
    let answers = run_records(&sum, &[task(&[1.0, 2.0]), task(&[]), task(&[4.0])]);
    let first = |at: usize| answers[at].as_ref().unwrap()[0].1.clone();
    assert_eq!((first(0), first(2)), (floats(&[3.0]), floats(&[4.0])));
    match &answers[1] {
        Ok(found) => assert_eq!(found[0].1, floats(&[0.0])),
        Err(reason) => assert!(reason.starts_with("execution failed: ") && !reason.contains('\n'), "{reason}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn what_a_model_cannot_compute_fails_alone(ids in proptest::collection::vec(0i64..9, 1..40)) {
        // Of four words, so ids above that are none.
        static MODEL: std::sync::LazyLock<Onnx> =
            std::sync::LazyLock::new(|| model_of(&lengths("padded"), lookup(&[-1, -2])).unwrap());
        let tasks = ids.iter().map(|&id| {
            let ids = [id, 0, 3, 1].map(i64::to_le_bytes).concat();
            let length = 1 + id as usize % 4;
            record(&MODEL.groups.inputs, &[(&[length], &ids[..8 * length])])
        });
        for (id, found) in ids.iter().zip(run_records(&MODEL, &tasks.collect::<Vec<_>>())) {
            match found {
                Ok(found) => prop_assert_eq!(int64s(&found[0].1)[0], 10 + id),
                Err(reason) => prop_assert!(*id >= 4 && reason.starts_with("execution failed: "), "{id}: {reason}"),
            }
        }
    }
}

#[test]
fn what_the_file_does_not_fit_is_refused_by_name() {
    let generated = |kind: &str, datatype: &str| {
        format!("batch_input {{ target_name: \"ends\" source_input: \"x\" kind: {kind} data_type: {datatype} }}")
    };
    let without = JOINED.replace("batch_output", "# ");
    let cases = [
        (joined(&without, &[-1]), "output y is as long as all tasks together, expected a batch_output in config.pbtxt"),
        (
            joined(&JOINED.replace("TYPE_INT32", "TYPE_FP32"), &[-1]),
            "input ends of batch_input is INT32 in the file, exp",
        ),
        (
            joined(&JOINED.replace("BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_ITEM_SHAPE"), &[-1]),
            "input ends of batch_input has 1 dimensions in the file, expected 2",
        ),
        (
            attention(&parameter("mask_inputs", "{ masc = 'x' }")),
            "config.pbtxt names inputs masc, mask, x, the file has mask, x",
        ),
        (
            attention(&parameter("mask_inputs", "{ mask = 'x' }").replace("mask =", "x =")),
            "mask_inputs.x: found \"x\", expected one of the model's: mask",
        ),
        (
            model(
                &[lengths("padded"), generated("BATCH_ELEMENT_COUNT", "TYPE_INT32")].concat(),
                &[("x", FP32, &[-1, -2]), ("ends", INT32, &[-1])],
                vec![node("Concat", &["x", "x"], "y", &[("axis", 1)])],
                &[("y", FP32, &[-1, -3])],
            ),
            "dimension 1 of output y is M3 in the file, whose inputs have M2: expected one of these, or a batch_output",
        ),
        (
            model(
                &[lengths("padded"), "output { name: \"y\" dims: [ 5 ] }".into()].concat(),
                &[("x", FP32, &[-1, -2])],
                vec![node("Neg", &["x"], "y", &[])],
                &[("y", FP32, &[-1, -2])],
            ),
            "dimension 1 of output y is M2 in the file, whose inputs have M2: expected -1 for it in config.pbtxt",
        ),
    ];
    for (found, expected) in cases {
        let error = found.err().unwrap_or_else(|| panic!("it was loaded, expected {expected}"));
        assert!(error.contains(expected) && !error.contains('\n'), "found `{error}`, expected `{expected}`");
    }
}

#[test]
fn an_output_whose_length_no_name_tells_has_that_of_the_input_that_is_named() {
    // The file does not say that both inputs are of one length.
    let add = |named: &str| {
        let inputs: [Value<'_>; 2] = [("x", FP32, &[-1, -2]), ("w", FP32, &[-1, -3])];
        let nodes = vec![node("Add", &["x", "w"], "y", &[])];
        model(&[&parameter("batch_lengths", "padded"), named].concat(), &inputs, nodes, &[("y", FP32, &[-1, -4])])
    };
    let error = add("").err().unwrap();
    assert!(error.contains("whose inputs have M2, M3: expected one of these, or a batch_output"), "{error}");
    let add = add("batch_output { target_name: \"y\" source_input: \"w\" }").unwrap();
    let task = |length: usize, w: f32| {
        let (x, w) = (floats(&vec![1.0; length]), floats(&vec![w; length]));
        record(&add.groups.inputs, &[(&[length], &x), (&[length], &w)])
    };
    let found = run_records(&add, &[task(2, 1.0), task(5, 2.0), task(1, 3.0)]);
    let expected = [(2, 2.0), (5, 3.0), (1, 4.0)].map(|(length, y)| Ok(vec![(vec![length], floats(&vec![y; length]))]));
    assert_eq!(found, expected);
}

#[test]
fn what_is_told_of_a_batch_is_what_triton_tells() {
    let kinds = [
        ("BATCH_ELEMENT_COUNT", "TYPE_INT32", &[-1][..]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", "TYPE_FP32", &[-1]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "TYPE_INT64", &[-4]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "TYPE_INT32", &[-5]),
        ("BATCH_ITEM_SHAPE", "TYPE_INT32", &[-1, 2]),
        ("BATCH_ITEM_SHAPE_FLATTEN", "TYPE_INT32", &[-6]),
    ];
    let names: Vec<String> = (0..kinds.len()).map(|kind| format!("t{kind}")).collect();
    let told = kinds.iter().zip(&names).map(|((kind, datatype, _), name)| {
        format!("batch_input {{ kind: {kind} target_name: \"{name}\" data_type: {datatype} source_input: \"x\" }} ")
    });
    let types = |datatype: &str| {
        [("TYPE_FP32", FP32), ("TYPE_INT64", INT64)].iter().find(|t| t.0 == datatype).map_or(INT32, |t| t.1)
    };
    let mut inputs: Vec<Value<'_>> = vec![("x", FP32, &[-1, -2, -3])];
    inputs.extend(kinds.iter().zip(&names).map(|((_, datatype, shape), name)| (&name[..], types(datatype), *shape)));
    let config = [parameter("batch_lengths", "padded"), told.collect::<String>()].concat();
    let nodes = vec![node("Neg", &["x"], "y", &[])];
    let model = model(&config, &inputs, nodes, &[("y", FP32, &[-1, -2, -3])]).unwrap();
    let task = |shape: [usize; 2]| record(&model.groups.inputs, &[(&shape, &floats(&vec![1.0; shape[0] * shape[1]]))]);
    let tasks = [task([3, 1]), task([3, 1]), task([2, 2])];
    let read: Vec<_> =
        tasks.iter().enumerate().map(|(place, task)| model.groups.read_task(place, task).unwrap()).collect();
    let group = Group { tasks: read.iter().collect(), lengths: vec![3, 2] };
    let found: Vec<(Vec<usize>, Vec<i64>)> = (0..kinds.len())
        .map(|kind| {
            let tensor = model.groups.generate(kind, &group).unwrap();
            let numbers = match tensor.datatype {
                DataType::Int64 => tensor.numbers::<i64>().to_vec(),
                DataType::Fp32 => tensor.numbers::<f32>().iter().map(|&number| number as i64).collect(),
                _ => tensor.numbers::<i32>().iter().map(|&number| i64::from(number)).collect(),
            };
            (tensor.shape, numbers)
        })
        .collect();
    let expected: [(&[usize], &[i64]); 6] = [
        (&[3], &[3, 3, 4]),
        (&[3], &[3, 6, 10]),
        (&[4], &[0, 3, 6, 10]),
        // Padded, x is [3, 3, 2].
        (&[6], &[0; 6]),
        (&[3, 2], &[3, 1, 3, 1, 2, 2]),
        (&[6], &[3, 1, 3, 1, 2, 2]),
    ];
    let expected = expected.map(|(shape, numbers)| (shape.to_vec(), numbers.to_vec()));
    assert_eq!(found, expected);
    assert!(run_records(&model, &tasks).iter().all(Result::is_ok));
}
