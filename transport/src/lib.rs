//! Registered memory and reliable connections. One API, two arms: soft-RoCE, and libibverbs with the
//! feature `verbs`.
//!
//! An [`Endpoint`] belongs to one thread. It never blocks except in [`Endpoint::wait`]. Its owner's loop:
//!
//! ```
//! # use transport::{Clock, Endpoint, EndpointConfig, Event};
//! # use proto::Span;
//! # let loopback = "127.0.0.1:0".parse().unwrap();
//! let clock = Clock::start();
//! let mut server = Endpoint::open(EndpointConfig::default().listening(loopback).with_secret("the cluster's secret"))?;
//! # let mut client = Endpoint::open(EndpointConfig::default().with_secret("the cluster's secret"))?;
//! # client.connect(clock.now(), server.listen_address().unwrap(), b"hello".to_vec());
//! # let mut stop = false;
//! while !stop {
//!     let progressed = server.drive(clock.now());
//!     while let Some(event) = server.poll_event() {
//!         match event {
//!             Event::Incoming { connection, .. } => server.accept(clock.now(), connection, b"welcome".to_vec()),
//!             Event::Message { connection, frame } => server.send(connection, &frame).unwrap(),
//!             Event::Disconnected { reason, .. } => eprintln!("{reason}"),
//!             other => println!("{other:?}"),
//!         }
//!     }
//! #     client.drive(clock.now());
//! #     match client.poll_event() {
//! #         Some(Event::Connected { connection, .. }) => client.send(connection, b"echo").unwrap(),
//! #         Some(event) => stop = matches!(event, Event::Message { .. }),
//! #         None => {}
//! #     }
//!     if !progressed {
//!         // Or until a deadline of the owner's own.
//!         server.wait(clock.now(), clock.now() + Span::from_millis(1));
//!     }
//! }
//! # Ok::<(), transport::OpenError>(())
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `endpoint` | [`Endpoint`]: where sockets, queue pairs and connections meet; `endpoint/links`: its bootstrap side |
//! | `endpoint/acceptor` | the thread where those who connect to us prove themselves |
//! | `strangers` | who has connected and not proved itself yet. No IO |
//! | `notes` | [`Notes`]: lines of the log that others can cause. No IO |
//! | `bootstrap` | what two peers say over TCP: proof of the secret, parameters, heartbeats. No IO |
//! | `release` | which release this is, for peers of another. No IO |
//! | `link`, `tls` | one bootstrap on a TCP socket; mutual TLS under it |
//! | `device` | what carries the queue pairs: `soft` or `verbs`; `soft/rings`: packets between processes of one host |
//! | `channel` | one queue pair with its memory and its queues. No IO |
//! | `credits`, `ring` | flow control of frames and immediates, and the place of frames. No IO |
//! | `reads` | the READ budget. No IO |
//! | `opening` | a region that one peer alone reaches. No IO |
//! | `raw` | one queue pair without all that, for measuring |
//! | `region`, `clock`, `poller` | memory, time, waiting |
//! | `sealed_memory` | memory that two processes map |
//! | `memory` | [`Memory`]: how much this process may use |
//! | `device_memory` | memory of GPUs, for RDMA devices to reach |
//! | `error` | why operations fail, one type for each |
//! | `address`, `resolve` | where somebody is, by address or name; names are looked up on threads of their own |
//! | `secrets` | what members prove to each other that they know, and the files with it |
//! | `certificates` | certificates of their files, and when they end |
//! | `followed` | files that are taken in anew once they hold something else |
//! | `limits`, `arm_name`, `local_path` | what errors or configurations name, too |
//! | `traffic`, `peer_name` | what all endpoints have seen of the network and of whom, for operators |
//! | `path` | the way that packets of a connection take, for operators |
#![deny(unsafe_code)]

mod address;
mod arm_name;
mod bootstrap;
mod certificates;
mod channel;
mod clock;
mod config;
mod credits;
mod device;
// Takes another device's word for where its memory is.
#[allow(unsafe_code)]
mod device_memory;
mod endpoint;
pub mod error;
mod event;
mod followed;
#[cfg(fuzzing)]
pub mod fuzzing;
mod limits;
mod link;
mod local_path;
mod memory;
mod notes;
mod opening;
mod path;
mod patience;
mod peer_name;
mod poller;
mod raw;
mod reads;
mod release;
mod resolve;
// Maps memory and shares it as atomic words.
#[allow(unsafe_code)]
mod region;
mod ring;
mod sealed_memory;
mod secrets;
mod strangers;
mod tls;
mod traffic;

pub use address::{Address, AddressError, OwnAddress};
pub use arm_name::{AUTO_DEVICE, ArmName, ArmNameError};
pub use certificates::{Certificates, certificates_end};
pub use clock::Clock;
pub use config::{
    Arm, EndpointConfig, Faults, NetworkConfig, SCHEDULERS_MAX, SecretKey, Sharing, VerbsConfig, VerbsSettings,
    random_loopback, scheduler_list,
};
#[doc(hidden)] // For the expansion of `flatten_network!`.
pub use config::{RoleDeserializer, serialize_beside};
pub use device::takes_dma_bufs;
pub use device_memory::{DeviceMemory, Keeper, Way};
pub use endpoint::Endpoint;
pub use error::OpenError;
pub use event::{Access, ConnectionId, DisconnectReason, Event, PostError, RegionKey, Transfer, TransferError};
pub use followed::{Followed, each_second};
pub use limits::{
    CONNECTIONS_MAX, CREDIT_MAX, HANDSHAKE_MAX, HELLO_BYTES_MAX, REGIONS_MAX, ROCE_PORT, SECRET_BYTES_MIN, SILENCE_MAX,
    WORK_MAX,
};
pub use local_path::LocalPath;
pub use memory::Memory;
pub use notes::Notes;
pub use path::Path;
pub use peer_name::PeerName;
pub use poller::{Ready, Waker};
pub use raw::{RawAddress, RawQueuePair};
pub use region::Region;
pub use release::Release;
pub use resolve::{own_address, own_or_routed, wait_for_names};
pub use secrets::Secrets;
pub use soft_roce::{MemoryWindow, MemoryWindows};
pub use strangers::share_of;
pub use tls::{ServerTlsFiles, TlsFiles, client_tls};
pub use traffic::{PeerTraffic, Traffic, traffic};
