//! Symphony's Figure 15: a large cluster while the load changes.

use std::f64::consts::TAU;

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::Timestamp;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use scheduler::Policy;
use sim::{Options, Workload, arrivals::Arrivals, cluster, trace::Event};

use crate::{
    context::{AUTHORS, Context, IN_TIME, SYMPHONY, axis_of, legend_of, look_of, note_rivals, policy, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG15: Figure = Figure {
    name: "fig15",
    title: "Symphony, Figure 15: a changing workload on 512 GPUs",
    shows: "The first 24 models of the A100 zoo. Each model's rate swings with a period and a phase of its own, all of \
            them with a day, and from 60 % of the time on one of them is suddenly asked for far more often. Every \
            point is a hundredth of the simulated time.",
    remarks: &[
        "The paper's rates come from 150 hours of video, which are not published; ours are made up from the seed, and \
         a day takes as long as the budget allows to simulate, so changes are far faster than the paper's.",
        "The advice is the paper's section 3.5: N r / (1 - r) GPUs more at a bad rate r above 1 %, N f fewer at an \
         idle part f. It is not acted on here; the next figure does.",
    ],
    draw,
};

const COMPARED: [&str; 5] = ["downbeat", AUTHORS, SYMPHONY, "deferred", "eager"];
pub(crate) const GPUS: u32 = 512;
pub(crate) const MODELS: usize = 24;
const POINTS: usize = 100;
/// Mean of all models at its highest, as a part of what the GPUs could serve with batches of the largest size.
const PEAK_PART: f64 = 1.1;

/// How often a model is asked for over a day.
pub(crate) struct Swing {
    /// Of its own, in a day.
    cycles: f64,
    /// From 0 to 1.
    phase: f64,
    surges: bool,
}

impl Swing {
    /// The day's mean rate and how far it swings.
    const DAY: (f64, f64) = (0.5, 0.35);
    /// How far a model's own rate swings, of 1.
    const OWN: f64 = 0.5;
    /// How much more the first model is asked for while it surges.
    const SURGE: f64 = 6.0;
    /// When it does, from 0 to 1 over the day.
    pub(crate) const SURGE_AT: std::ops::Range<f64> = 0.6..0.7;
    /// No [`Self::part`] is higher.
    const HIGHEST: f64 = (1.0 + Self::OWN) * Self::SURGE;

    pub(crate) fn draw(rng: &mut ChaCha8Rng, model: usize) -> Self {
        Self { cycles: rng.random_range(2.0..6.0), phase: rng.random_range(0.0..1.0), surges: model == 0 }
    }

    /// Of the model's rate at the highest of the day; `at` goes from 0 to 1.
    pub(crate) fn part(&self, at: f64) -> f64 {
        let (mean, swing) = Self::DAY;
        let day = (mean - swing * (TAU * at).cos()) / (mean + swing);
        let own = 1.0 + Self::OWN * (TAU * (self.cycles * at + self.phase)).sin();
        day * own * if self.surges && Self::SURGE_AT.contains(&at) { Self::SURGE } else { 1.0 }
    }
}

/// What happened in one hundredth of the time.
#[derive(Debug, Clone, Default)]
struct Interval {
    answered: u64,
    dropped: u64,
    busy_s: f64,
    gpus: Vec<bool>,
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let cluster = cluster_of(GPUS);
    let peak_rps = PEAK_PART * cluster.capacity_rps();
    let seconds = context.seconds(0.6 * peak_rps * COMPARED.len() as f64);
    context.bar.inc_length(COMPARED.len() as u64);
    let found =
        context.parallel(&COMPARED, |name| simulate(&cluster, policy(name), peak_rps, seconds, context.seed))?;
    let width = seconds / POINTS as f64;
    let mut table = Table::new(&[
        "policy",
        "time (s)",
        "offered (r/s)",
        "in time (r/s)",
        "GPUs used",
        "GPU busy (%)",
        "bad rate (%)",
        "advice (GPUs)",
    ]);
    table.note("precision", format!("{seconds} s are simulated, once under each policy"));
    note_totals(&mut table, seconds, &found);
    note_rivals(&mut table, &IN_TIME, &COMPARED, &found.iter().map(|intervals| in_time(intervals)).collect::<Vec<_>>());
    let mut lines = Vec::new();
    for (name, intervals) in COMPARED.into_iter().zip(&found) {
        let mut columns = [const { Vec::new() }; COLUMNS];
        for (index, interval) in intervals.iter().enumerate() {
            let at = width * (index as f64 + 0.5);
            let values = interval.values(width);
            for (column, value) in columns.iter_mut().zip(values) {
                column.push((at, value));
            }
            let [offered, answered, used, busy, bad, advice] = values.map(cell);
            table.push([name.into(), cell(at), offered, answered, used, busy, bad, advice]);
        }
        lines.push((name, columns));
    }
    Ok((chart(seconds, &lines), table))
}

const COLUMNS: usize = 6;
/// Points over time of what [`Interval::values`] tells.
type Columns = [Vec<(f64, f64)>; COLUMNS];

impl Interval {
    /// Requests a second that ended and that were answered, GPUs used, GPU time and bad rate in per cent, and the
    /// advice in GPUs. `width` is in seconds.
    fn values(&self, width: f64) -> [f64; COLUMNS] {
        let ended = (self.answered + self.dropped).max(1) as f64;
        let bad = self.dropped as f64 / ended;
        let busy = self.busy_s / (width * f64::from(GPUS));
        let advice = f64::from(GPUS) * if bad > 0.01 { bad / (1.0 - bad).max(0.01) } else { busy - 1.0 };
        let used = self.gpus.iter().filter(|&&used| used).count() as f64;
        [ended / width, self.answered as f64 / width, used, 100.0 * busy, 100.0 * bad, advice]
    }
}

/// The first models of the zoo, equally popular, on so many GPUs.
pub(crate) fn cluster_of(gpus: u32) -> Workload {
    let mut cluster = workload("24 models", &format!("gpus = {gpus}\n[[model]]\nzoo = \"symphony-zoo-a100.csv\"\n"));
    cluster.models.truncate(MODELS);
    for model in &mut cluster.models {
        model.share = 1.0 / MODELS as f64;
    }
    cluster
}

fn in_time(intervals: &[Interval]) -> f64 {
    intervals.iter().map(|interval| interval.answered as f64).sum()
}

/// The whole run under each policy.
fn note_totals(table: &mut Table, seconds: f64, found: &[Vec<Interval>]) {
    let of_policy = |(name, intervals): (&&str, &Vec<Interval>)| {
        let lost: u64 = intervals.iter().map(|interval| interval.dropped).sum();
        let busy_s: f64 = intervals.iter().map(|interval| interval.busy_s).sum();
        let bad = 100.0 * lost as f64 / (in_time(intervals) + lost as f64).max(1.0);
        let busy = 100.0 * busy_s / (seconds * f64::from(GPUS));
        format!("`{name}` {bad:.2} % and {busy:.1} %")
    };
    let each = COMPARED.iter().zip(found).map(of_policy).collect::<Vec<_>>().join(", ");
    table.note(
        "finding",
        format!("Of all requests are late or dropped, and of all GPU time is spent executing: {each}"),
    );
}

fn chart(seconds: f64, lines: &[(&str, Columns)]) -> Chart {
    let line =
        |name: String, look, points: &[(f64, f64)]| Series { name, mark: Mark::Curve, look, points: points.into() };
    let mut offered = vec![line("offered".into(), chart::GREY, &lines[0].1[0])];
    let of_column = |column: usize| {
        lines.iter().map(|(name, columns)| line(legend_of(name), look_of(name), &columns[column])).collect::<Vec<_>>()
    };
    offered.extend(of_column(1));
    let (used, bad, advice) = (of_column(2), of_column(4), of_column(5));
    let panel = |title: &str, y: Axis, series| Panel {
        title: title.to_owned(),
        x: Axis::new("time (s)", (0.0, seconds)),
        y,
        series,
        boxes: Vec::new(),
    };
    let advised = advice.iter().flat_map(|series| &series.points);
    let (low, high) = advised.fold((0.0f64, 0.0f64), |(low, high), point| (low.min(point.1), high.max(point.1)));
    let panels = vec![
        panel("load, answered in time", axis_of("requests/s", &offered), offered),
        panel("GPUs that ran a batch", Axis::new("GPUs", (0.0, 1.05 * f64::from(GPUS))), used),
        panel("advice: GPUs to add (or give back)", Axis::new("GPUs", (1.1 * low - 1.0, 1.1 * high + 1.0)), advice),
        panel("bad rate", axis_of("late or dropped (%)", &bad), bad),
    ];
    Chart::new(FIG15.title, 2, panels)
}

fn simulate(
    workload: &Workload,
    policy: Policy,
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
    let options = Options { policy, rate_rps: peak_rps, seconds, seed };
    cluster::run_arrivals(workload, &options, arrivals, &mut observe, &mut |_| ())?;
    Ok(intervals)
}

/// Poisson arrivals of each model at its changing rate: those of its highest rate, thinned.
fn changing(workload: &Workload, peak_rps: f64, seconds: f64, seed: u64) -> Vec<Vec<Timestamp>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut arrivals = Vec::new();
    for (index, model) in workload.models.iter().enumerate() {
        let swing = Swing::draw(&mut rng, index);
        let highest_rps = Swing::HIGHEST * peak_rps * model.share;
        let (mut at_s, mut instants) = (0.0, Vec::new());
        loop {
            at_s -= (1.0 - rng.random::<f64>()).ln() / highest_rps;
            if at_s >= seconds {
                break;
            }
            if rng.random::<f64>() * Swing::HIGHEST < swing.part(at_s / seconds) {
                instants.push(Timestamp((at_s * 1e9) as i64));
            }
        }
        arrivals.push(instants);
    }
    arrivals
}
