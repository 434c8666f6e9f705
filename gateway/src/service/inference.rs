//! A request for inference, from the moment its protocol has decoded it to its answer: resolved against its model, its
//! elements read, submitted, awaited.

use std::{future::ready, rc::Rc};

use ensembles::{Combining, Ended, Job, Room, Selected};
use frontend::{
    core::Core,
    desk::PendingReply,
    error::InferError,
    request::Place,
    rope::Rope,
    tasks::{Reply, Timing},
};
use proto::{Epoch, Span, Timestamp};
use repository::Model;

use super::{Service, cached::ClientAsks, shadows::Mirrored};
use crate::{
    access::Client,
    ahead::Ahead,
    budget::{Charge, NoRoom},
    image,
    metrics::Stage,
    pool::{AT_ONCE_BYTES_MAX, Pool},
    protocol::{
        self, InferRequest, Inputs, OutputChoice, OutputForm, Parameters, Pictures, Placed, Prepared, PreparedEnsemble,
        Resolved, Terms, Wanted,
    },
    recent::ReceivedAgo,
    regions::Part,
    selections::Joining,
    trace::OpenTrace,
};

/// Who has a request.
#[derive(Debug, Clone, Copy)]
pub struct Asker {
    /// Whom it is remembered of.
    pub client: Client,
    /// Whose shared memory it may name, if it may name any.
    pub regions_of: Option<Client>,
}

/// What is known of a request besides what it says.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Who has it.
    pub asker: Asker,
    /// The time that the client's protocol leaves for an answer.
    pub within: Option<Span>,
    /// When it began to come in.
    pub began: Timestamp,
    /// When all of it was there.
    pub received: Timestamp,
}

/// A request that is under way. Dropping it cancels the request.
pub struct Submitted<'a> {
    service: &'a Service,
    client: Client,
    under_way: UnderWay,
    /// Obeyed when it was admitted.
    admitted_in: Epoch,
    /// How long before that it came in.
    ago: ReceivedAgo,
    /// Its turn to ask its model, where others wait for the answer too.
    asking: Option<ClientAsks>,
    /// If it was submitted before its pictures were decoded.
    ahead: Option<Ahead>,
    /// What others are asked once it is answered.
    mirrored: Option<Mirrored>,
    /// Of an ensemble that learns.
    joining: Joining,
    model: Rc<Model>,
    id: Option<String>,
    outputs: Vec<OutputChoice>,
    /// Shared memory that its inputs came from stays registered until it ends.
    _parts: Vec<Part>,
}

/// A request that has been read, and not submitted yet.
pub(super) struct Given {
    pub(super) model: (usize, Rc<Model>),
    pub(super) terms: Terms,
    pub(super) inputs: Vec<(Place, Rope)>,
    pub(super) pictures: Option<Pictures>,
    /// How long ago it arrived, if that was long ago.
    pub(super) waited: Span,
}

/// What is waited for.
enum UnderWay {
    Model(PendingReply),
    Ensemble(Box<ensembles::Pending>),
    /// It has ended already.
    Ended(Box<Result<Reply, InferError>>),
}

/// Memory for what goes between the steps of an ensemble. It holds the request's bytes as well, which steps take that
/// come later.
pub(super) struct Between(pub(super) Charge, pub(super) Pool);

impl Room for Between {
    fn take(&self, bytes: usize) -> Result<(), InferError> {
        self.0.grow(bytes).map_err(no_room)
    }

    fn combine(&self, bytes: usize, job: Job) -> Combining<'_> {
        if bytes <= AT_ONCE_BYTES_MAX {
            return Box::pin(ready(Ok(job())));
        }
        let held = self.0.clone();
        let job = move || {
            let _held = held;
            job()
        };
        Box::pin(self.1.run(&self.0, job))
    }
}

impl UnderWay {
    async fn wait(self) -> Ended {
        match self {
            Self::Model(pending) => Ended::of(pending.wait().await),
            Self::Ensemble(pending) => Box::pin(pending.wait()).await,
            Self::Ended(result) => Ended::of(*result),
        }
    }
}

/// A request's end, to be encoded.
#[derive(Debug)]
pub struct Answer {
    /// Whose.
    pub model: Rc<Model>,
    /// As in the request.
    pub id: Option<String>,
    /// As in the request.
    pub outputs: Vec<OutputChoice>,
    /// What the backend answered.
    pub reply: Reply,
    /// What is said of how it was made.
    pub parameters: Parameters,
    /// Its number among those that have ended here ([`crate::recent::Recent`]).
    pub number: u64,
}

