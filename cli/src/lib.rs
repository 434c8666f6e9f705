//! What the commands that measure share: why they do not run, checks of the numbers that they take, and their tables.
//! No role depends on it.
#![forbid(unsafe_code)]

mod table;

use std::fmt::Display;

use sim::{WorkloadError, checker::Violation};
use thiserror::Error;

pub use table::table;

/// Why a command did not run. One line that says what to change.
#[derive(Debug, Error)]
pub enum CommandError {
    /// The workload file.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// A flag's value.
    #[error("{flag}: expected {expected}, found {found}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What it takes.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// The system does not do what the command needs, or a file is wrong.
    #[error("{0}")]
    Failed(String),
    /// The command did its work, and what it found is wrong: exit code 1, where all else is 2.
    #[error("{0}")]
    Found(String),
    /// A bug of ours.
    #[error("this is a bug in the scheduler, please report it with the command line: {0}")]
    Violation(#[from] Violation),
}

impl CommandError {
    /// Of a flag's value.
    #[must_use]
    pub fn flag(flag: &'static str, expected: impl Into<String>, found: impl Display) -> Self {
        Self::Flag { flag, expected: expected.into(), found: found.to_string() }
    }

    /// Of what was tried, and why it did not work.
    #[must_use]
    pub fn failed(what: impl Display, cause: impl Display) -> Self {
        Self::Failed(format!("{what}: {cause}"))
    }
}

/// Checks a number given on the command line.
///
/// # Errors
/// If it is not above 0 and at most `max`.
pub fn positive(flag: &'static str, found: f64, max: f64) -> Result<f64, CommandError> {
    if found > 0.0 && found <= max {
        return Ok(found);
    }
    Err(CommandError::flag(flag, format!("a number above 0 and at most {max}"), found))
}

/// Checks a number given on the command line.
///
/// # Errors
/// If it is less than `min` or more than `max`.
pub fn within(flag: &'static str, found: f64, min: f64, max: f64) -> Result<f64, CommandError> {
    if (min..=max).contains(&found) {
        Ok(found)
    } else {
        Err(CommandError::flag(flag, format!("{min} to {max}"), found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_out_of_range_is_named_with_its_range() {
        let text = |result: Result<f64, CommandError>| result.map_err(|error| error.to_string());
        assert_eq!(text(positive("--rate", 2.0, 2.0)), Ok(2.0));
        for (found, shown) in [(0.0, "0"), (3.0, "3"), (f64::NAN, "NaN")] {
            let expected = format!("--rate: expected a number above 0 and at most 2, found {shown}");
            assert_eq!(text(positive("--rate", found, 2.0)), Err(expected));
        }
        assert_eq!(text(within("--rate", 1.0, 1.0, 2.0)), Ok(1.0));
        for (found, shown) in [(0.5, "0.5"), (f64::NAN, "NaN")] {
            let expected = format!("--rate: expected 1 to 2, found {shown}");
            assert_eq!(text(within("--rate", found, 1.0, 2.0)), Err(expected));
        }
    }
}
