//! Steps 1 and 10 in gRPC: the methods of `inference.GRPCInferenceService`. `framing` takes messages in; tonic frames,
//! encodes and compresses replies. They run on this thread, where the core is.

use std::{pin::Pin, rc::Rc, time::Duration};

use bytes::Bytes;
use frontend::InferError;
use hyper::{
    HeaderMap, Request, Response,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
};
use prost::Message;
use proto::{Span, Timestamp, frontend_to_scheduler::ModelChange, scheduler_to_frontend::DropReason};
use serde_json::Value;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, Sleep, sleep},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{
    Code, Status,
    body::Body,
    codec::{CompressionEncoding, EncodeBody, SingleMessageCompressionOverride},
    metadata::GRPC_CONTENT_TYPE,
};
use tonic_prost::ProstEncoder;

use crate::{
    access::{Client, Refusal, Scope},
    api::{
        InferParameter, LogSettingsRequest, LogSettingsResponse, ModelConfig, ModelConfigRequest, ModelConfigResponse,
        ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelReadyRequest, ModelReadyResponse,
        ModelStatisticsRequest, ModelStatisticsResponse, ModelStreamInferResponse, RepositoryIndexRequest,
        RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
        RepositoryModelUnloadResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
        ServerReadyRequest, ServerReadyResponse, SystemSharedMemoryRegisterRequest, SystemSharedMemoryRegisterResponse,
        SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse, SystemSharedMemoryUnregisterRequest,
        SystemSharedMemoryUnregisterResponse, TraceSettingRequest, TraceSettingResponse, infer_parameter,
        log_settings_request, log_settings_response, trace_setting_response,
    },
    budget::Charge,
    compression::Coding,
    metrics::{Cause, Stage},
    pool::AT_ONCE_BYTES_MAX,
    protocol::{
        InferRequest, messages,
        messages::outline::{Outline, OutlineError},
    },
    server::{BodyMax, Caller, IntakeError, Server},
    service::{Answer, Service, no_room},
    settings::Settings,
    trace::{OpenTrace, TraceContext},
};

use asks::Asks;
use framing::{Messages, message_coding};

mod asks;
mod framing;

/// Before a method's name in a path.
const SERVICE_PATH: &str = "/inference.GRPCInferenceService/";
/// Requests of one stream that are under way at once; more of them wait unread.
const STREAM_REQUESTS_MAX: usize = 64;
/// Of a message that is not for inference.
const MESSAGE_MAX: BodyMax = BodyMax { bytes: 64 << 10, key: "" };
/// Fields of a message that are looked at before that becomes the pool's work.
const FIELDS_AT_ONCE_MAX: usize = 4096;

/// Answers a request; what goes wrong is in the reply's `grpc-status`.
pub async fn answer(caller: Rc<Caller>, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let call = Call { caller: &caller, request };
    match path.strip_prefix(SERVICE_PATH).unwrap_or_default() {
        "ModelInfer" => infer(call).await,
        "ModelStreamInfer" => stream_infer(call).await,
        "ServerLive" => call.unary(|_, _: ServerLiveRequest| Ok(ServerLiveResponse { live: true })).await,
        "ServerReady" => {
            call.unary(|service, _: ServerReadyRequest| Ok(ServerReadyResponse { ready: service.is_ready() })).await
        }
        "ModelReady" => call.unary(model_ready).await,
        "ServerMetadata" => call.unary(|service, _: ServerMetadataRequest| Ok(service.server_metadata())).await,
        "ModelMetadata" => {
            call.unary(|service, of: ModelMetadataRequest| service.model_metadata(&of.name, given(&of.version))).await
        }
        "ModelConfig" => call.unary(model_config).await,
        "ModelStatistics" => call.unary(model_statistics).await,
        "RepositoryIndex" => {
            call.unary(|service, of: RepositoryIndexRequest| Ok(service.repository_index(of.ready))).await
        }
        "RepositoryModelLoad" => call.unary_later(load_model).await,
        "RepositoryModelUnload" => call.unary_later(unload_model).await,
        "SystemSharedMemoryStatus" => call.unary(|service, of| region_status(service, caller.client(), of)).await,
        "SystemSharedMemoryRegister" => call.unary(|service, of| register_region(service, caller.client(), of)).await,
        "SystemSharedMemoryUnregister" => {
            call.unary(|service, of| unregister_region(service, caller.client(), of)).await
        }
        "TraceSetting" => call.unary(trace_setting).await,
        "LogSettings" => call.unary(log_settings).await,
        _ => Status::unimplemented(format!("path: found '{path}', expected a method of {SERVICE_PATH}")).into_http(),
    }
}

