//! One run: arrivals, the scheduler's planner and GPUs under one clock.
//!
//! At each instant: batches end, GPUs fail or return, ends are reported, requests arrive, then the planner decides.
//! What reports teach about l(b) is planned with if the workload says `reestimate`.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
};

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use scheduler::{
    Batch, Estimates, GpuMemory, LoadEnd, ModelConfig, Planner, PlannerOutput, Policy, Predicted, ProfileChange, Task,
    Weights, predictions::Action, task_queue::Queued,
};

use crate::{
    arrivals::{Arrivals, Request},
    checker::{Checker, Violation},
    faults::{Fault, FaultSource, Faults},
    gpus::{GpuEvent, Gpus},
    graphs::{GraphAction, Graphs},
    memory::{Ended, HostNews, Load, Memory},
    report::{Recorder, Report},
    trace::Event,
    workload::{Class, Workload},
};

/// Tasks that may wait for one model.
const QUEUE_MAX: usize = 16_384;

/// What to run a workload with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The policy of every model.
    pub policy: Policy,
    /// Aggregate rate in requests a second; above 0.
    pub rate_rps: f64,
    /// Simulated span in seconds; its first tenth warms up.
    pub seconds: f64,
    /// Seeds the arrivals.
    pub seed: u64,
}

/// Runs a workload. `observe` is told all events as they end; `progress` once a simulated second how many
/// have passed.
///
/// # Errors
/// If an invariant is broken.
pub fn run(
    workload: &Workload,
    options: &Options,
    observe: &mut dyn FnMut(Event),
    progress: &mut dyn FnMut(f64),
) -> Result<Report, Violation> {
    let end = Timestamp::ZERO + Span::from_secs_f64(options.seconds);
    let arrivals = Arrivals::random(workload, options.rate_rps, options.seed, end);
    run_arrivals(workload, options, arrivals, observe, progress)
}

/// As [`run`], with requests that come as given; the options' rate and seed only name the run.
///
/// # Errors
/// If an invariant is broken.
pub fn run_arrivals(
    workload: &Workload,
    options: &Options,
    arrivals: Arrivals,
    observe: &mut dyn FnMut(Event),
    progress: &mut dyn FnMut(f64),
) -> Result<Report, Violation> {
    let end = Timestamp::ZERO + Span::from_secs_f64(options.seconds);
    let warm = Timestamp::ZERO + Span::from_secs_f64(options.seconds / 10.0);
    let mut cluster = Cluster::new(workload, (options.policy, options.seed), (warm, end), observe);
    for gpu in 0..workload.gpus {
        cluster.add_gpu(Timestamp::ZERO, GpuId(gpu));
    }
    cluster.run(arrivals, progress)?;
    Ok(cluster.recorder.report(workload, options))
}

pub(crate) struct Cluster<'a> {
    workload: &'a Workload,
    planner: Box<dyn Planner<Request>>,
    /// l(b) of all models, as the scheduler knows it.
    estimates: Estimates,
    gpus: Gpus,
    /// If it is short.
    memory: Option<Memory>,
    /// Ends of loads, by when the scheduler learns of them.
    loaded: BinaryHeap<Reverse<LoadReport>>,
    /// Clients that ask again when they are answered, by when they do.
    clients: BinaryHeap<Reverse<Request>>,
    /// Whether there are loads, or clients that ask again.
    has_rare: bool,
    /// When clients cease to ask.
    end: Timestamp,
    faults: FaultSource,
    /// GPUs that are up.
    up: usize,
    /// Ends of batches, by when the scheduler learns of them.
    reports: BinaryHeap<Reverse<EndReport>>,
    checker: Checker,
    /// Tasks with an objective that wait, by the latest start of each alone, if there are others that have none.
    in_need: Option<BTreeSet<(Timestamp, TaskId)>>,
    /// Whether tasks without an objective never make others late that wait already: under policies that give nobody up
    /// early, if all goes as planned.
    is_harmless: bool,
    recorder: Recorder,
    /// Requests for graphs, if the workload has any.
    graphs: Graphs<'a>,
    observe: &'a mut dyn FnMut(Event),
}

