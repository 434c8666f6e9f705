//! `ModelStreamInfer`: requests of one stream run beside each other, and their answers go out in the order in which
//! they came, as clients that send no ids rely on. At most [`STREAM_REQUESTS_MAX`] are under way or wait for their
//! turn.

use std::{convert::Infallible, mem, pin::Pin, rc::Rc, time::Duration};

use hyper::Response;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::{Instant, Sleep, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, body::Body};

use super::{
    asks::Asks as _,
    call::{Call, Codings, respond},
    framing,
    framing::Messages,
    infer::Outlined,
};
use crate::{
    access::{Refusal, Scope},
    api::{InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse, infer_parameter},
    conversation::{self, Opening},
    metrics::Cause,
    server::{BodyMax, Caller, Server},
    trace::TraceContext,
};

/// Requests of one stream that are under way at once; more of them wait unread.
const STREAM_REQUESTS_MAX: usize = 64;

/// Answers each message of a stream, in their order. An error is the answer of its message and the stream goes on.
pub(super) async fn infer(call: Call<'_>) -> Response<Body> {
    let (caller, codings) = (Rc::clone(call.caller), Codings::of(call.request.headers()));
    let open = || {
        caller.permit(ModelInferRequest::OPERATION, Scope::Server)?;
        let context = caller.server.service.trace_context(call.request.headers());
        let of_one = BodyMax::infer(&caller.server.limits());
        let messages = call.stream(codings.request?, of_one);
        let (answers, replies) = mpsc::channel(STREAM_REQUESTS_MAX);
        tokio::task::spawn_local(answer_stream(Rc::clone(&caller), context, messages, answers));
        Ok(ReceiverStream::new(replies))
    };
    respond(open(), codings.reply)
}

type StreamAnswer = Result<ModelStreamInferResponse, Status>;

async fn answer_stream(
    caller: Rc<Caller>,
    context: Option<TraceContext>,
    mut messages: Messages,
    answers: mpsc::Sender<StreamAnswer>,
) {
    let (service, drain) = (&caller.server.service, &caller.server.drain);
    let mut under_way = JoinSet::new();
    // Ends when the answer before is out.
    let mut turn = oneshot::channel::<Infallible>().1;
    let mut is_open = true;
    let mut quiet = Quiet::new(&caller.server);
    // Dropping what is under way cancels it.
    while is_open || !under_way.is_empty() {
        let is_quiet = under_way.is_empty();
        tokio::select! {
            () = answers.closed() => return,
            Some(_) = under_way.join_next() => quiet.begin(),
            message = messages.next(), if is_open && under_way.len() < STREAM_REQUESTS_MAX => match message {
                Ok(Some(message)) => {
                    let (caller, answers, context) = (Rc::clone(&caller), answers.clone(), context.clone());
                    let (out, next_turn) = oneshot::channel();
                    let turn = mem::replace(&mut turn, next_turn);
                    under_way.spawn_local(async move {
                        let answer = stream_answer(&caller, context, message).await;
                        let _ = turn.await;
                        let _ = answers.send(Ok(answer)).await;
                        drop(out);
                    });
                }
                Ok(None) => is_open = false,
                Err(status) => {
                    let _ = answers.send(Err(status)).await;
                    return;
                }
            },
            // What was sent has been answered; a client opens its next stream elsewhere.
            () = drain.begun(), if is_quiet => {
                let _ = answers.send(Err(Refusal::Draining.into())).await;
                return;
            }
            status = quiet.over(), if is_quiet => {
                service.record.refusals().count(Cause::Stream);
                let _ = answers.send(Err(status)).await;
                return;
            }
        }
    }
}

/// How long a stream may have no message under way.
pub(super) struct Quiet<'a> {
    server: &'a Server,
    until: Pin<Box<Sleep>>,
    allowed: (Duration, &'static str),
}

impl<'a> Quiet<'a> {
    /// A stream without a message yet.
    pub(super) fn new(server: &'a Server) -> Self {
        let allowed = server.limits().stream_first_timeout;
        Self { server, until: Box::pin(sleep(allowed)), allowed: (allowed, "stream_first_timeout_ms") }
    }

    /// A message has been answered.
    pub(super) fn begin(&mut self) {
        let allowed = self.server.limits().stream_idle_timeout;
        self.allowed = (allowed, "stream_idle_timeout_ms");
        self.until.as_mut().reset(Instant::now() + allowed);
    }

    /// Returns when it has taken too long.
    pub(super) async fn over(&mut self) -> Status {
        self.until.as_mut().await;
        let (allowed, key) = self.allowed;
        Status::deadline_exceeded(format!("stream: no message was under way for {allowed:?} ({key}); open another one"))
    }
}

async fn stream_answer(
    caller: &Caller,
    context: Option<TraceContext>,
    message: framing::Message,
) -> ModelStreamInferResponse {
    let mut id = String::new();
    let answer = async {
        let service = &caller.server.service;
        let began = message.began();
        let question = Outlined::read(service, message).await?;
        question.id().clone_into(&mut id);
        caller.permit(ModelInferRequest::OPERATION, Scope::Server)?;
        let opening = Opening { model: None, context, began, within: None, is_one_of_many: true };
        conversation::hold(caller, opening, async || Ok(question)).await
    };
    match answer.await {
        Ok(mut response) => {
            // There is one response to each request.
            let is_final = InferParameter { parameter_choice: Some(infer_parameter::ParameterChoice::BoolParam(true)) };
            response.parameters.insert("triton_final_response".to_owned(), is_final);
            ModelStreamInferResponse { infer_response: Some(response), ..ModelStreamInferResponse::default() }
        }
        Err(status) => ModelStreamInferResponse {
            error_message: status.message().to_owned(),
            infer_response: Some(ModelInferResponse { id, ..ModelInferResponse::default() }),
        },
    }
}
