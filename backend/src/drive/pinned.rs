//! Staging memory as GPUs know it: pinned, so that they read inputs from it and write outputs to it by themselves. It
//! stays so until the last batch of its session has let go of it.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{Mutex, PoisonError},
};

use cuda::PinnedRegion;
use transport::Region;

use crate::executor::{ExecutorError, OnGpus, gpus::Devices};

/// Staging memory of a session.
#[derive(Debug)]
pub(super) struct Staged {
    region: Region,
    pins: Mutex<BTreeMap<usize, PinnedRegion>>,
}

impl Staged {
    /// No GPU knows it yet.
    pub(super) fn unpinned(region: Region) -> Self {
        Self { region, pins: Mutex::default() }
    }

    /// All GPUs know it that are in use so far.
    ///
    /// # Errors
    /// If it cannot be pinned.
    pub(super) fn pinned(region: Region, devices: &Devices, gpus: usize) -> Result<Self, ExecutorError> {
        let mut staged = Self::unpinned(region);
        for gpu in 0..gpus {
            let pinned = devices.pin(gpu, &staged.region)?.map(|pinned| (gpu, pinned));
            staged.pins.get_mut().unwrap_or_else(PoisonError::into_inner).extend(pinned);
        }
        Ok(staged)
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Sees to it that a GPU knows it: the first model of that one may have come later.
    pub(super) fn pin(&self, model: &OnGpus, gpu: usize) -> Result<(), ExecutorError> {
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Vacant(entry) = pins.entry(gpu) {
            entry.insert(model.on(gpu).gpu().pin(&self.region)?);
        }
        Ok(())
    }
}
