//! What all members of a simulated fabric share: the one clock, the one seed, what happens later, the network, and what
//! is watched.

use std::collections::BTreeMap;

use backend::worker::Execution;
use frontend::tasks::RequestId;
use proto::{Claim, LoadId, ModelId, ModelThreadId, PlanId, Span, Timestamp, frontend_to_scheduler::ModelChange};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{
    models::{Dynamic, MODELS},
    mutation::Mutation,
    network::{Network, SideId},
    oracle::Oracle,
};
use crate::{
    fault::Fault,
    node::{Life, Node},
};

/// Something that happens later.
#[derive(Debug)]
pub(super) enum Happening {
    /// The next packet to this side of a connection arrives.
    Deliver(SideId),
    /// Too long nothing may have been heard from the other side.
    Silence(SideId),
    /// A transfer may not have been acknowledged for too long.
    Retries(SideId, u64),
    /// A connection may not have come up in time.
    Handshake(SideId),
    /// A member looks at its events and timers.
    Wake(Node),
    /// A client sends a request to this frontend.
    Request(Node),
    /// A client hangs up.
    HangUp(Node, Life, RequestId),
    /// The inputs of a request come, or an error instead of them.
    Inputs(Node, Life, RequestId),
    /// A client of this frontend wants a model loaded or unloaded.
    Change(Node, ModelChange, &'static str),
    /// An operator wants this scheduler to be the primary.
    HandOver(Node),
    /// The operator moves a model to another ModelThread.
    Move(ModelId, ModelThreadId),
    /// The repository gets the next version of a model.
    Publish(&'static str),
    /// A frontend has read a model from the repository.
    ModelRead(Node, Life, String),
    /// A GPU's thread looks at the clock, and starts its batch or rejects it.
    Execute(Node, Life, usize),
    /// A GPU's thread ends its batch.
    Executed(Node, Life, usize, Execution),
    /// The core hears of what a GPU has ended.
    Ended(Node, Life, usize),
    /// A GPU's thread has run a task again, alone, which took so long: in a session, for a plan.
    RanAlone(Node, Life, PlanId, Span),
    /// A copy of weights into a GPU's memory has ended.
    Copied(Node, Life, usize),
    /// A backend's loader has ended.
    Loaded(Node, Life, LoadId, String),
    /// A backend has measured a model.
    Measured(Node, Life, ModelId),
    /// A member's process starts.
    Start(Node),
    /// A backend opens its next session.
    Session(Node, Life),
    /// A fault begins.
    Fault(Fault),
    /// A fault ends.
    Heal(Fault),
}

/// What the members of one simulated fabric share.
pub(super) struct Env {
    /// True time, which no member sees.
    pub(super) now: Timestamp,
    pub(super) rng: ChaCha8Rng,
    pub(super) network: Network,
    pub(super) oracle: Oracle,
    pub(super) mutation: Option<Mutation>,
    /// How often schedulers have started.
    pub(super) scheduler_life: Life,
    /// The last scheduler that claimed the highest epoch.
    pub(super) primary: Option<(Claim, Node)>,
    primary_clock: Option<(LocalClock, Span)>,
    /// What is between a scheduler's own clock and the one that it tells.
    eras: BTreeMap<Node, Span>,
    /// By member.
    pub(super) members: Vec<Member>,
    /// Which models are dynamic.
    pub(super) dynamic: Dynamic,
    /// Tasks of theirs that backends ran again alone.
    pub(super) samples: u64,
    /// The version of each model that the repository holds now.
    pub(super) repository: BTreeMap<&'static str, u32>,
    /// Whether backends fail to load models now and then.
    pub(super) loads_fail: bool,
    later: BTreeMap<(Timestamp, u64), Happening>,
    order: u64,
    /// Lines for whoever reads a failed run.
    trace: Option<Vec<String>>,
}

/// How a member's process runs.
#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) clock: LocalClock,
    /// How late it looks at its events, at most.
    pub(super) reaction: Span,
    /// It does nothing before this instant.
    pub(super) stalled_until: Timestamp,
    /// When it will look next; there is one such event a member.
    wakes_at: Timestamp,
}

/// A member's clock: it started anywhere, and may run too fast or too slow.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LocalClock {
    pub(super) offset: Span,
    /// Nanoseconds that it gains in a second.
    pub(super) drift: Span,
}

