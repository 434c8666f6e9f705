//! Against a real `redis-server`, and against what only pretends to be one.
#![allow(clippy::disallowed_methods)] // Real sockets and processes.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use ensembles::{
    contexts::{Contexts, Kind},
    selection::Learner,
};
use proto::{Span, Timestamp};
use rcgen::{CertificateParams, Issuer, KeyPair};
use repository::{Agreement, Learning, Policy, Selection};
use testing::{RedisServer, eventually};

use super::*;

/// A server, with its folder.
pub(crate) struct Server {
    pub(crate) process: RedisServer,
    folder: tempfile::TempDir,
}

impl Server {
    /// `None`, and said so, where there is none.
    pub(crate) fn start(options: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        Some(Self { process: RedisServer::start("gateway/redis", folder.path(), options)?, folder })
    }

    /// Stops or continues it as a whole.
    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(self.process.process().unwrap());
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn url(&self, who: &str) -> RedisUrl {
        RedisUrl(format!("redis://{who}{}/1", self.process.address()))
    }

    /// What one command comes to.
    fn tell(&self, who: &str, command: &[&str]) -> Result<Value, String> {
        let place = Place::of(&config(self.url(who), 10_000), 0).unwrap();
        runtime().block_on(async { place.connect().await?.ask(command).await })
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

pub(crate) fn config(redis: RedisUrl, redis_timeout_ms: u64) -> SelectionConfig {
    SelectionConfig { redis, redis_timeout_ms, ..SelectionConfig::at("") }
}

/// What one frontend has learned, and its way to the server.
struct Frontend {
    contexts: Contexts<u32>,
    redis: Redis,
    now: Timestamp,
}

impl Frontend {
    fn of(config: &SelectionConfig) -> Self {
        static LIVES: AtomicU64 = AtomicU64::new(1);
        let redis = Redis::start_in(config, LIVES.fetch_add(1, Ordering::Relaxed)).unwrap();
        let mut contexts = Contexts::new(1 << 20);
        contexts.share();
        Self { contexts, redis, now: Timestamp(0) }
    }

    fn kind() -> Arc<Kind> {
        Arc::new(Kind { load: 1, key: "vote/1:0".to_owned(), members: 2, block: 100 })
    }

    /// A request; whether it was answered with what had been known for long.
    fn ask(&mut self, context: &str) -> bool {
        self.selected(context).is_stale
    }

    fn selected(&mut self, context: &str) -> ensembles::contexts::Selected {
        let policy = Policy::Exp4(Learning { eta: 0.5, exploration: 0.0, window: 800 });
        let agreements = vec![Agreement::Argmax];
        let selection = Selection { policy, agreements, defaults: None, confidence: 0.0, reply: Span::ZERO, seed: 0 };
        let fresh = || Learner::new(&selection, 2);
        self.contexts.select((self.now, 1), (&Self::kind(), &context.into()), fresh).unwrap()
    }

    /// A request, of which is heard that the first member was wrong so often.
    fn learn(&mut self, context: &str, loss: f64) {
        let selected = self.selected(context);
        let (request, losses) = (selected.choice.request, [Some(loss), Some(0.0)]);
        self.contexts.observe(self.now, &selected.place, (request, 1.0), &losses).unwrap();
    }

    /// Tries what there is to be sent once; why it failed.
    fn exchange(&mut self) -> Result<(), String> {
        let Some(due) = self.contexts.poll_timeout() else { return Ok(()) };
        self.now = self.now.max(due);
        let batch = self.contexts.poll_batch(self.now).unwrap();
        match runtime().block_on(self.redis.exchange(batch)) {
            Ok(known) => self.contexts.handle_exchanged(self.now, known.into_iter().map(Result::ok).collect()),
            Err(why) => {
                self.contexts.handle_failed(self.now);
                return Err(why);
            }
        }
        Ok(())
    }

    fn exchange_all(&mut self) {
        eventually("all is exchanged", || self.exchange().is_ok() && self.contexts.poll_timeout().is_none());
    }

    /// What the server knows by now.
    fn weights(&mut self, context: &str) -> Vec<f64> {
        self.now += Span::from_millis(2_000);
        self.ask(context);
        self.exchange_all();
        self.contexts.weights(&Self::kind(), &context.into()).unwrap()
    }
}

#[test]
fn two_frontends_come_to_the_same_weights() {
    let Some(server) = Server::start(&[]) else { return };
    let config = config(server.url(""), 10_000);
    let [mut one, mut other] = [(); 2].map(|()| Frontend::of(&config));
    for at in 0..20 {
        one.learn("ann", 0.25);
        other.learn("ann", 0.5);
        other.learn("bob", f64::from(at % 2));
        one.exchange_all();
        if at % 3 == 0 {
            other.exchange_all();
        }
    }
    other.exchange_all();
    for (context, lost) in [("ann", 15.0), ("bob", 10.0)] {
        let weights = one.weights(context);
        assert_eq!(weights, other.weights(context));
        let expected = 1.0 / (1.0 + f64::exp(0.5 * lost));
        assert!((weights[0] - expected).abs() < 1e-9, "{context}: {weights:?}, {expected}");
    }
    assert_eq!((one.contexts.counts().lost, other.contexts.counts().lost), (0, 0));
    // All keys go when nobody uses them any more.
    let Ok(Value::List(keys)) = server.tell("", &["KEYS", "*"]) else { panic!("no keys") };
    assert_eq!(keys.len(), 4, "{keys:?}");
    for key in &keys {
        let Value::Text(key) = key else { panic!("{key:?}") };
        let Ok(Value::Number(left)) = server.tell("", &["TTL", key]) else { panic!("{key}") };
        assert!(left > 0, "{key}: {left}");
    }
    // A frontend that starts later has it from there, and what nobody has said anything of is not stored.
    let mut third = Frontend::of(&config);
    assert!(third.ask("ann") && third.ask("nobody"));
    assert_eq!(third.weights("ann"), one.weights("ann"));
    assert_eq!(server.tell("", &["DBSIZE"]), Ok(Value::Number(5)), "its own last batch is known, too");
}

#[test]
fn a_window_moves_on_and_takes_no_more_room() {
    let Some(server) = Server::start(&[]) else { return };
    let mut frontend = Frontend::of(&config(server.url(""), 10_000));
    frontend.learn("ann", 1.0);
    frontend.exchange_all();
    let key = "downbeat:context:vote/1:0:ann";
    for _ in 0..60 {
        (0..100).for_each(|_| drop(frontend.selected("ann")));
        frontend.learn("ann", 0.0);
        frontend.exchange_all();
        let Ok(Value::Number(fields)) = server.tell("", &["HLEN", key]) else { panic!("no hash") };
        assert!(fields <= 36 * 2 + 1 + 4, "{fields}");
    }
    assert_eq!(frontend.weights("ann"), [0.5, 0.5], "what was long ago is forgotten");
}

#[test]
fn a_killed_server_costs_nothing_once_it_is_back() {
    let Some(mut server) = Server::start(&[]) else { return };
    let mut frontend = Frontend::of(&config(server.url(""), 10_000));
    frontend.learn("ann", 1.0);
    frontend.exchange_all();
    server.process.kill();
    frontend.learn("ann", 1.0);
    assert!(frontend.exchange().is_err() && frontend.exchange().is_err());
    frontend.learn("ann", 1.0);
    let known = frontend.contexts.weights(&Frontend::kind(), &"ann".into()).unwrap();
    assert!((known[0] - 1.0 / (1.0 + f64::exp(1.5))).abs() < 1e-9, "what is heard here counts here: {known:?}");
    frontend.now += Span::from_millis(1_000);
    assert!(frontend.ask("ann"), "and is told as stale");
    server.process.run();
    assert_eq!(frontend.weights("ann"), known, "each once");
    assert_eq!((frontend.contexts.counts().lost, frontend.contexts.counts().is_silent), (0, false));
}

#[test]
fn a_batch_of_which_nobody_knows_what_became_counts_once() {
    let Some(server) = Server::start(&[]) else { return };
    // Long enough for a server that runs, and soon over for one that stands still.
    let mut frontend = Frontend::of(&config(server.url(""), 300));
    eventually("a first exchange", || {
        frontend.ask("ann");
        frontend.now += Span::from_millis(600);
        frontend.exchange().is_ok()
    });
    frontend.learn("ann", 1.0);
    server.signal(rustix::process::Signal::STOP);
    // It lies in the server's socket from the first time on.
    for _ in 0..3 {
        assert_eq!(frontend.exchange(), Err("no answer in 300 ms".to_owned()));
    }
    server.signal(rustix::process::Signal::CONT);
    let weights = frontend.weights("ann");
    assert!((weights[0] - 1.0 / (1.0 + f64::exp(0.5))).abs() < 1e-9, "{weights:?}");
    let sum = server.tell("", &["HGET", "downbeat:context:vote/1:0:ann", "0:0"]);
    assert_eq!(sum, Ok(Value::Text("1".to_owned())));
}

#[test]
fn a_wrong_password_is_told_and_a_right_one_taken() {
    let Some(server) = Server::start(&["--requirepass", "open sesame"]) else { return };
    let refused = |redis: &str| {
        let mut frontend = Frontend::of(&config(server.url(redis), 10_000));
        frontend.learn("ann", 1.0);
        let why = frontend.exchange().unwrap_err();
        assert!(frontend.ask("ann") && frontend.contexts.counts().failures == 1);
        why
    };
    assert!(refused("").starts_with("NOAUTH"), "{}", refused(""));
    assert!(refused(":sesame@").starts_with("WRONGPASS"), "{}", refused(":sesame@"));
    assert!(refused("nobody:open%20sesame@").starts_with("WRONGPASS"));
    for right in [":open%20sesame@", "default:open%20sesame@"] {
        Frontend::of(&config(server.url(right), 10_000)).exchange_all();
    }
    // A file is read anew for each connection.
    let file = server.folder.path().join("password");
    fs::write(&file, "sesame\n").unwrap();
    let in_file = SelectionConfig { redis_password_file: Some(file.clone()), ..config(server.url(""), 10_000) };
    let mut frontend = Frontend::of(&in_file);
    frontend.learn("ann", 1.0);
    assert!(frontend.exchange().unwrap_err().starts_with("WRONGPASS"));
    fs::write(&file, "open sesame\n").unwrap();
    frontend.exchange_all();
    assert_eq!(frontend.contexts.counts().told, 2);
}

/// An authority, a certificate of it for 127.0.0.1 with its key, and another authority.
fn certificates(folder: &Path) {
    let authority = |name: &str| {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        fs::write(folder.join(name), params.self_signed(&key).unwrap().pem()).unwrap();
        Issuer::new(params, key)
    };
    authority("other.pem");
    let issuer = authority("ca.pem");
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    fs::write(folder.join("server.pem"), certificate.pem()).unwrap();
    fs::write(folder.join("server.key"), key.serialize_pem()).unwrap();
}

#[test]
fn a_server_is_known_by_its_certificate_and_what_is_said_is_encrypted() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path());
    let [certificate, key] = ["server.pem", "server.key"].map(|file| folder.path().join(file).display().to_string());
    let at = testing::Port::hold();
    let port = at.address().port().to_string();
    let options = ["--tls-port", &port, "--tls-cert-file", &certificate, "--tls-key-file", &key];
    let options = [&options[..], &["--tls-auth-clients", "no", "--requirepass", "sesame"]].concat();
    let Some(server) = Server::start(&options) else { return };
    let config = |url: String, authority: &str| SelectionConfig {
        redis_authority: Some(folder.path().join(authority)),
        ..config(RedisUrl(url), 10_000)
    };
    let url = format!("rediss://:sesame@{}/1", at.address());
    let mut frontend = Frontend::of(&config(url.clone(), "ca.pem"));
    frontend.learn("ann", 1.0);
    frontend.exchange_all();
    // It is the same server without.
    let sum = server.tell(":sesame@", &["HGET", "downbeat:context:vote/1:0:ann", "0:0"]);
    assert_eq!(sum, Ok(Value::Text("1".to_owned())));
    // Somebody else's certificate, and a server that speaks no TLS.
    let plain = format!("rediss://{}", pretend(b"-ERR unknown command\r\n"));
    for (url, authority) in [(url, "other.pem"), (plain, "ca.pem")] {
        let mut frontend = Frontend::of(&config(url, authority));
        frontend.learn("ann", 1.0);
        let why = frontend.exchange().unwrap_err();
        assert!(why.starts_with("no TLS: "), "{why}");
        assert!(frontend.ask("ann"), "answers go on");
    }
}

