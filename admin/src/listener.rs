//! `[admin] http`: a listener of its own thread for whoever looks after this process: probes, and scrapers such as
//! Prometheus. None of the threads that it tells of has to answer.
//!
//! Whoever reaches the address may ask. What strangers can take is bounded: connections, the bytes and the requests of
//! one, the time until it is answered and the answer is taken, and connections in a second, of each address and in all.
//! Who comes last is served: the oldest of the address with the most gives way. One that comes beyond its address's
//! share is closed at once, so that those behind it in the listener's queue come to their turn.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets and a thread.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    sync::Arc,
    thread::JoinHandle,
};

use proto::{Span, Timestamp};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::{net::TcpStream, runtime::Runtime, sync::oneshot, task::AbortHandle, time::sleep};
use transport::{Address, Clock, OpenError, share_of};

use crate::{connection, others::ALSO_MAX, pages::Pages};

/// Connections at once.
pub(crate) const CONNECTIONS_MAX: usize = 16;
/// Connections taken within a second, most of them to be closed at once; about 20 us each.
const ACCEPTS_PER_SECOND: u32 = 2_000;
/// Of these, those of one address that are listened to: scrapers come every few seconds.
const ADDRESS_ACCEPTS_PER_SECOND: u32 = 50;
const SECOND: Span = Span::from_millis(1_000);

/// The table `[admin]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where health and metrics are told. Whoever reaches it may ask.
    pub http: Address,
    /// Other roles' `http`: what the programs of their models count is told here, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Address>,
}

impl From<Address> for Config {
    fn from(http: Address) -> Self {
        Self { http, also: Vec::new() }
    }
}

/// Why health and metrics cannot be told.
#[derive(Debug, Error)]
pub enum AdminError {
    /// What the key names leads nowhere.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Nothing can listen there.
    #[error("admin.http: found {address}, expected an address of this host that is free: {cause}")]
    Listen {
        /// As configured.
        address: Address,
        /// What the system said.
        cause: io::Error,
    },
    /// They are too many to ask.
    #[error("admin.also: found {0} addresses, expected at most {ALSO_MAX}")]
    Also(usize),
    /// There is no thread for it, or nothing that it can wait with.
    #[error("admin.http: no thread can be started for it: {0}")]
    Thread(io::Error),
    /// There is no thread that could tell the service manager how the process is.
    #[error("no thread can be started that tells the service manager (NOTIFY_SOCKET) how this process is: {0}")]
    ServiceThread(io::Error),
}

/// The listener; dropping it ends its thread.
pub struct Listener {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens, if that is configured, and answers with these pages.
    ///
    /// # Errors
    /// One line that names the key, what was found and what was expected.
    pub fn start(config: Option<&Config>, clock: Clock, pages: Pages) -> Result<Option<Self>, AdminError> {
        let Some(Config { http: address, also }) = config else { return Ok(None) };
        if also.len() > ALSO_MAX {
            return Err(AdminError::Also(also.len()));
        }
        let at = transport::own_address("admin.http", address).map_err(OpenError::from)?;
        let wrong = |cause| AdminError::Listen { address: address.clone(), cause };
        let listener = TcpListener::bind(at).map_err(wrong)?;
        listener.set_nonblocking(true).map_err(wrong)?;
        let started = Self::serve(listener, clock, pages, also)?;
        tracing::info!(%address, "health at /livez, /readyz and grpc.health.v1.Health; /metrics; for browsers /ui");
        Ok(Some(started))
    }

    /// Answers whoever comes to a listener that does not block.
    fn serve(listener: TcpListener, clock: Clock, pages: Pages, also: &[Address]) -> Result<Self, AdminError> {
        let (end, ends) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(AdminError::Thread)?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(AdminError::Thread)?
        };
        let site = Arc::new(connection::Site::new(clock, pages, also));
        let server = Server { listener, clock, site, open: VecDeque::new(), accepts: Accepts::default() };
        let thread = std::thread::Builder::new().name("admin".to_owned());
        let thread = thread.spawn(move || server.run(&runtime, ends)).map_err(AdminError::Thread)?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Server {
    listener: tokio::net::TcpListener,
    clock: Clock,
    site: Arc<connection::Site>,
    /// The oldest first.
    open: VecDeque<Open>,
    accepts: Accepts,
}

/// A connection.
struct Open {
    /// Whose share it counts towards.
    from: IpAddr,
    task: AbortHandle,
}

/// Connections taken in the present second.
#[derive(Debug, Default)]
struct Accepts {
    count: u32,
    /// By address; [`ACCEPTS_PER_SECOND`] at most.
    by_address: BTreeMap<IpAddr, u32>,
    again_at: Timestamp,
}

impl Accepts {
    /// Whether another one may be taken.
    fn may(&mut self, now: Timestamp) -> bool {
        if self.again_at <= now {
            (self.count, self.again_at) = (0, now + SECOND);
            self.by_address.clear();
        }
        self.count < ACCEPTS_PER_SECOND
    }

