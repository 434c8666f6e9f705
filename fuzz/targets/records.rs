//! Records in memory that another process writes as it likes, at the same time: neither end leaves its memory, panics,
//! or takes in a record that is longer than it may be.
#![no_main]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use libfuzzer_sys::fuzz_target;
use spsc::records::{Consumer, Producer, Words, memory_bytes};

const CAPACITY: usize = 1024;
const WORD: usize = 8;
const LONGEST: usize = 304;
const ROUNDS: usize = 50;

#[derive(Clone)]
struct Shared(Arc<Vec<AtomicU64>>);

impl Words for Shared {
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(WORD));
        &self.0[at / WORD]
    }
    fn write(&self, at: usize, bytes: &[u8]) {
        for (index, word) in bytes.chunks_exact(WORD).enumerate() {
            self.word(at + index * WORD).store(u64::from_ne_bytes(word.try_into().unwrap()), Ordering::Relaxed);
        }
        assert!(bytes.len().is_multiple_of(WORD));
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        assert!(into.len().is_multiple_of(WORD));
        for (index, word) in into.chunks_exact_mut(WORD).enumerate() {
            word.copy_from_slice(&self.word(at + index * WORD).load(Ordering::Relaxed).to_ne_bytes());
        }
    }
}

/// Which word, and what is written there.
type Write = (u8, u64);

fuzz_target!(|input: (Vec<Write>, Vec<u16>)| {
    let (writes, lengths) = input;
    let shared = Shared(Arc::new((0..memory_bytes(CAPACITY) / WORD).map(|_| AtomicU64::new(0)).collect()));
    let (mut producer, mut consumer) =
        (Producer::new(shared.clone(), CAPACITY), Consumer::new(shared.clone(), CAPACITY));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for &(word, value) in &writes {
                    shared.0[usize::from(word) % shared.0.len()].store(value, Ordering::Relaxed);
                }
                thread::yield_now();
            }
        });
        let mut buffer = [0; LONGEST];
        for round in 0..ROUNDS {
            let bytes = lengths.get(round % lengths.len().max(1)).map_or(0, |length| usize::from(*length) % LONGEST);
            if producer.has_room(1, bytes) == Ok(true) {
                producer.push(&buffer[..bytes]);
                producer.publish();
            }
            consumer.lie_down();
            let _ = consumer.get_up();
            if let Ok(Some(bytes)) = consumer.pop(&mut buffer) {
                assert!(bytes <= LONGEST);
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
});
