//! Records of bytes from one process to another, through memory that both have mapped. Neither believes what the other
//! writes there: each end keeps its own place to itself, the other's is checked before it is used, and a record is
//! copied out before anybody looks at it. What is wrong is [`Corrupt`]: then its owner reads and writes nothing more.
//!
//! Life of a record: the producer copies it behind the others and publishes its place; the consumer copies it out and
//! publishes its own, which gives the room back. A consumer that is about to sleep says so, and looks once more; a
//! producer looks after it has published: one of the two always sees the other (as with [`crate::Doorbell`]), and the
//! producer then wakes the consumer by a way that this module knows nothing of.
//!
//! ```text
//!   0  the consumer's place: bytes read, ever
//!  64  the producer's place: bytes written, ever
//! 128  whether the consumer sleeps
//! 192  records, each from a multiple of 64: its length in a word, its bytes; they go round
//! ```

use crate::sync::{AtomicU64, Ordering, fence};

const WORD: usize = size_of::<u64>();
/// A cache line: what one end writes is in none that the other writes.
const LINE: usize = 64;
const CONSUMED_AT: usize = 0;
const PRODUCED_AT: usize = LINE;
const ASLEEP_AT: usize = 2 * LINE;
const RECORDS_AT: usize = 3 * LINE;

/// Memory as words that others may read and write at any time. Offsets and lengths are in bytes and multiples of 8;
/// they are within the memory.
pub trait Words {
    /// The word at an offset.
    fn word(&self, at: usize) -> &AtomicU64;
    /// Copies in, word by word, in no order.
    fn write(&self, at: usize, bytes: &[u8]);
    /// Copies out, word by word, in no order.
    fn read(&self, at: usize, into: &mut [u8]);
}

/// The other end has written what it never writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt;

/// Bytes of memory for records of so many bytes in all, each with its length and rounded up to 64: a power of two.
#[must_use]
pub const fn memory_bytes(capacity: usize) -> usize {
    RECORDS_AT + capacity
}

/// What a record takes.
const fn taken(bytes: usize) -> usize {
    (WORD + bytes).next_multiple_of(LINE)
}

/// The end that writes.
#[derive(Debug)]
pub struct Producer<W> {
    words: W,
    capacity: usize,
    /// Bytes written, ever.
    produced: u64,
}

impl<W: Words> Producer<W> {
    /// Of memory that was zeroed and nobody has written.
    ///
    /// # Panics
    /// If `capacity` is no power of two, or below a line.
    pub fn new(words: W, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two() && capacity >= LINE, "{capacity} bytes of records");
        Self { words, capacity, produced: 0 }
    }

    /// Whether there is room for `count` records of `bytes` in all.
    ///
    /// # Errors
    /// If the consumer's place is none.
    pub fn has_room(&self, count: usize, bytes: usize) -> Result<bool, Corrupt> {
        let consumed = self.words.word(CONSUMED_AT).load(Ordering::Acquire);
        let used = self.produced.wrapping_sub(consumed);
        if used > self.capacity as u64 || !used.is_multiple_of(LINE as u64) {
            return Err(Corrupt);
        }
        Ok(bytes + count * taken(LINE) <= self.capacity - used as usize)
    }

    /// Writes a record that there is room for. Nobody sees it before [`Self::publish`].
    ///
    /// # Panics
    /// If it is larger than all room.
    pub fn push(&mut self, record: &[u8]) {
        assert!(taken(record.len()) <= self.capacity, "a record of {} bytes", record.len());
        self.word_at(self.produced).store(record.len() as u64, Ordering::Relaxed);
        let (whole, end) = record.split_at(record.len() / WORD * WORD);
        let mut at = self.produced.wrapping_add(WORD as u64);
        for part in [whole, &padded(end)[..end.len().next_multiple_of(WORD)]] {
            let place = self.place(at);
            let (first, wrapped) = part.split_at(part.len().min(self.capacity - place));
            self.words.write(RECORDS_AT + place, first);
            self.words.write(RECORDS_AT, wrapped);
            at = at.wrapping_add(part.len() as u64);
        }
        self.produced = self.produced.wrapping_add(taken(record.len()) as u64);
    }

    /// Shows the consumer what was written. True if it sleeps and must be woken, which is told once.
    pub fn publish(&mut self) -> bool {
        self.words.word(PRODUCED_AT).store(self.produced, Ordering::Release);
        // After what was written; pairs with the fence of `lie_down`.
        fence(Ordering::SeqCst);
        let asleep = self.words.word(ASLEEP_AT);
        asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::Relaxed) != 0
    }

    fn place(&self, at: u64) -> usize {
        at as usize & (self.capacity - 1)
    }

    fn word_at(&self, at: u64) -> &AtomicU64 {
        self.words.word(RECORDS_AT + self.place(at))
    }
}