/// A batch has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct EndReport {
    /// When the scheduler learns of it.
    at: Timestamp,
    gpu: GpuId,
    finished_at: Timestamp,
    /// What was executed how long; `None` if the batch was rejected or killed.
    executed: Option<(ModelId, usize, Span)>,
}

/// A load has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct LoadReport {
    /// When the scheduler learns of it.
    at: Timestamp,
    gpu: GpuId,
    model: ModelId,
    finished_at: Timestamp,
    /// How long it took; `None` if it did not begin.
    took: Option<Span>,
}

/// Of so many tasks of dynamic models one is run again alone; and so many of each application before the run.
const TASKS_A_SAMPLE: u64 = 8;
const SAMPLES_BEFORE: usize = 192;
const PROFILE_SEED: u64 = 7;

/// A client whose request was dropped asks again so much later.
const RETRY: Span = Span::from_millis(1);

impl<'a> Cluster<'a> {
    /// Without GPUs. Requests that arrive in `measured`, half open, count.
    pub(crate) fn new(
        workload: &'a Workload,
        (policy, seed): (Policy, u64),
        measured: (Timestamp, Timestamp),
        observe: &'a mut dyn FnMut(Event),
    ) -> Self {
        let mut estimates = Estimates::new(policy.learning(workload.reestimate));
        for (id, model) in (0..).zip(&workload.models) {
            estimates.handle_model(ModelId(id), model.profile.clone());
        }
        let gpus = workload.gpus as usize;
        let has_background = workload.models.iter().any(|model| !model.classes.iter().all(Class::has_objective));
        let mut cluster = Self {
            workload,
            planner: policy.planner(workload.network),
            estimates,
            gpus: Gpus::new(gpus),
            memory: workload.memory.map(|memory| Memory::new(gpus, memory.pages)),
            loaded: BinaryHeap::new(),
            clients: BinaryHeap::new(),
            has_rare: workload.memory.is_some() || workload.models.iter().any(|model| model.clients > 0),
            end: measured.1,
            faults: FaultSource::new(workload.faults, workload.gpus, seed),
            up: 0,
            reports: BinaryHeap::new(),
            checker: Checker::new(gpus),
            in_need: has_background.then(BTreeSet::new),
            is_harmless: matches!(policy, Policy::Deferred | Policy::DeferredLatest | Policy::Eager)
                && (workload.faults == Faults::default(), workload.memory) == (true, None),
            recorder: Recorder::new(measured, workload),
            graphs: Graphs::new(workload, seed),
            observe,
        };
        for (id, model) in (0..).zip(&workload.models) {
            let first = Request::new(Timestamp::ZERO, ModelId(id), 0);
            cluster.clients.extend((0..model.clients).map(|_| Reverse(first)));
        }
        cluster.follow_estimates(Timestamp::ZERO);
        cluster.profile_applications();
        cluster
    }

    /// What is known of dynamic models when they are registered.
    fn profile_applications(&mut self) {
        let mut random = ChaCha8Rng::seed_from_u64(PROFILE_SEED);
        let mut lengths = ChaCha8Rng::seed_from_u64(PROFILE_SEED + 1);
        for (id, model) in (0..).map(ModelId).zip(&self.workload.models) {
            let Some(dynamic) = &model.dynamic else { continue };
            for class in 0..model.classes.len() {
                for _ in 0..SAMPLES_BEFORE {
                    let work = dynamic.sample(class, &mut random);
                    let of = (class as u8, dynamic.length(work, &mut lengths));
                    self.planner.handle_alone(Timestamp::ZERO, id, of, dynamic.alone(work));
                }
            }
        }
    }

