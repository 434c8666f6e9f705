//! What clients can have the log say before anybody knows who they are: one line a second of each kind.

use std::cell::RefCell;

use proto::Timestamp;
use tracing::Level;
use transport::Notes;

/// A kind of line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Line {
    /// A connection cannot be accepted.
    NotAccepted,
    /// A connection cannot be set up.
    NotSetUp,
    /// TLS was not agreed on.
    Handshake,
    /// A reply is not taken in.
    Slow,
    /// A connection ended by an error.
    Ended,
}

/// What has not been told yet, by kind.
#[derive(Debug, Default)]
pub(crate) struct Lines(RefCell<[Notes; 5]>);

impl Lines {
    /// Tells this, or that it has happened once more when the next of its kind is told.
    pub(crate) fn tell(&self, now: Timestamp, line: Line, text: std::fmt::Arguments<'_>) {
        let is_warning = matches!(line, Line::NotAccepted | Line::NotSetUp);
        if !is_warning && !tracing::enabled!(Level::DEBUG) {
            return;
        }
        match self.take(now, line, text) {
            Some((count, last)) if is_warning => tracing::warn!(count, "{last}"),
            Some((count, last)) => tracing::debug!(count, "{last}"),
            None => {}
        }
    }

    fn take(&self, now: Timestamp, line: Line, text: std::fmt::Arguments<'_>) -> Option<(u64, String)> {
        let notes = &mut self.0.borrow_mut()[line as usize];
        notes.note(text);
        notes.poll_line(now)
    }
}

#[cfg(test)]
mod tests {
    use proto::Span;

    use super::*;

    /// A client that connects and breaks off could write as many lines as it liked at the level of debugging.
    #[test]
    fn each_kind_is_told_once_a_second() {
        let (lines, mut told) = (Lines::default(), Vec::new());
        for ms in 0..2_001 {
            let now = Timestamp::ZERO + Span::from_millis(ms);
            for line in [Line::NotAccepted, Line::NotSetUp, Line::Handshake, Line::Slow, Line::Ended] {
                told.extend(lines.take(now, line, format_args!("{line:?} {ms}")).filter(|_| line == Line::Ended));
            }
        }
        assert_eq!(told, [(1, "Ended 0"), (1000, "Ended 1000"), (1000, "Ended 2000")].map(|(n, t)| (n, t.to_owned())));
    }
}
