//! Trials of models that are being loaded or measured, in between what GPUs serve. The loader's thread asks for a turn
//! before each of them and waits; the session's core knows what is planned, and gives it. Without a session nothing is
//! served, and nobody waits.
//!
//! A GPU may never be idle for long enough. So a trial waits a bounded time, and so do all of one load: they come
//! rarely at first, then more often, and at last one after another, as the load has to end. What the load has waited
//! for those before it counts, since whoever asked for it has waited as well; and what it waits, all those wait that
//! are behind it, so it counts once for each of them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use proto::{Span, Timestamp};
use transport::{Clock, Waker};

/// How long a trial waits at most (second), while those of the load, and the loads behind it, have not waited for so
/// long in all (first). A load may take 120 s (`LOAD_WAIT` of the scheduler), so half of that is left for what it does.
const WAITS: [(Span, Span); 2] =
    [(Span::from_millis(20_000), Span::from_millis(2_000)), (Span::from_millis(60_000), Span::from_millis(100))];
/// A trial of which nothing is known yet is expected to take so long: more than is ever planned ahead.
const UNKNOWN: Span = Span::from_millis(1_000);

/// How long a trial that can be put off waits for its turn: loads wait behind it.
const IDLE_PATIENCE: Span = Span::from_millis(100);

/// What the loader's thread and the session's share.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Something was given, or the session ended.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Wakes the session's thread, while there is one.
    session: Option<Waker>,
    wanted: Option<Wanted>,
    /// The session knows of it.
    is_told: bool,
    /// What was given last was a turn.
    has_turn: bool,
}

/// A turn that is waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    /// The GPUs that the trial is on.
    pub(super) gpus: Vec<usize>,
    /// How long it should take.
    pub(super) takes: Span,
    /// How long it waits at most.
    pub(super) patience: Span,
    /// Whether it is not made then.
    pub(super) put_off: bool,
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics in between.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session begins to serve, and gives turns from now on.
    pub(super) fn open(&self, session: Waker) {
        self.lock().session = Some(session);
    }

    /// It has ended: whoever waits goes on.
    pub(super) fn close(&self) {
        *self.lock() = State::default();
        self.0.changed.notify_all();
    }

    /// A turn that somebody began to wait for.
    pub(super) fn poll_wanted(&self) -> Option<Wanted> {
        let mut state = self.lock();
        let is_told = std::mem::replace(&mut state.is_told, true);
        state.wanted.clone().filter(|_| !is_told)
    }

    /// Whoever waits has a turn, or has none before its patience is over.
    pub(super) fn give(&self, has_turn: bool) {
        let mut state = self.lock();
        (state.wanted, state.has_turn) = (None, has_turn);
        drop(state);
        self.0.changed.notify_all();
    }

    /// Waits for a turn, and yields whether it came; without a session none does. There is one thread that waits.
    fn wait(&self, wanted: Wanted) -> bool {
        let mut state = self.lock();
        let Some(session) = state.session.clone() else { return false };
        (state.wanted, state.is_told) = (Some(wanted), false);
        // The session's thread takes the lock in each of its rounds, and must not wait there for a system call.
        drop(state);
        session.wake();
        let mut state = self.lock();
        while state.wanted.is_some() {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.has_turn
    }
}

/// The trials of one load.
pub(super) struct Trials<'a> {
    turns: &'a Turns,
    clock: Clock,
    /// The GPUs that the next one is on.
    gpus: Vec<usize>,
    /// The longest so far.
    longest: Span,
    /// How long they have waited, and the load before them.
    waited: Span,
    /// Of [`WAITS`], those that are over.
    stage: usize,
    /// Loads that wait for this one now.
    behind: &'a dyn Fn() -> usize,
    /// They have a turn together.
    is_in_turn: bool,
}

impl<'a> Trials<'a> {
    /// None so far, of a load for which no other one waits.
    pub(super) fn new(turns: &'a Turns, clock: Clock) -> Self {
        let (gpus, longest, waited) = (Vec::new(), Span::ZERO, Span::ZERO);
        Self { turns, clock, gpus, longest, waited, stage: 0, behind: &|| 0, is_in_turn: false }
    }

