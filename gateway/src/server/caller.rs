//! Step 1: a request's client: who it is, and that it is counted while the request is under way.

use std::rc::Rc;

use hyper::{Request, body::Incoming, header::AUTHORIZATION};

use super::{BodyMax, Intake, Server, check_named_once};
use crate::{
    access::{
        Client, GrantId, Load, Operation, Refusal, Scope,
        client::{add, sub},
    },
    budget::Account,
    connection::activity::Activity,
    metrics::Cause,
    probes,
    service::Asker,
};

/// What a header field takes up besides its name and value (RFC 9113, section 6.5.2).
const FIELD_BYTES: usize = 32;
/// gRPC's requests for health that are being read at once, of all clients and of one.
const PROBES_MAX: usize = 1024;
const CLIENT_PROBES_MAX: usize = 64;
/// When clients hold all that replies may take up, one is refused that holds more than this part of it.
const UNTAKEN_PART: usize = 64;

/// A client that has a request under way.
pub struct Caller {
    /// Whom it asked.
    pub server: Rc<Server>,
    grant: GrantId,
    client: Client,
    account: Account,
    load: Rc<Load>,
    lane: Lane,
}

/// Among what a request is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// Those that work.
    Work,
    /// gRPC's for health, whose message has to be read.
    Probe,
    /// HTTP's for health, which are answered at once.
    Glance,
}

impl Caller {
    /// Looks at a request's head.
    ///
    /// # Errors
    /// If the head is too large or ambiguous, its token is not known, or its client sends too much.
    pub(crate) fn admit<B>(
        server: &Rc<Server>,
        activity: &Activity,
        request: &Request<B>,
        is_grpc: bool,
    ) -> Result<Self, Refusal> {
        let path = request.uri().path();
        let lane = match is_grpc {
            true if probes::is_in_grpc(path) => Lane::Probe,
            false if probes::is_in_rest(path) => Lane::Glance,
            _ => Lane::Work,
        };
        let admit = || {
            let (found, max) = (head_bytes(request), server.limits().head_bytes_max);
            if found > max {
                return Err(Refusal::Head { found, max });
            }
            check_named_once(request)?;
            if server.tls.borrow().is_none() && lane == Lane::Work && path != "/metrics" {
                server.hosts.borrow().check(request)?;
            }
            let access = server.access.borrow();
            let grant = access.authenticate(bearer(request))?;
            let (client, load) = match access.load(grant) {
                Some(load) => (Client::Token(grant), Rc::clone(load)),
                None => (activity.client(), activity.load()),
            };
            drop(access);
            if activity.is_spare && lane == Lane::Work {
                return Err(Refusal::Connections);
            }
            let caller = Uncounted { server, grant, client, load: &load, from: activity.client() };
            caller.count(lane, activity.is_alone())
        };
        admit().inspect_err(|refusal| server.service.record.refusals().count(Cause::from(refusal)))
    }

    /// Counts one more request of the same client, which came with the first one.
    ///
    /// # Errors
    /// If it sends too much.
    pub fn another(&self) -> Result<Self, Refusal> {
        let Self { server, grant, client, load, .. } = self;
        let caller = Uncounted { server, grant: *grant, client: *client, load, from: *client };
        caller.count(Lane::Work, false).inspect_err(|refusal| self.on_refusal(refusal))
    }

    /// Whether it may do that.
    ///
    /// # Errors
    /// If it may not, or nothing may begin any more.
    pub fn permit(&self, operation: Operation, scope: Scope<'_>) -> Result<(), Refusal> {
        self.permit_further(operation, scope)?;
        match operation {
            Operation::Infer | Operation::Repository if self.server.drain.is_over() => {
                self.on_refusal(&Refusal::Draining);
                Err(Refusal::Draining)
            }
            _ => Ok(()),
        }
    }

    /// The same once it has begun: it goes on although nothing else may begin.
    ///
    /// # Errors
    /// If it may not.
    pub fn permit_further(&self, operation: Operation, scope: Scope<'_>) -> Result<(), Refusal> {
        let permitted = self.server.access.borrow().permit(self.grant, operation, scope);
        permitted.inspect_err(|refusal| self.on_refusal(refusal))
    }

    /// Whether it may load and unload this model.
    #[must_use]
    pub(crate) fn may_change(&self, model: &str) -> bool {
        self.server.access.borrow().covers_at(self.grant, Operation::Repository, Scope::Model(model))
    }

    /// Whose shared memory it may name: its own, if it may have any.
    #[must_use]
    pub fn shared_memory(&self) -> Option<Client> {
        self.server.access.borrow().covers(self.grant, Operation::SharedMemory).then_some(self.client)
    }

