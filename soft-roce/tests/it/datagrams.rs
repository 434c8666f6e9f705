//! Datagram queue pairs: what arrives with its sender's address, what is dropped without a word, how errors end them.

use std::{net::SocketAddr, sync::Arc};

use soft_roce::{
    Access, AsyncEvent, Completion, CompletionOpcode, CreateError, DATAGRAM_HEADER_BYTES, DatagramAddress,
    DatagramConfig, DatagramRequest, Endpoint, EndpointConfig, HeapMemory, ModifyError, Operation, PathMtu, PostError,
    ProtectionDomain, QueuePairConfig, QueuePairNumber, QueuePairState, RecvRequest, RegionConfig, RegionHandle,
    Segment, SendRequest, SharedReceiveQueueConfig, SharedReceiveQueueNumber, Status, Timestamp,
};

const NOW: Timestamp = Timestamp(1);
const QUEUE_KEY: u32 = 0x1111_1111;
const V4: [&str; 2] = ["127.0.0.1:4791", "127.0.0.2:4791"];
const V6: [&str; 2] = ["[fd00::1]:4791", "[fd00::2]:4791"];

struct World {
    ends: [Endpoint; 2],
    addresses: [SocketAddr; 2],
    numbers: [QueuePairNumber; 2],
    memory: [Arc<HeapMemory>; 2],
    handles: [RegionHandle; 2],
    next_id: u64,
}

impl World {
    fn new(addresses: [&str; 2]) -> Self {
        let addresses = addresses.map(|address| address.parse().expect("an address"));
        let mut ends = addresses.map(|address| Endpoint::new(EndpointConfig::new(address, 7)));
        let config = DatagramConfig { send_depth: 2, recv_depth: 2, ..DatagramConfig::new(QUEUE_KEY) };
        let numbers = [0, 1].map(|side| {
            let number = ends[side].create_datagram_queue_pair(config).expect("room");
            ends[side].modify_datagrams_to_ready_to_receive(number).expect("INIT to RTR");
            ends[side].modify_to_ready_to_send(number).expect("RTR to RTS");
            number
        });
        let memory = [0, 1].map(|side| HeapMemory::new((0..4_096).map(|at| (at / 7) as u8 ^ side).collect()));
        let handles = [0, 1].map(|side| ends[side].register(memory[side].clone(), Access::LOCAL).expect("room"));
        Self { ends, addresses, numbers, memory, handles, next_id: 0 }
    }

    /// The receiver is one that takes from a shared receive queue, of another domain than its own.
    fn sharing() -> (Self, SharedReceiveQueueNumber) {
        let mut world = Self::new(V4);
        let domain = ProtectionDomain(4);
        let receiver = &mut world.ends[1];
        let config = SharedReceiveQueueConfig { protection_domain: domain, depth: 4, max_sge: 4 };
        let shared = receiver.create_shared_receive_queue(config).expect("room");
        let config = DatagramConfig { shared_receive_queue: Some(shared), ..DatagramConfig::new(QUEUE_KEY) };
        world.numbers[1] = receiver.create_datagram_queue_pair(config).expect("room");
        receiver.modify_datagrams_to_ready_to_receive(world.numbers[1]).expect("INIT to RTR");
        let config = RegionConfig { protection_domain: domain, ..Access::LOCAL.into() };
        world.handles[1] = receiver.register(world.memory[1].clone(), config).expect("room");
        (world, shared)
    }

    fn receive_shared(&mut self, shared: SharedReceiveQueueNumber, id: u64, bytes: u32) {
        let segment = Segment { lkey: self.handles[1].lkey, offset: 100, bytes };
        self.ends[1].post_shared_recv(shared, RecvRequest { id, segment }).expect("room");
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.ends[1].poll_event()).collect()
    }

    fn request(&mut self, bytes: u32) -> DatagramRequest {
        self.next_id += 1;
        DatagramRequest {
            id: self.next_id,
            local: Segment { lkey: self.handles[0].lkey, offset: 0, bytes },
            immediate: None,
            to: DatagramAddress { address: self.addresses[1], queue_pair: self.numbers[1] },
            queue_key: QUEUE_KEY,
            signalled: true,
            solicited: false,
        }
    }

    fn post(&mut self, request: DatagramRequest) -> Result<(), PostError> {
        self.ends[0].post_datagram(self.numbers[0], request)
    }

    fn receive(&mut self, id: u64, bytes: u32) {
        let segment = Segment { lkey: self.handles[1].lkey, offset: 100, bytes };
        self.ends[1].post_recv(self.numbers[1], RecvRequest { id, segment }).expect("room");
    }

    /// Carries everything over; how many datagrams that were.
    fn carry(&mut self) -> usize {
        let mut buf = vec![0; 65_507];
        let mut carried = 0;
        while let Some(sent) = self.ends[0].poll_transmit(NOW, &mut buf, 64) {
            assert_eq!((sent.destination, sent.segments), (self.addresses[1], 1));
            self.ends[1].handle_packet(NOW, self.addresses[0], &buf[..sent.bytes]);
            carried += 1;
        }
        carried
    }

    fn done(&mut self, side: usize) -> Vec<Completion> {
        std::iter::from_fn(|| self.ends[side].poll_completion()).collect()
    }

    fn statuses(&mut self, side: usize) -> Vec<(u64, Status)> {
        self.done(side).iter().map(|done| (done.id, done.status)).collect()
    }
}

