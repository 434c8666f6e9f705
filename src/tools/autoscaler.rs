//! How many backends of a local cluster there are, by the scheduler's advice (`[autoscale]` of a file of `up`): each
//! has one GPU, and is a copy of the only one that the file has.
//!
//! The state machine is told what was seen of the cluster ([`Look`]), and answers with at most one [`Step`]. It takes
//! one after the other: the next backend is started once the last one serves, and none is ended before the last one
//! has left. Those that came last leave first, by SIGTERM, which has them finish what they have. The advice has its
//! own hysteresis; here it is only that fewer GPUs must be enough in all looks of [`FEWER_FOR`]. Whoever ended is
//! started again by the supervisor; this is told only of those that are not.
//!
//! No advice (a window has not passed, a takeover) is no reason to change anything, but that there are as many as there
//! must be at least; and while no primary answers nothing is done at all.

mod drive;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use proto::{Span, Timestamp, backoff::Backoff};
use serde::Deserialize;

pub(super) use drive::{Drive, name, place_of};

/// For so long fewer GPUs must be enough before a backend is ended.
const FEWER_FOR: Span = Span::from_millis(3_000);
/// A backend that has not served for so long after its start is not waited for any more before others are started.
const COMES_WITHIN: Span = Span::from_millis(60_000);
/// A backend that was told to end and is still there is killed: it allows itself 25 s.
const LEAVES_WITHIN: Span = Span::from_millis(30_000);
const _: () = assert!(LEAVES_WITHIN.0 / 1_000_000 > backend::config::DRAIN_TIMEOUT_MS as i64);
/// Pauses after backends that could not be started: the first and the longest.
const PAUSE: (Span, Span) = (Span::from_millis(5_000), Span::from_millis(300_000));

/// The table `autoscale` of a file of `up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Autoscale {
    /// How many GPUs there may be.
    pub gpus: Range,
}

/// So many at least and at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Range {
    pub min: u32,
    pub max: u32,
}

impl TryFrom<String> for Range {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let bounds = text.split_once("..").and_then(|(min, max)| Some((min.parse().ok()?, max.parse().ok()?)));
        match bounds {
            Some((min, max)) if 1 <= min && min <= max => Ok(Self { min, max }),
            _ => Err("expected MIN..MAX, such as 2..16, with MIN from 1 to MAX"),
        }
    }
}

/// What was seen of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Look {
    /// How many GPUs are needed; `None` while that is not known.
    pub needed: Option<u32>,
    /// Why.
    pub reason: String,
    /// Places of backends that plans go to.
    pub serving: BTreeSet<usize>,
}

/// What is to be done. Backends are meant by their places, which are parts of their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Start it.
    Start(usize),
    /// Tell it to end.
    End(usize),
    /// Kill it: it was told to end long ago.
    Kill(usize),
    /// Say that it was started long ago and does not serve.
    TellLate(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has not served yet.
    Comes(Timestamp),
    /// It has served, or was waited for in vain.
    Here,
    /// It was told to end.
    Leaves(Timestamp),
    /// It was killed.
    Killed,
}

#[derive(Debug)]
struct Backend {
    place: usize,
    state: State,
}

/// Decides which backends there are.
#[derive(Debug)]
pub(super) struct Autoscaler {
    range: Range,
    /// Those that there are, the oldest first; at most `range.max`.
    backends: Vec<Backend>,
    /// Since when all looks have said that fewer are enough.
    fewer_since: Option<Timestamp>,
    backoff: Backoff,
    /// None is started before.
    starts_at: Timestamp,
}

impl Autoscaler {
    /// As many as there are at least have been started, and are waited for by others.
    pub(super) fn new(range: Range) -> Self {
        let backends = (0..range.min as usize).map(|place| Backend { place, state: State::Here }).collect();
        let backoff = Backoff::new(PAUSE.0, PAUSE.1);
        Self { range, backends, fewer_since: None, backoff, starts_at: Timestamp::PAST }
    }

    /// How many backends there are, of those that nobody has told to end.
    pub(super) fn here(&self) -> u32 {
        self.backends.iter().filter(|backend| matches!(backend.state, State::Comes(_) | State::Here)).count() as u32
    }

    /// What is to be done after a look, which is `None` if no primary answers.
    pub(super) fn handle_look(&mut self, now: Timestamp, look: Option<&Look>) -> Option<Step> {
        for backend in &mut self.backends {
            let is_seen = look.is_some_and(|look| look.serving.contains(&backend.place));
            if is_seen && matches!(backend.state, State::Comes(_)) {
                backend.state = State::Here;
                self.backoff.handle_success();
            }
        }
        let here = self.here();
        let wanted = look.map(|look| look.needed.unwrap_or(here).clamp(self.range.min, self.range.max));
        self.fewer_since = wanted.filter(|&wanted| wanted < here).map(|_| self.fewer_since.unwrap_or(now));
        let step = self.step_under_way(now);
        if step.is_some() {
            return step;
        }
        let is_under_way = |backend: &Backend| backend.state != State::Here;
        let wanted = wanted.filter(|_| !self.backends.iter().any(is_under_way))?;
        if wanted > here && self.starts_at <= now {
            return Some(self.start(now));
        }
        if self.fewer_since.is_some_and(|since| since + FEWER_FOR <= now) {
            let newest = self.backends.last_mut()?;
            newest.state = State::Leaves(now);
            return Some(Step::End(newest.place));
        }
        None
    }

    /// One that comes or leaves takes too long.
    fn step_under_way(&mut self, now: Timestamp) -> Option<Step> {
        self.backends.iter_mut().find_map(|backend| match backend.state {
            State::Leaves(since) if since + LEAVES_WITHIN <= now => {
                backend.state = State::Killed;
                Some(Step::Kill(backend.place))
            }
            State::Comes(since) if since + COMES_WITHIN <= now => {
                backend.state = State::Here;
                Some(Step::TellLate(backend.place))
            }
            _ => None,
        })
    }

    fn start(&mut self, now: Timestamp) -> Step {
        let is_free = |place: &usize| self.backends.iter().all(|backend| backend.place != *place);
        let place = (0..self.range.max as usize).find(is_free).expect("there are fewer than `max`");
        self.backends.push(Backend { place, state: State::Comes(now) });
        Step::Start(place)
    }

    /// A backend has ended and is not started again, or could not be started. If that was no end in good order none is
    /// started for the pause that is yielded.
    pub(super) fn handle_end(&mut self, now: Timestamp, place: usize, is_in_order: bool) -> Option<Span> {
        let at = self.backends.iter().position(|backend| backend.place == place)?;
        let gone = self.backends.remove(at);
        let is_told = matches!(gone.state, State::Leaves(_) | State::Killed);
        if is_in_order || is_told {
            return None;
        }
        self.starts_at = self.backoff.handle_failure(now);
        Some(self.starts_at - now)
    }
}
