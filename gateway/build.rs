//! Compiles the messages of the gRPC service, in pure Rust: no protoc.
//!
//! REST answers with the same messages as JSON, so those that it uses can be serialised.
use std::error::Error;

/// Messages that REST answers with.
const JSON_MESSAGES: [&str; 10] = [
    "ServerMetadataResponse",
    "ModelMetadataResponse",
    "ModelMetadataResponse.TensorMetadata",
    "StatisticDuration",
    "InferStatistics",
    "InferBatchStatistics",
    "ModelStatistics",
    "ModelStatisticsResponse",
    "RepositoryIndexResponse.ModelIndex",
    "SystemSharedMemoryStatusResponse.RegionStatus",
];

fn main() -> Result<(), Box<dyn Error>> {
    let folders = ["proto", "../repository/proto"];
    for folder in folders {
        println!("cargo::rerun-if-changed={folder}");
    }
    let mut config = prost_build::Config::new();
    config.bytes(["."]).btree_map(["."]);
    for message in JSON_MESSAGES {
        config.message_attribute(format!("inference.{message}"), "#[derive(serde::Serialize)]");
    }
    config.compile_fds(protox::compile(["inference_service.proto"], folders)?)?;
    Ok(())
}
