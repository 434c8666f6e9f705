//! One request's way through models of one task: who is asked when, and when the answer is made of what is there
//! (Clipper, section 5.2.2).
//!
//! A life: made with who is to be asked; [`Vote::poll_action`] says whom to ask, [`Vote::handle_end`] takes what
//! becomes of each. It closes once: when all have ended who were asked, or, one by one, when one's answer is enough; or
//! when it must leave. Whoever is under way then is cancelled before.
//!
//! The answer leaves some time before the deadline (`reply_ms`), which is for making it and for its way; and members
//! should have answered as long before that, since deferral answers near a deadline on purpose.

use std::collections::VecDeque;

use proto::{Span, Timestamp};

/// In which order members are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// All at once.
    AtOnce,
    /// One after another until one is confident: time is left for all of them.
    UntilConfident,
    /// One after another until one answers: each may take all but what the quickest of those after it needs, and is
    /// left out if it cannot answer so.
    UntilAnswered,
    /// One after another until one answers: each may take all the time there is, so a later one is asked only if one
    /// fails early.
    OnFailure,
}

/// Of what the quickest member takes at least, what the ones before it leave of a request's time. One of them is given
/// up when it could not answer any more, so what it takes itself is left as well: enough for the quickest one to wait
/// for a GPU and for larger batches than one.
const RESERVE: i64 = 2;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Ask this member, then call [`Vote::handle_end`].
    Ask {
        /// Its index.
        member: usize,
        /// By then it should have answered; `NEVER` if the request has no objective.
        until: Timestamp,
    },
    /// Nobody waits for this member any more.
    Cancel {
        /// Its index.
        member: usize,
    },
    /// It is over: the answer is made of the predictions that are there.
    Close,
}

/// A request under way.
#[derive(Debug)]
pub struct Vote {
    deadline: Timestamp,
    reply: Span,
    order: Order,
    /// Those who are to be asked yet, with what each takes at least.
    waiting: VecDeque<(usize, Span)>,
    under_way: Vec<usize>,
    /// Cancellations and the end.
    actions: VecDeque<Action>,
    has_ended: bool,
}

impl Vote {
    /// A request that asks these members, each of which takes so long at least, in this order.
    #[must_use]
    pub fn new(members: Vec<(usize, Span)>, order: Order, deadline: Timestamp, reply: Span) -> Self {
        let (under_way, actions, has_ended) = (Vec::new(), VecDeque::new(), false);
        Self { deadline, reply, order, waiting: members.into(), under_way, actions, has_ended }
    }

    /// The least time that an answer takes, whoever gives it.
    #[must_use]
    pub fn least(&self) -> Span {
        self.waiting.iter().map(|(_, least)| *least).min().unwrap_or(Span::ZERO)
    }

    /// A member has ended; `is_enough`: with a prediction after which nobody else need be asked. What comes of a member
    /// that is not under way counts for nothing; yields whether it was.
    pub fn handle_end(&mut self, member: usize, is_enough: bool) -> bool {
        let Some(at) = self.under_way.iter().position(|other| *other == member).filter(|_| !self.has_ended) else {
            return false;
        };
        self.under_way.swap_remove(at);
        if self.under_way.is_empty() && (self.waiting.is_empty() || (self.order != Order::AtOnce && is_enough)) {
            self.close();
        }
        true
    }

    /// Closes it if it must leave.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.poll_timeout().is_some_and(|at| at <= now) {
            self.close();
        }
    }

    /// When [`Self::handle_timeout`] must be called: when the answer must leave.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        (!self.has_ended && self.deadline != Timestamp::NEVER).then(|| before(self.deadline, self.reply))
    }

    /// What to do next. As long as it has not closed and there is nothing to do, some member is under way.
    pub fn poll_action(&mut self, now: Timestamp) -> Option<Action> {
        if self.has_ended {
            return self.actions.pop_front();
        }
        if self.order != Order::AtOnce && !self.under_way.is_empty() {
            return None;
        }
        self.leave_out(now);
        let Some((member, least)) = self.waiting.pop_front() else {
            if self.under_way.is_empty() {
                self.close();
            }
            return self.actions.pop_front();
        };
        let until = self.until(now, least);
        self.under_way.push(member);
        Some(Action::Ask { member, until })
    }

    /// Whoever could not answer so early that a later one still could is not asked.
    fn leave_out(&mut self, now: Timestamp) {
        while self.order == Order::UntilAnswered
            && self.deadline != Timestamp::NEVER
            && self.waiting.len() > 1
            && now + self.waiting[0].1 > before(self.end(), reserve(self.waiting.range(1..)))
        {
            self.waiting.pop_front();
        }
    }

    /// When members should have answered.
    fn end(&self) -> Timestamp {
        before(before(self.deadline, self.reply), self.reply)
    }

    /// When a member should have answered that is asked now. Until one is confident each has what it takes at least,
    /// and an equal part of what is left over by it and by those after it that can still be asked in time.
    fn until(&self, now: Timestamp, least: Span) -> Timestamp {
        if self.deadline == Timestamp::NEVER {
            return Timestamp::NEVER;
        }
        let end = self.end();
        match self.order {
            Order::AtOnce | Order::OnFailure => return end,
            Order::UntilAnswered => return before(end, reserve(self.waiting.iter())),
            Order::UntilConfident => (),
        }
        let (left, mut all, mut parts) = (end - now, least, 1);
        for (_, more) in &self.waiting {
            if all + *more <= left {
                all += *more;
                parts += 1;
            }
        }
        if parts == 1 || left <= all {
            return if parts == 1 { end } else { now + least };
        }
        now + least + Span((left - all).0 / parts)
    }

    fn close(&mut self) {
        self.has_ended = true;
        self.waiting.clear();
        self.actions.extend(self.under_way.drain(..).map(|member| Action::Cancel { member }));
        self.actions.push_back(Action::Close);
    }
}

/// What is left for the quickest of those who would be asked later.
fn reserve<'a>(later: impl Iterator<Item = &'a (usize, Span)>) -> Span {
    // Who cannot be asked takes nothing.
    let least = later.map(|(_, least)| *least).filter(|least| *least > Span::ZERO).min();
    least.map_or(Span::ZERO, |least| Span(least.0 * RESERVE))
}

fn before(at: Timestamp, span: Span) -> Timestamp {
    Timestamp(at.0 - span.0)
}

#[cfg(test)]
mod tests;