impl LocalClock {
    /// What it shows at an instant of true time.
    pub(super) fn at(self, now: Timestamp) -> Timestamp {
        now + self.offset + Span((i128::from(now.0) * i128::from(self.drift.0) / 1_000_000_000) as i64)
    }

    /// The first instant of true time at which it shows `local` or more.
    pub(super) fn when(self, local: Timestamp) -> Timestamp {
        if local == Timestamp::NEVER || local == Timestamp::PAST {
            return local;
        }
        let ahead = i128::from((local - self.offset).0);
        let estimate = ahead * 1_000_000_000 / (1_000_000_000 + i128::from(self.drift.0));
        let mut at = Timestamp(i64::try_from(estimate).unwrap_or(i64::MAX - 1)) - Span(2);
        while self.at(at) < local {
            at += Span(1);
        }
        at
    }
}

impl Env {
    pub(super) fn new(seed: u64, mutation: Option<Mutation>, is_traced: bool) -> Self {
        Self {
            now: Timestamp::ZERO,
            rng: ChaCha8Rng::seed_from_u64(seed),
            network: Network::default(),
            oracle: Oracle::default(),
            mutation,
            scheduler_life: 0,
            primary: None,
            primary_clock: None,
            eras: BTreeMap::new(),
            members: Vec::new(),
            dynamic: Dynamic::default(),
            samples: 0,
            repository: MODELS.map(|(name, _)| (name, 1)).into(),
            loads_fail: false,
            later: BTreeMap::new(),
            order: 0,
            trace: is_traced.then(Vec::new),
        }
    }

    /// Adds a member with a clock of its own.
    pub(super) fn add_member(&mut self, name: String, drift_max: i64) -> Node {
        let drift = Span(self.rng.random_range(-drift_max..=drift_max));
        let (reaction, stalled_until) = (Span::from_micros(self.rng.random_range(5..200)), Timestamp::PAST);
        let clock = LocalClock { offset: Span::ZERO, drift };
        self.members.push(Member { name, clock, reaction, stalled_until, wakes_at: Timestamp::NEVER });
        Node(self.members.len() - 1)
    }

    /// A member's process starts: its clock starts anywhere.
    pub(super) fn reset_clock(&mut self, node: Node) {
        let member = &mut self.members[node.0];
        member.clock.offset = Span(self.rng.random_range(1..1 << 40));
        member.stalled_until = Timestamp::PAST;
    }

    pub(super) fn schedule(&mut self, at: Timestamp, what: Happening) {
        self.order += 1;
        self.later.insert((at.max(self.now), self.order), what);
    }

    pub(super) fn after(&mut self, span: Span, what: Happening) {
        self.schedule(self.now + span, what);
    }

    /// What happens next, if anything does before `until`; time goes on to then.
    pub(super) fn next(&mut self, until: Timestamp) -> Option<Happening> {
        let entry = self.later.first_entry().filter(|entry| entry.key().0 <= until)?;
        let ((at, _), what) = entry.remove_entry();
        self.now = at;
        Some(what)
    }

    /// When the last fault ends that has been drawn.
    pub(super) fn last_heal_at(&self) -> Option<Timestamp> {
        let heals = |(_, what): &(&(Timestamp, u64), &Happening)| matches!(what, Happening::Heal(_));
        self.later.iter().rev().find(heals).map(|((at, _), _)| *at)
    }

    /// What this member's clock shows now.
    pub(super) fn local(&self, node: Node) -> Timestamp {
        self.members[node.0].clock.at(self.now)
    }

    /// A scheduler's process starts, after its clock was set: among others it begins near zero, and follows one of
    /// them.
    pub(super) fn begin_era(&mut self, node: Node, is_alone: bool) {
        let shift = if is_alone { Span::ZERO } else { Timestamp(1_000_000_000) - self.local(node) };
        self.eras.insert(node, shift);
    }

