//! What a role says when it connects to the scheduler.

use wincode::{SchemaRead, SchemaWrite};

use crate::{backend_to_scheduler::BackendHello, frontend_to_scheduler::FrontendHello};

/// The first bytes on a connection to the scheduler: who is there.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum SchedulerHello {
    /// A frontend; answered with a [`FrontendWelcome`](crate::scheduler_to_frontend::FrontendWelcome).
    Frontend(FrontendHello),
    /// A backend; answered with a [`BackendWelcome`](crate::scheduler_to_backend::BackendWelcome).
    Backend(BackendHello),
}
