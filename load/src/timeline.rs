//! Latencies over time: a histogram for each interval, kept as what was recorded in it.

use std::time::Duration;

use hdrhistogram::Histogram;

/// The shortest interval, and how many of them a run has at most.
const INTERVAL_MIN: Duration = Duration::from_secs(1);
const INTERVALS_MAX: u32 = 600;

/// Latencies of one interval.
#[derive(Debug, Clone, PartialEq)]
pub struct Interval {
    /// Since the start of the run.
    pub start: Duration,
    /// Latencies in nanoseconds and how often each was found, ascending.
    pub latencies_ns: Vec<(u64, u64)>,
}

/// The intervals of a run. Answers are recorded in the order in which they come.
#[derive(Debug, Clone)]
pub struct Timeline {
    length: Duration,
    intervals: Vec<Interval>,
    /// The interval under way, by its number.
    current: u32,
    latencies_ns: Histogram<u64>,
}

impl Timeline {
    /// For a run that sends for `span`; `empty` is the histogram that latencies are kept in.
    pub(crate) fn new(span: Duration, empty: Histogram<u64>) -> Self {
        let length = INTERVAL_MIN.max(span / INTERVALS_MAX);
        Self { length, intervals: Vec::new(), current: 0, latencies_ns: empty }
    }

    /// Length of each interval.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Those in which there was an answer, in order.
    #[must_use]
    pub fn intervals(&self) -> &[Interval] {
        &self.intervals
    }

    /// An answer came `at` after the start of the run.
    pub(crate) fn record(&mut self, at: Duration, latency_ns: u64) {
        let number = (at.as_nanos() / self.length.as_nanos()) as u32;
        if number > self.current {
            self.close();
            self.current = number;
        }
        self.latencies_ns.saturating_record(latency_ns);
    }

    /// Ends the interval under way.
    pub(crate) fn close(&mut self) {
        if !self.latencies_ns.is_empty() {
            let latencies = self.latencies_ns.iter_recorded();
            let latencies_ns = latencies.map(|value| (value.value_iterated_to(), value.count_at_value())).collect();
            self.intervals.push(Interval { start: self.length * self.current, latencies_ns });
            self.latencies_ns.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_in_the_interval_in_which_they_came() {
        let mut timeline = Timeline::new(Duration::from_secs(1200), Histogram::new(3).unwrap());
        assert_eq!(timeline.length(), Duration::from_secs(2));
        for (at_ms, latency_ns) in [(0, 5), (1999, 5), (2000, 7), (9000, 9)] {
            timeline.record(Duration::from_millis(at_ms), latency_ns);
        }
        timeline.close();
        timeline.close();
        let interval =
            |start, latency: (u64, u64)| Interval { start: Duration::from_secs(start), latencies_ns: vec![latency] };
        assert_eq!(timeline.intervals(), [interval(0, (5, 2)), interval(2, (7, 1)), interval(8, (9, 1))]);
    }
}
