//! Bounds that several parts know.

use proto::Span;

/// The longest latency objective: a model's, and a request's own. Beyond it a number is a slip of the unit.
pub const SLO_MAX: Span = Span::from_millis(600_000);

/// The largest weights that are believed, in megabytes.
pub(crate) const WEIGHTS_MB_MAX: f64 = 1e6;
