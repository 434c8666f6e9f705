//! gRPC's own question for health: what Kubernetes' probes, grpc-health-probe and load balancers ask. No service stands
//! for the whole server, as does the service that it is; any other name is a model's.
//!
//! `tonic-health` does not fit. Whether a client may ask about a model depends on the message, which it reads itself,
//! uncharged and for as long as the client likes. A task would have to copy every model's readiness to it, and its
//! streams do not end when the server drains.

use std::{rc::Rc, time::Duration};

use hyper::Response;
use prost::Message as _;
use tokio::{sync::mpsc, time::sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, body::Body};

use super::{
    call::{Call, Codings, respond},
    status::undecodable,
};
use crate::{
    access::{Operation, Refusal, Scope},
    api::health::{HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus},
    budget::Charge,
    server::{BodyMax, Caller},
    service::Service,
};

/// How long a change may go unnoticed by those who watch.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The service that this server is.
const OWN_SERVICE: &str = "inference.GRPCInferenceService";

/// Answers once.
pub(super) async fn check(call: Call<'_>) -> Response<Body> {
    let caller = Rc::clone(call.caller);
    let answer = |_, HealthCheckRequest { service }| async move {
        permit(&caller, &service)?;
        let status = status_of(&caller.server.service, &service).ok_or_else(|| {
            let found = frontend::excerpt(&service);
            Status::not_found(format!("service: found '{found}', expected nothing, '{OWN_SERVICE}' or a model's name"))
        })?;
        Ok(told(status))
    };
    call.unary_later(answer).await
}

/// Answers at once, and again whenever the answer is another one.
pub(super) async fn watch(call: Call<'_>) -> Response<Body> {
    let (caller, codings) = (Rc::clone(call.caller), Codings::of(call.request.headers()));
    let open = async {
        caller.permit(Operation::Health, Scope::Server)?;
        let message = call.messages(codings.request?, BodyMax::OBJECT).only().await?;
        let (bytes, charge) = message.decompressed(&caller.server.service.pool).await?;
        let HealthCheckRequest { service } = HealthCheckRequest::decode(bytes).map_err(undecodable)?;
        permit(&caller, &service)?;
        let (answers, replies) = mpsc::channel(1);
        tokio::task::spawn_local(tell(caller, (service, charge), answers));
        Ok(ReceiverStream::new(replies))
    };
    respond(open.await, codings.reply)
}

/// Tells of changes until the client has heard enough, or the process is about to end. What holds the service's name
/// comes with it.
async fn tell(
    caller: Rc<Caller>,
    (service, _charge): (String, Charge),
    answers: mpsc::Sender<Result<HealthCheckResponse, Status>>,
) {
    let server = &caller.server;
    let mut last = None;
    loop {
        let status = status_of(&server.service, &service).unwrap_or(ServingStatus::ServiceUnknown);
        if last.replace(status) != Some(status) && answers.send(Ok(told(status))).await.is_err() {
            return;
        }
        if server.drain.has_begun() {
            let _ = answers.send(Err(Refusal::Draining.into())).await;
            return;
        }
        tokio::select! {
            () = answers.closed() => return,
            () = server.drain.begun() => {}
            () = sleep(LOOK_EVERY) => {}
        }
    }
}

/// A model's health is as much a secret as its readiness.
fn permit(caller: &Caller, service: &str) -> Result<(), Refusal> {
    match is_server(service) {
        true => Ok(()),
        false => caller.permit(Operation::Metadata, Scope::Model(service)),
    }
}

fn is_server(service: &str) -> bool {
    service.is_empty() || service == OWN_SERVICE
}

fn status_of(server: &Service, service: &str) -> Option<ServingStatus> {
    let is_ready = match is_server(service) {
        true => server.is_ready(),
        false => server.is_model_ready(service, None).ok()?,
    };
    Some(if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing })
}

fn told(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}
