//! The server over real sockets and raw bytes, above a real core; the tests play its scheduler and backend.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::Future,
    net::SocketAddr,
    time::SystemTime,
};

use frontend::{
    arena::{Arena as _, PlainArena},
    core::{Core, CoreConfig, Output},
    desk::{Desk, Observer},
};
use proto::{
    BackendId, Brought, ChangeId, Claim, Epoch, Era, FrontendId, LinkId, LinkPass, ModelId, ModelThreadId,
    SlotDescriptor, Span, TaskId, Timestamp,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, AnswerStatus, LinkHello, LinkWelcome},
    clock::ClockReply,
    frame::{Addressed, read_frame},
    frontend_to_scheduler::{FrontendToControl, FrontendToModelThread, FrontendToScheduler, ModelChange},
    hello::{ModelThreads, SchedulerHello},
    predictions::{ActionErrors, ErrorHistogram, ErrorSides, PredictionErrors},
    scheduler_to_frontend::{
        DropReason, FrontendWelcome, ModelState, NetworkTimes, SchedulerLoad, SchedulerToFrontend,
    },
    slot::{GUARD_BYTES, ImmediateData, guard_word},
    stages::AnswerStamps,
};
use repository::{DataType, Refused, cell};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use transport::{ConnectionId, DisconnectReason, Event};
use zerocopy::IntoBytes as _;

use super::*;
use crate::{
    access::{Clients, SharedMemory},
    config::Otlp,
    export,
    record::Record,
    selections::Selections,
    server::{Gate, Hosts},
    service::Service,
    testing::{model, tensor},
    trace::Tracing,
};

const ARENA: usize = 1 << 14;
const FRONTEND: FrontendId = FrontendId(1);
const SCHEDULER: ConnectionId = ConnectionId(1);
const BACKEND: ConnectionId = ConnectionId(2);
const STANDBY: ConnectionId = ConnectionId(3);

/// What the tests' scheduler and backend do with the next task; when nothing is said, they answer.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Drop(DropReason),
    Answer(AnswerStatus, &'static str),
    Keep,
}

/// The other side of the core: a scheduler, one more where it is to have two, and one backend that doubles every byte,
/// or gives inputs back whose size differs between requests.
struct Peer {
    /// To the scheduler that is the primary.
    primary: Cell<ConnectionId>,
    desk: Rc<Desk>,
    server: Rc<Server>,
    arena: Rc<PlainArena>,
    fates: RefCell<VecDeque<Fate>>,
    kept: RefCell<Vec<TaskId>>,
    /// Loads of models so far.
    loads: Cell<u32>,
    cancelled: Cell<usize>,
    /// Changes of models that wait for their answer, while they are to.
    changes: RefCell<Option<Vec<ChangeId>>>,
    clock: Rc<Cell<Timestamp>>,
    /// Where the guards are.
    guards_offset: Cell<u64>,
    /// Tasks whose inputs are awaited.
    guarded: RefCell<Vec<(TaskId, SlotDescriptor)>>,
    /// Tasks so far, and of them those that were guarded.
    submitted: Cell<(usize, usize)>,
}

impl Peer {
    async fn run(self: Rc<Self>) {
        self.desk.handle_timeout();
        loop {
            self.handle_outputs();
            self.answer_guarded();
            self.desk.woken().await;
        }
    }

