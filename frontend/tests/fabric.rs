//! A frontend over real soft-RoCE on the loopback network; the test is its scheduler and its backend.
#![allow(clippy::disallowed_methods)] // Each role has a thread of its own.

use std::{collections::BTreeMap, fs, net::SocketAddr, thread};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use frontend::{Client, Config, Infer, InferError, InputTensor};
use proto::{
    BackendId, Claim, Epoch, Era, FrontendId, LinkId, LinkPass, ModelId, ModelThreadId, SlotDescriptor, Span, TaskId,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, AnswerStatus, LinkHello, LinkWelcome},
    clock::ClockReply,
    frame::{Addressed, read_frame},
    frontend_to_scheduler::{FrontendToControl, FrontendToModelThread, FrontendToScheduler},
    hello::{ModelThreads, SchedulerHello},
    scheduler_to_frontend::{FrontendWelcome, NetworkTimes, SchedulerToFrontend},
    slot::ImmediateData,
    stages::AnswerStamps,
};
use repository::{DataType, emulated::digest};
use transport::{
    Access, Address, Clock, ConnectionId, Endpoint, EndpointConfig, Event, LocalPath, ROCE_PORT, Region, RegionKey,
    Transfer, TransferError,
};
use zerocopy::IntoBytes as _;

const EPOCH: Epoch = Epoch { number: 1, scheduler: 0 };
const SECRET: &str = "the fabric's secret";
const INPUT_BYTES: usize = 150_528;
const ANSWER_AT: usize = INPUT_BYTES;
const CONFIG: &str = r#"
    backend: "emulated"
    max_batch_size: 8
    input { name: "image" data_type: TYPE_UINT8 dims: [ 150528 ] }
    output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
    parameters { key: "slo_ms" value { string_value: "60000" } }
    parameters { key: "alpha_ms" value { string_value: "1" } }
    parameters { key: "beta_ms" value { string_value: "1" } }
"#;

/// What happens instead of an answer to the next input that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The scheduler breaks its connection to the frontend.
    LoseScheduler,
    /// The backend stalls; it is fenced off and its tasks run again at another.
    Fence,
    /// Another backend has learned the key that this one was told, and uses it.
    Borrow,
    /// The backend's link ends, and it uses the key that it was told for that one over the next.
    Outlive,
}

/// A scheduler and a backend on one thread.
struct Fabric {
    clock: Clock,
    scheduler: Endpoint,
    backend: Endpoint,
    region: Region,
    key: RegionKey,
    frontend: Option<(ConnectionId, String)>,
    /// The frontend's, of which passes are made.
    token: u64,
    frontends: u32,
    backends: u32,
    link: Option<(ConnectionId, LinkWelcome)>,
    fault: Option<Fault>,
    /// What the next link tries its hand with, and which one does.
    stolen: Option<LinkWelcome>,
    thief: Option<ConnectionId>,
    /// Tasks without an answer, and how often each was fenced.
    tasks: BTreeMap<TaskId, (SlotDescriptor, u16)>,
    /// The task whose input is being read: one at a time.
    running: Option<TaskId>,
}

impl Fabric {
    fn open() -> (Self, SocketAddr) {
        let host = transport::random_loopback();
        let path = testing::local_path().map_or(LocalPath::Ring, |path| path.parse().unwrap());
        let roce = |config: EndpointConfig| Endpoint::open(config.with_local_path(path).with_secret(SECRET)).unwrap();
        let at = SocketAddr::new(host.into(), ROCE_PORT);
        let scheduler = roce(EndpointConfig::soft(at).listening(SocketAddr::new(host.into(), 0)));
        let mut backend = roce(EndpointConfig::default());
        let region = Region::allocate(ANSWER_AT + 1024).unwrap();
        let key = backend.register(&region, Access::default()).unwrap();
        let address = scheduler.listen_address().unwrap();
        let fabric = Self {
            clock: Clock::start(),
            scheduler,
            backend,
            region,
            key,
            frontend: None,
            token: 0,
            frontends: 0,
            backends: 0,
            link: None,
            fault: None,
            stolen: None,
            thief: None,
            tasks: BTreeMap::new(),
            running: None,
        };
        (fabric, address)
    }

