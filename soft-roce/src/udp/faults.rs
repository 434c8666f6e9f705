//! Faults under the driver, by seed: packets lost, doubled, overtaken and damaged on their way to the socket. No IO.

use std::{collections::VecDeque, net::SocketAddr, ops::Range, str::FromStr};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use crate::wire::icrc::seal;

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
        self.invalid().is_none()
    }

    /// The first that is no probability, by the name of its field.
    #[must_use]
    pub fn invalid(&self) -> Option<(&'static str, f64)> {
        let Self { loss, duplicate, reorder, corrupt } = *self;
        let all = [("loss", loss), ("duplicate", duplicate), ("reorder", reorder), ("corrupt", corrupt)];
        all.into_iter().find(|(_, probability)| !(0.0..=1.0).contains(probability))
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

/// What is to be sent at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A part of the batch that was handed in: whole packets.
    Part(Range<usize>),
    /// A packet by itself.
    Packet(Packet),
}

/// What befalls a packet; by default nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Fate {
    lost: bool,
    flipped_bit: Option<usize>,
    /// How many packets overtake it.
    overtaken: Option<u32>,
    doubled: bool,
}

/// Decides each packet's fate. What no fault meets stays together, so that batches leave whole.
pub(super) struct FaultInjector {
    faults: Faults,
    rng: StdRng,
    /// Held back until so many packets have overtaken it.
    held: VecDeque<(u32, Packet)>,
    source: SocketAddr,
}

impl FaultInjector {
    /// Of packets from `source`.
    pub(super) fn new(faults: Faults, seed: u64, source: SocketAddr) -> Self {
        Self { faults, rng: StdRng::seed_from_u64(seed), held: VecDeque::new(), source }
    }

    /// Takes a batch in; puts out what is to be sent now. The system numbers the packets of every part from 0 again, so
    /// what has moved up is sealed again.
    pub(super) fn handle_batch(
        &mut self,
        destination: SocketAddr,
        batch: &mut [u8],
        segment_bytes: usize,
        out: &mut VecDeque<Piece>,
    ) {
        let mut part = 0..0;
        for start in (0..batch.len()).step_by(segment_bytes) {
            let place = start..batch.len().min(start + segment_bytes);
            let fate = self.draw(place.len());
            if fate == Fate::default() && self.held.is_empty() {
                part.end = place.end;
                continue;
            }
            self.end_part(destination, batch, segment_bytes, part, out);
            part = place.end..place.end;
            if !fate.lost {
                self.send_apart(destination, &batch[place], fate, out);
            }
        }
        self.end_part(destination, batch, segment_bytes, part, out);
    }

    fn draw(&mut self, packet_bytes: usize) -> Fate {
        if self.rng.random_bool(self.faults.loss) {
            return Fate { lost: true, ..Fate::default() };
        }
        let corrupted = self.rng.random_bool(self.faults.corrupt);
        let flipped_bit = corrupted.then(|| self.rng.random_range(0..packet_bytes * 8));
        let overtaken = self.rng.random_bool(self.faults.reorder).then(|| self.rng.random_range(1..=OVERTAKEN_MAX));
        let doubled = overtaken.is_none() && self.rng.random_bool(self.faults.duplicate);
        Fate { lost: false, flipped_bit, overtaken, doubled }
    }

    /// Puts out the part that no fault has met.
    fn end_part(
        &self,
        destination: SocketAddr,
        batch: &mut [u8],
        segment_bytes: usize,
        part: Range<usize>,
        out: &mut VecDeque<Piece>,
    ) {
        if part.is_empty() {
            return;
        }
        if part.start > 0 {
            for (segment, packet) in batch[part.clone()].chunks_mut(segment_bytes).enumerate() {
                seal(self.source, destination, segment as u16, packet);
            }
        }
        out.push_back(Piece::Part(part));
    }

    /// Sends a packet by itself: now, twice, damaged or later.
    fn send_apart(&mut self, destination: SocketAddr, packet: &[u8], fate: Fate, out: &mut VecDeque<Piece>) {
        let mut packet = packet.to_vec();
        seal(self.source, destination, 0, &mut packet);
        if let Some(bit) = fate.flipped_bit {
            packet[bit / 8] ^= 1 << (bit % 8);
        }
        if let Some(overtakers) = fate.overtaken {
            self.held.push_back((overtakers, (destination, packet)));
            return;
        }
        if fate.doubled {
            out.push_back(Piece::Packet((destination, packet.clone())));
        }
        out.push_back(Piece::Packet((destination, packet)));
        for (overtakers, _) in &mut self.held {
            *overtakers -= 1;
        }
        for _ in 0..self.held.len() {
            match self.held.pop_front().expect("counted") {
                (0, packet) => out.push_back(Piece::Packet(packet)),
                waiting => self.held.push_back(waiting),
            }
        }
    }

    /// Puts out what is still held back, for when nothing comes to overtake it.
    pub(super) fn release(&mut self, out: &mut VecDeque<Piece>) {
        out.extend(self.held.drain(..).map(|(_, packet)| Piece::Packet(packet)));
    }

    /// Whether anything is held back.
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{BTH_BYTES, ICRC_BYTES};

