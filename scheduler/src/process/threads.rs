//! Control, the RankThread and each ModelThread on a thread of its own.
//!
//! Candidates and grants go through the mailboxes, everything else through channels. Nobody waits for room in one: what
//! does not fit is kept by its sender until it does, so that two threads never wait for each other. A thread's news
//! come in order; see `control` for the order in which threads are told.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use admin::Heart;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use proto::{
    ModelThreadId, Span, Timestamp,
    hello::{Member, MemberHello, SchedulerHello},
    turns::TurnWatch,
};
use spsc::Doorbell;
use transport::{Clock, ConnectionId, Event};

use super::{
    LOOK_INTERVAL, Openness, Place,
    connections::{Connections, Said, encode},
    era_clock::EraClock,
    leaving::Exit,
    peers::Peers,
    turns::{self, Bed, Idleness},
};
use crate::{
    cluster::{ClusterConfig, LOAD_INTERVAL},
    config::{Config, RunError},
    control::{Control, ControlOutput},
    mailbox,
    news::{ControlToRank, ControlToShard, ShardToControl},
    rank_loop::RankLoop,
    shard::{Shard, ShardOutput},
};

/// Messages in a channel between two threads; more wait with their sender.
const CHANNEL_MESSAGES: usize = 1024;

/// A channel's sending side, with the other thread's doorbell.
struct Outbox<T> {
    channel: Sender<T>,
    bell: Arc<Doorbell>,
    waiting: VecDeque<T>,
}

impl<T> Outbox<T> {
    fn new(bell: Arc<Doorbell>) -> (Self, Receiver<T>) {
        let (channel, receiver) = bounded(CHANNEL_MESSAGES);
        (Self { channel, bell, waiting: VecDeque::new() }, receiver)
    }

    fn another(&self) -> Self {
        Self { channel: self.channel.clone(), bell: Arc::clone(&self.bell), waiting: VecDeque::new() }
    }

    fn post(&mut self, message: T) {
        self.waiting.push_back(message);
    }

