use proptest::prelude::*;

use super::*;

const SECRET: &[u8] = b"correct horse battery staple";
const DIFFER: &str = "the shared secrets differ: give both sides the same `secret`";

fn at(ms: i64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis(ms)
}

fn parameters(queue_pair: u32) -> Parameters {
    Parameters {
        name: PeerName::NONE,
        incarnation: 7,
        address: PacketAddress::SoftRoce("127.0.0.1:4791".parse().unwrap()),
        queue_pair,
        psn: 0xabcdef,
        path_mtu_bytes: 4096,
        max_dest_rd_atomic: 16,
        receive_depth: 64,
        window_bytes: 1 << 18,
        ring: RingName([0x72; 16]),
    }
}

fn client(secret: &[u8]) -> Bootstrap {
    Bootstrap::client(at(0), identity(secret), [1; NONCE_BYTES])
}

fn server(secret: &[u8]) -> Bootstrap {
    Bootstrap::server(at(0), identity(secret), [2; NONCE_BYTES])
}

fn identity(secret: &[u8]) -> Identity {
    of_release("0.1.0", 7, secret)
}

fn of_release(name: &str, wire: u32, secret: &[u8]) -> Identity {
    let release = Release { name: name.to_owned(), wire: WireVersion(u64::from(wire) << 32) };
    Identity { secrets: [secret.into()].into(), release: Arc::new(release) }
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

/// A cluster that changes its secret has members that know the old one, both in either order, and the new one.
#[test]
fn two_secrets_are_known_at_once_while_a_cluster_changes_its_own() {
    let (old, new): (&[u8], &[u8]) = (b"the old secret", b"the new secret");
    let knows = |secrets: &[&[u8]]| Identity {
        secrets: secrets.iter().map(|&secret| secret.into()).collect(),
        ..identity(b"")
    };
    let steps = [vec![old], vec![old, new], vec![new, old], vec![new]];
    for (at_client, ours) in steps.iter().enumerate() {
        for (at_server, theirs) in steps.iter().enumerate() {
            let mut client = Bootstrap::client(at(0), knows(ours), [1; NONCE_BYTES]);
            let mut server = Bootstrap::server(at(0), knows(theirs), [2; NONCE_BYTES]);
            for _ in 0..3 {
                carry(&mut client, &mut server, at(1), 7);
                carry(&mut server, &mut client, at(1), 7);
            }
            let agree = at_client.abs_diff(at_server) <= 1;
            assert_eq!((client.is_proved(), server.is_proved()), (agree, agree), "{at_client} and {at_server}");
        }
    }
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
    // It may say whatever it likes first, be it nothing but its preface: the client says no more than its nonce.
    let mut client = client(SECRET);
    let mut impostor = server(b"guess");
    carry(&mut client, &mut impostor, at(1), 42);
    let flight = impostor.poll_transmit().to_vec();
    client.handle_bytes(at(1), &flight[..PREFACE_BYTES]);
    assert!(client.poll_transmit().is_empty());
    client.handle_bytes(at(1), &flight[PREFACE_BYTES..]);
    assert!(closed(&mut client).contains("secrets differ"));
    let said = client.poll_transmit()[LENGTH_BYTES..].to_vec();
    assert!(matches!(wincode::deserialize_exact(&said), Ok(Message::Close(_))), "no proof, and nothing else");
}

#[test]
fn a_proof_cannot_be_reflected() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    carry(&mut client, &mut server, at(1), 42);
    let proof = server.poll_transmit()[PREFACE_BYTES..].to_vec();
    server.handle_bytes(at(2), &proof);
    assert!(closed(&mut server).contains("secrets differ"));
}

