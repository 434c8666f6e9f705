//! Everything but the roles: local clusters, the simulator, the load generator, measurements and figures. The feature
//! `tools`; a host that only serves does without.

mod autoscaler;
mod cluster;
mod demo;
mod demo_models;
mod digits;
mod fabric;
mod place;
mod profile;
mod sim;
mod supervisor;
mod top;

use anyhow::Result;
use clap::Subcommand;

use crate::role;

pub(crate) use cluster::words;
pub(crate) use demo::Failed;

/// Subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a local cluster of real processes for about ten seconds and show what it does
    Demo(demo::Args),
    /// Run the same cluster, or one that serves your models, until stopped
    Up(cluster::UpArgs),
    /// The same with tritonserver's defaults, as which it may be called
    #[command(hide = true)]
    Tritonserver(cluster::UpArgs),
    /// Show a running cluster in this terminal: its GPUs, models and members
    Top(top::Args),
    /// Measure how long a model's batches take, and store it beside the model
    Profile(profile::Args),
    /// Find which sub-cluster should host which model, of a workload or a running cluster
    Place(place::Args),
    /// Simulate a cluster in virtual time
    Sim(sim::Args),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
    /// Reproduce the papers' figures, and what this project claims, as SVG and CSV
    Figures(figures::Args),
}

/// Measurements.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Search the highest rate at which every model stays within its objective, in virtual time
    Goodput(bench::goodput::Args),
    /// Measure how many requests the scheduler handles, with real threads and emulated GPUs
    Scheduler(bench::scheduler::Args),
    /// Measure RDMA operations within this host, beside raw UDP and TCP sockets
    Verbs(bench::verbs::Args),
    /// Pull many objects from many servers at once, and measure how long each takes
    Incast(bench::incast::Args),
    /// Measure the whole path from frontends over the scheduler to backends, as processes, without HTTP
    Fabric(fabric::Args),
    /// One frontend of `fabric`, with its load
    #[command(hide = true)]
    FabricFrontend(role::Args),
    /// Send load to a running server over HTTP or gRPC and measure its latency
    Load(load::Args),
}

impl Command {
    /// How what it says beside its tables is written.
    pub(crate) fn log_format(&self) -> role::LogFormat {
        match self {
            Self::Up(args) | Self::Tritonserver(args) => args.log_format,
            Self::Bench(Bench::FabricFrontend(args)) => args.log_format,
            _ => role::LogFormat::Text,
        }
    }
}

/// Runs one of them.
pub(crate) fn run(command: &Command) -> Result<()> {
    match command {
        Command::Demo(args) => demo::run(args)?,
        Command::Up(args) => cluster::up(args, false)?,
        Command::Tritonserver(args) => cluster::up(args, true)?,
        Command::Top(args) => top::run(args)?,
        Command::Profile(args) => profile::run(args)?,
        Command::Place(args) => place::run(args)?,
        Command::Sim(args) => sim::run(args)?,
        Command::Figures(args) => figures::run(args)?,
        Command::Bench(Bench::Goodput(args)) => bench::goodput::run(args)?,
        Command::Bench(Bench::Scheduler(args)) => bench::scheduler::run(args)?,
        Command::Bench(Bench::Verbs(args)) => bench::verbs::run(args)?,
        Command::Bench(Bench::Incast(args)) => bench::incast::run(args)?,
        Command::Bench(Bench::Fabric(args)) => fabric::run(args)?,
        Command::Bench(Bench::FabricFrontend(args)) => fabric::run_frontend(args)?,
        Command::Bench(Bench::Load(args)) => load::run(args)?,
    }
    Ok(())
}