    /// Whether something is to be sent yet.
    fn is_due(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Sends what there is room for.
    fn flush(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        while let Some(message) = self.waiting.pop_front() {
            match self.channel.try_send(message) {
                Ok(()) => {}
                Err(TrySendError::Full(message)) => {
                    self.waiting.push_front(message);
                    break;
                }
                // The other thread has ended, and control is about to notice.
                Err(TrySendError::Disconnected(_)) => self.waiting.clear(),
            }
        }
        self.bell.ring();
    }
}

pub(super) fn run(
    (config, place): (&Config, &mut Place),
    mut cluster: ClusterConfig,
    clock: Clock,
    stop: &AtomicBool,
) -> Result<(), RunError> {
    check_cores(config, cluster.model_threads)?;
    let mut control_port = Connections::new(place.open(place.listen, true)?);
    let era = place.era.clone();
    let peers = Peers::open((config, &place.name), clock, era.clone(), &mut control_port.endpoint)?;
    let ids = || (0..cluster.model_threads).map(ModelThreadId);
    let ports = ids().map(|_| place.open(SocketAddr::new(place.listen.ip(), 0), true).map(Connections::new));
    let ports = ports.collect::<Result<Vec<_>, _>>()?;
    let addresses = ports.iter().map(|port| port.endpoint.listen_address().expect("it listens").to_string());
    cluster.addresses = addresses.collect();

    let (bed, rank_bell) = Bed::new();
    let rank_bell = Arc::new(rank_bell);
    let bell_of = |port: &Connections| {
        let waker = port.endpoint.waker();
        Arc::new(Doorbell::new(move || waker.wake()))
    };
    let control_bell = bell_of(&control_port);
    let (to_control, from_shards) = Outbox::new(Arc::clone(&control_bell));
    let (to_rank, rank_news) = Outbox::new(Arc::clone(&rank_bell));
    let shard_bells: Vec<_> = ports.iter().map(bell_of).collect();
    let (to_shards, shard_news): (Vec<_>, Vec<_>) = shard_bells.iter().cloned().map(Outbox::new).unzip();
    let links = ids().map(|_| mailbox::link(crate::MODELS_MAX));
    let (model_ends, rank_ends): (Vec<_>, Vec<_>) = links.unzip();

    let mut running = Vec::new();
    let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
        thread::Builder::new().name(name.clone()).spawn(body).map(|handle| (name, handle)).map_err(RunError::Thread)
    };
    let core = |index: usize| config.cores.get(index).copied();
    let rank = RankLoop::new(cluster.budget, rank_ends);
    let mut rank = RankDriver::new(rank, rank_news, (bed, rank_bell), shard_bells.clone());
    let rank_core = core(0);
    let (rank_clock, rank_heart) = (era.clone(), place.vitals.heart("rank"));
    let body = move || {
        let has_core = turns::pin(rank_core);
        loop {
            let now = rank_clock.now();
            rank_heart.beat(rank_clock.to_process(now));
            let is_busy = rank.turn(now);
            rank.rest(now, is_busy, has_core);
        }
    };
    running.push(spawn("rank".to_owned(), Box::new(body))?);
    for (((id, port), end), news) in ids().zip(ports).zip(model_ends).zip(shard_news) {
        let planner = cluster.policy.sharded_planner(cluster.budget, end)?;
        let mut shard = Shard::new(cluster.shard(id), planner);
        if let Some(history) = &place.history {
            shard.record(history.recorder(id));
        }
        let mut driver = ShardDriver {
            id,
            shard,
            port,
            news,
            to_control: to_control.another(),
            bell: Arc::clone(&shard_bells[usize::from(id.0)]),
            rank_bell: Arc::clone(&to_rank.bell),
            report_at: Timestamp::PAST,
            clock,
            era: era.clone(),
            heart: place.vitals.heart(&format!("model-{}", id.0)),
        };
        let core = core(1 + usize::from(id.0));
        running.push(spawn(format!("model-{}", id.0), Box::new(move || driver.run(core)))?);
    }
    tracing::info!(
        listen = %config.listen, policy = %config.policy, model_threads = cluster.model_threads, "the scheduler is up"
    );
    let control = Control::new(cluster.control(), rand::random());
    let (port, bell, for_members) = (control_port, control_bell, Vec::new());
    let mut driver =
        ControlDriver { control, port, peers, from_shards, to_shards, to_rank, for_members, bell, clock, era };
    let (heart, mut openness) = (place.vitals.heart("control"), Openness::new(&place.vitals));
    let (mut exit, mut publisher) = (Exit::new(stop, config.drain_timeout_ms), place.board.publisher());
    loop {
        driver.turn();
        driver.peers.ended()?;
        let now = clock.now();
        publisher.turn(now, |from| driver.control.snapshot(|member| driver.port.whereabouts(member), from));
        heart.beat(now);
        openness.tell(driver.control.is_open());
        if exit.begins(now) {
            place.vitals.set_ending();
            driver.control.handle_leaving();
        }
        if exit.is_over(now, || driver.control.is_idle()) {
            return Ok(());
        }
        if let Some((name, _)) = running.iter().find(|(_, handle)| handle.is_finished()) {
            return Err(RunError::Ended(name.clone()));
        }
    }
}

pub(super) fn check_cores(config: &Config, model_threads: u16) -> Result<(), RunError> {
    let threads = usize::from(model_threads) + 1;
    if config.cores.len() > threads {
        let expected = format!("at most {threads}: the RankThread's, then the ModelThreads'");
        return Err(RunError::Cores(format!("found {} of them, expected {expected}", config.cores.len())));
    }
    let there = turns::cores();
    match config.cores.iter().find(|core| !there.contains(core)) {
        Some(core) => Err(RunError::Cores(format!("found {core}, expected some of {there:?}"))),
        None => Ok(()),
    }
}

/// The RankThread's thread: production's, and that of whoever measures it.
pub struct RankDriver {
    rank: RankLoop,
    news: Receiver<ControlToRank>,
    bed: Bed,
    bell: Arc<Doorbell>,
    model_bells: Vec<Arc<Doorbell>>,
    idleness: Idleness,
}

