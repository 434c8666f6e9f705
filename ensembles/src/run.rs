//! One request's way through the graph of an ensemble.
//!
//! A life: made with what the request brings; [`Run::poll_action`] says which steps to submit, [`Run::handle_reply`]
//! takes their ends; it finishes once, with the outputs that are wanted, with the first step that fails, or at its
//! deadline. Whatever is under way then is cancelled before. Steps that no wanted output needs are never submitted.
//!
//! A step may take its least latency and a part of the time that the path from it to the end leaves over: in proportion
//! to its weight, which is what its model gains by batches ([`StepTimes::batching`]) and the mean least latency of all
//! steps, [`FALLING`] times for each step that follows. The last step has all that is left.
//!
//! Why so: the root of alpha beta divides time such that requests cost their GPUs least (Nexus searches the same by
//! dynamic programming over batch sizes). But each step also waits for GPUs that any model's batch may hold, whatever
//! its own takes: hence the mean. And what a step does not use is the later ones', never the earlier ones': hence the
//! factor.
//! `workloads/splits` compares it with all static divisions (docs/policy.md).

use std::{collections::VecDeque, sync::Arc};

use proto::{Span, Timestamp};
use repository::Ensemble;

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<T, E> {
    /// Ask the model of a step, then call [`Run::handle_reply`].
    Submit {
        /// Its index.
        step: usize,
        /// In the order of [`repository::EnsembleStep::inputs`]; nothing for one that the request has left out.
        inputs: Vec<Option<T>>,
        /// Its own deadline: by then it should have answered. `NEVER` if the request has no objective.
        until: Timestamp,
    },
    /// Nobody waits for this step any more.
    Cancel {
        /// Its index.
        step: usize,
    },
    /// It is over. In the order of the ensemble's outputs; nothing for those that are not wanted.
    Finish(Result<Vec<Option<T>>, Failure<E>>),
}

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure<E> {
    /// This step failed.
    Step(usize, E),
    /// The deadline is over.
    Deadline,
}

/// How much heavier a step is for each step that follows it. Chosen with chains of two and five steps, a diamond and a
/// cascade: between 1.2 and 1.7 goodput is within 5 % of the best static division (docs/policy.md).
const FALLING: f64 = 1.4;

/// What a step takes, as far as a request's time is divided by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTimes {
    /// From its submission to its answer, at least.
    pub least: Span,
    /// How much its model gains by time for larger batches ([`proto::LatencyProfile::batching`]).
    pub batching: Span,
}

/// A request under way.
#[derive(Debug)]
pub struct Run<T, E> {
    graph: Arc<Ensemble>,
    deadline: Timestamp,
    /// What each step takes at least, and its weight.
    times: Vec<(Span, f64)>,
    /// The steps that follow each, of those that are needed.
    next: Vec<Vec<usize>>,
    /// Of the ensemble's outputs.
    wanted: Vec<bool>,
    steps: Vec<State>,
    tensors: Vec<Tensor<T>>,
    /// Steps that have yet to take each tensor; wanted outputs are taken at the end.
    uses: Vec<usize>,
    /// Cancellations and the end.
    actions: VecDeque<Action<T, E>>,
    has_ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It waits for its inputs.
    Waiting,
    UnderWay,
    /// It has answered, or nobody needs it.
    Done,
}

#[derive(Debug, Clone)]
enum Tensor<T> {
    Awaited,
    /// Or left out by the request.
    Here(Option<T>),
    /// All who take it have done so.
    Taken,
}

