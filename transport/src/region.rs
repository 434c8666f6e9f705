//! Memory that peers may reach: mapped once, page aligned, on hugepages where the system has any. And memory that
//! another process has mapped as well ([`Region::map_shared`]).
//!
//! A peer writes a region through the endpoint's thread while other threads of ours read it, and nobody can be stopped
//! from reading too early. So the memory is a slice of [`AtomicU64`] and every copy goes through relaxed loads and
//! stores of words, or of vectors of them (`copy`): an early reader sees old words or new words, never undefined
//! behaviour.
//!
//! What is promised: each aligned 8-byte word is copied whole; words are not ordered against one another; once an
//! event has told of a transfer (`ReadDone`, `Immediate`, `Message`), the transfer's bytes are visible to the thread
//! that polled the event, and to every thread that this one hands them to by the usual means (channels, locks).
//!
//! This module has `unsafe` because a mapping's address has to become a slice once, and be unmapped once; `copy`
//! because vectors of atomic words need assembly.

mod copy;

use std::{
    ops::Range,
    os::fd::AsFd as _,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::sealed_memory::SealedMemory;

const WORD: usize = size_of::<u64>();
const PAGE: usize = 4096;
/// The hugepage size of x86-64 and of arm64 with 4 KiB pages.
const HUGEPAGE: usize = 2 * 1024 * 1024;

/// Memory that peers may reach. Cheap to clone; all clones are the same bytes. See the module's text for what a reader
/// sees while a peer writes.
#[derive(Clone, Debug)]
pub struct Region {
    mapping: Arc<Mapping>,
    bytes: usize,
}

impl Region {
    /// Allocates zeroed, page-aligned memory: from the pool of reserved hugepages if it has enough, else ordinary pages
    /// that the kernel is asked to back with transparent hugepages.
    ///
    /// # Errors
    /// If the system has not so much memory to map.
    pub fn allocate(bytes: usize) -> std::io::Result<Self> {
        Ok(Self { mapping: Arc::new(Mapping::new(bytes)?), bytes })
    }

    /// Maps memory that another process may map, too.
    ///
    /// # Errors
    /// If the system cannot map it.
    pub(crate) fn map_shared(memory: &SealedMemory) -> std::io::Result<Self> {
        Ok(Self { mapping: Arc::new(Mapping::shared(memory)?), bytes: memory.bytes() })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it is mapped, for a device that reaches it by itself.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.mapping.address.as_ptr().expose_provenance() as u64
    }

    /// Has the kernel back these bytes now, as far as they are inside. Otherwise the first access to each page waits
    /// until it is zeroed, and a hugepage takes as long as a small batch.
    pub fn populate(&self, bytes: Range<usize>) {
        let end = bytes.end.min(self.bytes).div_ceil(WORD);
        let words = self.mapping.words().get(bytes.start / PAGE * (PAGE / WORD)..end).unwrap_or_default();
        for page in words.chunks(PAGE / WORD) {
            // Writes what is there, whoever else writes. An addition of zero would be compiled to a load.
            let _ = page[0].compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Copies `bytes` in at `offset`.
    ///
    /// # Panics
    /// When out of bounds: our own bug, a peer's bounds are checked before.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        let (first, head) = (offset / WORD, offset % WORD);
        let head_bytes = if head == 0 { 0 } else { bytes.len().min(WORD - head) };
        let (start, rest) = bytes.split_at(head_bytes);
        let words = self.mapping.words();
        if head_bytes > 0 {
            write_part(&words[first], head, start);
        }
        let whole = &words[first + usize::from(head_bytes > 0)..];
        let (chunks, end) = rest.as_chunks::<WORD>();
        copy::store(&whole[..chunks.len()], chunks);
        if !end.is_empty() {
            write_part(&whole[chunks.len()], 0, end);
        }
    }

    /// Copies out at `offset`.
    ///
    /// # Panics
    /// When out of bounds: our own bug.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        let (first, head) = (offset / WORD, offset % WORD);
        let head_bytes = if head == 0 { 0 } else { into.len().min(WORD - head) };
        let (start, rest) = into.split_at_mut(head_bytes);
        let words = self.mapping.words();
        if head_bytes > 0 {
            read_part(&words[first], head, start);
        }
        let whole = &words[first + usize::from(head_bytes > 0)..];
        let (chunks, end) = rest.as_chunks_mut::<WORD>();
        copy::load(&whole[..chunks.len()], chunks);
        if !end.is_empty() {
            read_part(&whole[chunks.len()], 0, end);
        }
    }

    /// The word at `offset`, for atomic operations.
    ///
    /// # Panics
    /// When out of bounds or not a multiple of 8.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        self.check(offset, WORD);
        assert!(offset.is_multiple_of(WORD), "an atomic operation at offset {offset}, which is no multiple of 8");
        &self.mapping.words()[offset / WORD]
    }

    fn check(&self, offset: usize, bytes: usize) {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at offset {offset} are outside a region of {} bytes",
            self.bytes
        );
    }
}

