//! Step 1, Step 10 through shared memory: POSIX shared memory that clients on this host register by name.
//!
//! A region is read by pread and written by pwrite, never mapped: a client that truncates its region gets an error,
//! and cannot kill this process with a signal. A region lives until it is unregistered and no request that names it is
//! under way; its descriptor goes with it. It belongs to the client that registered it: nobody else sees, reads, writes
//! or unregisters it, and others may have regions of the same name.
//!
//! Errors begin with the words of Triton's, which clients look for.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::PathBuf,
    rc::Rc,
    sync::{Arc, Weak},
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
/// What the names begin with that Triton keeps for itself: clients look for the refusal.
const RESERVED_PREFIX: &str = "triton_python_backend_shm_region_";

/// Where a client says that a tensor lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionSpan {
    /// The region's name.
    pub region: String,
    /// From the region's start, in bytes.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A part of a region. The region stays as it is, whatever becomes of its name, until all its parts are dropped.
#[derive(Debug, Clone)]
pub struct Part {
    span: RegionSpan,
    region: Arc<Region>,
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
    regions: BTreeMap<String, Arc<Region>>,
    /// Unregistered, and here for as long as requests that name them are under way.
    leaving: BTreeMap<String, Weak<Region>>,
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
        self.clients.retain(|_, regions| !regions.is_empty());
        if self.clients.values().map(Regions::len).sum::<usize>() >= REGIONS_MAX {
            return Err(InferError::Invalid(format!("{REGIONS_MAX} regions are registered already; unregister some")));
        }
        let empty = || {
            let (regions, leaving) = Default::default();
            Regions { folder: Rc::clone(&self.folder), regions, leaving }
        };
        let regions = self.clients.entry(of).or_insert_with(empty);
        let registered = regions.register(name, key, at, bytes);
        self.forget_if_none(of);
        registered
    }

    /// Forgets a region of a client, or all that it has, once no request names them; one that is not there is no error.
    pub fn unregister(&mut self, of: Client, name: Option<&str>) {
        if let Some(regions) = self.clients.get_mut(&of) {
            regions.unregister(name);
            self.forget_if_none(of);
        }
    }

    fn forget_if_none(&mut self, client: Client) {
        if self.clients.get_mut(&client).is_some_and(|regions| regions.is_empty()) {
            self.clients.remove(&client);
        }
    }
}

