//! `downbeat bench incast`: many servers answer one reader at once (Symphony, appendix B).
//!
//! Each of N servers holds M objects; one reader pulls all N x M of them, round after round, which is what a backend
//! does that fetches the inputs of a batch from its frontends. The reader has a thread, and the servers share the other
//! cores, on every arm.
//! Servers of other hosts are started there with `--serve`, and named to the reader by `--from`.
//! The bytes of every object are checked after every round, outside the measured time, and wiped before the next, so
//! that an answer of an earlier round is not taken for one. This is a driver: it owns threads and reads the clock.
#![allow(clippy::disallowed_methods)]

mod object;
mod rdma;
mod servers;
mod tcp;

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    num::NonZero,
    str::FromStr,
    thread,
    time::Duration,
};

use clap::Args as ClapArgs;
use cli::{CommandError, positive};
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use proto::{Span, Timestamp};
use rustix::thread::set_current_timer_slack;
use serde::Serialize;
use transport::{Address, ArmName, Clock, LocalPath};

use crate::{percentiles::Tail, stalls};
use object::Share;
use servers::{Server, Servers};

/// Servers, and threads for them.
const SERVERS_MAX: f64 = 256.0;
/// Objects of one server: what a connection lets wait (`transport`'s READs of one connection).
const OBJECTS_MAX: f64 = 4096.0;
/// Memory of the servers, and as much again for the reader and what it expects.
const BYTES_MAX: u64 = 1 << 30;
/// Without any object for so long, something is broken.
const STALL: Span = Span::from_millis(10_000);
/// What a histogram holds; a longer wait is counted as this.
const LATENCY_MAX_NS: u64 = 60_000_000_000;
/// How long idle threads are watched at most: for as long as the rounds took, but for less than this.
const IDLE_MAX: Duration = Duration::from_secs(10);
/// Of the first rounds, what is not counted: connections and caches warm up.
const WARM_UP_FRACTION: f64 = 0.05;

/// Pull many objects from many servers at once.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// soft: READs over soft-RoCE. verbs:DEV: READs by a device. tcp: one pipelined connection for each server
    #[arg(long, default_value_t = Self::default().arm)]
    pub arm: Carrier,
    /// How packets go with the arm `soft`: `ring`, through memory, or `udp`
    #[arg(long, default_value_t)]
    pub path: LocalPath,
    /// Be a server for readers of other hosts at this address, TCP's port with it, until a signal ends it
    #[arg(long, value_name = "IP:PORT", conflicts_with_all = ["from", "servers", "pace_gbps", "reader_window"])]
    pub serve: Option<SocketAddr>,
    /// Read from these servers, started with `--serve` elsewhere, instead of ones in this process
    #[arg(long, value_name = "HOST:PORT,..", value_delimiter = ',', conflicts_with_all = ["servers", "server_threads"])]
    pub from: Vec<Address>,
    /// Servers
    #[arg(long, default_value_t = Self::default().servers)]
    pub servers: usize,
    /// Objects of each server
    #[arg(long, default_value_t = Self::default().objects)]
    pub objects: usize,
    /// Size of an object
    #[arg(long, default_value_t = Self::default().bytes)]
    pub bytes: usize,
    /// Rounds, after a warm-up of a twentieth of them
    #[arg(long, default_value_t = Self::default().rounds)]
    pub rounds: u64,
    /// Ask for objects one after another, evenly spaced at this rate, instead of all at once
    #[arg(long)]
    pub pace_gbps: Option<f64>,
    /// Bytes that the reader lets be on their way to it; by default what its socket's buffer holds
    #[arg(long)]
    pub reader_window: Option<usize>,
    /// Threads that the servers share; by default one less than there are cores, as the reader has one
    #[arg(long)]
    pub server_threads: Option<usize>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

impl Default for Args {
    /// What the command line leaves out.
    fn default() -> Self {
        let arm = Carrier::Rdma(ArmName::Soft);
        Self {
            arm,
            path: LocalPath::default(),
            serve: None,
            from: Vec::new(),
            servers: 8,
            objects: 8,
            bytes: 153_600,
            rounds: 500,
            pace_gbps: None,
            reader_window: None,
            server_threads: None,
            json: false,
        }
    }
}

