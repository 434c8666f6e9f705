use proptest::prelude::*;

use super::*;

const SECRET: &[u8] = b"correct horse battery staple";

fn at(ms: i64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis(ms)
}

fn parameters(queue_pair: u32) -> Parameters {
    Parameters {
        incarnation: 7,
        address: PacketAddress::SoftRoce("127.0.0.1:4791".parse().unwrap()),
        queue_pair,
        psn: 0xabcdef,
        path_mtu_bytes: 4096,
        max_dest_rd_atomic: 16,
        receive_depth: 64,
        window_bytes: 1 << 18,
    }
}

fn client(secret: &[u8]) -> Bootstrap {
    Bootstrap::client(at(0), secret.into(), [1; NONCE_BYTES])
}

fn server(secret: &[u8]) -> Bootstrap {
    Bootstrap::server(at(0), secret.into(), [2; NONCE_BYTES])
}

/// Moves what `from` has to say to `to`, in pieces of `piece` bytes.
fn carry(from: &mut Bootstrap, to: &mut Bootstrap, now: Timestamp, piece: usize) {
    let bytes = from.poll_transmit().to_vec();
    from.handle_transmitted(bytes.len());
    bytes.chunks(piece).for_each(|piece| to.handle_bytes(now, piece));
}

fn exchange(one: &mut Bootstrap, other: &mut Bootstrap, now: Timestamp) {
    while !(one.poll_transmit().is_empty() && other.poll_transmit().is_empty()) {
        carry(one, other, now, usize::MAX);
        carry(other, one, now, usize::MAX);
    }
}

fn closed(bootstrap: &mut Bootstrap) -> String {
    match std::iter::from_fn(|| bootstrap.poll_event()).last() {
        Some(BootstrapEvent::Closed(reason)) => reason,
        other => panic!("not closed but {other:?} in {:?}", bootstrap.state),
    }
}

/// Takes both sides up to `Incoming`.
fn offered(piece: usize) -> (Bootstrap, Bootstrap) {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    for _ in 0..2 {
        carry(&mut client, &mut server, at(1), piece);
        carry(&mut server, &mut client, at(2), piece);
    }
    assert_eq!(client.poll_event(), Some(BootstrapEvent::Proved));
    assert_eq!(server.poll_event(), None, "the server tells nothing before the offer");
    client.offer(at(3), parameters(17), b"hello".to_vec());
    carry(&mut client, &mut server, at(4), piece);
    let incoming = BootstrapEvent::Incoming { parameters: parameters(17), hello: b"hello".to_vec() };
    assert_eq!(server.poll_event(), Some(incoming));
    (client, server)
}

/// Regression: the end of a connection in one piece with the message before it was taken for a bug of ours.
#[test]
fn a_peer_that_ends_at_once_is_no_bug_of_ours() {
    let (mut client, mut server) = offered(usize::MAX);
    assert!(server.accept(at(5), parameters(18), Vec::new()));
    server.close("changed its mind");
    carry(&mut server, &mut client, at(6), usize::MAX);
    assert!(matches!(client.poll_event(), Some(BootstrapEvent::Answered { .. })));
    client.ready();
    assert!(closed(&mut client).contains("changed its mind"));

    let (mut client, mut server) = (super::tests::client(SECRET), super::tests::server(SECRET));
    carry(&mut client, &mut server, at(1), usize::MAX);
    carry(&mut server, &mut client, at(1), usize::MAX);
    carry(&mut client, &mut server, at(2), usize::MAX);
    server.close("changed its mind");
    carry(&mut server, &mut client, at(2), usize::MAX);
    assert_eq!(client.poll_event(), Some(BootstrapEvent::Proved));
    client.offer(at(3), parameters(17), Vec::new());
    assert!(closed(&mut client).contains("changed its mind"));
}

