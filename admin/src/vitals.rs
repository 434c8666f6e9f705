//! Signs of life. Threads stamp their hearts whenever they have had a turn, which costs them one store; whoever asks
//! compares. No IO.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicI64, Ordering},
};

use proto::{Span, Timestamp};

/// A thread that has not had a turn for so long has stalled. All have one ten times a second, or nearly.
pub const SILENCE_MAX: Span = Span::from_millis(2_000);

/// Of a heart that nobody waits for.
const RESTS: i64 = i64::MAX;

/// A thread's.
#[derive(Debug, Clone)]
pub struct Heart(Arc<AtomicI64>);

impl Heart {
    /// The thread has a turn now.
    pub fn beat(&self, now: Timestamp) {
        self.0.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// The thread is about to do what may take long, or to end.
    pub fn rest(&self) {
        self.0.store(RESTS, Ordering::Relaxed);
    }

    /// How long it has been silent, unless it rests.
    fn silence(&self, now: Timestamp) -> Option<Span> {
        let beat = self.0.load(Ordering::Relaxed);
        (beat != RESTS).then(|| (now - Timestamp(beat)).max(Span::ZERO))
    }
}

/// How a process is. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Vitals(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    hearts: Vec<(String, Heart)>,
    /// What else is wrong, and ends only with the process or by itself.
    trouble: Option<String>,
    /// Why it does not serve, if it does not.
    not_ready: Option<String>,
    stage: Stage,
}

/// How far a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It has work of its own to do before it serves.
    Loading,
    /// It serves, or lacks what others have.
    Waiting,
    /// It was told to end.
    Ending,
}

impl Default for State {
    fn default() -> Self {
        let not_ready = Some("it is about to start".to_owned());
        Self { hearts: Vec::new(), trouble: None, not_ready, stage: Stage::Waiting }
    }
}

impl Vitals {
    fn state(&self) -> MutexGuard<'_, State> {
        // No invariant spans two changes of it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's heart, which rests until it beats. One of the same name takes the place of the former one.
    #[must_use]
    pub fn heart(&self, thread: &str) -> Heart {
        let heart = Heart(Arc::new(AtomicI64::new(RESTS)));
        let mut state = self.state();
        state.hearts.retain(|(name, _)| name != thread);
        state.hearts.push((thread.to_owned(), heart.clone()));
        heart
    }

    /// Something other than a thread has stalled, or does so no more.
    pub fn set_trouble(&self, trouble: Option<String>) {
        self.state().trouble = trouble;
    }

    /// The process does not serve, as it has work of its own to do, which takes as long as it takes.
    pub fn set_loading(&self, why: &str) {
        self.set(Stage::Loading, Err(why));
    }

    /// Whether the process serves; if not, why: what it lacks others have.
    pub fn set_ready(&self, ready: Result<(), &str>) {
        self.set(Stage::Waiting, ready);
    }

    fn set(&self, stage: Stage, ready: Result<(), &str>) {
        let mut state = self.state();
        if state.stage != Stage::Ending {
            state.stage = stage;
        }
        match ready {
            Ok(()) => state.not_ready = None,
            Err(why) if state.not_ready.as_deref() == Some(why) => {}
            Err(why) => state.not_ready = Some(why.to_owned()),
        }
    }

    /// The process was told to end, and finishes what it has.
    pub fn set_ending(&self) {
        self.state().stage = Stage::Ending;
    }

    pub(crate) fn stage(&self) -> Stage {
        self.state().stage
    }

    /// Whether all that should move does.
    ///
    /// # Errors
    /// One line that names what does not.
    pub fn live(&self, now: Timestamp) -> Result<(), String> {
        let state = self.state();
        let silent = state.hearts.iter().find_map(|(name, heart)| {
            let silence = heart.silence(now).filter(|silence| *silence > SILENCE_MAX)?;
            Some(format!("thread {name} has done nothing for {silence}"))
        });
        silent.or_else(|| state.trouble.clone()).map_or(Ok(()), Err)
    }

    /// Whether the process serves.
    ///
    /// # Errors
    /// One line that says why not.
    pub fn ready(&self, now: Timestamp) -> Result<(), String> {
        self.live(now)?;
        self.state().not_ready.clone().map_or(Ok(()), Err)
    }

    /// How long each thread that does not rest has been silent.
    #[must_use]
    pub fn silences(&self, now: Timestamp) -> Vec<(String, Span)> {
        let state = self.state();
        let awake = state.hearts.iter().filter_map(|(name, heart)| Some((name.clone(), heart.silence(now)?)));
        awake.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis(ms)
    }

    #[test]
    fn a_thread_that_stalls_is_named_within_three_seconds_and_forgiven_once_it_moves() {
        let vitals = Vitals::default();
        let (one, other) = (vitals.heart("model-0"), vitals.heart("rank"));
        vitals.set_ready(Ok(()));
        assert_eq!(vitals.live(at(100_000)), Ok(()), "none has begun");
        for ms in (0..=10_000).step_by(100) {
            one.beat(at(ms));
            other.beat(at(ms.min(5_000)));
            let is_well = ms - 5_000 <= 2_000;
            assert_eq!((vitals.live(at(ms)).is_ok(), vitals.ready(at(ms)).is_ok()), (is_well, is_well), "{ms}");
        }
        assert_eq!(vitals.live(at(8_000)), Err("thread rank has done nothing for 3.000 s".to_owned()));
        other.beat(at(10_050));
        assert_eq!(vitals.ready(at(10_100)), Ok(()));
        other.rest();
        one.beat(at(60_000));
        assert_eq!(vitals.live(at(60_000)), Ok(()));
        assert_eq!(vitals.silences(at(60_001)), [("model-0".to_owned(), Span::from_millis(1))]);
    }

    #[test]
    fn what_is_not_ready_lives_and_says_why() {
        let vitals = Vitals::default();
        assert!(vitals.live(at(0)).is_ok() && vitals.ready(at(0)).is_err());
        vitals.set_ready(Err("it has no primary"));
        assert_eq!(vitals.ready(at(0)), Err("it has no primary".to_owned()));
        vitals.set_ready(Ok(()));
        vitals.set_trouble(Some("the executor of GPU 1 hangs".to_owned()));
        assert_eq!(vitals.live(at(0)), Err("the executor of GPU 1 hangs".to_owned()));
        vitals.set_trouble(None);
        assert_eq!(vitals.ready(at(0)), Ok(()));
    }

    #[test]
    fn a_thread_that_is_started_again_has_one_heart() {
        let vitals = Vitals::default();
        vitals.heart("network").beat(at(0));
        vitals.heart("network").beat(at(5_000));
        assert_eq!(vitals.live(at(5_100)), Ok(()));
        assert_eq!(vitals.silences(at(5_000)).len(), 1);
    }
}
