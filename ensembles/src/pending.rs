//! A request for an ensemble under way, with the models of a desk.
//!
//! No wait here is without a bound: each step is a request of the desk, which ends on its own, and the whole ends at
//! its deadline.
#![allow(clippy::disallowed_methods)] // A driver: it waits in real time.

use std::{
    future::{pending, poll_fn, ready},
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use frontend::{
    InferError,
    desk::{Counted, Desk, PendingReply},
    request::{Place, check_placed},
    rope::Rope,
    slots::Client,
    tasks::{CheckedRequest, Reply, Timing},
};
use proto::{
    Application, BackendId, Span, Timestamp,
    scheduler_to_frontend::{DropReason, ModelState},
    stages::AnswerStamps,
};
use repository::{Executor, Model};

use crate::{
    known::{Asking, Known, Question, Turn, Turning},
    members::{self, Member, Tensor},
    run::{Action, Failure, Run},
    selecting::Selecting,
    selection::{
        Choice,
        combine::{Combined, Outputs},
    },
    vote,
};

/// A request for an ensemble.
pub struct Request {
    /// Index in the model table, and what was found there.
    pub model: (usize, Rc<Model>),
    /// With places that were taken from the ensemble's own inputs, and are all.
    pub inputs: Vec<(Place, Rope)>,
    /// Which of its outputs are wanted; steps that only others need are not asked.
    pub wanted: Vec<bool>,
    /// The objective of the whole, from its arrival on; `ENDLESS` if it has none.
    pub slo: Span,
    /// How long ago it arrived, if that was long ago.
    pub waited: Span,
    /// As the client says it: each member makes of it what it does of its own requests'.
    pub priority: u8,
    /// The workload that it is of.
    pub application: Application,
    /// Whose share of the arena its steps take.
    pub client: Option<Client>,
    /// Who has room for what goes between its steps.
    pub room: Box<dyn Room>,
    /// Who knows answers of members, if anybody does.
    pub known: Option<Box<dyn Known>>,
    /// Whom it asks of models of one task; without one, whom it would be at the start.
    pub choice: Option<Choice>,
    /// Whether it takes a default where there is no prediction of such models, or one in doubt.
    pub allow_default: bool,
    /// Whether it counts as one for the ensemble, which what is mirrored does not.
    pub is_counted: bool,
}

/// What makes one answer of several predictions.
pub type Job = Box<dyn FnOnce() -> Option<Combined> + Send>;

/// Has room in memory for the tensors that go between steps, until the request ends.
pub trait Room {
    /// So many bytes more.
    ///
    /// # Errors
    /// If there is no room.
    fn take(&self, bytes: usize) -> Result<(), InferError>;

    /// Does what reads so many bytes, beside the caller's thread if they are many.
    fn combine(&self, bytes: usize, job: Job) -> Combining<'_> {
        let _ = bytes;
        Box::pin(ready(Ok(job())))
    }
}

/// Ends in what a [`Job`] makes.
pub type Combining<'a> = Pin<Box<dyn Future<Output = Result<Option<Combined>, InferError>> + 'a>>;

/// Whoever asks bounds them otherwise.
impl Room for () {
    fn take(&self, _: usize) -> Result<(), InferError> {
        Ok(())
    }
}

/// What became of a step that was asked.
#[derive(Debug, Clone)]
pub struct Step {
    /// Its model.
    pub model: Rc<Model>,
    /// How long after the request's arrival it was asked.
    pub asked: Span,
    /// How long after the request's arrival its own deadline was; `ENDLESS` if it had none.
    pub until: Span,
    /// Where its time went, or why it has no answer; nothing if it was cancelled.
    pub ended: Option<Result<Timing, InferError>>,
}

/// How a request ended.
#[derive(Debug)]
pub struct Ended {
    /// Its answer, or why there is none.
    pub result: Result<Reply, InferError>,
    /// The steps that were asked, in that order.
    pub steps: Vec<Step>,
    /// Who answered, of models of one task.
    pub selected: Option<Selected>,
}

