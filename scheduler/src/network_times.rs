//! What the network takes, and how late timers are, as a high percentile of what was seen (Symphony, section 5.6): a
//! budget that is too small makes batches late, one that is too large wastes what deadlines leave.
//!
//! The configured value holds until enough has been seen, and again when nothing has been seen for a while. Up to it
//! one window of samples is believed; more than that may be a stall, which two windows in a row have to show. A slower
//! network is planned with, and refuses no request that the configured one would let be met: requests are refused by
//! [`NetworkTime::allowed`].

use proto::{Span, Timestamp};

/// What is seen counts for one to two of these.
const WINDOW: Span = Span::from_millis(10_000);
/// Nothing that a member says makes the network slower than this. No configured value is larger.
pub const NETWORK_MAX: Span = Span::from_millis(1_000);
/// Buckets for each doubling.
const STEPS: u32 = 8;
/// Up to 2^40 ns, 18 minutes.
const BUCKETS: usize = 40 * STEPS as usize;

/// How late timers are taken to be before that is known.
pub const TIMERS_LATE: Span = Span::from_millis(1);
/// No operating system keeps time better.
const TIMERS_LATE_MIN: Span = Span::from_micros(50);
/// What is later is a stall, which no window should wait for.
const TIMERS_LATE_MAX: Span = Span::from_millis(2);

/// Which percentile is planned with.
#[derive(Debug, Clone, Copy)]
struct Rule {
    /// Of all that was seen, one in so many took longer.
    one_in: u32,
    /// Fewer say nothing of it.
    samples_min: u32,
    /// What is planned with lies between these.
    least: Span,
    most: Span,
    /// It is the least, doubled as often as needed: all models are planned anew whenever it changes.
    is_rough: bool,
}

impl Rule {
    fn planned(self, seen: Span) -> Span {
        let seen = seen.clamp(self.least, self.most);
        if !self.is_rough {
            return seen;
        }
        let mut planned = self.least;
        while planned < seen {
            planned = planned * 2;
        }
        planned.min(self.most)
    }
}

/// One part of the way from a decision to what comes of it.
#[derive(Debug)]
pub struct NetworkTime {
    configured: Span,
    planned: Span,
    rule: Rule,
    window: Window,
    last: Window,
    ends_at: Timestamp,
}

/// A histogram whose buckets are an eighth of a doubling wide.
#[derive(Debug, Clone)]
struct Window {
    /// None until something is seen.
    counts: Vec<u32>,
    total: u32,
}

impl Window {
    fn empty() -> Self {
        Self { counts: Vec::new(), total: 0 }
    }

    fn record(&mut self, span: Span, times: u32) {
        self.counts.resize(BUCKETS, 0);
        let count = &mut self.counts[bucket(span)];
        *count = count.saturating_add(times);
        self.total = self.total.saturating_add(times);
    }

    /// The upper edge of the bucket that holds the percentile; `None` if there is too little.
    fn percentile(&self, rule: Rule) -> Option<Span> {
        if self.total < rule.samples_min {
            return None;
        }
        let rank = self.total - self.total / rule.one_in;
        let mut seen = 0;
        let at = self.counts.iter().position(|count| {
            seen = count.saturating_add(seen);
            seen >= rank
        });
        at.map(upper_edge)
    }
}

/// 2^(n / STEPS) ns to 2^((n + 1) / STEPS) ns.
fn bucket(span: Span) -> usize {
    let ns = span.as_nanos().max(1) as f64;
    ((ns.log2() * f64::from(STEPS)) as usize).min(BUCKETS - 1)
}

fn upper_edge(bucket: usize) -> Span {
    Span(((bucket + 1) as f64 / f64::from(STEPS)).exp2() as i64)
}

impl NetworkTime {
    /// Plans with the configured value.
    #[must_use]
    pub fn new(configured: Span) -> Self {
        Self::by(
            Rule { one_in: 1_000, samples_min: 2_000, least: Span::ZERO, most: NETWORK_MAX, is_rough: false },
            configured,
        )
    }

