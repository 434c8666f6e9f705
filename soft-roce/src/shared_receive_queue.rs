//! Shared receive queues (IBTA 10.2.9): receives that many queue pairs take from, each when a message begins.

use std::collections::{BTreeMap, VecDeque};

use crate::{
    config::{SharedReceiveQueueConfig, SharedReceiveQueueNumber},
    error::PostError,
    limits::SHARED_RECEIVE_QUEUES_MAX,
    memory::Segment,
    work_request::{Receive, RecvRequest},
};

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    pub(crate) config: SharedReceiveQueueConfig,
    pub(crate) receives: VecDeque<Receive>,
    /// Below this, an event is due once.
    pub(crate) limit: usize,
    /// Queue pairs that take from it.
    pub(crate) users: usize,
}

/// The shared receive queues of an endpoint.
#[derive(Debug, Default)]
pub(crate) struct SharedReceiveQueueTable {
    queues: BTreeMap<SharedReceiveQueueNumber, SharedReceiveQueue>,
    next_number: u32,
}

impl SharedReceiveQueueTable {
    /// `None` if the table is full.
    pub(crate) fn create(&mut self, config: SharedReceiveQueueConfig) -> Option<SharedReceiveQueueNumber> {
        if self.queues.len() >= SHARED_RECEIVE_QUEUES_MAX {
            return None;
        }
        while self.queues.contains_key(&SharedReceiveQueueNumber(self.next_number)) {
            self.next_number = self.next_number.wrapping_add(1);
        }
        let number = SharedReceiveQueueNumber(self.next_number);
        // A number comes back as late as possible.
        self.next_number = self.next_number.wrapping_add(1);
        self.queues.insert(number, SharedReceiveQueue { config, receives: VecDeque::new(), limit: 0, users: 0 });
        Some(number)
    }

    pub(crate) fn find(&mut self, number: SharedReceiveQueueNumber) -> Option<&mut SharedReceiveQueue> {
        self.queues.get_mut(&number)
    }

    /// Removes a queue that no queue pair uses; how many receives it held.
    pub(crate) fn destroy(&mut self, number: SharedReceiveQueueNumber) -> Option<usize> {
        let unused = self.queues.get(&number).is_some_and(|queue| queue.users == 0);
        unused.then(|| self.queues.remove(&number).map_or(0, |queue| queue.receives.len()))
    }

    pub(crate) fn post(
        &mut self,
        number: SharedReceiveQueueNumber,
        request: RecvRequest,
        more: &[Segment],
    ) -> Result<(), PostError> {
        let queue = self.queues.get_mut(&number).ok_or(PostError::UnknownSharedReceiveQueue)?;
        if queue.receives.len() >= queue.config.depth {
            return Err(PostError::QueueFull { key: "depth", depth: queue.config.depth });
        }
        queue.receives.push_back(Receive::new(request, more, queue.config.max_sge)?);
        Ok(())
    }

    /// The oldest receive, if it has room for `bytes`; and whether that took the queue below its limit, which is told
    /// once.
    pub(crate) fn take(&mut self, number: SharedReceiveQueueNumber, bytes: u32) -> Option<(Receive, bool)> {
        let queue = self.queues.get_mut(&number)?;
        let receive = queue.receives.pop_front_if(|receive| receive.segments.bytes() >= bytes)?;
        let low = queue.receives.len() < queue.limit;
        if low {
            queue.limit = 0;
        }
        Some((receive, low))
    }
}
