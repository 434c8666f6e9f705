//! Step 10: Triton's classification extension: an output as its best classes instead of its scores.

use bytes::Bytes;
use frontend::tasks::Reply;
use repository::{DataType, Model};

use super::{OutputChoice, elements};

/// An output as its client sees it.
#[derive(Debug)]
pub(super) struct Shown {
    /// As the protocol spells it.
    pub datatype: &'static str,
    /// The batch dimension if the model has one, then the output's own, or the number of classes.
    pub shape: Vec<usize>,
    /// As raw bytes; strings have their length before them.
    pub data: Bytes,
    /// The strings, if these are classes.
    pub classes: Option<Vec<String>>,
}

/// One chosen output of a reply.
pub(super) fn shown(model: &Model, choice: &OutputChoice, reply: &Reply) -> Shown {
    let (tensor, data) = (&model.outputs[choice.index], &reply.outputs[choice.index]);
    if choice.classes == 0 {
        let shape = model.shape_of(tensor, reply.rows);
        return Shown { datatype: tensor.datatype.name(), shape, data: data.clone(), classes: None };
    }
    // Labels are the first output's.
    let labels = if choice.index == 0 { &model.labels[..] } else { &[] };
    let rows = data.chunks_exact(tensor.bytes()).map(|row| best(tensor.datatype, row, choice.classes, labels));
    let classes: Vec<String> = rows.flatten().collect();
    let count = choice.classes.min(tensor.elements());
    let shape = if model.is_batched { vec![reply.rows, count] } else { vec![count] };
    let data = classes.iter().flat_map(|class| [&(class.len() as u32).to_le_bytes(), class.as_bytes()].concat());
    Shown { datatype: "BYTES", shape, data: data.collect::<Vec<u8>>().into(), classes: Some(classes) }
}

/// The highest scores of a row as `score:index:label`, best first; of equal ones the first.
fn best(datatype: DataType, row: &[u8], count: usize, labels: &[String]) -> Vec<String> {
    let mut scores: Vec<(usize, f64)> = elements::to_f64(datatype, row).into_iter().enumerate().collect();
    // Anything is better than what is not a number.
    let key = |score: f64| if score.is_nan() { f64::NEG_INFINITY } else { score };
    scores.sort_by(|(_, a), (_, b)| key(*b).total_cmp(&key(*a)));
    // Triton writes whole numbers as such.
    let decimals = if matches!(datatype, DataType::Fp16 | DataType::Fp32 | DataType::Fp64) { 6 } else { 0 };
    let text = |(index, score): &(usize, f64)| match labels.get(*index) {
        Some(label) => format!("{score:.decimals$}:{index}:{label}"),
        None => format!("{score:.decimals$}:{index}"),
    };
    scores.iter().take(count).map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_bear_their_labels() {
        let row: Vec<u8> = [0.25f32, f32::NAN, 0.5, 0.25].iter().flat_map(|score| score.to_le_bytes()).collect();
        let labels = ["cat", "dog", "cow"].map(str::to_owned);
        let expected = ["0.500000:2:cow", "0.250000:0:cat", "0.250000:3"];
        assert_eq!(best(DataType::Fp32, &row, 3, &labels), expected);
        assert_eq!(best(DataType::Fp32, &row, 9, &labels).len(), 4);
        assert_eq!(best(DataType::Int8, &[0xff, 1], 1, &[]), ["1:1"]);
    }
}
