//! The digit classifier that ships with the project, and models of a few nodes, run directly.

use std::fs;

use prost::Message as _;
use repository::{
    DataType, cell,
    onnx::proto::{
        AttributeProto, DimensionProto, GraphProto, INT, INTS, ModelProto, NodeProto, OperatorSetIdProto,
        StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    },
};

use super::*;

mod rows;
pub(crate) mod unequal;

const IMAGE_PIXELS: usize = 64;
const CLASSES: usize = 10;

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits")
}

fn digits() -> Model {
    let models = repository::load(&folder().join("..")).unwrap().models;
    models.into_iter().find(|model| model.name == "digits").unwrap()
}

fn load(model: &Model) -> Result<Onnx, ExecutorError> {
    load_file(model, &folder().join("1/model.onnx"))
}

/// By the engine that is embedded, or by what these tests judge instead of it.
pub(crate) fn load_file(model: &Model, file: &Path) -> Result<Onnx, ExecutorError> {
    if let Some(sessions) = onnxruntime::tests::instead() {
        let repository::Executor::Onnx { batching, .. } = &model.executor else { panic!("{:?}", model.executor) };
        return Onnx::load_by_onnxruntime(model, (file, batching), &sessions);
    }
    load_embedded(model, file)
}

pub(crate) fn load_embedded(model: &Model, file: &Path) -> Result<Onnx, ExecutorError> {
    let repository::Executor::Onnx { batching, .. } = &model.executor else { panic!("it is {:?}", model.executor) };
    Onnx::load(model, file, batching)
}

/// Labels, and images as they would lie in slots.
fn held_out() -> (Vec<usize>, Vec<u8>) {
    let text = std::fs::read_to_string(folder().join("heldout.csv")).unwrap();
    let mut labels = Vec::new();
    let mut images = Vec::new();
    for line in text.lines() {
        let mut values = line.split(',').map(|value| value.parse::<u8>().unwrap());
        labels.push(usize::from(values.next().unwrap()));
        images.extend(values.flat_map(|pixel| f32::from(pixel).to_le_bytes()));
    }
    assert_eq!(images.len(), labels.len() * IMAGE_PIXELS * 4);
    (labels, images)
}

fn execute(executor: &Onnx, images: &[u8]) -> Vec<[f32; CLASSES]> {
    let batch = images.len() / (IMAGE_PIXELS * 4);
    let mut outputs = vec![0xaa; batch * CLASSES * 4];
    executor.execute(images, &mut outputs).unwrap();
    let values: Vec<f32> = outputs.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    values.chunks_exact(CLASSES).map(|row| row.try_into().unwrap()).collect()
}

fn argmax(row: &[f32; CLASSES]) -> usize {
    (0..CLASSES).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()
}

#[test]
fn batches_of_every_size_agree_with_running_one_by_one() {
    let executor = load(&digits()).unwrap();
    let (_, images) = held_out();
    let alone: Vec<_> = images.chunks_exact(IMAGE_PIXELS * 4).flat_map(|image| execute(&executor, image)).collect();
    for batch in 1..=64 {
        let from = (batch * 7) % (alone.len() - batch);
        let together = execute(&executor, &images[from * IMAGE_PIXELS * 4..][..batch * IMAGE_PIXELS * 4]);
        for (row, expected) in together.iter().zip(&alone[from..]) {
            let furthest = row.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(furthest <= 1e-5, "batch of {batch}: {row:?} against {expected:?}");
        }
    }
}

