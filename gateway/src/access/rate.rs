//! A limit on the rate of requests: a token bucket for each client, in the form of the generic cell rate algorithm
//! (ITU-T I.371, annex A), where a bucket is one instant: when it will be full again.

use std::collections::{BTreeMap, BTreeSet};

use proto::{Span, Timestamp};

/// How many requests a client may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// A request's share of a second.
    interval: Span,
    /// How far in the future a bucket may be full and still hold a request.
    tolerance: Span,
}

impl Rate {
    /// So many requests a second, and `burst` of them at once after a pause. Both are above zero.
    #[must_use]
    pub fn new(per_second: f64, burst: u32) -> Self {
        let interval = Span::from_secs_f64(1.0 / per_second).max(Span(1));
        Self { interval, tolerance: Span(interval.0.saturating_mul(i64::from(burst) - 1)) }
    }
}

/// The buckets of clients that share a limit, each with a bucket of its own. A bucket that is full is not kept.
#[derive(Debug)]
pub struct Limiter<Client> {
    rate: Rate,
    clients_max: usize,
    full_at: BTreeMap<Client, Timestamp>,
    /// The same, soonest first.
    by_time: BTreeSet<(Timestamp, Client)>,
}

impl<Client: Ord + Copy> Limiter<Client> {
    /// Full buckets, of which at most `clients_max` are in use at a time.
    #[must_use]
    pub fn new(rate: Rate, clients_max: usize) -> Self {
        Self { rate, clients_max, full_at: BTreeMap::new(), by_time: BTreeSet::new() }
    }

    /// Takes a request out of the client's bucket.
    ///
    /// # Errors
    /// After how long it is worth another try, if there is none in it, or if there is no room for one more bucket.
    pub fn handle_request(&mut self, now: Timestamp, client: Client) -> Result<(), Span> {
        while let Some(&(at, full)) = self.by_time.first()
            && at <= now
        {
            self.by_time.remove(&(at, full));
            self.full_at.remove(&full);
        }
        let full_at = self.full_at.get(&client).copied();
        if full_at.is_none() && self.full_at.len() >= self.clients_max {
            return Err(self.by_time.first().map_or(Span::ZERO, |(at, _)| *at - now));
        }
        let wait = full_at.unwrap_or(now) - now - self.rate.tolerance;
        if wait > Span::ZERO {
            return Err(wait);
        }
        let next = full_at.unwrap_or(now) + self.rate.interval;
        self.by_time.extend([(next, client)]);
        if let Some(before) = self.full_at.insert(client, next) {
            self.by_time.remove(&(before, client));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Buckets as they are usually described: a level that rises with time up to the burst, in nanoseconds of the rate.
    struct Naive {
        interval: i64,
        burst: i64,
        levels: BTreeMap<u8, (i64, i64)>,
    }

    impl Naive {
        fn handle_request(&mut self, now: i64, client: u8) -> Result<(), i64> {
            let capacity = self.interval * self.burst;
            let (level, at) = self.levels.entry(client).or_insert((capacity, now));
            *level = (*level + (now - *at)).min(capacity);
            *at = now;
            if *level < self.interval {
                return Err(self.interval - *level);
            }
            *level -= self.interval;
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn every_client_has_a_token_bucket_of_its_own(
            per_second in 1u32..2000,
            burst in 1u32..6,
            requests in prop::collection::vec((0i64..2_000_000_000, 0u8..4), 1..200),
            hurry in 1i64..5000,
        ) {
            let rate = Rate::new(per_second.into(), burst);
            let mut limiter = Limiter::new(rate, 4);
            let (interval, burst) = (rate.interval.0, i64::from(burst));
            let mut naive = Naive { interval, burst, levels: BTreeMap::new() };
            let mut now = 0;
            for (later, client) in requests {
                now += later / hurry;
                let found = limiter.handle_request(Timestamp(now), client).map_err(|wait| wait.0);
                prop_assert_eq!(found, naive.handle_request(now, client));
                prop_assert_eq!(limiter.full_at.len(), limiter.by_time.len());
            }
        }
    }

    #[test]
    fn more_clients_than_there_is_room_for_wait_until_one_has_been_quiet() {
        let mut limiter = Limiter::new(Rate::new(10.0, 1), 2);
        let at = |ms: i64| Timestamp(ms * 1_000_000);
        assert_eq!(limiter.handle_request(at(0), 1), Ok(()));
        assert_eq!(limiter.handle_request(at(40), 2), Ok(()));
        assert_eq!(limiter.handle_request(at(50), 3), Err(Span::from_millis(50)));
        assert_eq!(limiter.handle_request(at(100), 3), Ok(()));
        assert_eq!(limiter.by_time.len(), 2);
    }
}
