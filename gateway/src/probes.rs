//! Questions for health, which are answered whatever else is under way: by their paths.

/// Before the name of a method of gRPC in a path.
pub(crate) const SERVICE_PATH: &str = "/inference.GRPCInferenceService/";
/// What Kubernetes asks.
pub(crate) const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";

/// Whether a path of gRPC is that of one.
pub(crate) fn is_in_grpc(path: &str) -> bool {
    path == HEALTH_CHECK || matches!(path.strip_prefix(SERVICE_PATH), Some("ServerLive" | "ServerReady" | "ModelReady"))
}

/// Whether a path of REST is that of one.
pub(crate) fn is_in_rest(path: &str) -> bool {
    let of_model = |path: &str| path.starts_with("/v2/models/") && path.ends_with("/ready");
    matches!(path, "/v2/health/live" | "/v2/health/ready") || of_model(path)
}
