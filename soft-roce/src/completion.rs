//! Finished work: completions and their status.

use std::collections::VecDeque;

use crate::{address::DatagramAddress, wire::QueuePairNumber};

/// How a work request ended (IBTA 11.6.2; the numbers are those of `enum ibv_wc_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Success = 0,
    /// The message did not fit the receive.
    LocalLength = 1,
    /// The queue pair cannot carry it out: a READ or atomic with `max_rd_atomic` 0.
    LocalQueuePairOperation = 2,
    /// Local key, bounds or permission.
    LocalProtection = 4,
    /// The queue pair went to ERROR before it was done.
    Flushed = 5,
    /// The peer answered with something that is no answer to the request.
    BadResponse = 7,
    /// The peer refused the request as such: an operation it has not enabled, or a message too long for its receive.
    RemoteInvalidRequest = 9,
    /// The peer refused the address or key.
    RemoteAccess = 10,
    /// The peer could not carry it out.
    RemoteOperation = 11,
    /// The peer did not acknowledge in time, over all retries.
    RetryExceeded = 12,
    /// The peer had no receive posted, over all retries.
    ReceiverNotReadyRetryExceeded = 13,
}

/// What ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionOpcode {
    /// A SEND of ours.
    Send,
    /// A WRITE of ours, with or without immediate.
    Write,
    /// A READ of ours.
    Read,
    /// A compare-and-swap of ours.
    CompareSwap,
    /// A fetch-and-add of ours.
    FetchAdd,
    /// A receive, filled by a SEND.
    Recv,
    /// A receive, used up by a WRITE_WITH_IMM.
    RecvWriteWithImmediate,
}

/// A finished work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Whose.
    pub queue_pair: QueuePairNumber,
    /// As posted.
    pub id: u64,
    /// How it ended; unless `Success`, only `queue_pair`, `id` and `opcode` mean anything.
    pub status: Status,
    /// What ended. A receive that fails says `Recv`.
    pub opcode: CompletionOpcode,
    /// Bytes moved.
    pub bytes: u32,
    /// The peer's 32 bits, on receives.
    pub immediate: Option<u32>,
    /// The region of ours that the peer withdrew, on receives.
    pub invalidated_rkey: Option<u32>,
    /// The peer asked for attention.
    pub solicited: bool,
    /// The sender, on receives of datagrams.
    pub source: Option<DatagramAddress>,
}

/// Which completions a waiting user wants to hear of (IBTA 11.4.2.2, request completion notification).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notify {
    /// The next one.
    Next,
    /// The next receive that the peer has marked as solicited, or the next failure.
    Solicited,
}

/// Completions that were not polled yet. Room is reserved when a request is posted, so it cannot overrun.
pub(crate) struct CompletionQueue {
    ready: VecDeque<Completion>,
    /// Requests posted and neither polled nor dropped.
    reserved: usize,
    limit: usize,
    requested: Option<Notify>,
    notified: bool,
}

impl CompletionQueue {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { ready: VecDeque::new(), reserved: 0, limit, requested: None, notified: false }
    }

    pub(crate) const fn limit(&self) -> usize {
        self.limit
    }

    /// Makes room for the completion of one request; false if there is none.
    pub(crate) const fn reserve(&mut self) -> bool {
        let free = self.reserved < self.limit;
        self.reserved += free as usize;
        free
    }

    /// Gives up the room of `requests` that will have no completion.
    pub(crate) fn release(&mut self, requests: usize) {
        self.reserved = self.reserved.checked_sub(requests).expect("every release has its reservation");
    }

    /// Takes the room that the request has reserved.
    pub(crate) fn push(&mut self, completion: Completion) {
        assert!(self.ready.len() < self.reserved, "every completion has its reservation");
        let wanted = match self.requested {
            Some(Notify::Next) => true,
            Some(Notify::Solicited) => completion.solicited || completion.status != Status::Success,
            None => false,
        };
        if wanted {
            (self.requested, self.notified) = (None, true);
        }
        self.ready.push_back(completion);
    }

    /// Asks for one notification, of a completion that is yet to come. The wider of two wishes counts.
    pub(crate) fn request_notification(&mut self, notify: Notify) {
        if self.requested != Some(Notify::Next) {
            self.requested = Some(notify);
        }
    }

    /// Whether a completion came that was asked for; told once.
    pub(crate) const fn take_notification(&mut self) -> bool {
        std::mem::replace(&mut self.notified, false)
    }

    pub(crate) fn pop(&mut self) -> Option<Completion> {
        let completion = self.ready.pop_front()?;
        self.release(1);
        Some(completion)
    }
}
