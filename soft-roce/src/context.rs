//! What a queue pair shares with the others of its endpoint.

use crate::{
    completion::CompletionQueue,
    config::SharedReceiveQueueNumber,
    counters::Counters,
    error::PostError,
    events::{AsyncEvent, EventQueue},
    region::RegionTable,
    shared_receive_queue::SharedReceiveQueueTable,
    time::Timestamp,
    work_request::Receive,
};

/// What a queue pair shares with the others of its endpoint.
pub(crate) struct Context<'a> {
    pub(crate) now: Timestamp,
    pub(crate) regions: &'a mut RegionTable,
    pub(crate) completions: &'a mut CompletionQueue,
    pub(crate) counters: &'a mut Counters,
    pub(crate) shared_receive_queue: &'a mut SharedReceiveQueueTable,
    pub(crate) events: &'a mut EventQueue,
}

impl Context<'_> {
    /// Posts a work request, with room for its completion.
    pub(crate) fn reserved(&mut self, post: impl FnOnce(&mut Self) -> Result<(), PostError>) -> Result<(), PostError> {
        if !self.completions.reserve() {
            return Err(PostError::CompletionQueueFull { limit: self.completions.limit() });
        }
        let posted = post(self);
        if posted.is_err() {
            self.completions.release(1);
        }
        posted
    }

    /// The oldest of the shared receives, if it has room for `bytes`.
    pub(crate) fn take_shared(&mut self, shared: SharedReceiveQueueNumber, bytes: u32) -> Option<Receive> {
        let (receive, low) = self.shared_receive_queue.take(shared, bytes)?;
        if low {
            self.raise(AsyncEvent::SharedReceiveQueueLow(shared));
        }
        Some(receive)
    }

    pub(crate) fn raise(&mut self, event: AsyncEvent) {
        self.counters.events_lost += u64::from(!self.events.push(event));
    }
}