fn padded(bytes: &[u8]) -> [u8; WORD] {
    let mut word = [0; WORD];
    word[..bytes.len()].copy_from_slice(bytes);
    word
}

/// The end that reads.
#[derive(Debug)]
pub struct Consumer<W> {
    words: W,
    capacity: usize,
    /// Bytes read, ever.
    consumed: u64,
}

impl<W: Words> Consumer<W> {
    /// Of memory that was zeroed and nobody has written.
    ///
    /// # Panics
    /// If `capacity` is no power of two, or below a line.
    pub fn new(words: W, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two() && capacity >= LINE, "{capacity} bytes of records");
        Self { words, capacity, consumed: 0 }
    }

    /// Whether there is nothing to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.word(PRODUCED_AT).load(Ordering::Relaxed) == self.consumed
    }

    /// Copies the next record to the beginning of `into`, and gives its room back. Its length; `None` if there is none.
    ///
    /// # Errors
    /// If the producer's place or the record's length is none. `into` bounds a record, and holds multiples of 8.
    pub fn pop(&mut self, into: &mut [u8]) -> Result<Option<usize>, Corrupt> {
        let produced = self.words.word(PRODUCED_AT).load(Ordering::Acquire);
        let available = produced.wrapping_sub(self.consumed);
        if available == 0 {
            return Ok(None);
        }
        if available > self.capacity as u64 || !available.is_multiple_of(LINE as u64) {
            return Err(Corrupt);
        }
        // Read once: it may be another a moment later.
        let place = self.place(self.consumed);
        let bytes = self.words.word(RECORDS_AT + place).load(Ordering::Relaxed);
        let Some(bytes) = usize::try_from(bytes).ok().filter(|bytes| *bytes <= into.len()) else {
            return Err(Corrupt);
        };
        if taken(bytes) as u64 > available {
            return Err(Corrupt);
        }
        let (place, whole) = (self.place(self.consumed.wrapping_add(WORD as u64)), bytes.next_multiple_of(WORD));
        let Some(into) = into.get_mut(..whole) else { return Err(Corrupt) };
        let (first, wrapped) = into.split_at_mut(whole.min(self.capacity - place));
        self.words.read(RECORDS_AT + place, first);
        self.words.read(RECORDS_AT, wrapped);
        self.consumed = self.consumed.wrapping_add(taken(bytes) as u64);
        self.words.word(CONSUMED_AT).store(self.consumed, Ordering::Release);
        Ok(Some(bytes))
    }

    /// From now on a producer that publishes wakes us. Look after [`settle`] whether there is something already.
    pub fn lie_down(&self) {
        self.words.word(ASLEEP_AT).store(1, Ordering::Relaxed);
    }

    /// We are awake. False if the producer has woken us, or is about to.
    #[must_use]
    pub fn get_up(&self) -> bool {
        self.words.word(ASLEEP_AT).swap(0, Ordering::Relaxed) != 0
    }

    fn place(&self, at: u64) -> usize {
        at as usize & (self.capacity - 1)
    }
}

/// Between [`Consumer::lie_down`], of any number, and the last look at each: pairs with the fence of a producer.
pub fn settle() {
    fence(Ordering::SeqCst);
}

#[cfg(all(test, not(interleavings)))]
mod tests {
    use std::{collections::VecDeque, sync::Arc};

    use proptest::prelude::*;

    use super::*;

    const CAPACITY: usize = 1024;

    #[derive(Clone)]
    struct Plain(Arc<Vec<AtomicU64>>);

    impl Plain {
        fn new() -> Self {
            Self(Arc::new((0..memory_bytes(CAPACITY) / WORD).map(|_| AtomicU64::new(0)).collect()))
        }
    }

