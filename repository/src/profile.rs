//! `profile.toml` in a model's folder: l(b) as `downbeat profile` measured it, so that a backend need not measure it
//! each time it starts (Clockwork, section 4.1, profiles models ahead of time likewise).

use std::{
    fs,
    path::{Path, PathBuf},
};

use proto::{LatencyProfile, Span};
use serde::{Deserialize, Serialize};

use crate::error::RepositoryError;

/// The file's name.
pub const FILE_NAME: &str = "profile.toml";

/// What the file holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredProfile {
    /// What ran the model.
    pub executor: String,
    /// The version that was measured; another version is measured anew.
    pub version: String,
    /// The share of runs that stay within `latency_ms`.
    pub quantile: f64,
    /// l(b) is near `alpha_ms` * b + `beta_ms`.
    pub alpha_ms: f64,
    /// See `alpha_ms`.
    pub beta_ms: f64,
    /// l(1), l(2), ... in milliseconds.
    pub latency_ms: Vec<f64>,
}

impl StoredProfile {
    /// Where a model's folder has it.
    #[must_use]
    pub fn path(folder: &Path) -> PathBuf {
        folder.join(FILE_NAME)
    }

    /// Writes it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), RepositoryError> {
        let text = toml::to_string(self).expect("plain data");
        let text =
            format!("# Written by `downbeat profile`; a backend that finds it does not measure this model.\n{text}");
        fs::write(path, text)
            .map_err(|error| RepositoryError(format!("{}: cannot be written: {error}", path.display())))
    }

    /// The profile for this version of a model, up to its largest batch, and which of these executors was measured;
    /// nothing if there is no such file, or it is of another version or executor.
    ///
    /// # Errors
    /// If the file is not what [`Self::write`] writes, or holds fewer batch sizes than the model takes.
    pub(crate) fn read<E: Copy>(
        folder: &Path,
        executors: &[(&str, E)],
        version: &str,
        max_batch: usize,
    ) -> Result<Option<(E, LatencyProfile)>, RepositoryError> {
        let path = Self::path(folder);
        let wrong = |cause: &dyn std::fmt::Display| RepositoryError(format!("{}: {cause}", path.display()));
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|error| wrong(&error))?,
        };
        let stored: Self = toml::from_str(&text).map_err(|error| wrong(&error.message().replace('\n', "; ")))?;
        let executor =
            executors.iter().find(|(name, _)| *name == stored.executor).filter(|_| stored.version == version);
        let Some(&(_, executor)) = executor else {
            let expected = executors.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or ");
            tracing::warn!(
                file = %path.display(),
                "ignored: it is of version {} on {}, this is version {version} on {expected}; run `downbeat profile` \
                 again",
                stored.version,
                stored.executor
            );
            return Ok(None);
        };
        let found = stored.latency_ms.len();
        if found < max_batch {
            let hint = "run `downbeat profile` again";
            return Err(wrong(&format!(
                "latency_ms: found {found} batch sizes, expected max_batch_size = {max_batch}; {hint}"
            )));
        }
        let table = stored.latency_ms[..max_batch].iter().map(|ms| Span::from_millis_f64(*ms)).collect();
        let profile = LatencyProfile::from_table(table).map_err(|error| wrong(&format!("latency_ms: {error}")))?;
        Ok(Some((executor, profile)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> StoredProfile {
        StoredProfile {
            executor: "onnx".into(),
            version: "3".into(),
            quantile: 0.9,
            alpha_ms: 1.0,
            beta_ms: 4.0,
            latency_ms: vec![5.0, 6.0, 7.5],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let any = [("onnxruntime", 1), ("onnx", 2)];
        let read = |version, max_batch| StoredProfile::read(folder.path(), &any, version, max_batch);
        assert_eq!(read("3", 2).unwrap(), None, "there is none yet");
        stored().write(&StoredProfile::path(folder.path())).unwrap();
        let (executor, profile) = read("3", 2).unwrap().unwrap();
        assert_eq!(executor, 2, "the one that it names");
        assert_eq!((profile.max_batch(), profile.latency(2)), (2, Span::from_millis(6)));
        assert_eq!(read("4", 2).unwrap(), None, "another version is measured anew");
        assert_eq!(StoredProfile::read(folder.path(), &[("emulated", ())], "3", 2).unwrap(), None);
        let error = read("3", 4).unwrap_err().to_string();
        assert!(error.contains("found 3 batch sizes, expected max_batch_size = 4"), "{error}");
    }

    #[test]
    fn a_damaged_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = StoredProfile::path(folder.path());
        let refused = |text: &str| {
            fs::write(&path, text).unwrap();
            let error = StoredProfile::read(folder.path(), &[("onnx", ())], "3", 2).unwrap_err().to_string();
            assert!(error.contains(FILE_NAME) && error.lines().count() == 1, "{error}");
            error
        };
        refused("latency_ms = [");
        assert!(refused("executor = 'onnx'").contains("missing field"));
        let decreasing = StoredProfile { latency_ms: vec![5.0, 4.0], ..stored() };
        assert!(refused(&toml::to_string(&decreasing).unwrap()).contains("must not decrease"));
        let negative = StoredProfile { latency_ms: vec![-5.0, 4.0], ..stored() };
        assert!(refused(&toml::to_string(&negative).unwrap()).contains("must be above 0"));
    }
}
