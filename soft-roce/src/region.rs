//! The table of registered regions and the one check that every access passes: key, protection domain, permission,
//! bounds.
//!
//! A region lives from `register` to `deregister`, or to the SEND with invalidate of the one peer that it was made for,
//! and parts of it are opened by windows ([`crate::windows`]), whatever it is open for itself.
//! Keys are random in all their bits, so neither a stranger nor a peer that knows some can guess another, and a stale
//! one does not reach what came later.

use std::sync::Arc;

use rand_chacha::ChaCha8Rng;

use crate::{
    error::RegisterError,
    memory::{Access, Memory, ProtectionDomain, RegionConfig, RegionHandle, Segment},
    windows::{Bound, ByKey, Keys, MemoryWindow, MemoryWindows},
    wire::QueuePairNumber,
};

/// Most regions at once: few among all keys.
pub(crate) const REGIONS_MAX: usize = 1 << 12;
/// Regions that choose no address of their own are laid out from here, apart from each other.
const ADDRESS_BASE: u64 = 0x10_0000_0000;
const ADDRESS_ALIGNMENT: u64 = 4096;

/// An access that is not allowed. Which check failed is nobody's business: it would help to guess keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Denied;

/// Checked bytes of a region.
#[derive(Clone, Copy)]
pub(crate) struct Window<'a> {
    pub(crate) memory: &'a dyn Memory,
    pub(crate) offset: usize,
}

struct Region {
    memory: Arc<dyn Memory>,
    config: RegionConfig,
    address: u64,
    bytes: u64,
}

/// The regions of an endpoint.
pub(crate) struct RegionTable {
    /// By key. Never iterated over, as its order is nobody's.
    regions: ByKey<Region>,
    /// Theirs and those of windows.
    keys: Keys,
    limit: usize,
    next_address: u64,
}

impl RegionTable {
    /// Keys come of `rng`.
    pub(crate) fn new(limit: usize, rng: ChaCha8Rng) -> Self {
        let (regions, keys) = (ByKey::default(), Keys::new(rng));
        Self { regions, keys, limit: limit.min(REGIONS_MAX), next_address: ADDRESS_BASE }
    }

    pub(crate) fn register(
        &mut self,
        memory: Arc<dyn Memory>,
        config: RegionConfig,
    ) -> Result<RegionHandle, RegisterError> {
        let access = config.access;
        if (access.remote_write || access.remote_atomic) && !access.local_write {
            return Err(RegisterError::Access);
        }
        let bytes = memory.len() as u64;
        let address = config.address.unwrap_or(self.next_address);
        let end = address.checked_add(bytes).ok_or(RegisterError::Range { address, bytes: memory.len() })?;
        if self.regions.len() >= self.limit {
            return Err(RegisterError::Full(self.limit));
        }
        if config.address.is_none() {
            // A gap after each region keeps an overrun from reaching the next one.
            self.next_address = end.next_multiple_of(ADDRESS_ALIGNMENT) + ADDRESS_ALIGNMENT;
        }
        let key = self.keys.draw();
        self.regions.insert(key, Region { memory, config, address, bytes });
        Ok(RegionHandle { lkey: key, rkey: key, address })
    }

    /// False if there is no such region.
    pub(crate) fn deregister(&mut self, key: u32) -> bool {
        let is_gone = self.regions.remove(&key).is_some();
        if is_gone {
            self.keys.remove(key);
        }
        is_gone
    }

    /// To bind windows to a region.
    pub(crate) fn windows(&self, lkey: u32) -> MemoryWindows {
        self.keys.windows(lkey)
    }

    /// The wish of a queue pair's peer to withdraw a region, which must be one that was made for it to withdraw.
    pub(crate) fn invalidate(
        &mut self,
        domain: ProtectionDomain,
        key: u32,
        over: QueuePairNumber,
    ) -> Result<(), Denied> {
        if self.find(domain, key)?.config.invalidated_over != Some(over) {
            return Err(Denied);
        }
        self.deregister(key);
        Ok(())
    }

