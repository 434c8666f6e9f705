//! Several processes share one address: real processes, killed under load. This test file is also those processes: it
//! runs itself with [`ROLE`] set.

// Real processes need real time.
#![allow(clippy::disallowed_methods)]

use std::{
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use soft_roce::{
    Access, Endpoint, EndpointConfig, HeapMemory, Identification, Operation, PathMtu, Peer, Psn, QueuePairConfig,
    QueuePairNumber, Remote, Segment, SendRequest, Status, Timestamp,
    udp::{Driver, DriverConfig, Sharing},
};

/// The address to share, for a process of this test that is a sharer.
const ROLE: &str = "SOFT_ROCE_SHARED_ADDRESS";
const OBJECT_BYTES: usize = 40_000;
const PSN: Psn = Psn::new(77);
/// Nothing here takes as long, even on a machine with much else to do.
const PATIENCE: Duration = Duration::from_secs(300);

/// Held by whoever starts processes, or opens sockets of this one alone: a child has a copy of every socket until it
/// runs its own program, and their addresses are not free meanwhile.
static FORKS: Mutex<()> = Mutex::new(());

struct Node {
    driver: Driver,
    endpoint: Endpoint,
    started: Instant,
}

impl Node {
    fn open(address: SocketAddr, sharing: Sharing) -> Self {
        let seed = u64::from(std::process::id());
        let driver = Driver::open(address, DriverConfig { seed, sharing, ..DriverConfig::default() }).unwrap();
        let queue_pair_prefix = driver.queue_pair_prefix();
        let endpoint = Endpoint::new(EndpointConfig { queue_pair_prefix, ..EndpointConfig::new(driver.local(), seed) });
        Self { driver, endpoint, started: Instant::now() }
    }

    fn turn(&mut self) {
        let now = Timestamp::default() + self.started.elapsed();
        if !self.driver.receive(now, &mut self.endpoint) {
            self.endpoint.handle_timeout(now);
            thread::sleep(Duration::from_micros(50));
        }
        self.driver.transmit(now, &mut self.endpoint);
        assert!(self.started.elapsed() < PATIENCE, "the test takes too long");
    }

    fn create_queue_pair(&mut self) -> QueuePairNumber {
        // 4 ms, doubled seven times: a second until a peer is given up.
        self.endpoint.create_queue_pair(QueuePairConfig { ack_timeout: 10, ..QueuePairConfig::default() }).unwrap()
    }

    fn connect(&mut self, number: QueuePairNumber, address: SocketAddr, queue_pair: QueuePairNumber) {
        let peer = Peer {
            address,
            queue_pair,
            rq_psn: PSN,
            sq_psn: PSN,
            path_mtu: PathMtu::Mtu1024,
            identification: Identification::SegmentIndex,
            ack_delay: None,
        };
        self.endpoint.connect_queue_pair(number, peer).unwrap();
    }
}

fn pattern(number: QueuePairNumber) -> Vec<u8> {
    (0..OBJECT_BYTES as u32).map(|at| (at.wrapping_mul(number.0 | 1) >> 7) as u8).collect()
}

/// Not a test of its own: what a sharing process does until it is killed. Without [`ROLE`] there is nothing to do.
#[test]
fn sharer() {
    let Ok(address) = std::env::var(ROLE) else { return };
    let mut node = Node::open(address.parse().unwrap(), Sharing::User);
    let number = node.create_queue_pair();
    let memory = HeapMemory::new(pattern(number));
    let region = node.endpoint.register(memory, Access { remote_read: true, ..Access::LOCAL }).unwrap();
    println!("\nready {} {} {}", number.0, region.rkey, region.address);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (peer, queue_pair) = line.trim().split_once(' ').unwrap();
    node.connect(number, peer.parse().unwrap(), QueuePairNumber(queue_pair.parse().unwrap()));
    println!("connected");
    // It ends by being killed, or because the test takes too long.
    loop {
        node.turn();
    }
}

/// A sharing process, and our queue pair with it.
struct Sharer {
    process: Child,
    output: BufReader<ChildStdout>,
    number: QueuePairNumber,
    inbox: Arc<HeapMemory>,
    request: SendRequest,
    expected: Vec<u8>,
    completed: u64,
}

impl Sharer {
    fn start(reader: &mut Node, address: SocketAddr) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sharing::sharer", "--nocapture", "--test-threads=1"])
            .env(ROLE, address.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let ready = await_line(&mut output, "ready ");
        let mut fields = ready.split(' ').map(|field| field.parse::<u64>().unwrap());
        let (peer, rkey, address_there) = (fields.next().unwrap(), fields.next().unwrap(), fields.next().unwrap());
        let peer = QueuePairNumber(peer as u32);
        let number = reader.create_queue_pair();
        reader.connect(number, address, peer);
        writeln!(process.stdin.as_mut().unwrap(), "{} {}", reader.driver.local(), number.0).unwrap();
        await_line(&mut output, "connected");
        let inbox = HeapMemory::new(vec![0; OBJECT_BYTES]);
        let region = reader.endpoint.register(inbox.clone(), Access::LOCAL).unwrap();
        let local = Segment { lkey: region.lkey, offset: 0, bytes: OBJECT_BYTES as u32 };
        let remote = Remote { address: address_there, rkey: rkey as u32 };
        let request = SendRequest::new(0, Operation::Read { local, remote });
        reader.endpoint.post_send(number, request).unwrap();
        Self { process, output, number, inbox, request, expected: pattern(peer), completed: 0 }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Sharer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        // Held until here, so that what a process says meanwhile has somewhere to go.
        let _ = &self.output;
    }
}

fn await_line(output: &mut BufReader<ChildStdout>, start: &str) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the sharer ended");
        if let Some(rest) = line.strip_prefix(start) {
            return rest.trim().to_owned();
        }
    }
}

