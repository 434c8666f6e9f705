//! What GPUs did in the last seconds, for whoever wants to look at it ([`trace`](crate::trace)). ModelThreads leave it
//! here as batches and loads end and as tasks are dropped; they wait for nobody, and nothing is planned by it.
//!
//! Instants are on the scheduler's clock, as backends tell them; what no clock could mean is cut.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

use proto::{BackendId, ModelId, ModelThreadId, Span, Timestamp, scheduler_to_frontend::DropReason};

/// How long it is kept.
pub const KEPT: Span = Span::from_millis(10_000);
/// Of one GPU, by each ModelThread: 48 bytes each.
pub const EVENTS_PER_GPU_MAX: usize = 4_096;
/// Dropped tasks, by each ModelThread: 16 bytes each.
pub const DROPS_MAX: usize = 4_096;
/// What a ModelThread keeps to itself while somebody looks.
const PENDING_MAX: usize = 1_024;
/// A backend may see our clock so far ahead.
const AHEAD_MAX: Span = Span::from_millis(1_000);
/// Nothing takes longer: it would have been given up.
const TAKES_MAX: Span = Span::from_millis(3_600_000);

/// A GPU: its backend, and its place there. It keeps these whatever it hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lane {
    /// The backend.
    pub backend: BackendId,
    /// The GPU's place there.
    pub gpu: u32,
}

/// What a GPU did, or did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It executed a batch.
    Batch {
        /// The model.
        model: ModelId,
        /// Tasks that took part, as far as the scheduler was told.
        tasks: u32,
        /// The batch's window: the earliest start and the latest, unless an earlier primary planned it.
        window: Option<(Timestamp, Timestamp)>,
        /// It started.
        started_at: Timestamp,
        /// It ended.
        finished_at: Timestamp,
    },
    /// It gave up a batch whose window had passed, or that hung.
    Missed {
        /// The model.
        model: ModelId,
        /// Tasks of it.
        tasks: u32,
        /// The batch's window.
        window: Option<(Timestamp, Timestamp)>,
        /// It was given up.
        at: Timestamp,
    },
    /// Weights came into its memory.
    Load {
        /// Whose.
        model: ModelId,
        /// They were read or copied from then on.
        started_at: Timestamp,
        /// They were there.
        finished_at: Timestamp,
    },
}

impl Event {
    /// The model.
    #[must_use]
    pub fn model(&self) -> ModelId {
        match *self {
            Self::Batch { model, .. } | Self::Missed { model, .. } | Self::Load { model, .. } => model,
        }
    }

    /// When it was over.
    #[must_use]
    pub fn ended_at(&self) -> Timestamp {
        match *self {
            Self::Batch { finished_at: at, .. } | Self::Missed { at, .. } | Self::Load { finished_at: at, .. } => at,
        }
    }

    /// With instants that can be: backends say what they like.
    fn checked(mut self, now: Timestamp) -> Self {
        match &mut self {
            Self::Missed { at, .. } => *at = (*at).clamp(now - TAKES_MAX, now + AHEAD_MAX),
            Self::Batch { started_at, finished_at, .. } | Self::Load { started_at, finished_at, .. } => {
                *finished_at = (*finished_at).clamp(now - TAKES_MAX, now + AHEAD_MAX);
                *started_at = (*started_at).clamp(*finished_at - TAKES_MAX, *finished_at);
            }
        }
        self
    }
}

/// A task that the scheduler dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dropped {
    /// The model.
    pub model: ModelId,
    /// Why.
    pub reason: DropReason,
    /// When.
    pub at: Timestamp,
}

/// What one ModelThread has left.
#[derive(Debug, Default)]
struct Kept {
    /// At most [`EVENTS_PER_GPU_MAX`] of each, in the order in which they were told; none of a GPU of which nothing was
    /// told for [`KEPT`].
    lanes: BTreeMap<Lane, VecDeque<Event>>,
    /// At most [`DROPS_MAX`].
    drops: VecDeque<Dropped>,
}

impl Kept {
    fn push(&mut self, now: Timestamp, note: Note) {
        let since = now - KEPT;
        match note {
            Note::Dropped(drop) => keep(&mut self.drops, drop, DROPS_MAX, |drop| drop.at < since),
            Note::Event(lane, event) => {
                if !self.lanes.contains_key(&lane) {
                    // GPUs come rarely, and those that went are seen then.
                    self.lanes.retain(|_, events| events.back().is_some_and(|last| last.ended_at() >= since));
                }
                let events = self.lanes.entry(lane).or_default();
                keep(events, event, EVENTS_PER_GPU_MAX, |event| event.ended_at() < since);
            }
        }
    }
}

