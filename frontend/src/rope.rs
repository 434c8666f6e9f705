//! Bytes in the pieces in which they arrived. A request's body is never joined: its tensors are copied once, from the
//! pieces into their slots.

use std::{
    collections::VecDeque,
    io::{self, Read},
    mem,
    ops::Range,
};

use bytes::Bytes;

/// Smaller pieces are copied together by a [`Gather`]: a piece keeps the buffer alive in which it was received, which
/// is that much larger at most as the reads of a connection are larger than this.
const PIECE_BYTES_MIN: usize = 16 << 10;
/// Into pieces of this size.
const GATHERED_BYTES_MAX: usize = 64 << 10;

/// A sequence of byte strings that counts as one.
#[derive(Debug, Clone, Default)]
pub struct Rope {
    pieces: VecDeque<Bytes>,
    len: usize,
}

impl Rope {
    /// Appends a piece.
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len();
            self.pieces.push_back(piece);
        }
    }

    /// Appends all of another one.
    pub fn append(&mut self, mut other: Self) {
        self.len += other.len;
        self.pieces.append(&mut other.pieces);
    }

    /// Bytes in all pieces.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes the first bytes off. Costs a step for each piece that goes, and one more, however many stay.
    ///
    /// # Panics
    /// If there are fewer: our own bug.
    #[must_use]
    pub fn split_to(&mut self, bytes: usize) -> Self {
        assert!(bytes <= self.len, "{bytes} of {} bytes", self.len);
        let mut front = Self::default();
        while front.len < bytes {
            let piece = self.pieces.front_mut().expect("the pieces have as many bytes as are counted");
            let wanted = bytes - front.len;
            if piece.len() > wanted {
                front.push(piece.split_to(wanted));
            } else {
                front.push(mem::take(piece));
                self.pieces.pop_front();
            }
        }
        self.len -= bytes;
        front
    }

    /// Takes a number of four bytes off, little-endian; nothing if there are fewer.
    pub fn split_first_u32(&mut self) -> Option<u32> {
        let mut number = [0; 4];
        if self.len < number.len() {
            return None;
        }
        let front = self.split_to(number.len());
        number.iter_mut().zip(front.pieces().flatten()).for_each(|(byte, of)| *byte = *of);
        Some(u32::from_le_bytes(number))
    }

    /// The bytes of `range`, piece by piece. Steps over the pieces before it.
    ///
    /// # Panics
    /// If the range reaches beyond the end: our own bug.
    pub fn range(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        let mut start = 0;
        let placed = self.pieces.iter().map(move |piece| {
            let at = start;
            start += piece.len();
            (at, piece)
        });
        let Range { start: from, end: to } = range;
        placed
            .skip_while(move |(at, piece)| at + piece.len() <= from)
            .take_while(move |(at, _)| from < to && *at < to)
            .map(move |(at, piece)| &piece[from.saturating_sub(at)..piece.len().min(to - at)])
    }

    /// All bytes in one piece; copied only if they are in several.
    #[must_use]
    pub fn joined(&self) -> Bytes {
        match self.pieces.len() {
            0 => Bytes::new(),
            1 => self.pieces[0].clone(),
            _ => {
                let mut bytes = Vec::with_capacity(self.len);
                self.pieces().for_each(|piece| bytes.extend_from_slice(piece));
                bytes.into()
            }
        }
    }

    /// Reads the bytes in order, and lets go of each piece that was read.
    pub fn into_reader(self) -> impl Read + Send + 'static {
        Reader(self)
    }

    /// The pieces in order.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| &piece[..])
    }
}

struct Reader(Rope);

impl Read for Reader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = self.0.pieces.front().map_or(0, |piece| piece.len().min(into.len()));
        self.0.split_to(bytes).pieces().for_each(|piece| into[..bytes].copy_from_slice(piece));
        Ok(bytes)
    }
}

impl<T: Into<Bytes>> From<T> for Rope {
    fn from(bytes: T) -> Self {
        let mut rope = Self::default();
        rope.push(bytes.into());
        rope
    }
}

/// Collects what strangers send, however small its pieces are: what is kept is little more than its bytes. A first
/// piece is not copied, nor is a large one.
#[derive(Debug, Default)]
pub struct Gather {
    rope: Rope,
    /// Small pieces that came last, copied together.
    small: Vec<u8>,
}

