//! What the endpoints of this process have seen of the network: each leaves it here once a second, for whoever tells
//! operators on another thread. Counts of endpoints and connections that are gone stay counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError, TryLockError},
};

use proto::{Span, Timestamp};
use soft_roce::{Counters, udp::DriverCounters};

use crate::path::Path;

/// How often an endpoint leaves what it has counted.
const INTERVAL: Span = Span::from_millis(1_000);
/// Peers that are told apart; of all others counts are told together.
const PEERS_MAX: usize = 256;
/// What these are called.
const OTHERS: &str = "(others)";

/// Of one endpoint, or of all.
#[derive(Debug, Clone, Default)]
pub struct Traffic {
    /// What soft-RoCE has counted.
    pub counters: Counters,
    /// What its UDP driver has.
    pub driver: DriverCounters,
    /// By what peers are called; [`PEERS_MAX`] and one at most.
    pub peers: BTreeMap<String, PeerTraffic>,
    /// Verbs devices that are open, whose counters the kernel keeps.
    pub devices: BTreeSet<String>,
}

/// What was seen of one peer.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerTraffic {
    /// What soft-RoCE has counted at connections to it.
    pub counters: Counters,
    /// The way of packets, if it is connected.
    pub path: Option<Path>,
}

impl Traffic {
    /// A peer's, or that of all others if there are too many.
    pub(crate) fn peer(&mut self, name: &str) -> &mut PeerTraffic {
        let is_known = self.peers.contains_key(name);
        let name = if is_known || self.peers.len() < PEERS_MAX { name } else { OTHERS };
        self.peers.entry(name.to_owned()).or_default()
    }

    /// Counts what another endpoint has.
    fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        self.driver.add(other.driver);
        for (name, peer) in &other.peers {
            let own = self.peer(name);
            own.counters.add(&peer.counters);
            own.path = own.path.or(peer.path);
        }
        self.devices.extend(other.devices.iter().cloned());
    }

    /// It is gone: there is no way any more.
    fn end(&mut self) {
        self.peers.values_mut().for_each(|peer| peer.path = None);
        self.devices.clear();
    }
}

/// All endpoints of a process.
#[derive(Debug, Default)]
struct Endpoints {
    next: u64,
    there: BTreeMap<u64, Traffic>,
    gone: Traffic,
}

impl Endpoints {
    const fn new() -> Self {
        let counters = Counters::ZERO;
        let driver = DriverCounters { receive_calls: 0, send_calls: 0, send_blocked: 0, send_errors: 0 };
        let gone = Traffic { counters, driver, peers: BTreeMap::new(), devices: BTreeSet::new() };
        Self { next: 0, there: BTreeMap::new(), gone }
    }

    fn all(&self) -> Traffic {
        let mut all = self.gone.clone();
        self.there.values().for_each(|traffic| all.add(traffic));
        all
    }

    fn open(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn close(&mut self, id: u64) {
        if let Some(mut traffic) = self.there.remove(&id) {
            traffic.end();
            self.gone.add(&traffic);
        }
    }
}

static ENDPOINTS: Mutex<Endpoints> = Mutex::new(Endpoints::new());

/// What all endpoints of this process have seen.
#[must_use]
pub fn traffic() -> Traffic {
    // No invariant spans two changes of it.
    ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner).all()
}

/// An endpoint's place there; its counts outlive it.
#[derive(Debug)]
pub(crate) struct Reporter {
    id: u64,
    due: Timestamp,
    /// Of connections that are gone.
    gone: Traffic,
}

