//! Scatter/gather lists (IBTA 10.8.1): the pieces of local memory that make up one message, in order.
//!
//! A list is posted with its request and kept inline, so neither posting nor transmitting allocates. Its keys are
//! looked at when a packet is made or arrives, for the bytes of that packet alone: a region that is withdrawn meanwhile
//! fails the request there.

use std::ops::Range;

use crate::{
    error::PostError,
    limits::SEGMENTS_MAX,
    memory::{ProtectionDomain, Segment},
    region::{Denied, RegionTable, Window},
};

/// The local memory of one work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentList {
    pieces: [Segment; SEGMENTS_MAX],
    count: usize,
    bytes: u32,
}

impl SegmentList {
    /// `first` and what follows it, of at most `limit` pieces together.
    pub(crate) fn new(first: Segment, more: &[Segment], limit: usize) -> Result<Self, PostError> {
        let found = 1 + more.len();
        if found > limit {
            return Err(PostError::TooManySegments { found, limit });
        }
        let mut pieces = [Segment::default(); SEGMENTS_MAX];
        pieces[0] = first;
        pieces[1..found].copy_from_slice(more);
        let bytes = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        let too_long = PostError::TooLong { bytes, limit: u32::MAX };
        Ok(Self { pieces, count: found, bytes: u32::try_from(bytes).map_err(|_| too_long)? })
    }

    /// Of the whole message.
    pub(crate) const fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Checks the part `range` of the message. Of a piece that it does not touch, the key is not looked at.
    pub(crate) fn windows<'r>(
        &self,
        range: Range<u32>,
        write: bool,
        domain: ProtectionDomain,
        regions: &'r RegionTable,
    ) -> Result<Windows<'r>, Denied> {
        let mut windows = Windows::default();
        let (mut start, mut count) = (0, 0);
        for piece in &self.pieces[..self.count] {
            let end = start + piece.bytes;
            let (from, to) = (range.start.max(start), range.end.min(end));
            if from < to {
                let offset = piece.offset.checked_add((from - start) as usize).ok_or(Denied)?;
                let part = Segment { offset, bytes: to - from, ..*piece };
                windows.parts[count] = Some((regions.local(domain, part, write)?, part.bytes as usize));
                count += 1;
            }
            start = end;
        }
        Ok(windows)
    }
}

/// Checked memory of one packet, in order.
#[derive(Clone, Copy, Default)]
pub(crate) struct Windows<'a> {
    parts: [Option<(Window<'a>, usize)>; SEGMENTS_MAX],
}

impl<'a> From<(Window<'a>, usize)> for Windows<'a> {
    fn from(part: (Window<'a>, usize)) -> Self {
        let mut windows = Self::default();
        windows.parts[0] = Some(part);
        windows
    }
}

