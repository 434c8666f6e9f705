//! Files that are followed: looked at each second, and taken in anew once they hold something else, by whatever means
//! they were replaced (a write, a rename, a symbolic link that leads elsewhere, as Kubernetes does it).
//!
//! What is wrong then is told once, and what was there before counts on. What changes while it is taken in is looked at
//! again a second later.
#![allow(clippy::disallowed_methods)] // A driver: it has a thread that sleeps.

use std::{
    fmt::Display,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use sha2::{Digest as _, Sha256};

/// How often files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Of a file, what is looked at. Certificates, keys and secrets are shorter.
const BYTES_MAX: u64 = 1 << 20;

/// Calls that each second, on a thread of its own, until there is nothing to be done any more.
///
/// # Errors
/// If the thread cannot be started.
pub fn each_second(name: &str, mut turn: impl FnMut() -> Option<()> + Send + 'static) -> io::Result<()> {
    let body = move || {
        while let Some(()) = turn() {
            thread::sleep(LOOK_EVERY);
        }
    };
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

/// Files, what they held when they were taken in, and what is wrong with them at present.
#[derive(Debug)]
pub struct Followed {
    paths: Vec<PathBuf>,
    taken: Vec<Content>,
    wrong: Option<String>,
}

/// By its digest; `None` if it cannot be read.
type Content = Option<[u8; 32]>;

impl Followed {
    /// Of files that are about to be taken in: what they come to hold after that will be seen.
    #[must_use]
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { taken: contents(&paths), paths, wrong: None }
    }

    /// Takes the files in if they hold something else; yields what `take` made of them.
    pub fn look<T, E: Display>(&mut self, take: impl FnOnce() -> Result<T, E>) -> Option<T> {
        let found = contents(&self.paths);
        if found == self.taken {
            self.wrong = None;
            return None;
        }
        match take() {
            // It may be half of each otherwise.
            Ok(made) if contents(&self.paths) == found => {
                (self.taken, self.wrong) = (found, None);
                Some(made)
            }
            Ok(_) => None,
            Err(error) => {
                let wrong = error.to_string();
                if self.wrong.as_ref() != Some(&wrong) {
                    tracing::warn!("{wrong}; what was there before counts on");
                    self.wrong = Some(wrong);
                }
                None
            }
        }
    }

    /// Whether something is wrong with them.
    #[must_use]
    pub fn is_wrong(&self) -> bool {
        self.wrong.is_some()
    }
}

fn contents(paths: &[PathBuf]) -> Vec<Content> {
    paths.iter().map(|path| content(path).ok()).collect()
}

fn content(path: &Path) -> io::Result<[u8; 32]> {
    // What is no file may never end, or never begin.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(Sha256::digest(&bytes).into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// As Kubernetes replaces what a secret's volume has: files lead to a folder by a link that is exchanged.
    #[test]
    fn a_link_that_leads_elsewhere_is_seen_and_all_of_it_is_taken_in_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (version, text) in [("1", "one"), ("2", "two")] {
            std::fs::create_dir(at(version)).unwrap();
            std::fs::write(at(version).join("key"), text).unwrap();
        }
        symlink("1", at("data")).and_then(|()| symlink("data/key", at("key"))).unwrap();
        let mut followed = Followed::new(vec![at("key")]);
        let read = || std::fs::read_to_string(at("key"));
        assert_eq!(followed.look(read), None);
        symlink("2", at("next")).and_then(|()| std::fs::rename(at("next"), at("data"))).unwrap();
        assert_eq!(followed.look(read), Some("two".to_owned()));
        assert_eq!(followed.look(read), None);
    }

    #[test]
    fn what_is_wrong_or_changes_meanwhile_is_looked_at_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, "one").unwrap();
        let mut followed = Followed::new(vec![path.clone()]);
        std::fs::write(&path, "torn").unwrap();
        assert_eq!(followed.look(|| Err::<(), _>("it is torn")), None);
        assert!(followed.is_wrong());
        // It is what it was.
        std::fs::write(&path, "one").unwrap();
        assert_eq!(followed.look(|| Ok::<_, String>("not asked")), None);
        assert!(!followed.is_wrong());
        std::fs::write(&path, "two").unwrap();
        let replaced = || std::fs::write(&path, "three");
        assert!(followed.look(replaced).is_none(), "nobody knows what of it was read");
        assert_eq!(followed.look(|| std::fs::read_to_string(&path)), Some("three".to_owned()));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(followed.look(|| std::fs::read_to_string(&path)), None);
        assert!(followed.is_wrong());
    }
}
