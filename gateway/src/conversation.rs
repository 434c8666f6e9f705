//! Step 1, Step 10 of a request for inference, the same over REST and gRPC, for a call and for a message of a stream.
//! It is received, permitted, decoded, submitted, awaited and encoded, and leaves a trace. Its head has been admitted
//! before.
//!
//! A protocol says how a request is decoded, a reply encoded, and a refusal spelled ([`Question`]).

use frontend::InferError;
use proto::{Span, Timestamp};
use repository::Model;

use crate::{
    access::{Operation, Refusal, Scope},
    budget::Charge,
    metrics::Stage,
    protocol::InferRequest,
    server::Caller,
    service::{Answer, Arrival, Service},
    trace::{OpenTrace, TraceContext},
};

/// A request for inference as its protocol carries it, received and not decoded yet.
pub(crate) trait Question: Sized {
    /// What a client is answered.
    type Reply;
    /// Or what it is told instead.
    type Refused: From<Refusal>;

    /// The model that it is for; no name if it has none.
    fn model_name(&self) -> Result<&str, Self::Refused>;

    /// The version that it is for, if that matters.
    fn model_version(&self) -> Result<Option<&str>, Self::Refused>;

    /// Decodes it, in the pool if it is large. What holds its bytes comes with it.
    async fn decode(self, service: &Service, model: &Model) -> Result<(InferRequest, Charge), Self::Refused>;

    /// Encodes its answer.
    fn encode(answer: &Answer) -> Result<Self::Reply, Self::Refused>;

    /// Spells why there is none.
    fn refused(error: InferError) -> Self::Refused;

    /// The words of that, without their form.
    fn words(refused: &Self::Refused) -> &str;
}

/// What is known of a request before it is received.
pub(crate) struct Opening<'a> {
    /// The model, if its head names it: the client may ask that one.
    pub(crate) model: Option<&'a str>,
    /// Of which trace it is part.
    pub(crate) context: Option<TraceContext>,
    /// When it began to come in.
    pub(crate) began: Timestamp,
    /// The time that the client's protocol leaves for an answer.
    pub(crate) within: Option<Span>,
    /// It came with others, and is counted by itself.
    pub(crate) is_one_of_many: bool,
}

/// Answers a request that `receive` yields. What is waited for here is part of a future that moves a few times before
/// it is polled: what few requests need is boxed, so that it is small.
///
/// # Errors
/// Why there is no answer, in the words of its protocol.
pub(crate) async fn hold<Q: Question>(
    caller: &Caller,
    opening: Opening<'_>,
    receive: impl AsyncFnOnce() -> Result<Q, Q::Refused>,
) -> Result<Q::Reply, Q::Refused> {
    let mut trace = OpenTrace::default();
    let reply = hold_traced(caller, opening, receive, &mut trace).await;
    reply.inspect_err(|refused| trace.refused(Q::words(refused)))
}

async fn hold_traced<Q: Question>(
    caller: &Caller,
    Opening { model, mut context, began, within, is_one_of_many }: Opening<'_>,
    receive: impl AsyncFnOnce() -> Result<Q, Q::Refused>,
    trace: &mut OpenTrace,
) -> Result<Q::Reply, Q::Refused> {
    let service = &caller.server.service;
    if let Some(name) = model {
        *trace = service.trace(context.take(), name, began);
    }
    let question = receive().await?;
    let name = question.model_name()?;
    if model.is_none() {
        let named = (!name.is_empty()).then_some(name);
        caller.permit_further(Operation::Infer, Scope::of(Operation::Infer, named))?;
    }
    let _counted = is_one_of_many.then(|| caller.another()).transpose()?;
    if model.is_none() {
        *trace = service.trace(context, name, began);
    }
    let (index, model) = service.find(name, question.model_version()?).map_err(Q::refused)?;
    let received = service.desk.now();
    service.record.observe(index, Stage::Receive, received - began);
    trace.stage(Stage::Receive, began);
    let arrival = Arrival { asker: caller.into(), within, began, received };
    let answer = {
        let (request, charge) = question.decode(service, &model).await?;
        let submitted = service.admit((index, model), request, arrival, &charge, trace).await;
        // Its bytes are in slots now.
        drop(charge);
        submitted.map_err(Q::refused)?.wait(trace).await.map_err(Q::refused)?
    };
    let answered = service.desk.now();
    let reply = Q::encode(&answer)?;
    service.record.observe(index, Stage::Reply, service.desk.now() - answered);
    Ok(reply)
}
