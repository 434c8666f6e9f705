//! `downbeat sim`: one run of a workload file, or seeds of the whole fabric.

mod fabric;

use std::path::{Path, PathBuf};

use ::fabric::FaultKinds;
use clap::Args as ClapArgs;
use cli::{CommandError, positive};
use indicatif::{ProgressBar, ProgressStyle};
use scheduler::{Policy, policy::POLICIES};
use sim::{
    cluster::{self, Options},
    trace::Trace,
    workload::SECONDS_MAX,
};

/// Simulate a workload in virtual time.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Run the cores of all roles on one simulated network with faults, instead of a workload: without --seeds, one
    /// seed with its trace.
    #[arg(long, conflicts_with_all = ["workload", "rate", "seconds", "trace"])]
    pub fabric: bool,
    /// How many seeds of the fabric, from --seed on.
    #[arg(long, requires = "fabric")]
    pub seeds: Option<u64>,
    /// What may go wrong in the fabric.
    #[arg(long, default_value = "all", help = format!("What may go wrong in the fabric: {}", FaultKinds::EXPECTED))]
    pub faults: String,
    /// Workload file (TOML).
    #[arg(long, required_unless_present = "fabric")]
    pub workload: Option<PathBuf>,
    /// Batch policy.
    #[arg(long, default_value = "downbeat", help = format!("Batch policy: {POLICIES}"))]
    pub policy: Policy,
    /// Aggregate request rate per second.
    #[arg(long, required_unless_present = "fabric")]
    pub rate: Option<f64>,
    /// Simulated span in seconds; the workload's by default. Its first tenth warms up.
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Seed of all arrivals; the first seed of a fabric.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Write all batches as a trace for ui.perfetto.dev to this file.
    #[arg(long)]
    pub trace: Option<PathBuf>,
}

/// Highest rate that a simulation takes.
const RATE_MAX_RPS: f64 = 1e9;

/// Runs the command and prints its result on stdout, its progress on stderr.
///
/// # Errors
/// On bad input (exit code 2), and if a fabric breaks an invariant (1).
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    match (&args.workload, args.rate) {
        (Some(workload), Some(rate)) => Ok(run_workload(args, workload, rate)?),
        _ => fabric::run_seeds(args),
    }
}

fn run_workload(args: &Args, workload: &Path, rate: f64) -> Result<(), CommandError> {
    let workload = bench::goodput::read_workload(workload)?;
    let options = Options {
        policy: args.policy,
        rate_rps: positive("--rate", rate, RATE_MAX_RPS)?,
        seconds: positive("--seconds", args.seconds.unwrap_or(workload.seconds), SECONDS_MAX)?,
        seed: args.seed,
    };
    bench::goodput::check_policy(&workload, args.policy)?;
    let bar = ProgressBar::new(options.seconds.ceil() as u64);
    bar.set_style(
        ProgressStyle::with_template("simulating [{bar:40}] {pos}/{len} s")
            .expect("a constant template")
            .progress_chars("=> "),
    );
    let mut trace = args.trace.is_some().then(Trace::default);
    let mut observe = |event| {
        if let Some(trace) = &mut trace {
            trace.push(event);
        }
    };
    let report = cluster::run(&workload, &options, &mut observe, &mut |seconds| bar.set_position(seconds as u64));
    bar.finish_and_clear();
    let report = report?;
    if let (Some(trace), Some(path)) = (&trace, &args.trace) {
        let names: Vec<_> = workload.models.iter().map(|model| model.name.as_str()).collect();
        let written = trace.write(path, &names);
        written.map_err(|error| CommandError::failed(format!("--trace: cannot write {}", path.display()), error))?;
        if trace.omitted() > 0 {
            eprintln!("--trace: the last {} events were left out; use a shorter --seconds", trace.omitted());
        }
    }
    if args.json {
        println!("{}", serde_json::to_string(&report).expect("a report has no maps with other keys than text"));
    } else {
        println!("{}", report.table());
    }
    Ok(())
}