    /// A scheduler sets the clock that it tells.
    pub(super) fn shift_era(&mut self, node: Node, by: Span) {
        *self.eras.entry(node).or_default() += by;
    }

    /// What the clock shows that a scheduler tells.
    pub(super) fn era(&self, node: Node) -> Timestamp {
        self.local(node) + self.eras.get(&node).copied().unwrap_or_default()
    }

    /// This one is the primary, and its clock is what the others are held against, also after its process has died:
    /// one that starts in its place has another.
    pub(super) fn set_primary(&mut self, claim: Claim, node: Node) {
        self.primary = Some((claim, node));
        let shift = self.eras.get(&node).copied().unwrap_or_default();
        self.primary_clock = Some((self.members[node.0].clock, shift));
    }

    /// What the clock of the primary shows, or of the last one that there was.
    pub(super) fn primary_era(&self) -> Option<Timestamp> {
        self.primary_clock.map(|(clock, shift)| clock.at(self.now) + shift)
    }

    /// A scheduler has a timer at an instant of the clock that it tells.
    pub(super) fn wake_at_era(&mut self, node: Node, at: Timestamp) {
        if at < Timestamp::NEVER {
            let shift = self.eras.get(&node).copied().unwrap_or_default();
            self.wake_at_local(node, if at == Timestamp::PAST { at } else { at - shift });
        }
    }

    /// The member has something to look at; it does so soon.
    pub(super) fn wake(&mut self, node: Node) {
        let reaction = self.members[node.0].reaction;
        let at = self.now + Span(self.rng.random_range(0..=reaction.0));
        self.wake_at(node, at);
    }

    /// The member has a timer at an instant of its own clock.
    pub(super) fn wake_at_local(&mut self, node: Node, local: Timestamp) {
        let at = self.members[node.0].clock.when(local).max(self.now);
        if at < Timestamp::NEVER {
            // Timers fire a little late.
            let late = Span(self.rng.random_range(0..60_000));
            self.wake_at(node, at + late);
        }
    }

    fn wake_at(&mut self, node: Node, at: Timestamp) {
        let member = &mut self.members[node.0];
        let at = at.max(member.stalled_until);
        if at < member.wakes_at {
            member.wakes_at = at;
            self.schedule(at, Happening::Wake(node));
        }
    }

    /// Whether a member's turn is due: it may have been put off, or have come already.
    pub(super) fn take_wake(&mut self, node: Node) -> bool {
        let member = &mut self.members[node.0];
        if self.now < member.stalled_until {
            let until = member.stalled_until;
            member.wakes_at = until;
            self.schedule(until, Happening::Wake(node));
            return false;
        }
        if self.now < member.wakes_at {
            return false;
        }
        member.wakes_at = Timestamp::NEVER;
        true
    }

    /// A span of 0 to `micros` microseconds.
    pub(super) fn micros(&mut self, micros: i64) -> Span {
        Span::from_micros(self.rng.random_range(0..=micros))
    }

    pub(super) fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_ratio(percent, 100)
    }

    /// Adds a line to the trace: who does what.
    pub(super) fn trace(&mut self, node: Node, what: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.trace {
            let seconds = (self.now - Timestamp::ZERO).as_secs_f64();
            lines.push(format!("{seconds:>12.6} {:<10} {}", self.members[node.0].name, what()));
        }
    }

    /// The lines so far.
    pub(super) fn take_trace(&mut self) -> Vec<String> {
        self.trace.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_shows_what_it_was_set_to_show() {
        for drift in [-200_000, 0, 30_000] {
            let clock = LocalClock { offset: Span(12_345_678_901), drift: Span(drift) };
            for local in [clock.offset.0, 13_000_000_000, 99_000_000_017].map(Timestamp) {
                let at = clock.when(local);
                assert!(clock.at(at) >= local && clock.at(at - Span(3)) < local, "{drift} {local:?}");
            }
            assert_eq!(clock.when(Timestamp::NEVER), Timestamp::NEVER);
        }
    }
}