#[test]
fn weights_that_were_let_go_are_read_from_the_same_file_again_or_not_at_all() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("model.onnx");
    fs::copy(folder().join("1/model.onnx"), &file).unwrap();
    let executor = load_file(&digits(), &file).unwrap();
    let (_, images) = held_out();
    let image = &images[..IMAGE_PIXELS * 4];
    let before = execute(&executor, image);
    assert!(executor.holds_weights());
    executor.release();
    let error = executor.execute(image, &mut [0; CLASSES * 4]).unwrap_err().to_string();
    assert!(error.contains("its weights are not in memory"), "{error}");
    executor.read().unwrap();
    assert_eq!(execute(&executor, image), before);
    fs::copy(&file, files.path().join("other.onnx")).unwrap();
    executor.read().unwrap();
    executor.release();
    let error = executor.read().unwrap_err().to_string();
    assert!(error.contains("other.onnx: changed while the model was read"), "{error}");
}

/// As a cache of models has them: names are links to files that are called by digests.
#[test]
fn weights_are_found_beside_a_file_that_is_a_link() {
    let blobs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/strangers/blobs").canonicalize().unwrap();
    let files = tempfile::tempdir().unwrap();
    let version = files.path().join("hf/1");
    fs::create_dir_all(&version).unwrap();
    for (name, blob) in [("model.onnx", "abc123"), ("model.onnx_data", "def456")] {
        std::os::unix::fs::symlink(blobs.join(blob), version.join(name)).unwrap();
    }
    let model = repository::load_model(&files.path().join("hf")).unwrap();
    let weights = fs::read(blobs.join("def456")).unwrap();
    let unit: Vec<u8> = [0.0, 1.0, 0.0, 0.0].into_iter().flat_map(f32::to_le_bytes).collect();
    let mut output = [0; 16];
    let executor = load_file(&model, &version.join("model.onnx")).unwrap();
    assert!(executor.execute(&unit, &mut output).unwrap().is_empty());
    assert_eq!(output, weights[16..32], "the second row of the table");
    fs::remove_file(version.join("model.onnx_data")).unwrap();
    assert!(load_file(&model, &version.join("model.onnx")).is_err());
}

#[test]
fn held_out_accuracy_is_what_training_recorded() {
    let executor = load(&digits()).unwrap();
    let (labels, images) = held_out();
    let rows: Vec<_> = images.chunks(64 * IMAGE_PIXELS * 4).flat_map(|batch| execute(&executor, batch)).collect();
    let right = rows.iter().zip(&labels).filter(|(row, label)| argmax(row) == **label).count();
    let recorded = std::fs::read_to_string(folder().join("README.md")).unwrap();
    let expected = format!("{right} of {}", labels.len());
    assert!(recorded.contains(&expected), "{expected} is not what models/digits/README.md records");
}

#[test]
fn a_configuration_that_does_not_fit_the_file_is_refused_with_both_sides() {
    let load_with = |change: &dyn Fn(&mut Model)| {
        let mut model = digits();
        change(&mut model);
        load(&model).err().unwrap().to_string()
    };
    let renamed = load_with(&|model| model.inputs[0].name = "picture".into());
    assert!(renamed.contains("names inputs picture, the file has image"), "{renamed}");
    let renamed = load_with(&|model| model.outputs[0].name = "scores".into());
    assert!(renamed.contains("names output scores, the file has probabilities"), "{renamed}");
    let reshaped = load_with(&|model| model.outputs[0].shape = vec![12]);
    assert!(reshaped.contains("output probabilities") && reshaped.contains("12"), "{reshaped}");
    let reshaped = load_with(&|model| model.inputs[0].shape = vec![63]);
    assert!(reshaped.contains("model digits"), "{reshaped}");
    let retyped = load_with(&|model| model.outputs[0].datatype = DataType::Fp64);
    assert!(retyped.contains("output probabilities"), "{retyped}");
    let missing = load_file(&digits(), Path::new("no/such/file.onnx")).err().unwrap().to_string();
    assert!(missing.contains("no/such/file.onnx"), "{missing}");
}

