//! Clockwork's Figure 5 (its section 6.1) with its own load: clients that ask again when they are answered.

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::{Span, Timestamp};
use sim::{Options, Workload, cluster, trace::Event};

use crate::{
    clockwork5::{COPIES, LATENCIES_MS, SLOS_MS, latencies_ms},
    context::{Context, IN_TIME, POLICIES, axis_of, legend_of, look_of, note_rivals, policy, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK5_CLOSED: Figure = Figure {
    name: "clockwork5closed",
    title: "Clockwork, Figure 5: sixteen clients of each model that ask again when they are answered",
    shows: "15 copies of ResNet50 on one V100, 16 clients each. Left: answers in time a second over the objective. \
            Dashed: what batches of 16 allow, and the 800 r/s that the paper's text gives for Clockwork and INFaaS at \
            500 ms; below 100 ms only Clockwork still served. Right: how long requests wait under `downbeat` \
            (solid) and `clockwork` (dashed) until they are answered or refused, for objectives of 25, 100 and 500 \
            ms; in the paper Clockwork's stay near 300 ms where 500 are allowed.",
    remarks: &[
        "The profile is that of the figure above. A client whose request is refused asks again 1 ms later; the paper \
         does not say when its clients do.",
        "The clients ask for far more than is served at short objectives, so most requests are refused there, at once \
         or when their deadline can no longer be met: what counts is what is served beside.",
        "Whoever batches from one queue for each model, and none is held back for long, goes round the models with \
         batches of 16 once the objective allows that: 785 r/s, and 306 ms from a request to its answer. `shepherd` \
         serves more at shorter objectives, as it always takes the largest batch; clients of other models then wait \
         in vain until their deadline.",
    ],
    draw,
};

const CLIENTS: usize = 16;
/// Of whose requests the right panel shows latencies, and for which objectives.
const SHOWN: [&str; 2] = ["downbeat", "clockwork"];
const SHOWN_MS: [f64; 3] = [25.0, 100.0, 500.0];
/// In the paper's text.
const REPORTED_RPS: f64 = 800.0;
const NINES_MAX: f64 = 4.0;

fn copies(slo_ms: f64) -> Workload {
    let latencies = latencies_ms();
    let text = format!(
        "gpus = 1\n[[model]]\nname = \"ResNet50\"\ncount = {COPIES}\nclients = {CLIENTS}\nlatency_ms = \
         {latencies:?}\nslo_ms = {slo_ms}\n"
    );
    workload("15 x ResNet50", &text)
}

/// What was measured under one policy, for one objective.
struct Measured {
    goodput_rps: f64,
    batch_mean: f64,
    /// Of all requests, also those that were refused, in ascending order.
    waits_ms: Vec<f64>,
}

impl Measured {
    fn quantile(&self, part: f64) -> f64 {
        let rank = (part * self.waits_ms.len() as f64).ceil() as usize;
        self.waits_ms.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let header = ["SLO (ms)", "policy", "in time (r/s)", "mean batch", "p50 (ms)", "p99 (ms)", "longest (ms)"];
    let mut table = Table::new(&header);
    let jobs: Vec<_> = SLOS_MS.iter().flat_map(|&slo_ms| POLICIES.map(|name| (slo_ms, name))).collect();
    // All ask for what the GPU can do, and a client that is refused asks a thousand times a second.
    let seconds = context.seconds(jobs.len() as f64 * REPORTED_RPS * 8.0);
    table.note("span", format!("{seconds} s simulated"));
    context.bar.inc_length(jobs.len() as u64);
    let found = context.parallel(&jobs, |&(slo_ms, name)| {
        let warm = Timestamp::ZERO + Span::from_secs_f64(seconds / 10.0);
        let mut waits_ms = Vec::new();
        let mut observe = |event| {
            if let Event::Answer { arrived_at, answered_at: ended_at, .. }
            | Event::Drop { arrived_at, dropped_at: ended_at, .. } = event
                && arrived_at >= warm
            {
                waits_ms.push((ended_at - arrived_at).as_millis_f64());
            }
        };
        // The rate is the clients' own.
        let options = Options { policy: policy(name), rate_rps: 1.0, seconds, seed: context.seed };
        let report = cluster::run(&copies(slo_ms), &options, &mut observe, &mut |_| ())?;
        waits_ms.sort_by(f64::total_cmp);
        let goodput_rps = report.totals.offered_rps * report.totals.on_time_fraction;
        Ok(Measured { goodput_rps, batch_mean: report.batch_mean, waits_ms })
    })?;
    let in_time: Vec<_> = found.iter().map(|measured| measured.goodput_rps).collect();
    note_rivals(&mut table, &IN_TIME, &POLICIES, &in_time);
    let line =
        |name: &&str| Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points: Vec::new() };
    let mut rates: Vec<_> = POLICIES.iter().map(line).collect();
    let mut waits = Vec::new();
    for (&(slo_ms, name), measured) in jobs.iter().zip(&found) {
        let place = look_of(name);
        rates[place].points.push((slo_ms, measured.goodput_rps));
        let numbers = [measured.goodput_rps, measured.batch_mean].map(cell);
        let [goodput, batch] = numbers;
        let [p50, p99, longest] = [0.5, 0.99, 1.0].map(|part| cell(measured.quantile(part)));
        table.push([cell(slo_ms), name.to_owned(), goodput, batch, p50, p99, longest]);
        if SHOWN.contains(&name) && SHOWN_MS.contains(&slo_ms) {
            let points = (0..=80).map(|step| f64::from(step) / 80.0 * NINES_MAX);
            let points = points.map(|nines| (nines, measured.quantile(1.0 - 10f64.powf(-nines)))).collect();
            let mark = if name == SHOWN[0] { Mark::Curve } else { Mark::Dashed };
            let look = SHOWN_MS.iter().position(|&shown| shown == slo_ms).unwrap_or(chart::GREY);
            waits.push(Series { name: format!("{name}, {slo_ms} ms"), mark, look, points });
        }
    }
    let (_, largest_ms) = LATENCIES_MS[LATENCIES_MS.len() - 1];
    for (name, rate, look) in
        [("paper, at 500 ms", REPORTED_RPS, chart::GREY), ("batches of 16", 16_000.0 / largest_ms, chart::BOUND)]
    {
        rates.push(Series { name: name.into(), mark: Mark::Dashed, look, points: vec![(0.0, rate), (510.0, rate)] });
    }
    let panel = |x: Axis, y: Axis, series| Panel { title: String::new(), x, y, series, boxes: Vec::new() };
    let y = axis_of("in time (r/s)", &rates);
    let left = panel(Axis::new("objective (ms)", (0.0, 510.0)), y, rates);
    let y = axis_of("until answered or refused (ms)", &waits);
    let right = panel(Axis::new("nines of the quantile", (0.0, NINES_MAX)), y, waits);
    Ok((Chart::new(CLOCKWORK5_CLOSED.title, 2, vec![left, right]), table))
}
