//! Compiles the messages of the gRPC service, in pure Rust: no protoc.
//!
//! REST answers with the same messages as JSON, so those that it uses can be serialised.
use std::error::Error;

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
    config.compile_fds(protox::compile(["inference_service.proto"], folders)?)?;
    Ok(())
}
