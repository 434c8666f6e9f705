//! Files that clients' loads bring along: kept in a folder that frontends and backends of one host share, since they
//! are too large for what members tell each other, which is their digest.
//!
//! ```text
//! FOLDER/lock                                   whoever looks at the folder, or changes it, has this locked
//! FOLDER/<digest>/<model>/<version>/<file>      read like a repository
//! ```
//!
//! Files stay as long as anybody holds them: the frontend that put them there until its load has been answered, then
//! every backend and frontend that has the model. To hold is to have a shared lock of the digest's folder, which ends
//! with its process however that ends, so nothing is counted and nothing is lost count of. Whoever lets go has a thread
//! of the store look for what nobody holds any more; so does whoever opens the store, or closes it.
#![allow(clippy::disallowed_methods)] // Removing files can be slow; who lets go of them may be moving packets.

use std::{
    fmt,
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::Builder,
};

use proto::{Brought, FilesDigest};
use sha2::{Digest as _, Sha256};

use crate::{error::RepositoryError, folders::is_plain};

/// Files that one load may bring along.
pub const FILES_MAX: usize = 256;
/// Bytes of a file's name, which is a limit of file systems, and digits of a version.
const NAME_BYTES_MAX: usize = 255;
const VERSION_DIGITS_MAX: usize = 18;

/// What takes the place of a digest while files are written, or removed.
const UNFINISHED: &str = "unfinished";

/// A file that a load brings along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BroughtFile<'a> {
    /// `<version>/<file>`.
    pub path: &'a str,
    /// What is in it.
    pub bytes: &'a [u8],
}

/// The folder. Its clones are one.
#[derive(Debug, Clone)]
pub struct Store(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    folder: PathBuf,
    sweep: SyncSender<()>,
}

/// Files that stay where they are as long as this, or a clone of it, is there.
#[derive(Clone)]
pub struct Held(Arc<HeldFiles>);

struct HeldFiles {
    digest: FilesDigest,
    /// Locked; nothing once it is to be let go.
    folder: Option<File>,
    store: Store,
}

/// Where a model is to be read from.
#[derive(Debug)]
pub struct Source {
    root: PathBuf,
    held: Option<Held>,
}

impl Source {
    /// The repository.
    #[must_use]
    pub fn repository(repository: &Path) -> Self {
        Self { root: repository.to_owned(), held: None }
    }

    /// The repository, or the files that a load has brought along, which are held from now on.
    ///
    /// # Errors
    /// If there is no store, or it does not have them.
    pub fn of(repository: &Path, store: Option<&Store>, brought: Option<&Brought>) -> Result<Self, RepositoryError> {
        let Some(digest) = brought.and_then(|brought| brought.files) else {
            return Ok(Self::repository(repository));
        };
        let text = "load_files: found none, expected the folder that frontends share: the model was loaded with files \
                    that a client brought";
        let held = store.ok_or_else(|| RepositoryError(text.to_owned()))?.hold(digest)?;
        Ok(Self { root: held.root(), held: Some(held) })
    }

    /// What has the folders of models in it.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn held(&self) -> Option<&Held> {
        self.held.as_ref()
    }
}

impl Store {
    /// Opens a folder, which is made if it is not there, and removes what nobody holds any more.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn open(folder: &Path) -> Result<Self, RepositoryError> {
        let failed = |error: io::Error| wrong(folder, &error);
        if !folder.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        }
        sweep(folder).map_err(failed)?;
        // One that waits is of everything that was let go until it begins.
        let (sender, asked) = sync_channel(1);
        let swept = folder.to_owned();
        let thread = Builder::new().name("brought files".to_owned());
        thread.spawn(move || sweep_when_asked(&swept, &asked)).map_err(failed)?;
        Ok(Self(Arc::new(Opened { folder: folder.to_owned(), sweep: sender })))
    }

    /// Keeps files that are brought for a model, where they are not kept already, and holds them.
    ///
    /// # Errors
    /// If a path is not `<version>/<file>`, or there are too many files, or all that is kept would exceed `bytes_max`
    /// (`load_files_bytes_max`), or they cannot be written.
    pub fn keep(&self, model: &str, files: &[BroughtFile<'_>], bytes_max: u64) -> Result<Held, RepositoryError> {
        check(model, files)?;
        let digest = digest_of(model, files);
        let folder = self.0.folder.join(digest.to_string());
        let failed = |error: io::Error| wrong(&folder, &error);
        let _locked = lock(&self.0.folder).map_err(failed)?;
        if !folder.is_dir() {
            sweep_locked(&self.0.folder).map_err(failed)?;
            let kept = bytes_in(&self.0.folder).map_err(failed)?;
            let bytes: u64 = files.iter().map(|file| file.bytes.len() as u64).sum();
            if kept.saturating_add(bytes) > bytes_max {
                return Err(RepositoryError(format!(
                    "files of {bytes} bytes: found {kept} bytes of files that are served already, expected at most \
                     {bytes_max} with them (load_files_bytes_max)"
                )));
            }
            let unfinished = self.0.folder.join(UNFINISHED);
            let written = write(&unfinished.join(model), files).and_then(|()| fs::rename(&unfinished, &folder));
            written.inspect_err(|_| drop(fs::remove_dir_all(&unfinished))).map_err(failed)?;
        }
        self.hold_locked(digest).map_err(failed)
    }

    /// Holds files that somebody holds already.
    ///
    /// # Errors
    /// If they are not there.
    pub fn hold(&self, digest: FilesDigest) -> Result<Held, RepositoryError> {
        let held = lock(&self.0.folder).and_then(|_locked| self.hold_locked(digest));
        held.map_err(|error| {
            let expected =
                "expected the files that a client brought, in the folder that all frontends and backends share";
            RepositoryError(format!("load_files: {}: {digest}: {error}; {expected}", self.0.folder.display()))
        })
    }

    fn hold_locked(&self, digest: FilesDigest) -> io::Result<Held> {
        let folder = File::open(self.0.folder.join(digest.to_string()))?;
        // Who has it to itself has the whole store.
        folder.lock_shared()?;
        Ok(Held(Arc::new(HeldFiles { digest, folder: Some(folder), store: self.clone() })))
    }
}

