//! Inputs that are made for each run: masks, and what Triton calls batch inputs.

use repository::{DataType, Generated, GeneratedKind};

use super::{
    groups::{Group, Groups},
    layout::copy_common,
    tensor::Tensor,
};
use crate::error::ExecutorError;

impl Groups {
    /// The input of that number among those that are made.
    pub(super) fn generate(&self, index: usize, group: &Group<'_>) -> Result<Tensor, ExecutorError> {
        let Generated { name, kind, source, .. } = &self.batching.generated[index];
        let datatype = self.binding.generated[index];
        if *kind == GeneratedKind::Mask {
            return Ok(self.mask(datatype, *source, group));
        }
        let shapes = || group.tasks.iter().map(|task| &task.cells[*source].shape[..]);
        let counts = || shapes().map(|shape| shape.iter().product::<usize>());
        let accumulated = || {
            counts().scan(0usize, |sum, count| {
                *sum += count;
                Some(*sum)
            })
        };
        let tasks = group.tasks.len();
        let (shape, numbers): (Vec<usize>, Vec<usize>) = match kind {
            GeneratedKind::Mask => unreachable!("it has been made"),
            GeneratedKind::ElementCount => (vec![tasks], counts().collect()),
            GeneratedKind::AccumulatedElementCount => (vec![tasks], accumulated().collect()),
            GeneratedKind::AccumulatedElementCountWithZero => {
                (vec![tasks + 1], std::iter::once(0).chain(accumulated()).collect())
            }
            GeneratedKind::MaxElementCountAsShape => {
                let padded = self.padded_shape(*source, group).iter().product();
                let most = if self.batching.ragged[*source] { counts().max().unwrap_or(0) } else { padded };
                return Ok(Tensor::zeros(datatype, &[most]));
            }
            GeneratedKind::ItemShape => {
                (vec![tasks, self.inputs[*source].shape.len()], shapes().flatten().copied().collect())
            }
            GeneratedKind::ItemShapeFlatten => {
                (vec![tasks * self.inputs[*source].shape.len()], shapes().flatten().copied().collect())
            }
        };
        let fits = |&number: &usize| datatype != DataType::Int32 || i32::try_from(number).is_ok();
        if let Some(number) = numbers.iter().find(|number| !fits(number)) {
            return Err(ExecutorError(format!("batch_input {name} is {number}, which TYPE_INT32 does not have")));
        }
        let numbers: Vec<f64> = numbers.into_iter().map(|number| number as f64).collect();
        Ok(Tensor::of_numbers(datatype, &shape, &numbers))
    }

    /// 1 where an input's elements are, 0 where its padding is: in the dimensions that requests choose.
    fn mask(&self, datatype: DataType, source: usize, group: &Group<'_>) -> Tensor {
        let axes = &self.binding.inputs[source];
        let of = |lengths: &[usize]| axes.iter().map(|&(_, length)| lengths[length]).collect::<Vec<usize>>();
        let padded = of(&group.lengths);
        let row = padded.iter().product::<usize>();
        let mut mask = vec![0u8; group.tasks.len() * row];
        for (task, into) in group.tasks.iter().zip(mask.chunks_exact_mut(row.max(1))) {
            let own = of(&task.lengths);
            copy_common((&vec![1; own.iter().product()], &own), (into, &padded), 1);
        }
        let shape: Vec<usize> = std::iter::once(group.tasks.len()).chain(padded).collect();
        let numbers: Vec<f64> = mask.into_iter().map(f64::from).collect();
        Tensor::of_numbers(datatype, &shape, &numbers)
    }
}