    /// How late timers fire and threads wake: as long, until that has been seen.
    #[must_use]
    pub fn of_timers(at_first: Span) -> Self {
        let (least, most) = (TIMERS_LATE_MIN, TIMERS_LATE_MAX);
        Self::by(Rule { one_in: 100, samples_min: 200, least, most, is_rough: true }, at_first)
    }

    fn by(rule: Rule, configured: Span) -> Self {
        let (window, last) = (Window::empty(), Window::empty());
        Self { configured, planned: configured, rule, window, last, ends_at: Timestamp::PAST }
    }

    /// The configured value is another one; what was seen still counts.
    pub fn set_configured(&mut self, configured: Span) {
        if self.planned == self.configured {
            self.planned = configured;
        }
        self.configured = configured;
    }

    /// It took so long. True if another value is to be planned with.
    pub fn handle_seen(&mut self, now: Timestamp, span: Span) -> bool {
        self.handle_seen_times(now, span, 1)
    }

    /// As [`Self::handle_seen`], of who has seen many and tells their percentile.
    pub fn handle_percentile(&mut self, now: Timestamp, span: Span) -> bool {
        self.handle_seen_times(now, span, self.rule.samples_min)
    }

    /// What another one planned with; it counts as long as what was seen here does.
    pub fn handle_learned(&mut self, now: Timestamp, span: Span) -> bool {
        if span <= Span::ZERO {
            return false;
        }
        let planned = self.planned;
        self.handle_percentile(now, span);
        self.planned = span.min(self.rule.most);
        self.planned != planned
    }

    /// What is planned with, if that is not what is configured.
    #[must_use]
    pub fn learned(&self) -> Option<Span> {
        (self.planned != self.configured).then_some(self.planned)
    }

    fn handle_seen_times(&mut self, now: Timestamp, span: Span, times: u32) -> bool {
        let planned = self.planned;
        if self.ends_at <= now {
            if self.ends_at + WINDOW <= now {
                // Nothing was seen for a whole window: what came before says nothing of now.
                (self.window, self.last) = (Window::empty(), Window::empty());
            }
            if self.ends_at > Timestamp::PAST {
                self.planned = self.believed();
                self.last = std::mem::replace(&mut self.window, Window::empty());
            }
            self.ends_at = now + WINDOW;
        }
        self.window.record(span, times);
        self.planned != planned
    }

    /// What the last two windows say.
    fn believed(&self) -> Span {
        let [one, other] = [&self.window, &self.last].map(|window| window.percentile(self.rule));
        let Some(seen) = one.max(other) else { return self.configured };
        let in_both = one.zip(other).map_or(Span::ZERO, |(one, other)| one.min(other));
        self.rule.planned(seen.min(self.configured.max(in_both)))
    }

    /// What to plan with.
    #[must_use]
    pub fn planned(&self) -> Span {
        self.planned
    }

