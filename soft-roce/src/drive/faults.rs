//! Faults under the driver, by seed: packets lost, doubled, overtaken and damaged on their way to the socket. No IO.

use std::{collections::VecDeque, net::SocketAddr, str::FromStr};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// Faults, each a probability per packet in 0 ..= 1. The default has none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields, default))]
pub struct Faults {
    /// Thrown away.
    pub loss: f64,
    /// Sent twice.
    pub duplicate: f64,
    /// Sent after the next one to four packets.
    pub reorder: f64,
    /// Sent with one bit flipped.
    pub corrupt: f64,
}

/// Driver::bind refuses what is no probability, so there is no NaN in use.
impl Eq for Faults {}

impl Faults {
    /// Whether each is a probability.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        [self.loss, self.duplicate, self.reorder, self.corrupt].iter().all(|p| (0.0..=1.0).contains(p))
    }

    /// Whether there are any.
    #[must_use]
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// From `loss=0.01`, or several with commas.
impl FromStr for Faults {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for fault in text.split(',') {
            let (name, value) = fault.split_once('=').unwrap_or((fault, ""));
            let place = match name {
                "loss" => &mut faults.loss,
                "duplicate" => &mut faults.duplicate,
                "reorder" => &mut faults.reorder,
                "corrupt" => &mut faults.corrupt,
                _ => return Err(format!("expected loss=, duplicate=, reorder= or corrupt=, found `{fault}`")),
            };
            let probability = value.parse().ok().filter(|value| (0.0..=1.0).contains(value));
            *place = probability.ok_or_else(|| format!("expected a probability in 0 to 1, found `{fault}`"))?;
        }
        Ok(faults)
    }
}

/// How many packets overtake a reordered one at most.
const OVERTAKEN_MAX: u32 = 4;

/// A packet and where it goes.
pub(super) type Packet = (SocketAddr, Vec<u8>);

/// Decides each packet's fate.
pub(super) struct FaultInjector {
    faults: Faults,
    rng: StdRng,
    /// Held back until so many packets have overtaken it.
    held: VecDeque<(u32, Packet)>,
}

impl FaultInjector {
    pub(super) fn new(faults: Faults, seed: u64) -> Self {
        Self { faults, rng: StdRng::seed_from_u64(seed), held: VecDeque::new() }
    }

    /// Takes a packet in; puts out what is to be sent now.
    pub(super) fn handle_packet(&mut self, destination: SocketAddr, packet: &[u8], out: &mut VecDeque<Packet>) {
        if self.rng.random_bool(self.faults.loss) {
            return;
        }
        let mut packet = packet.to_vec();
        if !packet.is_empty() && self.rng.random_bool(self.faults.corrupt) {
            let bit = self.rng.random_range(0..packet.len() * 8);
            packet[bit / 8] ^= 1 << (bit % 8);
        }
        if self.rng.random_bool(self.faults.reorder) {
            self.held.push_back((self.rng.random_range(1..=OVERTAKEN_MAX), (destination, packet)));
            return;
        }
        if self.rng.random_bool(self.faults.duplicate) {
            out.push_back((destination, packet.clone()));
        }
        out.push_back((destination, packet));
        for (overtakers, _) in &mut self.held {
            *overtakers -= 1;
        }
        for _ in 0..self.held.len() {
            match self.held.pop_front().expect("counted") {
                (0, packet) => out.push_back(packet),
                waiting => self.held.push_back(waiting),
            }
        }
    }

    /// Puts out what is still held back, for when nothing comes to overtake it.
    pub(super) fn release(&mut self, out: &mut VecDeque<Packet>) {
        out.extend(self.held.drain(..).map(|(_, packet)| packet));
    }

    /// Whether anything is held back.
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn are_read_from_a_flag() {
        let found = "loss=0.02,reorder=1".parse();
        assert_eq!(found, Ok(Faults { loss: 0.02, reorder: 1.0, ..Faults::default() }));
        for bad in ["", "loss", "loss=", "loss=2", "loss=NaN", "delay=0.1", "loss=0.1,"] {
            assert!(bad.parse::<Faults>().unwrap_err().contains("expected"), "{bad}");
        }
    }

    fn run(faults: Faults, seed: u64, packets: u32) -> Vec<Vec<u8>> {
        let (mut injector, mut out) = (FaultInjector::new(faults, seed), VecDeque::new());
        let to = "127.0.0.1:4791".parse().unwrap();
        (0..packets).for_each(|number| injector.handle_packet(to, &number.to_be_bytes(), &mut out));
        injector.release(&mut out);
        assert!(!injector.is_holding());
        out.into_iter().map(|(_, packet)| packet).collect()
    }

    #[test]
    fn each_fault_does_what_it_says() {
        let sent: Vec<_> = (0..1000u32).map(|number| number.to_be_bytes().to_vec()).collect();
        assert_eq!(run(Faults::default(), 1, 1000), sent);
        assert!(run(Faults { loss: 1.0, ..Default::default() }, 1, 1000).is_empty());
        let doubled: Vec<_> = sent.iter().flat_map(|packet| [packet.clone(), packet.clone()]).collect();
        assert_eq!(run(Faults { duplicate: 1.0, ..Default::default() }, 1, 1000), doubled);
        let damaged = run(Faults { corrupt: 1.0, ..Default::default() }, 1, 1000);
        let flipped = |(a, b): (&Vec<u8>, &Vec<u8>)| a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
        assert!(damaged.iter().zip(&sent).all(|pair| flipped(pair) == 1));
        let mut reordered = run(Faults { reorder: 0.3, ..Default::default() }, 1, 1000);
        assert_ne!(reordered, sent);
        reordered.sort();
        assert_eq!(reordered, sent);
    }

    #[test]
    fn a_seed_replays() {
        let faults = Faults { loss: 0.1, duplicate: 0.1, reorder: 0.1, corrupt: 0.1 };
        assert_eq!(run(faults, 7, 500), run(faults, 7, 500));
        assert_ne!(run(faults, 7, 500), run(faults, 8, 500));
    }
}
