//! What nobody can pass who does not know the future: a bound on the rate that a workload with short memory can be
//! served at, from the GPUs' and links' fluid limits and Belady's eviction.
//!
//! A batch holds its first request and those that come while that one can still wait, so a model of rate r and
//! objective s runs batches of `1 + r (s - l(1))` on average at most, and a request takes `l(b) / b` of a GPU at
//! least. Links copy what Belady's rule loads if all GPUs' memory were one. Neither contention nor chance is in it: no
//! policy reaches it.

mod batches;

pub use batches::finish_rate;

use std::collections::{BinaryHeap, HashMap};

use proto::{LatencyProfile, Span, Timestamp};

use crate::{
    arrivals::Arrivals,
    workload::{Model, Workload},
};

/// GPU seconds that a request of this model takes at least, at so many requests a second.
fn cost_s(model: &Model, rate_rps: f64) -> f64 {
    let profile: &LatencyProfile = &model.profile;
    let slo = model.classes[model.classes.len() - 1].slo;
    let waits = (slo - profile.latency(1)).max(Span::ZERO).as_secs_f64();
    let batch = (1.0 + rate_rps * waits).min(profile.max_batch() as f64);
    // l is not defined between sizes: linear there.
    let (low, high) = (batch.floor() as usize, batch.ceil() as usize);
    let (from, to) = (profile.latency(low).as_secs_f64(), profile.latency(high).as_secs_f64());
    (from + (to - from) * (batch - low as f64)) / batch
}

/// The highest aggregate rate at which all but `bad_part` of the requests fit the GPUs' time.
#[must_use]
pub fn gpu_bound_rps(workload: &Workload, bad_part: f64) -> f64 {
    let needs = |rate_rps: f64| {
        let mut costs: Vec<(f64, f64)> = workload
            .models
            .iter()
            .filter(|model| model.share > 0.0)
            .map(|model| (cost_s(model, rate_rps * model.share), model.share))
            .collect();
        // The dearest are given up.
        costs.sort_by(|one, other| other.0.total_cmp(&one.0));
        let mut left = bad_part;
        let needed = costs.into_iter().map(|(cost, share)| {
            let given_up = share.min(left);
            left -= given_up;
            cost * (share - given_up) * rate_rps
        });
        needed.sum::<f64>()
    };
    let (mut low, mut high) = (0.0, 1.0);
    while needs(high) < f64::from(workload.gpus) && high < 1e9 {
        high *= 2.0;
    }
    while high - low > 1e-4 * high {
        let middle = f64::midpoint(low, high);
        if needs(middle) <= f64::from(workload.gpus) { low = middle } else { high = middle }
    }
    low
}

/// The part of all links' time that loads take under Belady's rule, if all GPUs' memory were one: what is asked for
/// next latest makes room.
#[must_use]
pub fn belady_link_part(workload: &Workload, rate_rps: f64, seconds: f64, seed: u64) -> f64 {
    let Some(memory) = workload.memory else { return 0.0 };
    let end = Timestamp::ZERO + Span::from_secs_f64(seconds);
    let mut arrivals = Arrivals::random(workload, rate_rps, seed, end);
    let requests: Vec<usize> = std::iter::from_fn(|| arrivals.pop()).map(|request| request.model.0 as usize).collect();
    let mut next = vec![usize::MAX; requests.len()];
    let mut seen = HashMap::new();
    for (index, model) in requests.iter().enumerate().rev() {
        next[index] = seen.insert(*model, index).unwrap_or(usize::MAX);
    }
    let mut free = u64::from(memory.pages) * u64::from(workload.gpus);
    // By model: its next request. The heap holds older ones, too, which are passed over.
    let mut resident: HashMap<usize, usize> = HashMap::new();
    let mut by_next: BinaryHeap<(usize, usize)> = BinaryHeap::new();
    let mut busy = Span::ZERO;
    let warm = requests.len() / 10;
    for (index, &model) in requests.iter().enumerate() {
        let weights = workload.models[model].weights;
        if !resident.contains_key(&model) {
            busy += if index >= warm { weights.load } else { Span::ZERO };
            while free < u64::from(weights.pages) {
                let (at, victim) = by_next.pop().expect("what is resident has a next request, or never");
                if resident.get(&victim) == Some(&at) {
                    resident.remove(&victim);
                    free += u64::from(workload.models[victim].weights.pages);
                }
            }
            free -= u64::from(weights.pages);
        }
        resident.insert(model, next[index]);
        by_next.push((next[index], model));
    }
    busy.as_secs_f64() / (0.9 * seconds * f64::from(workload.gpus))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn workload(gpus: u32, models: &str) -> Workload {
        let text = format!("gpus = {gpus}\n[memory]\ngpu_mb = 240\n{models}");
        Workload::parse(&text, "test", "test", Path::new(".")).unwrap()
    }

    const MODEL: &str = "[[model]]\nname = \"m\"\ncount = 3\nlatency_ms = [10, 11, 12, 13]\nslo_ms = 60\nweights_mb = \
                         102.3\nload_ms = 8\n";

    #[test]
    fn a_gpu_serves_what_its_largest_batches_hold() {
        // Batches of four in 13 ms; with rates this high none is smaller.
        let bound = gpu_bound_rps(&workload(2, MODEL), 0.0);
        assert!((bound - 2.0 * 4.0 / 0.013).abs() < 1.0, "{bound}");
        assert!((gpu_bound_rps(&workload(2, MODEL), 0.01) - bound / 0.99).abs() < 1.0);
    }

    #[test]
    fn beladys_rule_keeps_what_comes_soon() {
        // Two of three models fit. Of random requests a third meets the one that is not there, less what knowing helps.
        let part = belady_link_part(&workload(1, MODEL), 100.0, 100.0, 1);
        let loads_per_s = part / 0.008;
        assert!((15.0..30.0).contains(&loads_per_s), "{loads_per_s}");
        let ample = workload(2, MODEL);
        assert!(belady_link_part(&ample, 100.0, 100.0, 1) < 1e-9);
    }
}
