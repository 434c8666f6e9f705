//! The states of a queue pair.

/// Where a queue pair stands in its life (IBTA 10.3.1). RESET and INIT are one here: a queue pair is created in INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePairState {
    /// Takes receives; ignores packets.
    Init,
    /// Answers the peer; sends nothing of its own.
    ReadyToReceive,
    /// Works.
    ReadyToSend,
    /// SQD: finishes the sends that it has begun and holds back the others; answers the peer.
    SendQueueDrain,
    /// SQE, of datagrams: a send has failed, all others are flushed; receives go on.
    SendQueueError,
    /// Failed, or stopped by its owner: flushes everything.
    Error,
}
