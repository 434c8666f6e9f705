//! Sends and receives: one thread, one clock.
#![allow(clippy::disallowed_methods, reason = "the load generator's clock and sockets")]

use std::{
    cell::RefCell,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use thiserror::Error;
use tokio::task::{JoinSet, LocalSet};

use crate::{
    answer::{InputShape, Outcome},
    arrivals::{Arrivals, Instants},
    client::{Client, Requests},
    http::Http,
    pacer::Pacer,
    request::Stream,
    rows::Rows,
    server::Server,
    tally::{Served, Tally},
    target::{Encoding, Target},
};

/// Why no load could be generated.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The operating system refused something the generator needs.
    #[error("the load generator could not start: {0}")]
    Start(#[from] std::io::Error),
    /// The server could not be asked what the model takes.
    #[error("the server does not tell what the model {model} takes: {cause}")]
    Metadata {
        /// The model.
        model: String,
        /// What happened instead.
        cause: String,
    },
    /// The server does not tell its metrics.
    #[error("the server does not tell its metrics: {0}")]
    Metrics(String),
    /// The rate is more than this machine can send.
    #[error(
        "the rate of {model}: expected what this machine can generate now, about {reached_rps:.0} requests a second, \
         found {asked_rps:.0}"
    )]
    Behind {
        /// The model.
        model: String,
        /// What the arrivals asked for.
        asked_rps: f64,
        /// What came of it.
        reached_rps: f64,
    },
}

/// Requests of one stream under way at once; more of them count as errors, because this client, not the server, would
/// be what is measured.
const IN_FLIGHT_MAX: usize = 4096;
/// Closed loop: pauses after a connection that broke, the first and the longest; each is twice the one before.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Files that are opened besides those of streams: connections, for the most part.
const FILES_BESIDES: u64 = 8_192;
/// How long an answer is waited for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// A generator that is so late, and does not catch up within as long again, has been asked for too much.
const LAG_MAX: Duration = Duration::from_secs(5);

/// Sends all streams to the target and waits for the last answer. `on_progress` is told the elapsed fraction now and
/// then.
///
/// # Errors
/// If no timer or runtime could be made, or a rate is too much for this machine. Whatever goes wrong with a request is
/// counted in its tally.
pub fn generate(target: &Target, streams: &[Stream], on_progress: impl Fn(f64)) -> Result<Vec<Tally>, LoadError> {
    generate_rows(target, streams, &Rows::of_each(streams), on_progress)
}

/// The same with a tally for each row, which several streams may share.
///
/// # Errors
/// As [`generate`].
pub(crate) fn generate_rows(
    target: &Target,
    streams: &[Stream],
    rows: &Rows,
    on_progress: impl Fn(f64),
) -> Result<Vec<Tally>, LoadError> {
    allow_files(streams.len());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tallies: Vec<_> = rows.names().iter().map(|_| Rc::new(RefCell::new(Tally::new(target.span)))).collect();
    LocalSet::new().block_on(&runtime, async {
        let client = Client::new(target);
        let started = Instant::now();
        let mut senders = JoinSet::new();
        for (index, stream) in streams.iter().enumerate() {
            let sender = Sender {
                requests: client.prepare(&stream.model, &stream.inputs),
                stream: stream.clone(),
                tally: tallies[rows.of_stream(index)].clone(),
                started,
                span: target.span,
            };
            let random = ChaCha8Rng::seed_from_u64(target.seed.wrapping_add(index as u64));
            senders.spawn_local(Rc::new(sender).send_all(Pacer::new()?, random));
        }
        let mut progress = tokio::time::interval(Duration::from_millis(100));
        loop {
            tokio::select! {
                ended = senders.join_next() => match ended {
                    None => return Ok::<(), LoadError>(()),
                    Some(result) => result.expect("a sender does not panic")?,
                },
                _ = progress.tick() => {
                    on_progress((started.elapsed().as_secs_f64() / target.span.as_secs_f64()).min(1.0));
                }
            }
        }
    })?;
    Ok(tallies.into_iter().map(|tally| finished(&tally)).collect())
}

