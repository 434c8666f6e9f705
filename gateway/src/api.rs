//! The messages of `inference.GRPCInferenceService` and of gRPC's own services, as build.rs compiled them from
//! `proto/`. REST answers with the same messages as JSON.
#![allow(missing_docs, clippy::doc_markdown, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/inference.rs"));

/// The messages of `grpc.health.v1.Health`.
pub mod health {
    include!(concat!(env!("OUT_DIR"), "/grpc.health.v1.rs"));
}

/// The messages of `grpc.reflection.v1.ServerReflection`.
pub mod reflection {
    include!(concat!(env!("OUT_DIR"), "/grpc.reflection.v1.rs"));
}
