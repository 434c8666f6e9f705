//! Endpoints that dial names, by a resolver of the test's own.

use std::sync::{Arc, Mutex, mpsc};

use super::*;
use crate::{Clock, Endpoint, EndpointConfig, Event, random_loopback};

const SECRET: &str = "known to both ends";

fn server() -> Endpoint {
    let at = |port| SocketAddr::new(random_loopback().into(), port);
    Endpoint::open(EndpointConfig::soft(at(0)).listening(at(0)).with_secret(SECRET)).unwrap()
}

/// A client, whose names lead where the test says.
fn client(found: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Endpoint {
    let config = EndpointConfig::soft(SocketAddr::new(random_loopback().into(), 0)).with_secret(SECRET);
    Endpoint::open_with(config, Resolver::new(move |host, _| found(host))).unwrap()
}

/// What the client is told of its connection.
fn outcome(clock: Clock, client: &mut Endpoint, mut servers: Vec<&mut Endpoint>) -> Result<Vec<u8>, String> {
    loop {
        let now = clock.now();
        for server in &mut servers {
            server.drive(now);
            while let Some(event) = server.poll_event() {
                if let Event::Incoming { connection, hello, .. } = event {
                    server.accept(now, connection, hello);
                }
            }
        }
        client.drive(now);
        match client.poll_event() {
            Some(Event::Connected { welcome, .. }) => return Ok(welcome),
            Some(Event::Disconnected { reason, .. }) => return Err(reason.text),
            _ => client.wait(now, now + proto::Span::from_millis(1)),
        }
    }
}

fn name(text: &str) -> Address {
    text.parse().unwrap()
}

#[test]
fn a_peer_that_comes_back_under_another_address_is_found_by_its_name() {
    let clock = Clock::start();
    let (mut first, mut second) = (server(), server());
    let at = Arc::new(Mutex::new(vec![first.listen_address().unwrap()]));
    let zone = Arc::clone(&at);
    let mut client = client(move |_| Ok(zone.lock().unwrap().clone()));
    client.connect(clock.now(), name("scheduler.example:7400"), b"one".to_vec());
    assert_eq!(outcome(clock, &mut client, vec![&mut first]), Ok(b"one".to_vec()));
    *at.lock().unwrap() = vec![second.listen_address().unwrap()];
    let former = first.listen_address().unwrap();
    drop(first);
    let lost = outcome(clock, &mut client, vec![&mut second]).unwrap_err();
    assert!(lost.starts_with(&format!("scheduler.example:7400 ({}): ", former.ip())), "{lost}");
    client.connect(clock.now(), name("scheduler.example:7400"), b"two".to_vec());
    assert_eq!(outcome(clock, &mut client, vec![&mut second]), Ok(b"two".to_vec()));
}

#[test]
fn a_name_that_leads_nowhere_ends_its_connection_alone() {
    let clock = Clock::start();
    let mut there = server();
    let at = there.listen_address().unwrap();
    let mut client = client(move |host| match host {
        "there.example" => Ok(vec![at]),
        "empty.example" => Ok(Vec::new()),
        _ => Err(io::Error::other("no such name")),
    });
    client.connect(clock.now(), name("there.example:1"), b"hello".to_vec());
    assert!(outcome(clock, &mut client, vec![&mut there]).is_ok());
    for (host, told) in
        [("nowhere.example:1", "cannot be looked up (no such name)"), ("empty.example:1", "resolves to no")]
    {
        let lost = client.connect(clock.now(), name(host), b"hello".to_vec());
        let reason = outcome(clock, &mut client, vec![&mut there]).unwrap_err();
        assert!(
            reason.starts_with(&format!("scheduler, schedulers: found `{host}`, which {told}")),
            "{lost:?}: {reason}"
        );
    }
    client.connect(clock.now(), name("there.example:1"), b"again".to_vec());
    assert_eq!(outcome(clock, &mut client, vec![&mut there]), Ok(b"again".to_vec()));
}

#[test]
fn who_waits_for_a_name_in_vain_is_told_when_its_time_is_over() {
    let clock = Clock::start();
    let (holds, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    // Until the test ends.
    let mut client = client(move |_| {
        let _ = held.lock().unwrap().recv();
        Ok(Vec::new())
    });
    let now = clock.now();
    let given_up = client.connect(now, name("slow.example:1"), Vec::new());
    client.disconnect(given_up);
    let reason = |client: &mut Endpoint| match client.poll_event() {
        Some(Event::Disconnected { connection, reason }) => Some((connection, reason.text)),
        _ => None,
    };
    assert_eq!(reason(&mut client), Some((given_up, "slow.example:1: we disconnected".to_owned())));
    let late = client.connect(now, name("slow.example:1"), Vec::new());
    assert!(client.poll_timeout().is_some_and(|at| at <= now + RESOLVE_MAX));
    client.drive(now + RESOLVE_MAX);
    let (connection, text) = reason(&mut client).expect("its time is over");
    assert_eq!(connection, late);
    assert!(text.contains("`slow.example:1`, for which no resolver had an answer within 8"), "{text}");
    drop(holds);
}
