//! What is in the memory of GPUs and hosts, as backends say.

use proto::{BackendId, GpuId, ModelId, Span, weights::WeightsTally};

use super::{Members, Memory, Resident};

impl Members {
    /// GPUs that planners could use if it were known what is in their memory; from now on it is asked about.
    pub(in super::super) fn gpus_to_ask(&mut self) -> Vec<GpuId> {
        let mut asked = Vec::new();
        for (&id, gpu) in &mut self.gpus {
            let obeys = self.backends.get(&gpu.backend).is_some_and(|entry| entry.obeys);
            let is_used = gpu.is_usable && obeys && self.reach.backends.contains(&gpu.backend);
            if let Some(memory) = gpu.memory.as_mut().filter(|memory| memory.resident == Resident::Unknown)
                && is_used
            {
                memory.resident = Resident::Asked(Vec::new());
                asked.push(id);
            }
        }
        asked
    }

    /// A backend that begins to obey knows none of its GPUs' names any more.
    pub(in super::super) fn forget_resident(&mut self, backend: BackendId) {
        for gpu in self.backends.get(&backend).into_iter().flat_map(|entry| &entry.gpus) {
            let gpu = self.gpus.get_mut(gpu).expect("GPUs leave with their backend");
            let is_planned = gpu.planned.is_some();
            if let Some(memory) = &mut gpu.memory {
                *memory = Memory { is_disputed: is_planned, ..Memory::new(memory.pages) };
            }
        }
        if let Some(entry) = self.backends.get_mut(&backend) {
            entry.on_disk.clear();
        }
    }

    /// Notes which of the models that a backend hosts are in its host memory. Yields its GPUs that planners know.
    pub(in super::super) fn set_host_memory(
        &mut self,
        backend: BackendId,
        models: &[ModelId],
        is_there: bool,
    ) -> Vec<GpuId> {
        let Some(entry) = self.backends.get_mut(&backend) else { return Vec::new() };
        for model in models {
            if is_there {
                entry.on_disk.remove(model);
            } else if entry.offers.contains_key(model) {
                entry.on_disk.insert(*model);
            }
        }
        entry.gpus.iter().copied().filter(|gpu| self.gpus[gpu].planned.is_some()).collect()
    }

    /// Notes what a backend says has become of weights.
    pub(in super::super) fn set_tally(&mut self, backend: BackendId, tally: WeightsTally) {
        if let Some(entry) = self.backends.get_mut(&backend) {
            entry.tally = WeightsTally { busy: tally.busy.max(Span::ZERO), ..tally };
        }
    }

    /// What has become of weights at all backends.
    pub(in super::super) fn tally(&self) -> WeightsTally {
        self.backends.values().fold(self.past, |sum, entry| sum.plus(entry.tally))
    }
}
