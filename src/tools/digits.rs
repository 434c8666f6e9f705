//! The held-out digits: images, their true classes, and what running the model directly makes of them.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use backend::executor::{Executor as _, Onnx};
use load::{Expected, Input};

/// Requests for the digits model with their expected answers.
pub(super) struct HeldOut {
    /// One request for each image.
    pub inputs: Vec<Input>,
    /// The share of images that the model classifies right when it is run directly.
    pub direct_accuracy: f64,
}

/// Reads `heldout.csv` of the model's folder (label, then 64 pixels of 0 to 16), and runs the model on each image
/// alone, without any of downbeat between.
pub(super) fn load(model: &repository::Model, folder: &Path) -> Result<HeldOut> {
    let path = folder.join("heldout.csv");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let images = text.lines().enumerate().map(|(number, line)| {
        parse(line).with_context(|| format!("{}, line {}: expected a label and 64 pixels", path.display(), number + 1))
    });
    let images = images.collect::<Result<Vec<_>>>()?;
    ensure!(!images.is_empty(), "{} has no images", path.display());
    let repository::Executor::Onnx { file, batching, .. } = &model.executor else {
        bail!("the model {} is not an ONNX model", model.name)
    };
    let direct = Onnx::load(model, file, batching)?;
    let (mut inputs, mut right) = (Vec::new(), 0);
    let input = &model.inputs[0];
    for (label, pixels) in images {
        let mut scores = vec![0; model.output_bytes()];
        direct.execute(&pixels, &mut scores)?;
        let scores: Vec<f32> = scores.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let largest = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(index, _)| index);
        right += usize::from(largest == Some(label));
        let expected = Expected::Scores { scores, label };
        inputs.push(Input::new(&input.name, input.datatype, &input.shape, &pixels, None, expected));
    }
    let direct_accuracy = right as f64 / inputs.len() as f64;
    Ok(HeldOut { inputs, direct_accuracy })
}

/// The label, and the pixels as little-endian floats.
fn parse(line: &str) -> Option<(usize, Vec<u8>)> {
    let mut fields = line.split(',').map(|field| field.trim().parse::<u16>());
    let label = fields.next()?.ok().filter(|label| *label < 10)?;
    let pixels = fields.map(|field| field.ok().map(f32::from)).collect::<Option<Vec<f32>>>()?;
    (pixels.len() == 64).then(|| (label.into(), pixels.iter().flat_map(|pixel| pixel.to_le_bytes()).collect()))
}
