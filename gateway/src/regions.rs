//! Steps 1 and 10 through shared memory: POSIX shared memory that clients on this host register by name.
//!
//! A region is read by pread and written by pwrite, never mapped: a client that truncates its region gets an error,
//! and cannot kill this process with a signal. A region lives until it is unregistered; its descriptor goes with it.

use std::{collections::BTreeMap, fs::File, io, os::unix::fs::FileExt as _, path::PathBuf};

use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    excerpt,
};
use rustix::fs::{Mode, OFlags};

use crate::api::system_shared_memory_status_response::RegionStatus;

/// Regions at once: each holds a descriptor.
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

/// All registered regions, by name.
#[derive(Debug)]
pub struct Regions {
    folder: PathBuf,
    regions: BTreeMap<String, Region>,
}

#[derive(Debug)]
struct Region {
    key: String,
    offset: u64,
    bytes: u64,
    file: File,
}

impl Regions {
    /// No regions. Keys name files in `folder`, which is where the system keeps shared memory.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), regions: BTreeMap::new() }
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
        if self.regions.len() >= REGIONS_MAX {
            return Err(InferError::Invalid(format!("{REGIONS_MAX} regions are registered already; unregister some")));
        }
        let file = self.open(key)?;
        let found = file.metadata().map_err(|cause| unreadable(key, &cause))?.len();
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > found) {
            let expected = format!("1 to {} at offset {offset}, what '{key}' has", found.saturating_sub(offset));
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
        // Without NONBLOCK a FIFO would hold us up.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(self.folder.join(name), flags, Mode::empty());
        let file = File::from(file.map_err(|cause| unreadable(key, &cause.into()))?);
        let kind = file.metadata().map_err(|cause| unreadable(key, &cause))?.file_type();
        if !kind.is_file() {
            return Err(invalid("key", format_args!("'{}'", excerpt(key)), "shared memory"));
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
