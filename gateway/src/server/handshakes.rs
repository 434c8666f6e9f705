//! What TLS handshakes may take of the thread that moves packets: half of its time in all, and a quarter for those of
//! one address, however many there are. Connections that are established go on meanwhile.
//!
//! A state machine that takes `now`. A handshake's signature is one piece of work, of 0.1 ms with a key on a curve and
//! of up to 5 ms with RSA, so what one took is paid for afterwards: [`Handshakes::due`] says when the next may go on.

use std::collections::BTreeMap;

use proto::{Span, Timestamp};

use crate::access::Client;

/// What a handshake took counts so many times, for all and for its address.
const TIMES_ALL: i64 = 2;
const TIMES_OWN: i64 = 4;
/// How far ahead of their part of the time they may be.
const BURST: Span = Span::from_millis(5);
/// Addresses beyond which those that have paid are forgotten. Few have not, as all together have half of the time.
const ADDRESSES: usize = 256;

/// What handshakes have taken.
#[derive(Debug)]
pub(crate) struct Handshakes {
    /// When all have paid.
    all: Timestamp,
    /// When those of an address have.
    own: BTreeMap<Client, Timestamp>,
}

impl Default for Handshakes {
    fn default() -> Self {
        Self { all: Timestamp::PAST, own: BTreeMap::new() }
    }
}

impl Handshakes {
    /// When one from there may go on; now, if that has passed.
    pub(crate) fn due(&self, from: Client) -> Timestamp {
        let paid = self.own.get(&from).map_or(self.all, |&own| own.max(self.all));
        if paid == Timestamp::PAST { paid } else { paid - BURST }
    }

    /// One from there went on for so long until now.
    pub(crate) fn handle_work(&mut self, now: Timestamp, from: Client, took: Span) {
        self.all = self.all.max(now) + took * TIMES_ALL;
        if self.own.len() >= ADDRESSES {
            self.own.retain(|_, paid| *paid > now);
        }
        let own = self.own.entry(from).or_insert(now);
        *own = (*own).max(now) + took * TIMES_OWN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> Client {
        Client::at([127, 0, 0, last].into())
    }

    /// Handshakes of these addresses, each as soon as it may, one after another in a second; how many of each.
    fn run(took: Span, addresses: &[u8]) -> Vec<i64> {
        let (mut handshakes, mut now, mut counts) = (Handshakes::default(), Timestamp::ZERO, vec![0; addresses.len()]);
        while now < Timestamp::ZERO + Span::from_millis(1_000) {
            let mut went = false;
            for (count, &address) in counts.iter_mut().zip(addresses) {
                if handshakes.due(at(address)) <= now {
                    now += took;
                    handshakes.handle_work(now, at(address), took);
                    (*count, went) = (*count + 1, true);
                }
            }
            now = if went { now } else { now + Span::from_micros(100) };
        }
        counts
    }

    #[test]
    fn one_address_has_a_quarter_of_the_time_and_all_have_half() {
        for us in [100, 1_000, 5_000] {
            let took = Span::from_micros(us);
            let [one] = run(took, &[1])[..] else { unreachable!() };
            assert!((150_000..=280_000).contains(&(one * us)), "{one} of {us} us");
            let many = run(took, &[1, 2, 3, 4, 5, 6, 7, 8]);
            let all = many.iter().sum::<i64>() * us;
            assert!((300_000..=530_000).contains(&all), "{many:?} of {us} us");
        }
    }

    #[test]
    fn whoever_comes_now_and_then_does_not_wait_for_one_that_floods() {
        let (mut handshakes, took) = (Handshakes::default(), Span::from_millis(4));
        let mut now = Timestamp::ZERO;
        for _ in 0..100 {
            now = now.max(handshakes.due(at(1))) + took;
            handshakes.handle_work(now, at(1), took);
            assert!(handshakes.due(at(2)) <= now + Span::from_millis(4), "the other half of the time is there");
        }
    }

    #[test]
    fn addresses_that_have_paid_are_forgotten() {
        let mut handshakes = Handshakes::default();
        for number in 0..10_000u32 {
            let now = Timestamp::ZERO + Span::from_millis(number.into());
            handshakes.handle_work(now, Client::at(number.to_be_bytes().into()), Span::from_micros(200));
        }
        assert!(handshakes.own.len() <= ADDRESSES);
    }
}