#[test]
fn a_datagram_arrives_behind_the_address_of_its_sender() {
    for (addresses, immediate, bytes) in [(V4, None, 50), (V4, Some(9), 1_024), (V6, None, 0), (V6, Some(3), 7)] {
        let mut world = World::new(addresses);
        world.receive(5, 2_000);
        let request = DatagramRequest { immediate, solicited: true, ..world.request(bytes) };
        world.post(request).unwrap();
        assert_eq!(world.carry(), 1);
        let header_bytes = DATAGRAM_HEADER_BYTES as u32;
        let [sent] = world.done(0)[..] else { panic!("one completion") };
        assert_eq!(
            (sent.id, sent.status, sent.opcode, sent.bytes),
            (1, Status::Success, CompletionOpcode::Send, bytes)
        );
        let [received] = world.done(1)[..] else { panic!("one completion") };
        assert_eq!((received.id, received.bytes, received.immediate), (5, header_bytes + bytes, immediate));
        let source = DatagramAddress { address: world.addresses[0], queue_pair: world.numbers[0] };
        assert_eq!((received.source, received.solicited), (Some(source), true));
        let buffer = world.memory[1].to_vec()[100..][..received.bytes as usize].to_vec();
        let (header, payload) = buffer.split_at(DATAGRAM_HEADER_BYTES);
        assert!(payload == &world.memory[0].to_vec()[..bytes as usize]);
        // BTH, DETH, ImmDt, payload and pad, ICRC.
        let packet = 12 + 8 + if immediate.is_some() { 4 } else { 0 } + bytes.next_multiple_of(4) + 4;
        match (world.addresses[0], world.addresses[1]) {
            (SocketAddr::V4(from), SocketAddr::V4(to)) => {
                assert_eq!(header[..21], [[0; 20].as_slice(), &[0x45]].concat());
                assert_eq!(header[22..24], (20 + 8 + packet as u16).to_be_bytes());
                assert_eq!((&header[32..36], &header[36..]), (&from.ip().octets()[..], &to.ip().octets()[..]));
            }
            (SocketAddr::V6(from), SocketAddr::V6(to)) => {
                assert_eq!((header[0], &header[4..6]), (0x60, &(8 + packet as u16).to_be_bytes()[..]));
                assert_eq!((&header[8..24], &header[24..]), (&from.ip().octets()[..], &to.ip().octets()[..]));
            }
            _ => panic!("one family"),
        }
    }
}

#[test]
fn what_nobody_can_take_is_dropped_and_counted() {
    let mut world = World::new(V4);
    // No receive; one that is too short by a byte; another key; a damaged bit; no such queue pair.
    let request = world.request(100);
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.ends[1].counters().dropped_no_receive, 1);
    world.receive(1, 139);
    let request = world.request(100);
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.ends[1].counters().dropped_no_receive, 2);
    let request = DatagramRequest { queue_key: QUEUE_KEY ^ 1, ..world.request(10) };
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.ends[1].counters().dropped_queue_key, 1);
    let request = world.request(10);
    world.post(request).unwrap();
    let mut buf = vec![0; 65_507];
    let sent = world.ends[0].poll_transmit(NOW, &mut buf, 1).expect("a datagram");
    buf[25] ^= 4;
    // A sender may be a kernel, which leaves 15 bits of the ICRC to check: this damage is within them.
    world.ends[1].handle_packet(NOW, world.addresses[0], &buf[..sent.bytes]);
    assert_eq!(world.ends[1].counters().dropped_icrc, 1);
    let to = DatagramAddress { queue_pair: QueuePairNumber(77), ..world.request(0).to };
    let request = DatagramRequest { to, ..world.request(10) };
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.ends[1].counters().dropped_no_queue_pair, 1);
    assert_eq!((world.done(1), world.done(0).len()), (vec![], 5), "senders never know");
    // With the top bit set, the sender's own key counts, which fits.
    let request = DatagramRequest { queue_key: 0x8000_0000, ..world.request(10) };
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.statuses(1), [(1, Status::Success)]);
}

