//! Clockwork's Figure 6 (its section 6.2): thousands of models on one GPU that holds 201 of them.

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::{Span, Timestamp};
use sim::{Options, Workload, arrivals::Arrivals, cluster, trace::Event};

use crate::{
    context::{Context, REQUESTS_PER_CORE_SECOND, note_ahead, policy, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK6: Figure = Figure {
    name: "clockwork6",
    title: "Clockwork, Figure 6: one more model each second, on a GPU that holds 201",
    shows: "One V100 and 3,601 copies of ResNet50 with an objective of 100 ms. Minor is one of them, asked for 200 \
            times a second; Major's 1,000 requests a second go to one more of the others after each 3,600th part of \
            the run, so the memory is full after a nineteenth of it. Left: requests answered in time a second. \
            Right: mean latency; in the paper Minor's returns to 20 ms once Major is limited by the link, and no \
            answer takes more than 100 ms.",
    remarks: &[
        "The paper's run takes an hour, this one as long as its budget allows: what matters is over how many models \
         the requests are spread.",
        "The memory is 1,414 pages of 16 MiB, which 201 copies of seven pages fill and an eighth; the paper says \
         that swapping starts after 201 models.",
        "Weights take 8.33 ms to load, so a link loads 120 models a second at most. Which 120 requests a second are \
         answered beside those whose model is there is up to the policy.",
    ],
    draw,
};

const MODELS: usize = 3_601;
const MINOR_RPS: f64 = 200.0;
const MAJOR_RPS: f64 = 1_000.0;
const POINTS: usize = 60;
const NAMES: [&str; 2] = ["downbeat", "clockwork"];

fn copies(seconds: f64) -> Workload {
    let text = format!(
        "gpus = 1\nseconds = {seconds}\n[memory]\ngpu_mb = 23723\n[[model]]\nname = \"ResNet50\"\ncount = {MODELS}\n\
         latency_ms = [2.61, 3.78, 4.695, 5.61, 6.49, 7.37, 8.25, 9.13, 9.9475, 10.765, 11.5825, 12.4, 13.2175, \
         14.035, 14.8525, 15.67]\nslo_ms = 100\nweights_mb = 102.3\nload_ms = 8.33\n"
    );
    workload("clockwork6", &text)
}

/// Poisson arrivals of each model.
fn arrivals(seconds: f64, seed: u64) -> Arrivals {
    let mut instants = vec![Vec::new(); MODELS];
    let gaps =
        |rate_rps: f64, stream: u64| sim::arrivals::poisson(rate_rps, seed, stream).take_while(move |&at| at < seconds);
    let instant = |at: f64| Timestamp::ZERO + Span::from_secs_f64(at);
    instants[0].extend(gaps(MINOR_RPS, 0).map(instant));
    for (at, place) in gaps(MAJOR_RPS, 1).zip(sim::arrivals::uniform(seed, 2)) {
        // One more model each time, all equally popular.
        let active = 1.0 + (at / seconds * (MODELS - 1) as f64).floor();
        instants[1 + (place * active) as usize].push(instant(at));
    }
    Arrivals::listed(instants)
}

/// Of one policy, by part of the run: for Minor and Major those in time, and the sum of latencies and number of
/// answers.
#[derive(Default, Clone, Copy)]
struct Part {
    in_time: [u64; 2],
    latency_s: [f64; 2],
    answered: [u64; 2],
    longest_s: f64,
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&[
        "policy",
        "active models",
        "minor in time (r/s)",
        "major in time (r/s)",
        "minor mean (ms)",
        "major mean (ms)",
        "longest (ms)",
    ]);
    let seconds = (context.budget_minutes * 60.0 * REQUESTS_PER_CORE_SECOND / 8.0 / (MINOR_RPS + MAJOR_RPS))
        .clamp(30.0, 3_600.0)
        .round();
    table.note("span", format!("{seconds} s simulated"));
    context.bar.inc_length(NAMES.len() as u64);
    let found = context.parallel(&NAMES, |name| {
        let mut parts = vec![Part::default(); POINTS];
        let mut observe = |event| {
            if let Event::Answer { model, arrived_at, answered_at } = event {
                let at = (arrived_at - Timestamp::ZERO).as_secs_f64() / seconds * POINTS as f64;
                let part = &mut parts[(at as usize).min(POINTS - 1)];
                let (class, latency_s) = (usize::from(model > 0), (answered_at - arrived_at).as_secs_f64());
                part.in_time[class] += u64::from(latency_s <= 0.1);
                part.latency_s[class] += latency_s;
                part.answered[class] += 1;
                part.longest_s = part.longest_s.max(latency_s);
            }
        };
        let options = Options { policy: policy(name), rate_rps: MINOR_RPS + MAJOR_RPS, seconds, seed: context.seed };
        let arrivals = arrivals(seconds, context.seed);
        cluster::run_arrivals(&copies(seconds), &options, arrivals, &mut observe, &mut |_| ())?;
        Ok(parts)
    })?;
    let (mut rates, mut latencies) = (Vec::new(), Vec::new());
    for (index, (name, parts)) in NAMES.iter().zip(&found).enumerate() {
        for (class, who) in ["Minor", "Major"].into_iter().enumerate() {
            let look = 2 * index + class;
            let x = |point: usize| (point as f64 + 0.5) / POINTS as f64 * (MODELS - 1) as f64;
            let line = |points| Series { name: format!("{name}: {who}"), mark: Mark::Line, look, points };
            let rate = |part: &Part| part.in_time[class] as f64 * POINTS as f64 / seconds;
            let mean = |part: &Part| 1e3 * part.latency_s[class] / part.answered[class].max(1) as f64;
            rates.push(line(parts.iter().enumerate().map(|(point, part)| (x(point), rate(part))).collect()));
            latencies.push(line(parts.iter().enumerate().map(|(point, part)| (x(point), mean(part))).collect()));
        }
        for (point, part) in parts.iter().enumerate() {
            let per_s = |class: usize| part.in_time[class] as f64 * POINTS as f64 / seconds;
            let mean = |class: usize| 1e3 * part.latency_s[class] / part.answered[class].max(1) as f64;
            let active = (point as f64 + 0.5) / POINTS as f64 * (MODELS - 1) as f64;
            let cells = [per_s(0), per_s(1), mean(0), mean(1), 1e3 * part.longest_s].map(cell);
            let [minor, major, minor_ms, major_ms, longest_ms] = cells;
            table.push([(*name).into(), cell(active), minor, major, minor_ms, major_ms, longest_ms]);
        }
    }
    let in_time =
        |parts: &[Part], class: usize| parts.iter().map(|part| part.in_time[class]).sum::<u64>() as f64 / seconds;
    let values = ["Minor", "Major"].iter().enumerate();
    let values = values.map(|(class, who)| ((*who).to_owned(), in_time(&found[0], class), in_time(&found[1], class)));
    note_ahead(&mut table, NAMES[1], "requests answered in time a second", false, &values.collect::<Vec<_>>());
    let x = Axis::new("Major's models", (0.0, MODELS as f64));
    let panel =
        |title: &str, y: Axis, series| Panel { title: title.to_owned(), x: x.clone(), y, series, boxes: Vec::new() };
    let rates = panel("answered in time (r/s)", Axis::new("requests/s", (0.0, 1_100.0)), rates);
    let latencies = panel("mean latency (ms)", Axis::new("ms", (0.0, 105.0)), latencies);
    Ok((Chart::new(CLOCKWORK6.title, 2, vec![rates, latencies]), table))
}
