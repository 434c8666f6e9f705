//! What a program writes to its stdout and stderr becomes lines of the backend's log: so many a second and so long at
//! most, however much it writes.

use std::collections::VecDeque;

use proto::{Span, Timestamp};

/// Lines at once, and each second.
const LINES_BURST: u32 = 200;
const LINES_PER_SECOND: u32 = 20;
/// Bytes that are read at once, and each second. A program that writes more waits.
const BYTES_BURST: u32 = 1 << 18;
const BYTES_PER_SECOND: u32 = 1 << 20;
/// The longest line; what is left of it is passed over.
const LINE_BYTES_MAX: usize = 1_024;

/// The output of one program.
#[derive(Debug)]
pub(super) struct Output {
    bytes: Bucket,
    lines: Bucket,
    line: Vec<u8>,
    passed_over: u64,
    ready: VecDeque<String>,
    /// The last line that says something.
    last: String,
}

/// What flows out as it flows in, and a burst.
#[derive(Debug)]
struct Bucket {
    level: f64,
    burst: u32,
    per_second: u32,
    at: Timestamp,
}

impl Bucket {
    fn new(burst: u32, per_second: u32) -> Self {
        Self { level: f64::from(burst), burst, per_second, at: Timestamp::PAST }
    }

    fn level(&mut self, now: Timestamp) -> f64 {
        if self.at < now {
            let since = if self.at == Timestamp::PAST { Span::ZERO } else { now - self.at };
            self.level += since.0 as f64 / 1e9 * f64::from(self.per_second);
            self.level = self.level.min(f64::from(self.burst));
            self.at = now;
        }
        self.level
    }

    fn take(&mut self, now: Timestamp) -> bool {
        let is_left = self.level(now) >= 1.0;
        self.level -= f64::from(u8::from(is_left));
        is_left
    }
}

impl Default for Output {
    fn default() -> Self {
        let bytes = Bucket::new(BYTES_BURST, BYTES_PER_SECOND);
        let lines = Bucket::new(LINES_BURST, LINES_PER_SECOND);
        let (line, ready, last) = (Vec::new(), VecDeque::new(), String::new());
        Self { bytes, lines, line, passed_over: 0, ready, last }
    }
}

impl Output {
    /// Bytes that may be read now. If none, ask again in a tenth of a second.
    pub(super) fn wants_bytes(&mut self, now: Timestamp) -> usize {
        self.bytes.level(now).max(0.0) as usize
    }

    /// What it has written.
    pub(super) fn handle_bytes(&mut self, now: Timestamp, bytes: &[u8]) {
        self.bytes.level -= bytes.len() as f64;
        for &byte in bytes {
            match byte {
                b'\n' => self.end_line(now),
                _ if self.line.len() <= LINE_BYTES_MAX => self.line.push(byte),
                _ => {}
            }
        }
    }

    /// It has ended, whatever it was about to say.
    pub(super) fn handle_end(&mut self, now: Timestamp) {
        if !self.line.is_empty() {
            self.end_line(now);
        }
        self.tell_passed_over();
    }

    /// The next line for the log.
    pub(super) fn poll_line(&mut self) -> Option<String> {
        self.ready.pop_front()
    }

    /// The last line that it wrote.
    pub(super) fn last(&self) -> &str {
        &self.last
    }

    fn end_line(&mut self, now: Timestamp) {
        let is_cut = self.line.len() > LINE_BYTES_MAX;
        self.line.truncate(LINE_BYTES_MAX);
        let mut text = printable(&String::from_utf8_lossy(&self.line));
        self.line.clear();
        if is_cut {
            text.push_str(" ...");
        }
        if !text.trim().is_empty() {
            self.last.clone_from(&text);
        }
        if !self.lines.take(now) {
            self.passed_over += 1;
            return;
        }
        self.tell_passed_over();
        self.ready.push_back(text);
    }

    fn tell_passed_over(&mut self) {
        if self.passed_over > 0 {
            let count = std::mem::take(&mut self.passed_over);
            self.ready.push_back(format!("({count} lines are not shown: more than {LINES_PER_SECOND} a second)"));
        }
    }
}

/// Without what would do something to a terminal.
pub(in crate::executor) fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for letter in text.trim_end_matches('\r').chars() {
        match letter {
            '\t' => printable.push(' '),
            _ if letter.is_control() => printable.extend(letter.escape_default()),
            _ => printable.push(letter),
        }
    }
    printable
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(output: &mut Output) -> Vec<String> {
        std::iter::from_fn(|| output.poll_line()).collect()
    }

    #[test]
    fn lines_are_put_together_and_made_harmless() {
        let mut output = Output::default();
        output.handle_bytes(Timestamp(0), b"load");
        output.handle_bytes(Timestamp(0), b"ed\r\n\n\x1b[2Jhello \xff\nand");
        assert_eq!(lines(&mut output), ["loaded", "", "\\u{1b}[2Jhello \u{fffd}"]);
        output.handle_end(Timestamp(0));
        assert_eq!((lines(&mut output), output.last()), (vec!["and".to_owned()], "and"));
    }

    #[test]
    fn a_flood_is_counted_and_what_comes_later_is_shown() {
        let mut output = Output::default();
        output.handle_bytes(Timestamp(0), &b"x\n".repeat(1_000));
        assert_eq!(lines(&mut output).len(), LINES_BURST as usize);
        let later = Timestamp(0) + Span::from_millis(100);
        output.handle_bytes(later, b"a\nb\nc\n");
        let expected = ["(800 lines are not shown: more than 20 a second)", "a", "b"];
        assert_eq!(lines(&mut output), expected);
        output.handle_end(later);
        assert_eq!(lines(&mut output), ["(1 lines are not shown: more than 20 a second)"]);
    }

    #[test]
    fn a_line_without_an_end_takes_no_memory_and_bytes_have_a_rate() {
        let mut output = Output::default();
        let flood = vec![b'x'; BYTES_BURST as usize];
        assert_eq!(output.wants_bytes(Timestamp(0)), flood.len());
        output.handle_bytes(Timestamp(0), &flood);
        assert!(output.line.capacity() < 4 * LINE_BYTES_MAX);
        assert_eq!(output.wants_bytes(Timestamp(0)), 0);
        assert_eq!(output.wants_bytes(Timestamp(0) + Span::from_millis(125)), BYTES_PER_SECOND as usize / 8);
        output.handle_bytes(Timestamp(0), b"\n");
        let line = lines(&mut output).remove(0);
        assert!(line.len() == LINE_BYTES_MAX + 4 && line.ends_with("x ..."), "{line}");
    }
}
