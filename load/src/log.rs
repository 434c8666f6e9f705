//! The run as a log of HdrHistogram (format 1.3, histograms V2): one line for each interval of each model, whose name
//! is the line's tag. Values are nanoseconds, which is what the usual readers expect.

use std::{io, time::SystemTime};

use hdrhistogram::{
    Histogram,
    serialization::{
        V2DeflateSerializer,
        interval_log::{IntervalLogWriterBuilder, Tag},
    },
};

use crate::tally::{Tally, latency_histogram};

/// The usual readers show the largest value of an interval in milliseconds.
const NS_PER_MS: f64 = 1e6;

/// Writes the intervals of all models in the order of time.
///
/// # Errors
/// If `out` cannot be written.
pub(crate) fn write_log(
    out: &mut impl io::Write,
    started_at: SystemTime,
    tallies: &[(String, Tally)],
) -> io::Result<()> {
    let mut serializer = V2DeflateSerializer::new();
    let mut builder = IntervalLogWriterBuilder::new();
    builder.add_comment("downbeat bench load: latency in ns from the intended send time");
    builder.with_start_time(started_at).with_base_time(started_at).with_max_value_divisor(NS_PER_MS);
    let mut log = builder.begin_log_with(out, &mut serializer)?;
    let mut intervals: Vec<_> = tallies
        .iter()
        .flat_map(|(model, tally)| tally.timeline.intervals().iter().map(move |interval| (model, tally, interval)))
        .collect();
    intervals.sort_by_key(|(_, _, interval)| interval.start);
    for (model, tally, interval) in intervals {
        let tag: String = model.chars().map(|c| if c == ',' || c.is_whitespace() { '_' } else { c }).collect();
        let mut histogram: Histogram<u64> = latency_histogram();
        for &(value, count) in &interval.latencies_ns {
            histogram.saturating_record_n(value, count);
        }
        log.write_histogram(&histogram, interval.start, tally.timeline.length(), Tag::new(&tag))
            .map_err(io::Error::other)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use hdrhistogram::serialization::{
        Deserializer,
        interval_log::{IntervalLogIterator, LogEntry},
    };

    use super::*;

    #[test]
    fn a_log_is_read_back_as_it_was_recorded() {
        let (mut first, mut second) = (Tally::new(Duration::from_secs(3)), Tally::new(Duration::from_secs(3)));
        for n in 1..=1000u64 {
            first.timeline.record(Duration::from_millis(2 * n), n * 10_000);
        }
        second.timeline.record(Duration::from_millis(1500), 7_000_000);
        first.timeline.close();
        second.timeline.close();
        let tallies = [("a model".to_owned(), first), ("b".to_owned(), second)];
        let mut log = Vec::new();
        write_log(&mut log, SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000), &tallies).unwrap();

        let mut found = Vec::new();
        for entry in IntervalLogIterator::new(&log) {
            match entry.unwrap() {
                LogEntry::StartTime(at) | LogEntry::BaseTime(at) => assert_eq!(at.as_secs(), 1_700_000_000),
                LogEntry::Interval(interval) => {
                    let bytes = STANDARD.decode(interval.encoded_histogram()).unwrap();
                    let histogram: Histogram<u64> = Deserializer::new().deserialize(&mut &bytes[..]).unwrap();
                    let tag = interval.tag().unwrap().as_str().to_owned();
                    assert!((interval.max() - histogram.max() as f64 / 1e6).abs() < 0.01);
                    found.push((
                        tag,
                        interval.start_timestamp().as_secs(),
                        histogram.len(),
                        histogram.value_at_quantile(0.5),
                    ));
                }
            }
        }
        let [(_, _, _, p50), ..] = &found[..] else { panic!("{found:?}") };
        assert!((*p50 as f64 / 2_500_000.0 - 1.0).abs() < 0.002, "{found:?}");
        let found: Vec<_> = found.iter().map(|(tag, start, count, _)| (tag.as_str(), *start, *count)).collect();
        assert_eq!(found, [("a_model", 0, 499), ("a_model", 1, 500), ("b", 1, 1), ("a_model", 2, 1)]);
    }
}