    /// Of a load that was asked for at this instant, and of how many are behind it.
    pub(super) fn of_load(self, asked_at: Timestamp, behind: &'a dyn Fn() -> usize) -> Self {
        Self { waited: self.clock.now() - asked_at, behind, ..self }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// How long they have waited.
    pub(super) fn waited(&self) -> Span {
        self.waited
    }

    /// The next ones are of another model, on these GPUs.
    pub(super) fn begin(&mut self, gpus: &[u32]) {
        (self.gpus, self.longest) = (gpus.iter().map(|&gpu| gpu as usize).collect(), Span::ZERO);
    }

    /// The next ones are on this GPU.
    pub(super) fn go_to(&mut self, gpu: usize) {
        self.gpus = vec![gpu];
    }

    /// Waits for the turn of a trial that took so long before, if it has been made. Otherwise it may be of twice as
    /// many tasks as the one before.
    pub(super) fn wait(&mut self, took: Option<Span>) {
        if self.is_in_turn {
            return;
        }
        self.longest = self.longest.max(took.unwrap_or(Span::ZERO));
        let unknown = if self.longest > Span::ZERO { self.longest * 2 } else { UNKNOWN };
        self.wait_for(took.unwrap_or(unknown));
    }

    fn wait_for(&mut self, takes: Span) {
        let behind = (self.behind)();
        let waited = self.waited * (1 + behind as i64);
        let stage = WAITS.iter().take_while(|(all, _)| *all <= waited).count();
        if stage > std::mem::replace(&mut self.stage, stage) {
            let (gpus, waited) = (&self.gpus, self.waited);
            tracing::warn!(
                ?gpus,
                %waited,
                behind,
                "a load, and those behind it, have waited for long: its trials delay batches of these GPUs now"
            );
        }
        let Some((_, patience)) = WAITS.get(stage).copied() else { return };
        let began = self.clock.now();
        self.turns.wait(Wanted { gpus: self.gpus.clone(), takes, patience, put_off: false });
        self.waited += self.clock.now() - began;
    }

    /// Makes some trials in one turn, which should take so long together.
    pub(super) fn together<T>(&mut self, takes: Span, trials: impl FnOnce(&mut Self) -> T) -> T {
        self.wait_for(takes);
        self.is_in_turn = true;
        let result = trials(self);
        self.is_in_turn = false;
        result
    }

    /// Makes some trials that should take so long together, if these GPUs have nothing to do for as long: soon, or not
    /// at all.
    pub(super) fn if_idle<T>(&mut self, takes: Span, trials: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let wanted = Wanted { gpus: self.gpus.clone(), takes, patience: IDLE_PATIENCE, put_off: true };
        self.is_in_turn = self.turns.wait(wanted);
        let result = self.is_in_turn.then(|| trials(self));
        self.is_in_turn = false;
        result
    }

    /// Makes a trial in its turn, which took so long before, if it has been made. How long it took.
    pub(super) fn run<E>(&mut self, took: Option<Span>, trial: impl FnOnce() -> Result<(), E>) -> Result<Span, E> {
        self.wait(took);
        let began = self.clock.now();
        trial()?;
        let took = self.clock.now() - began;
        self.longest = self.longest.max(took);
        Ok(took)
    }
}

#[cfg(test)]
mod tests {
    use transport::{Endpoint, EndpointConfig};

    use super::*;

    /// What is asked for next. It comes at once; only a defect is waited for until this ends.
    fn next(turns: &Turns) -> Wanted {
        let clock = Clock::start();
        let ends_at = clock.now() + Span::from_millis(60_000);
        while clock.now() < ends_at {
            match turns.poll_wanted() {
                Some(wanted) => return wanted,
                None => std::thread::yield_now(),
            }
        }
        panic!("nobody asks for a turn");
    }

    #[test]
    fn without_a_session_nobody_waits() {
        let turns = Turns::default();
        let mut trials = Trials::new(&turns, Clock::start());
        let took = trials.run(None, || Err::<(), _>("it fails"));
        assert_eq!((took, turns.poll_wanted()), (Err("it fails"), None));
    }

