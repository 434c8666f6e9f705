//! What the objects hold, and whether that is what came.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Reader, Shape};

/// The bytes of one object: random, and different for each.
pub(super) fn bytes(shape: Shape, server: usize, object: usize) -> Vec<u8> {
    let mut bytes = vec![0; shape.bytes];
    ChaCha8Rng::seed_from_u64(shape.slot(server, object) as u64).fill(bytes.as_mut_slice());
    bytes
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
        let servers = 0..shape.servers;
        let expected = servers.flat_map(|server| (0..shape.objects).map(move |object| bytes(shape, server, object)));
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
        let right: Vec<_> = SHAPE.all().map(|(object, server)| bytes(SHAPE, object, server)).collect();
        let right: Vec<_> = [0, 2, 1, 3].map(|slot| right[slot].clone()).into();
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
}
