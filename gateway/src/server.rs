//! Step 1: what all connections of clients share, and what each request may take up of it.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::{Arc, atomic::AtomicUsize},
};

use hyper::body::Incoming;
use tokio_rustls::TlsAcceptor;

use crate::{access::Access, config::Limits, service::Service};
pub use caller::Caller;
pub use gate::Gate;
pub use intake::{Intake, IntakeError, Share};

mod caller;
mod gate;
mod intake;

/// Largest head of a request that is looked at at all, and largest piece in which a body is read: few pieces, few
/// system calls.
pub(crate) const READ_BUFFER_BYTES_MAX: usize = 256 * 1024;

/// What all connections share.
pub struct Server {
    /// What can be asked.
    pub service: Service,
    /// What clients may take up.
    pub limits: Limits,
    pub(crate) tls: Option<TlsAcceptor>,
    /// At this moment.
    pub(crate) connections: Cell<usize>,
    access: RefCell<Access>,
    bodies_bytes: Arc<AtomicUsize>,
}

impl Server {
    /// A server without connections.
    #[must_use]
    pub fn new(service: Service, gate: Gate) -> Rc<Self> {
        let Gate { limits, grants, tls } = gate;
        let access = RefCell::new(Access::new(grants, limits.requests_max));
        let connections = Cell::new(0);
        Rc::new(Self { service, limits, access, tls, connections, bodies_bytes: Arc::default() })
    }

    /// A body as it is to be read: bounded, counted and timed. In a stream of messages only single ones are bounded.
    #[must_use]
    pub fn intake(&self, body: Incoming, is_stream: bool) -> Intake {
        let refusals = self.service.record.refusals().clone();
        Intake::new(body, self.limits, &self.bodies_bytes, refusals, is_stream)
    }
}
