//! Bytes in the pieces in which they arrived. A request's body is never joined: its tensors are copied once, from the
//! pieces into their slots.

use std::{
    io::{self, Read},
    ops::Range,
    slice,
};

use bytes::Bytes;

/// A sequence of byte strings that counts as one.
#[derive(Debug, Clone, Default)]
pub struct Rope {
    pieces: Vec<Bytes>,
    len: usize,
}

impl Rope {
    /// Appends a piece.
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len();
            self.pieces.push(piece);
        }
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

    /// The bytes of `range`, shared, not copied.
    ///
    /// # Panics
    /// If the range reaches beyond the end: our own bug.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        let mut out = Self::default();
        let mut start = 0;
        for piece in &self.pieces {
            let (from, to) = (range.start.max(start), range.end.min(start + piece.len()));
            if from < to {
                out.push(piece.slice(from - start..to - start));
            }
            start += piece.len();
        }
        out
    }

    /// All bytes in one piece; copied only if they are in several.
    #[must_use]
    pub fn joined(&self) -> Bytes {
        match self.pieces.as_slice() {
            [] => Bytes::new(),
            [only] => only.clone(),
            several => several.concat().into(),
        }
    }

    /// Reads the bytes in order.
    pub fn reader(&self) -> impl Read {
        Reader { pieces: self.pieces.iter(), front: &[] }
    }

    /// The pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| &piece[..])
    }
}

struct Reader<'a> {
    pieces: slice::Iter<'a, Bytes>,
    front: &'a [u8],
}

impl Read for Reader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.front.is_empty() {
            self.front = self.pieces.next().map_or(&[], |piece| &piece[..]);
        }
        self.front.read(into)
    }
}

impl<T: Into<Bytes>> From<T> for Rope {
    fn from(bytes: T) -> Self {
        let mut rope = Self::default();
        rope.push(bytes.into());
        rope
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_are_those_of_the_joined_bytes(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9), 0..9),
            a: prop::sample::Index,
            b: prop::sample::Index,
        ) {
            let joined = pieces.concat();
            let mut rope = Rope::default();
            pieces.into_iter().for_each(|piece| rope.push(piece.into()));
            let (a, b) = (a.index(joined.len() + 1), b.index(joined.len() + 1));
            let range = a.min(b)..a.max(b);
            let slice = rope.slice(range.clone());
            prop_assert_eq!(slice.len(), range.len());
            prop_assert_eq!(slice.pieces().collect::<Vec<_>>().concat(), &joined[range.clone()]);
            prop_assert_eq!(&slice.joined()[..], &joined[range]);
        }
    }
}