impl Ended {
    /// Of a request that asked no steps.
    #[must_use]
    pub fn of(result: Result<Reply, InferError>) -> Self {
        Self { result, steps: Vec::new(), selected: None }
    }
}

/// How an answer was made of predictions of one task.
#[derive(Debug, Clone)]
pub struct Selected {
    /// Who was to be asked.
    pub choice: Choice,
    /// All rows of each output of the ensemble, by step; nothing of those who were not asked, failed or were late.
    pub predictions: Vec<Option<Vec<Bytes>>>,
    /// Those whose predictions the answer was made of.
    pub counted: Vec<usize>,
    /// How sure it is, 0 to 1.
    pub confidence: f64,
    /// Whether it is less than the configuration asks for.
    pub is_doubted: bool,
    /// Whether the answer is the configured default.
    pub is_default: bool,
    /// Those who were asked and had no time for it; where failures are passed over, those who failed, too.
    pub in_vain: Vec<usize>,
}

/// A request that is under way. Dropping it cancels whatever is under way of it.
pub struct Pending {
    desk: Rc<Desk>,
    counted: Option<Counted>,
    way: Way,
    /// By step; why not, of those who cannot be asked.
    members: Vec<Result<Member, InferError>>,
    /// What each step asks of the request, but for its own part.
    request: Terms,
    /// By step.
    under_way: Vec<(usize, UnderWay)>,
    /// By step, with its place in `steps`.
    asked: Vec<Option<usize>>,
    steps: Vec<Step>,
    finished: Option<Finished>,
}

/// What a step waits for.
enum UnderWay {
    /// Whether its answer is known, or when it is its turn to ask for it; then it asks with these inputs.
    Turning(Turning, Vec<(Place, Rope)>),
    /// Its member's answer, which others may wait for, too.
    Asked(PendingReply, Option<Box<dyn Asking>>),
}

/// What a step need not wait for any more.
enum Heard {
    Turn(Result<Turn, InferError>, Vec<(Place, Rope)>),
    Reply(Result<Reply, InferError>, Option<Box<dyn Asking>>),
}

/// How it goes on.
enum Way {
    Graph(Run<Tensor, InferError>),
    Selection(Selecting),
}

/// That it is over.
enum Finished {
    Graph(Result<Vec<Option<Tensor>>, Failure<InferError>>),
    /// One answer is to be made of what is there.
    Closed,
}

impl Way {
    fn poll_timeout(&self) -> Option<Timestamp> {
        match self {
            Self::Graph(run) => run.poll_timeout(),
            Self::Selection(selecting) => selecting.vote.poll_timeout(),
        }
    }

    fn handle_timeout(&mut self, now: Timestamp) {
        match self {
            Self::Graph(run) => run.handle_timeout(now),
            Self::Selection(selecting) => selecting.vote.handle_timeout(now),
        }
    }
}

struct Terms {
    face: Rc<Model>,
    rows: usize,
    arrived: Timestamp,
    admitted: Timestamp,
    slo: Span,
    priority: u8,
    application: Application,
    client: Option<Client>,
    room: Box<dyn Room>,
    known: Option<Box<dyn Known>>,
}

/// Step 1: begins a request; the steps that take nothing but its inputs are submitted.
///
/// # Errors
/// If the ensemble or a member cannot be asked now, or never in time.
pub fn submit(desk: &Rc<Desk>, request: Request) -> Result<Pending, InferError> {
    let counted = request.is_counted.then_some(request.model.0);
    let begun = Pending::begin(desk, request);
    let mut pending = begun.inspect_err(|error| {
        if let Some(index) = counted {
            desk.handle_refused(index, error);
        }
    })?;
    pending.act();
    Ok(pending)
}