    fn handle_output(&self, output: Output) {
        match output {
            Output::Connect { to, .. } if to.scheduler() == 1 => {
                self.desk.handle_connecting(to, STANDBY);
                self.welcome(STANDBY, Epoch::NONE);
            }
            Output::Connect { to, hello } => {
                self.desk.handle_connecting(to, SCHEDULER);
                let epoch = Epoch { number: 1, scheduler: 0 };
                self.welcome(SCHEDULER, epoch);
                let SchedulerHello::Frontend(hello) = wincode::deserialize(&hello).unwrap() else {
                    panic!("a frontend says that it is one")
                };
                let (backend, link) = (BackendId(6), LinkId(1));
                let pass = LinkPass::of(hello.standing.token, backend);
                let link = LinkHello { backend, frontend: FRONTEND, link, epoch, pass };
                let hello = wincode::serialize(&link).unwrap();
                let peer = "127.0.0.1:1".parse().unwrap();
                self.desk.handle_event(Event::Incoming { connection: BACKEND, peer, hello });
                self.tell_gpus(1);
            }
            Output::Send { connection, frame } => {
                read_frame(&frame).for_each(|message| self.handle_message(connection, message.unwrap()));
            }
            Output::Accept { welcome, .. } => {
                self.guards_offset.set(welcome.guards_offset);
            }
            Output::Disconnect { connection } => self.disconnect(connection),
            Output::ReadModel { name, brought: _ } => {
                let read = self.desk.with_model(&name, None, |_, served, _| (*served.model).clone());
                self.desk.handle_model_read(&name, Ok(vec![read.unwrap()]));
            }
            other => panic!("found {other:?}, expected nothing of that kind"),
        }
    }

    fn welcome(&self, connection: ConnectionId, epoch: Epoch) {
        let (model_threads, claim) = (ModelThreads::default(), Claim { era: Era(1), epoch });
        let welcome = wincode::serialize(&FrontendWelcome { frontend: FRONTEND, model_threads, claim }).unwrap();
        self.desk.handle_event(Event::Connected { connection, welcome });
    }

    /// The standby says that it is the primary now; tasks that it is told of are answered, as nothing is said of them.
    fn take_over(&self) {
        self.primary.set(STANDBY);
        self.tell(&SchedulerToFrontend::Takeover { epoch: Epoch { number: 2, scheduler: 1 } });
        self.handle_outputs();
    }

    fn handle_message(&self, connection: ConnectionId, message: FrontendToScheduler) {
        match message {
            Addressed::Control(FrontendToControl::ClockRequest { sent_at, .. }) => {
                let at = sent_at + Span::from_millis(5_000);
                let reply = ClockReply { sent_at, received_at: at, replied_at: at };
                self.tell_over(connection, &SchedulerToFrontend::Clock(reply));
                let settled = Span::from_micros(4_500);
                let mut late = ErrorHistogram { longer: 1, sum: Span::from_micros(5_000), ..ErrorHistogram::default() };
                (late.counts[0], late.counts[7]) = (2, 4);
                let duration = ErrorSides { under: late, ..ErrorSides::default() };
                let infer = ActionErrors { actions: 9, duration, ..ActionErrors::default() };
                let predictions = PredictionErrors { infer, ..PredictionErrors::default() };
                let load = SchedulerLoad {
                    queued: 3,
                    batches: 2,
                    gpus: 1,
                    members: 3,
                    obeying: 2,
                    settled,
                    predictions,
                    ..SchedulerLoad::default()
                };
                self.tell_over(connection, &SchedulerToFrontend::Load(Box::new(load)));
            }
            Addressed::ModelThread(FrontendToModelThread::Submit { task, slot, .. })
            | Addressed::ModelThread(FrontendToModelThread::Open { task, slot, .. }) => match self.next_fate(slot) {
                None if slot.is_guarded() => self.guarded.borrow_mut().push((task, slot)),
                None => self.answer(task, slot, AnswerStatus::Done, &self.doubled(slot)),
                Some(Fate::Answer(status, payload)) => self.answer(task, slot, status, payload.as_bytes()),
                Some(Fate::Drop(reason)) => self.tell(&SchedulerToFrontend::Dropped { task, reason }),
                Some(Fate::Keep) => self.kept.borrow_mut().push(task),
            },
            Addressed::ModelThread(FrontendToModelThread::Cancel { task, .. }) => {
                self.cancelled.set(self.cancelled.get() + 1);
                self.tell(&SchedulerToFrontend::Dropped { task, reason: DropReason::Cancelled });
            }
            Addressed::Control(FrontendToControl::ChangeModel { change, to, name, brought }) => match brought {
                // No backend can run it as it is told to.
                Some(Brought { config, .. }) => {
                    let refused = Some(format!("parameter config: {config}"));
                    self.tell(&SchedulerToFrontend::ModelChanged { change, refused });
                }
                None => self.change_model(change, to, name),
            },
            Addressed::Control(FrontendToControl::Link { .. })
            | Addressed::Control(FrontendToControl::Obeys { .. } | FrontendToControl::Drained { .. })
            | Addressed::ModelThread(FrontendToModelThread::AllOpen) => {}
            other @ (Addressed::ModelThread(FrontendToModelThread::Fenced { .. })
            | Addressed::Control(
                FrontendToControl::Misses { .. } | FrontendToControl::PageRead | FrontendToControl::Refuses { .. },
            )) => {
                panic!("nobody asked for that: {other:?}")
            }
        }
    }