    /// Whether it may be told of a client's request for a model: of its own for models that it may ask about, of
    /// anybody's if it may ask about all.
    #[must_use]
    pub fn may_see(&self, client: Client, model: &str) -> bool {
        let access = self.server.access.borrow();
        let may = |scope| access.covers_at(self.grant, Operation::Debug, scope);
        may(Scope::AllModels) || client == self.client && may(Scope::Model(model))
    }

    /// Who it is.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client
    }

    /// So many bytes of a reply wait for it.
    pub(crate) fn charge(&self, bytes: usize) {
        add(&self.load.untaken_bytes, bytes);
        add(&self.server.untaken_bytes, bytes);
    }

    /// It has taken them in, or never will.
    pub(crate) fn discharge(&self, bytes: usize) {
        sub(&self.load.untaken_bytes, bytes);
        sub(&self.server.untaken_bytes, bytes);
    }

    /// A body of its request as it is to be read: bounded, charged to it and timed. Without a bound it is a stream of
    /// messages.
    #[must_use]
    pub fn intake(&self, body: Incoming, max: Option<BodyMax>) -> Intake {
        let refusals = self.server.service.record.refusals().clone();
        Intake::new(body, self.server.limits(), max, self.account.charge(), refusals)
    }

    fn on_refusal(&self, refusal: &Refusal) {
        self.server.service.record.refusals().count(Cause::from(refusal));
    }
}

impl From<&Caller> for Asker {
    fn from(caller: &Caller) -> Self {
        Self { client: caller.client, regions_of: caller.shared_memory() }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        match self.lane {
            Lane::Work => {
                sub(&self.load.requests, 1);
                self.server.access.borrow_mut().handle_end(self.grant);
                self.server.drain.handle_end();
            }
            Lane::Probe => {
                sub(&self.load.probes, 1);
                sub(&self.server.probes, 1);
            }
            Lane::Glance => {}
        }
    }
}

/// A client whose request is not under way yet.
struct Uncounted<'a> {
    server: &'a Rc<Server>,
    grant: GrantId,
    client: Client,
    load: &'a Rc<Load>,
    /// Who it is without its token.
    from: Client,
}

impl Uncounted<'_> {
    /// Counts a request. What its client has under way elsewhere is no reason to refuse the only one of a connection,
    /// of which there are few.
    fn count(self, lane: Lane, is_alone: bool) -> Result<Caller, Refusal> {
        let Self { server, grant, client, load, from } = self;
        match lane {
            Lane::Work => {
                self.check_untaken()?;
                let max = server.limits().client_requests_max;
                if load.requests.get() >= max && !is_alone {
                    return Err(Refusal::ClientBusy { max });
                }
                server.access.borrow_mut().handle_request(server.service.desk.now(), grant, from)?;
                add(&load.requests, 1);
            }
            Lane::Probe => {
                for (found, max) in [(&load.probes, CLIENT_PROBES_MAX), (&server.probes, PROBES_MAX)] {
                    if found.get() >= max {
                        return Err(Refusal::Probes { max });
                    }
                }
                add(&load.probes, 1);
                add(&server.probes, 1);
            }
            Lane::Glance => {}
        }
        let account = server.budget.borrow_mut().account(client);
        Ok(Caller { server: Rc::clone(server), grant, client, account, load: Rc::clone(load), lane })
    }

    fn check_untaken(&self) -> Result<(), Refusal> {
        let limits = self.server.limits();
        let (own, max) = (self.load.untaken_bytes.get(), limits.client_untaken_bytes_max);
        if own > max {
            return Err(Refusal::Untaken { found: own, max, key: "client_untaken_bytes_max" });
        }
        let (found, max) = (self.server.untaken_bytes.get(), limits.untaken_bytes_max);
        if found > max && own > max / UNTAKEN_PART {
            return Err(Refusal::Untaken { found, max, key: "untaken_bytes_max" });
        }
        Ok(())
    }
}

fn head_bytes<B>(request: &Request<B>) -> usize {
    let uri = request.uri();
    let target = uri.path_and_query().map_or(0, |path| path.as_str().len());
    let fields = request.headers().iter();
    target + fields.map(|(name, value)| name.as_str().len() + value.len() + FIELD_BYTES).sum::<usize>()
}

/// The token of a request (RFC 6750, section 2.1); the scheme's name has no case (RFC 9110, section 11.1).
/// Another scheme, or several fields, are a token that nobody knows.
fn bearer<B>(request: &Request<B>) -> Option<&[u8]> {
    let mut fields = request.headers().get_all(AUTHORIZATION).iter();
    let field = fields.next()?.as_bytes();
    match (field.split_at_checked("bearer ".len()), fields.next()) {
        (Some((scheme, token)), None) if scheme.eq_ignore_ascii_case(b"bearer ") => Some(token.trim_ascii()),
        _ => Some(b""),
    }
}
