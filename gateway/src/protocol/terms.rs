//! What a request says besides its inputs: its objective, whose it is, and which outputs it wants in which form.

use std::{rc::Rc, sync::Arc};

use ensembles::{Known, Request, Room, contexts, selection::Choice};
use frontend::{
    error::{InferError, invalid},
    excerpt,
    request::{Place, check_placed, slo_from_micros, unknown_name},
    rope::Rope,
    slots::Client,
    tasks::CheckedRequest,
};
use proto::{Application, Span};
use repository::{DataType, Model};
use serde_json::Value;

use super::{
    InferRequest, OutputChoice, OutputForm, Parameters, Prepared, PreparedEnsemble, RequestedOutput, Wanted,
    inputs::region_span,
};
use crate::regions::{Part, Regions};

/// Whose an ensemble's request is, where its steps get room, and what is known of their answers.
type Means = (Option<Client>, Box<dyn Room>, Option<Box<dyn Known>>);

/// What a request says besides its inputs.
#[derive(Debug)]
pub struct Terms {
    id: Option<String>,
    slo: Span,
    priority: u8,
    application: Application,
    allow_default: bool,
    context: Option<Arc<str>>,
    outputs: Vec<OutputChoice>,
    /// Shared memory that its inputs are in.
    parts: Vec<Part>,
}

impl Terms {
    pub(super) fn of(
        model: &Model,
        InferRequest { id, parameters, outputs, .. }: InferRequest,
        parts: Vec<Part>,
        within: Option<Span>,
        regions: &Regions,
    ) -> Result<Self, InferError> {
        let priority = model.priorities.of(priority(&parameters)?);
        let application = application(&parameters)?;
        let allow_default = flag(&parameters, "allow_default")?;
        let context = context(model, &parameters)?;
        let slo = match objective(&parameters)? {
            Some(Span::ENDLESS) => Span::ENDLESS,
            asked => model.queue.objective(priority, asked, model.slo),
        };
        // When a client without an objective hangs up is no objective.
        let slo = if slo == Span::ENDLESS { slo } else { within.map_or(slo, |within| slo.min(within)) };
        let outputs = output_choices(model, &parameters, &outputs, regions)?;
        Ok(Self { id, slo, priority, application, allow_default, context, outputs, parts })
    }

    /// The request's latency objective; `ENDLESS` if it has none.
    #[must_use]
    pub fn slo(&self) -> Span {
        self.slo
    }

    /// The workload that it is of.
    #[must_use]
    pub fn application(&self) -> Application {
        self.application
    }

    /// The context that it is to be answered in, of an ensemble that learns.
    pub(crate) fn context(&self) -> Option<&Arc<str>> {
        self.context.as_ref()
    }

    /// Which outputs it wants, a bit for each.
    pub(crate) fn wanted_bits(&self) -> Vec<u64> {
        let last = self.outputs.iter().map(|choice| choice.index).max().unwrap_or_default();
        let mut bits = vec![0; last / 64 + 1];
        self.outputs.iter().for_each(|choice| bits[choice.index / 64] |= 1 << (choice.index % 64));
        bits
    }

    /// What its reply needs to know, where it was answered already.
    pub(crate) fn into_answered(self) -> Wanted {
        (self.id, self.outputs, self.parts)
    }

    /// The request once its inputs have been read; its model is at `index` of the model table.
    ///
    /// # Errors
    /// [`InferError::Invalid`], which names the field, what was found and what was expected.
    pub fn with(self, model: &Model, index: usize, inputs: Vec<(Place, Rope)>) -> Result<Prepared, InferError> {
        let Self { id, slo, priority, application, outputs, parts, .. } = self;
        let checked = CheckedRequest { priority, application, ..check_placed(model, index, inputs, slo)? };
        Ok(Prepared { id, checked, outputs, parts })
    }

    /// The same for the steps of an ensemble; `waited` as there.
    #[must_use]
    pub(crate) fn for_ensemble(
        self,
        model: (usize, Rc<Model>),
        (inputs, waited): (Vec<(Place, Rope)>, Span),
        (client, room, known): Means,
        choice: Option<Choice>,
    ) -> PreparedEnsemble {
        let Self { id, slo, priority, application, allow_default, outputs, parts, .. } = self;
        let is_wanted = |at: usize| outputs.iter().any(|choice| choice.index == at);
        let wanted = (0..model.1.outputs.len()).map(is_wanted).collect();
        let request = Request {
            model,
            inputs,
            wanted,
            slo,
            waited,
            priority,
            application,
            client,
            room,
            known,
            choice,
            allow_default,
            is_counted: true,
        };
        PreparedEnsemble { id, request, outputs, parts }
    }

    /// The same of so many rows, before the data of its only input is there; `waited` as in [`CheckedRequest`].
    #[must_use]
    pub fn ahead(self, index: usize, rows: usize, waited: Span) -> Prepared {
        let Self { id, slo, priority, application, outputs, parts, .. } = self;
        let (inputs, client) = (Vec::new(), None);
        let checked = CheckedRequest { model: index, rows, inputs, slo, waited, priority, application, client };
        Prepared { id, checked, outputs, parts }
    }
}

/// The request's own latency objective, or that it has none; `None`: it is the model's to say.
fn objective(parameters: &Parameters) -> Result<Option<Span>, InferError> {
    let timeout = timeout(parameters)?;
    match flag(parameters, "background")? {
        false => Ok(timeout),
        true if timeout.is_none() => Ok(Some(Span::ENDLESS)),
        true => Err(invalid("parameters.background", "true beside a timeout", "one of the two")),
    }
}

