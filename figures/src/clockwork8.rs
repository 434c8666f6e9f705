//! Clockwork's Figure 8 (its section 6.4): 4,026 models on six GPUs, asked for by 17,000 functions.

use chart::{Axis, Chart, Mark, Panel, Series};
use sim::{Workload, clairvoyant};

use crate::{
    context::{Context, Run, look_of, policy, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK8: Figure = Figure {
    name: "clockwork8",
    title: "Clockwork, Figure 8: 4,026 models on six GPUs",
    shows: "66 copies of 61 models on six V100s that hold about a third of them, objectives of 100 ms, and a \
            synthetic trace of 17,000 functions. Left: functions ask for models at random; right: those that are \
            invoked most ask for the cheapest. Dashed: the rate at which a clairvoyant would answer all but 1 % in \
            time. The paper's trace asks for 4,860 requests a second, and Clockwork answers 4,860.5 of 4,860.6 in \
            time.",
    remarks: &[
        "The paper's trace is not published with it, and does not say which models its busy functions ask for, which \
         decides how many GPUs it needs: a request for the dearest model takes 25 times as long as one for the \
         cheapest. Ours has the published statistics of Azure Functions (sim/src/functions.rs); the paper's own \
         result lies between the two panels.",
        "The bound is that of the GPUs' time, with batches as large as the rates of the models allow, the dearest 1 \
         % given up; the table's note says what links would need with Belady's rule over one common memory.",
        "Runs take as long as the note says instead of the paper's eight hours, and begin with empty memory; the first \
         tenth is not counted. Executions and loads take what is planned, to the nanosecond; Figure 9's vary by 2 %.",
    ],
    draw,
};

const NAMES: [&str; 3] = ["downbeat", "eager", "clockwork"];
const ASSIGNMENTS: [(&str, [f64; 2]); 2] = [("random", [500.0, 3_000.0]), ("lucky", [2_000.0, 18_000.0])];
const STEPS: usize = 10;
pub(crate) const GPUS: u32 = 6;
pub(crate) const SLO_MS: f64 = 100.0;
const BAD_PART: f64 = 0.01;

/// The models and the trace on so many GPUs.
pub(crate) fn models(assignment: &str, gpus: u32, slo_ms: f64) -> Workload {
    let text = format!(
        "gpus = {gpus}\nseconds = 60\n[memory]\ngpu_mb = 23723\n[functions]\ncount = 17000\nminutes = 60\nseed = 1\n\
         assignment = \"{assignment}\"\n[[model]]\nzoo = \"clockwork-zoo-v100.csv\"\ncount = 66\nslo_ms = {slo_ms}\n"
    );
    workload("clockwork8", &text)
}

/// Executions and loads vary by 2 %, and policies plan with what they have seen.
pub(crate) fn with_jitter(mut workload: Workload) -> Workload {
    (workload.faults.execution_jitter, workload.faults.load_jitter) = (0.02, 0.02);
    workload.reestimate = true;
    workload
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&[
        "assignment",
        "policy",
        "offered (r/s)",
        "in time (%)",
        "cold (%)",
        "loads/s",
        "links busy (%)",
        "GPUs busy (%)",
    ]);
    let rates =
        |[from, to]: [f64; 2]| (0..STEPS).map(move |step| from + (to - from) * step as f64 / (STEPS - 1) as f64);
    let mut runs = Vec::new();
    for (assignment, range) in ASSIGNMENTS {
        let workload = models(assignment, GPUS, SLO_MS);
        for name in NAMES {
            runs.extend(rates(range).map(|rate_rps| Run {
                workload: workload.clone(),
                policy: policy(name),
                rate_rps,
            }));
        }
    }
    let mut ignored = Table::default();
    let reports = context.runs(&runs, &mut ignored)?;
    if let Some(report) = reports.first() {
        table.note("span", format!("{} s simulated", report.seconds));
    }
    let mut reports = reports.chunks(STEPS);
    let mut panels = Vec::new();
    for (assignment, range) in ASSIGNMENTS {
        let mut series = Vec::new();
        for name in NAMES {
            let mut points = Vec::new();
            for report in reports.next().expect("a chunk for each line") {
                let (offered, in_time) = (report.totals.offered_rps, 100.0 * report.totals.on_time_fraction);
                points.push((offered, in_time));
                let memory = report.memory.expect("memory is short");
                table.push([
                    assignment.into(),
                    name.into(),
                    cell(offered),
                    cell(in_time),
                    cell(100.0 * memory.cold_fraction),
                    cell(memory.loads_per_s),
                    cell(100.0 * memory.link_busy_fraction),
                    cell(100.0 * report.gpu_busy_fraction),
                ]);
            }
            series.push(Series { name: name.to_owned(), mark: Mark::Line, look: look_of(name), points });
        }
        let workload = models(assignment, GPUS, SLO_MS);
        let bound_rps = clairvoyant::gpu_bound_rps(&workload, BAD_PART);
        let links = 100.0 * clairvoyant::belady_link_part(&workload, bound_rps, 60.0, context.seed);
        let note = format!(
            "{bound_rps:.0} requests/s at 99 %; Belady's loads would take {links:.1} % of the links' time there"
        );
        table.note(&format!("clairvoyant, {assignment}"), note);
        let points = vec![(bound_rps, 80.0), (bound_rps, 100.0)];
        series.push(Series { name: "clairvoyant".into(), mark: Mark::Dashed, look: chart::GREY, points });
        panels.push(Panel {
            title: format!("{assignment} assignment"),
            x: Axis::new("offered load (r/s)", (0.0, range[1].max(bound_rps) * 1.05)),
            y: Axis::new("in time (%)", (80.0, 100.5)),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(CLOCKWORK8.title, 2, panels), table))
}