    /// The same, and at most what is configured: whom that leaves time is not refused.
    #[must_use]
    pub fn allowed(&self) -> Span {
        self.planned.min(self.configured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Windows full of what `span` says of each number; what is planned with after each.
    fn windows(time: &mut NetworkTime, count: i64, span: impl Fn(i64) -> Span) -> Vec<Span> {
        let mut planned = Vec::new();
        let start = if time.ends_at == Timestamp::PAST { Timestamp(0) } else { time.ends_at };
        for window in 0..count {
            for number in 0..10_000 {
                let now = start + Span(window * WINDOW.as_nanos()) + Span(number * WINDOW.as_nanos() / 10_000);
                time.handle_seen(now, span(number));
            }
            planned.push(time.planned());
        }
        planned
    }

    #[test]
    fn it_starts_with_what_is_configured_and_follows_a_faster_network_and_a_slower_one() {
        let configured = Span::from_micros(100);
        let mut time = NetworkTime::new(configured);
        let is_about = |found: Span, us: i64| found >= Span::from_micros(us) && found < Span::from_micros(us * 11 / 10);
        assert_eq!(windows(&mut time, 1, |_| Span::from_micros(20)), [configured]);
        assert!(is_about(windows(&mut time, 2, |_| Span::from_micros(20))[1], 20));
        // The first window ends, the second one shows the same, and is believed once it has ended.
        let slower = windows(&mut time, 3, |_| Span::from_millis(3));
        assert!(slower[1] == configured && is_about(slower[2], 3_000), "{slower:?}");
        assert_eq!((time.allowed(), time.learned()), (configured, Some(slower[2])));
        assert!(is_about(windows(&mut time, 3, |_| Span::from_micros(20))[2], 20));
        assert_eq!(windows(&mut time, 4, |_| Span::from_millis(60_000))[3], NETWORK_MAX);
    }

    /// Of 10,000 samples in ten seconds a stall of half a second makes every twentieth late.
    #[test]
    fn a_stall_is_not_taken_for_a_slower_network() {
        let mut time = NetworkTime::new(Span::from_millis(1));
        let usual = |_| Span::from_micros(50);
        windows(&mut time, 2, usual);
        let stalled = |number| if number < 500 { Span::from_millis(500 - number) } else { Span::from_micros(50) };
        windows(&mut time, 1, stalled);
        assert!(windows(&mut time, 2, usual).iter().all(|planned| *planned <= Span::from_millis(1)));
        assert!(windows(&mut time, 1, usual)[0] < Span::from_micros(60));
    }

    #[test]
    fn what_was_seen_long_ago_says_nothing() {
        let configured = Span::from_micros(100);
        for us in [20, 3_000] {
            let mut time = NetworkTime::new(configured);
            windows(&mut time, 4, |_| Span::from_micros(us));
            assert_ne!(time.planned(), configured);
            let (soon, later) = (time.ends_at + WINDOW - Span(1), time.ends_at + WINDOW * 3);
            assert!(!time.handle_seen(soon, Span::from_micros(us)), "it was seen a moment ago");
            assert!(time.handle_seen(later, Span::from_micros(us)));
            assert_eq!(time.planned(), configured);
        }
    }

    #[test]
    fn timers_are_as_late_as_one_in_a_hundred_is_within_bounds() {
        let planned = |late: &dyn Fn(i64) -> Span| {
            let mut timers = NetworkTime::of_timers(TIMERS_LATE);
            assert_eq!(windows(&mut timers, 1, late), [TIMERS_LATE]);
            windows(&mut timers, 2, late)[1]
        };
        assert_eq!(planned(&|_| Span::ZERO), TIMERS_LATE_MIN);
        assert_eq!(planned(&|_| Span::from_millis(400)), TIMERS_LATE_MAX, "a stall");
        // Half a percent do not count, two do; what counts is rounded up.
        let late = |part, number| Span::from_micros(if number % 200 < part { 330 } else { 60 });
        assert_eq!(planned(&|number| late(1, number)), Span::from_micros(100));
        assert_eq!(planned(&|number| late(4, number)), Span::from_micros(400));
    }

    #[test]
    fn one_in_a_thousand_is_left_out_and_five_are_not() {
        let planned = |slow: i64| {
            let mut time = NetworkTime::new(Span::from_micros(100));
            windows(&mut time, 3, |number| Span::from_micros(if number % 1000 < slow { 60 } else { 10 }))[2]
        };
        assert!(planned(1) < Span::from_micros(12) && planned(5) > Span::from_micros(60));
    }

    #[test]
    fn what_is_seen_too_rarely_says_nothing() {
        let mut time = NetworkTime::new(Span::from_micros(100));
        for second in 0..100 {
            assert!(!time.handle_seen(Timestamp(second * 1_000_000_000), Span(1)));
        }
        assert_eq!(time.planned(), Span::from_micros(100));
    }

    proptest! {
        #[test]
        fn a_span_lies_within_an_eighth_of_a_doubling_below_its_edge(ns in 1i64..1 << 38) {
            let edge = upper_edge(bucket(Span(ns))).as_nanos();
            prop_assert!(ns <= edge + 1 && edge as f64 <= ns as f64 * 1.0906 + 1.0, "{} {}", ns, edge);
        }
    }
}
