//! When an answer is overdue: the two timers of a requester.
//!
//! The acknowledgement timeout of the connection (IBTA 9.7.6.1.3) costs a retry and sends everything again. Long
//! before, a probe repeats one packet, so that the peer shows what it lacks: the tail loss probe of RFC 8985, section
//! 7. Without it, whoever loses the last packet of a message, or of an answer, waits for the whole timeout. The delay
//! of a probe is the retransmission timeout of RFC 6298, section 2, over round trips that were measured on packets sent
//! once (Karn's algorithm, section 3). It doubles with each probe and stays so until a new round trip is measured
//! (section 5.7), so that a peer that is merely slow is not flooded. Where the peer may take its time with the
//! acknowledgement, a probe comes that much later, as in QUIC (RFC 9002, section 6.2.1).

use std::time::Duration;

use crate::{config::QueuePairConfig, time::Timestamp, wire::Psn};

/// The least delay of a probe: on a machine with fewer cores than busy threads, a peer is often away that long.
const PROBE_DELAY_MIN_NANOS: u64 = 1_000_000;
/// A delay doubles at most this often.
const BACKOFF_SHIFT_MAX: u32 = 7;

/// What to do about silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overdue {
    /// Repeat the packet that was sent last, if its answer shows what is missing before it.
    ProbeLast,
    /// Repeat the oldest without an answer: a peer that has reported a gap once is silent until that one comes.
    ProbeOldest,
    /// Send everything again.
    Timeout,
    /// Give up.
    RetriesExceeded,
}

/// Smoothed round trip and its variation (RFC 6298, section 2), in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RoundTrip {
    smoothed: u64,
    variation: u64,
}

impl RoundTrip {
    const fn first(sample: u64) -> Self {
        Self { smoothed: sample, variation: sample / 2 }
    }

    const fn update(self, sample: u64) -> Self {
        let variation = self.variation - self.variation / 4 + self.smoothed.abs_diff(sample) / 4;
        Self { smoothed: self.smoothed - self.smoothed / 8 + sample / 8, variation }
    }

    fn timeout(self) -> u64 {
        self.smoothed.saturating_add(self.variation.saturating_mul(4)).max(PROBE_DELAY_MIN_NANOS)
    }
}

/// The timers, and what they are set by.
#[derive(Debug)]
pub(crate) struct LossTimer {
    /// The acknowledgement timeout in nanoseconds; `None`: never.
    timeout: Option<u64>,
    retries_max: u32,
    retransmit_at: Option<Timestamp>,
    probe_at: Option<Timestamp>,
    /// Timeouts since progress was made.
    retries: u32,
    /// Probes since progress was made.
    probes: u32,
    /// Probes since a round trip was measured.
    backoff: u32,
    round_trip: Option<RoundTrip>,
    /// The packet that is being timed: its answer must acknowledge this number.
    timed: Option<(Psn, Timestamp)>,
    /// One past the last packet that the peer must answer at once.
    asked: Psn,
    /// How long it may wait with the acknowledgement of others.
    ack_delay: Duration,
}

impl LossTimer {
    pub(crate) fn new(config: &QueuePairConfig) -> Self {
        let exponent = config.ack_timeout;
        Self {
            timeout: (exponent > 0).then_some(4_096 << exponent),
            retries_max: config.retry_count.into(),
            retransmit_at: None,
            probe_at: None,
            retries: 0,
            probes: 0,
            backoff: 0,
            round_trip: None,
            timed: None,
            asked: Psn::default(),
            ack_delay: Duration::ZERO,
        }
    }

    /// Numbers begin here, and the peer acknowledges what does not ask for it within `ack_delay`.
    pub(crate) const fn connect(&mut self, first: Psn, ack_delay: Duration) {
        (self.asked, self.ack_delay) = (first, ack_delay);
    }

    /// Whether the next packet should ask, as no round trip is known, or none since an answer was late.
    pub(crate) const fn wants_round_trip(&self) -> bool {
        self.timed.is_none() && (self.round_trip.is_none() || self.backoff > 0)
    }

