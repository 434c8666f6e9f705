//! What the server can be asked, whatever the protocol: REST and gRPC each turn their requests into these calls and
//! the answers into their replies. Metadata is answered as the messages of gRPC, of which REST writes the JSON.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    time::{Duration, SystemTime},
};

use frontend::{
    desk::{Desk, PendingReply},
    error::InferError,
    excerpt,
    models::ServedModel,
    rope::Rope,
    tasks::{Reply, Timing},
};
use hyper::HeaderMap;
use proto::{Epoch, Span, Timestamp, frontend_to_scheduler::ModelChange, scheduler_to_frontend::ModelState};
use repository::{Configuration, Model, Tensor};

use crate::{
    access::Client,
    ahead::{Ahead, Gates},
    api::{
        ModelMetadataResponse, ModelStatistics, RepositoryIndexResponse, ServerMetadataResponse,
        model_metadata_response::TensorMetadata, repository_index_response::ModelIndex,
    },
    budget::{Charge, NoRoom},
    config::{DEFAULT_SERVER_NAME, Limits, ModelControlMode},
    image, loads,
    metrics::Stage,
    pool::{AT_ONCE_BYTES_MAX, Pool},
    protocol::{
        self, InferRequest, InputData, JsonElements, OutputChoice, OutputForm, Pictures, Prepared, RequestInput,
        Tensors, json,
    },
    recent::Recent,
    record::Record,
    regions::{AllRegions, Part},
    server::BodyMax,
    settings::{LogSettings, Settings, Tracer},
    trace::{OpenTrace, TraceContext, Tracing},
    trace_file::TraceFile,
};

/// Where Linux keeps POSIX shared memory.
const SHARED_MEMORY_FOLDER: &str = "/dev/shm";

/// As Triton says it.
const NOT_EXPLICIT: &str = "explicit model load / unload is not allowed if polling is enabled: expected the key \
                            model_control_mode of this frontend to be explicit";

/// What the protocol calls its extensions that are served.
const EXTENSIONS: [&str; 11] = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "system_shared_memory",
    "statistics",
    "trace",
    "logging",
    "parameters",
    "classification",
    "schedule_policy",
];

/// Sets the level of the process's log, or says why it cannot.
pub type SetLogLevel = Box<dyn Fn(tracing::level_filters::LevelFilter) -> Result<(), String> + Send>;

/// Everything that clients can ask.
pub struct Service {
    /// The models and the way to the backends.
    pub desk: Rc<Desk>,
    /// What becomes of requests.
    pub record: Rc<Record>,
    /// Shared memory that clients have registered.
    pub regions: RefCell<AllRegions>,
    /// What became of the last requests.
    pub recent: RefCell<Recent>,
    is_draining: Cell<bool>,
    /// Takes apart what is large.
    pub pool: Pool,
    ahead: Gates,
    tracer: RefCell<Tracer>,
    tracing: Option<Rc<Tracing>>,
    trace_file: Option<TraceFile>,
    log: RefCell<LogSettings>,
    set_log_level: Option<SetLogLevel>,
    wall_clock: fn() -> SystemTime,
    server_name: String,
    control_mode: ModelControlMode,
    loads: Option<loads::Intake>,
}

/// Who has a request.
#[derive(Debug, Clone, Copy)]
pub struct Asker {
    /// Whom it is remembered of.
    pub client: Client,
    /// Whose shared memory it may name, if it may name any.
    pub regions_of: Option<Client>,
}

/// A request that is under way. Dropping it cancels the request.
pub struct Submitted<'a> {
    service: &'a Service,
    client: Client,
    pending: PendingReply,
    /// Obeyed when it was admitted.
    admitted_in: Epoch,
    /// It has ended already.
    ended: Option<Result<Reply, InferError>>,
    /// If it was submitted before its pictures were decoded.
    ahead: Option<Ahead>,
    model: Rc<Model>,
    id: Option<String>,
    outputs: Vec<OutputChoice>,
    /// Shared memory that its inputs came from stays registered until it ends.
    _parts: Vec<Part>,
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
    /// Its number among those that have ended here ([`Recent`]).
    pub number: u64,
}

