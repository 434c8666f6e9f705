//! What a GPU's time is worth at the moment: the price that batches of all models are sized by, and how many GPUs may
//! start batches early.
//!
//! A request pays for a larger batch by waiting for it, half a batch's gaps on average, and all requests pay for GPU
//! time by waiting for a GPU that is free. With one price of GPU time, each model's batch is the one that costs least,
//! and the price is the one at which the whole does: near 0 while GPUs are plenty, and the higher the scarcer they are.
//! Whoever pays for GPUs adds what their time is worth to him (`gpu_price`).
//!
//! All here is arithmetic, in milliseconds; `docs/policy.md` has the rule.

use proto::Timestamp;

use crate::messages::Traffic;

/// A batch of a model starts early with at most so many times the tasks that its window has room for.
const SIZE_MAX_FACTOR: f64 = 1.1;
/// More comes than was measured, so much: read too low a rate costs goodput, read too high nearly nothing.
const RATE_FACTOR: f64 = 1.1;
/// No plan keeps GPUs busier than this part of the time, as what happens is random.
const BUSY_MAX: f64 = 0.9;
/// A GPU that may be used costs this part of its price whether it is busy or not, as its owner cannot give it up.
const HELD_PART: f64 = 0.8;
/// The prices that are tried: the lowest above 0, and each one's ratio to the one before.
const PRICE_MIN: f64 = 0.05;
const PRICE_RATIO: f64 = 1.3;
/// How many: up to about 13,000.
const PRICES: usize = 48;
/// Around the last plan's price so many on either side are tried, and one of all others in turn.
const NEIGHBOURS: usize = 2;

/// Of a model that is silent so little is known: requests come at most three times as fast as the silence says.
const SILENCE_PART: i64 = 3;

/// What a model asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Load {
    /// Requests a millisecond, as measured, that are for the GPUs in question.
    pub(crate) rate: f64,
    /// Between its requests, wherever they go.
    pub(crate) gap_ms: f64,
    /// l(b) = `fixed_ms + b * task_ms`.
    pub(crate) fixed_ms: f64,
    pub(crate) task_ms: f64,
    /// Tasks that a batch can gather and run in time; at least 1.
    pub(crate) target: f64,
    /// Milliseconds of a request's latency that a millisecond of GPU time is worth; may be infinite.
    pub(crate) gpu_price: f64,
}

impl Load {
    /// For some of the GPUs that host the model.
    pub(crate) fn of(traffic: &Traffic, now: Timestamp, part: f64) -> Self {
        let gap_ms = traffic.gap.max((now - traffic.arrived_at) / SILENCE_PART).as_millis_f64();
        Self {
            rate: part / gap_ms,
            gap_ms,
            fixed_ms: traffic.fixed.as_millis_f64(),
            task_ms: traffic.per_task.as_millis_f64(),
            target: f64::from(traffic.target),
            gpu_price: match traffic.gpu_price {
                Traffic::ENDLESS_PRICE => f64::INFINITY,
                thousandths => f64::from(thousandths) / 1e3,
            },
        }
    }

    /// The batch that is best at a price: it minimises `(b - 1) gap / 2 + l(b) + price l(b) / b`.
    pub(crate) fn size(&self, price: f64) -> f64 {
        let largest = (SIZE_MAX_FACTOR * self.target).max(1.0);
        let best = (price * self.fixed_ms / (self.task_ms + self.gap_ms / 2.0)).sqrt();
        // Nothing is saved where nothing is fixed, at whatever price.
        if best.is_nan() { 1.0 } else { best.clamp(1.0, largest) }
    }

    /// The plan's price for this model: dearer for whoever pays more for GPUs than others do.
    pub(crate) fn price(&self, price: f64, gpu_price_mean: f64) -> f64 {
        if self.gpu_price.is_infinite() { f64::INFINITY } else { self.price_of_finite(price, gpu_price_mean) }
    }

    /// The same where its own price is finite.
    fn price_of_finite(&self, price: f64, gpu_price_mean: f64) -> f64 {
        if price.is_finite() { price * (1.0 + self.gpu_price) / (1.0 + gpu_price_mean) } else { price }
    }

