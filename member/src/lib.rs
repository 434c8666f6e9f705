//! What a member, frontend or backend, does with a list of schedulers: it has a session with each of them, and obeys
//! the one that claims the highest epoch, the primary. No IO: instants come in, and what is to be done comes out.
//!
//! | file | holds |
//! | --- | --- |
//! | `allegiance` | whom to obey, and when a life is over |
//! | `questions` | what standbys ask: whether the primary is missed, too |
//! | `session` | all connections to one scheduler |
//! | `membership` | all sessions, one name, one primary |
//!
//! What schedulers say of models, links and tasks is the role's to understand; so is what follows for these when
//! another scheduler is obeyed.

#![forbid(unsafe_code)]

mod allegiance;
mod membership;
mod questions;
mod session;

pub use allegiance::{MISSING_AFTER, ORPHAN_MAX, Verdict};
pub use membership::{Membership, Output, Welcome};
pub use questions::MISSED_AFTER;
pub use session::{Destination, RETRY_FIRST, RETRY_MAX, Reader, Session, encode, excerpt};
