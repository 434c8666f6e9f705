//! Rings of RoCE packets in shared memory, one each way, for queue pairs whose peers are processes of this host. They
//! are another way for the same packets: the core sees no difference, and nobody maps anybody's registered memory.
//!
//! Life of a pair of rings: invited (by whoever dialled; the name goes with its offer), joined (by whoever answers, if
//! it can, before the answer says so), both hand their memory over, gone with the queue pair. A ring never loses
//! packets: where it is full, its queue pair waits.
//!
//! What the peer's process does to the memory hurts this pair only: places and lengths are checked, packets are copied
//! out before they are looked at, and what is wrong ends the queue pair.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use proto::Wait;
use soft_roce::{PathMtu, QueuePairNumber, Timestamp, Transmit, udp::Detour};
use spsc::records::{Consumer, Corrupt, Producer, Words, memory_bytes, settle};

use super::meeting::{self, Heard, Invitation};
use crate::{
    bootstrap::RingName,
    device::interface::Moved,
    poller::{Interest, Watch},
    region::Region,
    sealed_memory::SealedMemory,
};

/// Packets on their way one way. More would leave the caches; what does not fit waits at its source.
const CAPACITY: usize = 1 << 20;
const MEMORY_BYTES: usize = memory_bytes(CAPACITY).next_multiple_of(4096);
/// The longest packet, so that its two copies stay in the nearest cache (48 KiB) from one to the other.
pub(super) const MTU: PathMtu = PathMtu::Mtu16384;
const PACKET_BYTES: usize = MTU.packet_bytes_max();
/// What queue pairs wait for room until they are asked again.
pub(super) const AGAIN: Duration = Duration::from_micros(200);
/// Packets that go at once: one, and the acknowledgement that goes with it.
const BATCH_PACKETS: usize = 2;
/// Packets taken out of one ring in one turn, and their bytes.
const PACKETS_PER_TURN: usize = 64;
const BYTES_PER_TURN: usize = 256 * 1024;
/// Messages of one peer that are taken at once, each of which would wake us.
const BELLS_PER_LOOK: usize = 16;

impl Words for Region {
    fn word(&self, at: usize) -> &std::sync::atomic::AtomicU64 {
        Self::word(self, at)
    }
    fn write(&self, at: usize, bytes: &[u8]) {
        Self::write(self, at, bytes);
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        Self::read(self, at, into);
    }
}

/// The rings of one endpoint's queue pairs.
pub(super) struct Rings {
    pairs: BTreeMap<QueuePairNumber, Pair>,
    /// Those whose peers have not come, or not handed their memory over; until when at most, once that was looked at.
    awaited: BTreeMap<QueuePairNumber, Option<Timestamp>>,
    /// Over the connections by which peers wake us.
    bells: Watch,
    /// Whether peers are invited, and invitations followed.
    is_on: bool,
    /// Peers have been told that we sleep.
    is_asleep: bool,
    /// Whether a queue pair had to wait since this was cleared.
    is_blocked: bool,
    packet: Box<[u8]>,
    failed: VecDeque<(QueuePairNumber, String)>,
}

enum Pair {
    /// Nobody has said that it comes.
    Invited(Invitation),
    /// Somebody has come, or is about to.
    Joined(Joined),
}

struct Joined {
    name: RingName,
    /// Where the peer's packets come from, as the core knows it.
    source: SocketAddr,
    stage: Stage,
}

enum Stage {
    /// Until the peer has come to us.
    Awaited(Invitation),
    /// What we read, and how the peer is woken; until it has handed its memory over, we write nothing. Whether the peer
    /// has been told that we sleep.
    Met { inbound: Consumer<Region>, outbound: Option<Producer<Region>>, bell: OwnedFd, is_asleep: bool },
    /// The peer's process has ended, or has written what it never writes.
    Over,
}

