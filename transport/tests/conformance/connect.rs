//! Bootstrap: who comes in, who does not, and what each side is told.
#![allow(clippy::disallowed_methods)] // Strangers have sockets of their own.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
};

use proto::Span;
use proto::WireVersion;
use transport::{EndpointConfig, Event, Release};

use crate::fabric::{Fabric, SECRET, config, pattern};

#[test]
fn connect_and_accept() {
    let mut fabric = Fabric::new(2);
    let (ours, theirs) = fabric.connect(0, 1);
    let incarnation = fabric.nodes[1].endpoint.incarnation();
    assert_eq!(fabric.nodes[0].endpoint.peer_incarnation(ours), Some(incarnation));
    let incarnation = fabric.nodes[0].endpoint.incarnation();
    assert_eq!(fabric.nodes[1].endpoint.peer_incarnation(theirs), Some(incarnation));
}

#[test]
fn a_refusal_tells_why() {
    let mut fabric = Fabric::new(2);
    let (now, to) = (fabric.now(), fabric.address(1));
    let ours = fabric.nodes[0].endpoint.connect(now, to, Vec::new());
    let Event::Incoming { connection, .. } = fabric.event(1) else { panic!("not incoming") };
    let now = fabric.now();
    fabric.nodes[1].endpoint.refuse(now, connection, "no model of that name");
    assert!(fabric.disconnected(0, ours).ends_with("the peer says: no model of that name"));
    fabric.quiet(1);
}

#[test]
fn what_an_acceptor_sends_at_once_arrives() {
    let mut fabric = Fabric::new(2);
    let (now, to) = (fabric.now(), fabric.address(1));
    let ours = fabric.nodes[0].endpoint.connect(now, to, Vec::new());
    let Event::Incoming { connection, .. } = fabric.event(1) else { panic!("not incoming") };
    let (now, transfer) = (fabric.now(), fabric.transfer(1, 0, 3, 0, 100));
    let server = &mut fabric.nodes[1].endpoint;
    server.accept(now, connection, Vec::new());
    server.send(connection, b"first").unwrap();
    server.read(connection, transfer).unwrap();
    assert_eq!(fabric.event(0), Event::Connected { connection: ours, welcome: Vec::new() });
    assert_eq!(fabric.event(0), Event::Message { connection: ours, frame: b"first".to_vec() });
    assert_eq!(fabric.event(1), Event::ReadDone { connection, token: 3, result: Ok(()) });
    let counters = fabric.nodes[1].endpoint.counters();
    assert!(
        counters.is_none_or(|counters| counters.retransmits_timeout == 0),
        "nothing was sent before the peer could receive"
    );
}

#[test]
fn a_release_with_another_wire_is_refused_and_both_are_named() {
    let of = |name: &str, wire: u64| Release { name: name.to_owned(), wire: WireVersion(wire << 32) };
    let (old, new) = (of("0.1.0", 0x5f3a), of("0.2.0", 0x81c2));
    let configs = [(0, old), (1, new)].map(|(node, release)| EndpointConfig { release, ..config(node) });
    let mut fabric = Fabric::with(configs);
    let (now, to) = (fabric.now(), fabric.address(1));
    let ours = fabric.nodes[0].endpoint.connect(now, to, b"hello".to_vec());
    let told = "the peer is release 0.2.0 (wire 000081c2), this is release 0.1.0 (wire 00005f3a): run releases with \
                one wire version; docs/operations.md, \"Upgrades\"";
    assert_eq!(fabric.disconnected(0, ours), format!("{to}: {told}"));
    fabric.until("the server to refuse", |fabric| (fabric.nodes[1].endpoint.connections_refused() == 1).then_some(()));
    fabric.quiet(1);
}

#[test]
fn another_secret_is_refused_and_the_server_hears_nothing() {
    let mut fabric = Fabric::with([config(0).with_secret("another one's secret"), config(1)]);
    let (now, to) = (fabric.now(), fabric.address(1));
    let ours = fabric.nodes[0].endpoint.connect(now, to, Vec::new());
    assert!(fabric.disconnected(0, ours).contains("secrets differ"));
    fabric.quiet(1);
}

