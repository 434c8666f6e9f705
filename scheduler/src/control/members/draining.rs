//! Who is not to be used: members that operators have drained, backends that leave, and GPUs that do not work.

use proto::{BackendId, ModelId, hello::Member};

use super::Members;

impl Members {
    /// Notes that a member is drained, or resumed. False if it is not here, or was so.
    pub(in super::super) fn set_drained(&mut self, member: Member, is_drained: bool) -> bool {
        let is_here = match member {
            Member::Frontend(frontend) => self.frontends.contains_key(&frontend),
            Member::Backend(backend) => self.backends.contains_key(&backend),
        };
        is_here && if is_drained { self.drained.insert(member) } else { self.drained.remove(&member) }
    }

    /// Notes that a backend wants no more plans. False if it had said so, or is not there.
    pub(in super::super) fn set_leaving(&mut self, backend: BackendId) -> bool {
        self.backends.get_mut(&backend).is_some_and(|entry| !std::mem::replace(&mut entry.leaves, true))
    }

    /// Notes the sub-cluster that a backend says it is in.
    pub(in super::super) fn set_sub_cluster(&mut self, backend: BackendId, sub_cluster: u16) {
        if let Some(entry) = self.backends.get_mut(&backend) {
            entry.sub_cluster = Some(sub_cluster);
        }
    }

    /// Notes whether a GPU works. False if there is no such GPU.
    pub(in super::super) fn set_usable(&mut self, backend: BackendId, gpu_index: u32, is_usable: bool) -> bool {
        let gpu = self.backends.get(&backend).and_then(|entry| entry.gpus.get(gpu_index as usize));
        let Some(gpu) = gpu.and_then(|id| self.gpus.get_mut(id)) else { return false };
        gpu.is_usable = is_usable;
        true
    }

    /// What a backend hosts and no other one does whose GPUs are in use; ascending.
    pub(in super::super) fn only_at(&self, backend: BackendId) -> Vec<ModelId> {
        let Some(entry) = self.backends.get(&backend) else { return Vec::new() };
        let mut is_missing = vec![false; self.models.len()];
        for model in entry.gpus.iter().flat_map(|gpu| &*self.gpus[gpu].models) {
            is_missing[model.0 as usize] = true;
        }
        let others = self.gpus.values().filter(|gpu| gpu.backend != backend && gpu.is_usable);
        let others = others.filter(|gpu| self.reach.backends.contains(&gpu.backend));
        others.flat_map(|gpu| &*gpu.models).for_each(|model| is_missing[model.0 as usize] = false);
        (0..).map(ModelId).zip(is_missing).filter_map(|(model, is_missing)| is_missing.then_some(model)).collect()
    }
}
