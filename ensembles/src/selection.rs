//! Which models of one task are asked, and how much each counts (Clipper, section 5): `init, select, observe` of a
//! policy. [`combine`] is what becomes of their predictions. No IO, no clock.
//!
//! Weights are sums. Clipper keeps s_i, and s_i <- s_i exp(-eta L) with each feedback; here its logarithm is kept,
//! which is -eta times a sum of losses, so that feedback may come in any order. Each loss is added to the block of
//! requests that its own request is in, and a block goes once it is older than the window: what a model was long ago
//! says little of what it is. Which blocks count depends on the requests, never on when their feedback came.
//!
//! What is drawn at random follows from a seed and the number of the request, so that a history can be replayed.

use repository::{Policy, Selection};
use thiserror::Error;

use crate::vote::Order;
use fallback::Fallback;

pub use sums::{BLOCKS, Sums};

pub mod combine;
mod fallback;
mod sums;

/// What a policy has learned.
#[derive(Debug, Clone)]
pub struct Learner {
    policy: Policy,
    seed: u64,
    members: usize,
    /// Requests so far, and losses of the latest [`BLOCKS`] and of the block that grows.
    sums: Sums,
    /// Which of several variants are tried.
    fallback: Fallback,
}

/// Who is asked for a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Counts from 0.
    pub request: u64,
    /// Those who are to be asked.
    pub members: Vec<usize>,
    /// At once, or one after another as long as there is need.
    pub order: Order,
    /// How much each member's prediction counts, whether it is asked or not; they add up to 1.
    pub weights: Vec<f64>,
    /// How likely it was that the one is asked who is; 1 where all are.
    pub probability: f64,
    /// Those who are given the request once it is answered, and whom nobody waits for.
    pub mirrored: Vec<usize>,
}

/// Why feedback does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unheard {
    /// The policy does not learn.
    #[error("its selection does not learn")]
    NotLearning,
    /// More requests have come since than the window has.
    #[error("it is older than the window")]
    Old,
    /// A loss is not between 0 and 1, or its request has not been.
    #[error("a loss that is not between 0 and 1, or of no request")]
    NoLoss,
}

impl Learner {
    /// Nothing is known yet (Clipper's `init`); so many models are there to select from.
    #[must_use]
    pub fn new(selection: &Selection, members: usize) -> Self {
        Self::starting_at(selection, members, 0)
    }

    /// The same, whose next request has that number.
    #[must_use]
    pub fn starting_at(selection: &Selection, members: usize, requests: u64) -> Self {
        let (policy, seed) = (selection.policy.clone(), selection.seed);
        let sums = Sums { requests, ..Sums::default() };
        Self { policy, seed, members, sums, fallback: Fallback::new(members) }
    }

    /// The same, which draws otherwise.
    #[must_use]
    pub fn seeded(self, more: u64) -> Self {
        Self { seed: self.seed ^ more, ..self }
    }

    /// Whom the next request asks (Clipper's `select`).
    pub fn select(&mut self) -> Choice {
        let request = self.sums.requests;
        self.sums.requests += 1;
        self.sums.forget(self.oldest());
        let weights = self.weights();
        let alone = |at: usize, probability: f64| {
            let weights = (0..self.members).map(|member| f64::from(u8::from(member == at))).collect();
            let mirrored = Vec::new();
            Choice { request, members: vec![at], order: Order::AtOnce, weights, probability, mirrored }
        };
        let several = |from: usize, order, weights| {
            let (members, mirrored) = ((from..self.members).collect(), Vec::new());
            Choice { request, members, order, weights, probability: 1.0, mirrored }
        };
        match &self.policy {
            Policy::Static => alone(0, 1.0),
            Policy::Majority | Policy::Weighted(_) | Policy::Exp4(_) => several(0, Order::AtOnce, weights),
            Policy::Cascade => several(0, Order::UntilConfident, weights),
            Policy::Fallback => several(self.fallback.first(), Order::UntilAnswered, weights),
            Policy::Canary(_) => {
                let at = drawn(&weights, uniform(self.seed, request, 0));
                // A version that fails leaves its requests to those that are meant to answer any.
                let others = (0..self.members).filter(|other| *other != at && weights[*other] > 0.0);
                let members = std::iter::once(at).chain(others).collect();
                let (probability, order, mirrored) = (weights[at], Order::OnFailure, Vec::new());
                Choice { request, members, order, weights, probability, mirrored }
            }
            Policy::Shadow(mirrored) => {
                let is_mirrored = uniform(self.seed, request, 0) < *mirrored;
                let mirrored = if is_mirrored { (1..self.members).collect() } else { Vec::new() };
                Choice { mirrored, ..alone(0, 1.0) }
            }
            Policy::Exp3(_) => {
                let at = drawn(&weights, uniform(self.seed, request, 0));
                alone(at, weights[at])
            }
            Policy::EpsilonGreedy(learning) => {
                let any = (uniform(self.seed, request, 1) * self.members as f64) as usize;
                let is_any = uniform(self.seed, request, 0) < learning.exploration;
                // Of those that lost alike the first.
                let best = (0..self.members).rev().max_by(|&one, &other| weights[one].total_cmp(&weights[other]));
                alone(if is_any { any.min(self.members - 1) } else { best.unwrap_or_default() }, 1.0)
            }
        }
    }