impl RankDriver {
    /// With the mailboxes and the doorbells of all ModelThreads. What comes over `news` is announced with `bell`.
    #[must_use]
    pub fn new(
        rank: RankLoop,
        news: Receiver<ControlToRank>,
        (bed, bell): (Bed, Arc<Doorbell>),
        model_bells: Vec<Arc<Doorbell>>,
    ) -> Self {
        Self { rank, news, bed, bell, model_bells, idleness: Idleness::default() }
    }

    /// Looks at everything once. True if there was anything to do.
    pub fn turn(&mut self, now: Timestamp) -> bool {
        let mut is_busy = false;
        while let Ok(news) = self.news.try_recv() {
            is_busy = true;
            self.rank.handle_news(now, news);
        }
        is_busy |= self.rank.turn(now);
        for thread in self.rank.take_told() {
            self.model_bells[usize::from(thread.0)].ring();
        }
        is_busy
    }

    /// Between two turns: sleeps if there is nothing to do, and the thread does not rather look again.
    pub fn rest(&mut self, now: Timestamp, is_busy: bool, has_core: bool) {
        if self.idleness.looks_again(is_busy, has_core) {
            return;
        }
        let until = self.rank.poll_timeout().unwrap_or(Timestamp::NEVER);
        let (rank, news, bed) = (&self.rank, &self.news, &self.bed);
        self.bell.nap(|| rank.has_mail() || !news.is_empty(), || bed.sleep(now, until, LOOK_INTERVAL));
    }
}

/// A ModelThread's thread.
struct ShardDriver {
    id: ModelThreadId,
    shard: Shard,
    port: Connections,
    news: Receiver<ControlToShard>,
    to_control: Outbox<ShardToControl>,
    bell: Arc<Doorbell>,
    rank_bell: Arc<Doorbell>,
    report_at: Timestamp,
    /// The process's, which the endpoint keeps time by.
    clock: Clock,
    /// What the state machine is told.
    era: EraClock,
    heart: Heart,
}

impl ShardDriver {
    fn run(&mut self, core: Option<usize>) {
        let has_core = turns::pin(core);
        let (mut idleness, mut watch, mut due) = (Idleness::default(), TurnWatch::default(), Timestamp::PAST);
        loop {
            let now = self.clock.now();
            super::tell_silence(&mut watch, due, now);
            self.heart.beat(now);
            let is_busy = self.turn();
            due = self.clock.now();
            if has_core && idleness.looks_again(is_busy, true) {
                continue;
            }
            let now = self.clock.now();
            let own = [self.shard.poll_timeout(), Some(self.report_at)].into_iter().flatten().min();
            let timeouts = [own.map(|at| self.era.to_process(at)), self.port.endpoint.poll_timeout()];
            let until = timeouts.into_iter().flatten().min().unwrap_or(Timestamp::NEVER).min(now + LOOK_INTERVAL);
            due = until.max(now);
            let (shard, news, endpoint) = (&self.shard, &self.news, &mut self.port.endpoint);
            let is_due = self.to_control.is_due();
            self.bell.nap(|| shard.has_mail() || !news.is_empty() || is_due, || endpoint.wait(now, until));
        }
    }

    /// True if there was anything to do.
    fn turn(&mut self) -> bool {
        let mut is_busy = self.port.endpoint.drive(self.clock.now());
        // Before the news: what a member says never comes before what the scheduler's threads must know for it.
        let events: Vec<Event> = std::iter::from_fn(|| self.port.endpoint.poll_event()).collect();
        let now = self.era.now();
        while let Ok(news) = self.news.try_recv() {
            is_busy = true;
            match &news {
                ControlToShard::FrontendLeft(frontend) => self.port.close(Member::Frontend(*frontend), "it left"),
                ControlToShard::BackendLeft(backend) => self.port.close(Member::Backend(*backend), "it left"),
                _ => {}
            }
            self.shard.handle_news(now, news);
        }
        is_busy |= !events.is_empty();
        for event in events {
            self.on_event(now, event);
        }
        is_busy |= self.shard.has_mail() || self.shard.poll_timeout().is_some_and(|at| at <= now);
        self.shard.handle_timeout(now);
        if self.report_at <= now {
            self.report_at = now + LOAD_INTERVAL;
            self.to_control.post(ShardToControl::Load(self.id, Box::new(self.shard.take_load(now))));
        }
        while let Some(output) = self.shard.poll_output() {
            is_busy = true;
            match output {
                ShardOutput::ToFrontend(frontend, message) => self.port.post(Member::Frontend(frontend), &message),
                ShardOutput::ToBackend(backend, message) => self.port.post(Member::Backend(backend), &message),
                ShardOutput::ToControl(news) => self.to_control.post(news),
            }
        }
        self.port.flush();
        self.to_control.flush();
        if is_busy {
            self.rank_bell.ring();
            self.port.endpoint.flush(self.clock.now());
        }
        is_busy
    }