    /// The planner is told every l(b) that is another one now.
    fn follow_estimates(&mut self, now: Timestamp) {
        while let Some(change) = self.estimates.poll_changed() {
            match change {
                ProfileChange::Common(id) => {
                    let profile = self.estimates.profile(id).clone();
                    let weights = self.planned_weights(id);
                    let model = &self.workload.models[id.0 as usize];
                    let (dynamic, gpu_price) = (model.dynamic.as_ref().map(|dynamic| dynamic.cost), model.gpu_price);
                    let config = ModelConfig { weights, dynamic, gpu_price, ..ModelConfig::new(profile, QUEUE_MAX) };
                    self.planner.handle_model(now, id, config);
                }
                ProfileChange::OfGpu(id, gpu) => {
                    let profile = self.estimates.own_profile(id, gpu).map(|own| LatencyProfile::clone(own));
                    self.planner.handle_gpu_profile(id, gpu, profile);
                }
            }
        }
    }

    /// A model's weights, with the time that a load is planned to take.
    fn planned_weights(&self, id: ModelId) -> Weights {
        let offered = self.workload.models[id.0 as usize].weights;
        Weights { load: self.estimates.load(id, offered.load), ..offered }
    }

    pub(crate) fn add_gpu(&mut self, free_at: Timestamp, gpu: GpuId) {
        let models: Vec<_> = (0..self.workload.models.len() as u32).map(ModelId).collect();
        // As its backend would, which has measured it.
        if self.workload.gpu_kinds.len() > 1 {
            let kind = self.workload.kind_of(self.gpus.place(gpu) as u32);
            for (&id, model) in models.iter().zip(&self.workload.models) {
                self.estimates.handle_offer(id, &[gpu], &model.offers[kind]);
            }
            self.follow_estimates(free_at);
        }
        let memory = self.workload.memory.map(|memory| GpuMemory {
            on_disk: memory.host_pages.map_or(Vec::new(), |pages| self.start_machine(gpu, pages)),
            ..GpuMemory::empty(memory.pages)
        });
        self.planner.handle_gpu_joined(free_at, gpu, models, memory);
        self.up += 1;
    }

    /// A GPU's machine reads what it can hold. Yields what it cannot.
    fn start_machine(&mut self, gpu: GpuId, host_pages: u32) -> Vec<ModelId> {
        let weights: Vec<_> = self.workload.models.iter().map(|model| model.weights).collect();
        let memory = self.memory.as_mut().expect("GPUs' memory is short, too");
        memory.handle_machine(gpu, host_pages, &weights)
    }

    /// Until nothing is left to happen.
    pub(crate) fn run(&mut self, mut arrivals: Arrivals, progress: &mut dyn FnMut(f64)) -> Result<(), Violation> {
        let mut next_progress = Timestamp::ZERO;
        loop {
            let report_at = self.reports.peek().map(|Reverse(report)| report.at);
            let (arrives_at, graphs) = (arrivals.peek(), self.graphs.poll_timeout());
            let planner = self.planner.poll_timeout();
            let timers = [planner, self.gpus.poll_timeout(), arrives_at, report_at, self.poll_rare(), graphs];
            let Some(next) = timers.into_iter().flatten().min() else { break };
            // Faults and what is forgotten do not keep a run going.
            let others = [self.faults.poll_timeout(), self.estimates.poll_timeout()];
            let now = others.into_iter().flatten().fold(next, Timestamp::min);
            if now >= next_progress {
                progress((now - Timestamp::ZERO).as_secs_f64());
                next_progress = now + Span::from_millis(1000);
            }
            self.on_gpu_timeout(now)?;
            while let Some(fault) = self.faults.poll_fault(now) {
                self.on_fault(now, fault)?;
            }
            while let Some(&Reverse(report)) = self.reports.peek()
                && report.at <= now
            {
                self.reports.pop();
                self.on_report(now, report);
            }
            self.estimates.handle_timeout(now);
            self.follow_estimates(now);
            self.on_rare(now)?;
            while arrivals.peek().is_some_and(|at| at <= now) {
                let request = arrivals.pop().expect("just peeked");
                self.on_arrival(now, request)?;
            }
            self.graphs.handle_timeout(now);
            self.follow_graphs(now)?;
            self.decide(now)?;
        }
        self.checker.finish()?;
        match self.graphs.under_way() as u64 {
            0 => Ok(()),
            left => Err(Violation::NeverEnded(left)),
        }
    }

