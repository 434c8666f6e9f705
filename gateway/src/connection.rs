//! Steps 1 and 10 on sockets: connections over HTTP/1.1 and HTTP/2, which a client's first bytes tell apart. Part of
//! the driver: it owns sockets and timeouts, and nothing else; `rest` and `grpc` say what a request means, the
//! frontend's core what becomes of it. Every listener answers both.
#![allow(clippy::disallowed_methods)] // Drivers own clocks.

use std::{cell::Cell, convert::Infallible, io, net::IpAddr, pin::pin, rc::Rc, time::Duration};

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::{
    Request, Response,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
    rt::Executor,
    service::service_fn,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{
    config::Limits,
    grpc,
    metrics::Cause,
    rest,
    server::{Caller, READ_BUFFER_BYTES_MAX, Server},
};
use activity::{Activity, Watched};

mod activity;

/// Requests at once on one HTTP/2 connection.
const STREAMS_MAX: u32 = 256;
/// HTTP/2's own 64 KiB would make a client wait for a round trip in the middle of every image.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
const FRAME_BYTES_MAX: u32 = 256 * 1024;
/// Bytes of replies that one HTTP/2 stream holds for a client that takes in slowly.
const SEND_BUFFER_BYTES_MAX: usize = 1 << 20;
/// How long to leave the listener alone when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// How long a connection that is told to end has for it.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// A reply's body: REST's in one piece, gRPC's message by message.
type Body = Either<Full<Bytes>, tonic::body::Body>;

/// Serves connections until the returned future is dropped. Must run in a `LocalSet` or on a `LocalRuntime`.
pub async fn serve(listener: TcpListener, server: Rc<Server>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = listener.accept().await;
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, from)) => {
                connections.spawn_local(connection(Rc::clone(&server), stream, from.ip()));
            }
            Err(error) => {
                tracing::warn!("connections cannot be accepted: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(server: Rc<Server>, mut stream: TcpStream, from: IpAddr) {
    let limits = server.limits;
    let _counted = Counted::add(&server.connections);
    if server.connections.get() > limits.connections_max {
        server.service.record.refusals().count(Cause::Connections);
        let text =
            "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        // Who expects TLS would not understand it.
        if server.tls.is_none() {
            let _ = tokio::time::timeout(limits.body_timeout, stream.write_all(text.as_bytes())).await;
        }
        return;
    }
    if let Err(error) = tune(&stream, limits.body_timeout) {
        tracing::warn!("a connection cannot be set up: {error}");
        return;
    }
    let Some(tls) = &server.tls else { return converse(&server, stream, from).await };
    match tokio::time::timeout(limits.head_timeout, tls.accept(stream)).await {
        Ok(Ok(encrypted)) => converse(&server, encrypted, from).await,
        failed => {
            server.service.record.refusals().count(Cause::Handshake);
            match failed {
                Ok(Err(error)) => tracing::debug!("a TLS handshake failed: {error}"),
                _ => tracing::debug!("a TLS handshake was not done after {:?} (head_timeout_ms)", limits.head_timeout),
            }
        }
    }
}

/// Answers the requests of a connection until it ends.
async fn converse(server: &Rc<Server>, stream: impl AsyncRead + AsyncWrite + Unpin + 'static, from: IpAddr) {
    let limits = server.limits;
    let activity = Activity::new();
    let service = service_fn(|request| {
        let (server, request_open) = (Rc::clone(server), activity.open());
        async move {
            let (caller, reply) = answer(server, from, request).await;
            Ok::<_, Infallible>(reply.map(|body| Watched::new(body, request_open, caller)))
        }
    });
    let builder = builder(limits);
    let mut serving = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = activity.idle(limits) => {
            serving.as_mut().graceful_shutdown();
            tokio::time::timeout(LEAVE_TIMEOUT, serving).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!("a connection ended: {error}");
    }
}

fn builder(limits: Limits) -> auto::Builder<Local> {
    let mut builder = auto::Builder::new(Local);
    builder.http1().max_buf_size(READ_BUFFER_BYTES_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        // A peer that is gone without a word.
        .keep_alive_interval(Some(limits.head_timeout))
        .keep_alive_timeout(limits.body_timeout)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_send_buf_size(SEND_BUFFER_BYTES_MAX)
        .max_header_list_size(READ_BUFFER_BYTES_MAX as u32);
    builder
}

/// Replies go out at once; a client that takes nothing in is dropped by the kernel (RFC 5482).
fn tune(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, millis)?)
}

/// A reply, and who is to be counted until it has been taken in.
async fn answer(server: Rc<Server>, from: IpAddr, request: Request<Incoming>) -> (Option<Rc<Caller>>, Response<Body>) {
    let content_type = request.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let is_grpc = content_type.is_some_and(|value| value.starts_with(b"application/grpc"));
    let caller = match Caller::admit(&server, from, &request) {
        Ok(caller) => Rc::new(caller),
        Err(refusal) if is_grpc => return (None, tonic::Status::from(refusal).into_http().map(Either::Right)),
        Err(refusal) => return (None, rest::refuse(refusal, request.version()).map(Either::Left)),
    };
    let reply = if is_grpc {
        grpc::answer(Rc::clone(&caller), request).await.map(Either::Right)
    } else {
        rest::answer(&caller, request).await.map(Either::Left)
    };
    (Some(caller), reply)
}

/// Runs the streams of HTTP/2 connections on this thread.
#[derive(Debug, Clone, Copy)]
struct Local;

impl<F: Future<Output: 'static> + 'static> Executor<F> for Local {
    fn execute(&self, stream: F) {
        tokio::task::spawn_local(stream);
    }
}

/// One of a common count, given back when dropped.
struct Counted<'a>(&'a Cell<usize>);

impl<'a> Counted<'a> {
    fn add(total: &'a Cell<usize>) -> Self {
        total.set(total.get() + 1);
        Self(total)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests;
