//! Asynchronous events (IBTA 11.6.3): what happens to a queue outside any one work request.

use std::collections::VecDeque;

use crate::{config::SharedReceiveQueueNumber, wire::QueuePairNumber};

/// Events that were not polled yet; more are counted and dropped.
const EVENTS_MAX: usize = 1_024;

/// What happened, and to what. In brackets the name that verbs give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The first packet came while the queue pair was in RTR `COMM_EST`.
    CommunicationEstablished(QueuePairNumber),
    /// All that was begun before the queue pair was moved to SQD is complete `SQ_DRAINED`.
    SendQueueDrained(QueuePairNumber),
    /// The peer asked for something impossible, which ended the queue pair `QP_REQ_ERR`.
    RequestError(QueuePairNumber),
    /// The peer used an address or key that it may not use, which ended the queue pair `QP_ACCESS_ERR`.
    AccessError(QueuePairNumber),
    /// We failed on our own side to carry out what the peer asked for, which ended the queue pair `QP_FATAL`.
    QueuePairFatal(QueuePairNumber),
    /// A queue pair in ERROR takes nothing more from its shared receive queue `QP_LAST_WQE_REACHED`.
    LastReceiveReached(QueuePairNumber),
    /// A shared receive queue holds fewer receives than its limit `SRQ_LIMIT_REACHED`.
    SharedReceiveQueueLow(SharedReceiveQueueNumber),
}

/// The events of an endpoint in order.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    ready: VecDeque<AsyncEvent>,
}

impl EventQueue {
    /// False if there is no room.
    pub(crate) fn push(&mut self, event: AsyncEvent) -> bool {
        let room = self.ready.len() < EVENTS_MAX;
        if room {
            self.ready.push_back(event);
        }
        room
    }

    pub(crate) fn pop(&mut self) -> Option<AsyncEvent> {
        self.ready.pop_front()
    }
}
