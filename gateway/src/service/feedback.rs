//! Feedback for answers of ensembles that learn, and which request it is for where it names the inputs.

use std::{rc::Rc, sync::Arc};

use bytes::Bytes;
use frontend::{InferError, error::invalid, request::Place, rope::Rope};
use repository::Model;
use serde_json::{Value, json};

use super::Service;
use crate::{
    access::Client,
    api::ModelInferRequest,
    cache::Question,
    protocol::{self, InferRequest, Inputs, Placed, Resolved, Tensors},
    selections::{Heard, Told},
};

/// Bytes of the inputs of a request that feedback may name: those that a body of feedback has room for, in which an
/// element takes two bytes at least.
const NAMED_BYTES_MAX: usize = 256 << 10;

/// The model that feedback is for: it tells which question an item names by the request that asked it.
pub(crate) struct FeedbackModel<'a> {
    service: &'a Service,
    index: usize,
    face: Rc<Model>,
}

impl FeedbackModel<'_> {
    /// By an item of JSON, with its `inputs` and `context`.
    ///
    /// # Errors
    /// If no request of this model has these.
    pub(crate) fn by_json(&self, item: &Value) -> Result<Question, InferError> {
        let mut asked = json!({ "inputs": item["inputs"] });
        if let Some(context) = item.get("context") {
            asked["parameters"] = json!({ "context": context });
        }
        let text = Bytes::from(asked.to_string());
        self.by_request(protocol::json::parse_request(&text, Rope::default(), Tensors::of(&self.face))?)
    }

    /// By the message of the request.
    ///
    /// # Errors
    /// As [`Self::by_json`].
    pub(crate) fn by_message(&self, message: ModelInferRequest) -> Result<Question, InferError> {
        self.by_request(protocol::messages::parse_request(message)?)
    }

    fn by_request(&self, request: InferRequest) -> Result<Question, InferError> {
        let Self { service, index, face } = self;
        let Resolved { inputs, terms } = protocol::resolve(face, request, None, service.regions.borrow().of(None))?;
        let Inputs { placed, pictures } = inputs;
        if pictures.is_some() {
            return Err(invalid("inputs", "a picture", "the ticket of its request, as request"));
        }
        let inputs: Vec<_> = placed.into_iter().map(Placed::read).collect::<Result<_, _>>()?;
        let too_large = || invalid("inputs", "more", format_args!("at most {NAMED_BYTES_MAX} bytes of elements"));
        service.feedback_question((*index, face), &inputs, terms.context()).ok_or_else(too_large)
    }
}

impl Service {
    /// Takes a client's feedback for an ensemble.
    ///
    /// # Errors
    /// If there is no such model, it does not learn, or that is too much.
    pub(crate) fn feedback(
        &self,
        of: Client,
        (model, version): (&str, Option<&str>),
        told: impl FnOnce(&FeedbackModel<'_>) -> Result<Vec<Told>, InferError>,
    ) -> Result<Vec<Heard>, InferError> {
        let (index, face) = self.find(model, version)?;
        let asked = FeedbackModel { service: self, index, face };
        let told = told(&asked)?;
        self.selections.handle_feedback(&self.record, (self.desk.now(), of), (index, &asked.face), told)
    }

    /// What feedback may name a request by, of an ensemble that learns.
    pub(super) fn feedback_question(
        &self,
        (index, model): (usize, &Model),
        inputs: &[(Place, Rope)],
        context: Option<&Arc<str>>,
    ) -> Option<Question> {
        let selection = model.ensemble()?.selection.as_ref()?;
        selection.policy.learning()?;
        let bytes: usize = inputs.iter().map(|(_, data)| data.len()).sum();
        if !self.selections.joins() || bytes > NAMED_BYTES_MAX {
            return None;
        }
        let name = context.map_or(&[][..], |name| name.as_bytes());
        let numbers: Vec<u64> = [index, name.len()]
            .iter()
            .map(|number| *number as u64)
            .chain(name.iter().map(|byte| u64::from(*byte)))
            .collect();
        Some(self.digester.question(&numbers, inputs, &[]))
    }
}
