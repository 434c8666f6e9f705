//! The run as a picture: latency by percentile, and over time.

use std::collections::BTreeMap;

use chart::{Axis, Chart, Mark, Panel, Series};
use hdrhistogram::Histogram;

use crate::tally::{Tally, latency_histogram};

/// Models that get a line of their own; of more, only the total is drawn.
const LINES_MAX: usize = 6;
/// Where percentiles are named; the axis counts the nines of a percentile, and a name stands half a step in.
const NINES: [&str; 4] = ["90 %", "99 %", "99.9 %", "99.99 %"];
/// Points of a line by percentile.
const POINTS: u32 = 200;

/// What is drawn under one name.
struct Line<'a> {
    name: &'a str,
    tallies: Vec<&'a Tally>,
    /// Of all tallies together.
    latencies_ns: &'a Histogram<u64>,
}

/// Two panels as an SVG document.
#[must_use]
pub(crate) fn latency_chart<'a>(title: &str, tallies: &'a [(String, Tally)], total: &'a Tally) -> String {
    let mut lines = Vec::new();
    if tallies.len() <= LINES_MAX {
        let line = |(model, tally): &'a (String, Tally)| Line {
            name: model,
            tallies: vec![tally],
            latencies_ns: &tally.latencies_ns,
        };
        lines.extend(tallies.iter().map(line));
    }
    if tallies.len() > 1 {
        let all = tallies.iter().map(|(_, tally)| tally).collect();
        lines.push(Line { name: "all models", tallies: all, latencies_ns: &total.latencies_ns });
    }
    let series = |points: &dyn Fn(&Line<'_>) -> Vec<(f64, f64)>| {
        let line = |(look, line): (usize, &Line<'_>)| Series {
            name: line.name.to_owned(),
            mark: Mark::Curve,
            look,
            points: points(line),
        };
        lines.iter().enumerate().map(line).collect::<Vec<_>>()
    };
    let percentiles = series(&|line| by_percentile(line.latencies_ns));
    let times = series(&|line| over_time(&line.tallies));
    let panel = |title: &str, x: Axis, series: Vec<Series>| Panel {
        title: title.to_owned(),
        x,
        y: Axis::up_to("latency (ms)", series.iter().flat_map(|series| &series.points).map(|point| point.1)),
        series,
        boxes: Vec::new(),
    };
    let last = times.iter().flat_map(|series| &series.points).map(|point| point.0).fold(1.0, f64::max);
    let nines = Axis { range: (-0.5, NINES.len() as f64), ..Axis::named("of the answers are faster", NINES) };
    let panels = vec![
        panel("Latency by percentile", nines, percentiles),
        panel("99th percentile over time", Axis::new("time (s)", (0.0, last)), times),
    ];
    Chart::new(title, 2, panels).svg()
}

/// Nines of the percentile, less a half, and milliseconds; up to the last percentile that an answer stands for.
fn by_percentile(histogram: &Histogram<u64>) -> Vec<(f64, f64)> {
    let nines_max = (histogram.len().max(1) as f64).log10().min(NINES.len() as f64);
    let point = |step: u32| {
        let nines = nines_max * f64::from(step) / f64::from(POINTS);
        (nines - 0.5, histogram.value_at_quantile(1.0 - 10f64.powf(-nines)) as f64 / 1e6)
    };
    if histogram.is_empty() { Vec::new() } else { (0..=POINTS).map(point).collect() }
}

/// Seconds and milliseconds, a point in the middle of each interval.
fn over_time(tallies: &[&Tally]) -> Vec<(f64, f64)> {
    let mut intervals: BTreeMap<_, Histogram<u64>> = BTreeMap::new();
    for timeline in tallies.iter().map(|tally| &tally.timeline) {
        for interval in timeline.intervals() {
            let middle = interval.start + timeline.length() / 2;
            let histogram = intervals.entry(middle).or_insert_with(latency_histogram);
            interval.latencies_ns.iter().for_each(|&(value, count)| histogram.saturating_record_n(value, count));
        }
    }
    let point = |(middle, histogram): (std::time::Duration, Histogram<u64>)| {
        (middle.as_secs_f64(), histogram.value_at_quantile(0.99) as f64 / 1e6)
    };
    intervals.into_iter().map(point).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn tally(latencies_ms: &[u64]) -> Tally {
        let mut tally = Tally::new(Duration::from_secs(3));
        for (n, &ms) in latencies_ms.iter().enumerate() {
            tally.latencies_ns.record(ms * 1_000_000).unwrap();
            tally.timeline.record(Duration::from_millis(n as u64 * 100), ms * 1_000_000);
        }
        tally.timeline.close();
        tally
    }

    #[test]
    fn lines_say_what_was_recorded() {
        let tally = tally(&[1, 1, 1, 1, 1, 1, 1, 1, 1, 10, 20]);
        let points = by_percentile(&tally.latencies_ns);
        // Ten of eleven took 10 ms at most; no percentile below the last answer's own can show the eleventh.
        assert!((points[0].1 - 1.0).abs() < 0.01 && (points[POINTS as usize].1 - 10.0).abs() < 0.1, "{points:?}");
        assert!(points.is_sorted_by(|a, b| a.0 <= b.0 && a.1 <= b.1));
        let [(0.5, first), (1.5, second)] = over_time(&[&tally])[..] else { panic!("{:?}", over_time(&[&tally])) };
        assert!((first - 10.0).abs() < 0.1 && (second - 20.0).abs() < 0.1);
    }

    #[test]
    fn every_model_and_the_total_are_named_and_nothing_is_no_failure() {
        let tallies = [("one".to_owned(), tally(&[1, 2])), ("two".to_owned(), tally(&[]))];
        let total = Tally::total(Duration::from_secs(3), tallies.iter().map(|(_, tally)| tally));
        let svg = latency_chart("load", &tallies, &total);
        for name in ["one", "two", "all models", "99.9 %", "latency (ms)"] {
            assert!(svg.lines().any(|line| line.trim() == name), "{name}");
        }
    }
}
