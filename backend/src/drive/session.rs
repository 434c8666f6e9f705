//! One life with one scheduler, on the network thread: takes in events, drives links and workers, posts what they ask for.

mod hosting;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use proto::{
    BackendId, FrontendId, LoadId, ModelId, Span, Timestamp,
    backend_to_frontend::{ANSWER_HEADER_BYTES, LinkHello, LinkWelcome},
    backend_to_scheduler::{BackendHello, BackendToScheduler},
    clock::ClockOffset,
    frame::{FrameWriter, read_frame},
    hello::SchedulerHello,
    scheduler_to_backend::{BackendWelcome, BatchPlan, SchedulerToBackend},
};
use transport::{
    Access, Arm, Clock, ConnectionId, Endpoint, EndpointConfig, Event, HELLO_BYTES_MAX, Region, RegionKey, Transfer,
};
use zerocopy::IntoBytes;

use super::{
    BackendError, Loaded,
    gpu::{Finished, Gpus, Job},
    loader::Loader,
};
use crate::{
    config::Config,
    links::{Broken, LinkAction, Links},
    staging::{ModelShape, Place, Staging},
    worker::{self, Action, Push, Worker},
};

/// The longest wait: `stop` is looked at this often.
const WAIT_MAX: Span = Span::from_millis(100);
/// A batch is handed to its GPU's thread this much ahead: two threads wake up one after the other, each in 50 to 100 us on
/// a small virtual machine.
const HANDOVER: Span = Span::from_micros(250);
/// Clock requests in quick succession at the start, enough to fill the estimate's memory.
const CLOCK_BURST: u32 = 8;
const CLOCK_BURST_INTERVAL: Span = Span::from_millis(5);
const CLOCK_INTERVAL: Span = Span::from_millis(1_000);

/// How a session ended.
pub(super) struct Ended {
    pub(super) reason: String,
    /// Whether the scheduler had taken us in.
    pub(super) joined: bool,
    /// What is hosted now.
    pub(super) models: Vec<Arc<Loaded>>,
}

pub(super) struct Session<'a> {
    number: u64,
    clock: Clock,
    /// What was hosted when the session began, in the order of the hello.
    models: Vec<Arc<Loaded>>,
    gpus: &'a Gpus,
    loader: &'a Loader,
    endpoint: Endpoint,
    region: Region,
    key: RegionKey,
    staging: Staging,
    scheduler: ConnectionId,
    joined: Option<Joined>,
    links: Links,
    offset: ClockOffset,
    /// The latest instant that workers were told, on the scheduler's clock: a better estimate must not turn it back.
    scheduler_now: Timestamp,
    clock_requests: u32,
    next_clock_request: Timestamp,
    reports: FrameWriter,
    /// Why the session cannot go on.
    lost: Option<String>,
}

/// What exists once the scheduler has taken us in.
struct Joined {
    backend: BackendId,
    /// One for each GPU.
    workers: Vec<Worker>,
    /// What is hosted.
    models: BTreeMap<ModelId, Arc<Loaded>>,
    /// What is loaded, and waits for the scheduler's word.
    ready: BTreeMap<LoadId, Arc<Loaded>>,
    /// Hosted models that go when their last batch is finished.
    leaving: BTreeSet<ModelId>,
}

impl<'a> Session<'a> {
    /// Opens the network and starts to connect. Staging memory has room for batches of the models and of `shapes`.
    pub(super) fn open(
        config: &Config,
        clock: Clock,
        (models, shapes): (Vec<Arc<Loaded>>, &[ModelShape]),
        (gpus, loader): (&'a Gpus, &'a Loader),
        number: u64,
    ) -> Result<Self, BackendError> {
        let mut endpoint = Endpoint::open(EndpointConfig {
            arm: Arm::choose(&config.arm, config.address, config.shared_address, config.faults, config.verbs)?,
            listen: None,
            secret: config.secret.clone().into_bytes(),
            tls: config.tls.clone(),
            connections_max: config.connections_max,
            read_budget_bytes: config.read_budget_bytes,
        })?;
        let shapes: Vec<_> = models.iter().map(|model| model.shape).chain(shapes.iter().copied()).collect();
        let staging = Staging::new(config.gpus as usize, &shapes);
        let bytes = staging.bytes();
        let region = Region::allocate(bytes).map_err(|cause| BackendError::Memory { bytes, cause })?;
        let key = endpoint.register(&region, Access::default())?;
        let scheduler = endpoint.connect(clock.now(), config.scheduler, hello(config, &models)?);
        Ok(Self {
            number,
            clock,
            models,
            gpus,
            loader,
            endpoint,
            region,
            key,
            staging,
            scheduler,
            joined: None,
            links: Links::default(),
            offset: ClockOffset::default(),
            scheduler_now: Timestamp::PAST,
            clock_requests: 0,
            next_clock_request: Timestamp::NEVER,
            reports: FrameWriter::default(),
            lost: None,
        })
    }

