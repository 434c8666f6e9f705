//! Clockwork's Figure 7, left (its section 6.3): how tight an objective can be.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{
        AUTHORS, Context, IN_TIME, Run, SYMPHONY, axis_of, legend_of, look_of, note_rivals, policy, transposed,
        workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK7: Figure = Figure {
    name: "clockwork7",
    title: "Clockwork, Figure 7, left: how tight an objective can be",
    shows: "Six V100s, N copies of ResNet50 and R Poisson requests a second in all, for objectives from 2.9 ms on, \
            each half as long again. The part that is answered in time. The paper reports nearly all from 3.4 \
            executions on (10 ms) at its lowest load, from 7.6 (22 ms) and 25.6 (75 ms) at higher ones.",
    remarks: &[
        "Networks cost nothing here; in the paper an objective of 2.9 ms holds an execution of 2.61 ms and what is \
         left for everything else.",
        "All copies fit each GPU's memory, so all are on all GPUs from the start.",
    ],
    draw,
};

const NAMES: [&str; 6] = ["downbeat", AUTHORS, SYMPHONY, "deferred", "eager", "clockwork"];
const COPIES: [usize; 2] = [12, 48];
const RATES: [f64; 3] = [600.0, 1_200.0, 2_400.0];
const STEPS: i32 = 12;

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["models", "rate (r/s)", "objective (ms)", "policy", "in time (%)", "p99 (ms)"]);
    let slos_ms: Vec<f64> = (0..STEPS).map(|step| 2.9 * 1.5f64.powi(step)).collect();
    let copies = |count: usize, slo_ms: f64| {
        let text = format!(
            "gpus = 6\n[[model]]\nname = \"ResNet50\"\ncount = {count}\nlatency_ms = [2.61, 3.78, 4.695, 5.61, 6.49, \
             7.37, 8.25, 9.13, 9.9475, 10.765, 11.5825, 12.4, 13.2175, 14.035, 14.8525, 15.67]\nslo_ms = {slo_ms}\n"
        );
        workload("clockwork7", &text)
    };
    let mut runs = Vec::new();
    for (count, rate_rps) in COPIES.iter().flat_map(|&count| RATES.map(|rate_rps| (count, rate_rps))) {
        for name in NAMES {
            runs.extend(slos_ms.iter().map(|&slo_ms| Run {
                workload: copies(count, slo_ms),
                policy: policy(name),
                rate_rps,
            }));
        }
    }
    let reports = context.runs(&runs, &mut table)?;
    let in_time: Vec<_> = reports.iter().map(|report| report.totals.on_time_fraction).collect();
    let settings = in_time.chunks(NAMES.len() * slos_ms.len()).flat_map(|rates| transposed(rates, slos_ms.len()));
    note_rivals(&mut table, &IN_TIME, &NAMES, &settings.collect::<Vec<_>>());
    let mut reports = reports.chunks(slos_ms.len());
    let mut panels = Vec::new();
    for (count, rate_rps) in COPIES.iter().flat_map(|&count| RATES.map(|rate_rps| (count, rate_rps))) {
        let mut series = Vec::new();
        for name in NAMES {
            let mut points = Vec::new();
            for (slo_ms, report) in slos_ms.iter().zip(reports.next().expect("a chunk for each line")) {
                let in_time = 100.0 * report.totals.on_time_fraction;
                points.push((slo_ms.log10(), in_time));
                let p99 = report.totals.p99_ms.map_or_else(|| "-".to_owned(), cell);
                table.push([cell(count as f64), cell(rate_rps), cell(*slo_ms), name.into(), cell(in_time), p99]);
            }
            series.push(Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points });
        }
        panels.push(Panel {
            title: format!("{count} models, {rate_rps:.0} r/s"),
            x: Axis::new("objective (log10 ms)", (0.4, 2.5)),
            y: axis_of("in time (%)", &series),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(CLOCKWORK7.title, 3, panels), table))
}
