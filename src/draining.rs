//! `drain` and `resume`: ask the primary to give a member nothing more, or again.

use std::path::PathBuf;

use anyhow::{Context, Result};
use proto::{
    draining::{DrainAnswer, DrainRequest, MemberKind},
    hello::SchedulerHello,
};
use transport::{Address, NetworkConfig};

use crate::{config_file::read_config, operator};

/// Arguments of `drain`.
#[derive(Debug, clap::Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    of: Of,
    /// Although models that no other backend hosts are served no more
    #[arg(long)]
    force: bool,
}

/// Arguments of `resume`.
#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    of: Of,
}

/// Who is meant.
#[derive(Debug, clap::Args)]
struct Of {
    /// What it is
    kind: Kind,
    /// Its name, as `status` shows it
    name: String,
    /// The primary: its `listen`
    #[arg(long, value_name = "ADDRESS")]
    scheduler: Address,
    /// The file of any member of the cluster (TOML), of which the secret and the network are read
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    Backend,
    Frontend,
}

/// Asks for a drain, and prints what has come of it.
pub(crate) fn drain(args: &DrainArgs) -> Result<()> {
    let DrainArgs { of: Of { kind, name, .. }, force } = args;
    let DrainAnswer { id, only_there, is_moving } = ask(&args.of, true, *force)?;
    match kind {
        Kind::Frontend => println!("frontend {name} (id {id}) is not ready any more, and serves what comes"),
        Kind::Backend if is_moving => println!(
            "backend {name} (id {id}) serves on until others host {only_there} models that only it has: \
             `downbeat status` shows it drained then, or the scheduler's log why not"
        ),
        Kind::Backend if only_there == 0 => println!("backend {name} (id {id}) is sent no batches any more"),
        Kind::Backend => {
            println!("backend {name} (id {id}) is sent no batches any more: {only_there} models are not served now");
        }
    }
    Ok(())
}

/// Asks for the end of a drain.
pub(crate) fn resume(args: &ResumeArgs) -> Result<()> {
    let DrainAnswer { id, .. } = ask(&args.of, false, false)?;
    println!("{} (id {id}) takes part again", args.of.name);
    Ok(())
}

fn ask(of: &Of, is_drained: bool, is_forced: bool) -> Result<DrainAnswer> {
    let network: NetworkConfig = read_config(&of.config)?;
    let kind = if of.kind == Kind::Backend { MemberKind::Backend } else { MemberKind::Frontend };
    let request = DrainRequest { kind, name: of.name.clone(), is_drained, is_forced };
    let answer = operator::ask(&of.scheduler, network, &SchedulerHello::Drain(request));
    answer.with_context(|| format!("--scheduler {}", of.scheduler))
}
