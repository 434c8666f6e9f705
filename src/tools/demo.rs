//! `demo`: a local cluster of real processes, a real model, real inputs; a table, and an exit code that means it.

#![allow(clippy::disallowed_methods)] // Real processes, real time.

mod many;
mod takeover;

use std::{
    fmt,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use load::{Arrivals, Expected, Input, Stream, Tally, Target, generate, progress_bar, tables};
use rand::{Rng, SeedableRng};
use repository::{Precision, Processor};
use transport::{ArmName, Faults};

use super::{
    cluster::{Cluster, Layout, READY_TIMEOUT, SCHEDULERS_MAX, random_http},
    digits,
    supervisor::{Logs, Restarts, private_folder},
};
use takeover::Killed;

/// Arguments of `demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The network: `soft` is soft-RoCE over UDP, on any machine; `verbs:DEVICE` an RDMA device of this host
    #[arg(long, default_value_t)]
    arm: ArmName,
    /// The scheduler's policy
    #[arg(long, default_value = "downbeat")]
    policy: String,
    /// Inject faults into the soft-RoCE path, such as loss=0.02
    #[arg(long)]
    fault: Option<Faults>,
    /// How long load is sent
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Requests a second over all models; their shares stay [default: 440, or 100 with --models]
    #[arg(long)]
    rate: Option<f64>,
    /// Decides arrivals and inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Schedulers, of which one is the primary and the others take over from it; 1 to 4
    #[arg(long, default_value_t = 1)]
    schedulers: u16,
    /// Kill the primary in the middle of the load; it is started again
    #[arg(long, value_name = "scheduler")]
    kill: Option<Kill>,
    /// What computes the classifier of digits: auto, cpu, cuda or onnxruntime
    #[arg(long, default_value_t, conflicts_with = "models")]
    executor: Processor,
    /// Serve so many emulated models on GPUs whose memory holds a part of them
    #[arg(long, requires = "gpu_memory")]
    models: Option<u32>,
    /// Memory for weights of each GPU, such as 2GiB
    #[arg(long, value_name = "SIZE", requires = "models")]
    gpu_memory: Option<many::Size>,
    /// Host memory for weights, such as 20GiB, if that holds but a part of them, too: the others are read from disk
    #[arg(long, value_name = "SIZE", requires = "models")]
    host_memory: Option<many::Size>,
}

/// What is killed.
#[derive(Debug, Clone, Copy)]
enum Kill {
    /// The scheduler that is the primary.
    Scheduler,
}

impl FromStr for Kill {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "scheduler" { Ok(Self::Scheduler) } else { Err("expected scheduler") }
    }
}

/// A command ran, and something was wrong: exit code 1, not bad input.
#[derive(Debug)]
pub(crate) struct Failed(pub(in crate::tools) String);