    /// One was taken; whether it is within its address's share.
    fn take(&mut self, from: IpAddr) -> bool {
        self.count += 1;
        let own = self.by_address.entry(from).or_default();
        *own += 1;
        *own <= ADDRESS_ACCEPTS_PER_SECOND
    }

    /// None is taken until the second is over.
    fn pause(&mut self) {
        self.count = ACCEPTS_PER_SECOND;
    }
}

impl Server {
    /// Until the listener is dropped, whereupon all connections end.
    fn run(mut self, runtime: &Runtime, mut ends: oneshot::Receiver<()>) {
        runtime.block_on(async {
            loop {
                let now = self.clock.now();
                let may_accept = self.accepts.may(now);
                let pause = (self.accepts.again_at - now).max(Span(1)).to_duration();
                tokio::select! {
                    _ = &mut ends => return,
                    accepted = self.listener.accept(), if may_accept => self.take(accepted),
                    () = sleep(pause), if !may_accept => {}
                }
            }
        });
    }

    /// Takes a connection in. Without files for it, the next second is waited for.
    fn take(&mut self, accepted: io::Result<(TcpStream, SocketAddr)>) {
        let Ok((stream, from)) = accepted else { return self.accepts.pause() };
        let from = share_of(from.ip());
        if !self.accepts.take(from) {
            return;
        }
        let task = tokio::spawn(connection::serve(stream, Arc::clone(&self.site))).abort_handle();
        self.open.retain(|open| !open.task.is_finished());
        self.open.push_back(Open { from, task });
        while self.open.len() > CONNECTIONS_MAX {
            let froms: Vec<IpAddr> = self.open.iter().map(|open| open.from).collect();
            if let Some(open) = self.open.remove(gives_way(&froms)) {
                open.task.abort();
            }
        }
    }
}

/// Which of these gives way, the oldest first: the oldest of the address with the most.
fn gives_way(froms: &[IpAddr]) -> usize {
    let count = |from: &IpAddr| froms.iter().filter(|other| *other == from).count();
    let most = froms.iter().map(count).max().unwrap_or_default();
    froms.iter().position(|from| count(from) == most).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{ErrorKind, Read as _, Write as _},
        net::TcpStream,
        time::Duration,
    };

    use bytes::Bytes;
    use http_body_util::{BodyExt as _, Full};
    use hyper::{Request, client::conn::http2};
    use hyper_util::rt::{TokioExecutor, TokioIo};

    use super::*;
    use crate::Vitals;

