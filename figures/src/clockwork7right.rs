//! Clockwork's Figure 7, right (its section 6.4): clients with tight objectives beside clients without any.

use chart::{Axis, Chart, Mark, Panel, Series};
use sim::{Options, Workload, cluster};

use crate::{
    context::{Context, axis_of, look_of, policy, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK7_RIGHT: Figure = Figure {
    name: "clockwork7right",
    title: "Clockwork, Figure 7, right: tight objectives beside clients without any",
    shows: "Six V100s. Six copies of ResNet50 are asked 200 times a second each (Poisson) with an objective, from 2.9 \
            ms on, each half as long again. Beside them M copies have C clients each without an objective, which ask \
            again when they are answered: none, 12 x 16, or 48 x 4. Above: the part with an objective that is \
            answered in time. Below: what the others get. The paper's satisfaction reaches 100 % from 11.4 executions \
            (33 ms) on.",
    remarks: &[
        "Networks cost nothing here, and all copies fit each GPU's memory; what the paper says in words is compared, \
         as its curves are only drawn.",
        "`clockwork` gives requests without an objective a deadline a day off, so a request may find all six GPUs in \
         batches of sixteen, 15.67 ms long, and wait for one: beside 12 x 16 clients it serves all from 33 ms on, \
         which are the paper's 11.4 executions, and rejects what is tighter, which lets the others through, as the \
         paper says.",
        "`downbeat` lets a batch without an objective start only if it ends before the next one that is foreseen to \
         need its GPU: beside the others it loses 0.2 % at 4.35 ms, and nothing else that it does not lose alone. The \
         others get nothing below 6.5 ms, and more than under `clockwork` from 33 ms on.",
        "`eager` leaves no requests waiting whose GPUs could be needed, so the others get more of tight objectives \
         than under `downbeat`, which holds batches back, and less of loose ones.",
    ],
    draw,
};

const NAMES: [&str; 3] = ["downbeat", "eager", "clockwork"];
/// Models and clients of each.
const BESIDE: [(usize, usize); 3] = [(0, 0), (12, 16), (48, 4)];
const MODELS: usize = 6;
const RATE_RPS: f64 = 1_200.0;
/// What six GPUs serve at once at most, about: simulations cost that much.
const CAPACITY_RPS: f64 = 6_000.0;
const STEPS: i32 = 12;
const LATENCIES: &str = "latency_ms = [2.61, 3.78, 4.695, 5.61, 6.49, 7.37, 8.25, 9.13, 9.9475, 10.765, 11.5825, \
                         12.4, 13.2175, 14.035, 14.8525, 15.67]";

fn copies((models, clients): (usize, usize), slo_ms: f64) -> Workload {
    let beside = match models {
        0 => String::new(),
        _ => format!(
            "[[model]]\nname = \"batch\"\ncount = {models}\nclients = {clients}\nbackground = true\n{LATENCIES}\n"
        ),
    };
    let text =
        format!("gpus = 6\n[[model]]\nname = \"ResNet50\"\ncount = {MODELS}\n{LATENCIES}\nslo_ms = {slo_ms}\n{beside}");
    workload("clockwork7right", &text)
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let header = [
        "models x clients beside",
        "objective (ms)",
        "policy",
        "in time (%)",
        "p99 (ms)",
        "without objective (r/s)",
        "GPUs busy (%)",
    ];
    let mut table = Table::new(&header);
    let slos_ms: Vec<f64> = (0..STEPS).map(|step| 2.9 * 1.5f64.powi(step)).collect();
    let lines = || BESIDE.iter().flat_map(|&beside| NAMES.map(|name| (beside, name)));
    let jobs: Vec<_> =
        lines().flat_map(|(beside, name)| slos_ms.iter().map(move |&slo_ms| (beside, name, slo_ms))).collect();
    let seconds = context.seconds(jobs.len() as f64 * CAPACITY_RPS);
    table.note("span", format!("{seconds} s simulated"));
    context.bar.inc_length(jobs.len() as u64);
    let reports = context.parallel(&jobs, |&(beside, name, slo_ms)| {
        let options = Options { policy: policy(name), rate_rps: RATE_RPS, seconds, seed: context.seed };
        cluster::run(&copies(beside, slo_ms), &options, &mut |_| (), &mut |_| ())
    })?;
    let mut reports = reports.chunks(slos_ms.len());
    let (mut above, mut below) = (Vec::new(), Vec::new());
    for beside in BESIDE {
        let (mut in_time, mut others) = (Vec::new(), Vec::new());
        for name in NAMES {
            let (mut parts, mut rates) = (Vec::new(), Vec::new());
            for (slo_ms, report) in slos_ms.iter().zip(reports.next().expect("a chunk for each line")) {
                let part = 100.0 * report.totals.on_time_fraction;
                let rate = report.background.as_ref().map_or(0.0, |others| others.served_rps);
                parts.push((slo_ms.log10(), part));
                rates.push((slo_ms.log10(), rate));
                let p99 = report.totals.p99_ms.map_or_else(|| "-".to_owned(), cell);
                let (who, busy) = (format!("{} x {}", beside.0, beside.1), 100.0 * report.gpu_busy_fraction);
                table.push([who, cell(*slo_ms), name.into(), cell(part), p99, cell(rate), cell(busy)]);
            }
            let line = |points| Series { name: name.to_owned(), mark: Mark::Line, look: look_of(name), points };
            in_time.push(line(parts));
            others.push(line(rates));
        }
        let panel = |label: &str, series: Vec<Series>| Panel {
            title: format!("{} models x {} clients beside", beside.0, beside.1),
            x: Axis::new("objective (log10 ms)", (0.4, 2.5)),
            y: axis_of(label, &series),
            series,
            boxes: Vec::new(),
        };
        above.push(panel("in time (%)", in_time));
        if beside.0 > 0 {
            below.push(panel("without objective (r/s)", others));
        }
    }
    above.extend(below);
    Ok((Chart::new(CLOCKWORK7_RIGHT.title, 3, above), table))
}
