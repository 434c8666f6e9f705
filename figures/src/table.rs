//! A figure's data as CSV. Lines that start with `#` tell what it shows and the command that made it.

use std::{fmt::Write, fs, io, path::Path};

/// Rows of cells under a header. Cells and notes hold no line breaks, cells no commas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Table {
    /// Name and value of each `#` line.
    pub notes: Vec<(String, String)>,
    /// Names of the columns, with their units.
    pub header: Vec<String>,
    /// As many cells each as the header.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Without rows.
    pub(crate) fn new(header: &[&str]) -> Self {
        let header = header.iter().map(|&name| name.to_owned()).collect();
        Self { notes: Vec::new(), header, rows: Vec::new() }
    }

    /// Adds a row.
    pub(crate) fn push<const COLUMNS: usize>(&mut self, cells: [String; COLUMNS]) {
        assert_eq!(COLUMNS, self.header.len(), "a row has a cell for each column");
        self.rows.push(cells.into());
    }

    /// Adds a `#` line.
    pub(crate) fn note(&mut self, name: &str, value: impl Into<String>) {
        self.notes.push((name.to_owned(), value.into()));
    }

    /// The value of the first note of this name.
    pub(crate) fn noted(&self, name: &str) -> Option<&str> {
        self.notes.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// As CSV.
    pub(crate) fn csv(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.notes {
            let _ = writeln!(text, "# {name}: {value}");
        }
        for row in [&self.header].into_iter().chain(&self.rows) {
            debug_assert!(!row.iter().any(|cell| cell.contains([',', '\n'])), "{row:?}");
            let _ = writeln!(text, "{}", row.join(","));
        }
        text
    }

    /// Reads what [`Table::csv`] wrote.
    ///
    /// # Errors
    /// If the file cannot be read, or has no header, or a row with another number of cells.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(path)?;
        let mut table = Self::default();
        for line in text.lines() {
            let cells = || line.split(',').map(str::to_owned).collect::<Vec<_>>();
            match line.strip_prefix("# ").and_then(|note| note.split_once(": ")) {
                Some((name, value)) => table.note(name, value),
                None if table.header.is_empty() => table.header = cells(),
                None if cells().len() == table.header.len() => table.rows.push(cells()),
                None => return Err(bad_data(path, line)),
            }
        }
        if table.header.is_empty() { Err(bad_data(path, "")) } else { Ok(table) }
    }

    /// As a table of Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("| {} |\n|{}\n", self.header.join(" | "), " --- |".repeat(self.header.len()));
        for row in &self.rows {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        text
    }
}

fn bad_data(path: &Path, line: &str) -> io::Error {
    let message = format!("{}: expected a header and rows of as many cells, found `{line}`", path.display());
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// A number with four digits that matter.
pub(crate) fn cell(value: f64) -> String {
    let digits = match value.abs() {
        1000.0.. | 0.0 => 0,
        100.0.. => 1,
        10.0.. => 2,
        1.0.. => 3,
        _ => 4,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut table = Table::new(&["policy", "goodput (r/s)"]);
        table.note("seed", "1");
        table.note("finding", "a: b, c");
        table.push(["eager".to_owned(), cell(4790.4)]);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), table.csv()).unwrap();
        assert_eq!(Table::read(file.path()).unwrap(), table);
        assert_eq!(table.noted("finding"), Some("a: b, c"));
        assert_eq!(table.markdown(), "| policy | goodput (r/s) |\n| --- | --- |\n| eager | 4790 |\n");
        for bad in ["", "a,b\n1\n"] {
            fs::write(file.path(), bad).unwrap();
            assert_eq!(Table::read(file.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