/// Each stream has a timer, which is a file. What is missing is told where it is opened.
fn allow_files(streams: usize) {
    let found = getrlimit(Resource::Nofile);
    let wanted = streams as u64 + FILES_BESIDES;
    if found.current.is_some_and(|current| current < wanted) {
        let raised = found.maximum.map_or(wanted, |maximum| maximum.min(wanted));
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..found });
    }
}

fn finished(tally: &RefCell<Tally>) -> Tally {
    let mut tally = tally.borrow().clone();
    tally.timeline.close();
    tally
}

/// Asks the server for the names, datatypes and shapes of each model's inputs.
///
/// # Errors
/// If the server does not answer, or does not have a model.
pub(crate) fn inputs_of(target: &Target, models: &[&str]) -> Result<Vec<Vec<InputShape>>, LoadError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = Client::new(target);
        let mut inputs = Vec::new();
        for &model in models {
            let asked = tokio::time::timeout(ANSWER_TIMEOUT, client.inputs(model)).await;
            let answer = asked.unwrap_or_else(|_| Err(no_answer()));
            inputs.push(answer.map_err(|cause| LoadError::Metadata { model: model.to_owned(), cause })?);
        }
        Ok(inputs)
    })
}

/// Whether the model is ready to be served, over HTTP.
#[must_use]
pub fn is_ready(address: SocketAddr, model: &str) -> bool {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return false };
    runtime.block_on(async {
        let http = Http::new(Server::new(&Target::http(address, ANSWER_TIMEOUT, 0)), Encoding::Binary);
        tokio::time::timeout(ANSWER_TIMEOUT, http.is_ready(model)).await.unwrap_or(false)
    })
}

/// What the server tells of itself for Prometheus, over HTTP.
///
/// # Errors
/// If it does not answer.
pub fn metrics(address: SocketAddr) -> Result<String, LoadError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(async {
        let http = Http::new(Server::new(&Target::http(address, ANSWER_TIMEOUT, 0)), Encoding::Binary);
        tokio::time::timeout(ANSWER_TIMEOUT, http.metrics()).await
    });
    answer.unwrap_or_else(|_| Err(no_answer())).map_err(LoadError::Metrics)
}

fn no_answer() -> String {
    format!("no answer in {} s", ANSWER_TIMEOUT.as_secs())
}

struct Sender {
    requests: Requests,
    stream: Stream,
    tally: Rc<RefCell<Tally>>,
    started: Instant,
    span: Duration,
}

impl Sender {
    async fn send_all(self: Rc<Self>, pacer: Pacer, random: ChaCha8Rng) -> Result<(), LoadError> {
        match self.stream.arrivals.clone() {
            Arrivals::Closed { requests } => {
                let loops: JoinSet<()> = (0..requests)
                    .map(|first| Rc::clone(&self).send_in_turn(first, requests))
                    .fold(JoinSet::new(), |mut loops, turns| {
                        loops.spawn_local(turns);
                        loops
                    });
                loops.join_all().await;
                Ok(())
            }
            Arrivals::Open { process, rate } => self.send_at(pacer, Instants::new(process, rate, random)).await,
        }
    }

    /// Closed loop: one of `step` of them.
    async fn send_in_turn(self: Rc<Self>, first: usize, step: usize) {
        let mut pause = PAUSE.0;
        for number in (first..).step_by(step) {
            let now = Instant::now();
            if now >= self.started + self.span {
                break;
            }
            self.tally.borrow_mut().record_sent(Duration::ZERO);
            if self.send_one(number, now).await {
                pause = PAUSE.0;
                continue;
            }
            let until = Instant::now() + pause;
            tokio::time::sleep_until(until.min(self.started + self.span).into()).await;
            pause = PAUSE.1.min(2 * pause);
        }
    }

