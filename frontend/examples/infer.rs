//! A program that links the frontend: it joins a cluster as a member of its own, and its inputs go from its own memory
//! to the backends, with no HTTP between.
//!
//! ```sh
//! DOWNBEAT_SECRET=$(cat cluster.secret) cargo run -p frontend --example infer -- 127.0.0.1:7000 models resnet50
//! ```
//!
//! The arguments are the scheduler's `listen`, the model repository, and a model; the secret is the cluster's.
#![allow(clippy::disallowed_methods)] // Waits for the cluster.

use std::{error::Error, path::Path, time::Duration};

use frontend::{Client, Config, Infer, InputTensor};
use transport::Address;

const USAGE: &str = "expected DOWNBEAT_SECRET to be set, and SCHEDULER REPOSITORY MODEL";

fn main() -> Result<(), Box<dyn Error>> {
    let secret = std::env::var("DOWNBEAT_SECRET").map_err(|_| USAGE)?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [scheduler, repository, name] = &arguments[..] else { return Err(USAGE.into()) };
    let scheduler: Address = scheduler.parse()?;

    // The frontend runs on a thread of its own, until the last clone of the client is dropped.
    let client = Client::start(Config::new(scheduler, secret, repository))?;
    while !client.is_ready_blocking(name)? {
        std::thread::sleep(Duration::from_millis(10));
    }

    // One row of zeros for each input.
    let versions = repository::load_named(&repository::Source::repository(Path::new(repository)), name, None)?;
    let model = versions.last().expect("a model has a version");
    let zeros = |tensor: &repository::Tensor| InputTensor {
        name: tensor.name.clone(),
        datatype: tensor.datatype,
        shape: [1].into_iter().chain(tensor.shape.iter().copied()).collect(),
        data: vec![0; tensor.bytes()].into(),
    };
    let inputs = model.inputs.iter().map(zeros).collect();
    let inferred = client.infer_blocking(Infer { model: name.clone(), version: None, inputs, slo: None })?;

    for output in &inferred.outputs {
        println!("{}: {} {:?}, {} bytes", output.name, output.datatype, output.shape, output.data.len());
    }
    let timing = &inferred.timing;
    println!("answered in {} in a batch of {}", timing.answered_at - timing.admitted_at, timing.batch_size);
    Ok(())
}
