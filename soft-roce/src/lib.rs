// Its example uses the driver.
#![cfg_attr(any(feature = "udp", not(doctest)), doc = include_str!("../README.md"))]
#![deny(unsafe_code)]

mod address;
mod arrivals;
mod completer;
mod completion;
mod config;
mod context;
mod counters;
mod datagram;
mod endpoint;
mod error;
mod events;
mod limits;
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
mod state;
mod time;
#[cfg(feature = "udp")]
pub mod udp;
mod windows;
pub mod wire;
mod work_request;

pub use address::DatagramAddress;
pub use completion::{Completion, CompletionOpcode, Notify, Status};
pub use config::{
    EndpointConfig, PathMtu, Peer, QueuePairConfig, SharedReceiveQueueConfig, SharedReceiveQueueNumber,
    WINDOW_PACKETS_MIN,
};
pub use counters::Counters;
pub use datagram::{DATAGRAM_HEADER_BYTES, DatagramConfig, DatagramRequest};
pub use endpoint::Endpoint;
pub use error::{CreateError, ModifyError, PostError, RegisterError};
pub use events::AsyncEvent;
pub use limits::SEGMENTS_MAX;
pub use memory::{Access, HeapMemory, Memory, ProtectionDomain, RegionConfig, RegionHandle, Segment};
pub use segmentation_batch::Transmit;
pub use state::QueuePairState;
pub use time::Timestamp;
pub use windows::{MemoryWindow, MemoryWindows};
pub use wire::{Psn, QueuePairNumber, icrc::Identification};
pub use work_request::{Operation, RecvRequest, Remote, SendRequest};
