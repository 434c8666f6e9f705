//! Step 10 for ensembles of models of one task: what each has learned, and feedback, which joins with what its
//! request's members predicted (Clipper, section 5). It lives in this frontend and ends with it. No IO, no clock.
//!
//! Each answer of an ensemble that learns has a ticket: a number of this frontend's life, in which it is used once.
//! What feedback needs of the predictions is kept under it, `feedback_timeout_ms` at most and `feedback_bytes` in all;
//! the oldest go first. Feedback counts once: a second one for the same ticket says the same, or contradicts it.
//! Instead of a ticket it may name a request's inputs: it is then for the latest request of that client with these
//! (Clipper, section 5).
//!
//! A request that names a context asks whom that context has learned to ask, and its feedback is that context's alone
//! (Clipper, section 5.3); contexts take `contexts_bytes` in all, and are exchanged with a store if there is one.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    mem,
    rc::Rc,
    sync::Arc,
};

use ensembles::{
    Selected,
    contexts::{self, Batch, Contexts, Counts, Kind},
    selection::{
        Choice, Learner, Unheard,
        combine::{OutputKind, Outputs},
    },
};
use frontend::{InferError, error::invalid, excerpt};
use proto::{Span, Timestamp};
use repository::{Agreement, EnsembleStep, Model, Policy, Selection};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::{
    access::Client, cache::Question, metrics::FeedbackOutcome, protocol::Parameters, record::Record, settings::Settings,
};

/// Feedback in one body.
const ITEMS_MAX: usize = 1024;
/// What a join takes besides what members predicted.
const JOIN_BYTES: usize = 320;

/// What all ensembles have learned, and what waits for feedback.
pub struct Selections {
    /// Tells tickets of other frontends, and of former lives, from ours.
    life: u64,
    bytes_max: usize,
    timeout: Span,
    state: RefCell<State>,
    /// Told when there may be something for the store.
    wake: Notify,
}

struct State {
    /// By index in the model table; another one once the ensemble is loaded anew.
    learners: BTreeMap<usize, Learning>,
    /// Loads of ensembles so far.
    loads: u64,
    contexts: Contexts<Client>,
    /// By ticket, and so by age.
    joins: BTreeMap<u64, Join>,
    /// The latest ticket of each question.
    asked: BTreeMap<(Client, Question), u64>,
    bytes: usize,
    tickets: u64,
}

/// What an ensemble has learned in its requests that name no context.
struct Learning {
    of: Rc<Model>,
    learner: Learner,
    /// Which contexts are its own.
    kind: Arc<Kind>,
}

/// Whom a request asks.
pub(crate) struct Chosen {
    pub(crate) choice: Choice,
    /// If it names a context.
    pub(crate) context: Option<InContext>,
}

/// What a request's end needs of its beginning.
#[derive(Debug, Default)]
pub(crate) struct Joining {
    /// If it names a context.
    pub(crate) context: Option<InContext>,
    /// If feedback may name its inputs.
    pub(crate) question: Option<Question>,
}

/// In which context a request is answered.
#[derive(Debug, Clone)]
pub(crate) enum InContext {
    /// In its own; whether what other frontends have learned of late may be missing.
    Own(contexts::Place, bool),
    /// In what the ensemble has learned otherwise: there was no room for its own.
    Common,
}

/// What feedback needs of a request.
struct Join {
    at: Timestamp,
    client: Client,
    ensemble: Rc<Model>,
    /// As the learner numbers it.
    request: u64,
    probability: f64,
    rows: usize,
    /// If it was answered in one.
    context: Option<contexts::Place>,
    /// By step; of each output the rows.
    predictions: Vec<Option<Vec<Kept>>>,
    question: Option<Question>,
    bytes: usize,
    /// A digest of the feedback that counted.
    heard: Option<u64>,
}

/// What is kept of an output.
enum Kept {
    /// Of each row, where the agreement is `argmax`.
    Classes(Box<[u32]>),
    Rows(Box<[u8]>),
}

/// Which request feedback is for.
pub(crate) enum Which {
    /// By the ticket of its answer.
    Ticket(String),
    /// By its inputs; why these cannot be read otherwise.
    Inputs(Result<Question, InferError>),
}

