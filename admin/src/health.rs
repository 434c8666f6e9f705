//! gRPC's own question for health (`grpc.health.v1.Health`), as probes of Kubernetes and `grpc-health-probe` ask it:
//! whether the process serves, or only whether it lives.

use std::{pin::Pin, time::Duration};

use tokio_stream::{Stream, StreamExt as _, wrappers::IntervalStream};
use tonic::{Request, Response, Status};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_server};
use transport::Clock;

use crate::Vitals;

/// How long a change may go unnoticed by those who watch.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What is asked about, and what answers.
#[derive(Clone)]
pub(crate) struct Health {
    pub(crate) clock: Clock,
    pub(crate) vitals: Vitals,
}

impl Health {
    fn status(&self, service: &str) -> Option<ServingStatus> {
        let now = self.clock.now();
        let health = match service {
            "" | "readiness" => self.vitals.ready(now),
            "liveness" => self.vitals.live(now),
            _ => return None,
        };
        Some(if health.is_ok() { ServingStatus::Serving } else { ServingStatus::NotServing })
    }
}

fn told(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl health_server::Health for Health {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let expected = || Status::not_found("service: expected nothing, `readiness` or `liveness`");
        self.status(&request.get_ref().service).map(|status| Response::new(told(status))).ok_or_else(expected)
    }

    /// Answers at once, and again whenever the answer is another one. It ends with the connection.
    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (health, service, mut last) = (self.clone(), request.into_inner().service, None);
        let looks = IntervalStream::new(tokio::time::interval(LOOK_EVERY));
        let changes = looks.filter_map(move |_| {
            let status = health.status(&service).unwrap_or(ServingStatus::ServiceUnknown);
            (last.replace(status) != Some(status)).then(|| Ok(told(status)))
        });
        Ok(Response::new(Box::pin(changes)))
    }
}
