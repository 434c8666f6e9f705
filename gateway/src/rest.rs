//! Step 1, Step 10 in REST: the routes of the Open Inference Protocol and of Triton's extensions, in one table.

use std::{collections::BTreeMap, sync::LazyLock};

use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    excerpt,
    rope::Rope,
};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, Response, StatusCode, Version,
    body::{Body as _, Incoming},
    header::{
        ACCEPT_ENCODING, ALLOW, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue,
        RETRY_AFTER, WWW_AUTHENTICATE,
    },
};
use matchit::Router;
use percent_encoding::percent_decode_str;
use proto::{Span, frontend_to_scheduler::ModelChange, scheduler_to_frontend::DropReason};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    access::{Client, Operation as Op, Refusal, Scope},
    api::ModelStatisticsResponse,
    budget::{Charge, NoRoom},
    compression::Coding,
    loads,
    pool::AT_ONCE_BYTES_MAX,
    regions::cuda,
    selections::{Heard, Told},
    server::{BodyMax, Caller, IntakeError, Server, check_same_site, decompressed},
    service::{Service, feedback::FeedbackModel},
    settings::Settings,
};

mod infer;

type Reply = Response<Full<Bytes>>;

/// What a route does.
#[derive(Clone, Copy)]
enum Action {
    /// POST: answers when a backend has.
    Infer,
    /// GET: answers at once.
    Look(fn(&Service, At<'_>) -> Result<Reply, InferError>),
    /// POST: answers at once, to a JSON object.
    Change(fn(&Service, At<'_>, &Settings) -> Result<Reply, InferError>),
    /// GET: answers at once, of what belongs to the client.
    LookAtOwn(fn(&Service, Client, At<'_>) -> Result<Reply, InferError>),
    /// POST: answers at once, to a JSON object; what belongs to the client changes.
    ChangeOwn(fn(&Service, Client, At<'_>, &Settings) -> Result<Reply, InferError>),
    /// POST: answers when every backend has.
    ChangeModel(ModelChange),
    /// GET: answers at once, of a request that the client may see.
    Explain,
    /// GET: answers at once, with what others are answered at the same time.
    Scrape,
    /// POST: answers at once; the process ends when all else has been answered.
    Drain,
}

/// What the names in a route's braces stand for.
#[derive(Debug, Default, Clone, Copy)]
struct At<'a> {
    model: &'a str,
    version: Option<&'a str>,
    region: Option<&'a str>,
    request: &'a str,
}

use Action::{Change, ChangeModel, ChangeOwn, Drain, Explain, Infer, Look, LookAtOwn, Scrape};

/// Every route, and what a client must be allowed to. Of two that fit, the one with a name where the other has braces
/// is taken.
const ROUTES: &[(&str, Op, Action)] = &[
    ("v2/models/{model}/infer", Op::Infer, Infer),
    ("metrics", Op::Metrics, Scrape),
    ("debug/requests/{request}", Op::Debug, Explain),
    ("v2/models/{model}/versions/{version}/infer", Op::Infer, Infer),
    ("v2/models/{model}/feedback", Op::Feedback, ChangeOwn(feedback)),
    ("v2/models/{model}/versions/{version}/feedback", Op::Feedback, ChangeOwn(feedback)),
    ("v2", Op::Health, Look(|service, _| Ok(ok(&service.server_metadata())))),
    ("v2/health/live", Op::Health, Look(|service, _| Ok(health(service, true)))),
    ("v2/health/ready", Op::Health, Look(|service, _| Ok(health(service, service.is_ready())))),
    ("v2/models/stats", Op::Metadata, Look(|service, at| statistics(service, None, at))),
    ("v2/models/{model}", Op::Metadata, Look(|service, at| Ok(ok(&service.model_metadata(at.model, at.version)?)))),
    (
        "v2/models/{model}/versions/{version}",
        Op::Metadata,
        Look(|service, at| Ok(ok(&service.model_metadata(at.model, at.version)?))),
    ),
    ("v2/models/{model}/ready", Op::Metadata, Look(model_ready)),
    ("v2/models/{model}/versions/{version}/ready", Op::Metadata, Look(model_ready)),
    (
        "v2/models/{model}/config",
        Op::Metadata,
        Look(|service, at| Ok(ok(&service.model_config(at.model, at.version)?))),
    ),
    (
        "v2/models/{model}/versions/{version}/config",
        Op::Metadata,
        Look(|service, at| Ok(ok(&service.model_config(at.model, at.version)?))),
    ),
    ("v2/models/{model}/stats", Op::Metadata, Look(|service, at| statistics(service, Some(at.model), at))),
    (
        "v2/models/{model}/versions/{version}/stats",
        Op::Metadata,
        Look(|service, at| statistics(service, Some(at.model), at)),
    ),
    (
        "v2/models/{model}/trace/setting",
        Op::Settings,
        Look(|service, at| Ok(ok(&service.trace_settings(Some(at.model))?))),
    ),
    (
        "v2/models/{model}/trace/setting",
        Op::Settings,
        Change(|service, at, body| Ok(ok(&service.change_trace_settings(Some(at.model), body)?))),
    ),
    ("v2/trace/setting", Op::Settings, Look(|service, _| Ok(ok(&service.trace_settings(None)?)))),
    ("v2/trace/setting", Op::Settings, Change(|service, _, body| Ok(ok(&service.change_trace_settings(None, body)?)))),
    ("v2/logging", Op::Settings, Look(|service, _| Ok(ok(&service.log_settings())))),
    ("v2/logging", Op::Settings, Change(|service, _, body| Ok(ok(&service.change_log_settings(body)?)))),
    ("v2/repository/index", Op::Metadata, Change(repository_index)),
    ("v2/repository/models/{model}/load", Op::Repository, ChangeModel(ModelChange::Load)),
    ("v2/repository/models/{model}/unload", Op::Repository, ChangeModel(ModelChange::Unload)),
    ("v2/systemsharedmemory/status", Op::SharedMemory, LookAtOwn(region_status)),
    ("v2/systemsharedmemory/region/{region}/status", Op::SharedMemory, LookAtOwn(region_status)),
    ("v2/systemsharedmemory/region/{region}/register", Op::SharedMemory, ChangeOwn(register_region)),
    ("v2/systemsharedmemory/region/{region}/unregister", Op::SharedMemory, ChangeOwn(unregister_region)),
    ("v2/systemsharedmemory/unregister", Op::SharedMemory, ChangeOwn(unregister_region)),
    ("v2/cudasharedmemory/status", Op::SharedMemory, Look(|_, at| cuda_status(at))),
    ("v2/cudasharedmemory/region/{region}/status", Op::SharedMemory, Look(|_, at| cuda_status(at))),
    (
        "v2/cudasharedmemory/region/{region}/register",
        Op::SharedMemory,
        Change(|_, at, _| Err(cuda::unsupported(at.region.unwrap_or_default()))),
    ),
    ("v2/cudasharedmemory/region/{region}/unregister", Op::SharedMemory, Change(|_, _, _| Ok(ok(&json!({}))))),
    ("v2/cudasharedmemory/unregister", Op::SharedMemory, Change(|_, _, _| Ok(ok(&json!({}))))),
    ("v2/drain", Op::Drain, Drain),
];

/// The routes of each path, by their places in [`ROUTES`].
static ROUTER: LazyLock<Router<Vec<usize>>> = LazyLock::new(|| {
    let mut places: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (place, (path, _, _)) in ROUTES.iter().enumerate() {
        places.entry(path).or_default().push(place);
    }
    let mut router = Router::new();
    for (path, places) in places {
        router.insert(path, places).expect("no route is in another one's way");
    }
    router
});

/// An answer that is no success.
#[derive(Debug)]
struct Failure {
    status: StatusCode,
    message: String,
    /// What the client needs to know to do better.
    header: Option<(HeaderName, HeaderValue)>,
    /// Part of the request was not read, so a connection of HTTP/1.1 cannot go on.
    close: bool,
}

/// Answers a request.
pub async fn answer(caller: &Caller, request: Request<Incoming>) -> Reply {
    let (version, is_head) = (request.version(), request.method() == Method::HEAD);
    let reply = route(caller, request).await.unwrap_or_else(|failure| failure.into_reply(version));
    if is_head { without_body(reply) } else { reply }
}

/// What a request for the head alone is answered: all but the body, of which it says how long it is.
fn without_body(reply: Reply) -> Reply {
    let (mut head, body) = reply.into_parts();
    let length = body.size_hint().exact().map(HeaderValue::from);
    head.headers.extend(length.map(|length| (CONTENT_LENGTH, length)));
    Response::from_parts(head, Full::default())
}

/// Answers a request that was refused before it was looked at.
#[must_use]
pub fn refuse(refusal: Refusal, version: Version) -> Reply {
    Failure::from(refusal).into_reply(version)
}

async fn route(caller: &Caller, request: Request<Incoming>) -> Result<Reply, Failure> {
    let server = &*caller.server;
    check_content_type(&request)?;
    // Of scrapes and inferences: tritonclient over asyncio offers to read gzip with every request, and decodes it only
    // of inferences; no client of Triton's decodes errors.
    let coding = request.headers().get(ACCEPT_ENCODING).and_then(|value| Coding::accepted(value.to_str().ok()?));
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let Ok(found) = ROUTER.at(&path) else {
        let message = format!("path: found '/{}', expected a route of the protocol, as /v2/models/..", excerpt(&path));
        return Err(Failure::new(StatusCode::NOT_FOUND, message));
    };
    let routes = found.value.iter().map(|&place| ROUTES[place]);
    let is_head = request.method() == Method::HEAD;
    let method = if is_head { "GET" } else { request.method().as_str() };
    let Some((_, operation, action)) = routes.clone().find(|(_, _, action)| action.method() == method) else {
        let allow: Vec<&str> = routes.map(|(_, _, action)| action.method()).collect();
        return Err(Failure::method(request.method().as_str(), &allow.join(", ")));
    };
    // A segment is decoded once it is apart (RFC 3986, section 2.4): a name may have a slash.
    let name = |key| found.params.get(key).map(|segment| percent_decode_str(segment).decode_utf8_lossy());
    let [model, version, region, number] = ["model", "version", "region", "request"].map(name);
    let at = At {
        model: model.as_deref().unwrap_or_default(),
        version: version.as_deref(),
        region: region.as_deref(),
        request: number.as_deref().unwrap_or_default(),
    };
    let model = (!at.model.is_empty()).then_some(at.model);
    caller.permit(operation, Scope::of(operation, model))?;
    if action.method() == "POST" && !matches!(operation, Op::Infer | Op::Metadata) {
        check_same_site(&request).inspect_err(|refusal| server.service.record.refusals().count(refusal.into()))?;
    }
    match action {
        Infer => {
            let reply = infer::infer(caller, at, request).await?;
            Ok(match coding {
                Some(coding) => compressed(reply, coding).await,
                None => reply,
            })
        }
        Look(look) => Ok(look(&server.service, at)?),
        LookAtOwn(look) => Ok(look(&server.service, caller.client(), at)?),
        Explain => {
            let recent = server.service.recent.borrow();
            Ok(ok(&recent.explain(at.request, |client, model| caller.may_see(client, model))?))
        }
        Scrape => metrics(server, request.uri().query(), coding).await,
        Drain => {
            server.begin_drain();
            Ok(json_reply(StatusCode::ACCEPTED, &json!({})))
        }
        Change(change) => {
            let body = read_object(caller, request).await?;
            Ok(change(&server.service, at, &body)?)
        }
        ChangeOwn(change) => {
            let body = read_object(caller, request).await?;
            Ok(change(&server.service, caller.client(), at, &body)?)
        }
        ChangeModel(to) => {
            let max = match to {
                ModelChange::Load => server.service.load_max(&server.limits()),
                ModelChange::Unload => BodyMax::OBJECT,
            };
            let (body, charge) = read_body(caller, request, max).await?;
            let given = read_parameters(caller, body, &charge).await?;
            let may_change = |model: &str| caller.may_change(model);
            server.service.change_model(to, (at.model, given), Some(charge), may_change).await?;
            Ok(ok(&json!({})))
        }
    }
}

/// Refuses gRPC-Web, whose clients understand neither our JSON nor plain gRPC.
fn check_content_type(request: &Request<Incoming>) -> Result<(), Failure> {
    let content_type = request.headers().get(CONTENT_TYPE);
    let Some(found) = content_type.filter(|value| value.as_bytes().starts_with(b"application/grpc-web")) else {
        return Ok(());
    };
    let expected = "application/json, application/grpc, or a proxy before this server that translates gRPC-Web";
    let message = format!("Content-Type: found {found:?}, expected {expected}");
    Err(Failure::closing(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

impl Action {
    fn method(self) -> &'static str {
        match self {
            Look(_) | LookAtOwn(_) | Explain | Scrape => "GET",
            Infer | Change(_) | ChangeOwn(_) | ChangeModel(_) | Drain => "POST",
        }
    }
}

/// What is scraped: of all models, or with `?model=NAME` of one, named or not.
async fn metrics(server: &Server, query: Option<&str>, coding: Option<Coding>) -> Result<Reply, Failure> {
    let (desk, record) = (&server.service.desk, &server.service.record);
    let model = form_urlencoded::parse(query.unwrap_or_default().as_bytes()).find(|(key, _)| key == "model");
    let (body, coding) = match model {
        Some((_, name)) => (record.metrics_of(desk, &name)?.into(), None),
        None => {
            let rest = async |span: Span| tokio::time::sleep(span.to_duration()).await;
            let read = || record.read_metrics(desk);
            server.scrape.text(coding, &|| desk.now(), rest, read).await.ok_or(Refusal::Draining)?
        }
    };
    let mut reply = Response::new(Full::from(body));
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"));
    let encoding = coding.map(|coding| (CONTENT_ENCODING, HeaderValue::from_static(coding.name())));
    reply.headers_mut().extend(encoding);
    Ok(reply)
}

fn health(service: &Service, up: bool) -> Reply {
    json_reply(status_of(up), &json!({ "live": true, "ready": service.is_ready() }))
}

fn model_ready(service: &Service, at: At<'_>) -> Result<Reply, InferError> {
    let ready = service.is_model_ready(at.model, at.version)?;
    Ok(json_reply(status_of(ready), &json!({ "name": at.model, "ready": ready })))
}

fn statistics(service: &Service, model: Option<&str>, at: At<'_>) -> Result<Reply, InferError> {
    Ok(ok(&ModelStatisticsResponse { model_stats: service.statistics(model, at.version)? }))
}

fn repository_index(service: &Service, _: At<'_>, body: &Settings) -> Result<Reply, InferError> {
    let ready_only = match body.get("ready") {
        None => false,
        Some(Value::Bool(ready)) => *ready,
        Some(other) => return Err(invalid("ready", excerpt(&other.to_string()), "true or false")),
    };
    Ok(ok(&service.repository_index(ready_only).models))
}

fn region_status(service: &Service, of: Client, at: At<'_>) -> Result<Reply, InferError> {
    let regions = service.regions.borrow().of(Some(of)).status(at.region)?;
    Ok(ok(&regions.values().collect::<Vec<_>>()))
}

fn register_region(service: &Service, of: Client, at: At<'_>, body: &Settings) -> Result<Reply, InferError> {
    let wrong = |key: &str, expected: &str| {
        let found = body.get(key).map_or_else(|| "none".to_owned(), |value| excerpt(&value.to_string()));
        invalid(key, found, expected)
    };
    let key = body.get("key").and_then(Value::as_str).ok_or_else(|| wrong("key", "a name as shm_open takes it"))?;
    let offset =
        body.get("offset").map_or(Some(0), Value::as_u64).ok_or_else(|| wrong("offset", "a number of bytes"))?;
    let bytes = body.get("byte_size").and_then(Value::as_u64).ok_or_else(|| wrong("byte_size", "a number of bytes"))?;
    service.regions.borrow_mut().register(of, at.region.unwrap_or_default(), key, offset, bytes)?;
    Ok(ok(&json!({})))
}

fn unregister_region(service: &Service, of: Client, at: At<'_>, _: &Settings) -> Result<Reply, InferError> {
    service.regions.borrow_mut().unregister(of, at.region);
    Ok(ok(&json!({})))
}

fn feedback(service: &Service, of: Client, at: At<'_>, body: &Settings) -> Result<Reply, InferError> {
    let result = |Heard { request, outcome, error }: Heard| match error {
        None => json!({ "request": request, "outcome": outcome.told() }),
        Some(error) => json!({ "request": request, "outcome": outcome.told(), "error": error }),
    };
    let told = |of: &FeedbackModel<'_>| Told::all_of(body, |item| of.by_json(item));
    let heard = service.feedback(of, (at.model, at.version), told)?;
    Ok(ok(&json!({ "model_name": at.model, "results": heard.into_iter().map(result).collect::<Vec<_>>() })))
}

fn cuda_status(at: At<'_>) -> Result<Reply, InferError> {
    cuda::status(at.region)?;
    Ok(ok(&json!([])))
}

/// Collects a body in the pieces in which it comes, and decompresses it. What holds its bytes comes with it.
async fn read_body(caller: &Caller, request: Request<Incoming>, max: BodyMax) -> Result<(Rope, Charge), Failure> {
    let coding = content_coding(&request)?;
    let (body, charge) = caller.intake(request.into_body(), Some(max)).all().await?;
    let Some(coding) = coding else { return Ok((body, charge)) };
    let decoded = decompressed(&caller.server.service.pool, coding, body, &charge, max).await;
    // It was read to its end, so the connection goes on.
    Ok((decoded.map_err(|error| Failure { close: false, ..error.into() })?.into(), charge))
}

/// How a body is compressed; never more than once.
fn content_coding(request: &Request<Incoming>) -> Result<Option<Coding>, Failure> {
    let mut fields = request.headers().get_all(CONTENT_ENCODING).iter();
    let (found, others) = (fields.next(), fields.next());
    match found {
        None => Ok(None),
        Some(identity) if identity == "identity" && others.is_none() => Ok(None),
        Some(name) => {
            let coding = name.to_str().ok().filter(|_| others.is_none()).and_then(Coding::from_name);
            coding.map(Some).ok_or_else(|| {
                let more = if others.is_some() { " and another one" } else { "" };
                let message = format!("Content-Encoding: found {name:?}{more}, expected gzip or deflate");
                Failure::closing(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
            })
        }
    }
}

/// A body that is a JSON object; nothing counts as an empty one.
async fn read_object(caller: &Caller, request: Request<Incoming>) -> Result<Settings, Failure> {
    let (body, _charge) = read_body(caller, request, BodyMax::OBJECT).await?;
    if body.is_empty() {
        return Ok(Settings::new());
    }
    let object = serde_json::from_slice(&body.joined());
    object.map_err(|error| InferError::Invalid(format!("body: {error}; expected a JSON object")).into())
}

/// The parameters of a change; those of a large body are read in the pool.
async fn read_parameters(caller: &Caller, body: Rope, charge: &Charge) -> Result<loads::Parameters, Failure> {
    if body.len() <= AT_ONCE_BYTES_MAX {
        return Ok(loads::Parameters::read(&body.joined())?);
    }
    // Beside it in one piece a text of it without its escapes, and what is decoded of that.
    charge.grow(2 * body.len()).map_err(IntakeError::from)?;
    let held = charge.clone();
    let read = move || {
        let _held = held;
        let joined = body.joined();
        drop(body);
        loads::Parameters::read(&joined)
    };
    Ok(caller.server.service.pool.run(charge, read).await??)
}

async fn compressed(reply: Reply, coding: Coding) -> Reply {
    let (mut head, body) = reply.into_parts();
    let Ok(body) = body.collect().await.map(http_body_util::Collected::to_bytes);
    match coding.encode(&body).await {
        Some(encoded) => {
            head.headers.insert(CONTENT_ENCODING, HeaderValue::from_static(coding.name()));
            Response::from_parts(head, Full::from(encoded))
        }
        None => Response::from_parts(head, Full::from(body)),
    }
}

fn status_of(up: bool) -> StatusCode {
    if up { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn ok(body: &impl Serialize) -> Reply {
    json_reply(StatusCode::OK, body)
}

fn json_reply(status: StatusCode, body: &impl Serialize) -> Reply {
    let body = serde_json::to_vec(body).expect("messages with string keys are representable in JSON");
    let mut reply = Response::new(Full::from(body));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

impl Failure {
    fn new(status: StatusCode, message: String) -> Self {
        Self { status, message, header: None, close: false }
    }

    /// RFC 9110, section 15.5.6.
    fn method(found: &str, allow: &str) -> Self {
        let message = format!("method: found {}, expected {allow}", excerpt(found));
        let header = HeaderValue::try_from(allow).ok().map(|allow| (ALLOW, allow));
        Self { header, ..Self::new(StatusCode::METHOD_NOT_ALLOWED, message) }
    }

    fn closing(status: StatusCode, message: String) -> Self {
        Self { close: true, ..Self::new(status, message) }
    }

    fn into_reply(self, version: Version) -> Reply {
        let mut reply = json_reply(self.status, &json!({ "error": self.message }));
        let headers = reply.headers_mut();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if let Some((name, value)) = self.header {
            headers.insert(name, value);
        }
        if self.close && version < Version::HTTP_2 {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        reply
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let status = match &refusal {
            Refusal::Unauthenticated { .. } | Refusal::NoTokens { .. } => StatusCode::UNAUTHORIZED,
            Refusal::Forbidden { .. } => StatusCode::FORBIDDEN,
            Refusal::CrossSite { .. } => StatusCode::FORBIDDEN,
            Refusal::Host { .. } => StatusCode::MISDIRECTED_REQUEST,
            Refusal::Repeated { .. } => StatusCode::BAD_REQUEST,
            Refusal::Rate { .. }
            | Refusal::Busy { .. }
            | Refusal::ClientBusy { .. }
            | Refusal::Probes { .. }
            | Refusal::Untaken { .. } => StatusCode::TOO_MANY_REQUESTS,
            Refusal::Overloaded { .. } | Refusal::Connections | Refusal::Draining => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::Head { .. } => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        };
        // RFC 6750, section 3; RFC 9110, section 10.2.3, in whole seconds.
        let header = match &refusal {
            Refusal::Unauthenticated { .. } | Refusal::NoTokens { .. } => {
                Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")))
            }
            Refusal::Forbidden { .. } => {
                Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer error=\"insufficient_scope\"")))
            }
            refusal => refusal.retry_after().map(|span| (RETRY_AFTER, (span.0 as u64).div_ceil(1_000_000_000).into())),
        };
        let close = matches!(
            refusal,
            Refusal::Head { .. }
                | Refusal::Repeated { .. }
                | Refusal::CrossSite { .. }
                | Refusal::Connections
                | Refusal::Draining
        );
        Self { status, message: refusal.to_string(), header, close }
    }
}

impl From<IntakeError> for Failure {
    fn from(error: IntakeError) -> Self {
        let status = match &error {
            IntakeError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            IntakeError::NoRoom(NoRoom::Client { .. }) => StatusCode::TOO_MANY_REQUESTS,
            IntakeError::NoRoom(NoRoom::All { .. }) | IntakeError::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
            IntakeError::Late(_) => StatusCode::REQUEST_TIMEOUT,
            IntakeError::Malformed(_) | IntakeError::TooManyChunks | IntakeError::Broken(_) => StatusCode::BAD_REQUEST,
        };
        let is_greedy = status == StatusCode::TOO_MANY_REQUESTS;
        let header = is_greedy.then_some((RETRY_AFTER, HeaderValue::from_static("1")));
        Self { header, ..Self::closing(status, error.to_string()) }
    }
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Self {
        let status = match error.cause() {
            InferError::Invalid(_) | InferError::NeverMet { .. } => StatusCode::BAD_REQUEST,
            InferError::NotFound(_) => StatusCode::NOT_FOUND,
            // As in Triton.
            InferError::Failed(_) | InferError::ChangeFailed(_) | InferError::InEnsemble { .. } => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            InferError::BadAnswer(_) | InferError::NotWritten { .. } => StatusCode::BAD_GATEWAY,
            InferError::Dropped(
                DropReason::Deadline | DropReason::ColdStart | DropReason::BackendLost | DropReason::InputLate,
            )
            | InferError::WindowMissed
            | InferError::NoAnswer { .. } => StatusCode::GATEWAY_TIMEOUT,
            InferError::Dropped(
                DropReason::QueueFull | DropReason::NoBackend | DropReason::Unloaded | DropReason::Cancelled,
            )
            | InferError::NoScheduler
            | InferError::NoBackend { .. }
            | InferError::NotLoaded { .. }
            | InferError::Unloaded { .. }
            | InferError::LoadedAnew { .. }
            | InferError::ChangesFull
            | InferError::ArenaFull { .. }
            | InferError::ArenaShare { .. }
            | InferError::DecodersFull { .. }
            | InferError::MemoryFull(_)
            | InferError::SchedulerLost
            | InferError::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_found_by_its_own_path() {
        for (place, (path, _, _)) in ROUTES.iter().enumerate() {
            let path = path.replace(['{', '}'], "");
            let found = ROUTER.at(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(found.value.contains(&place), "{path}");
        }
    }
}
