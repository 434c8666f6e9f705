//! Copies of models: they are loaded where somebody wants them, hosted there beside those that host them already, and
//! let go where they are not wanted any more. Backends that are to go have theirs copied elsewhere first.

use std::collections::BTreeSet;

use proto::{
    BackendId, LoadId, ModelId, Span, Timestamp, Wait, backend_to_scheduler::ModelOffer, hello::Member,
    scheduler_to_backend::SchedulerToBackend,
};

use super::{
    Control, ControlOutput,
    changes::{COPIES_MAX, LOAD_WAIT},
    refuge::Then,
};
use crate::news::ControlToShard;

/// How long a backend that is to be drained serves on until others host its models.
const DRAIN_WAIT: Span = Wait::Load.bound();

impl Control {
    /// Has a backend load a copy. False if that cannot be begun now.
    pub(super) fn begin_copy(&mut self, now: Timestamp, name: &str, to: BackendId) -> bool {
        let Some((load, brought)) = self.changes.begin_copy(now, name, to) else { return false };
        tracing::info!(model = name, backend = to.0, "a model is copied");
        let message = SchedulerToBackend::Load { load, name: name.to_owned(), brought, is_placed: true };
        self.outputs.push_back(ControlOutput::ToBackend(to, message));
        true
    }

    /// A backend has loaded a copy. It comes before its first plan, and so before its GPUs join the planners anew.
    pub(super) fn on_copied(
        &mut self,
        now: Timestamp,
        name: &str,
        (load, to): (LoadId, BackendId),
        offers: &[ModelOffer],
    ) {
        let retiring = &self.retiring;
        let retires = |backend, model| retiring.contains_key(&(backend, model));
        let joined = match self.members.host_copy((to, name), offers, retires) {
            Ok(joined) => joined,
            Err(reason) => return self.on_not_copied(name, (load, to), &reason),
        };
        self.assign_new_models();
        for &model in &joined.models {
            let version = self.members.models[model.0 as usize].version.clone();
            self.tell_owner(model, ControlToShard::Host { backend: to, load, version, model });
        }
        self.on_joined(joined);
        self.refresh(now);
    }

    /// A backend has no copy, and is to discard what it has of it.
    pub(super) fn on_not_copied(&mut self, name: &str, (load, to): (LoadId, BackendId), reason: &str) {
        tracing::warn!(model = name, backend = to.0, "a model could not be copied: {reason}");
        self.outputs.push_back(ControlOutput::ToBackend(to, SchedulerToBackend::Discard { load }));
        self.refuge.handle_failed(name, to, reason);
        if let Some(placer) = &mut self.placer {
            placer.handle_failed(name, to);
        }
    }

    /// Takes models from backends that others host.
    pub(super) fn let_go(&mut self, now: Timestamp, mut gone: BTreeSet<(BackendId, ModelId)>) {
        gone.retain(|&(backend, model)| self.members.let_go(backend, model));
        if !gone.is_empty() {
            self.refresh(now);
            self.unload(&gone);
        }
    }

    /// A backend leaves `within` that time. Once others host its models each ModelThread says that it plans no more
    /// there.
    pub(super) fn on_backend_leaving(&mut self, now: Timestamp, backend: BackendId, within: Span) {
        if !self.members.set_leaving(backend) {
            return;
        }
        tracing::info!(backend = backend.0, "a backend is about to leave");
        // What it has then it finishes in the last quarter.
        let until = now + within.clamp(Span::ZERO, LOAD_WAIT) * 3 / 4;
        if !self.evacuate(now, backend, Then::Leaves, until) {
            self.dismiss(now, backend);
        }
    }

    /// An operator wants a backend drained that alone hosts models. False if nobody else could host them.
    pub(super) fn drain_later(&mut self, now: Timestamp, backend: BackendId) -> bool {
        self.refuge.then(backend).is_some() || self.evacuate(now, backend, Then::IsDrained, now + DRAIN_WAIT)
    }

    /// An operator does not want a backend drained, or at once.
    pub(super) fn give_up_drain(&mut self, backend: BackendId) {
        if self.refuge.then(backend) == Some(Then::IsDrained) {
            self.refuge.end(backend);
            self.members.set_evacuates(backend, false);
        }
    }