    /// When loads end or clients ask again; most workloads have neither.
    fn poll_rare(&self) -> Option<Timestamp> {
        if !self.has_rare {
            return None;
        }
        let loaded_at = self.loaded.peek().map(|Reverse(report)| report.at);
        let asks_at = self.clients.peek().map(|Reverse(request)| request.arrived_at);
        [self.memory.as_ref().and_then(Memory::poll_timeout), loaded_at, asks_at].into_iter().flatten().min()
    }

    fn on_rare(&mut self, now: Timestamp) -> Result<(), Violation> {
        if !self.has_rare {
            return Ok(());
        }
        self.on_memory_timeout(now);
        while let Some(&Reverse(LoadReport { at, gpu, model, finished_at, took })) = self.loaded.peek()
            && at <= now
        {
            self.loaded.pop();
            if let Some(took) = took {
                self.estimates.handle_loaded(model, self.workload.models[model.0 as usize].weights.load, took);
                self.follow_estimates(now);
            }
            self.planner.handle_loaded(now, gpu, model, LoadEnd { finished_at, is_loaded: took.is_some() });
        }
        while let Some(&Reverse(request)) = self.clients.peek()
            && request.arrived_at <= now
        {
            self.clients.pop();
            self.on_arrival(now, request)?;
        }
        Ok(())
    }

    fn on_report(&mut self, now: Timestamp, report: EndReport) {
        self.planner.handle_finished(report.gpu, report.finished_at);
        if let Some((model, size, execution)) = report.executed
            && self.faults.is_up(report.gpu)
        {
            self.estimates.handle_executed(now, model, report.gpu, size, execution);
        }
    }

    fn on_arrival(&mut self, now: Timestamp, request: Request) -> Result<(), Violation> {
        if !self.workload.graphs.is_empty() {
            self.recorder.arrived(request, false);
            self.graphs.handle_arrival(now, request);
            return Ok(());
        }
        let is_cold = self.memory.as_ref().is_some_and(|memory| !memory.is_anywhere(request.model));
        self.recorder.arrived(request, is_cold);
        let deadline = self.workload.deadline(request);
        let id = self.checker.submit();
        let application = if request.work > Span::ZERO { request.class as u8 } else { 0 };
        self.submit(now, Task { id, deadline, priority: 0, application, length: request.length, payload: request })
    }

    fn submit(&mut self, now: Timestamp, task: Task<Request>) -> Result<(), Violation> {
        if self.up == 0 {
            return self.on_dropped(now, task.id, task.payload);
        }
        let model = task.payload.model;
        let needs_start = (task.deadline - self.least_latency(model), task.id);
        if let Some(in_need) = self.in_need.as_mut().filter(|_| task.deadline != Timestamp::NEVER) {
            in_need.insert(needs_start);
        }
        self.planner.handle_submit(now, model, task);
        // As many may wait without an objective.
        let bound = if self.in_need.is_some() { 2 * QUEUE_MAX } else { QUEUE_MAX };
        match self.planner.queue_length(model) {
            found if found <= bound => Ok(()),
            found => Err(Violation::Unbounded { what: "a model's queue", found, bound }),
        }
    }

    /// Lets the planner decide until it has nothing more to do now.
    fn decide(&mut self, now: Timestamp) -> Result<(), Violation> {
        let mut is_settled = false;
        while !is_settled {
            is_settled = true;
            self.planner.handle_timeout(now);
            while let Some(output) = self.planner.poll_output() {
                match output {
                    PlannerOutput::Batch(batch) => self.on_batch(now, batch)?,
                    PlannerOutput::Dropped { task, .. } => {
                        self.needs_no_more(task.payload.model, task.deadline, task.id);
                        self.on_dropped(now, task.id, task.payload)?;
                    }
                    PlannerOutput::Load { gpu, model, earliest, latest, takes: duration } => {
                        let predicted = Predicted { duration, ends_at: earliest + duration };
                        let weights = self.workload.models[model.0 as usize].weights;
                        let memory = self.memory.as_mut().expect("planners load into memory that is short");
                        let takes = Weights { load: self.faults.load_duration(weights.load), ..weights };
                        memory.handle_load(now, Load { gpu, model, earliest, latest, predicted }, takes);
                    }
                    PlannerOutput::Unload { gpu, model } => self.on_unload(now, gpu, model)?,
                    PlannerOutput::Preempt(gpu) => {
                        is_settled = false;
                        self.on_preempt(now, gpu)?;
                    }
                }
            }
            // What was dropped may end a graph's request, whose other steps nobody waits for then.
            is_settled &= !self.follow_graphs(now)?;
        }
        Ok(())
    }

