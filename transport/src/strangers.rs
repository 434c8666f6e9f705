//! Who has connected and not proved itself yet: a pool of its own, small, and shared fairly among addresses. No IO.
//!
//! A stranger is let in, and leaves when it has proved itself, when it has failed to, when its time is over, or when it
//! has to make room: once the pool is full, each one that comes takes the place of the oldest of whichever address has
//! the most there. So whoever floods us pushes out himself, however fast, and a member's few connections stay for as
//! long as a handshake takes. An address is an IPv4 address or an IPv6 /64, of which one host has as many as it likes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
};

use proto::{Span, Timestamp};

/// Strangers at once. With 500 a second from an address that a member shares, each has half a second.
pub(crate) const STRANGERS_MAX: usize = 256;

/// The pool, with what its owner keeps of each stranger. Numbers count up from 1 and are not used again.
#[derive(Debug)]
pub(crate) struct Strangers<T> {
    most: usize,
    patience: Span,
    next: u64,
    /// By number, which is also the order of their coming.
    all: BTreeMap<u64, Stranger<T>>,
    /// Their numbers by address; none is empty.
    by_address: BTreeMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Stranger<T> {
    address: IpAddr,
    until: Timestamp,
    kept: T,
}

impl<T> Strangers<T> {
    /// A pool for `most` at once, at least 1, each of which has `patience` to prove itself.
    pub(crate) fn new(most: usize, patience: Span) -> Self {
        Self { most: most.max(1), patience, next: 1, all: BTreeMap::new(), by_address: BTreeMap::new() }
    }

    /// Lets one in. Yields its number, and whom it took the place of.
    pub(crate) fn admit(&mut self, now: Timestamp, from: IpAddr, kept: T) -> (u64, Option<T>) {
        let address = share_of(from);
        let number = self.next;
        self.next += 1;
        self.by_address.entry(address).or_default().insert(number);
        self.all.insert(number, Stranger { address, until: now + self.patience, kept });
        let evicted = (self.all.len() > self.most).then(|| self.oldest_of_the_busiest()).flatten();
        (number, evicted.and_then(|number| self.remove(number)))
    }

    /// Of equally busy addresses, the one whose oldest stranger came first.
    fn oldest_of_the_busiest(&self) -> Option<u64> {
        let oldest = self.by_address.values().filter_map(|numbers| Some((numbers.len(), *numbers.first()?)));
        oldest.max_by_key(|&(count, first)| (count, std::cmp::Reverse(first))).map(|(_, first)| first)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        Some(&mut self.all.get_mut(&number)?.kept)
    }

    /// One has proved itself, or never will.
    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let Stranger { address, kept, .. } = self.all.remove(&number)?;
        if let Some(numbers) = self.by_address.get_mut(&address) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_address.remove(&address);
            }
        }
        Some(kept)
    }

    /// The next one whose time is over; it is removed.
    pub(crate) fn poll_overdue(&mut self, now: Timestamp) -> Option<T> {
        let number =
            self.all.first_key_value().filter(|(_, stranger)| stranger.until <= now).map(|(&number, _)| number);
        self.remove(number?)
    }

    /// When [`Self::poll_overdue`] has one: all have the same time, so the oldest is the first.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        Some(self.all.first_key_value()?.1.until)
    }
}

/// Whose share an address counts towards, of this pool or of anything else that strangers take up.
#[must_use]
pub fn share_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests;
