//! One real endpoint whose peer is the test: it writes every packet itself and sees every answer.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use soft_roce::{
    Completion, Endpoint, EndpointConfig, HeapMemory, Identification, Operation, PathMtu, Peer, Psn, QueuePairConfig,
    QueuePairNumber, QueuePairState, RecvRequest, RegionConfig, RegionHandle, Segment, SendRequest, Timestamp,
    wire::{
        Aeth, Packet, PacketKind, Repr, Reth, Syndrome,
        icrc::{self, Path},
    },
};

/// The queue pair number that the test plays.
pub(crate) const PEER: QueuePairNumber = QueuePairNumber(0x22);
/// The first sequence number that the test sends.
pub(crate) const RQ_PSN: Psn = Psn::new(500);
/// The first that the endpoint sends.
pub(crate) const SQ_PSN: Psn = Psn::new(900);

/// A packet, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decoded {
    pub repr: Repr,
    pub payload: Vec<u8>,
}

impl Decoded {
    pub(crate) fn kind(&self) -> PacketKind {
        self.repr.opcode.kind
    }

    /// Number, syndrome and count of messages, if it has an AETH.
    pub(crate) fn aeth(&self) -> (u32, u8, u32) {
        let aeth = self.repr.aeth.expect("an AETH");
        (self.repr.psn.value(), aeth.syndrome.value(), aeth.message_sequence)
    }
}

pub(crate) struct Scripted {
    pub endpoint: Endpoint,
    pub number: QueuePairNumber,
    pub now: Timestamp,
    pub local: SocketAddr,
    pub remote: SocketAddr,
}

impl Scripted {
    pub(crate) fn new(config: QueuePairConfig, path_mtu: PathMtu) -> Self {
        let mut scripted = Self::initialised(config);
        let peer = scripted.peer(path_mtu);
        scripted.endpoint.connect_queue_pair(scripted.number, peer).expect("a fresh queue pair connects");
        scripted
    }

    /// Both ends agree to acknowledge what does not ask for it within this time.
    pub(crate) fn agreed(config: QueuePairConfig, path_mtu: PathMtu, delay: Duration) -> Self {
        let mut scripted = Self::initialised(config);
        let peer = Peer { ack_delay: Some(delay), ..scripted.peer(path_mtu) };
        scripted.endpoint.connect_queue_pair(scripted.number, peer).expect("a fresh queue pair connects");
        scripted
    }

    /// With its queue pair in INIT.
    pub(crate) fn initialised(config: QueuePairConfig) -> Self {
        let (local, remote) = ("127.0.0.1:4791".parse().unwrap(), "127.0.0.2:4791".parse().unwrap());
        let mut endpoint = Endpoint::new(EndpointConfig::new(local, 7));
        let number = endpoint.create_queue_pair(config).expect("a queue pair");
        Self { endpoint, number, now: Timestamp(0), local, remote }
    }

    pub(crate) fn peer(&self, path_mtu: PathMtu) -> Peer {
        Peer {
            address: self.remote,
            queue_pair: PEER,
            rq_psn: RQ_PSN,
            sq_psn: SQ_PSN,
            path_mtu,
            identification: Identification::SegmentIndex,
            ack_delay: None,
        }
    }

    pub(crate) fn register(
        &mut self,
        bytes: Vec<u8>,
        config: impl Into<RegionConfig>,
    ) -> (Arc<HeapMemory>, RegionHandle) {
        let memory = HeapMemory::new(bytes);
        let handle = self.endpoint.register(memory.clone(), config).expect("room for a region");
        (memory, handle)
    }

    /// A request of ours, `offset` packets after the first.
    pub(crate) fn request(&self, kind: PacketKind, offset: u32) -> Repr {
        Repr::reliable(kind, self.number, RQ_PSN.plus(offset))
    }

    /// A READ request.
    pub(crate) fn read(&self, offset: u32, reth: Reth) -> Repr {
        Repr { reth: Some(reth), ack_request: true, ..self.request(PacketKind::ReadRequest, offset) }
    }

    /// An answer to the packet that the endpoint sent `offset` packets after its first.
    pub(crate) fn response(&self, kind: PacketKind, offset: u32, syndrome: Syndrome) -> Repr {
        let aeth = kind.has_aeth().then_some(Aeth { syndrome, message_sequence: 0 });
        Repr { aeth, ..Repr::reliable(kind, self.number, SQ_PSN.plus(offset)) }
    }

    /// The bytes of a packet from us with a right ICRC.
    pub(crate) fn encode(&self, repr: Repr, payload: &[u8]) -> Vec<u8> {
        let repr = Repr { payload_bytes: payload.len(), ..repr };
        let mut bytes = vec![0; repr.packet_bytes()];
        repr.emit(&mut bytes).copy_from_slice(payload);
        let covered = bytes.len() - 4;
        let icrc = icrc::compute(&Path::segment(self.remote, self.local, 0), &bytes[..covered]);
        bytes[covered..].copy_from_slice(&icrc.to_le_bytes());
        bytes
    }

    /// Sends a packet and returns what the endpoint sends then.
    pub(crate) fn deliver(&mut self, repr: Repr, payload: &[u8]) -> Vec<Decoded> {
        let bytes = self.encode(repr, payload);
        self.endpoint.handle_packet(self.now, self.remote, &bytes);
        self.transmitted()
    }

    /// Everything that the endpoint has to send.
    pub(crate) fn transmitted(&mut self) -> Vec<Decoded> {
        let mut buf = vec![0; 65_507];
        let mut packets = Vec::new();
        while let Some(transmit) = self.endpoint.poll_transmit(self.now, &mut buf, 128) {
            assert_eq!(transmit.destination, self.remote);
            for (segment, bytes) in buf[..transmit.bytes].chunks(transmit.segment_bytes).enumerate() {
                let packet = Packet::new_checked(bytes).expect("we send whole packets");
                let path = Path::segment(self.local, self.remote, segment as u16);
                assert_eq!(icrc::compute(&path, packet.covered()), packet.icrc(), "segment {segment}");
                packets.push(Decoded { repr: Repr::parse(&packet), payload: packet.payload().to_vec() });
            }
        }
        packets
    }

    /// Moves the clock to the next timer and returns what the endpoint sends then.
    pub(crate) fn expire(&mut self) -> Vec<Decoded> {
        self.now = self.endpoint.poll_timeout().expect("a timer runs").max(self.now);
        self.endpoint.handle_timeout(self.now);
        self.transmitted()
    }

    pub(crate) fn post_recv(&mut self, id: u64, segment: Segment) {
        self.endpoint.post_recv(self.number, RecvRequest { id, segment }).expect("room for a receive");
    }

    pub(crate) fn post_send(&mut self, id: u64, operation: Operation) {
        self.endpoint.post_send(self.number, SendRequest::new(id, operation)).expect("room for a request");
    }

    pub(crate) fn completions(&mut self) -> Vec<Completion> {
        std::iter::from_fn(|| self.endpoint.poll_completion()).collect()
    }

    pub(crate) fn state(&self) -> QueuePairState {
        self.endpoint.state(self.number).expect("the queue pair exists")
    }
}
