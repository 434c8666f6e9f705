//! Orloj's Figures 13 and 14: its parameter b, and times that are scaled down.

use std::collections::BTreeMap;

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{Context, Run, policy},
    figure::{Figure, FigureError},
    orloj::{Case, Points, REMARKS, SETTINGS, SLOS_X_P99, Setting},
    table::{Table, cell},
};

pub(crate) const ORLOJ13: Figure = Figure {
    name: "orloj13",
    title: "Orloj, Figures 13 and 14: the parameter b, and times that are scaled down",
    shows: "Requests answered in time, of all, by `orloj` (solid) and, of scaled times, by `downbeat` (dashed): the \
            three-modal case of Figure 8, by b for a millisecond (as a power of ten), and by the 99th percentile of \
            what a request takes alone.",
    remarks: &[
        REMARKS[0],
        "As in the paper the result hardly depends on b: by at most 0.03, and by 0.01 from 1e-3 down. It did depend on \
         it as long as the score took a bin's probability where equation 2 has a density.",
        "The paper's Orloj degrades where the 99th percentile falls to about 20 ms, as its decisions take up to a \
         millisecond. Here a decision costs nothing, so nothing but the policy is seen.",
    ],
    draw,
};

/// Powers of ten.
const RATES: std::ops::RangeInclusive<i32> = -6..=-1;
/// 99th percentiles of what a request takes alone.
const SCALED_P99_MS: [f64; 6] = [5.0, 10.0, 20.0, 40.0, 80.0, 160.0];

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["setting", "SLO (x p99)", "policy", "p99 (ms)", "finish rate"]);
    let (mut runs, mut keys) = (Vec::new(), Vec::new());
    for (index, setting) in SETTINGS.iter().enumerate() {
        let (case, p99_ms) = three_modal(1.0);
        for slo in SLOS_X_P99 {
            for exponent in RATES {
                let name = format!("orloj:1e{exponent}");
                keys.push((index, slo, name.clone(), p99_ms, f64::from(exponent)));
                runs.push(run(setting, &case, slo, &name));
            }
        }
        for scaled_ms in SCALED_P99_MS {
            let (case, _) = three_modal(scaled_ms / p99_ms);
            for slo in SLOS_X_P99 {
                for name in ["orloj", "downbeat"] {
                    keys.push((index, slo, name.to_owned(), scaled_ms, scaled_ms.log2()));
                    runs.push(run(setting, &case, slo, name));
                }
            }
        }
    }
    let reports = context.runs(&runs, &mut table)?;
    let mut lines: BTreeMap<(usize, bool, bool, usize), Points> = BTreeMap::new();
    for ((setting, slo, name, p99_ms, x), report) in keys.into_iter().zip(&reports) {
        let rate = report.totals.on_time_fraction;
        let place = SLOS_X_P99.iter().position(|&other| other == slo).expect("it is one of them");
        let key = (setting, !name.contains(':'), name == "downbeat", place);
        lines.entry(key).or_default().push((x, rate));
        let rate = cell((rate * 1000.0).round() / 1000.0);
        table.push([SETTINGS[setting].name.into(), cell(slo), name, cell((p99_ms * 10.0).round() / 10.0), rate]);
    }
    let mut panels = Vec::new();
    for (index, setting) in SETTINGS.iter().enumerate() {
        for is_scaled in [false, true] {
            let of_panel = lines.iter().filter(|((of, scaled, ..), _)| (*of, *scaled) == (index, is_scaled));
            let series = of_panel.map(|(&(_, _, is_downbeat, place), points)| Series {
                name: format!("{} x p99{}", SLOS_X_P99[place], if is_downbeat { ", downbeat" } else { "" }),
                mark: if is_downbeat { Mark::Dashed } else { Mark::Line },
                look: place,
                points: points.clone(),
            });
            let (what, x) = if is_scaled {
                ("scaled", Axis::new("p99 alone (log2 of ms)", (2.0, 7.5)))
            } else {
                ("b", Axis::new("log10 of b", (-6.0, -1.0)))
            };
            let title = format!("{what}, {}", setting.name);
            let y = Axis::new("finish rate", (0.0, 1.0));
            panels.push(Panel { title, x, y, series: series.collect(), boxes: Vec::new() });
        }
    }
    Ok((Chart::new(ORLOJ13.title, 2, panels), table))
}

fn run(setting: &Setting, case: &Case, slo: f64, name: &str) -> Run {
    let rate_rps = setting.load * case.workload(setting, SLOS_X_P99[4]).capacity_rps();
    Run { workload: case.workload(setting, slo), policy: policy(name), rate_rps }
}

/// The three-modal case with all times so many times as long, and the 99th percentile alone, in milliseconds.
fn three_modal(factor: f64) -> (Case, f64) {
    let modes = [20.0, 60.0, 100.0].map(|mean: f64| (factor * mean, factor * 4.0, 1.0));
    let case = Case::normal("three-modal", &modes);
    let p99_ms = case.workload(&SETTINGS[0], 1.0).models[0].classes[0].slo.as_millis_f64();
    (case, p99_ms)
}