    pub(crate) fn execution_ms(&self, size: f64) -> f64 {
        self.fixed_ms + size * self.task_ms
    }
}

/// What was decided for the GPUs that host the same models.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Plan {
    /// Milliseconds of latency that a millisecond of GPU time is worth; infinite where GPUs are scarce.
    pub(crate) price: f64,
    /// The mean of what GPU time is worth to the models' owners.
    pub(crate) gpu_price: f64,
    /// The GPUs with the smallest ids that may start batches early.
    pub(crate) open: usize,
    /// GPUs that are busy on average.
    pub(crate) busy: f64,
}

/// Plans for the same GPUs, one after another.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pricing {
    /// The last plan's price, by its place among those that are tried.
    last: usize,
    /// The price that is looked at next, whatever the last one was.
    turn: usize,
}

/// A price, with what it makes of the loads.
struct Outlook {
    /// Requests a millisecond.
    requests: f64,
    /// Batches a millisecond.
    batches: f64,
    /// GPUs that they keep busy.
    busy: f64,
    /// Latency of all requests of a millisecond but what they wait for GPUs.
    latency: f64,
}

fn price_of(place: usize) -> f64 {
    if place == 0 { 0.0 } else { PRICE_MIN * PRICE_RATIO.powi(place as i32 - 1) }
}

impl Outlook {
    fn of(loads: &[Load], price_of: impl Fn(&Load) -> f64) -> Self {
        let mut outlook = Self { requests: 0.0, batches: 0.0, busy: 0.0, latency: 0.0 };
        for load in loads {
            let (rate, size) = (RATE_FACTOR * load.rate, load.size(price_of(load)));
            let execution_ms = load.execution_ms(size);
            outlook.requests += rate;
            outlook.batches += rate / size;
            outlook.busy += rate / size * execution_ms;
            outlook.latency += rate * ((size - 1.0) * load.gap_ms / 2.0 + execution_ms);
        }
        outlook
    }

    fn execution_ms(&self) -> f64 {
        if self.batches > 0.0 { self.busy / self.batches } else { 0.0 }
    }

    /// What a request waits until one of so many GPUs is free: Sakasegawa's approximation for M/M/K, of batches.
    fn waits_ms(&self, gpus: f64) -> f64 {
        let part = self.busy / gpus;
        let queue = part.powf((2.0 * (gpus + 1.0)).sqrt() - 1.0) / (gpus * (1.0 - part));
        queue * self.execution_ms() * self.batches / self.requests
    }

    fn cost(&self, gpus: f64, gpu_price: f64) -> f64 {
        let gpu_time =
            if gpu_price > 0.0 { gpu_price * (HELD_PART * gpus + (1.0 - HELD_PART) * self.busy) } else { 0.0 };
        self.latency + self.requests * self.waits_ms(gpus) + gpu_time
    }

    /// The fewest GPUs that are not too busy.
    fn gpus_min(&self) -> usize {
        ((self.busy / BUSY_MAX) as usize + 1).max(1)
    }

    /// The number of GPUs that costs least, with that cost; `None` if there are too few. Waits fall ever more slowly
    /// with each GPU more and all other costs rise evenly, so the first that is not cheaper ends the search.
    fn cheapest(&self, gpus: usize, gpu_price: f64) -> Option<(f64, usize)> {
        let least = self.gpus_min();
        if least > gpus {
            return None;
        }
        if gpu_price == 0.0 {
            return Some((self.cost(gpus as f64, 0.0), gpus));
        }
        let mut best = (self.cost(least as f64, gpu_price), least);
        for open in least + 1..=gpus {
            let cost = self.cost(open as f64, gpu_price);
            if cost >= best.0 {
                break;
            }
            best = (cost, open);
        }
        Some(best)
    }
}