impl<T: Clone, E> Run<T, E> {
    /// A request that brings these inputs, in the order of the ensemble's, and wants these of its outputs; each step
    /// takes these times.
    #[must_use]
    pub fn new(
        graph: Arc<Ensemble>,
        times: &[StepTimes],
        deadline: Timestamp,
        given: Vec<Option<T>>,
        wanted: Vec<bool>,
    ) -> Self {
        let count = graph.tensors.len();
        let mut tensors: Vec<_> = given.into_iter().map(Tensor::Here).collect();
        tensors.resize_with(count, || Tensor::Awaited);
        let mut uses = vec![0; count];
        for (&tensor, _) in graph.outputs.iter().zip(&wanted).filter(|(_, is_wanted)| **is_wanted) {
            uses[tensor] += 1;
        }
        let mut steps = vec![State::Done; graph.steps.len()];
        // From the end: each comes before all that take its tensors have said whether they are needed.
        for (at, step) in graph.steps.iter().enumerate().rev() {
            if step.outputs.iter().any(|(_, to)| uses[*to] > 0) {
                steps[at] = State::Waiting;
                step.inputs.iter().for_each(|(_, from)| uses[*from] += 1);
            }
        }
        let next = followers(&graph, &steps);
        let times = weighed(times, &steps, &next);
        let (actions, has_ended) = (VecDeque::new(), false);
        let mut run = Self { graph, deadline, times, next, wanted, steps, tensors, uses, actions, has_ended };
        run.settle();
        run
    }

    /// The least time that the whole can take.
    #[must_use]
    pub fn least(&self) -> Span {
        self.paths(0.0).into_iter().map(|(least, _)| least).max().unwrap_or(Span::ZERO)
    }

    /// A step has ended: with its outputs, in the order of [`repository::EnsembleStep::outputs`], or without. What
    /// comes of a step that is not under way counts for nothing.
    pub fn handle_reply(&mut self, step: usize, result: Result<Vec<T>, E>) {
        if self.has_ended || self.steps.get(step) != Some(&State::UnderWay) {
            return;
        }
        self.steps[step] = State::Done;
        match result {
            Ok(outputs) => {
                for ((_, to), output) in self.graph.steps[step].outputs.iter().zip(outputs) {
                    let is_needed = self.uses[*to] > 0;
                    self.tensors[*to] = if is_needed { Tensor::Here(Some(output)) } else { Tensor::Taken };
                }
                self.settle();
            }
            Err(error) => self.finish(Err(Failure::Step(step, error))),
        }
    }

    /// Ends it if its deadline is over.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.poll_timeout().is_some_and(|at| at <= now) {
            self.finish(Err(Failure::Deadline));
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        (!self.has_ended && self.deadline != Timestamp::NEVER).then_some(self.deadline)
    }

    /// What to do next. As long as it has not finished and there is nothing to do, some step is under way.
    pub fn poll_action(&mut self, now: Timestamp) -> Option<Action<T, E>> {
        if self.has_ended {
            return self.actions.pop_front();
        }
        let is_here = |tensor: usize| !matches!(self.tensors[tensor], Tensor::Awaited);
        let is_ready = |(at, state): (usize, &State)| {
            *state == State::Waiting && self.graph.steps[at].inputs.iter().all(|(_, from)| is_here(*from))
        };
        let step = self.steps.iter().enumerate().position(is_ready)?;
        self.steps[step] = State::UnderWay;
        let inputs =
            self.graph.steps[step].inputs.iter().map(|(_, from)| take(&mut self.tensors, &mut self.uses, *from));
        let inputs = inputs.collect();
        Some(Action::Submit { step, inputs, until: self.until(now, step) })
    }

    /// When a step should have answered that is submitted now.
    fn until(&self, now: Timestamp, step: usize) -> Timestamp {
        let (left, (least, weight)) = (self.deadline - now, self.times[step]);
        if self.deadline == Timestamp::NEVER || left <= Span::ZERO || self.next[step].is_empty() {
            return self.deadline;
        }
        let times = |span: Span, factor: f64| Span((span.0 as f64 * factor) as i64);
        let (mut path, mut all) = self.paths(0.0)[step];
        if left <= path || all <= 0.0 {
            return if path > Span::ZERO { now + times(left, least.0 as f64 / path.0 as f64) } else { self.deadline };
        }
        // What is left over is divided by the path that leaves least for each weight. The longest path by least
        // latencies may not be that one, so it is looked for until no other is longer; each turn finds another one.
        for _ in 0..self.times.len() {
            let (longest, its_all) = self.paths((left - path).0 as f64 / all)[step];
            if (longest, its_all) == (path, all) || its_all <= 0.0 {
                break;
            }
            (path, all) = (longest, its_all);
        }
        (now + least + times(left - path, weight / all)).min(self.deadline)
    }

    /// The least latency and the weight of the longest path from each step to the end, where a step is as long as its
    /// least latency and so much for its weight.
    fn paths(&self, for_weight: f64) -> Vec<(Span, f64)> {
        let length = |(least, weight): &(Span, f64)| least.0 as f64 + for_weight * weight;
        let mut paths = self.times.clone();
        for at in (0..paths.len()).rev() {
            let rest = self.next[at].iter().map(|&later| paths[later]);
            if let Some((least, weight)) = rest.max_by(|one, other| length(one).total_cmp(&length(other))) {
                paths[at].0 += least;
                paths[at].1 += weight;
            }
        }
        paths
    }

    /// Finishes once all outputs that are wanted are there.
    fn settle(&mut self) {
        let Self { graph, wanted, tensors, uses, .. } = self;
        let wanted = || graph.outputs.iter().zip(wanted.iter());
        if wanted().any(|(&tensor, is_wanted)| *is_wanted && matches!(tensors[tensor], Tensor::Awaited)) {
            return;
        }
        let outputs = wanted().map(|(&tensor, is_wanted)| is_wanted.then(|| take(tensors, uses, tensor)).flatten());
        let outputs = outputs.collect();
        self.finish(Ok(outputs));
    }

    fn finish(&mut self, result: Result<Vec<Option<T>>, Failure<E>>) {
        self.has_ended = true;
        let under_way = self.steps.iter().enumerate().filter(|(_, state)| **state == State::UnderWay);
        self.actions.extend(under_way.map(|(step, _)| Action::Cancel { step }));
        self.actions.push_back(Action::Finish(result));
        // Nobody takes them any more.
        self.tensors.clear();
    }
}