    /// A packet goes out that the peer must answer at once. If it is the first time, its round trip can be measured.
    pub(crate) fn ask(&mut self, psn: Psn, end: Psn, is_first: bool, now: Timestamp) {
        self.asked = end;
        if is_first {
            self.timed.get_or_insert((psn, now));
        }
    }

    /// Something goes out, and `oldest` is the first without an answer: the timers run from now, unless they do
    /// already.
    pub(crate) fn start(&mut self, now: Timestamp, oldest: Psn) {
        if self.retransmit_at.is_none() {
            self.restart(now, oldest);
        }
    }

    /// Everything before `acknowledged` is answered; whether there is more to wait for.
    pub(crate) fn on_progress(&mut self, now: Timestamp, acknowledged: Psn, outstanding: bool) {
        if let Some((_, sent_at)) = self.timed.take_if(|(psn, _)| psn.is_before(acknowledged)) {
            let sample = now.0.saturating_sub(sent_at.0);
            self.round_trip = Some(self.round_trip.map_or(RoundTrip::first(sample), |known| known.update(sample)));
            self.backoff = 0;
        }
        (self.retries, self.probes) = (0, 0);
        if outstanding {
            self.restart(now, acknowledged);
        } else {
            self.pause();
        }
    }

    /// Everything from `oldest` on is sent again: no answer tells any more which of its packets it answers.
    pub(crate) fn on_repeat(&mut self, now: Timestamp, oldest: Psn) {
        self.timed = None;
        self.restart(now, oldest);
    }

    /// Nothing is waited for, or nothing is sent.
    pub(crate) fn stop(&mut self) {
        self.timed = None;
        self.pause();
    }

    const fn pause(&mut self) {
        (self.retransmit_at, self.probe_at) = (None, None);
    }

    fn restart(&mut self, now: Timestamp, oldest: Psn) {
        self.retransmit_at = self.timeout.map(|delay| doubled(now, delay, self.retries));
        let may_be_late = !oldest.is_before(self.asked);
        let from = if may_be_late { now + self.ack_delay } else { now };
        self.probe_at = self.round_trip.map(|known| doubled(from, known.timeout(), self.backoff));
    }

    /// When [`Self::handle_timeout`] has something to do. Probes are for the time before the timeout.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.retransmit_at.map(|at| self.probe_at.map_or(at, |probe_at| at.min(probe_at)))
    }

    pub(crate) fn handle_timeout(&mut self, now: Timestamp) -> Option<Overdue> {
        let retransmit_at = self.retransmit_at?;
        if retransmit_at <= now {
            if self.retries >= self.retries_max {
                return Some(Overdue::RetriesExceeded);
            }
            self.retries += 1;
            return Some(Overdue::Timeout);
        }
        self.probe_at.filter(|at| *at <= now)?;
        let probe = if self.probes.is_multiple_of(2) { Overdue::ProbeLast } else { Overdue::ProbeOldest };
        self.probes += 1;
        self.backoff += 1;
        self.timed = None;
        let known = self.round_trip?;
        self.probe_at = Some(doubled(now, known.timeout(), self.backoff));
        Some(probe)
    }
}

