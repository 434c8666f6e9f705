//! The folders of a repository.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::error::RepositoryError;

/// The folder of a model whose name may come from a client.
///
/// # Errors
/// If there is none of that name.
pub fn folder_of(repository: &Path, name: &str) -> Result<PathBuf, RepositoryError> {
    let folder = repository.join(name);
    if !is_plain(name) || !folder.is_dir() {
        return Err(RepositoryError(format!(
            "failed to poll from model repository: found no model '{name}', expected the name of a folder there"
        )));
    }
    Ok(folder)
}

/// Whether a name leads nowhere else than to what is called so, and is not hidden.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// The folders directly in `parent` whose names are not hidden.
pub(crate) fn folders(parent: &Path) -> Result<Vec<PathBuf>, RepositoryError> {
    let failed = |error| RepositoryError(format!("{}: cannot be listed: {error}", parent.display()));
    let mut folders = Vec::new();
    for entry in fs::read_dir(parent).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() && !is_hidden(&path) {
            folders.push(path);
        }
    }
    Ok(folders)
}

pub(crate) fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'))
}
