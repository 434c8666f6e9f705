//! Step 8 where tensors differ in size between requests: the tasks of a batch that have the same shapes run together,
//! one such group after another. The graph was optimised with a symbol for each length that requests choose, so a shape
//! that has never come before costs nothing that the first has not cost, and none is remembered. What fails, fails for
//! its group.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use repository::{
    DataType,
    cell::{self, Cell},
};
use tract_onnx::prelude::{tract_ndarray::ArrayD, *};

use super::{Onnx, datum_type, text};
use crate::executor::{TaskError, tasks};

/// A task's place in the batch, and its inputs.
type Task<'a> = (usize, Vec<Cell<'a>>);

impl Onnx {
    /// Runs a batch of records; yields what has failed.
    pub(super) fn run_groups(&self, inputs: &[u8], outputs: &mut [u8]) -> Vec<TaskError> {
        let mut failed: BTreeMap<usize, String> = BTreeMap::new();
        let mut groups: BTreeMap<Vec<Vec<usize>>, Vec<Task<'_>>> = BTreeMap::new();
        for (place, task) in tasks(&self.inputs, inputs).enumerate() {
            match self.read(task) {
                Ok(cells) => {
                    let shapes = cells.iter().map(|cell| cell.shape.clone()).collect();
                    groups.entry(shapes).or_default().push((place, cells));
                }
                Err(reason) => drop(failed.insert(place, reason)),
            }
        }
        for group in groups.values() {
            for group in group.chunks(if self.is_batched { group.len() } else { 1 }) {
                let places = group.iter().map(|(place, _)| *place);
                let run = || self.run_group(group).and_then(|results| self.write_group(group, &results, outputs));
                // Clients choose these shapes: what panics on one of them is no reason to distrust the executor.
                let ran = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
                    let shapes: Vec<&[usize]> = group[0].1.iter().map(|cell| &cell.shape[..]).collect();
                    Err(TractError::msg(format!("the model panicked on inputs of shapes {shapes:?}")))
                });
                match ran {
                    Ok(errors) => failed.extend(errors),
                    Err(cause) => failed.extend(places.map(|place| (place, format!("execution failed: {cause:#}")))),
                }
            }
        }
        failed.into_iter().map(|(task, reason)| TaskError { task, reason }).collect()
    }

    /// The inputs of a task, all of which a model's file takes.
    fn read<'a>(&self, task: &'a [u8]) -> Result<Vec<Cell<'a>>, String> {
        let cells = cell::read(&self.inputs, task).map_err(|error| error.to_string())?;
        let given = cells.into_iter().zip(&self.inputs);
        let needed = given.map(|(cell, tensor)| {
            cell.ok_or_else(|| format!("input '{}' was left out, and the model's file takes it", tensor.name))
        });
        needed.collect()
    }

    fn run_group(&self, group: &[Task<'_>]) -> TractResult<TVec<TValue>> {
        let tensors = self.inputs.iter().enumerate().map(|(index, tensor)| {
            let cells = || group.iter().map(|(_, cells)| &cells[index]);
            let shape = tensor.model_shape_of(&group[0].1[index].shape);
            let shape: Vec<usize> = self.is_batched.then_some(group.len()).into_iter().chain(shape).collect();
            match tensor.datatype {
                DataType::Bytes => strings(&shape, cells()).map(Tensor::into_tvalue),
                datatype => numbers(datatype, &shape, cells()).map(Tensor::into_tvalue),
            }
        });
        self.plan()?.run(tensors.collect::<TractResult<TVec<_>>>()?)
    }

    /// Takes each task's outputs out of those of its group; yields the places of those that have no room for theirs.
    fn write_group(
        &self,
        group: &[Task<'_>],
        results: &[TValue],
        outputs: &mut [u8],
    ) -> TractResult<Vec<(usize, String)>> {
        let mut shapes = Vec::with_capacity(results.len());
        let mut data = Vec::with_capacity(results.len());
        for (tensor, result) in self.outputs.iter().zip(results) {
            let rest = match result.shape() {
                [first, rest @ ..] if self.is_batched && *first == group.len() => Some(rest),
                _ if self.is_batched => None,
                found => Some(found),
            };
            let shape = rest.and_then(|rest| tensor.client_shape_of(rest)).ok_or_else(|| {
                let dims: Vec<String> = tensor.dims().map(|dim| dim.to_string()).collect();
                let batch = if self.is_batched { format!("{}, ", group.len()) } else { String::new() };
                TractError::msg(format!(
                    "output {} has shape {:?}, expected [{batch}{}] within {} bytes a task (max_dims, max_bytes)",
                    tensor.name,
                    result.shape(),
                    dims.join(", "),
                    tensor.bytes()
                ))
            })?;
            shapes.push(shape);
            data.push(match tensor.datatype {
                DataType::Bytes => string_rows(result, group.len())?,
                _ => number_rows(result, group.len()),
            });
        }
        let room = cell::bytes_max(&self.outputs);
        let mut failed = Vec::new();
        for (row, (place, _)) in group.iter().enumerate() {
            let cells =
                shapes.iter().zip(&data).map(|(shape, rows)| Some(Cell { shape: shape.clone(), data: &rows[row] }));
            let cells: Vec<Option<Cell<'_>>> = cells.collect();
            if let Err(error) = cell::write(&self.outputs, &cells, &mut outputs[place * room..][..room]) {
                failed.push((*place, format!("{error} (max_dims, max_bytes)")));
            }
        }
        Ok(failed)
    }
}

fn numbers<'a>(datatype: DataType, shape: &[usize], cells: impl Iterator<Item = &'a Cell<'a>>) -> TractResult<Tensor> {
    let mut gathered = Tensor::zero_dt(datum_type(datatype), shape)?;
    let mut rest = gathered.as_bytes_mut();
    for cell in cells {
        let into = rest.split_off_mut(..cell.data.len()).expect("every task of a group has the same shape");
        super::copy_elements(datatype, cell.data, into);
    }
    Ok(gathered)
}

fn strings<'a>(shape: &[usize], cells: impl Iterator<Item = &'a Cell<'a>>) -> TractResult<Tensor> {
    let strings = cells.flat_map(|cell| cell::strings(cell.data));
    let strings = strings.map(|string| text::from_bytes(string.expect("it was read from a cell")));
    Ok(ArrayD::from_shape_vec(shape, strings.collect::<Vec<String>>())?.into_tensor())
}

/// The bytes of each row.
fn number_rows(result: &Tensor, rows: usize) -> Vec<Vec<u8>> {
    let bytes = result.as_bytes();
    let each = bytes.len() / rows;
    (0..rows).map(|row| bytes[row * each..][..each].to_vec()).collect()
}

fn string_rows(result: &Tensor, rows: usize) -> TractResult<Vec<Vec<u8>>> {
    let strings = result.to_plain_array_view::<String>()?;
    let each = strings.len() / rows;
    let mut strings = strings.iter();
    let encoded = |string: &String| {
        let bytes = text::to_bytes(string);
        [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
    };
    Ok((0..rows).map(|_| strings.by_ref().take(each).flat_map(encoded).collect()).collect())
}
