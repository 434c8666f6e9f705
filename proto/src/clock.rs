//! Every instant on the wire is on the scheduler's clock. A peer estimates its own clock's offset from request and
//! reply stamps, and believes the exchange with the least round trip, as NTP does (RFC 5905, section 8).

use wincode::{SchemaRead, SchemaWrite};

use crate::time::{Span, Timestamp};

/// The scheduler's answer to a clock request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct ClockReply {
    /// When the request was sent, on the asker's clock.
    pub sent_at: Timestamp,
    /// When it was taken in, on the scheduler's clock.
    pub received_at: Timestamp,
    /// When the reply was sent, on the scheduler's clock.
    pub replied_at: Timestamp,
}

/// Exchanges that the minimum-round-trip filter looks back on (RFC 5905, section 10, has 8).
const SAMPLES: usize = 8;

/// The offset of the scheduler's clock against ours, and how wrong it can be.
///
/// ```
/// # use proto::{clock::{ClockOffset, ClockReply}, Span, Timestamp};
/// let mut offset = ClockOffset::default();
/// let reply = ClockReply { sent_at: Timestamp(100), received_at: Timestamp(5_110), replied_at: Timestamp(5_120) };
/// offset.handle_reply(Timestamp(130), reply);
/// assert_eq!(offset.to_scheduler(Timestamp(200)), Some(Timestamp(5_200)));
/// assert_eq!(offset.error_bound(), Some(Span(10)));
/// ```
#[derive(Debug, Clone, Default)]
pub struct ClockOffset {
    samples: [Option<Sample>; SAMPLES],
    next: usize,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    offset: Span,
    round_trip: Span,
}

impl ClockOffset {
    /// Takes in a reply that arrived at `now` on our clock. A reply whose stamps run backwards is ignored.
    pub fn handle_reply(&mut self, now: Timestamp, reply: ClockReply) {
        let round_trip = (now - reply.sent_at) - (reply.replied_at - reply.received_at);
        if round_trip < Span::ZERO || reply.replied_at < reply.received_at {
            return;
        }
        // RFC 5905, section 8: theta = ((T2 - T1) + (T3 - T4)) / 2. Halved first, so that the sum cannot overflow.
        let there = reply.received_at - reply.sent_at;
        let back = reply.replied_at - now;
        let offset = Span((i128::midpoint(i128::from(there.0), i128::from(back.0))) as i64);
        self.samples[self.next] = Some(Sample { offset, round_trip });
        self.next = (self.next + 1) % SAMPLES;
    }

    /// An instant of our clock on the scheduler's; `None` before the first reply.
    #[must_use]
    pub fn to_scheduler(&self, local: Timestamp) -> Option<Timestamp> {
        Some(local + self.best()?.offset)
    }

    /// An instant of the scheduler's clock on ours; `None` before the first reply.
    #[must_use]
    pub fn to_local(&self, scheduler: Timestamp) -> Option<Timestamp> {
        Some(scheduler - self.best()?.offset)
    }

    /// The estimate is at most this wrong, drift since the exchange aside: half its round trip.
    #[must_use]
    pub fn error_bound(&self) -> Option<Span> {
        Some(self.best()?.round_trip / 2)
    }

    fn best(&self) -> Option<Sample> {
        self.samples.iter().flatten().copied().min_by_key(|sample| sample.round_trip)
    }
}

/// Requests in quick succession at first, so that the least of their round trips is a good one.
const BURST: u32 = SAMPLES as u32;
/// The time between those.
const BURST_INTERVAL: Span = Span::from_millis(5);
/// The time between requests later.
const INTERVAL: Span = Span::from_millis(1_000);

/// A member's side of one connection to the scheduler: when to ask for its clock, and what the answers say. `Default`
/// asks nothing yet; life begins with [`Self::start`], and a new connection begins a new one, since another scheduler
/// has another clock.
///
/// ```
/// # use proto::{clock::{ClockReply, ClockSync}, Timestamp};
/// let now = Timestamp(100);
/// let mut clock = ClockSync::start(now);
/// assert_eq!(clock.poll_request(now), Some(now));
/// // .. sends a ClockRequest with that stamp; the reply arrives:
/// let reply = ClockReply { sent_at: now, received_at: Timestamp(5_110), replied_at: Timestamp(5_120) };
/// clock.handle_reply(Timestamp(130), reply);
/// assert_eq!(clock.offset().to_scheduler(Timestamp(200)), Some(Timestamp(5_200)));
/// assert_eq!(clock.poll_request(Timestamp(130)), None, "the next one is not due yet");
/// ```
#[derive(Debug, Clone)]
pub struct ClockSync {
    offset: ClockOffset,
    requests: u32,
    request_at: Timestamp,
}

