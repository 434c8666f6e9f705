//! Whether rows of a batch are answered as each is alone. Some graphs compute over the batch: a maximum, a norm or a
//! scale of all rows, one padding for all. They would answer a request by what strangers have sent, and neither their
//! files nor what runs them say so. So rows that differ are run, each alone and all together, and compared.
//!
//! Sums of other sizes add in another order, so a row may differ from itself alone by more than rounding. Then it is
//! compared with itself among copies of itself: of a batch of one size only what is in it can make a difference. One of
//! the rows comes twice, as boxes do that suppress each other only where they are alike.

use std::iter::zip;

use half::{bf16, f16};
use repository::{
    DataType, Model,
    cell::{self, Cell},
};

use super::tensor::Tensor;
use crate::error::ExecutorError;

/// Runs a batch once, as [`crate::executor::Executor::run_once`].
pub type RunOnce<'a> = dyn FnMut(&[u8], &mut [u8]) -> Result<(), ExecutorError> + 'a;

/// What it takes in all, in tasks, where rows are as they are alone.
pub const TASKS: i64 = 10;

/// Rows that differ.
const ROWS: usize = 3;
/// How far numbers may be off: this part of each, and so much.
const NEAR: (f64, f64) = (1e-4, 1e-5);
/// The same in FP16 and BF16, and this part of the largest.
const NEAR_IN_HALVES: f64 = 1e-2;
/// Between batches of two sizes: this part of the largest.
const OF_SIZES: f64 = 1e-2;
/// Numbers of one row are as many times those of another.
const SPREAD: f64 = 16.0;

/// A row and its answer.
struct Row {
    inputs: Vec<u8>,
    alone: Vec<u8>,
}

/// Why rows of a model's batches have to run one after another, if so; `sample` is one that can be run.
pub fn why_apart(model: &Model, sample: &[u8], run: &mut RunOnce<'_>) -> Option<String> {
    compare(&mut Trial { model, run }, sample).err()
}

fn compare(trial: &mut Trial<'_, '_>, sample: &[u8]) -> Result<(), String> {
    let rows = trial.rows(sample)?;
    let rows: Vec<&Row> = rows.iter().collect();
    if rows.len() < 2 {
        return Err("no two samples run that differ".to_owned());
    }
    let others = || rows[1..].iter().chain([&rows[0]]).copied();
    if trial.model.max_batch > rows.len() {
        return trial.judge(&[rows[0]].into_iter().chain(others()).collect::<Vec<_>>());
    }
    others().try_for_each(|other| trial.judge(&[rows[0], other]))
}

struct Trial<'a, 'b> {
    model: &'a Model,
    run: &'a mut RunOnce<'b>,
}

impl Trial<'_, '_> {
    /// The outputs of each row of a batch.
    fn run(&mut self, rows: &[&[u8]]) -> Result<Vec<Vec<u8>>, ExecutorError> {
        let room = self.model.output_bytes();
        let mut outputs = vec![0; rows.len() * room];
        (self.run)(&rows.concat(), &mut outputs)?;
        Ok(outputs.chunks_exact(room.max(1)).map(<[u8]>::to_vec).collect())
    }

    fn row(&mut self, inputs: Vec<u8>) -> Result<Row, ExecutorError> {
        let alone = self.run(&[&inputs])?.pop().unwrap_or_default();
        Ok(Row { inputs, alone })
    }

    /// Rows that can be run: a quiet one, which is the sample, between others.
    fn rows(&mut self, sample: &[u8]) -> Result<Vec<Row>, String> {
        let quiet = self.row(sample.to_vec()).map_err(|error| format!("no sample runs: {error}"))?;
        let mut rows = vec![quiet];
        for number in 1..ROWS {
            let fillings = [Wholes::Lengths, Wholes::Bits].map(|wholes| filled(self.model, sample, (number, wholes)));
            let mut differ =
                fillings.into_iter().flatten().filter(|inputs| rows.iter().all(|row| row.inputs != *inputs));
            rows.extend(differ.find_map(|inputs| self.row(inputs).ok()));
        }
        let between = rows.len().min(2) - 1;
        rows.swap(0, between);
        Ok(rows)
    }

    /// Compares what rows are answered together and alone.
    fn judge(&mut self, rows: &[&Row]) -> Result<(), String> {
        let inputs: Vec<&[u8]> = rows.iter().map(|row| &*row.inputs).collect();
        let together = self.run(&inputs).map_err(|error| format!("a batch of {} fails: {error}", rows.len()))?;
        for (at, (row, found)) in zip(rows, &together).enumerate() {
            if !self.is_near(found, &row.alone, Sizes::One) {
                self.judge_closely(row, (at, rows.len()), found)?;
            }
        }
        Ok(())
    }