/// Whoever has recorded all that a client said, or all that a server said, gets nowhere with it.
#[test]
fn a_recorded_bootstrap_opens_nothing() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    let (mut of_client, mut of_server) = (Vec::new(), Vec::new());
    let mut both = |client: &mut Bootstrap, server: &mut Bootstrap| {
        of_client.extend_from_slice(client.poll_transmit());
        carry(client, server, at(1), usize::MAX);
        of_server.extend_from_slice(server.poll_transmit());
        carry(server, client, at(1), usize::MAX);
    };
    both(&mut client, &mut server);
    client.offer(at(1), parameters(17), b"hello".to_vec());
    both(&mut client, &mut server);
    assert!(server.accept(at(1), parameters(18), b"welcome".to_vec()));
    both(&mut client, &mut server);
    client.ready();
    both(&mut client, &mut server);
    assert_eq!([client.state, server.state], [State::Established; 2]);

    for piece in [1, 1000, usize::MAX] {
        let mut again = Bootstrap::server(at(0), identity(SECRET), [3; NONCE_BYTES]);
        of_client.chunks(piece).for_each(|piece| again.handle_bytes(at(1), piece));
        assert_eq!(again.poll_event(), Some(BootstrapEvent::Closed(DIFFER.to_owned())));
        assert_eq!(again.poll_event(), None, "nothing was told before");
        let mut again = Bootstrap::client(at(0), identity(SECRET), [4; NONCE_BYTES]);
        of_server.chunks(piece).for_each(|piece| again.handle_bytes(at(1), piece));
        assert_eq!(again.poll_event(), Some(BootstrapEvent::Closed(DIFFER.to_owned())));
        assert_eq!(again.poll_event(), None, "nothing was told before");
    }
    // The same client's nonce again is not enough, nor is the same server's: both count.
    let mut again = Bootstrap::server(at(0), identity(SECRET), [3; NONCE_BYTES]);
    again.handle_bytes(at(1), &of_client[..PREFACE_BYTES]);
    let fresh = again.poll_transmit().to_vec();
    assert!(fresh[PREFACE_BYTES..] != of_server[PREFACE_BYTES..fresh.len()], "another proof for the same client");
}

/// Stops one side after each of its messages: the other ends it, in a bounded time, and says so.
#[test]
fn a_peer_that_stops_at_any_step_is_ended_by_a_deadline() {
    for steps in 0..8 {
        for stopped in [Role::Client, Role::Server] {
            let (mut client, mut server) = (client(SECRET), server(SECRET));
            for step in 0..steps {
                match step {
                    0 | 2 => carry(&mut client, &mut server, at(0), 7),
                    1 | 3 => carry(&mut server, &mut client, at(0), 7),
                    4 => client.offer(at(0), parameters(17), Vec::new()),
                    5 => carry(&mut client, &mut server, at(0), 7),
                    6 => drop(server.accept(at(0), parameters(18), Vec::new())),
                    _ => carry(&mut server, &mut client, at(0), 7),
                }
            }
            let left = if stopped == Role::Client { &mut server } else { &mut client };
            let (mut now, mut turns) = (at(0), 0);
            while let Some(due) = left.poll_timeout() {
                assert!(due >= now && turns < 100, "after {steps} steps");
                (now, turns) = (due, turns + 1);
                left.handle_timeout(now);
                left.handle_transmitted(left.outbound.len());
            }
            assert!(now <= at(0) + DECISION_MAX, "after {steps} steps without the {stopped:?}: {now:?}");
            assert_eq!((left.state, left.inbound.capacity()), (State::Closed, 0));
            closed(left);
        }
    }
}

/// A clock that jumps (a virtual machine that was paused) ends a connection or it does not, but breaks nothing.
#[test]
fn a_clock_that_jumps_does_no_harm() {
    for jump in [Span::from_millis(3_600_000), Span(i64::MAX), Span::from_millis(-3_600_000), Span(i64::MIN)] {
        let (mut client, mut server) = established(1000);
        let now = at(8) + jump;
        client.handle_timeout(now);
        server.handle_timeout(now);
        exchange(&mut client, &mut server, now);
        let ended = client.state == State::Closed;
        assert_eq!(ended, jump > Span::ZERO, "{jump}");
        let (mut client, mut server) = offered(1000);
        server.handle_timeout(now);
        server.accept(now, parameters(18), Vec::new());
        exchange(&mut client, &mut server, now);
        while let Some(BootstrapEvent::Answered { .. }) = client.poll_event() {
            client.ready();
        }
        exchange(&mut client, &mut server, now);
        assert!(client.outbound.is_empty() && server.outbound.is_empty());
    }
}

#[test]
fn a_bootstrap_in_other_hands_has_their_clock() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    carry(&mut client, &mut server, at(1), 1000);
    carry(&mut server, &mut client, at(1), 1000);
    assert!(!server.is_proved() && client.is_proved());
    carry(&mut client, &mut server, at(1), 1000);
    assert!(server.is_proved());
    let theirs = at(900_000);
    server.handle_handover(theirs);
    server.handle_timeout(theirs);
    assert_eq!((server.state, server.poll_timeout()), (State::AwaitOffer, Some(theirs + HEARTBEAT)));
    client.offer(at(2), parameters(17), Vec::new());
    carry(&mut client, &mut server, theirs, 1000);
    assert!(matches!(server.poll_event(), Some(BootstrapEvent::Incoming { .. })));
}

