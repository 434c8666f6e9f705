//! `[admin] http`: a listener of its own thread for whoever looks after this process: probes, and scrapers such as
//! Prometheus. It answers one request a connection, so that none of the threads that it tells of has to.
//!
//! Whoever reaches the address may ask. What strangers can take is bounded: connections, the bytes of a request, the
//! time until it is answered and the answer is taken, and connections in a second, of each address and in all. Who
//! comes last is served: the oldest of the address with the most gives way. One that comes beyond its address's share
//! is closed at once, so that those behind it in the listener's queue come to their turn.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets and a thread.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Shutdown, TcpListener, TcpStream},
    os::fd::OwnedFd,
    os::unix::net::UnixStream,
    thread::JoinHandle,
};

use proto::{Span, Timestamp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use transport::{Address, Clock, OpenError, share_of};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::pages::{Page, Pages};

/// Connections at once.
const CONNECTIONS_MAX: usize = 16;
/// Connections taken within a second, most of them to be closed at once; about 20 us each.
const ACCEPTS_PER_SECOND: u32 = 2_000;
/// Of these, those of one address that are listened to: scrapers come every few seconds.
const ADDRESS_ACCEPTS_PER_SECOND: u32 = 50;
/// Bytes of a request's head; Prometheus's are a few hundred.
const HEAD_BYTES_MAX: usize = 8_192;
/// Bytes taken at once.
const READ_BYTES: usize = 1_024;
/// From a connection's start to its end.
const TIMEOUT: Span = Span::from_millis(5_000);
const SECOND: Span = Span::from_millis(1_000);

/// The table `[admin]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where health and metrics are told. Whoever reaches it may ask.
    pub http: Address,
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
    /// There is no thread for it.
    #[error("admin.http: no thread can be started for it: {0}")]
    Thread(io::Error),
}

/// The listener; dropping it ends its thread.
pub struct Listener {
    end: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens, if that is configured, and answers with these pages.
    ///
    /// # Errors
    /// One line that names the key, what was found and what was expected.
    pub fn start(config: Option<&Config>, clock: Clock, pages: Pages) -> Result<Option<Self>, AdminError> {
        let Some(Config { http: address }) = config else { return Ok(None) };
        let at = transport::own_address("admin.http", address).map_err(OpenError::from)?;
        let wrong = |cause| AdminError::Listen { address: address.clone(), cause };
        let listener = TcpListener::bind(at).map_err(wrong)?;
        listener.set_nonblocking(true).map_err(wrong)?;
        let started = Self::serve(listener, clock, pages)?;
        tracing::info!(%address, "health at /livez and /readyz, metrics at /metrics");
        Ok(Some(started))
    }

