//! What clients ask of each model and what becomes of it, in the last seconds: `GET /v2/traffic` at a frontend's
//! `[admin] http`, in pages of bounded size, for [the page](admin) that browsers show.
//!
//! Counts are read where they are, on the listener's thread: the thread that moves packets has nothing to do with it.
//! They are compared with those of some seconds ago, which are kept once for all who look. Who comes after a while in
//! which nobody has looked is told no rates until a second is over.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::BTreeMap,
    mem,
    sync::{Arc, PoisonError, atomic::Ordering::Relaxed},
};

use admin::Query;
use proto::{Span, Timestamp};
use serde::Serialize;

use super::{
    counts::{Count, Counts, DURATION_BOUNDS_NS, quantile_ns},
    models::{Known, Told},
};

/// Where it is told.
pub(crate) const PATH: &str = "/v2/traffic";
/// Models of one page, if the query does not say it, and at most.
const ROWS: usize = 25;
const ROWS_MAX: usize = 100;
/// While somebody looks all the time, rates are of half of that at least, once that is over, and of little more than
/// that at most. If nobody has looked for as long, what was read is forgotten.
const WINDOW_MAX: Span = Span::from_millis(6_000);
/// Counts are read again after so long: rates of less are not told.
const WINDOW_MIN: Span = Span::from_millis(1_000);
/// Dropped for reasons that are the client's: neither an alert nor this counts them as missed.
const CLIENTS_REASONS: [&str; 3] = ["cancelled", "never_met", "unloaded"];
const ORDERS: [&str; 3] = ["rate", "missed", "name"];

/// One page.
#[derive(Debug, Serialize)]
struct TrafficPage<'a> {
    page: usize,
    pages: usize,
    /// How operators call the frontend.
    frontend: &'a str,
    /// What rates are of; 0 if there are none yet.
    window_ms: u64,
    /// Models that are served, and those of them that have had a request.
    models: usize,
    asked: usize,
    all: Rates,
    rows: Vec<Row<'a>>,
}

/// Of a model.
#[derive(Debug, Serialize)]
struct Row<'a> {
    name: &'a str,
    version: &'a str,
    /// Of a request that names none.
    objective_ms: Option<f64>,
    #[serde(flatten)]
    rates: Rates,
}

/// What happened in the window: in a second each, rounded to a thousandth.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
struct Rates {
    /// Requests that ended, answered or not.
    requests: f64,
    /// Those that were answered in time.
    good: f64,
    /// Those that were answered late.
    late: f64,
    /// Those that were late, or dropped for a reason that is not the client's.
    missed: f64,
    /// Those that were dropped, by reason.
    dropped: BTreeMap<&'static str, f64>,
    /// From admission to answer.
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    /// Tasks in the batch of an answered request.
    batch: Option<f64>,
}

/// What was counted of a model until some moment, or in a window.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Tally {
    pub(super) success: u64,
    pub(super) late: u64,
    pub(super) failures: u64,
    pub(super) dropped: BTreeMap<&'static str, u64>,
    /// Answered requests by how long they took, in the order of their bounds; those beyond come last.
    pub(super) took: [u64; DURATION_BOUNDS_NS.len() + 1],
    pub(super) batches: u64,
    pub(super) batch_tasks: u64,
}

/// Tells of the traffic, page by page.
pub(crate) struct Traffic {
    told: Told,
    frontend: String,
    window: RefCell<Window>,
}

/// Two readings of all models: rates are of what came since the first.
#[derive(Default)]
struct Window {
    since: Option<Reading>,
    middle: Option<Reading>,
    newest: Option<Reading>,
}

/// All counts at a moment.
struct Reading {
    at: Timestamp,
    /// By index in the model table. A version that is served in another one's place is another model.
    models: Arc<Vec<(Arc<Known>, Tally)>>,
}

impl Window {
    /// Reads if the newest reading is too old to be told.
    fn turn(&mut self, now: Timestamp, read: impl FnOnce() -> Vec<(Arc<Known>, Tally)>) {
        let age = self.newest.as_ref().map(|newest| now - newest.at);
        if age.is_some_and(|age| age < WINDOW_MIN) {
            return;
        }
        if age.is_some_and(|age| age > WINDOW_MAX) {
            *self = Self::default();
        }
        let newest = Reading { at: now, models: Arc::new(read()) };
        let again = || Some(Reading { at: newest.at, models: Arc::clone(&newest.models) });
        if self.since.is_none() {
            (self.since, self.middle) = (again(), again());
        } else if self.middle.as_ref().is_some_and(|middle| now - middle.at >= Span(WINDOW_MAX.0 / 2)) {
            self.since = mem::replace(&mut self.middle, again());
        }
        self.newest = Some(newest);
    }
}

impl Traffic {
    pub(super) fn new(told: Told, frontend: String) -> Self {
        Self { told, frontend, window: RefCell::default() }
    }

