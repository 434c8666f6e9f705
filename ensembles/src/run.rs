//! One request's way through the graph of an ensemble.
//!
//! A life: made with what the request brings; [`Run::poll_action`] says which steps to submit, [`Run::handle_reply`]
//! takes their ends; it finishes once, with the outputs that are wanted, with the first step that fails, or at its
//! deadline. Whatever is under way then is cancelled before. Steps that no wanted output needs are never submitted.
//!
//! A step may take a part of the time that is left when it is submitted: its own least latency's part of the longest
//! path from it to the end, by least latencies. So what earlier steps did not use is the later ones', and the last step
//! of a path has all that is left. (Nexus divides by l(b) of the batches to come, which frontends do not know.)

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

/// A request under way.
#[derive(Debug)]
pub struct Run<T, E> {
    graph: Arc<Ensemble>,
    deadline: Timestamp,
    /// The least latency of each step, and of the longest path from its submission to the end.
    least: Vec<(Span, Span)>,
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
    /// has this least latency.
    #[must_use]
    pub fn new(
        graph: Arc<Ensemble>,
        least: &[Span],
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
        let least = paths(&graph, &steps, least);
        let (actions, has_ended) = (VecDeque::new(), false);
        let mut run = Self { graph, deadline, least, wanted, steps, tensors, uses, actions, has_ended };
        run.settle();
        run
    }

    /// The least time that the whole can take.
    #[must_use]
    pub fn least(&self) -> Span {
        self.least.iter().map(|(_, path)| *path).max().unwrap_or(Span::ZERO)
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
        Some(Action::Submit { step, inputs: inputs.collect(), until: until(now, self.deadline, self.least[step]) })
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

/// The least latency of each step, and of the longest path from it to the end among those that are needed.
fn paths(graph: &Ensemble, steps: &[State], least: &[Span]) -> Vec<(Span, Span)> {
    let mut paths = vec![(Span::ZERO, Span::ZERO); graph.steps.len()];
    for at in (0..graph.steps.len()).rev().filter(|&at| steps[at] == State::Waiting) {
        let takes = |later: usize| {
            let mut made = graph.steps[at].outputs.iter().map(|(_, to)| to);
            made.any(|to| graph.steps[later].inputs.iter().any(|(_, from)| from == to))
        };
        let rest = (at + 1..graph.steps.len()).filter(|&later| takes(later)).map(|later| paths[later].1).max();
        paths[at] = (least[at], least[at] + rest.unwrap_or(Span::ZERO));
    }
    paths
}

/// When a step should have answered that is submitted now.
fn until(now: Timestamp, deadline: Timestamp, (least, path): (Span, Span)) -> Timestamp {
    let left = deadline - now;
    if deadline == Timestamp::NEVER || path <= Span::ZERO || left <= Span::ZERO {
        return deadline;
    }
    let share = i128::from(left.0) * i128::from(least.0) / i128::from(path.0);
    now + Span(i64::try_from(share).unwrap_or(left.0))
}

#[cfg(test)]
mod tests;
