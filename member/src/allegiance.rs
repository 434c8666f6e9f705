//! Whom a member obeys.
//!
//! A life of the member begins with nobody. The first primary that it has joined is obeyed, and after that whoever
//! claims a higher epoch of the same era. Who has lost its primary is an orphan: it keeps all that it has and waits for
//! a higher claim, but not for long. Everything else that means that what it has is nobody's any more makes it start
//! over, which ends this life: the primary has come back and forgotten them, or it is another era's.
//!
//! There is no word of connections here: a session is known by its index.

use proto::{Claim, Span, Timestamp, Wait};

/// How long an orphan waits to be taken over. A standby needs milliseconds; this is for one that must be asked twice.
pub const ORPHAN_MAX: Span = Wait::Orphan.bound();
/// An orphan that nobody has taken over by then is one that the standbys do not know of: they hear the primary.
pub const MISSING_AFTER: Span = Span::from_millis(250);

/// What is to be done about a claim, or the lack of one.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Nothing,
    /// The session is obeyed from now on. `former` was until now, and is still up.
    Obey {
        /// Its session.
        former: Option<usize>,
    },
    /// This life is over, for this reason.
    StartOver(&'static str),
    /// The session is of no use, for this reason; it may be tried again.
    Leave(&'static str),
}

/// Whom we obey.
#[derive(Debug)]
pub(crate) struct Allegiance {
    /// There is no other scheduler that could take over.
    is_alone: bool,
    /// Whom we obey, or obeyed last; no primary's if nobody was obeyed in this life.
    obeys: Claim,
    /// The session with it, if it has not been lost.
    primary: Option<usize>,
    /// This life ends then.
    until: Option<Timestamp>,
    /// When the primary will have been lost for longer than a takeover takes, and whether it has been.
    missing_at: Option<Timestamp>,
    is_missing: bool,
}

impl Allegiance {
    /// Nobody is obeyed, of so many schedulers.
    pub(crate) fn new(schedulers: usize) -> Self {
        let (until, missing_at) = (None, None);
        Self { is_alone: schedulers < 2, obeys: Claim::default(), primary: None, until, missing_at, is_missing: false }
    }

    /// Whom we obey, or obeyed last.
    pub(crate) fn obeys(&self) -> Claim {
        self.obeys
    }

    /// Whether anybody has been obeyed in this life.
    pub(crate) fn has_obeyed(&self) -> bool {
        self.obeys.is_primary()
    }

    /// The session that is obeyed and up.
    pub(crate) fn primary(&self) -> Option<usize> {
        self.primary
    }

    /// Whether the primary has been lost for longer than a takeover takes.
    pub(crate) fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// A scheduler has given us an id. If no primary takes us by it soon, another must be asked for one.
    pub(crate) fn handle_named(&mut self, now: Timestamp) {
        self.until = (!self.is_alone).then(|| now + ORPHAN_MAX);
    }

    /// Whether this is less than what is obeyed, or was last: it is never believed. Epochs of eras cannot be compared.
    pub(crate) fn is_below(&self, claim: Claim) -> bool {
        self.has_obeyed() && claim.era == self.obeys.era && claim.epoch < self.obeys.epoch
    }

    /// What the scheduler of a session claims: once the session has joined, and whenever its claim has changed.
    pub(crate) fn handle_claim(&mut self, session: usize, claim: Claim) -> Verdict {
        let is_higher = claim.epoch > self.obeys.epoch;
        if self.has_obeyed() && claim.era != self.obeys.era {
            return match claim.is_primary() && self.primary.is_none() {
                true => Verdict::StartOver("it is the primary of another era"),
                false => Verdict::Leave("it is of another era than the primary"),
            };
        }
        // What it has sent before cannot be told from what it sends after.
        if is_higher && self.primary == Some(session) {
            return Verdict::Leave("it claims another epoch than it is obeyed in");
        }
        if is_higher {
            self.obeys = claim;
            (self.until, self.missing_at, self.is_missing) = (None, None, false);
            return Verdict::Obey { former: self.primary.replace(session) };
        }
        if self.has_obeyed() && claim == self.obeys && self.primary.is_none() {
            return Verdict::StartOver("it was lost, and is the primary of the same epoch");
        }
        Verdict::Nothing
    }

    /// A session has ended.
    pub(crate) fn handle_left(&mut self, now: Timestamp, session: usize) -> Verdict {
        if self.is_alone {
            return Verdict::StartOver("there is no other scheduler");
        }
        if self.primary == Some(session) {
            self.primary = None;
            (self.until, self.missing_at) = (Some(now + ORPHAN_MAX), Some(now + MISSING_AFTER));
        }
        Verdict::Nothing
    }

    /// Ends the wait for a primary.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) -> Verdict {
        self.is_missing |= self.missing_at.take_if(|at| *at <= now).is_some();
        match self.until {
            Some(until) if until <= now => {
                Wait::Orphan.note_reached();
                Verdict::StartOver("no scheduler has become the primary in time")
            }
            _ => Verdict::Nothing,
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.missing_at.into_iter().chain(self.until).min()
    }

    /// A new life begins.
    pub(crate) fn start_over(&mut self) {
        (self.obeys, self.primary, self.until) = (Claim::default(), None, None);
        (self.missing_at, self.is_missing) = (None, false);
    }
}

#[cfg(test)]
mod tests {
    use proto::{Epoch, Era};

    use super::*;

    const NOW: Timestamp = Timestamp(1_000);
    const NONE: Verdict = Verdict::Nothing;

    fn claim(era: u64, number: u32, scheduler: u16) -> Claim {
        Claim { era: Era(era), epoch: Epoch { number, scheduler } }
    }

    fn obey(former: Option<usize>) -> Verdict {
        Verdict::Obey { former }
    }

    /// Of three schedulers the one at 0 is obeyed, in epoch 5.0 of era 1.
    fn obeying() -> Allegiance {
        let mut allegiance = Allegiance::new(3);
        allegiance.handle_named(NOW);
        assert_eq!(allegiance.handle_claim(1, claim(1, 0, 0)), NONE, "a standby is not obeyed");
        assert_eq!((allegiance.has_obeyed(), allegiance.primary()), (false, None));
        assert_eq!(allegiance.handle_claim(0, claim(1, 5, 0)), obey(None));
        assert_eq!((allegiance.has_obeyed(), allegiance.primary(), allegiance.poll_timeout()), (true, Some(0), None));
        allegiance
    }

    #[test]
    fn the_first_primary_is_obeyed_whatever_its_era_and_epoch() {
        for first in [claim(7, 1, 0), claim(0, 1, 3), claim(u64::MAX, u32::MAX, u16::MAX)] {
            let mut allegiance = Allegiance::new(2);
            assert_eq!(allegiance.handle_claim(1, first), obey(None));
            assert_eq!(allegiance.obeys(), first);
        }
    }

    #[test]
    fn a_higher_claim_of_the_same_era_is_obeyed_and_a_lower_or_equal_one_is_not() {
        for (found, expected) in [
            (claim(1, 4, 9), NONE),
            (claim(1, 0, 0), NONE),
            // Nobody else can have claimed it.
            (claim(1, 5, 0), NONE),
            (claim(1, 5, 1), obey(Some(0))),
            (claim(1, 6, 0), obey(Some(0))),
        ] {
            let mut allegiance = obeying();
            let is_obeyed = expected != NONE;
            assert_eq!(allegiance.handle_claim(1, found), expected, "{found:?}");
            assert_eq!(allegiance.primary(), Some(usize::from(is_obeyed)));
            assert_eq!(allegiance.obeys(), if is_obeyed { found } else { claim(1, 5, 0) });
        }
    }

    #[test]
    fn the_primary_may_repeat_its_claim_and_make_no_higher_one() {
        let mut allegiance = obeying();
        for (other, is_below) in [(claim(1, 5, 0), false), (claim(1, 4, 0), true), (claim(1, 0, 0), true)] {
            assert_eq!((allegiance.is_below(other), allegiance.handle_claim(0, other)), (is_below, NONE), "{other:?}");
        }
        assert!(matches!(allegiance.handle_claim(0, claim(1, 6, 0)), Verdict::Leave(_)));
        assert!(!allegiance.is_below(claim(2, 4, 0)), "of another era");
        assert_eq!((allegiance.primary(), allegiance.obeys()), (Some(0), claim(1, 5, 0)));
    }

    #[test]
    fn another_era_is_left_and_makes_only_an_orphan_start_over() {
        let mut allegiance = obeying();
        assert!(matches!(allegiance.handle_claim(1, claim(2, 0, 0)), Verdict::Leave(_)));
        assert!(matches!(allegiance.handle_claim(1, claim(2, 9, 1)), Verdict::Leave(_)), "it sees nobody, perhaps");
        assert_eq!(allegiance.primary(), Some(0));
        assert_eq!(allegiance.handle_left(NOW, 0), NONE);
        assert!(matches!(allegiance.handle_claim(0, claim(2, 9, 0)), Verdict::StartOver(_)));
    }

    #[test]
    fn an_orphan_waits_for_a_higher_claim_and_not_for_ever() {
        let mut allegiance = obeying();
        assert_eq!(allegiance.handle_left(NOW, 1), NONE, "a standby costs nothing");
        assert_eq!((allegiance.primary(), allegiance.poll_timeout()), (Some(0), None));
        assert_eq!(allegiance.handle_left(NOW, 0), NONE);
        let (until, missing_at) = (NOW + ORPHAN_MAX, NOW + MISSING_AFTER);
        assert_eq!((allegiance.primary(), allegiance.poll_timeout()), (None, Some(missing_at)));
        assert_eq!((allegiance.handle_timeout(missing_at - Span(1)), allegiance.is_missing()), (NONE, false));
        assert_eq!((allegiance.handle_timeout(missing_at), allegiance.is_missing()), (NONE, true));
        assert_eq!(allegiance.poll_timeout(), Some(until));
        assert_eq!((allegiance.has_obeyed(), allegiance.obeys()), (true, claim(1, 5, 0)));
        assert_eq!(allegiance.handle_claim(1, claim(1, 4, 1)), NONE);
        assert_eq!(allegiance.handle_claim(1, claim(1, 0, 0)), NONE);
        // Losing another session meanwhile does not make it wait longer.
        assert_eq!(allegiance.handle_left(until - Span(2), 1), NONE);
        assert_eq!(allegiance.handle_timeout(until - Span(1)), NONE);
        assert!(matches!(allegiance.handle_timeout(until), Verdict::StartOver(_)));
        assert_eq!(allegiance.handle_claim(0, claim(1, 6, 0)), obey(None), "the same scheduler, in another epoch");
        assert!(!allegiance.is_missing());
        assert_eq!((allegiance.handle_timeout(until), allegiance.poll_timeout()), (NONE, None));
    }

    #[test]
    fn a_primary_that_comes_back_in_its_epoch_has_forgotten() {
        let mut allegiance = obeying();
        assert_eq!(allegiance.handle_left(NOW, 0), NONE);
        assert!(matches!(allegiance.handle_claim(0, claim(1, 5, 0)), Verdict::StartOver(_)));
        allegiance.start_over();
        assert_eq!((allegiance.has_obeyed(), allegiance.poll_timeout()), (false, None));
        assert_eq!(allegiance.handle_claim(0, claim(1, 5, 0)), obey(None), "in the next life");
    }

    #[test]
    fn one_scheduler_alone_is_not_waited_for() {
        let mut allegiance = Allegiance::new(1);
        assert!(matches!(allegiance.handle_left(NOW, 0), Verdict::StartOver(_)));
        allegiance.handle_named(NOW);
        assert_eq!(allegiance.poll_timeout(), None, "nobody else could give another id");
        assert_eq!(allegiance.handle_claim(0, claim(1, 5, 0)), obey(None));
        assert!(matches!(allegiance.handle_left(NOW, 0), Verdict::StartOver(_)));
    }

    #[test]
    fn who_is_named_and_finds_no_primary_asks_another_for_a_name() {
        let mut allegiance = Allegiance::new(2);
        assert_eq!(allegiance.poll_timeout(), None);
        allegiance.handle_named(NOW);
        assert_eq!(allegiance.handle_claim(0, claim(1, 0, 0)), NONE);
        assert!(matches!(allegiance.handle_timeout(NOW + ORPHAN_MAX), Verdict::StartOver(_)));
    }
}
