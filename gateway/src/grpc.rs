//! Steps 1 and 10 in gRPC: the methods of `inference.GRPCInferenceService`. tonic frames, decodes and compresses the
//! messages; they run on this thread, where the core is.

use std::{
    future::{Ready, ready},
    pin::Pin,
    rc::Rc,
    time::Duration,
};

use frontend::InferError;
use http_body_util::BodyExt as _;
use hyper::{Request, Response, body::Incoming};
use prost::Message;
use proto::{Span, frontend_to_scheduler::ModelChange, scheduler_to_frontend::DropReason};
use serde_json::Value;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::{Instant, Sleep, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Status, Streaming,
    body::Body,
    codec::CompressionEncoding,
    server::{Grpc, StreamingService, UnaryService},
};
use tonic_prost::ProstCodec;

use crate::{
    access::{Client, Refusal, Scope},
    api::{
        InferParameter, LogSettingsRequest, LogSettingsResponse, ModelConfigRequest, ModelConfigResponse,
        ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelReadyRequest, ModelReadyResponse,
        ModelStatisticsRequest, ModelStatisticsResponse, ModelStreamInferResponse, RepositoryIndexRequest,
        RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
        RepositoryModelUnloadResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
        ServerReadyRequest, ServerReadyResponse, SystemSharedMemoryRegisterRequest, SystemSharedMemoryRegisterResponse,
        SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse, SystemSharedMemoryUnregisterRequest,
        SystemSharedMemoryUnregisterResponse, TraceSettingRequest, TraceSettingResponse, infer_parameter,
        log_settings_request, log_settings_response, trace_setting_response,
    },
    metrics::{Cause, Stage},
    protocol::messages,
    server::{Caller, IntakeError, Server, Share},
    service::{Answer, Service},
    settings::Settings,
    trace::{OpenTrace, TraceContext},
};

use asks::Asks;

mod asks;

/// Before a method's name in a path.
const SERVICE_PATH: &str = "/inference.GRPCInferenceService/";
/// Requests of one stream that are under way at once; more of them wait unread.
const STREAM_REQUESTS_MAX: usize = 64;

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
        Q: Asks + Message + Default + Send + 'static,
        A: Message + Send + 'static,
    {
        self.unary_later(|server, question, _| async move { answer(&server.service, question).map_err(status_of) })
            .await
    }

    /// Answers one message with one. The share of the common budget is to be released once the message's bytes are not
    /// needed any more. What the client may not do is refused before any of it is read, or else once it says of what.
    async fn unary_later<Q, A, F>(self, answer: impl FnOnce(Rc<Server>, Q, Share) -> F) -> Response<Body>
    where
        Q: Asks + Message + Default + Send + 'static,
        A: Message + Send + 'static,
        F: Future<Output = Result<A, Status>>,
    {
        let caller = Rc::clone(self.caller);
        if let Err(refusal) = caller.permit(Q::OPERATION, Scope::Server) {
            return Status::from(refusal).into_http();
        }
        let mut grpc = self.framing::<A, Q>();
        let (head, body) = self.request.into_parts();
        let body = caller.server.intake(body, false);
        let share = body.share();
        let service = Unary(Some(|question: Q| async move {
            caller.permit(Q::OPERATION, Scope::of(Q::OPERATION, question.model()))?;
            answer(Rc::clone(&caller.server), question, share).await.map(tonic::Response::new)
        }));
        grpc.unary(service, Request::from_parts(head, body.map_err(Status::from))).await
    }

    /// How messages of this call are framed. Replies are compressed the way the request is: most clients announce
    /// that they could read compressed ones, whether or not that is worth anybody's time.
    fn framing<A, Q>(&self) -> Grpc<ProstCodec<A, Q>>
    where
        Q: Message + Default + Send + 'static,
        A: Message + Send + 'static,
    {
        let grpc = Grpc::new(ProstCodec::default())
            .max_decoding_message_size(self.caller.server.limits().body_bytes_max)
            .max_encoding_message_size(usize::MAX)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate);
        match self.request.headers().get("grpc-encoding").map(|value| value.as_bytes()) {
            Some(b"gzip") => grpc.send_compressed(CompressionEncoding::Gzip),
            Some(b"deflate") => grpc.send_compressed(CompressionEncoding::Deflate),
            _ => grpc,
        }
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

/// Hands the one message of a unary call on.
struct Unary<F>(Option<F>);

impl<Q, A, F, R> UnaryService<Q> for Unary<F>
where
    F: FnOnce(Q) -> R,
    R: Future<Output = Result<tonic::Response<A>, Status>>,
{
    type Response = A;
    type Future = R;

    fn call(&mut self, request: tonic::Request<Q>) -> R {
        self.0.take().expect("a unary call has one message")(request.into_inner())
    }
}

async fn infer(call: Call<'_>) -> Response<Body> {
    let within = match call.within() {
        Ok(within) => within,
        Err(status) => return status.into_http(),
    };
    let began = call.caller.server.service.desk.now();
    let context = TraceContext::of(call.request.headers());
    let caller = Rc::clone(call.caller);
    call.unary_later(|server, request: ModelInferRequest, share| async move {
        let mut trace = server.service.trace(context, &request.model_name, began);
        trace.stage(Stage::Receive, began);
        infer_one(&caller, request, within, &share, &mut trace).await
    })
    .await
}

async fn infer_one(
    caller: &Caller,
    request: ModelInferRequest,
    within: Option<Span>,
    share: &Share,
    trace: &mut OpenTrace,
) -> Result<ModelInferResponse, Status> {
    infer_traced(caller, request, within, share, trace).await.inspect_err(|status| trace.refused(status.message()))
}

