//! Steps 3 to 6: the scheduler's life with its peers. Frontends and backends join and leave; tasks go from a
//! frontend's message through the ModelThread and the RankThread into a plan for a backend; plans end, or their
//! backend is lost and its tasks run again or end (fencing).
//!
//! Each task that a frontend submits ends exactly once: its backend answers it, or the frontend is told `Dropped`.
//! No IO and no clock: `handle_*` takes what arrived and `now`, `poll_output` yields what is to be sent.

mod changes;
mod fencing;
mod lifecycle;
mod members;
mod plans;

use std::collections::VecDeque;

use proto::{
    BackendId, FrontendId, LatencyProfile, LinkId, ModelId, ModelThreadId, PlanId, SlotDescriptor, Span, TaskId,
    Timestamp,
    backend_to_scheduler::{BackendHello, BackendToScheduler, PlanOutcome, Undelivered},
    clock::ClockReply,
    frontend_to_scheduler::{FrontendHello, FrontendToScheduler},
    hello::ModelThreads,
    scheduler_to_backend::{BackendWelcome, BatchPlan, PlannedTask, SchedulerToBackend},
    scheduler_to_frontend::{DropReason, FrontendWelcome, SchedulerLoad, SchedulerToFrontend},
    slot::ImmediateData,
    stages::SchedulerStamps,
};
use thiserror::Error;

use crate::{
    estimates::{Estimates, ProfileChange},
    messages::NetworkBudget,
    model_thread::{Batch, ModelConfig, Task},
    planner::{Planner, PlannerOutput},
    policy::Policy,
};
use changes::Changes;
use fencing::Fences;
pub use members::JoinError;
use members::Members;
use plans::{Plans, RunningTask, SentPlan};

/// Limits and budgets.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// When batches run.
    pub policy: Policy,
    /// From the scheduler to a running batch.
    pub budget: NetworkBudget,
    /// What each megabyte (10^6 bytes) of a task's input adds to `budget.data_per_task`.
    pub data_per_megabyte: Span,
    /// From the end of execution to the client; taken off every deadline.
    pub resp: Span,
    /// Tasks that may wait for one model.
    pub queue_max: usize,
    /// Tasks that one frontend may have under way.
    pub tasks_per_frontend_max: usize,
    /// Plan with what executions take, not only with what backends offered.
    pub reestimate: bool,
}

/// Something to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterOutput {
    /// To a frontend.
    ToFrontend(FrontendId, SchedulerToFrontend),
    /// To a backend.
    ToBackend(BackendId, SchedulerToBackend),
}

/// A peer broke the protocol; its connection is to be closed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the peer broke the protocol: {0}")]
pub struct Violation(String);

/// What rides along with a queued task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ride {
    attempt: u16,
    slot: SlotDescriptor,
}

/// The scheduler without its sockets.
pub struct Cluster {
    config: ClusterConfig,
    members: Members,
    /// l(b) of all models.
    estimates: Estimates,
    planner: Box<dyn Planner<Ride>>,
    plans: Plans,
    fences: Fences,
    changes: Changes,
    outputs: VecDeque<ClusterOutput>,
}

impl Cluster {
    /// A scheduler that knows nobody yet.
    #[must_use]
    pub fn new(config: ClusterConfig) -> Self {
        Self {
            members: Members::default(),
            estimates: Estimates::new(config.reestimate),
            planner: config.policy.planner(config.budget),
            plans: Plans::default(),
            fences: Fences::default(),
            changes: Changes::default(),
            outputs: VecDeque::new(),
            config,
        }
    }

    /// A frontend connected.
    ///
    /// # Errors
    /// If there are too many.
    pub fn handle_frontend_joined(
        &mut self,
        now: Timestamp,
        hello: FrontendHello,
    ) -> Result<FrontendWelcome, JoinError> {
        let link_address = hello.link_address.clone();
        let frontend = self.members.add_frontend(hello.link_address)?;
        for &backend in self.members.backends.keys() {
            let link_address = link_address.clone();
            let message = SchedulerToBackend::FrontendJoined { frontend, link_address };
            self.outputs.push_back(ClusterOutput::ToBackend(backend, message));
        }
        self.settle(now);
        self.announce();
        self.tell_states(frontend);
        Ok(FrontendWelcome { frontend, model_threads: ModelThreads::default() })
    }

