//! Batches of tasks whose tensors differ in size ([`repository::cell`]), in the memory that a backend shares with a
//! program: tasks of the same shapes are a group, and what each is given comes back to its own place. What a client has
//! sent or a model has computed fails its own tasks; a program that gives something else than it says breaks the
//! protocol.

use std::collections::BTreeMap;

use proto::backend_to_program::{Answered, Breach, Group, Placed};
use repository::{
    DataType, Tensor,
    cell::{self, Cell},
    elements,
};

use super::layout::{Layout, Placement, aligned, check_tasks, shown, shown_datatype};

/// A task's place in the batch, and its inputs.
type Task<'a> = (usize, Vec<Option<Cell<'a>>>);

/// One output of several tasks.
struct Column {
    /// Of one task, as clients have it.
    shape: Vec<usize>,
    data: Vec<u8>,
    /// Where each task's elements end.
    ends: Vec<usize>,
}

/// Why tasks have no outputs.
enum Wrong<E> {
    /// It is theirs.
    Tasks(String),
    /// It is the program's.
    Program(E),
}

impl<E: From<Breach>> From<Breach> for Wrong<E> {
    fn from(breach: Breach) -> Self {
        Self::Program(breach.into())
    }
}

impl Layout {
    /// [`Layout::place`] of records.
    pub(super) fn place_records<E>(
        &self,
        mut inputs: &[u8],
        mut write: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<Placement, E> {
        let mut placement = Placement::default();
        let mut groups: BTreeMap<Vec<Option<Vec<usize>>>, Vec<Task<'_>>> = BTreeMap::new();
        let mut place = 0;
        while let Some((task, rest)) = cell::split_first(&self.inputs, inputs) {
            inputs = rest;
            match cell::read(&self.inputs, task) {
                Ok(cells) => {
                    let shapes = cells.iter().map(|cell| cell.as_ref().map(|cell| cell.shape.clone())).collect();
                    groups.entry(shapes).or_default().push((place, cells));
                }
                Err(error) => placement.refused.push((place, error.to_string())),
            }
            place += 1;
        }
        let mut offset = 0;
        for group in groups.values() {
            for group in group.chunks(if self.is_batched { group.len() } else { 1 }) {
                let inputs = self.place_group(group, &mut offset, &mut write)?;
                placement.groups.push(Group { tasks: group.len(), inputs });
                placement.places.extend(group.iter().map(|(place, _)| *place));
            }
        }
        Ok(placement)
    }

    fn place_group<E>(
        &self,
        group: &[Task<'_>],
        offset: &mut u64,
        write: &mut impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<Vec<Option<Placed>>, E> {
        let mut placed = Vec::with_capacity(self.inputs.len());
        let mut gathered = Vec::new();
        for (index, tensor) in self.inputs.iter().enumerate() {
            let Some(first) = &group[0].1[index] else {
                placed.push(None);
                continue;
            };
            gathered.clear();
            let cells = group.iter().filter_map(|(_, cells)| cells[index].as_ref());
            cells.for_each(|cell| gathered.extend_from_slice(cell.data));
            write(*offset, &gathered)?;
            let shape = self.shape(&tensor.model_shape_of(&first.shape), group.len());
            let (datatype, bytes) = (tensor.datatype.name().into(), gathered.len() as u64);
            placed.push(Some(Placed { datatype, shape, offset: *offset, bytes }));
            *offset += aligned(gathered.len());
        }
        Ok(placed)
    }

    /// [`Layout::take`] of records.
    pub(super) fn take_records<E: From<Breach>>(
        &self,
        placement: Placement,
        answers: &[Answered],
        outputs: &mut [u8],
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Vec<(usize, String)>, E> {
        let Placement { places, refused: mut failed, .. } = placement;
        check_tasks(answers, places.len())?;
        let mut places = &places[..];
        for answer in answers {
            let places = places.split_off(..answer.tasks).expect("they are as many as the tasks");
            let columns = match &answer.failed {
                Some(reason) => Err(Wrong::Tasks(reason.clone())),
                None => self.columns(answer, &mut read),
            };
            match columns {
                Ok(columns) => failed.extend(self.write_rows(places, &columns, outputs)),
                Err(Wrong::Tasks(reason)) => failed.extend(places.iter().map(|&place| (place, reason.clone()))),
                Err(Wrong::Program(error)) => return Err(error),
            }
        }
        failed.sort_unstable();
        Ok(failed)
    }

    /// The outputs of some tasks, none of them read before it is known to be one.
    fn columns<E: From<Breach>>(
        &self,
        answer: &Answered,
        read: &mut impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Vec<Column>, Wrong<E>> {
        self.check_count(&answer.outputs)?;
        let mut columns = Vec::with_capacity(self.outputs.len());
        for (tensor, placed) in self.outputs.iter().zip(&answer.outputs) {
            if placed.datatype != tensor.datatype.name() {
                let (name, found, expected) = (&tensor.name, shown_datatype(placed), tensor.datatype);
                return Err(Breach(format!("output {name} is {found}, expected {expected}")).into());
            }
            let shape = self.task_shape(tensor, placed, answer.tasks).map_err(Wrong::Tasks)?;
            let each = elements(&shape).expect("the tensor accepts it");
            let bytes = each * tensor.datatype.bytes();
            let is_number = tensor.datatype != DataType::Bytes;
            self.check_place(tensor, placed, is_number.then_some(bytes * answer.tasks))?;
            let mut data = vec![0; placed.bytes as usize];
            read(placed.offset, &mut data).map_err(Wrong::Program)?;
            let ends = match is_number {
                true => (1..=answer.tasks).map(|task| task * bytes).collect(),
                false => string_ends(&data, answer.tasks, each).ok_or_else(|| {
                    let (name, found, expected) = (&tensor.name, data.len(), each * answer.tasks);
                    Breach(format!(
                        "output {name} has {found} bytes that are not {expected} strings, each after its length"
                    ))
                })?,
            };
            columns.push(Column { shape, data, ends });
        }
        Ok(columns)
    }

    /// The shape of one task's output; why it is none of the tensor's.
    fn task_shape(&self, tensor: &Tensor, placed: &Placed, tasks: usize) -> Result<Vec<usize>, String> {
        let of_task = match &placed.shape[..] {
            [first, rest @ ..] if self.is_batched && *first == tasks as u64 => Some(rest),
            _ if self.is_batched => None,
            whole => Some(whole),
        };
        let lengths = of_task.and_then(|shape| shape.iter().map(|&length| usize::try_from(length).ok()).collect());
        lengths.and_then(|shape: Vec<usize>| tensor.client_shape_of(&shape)).ok_or_else(|| {
            let dims: Vec<String> = tensor.dims().map(|dim| dim.to_string()).collect();
            let batch = if self.is_batched { format!("{tasks}, ") } else { String::new() };
            let (name, found, bytes) = (&tensor.name, shown(&placed.shape), tensor.bytes());
            let expected = format!("[{batch}{}] within {bytes} bytes a task (max_dims, max_bytes)", dims.join(", "));
            format!("output {name} has shape {found:?}, expected {expected}")
        })
    }

    /// Puts each task's outputs into its room; yields those that have none for theirs.
    fn write_rows(&self, places: &[usize], columns: &[Column], outputs: &mut [u8]) -> Vec<(usize, String)> {
        let room = cell::bytes_max(&self.outputs);
        let mut failed = Vec::new();
        for (row, &place) in places.iter().enumerate() {
            let cells = columns.iter().map(|Column { shape, data, ends }| {
                let begin = if row == 0 { 0 } else { ends[row - 1] };
                Some(Cell { shape: shape.clone(), data: &data[begin..ends[row]] })
            });
            let cells: Vec<Option<Cell<'_>>> = cells.collect();
            if let Err(error) = cell::write(&self.outputs, &cells, &mut outputs[place * room..][..room]) {
                failed.push((place, format!("{error} (max_dims, max_bytes)")));
            }
        }
        failed
    }
}

/// Where each task's strings end, of which each has so many; nothing if the bytes are not just these.
fn string_ends(data: &[u8], tasks: usize, each: usize) -> Option<Vec<usize>> {
    let mut strings = cell::strings(data);
    let (mut at, mut ends) = (0, Vec::with_capacity(tasks));
    for _ in 0..tasks {
        for _ in 0..each {
            at += cell::HEAD_BYTES + strings.next()??.len();
        }
        ends.push(at);
    }
    (at == data.len()).then_some(ends)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use repository::Variable;

    fn variable(name: &str, datatype: DataType, longest: usize, is_optional: bool) -> Tensor {
        let variable = Variable { dims: vec![0], reshape_dims: vec![], bytes_max: 100, is_optional, any_rank: false };
        Tensor { variable: Some(variable), ..Tensor::new(name, datatype, vec![longest]) }
    }

    fn tensors() -> Vec<Tensor> {
        vec![
            variable("text", DataType::Bytes, 3, false),
            Tensor::new("fixed", DataType::Uint8, vec![2]),
            variable("mask", DataType::Int16, 9, true),
        ]
    }

    fn layout(inputs: Vec<Tensor>, outputs: Vec<Tensor>) -> Layout {
        Layout::new(&super::super::tests::model(inputs, outputs, 8))
    }

    fn encoded(strings: &[Vec<u8>]) -> Vec<u8> {
        strings.iter().flat_map(|string| [&(string.len() as u32).to_le_bytes()[..], string].concat()).collect()
    }

    fn record(tensors: &[Tensor], cells: &[Option<Cell<'_>>]) -> Vec<u8> {
        let mut record = vec![0; cell::bytes_max(tensors)];
        let bytes = cell::write(tensors, cells, &mut record).unwrap();
        record.truncate(bytes);
        record
    }

    proptest! {
        /// A program that gives what it is given, in groups of its own: every task has its own inputs then, whichever
        /// others were in the batch. One that was left out is given without an element.
        #[test]
        fn every_task_has_what_it_was_given(
            batch in proptest::collection::vec((
                proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..8), 0..=3),
                any::<[u8; 2]>(),
                proptest::option::of(0usize..=9),
            ), 1..=8),
            of_one: bool,
        ) {
            let tensors = tensors();
            let layout = layout(tensors.clone(), tensors.clone());
            let mut memory = vec![0; usize::try_from(layout.memory_bytes()).unwrap()];
            let (mut inputs, mut expected) = (Vec::new(), Vec::new());
            for (index, (strings, fixed, mask)) in batch.iter().enumerate() {
                let text = encoded(strings);
                let data: Vec<u8> = vec![index as u8; 2 * mask.unwrap_or(0)];
                let mut cells = [
                    Some(Cell { shape: vec![strings.len()], data: &text }),
                    Some(Cell { shape: vec![2], data: fixed }),
                    mask.map(|length| Cell { shape: vec![length], data: &data }),
                ];
                inputs.extend(record(&tensors, &cells));
                cells[2].get_or_insert(Cell { shape: vec![0], data: &[] });
                expected.push(record(&tensors, &cells));
            }
            let placement = layout.place(&inputs, |offset, bytes| {
                memory[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok::<(), Breach>(())
            }).unwrap();
            let shapes: std::collections::BTreeSet<_> =
                batch.iter().map(|(strings, _, mask)| (strings.len(), *mask)).collect();
            prop_assert_eq!(placement.groups.len(), shapes.len());
            let mut at = layout.output_area.offset;
            let mut answers = Vec::new();
            for group in &placement.groups {
                let mut outputs = Vec::new();
                for (tensor, placed) in tensors.iter().zip(&group.inputs) {
                    let (datatype, shape) = (tensor.datatype.name().into(), vec![group.tasks as u64, 0]);
                    let nothing = Placed { datatype, shape, offset: 0, bytes: 0 };
                    let placed = placed.clone().unwrap_or(nothing);
                    prop_assert_eq!(placed.offset % 64, 0);
                    memory.copy_within(placed.offset as usize..(placed.offset + placed.bytes) as usize, at as usize);
                    outputs.push(Placed { offset: at, ..placed });
                    at += outputs.last().unwrap().bytes;
                }
                // Of one task each, where they can be taken apart without reading.
                let apart = of_one && group.tasks > 1 && outputs[0].bytes == 0;
                for task in 0..if apart { group.tasks } else { 1 } {
                    let tasks = if apart { 1 } else { group.tasks };
                    let outputs = outputs.iter().map(|placed| {
                        let bytes = placed.bytes / group.tasks as u64;
                        let shape = [&[tasks as u64], &placed.shape[1..]].concat();
                        let offset = placed.offset + bytes * task as u64;
                        let bytes = if apart { bytes } else { placed.bytes };
                        Placed { shape, offset, bytes, ..placed.clone() }
                    });
                    answers.push(Answered { tasks, outputs: outputs.collect(), failed: None });
                }
            }
            let room = cell::bytes_max(&tensors);
            let mut outputs = vec![0; batch.len() * room];
            let failed = layout.take(placement, &answers, &mut outputs, |offset, bytes| {
                bytes.copy_from_slice(&memory[offset as usize..][..bytes.len()]);
                Ok::<(), Breach>(())
            }).unwrap();
            prop_assert_eq!(failed, vec![]);
            for (room, expected) in outputs.chunks_exact(room).zip(&expected) {
                prop_assert_eq!(&room[..cell::record_bytes(room).unwrap()], &expected[..]);
            }
        }
    }

    /// Two tasks that are given nothing of note, and a program that has written `memory` into its area.
    fn answer(outputs: Vec<Tensor>, memory: &[u8], answers: &[Answered]) -> Result<Vec<(usize, String)>, String> {
        let layout = layout(vec![Tensor::new("x", DataType::Uint8, vec![1])], outputs);
        let placement = layout.place(&[1, 2], |_, _| Ok::<(), Breach>(())).unwrap();
        let mut outputs = vec![0; 2 * cell::bytes_max(&layout.outputs)];
        let area = layout.output_area.offset as usize;
        let taken = layout.take(placement, answers, &mut outputs, |offset, bytes| {
            let written = memory[offset as usize - area..].iter().chain(std::iter::repeat(&0));
            bytes.iter_mut().zip(written).for_each(|(byte, &written)| *byte = written);
            Ok::<(), Breach>(())
        });
        taken.map_err(|Breach(text)| text)
    }

    /// The area begins behind eight inputs, each at a multiple of 64.
    const AREA: u64 = 8 * 64;

    fn placed(shape: &[u64], bytes: u64) -> Placed {
        Placed { datatype: "BYTES".into(), shape: shape.to_vec(), offset: AREA, bytes }
    }

    #[test]
    fn a_program_that_lies_about_outputs_breaks_the_protocol() {
        let text = || vec![variable("text", DataType::Bytes, 3, false)];
        let whole = |placed: Placed| [Answered { tasks: 2, outputs: vec![placed], failed: None }];
        let two = [1, 0, 0, 0, 7, 0, 0, 0, 0];
        assert_eq!(answer(text(), &two, &whole(placed(&[2, 1], 9))), Ok(vec![]));
        let cases = [
            (placed(&[2, 1], 8), "has 8 bytes that are not 2 strings, each after its length"),
            (placed(&[2, 1], 5), "has 5 bytes that are not 2 strings"),
            (placed(&[2, 0], 9), "has 9 bytes that are not 0 strings"),
            (placed(&[2, 2], 9), "has 9 bytes that are not 4 strings"),
            (placed(&[2, 1], 1 << 40), "has 1099511627776 bytes at 512, expected in the 1024 bytes at 512"),
            (Placed { offset: 0, ..placed(&[2, 1], 9) }, "has 9 bytes at 0, expected in the"),
            (Placed { datatype: "FP32".into(), ..placed(&[2, 1], 9) }, "output text is FP32, expected BYTES"),
        ];
        for (placed, expected) in cases {
            let found = answer(text(), &two, &whole(placed)).unwrap_err();
            assert!(found.contains(expected), "`{found}`, `{expected}`");
        }
        let number = || vec![variable("ids", DataType::Int16, 9, false)];
        let ids = |bytes: u64| whole(Placed { datatype: "INT16".into(), ..placed(&[2, 3], bytes) });
        assert_eq!(answer(number(), &[0; 12], &ids(12)), Ok(vec![]));
        let found = answer(number(), &[0; 12], &ids(11)).unwrap_err();
        assert!(found.contains("has 11 bytes at 512, expected 12 in the"), "{found}");
        let found = answer(number(), &[0; 12], &ids(12)[..0]).unwrap_err();
        assert!(found.contains("expected 2 in all"), "{found}");
    }

    /// What a model computes is up to what clients send.
    #[test]
    fn outputs_without_room_fail_their_tasks_alone() {
        let text = || vec![variable("text", DataType::Bytes, 3, false)];
        let one = |shape: &[u64], bytes: u64| Answered { tasks: 1, outputs: vec![placed(shape, bytes)], failed: None };
        let mut long = vec![97, 0, 0, 0];
        long.resize(101, 0);
        for (first, expected) in [
            (one(&[1, 4], 16), "output text has shape [1, 4], expected [1, -1] within 108 bytes a task (max_dims,"),
            (one(&[1], 4), "output text has shape [1], expected [1, -1]"),
            (one(&[u64::MAX, 1], 4), "output text has shape [18446744073709551615, 1], expected [1, -1]"),
            (one(&[1, 1], 101), "tensor 'text': found 101 bytes, expected at most 100 (max_dims, max_bytes)"),
            (Answered { tasks: 1, outputs: vec![], failed: Some("odd".into()) }, "odd"),
        ] {
            let failed = answer(text(), &long, &[first, one(&[1, 0], 0)]).unwrap();
            let [(0, reason)] = &failed[..] else { panic!("{failed:?}") };
            assert!(reason.starts_with(expected), "`{reason}`, `{expected}`");
        }
    }

    #[test]
    fn tasks_that_cannot_be_read_never_reach_the_program() {
        let tensors = [variable("x", DataType::Int16, 9, false)];
        let layout = layout(tensors.to_vec(), vec![Tensor::new("y", DataType::Uint8, vec![1])]);
        let good = record(&tensors, &[Some(Cell { shape: vec![1], data: &[1, 2] })]);
        let mut torn = good.clone();
        torn[4] = 9;
        let place = |batch: &[&[u8]]| layout.place(&batch.concat(), |_, _| Ok::<(), Breach>(())).unwrap();
        let placement = place(&[&torn, &good, &torn]);
        assert_eq!((placement.groups.len(), &placement.places[..]), (1, &[1][..]));
        let offset = layout.output_area.offset;
        let outputs = vec![Placed { datatype: "UINT8".into(), shape: vec![1, 1], offset, bytes: 1 }];
        let answers = [Answered { tasks: 1, outputs, failed: None }];
        let mut outputs = [0; 3];
        let failed = layout.take(placement, &answers, &mut outputs, |_, bytes| {
            bytes.fill(7);
            Ok::<(), Breach>(())
        });
        let failed: Vec<usize> = failed.unwrap().into_iter().map(|(task, _)| task).collect();
        assert_eq!((failed, outputs), (vec![0, 2], [0, 7, 0]));
        assert!(place(&[&torn]).groups.is_empty());
    }
}
