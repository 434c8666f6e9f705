//! Memory that two processes map: a memfd that nobody can make shorter, so that no access to it ever fails
//! (memfd_create(2), F_ADD_SEALS in fcntl(2)).
#![allow(clippy::disallowed_methods)] // A driver: it makes and looks at files.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create};

/// What it is sealed by: it keeps its size, and nothing is sealed later.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Of tmpfs, in statfs(2). Another file system's pages may not be there when they are touched.
const TMPFS: i64 = 0x0102_1994;

/// A memfd of a size that does not change.
#[derive(Debug)]
pub(crate) struct SealedMemory {
    file: OwnedFd,
    bytes: usize,
}

impl SealedMemory {
    /// Zeroed.
    ///
    /// # Errors
    /// If the system has no memory or descriptor left.
    pub(crate) fn create(bytes: usize) -> io::Result<Self> {
        let file = memfd_create("downbeat-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(Self { file, bytes })
    }

    /// What another process hands over as such memory.
    ///
    /// # Errors
    /// One line if it is not: it has another size, can be made shorter, or is of another file system.
    pub(crate) fn check(file: OwnedFd, bytes: usize) -> io::Result<Self> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        let seals = fcntl_get_seals(&file)?;
        if !seals.contains(SEALS) {
            return wrong(format!("memory with the seals {seals:?}, expected {SEALS:?}"));
        }
        let (size, system) = (fstat(&file)?.st_size, fstatfs(&file)?.f_type);
        if usize::try_from(size) != Ok(bytes) || system != TMPFS {
            return wrong(format!("memory of {size} bytes on file system {system:#x}, expected {bytes} on tmpfs"));
        }
        Ok(Self { file, bytes })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;

    #[test]
    fn both_who_map_it_see_the_same_bytes() {
        let ours = SealedMemory::create(8192).unwrap();
        let theirs = SealedMemory::check(ours.as_fd().try_clone_to_owned().unwrap(), 8192).unwrap();
        let [ours, theirs] = [ours, theirs].map(|memory| Region::map_shared(&memory).unwrap());
        ours.write(4090, b"over a page");
        let mut bytes = [0; 11];
        theirs.read(4090, &mut bytes);
        assert_eq!((&bytes, theirs.len()), (b"over a page", 8192));
    }

    #[test]
    fn what_can_become_shorter_or_is_something_else_is_refused() {
        let memory = |flags| {
            let file = memfd_create("test", MemfdFlags::CLOEXEC | flags).unwrap();
            ftruncate(&file, 4096).unwrap();
            file
        };
        let refused = |file: OwnedFd| SealedMemory::check(file, 4096).unwrap_err().to_string();
        assert!(refused(memory(MemfdFlags::ALLOW_SEALING)).contains("seals"));
        let growing = memory(MemfdFlags::ALLOW_SEALING);
        fcntl_add_seals(&growing, SealFlags::GROW | SealFlags::SEAL).unwrap();
        assert!(refused(growing).contains("seals"));
        let sealed = SealedMemory::create(8192).unwrap().file;
        assert!(refused(sealed).contains("8192 bytes"));
        // Not a memfd at all.
        assert!(SealedMemory::check(std::fs::File::open("/proc/self/exe").unwrap().into(), 4096).is_err());
    }
}