    impl Words for Plain {
        fn word(&self, at: usize) -> &AtomicU64 {
            assert!(at.is_multiple_of(WORD));
            &self.0[at / WORD]
        }
        fn write(&self, at: usize, bytes: &[u8]) {
            let (words, end) = bytes.as_chunks::<WORD>();
            assert!(end.is_empty());
            for (index, word) in words.iter().enumerate() {
                self.word(at + index * WORD).store(u64::from_ne_bytes(*word), Ordering::Relaxed);
            }
        }
        fn read(&self, at: usize, into: &mut [u8]) {
            let (words, end) = into.as_chunks_mut::<WORD>();
            assert!(end.is_empty());
            for (index, word) in words.iter_mut().enumerate() {
                *word = self.word(at + index * WORD).load(Ordering::Relaxed).to_ne_bytes();
            }
        }
    }

    fn ends() -> (Plain, Producer<Plain>, Consumer<Plain>) {
        let words = Plain::new();
        (words.clone(), Producer::new(words.clone(), CAPACITY), Consumer::new(words, CAPACITY))
    }

    /// Of any kind, or near to what the ends write.
    fn any_word() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), 0u64..4096, (0u64..32).prop_map(|line| line * 64)]
    }

    proptest! {
        /// Against a queue: what is written is read, in order; room is refused only where the queue is nearly full.
        #[test]
        fn records_arrive_as_they_were_written(
            steps in proptest::collection::vec((any::<bool>(), 0usize..300, any::<u8>()), 1..300),
        ) {
            let ((_, mut producer, mut consumer), mut queue) = (ends(), VecDeque::<Vec<u8>>::new());
            let mut buffer = [0; 304];
            for (writes, bytes, value) in steps {
                if writes {
                    let used: usize = queue.iter().map(|record| taken(record.len())).sum();
                    if producer.has_room(1, bytes).unwrap() {
                        let record: Vec<u8> = (0..bytes).map(|at| value.wrapping_add(at as u8)).collect();
                        producer.push(&record);
                        producer.publish();
                        queue.push_back(record);
                    } else {
                        prop_assert!(used + taken(bytes) + 2 * LINE > CAPACITY);
                    }
                } else {
                    let popped = consumer.pop(&mut buffer).unwrap();
                    prop_assert_eq!(popped.map(|bytes| buffer[..bytes].to_vec()), queue.pop_front());
                }
                prop_assert_eq!(consumer.is_empty(), queue.is_empty());
            }
        }

        /// Whatever one end's process writes anywhere, the other stays within its memory, ends, and says so or goes on.
        #[test]
        fn a_hostile_end_does_no_more_than_end_it(
            writes in proptest::collection::vec((0..memory_bytes(CAPACITY) / WORD, any_word()), 1..60),
        ) {
            let (words, mut producer, mut consumer) = ends();
            let mut buffer = [0; 304];
            for (at, value) in writes {
                words.word(at * WORD).store(value, Ordering::Relaxed);
                for _ in 0..4 {
                    match consumer.pop(&mut buffer) {
                        Ok(Some(bytes)) => prop_assert!(bytes <= buffer.len()),
                        Ok(None) | Err(Corrupt) => break,
                    }
                }
                if producer.has_room(1, 100) == Ok(true) {
                    producer.push(&[7; 100]);
                    producer.publish();
                }
            }
        }
    }

    #[test]
    fn who_sleeps_is_woken_once() {
        let (_, mut producer, mut consumer) = ends();
        assert!(!producer.publish(), "it is awake");
        consumer.lie_down();
        settle();
        assert!(consumer.is_empty());
        producer.push(b"a");
        assert!(producer.publish());
        producer.push(b"b");
        assert!(!producer.publish(), "it has been woken");
        assert!(!consumer.get_up());
        consumer.lie_down();
        assert!(consumer.get_up());
        let mut buffer = [0; 64];
        assert_eq!(consumer.pop(&mut buffer), Ok(Some(1)));
        assert_eq!(consumer.pop(&mut buffer), Ok(Some(1)));
        assert_eq!((buffer[0], consumer.pop(&mut buffer)), (b'b', Ok(None)));
    }

    #[test]
    fn what_no_end_writes_is_found() {
        for (at, value) in [(PRODUCED_AT, 63), (PRODUCED_AT, 2048), (RECORDS_AT, 57), (RECORDS_AT, u64::MAX)] {
            let (words, mut producer, mut consumer) = ends();
            producer.push(&[1; 40]);
            producer.publish();
            words.word(at).store(value, Ordering::Relaxed);
            assert_eq!(consumer.pop(&mut [0; 304]), Err(Corrupt), "{value} at {at}");
        }
        let (words, producer, _) = ends();
        for value in [64, 1, u64::MAX] {
            words.word(CONSUMED_AT).store(value, Ordering::Relaxed);
            assert_eq!(producer.has_room(1, 1), Err(Corrupt), "{value}");
        }
    }
}