/// Products with a table of 16 rows: what does not fit is told in the words of whoever wrote the configuration.
#[test]
fn an_input_that_is_not_as_in_the_file_is_named_with_both_sides() {
    let load = |input: &str| {
        let config = format!(
            r#"max_batch_size: 4 input {{ name: "x" {input} }} output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}"#
        );
        let table = TensorProto {
            name: "table".into(),
            data_type: FP32,
            dims: vec![16, 4],
            float_data: vec![0.5; 64],
            ..TensorProto::default()
        };
        let nodes = vec![node("MatMul", &["x", "table"], "y", &[])];
        let mut graph = graph(&[("x", FP32, &[-1, 16])], nodes, &[("y", FP32, &[-1, 4])]);
        graph.initializer = vec![table];
        model_of(&config, graph)
    };
    assert!(load("data_type: TYPE_FP32 dims: 16").is_ok());
    let refused = |input: &str| {
        let error = load(input).err().unwrap();
        error.split_once("model.onnx: ").unwrap().1.to_owned()
    };
    assert_eq!(refused("data_type: TYPE_FP32 dims: 17"), "input x: config.pbtxt says dims [17], the file has [16]");
    let types = "data_type TYPE_INT32, the file has TYPE_FP32";
    assert_eq!(refused("data_type: TYPE_INT32 dims: 16"), format!("input x: config.pbtxt says {types}"));
    let both = format!("input x: config.pbtxt says {types}, and dims [17], the file has [16]");
    assert_eq!(refused("data_type: TYPE_INT32 dims: 17"), both);
    let reshaped = refused("data_type: TYPE_FP32 dims: 17 reshape { shape: [ 17, 1 ] }");
    assert_eq!(reshaped, "input x: config.pbtxt says reshape [17, 1], the file has [16]");
}

#[test]
fn an_operator_that_nobody_has_is_named() {
    let nodes = vec![node("NoSuchOperator", &["x"], "y", &[])];
    let unknown = model("", &[("x", FP32, &[-1, 3])], nodes, &[("y", FP32, &[-1, 3])]).err().unwrap();
    assert!(unknown.contains("NoSuchOperator") && !unknown.contains('\n'), "{unknown}");
}

/// A tensor of a model file: its name, its type by ONNX's number, its lengths, of which -1 is called `N`, and others
/// below 0 are called `M` and their number.
pub(crate) type Value<'a> = (&'a str, i32, &'a [i64]);

fn value(&(name, elem_type, dims): &Value<'_>) -> ValueInfoProto {
    let dimension = |&length: &i64| match length {
        -1 => DimensionProto { dim_param: "N".into(), dim_value: None },
        ..0 => DimensionProto { dim_param: format!("M{}", -length), dim_value: None },
        length => DimensionProto { dim_param: String::new(), dim_value: Some(length) },
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dimension).collect() });
    let r#type = Some(TypeProto { tensor_type: Some(TensorTypeProto { elem_type, shape }), ..TypeProto::default() });
    ValueInfoProto { name: name.into(), r#type }
}

pub(crate) fn node(op_type: &str, input: &[&str], output: &str, attributes: &[(&str, i64)]) -> NodeProto {
    let attribute =
        |&(name, i): &(&str, i64)| AttributeProto { name: name.into(), r#type: INT, i, ..AttributeProto::default() };
    NodeProto {
        op_type: op_type.into(),
        name: output.into(),
        input: input.iter().map(|&name| name.into()).collect(),
        output: vec![output.into()],
        attribute: attributes.iter().map(attribute).collect(),
        ..NodeProto::default()
    }
}

/// A model of one version with this configuration and this file, loaded as from a repository.
fn model(config: &str, inputs: &[Value<'_>], nodes: Vec<NodeProto>, outputs: &[Value<'_>]) -> Result<Onnx, String> {
    model_of(config, graph(inputs, nodes, outputs))
}

pub(crate) fn graph(inputs: &[Value<'_>], nodes: Vec<NodeProto>, outputs: &[Value<'_>]) -> GraphProto {
    GraphProto {
        name: "graph".into(),
        node: nodes,
        input: inputs.iter().map(value).collect(),
        output: outputs.iter().map(value).collect(),
        ..GraphProto::default()
    }
}

fn model_of(config: &str, graph: GraphProto) -> Result<Onnx, String> {
    in_repository(config, graph, |model, file| load_file(model, file).map_err(|error| error.to_string()))
}

/// Loads a model of one version as from a repository.
pub(crate) fn in_repository<T>(
    config: &str,
    graph: GraphProto,
    load: impl FnOnce(&Model, &Path) -> Result<T, String>,
) -> Result<T, String> {
    let opset_import = vec![OperatorSetIdProto { version: 13, domain: String::new() }];
    let file = ModelProto { ir_version: 7, opset_import, graph: Some(graph), ..ModelProto::default() };
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), file.encode_to_vec()).unwrap();
    fs::write(folder.path().join("m/config.pbtxt"), config).unwrap();
    let model = repository::load_model(&folder.path().join("m")).map_err(|error| error.to_string())?;
    load(&model, &folder.path().join("m/1/model.onnx"))
}