impl Pricing {
    /// The price and the GPUs at which all that is asked for costs least. Each load has a rate above 0.
    pub(crate) fn plan(&mut self, loads: &[Load], gpus: usize) -> Plan {
        let gpu_price = mean_gpu_price(loads);
        // What planning costs with many models is this loop, which has no branches but where a price is infinite.
        let all_finite = loads.iter().all(|load| load.gpu_price.is_finite());
        let of = |place: usize| {
            let price = price_of(place);
            let outlook = match all_finite {
                true => Outlook::of(loads, |load| load.price_of_finite(price, gpu_price)),
                false => Outlook::of(loads, |load| load.price(price, gpu_price)),
            };
            let (cost, open) = outlook.cheapest(gpus, gpu_price)?;
            Some((cost, place, Plan { price, gpu_price, open, busy: outlook.busy }))
        };
        // Where even the highest price leaves GPUs too busy, or they are worth anything, batches are as large as can
        // be.
        let Some((_, place, plan)) = Some(gpu_price).filter(|price| price.is_finite()).and_then(|_| self.best(of))
        else {
            self.last = PRICES - 1;
            let scarce = Outlook::of(loads, |_| f64::INFINITY);
            let open = scarce.gpus_min().min(gpus);
            return Plan { price: f64::INFINITY, gpu_price, open, busy: scarce.busy };
        };
        self.last = place;
        plan
    }

    /// The cheapest of the prices around the last plan's, further down as long as the next one is cheaper, and of one
    /// of all others in turn. `None` if there are too few GPUs at all of them and at the highest.
    fn best(&mut self, of: impl Fn(usize) -> Option<(f64, usize, Plan)>) -> Option<(f64, usize, Plan)> {
        // Of two that cost the same the lower price: what is as large as it can be does not grow with it.
        let cheaper = |one: &(f64, usize, Plan), other: &(f64, usize, Plan)| (one.0, one.1) < (other.0, other.1);
        let mut lowest = self.last.saturating_sub(NEIGHBOURS);
        let near = lowest..(self.last + NEIGHBOURS + 1).min(PRICES);
        self.turn = (self.turn + 1) % PRICES;
        let turn = Some(self.turn).filter(|place| !near.contains(place));
        let found =
            near.chain(turn).filter_map(&of).reduce(|one, other| if cheaper(&other, &one) { other } else { one });
        let mut best = match found {
            Some(found) => found,
            // More is asked for than before.
            None => {
                lowest = PRICES - 1;
                of(lowest)?
            }
        };
        if turn == Some(best.1) {
            lowest = best.1;
        }
        while best.1 == lowest
            && lowest > 0
            && let Some(next) = of(lowest - 1).filter(|next| cheaper(next, &best))
        {
            (best, lowest) = (next, lowest - 1);
        }
        Some(best)
    }
}

