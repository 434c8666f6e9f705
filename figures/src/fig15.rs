//! Symphony's Figure 15: a large cluster while the load changes.

use std::f64::consts::TAU;

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::Timestamp;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sim::{Options, Workload, arrivals::Arrivals, cluster, trace::Event};

use crate::{
    Figure, FigureError,
    context::{Context, axis_of, policy, workload},
    table::{Table, cell},
};

pub(crate) const FIG15: Figure = Figure {
    name: "fig15",
    title: "Symphony, Figure 15: a changing workload on 512 GPUs",
    shows: "The first 24 models of the A100 zoo under `downbeat`. Each model's rate swings with a period and a phase \
            of its own, all of them with a day, and from 60 % of the time on one of them is suddenly asked for far \
            more often. Every point is a hundredth of the simulated time.",
    remarks: &[
        "The paper's rates come from 150 hours of video, which are not published; ours are made up from the seed, and \
         a day takes as long as the budget allows to simulate, so changes are far faster than the paper's.",
        "The advice is the paper's section 3.5: N r / (1 - r) GPUs more at a bad rate r above 1 %, N f fewer at an \
         idle part f. It is not acted on here.",
    ],
    draw,
};

const GPUS: u32 = 512;
const MODELS: usize = 24;
const POINTS: usize = 100;
/// Mean of all models at its highest, as a part of what the GPUs could serve with batches of the largest size.
const PEAK_PART: f64 = 1.1;
/// The day's mean rate and how far it swings.
const DAY: (f64, f64) = (0.5, 0.35);
/// How far a model's own rate swings, of 1.
const SWING: f64 = 0.5;
/// How much more one model is asked for while it surges, and when, from 0 to 1 over the run.
const SURGE: f64 = 6.0;
const SURGE_AT: std::ops::Range<f64> = 0.6..0.7;

/// What happened in one hundredth of the time.
#[derive(Debug, Clone, Default)]
struct Interval {
    answered: u64,
    dropped: u64,
    busy_s: f64,
    gpus: Vec<bool>,
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut cluster = workload("24 models", &format!("gpus = {GPUS}\n[[model]]\nzoo = \"symphony-zoo-a100.csv\"\n"));
    cluster.models.truncate(MODELS);
    for model in &mut cluster.models {
        model.share = 1.0 / MODELS as f64;
    }
    let peak_rps = PEAK_PART * cluster.capacity_rps();
    let seconds = context.seconds(0.6 * peak_rps);
    context.bar.inc_length(1);
    let intervals = context.parallel(&[()], |()| simulate(&cluster, peak_rps, seconds, context.seed))?.remove(0);
    let width = seconds / POINTS as f64;
    let mut table = Table::new(&[
        "time (s)",
        "offered (r/s)",
        "in time (r/s)",
        "GPUs used",
        "GPU busy (%)",
        "bad rate (%)",
        "advice (GPUs)",
    ]);
    let mut columns = vec![Vec::new(); 6];
    for (index, interval) in intervals.iter().enumerate() {
        let ended = (interval.answered + interval.dropped).max(1) as f64;
        let bad = interval.dropped as f64 / ended;
        let busy = interval.busy_s / (width * f64::from(GPUS));
        let advice = f64::from(GPUS) * if bad > 0.01 { bad / (1.0 - bad).max(0.01) } else { busy - 1.0 };
        let used = interval.gpus.iter().filter(|&&used| used).count() as f64;
        let at = width * (index as f64 + 0.5);
        let values = [ended / width, interval.answered as f64 / width, used, 100.0 * busy, 100.0 * bad, advice];
        for (column, value) in columns.iter_mut().zip(values) {
            column.push((at, value));
        }
        let [offered, answered, used, busy, bad, advice] = values.map(cell);
        table.push([cell(at), offered, answered, used, busy, bad, advice]);
    }
    table.note("precision", format!("{seconds} s are simulated, once"));
    Ok((chart(seconds, columns), table))
}

