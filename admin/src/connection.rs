//! One connection of the listener: a page over HTTP/1, or gRPC's own question for health over HTTP/2.

use std::{
    convert::Infallible,
    os::fd::AsFd as _,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, Request, Response, StatusCode, Version, body::Incoming, header, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use proto::Span;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::Notify,
    time::timeout,
};
use tonic::{body::Body, codegen::Service as _};
use tonic_health::pb::health_server::HealthServer;
use transport::{Address, Clock};

use crate::{
    health::Health,
    others,
    pages::{Page, Pages},
};

/// Bytes of a request's head; Prometheus's are a few hundred.
const HEAD_BYTES_MAX: usize = 8_192;
/// Bytes taken of a connection; whatever is behind them is no request.
const READ_BYTES_MAX: u64 = 16_384;
/// From a connection's start to its end.
const TIMEOUT: Span = Span::from_millis(5_000);
/// The same over HTTP/2, whose clients keep their connections.
const HTTP2_TIMEOUT: Span = Span::from_millis(60_000);
/// How long a connection may take to end.
const LINGER: Span = Span::from_millis(1_000);
/// Requests of a connection over HTTP/2, which are less than a page each. Whoever asks once more connects again.
const HTTP2_REQUESTS_MAX: u32 = 8;
/// Where gRPC asks.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// What all connections tell.
pub(crate) struct Site {
    clock: Clock,
    /// On one thread, which never waits for it.
    pages: Mutex<Pages>,
    health: HealthServer<Health>,
    /// Whose programs' metrics are told here, too.
    also: Vec<String>,
}

impl Site {
    pub(crate) fn new(clock: Clock, pages: Pages, also: &[Address]) -> Self {
        let health = Health { clock, vitals: pages.vitals().clone() };
        let health = HealthServer::new(health).max_decoding_message_size(HEAD_BYTES_MAX);
        Self { clock, pages: Mutex::new(pages), health, also: also.iter().map(Address::to_string).collect() }
    }

    fn page(&self, target: &str) -> Result<Page, String> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner).of(self.clock.now(), target)
    }

    /// Over HTTP/1.
    async fn answer(&self, method: &Method, target: &str) -> Response<Body> {
        let Page { status, content_type, fields, mut body } = match self.page(target) {
            Ok(page) => page,
            Err(there) => return reply(StatusCode::NOT_FOUND, TEXT, there),
        };
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut refusal = reply(StatusCode::METHOD_NOT_ALLOWED, TEXT, String::new());
            refusal.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static("GET, HEAD"));
            return refusal;
        }
        if target == "/metrics" && !self.also.is_empty() {
            body.push_str(&others::metrics_of(&self.also).await);
        }
        let mut reply = reply(status, content_type, body);
        for &(field, value) in fields {
            reply.headers_mut().insert(field, header::HeaderValue::from_static(value));
        }
        reply
    }

    /// Over HTTP/2: what is large is not told there, as a client may ask for it many times and take none of it.
    async fn answer_grpc(&self, request: Request<Incoming>) -> Response<Body> {
        if !request.uri().path().starts_with(HEALTH) {
            return reply(StatusCode::NOT_FOUND, TEXT, "over HTTP/2 only grpc.health.v1.Health is here\n".to_owned());
        }
        let Ok(answer) = self.health.clone().call(request).await;
        answer
    }
}

const TEXT: &str = "text/plain; charset=utf-8";

fn reply(status: StatusCode, content_type: &'static str, body: String) -> Response<Body> {
    let mut reply = Response::new(Body::new(Full::new(Bytes::from(body))));
    *reply.status_mut() = status;
    for (field, value) in [
        (header::CONTENT_TYPE, content_type),
        // It is how things are now, and a browser takes it as nothing else than it is.
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        reply.headers_mut().insert(field, header::HeaderValue::from_static(value));
    }
    reply
}

/// What was asked over HTTP/2.
#[derive(Default)]
struct Asked {
    requests: AtomicU32,
    /// It is HTTP/2.
    begun: Notify,
    /// No more is answered.
    enough: Notify,
}

impl Asked {
    fn count(&self) {
        self.begun.notify_one();
        if self.requests.fetch_add(1, Ordering::Relaxed) + 1 == HTTP2_REQUESTS_MAX {
            self.enough.notify_one();
        }
    }

    /// Until nothing more is answered; whether the client is to be told, which HTTP/2 can.
    async fn is_over(&self) -> bool {
        if timeout(TIMEOUT.to_duration(), self.begun.notified()).await.is_err() {
            return false;
        }
        let _ = timeout(HTTP2_TIMEOUT.to_duration(), self.enough.notified()).await;
        true
    }
}

/// Serves a connection until its end, which comes whatever its client does.
pub(crate) async fn serve(stream: TcpStream, site: Arc<Site>) {
    // Another descriptor of it, so that it is closed no sooner than this one is.
    let Ok(twin) = stream.as_fd().try_clone_to_owned() else { return };
    let Ok(mut twin) = TcpStream::from_std(twin.into()) else { return };
    let (read, write) = stream.into_split();
    let io = TokioIo::new(tokio::io::join(read.take(READ_BYTES_MAX), write));
    let asked = Arc::new(Asked::default());
    let told = Arc::clone(&asked);
    let service = service_fn(move |request: Request<Incoming>| {
        let (site, asked) = (Arc::clone(&site), Arc::clone(&asked));
        async move {
            if request.version() != Version::HTTP_2 {
                let target = request.uri().path_and_query().map_or("", |target| target.as_str());
                return Ok::<_, Infallible>(site.answer(request.method(), target).await);
            }
            asked.count();
            Ok(site.answer_grpc(request).await)
        }
    });
    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http1().keep_alive(false).half_close(true).max_buf_size(HEAD_BYTES_MAX);
    server.http2().max_concurrent_streams(HTTP2_REQUESTS_MAX).max_header_list_size(HEAD_BYTES_MAX as u32);
    let mut connection = pin!(server.serve_connection(io, service));
    let closes = tokio::select! {
        _ = connection.as_mut() => true,
        is_told = told.is_over() => is_told,
    };
    if !closes {
        return;
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(LINGER.to_duration(), connection).await;
    // A socket that is closed while bytes of a request lie there unread takes the answer back (RFC 9112, section 9.6).
    let _ = twin.shutdown().await;
    let mut bytes = [0; 1_024];
    let unread = async { while twin.read(&mut bytes).await.is_ok_and(|count| count > 0) {} };
    let _ = timeout(LINGER.to_duration(), unread).await;
}
