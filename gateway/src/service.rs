//! What the server can be asked, whatever the protocol: REST and gRPC each turn their requests into these calls and
//! the answers into their replies. Metadata is answered as the messages of gRPC, of which REST writes the JSON.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    rc::Rc,
    time::{Duration, SystemTime},
};

use frontend::{
    core::Core,
    desk::Desk,
    error::{InferError, invalid},
    excerpt,
    models::ServedModel,
};
use hyper::HeaderMap;
use proto::{Span, Timestamp, frontend_to_scheduler::ModelChange, scheduler_to_frontend::ModelState};
use repository::{Configuration, Ensemble, Model, Tensor};

use crate::{
    ahead::Gates,
    api::{
        ModelMetadataResponse, ModelStatistics, RepositoryIndexResponse, ServerMetadataResponse,
        model_metadata_response::TensorMetadata, repository_index_response::ModelIndex,
    },
    budget::Charge,
    cache::{Cache, Digester},
    config::{DEFAULT_SERVER_NAME, Limits, ModelControlMode},
    loads,
    pool::Pool,
    recent::Recent,
    record::Record,
    regions::AllRegions,
    selections::Selections,
    server::BodyMax,
    settings::{LogSettings, Settings, Tracer},
    trace::{OpenTrace, TraceContext, Tracing},
    trace_file::TraceFile,
};

use shadows::Shadows;

pub(crate) use inference::no_room;
pub use inference::{Answer, Arrival, Asker, Submitted, timing_text};

