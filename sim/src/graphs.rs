//! Requests that several models answer, one after another and side by side, inside one deadline.
//!
//! [`Graphs`] has the requests under way: each is a [`Run`] as frontends drive it, or a [`Vote`] if the steps are
//! variants of one task, and its steps are tasks. An answer of a step comes back as late as any other, and what it
//! allows is submitted then.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque},
    sync::Arc,
};

use ensembles::{
    run::{self, Failure, Run, StepTimes},
    selection::Learner,
    vote::{self, Vote},
};
use proto::{ModelId, Span, TaskId, Timestamp};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{
    arrivals::Request,
    workload::{
        Workload,
        graph::{Graph, GraphStep, StepOf},
    },
};

/// The stream of a run's seed that says which steps requests take; those of arrivals count from 0.
const CHANCE_STREAM: u64 = 1 << 34;

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum GraphAction {
    /// A task for the scheduler; then [`Graphs::handle_submitted`] is to be called.
    Submit { request: Request, step: StepOf, deadline: Timestamp },
    /// Nobody waits for this task any more.
    Cancel { model: ModelId, task: TaskId },
    /// A request has its answer; of variants of one task by this one.
    Answered { request: Request, by: Option<ModelId> },
    /// A request has ended without.
    Dropped(Request),
}

/// Requests for graphs that are under way.
#[derive(Debug)]
pub(crate) struct Graphs<'a> {
    graphs: &'a [Graph],
    /// By graph and step.
    times: Vec<Vec<StepTimes>>,
    /// By graph: which of several variants are tried.
    learners: Vec<Option<Learner>>,
    /// What the way of an answer back may cost.
    response: Span,
    runs: BTreeMap<u64, Way>,
    next_run: u64,
    /// When requests are given up.
    timers: BTreeSet<(Timestamp, u64)>,
    /// Answers on their way back, by when they are there.
    replies: BinaryHeap<Reverse<(Timestamp, StepOf)>>,
    actions: VecDeque<GraphAction>,
    chances: ChaCha8Rng,
}

/// A request's way through its graph.
#[derive(Debug)]
struct Way {
    request: Request,
    course: Course,
    /// Which steps it takes.
    taken: Vec<bool>,
    /// Those under way.
    tasks: BTreeMap<usize, TaskId>,
}

/// How it goes on.
#[derive(Debug)]
enum Course {
    Graph(Run<(), ()>),
    /// Who has answered, and who had no time for it.
    Variants {
        vote: Vote,
        by: Option<usize>,
        in_vain: Vec<usize>,
    },
}

impl Course {
    fn handle_reply(&mut self, step: usize, result: Result<(), ()>) {
        match self {
            Self::Graph(run) => run.handle_reply(step, result.map(|()| vec![()])),
            Self::Variants { vote, by, in_vain } => match (vote.handle_end(step, result.is_ok()), result) {
                (true, Ok(())) => *by = Some(step),
                (true, Err(())) => in_vain.push(step),
                (false, _) => (),
            },
        }
    }

    fn handle_timeout(&mut self, now: Timestamp) {
        match self {
            Self::Graph(run) => run.handle_timeout(now),
            Self::Variants { vote, .. } => vote.handle_timeout(now),
        }
    }

    fn poll_action(&mut self, now: Timestamp) -> Option<CourseAction> {
        match self {
            Self::Graph(run) => Some(match run.poll_action(now)? {
                run::Action::Submit { step, until, .. } => CourseAction::Submit { step, until },
                run::Action::Cancel { step } => CourseAction::Cancel { step },
                run::Action::Finish(Ok(_)) => CourseAction::Finish { is_answered: true, by: None },
                run::Action::Finish(Err(Failure::Step(..) | Failure::Deadline)) => {
                    CourseAction::Finish { is_answered: false, by: None }
                }
            }),
            Self::Variants { vote, by, in_vain } => Some(match vote.poll_action(now)? {
                vote::Action::Ask { member, until } => CourseAction::Submit { step: member, until },
                vote::Action::Cancel { member } => {
                    in_vain.push(member);
                    CourseAction::Cancel { step: member }
                }
                vote::Action::Close => CourseAction::Finish { is_answered: by.is_some(), by: *by },
            }),
        }
    }
}

/// What a request does next.
enum CourseAction {
    Submit { step: usize, until: Timestamp },
    Cancel { step: usize },
    Finish { is_answered: bool, by: Option<usize> },
}

impl<'a> Graphs<'a> {
    /// None under way.
    pub(crate) fn new(workload: &'a Workload, seed: u64) -> Self {
        let times = |step: &GraphStep| {
            let profile = &workload.models[step.model.0 as usize].profile;
            let least = profile.latency(1) + workload.network.delay(1) + workload.response;
            StepTimes { least, batching: profile.batching() }
        };
        let learner = |graph: &Graph| Some(Learner::new(graph.ensemble.selection.as_ref()?, graph.steps.len()));
        let mut chances = ChaCha8Rng::seed_from_u64(seed);
        chances.set_stream(CHANCE_STREAM);
        Self {
            graphs: &workload.graphs,
            times: workload.graphs.iter().map(|graph| graph.steps.iter().map(times).collect()).collect(),
            learners: workload.graphs.iter().map(learner).collect(),
            response: workload.response,
            runs: BTreeMap::new(),
            next_run: 0,
            timers: BTreeSet::new(),
            replies: BinaryHeap::new(),
            actions: VecDeque::new(),
            chances,
        }
    }

