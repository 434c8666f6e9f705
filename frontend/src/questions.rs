//! What standbys ask: whether we miss the primary, too. It is asked for its clock then, and whatever comes from it says
//! that it lives; if nothing comes for [`MISSED_AFTER`], it is missed.

use std::collections::BTreeMap;

use proto::{Span, Timestamp, Wait};

/// How long the primary may be silent after it was asked. An answer takes microseconds, and threads that share their
/// core wait for it up to a few milliseconds.
pub(crate) const MISSED_AFTER: Span = Wait::Missed.bound();

/// Questions without an answer: at most one of each session.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    /// When the primary is missed, by the session that asked.
    asked: BTreeMap<usize, Timestamp>,
}

impl Questions {
    /// A session asks while the primary's connections are up. True if the primary is to be asked in turn.
    pub(crate) fn handle_asked(&mut self, now: Timestamp, session: usize) -> bool {
        let is_new = !self.asked.contains_key(&session);
        if is_new {
            self.asked.insert(session, now + MISSED_AFTER);
        }
        is_new
    }

    /// A session has ended: nobody waits for its answer.
    pub(crate) fn handle_left(&mut self, session: usize) {
        self.asked.remove(&session);
    }

    /// What all have asked is known now: who is to be answered.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = usize> + use<> {
        std::mem::take(&mut self.asked).into_keys()
    }

    /// Sessions that are to be told that the primary is missed.
    pub(crate) fn take_missed(&mut self, now: Timestamp) -> impl Iterator<Item = usize> {
        let missed = self.asked.extract_if(.., move |_, missed_at| *missed_at <= now);
        missed.map(|(session, _)| session).inspect(|_| Wait::Missed.note_reached())
    }

    /// When [`Self::take_missed`] must be called.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.asked.values().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_session_has_one_question_that_ends_when_the_primary_is_heard_or_missed() {
        let (now, later) = (Timestamp(0), Timestamp(100));
        let mut questions = Questions::default();
        assert!(questions.handle_asked(now, 2) && questions.handle_asked(later, 1));
        assert!(!questions.handle_asked(later, 2), "it has asked before");
        assert_eq!(questions.poll_timeout(), Some(now + MISSED_AFTER));
        assert_eq!(questions.take_missed(now + MISSED_AFTER - Span(1)).count(), 0);
        assert_eq!(questions.take_missed(now + MISSED_AFTER).collect::<Vec<_>>(), [2]);
        assert_eq!(questions.take_all().collect::<Vec<_>>(), [1]);
        assert_eq!((questions.take_all().count(), questions.poll_timeout()), (0, None));
        assert!(questions.handle_asked(later, 2));
        questions.handle_left(2);
        assert_eq!(questions.poll_timeout(), None);
    }
}
