//! Sends and receives: one thread, one clock, a pool of keep-alive connections.
#![allow(clippy::disallowed_methods, reason = "the load generator's only place with a clock")]

use std::{
    cell::RefCell,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, StatusCode, Uri, header::HeaderMap};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use thiserror::Error;
use tokio::{
    io::unix::AsyncFd,
    task::{JoinSet, LocalSet},
};

use super::{
    request::{Arrivals, Input, Stream},
    tally::Tally,
};

/// Where to send, and for how long.
#[derive(Debug, Clone)]
pub struct Target {
    /// The server's HTTP address.
    pub address: SocketAddr,
    /// How long requests are sent.
    pub span: Duration,
    /// Decides the arrivals.
    pub seed: u64,
}

/// Why no load could be generated.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The operating system refused something the generator needs.
    #[error("the load generator could not start: {0}")]
    Start(#[from] std::io::Error),
    /// The server could not be asked what the model takes.
    #[error("the server does not tell what the model takes: {0}")]
    Metadata(String),
}

/// Requests of one stream under way at once; more of them count as errors, because this client, not the server, would
/// be what is measured.
const IN_FLIGHT_MAX: usize = 4096;
/// How long an answer is waited for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Answers longer than this are errors.
const ANSWER_BYTES_MAX: usize = 16 << 20;

type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// Sends all streams to the target and waits for the last answer. `on_progress` is told the elapsed fraction now and
/// then.
///
/// # Errors
/// If no timer or runtime could be made. Whatever goes wrong with a request is counted in its tally.
pub fn generate(target: &Target, streams: &[Stream], on_progress: impl Fn(f64)) -> Result<Vec<Tally>, LoadError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tallies: Vec<_> = streams.iter().map(|_| Rc::new(RefCell::new(Tally::default()))).collect();
    LocalSet::new().block_on(&runtime, async {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client: HttpClient = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_timer(TokioTimer::new())
            .build(connector);
        let started = Instant::now();
        let mut senders = JoinSet::new();
        for (index, stream) in streams.iter().enumerate() {
            let sender = Sender {
                client: client.clone(),
                uri: model_uri(target.address, &stream.model, "/infer"),
                stream: stream.clone(),
                tally: tallies[index].clone(),
                started,
            };
            let random = ChaCha8Rng::seed_from_u64(target.seed.wrapping_add(index as u64));
            let pacer = Pacer::new()?;
            senders.spawn_local(sender.send_all(pacer, random, target.span));
        }
        let mut progress = tokio::time::interval(Duration::from_millis(100));
        loop {
            tokio::select! {
                ended = senders.join_next() => match ended {
                    None => break,
                    Some(result) => result.expect("a sender does not panic"),
                },
                _ = progress.tick() => on_progress((started.elapsed().as_secs_f64() / target.span.as_secs_f64()).min(1.0)),
            }
        }
        Ok::<(), std::io::Error>(())
    })?;
    Ok(tallies.into_iter().map(|tally| Rc::unwrap_or_clone(tally).into_inner()).collect())
}

/// Asks the server for the name, datatype and shape (without the batch dimension) of a model's first input.
///
/// # Errors
/// If the server does not answer, or does not have the model.
pub fn first_input(address: SocketAddr, model: &str) -> Result<(String, String, Vec<usize>), LoadError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client: HttpClient = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        let metadata = get_json(&client, model_uri(address, model, "")).await.map_err(LoadError::Metadata)?;
        let input = &metadata["inputs"][0];
        let text = |key: &str| input[key].as_str().map(str::to_owned);
        let shape = input["shape"].as_array().map(|shape| {
            shape.iter().skip(1).filter_map(|size| usize::try_from(size.as_u64()?).ok()).collect::<Vec<usize>>()
        });
        match (text("name"), text("datatype"), shape) {
            (Some(name), Some(datatype), Some(shape)) => Ok((name, datatype, shape)),
            _ => Err(LoadError::Metadata(format!("its metadata names no input: {metadata}"))),
        }
    })
}

