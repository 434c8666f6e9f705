//! Mailboxes between one ModelThread and the RankThread: no locks, and neither side ever waits ([`spsc`]).
//!
//! Candidates are latest values, of which only the newest counts; so is what waits without an objective. Grants and
//! what becomes of GPUs must all arrive: they go through rings. What a ring has no room for is bounded by what may be
//! under way, as every grant and every plan takes a model or a GPU with it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use proto::{GpuId, ModelId, Span, Timestamp};
use spsc::{LatestReader, LatestWriter, Receiver, Sender, latest, ring};

use crate::messages::{Background, Candidate, GpuUpdate, Grant, Price, Traffic, Whereabouts};

/// A candidate, or what waits without an objective, in words.
type Words = [u64; WORDS];
const WORDS: usize = 12;

/// Messages in each ring of grants and of updates; more wait with their sender.
const RING_MESSAGES: usize = 4096;

/// The mailboxes of one ModelThread, for models with ids below `models_max`.
#[must_use]
pub fn link(models_max: usize) -> (ModelEnd, RankEnd) {
    let (posted, waiting) = latest(2 * models_max);
    let prices = Arc::new((0..models_max).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let (grant_sender, grants) = ring(RING_MESSAGES);
    let (gpu_sender, gpus) = ring(RING_MESSAGES);
    let model_end = ModelEnd { waiting: posted, gpus: gpu_sender, grants, prices: Arc::clone(&prices) };
    (model_end, RankEnd { waiting, gpus, grants: grant_sender, prices })
}

/// The ModelThread's side.
#[derive(Debug)]
pub struct ModelEnd {
    /// What waits of each model, with an objective and without.
    waiting: LatestWriter<WORDS>,
    gpus: Sender<(GpuId, GpuUpdate)>,
    grants: Receiver<FromRankThread>,
    /// By model: the last one that was told.
    prices: Arc<Vec<AtomicU64>>,
}

/// The RankThread's side.
#[derive(Debug)]
pub struct RankEnd {
    waiting: LatestReader<WORDS>,
    gpus: Receiver<(GpuId, GpuUpdate)>,
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
        self.waiting.post(candidate_slot(model), encode_candidate(candidate));
    }

    /// Posts what waits of a model without an objective; what was posted before and not looked at yet is gone.
    ///
    /// # Panics
    /// As [`Self::post_candidate`].
    pub fn post_background(&mut self, model: ModelId, background: Option<Background>) {
        self.waiting.post(background_slot(model), encode_background(background));
    }

    /// Posts what became of a GPU.
    pub fn post_gpu(&mut self, gpu: GpuId, update: GpuUpdate) {
        self.gpus.send((gpu, update));
    }

    /// The next thing to take in, in the order in which it was posted.
    pub fn poll(&mut self) -> Option<FromRankThread> {
        self.grants.poll()
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
        self.waiting.flush() | self.gpus.flush()
    }
}

impl RankEnd {
    /// The next thing to take in; what became of GPUs first, then candidates.
    pub fn poll(&mut self) -> Option<FromModelThread> {
        if let Some((gpu, update)) = self.gpus.poll() {
            return Some(FromModelThread::Gpu(gpu, update));
        }
        let (index, words) = self.waiting.poll()?;
        let model = ModelId(index / 2);
        Some(match index == candidate_slot(model) {
            true => FromModelThread::Candidate(model, decode_candidate(words)),
            false => FromModelThread::Background(model, decode_background(words)),
        })
    }

    /// Whether [`Self::poll`] has something to yield.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.waiting.is_empty()
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

#[cfg(test)]
mod tests;
