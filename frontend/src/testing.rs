//! What several tests share: an arena in plain memory, and models.

use std::cell::RefCell;

use proto::{LatencyProfile, Span};
use repository::{DataType, Executor, Model, Priorities, Tensor};

use crate::tasks::Arena;

/// An arena that peers of a test reach directly.
#[derive(Debug)]
pub struct PlainArena(RefCell<Vec<u8>>);

impl PlainArena {
    pub fn new(bytes: usize) -> Self {
        Self(RefCell::new(vec![0; bytes]))
    }

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

pub fn tensor(name: &str, datatype: DataType, shape: &[usize]) -> Tensor {
    Tensor { name: name.to_owned(), datatype, shape: shape.to_vec() }
}

pub fn model(name: &str, inputs: Vec<Tensor>, outputs: Vec<Tensor>) -> Model {
    let profile = LatencyProfile::linear(1.0, 4.0, 8).unwrap();
    Model {
        name: name.to_owned(),
        version: "1".to_owned(),
        inputs,
        outputs,
        max_batch: 8,
        slo: Span::from_millis(25),
        priorities: Priorities { levels: 3, default: 2 },
        executor: Executor::Emulated { profile },
        labels: Vec::new(),
        image: None,
    }
}

impl<T: Arena> Arena for std::rc::Rc<T> {
    fn write(&self, offset: usize, bytes: &[u8]) {
        (**self).write(offset, bytes);
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        (**self).read(offset, into);
    }
}