impl Which {
    /// What an item names: a ticket, which is empty if it has none, or a request.
    pub(crate) fn new(ticket: String, asked: Option<Result<Question, InferError>>) -> Self {
        match asked {
            None => Self::Ticket(ticket),
            Some(_) if !ticket.is_empty() => Self::Inputs(Err(invalid("request, inputs", "both", "one of them"))),
            Some(asked) => Self::Inputs(asked),
        }
    }
}

/// Feedback for one request, as a client says it.
pub(crate) struct Told {
    pub(crate) which: Which,
    /// What would have been right, by the name of an output; why that cannot be read otherwise.
    pub(crate) outputs: Result<Vec<(String, Vec<f64>)>, InferError>,
}

/// What became of it.
pub(crate) struct Heard {
    /// The ticket; none if no request had these inputs.
    pub(crate) request: String,
    pub(crate) outcome: FeedbackOutcome,
    /// Why it is malformed, if it is.
    pub(crate) error: Option<String>,
}

/// Feedback for one request: what would have been right, by output.
struct Item {
    ticket: String,
    outputs: Vec<(usize, Vec<f64>)>,
}

impl Selections {
    /// Nothing yet, in a life that has this number; what waits for feedback may be so many bytes and so old, and
    /// contexts may take so many.
    #[must_use]
    pub fn new(life: u64, (bytes_max, timeout): (usize, Span), contexts_bytes_max: usize) -> Self {
        let contexts = Contexts::new(contexts_bytes_max);
        let (learners, joins, asked) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let state = State { learners, loads: 0, contexts, joins, asked, bytes: 0, tickets: 0 };
        Self { life, bytes_max, timeout, state: RefCell::new(state), wake: Notify::new() }
    }

    /// From now on contexts are exchanged with a store.
    pub(crate) fn share(&self) {
        self.state.borrow_mut().contexts.share();
    }

    /// Tells this life from all others.
    #[must_use]
    pub fn life(&self) -> u64 {
        self.life
    }

    /// What is to be sent to the store; what became of it is told by [`Self::handle_exchanged`].
    pub(crate) fn poll_batch(&self, now: Timestamp) -> Option<Arc<Batch>> {
        self.state.borrow_mut().contexts.poll_batch(now)
    }

