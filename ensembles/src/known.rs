//! Answers of members that are known already, or are being asked for: a step need not ask for them again.

use std::{future::Future, pin::Pin, rc::Rc};

use frontend::{InferError, request::Place, rope::Rope, tasks::Reply};
use proto::{Application, Span};
use repository::Model;

/// What a step would ask a member.
#[derive(Debug)]
pub struct Question {
    /// Index in the model table, and what was found there.
    pub model: (usize, Rc<Model>),
    /// All inputs that it is given.
    pub inputs: Vec<(Place, Rope)>,
    /// The workload that it is of.
    pub application: Application,
    /// How long its answer may take; `ENDLESS` if there is no end.
    pub within: Span,
}

/// What there is to do about a question.
pub enum Turn {
    /// This is the answer.
    Answered(Reply),
    /// The member is to be asked, and whoever else waits for the answer told, if anybody may.
    Ask(Option<Box<dyn Asking>>),
}

/// The turn to ask a member; dropped without an answer, it is somebody else's.
pub trait Asking {
    /// The member has answered so.
    fn answered(self: Box<Self>, reply: &Reply);
}

/// Ends in what there is to do, or in why there is no answer.
pub type Turning = Pin<Box<dyn Future<Output = Result<Turn, InferError>>>>;

/// Knows what members have answered whose answers are kept.
pub trait Known {
    /// Waits until a question is answered, or it is its turn to be asked.
    fn turn(&self, question: Question) -> Turning;
}
