//! Mailboxes between one ModelThread and the RankThread: no locks, and neither side ever waits.
//!
//! Candidates go through one latest-value slot per model and a queue of the models whose slot changed, so a thousand
//! updates between two looks cost the RankThread one; so it is with what waits without an objective. Grants and what
//! becomes of GPUs must all arrive: they go through rings, and what a ring has no room for waits on its sender's side,
//! in order.
//!
//! A slot is a sequence lock whose words are atomics (Boehm, "Can seqlocks get along with programming language memory
//! models?", MSPC 2012), so no `unsafe` is needed. Checked with loom, with controls that must fail (`loom_tests.rs`).

use std::collections::VecDeque;

use proto::{GpuId, ModelId, Span, Timestamp};
#[cfg(not(interleavings))]
use rtrb::{Consumer, Producer, RingBuffer};

use crate::messages::{Background, Candidate, GpuUpdate, Grant, Price, Traffic, Whereabouts};
#[cfg(interleavings)]
use ring_model::{Consumer, Producer, RingBuffer};
use sync::{Arc, AtomicBool, AtomicU64, Ordering, fence};

/// The same names from loom when it explores, from the standard library otherwise.
mod sync {
    #[cfg(interleavings)]
    pub(crate) use loom::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    };
    #[cfg(not(interleavings))]
    pub(crate) use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    };
}

/// A candidate, or what waits without an objective, in words.
type Words = [u64; WORDS];
const WORDS: usize = 12;

/// Messages in each ring of grants and of updates; more wait with their sender.
const RING_MESSAGES: usize = 4096;

/// The mailboxes of one ModelThread, for models with ids below `models_max`.
#[must_use]
pub fn link(models_max: usize) -> (ModelEnd, RankEnd) {
    let slots = Arc::new(LatestValues::new(2 * models_max));
    let prices = Arc::new((0..models_max).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let (grant_sender, grants) = ring(RING_MESSAGES);
    let (gpu_sender, gpus) = ring(RING_MESSAGES);
    // Each slot is in it at most once.
    let (changed_sender, changed) = ring(2 * models_max);
    let model_end = ModelEnd {
        slots: Arc::clone(&slots),
        versions: vec![0; 2 * models_max],
        changed: changed_sender,
        gpus: gpu_sender,
        grants,
        prices: Arc::clone(&prices),
    };
    (model_end, RankEnd { slots, changed, gpus, grants: grant_sender, prices })
}

/// The ModelThread's side.
#[derive(Debug)]
pub struct ModelEnd {
    slots: Arc<LatestValues>,
    /// By slot: even, and what its version is; only this side writes it.
    versions: Vec<u64>,
    changed: Sender<u32>,
    gpus: Sender<(GpuId, GpuUpdate)>,
    grants: Consumer<FromRankThread>,
    /// By model: the last one that was told.
    prices: Arc<Vec<AtomicU64>>,
}

/// The RankThread's side.
#[derive(Debug)]
pub struct RankEnd {
    slots: Arc<LatestValues>,
    changed: Consumer<u32>,
    gpus: Consumer<(GpuId, GpuUpdate)>,
    grants: Sender<FromRankThread>,
    prices: Arc<Vec<AtomicU64>>,
}

/// What the RankThread finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromModelThread {
    /// For `RankThread::handle_gpu`.
    Gpu(GpuId, GpuUpdate),
    /// For `RankThread::handle_candidate`.
    Candidate(ModelId, Option<Candidate>),
    /// For `RankThread::handle_background`.
    Background(ModelId, Option<Background>),
}

