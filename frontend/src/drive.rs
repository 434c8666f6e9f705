//! Runs a frontend: one thread that owns the transport's endpoint, the core, and whatever serves others through the
//! [`Desk`]. Nothing is shared with other threads.
#![allow(clippy::disallowed_methods)] // Drivers own threads and clocks.

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    io,
    net::SocketAddr,
    ops::Range,
    path::PathBuf,
    rc::Rc,
};

use member::encode;
use proto::{Brought, ModelThreadId, SlotDescriptor, Timestamp, backend_to_frontend::LinkWelcome, turns::TurnWatch};
use repository::{Repository, Source, Store};
use thiserror::Error;
use tokio::runtime::LocalOptions;
use transport::{
    Access, Address, Arm, CONNECTIONS_MAX, Clock, ConnectionId, Endpoint, EndpointConfig, Memory, MemoryWindow,
    MemoryWindows, OpenError, OwnAddress, PostError, REGIONS_MAX, Region, RegionKey,
};

use crate::{
    arena::{self, Arena},
    config::Config,
    core::{Core, CoreConfig, Destination, Output},
    desk::{Desk, Observer},
    readiness::Readiness,
    slots::{ArenaTooSmall, SlotSize},
    tasks::Tasks,
};

/// Tasks, such as clients' connections, that have a turn between two turns of the transport's loop. With many more,
/// scheduler and backends wait while requests are read, and clients while replies are written; with few, each frame
/// carries little.
const TASKS_PER_TURN: u32 = 16;