#[test]
fn posts_are_refused_with_the_reason() {
    let mut world = World::new(V4);
    let request = world.request(1_025);
    assert_eq!(world.post(request), Err(PostError::TooLong { bytes: 1_025, limit: 1_024 }));
    let to = DatagramAddress { address: V6[0].parse().unwrap(), ..request.to };
    let wrong = DatagramRequest { to, ..world.request(8) };
    assert_eq!(world.post(wrong), Err(PostError::Destination(to)));
    let request = world.request(8);
    assert_eq!([world.post(request), world.post(request)], [Ok(()); 2]);
    assert_eq!(world.post(request), Err(PostError::QueueFull { key: "send_depth", depth: 2 }));
    // Each service has its own requests.
    let send = SendRequest::new(0, Operation::Send { local: Segment::default() });
    assert_eq!(world.ends[0].post_send(world.numbers[0], send), Err(PostError::Service));
    let connected = world.ends[0].create_queue_pair(QueuePairConfig::default()).unwrap();
    assert_eq!(world.ends[0].post_datagram(connected, request), Err(PostError::Service));
    let idle = world.ends[0].create_datagram_queue_pair(DatagramConfig::new(1)).unwrap();
    assert_eq!(world.ends[0].post_datagram(idle, request), Err(PostError::State(QueuePairState::Init)));
}

#[test]
fn a_send_that_fails_ends_the_send_queue_only() {
    let mut world = World::new(V4);
    let sender = world.numbers[0];
    let bad = world.request(8);
    world.post(DatagramRequest { local: Segment { lkey: 0xbad, ..bad.local }, ..bad }).unwrap();
    let good = world.request(8);
    world.post(good).unwrap();
    assert_eq!(world.carry(), 0);
    assert_eq!(world.statuses(0), [(1, Status::LocalProtection), (2, Status::Flushed)]);
    assert_eq!(world.ends[0].state(sender), Some(QueuePairState::SendQueueError));
    world.post(DatagramRequest { id: 3, ..good }).unwrap();
    assert_eq!(world.statuses(0), [(3, Status::Flushed)]);
    world.ends[0].modify_to_ready_to_send(sender).expect("SQE to RTS");
    world.receive(0, 100);
    world.post(DatagramRequest { id: 4, ..good }).unwrap();
    assert_eq!((world.carry(), world.statuses(0)), (1, vec![(4, Status::Success)]));
}

#[test]
fn a_receive_that_fails_ends_the_queue_pair() {
    let mut world = World::new(V4);
    let receiver = world.numbers[1];
    let segment = Segment { lkey: 0xbad, offset: 0, bytes: 100 };
    world.ends[1].post_recv(receiver, RecvRequest { id: 1, segment }).unwrap();
    world.receive(2, 100);
    let request = world.request(8);
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.statuses(1), [(1, Status::LocalProtection), (2, Status::Flushed)]);
    assert_eq!(world.ends[1].poll_event(), Some(AsyncEvent::QueuePairFatal(receiver)));
    assert_eq!(world.ends[1].state(receiver), Some(QueuePairState::Error));
}

#[test]
fn datagrams_are_held_back_while_the_send_queue_drains() {
    let mut world = World::new(V4);
    let sender = world.numbers[0];
    world.ends[0].modify_to_send_queue_drain(sender).unwrap();
    assert_eq!(world.ends[0].poll_event(), Some(AsyncEvent::SendQueueDrained(sender)));
    let request = world.request(8);
    world.post(request).unwrap();
    assert_eq!(world.carry(), 0);
    world.ends[0].modify_to_ready_to_send(sender).unwrap();
    assert_eq!(world.carry(), 1);
    use QueuePairState::{Error, ReadyToSend};
    assert!(world.ends[0].modify_to_error(sender));
    let refused = world.ends[0].modify_to_ready_to_send(sender);
    assert_eq!(refused, Err(ModifyError::Transition { from: Error, to: ReadyToSend }));
    assert!(world.ends[0].modify_to_reset(sender) && world.ends[0].destroy_queue_pair(sender));
    assert_eq!(world.ends[0].state(sender), None);
}