    /// The page that a query asks for, as JSON: `page`, `rows`, `match` (a part of names) and `order`.
    ///
    /// # Errors
    /// One line that says what was found and expected.
    pub(crate) fn page(&self, now: Timestamp, query: &str) -> Result<String, String> {
        let query = Query::of(query);
        let (page, rows) = (query.number("page", 0..=usize::MAX, 0)?, query.number("rows", 1..=ROWS_MAX, ROWS)?);
        let (order, matches) = (query.one_of("order", &ORDERS)?, query.part_of("match"));
        let mut window = self.window.borrow_mut();
        window.turn(now, || self.read());
        let Window { since: Some(since), newest: Some(newest), .. } = &*window else {
            unreachable!("a turn reads if there is none")
        };
        let spent = newest.at - since.at;
        let (mut all, mut found) = (Tally::default(), Vec::new());
        for (index, (known, tally)) in newest.models.iter().enumerate() {
            let before = since.models.get(index).filter(|(before, _)| Arc::ptr_eq(before, known));
            let of_window = before.map_or_else(|| tally.clone(), |(_, before)| tally.since(before));
            all.absorb(&of_window);
            if matches(&known.name) {
                found.push((known, of_window));
            }
        }
        let by_name = |known: &Arc<Known>| (known.name.clone(), known.version.clone());
        match ORDERS[order] {
            "rate" => found.sort_by_cached_key(|(known, tally)| (Reverse(tally.requests()), by_name(known))),
            "missed" => found.sort_by_cached_key(|(known, tally)| (Reverse(tally.missed()), by_name(known))),
            _ => found.sort_by_cached_key(|(known, _)| by_name(known)),
        }
        let pages = found.len().div_ceil(rows).max(1);
        if page >= pages {
            return Err(format!("page: found {page}, expected one below {pages}"));
        }
        let shown = found.iter().skip(page * rows).take(rows).map(|(known, tally)| Row {
            name: &known.name,
            version: &known.version,
            objective_ms: known.objective().map(|objective| rounded(objective.as_millis_f64())),
            rates: tally.rates(spent),
        });
        let page = TrafficPage {
            page,
            pages,
            frontend: &self.frontend,
            window_ms: u64::try_from(spent.0).unwrap_or_default() / 1_000_000,
            models: newest.models.len(),
            asked: newest.models.iter().filter(|(_, tally)| tally.requests() > 0).count(),
            all: all.rates(spent),
            rows: shown.collect(),
        };
        Ok(serde_json::to_string(&page).expect("its keys are names") + "\n")
    }

    fn read(&self) -> Vec<(Arc<Known>, Tally)> {
        let known = self.told.shared.lock().unwrap_or_else(PoisonError::into_inner).known.clone();
        known.into_iter().map(|known| (Arc::clone(&known), known.tally())).collect()
    }
}

impl Known {
    fn objective(&self) -> Option<Span> {
        Some(Span(self.objective_ns.load(Relaxed))).filter(|objective| *objective != Span::ENDLESS)
    }

    fn tally(&self) -> Tally {
        self.counts.get().map(|counts| counts.tally()).unwrap_or_default()
    }
}

impl Tally {
    fn requests(&self) -> u64 {
        self.success + self.failures
    }

    fn missed(&self) -> u64 {
        let others = self.dropped.iter().filter(|(reason, _)| !CLIENTS_REASONS.contains(reason));
        self.late + others.map(|(_, count)| count).sum::<u64>()
    }

    /// What has been counted since then. Numbers of one reading are of different instants, so nothing is below zero.
    fn since(&self, before: &Self) -> Self {
        let mut left = self.clone();
        left.numbers().zip(before.clone().numbers()).for_each(|(left, before)| *left = left.saturating_sub(*before));
        for (reason, count) in &mut left.dropped {
            *count = count.saturating_sub(before.dropped.get(reason).copied().unwrap_or_default());
        }
        left.dropped.retain(|_, count| *count > 0);
        left
    }

    fn absorb(&mut self, other: &Self) {
        self.numbers().zip(other.clone().numbers()).for_each(|(count, more)| *count += *more);
        for (reason, count) in &other.dropped {
            *self.dropped.entry(reason).or_default() += count;
        }
    }

    fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        let Self { success, late, failures, dropped: _, took, batches, batch_tasks } = self;
        [success, late, failures, batches, batch_tasks].into_iter().chain(took)
    }

    fn rates(&self, spent: Span) -> Rates {
        if spent <= Span::ZERO {
            return Rates::default();
        }
        let seconds = spent.as_millis_f64() / 1e3;
        let of = |count: u64| rounded(count as f64 / seconds);
        let quantile = |quantile| quantile_ns(&self.took, quantile).map(|ns| rounded(ns / 1e6));
        Rates {
            requests: of(self.requests()),
            good: of(self.success.saturating_sub(self.late)),
            late: of(self.late),
            missed: of(self.missed()),
            dropped: self.dropped.iter().map(|(reason, count)| (*reason, of(*count))).collect(),
            p50_ms: quantile(0.5),
            p99_ms: quantile(0.99),
            batch: (self.batches > 0).then(|| rounded(self.batch_tasks as f64 / self.batches as f64)),
        }
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

impl Counts {
    /// All that a page tells of.
    fn tally(&self) -> Tally {
        let (took, batches) = (self.took(), self.batches());
        Tally {
            success: self.success.get(),
            late: self.late.get(),
            failures: self.failures.iter().map(Count::get).sum(),
            dropped: self.dropped(),
            took,
            batches: batches.0,
            batch_tasks: batches.1,
        }
    }
}

#[cfg(test)]
mod tests;