impl Pending {
    fn begin(desk: &Rc<Desk>, request: Request) -> Result<Self, InferError> {
        let Request { model: (index, face), inputs, wanted, slo, waited, choice, allow_default, .. } = request;
        let Request { priority, application, client, room, known, is_counted, .. } = request;
        let Executor::Ensemble(graph) = &face.executor else {
            return Err(InferError::Invalid(format!("model: found '{}', expected an ensemble", face.name)));
        };
        desk.with_core(|core| {
            let served = core.models().get(index);
            if !Rc::ptr_eq(&served.model, &face) {
                return Err(InferError::LoadedAnew { model: face.name.clone() });
            }
            match served.state {
                ModelState::Unloading | ModelState::Unloaded => Err(InferError::Unloaded { model: face.name.clone() }),
                ModelState::Serving | ModelState::Loading => Ok(()),
            }
        })?;
        // What is wrong with it is said of the ensemble, and not of its members.
        let CheckedRequest { rows, .. } = check_placed(&face, index, inputs.clone(), slo)?;
        let found = Member::each(desk, &face, graph)?;
        let mut given: Vec<Option<Tensor>> = face.inputs.iter().map(|_| None).collect();
        for (Place { input, shape, .. }, data) in inputs {
            given[input] = Some(Tensor { datatype: face.inputs[input].datatype, shape, data });
        }
        let admitted = desk.now();
        let arrived = Timestamp(admitted.0 - waited.0);
        let deadline = if slo == Span::ENDLESS { Timestamp::NEVER } else { arrived + slo };
        let (way, members, least) = match &graph.selection {
            None => {
                let found: Vec<_> = found.into_iter().collect::<Result<_, _>>()?;
                let (members, times): (Vec<_>, Vec<_>) =
                    found.into_iter().map(|(member, times)| (Ok(member), times)).unzip();
                let run = Run::new(Arc::clone(graph), &times, deadline, given, wanted);
                let least = run.least();
                (Way::Graph(run), members, least)
            }
            Some(selection) => {
                let times: Vec<_> =
                    found.iter().map(|found| found.as_ref().ok().map(|(_, times)| times.least)).collect();
                let members = found.into_iter().map(|found| found.map(|(member, _)| member)).collect();
                let choice = choice.unwrap_or_else(|| Selecting::choice_at(selection, times.len(), desk.now()));
                let outputs = Outputs::of(selection, &face.outputs, rows, &wanted);
                let selecting = Selecting::new(selection, (choice, allow_default), &times, deadline, (given, outputs));
                let least = selecting.least();
                (Way::Selection(selecting), members, least)
            }
        };
        let ensemble = || face.name.clone();
        if slo < least {
            return Err(InferError::NeverMet { model: ensemble(), slo, least });
        }
        let asked = vec![None; members.len()];
        let request =
            Terms { rows, arrived, admitted, slo, priority, application, client, room, known, face: Rc::clone(&face) };
        Ok(Self {
            desk: Rc::clone(desk),
            counted: is_counted.then(|| desk.count(index)),
            way,
            members,
            request,
            under_way: Vec::new(),
            asked,
            steps: Vec::new(),
            finished: None,
        })
    }

    /// Does what there is to do now.
    fn act(&mut self) {
        while self.act_once() {}
    }

    /// Does what there is to do first, if there is anything.
    fn act_once(&mut self) -> bool {
        let now = self.desk.now();
        let (step, inputs, until) = match &mut self.way {
            Way::Graph(run) => match run.poll_action(now) {
                Some(Action::Submit { step, inputs, until }) => (step, inputs, until),
                Some(Action::Cancel { step }) => return self.cancel(step),
                Some(Action::Finish(result)) => {
                    self.finished = Some(Finished::Graph(result));
                    return true;
                }
                None => return false,
            },
            Way::Selection(selecting) => match selecting.poll_action(now) {
                Some(vote::Action::Ask { member, until }) => {
                    (member, selecting.inputs(&step_of(&self.request.face, member).inputs), until)
                }
                Some(vote::Action::Cancel { member }) => return self.cancel(member),
                Some(vote::Action::Close) => {
                    self.finished = Some(Finished::Closed);
                    return true;
                }
                None => return false,
            },
        };
        match self.begin_step(step, inputs, until) {
            Ok(under_way) => self.under_way.push((step, under_way)),
            Err(error) => self.on_ended(step, Err(error)),
        }
        true
    }

