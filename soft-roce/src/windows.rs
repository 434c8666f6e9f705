//! Memory windows: keys that open a part of a region to peers for a while (IBTA 10.6.7). Their owner binds and unbinds
//! them at any time; from then on a key opens what it should, or nothing, and no packet need pass.
//!
//! They are what windows of type 2 are, but for two things. One has two ranges, what may be READ and what may be
//! WRITTEN, so one key is all that a peer needs that reads here and answers there. And none is bound to a queue pair:
//! who knows the key may use it. So keys are random in all their bits, as those of regions are, with which they share
//! one space of numbers.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rand_chacha::{ChaCha8Rng, rand_core::Rng};

/// Keys are random: spreading them over the table takes one multiplication (Knuth, volume 3, section 6.4). Whoever
/// sends us keys only looks them up.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write_u32(&mut self, key: u32) {
        self.0 = u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(self.0 as u32 ^ u32::from(byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// By key.
pub(crate) type ByKey<T> = HashMap<u32, T, BuildHasherDefault<KeyHasher>>;

/// What a window opens, in bytes from its region's start. What lies outside the region is opened to nobody.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryWindow {
    /// What peers may READ.
    pub readable: Range<u64>,
    /// What peers may WRITE.
    pub writable: Range<u64>,
}

/// Binds windows to one region, on any thread.
#[derive(Debug, Clone)]
pub struct MemoryWindows {
    region: u32,
    keys: Keys,
}

impl MemoryWindows {
    /// Opens a window. Yields its key, which is never 0.
    #[must_use]
    pub fn bind(&self, window: MemoryWindow) -> u32 {
        self.keys.lock().insert(Some(Bound { region: self.region, window }))
    }

    /// Closes a window: when this returns, its key opens nothing any more, but to a packet that is just being copied.
    /// False if there is none.
    pub fn unbind(&self, key: u32) -> bool {
        match self.keys.lock().used.entry(key) {
            Entry::Occupied(entry) if entry.get().as_ref().is_some_and(|bound| bound.region == self.region) => {
                entry.remove();
                true
            }
            _ => false,
        }
    }
}

/// All keys of an endpoint: its regions' and its windows'.
#[derive(Debug, Clone)]
pub(crate) struct Keys(Arc<Mutex<Table>>);

#[derive(Debug)]
struct Table {
    /// With what it opens, if it is a window's. Never iterated over in an order that matters.
    used: ByKey<Option<Bound>>,
    rng: ChaCha8Rng,
}

/// A window, and the key of its region.
#[derive(Debug, Clone)]
pub(crate) struct Bound {
    pub(crate) region: u32,
    pub(crate) window: MemoryWindow,
}

impl Keys {
    pub(crate) fn new(rng: ChaCha8Rng) -> Self {
        Self(Arc::new(Mutex::new(Table { used: HashMap::default(), rng })))
    }

    /// A key for a region.
    pub(crate) fn draw(&self) -> u32 {
        self.lock().insert(None)
    }

    /// A region has gone, and its windows with it.
    pub(crate) fn remove(&self, region: u32) {
        let mut table = self.lock();
        table.used.remove(&region);
        table.used.retain(|_, bound| bound.as_ref().is_none_or(|bound| bound.region != region));
    }

    /// The window that a key opens.
    pub(crate) fn window(&self, key: u32) -> Option<Bound> {
        self.lock().used.get(&key)?.clone()
    }

    /// To bind windows to a region.
    pub(crate) fn windows(&self, region: u32) -> MemoryWindows {
        MemoryWindows { region, keys: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn insert(&mut self, bound: Option<Bound>) -> u32 {
        loop {
            let key = self.rng.next_u32();
            // 0 is what a forgetful peer names.
            if let (1.., Entry::Vacant(free)) = (key, self.used.entry(key)) {
                free.insert(bound);
                return key;
            }
        }
    }
}