/// A GET that must answer 200 with JSON.
async fn get_json(client: &HttpClient, uri: Uri) -> Result<serde_json::Value, String> {
    let request = Request::get(uri).body(Full::default()).expect("a valid URI makes a valid request");
    let response = client.request(request).await.map_err(|error| deepest(&error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| deepest(&*error))?.to_bytes();
    if status != StatusCode::OK {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&body)));
    }
    serde_json::from_slice(&body).map_err(|error| error.to_string())
}

/// Whether the model is ready to be served.
#[must_use]
pub fn is_ready(address: SocketAddr, model: &str) -> bool {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return false };
    runtime.block_on(async {
        let client: HttpClient = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        let request = Request::get(model_uri(address, model, "/ready")).body(Full::default());
        let request = request.expect("a valid URI makes a valid request");
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.request(request)).await;
        matches!(answer, Ok(Ok(response)) if response.status() == StatusCode::OK)
    })
}

fn model_uri(address: SocketAddr, model: &str, rest: &str) -> Uri {
    let escape = |byte| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    let path: String = model.bytes().map(escape).collect();
    format!("http://{address}/v2/models/{path}{rest}").parse().expect("an escaped path makes a valid URI")
}

struct Sender {
    client: HttpClient,
    uri: Uri,
    stream: Stream,
    tally: Rc<RefCell<Tally>>,
    started: Instant,
}

impl Sender {
    async fn send_all(self, pacer: Pacer, random: ChaCha8Rng, span: Duration) {
        match self.stream.arrivals {
            Arrivals::OneAtATime => self.send_one_at_a_time(span).await,
            Arrivals::Poisson { rate_rps } => self.send_poisson(pacer, random, rate_rps, span).await,
        }
    }

    async fn send_one_at_a_time(self, span: Duration) {
        for number in 0.. {
            let now = Instant::now();
            if now >= self.started + span {
                break;
            }
            self.tally.borrow_mut().sent += 1;
            self.send_one(number, now).await;
        }
    }

    async fn send_poisson(self, pacer: Pacer, mut random: ChaCha8Rng, rate_rps: f64, span: Duration) {
        let this = Rc::new(self);
        let mut in_flight = JoinSet::new();
        let mut at = Duration::ZERO;
        for number in 0.. {
            // Gaps of a Poisson process are exponential. `random` is below 1, so the logarithm is finite.
            at += Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() / rate_rps);
            if at >= span {
                break;
            }
            let intended = this.started + at;
            pacer.wait_until(intended).await;
            while in_flight.try_join_next().is_some() {}
            this.tally.borrow_mut().sent += 1;
            if in_flight.len() >= IN_FLIGHT_MAX {
                this.tally.borrow_mut().record_error(format!("not sent: {IN_FLIGHT_MAX} requests wait for answers"));
                continue;
            }
            let this = this.clone();
            in_flight.spawn_local(async move { this.send_one(number, intended).await });
        }
        while in_flight.join_next().await.is_some() {}
    }

    async fn send_one(&self, number: usize, intended: Instant) {
        let index = number % self.stream.inputs.len();
        let input = &self.stream.inputs[index];
        let outcome = match tokio::time::timeout(ANSWER_TIMEOUT, self.exchange(input)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(format!("no answer in {} s", ANSWER_TIMEOUT.as_secs())),
        };
        let latency_us = intended.elapsed().as_secs_f64() * 1e6;
        let mut tally = self.tally.borrow_mut();
        match outcome {
            Err(what) => tally.record_error(what),
            Ok(answer) => match answer.status {
                StatusCode::OK => {
                    let verdict = input.judge(&answer.body, answer.json_bytes());
                    let timing = answer.headers.get("x-downbeat-timing").and_then(|value| value.to_str().ok());
                    tally.record_served(latency_us, self.stream.slo_ms, (index, verdict), timing);
                }
                StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                    tally.record_dropped(answer.error_text());
                }
                status => tally.record_error(format!("{status}: {}", answer.error_text())),
            },
        }
    }

    async fn exchange(&self, input: &Input) -> Result<Answer, String> {
        let request = Request::post(self.uri.clone())
            .header("content-type", "application/octet-stream")
            .header("inference-header-content-length", input.json_bytes())
            .body(Full::new(input.body()))
            .expect("a valid URI and valid headers make a valid request");
        let response = self.client.request(request).await.map_err(|error| deepest(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| deepest(&*error))?;
        Ok(Answer { status: head.status, headers: head.headers, body: body.to_bytes() })
    }
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn json_bytes(&self) -> usize {
        let header = self.headers.get("inference-header-content-length");
        header.and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(self.body.len())
    }

    fn error_text(&self) -> String {
        let body: Option<serde_json::Value> = serde_json::from_slice(&self.body).ok();
        let text = body.as_ref().and_then(|body| body["error"].as_str());
        text.unwrap_or("no error text").to_owned()
    }
}