/// What a ModelThread finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromRankThread {
    /// For `ModelThread::handle_grant`.
    Grant(Grant),
    /// For `ModelThread::handle_whereabouts`.
    Whereabouts(ModelId, Whereabouts),
    /// To the GPU's backend: [`PlannerOutput::Unload`](crate::PlannerOutput::Unload). It goes the way of the load that
    /// it makes room for, so that it comes first.
    Unload {
        /// The GPU.
        gpu: GpuId,
        /// The model.
        model: ModelId,
    },
    /// To the GPU's backend: [`PlannerOutput::Load`](crate::PlannerOutput::Load).
    Load {
        /// The GPU.
        gpu: GpuId,
        /// The model.
        model: ModelId,
        /// The earliest start.
        earliest: Timestamp,
        /// The latest start.
        latest: Timestamp,
        /// How long it takes, if it goes as planned.
        takes: Span,
    },
    /// No grant for this model comes after this one: it is to be handed to another ModelThread.
    Release(ModelId),
}

impl ModelEnd {
    /// Posts a model's newest candidate; an older one that was not looked at yet is gone.
    ///
    /// # Panics
    /// If the model's id is not below the link's `models_max`.
    pub fn post_candidate(&mut self, model: ModelId, candidate: Option<Candidate>) {
        self.post(candidate_slot(model), encode_candidate(candidate));
    }

    /// Posts what waits of a model without an objective; what was posted before and not looked at yet is gone.
    ///
    /// # Panics
    /// As [`Self::post_candidate`].
    pub fn post_background(&mut self, model: ModelId, background: Option<Background>) {
        self.post(background_slot(model), encode_background(background));
    }

    fn post(&mut self, index: u32, words: Words) {
        let slot = &self.slots.slots[index as usize];
        slot.write(&mut self.versions[index as usize], words);
        // After the value, so that whoever sees the flag cleared by the reader knows that the reader has yet to look.
        if !slot.is_changed.swap(true, Ordering::AcqRel) {
            self.changed.send(index);
        }
    }

    /// Posts what became of a GPU.
    pub fn post_gpu(&mut self, gpu: GpuId, update: GpuUpdate) {
        self.gpus.send((gpu, update));
    }

    /// The next thing to take in, in the order in which it was posted.
    pub fn poll(&mut self) -> Option<FromRankThread> {
        self.grants.pop().ok()
    }

    /// What a model's batches are sized by.
    #[must_use]
    pub fn price(&self, model: ModelId) -> Price {
        // It is one word, and nothing else goes with it.
        self.prices.get(model.0 as usize).map_or_else(Price::default, |word| decode_price(word.load(Ordering::Relaxed)))
    }

    /// Whether [`Self::poll`] has something to yield.
    #[must_use]
    pub fn has_mail(&self) -> bool {
        !self.grants.is_empty()
    }

    /// Sends what had no room before. True if there is still something left.
    pub fn flush(&mut self) -> bool {
        self.changed.flush() | self.gpus.flush()
    }
}

impl RankEnd {
    /// The next thing to take in; what became of GPUs first, then candidates.
    pub fn poll(&mut self) -> Option<FromModelThread> {
        if let Ok((gpu, update)) = self.gpus.pop() {
            return Some(FromModelThread::Gpu(gpu, update));
        }
        while let Ok(index) = self.changed.pop() {
            let slot = &self.slots.slots[index as usize];
            // Before the value is read: a write that the read misses finds the flag cleared and queues the model again.
            slot.is_changed.swap(false, Ordering::AcqRel);
            // A read that meets a write gives up: that write queues the model again when it is done.
            if let Some(words) = slot.read() {
                let model = ModelId(index / 2);
                return Some(match index == candidate_slot(model) {
                    true => FromModelThread::Candidate(model, decode_candidate(words)),
                    false => FromModelThread::Background(model, decode_background(words)),
                });
            }
        }
        None
    }

    /// Whether [`Self::poll`] has something to yield.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.changed.is_empty()
    }

    /// A model's batches are sized by this from now on. Nobody is woken: it is looked at when something else happens.
    pub fn post_price(&mut self, model: ModelId, price: Price) {
        if let Some(word) = self.prices.get(model.0 as usize) {
            word.store(encode_price(price), Ordering::Relaxed);
        }
    }

    /// Posts a message.
    pub fn post(&mut self, message: FromRankThread) {
        self.grants.send(message);
    }

    /// Sends what had no room before. True if there is still something left.
    pub fn flush(&mut self) -> bool {
        self.grants.flush()
    }
}

