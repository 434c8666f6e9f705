//! Step 1: a request's client: who it is, and that it is counted while the request is under way.

use std::{net::IpAddr, rc::Rc};

use hyper::{Request, header::AUTHORIZATION};

use super::Server;
use crate::{
    access::{GrantId, Operation, Refusal, Scope},
    metrics::Cause,
};

/// What a header field takes up besides its name and value (RFC 9113, section 6.5.2).
const FIELD_BYTES: usize = 32;

/// A client that has a request under way.
pub struct Caller {
    /// Whom it asked.
    pub server: Rc<Server>,
    grant: GrantId,
    from: IpAddr,
}

impl Caller {
    /// Looks at a request's head.
    ///
    /// # Errors
    /// If the head is too large, its token is not known, or its client sends too much.
    pub(crate) fn admit<B>(server: &Rc<Server>, from: IpAddr, request: &Request<B>) -> Result<Self, Refusal> {
        let admit = || {
            let (found, max) = (head_bytes(request), server.limits.head_bytes_max);
            if found > max {
                return Err(Refusal::Head { found, max });
            }
            let grant = server.access.borrow().authenticate(bearer(request))?;
            Self::count(server, grant, from)
        };
        admit().inspect_err(|refusal| server.service.record.refusals().count(Cause::from(refusal)))
    }

    /// Counts one more request of the same client, which came with the first one.
    ///
    /// # Errors
    /// If it sends too much.
    pub fn another(&self) -> Result<Self, Refusal> {
        Self::count(&self.server, self.grant, self.from).inspect_err(|refusal| self.on_refusal(refusal))
    }

    /// Whether it may do that.
    ///
    /// # Errors
    /// If it may not.
    pub fn permit(&self, operation: Operation, scope: Scope<'_>) -> Result<(), Refusal> {
        let permitted = self.server.access.borrow().permit(self.grant, operation, scope);
        permitted.inspect_err(|refusal| self.on_refusal(refusal))
    }

    fn count(server: &Rc<Server>, grant: GrantId, from: IpAddr) -> Result<Self, Refusal> {
        server.access.borrow_mut().handle_request(server.service.desk.now(), grant, from)?;
        Ok(Self { server: Rc::clone(server), grant, from })
    }

    fn on_refusal(&self, refusal: &Refusal) {
        self.server.service.record.refusals().count(Cause::from(refusal));
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.server.access.borrow_mut().handle_end(self.grant);
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
