//! The messages of the gRPC services, compiled in pure Rust: no protoc. What comes of them is committed
//! (`proto/generated`), as compilers of Protocol Buffers take long to build. REST answers with the same messages as
//! JSON, so those that it uses can be serialised.
//!
//! ```text
//! WRITE=1 cargo test -p gateway --test generated      # writes it anew
//! ```

use std::{env, fs, path::Path};

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

#[test]
fn what_is_committed_is_what_the_schemas_compile_to() {
    let (package, compiled) = (Path::new(env!("CARGO_MANIFEST_DIR")), tempfile::tempdir().unwrap());
    let folders = [package.join("proto"), package.join("../repository/proto")];
    let descriptors =
        protox::compile(["inference_service.proto", "downbeat.proto", "health.proto", "reflection.proto"], folders)
            .unwrap();
    let mut files = vec![("descriptors.bin".to_owned(), descriptors.encode_to_vec())];
    let mut config = prost_build::Config::new();
    config.bytes(["."]).btree_map(["."]).out_dir(compiled.path());
    for message in JSON_MESSAGES {
        config.message_attribute(format!("inference.{message}"), "#[derive(serde::Serialize)]");
    }
    config.compile_fds(descriptors).unwrap();
    for entry in fs::read_dir(compiled.path()).unwrap() {
        let path = entry.unwrap().path();
        files.push((format!("{}.in", path.file_name().unwrap().display()), fs::read(&path).unwrap()));
    }
    assert_eq!(files.len(), 5);
    for (name, bytes) in files {
        let committed = package.join("proto/generated").join(&name);
        if env::var_os("WRITE").is_some() {
            fs::write(&committed, &bytes).unwrap();
        }
        let found = fs::read(&committed).unwrap();
        assert!(found == bytes, "{name} is old: WRITE=1 cargo test -p gateway --test generated");
    }
}