    /// Open loop.
    async fn send_at(self: Rc<Self>, pacer: Pacer, instants: Instants) -> Result<(), LoadError> {
        let mut in_flight = JoinSet::new();
        let mut pace = Pace::default();
        for (number, at) in instants.take_while(|at| *at < self.span).enumerate() {
            let intended = self.started + at;
            pacer.wait_until(intended).await;
            let lag = intended.elapsed();
            if pace.is_lost(Instant::now(), lag) {
                // The first request left a gap after the start, not at it.
                let per = |span: Duration| (number + 1) as f64 / span.as_secs_f64();
                let model = self.stream.model.clone();
                return Err(LoadError::Behind { model, asked_rps: per(at), reached_rps: per(at + lag) });
            }
            while in_flight.try_join_next().is_some() {}
            self.tally.borrow_mut().record_sent(lag);
            if in_flight.len() >= IN_FLIGHT_MAX {
                self.tally.borrow_mut().record_error(format!("not sent: {IN_FLIGHT_MAX} requests wait for answers"));
                continue;
            }
            let this = Rc::clone(&self);
            in_flight.spawn_local(async move { this.send_one(number, intended).await });
        }
        while in_flight.join_next().await.is_some() {}
        Ok(())
    }

    /// Whether the server was there.
    async fn send_one(&self, number: usize, intended: Instant) -> bool {
        let index = number % self.stream.inputs.len();
        let outcome = tokio::time::timeout(ANSWER_TIMEOUT, self.requests.exchange(index)).await;
        let latency = intended.elapsed();
        let mut tally = self.tally.borrow_mut();
        match outcome.unwrap_or_else(|_| Outcome::Failed(no_answer())) {
            Outcome::Served { output, timing } => {
                tally.record_served(&Served {
                    at: self.started.elapsed(),
                    latency,
                    slo_ms: self.stream.slo_ms,
                    input: index,
                    verdict: self.stream.inputs[index].judge(output.as_deref()),
                    timing: timing.as_deref(),
                });
            }
            Outcome::Dropped(reason) => tally.record_dropped(reason),
            Outcome::Failed(what) => tally.record_error(what),
            Outcome::Broken(what) => {
                tally.record_error(what);
                return false;
            }
        }
        true
    }
}

/// Tells a rate that is too much from a pause: a busy machine may stop us for long, but then we catch up.
#[derive(Debug, Default)]
struct Pace {
    /// Since when requests have left later than [`LAG_MAX`].
    behind_since: Option<Instant>,
}

impl Pace {
    /// A request leaves `lag` later than it was to.
    fn is_lost(&mut self, now: Instant, lag: Duration) -> bool {
        if lag <= LAG_MAX {
            self.behind_since = None;
            return false;
        }
        now - *self.behind_since.get_or_insert(now) > LAG_MAX
    }
}

#[cfg(test)]
mod tests {
    use repository::DataType;

    use super::*;
    use crate::{
        args::StreamPlan,
        arrivals::Rate,
        request::{Expected, Input},
        target::{Tls, Wire},
    };

    /// A server that answers some, refuses some and hangs up on some.
    fn half_broken_server() -> SocketAddr {
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
        address
    }

    fn stream(arrivals: Arrivals) -> Stream {
        let input = Input::new("i", DataType::Uint8, &[1], &[0], None, Expected::Any);
        Stream { model: "m".into(), arrivals, slo_ms: 25.0, inputs: [input].into() }
    }

    #[test]
    fn every_request_is_accounted_for() {
        let target = Target::http(half_broken_server(), Duration::from_millis(200), 1);
        for arrivals in [Arrivals::poisson(500.0), Arrivals::Closed { requests: 3 }] {
            let tally = generate(&target, &[stream(arrivals)], |_| {}).unwrap().remove(0);
            assert!(tally.sent > 0);
            assert_eq!(tally.ended(), tally.sent);
            assert!(tally.dropped.contains_key("full"), "{tally:?}");
        }
    }

