//! What keeps a repository, or a model of it, from being served.

use thiserror::Error;

/// Why a repository could not be read. One line: the file, the key, what was found, what was expected.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct RepositoryError(pub String);

/// A model that cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The folder's name.
    pub name: String,
    /// The version that cannot be; empty if the whole model cannot.
    pub version: String,
    /// Why, in one line.
    pub reason: String,
}
