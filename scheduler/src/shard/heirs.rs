//! What a frontend brings along when it obeys a new primary: the tasks that an earlier one was given and that have not
//! ended. Each of them waits in a queue that is lost, or is part of a batch that some backend still has.
//!
//! Backends that obey name the batches that they have; control says when all of them have, and which links are not
//! accounted for. Then the frontend is *settled*: of its tasks those that a backend has are running, and whatever is
//! left is in doubt, so it is fenced and asked about like any task whose backend was lost. An answer that is just
//! arriving is found out that way, and no attempt runs twice under one number.

use proto::backend_to_scheduler::BackendToModelThread;

use super::*;
use crate::news::Links;

/// A plan of an earlier primary that a backend still has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// Its name, of [`ModelThreadId::INHERITED`].
    pub plan: PlanId,
    /// The backend's GPU.
    pub gpu_index: u32,
    /// The model.
    pub model: ModelId,
    /// When the GPU should be done with it; `None` if it is.
    pub frees_at: Option<Timestamp>,
    /// Tasks whose end is still to be reported, and their attempts.
    pub tasks: Vec<(TaskId, u16)>,
}

/// A frontend's tasks until it is settled.
#[derive(Debug, Default)]
pub(super) struct Heir {
    open: Vec<RunningTask>,
    /// Tasks whose clients have hung up.
    cancelled: Vec<(ModelId, TaskId)>,
}

impl Shard {
    /// A task that an earlier primary was given.
    pub(super) fn on_open(&mut self, frontend: FrontendId, task: RunningTask) -> Result<(), Violation> {
        check_owner(frontend, task.id)?;
        let Some(member) = self.frontends.get(&frontend) else { return Ok(()) };
        let heir = self.heirs.entry(frontend).or_default();
        let found = member.tasks + heir.open.len();
        if found >= self.config.tasks_per_frontend_max {
            return Err(Violation(format!("it has more than {found} tasks open, the limit is tasks_per_frontend_max")));
        }
        heir.open.push(task);
        Ok(())
    }

    /// A task's client hung up. False if its frontend is settled.
    pub(super) fn on_heir_cancelled(&mut self, model: ModelId, task: TaskId) -> bool {
        let heir = self.heirs.get_mut(&task.frontend()).filter(|heir| heir.cancelled.len() < heir.open.len());
        heir.map(|heir| heir.cancelled.push((model, task))).is_some()
    }

    /// A backend has a plan of an earlier primary.
    pub(super) fn on_unfinished(&mut self, now: Timestamp, backend: BackendId, plan: Unfinished) {
        let Unfinished { plan: id, gpu_index, model, frees_at, tasks } = plan;
        let at = frees_at.unwrap_or(now).clamp(now - DEADLINE_MAX, now + DEADLINE_MAX);
        let profile = self.models.contains_key(&model).then(|| self.estimates.profile(model));
        let latency = profile.map_or(Span::ZERO, |profile| profile.latency(tasks.len().clamp(1, profile.max_batch())));
        let predicted = Predicted { duration: latency, ends_at: at };
        let is_unequal = self.models.get(&model).is_some_and(|entry| entry.cost.is_some());
        let times = PlanTimes { sent_at: now, exec_at: at, latest: at, predicted, is_unequal };
        let sent = SentPlan::inherited((backend, gpu_index), model, tasks, (times, frees_at.is_none()));
        self.plans.insert_inherited(id, sent);
    }

    /// What becomes of such a plan.
    pub(super) fn on_inherited(&mut self, now: Timestamp, backend: BackendId, report: BackendToModelThread) {
        if let Err(violation) = self.handle_backend_message(now, backend, report) {
            self.handle_disconnected(Member::Backend(backend), violation.to_string());
        }
    }

    /// All backends have said what they have: nothing that still comes over a doubtful link may meet a task that runs
    /// again. Nor may what comes for a task of a model that is not known here: where it runs, if it does, is not known.
    pub(super) fn on_settle(&mut self, now: Timestamp, frontend: FrontendId, links: Links) {
        let Some(member) = self.frontends.get_mut(&frontend) else { return };
        let Heir { open, cancelled } = self.heirs.remove(&frontend).unwrap_or_default();
        member.tasks += open.len();
        let is_known = open.iter().all(|task| self.models.contains_key(&task.model));
        let links = if is_known { links.doubtful } else { links.all };
        for (backend, link) in links {
            let question = self.fences.ask_link(frontend, (backend, link));
            self.outputs.push_back(ShardOutput::ToFrontend(frontend, question));
        }
        let lost: Vec<RunningTask> = open.into_iter().filter(|task| !self.plans.adopt(*task)).collect();
        self.doubt((BackendId::NOBODY, LinkId::NONE), false, lost);
        for (model, task) in cancelled {
            self.on_cancel(now, model, task);
        }
    }
}
