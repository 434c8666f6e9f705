//! Receives that many queue pairs share: who takes them, in which domain they are, what is told when they run short.

use crate::common::scripted::{PEER, RQ_PSN, SQ_PSN, Scripted};
use soft_roce::{
    Access, AsyncEvent, CreateError, Identification, PathMtu, Peer, PostError, ProtectionDomain, QueuePairConfig,
    QueuePairNumber, RecvRequest, RegionConfig, Segment, SharedReceiveQueueConfig, SharedReceiveQueueNumber, Status,
    wire::{PacketKind, Repr},
};

const HOME: ProtectionDomain = ProtectionDomain(4);

struct World {
    peer: Scripted,
    shared: SharedReceiveQueueNumber,
    queue_pairs: [QueuePairNumber; 2],
    lkey: u32,
}

impl World {
    /// Two queue pairs of domain 0 that share receives of domain 4.
    fn new() -> Self {
        let mut peer = Scripted::initialised(QueuePairConfig::default());
        let config = SharedReceiveQueueConfig { protection_domain: HOME, depth: 4, max_sge: 4 };
        let shared = peer.endpoint.create_shared_receive_queue(config).unwrap();
        let config = QueuePairConfig { shared_receive_queue: Some(shared), ..QueuePairConfig::default() };
        let queue_pairs = [0, 1].map(|_| {
            let number = peer.endpoint.create_queue_pair(config).unwrap();
            let connection = Peer {
                address: peer.remote,
                queue_pair: PEER,
                rq_psn: RQ_PSN,
                sq_psn: SQ_PSN,
                path_mtu: PathMtu::Mtu256,
                identification: Identification::SegmentIndex,
                ack_delay: None,
            };
            peer.endpoint.connect_queue_pair(number, connection).unwrap();
            number
        });
        let config = RegionConfig { protection_domain: HOME, ..Access::LOCAL.into() };
        let lkey = peer.register(vec![0; 4_096], config).1.lkey;
        Self { peer, shared, queue_pairs, lkey }
    }

    fn post(&mut self, id: u64) -> Result<(), PostError> {
        let segment = Segment { lkey: self.lkey, offset: id as usize * 512, bytes: 512 };
        self.peer.endpoint.post_shared_recv(self.shared, RecvRequest { id, segment })
    }

    /// A packet of a SEND to one of them; what it is answered with.
    fn send(&mut self, side: usize, kind: PacketKind, offset: u32, bytes: usize) -> Vec<u8> {
        let psn = RQ_PSN.plus(offset);
        let repr = Repr { ack_request: true, ..Repr::reliable(kind, self.queue_pairs[side], psn) };
        let answers = self.peer.deliver(repr, &vec![side as u8 + 1; bytes]);
        answers.iter().map(|answer| answer.aeth().1).collect()
    }

    fn done(&mut self) -> Vec<(QueuePairNumber, u64, Status)> {
        self.peer.completions().iter().map(|done| (done.queue_pair, done.id, done.status)).collect()
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.peer.endpoint.poll_event()).collect()
    }
}

#[test]
fn each_message_takes_one_when_it_begins() {
    let mut world = World::new();
    let [left, right] = world.queue_pairs;
    assert_eq!(world.send(0, PacketKind::SendOnly, 0, 8), [0x21], "none is posted");
    for id in 0..3 {
        world.post(id).unwrap();
    }
    // Two messages interleave: each keeps what it took.
    assert_eq!(world.send(0, PacketKind::SendFirst, 0, 256), [0x1f]);
    assert_eq!(world.send(1, PacketKind::SendOnly, 0, 8), [0x1f]);
    assert_eq!(world.send(0, PacketKind::SendLast, 1, 8), [0x1f]);
    assert_eq!(world.send(1, PacketKind::SendOnly, 1, 8), [0x1f]);
    let success = Status::Success;
    assert_eq!(world.done(), [(right, 1, success), (left, 0, success), (right, 2, success)]);
    assert_eq!(world.send(1, PacketKind::SendOnly, 2, 8), [0x21]);
}

#[test]
fn an_error_keeps_what_is_not_in_use_for_the_others() {
    let mut world = World::new();
    let [left, right] = world.queue_pairs;
    for id in 0..2 {
        world.post(id).unwrap();
    }
    world.send(0, PacketKind::SendFirst, 0, 256);
    assert!(world.peer.endpoint.modify_to_error(left));
    assert_eq!(world.done(), [(left, 0, Status::Flushed)]);
    assert_eq!(world.events(), [AsyncEvent::LastReceiveReached(left)]);
    world.send(1, PacketKind::SendOnly, 0, 8);
    assert_eq!(world.done(), [(right, 1, Status::Success)]);
}

#[test]
fn a_message_too_long_for_a_shared_receive_fails_that_receive() {
    let mut world = World::new();
    world.post(0).unwrap();
    world.post(1).unwrap();
    for offset in 0..2 {
        let kind = if offset == 0 { PacketKind::SendFirst } else { PacketKind::SendMiddle };
        assert_eq!(world.send(0, kind, offset, 256), [0x1f]);
    }
    assert_eq!(world.send(0, PacketKind::SendLast, 2, 1), [0x61]);
    let left = world.queue_pairs[0];
    assert_eq!(world.done(), [(left, 0, Status::LocalLength)]);
    assert_eq!(world.events(), [AsyncEvent::RequestError(left), AsyncEvent::LastReceiveReached(left)]);
}

#[test]
fn running_short_is_told_once_when_asked() {
    let mut world = World::new();
    for id in 0..3 {
        world.post(id).unwrap();
    }
    assert!(world.peer.endpoint.set_shared_receive_queue_limit(world.shared, 2));
    world.send(0, PacketKind::SendOnly, 0, 8);
    assert_eq!(world.events(), []);
    world.send(0, PacketKind::SendOnly, 1, 8);
    assert_eq!(world.events(), [AsyncEvent::SharedReceiveQueueLow(world.shared)]);
    world.send(0, PacketKind::SendOnly, 2, 8);
    assert_eq!(world.events(), [], "once");
}

#[test]
fn refusals_name_the_reason_and_the_queue_outlives_its_users() {
    let mut world = World::new();
    let (shared, [left, right]) = (world.shared, world.queue_pairs);
    for id in 0..4 {
        world.post(id).unwrap();
    }
    assert_eq!(world.post(4), Err(PostError::QueueFull { key: "depth", depth: 4 }));
    let endpoint = &mut world.peer.endpoint;
    let receive = RecvRequest { id: 0, segment: Segment::default() };
    assert_eq!(endpoint.post_recv(left, receive), Err(PostError::ReceivesAreShared));
    let unknown = SharedReceiveQueueNumber(99);
    assert_eq!(endpoint.post_shared_recv(unknown, receive), Err(PostError::UnknownSharedReceiveQueue));
    let config = QueuePairConfig { shared_receive_queue: Some(unknown), ..QueuePairConfig::default() };
    assert_eq!(endpoint.create_queue_pair(config), Err(CreateError::UnknownSharedReceiveQueue(unknown)));
    let config = SharedReceiveQueueConfig { protection_domain: HOME, depth: 0, max_sge: 4 };
    assert!(matches!(endpoint.create_shared_receive_queue(config), Err(CreateError::Config { key: "depth", .. })));
    assert!(!endpoint.destroy_shared_receive_queue(shared), "in use");
    assert!(endpoint.destroy_queue_pair(left) && endpoint.destroy_queue_pair(right));
    assert!(endpoint.destroy_shared_receive_queue(shared) && !endpoint.destroy_shared_receive_queue(shared));
    assert_eq!(world.done(), []);
}
