//! What loading and unloading a model does to members, planner and peers; when, is [`Changes`](super::changes)' affair.
//!
//! A backend is sent plans only for what it hosts: it is told to host a model before the first plan, and to unload it
//! after the last. The planner knows a GPU by what it hosts, so one that hosts something else leaves and joins again,
//! under a new id and free from when its plans will have ended.

use std::collections::BTreeSet;

use proto::{
    LoadId, ModelId, Span, Timestamp,
    backend_to_scheduler::LoadOutcome,
    brought::CONFIG_BYTES_MAX,
    frontend_to_scheduler::{ModelChange, NAME_BYTES_MAX},
    scheduler_to_backend::SchedulerToBackend,
    scheduler_to_frontend::DropReason,
};

use super::{
    BackendId, Control, ControlOutput,
    changes::{Asked, Ended, Outcome, Waiter, Wish},
    members::Hosted,
    topics::Topic,
};
use crate::news::ControlToShard;

/// How long a version is served beside the one that has replaced it: until frontends know of that, and what they have
/// submitted before has run.
const RETIRES_AFTER: Span = Span::from_millis(1_000);

impl Control {
    /// A client asks for a change of a model.
    pub(super) fn on_change_asked(&mut self, now: Timestamp, waiter: Waiter, wish: Wish, name: &str) {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return self
                .answer(waiter, Some(format!("a model's name has 1 to {NAME_BYTES_MAX} bytes, found {}", name.len())));
        }
        let config_bytes = wish.brought.as_ref().map(|brought| brought.config.len());
        if let Some(found) = config_bytes.filter(|&found| found > CONFIG_BYTES_MAX) {
            let text = format!("its configuration has {found} bytes, expected at most {CONFIG_BYTES_MAX}");
            return self.answer(waiter, Some(text));
        }
        if wish.to == ModelChange::Unload
            && !self.members.is_known(name)
            && let Err(reason) = self.changes.note_unhosted(name)
        {
            return self.answer(waiter, Some(reason));
        }
        self.begin_change(now, Some(waiter), wish, name);
    }

    /// Backends that were started since host these models as the repository has them, or not at all, though they are
    /// served with what clients brought along: all load that once more.
    pub(super) fn load_brought(&mut self, now: Timestamp, names: BTreeSet<String>) {
        for name in names {
            if let Some(brought) = self.changes.brought(&name).cloned() {
                let wish = Wish { to: ModelChange::Load, brought: Some(brought) };
                self.begin_change(now, None, wish, &name);
            }
        }
    }

    fn begin_change(&mut self, now: Timestamp, waiter: Option<Waiter>, wish: Wish, name: &str) {
        match self.changes.handle_asked(now, waiter, (wish, name), self.members.obeying()) {
            Asked::Load(load, brought) => {
                for backend in self.members.obeying() {
                    let message = SchedulerToBackend::Load {
                        load,
                        name: name.to_owned(),
                        brought: brought.clone(),
                        is_placed: false,
                    };
                    self.outputs.push_back(ControlOutput::ToBackend(backend, message));
                }
            }
            Asked::Unload => {
                let hosts = self.members.withdraw(name);
                self.refresh(now);
                self.unload(&hosts);
                self.changes.handle_withdrawn(name, hosts);
            }
            Asked::Joined => return,
            Asked::Refused(reason) => {
                match waiter {
                    Some(waiter) => self.answer(waiter, Some(reason)),
                    None => tracing::warn!("model '{name}' is not loaded again with what a client brought: {reason}"),
                }
                return;
            }
        }
        self.tell_each(&Topic::State(name.to_owned()));
    }

    /// A backend has ended a load.
    pub(super) fn on_loaded(&mut self, backend: BackendId, load: LoadId, outcome: LoadOutcome) {
        let outcome = match outcome {
            LoadOutcome::Ready { offer, is_last } => {
                let name = self.changes.name_of(load).unwrap_or_default();
                let checked = self.members.checked(backend, name, &offer);
                checked.map_or_else(LoadOutcome::Failed, |offer| LoadOutcome::Ready { offer, is_last })
            }
            other => other,
        };
        let is_ready = matches!(outcome, LoadOutcome::Ready { .. });
        // Whatever it holds that nobody waits for must go; one that holds nothing does not mind.
        if !self.changes.handle_loaded(backend, load, outcome) || !is_ready {
            self.discard(load, [backend]);
        }
    }

    pub(super) fn on_change_ended(&mut self, now: Timestamp, ended: Ended) {
        let Ended { name, waiters, outcome, next } = ended;
        self.on_whereabouts_changed();
        let refused = match outcome {
            Outcome::Loaded(load, offers) => {
                self.forget_failures_of(&name);
                let hosted = self.members.host(&offers);
                self.on_hosted(now, load, hosted);
                None
            }
            Outcome::LoadFailed(load, ready, reason) => {
                self.discard(load, ready);
                if waiters.is_empty() {
                    tracing::warn!("model '{name}' was not loaded, and nobody waits for it: {reason}");
                }
                self.on_not_loaded(BackendId::NOBODY, (&name, ""), reason.clone());
                Some(reason)
            }
            Outcome::Copied(load, to, offers) => return self.on_copied(now, &name, (load, to), &offers),
            Outcome::NotCopied(load, to, reason) => return self.on_not_copied(&name, (load, to), &reason),
            Outcome::Unloaded(reason) => {
                self.forget_failures_of(&name);
                reason
            }
        };
        self.tell_each(&Topic::State(name.clone()));
        for waiter in waiters {
            self.answer(waiter, refused.clone());
        }
        for (waiter, wish) in next {
            self.on_change_asked(now, waiter, wish, &name);
        }
    }

    /// Hosts come before their first plan, and so before GPUs that host them join the planners.
    fn on_hosted(&mut self, now: Timestamp, load: LoadId, hosted: Hosted) {
        self.discard(load, hosted.refused);
        self.assign_new_models();
        for &(backend, model) in &hosted.models {
            let version = self.members.models[model.0 as usize].version.clone();
            self.tell_owner(model, ControlToShard::Host { backend, load, version, model });
        }
        self.retiring.retain(|version, _| !hosted.models.contains(version));
        self.on_offers_changed(hosted.models.into_iter().map(|(_, model)| model).collect());
        self.retiring.extend(hosted.replaced.into_iter().map(|version| (version, now + RETIRES_AFTER)));
        self.refresh(now);
    }

    /// Versions that newer ones have replaced go, now that no frontend submits to them any more.
    pub(super) fn retire(&mut self, now: Timestamp) {
        let due = self.retiring.extract_if(.., |_, at| *at <= now).map(|(version, _)| version);
        let gone: BTreeSet<(BackendId, ModelId)> = due.collect();
        self.let_go(now, gone);
    }

    /// No plan comes after that: the GPUs have left the planners.
    pub(super) fn unload(&mut self, hosts: &BTreeSet<(BackendId, ModelId)>) {
        for &(backend, model) in hosts {
            self.tell_owner(model, ControlToShard::Unload { backend, model });
        }
    }

    /// Why a task for a model that nobody hosts is dropped.
    pub(super) fn reason_unhosted(&self, model: ModelId) -> DropReason {
        let entry = self.members.models.get(model.0 as usize);
        let is_unloaded = entry.is_some_and(|entry| self.changes.is_unloaded(&entry.name));
        if is_unloaded { DropReason::Unloaded } else { DropReason::NoBackend }
    }

    fn discard(&mut self, load: LoadId, backends: impl IntoIterator<Item = BackendId>) {
        for backend in backends {
            self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::Discard { load }));
        }
    }

    fn answer(&mut self, (frontend, change): Waiter, refused: Option<String>) {
        self.tell(frontend, [Topic::Changed(change, refused)]);
    }
}
