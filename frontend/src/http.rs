//! Steps 1 and 10 over HTTP/1.1: the Open Inference Protocol's REST routes. Part of the driver: it owns sockets and
//! timeouts, and nothing else; what a body means is `protocol`'s affair, what becomes of a request the core's.

use std::{cell::Cell, convert::Infallible, io, rc::Rc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body as _, Incoming},
    header::{ALLOW, CONNECTION, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use proto::scheduler_to_frontend::DropReason;
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
};

use crate::{desk::Desk, error::InferError, models::excerpt, protocol, rope::Rope, tasks::Timing};

/// Length of the JSON object that binary tensors follow.
const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
/// Where the request's time went; see [`timing_text`].
const TIMING: HeaderName = HeaderName::from_static("x-downbeat-timing");
/// Largest head of a request, and largest piece in which a body is read: few pieces, few system calls.
const READ_BUFFER_BYTES_MAX: usize = 256 * 1024;
/// How long to leave the listener alone when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Bounds on what clients can take up.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of one request's body.
    pub body_bytes_max: usize,
    /// Bytes of all bodies that have not been copied into slots.
    pub bodies_bytes_max: usize,
    /// Connections at once.
    pub connections_max: usize,
    /// How long a client may take to send a request's head; also how long a connection may stay idle.
    pub head_timeout: Duration,
    /// How long a client may take to send a request's body, and to take in what we send.
    pub body_timeout: Duration,
}

/// What all connections share.
struct Server {
    desk: Rc<Desk>,
    limits: Limits,
    connections: Cell<usize>,
    bodies_bytes: Cell<usize>,
}

/// An answer that is no success.
#[derive(Debug)]
struct Failure {
    status: StatusCode,
    message: String,
    /// Part of the request was not read, so the connection cannot go on.
    close: bool,
}

type Reply = Response<Full<Bytes>>;

