//! How a task's tensors lie in memory where their sizes differ from request to request.
//!
//! If every tensor of a side (inputs, or outputs) has the same size in all requests, they lie one after another and
//! nothing else does. If any has not ([`Tensor::variable`]), they are a *record*. All numbers are little-endian.
//!
//! ```text
//! record   u32 bytes of the record, these four and all that follows included
//!          each tensor in the order of the configuration: its elements if its size is fixed, or else a cell
//!          zeros, any number of them
//! cell     u32 bytes of the elements, or ABSENT for an optional tensor that is left out, after which nothing follows
//!          u32 how many dimensions follow, if the tensor may have any number of them
//!          u32 for each dimension of the shape, the batch dimension left out
//!          the elements in row-major order; each string (BYTES) after its length as a u32, as Triton has them
//! ```
//!
//! Whoever reads a record trusts nothing in it: shapes must be the tensor's, lengths must be those of the shape, and
//! all within the record.

use thiserror::Error;

use crate::tensor::{DataType, RANK_MAX, Tensor, elements};

/// Bytes of the length before a record, a cell's elements, and a string.
pub const HEAD_BYTES: usize = size_of::<u32>();
/// Bytes of a dimension in a cell.
pub const DIM_BYTES: usize = size_of::<u32>();
/// What stands in place of a cell's length if an optional tensor is left out.
pub const ABSENT: u32 = u32::MAX;
/// Records in slots are a multiple of this long.
pub const ALIGNMENT: usize = 8;

/// Why bytes are not what a model's tensors can be, in one line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct CellError(String);

/// A tensor of one task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell<'a> {
    /// Its shape, the batch dimension left out.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: &'a [u8],
}

/// Whether these tensors are a record in memory.
#[must_use]
pub fn is_record(tensors: &[Tensor]) -> bool {
    tensors.iter().any(|tensor| tensor.variable.is_some())
}

/// Bytes that these tensors of one task take up, at most.
#[must_use]
pub fn bytes_max(tensors: &[Tensor]) -> usize {
    let bytes: usize = tensors.iter().map(Tensor::bytes).sum();
    if is_record(tensors) { (HEAD_BYTES + bytes).next_multiple_of(ALIGNMENT) } else { bytes }
}

/// Takes the first task's bytes off those of several, one after another; nothing if they end within it.
#[must_use]
pub fn split_first<'a>(tensors: &[Tensor], bytes: &'a [u8]) -> Option<(&'a [u8], &'a [u8])> {
    match is_record(tensors) {
        true => bytes.split_at_checked(record_bytes(bytes)?),
        false => bytes.split_at_checked(bytes_max(tensors)),
    }
}

/// What a record says of its own length; nothing if that is less than it takes to say it.
#[must_use]
pub fn record_bytes(record: &[u8]) -> Option<usize> {
    let (head, _) = record.split_first_chunk()?;
    Some(u32::from_le_bytes(*head) as usize).filter(|&bytes| bytes >= HEAD_BYTES)
}

/// Makes a record say that it is as long as it is.
///
/// # Panics
/// If it has no room to say so: our own bug.
pub fn set_record_bytes(record: &mut [u8]) {
    let length = (record.len() as u32).to_le_bytes();
    record[..HEAD_BYTES].copy_from_slice(&length);
}

/// The tensors of one task in the order of the configuration; nothing for an optional one that is left out.
///
/// # Errors
/// If the bytes are not what these tensors can be; which tensor, what was found and what was expected.
pub fn read<'a>(tensors: &[Tensor], task: &'a [u8]) -> Result<Vec<Option<Cell<'a>>>, CellError> {
    let mut reader = Reader(task);
    if is_record(tensors) {
        let found = reader.number().unwrap_or_default();
        if found as usize != task.len() {
            return Err(CellError(format!("a record says that it has {found} bytes, expected {}", task.len())));
        }
    }
    tensors.iter().map(|tensor| reader.tensor(tensor)).collect()
}

