//! The `downbeat` binary: dispatches subcommands, nothing else.
#![forbid(unsafe_code)]

mod cluster;
mod demo;
mod digits;
mod doctor;
mod load;
mod profile;
mod role;
mod supervisor;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A serving fabric for DNN inference under tight latency objectives.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a local cluster of real processes for about ten seconds and show what it does
    Demo(demo::Args),
    /// Run the same cluster until stopped
    Up(cluster::UpArgs),
    /// Run the scheduler
    Scheduler(role::Args),
    /// Run a frontend
    Frontend(role::Args),
    /// Run a backend
    Backend(role::Args),
    /// Tell what this host offers and what to change
    Doctor(doctor::Args),
    /// Measure how long a model's batches take, and store it beside the model
    Profile(profile::Args),
    /// Simulate a cluster in virtual time
    Sim(sim::command::Args),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
    /// Reproduce the papers' figures, and what this project claims, as SVG and CSV
    Figures(bench::figures::Args),
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Search the highest rate at which every model stays within its objective, in virtual time
    Goodput(bench::goodput::Args),
    /// Measure how many requests the scheduler handles, with real threads and emulated GPUs
    Scheduler(bench::scheduler::Args),
    /// Measure RDMA operations within this host, beside raw UDP and TCP sockets
    Verbs(bench::verbs::Args),
    /// Pull many objects from many servers at once, and measure how long each takes
    Incast(bench::incast::Args),
    /// Send load to a running server over HTTP or gRPC and measure its latency
    Load(bench::load::Args),
}

/// Bad input: one line on stderr says what to change.
const BAD_INPUT: u8 = 2;
/// What a shell shows for a process that ended by SIGPIPE (128 + 13), as other tools do when nobody reads on.
const BROKEN_PIPE: i32 = 141;

/// Ends the process quietly if what it prints is not read any more (`downbeat ... | head`). The standard library ignores
/// SIGPIPE, which sockets need, and `println!` panics instead.
fn end_with_the_reader() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(BROKEN_PIPE);
        }
        report(panic);
    }));
}

fn main() -> ExitCode {
    end_with_the_reader();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            // Its further lines only point to --help.
            let text = error.to_string();
            eprintln!("downbeat: {}", text.lines().next().unwrap_or_default().trim_start_matches("error: "));
            return ExitCode::from(BAD_INPUT);
        }
        Err(help) => help.exit(),
    };
    let result = match cli.command {
        Command::Demo(args) => demo::run(&args),
        Command::Up(args) => cluster::up(&args),
        Command::Scheduler(args) => role::scheduler(&args),
        Command::Frontend(args) => role::frontend(&args),
        Command::Backend(args) => role::backend(&args),
        Command::Doctor(args) => match doctor::run(&args) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
        Command::Profile(args) => profile::run(&args),
        Command::Sim(args) => sim::command::run(&args).map_err(anyhow::Error::from),
        Command::Figures(args) => bench::figures::run(&args).map_err(anyhow::Error::from),
        Command::Bench(Bench::Goodput(args)) => bench::goodput::run(&args).map_err(anyhow::Error::from),
        Command::Bench(Bench::Scheduler(args)) => bench::scheduler::run(&args).map_err(anyhow::Error::from),
        Command::Bench(Bench::Verbs(args)) => bench::verbs::run(&args).map_err(anyhow::Error::from),
        Command::Bench(Bench::Incast(args)) => bench::incast::run(&args).map_err(anyhow::Error::from),
        Command::Bench(Bench::Load(args)) => load::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("downbeat: {}", one_line(&error));
            // `demo` ran and found something wrong: that is not bad input.
            ExitCode::from(if error.is::<demo::Failed>() { 1 } else { BAD_INPUT })
        }
    }
}

/// The error and its causes, less those that the text before names already.
fn one_line(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
