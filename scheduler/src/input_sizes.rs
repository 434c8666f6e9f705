//! What reading a task's input may take where requests choose its size: as the largest of late takes. The largest that
//! a model allows says little: files of ONNX that name no size allow megabytes, and are asked about kilobytes.

use std::ops::RangeInclusive;

use proto::{Span, Timestamp};

/// What is seen counts for one to two of these.
const WINDOW: Span = Span::from_millis(10_000);

/// What reading one input takes, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadTime {
    /// Whatever its size is.
    pub fixed: Span,
    /// For each megabyte (10^6 bytes) besides.
    pub per_megabyte: Span,
    /// Bytes that an input has.
    pub bytes: RangeInclusive<u32>,
}

impl ReadTime {
    /// Of the smallest input.
    #[must_use]
    pub fn least(&self) -> Span {
        self.of(*self.bytes.start())
    }

    fn of(&self, bytes: u32) -> Span {
        self.fixed + Span(self.per_megabyte.as_nanos() * i64::from(bytes) / 1_000_000)
    }
}

/// The same for the largest input of late.
#[derive(Debug)]
pub struct InputSizes {
    time: ReadTime,
    /// Planned with.
    largest: u32,
    /// The largest since the window began.
    seen: u32,
    ends_at: Timestamp,
}

impl InputSizes {
    /// Nothing has been seen.
    #[must_use]
    pub fn new(time: ReadTime) -> Self {
        let least = *time.bytes.start();
        Self { time, largest: least, seen: least, ends_at: Timestamp::PAST }
    }

    /// Something else is configured or offered; what was seen still counts.
    pub fn set_time(&mut self, time: ReadTime) {
        self.time = time;
        (self.largest, self.seen) = (self.bounded(self.largest), self.bounded(self.seen));
    }

    /// An input of so many bytes is to be read. True if reads are to be planned with another time.
    pub fn handle_input(&mut self, now: Timestamp, bytes: u32) -> bool {
        let before = self.largest;
        if self.ends_at <= now {
            // What came before a whole window without inputs says nothing of now.
            let is_recent = now < self.ends_at + WINDOW;
            self.largest = if is_recent { self.seen } else { *self.time.bytes.start() };
            (self.seen, self.ends_at) = (*self.time.bytes.start(), now + WINDOW);
        }
        // In doublings: each change has all of the model's batches planned anew, and frontends told.
        let rounded = self.bounded(bytes.checked_next_power_of_two().unwrap_or(u32::MAX));
        self.seen = self.seen.max(rounded);
        self.largest = self.largest.max(rounded);
        self.largest != before
    }

    /// What to plan a read with.
    #[must_use]
    pub fn read_time(&self) -> Span {
        self.time.of(self.largest)
    }

    fn bounded(&self, bytes: u32) -> u32 {
        bytes.clamp(*self.time.bytes.start(), *self.time.bytes.end())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: u32 = 1_000_000;

    fn time(bytes: RangeInclusive<u32>) -> ReadTime {
        ReadTime { fixed: Span(20), per_megabyte: Span(1_000), bytes }
    }

    #[test]
    fn inputs_of_one_size_are_planned_with_as_offered() {
        let mut sizes = InputSizes::new(time(3 * MB..=3 * MB));
        assert_eq!(sizes.read_time(), Span(3_020));
        // Nobody who lies changes that.
        for bytes in [0, 1, u32::MAX] {
            assert!(!sizes.handle_input(Timestamp(0), bytes));
        }
        assert_eq!(sizes.read_time(), Span(3_020));
    }

    #[test]
    fn another_offer_bounds_what_was_seen() {
        let mut sizes = InputSizes::new(time(0..=64 * MB));
        assert!(sizes.handle_input(Timestamp(0), 60 * MB));
        sizes.set_time(time(0..=8 * MB));
        assert_eq!(sizes.read_time(), Span(8_020));
    }

    proptest! {
        /// No read is planned with less than it takes, none with twice what any took of the last two windows, and times
        /// change once for each doubling and once for each window.
        #[test]
        fn reads_are_planned_with_what_the_largest_of_late_takes(
            inputs in prop::collection::vec((0..WINDOW.as_nanos() / 4, 0_u32..20 * MB), 1..100),
        ) {
            let (mut sizes, mut now, mut seen) = (InputSizes::new(time(0..=16 * MB)), Timestamp(0), Vec::new());
            let mut changes = 0;
            for (gap, bytes) in inputs {
                now += Span(gap);
                let before = sizes.read_time();
                let changed = sizes.handle_input(now, bytes);
                prop_assert_eq!(changed, sizes.read_time() != before);
                changes += usize::from(changed);
                seen.push((now, bytes.min(16 * MB)));
                let recent = seen.iter().filter(|(at, _)| now - *at <= WINDOW * 2).map(|(_, bytes)| *bytes);
                let largest = recent.max().expect("one has just come");
                let own = sizes.time.of(bytes.min(16 * MB));
                prop_assert!(sizes.read_time() >= own);
                prop_assert!(sizes.read_time() <= sizes.time.of(largest * 2 + 1));
            }
            let windows = ((now - Timestamp(0)).as_nanos() / WINDOW.as_nanos()) as usize + 1;
            prop_assert!(changes <= windows * 26);
        }
    }
}
