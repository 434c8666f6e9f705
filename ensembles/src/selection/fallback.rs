//! How many requests the better ones of several variants are tried for: all of them, until too many are asked in vain.
//!
//! A variant that gets more than its GPUs can do drops what it cannot answer in time, which a cheaper one answers then.
//! But it also takes the GPUs that the cheaper ones need, so where much is dropped fewer requests are to try it: how
//! many, a controller finds with additive steps both ways, so that in the end [`GAIN`] of all requests balance what is
//! lost. It needs neither the number of GPUs nor of other frontends, which each do the same.
//!
//! Which requests try a variant is not drawn at random: its part adds up, and each time that makes one it is tried, as
//! evenly as can be.

/// What a part grows by with each request that is answered. What is lost is known only once its deadline is near, when
/// hundreds of requests are under way that were admitted by the same part: growing sixteen times as fast, it overshoots
/// so far that some 4 % have no answer at twice the best one's capacity (docs/policy.md).
const GAIN: f64 = 1.0 / 32_768.0;
/// What the part of a variant falls by when it was asked in vain: it settles where that happens to one request in 24.
const IN_VAIN: f64 = 24.0 * GAIN;
/// What the parts of all better variants fall by when the last one was, too: one in 400.
const UNANSWERED: f64 = 400.0 * GAIN;
/// So many are tried however little came of it, or nobody would notice that it has become better.
const PART_MIN: f64 = 1.0 / 64.0;

/// What became of the requests so far.
#[derive(Debug, Clone)]
pub(super) struct Fallback {
    /// Of all variants but the last: of the requests that no better one is tried for, the part that tries it.
    parts: Vec<f64>,
    /// What has added up of them.
    sums: Vec<f64>,
}

impl Fallback {
    pub(super) fn new(variants: usize) -> Self {
        let better = variants.saturating_sub(1);
        Self { parts: vec![1.0; better], sums: vec![0.0; better] }
    }

    /// The first variant that the next request tries.
    pub(super) fn first(&mut self) -> usize {
        let is_tried = |(part, sum): (&f64, &mut f64)| {
            *sum += part;
            let is_tried = *sum >= 1.0;
            *sum -= f64::from(u8::from(is_tried));
            is_tried
        };
        self.parts.iter().zip(&mut self.sums).position(is_tried).unwrap_or(self.parts.len())
    }

    /// A request has ended for which these variants were asked, and had no time for it.
    pub(super) fn handle_ended(&mut self, in_vain: &[usize], is_answered: bool) {
        let is_unanswered = !is_answered && !in_vain.is_empty();
        for (variant, part) in self.parts.iter_mut().enumerate() {
            if in_vain.contains(&variant) {
                *part -= IN_VAIN;
            }
            *part += if is_unanswered { -UNANSWERED } else { GAIN };
            *part = part.clamp(PART_MIN, 1.0);
        }
    }

    /// How likely each variant is to be the first that is tried; they add up to 1.
    pub(super) fn weights(&self) -> Vec<f64> {
        let mut left = 1.0;
        let of = |part: &f64| {
            let weight = left * part;
            left -= weight;
            weight
        };
        let mut weights: Vec<f64> = self.parts.iter().map(of).collect();
        weights.push(left);
        weights
    }
}

#[cfg(test)]
mod tests;
