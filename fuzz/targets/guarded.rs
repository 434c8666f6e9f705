//! Registered memory between guards.

use std::sync::{Arc, Mutex};

use soft_roce::Memory;

pub const REGION_BYTES: usize = 2048;
const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0x5a;

/// A region with guards at both ends, which checks no access itself: what goes beyond shows in the guards.
pub struct Guarded(Mutex<Vec<u8>>);

impl Guarded {
    pub fn new(fill: u8) -> Arc<Self> {
        let mut bytes = vec![GUARD; GUARD_BYTES + REGION_BYTES + GUARD_BYTES];
        bytes[GUARD_BYTES..GUARD_BYTES + REGION_BYTES].fill(fill);
        Arc::new(Self(Mutex::new(bytes)))
    }

    /// Panics if a guard was written.
    pub fn check(&self) {
        let bytes = self.0.lock().unwrap();
        let (front, rest) = bytes.split_at(GUARD_BYTES);
        assert!(front.iter().chain(&rest[REGION_BYTES..]).all(|&byte| byte == GUARD), "written out of bounds");
    }

    pub fn all(&self, wanted: u8) -> bool {
        self.with(0, REGION_BYTES, |bytes| bytes.iter().all(|&byte| byte == wanted))
    }

    fn with<T>(&self, offset: usize, bytes: usize, apply: impl FnOnce(&mut [u8]) -> T) -> T {
        let start = GUARD_BYTES + offset;
        apply(&mut self.0.lock().unwrap()[start..start + bytes])
    }

    fn update(&self, offset: usize, update: impl FnOnce(u64) -> u64) -> u64 {
        self.with(offset, 8, |word| {
            let original = u64::from_ne_bytes((&*word).try_into().unwrap());
            word.copy_from_slice(&update(original).to_ne_bytes());
            original
        })
    }
}

impl Memory for Guarded {
    fn len(&self) -> usize {
        REGION_BYTES
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        assert!(offset + into.len() <= REGION_BYTES, "read out of bounds");
        self.with(offset, into.len(), |bytes| into.copy_from_slice(bytes));
    }
    fn write(&self, offset: usize, from: &[u8]) {
        self.with(offset, from.len(), |bytes| bytes.copy_from_slice(from));
    }
    fn compare_swap_u64(&self, offset: usize, compare: u64, swap: u64) -> u64 {
        self.update(offset, |original| if original == compare { swap } else { original })
    }
    fn fetch_add_u64(&self, offset: usize, add: u64) -> u64 {
        self.update(offset, |original| original.wrapping_add(add))
    }
}
