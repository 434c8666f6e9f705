//! Every status that a work request can end with: what leads to it, at the end that asks and at the end that is asked,
//! and that no other request of the queue pair ends with it.

use std::{collections::BTreeSet, time::Duration};

use crate::common::{Pair, scripted::Scripted};
use soft_roce::{
    Access, Operation, PathMtu, QueuePairConfig, QueuePairState, RecvRequest, Remote, Segment, SendRequest, Status,
    wire::{PacketKind, Syndrome},
};

use Status::*;

const ALL: [Status; 11] = [
    Success,
    LocalLength,
    LocalQueuePairOperation,
    LocalProtection,
    Flushed,
    BadResponse,
    RemoteInvalidRequest,
    RemoteAccess,
    RemoteOperation,
    RetryExceeded,
    ReceiverNotReadyRetryExceeded,
];

/// As `enum ibv_wc_status` numbers them. A new status does not compile here until it is in [`ALL`], and so has a case.
const fn number(status: Status) -> u8 {
    match status {
        Success
        | LocalLength
        | LocalQueuePairOperation
        | LocalProtection
        | Flushed
        | BadResponse
        | RemoteInvalidRequest
        | RemoteAccess
        | RemoteOperation
        | RetryExceeded
        | ReceiverNotReadyRetryExceeded => status as u8,
    }
}

const BYTES: u32 = 64;
/// The request and the receive before the one that fails, that one, and one behind it.
const IDS: [u64; 3] = [1, 2, 3];

/// What the one that fails does, and what is done to it.
#[derive(Debug, Clone, Copy)]
enum Cause {
    Nothing,
    ReceiveTooShort,
    NoReadsAllowed,
    OwnKeyUnknown,
    PeersKeyUnknown,
    OperationNotEnabled,
    ReceivesKeyUnknown,
    Silence,
    NoReceive,
}

/// The status of the second of three SENDs or their like, and of the receive that it meets.
fn outcome(cause: Cause) -> [Vec<Status>; 2] {
    let access = Access { remote_atomic: false, ..Access::ALL };
    let max_rd_atomic = if matches!(cause, Cause::NoReadsAllowed) { 0 } else { 4 };
    let config = QueuePairConfig { rnr_retry: 2, retry_count: 2, max_rd_atomic, access, ..QueuePairConfig::default() };
    let mut pair = Pair::new(5, config, PathMtu::Mtu256);
    let near = pair.register(0, vec![1; 1_024], Access::ALL).1;
    let far = pair.register(1, vec![2; 1_024], Access::ALL).1;
    let receives = if matches!(cause, Cause::NoReceive) { &IDS[..1] } else { &IDS[..] };
    for &id in receives {
        let mut segment = Segment { lkey: far.lkey, offset: 0, bytes: BYTES };
        match cause {
            Cause::ReceiveTooShort if id == 2 => segment.bytes -= 1,
            Cause::ReceivesKeyUnknown if id == 2 => segment.lkey ^= 1 << 20,
            _ => {}
        }
        pair.post_recv(1, RecvRequest { id, segment });
    }
    let local = Segment { lkey: near.lkey, offset: 0, bytes: BYTES };
    let remote = Remote { address: far.address, rkey: far.rkey };
    for id in IDS {
        let operation = match cause {
            Cause::NoReadsAllowed if id == 2 => Operation::Read { local, remote },
            Cause::OwnKeyUnknown if id == 2 => Operation::Send { local: Segment { lkey: !near.lkey, ..local } },
            Cause::PeersKeyUnknown if id == 2 => {
                Operation::Write { local, remote: Remote { rkey: !far.rkey, ..remote } }
            }
            Cause::OperationNotEnabled if id == 2 => {
                Operation::FetchAdd { local: Segment { bytes: 8, ..local }, remote, add: 1 }
            }
            _ => Operation::Send { local },
        };
        pair.ends[0].post_send(pair.queue_pairs[0], SendRequest::new(id, operation)).unwrap();
        // The others are answered, or at least on their way, before.
        while id == 1 && pair.completions[0].is_empty() && pair.step() {}
        if id == 1 && matches!(cause, Cause::Silence) {
            pair.faults.partition = Some((pair.now, pair.now + Duration::from_secs(3_600)));
        }
    }
    pair.run();
    pair.completions.map(|completions| {
        assert!(completions.iter().map(|done| done.id).eq(IDS.into_iter().take(completions.len())), "{cause:?}");
        completions.iter().map(|done| done.status).collect()
    })
}

#[test]
fn every_cause_has_its_status_at_both_ends() {
    let cases = [
        (Cause::Nothing, [Success; 3], [Success; 3]),
        (Cause::ReceiveTooShort, [Success, RemoteInvalidRequest, Flushed], [Success, LocalLength, Flushed]),
        (Cause::OwnKeyUnknown, [Success, LocalProtection, Flushed], [Success; 3]),
        (Cause::NoReadsAllowed, [Success, LocalQueuePairOperation, Flushed], [Success; 3]),
        (Cause::PeersKeyUnknown, [Success, RemoteAccess, Flushed], [Success, Flushed, Flushed]),
        (Cause::OperationNotEnabled, [Success, RemoteInvalidRequest, Flushed], [Success, Flushed, Flushed]),
        (Cause::ReceivesKeyUnknown, [Success, RemoteOperation, Flushed], [Success, LocalProtection, Flushed]),
        (Cause::Silence, [Success, RetryExceeded, Flushed], [Success; 3]),
        (Cause::NoReceive, [Success, ReceiverNotReadyRetryExceeded, Flushed], [Success; 3]),
    ];
    let seen: BTreeSet<_> =
        cases.iter().flat_map(|(_, asking, asked)| [asking, asked]).flatten().copied().map(number).collect();
    assert_eq!(ALL.map(number), [0, 1, 2, 4, 5, 7, 9, 10, 11, 12, 13]);
    let provoked_below = number(BadResponse);
    assert!(ALL.map(number).into_iter().filter(|&number| number != provoked_below).eq(seen));
    for (cause, asking, asked) in cases {
        let [near, far] = outcome(cause);
        assert_eq!(near, asking, "{cause:?}");
        // Where the failure is on our side alone, the peer's receives just stay posted.
        assert_eq!(far, asked[..far.len()], "{cause:?}");
        let waiting = matches!(cause, Cause::OwnKeyUnknown | Cause::NoReadsAllowed | Cause::Silence | Cause::NoReceive);
        assert_eq!(far.len(), if waiting { 1 } else { 3 }, "{cause:?}");
    }
}

/// No honest peer answers like this, so it is played here.
#[test]
fn an_answer_that_is_none_has_its_status_too() {
    let mut peer = Scripted::new(QueuePairConfig::default(), PathMtu::Mtu256);
    let (_, handle) = peer.register(vec![0; 1_024], Access::LOCAL);
    let local = Segment { lkey: handle.lkey, offset: 0, bytes: BYTES };
    peer.post_send(2, Operation::Read { local, remote: Remote { address: 0, rkey: 1 } });
    peer.post_send(3, Operation::Read { local, remote: Remote { address: 0, rkey: 1 } });
    peer.transmitted();
    peer.deliver(peer.response(PacketKind::ReadResponseOnly, 0, Syndrome::ACK), &[0; BYTES as usize - 1]);
    let statuses: Vec<_> = peer.completions().iter().map(|done| (done.id, done.status)).collect();
    assert_eq!(statuses, [(2, Status::BadResponse), (3, Status::Flushed)]);
    assert_eq!(peer.state(), QueuePairState::Error);
}
