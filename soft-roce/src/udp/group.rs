//! A [`Member`] of a shared address with its socket and its registry: carries out what it says.
#![allow(clippy::disallowed_methods)] // A driver: joining waits for the others' lock.

use std::{io, net::SocketAddr, time::Duration};

use super::{
    share::{Action, Member, Probe, Published, program, registry::Registry},
    socket::Socket,
};
use crate::Timestamp;

/// How often a new member tries to take the lock of the table, a millisecond apart.
const LOCK_TRIES: u32 = 1000;

/// Our place among those who share an address.
pub(super) struct Group {
    member: Member,
    registry: Registry,
    address: SocketAddr,
}

impl Group {
    /// Joins with a socket that has just been bound. `seed`: unpredictable in production.
    pub(super) fn join(socket: &Socket, seed: u64) -> io::Result<Self> {
        let address = socket.local();
        let mut registry = Registry::join(address, seed as u8)?;
        // The first one gives the group its program; for later ones it changes nothing but to forget the dead.
        let mut refusal = None;
        for _ in 0..LOCK_TRIES {
            let outcome = registry.publish(None, |table| {
                socket.steer(&program(table)).inspect_err(|error| refusal = Some(error.to_string()))
            });
            match outcome {
                Published::Done => {
                    let member = Member::new(Timestamp::default(), registry.prefix(), seed);
                    return Ok(Self { member, registry, address });
                }
                Published::Locked => std::thread::sleep(Duration::from_millis(1)),
                Published::Refused => break,
            }
        }
        let cause = refusal.unwrap_or_else(|| "the table of its members stays locked; is one of them stopped?".into());
        Err(io::Error::other(format!("cannot share {address}: {cause}")))
    }

    pub(super) fn prefix(&self) -> u8 {
        self.member.prefix()
    }

    pub(super) fn is_reachable(&self) -> bool {
        self.member.is_reachable()
    }

    /// Takes a datagram if it is one of our probes.
    pub(super) fn handle_datagram(&mut self, now: Timestamp, source: SocketAddr, bytes: &[u8]) -> bool {
        let probe = Probe::parse(bytes).filter(|_| source == self.address);
        probe.map(|probe| self.member.handle_probe(now, probe)).is_some()
    }

    /// Runs timers and does what is to be done now. `is_drained`: the socket had nothing more when it was read last.
    pub(super) fn turn(&mut self, now: Timestamp, socket: &Socket, is_drained: bool) {
        self.member.handle_timeout(now, is_drained);
        while let Some(action) = self.member.poll_action(now) {
            match action {
                Action::Send(probe) => {
                    let bytes = probe.to_bytes();
                    // What is not sent is a probe lost: there will be others.
                    let _ = socket.send(self.address, &bytes, bytes.len());
                }
                Action::Count => self.member.handle_count(now, self.registry.count()),
                Action::Publish { index } => {
                    let outcome = self.registry.publish(Some(index), |table| socket.steer(&program(table)));
                    self.member.handle_published(now, outcome);
                }
            }
        }
    }

    pub(super) fn poll_timeout(&self) -> Timestamp {
        self.member.poll_timeout()
    }
}