    /// Whether it is not others that a row differs by, which was answered so at this place of a batch of this size.
    fn judge_closely(&mut self, row: &Row, (at, size): (usize, usize), found: &[u8]) -> Result<(), String> {
        let failed = |error: ExecutorError| format!("a sample fails when it is run again: {error}");
        let again = self.run(&[&row.inputs]).map_err(failed)?;
        if !again.iter().all(|again| self.is_near(again, &row.alone, Sizes::One)) {
            return Err("the same input is answered otherwise when it is run again".to_owned());
        }
        let copies = self.run(&vec![&*row.inputs; size]).map_err(failed)?;
        if !self.is_near(found, &copies[at], Sizes::One) {
            return Err("they influence each other".to_owned());
        }
        if !self.is_near(&copies[at], &row.alone, Sizes::Two) {
            return Err("how many they are changes what comes out".to_owned());
        }
        Ok(())
    }

    /// Whether two answers are the same.
    fn is_near(&self, found: &[u8], expected: &[u8], sizes: Sizes) -> bool {
        let outputs = &self.model.outputs;
        let cells = |bytes| cell::read(outputs, cell::split_first(outputs, bytes)?.0).ok();
        let (Some(found), Some(expected)) = (cells(found), cells(expected)) else { return false };
        let mut pairs = zip(outputs, zip(found, expected));
        pairs.all(|(tensor, pair)| match pair {
            (Some(found), Some(expected)) => {
                found.shape == expected.shape && are_near(tensor.datatype, (found.data, expected.data), sizes)
            }
            (found, expected) => found == expected,
        })
    }
}

/// Of which sizes the batches were that two answers are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sizes {
    One,
    Two,
}

fn are_near(datatype: DataType, (found, expected): (&[u8], &[u8]), sizes: Sizes) -> bool {
    let (Some(found_numbers), Some(numbers)) = (floats(datatype, found), floats(datatype, expected)) else {
        let is_step = |(found, expected): (&u8, &u8)| match datatype {
            DataType::Int8 => found.cast_signed().abs_diff(expected.cast_signed()) <= 1,
            _ => found.abs_diff(*expected) <= 1,
        };
        let has_steps = sizes == Sizes::Two && [DataType::Int8, DataType::Uint8].contains(&datatype);
        return found == expected || has_steps && found.len() == expected.len() && zip(found, expected).all(is_step);
    };
    let largest =
        numbers.iter().filter(|number| number.is_finite()).fold(0.0f64, |most, number| most.max(number.abs()));
    let (relative, absolute) = match datatype {
        DataType::Fp16 | DataType::Bf16 => (NEAR_IN_HALVES, NEAR_IN_HALVES * largest),
        _ => NEAR,
    };
    let absolute = if sizes == Sizes::Two { absolute.max(OF_SIZES * largest) } else { absolute };
    zip(found_numbers, numbers).all(|(found, expected)| {
        found == expected
            || found.is_nan() && expected.is_nan()
            || (found - expected).abs() <= absolute + relative * expected.abs()
    })
}

/// The elements of a tensor of numbers that need not be whole.
fn floats(datatype: DataType, bytes: &[u8]) -> Option<Vec<f64>> {
    Some(match datatype {
        DataType::Fp16 => bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f64()).collect(),
        DataType::Bf16 => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f64()).collect(),
        DataType::Fp32 => bytes.as_chunks().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect(),
        DataType::Fp64 => bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
        _ => return None,
    })
}

/// What whole numbers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wholes {
    /// Of a tensor that has but one for each row, how much of the row is real, as many models want to be told. Others
    /// are as in [`Self::Bits`].
    Lengths,
    /// 0 and 1, which are words of every vocabulary.
    Bits,
}

/// The sample with other elements.
fn filled(model: &Model, sample: &[u8], (number, wholes): (usize, Wholes)) -> Option<Vec<u8>> {
    let cells = cell::read(&model.inputs, sample).ok()?;
    let longest = cells.iter().flatten().flat_map(|cell| &cell.shape).copied().max().unwrap_or(1);
    let mut state = number as u32;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        f64::from(state >> 8) / f64::from(1 << 24)
    };
    let spread = SPREAD.powi(number as i32 - 1);
    let filled = zip(&model.inputs, &cells).map(|(tensor, cell)| {
        let Cell { shape, .. } = cell.as_ref()?;
        let elements: usize = shape.iter().product();
        if tensor.datatype == DataType::Bytes {
            let string = [1, 0, 0, 0, b'a' + number as u8];
            return Some(string.repeat(elements));
        }
        let mut one = || match tensor.datatype.is_float() {
            true => (2.0 * next() - 1.0) * spread,
            false if elements == 1 && wholes == Wholes::Lengths => (longest / number).max(1) as f64,
            false => next().round(),
        };
        let numbers: Vec<f64> = (0..elements).map(|_| one()).collect();
        Some(Tensor::of_numbers(tensor.datatype, shape, &numbers).bytes().to_vec())
    });
    let filled: Vec<Option<Vec<u8>>> = filled.collect();
    let cells = zip(&cells, &filled).map(|(cell, data)| {
        let shape = cell.as_ref()?.shape.clone();
        Some(Cell { shape, data: data.as_ref()? })
    });
    let mut inputs = vec![0; cell::bytes_max(&model.inputs)];
    let bytes = cell::write(&model.inputs, &cells.collect::<Vec<_>>(), &mut inputs).ok()?;
    inputs.truncate(bytes);
    Some(inputs)
}

#[cfg(test)]
mod tests;
