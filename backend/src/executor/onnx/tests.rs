//! The digit classifier that ships with the project, and models of a few nodes, run directly.

use std::fs;

use prost::Message as _;
use tract_onnx::pb::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType, tensor_shape_proto::Dimension, tensor_shape_proto::dimension, type_proto,
};

use super::*;

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
    Onnx::load(model, &folder().join("1/model.onnx"))
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
    let missing = Onnx::load(&digits(), Path::new("no/such/file.onnx")).err().unwrap().to_string();
    assert!(missing.contains("no/such/file.onnx"), "{missing}");
}

/// A tensor of a model file: its name, its type by ONNX's number, its lengths, of which -1 is called `N`.
type Value<'a> = (&'a str, i32, &'a [i64]);

fn value(&(name, elem_type, dims): &Value<'_>) -> ValueInfoProto {
    let dimension = |&length: &i64| match length {
        -1 => dimension::Value::DimParam("N".into()),
        length => dimension::Value::DimValue(length),
    };
    let dim = dims.iter().map(|length| Dimension { value: Some(dimension(length)), ..Dimension::default() });
    let tensor = type_proto::Tensor { elem_type, shape: Some(TensorShapeProto { dim: dim.collect() }) };
    let r#type = Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() });
    ValueInfoProto { name: name.into(), r#type, ..ValueInfoProto::default() }
}

fn node(op_type: &str, input: &[&str], output: &str, attributes: &[(&str, i64)]) -> NodeProto {
    let attribute = |&(name, i): &(&str, i64)| AttributeProto {
        name: name.into(),
        r#type: AttributeType::Int as i32,
        i,
        ..AttributeProto::default()
    };
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
    let graph = GraphProto {
        name: "graph".into(),
        node: nodes,
        input: inputs.iter().map(value).collect(),
        output: outputs.iter().map(value).collect(),
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { version: 13, ..OperatorSetIdProto::default() }];
    let file = ModelProto { ir_version: 7, opset_import, graph: Some(graph), ..ModelProto::default() };
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), file.encode_to_vec()).unwrap();
    fs::write(folder.path().join("m/config.pbtxt"), config).unwrap();
    let model = repository::load_model(&folder.path().join("m")).map_err(|error| error.to_string())?;
    Onnx::load(&model, &folder.path().join("m/1/model.onnx")).map_err(|error| error.to_string())
}

fn run(model: &Onnx, inputs: &[f32], output_bytes: usize) -> Vec<u8> {
    let mut outputs = vec![0xaa; output_bytes];
    model.execute(&floats(inputs), &mut outputs).unwrap();
    outputs
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn int64s(bytes: &[u8]) -> Vec<i64> {
    bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
}

const FP32: i32 = 1;
const INT64: i32 = 7;

#[test]
fn labels_have_one_element_for_each_task_and_casts_to_int64_are_that_type() {
    let nodes = vec![node("ArgMax", &["x"], "label", &[("axis", 1), ("keepdims", 0)])];
    let classes = model("", &[("x", FP32, &[-1, 3])], nodes, &[("label", INT64, &[-1])]).unwrap();
    assert_eq!(int64s(&run(&classes, &[0.0, 2.0, 1.0, 5.0, 2.0, 1.0], 16)), [1, 0]);
    let nodes = vec![node("Cast", &["x"], "y", &[("to", INT64.into())])];
    let cast = model("", &[("x", FP32, &[-1, 2])], nodes, &[("y", INT64, &[-1, 2])]).unwrap();
    assert_eq!(int64s(&run(&cast, &[0.0, 2.5, -1.0, 5.0], 32)), [0, 2, -1, 5]);
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
