//! Tables for people: what `demo` and `bench load` print.

use comfy_table::Table;

use crate::tally::{Report, Tally};

/// One row for each model.
#[must_use]
pub fn models(reports: &[Report]) -> Table {
    let header = [
        "model",
        "offered r/s",
        "served r/s",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "batch median",
        "on time",
        "dropped",
        "errors",
        "accuracy",
    ];
    let ms = |ms: Option<f64>| ms.map_or_else(unknown, |ms| format!("{ms:.2}"));
    let row = |report: &Report| {
        [
            report.name.clone(),
            format!("{:.1}", report.offered_rps),
            format!("{:.1}", report.served_rps),
            ms(report.p50_ms),
            ms(report.p99_ms),
            ms(report.p999_ms),
            report.batch_median.map_or_else(unknown, |batch| batch.to_string()),
            format!("{:.2} %", report.on_time_fraction * 100.0),
            report.dropped.to_string(),
            report.errors.to_string(),
            report.accuracy.map_or_else(unknown, |accuracy| format!("{:.2} %", accuracy * 100.0)),
        ]
    };
    cli::table(header, reports.iter().map(row))
}

/// Stands for what nobody told.
fn unknown() -> String {
    "-".to_owned()
}

/// Where a request's time goes: one row for each stage, median and p99 for each model.
#[must_use]
pub fn stages(names: &[String], tallies: &[Tally]) -> Table {
    let header = names.iter().flat_map(|name| [format!("{name} p50 us"), "p99 us".to_owned()]);
    let header: Vec<String> = ["stage".to_owned()].into_iter().chain(header).collect();
    let columns: Vec<Vec<_>> = tallies.iter().map(|tally| tally.stages.rows().collect()).collect();
    let row = |row: usize| {
        let figures = columns.iter().flat_map(move |column| [column[row].1, column[row].2]);
        [columns[0][row].0.to_owned()].into_iter().chain(figures.map(|us| format!("{us:.0}")))
    };
    cli::table(header, (0..columns.first().map_or(0, Vec::len)).map(row))
}