    /// A frontend without a scheduler: it tells what its models take, and refuses every request.
    fn lonely_frontend(clients: gateway::access::Clients) -> (SocketAddr, tempfile::TempDir) {
        let repository = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(repository.path().join("m/1")).unwrap();
        let config = r#"
            backend: "emulated"
            max_batch_size: 8
            input { name: "x" data_type: TYPE_INT16 dims: [ 2, 3 ] }
            input { name: "y" data_type: TYPE_FP32 dims: 1 }
            output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
            parameters { key: "slo_ms" value { string_value: "20" } }
            parameters { key: "alpha_ms" value { string_value: "1" } }
            parameters { key: "beta_ms" value { string_value: "1" } }
        "#;
        std::fs::write(repository.path().join("m/config.pbtxt"), config).unwrap();
        let (path, (tell, told)) = (repository.path().to_owned(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            let [nobody, any] = ["127.0.0.1:1", "127.0.0.1:0"].map(|address| address.parse().unwrap());
            let config = gateway::Config {
                http: Some(any),
                clients,
                ..gateway::Config::new(nobody, "nobody's own secret", path)
            };
            let frontend = gateway::Gateway::open(&config, None).unwrap();
            tell.send(frontend.http_address().unwrap()).unwrap();
            frontend.run(std::future::pending()).unwrap();
        });
        (told.recv().unwrap(), repository)
    }

    #[test]
    fn every_wire_asks_and_is_refused_with_the_reason() {
        let (address, _repository) = lonely_frontend(gateway::access::Clients::default());
        for wire in [Wire::Http(Encoding::Binary), Wire::Http(Encoding::Json), Wire::Grpc] {
            let target = Target { wire, ..Target::http(address, Duration::from_millis(100), 1) };
            let inputs = inputs_of(&target, &["m"]).unwrap().remove(0);
            let [x, y] = &inputs[..] else { panic!("{inputs:?}") };
            assert_eq!((&*x.name, &*x.datatype, &x.shape[1..]), ("x", "INT16", &[2, 3][..]));
            assert_eq!((&*y.name, &*y.datatype, &y.shape[1..]), ("y", "FP32", &[1][..]));
            let error = inputs_of(&target, &["m", "other"]).unwrap_err().to_string();
            assert!(error.starts_with("the server does not tell what the model other takes: "), "{error}");

            // What is refused for want of a scheduler was found well-formed: all inputs are there.
            let plan = StreamPlan { model: "m".into(), arrivals: Arrivals::poisson(300.0), slo_ms: Some(20.0) };
            let tally = generate(&target, &[plan.stream(&inputs, 1, false, 1).unwrap()], |_| {}).unwrap().remove(0);
            assert!(tally.sent > 0);
            assert_eq!(tally.dropped.values().sum::<u64>(), tally.sent, "{wire:?}: {tally:?}");
        }
    }

    #[test]
    fn a_guarded_server_is_known_by_its_certificate_and_shown_a_token() {
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = (folder.path().join("server.pem"), folder.path().join("server.key"));
        std::fs::write(&certificate, cert.pem()).unwrap();
        std::fs::write(&key, signing_key.serialize_pem()).unwrap();
        let clients = format!(
            "tls = {{ certificate = {certificate:?}, key = {key:?} }}\n[[token]]\nname = 'x'\n\
             sha256 = '7b467437ad0215a143a8d995fea9a9e55d93a0c2ff3367e4a7990aec3f6fbd6b'\n\
             allow = {{ operations = ['infer', 'metadata'] }}"
        );
        let (address, _repository) = lonely_frontend(toml::from_str(&clients).unwrap());
        let config = transport::client_tls("--tls-authority", &certificate).unwrap();
        let tls = Tls { authority: address.to_string(), config: std::sync::Arc::new(config) };
        for wire in [Wire::Http(Encoding::Binary), Wire::Grpc] {
            let stranger =
                Target { wire, tls: Some(tls.clone()), ..Target::http(address, Duration::from_millis(100), 1) };
            let error = inputs_of(&stranger, &["m"]).unwrap_err().to_string();
            assert!(error.contains("found no token"), "{error}");
            let known = Target { token: Some("open sesame, please".to_owned()), ..stranger.clone() };
            let inputs = inputs_of(&known, &["m"]).unwrap().remove(0);
            let plan = StreamPlan { model: "m".into(), arrivals: Arrivals::poisson(300.0), slo_ms: None };
            let tally = generate(&known, &[plan.stream(&inputs, 1, false, 1).unwrap()], |_| {}).unwrap().remove(0);
            assert_eq!(tally.dropped.values().sum::<u64>(), tally.sent, "no scheduler, {wire:?}: {tally:?}");
            let plain = Target { tls: None, ..known };
            assert!(inputs_of(&plain, &["m"]).is_err(), "{wire:?}");
        }
    }

