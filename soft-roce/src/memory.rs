//! Registered memory: the trait through which the core reaches bytes, and what may be done with them.

use std::sync::{Arc, PoisonError};

#[cfg(interleavings)]
use loom::sync::Mutex;
#[cfg(not(interleavings))]
use std::sync::Mutex;

use crate::wire::QueuePairNumber;

/// Bytes that queue pairs move. The core has checked every offset and length against [`Memory::len`] before it calls.
///
/// Peers write while local threads read, so implementations share by `&self`; there is no byte order promise inside a
/// message (IBTA 9.5).
pub trait Memory: Send + Sync {
    /// Length in bytes; constant.
    fn len(&self) -> usize;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Copies `into.len()` bytes out, from `offset` on.
    fn read(&self, offset: usize, into: &mut [u8]);
    /// Copies `bytes` in at `offset`.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Replaces the host-endian `u64` at `offset` (a multiple of 8) by `swap` if it equals `compare`; returns what was
    /// there.
    fn compare_swap_u64(&self, offset: usize, compare: u64, swap: u64) -> u64;
    /// Adds to the host-endian `u64` at `offset` (a multiple of 8), wrapping; returns what was there.
    fn fetch_add_u64(&self, offset: usize, add: u64) -> u64;
}

/// Plain heap memory behind a lock: for tests, examples and small control buffers.
#[derive(Debug)]
pub struct HeapMemory(Mutex<Vec<u8>>);

impl HeapMemory {
    /// Takes over `bytes`.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(bytes)))
    }

    /// A copy of all bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.with(|bytes| bytes.clone())
    }

    fn with<T>(&self, apply: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        apply(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn update_u64(&self, offset: usize, update: impl FnOnce(u64) -> u64) -> u64 {
        self.with(|bytes| {
            let word = &mut bytes[offset..offset + 8];
            let original = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
            word.copy_from_slice(&update(original).to_ne_bytes());
            original
        })
    }
}

impl Memory for HeapMemory {
    fn len(&self) -> usize {
        self.with(|bytes| bytes.len())
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.with(|bytes| into.copy_from_slice(&bytes[offset..offset + into.len()]));
    }
    fn write(&self, offset: usize, from: &[u8]) {
        self.with(|bytes| bytes[offset..offset + from.len()].copy_from_slice(from));
    }
    fn compare_swap_u64(&self, offset: usize, compare: u64, swap: u64) -> u64 {
        self.update_u64(offset, |original| if original == compare { swap } else { original })
    }
    fn fetch_add_u64(&self, offset: usize, add: u64) -> u64 {
        self.update_u64(offset, |original| original.wrapping_add(add))
    }
}

/// What may be done with a region, or over a queue pair. Both must allow what a peer asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// Our own receives and READs may fill it. Reading it locally needs no permission.
    pub local_write: bool,
    /// Peers may READ it.
    pub remote_read: bool,
    /// Peers may WRITE it; needs `local_write` on a region.
    pub remote_write: bool,
    /// Peers may run atomics on it; needs `local_write` on a region.
    pub remote_atomic: bool,
}

impl Access {
    /// Only we use it.
    pub const LOCAL: Self = Self { local_write: true, remote_read: false, remote_write: false, remote_atomic: false };
    /// Everything.
    pub const ALL: Self = Self { local_write: true, remote_read: true, remote_write: true, remote_atomic: true };

    /// Whether everything that `needed` allows is allowed here too.
    pub(crate) const fn covers(self, needed: Self) -> bool {
        (self.local_write || !needed.local_write)
            && (self.remote_read || !needed.remote_read)
            && (self.remote_write || !needed.remote_write)
            && (self.remote_atomic || !needed.remote_atomic)
    }
}

/// Groups regions and queue pairs that belong together (IBTA 10.2.3); chosen by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct ProtectionDomain(pub u32);

/// How a region is registered. From an [`Access`]: in protection domain 0, at an address chosen by us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RegionConfig {
    /// What may be done with it.
    pub access: Access,
    /// Only queue pairs of this domain reach it.
    pub protection_domain: ProtectionDomain,
    /// The virtual address of its first byte, for peers; `None`: a multiple of 4096 that no other region overlaps.
    pub address: Option<u64>,
    /// The queue pair whose peer may withdraw the region by a SEND with invalidate, as it may a memory window of type 2
    /// that is bound to that queue pair (IBTA 10.6.7.2.6); `None`: nobody but us.
    pub invalidated_over: Option<QueuePairNumber>,
}

impl From<Access> for RegionConfig {
    fn from(access: Access) -> Self {
        Self { access, ..Self::default() }
    }
}

/// A registered region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionHandle {
    /// Names the region in local work requests.
    pub lkey: u32,
    /// Names it in a peer's.
    pub rkey: u32,
    /// The virtual address of its first byte, for peers.
    pub address: u64,
}

/// Every interleaving of the threads that share a region's bytes.
#[cfg(all(test, interleavings))]
mod loom_tests {
    use loom::{model, thread};

    use super::*;

    /// Two threads add to one word by `add`; what it holds then.
    fn sum(add: fn(&HeapMemory)) -> u64 {
        let memory = HeapMemory::new(vec![0; 8]);
        let other = memory.clone();
        let adder = thread::spawn(move || add(&other));
        add(&memory);
        adder.join().expect("it adds");
        memory.with(|bytes| u64::from_ne_bytes((&bytes[..]).try_into().expect("eight bytes")))
    }

    #[test]
    fn loom_no_addition_is_lost() {
        model(|| {
            let add = |memory: &HeapMemory| {
                memory.fetch_add_u64(0, 1);
            };
            assert_eq!(sum(add), 2);
        });
    }

    /// Control: reads, and writes back later, so that an addition in between is lost.
    #[test]
    #[should_panic(expected = "left: 1")]
    fn loom_control_an_addition_in_two_steps_is_lost() {
        model(|| {
            let add = |memory: &HeapMemory| {
                let mut word = [0; 8];
                memory.read(0, &mut word);
                memory.write(0, &(u64::from_ne_bytes(word) + 1).to_ne_bytes());
            };
            assert_eq!(sum(add), 2);
        });
    }

    /// A peer's WRITE of one packet, while the owner looks with `look`: whether it was ever seen in part.
    fn is_torn(look: fn(&HeapMemory) -> [u8; 2]) -> bool {
        let memory = HeapMemory::new(vec![0; 2]);
        let peer = memory.clone();
        let writer = thread::spawn(move || peer.write(0, &[1; 2]));
        let seen = look(&memory);
        writer.join().expect("it writes");
        seen[0] != seen[1]
    }

    #[test]
    fn loom_a_packet_is_seen_whole_or_not_at_all() {
        model(|| {
            assert!(!is_torn(|memory| {
                let mut both = [0; 2];
                memory.read(0, &mut both);
                both
            }));
        });
    }

    /// Control: looks at one byte after the other.
    #[test]
    #[should_panic(expected = "is_torn")]
    fn loom_control_a_packet_is_torn_by_two_looks() {
        model(|| {
            assert!(!is_torn(|memory| {
                [0, 1].map(|at| {
                    let mut one = [0];
                    memory.read(at, &mut one);
                    one[0]
                })
            }));
        });
    }
}

/// A piece of local registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// The region.
    pub lkey: u32,
    /// Where in the region, in bytes from its start.
    pub offset: usize,
    /// Length; with 0 the key is not looked at.
    pub bytes: u32,
}