fn run(model: &Onnx, inputs: &[f32], output_bytes: usize) -> Vec<u8> {
    let mut outputs = vec![0xaa; output_bytes];
    model.execute(&floats(inputs), &mut outputs).unwrap();
    outputs
}

pub(crate) fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn int64s(bytes: &[u8]) -> Vec<i64> {
    bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
}

pub(crate) const FP32: i32 = 1;
pub(crate) const INT64: i32 = 7;

#[test]
fn labels_have_one_element_for_each_task_and_casts_to_int64_are_that_type() {
    let nodes = vec![node("ArgMax", &["x"], "label", &[("axis", 1), ("keepdims", 0)])];
    let classes = model("", &[("x", FP32, &[-1, 3])], nodes, &[("label", INT64, &[-1])]).unwrap();
    assert_eq!(int64s(&run(&classes, &[0.0, 2.0, 1.0, 5.0, 2.0, 1.0], 16)), [1, 0]);
    let nodes = vec![node("Cast", &["x"], "y", &[("to", INT64.into())])];
    let cast = model("", &[("x", FP32, &[-1, 2])], nodes, &[("y", INT64, &[-1, 2])]).unwrap();
    assert_eq!(int64s(&run(&cast, &[0.0, 2.5, -1.0, 5.0], 32)), [0, 2, -1, 5]);
}

/// Of two rows, which the embedded engine computes in 32 bits: it is right, or fails that one.
#[test]
fn numbers_of_64_bits_are_right_or_an_error() {
    let nodes = vec![
        node("Add", &["x", "x"], "sum", &[]),
        node("Cast", &["sum"], "cast", &[("to", INT64.into())]),
        node("Add", &["cast", "x"], "y", &[]),
    ];
    let triple = model("", &[("x", INT64, &[-1, 2])], nodes, &[("y", INT64, &[-1, 2])]).unwrap();
    for beyond in [1 << 60, -(1 << 40), i64::from(i32::MAX), i64::from(i32::MIN), 1 << 30, 1_500_000_000] {
        let numbers = [5, -7, beyond, 3];
        let mut outputs = vec![0xaa; 32];
        let failed = triple.execute(&numbers.map(i64::to_le_bytes).concat(), &mut outputs).unwrap();
        let right = if failed.is_empty() { 4 } else { 2 };
        assert!(failed.iter().all(|failed| failed.task == 1), "{failed:?}");
        assert_eq!(int64s(&outputs)[..right], numbers.map(|number| 3 * number)[..right]);
    }
}

/// y = x of three elements a task, over a tensor that the file notes this shape of.
fn twice_negated(noted: &[i64]) -> Result<Onnx, String> {
    let config = r#"max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 3 }
                    output { name: "y" data_type: TYPE_FP32 dims: 3 }"#;
    let nodes = vec![node("Neg", &["x"], "between", &[]), node("Neg", &["between"], "y", &[])];
    let mut graph = graph(&[("x", FP32, &[-1, -4])], nodes, &[("y", FP32, &[-1, -4])]);
    graph.value_info = vec![value(&("between", FP32, noted))];
    model_of(config, graph)
}