impl Gather {
    /// Appends a piece.
    pub fn push(&mut self, piece: Bytes) {
        let is_small = piece.len() < PIECE_BYTES_MIN;
        if self.is_empty() || !is_small {
            self.flush();
            return self.rope.push(piece);
        }
        self.settle();
        if self.small.len() + piece.len() > GATHERED_BYTES_MAX {
            self.flush();
        }
        self.small.extend_from_slice(&piece);
    }

    /// More may be long in coming: a small first piece lets go of the buffer in which it was received.
    pub fn settle(&mut self) {
        if self.small.is_empty() && self.rope.pieces.len() == 1 && self.rope.len < PIECE_BYTES_MIN {
            self.small = mem::take(&mut self.rope).pieces[0].to_vec();
        }
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rope.len() + self.small.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them.
    #[must_use]
    pub fn finish(mut self) -> Rope {
        self.flush();
        self.rope
    }

    fn flush(&mut self) {
        self.rope.push(mem::take(&mut self.small).into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rope(pieces: &[Vec<u8>]) -> Rope {
        let mut rope = Rope::default();
        pieces.iter().for_each(|piece| rope.push(piece.clone().into()));
        rope
    }

    proptest! {
        #[test]
        fn parts_are_those_of_the_joined_bytes(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9), 0..9),
            a: prop::sample::Index,
            b: prop::sample::Index,
        ) {
            let joined = pieces.concat();
            let mut rope = rope(&pieces);
            let (a, b) = (a.index(joined.len() + 1), b.index(joined.len() + 1));
            let range = a.min(b)..a.max(b);
            prop_assert_eq!(rope.range(range.clone()).collect::<Vec<_>>().concat(), &joined[range.clone()]);
            prop_assert!(rope.range(range.clone()).all(|piece| !piece.is_empty()));
            let mut read = Vec::new();
            rope.clone().into_reader().read_to_end(&mut read).unwrap();
            prop_assert_eq!(&read, &joined);
            prop_assert_eq!(&rope.split_to(range.start).joined()[..], &joined[..range.start]);
            prop_assert_eq!(&rope.split_to(range.len()).joined()[..], &joined[range.clone()]);
            prop_assert_eq!((rope.len(), &rope.joined()[..]), (joined.len() - range.end, &joined[range.end..]));
        }

        #[test]
        fn what_is_gathered_is_all_in_few_pieces(lengths in proptest::collection::vec(0usize..40_000, 0..40)) {
            let pieces: Vec<Vec<u8>> =
                lengths.iter().enumerate().map(|(index, length)| vec![index as u8; *length]).collect();
            let mut gather = Gather::default();
            pieces.iter().for_each(|piece| gather.push(piece.clone().into()));
            prop_assert_eq!(gather.len(), lengths.iter().sum::<usize>());
            let rope = gather.finish();
            prop_assert_eq!(&rope.joined()[..], &pieces.concat());
            // A large piece may have a small one before it.
            prop_assert!(rope.pieces().len() <= 2 + 2 * rope.len() / PIECE_BYTES_MIN, "{} pieces", rope.pieces().len());
        }
    }

    #[test]
    fn single_bytes_become_pieces_and_a_first_piece_is_not_copied() {
        let body = Bytes::from(vec![7; 100]);
        let mut gather = Gather::default();
        gather.push(body.clone());
        assert_eq!(gather.finish().joined().as_ptr(), body.as_ptr());
        let mut gather = Gather::default();
        gather.push(body.clone());
        gather.settle();
        assert_ne!(gather.finish().joined().as_ptr(), body.as_ptr(), "the buffer goes");
        let mut gather = Gather::default();
        (0..1_000_000).for_each(|_| gather.push(body.slice(..1)));
        assert_eq!(gather.finish().pieces().len(), 1_000_000_usize.div_ceil(GATHERED_BYTES_MAX));
    }

    #[test]
    fn taking_nothing_off_a_million_pieces_steps_over_none() {
        let mut rope = Rope::default();
        (0..1_000_000).for_each(|_| rope.push(Bytes::from_static(b"x")));
        // A million times a million steps would take hours.
        assert!((0..1_000_000).all(|_| rope.split_to(0).is_empty()));
        assert!((0..1_000_000).all(|_| rope.split_to(1).len() == 1));
    }
}
