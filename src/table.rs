//! Tables for people: what `demo` and `bench load` print.

use bench::load::{Report, Tally};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};

/// One row for each model.
pub fn models(reports: &[Report]) -> Table {
    let mut table = table([
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
    ]);
    for report in reports {
        table.add_row([
            report.name.clone(),
            format!("{:.1}", report.offered_rps),
            format!("{:.1}", report.served_rps),
            format!("{:.2}", report.p50_ms),
            format!("{:.2}", report.p99_ms),
            format!("{:.2}", report.p999_ms),
            report.batch_median.to_string(),
            format!("{:.2} %", report.on_time_fraction * 100.0),
            report.dropped.to_string(),
            report.errors.to_string(),
            report.accuracy.map_or("-".into(), |accuracy| format!("{:.2} %", accuracy * 100.0)),
        ]);
    }
    align(table)
}

/// Where a request's time goes: one row for each stage, median and p99 for each model.
pub fn stages(names: &[String], tallies: &[Tally]) -> Table {
    let mut table = table(
        ["stage".to_owned()]
            .into_iter()
            .chain(names.iter().flat_map(|name| [format!("{name} p50 us"), "p99 us".to_owned()])),
    );
    let columns: Vec<Vec<_>> = tallies.iter().map(|tally| tally.stages.rows().collect()).collect();
    for row in 0..columns.first().map_or(0, Vec::len) {
        let stage = columns[0][row].0.to_owned();
        let figures = columns.iter().flat_map(|column| [column[row].1, column[row].2]);
        table.add_row([stage].into_iter().chain(figures.map(|us| format!("{us:.0}"))));
    }
    align(table)
}

/// A table with the numbers to the right of a name.
pub fn rows<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> Table {
    let mut table = table(header);
    rows.into_iter().for_each(|row| {
        table.add_row(row);
    });
    align(table)
}

fn table<T: Into<comfy_table::Cell>>(header: impl IntoIterator<Item = T>) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_BORDERS_ONLY).set_header(header.into_iter().map(Into::into).collect::<Vec<_>>());
    table
}

/// Names to the left, numbers to the right.
fn align(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