/// One of the request's own that is true or false; false, if it is not there.
fn flag(parameters: &Parameters, key: &str) -> Result<bool, InferError> {
    match parameters.get(key) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(invalid(&format!("parameters.{key}"), excerpt(&other.to_string()), "true or false")),
    }
}

/// The context that a request names, where the model learns in contexts; what others are told by that name is theirs.
fn context(model: &Model, parameters: &Parameters) -> Result<Option<Arc<str>>, InferError> {
    let selection = model.ensemble().and_then(|ensemble| ensemble.selection.as_ref());
    let learns = selection.is_some_and(|selection| selection.policy.learning().is_some());
    let Some(value) = parameters.get("context").filter(|_| learns) else { return Ok(None) };
    let name = value.as_str().filter(|name| (1..=contexts::NAME_BYTES_MAX).contains(&name.len()));
    let expected = format_args!("a name of 1 to {} bytes", contexts::NAME_BYTES_MAX);
    let name = name.ok_or_else(|| invalid("parameters.context", excerpt(&value.to_string()), expected))?;
    Ok(Some(name.into()))
}

/// Triton's timeout; its 0 means that the client names none.
fn timeout(parameters: &Parameters) -> Result<Option<Span>, InferError> {
    match parameters.get("timeout") {
        None => Ok(None),
        Some(value) => match value.as_i64() {
            Some(0) => Ok(None),
            Some(micros) => slo_from_micros(micros).map(Some),
            None => Err(invalid("parameters.timeout", excerpt(&value.to_string()), "a whole number of microseconds")),
        },
    }
}

/// Triton's priority; 0, the model's default, if the client names none.
fn priority(parameters: &Parameters) -> Result<u64, InferError> {
    let Some(value) = parameters.get("priority") else { return Ok(0) };
    let expected = "0 (the model's default), or 1 (the highest) and up";
    value.as_u64().ok_or_else(|| invalid("parameters.priority", excerpt(&value.to_string()), expected))
}

/// What the client calls the workload that its request is of, if it is a name.
#[must_use]
pub fn application_name(parameters: &Parameters) -> Option<&str> {
    let name = parameters.get("application")?.as_str()?;
    (1..=Application::NAME_BYTES_MAX).contains(&name.len()).then_some(name)
}

/// The workload of that name.
fn application(parameters: &Parameters) -> Result<Application, InferError> {
    let Some(value) = parameters.get("application") else { return Ok(Application::NONE) };
    let expected = || format!("a name of 1 to {} bytes", Application::NAME_BYTES_MAX);
    let named = application_name(parameters)
        .ok_or_else(|| invalid("parameters.application", excerpt(&value.to_string()), expected()))?;
    Ok(Application::named(named))
}

fn output_choices(
    model: &Model,
    parameters: &Parameters,
    outputs: &[RequestedOutput],
    regions: &Regions,
) -> Result<Vec<OutputChoice>, InferError> {
    let binary = |parameters: &Parameters, key: &str, field: &str, default: bool| match parameters.get(key) {
        None => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(invalid(&format!("{field}parameters.{key}"), excerpt(&other.to_string()), "true or false")),
    };
    let form = |binary| if binary { OutputForm::Binary } else { OutputForm::Usual };
    let default = binary(parameters, "binary_data_output", "", false)?;
    if outputs.is_empty() {
        return Ok((0..model.outputs.len())
            .map(|index| OutputChoice { index, form: form(default), classes: 0 })
            .collect());
    }
    let mut choices: Vec<OutputChoice> = Vec::new();
    for output in outputs {
        let Some(index) = model.outputs.iter().position(|tensor| tensor.name == output.name) else {
            return Err(unknown_name("outputs", &output.name, &model.outputs));
        };
        let field = format!("outputs['{}']", output.name);
        if choices.iter().any(|choice| choice.index == index) {
            // As Triton says it.
            return Err(InferError::Invalid(format!("output '{}' already exists in request", output.name)));
        }
        let form = match region_span(&output.parameters, &field)? {
            Some(span) => OutputForm::Region(regions.part(span)?),
            None => form(binary(&output.parameters, "binary_data", &format!("{field}."), default)?),
        };
        let classes = class_count(&output.parameters, &field)?;
        if classes > 0 && model.outputs[index].datatype == DataType::Bytes {
            // As Triton says it.
            return Err(InferError::Invalid(format!(
                "class result not available for output due to unsupported type 'BYTES': \
                 {field}.parameters.classification: found {classes}, expected none: strings have no scores"
            )));
        }
        if classes > 0 && matches!(form, OutputForm::Region(_)) {
            let key = format!("{field}.parameters.classification");
            return Err(invalid(&key, "shared memory too", "one of both: classes have no fixed size"));
        }
        choices.push(OutputChoice { index, form, classes });
    }
    Ok(choices)
}

/// Triton's classification extension; its 0 means none.
fn class_count(parameters: &Parameters, field: &str) -> Result<usize, InferError> {
    let Some(value) = parameters.get("classification") else { return Ok(0) };
    value.as_u64().and_then(|count| usize::try_from(count).ok()).ok_or_else(|| {
        invalid(&format!("{field}.parameters.classification"), excerpt(&value.to_string()), "a number of classes")
    })
}