/// Whether a path is that of a question for health, which is answered whatever else is under way.
pub(crate) fn is_probe(path: &str) -> bool {
    matches!(path.strip_prefix(SERVICE_PATH), Some("ServerLive" | "ServerReady" | "ModelReady"))
}

/// A request and who answers it.
struct Call<'a> {
    caller: &'a Rc<Caller>,
    request: Request<Incoming>,
}

impl Call<'_> {
    /// Answers one message with one, at once.
    async fn unary<Q, A>(self, answer: impl FnOnce(&Service, Q) -> Result<A, InferError>) -> Response<Body>
    where
        Q: Asks + Message + Default,
        A: Message + Send + 'static,
    {
        self.unary_later(|server, question| async move { answer(&server.service, question).map_err(status_of) }).await
    }

    /// Answers one message with one. What the client may not do is refused before any of it is read, or else once it
    /// says of what.
    async fn unary_later<Q, A, F>(self, answer: impl FnOnce(Rc<Server>, Q) -> F) -> Response<Body>
    where
        Q: Asks + Message + Default,
        A: Message + Send + 'static,
        F: Future<Output = Result<A, Status>>,
    {
        let (caller, codings) = (Rc::clone(self.caller), Codings::of(self.request.headers()));
        let reply = async {
            caller.permit(Q::OPERATION, Scope::Server)?;
            let message = self.messages(codings.request?, Some(MESSAGE_MAX)).only().await?;
            let (bytes, charge) = message.decompressed(&caller.server.service.pool).await?;
            let question = Q::decode(bytes).map_err(undecodable)?;
            drop(charge);
            caller.permit(Q::OPERATION, Scope::of(Q::OPERATION, question.model()))?;
            answer(Rc::clone(&caller.server), question).await
        };
        respond(reply.await.map(|reply| tokio_stream::once(Ok(reply))), codings.reply)
    }

    /// The messages of the call: one of them bounded as a whole, or a stream of which each is bounded as those for
    /// inference are.
    fn messages(self, coding: Option<Coding>, max: Option<BodyMax>) -> Messages {
        let of_one = max.unwrap_or(BodyMax::infer(&self.caller.server.limits()));
        Messages::new(self.caller.intake(self.request.into_body(), max), coding, of_one)
    }

    /// What is left until the client gives up, by `grpc-timeout`: digits and a unit.
    fn within(&self) -> Result<Option<Span>, Status> {
        let Some(value) = self.request.headers().get("grpc-timeout") else { return Ok(None) };
        let parse = || {
            let (number, unit) = value.to_str().ok()?.split_at_checked(value.len().checked_sub(1)?)?;
            let ns_per_unit = match unit {
                "H" => 3_600_000_000_000,
                "M" => 60_000_000_000,
                "S" => 1_000_000_000,
                "m" => 1_000_000,
                "u" => 1_000,
                "n" => 1,
                _ => return None,
            };
            // Beyond 292 years there is no difference.
            (number.len() <= 8).then(|| Some(Span(number.parse::<i64>().ok()?.saturating_mul(ns_per_unit))))?
        };
        let wrong = || Status::invalid_argument(format!("grpc-timeout: found {value:?}, expected digits and a unit"));
        parse().map(Some).ok_or_else(wrong)
    }
}

/// How the messages of a call are compressed, and its replies: the way the request is, if the client can read that.
/// Most clients announce that they could read compressed ones, whether or not that is worth anybody's time.
struct Codings {
    request: Result<Option<Coding>, Status>,
    reply: Option<Coding>,
}

impl Codings {
    fn of(headers: &HeaderMap) -> Self {
        let request = message_coding(headers);
        let accepted = headers.get("grpc-accept-encoding").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let is_accepted = |coding: &Coding| accepted.split(',').any(|name| name.trim() == coding.name());
        let reply = request.as_ref().ok().copied().flatten().filter(is_accepted);
        Self { request, reply }
    }
}