    fn next_fate(&self, slot: SlotDescriptor) -> Option<Fate> {
        let (all, guarded) = self.submitted.get();
        self.submitted.set((all + 1, guarded + usize::from(slot.is_guarded())));
        self.fates.borrow_mut().pop_front()
    }

    /// Answers those whose inputs have come, and forgets those that were cancelled.
    fn answer_guarded(&self) {
        let waiting = std::mem::take(&mut *self.guarded.borrow_mut());
        for (task, slot) in waiting {
            let offset = self.guards_offset.get() + u64::from(slot.number()) * GUARD_BYTES as u64;
            if self.arena.bytes(offset, GUARD_BYTES as u32) == guard_word(task).to_le_bytes() {
                self.answer(task, slot, AnswerStatus::Done, &self.doubled(slot));
            } else {
                self.guarded.borrow_mut().push((task, slot));
            }
        }
        self.handle_outputs();
    }

    fn handle_outputs(&self) {
        while let Some(output) = self.desk.poll_output() {
            self.handle_output(output);
        }
    }

    fn tell_gpus(&self, gpus: u32) {
        let (name, version, least_latency) = ("double".to_owned(), "1".to_owned(), Span::from_millis(5));
        self.tell(&SchedulerToFrontend::Model {
            model_thread: ModelThreadId(0),
            model: ModelId(0),
            name,
            version,
            gpus,
            least_latency,
            batching: least_latency,
            network: NetworkTimes { ctrl: Span::from_micros(300), data: Span::ZERO, resp: Span::from_millis(2) },
        });
    }

    fn disconnect(&self, connection: ConnectionId) {
        let reason = DisconnectReason::new("the test ends it");
        self.desk.handle_event(Event::Disconnected { connection, reason });
        self.handle_outputs();
    }

    /// As the scheduler does it; only what was there from the start can be had.
    fn change_model(&self, change: ChangeId, to: ModelChange, name: String) {
        if let Some(waiting) = &mut *self.changes.borrow_mut() {
            return waiting.push(change);
        }
        let known = self.desk.with_model(&name, None, |_, served, _| served.is_ensemble());
        let Ok(is_ensemble) = known else {
            let refused = Some("there is no such folder".to_owned());
            return self.tell(&SchedulerToFrontend::ModelChanged { change, refused });
        };
        let is_load = to == ModelChange::Load;
        self.loads.set(self.loads.get() + u32::from(is_load));
        if !is_ensemble {
            self.tell_gpus(u32::from(is_load));
        }
        let state = if is_load { ModelState::Serving } else { ModelState::Unloaded };
        self.tell(&SchedulerToFrontend::ModelState { name, state, loads: self.loads.get(), brought: None });
        self.tell(&SchedulerToFrontend::ModelChanged { change, refused: None });
    }

    /// Ends what was kept.
    fn drop_kept(&self) {
        for task in std::mem::take(&mut *self.kept.borrow_mut()) {
            self.tell(&SchedulerToFrontend::Dropped { task, reason: DropReason::Deadline });
        }
        self.handle_outputs();
    }

    fn doubled(&self, slot: SlotDescriptor) -> Vec<u8> {
        let input = self.arena.bytes(slot.input_offset, slot.input_bytes);
        if self.desk.with_core(|core| cell::is_record(&core.models().get(0).model.inputs)) {
            return input;
        }
        input.iter().map(|byte| byte.wrapping_mul(2)).collect()
    }