/// The core checks bounds before it calls, so nothing a peer asks for panics here.
impl soft_roce::Memory for Region {
    fn len(&self) -> usize {
        self.bytes
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        Self::read(self, offset, into);
    }
    fn write(&self, offset: usize, bytes: &[u8]) {
        Self::write(self, offset, bytes);
    }
    fn compare_swap_u64(&self, offset: usize, compare: u64, swap: u64) -> u64 {
        match self.word(offset).compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(original) | Err(original) => original,
        }
    }
    fn fetch_add_u64(&self, offset: usize, add: u64) -> u64 {
        self.word(offset).fetch_add(add, Ordering::SeqCst)
    }
}

/// Replaces some bytes of a word; a concurrent change to its other bytes is not lost.
fn write_part(word: &AtomicU64, at: usize, bytes: &[u8]) {
    let mut old = word.load(Ordering::Relaxed);
    loop {
        let mut new = old.to_ne_bytes();
        new[at..at + bytes.len()].copy_from_slice(bytes);
        match word.compare_exchange_weak(old, u64::from_ne_bytes(new), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => old = now,
        }
    }
}

fn read_part(word: &AtomicU64, at: usize, into: &mut [u8]) {
    into.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[at..at + into.len()]);
}

/// A mapping, anonymous and private or of sealed memory, unmapped with its last clone.
#[derive(Debug)]
struct Mapping {
    address: NonNull<AtomicU64>,
    mapped_bytes: usize,
}

impl Mapping {
    fn new(bytes: usize) -> std::io::Result<Self> {
        let unit = if bytes >= HUGEPAGE { HUGEPAGE } else { PAGE };
        let mapped_bytes = bytes.max(1).checked_next_multiple_of(unit).ok_or(std::io::ErrorKind::OutOfMemory)?;
        if unit == HUGEPAGE
            && let Ok(mapping) = Self::map(mapped_bytes, MapFlags::HUGETLB)
        {
            return Ok(mapping);
        }
        // Room for the largest batch is mostly never touched, and need not be backed.
        let mapping = Self::map(mapped_bytes, MapFlags::NORESERVE)?;
        if unit == HUGEPAGE {
            // Advice only: a kernel without transparent hugepages refuses it and small pages serve as well.
            // SAFETY: the range is exactly the mapping that we own; LinuxHugepage changes no contents.
            let _ =
                unsafe { rustix::mm::madvise(mapping.address.as_ptr().cast(), mapped_bytes, Advice::LinuxHugepage) };
        }
        Ok(mapping)
    }

