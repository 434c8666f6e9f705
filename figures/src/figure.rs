//! A figure: what it is called, and how its rows and its picture are saved.

use std::{fs, io};

use chart::Chart;
use cli::CommandError;
use sim::checker::Violation;
use thiserror::Error;

use crate::{context::Context, table::Table};

/// A figure's definition.
pub(crate) struct Figure {
    /// On the command line, and of its files.
    pub(crate) name: &'static str,
    /// With its number in the paper.
    pub(crate) title: &'static str,
    /// What is drawn: one paragraph.
    pub(crate) shows: &'static str,
    /// Where it differs from the paper, and why.
    pub(crate) remarks: &'static [&'static str],
    /// Makes it.
    pub(crate) draw: fn(&Context) -> Result<(Chart, Table), FigureError>,
}

/// Why figures were not made.
#[derive(Debug, Error)]
pub enum FigureError {
    /// A flag's value.
    #[error(transparent)]
    Flag(#[from] CommandError),
    /// A file.
    #[error("--{flag}: cannot write {path}: {source}")]
    Write {
        /// Names the file or its directory.
        flag: &'static str,
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A bug of ours.
    #[error("this is a bug in the scheduler, please report it with the command line: {0}")]
    Violation(#[from] Violation),
}

/// Writes a figure's two files.
pub(crate) fn save(figure: &Figure, context: &Context, chart: &Chart, mut table: Table) -> Result<(), FigureError> {
    let command =
        format!("downbeat figures --only {} --budget {} --seed {}", figure.name, context.budget_minutes, context.seed);
    table.notes.insert(0, ("figure".to_owned(), figure.title.to_owned()));
    table.notes.insert(1, ("command".to_owned(), format!("{command} --out DIR")));
    for (extension, text) in [("csv", table.csv()), ("svg", chart.svg())] {
        let path = context.out.join(figure.name).with_extension(extension);
        fs::write(&path, text).map_err(|source| FigureError::Write {
            flag: "out",
            path: path.display().to_string(),
            source,
        })?;
    }
    Ok(())
}
