//! Two endpoints, a network between them that can do everything a network does, and a clock that only tests move.

pub(crate) mod scripted;

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use soft_roce::{
    Completion, Endpoint, EndpointConfig, HeapMemory, Identification, PathMtu, Peer, Psn, QueuePairConfig,
    QueuePairNumber, RecvRequest, RegionConfig, RegionHandle, Segment, SharedReceiveQueueConfig,
    SharedReceiveQueueNumber, Timestamp,
};

/// What the network does to packets; probabilities out of 1,000.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    pub loss: u32,
    pub duplicate: u32,
    pub reorder: u32,
    pub corrupt: u32,
    /// Extra delay of a reordered packet, at most.
    pub reorder_by: Duration,
    /// Nothing passes between these instants.
    pub partition: Option<(Timestamp, Timestamp)>,
    /// The packet with this number, counted from 0 over both directions, is lost.
    pub lost: Option<u64>,
    /// Nanoseconds that a byte occupies the wire in its direction.
    pub byte_nanos: f64,
}

/// One way.
pub(crate) const LATENCY: Duration = Duration::from_micros(5);

/// Two endpoints with a queue pair each, connected to one another.
pub(crate) struct Pair {
    pub now: Timestamp,
    pub ends: [Endpoint; 2],
    pub addresses: [SocketAddr; 2],
    pub queue_pairs: [QueuePairNumber; 2],
    /// Where they take their receives from, unless from queues of their own.
    pub shared: [Option<SharedReceiveQueueNumber>; 2],
    pub faults: Faults,
    pub completions: [Vec<Completion>; 2],
    /// Every packet that was sent: who sent it, and its bytes.
    pub sent: Vec<(usize, Vec<u8>)>,
    pub record: bool,
    /// Packets given to the network so far.
    pub carried: u64,
    /// When the wire towards each end is free again.
    free_at: [Timestamp; 2],
    in_flight: BTreeMap<(Timestamp, u64), (usize, Vec<u8>)>,
    sequence: u64,
    rng: ChaCha8Rng,
    buf: Vec<u8>,
    segments_max: usize,
}

impl Pair {
    pub(crate) fn new(seed: u64, config: QueuePairConfig, path_mtu: PathMtu) -> Self {
        Self::with_psns(seed, config, path_mtu, None)
    }

    pub(crate) fn with_psns(seed: u64, config: QueuePairConfig, path_mtu: PathMtu, psns: Option<[Psn; 2]>) -> Self {
        Self::build(seed, config, path_mtu, psns, false, None)
    }

    pub(crate) fn with_shared_receive_queue(
        seed: u64,
        config: QueuePairConfig,
        path_mtu: PathMtu,
        shared: bool,
    ) -> Self {
        Self::build(seed, config, path_mtu, None, shared, None)
    }

    /// Both ends agree to acknowledge what does not ask for it within this time.
    pub(crate) fn with_ack_delay(
        seed: u64,
        config: QueuePairConfig,
        path_mtu: PathMtu,
        shared: bool,
        ack_delay: Option<Duration>,
    ) -> Self {
        Self::build(seed, config, path_mtu, None, shared, ack_delay)
    }

    fn build(
        seed: u64,
        config: QueuePairConfig,
        path_mtu: PathMtu,
        psns: Option<[Psn; 2]>,
        shared: bool,
        ack_delay: Option<Duration>,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let addresses: [SocketAddr; 2] =
            ["127.0.0.1:4791", "127.0.0.2:4791"].map(|address| address.parse().expect("an address"));
        let mut ends = addresses.map(|address| Endpoint::new(EndpointConfig::new(address, rng.next_u64())));
        let shared = [0, 1].map(|side| {
            let config = SharedReceiveQueueConfig {
                protection_domain: config.protection_domain,
                depth: config.recv_depth,
                max_sge: config.max_sge,
            };
            shared.then(|| ends[side].create_shared_receive_queue(config).expect("room"))
        });
        let queue_pairs = [0, 1].map(|side| {
            let config = QueuePairConfig { shared_receive_queue: shared[side], ..config };
            ends[side].create_queue_pair(config).expect("a queue pair")
        });
        let psns = psns.unwrap_or_else(|| [0, 1].map(|side| ends[side].random_psn()));
        for side in [0, 1] {
            let peer = Peer {
                address: addresses[1 - side],
                queue_pair: queue_pairs[1 - side],
                rq_psn: psns[1 - side],
                sq_psn: psns[side],
                path_mtu,
                identification: Identification::SegmentIndex,
                ack_delay,
            };
            ends[side].connect_queue_pair(queue_pairs[side], peer).expect("a fresh queue pair connects");
        }
        Self {
            now: Timestamp(1_000_000),
            ends,
            addresses,
            queue_pairs,
            shared,
            faults: Faults::default(),
            completions: [Vec::new(), Vec::new()],
            sent: Vec::new(),
            record: false,
            carried: 0,
            free_at: [Timestamp::default(); 2],
            in_flight: BTreeMap::new(),
            sequence: 0,
            segments_max: 1 + rng.next_u32() as usize % 64,
            rng,
            buf: vec![0; 65_507],
        }
    }

