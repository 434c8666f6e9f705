//! What standbys ask: whether we miss the primary, too. It is asked for its clock then, and whatever comes from it says
//! that it lives; if nothing comes for [`MISSED_AFTER`], it is missed.

use std::collections::BTreeMap;

use proto::{Span, Timestamp, Wait};

/// How long the primary may be silent after it was asked. An answer takes microseconds, and threads that share their
/// core wait for it up to a few milliseconds.
pub const MISSED_AFTER: Span = Wait::Missed.bound();

/// Questions and answers: at most one of each session.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    /// When the primary is missed, by the session that asked.
    asked: BTreeMap<usize, Timestamp>,
    /// Whether it is, by the session that is to be told.
    answers: BTreeMap<usize, bool>,
}

impl Questions {
    /// A session asks. True if the primary is to be asked in turn.
    pub(crate) fn handle_asked(&mut self, now: Timestamp, session: usize, primary: Option<usize>) -> bool {
        match primary {
            None => self.answers.insert(session, true),
            Some(primary) if primary == session => self.answers.insert(session, false),
            Some(_) if self.asked.contains_key(&session) => return false,
            Some(_) => return self.asked.insert(session, now + MISSED_AFTER).is_none(),
        };
        false
    }

    /// What all have asked is known now.
    pub(crate) fn handle_known(&mut self, is_missed: bool) {
        self.answers.extend(std::mem::take(&mut self.asked).into_keys().map(|session| (session, is_missed)));
    }

    /// A session has ended: nobody waits for its answer.
    pub(crate) fn handle_left(&mut self, session: usize) {
        self.asked.remove(&session);
        self.answers.remove(&session);
    }

    /// The primary is missed that was silent for too long.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        for (session, _) in self.asked.extract_if(.., |_, missed_at| *missed_at <= now) {
            Wait::Missed.note_reached();
            self.answers.insert(session, true);
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.asked.values().min().copied()
    }

    /// Who is to be told whether the primary is missed.
    pub(crate) fn poll_answer(&mut self) -> Option<(usize, bool)> {
        self.answers.pop_first()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIMARY: Option<usize> = Some(0);

    fn answers(questions: &mut Questions) -> Vec<(usize, bool)> {
        std::iter::from_fn(|| questions.poll_answer()).collect()
    }

    #[test]
    fn each_session_has_one_question_that_ends_when_the_primary_is_heard_or_missed() {
        let (now, later) = (Timestamp(0), Timestamp(100));
        let mut questions = Questions::default();
        assert!(questions.handle_asked(now, 2, PRIMARY) && questions.handle_asked(later, 1, PRIMARY));
        assert!(!questions.handle_asked(later, 2, PRIMARY), "it has asked before");
        assert_eq!(questions.poll_timeout(), Some(now + MISSED_AFTER));
        questions.handle_timeout(now + MISSED_AFTER - Span(1));
        assert_eq!(answers(&mut questions), []);
        questions.handle_timeout(now + MISSED_AFTER);
        assert_eq!(answers(&mut questions), [(2, true)]);
        questions.handle_known(false);
        assert_eq!((answers(&mut questions), questions.poll_timeout()), (vec![(1, false)], None));
        assert!(questions.handle_asked(later, 2, PRIMARY));
        questions.handle_left(2);
        questions.handle_known(true);
        assert_eq!((answers(&mut questions), questions.poll_timeout()), (vec![], None));
    }

    #[test]
    fn who_asks_the_primary_of_itself_or_an_orphan_is_answered_at_once_and_once() {
        let mut questions = Questions::default();
        for _ in 0..1_000 {
            assert!(!questions.handle_asked(Timestamp(0), 0, PRIMARY));
            assert!(!questions.handle_asked(Timestamp(0), 1, None));
        }
        assert_eq!(answers(&mut questions), [(0, false), (1, true)]);
    }
}
