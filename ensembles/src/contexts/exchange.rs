//! What goes between the contexts of one frontend and a store that several share: increments there, and what all of
//! them came to back. One batch is under way at a time; one of which nobody knows what became of it is sent again under
//! its number, by which the store counts it once. Nobody waits for any of it: whoever asks is told what is known, and
//! how old that is.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use proto::{Span, Timestamp, backoff::Backoff};

use super::{Contexts, Key, Kind, Place};
use crate::selection::Sums;

/// Contexts of one batch: the store is one thread, which a batch keeps for about a millisecond.
const BATCH_MAX: usize = 128;
/// Between two batches, so that what comes at once goes at once.
const GATHER: Span = Span::from_millis(5);
/// How old what is known of a context may be that is used, before it is asked for anew.
const REFRESH: Span = Span::from_millis(500);
/// What is older than that is told as stale.
const CURRENT: Span = Span::from_millis(1_000);
/// Before a batch is sent again.
const AGAIN_FIRST: Span = Span::from_millis(50);
const AGAIN_MAX: Span = Span::from_millis(5_000);

/// What is sent at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Grows with each.
    pub number: u64,
    /// Of different contexts.
    pub items: Vec<Item>,
}

/// What is new in a context.
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Whose context it is.
    pub kind: Arc<Kind>,
    /// What clients call it.
    pub name: Arc<str>,
    /// What is to be added.
    pub sums: Sums,
}

/// What a store knows of a context, after that was added.
#[derive(Debug, Clone, PartialEq)]
pub struct Read {
    /// All that anybody has added.
    pub sums: Sums,
    /// Whether requests were added: a context that has lost nothing yet is not stored.
    pub is_stored: bool,
}

/// Which contexts wait for the store, and what is under way.
#[derive(Debug)]
pub(super) struct Exchange<C> {
    /// By client, in the order in which they came.
    waiting: BTreeMap<C, BTreeMap<u64, Key>>,
    /// Whose turn was last.
    turn: Option<C>,
    /// Of those that wait, so far.
    turns: u64,
    /// Until the store has answered.
    batch: Option<(Arc<Batch>, Vec<Place>)>,
    /// Whether somebody has the batch.
    is_out: bool,
    number: u64,
    not_before: Timestamp,
    again: Backoff,
}

/// What a context is to a store.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// What the store has not been told.
    pub(super) unsent: Sums,
    /// When it was last asked, and when it last answered.
    asked_at: Option<Timestamp>,
    read_at: Option<Timestamp>,
    /// Its place among those that wait.
    waits: Option<u64>,
}

impl Shared {
    /// Whether what is known is as old as that.
    pub(super) fn is_stale(&self, now: Timestamp) -> bool {
        self.read_at.is_none_or(|at| at + CURRENT <= now)
    }
}

impl<C: Copy + Ord> Exchange<C> {
    pub(super) fn new() -> Self {
        let (waiting, again) = (BTreeMap::new(), Backoff::new(AGAIN_FIRST, AGAIN_MAX));
        let not_before = Timestamp(0);
        Self { waiting, turn: None, turns: 0, batch: None, is_out: false, number: 0, not_before, again }
    }

    /// A context is to be exchanged; if it `is_new` what is to be told, at once, and else if it was not lately.
    pub(super) fn want(&mut self, now: Timestamp, client: C, (key, shared): (&Key, &mut Shared), is_new: bool) {
        let is_due = is_new || shared.asked_at.is_none_or(|at| at + REFRESH <= now);
        if is_due && shared.waits.is_none() {
            self.turns += 1;
            shared.waits = Some(self.turns);
            self.waiting.entry(client).or_default().insert(self.turns, key.clone());
        }
    }

    /// A context is forgotten.
    pub(super) fn forget(&mut self, client: C, shared: &Shared) {
        if let Some(turn) = shared.waits {
            self.take(client, turn);
        }
    }