/// As exporters write them: another name for the batch, and a length that was anybody's choice before a configuration.
#[test]
fn names_that_a_file_notes_of_lengths_give_way_to_those_of_its_inputs() {
    for noted in [[-5, 3], [-1, -4]] {
        let rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(run(&twice_negated(&noted).unwrap(), &rows, 24), floats(&rows), "{noted:?}");
    }
}

#[test]
fn lengths_that_a_file_notes_give_way_to_what_is_configured() {
    let rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    assert_eq!(run(&twice_negated(&[-1, 4]).unwrap(), &rows, 24), floats(&rows));
}

/// -x by way of a shape that is computed with, of which nothing is known before it runs. Or the mean of all tasks,
/// which is but one row.
pub(crate) fn reshaped_by_numbers(is_mean: bool) -> GraphProto {
    let mut nodes = vec![
        node("Shape", &["x"], "shape", &[]),
        node("Cast", &["shape"], "lengths", &[("to", FP32.into())]),
        node("Cast", &["lengths"], "numbers", &[("to", INT64.into())]),
        node("Neg", &["x"], "negative", &[]),
        node("Reshape", &["negative", "numbers"], if is_mean { "all" } else { "y" }, &[]),
    ];
    if is_mean {
        let axes = AttributeProto { name: "axes".into(), r#type: INTS, ints: vec![0], ..AttributeProto::default() };
        nodes.push(NodeProto { attribute: vec![axes], ..node("ReduceMean", &["all"], "y", &[]) });
    }
    graph(&[("x", FP32, &[-1, 3])], nodes, &[("y", FP32, &[-1, 3])])
}

#[test]
fn what_is_known_for_one_size_at_a_time_runs_in_batches() {
    let config = "max_batch_size: 4";
    let negate = model_of(config, reshaped_by_numbers(false)).unwrap();
    let rows: Vec<f32> = (0..12_u8).map(f32::from).collect();
    for batch in 1..=4 {
        let (rows, bytes) = (&rows[..3 * batch], 12 * batch);
        assert_eq!(run(&negate, rows, bytes), floats(&rows.iter().map(|number| -number).collect::<Vec<_>>()));
    }
}

#[test]
fn what_has_one_row_for_all_tasks_is_asked_for_each_of_them() {
    let mean = model_of("max_batch_size: 4", reshaped_by_numbers(true)).unwrap();
    let rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    assert_eq!(run(&mean, &rows, 24), floats(&rows.map(|number| -number)));
    let why =
        super::rows::why_apart(&mean.source.model, &[0; 12], &mut |inputs, outputs| mean.run_once(inputs, outputs));
    assert!(why.as_ref().is_some_and(|why| why.starts_with("a batch of 4 fails: ")), "{why:?}");
}

/// As many bytes as its tensor has, from the file's beginning, as nothing else is said.
#[test]
fn weights_beside_a_file_need_no_length_and_no_offset() {
    let entry = |key: &str, value: &str| StringStringEntryProto { key: key.into(), value: value.into() };
    for (name, said) in [("weights.bin", &[][..]), ("weights.data", &[("offset", "4")])] {
        let table = TensorProto {
            name: "table".into(),
            data_type: FP32,
            dims: vec![3],
            data_location: 1,
            external_data: [&[("location", name)], said]
                .concat()
                .iter()
                .map(|(key, value)| entry(key, value))
                .collect(),
            ..TensorProto::default()
        };
        let nodes = vec![node("Add", &["x", "table"], "y", &[])];
        let mut graph = graph(&[("x", FP32, &[-1, 3])], nodes, &[("y", FP32, &[-1, 3])]);
        graph.initializer = vec![table];
        let add = |numbers: &[f32]| {
            in_repository("", graph.clone(), |model, file| {
                fs::write(file.with_file_name(name), floats(numbers)).unwrap();
                let loaded = load_file(model, file).map_err(|error| error.to_string())?;
                Ok(run(&loaded, &[10.0, 20.0, 30.0], 12))
            })
        };
        let skipped = said.len();
        let expected: Vec<f32> = (0..3).map(|at| 10.0 * (at + 1) as f32 + (at + skipped) as f32).collect();
        assert_eq!(add(&[0.0, 1.0, 2.0, 3.0, 4.0]), Ok(floats(&expected)), "{name}");
        let error = add(&[0.0, 1.0]).unwrap_err();
        assert!(error.contains(name) || error.contains("External initializer: table"), "{error}");
    }
}

#[test]
fn without_a_batch_dimension_one_task_is_the_whole_tensor() {
    let nodes = vec![node("Neg", &["x"], "y", &[])];
    let negate = model("", &[("x", FP32, &[2, 2])], nodes.clone(), &[("y", FP32, &[2, 2])]).unwrap();
    assert_eq!(run(&negate, &[1.0, 2.0, 3.0, 4.0], 16), floats(&[-1.0, -2.0, -3.0, -4.0]));
    let scalar = model("", &[("x", FP32, &[])], nodes.clone(), &[("y", FP32, &[])]).unwrap();
    assert_eq!(run(&scalar, &[7.0], 4), floats(&[-7.0]));
    let config = r#"input { name: "x" data_type: TYPE_FP32 dims: [ 1, 3 ] }
                    output { name: "y" data_type: TYPE_FP32 dims: [ 1, 3 ] }"#;
    let whole = model(config, &[("x", FP32, &[-1, 3])], nodes, &[("y", FP32, &[-1, 3])]).unwrap();
    assert_eq!(run(&whole, &[1.0, 2.0, 3.0], 12), floats(&[-1.0, -2.0, -3.0]));
}

#[test]
fn lengths_of_one_at_the_end_do_not_matter_and_shapes_may_differ_from_the_clients() {
    let config = r#"max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 3, 1, 1 ] }
                    output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }"#;
    let nodes = vec![node("Neg", &["x"], "y", &[])];
    let shape: &[i64] = &[-1, 3, 1, 1];
    let tail = model(config, &[("x", FP32, shape)], nodes.clone(), &[("y", FP32, shape)]).unwrap();
    assert_eq!(run(&tail, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 24), floats(&[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]));
    let config = r#"max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } }
                    output { name: "y" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } }"#;
    let shape: &[i64] = &[-1, 2, 3];
    let reshaped = model(config, &[("x", FP32, shape)], nodes.clone(), &[("y", FP32, shape)]).unwrap();
    assert_eq!(run(&reshaped, &[1.0; 6], 24), floats(&[-1.0; 6]));
    let wrong = config.replace("reshape { shape: [ 2, 3 ] } }\n", "reshape { shape: [ 3, 2 ] } }\n");
    assert!(model(&wrong, &[("x", FP32, shape)], nodes, &[("y", FP32, shape)]).is_err());
}