/// Each sharer always has one READ under way; runs until each has completed `more`.
fn run(reader: &mut Node, sharers: &mut [Sharer], more: u64) {
    let goals: Vec<_> = sharers.iter().map(|sharer| sharer.completed + more).collect();
    while sharers.iter().zip(&goals).any(|(sharer, goal)| sharer.completed < *goal) {
        reader.turn();
        while let Some(completion) = reader.endpoint.poll_completion() {
            // What its process had answered before it was killed may still complete; the next READ will not.
            let Some(sharer) = sharers.iter_mut().find(|sharer| sharer.number == completion.queue_pair) else {
                continue;
            };
            assert_eq!(completion.status, Status::Success);
            assert_eq!(sharer.inbox.to_vec(), sharer.expected, "the bytes of another process");
            sharer.completed += 1;
            reader.endpoint.post_send(sharer.number, sharer.request).unwrap();
        }
    }
}

#[test]
fn survivors_of_a_kill_lose_nothing_and_others_may_join() {
    let _held = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    let shared: SocketAddr = format!("127.{}.{}.77:4791", 1 + pid % 250, pid / 250 % 250).parse().unwrap();
    let mut reader = Node::open(format!("{}:0", shared.ip()).parse().unwrap(), Sharing::Alone);
    let mut sharers: Vec<_> = (0..3).map(|_| Sharer::start(&mut reader, shared)).collect();
    run(&mut reader, &mut sharers, 20);
    // The first to bind: the kernel moves the last into its place.
    sharers[0].kill();
    sharers.remove(0);
    run(&mut reader, &mut sharers, 20);
    sharers.push(Sharer::start(&mut reader, shared));
    sharers.push(Sharer::start(&mut reader, shared));
    run(&mut reader, &mut sharers, 20);
    // Two at once.
    sharers[1].process.kill().unwrap();
    sharers[0].kill();
    sharers[1].kill();
    sharers.drain(..2);
    run(&mut reader, &mut sharers, 20);
    let drops = reader.endpoint.counters().dropped_icrc;
    assert_eq!(drops, 0);
}

/// Threads that come to their sockets seldom, as on a machine that is short of time: whatever lies in a socket by then
/// must be read before it is given up.
#[test]
fn whoever_comes_seldom_becomes_reachable_all_the_same() {
    let _held = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
    let address: SocketAddr = "127.55.44.41:4791".parse().unwrap();
    let mut nodes: Vec<_> = (0..3).map(|_| Node::open(address, Sharing::Process)).collect();
    let mut now = Timestamp(0);
    let rounds = (0..100).position(|_| {
        for node in &mut nodes {
            now = now + Duration::from_millis(100);
            // A few turns, as a flood must not keep the thread from its other work.
            for _ in 0..4 {
                node.driver.receive(now, &mut node.endpoint);
                node.driver.transmit(now, &mut node.endpoint);
            }
        }
        nodes.iter().all(|node| node.driver.is_reachable())
    });
    assert!(rounds.is_some(), "{:?}", nodes.iter().map(|node| node.driver.is_reachable()).collect::<Vec<_>>());
}