    /// Does what requests for graphs ask for. False if that was nothing.
    fn follow_graphs(&mut self, now: Timestamp) -> Result<bool, Violation> {
        let mut has_acted = false;
        while let Some(action) = self.graphs.poll_action() {
            has_acted = true;
            match action {
                GraphAction::Submit { request, deadline, step } => {
                    let id = self.checker.submit();
                    self.graphs.handle_submitted(step, id);
                    let task = Task { id, deadline, priority: 0, application: 0, length: 0, payload: request };
                    self.submit(now, task)?;
                }
                GraphAction::Cancel { model, task } => self.planner.handle_cancel(now, model, task),
                GraphAction::Answered { request, by } => {
                    self.on_answered(request, None, now);
                    self.recorder.answered_by(request, by);
                }
                GraphAction::Dropped(request) => self.on_refused(now, request),
            }
        }
        Ok(has_acted)
    }

    /// l(1), or less.
    fn least_latency(&self, model: ModelId) -> Span {
        self.workload.models[model.0 as usize].profile.latency(1)
    }

    /// A task does not wait any more.
    fn needs_no_more(&mut self, model: ModelId, deadline: Timestamp, id: TaskId) {
        let needs_start = (deadline - self.least_latency(model), id);
        if let Some(in_need) = &mut self.in_need {
            in_need.remove(&needs_start);
        }
    }

    /// Whoever has an objective and could be met still can, now that tasks without one have got a GPU.
    fn check_harmless(&self, now: Timestamp) -> Result<(), Violation> {
        let latency =
            |batch: &Batch<Request>| self.estimates.profile_on(batch.model, batch.gpu).latency(batch.tasks.len());
        let in_need = self.in_need.iter().filter_map(|in_need| in_need.range((now, TaskId(0))..).next());
        for &(starts_by, task) in in_need.take(usize::from(self.is_harmless)) {
            let frees_at = self.gpus.frees_at(now, &latency);
            if frees_at > starts_by {
                return Err(Violation::Displaced { task, starts_by, frees_at });
            }
        }
        Ok(())
    }

    fn on_dropped(&mut self, now: Timestamp, id: TaskId, request: Request) -> Result<(), Violation> {
        self.checker.end(id)?;
        (self.observe)(Event::Drop { model: request.model.0, arrived_at: request.arrived_at, dropped_at: now });
        match request.step {
            Some(step) => self.graphs.handle_dropped(now, step),
            None => self.on_refused(now, request),
        }
        Ok(())
    }

    /// A request ends without an answer.
    fn on_refused(&mut self, now: Timestamp, request: Request) {
        self.recorder.dropped(request);
        self.ask_again(now + RETRY, request);
    }

    /// A request has its answer; its batch started at `started_at`, if it was but one.
    fn on_answered(&mut self, request: Request, started_at: Option<Timestamp>, answered_at: Timestamp) {
        self.recorder.answered(request, started_at, answered_at);
        self.ask_again(answered_at, request);
        let (model, arrived_at) = (request.model.0, request.arrived_at);
        (self.observe)(Event::Answer { model, arrived_at, answered_at });
    }

    /// A closed loop: a client has one request under way.
    fn ask_again(&mut self, at: Timestamp, request: Request) {
        if self.has_rare && self.workload.models[request.model.0 as usize].clients > 0 && at < self.end {
            self.clients.push(Reverse(Request { arrived_at: at, ..request }));
        }
    }

    fn on_unload(&mut self, now: Timestamp, gpu: GpuId, model: ModelId) -> Result<(), Violation> {
        self.recorder.unloaded(now);
        let was_there = self.memory.as_mut().is_some_and(|memory| memory.handle_unload(now, gpu, model));
        if was_there { Ok(()) } else { Err(Violation::Memory { gpu: gpu.0, action: "unload", model: model.0 }) }
    }

