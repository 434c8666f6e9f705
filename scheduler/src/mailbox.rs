//! Mailboxes between one ModelThread and the RankThread: no locks, no allocation, and neither side ever waits.
//!
//! Candidates go through one latest-value slot per model and a queue of the models whose slot changed, so a thousand
//! updates between two looks cost the RankThread one. Grants and their answers must all arrive: they go through
//! rings. Every bound is exact (see [`link`]), so nothing can be full.
//!
//! A slot is a sequence lock whose words are atomics (Boehm, "Can seqlocks get along with programming language memory
//! models?", MSPC 2012), so no `unsafe` is needed. Checked with loom, with controls that must fail (`loom_tests.rs`).

use proto::{GpuId, ModelId, Timestamp};

use crate::messages::{Candidate, GpuUpdate, Grant};
use sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// The same names from loom when it explores, from the standard library otherwise.
mod sync {
    #[cfg(loom)]
    pub use loom::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    };
    #[cfg(not(loom))]
    pub use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    };
}

/// Every message of a ring fits three words.
type Words = [u64; 3];
/// A candidate fits four.
type CandidateWords = [u64; 4];

/// The mailboxes of one ModelThread, for models with ids below `models_max`.
///
/// At most one grant is under way for a model, so `models_max` grants fit. Its answer is taken out before any
/// candidate that the RankThread sees later than the grant (see [`RankEnd::poll`]), but the answer to the model's
/// next grant may already have come by then: two answers a model fit.
#[must_use]
pub fn link(models_max: usize) -> (ModelEnd, RankEnd) {
    let candidates = Arc::new(LatestValues::new(models_max));
    let (grant_sender, grants) = ring(models_max);
    let (gpu_sender, gpus) = ring(2 * models_max);
    let (changed_sender, changed) = ring(models_max);
    let model_end = ModelEnd {
        candidates: Arc::clone(&candidates),
        versions: vec![0; models_max],
        changed: changed_sender,
        gpus: gpu_sender,
        grants,
    };
    (model_end, RankEnd { candidates, changed, gpus, grants: grant_sender })
}

/// The ModelThread's side.
#[derive(Debug)]
pub struct ModelEnd {
    candidates: Arc<LatestValues>,
    /// By model: even, and what its slot's version is; only this side writes it.
    versions: Vec<u64>,
    changed: Sender,
    gpus: Sender,
    grants: Receiver,
}

/// The RankThread's side.
#[derive(Debug)]
pub struct RankEnd {
    candidates: Arc<LatestValues>,
    changed: Receiver,
    gpus: Receiver,
    grants: Sender,
}

/// What the RankThread finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromModelThread {
    /// For `RankThread::handle_gpu`.
    Gpu(GpuId, GpuUpdate),
    /// For `RankThread::handle_candidate`.
    Candidate(ModelId, Option<Candidate>),
}

impl ModelEnd {
    /// Posts a model's newest candidate; an older one that was not looked at yet is gone.
    ///
    /// # Panics
    /// If the model's id is not below the link's `models_max`.
    pub fn post_candidate(&mut self, model: ModelId, candidate: Option<Candidate>) {
        let slot = &self.candidates.slots[model.0 as usize];
        slot.write(&mut self.versions[model.0 as usize], encode_candidate(candidate));
        // After the value, so that whoever sees the flag cleared by the reader knows that the reader has yet to look.
        if !slot.is_changed.swap(true, Ordering::AcqRel) {
            self.changed.send([u64::from(model.0), 0, 0]);
        }
    }

    /// Posts the answer to a grant.
    pub fn post_gpu(&mut self, gpu: GpuId, update: GpuUpdate) {
        self.gpus.send(encode_gpu(gpu, update));
    }

    /// The next grant.
    pub fn poll_grant(&mut self) -> Option<Grant> {
        self.grants.receive().map(|[ids, free_at, gpus]| Grant {
            model: ModelId((ids >> 32) as u32),
            gpu: GpuId(ids as u32),
            free_at: Timestamp(free_at as i64),
            gpus: gpus as u32,
        })
    }
}

impl RankEnd {
    /// The next thing to take in; answers to grants first, then candidates.
    pub fn poll(&mut self) -> Option<FromModelThread> {
        if let Some(words) = self.gpus.receive() {
            let (gpu, update) = decode_gpu(words);
            return Some(FromModelThread::Gpu(gpu, update));
        }
        while let Some([model, ..]) = self.changed.receive() {
            let slot = &self.candidates.slots[model as usize];
            // Before the value is read: a write that the read misses finds the flag cleared and queues the model again.
            slot.is_changed.swap(false, Ordering::AcqRel);
            // A read that meets a write gives up: that write queues the model again when it is done.
            if let Some(words) = slot.read() {
                return Some(FromModelThread::Candidate(ModelId(model as u32), decode_candidate(words)));
            }
        }
        None
    }

    /// Posts a grant.
    pub fn post_grant(&mut self, grant: Grant) {
        self.grants.send([
            u64::from(grant.model.0) << 32 | u64::from(grant.gpu.0),
            grant.free_at.0 as u64,
            u64::from(grant.gpus),
        ]);
    }
}