/// A record of these tensors of one task.
pub(crate) fn record(tensors: &[repository::Tensor], cells: &[(&[usize], &[u8])]) -> Vec<u8> {
    let cells: Vec<_> = cells.iter().map(|(shape, data)| Some(cell::Cell { shape: shape.to_vec(), data })).collect();
    let mut record = vec![0; cell::bytes_max(tensors)];
    let bytes = cell::write(tensors, &cells, &mut record).unwrap();
    record.truncate(bytes);
    record
}

/// The shapes and elements of a task's outputs, or why it has none.
pub(crate) type Answer = Result<Vec<(Vec<usize>, Vec<u8>)>, String>;

/// Runs a batch.
fn run_records(model: &Onnx, tasks: &[Vec<u8>]) -> Vec<Answer> {
    run_records_of(model, &model.groups.outputs, tasks)
}

/// The same of any executor of a model with these outputs.
pub(crate) fn run_records_of(
    executor: &dyn Executor,
    tensors: &[repository::Tensor],
    tasks: &[Vec<u8>],
) -> Vec<Answer> {
    let room = cell::bytes_max(tensors);
    let mut outputs = vec![0xaa; room * tasks.len()];
    let failed = executor.execute(&tasks.concat(), &mut outputs).unwrap();
    let outputs = outputs.chunks_exact(room).enumerate().map(|(task, output)| {
        if let Some(failure) = failed.iter().find(|failure| failure.task == task) {
            return Err(failure.reason.clone());
        }
        let bytes = if cell::is_record(tensors) { cell::record_bytes(output).unwrap() } else { room };
        let cells = cell::read(tensors, &output[..bytes]).unwrap().into_iter().flatten();
        Ok(cells.map(|cell| (cell.shape, cell.data.to_vec())).collect())
    });
    outputs.collect()
}

