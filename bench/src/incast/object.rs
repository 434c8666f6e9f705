//! What the objects hold, who holds which, and whether that is what came.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{BYTES_MAX, OBJECTS_MAX, Reader, SERVERS_MAX, Shape};

/// Shares of one server, which each take more than their bytes.
const SHARES_MAX: usize = 1_000;

/// What one server holds for one reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Share {
    /// Which of the reader's servers it is.
    pub server: usize,
    /// Objects.
    pub objects: usize,
    /// Of each object.
    pub bytes: usize,
}

impl Share {
    /// How a reader asks for it.
    pub(super) const WIRE_BYTES: usize = 12;

    pub(super) fn encode(self) -> [u8; Self::WIRE_BYTES] {
        let Self { server, objects, bytes } = self;
        let mut wire = [0; Self::WIRE_BYTES];
        for (place, number) in wire.chunks_exact_mut(4).zip([server, objects, bytes]) {
            place.copy_from_slice(&u32::try_from(number).expect("at most a gigabyte").to_le_bytes());
        }
        wire
    }

    /// What a reader asks for, which then fits [`BYTES_MAX`].
    ///
    /// # Errors
    /// One line, if it is no share, or one that nothing could hold.
    pub(super) fn decode(wire: &[u8]) -> Result<Self, String> {
        let wire: [u8; Self::WIRE_BYTES] =
            wire.try_into().map_err(|_| format!("found {} bytes, expected a share of objects", wire.len()))?;
        let number = |at: usize| u32::from_le_bytes(wire[at..at + 4].try_into().expect("four bytes")) as usize;
        let share = Self { server: number(0), objects: number(4), bytes: number(8) };
        let fits = share.server < SERVERS_MAX as usize
            && (1..=OBJECTS_MAX as usize).contains(&share.objects)
            && (1..=BYTES_MAX as usize / share.objects).contains(&share.bytes);
        if fits { Ok(share) } else { Err(format!("found {share:?}, expected at most {BYTES_MAX} bytes")) }
    }

    /// Bytes of all its objects.
    pub(super) fn size(self) -> usize {
        self.objects * self.bytes
    }

    /// The bytes of one object: random, and different for each.
    pub(super) fn object(self, object: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        ChaCha8Rng::seed_from_u64((self.server * self.objects + object) as u64).fill(bytes.as_mut_slice());
        bytes
    }

    /// All of them.
    pub(super) fn all(self) -> impl Iterator<Item = Vec<u8>> {
        (0..self.objects).map(move |object| self.object(object))
    }
}

/// Whether a server has room for another share beside these.
///
/// # Errors
/// One line.
pub(super) fn check_room<'a>(held: impl Iterator<Item = &'a Share>, share: Share) -> Result<(), String> {
    let (shares, bytes) = held.fold((0, 0), |(shares, bytes), share| (shares + 1, bytes + share.size()));
    if shares < SHARES_MAX && bytes + share.size() <= BYTES_MAX as usize {
        return Ok(());
    }
    Err(format!("it holds {shares} shares of {bytes} bytes, of at most {SHARES_MAX} of {BYTES_MAX}: start it anew"))
}

/// Compares what a reader has with what its servers hold.
pub(super) struct Check {
    /// By slot.
    expected: Vec<Vec<u8>>,
    found: Vec<u8>,
    wrong: u64,
}

impl Check {
    pub(super) fn new(shape: Shape) -> Self {
        let expected = (0..shape.servers).flat_map(|server| shape.share(server).all());
        Self { expected: expected.collect(), found: vec![0; shape.bytes], wrong: 0 }
    }

    /// Looks at every byte of every slot.
    pub(super) fn run(&mut self, reader: &dyn Reader) {
        for (slot, expected) in self.expected.iter().enumerate() {
            reader.read(slot, &mut self.found);
            self.wrong += u64::from(self.found != *expected);
        }
    }

    pub(super) fn all_right(&self) -> bool {
        self.wrong == 0
    }
}

#[cfg(test)]
mod tests {
    use cli::CommandError;
    use proto::Timestamp;
    use transport::Clock;

    use super::*;

    const SHAPE: Shape = Shape { servers: 2, objects: 2, bytes: 33 };

    struct Held(Vec<Vec<u8>>);

    impl Reader for Held {
        fn ask(&mut self, _: Timestamp, _: usize, _: usize) -> Result<(), CommandError> {
            unreachable!("nothing is asked for")
        }
        fn poll_done(&mut self, _: &Clock, _: Timestamp) -> Result<Option<usize>, CommandError> {
            unreachable!("nothing is asked for")
        }
        fn read(&self, slot: usize, into: &mut [u8]) {
            into.copy_from_slice(&self.0[slot]);
        }
        fn wipe(&mut self) {}
    }

    #[test]
    fn one_wrong_byte_and_one_object_in_anothers_place_are_seen() {
        let right: Vec<_> = (0..2).flat_map(|server| SHAPE.share(server).all()).collect();
        let verdict = |held: Vec<Vec<u8>>| {
            let mut check = Check::new(SHAPE);
            check.run(&Held(held));
            check.all_right()
        };
        assert!(verdict(right.clone()));
        let mut torn = right.clone();
        torn[3][32] ^= 1;
        assert!(!verdict(torn));
        let mut swapped = right;
        swapped.swap(0, 1);
        assert!(!verdict(swapped));
    }
    #[test]
    fn a_share_is_told_as_it_is_and_checked_before_it_is_held() {
        let share = Share { server: 255, objects: 4096, bytes: 1 << 18 };
        assert_eq!(Share::decode(&share.encode()), Ok(share));
        assert!(check_room([].into_iter(), share).is_ok());
        assert!(
            check_room([share].iter(), Share { objects: 1, bytes: 1, ..share }).unwrap_err().contains("start it anew")
        );
        let wrong = [
            Share { server: 256, ..share },
            Share { objects: 0, ..share },
            Share { objects: 4097, bytes: 1, ..share },
            Share { bytes: 0, ..share },
            Share { bytes: (1 << 18) + 1, ..share },
        ];
        for share in wrong {
            assert!(Share::decode(&share.encode()).is_err(), "{share:?}");
        }
        assert!(Share::decode(&[0; 11]).is_err() && Share::decode(&[1; 13]).is_err());
    }
}
