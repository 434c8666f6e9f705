//! Carries out what the [placer](crate::placer) orders, and tells it what there is.

use std::collections::{BTreeMap, BTreeSet};

use proto::{BackendId, ModelId, Timestamp, scheduler_to_backend::SchedulerToBackend, weights::PAGE_BYTES};

use super::{Control, ControlOutput, changes::Changes, members::Members};
use crate::{
    advice::Advisor,
    placer::{Order, Seat, Seen, Whereabouts},
};

impl Control {
    /// Goes on with placing models, if that is this scheduler's to do.
    pub(super) fn place_due(&mut self, now: Timestamp) {
        let is_on = self.claim().is_primary() && !self.takeover.is_under_way() && !self.takeover.is_handed_over;
        let Some(placer) = &mut self.placer else { return };
        placer.handle_standing(now, is_on);
        placer.handle_timeout(now, &Seeing { members: &self.members, changes: &self.changes, advisor: &self.advisor });
        while let Some(order) = self.placer.as_mut().and_then(|placer| placer.poll_order()) {
            self.carry_out(now, order);
        }
    }

    /// Who hosts what, or who is used, has changed, or a change of a model has ended.
    pub(super) fn on_whereabouts_changed(&mut self) {
        self.refuge.handle_changed();
        if let Some(placer) = &mut self.placer {
            placer.handle_changed();
        }
    }

    fn carry_out(&mut self, now: Timestamp, order: Order) {
        match order {
            Order::Assign(backend, sub_cluster) => {
                tracing::info!(backend = backend.0, sub_cluster, "a backend is in a sub-cluster now");
                self.members.set_sub_cluster(backend, sub_cluster);
                self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::Assign { sub_cluster }));
            }
            // Where the model is being changed it is ordered again once that has ended.
            Order::Copy(name, to) => drop(self.begin_copy(now, &name, to)),
            Order::LetGo(gone) => {
                let versions = |(backend, name): &(BackendId, String)| {
                    let backend = *backend;
                    self.members.versions_on(backend, name).map(move |model| (backend, model)).collect::<Vec<_>>()
                };
                let mut gone: BTreeSet<(BackendId, ModelId)> = gone.iter().flat_map(versions).collect();
                self.members.retain_hosted_elsewhere(&mut gone);
                self.let_go(now, gone);
            }
        }
    }
}

/// What the placer sees of control.
struct Seeing<'a> {
    members: &'a Members,
    changes: &'a Changes,
    advisor: &'a Advisor,
}

impl Whereabouts for Seeing<'_> {
    fn backends(&self) -> BTreeMap<BackendId, Seat> {
        let seats = self.members.staying().filter_map(|(id, gpus)| {
            let entry = self.members.backends.get(&id).filter(|entry| entry.is_auto)?;
            Some((id, Seat { sub_cluster: entry.sub_cluster, gpus: gpus as u32 }))
        });
        seats.collect()
    }

    fn names(&self) -> Vec<&str> {
        self.members.names().collect()
    }

    fn seen(&self, name: &str) -> Option<Seen> {
        if self.changes.is_unloaded(name) {
            return None;
        }
        let mut seen = Seen { rate_rps: self.rate_rps(name), ..Seen::default() };
        for host in self.members.hosts_of(name) {
            if host.is_auto {
                seen.hosts.insert(host.backend);
                seen.planned.extend(host.is_planned_whole.then_some(host.backend));
            } else {
                seen.is_elsewhere |= host.is_planned;
            }
        }
        // What only backends of fixed placements host is theirs.
        if seen.hosts.is_empty() && (seen.is_elsewhere || !self.members.is_used_nowhere(name)) {
            return None;
        }
        seen.bytes = u64::from(self.members.pages_of(name)) * PAGE_BYTES;
        Some(seen)
    }

    fn rate_rps(&self, name: &str) -> f64 {
        self.members.rate_of(name, self.advisor)
    }
}