mod cached;
pub(crate) mod feedback;
mod inference;
mod shadows;

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
    /// What ensembles of models of one task have learned.
    pub selections: Selections,
    shadows: Shadows,
    /// Answers that are kept.
    pub cache: Rc<Cache>,
    digester: Digester,
    tracer: RefCell<Tracer>,
    tracing: Option<Rc<Tracing>>,
    trace_file: Option<TraceFile>,
    log: RefCell<LogSettings>,
    set_log_level: Option<SetLogLevel>,
    wall_clock: fn() -> SystemTime,
    server_name: String,
    control_mode: ModelControlMode,
    loads: Option<loads::Intake>,
    ready_with: Option<Vec<String>>,
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
            selections: Selections::new(0, (0, Span::ZERO), 0),
            shadows: Shadows::new(),
            cache: Cache::new(0),
            digester: Digester::new([0; 16]),
            tracer: RefCell::default(),
            tracing: None,
            trace_file: None,
            log: RefCell::default(),
            set_log_level,
            wall_clock,
            server_name: DEFAULT_SERVER_NAME.to_owned(),
            control_mode: ModelControlMode::default(),
            loads: None,
            ready_with: None,
        }
    }

    /// The same, ready when each of these models is (`*`: all), or when any is.
    #[must_use]
    pub fn ready_with(self, models: Option<Vec<String>>) -> Self {
        Self { ready_with: models, ..self }
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

    /// The same, and answers are kept of models that say so: so many bytes, under digests with this secret.
    #[must_use]
    pub fn caching(self, bytes_max: usize, secret: [u8; 16]) -> Self {
        Self { cache: Cache::new(bytes_max), digester: Digester::new(secret), ..self }
    }

    /// The same, where ensembles learn, as these say.
    #[must_use]
    pub fn learning(self, selections: Selections) -> Self {
        Self { selections, ..self }
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

    /// Whether requests can be taken: for some model, or for those that the configuration names.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let is_ready = |core: &Core| match &self.ready_with {
            None => core.is_ready(),
            Some(models) => core.is_ready_with(models),
        };
        !self.is_draining.get() && self.desk.with_core(|core| is_ready(core) && !core.is_drained())
    }

    /// Whether requests for a model can be taken.
    ///
    /// # Errors
    /// If there is no such model or version.
    pub fn is_model_ready(&self, model: &str, version: Option<&str>) -> Result<bool, InferError> {
        self.desk.with_model(model, version, |_, served, ready| {
            // One that has been replaced is served until the next one answers, and is not told of by its number.
            let is_meant = version.is_none() || served.is_listed();
            ready && is_meant && !self.is_draining.get()
        })
    }

    /// From now on nothing is ready.
    pub(crate) fn set_draining(&self) {
        self.is_draining.set(true);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.get()
    }

    /// Loads or unloads a model on every backend that may host it; as in Triton, with an ensemble its members that are
    /// not ready are loaded, and are unloaded if that is asked for, as far as the client `may_change` them.
    ///
    /// # Errors
    /// If a parameter is not known, or why nothing was changed.
    pub async fn change_model(
        &self,
        to: ModelChange,
        (model, parameters): (&str, loads::Parameters),
        charge: Option<Charge>,
        may_change: impl Fn(&str) -> bool,
    ) -> Result<(), InferError> {
        if self.control_mode != ModelControlMode::Explicit {
            return Err(InferError::Invalid(NOT_EXPLICIT.to_owned()));
        }
        let asked = parameters.asked(to, model)?.with_weights(|weights| self.with_weights(model, weights))?;
        if to == ModelChange::Load {
            check_loadable(model)?;
        }
        let with_members = to == ModelChange::Load || asked.with_dependents;
        // They stay until all who serve them hold them, too.
        let (brought, _held) = asked.brought(model, self.loads.as_ref(), charge).await?;
        self.desk.change_model(to, model, brought).await?;
        let members = if with_members { self.members_to_change(to, model) } else { Vec::new() };
        for member in members.iter().filter(|member| may_change(member)) {
            self.desk.change_model(to, member, None).await?;
        }
        Ok(())
    }

    /// The configuration that an ensemble has, with other weights.
    fn with_weights(&self, model: &str, weights: &str) -> Result<String, InferError> {
        let configuration = self.find(model, None)?.1.configuration.with_weights(weights);
        let unweighted = || invalid("weights", excerpt(model), "an ensemble whose selection is weighted or canary");
        let configuration = configuration.ok_or_else(unweighted)?;
        Ok(serde_json::to_string(&configuration).expect("it has text for keys"))
    }

    /// Members of an ensemble, each once, that are not as this change would make them.
    fn members_to_change(&self, to: ModelChange, model: &str) -> Vec<String> {
        self.desk.with_core(|core| {
            let models = core.models();
            let face = models.find(model, None).map(|index| &models.get(index).model);
            let asked = face.ok().and_then(|face| face.ensemble()).into_iter().flat_map(Ensemble::asked);
            let is_loaded = |(name, version): &(&str, Option<&str>)| {
                models.member(name, *version).is_some_and(|(_, member)| core.is_model_ready(member))
            };
            let to_change = asked.filter(|asked| is_loaded(asked) != (to == ModelChange::Load));
            let names: BTreeSet<&str> = to_change.map(|(name, _)| name).collect();
            names.into_iter().map(str::to_owned).collect()
        })
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
                let against = core.models().reason_against(&served.model).map(str::to_owned);
                let why = |otherwise: &str| match served.is_ensemble() {
                    true => {
                        core.reason_against_ensemble(served).unwrap_or_else(|| "there is no scheduler now".to_owned())
                    }
                    false => against.unwrap_or_else(|| otherwise.to_owned()),
                };
                let (state, reason) = match served.state {
                    _ if served.is_listed() && core.is_model_ready(served) => ("READY", String::new()),
                    ModelState::Loading => ("LOADING", String::new()),
                    ModelState::Unloading => ("UNLOADING", String::new()),
                    ModelState::Unloaded => ("UNAVAILABLE", why("unloaded")),
                    ModelState::Serving => ("UNAVAILABLE", why("no backend hosts it now")),
                };
                ModelIndex {
                    name: served.model.name.clone(),
                    version: served.model.version.clone(),
                    state: state.to_owned(),
                    reason,
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
