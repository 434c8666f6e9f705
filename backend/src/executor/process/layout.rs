//! How a batch lies in the memory that a backend shares with a program: its inputs one tensor after another, each for
//! all tasks of a group, and then an area where the program writes outputs.
//!
//! If tensors have the same size in all requests, a batch is one group, and what is here puts it there. For others see
//! [`super::records`].

use proto::backend_to_program::{ALIGNMENT_BYTES, Answered, Area, Breach, Group, Placed};
use repository::{Model, Tensor, cell};

/// Dimensions of a shape that a program claims, as far as they are shown.
const SHOWN_MAX: usize = 16;

/// Where tensors lie.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) inputs: Vec<Tensor>,
    pub(super) outputs: Vec<Tensor>,
    pub(super) is_batched: bool,
    /// Sizes of tensors differ between requests.
    has_records: bool,
    /// Where the program writes.
    pub(super) output_area: Area,
}

/// A batch as it lies there.
#[derive(Debug, Default)]
pub(super) struct Placement {
    /// What the program is told of it; none if no task can be run.
    pub(super) groups: Vec<Group>,
    /// Of records: which of the batch each task of the groups is. Others are in the batch's order, and this is empty.
    pub(super) places: Vec<usize>,
    /// Tasks that are in no group, and why.
    pub(super) refused: Vec<(usize, String)>,
}

impl Layout {
    /// For batches of up to `model.max_batch` tasks.
    pub(super) fn new(model: &Model) -> Self {
        let has_records = cell::is_record(&model.inputs) || cell::is_record(&model.outputs);
        let bytes = |tensors: &[Tensor]| -> u64 {
            let of_all = |tensor: &Tensor| match has_records {
                false => aligned(tensor.bytes() * model.max_batch),
                // Each task may be a group of its own.
                true => aligned(bytes_max(tensor)).saturating_mul(model.max_batch as u64),
            };
            tensors.iter().map(of_all).fold(0, u64::saturating_add)
        };
        let output_area = Area { offset: bytes(&model.inputs), bytes: bytes(&model.outputs) };
        let (inputs, outputs) = (model.inputs.clone(), model.outputs.clone());
        Self { inputs, outputs, is_batched: model.is_batched, has_records, output_area }
    }

