//! Step 2 for models whose tensors differ in size between requests: a request's rows become records
//! ([`repository::cell`]), and records that came back become a reply's tensors. Elements are not copied on the way in.

use bytes::Bytes;
use repository::{
    DataType, Tensor,
    cell::{self, ALIGNMENT, HEAD_BYTES},
    elements,
};

use crate::rope::Rope;

/// One input of all rows.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    /// Of one row.
    pub(crate) shape: Vec<usize>,
    /// Of all rows, one after another.
    pub(crate) data: Rope,
}

/// The record of each row, all of the same length: neighbours are fetched together. Each tensor was checked against its
/// shape, as `ends` says: where each row's elements end.
///
/// # Errors
/// If a row's elements are more than its tensor may have; which tensor, the bytes, and the most.
pub(crate) fn pack(
    tensors: &[Tensor],
    rows: usize,
    given: Vec<Option<(Given, Vec<usize>)>>,
) -> Result<Vec<Rope>, (&Tensor, usize)> {
    let mut given: Vec<_> = given.into_iter().map(|given| given.map(|(given, ends)| (given, ends, 0))).collect();
    let mut records = Vec::with_capacity(rows);
    for row in 0..rows {
        let mut record = Rope::default();
        let mut head = Vec::new();
        for (tensor, given) in tensors.iter().zip(&mut given) {
            let Some((Given { shape, data }, ends, taken)) = given else {
                cell::push_head(tensor, None, &mut head);
                continue;
            };
            let elements = data.split_to(ends[row] - *taken);
            *taken = ends[row];
            if tensor.variable.as_ref().is_some_and(|variable| elements.len() > variable.bytes_max) {
                return Err((tensor, elements.len()));
            }
            cell::push_head(tensor, Some((shape, elements.len())), &mut head);
            record.push(std::mem::take(&mut head).into());
            record.append(elements);
        }
        record.push(head.into());
        records.push(record);
    }
    let longest = records.iter().map(Rope::len).max().unwrap_or(0) + HEAD_BYTES;
    let bytes = longest.next_multiple_of(ALIGNMENT);
    let framed = records.into_iter().map(|record| {
        let mut framed = Rope::from((bytes as u32).to_le_bytes().to_vec());
        framed.append(record);
        framed.push(vec![0; bytes - framed.len()].into());
        framed
    });
    Ok(framed.collect())
}

/// Where the elements of each row end; strings (BYTES) say so themselves.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn row_ends(datatype: DataType, shape: &[usize], rows: usize, data: &Rope) -> Result<Vec<usize>, Misplaced> {
    if datatype == DataType::Bytes {
        return string_ends(elements(shape).unwrap_or(usize::MAX), rows, data);
    }
    let bytes = row_bytes(datatype, shape, rows, data)?;
    Ok((1..=rows).map(|row| row * bytes).collect())
}

/// Bytes of a row of numbers.
///
/// # Errors
/// If there are not so many of each.
pub(crate) fn row_bytes(datatype: DataType, shape: &[usize], rows: usize, data: &Rope) -> Result<usize, Misplaced> {
    let bytes = elements(shape).unwrap_or(usize::MAX).saturating_mul(datatype.bytes());
    let expected = bytes.saturating_mul(rows);
    if data.len() == expected { Ok(bytes) } else { Err(Misplaced::Bytes { expected }) }
}

/// Why elements are not those of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Misplaced {
    /// There should be as many bytes.
    Bytes { expected: usize },
    /// A string's length has fewer bytes than its four.
    Length { left: usize },
    /// A string has fewer bytes than its length says.
    String { length: usize, left: usize },
    /// There are fewer strings than expected.
    Fewer { found: usize, expected: usize },
    /// There are more.
    More { expected: usize },
}

fn string_ends(each: usize, rows: usize, data: &Rope) -> Result<Vec<usize>, Misplaced> {
    let expected = each.saturating_mul(rows);
    let mut ends = Vec::with_capacity(rows);
    if each == 0 {
        ends.resize(rows, 0);
    }
    let (mut found, mut at) = (0, 0);
    let mut lengths = Lengths::default();
    for piece in data.pieces() {
        let mut piece = piece;
        while !piece.is_empty() {
            if found == expected {
                return Err(Misplaced::More { expected });
            }
            let (taken, length) = lengths.take(piece);
            piece = &piece[taken..];
            at += taken;
            if let Some(length) = length {
                let left = data.len() - at;
                if length > left {
                    return Err(Misplaced::String { length, left });
                }
            }
            if lengths.is_between() {
                found += 1;
                if found % each == 0 {
                    ends.push(at);
                }
            }
        }
    }
    match lengths {
        Lengths { head, .. } if head > 0 => Err(Misplaced::Length { left: head }),
        _ if found < expected => Err(Misplaced::Fewer { found, expected }),
        _ => Ok(ends),
    }
}

