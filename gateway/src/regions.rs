//! Steps 1 and 10 through shared memory: POSIX shared memory that clients on this host register by name.
//!
//! A region is read by pread and written by pwrite, never mapped: a client that truncates its region gets an error,
//! and cannot kill this process with a signal. A region lives until it is unregistered; its descriptor goes with it.
//! It belongs to the client that registered it: nobody else sees, reads, writes or unregisters it, and others may have
//! regions of the same name.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::PathBuf,
    rc::Rc,
};

use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    excerpt,
};
use rustix::fs::{Mode, OFlags};

use crate::{
    access::{Client, SharedMemory},
    api::system_shared_memory_status_response::RegionStatus,
};

/// Regions of all clients at once: each holds a descriptor.
const REGIONS_MAX: usize = 1024;
/// Bytes of a region's name, and of its key.
const NAME_BYTES_MAX: usize = 255;

/// A part of a region that a tensor lies in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionSpan {
    /// The region's name.
    pub region: String,
    /// From the region's start, in bytes.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// The regions of all clients.
#[derive(Debug)]
pub struct AllRegions {
    folder: Rc<Folder>,
    /// Of clients that have some.
    clients: BTreeMap<Client, Regions>,
    /// Those of all others.
    none: Regions,
}

/// One client's regions, by name.
#[derive(Debug)]
pub struct Regions {
    folder: Rc<Folder>,
    regions: BTreeMap<String, Region>,
}

/// Where the system keeps shared memory, and what of it may be registered.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    limits: SharedMemory,
}

#[derive(Debug)]
struct Region {
    key: String,
    offset: u64,
    bytes: u64,
    file: File,
}

impl AllRegions {
    /// No regions. Keys name files in `folder`, which is where the system keeps shared memory.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let none = Regions::new(folder);
        Self { folder: Rc::clone(&none.folder), clients: BTreeMap::new(), none }
    }

    /// What may be registered from now on.
    pub fn set_limits(&mut self, limits: SharedMemory) {
        self.folder = Rc::new(Folder { path: self.folder.path.clone(), limits });
        self.clients.values_mut().for_each(|regions| regions.folder = Rc::clone(&self.folder));
    }

    /// Forgets the regions of those whom we do not know any more.
    pub fn retain(&mut self, is_known: impl Fn(Client) -> bool) {
        self.clients.retain(|client, _| is_known(*client));
    }

    /// A client's regions; none of a client that may not have any.
    #[must_use]
    pub fn of(&self, client: Option<Client>) -> &Regions {
        client.and_then(|client| self.clients.get(&client)).unwrap_or(&self.none)
    }

    /// Registers a region of a client; see [`Regions::register`].
    ///
    /// # Errors
    /// As that, or if all clients have too many.
    pub fn register(&mut self, of: Client, name: &str, key: &str, at: u64, bytes: u64) -> Result<(), InferError> {
        if self.clients.values().map(|regions| regions.regions.len()).sum::<usize>() >= REGIONS_MAX {
            return Err(InferError::Invalid(format!("{REGIONS_MAX} regions are registered already; unregister some")));
        }
        let empty = || Regions { folder: Rc::clone(&self.folder), regions: BTreeMap::new() };
        let regions = self.clients.entry(of).or_insert_with(empty);
        let registered = regions.register(name, key, at, bytes);
        self.forget_if_none(of);
        registered
    }

    /// Forgets a region of a client, or all that it has; one that is not there is no error.
    pub fn unregister(&mut self, of: Client, name: Option<&str>) {
        if let Some(regions) = self.clients.get_mut(&of) {
            regions.unregister(name);
            self.forget_if_none(of);
        }
    }

    fn forget_if_none(&mut self, client: Client) {
        if self.clients.get(&client).is_some_and(|regions| regions.regions.is_empty()) {
            self.clients.remove(&client);
        }
    }
}