fn respond<A: Message + Send + 'static>(
    replies: Result<impl Stream<Item = Result<A, Status>> + Send + 'static, Status>,
    coding: Option<Coding>,
) -> Response<Body> {
    let replies = match replies {
        Ok(replies) => replies,
        Err(status) => return status.into_http(),
    };
    let encoding = coding.map(|coding| match coding {
        Coding::Gzip => CompressionEncoding::Gzip,
        Coding::Deflate => CompressionEncoding::Deflate,
    });
    let each = SingleMessageCompressionOverride::default();
    let body = EncodeBody::new_server(ProstEncoder::default(), replies, encoding, each, Some(usize::MAX));
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    if let Some(coding) = coding {
        response.headers_mut().insert("grpc-encoding", HeaderValue::from_static(coding.name()));
    }
    response
}

async fn infer(call: Call<'_>) -> Response<Body> {
    let (caller, codings) = (Rc::clone(call.caller), Codings::of(call.request.headers()));
    let (within, context) = (call.within(), TraceContext::of(call.request.headers()));
    let desk = &caller.server.service.desk;
    let began = desk.now();
    let reply = async {
        let within = within?;
        caller.permit(ModelInferRequest::OPERATION, Scope::Server)?;
        let max = BodyMax::infer(&caller.server.limits());
        let message = call.messages(codings.request?, Some(max)).only().await?;
        let question = Question::read(&caller.server.service, message).await?;
        question.permit(&caller)?;
        question.answer(&caller, context, Some(began), within).await
    };
    respond(reply.await.map(|reply| tokio_stream::once(Ok(reply))), codings.reply)
}

/// A message of an infer request of which it is known what it holds.
struct Question {
    bytes: Bytes,
    charge: Charge,
    outline: Outline,
}

impl Question {
    /// Looks at a message; at a large one in the pool.
    async fn read(service: &Service, message: framing::Message) -> Result<Self, Status> {
        let (bytes, charge) = message.decompressed(&service.pool).await?;
        let outline = match Outline::of(&bytes, FIELDS_AT_ONCE_MAX) {
            Err(OutlineError::TooLong(_)) => {
                let (bytes, held) = (bytes.clone(), charge.clone());
                let look = move || {
                    let _held = held;
                    Outline::of(&bytes, usize::MAX)
                };
                service.pool.run(&charge, look).await.map_err(status_of)?
            }
            outline => outline,
        };
        Ok(Self { outline: outline.map_err(undecodable)?, bytes, charge })
    }

    /// Its id, if it can be told.
    fn id(&self) -> &str {
        self.outline.id(&self.bytes)
    }

    fn model_name(&self) -> Result<&str, Status> {
        self.outline.model_name(&self.bytes).map_err(undecodable)
    }

    fn permit(&self, caller: &Caller) -> Result<(), Status> {
        let scope = Scope::of(ModelInferRequest::OPERATION, given(self.model_name()?));
        Ok(caller.permit(ModelInferRequest::OPERATION, scope)?)
    }

    async fn answer(
        self,
        caller: &Caller,
        context: Option<TraceContext>,
        began: Option<Timestamp>,
        within: Option<Span>,
    ) -> Result<ModelInferResponse, Status> {
        let service = &caller.server.service;
        let mut trace = service.trace(context, self.model_name()?, began.unwrap_or_else(|| service.desk.now()));
        if let Some(began) = began {
            trace.stage(Stage::Receive, began);
        }
        let answered = self.answer_traced(caller, within, &mut trace).await;
        answered.inspect_err(|status| trace.refused(status.message()))
    }

    async fn answer_traced(
        self,
        caller: &Caller,
        within: Option<Span>,
        trace: &mut OpenTrace,
    ) -> Result<ModelInferResponse, Status> {
        let service = &caller.server.service;
        let version = self.outline.model_version(&self.bytes).map_err(undecodable)?;
        let model = service.find(self.model_name()?, given(version)).map_err(status_of)?;
        self.outline.check(&model.1).map_err(status_of)?;
        let charge = self.charge.clone();
        let request = self.parse(service).await?;
        let index = model.0;
        let submitted = service.admit(model, request, (within, caller.shared_memory()), &charge, trace);
        let submitted = submitted.await.map_err(status_of)?;
        // Its bytes are in slots now.
        drop(charge);
        let Answer { model, id, outputs, reply, number: _ } = submitted.wait(trace).await.map_err(status_of)?;
        let answered = service.desk.now();
        let response = messages::encode_reply(&model, id.as_deref(), &outputs, &reply);
        service.record.observe(index, Stage::Reply, service.desk.now() - answered);
        Ok(response)
    }