async fn infer_traced(
    caller: &Caller,
    request: ModelInferRequest,
    within: Option<Span>,
    share: &Share,
    trace: &mut OpenTrace,
) -> Result<ModelInferResponse, Status> {
    let server = &*caller.server;
    let model = server.service.find(&request.model_name, given(&request.model_version)).map_err(status_of)?;
    let mut request = messages::parse_request(request).map_err(status_of)?;
    server.service.decode_pictures(&model, &mut request, trace).await.map_err(status_of)?;
    let index = model.0;
    let submitted = server.service.submit(model, request, within, caller.shared_memory());
    let submitted = submitted.inspect_err(|error| trace.failed(error)).map_err(status_of)?;
    // Its bytes are in slots now.
    share.release();
    let Answer { model, id, outputs, reply, number: _ } = submitted.wait(trace).await.map_err(status_of)?;
    let answered = server.service.desk.now();
    let response = messages::encode_reply(&model, id.as_deref(), &outputs, &reply);
    server.service.record.observe(index, Stage::Reply, server.service.desk.now() - answered);
    Ok(response)
}

/// Answers each message of a stream when its answer is there, not in their order. An error is the answer of its message
/// and the stream goes on.
async fn stream_infer(call: Call<'_>) -> Response<Body> {
    if let Err(refusal) = call.caller.permit(ModelInferRequest::OPERATION, Scope::Server) {
        return Status::from(refusal).into_http();
    }
    let mut grpc = call.framing::<ModelStreamInferResponse, ModelInferRequest>();
    let context = TraceContext::of(call.request.headers());
    let (head, body) = call.request.into_parts();
    let body = call.caller.server.intake(body, true);
    let (give, requests) = oneshot::channel();
    let (answers, replies) = mpsc::channel(STREAM_REQUESTS_MAX);
    let share = body.share();
    tokio::task::spawn_local(answer_stream(Rc::clone(call.caller), context, requests, answers, share));
    let service = Stream(Some((give, replies)));
    grpc.streaming(service, Request::from_parts(head, body.map_err(Status::from))).await
}

type StreamAnswer = Result<ModelStreamInferResponse, Status>;

async fn answer_stream(
    caller: Rc<Caller>,
    context: Option<TraceContext>,
    requests: oneshot::Receiver<Streaming<ModelInferRequest>>,
    answers: mpsc::Sender<StreamAnswer>,
    share: Share,
) {
    let Ok(mut requests) = requests.await else { return };
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
            request = requests.message(), if is_open && under_way.len() < STREAM_REQUESTS_MAX => match request {
                Ok(Some(request)) => {
                    let (caller, answers, share) = (Rc::clone(&caller), answers.clone(), share.clone());
                    let mut trace = service.trace(context.clone(), &request.model_name, service.desk.now());
                    under_way.spawn_local(async move {
                        let _ = answers.send(Ok(stream_answer(&caller, request, &share, &mut trace).await)).await;
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
    request: ModelInferRequest,
    share: &Share,
    trace: &mut OpenTrace,
) -> ModelStreamInferResponse {
    let id = request.id.clone();
    let answer = async {
        caller.permit(ModelInferRequest::OPERATION, Scope::of(ModelInferRequest::OPERATION, request.model()))?;
        let _counted = caller.another()?;
        infer_one(caller, request, None, share, trace).await
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

/// Hands the stream's messages to the task that answers them, since tonic wants a service that may move between
/// threads.
struct Stream(Option<(oneshot::Sender<Streaming<ModelInferRequest>>, mpsc::Receiver<StreamAnswer>)>);

impl StreamingService<ModelInferRequest> for Stream {
    type Response = ModelStreamInferResponse;
    type ResponseStream = ReceiverStream<StreamAnswer>;
    type Future = Ready<Result<tonic::Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<ModelInferRequest>>) -> Self::Future {
        let (give, replies) = self.0.take().expect("a call has one stream");
        // Without a task the stream of replies is at its end.
        let _ = give.send(request.into_inner());
        ready(Ok(tonic::Response::new(ReceiverStream::new(replies))))
    }
}

fn model_ready(service: &Service, of: ModelReadyRequest) -> Result<ModelReadyResponse, InferError> {
    Ok(ModelReadyResponse { ready: service.is_model_ready(&of.name, given(&of.version))? })
}

fn model_config(service: &Service, of: ModelConfigRequest) -> Result<ModelConfigResponse, InferError> {
    Ok(ModelConfigResponse { config: Some(service.model_config(&of.name, given(&of.version))?) })
}

fn model_statistics(service: &Service, of: ModelStatisticsRequest) -> Result<ModelStatisticsResponse, InferError> {
    Ok(ModelStatisticsResponse { model_stats: service.statistics(given(&of.name), given(&of.version))? })
}

async fn load_model(
    server: Rc<Server>,
    of: RepositoryModelLoadRequest,
    _: Share,
) -> Result<RepositoryModelLoadResponse, Status> {
    let parameters = of.parameters.keys().map(String::as_str);
    server.service.change_model(ModelChange::Load, &of.model_name, parameters).await.map_err(status_of)?;
    Ok(RepositoryModelLoadResponse {})
}

async fn unload_model(
    server: Rc<Server>,
    of: RepositoryModelUnloadRequest,
    _: Share,
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
            IntakeError::TooLarge { .. } | IntakeError::TooMuch => Code::ResourceExhausted,
            IntakeError::Late(_) => Code::DeadlineExceeded,
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
        | InferError::Dropped(DropReason::Deadline | DropReason::BackendLost)
        | InferError::WindowMissed
        | InferError::NoAnswer { .. } => Code::DeadlineExceeded,
        InferError::Dropped(DropReason::QueueFull)
        | InferError::ArenaFull { .. }
        | InferError::ImagesFull
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
