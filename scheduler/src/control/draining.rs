//! Draining, as operators ask for it. A drained backend stays linked and is sent no plans, so that its process can be
//! ended, or its GPUs be looked at, without a request being lost; a drained frontend says that it is not ready. Members
//! keep it, and tell every scheduler. A backend that alone hosts models is drained once others do.

use proto::{
    BackendId, FrontendId, Timestamp,
    draining::{DrainAnswer, DrainRequest, MemberKind},
    hello::Member,
    scheduler_to_backend::SchedulerToBackend,
    scheduler_to_frontend::SchedulerToFrontend,
};

use super::{Control, ControlOutput};

/// Bytes of a name that an error repeats.
const NAME_SHOWN_MAX: usize = 80;
/// Models that an error names.
const MODELS_NAMED: usize = 3;

impl Control {
    /// An operator wants a member drained, or resumed.
    ///
    /// # Errors
    /// Why not: this scheduler is not the primary, there is no such member, or models would be served no more.
    pub fn handle_drain(&mut self, now: Timestamp, request: &DrainRequest) -> Result<DrainAnswer, String> {
        let DrainRequest { kind, name, is_drained, is_forced } = request;
        if !self.claim().is_primary() {
            return Err("this scheduler is not the primary, which must be asked: `downbeat status` names it".to_owned());
        }
        let Some(member) = self.names.find(*kind, name) else {
            let what = if *kind == MemberKind::Backend { "backend" } else { "frontend" };
            let shown: String = name.escape_debug().take(NAME_SHOWN_MAX).collect();
            return Err(format!("found no {what} called {shown}; `downbeat status` names all"));
        };
        let is_drained = *is_drained;
        let answer = match member {
            Member::Frontend(frontend) => {
                self.outputs.push_back(ControlOutput::ToFrontend(frontend, SchedulerToFrontend::Drain { is_drained }));
                let FrontendId(id) = frontend;
                DrainAnswer { id, only_there: 0, is_moving: false }
            }
            Member::Backend(backend) => {
                let only_there = if is_drained { self.members.only_at(backend) } else { Vec::new() };
                let (BackendId(id), count) = (backend, only_there.len() as u32);
                if !only_there.is_empty() && !is_forced {
                    if self.drain_later(now, backend) {
                        return Ok(DrainAnswer { id, only_there: count, is_moving: true });
                    }
                    let models = only_there.iter().take(MODELS_NAMED);
                    let names: Vec<&str> = models.map(|model| &*self.members.models[model.0 as usize].name).collect();
                    let (count, more) = (only_there.len(), if only_there.len() > MODELS_NAMED { ", .." } else { "" });
                    return Err(format!(
                        "no other backend that serves hosts {count} of its models ({}{more}): load them elsewhere \
                         first, or drain it with --force",
                        names.join(", ")
                    ));
                }
                self.give_up_drain(backend);
                self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::Drain { is_drained }));
                DrainAnswer { id, only_there: count, is_moving: false }
            }
        };
        tracing::info!(?member, name, is_drained, "an operator has drained a member, or resumed it");
        self.set_drained(now, member, is_drained);
        Ok(answer)
    }

    /// A member is drained, or resumed, as an operator wants or as it says. Of frontends that is only shown.
    pub(super) fn set_drained(&mut self, now: Timestamp, member: Member, is_drained: bool) {
        if self.members.set_drained(member, is_drained) && matches!(member, Member::Backend(_)) {
            self.refresh(now);
        }
    }
}