#[test]
fn another_version_is_named_on_both_sides() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    client.outbound[MAGIC.len() + 1] = 9;
    exchange(&mut client, &mut server, at(1));
    let told = "the peer speaks bootstrap version 9, this is release 0.1.0 (wire 00000007) with 7: run releases with \
                one wire version; docs/operations.md, \"Upgrades\"";
    assert_eq!(closed(&mut server), told);
    assert_eq!(closed(&mut client), format!("the peer says: {told}"));
}

/// The third version's prefaces end with a nonce right after the version, and are shorter than ours.
#[test]
fn a_peer_of_the_third_version_is_refused_at_once() {
    let preface = [MAGIC.as_slice(), &3u16.to_be_bytes(), &[9; NONCE_BYTES]].concat();
    for mut ours in [client(SECRET), server(SECRET)] {
        ours.handle_bytes(at(1), &preface);
        let reason = closed(&mut ours);
        assert!(reason.starts_with("the peer speaks bootstrap version 3, this is release 0.1.0"), "{reason}");
        // Where a peer of that version looks for ours.
        assert_eq!(ours.poll_transmit()[MAGIC.len()..VERSION_END], VERSION.to_be_bytes());
    }
}

/// Takes a client and a server of two releases as far as they come.
fn mixed(ours: Identity, theirs: Identity, piece: usize) -> (String, String) {
    let mut client = Bootstrap::client(at(0), ours, [1; NONCE_BYTES]);
    let mut server = Bootstrap::server(at(0), theirs, [2; NONCE_BYTES]);
    while !(client.poll_transmit().is_empty() && server.poll_transmit().is_empty()) {
        carry(&mut client, &mut server, at(1), piece);
        assert!(!server.is_proved() && !client.is_proved());
        carry(&mut server, &mut client, at(1), piece);
    }
    assert_eq!(client.events.len() + server.events.len(), 2, "neither owner is told anything but the end");
    (closed(&mut client), closed(&mut server))
}

#[test]
fn peers_with_two_wires_both_name_both_releases() {
    for piece in [1, 41, usize::MAX] {
        let (client, server) = mixed(of_release("0.1.0", 7, SECRET), of_release("0.2.0", 8, SECRET), piece);
        let end = "run releases with one wire version; docs/operations.md, \"Upgrades\"";
        assert_eq!(
            client,
            format!("the peer is release 0.2.0 (wire 00000008), this is release 0.1.0 (wire 00000007): {end}")
        );
        assert_eq!(
            server,
            format!("the peer is release 0.1.0 (wire 00000007), this is release 0.2.0 (wire 00000008): {end}")
        );
    }
}

/// Nor is a stranger told of a release: whose secret is another is told only that.
#[test]
fn a_release_is_named_to_those_alone_who_know_the_secret() {
    let (client, server) = mixed(of_release("0.1.0", 7, SECRET), of_release("0.2.0", 8, b"guess"), usize::MAX);
    assert_eq!((client.as_str(), server), (DIFFER, format!("the peer says: {DIFFER}")));
    let mut server = super::tests::server(SECRET);
    server.handle_bytes(at(1), super::tests::client(SECRET).poll_transmit());
    let said = String::from_utf8_lossy(server.poll_transmit()).into_owned();
    assert!(!said.contains("0.1.0"), "{said:?}");
}

/// Proofs cover both wires: whoever changes them on the way is found out.
#[test]
fn a_wire_that_was_changed_on_the_way_is_no_members() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    client.outbound[VERSION_END] ^= 1;
    exchange(&mut client, &mut server, at(1));
    assert_eq!(closed(&mut client), DIFFER);
}

