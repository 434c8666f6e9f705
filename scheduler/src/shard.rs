//! Step 3, Step 4, Step 5, Step 6.
//! What one ModelThread does with its peers. It owns models, and of their tasks everything from a
//! frontend's submission to a plan for a backend and the plan's end: queues, plans under way, fences, and what
//! executions teach about l(b). Who there is, what is hosted where and who owns which model it is told by control.
//!
//! Each task that a frontend submits ends exactly once: its backend answers it, or the frontend is told `Dropped`.
//! No IO and no clock: `handle_*` takes what arrived and `now`, `poll_output` yields what is to be sent.

mod again;
mod applications;
mod budgets;
mod claims;
mod fencing;
mod given_back;
mod heirs;
mod knowledge;
mod plans;
mod recorded;
mod sending;
mod served;
mod weights;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, VecDeque},
};

use proto::{
    Application, BackendId, BatchCost, FrontendId, GpuId, LatencyProfile, LinkId, ModelId, ModelThreadId, PlanId,
    SlotDescriptor, Span, TaskId, Timestamp,
    backend_to_scheduler::{BackendToModelThread, PlanOutcome, Undelivered},
    frontend_to_scheduler::FrontendToModelThread,
    hello::Member,
    request_times::RequestTimes,
    scheduler_to_backend::{BatchPlan, PlannedTask, SchedulerToBackend},
    scheduler_to_frontend::{DropReason, SchedulerToFrontend},
    slot::ImmediateData,
    stages::SchedulerStamps,
};
use thiserror::Error;

use crate::{
    advice::Served,
    estimates::{Estimates, Learning, ProfileChange},
    history::Recorder,
    input_sizes::InputSizes,
    messages::NetworkBudget,
    network_times::NetworkTime,
    news::{ControlToShard, Forwarded, Gpu, Learned, Moved, Offered, PlannedWith, ShardToControl},
    planner::{Planner, PlannerOutput, Released},
    predictions::{Action, Predicted, Predictions},
    task::{Batch, ModelConfig, Task, Weights},
};
pub use applications::Applications;
use applications::Samples;
use claims::Claims;
use fencing::{Confirmed, Fences};
use given_back::GivenBack;
use heirs::Heir;
pub use heirs::Unfinished;
use plans::{Done, Dropped, PlanTimes, Plans, RunningTask, SentPlan};

/// How often plans are looked at whose backends should have spoken.
const WATCH_INTERVAL: Span = Span::from_millis(250);
/// A task that so many GPUs and backends were lost with may be what they fail of.
const LOSSES_MAX: u8 = 3;

/// What is kept to be told to a backend that has joined and not connected here. One that is to be told more is closed.
const HELD_MAX: usize = 4_096;

/// A deadline that is farther off counts as so far: what one frontend says must not weigh on all averages.
const DEADLINE_MAX: Span = Span::from_millis(24 * 3_600_000);

/// Limits of one ModelThread.
#[derive(Debug, Clone, Copy)]
pub struct ShardConfig {
    /// Which one it is.
    pub id: ModelThreadId,
    /// Members connect here, too, after they have to control.
    pub has_port: bool,
    /// The same of the way from the end of execution to the client, which is taken off every deadline.
    pub resp: Span,
    /// From a grant to its plan's arrival at a backend, until that is known.
    pub ctrl: Span,
    /// How late timers fire and threads wake, until that is known.
    pub jitter: Span,
    /// Tasks that may wait for one model.
    pub queue_max: usize,
    /// Tasks that one frontend may have under way here.
    pub tasks_per_frontend_max: usize,
    /// How what is planned with follows what executions take.
    pub learning: Learning,
}

/// What rides along with a queued task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ride {
    attempt: u16,
    /// GPUs that hung, and backends that were lost, while they had it.
    losses: u8,
    slot: SlotDescriptor,
}

/// Something to send.
#[derive(Debug)]
pub enum ShardOutput {
    /// To a frontend.
    ToFrontend(FrontendId, SchedulerToFrontend),
    /// To a backend.
    ToBackend(BackendId, SchedulerToBackend),
    /// To control.
    ToControl(ShardToControl),
}

