//! What a demo that kills the primary shows: how long the next one took, by the schedulers' logs and by the answers.
#![allow(clippy::disallowed_methods)] // Compares the time of day with that of logs.

use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};
use load::{Answered, Tally};

use super::Cluster;

/// How long after the kill a pause in the answers is looked for.
const LOOK: Duration = Duration::from_secs(2);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The primary was killed.
pub(super) struct Killed {
    /// Its name.
    pub name: String,
    /// The last one that its log tells of.
    epoch: Option<Epoch>,
    time_of_day: Duration,
    /// After the start of the load.
    at: Duration,
}

/// Number, and the primary's position in the list of schedulers: a later one is greater.
type Epoch = (u32, u16);

impl Killed {
    /// Kills the primary: whoever claimed the highest epoch, or the first in the list where no log tells. The load
    /// began so long ago.
    ///
    /// # Errors
    /// If it was gone already.
    pub(super) fn now(cluster: &Cluster, at: Duration) -> Result<Self> {
        let epoch = reigns(&cluster.scheduler_logs()).map(|reign| reign.epoch).max();
        let name = cluster.scheduler_name(epoch.map_or(0, |(_, index)| index));
        ensure!(cluster.kill(&name), "{name} could not be killed: it was not there");
        let time_of_day = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos() % DAY.as_nanos();
        Ok(Self { name, epoch, time_of_day: Duration::from_nanos(time_of_day as u64), at })
    }

    /// What came of it, in one line. Load was sent for `span`.
    pub(super) fn line(&self, cluster: &Cluster, tallies: &[Tally], span: Duration) -> String {
        let pause = pause(tallies.iter().map(|tally| &tally.answered), self.at, span);
        let logs = cluster.scheduler_logs();
        let next = reigns(&logs).filter(|reign| Some(reign.epoch) > self.epoch).min_by_key(|reign| reign.epoch);
        let Some(Reign { epoch: (number, index), time_of_day, took }) = next else {
            return format!("takeover: no scheduler's log tells of it; {pause}");
        };
        let waited_ms = since(self.time_of_day, time_of_day).as_secs_f64() * 1e3;
        format!(
            "takeover: {waited_ms:.1} ms from the kill until all members obeyed the next primary ({}, epoch \
             {number}.{index}), the last {took} of them since it claimed the epoch; {pause}",
            cluster.scheduler_name(index)
        )
    }
}

/// The longest pause in the answers from `at` on. It is looked for while there was load, or answers to it.
fn pause<'a>(answered: impl Iterator<Item = &'a Answered>, at: Duration, span: Duration) -> String {
    let mut all = Answered::default();
    answered.for_each(|answered| all.add(answered));
    let last = all.last().unwrap_or_default();
    let until = span.max(last).min(at + LOOK);
    let pause = all.longest_pause(at, until);
    let text = format!("for {} ms no answer came", pause.as_millis());
    // Longer than any that an answer has ended.
    let is_open = pause > all.longest_pause(at, last.min(until));
    if is_open { text + ", and then the load ended" } else { text }
}

/// A scheduler's word that all members obey it.
#[derive(Debug, PartialEq)]
struct Reign<'a> {
    epoch: Epoch,
    time_of_day: Duration,
    /// Since it claimed the epoch; with its unit.
    took: &'a str,
}

/// All that some logs tell of.
fn reigns(logs: &str) -> impl Iterator<Item = Reign<'_>> {
    logs.lines().filter(|line| line.contains("all members obey")).filter_map(reign)
}

/// From a line such as `2026-01-31T23:59:58.123456Z  WARN ..: all members obey; .. epoch=2.1 .. took=3.200 ms`.
fn reign(line: &str) -> Option<Reign<'_>> {
    let clock = line.split_once('T')?.1.split_once('Z')?.0;
    let mut parts = clock.split(':');
    let mut part = || parts.next()?.parse::<f64>().ok().filter(|part| (0.0..61.0).contains(part));
    let time_of_day = Duration::from_secs_f64(part()? * 3600.0 + part()? * 60.0 + part()?);
    let (number, index) = line.split_once(" epoch=")?.1.split_whitespace().next()?.split_once('.')?;
    let took = line.split_once(" took=")?.1.trim_end();
    Some(Reign { epoch: (number.parse().ok()?, index.parse().ok()?), time_of_day, took })
}

/// Between two times of day, of which the second may be on the next one. Times that are up to half a day in the wrong
/// order are of clocks that were read in turn: nothing is between them.
fn since(from: Duration, until: Duration) -> Duration {
    let after = until.checked_sub(from).unwrap_or_else(|| (until + DAY).saturating_sub(from));
    if after > DAY / 2 { Duration::ZERO } else { after }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_tells_of_primaries() {
        let logs = "2026-01-31T23:59:58.500000Z  WARN scheduler::x: taking over as the primary epoch=2.1\n\
                    2026-01-31T23:59:58.750000Z  WARN scheduler::x: all members obey; this scheduler is the primary \
                    epoch=2.1 frontends=1 backends=2 took=3.200 ms\nall members obey\n";
        let expected = Reign { epoch: (2, 1), time_of_day: DAY - Duration::from_millis(1250), took: "3.200 ms" };
        assert_eq!(reigns(logs).collect::<Vec<_>>(), [expected]);
    }

    #[test]
    fn a_day_ends() {
        let second = Duration::from_secs(1);
        assert_eq!(since(second, 3 * second), 2 * second);
        assert_eq!(since(DAY - second, second), 2 * second);
    }

    /// What came after the load was once taken for a pause of half a second.
    #[test]
    fn a_pause_ends_with_the_load() {
        let ms = Duration::from_millis;
        let told = |until_ms: u64, at_ms, span_ms| {
            let mut answered = Answered::default();
            (0..until_ms).step_by(10).for_each(|at| answered.record(ms(at)));
            pause([&answered].into_iter(), ms(at_ms), ms(span_ms))
        };
        assert_eq!(told(1500, 1000, 1500), "for 9 ms no answer came");
        assert_eq!(told(1200, 1000, 1500), "for 309 ms no answer came, and then the load ended");
        assert_eq!(told(900, 1000, 1500), "for 500 ms no answer came, and then the load ended");
        assert_eq!(told(1600, 1000, 1500), "for 9 ms no answer came", "answers may come later than the load ends");
    }

    /// A takeover was once told to have taken 86399999.9 ms.
    #[test]
    fn what_is_logged_before_the_kill_was_timed_took_no_time() {
        let (second, little) = (Duration::from_secs(1), Duration::from_micros(100));
        assert_eq!(since(second, second - little), Duration::ZERO);
        assert_eq!(since(little, DAY - little), Duration::ZERO);
    }
}
