//! How often models are asked for: counts that halve in a given time, so that a placement follows what changes and not
//! what happens by chance (Symphony solves its program again every few minutes).

use std::f64::consts::LN_2;

use proto::{Span, Timestamp};

/// A rate for each model.
#[derive(Debug, Clone)]
pub struct Rates {
    half_life: Span,
    began_at: Timestamp,
    /// Requests, of which those that are a half-life ago count half, and when that was so.
    counts: Vec<(f64, Timestamp)>,
}

impl Rates {
    /// Of so many models, none of which has been asked for. `half_life` is above 0.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn new(models: usize, half_life: Span, now: Timestamp) -> Self {
        assert!(half_life > Span::ZERO, "a half-life is above 0, found {half_life}");
        Self { half_life, began_at: now, counts: vec![(0.0, now); models] }
    }

    /// Takes in requests for a model that have come since it was last heard of.
    ///
    /// # Panics
    /// If there is no such model.
    pub fn handle_requests(&mut self, model: usize, requests: u64, now: Timestamp) {
        let (count, at) = &mut self.counts[model];
        *count = *count * left(self.half_life, now - *at) + requests as f64;
        *at = now.max(*at);
    }

    /// Requests a second of a model, as they weigh now: nothing that was before the beginning counts.
    ///
    /// # Panics
    /// If there is no such model.
    #[must_use]
    pub fn rate_rps(&self, model: usize, now: Timestamp) -> f64 {
        let (count, at) = self.counts[model];
        // One request a second would have come to so much.
        let unit = self.half_life.as_secs_f64() / LN_2 * (1.0 - left(self.half_life, now - self.began_at));
        if unit > 0.0 { count * left(self.half_life, now - at) / unit } else { 0.0 }
    }
}

/// What is left of a count after so long.
fn left(half_life: Span, span: Span) -> f64 {
    (-span.max(Span::ZERO).as_secs_f64() / half_life.as_secs_f64()).exp2()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HALF_LIFE: Span = Span::from_millis(30_000);

    fn at(ms: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis(ms)
    }

    proptest! {
        #[test]
        fn a_rate_is_the_sum_of_all_requests_each_by_its_age(
            gaps in prop::collection::vec((1i64..40_000, 0u64..100, 0usize..2), 1..40),
        ) {
            let mut rates = Rates::new(2, HALF_LIFE, at(0));
            let (mut now, mut all) = (0, Vec::new());
            for (gap, requests, model) in gaps {
                now += gap;
                rates.handle_requests(model, requests, at(now));
                all.push((now, requests, model));
            }
            now += 1_000;
            let weight = |age_ms: i64| 0.5f64.powf(age_ms as f64 / 30_000.0);
            let unit = 30.0 / 2.0f64.ln() * (1.0 - weight(now));
            for model in 0..2 {
                let of_model = all.iter().filter(|(_, _, of)| *of == model);
                let sum: f64 = of_model.map(|(came, requests, _)| *requests as f64 * weight(now - came)).sum();
                let found = rates.rate_rps(model, at(now));
                prop_assert!((found - sum / unit).abs() <= 1e-9 * (1.0 + found), "{found} {}", sum / unit);
            }
        }
    }

    #[test]
    fn an_even_rate_is_known_at_once_and_half_of_a_change_after_a_half_life() {
        let mut rates = Rates::new(1, HALF_LIFE, at(0));
        assert_eq!(rates.rate_rps(0, at(0)), 0.0);
        let mut ask = |from: i64, to: i64, requests: u64| {
            for ms in (from..to).step_by(10) {
                rates.handle_requests(0, requests, at(ms));
            }
            rates.rate_rps(0, at(to))
        };
        assert!((ask(0, 1_000, 1) / 100.0 - 1.0).abs() < 0.01);
        assert!((ask(1_000, 300_000, 1) / 100.0 - 1.0).abs() < 0.01);
        // A hundred times as many.
        assert!((ask(300_000, 330_000, 100) / 5_050.0 - 1.0).abs() < 0.01);
    }

    #[test]
    fn what_comes_out_of_order_counts_as_if_it_came_now() {
        let mut rates = Rates::new(1, HALF_LIFE, at(0));
        rates.handle_requests(0, 5, at(20_000));
        rates.handle_requests(0, 5, at(10_000));
        let mut in_order = Rates::new(1, HALF_LIFE, at(0));
        in_order.handle_requests(0, 10, at(20_000));
        assert_eq!(rates.rate_rps(0, at(25_000)), in_order.rate_rps(0, at(25_000)));
    }
}