impl Regions {
    /// No regions of a client that may register whatever is in `folder`.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let folder = Rc::new(Folder { path: folder.into(), limits: SharedMemory::default() });
        let (regions, leaving) = Default::default();
        Self { folder, regions, leaving }
    }

    /// Registers `bytes` bytes from `offset` of the shared memory that `key` names, as shm_open takes it.
    ///
    /// # Errors
    /// If the name is taken, or the key names no shared memory of that size.
    pub fn register(&mut self, name: &str, key: &str, offset: u64, bytes: u64) -> Result<(), InferError> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(invalid("name", format_args!("{} bytes", name.len()), format_args!("1 to {NAME_BYTES_MAX}")));
        }
        self.settle();
        if self.regions.contains_key(name) || self.leaving.contains_key(name) {
            let name = excerpt(name);
            let text = format!("shared memory region '{name}' already in manager; unregister it first");
            return Err(InferError::Invalid(text));
        }
        let SharedMemory { client_regions_max, client_bytes_max, .. } = self.folder.limits;
        if self.len() >= client_regions_max {
            let key = "clients.shared_memory.client_regions_max";
            let text = format!("{client_regions_max} regions are registered already ({key}); unregister some");
            return Err(InferError::Invalid(text));
        }
        let file = self.folder.open(name, key)?;
        let refused = |cause: InferError| failed(name, &cause);
        let found = file.metadata().map_err(|cause| refused(unreadable(key, &cause)))?.len();
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > found) {
            let expected = format!("1 to {} at offset {offset}, what '{key}' has", found.saturating_sub(offset));
            return Err(refused(InferError::Invalid(format!(
                "invalid args, {}",
                invalid("byte_size", bytes, expected)
            ))));
        }
        let own: u64 = self.live().map(|region| region.bytes).sum();
        if own.checked_add(bytes).is_none_or(|sum| sum > client_bytes_max) {
            let room = client_bytes_max.saturating_sub(own);
            let expected =
                format!("at most {room} beside the {own} registered (clients.shared_memory.client_bytes_max)");
            return Err(invalid("byte_size", bytes, expected));
        }
        self.regions.insert(name.to_owned(), Arc::new(Region { key: key.to_owned(), offset, bytes, file }));
        Ok(())
    }

    /// Forgets a region, or all of them, once no request names them; one that is not there is no error.
    pub fn unregister(&mut self, name: Option<&str>) {
        let gone = self.regions.extract_if(.., |region, _| name.is_none_or(|name| name == region));
        self.leaving.extend(gone.map(|(name, region)| (name, Arc::downgrade(&region))));
        self.settle();
    }

    /// What is registered, by name, and what was and is still in use.
    ///
    /// # Errors
    /// If there is no region of that name.
    pub fn status(&self, name: Option<&str>) -> Result<BTreeMap<String, RegionStatus>, InferError> {
        let leaving = self.leaving.iter().filter_map(|(name, region)| Some((name, region.upgrade()?)));
        let all = self.regions.iter().map(|(name, region)| (name, Arc::clone(region))).chain(leaving);
        let status = |(name, region): (&String, Arc<Region>)| {
            let (key, offset, byte_size) = (region.key.clone(), region.offset, region.bytes);
            (name.clone(), RegionStatus { name: name.clone(), key, offset, byte_size })
        };
        let wanted = all.filter(|(region, _)| name.is_none_or(|name| name == *region));
        let found: BTreeMap<String, RegionStatus> = wanted.map(status).collect();
        match name.filter(|_| found.is_empty()) {
            Some(name) => Err(InferError::NotFound(format!(
                "Unable to find system shared memory region: '{}'; expected a registered one",
                excerpt(name)
            ))),
            None => Ok(found),
        }
    }

    /// The part that a request names.
    ///
    /// # Errors
    /// If there is no such region, or the part lies outside of it.
    pub fn part(&self, span: RegionSpan) -> Result<Part, InferError> {
        let name = excerpt(&span.region);
        // As in Triton, one that is about to go may be named for as long as a request uses it.
        let leaving = || self.leaving.get(&span.region).and_then(Weak::upgrade);
        let Some(region) = self.regions.get(&span.region).cloned().or_else(leaving) else {
            let text = format!("Unable to find shared memory region: '{name}'; expected a registered one");
            return Err(InferError::NotFound(text));
        };
        let RegionSpan { offset, bytes, .. } = span;
        let of = format!("for shared memory region: '{name}'");
        let wrong = match offset.checked_add(bytes) {
            _ if offset >= region.bytes => format!("Invalid offset {of}"),
            None => format!(
                "Integer overflow detected: byte_size ({bytes}) + offset ({offset}) exceeds maximum value ({}) for \
                 region '{name}'",
                u64::MAX
            ),
            Some(end) if end > region.bytes => format!("Invalid offset + byte size {of}"),
            Some(_) => return Ok(Part { region, span }),
        };
        let expected = format!("a part of its {} bytes", region.bytes);
        Err(InferError::Invalid(format!("{wrong}; found {bytes} bytes at offset {offset}, expected {expected}")))
    }

    /// Forgets what has left.
    fn settle(&mut self) {
        self.leaving.retain(|_, region| region.strong_count() > 0);
    }

    fn live(&self) -> impl Iterator<Item = Arc<Region>> {
        self.regions.values().cloned().chain(self.leaving.values().filter_map(Weak::upgrade))
    }

    fn len(&self) -> usize {
        self.live().count()
    }

    fn is_empty(&mut self) -> bool {
        self.settle();
        self.regions.is_empty() && self.leaving.is_empty()
    }
}

