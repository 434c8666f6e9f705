//! Endpoints on one UDP address: each gets the packets of its own queue pairs.

use proto::Span;
use transport::{Clock, Endpoint, EndpointConfig, Event, ROCE_PORT, random_loopback};

#[test]
fn endpoints_share_an_address() {
    let clock = Clock::start();
    let address = (random_loopback(), ROCE_PORT).into();
    let open = || {
        let config = EndpointConfig::soft(address).sharing_address().with_secret("the cluster's secret");
        Endpoint::open(config.listening("127.0.0.1:0".parse().unwrap())).unwrap()
    };
    let mut servers = [open(), open(), open()];
    let alone = Endpoint::open(EndpointConfig::soft(address)).err().expect("refused").to_string();
    assert!(alone.contains("let all processes share it") && alone.contains("keys address, shared_address"), "{alone}");
    let mut client = Endpoint::open(EndpointConfig::default().with_secret("the cluster's secret")).unwrap();
    let connections = servers.each_ref().map(|server| {
        let to = server.listen_address().unwrap();
        client.connect(clock.now(), to, b"hello".to_vec())
    });
    let mut received = [None, None, None];
    let until = clock.now() + Span::from_millis(300_000);
    while received.iter().any(Option::is_none) {
        assert!(clock.now() < until, "received so far: {received:?}");
        client.drive(clock.now());
        while let Some(event) = client.poll_event() {
            match event {
                Event::Connected { connection, .. } => {
                    let index = connections.iter().position(|&other| other == connection).unwrap();
                    client.send(connection, &[index as u8]).unwrap();
                }
                Event::Disconnected { reason, .. } => panic!("{reason}"),
                _ => {}
            }
        }
        for (index, server) in servers.iter_mut().enumerate() {
            server.drive(clock.now());
            while let Some(event) = server.poll_event() {
                match event {
                    Event::Incoming { connection, .. } => server.accept(clock.now(), connection, Vec::new()),
                    Event::Message { frame, .. } => received[index] = Some(frame[0]),
                    Event::Disconnected { reason, .. } => panic!("{reason}"),
                    _ => {}
                }
            }
        }
    }
    assert_eq!(received, [Some(0), Some(1), Some(2)]);
}
