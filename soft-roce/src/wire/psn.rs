//! Packet sequence numbers (IBTA 9.7.2): 24 bits that wrap.

/// A packet sequence number. Comparable only with numbers less than 2^23 away, so it has no `Ord`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    const MASK: u32 = 0x00ff_ffff;

    /// The low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & Self::MASK)
    }

    /// The number, 0 ..= 2^24 - 1.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The number `packets` later.
    #[must_use]
    pub const fn plus(self, packets: u32) -> Self {
        Self::new(self.0.wrapping_add(packets))
    }

    /// The number one earlier.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self::new(self.0.wrapping_sub(1))
    }

    /// How far this is behind `earlier`, as a signed distance in -2^23 .. 2^23.
    #[must_use]
    pub const fn since(self, earlier: Self) -> i32 {
        ((self.0.wrapping_sub(earlier.0) << 8) as i32) >> 8
    }

    /// Whether this comes before `other` on the circle.
    #[must_use]
    pub const fn is_before(self, other: Self) -> bool {
        self.since(other) < 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All 2^24 numbers, and distances at all that matters, against wide integers: where they lie on the circle, and
    /// the one distance of that size or less that leads from one to the other.
    #[test]
    fn every_number_agrees_with_wide_integers() {
        const CIRCLE: i64 = 1 << 24;
        const HALF: i64 = CIRCLE / 2;
        let distances = [0, 1, 2, 255, 65_536, HALF / 2, HALF - 2, HALF - 1, -1, -2, -255, -HALF / 2, 1 - HALF, -HALF];
        for value in 0..CIRCLE {
            let psn = Psn::new(value as u32);
            for distance in distances {
                let reached = (value + distance).rem_euclid(CIRCLE);
                // A distance back is the rest of the way around; what exceeds the circle counts modulo it.
                let other = psn.plus(distance as u32);
                assert_eq!(i64::from(other.value()), reached, "{value} + {distance}");
                assert_eq!(i64::from(other.since(psn)), distance, "{value} + {distance}");
                assert_eq!(other.is_before(psn), distance < 0, "{value} + {distance}");
            }
            assert_eq!(i64::from(psn.previous().value()), (value + CIRCLE - 1) % CIRCLE);
        }
    }

    /// All pairs among numbers at both ends and in the middle of the circle.
    #[test]
    fn every_pair_is_as_far_apart_as_the_circle_says() {
        const CIRCLE: i64 = 1 << 24;
        let around = |at: i64| (at - 40..at + 40).map(|value| value.rem_euclid(CIRCLE));
        let values: Vec<i64> = around(0).chain(around(CIRCLE / 2)).chain(around(CIRCLE / 4)).collect();
        for &one in &values {
            for &other in &values {
                let ahead = (other - one).rem_euclid(CIRCLE);
                let distance = if ahead >= CIRCLE / 2 { ahead - CIRCLE } else { ahead };
                assert_eq!(i64::from(Psn::new(other as u32).since(Psn::new(one as u32))), distance, "{one} to {other}");
            }
        }
    }

    #[test]
    fn comparison_wraps() {
        let last = Psn::new(0x00ff_ffff);
        assert!(last.is_before(Psn::new(0)));
        assert_eq!(Psn::new(1).since(last), 2);
        assert_eq!(last.since(Psn::new(1)), -2);
        assert_eq!(last.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).previous(), last);
        assert!(!Psn::new(5).is_before(Psn::new(5)));
    }
}