    /// `bytes` of a local segment from `from` on. Reading locally is always allowed.
    pub(crate) fn local(&self, domain: ProtectionDomain, segment: Segment, write: bool) -> Result<Window<'_>, Denied> {
        let region = self.find(domain, segment.lkey)?;
        if write && !region.config.access.local_write {
            return Err(Denied);
        }
        region.window(segment.offset as u64, u64::from(segment.bytes))
    }

    /// `bytes` at a virtual address, as a peer names it.
    pub(crate) fn remote(
        &self,
        domain: ProtectionDomain,
        rkey: u32,
        address: u64,
        bytes: u64,
        needed: Access,
    ) -> Result<Window<'_>, Denied> {
        let Some(region) = self.regions.get(&rkey) else {
            return self.through_window(domain, rkey, address, bytes, needed);
        };
        if region.config.protection_domain != domain || !region.config.access.covers(needed) {
            return Err(Denied);
        }
        region.window(address.checked_sub(region.address).ok_or(Denied)?, bytes)
    }

    fn through_window(
        &self,
        domain: ProtectionDomain,
        key: u32,
        address: u64,
        bytes: u64,
        needed: Access,
    ) -> Result<Window<'_>, Denied> {
        let Bound { region, window: MemoryWindow { readable, writable } } = self.keys.window(key).ok_or(Denied)?;
        let region = self.find(domain, region)?;
        let range = match (needed.remote_read, needed.remote_write, needed.remote_atomic) {
            (true, false, false) => readable,
            (false, true, false) => writable,
            _ => return Err(Denied),
        };
        let start = address.checked_sub(region.address).ok_or(Denied)?;
        let end = start.checked_add(bytes).ok_or(Denied)?;
        if start < range.start || range.end < end {
            return Err(Denied);
        }
        region.window(start, bytes)
    }

    fn find(&self, domain: ProtectionDomain, key: u32) -> Result<&Region, Denied> {
        self.regions.get(&key).filter(|region| region.config.protection_domain == domain).ok_or(Denied)
    }
}

impl Region {
    fn window(&self, offset: u64, bytes: u64) -> Result<Window<'_>, Denied> {
        let end = offset.checked_add(bytes).ok_or(Denied)?;
        if end > self.bytes {
            return Err(Denied);
        }
        Ok(Window { memory: &*self.memory, offset: offset as usize })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    use super::*;
    use crate::memory::HeapMemory;

    const HOME: ProtectionDomain = ProtectionDomain(0);

    fn table() -> (RegionTable, RegionHandle) {
        let mut table = RegionTable::new(4, ChaCha8Rng::seed_from_u64(1));
        let handle = register(&mut table, Access::ALL.into()).unwrap();
        (table, handle)
    }

    fn register(table: &mut RegionTable, config: RegionConfig) -> Result<RegionHandle, RegisterError> {
        table.register(HeapMemory::new(vec![0; 100]), config)
    }

    #[test]
    fn bounds_hold_without_overflow() {
        let (table, RegionHandle { rkey, address, .. }) = table();
        let allowed = |address, bytes| table.remote(HOME, rkey, address, bytes, Access::default()).is_ok();
        assert!(allowed(address, 100) && allowed(address + 99, 1) && allowed(address + 100, 0));
        assert!(!allowed(address, 101) && !allowed(address - 1, 1) && !allowed(address + 100, 1));
        assert!(!allowed(u64::MAX, 2) && !allowed(address + 1, u64::MAX) && !allowed(0, 1));
        let local = |offset, bytes| table.local(HOME, Segment { lkey: rkey, offset, bytes }, true).is_ok();
        assert!(local(0, 100) && !local(1, 100) && !local(usize::MAX, 1));
    }

