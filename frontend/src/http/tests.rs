//! The HTTP server over real sockets and raw bytes, above a real core; the tests play its scheduler and backend.

use std::{cell::RefCell, collections::VecDeque, future::Future, net::SocketAddr};

use proto::{
    BackendId, FrontendId, ModelId, SlotDescriptor, Span, TaskId, Timestamp,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, AnswerStatus, LinkHello, LinkWelcome},
    clock::ClockReply,
    frame::read_frame,
    frontend_to_scheduler::FrontendToScheduler,
    scheduler_to_frontend::{FrontendWelcome, SchedulerToFrontend},
    slot::ImmediateData,
    stages::AnswerStamps,
};
use rand::{Rng as _, RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use repository::DataType;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use transport::{ConnectionId, Event};
use zerocopy::IntoBytes as _;

use super::*;
use crate::{
    core::{Core, CoreConfig, Output},
    tasks::Arena as _,
    testing::{PlainArena, model, tensor},
};

const ARENA: usize = 1 << 14;
const SCHEDULER: ConnectionId = ConnectionId(1);
const BACKEND: ConnectionId = ConnectionId(2);

/// What the tests' scheduler and backend do with the next task; when nothing is said, they answer.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Drop(DropReason),
    Fail(&'static str),
    Keep,
}

/// The other side of the core: a scheduler and one backend that doubles every byte.
struct Peer {
    desk: Rc<Desk>,
    arena: Rc<PlainArena>,
    fates: RefCell<VecDeque<Fate>>,
    kept: RefCell<Vec<TaskId>>,
    cancelled: Cell<usize>,
}

impl Peer {
    async fn run(self: Rc<Self>) {
        self.desk.handle_timeout();
        loop {
            while let Some(output) = self.desk.poll_output() {
                self.handle_output(output);
            }
            self.desk.woken().await;
        }
    }

    fn handle_output(&self, output: Output) {
        match output {
            Output::Connect { .. } => {
                self.desk.handle_connecting(SCHEDULER);
                let frontend = FrontendId(1);
                let welcome = wincode::serialize(&FrontendWelcome { frontend }).unwrap();
                self.desk.handle_event(Event::Connected { connection: SCHEDULER, welcome });
                let hello = wincode::serialize(&LinkHello { backend: BackendId(6), frontend }).unwrap();
                let peer = "127.0.0.1:1".parse().unwrap();
                self.desk.handle_event(Event::Incoming { connection: BACKEND, peer, hello });
                let (name, version) = ("double".to_owned(), "1".to_owned());
                let least_latency = Span::from_millis(5);
                self.tell(&SchedulerToFrontend::Model { model: ModelId(0), name, version, gpus: 1, least_latency });
            }
            Output::Send { frame, .. } => read_frame(&frame).for_each(|message| self.handle_message(message.unwrap())),
            Output::Accept { .. } => {}
            other => panic!("found {other:?}, expected nothing of that kind"),
        }
    }

    fn handle_message(&self, message: FrontendToScheduler) {
        match message {
            FrontendToScheduler::ClockRequest { sent_at } => {
                let at = sent_at + Span::from_millis(5_000);
                self.tell(&SchedulerToFrontend::Clock(ClockReply { sent_at, received_at: at, replied_at: at }));
            }
            FrontendToScheduler::Submit { task, slot, .. } => match self.fates.borrow_mut().pop_front() {
                None => self.answer(task, slot, AnswerStatus::Done, &self.doubled(slot)),
                Some(Fate::Fail(reason)) => self.answer(task, slot, AnswerStatus::Failed, reason.as_bytes()),
                Some(Fate::Drop(reason)) => self.tell(&SchedulerToFrontend::Dropped { task, reason }),
                Some(Fate::Keep) => self.kept.borrow_mut().push(task),
            },
            FrontendToScheduler::Cancel { task, .. } => {
                self.cancelled.set(self.cancelled.get() + 1);
                self.tell(&SchedulerToFrontend::Dropped { task, reason: DropReason::Cancelled });
            }
            FrontendToScheduler::Fenced { .. } => panic!("nobody asked for a fence"),
        }
    }

    fn doubled(&self, slot: SlotDescriptor) -> Vec<u8> {
        let input = self.arena.bytes(slot.input_offset, slot.input_bytes);
        input.iter().map(|byte| byte.wrapping_mul(2)).collect()
    }

    fn answer(&self, task: TaskId, slot: SlotDescriptor, status: AnswerStatus, payload: &[u8]) {
        let payload_bytes = payload.len() as u32;
        let stamps = AnswerStamps::default();
        let header = AnswerHeader { task: task.0, status, payload_bytes, attempt: 0, batch_size: 3, gpu: 2, stamps };
        self.arena.write(slot.answer_offset as usize, header.as_bytes());
        self.arena.write(slot.answer_offset as usize + ANSWER_HEADER_BYTES, payload);
        let immediate = ImmediateData { slot: slot.slot, attempt: 0 }.pack();
        let bytes = ANSWER_HEADER_BYTES as u32 + payload_bytes;
        self.desk.handle_event(Event::Immediate { connection: BACKEND, immediate, bytes });
    }

    fn tell(&self, message: &SchedulerToFrontend) {
        let frame = wincode::serialize(message).unwrap();
        self.desk.handle_event(Event::Message { connection: SCHEDULER, frame });
    }
}

/// Runs a test against a server; the clock stands still, so only sockets and fates decide.
fn with_server<F: Future<Output = ()>>(limits: Limits, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    let arena = Rc::new(PlainArena::new(ARENA));
    let config = CoreConfig {
        arena_bytes: ARENA,
        arena: LinkWelcome { arena_address: 0, arena_bytes: ARENA as u64, arena_rkey: 0 },
        link_address: "127.0.0.1:1".to_owned(),
        links_max: 4,
    };
    let double = model("double", vec![tensor("x", DataType::Uint8, &[4])], vec![tensor("y", DataType::Uint8, &[4])]);
    let core = Core::new(config, vec![double]).unwrap();
    let desk = Desk::new(core, Box::new(Rc::clone(&arena)), Box::new(|| Timestamp(1_000)));
    let peer = Rc::new(Peer {
        desk: Rc::clone(&desk),
        arena,
        fates: RefCell::default(),
        kept: RefCell::default(),
        cancelled: Cell::new(0),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::task::spawn_local(serve(listener, desk, limits));
        tokio::task::spawn_local(Rc::clone(&peer).run());
        tokio::task::yield_now().await;
        test(address, peer).await;
    });
}

fn limits() -> Limits {
    Limits {
        body_bytes_max: 4096,
        bodies_bytes_max: 1 << 20,
        connections_max: 8,
        head_timeout: Duration::from_secs(60),
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
async fn hear(stream: &mut TcpStream) -> Option<Heard> {
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

async fn ask(stream: &mut TcpStream, request: &[u8]) -> Heard {
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

async fn is_served(stream: &mut TcpStream) {
    let heard = ask(stream, &post_of(INFER, "", GOOD.as_bytes())).await;
    assert_eq!((heard.status, &heard.json()["outputs"][0]["data"]), (200, &json!([2, 4, 6, 8])), "{heard:?}");
}

#[test]
fn health_and_metadata() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &get_of("/v2")).await;
        assert_eq!((heard.status, &heard.json()["extensions"]), (200, &json!(["binary_tensor_data"])));
        for probe in ["live", "ready"] {
            let heard = ask(&mut stream, &get_of(&format!("/v2/health/{probe}"))).await;
            assert_eq!((heard.status, heard.json()), (200, json!({ "live": true, "ready": true })));
        }
        for path in ["/v2/models/double", "/v2/models/double/versions/1"] {
            let metadata = ask(&mut stream, &get_of(path)).await.json();
            let expected = json!([{ "name": "x", "datatype": "UINT8", "shape": [-1, 4] }]);
            assert_eq!((&metadata["inputs"], &metadata["versions"]), (&expected, &json!(["1"])));
            let heard = ask(&mut stream, &get_of(&format!("{path}/ready"))).await;
            assert_eq!((heard.status, heard.json()), (200, json!({ "name": "double", "ready": true })));
        }
    });
}

#[test]
fn tensors_in_json_and_in_binary() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;
        let outputs = json!([{ "name": "y", "datatype": "UINT8", "shape": [1, 4], "data": [2, 4, 6, 8] }]);
        let expected = json!({ "id": "q", "model_name": "double", "model_version": "1", "outputs": outputs });
        assert_eq!(
            (heard.status, heard.json(), heard.header("content-type")),
            (200, expected, Some("application/json"))
        );
        let timing = heard.header("x-downbeat-timing").unwrap();
        assert!(timing.ends_with(";deadline=25000;batch=3;gpu=6:2"), "{timing}");

        let header = r#"{"parameters":{"binary_data_output":true},"inputs":[{"name":"x","shape":[2,4],
            "datatype":"UINT8","parameters":{"binary_data_size":8}}]}"#;
        let body = [header.as_bytes(), &[1, 2, 3, 4, 5, 6, 7, 200]].concat();
        let length = format!("Inference-Header-Content-Length: {}\r\n", header.len());
        let heard = ask(&mut stream, &post_of("/v2/models/double/versions/1/infer", &length, &body)).await;
        let header_length: usize = heard.header("inference-header-content-length").unwrap().parse().unwrap();
        let (header, binary) = heard.body.split_at(header_length);
        assert_eq!(binary, [2, 4, 6, 8, 10, 12, 14, 144]);
        let header: Value = serde_json::from_slice(header).unwrap();
        assert_eq!(header["outputs"][0]["parameters"]["binary_data_size"], 8);
    });
}