    fn run(mut self, faults: &Receiver<Fault>) {
        loop {
            match faults.try_recv() {
                Ok(fault) => self.fault = Some(fault),
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            let now = self.clock.now();
            let busy = self.scheduler.drive(now) | self.backend.drive(now);
            while let Some(event) = self.scheduler.poll_event() {
                self.on_scheduler_event(event);
            }
            while let Some(event) = self.backend.poll_event() {
                self.on_backend_event(event);
            }
            self.run_next();
            if !busy {
                let now = self.clock.now();
                self.backend.wait(now, now + Span::from_micros(500));
            }
        }
    }

    fn on_scheduler_event(&mut self, event: Event) {
        let now = self.clock.now();
        match event {
            Event::Incoming { connection, hello, .. } => {
                let SchedulerHello::Frontend(hello) = wincode::deserialize(&hello).unwrap() else {
                    panic!("only a frontend connects here");
                };
                self.frontends += 1;
                let (frontend, model_threads) = (FrontendId(self.frontends), ModelThreads::default());
                let welcome = FrontendWelcome { frontend, model_threads, claim: Claim { era: Era(1), epoch: EPOCH } };
                self.scheduler.accept(now, connection, wincode::serialize(&welcome).unwrap());
                self.token = hello.standing.token;
                self.frontend = Some((connection, hello.link_address));
                self.connect_backend();
            }
            Event::Message { connection, frame } if self.frontend.as_ref().is_some_and(|(f, _)| *f == connection) => {
                read_frame(&frame).for_each(|message| self.on_message(message.unwrap()));
            }
            Event::Disconnected { connection, reason } => {
                let ours = self.frontend.as_ref().is_some_and(|(frontend, _)| *frontend == connection);
                assert!(!ours, "the frontend's connection ended: {reason}");
            }
            _ => {}
        }
    }

    fn connect_backend(&mut self) {
        let (_, address) = self.frontend.as_ref().unwrap();
        self.backends += 1;
        let (backend, frontend) = (BackendId(self.backends), FrontendId(self.frontends));
        let pass = LinkPass::of(self.token, backend);
        let hello = LinkHello { backend, frontend, link: LinkId(1), epoch: EPOCH, pass };
        self.backend.connect(
            self.clock.now(),
            address.parse::<Address>().unwrap(),
            wincode::serialize(&hello).unwrap(),
        );
    }

    fn on_message(&mut self, message: FrontendToScheduler) {
        match message {
            Addressed::Control(FrontendToControl::ClockRequest { sent_at, .. }) => {
                let at = self.clock.now();
                self.tell(&SchedulerToFrontend::Clock(ClockReply { sent_at, received_at: at, replied_at: at }));
            }
            Addressed::ModelThread(FrontendToModelThread::Submit { task, slot, deadline, .. }) => {
                assert!(deadline > self.clock.now() && task.frontend() == FrontendId(self.frontends));
                self.tasks.insert(task, (slot, 0));
            }
            Addressed::Control(FrontendToControl::Obeys { epoch }) => assert_eq!(epoch, EPOCH),
            Addressed::ModelThread(FrontendToModelThread::Cancel { .. })
            | Addressed::ModelThread(FrontendToModelThread::AllOpen) => {}
            other @ (Addressed::Control(FrontendToControl::ChangeModel { .. })
            | Addressed::Control(FrontendToControl::Link { .. })
            | Addressed::ModelThread(FrontendToModelThread::Open { .. })
            | Addressed::Control(
                FrontendToControl::Misses { .. }
                | FrontendToControl::Drained { .. }
                | FrontendToControl::PageRead
                | FrontendToControl::Refuses { .. },
            )) => {
                panic!("nobody asked for that: {other:?}")
            }
            Addressed::ModelThread(FrontendToModelThread::Fenced { unanswered, .. }) => {
                for task in unanswered {
                    self.tasks.get_mut(&task).expect("it was not answered").1 += 1;
                }
                self.running = None;
                self.connect_backend();
            }
        }
    }

    fn on_read(&mut self) {
        match self.fault.take() {
            None => self.answer(),
            Some(Fault::Fence) => {
                let tasks = self.tasks.keys().copied().collect();
                self.tell(&SchedulerToFrontend::Fence { link: LinkId::ALL, backend: BackendId(self.backends), tasks });
            }
            Some(Fault::LoseScheduler) => {
                let (connection, _) = self.frontend.take().expect("its task was read");
                self.tasks.clear();
                self.scheduler.disconnect(connection);
            }
            Some(fault @ (Fault::Borrow | Fault::Outlive)) => {
                let (connection, welcome) = self.link.as_ref().expect("it has read");
                self.stolen = Some(welcome.clone());
                if fault == Fault::Outlive {
                    self.backend.disconnect(*connection);
                }
                self.connect_backend();
            }
        }
    }

    /// READs the arena over a link that was told another key.
    fn steal(&mut self, connection: ConnectionId, stolen: &LinkWelcome) {
        let LinkWelcome { arena_address: remote_address, arena_rkey: rkey, .. } = *stolen;
        let bytes = INPUT_BYTES;
        let transfer = Transfer { token: 0, lkey: self.key.lkey, local_offset: 0, remote_address, rkey, bytes };
        self.backend.read(connection, transfer).unwrap();
        self.thief = Some(connection);
    }

    /// Whoever still has a link answers; else one comes that has done nothing wrong.
    fn on_theft_refused(&mut self) {
        self.thief = None;
        if self.link.is_some() {
            self.answer();
        } else {
            self.connect_backend();
        }
    }

    fn tell(&mut self, message: &SchedulerToFrontend) {
        let (connection, _) = self.frontend.as_ref().unwrap();
        // A connection that has just ended is reported as an event.
        let _ = self.scheduler.send(*connection, &wincode::serialize(message).unwrap());
    }

    fn on_linked(&mut self, connection: ConnectionId, welcome: &[u8]) {
        self.link = Some((connection, wincode::deserialize(welcome).unwrap()));
        self.tell(&SchedulerToFrontend::Model {
            model_thread: ModelThreadId(0),
            model: ModelId(0),
            name: "m".to_owned(),
            version: "1".to_owned(),
            gpus: 1,
            least_latency: Span::from_millis(1),
            batching: Span::ZERO,
            network: NetworkTimes::default(),
        });
    }

    fn on_backend_event(&mut self, event: Event) {
        match event {
            Event::Connected { connection, welcome } => match self.stolen.take() {
                Some(stolen) => self.steal(connection, &stolen),
                None => self.on_linked(connection, &welcome),
            },
            Event::ReadDone { connection, result, .. } if self.thief == Some(connection) => {
                assert_eq!(result, Err(TransferError::RemoteAccess));
                self.on_theft_refused();
            }
            Event::ReadDone { result: Ok(()), .. } => self.on_read(),
            Event::WriteDone { result: Ok(()), token, .. } => {
                self.tasks.remove(&TaskId(token));
                self.running = None;
            }
            Event::Disconnected { connection, .. } if self.link.as_ref().is_some_and(|(l, _)| *l == connection) => {
                (self.link, self.running) = (None, None);
            }
            _ => {}
        }
    }

    /// Step 7: reads the next task's input.
    fn run_next(&mut self) {
        let (None, Some((connection, welcome))) = (self.running, &self.link) else { return };
        let Some((&task, (slot, _))) = self.tasks.first_key_value() else { return };
        let transfer = self.transfer(task, (slot, welcome), 0, slot.input_offset, slot.input_bytes as usize);
        if self.backend.read(*connection, transfer).is_ok() {
            self.running = Some(task);
        }
    }

    /// Step 9: writes the digest of the input that has been read.
    fn answer(&mut self) {
        let (Some(task), Some((connection, welcome))) = (self.running, &self.link) else { return };
        let Some((slot, attempt)) = self.tasks.get(&task) else { return };
        let mut input = vec![0; slot.input_bytes as usize];
        self.region.read(0, &mut input);
        let output: Vec<u8> = digest(&input).into_iter().flat_map(u64::to_le_bytes).collect();
        let header = AnswerHeader {
            task: task.0,
            status: AnswerStatus::Done,
            payload_bytes: output.len() as u32,
            attempt: *attempt,
            batch_size: 1,
            gpu: 0,
            tasks: 1,
            stamps: AnswerStamps::default(),
        };
        self.region.write(ANSWER_AT, header.as_bytes());
        self.region.write(ANSWER_AT + ANSWER_HEADER_BYTES, &output);
        let bytes = ANSWER_HEADER_BYTES + output.len();
        let transfer = self.transfer(task, (slot, welcome), ANSWER_AT, slot.answer_offset, bytes);
        let immediate = ImmediateData { slot: slot.slot, attempt: *attempt }.pack();
        self.backend.write_with_immediate(*connection, transfer, immediate).unwrap();
    }

    fn transfer(
        &self,
        task: TaskId,
        (slot, welcome): (&SlotDescriptor, &LinkWelcome),
        local: usize,
        remote: u64,
        bytes: usize,
    ) -> Transfer {
        Transfer {
            token: task.0,
            lkey: self.key.lkey,
            local_offset: local,
            remote_address: welcome.arena_address + remote,
            rkey: if slot.key == SlotDescriptor::NO_KEY { welcome.arena_rkey } else { slot.key },
            bytes,
        }
    }
}

/// Runs a test with a client whose model is ready: once with keys of slots, once as over a device that has none.
fn with_fabric(test: impl AsyncFn(&Client, &Sender<Fault>)) {
    with_one(false, &test);
    with_one(true, &test);
}

fn with_one(is_windowless: bool, test: impl AsyncFnOnce(&Client, &Sender<Fault>)) {
    let repository = tempfile::tempdir().unwrap();
    fs::create_dir(repository.path().join("m")).unwrap();
    fs::write(repository.path().join("m/config.pbtxt"), CONFIG).unwrap();
    let (faults, received) = unbounded();
    let (opened, address) = bounded(1);
    let fabric = thread::spawn(move || {
        let (fabric, address) = Fabric::open();
        opened.send(address).unwrap();
        fabric.run(&received);
    });
    let config = Config { is_windowless, ..Config::new(address.recv().unwrap(), SECRET, repository.path()) };
    let client = Client::start(config).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        until_ready(&client).await;
        test(&client, &faults).await;
    });
    // The fabric first: it takes the end of the frontend's connection for a failure.
    drop(faults);
    fabric.join().unwrap();
    drop(client);
}