    /// Decodes it; a large one in the pool.
    async fn parse(self, service: &Service) -> Result<InferRequest, Status> {
        let Self { bytes, charge, outline } = self;
        let parse =
            || messages::parse_request(ModelInferRequest::decode(bytes).map_err(undecodable)?).map_err(status_of);
        if outline.parsed_bytes() <= AT_ONCE_BYTES_MAX {
            return parse();
        }
        charge.grow(outline.decoded_bytes()).map_err(|full| status_of(no_room(full)))?;
        let held = charge.clone();
        let parse = move || {
            let _held = held;
            parse()
        };
        service.pool.run(&charge, parse).await.map_err(status_of)?
    }
}

/// Answers each message of a stream when its answer is there, not in their order. An error is the answer of its message
/// and the stream goes on.
async fn stream_infer(call: Call<'_>) -> Response<Body> {
    let (caller, codings) = (Rc::clone(call.caller), Codings::of(call.request.headers()));
    let context = TraceContext::of(call.request.headers());
    let open = || {
        caller.permit(ModelInferRequest::OPERATION, Scope::Server)?;
        let messages = call.messages(codings.request?, None);
        let (answers, replies) = mpsc::channel(STREAM_REQUESTS_MAX);
        tokio::task::spawn_local(answer_stream(Rc::clone(&caller), context, messages, answers));
        Ok(ReceiverStream::new(replies))
    };
    respond(open(), codings.reply)
}

type StreamAnswer = Result<ModelStreamInferResponse, Status>;

async fn answer_stream(
    caller: Rc<Caller>,
    context: Option<TraceContext>,
    mut messages: Messages,
    answers: mpsc::Sender<StreamAnswer>,
) {
    let (service, drain) = (&caller.server.service, &caller.server.drain);
    let mut under_way = JoinSet::new();
    let mut is_open = true;
    let mut quiet = Quiet::new(&caller.server);
    // Dropping what is under way cancels it.
    while is_open || !under_way.is_empty() {
        let is_quiet = under_way.is_empty();
        tokio::select! {
            () = answers.closed() => return,
            Some(_) = under_way.join_next() => quiet.begin(),
            message = messages.next(), if is_open && under_way.len() < STREAM_REQUESTS_MAX => match message {
                Ok(Some(message)) => {
                    let (caller, answers, context) = (Rc::clone(&caller), answers.clone(), context.clone());
                    under_way.spawn_local(async move {
                        let _ = answers.send(Ok(stream_answer(&caller, context, message).await)).await;
                    });
                }
                Ok(None) => is_open = false,
                Err(status) => {
                    let _ = answers.send(Err(status)).await;
                    return;
                }
            },
            // What was sent has been answered; a client opens its next stream elsewhere.
            () = drain.begun(), if is_quiet => {
                let _ = answers.send(Err(Refusal::Draining.into())).await;
                return;
            }
            status = quiet.over(), if is_quiet => {
                service.record.refusals().count(Cause::Stream);
                let _ = answers.send(Err(status)).await;
                return;
            }
        }
    }
}

/// How long a stream may have no message under way.
struct Quiet<'a> {
    server: &'a Server,
    until: Pin<Box<Sleep>>,
    allowed: (Duration, &'static str),
}

impl<'a> Quiet<'a> {
    /// A stream without a message yet.
    fn new(server: &'a Server) -> Self {
        let allowed = server.limits().stream_first_timeout;
        Self { server, until: Box::pin(sleep(allowed)), allowed: (allowed, "stream_first_timeout_ms") }
    }

    /// A message has been answered.
    fn begin(&mut self) {
        let allowed = self.server.limits().stream_idle_timeout;
        self.allowed = (allowed, "stream_idle_timeout_ms");
        self.until.as_mut().reset(Instant::now() + allowed);
    }

    /// Returns when it has taken too long.
    async fn over(&mut self) -> Status {
        self.until.as_mut().await;
        let (allowed, key) = self.allowed;
        Status::deadline_exceeded(format!("stream: no message was under way for {allowed:?} ({key}); open another one"))
    }
}

