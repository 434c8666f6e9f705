//! Lines of the log that others can cause as often as they like: of each kind there is one a second, which says how
//! many there were. No IO.

use std::fmt::Display;

use proto::{Span, Timestamp};

/// Notes are told once in so long.
const TOLD_EVERY: Span = Span::from_millis(1_000);

/// Notes of one kind, told in one line a second at most: whoever causes them must not fill our log.
#[derive(Debug)]
pub struct Notes {
    told_at: Timestamp,
    untold: u64,
    last: String,
}

impl Default for Notes {
    fn default() -> Self {
        Self { told_at: Timestamp::PAST, untold: 0, last: String::new() }
    }
}

impl Notes {
    /// One more; what it is told as, should it be the last before the line.
    pub fn note(&mut self, text: impl Display) {
        self.untold += 1;
        self.last = text.to_string();
    }

    /// A line that is due: how many there were since the one before, and the last of them.
    pub fn poll_line(&mut self, now: Timestamp) -> Option<(u64, String)> {
        if self.poll_timeout().is_none_or(|due| now < due) {
            return None;
        }
        self.told_at = now;
        Some((std::mem::take(&mut self.untold), std::mem::take(&mut self.last)))
    }

    /// When [`Self::poll_line`] has one.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        (self.untold > 0).then(|| self.told_at + TOLD_EVERY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_micros(us)
    }

    #[test]
    fn notes_are_one_line_a_second() {
        let mut notes = Notes::default();
        let mut lines = Vec::new();
        for ms in 0..5_000 {
            notes.note(ms);
            lines.extend(notes.poll_line(at(ms * 1_000)));
        }
        let told: Vec<_> = lines.iter().map(|(count, last)| (*count, last.as_str())).collect();
        assert_eq!(told, [(1, "0"), (1000, "1000"), (1000, "2000"), (1000, "3000"), (1000, "4000")]);
        assert_eq!(notes.poll_line(at(5_900_000).min(at(4_999_000))), None);
        assert_eq!(notes.poll_timeout(), Some(at(5_000_000)), "the rest is told too");
        assert_eq!(notes.poll_line(at(5_000_000)).unwrap().0, 999);
        assert_eq!(notes.poll_timeout(), None);
    }
}