/// What carries the objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Carrier {
    /// READs over one of transport's arms.
    Rdma(ArmName),
    /// TCP.
    Tcp,
}

impl FromStr for Carrier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "tcp" {
            return Ok(Self::Tcp);
        }
        text.parse::<ArmName>().map(Self::Rdma).map_err(|error| format!("{error}; or `tcp`"))
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rdma(arm) => arm.fmt(f),
            Self::Tcp => f.write_str("tcp"),
        }
    }
}

/// The result.
#[derive(Debug, Clone, Serialize)]
pub struct Incast {
    /// As asked for.
    pub arm: String,
    /// As asked for; of the arm `soft`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<LocalPath>,
    /// As asked for.
    pub servers: usize,
    /// As asked for.
    pub objects: usize,
    /// As asked for.
    pub bytes: usize,
    /// Counted rounds.
    pub rounds: u64,
    /// From when an object was to be asked for to its last byte.
    pub object_us: Tail,
    /// From the first object's start to the last one's end.
    pub round_us: Tail,
    /// Payload of all rounds over the time of all rounds.
    pub goodput_gbps: f64,
    /// Whether every byte of every object was right.
    pub verified: bool,
    /// What this machine makes threads wait for that only look at the clock, as many and for as long as the rounds took
    /// (10 s at most), right after them: how much of a tail may be its. Threads that sleep in between may lose less.
    pub idle_wait_us: Tail,
    /// As asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pace_gbps: Option<f64>,
    /// As asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reader_window_bytes: Option<usize>,
    /// Of every object, in nanoseconds.
    #[serde(skip)]
    pub objects_ns: Histogram<u64>,
}

/// How much is pulled.
#[derive(Debug, Clone, Copy)]
struct Shape {
    servers: usize,
    objects: usize,
    bytes: usize,
}

impl Shape {
    /// All objects of all servers, in the order in which they are asked for: servers take turns.
    fn all(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.objects).flat_map(move |object| (0..self.servers).map(move |server| (server, object)))
    }

    fn count(self) -> usize {
        self.servers * self.objects
    }

    /// What one of the servers holds.
    fn share(self, server: usize) -> Share {
        Share { server, objects: self.objects, bytes: self.bytes }
    }

    /// The number of one object, and its place in the reader's memory.
    fn slot(self, server: usize, object: usize) -> usize {
        server * self.objects + object
    }
}

/// What pulls objects.
trait Reader {
    /// Asks for one object; any number may be under way.
    fn ask(&mut self, now: Timestamp, server: usize, object: usize) -> Result<(), CommandError>;
    /// Takes an object that is complete: its slot. Waits for one until `until` at the latest.
    fn poll_done(&mut self, clock: &Clock, until: Timestamp) -> Result<Option<usize>, CommandError>;
    /// Copies a slot's bytes out.
    fn read(&self, slot: usize, into: &mut [u8]);
    /// Overwrites all slots.
    fn wipe(&mut self);
}

/// Runs the command and prints its result on stdout.
///
/// # Errors
/// On bad input (exit code 2), or if an object never comes.
pub fn run(args: &Args) -> Result<(), CommandError> {
    if let Some(listen) = args.serve {
        return serve(args, listen);
    }
    let incast = measure(args)?;
    if args.json {
        println!("{}", serde_json::to_string(&incast).expect("plain data"));
    } else {
        print!("{}", incast.text());
    }
    Ok(())
}