    /// All of it.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.output_area.offset.saturating_add(self.output_area.bytes)
    }

    /// Has `write` put the tensors of a batch where they are to lie. `inputs` has one task after another.
    pub(super) fn place<E>(
        &self,
        inputs: &[u8],
        write: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<Placement, E> {
        if self.has_records { self.place_records(inputs, write) } else { self.place_rows(inputs, write) }
    }

    /// Puts what a program has answered to a batch into `outputs`, as an executor has them. `read` gives the bytes at a
    /// place. Yields the tasks that have none, in the batch's order, and why.
    ///
    /// # Errors
    /// If these are not what the model can give, or lie elsewhere than in their area; that is not read then.
    pub(super) fn take<E: From<Breach>>(
        &self,
        placement: Placement,
        answers: &[Answered],
        outputs: &mut [u8],
        read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Vec<(usize, String)>, E> {
        if self.has_records {
            self.take_records(placement, answers, outputs, read)
        } else {
            self.take_rows(answers, outputs, read)
        }
    }

    fn place_rows<E>(&self, inputs: &[u8], mut write: impl FnMut(u64, &[u8]) -> Result<(), E>) -> Result<Placement, E> {
        let task_bytes = task_bytes(&self.inputs);
        let tasks = inputs.len() / task_bytes;
        let (mut offset, mut before, mut gathered) = (0, 0, Vec::new());
        let mut placed = Vec::with_capacity(self.inputs.len());
        for tensor in &self.inputs {
            let bytes = tensor.bytes() * tasks;
            if self.inputs.len() == 1 {
                write(offset, inputs)?;
            } else {
                gathered.clear();
                let of_tasks = inputs.chunks_exact(task_bytes).map(|task| &task[before..before + tensor.bytes()]);
                of_tasks.for_each(|bytes| gathered.extend_from_slice(bytes));
                write(offset, &gathered)?;
            }
            let (datatype, shape) = (tensor.datatype.name().into(), self.shape(tensor.model_shape(), tasks));
            placed.push(Some(Placed { datatype, shape, offset, bytes: bytes as u64 }));
            before += tensor.bytes();
            offset += aligned(bytes);
        }
        Ok(Placement { groups: vec![Group { tasks, inputs: placed }], ..Placement::default() })
    }

    /// Nothing is read if anything is wrong.
    fn take_rows<E: From<Breach>>(
        &self,
        answers: &[Answered],
        mut outputs: &mut [u8],
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Vec<(usize, String)>, E> {
        let task_bytes = task_bytes(&self.outputs);
        check_tasks(answers, outputs.len() / task_bytes)?;
        for answer in answers.iter().filter(|answer| answer.failed.is_none()) {
            self.check_rows(answer)?;
        }
        let (mut first, mut failed) = (0, Vec::new());
        for answer in answers {
            let into = outputs.split_off_mut(..answer.tasks * task_bytes).expect("there is room for all tasks");
            match &answer.failed {
                Some(reason) => failed.extend((first..first + answer.tasks).map(|task| (task, reason.clone()))),
                None => self.read_rows(&answer.outputs, into, &mut read)?,
            }
            first += answer.tasks;
        }
        Ok(failed)
    }

    fn read_rows<E>(
        &self,
        placed: &[Placed],
        outputs: &mut [u8],
        read: &mut impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if let [placed] = placed {
            return read(placed.offset, outputs);
        }
        let task_bytes = task_bytes(&self.outputs);
        let (mut before, mut gathered) = (0, Vec::new());
        for (tensor, placed) in self.outputs.iter().zip(placed) {
            gathered.resize(placed.bytes as usize, 0);
            read(placed.offset, &mut gathered)?;
            for (task, from) in outputs.chunks_exact_mut(task_bytes).zip(gathered.chunks_exact(tensor.bytes())) {
                task[before..before + tensor.bytes()].copy_from_slice(from);
            }
            before += tensor.bytes();
        }
        Ok(())
    }

    fn check_rows(&self, answer: &Answered) -> Result<(), Breach> {
        self.check_count(&answer.outputs)?;
        for (tensor, found) in self.outputs.iter().zip(&answer.outputs) {
            let expected = self.shape(tensor.model_shape(), answer.tasks);
            if found.datatype != tensor.datatype.name() || found.shape != expected {
                let (name, shape) = (&tensor.name, shown(&found.shape));
                let datatype = shown_datatype(found);
                let expected = format!("{} {expected:?}", tensor.datatype);
                return Err(Breach(format!("output {name} is {datatype} {shape:?}, expected {expected}")));
            }
            self.check_place(tensor, found, Some(tensor.bytes() * answer.tasks))?;
        }
        Ok(())
    }

    /// That there is one output for each of the model's.
    pub(super) fn check_count(&self, placed: &[Placed]) -> Result<(), Breach> {
        let (found, expected) = (placed.len(), self.outputs.len());
        match found == expected {
            true => Ok(()),
            false => Err(Breach(format!("it answered with {found} outputs, expected {expected}"))),
        }
    }

    /// That an output lies where it may, and is as long as it is to be, if that is known.
    pub(super) fn check_place(&self, tensor: &Tensor, found: &Placed, bytes: Option<usize>) -> Result<(), Breach> {
        if bytes.is_none_or(|bytes| found.bytes == bytes as u64) && found.lies_in(self.output_area) {
            return Ok(());
        }
        let (name, Placed { offset, bytes: long, .. }) = (&tensor.name, found);
        let expected = bytes.map_or_else(String::new, |bytes| format!("{bytes} "));
        let Area { offset: from, bytes: room } = self.output_area;
        Err(Breach(format!(
            "output {name} has {long} bytes at {offset}, expected {expected}in the {room} bytes at {from}"
        )))
    }

    /// The shape of a tensor of so many tasks, of which this is one's.
    pub(super) fn shape(&self, of_task: &[usize], tasks: usize) -> Vec<u64> {
        let rows = self.is_batched.then_some(tasks).into_iter();
        rows.chain(of_task.iter().copied()).map(|length| length as u64).collect()
    }
}

/// That answers are about so many tasks.
pub(super) fn check_tasks(answers: &[Answered], expected: usize) -> Result<(), Breach> {
    let found = answers.iter().try_fold(0usize, |sum, answer| sum.checked_add(answer.tasks));
    match found == Some(expected) && answers.iter().all(|answer| answer.tasks > 0) {
        true => Ok(()),
        false => {
            let groups: Vec<usize> = answers.iter().map(|answer| answer.tasks).take(SHOWN_MAX).collect();
            Err(Breach(format!("it answered groups of {groups:?} tasks, expected {expected} in all")))
        }
    }
}

/// What a program claims to be a datatype.
pub(super) fn shown_datatype(found: &Placed) -> String {
    found.datatype.chars().take(16).flat_map(char::escape_debug).collect()
}

/// What it claims to be a shape.
pub(super) fn shown(shape: &[u64]) -> &[u64] {
    &shape[..shape.len().min(SHOWN_MAX)]
}

/// Bytes of one task's elements, at most.
pub(super) fn bytes_max(tensor: &Tensor) -> usize {
    tensor.variable.as_ref().map_or_else(|| tensor.bytes(), |variable| variable.bytes_max)
}

fn task_bytes(tensors: &[Tensor]) -> usize {
    tensors.iter().map(Tensor::bytes).sum()
}

pub(super) fn aligned(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ALIGNMENT_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use repository::DataType;

    fn model(inputs: &[usize], outputs: &[usize]) -> Model {
        let tensors = |elements: &[usize]| {
            let tensor = |(at, &count): (usize, &usize)| Tensor::new(format!("t{at}"), DataType::Int16, vec![count]);
            elements.iter().enumerate().map(tensor).collect()
        };
        super::super::tests::model(tensors(inputs), tensors(outputs), 8)
    }

    proptest! {
        /// A program that answers with its inputs as they lie there, in groups of its own, of which it fails some.
        #[test]
        fn what_a_program_copies_comes_back_as_it_went(
            tensors in proptest::collection::vec(1..5usize, 1..4),
            groups in proptest::collection::vec((1..4usize, any::<bool>()), 1..3),
            seed: u8,
        ) {
            let model = model(&tensors, &tensors);
            let layout = Layout::new(&model);
            let mut memory = vec![0; usize::try_from(layout.memory_bytes()).unwrap()];
            let tasks: usize = groups.iter().map(|(tasks, _)| tasks).sum();
            let inputs: Vec<u8> = (0..tasks * model.input_bytes())
                .map(|at| (at as u8).wrapping_mul(7) ^ seed).collect();
            let placement = layout.place(&inputs, |offset, bytes| {
                memory[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok::<(), Breach>(())
            }).unwrap();
            let [Group { tasks: told, inputs: placed }] = &placement.groups[..] else { panic!("{placement:?}") };
            prop_assert_eq!(*told, tasks);
            let area = layout.output_area.offset;
            let (mut answers, mut first, mut expected, mut failing) = (vec![], 0, inputs.clone(), vec![]);
            for &(tasks, fails) in &groups {
                let rows = placed.iter().zip(&model.inputs).map(|(placed, tensor)| {
                    let placed = placed.clone().unwrap();
                    let (offset, bytes) = (placed.offset + (first * tensor.bytes()) as u64, tasks * tensor.bytes());
                    let from = offset as usize..offset as usize + bytes;
                    memory.copy_within(from, (area + offset) as usize);
                    let shape = vec![tasks as u64, tensor.shape[0] as u64];
                    Placed { shape, offset: area + offset, bytes: bytes as u64, ..placed }
                });
                let outputs = if fails { vec![] } else { rows.collect() };
                answers.push(Answered { tasks, outputs, failed: fails.then(|| "odd".to_owned()) });
                if fails {
                    failing.extend((first..first + tasks).map(|task| (task, "odd".to_owned())));
                    expected[first * model.input_bytes()..][..tasks * model.input_bytes()].fill(0);
                }
                first += tasks;
            }
            let mut outputs = vec![0; inputs.len()];
            let failed = layout.take(placement, &answers, &mut outputs, |offset, bytes| {
                bytes.copy_from_slice(&memory[offset as usize..][..bytes.len()]);
                Ok::<(), Breach>(())
            }).unwrap();
            prop_assert_eq!((outputs, failed), (expected, failing));
        }
    }

    #[test]
    fn a_tensor_is_whole_for_all_tasks_and_aligned() {
        let layout = Layout::new(&model(&[1, 2], &[1]));
        let inputs = [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0];
        let mut written = Vec::new();
        let placement = layout.place(&inputs, |offset, bytes| {
            written.push((offset, bytes.to_vec()));
            Ok::<(), Breach>(())
        });
        assert_eq!(written, [(0, vec![1, 0, 4, 0]), (64, vec![2, 0, 3, 0, 5, 0, 6, 0])]);
        let second = Placed { datatype: "INT16".into(), shape: vec![2, 2], offset: 64, bytes: 8 };
        assert_eq!(placement.unwrap().groups[0].inputs[1], Some(second));
        assert_eq!(layout.output_area, Area { offset: 128, bytes: 64 });
    }

    #[test]
    fn outputs_that_are_none_or_lie_elsewhere_are_refused_unread() {
        let layout = Layout::new(&model(&[1], &[3]));
        let good = Placed { datatype: "INT16".into(), shape: vec![2, 3], offset: 64, bytes: 12 };
        let answer = |answers: &[Answered]| {
            let mut reads = 0;
            let result = layout.take(Placement::default(), answers, &mut [0; 12], |_, _| {
                reads += 1;
                Ok::<(), Breach>(())
            });
            assert_eq!(reads, usize::from(result.is_ok()));
            result.map(drop).map_err(|Breach(text)| text)
        };
        let whole = |outputs: Vec<Placed>| Answered { tasks: 2, outputs, failed: None };
        assert_eq!(answer(&[whole(vec![good.clone()])]), Ok(()));
        let cases = [
            (vec![], "0 outputs, expected 1"),
            (vec![good.clone(), good.clone()], "2 outputs, expected 1"),
            (vec![Placed { datatype: "FP16".into(), ..good.clone() }], "is FP16 [2, 3], expected INT16 [2, 3]"),
            (vec![Placed { shape: vec![1, 3], ..good.clone() }], "is INT16 [1, 3], expected INT16 [2, 3]"),
            (vec![Placed { bytes: 11, ..good.clone() }], "has 11 bytes at 64, expected 12 in the 64 bytes at 64"),
            (vec![Placed { offset: 63, ..good.clone() }], "has 12 bytes at 63, expected 12"),
            (vec![Placed { offset: 117, ..good.clone() }], "has 12 bytes at 117"),
            (vec![Placed { offset: u64::MAX - 5, ..good.clone() }], "expected 12 in the 64 bytes at 64"),
        ];
        for (placed, expected) in cases {
            let found = answer(&[whole(placed)]).unwrap_err();
            assert!(found.contains(expected), "`{found}`, `{expected}`");
        }
        let of = |tasks: usize| Answered { tasks, outputs: vec![], failed: Some("odd".into()) };
        for (tasks, expected) in [
            (vec![], "groups of [] tasks, expected 2 in all"),
            (vec![of(1)], "groups of [1] tasks, expected 2"),
            (vec![of(2), of(0)], "groups of [2, 0] tasks"),
            (vec![of(2), of(1)], "groups of [2, 1] tasks"),
            (vec![of(3), of(usize::MAX)], "tasks, expected 2 in all"),
        ] {
            let found = answer(&tasks).unwrap_err();
            assert!(found.contains(expected), "`{found}`, `{expected}`");
        }
    }
}
