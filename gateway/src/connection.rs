//! Step 1, Step 10 on sockets: connections over HTTP/1.1 and HTTP/2, which a client's first bytes tell apart. Part of
//! the driver: it owns sockets and timeouts, and nothing else; `rest` and `grpc` say what a request means, the
//! frontend's core what becomes of it. Every listener answers both.
#![allow(clippy::disallowed_methods)] // Drivers own clocks.

use std::{
    cell::Cell,
    future::poll_fn,
    io::{self, Write as _},
    net::IpAddr,
    pin::pin,
    rc::Rc,
    task::ready,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::{
    Request, Response, Version,
    body::Incoming,
    header::{CONNECTION, CONTENT_TYPE, HeaderValue},
    rt::Executor,
    service::service_fn,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Notify,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::{
    access::Client,
    config::Limits,
    grpc,
    limits::{READ_BUFFER_BYTES_MAX, SEND_BUFFER_BYTES},
    metrics::Cause,
    probes, rest,
    server::{Caller, Drain, LINGER, Server, lines::Line},
};
use activity::{Activity, End, Leave, Watched};
use places::{Opened, PlaceId};
use socket::Socket;

pub(crate) mod activity;
mod last_call;
pub(crate) mod places;
mod socket;

/// Requests at once on one HTTP/2 connection.
const STREAMS_MAX: u32 = 256;
/// Streams that a client resets before they have been looked at, and those that we reset for its errors: more than that
/// is no client but a flood (CVE-2023-44487, CVE-2025-8671), and its connection ends.
const RESET_STREAMS_MAX: usize = 64;
/// HTTP/2's own 64 KiB would make a client wait for a round trip in the middle of every image.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
const FRAME_BYTES_MAX: u32 = 256 * 1024;
/// Bytes of replies that one HTTP/2 stream holds for a client that takes in slowly.
const SEND_BUFFER_BYTES_MAX: usize = 1 << 20;
/// Bytes of replies in the kernel that it has not sent, as a client has no room for them.
const UNSENT_BYTES_MAX: u32 = 128 << 10;
/// How long to leave the listener alone when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// How long a connection that is told to end has for it.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a connection may still ask when nobody new may connect, if it has not asked yet.
const LINGER_UNASKED: Duration = Duration::from_millis(50);
/// The same if its place is needed.
const ROOM_TIMEOUT: Duration = Duration::from_millis(50);
/// How long a connection beyond those that clients may have can be silent.
const SPARE_TIMEOUT: Duration = Duration::from_secs(5);
/// What a client hears for whom there is no place.
const NO_PLACE: &str =
    "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// A reply's body: REST's in one piece, gRPC's message by message.
type Body = Either<Full<Bytes>, tonic::body::Body>;

/// Serves connections until the server takes nothing new in and all of them have ended. Must run in a `LocalSet` or on
/// a `LocalRuntime`.
///
/// # Errors
/// If the listener cannot be closed in good order.
pub async fn serve(listener: TcpListener, server: Rc<Server>) -> io::Result<()> {
    let mut connections = tokio::task::JoinSet::new();
    let listening = server.drain.listen();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = server.drain.closed() => break,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, from)) => {
                connections.spawn_local(connection(Rc::clone(&server), stream, from.ip()));
            }
            Err(error) => {
                server.tell(Line::NotAccepted, format_args!("connections cannot be accepted: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // Once it is closed, a successor can have its address.
    let listener = listener.into_std()?;
    if let Err(error) = last_call::keep_newcomers_out(&listener) {
        tracing::debug!("who connects at the very end may be reset: {error}");
    }
    tokio::time::sleep(last_call::HANDSHAKES).await;
    while let Ok((stream, from)) = listener.accept() {
        stream.set_nonblocking(true)?;
        connections.spawn_local(connection(Rc::clone(&server), TcpStream::from_std(stream)?, from.ip()));
    }
    drop(listener);
    drop(listening);
    while connections.join_next().await.is_some() {}
    Ok(())
}

async fn connection(server: Rc<Server>, stream: TcpStream, from: IpAddr) {
    let limits = server.limits();
    let Some(place) = Place::take(&server, from, &limits) else {
        // Who expects TLS would not understand it. A new socket's buffer has room for it.
        if server.tls().is_none() {
            let _ = stream.into_std().and_then(|mut stream| stream.write_all(NO_PLACE.as_bytes()));
        }
        return;
    };
    if let Err(error) = tune(&stream, limits.body_timeout) {
        return server.tell(Line::NotSetUp, format_args!("a connection cannot be set up: {error}"));
    }
    let socket = Socket::new(stream);
    let Some(tls) = server.tls() else { return converse(&server, &socket, socket.clone(), &place, limits).await };
    let shaking = shake_hands(&server, &tls, socket.clone(), from);
    let mut shaking = pin!(tokio::time::timeout(limits.head_timeout, shaking));
    let accepted = loop {
        tokio::select! {
            accepted = &mut shaking => break accepted,
            leave = place.activity.told() => if leave == Leave::Room { return },
        }
    };
    match accepted {
        Ok(Ok(encrypted)) => {
            let certificate = encrypted.get_ref().1.peer_certificates().and_then(|chain| chain.first());
            let client = certificate.map(|certificate| Client::with_certificate(certificate));
            if client.is_none_or(|client| server.places.borrow_mut().rename(place.id, client, &limits)) {
                converse(&server, &socket, encrypted, &place, limits).await;
            } else {
                server.service.record.refusals().count(Cause::Connections);
            }
        }
        failed => {
            server.service.record.refusals().count(Cause::Handshake);
            let allowed = limits.head_timeout;
            match failed {
                Ok(Err(error)) => server.tell(Line::Handshake, format_args!("a TLS handshake failed: {error}")),
                _ => server.tell(
                    Line::Handshake,
                    format_args!("a TLS handshake was not done after {allowed:?} (head_timeout_ms)"),
                ),
            }
        }
    }
}

/// A TLS handshake, which goes on whenever those of its address, and all together, have not taken too long.
async fn shake_hands(
    server: &Server,
    tls: &TlsAcceptor,
    stream: Socket,
    from: IpAddr,
) -> io::Result<TlsStream<Socket>> {
    let (desk, from) = (&server.service.desk, Client::at(from));
    let mut shaking = pin!(tls.accept(stream));
    let mut pause = pin!(tokio::time::sleep(Duration::ZERO));
    poll_fn(|context| {
        let began = loop {
            let (now, due) = (desk.now(), server.handshakes.borrow().due(from));
            if due <= now {
                break now;
            }
            pause.as_mut().reset(tokio::time::Instant::now() + (due - now).to_duration());
            ready!(pause.as_mut().poll(context));
        };
        let polled = shaking.as_mut().poll(context);
        let now = desk.now();
        server.handshakes.borrow_mut().handle_work(now, from, now - began);
        polled
    })
    .await
}

/// Answers the requests of a connection until it ends. `stream` is the socket's, or what is encrypted on it.
async fn converse(
    server: &Rc<Server>,
    socket: &Socket,
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    place: &Place,
    limits: Limits,
) {
    let (activity, asked) = (&place.activity, Asked::default());
    if server.drain.has_begun() {
        activity.tell(Leave::Drain);
    }
    let service = service_fn(|request: Request<Incoming>| {
        asked.handle(request.version());
        // Streams of HTTP/2 are tasks of their own; requests of HTTP/1 would be answered one after another.
        let gives_way = request.version() < Version::HTTP_2 && activity.is_pipelined();
        let (server, request_open) = (Rc::clone(server), activity.open());
        let activity = Rc::clone(activity);
        // hyper and tokio move this future a dozen times, which is 12 KB large.
        Box::pin(async move {
            if gives_way {
                tokio::task::yield_now().await;
            }
            check_closed(&server, &request)?;
            let (caller, reply) = answer(server, &activity, request).await;
            Ok::<_, h2::Error>(reply.map(|body| Watched::new(body, request_open, caller)))
        })
    });
    let head_timeout = if activity.is_spare { limits.head_timeout.min(SPARE_TIMEOUT) } else { limits.head_timeout };
    let limits = Limits { head_timeout, ..limits };
    let builder = builder(limits);
    let mut serving = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = loop {
        let end = tokio::select! {
            biased;
            ended = &mut serving => break ended,
            end = activity.end(limits) => end,
            // Of a request that is under way nobody reads, nor writes.
            () = socket.broken() => return,
        };
        if end == End::Slow {
            server.service.record.refusals().count(Cause::SlowReader);
            let allowed = limits.body_timeout;
            let text = format_args!("a client did not take a reply in for {allowed:?} (body_timeout_ms)");
            return server.tell(Line::Slow, text);
        }
        if end == End::Told(Leave::Drain) {
            tokio::select! {
                ended = &mut serving => break ended,
                () = asked.lingered(&server.drain) => {}
            }
        }
        // HTTP/2 says GOAWAY and answers what it has; HTTP/1 answers what is under way and closes.
        serving.as_mut().graceful_shutdown();
        let allowed = match end {
            End::Told(Leave::Drain) => continue,
            End::Told(Leave::Room) => ROOM_TIMEOUT,
            End::Idle | End::Slow => LEAVE_TIMEOUT,
        };
        break tokio::time::timeout(allowed, serving).await.unwrap_or(Ok(()));
    };
    if let Err(error) = ended {
        server.tell(Line::Ended, format_args!("a connection ended: {error}"));
    }
}

/// What a connection has been asked, as far as it matters for how it ends.
#[derive(Default)]
struct Asked {
    version: Cell<Option<Version>>,
    changed: Notify,
}

impl Asked {
    fn handle(&self, version: Version) {
        if self.version.replace(Some(version)).is_none() {
            self.changed.notify_one();
        }
    }

    /// Returns when a connection is to end whose server drains. HTTP/2 has GOAWAY, at once. HTTP/1 has no word that
    /// crosses a request on its way without loss: the next reply is the one that closes, and until nothing new is
    /// taken in, and a while longer, one may come.
    async fn lingered(&self, drain: &Drain) {
        let closed = async {
            drain.closed().await;
            // A client that has connected asks within a round trip, or has said that it speaks HTTP/2 and waits.
            tokio::time::sleep(if self.version.get().is_some() { LINGER } else { LINGER_UNASKED }).await;
        };
        let is_http2 = async {
            while self.version.get().is_none_or(|version| version < Version::HTTP_2) {
                self.changed.notified().await;
            }
        };
        tokio::select! {
            () = closed => {}
            () = is_http2 => {}
        }
    }
}

/// Checks that a stream of gRPC comes before nothing new is taken in; health is always answered.
///
/// # Errors
/// What tells clients and proxies that they may ask another server: a status would be for the application.
fn check_closed(server: &Server, request: &Request<Incoming>) -> Result<(), h2::Error> {
    let is_grpc = || request.headers().get(CONTENT_TYPE).is_some_and(grpc::is_content_type);
    let is_late = server.drain.is_over() && request.version() >= Version::HTTP_2 && is_grpc();
    if is_late && !probes::is_in_grpc(request.uri().path()) {
        server.service.record.refusals().count(Cause::Draining);
        return Err(h2::Reason::REFUSED_STREAM.into());
    }
    Ok(())
}

/// A connection's place, until it ends.
struct Place {
    server: Rc<Server>,
    id: PlaceId,
    activity: Rc<Activity>,
}

impl Place {
    fn take(server: &Rc<Server>, from: IpAddr, limits: &Limits) -> Option<Self> {
        let Opened { place, told } = server.places.borrow_mut().open(Client::at(from), limits);
        let refusals = server.service.record.refusals();
        (0..told).for_each(|_| refusals.count(Cause::Idle));
        if place.as_ref().is_none_or(|(_, activity)| activity.is_spare) {
            refusals.count(Cause::Connections);
        }
        place.map(|(id, activity)| Self { server: Rc::clone(server), id, activity })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.server.places.borrow_mut().close(self.id);
        self.server.drain.handle_end();
    }
}

fn builder(limits: Limits) -> auto::Builder<Local> {
    let mut builder = auto::Builder::new(Local);
    // How long a head may take is the connection's own timer, which runs before either protocol is known.
    // A client that has said all it has to say may still listen.
    builder.http1().max_buf_size(READ_BUFFER_BYTES_MAX).half_close(true);
    // So that what is only a little too large is refused in the protocol's own terms; h2 cuts the rest off.
    let head_bytes_max = (2 * limits.head_bytes_max).min(READ_BUFFER_BYTES_MAX) as u32;
    builder
        .http2()
        .timer(TokioTimer::new())
        // A peer that is gone without a word.
        .keep_alive_interval(Some(limits.head_timeout))
        .keep_alive_timeout(limits.body_timeout)
        .max_concurrent_streams(STREAMS_MAX)
        .max_pending_accept_reset_streams(RESET_STREAMS_MAX)
        .max_local_error_reset_streams(RESET_STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_send_buf_size(SEND_BUFFER_BYTES_MAX)
        .max_header_list_size(head_bytes_max);
    builder
}

/// Replies go out at once; a client that takes nothing in is dropped by the kernel (RFC 5482), which keeps little of
/// what has been written meanwhile: the rest is with us, and charged.
fn tune(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_notsent_lowat(UNSENT_BYTES_MAX)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, millis)?)
}

/// A reply, and who is to be counted until it has been taken in.
async fn answer(
    server: Rc<Server>,
    activity: &Activity,
    request: Request<Incoming>,
) -> (Option<Rc<Caller>>, Response<Body>) {
    let version = request.version();
    let is_grpc = request.headers().get(CONTENT_TYPE).is_some_and(grpc::is_content_type);
    let admitted = Caller::admit(&server, activity, &request, is_grpc).map(Rc::new);
    let mut reply = match &admitted {
        Ok(caller) if is_grpc => grpc::answer(Rc::clone(caller), request).await.map(Either::Right),
        Ok(caller) => rest::answer(caller, request).await.map(Either::Left),
        Err(refusal) if is_grpc => tonic::Status::from(refusal.clone()).into_http().map(Either::Right),
        Err(refusal) => rest::refuse(refusal.clone(), version).map(Either::Left),
    };
    if version < Version::HTTP_2 && (activity.is_spare || server.drain.has_begun()) {
        reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    (admitted.ok(), reply)
}

/// Runs the streams of HTTP/2 connections on this thread.
#[derive(Debug, Clone, Copy)]
struct Local;

impl<F: Future<Output: 'static> + 'static> Executor<F> for Local {
    fn execute(&self, stream: F) {
        tokio::task::spawn_local(stream);
    }
}

#[cfg(test)]
mod tests;