    fn cancel(&mut self, step: usize) -> bool {
        self.under_way.retain(|(other, _)| *other != step);
        true
    }

    /// Begins a step: it is asked, or waits for whoever asks the same.
    fn begin_step(
        &mut self,
        step: usize,
        inputs: Vec<Option<Tensor>>,
        until: Timestamp,
    ) -> Result<UnderWay, InferError> {
        let member = self.members[step].as_ref().map_err(InferError::clone)?;
        let request = &self.request;
        let waited = self.desk.now() - request.arrived;
        let until = if until == Timestamp::NEVER { Span::ENDLESS } else { until - request.arrived };
        self.asked[step] = Some(self.steps.len());
        self.steps.push(Step { model: Rc::clone(&member.model), asked: waited, until, ended: None });
        let placed = member.placed(&step_of(&request.face, step).inputs, inputs)?;
        let is_kept = member.model.configuration.caches_responses();
        if let Some(known) = request.known.as_ref().filter(|_| is_kept) {
            let within = if until == Span::ENDLESS { until } else { until - waited };
            let (model, inputs) = ((member.index, Rc::clone(&member.model)), placed.clone());
            let question = Question { model, inputs, application: request.application, within };
            return Ok(UnderWay::Turning(known.turn(question), placed));
        }
        self.ask(step, placed, None)
    }

    /// Asks a step's member.
    fn ask(
        &self,
        step: usize,
        placed: Vec<(Place, Rope)>,
        asking: Option<Box<dyn Asking>>,
    ) -> Result<UnderWay, InferError> {
        let member = self.members[step].as_ref().map_err(InferError::clone)?;
        let (now, request) = (self.desk.now(), &self.request);
        let waited = now - request.arrived;
        let until = self.asked[step].map_or(Span::ENDLESS, |at| self.steps[at].until);
        let (is_it, least) = self.desk.with_core(|core| {
            let served = core.models().get(member.index);
            let least = served.offer.map_or(Span::ZERO, |offer| offer.least_latency);
            (Rc::ptr_eq(&served.model, &member.model), least)
        });
        if !is_it {
            return Err(InferError::LoadedAnew { model: member.model.name.clone() });
        }
        let priority = member.model.priorities.of(request.priority.into());
        let share = if until == Span::ENDLESS { Span::ENDLESS } else { until - waited };
        let share = member.model.queue.objective(priority, Some(share), share);
        if share < least {
            return Err(DropReason::Deadline.into());
        }
        let slo = if share == Span::ENDLESS { share } else { waited + share };
        let Terms { application, client, .. } = *request;
        let checked = member.checked(placed, slo)?;
        let waited = if slo == Span::ENDLESS { Span::ZERO } else { waited };
        let reply = self.desk.submit(&CheckedRequest { waited, priority, application, client, ..checked })?;
        Ok(UnderWay::Asked(reply, asking))
    }

    /// What a step has waited for is here.
    fn on_heard(&mut self, step: usize, heard: Heard) {
        match heard {
            Heard::Reply(result, asking) => {
                if let (Ok(reply), Some(asking)) = (&result, asking) {
                    asking.answered(reply);
                }
                self.on_ended(step, result);
            }
            Heard::Turn(Ok(Turn::Answered(reply)), _) => self.on_ended(step, Ok(reply)),
            Heard::Turn(Ok(Turn::Ask(asking)), placed) => match self.ask(step, placed, asking) {
                Ok(under_way) => self.under_way.push((step, under_way)),
                Err(error) => self.on_ended(step, Err(error)),
            },
            Heard::Turn(Err(error), _) => self.on_ended(step, Err(error)),
        }
    }

