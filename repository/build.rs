//! Compiles the schema of `config.pbtxt` into a descriptor set, which the library embeds.
use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/model_config.proto");
    let descriptors = protox::compile(["model_config.proto"], ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?).join("model_config.bin");
    fs::write(out, descriptors.encode_to_vec())?;
    Ok(())
}
