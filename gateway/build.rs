//! Compiles the messages of the gRPC services, in pure Rust: no protoc. Their descriptors are kept for those who ask.
//!
//! REST answers with the same messages as JSON, so those that it uses can be serialised.
use std::{env, error::Error, fs, path::Path};

use prost::Message as _;

/// Messages that REST answers with.
const JSON_MESSAGES: [&str; 15] = [
    "ServerMetadataResponse",
    "ModelMetadataResponse",
    "ModelMetadataResponse.TensorMetadata",
    "ModelConfig",
    "ModelDynamicBatching",
    "ModelInput",
    "ModelOutput",
    "ModelParameter",
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
    for field in ["ModelInput.data_type", "ModelOutput.data_type"] {
        config.field_attribute(
            format!("inference.{field}"),
            "#[serde(serialize_with = \"crate::api::serialize_data_type\")]",
        );
    }
    // The objective and the backends decide what these would; they are accepted in a configuration and not used.
    let unused = ["preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"];
    let unused = unused.map(|field| format!("ModelDynamicBatching.{field}"));
    for field in
        ["version_policy", "instance_group"].map(|field| format!("ModelConfig.{field}")).into_iter().chain(unused)
    {
        config.field_attribute(format!("inference.{field}"), "#[serde(skip)]");
    }
    config.field_attribute(
        "inference.ModelConfig.dynamic_batching",
        "#[serde(skip_serializing_if = \"Option::is_none\")]",
    );
    config.field_attribute("inference.ModelInput.format", "#[serde(skip)]");
    let descriptors = protox::compile(["inference_service.proto", "health.proto", "reflection.proto"], folders)?;
    fs::write(Path::new(&env::var("OUT_DIR")?).join("descriptors.bin"), descriptors.encode_to_vec())?;
    config.compile_fds(descriptors)?;
    Ok(())
}