    /// A request has ended: these members were asked, and had no time for it.
    pub fn handle_ended(&mut self, in_vain: &[usize], is_answered: bool) {
        if self.policy == Policy::Fallback {
            self.fallback.handle_ended(in_vain, is_answered);
        }
    }

    /// Those who were asked for a request lost so much, 0 to 1 (Clipper's `observe`); nothing is known of the others.
    ///
    /// # Errors
    /// If that does not count.
    pub fn observe(&mut self, request: u64, probability: f64, losses: &[Option<f64>]) -> Result<(), Unheard> {
        self.lost(request, probability, losses).map(|lost| self.sums.add(&lost))
    }

    /// What [`Self::observe`] adds.
    ///
    /// # Errors
    /// As there.
    pub fn lost(&self, request: u64, probability: f64, losses: &[Option<f64>]) -> Result<Sums, Unheard> {
        let Some(learning) = self.policy.learning() else { return Err(Unheard::NotLearning) };
        let is_loss = |loss: &f64| (0.0..=1.0).contains(loss);
        let is_probability = probability > 0.0 && probability <= 1.0;
        if losses.len() != self.members || !losses.iter().flatten().all(is_loss) || !is_probability {
            return Err(Unheard::NoLoss);
        }
        if request >= self.sums.requests {
            return Err(Unheard::NoLoss);
        }
        let number = request / (learning.window / BLOCKS);
        if number < self.oldest() {
            return Err(Unheard::Old);
        }
        // Exp3: a model that is asked seldom loses as much as if it were asked always.
        let scale = if matches!(self.policy, Policy::Exp3(_)) { 1.0 / probability } else { 1.0 };
        let lost = losses.iter().map(|loss| loss.map_or((0.0, 0), |loss| (loss * scale, 1)));
        Ok(Sums { requests: 0, blocks: [(number, lost.collect())].into() })
    }

    /// What has been summed up.
    #[must_use]
    pub fn sums(&self) -> &Sums {
        &self.sums
    }

    /// The same.
    pub fn sums_mut(&mut self) -> &mut Sums {
        &mut self.sums
    }

    /// How much each member counts, or how likely it is that it is asked; they add up to 1. Of epsilon-greedy one minus
    /// what each has lost on average, in proportion.
    #[must_use]
    pub fn weights(&self) -> Vec<f64> {
        let even = || vec![1.0; self.members];
        let weights = match &self.policy {
            Policy::Static | Policy::Shadow(_) => {
                (0..self.members).map(|member| f64::from(u8::from(member == 0))).collect()
            }
            Policy::Majority | Policy::Cascade => even(),
            Policy::Weighted(weights) | Policy::Canary(weights) => weights.clone(),
            Policy::Fallback => self.fallback.weights(),
            Policy::Exp3(learning) | Policy::Exp4(learning) => {
                let logs: Vec<f64> = self.losses().into_iter().map(|(sum, _)| -learning.eta * sum).collect();
                let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                // Of logarithms that differ by hundreds the differences count.
                let weights: Vec<f64> = logs.into_iter().map(|log| (log - most).exp()).collect();
                let part = learning.exploration;
                scaled(weights).into_iter().map(|weight| (1.0 - part) * weight + part / self.members as f64).collect()
            }
            Policy::EpsilonGreedy(_) => {
                // Who has never been asked is tried first.
                let kept = |(sum, count): (f64, u64)| if count == 0 { 1.0 } else { 1.0 - sum / count as f64 };
                let kept: Vec<f64> = self.losses().into_iter().map(kept).collect();
                if kept.iter().sum::<f64>() > 0.0 { kept } else { even() }
            }
        };
        scaled(weights)
    }

    /// What each member has lost within the window, and in how many answers.
    fn losses(&self) -> Vec<(f64, u64)> {
        self.sums.since(self.oldest(), self.members)
    }

    /// The number of the first block that counts.
    fn oldest(&self) -> u64 {
        self.sums.oldest(self.block().unwrap_or(1))
    }

    /// Requests of a block of its window, if it learns.
    #[must_use]
    pub fn block(&self) -> Option<u64> {
        self.policy.learning().map(|learning| learning.window / BLOCKS)
    }
}

/// In proportion, so that they add up to 1.
fn scaled(weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Whom a number from 0 to 1 falls to, if each has its part of that.
fn drawn(weights: &[f64], at: f64) -> usize {
    let mut below = 0.0;
    let falls = |weight: &f64| {
        below += weight;
        at < below
    };
    weights.iter().position(falls).unwrap_or(weights.len() - 1)
}

/// A number from 0 to below 1 that follows from these (`SplitMix64`: Steele, Lea and Flood 2014).
fn uniform(seed: u64, request: u64, which: u64) -> f64 {
    let step = request.wrapping_mul(2).wrapping_add(which).wrapping_add(1);
    let mut word = seed.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^= word >> 31;
    (word >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
