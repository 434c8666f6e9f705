//! `handover`: asks a scheduler to be the primary. Part of the driver: one connection, and a clock.
#![allow(clippy::disallowed_methods)] // Has a socket and waits, in real time.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use proto::{Span, hello::SchedulerHello, scheduler_to_scheduler::HandedOver};
use transport::{Address, ArmName, Clock, Endpoint, Event, Faults, NetworkConfig, OwnAddress};

use crate::config_file::read_config;

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

/// How long the scheduler is waited for: longer than it waits for members itself.
const TIMEOUT: Span = Span::from_millis(3_000);

/// Asks, and prints what has come of it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let network: NetworkConfig = read_config(&args.config)?;
    let HandedOver { epoch, took } = ask(&args.to, network).with_context(|| format!("--to {}", args.to))?;
    println!("{} is the primary, in epoch {epoch}, after {took}", args.to);
    Ok(())
}

fn ask(scheduler: &Address, network: NetworkConfig) -> Result<HandedOver> {
    // An address in the file is the member's own, which has it now.
    let address = Some(OwnAddress::Auto(Some(0))).filter(|_| network.arm == ArmName::Soft);
    let network = NetworkConfig { address, shared_address: false, faults: Faults::default(), ..network };
    let mut endpoint = Endpoint::open(network.endpoint(None, std::slice::from_ref(scheduler))?)?;
    let clock = Clock::start();
    let hello = wincode::serialize(&SchedulerHello::HandOver).expect("it has a bounded size");
    endpoint.connect(clock.now(), scheduler.clone(), hello);
    let until = clock.now() + TIMEOUT;
    loop {
        let now = clock.now();
        endpoint.drive(now);
        while let Some(event) = endpoint.poll_event() {
            match event {
                Event::Connected { welcome, .. } => {
                    return wincode::deserialize(&welcome)
                        .map_err(|error| anyhow!("its answer does not decode ({error}); is it of this version?"));
                }
                Event::Disconnected { reason, .. } => bail!(reason.text),
                _ => {}
            }
        }
        if until <= now {
            bail!("found no answer within {TIMEOUT}, expected a scheduler; its log tells whether it took over");
        }
        endpoint.wait(now, endpoint.poll_timeout().map_or(until, |at| at.min(until)));
    }
}