/// Why a frontend could not run.
#[derive(Debug, Error)]
pub enum FrontendError {
    /// A key of the configuration is wrong.
    #[error("{0}")]
    Config(String),
    /// The repository cannot be read.
    #[error(transparent)]
    Repository(#[from] repository::RepositoryError),
    /// The arena is too small for the models.
    #[error(transparent)]
    Arena(#[from] ArenaTooSmall),
    /// There is no memory for the arena.
    #[error("arena_bytes: {bytes} bytes cannot be allocated: {cause}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        cause: io::Error,
    },
    /// The network cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The event loop or its thread cannot be set up.
    #[error("the event loop cannot be set up: {0}")]
    Runtime(#[from] io::Error),
}

/// A frontend that is ready to run: its sockets are open. It belongs to one thread.
pub struct Frontend {
    endpoint: Endpoint,
    /// The arena, where slots have no keys of their own: it is opened to each link.
    unwindowed: Option<Region>,
    schedulers: Vec<Address>,
    repository: PathBuf,
    store: Option<Store>,
    clock: Clock,
    desk: Rc<Desk>,
    /// Frames that the scheduler or a ModelThread has no room for yet. Bounded by the slots: each task has at most a
    /// few messages.
    unsent: BTreeMap<ConnectionId, VecDeque<Vec<u8>>>,
}

/// Reads what a frontend reads before it opens anything, and yields the repository.
///
/// # Errors
/// If the configuration, a file that it names, or the repository is wrong.
pub fn check(config: &Config) -> Result<Repository, FrontendError> {
    let schedulers = transport::scheduler_list(None, &config.schedulers).map_err(FrontendError::Config)?;
    config.network.check()?;
    if let Some(OwnAddress::At(link)) = &config.link
        && let Some(link) = link.ip()
    {
        check_link(link, &schedulers)?;
    }
    let (repository, bytes) = read(config)?;
    let sizes = repository.models.iter().map(|model| SlotSize::new(model.input_bytes(), model.output_bytes()));
    Tasks::new(bytes, &sizes.collect::<Vec<_>>())?;
    Ok(repository)
}

/// The repository, and the bytes of an arena for it.
fn read(config: &Config) -> Result<(Repository, usize), FrontendError> {
    let repository = repository::load(&config.repository)?.checked(config.strict)?;
    let bytes = config.arena_bytes.unwrap_or_else(|| arena::bytes_for(&repository.models, Memory::here()));
    Ok((repository, bytes))
}

fn check_link(link: SocketAddr, schedulers: &[Address]) -> Result<(), FrontendError> {
    if link.ip().is_unspecified() {
        let expected = "an address of this host that backends can reach";
        return Err(FrontendError::Config(format!("link: found {link}, expected {expected}")));
    }
    if schedulers.iter().any(|scheduler| scheduler.ip() == Some(link)) {
        let found = format!("schedulers: found {link}, which is this frontend's own `link`");
        return Err(FrontendError::Config(format!("{found}, expected schedulers only")));
    }
    Ok(())
}

impl Frontend {
    /// Reads the repository, allocates the arena and opens all sockets. `observer` counts; `()` does not.
    ///
    /// # Errors
    /// If the configuration or the repository is wrong, or the network cannot be opened. A scheduler that cannot be
    /// reached is no error: it is tried again and again.
    pub fn open(config: &Config, observer: Rc<dyn Observer>) -> Result<Self, FrontendError> {
        let schedulers = transport::scheduler_list(None, &config.schedulers).map_err(FrontendError::Config)?;
        let secrets = config.network.secrets()?;
        // Names that are not there yet are waited for.
        let look = || {
            let link = config.link.as_ref().map(|link| transport::own_or_routed("link", link, &schedulers, 0));
            Ok((config.network.arm(None, &schedulers)?, link.transpose()?))
        };
        let (arm, link) = transport::wait_for_names(|| false, look)?.expect("it is never over");
        let own = match &arm {
            Arm::Soft { address, .. } => Some(address.ip()),
            Arm::Verbs(verbs) => verbs.address,
        };
        let link = link.or(own.map(|ip| SocketAddr::new(ip, 0))).ok_or_else(|| {
            FrontendError::Config(format!("link: expected, as arm {} was given no address", config.network.arm))
        })?;
        check_link(link, &schedulers)?;
        let (Repository { mut models, ensembles, refused }, bytes) = read(config)?;
        let store = config.load_files.as_deref().map(Store::open).transpose()?;
        let region = Region::allocate(bytes).map_err(|cause| FrontendError::Memory { bytes, cause })?;
        let endpoint = EndpointConfig {
            connections_max: connections_max(config.links_max, schedulers.len()),
            is_windowless: config.is_windowless,
            ..EndpointConfig::over(arm)
                .with_name("frontend", &config.network.member_name())
                .with_secrets(secrets)
                .with_tls(config.network.certificates()?)
                .listening(link)
        };
        let mut endpoint = Endpoint::open(endpoint)?;
        check_links_max(config.links_max, endpoint.has_windows())?;
        // Slots have keys of their own where that can be, else links have; this one is nobody's. It shows that memory
        // can be registered, and has it in place before anybody waits for a link.
        let key = endpoint.register(&region, Access::default())?;
        let windows = endpoint.windows(&key);
        let link = endpoint.listen_address().expect("it was told to listen");
        let name = config.network.member_name();
        tracing::info!(name, %link, "the frontend is up");
        let core = CoreConfig {
            arena_bytes: bytes,
            arena: LinkWelcome {
                arena_address: key.address,
                arena_bytes: bytes as u64,
                arena_rkey: SlotDescriptor::NO_KEY,
                guards_offset: 0,
                guards_rkey: SlotDescriptor::NO_KEY,
            },
            name,
            link_address: link.to_string(),
            links_max: config.links_max,
            schedulers: schedulers.len(),
            token_seed: rand::random(),
        };
        // They take no slots of their own.
        models.extend(ensembles);
        let mut core = Core::new(core, models)?;
        refused.into_iter().for_each(|refused| core.handle_refused(refused));
        let unwindowed = windows.is_none().then(|| region.clone());
        let memory = Registered { region, windows };
        core.open_guards(&memory);
        let clock = Clock::start();
        let desk = Desk::new(core, Box::new(memory), Box::new(move || clock.now()), observer);
        let repository = config.repository.clone();
        Ok(Self { endpoint, unwindowed, schedulers, repository, store, clock, desk, unsent: BTreeMap::new() })
    }

    /// Where files that loads bring along are kept, if they are taken.
    #[must_use]
    pub fn store(&self) -> Option<Store> {
        self.store.clone()
    }

    /// What the parts of this frontend's thread share.
    #[must_use]
    pub fn desk(&self) -> Rc<Desk> {
        Rc::clone(&self.desk)
    }

    /// Runs until `serve` is ready, and yields what it yields. `serve` is polled on this thread, within tokio: it may
    /// spawn local tasks, and asks through [`Self::desk`].
    ///
    /// # Errors
    /// If the event loop cannot be set up.
    pub fn run<T>(mut self, serve: impl Future<Output = T>) -> Result<T, FrontendError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .event_interval(TASKS_PER_TURN)
            .build_local(LocalOptions::default())?;
        runtime.block_on(async move {
            tokio::select! {
                ended = serve => Ok(ended),
                Err(error) = self.move_packets() => Err(error.into()),
            }
        })
    }

    /// The transport's loop: packets to events, events to the core, the core's outputs to the transport.
    async fn move_packets(&mut self) -> io::Result<Infallible> {
        let [packets, links] = self.endpoint.descriptors();
        let mut readiness = Readiness::of(&packets, &links)?;
        let desk = Rc::clone(&self.desk);
        let (mut watch, mut due) = (TurnWatch::default(), Timestamp::PAST);
        loop {
            if let Some(silence) = watch.handle_turn(due, self.clock.now()) {
                desk.handle_silences(watch.count());
                tracing::warn!("no packets were moved for {silence}: the machine is too busy, or a request took long");
            }
            self.turn();
            let now = self.clock.now();
            due = self.poll_timeout().max(now);
            if due == now || !self.endpoint.lie_down() {
                // Others of this thread have a turn too.
                tokio::task::yield_now().await;
                continue;
            }
            let ready = readiness.wait((due - now).to_duration(), desk.woken()).await?;
            self.endpoint.handle_ready(ready);
        }
    }

    /// Looks at everything once.
    fn turn(&mut self) {
        self.endpoint.drive(self.clock.now());
        while let Some(event) = self.endpoint.poll_event() {
            self.desk.handle_event(event);
        }
        self.desk.handle_timeout();
        self.send_unsent();
        while let Some(output) = self.desk.poll_output() {
            self.handle_output(output);
        }
        self.endpoint.flush(self.clock.now());
    }

    fn poll_timeout(&self) -> Timestamp {
        [self.endpoint.poll_timeout(), self.desk.poll_timeout()].into_iter().flatten().min().unwrap_or(Timestamp::NEVER)
    }

    fn handle_output(&mut self, output: Output) {
        let now = self.clock.now();
        match output {
            Output::Connect { to, hello } => {
                let address = match to {
                    Destination::Scheduler(index) => self.schedulers[index].clone(),
                    Destination::ModelThread { address, .. } => address.into(),
                };
                let connection = self.endpoint.connect(now, address, hello);
                self.desk.handle_connecting(to, connection);
            }
            Output::Accept { connection, welcome } => self.accept(now, connection, welcome),
            Output::Refuse { connection, reason } => self.endpoint.refuse(now, connection, &reason),
            Output::Disconnect { connection } => self.endpoint.disconnect(connection),
            Output::Send { connection, frame } => {
                self.unsent.entry(connection).or_default().push_back(frame);
                self.send_unsent();
            }
            Output::ReadModel { name, brought } => self.read_model(name, brought),
            Output::Reply { .. } | Output::ModelChanged { .. } => unreachable!("the desk hands answers out"),
        }
    }

    /// Over a device without windows a backend is told a key of its own, which opens the arena over its link.
    fn accept(&mut self, now: Timestamp, connection: ConnectionId, welcome: LinkWelcome) {
        let Some(arena) = &self.unwindowed else { return self.endpoint.accept(now, connection, encode(&welcome)) };
        let access = Access { remote_read: true, remote_write: true };
        self.endpoint.accept_opening(now, connection, (arena, access), |RegionKey { address, rkey, .. }| {
            encode(&LinkWelcome { arena_address: address, arena_rkey: rkey, guards_rkey: rkey, ..welcome })
        });
    }

    /// Files can be slow; others of this thread must not wait for them.
    fn read_model(&self, name: String, brought: Option<Brought>) {
        let (desk, repository, store) = (Rc::clone(&self.desk), self.repository.clone(), self.store.clone());
        tokio::task::spawn_local(async move {
            let folder = name.clone();
            let read = move || {
                let source = Source::of(&repository, store.as_ref(), brought.as_ref())?;
                repository::load_named(&source, &folder, brought.as_ref().map(|brought| &brought.config[..]))
            };
            let read = tokio::task::spawn_blocking(read).await;
            let versions =
                read.map_err(|error| error.to_string()).and_then(|read| read.map_err(|error| error.to_string()));
            desk.handle_model_read(&name, versions);
        });
    }

    fn send_unsent(&mut self) {
        let Self { unsent, endpoint, .. } = self;
        unsent.retain(|&connection, frames| {
            while let Some(frame) = frames.front() {
                if endpoint.send(connection, frame) == Err(PostError::QueueFull) {
                    return true;
                }
                // A connection that is not up any more has been, or will be, reported.
                frames.pop_front();
            }
            false
        });
    }
}

/// Where slots have no keys of their own each link takes a registration, beside the arena's own.
fn check_links_max(found: usize, has_windows: bool) -> Result<(), FrontendError> {
    const MOST: usize = REGIONS_MAX - 1;
    if has_windows || found <= MOST {
        return Ok(());
    }
    let expected = format!("at most {MOST} on a verbs device");
    Err(FrontendError::Config(format!("links_max: found {found}, expected {expected}")))
}

/// Connections at once: a scheduler is one more than the links, and so is each of its ModelThreads. Of many schedulers
/// not all can have as many threads as there may be.
fn connections_max(links_max: usize, schedulers: usize) -> usize {
    let one = 1 + usize::from(ModelThreadId::COUNT_MAX);
    (links_max + schedulers * one).min(CONNECTIONS_MAX.max(links_max + one))
}

/// The arena as registered memory.
struct Registered {
    region: Region,
    windows: Option<MemoryWindows>,
}

impl Arena for Registered {
    fn write(&self, offset: usize, bytes: &[u8]) {
        self.region.write(offset, bytes);
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.region.read(offset, into);
    }
    fn open(&self, inputs: Range<usize>, answers: Range<usize>) -> u32 {
        let range = |range: Range<usize>| range.start as u64..range.end as u64;
        let window = MemoryWindow { readable: range(inputs), writable: range(answers) };
        self.windows.as_ref().map_or(SlotDescriptor::NO_KEY, |windows| windows.bind(window))
    }
    fn close(&self, key: u32) {
        if let Some(windows) = &self.windows {
            windows.unbind(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_schedulers_that_cannot_be_is_refused_in_one_line() {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let [one, other, link]: [Address; 3] = [7000, 7001, 7002].map(|port| at(port).into());
        for (schedulers, expected) in [
            (vec![], "scheduler, schedulers: found no address, expected one of these keys"),
            (
                vec![one.clone(), other, one.clone()],
                "schedulers: found 127.0.0.1:7000 twice, expected each address once",
            ),
            (
                vec![one.clone(), link],
                "schedulers: found 127.0.0.1:7002, which is this frontend's own `link`, expected schedulers only",
            ),
        ] {
            let config = Config::new(one.clone(), "sixteen bytes and more", "/nowhere");
            let config = Config { schedulers, link: Some(at(7002).into()), ..config };
            let error = Frontend::open(&config, Rc::new(())).err().expect("it is wrong").to_string();
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn without_windows_links_are_as_many_as_registrations() {
        assert!(check_links_max(1023, false).is_ok() && check_links_max(3000, true).is_ok());
        let error = check_links_max(1024, false).unwrap_err().to_string();
        assert_eq!(error, "links_max: found 1024, expected at most 1023 on a verbs device");
    }

    #[test]
    fn there_is_room_for_the_connections_to_all_schedulers() {
        assert_eq!(connections_max(255, 1), 255 + 257);
        assert_eq!(connections_max(255, 2), 255 + 2 * 257);
        assert_eq!(connections_max(255, 16), CONNECTIONS_MAX);
        assert_eq!(connections_max(4_000, 2), 4_257, "which is refused with the limit, as with one scheduler");
    }
}