    /// When something may be to be sent; nothing is until [`Self::woken`] otherwise.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.state.borrow().contexts.poll_timeout()
    }

    /// Waits until something may be to be sent.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// What became of a batch: what the store knows, of each context for which it does, or nothing.
    pub(crate) fn handle_exchanged(&self, record: &Record, now: Timestamp, known: Option<Vec<Option<contexts::Read>>>) {
        let contexts = &mut self.state.borrow_mut().contexts;
        match known {
            Some(known) => contexts.handle_exchanged(now, known),
            None => contexts.handle_failed(now),
        }
        record.handle_contexts(&contexts.counts());
    }

    fn handle_used(&self, record: &Record, counts: &Counts) {
        record.handle_contexts(counts);
        self.wake.notify_one();
    }

    /// Whom a request for an ensemble asks, if its steps are models of one task; in its client's context, if it names
    /// one.
    pub(crate) fn choose(
        &self,
        record: &Record,
        (index, face): (usize, &Rc<Model>),
        (now, client, context): (Timestamp, Client, Option<&Arc<str>>),
    ) -> Option<Chosen> {
        let (steps, selection) = selection_of(face)?;
        let State { learners, loads, contexts, .. } = &mut *self.state.borrow_mut();
        let mut fresh = || {
            *loads += 1;
            let (of, learner) = (Rc::clone(face), Learner::new(selection, steps.len()));
            let block = learner.block().unwrap_or(1);
            let key = format!("{}/{}:{:016x}", face.name, face.version, meaning(steps, selection, block));
            let kind = Kind { load: *loads, key, members: steps.len(), block };
            Learning { of, learner, kind: Arc::new(kind) }
        };
        let known = learners.entry(index).or_insert_with(&mut fresh);
        if !Rc::ptr_eq(&known.of, face) {
            *known = fresh();
        }
        let in_context = context.map(|name| {
            let begin = || Learner::new(selection, steps.len());
            let selected = contexts.select((now, client), (&known.kind, name), begin);
            self.handle_used(record, &contexts.counts());
            selected
        });
        let (choice, context) = match in_context {
            Some(Some(contexts::Selected { choice, place, is_stale })) => {
                (choice, Some(InContext::Own(place, is_stale)))
            }
            Some(None) => (known.learner.select(), Some(InContext::Common)),
            None => (known.learner.select(), None),
        };
        if choice.request == 0 {
            record.handle_weights(index, &names(steps), &known.learner.weights());
        }
        Some(Chosen { choice, context })
    }

    /// A request for models of one task has ended so: it is counted, and joins with the feedback that comes of it if it
    /// was answered. Neither is so where its ensemble was loaded anew meanwhile, and has no `index`. What its reply is
    /// to say of it.
    pub(crate) fn handle_ended(
        &self,
        record: &Record,
        (now, client): (Timestamp, Client),
        (index, face): (Option<usize>, &Rc<Model>),
        (rows, is_answered): (usize, bool),
        (selected, joining): (&Selected, Joining),
    ) -> Parameters {
        let Some((steps, selection)) = selection_of(face) else { return Parameters::new() };
        let names = names(steps);
        if let Some(index) = index {
            record.handle_selected(index, selected, is_answered);
            let mut state = self.state.borrow_mut();
            if selection.policy == Policy::Fallback
                && let Some(Learning { learner, .. }) = state.learners.get_mut(&index).filter(|known| known.is_of(face))
            {
                learner.handle_ended(&selected.in_vain, !selected.counted.is_empty());
                record.handle_weights(index, &names, &learner.weights());
            }
        }
        let mut told = Parameters::new();
        if !is_answered {
            return told;
        }
        let members: Vec<&str> = selected.counted.iter().map(|&member| names[member].as_str()).collect();
        told.insert("confidence".to_owned(), json!(selected.confidence));
        told.insert("members".to_owned(), json!(members.join(",")));
        told.insert("default".to_owned(), json!(selected.is_default));
        if let Some(context) = &joining.context {
            told.insert("context_state".to_owned(), json!(context.told()));
        }
        if index.is_some()
            && selection.policy.learning().is_some()
            && selected.predictions.iter().any(Option::is_some)
            && let Some(ticket) = self.join((now, client), face, (selection, rows), (selected, joining))
        {
            told.insert("feedback".to_owned(), json!(self.told_ticket(ticket)));
        }
        told
    }

    fn join(
        &self,
        (at, client): (Timestamp, Client),
        face: &Rc<Model>,
        (selection, rows): (&Selection, usize),
        (selected, Joining { context, question }): (&Selected, Joining),
    ) -> Option<u64> {
        let context = match context {
            Some(InContext::Own(place, _)) => Some(place),
            Some(InContext::Common) | None => None,
        };
        let outputs = outputs_of(selection, face, rows);
        let kept = |prediction: &Option<Vec<bytes::Bytes>>| {
            let all = prediction.as_ref()?.iter().zip(&outputs.outputs);
            Some(all.map(|(data, kind)| Kept::of(kind, data)).collect::<Vec<_>>())
        };
        let predictions: Vec<_> = selected.predictions.iter().map(kept).collect();
        let place_bytes = context.as_ref().map_or(0, contexts::Place::bytes);
        let bytes = JOIN_BYTES + place_bytes + predictions.iter().flatten().flatten().map(Kept::bytes).sum::<usize>();
        if bytes > self.bytes_max {
            return None;
        }
        let mut state = self.state.borrow_mut();
        let ticket = state.tickets;
        state.tickets += 1;
        state.bytes += bytes;
        let Choice { request, probability, .. } = selected.choice;
        let (ensemble, heard) = (Rc::clone(face), None);
        let join =
            Join { at, client, ensemble, request, probability, rows, context, predictions, question, bytes, heard };
        if let Some(question) = question {
            state.asked.insert((client, question), ticket);
        }
        state.joins.insert(ticket, join);
        while let Some(oldest) = state.joins.first_entry()
            && (oldest.get().at + self.timeout <= at || state.bytes > self.bytes_max)
        {
            state.drop_oldest();
        }
        Some(ticket)
    }

    /// Takes feedback from a client, each item of the body by itself.
    ///
    /// # Errors
    /// If there is too much of it, or the ensemble does not learn.
    pub(crate) fn handle_feedback(
        &self,
        record: &Record,
        (now, client): (Timestamp, Client),
        (index, face): (usize, &Rc<Model>),
        told: Vec<Told>,
    ) -> Result<Vec<Heard>, InferError> {
        let learns = selection_of(face).filter(|(_, selection)| selection.policy.learning().is_some());
        let Some((steps, _)) = learns else {
            let expected = "an ensemble with selection exp3, exp4 or epsilon_greedy";
            return Err(invalid("model", format_args!("'{}', which does not learn", face.name), expected));
        };
        if told.len() > ITEMS_MAX {
            return Err(invalid("feedback", told.len(), format_args!("a list of at most {ITEMS_MAX}")));
        }
        let mut heard = Vec::with_capacity(told.len());
        for Told { which, outputs } in told {
            let request = self.ticket_of(client, which);
            let item = request.clone().and_then(|request| Item::of(face, request.as_deref(), &outputs?));
            let taken = item.and_then(|item| self.take((now, client), (index, face), &item));
            let request = request.ok().flatten().unwrap_or_default();
            let (outcome, error) = taken
                .map_or_else(|error| (FeedbackOutcome::Malformed, Some(error.to_string())), |outcome| (outcome, None));
            record.handle_feedback(index, outcome);
            heard.push(Heard { request: excerpt(&request), outcome, error });
        }
        let state = self.state.borrow();
        if let Some(Learning { learner, .. }) = state.learners.get(&index) {
            record.handle_weights(index, &names(steps), &learner.weights());
        }
        Ok(heard)
    }

    /// The ticket of the request that is meant; `None` if none had these inputs.
    fn ticket_of(&self, client: Client, which: Which) -> Result<Option<String>, InferError> {
        match which {
            Which::Ticket(ticket) if ticket.is_empty() => {
                Err(invalid("request", "none", "what the answer's parameter 'feedback' says, or inputs"))
            }
            Which::Ticket(ticket) => Ok(Some(ticket)),
            Which::Inputs(question) => {
                let ticket = self.state.borrow().asked.get(&(client, question?)).copied();
                Ok(ticket.map(|ticket| self.told_ticket(ticket)))
            }
        }
    }

    fn told_ticket(&self, ticket: u64) -> String {
        format!("{:016x}-{ticket}", self.life)
    }

    /// Whether answers wait for feedback at all.
    pub(crate) fn joins(&self) -> bool {
        self.bytes_max > 0
    }

    /// What becomes of one item.
    fn take(
        &self,
        (now, client): (Timestamp, Client),
        (index, face): (usize, &Rc<Model>),
        item: &Item,
    ) -> Result<FeedbackOutcome, InferError> {
        let mut state = self.state.borrow_mut();
        let State { learners, contexts, joins, tickets, .. } = &mut *state;
        let ticket = item
            .ticket
            .split_once('-')
            .and_then(|(life, number)| (life == format!("{:016x}", self.life)).then_some(number.parse::<u64>().ok()?));
        let Some(ticket) = ticket.filter(|ticket| ticket < tickets) else { return Ok(FeedbackOutcome::Unknown) };
        let Some(join) = joins.get_mut(&ticket).filter(|join| join.at + self.timeout > now) else {
            return Ok(FeedbackOutcome::Late);
        };
        if join.client != client {
            return Ok(FeedbackOutcome::Foreign);
        }
        // Of another ensemble, or one that was loaded anew since.
        if !Rc::ptr_eq(&join.ensemble, face) {
            return Ok(FeedbackOutcome::Unknown);
        }
        let losses = join.losses(item)?;
        let digest = item.digest();
        if let Some(heard) = join.heard {
            let outcomes = [FeedbackOutcome::Contradictory, FeedbackOutcome::Repeated];
            return Ok(outcomes[usize::from(heard == digest)]);
        }
        let known = learners.get_mut(&index).filter(|known| known.is_of(face));
        let Some(Learning { learner, .. }) = known else { return Ok(FeedbackOutcome::Unknown) };
        let observed = match &join.context {
            Some(place) => {
                let observed = contexts.observe(now, place, (join.request, join.probability), &losses);
                self.wake.notify_one();
                observed
            }
            None => learner.observe(join.request, join.probability, &losses),
        };
        match observed {
            Ok(()) => {
                join.heard = Some(digest);
                Ok(FeedbackOutcome::Counted)
            }
            Err(Unheard::Old) => Ok(FeedbackOutcome::Late),
            Err(error @ (Unheard::NoLoss | Unheard::NotLearning)) => Err(InferError::Invalid(error.to_string())),
        }
    }
}