/// Runs the benchmark.
///
/// # Errors
/// On bad input, or if an object never comes.
pub fn measure(args: &Args) -> Result<Incast, CommandError> {
    let shape = check(args)?;
    // A sleep may otherwise end 50 us after its time (PR_SET_TIMERSLACK in prctl(2)), which would count as an object's.
    // The servers' threads inherit it. Where the system forbids it, sleeps are as late as they are.
    let _ = set_current_timer_slack(NonZero::new(1));
    let clock = Clock::start();
    let threads = args.server_threads.unwrap_or_else(servers::threads_by_default);
    let (here, at) = if args.from.is_empty() {
        let (here, at) = start(&clock, args, (SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), false), threads)?;
        (Some(here), at.into_iter().map(Address::from).collect())
    } else {
        (None, args.from.clone())
    };
    let mut reader: Box<dyn Reader> = match &args.arm {
        Carrier::Rdma(arm) => {
            let servers = (&at[..], here.is_none());
            Box::new(rdma::RdmaReader::connect(&clock, shape, (arm, args.path), servers, args.reader_window)?)
        }
        Carrier::Tcp => Box::new(tcp::TcpReader::connect(shape, &at)?),
    };
    let warm_up = (args.rounds as f64 * WARM_UP_FRACTION).ceil() as u64;
    let bar = ProgressBar::new(args.rounds + warm_up);
    bar.set_style(
        ProgressStyle::with_template("pulling [{bar:40}] {pos}/{len} rounds")
            .expect("a constant template")
            .progress_chars("=> "),
    );
    let interval = args.pace_gbps.map(|gbps| Span::from_nanos((shape.bytes as f64 * 8.0 / gbps) as i64));
    let mut tally = Tally::new();
    let mut check = object::Check::new(shape);
    for round in 0..args.rounds + warm_up {
        reader.wipe();
        if round == warm_up {
            tally = Tally::new();
        }
        pull(&clock, reader.as_mut(), shape, interval, &mut tally)?;
        check.run(reader.as_ref());
        bar.inc(1);
    }
    bar.finish_and_clear();
    drop(reader);
    // The servers end before.
    let threads = here.map_or(0, |_| threads);
    let idle_wait_us = stalls::measure(threads as u32 + 1, tally.measured.min(IDLE_MAX));
    Ok(Incast {
        arm: args.arm.to_string(),
        path: (args.arm == Carrier::Rdma(ArmName::Soft)).then_some(args.path),
        servers: shape.servers,
        objects: shape.objects,
        bytes: shape.bytes,
        rounds: args.rounds,
        object_us: Tail::of(&tally.objects),
        round_us: Tail::of(&tally.rounds),
        goodput_gbps: (shape.count() * shape.bytes) as f64 * 8.0 * args.rounds as f64
            / tally.measured.as_nanos() as f64,
        verified: check.all_right(),
        idle_wait_us,
        pace_gbps: args.pace_gbps,
        reader_window_bytes: args.reader_window,
        objects_ns: tally.objects,
    })
}

/// Starts servers that listen there, and are reached by other hosts or not, on so many threads. With where each is.
fn start(
    clock: &Clock,
    args: &Args,
    listen: (SocketAddr, bool),
    threads: usize,
) -> Result<(Servers, Vec<SocketAddr>), CommandError> {
    let servers = if args.serve.is_some() { 1 } else { args.servers };
    match &args.arm {
        Carrier::Rdma(arm) => {
            dealt(clock, (0..servers).map(|_| rdma::RdmaServer::open((arm, args.path), listen)), threads)
        }
        Carrier::Tcp => {
            let failed = |error| CommandError::failed(format!("cannot listen at {}", listen.0), error);
            dealt(clock, (0..servers).map(|_| tcp::TcpServer::open(listen.0).map_err(failed)), threads)
        }
    }
}

/// Servers that were opened, on their threads.
fn dealt<S: Server>(
    clock: &Clock,
    opened: impl Iterator<Item = Result<(S, SocketAddr), CommandError>>,
    threads: usize,
) -> Result<(Servers, Vec<SocketAddr>), CommandError> {
    let (servers, at) = opened.collect::<Result<(Vec<_>, Vec<_>), _>>()?;
    let servers = Servers::start(clock, servers, threads);
    Ok((servers.map_err(|error| CommandError::failed("cannot start the servers", error))?, at))
}

