//! Step 1: what all connections of clients share, and what each request may take up of it.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use tokio_rustls::TlsAcceptor;

use crate::{
    access::{Access, Client},
    budget::Budget,
    config::Limits,
    connection::places::Places,
    service::Service,
};
pub use caller::Caller;
pub(crate) use drain::{Drain, LINGER};
pub use gate::Gate;
use handshakes::Handshakes;
pub use intake::{BodyMax, Intake, IntakeError, decompressed};
use scrape::Scrape;
pub use site::Hosts;
pub(crate) use site::{check_named_once, check_same_site};

mod caller;
mod drain;
mod gate;
mod handshakes;
mod intake;
pub(crate) mod lines;
mod scrape;
mod site;

/// How long connections have to end once nothing is under way on them and the process is about to end.
const LEAVE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1);

/// What all connections share.
pub struct Server {
    /// What can be asked.
    pub service: Service,
    limits: Cell<Limits>,
    tls: RefCell<Option<TlsAcceptor>>,
    hosts: RefCell<Hosts>,
    pub(crate) places: RefCell<Places>,
    pub(crate) scrape: Scrape,
    lines: lines::Lines,
    pub(crate) handshakes: RefCell<Handshakes>,
    pub(crate) drain: Drain,
    access: RefCell<Access>,
    budget: RefCell<Budget<Client>>,
    /// Bytes of replies that clients have not taken in.
    untaken_bytes: Cell<usize>,
    /// gRPC's requests for health that have not been read.
    probes: Cell<usize>,
}

impl Server {
    /// A server without connections.
    #[must_use]
    pub fn new(service: Service, gate: Gate) -> Rc<Self> {
        let Gate { limits, grants, tls, hosts, shared_memory } = gate;
        service.regions.borrow_mut().set_limits(shared_memory);
        Rc::new(Self {
            service,
            limits: Cell::new(limits),
            tls: RefCell::new(tls),
            hosts: RefCell::new(hosts),
            places: RefCell::default(),
            scrape: Scrape::default(),
            lines: lines::Lines::default(),
            handshakes: RefCell::default(),
            drain: Drain::default(),
            access: RefCell::new(Access::new(grants, limits.requests_max)),
            budget: RefCell::new(Budget::new(limits.bodies_bytes_max)),
            untaken_bytes: Cell::new(0),
            probes: Cell::new(0),
        })
    }

    /// Replaces limits, tokens and certificates. Connections and requests that are under way stay; what is asked on
    /// them from now on is asked of the new tokens.
    pub fn reload(&self, gate: Gate) {
        let Gate { limits, grants, tls, hosts, shared_memory } = gate;
        self.limits.set(limits);
        self.budget.borrow().set_max(limits.bodies_bytes_max);
        self.tls.replace(tls);
        self.hosts.replace(hosts);
        let mut access = self.access.borrow_mut();
        access.handle_grants(grants, limits.requests_max);
        let mut regions = self.service.regions.borrow_mut();
        regions.set_limits(shared_memory);
        regions.retain(|owner| access.knows(owner));
    }

    /// What clients may take up.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits.get()
    }

    /// Logs what clients cause, once a second of each kind.
    pub(crate) fn tell(&self, line: lines::Line, text: std::fmt::Arguments<'_>) {
        self.lines.tell(self.service.desk.now(), line, text);
    }

    pub(crate) fn tls(&self) -> Option<TlsAcceptor> {
        self.tls.borrow().clone()
    }

    /// Bytes that all requests hold now, of `bodies_bytes_max`.
    #[must_use]
    pub fn bodies_bytes(&self) -> usize {
        self.budget.borrow().held()
    }

    /// The most that all requests held since the last call, and what they hold now.
    pub(crate) fn take_bodies_peak(&self) -> (usize, usize) {
        let budget = self.budget.borrow();
        (budget.take_peak(), budget.held())
    }

    /// Begins to end: this server is not ready any more, and takes nothing new in after `drain_grace_ms`.
    pub fn begin_drain(&self) {
        if self.drain.begin() {
            let (under_way, grace) = (self.access.borrow().requests(), self.limits().drain_grace);
            tracing::info!("draining: {under_way} requests are under way, and others come in for {grace:?}");
            self.service.set_draining();
            self.places.borrow().drain();
            if grace.is_zero() {
                self.drain.close();
            }
        }
    }

    /// The same without a grace, or what is left of it.
    pub fn close(&self) {
        self.begin_drain();
        self.drain.close();
    }

    /// Returns once the server has been told to end and nothing is under way, or after `drain_timeout_ms`. When nobody
    /// new may connect, requests of those who have are on their way: they are served.
    pub async fn drained(&self) {
        self.drain.begun().await;
        let Limits { drain_grace: grace, drain_timeout: allowed, .. } = self.limits();
        tokio::select! {
            () = self.drain.closed() => {}
            () = tokio::time::sleep(grace) => self.drain.close(),
        }
        let is_empty = || self.places.borrow().len() == 0;
        self.drain.all_in().await;
        let _ = tokio::time::timeout(LINGER, self.drain.done(is_empty)).await;
        self.drain.end();
        let is_quiet = || self.access.borrow().requests() == 0;
        if tokio::time::timeout(allowed.saturating_sub(grace), self.drain.done(is_quiet)).await.is_err() {
            let left = self.access.borrow().requests();
            return tracing::warn!("drained: {left} requests were not answered in {allowed:?} (drain_timeout_ms)");
        }
        // The last replies are in the sockets; connections that end by themselves lose none.
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, self.drain.done(is_empty)).await;
        tracing::info!("drained: every request has been answered");
    }
}