    /// Answers whoever comes to a listener that does not block.
    fn serve(listener: TcpListener, clock: Clock, pages: Pages) -> Result<Self, AdminError> {
        let (end, ends) = UnixStream::pair().map_err(AdminError::Thread)?;
        let server = Server { listener, clock, pages, open: VecDeque::new(), accepts: Accepts::default() };
        let thread = std::thread::Builder::new().name("admin".to_owned());
        let thread = thread.spawn(move || server.run(&ends.into())).map_err(AdminError::Thread)?;
        Ok(Self { end: Some(end.into()), thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Its other end is readable then.
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Server {
    listener: TcpListener,
    clock: Clock,
    pages: Pages,
    /// The oldest first.
    open: VecDeque<Open>,
    accepts: Accepts,
}

/// A connection.
struct Open {
    /// Whose share it counts towards.
    from: IpAddr,
    stream: TcpStream,
    exchange: Exchange,
    ends_at: Timestamp,
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
    fn run(mut self, ends: &OwnedFd) {
        loop {
            let now = self.clock.now();
            self.open.retain(|open| now < open.ends_at);
            let may_accept = self.accepts.may(now);
            let mut due = self.open.front().map(|open| open.ends_at);
            let mut events = vec![PollFd::new(ends, PollFlags::IN)];
            events.extend(self.open.iter().map(|open| PollFd::new(&open.stream, open.exchange.waits_for())));
            if may_accept {
                events.push(PollFd::new(&self.listener, PollFlags::IN));
            } else {
                due = Some(due.map_or(self.accepts.again_at, |due| due.min(self.accepts.again_at)));
            }
            let timeout = due.map(|due| {
                let wait = (due - now).max(Span(1));
                Timespec { tv_sec: wait.0 / 1_000_000_000, tv_nsec: wait.0 % 1_000_000_000 }
            });
            // A signal is no reason to end, and nothing else is wrong with these.
            let _ = poll(&mut events, timeout.as_ref());
            if !events[0].revents().is_empty() {
                return;
            }
            let ready: Vec<bool> = events[1..].iter().map(|event| !event.revents().is_empty()).collect();
            drop(events);
            if may_accept && ready.last() == Some(&true) {
                self.accept();
            }
            self.serve(&ready);
        }
    }

    /// Takes the next connection. Without files for it, the next second is waited for.
    fn accept(&mut self) {
        match self.listener.accept() {
            Ok((stream, from)) => {
                let from = share_of(from.ip());
                if self.accepts.take(from) && stream.set_nonblocking(true).is_ok() {
                    let ends_at = self.clock.now() + TIMEOUT;
                    self.open.push_back(Open { from, stream, exchange: Exchange::default(), ends_at });
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.accepts.pause(),
        }
    }

    /// Goes on with those that are ready: an entry for each that was open before, and the listener's for who just came.
    fn serve(&mut self, ready: &[bool]) {
        let (clock, pages) = (self.clock, &self.pages);
        let mut ready = ready.iter();
        let page = |target: &str| pages.of(clock.now(), target);
        self.open.retain_mut(|open| ready.next() != Some(&true) || open.exchange.go_on(&mut open.stream, page));
        while self.open.len() > CONNECTIONS_MAX {
            let froms: Vec<IpAddr> = self.open.iter().map(|open| open.from).collect();
            self.open.remove(gives_way(&froms));
        }
    }
}

/// Which of these gives way, the oldest first: the oldest of the address with the most.
fn gives_way(froms: &[IpAddr]) -> usize {
    let count = |from: &IpAddr| froms.iter().filter(|other| *other == from).count();
    let most = froms.iter().map(count).max().unwrap_or_default();
    froms.iter().position(|from| count(from) == most).unwrap_or_default()
}

/// One request and its answer.
enum Exchange {
    /// Of the head so far.
    Asked(Vec<u8>),
    /// What is left of the answer.
    Answers(Vec<u8>, usize),
    /// It is all sent, and whoever asked has yet to close. A socket that is closed while bytes of a request lie there
    /// unread takes the answer back (RFC 9112, section 9.6).
    Ends,
}

impl Default for Exchange {
    fn default() -> Self {
        Self::Asked(Vec::new())
    }
}

impl Exchange {
    fn waits_for(&self) -> PollFlags {
        match self {
            Self::Asked(_) | Self::Ends => PollFlags::IN,
            Self::Answers(..) => PollFlags::OUT,
        }
    }

    /// Moves what can be moved now; false once the connection is done with.
    fn go_on(&mut self, stream: &mut TcpStream, page: impl Fn(&str) -> Result<Page, String>) -> bool {
        loop {
            let mut bytes = [0; READ_BYTES];
            let moved = match self {
                Self::Asked(head) => stream.read(&mut bytes).inspect(|&count| head.extend(&bytes[..count])),
                Self::Answers(answer, sent) => stream.write(&answer[*sent..]).inspect(|count| *sent += count),
                Self::Ends => stream.read(&mut bytes),
            };
            match (moved, &*self) {
                (Err(error), _) if error.kind() == ErrorKind::WouldBlock => return true,
                (Err(error), _) if error.kind() == ErrorKind::Interrupted => {}
                (Err(_) | Ok(0), _) => return false,
                (Ok(_), Self::Asked(head)) => {
                    if let Some(answer) = answer(head, &page) {
                        *self = Self::Answers(answer, 0);
                    }
                }
                (Ok(_), Self::Answers(answer, sent)) if *sent == answer.len() => {
                    if stream.shutdown(Shutdown::Write).is_err() {
                        return false;
                    }
                    *self = Self::Ends;
                }
                (Ok(_), Self::Answers(..)) => {}
                // Others come in between, and the end of its time.
                (Ok(_), Self::Ends) => return true,
            }
        }
    }
}

/// What a request is answered with; nothing while its head is not all there.
fn answer(head: &[u8], page: impl Fn(&str) -> Result<Page, String>) -> Option<Vec<u8>> {
    // What was there before the last read has been looked at.
    let new = head.len().saturating_sub(READ_BYTES + 3);
    if !head[new..].windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        let refusal = || reply("431 Request Header Fields Too Large", "", "", true);
        return (head.len() > HEAD_BYTES_MAX).then(refusal);
    }
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, "HTTP/1.1" | "HTTP/1.0"] = words[..] else {
        return Some(reply("400 Bad Request", "", "", true));
    };
    let Page { status, content_type, body } = match page(target) {
        Ok(page) => page,
        Err(there) => return Some(reply("404 Not Found", TEXT, &there, method != "HEAD")),
    };
    if !matches!(method, "GET" | "HEAD") {
        return Some(reply("405 Method Not Allowed", "allow: GET, HEAD\r\n", "", true));
    }
    Some(reply(status, &format!("content-type: {content_type}\r\n"), &body, method == "GET"))
}

const TEXT: &str = "content-type: text/plain; charset=utf-8\r\n";

fn reply(status: &str, fields: &str, body: &str, has_body: bool) -> Vec<u8> {
    let bytes = body.len();
    let body = if has_body { body } else { "" };
    format!("HTTP/1.1 {status}\r\n{fields}content-length: {bytes}\r\nconnection: close\r\n\r\n{body}").into_bytes()
}

#[cfg(test)]
mod tests {
    use std::{net::SocketAddr, time::Duration};

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
        (Listener::serve(listener, Clock::start(), pages).unwrap(), address, vitals)
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
            ("GET /metrics\r\n\r\n", "400 Bad Request", ""),
            ("\r\n\r\n", "400 Bad Request", ""),
        ] {
            let answer = asked(request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request:?}: {answer}");
            let (head, found) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("content-length: {}\r\n", found.len())), "{answer}");
            assert!(found.contains(body), "{request:?}: {answer}");
        }
        vitals.set_ready(Ok(()));
        assert!(asked("GET /readyz HTTP/1.1\r\n\r\n").ends_with("\r\n\r\nok\n"));
        let head = asked("HEAD /readyz HTTP/1.1\r\n\r\n");
        assert!(
            head.starts_with("HTTP/1.1 200 OK") && head.ends_with("content-length: 3\r\nconnection: close\r\n\r\n")
        );
        let long = format!("GET /metrics HTTP/1.1\r\na: {}", "b".repeat(HEAD_BYTES_MAX));
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
        let body = "b".repeat(READ_BYTES * 32);
        for (request, status) in [
            (format!("POST /metrics HTTP/1.1\r\n\r\n{body}"), "405 Method Not Allowed"),
            (format!("GET /metrics HTTP/1.1\r\na: {body}"), "431 Request Header Fields Too Large"),
        ] {
            let answer = ask(&mut TcpStream::connect(address).unwrap(), &request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        }
    }

    #[test]
    fn a_head_may_come_in_pieces() {
        let request = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n";
        let page = |_: &str| Ok(Page { status: "200 OK", content_type: "text/plain", body: String::new() });
        for cut in 0..request.len() {
            assert!(answer(&request[..cut], page).is_none(), "{cut}");
        }
        assert!(answer(request, page).is_some());
        let padded = [b"GET /metrics HTTP/1.1\r\n".to_vec(), vec![b'x'; READ_BYTES * 3], b"\r\n\r\n".to_vec()].concat();
        assert!(answer(&padded, page).is_some(), "however long it is before its end");
    }

    #[test]
    fn those_who_say_nothing_keep_nobody_out() {
        let (_listener, address, _) = start();
        let silent: Vec<TcpStream> = (0..CONNECTIONS_MAX * 2).map(|_| TcpStream::connect(address).unwrap()).collect();
        let answer = ask(&mut TcpStream::connect(address).unwrap(), "GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        // The oldest was closed to make room: long before its time was over.
        let half = (TIMEOUT / 2).to_duration();
        silent[0].set_read_timeout(Some(half)).unwrap();
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
        let config = Config { http: address.into() };
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
        let _listener = Listener::serve(listener, Clock::start(), pages).unwrap();
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