impl Learning {
    /// Whether the ensemble has not been loaded anew since.
    fn is_of(&self, face: &Rc<Model>) -> bool {
        Rc::ptr_eq(&self.of, face)
    }
}

impl InContext {
    /// What its client is told.
    fn told(&self) -> &'static str {
        match self {
            Self::Own(_, false) => "current",
            Self::Own(_, true) => "stale",
            Self::Common => "common",
        }
    }
}

impl State {
    fn drop_oldest(&mut self) {
        let Some((ticket, join)) = self.joins.pop_first() else { return };
        self.bytes -= join.bytes;
        // A later one of the same question has taken its place.
        if let Some(question) = join.question.map(|question| (join.client, question))
            && self.asked.get(&question) == Some(&ticket)
        {
            self.asked.remove(&question);
        }
    }
}

impl Kept {
    fn of(kind: &OutputKind, data: &[u8]) -> Self {
        match kind.agreement {
            Agreement::Argmax => {
                let rows = data.chunks(kind.row_bytes.max(1));
                Self::Classes(rows.map(|row| kind.class(row) as u32).collect())
            }
            Agreement::Equal | Agreement::Within(_) => Self::Rows(data.into()),
        }
    }

    fn bytes(&self) -> usize {
        mem::size_of::<Self>()
            + match self {
                Self::Classes(classes) => mem::size_of_val(&classes[..]),
                Self::Rows(rows) => rows.len(),
            }
    }
}