fn established(piece: usize) -> (Bootstrap, Bootstrap) {
    let (mut client, mut server) = offered(piece);
    assert!(server.accept(at(5), parameters(18), b"welcome".to_vec()));
    carry(&mut server, &mut client, at(6), piece);
    let answered = BootstrapEvent::Answered { parameters: parameters(18), welcome: b"welcome".to_vec() };
    assert_eq!(client.poll_event(), Some(answered));
    client.ready();
    carry(&mut client, &mut server, at(7), piece);
    assert_eq!(server.poll_event(), Some(BootstrapEvent::Ready));
    (client, server)
}

#[test]
fn both_sides_come_up_however_the_bytes_are_cut() {
    for piece in [1, 2, 41, 42, 43, 1000] {
        established(piece);
    }
}

#[test]
fn a_refusal_tells_its_reason_on_one_line() {
    let (mut client, mut server) = offered(1000);
    server.close("no slot\nfor you");
    exchange(&mut client, &mut server, at(5));
    assert_eq!(closed(&mut client), "the peer says: no slot for you");
}

#[test]
fn a_wrong_secret_is_refused_before_anything_is_told() {
    let (mut client, mut server) = (client(b"wrong"), server(SECRET));
    exchange(&mut client, &mut server, at(1));
    assert!(closed(&mut server).contains("secrets differ"));
    assert!(closed(&mut client).contains("secrets differ"));
}

#[test]
fn a_server_that_cannot_prove_itself_learns_nothing() {
    let mut client = client(SECRET);
    let mut impostor = server(b"guess");
    carry(&mut client, &mut impostor, at(1), 42);
    carry(&mut impostor, &mut client, at(1), 42);
    // It reflects the client's own proof.
    let proof = client.poll_transmit().to_vec();
    client.handle_transmitted(proof.len());
    client.handle_bytes(at(2), &proof);
    assert!(closed(&mut client).contains("secrets differ"));
}

#[test]
fn a_replayed_proof_is_worth_nothing() {
    let (mut client, mut first) = (client(SECRET), server(SECRET));
    let preface = client.poll_transmit().to_vec();
    carry(&mut client, &mut first, at(1), 1000);
    carry(&mut first, &mut client, at(1), 1000);
    let proof = client.poll_transmit().to_vec();
    let mut second = Bootstrap::server(at(0), SECRET.into(), [3; NONCE_BYTES]);
    second.handle_bytes(at(1), &preface);
    second.handle_bytes(at(1), &proof);
    assert!(closed(&mut second).contains("secrets differ"));
}

#[test]
fn another_version_is_named_on_both_sides() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    client.outbound[MAGIC.len() + 1] = 9;
    exchange(&mut client, &mut server, at(1));
    assert!(closed(&mut server).contains("version 9, we speak 2"));
    assert!(closed(&mut client).contains("version 9, we speak 2"));
}

#[test]
fn garbage_is_refused_at_its_first_byte() {
    let mut server = server(SECRET);
    server.handle_bytes(at(1), b"GET / HTTP/1.1\r\n");
    let reason = closed(&mut server);
    assert!(reason.contains("does not speak") && reason.contains("GET / HT") && !reason.contains('\n'), "{reason}");
    assert!(server.poll_transmit().is_empty());
}

#[test]
fn oversized_lengths_hold_no_memory() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    carry(&mut client, &mut server, at(1), 1000);
    server.handle_bytes(at(1), &(UNPROVED_BYTES_MAX as u32 + 1).to_be_bytes());
    assert!(closed(&mut server).contains("at most 576 are allowed"));
    let (_, mut server) = established(1000);
    server.handle_bytes(at(8), &u32::MAX.to_be_bytes());
    server.handle_bytes(at(8), &[0; 100_000]);
    assert!(closed(&mut server).contains("4294967295 bytes"));
    assert_eq!(server.inbound.capacity(), 0);
}

