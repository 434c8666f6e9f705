//! What is registered: the host's memory, or another device's.

use crate::{DeviceMemory, Region};

/// Cheap to clone; all clones are the same bytes, which stay as long as one does.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    Host(Region),
    Device(DeviceMemory),
}

impl Memory {
    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Host(region) => region.address(),
            Self::Device(memory) => memory.address(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Host(region) => region.len(),
            Self::Device(memory) => memory.len(),
        }
    }
}
