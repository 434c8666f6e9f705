//! Orloj's Figure 12: what it costs to put a request among many that wait, and to take the best one out. Measured on
//! this machine.
#![allow(clippy::disallowed_methods)] // It measures how long calls take.

use std::time::Instant;

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use scheduler::{ModelConfig, NetworkBudget, Planner, Policy, Task, dynamic::BatchCost};

use crate::{
    context::{Context, policy},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const ORLOJ12: Figure = Figure {
    name: "orloj12",
    title: "Orloj, Figure 12: insertion into a queue of many requests",
    shows: "A request of the three-modal case comes while so many wait (a power of ten): the time until it waits \
            among them, and the time in which the one with the highest score is found and taken out. Medians. \
            Dashed: c log2(n)^2 through the insertion at 10,000.",
    remarks: &[
        "Measured on the machine that made the figure, with one batch size, and so one queue. With batches of up to 16 \
         a request enters five of them, or eight where there are several lanes; the instructions of all that happens \
         to it are counted by `bench/instructions`.",
        "The paper's drawing has insertions grow as O(log^2 n), below 0.5 ms with thousands of requests, and queries \
         that take the same time for any n, as it keeps a convex hull of the scores. Ours looks at all that wait: an \
         insertion costs less, and a query grows as n. It is asked once for each batch, and not for each request.",
    ],
    draw,
};

const WAITING: [u32; 7] = [10, 30, 100, 300, 1_000, 3_000, 10_000];
/// Samples of each point with a budget of a minute; the paper takes 100.
const SAMPLES: f64 = 5_000.0;
const MODEL: ModelId = ModelId(0);
const GPU: GpuId = GpuId(0);
/// What requests of the three applications take alone, in milliseconds, and how far each is off.
const MODES_MS: [f64; 3] = [20.0, 60.0, 100.0];
const SPREAD_MS: f64 = 12.0;
/// Samples of each application that the planner knows.
const KNOWN: u32 = 192;

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["waiting", "insertion (us)", "best taken out (us)", "insertion / log2(n)^2 (ns)"]);
    let samples = (SAMPLES * context.budget_minutes).ceil().max(100.0) as usize;
    table.note("samples", samples.to_string());
    context.bar.set_length(WAITING.len() as u64);
    let (mut insertions, mut queries) = (Vec::new(), Vec::new());
    let squared_log = |waiting: u32| f64::from(waiting).log2().powi(2);
    for waiting in WAITING {
        let (insertion_us, query_us) = Queue::new(waiting, context.seed).measure(samples);
        let x = f64::from(waiting).log10();
        insertions.push((x, insertion_us));
        queries.push((x, query_us));
        table.push([
            waiting.to_string(),
            cell(insertion_us),
            cell(query_us),
            cell(1e3 * insertion_us / squared_log(waiting)),
        ]);
        context.bar.inc(1);
    }
    let (last, most) = (insertions[insertions.len() - 1].1, squared_log(WAITING[WAITING.len() - 1]));
    let fit = WAITING.map(|waiting| (f64::from(waiting).log10(), last * squared_log(waiting) / most));
    let longest = insertions.iter().chain(&queries).map(|point| point.1);
    let y = Axis::up_to("time (us)", longest);
    let series = vec![
        Series { name: "insertion".to_owned(), mark: Mark::Line, look: 0, points: insertions },
        Series { name: "best taken out".to_owned(), mark: Mark::Line, look: 2, points: queries },
        Series { name: "c log2(n)^2".to_owned(), mark: Mark::Dashed, look: chart::BOUND, points: fit.into() },
    ];
    let x = Axis::new("waiting requests (log10)", (0.9, 4.1));
    let panel = Panel { title: String::new(), x, y, series, boxes: Vec::new() };
    Ok((Chart { panel: (760, 330), ..Chart::new(ORLOJ12.title, 1, vec![panel]) }, table))
}

/// A planner with so many requests of one model, and no GPU.
struct Queue {
    planner: Box<dyn Planner<()>>,
    rng: ChaCha8Rng,
    waiting: u32,
    submitted: u64,
}

impl Queue {
    fn new(waiting: u32, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let orloj: Policy = policy("orloj");
        let mut planner = orloj.planner(NetworkBudget::default());
        let profile = LatencyProfile::linear(0.0, 66.0, 1).expect("a constant profile");
        let cost = BatchCost { fixed: Span::from_millis(6), per_task: 0.3 };
        let config = ModelConfig { dynamic: Some(cost), ..ModelConfig::new(profile, 2 * waiting as usize) };
        planner.handle_model(Timestamp::ZERO, MODEL, config);
        for (application, mode_ms) in (0..).zip(MODES_MS) {
            for _ in 0..KNOWN {
                let alone = Span::from_millis_f64(mode_ms + rng.random_range(-SPREAD_MS..SPREAD_MS));
                planner.handle_alone(Timestamp::ZERO, MODEL, (application, 0), alone);
            }
        }
        let mut queue = Self { planner, rng, waiting, submitted: 0 };
        for _ in 0..waiting {
            let task = queue.task();
            queue.planner.handle_submit(Timestamp::ZERO, MODEL, task);
        }
        queue
    }

    /// It can wait for all others, and they for it.
    fn task(&mut self) -> Task<()> {
        self.submitted += 1;
        let application = self.rng.random_range(0..MODES_MS.len() as u8);
        let waits_ms = 1_000.0 + f64::from(self.waiting) * self.rng.random_range(0.0..100.0);
        let deadline = Timestamp::ZERO + Span::from_millis_f64(waits_ms);
        Task { id: TaskId(self.submitted), deadline, priority: 0, application, length: 0, payload: () }
    }

    /// Medians of an insertion and of a decision that takes the best one out, in microseconds.
    fn measure(&mut self, samples: usize) -> (f64, f64) {
        let (mut insertions, mut queries) = (Vec::with_capacity(samples), Vec::with_capacity(samples));
        for _ in 0..samples {
            let task = self.task();
            let before = Instant::now();
            self.planner.handle_submit(Timestamp::ZERO, MODEL, task);
            insertions.push(before.elapsed());
            self.planner.handle_gpu_joined(Timestamp::ZERO, GPU, vec![MODEL], None);
            let before = Instant::now();
            self.planner.handle_timeout(Timestamp::ZERO);
            queries.push(before.elapsed());
            self.planner.handle_gpu_left(Timestamp::ZERO, GPU);
            while self.planner.poll_output().is_some() {}
        }
        let median_us = |mut times: Vec<std::time::Duration>| {
            times.sort_unstable();
            1e6 * times[times.len() / 2].as_secs_f64()
        };
        (median_us(insertions), median_us(queries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_wait_after_each_sample_as_before() {
        let mut queue = Queue::new(50, 1);
        assert_eq!(queue.planner.queue_length(MODEL), 50);
        queue.measure(10);
        // Whatever came, one with the highest score left.
        assert_eq!((queue.planner.queue_length(MODEL), queue.submitted), (50, 60));
    }
}
