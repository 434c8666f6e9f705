//! A call: its messages as they come in, and its replies as they go out, framed, encoded and compressed by tonic.

use std::rc::Rc;

use frontend::InferError;
use hyper::{
    HeaderMap, Request, Response,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
};
use prost::Message;
use proto::Span;
use tokio_stream::Stream;
use tonic::{
    Status,
    body::Body,
    codec::{CompressionEncoding, EncodeBody, SingleMessageCompressionOverride},
    metadata::GRPC_CONTENT_TYPE,
};
use tonic_prost::ProstEncoder;

use super::{
    asks::Asks,
    framing::{Messages, message_coding},
    status::{status_of, undecodable},
};
use crate::{
    access::Scope,
    compression::Coding,
    server::{BodyMax, Caller, Server},
    service::Service,
};

/// A request and who answers it.
pub(super) struct Call<'a> {
    pub(super) caller: &'a Rc<Caller>,
    pub(super) request: Request<Incoming>,
}

impl Call<'_> {
    /// Answers one message with one, at once.
    pub(super) async fn unary<Q, A>(self, answer: impl FnOnce(&Service, Q) -> Result<A, InferError>) -> Response<Body>
    where
        Q: Asks + Message + Default,
        A: Message + Send + 'static,
    {
        self.unary_later(|server, question| async move { answer(&server.service, question).map_err(status_of) }).await
    }

    /// Answers one message with one. What the client may not do is refused before any of it is read, or else once it
    /// says of what.
    pub(super) async fn unary_later<Q, A, F>(self, answer: impl FnOnce(Rc<Server>, Q) -> F) -> Response<Body>
    where
        Q: Asks + Message + Default,
        A: Message + Send + 'static,
        F: Future<Output = Result<A, Status>>,
    {
        let (caller, codings) = (Rc::clone(self.caller), Codings::of(self.request.headers()));
        let reply = async {
            caller.permit(Q::OPERATION, Scope::Server)?;
            let message = self.messages(codings.request?, BodyMax::OBJECT).only().await?;
            let (bytes, charge) = message.decompressed(&caller.server.service.pool).await?;
            let question = Q::decode(bytes).map_err(undecodable)?;
            drop(charge);
            caller.permit(Q::OPERATION, Scope::of(Q::OPERATION, question.model()))?;
            answer(Rc::clone(&caller.server), question).await
        };
        respond(reply.await.map(|reply| tokio_stream::once(Ok(reply))), codings.reply)
    }

    /// The one message of the call.
    pub(super) fn messages(self, coding: Option<Coding>, max: BodyMax) -> Messages {
        let desk = Rc::clone(&self.caller.server.service.desk);
        Messages::new(self.caller.intake(self.request.into_body(), Some(max)), coding, max, desk)
    }

    /// The messages of the call, each of which may be so large.
    pub(super) fn stream(self, coding: Option<Coding>, of_one: BodyMax) -> Messages {
        let desk = Rc::clone(&self.caller.server.service.desk);
        Messages::new(self.caller.intake(self.request.into_body(), None), coding, of_one, desk)
    }

    /// What is left until the client gives up, by `grpc-timeout`: digits and a unit.
    pub(super) fn within(&self) -> Result<Option<Span>, Status> {
        let Some(value) = self.request.headers().get("grpc-timeout") else { return Ok(None) };
        let parse = || {
            let (number, unit) = value.to_str().ok()?.split_at_checked(value.len().checked_sub(1)?)?;
            let ns_per_unit = match unit {
                "H" => 3_600_000_000_000,
                "M" => 60_000_000_000,
                "S" => 1_000_000_000,
                "m" => 1_000_000,
                "u" => 1_000,
                "n" => 1,
                _ => return None,
            };
            // Beyond 292 years there is no difference.
            (number.len() <= 8).then(|| Some(Span(number.parse::<i64>().ok()?.saturating_mul(ns_per_unit))))?
        };
        let wrong = || Status::invalid_argument(format!("grpc-timeout: found {value:?}, expected digits and a unit"));
        parse().map(Some).ok_or_else(wrong)
    }
}

/// How the messages of a call are compressed, and its replies: the way the request is, if the client can read that.
/// Most clients announce that they could read compressed ones, whether or not that is worth anybody's time.
pub(super) struct Codings {
    pub(super) request: Result<Option<Coding>, Status>,
    pub(super) reply: Option<Coding>,
}

impl Codings {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let request = message_coding(headers);
        let accepted = headers.get("grpc-accept-encoding").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let is_accepted = |coding: &Coding| accepted.split(',').any(|name| name.trim() == coding.name());
        let reply = request.as_ref().ok().copied().flatten().filter(is_accepted);
        Self { request, reply }
    }
}

pub(super) fn respond<A: Message + Send + 'static>(
    replies: Result<impl Stream<Item = Result<A, Status>> + Send + 'static, Status>,
    coding: Option<Coding>,
) -> Response<Body> {
    let replies = match replies {
        Ok(replies) => replies,
        Err(status) => return status.into_http(),
    };
    let encoding = coding.map(|coding| match coding {
        Coding::Gzip => CompressionEncoding::Gzip,
        Coding::Deflate => CompressionEncoding::Deflate,
    });
    let each = SingleMessageCompressionOverride::default();
    let body = EncodeBody::new_server(ProstEncoder::default(), replies, encoding, each, Some(usize::MAX));
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    if let Some(coding) = coding {
        response.headers_mut().insert("grpc-encoding", HeaderValue::from_static(coding.name()));
    }
    response
}