impl Service {
    /// A service over this desk, whose observer is `record`. Without `set_log_level` the log is not the clients' to
    /// change.
    #[must_use]
    pub fn new(
        desk: Rc<Desk>,
        record: Rc<Record>,
        set_log_level: Option<SetLogLevel>,
        wall_clock: fn() -> SystemTime,
    ) -> Self {
        Self {
            desk,
            record,
            regions: RefCell::new(AllRegions::new(SHARED_MEMORY_FOLDER)),
            recent: RefCell::default(),
            is_draining: Cell::new(false),
            pool: Pool::default(),
            ahead: Gates::default(),
            tracer: RefCell::default(),
            tracing: None,
            trace_file: None,
            log: RefCell::default(),
            set_log_level,
            wall_clock,
            server_name: DEFAULT_SERVER_NAME.to_owned(),
            control_mode: ModelControlMode::default(),
            loads: None,
        }
    }

    /// The same, where models are loaded and unloaded by whom this says.
    #[must_use]
    pub fn controlled(self, control_mode: ModelControlMode) -> Self {
        Self { control_mode, ..self }
    }

    /// The same, where loads may bring files along.
    #[must_use]
    pub fn taking_files(self, intake: loads::Intake) -> Self {
        Self { loads: Some(intake), ..self }
    }

    /// What a request to load a model may be: as large as one for inference if loads may bring files along.
    #[must_use]
    pub fn load_max(&self, limits: &Limits) -> BodyMax {
        match self.loads {
            Some(_) if limits.body_bytes_max > BodyMax::OBJECT.bytes => BodyMax::infer(limits),
            Some(_) => BodyMax::OBJECT,
            None => BodyMax { key: " where loads bring no files (load_files)", ..BodyMax::OBJECT },
        }
    }

    /// The same, under the name that clients are to be told.
    #[must_use]
    pub fn named(self, server_name: impl Into<String>) -> Self {
        Self { server_name: server_name.into(), ..self }
    }

    /// The same, and traces go to a collector: of requests whose caller says nothing, one in `rate`.
    #[must_use]
    pub fn tracing(self, tracing: Rc<Tracing>, rate: u32) -> Self {
        Self { tracer: RefCell::new(Tracer::for_collector(rate)), tracing: Some(tracing), ..self }
    }

    /// The same, and one request in `rate` leaves a line in the file, or in the log if there is none.
    #[must_use]
    pub fn tracing_to(self, file: Option<TraceFile>, rate: u32) -> Self {
        let tracer = Tracer::for_file(file.as_ref().map(TraceFile::path), rate);
        Self { tracer: RefCell::new(tracer), trace_file: file, ..self }
    }

    /// Of which trace a request says that it is part; nothing where no collector wants to know. To be asked once it is
    /// known that the client may have a request at all.
    #[must_use]
    pub fn trace_context(&self, headers: &HeaderMap) -> Option<TraceContext> {
        self.tracing.as_ref().and_then(|_| TraceContext::of(headers))
    }

    /// The trace of a request for this model that came at `began`, if it is to be traced for a collector: as its caller
    /// says, or else as the settings do.
    #[must_use]
    pub fn trace(&self, context: Option<TraceContext>, model: &str, began: Timestamp) -> OpenTrace {
        let Some(tracing) = &self.tracing else { return OpenTrace::default() };
        let sampled = match &context {
            Some(context) => context.sampled,
            None => self.tracer.borrow_mut().sample(model),
        };
        // Whoever names no model may name it at length.
        if sampled { OpenTrace::new(tracing, context, &excerpt(model), began) } else { OpenTrace::default() }
    }