    /// A backend connected.
    ///
    /// # Errors
    /// If there are too many, or its offer is wrong.
    pub fn handle_backend_joined(&mut self, now: Timestamp, hello: BackendHello) -> Result<BackendWelcome, JoinError> {
        let joined = self.members.add_backend(now, hello, |model| self.changes.is_unloaded(model))?;
        for &model in &joined.unwanted {
            self.outputs.push_back(ClusterOutput::ToBackend(joined.backend, SchedulerToBackend::Unload { model }));
        }
        for &model in joined.models.iter().filter(|model| !joined.reprofiled.contains(model)) {
            for (_, gpus, offered) in self.members.offers(model).filter(|(host, ..)| *host == joined.backend) {
                self.estimates.handle_offer(model, &gpus, offered);
            }
        }
        self.on_offers_changed(now, joined.reprofiled);
        for (&frontend, member) in &self.members.frontends {
            let link_address = member.link_address.clone();
            let message = SchedulerToBackend::FrontendJoined { frontend, link_address };
            self.outputs.push_back(ClusterOutput::ToBackend(joined.backend, message));
        }
        self.on_links_changed(now);
        let model_threads = ModelThreads::default();
        Ok(BackendWelcome { backend: joined.backend, models: joined.models, model_threads })
    }

    /// A frontend's connection ended: its tasks are forgotten and its slots no longer read.
    pub fn handle_frontend_left(&mut self, now: Timestamp, frontend: FrontendId) {
        if self.members.remove_frontend(frontend).is_none() {
            return;
        }
        self.fences.forget_frontend(frontend);
        self.changes.handle_frontend_left(frontend);
        self.planner.handle_owner_left(now, &|task| task.frontend() == frontend);
        for &backend in self.members.backends.keys() {
            self.outputs.push_back(ClusterOutput::ToBackend(backend, SchedulerToBackend::FrontendLeft { frontend }));
        }
        self.on_links_changed(now);
    }

    /// A backend's connection ended: its GPUs are gone, and its tasks are in doubt.
    pub fn handle_backend_left(&mut self, now: Timestamp, backend: BackendId) {
        let Some((gpus, reprofiled)) = self.members.remove_backend(backend) else { return };
        for gpu in gpus {
            self.planner.handle_gpu_left(now, gpu);
            self.estimates.handle_gpu_left(gpu);
        }
        self.on_offers_changed(now, reprofiled);
        let lost: Vec<_> = self.plans.remove_backend(backend).into_iter().flat_map(|plan| plan.tasks).collect();
        self.doubt((backend, LinkId::ALL), lost);
        self.changes.handle_backend_left(backend);
        for index in 0..self.members.models.len() {
            self.drop_if_unhosted(now, ModelId(index as u32));
        }
        self.on_links_changed(now);
    }

