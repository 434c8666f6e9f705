//! Every limit that can be met says in one sentence which one it was, what was found, and what to change.

use soft_roce::{
    Access, DatagramAddress, DatagramConfig, DatagramRequest, Endpoint, EndpointConfig, HeapMemory, Identification,
    Operation, PathMtu, Peer, Psn, QueuePairConfig, QueuePairNumber, RecvRequest, Segment, SendRequest,
    SharedReceiveQueueConfig,
};

const SHARED: SharedReceiveQueueConfig =
    SharedReceiveQueueConfig { protection_domain: soft_roce::ProtectionDomain(0), depth: 1, max_sge: 1 };

fn endpoint(config: impl FnOnce(EndpointConfig) -> EndpointConfig) -> Endpoint {
    Endpoint::new(config(EndpointConfig::new("127.0.0.1:4791".parse().unwrap(), 1)))
}

fn peer(address: &str, queue_pair: u32) -> Peer {
    Peer {
        address: address.parse().unwrap(),
        queue_pair: QueuePairNumber(queue_pair),
        rq_psn: Psn::new(1),
        sq_psn: Psn::new(2),
        path_mtu: PathMtu::Mtu1024,
        identification: Identification::SegmentIndex,
        ack_delay: None,
    }
}

/// The first refusal of what is tried again and again.
fn refusal<T, E: ToString>(mut attempt: impl FnMut() -> Result<T, E>) -> String {
    (0..2_000).find_map(|_| attempt().err()).expect("refused at last").to_string()
}

#[test]
fn tables_name_their_limit() {
    let mut small = endpoint(|config| EndpointConfig { queue_pairs_max: 2, regions_max: 3, ..config });
    let said = [
        refusal(|| small.create_queue_pair(QueuePairConfig::default())),
        refusal(|| small.create_datagram_queue_pair(DatagramConfig::new(1))),
        refusal(|| small.register(HeapMemory::new(vec![0; 8]), Access::LOCAL)),
        refusal(|| small.create_shared_receive_queue(SHARED)),
    ];
    let wanted = [
        "queue_pairs_max: all 2 queue pairs are in use; destroy one or raise the limit",
        "queue_pairs_max: all 2 queue pairs are in use; destroy one or raise the limit",
        "regions_max: all 3 regions are in use; deregister one or raise the limit",
        "all 1024 shared receive queues are in use; destroy one",
    ];
    assert_eq!(said, wanted);
}

#[test]
fn settings_out_of_range_name_their_key() {
    let mut endpoint = endpoint(|config| config);
    let default = QueuePairConfig::default;
    let cases = [
        (QueuePairConfig { send_depth: 0, ..default() }, "send_depth: found 0, expected 1 ..= 65536"),
        (QueuePairConfig { recv_depth: 65_537, ..default() }, "recv_depth: found 65537, expected 0 ..= 65536"),
        (QueuePairConfig { max_sge: 9, ..default() }, "max_sge: found 9, expected 1 ..= 8"),
        (QueuePairConfig { max_rd_atomic: 256, ..default() }, "max_rd_atomic: found 256, expected 0 ..= 255"),
        (QueuePairConfig { max_dest_rd_atomic: 256, ..default() }, "max_dest_rd_atomic: found 256, expected 0 ..= 255"),
        (QueuePairConfig { retry_count: 8, ..default() }, "retry_count: found 8, expected 0 ..= 7"),
        (QueuePairConfig { rnr_retry: 8, ..default() }, "rnr_retry: found 8, expected 0 ..= 7"),
        (QueuePairConfig { ack_timeout: 32, ..default() }, "ack_timeout: found 32, expected 0 ..= 31"),
        (QueuePairConfig { min_rnr_timer: 32, ..default() }, "min_rnr_timer: found 32, expected 0 ..= 31"),
        (
            QueuePairConfig { request_window_packets: 0, ..default() },
            "request_window_packets: found 0, expected 1 ..= 4194304",
        ),
        (QueuePairConfig { read_chunk_bytes: 0, ..default() }, "read_chunk_bytes: found 0, expected at least 1"),
    ];
    for (config, wanted) in cases {
        assert_eq!(endpoint.create_queue_pair(config).unwrap_err().to_string(), wanted);
    }
}

