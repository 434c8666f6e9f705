//! A model that is ready to run, with what the scheduler is told of it.

use std::sync::Arc;

use proto::{BatchCost, LatencyProfile, Span, Weights, backend_to_scheduler::ModelOffer};
use repository::{Model, Tensor, Variable, cell};

use crate::{config::Claim, executor::Executor, limits::MEASURED_LENGTH, staging::ModelShape};

/// Longer tasks than those that were measured are not expected to make a batch last longer than this: what hangs is
/// given up after ten times as long.
const LONGEST: Span = Span::from_millis(6_000);

/// What l(b) and the cost of a model rest on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Nothing: no sample could be run.
    Guess,
    /// l(1): larger batches are taken to last as long as their tasks one after another.
    One,
    /// Batches of several sizes.
    Sizes,
}

/// A model that is ready to run.
#[derive(Clone)]
pub struct Loaded {
    /// As in the repository, with the executor that the configuration wants for it.
    pub model: Model,
    /// What staging must know of it.
    pub shape: ModelShape,
    /// The GPUs that host it; ascending, none twice.
    pub gpu_indexes: Vec<u32>,
    /// What runs its batches, on whichever GPU.
    pub executor: Arc<dyn Executor>,
    /// l(b).
    pub profile: LatencyProfile,
    /// What a batch takes, if requests choose how large they are.
    pub cost: Option<BatchCost>,
    /// What these two rest on.
    pub basis: Basis,
    /// What it takes in the memory of these GPUs, if that is short.
    pub weights: Weights,
    /// Whether it is there all the time.
    pub is_pinned: bool,
    /// Whether the configuration has no place for it, and a scheduler wanted it here all the same.
    pub is_guest: bool,
}

impl Loaded {
    /// What it claims of GPUs' memory.
    #[must_use]
    pub fn claim(&self) -> Claim<'_> {
        let Self { gpu_indexes, weights, is_pinned, .. } = self;
        Claim { gpu_indexes, pages: weights.pages, is_pinned: *is_pinned }
    }

    /// What a batch of so many tasks takes at most of which none has more bytes of inputs. Where requests choose
    /// lengths l(b) is of one length, and theirs may be many times that: a batch of them must not be taken for one that
    /// hangs, as whoever sends such requests could take one GPU after another out of use. The scheduler, which closes a
    /// backend that is silent for too long, has as much patience with models that have a cost.
    #[must_use]
    pub fn longest(&self, tasks: usize, input_bytes: usize) -> Span {
        let measured = self.profile.latency(tasks);
        if self.basis == Basis::Guess {
            return LONGEST.max(measured);
        }
        if !self.shape.records.inputs || self.cost.is_none() {
            return measured;
        }
        let Model { inputs, outputs, .. } = &self.model;
        let scaled = Span::from_millis_f64(measured.as_millis_f64() * work(inputs, outputs, input_bytes));
        scaled.min(LONGEST).max(measured)
    }

    /// What the scheduler is told of it.
    #[must_use]
    pub fn offer(&self) -> ModelOffer {
        ModelOffer {
            name: self.model.name.clone(),
            version: self.model.version.clone(),
            profile: self.profile.clone(),
            input_bytes: u32::try_from(self.shape.input_bytes).unwrap_or(u32::MAX),
            gpu_indexes: self.gpu_indexes.clone(),
            weights: self.weights,
            cost: self.cost,
            queue_max: self.model.queue.requests_max(self.model.priorities.levels),
            is_guest: self.is_guest,
        }
    }
}

/// How many times the work of a task that was measured a task may be whose inputs have so many bytes; never less than
/// one. Attention grows with the square of the length, and little that is in use grows faster. Bytes do not tell which
/// tensor is long, or which of its dimensions: with as many elements as those that were measured it may be the one
/// that attention is over, so whichever could be longest counts.
fn work(inputs: &[Tensor], outputs: &[Tensor], input_bytes: usize) -> f64 {
    fn variable(tensor: &Tensor) -> Option<(&Tensor, &Variable)> {
        Some((tensor, tensor.variable.as_ref()?))
    }
    let chosen = inputs.iter().filter_map(variable);
    let measured = chosen.clone().chain(outputs.iter().filter_map(variable)).map(fits);
    let measured = measured.fold(MEASURED_LENGTH as f64, f64::min).max(1.0);
    // All but the elements of tensors whose size is chosen is there in every task.
    let fixed = |tensor: &Tensor| tensor.bytes() - tensor.variable.as_ref().map_or(0, |variable| variable.bytes_max);
    let fixed = cell::HEAD_BYTES + inputs.iter().map(fixed).sum::<usize>();
    let bytes = input_bytes.saturating_sub(fixed) as f64;
    let measured_bytes: f64 = chosen
        .clone()
        .map(|(tensor, variable)| row_bytes(tensor, variable) * measured.powi(variable.dims.len() as i32))
        .sum();
    let longest = chosen.filter_map(|(tensor, variable)| {
        let longest = variable.dims.iter().map(|&dim| tensor.shape[dim]).max()?;
        Some((longest as f64).min(bytes / row_bytes(tensor, variable)) / measured)
    });
    let larger = bytes / measured_bytes;
    (larger * longest.fold(larger, f64::max)).max(1.0)
}