    fn map(mapped_bytes: usize, extra: MapFlags) -> std::io::Result<Self> {
        // SAFETY: a fresh anonymous mapping at an address that the kernel chooses overlaps no other memory of ours.
        let address = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | extra,
            )
        }?;
        let address = NonNull::new(address.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, mapped_bytes })
    }

    fn shared(memory: &SealedMemory) -> std::io::Result<Self> {
        let mapped_bytes = memory.bytes();
        // SAFETY: a fresh mapping at an address that the kernel chooses overlaps no other memory of ours. What is
        // mapped cannot become shorter.
        let address = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), mapped_bytes, protection, MapFlags::SHARED, memory.as_fd(), 0)
        }?;
        let address = NonNull::new(address.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, mapped_bytes })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page aligned, readable, writable, `mapped_bytes` long (a multiple of the page size,
        // below isize::MAX as it was mapped) and lives as long as `self`. All zeroes and any other bytes are valid
        // words. Every access of this process is through this slice, so all are atomic. Another process that has mapped
        // it, too, is no party to this program: whatever it writes comes as other values of words.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.mapped_bytes / WORD) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly what `map` mapped, and no borrow of it outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok(), "a whole mapping of ours can always be unmapped");
    }
}

// SAFETY: the mapping belongs to no thread in particular, and munmap may be called from any.
unsafe impl Send for Mapping {}
// SAFETY: shared access goes through atomic words only.
unsafe impl Sync for Mapping {}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "two threads meet")]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a plain vector: any sequence of writes reads back, at every alignment and length.
        #[test]
        fn copies_as_a_vector_does(
            writes in proptest::collection::vec((0usize..200, proptest::collection::vec(any::<u8>(), 0..900)), 1..20),
            (from, length) in (0usize..200, 0usize..900),
        ) {
            const BYTES: usize = 1100;
            let region = Region::allocate(BYTES).unwrap();
            let mut oracle = vec![0; BYTES];
            for (offset, bytes) in &writes {
                region.write(*offset, bytes);
                oracle[*offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            let mut read = vec![0xee; length];
            region.read(from, &mut read);
            prop_assert_eq!(&read, &oracle[from..from + length]);
            let mut all = vec![0; BYTES];
            region.read(0, &mut all);
            prop_assert_eq!(all, oracle);
        }
    }

    #[test]
    fn neighbours_in_one_word_do_not_overwrite_each_other() {
        let region = Region::allocate(8).unwrap();
        std::thread::scope(|scope| {
            for at in 0..8 {
                let region = region.clone();
                scope.spawn(move || (0..=255u8).cycle().take(20_000).for_each(|byte| region.write(at, &[byte])));
            }
        });
        let mut bytes = [0; 8];
        region.read(0, &mut bytes);
        assert_eq!(bytes, [((20_000 - 1) % 256) as u8; 8]);
    }

    #[test]
    fn large_and_empty_regions_are_zeroed() {
        for bytes in [0, 1, PAGE, HUGEPAGE + 1] {
            let region = Region::allocate(bytes).unwrap();
            let mut read = vec![0xee; bytes];
            region.read(0, &mut read);
            assert_eq!(region.len(), bytes);
            assert!(read.iter().all(|&byte| byte == 0));
        }
    }

    /// Pages of the region that have memory behind them (proc_pid_pagemap(5): bits 63 and 62 of each page's word).
    fn backed_pages(region: &Region) -> usize {
        let first = region.mapping.address.as_ptr().addr() / PAGE;
        let mut words = vec![0; region.len().div_ceil(PAGE) * 8];
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        pagemap.read_exact_at(&mut words, first as u64 * 8).unwrap();
        words.chunks(8).filter(|word| word[7] & 0b1100_0000 != 0).count()
    }

    /// How large the pages are that the kernel takes does not matter: what is written later may find memory already.
    #[test]
    fn what_is_populated_has_memory_and_keeps_its_bytes() {
        const PAGES: usize = 200;
        let region = Region::allocate(PAGES * PAGE).unwrap();
        assert_eq!(backed_pages(&region), 0);
        region.write(0, &[1, 2, 3]);
        region.populate(1..PAGES * PAGE + 1_000_000);
        region.populate(2 * PAGES * PAGE..3 * PAGES * PAGE);
        assert_eq!(backed_pages(&region), PAGES);
        let mut read = [0; 4];
        region.read(0, &mut read);
        assert_eq!(read, [1, 2, 3, 0]);
    }

    #[test]
    #[should_panic(expected = "outside a region of 16 bytes")]
    fn out_of_bounds_is_our_bug() {
        Region::allocate(16).unwrap().write(15, &[1, 2]);
    }
}
