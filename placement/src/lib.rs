//! Which sub-cluster hosts which model (Symphony, sections 3.5 and 4.4, appendix A.1).
//!
//! A [`Problem`] is the paper's mixed-integer program. A [`Search`] checks it, starts from what a greedy rule or the
//! former placement gives, and improves that by annealing for as many steps as its driver asks for. Whenever the driver
//! stops, the best placement so far is there, no worse than the start, with a lower bound beside it that no placement
//! can beat. One seed and one number of steps give one placement, on every machine.
//!
//! There is no IO here, no clock and no thread. How a placement is applied is not known here either.
#![forbid(unsafe_code)]

mod bound;
mod greedy;
mod instance;
mod problem;
mod search;
mod state;

pub use problem::{MODELS_MAX, Model, Pin, PlacementError, Problem, RATE_MAX_RPS, SUB_CLUSTERS_MAX};
pub use search::{Move, Placement, Plan, Search};
pub use state::Score;

#[cfg(test)]
mod tests;