impl Windows<'_> {
    /// Copies out; `into` is as long as all windows together.
    pub(crate) fn read(&self, mut into: &mut [u8]) {
        for (window, bytes) in self.parts.iter().map_while(Option::as_ref) {
            let (part, rest) = into.split_at_mut(*bytes);
            window.memory.read(window.offset, part);
            into = rest;
        }
    }

    /// Copies `head` in, then `tail`; both together are as long as all windows together.
    pub(crate) fn write(&self, head: &[u8], tail: &[u8]) {
        let (mut head, mut tail) = (head, tail);
        for &(window, bytes) in self.parts.iter().map_while(Option::as_ref) {
            let first = head.split_off(..bytes.min(head.len())).unwrap_or_default();
            let second = tail.split_off(..bytes - first.len()).unwrap_or_default();
            if !first.is_empty() {
                window.memory.write(window.offset, first);
            }
            if !second.is_empty() {
                window.memory.write(window.offset + first.len(), second);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

    use super::*;
    use crate::memory::{Access, HeapMemory};

    const HOME: ProtectionDomain = ProtectionDomain(0);
    const REGION_BYTES: usize = 64;

    /// Two regions, the bytes of both numbered on.
    fn regions() -> (RegionTable, [std::sync::Arc<HeapMemory>; 2], [u32; 2]) {
        let mut table = RegionTable::new(4, ChaCha8Rng::seed_from_u64(1));
        let memory =
            [0, REGION_BYTES].map(|from| HeapMemory::new((from..from + REGION_BYTES).map(|at| at as u8).collect()));
        let keys =
            [0, 1].map(|which: usize| table.register(memory[which].clone(), Access::LOCAL.into()).expect("room").lkey);
        (table, memory, keys)
    }

    fn pieces() -> impl Strategy<Value = Vec<(usize, usize, u32)>> {
        prop::collection::vec((0..2_usize, 0..REGION_BYTES, 0..40_u32), 1..=SEGMENTS_MAX)
    }

    proptest! {
        /// Against a flat list of where each byte of the message lies.
        #[test]
        fn any_part_of_a_list_is_what_a_flat_copy_says(pieces in pieces(), cut in any::<[prop::sample::Index; 2]>()) {
            let (table, memory, keys) = regions();
            let segments: Vec<_> = pieces.iter().map(|&(which, offset, bytes)| {
                Segment { lkey: keys[which], offset, bytes }
            }).collect();
            let places: Vec<_> = pieces.iter().flat_map(|&(which, offset, bytes)| {
                (offset..offset + bytes as usize).map(move |at| (which, at))
            }).collect();
            let list = SegmentList::new(segments[0], &segments[1..], SEGMENTS_MAX).unwrap();
            prop_assert_eq!(list.bytes() as usize, places.len());
            let mut range = cut.map(|at| at.index(places.len() + 1));
            range.sort_unstable();
            let [start, end] = range;
            let wanted = &places[start..end];
            let windows = list.windows(start as u32..end as u32, true, HOME, &table);
            let inside = pieces_touched(&pieces, start, end).iter().all(|&end| end <= REGION_BYTES);
            prop_assert_eq!(windows.is_ok(), inside);
            let Ok(windows) = windows else { return Ok(()) };
            let mut read = vec![0xff; end - start];
            windows.read(&mut read);
            let flat: Vec<_> = wanted.iter().map(|&(which, at)| (which * REGION_BYTES + at) as u8).collect();
            prop_assert_eq!(&read, &flat);
            // Later pieces of an overlapping list win, as in a flat copy.
            let mut expected = [0, 1].map(|which: usize| memory[which].to_vec());
            let new: Vec<_> = (0..end - start).map(|at| 200 + (at % 50) as u8).collect();
            wanted.iter().zip(&new).for_each(|(&(which, at), &byte)| expected[which][at] = byte);
            let (head, tail) = new.split_at(new.len().min(5));
            windows.write(head, tail);
            prop_assert_eq!([0, 1].map(|which: usize| memory[which].to_vec()), expected);
        }
    }

    /// Where the touched part of each piece ends in its region.
    fn pieces_touched(pieces: &[(usize, usize, u32)], start: usize, end: usize) -> Vec<usize> {
        let mut at = 0;
        let mut touched = Vec::new();
        for &(_, offset, bytes) in pieces {
            let (from, to) = (start.max(at), end.min(at + bytes as usize));
            if from < to {
                touched.push(offset + to - at);
            }
            at += bytes as usize;
        }
        touched
    }

    #[test]
    fn a_list_is_refused_by_the_limit_that_it_breaks() {
        let piece = Segment { lkey: 1, offset: 0, bytes: u32::MAX };
        assert_eq!(SegmentList::new(piece, &[piece; 2], 2), Err(PostError::TooManySegments { found: 3, limit: 2 }));
        assert!(matches!(
            SegmentList::new(piece, &[piece], 2),
            Err(PostError::TooLong { bytes, .. }) if bytes == 2 * u64::from(u32::MAX)
        ));
        assert!(SegmentList::new(piece, &[], 1).is_ok());
    }

    #[test]
    fn keys_of_other_parts_are_not_looked_at() {
        let (table, _, keys) = regions();
        let good = Segment { lkey: keys[0], offset: 0, bytes: 10 };
        let bad = Segment { lkey: !keys[0], ..good };
        let list = SegmentList::new(good, &[bad, Segment { lkey: keys[1], offset: usize::MAX, bytes: 0 }], 3).unwrap();
        let allowed = |range| list.windows(range, false, HOME, &table).is_ok();
        assert!(allowed(0..10) && allowed(20..20) && !allowed(0..11) && !allowed(19..20));
    }
}