    /// Whose turn it is, of all clients one after another.
    fn next(&mut self) -> Option<(C, Key)> {
        let after = self.turn.map_or(Bound::Unbounded, Bound::Excluded);
        let mut later = self.waiting.range((after, Bound::Unbounded));
        let (client, keys) = later.next().or_else(|| self.waiting.first_key_value())?;
        let (client, turn) = (*client, *keys.first_key_value()?.0);
        self.turn = Some(client);
        Some((client, self.take(client, turn)?))
    }

    fn take(&mut self, client: C, turn: u64) -> Option<Key> {
        let keys = self.waiting.get_mut(&client)?;
        let key = keys.remove(&turn);
        if keys.is_empty() {
            self.waiting.remove(&client);
        }
        key
    }
}

impl<C: Copy + Ord> Contexts<C> {
    /// What is to be sent to the store, of which [`Self::handle_exchanged`] or [`Self::handle_failed`] must be told
    /// what became. `None` while another batch is under way, nothing waits, or the store is to be left alone.
    pub fn poll_batch(&mut self, now: Timestamp) -> Option<Arc<Batch>> {
        let Self { exchange: Some(exchange), entries, .. } = self else { return None };
        if exchange.is_out || now < exchange.not_before {
            return None;
        }
        if exchange.batch.is_none() {
            let (mut items, mut places) = (Vec::new(), Vec::new());
            while items.len() < BATCH_MAX
                && let Some((_, key)) = exchange.next()
            {
                let Some(entry) = entries.get_mut(&key) else { continue };
                let Some(shared) = &mut entry.shared else { continue };
                (shared.waits, shared.asked_at) = (None, Some(now));
                let sums = std::mem::take(&mut shared.unsent);
                items.push(Item { kind: Arc::clone(&entry.kind), name: Arc::clone(&key.1), sums });
                places.push(Place { key, born: entry.born });
            }
            if items.is_empty() {
                return None;
            }
            exchange.number += 1;
            exchange.batch = Some((Arc::new(Batch { number: exchange.number, items }), places));
        }
        exchange.is_out = true;
        exchange.batch.as_ref().map(|(batch, _)| Arc::clone(batch))
    }

    /// When there may be something to be sent; `None` while nothing is to be.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let exchange = self.exchange.as_ref()?;
        let is_due = !exchange.is_out && (exchange.batch.is_some() || !exchange.waiting.is_empty());
        is_due.then_some(exchange.not_before)
    }

    /// The store has answered: of each context of the batch what it knows, or nothing, when it has not taken in what
    /// was new there.
    pub fn handle_exchanged(&mut self, now: Timestamp, known: Vec<Option<Read>>) {
        let Some(exchange) = &mut self.exchange else { return };
        exchange.again.handle_success();
        (exchange.is_out, exchange.not_before) = (false, now + GATHER);
        self.counts.is_silent = false;
        let Some((batch, places)) = exchange.batch.take() else { return };
        for ((item, place), known) in batch.items.iter().zip(&places).zip(known) {
            let losses = item.sums.count();
            let Some(Read { mut sums, is_stored }) = known else {
                self.counts.lost += losses;
                continue;
            };
            self.counts.told += losses;
            let entry = self.entries.get_mut(&place.key).filter(|entry| entry.born == place.born);
            let Some(entry) = entry else { continue };
            let Some(shared) = &mut entry.shared else { continue };
            if !is_stored {
                shared.unsent.requests += item.sums.requests;
            }
            sums.add(&shared.unsent);
            sums.forget(sums.oldest(item.kind.block));
            *entry.learner.sums_mut() = sums;
            shared.read_at = Some(now);
        }
    }

    /// Nobody knows what became of the batch: it is sent again, later each time.
    pub fn handle_failed(&mut self, now: Timestamp) {
        let Some(exchange) = &mut self.exchange else { return };
        (exchange.is_out, exchange.not_before) = (false, exchange.again.handle_failure(now));
        self.counts.is_silent = true;
        self.counts.failures += 1;
    }
}

#[cfg(test)]
mod tests;
