//! A model as a GPU runs it: for each batch size, and each of a few lengths, a static [`Plan`], which says what kernels
//! run one after another, with what parameters, and where in one arena every tensor lies. Nothing here touches a GPU:
//! plans are made on any machine ([`lower`](mod@lower)), and run on the CPU by [`interpret`](mod@interpret), which says
//! what each step means.

#![forbid(unsafe_code)]

pub mod arena;
mod extents;
pub mod interpret;
#[cfg(feature = "tract")]
pub mod lower;
pub mod plan;

pub use extents::Extent;
#[cfg(feature = "tract")]
pub use lower::{LowerError, Lowering, lower};
pub use plan::{Lowered, Place, Plan, Port, Precision, Step, Type};