/// One of the uses of a tensor that is here; the last lets go of it.
fn take<T: Clone>(tensors: &mut [Tensor<T>], uses: &mut [usize], tensor: usize) -> Option<T> {
    uses[tensor] -= 1;
    let is_last = uses[tensor] == 0;
    let taken = if is_last { std::mem::replace(&mut tensors[tensor], Tensor::Taken) } else { tensors[tensor].clone() };
    match taken {
        Tensor::Here(taken) => taken,
        Tensor::Awaited | Tensor::Taken => unreachable!("it is here until its last use"),
    }
}

/// The steps that take a tensor which each makes, of those that are needed.
fn followers(graph: &Ensemble, steps: &[State]) -> Vec<Vec<usize>> {
    let takes = |at: usize, later: usize| {
        let mut made = graph.steps[at].outputs.iter().map(|(_, to)| to);
        made.any(|to| graph.steps[later].inputs.iter().any(|(_, from)| from == to))
    };
    let of = |at| (at + 1..steps.len()).filter(|&later| steps[later] == State::Waiting && takes(at, later)).collect();
    (0..steps.len()).map(of).collect()
}

/// The least latency and the weight of each step; none, if it is not needed.
fn weighed(times: &[StepTimes], steps: &[State], next: &[Vec<usize>]) -> Vec<(Span, f64)> {
    let is_needed = |at: &usize| steps[*at] == State::Waiting;
    let needed = || (0..times.len()).filter(is_needed);
    let mean = needed().map(|at| times[at].least.0 as f64).sum::<f64>() / needed().count().max(1) as f64;
    let mut weighed = vec![(Span::ZERO, 0.0); times.len()];
    let mut following = vec![0; times.len()];
    for at in needed().rev() {
        following[at] = next[at].iter().map(|&later| following[later] + 1).max().unwrap_or(0);
        let StepTimes { least, batching } = times[at];
        weighed[at] = (least, (batching.0 as f64 + mean) * FALLING.powi(following[at]));
    }
    weighed
}

#[cfg(test)]
mod tests;