/// How much there is to do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardLoad {
    /// Tasks that wait.
    pub queued: usize,
    /// Plans under way.
    pub batches: usize,
    /// Tasks whose frontends have been asked what became of them, and those that backends gave back and that wait.
    pub doubtful: usize,
    /// Tasks of this thread's life that came while no GPU had their model's weights in memory.
    pub cold: u64,
    /// How far actions of this thread's life were off what was planned.
    pub predictions: Predictions,
    /// Tasks that came since the last time this was asked for, of each model that had any.
    pub tasks: Vec<(ModelId, u64)>,
    /// What tasks of models take whose tasks are unequal, where that is another than when this was asked for last.
    pub request_times: Vec<(ModelId, RequestTimes)>,
    /// What became of tasks since the last time this was asked for, of each model that had any.
    pub served: Vec<(ModelId, Served)>,
}

/// A peer broke the protocol; its connection is to be closed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the peer broke the protocol: {0}")]
pub struct Violation(pub String);

/// [`FrontendToModelThread::Submit`].
#[derive(Debug, Clone, Copy)]
struct Submission {
    task: TaskId,
    model: ModelId,
    deadline: Timestamp,
    priority: u8,
    application: Application,
    is_first: bool,
    slot: SlotDescriptor,
}

#[derive(Debug, Default)]
struct Frontend {
    /// Tasks submitted here and not ended.
    tasks: usize,
    /// Whether backends reach it.
    is_served: bool,
}

#[derive(Debug)]
struct Model {
    /// As configured, with `ctrl` and `data_per_task` as they are planned with.
    budget: NetworkBudget,
    /// How large they are, and so what is configured of `data`.
    inputs: InputSizes,
    /// From a plan's arrival to that of its inputs, for each of them.
    data: NetworkTime,
    weights: Weights,
    /// As [`Offered::queue_max`].
    queue_max: Vec<u32>,
    /// If what a batch takes depends on its tasks.
    cost: Option<BatchCost>,
    /// As [`Offered::gpu_price`].
    gpu_price: Option<f64>,
    applications: Applications,
    /// As [`Planner::tables_made`] had it when control was told.
    told_tables: u64,
    /// Whether any GPU in use hosts it, or why its tasks are dropped.
    hosted: Result<(), DropReason>,
    /// As control was told.
    told: Option<PlannedWith>,
    /// Tasks that came since the last [`Shard::take_load`].
    tasks: u64,
    /// What became of tasks since then.
    served: Served,
}

impl Model {
    /// Whether as many requests of a priority wait as its configuration lets.
    fn is_full(&self, planner: &dyn Planner<Ride>, model: ModelId, priority: u8) -> bool {
        let bound = self.queue_max.get(usize::from(priority)).copied().unwrap_or_default() as usize;
        bound > 0 && planner.queue_length_of(model, priority) >= bound
    }
}

#[derive(Debug)]
struct UsedGpu {
    backend: BackendId,
    index: u32,
    /// What it hosts, if its memory holds but a part of that; ascending.
    paged: Vec<ModelId>,
    /// What is planned of loads that have not been reported.
    loads: BTreeMap<ModelId, Predicted>,
}

/// One ModelThread without its sockets.
pub struct Shard {
    config: ShardConfig,
    /// What members have to show when they connect here.
    passes: BTreeMap<Member, u64>,
    /// Backends that have not connected here yet, and what they are told when they have. At most [`HELD_MAX`] of each.
    connecting: BTreeMap<BackendId, Vec<SchedulerToBackend>>,
    frontends: BTreeMap<FrontendId, Frontend>,
    /// GPUs in use.
    gpus: BTreeMap<GpuId, UsedGpu>,
    /// Models that this thread owns.
    models: BTreeMap<ModelId, Model>,
    /// l(b) of these.
    estimates: Estimates,
    /// From a grant to its plan's arrival.
    ctrl: NetworkTime,
    /// From the end of execution to the client, as control plans with it.
    resp: Span,
    /// From when a timer is due to the batch that it is for.
    lateness: NetworkTime,
    planner: Box<dyn Planner<Ride>>,
    plans: Plans,
    fences: Fences,
    claims: Claims,
    given_back: GivenBack,
    /// Frontends that obey us and are not settled.
    heirs: BTreeMap<FrontendId, Heir>,
    /// Tasks that came while no GPU had their model's weights in memory.
    cold: u64,
    predictions: Predictions,
    /// Tasks that backends may run again alone.
    samples: Samples,
    /// For whoever looks at the last seconds, if anybody may.
    recorder: Option<Recorder>,
    /// When plans are looked at again.
    watch_at: Timestamp,
    outputs: VecDeque<ShardOutput>,
}

