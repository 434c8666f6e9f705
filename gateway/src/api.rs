//! The messages of `inference.GRPCInferenceService` and of gRPC's own services, as `tests/generated.rs` compiled them
//! from `proto/`. REST answers with the same messages as JSON.
#![allow(missing_docs, clippy::doc_markdown, clippy::pedantic)]

pub use inference::*;

/// The messages of `inference.GRPCInferenceService`.
pub mod inference {
    include!("../proto/generated/inference.rs.in");
}

/// The messages of `downbeat.Feedback`.
pub mod feedback {
    include!("../proto/generated/downbeat.rs.in");
}

/// The messages of `grpc.health.v1.Health`.
pub mod health {
    include!("../proto/generated/grpc.health.v1.rs.in");
}

/// The messages of `grpc.reflection.v1.ServerReflection`.
pub mod reflection {
    include!("../proto/generated/grpc.reflection.v1.rs.in");
}
