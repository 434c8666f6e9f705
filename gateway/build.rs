//! Compiles the messages of the gRPC services, in pure Rust: no protoc. Their descriptors are kept for those who ask.
//!
//! REST answers with the same messages as JSON, so those that it uses can be serialised.
use std::{env, error::Error, fs, path::Path};

use prost::Message as _;

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
    let descriptors = protox::compile(["inference_service.proto", "health.proto", "reflection.proto"], folders)?;
    fs::write(Path::new(&env::var("OUT_DIR")?).join("descriptors.bin"), descriptors.encode_to_vec())?;
    config.compile_fds(descriptors)?;
    Ok(())
}