    /// A step has ended, or could not be submitted.
    fn on_ended(&mut self, step: usize, result: Result<Reply, InferError>) {
        let member = self.members[step].as_ref();
        let result = result.and_then(|reply| {
            self.request.room.take(member.map_or(0, |member| member.kept_bytes(&reply)))?;
            Ok(reply)
        });
        if let Some(at) = self.asked[step] {
            self.steps[at].ended = Some(result.as_ref().map(|reply| reply.timing).map_err(InferError::clone));
        }
        let result = result.and_then(|reply| Ok(member.map_err(InferError::clone)?.tensors(&reply)));
        match &mut self.way {
            Way::Graph(run) => run.handle_reply(step, result),
            Way::Selection(selecting) => {
                let graph = self.request.face.ensemble().expect("only ensembles have runs");
                let ordered = |tensors: Vec<Tensor>| {
                    let place = |to: &usize| graph.steps[step].outputs.iter().position(|(_, made)| made == to);
                    let data = |to| tensors[place(to).expect("each makes all outputs")].data.joined();
                    graph.outputs.iter().map(data).collect()
                };
                selecting.handle_end(step, result.map(ordered));
            }
        }
    }

    /// Waits for the request's end.
    pub async fn wait(mut self) -> Ended {
        let finished = loop {
            if let Some(finished) = self.finished.take() {
                break finished;
            }
            let due = self.way.poll_timeout().map(|at| (at - self.desk.now()).to_duration());
            let ended = tokio::select! {
                biased;
                ended = poll_fn(|context| poll_any(&mut self.under_way, context)) => Some(ended),
                () = sleep(due) => None,
            };
            match ended {
                Some((step, heard)) => self.on_heard(step, heard),
                None => self.way.handle_timeout(self.desk.now()),
            }
            self.act();
        };
        let (result, selected) = match finished {
            Finished::Graph(result) => (self.answer(result), None),
            Finished::Closed => self.conclude().await,
        };
        if let Some(counted) = self.counted.take() {
            counted.end(&result);
        }
        Ended { result, steps: std::mem::take(&mut self.steps), selected }
    }

    fn answer(&self, result: Result<Vec<Option<Tensor>>, Failure<InferError>>) -> Result<Reply, InferError> {
        let Terms { face, rows, .. } = &self.request;
        let outputs = result.map_err(|failure| match failure {
            Failure::Deadline => DropReason::Deadline.into(),
            Failure::Step(step, cause) => self.in_step(step, cause),
        })?;
        let (outputs, shapes) = members::answer(face, *rows, outputs)?;
        Ok(self.reply(outputs, shapes))
    }

    /// Makes one answer of the predictions that are there.
    async fn conclude(&self) -> (Result<Reply, InferError>, Option<Selected>) {
        let Way::Selection(selecting) = &self.way else { unreachable!("a graph does not close") };
        let Terms { face, room, .. } = &self.request;
        match selecting.conclude(face, &**room).await {
            Ok((outputs, selected)) => {
                let shapes = face.outputs.iter().map(|output| output.shape.clone()).collect();
                (Ok(self.reply(outputs, shapes)), Some(selected))
            }
            Err(Some((step, cause))) => (Err(self.in_step(step, cause)), Some(selecting.nobody())),
            Err(None) => (Err(DropReason::Deadline.into()), Some(selecting.nobody())),
        }
    }

    /// Why a step has failed, which is said of it; or why it cannot be asked, which says that itself.
    fn in_step(&self, step: usize, cause: InferError) -> InferError {
        match &self.members[step] {
            Ok(member) => members::in_step(&self.request.face, &member.model, cause),
            Err(_) => cause,
        }
    }

    fn reply(&self, outputs: Vec<Bytes>, shapes: Vec<Vec<usize>>) -> Reply {
        let (timing, batches, was_late) = (self.timing(), Vec::new(), false);
        Reply { outputs, shapes, rows: self.request.rows, timing, batches, was_late }
    }