impl Service {
    /// Step 1: checks and admits a request for a model that was found. What is charged for the request's bytes can go
    /// when this returns: they are in slots then.
    ///
    /// # Errors
    /// Why it cannot be served.
    pub async fn admit(
        &self,
        (index, model): (usize, Rc<Model>),
        request: InferRequest,
        arrival: Arrival,
        charge: &Charge,
        trace: &mut OpenTrace,
    ) -> Result<Submitted<'_>, InferError> {
        if let Some(name) = protocol::application_name(&request.parameters) {
            self.record.handle_application(name);
        }
        let resolved = {
            let regions = self.regions.borrow();
            protocol::resolve(&model, request, arrival.within, regions.of(arrival.asker.regions_of))
        };
        let Resolved { inputs: Inputs { placed, pictures }, terms } = resolved?;
        let inputs = self.read(placed, charge).await?;
        let mut given = Given { model: (index, model), terms, inputs, pictures, waited: Span::ZERO };
        let answers = self.answers();
        let Some(question) = answers.question(given.asked(), charge).await? else {
            return self.begin(given, arrival, charge, trace, None).await;
        };
        let (turn, waited) = answers.turn((index, given.terms.slo()), question, charge).await?;
        given.waited = waited;
        match turn {
            Ok(asking) => self.begin(given, arrival, charge, trace, Some(asking)).await,
            Err(reply) => {
                let ended = UnderWay::Ended(Box::new(Ok(reply)));
                let Given { model: (_, model), terms, .. } = given;
                Ok(self.submitted((model, ended), (self.desk.now(), &arrival), terms.into_answered()))
            }
        }
    }

    /// Begins with a request that is not answered otherwise.
    async fn begin(
        &self,
        Given { model: (index, model), terms, mut inputs, pictures, mut waited }: Given,
        arrival: Arrival,
        charge: &Charge,
        trace: &mut OpenTrace,
        asking: Option<ClientAsks>,
    ) -> Result<Submitted<'_>, InferError> {
        if let Some(Pictures { place, pictures }) = pictures {
            let is_ready = |core: &Core| core.is_model_ready(core.models().get(index));
            if model.ensemble().is_none()
                && self.desk.with_core(is_ready)
                && let Some(mut ahead) = self.ahead.may_go(index, &model, &self.pool)
            {
                let prepared = terms.ahead(index, place.rows, waited);
                let submitted = self.submit(model, prepared, arrival, charge, trace);
                let submitted = submitted.inspect_err(|_| ahead.handle_settled())?;
                let submitted = Submitted { asking, ..submitted };
                return Box::pin(submitted.decoding((pictures, ahead, index), charge, trace)).await;
            }
            let arrived = self.desk.now();
            let data = Box::pin(self.decode((index, &model), pictures, charge, trace)).await?;
            inputs.push((place, data));
            // Symphony, section 5.3: the deadline counts from the arrival, whenever a picture is decoded.
            waited += self.desk.now() - arrived;
        }
        let submitted = if model.ensemble().is_some() {
            let room = Box::new(Between(charge.clone(), self.pool.clone()));
            let known = self.answers().known_to(charge);
            let client = Some(charge.account().id().into());
            let asker = (self.desk.now(), arrival.asker.client, terms.context());
            let chosen = self.selections.choose(&self.record, (index, &model), asker);
            let (choice, context) = chosen.map_or((None, None), |chosen| (Some(chosen.choice), chosen.context));
            let question = self.feedback_question((index, &model), &inputs, terms.context());
            let joining = Joining { context, question };
            let mirrored = Mirrored::of(choice.as_ref(), (index, &model), terms.application(), &inputs, charge);
            let prepared = terms.for_ensemble((index, model), (inputs, waited), (client, room, known), choice);
            Submitted { mirrored, joining, ..self.submit_ensemble(prepared, arrival, trace)? }
        } else {
            let mut prepared = terms.with(&model, index, inputs)?;
            prepared.checked.waited = waited;
            self.submit(model, prepared, arrival, charge, trace)?
        };
        Ok(Submitted { asking, ..submitted })
    }

    /// Reads the elements of inputs; where they are many, in the pool.
    async fn read(&self, inputs: Vec<Placed>, charge: &Charge) -> Result<Vec<(Place, Rope)>, InferError> {
        let unread: usize = inputs.iter().map(Placed::unread_bytes).sum();
        let room: usize = inputs.iter().map(Placed::read_bytes_max).sum();
        let read = move || inputs.into_iter().map(Placed::read).collect();
        if unread <= AT_ONCE_BYTES_MAX {
            return read();
        }
        charge.grow(room).map_err(no_room)?;
        let held = charge.clone();
        let read = move || {
            let _held = held;
            read()
        };
        self.pool.run(charge, read).await?
    }

    fn submit(
        &self,
        model: Rc<Model>,
        Prepared { id, mut checked, outputs, parts }: Prepared,
        arrival: Arrival,
        charge: &Charge,
        trace: &mut OpenTrace,
    ) -> Result<Submitted<'_>, InferError> {
        checked.client = Some(charge.account().id().into());
        let now = self.desk.now();
        let is_it = |core: &Core| Rc::ptr_eq(&core.models().get(checked.model).model, &model);
        let pending = match self.desk.with_core(is_it) {
            true => self.desk.submit(&checked),
            false => Err(InferError::LoadedAnew { model: model.name.clone() }),
        };
        let pending = pending.inspect_err(|error| trace.failed(error))?;
        Ok(self.submitted((model, UnderWay::Model(pending)), (now, &arrival), (id, outputs, parts)))
    }

    fn submit_ensemble(
        &self,
        PreparedEnsemble { id, request, outputs, parts }: PreparedEnsemble,
        arrival: Arrival,
        trace: &mut OpenTrace,
    ) -> Result<Submitted<'_>, InferError> {
        let (now, model) = (self.desk.now(), Rc::clone(&request.model.1));
        let pending = ensembles::submit(&self.desk, request).inspect_err(|error| trace.failed(error))?;
        let under_way = UnderWay::Ensemble(Box::new(pending));
        Ok(self.submitted((model, under_way), (now, &arrival), (id, outputs, parts)))
    }

    /// What is under way since `now`, for a request that arrived so.
    fn submitted(
        &self,
        (model, under_way): (Rc<Model>, UnderWay),
        (now, arrival): (Timestamp, &Arrival),
        (id, outputs, parts): Wanted,
    ) -> Submitted<'_> {
        Submitted {
            service: self,
            client: arrival.asker.client,
            under_way,
            admitted_in: self.epoch(),
            ago: ReceivedAgo { began: now - arrival.began, ended: now - arrival.received },
            asking: None,
            ahead: None,
            mirrored: None,
            joining: Joining::default(),
            model,
            id,
            outputs,
            _parts: parts,
        }
    }

    /// What is said of an answer that was made of several, and counted.
    fn told_of(
        &self,
        client: Client,
        model: &Rc<Model>,
        result: &Result<Reply, InferError>,
        of: (&Selected, Joining),
    ) -> Parameters {
        // One that was loaded anew meanwhile is another one.
        let found = self.find(&model.name, Some(&model.version)).ok().filter(|(_, found)| Rc::ptr_eq(found, model));
        let index = found.map(|(index, _)| index);
        let (now, rows) = (self.desk.now(), result.as_ref().map_or(0, |reply| reply.rows));
        let ended = (rows, result.is_ok());
        self.selections.handle_ended(&self.record, (now, client), (index, model), ended, of)
    }

    /// The epoch that is obeyed, or was obeyed last.
    fn epoch(&self) -> Epoch {
        self.desk.with_core(|core| core.takeovers().epoch)
    }

    /// What the model takes instead of these pictures.
    async fn decode(
        &self,
        (index, model): (usize, &Model),
        pictures: Vec<Rope>,
        charge: &Charge,
        trace: &mut OpenTrace,
    ) -> Result<Rope, InferError> {
        let began = self.desk.now();
        let mut data = Rope::default();
        let pipeline = model.image.as_ref().expect("only models that have one take pictures");
        for picture in pictures {
            let tensor = model.inputs[pipeline.input].clone();
            data.push(image::decoded(&self.pool, charge, pipeline.clone(), tensor, picture).await?.into());
        }
        self.record.observe(index, Stage::Preprocess, self.desk.now() - began);
        trace.stage(Stage::Preprocess, began);
        Ok(data)
    }
}