#[test]
fn errors_have_their_status_and_the_connection_goes_on() {
    with_server(limits(), async |address, peer| {
        let infer = |body: &str| post_of(INFER, "", body.as_bytes());
        let length = "inference-header-content-length: 5000\r\n";
        let cases = [
            (get_of("/v1"), 404, "path: found '/v1'"),
            (get_of("/v2/models/triple"), 404, "model: found 'triple', expected one of: double"),
            (get_of("/v2/models/double/versions/2/ready"), 404, "version of model 'double': found '2', expected '1'"),
            (get_of(INFER), 405, "method: found GET, expected POST"),
            (post_of("/v2", "", b""), 405, "method: found POST, expected GET"),
            (infer(&GOOD.replace("[1,4]", "[1,5]")), 400, "inputs['x'].shape: found [1, 5]"),
            (infer(&GOOD.replace("UINT8", "INT8")), 400, "inputs['x'].datatype: found 'INT8', expected 'UINT8'"),
            (
                post_of("/v2/models/triple/infer", "", &[b' '; 4000]),
                404,
                "model: found 'triple', expected one of: double",
            ),
            (infer(&GOOD[..30]), 400, "the request is not a JSON object of this protocol"),
            (infer(""), 400, "the request is not a JSON object of this protocol"),
            (post_of(INFER, length, GOOD.as_bytes()), 400, "Inference-Header-Content-Length: found 5000"),
            (
                infer(&GOOD.replace(r#""id":"q""#, r#""parameters":{"timeout":4999}"#)),
                400,
                "parameters.timeout: found 4.999 ms, expected at least 5.000 ms",
            ),
        ];
        let mut stream = TcpStream::connect(address).await.unwrap();
        for (request, status, expected) in cases {
            let heard = ask(&mut stream, &request).await;
            let error = heard.json()["error"].as_str().unwrap().to_owned();
            assert!(heard.status == status && error.contains(expected), "{heard:?}: expected {status} {expected}");
            is_served(&mut stream).await;
        }
        let fates = [
            (Fate::Drop(DropReason::Deadline), 504, "its deadline could no longer be met"),
            (Fate::Drop(DropReason::QueueFull), 503, "the model's queue is full"),
            (Fate::Drop(DropReason::NoBackend), 503, "no backend hosts the model now"),
            (Fate::Fail("out of memory"), 500, "out of memory"),
        ];
        for (fate, status, expected) in fates {
            peer.fates.borrow_mut().push_back(fate);
            let heard = ask(&mut stream, &infer(GOOD)).await;
            assert_eq!((heard.status, heard.header("retry-after").is_some()), (status, status == 503));
            assert!(heard.json()["error"].as_str().unwrap().contains(expected), "{heard:?}");
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn what_cannot_be_read_on_ends_its_connection_with_an_answer() {
    with_server(limits(), async |address, _| {
        let announced = format!("POST {INFER} HTTP/1.1\r\nhost: h\r\ncontent-length: 999999999\r\n\r\n");
        let chunked = format!(
            "POST {INFER} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2000\r\n{}\r\n",
            " ".repeat(0x2000)
        );
        let packed = String::from_utf8(post_of(INFER, "content-encoding: gzip\r\n", b"xx")).unwrap();
        let unclear = String::from_utf8(post_of(INFER, "inference-header-content-length: -1\r\n", b"xx")).unwrap();
        for (request, status, expected) in [
            (announced, 413, "found 999999999 bytes, expected at most 4096 (body_bytes_max)"),
            (chunked, 413, "found more bytes, expected at most 4096"),
            (packed, 415, "Content-Encoding: found"),
            (unclear, 400, "Inference-Header-Content-Length: found"),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let heard = ask(&mut stream, request.as_bytes()).await;
            assert_eq!((heard.status, heard.header("connection")), (status, Some("close")), "{heard:?}");
            assert!(heard.json()["error"].as_str().unwrap().contains(expected), "{heard:?}");
            assert!(hear(&mut stream).await.is_none());
            is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        }
    });
}

const SHORT: Duration = Duration::from_millis(30);

/// With timeouts this short a good client can be too slow as well, on a busy machine; another attempt is not.
async fn is_served_at_last(address: SocketAddr) {
    loop {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let sent = stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await;
        if sent.is_ok() && hear(&mut stream).await.is_some_and(|heard| heard.status == 200) {
            return;
        }
    }
}

#[test]
fn slow_heads_and_idle_connections_end_and_others_go_on() {
    with_server(Limits { head_timeout: SHORT, ..limits() }, async |address, _| {
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"POST /v2/mod").await.unwrap();
        assert!(hear(&mut slow).await.is_none_or(|heard| heard.status == 408));

        let mut idle = TcpStream::connect(address).await.unwrap();
        assert!(hear(&mut idle).await.is_none(), "an idle connection does not stay for ever");
        is_served_at_last(address).await;
    });
}

#[test]
fn slow_and_torn_bodies_end_and_others_go_on() {
    with_server(Limits { body_timeout: SHORT, ..limits() }, async |address, peer| {
        let request = post_of(INFER, "", GOOD.as_bytes());
        let mut slow = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut slow, &request[..request.len() - 1]).await;
        assert_eq!((heard.status, heard.header("connection")), (408, Some("close")));

        let mut torn = TcpStream::connect(address).await.unwrap();
        torn.write_all(&request[..request.len() - 1]).await.unwrap();
        drop(torn);
        is_served_at_last(address).await;
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_client_that_hangs_up_cancels_its_task() {
    with_server(limits(), async |address, peer| {
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        while peer.kept.borrow().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 1);
        drop(stream);
        while peer.cancelled.get() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_full_arena_refuses_at_once_and_serves_again() {
    with_server(Limits { connections_max: 1000, ..limits() }, async |address, peer| {
        let rows = r#"{"inputs":[{"name":"x","shape":[8,4],"datatype":"UINT8","data":[RR]}]}"#
            .replace("RR", &vec!["1"; 32].join(","));
        let mut held = Vec::new();
        let refused = loop {
            peer.fates.borrow_mut().extend([Fate::Keep; 8]);
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&post_of(INFER, "", rows.as_bytes())).await.unwrap();
            let before = peer.kept.borrow().len();
            tokio::select! {
                heard = hear(&mut stream) => break heard.unwrap(),
                () = async { while peer.kept.borrow().len() == before { tokio::task::yield_now().await } } => {}
            }
            held.push(stream);
        };
        assert!(!held.is_empty());
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
        assert!(refused.json()["error"].as_str().unwrap().contains("raise arena_bytes"), "{refused:?}");
        peer.fates.borrow_mut().clear();
        let kept = std::mem::take(&mut *peer.kept.borrow_mut());
        kept.into_iter()
            .for_each(|task| peer.tell(&SchedulerToFrontend::Dropped { task, reason: DropReason::Deadline }));
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
    });
}

#[test]
fn connections_beyond_the_limit_are_turned_away() {
    with_server(Limits { connections_max: 2, ..limits() }, async |address, _| {
        let mut first = TcpStream::connect(address).await.unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        is_served(&mut first).await;
        is_served(&mut second).await;
        let mut third = TcpStream::connect(address).await.unwrap();
        assert_eq!(hear(&mut third).await.unwrap().status, 503);
        drop(first);
        // The server notices the end of the first some turns later.
        loop {
            let mut next = TcpStream::connect(address).await.unwrap();
            if next.write_all(&get_of("/v2")).await.is_ok() && hear(&mut next).await.is_some_and(|h| h.status == 200) {
                break;
            }
        }
    });
}

#[test]
fn bodies_that_are_under_way_share_one_budget() {
    with_server(Limits { bodies_bytes_max: 150, ..limits() }, async |address, _| {
        let request = post_of(INFER, "", GOOD.as_bytes());
        let mut held = TcpStream::connect(address).await.unwrap();
        held.write_all(&request[..request.len() - 1]).await.unwrap();
        // The server takes the held body in some turns later; until then the others are served.
        let refused = loop {
            let heard = ask(&mut TcpStream::connect(address).await.unwrap(), &request).await;
            if heard.status != 200 {
                break heard;
            }
        };
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
        assert!(refused.json()["error"].as_str().unwrap().contains("exceed bodies_bytes_max"), "{refused:?}");
        let heard = ask(&mut held, &request[request.len() - 1..]).await;
        assert_eq!(heard.status, 200, "what was taken in goes on: {heard:?}");
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
    });
}

/// A good request with any stretch replaced by any bytes; the seed that fails is in the panic's text.
#[test]
fn no_bytes_hurt_others() {
    with_server(limits(), async |address, peer| {
        let mut good = TcpStream::connect(address).await.unwrap();
        for seed in 0..150 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut request = post_of(INFER, "inference-header-content-length: 81\r\n", GOOD.as_bytes());
            let start = rng.random_range(0..request.len());
            let end = (start + rng.random_range(0..40)).min(request.len());
            let mut junk = vec![0; rng.random_range(0..20)];
            rng.fill_bytes(&mut junk);
            request.splice(start..end, junk);
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(&request).await;
            let _ = stream.shutdown().await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
            is_served(&mut good).await;
            assert_eq!(peer.desk.with_core(Core::outstanding), 0, "seed {seed}");
        }
    });
}