/// Steps over strings whose bytes come in pieces.
#[derive(Debug, Default)]
struct Lengths {
    /// The next length, as far as it has come.
    number: [u8; HEAD_BYTES],
    head: usize,
    /// Bytes of the present string that have not come.
    string: usize,
}

impl Lengths {
    /// Takes what belongs together off a piece that is not empty: how many bytes, and the length that they complete.
    fn take(&mut self, piece: &[u8]) -> (usize, Option<usize>) {
        if self.string > 0 {
            let taken = self.string.min(piece.len());
            self.string -= taken;
            return (taken, None);
        }
        let taken = (HEAD_BYTES - self.head).min(piece.len());
        self.number[self.head..self.head + taken].copy_from_slice(&piece[..taken]);
        self.head += taken;
        if self.head < HEAD_BYTES {
            return (taken, None);
        }
        (self.head, self.string) = (0, u32::from_le_bytes(self.number) as usize);
        (taken, Some(self.string))
    }

    /// Whether a string has just ended.
    fn is_between(&self) -> bool {
        self.head == 0 && self.string == 0
    }
}

/// The outputs of a reply.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Unpacked {
    /// Of one row, in the order of the model.
    pub(crate) shapes: Vec<Vec<usize>>,
    /// Of all rows.
    pub(crate) outputs: Vec<Bytes>,
}

