//! Feedback for answers of ensembles that learn, and which request it is for where it names the inputs.

use std::{rc::Rc, sync::Arc};

use bytes::Bytes;
use frontend::{InferError, error::invalid, request::Place, rope::Rope};
use repository::Model;
use serde_json::{Value, json};

use super::Service;
use crate::{
    access::Client,
    cache::Question,
    protocol::{self, Inputs, Placed, Resolved, Tensors},
    selections::{Heard, Told},
    settings::Settings,
};

/// Bytes of the inputs of a request that feedback may name: those that a body of feedback has room for, in which an
/// element takes two bytes at least.
const NAMED_BYTES_MAX: usize = 256 << 10;

impl Service {
    /// Takes a client's feedback for an ensemble.
    ///
    /// # Errors
    /// If there is no such model, it does not learn, or that is too much.
    pub(crate) fn feedback(
        &self,
        of: Client,
        (model, version): (&str, Option<&str>),
        told: Vec<Told>,
    ) -> Result<Vec<Heard>, InferError> {
        let (index, face) = self.find(model, version)?;
        self.selections.handle_feedback(&self.record, (self.desk.now(), of), (index, &face), told)
    }

    /// The same, as a body of JSON says it.
    ///
    /// # Errors
    /// As there, or if it says something else.
    pub(crate) fn feedback_of(
        &self,
        of: Client,
        (model, version): (&str, Option<&str>),
        body: &Settings,
    ) -> Result<Vec<Heard>, InferError> {
        let (index, face) = self.find(model, version)?;
        let told = Told::all_of(body, |item| self.question_named(index, &face, item))?;
        self.feedback(of, (model, version), told)
    }

    /// The question that an item of feedback names.
    fn question_named(&self, index: usize, face: &Rc<Model>, item: &Value) -> Result<Question, InferError> {
        let mut asked = json!({ "inputs": item["inputs"] });
        if let Some(context) = item.get("context") {
            asked["parameters"] = json!({ "context": context });
        }
        let text = Bytes::from(asked.to_string());
        let request = protocol::json::parse_request(&text, Rope::default(), Tensors::of(face))?;
        let Resolved { inputs, terms } = protocol::resolve(face, request, None, self.regions.borrow().of(None))?;
        let Inputs { placed, pictures } = inputs;
        if pictures.is_some() {
            return Err(invalid("inputs", "a picture", "the ticket of its request, as request"));
        }
        let inputs: Vec<_> = placed.into_iter().map(Placed::read).collect::<Result<_, _>>()?;
        let too_large = || invalid("inputs", "more", format_args!("at most {NAMED_BYTES_MAX} bytes of elements"));
        self.feedback_question((index, face), &inputs, terms.context()).ok_or_else(too_large)
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
