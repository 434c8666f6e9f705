//! What members prove to each other that they know: a secret, or two while a cluster goes over from one to the other.
//! The first is used to prove, either is believed. Those that files hold are read anew each second.
use std::{
    fmt,
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock, Weak},
};

use crate::{
    error::{ConfigError, OpenError, SecretError},
    followed::{Followed, each_second},
    limits::{SECRET_BYTES_MIN, SECRET_FILE_BYTES_MAX, SECRETS_MAX},
};

/// The secrets of a moment, the one to prove with first.
pub(crate) type Known = Arc<[Box<[u8]>]>;

/// What this member knows; a clone follows the same files.
#[derive(Clone)]
pub struct Secrets(Arc<RwLock<Known>>);

impl Secrets {
    /// These, which stay.
    pub fn fixed<S: AsRef<[u8]>>(secrets: impl IntoIterator<Item = S>) -> Self {
        Self(Arc::new(RwLock::new(secrets.into_iter().map(|secret| secret.as_ref().into()).collect())))
    }

    /// What files hold, now and whenever they are replaced. If they are wrong then, what they held before counts on.
    ///
    /// # Errors
    /// One line that names the key, the file, what was found and what was expected.
    pub fn of_files(paths: &[PathBuf]) -> Result<Self, OpenError> {
        check_count(paths.len())?;
        let (mut files, known) = Files::open(paths)?;
        let secrets = Self(Arc::new(RwLock::new(known)));
        let shared = Arc::downgrade(&secrets.0);
        each_second("secrets", move || files.look(&shared)).map_err(OpenError::SecretsThread)?;
        Ok(secrets)
    }

    pub(crate) fn known(&self) -> Known {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// # Errors
    /// One line that names the key, if one of them is too short, or there are none or too many.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let known = self.known();
        check_count(known.len())?;
        known.iter().try_for_each(|secret| check_secret(secret))
    }
}

impl fmt::Debug for Secrets {
    /// Without them: they have no place in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

impl PartialEq for Secrets {
    fn eq(&self, other: &Self) -> bool {
        self.known() == other.known()
    }
}

impl Eq for Secrets {}

/// # Errors
/// One line that names the key, if it is too short.
pub(crate) fn check_secret(secret: &[u8]) -> Result<(), ConfigError> {
    if secret.len() < SECRET_BYTES_MIN { Err(ConfigError::ShortSecret { found: secret.len() }) } else { Ok(()) }
}

/// # Errors
/// One line that names the keys, if there are none or too many.
pub(crate) fn check_count(found: usize) -> Result<(), ConfigError> {
    if (1..=SECRETS_MAX).contains(&found) { Ok(()) } else { Err(ConfigError::Secrets { found }) }
}

/// Files with secrets.
struct Files {
    paths: Vec<PathBuf>,
    followed: Followed,
}

impl Files {
    fn open(paths: &[PathBuf]) -> Result<(Self, Known), SecretError> {
        let files = Self { paths: paths.to_vec(), followed: Followed::new(paths.to_vec()) };
        let known = read_all(&files.paths)?;
        Ok((files, known))
    }

    /// Takes in what has been replaced. `None` once nobody is left who wants to know.
    fn look(&mut self, shared: &Weak<RwLock<Known>>) -> Option<()> {
        let shared = shared.upgrade()?;
        if let Some(found) = self.followed.look(|| read_all(&self.paths)) {
            let mut known = shared.write().unwrap_or_else(PoisonError::into_inner);
            if *known != found {
                tracing::info!("secret_file: it was replaced; connections from now on prove and believe what it holds");
                *known = found;
            }
        }
        Some(())
    }
}

fn read_all(paths: &[PathBuf]) -> Result<Known, SecretError> {
    paths.iter().map(|path| read(path).map(Vec::into_boxed_slice)).collect()
}

/// A file's secret, without the end of its line.
fn read(path: &Path) -> Result<Vec<u8>, SecretError> {
    let unreadable = |cause| SecretError::Unreadable { path: path.to_owned(), cause };
    // What is no file may never end, or never begin.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(SecretError::NoFile { path: path.to_owned() });
    }
    let mut bytes = Vec::new();
    let most = SECRET_FILE_BYTES_MAX as u64 + 1;
    File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes)).map_err(unreadable)?;
    let secret = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let secret = secret.strip_suffix(b"\r").unwrap_or(secret);
    if check_secret(secret).is_err() || bytes.len() > SECRET_FILE_BYTES_MAX {
        return Err(SecretError::Length { path: path.to_owned(), found: secret.len() });
    }
    Ok(secret.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "a secret of some length";
    const SECOND: &str = "another secret, as long";

    fn known(secrets: &Secrets) -> Vec<String> {
        secrets.known().iter().map(|secret| String::from_utf8(secret.to_vec()).unwrap()).collect()
    }

    #[test]
    fn files_hold_a_secret_each_without_its_line_end() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["new", "old"].map(|name| folder.path().join(name));
        std::fs::write(&paths[0], format!("{SECOND}\r\n")).unwrap();
        std::fs::write(&paths[1], FIRST).unwrap();
        assert_eq!(known(&Secrets::of_files(&paths).unwrap()), [SECOND, FIRST]);
        assert_eq!(known(&Secrets::of_files(&paths[1..]).unwrap()), [FIRST]);
        assert_eq!(known(&Secrets::fixed([FIRST, SECOND])), [FIRST, SECOND]);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_with_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let error = || Secrets::of_files(std::slice::from_ref(&path)).err().unwrap().to_string();
        let shown = path.display().to_string();
        let start = |found: &str| format!("secret_file: {found}");
        assert!(error().starts_with(&start(&format!("{shown} cannot be read: No such file"))), "{}", error());
        for (text, found) in
            [("", "found 0 bytes"), ("short\n", "found 5 bytes"), (&"x".repeat(5_000), "found 5000 bytes")]
        {
            std::fs::write(&path, text).unwrap();
            let told = error();
            // No more of a file is read than needed to see that it is too long.
            let found = if text.len() > 4096 { "found 4097 bytes" } else { found };
            assert!(told.starts_with(&start(&format!("{found} in {shown}, expected 16 to 4096"))), "{told}");
        }
        let error = Secrets::of_files(&[folder.path().to_owned()]).err().unwrap().to_string();
        assert!(error.contains("is no file, expected one with a secret"), "{error}");
        let none = Secrets::fixed([""; 0]).check().unwrap_err().to_string();
        assert!(none.starts_with("secret, secret_file: found 0 secrets, expected one, or 2"), "{none}");
    }

    #[test]
    fn a_file_that_is_replaced_counts_as_soon_as_it_is_right() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, FIRST).unwrap();
        let (mut files, first) = Files::open(std::slice::from_ref(&path)).unwrap();
        let secrets = Secrets(Arc::new(RwLock::new(first)));
        let shared = Arc::downgrade(&secrets.0);
        // Half written; gone; there again as another one.
        std::fs::write(&path, "half").unwrap();
        files.look(&shared).unwrap();
        assert!(files.followed.is_wrong() && known(&secrets) == [FIRST]);
        std::fs::remove_file(&path).unwrap();
        files.look(&shared).unwrap();
        assert!(files.followed.is_wrong() && known(&secrets) == [FIRST]);
        std::fs::write(&path, SECOND).unwrap();
        files.look(&shared).unwrap();
        assert!(!files.followed.is_wrong() && known(&secrets) == [SECOND]);
        drop(secrets);
        assert!(files.look(&shared).is_none(), "nobody wants to know");
    }
}