#[test]
fn a_release_that_is_no_name_is_cut_and_shown_on_one_line() {
    let long = format!("9\n\u{1b}[31m{}", "x".repeat(400));
    let (client, _) = mixed(identity(SECRET), of_release(&long, 8, SECRET), usize::MAX);
    assert!(client.starts_with("the peer is release 9  [31mxxx") && client.contains("x (wire 00000008), "), "{client}");
    assert!(client.len() < 300 && !client.contains(char::is_control), "{client}");
    // One that tells a longer name than it may.
    let mut client = super::tests::client(SECRET);
    let mut server = Bootstrap::server(at(0), of_release("0.2.0", 8, SECRET), [2; NONCE_BYTES]);
    carry(&mut client, &mut server, at(1), usize::MAX);
    carry(&mut server, &mut client, at(1), usize::MAX);
    server.say(&Message::Release("y".repeat(500)));
    carry(&mut server, &mut client, at(1), usize::MAX);
    let reason = closed(&mut client);
    assert!(reason.contains(&"y".repeat(RELEASE_BYTES_MAX)) && !reason.contains(&"y".repeat(65)), "{reason}");
}

/// What has another form here is another version: raise [`VERSION`] with it.
#[test]
fn the_seventh_version_has_these_bytes() {
    assert_eq!(VERSION, 7);
    let mut client = client(SECRET);
    let preface = [MAGIC.as_slice(), &[0, 7, 0, 0, 0, 7, 0, 0, 0, 0], &[1; 32]].concat();
    assert_eq!(client.poll_transmit(), preface);
    let infiniband = Parameters { address: PacketAddress::InfiniBand { lid: 0x1234 }, ..parameters(17) };
    let roce = Parameters { address: PacketAddress::Roce("[::1]:4791".parse().unwrap()), ..parameters(17) };
    let messages = [
        Message::Proof([3; 32]),
        Message::Offer(parameters(17), b"hello".to_vec()),
        Message::Offer(infiniband, Vec::new()),
        Message::Answer(roce, b"welcome".to_vec()),
        Message::Ready,
        Message::Heartbeat,
        Message::Close("why".to_owned()),
        Message::Release("0.1.0".to_owned()),
    ];
    let mut lines = String::new();
    for message in messages {
        client.outbound.clear();
        client.say(&message);
        lines.extend(client.outbound.iter().map(|byte| format!("{byte:02x}")));
        lines.push('\n');
    }
    assert_eq!(lines, include_str!("golden.txt"));
}

#[test]
fn garbage_is_refused_at_its_first_byte() {
    let mut server = server(SECRET);
    server.handle_bytes(at(1), b"GET / HTTP/1.1\r\n");
    let reason = closed(&mut server);
    assert!(reason.contains("does not speak") && reason.contains("GET / HT") && !reason.contains('\n'), "{reason}");
    assert!(server.poll_transmit().is_empty());
}

/// An alert from a server that was not greeted in TLS, and the greeting of a client.
#[test]
fn a_peer_that_speaks_tls_is_told_from_garbage() {
    for record in [&b"\x15\x03\x03\x00\x02\x02\x32"[..], b"\x16\x03\x01\x02\x00\x01", b"\x16"] {
        for mut member in [client(SECRET), server(SECRET)] {
            member.handle_bytes(at(1), record);
            let reason = closed(&mut member);
            assert!(reason.contains("speaks TLS and this member has no [tls]"), "{reason}");
        }
    }
    let mut server = server(SECRET);
    server.handle_bytes(at(1), b"\x16\x00\x03");
    assert!(closed(&mut server).contains("is the address right?"));
}

#[test]
fn oversized_lengths_hold_no_memory() {
    let (mut client, mut server) = (client(SECRET), server(SECRET));
    carry(&mut client, &mut server, at(1), 1000);
    server.handle_bytes(at(1), &(UNPROVED_BYTES_MAX as u32 + 1).to_be_bytes());
    assert!(closed(&mut server).contains("at most 576 are allowed"));
    let mut stranger = Bootstrap::server(at(0), identity(SECRET), [2; NONCE_BYTES]);
    let preface = super::tests::client(SECRET).poll_transmit().to_vec();
    stranger.handle_bytes(at(1), &preface);
    stranger.handle_bytes(at(1), &[&576u32.to_be_bytes()[..], &[1; 60_000]].concat());
    assert!(closed(&mut stranger).contains("does not decode"));
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
            let most = if server.is_proved() { MESSAGE_BYTES_MAX } else { UNPROVED_BYTES_MAX };
            prop_assert!(server.inbound.capacity() <= 4 * most);
            prop_assert!(server.outbound.len() <= 4 * MESSAGE_BYTES_MAX);
        }
    }
}
