//! Which streams are counted together: of thousands those of the highest rates have rows of their own.

use std::cmp::Reverse;

use crate::request::Stream;

/// Rows of a table; each has histograms of its own.
const ROWS_MAX: usize = 256;
/// The row of all others.
const OTHERS: &str = "(others)";

/// The rows of a run.
pub(crate) struct Rows {
    names: Vec<String>,
    /// By stream.
    of: Vec<usize>,
}

impl Rows {
    /// One for each stream, or, if these are too many, for each of those with the highest rates, and one for the rest.
    pub(crate) fn of(streams: &[Stream]) -> Self {
        if streams.len() <= ROWS_MAX {
            return Self::of_each(streams);
        }
        let mut by_rate: Vec<usize> = (0..streams.len()).collect();
        // Stable: of equals the first ones.
        by_rate.sort_by_key(|&index| Reverse((streams[index].arrivals.max_rps() * 1e6) as u64));
        by_rate.truncate(ROWS_MAX - 1);
        by_rate.sort_unstable();
        let mut of = vec![ROWS_MAX - 1; streams.len()];
        by_rate.iter().enumerate().for_each(|(row, &index)| of[index] = row);
        let names = by_rate.iter().map(|&index| streams[index].model.clone());
        Self { names: names.chain([OTHERS.to_owned()]).collect(), of }
    }

    /// One for each stream, however many there are.
    pub(crate) fn of_each(streams: &[Stream]) -> Self {
        let names = streams.iter().map(|stream| stream.model.clone()).collect();
        Self { names, of: (0..streams.len()).collect() }
    }

    /// What they are called.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// The same, for good.
    pub(crate) fn into_names(self) -> Vec<String> {
        self.names
    }

    /// The row of a stream.
    pub(crate) fn of_stream(&self, index: usize) -> usize {
        self.of[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrivals::Arrivals;

    fn streams(count: usize) -> Vec<Stream> {
        let rate = |number: usize| if number % 100 == 7 { 9.0 } else { 0.5 };
        let stream = |number| Stream {
            model: format!("m{number}"),
            arrivals: Arrivals::poisson(rate(number)),
            slo_ms: 25.0,
            inputs: [].into(),
        };
        (0..count).map(stream).collect()
    }

    #[test]
    fn of_thousands_of_streams_the_fastest_have_rows_of_their_own() {
        let all = Rows::of(&streams(ROWS_MAX));
        assert_eq!((all.names().len(), all.of_stream(255), &all.names()[255][..]), (ROWS_MAX, 255, "m255"));
        let rows = Rows::of(&streams(10_000));
        assert_eq!((rows.names().len(), &rows.names()[ROWS_MAX - 1][..]), (ROWS_MAX, OTHERS));
        for fast in (7..10_000).step_by(100) {
            assert_eq!(rows.names()[rows.of_stream(fast)], format!("m{fast}"));
        }
        assert_eq!((rows.of_stream(0), &rows.names()[0][..]), (0, "m0"), "of the others the first ones");
        assert_eq!(rows.of_stream(9_999), ROWS_MAX - 1);
        let others = (0..10_000).filter(|&index| rows.of_stream(index) == ROWS_MAX - 1).count();
        assert_eq!(others, 10_000 - (ROWS_MAX - 1));
    }
}