impl Part {
    /// Where the client said that it is.
    #[must_use]
    pub fn span(&self) -> &RegionSpan {
        &self.span
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// If the client has truncated the region.
    pub fn read(&self) -> Result<Bytes, InferError> {
        let mut bytes = vec![0; self.span.bytes as usize];
        self.region.file.read_exact_at(&mut bytes, self.at()).map_err(|cause| truncated(&self.span, &cause))?;
        Ok(bytes.into())
    }

    /// Writes a tensor of `bytes.len()` bytes at its front.
    ///
    /// # Errors
    /// If it does not fit there, or the client has truncated the region.
    pub fn write(&self, bytes: &[u8]) -> Result<(), InferError> {
        let Self { span, region } = self;
        if bytes.len() as u64 > span.bytes {
            let field = format!("shared memory region '{}': shared_memory_byte_size", excerpt(&span.region));
            return Err(invalid(&field, span.bytes, format_args!("at least the output's {}", bytes.len())));
        }
        let found = region.file.metadata().map_err(|cause| truncated(span, &cause))?.len();
        // A write beyond the end would make the file larger again.
        if found < self.at() + bytes.len() as u64 {
            return Err(truncated(span, &io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        region.file.write_all_at(bytes, self.at()).map_err(|cause| truncated(span, &cause))
    }

    /// Where it starts in the file; it was checked that it ends there.
    fn at(&self) -> u64 {
        self.region.offset + self.span.offset
    }
}

impl PartialEq for Part {
    fn eq(&self, other: &Self) -> bool {
        self.span == other.span && Arc::ptr_eq(&self.region, &other.region)
    }
}

impl Eq for Part {}

impl Folder {
    /// Opens shared memory for a region: a plain file directly in the folder, whatever else of that name may be
    /// elsewhere.
    fn open(&self, region: &str, key: &str) -> Result<File, InferError> {
        let refused = |cause: InferError| failed(region, &cause);
        if key.trim_start_matches('/').starts_with(RESERVED_PREFIX) {
            let (region, key) = (excerpt(region), excerpt(key));
            return Err(InferError::Invalid(format!(
                "cannot register shared memory region '{region}' with key '{key}' as the key contains the reserved \
                 prefix '{RESERVED_PREFIX}'"
            )));
        }
        let name = key.strip_prefix('/').unwrap_or(key);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(['/', '\0']) || [".", ".."].contains(&name) {
            let (region, key) = (excerpt(region), excerpt(key));
            return Err(InferError::Invalid(format!(
                "cannot register shared memory region '{region}' - invalid shm key '{key}', expected a name as \
                 shm_open takes it, without further path separators"
            )));
        }
        let SharedMemory { prefix, owners, .. } = &self.limits;
        if !name.starts_with(prefix.as_str()) {
            let expected = format!("a name that begins with '{prefix}' (clients.shared_memory.prefix)");
            return Err(invalid("key", format_args!("'{}'", excerpt(key)), expected));
        }
        // Without NONBLOCK a FIFO would hold us up.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(self.path.join(name), flags, Mode::empty());
        let file = File::from(file.map_err(|cause| refused(unreadable(key, &cause.into())))?);
        let metadata = file.metadata().map_err(|cause| refused(unreadable(key, &cause)))?;
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

fn failed(region: &str, cause: &InferError) -> InferError {
    InferError::Invalid(format!("failed to register shared memory region '{}': {cause}", excerpt(region)))
}

fn unreadable(key: &str, cause: &io::Error) -> InferError {
    InferError::Invalid(format!("Unable to open shared memory region: '{}': {cause}", excerpt(key)))
}

/// CUDA shared memory, as on a host without CUDA: there never is any.
pub mod cuda {
    use frontend::{InferError, excerpt};

    /// Looks for a region, or for all.
    ///
    /// # Errors
    /// If one is named.
    pub fn status(name: Option<&str>) -> Result<(), InferError> {
        let none =
            |name| InferError::NotFound(format!("Unable to find cuda shared memory region: '{}'", excerpt(name)));
        name.map_or(Ok(()), |name| Err(none(name)))
    }

    /// Why none can be registered.
    #[must_use]
    pub fn unsupported(name: &str) -> InferError {
        let name = excerpt(name);
        let text = format!("failed to register shared memory region '{name}': invalid args, GPUs not supported");
        InferError::Invalid(text)
    }
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
        assert_eq!(&regions.part(span(1, 3)).unwrap().read().unwrap()[..], [3, 4, 5]);
        regions.part(span(2, 2)).unwrap().write(&[9]).unwrap();
        assert_eq!(std::fs::read(folder.path().join("shm")).unwrap(), [0, 1, 2, 3, 9, 5, 6, 7]);
        for (outside, words) in [
            (span(2, 3), "Invalid offset + byte size for shared memory region: 'r'"),
            (span(4, 0), "Invalid offset for shared memory region: 'r'"),
            (span(u64::MAX, 2), "Invalid offset for shared memory region: 'r'"),
            (span(3, u64::MAX), "Integer overflow detected: byte_size (18446744073709551615) + offset (3)"),
        ] {
            let error = regions.part(outside).unwrap_err().to_string();
            assert!(error.starts_with(words) && error.ends_with("expected a part of its 4 bytes"), "{error}");
        }
        let short = regions.part(span(0, 1)).unwrap().write(&[1, 2]).unwrap_err();
        assert!(short.to_string().contains("at least the output's 2"), "{short}");
        assert_eq!(regions.status(Some("r")).unwrap()["r"].byte_size, 4);
        regions.unregister(Some("r"));
        regions.unregister(Some("r"));
        assert!(matches!(regions.part(span(0, 1)), Err(InferError::NotFound(_))));
        assert!(regions.status(None).unwrap().is_empty() && regions.leaving.is_empty());
    }

    #[test]
    fn a_region_that_a_request_names_leaves_once_the_request_has_ended() {
        let (folder, mut regions) = with_region(&[0; 8]);
        regions.register("r", "/shm", 0, 4).unwrap();
        let [part, twin] = [(); 2].map(|()| regions.part(span(1, 2)).unwrap());
        regions.unregister(None);
        regions.unregister(Some("r"));
        assert_eq!(regions.status(Some("r")).unwrap()["r"].byte_size, 4, "it is still there");
        assert!(regions.part(span(1, 2)).is_ok(), "and for others");
        let taken = regions.register("r", "/shm", 4, 4).unwrap_err().to_string();
        assert!(taken.starts_with("shared memory region 'r' already in manager"), "{taken}");
        drop(twin);
        part.write(&[7, 8]).unwrap();
        assert_eq!(std::fs::read(folder.path().join("shm")).unwrap(), [0, 7, 8, 0, 0, 0, 0, 0]);
        drop(part);
        assert!(regions.status(None).unwrap().is_empty() && regions.status(Some("r")).is_err());
        regions.register("r", "/shm", 4, 4).unwrap();
        assert_eq!(regions.status(None).unwrap()["r"].offset, 4);
    }

    #[test]
    fn there_is_no_cuda_shared_memory() {
        assert_eq!(cuda::status(None), Ok(()));
        assert!(matches!(cuda::status(Some("r")), Err(InferError::NotFound(_))));
        assert!(cuda::unsupported("r").to_string().ends_with("'r': invalid args, GPUs not supported"));
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
            assert!(matches!(all.of(other).part(span(0, 1)), Err(InferError::NotFound(_))));
            assert!(all.of(other).status(None).unwrap().is_empty() && all.of(other).status(Some("r")).is_err());
        }
        all.unregister(B, Some("r"));
        all.unregister(B, None);
        all.register(B, "r", "/b", 0, 8).unwrap();
        assert_eq!(&all.of(Some(A)).part(span(0, 2)).unwrap().read().unwrap()[..], [1, 1]);
        assert_eq!(&all.of(Some(B)).part(span(0, 2)).unwrap().read().unwrap()[..], [2, 2]);
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
        let part = |offset, bytes| regions.part(span(offset, bytes)).unwrap();
        assert!(part(0, 64).read().unwrap_err().to_string().contains("was it truncated?"));
        assert!(part(4, 8).write(&[1; 8]).unwrap_err().to_string().contains("was it truncated?"));
        assert_eq!(file.metadata().unwrap().len(), 8);
        part(0, 8).write(&[1; 8]).unwrap();
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
            let expected =
                format!("failed to register shared memory region 'r': Unable to open shared memory region: '{key}'");
            assert!(refuse(key).starts_with(&expected), "{key}: {}", refuse(key));
        }
        assert!(refuse("///triton_python_backend_shm_region_1").contains("the reserved prefix"));
        for (offset, bytes) in [(0, 9), (0, 0), (9, 1), (u64::MAX, u64::MAX)] {
            let error = regions.register("r", "shm", offset, bytes).unwrap_err().to_string();
            let expected = format!(
                "failed to register shared memory region 'r': invalid args, byte_size: found {bytes}, expected 1 to"
            );
            assert!(error.starts_with(&expected), "{error}");
        }
        regions.register("r", "shm", 0, 8).unwrap();
        assert!(regions.register("r", "shm", 0, 8).unwrap_err().to_string().contains("unregister it first"));
    }
}