impl Rings {
    pub(super) fn new(is_on: bool) -> io::Result<Self> {
        Ok(Self {
            pairs: BTreeMap::new(),
            awaited: BTreeMap::new(),
            bells: Watch::new()?,
            is_on,
            is_asleep: false,
            is_blocked: false,
            packet: vec![0; PACKET_BYTES.next_multiple_of(8)].into(),
            failed: VecDeque::new(),
        })
    }

    /// Invites the peer of a queue pair, unless it has come or we go to it.
    pub(super) fn invite(&mut self, number: QueuePairNumber) {
        if self.is_on
            && !self.pairs.contains_key(&number)
            && let Ok(invitation) = Invitation::open()
        {
            self.pairs.insert(number, Pair::Invited(invitation));
        }
    }

    /// What the peer is told: whither it is invited, or that we come.
    pub(super) fn name(&self, number: QueuePairNumber) -> RingName {
        match self.pairs.get(&number) {
            Some(Pair::Invited(invitation)) => invitation.name,
            Some(Pair::Joined(joined)) => joined.name,
            None => RingName::NONE,
        }
    }

    /// Whether a queue pair's packets go by rings.
    pub(super) fn is_joined(&self, number: QueuePairNumber) -> bool {
        matches!(self.pairs.get(&number), Some(Pair::Joined(_)))
    }

    /// The peer has told this name: it comes to us, or invites us, or neither. Whether packets go by rings now.
    ///
    /// # Errors
    /// If it says that it comes, and we cannot go on with it. Nobody is invited any more then.
    pub(super) fn join(&mut self, number: QueuePairNumber, told: RingName, source: SocketAddr) -> io::Result<bool> {
        let invited = self.pairs.remove(&number).map(|pair| match pair {
            Pair::Invited(invitation) => invitation,
            Pair::Joined(_) => unreachable!("a queue pair is connected once"),
        });
        if told == RingName::NONE || !self.is_on {
            return Ok(false);
        }
        let (stage, bell) = match invited {
            // Where both invite each other, one of them comes.
            Some(invitation) if invitation.name.0 <= told.0 => (Stage::Awaited(invitation), None),
            _ => match meeting::come(told) {
                Ok(bell) => (Stage::Over, Some(bell)),
                Err(_) => return Ok(false),
            },
        };
        self.pairs.insert(number, Pair::Joined(Joined { name: told, source, stage }));
        self.awaited.insert(number, None);
        let met = bell.map_or(Ok(()), |bell| self.meet(number, bell));
        met.and_then(|()| self.advance(number)).inspect_err(|_| self.is_on = false)?;
        Ok(true)
    }

    /// The connection to a peer stands: hands over what we will read.
    fn meet(&mut self, number: QueuePairNumber, bell: OwnedFd) -> io::Result<()> {
        let Some(Pair::Joined(joined)) = self.pairs.get_mut(&number) else { return Ok(()) };
        let memory = SealedMemory::create(MEMORY_BYTES)?;
        let inbound = Consumer::new(Region::map_shared(&memory)?, CAPACITY);
        meeting::hand_over(&bell, &memory)?;
        self.bells.add(&bell, number.0.into(), Interest::Read)?;
        joined.stage = Stage::Met { inbound, outbound: None, bell, is_asleep: false };
        Ok(())
    }

    /// Goes on with a pair as far as the peer has.
    fn advance(&mut self, number: QueuePairNumber) -> io::Result<()> {
        let Some(Pair::Joined(joined)) = self.pairs.get(&number) else { return Ok(()) };
        if let Stage::Awaited(invitation) = &joined.stage
            && let Some(bell) = invitation.accept()?
        {
            self.meet(number, bell)?;
        }
        if let Some(Pair::Joined(Joined { stage: Stage::Met { outbound, bell, .. }, .. })) = self.pairs.get_mut(&number)
            && let Some(memory) = meeting::take_over(bell, MEMORY_BYTES)?
        {
            *outbound = Some(Producer::new(Region::map_shared(&memory)?, CAPACITY));
            self.awaited.remove(&number);
        }
        Ok(())
    }