    /// Registers `bytes` at one end.
    pub(crate) fn register(
        &mut self,
        side: usize,
        bytes: Vec<u8>,
        config: impl Into<RegionConfig>,
    ) -> (std::sync::Arc<HeapMemory>, RegionHandle) {
        let memory = HeapMemory::new(bytes);
        let handle = self.ends[side].register(memory.clone(), config).expect("room for a region");
        (memory, handle)
    }

    /// Posts a receive for the connection.
    pub(crate) fn post_recv(&mut self, side: usize, request: RecvRequest) {
        self.post_recv_list(side, request, &[]);
    }

    /// The same, with further pieces.
    pub(crate) fn post_recv_list(&mut self, side: usize, request: RecvRequest, more: &[Segment]) {
        let end = &mut self.ends[side];
        match self.shared[side] {
            Some(shared) => end.post_shared_recv_list(shared, request, more),
            None => end.post_recv_list(self.queue_pairs[side], request, more),
        }
        .expect("room for a receive");
    }

    /// A number below `limit`.
    pub(crate) fn random(&mut self, limit: u32) -> u32 {
        self.rng.next_u32() % limit
    }

    fn chance(&mut self, out_of_1000: u32) -> bool {
        self.random(1_000) < out_of_1000
    }

    /// Puts a packet on the wire.
    pub(crate) fn inject(&mut self, to: usize, bytes: Vec<u8>, delay: Duration) {
        self.sequence += 1;
        self.in_flight.insert((self.now + delay, self.sequence), (to, bytes));
    }

    /// Sends everything that is ready, through the faults.
    pub(crate) fn transmit(&mut self) {
        for side in [0, 1] {
            while let Some(transmit) = self.ends[side].poll_transmit(self.now, &mut self.buf, self.segments_max) {
                assert_eq!(transmit.destination, self.addresses[1 - side]);
                let batch = self.buf[..transmit.bytes].to_vec();
                let segments: Vec<_> = batch.chunks(transmit.segment_bytes).collect();
                assert_eq!(segments.len(), transmit.segments);
                for segment in segments {
                    self.carry(1 - side, segment);
                }
            }
        }
    }

    fn carry(&mut self, to: usize, bytes: &[u8]) {
        if self.record {
            self.sent.push((1 - to, bytes.to_vec()));
        }
        let faults = self.faults;
        let partitioned = faults.partition.is_some_and(|(from, until)| (from..until).contains(&self.now));
        let picked = faults.lost == Some(self.carried);
        self.carried += 1;
        let busy = Duration::from_nanos((bytes.len() as f64 * faults.byte_nanos) as u64);
        self.free_at[to] = self.free_at[to].max(self.now) + busy;
        if partitioned || picked || self.chance(faults.loss) {
            return;
        }
        let queueing = Duration::from_nanos(self.free_at[to].0 - self.now.0);
        let copies = 1 + u32::from(self.chance(faults.duplicate));
        for _ in 0..copies {
            let mut bytes = bytes.to_vec();
            if self.chance(faults.corrupt) {
                let bit = self.random(bytes.len() as u32 * 8);
                bytes[bit as usize / 8] ^= 1 << (bit % 8);
            }
            let mut delay = LATENCY + queueing;
            if self.chance(faults.reorder) {
                let extra = faults.reorder_by.as_nanos() as u32;
                delay += Duration::from_nanos(u64::from(self.random(extra.max(1))));
            }
            self.inject(to, bytes, delay);
        }
    }

    /// Takes the completions of both ends.
    pub(crate) fn collect(&mut self) {
        for side in [0, 1] {
            while let Some(completion) = self.ends[side].poll_completion() {
                self.completions[side].push(completion);
            }
        }
    }

    /// Moves the clock to the next packet or timer and handles it. False when nothing will ever happen again.
    pub(crate) fn step(&mut self) -> bool {
        self.transmit();
        let packet = self.in_flight.keys().next().map(|(at, _)| *at);
        let timers = self.ends.iter().filter_map(Endpoint::poll_timeout);
        let Some(next) = timers.chain(packet).min() else { return false };
        self.now = self.now.max(next);
        while let Some(entry) = self.in_flight.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (to, bytes) = entry.remove();
            self.ends[to].handle_packet(self.now, self.addresses[1 - to], &bytes);
        }
        for end in &mut self.ends {
            end.handle_timeout(self.now);
        }
        self.collect();
        true
    }

    /// Steps until nothing happens any more; panics if that takes for ever.
    pub(crate) fn run(&mut self) {
        for _ in 0..1_000_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the endpoints never come to rest");
    }
}
