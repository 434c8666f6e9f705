//! Where the backend's registered memory holds what: for each GPU a few staging buffers, in each room for the inputs of
//! one batch and for its answers.

use std::ops::Range;

use proto::backend_to_frontend::ANSWER_HEADER_BYTES;
use repository::{Model, cell};

/// Staging buffers of a GPU: one whose batch executes, one being fetched meanwhile, and two whose answers are still on
/// their way, so that one slow frontend does not hold up the next batch.
pub const BUFFERS: usize = 4;
/// Longest text that tells a client why execution failed.
pub const FAILURE_TEXT_BYTES_MAX: usize = 256;
/// Inputs and answers start on cache lines.
const ALIGNMENT: usize = 64;

/// So much of a buffer's inputs, and of its answers, is in memory from the start: what small batches take, whose
/// windows are short. What is behind comes when it is first written.
const POPULATED_BYTES_MAX: usize = 2 << 20;
/// And so much at least, for small models that come later.
const POPULATED_BYTES_MIN: usize = 256 << 10;

/// What staging must know of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// Bytes of one task's inputs; at most, if they are records.
    pub input_bytes: usize,
    /// Bytes of one task's outputs; at most, if they are records.
    pub output_bytes: usize,
    /// The largest batch.
    pub batch_max: usize,
    /// Which sides are records ([`repository::cell`]), whose length differs from task to task.
    pub records: Records,
}

/// Whether a task's inputs, and its outputs, are records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Records {
    pub inputs: bool,
    pub outputs: bool,
}

impl From<&Model> for ModelShape {
    fn from(model: &Model) -> Self {
        Self {
            input_bytes: model.input_bytes(),
            output_bytes: model.output_bytes(),
            batch_max: model.max_batch,
            records: Records { inputs: cell::is_record(&model.inputs), outputs: cell::is_record(&model.outputs) },
        }
    }
}

impl ModelShape {
    /// From one task's answer to the next one's.
    pub(crate) fn answer_stride(self) -> usize {
        (ANSWER_HEADER_BYTES + self.output_bytes.max(FAILURE_TEXT_BYTES_MAX)).next_multiple_of(ALIGNMENT)
    }
}

/// A place in staging memory, and the name of the transfer into or out of it: a place has at most one at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Index of the GPU.
    pub gpu: usize,
    /// Index of the staging buffer, below [`BUFFERS`].
    pub buffer: usize,
    /// Index of the task in its plan.
    pub task: usize,
}

impl Place {
    /// As the token of a transfer.
    #[must_use]
    pub fn token(self) -> u64 {
        (self.gpu as u64) << 32 | (self.buffer as u64) << 16 | self.task as u64
    }

    /// Back from a token.
    #[must_use]
    pub fn from_token(token: u64) -> Self {
        Self { gpu: (token >> 32) as usize, buffer: (token >> 16) as usize & 0xffff, task: token as usize & 0xffff }
    }
}

/// Offsets into the staging memory.
#[derive(Debug, Clone, Copy)]
pub struct Staging {
    gpus: usize,
    inputs_bytes: usize,
    answers_bytes: usize,
    /// Of a buffer's inputs and of its answers, what is in memory from the start.
    populated: [usize; 2],
}

impl Staging {
    /// Lays out staging for `gpus` GPUs, each of which can run any of `models`, and others whose batches have inputs
    /// and answers of `later_bytes` at most.
    #[must_use]
    pub fn new(gpus: usize, models: &[ModelShape], later_bytes: usize) -> Self {
        let largest = |bytes: fn(&ModelShape) -> usize| {
            models.iter().map(|model| model.batch_max * bytes(model)).max().unwrap_or(0)
        };
        let (inputs, answers) = (largest(|m| m.input_bytes), largest(|m| m.answer_stride()));
        let room = |bytes: usize| bytes.max(later_bytes).next_multiple_of(ALIGNMENT);
        let populated = [inputs, answers].map(|bytes| bytes.clamp(POPULATED_BYTES_MIN, POPULATED_BYTES_MAX));
        Self { gpus, inputs_bytes: room(inputs), answers_bytes: room(answers), populated }
    }

    /// What inputs of a batch, and what its answers may take at most.
    #[must_use]
    pub fn room(&self) -> (usize, usize) {
        (self.inputs_bytes, self.answers_bytes)
    }

    /// The largest batch of this model that has room in a staging buffer; 0 if not one task has.
    #[must_use]
    pub fn fitting(&self, model: ModelShape) -> usize {
        let fitting = |room: usize, bytes: usize| room.checked_div(bytes).unwrap_or(model.batch_max);
        let (inputs, answers) =
            (fitting(self.inputs_bytes, model.input_bytes), fitting(self.answers_bytes, model.answer_stride()));
        model.batch_max.min(inputs).min(answers)
    }