    #[test]
    fn key_domain_and_permission_must_match() {
        let (mut table, handle) = table();
        assert!(table.remote(HOME, handle.rkey ^ 1 << 20, handle.address, 1, Access::default()).is_err());
        assert!(table.remote(ProtectionDomain(1), handle.rkey, handle.address, 1, Access::default()).is_err());
        let read_only = Access { remote_read: true, ..Access::default() };
        let other = register(&mut table, read_only.into()).unwrap();
        let remote = |needed| table.remote(HOME, other.rkey, other.address, 1, needed).is_ok();
        assert!(remote(read_only));
        assert!(!remote(Access { remote_write: true, ..Access::default() }));
        assert!(!remote(Access { remote_atomic: true, ..Access::default() }));
        assert!(table.local(HOME, Segment { lkey: other.lkey, offset: 0, bytes: 1 }, false).is_ok());
        assert!(table.local(HOME, Segment { lkey: other.lkey, offset: 0, bytes: 1 }, true).is_err());
    }

    #[test]
    fn a_withdrawn_key_stays_dead() {
        let (mut table, first) = table();
        assert!(table.deregister(first.lkey) && !table.deregister(first.lkey));
        let second = register(&mut table, Access::ALL.into()).unwrap();
        assert_ne!(first.rkey, second.rkey);
        assert!(table.remote(HOME, first.rkey, second.address, 1, Access::default()).is_err());
    }

    /// Regression: a connected peer could withdraw whatever it could reach, such as the memory that all peers share.
    #[test]
    fn only_the_peer_that_a_region_was_made_for_withdraws_it() {
        let (mut table, shared) = table();
        let [theirs, others] = [7, 8].map(QueuePairNumber);
        let config = RegionConfig { invalidated_over: Some(theirs), ..Access::ALL.into() };
        let made = register(&mut table, config).unwrap();
        assert!(table.invalidate(HOME, shared.rkey, theirs).is_err());
        assert!(table.invalidate(HOME, made.rkey, others).is_err());
        assert!(table.invalidate(ProtectionDomain(3), made.rkey, theirs).is_err());
        assert!(
            table.invalidate(HOME, made.rkey, theirs).is_ok() && table.invalidate(HOME, made.rkey, theirs).is_err()
        );
        assert!(table.remote(HOME, shared.rkey, shared.address, 100, Access::ALL).is_ok());
    }

    /// Each bit of a key is set in about half of them, whatever the others are, and none is given twice.
    #[test]
    fn keys_are_random_in_all_their_bits() {
        let mut table = RegionTable::new(REGIONS_MAX, ChaCha8Rng::seed_from_u64(3));
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        let keys: Vec<u32> = (0..REGIONS_MAX)
            .map(|_| table.register(HeapMemory::new(vec![0; 8]), Access::LOCAL.into()).unwrap().rkey)
            .collect();
        let set: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(set.len(), REGIONS_MAX);
        for bit in 0..32 {
            let count = keys.iter().filter(|key| *key >> bit & 1 == 1).count();
            assert!((1_850..2_250).contains(&count), "bit {bit} is set in {count} of {REGIONS_MAX}");
        }
        assert!(keys.iter().all(|&key| table.find(HOME, key).is_ok()));
        assert!((0..1 << 16).map(|_| rng.next_u32()).all(|key| set.contains(&key) || table.find(HOME, key).is_err()));
    }

    #[test]
    fn refusals_name_what_to_change() {
        let (mut table, _) = table();
        let write_only = Access { remote_write: true, ..Access::default() };
        assert_eq!(register(&mut table, write_only.into()), Err(RegisterError::Access));
        let high = RegionConfig { address: Some(u64::MAX), ..RegionConfig::default() };
        assert_eq!(register(&mut table, high), Err(RegisterError::Range { address: u64::MAX, bytes: 100 }));
        for _ in 1..4 {
            register(&mut table, Access::LOCAL.into()).unwrap();
        }
        assert_eq!(register(&mut table, Access::LOCAL.into()), Err(RegisterError::Full(4)));
    }

    const READ: Access = Access { local_write: false, remote_read: true, remote_write: false, remote_atomic: false };
    const WRITE: Access = Access { local_write: false, remote_read: false, remote_write: true, remote_atomic: false };