#[test]
fn peers_that_cannot_be_reached_are_named() {
    let mut endpoint = endpoint(|config| config);
    let number = endpoint.create_queue_pair(QueuePairConfig::default()).unwrap();
    let mut refused = |peer| endpoint.connect_queue_pair(number, peer).unwrap_err().to_string();
    let family = "peer address [::1]:4791: it must be of the same family as our own";
    assert_eq!(refused(peer("[::1]:4791", 5)), family);
    for queue_pair in [0, 1, 0x00ff_ffff, 0x0100_0000] {
        let wanted = format!("peer queue pair {queue_pair:#x}: expected 2 ..= 0xfffffe");
        assert_eq!(refused(peer("127.0.0.2:4791", queue_pair)), wanted);
    }
}

#[test]
fn queues_name_the_depth_to_raise() {
    let mut endpoint = endpoint(|config| EndpointConfig { completions_max: 4, ..config });
    let config = QueuePairConfig { send_depth: 2, recv_depth: 1, ..QueuePairConfig::default() };
    let number = endpoint.create_queue_pair(config).unwrap();
    let send = SendRequest::new(0, Operation::Send { local: Segment::default() });
    let receive = RecvRequest { id: 0, segment: Segment::default() };
    let early = "the queue pair is in state Init: connect it before posting sends";
    assert_eq!(refusal(|| endpoint.post_send(number, send)), early);
    endpoint.connect_queue_pair(number, peer("127.0.0.2:4791", 5)).unwrap();
    let depth = |depth, key| format!("{key}: the queue holds {depth} requests already: poll completions, or raise it");
    assert_eq!(refusal(|| endpoint.post_recv(number, receive)), depth(1, "recv_depth"));
    assert_eq!(refusal(|| endpoint.post_send(number, send)), depth(2, "send_depth"));
    let shared = endpoint.create_shared_receive_queue(SHARED).unwrap();
    let full = "completions_max: 4 requests are outstanding or not polled: poll completions, or raise the limit";
    assert_eq!(refusal(|| endpoint.post_shared_recv(shared, receive)), full);
    assert!(endpoint.modify_to_reset(number));
    assert_eq!(refusal(|| endpoint.post_shared_recv(shared, receive)), depth(1, "depth"));
}

#[test]
fn sequence_numbers_are_a_limit_too() {
    let mut endpoint = endpoint(|config| config);
    let number = endpoint.create_queue_pair(QueuePairConfig::default()).unwrap();
    endpoint.connect_queue_pair(number, peer("127.0.0.2:4791", 5)).unwrap();
    let local = Segment { lkey: 1, offset: 0, bytes: 1 << 31 };
    let packets =
        "the send queue's messages take 4194304 packets at most: poll completions first, or raise the path MTU";
    assert_eq!(refusal(|| endpoint.post_send(number, SendRequest::new(0, Operation::Send { local }))), packets);
}

#[test]
fn messages_name_what_they_exceed() {
    let mut endpoint = endpoint(|config| config);
    let number = endpoint.create_datagram_queue_pair(DatagramConfig { max_sge: 2, ..DatagramConfig::new(1) }).unwrap();
    endpoint.modify_datagrams_to_ready_to_receive(number).unwrap();
    endpoint.modify_to_ready_to_send(number).unwrap();
    let to = DatagramAddress { address: "127.0.0.2:4791".parse().unwrap(), queue_pair: QueuePairNumber(5) };
    let local = Segment { lkey: 1, offset: 0, bytes: 1_025 };
    let request = |local, to| DatagramRequest {
        id: 0,
        local,
        immediate: None,
        to,
        queue_key: 1,
        signalled: true,
        solicited: false,
    };
    let mut refused =
        |request, more: &[Segment]| endpoint.post_datagram_list(number, request, more).unwrap_err().to_string();
    let long = "message of 1025 bytes: at most 1024 fit; send it in parts, or raise path_mtu";
    assert_eq!(refused(request(local, to), &[]), long);
    let many = "max_sge: 3 local segments, at most 2 are allowed; post fewer, or raise the limit (8 at most)";
    assert_eq!(refused(request(Segment::default(), to), &[Segment::default(); 2]), many);
    let elsewhere = DatagramAddress { address: "[::1]:4791".parse().unwrap(), ..to };
    let said = refused(request(Segment::default(), elsewhere), &[]);
    assert!(said.contains("[::1]:4791") && said.contains("an address of our own family"), "{said}");
}