    /// A model and its index in the model table.
    ///
    /// # Errors
    /// If there is no such model or version.
    pub fn find(&self, model: &str, version: Option<&str>) -> Result<(usize, Rc<Model>), InferError> {
        self.desk.with_model(model, version, |index, served, _| (index, Rc::clone(&served.model)))
    }

    /// Step 1: checks and admits a request for a model that was found. `within` is the time that the client's protocol
    /// leaves for an answer. What is charged for the request's bytes can go when this returns: they are in slots then.
    ///
    /// # Errors
    /// Why it cannot be served.
    pub async fn admit(
        &self,
        (index, model): (usize, Rc<Model>),
        mut request: InferRequest,
        (within, asker): (Option<Span>, Asker),
        charge: &Charge,
        trace: &mut OpenTrace,
    ) -> Result<Submitted<'_>, InferError> {
        let (model, mut waited) = ((index, model), Span::ZERO);
        if let Some(name) = protocol::application_name(&request.parameters) {
            self.record.handle_application(name);
        }
        if let Some(pictures) = Pictures::take(&model.1, &mut request)? {
            let is_ready = |core: &frontend::core::Core| core.is_model_ready(core.models().get(index));
            if self.desk.with_core(is_ready)
                && let Some(mut ahead) = self.ahead.may_go(index, &model.1, &request, &self.pool)
            {
                let prepared = {
                    let regions = self.regions.borrow();
                    protocol::prepare_ahead(&model.1, index, request, within, regions.of(asker.regions_of))
                };
                let submitted =
                    prepared.and_then(|prepared| self.submit(model, (asker.client, charge), prepared, trace));
                let submitted = submitted.inspect_err(|_| ahead.handle_settled())?;
                return submitted.decoding((pictures, ahead, index), charge, trace).await;
            }
            let (arrived, at) = (self.desk.now(), pictures.at);
            let data = self.decode((index, &model.1), pictures, charge, trace).await?;
            request.inputs[at].data = Some(InputData::Bytes(data));
            // Symphony, section 5.3: the deadline counts from the arrival, whenever a picture is decoded.
            waited = self.desk.now() - arrived;
        }
        self.read_elements(&model.1, &mut request, charge).await?;
        self.read_parts(&model.1, &mut request, asker.regions_of, charge).await?;
        let prepared = protocol::prepare(&model.1, index, request, within, self.regions.borrow().of(asker.regions_of));
        let mut prepared = prepared.inspect_err(|error| trace.failed(error))?;
        prepared.checked.waited = waited;
        self.submit(model, (asker.client, charge), prepared, trace)
    }

    fn submit(
        &self,
        (index, model): (usize, Rc<Model>),
        (client, charge): (Client, &Charge),
        Prepared { id, mut checked, outputs, parts }: Prepared,
        trace: &mut OpenTrace,
    ) -> Result<Submitted<'_>, InferError> {
        checked.client = Some(charge.account().id().into());
        let is_it = |core: &frontend::core::Core| Rc::ptr_eq(&core.models().get(index).model, &model);
        let pending = match self.desk.with_core(is_it) {
            true => self.desk.submit(&checked),
            false => Err(InferError::LoadedAnew { model: model.name.clone() }),
        };
        let pending = pending.inspect_err(|error| trace.failed(error))?;
        let admitted_in = self.epoch();
        Ok(Submitted {
            service: self,
            client,
            pending,
            admitted_in,
            ended: None,
            ahead: None,
            model,
            id,
            outputs,
            _parts: parts,
        })
    }

    /// The epoch that is obeyed, or was obeyed last.
    fn epoch(&self) -> Epoch {
        self.desk.with_core(|core| core.takeovers().epoch)
    }

    /// What the model takes instead of these pictures.
    async fn decode(
        &self,
        (index, model): (usize, &Model),
        pictures: Pictures,
        charge: &Charge,
        trace: &mut OpenTrace,
    ) -> Result<Rope, InferError> {
        let began = self.desk.now();
        let mut data = Rope::default();
        let Pictures { pipeline, pictures, at: _ } = pictures;
        for picture in pictures {
            let tensor = model.inputs[pipeline.input].clone();
            data.push(image::decoded(&self.pool, charge, pipeline.clone(), tensor, picture).await?.into());
        }
        self.record.observe(index, Stage::Preprocess, self.desk.now() - began);
        trace.stage(Stage::Preprocess, began);
        Ok(data)
    }

    /// Reads a REST body, large ones in the pool. Numbers in it are not read yet.
    ///
    /// # Errors
    /// Why it is no request, or there is no room.
    pub async fn parse(
        &self,
        model: &Model,
        body: Rope,
        header_length: Option<usize>,
        charge: &Charge,
    ) -> Result<InferRequest, InferError> {
        let (json, binary) = json::split_body(body, header_length)?;
        let tensors = Tensors::of(model);
        if json.len() <= AT_ONCE_BYTES_MAX {
            return json::parse_request(&json.joined(), binary, tensors);
        }
        if json.pieces().len() > 1 {
            // Once more in one piece.
            charge.grow(json.len()).map_err(no_room)?;
        }
        // Names, and what the parser remembers of strings and of nesting.
        let room = charge.beside(json.len()).map_err(no_room)?;
        let parse = move || {
            let _room = room;
            json::parse_request(&json.joined(), binary, tensors)
        };
        self.pool.run(charge, parse).await?
    }

    /// Reads the numbers of a request with a large JSON body in the pool; those of others are read when it is
    /// submitted.
    ///
    /// # Errors
    /// Why they are not what the model takes, or there is no room.
    pub async fn read_elements(
        &self,
        model: &Model,
        request: &mut InferRequest,
        charge: &Charge,
    ) -> Result<(), InferError> {
        let json_bytes = |input: &RequestInput| match &input.data {
            Some(InputData::Json(json)) => json.len(),
            _ => 0,
        };
        if request.inputs.iter().map(json_bytes).sum::<usize>() <= AT_ONCE_BYTES_MAX {
            return Ok(());
        }
        let mut unread = Vec::new();
        for at in 0..request.inputs.len() {
            unread.extend(JsonElements::of_input(model, &request.inputs, at)?.map(|elements| (at, elements)));
        }
        charge.grow(unread.iter().map(|(_, elements)| elements.bytes_max()).sum()).map_err(no_room)?;
        let held = charge.clone();
        let read = move || {
            let _held = held;
            unread.into_iter().map(|(at, elements)| Ok((at, elements.read()?))).collect::<Result<Vec<_>, InferError>>()
        };
        for (at, bytes) in self.pool.run(charge, read).await?? {
            request.inputs[at].data = Some(InputData::Bytes(bytes.into()));
        }
        Ok(())
    }

    /// Reads what a request has in shared memory in the pool, if that is much; charged as what comes in a body is.
    async fn read_parts(
        &self,
        model: &Model,
        request: &mut InferRequest,
        regions_of: Option<Client>,
        charge: &Charge,
    ) -> Result<(), InferError> {
        let mut parts = Vec::new();
        for at in 0..request.inputs.len() {
            let part = protocol::part_of_input(model, &request.inputs, at, self.regions.borrow().of(regions_of))?;
            parts.extend(part.map(|part| (at, part)));
        }
        let bytes = parts.iter().map(|(_, part)| part.span().bytes as usize).sum();
        if bytes <= AT_ONCE_BYTES_MAX {
            return Ok(());
        }
        charge.grow(bytes).map_err(no_room)?;
        let held = charge.clone();
        let read = move || {
            let _held = held;
            let read = parts.into_iter().map(|(at, part)| part.read().map(|bytes| (at, (part, bytes))));
            read.collect::<Result<Vec<_>, InferError>>()
        };
        for (at, read) in self.pool.run(charge, read).await?? {
            request.inputs[at].read = Some(read);
        }
        Ok(())
    }

    /// Whether requests for some model can be taken.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.is_draining.get() && self.desk.with_core(frontend::core::Core::is_ready)
    }

    /// Whether requests for a model can be taken.
    ///
    /// # Errors
    /// If there is no such model or version.
    pub fn is_model_ready(&self, model: &str, version: Option<&str>) -> Result<bool, InferError> {
        self.desk.with_model(model, version, |_, _, ready| ready && !self.is_draining.get())
    }

    /// From now on nothing is ready.
    pub(crate) fn set_draining(&self) {
        self.is_draining.set(true);
    }

    /// Loads or unloads a model on every backend that may host it. `charge` is for the parameters' bytes.
    ///
    /// # Errors
    /// If a parameter is not known, or why nothing was changed.
    pub async fn change_model(
        &self,
        to: ModelChange,
        model: &str,
        parameters: loads::Parameters,
        charge: Option<Charge>,
    ) -> Result<(), InferError> {
        if self.control_mode != ModelControlMode::Explicit {
            return Err(InferError::Invalid(NOT_EXPLICIT.to_owned()));
        }
        let asked = parameters.asked(to, model)?;
        if to == ModelChange::Load {
            check_loadable(model)?;
        }
        // They stay until all who serve them hold them, too.
        let (brought, _held) = asked.brought(model, self.loads.as_ref(), charge).await?;
        self.desk.change_model(to, model, brought).await
    }

    /// Who we are.
    #[must_use]
    pub fn server_metadata(&self) -> ServerMetadataResponse {
        ServerMetadataResponse {
            name: self.server_name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: EXTENSIONS.map(str::to_owned).into(),
        }
    }

    /// What a model takes and gives, with its batch dimension if it has one.
    ///
    /// # Errors
    /// If there is no such model or version.
    pub fn model_metadata(&self, model: &str, version: Option<&str>) -> Result<ModelMetadataResponse, InferError> {
        let tensor = |is_batched: bool, tensor: &Tensor| TensorMetadata {
            name: tensor.name.clone(),
            datatype: tensor.datatype.name().to_owned(),
            shape: is_batched.then_some(-1).into_iter().chain(tensor.dims()).collect(),
        };
        let (index, model) = self.find(model, version)?;
        let versions = match version {
            Some(_) => vec![index],
            None => self.desk.with_core(|core| core.models().versions(&model.name).collect()),
        };
        let version_of = |index| self.desk.with_core(|core| core.models().get(index).model.version.clone());
        Ok(ModelMetadataResponse {
            name: model.name.clone(),
            versions: versions.into_iter().map(version_of).collect(),
            platform: model.configuration.platform(),
            inputs: model.inputs.iter().map(|input| tensor(model.is_batched, input)).collect(),
            outputs: model.outputs.iter().map(|output| tensor(model.is_batched, output)).collect(),
        })
    }

    /// A model's configuration as it is in effect, whatever its file left out.
    ///
    /// # Errors
    /// If there is no such model or version.
    pub fn model_config(&self, model: &str, version: Option<&str>) -> Result<Configuration, InferError> {
        self.desk.with_model(model, version, |_, served, _| served.model.configuration.clone())
    }

    /// What has become of the requests of a model, or of all.
    ///
    /// # Errors
    /// If there is no such model or version.
    pub fn statistics(&self, model: Option<&str>, version: Option<&str>) -> Result<Vec<ModelStatistics>, InferError> {
        let of = |index: usize, model: &Model| {
            let (report, last_at) =
                self.record.with_statistics(index, |statistics| (statistics.report(), statistics.last_at()));
            let last_inference = last_at.map_or(0, |at| self.epoch_millis((self.desk.now() - at).to_duration()));
            ModelStatistics { name: model.name.clone(), version: model.version.clone(), last_inference, ..report }
        };
        // Of a model without a version, all that are served.
        let indexes: Vec<usize> = match (model, version) {
            (Some(name), Some(_)) => vec![self.find(name, version)?.0],
            (Some(name), None) => {
                self.find(name, None)?;
                self.desk.with_core(|core| core.models().versions(name).collect())
            }
            (None, _) => self.desk.with_core(|core| core.models().sorted().map(|(index, _)| index).collect()),
        };
        let model_of = |index| self.desk.with_core(|core| Rc::clone(&core.models().get(index).model));
        Ok(indexes.into_iter().map(|index| of(index, &model_of(index))).collect())
    }

    /// All models of the repository, or those that are ready; also those that cannot be served, and why.
    #[must_use]
    pub fn repository_index(&self, ready_only: bool) -> RepositoryIndexResponse {
        self.desk.with_core(|core| {
            let entry = |served: &ServedModel| {
                let why = || core.models().reason_against(&served.model);
                let (state, reason) = match served.state {
                    _ if core.is_model_ready(served) => ("READY", ""),
                    ModelState::Loading => ("LOADING", ""),
                    ModelState::Unloading => ("UNLOADING", ""),
                    ModelState::Unloaded => ("UNAVAILABLE", why().unwrap_or("unloaded")),
                    ModelState::Serving => ("UNAVAILABLE", why().unwrap_or("no backend hosts it now")),
                };
                ModelIndex {
                    name: served.model.name.clone(),
                    version: served.model.version.clone(),
                    state: state.to_owned(),
                    reason: reason.to_owned(),
                }
            };
            let refused = core.models().refused().map(|(name, version, reason)| ModelIndex {
                name: name.to_owned(),
                version: version.to_owned(),
                state: "UNAVAILABLE".to_owned(),
                reason: reason.to_owned(),
            });
            let models = core.models().sorted().map(|(_, served)| entry(served)).chain(refused);
            let mut models: Vec<ModelIndex> = models.filter(|model| !ready_only || model.state == "READY").collect();
            let number = |model: &ModelIndex| model.version.parse::<u64>().unwrap_or_default();
            models.sort_by(|a, b| (&a.name, number(a)).cmp(&(&b.name, number(b))));
            RepositoryIndexResponse { models }
        })
    }

    /// The trace settings of a model, or of the server.
    ///
    /// # Errors
    /// If there is no such model.
    pub fn trace_settings(&self, model: Option<&str>) -> Result<Settings, InferError> {
        self.check_traceable(model)?;
        Ok(self.tracer.borrow().report(model))
    }

    /// Changes trace settings; see [`Tracer::change`].
    ///
    /// # Errors
    /// If there is no such model, or a setting is wrong.
    pub fn change_trace_settings(&self, model: Option<&str>, changes: &Settings) -> Result<Settings, InferError> {
        self.check_traceable(model)?;
        self.tracer.borrow_mut().change(model, changes)?;
        self.trace_settings(model)
    }

    /// How much is logged.
    #[must_use]
    pub fn log_settings(&self) -> Settings {
        self.log.borrow().report()
    }

    /// Changes how much is logged.
    ///
    /// # Errors
    /// If a setting is wrong, or the log is not the clients' to change.
    pub fn change_log_settings(&self, changes: &Settings) -> Result<Settings, InferError> {
        let new = self.log.borrow().changed(changes)?;
        let set_level = self.set_log_level.as_ref().ok_or_else(|| {
            InferError::Invalid("log settings: the log belongs to the program that this frontend is part of".to_owned())
        })?;
        set_level(new.level()).map_err(InferError::Invalid)?;
        *self.log.borrow_mut() = new;
        Ok(self.log_settings())
    }

    /// Whether a model of which trace settings are asked for or changed is there; as Triton says it.
    fn check_traceable(&self, model: Option<&str>) -> Result<(), InferError> {
        let Some(model) = model else { return Ok(()) };
        let unknown = |error| {
            InferError::NotFound(format!("Request for unknown model : {}: trace settings: {error}", excerpt(model)))
        };
        self.find(model, None).map(drop).map_err(unknown)
    }

    /// Milliseconds from 1970 to the instant that lies `ago` back.
    fn epoch_millis(&self, ago: Duration) -> u64 {
        let since = (self.wall_clock)().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.saturating_sub(ago).as_millis()).unwrap_or(u64::MAX)
    }
}