    /// Goes on with all that peers have to do with us still.
    fn advance_awaited(&mut self, now: Timestamp) {
        for number in self.awaited.keys().copied().collect::<Vec<_>>() {
            let until =
                *self.awaited.entry(number).or_default().get_or_insert(now + Wait::Handshake.bound().to_duration());
            match self.advance(number) {
                Err(error) => self.fail(number, format!("no ring to the peer: {error}")),
                Ok(()) if now >= until && self.awaited.contains_key(&number) => {
                    Wait::Handshake.note_reached();
                    self.fail(number, "the peer has agreed to a ring and not made it");
                }
                Ok(()) => {}
            }
        }
    }

    /// A queue pair is gone, and its rings with it.
    pub(super) fn remove(&mut self, number: QueuePairNumber) {
        self.pairs.remove(&number);
        self.awaited.remove(&number);
    }

    /// Readable when a peer has woken us.
    pub(super) fn bells(&self) -> BorrowedFd<'_> {
        self.bells.as_fd()
    }

    /// Whether there are packets to take.
    pub(super) fn have_packets(&self) -> bool {
        self.pairs.values().any(|pair| match pair {
            Pair::Joined(Joined { stage: Stage::Met { inbound, .. }, .. }) => !inbound.is_empty(),
            _ => false,
        })
    }

    /// From now on peers wake us. True if there are packets already.
    pub(super) fn lie_down(&mut self) -> bool {
        for pair in self.pairs.values_mut() {
            if let Pair::Joined(Joined { stage: Stage::Met { inbound, is_asleep, .. }, .. }) = pair {
                inbound.lie_down();
                *is_asleep = true;
            }
        }
        self.is_asleep = true;
        settle();
        self.have_packets()
    }

    /// We are awake: peers need not wake us, and a message of one that has is taken.
    fn get_up(&mut self) {
        if !std::mem::take(&mut self.is_asleep) {
            return;
        }
        let mut is_explained = false;
        for pair in self.pairs.values_mut() {
            if let Pair::Joined(Joined { stage: Stage::Met { inbound, outbound, bell, is_asleep }, .. }) = pair
                && std::mem::take(is_asleep)
                && !inbound.get_up()
                && outbound.is_some()
            {
                is_explained |= meeting::hear(bell) == Heard::Bell;
            }
        }
        if !is_explained {
            self.look_at_bells();
        }
    }

    /// Whoever's message has come after what it tells of, or without a cause, or who is gone.
    fn look_at_bells(&mut self) {
        let mut numbers = Vec::new();
        self.bells.poll(&mut numbers);
        for number in numbers {
            let number = QueuePairNumber(number as u32);
            if let Some(Pair::Joined(joined)) = self.pairs.get_mut(&number)
                && let Stage::Met { bell, outbound: Some(_), .. } = &joined.stage
                && (0..BELLS_PER_LOOK).map(|_| meeting::hear(bell)).find(|heard| *heard != Heard::Bell)
                    == Some(Heard::End)
            {
                // What it has written before is still there, and no bell will come.
                let _ = self.bells.remove(bell);
            }
        }
    }

    /// Hands the packets that have come to `handle`, each with where it comes from; up to a bound.
    pub(super) fn receive(&mut self, now: Timestamp, mut handle: impl FnMut(SocketAddr, &[u8])) -> Moved {
        // What the peers hand over comes before what they wake us by.
        self.advance_awaited(now);
        self.get_up();
        let (mut moved, mut wrong) = (Moved::default(), Vec::new());
        for (&number, pair) in &mut self.pairs {
            let Pair::Joined(Joined { source, stage: Stage::Met { inbound, .. }, .. }) = pair else { continue };
            let mut bytes = 0;
            for _ in 0..PACKETS_PER_TURN {
                match inbound.pop(&mut self.packet) {
                    Ok(Some(packet)) => {
                        handle(*source, &self.packet[..packet]);
                        (moved.any, bytes) = (true, bytes + packet);
                    }
                    Ok(None) => break,
                    Err(Corrupt) => {
                        wrong.push(number);
                        break;
                    }
                }
                if bytes >= BYTES_PER_TURN {
                    break;
                }
            }
            moved.more |= !inbound.is_empty();
        }
        for number in wrong {
            self.fail(number, "the peer has written what is no packet into its ring");
        }
        moved
    }

    fn fail(&mut self, number: QueuePairNumber, reason: impl Into<String>) {
        if let Some(Pair::Joined(joined)) = self.pairs.get_mut(&number)
            && !matches!(joined.stage, Stage::Over)
        {
            joined.stage = Stage::Over;
            self.awaited.remove(&number);
            self.failed.push_back((number, reason.into()));
        }
    }

    /// Queue pairs that cannot go on.
    pub(super) fn poll_failed(&mut self) -> Option<(QueuePairNumber, String)> {
        self.failed.pop_front()
    }

    /// Whether a queue pair has had to wait for room since the last call: it is to be asked again soon.
    pub(super) fn take_blocked(&mut self) -> bool {
        std::mem::take(&mut self.is_blocked)
    }
}

