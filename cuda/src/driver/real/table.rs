//! Numbers for objects: what callers name them by. A number is never given twice.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use super::lock;
use crate::DriverError;

#[derive(Debug)]
pub(super) struct Table<T> {
    what: &'static str,
    rows: Mutex<Rows<T>>,
}

#[derive(Debug)]
struct Rows<T> {
    next: u64,
    rows: HashMap<u64, Arc<T>>,
}

impl<T> Table<T> {
    pub(super) fn new(what: &'static str) -> Self {
        Self { what, rows: Mutex::new(Rows { next: 1, rows: HashMap::new() }) }
    }

    pub(super) fn insert(&self, value: T) -> u64 {
        let mut rows = lock(&self.rows);
        let number = rows.next;
        rows.next += 1;
        rows.rows.insert(number, Arc::new(value));
        number
    }

    /// It lives on for whoever has got it when it is removed.
    pub(super) fn get(&self, number: u64) -> Result<Arc<T>, DriverError> {
        let found = lock(&self.rows).rows.get(&number).cloned();
        found.ok_or_else(|| DriverError(format!("there is no {} {number}", self.what)))
    }

    pub(super) fn remove(&self, number: u64) {
        // Dropped when the lock is free: giving something back may wait for the GPU.
        let removed = lock(&self.rows).rows.remove(&number);
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_given_once() {
        let table = Table::new("page");
        let first = table.insert('a');
        assert_eq!(*table.get(first).unwrap(), 'a');
        table.remove(first);
        assert_eq!(table.get(first).unwrap_err().0, format!("there is no page {first}"));
        assert_ne!(table.insert('b'), first);
    }
}
