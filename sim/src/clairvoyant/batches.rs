//! What somebody could answer in time who knows when requests will come and what each of them takes: the reference of
//! dynamic models. It is no bound, since the best batches are not looked for by trying all: whenever a GPU is idle the
//! batch is taken that wins most at a price for the GPU's time, and of many prices the best is found afterwards, for
//! the very requests that came. A policy knows neither.

use proto::{Span, Timestamp};

use crate::{
    arrivals::{Arrivals, Request},
    workload::{Model, Workload},
};

/// Prices of a GPU's time that are tried: requests that it would serve at the workload's capacity.
const PRICES: [f64; 7] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25];
/// What a request is worth that another batch could still serve in time, compared with one that none could.
const PATIENCE: [f64; 4] = [1.0, 0.7, 0.4, 0.1];

/// A request that waits.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    deadline: Timestamp,
    work: Span,
    is_measured: bool,
}

/// The part of all requests that are answered in time. As in a run, the first tenth of the seconds does not count.
///
/// # Panics
/// If the workload has several models or kinds of GPUs.
#[must_use]
pub fn finish_rate(workload: &Workload, rate_rps: f64, seconds: f64, seed: u64) -> f64 {
    let ([model], [_]) = (&workload.models[..], &workload.gpu_kinds[..]) else { panic!("one model, one kind of GPU") };
    let end = Timestamp::ZERO + Span::from_secs_f64(seconds);
    let warm = Timestamp::ZERO + Span::from_secs_f64(seconds / 10.0);
    let mut arrivals = Arrivals::random(workload, rate_rps, seed, end);
    let requests: Vec<Request> = std::iter::from_fn(|| arrivals.pop()).collect();
    let measured = requests.iter().filter(|request| request.arrived_at >= warm).count();
    let price_of_one = workload.capacity_rps() / f64::from(workload.gpus);
    let settings = PRICES.iter().flat_map(|price| PATIENCE.map(|patience| (price * price_of_one, patience)));
    let served = settings.map(|(price, patience)| {
        let run = Run { workload, model, price, patience };
        run.served(&requests, warm)
    });
    served.max().unwrap_or(0) as f64 / measured.max(1) as f64
}

struct Run<'a> {
    workload: &'a Workload,
    model: &'a Model,
    /// Of a second of a GPU.
    price: f64,
    patience: f64,
}

impl Run<'_> {
    /// How many of those that count are answered in time.
    fn served(&self, requests: &[Request], warm: Timestamp) -> usize {
        let mut free = vec![Timestamp::ZERO; self.workload.gpus as usize];
        let mut coming = requests.iter().peekable();
        // By deadline.
        let mut waiting: Vec<Waiting> = Vec::new();
        let mut served = 0;
        let mut now = Timestamp::ZERO;
        loop {
            let gpu = (0..free.len()).min_by_key(|&gpu| free[gpu]).expect("there are GPUs");
            now = now.max(free[gpu]);
            while let Some(request) = coming.next_if(|request| request.arrived_at <= now) {
                let slo = self.model.classes[request.class as usize].slo;
                let deadline = request.arrived_at + slo - self.workload.response;
                let place = waiting.partition_point(|other| other.deadline <= deadline);
                let is_measured = request.arrived_at >= warm;
                waiting.insert(place, Waiting { deadline, work: request.work, is_measured });
            }
            waiting.retain(|request| now + self.latency(1, request.work) <= request.deadline);
            if let Some((latency, places)) = self.batch(now, &waiting) {
                free[gpu] = now + latency;
                for place in places.into_iter().rev() {
                    served += usize::from(waiting.remove(place).is_measured);
                }
            } else if let Some(next) = coming.peek() {
                now = next.arrived_at;
            } else if waiting.is_empty() {
                return served;
            } else {
                // Nobody comes any more, so it is worth no more later.
                now += Span::from_millis(1);
            }
        }
    }

    /// What a batch takes whose longest request has this much work.
    fn latency(&self, size: usize, work: Span) -> Span {
        match &self.model.dynamic {
            Some(dynamic) => dynamic.cost.latency(size, work),
            None => self.model.profile.latency(size),
        }
    }

    /// The batch that wins most, and how long it takes: places of those that wait.
    fn batch(&self, now: Timestamp, waiting: &[Waiting]) -> Option<(Span, Vec<usize>)> {
        let mut by_work: Vec<usize> = (0..waiting.len()).collect();
        by_work.sort_by_key(|&place| waiting[place].work);
        // Those that take no longer than the one that was added last, by deadline.
        let mut shorter: Vec<usize> = Vec::new();
        let mut best: Option<(f64, Span, Vec<usize>)> = None;
        for place in by_work {
            shorter.insert(shorter.partition_point(|&other| other < place), place);
            let longest = waiting[place].work;
            for size in 1..=self.model.profile.max_batch().min(shorter.len()) {
                let latency = self.latency(size, longest);
                let ends_at = now + latency;
                let late = shorter.partition_point(|&place| waiting[place].deadline < ends_at);
                let Some(taken) = shorter.get(late..late + size) else { break };
                let worth = |&place: &usize| {
                    let Waiting { deadline, work, .. } = waiting[place];
                    if ends_at + self.latency(1, work) > deadline { 1.0 } else { self.patience }
                };
                let value = taken.iter().map(worth).sum::<f64>() - self.price * latency.as_secs_f64();
                if value > best.as_ref().map_or(0.0, |(best, ..)| *best) {
                    best = Some((value, latency, taken.to_vec()));
                }
            }
        }
        best.map(|(_, latency, taken)| (latency, taken))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn workload(model: &str) -> Workload {
        let text = format!("gpus = 1\n[[model]]\nname = \"m\"\nmax_batch = 8\n{model}");
        Workload::parse(&text, "test", "test", Path::new(".")).unwrap()
    }

    #[test]
    fn what_a_gpu_can_serve_is_served() {
        let ample = workload("latency_ms = [2, 3, 4, 5, 6, 7, 8, 9]\nslo_ms = 50");
        assert!(finish_rate(&ample, 200.0, 20.0, 1) > 0.999);
        // Eight in 9 ms, and no more.
        let found = finish_rate(&ample, 1_600.0, 4.0, 1);
        assert!((0.51..=0.557).contains(&found), "{found}");
    }

    /// Where long requests cost what many short ones do, it gives up the long ones: all the others are served.
    #[test]
    fn it_knows_whom_to_give_up() {
        let mixed = workload(
            "cost = { fixed_ms = 1, per_task = 1.0 }\nslo_x_p99 = 2\napplications = [{ mean_ms = 10, std_ms = 0, share \
             = 3 }, { mean_ms = 200, std_ms = 0, share = 1 }]",
        );
        let found = finish_rate(&mixed, 60.0, 100.0, 1);
        // 45 short ones a second take 0.4 s of it, and what is left serves 3 of 15 long ones.
        assert!((0.76..0.85).contains(&found), "{found}");
    }
}