/// Serves readers of other hosts until a signal ends this process.
fn serve(args: &Args, listen: SocketAddr) -> Result<(), CommandError> {
    let (_servers, at) = start(&Clock::start(), args, (listen, true), 1)?;
    println!("serving objects over {} at {}", args.arm, at[0]);
    loop {
        thread::park();
    }
}

fn check(args: &Args) -> Result<Shape, CommandError> {
    let servers = if args.from.is_empty() { args.servers } else { args.from.len() };
    positive(if args.from.is_empty() { "--servers" } else { "--from" }, servers as f64, SERVERS_MAX)?;
    positive("--objects", args.objects as f64, OBJECTS_MAX)?;
    positive("--bytes", args.bytes as f64, BYTES_MAX as f64)?;
    positive("--rounds", args.rounds as f64, 1e7)?;
    if let Some(gbps) = args.pace_gbps {
        positive("--pace-gbps", gbps, 1000.0)?;
    }
    if let Some(threads) = args.server_threads {
        positive("--server-threads", threads as f64, SERVERS_MAX)?;
    }
    if let Some(bytes) = args.reader_window {
        positive("--reader-window", bytes as f64, BYTES_MAX as f64)?;
        if args.arm == Carrier::Tcp {
            return Err(CommandError::flag("--reader-window", "an arm with READs, such as soft", "--arm tcp"));
        }
    }
    let total =
        [servers, args.objects, args.bytes].iter().try_fold(1u64, |total, factor| total.checked_mul(*factor as u64));
    match total {
        Some(total) if total <= BYTES_MAX => Ok(Shape { servers, objects: args.objects, bytes: args.bytes }),
        _ => Err(CommandError::flag(
            "--servers x --objects x --bytes",
            format!("at most {BYTES_MAX} bytes in all"),
            format!("{servers} x {} x {}", args.objects, args.bytes),
        )),
    }
}

/// Latencies in nanoseconds.
struct Tally {
    objects: Histogram<u64>,
    rounds: Histogram<u64>,
    measured: Duration,
}

impl Tally {
    fn new() -> Self {
        let histogram = || Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3).expect("constant bounds");
        Self { objects: histogram(), rounds: histogram(), measured: Duration::ZERO }
    }
}

/// One round: asks for every object when its time has come, and takes what is complete.
fn pull(
    clock: &Clock,
    reader: &mut dyn Reader,
    shape: Shape,
    interval: Option<Span>,
    tally: &mut Tally,
) -> Result<(), CommandError> {
    let began = clock.now();
    // With a pace the time counts from when an object was to be asked for, however late we came to it.
    let due = |index: usize| {
        began + interval.map_or(Span::ZERO, |interval| Span::from_nanos(interval.as_nanos() * index as i64))
    };
    let mut due_of = vec![began; shape.count()];
    let mut to_ask = shape.all().enumerate().peekable();
    let (mut left, mut progressed_at) = (shape.count(), began);
    while left > 0 {
        let now = clock.now();
        while let Some((index, (server, object))) = to_ask.next_if(|(index, _)| due(*index) <= now) {
            due_of[shape.slot(server, object)] = due(index);
            reader.ask(now, server, object)?;
        }
        let until = to_ask.peek().map_or(now + STALL, |(index, _)| due(*index));
        let Some(slot) = reader.poll_done(clock, until)? else {
            if clock.now() - progressed_at > STALL && to_ask.peek().is_none() {
                let cause = format!(
                    "{left} of {} objects did not come within {} s",
                    shape.count(),
                    STALL.to_duration().as_secs()
                );
                return Err(CommandError::failed("the round does not end", cause));
            }
            continue;
        };
        progressed_at = clock.now();
        left -= 1;
        record(&mut tally.objects, progressed_at - due_of[slot]);
    }
    let took = clock.now() - began;
    record(&mut tally.rounds, took);
    tally.measured += took.to_duration();
    Ok(())
}

fn record(histogram: &mut Histogram<u64>, took: Span) {
    histogram.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(0));
}