/// The records of all rows as tensors.
///
/// # Errors
/// What is wrong with them, in one line.
pub(crate) fn unpack(tensors: &[Tensor], records: &[Vec<u8>]) -> Result<Unpacked, String> {
    let mut unpacked: Vec<(Vec<usize>, Vec<u8>)> = Vec::with_capacity(tensors.len());
    for record in records {
        let cells = cell::read(tensors, record).map_err(|error| format!("its output has a {error}"))?;
        for (index, (tensor, cell)) in tensors.iter().zip(cells).enumerate() {
            let cell = cell.ok_or_else(|| format!("output '{}': found none", tensor.name))?;
            match unpacked.get_mut(index) {
                None => unpacked.push((cell.shape, cell.data.to_vec())),
                Some((shape, _)) if *shape != cell.shape => {
                    return Err(format!(
                        "output '{}': found shapes {shape:?} and {:?} in the rows of one request, expected one shape; \
                         ask for one row at a time",
                        tensor.name, cell.shape
                    ));
                }
                Some((_, data)) => data.extend_from_slice(cell.data),
            }
        }
    }
    let (shapes, outputs) = unpacked.into_iter().map(|(shape, data)| (shape, Bytes::from(data))).unzip();
    Ok(Unpacked { shapes, outputs })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use repository::Variable;

    fn variable(name: &str, datatype: DataType, shape: Vec<usize>, is_optional: bool) -> Tensor {
        let dims = if datatype == DataType::Bytes { vec![] } else { (0..shape.len()).collect() };
        let variable = Variable { dims, reshape_dims: vec![], bytes_max: 100, is_optional, any_rank: false };
        Tensor { variable: Some(variable), ..Tensor::new(name, datatype, shape) }
    }

    /// In pieces of these lengths.
    fn rope(mut bytes: &[u8], cuts: &[usize]) -> Rope {
        let mut rope = Rope::default();
        for &cut in cuts {
            rope.push(bytes.split_off(..cut.min(bytes.len())).unwrap().to_vec().into());
        }
        rope.push(bytes.to_vec().into());
        rope
    }

    fn encoded(strings: &[Vec<u8>]) -> Vec<u8> {
        strings.iter().flat_map(|string| [&(string.len() as u32).to_le_bytes()[..], string].concat()).collect()
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_went(
            strings in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..8),
            columns in 0usize..4,
            has_mask: bool,
            cuts in proptest::collection::vec(0usize..30, 0..9),
        ) {
            let tensors = [
                variable("text", DataType::Bytes, vec![2], false),
                Tensor::new("fixed", DataType::Uint8, vec![1]),
                variable("mask", DataType::Int16, vec![9], true),
            ];
            let rows = strings.len() / 2;
            prop_assume!(rows > 0);
            let (text, fixed) = (encoded(&strings[..rows * 2]), vec![7; rows]);
            let mask: Vec<u8> = (0..rows * columns * 2).map(|byte| byte as u8).collect();
            let given = |data: &[u8], tensor: &Tensor, shape: Vec<usize>| {
                let data = rope(data, &cuts);
                let ends = row_ends(tensor.datatype, &shape, rows, &data).unwrap();
                Some((Given { shape, data }, ends))
            };
            let given = vec![
                given(&text, &tensors[0], vec![2]),
                given(&fixed, &tensors[1], vec![1]),
                has_mask.then(|| given(&mask, &tensors[2], vec![columns])).flatten(),
            ];
            let records = pack(&tensors, rows, given).unwrap();
            let bytes = records[0].len();
            prop_assert!(bytes.is_multiple_of(ALIGNMENT) && records.iter().all(|record| record.len() == bytes));
            prop_assert!(records[0].len() <= cell::bytes_max(&tensors));
            let records: Vec<Vec<u8>> = records.iter().map(|record| record.joined().to_vec()).collect();
            for record in &records {
                prop_assert_eq!(cell::read(&tensors, record).unwrap()[2].is_some(), has_mask);
            }
            if has_mask {
                let unpacked = unpack(&tensors, &records).unwrap();
                prop_assert_eq!(unpacked.shapes, [vec![2], vec![1], vec![columns]]);
                prop_assert_eq!(unpacked.outputs, [text, fixed, mask].map(Bytes::from));
            }
        }

        /// Against the iterator over bytes in one piece.
        #[test]
        fn ends_of_strings_are_those_in_one_piece(
            bytes in proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => 0u8..9], 0..60),
            cuts in proptest::collection::vec(0usize..9, 0..9),
            (rows, each) in (1usize..4, 0usize..4),
        ) {
            let whole: Option<Vec<&[u8]>> = cell::strings(&bytes).collect();
            let expected = whole.filter(|strings| strings.len() == rows * each).map(|strings| {
                let ends = |row| strings[..row * each].iter().map(|string| string.len() + HEAD_BYTES).sum::<usize>();
                (1..=rows).map(ends).collect::<Vec<usize>>()
            });
            prop_assert_eq!(row_ends(DataType::Bytes, &[each], rows, &rope(&bytes, &cuts)).ok(), expected);
        }
    }

    #[test]
    fn lengths_that_lie_are_told_apart() {
        let ends = |bytes: &[u8]| row_ends(DataType::Bytes, &[2], 1, &rope(bytes, &[1, 1]));
        assert_eq!(ends(&[1, 0, 0, 0, 9, 0, 0, 0, 0]), Ok(vec![9]));
        assert_eq!(ends(&[0, 0, 0, 0]), Err(Misplaced::Fewer { found: 1, expected: 2 }));
        assert_eq!(ends(&[0; 12]), Err(Misplaced::More { expected: 2 }));
        assert_eq!(ends(&[0, 0, 0, 0, 1]), Err(Misplaced::Length { left: 1 }));
        assert_eq!(ends(&[9, 0, 0, 0, 1]), Err(Misplaced::String { length: 9, left: 1 }));
        assert_eq!(ends(&[255; 4]), Err(Misplaced::String { length: u32::MAX as usize, left: 0 }));
        let short = row_ends(DataType::Fp32, &[3], 2, &rope(&[0; 23], &[]));
        assert_eq!(short, Err(Misplaced::Bytes { expected: 24 }));
    }

    #[test]
    fn answers_of_several_shapes_are_not_joined() {
        let tensors = [variable("y", DataType::Uint8, vec![9], false)];
        let record = |data: &[u8]| {
            let mut record = vec![0; cell::bytes_max(&tensors)];
            let cells = [Some(cell::Cell { shape: vec![data.len()], data })];
            let bytes = cell::write(&tensors, &cells, &mut record).unwrap();
            record[..bytes].to_vec()
        };
        let unpacked = unpack(&tensors, &[record(&[1, 2]), record(&[3, 4])]).unwrap();
        assert_eq!((unpacked.shapes[0].as_slice(), &unpacked.outputs[0][..]), (&[2][..], &[1, 2, 3, 4][..]));
        let error = unpack(&tensors, &[record(&[1, 2]), record(&[3])]).unwrap_err();
        assert!(error.starts_with("output 'y': found shapes [2] and [1] in the rows of one request"), "{error}");
        assert!(unpack(&tensors, &[record(&[1])[1..].to_vec()]).is_err());
    }
}
