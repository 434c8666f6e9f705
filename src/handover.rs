//! `handover`: asks a scheduler to be the primary.

use std::path::PathBuf;

use anyhow::{Context, Result};
use proto::{hello::SchedulerHello, scheduler_to_scheduler::HandedOver};
use transport::{Address, NetworkConfig};

use crate::{config_file::read_config, operator};

/// Arguments of `handover`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The scheduler that is to be the primary: its `listen`
    #[arg(long, value_name = "ADDRESS")]
    to: Address,
    /// The file of any member of the cluster (TOML), of which the secret and the network are read
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// Asks, and prints what has come of it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let network: NetworkConfig = read_config(&args.config)?;
    let answer = operator::ask(&args.to, network, &SchedulerHello::HandOver);
    let HandedOver { epoch, took } = answer.with_context(|| format!("--to {}", args.to))?;
    println!("{} is the primary, in epoch {epoch}, after {took}", args.to);
    Ok(())
}