    /// A request for the graph of its model's number.
    pub(crate) fn handle_arrival(&mut self, now: Timestamp, request: Request) {
        let index = request.model.0 as usize;
        let graph = &self.graphs[index];
        let deadline = request.arrived_at + graph.class[0].slo;
        let times = &self.times[index];
        let course = match &mut self.learners[index] {
            None => {
                let wanted = vec![true; graph.ensemble.outputs.len()];
                Course::Graph(Run::new(Arc::clone(&graph.ensemble), times, deadline, vec![Some(())], wanted))
            }
            Some(learner) => {
                let choice = learner.select();
                let members = choice.members.iter().map(|&member| (member, times[member].least)).collect();
                let vote = Vote::new(members, choice.order, deadline, Span::ZERO);
                Course::Variants { vote, by: None, in_vain: Vec::new() }
            }
        };
        let taken = graph.steps.iter().map(|step| self.chances.random::<f64>() < step.chance).collect();
        let number = self.next_run;
        self.next_run += 1;
        self.timers.insert((deadline, number));
        self.runs.insert(number, Way { request, course, taken, tasks: BTreeMap::new() });
        self.act(now, number);
    }

    /// What [`GraphAction::Submit`] asked for is this task.
    pub(crate) fn handle_submitted(&mut self, of: StepOf, task: TaskId) {
        if let Some(way) = self.runs.get_mut(&of.run) {
            way.tasks.insert(of.step, task);
        }
    }

    /// A step's batch has ended; its answer is there at this instant.
    pub(crate) fn handle_executed(&mut self, of: StepOf, answered_at: Timestamp) {
        if let Some(way) = self.runs.get_mut(&of.run) {
            way.tasks.remove(&of.step);
            self.replies.push(Reverse((answered_at, of)));
        }
    }

    /// A step's task was given up.
    pub(crate) fn handle_dropped(&mut self, now: Timestamp, of: StepOf) {
        if let Some(way) = self.runs.get_mut(&of.run) {
            way.tasks.remove(&of.step);
            way.course.handle_reply(of.step, Err(()));
            self.act(now, of.run);
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        let replied_at = self.replies.peek().map(|Reverse((at, _))| *at);
        [replied_at, self.timers.first().map(|(at, _)| *at)].into_iter().flatten().min()
    }

    /// Takes in the answers that are there, then ends what is over.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        while let Some(&Reverse((at, of))) = self.replies.peek()
            && at <= now
        {
            self.replies.pop();
            if let Some(way) = self.runs.get_mut(&of.run) {
                way.course.handle_reply(of.step, Ok(()));
                self.act(now, of.run);
            }
        }
        while let Some(&(_, number)) = self.timers.first().filter(|(at, _)| *at <= now) {
            let way = self.runs.get_mut(&number).expect("it has a timer as long as it is under way");
            way.course.handle_timeout(now);
            self.act(now, number);
        }
    }

    /// What to do next.
    pub(crate) fn poll_action(&mut self) -> Option<GraphAction> {
        self.actions.pop_front()
    }

    /// Requests that are under way.
    pub(crate) fn under_way(&self) -> usize {
        self.runs.len()
    }

    /// Does what a run asks for.
    fn act(&mut self, now: Timestamp, number: u64) {
        let Some(way) = self.runs.get_mut(&number) else { return };
        let graph = &self.graphs[way.request.model.0 as usize];
        while let Some(action) = way.course.poll_action(now) {
            match action {
                CourseAction::Submit { step, .. } if !way.taken[step] => way.course.handle_reply(step, Ok(())),
                CourseAction::Submit { step, until } => {
                    let GraphStep { model, by, .. } = graph.steps[step];
                    let until = by.map_or(until, |by| way.request.arrived_at + by);
                    let (step, deadline) = (StepOf { run: number, step }, until - self.response);
                    let request = Request { model, step: Some(step), ..way.request };
                    self.actions.push_back(GraphAction::Submit { request, step, deadline });
                }
                CourseAction::Cancel { step } => {
                    // If there is no task any more its answer is on its way.
                    let task = way.tasks.remove(&step);
                    let model = graph.steps[step].model;
                    self.actions.extend(task.map(|task| GraphAction::Cancel { model, task }));
                }
                CourseAction::Finish { is_answered, by } => {
                    let request = way.request;
                    let learner = &mut self.learners[request.model.0 as usize];
                    if let (Some(learner), Course::Variants { in_vain, .. }) = (learner, &way.course) {
                        learner.handle_ended(in_vain, is_answered);
                    }
                    self.timers.remove(&(request.arrived_at + graph.class[0].slo, number));
                    self.runs.remove(&number);
                    let by = by.map(|step| graph.steps[step].model);
                    let answered = GraphAction::Answered { request, by };
                    self.actions.push_back(if is_answered { answered } else { GraphAction::Dropped(request) });
                    return;
                }
            }
        }
    }
}