impl Regions {
    /// No regions of a client that may register whatever is in `folder`.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let folder = Rc::new(Folder { path: folder.into(), limits: SharedMemory::default() });
        Self { folder, regions: BTreeMap::new() }
    }

    /// Registers `bytes` bytes from `offset` of the shared memory that `key` names, as shm_open takes it.
    ///
    /// # Errors
    /// If the name is taken, or the key names no shared memory of that size.
    pub fn register(&mut self, name: &str, key: &str, offset: u64, bytes: u64) -> Result<(), InferError> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(invalid("name", format_args!("{} bytes", name.len()), format_args!("1 to {NAME_BYTES_MAX}")));
        }
        if self.regions.contains_key(name) {
            let expected = "a name that is not registered; unregister it first";
            return Err(invalid("name", format_args!("'{}'", excerpt(name)), expected));
        }
        let SharedMemory { client_regions_max, client_bytes_max, .. } = self.folder.limits;
        if self.regions.len() >= client_regions_max {
            let key = "clients.shared_memory.client_regions_max";
            let text = format!("{client_regions_max} regions are registered already ({key}); unregister some");
            return Err(InferError::Invalid(text));
        }
        let file = self.open(key)?;
        let found = file.metadata().map_err(|cause| unreadable(key, &cause))?.len();
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > found) {
            let expected = format!("1 to {} at offset {offset}, what '{key}' has", found.saturating_sub(offset));
            return Err(invalid("byte_size", bytes, expected));
        }
        let own: u64 = self.regions.values().map(|region| region.bytes).sum();
        if own.checked_add(bytes).is_none_or(|sum| sum > client_bytes_max) {
            let room = client_bytes_max.saturating_sub(own);
            let expected =
                format!("at most {room} beside the {own} registered (clients.shared_memory.client_bytes_max)");
            return Err(invalid("byte_size", bytes, expected));
        }
        self.regions.insert(name.to_owned(), Region { key: key.to_owned(), offset, bytes, file });
        Ok(())
    }

    /// Forgets a region, or all of them; one that is not there is no error.
    pub fn unregister(&mut self, name: Option<&str>) {
        match name {
            Some(name) => drop(self.regions.remove(name)),
            None => self.regions.clear(),
        }
    }

    /// What is registered, by name.
    ///
    /// # Errors
    /// If there is no region of that name.
    pub fn status(&self, name: Option<&str>) -> Result<BTreeMap<String, RegionStatus>, InferError> {
        if let Some(name) = name {
            self.find(name)?;
        }
        let wanted = self.regions.iter().filter(|(region, _)| name.is_none_or(|name| name == *region));
        let status = |(name, region): (&String, &Region)| {
            let (key, offset, byte_size) = (region.key.clone(), region.offset, region.bytes);
            (name.clone(), RegionStatus { name: name.clone(), key, offset, byte_size })
        };
        Ok(wanted.map(status).collect())
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// If it lies outside its region, or the client has truncated that.
    pub fn read(&self, span: &RegionSpan) -> Result<Bytes, InferError> {
        let (region, at) = self.locate(span)?;
        let mut bytes = vec![0; span.bytes as usize];
        region.file.read_exact_at(&mut bytes, at).map_err(|cause| truncated(span, &cause))?;
        Ok(bytes.into())
    }

    /// Writes a tensor of `bytes.len()` bytes at the front of `span`.
    ///
    /// # Errors
    /// If it does not fit there, or the client has truncated the region.
    pub fn write(&self, span: &RegionSpan, bytes: &[u8]) -> Result<(), InferError> {
        let (region, at) = self.locate(span)?;
        if bytes.len() as u64 > span.bytes {
            let field = format!("shared memory region '{}': shared_memory_byte_size", excerpt(&span.region));
            return Err(invalid(&field, span.bytes, format_args!("at least the output's {}", bytes.len())));
        }
        let found = region.file.metadata().map_err(|cause| truncated(span, &cause))?.len();
        // A write beyond the end would make the file larger again.
        if found < at + bytes.len() as u64 {
            return Err(truncated(span, &io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        region.file.write_all_at(bytes, at).map_err(|cause| truncated(span, &cause))
    }

    fn find(&self, name: &str) -> Result<&Region, InferError> {
        self.regions.get(name).ok_or_else(|| {
            InferError::NotFound(format!("shared memory region: found '{}', expected a registered one", excerpt(name)))
        })
    }

    /// The region of a span and where the span starts in its file.
    fn locate(&self, span: &RegionSpan) -> Result<(&Region, u64), InferError> {
        let region = self.find(&span.region)?;
        if span.offset.checked_add(span.bytes).is_none_or(|end| end > region.bytes) {
            let field = format!("shared memory region '{}'", excerpt(&span.region));
            let found = format!("{} bytes at offset {}", span.bytes, span.offset);
            return Err(invalid(&field, found, format_args!("a part of its {} bytes", region.bytes)));
        }
        Ok((region, region.offset + span.offset))
    }

    /// Opens shared memory: a plain file directly in the folder, whatever else of that name may be elsewhere.
    fn open(&self, key: &str) -> Result<File, InferError> {
        let name = key.strip_prefix('/').unwrap_or(key);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(['/', '\0']) || [".", ".."].contains(&name) {
            let expected = "a name as shm_open takes it, without further path separators";
            return Err(invalid("key", format_args!("'{}'", excerpt(key)), expected));
        }
        let SharedMemory { prefix, owners, .. } = &self.folder.limits;
        if !name.starts_with(prefix.as_str()) {
            let expected = format!("a name that begins with '{prefix}' (clients.shared_memory.prefix)");
            return Err(invalid("key", format_args!("'{}'", excerpt(key)), expected));
        }
        // Without NONBLOCK a FIFO would hold us up.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(self.folder.path.join(name), flags, Mode::empty());
        let file = File::from(file.map_err(|cause| unreadable(key, &cause.into()))?);
        let metadata = file.metadata().map_err(|cause| unreadable(key, &cause))?;
        if !metadata.is_file() {
            return Err(invalid("key", format_args!("'{}'", excerpt(key)), "shared memory"));
        }
        if owners.as_ref().is_some_and(|owners| !owners.contains(&metadata.uid())) {
            let expected = "shared memory of one of clients.shared_memory.owners";
            return Err(invalid("key", format_args!("'{}'", excerpt(key)), expected));
        }
        Ok(file)
    }
}

fn unreadable(key: &str, cause: &io::Error) -> InferError {
    InferError::Invalid(format!("key: '{}' cannot be opened as shared memory: {cause}", excerpt(key)))
}

fn truncated(span: &RegionSpan, cause: &io::Error) -> InferError {
    let RegionSpan { region, offset, bytes } = span;
    let region = excerpt(region);
    InferError::Invalid(format!(
        "shared memory region '{region}': {bytes} bytes at offset {offset} are not there: {cause}; was it truncated?"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_region(bytes: &[u8]) -> (tempfile::TempDir, Regions) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("shm"), bytes).unwrap();
        let regions = Regions::new(folder.path());
        (folder, regions)
    }

    fn span(offset: u64, bytes: u64) -> RegionSpan {
        RegionSpan { region: "r".to_owned(), offset, bytes }
    }

    #[test]
    fn what_is_registered_is_read_and_written_in_its_bounds() {
        let (folder, mut regions) = with_region(&[0, 1, 2, 3, 4, 5, 6, 7]);
        regions.register("r", "/shm", 2, 4).unwrap();
        assert_eq!(&regions.read(&span(1, 3)).unwrap()[..], [3, 4, 5]);
        regions.write(&span(2, 2), &[9]).unwrap();
        assert_eq!(std::fs::read(folder.path().join("shm")).unwrap(), [0, 1, 2, 3, 9, 5, 6, 7]);
        for outside in [span(2, 3), span(5, 0), span(u64::MAX, 2)] {
            assert!(regions.read(&outside).unwrap_err().to_string().contains("a part of its 4 bytes"));
        }
        assert!(regions.write(&span(0, 1), &[1, 2]).unwrap_err().to_string().contains("at least the output's 2"));
        assert_eq!(regions.status(Some("r")).unwrap()["r"].byte_size, 4);
        regions.unregister(Some("r"));
        regions.unregister(Some("r"));
        assert!(matches!(regions.read(&span(0, 1)), Err(InferError::NotFound(_))));
        assert!(regions.status(None).unwrap().is_empty());
    }

    const A: Client = Client::Certificate([1; 16]);
    const B: Client = Client::Certificate([2; 16]);

    #[test]
    fn a_region_belongs_to_the_client_that_registered_it() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), [1; 8]).unwrap();
        std::fs::write(folder.path().join("b"), [2; 8]).unwrap();
        let mut all = AllRegions::new(folder.path());
        all.register(A, "r", "/a", 0, 8).unwrap();
        for other in [Some(B), None] {
            assert!(matches!(all.of(other).read(&span(0, 1)), Err(InferError::NotFound(_))));
            assert!(matches!(all.of(other).write(&span(0, 1), &[9]), Err(InferError::NotFound(_))));
            assert!(all.of(other).status(None).unwrap().is_empty() && all.of(other).status(Some("r")).is_err());
        }
        all.unregister(B, Some("r"));
        all.unregister(B, None);
        all.register(B, "r", "/b", 0, 8).unwrap();
        assert_eq!(&all.of(Some(A)).read(&span(0, 2)).unwrap()[..], [1, 1]);
        assert_eq!(&all.of(Some(B)).read(&span(0, 2)).unwrap()[..], [2, 2]);
        all.retain(|client| client != A);
        assert!(all.of(Some(A)).status(None).unwrap().is_empty());
        all.unregister(B, None);
        assert!(all.clients.is_empty());
    }

    #[test]
    fn regions_are_bounded_for_each_client_and_restricted_by_name_and_owner() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["serve_a", "serve_b", "other"] {
            std::fs::write(folder.path().join(name), [0; 8]).unwrap();
        }
        let own = std::fs::metadata(folder.path()).unwrap().uid();
        let limits = SharedMemory {
            prefix: "serve_".into(),
            owners: Some(vec![own]),
            client_regions_max: 2,
            client_bytes_max: 10,
        };
        let mut all = AllRegions::new(folder.path());
        all.set_limits(limits.clone());
        let mut refuse = |name: &str, key: &str, bytes| all.register(A, name, key, 0, bytes).unwrap_err().to_string();
        assert!(refuse("r", "/other", 8).contains("begins with 'serve_' (clients.shared_memory.prefix)"));
        all.register(A, "r", "/serve_a", 0, 8).unwrap();
        let mut refuse = |name: &str, key: &str, bytes| all.register(A, name, key, 0, bytes).unwrap_err().to_string();
        let error = refuse("s", "/serve_b", 3);
        assert!(error.starts_with("byte_size: found 3, expected at most 2 beside the 8 registered"), "{error}");
        all.register(A, "s", "/serve_b", 0, 2).unwrap();
        let error = all.register(A, "t", "/serve_b", 0, 1).unwrap_err().to_string();
        assert!(
            error.contains("2 regions are registered already (clients.shared_memory.client_regions_max)"),
            "{error}"
        );
        all.register(B, "t", "/serve_b", 0, 8).expect("another client has its own");
        all.set_limits(SharedMemory { owners: Some(vec![own + 1]), ..limits });
        all.unregister(B, None);
        let error = all.register(B, "t", "/serve_b", 0, 8).unwrap_err().to_string();
        assert!(error.contains("shared memory of one of clients.shared_memory.owners"), "{error}");
    }

    #[test]
    fn a_truncated_region_is_an_error_and_does_not_grow() {
        let (folder, mut regions) = with_region(&[0; 64]);
        regions.register("r", "shm", 0, 64).unwrap();
        let file = File::options().write(true).open(folder.path().join("shm")).unwrap();
        file.set_len(8).unwrap();
        assert!(regions.read(&span(0, 64)).unwrap_err().to_string().contains("was it truncated?"));
        assert!(regions.write(&span(4, 8), &[1; 8]).unwrap_err().to_string().contains("was it truncated?"));
        assert_eq!(file.metadata().unwrap().len(), 8);
        regions.write(&span(0, 8), &[1; 8]).unwrap();
    }

    #[test]
    fn keys_that_lead_elsewhere_are_refused() {
        let (folder, mut regions) = with_region(&[0; 8]);
        std::os::unix::fs::symlink("shm", folder.path().join("link")).unwrap();
        std::fs::create_dir(folder.path().join("folder")).unwrap();
        let mut refuse = |key: &str| regions.register("r", key, 0, 8).unwrap_err().to_string();
        for key in ["../shm", "/a/b", "", "/", ".", "..", "a\0b"] {
            assert!(refuse(key).contains("expected a name as shm_open takes it"), "{key}");
        }
        for key in ["nothing", "link", "folder"] {
            assert!(refuse(key).contains("cannot be opened as shared memory"), "{key}: {}", refuse(key));
        }
        for (offset, bytes) in [(0, 9), (0, 0), (9, 1), (u64::MAX, u64::MAX)] {
            let error = regions.register("r", "shm", offset, bytes).unwrap_err().to_string();
            assert!(error.starts_with(&format!("byte_size: found {bytes}, expected 1 to")), "{error}");
        }
        regions.register("r", "shm", 0, 8).unwrap();
        assert!(regions.register("r", "shm", 0, 8).unwrap_err().to_string().contains("unregister it first"));
    }
}
