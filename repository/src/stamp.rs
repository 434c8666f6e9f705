//! What the files of a model's folder were like at one time. A folder that changes while it is read would be half the
//! one model and half the other.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{
    error::RepositoryError,
    folders::{folders, is_hidden},
};

/// Files of a model's folder, at most.
const FILES_MAX: usize = 4_096;
/// Folders within folders: versions, and what models have beside their file.
const DEPTH_MAX: usize = 8;

/// Length and time of every file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp(BTreeMap<PathBuf, (u64, Option<SystemTime>)>);

impl Stamp {
    /// Of a model's folder as it is now. Hidden files do not count.
    ///
    /// # Errors
    /// If it cannot be listed, or holds too much.
    pub fn of(folder: &Path) -> Result<Self, RepositoryError> {
        let mut files = BTreeMap::new();
        list(folder, DEPTH_MAX, &mut files)?;
        Ok(Self(files))
    }

    /// Whether a folder is still as it was.
    ///
    /// # Errors
    /// The file that is not, and what to do.
    pub fn check(&self, folder: &Path) -> Result<(), RepositoryError> {
        let Self(now) = Self::of(folder)?;
        let differs = |(path, file): (&PathBuf, _), other: &BTreeMap<_, _>| other.get(path) != Some(file);
        let changed = now.iter().find(|file| differs(*file, &self.0));
        match changed.or_else(|| self.0.iter().find(|file| differs(*file, &now))) {
            None => Ok(()),
            Some((path, _)) => {
                let text = "changed while the model was read; load the model again once all its files are there";
                Err(RepositoryError(format!("{}: {text}", path.display())))
            }
        }
    }
}

/// All models of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamps(BTreeMap<String, Stamp>);

impl Stamps {
    /// Of a repository as it is now.
    ///
    /// # Errors
    /// If it cannot be listed. A model whose folder cannot be is left out.
    pub fn of(repository: &Path) -> Result<Self, RepositoryError> {
        let folders = folders(repository)?.into_iter();
        let named = folders.filter_map(|folder| {
            let name = folder.file_name()?.to_str()?.to_owned();
            Some((name, Stamp::of(&folder).ok()?))
        });
        Ok(Self(named.collect()))
    }

    /// Whether a model is still as it was.
    ///
    /// # Errors
    /// As [`Stamp::check`].
    pub fn check(&self, repository: &Path, name: &str) -> Result<(), RepositoryError> {
        self.0.get(name).map_or(Ok(()), |stamp| stamp.check(&repository.join(name)))
    }

    /// Models that came or changed since `former`, and those that have gone, by name.
    #[must_use]
    pub fn since<'a>(&'a self, former: &'a Self) -> (Vec<&'a str>, Vec<&'a str>) {
        let changed = self.0.iter().filter(|(name, stamp)| former.0.get(*name) != Some(stamp));
        let gone = former.0.keys().filter(|name| !self.0.contains_key(*name));
        (changed.map(|(name, _)| name.as_str()).collect(), gone.map(String::as_str).collect())
    }
}

fn list(
    folder: &Path,
    depth: usize,
    files: &mut BTreeMap<PathBuf, (u64, Option<SystemTime>)>,
) -> Result<(), RepositoryError> {
    let failed = |error| RepositoryError(format!("{}: cannot be listed: {error}", folder.display()));
    if depth == 0 {
        return Err(RepositoryError(format!("{}: found folders {DEPTH_MAX} deep, expected fewer", folder.display())));
    }
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // One that goes while it is looked at is not there.
        let Ok(metadata) = fs::metadata(&path) else { continue };
        if is_hidden(&path) {
            continue;
        }
        if metadata.is_dir() {
            list(&path, depth - 1, files)?;
        }
        let length = if metadata.is_dir() { 0 } else { metadata.len() };
        let modified = if metadata.is_dir() { None } else { metadata.modified().ok() };
        files.insert(path, (length, modified));
        if files.len() > FILES_MAX {
            let expected = format!("expected at most {FILES_MAX} files in a model's folder");
            return Err(RepositoryError(format!("{}: found more, {expected}", folder.display())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_changes_in_a_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("1")).unwrap();
        fs::write(path("1/model.onnx"), "one").unwrap();
        fs::write(path("config.pbtxt"), "").unwrap();
        let stamp = Stamp::of(folder.path()).unwrap();
        fs::write(path(".lock"), "it does not count").unwrap();
        assert!(stamp.check(folder.path()).is_ok() && Stamp::of(folder.path()).unwrap() == stamp);
        let named = |name: &str| {
            let error = stamp.check(folder.path()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{}: changed while", path(name).display())), "{error}");
        };
        fs::create_dir(path("2")).unwrap();
        named("2");
        fs::remove_dir(path("2")).unwrap();
        fs::write(path("1/model.onnx"), "another").unwrap();
        named("1/model.onnx");
        fs::remove_file(path("1/model.onnx")).unwrap();
        named("1/model.onnx");
    }

    #[test]
    fn models_that_come_change_and_go_are_told() {
        let repository = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            fs::create_dir_all(repository.path().join(name)).unwrap();
            fs::write(repository.path().join(name).join("config.pbtxt"), text).unwrap();
        };
        ["a", "b", "c"].iter().for_each(|name| write(name, ""));
        let former = Stamps::of(repository.path()).unwrap();
        assert_eq!(former.since(&former), (vec![], vec![]));
        write("b", "name: \"b\"");
        write("d", "");
        fs::remove_dir_all(repository.path().join("c")).unwrap();
        assert_eq!(Stamps::of(repository.path()).unwrap().since(&former), (vec!["b", "d"], vec!["c"]));
        assert!(former.check(repository.path(), "a").is_ok() && former.check(repository.path(), "b").is_err());
    }

    #[test]
    fn a_folder_that_holds_too_much_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let deep = (0..DEPTH_MAX).fold(folder.path().to_owned(), |path, _| path.join("d"));
        fs::create_dir_all(deep).unwrap();
        assert!(Stamp::of(folder.path()).unwrap_err().to_string().contains("found folders 8 deep"));
        let folder = tempfile::tempdir().unwrap();
        (0..=FILES_MAX).for_each(|number| fs::write(folder.path().join(number.to_string()), "").unwrap());
        assert!(Stamp::of(folder.path()).unwrap_err().to_string().contains("expected at most 4096 files"));
    }
}