impl Failed {
    /// With the error's causes.
    pub(crate) fn new(error: &anyhow::Error) -> Self {
        Self(format!("{error:#}"))
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

/// The first part: one request at a time, to show what one costs.
const ALONE_SECONDS: f64 = 2.0;
/// How often members are looked at during the load.
const LOOK: Duration = Duration::from_millis(10);
/// Different inputs of an emulated model, used in turn.
const EMULATED_INPUTS: usize = 32;
/// Requests a second for each model of the demo's repository, unless told otherwise.
const RATES_RPS: [(&str, f64); 3] = [("digits", 200.0), ("resnet50", 200.0), ("inception_resnet_v2", 40.0)];

fn default_rate_rps() -> f64 {
    RATES_RPS.iter().map(|(_, rate_rps)| rate_rps).sum()
}

/// Runs the demo.
pub(super) fn run(args: &Args) -> Result<()> {
    let Args { seconds, schedulers, .. } = *args;
    let rate = args.rate.unwrap_or_else(default_rate_rps);
    ensure!((0.1..=3600.0).contains(&seconds), "--seconds must be 0.1 to 3600, found {seconds}");
    ensure!((1.0..=1e5).contains(&rate), "--rate must be 1 to 100000, found {rate}");
    ensure!(
        (1..=SCHEDULERS_MAX).contains(&schedulers),
        "--schedulers must be 1 to {SCHEDULERS_MAX}, found {schedulers}"
    );
    if let (Some(models), Some(memory)) = (args.models, args.gpu_memory) {
        return many::run(args, models, memory);
    }
    let needed = if args.kill.is_some() { 2 } else { 1 };
    ensure!(needed <= schedulers, "--kill scheduler: expected --schedulers 2 to {SCHEDULERS_MAX}, found {schedulers}");
    let mut layout = Layout {
        http: vec![random_http()],
        grpc: vec![],
        schedulers,
        policy: args.policy.clone(),
        arm: args.arm.clone(),
        faults: args.fault.unwrap_or_default(),
        ..Layout::default()
    };
    // Answers are compared with what the CPU makes of the same images.
    (layout.backend[0].executor, layout.backend[0].precision) = (args.executor, Precision::Fp32);
    let folder = private_folder()?;
    let repository = layout.find_repository(folder.path())?;
    let models = repository::load(&repository)?.whole()?;
    let held_out = {
        let digits =
            models.iter().find(|model| model.name == "digits").context("the repository has no digits model")?;
        digits::load(digits, &repository.join("digits"))?
    };
    let direct = Direct { images: held_out.inputs.len(), accuracy: held_out.direct_accuracy };
    let streams = streams(&models, held_out, rate, args.seed)?;

    let found = layout.find_onnxruntime();
    eprintln!("digits is run by {}", layout.engines(&found));
    eprintln!(
        "starting {schedulers} scheduler{}, 1 frontend and {} backends ({} arm, {})",
        if schedulers == 1 { "" } else { "s" },
        layout.backend.len(),
        args.arm,
        args.policy
    );
    let cluster = Cluster::start(folder, layout, Logs::Files, Restarts::Killed)?;
    cluster.wait_until_ready(READY_TIMEOUT).map_err(|error| Failed::new(&error))?;

    let alone = Stream { arrivals: Arrivals::ONE_AT_A_TIME, ..streams[0].clone() };
    let alone = send(&cluster, "alone", ALONE_SECONDS, args.seed, &[alone])?.remove(0);
    let (tallies, killed) = match args.kill {
        None => (send(&cluster, "load", seconds, args.seed, &streams)?, None),
        Some(Kill::Scheduler) => {
            let (tallies, killed) = send_and_kill(&cluster, seconds, args.seed, &streams)?;
            (tallies, Some(killed))
        }
    };
    cluster.check().map_err(|error| Failed::new(&error))?;
    let takeover = killed.map(|killed| killed.line(&cluster, &tallies, Duration::from_secs_f64(seconds)));
    let last_words = cluster.last_words();
    drop(cluster);
    show(&streams, &tallies, &alone, seconds);
    takeover.iter().for_each(|line| println!("{line}"));

    let names: Vec<String> = streams.iter().map(|stream| stream.model.clone()).collect();
    judge(&names[..1], &[alone], &direct)
        .and_then(|()| judge(&names, &tallies, &direct))
        .inspect_err(|_| eprint!("{last_words}"))?;
    for (name, tally) in names.iter().zip(&tallies) {
        if let Some(accuracy) = tally.accuracy() {
            println!(
                "{name}: {:.2} % of {} held-out images classified right; {:.2} % when the model is run directly",
                accuracy * 100.0,
                tally.classified.len(),
                direct.accuracy * 100.0
            );
        }
    }
    println!("every answer was right and every request accounted for");
    Ok(())
}

/// The tables: what each model got, where the time went, and what one request costs alone.
fn show(streams: &[Stream], tallies: &[Tally], alone: &Tally, seconds: f64) {
    let names: Vec<String> = streams.iter().map(|stream| stream.model.clone()).collect();
    let reports: Vec<_> = names.iter().zip(tallies).map(|(name, tally)| tally.report(name, seconds)).collect();
    println!("{}\n\nWhere a request's time goes\n{}", tables::models(&reports), tables::stages(&names, tallies));
    if let Some((stage, p50, p99)) = alone.stages.rows().last() {
        println!("\nOne request at a time ({}): {stage} p50 {p50:.0} us, p99 {p99:.0} us", names[0]);
    }
}

fn send(cluster: &Cluster, what: &str, seconds: f64, seed: u64, streams: &[Stream]) -> Result<Vec<Tally>> {
    let target = Target::http(cluster.http(), Duration::from_secs_f64(seconds), seed);
    let bar = progress_bar(what);
    let tallies = generate(&target, streams, |fraction| bar.set_position((fraction * 1000.0) as u64))?;
    bar.finish_and_clear();
    Ok(tallies)
}

/// As [`send`], and kills the primary in the middle.
fn send_and_kill(cluster: &Cluster, seconds: f64, seed: u64, streams: &[Stream]) -> Result<(Vec<Tally>, Killed)> {
    let began = Instant::now();
    thread::scope(|scope| {
        // Members end with the thread that starts them: this one goes on looking after them, another one sends.
        let load = scope.spawn(|| send(cluster, "load", seconds, seed, streams));
        let mut killed = None;
        while !load.is_finished() {
            if killed.is_none() && began.elapsed().as_secs_f64() * 2.0 >= seconds {
                let now = Killed::now(cluster, began.elapsed()).map_err(|error| Failed::new(&error))?;
                eprintln!("killed {}, which was the primary", now.name);
                killed = Some(now);
            }
            cluster.check().map_err(|error| Failed::new(&error))?;
            thread::sleep(LOOK);
        }
        let tallies = load.join().expect("the load generator does not panic")?;
        Ok((tallies, killed.context("the load ended before its middle")?))
    })
}

/// One stream for each model: real images for the real one, random bytes for the emulated ones.
fn streams(models: &[repository::Model], held_out: digits::HeldOut, rate: f64, seed: u64) -> Result<Vec<Stream>> {
    let mut images = Some(held_out.inputs);
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let stream = |(name, rate_rps): (&str, f64)| {
        let model = models.iter().find(|model| model.name == name);
        let model = model.with_context(|| format!("the repository has no model {name}"))?;
        let inputs: Vec<Input> = match model.executor {
            repository::Executor::Onnx { .. } => images.take().context("one model classifies digits")?,
            repository::Executor::Ensemble(_) => bail!("the demo has no inputs for {name}, an ensemble"),
            repository::Executor::Process { .. } => bail!("the demo has no inputs for {name}, which a program runs"),
            repository::Executor::Emulated { .. } => {
                (0..EMULATED_INPUTS).map(|_| emulated_input(model, &mut random)).collect()
            }
        };
        Ok(Stream {
            model: name.into(),
            arrivals: Arrivals::poisson(rate_rps * rate / default_rate_rps()),
            slo_ms: model.slo.as_millis_f64(),
            inputs: inputs.into(),
        })
    };
    RATES_RPS.into_iter().map(stream).collect()
}

fn emulated_input(model: &repository::Model, random: &mut impl Rng) -> Input {
    let mut data = vec![0; model.input_bytes()];
    random.fill_bytes(&mut data);
    let input = &model.inputs[0];
    Input::new(&input.name, input.datatype, &input.shape, &data, None, Expected::digest(&data))
}

/// What the classifier makes of the held-out images when it is run directly.
struct Direct {
    images: usize,
    /// The share of them that it classifies right.
    accuracy: f64,
}

/// As [`judge_answers`]; and what classifies must do so as well as when it is run directly.
fn judge(names: &[String], tallies: &[Tally], direct: &Direct) -> Result<()> {
    judge_answers(names, tallies)?;
    for (name, tally) in names.iter().zip(tallies) {
        let Some(accuracy) = tally.accuracy() else { continue };
        if tally.classified.len() == direct.images && accuracy != direct.accuracy {
            let Direct { accuracy: expected, .. } = direct;
            let text = format!("{name}: accuracy is {accuracy}, but {expected} when the model is run directly");
            return Err(Failed(text).into());
        }
    }
    Ok(())
}

/// Every answer must be right and every request accounted for. Lateness on a busy machine is only a warning.
fn judge_answers(names: &[String], tallies: &[Tally]) -> Result<()> {
    let fail = |text: String| Err(Failed(text).into());
    let mut late = 0;
    for (name, tally) in names.iter().zip(tallies) {
        if tally.ended() != tally.sent {
            return fail(format!("{name}: {} requests were sent, but {} ended", tally.sent, tally.ended()));
        }
        if tally.wrong > 0 {
            return fail(format!("{name}: {} of {} answers were wrong", tally.wrong, tally.served + tally.wrong));
        }
        if let Some((what, count)) = tally.errors.first_key_value() {
            return fail(format!("{name}: {count} requests failed: {what}"));
        }
        if tally.served == 0 {
            return fail(format!("{name}: none of {} requests was answered with an output", tally.sent));
        }
        for (reason, count) in &tally.dropped {
            println!("warning: {name}: {count} of {} requests without an output: {reason}", tally.sent);
        }
        late += tally.served - tally.on_time;
    }
    if late > 0 {
        println!("warning: {late} answers came after their objective; this machine is busy, or too small for the load");
    }
    Ok(())
}
