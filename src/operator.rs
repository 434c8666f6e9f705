//! What operators ask of a scheduler over the cluster's own network, by its secret. Part of the driver: one connection,
//! and a clock.
#![allow(clippy::disallowed_methods)] // Has a socket and waits, in real time.

use anyhow::{Result, anyhow, bail};
use proto::{Span, Wait, hello::SchedulerHello};
use transport::{Address, ArmName, Clock, Endpoint, Event, Faults, NetworkConfig, OwnAddress};
use wincode::{SchemaRead, config::DefaultConfig};

/// How long the scheduler is waited for: longer than it waits for members itself.
const TIMEOUT: Span = Wait::Operator.bound();

/// Asks a scheduler, and yields its answer.
pub(crate) fn ask<A>(scheduler: &Address, network: NetworkConfig, hello: &SchedulerHello) -> Result<A>
where
    A: for<'a> SchemaRead<'a, DefaultConfig, Dst = A>,
{
    // An address in the file is the member's own, which has it now.
    let address = Some(OwnAddress::Auto(Some(0))).filter(|_| network.arm == ArmName::Soft);
    let network = NetworkConfig { address, shared_address: false, faults: Faults::default(), ..network };
    let mut endpoint = Endpoint::open(network.endpoint(None, std::slice::from_ref(scheduler))?)?;
    let clock = Clock::start();
    let hello = wincode::serialize(hello).expect("it has a bounded size");
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
            Wait::Operator.note_reached();
            bail!("found no answer within {TIMEOUT}, expected a scheduler; its log tells what it has done");
        }
        endpoint.wait(now, endpoint.poll_timeout().map_or(until, |at| at.min(until)));
    }
}