fn chart(seconds: f64, columns: Vec<Vec<(f64, f64)>>) -> Chart {
    let [offered, answered, used, busy, bad, advice] = <[_; 6]>::try_from(columns).expect("six columns");
    let line = |name: &str, look, points| Series { name: name.to_owned(), mark: Mark::Curve, look, points };
    let busy_gpus = busy.into_iter().map(|(at, percent)| (at, percent / 100.0 * f64::from(GPUS))).collect();
    let panel = |title: &str, y: Axis, series| Panel {
        title: title.to_owned(),
        x: Axis::new("time (s)", (0.0, seconds)),
        y,
        series,
        boxes: Vec::new(),
    };
    let rates = vec![line("offered", 6, offered), line("answered in time", 0, answered)];
    let gpus = vec![line("GPUs that ran a batch", 2, used), line("GPU time executing / interval", 4, busy_gpus)];
    let (low, high) = advice.iter().fold((0.0f64, 0.0f64), |(low, high), point| (low.min(point.1), high.max(point.1)));
    let advice = vec![line("GPUs to add (or give back)", 5, advice)];
    let bad = vec![line("late or dropped", 3, bad)];
    let panels = vec![
        panel("load", axis_of("requests/s", &rates), rates),
        panel("GPUs in use", Axis::new("GPUs", (0.0, 1.05 * f64::from(GPUS))), gpus),
        panel("advice", Axis::new("GPUs", (1.1 * low - 1.0, 1.1 * high + 1.0)), advice),
        panel("bad rate", axis_of("late or dropped (%)", &bad), bad),
    ];
    Chart::new(FIG15.title, 2, panels)
}

fn simulate(
    workload: &Workload,
    peak_rps: f64,
    seconds: f64,
    seed: u64,
) -> Result<Vec<Interval>, sim::checker::Violation> {
    let mut intervals = vec![Interval { gpus: vec![false; GPUS as usize], ..Interval::default() }; POINTS];
    let width_ns = seconds * 1e9 / POINTS as f64;
    let index_of = |at: Timestamp| ((at.as_nanos() as f64 / width_ns) as usize).min(POINTS - 1);
    let mut observe = |event| match event {
        Event::Batch { gpu, size, started_at, finished_at, .. } => {
            let interval = &mut intervals[index_of(started_at)];
            interval.answered += u64::from(size);
            interval.busy_s += (finished_at - started_at).as_secs_f64();
            interval.gpus[gpu as usize] = true;
        }
        // No GPU fails here, and the policy takes no batch back.
        Event::Killed { .. } | Event::Answer { .. } => {}
        Event::Drop { dropped_at, .. } => intervals[index_of(dropped_at)].dropped += 1,
    };
    let arrivals = Arrivals::listed(changing(workload, peak_rps, seconds, seed));
    let options = Options { policy: policy("downbeat"), rate_rps: peak_rps, seconds, seed };
    cluster::run_arrivals(workload, &options, arrivals, &mut observe, &mut |_| ())?;
    Ok(intervals)
}

/// Poisson arrivals of each model at its changing rate: those of its highest rate, thinned.
fn changing(workload: &Workload, peak_rps: f64, seconds: f64, seed: u64) -> Vec<Vec<Timestamp>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut arrivals = Vec::new();
    for (index, model) in workload.models.iter().enumerate() {
        let (cycles, phase) = (rng.random_range(2.0..6.0), rng.random_range(0.0..1.0));
        // Of the model's rate at the highest of the day; `at` goes from 0 to 1 over the run.
        let rate = |at: f64| {
            let day = (DAY.0 - DAY.1 * (TAU * at).cos()) / (DAY.0 + DAY.1);
            let own = 1.0 + SWING * (TAU * (cycles * at + phase)).sin();
            day * own * if index == 0 && SURGE_AT.contains(&at) { SURGE } else { 1.0 }
        };
        let highest = (1.0 + SWING) * SURGE;
        let highest_rps = highest * peak_rps * model.share;
        let (mut at_s, mut instants) = (0.0, Vec::new());
        loop {
            at_s -= (1.0 - rng.random::<f64>()).ln() / highest_rps;
            if at_s >= seconds {
                break;
            }
            if rng.random::<f64>() * highest < rate(at_s / seconds) {
                instants.push(Timestamp((at_s * 1e9) as i64));
            }
        }
        arrivals.push(instants);
    }
    arrivals
}
