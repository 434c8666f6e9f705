//! Instants and spans in nanoseconds. Cores take instants as arguments; nothing here reads a clock.

use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign},
    time::Duration,
};

use wincode::{SchemaRead, SchemaWrite};

/// An instant in nanoseconds since the epoch of the clock it was read from. On the wire that is the scheduler's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, SchemaRead, SchemaWrite)]
pub struct Timestamp(pub i64);

/// A signed length of time in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, SchemaRead, SchemaWrite)]
pub struct Span(pub i64);

impl Timestamp {
    /// The epoch.
    pub const ZERO: Self = Self(0);
    /// Before every instant: a window that is always open starts here.
    pub const PAST: Self = Self(i64::MIN);
    /// After every instant: a GPU whose release is not known yet is free then.
    pub const NEVER: Self = Self(i64::MAX);

    /// Nanoseconds since the epoch.
    #[must_use]
    pub const fn as_nanos(self) -> i64 {
        self.0
    }
}

impl Span {
    /// No time at all.
    pub const ZERO: Self = Self(0);
    /// Longer than any other: the latency objective of who has none.
    pub const ENDLESS: Self = Self(i64::MAX);

    /// `ns` nanoseconds.
    #[must_use]
    pub const fn from_nanos(ns: i64) -> Self {
        Self(ns)
    }

    /// `us` microseconds.
    #[must_use]
    pub const fn from_micros(us: i64) -> Self {
        Self(us * 1_000)
    }

    /// `ms` milliseconds.
    #[must_use]
    pub const fn from_millis(ms: i64) -> Self {
        Self(ms * 1_000_000)
    }

    /// `ms` milliseconds, rounded to the nearest nanosecond; saturates.
    #[must_use]
    pub fn from_millis_f64(ms: f64) -> Self {
        Self((ms * 1e6).round() as i64)
    }

    /// `s` seconds, rounded to the nearest nanosecond; saturates.
    #[must_use]
    pub fn from_secs_f64(s: f64) -> Self {
        Self((s * 1e9).round() as i64)
    }

    /// Nanoseconds.
    #[must_use]
    pub const fn as_nanos(self) -> i64 {
        self.0
    }

    /// Milliseconds.
    #[must_use]
    pub fn as_millis_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Microseconds.
    #[must_use]
    pub fn as_micros_f64(self) -> f64 {
        self.0 as f64 / 1e3
    }

    /// Seconds.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// The same length as a `Duration`; zero if negative.
    #[must_use]
    pub fn to_duration(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }
}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        Self(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
    }
}

// Arithmetic saturates, so `PAST` and `NEVER` stay where they are. What is `ENDLESS` ends at `NEVER`, and is as long
// without a part of it.
impl Add<Span> for Timestamp {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        match self {
            Self::NEVER | Self::PAST => self,
            _ if span == Span::ENDLESS => Self::NEVER,
            _ => Self(self.0.saturating_add(span.0)),
        }
    }
}

impl Sub<Span> for Timestamp {
    type Output = Self;
    fn sub(self, span: Span) -> Self {
        self + -span
    }
}

impl Sub for Timestamp {
    type Output = Span;
    fn sub(self, earlier: Self) -> Span {
        if self == Self::NEVER { Span::ENDLESS } else { Span(self.0.saturating_sub(earlier.0)) }
    }
}

impl AddAssign<Span> for Timestamp {
    fn add_assign(&mut self, span: Span) {
        *self = *self + span;
    }
}

impl Add for Span {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sub for Span {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        if self == Self::ENDLESS { self } else { Self(self.0.saturating_sub(other.0)) }
    }
}

impl AddAssign for Span {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for Span {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Neg for Span {
    type Output = Self;
    fn neg(self) -> Self {
        Self(self.0.saturating_neg())
    }
}

impl Mul<i64> for Span {
    type Output = Self;
    fn mul(self, times: i64) -> Self {
        Self(self.0.saturating_mul(times))
    }
}

impl Div<i64> for Span {
    type Output = Self;
    fn div(self, by: i64) -> Self {
        Self(self.0 / by)
    }
}

impl Sum for Span {
    fn sum<I: Iterator<Item = Self>>(spans: I) -> Self {
        spans.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.unsigned_abs() {
            _ if *self == Self::ENDLESS => f.write_str("endless"),
            0..1_000 => write!(f, "{} ns", self.0),
            1_000..1_000_000 => write!(f, "{:.1} us", self.as_micros_f64()),
            1_000_000..1_000_000_000 => write!(f, "{:.3} ms", self.as_millis_f64()),
            _ => write!(f, "{:.3} s", self.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_absorb() {
        assert_eq!(Timestamp::NEVER + Span::from_millis(5), Timestamp::NEVER);
        assert_eq!(Timestamp::NEVER - Span::from_millis(5), Timestamp::NEVER);
        assert_eq!(Timestamp::PAST + Span::from_millis(5), Timestamp::PAST);
        assert_eq!(Timestamp(7) - Timestamp(10), Span(-3));
        let endless = Span::ENDLESS - Span::from_millis(5);
        assert_eq!((endless, Timestamp(-7) + endless), (Span::ENDLESS, Timestamp::NEVER));
        assert_eq!(Timestamp::NEVER - Timestamp(7), Span::ENDLESS);
    }

    #[test]
    fn spans_print_in_a_fitting_unit() {
        assert_eq!(Span(17).to_string(), "17 ns");
        assert_eq!(Span::from_micros(250).to_string(), "250.0 us");
        assert_eq!(Span::from_millis_f64(25.5).to_string(), "25.500 ms");
        assert_eq!(Span::from_millis(1500).to_string(), "1.500 s");
    }
}
