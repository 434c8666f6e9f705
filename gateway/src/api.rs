//! The messages of `inference.GRPCInferenceService`, as build.rs compiled them from `proto/`. REST answers with the
//! same messages as JSON.
#![allow(missing_docs, clippy::doc_markdown, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/inference.rs"));