    fn answer(&self, task: TaskId, slot: SlotDescriptor, status: AnswerStatus, payload: &[u8]) {
        let payload_bytes = payload.len() as u32;
        let stamps = AnswerStamps::default();
        let header =
            AnswerHeader { task: task.0, status, payload_bytes, attempt: 0, batch_size: 3, gpu: 2, tasks: 1, stamps };
        self.arena.write(slot.answer_offset as usize, header.as_bytes());
        self.arena.write(slot.answer_offset as usize + ANSWER_HEADER_BYTES, payload);
        let immediate = ImmediateData { slot: slot.number(), attempt: 0 }.pack();
        let bytes = ANSWER_HEADER_BYTES as u32 + payload_bytes;
        self.desk.handle_event(Event::Immediate { connection: BACKEND, immediate, bytes });
    }

    fn tell(&self, message: &SchedulerToFrontend) {
        self.tell_over(self.primary.get(), message);
    }

    fn tell_over(&self, connection: ConnectionId, message: &SchedulerToFrontend) {
        let frame = wincode::serialize(message).unwrap();
        self.desk.handle_event(Event::Message { connection, frame });
    }
}

/// Runs a test against a server that knows no tokens; the clock stands still unless the test moves it, so only sockets
/// and fates decide.
fn with_server<F: Future<Output = ()>>(limits: Limits, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_gate(open_gate(limits), test);
}

/// A gate that lets everybody in.
fn open_gate(limits: Limits) -> Gate {
    let grants = Clients::default().grants().unwrap();
    Gate { limits, grants, tls: None, hosts: Hosts::Any, shared_memory: SharedMemory::default() }
}

fn with_gate<F: Future<Output = ()>>(gate: Gate, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_gate_and_collector(gate, None, test);
}

fn with_collector<F: Future<Output = ()>>(otlp: Option<Otlp>, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_gate_and_collector(open_gate(limits()), otlp, test);
}

fn with_gate_and_collector<F: Future<Output = ()>>(
    gate: Gate,
    otlp: Option<Otlp>,
    test: impl FnOnce(SocketAddr, Rc<Peer>) -> F,
) {
    with_model(double(), gate, otlp, test);
}

/// The second of so many schedulers is joined once the test lets the desk's timers run.
fn with_schedulers<F: Future<Output = ()>>(schedulers: usize, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_models_and_schedulers(vec![double()], schedulers, open_gate(limits()), None, test);
}

/// The peer takes every model to be called "double".
fn with_model<F: Future<Output = ()>>(
    model: repository::Model,
    gate: Gate,
    otlp: Option<Otlp>,
    test: impl FnOnce(SocketAddr, Rc<Peer>) -> F,
) {
    with_models_and_schedulers(vec![model], 1, gate, otlp, test);
}

