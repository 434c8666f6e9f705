//! What a request for models of one task has besides its graph: who is asked, and what they have predicted.

use bytes::Bytes;
use frontend::InferError;
use proto::{Span, Timestamp, scheduler_to_frontend::DropReason};
use repository::{Model, Selection};

use crate::{
    members::Tensor,
    pending::{Room, Selected},
    selection::{Choice, Learner, combine::Outputs},
    vote::{self, Order, Vote},
};

pub(crate) struct Selecting {
    pub(crate) vote: Vote,
    choice: Choice,
    allow_default: bool,
    /// The least confidence of what is not in doubt.
    confidence: f64,
    reply: Span,
    /// In the order of the ensemble's inputs.
    given: Vec<Option<Tensor>>,
    outputs: Outputs,
    /// By step.
    predictions: Vec<Option<Vec<Bytes>>>,
    /// Who failed.
    failed: Vec<(usize, InferError)>,
    /// As [`Selected::in_vain`].
    in_vain: Vec<usize>,
}

/// An answer's outputs and how they were made; or who failed last, unless others were late.
type Concluded = Result<(Vec<Bytes>, Selected), Option<(usize, InferError)>>;

impl Selecting {
    /// Whom a request asks of which nobody keeps what was learned.
    pub(crate) fn choice_at(selection: &Selection, members: usize, now: Timestamp) -> Choice {
        Learner::starting_at(selection, members, now.0.unsigned_abs()).select()
    }

    /// A request that brings these inputs and wants these outputs, of members that take so much at least; nothing of
    /// those who cannot be asked.
    pub(crate) fn new(
        selection: &Selection,
        (choice, allow_default): (Choice, bool),
        times: &[Option<Span>],
        deadline: Timestamp,
        (given, outputs): (Vec<Option<Tensor>>, Outputs),
    ) -> Self {
        // Who cannot be asked says why at once.
        let members = choice.members.iter().map(|&member| (member, times[member].unwrap_or(Span::ZERO))).collect();
        let vote = Vote::new(members, choice.order, deadline, selection.reply);
        let predictions = vec![None; times.len()];
        let (confidence, reply) = (selection.confidence, selection.reply);
        let (failed, in_vain) = (Vec::new(), Vec::new());
        Self { vote, choice, allow_default, confidence, reply, given, outputs, predictions, failed, in_vain }
    }

    /// What to do next.
    pub(crate) fn poll_action(&mut self, now: Timestamp) -> Option<vote::Action> {
        let action = self.vote.poll_action(now);
        if let Some(vote::Action::Cancel { member }) = action {
            self.in_vain.push(member);
        }
        action
    }

    /// The least time that an answer can take.
    pub(crate) fn least(&self) -> Span {
        self.vote.least() + self.reply + self.reply
    }

    /// What a step is given.
    pub(crate) fn inputs(&self, names: &[(String, usize)]) -> Vec<Option<Tensor>> {
        names.iter().map(|(_, from)| self.given[*from].clone()).collect()
    }

    /// A step has ended: with all outputs of the ensemble in their order, or without.
    pub(crate) fn handle_end(&mut self, step: usize, result: Result<Vec<Bytes>, InferError>) {
        let result = result.and_then(|prediction| match self.outputs.fits(&prediction) {
            true => Ok(prediction),
            false => Err(InferError::Failed("its outputs have another size than the ensemble's".to_owned())),
        });
        let is_enough = result.as_ref().is_ok_and(|prediction| match self.choice.order {
            Order::AtOnce => false,
            Order::UntilConfident => self.outputs.own_confidence(prediction) >= self.confidence,
            Order::UntilAnswered | Order::OnFailure => true,
        });
        if self.vote.handle_end(step, is_enough) {
            match result {
                Ok(prediction) => self.predictions[step] = Some(prediction),
                Err(error) => {
                    let is_passed_over = self.choice.order == Order::OnFailure || is_of_load(&error);
                    self.in_vain.extend(is_passed_over.then_some(step));
                    self.failed.push((step, error));
                }
            }
        }
    }

    /// Makes one answer of what is there, or takes the default if the request does.
    pub(crate) async fn conclude(&self, face: &Model, room: &dyn Room) -> Concluded {
        let mut members = self.choice.members.iter().copied();
        let is_there = |member: &usize| self.predictions[*member].is_some();
        // One by one the last one's counts.
        let counted: Vec<usize> = match self.choice.order {
            Order::AtOnce => members.collect(),
            Order::UntilConfident | Order::UntilAnswered | Order::OnFailure => {
                members.rfind(is_there).into_iter().collect()
            }
        };
        let weights: Vec<f64> = counted.iter().map(|&member| self.choice.weights[member]).collect();
        let predictions: Vec<_> = counted.iter().map(|&member| self.predictions[member].clone()).collect();
        let bytes = predictions.iter().flatten().flatten().map(Bytes::len).sum();
        let outputs = self.outputs.clone();
        let combined = room.combine(bytes, Box::new(move || outputs.combine(&weights, &predictions))).await;
        let selected = |confidence: f64, is_default| Selected {
            choice: self.choice.clone(),
            predictions: self.predictions.clone(),
            counted: if is_default { Vec::new() } else { counted.iter().copied().filter(is_there).collect() },
            confidence,
            is_doubted: confidence < self.confidence,
            is_default,
            in_vain: self.in_vain.clone(),
        };
        let confidence = combined.as_ref().ok().and_then(|of| of.as_ref()).map_or(0.0, |of| of.confidence);
        let defaults = face.ensemble().and_then(|graph| graph.selection.as_ref()?.defaults.as_ref());
        match (combined, defaults) {
            (Ok(Some(combined)), _) if confidence >= self.confidence || !self.allow_default || defaults.is_none() => {
                Ok((combined.outputs, selected(confidence, false)))
            }
            (_, Some(defaults)) if self.allow_default => {
                let all = |row: &Vec<u8>| Bytes::from(row.repeat(self.outputs.rows));
                Ok((defaults.iter().map(all).collect(), selected(confidence, true)))
            }
            (Err(error), _) => Err(Some((self.choice.members[0], error))),
            (Ok(_), _) if counted.iter().any(is_there) => {
                let cause = InferError::Failed("its outputs are not finite numbers".to_owned());
                Err(counted.first().map(|&member| (member, cause)))
            }
            // Whoever was late met no deadline.
            (Ok(_), _) => Err(self.failed.last().filter(|_| self.failed.len() == self.choice.members.len()).cloned()),
        }
    }

    /// That there is no answer.
    pub(crate) fn nobody(&self) -> Selected {
        let (choice, predictions) = (self.choice.clone(), self.predictions.clone());
        let (counted, in_vain) = (Vec::new(), self.in_vain.clone());
        Selected { choice, predictions, counted, confidence: 0.0, is_doubted: true, is_default: false, in_vain }
    }
}

/// Whether a member has failed because there was more to do than it could in time.
fn is_of_load(error: &InferError) -> bool {
    use DropReason::{ColdStart, Deadline, QueueFull};
    match error {
        InferError::Dropped(reason) => matches!(reason, Deadline | QueueFull | ColdStart),
        InferError::WindowMissed | InferError::ArenaFull { .. } => true,
        _ => false,
    }
}
