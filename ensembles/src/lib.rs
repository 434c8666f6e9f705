//! Requests for ensembles: their members are asked as soon as what they take is there, side by side where they can be,
//! inside one deadline. Where members are models of one task, [`selection`] says whom to ask, [`vote`] when, and
//! [`selection::combine`] makes one answer of their predictions; [`contexts`] learns for each user or session apart.
//!
//! [`run`] is the way of one request as a state machine without IO, over any kind of tensor. [`pending`] drives it with
//! the models of a frontend's desk: [`submit`] begins, [`Pending::wait`] waits for the end, dropping it cancels all
//! that is under way. A step whose answer is known ([`Known`]) asks nobody. Programs that link the frontend start it by
//! [`client::start`]; the crate `gateway` serves HTTP and gRPC with it.
#![forbid(unsafe_code)]

pub mod client;
pub mod contexts;
mod known;
mod members;
pub mod pending;
pub mod run;
mod selecting;
pub mod selection;
pub mod vote;

pub use known::{Asking, Known, Question, Turn, Turning};
pub use pending::{Combining, Ended, Job, Pending, Request, Room, Selected, Step, submit};