impl Held {
    /// What names the files.
    #[must_use]
    pub fn digest(&self) -> FilesDigest {
        self.0.digest
    }

    /// What has their model's folder in it.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.0.store.0.folder.join(self.0.digest.to_string())
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.digest() == other.digest()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.digest(), f)
    }
}

impl Drop for HeldFiles {
    fn drop(&mut self) {
        self.folder = None;
        // If one waits already, it has yet to begin.
        let _ = self.store.0.sweep.try_send(());
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // The process is about to end, and its thread may not come to it.
        let _ = sweep(&self.folder);
    }
}

fn wrong(path: &Path, cause: &dyn fmt::Display) -> RepositoryError {
    RepositoryError(format!("load_files: {}: {cause}", path.display()))
}

/// Checks what a client says: nothing of it leads anywhere else, or is hidden from who looks at the folder.
fn check(model: &str, files: &[BroughtFile<'_>]) -> Result<(), RepositoryError> {
    if !is_name(model) {
        return Err(RepositoryError(format!("model: found {model:?}, expected the name of a folder")));
    }
    if files.len() > FILES_MAX {
        return Err(RepositoryError(format!("parameters: found {} files, expected at most {FILES_MAX}", files.len())));
    }
    let is_version = |version: &str| {
        version.len() <= VERSION_DIGITS_MAX
            && version.starts_with(|first: char| ('1'..='9').contains(&first))
            && version.bytes().all(|digit| digit.is_ascii_digit())
    };
    let is_path = |path: &str| path.split_once('/').is_some_and(|(version, name)| is_version(version) && is_name(name));
    match files.iter().find(|file| !is_path(file.path)) {
        None => Ok(()),
        Some(BroughtFile { path, .. }) => {
            let found: String = path.chars().take(NAME_BYTES_MAX).collect();
            let expected = "expected file:<version>/<file>, as in file:1/model.onnx";
            Err(RepositoryError(format!("parameters: found {:?}, {expected}", format!("file:{found}"))))
        }
    }
}

/// Whether files may be called so that a client names.
fn is_name(name: &str) -> bool {
    is_plain(name) && name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control)
}

/// The same for the same files, in whatever order.
fn digest_of(model: &str, files: &[BroughtFile<'_>]) -> FilesDigest {
    let mut sorted = files.to_vec();
    sorted.sort_by_key(|file| file.path);
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    add(model.as_bytes());
    for BroughtFile { path, bytes } in sorted {
        add(path.as_bytes());
        add(bytes);
    }
    FilesDigest(hash.finalize().into())
}

fn write(model: &Path, files: &[BroughtFile<'_>]) -> io::Result<()> {
    // A model without files has a folder, too.
    fs::create_dir_all(model)?;
    for &BroughtFile { path, bytes } in files {
        let path = model.join(path);
        fs::create_dir_all(path.parent().expect("it lies in its version's folder"))?;
        fs::write(path, bytes)?;
    }
    Ok(())
}

/// Locks the folder for whoever looks at it, or changes it, until the file is closed.
fn lock(folder: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(folder.join("lock"))?;
    file.lock()?;
    Ok(file)
}

fn sweep_when_asked(folder: &Path, asked: &Receiver<()>) {
    while asked.recv().is_ok() {
        if let Err(error) = sweep(folder) {
            tracing::warn!("load_files: {}: files that nobody needs any more stay: {error}", folder.display());
        }
    }
}

/// Removes what nobody holds.
fn sweep(folder: &Path) -> io::Result<()> {
    lock(folder).and_then(|_locked| sweep_locked(folder))
}

fn sweep_locked(folder: &Path) -> io::Result<()> {
    let unfinished = folder.join(UNFINISHED);
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        // Nothing else in there is ours.
        if !path.is_dir() || !is_digest(&path) {
            continue;
        }
        match File::open(&path)?.try_lock() {
            // What has a digest's name is whole, also if this fails halfway.
            Ok(()) => fs::rename(&path, &unfinished).and_then(|()| fs::remove_dir_all(&unfinished))?,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(())
}

fn is_digest(path: &Path) -> bool {
    let is_digest = |name: &str| name.len() == 64 && name.bytes().all(|digit| digit.is_ascii_hexdigit());
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_digest)
}

/// Of all files below a folder.
fn bytes_in(folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { bytes_in(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
