//! What frontends tell of their traffic (`GET /v2/traffic`), and what that is in all.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

/// Where a frontend tells it.
pub(super) const TRAFFIC_PATH: &str = "/v2/traffic";

/// What one frontend tells: as in its own page, which has more.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(super) struct TrafficPage {
    /// How many pages there are.
    pub(super) pages: usize,
    /// What rates are of; 0 if there are none yet.
    pub(super) window_ms: u64,
    /// Of all models.
    pub(super) all: Rates,
    /// The busiest models.
    pub(super) rows: Vec<Row>,
}

impl TrafficPage {
    /// Has the next page's rows, too. Counts go on between two pages, so a model may come with both: it counts once.
    pub(super) fn append(&mut self, more: Self) {
        let key = |row: &Row| (row.name.clone(), row.version.clone());
        let known: BTreeSet<_> = self.rows.iter().map(key).collect();
        self.rows.extend(more.rows.into_iter().filter(|row| !known.contains(&key(row))));
    }

    /// There are models with requests on the next pages, too.
    pub(super) fn goes_on(&self) -> bool {
        self.rows.last().is_some_and(|row| row.rates.requests > 0.0)
    }
}

/// Of a model.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) version: String,
    /// Of a request that names none.
    #[serde(default)]
    pub(super) objective_ms: Option<f64>,
    #[serde(flatten)]
    pub(super) rates: Rates,
}

/// In a second each.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(super) struct Rates {
    /// Requests that ended.
    pub(super) requests: f64,
    /// Those that were answered in time.
    pub(super) good: f64,
    /// Those that were late or dropped, and not by the client's own doing.
    pub(super) missed: f64,
    /// Those that were dropped, by reason.
    #[serde(default)]
    pub(super) dropped: BTreeMap<String, f64>,
    #[serde(default)]
    pub(super) p50_ms: Option<f64>,
    #[serde(default)]
    pub(super) p99_ms: Option<f64>,
    /// Tasks in the batch of an answered request.
    #[serde(default)]
    pub(super) batch: Option<f64>,
}

impl Rates {
    /// Both together. Of quantiles the worse one counts, as nothing else is known of the two together.
    fn absorb(&mut self, other: &Self) {
        let worse = |one: Option<f64>, other: Option<f64>| one.into_iter().chain(other).reduce(f64::max);
        self.batch = match (self.batch.zip(other.batch), self.good + other.good) {
            (Some((one, two)), all) if all > 0.0 => Some((one * self.good + two * other.good) / all),
            _ => self.batch.or(other.batch),
        };
        self.requests += other.requests;
        self.good += other.good;
        self.missed += other.missed;
        for (reason, rate) in &other.dropped {
            *self.dropped.entry(reason.clone()).or_default() += rate;
        }
        self.p50_ms = worse(self.p50_ms, other.p50_ms);
        self.p99_ms = worse(self.p99_ms, other.p99_ms);
    }

    /// All that were dropped.
    pub(super) fn drops(&self) -> f64 {
        // No sum of nothing: it is below zero.
        self.dropped.values().fold(0.0, |sum, rate| sum + rate)
    }
}

/// All frontends together, by model.
pub(super) fn together<'a>(pages: impl Iterator<Item = &'a TrafficPage>) -> (Rates, Vec<Row>) {
    let (mut all, mut rows) = (Rates::default(), BTreeMap::<(String, String), Row>::new());
    for page in pages {
        all.absorb(&page.all);
        for row in &page.rows {
            let key = (row.name.clone(), row.version.clone());
            match rows.get_mut(&key) {
                Some(found) => found.rates.absorb(&row.rates),
                None => drop(rows.insert(key, row.clone())),
            }
        }
    }
    (all, rows.into_values().collect())
}
