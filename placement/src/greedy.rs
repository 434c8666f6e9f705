//! Where a search starts.

use crate::{
    instance::{Instance, Load},
    state::State,
};

/// The better of two starts: everything dealt anew, if that is allowed, and what is there now with new models dealt.
pub(crate) fn start(instance: &Instance) -> State {
    let stays = |model: usize| instance.former[model];
    let now = dealt(instance, stays);
    if instance.disruption_max.is_some() {
        return now;
    }
    let anew = dealt(instance, |_| None);
    let is_better = |one: &State, other: &State| one.score(instance) < other.score(instance);
    if is_better(&anew, &now) { anew } else { now }
}

/// Deals what is neither pinned nor stays, the largest first, each to where it adds least to the sum of squares: an
/// empty place in both loads. Places that it would not fit come last.
fn dealt(instance: &Instance, stays: impl Fn(usize) -> Option<u32>) -> State {
    let models = instance.loads.len();
    let mut place: Vec<Option<u32>> = (0..models).map(|model| instance.pins[model].or_else(|| stays(model))).collect();
    let mut has: Vec<(Load, u64)> = vec![([0; 2], 0); instance.clusters];
    let add = |has: &mut (Load, u64), model: usize| {
        (0..2).for_each(|index| has.0[index] += instance.loads[model][index]);
        has.1 = has.1.max(instance.dynamic_bytes[model]);
    };
    for (model, at) in place.iter().enumerate() {
        if let Some(at) = at {
            add(&mut has[*at as usize], model);
        }
    }
    let part = |index: usize, load: u64| match instance.weights[index] {
        0.0 => 0.0,
        weight => weight * load as f64 / instance.means[index],
    };
    let size = |model: usize| (0..2).map(|index| part(index, instance.loads[model][index])).fold(0.0, f64::max);
    let mut left: Vec<usize> = (0..models).filter(|&model| place[model].is_none()).collect();
    left.sort_by(|&a, &b| size(b).total_cmp(&size(a)).then(a.cmp(&b)));
    for model in left {
        let price = |has: &(Load, u64)| {
            let mut with = *has;
            add(&mut with, model);
            let needs = [with.0[0], with.0[1] + with.1];
            let is_over = (0..2).any(|index| instance.limits[index].is_some_and(|limit| needs[index] > limit));
            let squares = (0..2).map(|index| part(index, with.0[index]).powi(2) - part(index, has.0[index]).powi(2));
            (is_over, squares.sum::<f64>())
        };
        let prices = has.iter().map(price).enumerate();
        let best = prices.min_by(|(_, a), (_, b)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let (at, _) = best.expect("there are sub-clusters");
        add(&mut has[at], model);
        place[model] = Some(at as u32);
    }
    let place: Vec<u32> = place.into_iter().map(|at| at.expect("all are dealt")).collect();
    State::new(instance, &place)
}
