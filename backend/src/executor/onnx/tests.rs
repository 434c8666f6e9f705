//! The digit classifier that ships with the project, run directly.

use super::*;

const IMAGE_PIXELS: usize = 64;
const CLASSES: usize = 10;

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits")
}

fn digits() -> Model {
    let models = repository::load(&folder().join("..")).unwrap();
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
