//! What the system grants may be little: small socket buffers, no segmentation. Injected faults take no more away.

use std::sync::Arc;

use soft_roce::{
    Access, Endpoint, EndpointConfig, HeapMemory, Identification, Memory, Operation, PathMtu, Peer, Psn,
    QueuePairConfig, QueuePairNumber, Remote, Segment, SendRequest, Status, Timestamp,
    udp::{Driver, DriverConfig, Faults},
};

const OBJECT_BYTES: usize = 150_000;
const PSN: Psn = Psn::new(5);

struct Node {
    driver: Driver,
    endpoint: Endpoint,
    number: QueuePairNumber,
    memory: Arc<HeapMemory>,
    segment: Segment,
    remote: Remote,
}

/// Two connected nodes; windows are derived from the sockets unless `config` is given.
fn pair(driver: DriverConfig, path_mtu: PathMtu, config: Option<QueuePairConfig>) -> [Node; 2] {
    let drivers = [1, 2].map(|_| Driver::open("127.0.0.1:0".parse().unwrap(), driver).unwrap());
    let capacities = [0, 1].map(|end: usize| drivers[end].receive_capacity_bytes());
    let mut end = 0;
    let mut nodes = drivers.map(|driver| {
        let mut endpoint = Endpoint::new(EndpointConfig::new(driver.local(), 3));
        let derived = QueuePairConfig::default().within(capacities[end], capacities[1 - end], path_mtu);
        let number = endpoint.create_queue_pair(config.unwrap_or(derived)).unwrap();
        let memory = HeapMemory::new((0..OBJECT_BYTES).map(|at| (at * (end + 3) / 8) as u8).collect());
        let region = endpoint.register(memory.clone(), Access::ALL).unwrap();
        let segment = Segment { lkey: region.lkey, offset: 0, bytes: OBJECT_BYTES as u32 };
        let remote = Remote { address: region.address, rkey: region.rkey };
        end += 1;
        Node { driver, endpoint, number, memory, segment, remote }
    });
    let [one, other] = [0, 1].map(|end: usize| (nodes[end].driver.local(), nodes[end].number));
    for (node, (address, queue_pair)) in nodes.iter_mut().zip([other, one]) {
        let identification = Identification::SegmentIndex;
        let peer = Peer { address, queue_pair, rq_psn: PSN, sq_psn: PSN, path_mtu, identification, ack_delay: None };
        node.endpoint.connect_queue_pair(node.number, peer).unwrap();
    }
    nodes
}

/// Each end reads only when the other has sent all that it may: the worst case for the sockets.
fn run_late([near, far]: &mut [Node; 2], request: SendRequest) -> Status {
    near.endpoint.post_send(near.number, request).unwrap();
    let mut now = Timestamp(0);
    loop {
        for node in [&mut *near, &mut *far] {
            while node.driver.transmit(now, &mut node.endpoint) {}
        }
        for node in [&mut *near, &mut *far] {
            while node.driver.receive(now, &mut node.endpoint) {}
            node.endpoint.handle_timeout(now);
        }
        if let Some(completion) = near.endpoint.poll_completion() {
            return completion.status;
        }
        now = Timestamp(now.0 + 10_000);
    }
}

fn read_of(nodes: &[Node; 2]) -> SendRequest {
    SendRequest::new(1, Operation::Read { local: nodes[0].segment, remote: nodes[1].remote })
}

fn small_buffers(path_mtu: PathMtu, config: Option<QueuePairConfig>) -> u32 {
    // The system grants twice as much, and counts twice as much.
    let driver = DriverConfig { receive_buffer_bytes: 32 * 1024, ..DriverConfig::default() };
    let mut nodes = pair(driver, path_mtu, config);
    let read = read_of(&nodes);
    let write = SendRequest::new(1, Operation::Write { local: nodes[0].segment, remote: nodes[1].remote });
    for _ in 0..5 {
        assert_eq!(run_late(&mut nodes, read), Status::Success);
        assert_eq!(run_late(&mut nodes, write), Status::Success);
    }
    nodes.iter().map(|node| node.driver.dropped_packets().unwrap()).sum()
}

#[test]
fn nothing_overruns_a_small_buffer() {
    for path_mtu in [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096] {
        assert_eq!(small_buffers(path_mtu, None), 0, "{path_mtu:?}");
    }
    // The control: windows for larger buffers do overrun these.
    assert!(small_buffers(PathMtu::Mtu4096, Some(QueuePairConfig::default())) > 0);
}

#[test]
fn packets_go_one_by_one_where_segmentation_is_refused() {
    for refuse_segmentation in [false, true] {
        let mut nodes = pair(DriverConfig { refuse_segmentation, ..DriverConfig::default() }, PathMtu::Mtu1024, None);
        if nodes[1].driver.segmentation_advice().is_some() && !refuse_segmentation {
            testing::skip("soft-roce/segmentation", "UDP segmentation by the kernel");
            continue;
        }
        for _ in 0..3 {
            let read = read_of(&nodes);
            assert_eq!(run_late(&mut nodes, read), Status::Success);
        }
        assert_eq!(nodes[0].memory.to_vec(), nodes[1].memory.to_vec());
        let (calls, packets) = (nodes[1].driver.counters().send_calls, nodes[1].endpoint.counters().packets_sent);
        let advice = nodes[1].driver.segmentation_advice();
        if refuse_segmentation {
            assert_eq!(calls, packets, "one call each");
            assert!(advice.is_some_and(|advice| advice.contains("ethtool")), "{advice:?}");
        } else {
            assert!(calls < packets / 4, "{calls} calls for {packets} packets");
            assert_eq!(advice, None);
        }
        assert_eq!(nodes[1].driver.counters().send_errors, 0);
    }
}

#[test]
fn injected_faults_leave_runs_together() {
    let faults = Faults { loss: 0.01, duplicate: 0.01, reorder: 0.01, corrupt: 0.01 };
    let mut nodes = pair(DriverConfig { faults, seed: 4, ..DriverConfig::default() }, PathMtu::Mtu1024, None);
    if nodes[1].driver.segmentation_advice().is_some() {
        testing::skip("soft-roce/segmentation", "UDP segmentation by the kernel");
        return;
    }
    for round in 0..20 {
        let [near, far] = &nodes;
        assert_ne!(near.memory.to_vec(), far.memory.to_vec(), "round {round}");
        let request = match round % 2 {
            0 => read_of(&nodes),
            _ => SendRequest::new(1, Operation::Write { local: near.segment, remote: far.remote }),
        };
        assert_eq!(run_late(&mut nodes, request), Status::Success);
        assert_eq!(nodes[0].memory.to_vec(), nodes[1].memory.to_vec(), "round {round}");
        nodes[0].memory.write(0, &vec![round; OBJECT_BYTES]);
    }
    for node in &nodes {
        let (calls, packets) = (node.driver.counters().send_calls, node.endpoint.counters().packets_sent);
        assert!(calls < packets / 2, "{calls} calls for {packets} packets");
        assert_eq!(node.driver.counters().send_errors, 0);
    }
}
