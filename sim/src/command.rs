//! `downbeat sim`: one run of a workload file.

use std::{io, path::PathBuf};

use clap::Args as ClapArgs;
use indicatif::{ProgressBar, ProgressStyle};
use scheduler::{Policy, policy::POLICIES};
use thiserror::Error;

use crate::{
    checker::Violation,
    cluster::{self, Options},
    trace::Trace,
    workload::{SECONDS_MAX, Workload, WorkloadError},
};

/// Simulate a workload in virtual time.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// Workload file (TOML).
    #[arg(long)]
    pub workload: PathBuf,
    /// Batch policy.
    #[arg(long, default_value = "downbeat", help = format!("Batch policy: {POLICIES}"))]
    pub policy: Policy,
    /// Aggregate request rate per second.
    #[arg(long)]
    pub rate: f64,
    /// Simulated span in seconds; the workload's by default. Its first tenth warms up.
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Seed of all arrivals.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Write all batches as a trace for ui.perfetto.dev to this file.
    #[arg(long)]
    pub trace: Option<PathBuf>,
}

/// Why a command did not run.
#[derive(Debug, Error)]
pub enum CommandError {
    /// The workload file.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// A flag's value.
    #[error("{flag}: expected {expected}, found {found}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What it takes.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// The trace cannot be written.
    #[error("--trace: cannot write {path}: {source}")]
    Trace {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The system does not do what a measurement needs.
    #[error("{0}")]
    Failed(String),
    /// A bug of ours.
    #[error("this is a bug in the scheduler, please report it with the command line: {0}")]
    Violation(#[from] Violation),
}

/// Highest rate that a simulation takes.
pub const RATE_MAX_RPS: f64 = 1e9;

/// Checks a number given on the command line.
///
/// # Errors
/// If it is not above 0 and at most `max`.
pub fn positive(flag: &'static str, found: f64, max: f64) -> Result<f64, CommandError> {
    if found > 0.0 && found <= max {
        return Ok(found);
    }
    Err(CommandError::Flag { flag, expected: format!("a number above 0 and at most {max}"), found: found.to_string() })
}

/// Runs the command and prints its result on stdout, its progress on stderr.
///
/// # Errors
/// On bad input (exit code 2).
pub fn run(args: &Args) -> Result<(), CommandError> {
    let workload = Workload::read(&args.workload)?;
    let options = Options {
        policy: args.policy,
        rate_rps: positive("--rate", args.rate, RATE_MAX_RPS)?,
        seconds: positive("--seconds", args.seconds.unwrap_or(workload.seconds), SECONDS_MAX)?,
        seed: args.seed,
    };
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
        trace.write(path, &names).map_err(|source| CommandError::Trace { path: path.display().to_string(), source })?;
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
