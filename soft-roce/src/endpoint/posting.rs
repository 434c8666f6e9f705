//! Posting to an endpoint's queues. Each kind of request has one piece of local memory, or, by the method that ends in
//! `_list`, more pieces that follow it: the message is gathered from them, or scattered over them, in order.

use super::{Context, Counted, Endpoint};
use crate::{
    config::SharedReceiveQueueNumber,
    datagram::DatagramRequest,
    error::PostError,
    memory::Segment,
    time::Timestamp,
    wire::QueuePairNumber,
    work_request::{RecvRequest, SendRequest},
};

impl Endpoint {
    /// Posts to the send queue.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_send(&mut self, qpn: QueuePairNumber, request: SendRequest) -> Result<(), PostError> {
        self.post_send_list(qpn, request, &[])
    }

    /// Posts to the send queue: the message is the request's own local memory and then `more`, together at most
    /// [`QueuePairConfig::max_sge`](crate::QueuePairConfig) pieces.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_send_list(
        &mut self,
        qpn: QueuePairNumber,
        request: SendRequest,
        more: &[Segment],
    ) -> Result<(), PostError> {
        if self.datagrams.contains_key(&qpn) {
            return Err(PostError::Service);
        }
        let parts = with_queue_pair!(self, qpn, Timestamp::default());
        let (queue_pair, mut cx) = parts.ok_or(PostError::UnknownQueuePair)?;
        cx.reserved(|cx| queue_pair.post_send(request, more, cx))?;
        self.enqueue(qpn);
        Ok(())
    }

    /// Posts to the receive queue.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_recv(&mut self, qpn: QueuePairNumber, request: RecvRequest) -> Result<(), PostError> {
        self.post_recv_list(qpn, request, &[])
    }

    /// Posts to the receive queue: the room is the request's own segment and then `more`, together at most `max_sge`
    /// pieces.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_recv_list(
        &mut self,
        qpn: QueuePairNumber,
        request: RecvRequest,
        more: &[Segment],
    ) -> Result<(), PostError> {
        if let Some(queue_pair) = self.datagrams.get_mut(&qpn) {
            let mut cx = context!(self, Timestamp::default());
            return cx.reserved(|cx| queue_pair.post_recv(request, more, cx));
        }
        let parts = with_queue_pair!(self, qpn, Timestamp::default());
        let (queue_pair, mut cx) = parts.ok_or(PostError::UnknownQueuePair)?;
        cx.reserved(|cx| queue_pair.post_recv(request, more, cx))
    }

    /// Posts to a shared receive queue.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_shared_recv(
        &mut self,
        shared: SharedReceiveQueueNumber,
        request: RecvRequest,
    ) -> Result<(), PostError> {
        self.post_shared_recv_list(shared, request, &[])
    }

    /// Posts to a shared receive queue, as [`Self::post_recv_list`] does.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_shared_recv_list(
        &mut self,
        shared: SharedReceiveQueueNumber,
        request: RecvRequest,
        more: &[Segment],
    ) -> Result<(), PostError> {
        context!(self, Timestamp::default()).reserved(|cx| cx.shared_receive_queue.post(shared, request, more))
    }

    /// Posts a datagram.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_datagram(&mut self, qpn: QueuePairNumber, request: DatagramRequest) -> Result<(), PostError> {
        self.post_datagram_list(qpn, request, &[])
    }

    /// Posts a datagram that is gathered as [`Self::post_send_list`] does.
    ///
    /// # Errors
    /// See [`PostError`].
    pub fn post_datagram_list(
        &mut self,
        qpn: QueuePairNumber,
        request: DatagramRequest,
        more: &[Segment],
    ) -> Result<(), PostError> {
        if self.queue_pairs.contains_key(&qpn) {
            return Err(PostError::Service);
        }
        let local = self.config.local;
        let queue_pair = self.datagrams.get_mut(&qpn).ok_or(PostError::UnknownQueuePair)?;
        let mut cx = context!(self, Timestamp::default());
        cx.reserved(|cx| queue_pair.post_send(request, more, local, cx))?;
        self.enqueue(qpn);
        Ok(())
    }
}