fn encode_candidate(candidate: Option<Candidate>) -> CandidateWords {
    // A size of 0 is no candidate.
    candidate.map_or([0; 4], |candidate| {
        let counts = u64::from(candidate.size) << 32 | u64::from(candidate.grants_seen);
        [counts, candidate.exec_at.0 as u64, candidate.latest.0 as u64, candidate.due_at.0 as u64]
    })
}

fn decode_candidate([counts, exec_at, latest, due_at]: CandidateWords) -> Option<Candidate> {
    let size = (counts >> 32) as u32;
    (size > 0).then_some(Candidate {
        size,
        exec_at: Timestamp(exec_at as i64),
        latest: Timestamp(latest as i64),
        due_at: Timestamp(due_at as i64),
        grants_seen: counts as u32,
    })
}

fn encode_gpu(gpu: GpuId, update: GpuUpdate) -> Words {
    let (kind, first, second) = match update {
        GpuUpdate::Planned { exec_at, free_at } => (0, exec_at.0, free_at.0),
        GpuUpdate::Returned => (1, 0, 0),
        GpuUpdate::Finished { finished_at } => (2, finished_at.0, 0),
    };
    [kind << 32 | u64::from(gpu.0), first as u64, second as u64]
}

fn decode_gpu([head, first, second]: Words) -> (GpuId, GpuUpdate) {
    let update = match head >> 32 {
        0 => GpuUpdate::Planned { exec_at: Timestamp(first as i64), free_at: Timestamp(second as i64) },
        1 => GpuUpdate::Returned,
        _ => GpuUpdate::Finished { finished_at: Timestamp(first as i64) },
    };
    (GpuId(head as u32), update)
}

fn zeros<const WORDS: usize>() -> [AtomicU64; WORDS] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

fn load<const WORDS: usize>(words: &[AtomicU64; WORDS]) -> [u64; WORDS] {
    std::array::from_fn(|index| words[index].load(Ordering::Relaxed))
}

/// One slot per model; written by one thread, read by another.
#[derive(Debug)]
struct LatestValues {
    slots: Box<[Slot]>,
}

/// Fills a cache line of its own, as neighbours may belong to other threads.
#[derive(Debug)]
#[repr(align(64))]
struct Slot {
    /// Odd while a write is going on.
    version: AtomicU64,
    words: [AtomicU64; 4],
    /// The model is in the queue of changed ones, or about to be.
    is_changed: AtomicBool,
}

impl LatestValues {
    fn new(models_max: usize) -> Self {
        let slot = |_| Slot { version: AtomicU64::new(0), words: zeros(), is_changed: AtomicBool::new(false) };
        Self { slots: (0..models_max).map(slot).collect() }
    }
}

impl Slot {
    fn write(&self, version: &mut u64, words: CandidateWords) {
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
    fn read(&self) -> Option<CandidateWords> {
        let before = self.version.load(Ordering::Acquire);
        let words = load(&self.words);
        // No word was read after this version.
        fence(Ordering::Acquire);
        let after = self.version.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(words)
    }
}

/// A bounded queue with one sender and one receiver.
#[derive(Debug)]
struct Ring {
    slots: Box<[[AtomicU64; 3]]>,
    /// Messages taken out; written by the receiver.
    taken: Padded,
    /// Messages put in; written by the sender.
    put: Padded,
}

/// A counter in a cache line of its own: the two sides write different ones.
#[derive(Debug)]
#[repr(align(64))]
struct Padded(AtomicUsize);

#[derive(Debug)]
struct Sender {
    ring: Arc<Ring>,
    put: usize,
    /// What `taken` was when it was last looked at.
    taken_seen: usize,
}

#[derive(Debug)]
struct Receiver {
    ring: Arc<Ring>,
    taken: usize,
    /// What `put` was when it was last looked at.
    put_seen: usize,
}

fn ring(capacity: usize) -> (Sender, Receiver) {
    let ring = Arc::new(Ring {
        slots: (0..capacity.next_power_of_two()).map(|_| zeros()).collect(),
        taken: Padded(AtomicUsize::new(0)),
        put: Padded(AtomicUsize::new(0)),
    });
    (Sender { ring: Arc::clone(&ring), put: 0, taken_seen: 0 }, Receiver { ring, taken: 0, put_seen: 0 })
}

impl Sender {
    /// # Panics
    /// If the ring is full; its capacity is the bound of what may be under way.
    fn send(&mut self, words: Words) {
        let capacity = self.ring.slots.len();
        if self.put - self.taken_seen == capacity {
            self.taken_seen = self.ring.taken.0.load(Ordering::Acquire);
            assert!(self.put - self.taken_seen < capacity, "more than {capacity} messages are under way");
        }
        let slot = &self.ring.slots[self.put & (capacity - 1)];
        for (slot, word) in slot.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        self.put += 1;
        self.ring.put.0.store(self.put, Ordering::Release);
    }
}

impl Receiver {
    fn receive(&mut self) -> Option<Words> {
        if self.taken == self.put_seen {
            self.put_seen = self.ring.put.0.load(Ordering::Acquire);
            if self.taken == self.put_seen {
                return None;
            }
        }
        let slot = &self.ring.slots[self.taken & (self.ring.slots.len() - 1)];
        let words = load(slot);
        self.taken += 1;
        self.ring.taken.0.store(self.taken, Ordering::Release);
        Some(words)
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
