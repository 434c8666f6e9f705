//! Two-sided messages: order, credits, bounds.

use proto::frame::FRAME_BYTES_MAX;
use transport::{ConnectionId, Event, PostError};

use crate::fabric::{Fabric, pattern};

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
    let mut fabric = Fabric::new(2);
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
