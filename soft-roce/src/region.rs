//! The table of registered regions and the one check that every access passes: key, protection domain, permission,
//! bounds.
//!
//! A region lives from `register` to `deregister`, or to the SEND with invalidate of the one peer that it was made for.
//! Keys are random in all their bits, so neither a stranger nor a peer that knows some can guess another, and a stale
//! one does not reach what came later.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
    sync::Arc,
};

use rand_chacha::{ChaCha8Rng, rand_core::Rng};

use crate::{
    error::RegisterError,
    memory::{Access, Memory, ProtectionDomain, RegionConfig, RegionHandle, Segment},
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

/// Keys are random: spreading them over the table takes one multiplication (Knuth, volume 3, section 6.4). Whoever
/// sends us keys only looks them up.
#[derive(Default)]
struct KeyHasher(u64);

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

/// The regions of an endpoint.
pub(crate) struct RegionTable {
    /// By key. Never iterated over, as its order is nobody's.
    regions: HashMap<u32, Region, BuildHasherDefault<KeyHasher>>,
    limit: usize,
    next_address: u64,
}

impl RegionTable {
    pub(crate) fn new(limit: usize) -> Self {
        Self { regions: HashMap::default(), limit: limit.min(REGIONS_MAX), next_address: ADDRESS_BASE }
    }

    pub(crate) fn register(
        &mut self,
        memory: Arc<dyn Memory>,
        config: RegionConfig,
        rng: &mut ChaCha8Rng,
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
        loop {
            let key = rng.next_u32();
            // 0 is what a forgetful peer names.
            if let (1.., Entry::Vacant(free)) = (key, self.regions.entry(key)) {
                free.insert(Region { memory, config, address, bytes });
                return Ok(RegionHandle { lkey: key, rkey: key, address });
            }
        }
    }

    /// False if there is no such region.
    pub(crate) fn deregister(&mut self, key: u32) -> bool {
        self.regions.remove(&key).is_some()
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
        let region = self.find(domain, rkey)?;
        if !region.config.access.covers(needed) {
            return Err(Denied);
        }
        region.window(address.checked_sub(region.address).ok_or(Denied)?, bytes)
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
    use rand_chacha::rand_core::SeedableRng;

    use super::*;
    use crate::memory::HeapMemory;

    const HOME: ProtectionDomain = ProtectionDomain(0);

    fn table() -> (RegionTable, RegionHandle) {
        let mut table = RegionTable::new(4);
        let handle = register(&mut table, Access::ALL.into()).unwrap();
        (table, handle)
    }

    fn register(table: &mut RegionTable, config: RegionConfig) -> Result<RegionHandle, RegisterError> {
        table.register(HeapMemory::new(vec![0; 100]), config, &mut ChaCha8Rng::seed_from_u64(1))
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
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let second = table.register(HeapMemory::new(vec![0; 100]), Access::ALL.into(), &mut rng).unwrap();
        assert_ne!(first.rkey, second.rkey);
        assert!(table.remote(HOME, first.rkey, second.address, 1, Access::default()).is_err());
    }

    /// Regression: a connected peer could withdraw whatever it could reach, such as the memory that all peers share.
    #[test]
    fn only_the_peer_that_a_region_was_made_for_withdraws_it() {
        let (mut table, shared) = table();
        let [theirs, others] = [7, 8].map(QueuePairNumber);
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let config = RegionConfig { invalidated_over: Some(theirs), ..Access::ALL.into() };
        let made = table.register(HeapMemory::new(vec![0; 100]), config, &mut rng).unwrap();
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
        let mut table = RegionTable::new(REGIONS_MAX);
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let keys: Vec<u32> = (0..REGIONS_MAX)
            .map(|_| table.register(HeapMemory::new(vec![0; 8]), Access::LOCAL.into(), &mut rng).unwrap().rkey)
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
}