impl Submitted<'_> {
    /// Decodes its pictures, unless it ends before (Symphony, section 4.3).
    async fn decoding(
        mut self,
        (pictures, mut ahead, index): (Vec<Rope>, Ahead, usize),
        charge: &Charge,
        trace: &mut OpenTrace,
    ) -> Result<Self, InferError> {
        let model = Rc::clone(&self.model);
        let UnderWay::Model(pending) = &mut self.under_way else { unreachable!("no ensemble goes ahead") };
        let decoded = {
            let decoding = self.service.decode((index, &model), pictures, charge, trace);
            tokio::select! {
                biased;
                ended = pending.ended() => Err(ended),
                decoded = decoding => Ok(decoded),
            }
        };
        match decoded {
            Ok(Err(error)) => {
                pending.fail(&error);
                return Err(error);
            }
            Ok(Ok(data)) => {
                pending.give_inputs(&[data]);
                ahead.handle_settled();
            }
            Err(ended) => self.under_way = UnderWay::Ended(Box::new(ended)),
        }
        self.ahead = Some(ahead);
        Ok(self)
    }

    /// Step 10: waits for the answer; outputs that go to shared memory are there when this returns.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn wait(self, trace: &mut OpenTrace) -> Result<Answer, InferError> {
        let Self { service, client, under_way, admitted_in, ago, asking, ahead, mirrored, joining, .. } = self;
        let Self { model, id, outputs, _parts, .. } = self;
        let Ended { result, steps, selected } = under_way.wait().await;
        match (asking, &result) {
            (Some(asking), Ok(reply)) => asking.answered(reply),
            // It is the turn of somebody who waits.
            (asking, _) => drop(asking),
        }
        if let Some(ahead) = ahead {
            ahead.handle_ended(&result);
        }
        match &result {
            // Nobody was asked.
            Ok(reply) if reply.timing.is_of_cache() => {}
            Ok(reply) if steps.is_empty() => trace.answered([&reply.timing]),
            Ok(_) => {
                let ran = steps.iter().filter_map(|step| step.ended.as_ref()?.as_ref().ok());
                trace.answered(ran.filter(|timing| !timing.is_of_cache()));
            }
            Err(error) => trace.failed(error),
        }
        let outcome = result.as_ref().map(|reply| (reply.timing, ago));
        let epochs = [admitted_in, service.epoch()];
        let number = service.recent.borrow_mut().push((client, id.as_deref()), &model.name, epochs, outcome, &steps);
        let parameters =
            selected.as_ref().map(|selected| service.told_of(client, &model, &result, (selected, joining)));
        let reply = result?;
        if let (Some(mirrored), Some(selected)) = (mirrored, selected) {
            service.shadows.begin(&service.means(), mirrored, (reply.rows, &steps, &selected));
        }
        protocol::check_classes(&model, &outputs, &reply)?;
        for OutputChoice { index, form, classes: _ } in &outputs {
            if let OutputForm::Region(part) = form {
                part.write(&reply.outputs[*index])?;
            }
        }
        if service.tracing.is_none() && service.tracer.borrow_mut().sample(&model.name) {
            let id = id.as_deref().unwrap_or_default();
            match &service.trace_file {
                Some(file) => file.write((number, id), &model, &reply.timing),
                None => tracing::info!(model = model.name, id, timing = timing_text(&reply.timing), "trace"),
            }
        }
        let parameters = parameters.unwrap_or_default();
        Ok(Answer { model, id, outputs, reply, parameters, number })
    }
}

