//! The figures of a histogram that every measurement prints.

use hdrhistogram::Histogram;
use serde::Serialize;

/// In microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// The largest.
    pub max: f64,
}

/// The same, for what is measured often enough to tell how it ends. In microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tail {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// 99.99th percentile.
    pub p9999: f64,
    /// The largest.
    pub max: f64,
}

/// A histogram of nanoseconds for [`Tail`] and [`Percentiles`]; it grows with its values.
#[must_use]
pub fn nanoseconds() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are within hdrhistogram's bounds")
}

impl Tail {
    /// Of a histogram of nanoseconds.
    #[must_use]
    pub fn of(nanoseconds: &Histogram<u64>) -> Self {
        let Percentiles { p50, p99, p999, max } = Percentiles::of(nanoseconds);
        Self { p50, p99, p999, p9999: nanoseconds.value_at_quantile(0.9999) as f64 / 1e3, max }
    }
}

impl Percentiles {
    /// Of a histogram of nanoseconds.
    #[must_use]
    pub fn of(nanoseconds: &Histogram<u64>) -> Self {
        let micros = |quantile| nanoseconds.value_at_quantile(quantile) as f64 / 1e3;
        Self { p50: micros(0.5), p99: micros(0.99), p999: micros(0.999), max: nanoseconds.max() as f64 / 1e3 }
    }
}