    #[test]
    fn who_has_waited_for_the_loads_before_does_not_wait_for_turns() {
        let turns = Turns::default();
        let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
        turns.open(endpoint.waker());
        let clock = Clock::start();
        let mut trials = Trials::new(&turns, clock).of_load(clock.now() - WAITS[1].0, &|| 0);
        trials.wait(None);
        assert_eq!((turns.poll_wanted(), trials.stage), (None, WAITS.len()));
        assert!(trials.waited() >= WAITS[1].0);
    }

    #[test]
    fn loads_that_wait_behind_one_have_not_waited_for_nothing() {
        let turns = Turns::default();
        let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
        turns.open(endpoint.waker());
        let clock = Clock::start();
        // Alone it would wait for most of a minute yet.
        let mut trials = Trials::new(&turns, clock).of_load(clock.now() - WAITS[1].0 / 10, &|| 9);
        trials.wait(None);
        assert_eq!((turns.poll_wanted(), trials.stage), (None, WAITS.len()));
    }

    #[test]
    fn a_trial_waits_until_it_has_its_turn_or_the_session_ends() {
        let turns = Turns::default();
        let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
        turns.open(endpoint.waker());
        let loader = turns.clone();
        let trials = std::thread::spawn(move || {
            let mut trials = Trials::new(&loader, Clock::start());
            trials.begin(&[0, 2]);
            let slow = Span::from_millis(3_000);
            trials.run(None, || Ok::<_, ()>(())).unwrap();
            trials.wait(Some(slow));
            trials.go_to(1);
            trials.wait(None);
            trials.waited = WAITS[0].0;
            trials.wait(Some(Span(5)));
            trials.waited = WAITS[1].0;
            // It has waited for too long.
            trials.wait(Some(Span(6)));
            trials.waited = Span::ZERO;
            trials.begin(&[3]);
            trials.wait(None);
            trials.together(Span(7), |trials| {
                trials.wait(None);
                trials.run(Some(slow), || Ok::<_, ()>(())).unwrap();
            });
            trials.wait(Some(Span(8)));
            // There is no session any more.
            trials.wait(Some(Span(5)));
        });
        let wanted = |gpus: &[usize], takes, patience| Wanted { gpus: gpus.to_vec(), takes, patience, put_off: false };
        assert_eq!(next(&turns), wanted(&[0, 2], UNKNOWN, WAITS[0].1));
        assert_eq!(turns.poll_wanted(), None, "once");
        assert!(!trials.is_finished());
        turns.give(true);
        assert_eq!(next(&turns), wanted(&[0, 2], Span::from_millis(3_000), WAITS[0].1));
        turns.give(true);
        assert_eq!(next(&turns), wanted(&[1], Span::from_millis(6_000), WAITS[0].1), "of a larger batch");
        turns.give(true);
        assert_eq!(next(&turns), wanted(&[1], Span(5), WAITS[1].1), "it has waited for long");
        turns.give(true);
        assert_eq!(next(&turns), wanted(&[3], UNKNOWN, WAITS[0].1), "another model");
        turns.give(true);
        assert_eq!(next(&turns), wanted(&[3], Span(7), WAITS[0].1), "one turn for all of them");
        turns.give(true);
        assert_eq!(next(&turns), wanted(&[3], Span(8), WAITS[0].1), "its turn is over");
        turns.close();
        trials.join().unwrap();
    }

    #[test]
    fn what_can_be_put_off_is_made_in_a_turn_or_not_at_all() {
        let turns = Turns::default();
        let mut trials = Trials::new(&turns, Clock::start());
        assert_eq!(trials.if_idle(Span(5), |_| ()), None, "nobody serves");
        let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
        turns.open(endpoint.waker());
        let idle = turns.clone();
        let trials = std::thread::spawn(move || {
            let mut trials = Trials::new(&idle, Clock::start());
            trials.begin(&[4]);
            let takes = Span(9);
            [0; 3].map(|_| {
                trials.if_idle(takes, |trials| {
                    trials.wait(None);
                    "made"
                })
            })
        });
        let wanted = Wanted { gpus: vec![4], takes: Span(9), patience: IDLE_PATIENCE, put_off: true };
        for has_turn in [true, false] {
            assert_eq!(next(&turns), wanted);
            turns.give(has_turn);
        }
        assert_eq!(next(&turns), wanted);
        turns.close();
        assert_eq!(trials.join().unwrap(), [Some("made"), None, None]);
    }
}