/// Adds one, and lets go of the oldest if there are too many, or if they are too old.
fn keep<T>(kept: &mut VecDeque<T>, one: T, most: usize, is_old: impl Fn(&T) -> bool) {
    while kept.len() >= most || kept.front().is_some_and(&is_old) {
        kept.pop_front();
    }
    kept.push_back(one);
}

#[derive(Debug, Clone, Copy)]
enum Note {
    Event(Lane, Event),
    Dropped(Dropped),
}

/// What all ModelThreads have left. Clones share it.
#[derive(Debug, Clone)]
pub struct History(Arc<[Mutex<Kept>]>);

impl History {
    /// Of so many ModelThreads.
    #[must_use]
    pub fn new(model_threads: u16) -> Self {
        Self((0..model_threads).map(|_| Mutex::default()).collect())
    }

    /// One ModelThread's side.
    ///
    /// # Panics
    /// If there is no such ModelThread.
    #[must_use]
    pub fn recorder(&self, thread: ModelThreadId) -> Recorder {
        assert!(usize::from(thread.0) < self.0.len(), "each ModelThread has a place");
        Recorder { history: self.clone(), thread: thread.0.into(), pending: VecDeque::new() }
    }

    /// What ended since then, of each GPU, and what was dropped.
    #[must_use]
    pub fn since(&self, since: Timestamp) -> (Vec<(Lane, Event)>, Vec<Dropped>) {
        let mut events = Vec::new();
        self.look(|lane, kept| {
            events.extend(kept.iter().filter(|event| event.ended_at() >= since).map(|event| (lane, *event)));
        });
        let kept = self.0.iter().map(lock);
        let drops =
            kept.flat_map(|kept| kept.drops.iter().filter(|drop| drop.at >= since).copied().collect::<Vec<_>>());
        (events, drops.collect())
    }

    /// What each GPU of which anything was told lately has run from `since` until `until`.
    #[must_use]
    pub fn ran(&self, (since, until): (Timestamp, Timestamp)) -> BTreeMap<Lane, Ran> {
        let mut all = BTreeMap::<Lane, Ran>::new();
        self.look(|lane, kept| {
            // They lie as they were told, which is as they ended but for what backends' clocks are off.
            let new = kept.iter().rev().take_while(|event| event.ended_at() >= since - AHEAD_MAX);
            let ran = all.entry(lane).or_default();
            new.filter(|event| event.ended_at() >= since).for_each(|event| ran.absorb((since, until), event));
        });
        all
    }

    /// Shows the events of each GPU by each ModelThread, which can leave nothing meanwhile: locks are held for one GPU.
    fn look(&self, mut at: impl FnMut(Lane, &VecDeque<Event>)) {
        for thread in &*self.0 {
            let lanes: Vec<Lane> = lock(thread).lanes.keys().copied().collect();
            for lane in lanes {
                lock(thread).lanes.get(&lane).into_iter().for_each(|events| at(lane, events));
            }
        }
    }
}