#[test]
fn a_key_of_something_else_costs_its_own_context_alone() {
    let Some(server) = Server::start(&[]) else { return };
    let mut frontend = Frontend::of(&config(server.url(""), 10_000));
    let key = |name: &str| format!("downbeat:context:vote/1:0:{name}");
    server.tell("", &["SET", &key("ann"), "a text"]).unwrap();
    server.tell("", &["HSET", &key("bob"), "r", "many"]).unwrap();
    server.tell("", &["HSET", &key("cid"), "r", "5", "0:0", "-7", "0:0:n", "1"]).unwrap();
    ["ann", "bob", "cid", "dan"].iter().for_each(|name| frontend.learn(name, 1.0));
    frontend.exchange_all();
    assert_eq!((frontend.contexts.counts().told, frontend.contexts.counts().lost), (2, 6));
    assert_eq!(["ann", "bob", "cid", "dan"].map(|name| frontend.ask(name)), [true, true, true, false]);
    assert!(frontend.contexts.weights(&Frontend::kind(), &"ann".into()).unwrap()[0] < 0.5, "what is known counts on");
}

#[test]
fn a_full_server_hears_it_once_it_has_room() {
    let Some(server) = Server::start(&[]) else { return };
    let mut frontend = Frontend::of(&config(server.url(""), 10_000));
    server.tell("", &["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    frontend.learn("ann", 1.0);
    let why = frontend.exchange().unwrap_err();
    assert!(why.contains("OOM"), "{why}");
    server.tell("", &["CONFIG", "SET", "maxmemory", "0"]).unwrap();
    frontend.exchange_all();
    assert_eq!((frontend.contexts.counts().told, frontend.contexts.counts().lost), (2, 0));
}

/// Listens, and says that to whoever connects.
pub(crate) fn pretend(says: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut streams = Vec::new();
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.write_all(says);
            streams.push(stream);
        }
    });
    address
}