impl Shard {
    /// A thread that knows nobody yet.
    #[must_use]
    pub fn new(config: ShardConfig, planner: Box<dyn Planner<Ride>>) -> Self {
        Self {
            passes: BTreeMap::new(),
            connecting: BTreeMap::new(),
            frontends: BTreeMap::new(),
            gpus: BTreeMap::new(),
            models: BTreeMap::new(),
            estimates: Estimates::new(config.learning),
            ctrl: NetworkTime::new(config.ctrl),
            resp: config.resp,
            lateness: NetworkTime::of_timers(config.jitter),
            planner,
            plans: Plans::new(config.id),
            fences: Fences::default(),
            claims: Claims::default(),
            given_back: GivenBack::default(),
            heirs: BTreeMap::new(),
            cold: 0,
            predictions: Predictions::default(),
            samples: Samples::default(),
            recorder: None,
            watch_at: Timestamp::PAST,
            outputs: VecDeque::new(),
            config,
        }
    }

    /// Whether a member that wants to connect is who it says.
    #[must_use]
    pub fn is_welcome(&self, member: Member, pass: u64) -> bool {
        self.passes.get(&member) == Some(&pass)
    }

    /// What control says.
    pub fn handle_news(&mut self, now: Timestamp, news: ControlToShard) {
        match news {
            ControlToShard::Joined { member, pass } => {
                self.passes.insert(member, pass);
                match member {
                    Member::Frontend(frontend) => drop(self.frontends.insert(frontend, Frontend::default())),
                    Member::Backend(backend) if self.config.has_port => {
                        self.connecting.insert(backend, Vec::new());
                    }
                    Member::Backend(_) => {}
                }
            }
            ControlToShard::FrontendLeft(frontend) => self.on_frontend_left(now, frontend),
            ControlToShard::BackendLeft(backend) => {
                self.passes.remove(&Member::Backend(backend));
                self.connecting.remove(&backend);
                self.samples.remove_backend(backend);
                let lost = self.plans.remove_backend(backend).into_iter().flat_map(|plan| plan.tasks);
                let lost = lost.map(RunningTask::lost).collect();
                self.doubt((backend, LinkId::ALL), false, lost);
                for task in self.given_back.handle_backend_left(backend) {
                    self.on_unanswered(now, task);
                }
            }
            ControlToShard::Served(frontend, is_served) => self.on_served(now, frontend, is_served),
            ControlToShard::GpuJoined(Gpu { id, backend, index, models, memory }) => {
                let paged = if memory.is_some() { models.clone() } else { Vec::new() };
                self.gpus.insert(id, UsedGpu { backend, index, paged, loads: BTreeMap::new() });
                let free_at = self.plans.free_at(backend, index).map_or(now, |at| at.max(now));
                self.planner.handle_gpu_joined(free_at, id, models, memory);
            }
            ControlToShard::GpuLeft(gpu) => {
                self.gpus.remove(&gpu);
                self.planner.handle_gpu_left(now, gpu);
            }
            ControlToShard::GpuRenamed { old, new } => {
                self.estimates.handle_gpu_renamed(old, new);
                self.follow_estimates(now);
            }
            ControlToShard::GpuGone(gpu) => self.estimates.handle_gpu_left(gpu),
            ControlToShard::HostMemory { gpus, models, is_there } => {
                for (&gpu, &model) in gpus.iter().flat_map(|gpu| models.iter().map(move |model| (gpu, model))) {
                    self.planner.handle_host_memory(gpu, model, is_there);
                }
            }
            ControlToShard::Resp(resp) => self.resp = resp,
            ControlToShard::Offered(offered) => self.on_offered(now, offered),
            ControlToShard::Hosted(model, hosted) => self.on_hosted(now, model, hosted),
            ControlToShard::Host { backend, load, version, model } => {
                self.tell(backend, SchedulerToBackend::Host { load, version, model });
            }
            ControlToShard::Unload { backend, model } => self.tell(backend, SchedulerToBackend::Unload { model }),
            ControlToShard::Dismiss(backend) => self.tell(backend, SchedulerToBackend::Dismissed),
            ControlToShard::Unfinished(backend, plan) => self.on_unfinished(now, backend, plan),
            ControlToShard::Inherited(backend, report) => self.on_inherited(now, backend, report),
            ControlToShard::Settle(frontend, links) => self.on_settle(now, frontend, links),
            ControlToShard::Adopt(moved) => self.on_adopted(now, *moved),
            ControlToShard::TellLearned => self.tell_learned(),
            ControlToShard::Learned(model, learned) => self.on_learned(now, model, &learned),
            ControlToShard::LearnedCtrl(ctrl) => {
                if self.ctrl.handle_learned(now, ctrl) {
                    self.on_budgets(now);
                }
            }
            ControlToShard::Forwarded(model, Forwarded::Task(mut task, name)) => {
                task.application = self.application(model, name);
                self.on_forwarded(now, model, task);
            }
            // Whom nobody owns is not forwarded again.
            ControlToShard::Forwarded(model, Forwarded::Cancel(task)) => {
                if self.models.contains_key(&model) {
                    self.on_cancel(now, model, task);
                }
            }
        }
    }