impl Join {
    /// What part of the rows and outputs of an item each member predicted wrongly.
    fn losses(&self, item: &Item) -> Result<Vec<Option<f64>>, InferError> {
        let Some((_, selection)) = selection_of(&self.ensemble) else { return Ok(Vec::new()) };
        let kinds = outputs_of(selection, &self.ensemble, self.rows);
        for (output, data) in &item.outputs {
            let tensor = &self.ensemble.outputs[*output];
            let is_class = kinds.outputs[*output].agreement == Agreement::Argmax;
            let expected = self.rows * if is_class { 1 } else { tensor.elements() };
            if data.len() != expected {
                let key = format!("outputs['{}'].data", tensor.name);
                let of = if is_class { "classes, one a row" } else { "elements, those of all rows" };
                return Err(invalid(&key, data.len(), format_args!("{expected} {of}")));
            }
        }
        let loss = |prediction: &Vec<Kept>| {
            let lost = |(output, data): &(usize, Vec<f64>)| {
                wrong_rows(&kinds.outputs[*output], &prediction[*output], data, self.rows)
            };
            let wrong: usize = item.outputs.iter().map(lost).sum();
            wrong as f64 / (self.rows * item.outputs.len()) as f64
        };
        Ok(self.predictions.iter().map(|prediction| prediction.as_ref().map(loss)).collect())
    }
}

/// How many rows of a prediction are not what would have been right.
fn wrong_rows(kind: &OutputKind, kept: &Kept, right: &[f64], rows: usize) -> usize {
    match kept {
        Kept::Classes(classes) => {
            classes.iter().zip(right).filter(|(class, right)| f64::from(**class) != **right).count()
        }
        Kept::Rows(data) => {
            let eps = if let Agreement::Within(eps) = kind.agreement { eps } else { 0.0 };
            let elements = right.len() / rows.max(1);
            let row_of = |row: usize| &data[row * kind.row_bytes..(row + 1) * kind.row_bytes];
            let is_right = |row: usize| {
                let right = &right[row * elements..(row + 1) * elements];
                kind.numbers(row_of(row)).zip(right).all(|(number, right)| (number - right).abs() <= eps)
            };
            (0..rows).filter(|row| !is_right(*row)).count()
        }
    }
}

