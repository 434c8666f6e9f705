//! What operators are shown of members.

use std::sync::Arc;

use proto::{BackendId, FrontendId, ModelId, hello::Member};

use super::{Joining, Members};
use crate::{
    advice::Advisor,
    control::names::Names,
    snapshot::{BackendShown, FrontendShown, GpuShown, MemberState, ModelName, ModelShown, Whereabouts},
};

impl Members {
    /// All frontends.
    pub(in super::super) fn shown_frontends(
        &self,
        names: &Names,
        at: impl Fn(Member) -> Option<Whereabouts>,
    ) -> Vec<FrontendShown> {
        let shown = self.frontends.iter().map(|(&id, entry)| {
            let member = Member::Frontend(id);
            let state = self.state((member, false), &entry.joining, self.reach.frontends.contains(&id));
            let name = names.of(member).unwrap_or_default().to_owned();
            let FrontendId(id) = id;
            FrontendShown { id, name, at: at(member), state, obeys: entry.heir.obeys }
        });
        shown.collect()
    }

    /// All backends, with their GPUs.
    pub(in super::super) fn shown_backends(
        &self,
        names: &Names,
        at: impl Fn(Member) -> Option<Whereabouts>,
    ) -> Vec<BackendShown> {
        let shown = self.backends.iter().map(|(&id, entry)| {
            let member = Member::Backend(id);
            let gpus = entry.gpus.iter().map(|id| (*id, &self.gpus[id])).map(|(id, gpu)| GpuShown {
                id,
                is_usable: gpu.is_usable,
                is_planned: gpu.planned.is_some(),
                models: Arc::clone(&gpu.models),
                pages: gpu.memory.as_ref().map(|memory| memory.pages),
            });
            let BackendId(number) = id;
            BackendShown {
                id: number,
                name: names.of(member).unwrap_or_default().to_owned(),
                at: at(member),
                state: self.state((member, entry.leaves), &entry.joining, self.reach.backends.contains(&id)),
                obeys: entry.obeys,
                links: entry.linked.len(),
                sub_cluster: entry.sub_cluster,
                weights: entry.tally,
                gpus: gpus.collect(),
            }
        });
        shown.collect()
    }

    /// All models.
    pub(in super::super) fn shown_models(&self, advisor: &Advisor) -> Vec<ModelShown> {
        let shown = (0..).map(ModelId).zip(&self.models);
        shown.map(|(id, model)| ModelShown { rate_rps: advisor.rate(id), pages: model.weights.pages }).collect()
    }

    /// The models from this id on.
    pub(in super::super) fn model_names(&self, from: usize) -> Vec<ModelName> {
        let models = self.models.get(from..).unwrap_or_default();
        models.iter().map(|model| (model.name.clone(), model.version.clone())).collect()
    }

    fn state(&self, (member, leaves): (Member, bool), joining: &Joining, is_in_reach: bool) -> MemberState {
        match () {
            () if leaves => MemberState::Leaving,
            () if !joining.is_over() => MemberState::Joining,
            () if self.drained.contains(&member) => MemberState::Drained,
            () if !is_in_reach => MemberState::Unlinked,
            () => MemberState::Serving,
        }
    }
}