#[test]
fn garbage_is_refused_and_does_no_harm() {
    let mut fabric = Fabric::new(2);
    let garbage: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", &[0; 5000], b"downbeat\x00\x09", b""];
    for bytes in garbage {
        let mut stranger = TcpStream::connect(fabric.address(1)).unwrap();
        stranger.write_all(bytes).unwrap();
        stranger.set_nonblocking(true).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        fabric.until("the server to close", |_| match stranger.read(&mut [0; 4096]) {
            Ok(0) => Some(()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Some(()),
            _ => None,
        });
    }
    fabric.connect(0, 1);
}

#[test]
fn a_stranger_who_says_nothing_is_dropped() {
    let mut fabric = Fabric::new(2);
    let mut stranger = TcpStream::connect(fabric.address(1)).unwrap();
    stranger.set_nonblocking(true).unwrap();
    (0..20).for_each(|_| fabric.step());
    fabric.skip(Span::from_millis(2_100));
    fabric.until("the server to close", |_| match stranger.read(&mut [0; 4096]) {
        Ok(0) => Some(()),
        _ => None,
    });
    fabric.connect(0, 1);
}

#[test]
fn a_server_that_is_none_is_named() {
    let mut fabric = Fabric::new(1);
    // Nobody there.
    let nobody = testing::Port::hold();
    let gone = nobody.address();
    let now = fabric.now();
    let ours = fabric.nodes[0].endpoint.connect(now, gone, Vec::new());
    let reason = fabric.disconnected(0, ours);
    assert!(reason.contains("refused") && reason.contains(&gone.to_string()), "{reason}");
    // Somebody else.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = fabric.nodes[0].endpoint.connect(now, other.local_addr().unwrap(), Vec::new());
    let (mut stream, _) = other.accept().unwrap();
    stream.write_all(b"SSH-2.0-x\r\n").unwrap();
    assert!(fabric.disconnected(0, ours).contains("does not speak downbeat's bootstrap"));
    // Somebody who says nothing.
    let ours = fabric.nodes[0].endpoint.connect(now, other.local_addr().unwrap(), Vec::new());
    let _stream = other.accept().unwrap();
    (0..20).for_each(|_| fabric.step());
    fabric.skip(Span::from_millis(2_100));
    assert!(fabric.disconnected(0, ours).contains("no complete handshake"));
}

#[test]
fn connections_max_holds_on_both_sides() {
    let small = EndpointConfig { connections_max: 1, ..config(0) };
    let mut fabric = Fabric::with([small, config(1)]);
    fabric.connect(0, 1);
    let (now, to) = (fabric.now(), fabric.address(1));
    let second = fabric.nodes[0].endpoint.connect(now, to, Vec::new());
    assert!(fabric.disconnected(0, second).contains("connections_max = 1 is reached"));
    let to = fabric.address(0);
    let second = fabric.nodes[1].endpoint.connect(now, to, Vec::new());
    assert!(fabric.disconnected(1, second).contains("connections_max = 1 is reached"));
}

#[test]
fn many_connections() {
    let mut fabric = Fabric::new(2);
    let pairs: Vec<_> = (0..64).map(|_| fabric.connect(0, 1)).collect();
    for (at, &(ours, theirs)) in pairs.iter().enumerate() {
        fabric.nodes[0].endpoint.send(ours, format!("to {at}").as_bytes()).unwrap();
        fabric.nodes[1].endpoint.send(theirs, format!("from {at}").as_bytes()).unwrap();
    }
    let mut got = [Vec::new(), Vec::new()];
    for (node, got) in got.iter_mut().enumerate() {
        while got.len() < pairs.len() {
            let Event::Message { connection, frame } = fabric.event(node) else { panic!("not a message") };
            got.push((connection, String::from_utf8(frame).unwrap()));
        }
        got.sort();
    }
    let expected = |side: fn(&(_, _)) -> _, word: &str| -> Vec<_> {
        pairs.iter().enumerate().map(|(at, pair)| (side(pair), format!("{word} {at}"))).collect()
    };
    assert_eq!(got[0], expected(|pair| pair.0, "from"));
    assert_eq!(got[1], expected(|pair| pair.1, "to"));
}

#[test]
fn over_ipv6() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        testing::skip("transport/over_ipv6", "an IPv6 loopback");
        return;
    }
    // The soft arm, whichever the others run on: rdma_rxe's interfaces have no IPv6 there.
    let any_port = "[::1]:0".parse().unwrap();
    let config = || EndpointConfig::soft(any_port).listening(any_port).with_secret(SECRET);
    let mut fabric = Fabric::with([config(), config()]);
    let (connection, _) = fabric.connect(0, 1);
    fabric.nodes[1].region.write(0, &pattern(1, 100_000));
    let transfer = fabric.transfer(0, 1, 1, 0, 100_000);
    fabric.nodes[0].endpoint.read(connection, transfer).unwrap();
    assert_eq!(fabric.event(0), Event::ReadDone { connection, token: 1, result: Ok(()) });
    assert!(fabric.nodes[0].bytes(0, 100_000) == pattern(1, 100_000));
}
