//! `rtrb`'s rings as far as they are used here, for loom to see. They are checked elsewhere; here only what is built
//! on them.

use std::collections::VecDeque;

use loom::sync::{Arc, Mutex};

#[derive(Debug)]
pub(crate) struct RingBuffer;
#[derive(Debug)]
pub(crate) struct Producer<T>(Arc<Mutex<VecDeque<T>>>);
#[derive(Debug)]
pub(crate) struct Consumer<T>(Arc<Mutex<VecDeque<T>>>);

impl RingBuffer {
    #[allow(clippy::new_ret_no_self)]
    pub(crate) fn new<T>(_capacity: usize) -> (Producer<T>, Consumer<T>) {
        let ring = Arc::new(Mutex::new(VecDeque::new()));
        (Producer(Arc::clone(&ring)), Consumer(ring))
    }
}

impl<T> Producer<T> {
    pub(crate) fn push(&mut self, message: T) -> Result<(), rtrb::PushError<T>> {
        self.0.lock().unwrap().push_back(message);
        Ok(())
    }
}

impl<T> Consumer<T> {
    pub(crate) fn pop(&mut self) -> Result<T, rtrb::PopError> {
        self.0.lock().unwrap().pop_front().ok_or(rtrb::PopError::Empty)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap().is_empty()
    }
}