impl Default for ClockSync {
    fn default() -> Self {
        Self { offset: ClockOffset::default(), requests: 0, request_at: Timestamp::NEVER }
    }
}

impl ClockSync {
    /// The member has just joined: the first request is due.
    #[must_use]
    pub fn start(now: Timestamp) -> Self {
        Self { request_at: now, ..Self::default() }
    }

    /// A reply arrived at `now` on our clock.
    pub fn handle_reply(&mut self, now: Timestamp, reply: ClockReply) {
        self.offset.handle_reply(now, reply);
    }

    /// The stamp (`sent_at`) of a request that is due. It is to leave at once: time spent in a queue would count as a
    /// round trip.
    #[must_use]
    pub fn poll_request(&mut self, now: Timestamp) -> Option<Timestamp> {
        if now < self.request_at {
            return None;
        }
        self.requests = self.requests.saturating_add(1);
        self.request_at = now + if self.requests < BURST { BURST_INTERVAL } else { INTERVAL };
        Some(now)
    }

    /// When [`Self::poll_request`] has one; [`Timestamp::NEVER`] before [`Self::start`].
    #[must_use]
    pub const fn poll_timeout(&self) -> Timestamp {
        self.request_at
    }

    /// What is known so far.
    #[must_use]
    pub const fn offset(&self) -> &ClockOffset {
        &self.offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the two ways cost, the estimate is never further off than its error bound.
        #[test]
        fn the_bound_holds(
            true_offset in -1_000_000_000_000i64..1_000_000_000_000,
            exchanges in proptest::collection::vec((0i64..1_000_000, 0i64..1_000_000, 0i64..10_000), 1..20),
        ) {
            let mut clock = ClockOffset::default();
            let mut local = 0;
            for (there, back, held) in exchanges {
                let received = local + there + true_offset;
                let reply = ClockReply {
                    sent_at: Timestamp(local),
                    received_at: Timestamp(received),
                    replied_at: Timestamp(received + held),
                };
                local += there + held + back;
                clock.handle_reply(Timestamp(local), reply);
            }
            let estimate = clock.to_scheduler(Timestamp(0)).unwrap().0;
            prop_assert!((estimate - true_offset).abs() <= clock.error_bound().unwrap().0 + 1);
        }
    }

    #[test]
    fn stamps_that_run_backwards_are_ignored() {
        let mut clock = ClockOffset::default();
        let reply = ClockReply { sent_at: Timestamp(100), received_at: Timestamp(50), replied_at: Timestamp(40) };
        clock.handle_reply(Timestamp(110), reply);
        clock.handle_reply(Timestamp(90), ClockReply { replied_at: Timestamp(60), ..reply });
        assert_eq!(clock.to_scheduler(Timestamp(0)), None);
    }

    #[test]
    fn a_burst_of_requests_then_one_a_second() {
        let mut clock = ClockSync::start(Timestamp(7));
        let mut stamps = Vec::new();
        while stamps.len() < 11 {
            let due = clock.poll_timeout();
            assert_eq!(clock.poll_request(due - Span(1)), None);
            stamps.extend(clock.poll_request(due));
        }
        let waits: Vec<_> = stamps.windows(2).map(|pair| (pair[1] - pair[0]).as_millis_f64()).collect();
        assert_eq!(waits, [5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 1000.0, 1000.0, 1000.0]);
    }

    #[test]
    fn a_member_that_was_late_asks_once() {
        let mut clock = ClockSync::start(Timestamp(0));
        let late = Timestamp(0) + Span::from_millis(60_000);
        assert_eq!(clock.poll_request(late), Some(late));
        assert_eq!(clock.poll_request(late), None);
    }

    #[test]
    fn who_has_not_joined_asks_nothing() {
        let mut clock = ClockSync::default();
        assert_eq!((clock.poll_request(Timestamp(i64::MAX - 1)), clock.poll_timeout()), (None, Timestamp::NEVER));
        assert_eq!(clock.offset().error_bound(), None);
    }
}