/// Writes the tensors of one task; yields how many bytes of `into` they take up.
///
/// # Errors
/// If these are not what the tensors can be, or have no room.
pub fn write(tensors: &[Tensor], cells: &[Option<Cell<'_>>], into: &mut [u8]) -> Result<usize, CellError> {
    let mut bytes = Vec::with_capacity(into.len().min(1 << 16));
    let is_record = is_record(tensors);
    if is_record {
        bytes.extend_from_slice(&[0; HEAD_BYTES]);
    }
    for (tensor, cell) in tensors.iter().zip(cells) {
        match cell {
            Some(Cell { shape, data }) => {
                check(tensor, shape, data)?;
                push_head(tensor, Some((shape, data.len())), &mut bytes);
                bytes.extend_from_slice(data);
            }
            None if tensor.is_optional() => push_head(tensor, None, &mut bytes),
            None => return Err(CellError(format!("tensor '{}': found none, expected it", tensor.name))),
        }
    }
    let room = into.len();
    let place = into.get_mut(..bytes.len());
    let place = place.ok_or_else(|| CellError(format!("found {} bytes, expected at most {room}", bytes.len())))?;
    if is_record {
        set_record_bytes(&mut bytes);
    }
    place.copy_from_slice(&bytes);
    Ok(bytes.len())
}

/// Appends what stands before a tensor's elements in a record: its cell's head if it is one. `cell` is the shape and
/// the bytes of the elements, if the tensor is not left out.
pub fn push_head(tensor: &Tensor, cell: Option<(&[usize], usize)>, record: &mut Vec<u8>) {
    if tensor.variable.is_none() {
        return;
    }
    let Some((shape, bytes)) = cell else { return record.extend_from_slice(&ABSENT.to_le_bytes()) };
    record.extend_from_slice(&(bytes as u32).to_le_bytes());
    if has_any_rank(tensor) {
        record.extend_from_slice(&(shape.len() as u32).to_le_bytes());
    }
    shape.iter().for_each(|&length| record.extend_from_slice(&(length as u32).to_le_bytes()));
}

/// One task's inputs, to measure with: zeros, and strings that say `0` if there is room. Dimensions that requests
/// choose are equal in all tensors, as many models want, and as long as each of them may be, but `length_max` at most;
/// outputs of those lengths have room, too.
#[must_use]
pub fn sample(inputs: &[Tensor], outputs: &[Tensor], length_max: usize) -> Vec<u8> {
    let fit = |&length: &usize| sample_of(inputs, outputs, (length, length));
    (1..=length_max).rev().find_map(|length| fit(&length)).or_else(|| fit(&0)).unwrap_or_default()
}

/// The same with so many rows, in tensors of several dimensions whose first is a request's choice, and with all other
/// dimensions just so long; `None` if that has no room.
#[must_use]
pub fn sample_of(inputs: &[Tensor], outputs: &[Tensor], (rows, length): (usize, usize)) -> Option<Vec<u8>> {
    const STRING: &[u8] = b"\x01\0\0\x000";
    let shape_of = |tensor: &Tensor| {
        let mut shape = tensor.shape.clone();
        let is_rows = |dim: usize| dim == 0 && tensor.shape.len() > 1;
        let chosen = tensor.variable.iter().flat_map(|variable| &variable.dims);
        chosen.for_each(|&dim| shape[dim] = if is_rows(dim) { rows } else { length });
        shape
    };
    if !inputs.iter().chain(outputs).all(|tensor| tensor.accepts(&shape_of(tensor))) {
        return None;
    }
    let data = inputs.iter().map(|tensor| {
        let elements = elements(&shape_of(tensor)).unwrap_or_default();
        let room = tensor.variable.as_ref().map_or(0, |variable| variable.bytes_max);
        match tensor.datatype {
            DataType::Bytes if elements * STRING.len() <= room => STRING.repeat(elements),
            datatype => vec![0; elements * datatype.bytes()],
        }
    });
    let data: Vec<Vec<u8>> = data.collect();
    let cells = inputs.iter().zip(&data).map(|(tensor, data)| Some(Cell { shape: shape_of(tensor), data }));
    let mut sample = vec![0; bytes_max(inputs)];
    let bytes = write(inputs, &cells.collect::<Vec<_>>(), &mut sample).expect("these are shapes that they accept");
    sample.truncate(bytes);
    Some(sample)
}

fn has_any_rank(tensor: &Tensor) -> bool {
    tensor.variable.as_ref().is_some_and(|variable| variable.any_rank)
}

/// Checks elements of a tensor against its shape.
fn check(tensor: &Tensor, shape: &[usize], data: &[u8]) -> Result<(), CellError> {
    let wrong = |found: String, expected: String| {
        CellError(format!("tensor '{}': found {found}, expected {expected}", tensor.name))
    };
    let bytes_max = tensor.variable.as_ref().map_or(usize::MAX, |variable| variable.bytes_max);
    if !tensor.accepts(shape) {
        let dims: Vec<String> = tensor.dims().map(|dim| dim.to_string()).collect();
        let bound = if tensor.variable.is_some() { format!(" within {bytes_max} bytes") } else { String::new() };
        return Err(wrong(format!("shape {shape:?}"), format!("[{}]{bound}", dims.join(", "))));
    }
    let elements = elements(shape).unwrap_or(usize::MAX);
    if data.len() > bytes_max {
        return Err(wrong(format!("{} bytes", data.len()), format!("at most {bytes_max}")));
    }
    if tensor.datatype == DataType::Bytes {
        let found = strings(data).try_fold(0, |count, string| string.map(|_| count + 1));
        return match found {
            Some(found) if found == elements => Ok(()),
            Some(found) => Err(wrong(format!("{found} strings"), elements.to_string())),
            None => {
                Err(wrong("a string that is longer than what is left".to_owned(), "lengths that are true".to_owned()))
            }
        };
    }
    let expected = elements * tensor.datatype.bytes();
    if data.len() != expected {
        return Err(wrong(format!("{} bytes", data.len()), format!("{expected} for shape {shape:?}")));
    }
    Ok(())
}

/// The elements of a tensor of strings, each without the length before it; `None` in place of the first that is not all
/// there, after which nothing follows.
pub fn strings(data: &[u8]) -> impl Iterator<Item = Option<&[u8]>> {
    let mut reader = Reader(data);
    std::iter::from_fn(move || {
        if reader.0.is_empty() {
            return None;
        }
        let string = reader.number().and_then(|length| reader.take(length as usize));
        if string.is_none() {
            reader.0 = &[];
        }
        Some(string)
    })
}

/// What is left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        self.0.split_off(..bytes)
    }

    fn number(&mut self) -> Option<u32> {
        self.0.split_off(..HEAD_BYTES).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    fn tensor(&mut self, tensor: &Tensor) -> Result<Option<Cell<'a>>, CellError> {
        let torn = || CellError(format!("tensor '{}': found the end of the record, expected all of it", tensor.name));
        if tensor.variable.is_none() {
            let data = self.take(tensor.bytes()).ok_or_else(torn)?;
            return Ok(Some(Cell { shape: tensor.shape.clone(), data }));
        }
        let bytes = self.number().ok_or_else(torn)?;
        if bytes == ABSENT {
            return match tensor.is_optional() {
                true => Ok(None),
                false => Err(CellError(format!("tensor '{}': found none, expected it", tensor.name))),
            };
        }
        let rank = if has_any_rank(tensor) { self.number().ok_or_else(torn)? as usize } else { tensor.shape.len() };
        if rank > RANK_MAX.max(tensor.shape.len()) {
            return Err(CellError(format!(
                "tensor '{}': found {rank} dimensions, expected at most {RANK_MAX}",
                tensor.name
            )));
        }
        let dims = (0..rank).map(|_| self.number().map(|length| length as usize));
        let shape: Vec<usize> = dims.collect::<Option<_>>().ok_or_else(torn)?;
        let data = self.take(bytes as usize).ok_or_else(torn)?;
        check(tensor, &shape, data)?;
        Ok(Some(Cell { shape, data }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Variable;
    use proptest::prelude::*;

    #[test]
    fn a_tensor_of_any_rank_keeps_its_shape() {
        let mut tensors = [variable("y", DataType::Int16, vec![1, 50], false)];
        tensors[0].variable.as_mut().unwrap().any_rank = true;
        for shape in [&[4, 1, 5][..], &[100], &[], &[0, 3]] {
            let data = vec![7; shape.iter().product::<usize>() * 2];
            let mut record = vec![0; bytes_max(&tensors)];
            let cell = Cell { shape: shape.to_vec(), data: &data };
            let bytes = write(&tensors, &[Some(cell.clone())], &mut record).unwrap();
            assert_eq!(read(&tensors, &record[..bytes]).unwrap(), [Some(cell)]);
            assert_eq!(tensors[0].client_shape_of(shape), Some(shape.to_vec()));
        }
        for shape in [&[101][..], &[1; RANK_MAX + 1]] {
            assert!(!tensors[0].accepts(shape), "{shape:?}");
        }
        let lie = [16u32, 0, RANK_MAX as u32 + 1, 0].map(u32::to_le_bytes).concat();
        assert!(read(&tensors, &lie).unwrap_err().to_string().contains("17 dimensions, expected at most 16"));
    }

    fn variable(name: &str, datatype: DataType, shape: Vec<usize>, is_optional: bool) -> Tensor {
        let dims = if datatype == DataType::Bytes { vec![] } else { (0..shape.len()).collect() };
        let variable = Variable { dims, reshape_dims: vec![], bytes_max: 200, is_optional, any_rank: false };
        Tensor { variable: Some(variable), ..Tensor::new(name, datatype, shape) }
    }

    /// One of fixed size between two that are not, and one that may be left out.
    fn tensors() -> Vec<Tensor> {
        vec![
            variable("ids", DataType::Int16, vec![9, 4], false),
            Tensor::new("fixed", DataType::Uint8, vec![3]),
            variable("text", DataType::Bytes, vec![2], false),
            variable("mask", DataType::Uint8, vec![7], true),
        ]
    }

    fn text(strings: &[Vec<u8>]) -> Vec<u8> {
        strings.iter().flat_map(|string| [&(string.len() as u32).to_le_bytes()[..], string].concat()).collect()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            (rows, columns) in (0usize..=9, 0usize..=4),
            strings in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..90), 2),
            mask in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..=7)),
            padding in 0usize..20,
        ) {
            let (ids, text) = (vec![7; rows * columns * 2], text(&strings));
            let mask = mask.as_ref().map(|mask| Cell { shape: vec![mask.len()], data: mask });
            let cells = [
                Some(Cell { shape: vec![rows, columns], data: &ids }),
                Some(Cell { shape: vec![3], data: &[1, 2, 3] }),
                Some(Cell { shape: vec![2], data: &text }),
                mask,
            ];
            let tensors = tensors();
            let mut record = vec![0xaa; bytes_max(&tensors)];
            let bytes = write(&tensors, &cells, &mut record).unwrap();
            prop_assert_eq!(record_bytes(&record), Some(bytes));
            prop_assert_eq!(&read(&tensors, &record[..bytes]).unwrap()[..], &cells[..]);
            prop_assert_eq!(write(&tensors, &cells, &mut record[..bytes - 1]).is_err(), true, "no room");
            // Padded, with another record behind.
            let mut two = record[..bytes].to_vec();
            two.resize(bytes + padding, 0);
            two[..HEAD_BYTES].copy_from_slice(&((bytes + padding) as u32).to_le_bytes());
            two.extend_from_slice(&record[..bytes]);
            let (first, second) = split_first(&tensors, &two).unwrap();
            prop_assert_eq!(&read(&tensors, first).unwrap()[..], &cells[..]);
            prop_assert_eq!(second, &record[..bytes]);
            prop_assert!(split_first(&tensors, &two[..bytes + padding - 1]).is_none());
            let found: Vec<Option<&[u8]>> = super::strings(&text).collect();
            prop_assert_eq!(found, strings.iter().map(|string| Some(&string[..])).collect::<Vec<_>>());
        }

        #[test]
        fn no_bytes_panic_and_what_is_read_can_be_written(
            bytes in proptest::collection::vec(prop_oneof![4 => Just(0u8), 1 => 0u8..12, 1 => any::<u8>()], 4..120),
        ) {
            let (tensors, mut bytes) = (tensors(), bytes);
            let length = (bytes.len() as u32).to_le_bytes();
            bytes[..HEAD_BYTES].copy_from_slice(&length);
            if let Ok(cells) = read(&tensors, &bytes) {
                let mut again = vec![0; bytes_max(&tensors)];
                let written = write(&tensors, &cells, &mut again).unwrap();
                prop_assert_eq!(&again[HEAD_BYTES..written], &bytes[HEAD_BYTES..written]);
            }
        }
    }

    #[test]
    fn samples_have_one_length_for_all_that_requests_choose() {
        let lengths = |tensors: &[Tensor]| {
            let sample = sample(tensors, &[], 256);
            let cells = read(tensors, &sample).unwrap();
            cells.into_iter().map(|cell| cell.unwrap().shape).collect::<Vec<_>>()
        };
        assert_eq!(lengths(&tensors()), [vec![4, 4], vec![3], vec![2], vec![4]]);
        let large = variable("x", DataType::Uint8, vec![1000], false);
        let large = Tensor { variable: large.variable.map(|v| Variable { bytes_max: 1000, ..v }), ..large };
        assert_eq!(lengths(std::slice::from_ref(&large)), [[256]]);
        assert_eq!(sample(&[Tensor::new("y", DataType::Fp32, vec![2])], &[], 256), [0; 8]);
        // An output of eight bytes each has room for 25 only.
        let wide = variable("y", DataType::Int64, vec![1000], false);
        let sampled = sample(std::slice::from_ref(&large), &[wide], 256);
        assert_eq!(read(&[large], &sampled).unwrap()[0].as_ref().unwrap().shape, [25]);
        let text = variable("s", DataType::Bytes, vec![40], false);
        let sampled = sample(std::slice::from_ref(&text), &[], 256);
        let cells = read(std::slice::from_ref(&text), &sampled).unwrap();
        assert_eq!(super::strings(cells[0].as_ref().unwrap().data).collect::<Vec<_>>(), [Some(&b"0"[..]); 40]);
    }

    #[test]
    fn what_lies_is_named() {
        let tensors = [variable("x", DataType::Int16, vec![9], false), variable("s", DataType::Bytes, vec![1], false)];
        let record = |numbers: &[u32]| {
            let length = [(4 + 4 * numbers.len()) as u32];
            length.iter().chain(numbers).flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>()
        };
        let error = |numbers: &[u32]| read(&tensors, &record(numbers)).unwrap_err().to_string();
        assert!(read(&tensors, &record(&[4, 2, 7, 4, 1, 0])).is_ok());
        for (numbers, expected) in [
            (&[4, 2][..], "tensor 'x': found the end of the record, expected all of it"),
            (&[u32::MAX - 1, 2, 7], "tensor 'x': found the end of the record, expected all of it"),
            (&[ABSENT], "tensor 'x': found none, expected it"),
            (&[4, 3, 7, 4, 1, 0], "tensor 'x': found 4 bytes, expected 6 for shape [3]"),
            (&[4, 10, 7, 4, 1, 0], "tensor 'x': found shape [10], expected [-1] within 200 bytes"),
            (&[0, 0, 4, 1, 1], "tensor 's': found a string that is longer than what is left, expected lengths that"),
            (&[0, 0, 8, 1, 0, 0], "tensor 's': found 2 strings, expected 1"),
            (&[0, 0, 0, 1], "tensor 's': found 0 strings, expected 1"),
            (&[0, 0, 4, 2, 0], "tensor 's': found shape [2], expected [1] within 200 bytes"),
        ] {
            assert!(error(numbers).starts_with(expected), "{} instead of {expected}", error(numbers));
        }
        let mut short = record(&[4, 2, 7, 4, 1, 0]);
        short.pop();
        assert_eq!(read(&tensors, &short).unwrap_err().to_string(), "a record says that it has 28 bytes, expected 27");
        assert!(split_first(&tensors, &[3, 0, 0, 0, 0]).is_none(), "it would never end");
        let fixed = [Tensor::new("y", DataType::Fp32, vec![2])];
        assert_eq!((bytes_max(&fixed), split_first(&fixed, &[7; 9])), (8, Some((&[7; 8][..], &[7][..]))));
        assert_eq!(read(&fixed, &[7; 8]).unwrap()[0].as_ref().unwrap().shape, [2]);
    }
}