    fn on_memory_timeout(&mut self, now: Timestamp) {
        let Some(memory) = &mut self.memory else { return };
        memory.handle_timeout(now);
        while let Some(HostNews { gpu, moved }) = memory.poll_host_news() {
            self.planner.handle_host_memory(gpu, moved.model, moved.is_there);
        }
        while let Some(Ended { load, started_at, read, end }) = memory.poll_ended() {
            let at = end.finished_at.max(now) + self.workload.network.ctrl;
            let Load { gpu, model, predicted, .. } = load;
            self.recorder.loaded(predicted, (started_at, read), end.finished_at);
            let finished_at = end.finished_at;
            let took = started_at.map(|started_at| finished_at - started_at - read);
            self.loaded.push(Reverse(LoadReport { at, gpu, model, finished_at, took }));
        }
    }

    fn on_batch(&mut self, now: Timestamp, batch: Batch<Request>) -> Result<(), Violation> {
        if self.memory.as_ref().is_some_and(|memory| !memory.is_resident(batch.gpu, batch.model)) {
            let place = self.gpus.place(batch.gpu) as u32;
            return Err(Violation::WeightsMissing { gpu: place, model: batch.model.0 });
        }
        let planned_end = batch.predicted().ends_at;
        let late = |(task, _): &&(Queued, Request)| planned_end > task.deadline;
        // Only policies without windows plan batches that must not be rejected; what is planned of a dynamic model is
        // a mean, which is another one for each of a batch's tasks.
        let is_dynamic = self.workload.models[batch.model.0 as usize].dynamic.is_some();
        if batch.latest != Timestamp::NEVER
            && !is_dynamic
            && let Some((task, _)) = batch.tasks.iter().find(late)
        {
            return Err(Violation::PlannedLate { task: task.id, late: planned_end - task.deadline });
        }
        let has_objective = batch.tasks.iter().any(|(task, _)| task.deadline != Timestamp::NEVER);
        for (task, _) in &batch.tasks {
            self.needs_no_more(batch.model, task.deadline, task.id);
        }
        self.gpus
            .handle_batch(now, batch, &mut |started_at, batch| self.faults.duration(started_at, self.workload, batch));
        if !has_objective {
            self.check_harmless(now)?;
        }
        self.on_gpu_events()
    }

    fn on_gpu_timeout(&mut self, now: Timestamp) -> Result<(), Violation> {
        self.gpus.handle_timeout(now, &mut |started_at, batch| self.faults.duration(started_at, self.workload, batch));
        self.on_gpu_events()
    }

    fn on_gpu_events(&mut self) -> Result<(), Violation> {
        while let Some(event) = self.gpus.poll_event() {
            match event {
                GpuEvent::Finished { batch, started_at, finished_at } => {
                    self.on_finished(&batch, started_at, finished_at)?;
                }
                GpuEvent::Rejected { batch, rejected_at } => self.on_rejected(&batch, rejected_at)?,
            }
        }
        Ok(())
    }

    fn on_finished(
        &mut self,
        batch: &Batch<Request>,
        started_at: Timestamp,
        finished_at: Timestamp,
    ) -> Result<(), Violation> {
        let (model, place, size) = (batch.model.0, self.gpus.place(batch.gpu), batch.tasks.len());
        self.checker.execute(place as u32, (batch.exec_at, batch.latest), started_at, finished_at)?;
        let answered_at = finished_at + self.workload.response;
        for &(task, request) in &batch.tasks {
            self.checker.end(task.id)?;
            if request.work > Span::ZERO && task.id.0.is_multiple_of(TASKS_A_SAMPLE) {
                self.run_alone(finished_at, request);
            }
            match request.step {
                Some(step) => self.graphs.handle_executed(step, answered_at),
                None => self.on_answered(request, Some(started_at), answered_at),
            }
        }
        self.recorder.executed(model as usize, size, started_at);
        self.recorder.predicted(Action::Infer, batch.predicted(), (started_at, finished_at));
        self.recorder.busy(place, started_at, finished_at);
        if self.workload.models[model as usize].dynamic.is_some() {
            let tasks: Vec<_> = batch.tasks.iter().map(|(task, _)| (task.application, task.length)).collect();
            self.planner.handle_executed(finished_at, batch.model, batch.gpu, &tasks, finished_at - started_at);
        }
        let (gpu, size) = (place as u32, size as u32);
        (self.observe)(Event::Batch { gpu, model, size, started_at, finished_at });
        self.report(batch.gpu, finished_at, Some((batch.model, batch.tasks.len(), finished_at - started_at)));
        Ok(())
    }

