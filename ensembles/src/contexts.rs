//! What a policy has learned in each context, such as a user or a session (Clipper, section 5.3), in bounded memory.
//!
//! A context begins as its ensemble did, with equal weights (Clipper's `init`): its state is then no more than the sums
//! of its own losses, which may come in any order, and nobody has to agree on a start. It lives from the first request
//! that names it until it makes room for others. Whoever takes the most room gives up what it has used least lately,
//! so a client that names ever new contexts forgets its own, and no other client's. Contexts have one name for all
//! clients; the one who came with a context first is charged for it.
//!
//! Several frontends may share what they learn by a store ([`exchange`]): then what is kept here is what the store knew
//! when it was last asked, and what has come since. No IO, no clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
};

use proto::Timestamp;

use self::exchange::{Exchange, Shared};
use crate::selection::{BLOCKS, Choice, Learner, Unheard};

pub use self::exchange::{Batch, Item, Read};

mod exchange;

/// The longest name of a context.
pub const NAME_BYTES_MAX: usize = 64;
/// What a context takes besides its name and its sums.
const ENTRY_BYTES: usize = 512;

/// All contexts of all ensembles, of clients that are told apart by `C`.
#[derive(Debug)]
pub struct Contexts<C> {
    bytes_max: usize,
    entries: BTreeMap<Key, Entry<C>>,
    /// Of clients who have any.
    owned: BTreeMap<C, Owned>,
    /// The same, by how much room they take.
    by_bytes: BTreeSet<(usize, C)>,
    /// Uses of contexts so far.
    uses: u64,
    /// If there is a store.
    exchange: Option<Exchange<C>>,
    counts: Counts,
}

/// How many contexts there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Those that are kept.
    pub kept: u64,
    /// What they take.
    pub bytes: usize,
    /// Those that had to make room.
    pub forgotten: u64,
    /// Requests for whose context there was no room.
    pub refused: u64,
    /// Requests that were answered with what had been known of their context for long.
    pub stale: u64,
    /// Losses of members that the store has taken in, and those that it never will: it could not, or what waited for it
    /// was forgotten.
    pub told: u64,
    /// As above.
    pub lost: u64,
    /// How often the store did not answer.
    pub failures: u64,
    /// Whether it did not the last time.
    pub is_silent: bool,
}

/// Whose contexts they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// Tells this load of an ensemble from all others.
    pub load: u64,
    /// What a store calls it; the same of each frontend, and another one of each ensemble that learns otherwise.
    pub key: String,
    /// Models that it selects from.
    pub members: usize,
    /// Requests of a block of its windows.
    pub block: u64,
}

/// The load, and the name.
type Key = (u64, Arc<str>);

/// A context that a request was in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    key: Key,
    /// Tells it from one of that name that was forgotten.
    born: u64,
}

#[derive(Debug)]
struct Entry<C> {
    /// Whose room it takes.
    client: C,
    bytes: usize,
    born: u64,
    /// Its place in the order of its client's.
    used: u64,
    kind: Arc<Kind>,
    learner: Learner,
    /// If there is a store.
    shared: Option<Shared>,
}

/// Whom a request asks.
#[derive(Debug, Clone, PartialEq)]
pub struct Selected {
    /// Whom.
    pub choice: Choice,
    /// Where its feedback goes.
    pub place: Place,
    /// Whether what other frontends have learned of late may be missing.
    pub is_stale: bool,
}

/// What one client came with.
#[derive(Debug, Default)]
struct Owned {
    bytes: usize,
    /// Those that were not used for the longest time first.
    by_use: BTreeMap<u64, Key>,
}

impl Place {
    /// What it takes to remember it.
    #[must_use]
    pub fn bytes(&self) -> usize {
        mem::size_of::<Self>() + self.key.1.len()
    }
}