/// No invariant spans two changes of what is kept.
fn lock(thread: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    thread.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a GPU ran lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ran {
    /// How long it executed batches, of the time that was asked for. Only batches that have ended count.
    pub busy: Span,
    /// Of the batch that ended last: when, its model, and its tasks.
    pub last: Option<(Timestamp, ModelId, u32)>,
}

impl Ran {
    fn absorb(&mut self, (since, until): (Timestamp, Timestamp), event: &Event) {
        let Event::Batch { model, tasks, started_at, finished_at, .. } = *event else { return };
        self.busy += (finished_at.min(until) - started_at.max(since)).max(Span::ZERO);
        self.last = self.last.max(Some((finished_at, model, tasks)));
    }
}

/// Leaves what a ModelThread was told.
#[derive(Debug)]
pub struct Recorder {
    history: History,
    thread: usize,
    /// What was told while somebody looked; at most [`PENDING_MAX`].
    pending: VecDeque<Note>,
}

impl Recorder {
    /// A GPU did something.
    pub fn note(&mut self, now: Timestamp, lane: Lane, event: Event) {
        self.push(now, Note::Event(lane, event.checked(now)));
    }

    /// A task was dropped.
    pub fn note_dropped(&mut self, now: Timestamp, model: ModelId, reason: DropReason) {
        self.push(now, Note::Dropped(Dropped { model, reason, at: now }));
    }

    fn push(&mut self, now: Timestamp, note: Note) {
        let mut kept = match self.history.0[self.thread].try_lock() {
            Ok(kept) => kept,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return keep(&mut self.pending, note, PENDING_MAX, |_| false),
        };
        for note in self.pending.drain(..).chain([note]) {
            kept.push(now, note);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANE: Lane = Lane { backend: BackendId(7), gpu: 1 };

    fn at(ms: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis(ms)
    }

    fn batch(model: u32, (from, to): (i64, i64)) -> Event {
        let (started_at, finished_at) = (at(from), at(to));
        Event::Batch { model: ModelId(model), tasks: 1, window: None, started_at, finished_at }
    }

    fn models(history: &History, since: Timestamp) -> Vec<u32> {
        history.since(since).0.iter().map(|(_, event)| event.model().0).collect()
    }

    #[test]
    fn what_is_told_is_kept_for_a_while_and_never_more_than_may_be() {
        let history = History::new(1);
        let mut recorder = history.recorder(ModelThreadId(0));
        for model in 0..5_000 {
            recorder.note(at(1), LANE, batch(model, (0, 1)));
            recorder.note_dropped(at(1), ModelId(model), DropReason::Deadline);
        }
        let (events, drops) = history.since(Timestamp::PAST);
        assert_eq!((events.len(), drops.len()), (EVENTS_PER_GPU_MAX, DROPS_MAX));
        assert_eq!((events[0].1.model(), drops[0].model), (ModelId(904), ModelId(904)));
        recorder.note(at(10_002), LANE, batch(1, (10_000, 10_001)));
        assert_eq!(models(&history, Timestamp::PAST), [1]);
        assert_eq!(models(&history, at(10_002)), [0; 0]);
        // Another GPU comes: those of which nothing is heard any more go.
        recorder.note(at(30_000), Lane { gpu: 2, ..LANE }, batch(2, (30_000, 30_000)));
        assert_eq!(models(&history, Timestamp::PAST), [2]);
    }

    #[test]
    fn a_thread_waits_for_nobody_who_looks() {
        let history = History::new(2);
        let mut recorder = history.recorder(ModelThreadId(1));
        let looks = history.0[1].lock().unwrap();
        for model in 0..1_100 {
            recorder.note(at(1), LANE, batch(model, (0, 1)));
        }
        drop(looks);
        assert_eq!(models(&history, Timestamp::PAST), [0; 0]);
        recorder.note(at(1), LANE, batch(1_100, (0, 1)));
        let told = models(&history, Timestamp::PAST);
        assert_eq!((told.len(), told[0], told.last()), (PENDING_MAX + 1, 76, Some(&1_100)));
    }

    #[test]
    fn how_busy_a_gpu_was_is_what_its_batches_took_of_a_time() {
        let history = History::new(2);
        let (mut one, mut other) = (history.recorder(ModelThreadId(0)), history.recorder(ModelThreadId(1)));
        one.note(at(500), LANE, batch(1, (0, 500)));
        one.note(at(1_200), LANE, batch(2, (900, 1_200)));
        other.note(at(1_600), LANE, batch(3, (1_500, 1_600)));
        other.note(at(1_600), LANE, Event::Load { model: ModelId(4), started_at: at(1_000), finished_at: at(1_600) });
        let ran = |since, until| history.ran((at(since), at(until)))[&LANE];
        let last = Some((at(1_600), ModelId(3), 1));
        assert_eq!(ran(1_000, 2_000), Ran { busy: Span::from_millis(300), last });
        assert_eq!(ran(1_000, 1_550), Ran { busy: Span::from_millis(250), last });
        assert_eq!(ran(5_000, 6_000), Ran::default());
    }

    #[test]
    fn what_a_backend_cannot_mean_is_cut() {
        let history = History::new(1);
        let mut recorder = history.recorder(ModelThreadId(0));
        for (from, to) in [(Timestamp::PAST, Timestamp::NEVER), (Timestamp::NEVER, Timestamp::PAST)] {
            let event = Event::Load { model: ModelId(0), started_at: from, finished_at: to };
            recorder.note(at(5), LANE, event);
        }
        for (_, event) in history.since(Timestamp::PAST).0 {
            let Event::Load { started_at, finished_at, .. } = event else { panic!("{event:?}") };
            assert!(started_at <= finished_at && finished_at <= at(5) + AHEAD_MAX, "{event:?}");
            assert!(finished_at - started_at <= TAKES_MAX && finished_at >= at(5) - TAKES_MAX, "{event:?}");
        }
    }
}