fn with_models_and_schedulers<F: Future<Output = ()>>(
    models: Vec<repository::Model>,
    schedulers: usize,
    gate: Gate,
    otlp: Option<Otlp>,
    test: impl FnOnce(SocketAddr, Rc<Peer>) -> F,
) {
    let arena = Rc::new(PlainArena::new(ARENA));
    let config = CoreConfig {
        arena_bytes: ARENA,
        arena: LinkWelcome {
            arena_address: 0,
            arena_bytes: ARENA as u64,
            arena_rkey: 0,
            guards_offset: 0,
            guards_rkey: 0,
        },
        name: "frontend".to_owned(),
        link_address: "127.0.0.1:1".to_owned(),
        links_max: 4,
        schedulers,
        token_seed: 0,
    };
    let mut core = Core::new(config, models).unwrap();
    core.handle_refused(Refused {
        name: "broken".to_owned(),
        version: String::new(),
        reason: "broken/config.pbtxt: dims: found 0".to_owned(),
    });
    let clock = Rc::new(Cell::new(Timestamp(1_000)));
    let read = Rc::clone(&clock);
    let record = Rc::new(Record::default());
    let observer = Rc::clone(&record) as Rc<dyn Observer>;
    let desk = Desk::new(core, Box::new(Rc::clone(&arena)), Box::new(move || read.get()), observer);
    let mut service = Service::new(Rc::clone(&desk), Rc::clone(&record), Some(Box::new(|_| Ok(()))), SystemTime::now)
        .caching(1 << 20, [7; 16])
        .learning(Selections::new(0, (1 << 16, Span::from_millis(60_000)), 1 << 16));
    if let Some(otlp) = otlp {
        let traces = record.traces().clone();
        let queue = export::start(&otlp, traces.clone()).unwrap();
        let tracing = Tracing::new(Rc::clone(&desk), queue, traces, || 1_700_000_000_000_000_000);
        service = service.tracing(tracing, otlp.trace_rate);
    }
    let peer = Rc::new(Peer {
        primary: Cell::new(SCHEDULER),
        server: Server::new(service, gate),
        desk,
        arena,
        fates: RefCell::default(),
        kept: RefCell::default(),
        loads: Cell::new(0),
        cancelled: Cell::new(0),
        changes: RefCell::new(None),
        clock,
        guards_offset: Cell::new(0),
        guarded: RefCell::default(),
        submitted: Cell::default(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::task::spawn_local(serve(listener, Rc::clone(&peer.server)));
        tokio::task::spawn_local(Rc::clone(&peer).run());
        tokio::task::yield_now().await;
        test(address, peer).await;
    });
}

fn double() -> repository::Model {
    model("double", vec![tensor("x", DataType::Uint8, &[4])], vec![tensor("y", DataType::Uint8, &[4])])
}

fn limits() -> Limits {
    Limits {
        body_bytes_max: 4096,
        bodies_bytes_max: 1 << 20,
        connections_max: 8,
        client_connections_max: 8,
        requests_max: 64,
        client_requests_max: 64,
        untaken_bytes_max: 1 << 20,
        client_untaken_bytes_max: 1 << 20,
        stream_first_timeout: Duration::from_secs(60),
        stream_idle_timeout: Duration::from_secs(60),
        drain_grace: Duration::ZERO,
        drain_timeout: Duration::from_secs(60),
        head_bytes_max: 8192,
        head_timeout: Duration::from_secs(60),
        idle_timeout: Duration::from_secs(60),
        body_timeout: Duration::from_secs(60),
    }
}

/// One response: status, head in lower case, body.
#[derive(Debug)]
struct Heard {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Heard {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// Reads one response; `None` if the connection ended instead.
async fn hear(stream: &mut (impl AsyncRead + Unpin)) -> Option<Heard> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..head_end].to_vec()).unwrap().to_ascii_lowercase();
    let status = head[9..12].parse().unwrap();
    let mut heard = Heard { status, head, body: bytes[head_end..].to_vec() };
    let length: usize = heard.header("content-length").map_or(0, |text| text.parse().unwrap());
    while heard.body.len() < length {
        assert_ne!(stream.read_buf(&mut heard.body).await.unwrap(), 0, "the body is cut off");
    }
    Some(heard)
}

async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), request: &[u8]) -> Heard {
    stream.write_all(request).await.unwrap();
    hear(stream).await.expect("an answer")
}

fn get_of(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: h\r\n\r\n").into_bytes()
}

fn post_of(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {length}\r\n{headers}\r\n");
    [head.as_bytes(), body].concat()
}

const INFER: &str = "/v2/models/double/infer";
const GOOD: &str = r#"{"id":"q","inputs":[{"name":"x","shape":[1,4],"datatype":"UINT8","data":[1,2,3,4]}]}"#;

async fn is_served(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let heard = ask(stream, &post_of(INFER, "", GOOD.as_bytes())).await;
    assert_eq!((heard.status, &heard.json()["outputs"][0]["data"]), (200, &json!([2, 4, 6, 8])), "{heard:?}");
}

mod budgets;
mod cached;
mod drain;
mod errors;
mod graphs;
mod grpc;
mod hostile;
mod lanes;
mod pages;
mod pictures;
mod regions;
mod rest;
mod secure;
mod seen;
mod selected;
mod shapes;
mod streams;
mod takeover;
mod tracing;