/// The length that all of a tensor's chosen dimensions can have at once, nearly ([`cell::sample`]).
fn fits((tensor, variable): (&Tensor, &Variable)) -> f64 {
    let Some(shortest) = variable.dims.iter().map(|&dim| tensor.shape[dim]).min() else { return f64::INFINITY };
    let room = variable.bytes_max as f64 / row_bytes(tensor, variable);
    room.powf(1.0 / variable.dims.len() as f64).min(shortest as f64)
}

/// Bytes of a tensor whose chosen dimensions are all one; of strings, those that they have besides their text.
fn row_bytes(tensor: &Tensor, variable: &Variable) -> f64 {
    let fixed = tensor.shape.iter().enumerate().filter(|(dim, _)| !variable.dims.contains(dim));
    let elements: usize = fixed.map(|(_, &length)| length).product();
    (elements * tensor.datatype.bytes()).max(1) as f64
}

#[cfg(test)]
mod tests {
    use repository::DataType;

    use super::*;

    /// Of the dimensions that requests choose each is this long at most.
    fn chosen(datatype: DataType, shape: &[usize], dims: &[usize]) -> Tensor {
        let mut tensor = Tensor::new("t", datatype, shape.to_vec());
        let bytes_max = shape.iter().product::<usize>() * datatype.bytes();
        let (dims, reshape_dims) = (dims.to_vec(), Vec::new());
        tensor.variable = Some(Variable { dims, reshape_dims, bytes_max, is_optional: false, any_rank: false });
        tensor
    }

    /// The work of a task whose tensors have these shapes.
    fn work_of(inputs: Vec<Tensor>, shapes: &[&[usize]]) -> f64 {
        let cells = inputs.iter().zip(shapes).map(|(tensor, shape)| {
            let head = tensor.variable.as_ref().map_or(0, |_| cell::HEAD_BYTES + shape.len() * cell::DIM_BYTES);
            head + shape.iter().product::<usize>() * tensor.datatype.bytes()
        });
        work(&inputs, &[], cell::HEAD_BYTES + cells.sum::<usize>())
    }

    #[test]
    fn work_grows_with_the_square_of_the_length_and_is_never_less_than_what_was_measured() {
        let words = || vec![chosen(DataType::Int64, &[4_096], &[0])];
        let found = [1, 256, 512, 4_096].map(|length| work_of(words(), &[&[length]]));
        assert_eq!(found, [1.0, 1.0, 4.0, 256.0]);
        // No longer one could be measured than there is.
        let short = || vec![chosen(DataType::Int64, &[64], &[0])];
        assert_eq!([16, 64].map(|length| work_of(short(), &[&[length]])), [1.0, 1.0]);
    }

    #[test]
    fn what_could_be_longest_counts() {
        // Beside a large picture that all tasks have.
        let picture = Tensor::new("p", DataType::Fp32, vec![3, 224, 224]);
        let both = vec![picture, chosen(DataType::Int64, &[4_096], &[0])];
        assert_eq!(work_of(both, &[&[3, 224, 224], &[1_024]]), 16.0);
        // Sounds of 320 bytes a frame: as many bytes may be that many more words.
        let sounds = || vec![chosen(DataType::Fp32, &[3_000, 80], &[0]), chosen(DataType::Int64, &[1_024], &[0])];
        assert_eq!(work_of(sounds(), &[&[256, 80], &[256]]), 4.0);
        // A picture of twice the width and height has four times as many pixels to look at from each of them.
        let pixels = || vec![chosen(DataType::Fp32, &[1_024, 1_024], &[0, 1])];
        assert_eq!(work_of(pixels(), &[&[512, 512]]), 16.0);
        // As large as the one that was measured, but long and narrow.
        assert_eq!(work_of(pixels(), &[&[1_024, 64]]), 4.0);
    }

    #[test]
    fn long_texts_are_work_although_no_dimension_is_long() {
        let text = || vec![chosen(DataType::Bytes, &[1], &[])];
        let text = |bytes: usize| work(&text(), &[], cell::HEAD_BYTES + 8 + 4 + bytes);
        assert!(text(1) < 2.0 && text(8_192) > 1e6, "{} and {}", text(1), text(8_192));
    }
}