/// The innermost cause says most: "connection refused" rather than "client error".
fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}

/// Sleeps with the kernel's resolution: the runtime's own timer wheel counts in milliseconds, which is a good part of
/// the latencies measured here.
struct Pacer(AsyncFd<std::os::fd::OwnedFd>);

impl Pacer {
    fn new() -> std::io::Result<Self> {
        let timer =
            rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        // An `OwnedFd` keeps its descriptor for its whole life, which is what the unsafe `register` asks its caller for.
        #[expect(deprecated, reason = "the replacement is unsafe, and this crate forbids that")]
        let timer = AsyncFd::new(timer)?;
        Ok(Self(timer))
    }

    async fn wait_until(&self, instant: Instant) {
        let left = instant.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // Still let answers in: a generator that is late must not starve what it measures.
            tokio::task::yield_now().await;
            return;
        }
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let once = Itimerspec { it_interval: zero, it_value: left };
        rustix::time::timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::empty(), &once)
            .expect("a timer of this process takes a valid time");
        if let Ok(mut ready) = self.0.readable().await {
            // Whether the read finds an expiration or not, the next wait arms the timer anew.
            let _ = rustix::io::read(self.0.get_ref(), &mut [0u8; 8]);
            ready.clear_ready();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_names_are_escaped() {
        let uri = model_uri("127.0.0.1:80".parse().unwrap(), "a b/ü.1", "/infer");
        assert_eq!(uri.path(), "/v2/models/a%20b%2F%C3%BC.1/infer");
    }

    /// A server that answers some, refuses some and hangs up on some: each request is counted once.
    #[test]
    fn every_request_is_accounted_for() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            use std::io::{Read, Write};
            for (number, connection) in listener.incoming().enumerate() {
                let mut connection = connection.unwrap();
                let _ = connection.read(&mut [0; 4096]);
                let error = "HTTP/1.1 503 no\r\ncontent-length: 16\r\nconnection: close\r\n\r\n{\"error\":\"full\"}";
                if number % 2 == 0 {
                    let _ = connection.write_all(error.as_bytes());
                }
            }
        });
        let stream = Stream {
            model: "m".into(),
            arrivals: Arrivals::Poisson { rate_rps: 500.0 },
            slo_ms: 25.0,
            inputs: [Input::new("i", "UINT8", &[1], &[0], None, super::super::Expected::Any)].into(),
        };
        let target = Target { address, span: Duration::from_millis(200), seed: 1 };
        let tally = generate(&target, &[stream], |_| {}).unwrap().remove(0);
        assert!(tally.sent > 0);
        assert_eq!(tally.ended(), tally.sent);
        assert!(tally.dropped.contains_key("full"), "{tally:?}");
    }
}
