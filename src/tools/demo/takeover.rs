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

    /// What came of it, in one line.
    pub(super) fn line(&self, cluster: &Cluster, tallies: &[Tally]) -> String {
        let mut answered = Answered::default();
        tallies.iter().for_each(|tally| answered.add(&tally.answered));
        let pause_ms = answered.longest_pause(self.at, self.at + LOOK).as_millis();
        let logs = cluster.scheduler_logs();
        let next = reigns(&logs).filter(|reign| Some(reign.epoch) > self.epoch).min_by_key(|reign| reign.epoch);
        let Some(Reign { epoch: (number, index), time_of_day, took }) = next else {
            return format!("takeover: no scheduler's log tells of it; for {pause_ms} ms no answer came");
        };
        let waited_ms = since(self.time_of_day, time_of_day).as_secs_f64() * 1e3;
        format!(
            "takeover: {waited_ms:.1} ms from the kill until all members obeyed the next primary ({}, epoch \
             {number}.{index}), the last {took} of them since it claimed the epoch; for {pause_ms} ms no answer came",
            cluster.scheduler_name(index)
        )
    }
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

/// Between two times of day, of which the second may be on the next one.
fn since(from: Duration, until: Duration) -> Duration {
    until.checked_sub(from).unwrap_or_else(|| (until + DAY).saturating_sub(from))
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
}
