//! Clockwork's table of section 6.5: its trace, half as dense again, on twenty GPUs, for two objectives.

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::{Span, Timestamp};
use sim::{Options, Report, cluster, trace::Event};

use crate::{
    clockwork8::{models, with_jitter},
    context::{Context, look_of, note_ahead, policy},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK_SLO: Figure = Figure {
    name: "clockworkslo",
    title: "Clockwork, section 6.5: two objectives on twenty GPUs",
    shows: "Figure 8's models and trace at 6,174 requests a second on twenty V100s, for objectives of 100 and 25 ms. \
            Executions and loads vary by 2 %, as in Figure 9. The latency of what was answered, by quantile; nines \
            are digits of the quantile: 2 is the 99th percentile, 4 the 99.99th. Marks: the paper's medians and \
            99.99th percentiles.",
    remarks: &[
        "The trace is ours, as in Figure 8: functions ask for models at random, or those that are invoked most for the \
         cheapest. The paper's own lies between the two. At random, twenty GPUs are nearly full.",
        "Runs begin with empty memory and last seconds instead of an hour; the first tenth is not counted. These \
         seconds of the trace ask for 5,600 requests a second.",
        "At random and 25 ms a fifth of all requests are cold, where the paper has 3.7 % at 100 ms, and as many are \
         refused: a load leaves 17 ms for what waits for its link and its GPU. `clockwork` refuses half as many again.",
        "Networks cost nothing; the paper's inputs had no bytes either, as its controller passes them on.",
        "Missed are requests that were answered late. What is refused at once, or given up, is counted beside.",
    ],
    draw,
};

const NAMES: [&str; 2] = ["downbeat", "clockwork"];
const ASSIGNMENTS: [&str; 2] = ["random", "lucky"];
const GPUS: u32 = 20;
const RATE_RPS: f64 = 6_174.0;
const NINES_MAX: f64 = 4.0;

/// A row of the paper's table.
struct Reported {
    slo_ms: f64,
    goodput_rps: f64,
    missed: f64,
    /// The median and the 99.99th percentile.
    latency_ms: [f64; 2],
}

#[allow(clippy::approx_constant, reason = "6.28 ms are no circle")]
const REPORTED: [Reported; 2] = [
    Reported { slo_ms: 100.0, goodput_rps: 6_174.0, missed: 0.0, latency_ms: [6.28, 49.92] },
    Reported { slo_ms: 25.0, goodput_rps: 6_060.0, missed: 361.0, latency_ms: [5.77, 21.60] },
];

/// What was measured, with the latencies of what was answered in ascending order.
struct Measured {
    report: Report,
    missed: usize,
    latencies_ms: Vec<f64>,
}

impl Measured {
    fn quantile(&self, part: f64) -> f64 {
        let rank = (part * self.latencies_ms.len() as f64).ceil() as usize;
        self.latencies_ms.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let header = [
        "objective (ms)",
        "assignment",
        "policy",
        "offered (r/s)",
        "goodput (r/s)",
        "missed",
        "refused (%)",
        "cold (%)",
        "p50 (ms)",
        "p99.99 (ms)",
    ];
    let mut table = Table::new(&header);
    let of_slo = |row| ASSIGNMENTS.map(|assignment| NAMES.map(|name| (row, assignment, name)));
    let jobs: Vec<(&Reported, &str, &str)> = REPORTED.iter().flat_map(of_slo).flatten().collect();
    let seconds = context.seconds(jobs.len() as f64 * RATE_RPS);
    table.note("span", format!("{seconds} s simulated"));
    context.bar.inc_length(jobs.len() as u64);
    let found = context.parallel(&jobs, |&(row, assignment, name)| {
        let workload = with_jitter(models(assignment, GPUS, row.slo_ms));
        let warm = Timestamp::ZERO + Span::from_secs_f64(seconds / 10.0);
        let mut latencies_ms = Vec::new();
        let mut observe = |event| {
            if let Event::Answer { arrived_at, answered_at, .. } = event
                && arrived_at >= warm
            {
                latencies_ms.push((answered_at - arrived_at).as_millis_f64());
            }
        };
        let options = Options { policy: policy(name), rate_rps: RATE_RPS, seconds, seed: context.seed };
        let report = cluster::run(&workload, &options, &mut observe, &mut |_| ())?;
        latencies_ms.sort_by(f64::total_cmp);
        let missed = latencies_ms.len() - latencies_ms.partition_point(|&latency_ms| latency_ms <= row.slo_ms);
        Ok(Measured { report, missed, latencies_ms })
    })?;
    for row in &REPORTED {
        let [p50, p9999] = row.latency_ms.map(cell);
        let (slo, rate, goodput) = (cell(row.slo_ms), cell(RATE_RPS), cell(row.goodput_rps));
        // Of 22 million requests in an hour, what was neither served nor late was refused.
        let refused = cell(100.0 * (1.0 - row.goodput_rps / RATE_RPS));
        let (who, trace, cold) = ("paper".to_owned(), "the trace".to_owned(), String::new());
        table.push([slo, trace, who, rate, goodput, cell(row.missed), refused, cold, p50, p9999]);
    }
    for ((row, assignment, name), measured) in jobs.iter().zip(&found) {
        let Measured { report, missed, .. } = measured;
        let [offered, in_time] = [report.totals.offered_rps, report.totals.on_time_fraction];
        let refused = 100.0 * (1.0 - in_time) - 100.0 * *missed as f64 / (offered * 0.9 * seconds);
        let cold = report.memory.map_or(0.0, |memory| 100.0 * memory.cold_fraction);
        let [p50, p9999] = [0.5, 0.9999].map(|part| cell(measured.quantile(part)));
        table.push([
            cell(row.slo_ms),
            (*assignment).into(),
            (*name).into(),
            cell(offered),
            cell(offered * in_time),
            cell(*missed as f64),
            cell(refused.max(0.0)),
            cell(cold),
            p50,
            p9999,
        ]);
    }
    for (what, of) in [
        ("the median (ms)", (|measured| measured.quantile(0.5)) as fn(&Measured) -> f64),
        ("the 99.99th percentile (ms)", |measured| measured.quantile(0.9999)),
    ] {
        let pairs = jobs.chunks(NAMES.len()).zip(found.chunks(NAMES.len()));
        let values = pairs.map(|(jobs, found)| {
            let (row, assignment, _) = jobs[0];
            (format!("{assignment}, {} ms", row.slo_ms), of(&found[0]), of(&found[1]))
        });
        note_ahead(&mut table, NAMES[1], what, true, &values.collect::<Vec<_>>());
    }
    let mut panels = Vec::new();
    for (row, found) in REPORTED.iter().zip(found.chunks(ASSIGNMENTS.len() * NAMES.len())) {
        let mut series = Vec::new();
        let lines = ASSIGNMENTS.iter().flat_map(|assignment| NAMES.map(|name| (*assignment, name)));
        for ((assignment, name), measured) in lines.zip(found) {
            let points = (0..=80).map(|step| f64::from(step) / 80.0 * NINES_MAX);
            let points = points.map(|nines| (nines, measured.quantile(1.0 - 10f64.powf(-nines)))).collect();
            let mark = if assignment == ASSIGNMENTS[0] { Mark::Curve } else { Mark::Dashed };
            series.push(Series { name: format!("{name}, {assignment}"), mark, look: look_of(name), points });
        }
        let [p50, p9999] = row.latency_ms;
        // The median has 0.3 nines.
        let points = vec![(2f64.log10(), p50), (NINES_MAX, p9999)];
        series.push(Series { name: "paper".into(), mark: Mark::Points, look: chart::GREY, points });
        panels.push(Panel {
            title: format!("objective {} ms", row.slo_ms),
            x: Axis::new("nines of the quantile", (0.0, NINES_MAX)),
            y: Axis::new("latency of answers (ms)", (0.0, row.slo_ms * 1.1)),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(CLOCKWORK_SLO.title, 2, panels), table))
}