#[test]
fn what_only_pretends_to_be_a_server_is_found_out() {
    let deep = b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n";
    let says: [(&'static [u8], &str); 7] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "found something else at its address"),
        (b"*1000000000\r\n", "found something else at its address"),
        (b"$99999999999999999999\r\n", "found something else at its address"),
        (deep, "found something else at its address"),
        (b"*0\r\n", "found something else at its address"),
        (b"-ERR unknown command\r\n", "ERR unknown command"),
        (b"", "no answer in 200 ms"),
    ];
    for (says, expected) in says {
        let url = RedisUrl(format!("redis://{}", pretend(says)));
        let mut frontend = Frontend::of(&config(url, 200));
        frontend.learn("ann", 1.0);
        let why = frontend.exchange().unwrap_err();
        assert!(why.starts_with(expected), "{says:?}: {why}");
        assert!(frontend.ask("ann"));
        assert!(frontend.contexts.weights(&Frontend::kind(), &"ann".into()).unwrap()[0] < 0.5);
    }
    // One that answers right in form, and not in what it says.
    for says in [&b"*1\r\n:7\r\n"[..], b"*1\r\n*4\r\n:1\r\n$1\r\nx\r\n$1\r\n0\r\n*0\r\n", b"*1\r\n*2\r\n:1\r\n:1\r\n"] {
        let mut frontend = Frontend::of(&config(RedisUrl(format!("redis://{}", pretend(says))), 10_000));
        frontend.learn("ann", 1.0);
        assert_eq!(frontend.exchange(), Ok(()));
        assert_eq!((frontend.contexts.counts().told, frontend.contexts.counts().lost), (0, 2));
        assert!(frontend.ask("ann"));
    }
}

#[test]
fn where_it_is_stands_in_a_url() {
    let of = |url: &str| {
        Place::of(&config(RedisUrl(url.to_owned()), 1), 0).map(|place| (place.address.to_string(), place.database))
    };
    assert_eq!(of("redis://127.0.0.1:6379"), Ok(("127.0.0.1:6379".to_owned(), 0)));
    assert_eq!(of("redis://:a@b%40c@redis:6379/12"), Ok(("redis:6379".to_owned(), 12)));
    for wrong in
        ["", "redis:6379", "valkey://redis:6379", "redis://redis", "redis://redis:6379/x", "redis://me@redis:1"]
    {
        let why = of(wrong).unwrap_err();
        assert!(why.ends_with("expected redis[s]://[[USER]:PASSWORD@]HOST:PORT[/DATABASE]"), "{why}");
    }
    let why = of("http://:secret@redis:6379").unwrap_err();
    assert!(why.starts_with("selection.redis: found 'redis:6379', expected") && !why.contains("secret"), "{why}");
    let url = RedisUrl("redis://:secret@redis:6379".to_owned());
    assert!(!format!("{:?}", config(url, 1)).contains("secret"));
    let both =
        SelectionConfig { redis_password_file: Some("x".into()), ..config(RedisUrl("redis://:a@b:1".to_owned()), 1) };
    assert!(check(&both).unwrap_err().starts_with("selection.redis_password_file: found a password"));
    let none =
        SelectionConfig { redis_password_file: Some("/none".into()), ..config(RedisUrl("redis://b:1".to_owned()), 1) };
    assert!(check(&none).unwrap_err().starts_with("selection.redis_password_file: found nothing to read"));
    let tls = |url: &str, file: Option<&str>| {
        check(&SelectionConfig { redis_authority: file.map(Into::into), ..config(RedisUrl(url.to_owned()), 1) })
    };
    let file = "selection.redis_authority: found a file, expected none for redis://";
    assert_eq!(tls("redis://b:1", Some("ca.pem")), Err(file.to_owned()));
    let none =
        "selection.redis_authority: found none, expected a file (PEM) with who vouches for the server of rediss://";
    assert_eq!(tls("rediss://b:1", None), Err(none.to_owned()));
    assert!(tls("rediss://b:1", Some("/none")).unwrap_err().starts_with("selection.redis_authority: "));
    let never = config(RedisUrl("redis://b:1".to_owned()), 0);
    assert_eq!(check(&never), Err("selection.redis_timeout_ms: found 0, expected 1 to 4294967295".to_owned()));
}
