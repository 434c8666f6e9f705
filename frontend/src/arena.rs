//! The memory that slots lie in: how much there is, and how the frontend itself reaches it.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ops::Range,
    rc::Rc,
    sync::atomic::{Ordering, fence},
};

use proto::SlotDescriptor;
use repository::Model;
use transport::Memory;

use crate::slots::{self, SlotSize};

/// The least that an arena has unless it is configured, or memory is short: over 400 tasks of 150 kB, a second of 400
/// requests each.
pub const ARENA_BYTES_MIN: usize = 64 << 20;
/// The most.
const ARENA_BYTES_MAX: usize = 4 << 30;
/// The largest tasks that it has room for.
const TASKS: usize = 64;
/// The part of a host's memory that it is at most.
const PART_OF_MEMORY: u64 = 4;

/// Bytes of an arena for these models in so much memory: for many tasks of the largest, and for a request
/// of the most rows of any beside a block of each other. What is never used takes no memory.
#[must_use]
pub fn bytes_for(models: &[Model], memory: Option<Memory>) -> usize {
    let size = |model: &Model| SlotSize::new(model.input_bytes(), model.output_bytes());
    let requests: Vec<(SlotSize, usize)> = models.iter().map(|model| (size(model), model.rows_max)).collect();
    let largest = requests.iter().map(|(size, _)| size.class_bytes()).max().unwrap_or(0);
    let least = memory.as_ref().map_or(ARENA_BYTES_MIN, |memory| memory.eighth_of(ARENA_BYTES_MIN));
    let quarter = memory.and_then(|memory| usize::try_from(memory.total_bytes / PART_OF_MEMORY).ok());
    let most = ARENA_BYTES_MAX.min(quarter.unwrap_or(ARENA_BYTES_MIN));
    let mut bytes = largest.saturating_mul(TASKS + models.len()).max(least);
    while bytes < most && !slots::has_room(bytes, &requests) {
        bytes += bytes / 8;
    }
    // One task of the largest must have room.
    bytes.min(most).max(least).max(largest.saturating_mul(2))
}

/// The registered memory that slots lie in.
pub trait Arena {
    /// Copies `bytes` in at `offset`.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Copies out at `offset`.
    fn read(&self, offset: usize, into: &mut [u8]);
    /// Opens these inputs and the places of these answers to whoever is told the key that comes of it, which is never
    /// used twice; [`SlotDescriptor::NO_KEY`] if links have keys, which open all of the arena.
    fn open(&self, inputs: Range<usize>, answers: Range<usize>) -> u32;
    /// Has such a key open nothing any more.
    fn close(&self, key: u32);
    /// Puts a word in at `offset`, a multiple of 8. Who READs it finds all that was written before.
    fn publish(&self, offset: usize, word: u64) {
        fence(Ordering::Release);
        self.write(offset, &word.to_le_bytes());
    }
}

/// An arena in plain memory, for networks that are simulated: their peers reach it directly.
#[derive(Debug)]
pub struct PlainArena {
    bytes: RefCell<Vec<u8>>,
    opened: RefCell<BTreeMap<u32, [Range<usize>; 2]>>,
    last_key: Cell<u32>,
}

impl PlainArena {
    /// So many zeros.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let (bytes, opened) = (RefCell::new(vec![0; bytes]), RefCell::default());
        Self { bytes, opened, last_key: Cell::new(SlotDescriptor::NO_KEY) }
    }

    /// What a key opens, if it opens anything: inputs, and places of answers.
    #[must_use]
    pub fn opened(&self, key: u32) -> Option<[Range<usize>; 2]> {
        self.opened.borrow().get(&key).cloned()
    }

    /// Keys that open anything.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.opened.borrow().len()
    }

    /// What a peer READs.
    ///
    /// # Panics
    /// If that lies outside.
    #[must_use]
    pub fn bytes(&self, offset: u64, length: u32) -> Vec<u8> {
        self.bytes.borrow()[offset as usize..][..length as usize].to_vec()
    }
}

impl Arena for PlainArena {
    fn write(&self, offset: usize, bytes: &[u8]) {
        self.bytes.borrow_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.bytes.borrow()[offset..][..into.len()]);
    }
    fn open(&self, inputs: Range<usize>, answers: Range<usize>) -> u32 {
        let key = self.last_key.get() + 1;
        self.last_key.set(key);
        self.opened.borrow_mut().insert(key, [inputs, answers]);
        key
    }
    fn close(&self, key: u32) {
        assert!(self.opened.borrow_mut().remove(&key).is_some(), "key {key} opens nothing");
    }
}

impl<T: Arena> Arena for Rc<T> {
    fn write(&self, offset: usize, bytes: &[u8]) {
        (**self).write(offset, bytes);
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        (**self).read(offset, into);
    }
    fn open(&self, inputs: Range<usize>, answers: Range<usize>) -> u32 {
        (**self).open(inputs, answers)
    }
    fn close(&self, key: u32) {
        (**self).close(key);
    }
}

#[cfg(test)]
mod tests {
    use repository::DataType;

    use super::*;
    use crate::testing::{model, tensor};

    #[test]
    fn an_arena_is_a_part_of_the_memory_there_is_and_has_room_for_one_task() {
        let of = |bytes: usize| model("m", vec![tensor("x", DataType::Uint8, &[bytes])], vec![]);
        let memory = |total_bytes| Memory { total_bytes, used_bytes: 0, host_bytes: total_bytes, bounded_by: None };
        assert_eq!(bytes_for(&[of(9)], Some(memory(8 << 30))), ARENA_BYTES_MIN);
        assert_eq!(bytes_for(&[of(9)], None), ARENA_BYTES_MIN);
        assert_eq!(bytes_for(&[of(9)], Some(memory(300 << 20))), 300 << 17, "an eighth");
        assert_eq!(bytes_for(&[of(4 << 20)], Some(memory(300 << 20))), 75 << 20, "a quarter");
        assert!(bytes_for(&[of(80 << 20)], Some(memory(300 << 20))) >= 160 << 20, "one task must fit");
    }
}