impl Reporter {
    pub(crate) fn open() -> Self {
        let id = ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner).open();
        Self { id, due: Timestamp::PAST, gone: Traffic::default() }
    }

    /// A connection is gone at which so much was counted.
    pub(crate) fn handle_gone(&mut self, peer: &str, counters: &Counters) {
        self.gone.peer(peer).counters.add(counters);
    }

    /// Of connections that are gone.
    pub(crate) fn gone(&self) -> Traffic {
        self.gone.clone()
    }

    /// Whether it is time to leave something.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.due <= now
    }

    /// Leaves what was seen so far, unless somebody looks just now.
    pub(crate) fn leave(&mut self, now: Timestamp, traffic: Traffic) {
        self.due = now + INTERVAL;
        match ENDPOINTS.try_lock() {
            Ok(mut endpoints) => drop(endpoints.there.insert(self.id, traffic)),
            Err(TryLockError::Poisoned(poisoned)) => drop(poisoned.into_inner().there.insert(self.id, traffic)),
            Err(TryLockError::WouldBlock) => self.due = now,
        }
    }

    /// Leaves it for the last time, however long that takes.
    pub(crate) fn end(&mut self, traffic: Traffic) {
        ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner).there.insert(self.id, traffic);
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        ENDPOINTS.lock().unwrap_or_else(PoisonError::into_inner).close(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Endpoint, EndpointConfig, Event, Faults};

    fn seen(peer: &str, packets: u64) -> Traffic {
        let mut traffic = Traffic::default();
        traffic.counters.packets_sent = packets;
        let entry = traffic.peer(peer);
        entry.counters.packets_sent = packets;
        entry.path = Some(Path::soft(([10, 0, 0, 3], 4791).into()));
        traffic
    }

    #[test]
    fn counts_of_endpoints_add_up_and_outlive_them() {
        let mut endpoints = Endpoints::new();
        let [one, other] = [(); 2].map(|()| endpoints.open());
        endpoints.there.insert(one, seen("backend a", 3));
        endpoints.there.insert(other, seen("backend a", 4));
        let sent = |endpoints: &Endpoints| {
            let all = endpoints.all();
            let peer = all.peers["backend a"];
            (all.counters.packets_sent, peer.counters.packets_sent, peer.path.is_some())
        };
        assert_eq!(sent(&endpoints), (7, 7, true));
        endpoints.close(one);
        assert_eq!(sent(&endpoints), (7, 7, true));
        endpoints.close(other);
        assert_eq!(sent(&endpoints), (7, 7, false));
    }

    #[test]
    fn peers_beyond_a_bound_are_told_together() {
        let mut traffic = Traffic::default();
        for number in 0..PEERS_MAX + 10 {
            traffic.peer(&format!("backend {number}")).counters.probes += 1;
        }
        assert_eq!((traffic.peers.len(), traffic.peers[OTHERS].counters.probes), (PEERS_MAX + 1, 10));
        traffic.peer("backend 3").counters.probes += 1;
        assert_eq!(traffic.peers["backend 3"].counters.probes, 2);
    }
    /// Sends so many frames to a peer, each once the one before has come back.
    fn ping(clock: Clock, own: &mut Endpoint, peer: &mut Endpoint, frames: usize) {
        own.connect(clock.now(), peer.listen_address().unwrap(), Vec::new());
        let mut left = frames;
        while left > 0 {
            let now = clock.now();
            let busy = own.drive(now) | peer.drive(now);
            while let Some(event) = peer.poll_event() {
                match event {
                    Event::Incoming { connection, .. } => peer.accept(now, connection, Vec::new()),
                    Event::Message { connection, frame } => peer.send(connection, &frame).unwrap(),
                    other => panic!("{other:?}"),
                }
            }
            while let Some(event) = own.poll_event() {
                let connection = match event {
                    Event::Connected { connection, .. } => connection,
                    Event::Message { connection, .. } => {
                        left -= 1;
                        connection
                    }
                    other => panic!("{other:?}"),
                };
                own.send(connection, b"frame").unwrap();
            }
            if !busy {
                own.wait(now, now + Span::from_micros(100));
            }
        }
    }

    #[test]
    fn loss_is_counted_at_the_peer_that_it_is_with() {
        let clock = Clock::start();
        let open = |name: &str, loss: f64| {
            let config = EndpointConfig::default().with_secret("the cluster's secret").with_name("backend", name);
            let config = config.with_faults(Faults { loss, ..Faults::default() });
            Endpoint::open(config.listening(([127, 0, 0, 1], 0).into())).unwrap()
        };
        let (mut own, mut lossy, mut sound) = (open("own", 0.0), open("lossy", 0.2), open("sound", 0.0));
        ping(clock, &mut own, &mut lossy, 300);
        ping(clock, &mut own, &mut sound, 300);
        drop((own, lossy, sound));
        let all = traffic();
        let [lossy, sound, own] = ["lossy", "sound", "own"].map(|name| all.peers[&format!("backend {name}")].counters);
        assert!(lossy.packets_sent >= 300 && sound.packets_sent >= 300, "{lossy:?} {sound:?}");
        let repeated = lossy.retransmits_gap + lossy.retransmits_timeout + lossy.probes;
        assert!(repeated > 0 && own.duplicate_requests > 0, "{lossy:?} {own:?}");
        assert_eq!(sound.sequence_errors, 0, "{sound:?}");
        assert!(all.counters.packets_sent >= lossy.packets_sent + sound.packets_sent);
    }
}