/// A ring's sending side. What does not fit waits here: bounded by what may be under way, as every grant and every plan
/// takes a model or a GPU with it.
#[derive(Debug)]
struct Sender<T> {
    ring: Producer<T>,
    waiting: VecDeque<T>,
}

fn ring<T>(capacity: usize) -> (Sender<T>, Consumer<T>) {
    let (ring, consumer) = RingBuffer::new(capacity);
    (Sender { ring, waiting: VecDeque::new() }, consumer)
}

impl<T> Sender<T> {
    fn send(&mut self, message: T) {
        self.waiting.push_back(message);
        self.flush();
    }

    /// True if something is left.
    fn flush(&mut self) -> bool {
        while let Some(message) = self.waiting.pop_front() {
            if let Err(rtrb::PushError::Full(message)) = self.ring.push(message) {
                self.waiting.push_front(message);
                return true;
            }
        }
        false
    }
}

/// A model's two slots are neighbours.
fn candidate_slot(model: ModelId) -> u32 {
    2 * model.0
}

fn background_slot(model: ModelId) -> u32 {
    2 * model.0 + 1
}

/// A size of 0 is nothing.
fn encode_counts(size: u32, grants_seen: u32) -> u64 {
    u64::from(size) << 32 | u64::from(grants_seen)
}

fn encode_background(background: Option<Background>) -> Words {
    let mut words = [0; WORDS];
    if let Some(Background { size, since, least, most, grants_seen }) = background {
        let told = [encode_counts(size, grants_seen), since.0 as u64, least.0 as u64, most.0 as u64];
        words[..told.len()].copy_from_slice(&told);
    }
    words
}

fn decode_background([counts, since, least, most, ..]: Words) -> Option<Background> {
    let size = (counts >> 32) as u32;
    (size > 0).then_some(Background {
        size,
        since: Timestamp(since as i64),
        least: Span(least as i64),
        most: Span(most as i64),
        grants_seen: counts as u32,
    })
}

fn encode_candidate(candidate: Option<Candidate>) -> Words {
    candidate.map_or([0; WORDS], |candidate| {
        let Candidate { size, exec_at, anywhere_at, latest, due_at, grants_seen, expected_at, patience, traffic } =
            candidate;
        let [gap, arrived_at, fixed, per_task, bounds] = traffic.map_or([0; 5], |traffic| {
            let Traffic { gap, arrived_at, fixed, per_task, target, gpu_price } = traffic;
            [gap.0 as u64, arrived_at.0 as u64, fixed.0 as u64, per_task.0 as u64, encode_counts(target, gpu_price)]
        });
        let times = [exec_at, anywhere_at, latest, due_at, expected_at].map(|at| at.0 as u64);
        let [exec_at, anywhere_at, latest, due_at, expected_at] = times;
        let counts = encode_counts(size, grants_seen);
        let own = [counts, exec_at, anywhere_at, latest, due_at, expected_at, patience.0 as u64];
        let of_traffic = [gap, arrived_at, fixed, per_task, bounds];
        std::array::from_fn(|index| own.get(index).copied().unwrap_or_else(|| of_traffic[index - own.len()]))
    })
}

fn decode_candidate(words: Words) -> Option<Candidate> {
    let [counts, exec_at, anywhere_at, latest, due_at, expected_at, patience, traffic @ ..] = words;
    let [gap, arrived_at, fixed, per_task, bounds] = traffic;
    let size = (counts >> 32) as u32;
    let traffic = (gap > 0).then_some(Traffic {
        gap: Span(gap as i64),
        arrived_at: Timestamp(arrived_at as i64),
        fixed: Span(fixed as i64),
        per_task: Span(per_task as i64),
        target: (bounds >> 32) as u32,
        gpu_price: bounds as u32,
    });
    (size > 0).then_some(Candidate {
        size,
        exec_at: Timestamp(exec_at as i64),
        anywhere_at: Timestamp(anywhere_at as i64),
        latest: Timestamp(latest as i64),
        due_at: Timestamp(due_at as i64),
        grants_seen: counts as u32,
        expected_at: Timestamp(expected_at as i64),
        patience: Span(patience as i64),
        traffic,
    })
}