impl Submitted<'_> {
    /// Decodes its pictures, unless it ends before (Symphony, section 4.3).
    async fn decoding(
        mut self,
        (pictures, mut ahead, index): (Pictures, Ahead, usize),
        charge: &Charge,
        trace: &mut OpenTrace,
    ) -> Result<Self, InferError> {
        let model = Rc::clone(&self.model);
        let decoded = {
            let decoding = self.service.decode((index, &model), pictures, charge, trace);
            tokio::select! {
                biased;
                ended = self.pending.ended() => {
                    self.ended = Some(ended);
                    None
                }
                decoded = decoding => Some(decoded),
            }
        };
        match decoded {
            Some(Err(error)) => {
                self.pending.fail(&error);
                return Err(error);
            }
            Some(Ok(data)) => {
                self.pending.give_inputs(&[data]);
                ahead.handle_settled();
            }
            None => {}
        }
        self.ahead = Some(ahead);
        Ok(self)
    }

    /// Step 10: waits for the answer; outputs that go to shared memory are there when this returns.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn wait(self, trace: &mut OpenTrace) -> Result<Answer, InferError> {
        let Self { service, client, pending, admitted_in, ended, ahead, model, id, outputs, _parts } = self;
        let result = match ended {
            Some(result) => result,
            None => pending.wait().await,
        };
        if let Some(ahead) = ahead {
            ahead.handle_ended(&result);
        }
        match &result {
            Ok(reply) => trace.answered(&reply.timing),
            Err(error) => trace.failed(error),
        }
        let outcome = result.as_ref().map(|reply| reply.timing);
        let epochs = [admitted_in, service.epoch()];
        let number = service.recent.borrow_mut().push((client, id.as_deref()), &model.name, epochs, outcome);
        let reply = result?;
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
        Ok(Answer { model, id, outputs, reply, number })
    }
}