    /// A frontend's message.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_frontend_message(
        &mut self,
        now: Timestamp,
        frontend: FrontendId,
        message: FrontendToScheduler,
    ) -> Result<(), Violation> {
        match message {
            FrontendToScheduler::ClockRequest { sent_at, resp: _ } => {
                let reply = ClockReply { sent_at, received_at: now, replied_at: now };
                let load = SchedulerToFrontend::Load(self.load());
                let replies = [SchedulerToFrontend::Clock(reply), load];
                self.outputs.extend(replies.map(|reply| ClusterOutput::ToFrontend(frontend, reply)));
            }
            FrontendToScheduler::Submit { task, model, deadline, priority, slot } => {
                check_owner(frontend, task)?;
                let (deadline, payload) = (deadline - self.config.resp, Ride { attempt: 0, slot });
                self.on_submit(now, frontend, model, Task { id: task, deadline, priority, payload });
            }
            FrontendToScheduler::Cancel { task, model } => {
                check_owner(frontend, task)?;
                match self.plans.find(model, task) {
                    Some((backend, plan)) => {
                        let message = SchedulerToBackend::Cancel { plan, task };
                        self.outputs.push_back(ClusterOutput::ToBackend(backend, message));
                    }
                    None => self.planner.handle_cancel(now, model, task),
                }
            }
            FrontendToScheduler::ChangeModel { change, to, name } => {
                self.on_change_asked(now, (frontend, change), to, &name)
            }
            FrontendToScheduler::Fenced { backend, unanswered } => {
                let (again, answered) = self
                    .fences
                    .handle_fenced(frontend, backend, &unanswered)
                    .map_err(|_| Violation(format!("{backend:?} is confirmed fenced, but that was not asked for")))?;
                self.end_tasks(frontend, answered);
                for task in again {
                    self.on_unanswered(now, task);
                }
            }
        }
        self.settle(now);
        Ok(())
    }

    /// A backend's message.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_backend_message(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        message: BackendToScheduler,
    ) -> Result<(), Violation> {
        match message {
            BackendToScheduler::ClockRequest { sent_at } => {
                let reply = ClockReply { sent_at, received_at: now, replied_at: now };
                self.outputs.push_back(ClusterOutput::ToBackend(backend, SchedulerToBackend::Clock(reply)));
            }
            BackendToScheduler::Linked { frontend } => {
                self.members.set_linked(backend, frontend, true);
                self.on_links_changed(now);
            }
            BackendToScheduler::Unlinked { frontend } => {
                self.members.set_linked(backend, frontend, false);
                self.on_links_changed(now);
            }
            BackendToScheduler::Loaded { load, outcome } => self.on_loaded(backend, load, outcome),
            BackendToScheduler::Unloaded { model } => self.changes.handle_unloaded(backend, model),
            BackendToScheduler::Cancelled { plan, task } => {
                if !self.plans.on_cancelled(backend, plan, task) {
                    return Err(Violation(format!(
                        "{task:?} is cancelled, but {backend:?} does not have it in {plan:?}"
                    )));
                }
                self.drop_task(task, DropReason::Cancelled);
            }
            BackendToScheduler::PlanDone { plan, outcome, undelivered, arrived_at: _, fetched_at: _ } => {
                self.on_plan_done(now, backend, plan, outcome, &undelivered)?;
            }
            BackendToScheduler::Answered { plan, undelivered } => self.on_answered(backend, plan, &undelivered)?,
        }
        self.settle(now);
        Ok(())
    }

    /// Timers of all parts.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.members.poll_timeout().is_some_and(|at| at <= now) {
            self.on_links_changed(now);
        }
        self.estimates.handle_timeout(now);
        self.follow_estimates(now);
        self.settle(now);
    }

    /// When [`Self::handle_timeout`] must be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let (members, changes) = (self.members.poll_timeout(), self.changes.poll_timeout());
        let timeouts = [self.planner.poll_timeout(), self.estimates.poll_timeout(), members, changes];
        timeouts.into_iter().flatten().min()
    }

    /// The next thing to send.
    pub fn poll_output(&mut self) -> Option<ClusterOutput> {
        self.outputs.pop_front()
    }

    fn on_submit(&mut self, now: Timestamp, frontend: FrontendId, model: ModelId, task: Task<Ride>) {
        let Some(member) = self.members.frontends.get_mut(&frontend) else { return };
        member.tasks += 1;
        let refused = if member.tasks > self.config.tasks_per_frontend_max {
            DropReason::QueueFull
        } else if !self.members.is_hosted(model) {
            self.reason_unhosted(model)
        } else {
            return self.planner.handle_submit(now, model, task);
        };
        self.drop_task(task.id, refused);
    }

    /// A task's backend was fenced before it answered: run it again if there is time, with a new attempt number, so
    /// that whatever the lost backend still does cannot be taken for the answer.
    fn on_unanswered(&mut self, now: Timestamp, task: RunningTask) {
        let profile = self.estimates.profile(task.model);
        let soonest_end = now + self.budget(task.model).delay(1) + profile.latency(1);
        if soonest_end > task.deadline || !self.members.is_hosted(task.model) {
            return self.drop_task(task.id, DropReason::BackendLost);
        }
        let attempt = (task.attempt + 1) % ImmediateData::ATTEMPTS;
        let RunningTask { id, model, deadline, priority, slot, .. } = task;
        self.planner.handle_submit(now, model, Task { id, deadline, priority, payload: Ride { attempt, slot } });
    }

    fn on_plan_done(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        id: PlanId,
        outcome: PlanOutcome,
        undelivered: &[Undelivered],
    ) -> Result<(), Violation> {
        let (failed, link) = named(undelivered);
        let done = self
            .plans
            .on_done(backend, id, &failed)
            .ok_or_else(|| Violation(format!("{id:?} is reported done, but {backend:?} does not run it")))?;
        let (PlanOutcome::Executed { finished_at, .. } | PlanOutcome::WindowMissed { rejected_at: finished_at }) =
            outcome;
        // One that hosts other models now has another id: what it was sent before is counted in when it joined again.
        if self.members.gpus.contains_key(&done.gpu) {
            self.planner.handle_finished(done.gpu, finished_at);
            if let PlanOutcome::Executed { started_at, finished_at } = outcome {
                self.estimates.handle_executed(now, done.model, done.gpu, done.size, finished_at - started_at);
                self.follow_estimates(now);
            }
        }
        self.doubt((backend, link), done.failed);
        Ok(())
    }

    /// Executions have shown another l(b): it is planned with, and frontends are told the least latency.
    fn follow_estimates(&mut self, now: Timestamp) {
        if self.on_estimates_changed(now) {
            self.announce();
        }
    }

    /// Tells the planner. True if what holds on every GPU has changed for any model.
    fn on_estimates_changed(&mut self, now: Timestamp) -> bool {
        let mut has_changed = false;
        while let Some(change) = self.estimates.poll_changed() {
            match change {
                ProfileChange::Common(model) => {
                    has_changed = true;
                    let profile = self.estimates.profile(model).clone();
                    let budget = self.budget(model);
                    let config = ModelConfig { profile, queue_max: self.config.queue_max, budget: Some(budget) };
                    self.planner.handle_model(now, model, config);
                }
                ProfileChange::OfGpu(model, gpu) => {
                    let profile = self.estimates.own_profile(model, gpu).map(|own| LatencyProfile::clone(own));
                    self.planner.handle_gpu_profile(model, gpu, profile);
                }
            }
        }
        has_changed
    }

    /// Models with a new common profile; each GPU is held against that anew.
    fn on_offers_changed(&mut self, now: Timestamp, models: impl IntoIterator<Item = ModelId>) {
        for model in models {
            self.estimates.handle_model(model, self.members.models[model.0 as usize].profile.clone());
            for (_, gpus, offered) in self.members.offers(model) {
                self.estimates.handle_offer(model, &gpus, offered);
            }
        }
        self.on_estimates_changed(now);
    }

    fn on_answered(&mut self, backend: BackendId, id: PlanId, undelivered: &[Undelivered]) -> Result<(), Violation> {
        let (failed, link) = named(undelivered);
        let (answered, doubtful) = self
            .plans
            .on_answered(backend, id, &failed)
            .ok_or_else(|| Violation(format!("{id:?} is reported answered, but {backend:?} did not run it")))?;
        for task in answered {
            self.end_tasks(task.id.frontend(), 1);
        }
        self.doubt((backend, link), doubtful);
        Ok(())
    }

    /// Asks the frontends that are still there about tasks of a backend.
    fn doubt(&mut self, (backend, link): (BackendId, LinkId), mut tasks: Vec<RunningTask>) {
        tasks.retain(|task| self.members.frontends.contains_key(&task.id.frontend()));
        for (frontend, question) in self.fences.ask((backend, link), tasks) {
            self.outputs.push_back(ClusterOutput::ToFrontend(frontend, question));
        }
    }

    fn drop_task(&mut self, task: TaskId, reason: DropReason) {
        let frontend = task.frontend();
        if self.members.frontends.contains_key(&frontend) {
            self.outputs.push_back(ClusterOutput::ToFrontend(frontend, SchedulerToFrontend::Dropped { task, reason }));
            self.end_tasks(frontend, 1);
        }
    }

    fn end_tasks(&mut self, frontend: FrontendId, tasks: usize) {
        if let Some(member) = self.members.frontends.get_mut(&frontend) {
            member.tasks -= tasks;
        }
    }

    /// Ends changes of models, lets the planner decide, and passes on what it decided.
    fn settle(&mut self, now: Timestamp) {
        while let Some(ended) = self.changes.poll_ended(now) {
            self.on_change_ended(now, ended);
        }
        self.planner.handle_timeout(now);
        while let Some(output) = self.planner.poll_output() {
            match output {
                PlannerOutput::Batch(batch) => self.on_batch(now, batch),
                PlannerOutput::Preempt(_) => unreachable!("a policy that preempts is refused before it gets here"),
                PlannerOutput::Dropped { model, task, reason: DropReason::NoBackend } => {
                    self.drop_task(task.id, self.reason_unhosted(model));
                }
                PlannerOutput::Dropped { task, reason, .. } => self.drop_task(task.id, reason),
            }
        }
    }

    fn load(&self) -> SchedulerLoad {
        let queued = (0..self.members.models.len()).map(|index| self.planner.queue_length(ModelId(index as u32)));
        let [queued, batches, gpus] =
            [queued.sum(), self.plans.len(), self.members.gpus.len()].map(|count| count as u32);
        SchedulerLoad { queued, batches, gpus }
    }

    /// Step 6: a final batch becomes a plan.
    fn on_batch(&mut self, now: Timestamp, batch: Batch<Ride>) {
        let Batch { model, gpu, due_at, exec_at, latest, tasks } = batch;
        let member = self.members.gpus.get(&gpu).expect("GPUs leave the RankThread with their backend");
        let (backend, gpu_index) = (member.backend, member.index);
        let running = tasks.iter().map(|(key, ride)| RunningTask {
            id: key.id,
            model,
            deadline: key.deadline,
            priority: key.priority,
            attempt: ride.attempt,
            slot: ride.slot,
        });
        let frees_at = exec_at + self.estimates.profile_on(model, gpu).latency(tasks.len());
        let plan = self.plans.insert(SentPlan::new(backend, gpu, running.collect(), frees_at));
        let planned = tasks.iter().map(|(key, ride)| PlannedTask {
            task: key.id,
            attempt: ride.attempt,
            slot: ride.slot,
            stamps: SchedulerStamps {
                queued_at: key.queued_at,
                due_at: due_at.max(key.queued_at).min(now),
                granted_at: now,
            },
        });
        let plan = BatchPlan { plan, gpu_index, model, exec_at, latest, tasks: planned.collect() };
        self.outputs.push_back(ClusterOutput::ToBackend(backend, SchedulerToBackend::Plan(plan)));
    }

    /// Links or members changed: GPUs may have become usable, and frontends are told what they can be served.
    fn on_links_changed(&mut self, now: Timestamp) {
        let usable = self.members.take_usable(now);
        for &backend in &usable {
            for &gpu in &self.members.backends[&backend].gpus {
                self.planner.handle_gpu_joined(now, gpu, self.members.gpus[&gpu].models.clone());
            }
            self.members.note_planned(backend);
        }
        if !usable.is_empty() {
            self.replan_gpus(now);
        }
        self.settle(now);
        self.announce();
    }

    /// What the network costs a model: its inputs have a size of their own.
    fn budget(&self, model: ModelId) -> NetworkBudget {
        let input_bytes = i64::from(self.members.models[model.0 as usize].input_bytes);
        let per_task = Span(self.config.data_per_megabyte.as_nanos() * input_bytes / 1_000_000);
        let budget = self.config.budget;
        NetworkBudget { data_per_task: budget.data_per_task + per_task, ..budget }
    }

    fn announce(&mut self) {
        let mut news = Vec::new();
        for (&frontend, member) in &self.members.frontends {
            for id in (0..self.members.models.len() as u32).map(ModelId) {
                let gpus = self.members.gpus_for(id, frontend);
                let least_latency = self.estimates.profile(id).latency(1) + self.budget(id).delay(1) + self.config.resp;
                if member.told.get(&id) != Some(&(gpus, least_latency)) {
                    news.push((frontend, id, gpus, least_latency));
                }
            }
        }
        for (frontend, model, gpus, least_latency) in news {
            let member = self.members.frontends.get_mut(&frontend).expect("listed above");
            member.told.insert(model, (gpus, least_latency));
            let entry = &self.members.models[model.0 as usize];
            let (name, version) = (entry.name.clone(), entry.version.clone());
            let model_thread = ModelThreadId(0);
            let message = SchedulerToFrontend::Model { model, name, version, gpus, least_latency, model_thread };
            self.outputs.push_back(ClusterOutput::ToFrontend(frontend, message));
        }
    }
}

/// The failed tasks, and the newest of the links that are to blame.
fn named(undelivered: &[Undelivered]) -> (Vec<TaskId>, LinkId) {
    let newest = undelivered.iter().map(|failed| failed.link).max().unwrap_or(LinkId::NONE);
    (undelivered.iter().map(|failed| failed.task).collect(), newest)
}

fn check_owner(frontend: FrontendId, task: TaskId) -> Result<(), Violation> {
    if task.frontend() == frontend {
        return Ok(());
    }
    Err(Violation(format!("{frontend:?} speaks of {task:?}, which is another frontend's")))
}

#[cfg(test)]
mod tests;