impl Told {
    /// The list that a body of JSON brings, where inputs (and the context) of an item are such a question.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn all_of(
        body: &Settings,
        question: impl Fn(&Value) -> Result<Question, InferError>,
    ) -> Result<Vec<Self>, InferError> {
        let items = body.get("feedback").and_then(Value::as_array);
        let found = || body.get("feedback").map_or("none", |_| "something else");
        items
            .map(|items| items.iter().map(|item| Self::of(item, &question)).collect())
            .ok_or_else(|| invalid("feedback", found(), "a list"))
    }

    fn of(item: &Value, question: impl Fn(&Value) -> Result<Question, InferError>) -> Self {
        let ticket = item.get("request").and_then(Value::as_str).unwrap_or_default();
        let which = Which::new(ticket.to_owned(), item.get("inputs").map(|_| question(item)));
        let outputs = item.get("outputs").and_then(Value::as_array).ok_or_else(|| {
            let found = item.get("outputs").map_or_else(|| "none".to_owned(), |value| excerpt(&value.to_string()));
            invalid("outputs", found, "a list of outputs, each with its name and data")
        });
        let output = |output: &Value| {
            let name = output.get("name").and_then(Value::as_str).unwrap_or_default();
            let number =
                |value: &Value| value.as_f64().or_else(|| value.as_bool().map(|flag| f64::from(u8::from(flag))));
            let data = output.get("data").and_then(Value::as_array);
            let data = data.and_then(|data| data.iter().map(number).collect::<Option<Vec<_>>>());
            let found = || output.get("data").map_or_else(|| "none".to_owned(), |value| excerpt(&value.to_string()));
            let key = || format!("outputs['{}'].data", excerpt(name));
            Ok((name.to_owned(), data.ok_or_else(|| invalid(&key(), found(), "a list of numbers"))?))
        };
        Self { which, outputs: outputs.and_then(|outputs| outputs.iter().map(output).collect()) }
    }
}

impl Item {
    /// What a client says of outputs that the ensemble has, each once.
    fn of(face: &Model, ticket: Option<&str>, told: &[(String, Vec<f64>)]) -> Result<Self, InferError> {
        if told.is_empty() {
            return Err(invalid("outputs", "none", "a list of outputs, each with its name and data"));
        }
        let mut outputs: Vec<(usize, Vec<f64>)> = Vec::with_capacity(told.len());
        for (name, data) in told {
            let index = face.outputs.iter().position(|tensor| tensor.name == *name);
            let index = index.filter(|index| outputs.iter().all(|(other, _)| other != index)).ok_or_else(|| {
                let names: Vec<&str> = face.outputs.iter().map(|tensor| tensor.name.as_str()).collect();
                let found = format!("'{}'", excerpt(name));
                invalid("outputs[].name", found, format_args!("once each of: {}", names.join(", ")))
            })?;
            if let Some(number) = data.iter().find(|number| !number.is_finite()) {
                return Err(invalid(&format!("outputs['{name}'].data"), number, "finite numbers"));
            }
            outputs.push((index, data.clone()));
        }
        outputs.sort_by_key(|(index, _)| *index);
        // No ticket is that of a request that has not been.
        Ok(Self { ticket: ticket.unwrap_or_default().to_owned(), outputs })
    }

    /// What it says would have been right, as one number.
    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (output, data) in &self.outputs {
            (output, data.len()).hash(&mut hasher);
            data.iter().for_each(|number| number.to_bits().hash(&mut hasher));
        }
        hasher.finish()
    }
}

fn selection_of(face: &Model) -> Option<(&[EnsembleStep], &Selection)> {
    let ensemble = face.ensemble()?;
    Some((&ensemble.steps, ensemble.selection.as_ref()?))
}

/// What sums of losses mean, as a number: whose they are, and how they came to be.
fn meaning(steps: &[EnsembleStep], selection: &Selection, block: u64) -> u64 {
    contexts::number_of(&format!("{} {block} {}", selection.policy.name(), names(steps).join(" ")))
}

fn outputs_of(selection: &Selection, face: &Model, rows: usize) -> Outputs {
    Outputs::of(selection, &face.outputs, rows, &vec![true; face.outputs.len()])
}

/// What steps are called: their model, and its version if that is named.
pub(crate) fn names(steps: &[EnsembleStep]) -> Vec<String> {
    let name = |step: &EnsembleStep| match &step.version {
        Some(version) => format!("{}/{version}", step.model),
        None => step.model.clone(),
    };
    steps.iter().map(name).collect()
}

#[cfg(test)]
mod tests;
