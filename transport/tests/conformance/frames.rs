//! Two-sided messages: order, credits, bounds.

use proto::{Span, Wait, frame::FRAME_BYTES_MAX};
use transport::{ConnectionId, EndpointConfig, Event, PostError};

use crate::fabric::{Fabric, config, pattern};

/// The frame with this number, of a length that differs from its neighbours'.
fn frame(number: u64) -> Vec<u8> {
    let length = [0, 1, 63, 64, 4087, 4088, 4089, FRAME_BYTES_MAX][number as usize % 8];
    pattern(number, length)
}

#[test]
fn frames_arrive_in_order_both_ways_under_credit_pressure() {
    let mut fabric = Fabric::new(2);
    let (ours, theirs) = fabric.connect(0, 1);
    let ids = [ours, theirs];
    let frames = 3000;
    let (mut sent, mut got) = ([0, 0], [0, 0]);
    let mut full = 0;
    fabric.until("all frames", |fabric| {
        for node in 0..2 {
            while sent[node] < frames {
                match fabric.nodes[node].endpoint.send(ids[node], &frame(sent[node])) {
                    Ok(()) => sent[node] += 1,
                    Err(PostError::QueueFull) => {
                        full += 1;
                        break;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            while let Some(event) = fabric.nodes[node].events.pop_front() {
                assert_eq!(event, Event::Message { connection: ids[node], frame: frame(got[node]) });
                got[node] += 1;
            }
        }
        (got == [frames, frames]).then_some(())
    });
    assert!(full > 0, "the queue was never full: no pressure");
    assert_eq!(fabric.not_ready(), 0);
}

#[test]
fn a_receiver_that_takes_nothing_holds_its_sender_back() {
    let patient = |node| EndpointConfig { credit_wait: Span::from_millis(3_600_000), ..config(node) };
    let mut fabric = Fabric::with((0..2).map(patient));
    let (ours, theirs) = fabric.connect(0, 1);
    fabric.collecting = false;
    let mut sent = 0;
    for _ in 0..500 {
        while fabric.nodes[0].endpoint.send(ours, &frame(sent)).is_ok() {
            sent += 1;
        }
        fabric.step();
    }
    assert_eq!(fabric.nodes[0].endpoint.send(ours, &[0; FRAME_BYTES_MAX]), Err(PostError::QueueFull));
    assert_eq!(fabric.not_ready(), 0);
    // The other way is free.
    fabric.nodes[1].endpoint.send(theirs, b"slow down").unwrap();
    (0..100).for_each(|_| fabric.step());
    fabric.collecting = true;
    assert_eq!(fabric.event(0), Event::Message { connection: ours, frame: b"slow down".to_vec() });
    for number in 0..sent {
        assert_eq!(fabric.event(1), Event::Message { connection: theirs, frame: frame(number) });
    }
    fabric.quiet(1);
}

/// A member that acknowledged WRITEs, gave no credit and sent heartbeats once kept a cluster silent for 25 seconds.
#[test]
fn a_receiver_that_takes_nothing_for_too_long_is_lost_and_others_are_not() {
    let mut fabric = Fabric::new(3);
    let (to_slow, _) = fabric.connect(0, 1);
    let (to_other, _) = fabric.connect(0, 2);
    fabric.collecting = false;
    let mut sent = 0;
    while fabric.nodes[0].endpoint.send(to_slow, b"frame").is_ok() {
        sent += 1;
    }
    let transfer = fabric.transfer(0, 1, 77, 0, 10);
    let full = fabric.nodes[0].endpoint.write_with_immediate(to_slow, transfer, 1);
    assert_eq!((full, sent > 64), (Err(PostError::QueueFull), true));
    fabric.nodes[0].endpoint.send(to_other, b"frame").unwrap();
    // All live: their heartbeats come.
    for _ in 0..8 {
        fabric.skip(Span::from_millis(200));
        (0..20).for_each(|_| fabric.step());
    }
    fabric.collecting = true;
    let Event::Disconnected { connection, reason } = fabric.event(0) else { panic!("the slow one is lost first") };
    assert!(connection == to_slow && reason.is_starved, "{reason:?}");
    assert!(reason.text.contains("no credit for 1.000 s") && Wait::Credit.reached() > 0, "{reason:?}");
    fabric.nodes[0].endpoint.send(to_other, b"frame").unwrap();
    // It is told why, which says nothing of us.
    let told = std::iter::repeat_with(|| fabric.event(1)).find_map(|event| match event {
        Event::Disconnected { reason, .. } => Some(reason),
        _ => None,
    });
    assert!(told.as_ref().is_some_and(|told| told.text.contains("takes nothing in") && !told.is_starved), "{told:?}");
}

/// A process that the system does not let run has not given up its peers: it is lost by its silence, as ever.
#[test]
fn a_receiver_that_stands_still_is_not_taken_for_one_that_takes_nothing() {
    let mut fabric = Fabric::new(2);
    let (ours, _) = fabric.connect(0, 1);
    fabric.collecting = false;
    for _ in 0..100 {
        fabric.nodes[0].endpoint.send(ours, b"frame").unwrap();
        fabric.step();
    }
    fabric.stalled.push(1);
    for _ in 0..20 {
        fabric.skip(Span::from_millis(200));
        (0..20).for_each(|_| fabric.step());
    }
    fabric.collecting = true;
    let Event::Disconnected { reason, .. } = fabric.event(0) else { panic!("it is lost") };
    assert!(!reason.is_starved, "{reason:?}");
}

#[test]
fn nothing_is_sent_where_there_is_no_connection() {
    let mut fabric = Fabric::new(2);
    let transfer = fabric.transfer(0, 1, 1, 0, 10);
    let (now, to) = (fabric.now(), fabric.address(1));
    let node = &mut fabric.nodes[0].endpoint;
    let connecting = node.connect(now, to, Vec::new());
    for connection in [ConnectionId(999), connecting] {
        assert_eq!(node.send(connection, b""), Err(PostError::NotConnected));
        assert_eq!(node.read(connection, transfer), Err(PostError::NotConnected));
        assert_eq!(node.write_with_immediate(connection, transfer, 0), Err(PostError::NotConnected));
    }
}
