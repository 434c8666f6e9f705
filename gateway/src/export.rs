//! Sends traces to a collector of OpenTelemetry, from a thread of its own: OTLP over HTTP or HTTPS, in batches. A batch
//! is tried a few times if the collector is not there or says that it is busy. What it never takes is lost and counted,
//! and costs nothing else. Part of the driver: it owns sockets, a thread and a clock.
#![allow(clippy::disallowed_methods)] // Drivers own clocks.

use std::{
    io,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Request, Uri,
    client::conn::http1,
    header::{CONNECTION, CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::mpsc,
    task::JoinSet,
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};

use crate::{
    config::Otlp,
    metrics::{TraceOutcome, Traces},
    trace::{Trace, otlp},
};

/// Traces in one request.
const BATCH_MAX: usize = 256;
/// How long a trace waits for others.
const BATCH_WAIT: Duration = Duration::from_secs(1);
/// How often a batch is tried, and the wait before the second time; each later wait is twice the one before. Meanwhile
/// traces wait in the queue, and what does not fit there is lost.
const ATTEMPTS_MAX: u32 = 4;
const RETRY_FIRST: Duration = Duration::from_millis(250);
/// Where collectors take traces in (OTLP/HTTP, "Request": the default path).
const PATH: &str = "/v1/traces";

/// Where the collector is.
struct Collector {
    authority: String,
    path: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    timeout: Duration,
}

/// Why a batch was not taken.
struct Refused {
    cause: io::Error,
    /// Whether it may be another time.
    is_passing: bool,
}

impl From<io::Error> for Refused {
    fn from(cause: io::Error) -> Self {
        Self { cause, is_passing: true }
    }
}

/// Starts the thread that sends what is put into the queue; it ends when the queue's sender is dropped.
///
/// # Errors
/// One line that names the key, and tells what was found and expected.
pub(crate) fn start(otlp: &Otlp, traces: Traces) -> Result<mpsc::Sender<Trace>, String> {
    let collector = collector(otlp)?;
    let (queue, waiting) = mpsc::channel(otlp.queue_max);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("otlp: the exporter cannot be set up: {error}"))?;
    let run = move || runtime.block_on(collector.export(waiting, &traces));
    std::thread::Builder::new()
        .name("otlp".into())
        .spawn(run)
        .map_err(|error| format!("otlp: the exporter cannot be set up: {error}"))?;
    Ok(queue)
}

/// Reads what [`start`] does.
///
/// # Errors
/// As it.
pub(crate) fn check(otlp: &Otlp) -> Result<(), String> {
    collector(otlp).map(drop)
}

fn collector(otlp: &Otlp) -> Result<Collector, String> {
    if otlp.queue_max == 0 {
        return Err("otlp.queue_max: found 0, expected at least 1".to_owned());
    }
    Collector::of(otlp)
}

/// Now, in nanoseconds since 1970.
pub(crate) fn unix_ns() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

impl Collector {
    fn of(otlp: &Otlp) -> Result<Self, String> {
        let wrong = || format!("otlp.endpoint: found '{}', expected http[s]://HOST:PORT", otlp.endpoint);
        let uri: Uri = otlp.endpoint.parse().map_err(|_| wrong())?;
        let authority = uri.authority().filter(|authority| authority.port().is_some()).ok_or_else(wrong)?;
        let tls = match (uri.scheme_str(), &otlp.authority) {
            (Some("http"), None) => None,
            (Some("http"), Some(_)) => return Err("otlp.authority: found a file, expected none for http://".to_owned()),
            (Some("https"), None) => return Err("otlp.authority: found none, expected a file for https://".to_owned()),
            (Some("https"), Some(file)) => {
                let client = transport::client_tls("otlp.authority", file).map_err(|error| error.to_string())?;
                let name = ServerName::try_from(authority.host().to_owned()).map_err(|_| wrong())?;
                Some((TlsConnector::from(Arc::new(client)), name))
            }
            _ => return Err(wrong()),
        };
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let path = if path == "/" { PATH } else { path }.to_owned();
        Ok(Self { authority: authority.to_string(), path, tls, timeout: Duration::from_millis(otlp.timeout_ms) })
    }

    async fn export(self, mut waiting: mpsc::Receiver<Trace>, traces: &Traces) {
        let mut reachable = true;
        let mut batch = Vec::new();
        while let Some(first) = waiting.recv().await {
            batch.push(first);
            let _ = tokio::time::timeout(BATCH_WAIT, async {
                while batch.len() < BATCH_MAX
                    && let Some(next) = waiting.recv().await
                {
                    batch.push(next);
                }
            })
            .await;
            let sent = self.send(otlp::encode(&batch, rand::random).into()).await;
            match &sent {
                Ok(()) => traces.count(TraceOutcome::Exported, batch.len()),
                Err(error) => {
                    traces.count(TraceOutcome::CollectorFailed, batch.len());
                    if reachable {
                        tracing::warn!("otlp.endpoint: {} traces are lost: {}: {error}", batch.len(), self.authority);
                    }
                }
            }
            // Told once, not with every batch.
            reachable = sent.is_ok();
            batch.clear();
        }
    }

    async fn send(&self, body: Bytes) -> io::Result<()> {
        let mut wait = RETRY_FIRST;
        for attempt in 1.. {
            let sent = tokio::time::timeout(self.timeout, self.post(body.clone())).await;
            match sent.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into())) {
                Ok(()) => break,
                Err(Refused { is_passing: true, .. }) if attempt < ATTEMPTS_MAX => {
                    tokio::time::sleep(wait).await;
                    wait *= 2;
                }
                Err(Refused { cause, .. }) => return Err(cause),
            }
        }
        Ok(())
    }

    async fn post(&self, body: Bytes) -> Result<(), Refused> {
        let stream = TcpStream::connect(&self.authority).await?;
        match &self.tls {
            None => self.post_over(stream, body).await,
            Some((tls, name)) => self.post_over(tls.connect(name.clone(), stream).await?, body).await,
        }
    }

    async fn post_over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        body: Bytes,
    ) -> Result<(), Refused> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let request = Request::post(&self.path)
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json")
            .header(CONNECTION, "close")
            .body(Full::new(body))
            .map_err(io::Error::other)?;
        // It moves the bytes until it is dropped.
        let mut moving = JoinSet::new();
        moving.spawn(connection);
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        match response.status() {
            status if status.is_success() => Ok(()),
            // OTLP/HTTP, "Retryable Response Codes".
            status => Err(Refused {
                cause: io::Error::other(format!("it answered {status}")),
                is_passing: [429, 502, 503, 504].contains(&status.as_u16()),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_urls_of_http() {
        let of = |endpoint: &str| {
            let otlp = Otlp { endpoint: endpoint.into(), authority: None, trace_rate: 0, queue_max: 1, timeout_ms: 1 };
            Collector::of(&otlp).map(|collector| (collector.authority, collector.path))
        };
        assert_eq!(of("http://127.0.0.1:4318"), Ok(("127.0.0.1:4318".into(), PATH.into())));
        assert_eq!(of("http://collector:80/x/y"), Ok(("collector:80".into(), "/x/y".into())));
        for wrong in ["", "collector:4318", "ftp://collector:4318", "http://collector"] {
            let expected = format!("otlp.endpoint: found '{wrong}', expected http[s]://HOST:PORT");
            assert_eq!(of(wrong), Err(expected));
        }
        let expected = "otlp.authority: found none, expected a file for https://";
        assert_eq!(of("https://collector:4318"), Err(expected.to_owned()));
    }
}
