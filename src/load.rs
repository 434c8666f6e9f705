//! `bench load`: open-loop load on a server that speaks the Open Inference Protocol.

use std::{net::ToSocketAddrs, time::Duration};

use anyhow::{Context, Result, ensure};
use bench::load::{Arrivals, Expected, Input, Stream, Target, generate};
use indicatif::{ProgressBar, ProgressStyle};
use rand::{Rng, SeedableRng};
use serde_json::json;

use crate::table;

/// Arguments of `bench load`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The server, such as http://127.0.0.1:8000
    #[arg(long)]
    url: String,
    /// The model
    #[arg(long)]
    model: String,
    /// Requests a second (Poisson)
    #[arg(long, required_unless_present = "one_at_a_time")]
    rate: Option<f64>,
    /// Closed loop instead: the next request leaves when the last one is answered
    #[arg(long, conflicts_with = "rate")]
    one_at_a_time: bool,
    /// How long
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// The objective, sent with each request; without it the model's own holds and nothing is late
    #[arg(long)]
    slo_ms: Option<f64>,
    /// Decides arrivals and inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// Generates the load and prints what came of it.
pub fn run(args: &Args) -> Result<()> {
    ensure!((0.001..=86_400.0).contains(&args.seconds), "--seconds must be 0.001 to 86400, found {}", args.seconds);
    let arrivals = match args.rate {
        None => Arrivals::OneAtATime,
        Some(rate_rps) => {
            ensure!((0.001..=1e6).contains(&rate_rps), "--rate must be 0.001 to 1000000, found {rate_rps}");
            Arrivals::Poisson { rate_rps }
        }
    };
    if let Some(slo_ms) = args.slo_ms {
        ensure!((0.001..=60_000.0).contains(&slo_ms), "--slo-ms must be 0.001 to 60000, found {slo_ms}");
    }
    let host = args.url.strip_prefix("http://").context("--url must start with http://")?.trim_end_matches('/');
    let address = host
        .to_socket_addrs()
        .ok()
        .and_then(|mut addresses| addresses.next())
        .with_context(|| format!("--url: no address for `{host}`; expected host:port"))?;
    let (name, datatype, shape) = bench::load::first_input(address, &args.model)?;
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(args.seed);
    let inputs = (0..INPUTS)
        .map(|_| {
            let mut data = vec![0u8; shape.iter().product::<usize>() * bytes_of(&datatype)?];
            random.fill_bytes(&mut data);
            if datatype.starts_with("FP") {
                // Random bits make NaNs; zeros are as good a load.
                data.fill(0);
            }
            Ok(Input::new(&name, &datatype, &shape, &data, args.slo_ms, Expected::Any))
        })
        .collect::<Result<Vec<_>>>()?;
    let stream = Stream {
        model: args.model.clone(),
        arrivals,
        slo_ms: args.slo_ms.unwrap_or(f64::INFINITY),
        inputs: inputs.into(),
    };
    let target = Target { address, span: Duration::from_secs_f64(args.seconds), seed: args.seed };
    let bar = progress_bar("load");
    let tallies = generate(&target, &[stream], |fraction| bar.set_position((fraction * 1000.0) as u64))?;
    bar.finish_and_clear();
    let report = tallies[0].report(&args.model, args.seconds);
    if args.json {
        let reasons = json!({ "dropped": tallies[0].dropped, "errors": tallies[0].errors });
        let stages: serde_json::Map<_, _> = tallies[0]
            .stages
            .rows()
            .map(|(stage, p50, p99)| (stage.to_owned(), json!({ "p50": p50, "p99": p99 })))
            .collect();
        println!("{}", json!({ "models": [report], "reasons": reasons, "stages_us": stages }));
    } else {
        println!("{}\n{}", table::models(&[report]), table::stages(std::slice::from_ref(&args.model), &tallies));
        for (what, count) in tallies[0].dropped.iter().chain(&tallies[0].errors) {
            println!("{count} x {what}");
        }
    }
    Ok(())
}

/// Different request bodies, used in turn.
const INPUTS: usize = 16;

fn bytes_of(datatype: &str) -> Result<usize> {
    Ok(match datatype {
        "BOOL" | "UINT8" | "INT8" => 1,
        "UINT16" | "INT16" | "FP16" => 2,
        "UINT32" | "INT32" | "FP32" => 4,
        "UINT64" | "INT64" | "FP64" => 8,
        other => anyhow::bail!("--model: its input is {other}, which has no fixed size"),
    })
}

/// A bar of a thousand steps on stderr; invisible where stderr is no terminal.
pub fn progress_bar(what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:>10} [{bar:40}] {percent:>3} % {elapsed}")
        .expect("the template is well-formed")
        .progress_chars("=> ");
    ProgressBar::new(1000).with_style(style).with_message(what.to_owned())
}
