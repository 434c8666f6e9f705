//! Step 1: which pictures are submitted before they are decoded, so that decoding takes place while the task waits for
//! its batch (Symphony, section 4.3).
//!
//! That is a bet: an input that is late has cost its batch a place, and a batch of late inputs its GPU a moment. It is
//! made only if a thread of the pool is free, so that decoding begins at once and no more bets are open than there are
//! threads, whoever sends how many pictures. And a model whose pictures were late is not bet on for a while, twice as
//! long each time, up to [`SKIP_MAX`] requests: what takes longer to decode than a task waits costs at most one late
//! input in so many. All other pictures are decoded first, as if there was no bet.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use frontend::{InferError, tasks::Reply};
use proto::{scheduler_to_frontend::DropReason, slot::GUARD_BYTES};
use repository::Model;

use crate::pool::Pool;

/// Requests that are decoded first between two bets on a model that loses them all.
const SKIP_MAX: u32 = 64;

/// The bets on all models.
#[derive(Debug, Default)]
pub(crate) struct Gates(RefCell<BTreeMap<usize, Rc<RefCell<Gate>>>>);

/// The bets on one model.
#[derive(Debug, Default)]
struct Gate {
    /// Requests that are decoded first after a bet that was lost; twice as many after the next.
    backoff: u32,
    /// Of them, those that are still to come.
    skip: u32,
}

/// One bet. It counts as lost if nothing is heard of how it ended: whoever hangs up while pictures are decoded, or
/// sends what is none, pays as whoever is late.
#[derive(Debug)]
pub(crate) struct Ahead {
    gate: Rc<RefCell<Gate>>,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Lost,
    Won,
    /// It was not about when the input came.
    Void,
}

impl Gates {
    /// Whether the pictures of a request for this model are submitted before they are decoded. They must be all that it
    /// has.
    pub(crate) fn may_go(&self, index: usize, model: &Model, pool: &Pool) -> Option<Ahead> {
        if model.inputs.len() > 1 || model.input_bytes() < GUARD_BYTES || !pool.is_free() {
            return None;
        }
        let gate = Rc::clone(self.0.borrow_mut().entry(index).or_default());
        let may_go = gate.borrow_mut().may_go();
        may_go.then(|| Ahead { gate, end: End::Lost })
    }
}

impl Gate {
    fn may_go(&mut self) -> bool {
        let may = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        may
    }

    fn handle_ended(&mut self, end: End) {
        match end {
            End::Lost => {
                self.backoff = (2 * self.backoff).clamp(1, SKIP_MAX);
                self.skip = self.backoff;
            }
            End::Won => self.backoff /= 2,
            End::Void => {}
        }
    }
}

impl Ahead {
    /// The request was refused, or its input is there: from now on it is nobody's fault if nothing is heard.
    pub(crate) fn handle_settled(&mut self) {
        self.end = End::Void;
    }

    /// The request has ended.
    pub(crate) fn handle_ended(mut self, result: &Result<Reply, InferError>) {
        self.end = match result {
            Ok(reply) if !reply.was_late => End::Won,
            Ok(_) | Err(InferError::Dropped(DropReason::InputLate)) => End::Lost,
            Err(_) => End::Void,
        };
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.gate.borrow_mut().handle_ended(self.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bet(gate: &Rc<RefCell<Gate>>) -> Option<Ahead> {
        let may_go = gate.borrow_mut().may_go();
        may_go.then(|| Ahead { gate: Rc::clone(gate), end: End::Lost })
    }

    fn late(ahead: Ahead) {
        ahead.handle_ended(&Err(InferError::Dropped(DropReason::InputLate)));
    }

    #[test]
    fn who_is_always_late_costs_one_input_in_so_many() {
        let gate = Rc::default();
        let lost = |requests: u32| (0..requests).filter_map(|_| bet(&gate)).map(late).count();
        // One bet, and after it 1, 2, 4, 8, 16, 32 and 64 requests without.
        assert_eq!(lost(8 + 127), 8);
        assert_eq!(lost(10 * (SKIP_MAX + 1)), 10);
    }

    #[test]
    fn whatever_ends_a_bet_without_a_word_loses_it_and_what_is_not_about_it_does_not() {
        let gate = Rc::default();
        drop(bet(&gate).unwrap());
        assert!(bet(&gate).is_none(), "hung up while it was decoded");
        let mut settled = bet(&gate).unwrap();
        settled.handle_settled();
        drop(settled);
        bet(&gate).unwrap().handle_ended(&Err(InferError::Dropped(DropReason::Deadline)));
        late(bet(&gate).unwrap());
        assert_eq!((bet(&gate).is_none(), bet(&gate).is_none()), (true, true), "the second that was lost");
        for left in [1, 0] {
            gate.borrow_mut().handle_ended(End::Won);
            assert_eq!(gate.borrow().backoff, left);
        }
    }
}