#[cfg(all(test, interleavings))]
mod loom_tests {
    use loom::{model::Builder, sync::Arc, thread};

    use super::*;

    /// The least that goes round: two records of one word.
    const CAPACITY: usize = 2 * LINE;

    #[derive(Clone)]
    struct Few(Arc<Vec<AtomicU64>>);

    impl Few {
        /// The words that are used: places, the flag, and two of each record.
        fn index(at: usize) -> usize {
            let (line, word) = (at / LINE, at % LINE / WORD);
            assert!(word < 2, "a record of one word");
            2 * line + word
        }
    }

    impl Words for Few {
        fn word(&self, at: usize) -> &AtomicU64 {
            &self.0[Self::index(at)]
        }
        fn write(&self, at: usize, bytes: &[u8]) {
            if let Ok(word) = bytes.try_into() {
                self.word(at).store(u64::from_ne_bytes(word), Ordering::Relaxed);
            }
        }
        fn read(&self, at: usize, into: &mut [u8]) {
            if !into.is_empty() {
                into.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes());
            }
        }
    }

    fn ends() -> (Producer<Few>, Consumer<Few>) {
        let words = Few(Arc::new((0..2 * memory_bytes(CAPACITY) / LINE).map(|_| AtomicU64::new(0)).collect()));
        (Producer::new(words.clone(), CAPACITY), Consumer::new(words, CAPACITY))
    }

    fn model(check: impl Fn() + Sync + Send + 'static) {
        let mut builder = Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(check);
    }

    /// Three records through room for two, while the other end reads.
    fn send_three(publish: fn(&mut Producer<Few>)) {
        let (mut producer, mut consumer) = ends();
        let sender = thread::spawn(move || {
            for value in 1u64..=3 {
                while producer.has_room(0, LINE) != Ok(true) {
                    thread::yield_now();
                }
                producer.push(&value.to_ne_bytes());
                publish(&mut producer);
            }
        });
        for value in 1u64..=3 {
            let mut record = [0; WORD];
            while consumer.pop(&mut record).expect("nobody is hostile").is_none() {
                thread::yield_now();
            }
            assert_eq!(u64::from_ne_bytes(record), value, "torn");
        }
        sender.join().unwrap();
    }

    #[test]
    fn loom_records_are_seen_whole_and_in_order() {
        model(|| {
            send_three(|producer| {
                producer.publish();
            });
        });
    }

    /// Control: shows the place without what was written before it.
    #[test]
    #[should_panic(expected = "torn")]
    fn loom_control_a_relaxed_place_shows_old_bytes() {
        model(|| {
            send_three(|producer| producer.words.word(PRODUCED_AT).store(producer.produced, Ordering::Relaxed));
        });
    }

    /// A consumer lies down while a record is published: it has seen it, or is to be woken.
    fn lie_down_while_publishing(settle: fn()) {
        let (mut producer, consumer) = ends();
        let sender = thread::spawn(move || {
            producer.push(&[1; WORD]);
            producer.publish()
        });
        consumer.lie_down();
        settle();
        let sleeps = consumer.is_empty();
        let wakes = sender.join().unwrap();
        assert!(!sleeps || wakes, "it sleeps through");
    }

    #[test]
    fn loom_what_is_published_is_seen_or_wakes() {
        model(|| lie_down_while_publishing(settle));
    }

    /// Control: looks without the fence.
    #[test]
    #[should_panic(expected = "it sleeps through")]
    fn loom_control_a_look_without_a_fence_is_too_early() {
        model(|| lie_down_while_publishing(|| {}));
    }
}
