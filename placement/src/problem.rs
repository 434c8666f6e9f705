//! The problem as its user states it, and what is refused.

use thiserror::Error;

/// Sub-clusters that a problem may have.
pub const SUB_CLUSTERS_MAX: usize = 4_096;
/// Models that a problem may have.
pub const MODELS_MAX: usize = 100_000;
/// The highest rate of a model, in requests a second.
pub const RATE_MAX_RPS: f64 = 1e8;

/// Which models go where, as Symphony's appendix A.1 asks: minimise ΔR + w ΔS, the largest deviations of a
/// sub-cluster's rate and static memory from their means.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// l: 1 to [`SUB_CLUSTERS_MAX`].
    pub sub_clusters: usize,
    /// 1 to [`MODELS_MAX`], under names of their own.
    pub models: Vec<Model>,
    /// `R_max` of equation 4, in requests a second: what a sub-cluster's dispatcher can take.
    pub rate_max_rps: Option<f64>,
    /// `S_max` of equation 5: what a backend's memory holds.
    pub memory_max_bytes: Option<u64>,
    /// w, where each deviation is a part of its mean: the paper's w times S / R, which it does not tell.
    pub memory_weight: f64,
    /// `C_max` of equation 10, above 0: what all moves may cost together.
    pub disruption_max: Option<f64>,
    /// Models that must be where they are said to be.
    pub pins: Vec<Pin>,
}

/// A model of a problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Unique.
    pub name: String,
    /// r, in requests a second, to a millionth: 0 to [`RATE_MAX_RPS`].
    pub rate_rps: f64,
    /// s: what stays in the memory of each backend that hosts it.
    pub static_bytes: u64,
    /// d: what it takes besides while it runs. A sub-cluster needs the largest one, as one model runs at a time.
    pub dynamic_bytes: u64,
    /// What a move costs, to a millionth: unloading it where it is and loading it elsewhere. The paper's c is half of
    /// it.
    pub move_cost: f64,
    /// The sub-cluster that hosts it now. A new model has none, and its first load costs nothing: it is needed wherever
    /// that is, so no placement could save it.
    pub former: Option<usize>,
}

/// A model that must be in one sub-cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// Its name.
    pub model: String,
    /// From 0.
    pub sub_cluster: usize,
}

/// Why there is no placement. The former one stays.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{key}: found {found}, expected {expected}")]
pub struct PlacementError {
    /// The field of [`Problem`], with its model if it has one.
    pub key: String,
    /// What it says, or comes to.
    pub found: String,
    /// What to change.
    pub expected: String,
}

impl PlacementError {
    pub(crate) fn new(key: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { key: key.into(), found: found.into(), expected: expected.into() }
    }
}

/// Models that nobody asks for are dealt evenly, too: they count as much of the mean rate, and a little where all rest.
const RATE_PART_MIN: f64 = 0.01;
const RATE_MIN_RPS: f64 = 1e-3;

impl Problem {
    /// Has no model count for less than a hundredth of the mean rate, so that those that nobody asks for are dealt
    /// evenly, too.
    #[must_use]
    pub fn with_idle_models(mut self) -> Self {
        let mean = self.models.iter().map(|model| model.rate_rps).sum::<f64>() / self.models.len().max(1) as f64;
        let least = (mean * RATE_PART_MIN).max(RATE_MIN_RPS);
        self.models.iter_mut().for_each(|model| model.rate_rps = model.rate_rps.max(least));
        self
    }

    /// Without limits, pins and a bound of moves, and with both deviations of equal weight.
    #[must_use]
    pub fn new(sub_clusters: usize, models: Vec<Model>) -> Self {
        Self {
            sub_clusters,
            models,
            rate_max_rps: None,
            memory_max_bytes: None,
            memory_weight: 1.0,
            disruption_max: None,
            pins: Vec::new(),
        }
    }
}
