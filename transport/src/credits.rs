//! Credits: a peer sends only what a posted receive waits for, so RNR NAKs do not occur. No IO.
//!
//! Each SEND and each WRITE_WITH_IMM consumes one receive of the other side, hence one credit. A grant is cumulative:
//! "so many since the beginning", so a grant that overtakes or repeats another does no harm. Every SEND carries the
//! latest grant in its header. When half of the receives are owed and nothing goes out anyway, a SEND without a frame
//! carries the grant alone; it needs no credit itself, as [`CREDIT_RECEIVES`] more receives are posted than granted.
//! A receive is owed when the application has taken its event, so a slow application holds its peers back.

use crate::PostError;

/// Bytes in front of each frame.
pub(crate) const HEADER_BYTES: usize = 8;

/// Receives posted beyond the granted ones, for SENDs that carry credits only. One side has at most one of them
/// unacknowledged; while the other side has not yet reposted that receive, it can cause a second (its remaining half)
/// and no third, for it is out of credits then. One more to spare.
pub(crate) const CREDIT_RECEIVES: u16 = 3;

/// The header of each SEND.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// How many credits the sender of this header has granted since the connection came up.
    pub granted: u32,
    /// Whether a frame follows; if not, the SEND took no credit.
    pub frame: bool,
}

impl Header {
    pub(crate) fn emit(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.granted.to_be_bytes());
        bytes[4] = u8::from(self.frame);
        bytes
    }

    /// `None` if no header of ours.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let [a, b, c, d, frame @ (0 | 1), 0, 0, 0] = *bytes else { return None };
        Some(Self { granted: u32::from_be_bytes([a, b, c, d]), frame: frame == 1 })
    }
}

/// Both directions of one connection. Counts wrap.
#[derive(Debug)]
pub(crate) struct Credits {
    /// What the peer has granted us.
    granted: u32,
    /// How much of it we have used.
    used: u32,
    /// The peer's receives.
    peer_depth: u16,
    /// Our receives.
    depth: u16,
    /// What we could grant the peer now.
    grantable: u32,
    /// What we last told it.
    told: u32,
}

impl Credits {
    /// `depth`: our own receives, of which the peer has been told; `peer_depth`: the peer's.
    pub(crate) fn new(depth: u16, peer_depth: u16) -> Self {
        let told = u32::from(depth);
        Self { granted: u32::from(peer_depth), used: 0, peer_depth, depth, grantable: told, told }
    }

    /// What may be sent now.
    pub(crate) fn available(&self) -> u32 {
        self.granted.wrapping_sub(self.used)
    }

    /// Takes one credit.
    ///
    /// # Errors
    /// `QueueFull` if there is none.
    pub(crate) fn take(&mut self) -> Result<(), PostError> {
        if self.available() == 0 {
            return Err(PostError::QueueFull);
        }
        self.used = self.used.wrapping_add(1);
        Ok(())
    }

    /// The peer's latest grant. False if it is none that an honest peer can give: one that takes back, or one of more
    /// than the peer's receives.
    #[must_use]
    pub(crate) fn handle_grant(&mut self, granted: u32) -> bool {
        let available = granted.wrapping_sub(self.used);
        let honest = available >= self.available() && available <= u32::from(self.peer_depth);
        if honest {
            self.granted = granted;
        }
        honest
    }

    /// A receive that the peer had used is posted again.
    pub(crate) fn on_reposted(&mut self) {
        self.grantable = self.grantable.wrapping_add(1);
    }

    /// The grant for a header that goes out now.
    pub(crate) fn grant(&mut self) -> u32 {
        self.told = self.grantable;
        self.told
    }

    /// Whether so much is owed that it should be told even if nothing else goes out.
    pub(crate) fn is_owing(&self) -> bool {
        self.grantable.wrapping_sub(self.told) >= u32::from(self.depth).div_ceil(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn headers_are_these_bytes() {
        let header = Header { granted: 0x01020304, frame: true };
        assert_eq!(header.emit(), [1, 2, 3, 4, 1, 0, 0, 0]);
        assert_eq!(Header::parse(&header.emit()), Some(header));
        assert_eq!(Header::parse(&[0, 0, 0, 0, 2, 0, 0, 0]), None);
        assert_eq!(Header::parse(&[0, 0, 0, 0, 0, 0, 0, 1]), None);
    }

    #[test]
    fn a_dishonest_grant_is_refused() {
        let mut credits = Credits::new(4, 4);
        credits.take().unwrap();
        credits.take().unwrap();
        assert!(credits.handle_grant(5));
        assert!(!credits.handle_grant(4), "taken back");
        assert!(!credits.handle_grant(7), "more than its receives");
        assert_eq!(credits.available(), 3);
    }

    /// One side of a simulated connection: what it has in flight, in order, and its receives.
    struct Side {
        credits: Credits,
        to_send: u32,
        in_flight: std::collections::VecDeque<Header>,
        /// Receives posted and not consumed.
        receives: u32,
        /// Frames taken in and not yet reposted by a slow application.
        held: u32,
        credit_in_flight: bool,
        got: u32,
    }

    fn step(from: &mut Side, to: &mut Side, what: u8) {
        match what {
            0 if from.to_send > 0 && from.credits.take().is_ok() => {
                from.to_send -= 1;
                let granted = from.credits.grant();
                from.in_flight.push_back(Header { granted, frame: true });
            }
            1 if from.credits.is_owing() && !from.credit_in_flight => {
                from.credit_in_flight = true;
                let granted = from.credits.grant();
                from.in_flight.push_back(Header { granted, frame: false });
            }
            2 => {
                if let Some(header) = from.in_flight.pop_front() {
                    assert!(to.receives > 0, "receiver not ready");
                    to.receives -= 1;
                    assert!(to.credits.handle_grant(header.granted));
                    if header.frame {
                        to.held += 1;
                        to.got += 1;
                    } else {
                        from.credit_in_flight = false;
                        to.receives += 1;
                    }
                }
            }
            3 if from.held > 0 => {
                from.held -= 1;
                from.receives += 1;
                from.credits.on_reposted();
            }
            _ => {}
        }
    }

    proptest! {
        /// In any interleaving: no send ever finds the receiver not ready, and everything arrives in the end.
        #[test]
        fn never_not_ready_never_stuck(
            depth in 1u16..9,
            frames in (0u32..60, 0u32..60),
            schedule in proptest::collection::vec((any::<bool>(), 0u8..4), 0..400),
        ) {
            let side = |to_send| Side {
                credits: Credits::new(depth, depth),
                to_send,
                in_flight: Default::default(),
                receives: u32::from(depth + CREDIT_RECEIVES),
                held: 0,
                credit_in_flight: false,
                got: 0,
            };
            let (mut one, mut other) = (side(frames.0), side(frames.1));
            for (first, what) in schedule {
                if first { step(&mut one, &mut other, what) } else { step(&mut other, &mut one, what) }
            }
            for round in 0..2000 {
                let what = (round % 4) as u8;
                step(&mut one, &mut other, what);
                step(&mut other, &mut one, what);
            }
            prop_assert_eq!((other.got, one.got), frames);
        }
    }
}
