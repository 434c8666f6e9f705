//! Step 8 where tensors differ in size between requests: the tasks of a batch run in groups ([`super::runs`]), one
//! after another. Those of a group are padded to the same lengths, or joined, and its outputs are cut back to what
//! each task's own would be. A group that fails runs again in halves, until what fails does so for itself.
//!
//! What runs a group is the caller's: an engine, or a GPU, which has plans for a few lengths only ([`Rounding`]).

use std::collections::BTreeMap;

use repository::{
    Batching, DataType, Model,
    cell::{self, Cell},
    elements,
};

use super::{
    binding::{Axes, Binding, Parts},
    engine::Output,
    layout::copy_common,
    runs,
    tensor::{Tensor, clean},
    text,
};
use crate::{
    error::{ExecutorError, TaskError},
    executor::{panics, tasks},
};

/// A model's tensors, and what becomes of them where tasks differ.
pub(in crate::executor) struct Groups {
    name: String,
    pub(in crate::executor) inputs: Vec<repository::Tensor>,
    pub(in crate::executor) outputs: Vec<repository::Tensor>,
    pub(in crate::executor) is_batched: bool,
    pub(in crate::executor) batching: Batching,
    pub(in crate::executor) binding: Binding,
}

/// A task of a batch.
pub(in crate::executor) struct Task<'a> {
    /// Its place in the batch.
    place: usize,
    /// Its inputs, with the shapes that clients have.
    pub(super) cells: Vec<Cell<'a>>,
    /// The lengths that its request chose, in the order of the binding.
    pub(super) lengths: Vec<usize>,
}

/// Tasks that run together.
pub(in crate::executor) struct Group<'a> {
    pub(in crate::executor) tasks: Vec<&'a Task<'a>>,
    /// What they are padded to.
    pub(in crate::executor) lengths: Vec<usize>,
}