    /// The profiler of Orloj's section 3.2: some requests are run again alone, which takes nobody's time here.
    fn run_alone(&mut self, now: Timestamp, request: Request) {
        let Request { model, class, work, length, .. } = request;
        let dynamic = self.workload.models[model.0 as usize].dynamic.as_ref().expect("only its requests have work");
        self.planner.handle_alone(now, model, (class as u8, length), dynamic.alone(work));
    }

    /// Without faults every plan holds, if it is known what batches take.
    fn on_rejected(&mut self, batch: &Batch<Request>, rejected_at: Timestamp) -> Result<(), Violation> {
        if self.workload.faults == Faults::default() && !self.workload.is_dynamic() {
            let place = self.gpus.place(batch.gpu) as u32;
            self.checker.execute(place, (batch.exec_at, batch.latest), rejected_at, rejected_at)?;
        }
        for &(task, request) in &batch.tasks {
            self.on_dropped(rejected_at, task.id, request)?;
        }
        self.report(batch.gpu, rejected_at, None);
        Ok(())
    }

    /// The report of a batch's end takes the way that the plan took.
    fn report(&mut self, gpu: GpuId, finished_at: Timestamp, executed: Option<(ModelId, usize, Span)>) {
        let at = finished_at + self.workload.network.ctrl;
        self.reports.push(Reverse(EndReport { at, gpu, finished_at, executed }));
    }

    fn on_preempt(&mut self, now: Timestamp, gpu: GpuId) -> Result<(), Violation> {
        let Some((batch, started_at)) = self.gpus.handle_preempt(now, gpu) else { return Ok(()) };
        self.report(gpu, now, None);
        self.on_killed(now, batch, started_at)
    }

    fn on_fault(&mut self, now: Timestamp, fault: Fault) -> Result<(), Violation> {
        match fault {
            Fault::Up(gpu) => self.add_gpu(now, gpu),
            Fault::Down(gpu) => {
                self.up -= 1;
                self.planner.handle_gpu_left(now, gpu);
                if let Some(memory) = &mut self.memory {
                    memory.handle_failure(gpu);
                }
                self.estimates.handle_gpu_left(gpu);
                if self.up == 0 {
                    for model in 0..self.workload.models.len() as u32 {
                        self.planner.handle_unhosted(now, ModelId(model));
                    }
                }
                for (batch, started_at) in self.gpus.handle_failure(gpu) {
                    self.on_killed(now, batch, started_at)?;
                }
            }
        }
        Ok(())
    }

    /// A batch is lost. Its tasks are queued anew, but their clients have waited since they arrived;
    /// the planner drops those for which there is no time.
    fn on_killed(
        &mut self,
        now: Timestamp,
        batch: Batch<Request>,
        started_at: Option<Timestamp>,
    ) -> Result<(), Violation> {
        if let Some(started_at) = started_at {
            let place = self.gpus.place(batch.gpu);
            self.checker.execute(place as u32, (batch.exec_at, batch.latest), started_at, now)?;
            self.recorder.busy(place, started_at, now);
            let (gpu, model, size) = (place as u32, batch.model.0, batch.tasks.len() as u32);
            (self.observe)(Event::Killed { gpu, model, size, started_at, killed_at: now });
        }
        for (Queued { id, deadline, priority, application, length, .. }, payload) in batch.tasks {
            self.submit(now, Task { id, deadline, priority, application, length, payload })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