/// Where the time went, in whole microseconds since admission, for the row that came last: `queued` by the scheduler,
/// `due` from then on (held back until then), `granted` a GPU, `planned` and `fetched` at the backend, execution
/// `started` (planned for `exec_at`) and `finished`, `answered` here, and the `deadline`, if it had one; then the batch
/// it ran in and `backend:gpu`. Where nobody was asked, `cache` and when that was known.
#[must_use]
pub fn timing_text(timing: &Timing) -> String {
    let since = |at_ns: i64| (at_ns - timing.admitted_at.0) / 1000;
    let stamps = &timing.stamps;
    let mut text = String::with_capacity(192);
    let mut digits = itoa::Buffer::new();
    if timing.is_of_cache() {
        return format!("cache;answered={}", since(timing.answered_at.0));
    }
    for (name, value) in [
        ("queued=", since(stamps.queued_at_ns)),
        (";due=", since(stamps.due_at_ns)),
        (";granted=", since(stamps.granted_at_ns)),
        (";planned=", since(stamps.planned_at_ns)),
        (";fetched=", since(stamps.fetched_at_ns)),
        (";exec_at=", since(stamps.exec_at_ns)),
        (";started=", since(stamps.started_at_ns)),
        (";finished=", since(stamps.finished_at_ns)),
        (";answered=", since(timing.answered_at.0)),
        (";deadline=", since(timing.deadline.0)),
        (";batch=", timing.batch_size.into()),
        (";gpu=", timing.backend.0.into()),
        (":", timing.gpu.into()),
    ] {
        if name == ";deadline=" && timing.deadline == Timestamp::NEVER {
            continue;
        }
        text.push_str(name);
        text.push_str(digits.format(value));
    }
    text
}

/// What a request would become finds no room.
pub(crate) fn no_room(full: NoRoom) -> InferError {
    InferError::MemoryFull(format!("the request: {full}"))
}
