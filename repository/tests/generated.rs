//! The schema of `config.pbtxt` as a descriptor set, which the library embeds. It is committed (`proto/generated`), as
//! compilers of Protocol Buffers take long to build.
//!
//! ```text
//! WRITE=1 cargo test -p repository --test generated      # writes it anew
//! ```

use std::{env, fs, path::Path};

use prost::Message as _;

#[test]
fn what_is_committed_is_what_the_schema_compiles_to() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let compiled = protox::compile(["model_config.proto"], [&folder]).unwrap().encode_to_vec();
    let committed = folder.join("generated/model_config.bin");
    if env::var_os("WRITE").is_some() {
        fs::write(&committed, &compiled).unwrap();
    }
    let is_new = fs::read(&committed).unwrap() == compiled;
    assert!(is_new, "model_config.bin is old: WRITE=1 cargo test -p repository --test generated");
}