async fn until_ready(client: &Client) {
    while !client.is_ready("m").await.unwrap() {
        tokio::task::yield_now().await;
    }
}

/// A request of `rows` images that no other number gives.
fn request(rows: usize, number: u8) -> (Infer, Vec<u8>) {
    let image = |row: usize| (0..INPUT_BYTES).map(move |at| (at * 31 + row * 7) as u8 ^ number);
    let bytes: Vec<u8> = (0..rows).flat_map(image).collect();
    let digests = bytes.chunks(INPUT_BYTES).flat_map(digest).flat_map(u64::to_le_bytes).collect();
    let (name, datatype, shape) = ("image".to_owned(), DataType::Uint8, vec![rows, INPUT_BYTES]);
    let inputs = vec![InputTensor { name, datatype, shape, data: bytes.into() }];
    (Infer { model: "m".to_owned(), version: None, inputs, slo: None }, digests)
}

async fn is_served(client: &Client, rows: usize, number: u8) {
    let (request, digests) = request(rows, number);
    let inferred = client.infer(request).await.unwrap();
    assert_eq!((&inferred.outputs[0].shape, &inferred.outputs[0].data[..]), (&vec![rows, 2], &digests[..]));
}

#[test]
fn every_row_is_answered_with_the_digest_of_its_input() {
    with_fabric(async |client, _| {
        let tasks: Vec<_> = (0..20).map(|number| is_served(client, usize::from(number) % 3 + 1, number)).collect();
        for task in tasks {
            task.await;
        }
        let (mut wrong, _) = request(1, 0);
        wrong.inputs[0].shape[1] -= 1;
        let error = client.infer(wrong).await.unwrap_err().to_string();
        assert!(error.starts_with("inputs['image'].shape: found [1, 150527], expected [n, 150528]"), "{error}");
        assert!(matches!(client.is_ready("n").await, Err(InferError::NotFound(_))));
    });
}

