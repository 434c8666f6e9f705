//! When answers came, to the millisecond: how long clients had none.

use std::time::Duration;

/// Answers after the first hour of a run are not recorded: half a megabyte at most.
const MS_MAX: usize = 3_600_000;

/// The milliseconds of a run in which there was an answer with an output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answered(Vec<u64>);

impl Answered {
    /// An answer came `at` after the start of the run.
    pub fn record(&mut self, at: Duration) {
        let ms = at.as_millis() as usize;
        if ms < MS_MAX {
            self.reach(ms / 64 + 1);
            self.0[ms / 64] |= 1 << (ms % 64);
        }
    }

    fn reach(&mut self, words: usize) {
        self.0.resize(self.0.len().max(words), 0);
    }

    /// Takes in those of another stream of the same run.
    pub fn add(&mut self, other: &Self) {
        self.reach(other.0.len());
        self.0.iter_mut().zip(&other.0).for_each(|(all, other)| *all |= other);
    }

    /// When the last answer came, after the start of the run.
    #[must_use]
    pub fn last(&self) -> Option<Duration> {
        let (word, bits) = self.0.iter().enumerate().rfind(|(_, bits)| **bits != 0)?;
        Some(Duration::from_millis(word as u64 * 64 + u64::from(bits.ilog2())))
    }

    /// The longest time without an answer between two instants after the start of the run.
    #[must_use]
    pub fn longest_pause(&self, from: Duration, until: Duration) -> Duration {
        let is_answered = |ms: usize| self.0.get(ms / 64).is_some_and(|word| word >> (ms % 64) & 1 == 1);
        let (mut longest, mut pause) = (0, 0);
        for ms in from.as_millis() as usize..until.as_millis().min(MS_MAX as u128) as usize {
            pause = if is_answered(ms) { 0 } else { pause + 1 };
            longest = longest.max(pause);
        }
        Duration::from_millis(longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_end_with_the_answers_of_any_stream() {
        let ms = Duration::from_millis;
        let (mut one, mut other) = (Answered::default(), Answered::default());
        [0, 10, 400].into_iter().for_each(|at| one.record(ms(at)));
        [63, 64, 300].into_iter().for_each(|at| other.record(ms(at)));
        other.record(Duration::from_secs(7200));
        assert_eq!((one.last(), Answered::default().last()), (Some(ms(400)), None));
        assert_eq!(one.longest_pause(ms(0), ms(401)), ms(389));
        one.add(&other);
        assert_eq!(one.longest_pause(ms(0), ms(401)), ms(235));
        assert_eq!(one.longest_pause(ms(0), ms(63)), ms(52));
        assert_eq!(one.longest_pause(ms(301), ms(1000)), ms(599), "none came after the last");
    }
}