    /// What comes at once is waited for so long, so that a defect ends a test.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Listens where there is room.
    fn start() -> (Listener, SocketAddr, Vitals) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let vitals = Vitals::default();
        let pages = Pages::new("backend", "rack7", vitals.clone(), |_| "more 1\n".to_owned());
        (Listener::serve(listener, Clock::start(), pages, &[]).unwrap(), address, vitals)
    }

    fn ask(stream: &mut TcpStream, text: &str) -> String {
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn whoever_asks_gets_a_page_or_what_is_wrong() {
        let (listener, address, vitals) = start();
        let asked = |text: &str| ask(&mut TcpStream::connect(address).unwrap(), text);
        for (request, status, body) in [
            ("GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n", "200 OK", "more 1\n"),
            ("GET /metrics?name=x HTTP/1.0\r\n\r\n", "200 OK", "role=\"backend\",name=\"rack7\"} 1\n"),
            ("GET /livez HTTP/1.1\r\n\r\n", "200 OK", "ok\n"),
            ("GET /readyz HTTP/1.1\r\n\r\n", "503 Service Unavailable", "not ready: it is about to start\n"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed", ""),
            ("GET / HTTP/1.1\r\n\r\n", "404 Not Found", "only /livez"),
            ("GET /ui HTTP/1.1\r\n\r\n", "200 OK", "<!doctype html>"),
            ("POST /ui HTTP/1.1\r\n\r\n", "405 Method Not Allowed", ""),
            ("GET /metrics\r\n\r\n", "400 Bad Request", ""),
        ] {
            let answer = asked(request);
            assert_eq!(answer.lines().next().map(|line| &line["HTTP/1.1 ".len()..]), Some(status), "{request:?}");
            let (head, found) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("content-length: {}\r\n", found.len())), "{answer}");
            assert!(found.contains(body), "{request:?}: {answer}");
            let is_ui = request.starts_with("GET /ui");
            assert_eq!(head.contains("\r\ncontent-security-policy: default-src 'none'; "), is_ui, "{answer}");
        }
        vitals.set_ready(Ok(()));
        assert!(asked("GET /readyz HTTP/1.1\r\n\r\n").ends_with("\r\n\r\nok\n"));
        let head = asked("HEAD /readyz HTTP/1.1\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.ends_with("\r\n\r\n"), "{head}");
        for field in ["content-length: 3", "connection: close"] {
            assert!(head.contains(&format!("\r\n{field}\r\n")), "{head}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\na: {}", "b".repeat(8_192));
        assert!(asked(&long).starts_with("HTTP/1.1 431 "), "a head without an end");
        let mut open = TcpStream::connect(address).unwrap();
        open.set_read_timeout(Some(PATIENCE)).unwrap();
        drop(listener);
        let closed = open.read(&mut [0]);
        assert!(!closed.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "it has closed all");
    }

    #[test]
    fn an_answer_stays_whole_although_more_was_asked_than_is_read() {
        let (_listener, address, _) = start();
        let body = "b".repeat(32_768);
        for (request, status) in [
            (format!("POST /metrics HTTP/1.1\r\n\r\n{body}"), "405 Method Not Allowed"),
            (format!("GET /metrics HTTP/1.1\r\na: {body}"), "431 Request Header Fields Too Large"),
        ] {
            let answer = ask(&mut TcpStream::connect(address).unwrap(), &request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        }
    }

    #[test]
    fn a_request_may_come_in_pieces_and_its_end_with_it() {
        let (_listener, address, _) = start();
        let request = b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n";
        for cut in [1, 4, request.len() - 1] {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&request[..cut]).unwrap();
            stream.write_all(&request[cut..]).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let answer = ask(&mut stream, "");
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{cut}: {answer}");
        }
    }

    /// The answers to these services, one after another on one connection: gRPC's status, or that of health.
    fn checked(address: SocketAddr, services: &[&str]) -> Vec<Result<u8, String>> {
        let check = async |sender: &mut http2::SendRequest<Full<Bytes>>, service: &str| {
            // HealthCheckRequest { service } behind its frame's head.
            let message = [&[0x0a, service.len() as u8], service.as_bytes()].concat();
            let body = [&[0, 0, 0, 0, message.len() as u8], &message[..]].concat();
            let uri = "http://admin/grpc.health.v1.Health/Check";
            let request = Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
            let request = request.body(Full::new(Bytes::from(body))).unwrap();
            let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
            let code = answer.headers().get("grpc-status").map(|code| code.to_str().unwrap().to_owned());
            let bytes = answer.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
            code.map_or_else(|| Ok(*bytes.last().unwrap()), Err)
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
            let (mut sender, connection) = handshake.await.unwrap();
            tokio::spawn(connection);
            let mut answers = Vec::new();
            for service in services {
                answers.push(check(&mut sender, service).await);
            }
            answers
        })
    }

    #[test]
    fn grpc_asks_for_health() {
        let (_listener, address, vitals) = start();
        let (serving, not_serving) = (1, 2);
        let unknown = Err("5".to_owned());
        assert_eq!(checked(address, &["", "liveness", "digits"]), [Ok(not_serving), Ok(serving), unknown]);
        vitals.set_ready(Ok(()));
        assert_eq!(checked(address, &["", "readiness"]), [Ok(serving), Ok(serving)]);
        vitals.set_trouble(Some("GPU 0 hangs".to_owned()));
        assert_eq!(checked(address, &["", "liveness"]), [Ok(not_serving), Ok(not_serving)]);
    }

    #[test]
    fn a_connection_that_asks_again_and_again_is_ended() {
        let (_listener, address, vitals) = start();
        vitals.set_ready(Ok(()));
        let answers = checked(address, &[""; 1_000]);
        let answered = answers.iter().filter(|answer| answer.is_ok()).count();
        assert!((8..100).contains(&answered), "{answered}");
        assert_eq!(checked(address, &[""]), [Ok(1)], "others are not");
    }

    #[test]
    fn those_who_say_nothing_keep_nobody_out() {
        let (_listener, address, _) = start();
        let silent: Vec<TcpStream> = (0..CONNECTIONS_MAX * 2).map(|_| TcpStream::connect(address).unwrap()).collect();
        let answer = ask(&mut TcpStream::connect(address).unwrap(), "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        // The oldest was closed to make room: long before its time was over.
        silent[0].set_read_timeout(Some(Duration::from_millis(2_500))).unwrap();
        assert_eq!((&silent[0]).read(&mut [0]).map_err(|error| error.kind()), Ok(0));
    }

    #[test]
    fn no_more_connections_are_taken_in_a_second_than_may_be() {
        let (mut accepts, one) = (Accepts::default(), IpAddr::from([127, 66, 6, 6]));
        let now = Timestamp::ZERO + SECOND;
        let (mut taken, mut listened_to) = (0, 0);
        for _ in 0..10_000 {
            if accepts.may(now) {
                taken += 1;
                listened_to += u32::from(accepts.take(one));
            }
        }
        assert_eq!((taken, listened_to), (ACCEPTS_PER_SECOND, ADDRESS_ACCEPTS_PER_SECOND));
        assert!(!accepts.may(now + SECOND - Span(1)) && accepts.may(now + SECOND));
        accepts.pause();
        assert!(!accepts.may(now + SECOND) && accepts.may(now + SECOND + SECOND));
    }

    /// A client of HTTP/2 whose frames ask for nothing.
    #[test]
    fn a_flood_of_frames_ends_its_connection_alone() {
        let (_listener, address, vitals) = start();
        vitals.set_ready(Ok(()));
        let mut flood = TcpStream::connect(address).unwrap();
        flood.set_read_timeout(Some(PATIENCE)).unwrap();
        flood.set_write_timeout(Some(PATIENCE)).unwrap();
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        flood.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings].concat()).unwrap();
        let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        // It may be cut off in the middle.
        let _ = flood.write_all(&ping.repeat(10_000));
        assert_eq!(checked(address, &[""]), [Ok(1)]);
        let mut answered = Vec::new();
        let ended = flood.read_to_end(&mut answered);
        assert!(!ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "it was not ended");
        assert!(answered.len() < 17 * 2_000, "{}", answered.len());
    }

    /// All addresses had one share: 150 silent connections a second of one kept the scrapers of others out.
    #[test]
    fn an_address_that_connects_often_keeps_no_other_out() {
        let (mut accepts, now) = (Accepts::default(), Timestamp::ZERO + SECOND);
        let [often, other] = [[127, 66, 6, 6], [127, 0, 0, 1]].map(IpAddr::from);
        for _ in 0..1_500 {
            assert!(accepts.may(now));
            accepts.take(often);
        }
        assert!(accepts.may(now) && accepts.take(other));
        assert!(accepts.by_address.len() == 2 && accepts.may(now + SECOND) && accepts.by_address.is_empty());
        let mut open = vec![other, often, often, other, often];
        for expected in [1, 0, 0, 0, 0] {
            assert_eq!(gives_way(&open), expected, "{open:?}");
            open.remove(expected);
        }
    }

    #[test]
    fn an_address_that_is_taken_is_named_with_its_key() {
        let (_listener, address, vitals) = start();
        let pages = Pages::new("backend", "a", vitals, |_| String::new());
        let config = Config::from(Address::from(address));
        let error = Listener::start(Some(&config), Clock::start(), pages).err().unwrap().to_string();
        assert!(error.starts_with(&format!("admin.http: found {address}, expected ")), "{error}");
    }

    /// Its answer is larger than what the system keeps for it, and it never takes it.
    #[test]
    fn a_scraper_that_never_reads_holds_nobody_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let pages = Pages::new("backend", "a", Vitals::default(), |_| "x".repeat(16 << 20));
        let _listener = Listener::serve(listener, Clock::start(), pages, &[]).unwrap();
        let deaf: Vec<TcpStream> = (0..CONNECTIONS_MAX)
            .map(|_| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
                stream
            })
            .collect();
        let answer = ask(&mut TcpStream::connect(address).unwrap(), "GET /livez HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        drop(deaf);
    }
}