    /// Where the time went, as far as one timing can tell of several steps: their stages' sums end with the answer, one
    /// after another, and what was before is the way from the admission to the GPU. As Triton counts it.
    fn timing(&self) -> Timing {
        let ran = || self.steps.iter().filter_map(|step| step.ended.as_ref()?.as_ref().ok());
        let now = self.desk.now();
        // A default is made by nobody. What was known already has been on no GPU, where others have.
        let last = ran().max_by_key(|timing| (!timing.is_of_cache(), timing.answered_at));
        let Some(last) = last else { return self.timing_of_none(now) };
        let sum = |of: fn(&Timing) -> i64| ran().map(|timing| of(timing).max(0)).sum::<i64>();
        let answered_at = last.answered_at;
        let took = self.desk.now() - self.request.admitted;
        let admitted_at = Timestamp(answered_at.0 - took.0);
        let finished_at_ns = answered_at.0 - sum(|timing| timing.answered_at.0 - timing.stamps.finished_at_ns);
        let started_at_ns = finished_at_ns - sum(|timing| timing.stamps.finished_at_ns - timing.stamps.started_at_ns);
        let planned_at_ns = started_at_ns - sum(|timing| timing.stamps.fetched_at_ns - timing.stamps.planned_at_ns);
        let begun = admitted_at.0;
        let stamps = AnswerStamps {
            queued_at_ns: begun,
            due_at_ns: begun,
            granted_at_ns: begun,
            planned_at_ns,
            fetched_at_ns: started_at_ns,
            exec_at_ns: started_at_ns,
            started_at_ns,
            finished_at_ns,
        };
        let deadline = match self.request.slo {
            Span::ENDLESS => Timestamp::NEVER,
            slo => admitted_at + (slo - (self.request.admitted - self.request.arrived)),
        };
        let batch_size = u16::try_from(self.request.rows).unwrap_or(u16::MAX);
        Timing { admitted_at, deadline, stamps, answered_at, batch_size, ..*last }
    }

    /// The time of an answer for which nobody ran anything.
    fn timing_of_none(&self, now: Timestamp) -> Timing {
        let admitted_at = self.request.admitted;
        let at = admitted_at.0;
        let stamps = AnswerStamps {
            queued_at_ns: at,
            due_at_ns: at,
            granted_at_ns: at,
            planned_at_ns: now.0,
            fetched_at_ns: now.0,
            exec_at_ns: now.0,
            started_at_ns: now.0,
            finished_at_ns: now.0,
        };
        let deadline = match self.request.slo {
            Span::ENDLESS => Timestamp::NEVER,
            slo => self.request.arrived + slo,
        };
        let batch_size = u16::try_from(self.request.rows).unwrap_or(u16::MAX);
        Timing { admitted_at, deadline, stamps, answered_at: now, batch_size, backend: BackendId(0), gpu: 0 }
    }
}

fn step_of(face: &Model, step: usize) -> &repository::EnsembleStep {
    &face.ensemble().expect("only ensembles have runs").steps[step]
}

/// The first of these that has not to wait any more, which goes.
fn poll_any(under_way: &mut Vec<(usize, UnderWay)>, context: &mut Context<'_>) -> Poll<(usize, Heard)> {
    for at in 0..under_way.len() {
        let (step, waits) = &mut under_way[at];
        let step = *step;
        let heard = match waits {
            UnderWay::Turning(turning, placed) => {
                turning.as_mut().poll(context).map(|turn| Heard::Turn(turn, std::mem::take(placed)))
            }
            UnderWay::Asked(reply, asking) => {
                reply.poll_ended(context).map(|result| Heard::Reply(result, asking.take()))
            }
        };
        if let Poll::Ready(heard) = heard {
            under_way.swap_remove(at);
            return Poll::Ready((step, heard));
        }
    }
    Poll::Pending
}

/// Without a time for ever.
async fn sleep(due: Option<std::time::Duration>) {
    match due {
        Some(due) => tokio::time::sleep(due).await,
        None => pending().await,
    }
}