    fn on_event(&mut self, now: Timestamp, event: Event) {
        match event {
            Event::Incoming { connection, peer, hello } => {
                if let Err(reason) = self.welcome((connection, peer), &hello) {
                    tracing::warn!(%peer, reason, "refused a member");
                    self.port.endpoint.refuse(self.clock.now(), connection, &reason);
                }
            }
            Event::Message { connection, frame } => {
                let shard = &mut self.shard;
                self.port.read(connection, &frame, |said| match said {
                    Said::Frontend(frontend, message) => shard.handle_frontend_message(now, frontend, message),
                    Said::Backend(backend, message) => shard.handle_backend_message(now, backend, message),
                });
            }
            Event::Disconnected { connection, reason } => {
                if let Some(member) = self.port.handle_disconnected(connection) {
                    self.shard.handle_disconnected(member, reason.text);
                }
            }
            // It opens no connection and registers no memory, so the rest does not happen to it.
            Event::Connected { .. }
            | Event::ReadDone { .. }
            | Event::WriteDone { .. }
            | Event::Immediate { .. }
            | Event::KeyChanged { .. } => {}
        }
    }

    fn welcome(&mut self, (connection, peer): (ConnectionId, SocketAddr), hello: &[u8]) -> Result<(), String> {
        let SchedulerHello::Member(MemberHello { member, pass }) = super::read_hello(hello)? else {
            return Err("this is a ModelThread's address; join at the scheduler's own".to_owned());
        };
        if !self.shard.is_welcome(member, pass) {
            return Err(format!("{member:?} has not joined, or this is not the pass that it was given"));
        }
        if self.port.accept(self.clock.now(), (connection, peer), member, Vec::new()) {
            self.shard.handle_connected(member);
        }
        Ok(())
    }
}

/// Control's thread, which is the process's own.
struct ControlDriver {
    control: Control,
    port: Connections,
    peers: Peers,
    from_shards: Receiver<ShardToControl>,
    to_shards: Vec<Outbox<ControlToShard>>,
    to_rank: Outbox<ControlToRank>,
    /// What members are to be told in this turn.
    for_members: Vec<ControlOutput>,
    bell: Arc<Doorbell>,
    /// The process's, which the endpoint keeps time by.
    clock: Clock,
    /// What the state machine is told.
    era: EraClock,
}

impl ControlDriver {
    fn turn(&mut self) {
        self.port.endpoint.drive(self.clock.now());
        let now = self.era.now();
        while let Ok(news) = self.from_shards.try_recv() {
            self.control.handle_news(now, news);
        }
        while let Some(event) = self.port.endpoint.poll_event() {
            self.on_event(now, event);
        }
        self.control.handle_timeout(self.era.now());
        self.send_outputs();
        self.peers.beat();
        let now = self.clock.now();
        let control = self.control.poll_timeout().map(|at| self.era.to_process(at));
        let beats = self.peers.beats_in().map(|wait| now + Span(wait.as_nanos() as i64));
        let timeouts = [control, beats, self.port.endpoint.poll_timeout()];
        let until = timeouts.into_iter().flatten().min().unwrap_or(Timestamp::NEVER).min(now + LOOK_INTERVAL);
        let (from_shards, endpoint) = (&self.from_shards, &mut self.port.endpoint);
        let is_due = self.to_rank.is_due() || self.to_shards.iter().any(Outbox::is_due);
        self.bell.nap(|| !from_shards.is_empty() || is_due, || endpoint.wait(now, until));
    }