#[test]
fn every_test_holds_by_udp_too() {
    testing::run_again_by_udp(None);
}

#[test]
fn losing_the_scheduler_ends_what_is_outstanding_and_the_frontend_joins_again() {
    with_fabric(async |client, faults| {
        faults.send(Fault::LoseScheduler).unwrap();
        let error = loop {
            // Until the fabric has taken the fault in, requests are answered.
            if let Err(error) = client.infer(request(2, 1).0).await {
                break error;
            }
        };
        assert_eq!(error, InferError::SchedulerLost);
        until_ready(client).await;
        is_served(client, 3, 2).await;
    });
}

#[test]
fn a_fenced_backends_tasks_run_again_elsewhere() {
    with_fabric(async |client, faults| {
        is_served(client, 1, 1).await;
        faults.send(Fault::Fence).unwrap();
        for number in 2..10 {
            let (request, digests) = request(2, number);
            let inferred = client.infer(request).await.unwrap();
            assert_eq!(&inferred.outputs[0].data[..], &digests[..]);
            if inferred.timing.backend == BackendId(2) {
                return;
            }
        }
        panic!("no request was answered by the second backend");
    });
}

/// Without windows a backend's key opens the arena over its own link, while that lasts.
#[test]
fn without_windows_a_key_is_its_links_alone() {
    for theft in [Fault::Borrow, Fault::Outlive] {
        with_one(true, async |client, faults| {
            is_served(client, 1, 1).await;
            faults.send(theft).unwrap();
            for number in 2..10 {
                let (request, digests) = request(2, number);
                let inferred = client.infer(request).await.unwrap();
                assert_eq!(&inferred.outputs[0].data[..], &digests[..]);
            }
        });
    }
}
