//! What no placement can beat: each reason why a sub-cluster must be off its mean gives a bound, and the highest is
//! taken.
//!
//! The program's linear relaxation gives none, as it deals every model evenly.

use crate::instance::Instance;

/// Halvings of the interval in which the bound of moves is searched.
const HALVINGS: usize = 50;

/// A lower bound of the objective.
pub(crate) fn bound(instance: &Instance) -> f64 {
    let weighted = |dimension: usize| match instance.weights[dimension] {
        0.0 => 0.0,
        weight => weight * deviation(instance, dimension) / instance.means[dimension],
    };
    weighted(0) + weighted(1)
}

/// A lower bound of the largest deviation.
fn deviation(instance: &Instance, dimension: usize) -> f64 {
    let mean = instance.means[dimension];
    let mut loads: Vec<u64> = instance.loads.iter().map(|load| load[dimension]).collect();
    loads.sort_unstable_by(|a, b| b.cmp(a));
    let reasons = [
        whole_parts(&loads, instance.clusters),
        pigeons(&loads, instance.clusters) - mean,
        mean - loads.iter().take(loads.len() / instance.clusters).sum::<u64>() as f64,
        pinned(instance, dimension) - mean,
        moved(instance, dimension),
    ];
    reasons.into_iter().fold(0.0, f64::max)
}

/// Sums are multiples of what all loads are multiples of, so some lie above a mean that is none, and some below.
fn whole_parts(loads: &[u64], clusters: usize) -> f64 {
    let part = loads.iter().fold(0, |divisor, &load| gcd(divisor, load)).max(1);
    let sum: u64 = loads.iter().sum();
    // The mean in parts is a whole number and `rest` clusters-ths.
    let rest = (sum / part) % clusters as u64;
    rest.max((clusters as u64 - rest) % clusters as u64) as f64 * part as f64 / clusters as f64
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Of the k l + 1 largest models k + 1 share a sub-cluster, which has at least the k + 1 smallest of them.
fn pigeons(loads: &[u64], clusters: usize) -> f64 {
    let with = |last: usize| {
        let each = last / clusters + 1;
        loads[last + 1 - each..=last].iter().sum::<u64>()
    };
    (0..loads.len()).step_by(clusters).map(with).max().unwrap_or(0) as f64
}

/// The most that is pinned to one sub-cluster.
fn pinned(instance: &Instance, dimension: usize) -> f64 {
    let mut pinned = vec![0u64; instance.clusters];
    for (load, pin) in instance.loads.iter().zip(&instance.pins) {
        if let Some(at) = pin {
            pinned[*at as usize] += load[dimension];
        }
    }
    pinned.into_iter().max().unwrap_or(0) as f64
}

/// With a bound of moves: the least deviation that they could reach if models were divisible. A model that moves costs
/// once, so what must leave full sub-clusters and what must come to empty ones each need no more than is allowed.
fn moved(instance: &Instance, dimension: usize) -> f64 {
    let Some(allowed) = instance.disruption_max else { return 0.0 };
    let mean = instance.means[dimension];
    let mut has = vec![0u64; instance.clusters];
    let mut new = 0u64;
    // Load and cost of what may leave each sub-cluster.
    let mut movable: Vec<Vec<(f64, f64)>> = vec![Vec::new(); instance.clusters];
    for (model, load) in instance.loads.iter().enumerate() {
        match instance.former[model] {
            None => new += load[dimension],
            Some(at) => {
                has[at as usize] += load[dimension];
                if load[dimension] > 0 && instance.pins[model] != Some(at) {
                    movable[at as usize].push((load[dimension] as f64, instance.costs[model] as f64));
                }
            }
        }
    }
    let by_price = |a: &(f64, f64), b: &(f64, f64)| (a.1 * b.0).total_cmp(&(b.1 * a.0));
    movable.iter_mut().for_each(|models| models.sort_by(by_price));
    let mut all = movable.concat();
    all.sort_by(by_price);
    let is_allowed = |deviation: f64| {
        let leaving = has.iter().zip(&movable).map(|(&has, movable)| cost(movable, has as f64 - mean - deviation));
        let coming: f64 = has.iter().map(|&has| (mean - deviation - has as f64).max(0.0)).sum();
        leaving.sum::<f64>() <= allowed as f64 && cost(&all, coming - new as f64) <= allowed as f64
    };
    if is_allowed(0.0) {
        return 0.0;
    }
    let (mut below, mut above) = (0.0, instance.clusters as f64 * mean);
    for _ in 0..HALVINGS {
        let between = f64::midpoint(below, above);
        *(if is_allowed(between) { &mut above } else { &mut below }) = between;
    }
    below
}

/// The least cost of so much load, the cheapest first, the last one in part; infinite if there is not so much.
fn cost(by_price: &[(f64, f64)], mut needed: f64) -> f64 {
    let mut sum = 0.0;
    for &(load, cost) in by_price {
        if needed <= 0.0 {
            return sum;
        }
        sum += cost * (needed / load).min(1.0);
        needed -= load;
    }
    // What is left of a sum of numbers as large as these is their rounding.
    if needed > 1.0 { f64::INFINITY } else { sum }
}