    /// ModelThreads first, then the RankThread, then members, until nothing comes of it any more.
    fn send_outputs(&mut self) {
        self.tell_threads();
        while !self.for_members.is_empty() {
            for output in std::mem::take(&mut self.for_members) {
                match output {
                    ControlOutput::ToFrontend(frontend, message) => {
                        self.port.post(Member::Frontend(frontend), &message);
                    }
                    ControlOutput::ToBackend(backend, message) => self.port.post(Member::Backend(backend), &message),
                    ControlOutput::Close(member, reason) => self.port.close(member, &reason),
                    ControlOutput::Peer(output) => {
                        self.peers.perform(&mut self.control, &mut self.port.endpoint, output);
                    }
                    ControlOutput::ToShard(..) | ControlOutput::ToRank(_) => {}
                }
            }
            self.tell_threads();
        }
        self.port.flush();
        self.peers.flush(&mut self.port.endpoint);
    }

    /// Tells the other threads, and keeps what is for members.
    fn tell_threads(&mut self) {
        while let Some(output) = self.control.poll_output() {
            match output {
                ControlOutput::ToShard(thread, news) => self.to_shards[usize::from(thread.0)].post(news),
                ControlOutput::ToRank(news) => self.to_rank.post(news),
                for_member => self.for_members.push(for_member),
            }
        }
        for to_shard in &mut self.to_shards {
            to_shard.flush();
        }
        self.to_rank.flush();
    }

    fn on_event(&mut self, now: Timestamp, event: Event) {
        if self.peers.handle_event(&mut self.control, &mut self.port.endpoint, &event) {
            return;
        }
        match event {
            Event::Incoming { connection, peer, hello } => {
                if let Err(reason) = self.welcome(now, (connection, peer), &hello) {
                    tracing::warn!(%peer, reason, "refused a peer");
                    self.port.endpoint.refuse(self.clock.now(), connection, &reason);
                }
            }
            Event::Message { connection, frame } => {
                let control = &mut self.control;
                self.port.read(connection, &frame, |said| match said {
                    Said::Frontend(frontend, message) => control.handle_frontend_message(now, frontend, message),
                    Said::Backend(backend, message) => control.handle_backend_message(now, backend, message),
                });
            }
            Event::Disconnected { connection, reason } => {
                if let Some(member) = self.port.handle_disconnected(connection) {
                    let name = self.control.name_of(member);
                    tracing::warn!(?member, name, reason = reason.text, "a member left");
                    self.control.handle_left(now, member);
                }
            }
            // It opens no connection and registers no memory but for other schedulers.
            Event::Connected { .. }
            | Event::ReadDone { .. }
            | Event::WriteDone { .. }
            | Event::Immediate { .. }
            | Event::KeyChanged { .. } => {}
        }
    }

    fn welcome(
        &mut self,
        now: Timestamp,
        (connection, peer): (ConnectionId, SocketAddr),
        hello: &[u8],
    ) -> Result<(), String> {
        let (member, welcome) = match super::read_hello(hello)? {
            SchedulerHello::Frontend(hello) => {
                let link_address = hello.link_address.clone();
                let welcome = self.control.handle_frontend_joined(now, hello).map_err(|error| error.to_string())?;
                let member = Member::Frontend(welcome.frontend);
                let name = self.control.name_of(member);
                tracing::info!(frontend = welcome.frontend.0, name, link_address, "a frontend joined");
                (member, encode(&welcome))
            }
            SchedulerHello::Backend(hello) => {
                let (gpus, models) = (hello.gpus, hello.models.len());
                let welcome = self.control.handle_backend_joined(now, hello).map_err(|error| error.to_string())?;
                let member = Member::Backend(welcome.backend);
                let name = self.control.name_of(member);
                tracing::info!(backend = welcome.backend.0, name, gpus, models, "a backend joined");
                (member, encode(&welcome))
            }
            SchedulerHello::Member(_) => {
                return Err("this is the scheduler's own address; the welcome named the ModelThreads'".to_owned());
            }
            other => return self.peers.welcome(&mut self.control, &mut self.port.endpoint, (connection, other)),
        };
        // The ModelThreads hear of it before the member hears where they are.
        self.tell_threads();
        self.port.accept(self.clock.now(), (connection, peer), member, welcome);
        Ok(())
    }
}