pub(crate) const STRING: i32 = 8;

#[test]
fn tasks_of_several_shapes_run_in_groups_and_each_is_as_if_alone() {
    // Both inputs have the same length N in the file, so they can be added.
    let nodes = vec![node("Add", &["x", "w"], "sum", &[]), node("Neg", &["sum"], "z", &[])];
    let shape: &[i64] = &[-1, -2, 2];
    let add = model("", &[("x", FP32, shape), ("w", FP32, shape)], nodes, &[("z", FP32, shape)]).unwrap();
    let task = |length: usize, from: f32| {
        let x: Vec<f32> = (0..length * 2).map(|index| from + index as f32).collect();
        let data = floats(&x);
        record(&add.groups.inputs, &[(&[length, 2], &data), (&[length, 2], &data)])
    };
    let lengths = [3, 1, 3, 0, 7, 1, 3];
    let tasks: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(at, &length)| task(length, at as f32)).collect();
    let together = run_records(&add, &tasks);
    for ((at, &length), (task, found)) in lengths.iter().enumerate().zip(tasks.iter().zip(&together)) {
        assert_eq!(run_records(&add, std::slice::from_ref(task))[0], *found, "length {length}");
        let expected: Vec<f32> = (0..length * 2).map(|index| -2.0 * (at as f32 + index as f32)).collect();
        assert_eq!(*found, Ok(vec![(vec![length, 2], floats(&expected))]));
    }
    // Unequal lengths fail for themselves, as a torn record does.
    let unequal = record(&add.groups.inputs, &[(&[1, 2], &floats(&[1.0; 2])), (&[3, 2], &floats(&[1.0; 6]))]);
    let mut torn = tasks[0].clone();
    torn[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let found = run_records(&add, &[tasks[0].clone(), torn, unequal.clone(), tasks[2].clone()]);
    assert_eq!([&found[0], &found[3]], [&together[0], &together[2]]);
    assert!(found[1].as_ref().unwrap_err().starts_with("tensor 'x': found none, expected it"), "{:?}", found[1]);
    let expected =
        "input 'w' has length 3 in dimension 0, expected 1: the model's file calls that and another length M2";
    assert!(found[2].as_ref().unwrap_err().starts_with(expected), "{:?}", found[2]);
    // What lengths are called outlives weights.
    add.release();
    assert_eq!(run_records(&add, &[unequal])[0], found[2]);
}

#[test]
fn ten_thousand_shapes_need_no_more_memory_than_one() {
    let nodes = vec![node("Neg", &["x"], "y", &[])];
    let config = r#"input { name: "x" dims: [ -1, -1 ] } parameters { key: "max_dims" value { string_value: "100" } }"#;
    let negate = model(config, &[("x", FP32, &[-2, -3])], nodes, &[("y", FP32, &[-2, -3])]).unwrap();
    for shape in (0..10_000).map(|shape| [shape / 100 + 1, shape % 100 + 1]) {
        let data = floats(&vec![1.5; shape[0] * shape[1]]);
        let found = run_records(&negate, &[record(&negate.groups.inputs, &[(&shape, &data)])]);
        assert_eq!(found, [Ok(vec![(shape.to_vec(), floats(&vec![-1.5; shape[0] * shape[1]]))])]);
    }
}

