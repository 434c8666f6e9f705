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
}