impl Incast {
    fn text(&self) -> String {
        let cells = |name: &str, us: &Tail| {
            let Tail { p50, p99, p999, p9999, max } = us;
            format!("{name:<8}{p50:>12.1}{p99:>12.1}{p999:>12.1}{p9999:>12.1}{max:>12.1}")
        };
        let row = |name, us: &Tail| format!("{}{:>12.2}\n", cells(name, us), us.p9999 / us.p50);
        let pace = self.pace_gbps.map_or("all at once".into(), |gbps| format!("paced at {gbps} Gbit/s"));
        format!(
            "{} arm{}: {} servers x {} objects x {} bytes, {} rounds, {pace}\n\
             us      {:>12}{:>12}{:>12}{:>12}{:>12}{:>12}\n{}{}{}\n\
             idle: what threads that only look at the clock wait for on this machine, as many and for as long\n\
             goodput {:.2} Gbit/s; {}\n\
             Symphony, appendix B, 56 Gbit/s InfiniBand: an object within 24 us, p99.99 33 us; by TCP p50 3034 us, \
             p99.99 12 times that\n",
            self.arm,
            self.path.map_or(String::new(), |path| format!(", {path}")),
            self.servers,
            self.objects,
            self.bytes,
            self.rounds,
            "p50",
            "p99",
            "p99.9",
            "p99.99",
            "max",
            "p99.99/p50",
            row("object", &self.object_us),
            row("round", &self.round_us),
            cells("idle", &self.idle_wait_us),
            self.goodput_gbps,
            if self.verified { "every byte was right" } else { "WRONG BYTES" },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(arm: &str) -> Args {
        let arm = arm.parse().unwrap();
        Args { arm, servers: 3, objects: 4, bytes: 20_001, rounds: 5, ..Args::default() }
    }

    #[test]
    fn every_object_comes_on_every_arm() {
        for (arm, path) in [("soft", LocalPath::Ring), ("soft", LocalPath::Udp), ("tcp", LocalPath::Ring)] {
            for pace_gbps in [None, Some(0.5)] {
                let incast = measure(&Args { pace_gbps, path, ..args(arm) }).unwrap();
                assert!(incast.verified && incast.rounds == 5 && incast.goodput_gbps > 0.0, "{incast:?}");
                let Tail { p50, max, .. } = incast.object_us;
                assert!(0.0 < p50 && p50 <= max && max <= incast.round_us.max * 1.01, "{incast:?}");
            }
        }
        let small_window = measure(&Args { reader_window: Some(30_000), ..args("soft") }).unwrap();
        assert!(small_window.verified);
    }

    #[test]
    fn servers_elsewhere_serve_one_reader_after_another() {
        for arm in ["soft", "tcp"] {
            let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            let serving = Args { serve: Some(listen), ..args(arm) };
            let started = (0..2).map(|_| start(&Clock::start(), &serving, (listen, true), 1).unwrap());
            let (servers, at): (Vec<_>, Vec<_>) = started.map(|(server, at)| (server, Address::from(at[0]))).unzip();
            for objects in [4, 7, 4] {
                let incast = measure(&Args { from: at.clone(), objects, ..args(arm) }).unwrap();
                assert!(incast.verified && incast.servers == 2 && incast.objects == objects, "{incast:?}");
            }
            drop(servers);
            let gone = measure(&Args { from: at, ..args(arm) }).unwrap_err().to_string();
            assert!(gone.starts_with("cannot connect to the server 127.0.0.1:"), "{gone}");
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let error = |args: Args| measure(&args).unwrap_err().to_string();
        let unknown = "quic".parse::<Carrier>().unwrap_err();
        assert!(
            unknown.contains("`soft`") && unknown.contains("`tcp`") && unknown.contains("found `quic`"),
            "{unknown}"
        );
        assert!(error(Args { servers: 0, ..args("soft") }).starts_with("--servers: "));
        assert!(error(Args { bytes: 1 << 29, ..args("soft") }).contains("at most 1073741824 bytes in all"));
        assert!(error(Args { reader_window: Some(1), ..args("tcp") }).contains("--arm tcp"));
    }
}
