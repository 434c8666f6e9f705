//! The one look of tables for people.

use comfy_table::{Cell, CellAlignment, Row, Table, presets::UTF8_BORDERS_ONLY};

/// A table with a name in the first column, and numbers to the right of it.
pub fn table<H, R>(header: H, rows: impl IntoIterator<Item = R>) -> Table
where
    H: IntoIterator<Item: Into<Cell>>,
    R: IntoIterator<Item: Into<Cell>>,
{
    let mut table = Table::new();
    table.load_style(UTF8_BORDERS_ONLY).set_header(Row::from(header));
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