/// What GPU time is worth to whoever uses it, on average over the time that is used. To whom it is worth anything the
/// others' price means nothing: these are left out unless all are like that.
fn mean_gpu_price(loads: &[Load]) -> f64 {
    let (mut all, mut paid) = (0.0, 0.0);
    for load in loads.iter().filter(|load| load.gpu_price.is_finite()) {
        let used = load.rate * load.execution_ms(1.0);
        all += used;
        paid += load.gpu_price * used;
    }
    if all > 0.0 {
        paid / all
    } else if loads.is_empty() {
        0.0
    } else {
        f64::INFINITY
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All that a plan costs, by the rule as docs/policy.md has it: every number of GPUs, one price after another.
    fn cheapest(loads: &[Load], gpus: usize, gpu_price: f64) -> Option<f64> {
        let mut least: Option<f64> = None;
        for place in 0..PRICES {
            let price = if place == 0 { 0.0 } else { 0.05 * 1.3_f64.powi(place as i32 - 1) };
            let sizes: Vec<f64> = loads
                .iter()
                .map(|load| (price * load.fixed_ms / (load.task_ms + load.gap_ms / 2.0)).sqrt())
                .zip(loads)
                .map(|(best, load)| best.max(1.0).min((1.1 * load.target).max(1.0)))
                .collect();
            let each = || loads.iter().zip(&sizes).map(|(load, &size)| (1.1 * load.rate, load, size));
            let time = |load: &Load, size: f64| load.fixed_ms + load.task_ms * size;
            let busy: f64 = each().map(|(rate, load, size)| rate * time(load, size) / size).sum();
            let (requests, batches): (f64, f64) =
                (each().map(|(rate, ..)| rate).sum(), each().map(|(rate, _, size)| rate / size).sum());
            let waits = |gpus: f64| {
                let part = busy / gpus;
                let (mean_time, mean_size) = (busy / batches, requests / batches);
                part.powf((2.0 * (gpus + 1.0)).sqrt() - 1.0) / (gpus * (1.0 - part)) * mean_time / mean_size
            };
            let latency: f64 =
                each().map(|(rate, load, size)| rate * ((size - 1.0) * load.gap_ms / 2.0 + time(load, size))).sum();
            for open in if gpu_price == 0.0 { gpus..=gpus } else { 1..=gpus } {
                let k = open as f64;
                if busy / k < 0.9 {
                    let cost = latency + requests * waits(k) + gpu_price * (0.8 * k + 0.2 * busy);
                    least = Some(least.map_or(cost, |least| least.min(cost)));
                }
            }
        }
        least
    }

    fn load(gpu_price: f64) -> impl Strategy<Value = Load> {
        (0.01f64..3.0, 0.0f64..30.0, 0.01f64..8.0, 1.0f64..40.0).prop_map(move |(rate, fixed_ms, task_ms, target)| {
            Load { rate, gap_ms: 1.0 / rate, fixed_ms, task_ms, target: target.round(), gpu_price }
        })
    }

    fn loads() -> impl Strategy<Value = (Vec<Load>, f64)> {
        prop_oneof![Just(0.0), 0.1f64..50.0]
            .prop_flat_map(|price| (proptest::collection::vec(load(price), 1..6), Just(price)))
    }

    proptest! {
        /// Once each price had its turn.
        #[test]
        fn the_plan_is_the_cheapest((loads, gpu_price) in loads(), gpus in 1usize..40) {
            let mut pricing = Pricing::default();
            let plan = (0..=PRICES).map(|_| pricing.plan(&loads, gpus)).last().unwrap();
            match cheapest(&loads, gpus, gpu_price) {
                Some(least) => {
                    let outlook = Outlook::of(&loads, |_| plan.price);
                    let cost = outlook.cost(plan.open as f64, gpu_price);
                    prop_assert!(cost <= least * (1.0 + 1e-9), "{cost} and {least}: {plan:?}");
                    prop_assert!(plan.open <= gpus && plan.busy < BUSY_MAX * plan.open as f64);
                }
                None => prop_assert_eq!((plan.price, plan.open), (f64::INFINITY, gpus)),
            }
        }

        /// Of two owners the one who pays more for GPUs waits for larger batches, whatever the price is.
        #[test]
        fn who_pays_more_has_larger_batches(one in load(1.0), price in 0.0f64..1e5, mean in 0.0f64..100.0) {
            let other = Load { gpu_price: 8.0, ..one };
            prop_assert!(one.size(one.price(price, mean)) <= other.size(other.price(price, mean)));
        }
    }

    #[test]
    fn who_pays_anything_for_gpus_changes_nothing_for_others() {
        let cheap = Load { rate: 0.1, gap_ms: 10.0, fixed_ms: 5.0, task_ms: 1.0, target: 10.0, gpu_price: 0.0 };
        let dear = Load { gpu_price: f64::INFINITY, ..cheap };
        let plan = Pricing::default().plan(&[cheap, dear], 8);
        assert!(plan.price.is_finite() && plan.gpu_price == 0.0 && plan.open == 8, "{plan:?}");
        assert_eq!(cheap.price(plan.price, plan.gpu_price), plan.price);
        assert_eq!(dear.size(dear.price(plan.price, plan.gpu_price)), 11.0);
    }

    #[test]
    fn a_price_that_is_infinite_opens_no_more_gpus_than_are_needed() {
        let load = Load { rate: 1.4, gap_ms: 0.7, fixed_ms: 5.0, task_ms: 1.0, target: 10.0, gpu_price: f64::INFINITY };
        let plan = Pricing::default().plan(&[load], 8);
        // Batches of 11: 1.54 a millisecond, 16 / 11 ms each.
        assert_eq!((plan.price, plan.open), (f64::INFINITY, 3));
        assert!((plan.busy - 1.54 * 16.0 / 11.0).abs() < 1e-9, "{plan:?}");
        assert_eq!(Pricing::default().plan(&[], 8).busy, 0.0);
    }
}