/// Takes what the run of a group gave: the outputs of all its tasks, and the tasks of the group that have none,
/// ascending, and why.
pub(in crate::executor) type TakeResults<'a> =
    dyn FnMut(&[Output<'_>], &[(usize, String)]) -> Result<(), ExecutorError> + 'a;

/// Runs the groups of a batch.
pub(in crate::executor) trait RunGroups {
    /// Runs one, of which these are the tensors as the model's file takes them. `take` is called once at most.
    fn run(&mut self, group: &Group<'_>, tensors: Vec<Tensor>, take: &mut TakeResults<'_>)
    -> Result<(), ExecutorError>;

    /// Whether none can be run any more, so that it is no use to look for the task that is to blame.
    fn is_over(&self) -> bool;

    /// Whether each task is a group of its own.
    fn are_apart(&self) -> bool {
        false
    }
}

/// The lengths that a model can be run with.
pub(in crate::executor) trait Rounding {
    /// The least of them that are no shorter than these.
    fn round(&self, lengths: &[usize]) -> Vec<usize>;

    /// Whether it can be run with these.
    fn has(&self, lengths: &[usize]) -> bool;
}

/// All.
pub(super) struct AnyLength;

impl Rounding for AnyLength {
    fn round(&self, lengths: &[usize]) -> Vec<usize> {
        lengths.to_vec()
    }

    fn has(&self, _: &[usize]) -> bool {
        true
    }
}

impl<'a> Group<'a> {
    fn halves(mut self) -> [Self; 2] {
        let second = self.tasks.split_off(self.tasks.len() / 2);
        let lengths = self.lengths.clone();
        [self, Self { tasks: second, lengths }]
    }
}

/// A task's part of an output: the shape that clients have, and its elements; or why it has none.
type Part = Result<(Vec<usize>, Vec<u8>), String>;

impl Groups {
    pub(in crate::executor) fn new(model: &Model, batching: &Batching, binding: Binding) -> Self {
        let (inputs, outputs) = (model.inputs.clone(), model.outputs.clone());
        let (name, batching) = (model.name.clone(), batching.clone());
        Self { name, inputs, outputs, is_batched: model.is_batched, batching, binding }
    }

    /// Runs a batch with such lengths only as `rounding` has; yields what has failed.
    pub(in crate::executor) fn execute(
        &self,
        (inputs, outputs): (&[u8], &mut [u8]),
        rounding: &dyn Rounding,
        run: &mut dyn RunGroups,
    ) -> Vec<TaskError> {
        let mut failed: BTreeMap<usize, String> = BTreeMap::new();
        let mut read = Vec::new();
        for (place, task) in tasks(&self.inputs, inputs).enumerate() {
            match self.read_task(place, task) {
                Ok(task) => read.push(task),
                Err(reason) => drop(failed.insert(place, reason)),
            }
        }
        let rounded = |task| {
            let size = self.size(task);
            runs::Size { lengths: rounding.round(&size.lengths), ..size }
        };
        let sizes: Vec<runs::Size> = read.iter().map(rounded).collect();
        // What cannot be run together has no room together.
        let elements = |lengths: &[usize]| if rounding.has(lengths) { self.elements(lengths) } else { usize::MAX };
        let may_join = self.is_batched && !run.are_apart();
        let dealt = runs::deal(&sizes, &self.batching, may_join, elements).into_iter();
        let of_run =
            |run: runs::Run| Group { tasks: run.tasks.iter().map(|&task| &read[task]).collect(), lengths: run.lengths };
        let mut groups: Vec<Group<'_>> = dealt.map(of_run).collect();
        while let Some(group) = groups.pop() {
            let (model, tasks) = (&self.name, group.tasks.len());
            tracing::debug!(model, tasks, lengths = ?group.lengths, "a group runs");
            match self.run_and_write(&group, run, outputs) {
                Ok(errors) => failed.extend(errors),
                // One of them may be to blame: each half runs anew, so a batch as often as it can be halved.
                Err(_) if group.tasks.len() > 1 && !run.is_over() => groups.extend(group.halves()),
                Err(cause) => {
                    let reason = format!("execution failed: {cause}");
                    failed.extend(group.tasks.iter().map(|task| (task.place, reason.clone())));
                }
            }
        }
        failed.into_iter().map(|(task, reason)| TaskError { task, reason }).collect()
    }

    /// Runs a group; yields the places of those whose outputs cannot be theirs.
    fn run_and_write(
        &self,
        group: &Group<'_>,
        run: &mut dyn RunGroups,
        outputs: &mut [u8],
    ) -> Result<Vec<(usize, String)>, ExecutorError> {
        let run = || {
            let mut failed = Vec::new();
            run.run(group, self.tensors(group)?, &mut |results, without| {
                failed = self.write_group(group, (results, without), outputs)?;
                Ok(())
            })?;
            Ok(failed)
        };
        // Clients choose these shapes: what panics on one of them is no reason to distrust the executor.
        panics::catch(run).unwrap_or_else(|text| {
            let shapes: Vec<_> = (0..self.inputs.len()).map(|input| self.padded_shape(input, group)).collect();
            Err(failed_on(&shapes, &text))
        })
    }

    /// The inputs of a task, all of which a model's file takes, and its lengths, equal where the file says so.
    pub(super) fn read_task<'a>(&self, place: usize, task: &'a [u8]) -> Result<Task<'a>, String> {
        let cells = cell::read(&self.inputs, task).map_err(|error| error.to_string())?;
        let given = cells.into_iter().zip(&self.inputs);
        let needed = given.map(|(cell, tensor)| {
            cell.ok_or_else(|| format!("input '{}' was left out, and the model's file takes it", tensor.name))
        });
        let cells: Vec<Cell<'a>> = needed.collect::<Result<_, _>>()?;
        let mut lengths: Vec<Option<usize>> = vec![None; self.binding.lengths.len()];
        for (index, (cell, tensor)) in cells.iter().zip(&self.inputs).enumerate() {
            let shape = tensor.model_shape_of(&cell.shape);
            for &(dim, length) in &self.binding.inputs[index] {
                let expected = *lengths[length].get_or_insert(shape[dim]);
                if shape[dim] != expected {
                    let (name, found, of) = (&tensor.name, shape[dim], &self.binding.lengths[length]);
                    return Err(format!(
                        "input '{name}' has length {found} in dimension {dim}, expected {expected}: the model's file \
                         calls that and another length {of}"
                    ));
                }
            }
        }
        Ok(Task { place, cells, lengths: lengths.into_iter().map(Option::unwrap_or_default).collect() })
    }

    pub(super) fn size(&self, task: &Task<'_>) -> runs::Size {
        let joined = (0..self.inputs.len()).filter(|&input| self.batching.ragged[input]);
        let joined = joined.map(|input| task.cells[input].shape.iter().product::<usize>()).sum();
        runs::Size { lengths: task.lengths.clone(), joined }
    }

    /// Elements of all inputs of a task of such lengths, but for those that are joined.
    pub(in crate::executor) fn elements(&self, lengths: &[usize]) -> usize {
        let stacked = (0..self.inputs.len()).filter(|&input| !self.batching.ragged[input]);
        stacked
            .fold(0, |sum, input| sum.saturating_add(elements(&self.shape_with(input, lengths)).unwrap_or(usize::MAX)))
    }

    /// An input's shape for the model with these lengths, without the batch dimension.
    pub(in crate::executor) fn shape_with(&self, input: usize, lengths: &[usize]) -> Vec<usize> {
        let mut shape = self.inputs[input].model_shape().to_vec();
        self.binding.inputs[input].iter().for_each(|&(dim, length)| shape[dim] = lengths[length]);
        shape
    }

    /// The same in a group.
    pub(super) fn padded_shape(&self, input: usize, group: &Group<'_>) -> Vec<usize> {
        self.shape_with(input, &group.lengths)
    }

    /// All inputs of the model's file.
    fn tensors(&self, group: &Group<'_>) -> Result<Vec<Tensor>, ExecutorError> {
        let given = (0..self.inputs.len()).map(|input| match self.inputs[input].datatype {
            _ if self.batching.ragged[input] => Ok(self.joined(input, group)),
            DataType::Bytes => Ok(self.strings(input, group)),
            _ => Ok(self.numbers(input, group)),
        });
        let generated = (0..self.batching.generated.len()).map(|index| self.generate(index, group));
        given.chain(generated).collect()
    }

    /// The shape of an input of the whole group.
    fn group_shape(&self, input: usize, group: &Group<'_>) -> Vec<usize> {
        let batch = self.is_batched.then_some(group.tasks.len());
        batch.into_iter().chain(self.padded_shape(input, group)).collect()
    }

    fn numbers(&self, input: usize, group: &Group<'_>) -> Tensor {
        let tensor = &self.inputs[input];
        let padded = self.padded_shape(input, group);
        let mut gathered = Tensor::zeros(tensor.datatype, &self.group_shape(input, group));
        let element_bytes = tensor.datatype.bytes();
        let pad = self.batching.pads[input];
        if pad != 0.0 && group.tasks.iter().any(|task| task.lengths != group.lengths) {
            gathered.fill(pad);
        }
        let bytes = gathered.bytes_mut();
        let row_bytes = bytes.len() / group.tasks.len();
        for (task, into) in group.tasks.iter().zip(bytes.chunks_exact_mut(row_bytes.max(1))) {
            let own = tensor.model_shape_of(&task.cells[input].shape);
            copy_common((task.cells[input].data, &own), (into, &padded), element_bytes);
        }
        clean(tensor.datatype, bytes);
        gathered
    }

    /// Tasks' tensors one after another.
    fn joined(&self, input: usize, group: &Group<'_>) -> Tensor {
        let datatype = self.inputs[input].datatype;
        let bytes: usize = group.tasks.iter().map(|task| task.cells[input].data.len()).sum();
        let mut shape = vec![1; self.binding.joined_ranks[input]];
        *shape.last_mut().expect("it has one dimension at least") = bytes / datatype.bytes();
        let mut joined = Tensor::zeros(datatype, &shape);
        let mut rest = joined.bytes_mut();
        for task in &group.tasks {
            let data = task.cells[input].data;
            rest.split_off_mut(..data.len()).expect("these were counted").copy_from_slice(data);
        }
        clean(datatype, joined.bytes_mut());
        joined
    }

    /// Strings are of one shape: those that could be padded are refused.
    fn strings(&self, input: usize, group: &Group<'_>) -> Tensor {
        let strings = group.tasks.iter().flat_map(|task| cell::strings(task.cells[input].data));
        let strings = strings.map(|string| text::from_bytes(string.expect("it was read from a cell")));
        Tensor::of_strings(self.group_shape(input, group), strings.collect())
    }

    /// Takes each task's outputs out of those of its group; yields the places of those that have no room for theirs.
    fn write_group(
        &self,
        group: &Group<'_>,
        (results, without): (&[Output<'_>], &[(usize, String)]),
        outputs: &mut [u8],
    ) -> Result<Vec<(usize, String)>, ExecutorError> {
        let mut parts = Vec::with_capacity(results.len());
        for (index, result) in results.iter().enumerate() {
            parts.push(match &self.binding.outputs[index] {
                Parts::Rows(axes) => self.rows(index, (result, axes), group)?,
                Parts::Joined(source) => self.pieces(index, (result, *source), group)?,
            });
        }
        let room = cell::bytes_max(&self.outputs);
        let mut failed: Vec<(usize, String)> =
            without.iter().map(|(row, reason)| (group.tasks[*row].place, reason.clone())).collect();
        for (row, task) in group.tasks.iter().enumerate() {
            if without.iter().any(|failed| failed.0 == row) {
                continue;
            }
            let own: Result<Vec<_>, &String> = parts.iter().map(|parts| parts[row].as_ref()).collect();
            let written = own.map_err(String::clone).and_then(|own| {
                let cells = own.into_iter().map(|(shape, data)| Some(Cell { shape: shape.clone(), data }));
                let into = &mut outputs[task.place * room..][..room];
                let written = cell::write(&self.outputs, &cells.collect::<Vec<_>>(), into);
                written.map_err(|error| format!("{error} (max_dims, max_bytes)"))
            });
            failed.extend(written.err().map(|reason| (task.place, reason)));
        }
        Ok(failed)
    }

    /// Each task's row of an output, cut to the task's lengths.
    fn rows(
        &self,
        output: usize,
        (result, axes): (&Output<'_>, &Axes),
        group: &Group<'_>,
    ) -> Result<Vec<Part>, ExecutorError> {
        let tensor = &self.outputs[output];
        let padded = match &result.shape[..] {
            [first, rest @ ..] if self.is_batched && *first == group.tasks.len() => rest,
            found if self.is_batched => {
                let (name, expected) = (&tensor.name, group.tasks.len());
                return Err(ExecutorError(format!("output {name} has shape {found:?}, expected {expected} rows")));
            }
            found => found,
        };
        if let Some((dim, length)) = axes.iter().find(|axis| padded.get(axis.0) != group.lengths.get(axis.1)) {
            return Err(ExecutorError(format!(
                "output {} has shape {:?}, expected {} in dimension {dim}, as its tasks were padded to",
                tensor.name, result.shape, group.lengths[*length]
            )));
        }
        let rows = match tensor.datatype {
            DataType::Bytes => string_rows(result, group.tasks.len())?,
            _ => number_rows(result, group.tasks.len())?,
        };
        let part = |(row, task): (Vec<u8>, &&Task<'_>)| {
            let mut own = padded.to_vec();
            axes.iter().for_each(|&(dim, length)| own[dim] = task.lengths[length]);
            let shape = tensor.client_shape_of(&own).ok_or_else(|| {
                let dims: Vec<String> = tensor.dims().map(|dim| dim.to_string()).collect();
                format!(
                    "output {} has shape {own:?}, expected [{}] within {} bytes (max_dims, max_bytes)",
                    tensor.name,
                    dims.join(", "),
                    tensor.bytes()
                )
            })?;
            if own == padded {
                return Ok((shape, row));
            }
            let mut cut = vec![0; own.iter().product::<usize>() * tensor.datatype.bytes()];
            copy_common((&row, padded), (&mut cut, &own), tensor.datatype.bytes());
            Ok((shape, cut))
        };
        Ok(rows.into_iter().zip(&group.tasks).map(part).collect())
    }

    /// Each task's part of an output that is all tasks' one after another.
    fn pieces(
        &self,
        output: usize,
        (result, source): (&Output<'_>, usize),
        group: &Group<'_>,
    ) -> Result<Vec<Part>, ExecutorError> {
        let tensor = &self.outputs[output];
        let shapes = group.tasks.iter().map(|task| {
            let mut shape = tensor.shape.clone();
            let chosen = tensor.variable.iter().flat_map(|variable| &variable.dims);
            chosen.for_each(|&dim| shape[dim] = task.cells[source].shape[dim]);
            shape
        });
        let shapes: Vec<Vec<usize>> = shapes.collect();
        let expected: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
        let found: usize = result.shape.iter().product();
        if found != expected {
            return Err(ExecutorError(format!(
                "output {} has {found} elements, expected {expected}, as its tasks' input {} gives (batch_output)",
                tensor.name, self.inputs[source].name
            )));
        }
        let mut rest = result.numbers()?;
        let cut = |shape: Vec<usize>| {
            let bytes = shape.iter().product::<usize>() * tensor.datatype.bytes();
            Ok((shape, rest.split_off(..bytes).expect("these were counted").to_vec()))
        };
        Ok(shapes.into_iter().map(cut).collect())
    }
}

/// What a model that panicked on tasks of these shapes is told to have done.
pub(super) fn failed_on(shapes: &[Vec<usize>], text: &str) -> ExecutorError {
    ExecutorError(format!("the model failed on inputs of shapes {shapes:?}: {text}"))
}

/// The bytes of each row.
fn number_rows(result: &Output<'_>, rows: usize) -> Result<Vec<Vec<u8>>, ExecutorError> {
    let bytes = result.numbers()?;
    let each = bytes.len() / rows;
    Ok((0..rows).map(|row| bytes[row * each..][..each].to_vec()).collect())
}

fn string_rows(result: &Output<'_>, rows: usize) -> Result<Vec<Vec<u8>>, ExecutorError> {
    let strings = result.strings()?;
    let each = strings.len() / rows;
    let mut strings = strings.iter();
    let encoded = |string: &String| {
        let bytes = text::to_bytes(string);
        [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
    };
    Ok((0..rows).map(|_| strings.by_ref().take(each).flat_map(encoded).collect()).collect())
}
