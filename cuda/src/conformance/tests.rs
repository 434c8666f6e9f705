use super::*;
use crate::Fake;

/// Each case is tried under several orders of streams.
#[test]
fn the_fake_conforms() {
    for case in cases() {
        for seed in 0..4 {
            let fake = Fake::new(64, seed);
            let driver: Arc<dyn Driver> = fake.clone();
            let result = (case.run)(&driver);
            assert_eq!(result, Ok(()), "{}, with seed {seed}", case.name);
            assert_eq!(fake.leaks(), Vec::<String>::new(), "{}, with seed {seed}", case.name);
        }
    }
}