    #[test]
    fn are_read_from_a_flag() {
        let found = "loss=0.02,reorder=1".parse();
        assert_eq!(found, Ok(Faults { loss: 0.02, reorder: 1.0, ..Faults::default() }));
        for bad in ["", "loss", "loss=", "loss=2", "loss=NaN", "delay=0.1", "loss=0.1,"] {
            assert!(bad.parse::<Faults>().unwrap_err().contains("expected"), "{bad}");
        }
    }

    #[test]
    fn what_is_no_probability_is_named() {
        let faults = Faults { loss: 1.0, duplicate: 0.0, reorder: 3.0, corrupt: -1.0 };
        assert_eq!((faults.invalid(), faults.is_valid()), (Some(("reorder", 3.0)), false));
        assert!(Faults { corrupt: f64::NAN, ..Faults::default() }.invalid().is_some() && Faults::default().is_valid());
    }

    const PACKET_BYTES: usize = BTH_BYTES + 4 + ICRC_BYTES;
    const RUN_PACKETS: usize = 15;

    fn ends() -> [SocketAddr; 2] {
        ["127.0.0.1:4791", "127.0.0.2:4791"].map(|end| end.parse().unwrap())
    }

    /// A packet that holds its number.
    fn packet(number: u32, segment: usize) -> Vec<u8> {
        let mut packet = vec![0; PACKET_BYTES];
        packet[BTH_BYTES..][..4].copy_from_slice(&number.to_be_bytes());
        seal(ends()[0], ends()[1], segment as u16, &mut packet);
        packet
    }

    fn number(packet: &[u8]) -> u32 {
        u32::from_be_bytes(packet[BTH_BYTES..][..4].try_into().unwrap())
    }

    /// What leaves of a thousand packets in batches: pieces of packets.
    fn pieces(faults: Faults, seed: u64) -> Vec<Vec<Vec<u8>>> {
        let (mut injector, mut out) = (FaultInjector::new(faults, seed, ends()[0]), VecDeque::new());
        let mut left = Vec::new();
        let mut leave = |batch: &[u8], out: &mut VecDeque<Piece>| {
            left.extend(out.drain(..).map(|piece| match piece {
                Piece::Part(part) => batch[part].to_vec(),
                Piece::Packet((_, packet)) => packet,
            }));
        };
        let numbers: Vec<u32> = (0..1000).collect();
        for numbers in numbers.chunks(RUN_PACKETS) {
            let packets = numbers.iter().enumerate().map(|(segment, number)| packet(*number, segment));
            let mut batch = packets.collect::<Vec<_>>().concat();
            injector.handle_batch(ends()[1], &mut batch, PACKET_BYTES, &mut out);
            leave(&batch, &mut out);
        }
        injector.release(&mut out);
        leave(&[], &mut out);
        assert!(!injector.is_holding());
        left.iter().map(|piece| piece.chunks(PACKET_BYTES).map(<[u8]>::to_vec).collect()).collect()
    }

    fn numbers(pieces: &[Vec<Vec<u8>>]) -> Vec<u32> {
        pieces.iter().flatten().map(|packet| number(packet)).collect()
    }

    #[test]
    fn each_fault_does_what_it_says() {
        let sent: Vec<u32> = (0..1000).collect();
        let whole = pieces(Faults::default(), 1);
        assert_eq!((whole.len(), numbers(&whole)), (1000_usize.div_ceil(RUN_PACKETS), sent.clone()));
        assert!(pieces(Faults { loss: 1.0, ..Default::default() }, 1).is_empty());
        let doubled: Vec<_> = sent.iter().flat_map(|number| [*number; 2]).collect();
        assert_eq!(numbers(&pieces(Faults { duplicate: 1.0, ..Default::default() }, 1)), doubled);
        let damaged = pieces(Faults { corrupt: 1.0, ..Default::default() }, 1).concat();
        assert_eq!(damaged.len(), sent.len());
        for (damaged, number) in damaged.iter().zip(&sent) {
            let flipped = damaged.iter().zip(packet(*number, 0)).map(|(found, sent)| (found ^ sent).count_ones());
            assert_eq!(flipped.sum::<u32>(), 1);
        }
        let mut reordered = numbers(&pieces(Faults { reorder: 0.3, ..Default::default() }, 1));
        assert_ne!(reordered, sent);
        reordered.sort_unstable();
        assert_eq!(reordered, sent);
    }

    /// The checksum covers the place in the batch, which the system numbers anew in what is left of one.
    #[test]
    fn what_is_left_of_a_run_is_sealed_for_its_place() {
        for faults in ["loss=0.1", "reorder=0.1", "duplicate=0.1", "loss=0.05,reorder=0.05,duplicate=0.05"] {
            let pieces = pieces(faults.parse().unwrap(), 3);
            assert!(pieces.iter().any(|piece| piece.len() > 1) && pieces.len() > 1000 / RUN_PACKETS);
            for piece in &pieces {
                for (segment, found) in piece.iter().enumerate() {
                    assert_eq!(*found, packet(number(found), segment), "{faults}");
                }
            }
        }
    }

    #[test]
    fn a_seed_replays() {
        let faults = Faults { loss: 0.1, duplicate: 0.1, reorder: 0.1, corrupt: 0.1 };
        assert_eq!(pieces(faults, 7), pieces(faults, 7));
        assert_ne!(pieces(faults, 7), pieces(faults, 8));
    }
}