impl<C: Copy + Ord> Contexts<C> {
    /// None yet, which may take so many bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let (entries, owned, by_bytes) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { bytes_max, entries, owned, by_bytes, uses: 0, exchange: None, counts: Counts::default() }
    }

    /// From now on new ones are exchanged with a store.
    pub fn share(&mut self) {
        self.exchange = Some(Exchange::new());
    }

    /// How many there are.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Whom a client's next request in this context asks; a new context begins with what is `fresh`. `None` if there is
    /// no room for it.
    pub fn select(
        &mut self,
        (now, client): (Timestamp, C),
        (kind, name): (&Arc<Kind>, &Arc<str>),
        fresh: impl FnOnce() -> Learner,
    ) -> Option<Selected> {
        let key = (kind.load, Arc::clone(name));
        self.uses += 1;
        if !self.entries.contains_key(&key) && !self.insert(client, &key, kind, fresh) {
            self.counts.refused += 1;
            return None;
        }
        let entry = self.entries.get_mut(&key).expect("it was there, or has been put there");
        let owned = self.owned.get_mut(&entry.client).expect("it owns this one");
        owned.by_use.remove(&entry.used);
        owned.by_use.insert(self.uses, key.clone());
        entry.used = self.uses;
        let choice = entry.learner.select();
        let mut is_stale = false;
        if let (Some(shared), Some(exchange)) = (&mut entry.shared, &mut self.exchange) {
            shared.unsent.requests += 1;
            exchange.want(now, entry.client, (&key, shared), false);
            is_stale = shared.is_stale(now);
            self.counts.stale += u64::from(is_stale);
        }
        Some(Selected { choice, place: Place { key, born: entry.born }, is_stale })
    }

    /// What members lost in a request of this context, as [`Learner::observe`]; it is old once the context is
    /// forgotten.
    ///
    /// # Errors
    /// If that does not count.
    pub fn observe(
        &mut self,
        now: Timestamp,
        place: &Place,
        (request, probability): (u64, f64),
        losses: &[Option<f64>],
    ) -> Result<(), Unheard> {
        let entry = self.entries.get_mut(&place.key).filter(|entry| entry.born == place.born).ok_or(Unheard::Old)?;
        let (Some(shared), Some(exchange)) = (&mut entry.shared, &mut self.exchange) else {
            return entry.learner.observe(request, probability, losses);
        };
        // A store that has forgotten counts requests anew.
        let request = request.min(entry.learner.sums().requests.saturating_sub(1));
        let lost = entry.learner.lost(request, probability, losses)?;
        entry.learner.sums_mut().add(&lost);
        shared.unsent.add(&lost);
        // While nothing can be sent, what is too old to count makes room.
        let oldest = entry.learner.sums().oldest(entry.kind.block);
        let before = shared.unsent.count();
        shared.unsent.forget(oldest);
        self.counts.lost += before - shared.unsent.count();
        exchange.want(now, entry.client, (&place.key, shared), true);
        Ok(())
    }

    /// How much each member counts in a context that is kept.
    #[must_use]
    pub fn weights(&self, kind: &Kind, name: &Arc<str>) -> Option<Vec<f64>> {
        Some(self.entries.get(&(kind.load, Arc::clone(name)))?.learner.weights())
    }

    /// Makes a context, and room for it; whether there is any.
    fn insert(&mut self, client: C, key: &Key, kind: &Arc<Kind>, fresh: impl FnOnce() -> Learner) -> bool {
        let shared = self.exchange.as_ref().map(|_| Shared::default());
        let bytes = bytes_of(key, kind, shared.is_some());
        if bytes > self.bytes_max {
            return false;
        }
        let learner = fresh().seeded(number_of(&key.1));
        let (born, used, kind) = (self.uses, self.uses, Arc::clone(kind));
        let entry = Entry { client, bytes, born, used, kind, learner, shared };
        self.entries.insert(key.clone(), entry);
        self.owned.entry(client).or_default().by_use.insert(self.uses, key.clone());
        self.resize(client, |owned| owned + bytes);
        while self.counts.bytes > self.bytes_max {
            let (_, largest) = self.by_bytes.last().copied().expect("somebody takes the room");
            let (_, oldest) = self.owned[&largest].by_use.first_key_value().expect("with something");
            let oldest = oldest.clone();
            self.remove(&oldest);
            self.counts.forgotten += u64::from(oldest != *key);
        }
        self.counts.kept = self.entries.len() as u64;
        self.entries.contains_key(key)
    }

    fn remove(&mut self, key: &Key) {
        let Some(Entry { client, bytes, used, shared, .. }) = self.entries.remove(key) else { return };
        if let (Some(shared), Some(exchange)) = (&shared, &mut self.exchange) {
            exchange.forget(client, shared);
            self.counts.lost += shared.unsent.count();
        }
        if let Some(owned) = self.owned.get_mut(&client) {
            owned.by_use.remove(&used);
        }
        self.resize(client, |owned| owned - bytes);
    }

    /// A client takes so much now.
    fn resize(&mut self, client: C, to: impl FnOnce(usize) -> usize) {
        let owned = self.owned.entry(client).or_default();
        let (before, now) = (owned.bytes, to(owned.bytes));
        owned.bytes = now;
        self.counts.bytes = self.counts.bytes - before + now;
        self.by_bytes.remove(&(before, client));
        if owned.by_use.is_empty() {
            self.owned.remove(&client);
        } else {
            self.by_bytes.insert((now, client));
        }
    }
}

/// As much as it can ever take.
fn bytes_of((_, name): &Key, kind: &Kind, is_shared: bool) -> usize {
    // A block has its place in a map, and two numbers for each member.
    let block = 64 + kind.members * mem::size_of::<(f64, u64)>();
    // What is known, what is to be sent, and what is under way.
    let sums = if is_shared { 3 } else { 1 };
    ENTRY_BYTES + name.len() + sums * (BLOCKS as usize + 1) * block
}

/// A text as a number (FNV-1a), which is the same in each frontend and release. So contexts do not all draw the same
/// members first, and a store tells ensembles apart that learn otherwise.
#[must_use]
pub fn number_of(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests;