    /// Bytes of the whole memory; at least one cache line, so that it can be registered.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.gpus * BUFFERS * (self.inputs_bytes + self.answers_bytes)).max(ALIGNMENT)
    }

    /// Where most batches will lie.
    pub fn populated(&self) -> impl Iterator<Item = Range<usize>> {
        let [inputs, answers] = self.populated;
        let area = |start: usize, bytes: usize, most: usize| start..start + bytes.min(most);
        (0..self.gpus * BUFFERS).map(|buffer| buffer * (self.inputs_bytes + self.answers_bytes)).flat_map(
            move |start| {
                let answers_at = start + self.inputs_bytes;
                [area(start, inputs, self.inputs_bytes), area(answers_at, answers, self.answers_bytes)]
            },
        )
    }

    /// GPUs that have staging buffers.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// Where the input of the task at `place` is fetched to; inputs lie one after another, so that one READ can fetch
    /// a run. Records that are fetched by one READ follow each other from the first one's place on.
    #[must_use]
    pub fn input_offset(&self, place: Place, model: ModelShape) -> usize {
        self.buffer_offset(place) + place.task * model.input_bytes
    }

    /// Where the answer of the run that begins with the task at `place` is: its header, then its payload. Each task
    /// has room for an answer of its own, so one of several tasks, with one header, has room too.
    #[must_use]
    pub fn answer_offset(&self, place: Place, model: ModelShape) -> usize {
        self.buffer_offset(place) + self.inputs_bytes + place.task * model.answer_stride()
    }

    /// Bytes of a GPU's own memory for the inputs of all its staging buffers, where READs go straight there.
    #[must_use]
    pub fn landing_bytes(&self) -> usize {
        BUFFERS * self.inputs_bytes
    }

    /// Where the input of the task at `place` lands in its GPU's own memory, as [`Self::input_offset`] says of staging
    /// memory.
    #[must_use]
    pub fn landing_offset(&self, place: Place, model: ModelShape) -> usize {
        place.buffer * self.inputs_bytes + place.task * model.input_bytes
    }

    fn buffer_offset(&self, place: Place) -> usize {
        (place.gpu * BUFFERS + place.buffer) * (self.inputs_bytes + self.answers_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn areas_of_a_buffer_never_overlap_and_stay_inside(
            gpus in 1usize..4,
            shapes in proptest::collection::vec((1usize..5000, 1usize..5000, 1usize..20), 1..4),
        ) {
            let shapes: Vec<_> = shapes.into_iter()
                .map(|(input_bytes, output_bytes, batch_max)| {
                    ModelShape { input_bytes, output_bytes, batch_max, records: Records::default() }
                })
                .collect();
            let staging = Staging::new(gpus, &shapes, 0);
            for chosen in 0..shapes.len() {
                let ModelShape { batch_max, .. } = shapes[chosen];
                prop_assert_eq!(staging.fitting(shapes[chosen]), batch_max);
                // No area is more than 5000 bytes for each of 20 tasks, and none less than a cache line.
                let wanted = ModelShape { batch_max: batch_max * (20 * 5120 / 64 + 1), ..shapes[chosen] };
                let (fitting, (inputs, answers)) = (staging.fitting(wanted), staging.room());
                prop_assert!((batch_max..wanted.batch_max).contains(&fitting));
                let (input, answer) = (wanted.input_bytes, wanted.answer_stride());
                let has_room = |batch| batch * input <= inputs && batch * answer <= answers;
                prop_assert!(has_room(fitting) && !has_room(fitting + 1));
                // Neighbouring buffers may hold batches of different models.
                let (mut areas, mut landing) = (Vec::new(), Vec::new());
                for (gpu, buffer) in (0..gpus).flat_map(|gpu| (0..BUFFERS).map(move |buffer| (gpu, buffer))) {
                    let shape = shapes[(chosen + buffer) % shapes.len()];
                    for task in 0..shape.batch_max {
                        let place = Place { gpu, buffer, task };
                        prop_assert_eq!(Place::from_token(place.token()), place);
                        areas.push((staging.input_offset(place, shape), shape.input_bytes));
                        if gpu == 0 {
                            landing.push((staging.landing_offset(place, shape), shape.input_bytes));
                        }
                        let answer_bytes = ANSWER_HEADER_BYTES + shape.output_bytes.max(FAILURE_TEXT_BYTES_MAX);
                        areas.push((staging.answer_offset(place, shape), answer_bytes));
                    }
                }
                areas.sort_unstable();
                prop_assert!(areas.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                prop_assert!(areas.last().is_none_or(|last| last.0 + last.1 <= staging.bytes()));
                landing.sort_unstable();
                prop_assert!(landing.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                prop_assert!(landing.last().is_none_or(|last| last.0 + last.1 <= staging.landing_bytes()));
                // They are smaller than what is populated of a buffer.
                let mut covered = 0;
                for part in staging.populated() {
                    prop_assert_eq!(part.start, covered);
                    covered = part.end;
                }
                prop_assert_eq!(covered, staging.bytes());
            }
        }
    }
}
