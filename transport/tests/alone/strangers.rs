//! Strangers that connect, and stay, while a member comes. Alone in its process, as it needs many descriptors.
#![allow(clippy::disallowed_methods)] // Strangers have sockets of their own.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

use crate::{
    alone,
    fabric::{Fabric, config},
};
use transport::{EndpointConfig, Event};

/// Regression: each connection that had not proved itself took one of the few that `connections_max` allows, for two
/// seconds.
#[test]
fn a_member_comes_in_though_more_strangers_are_there_than_may_connect() {
    let _alone = alone();
    let small = EndpointConfig { connections_max: 2, ..config(1) };
    let mut fabric = Fabric::with([config(0), small]);
    let to = fabric.address(1);
    // Some say nothing, some what a client says first, some garbage.
    let says: [&[u8]; 3] = [b"", &[b"downbeat\x00\x07".as_slice(), &[7; 40]].concat(), b"downbeat\x00\x07"];
    let mut strangers = Vec::new();
    for number in 0..600 {
        let mut stranger = TcpStream::connect(to).unwrap();
        stranger.write_all(says[number % 3]).unwrap();
        strangers.push(stranger);
        if number % 200 == 199 {
            let (ours, theirs) = fabric.connect(0, 1);
            fabric.nodes[0].endpoint.send(ours, b"here").unwrap();
            assert_eq!(fabric.event(1), Event::Message { connection: theirs, frame: b"here".to_vec() });
            fabric.nodes[0].endpoint.disconnect(ours);
            fabric.disconnected(0, ours);
            fabric.disconnected(1, theirs);
        }
    }
    // The pool holds 256; whoever had to make room was told why, and counted.
    fabric.until("the others to be refused", |fabric| {
        (fabric.nodes[1].endpoint.connections_refused() >= 600 - 256).then_some(())
    });
    let mut said = Vec::new();
    strangers[1].read_to_end(&mut said).unwrap();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("too many connect at once that do not prove themselves"), "{said:?}");
    fabric.quiet(1);
}

/// The address is free again as soon as the endpoint is gone.
#[test]
fn an_endpoint_gives_its_address_back() {
    let _alone = alone();
    let mut fabric = Fabric::new(1);
    let at = fabric.address(0);
    let _stranger = TcpStream::connect(at).unwrap();
    for _ in 0..3 {
        fabric.nodes.pop();
        fabric.nodes.extend(Fabric::with([config(0).listening(at)]).nodes);
        assert_eq!(fabric.address(0), at);
    }
}