    #[derive(Debug, Clone)]
    enum Step {
        Bind(std::ops::Range<u64>, std::ops::Range<u64>),
        /// One of those that were bound, whether it still is or not.
        Unbind(prop::sample::Index),
        Access(prop::sample::Index, bool, u64, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = || (0u64..110, 0u64..40).prop_map(|(start, bytes)| start..start + bytes);
        let index = any::<prop::sample::Index>;
        let step = prop_oneof![
            (range(), range()).prop_map(|(readable, writable)| Step::Bind(readable, writable)),
            index().prop_map(Step::Unbind),
            (index(), any::<bool>(), 0u64..120, 1u64..30).prop_map(|(at, w, from, n)| Step::Access(at, w, from, n)),
        ];
        proptest::collection::vec(step, 1..80)
    }

    proptest! {
        /// Against a list of all windows that ever were: a byte may be read, or written, if its window is there and
        /// names it.
        #[test]
        fn windows_open_what_they_name_for_as_long_as_they_are_there(steps in steps()) {
            let (mut table, region) = table();
            let windows = table.windows(region.lkey);
            let mut oracle: Vec<(u32, MemoryWindow, bool)> = Vec::new();
            for step in steps {
                match step {
                    Step::Bind(readable, writable) => {
                        let window = MemoryWindow { readable, writable };
                        let key = windows.bind(window.clone());
                        prop_assert!(key != 0 && key != region.rkey && oracle.iter().all(|(other, ..)| *other != key));
                        oracle.push((key, window, true));
                    }
                    Step::Unbind(at) if !oracle.is_empty() => {
                        let at = at.index(oracle.len());
                        prop_assert_eq!(windows.unbind(oracle[at].0), oracle[at].2);
                        oracle[at].2 = false;
                    }
                    Step::Access(at, writes, start, bytes) if !oracle.is_empty() => {
                        let (key, window, is_there) = at.get(&oracle).clone();
                        let range = if writes { window.writable } else { window.readable };
                        let named = |byte: u64| range.contains(&byte) && byte < 100;
                        let expected = is_there && (start..start + bytes).all(named);
                        let needed = if writes { WRITE } else { READ };
                        let found = table.remote(HOME, key, region.address + start, bytes, needed);
                        prop_assert_eq!(found.is_ok(), expected);
                        prop_assert!(found.is_err() || found.is_ok_and(|found| found.offset as u64 == start));
                        prop_assert!(table.remote(ProtectionDomain(1), key, region.address, 1, needed).is_err());
                    }
                    Step::Unbind(_) | Step::Access(..) => {}
                }
            }
            prop_assert!(table.remote(HOME, region.rkey, region.address, 100, Access::ALL).is_ok());
            table.deregister(region.lkey);
            register(&mut table, RegionConfig { address: Some(region.address), ..Access::ALL.into() }).unwrap();
            for (key, window, _) in oracle {
                prop_assert!(table.remote(HOME, key, region.address + window.readable.start, 1, READ).is_err());
            }
        }
    }

    #[test]
    fn a_window_is_no_region_and_a_region_no_window() {
        let (mut table, region) = table();
        let windows = table.windows(region.lkey);
        let key = windows.bind(MemoryWindow { readable: 0..100, writable: 0..100 });
        assert!(table.local(HOME, Segment { lkey: key, offset: 0, bytes: 1 }, false).is_err());
        assert!(table.remote(HOME, key, region.address, 8, Access { remote_atomic: true, ..WRITE }).is_err());
        assert!(table.remote(HOME, key, region.address, 1, Access::default()).is_err());
        assert!(table.remote(HOME, key, region.address - 1, 2, READ).is_err());
        assert!(table.remote(HOME, key, u64::MAX, 2, READ).is_err());
        assert!(table.invalidate(HOME, key, QueuePairNumber(7)).is_err());
        assert!(!table.deregister(key) && !windows.unbind(region.lkey));
        let other = register(&mut table, Access::LOCAL.into()).unwrap();
        assert!(!table.windows(other.lkey).unbind(key), "it is another region's");
        assert!(table.remote(HOME, key, region.address, 100, READ).is_ok());
    }
}
