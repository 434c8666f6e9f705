//! How a role is: whether its threads live, whether it serves, what its process takes. Told on a small listener of its
//! own (`[admin] http`), by a thread of its own, so that it answers while the others stall; and to systemd, where that
//! has started it.
//!
//! | file | holds |
//! | --- | --- |
//! | `vitals` | [`Vitals`]: threads stamp their [`Heart`]s; whoever has none for too long has stalled. No IO |
//! | `listener` | [`Listener`]: its thread, and which connections it takes |
//! | `connection` | one of them: HTTP/1, or gRPC over HTTP/2 |
//! | `health` | what gRPC asks |
//! | `process` | what Linux tells of this process, as Prometheus's clients tell it |
//! | `network` | what this process has seen of the network |
//! | `notices` | what a service manager is told: that it has started, that it lives, that it ends. No IO |
//! | `service` | [`Service`]: tells it |
//! | `pages` | [`Pages`]: what is answered |
//! | `others` | what processes beside this one tell besides, and how it becomes one page |
//! | `query` | [`Query`]: what is asked of a page of JSON |
//! | `ui` | the page that browsers show, of the files in `ui/` |
#![deny(unsafe_code)]

mod connection;
mod health;
mod listener;
mod network;
mod notices;
mod others;
mod pages;
mod process;
mod query;
mod service;
mod ui;
mod vitals;

pub use listener::{AdminError, Config, Listener};
pub use others::ALSO_MAX;
pub use pages::{OWN_METRICS, Pages, about_process, label_value};
pub use query::Query;
pub use service::{SOCKET_VARIABLE, Service};
pub use vitals::{Heart, SILENCE_MAX, Vitals};
