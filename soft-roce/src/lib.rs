// Its example uses the driver.
#![cfg_attr(any(feature = "udp", not(doctest)), doc = include_str!("../README.md"))]
#![deny(unsafe_code)]

mod arrivals;
mod completer;
mod completion;
mod config;
mod counters;
mod datagram;
mod endpoint;
mod events;
mod loss_timer;
mod memory;
mod outbox;
mod queue_pair;
mod region;
mod requester;
mod responder;
mod segmentation_batch;
mod segments;
mod shared_receive_queue;
mod time;
#[cfg(feature = "udp")]
pub mod udp;
pub mod wire;
mod work_request;

pub use completion::{Completion, CompletionOpcode, Notify, Status};
pub use config::{
    CreateError, EndpointConfig, Identification, ModifyError, PathMtu, Peer, QueuePairConfig, QueuePairState,
};
pub use counters::Counters;
pub use datagram::{DATAGRAM_HEADER_BYTES, DatagramAddress, DatagramConfig, DatagramRequest};
pub use endpoint::{Endpoint, Transmit};
pub use events::AsyncEvent;
pub use memory::{Access, HeapMemory, Memory, ProtectionDomain, RegionConfig, RegionHandle, RegisterError};
pub use segments::SEGMENTS_MAX;
pub use shared_receive_queue::{SharedReceiveQueueConfig, SharedReceiveQueueNumber};
pub use time::Timestamp;
pub use wire::{Psn, QueuePairNumber};
pub use work_request::{Operation, PostError, RecvRequest, Remote, Segment, SendRequest};