async fn stream_answer(
    caller: &Caller,
    context: Option<TraceContext>,
    message: framing::Message,
) -> ModelStreamInferResponse {
    let mut id = String::new();
    let answer = async {
        let service = &caller.server.service;
        let question = Question::read(service, message).await?;
        question.id().clone_into(&mut id);
        question.permit(caller)?;
        let _counted = caller.another()?;
        question.answer(caller, context, None, None).await
    };
    match answer.await {
        Ok(mut response) => {
            // There is one response to each request.
            let is_final = InferParameter { parameter_choice: Some(infer_parameter::ParameterChoice::BoolParam(true)) };
            response.parameters.insert("triton_final_response".to_owned(), is_final);
            ModelStreamInferResponse { infer_response: Some(response), ..ModelStreamInferResponse::default() }
        }
        Err(status) => ModelStreamInferResponse {
            error_message: status.message().to_owned(),
            infer_response: Some(ModelInferResponse { id, ..ModelInferResponse::default() }),
        },
    }
}

fn model_ready(service: &Service, of: ModelReadyRequest) -> Result<ModelReadyResponse, InferError> {
    Ok(ModelReadyResponse { ready: service.is_model_ready(&of.name, given(&of.version))? })
}

fn model_config(service: &Service, of: ModelConfigRequest) -> Result<ModelConfigResponse, InferError> {
    let encoded = service.model_config(&of.name, given(&of.version))?.encoded();
    let config = ModelConfig::decode(&encoded[..]).expect("both sides have one schema");
    Ok(ModelConfigResponse { config: Some(config) })
}

fn model_statistics(service: &Service, of: ModelStatisticsRequest) -> Result<ModelStatisticsResponse, InferError> {
    Ok(ModelStatisticsResponse { model_stats: service.statistics(given(&of.name), given(&of.version))? })
}

async fn load_model(server: Rc<Server>, of: RepositoryModelLoadRequest) -> Result<RepositoryModelLoadResponse, Status> {
    let parameters = of.parameters.keys().map(String::as_str);
    server.service.change_model(ModelChange::Load, &of.model_name, parameters).await.map_err(status_of)?;
    Ok(RepositoryModelLoadResponse {})
}

async fn unload_model(
    server: Rc<Server>,
    of: RepositoryModelUnloadRequest,
) -> Result<RepositoryModelUnloadResponse, Status> {
    let parameters = of.parameters.keys().map(String::as_str);
    server.service.change_model(ModelChange::Unload, &of.model_name, parameters).await.map_err(status_of)?;
    Ok(RepositoryModelUnloadResponse {})
}

fn region_status(
    service: &Service,
    client: Client,
    of: SystemSharedMemoryStatusRequest,
) -> Result<SystemSharedMemoryStatusResponse, InferError> {
    Ok(SystemSharedMemoryStatusResponse { regions: service.regions.borrow().of(Some(client)).status(given(&of.name))? })
}

fn register_region(
    service: &Service,
    client: Client,
    region: SystemSharedMemoryRegisterRequest,
) -> Result<SystemSharedMemoryRegisterResponse, InferError> {
    let SystemSharedMemoryRegisterRequest { name, key, offset, byte_size } = region;
    service.regions.borrow_mut().register(client, &name, &key, offset, byte_size)?;
    Ok(SystemSharedMemoryRegisterResponse {})
}

fn unregister_region(
    service: &Service,
    client: Client,
    region: SystemSharedMemoryUnregisterRequest,
) -> Result<SystemSharedMemoryUnregisterResponse, InferError> {
    service.regions.borrow_mut().unregister(client, given(&region.name));
    Ok(SystemSharedMemoryUnregisterResponse {})
}

/// Looks at settings, or changes those that are given; one without a value is cleared.
fn trace_setting(service: &Service, request: TraceSettingRequest) -> Result<TraceSettingResponse, InferError> {
    let model = given(&request.model_name);
    let value = |key: &str, mut values: Vec<String>| match (key, values.len()) {
        (_, 0) => Value::Null,
        ("trace_level", _) => values.into(),
        (_, 1) => values.remove(0).into(),
        _ => values.into(),
    };
    let changes = request.settings.into_iter().map(|(key, setting)| {
        let value = value(&key, setting.value);
        (key, value)
    });
    let changes: Settings = changes.collect();
    let settings = if changes.is_empty() {
        service.trace_settings(model)?
    } else {
        service.change_trace_settings(model, &changes)?
    };
    let texts = |value: Value| match value {
        Value::Array(values) => values.iter().filter_map(|value| Some(value.as_str()?.to_owned())).collect(),
        Value::String(text) => vec![text],
        other => vec![other.to_string()],
    };
    let settings = settings.into_iter();
    let settings = settings.map(|(key, value)| (key, trace_setting_response::SettingValue { value: texts(value) }));
    Ok(TraceSettingResponse { settings: settings.collect() })
}