#[test]
fn a_stalled_handshake_ends() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    for side in [&mut client, &mut server] {
        assert_eq!(side.poll_timeout(), Some(at(2000)));
        side.handle_timeout(at(1999));
        assert_eq!(side.poll_event(), None);
        side.handle_timeout(at(2000));
        assert!(closed(side).contains("no complete handshake within 2.000 s"));
        assert_eq!(side.poll_timeout(), None);
    }
}

#[test]
fn heartbeats_keep_a_quiet_connection_and_their_absence_ends_it() {
    let (mut client, mut server) = established(1000);
    let mut now = at(7);
    for _ in 0..100 {
        now = client.poll_timeout().unwrap().min(server.poll_timeout().unwrap());
        client.handle_timeout(now);
        server.handle_timeout(now);
        exchange(&mut client, &mut server, now);
    }
    assert!(now >= at(20_000));
    assert_eq!((client.poll_event(), server.poll_event()), (None, None));
    // The server stalls: the client goes on beating, into the void, and notices.
    let heard_at = client.heard_at;
    while client.state != State::Closed {
        now = client.poll_timeout().unwrap();
        client.handle_timeout(now);
        client.handle_transmitted(client.outbound.len());
    }
    assert_eq!(now, heard_at + SILENCE_MAX);
    assert!(closed(&mut client).contains("has stalled"));
}

#[test]
fn a_decision_may_take_longer_than_a_handshake_but_not_for_ever() {
    let (mut client, mut server) = offered(1000);
    let mut now = at(4);
    while client.state != State::Closed {
        now = client.poll_timeout().unwrap().min(server.poll_timeout().unwrap());
        client.handle_timeout(now);
        server.handle_timeout(now);
        exchange(&mut client, &mut server, now);
    }
    assert_eq!(now, at(3) + DECISION_MAX);
    assert!(!server.accept(now, parameters(18), Vec::new()), "too late");
}

#[test]
fn unusable_parameters_are_refused_by_name() {
    let good = parameters(17);
    let cases = [
        (Parameters { queue_pair: 1 << 24, ..good }, "queue pair 0x1000000"),
        (Parameters { queue_pair: 1, ..good }, "queue pair 0x1"),
        (Parameters { psn: 1 << 24, ..good }, "PSN 0x1000000"),
        (Parameters { path_mtu_bytes: 1500, ..good }, "path MTU of 1500"),
        (
            Parameters { address: PacketAddress::Roce("0.0.0.0:4791".parse().unwrap()), ..good },
            "UDP address 0.0.0.0:4791",
        ),
        (Parameters { address: PacketAddress::InfiniBand { lid: 0xc000 }, ..good }, "LID 0xc000"),
        (Parameters { receive_depth: 0, ..good }, "can receive nothing"),
    ];
    for (bad, text) in cases {
        let (mut client, mut server) = (client(SECRET), server(SECRET));
        exchange(&mut client, &mut server, at(1));
        client.offer(at(1), bad, Vec::new());
        exchange(&mut client, &mut server, at(1));
        assert!(closed(&mut server).contains(text));
        assert!(closed(&mut client).contains(text));
    }
}

proptest! {
    /// Whatever bytes come in whichever state, nothing panics and memory stays bounded.
    #[test]
    fn no_bytes_panic(
        up in any::<bool>(),
        pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..10),
        flips in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let (_, mut server) = if up { established(1000) } else { (client(SECRET), server(SECRET)) };
        // A real preface with a few flipped bits reaches deeper than noise.
        let mut preface = client(SECRET).poll_transmit().to_vec();
        flips.iter().for_each(|at| *at.get_mut(&mut preface) ^= 1);
        server.handle_bytes(at(8), &preface);
        for piece in &pieces {
            server.handle_bytes(at(8), piece);
            prop_assert!(server.inbound.len() <= 2 * MESSAGE_BYTES_MAX);
            prop_assert!(server.outbound.len() <= 4 * MESSAGE_BYTES_MAX);
        }
    }
}