#[test]
fn a_datagram_longer_than_the_path_mtu_of_the_receiver_is_malformed() {
    let mut world = World::new(V4);
    let config = DatagramConfig { path_mtu: PathMtu::Mtu256, ..DatagramConfig::new(QUEUE_KEY) };
    let narrow = world.ends[1].create_datagram_queue_pair(config).unwrap();
    world.ends[1].modify_datagrams_to_ready_to_receive(narrow).unwrap();
    let to = DatagramAddress { queue_pair: narrow, ..world.request(0).to };
    let request = DatagramRequest { to, ..world.request(257) };
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.ends[1].counters().dropped_malformed, 1);
}

#[test]
fn datagrams_take_shared_receives() {
    let (mut world, shared) = World::sharing();
    let send = |world: &mut World, bytes| {
        let request = world.request(bytes);
        world.post(request).unwrap();
        world.carry();
        world.statuses(1)
    };
    assert_eq!((send(&mut world, 8), world.ends[1].counters().dropped_no_receive), (vec![], 1), "none is posted");
    for (id, bytes) in [(5, 60), (6, 200), (7, 200)] {
        world.receive_shared(shared, id, bytes);
    }
    assert!(world.ends[1].set_shared_receive_queue_limit(shared, 2));
    assert_eq!((send(&mut world, 21), world.ends[1].counters().dropped_no_receive), (vec![], 2), "a byte too long");
    assert_eq!((send(&mut world, 20), world.events()), (vec![(5, Status::Success)], vec![]));
    let buffer = world.memory[1].to_vec()[100 + DATAGRAM_HEADER_BYTES..][..20].to_vec();
    assert_eq!(buffer, world.memory[0].to_vec()[..20]);
    let low = AsyncEvent::SharedReceiveQueueLow(shared);
    assert_eq!((send(&mut world, 150), world.events()), (vec![(6, Status::Success)], vec![low]));
    // Its end leaves the last one to the others.
    let receiver = world.numbers[1];
    assert!(world.ends[1].modify_to_error(receiver) && world.ends[1].modify_to_error(receiver));
    assert_eq!((world.statuses(1), world.events()), (vec![], vec![AsyncEvent::LastReceiveReached(receiver)]));
    let config = DatagramConfig { shared_receive_queue: Some(shared), ..DatagramConfig::new(QUEUE_KEY) };
    world.numbers[1] = world.ends[1].create_datagram_queue_pair(config).unwrap();
    world.ends[1].modify_datagrams_to_ready_to_receive(world.numbers[1]).unwrap();
    assert_eq!(send(&mut world, 9), [(7, Status::Success)]);
}

#[test]
fn a_shared_receive_that_fails_ends_the_queue_pair_alone() {
    let (mut world, shared) = World::sharing();
    let receiver = world.numbers[1];
    let segment = Segment { lkey: 0xbad, offset: 0, bytes: 100 };
    world.ends[1].post_shared_recv(shared, RecvRequest { id: 1, segment }).unwrap();
    world.receive_shared(shared, 2, 100);
    let request = world.request(8);
    world.post(request).unwrap();
    world.carry();
    assert_eq!(world.statuses(1), [(1, Status::LocalProtection)]);
    let told = [AsyncEvent::QueuePairFatal(receiver), AsyncEvent::LastReceiveReached(receiver)];
    assert_eq!((world.events(), world.ends[1].state(receiver)), (told.to_vec(), Some(QueuePairState::Error)));
    let receive = RecvRequest { id: 3, segment };
    assert_eq!(world.ends[1].post_recv(receiver, receive), Err(PostError::ReceivesAreShared));
    let unknown = SharedReceiveQueueNumber(99);
    let config = DatagramConfig { shared_receive_queue: Some(unknown), ..DatagramConfig::new(QUEUE_KEY) };
    let refused = world.ends[1].create_datagram_queue_pair(config);
    assert_eq!(refused, Err(CreateError::UnknownSharedReceiveQueue(unknown)));
    assert!(!world.ends[1].destroy_shared_receive_queue(shared), "in use");
    assert!(world.ends[1].destroy_queue_pair(receiver) && world.ends[1].destroy_shared_receive_queue(shared));
    assert_eq!(world.statuses(1), []);
}