/// Where the time went, in whole microseconds since admission, for the row that came last: `queued` by the scheduler,
/// `due` from then on (held back until then), `granted` a GPU, `planned` and `fetched` at the backend, execution
/// `started` (planned for `exec_at`) and `finished`, `answered` here, and the `deadline`, if it had one; then the batch
/// it ran in and `backend:gpu`.
#[must_use]
pub fn timing_text(timing: &Timing) -> String {
    let since = |at_ns: i64| (at_ns - timing.admitted_at.0) / 1000;
    let stamps = &timing.stamps;
    let mut text = String::with_capacity(192);
    let mut digits = itoa::Buffer::new();
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

/// Checks a name that is to be a folder's. As Triton says it.
fn check_loadable(model: &str) -> Result<(), InferError> {
    let wrong = |text: &str| Err(InferError::Invalid(text.to_owned()));
    match model.trim() {
        "" => wrong("Model name cannot be empty. Please enter a valid name to deploy."),
        name if name.contains(['/', '\\']) || [".", ".."].contains(&name) => {
            let expected = "the name of a folder of the repository";
            let words = "model name must not contain path traversal characters";
            wrong(&format!("{words}: found '{}', expected {expected}", excerpt(model)))
        }
        _ => Ok(()),
    }
}

/// What a request would become finds no room.
pub(crate) fn no_room(full: NoRoom) -> InferError {
    InferError::MemoryFull(format!("the request: {full}"))
}