fn encode_price(Price { price, execution_ms }: Price) -> u64 {
    u64::from(price.to_bits()) << 32 | u64::from(execution_ms.to_bits())
}

fn decode_price(word: u64) -> Price {
    Price { price: f32::from_bits((word >> 32) as u32), execution_ms: f32::from_bits(word as u32) }
}

fn zeros<const WORDS: usize>() -> [AtomicU64; WORDS] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

fn load<const WORDS: usize>(words: &[AtomicU64; WORDS]) -> [u64; WORDS] {
    std::array::from_fn(|index| words[index].load(Ordering::Relaxed))
}

/// Slots that one thread writes and another reads.
#[derive(Debug)]
struct LatestValues {
    slots: Box<[Slot]>,
}

/// Fills cache lines of its own, as neighbours may belong to other threads.
#[derive(Debug)]
#[repr(align(64))]
struct Slot {
    /// Odd while a write is going on.
    version: AtomicU64,
    words: [AtomicU64; WORDS],
    /// It is in the queue of changed ones, or about to be.
    is_changed: AtomicBool,
}

impl LatestValues {
    fn new(count: usize) -> Self {
        let slot = |_| Slot { version: AtomicU64::new(0), words: zeros(), is_changed: AtomicBool::new(false) };
        Self { slots: (0..count).map(slot).collect() }
    }
}

impl Slot {
    fn write(&self, version: &mut u64, words: Words) {
        self.version.store(*version + 1, Ordering::Relaxed);
        // No word becomes visible before the odd version.
        fence(Ordering::Release);
        for (slot, word) in self.words.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        *version += 2;
        self.version.store(*version, Ordering::Release);
    }

    /// `None` if a write is going on.
    fn read(&self) -> Option<Words> {
        let before = self.version.load(Ordering::Acquire);
        let words = load(&self.words);
        // No word was read after this version.
        fence(Ordering::Acquire);
        let after = self.version.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(words)
    }
}

/// `rtrb`'s rings as far as they are used here, for loom to see. They are checked elsewhere; here only what is built
/// on them.
#[cfg(interleavings)]
mod ring_model {
    use std::collections::VecDeque;

    use loom::sync::{Arc, Mutex};

    #[derive(Debug)]
    pub(super) struct RingBuffer;
    #[derive(Debug)]
    pub(super) struct Producer<T>(Arc<Mutex<VecDeque<T>>>);
    #[derive(Debug)]
    pub(super) struct Consumer<T>(Arc<Mutex<VecDeque<T>>>);

    impl RingBuffer {
        #[allow(clippy::new_ret_no_self)]
        pub(super) fn new<T>(_capacity: usize) -> (Producer<T>, Consumer<T>) {
            let ring = Arc::new(Mutex::new(VecDeque::new()));
            (Producer(Arc::clone(&ring)), Consumer(ring))
        }
    }

    impl<T> Producer<T> {
        pub(super) fn push(&mut self, message: T) -> Result<(), rtrb::PushError<T>> {
            self.0.lock().unwrap().push_back(message);
            Ok(())
        }
    }

    impl<T> Consumer<T> {
        pub(super) fn pop(&mut self) -> Result<T, rtrb::PopError> {
            self.0.lock().unwrap().pop_front().ok_or(rtrb::PopError::Empty)
        }

        pub(super) fn is_empty(&self) -> bool {
            self.0.lock().unwrap().is_empty()
        }
    }
}

#[cfg(all(test, interleavings))]
mod loom_tests;
#[cfg(all(test, not(interleavings)))]
mod tests;
