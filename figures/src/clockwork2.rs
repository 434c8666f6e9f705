//! Clockwork's Figure 2 (its section 2): how predictable inference is alone, and what becomes of that when many ask.

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::{Span, Timestamp};
use sim::{Options, Workload, cluster, trace::Event};

use crate::{
    context::{Context, axis_of, look_of, policy, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK2: Figure = Figure {
    name: "clockwork2",
    title: "Clockwork, Figure 2: what is added to an inference that is predictable",
    shows: "ResNet50 on one emulated V100. Left: how far executions of one task, and what one client waits for its \
            answers, are above their median; nines are digits of the quantile. Middle and right: as many copies as \
            there are clients, each of whom asks again when it is answered: answers a second, and the 99.99th \
            percentile of what clients wait over the median. Dashed: what the paper says of executions that its GPU \
            runs at the same time, a quarter more throughput for a hundred times the tail.",
    remarks: &[
        "Emulated executions vary as much as the paper measured for 11 million of them: the 99.99th percentile is 0.03 \
         % above the median (normal, a standard deviation of 0.01 %, cut off at three). So the left panel says what is \
         added, not what a GPU does: a plan and its input are under way for 0.12 ms, always.",
        "A GPU runs one batch at a time here, as Clockwork's workers do (its section 4.4). So clients wait for each \
         other: latency grows with their number, and its spread does not.",
        "Requests have no objective. Copies cannot share batches; clients of one model would, and throughput would \
         grow with them (Figure 7, right).",
    ],
    draw,
};

const NAMES: [&str; 2] = ["downbeat", "clockwork"];
const CLIENTS: [usize; 5] = [1, 2, 4, 8, 16];
const EXECUTION_MS: f64 = 2.61;
/// The paper's 0.03 % at three standard deviations, which the simulator never exceeds.
const JITTER: f64 = 0.0003 / 3.0;
const NINES_MAX: f64 = 4.0;
/// What the paper says of concurrent executions, in words.
const PAPER_GAIN: f64 = 1.25;
const PAPER_TAIL: f64 = 100.0;

fn copies(count: usize) -> Workload {
    let text = format!(
        "gpus = 1\nnetwork = {{ ctrl_us = 100, data_us_per_request = 20 }}\n[[model]]\nname = \"ResNet50\"\ncount = \
         {count}\nclients = 1\nbackground = true\nlatency_ms = [{EXECUTION_MS}]\n"
    );
    let mut workload = workload("clockwork2", &text);
    workload.faults.execution_jitter = JITTER;
    workload
}

/// Ascending, in milliseconds.
#[derive(Default)]
struct Durations(Vec<f64>);

impl Durations {
    fn quantile(&self, part: f64) -> f64 {
        let rank = (part * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }

    /// Above the median, in per cent of it, by nines.
    fn above_median(&self) -> Vec<(f64, f64)> {
        let median = self.quantile(0.5);
        let at = |nines: f64| 100.0 * (self.quantile(1.0 - 10f64.powf(-nines)) / median - 1.0);
        // The median itself has 0.3 nines.
        let from = 2f64.log10();
        let nines = (0..=80).map(|step| from + f64::from(step) / 80.0 * (NINES_MAX - from));
        nines.map(|nines| (nines, at(nines))).collect()
    }
}

struct Measured {
    executions: Durations,
    waits: Durations,
    served_rps: f64,
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let header = ["clients", "policy", "served (r/s)", "p50 (ms)", "p99 (ms)", "p99.99 (ms)", "p99.99 / p50"];
    let mut table = Table::new(&header);
    let jobs: Vec<_> = CLIENTS.iter().flat_map(|&clients| NAMES.map(|name| (clients, name))).collect();
    let seconds = context.seconds(jobs.len() as f64 * 1e3 / EXECUTION_MS);
    table.note("span", format!("{seconds} s simulated"));
    context.bar.inc_length(jobs.len() as u64);
    let found = context.parallel(&jobs, |&(clients, name)| {
        let warm = Timestamp::ZERO + Span::from_secs_f64(seconds / 10.0);
        let (mut executions, mut waits) = (Durations::default(), Durations::default());
        let mut observe = |event| match event {
            Event::Batch { started_at, finished_at, .. } if started_at >= warm => {
                executions.0.push((finished_at - started_at).as_millis_f64());
            }
            Event::Answer { arrived_at, answered_at, .. } if arrived_at >= warm => {
                waits.0.push((answered_at - arrived_at).as_millis_f64());
            }
            _ => {}
        };
        // The rate is the clients' own.
        let options = Options { policy: policy(name), rate_rps: 1.0, seconds, seed: context.seed };
        cluster::run(&copies(clients), &options, &mut observe, &mut |_| ())?;
        executions.0.sort_by(f64::total_cmp);
        waits.0.sort_by(f64::total_cmp);
        let served_rps = waits.0.len() as f64 / (0.9 * seconds);
        Ok(Measured { executions, waits, served_rps })
    })?;
    let mut left = Vec::new();
    let empty = |name: &&str| Series { name: (*name).into(), mark: Mark::Line, look: look_of(name), points: vec![] };
    let (mut rates, mut tails): (Vec<_>, Vec<_>) =
        (NAMES.iter().map(empty).collect(), NAMES.iter().map(empty).collect());
    for ((index, (clients, name)), measured) in jobs.iter().enumerate().zip(&found) {
        let Measured { executions, waits, served_rps } = measured;
        let tail = waits.quantile(0.9999) / waits.quantile(0.5);
        rates[index % NAMES.len()].points.push((*clients as f64, *served_rps));
        tails[index % NAMES.len()].points.push((*clients as f64, tail.log10()));
        if index == 0 {
            let mark = Mark::Dashed;
            let points = executions.above_median();
            left.push(Series { name: "execution".into(), mark, look: chart::GREY, points });
        }
        if *clients == 1 {
            let points = waits.above_median();
            left.push(Series { name: (*name).into(), mark: Mark::Curve, look: look_of(name), points });
        }
        let [p50, p99, p9999] = [0.5, 0.99, 0.9999].map(|part| cell(waits.quantile(part)));
        table.push([cell(*clients as f64), (*name).into(), cell(*served_rps), p50, p99, p9999, cell(tail)]);
    }
    let most = CLIENTS[CLIENTS.len() - 1] as f64;
    let dashed = |name: &str, at: f64| Series {
        name: name.into(),
        mark: Mark::Dashed,
        look: 7,
        points: vec![(0.0, at), (most, at)],
    };
    rates.push(dashed("paper: at the same time", PAPER_GAIN * 1e3 / EXECUTION_MS));
    tails.push(dashed("paper: at the same time", PAPER_TAIL.log10()));
    let panel = |title: &str, x: Axis, y: Axis, series| Panel { title: title.into(), x, y, series, boxes: Vec::new() };
    let clients = || Axis::new("clients", (0.0, most + 0.5));
    let largest = left.iter().flat_map(|series| series.points.iter().map(|point| point.1));
    let y = Axis::up_to("above the median (%)", largest);
    let left = panel("one client", Axis::new("nines of the quantile", (0.0, NINES_MAX)), y, left);
    let middle = panel("throughput", clients(), axis_of("answers (r/s)", &rates), rates);
    let right = panel("spread", clients(), Axis::new("p99.99 / p50 (log10)", (0.0, 2.2)), tails);
    Ok((Chart::new(CLOCKWORK2.title, 3, vec![left, middle, right]), table))
}
