//! Clockwork's Figure 9 (its section 6.5): how far actions were off what was predicted of them.

use chart::{Axis, Chart, Mark, Panel, Series};
use scheduler::predictions::{Action, Histogram, Signed};
use sim::Report;

use crate::{
    clockwork8::{GPUS, SLO_MS, models, with_jitter},
    context::{Context, Run, look_of, policy},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK9: Figure = Figure {
    name: "clockwork9",
    title: "Clockwork, Figure 9: how far actions are off their predictions",
    shows: "Figure 8's models and trace at 1,500 requests a second. Executions and loads vary by 2 % (standard \
            deviation, normal), and policies plan with what they have seen. What was faster or earlier than predicted \
            is over-predicted, what was slower or later under-predicted. Nines are digits of the quantile: 2 is the \
            99th percentile of the errors of that side, 4 the 99.99th. Marks: the paper's 99th percentiles.",
    remarks: &[
        "How much durations vary is chosen, not measured: the upper panels say what follows from that. It is more than \
         the paper's GPUs and links vary: under `downbeat`, which plans with what most actions take, executions are \
         415 us off at the 99th percentile and loads 895 us, where the paper has 250, 338 and 240 us.",
        "The lower panels say how errors of actions that wait for each other add up: fourfold in the paper, by a \
         quarter here, where plans are sent a few milliseconds ahead, and their ends are reported at once.",
        "Clockwork's estimate is the longest of the last ten durations of a model, a batch size and a GPU. So \
         `clockwork` mostly over-predicts, and errs twice as far on that side. The paper says that it under-predicts \
         more.",
        "The paper's one-off errors of more than 20 ms, which machines cause, do not happen here.",
    ],
    draw,
};

const NAMES: [&str; 2] = ["downbeat", "clockwork"];
const RATE_RPS: f64 = 1_500.0;
const NINES_MAX: f64 = 4.0;

/// A panel: what of which action, and the paper's 99th percentiles in microseconds, over and under.
struct Quantity {
    name: &'static str,
    action: Action,
    of: fn(&Report, Action) -> &Signed,
    paper_us: [Option<f64>; 2],
}

const QUANTITIES: [Quantity; 4] = [
    Quantity { name: "INFER: duration", action: Action::Infer, of: duration, paper_us: [Some(250.0), Some(250.0)] },
    Quantity { name: "LOAD: duration", action: Action::Load, of: duration, paper_us: [Some(338.0), Some(240.0)] },
    Quantity {
        name: "INFER: completion",
        action: Action::Infer,
        of: completion,
        paper_us: [Some(1_000.0), Some(1_000.0)],
    },
    Quantity { name: "LOAD: completion", action: Action::Load, of: completion, paper_us: [None, None] },
];

fn duration(report: &Report, action: Action) -> &Signed {
    &report.predictions.of(action).duration
}

fn completion(report: &Report, action: Action) -> &Signed {
    &report.predictions.of(action).completion
}

fn sides(signed: &Signed) -> [(&'static str, &Histogram); 2] {
    [("over", &signed.over), ("under", &signed.under)]
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let header = [
        "quantity",
        "policy",
        "side",
        "part (%)",
        "p50 (us)",
        "p99 (us)",
        "p99.9 (us)",
        "p99.99 (us)",
        "paper p99 (us)",
    ];
    let mut table = Table::new(&header);
    let workload = with_jitter(models("random", GPUS, SLO_MS));
    let runs = NAMES.map(|name| Run { workload: workload.clone(), policy: policy(name), rate_rps: RATE_RPS });
    let mut ignored = Table::default();
    let reports = context.runs(&runs, &mut ignored)?;
    if let Some(report) = reports.first() {
        table.note("span", format!("{} s simulated", report.seconds));
    }
    let mut panels = Vec::new();
    for Quantity { name, action, of, paper_us } in QUANTITIES {
        let mut series = Vec::new();
        for (policy, report) in NAMES.iter().zip(&reports) {
            for ((side, errors), paper_us) in sides(of(report, action)).into_iter().zip(paper_us) {
                let at = |part: f64| errors.quantile(part).as_micros_f64();
                let points = (0..=80).map(|step| f64::from(step) / 80.0 * NINES_MAX);
                let points = points.map(|nines| (nines, at(1.0 - 10f64.powf(-nines)))).collect();
                let mark = if side == "over" { Mark::Curve } else { Mark::Dashed };
                series.push(Series { name: format!("{policy}: {side}"), mark, look: look_of(policy), points });
                let actions = report.predictions.of(action).actions.max(1);
                let part = 100.0 * errors.count() as f64 / actions as f64;
                let [p50, p99, p999, p9999] = [0.5, 0.99, 0.999, 0.9999].map(|part| cell(at(part)));
                let paper = paper_us.map_or_else(String::new, cell);
                let (name, policy) = (name.to_owned(), (*policy).to_owned());
                table.push([name, policy, side.to_owned(), cell(part), p50, p99, p999, p9999, paper]);
            }
        }
        let points: Vec<_> = paper_us.into_iter().flatten().map(|us| (2.0, us)).collect();
        let mark = Mark::Points;
        series.extend((!points.is_empty()).then(|| Series { name: "paper".into(), mark, look: chart::GREY, points }));
        let largest = series.iter().flat_map(|series| series.points.iter().map(|point| point.1));
        panels.push(Panel {
            title: name.to_owned(),
            x: Axis::new("nines of the quantile", (0.0, NINES_MAX)),
            y: Axis::up_to("error (us)", largest),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(CLOCKWORK9.title, 2, panels), table))
}
