//! Staging memory as GPUs know it: pinned, so that they read inputs from it and write outputs to it by themselves. It
//! stays so until the last batch of its session has let go of it. And what GPUs have of their own that inputs are READ
//! into (GPUDirect).

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{Arc, Mutex, PoisonError},
};

use cuda::{Landing, PinnedRegion};
use transport::{Endpoint, Region};

use crate::{
    error::ExecutorError,
    executor::{OnGpus, gpus::Devices},
};

/// Staging memory of a session.
#[derive(Debug)]
pub(super) struct Staged {
    region: Region,
    pins: Mutex<BTreeMap<usize, PinnedRegion>>,
    /// By the GPU's index.
    landings: BTreeMap<usize, Arc<Landing>>,
}

impl Staged {
    /// No GPU knows it yet.
    pub(super) fn unpinned(region: Region) -> Self {
        Self { region, pins: Mutex::default(), landings: BTreeMap::new() }
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

    /// Has inputs READ into the memory of each of so many GPUs that has been opened, so far as GPUs and the RDMA device
    /// let us; the keys of those that do. Of the others inputs pass through staging memory.
    pub(super) fn land(
        &mut self,
        endpoint: &mut Endpoint,
        devices: &Devices,
        (gpus, bytes): (usize, usize),
    ) -> BTreeMap<usize, u32> {
        let mut keys = BTreeMap::new();
        for gpu in 0..gpus {
            match land(endpoint, devices, (gpu, bytes)) {
                Ok(Some((landing, lkey))) => {
                    self.landings.insert(gpu, landing);
                    keys.insert(gpu, lkey);
                }
                Ok(None) => {}
                Err(ExecutorError(reason)) => {
                    tracing::warn!(gpu, reason, "gpu_direct: inputs pass through host memory");
                }
            }
        }
        keys
    }

    /// Where inputs are READ to of models that take them from the GPU's own memory, if they are.
    pub(super) fn landing(&self, gpu: usize) -> Option<&Landing> {
        self.landings.get(&gpu).map(|landing| &**landing)
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

/// A GPU's memory and what it is registered as; nothing if that is not wanted.
fn land(
    endpoint: &mut Endpoint,
    devices: &Devices,
    (gpu, bytes): (usize, usize),
) -> Result<Option<(Arc<Landing>, u32)>, ExecutorError> {
    let Some(landing) = devices.landing(gpu, bytes)? else { return Ok(None) };
    let registered = endpoint.register_device_memory(&landing.memory()?);
    let (lkey, way) = registered.map_err(|error| ExecutorError(error.to_string()))?;
    tracing::info!(gpu, bytes, way = way.name(), "inputs are read straight into the GPU's memory");
    Ok(Some((landing, lkey)))
}