    #[test]
    fn nobody_listens() {
        let nobody = testing::Port::hold();
        for wire in [Wire::Http(Encoding::Json), Wire::Grpc] {
            let target = Target { wire, ..Target::http(nobody.address(), Duration::from_millis(50), 1) };
            let error = inputs_of(&target, &["m"]).unwrap_err().to_string();
            assert!(error.contains("refused"), "{error}");
            let tally = generate(&target, &[stream(Arrivals::poisson(200.0))], |_| {}).unwrap().remove(0);
            assert_eq!(tally.errors.values().sum::<u64>(), tally.sent, "{wire:?}: {tally:?}");
            // A closed loop asks again after 10, 30, 70 ms .. however long that takes: not thousands of times.
            let tally = generate(&target, &[stream(Arrivals::Closed { requests: 2 })], |_| {}).unwrap().remove(0);
            assert!((2..=2 * 3).contains(&tally.sent), "{wire:?}: {tally:?}");
        }
    }

    /// Over HTTP that is 429, once counted as an error, over gRPC RESOURCE_EXHAUSTED.
    #[test]
    fn a_client_that_exceeds_its_rate_is_dropped_for_one_reason_on_every_wire() {
        let clients = "[anonymous]\nrequests_per_second = 50\nburst = 1";
        let (address, _repository) = lonely_frontend(toml::from_str(clients).unwrap());
        for wire in [Wire::Http(Encoding::Binary), Wire::Grpc] {
            let target = Target { wire, ..Target::http(address, Duration::from_millis(100), 1) };
            let tally = generate(&target, &[stream(Arrivals::poisson(1000.0))], |_| {}).unwrap().remove(0);
            let greedy: Vec<_> = tally.dropped.keys().filter(|reason| reason.contains("exceeds its rate")).collect();
            assert_eq!(greedy.len(), 1, "{wire:?}: {tally:?}");
        }
    }

    #[test]
    fn a_pause_is_no_lost_pace_if_it_is_caught_up_with() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut pace = Pace::default();
        // Stopped for eight seconds, then caught up within three.
        assert!(!pace.is_lost(start + 8 * second, 8 * second));
        assert!(!pace.is_lost(start + 10 * second, 6 * second));
        assert!(!pace.is_lost(start + 11 * second, Duration::ZERO));
        // Once more, and not caught up: the time counts anew.
        assert!(!pace.is_lost(start + 20 * second, 6 * second));
        assert!(!pace.is_lost(start + 25 * second, 7 * second));
        assert!(pace.is_lost(start + 26 * second, 7 * second));
    }

    #[test]
    fn a_rate_that_no_machine_generates_says_so() {
        let target = Target::http(half_broken_server(), Duration::from_secs(1000), 1);
        let rate = Rate::constant(1e9);
        let arrivals = Arrivals::Open { process: sim::workload::ArrivalProcess::Uniform, rate };
        let error = generate(&target, &[stream(arrivals)], |_| {}).unwrap_err().to_string();
        assert!(error.starts_with("the rate of m: expected what this machine can generate now, about "), "{error}");
        assert!(error.ends_with(", found 1000000000"), "{error}");
    }
}