/// Looks at settings, or changes those that are given.
fn log_settings(service: &Service, request: LogSettingsRequest) -> Result<LogSettingsResponse, InferError> {
    use log_settings_request::setting_value::ParameterChoice as Given;
    use log_settings_response::{SettingValue, setting_value::ParameterChoice as Told};
    let value = |choice| match choice {
        Some(Given::BoolParam(flag)) => Value::from(flag),
        Some(Given::Uint32Param(number)) => Value::from(number),
        Some(Given::StringParam(text)) => Value::from(text),
        None => Value::Null,
    };
    let changes = request.settings.into_iter().map(|(key, setting)| (key, value(setting.parameter_choice)));
    let changes: Settings = changes.collect();
    let settings = if changes.is_empty() { service.log_settings() } else { service.change_log_settings(&changes)? };
    let told = |value: Value| match value {
        Value::Bool(flag) => Told::BoolParam(flag),
        Value::Number(number) => Told::Uint32Param(number.as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(0)),
        Value::String(text) => Told::StringParam(text),
        other => Told::StringParam(other.to_string()),
    };
    let settings = settings.into_iter().map(|(key, value)| (key, SettingValue { parameter_choice: Some(told(value)) }));
    Ok(LogSettingsResponse { settings: settings.collect() })
}

/// What is no message (gRPC, "Status codes and their use").
fn undecodable(error: impl ToString) -> Status {
    Status::internal(error.to_string())
}

/// A field of proto3 that is empty was not given.
fn given(field: &str) -> Option<&str> {
    (!field.is_empty()).then_some(field)
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let code = match &refusal {
            Refusal::Unauthenticated { .. } => Code::Unauthenticated,
            Refusal::Forbidden { .. } => Code::PermissionDenied,
            Refusal::CrossSite { .. } => Code::PermissionDenied,
            Refusal::Host { .. } => Code::InvalidArgument,
            Refusal::Draining => Code::Unavailable,
            Refusal::Rate { .. }
            | Refusal::Busy { .. }
            | Refusal::ClientBusy { .. }
            | Refusal::Probes { .. }
            | Refusal::Untaken { .. }
            | Refusal::Connections
            | Refusal::Overloaded { .. }
            | Refusal::Head { .. } => Code::ResourceExhausted,
        };
        let mut status = Self::new(code, refusal.to_string());
        if let Some(span) = refusal.retry_after() {
            // gRPC proposal A6, "pushback": milliseconds until the client may try again.
            status.metadata_mut().insert("grpc-retry-pushback-ms", (span.0 as u64).div_ceil(1_000_000).into());
        }
        status
    }
}

impl From<IntakeError> for Status {
    fn from(error: IntakeError) -> Self {
        let code = match &error {
            IntakeError::TooLarge { .. } | IntakeError::NoRoom(_) | IntakeError::Busy(_) => Code::ResourceExhausted,
            IntakeError::Late(_) => Code::DeadlineExceeded,
            IntakeError::Malformed(_) => Code::Internal,
            IntakeError::Broken(_) => Code::Cancelled,
        };
        Self::new(code, error.to_string())
    }
}

fn status_of(error: InferError) -> Status {
    let code = match &error {
        InferError::Invalid(_) | InferError::ChangeFailed(_) => Code::InvalidArgument,
        InferError::NotFound(_) => Code::NotFound,
        InferError::Failed(_) | InferError::BadAnswer(_) => Code::Internal,
        InferError::NeverMet { .. }
        | InferError::Dropped(DropReason::Deadline | DropReason::BackendLost | DropReason::InputLate)
        | InferError::WindowMissed
        | InferError::NoAnswer { .. } => Code::DeadlineExceeded,
        InferError::Dropped(DropReason::QueueFull)
        | InferError::ArenaFull { .. }
        | InferError::DecodersFull { .. }
        | InferError::MemoryFull(_)
        | InferError::ChangesFull => Code::ResourceExhausted,
        InferError::Dropped(DropReason::Cancelled) => Code::Cancelled,
        InferError::Dropped(DropReason::NoBackend | DropReason::Unloaded)
        | InferError::NoScheduler
        | InferError::NoBackend { .. }
        | InferError::Unloaded { .. }
        | InferError::LoadedAnew { .. }
        | InferError::SchedulerLost
        | InferError::ShuttingDown => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}