    /// Tells a backend something, as soon as it is connected.
    fn tell(&mut self, backend: BackendId, message: SchedulerToBackend) {
        match self.connecting.get_mut(&backend) {
            None => self.outputs.push_back(ShardOutput::ToBackend(backend, message)),
            Some(held) if held.len() < HELD_MAX => held.push(message),
            Some(_) => {
                let why = format!("it has joined, but does not connect to ModelThread {}'s address", self.config.id.0);
                self.handle_disconnected(Member::Backend(backend), why);
            }
        }
    }

    /// A member is connected to this thread.
    pub fn handle_connected(&mut self, member: Member) {
        if let Member::Backend(backend) = member {
            let held = self.connecting.remove(&backend).into_iter().flatten();
            self.outputs.extend(held.map(|message| ShardOutput::ToBackend(backend, message)));
        }
        self.outputs.push_back(ShardOutput::ToControl(ShardToControl::Connected(member)));
    }

    /// A member's connection to this thread ended.
    pub fn handle_disconnected(&mut self, member: Member, reason: String) {
        self.outputs.push_back(ShardOutput::ToControl(ShardToControl::Lost(member, reason)));
    }

    /// A frontend's message.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_frontend_message(
        &mut self,
        now: Timestamp,
        frontend: FrontendId,
        message: FrontendToModelThread,
    ) -> Result<(), Violation> {
        match message {
            FrontendToModelThread::Submit { task, model, deadline, priority, application, is_first, slot } => {
                let submission = Submission { task, model, deadline, priority, application, is_first, slot };
                self.on_submit(now, frontend, submission)
            }
            FrontendToModelThread::Cancel { task, model } => {
                check_owner(frontend, task)?;
                if !self.on_heir_cancelled(model, task) {
                    self.on_cancel(now, model, task);
                }
                Ok(())
            }
            FrontendToModelThread::Open { task: id, model, deadline, priority, application, attempt, slot } => {
                let deadline = self.latest_end(now, model, deadline);
                let application = self.application(model, application);
                let task = RunningTask { id, model, deadline, priority, application, attempt, losses: 0, slot };
                self.on_open(frontend, task)
            }
            FrontendToModelThread::AllOpen => {
                self.outputs.push_back(ShardOutput::ToControl(ShardToControl::AllOpen(frontend)));
                Ok(())
            }
            FrontendToModelThread::Fenced { backend, unanswered } => {
                self.on_fenced(now, frontend, backend, &unanswered)
            }
        }
    }

    /// A backend's message.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_backend_message(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        message: BackendToModelThread,
    ) -> Result<(), Violation> {
        match message {
            BackendToModelThread::PlanDone { plan, outcome, undelivered, arrived_at, fetched_at } => {
                self.on_plan_done(now, backend, (plan, outcome), &undelivered, (arrived_at, fetched_at))
            }
            BackendToModelThread::Answered { plan, undelivered } => self.on_answered(now, backend, plan, &undelivered),
            BackendToModelThread::Cancelled { plan, task } => {
                self.on_task_dropped(backend, (plan, task), DropReason::Cancelled)
            }
            BackendToModelThread::InputLate { plan, task } => {
                self.on_task_dropped(backend, (plan, task), DropReason::InputLate)
            }
            BackendToModelThread::RanAlone { plan, took } => {
                self.on_ran_alone(now, (plan, backend), took);
                Ok(())
            }
            BackendToModelThread::WeightsLoaded { gpu, model, outcome } => {
                self.on_weights_loaded(now, (backend, gpu), model, outcome);
                Ok(())
            }
        }
    }

    /// Step 3: a frontend submits a task.
    fn on_submit(&mut self, now: Timestamp, frontend: FrontendId, submission: Submission) -> Result<(), Violation> {
        let Submission { task: id, model, deadline, priority, application, is_first, slot } = submission;
        check_owner(frontend, id)?;
        // It left, and this was on its way.
        let Some(member) = self.frontends.get_mut(&frontend) else { return Ok(()) };
        member.tasks += 1;
        let (is_full, is_served) = (member.tasks > self.config.tasks_per_frontend_max, member.is_served);
        self.on_input(now, model, slot.input_bytes);
        let deadline = self.latest_end(now, model, deadline);
        let number = self.application(model, application);
        let (length, payload) = (slot.input_bytes, Ride { attempt: 0, losses: 0, slot });
        let task = Task { id, deadline, priority, application: number, length, payload };
        match self.models.get_mut(&model) {
            _ if is_full => self.refuse_task(now, (model, id), DropReason::QueueFull),
            Some(Model { hosted: Err(reason), .. }) => {
                let reason = *reason;
                self.refuse_task(now, (model, id), reason);
            }
            Some(_) if !is_served => self.refuse_task(now, (model, id), DropReason::NoBackend),
            // Rows of a request that is let in come with it, however many they are.
            Some(entry) if is_first && entry.is_full(&*self.planner, model, priority) => {
                entry.served.lost += u64::from(deadline != Timestamp::NEVER);
                self.refuse_task(now, (model, id), DropReason::QueueFull);
            }
            Some(entry) => {
                entry.tasks += 1;
                self.cold += u64::from(self.planner.is_cold(model));
                self.planner.handle_submit(now, model, task);
            }
            None => self.forward(model, Forwarded::Task(task, application)),
        }
        Ok(())
    }

    /// A task's client hung up.
    fn on_cancel(&mut self, now: Timestamp, model: ModelId, task: TaskId) {
        match self.plans.find(model, task) {
            Some((backend, plan)) => {
                self.outputs.push_back(ShardOutput::ToBackend(backend, SchedulerToBackend::Cancel { plan, task }));
            }
            None if self.given_back.handle_cancelled(task) => self.drop_task(task, DropReason::Cancelled),
            None if self.models.contains_key(&model) => self.planner.handle_cancel(now, model, task),
            None => {
                self.outputs.push_back(ShardOutput::ToControl(ShardToControl::Forward(model, Forwarded::Cancel(task))));
            }
        }
    }

    /// A frontend confirms a fence.
    fn on_fenced(
        &mut self,
        now: Timestamp,
        frontend: FrontendId,
        backend: BackendId,
        unanswered: &[TaskId],
    ) -> Result<(), Violation> {
        let Confirmed { again, answered, is_given_back } = self
            .fences
            .handle_fenced(frontend, backend, unanswered)
            .map_err(|_| Violation(format!("{backend:?} is confirmed fenced, but that was not asked for")))?;
        self.end_tasks(frontend, answered);
        if is_given_back {
            self.on_given_back(now, (frontend, backend), again);
        } else {
            again.into_iter().for_each(|task| self.on_unanswered(now, task));
        }
        Ok(())
    }

    /// A backend dropped a task from its batch: it was cancelled, or its input was late.
    fn on_task_dropped(
        &mut self,
        backend: BackendId,
        (plan, task): (PlanId, TaskId),
        reason: DropReason,
    ) -> Result<(), Violation> {
        match self.plans.on_dropped(backend, plan, task) {
            Some(Dropped::Task) => self.drop_task(task, reason),
            Some(Dropped::Heir) => {}
            None => return Err(Violation(format!("{task:?}: {reason}, but {backend:?} does not have it in {plan:?}"))),
        }
        Ok(())
    }

    /// A plan's execution ended.
    fn on_plan_done(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        (id, outcome): (PlanId, PlanOutcome),
        undelivered: &[Undelivered],
        (arrived_at, fetched_at): (Timestamp, Timestamp),
    ) -> Result<(), Violation> {
        let (failed, link) = failed(undelivered);
        let done = self
            .plans
            .on_done(backend, id, &failed)
            .ok_or_else(|| Violation(format!("{id:?} is reported done, but {backend:?} does not run it")))?;
        self.note_done(now, backend, &done, outcome);
        if matches!(outcome, PlanOutcome::WindowMissed { .. }) {
            self.count_rejected((backend, id), done.model);
        }
        // What a backend says of its clock must not keep its GPU from being free.
        let freed_at = match outcome {
            PlanOutcome::Executed { finished_at, .. } => Some(finished_at.min(now)),
            PlanOutcome::WindowMissed { rejected_at } => Some(rejected_at.min(now)),
            // It is not free, and goes out of use.
            PlanOutcome::Abandoned { .. } => None,
        };
        // One that left the planner, or has another id there, has its plans counted in when it joins again.
        if let Some(freed_at) = freed_at.filter(|_| self.gpus.contains_key(&done.gpu)) {
            self.planner.handle_finished(done.gpu, freed_at);
            if let PlanOutcome::Executed { started_at, finished_at } = outcome
                && self.models.contains_key(&done.model)
            {
                // Whatever a backend says: it did not run before it was sent.
                let longest = done.sent.map_or(Span::ZERO, |(sent_at, _)| now - sent_at);
                let execution = (finished_at - started_at).min(longest);
                self.count_served((backend, id), done.model, (finished_at, execution));
                if self.is_dynamic(done.model) {
                    self.on_sampled(now, (id, backend), &done, execution);
                } else {
                    self.estimates.handle_executed(now, done.model, done.gpu, done.size, execution);
                    self.follow_estimates(now);
                }
            }
        }
        if let PlanOutcome::Executed { started_at, finished_at } = outcome
            && let Some((_, predicted)) = done.sent
        {
            self.predictions.handle_ended(Action::Infer, predicted, finished_at - started_at, finished_at);
        }
        self.on_network_seen(now, &done, outcome, (arrived_at, fetched_at));
        let is_abandoned = matches!(outcome, PlanOutcome::Abandoned { .. });
        let failed = done.failed.into_iter().map(|task| if is_abandoned { task.lost() } else { task });
        self.doubt((backend, link), link == LinkId::NONE && !is_abandoned, failed.collect());
        Ok(())
    }

    /// All of a plan's answers have arrived or failed.
    fn on_answered(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        id: PlanId,
        undelivered: &[Undelivered],
    ) -> Result<(), Violation> {
        let (failed, link) = failed(undelivered);
        let (answered, doubtful) = self
            .plans
            .on_answered(backend, id, &failed)
            .ok_or_else(|| Violation(format!("{id:?} is reported answered, but {backend:?} did not run it")))?;
        // Tasks of one frontend mostly stand together.
        for tasks in answered.chunk_by(|one, other| one.id.frontend() == other.id.frontend()) {
            let frontend = tasks[0].id.frontend();
            if self.frontends.contains_key(&frontend) {
                self.end_tasks(frontend, tasks.len());
                let told = self.claims.note(now, (frontend, backend), tasks);
                self.outputs.extend(told.into_iter().map(|(frontend, told)| ShardOutput::ToFrontend(frontend, told)));
                for task in self.given_back.handle_answered((frontend, backend), tasks.len()) {
                    self.on_unanswered(now, task);
                }
            }
        }
        self.doubt((backend, link), link == LinkId::NONE, doubtful);
        Ok(())
    }

    /// Timers of all parts; then the planner decides on all that has come in.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.estimates.handle_timeout(now);
        self.follow_estimates(now);
        self.plan_again(now);
        self.planner.handle_timeout(now);
        while let Some(output) = self.planner.poll_output() {
            match output {
                PlannerOutput::Batch(batch) => self.on_batch(now, batch),
                PlannerOutput::Load { gpu, model, earliest, latest, takes } => {
                    self.on_load(gpu, model, (earliest, latest), takes);
                }
                PlannerOutput::Unload { gpu, model } => {
                    self.tell_gpu(gpu, SchedulerToBackend::UnloadWeights { gpu, model });
                }
                PlannerOutput::Preempt(_) => unreachable!("a policy that preempts is refused before it gets here"),
                PlannerOutput::Dropped { model, task, reason } => {
                    self.count_lost(model, &task, reason);
                    let hosted = self.models.get(&model).map_or(Err(DropReason::NoBackend), |entry| entry.hosted);
                    let is_unhosted = reason == DropReason::NoBackend;
                    let reason = hosted.err().filter(|_| is_unhosted).unwrap_or(reason);
                    self.refuse_task(now, (model, task.id), reason);
                }
            }
        }
        while let Some(released) = self.planner.poll_released() {
            self.on_released(released);
        }
        let told = self.claims.take_due(now).map(|(frontend, told)| ShardOutput::ToFrontend(frontend, told));
        self.outputs.extend(told);
        if self.watch_at <= now {
            self.watch_at = now + WATCH_INTERVAL;
            if let Some((backend, plan, wait)) = self.plans.overdue(now) {
                wait.note_reached();
                let reason =
                    format!("{plan:?} should have ended or been given up long ago, and nothing is heard of it");
                self.handle_disconnected(Member::Backend(backend), reason);
            }
        }
    }

    /// When [`Self::handle_timeout`] must be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let watch_at = (self.plans.len() > 0).then_some(self.watch_at);
        let timers = [self.planner.poll_timeout(), self.estimates.poll_timeout(), watch_at, self.claims.poll_timeout()];
        timers.into_iter().chain([self.given_back.poll_timeout()]).flatten().min()
    }

    /// Whether the RankThread has said something, if it is on another thread.
    #[must_use]
    pub fn has_mail(&self) -> bool {
        self.planner.has_mail()
    }

    /// The next thing to send.
    pub fn poll_output(&mut self) -> Option<ShardOutput> {
        self.outputs.pop_front()
    }

    /// What there is to do, and what came since the last time.
    pub fn take_load(&mut self, now: Timestamp) -> ShardLoad {
        let queued = self.models.keys().map(|&model| self.planner.queue_length(model)).sum();
        let served = self.take_served(now);
        let tasks = self.models.iter_mut().filter(|(_, entry)| entry.tasks > 0);
        let tasks = tasks.map(|(&model, entry)| (model, std::mem::take(&mut entry.tasks))).collect();
        let doubtful = self.fences.len() + self.given_back.len();
        let (batches, cold) = (self.plans.len(), self.cold);
        let (predictions, request_times) = (self.predictions.clone(), self.take_request_times());
        ShardLoad { queued, batches, doubtful, cold, predictions, tasks, request_times, served }
    }

    /// Nothing waits, runs, is in doubt or is counted.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let no_queue = self.models.keys().all(|&model| self.planner.queue_length(model) == 0);
        let no_count = self.frontends.values().all(|frontend| frontend.tasks == 0);
        no_queue && no_count && self.plans.len() == 0 && self.fences.len() == 0 && self.heirs.is_empty()
    }

    fn on_frontend_left(&mut self, now: Timestamp, frontend: FrontendId) {
        self.passes.remove(&Member::Frontend(frontend));
        self.frontends.remove(&frontend);
        self.fences.forget_frontend(frontend);
        self.claims.forget_frontend(frontend);
        self.given_back.forget_frontend(frontend);
        self.heirs.remove(&frontend);
        self.plans.disown(frontend);
        self.planner.handle_owner_left(now, &|task| task.frontend() == frontend);
    }

    /// What waits for a frontend that backends do not reach any more ends; what runs is its backend's to report.
    fn on_served(&mut self, now: Timestamp, frontend: FrontendId, is_served: bool) {
        let Some(entry) = self.frontends.get_mut(&frontend) else { return };
        entry.is_served = is_served;
        if !is_served {
            // It may be asked several times about one task.
            let gone = RefCell::new(BTreeSet::new());
            self.planner.handle_owner_left(now, &|task| {
                let is_its = task.frontend() == frontend;
                if is_its {
                    gone.borrow_mut().insert(task);
                }
                is_its
            });
            let aside = self.given_back.forget_frontend(frontend);
            for task in gone.into_inner().into_iter().chain(aside.into_iter().map(|task| task.id)) {
                self.drop_task(task, DropReason::NoBackend);
            }
        }
    }

    fn on_offered(&mut self, now: Timestamp, offered: Offered) {
        let Offered { model, read_time, weights, queue_max, cost, gpu_price, common, offers } = offered;
        let entry = self.models.entry(model).or_insert_with(|| Model {
            budget: NetworkBudget::default(),
            inputs: InputSizes::new(read_time.clone()),
            data: NetworkTime::new(read_time.least()),
            weights,
            queue_max: Vec::new(),
            cost,
            gpu_price,
            applications: Applications::default(),
            told_tables: 0,
            hosted: Err(DropReason::NoBackend),
            told: None,
            tasks: 0,
            served: Served::default(),
        });
        entry.queue_max = queue_max;
        let is_resized = std::mem::replace(&mut entry.weights, weights) != weights;
        let is_dearer = std::mem::replace(&mut entry.cost, cost) != cost;
        entry.inputs.set_time(read_time);
        entry.data.set_configured(entry.inputs.read_time());
        entry.budget = NetworkBudget {
            ctrl: self.ctrl.planned(),
            data_per_task: entry.data.planned(),
            jitter: self.lateness.planned(),
        };
        if let Some(common) = common {
            self.estimates.handle_model(model, common);
        }
        for (gpus, offered) in offers {
            self.estimates.handle_offer(model, &gpus, &offered);
        }
        self.follow_estimates(now);
        if is_resized || is_dearer {
            self.plan_with(now, model);
        }
    }

    fn on_hosted(&mut self, now: Timestamp, model: ModelId, hosted: Result<(), DropReason>) {
        let Some(entry) = self.models.get_mut(&model) else { return };
        entry.hosted = hosted;
        if hosted.is_err() {
            self.planner.handle_unhosted(now, model);
            self.estimates.handle_unhosted(model);
            self.follow_estimates(now);
        }
    }

    /// To whoever owns the model now; it counts there.
    fn forward(&mut self, model: ModelId, forwarded: Forwarded) {
        if let Forwarded::Task(task, _) = &forwarded {
            self.end_tasks(task.id.frontend(), 1);
        }
        self.outputs.push_back(ShardOutput::ToControl(ShardToControl::Forward(model, forwarded)));
    }

    /// Executions have shown another l(b), or offers are others: the planner is told, and control the least latency.
    fn follow_estimates(&mut self, now: Timestamp) {
        while let Some(change) = self.estimates.poll_changed() {
            match change {
                ProfileChange::Common(model) => self.plan_with(now, model),
                ProfileChange::OfGpu(model, gpu) if self.models.contains_key(&model) => {
                    let profile = self.estimates.own_profile(model, gpu).map(|own| LatencyProfile::clone(own));
                    self.planner.handle_gpu_profile(model, gpu, profile);
                }
                ProfileChange::OfGpu(..) => {}
            }
        }
    }

    /// The planner is told what a model takes now, and control what that means for its frontends.
    fn plan_with(&mut self, now: Timestamp, model: ModelId) {
        let Some(entry) = self.models.get_mut(&model) else { return };
        let (profile, queue_max) = (self.estimates.profile(model).clone(), self.config.queue_max);
        let planned = PlannedWith { least: profile.latency(1), batching: profile.batching(), budget: entry.budget };
        let weights = Weights { load: self.estimates.load(model, entry.weights.load), ..entry.weights };
        let (dynamic, gpu_price) = (entry.cost.map(Into::into), entry.gpu_price);
        let config = ModelConfig { profile, queue_max, budget: Some(entry.budget), weights, dynamic, gpu_price };
        self.planner.handle_model(now, model, config);
        if entry.told.replace(planned) != Some(planned) {
            let news = ShardToControl::Planned(model, planned);
            self.outputs.push_back(ShardOutput::ToControl(news));
        }
    }

    fn drop_task(&mut self, task: TaskId, reason: DropReason) {
        let frontend = task.frontend();
        if self.frontends.contains_key(&frontend) {
            self.outputs.push_back(ShardOutput::ToFrontend(frontend, SchedulerToFrontend::Dropped { task, reason }));
            self.end_tasks(frontend, 1);
        }
    }

    fn end_tasks(&mut self, frontend: FrontendId, tasks: usize) {
        if let Some(member) = self.frontends.get_mut(&frontend) {
            member.tasks -= tasks;
        }
    }
}

/// The failed tasks, and the newest of the links that are to blame.
fn failed(undelivered: &[Undelivered]) -> (Vec<TaskId>, LinkId) {
    let newest = undelivered.iter().map(|failed| failed.link).max().unwrap_or(LinkId::NONE);
    (undelivered.iter().map(|failed| failed.task).collect(), newest)
}

fn check_owner(frontend: FrontendId, task: TaskId) -> Result<(), Violation> {
    if task.frontend() == frontend {
        return Ok(());
    }
    Err(Violation(format!("{frontend:?} speaks of {task:?}, which is another frontend's")))
}