/// `delay` nanoseconds from now, doubled so often.
fn doubled(now: Timestamp, delay: u64, times: u32) -> Timestamp {
    Timestamp(now.0.saturating_add(delay.saturating_mul(1 << times.min(BACKOFF_SHIFT_MAX))))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TIMEOUT: Duration = Duration::from_nanos(4_096 << 11);

    fn timer() -> LossTimer {
        LossTimer::new(&QueuePairConfig { ack_timeout: 11, retry_count: 1, ..QueuePairConfig::default() })
    }

    fn at(micros: u64) -> Timestamp {
        Timestamp(micros * 1_000)
    }

    /// One packet is sent at `from` and answered after `round_trip`.
    fn exchange(timer: &mut LossTimer, from: u64, round_trip: u64) {
        timer.ask(Psn::new(0), Psn::new(1), true, at(from));
        timer.start(at(from), Psn::new(0));
        timer.on_progress(at(from + round_trip), Psn::new(1), false);
        assert_eq!(timer.poll_timeout(), None);
    }

    #[test]
    fn nothing_is_probed_before_a_round_trip_is_known() {
        let mut timer = timer();
        timer.start(at(0), Psn::new(1));
        assert_eq!(timer.poll_timeout(), Some(at(0) + TIMEOUT));
        assert_eq!(timer.handle_timeout(at(8_000)), None);
        assert_eq!(timer.handle_timeout(at(0) + TIMEOUT), Some(Overdue::Timeout));
        timer.on_repeat(at(0) + TIMEOUT, Psn::new(0));
        assert_eq!(timer.poll_timeout(), Some(at(0) + TIMEOUT * 3), "twice the timeout, from now");
        assert_eq!(timer.handle_timeout(at(0) + TIMEOUT * 3), Some(Overdue::RetriesExceeded));
    }

    #[test]
    fn probes_alternate_double_and_end_at_the_timeout() {
        let mut timer = timer();
        exchange(&mut timer, 0, 50);
        timer.start(at(1_000), Psn::new(1));
        for (due, probe) in [(2_000, Overdue::ProbeLast), (4_000, Overdue::ProbeOldest), (8_000, Overdue::ProbeLast)] {
            assert_eq!(timer.poll_timeout(), Some(at(due)));
            assert_eq!(timer.handle_timeout(at(due)), Some(probe));
        }
        assert_eq!(timer.poll_timeout(), Some(at(1_000) + TIMEOUT), "probes leave the timeout alone");
        assert_eq!(timer.handle_timeout(at(1_000) + TIMEOUT), Some(Overdue::Timeout));
    }

    #[test]
    fn the_delay_follows_the_round_trip() {
        let mut timer = timer();
        exchange(&mut timer, 0, 1_000);
        // RFC 6298: 1000 + 4 * 500, then 7/8 * 1000 + 1/8 * 2000 + 4 * (3/4 * 500 + 1/4 * 1000).
        timer.start(at(0), Psn::new(1));
        assert_eq!(timer.poll_timeout(), Some(at(3_000)));
        timer.stop();
        exchange(&mut timer, 0, 2_000);
        timer.start(at(0), Psn::new(1));
        assert_eq!(timer.poll_timeout(), Some(at(1_125 + 4 * 625)));
    }

    #[test]
    fn what_was_repeated_is_not_measured_and_the_delay_stays_doubled() {
        let mut timer = timer();
        exchange(&mut timer, 0, 50);
        timer.ask(Psn::new(1), Psn::new(2), true, at(0));
        timer.start(at(0), Psn::new(1));
        assert_eq!(timer.handle_timeout(at(1_000)), Some(Overdue::ProbeLast));
        timer.on_progress(at(1_500), Psn::new(2), true);
        assert_eq!(timer.poll_timeout(), Some(at(3_500)), "a slow peer answers too, and would be probed for ever");
        timer.stop();
        exchange(&mut timer, 5_000, 50);
        timer.start(at(6_000), Psn::new(1));
        assert_eq!(timer.poll_timeout(), Some(at(7_000)));
    }

    #[test]
    fn what_does_not_ask_may_be_answered_later() {
        let mut timer = timer();
        timer.connect(Psn::new(0), Duration::from_millis(1));
        assert!(timer.wants_round_trip());
        exchange(&mut timer, 0, 50);
        assert!(!timer.wants_round_trip());
        timer.start(at(1_000), Psn::new(1));
        assert_eq!(timer.poll_timeout(), Some(at(3_000)), "a millisecond later than one that asks");
        timer.ask(Psn::new(2), Psn::new(3), true, at(1_500));
        timer.on_progress(at(1_600), Psn::new(2), true);
        assert_eq!(timer.poll_timeout(), Some(at(2_600)));
        timer.on_progress(at(1_700), Psn::new(3), true);
        assert_eq!(timer.poll_timeout(), Some(at(3_700)));
        assert_eq!(timer.handle_timeout(at(3_700)), Some(Overdue::ProbeLast));
        assert!(timer.wants_round_trip(), "the delay is doubled until one is known");
    }
}
