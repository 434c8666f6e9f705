//! What keeps a backend from running, a model from loading and a batch from its outputs.

use repository::RepositoryError;
use thiserror::Error;
use transport::OpenError;

/// Why a backend could not run.
#[derive(Debug, Error)]
pub enum BackendError {
    /// A key of the configuration is wrong.
    #[error("{0}")]
    Config(String),
    /// The repository cannot be read.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// A model cannot be loaded.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The network cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The table `admin`.
    #[error(transparent)]
    Admin(#[from] admin::AdminError),
    /// There is not enough memory to stage batches.
    #[error("staging memory of {bytes} bytes: {cause}; lower gpus, max_batch_size or the number of models")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A thread cannot be started.
    #[error("a thread for a GPU, for loading models or for metrics could not be started: {0}")]
    Thread(std::io::Error),
}

/// Why an executor could not load a model or run a batch, in one line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ExecutorError(pub String);

/// A task of a batch that has no output, though the others have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskError {
    /// Its place in the batch.
    pub task: usize,
    /// Why, in one line.
    pub reason: String,
}
