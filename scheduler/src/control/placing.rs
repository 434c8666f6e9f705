//! Carries out what the [placer](crate::placer) orders, and tells it what there is.

use std::collections::{BTreeMap, BTreeSet};

use proto::{BackendId, ModelId, Timestamp, scheduler_to_backend::SchedulerToBackend, weights::PAGE_BYTES};

use super::{Control, ControlOutput};
use crate::placer::{Order, Seat, Seen, View};

impl Control {
    /// Goes on with placing models, if that is this scheduler's to do.
    pub(super) fn place_due(&mut self, now: Timestamp) {
        let is_on = self.claim().is_primary() && !self.takeover.is_under_way() && !self.takeover.is_handed_over;
        let Some(placer) = &mut self.placer else { return };
        placer.handle_standing(now, is_on);
        placer.handle_timeout(now);
        if placer.is_due(now) {
            let view = self.placement_view();
            self.placer.as_mut().expect("looked at above").handle_view(now, &view);
        }
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

    fn placement_view(&self) -> View {
        let seats = self.members.staying().filter_map(|(id, gpus)| {
            let entry = self.members.backends.get(&id).filter(|entry| entry.is_auto)?;
            Some((id, Seat { sub_cluster: entry.sub_cluster, gpus: gpus as u32 }))
        });
        let backends: BTreeMap<BackendId, Seat> = seats.collect();
        let mut models: BTreeMap<String, Seen> = BTreeMap::new();
        for &backend in backends.keys() {
            let planned = self.members.planned_names_at(backend);
            for name in self.members.names_at(backend) {
                let seen = models.entry(name.to_owned()).or_default();
                seen.hosts.insert(backend);
                seen.planned.extend(planned.contains(name).then_some(backend));
            }
        }
        // Those that were hosted, and are not since their backends have gone.
        for entry in self.members.models.iter().filter(|entry| entry.hosts == 0) {
            models.entry(entry.name.clone()).or_default();
        }
        models.retain(|name, _| !self.changes.is_unloaded(name));
        for (name, seen) in &mut models {
            seen.rate_rps = self.members.rate_of(name, &self.advisor);
            seen.bytes = u64::from(self.members.pages_of(name)) * PAGE_BYTES;
            seen.is_elsewhere = self.members.is_planned_at_another(name, &backends);
        }
        // What only backends of fixed placements host is theirs.
        models.retain(|_, seen| !(seen.hosts.is_empty() && seen.is_elsewhere));
        View { backends, models }
    }
}
