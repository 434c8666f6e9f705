//! The Trace Event Format, which ui.perfetto.dev and chrome://tracing open: groups of rows, with slices and instants on
//! them. Times are microseconds.

use std::io::{self, Write};

use proto::Timestamp;
use serde_json::{Value, json};

/// A row, by the numbers of its group and of itself: viewers show groups, and the rows of one, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// The group, which viewers call a process.
    pub group: usize,
    /// The row, which they call a thread.
    pub row: usize,
}

/// Writes a trace, one event after another.
pub struct Writer<W> {
    to: W,
    separator: &'static str,
}

impl<W: Write> Writer<W> {
    /// A trace without events yet.
    ///
    /// # Errors
    /// As of `to`; the same holds for all others here.
    pub fn begin(mut to: W) -> io::Result<Self> {
        write!(to, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        Ok(Self { to, separator: "" })
    }

    /// What a group is called.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn name_group(&mut self, group: usize, name: &str) -> io::Result<()> {
        self.event(&json!({"ph": "M", "name": "process_name", "pid": group, "args": {"name": name}}))
    }

    /// What a row is called.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn name_row(&mut self, Row { group, row }: Row, name: &str) -> io::Result<()> {
        self.event(&json!({"ph": "M", "name": "thread_name", "pid": group, "tid": row, "args": {"name": name}}))
    }

    /// Something that lasted. Slices of one row must not overlap.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn slice(&mut self, at: Row, name: &str, (from, to): (Timestamp, Timestamp), args: Value) -> io::Result<()> {
        self.event(&json!({
            "ph": "X",
            "name": name,
            "pid": at.group,
            "tid": at.row,
            "ts": micros(from),
            "dur": (to - from).as_micros_f64(),
            "args": args,
        }))
    }

    /// Something that happened.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn instant(&mut self, of: Row, name: &str, at: Timestamp, args: Value) -> io::Result<()> {
        self.event(&json!({
            "ph": "i",
            "s": "t",
            "name": name,
            "pid": of.group,
            "tid": of.row,
            "ts": micros(at),
            "args": args,
        }))
    }

    /// The trace is whole. Yields what it was written to.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn end(mut self) -> io::Result<W> {
        writeln!(self.to, "\n]}}")?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn event(&mut self, event: &Value) -> io::Result<()> {
        write!(self.to, "{}\n{event}", std::mem::replace(&mut self.separator, ","))
    }
}

/// As this format has instants.
#[must_use]
pub fn micros(at: Timestamp) -> f64 {
    at.as_nanos() as f64 / 1e3
}
