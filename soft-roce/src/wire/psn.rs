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