/// Serves connections until the returned future is dropped. Must run in a `LocalSet`.
pub async fn serve(listener: TcpListener, desk: Rc<Desk>, limits: Limits) {
    let server = Rc::new(Server { desk, limits, connections: Cell::new(0), bodies_bytes: Cell::new(0) });
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = listener.accept().await;
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, _)) => {
                connections.spawn_local(connection(Rc::clone(&server), stream));
            }
            Err(error) => {
                tracing::warn!("HTTP connections cannot be accepted: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(server: Rc<Server>, mut stream: TcpStream) {
    let limits = server.limits;
    let _counted = Counted::add(&server.connections, 1);
    if server.connections.get() > limits.connections_max {
        let text =
            "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let _ = tokio::time::timeout(limits.body_timeout, stream.write_all(text.as_bytes())).await;
        return;
    }
    if let Err(error) = tune(&stream, limits.body_timeout) {
        tracing::warn!("an HTTP connection cannot be set up: {error}");
        return;
    }
    let service = service_fn(|request| {
        let server = Rc::clone(&server);
        async move { Ok::<_, Infallible>(answer(&server, request).await.unwrap_or_else(Failure::into_reply)) }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(READ_BUFFER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = serving.await {
        tracing::debug!("an HTTP connection ended: {error}");
    }
}

/// Replies go out at once; a client that takes nothing in is dropped by the kernel (RFC 5482).
fn tune(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, millis)?)
}

async fn answer(server: &Server, request: Request<Incoming>) -> Result<Reply, Failure> {
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let segments: Vec<&str> = path.split('/').collect();
    let desk = &server.desk;
    match segments.as_slice() {
        ["v2"] => get(&request, || Ok(json_reply(StatusCode::OK, &protocol::server_metadata()))),
        ["v2", "health", probe @ ("live" | "ready")] => get(&request, || {
            let ready = desk.with_core(crate::core::Core::is_ready);
            let up = *probe == "live" || ready;
            Ok(json_reply(status_of(up), &json!({ "live": true, "ready": ready })))
        }),
        ["v2", "models", model] => get(&request, || model_metadata(desk, model, None)),
        ["v2", "models", model, "versions", version] => get(&request, || model_metadata(desk, model, Some(version))),
        ["v2", "models", model, "ready"] => get(&request, || model_ready(desk, model, None)),
        ["v2", "models", model, "versions", version, "ready"] => {
            get(&request, || model_ready(desk, model, Some(version)))
        }
        ["v2", "models", model, "infer"] => infer(server, model, None, request).await,
        ["v2", "models", model, "versions", version, "infer"] => infer(server, model, Some(version), request).await,
        _ => Err(Failure::new(
            StatusCode::NOT_FOUND,
            format!("path: found '/{}', expected /v2, /v2/health/.., or /v2/models/..", excerpt(&path)),
        )),
    }
}

fn get(request: &Request<Incoming>, reply: impl FnOnce() -> Result<Reply, Failure>) -> Result<Reply, Failure> {
    if request.method() == Method::GET { reply() } else { wrong_method(request.method(), "GET") }
}

/// RFC 9110, section 15.5.6: 405 names the methods that would do.
fn wrong_method(found: &Method, expected: &'static str) -> Result<Reply, Failure> {
    let message = json!({ "error": format!("method: found {}, expected {expected}", excerpt(found.as_str())) });
    let mut reply = json_reply(StatusCode::METHOD_NOT_ALLOWED, &message);
    reply.headers_mut().insert(ALLOW, HeaderValue::from_static(expected));
    Ok(reply)
}

fn model_metadata(desk: &Desk, model: &str, version: Option<&str>) -> Result<Reply, Failure> {
    Ok(desk.with_model(model, version, |_, served, _| json_reply(StatusCode::OK, &protocol::model_metadata(served)))?)
}

fn model_ready(desk: &Desk, model: &str, version: Option<&str>) -> Result<Reply, Failure> {
    Ok(desk.with_model(model, version, |_, _, ready| {
        json_reply(status_of(ready), &json!({ "name": model, "ready": ready }))
    })?)
}

fn status_of(up: bool) -> StatusCode {
    if up { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn infer(
    server: &Server,
    name: &str,
    version: Option<&str>,
    request: Request<Incoming>,
) -> Result<Reply, Failure> {
    if request.method() != Method::POST {
        return wrong_method(request.method(), "POST");
    }
    let desk = &server.desk;
    if let Some(encoding) = request.headers().get(CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        let message = format!("Content-Encoding: found {encoding:?}, expected none: compression is not supported");
        return Err(Failure { close: true, ..Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message) });
    }
    let header_length = header_length(&request)?;
    let pending;
    let (id, outputs) = {
        // Before anything can be refused: a connection whose request was read to its end goes on.
        let (body, _counted) = read_body(server, request.into_body()).await?;
        let parsed = desk.with_model(name, version, |index, served, _| {
            protocol::parse_request(&served.model, index, &body, header_length)
        })??;
        pending = desk.submit(&parsed.checked)?;
        (parsed.id, parsed.outputs)
        // The body's bytes are in slots now, or were JSON; either way they go.
    };
    let reply = pending.wait().await?;
    let encoded = desk.with_model(name, version, |_, served, _| {
        protocol::encode_reply(&served.model, id.as_deref(), &outputs, &reply)
    })?;
    let content_type = if encoded.header_length.is_some() { "application/octet-stream" } else { "application/json" };
    let mut response = Response::new(Full::from(encoded.body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.extend(encoded.header_length.map(|length| (HEADER_LENGTH, HeaderValue::from(length))));
    headers.extend(HeaderValue::try_from(timing_text(&reply.timing)).ok().map(|timing| (TIMING, timing)));
    Ok(response)
}

fn header_length(request: &Request<Incoming>) -> Result<Option<usize>, Failure> {
    let Some(value) = request.headers().get(HEADER_LENGTH) else { return Ok(None) };
    match value.to_str().ok().and_then(|text| text.parse().ok()) {
        Some(length) => Ok(Some(length)),
        None => {
            let message = format!("Inference-Header-Content-Length: found {value:?}, expected a number of bytes");
            Err(Failure { close: true, ..Failure::new(StatusCode::BAD_REQUEST, message) })
        }
    }
}

/// Collects a body in the pieces in which it comes. The guard gives its bytes back to the common budget.
async fn read_body(server: &Server, mut body: Incoming) -> Result<(Rope, Counted<'_>), Failure> {
    let limits = server.limits;
    let closing = |status, message| Failure { close: true, ..Failure::new(status, message) };
    let too_large = |found: String| {
        let message = format!("body: found {found} bytes, expected at most {} (body_bytes_max)", limits.body_bytes_max);
        closing(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let announced = body.size_hint().lower();
    if announced > limits.body_bytes_max as u64 {
        return Err(too_large(announced.to_string()));
    }
    let mut counted = Counted::add(&server.bodies_bytes, 0);
    let collect = async {
        let mut rope = Rope::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| closing(StatusCode::BAD_REQUEST, format!("body: {error}")))?;
            let Ok(piece) = frame.into_data() else { continue };
            if rope.len() + piece.len() > limits.body_bytes_max {
                return Err(too_large("more".to_owned()));
            }
            counted.grow(piece.len());
            if server.bodies_bytes.get() > limits.bodies_bytes_max {
                let message =
                    "the bodies of all requests together exceed bodies_bytes_max; send less at once".to_owned();
                return Err(closing(StatusCode::SERVICE_UNAVAILABLE, message));
            }
            rope.push(piece);
        }
        Ok(rope)
    };
    match tokio::time::timeout(limits.body_timeout, collect).await {
        Ok(collected) => Ok((collected?, counted)),
        Err(_) => {
            let message =
                format!("body: incomplete after {:?}, the time that a client has for it", limits.body_timeout);
            Err(closing(StatusCode::REQUEST_TIMEOUT, message))
        }
    }
}

/// Where the time went, in whole microseconds since admission, for the row that came last: `queued` by the scheduler,
/// `granted` a GPU, `planned` and `fetched` at the backend, execution `started` (planned for `exec_at`) and `finished`,
/// `answered` here, and the `deadline`; then the batch it ran in and `backend:gpu`.
#[must_use]
pub fn timing_text(timing: &Timing) -> String {
    let since = |at_ns: i64| (at_ns - timing.admitted_at.0) / 1000;
    let stamps = &timing.stamps;
    format!(
        "queued={};granted={};planned={};fetched={};exec_at={};started={};finished={};answered={};deadline={};batch={};\
         gpu={}:{}",
        since(stamps.queued_at_ns),
        since(stamps.granted_at_ns),
        since(stamps.planned_at_ns),
        since(stamps.fetched_at_ns),
        since(stamps.exec_at_ns),
        since(stamps.started_at_ns),
        since(stamps.finished_at_ns),
        since(timing.answered_at.0),
        since(timing.deadline.0),
        timing.batch_size,
        timing.backend.0,
        timing.gpu,
    )
}

fn json_reply(status: StatusCode, body: &Value) -> Reply {
    let mut reply = Response::new(Full::from(body.to_string()));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

impl Failure {
    fn new(status: StatusCode, message: String) -> Self {
        Self { status, message, close: false }
    }

    fn into_reply(self) -> Reply {
        let mut reply = json_reply(self.status, &json!({ "error": self.message }));
        let headers = reply.headers_mut();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        reply
    }
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Self {
        let status = match &error {
            InferError::Invalid(_) | InferError::NeverMet { .. } => StatusCode::BAD_REQUEST,
            InferError::NotFound(_) => StatusCode::NOT_FOUND,
            InferError::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
            InferError::BadAnswer(_) => StatusCode::BAD_GATEWAY,
            InferError::Dropped(DropReason::Deadline | DropReason::BackendLost)
            | InferError::WindowMissed
            | InferError::NoAnswer { .. } => StatusCode::GATEWAY_TIMEOUT,
            InferError::Dropped(DropReason::QueueFull | DropReason::NoBackend | DropReason::Cancelled)
            | InferError::NoScheduler
            | InferError::NoBackend { .. }
            | InferError::ArenaFull { .. }
            | InferError::SchedulerLost
            | InferError::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, error.to_string())
    }
}

/// A share of a common count, given back when dropped.
struct Counted<'a> {
    total: &'a Cell<usize>,
    share: usize,
}

impl<'a> Counted<'a> {
    fn add(total: &'a Cell<usize>, share: usize) -> Self {
        let mut counted = Self { total, share: 0 };
        counted.grow(share);
        counted
    }

    fn grow(&mut self, by: usize) {
        self.share += by;
        self.total.set(self.total.get() + by);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.total.set(self.total.get() - self.share);
    }
}

#[cfg(test)]
mod tests;