    /// Serves until the scheduler is lost or `stop` is set.
    pub(super) fn run(mut self, stop: &AtomicBool) -> Ended {
        while self.lost.is_none() && !stop.load(Ordering::Relaxed) {
            let mut busy = self.endpoint.drive(self.clock.now());
            while let Some(event) = self.endpoint.poll_event() {
                busy = true;
                self.handle_event(event);
            }
            while let Some(finished) = self.gpus.poll_finished() {
                busy = true;
                self.handle_finished(finished);
            }
            while let Some(done) = self.loader.poll_done() {
                busy = true;
                self.handle_loaded(done);
            }
            self.handle_timeouts();
            busy |= self.perform_actions();
            self.release_models();
            self.send_reports();
            if !busy {
                let now = self.clock.now();
                self.endpoint.wait(now, self.poll_timeout().min(now + WAIT_MAX));
            }
        }
        let reason = self.lost.take().unwrap_or_else(|| "asked to stop".into());
        Ended { joined: self.joined.is_some(), reason, models: self.into_models() }
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::Connected { connection, welcome } if connection == self.scheduler => self.handle_welcome(&welcome),
            Event::Connected { connection, welcome } => self.handle_link_up(connection, &welcome),
            Event::Message { connection, frame } if connection == self.scheduler => self.handle_frame(&frame),
            Event::Disconnected { connection, reason } if connection == self.scheduler => self.lost = Some(reason.0),
            Event::Disconnected { connection, reason } => self.handle_link_broken(connection, &reason.0),
            Event::ReadDone { token, result, .. } => {
                let now = self.scheduler_now();
                let place = Place::from_token(token);
                self.worker(place).handle_fetched(now, place, result.is_ok());
            }
            Event::WriteDone { token, result, .. } => {
                let now = self.scheduler_now();
                let place = Place::from_token(token);
                self.worker(place).handle_pushed(now, place, result.is_ok());
            }
            // Frontends say nothing on a link, nobody writes our memory, and we do not listen.
            Event::Message { connection, .. } | Event::Immediate { connection, .. } => {
                tracing::warn!(
                    ?connection,
                    "a frontend sent what no frontend sends; do both sides run the same version?"
                );
            }
            Event::KeyChanged { .. } => unreachable!("no peer may reach our memory"),
            Event::Incoming { .. } => unreachable!("the endpoint does not listen"),
        }
    }

    fn handle_welcome(&mut self, welcome: &[u8]) {
        let welcome = match wincode::deserialize::<BackendWelcome>(welcome) {
            Ok(welcome) if welcome.models.len() == self.models.len() => welcome,
            _ => {
                self.lost = Some("the scheduler's welcome does not decode; do both sides run the same version?".into());
                return;
            }
        };
        tracing::info!(backend = welcome.backend.0, "joined");
        let models: BTreeMap<ModelId, Arc<Loaded>> =
            welcome.models.into_iter().zip(self.models.iter().cloned()).collect();
        let hosted = |gpu: u32| {
            let hosted = models.iter().filter(|(_, loaded)| loaded.gpu_indexes.contains(&gpu));
            hosted.map(|(&id, loaded)| (id, loaded.shape)).collect()
        };
        let workers = (0..self.staging.gpus()).map(|gpu| Worker::new(gpu, hosted(gpu as u32), HANDOVER)).collect();
        let (ready, leaving) = (BTreeMap::new(), BTreeSet::new());
        self.joined = Some(Joined { backend: welcome.backend, workers, models, ready, leaving });
        self.next_clock_request = self.clock.now();
    }

    fn handle_frame(&mut self, frame: &[u8]) {
        for message in read_frame::<SchedulerToBackend>(frame) {
            match message {
                Ok(message) => self.handle_message(message),
                Err(error) => self.lost = Some(error.to_string()),
            }
        }
    }

    fn handle_message(&mut self, message: SchedulerToBackend) {
        match message {
            SchedulerToBackend::FrontendLeft { frontend } => {
                self.links.handle_left(frontend);
                self.cut_off(frontend);
            }
            SchedulerToBackend::Clock(reply) => {
                let now = self.clock.now();
                self.offset.handle_reply(now, reply);
                self.links.handle_clock(now, reply.sent_at);
            }
            SchedulerToBackend::FrontendJoined { frontend, link_address } => match link_address.parse() {
                Ok(address) => {
                    self.cut_off(frontend);
                    self.links.handle_joined(self.clock.now(), frontend, address);
                }
                Err(_) => {
                    let frontend = frontend.0;
                    tracing::warn!(frontend, link_address, "the frontend's address is not ip:port; it is not served");
                }
            },
            SchedulerToBackend::Load { load, name } => self.handle_load(load, name),
            SchedulerToBackend::Host { load, model } => self.handle_host(load, model),
            SchedulerToBackend::Discard { load } => self.handle_discard(load),
            SchedulerToBackend::Unload { model } => self.handle_unload(model),
            SchedulerToBackend::Cancel { plan, task } => {
                let now = self.scheduler_now();
                self.joined().workers.iter_mut().for_each(|worker| worker.handle_cancel(now, plan, task));
            }
            SchedulerToBackend::Plan(plan) => self.handle_plan(plan),
        }
    }

    fn handle_plan(&mut self, plan: BatchPlan) {
        let now = self.scheduler_now();
        let id = plan.plan.0;
        let Some(worker) = self.joined().workers.get_mut(plan.gpu_index as usize) else {
            tracing::warn!(plan = id, gpu = plan.gpu_index, "a plan names a GPU that was not offered");
            worker::refuse(now, &plan).iter().for_each(|report| self.report(report));
            return;
        };
        if let Err(error) = worker.handle_plan(now, plan) {
            tracing::warn!(plan = id, %error, "refused a plan");
        }
    }

    fn handle_link_up(&mut self, connection: ConnectionId, welcome: &[u8]) {
        let Ok(welcome) = wincode::deserialize::<LinkWelcome>(welcome) else {
            tracing::warn!(?connection, "a frontend's welcome does not decode; do both sides run the same version?");
            self.endpoint.disconnect(connection);
            return;
        };
        let Some((frontend, link)) = self.links.handle_up(connection, welcome) else {
            self.endpoint.disconnect(connection);
            return;
        };
        tracing::info!(frontend = frontend.0, "linked");
        self.joined().workers.iter_mut().for_each(|worker| worker.handle_linked(frontend, link));
        self.report(&BackendToScheduler::Linked { frontend });
    }

    fn handle_link_broken(&mut self, connection: ConnectionId, reason: &str) {
        match self.links.handle_broken(self.clock.now(), connection) {
            Some(Broken::Link(frontend)) => {
                tracing::warn!(frontend = frontend.0, reason, "the link to a frontend broke");
                self.cut_off(frontend);
                self.report(&BackendToScheduler::Unlinked { frontend });
            }
            Some(Broken::Attempt(frontend)) => {
                tracing::warn!(frontend = frontend.0, reason, "a frontend cannot be reached; trying again");
            }
            None => {}
        }
    }

    fn cut_off(&mut self, frontend: FrontendId) {
        let now = self.scheduler_now();
        self.joined().workers.iter_mut().for_each(|worker| worker.handle_unlinked(now, frontend));
    }

    fn handle_finished(&mut self, finished: Finished) {
        // A batch of an earlier session: its scheduler and its staging memory are gone.
        if finished.session != self.number {
            return;
        }
        let now = self.scheduler_now();
        self.joined().workers[finished.gpu].handle_executed(now, finished.execution);
    }

    fn handle_timeouts(&mut self) {
        let (now, scheduler_now) = (self.clock.now(), self.scheduler_now());
        self.links.handle_timeout(now);
        if let Some(joined) = &mut self.joined {
            let due = joined.workers.iter_mut().filter(|worker| worker.poll_timeout() <= scheduler_now);
            due.for_each(|worker| worker.handle_timeout(scheduler_now));
        }
        if self.next_clock_request <= now {
            self.clock_requests += 1;
            let burst = self.clock_requests < CLOCK_BURST;
            self.next_clock_request = now + if burst { CLOCK_BURST_INTERVAL } else { CLOCK_INTERVAL };
            self.ask_clock();
        }
    }

    /// When [`Self::handle_timeouts`] must run again, on our clock.
    fn poll_timeout(&self) -> Timestamp {
        let workers = self.joined.iter().flat_map(|joined| &joined.workers);
        let workers = workers.map(|worker| worker.poll_timeout()).min().unwrap_or(Timestamp::NEVER);
        let workers = self.offset.to_local(workers).unwrap_or(workers);
        [workers, self.links.poll_timeout(), self.next_clock_request].into_iter().min().expect("there are three")
    }

    /// True if anything was done.
    fn perform_actions(&mut self) -> bool {
        let mut any = false;
        for gpu in 0..self.joined.as_ref().map_or(0, |joined| joined.workers.len()) {
            while let Some(action) = self.joined().workers[gpu].poll_action() {
                any = true;
                self.perform(gpu, action);
            }
        }
        while let Some(action) = self.links.poll_action() {
            any = true;
            self.perform_link(action);
        }
        any
    }

    fn perform(&mut self, gpu: usize, action: Action) {
        let now = self.scheduler_now();
        match action {
            Action::Fetch { place, model, frontend, input_offset } => {
                if !self.fetch(place, model, frontend, input_offset) {
                    self.worker(place).handle_fetched(now, place, false);
                }
            }
            Action::Push(push) => {
                if !self.push(&push) {
                    self.worker(push.place).handle_pushed(now, push.place, false);
                }
            }
            Action::Execute { buffer, model, tasks, exec_at, latest } => {
                self.execute(gpu, buffer, model, &tasks, (exec_at, latest));
            }
            Action::Report(report) => self.report(&report),
        }
    }

    /// Posts a READ; false if it cannot be done.
    fn fetch(&mut self, place: Place, model: ModelId, frontend: FrontendId, input_offset: u64) -> bool {
        let shape = self.model(model).shape;
        let Some((connection, remote_address, rkey)) = self.links.remote(frontend, input_offset, shape.input_bytes)
        else {
            tracing::warn!(
                frontend = frontend.0,
                input_offset,
                "no link to the frontend, or an input outside its arena"
            );
            return false;
        };
        let transfer = Transfer {
            token: place.token(),
            lkey: self.key.lkey,
            local_offset: self.staging.input_offset(place, shape),
            remote_address,
            rkey,
            bytes: shape.input_bytes,
        };
        let posted = self.endpoint.read(connection, transfer);
        posted.inspect_err(|error| tracing::warn!(frontend = frontend.0, %error, "cannot read an input")).is_ok()
    }

    /// Posts a WRITE_WITH_IMM; false if it cannot be done.
    fn push(&mut self, push: &Push) -> bool {
        let Push { place, model, frontend, answer_offset, immediate, header, text } = push;
        let (place, frontend) = (*place, *frontend);
        let bytes = ANSWER_HEADER_BYTES + header.payload_bytes as usize;
        let Some((connection, remote_address, rkey)) = self.links.remote(frontend, *answer_offset, bytes) else {
            tracing::warn!(
                frontend = frontend.0,
                answer_offset,
                "no link to the frontend, or an answer outside its arena"
            );
            return false;
        };
        let local_offset = self.staging.answer_offset(place, self.model(*model).shape);
        self.region.write(local_offset, header.as_bytes());
        if let Some(text) = text {
            self.region.write(local_offset + ANSWER_HEADER_BYTES, text.as_bytes());
        }
        let lkey = self.key.lkey;
        let transfer = Transfer { token: place.token(), lkey, local_offset, remote_address, rkey, bytes };
        let posted = self.endpoint.write_with_immediate(connection, transfer, *immediate);
        posted.inspect_err(|error| tracing::warn!(frontend = frontend.0, %error, "cannot write an answer")).is_ok()
    }

    fn execute(
        &mut self,
        gpu: usize,
        buffer: usize,
        model: ModelId,
        tasks: &[usize],
        (exec_at, latest): (Timestamp, Timestamp),
    ) {
        let Loaded { shape, executor, .. } = &**self.model(model);
        let places = tasks.iter().map(|&task| Place { gpu, buffer, task });
        let answers = places.clone().map(|place| self.staging.answer_offset(place, *shape));
        let job = Job {
            session: self.number,
            executor: executor.clone(),
            shape: *shape,
            region: self.region.clone(),
            inputs: places.map(|place| self.staging.input_offset(place, *shape)).collect(),
            outputs: answers.map(|offset| offset + ANSWER_HEADER_BYTES).collect(),
            exec_at,
            latest,
            offset: self.offset.clone(),
            waker: self.endpoint.waker(),
        };
        self.gpus.post(gpu, job);
    }

    fn perform_link(&mut self, action: LinkAction) {
        match action {
            LinkAction::AskClock => self.ask_clock(),
            LinkAction::Open { frontend, address, link } => {
                let hello = LinkHello { backend: self.joined().backend, frontend, link };
                let hello = wincode::serialize(&hello).expect("encoding into memory cannot fail");
                let connection = self.endpoint.connect(self.clock.now(), address, hello);
                self.links.handle_opened(frontend, connection);
            }
            LinkAction::Close { connection } => self.endpoint.disconnect(connection),
        }
    }

    /// Asks at once: time spent in a queue would count as a round trip.
    fn ask_clock(&mut self) {
        self.report(&BackendToScheduler::ClockRequest { sent_at: self.clock.now() });
        self.send_reports();
    }

    fn report(&mut self, message: &BackendToScheduler) {
        match self.reports.push(message) {
            Ok(full) => full.into_iter().for_each(|frame| self.send(&frame)),
            Err(error) => self.lost = Some(error.to_string()),
        }
    }

    /// One frame a turn, however many messages.
    fn send_reports(&mut self) {
        if let Some(frame) = self.reports.take() {
            self.send(&frame);
        }
    }

    fn send(&mut self, frame: &[u8]) {
        if let Err(error) = self.endpoint.send(self.scheduler, frame) {
            // A report that is lost would leave tasks without an end; a session that is lost ends them all.
            self.lost = Some(format!("a report cannot be sent to the scheduler: {error}"));
        }
    }

    /// Now, on the scheduler's clock; never earlier than before. Until the scheduler has answered, our own: no plan can
    /// be for a frontend that is linked then.
    fn scheduler_now(&mut self) -> Timestamp {
        let local = self.clock.now();
        if let Some(now) = self.offset.to_scheduler(local) {
            self.scheduler_now = self.scheduler_now.max(now);
            return self.scheduler_now;
        }
        local
    }

    fn joined(&mut self) -> &mut Joined {
        self.joined.as_mut().expect("the scheduler's welcome precedes all else that it says, and every link")
    }

    fn worker(&mut self, place: Place) -> &mut Worker {
        &mut self.joined().workers[place.gpu]
    }

    /// A model that a batch names: it stays until its last batch is finished.
    fn model(&self, model: ModelId) -> &Arc<Loaded> {
        &self.joined.as_ref().expect("workers exist once the scheduler's welcome is in").models[&model]
    }
}

fn hello(config: &Config, models: &[Arc<Loaded>]) -> Result<Vec<u8>, BackendError> {
    let offers = models.iter().map(|loaded| hosting::offer(loaded)).collect();
    let hello = SchedulerHello::Backend(BackendHello { gpus: config.gpus, models: offers });
    let hello = wincode::serialize(&hello).expect("encoding into memory cannot fail");
    if hello.len() > HELLO_BYTES_MAX {
        return Err(BackendError::Config(format!(
            "placement: {} models with their latency profiles make a hello of {} bytes, expected at most \
             {HELLO_BYTES_MAX}; load fewer models here",
            models.len(),
            hello.len()
        )));
    }
    Ok(hello)
}
