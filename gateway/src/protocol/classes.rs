//! Step 10: Triton's classification extension: an output as its best classes instead of its scores.

use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    tasks::Reply,
};
use repository::{DataType, Model};

use super::{OutputChoice, elements};

/// An output as its client sees it.
#[derive(Debug)]
pub(super) struct Shown {
    pub datatype: DataType,
    /// The batch dimension if the model has one, then the output's own, or the number of classes.
    pub shape: Vec<usize>,
    /// As raw bytes; strings have their length before them.
    pub data: Bytes,
}

/// Elements of an output that may be shown as classes: as many as in Triton. They are looked through on the thread that
/// also moves packets.
const ELEMENTS_MAX: usize = 1_000_000;

/// Whether outputs that are to be shown as classes are not too large for it.
///
/// # Errors
/// [`InferError::Invalid`], as Triton says it, with what was found and expected.
pub(crate) fn check_classes(model: &Model, outputs: &[OutputChoice], reply: &Reply) -> Result<(), InferError> {
    for OutputChoice { index, .. } in outputs.iter().filter(|choice| choice.classes > 0) {
        let found: usize = reply.shape(model, *index).iter().product();
        if found > ELEMENTS_MAX {
            let field = format!("classification output tensor too large: outputs['{}']", model.outputs[*index].name);
            return Err(invalid(&field, format_args!("{found} elements"), format_args!("at most {ELEMENTS_MAX}")));
        }
    }
    Ok(())
}

/// One chosen output of a reply.
pub(super) fn shown(model: &Model, choice: &OutputChoice, reply: &Reply) -> Shown {
    let (tensor, data) = (&model.outputs[choice.index], &reply.outputs[choice.index]);
    let shape = reply.shape(model, choice.index);
    if choice.classes == 0 {
        return Shown { datatype: tensor.datatype, shape, data: data.clone() };
    }
    let labels = model.labels.get(choice.index).map(Vec::as_slice).unwrap_or_default();
    let row_bytes = data.len() / reply.rows;
    let rows = (0..reply.rows).map(|row| &data[row * row_bytes..][..row_bytes]);
    let classes = rows.flat_map(|row| best(tensor.datatype, row, choice.classes, labels));
    let data = classes.flat_map(|class| [&(class.len() as u32).to_le_bytes(), class.as_bytes()].concat());
    let count = choice.classes.min(row_bytes / tensor.datatype.bytes());
    let shape = if model.is_batched { vec![reply.rows, count] } else { vec![count] };
    Shown { datatype: DataType::Bytes, shape, data: data.collect::<Vec<u8>>().into() }
}

/// The highest scores of a row as `score:index:label`, best first; of equal ones the first.
fn best(datatype: DataType, row: &[u8], count: usize, labels: &[String]) -> Vec<String> {
    let mut scores: Vec<(usize, f64)> = elements::to_f64(datatype, row).into_iter().enumerate().collect();
    // Anything is better than what is not a number.
    let key = |score: f64| if score.is_nan() { f64::NEG_INFINITY } else { score };
    let order = |a: &(usize, f64), b: &(usize, f64)| key(b.1).total_cmp(&key(a.1)).then(a.0.cmp(&b.0));
    if count < scores.len() {
        scores.select_nth_unstable_by(count, order);
        scores.truncate(count);
    }
    scores.sort_unstable_by(order);
    // Triton writes whole numbers as such.
    let decimals = if datatype.is_float() { 6 } else { 0 };
    let text = |(index, score): &(usize, f64)| match labels.get(*index) {
        Some(label) => format!("{score:.decimals$}:{index}:{label}"),
        None => format!("{score:.decimals$}:{index}"),
    };
    scores.iter().map(text).collect()
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

    #[test]
    fn of_equal_scores_the_first_is_better_however_many_are_wanted() {
        let row: Vec<u8> = (0..200u8).map(|index| index % 3).collect();
        let mut sorted: Vec<usize> = (0..200).collect();
        sorted.sort_by_key(|&index| (2 - index % 3, index));
        for count in [0, 1, 66, 67, 150, 200, 999] {
            let expected: Vec<String> = sorted.iter().take(count).map(|at| format!("{}:{at}", at % 3)).collect();
            assert_eq!(best(DataType::Uint8, &row, count, &[]), expected, "{count}");
        }
    }
}
