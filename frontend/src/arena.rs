//! The memory that slots lie in, as the frontend itself reaches it.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::atomic::{Ordering, fence},
};

/// The registered memory that slots lie in.
pub trait Arena {
    /// Copies `bytes` in at `offset`.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Copies out at `offset`.
    fn read(&self, offset: usize, into: &mut [u8]);
    /// Puts a word in at `offset`, a multiple of 8. Who READs it finds all that was written before.
    fn publish(&self, offset: usize, word: u64) {
        fence(Ordering::Release);
        self.write(offset, &word.to_le_bytes());
    }
}

/// An arena in plain memory, for networks that are simulated: their peers reach it directly.
#[derive(Debug)]
pub struct PlainArena(RefCell<Vec<u8>>);

impl PlainArena {
    /// So many zeros.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(RefCell::new(vec![0; bytes]))
    }

    /// What a peer READs.
    ///
    /// # Panics
    /// If that lies outside.
    #[must_use]
    pub fn bytes(&self, offset: u64, length: u32) -> Vec<u8> {
        self.0.borrow()[offset as usize..][..length as usize].to_vec()
    }
}

impl Arena for PlainArena {
    fn write(&self, offset: usize, bytes: &[u8]) {
        self.0.borrow_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.0.borrow()[offset..][..into.len()]);
    }
}

impl<T: Arena> Arena for Rc<T> {
    fn write(&self, offset: usize, bytes: &[u8]) {
        (**self).write(offset, bytes);
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        (**self).read(offset, into);
    }
}
