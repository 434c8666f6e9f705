//! The scheduler's process: sockets, threads and the clock around its state machines.
//!
//! With one ModelThread all is one thread with one endpoint ([`in_place`]). With more, control, the RankThread and each
//! ModelThread have threads of their own ([`threads`]), and each ModelThread an endpoint of its own, so that a task
//! crosses no other thread.
#![allow(clippy::disallowed_methods, reason = "the scheduler's only place with a clock, threads and sockets")]

mod connections;
mod era_clock;
mod in_place;
mod leaving;
mod peers;
pub mod threads;
pub mod turns;

use era_clock::EraClock;

use std::{
    net::SocketAddr,
    num::NonZero,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use admin::{Listener, Pages, Service, Vitals};
use proto::{Span, Timestamp, hello::SchedulerHello, turns::TurnWatch};
use transport::{Address, Arm, Clock, Endpoint, EndpointConfig, OpenError};

use crate::{
    cluster::ClusterConfig,
    config::{Config, RunError},
    history::History,
    snapshot::Board,
    status::{self, Status},
    trace::{self, Trace},
};

/// How often `stop` is looked at, and whether all threads are alive.
const LOOK_INTERVAL: Span = Span::from_millis(100);

/// Runs a scheduler until `stop` is set, and what it has is finished.
///
/// # Errors
/// If the configuration is wrong, a socket cannot be opened or a thread not be started. Nothing that a peer does ends
/// it.
pub fn run(config: &Config, stop: &AtomicBool) -> Result<(), RunError> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let cluster = ClusterConfig { first_id: rand::random(), ..config.cluster_config(cores)? };
    let (clock, vitals) = (Clock::start(), Vitals::default());
    let board = Board::default();
    let (status, told) = (status(config, board.clone()), status(config, board.clone()));
    let pages = Pages::new("scheduler", config.fabric.member_name(), vitals.clone(), move |_| told.metrics());
    let era = era_clock(&cluster, clock);
    // Nobody could look at it otherwise.
    let history = config.admin.as_ref().map(|_| History::new(cluster.model_threads));
    let (status, told_era) = (status.with_history(history.clone()), era.clone());
    let pages = pages.with_json(status::PATH, move |now, query| status.page((now, told_era.now()), query));
    let trace = history.clone().map(|history| (Trace::new(history, board.clone()), era.clone()));
    let pages = match trace {
        Some((trace, era)) => pages.with_json(trace::PATH, move |_, query| trace.page(era.now(), query)),
        None => pages,
    };
    let _admin = Listener::start(config.admin.as_ref(), clock, pages)?;
    let _service = Service::start(clock, &vitals)?;
    vitals.set_ready(Err("a name is waited for"));
    let Some(mut place) = Place::find((config, &vitals, &board), (era, history), stop)? else { return Ok(()) };
    if cluster.model_threads == 1 {
        in_place::run((config, &mut place), &cluster, clock, stop)
    } else {
        threads::run((config, &mut place), cluster, clock, stop)
    }
}

/// Reads what [`run`] reads before it opens anything.
///
/// # Errors
/// If the configuration, or a file that it names, is wrong.
pub fn check(config: &Config) -> Result<(), RunError> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let cluster = config.cluster_config(cores)?;
    if cluster.model_threads > 1 {
        threads::check_cores(config, cluster.model_threads)?;
    }
    Ok(config.fabric.check()?)
}

/// What tells operators of the cluster.
fn status(config: &Config, board: Board) -> Status {
    let alone = std::slice::from_ref(&config.listen);
    let schedulers = if config.schedulers.is_empty() { alone } else { &config.schedulers };
    let schedulers = schedulers.iter().map(ToString::to_string).collect();
    Status::new(board, config.fabric.member_name(), config.fabric.arm.to_string(), schedulers)
}

/// The clock that a scheduler's state machines are told.
fn era_clock(cluster: &ClusterConfig, clock: Clock) -> EraClock {
    if cluster.succession.schedulers > 1 { EraClock::among_others(clock) } else { EraClock::alone(clock) }
}

/// A turn that should have come at `due` comes now. Says so if that is late.
fn tell_silence(watch: &mut TurnWatch, due: Timestamp, now: Timestamp) {
    if let Some(silence) = watch.handle_turn(due, now) {
        tracing::warn!("this thread has done nothing for {silence}: the machine is too busy");
    }
}

/// Where this process is, with what all its endpoints have in common.
struct Place {
    listen: SocketAddr,
    endpoint: EndpointConfig,
    name: String,
    vitals: Vitals,
    board: Board,
    /// What everything in here is told.
    era: EraClock,
    /// Where what GPUs do is left, if anybody may look at it.
    history: Option<History>,
}

impl Place {
    /// Looks up the names that the configuration has for this host. Those that are not there yet are waited for; `None`
    /// if `stop` is set meanwhile.
    fn find(
        (config, vitals, board): (&Config, &Vitals, &Board),
        (era, history): (EraClock, Option<History>),
        stop: &AtomicBool,
    ) -> Result<Option<Self>, OpenError> {
        let others: Vec<Address> = config.schedulers.iter().filter(|other| **other != config.listen).cloned().collect();
        let (secrets, certificates) = (config.fabric.secrets()?, config.fabric.certificates()?);
        let look = || {
            let listen = transport::own_address("listen", &config.listen)?;
            let endpoint = EndpointConfig::over(config.fabric.arm(Some(listen.ip()), &others)?);
            let (name, vitals, board) = (config.fabric.member_name(), vitals.clone(), board.clone());
            let endpoint = endpoint.with_name("scheduler", &name).with_secrets(secrets.clone());
            let endpoint = endpoint.with_tls(certificates.clone());
            Ok(Self { listen, endpoint, name, vitals, board, era: era.clone(), history: history.clone() })
        };
        transport::wait_for_names(|| stop.load(Ordering::Relaxed), look)
    }

    /// One of the process's endpoints, which listens at `listen`. Several share one address, the first one's.
    fn open(&mut self, listen: SocketAddr, is_one_of_several: bool) -> Result<Endpoint, OpenError> {
        let endpoint = self.endpoint.clone().listening(listen);
        let endpoint =
            Endpoint::open(if is_one_of_several { endpoint.sharing_address_within_process() } else { endpoint })?;
        if let (Arm::Soft { address, any_port, .. }, Some(at)) = (&mut self.endpoint.arm, endpoint.packet_address()) {
            (*address, *any_port) = (at, false);
        }
        Ok(endpoint)
    }
}

/// Tells whoever looks after the process whether it takes members in.
struct Openness {
    vitals: Vitals,
    was_open: Option<bool>,
}

impl Openness {
    fn new(vitals: &Vitals) -> Self {
        Self { vitals: vitals.clone(), was_open: None }
    }

    fn tell(&mut self, is_open: bool) {
        if self.was_open.replace(is_open) != Some(is_open) {
            let closed = "it does not know yet who is the primary, or is about to end";
            self.vitals.set_ready(if is_open { Ok(()) } else { Err(closed) });
        }
    }
}

fn read_hello(hello: &[u8]) -> Result<SchedulerHello, String> {
    wincode::deserialize(hello)
        .map_err(|error| format!("the hello does not decode ({error}); do both sides run the same version?"))
}