    /// Begins to copy what only this backend hosts, which is used until then. False if there is nothing to copy, or
    /// nobody to copy it to.
    fn evacuate(&mut self, now: Timestamp, backend: BackendId, then: Then, until: Timestamp) -> bool {
        let needed = self.members.only_at(backend);
        if needed.is_empty() || !self.members.is_used(backend) {
            return false;
        }
        let has_others = self.members.staying().any(|(other, _)| other != backend);
        if !has_others && !self.members.are_others_awaited(backend) {
            let names = self.names_of(&needed);
            let what = self.refuge.without_place(backend, &names);
            tracing::warn!(backend = backend.0, "nobody else hosts {what}");
            return false;
        }
        self.members.set_evacuates(backend, true);
        self.refuge.begin(backend, then, until);
        self.evacuate_due(now);
        true
    }

    /// Goes on with backends that are to go.
    pub(super) fn evacuate_due(&mut self, now: Timestamp) {
        for backend in self.refuge.poll_due(now) {
            let needed = self.names_of(&self.members.planned_only_at(backend));
            if !self.copy_next(now, backend, &needed) || self.refuge.is_over(now, backend) {
                self.on_evacuated(now, backend, &needed);
            }
        }
    }

    /// Has as many of these copied as may be at once. False if none is under way.
    fn copy_next(&mut self, now: Timestamp, backend: BackendId, names: &[String]) -> bool {
        // After a takeover those who may host it come one after the other.
        let mut is_under_way = !names.is_empty() && self.members.are_others_awaited(backend);
        for name in names {
            let is_elsewhere = || self.members.staying().any(|(other, _)| self.members.hosts(other, name));
            if self.changes.is_changing(name) || is_elsewhere() {
                is_under_way = true;
                continue;
            }
            if self.changes.copies().count() >= COPIES_MAX {
                return true;
            }
            let Some(to) = self.refuge_for(backend, name) else { continue };
            self.refuge.handle_tried(backend, name, to);
            is_under_way |= self.begin_copy(now, name, to);
        }
        is_under_way
    }

    /// Where a model of this backend is to be copied: of all that it was not tried at where GPUs have least to do, and,
    /// if nothing is known of that, where fewest models are.
    fn refuge_for(&self, backend: BackendId, name: &str) -> Option<BackendId> {
        let others = self.members.staying().filter(|(other, _)| !self.refuge.was_tried(backend, name, *other));
        let loads = others.map(|(other, gpus)| {
            let here = self.changes.copies().filter(|(_, to)| *to == other);
            let coming: Vec<f64> = here.map(|(name, _)| self.members.rate_of(name, &self.advisor)).collect();
            let rate = self.members.gpu_rate(other, &self.advisor) + coming.iter().sum::<f64>() / gpus as f64;
            (other, rate, self.members.names_at(other).len() + coming.len())
        });
        let least = loads.min_by(|one, other| one.1.total_cmp(&other.1).then(one.2.cmp(&other.2)));
        least.map(|(to, ..)| to)
    }

    /// Others host what a backend does, but for these, which have found no place.
    fn on_evacuated(&mut self, now: Timestamp, backend: BackendId, left: &[String]) {
        let what = self.refuge.without_place(backend, left);
        let Some(then) = self.refuge.end(backend) else { return };
        self.members.set_evacuates(backend, false);
        match then {
            Then::Leaves if left.is_empty() => {
                tracing::info!(backend = backend.0, "others host all models of a backend that leaves");
            }
            Then::Leaves => tracing::warn!(backend = backend.0, "a backend leaves, and nobody else hosts {what}"),
            Then::IsDrained if left.is_empty() => self.drain_backend(now, backend),
            Then::IsDrained => {
                tracing::warn!(backend = backend.0, "a backend is not drained: nobody else hosts {what}")
            }
        }
        if then == Then::Leaves {
            self.dismiss(now, backend);
        }
    }

    /// Its GPUs leave, and then each ModelThread says that it plans no more there.
    fn dismiss(&mut self, now: Timestamp, backend: BackendId) {
        self.refresh(now);
        self.tell_shards(|| ControlToShard::Dismiss(backend));
    }

    /// A backend is told that it is drained.
    pub(super) fn drain_backend(&mut self, now: Timestamp, backend: BackendId) {
        self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::Drain { is_drained: true }));
        self.set_drained(now, Member::Backend(backend), true);
    }

    /// Models that were copied as their backend went are let go where another one has them of its own accord again.
    pub(super) fn dismiss_guests(&mut self, now: Timestamp) {
        if std::mem::take(&mut self.are_guests_due) {
            let guests = self.members.guests_to_go();
            self.let_go(now, guests);
        }
    }

    fn names_of(&self, models: &[ModelId]) -> Vec<String> {
        let names: BTreeSet<&str> = models.iter().map(|model| &*self.members.models[model.0 as usize].name).collect();
        names.into_iter().map(str::to_owned).collect()
    }
}
