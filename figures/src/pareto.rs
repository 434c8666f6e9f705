//! What a median costs in GPUs: every policy at four loads, and `downbeat` at every price.

use chart::{Axis, Chart, Mark, Panel, Series};
use sim::Report;

use crate::{
    context::{Context, POLICIES, Run, look_of, policy},
    figure::{Figure, FigureError},
    table::{Table, cell},
    table2::MODELS,
};

pub(crate) const PARETO: Figure = Figure {
    name: "pareto",
    title: "What a median costs in GPUs",
    shows: "ResNet50 (1.053, 5.072) with an SLO of 25 ms on eight GPUs, at parts of 5,500 requests a second, which is \
            what `downbeat` serves: the median of all requests, where one that was dropped counts as infinite, over \
            the GPUs that ran a batch in a second. The line is `downbeat` from a price of 0 on the right to an \
            infinite one on the left; what lies below it and to its left would be better.",
    remarks: &[
        "What others reach at one point a price chooses. With one load nobody needs a price; with a load that changes \
         over the day one price keeps to its GPUs at night and to its latency at noon.",
    ],
    draw,
};

const PEAK_RPS: f64 = 5_500.0;
const LOADS: [f64; 4] = [0.1, 0.25, 0.5, 0.75];
const PRICES: [&str; 9] = ["0", "0.5", "1", "2", "4", "8", "12", "50", "inf"];
/// Beside those of all figures.
const OTHERS: [&str; 5] = ["symphony", "symphony:eager", "timeout:10", "timeout:20%", "timeout:40%"];
/// Two points that differ by less are taken for equal.
const TOLERANCE: f64 = 0.02;

/// GPUs used, and the median in milliseconds.
type Point = (f64, f64);

fn point(report: &Report) -> Point {
    // Half of all must be answered for the median to be one of these.
    let p50_ms = report.totals.p50_ms.filter(|_| report.totals.bad_rate() < 0.01);
    (report.gpus_used_mean, p50_ms.unwrap_or(f64::INFINITY))
}

fn is_better(one: Point, other: Point) -> bool {
    let is_less = |one: f64, other: f64| one <= (1.0 - TOLERANCE) * other;
    is_less(one.0, other.0) && is_less(one.1, other.1)
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&[
        "load (%)",
        "policy",
        "GPUs used",
        "p50 (ms)",
        "p99 (ms)",
        "p99.99 (ms)",
        "GPUs busy (%)",
        "late or dropped (%)",
    ]);
    let priced = PRICES.map(|price| format!("downbeat:gpu_price={price}"));
    let others = POLICIES.iter().filter(|&&name| name != "downbeat").chain(&OTHERS).map(|&name| name.to_owned());
    let names: Vec<String> = priced.into_iter().chain(others).collect();
    let runs: Vec<Run> = LOADS
        .iter()
        .flat_map(|load| names.iter().map(move |name| (load * PEAK_RPS, name)))
        .map(|(rate_rps, name)| Run { workload: MODELS[0].workload(), policy: policy(name), rate_rps })
        .collect();
    let reports = context.runs(&runs, &mut table)?;
    let (mut panels, mut ahead) = (Vec::new(), Vec::new());
    for (load, reports) in LOADS.iter().zip(reports.chunks(names.len())) {
        for (name, report) in names.iter().zip(reports) {
            let totals = &report.totals;
            let latency = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), cell);
            table.push([
                cell(100.0 * load),
                name.clone(),
                cell(report.gpus_used_mean),
                latency(totals.p50_ms),
                latency(totals.p99_ms),
                latency(totals.p9999_ms),
                cell(100.0 * report.gpu_busy_fraction),
                cell(100.0 * totals.bad_rate()),
            ]);
        }
        let points: Vec<Point> = reports.iter().map(point).collect();
        let (ours, theirs) = points.split_at(PRICES.len());
        let ours = || ours.iter().zip(PRICES);
        for (name, &other) in names[PRICES.len()..].iter().zip(theirs) {
            let beaten: Vec<&str> = ours().filter(|(our, _)| is_better(other, **our)).map(|(_, price)| price).collect();
            if !beaten.is_empty() {
                ahead.push(format!("`{name}` of price {} at {:.0} %", beaten.join("; "), 100.0 * load));
            }
        }
        panels.push(panel(*load, &names, &points));
    }
    let finding = match &ahead[..] {
        [] => "No other policy has both the median and the GPUs used 2 % below those of any price.".to_owned(),
        ahead => format!("Both the median and the GPUs used are 2 % better under {}.", ahead.join(", ")),
    };
    table.note("finding", finding);
    Ok((Chart::new(PARETO.title, 2, panels), table))
}

fn panel(load: f64, names: &[String], points: &[Point]) -> Panel {
    let line = points[..PRICES.len()].to_vec();
    let mut series =
        vec![Series { name: "downbeat by price".into(), mark: Mark::Line, look: look_of("downbeat"), points: line }];
    for (name, &point) in names.iter().zip(points).skip(PRICES.len()).filter(|(_, point)| point.1.is_finite()) {
        let look = match name.as_str() {
            "symphony" | "symphony:eager" => 6,
            other => look_of(other),
        };
        series.push(Series { name: name.clone(), mark: Mark::Points, look, points: vec![point] });
    }
    let title = format!("{:.0} % of {PEAK_RPS} requests/s", 100.0 * load);
    let (x, y) = (Axis::new("GPUs used in a second", (0.0, 8.4)), Axis::new("median latency (ms)", (0.0, 26.0)));
    Panel { title, x, y, series, boxes: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_better_only_in_both_and_by_more_than_chance() {
        assert!(is_better((3.9, 6.0), (4.0, 6.2)));
        assert!(!is_better((3.0, 6.2), (4.0, 6.2)) && !is_better((3.99, 6.0), (4.0, 6.2)));
    }
}
