//! A request for inference in gRPC: a message, of a call of its own or of a stream.

use std::rc::Rc;

use bytes::Bytes;
use frontend::InferError;
use hyper::Response;
use prost::Message as _;
use repository::Model;
use tonic::{Status, body::Body};

use super::{
    asks::{Asks as _, given},
    call::{Call, Codings, respond},
    framing,
    status::{status_of, undecodable},
};
use crate::{
    access::Scope,
    api::{ModelInferRequest, ModelInferResponse},
    budget::Charge,
    conversation::{self, Opening, Question},
    pool::AT_ONCE_BYTES_MAX,
    protocol::{
        InferRequest, messages,
        messages::outline::{Outline, OutlineError},
    },
    server::BodyMax,
    service::{Answer, Service, no_room},
};

/// Fields of a message that are looked at before that becomes the pool's work.
const FIELDS_AT_ONCE_MAX: usize = 4096;

/// Answers a call.
pub(super) async fn infer(call: Call<'_>) -> Response<Body> {
    let (caller, codings) = (Rc::clone(call.caller), Codings::of(call.request.headers()));
    let (within, service) = (call.within(), &caller.server.service);
    let began = service.desk.now();
    let reply = async {
        let within = within?;
        caller.permit(ModelInferRequest::OPERATION, Scope::Server)?;
        let context = service.trace_context(call.request.headers());
        let opening = Opening { model: None, context, began, within, is_one_of_many: false };
        let receive = async || {
            let max = BodyMax::infer(&caller.server.limits());
            Outlined::read(service, call.messages(codings.request?, max).only().await?).await
        };
        conversation::hold(&caller, opening, receive).await
    };
    respond(reply.await.map(|reply| tokio_stream::once(Ok(reply))), codings.reply)
}

/// A message of which it is known what it holds.
pub(super) struct Outlined {
    bytes: Bytes,
    charge: Charge,
    outline: Outline,
}

impl Outlined {
    /// Looks at a message; at a large one in the pool.
    pub(super) async fn read(service: &Service, message: framing::Message) -> Result<Self, Status> {
        let (bytes, charge) = message.decompressed(&service.pool).await?;
        let outline = match Outline::of(&bytes, FIELDS_AT_ONCE_MAX) {
            Err(OutlineError::TooLong(_)) => {
                let (bytes, held) = (bytes.clone(), charge.clone());
                let look = move || {
                    let _held = held;
                    Outline::of(&bytes, usize::MAX)
                };
                service.pool.run(&charge, look).await.map_err(status_of)?
            }
            outline => outline,
        };
        Ok(Self { outline: outline.map_err(undecodable)?, bytes, charge })
    }

    /// Its id, if it can be told.
    pub(super) fn id(&self) -> &str {
        self.outline.id(&self.bytes)
    }
}

impl Question for Outlined {
    type Reply = ModelInferResponse;
    type Refused = Status;

    fn model_name(&self) -> Result<&str, Status> {
        self.outline.model_name(&self.bytes).map_err(undecodable)
    }

    fn model_version(&self) -> Result<Option<&str>, Status> {
        self.outline.model_version(&self.bytes).map(given).map_err(undecodable)
    }

    async fn decode(self, service: &Service, model: &Model) -> Result<(InferRequest, Charge), Status> {
        let Self { bytes, charge, outline } = self;
        outline.check(model).map_err(status_of)?;
        let parse =
            || messages::parse_request(ModelInferRequest::decode(bytes).map_err(undecodable)?).map_err(status_of);
        if outline.parsed_bytes() <= AT_ONCE_BYTES_MAX {
            return Ok((parse()?, charge));
        }
        charge.grow(outline.decoded_bytes()).map_err(|full| status_of(no_room(full)))?;
        let held = charge.clone();
        let parse = move || {
            let _held = held;
            parse()
        };
        let request = service.pool.run(&charge, parse).await.map_err(status_of)??;
        Ok((request, charge))
    }

    fn encode(answer: &Answer) -> Result<ModelInferResponse, Status> {
        let Answer { model, id, outputs, reply, parameters, number: _ } = answer;
        Ok(messages::encode_reply(model, (id.as_deref(), parameters), outputs, reply))
    }

    fn refused(error: InferError) -> Status {
        status_of(error)
    }

    fn words(refused: &Status) -> &str {
        refused.message()
    }
}