impl Detour for Rings {
    /// Few packets at a time, so that they do not leave the nearest cache between their two copies.
    fn segments_max(&mut self, number: QueuePairNumber, by_socket: usize) -> usize {
        let Some(Pair::Joined(joined)) = self.pairs.get(&number) else { return by_socket };
        let has_room = match &joined.stage {
            Stage::Met { outbound: Some(outbound), .. } => {
                outbound.has_room(BATCH_PACKETS, BATCH_PACKETS * PACKET_BYTES)
            }
            // Its packets are lost.
            Stage::Over => return BATCH_PACKETS,
            Stage::Awaited(_) | Stage::Met { outbound: None, .. } => Ok(false),
        };
        match has_room {
            Ok(true) => BATCH_PACKETS,
            Ok(false) => {
                self.is_blocked = true;
                0
            }
            Err(Corrupt) => {
                self.fail(number, "the peer has read what was never written into its ring");
                BATCH_PACKETS
            }
        }
    }

    fn take(&mut self, transmit: &Transmit, packets: &[u8]) -> bool {
        let Some(Pair::Joined(joined)) = self.pairs.get_mut(&transmit.queue_pair) else { return false };
        if let Stage::Met { outbound: Some(outbound), bell, .. } = &mut joined.stage {
            for packet in packets.chunks(transmit.segment_bytes) {
                outbound.push(packet);
            }
            if outbound.publish() {
                meeting::wake(bell);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    const NUMBER: QueuePairNumber = QueuePairNumber(77);
    const AT: Timestamp = Timestamp(1_000);

    fn source() -> SocketAddr {
        "127.0.0.1:4791".parse().unwrap()
    }

    fn transmit(bytes: usize, segment_bytes: usize) -> Transmit {
        Transmit {
            queue_pair: NUMBER,
            destination: source(),
            bytes,
            segment_bytes,
            segments: bytes.div_ceil(segment_bytes),
        }
    }

    /// One that invited, and one that came.
    fn two() -> [Rings; 2] {
        let mut two = [(); 2].map(|()| Rings::new(true).unwrap());
        two[0].invite(NUMBER);
        let name = two[0].name(NUMBER);
        assert!(two[1].join(NUMBER, name, source()).unwrap());
        assert!(two[0].join(NUMBER, two[1].name(NUMBER), source()).unwrap());
        assert!(two.iter_mut().all(|rings| received(rings, AT).is_empty()));
        two
    }

    fn received(rings: &mut Rings, now: Timestamp) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        rings.receive(now, |from, packet| {
            assert_eq!(from, source());
            packets.push(packet.to_vec());
        });
        packets
    }

    fn failed(rings: &mut Rings) -> Option<String> {
        rings.poll_failed().map(|(number, reason)| {
            assert_eq!(number, NUMBER);
            reason
        })
    }

    #[test]
    fn packets_arrive_both_ways_and_a_full_ring_makes_its_queue_pair_wait() {
        let mut two = two();
        let packets: Vec<u8> = (0..300u32).map(|at| at as u8).collect();
        for (from, to) in [(0, 1), (1, 0)] {
            assert!(
                two[from].segments_max(NUMBER, 64) == BATCH_PACKETS && two[from].take(&transmit(300, 128), &packets)
            );
            let cut: Vec<Vec<u8>> = packets.chunks(128).map(<[u8]>::to_vec).collect();
            assert_eq!(received(&mut two[to], AT), cut);
        }
        let large = vec![5; 16_000];
        let fit = (0..)
            .take_while(|_| {
                two[0].segments_max(NUMBER, 64) == BATCH_PACKETS && two[0].take(&transmit(16_000, 16_000), &large)
            })
            .count();
        assert!((CAPACITY / 16_100 - 4..=CAPACITY / 16_000).contains(&fit), "{fit}");
        assert!(two[0].take_blocked() && !two[0].take_blocked());
        let mut arrived = 0;
        while two[1].have_packets() {
            arrived += received(&mut two[1], AT).len();
        }
        assert_eq!(arrived, fit);
        assert!(two[0].segments_max(NUMBER, 64) == BATCH_PACKETS && !two[0].take_blocked());
        // Another queue pair's packets go by the socket.
        assert!(!two[0].take(&Transmit { queue_pair: QueuePairNumber(78), ..transmit(300, 128) }, &packets));
    }

    #[test]
    fn who_does_not_want_or_does_not_find_anybody_has_no_ring() {
        let mut off = Rings::new(false).unwrap();
        off.invite(NUMBER);
        assert_eq!(off.name(NUMBER), RingName::NONE);
        let mut on = Rings::new(true).unwrap();
        assert!(!on.join(NUMBER, RingName([9; 16]), source()).unwrap(), "nobody invites there");
        on.invite(NUMBER);
        assert!(!on.join(NUMBER, RingName::NONE, source()).unwrap(), "nobody comes");
        assert!(on.segments_max(NUMBER, 64) == 64 && !on.is_joined(NUMBER));
    }

    /// It says that it comes, and does not; it comes, and hands nothing over.
    #[test]
    fn who_agrees_to_a_ring_and_makes_none_ends_its_queue_pair() {
        for comes in [false, true] {
            let mut rings = Rings::new(true).unwrap();
            rings.invite(NUMBER);
            let name = rings.name(NUMBER);
            let guest = comes.then(|| meeting::come(name).unwrap());
            assert!(rings.join(NUMBER, name, source()).unwrap());
            assert!(received(&mut rings, AT).is_empty() && rings.segments_max(NUMBER, 64) == 0 && rings.take_blocked());
            assert_eq!(failed(&mut rings), None);
            received(&mut rings, AT + Wait::Handshake.bound().to_duration());
            assert!(failed(&mut rings).unwrap().contains("not made it"));
            assert!(
                rings.segments_max(NUMBER, 64) == BATCH_PACKETS && rings.take(&transmit(100, 100), &[0; 100]),
                "what was posted flushes"
            );
            drop(guest);
        }
        let mut rings = Rings::new(true).unwrap();
        rings.invite(NUMBER);
        let name = rings.name(NUMBER);
        let guest = meeting::come(name).unwrap();
        meeting::wake(&guest);
        assert!(rings.join(NUMBER, name, source()).is_err());
        rings.invite(QueuePairNumber(78));
        assert_eq!(rings.name(QueuePairNumber(78)), RingName::NONE, "it goes on without");
    }

    /// A peer that plays the protocol by hand, and what it may write.
    fn with_hostile_peer() -> (Rings, OwnedFd, [Region; 2]) {
        let mut rings = Rings::new(true).unwrap();
        rings.invite(NUMBER);
        let name = rings.name(NUMBER);
        let guest = meeting::come(name).unwrap();
        let own = SealedMemory::create(MEMORY_BYTES).unwrap();
        meeting::hand_over(&guest, &own).unwrap();
        assert!(rings.join(NUMBER, name, source()).unwrap());
        let theirs = meeting::take_over(&guest, MEMORY_BYTES).unwrap().unwrap();
        (rings, guest, [own, theirs].map(|memory| Region::map_shared(&memory).unwrap()))
    }

    #[test]
    fn garbage_in_a_ring_ends_its_queue_pair_and_bells_without_a_cause_nothing() {
        for (at, value) in [(64, u64::MAX), (64, 63), (64, 64), (64, 2 << 20)] {
            let (mut rings, _guest, [_, theirs]) = with_hostile_peer();
            theirs.word(192).store(u64::MAX, Ordering::Relaxed);
            theirs.word(at).store(value, Ordering::Relaxed);
            assert!(received(&mut rings, AT).is_empty());
            assert!(failed(&mut rings).unwrap().contains("no packet"), "{value} at {at}");
            assert!(received(&mut rings, AT).is_empty() && failed(&mut rings).is_none(), "told once");
        }
        let (mut rings, _guest, [own, _]) = with_hostile_peer();
        own.word(0).store(7 << 20, Ordering::Relaxed);
        assert!(rings.segments_max(NUMBER, 64) == BATCH_PACKETS && rings.take(&transmit(100, 100), &[0; 100]));
        assert!(failed(&mut rings).unwrap().contains("never written"));

        let (mut rings, guest, [_, theirs]) = with_hostile_peer();
        for _ in 0..3 {
            (0..5).for_each(|_| meeting::wake(&guest));
            assert!(!rings.lie_down());
            assert!(received(&mut rings, AT).is_empty());
        }
        // A bell in place, and one that comes after what it tells of.
        assert!(!rings.lie_down());
        let mut producer = Producer::new(theirs, CAPACITY);
        producer.push(b"first");
        assert!(producer.publish());
        assert_eq!(received(&mut rings, AT), [b"first"]);
        meeting::wake(&guest);
        drop(guest);
        producer.push(b"last words");
        producer.publish();
        assert!(rings.lie_down());
        assert_eq!(received(&mut rings, AT), [b"last words"]);
        assert!(!rings.lie_down() && received(&mut rings, AT).is_empty() && failed(&mut rings).is_none());
        assert!(!is_readable(&rings), "of one that is gone");
    }

    fn is_readable(rings: &Rings) -> bool {
        let mut numbers = Vec::new();
        rings.bells.poll(&mut numbers);
        !numbers.is_empty()
    }

    /// One who says that it wakes us and sends nothing, and a pair that came while we slept, once had us look for a
    /// message for ever, and at nobody else's.
    #[test]
    fn no_message_that_does_not_come_hides_one_that_does() {
        let (mut rings, guest, [_, theirs]) = with_hostile_peer();
        assert!(!rings.lie_down());
        theirs.word(128).store(0, Ordering::Relaxed);
        let second = QueuePairNumber(78);
        rings.invite(second);
        let name = rings.name(second);
        let other = meeting::come(name).unwrap();
        meeting::hand_over(&other, &SealedMemory::create(MEMORY_BYTES).unwrap()).unwrap();
        assert!(rings.join(second, name, source()).unwrap());
        assert!(received(&mut rings, AT).is_empty() && !is_readable(&rings));
        for bell in [&guest, &other, &guest] {
            assert!(!rings.lie_down());
            meeting::wake(bell);
            theirs.word(128).store(0, Ordering::Relaxed);
            assert!(received(&mut rings, AT).is_empty());
            assert!(!is_readable(&rings));
        }
    }
}
