//! `handover`: asks a scheduler to be the primary. Part of the driver: one connection, and a clock.
#![allow(clippy::disallowed_methods)] // Has a socket and waits, in real time.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    path::PathBuf,
};

use anyhow::{Context, Result, anyhow, bail};
use proto::{Span, hello::SchedulerHello, scheduler_to_scheduler::HandedOver};
use serde::Deserialize;
use transport::{Arm, ArmName, Clock, Endpoint, EndpointConfig, Event, Faults, TlsFiles, VerbsSettings};

use crate::role;

/// Arguments of `handover`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The scheduler that is to be the primary: its `listen`
    #[arg(long, value_name = "ADDRESS")]
    to: SocketAddr,
    /// The file of any member of the cluster (TOML), of which the secret and the network are read
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// What the file of any role says of how members reach each other. An address is the member's own.
#[derive(Deserialize)]
struct Network {
    #[serde(deserialize_with = "transport::deserialize_secret")]
    secret: String,
    #[serde(default)]
    arm: ArmName,
    #[serde(default)]
    verbs: VerbsSettings,
    #[serde(default)]
    tls: Option<TlsFiles>,
}

/// How long the scheduler is waited for: longer than it waits for members itself.
const TIMEOUT: Span = Span::from_millis(3_000);

/// Asks, and prints what has come of it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let network: Network = role::read_config(&args.config)?;
    let HandedOver { epoch, took } = ask(args.to, &network).with_context(|| format!("--to {}", args.to))?;
    println!("{} is the primary, in epoch {epoch}, after {took}", args.to);
    Ok(())
}

fn ask(scheduler: SocketAddr, network: &Network) -> Result<HandedOver> {
    let address = match network.arm {
        ArmName::Soft => own_address(scheduler)?,
        ArmName::Verbs(_) => None,
    };
    let arm = Arm::choose(&network.arm, address, false, Faults::default(), network.verbs)?;
    let config = EndpointConfig::over(arm).with_secret(network.secret.as_str()).with_tls(network.tls.clone());
    let mut endpoint = Endpoint::open(config)?;
    let clock = Clock::start();
    let hello = wincode::serialize(&SchedulerHello::HandOver).expect("it has a bounded size");
    endpoint.connect(clock.now(), scheduler, hello);
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
                Event::Disconnected { reason, .. } => bail!(reason.0),
                _ => {}
            }
        }
        if until <= now {
            bail!("found no answer within {TIMEOUT}, expected a scheduler; its log tells whether it took over");
        }
        endpoint.wait(now, endpoint.poll_timeout().map_or(until, |at| at.min(until)));
    }
}

/// The address from which this host reaches the scheduler, with a free port. Within the loopback network any will do.
fn own_address(scheduler: SocketAddr) -> io::Result<Option<SocketAddr>> {
    if scheduler.ip().is_loopback() {
        return Ok(None);
    }
    let any: SocketAddr = if scheduler.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
    // It sends nothing: the system only looks up the route.
    let socket = UdpSocket::bind(any)?;
    socket.connect(scheduler)?;
    Ok(Some(SocketAddr::new(socket.local_addr()?.ip(), 0)))
}
