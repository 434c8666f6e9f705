//! What comes back: an answer, whichever way it travelled.

use std::time::Duration;

use bytes::Bytes;

/// Answers longer than this are errors.
pub(crate) const ANSWER_BYTES_MAX: usize = 16 << 20;
/// A connection that is not needed stays open this long.
pub(crate) const CONNECTION_IDLE_MAX: Duration = Duration::from_secs(30);

/// What became of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// An answer.
    Served {
        /// The first output, little-endian; `None` if the answer has not the protocol's form.
        output: Option<Bytes>,
        /// downbeat's header of that name.
        timing: Option<String>,
    },
    /// Refused or given up by the server, with its reason.
    Dropped(String),
    /// No connection was to be had, or it ended before the answer.
    Broken(String),
    /// Anything else.
    Failed(String),
}

/// What the server says about one of a model's inputs.
#[derive(Debug)]
pub struct InputShape {
    /// Its name.
    pub name: String,
    /// As the protocol spells it.
    pub datatype: String,
    /// With the batch dimension; -1 where any size will do.
    pub shape: Vec<i64>,
}

/// The innermost cause says most: "connection refused" rather than "client error".
pub(crate) fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}