#[test]
fn an_output_outside_of_its_bounds_fails_and_says_what_to_change() {
    let nodes = vec![node("Concat", &["x", "x"], "y", &[("axis", 1)])];
    let config = r#"parameters { key: "max_dims" value { string_value: "5" } }"#;
    let double = model(config, &[("x", FP32, &[-1, -2])], nodes, &[("y", FP32, &[-1, -3])]).unwrap();
    let task = |length: usize| record(&double.groups.inputs, &[(&[length], &floats(&vec![1.0; length]))]);
    let found = run_records(&double, &[task(2), task(3)]);
    assert_eq!(found[0], Ok(vec![(vec![4], floats(&[1.0; 4]))]));
    let error = found[1].as_ref().unwrap_err();
    assert!(error.contains("output y has shape [6], expected [-1] within") && error.contains("max_dims"), "{error}");
}

/// By whoever has strings.
#[test]
fn strings_come_back_as_they_went() {
    if onnxruntime::tests::instead().is_none() {
        return;
    }
    let nodes = vec![node("Identity", &["x"], "y", &[])];
    let echo = model("", &[("x", STRING, &[-1, -2])], nodes, &[("y", STRING, &[-1, -2])]).unwrap();
    let text = |strings: &[&str]| {
        let encoded = |text: &&str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        strings.iter().flat_map(encoded).collect::<Vec<u8>>()
    };
    let (two, other, none) = (text(&["", "g\u{fc}n"]), text(&["a\0", "\0\0b"]), text(&[]));
    let tasks = [&two, &other, &none].map(|data| {
        let strings = cell::strings(data).count();
        record(&echo.groups.inputs, &[(&[strings], data)])
    });
    let found = run_records(&echo, &tasks);
    assert_eq!(found, [(2, two), (2, other), (0, none)].map(|(strings, data)| Ok(vec![(vec![strings], data)])));
    let bytes = vec![1, 0, 0, 0, 0xff];
    let task = record(&echo.groups.inputs, &[(&[1], &bytes)]);
    assert_eq!(run_records(&echo, &[task]), [Ok(vec![(vec![1], bytes)])], "it is no UTF-8");
}

#[test]
fn a_task_without_an_input_that_its_file_takes_fails_alone() {
    let nodes = vec![node("Neg", &["x"], "y", &[])];
    let config = r#"max_batch_size: 4 input { name: "x" optional: true }"#;
    let negate = model(config, &[("x", FP32, &[-1, 2])], nodes, &[("y", FP32, &[-1, 2])]).unwrap();
    let mut none = vec![0; cell::bytes_max(&negate.groups.inputs)];
    let bytes = cell::write(&negate.groups.inputs, &[None], &mut none).unwrap();
    let tasks = [none[..bytes].to_vec(), record(&negate.groups.inputs, &[(&[2], &floats(&[1.0, 2.0]))])];
    let found = run_records(&negate, &tasks);
    assert_eq!(found[0], Err("input 'x' was left out, and the model's file takes it".to_owned()));
    assert_eq!(found[1], Ok(vec![(vec![2], floats(&[-1.0, -2.0]))]));
}

#[test]
fn a_fixed_length_that_is_configured_as_any_is_refused() {
    let nodes = vec![node("Neg", &["x"], "y", &[])];
    let config = r#"max_batch_size: 4 input { name: "x" dims: [ -1 ] } output { name: "y" dims: [ 3 ] }"#;
    let error = model(config, &[("x", FP32, &[-1, 3])], nodes, &[("y", FP32, &[-1, 3])]).err().unwrap();
    assert!(error.contains("config.pbtxt says -1 for dimension 1 of input x, the file has 3"), "{error}");
}
