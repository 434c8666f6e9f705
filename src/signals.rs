//! What an operator asks of this process by signals, for every role: SIGTERM or SIGINT to end in good order, a second
//! one to end at once, SIGHUP to read its configuration anew. A thread of its own waits for them, so that they are
//! heard whatever the others do; as process 1 of a container, where none has an effect by itself, too. Part of the
//! driver.
#![allow(clippy::disallowed_methods)] // Drivers start threads.

use std::thread;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    /// End once what is under way is done (SIGTERM).
    Terminate,
    /// The same, from a keyboard (SIGINT).
    Interrupt,
    /// Read the configuration anew (SIGHUP).
    Reload,
}

/// What a shell shows for a process that a signal ended, less the signal's number.
const ENDED_BY_SIGNAL: i32 = 128;

/// From now on signals are told to `hear`, on a thread of their own; a second one that asks for the end is not, but
/// ends the process. `hear` must not take long.
pub(crate) fn handle(mut hear: impl FnMut(Ask) + Send + 'static) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context(CANNOT)?;
    let listen = || -> std::io::Result<[Signal; 3]> {
        Ok([signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?])
    };
    let [mut terminate, mut interrupt, mut hangup] = {
        let _inside = runtime.enter();
        listen().context(CANNOT)?
    };
    let wait = async move {
        let mut is_ending = false;
        loop {
            let (signal, ask) = tokio::select! {
                _ = terminate.recv() => (SignalKind::terminate(), Ask::Terminate),
                _ = interrupt.recv() => (SignalKind::interrupt(), Ask::Interrupt),
                _ = hangup.recv() => (SignalKind::hangup(), Ask::Reload),
            };
            if ask != Ask::Reload && std::mem::replace(&mut is_ending, true) {
                std::process::exit(ENDED_BY_SIGNAL + signal.as_raw_value());
            }
            hear(ask);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(move || runtime.block_on(wait)).context(CANNOT)?;
    Ok(())
}

const CANNOT: &str = "cannot listen to signals";
