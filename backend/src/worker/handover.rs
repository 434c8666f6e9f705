//! What the GPU is given, and when. A free GPU gets the next batch in its window; one that executes a batch gets one
//! more behind that, so that between the two of a full queue lies nothing but the GPU's own thread.
//!
//! A batch is put behind another one only if nothing could be done better with it until it starts: it is the first of
//! all, its inputs are all here, and its window has opened, or nearly, when the one before should end. If that
//! changes while it waits there, because somebody does not want a task of it any more, another one is to start sooner,
//! its window has ended, or the one before hangs, it is *asked back*. The GPU's thread gives it back unless it has
//! taken it already, and then it is as if it had not been handed over; one that was taken is one that executes. If the
//! one before ends early, it waits alone until its window is near, and is asked back as before. Nothing goes behind one
//! that may yet be given back: what is given back is the last.

use proto::ModelThreadId;

use super::*;

/// Batches that a GPU has at most: the one that executes, and one behind it.
pub const HANDED_MAX: usize = 2;

/// A batch that the GPU has.
#[derive(Debug)]
pub(super) struct Handed {
    /// Its buffer.
    pub(super) buffer: usize,
    /// When it should end, if it is the one that executes.
    ends_at: Timestamp,
    /// Its inputs went ahead, and are still those that were sent if it comes back.
    ahead: Option<Ahead>,
    /// A task of it is to be run again when it has ended.
    has_sample: bool,
    /// It was asked back. If it was not given back, it executes next.
    is_asked_back: bool,
}

impl Worker {
    /// The first of all that wait for the GPU: the soonest, and of equals the one that was planned first (Clockwork,
    /// section 5.2: chronologically by the earliest start).
    pub(super) fn first_pending(&self) -> Option<(usize, &Batch)> {
        self.pending().min_by_key(|(_, batch)| batch.order())
    }

    fn pending(&self) -> impl Iterator<Item = (usize, &Batch)> {
        let batches = self.buffers.iter().enumerate().filter_map(|(buffer, batch)| Some((buffer, batch.as_ref()?)));
        batches.filter(|(_, batch)| batch.phase == Phase::Pending)
    }

    /// The batch that a free GPU starts next, and when, as things stand. Only the first of all is handed over ahead of
    /// its window: others would take the GPU from one that is still being fetched.
    pub(super) fn next_start(&self) -> Option<(usize, Timestamp)> {
        if !self.handed.is_empty() {
            return None;
        }
        let mut pending: Vec<_> = self.pending().collect();
        pending.sort_unstable_by_key(|(_, batch)| batch.order());
        let handover = |order| if order == 0 { self.handover } else { Span::ZERO };
        let starts = pending.into_iter().enumerate();
        let starts = starts.filter_map(|(order, (buffer, batch))| Some((buffer, batch.start_at(handover(order))?)));
        starts.min_by_key(|(_, at)| *at)
    }

    pub(super) fn start_next(&mut self, now: Timestamp) {
        if let Some((buffer, _)) = self.next_start().filter(|(_, at)| *at <= now) {
            self.hand_over(now, buffer);
        }
    }

    /// The model of the batch that can be put behind the one that executes now: [`Self::hand_over_next`] does it.
    #[must_use]
    pub fn next_model(&self, now: Timestamp) -> Option<ModelId> {
        let (buffer, at) = self.next_behind()?;
        (at <= now).then(|| self.buffers[buffer].as_ref().expect("it is pending").plan.model)
    }

    /// Puts that batch behind the one that executes.
    pub fn hand_over_next(&mut self, now: Timestamp) {
        if let Some((buffer, _)) = self.next_behind().filter(|(_, at)| *at <= now) {
            self.looked_at = now;
            self.hand_over(now, buffer);
        }
    }

    /// When [`Self::next_model`] has something to say for the first time, if time alone decides that.
    pub(super) fn queues_at(&self) -> Option<Timestamp> {
        self.next_behind().map(|(_, at)| at).filter(|&at| at > self.looked_at)
    }

    /// The batch that can be put behind the one that executes, and since when.
    fn next_behind(&self) -> Option<(usize, Timestamp)> {
        let front = self.handed.front().filter(|front| self.handed.len() < HANDED_MAX && !front.is_asked_back)?;
        // Nobody knows when one that hangs will end.
        self.buffers[front.buffer].as_ref().filter(|batch| batch.phase == Phase::Executing)?;
        let (buffer, batch) = self.first_pending()?;
        let start_at = batch.start_at(self.handover).filter(|_| batch.is_complete())?;
        let at = if start_at <= front.ends_at { Timestamp::PAST } else { start_at };
        Some((buffer, at.max(self.taken_at(front))))
    }

    /// When the GPU's thread takes a batch that nothing executes before.
    fn taken_at(&self, handed: &Handed) -> Timestamp {
        self.buffers[handed.buffer].as_ref().map_or(Timestamp::PAST, |batch| batch.plan.exec_at - self.handover)
    }

    fn hand_over(&mut self, now: Timestamp, buffer: usize) {
        let batch = self.batch_mut(buffer);
        batch.phase = Phase::Executing;
        let waited_for = batch.waited_for(now);
        batch.leave_stragglers();
        let tasks = batch.indexes_in(Progress::Fetched);
        for &index in &tasks {
            batch.tasks[index].progress = Progress::Executing;
        }
        let (runs, ends_at) = (batch.runs_of(&tasks), batch.ends_at(now));
        let BatchPlan { plan, model, exec_at, latest, sample, .. } = batch.plan;
        let sample = sample.and_then(|sample| tasks.iter().position(|&task| task == usize::from(sample)));
        // An inherited plan has a name that nobody knows a sample by.
        let sample = sample.filter(|_| plan.model_thread() != ModelThreadId::INHERITED).map(|place| (place, plan));
        let sample = sample.filter(|_| self.is_nothing_pending());
        let went = self.ahead.take_if(|ahead| ahead.buffer == buffer);
        let ahead = went.as_ref().filter(|ahead| ahead.runs == runs).map(|ahead| ahead.number);
        let has_sample = sample.is_some();
        self.handed.push_back(Handed { buffer, ends_at, ahead: went, has_sample, is_asked_back: false });
        self.actions.push_back(Action::Execute { buffer, model, runs, exec_at, latest, ahead, sample });
        self.tell_waited(waited_for);
    }

    /// Whether the GPU has nothing, and nothing is planned that could begin before then.
    #[must_use]
    pub fn is_free_until(&self, then: Timestamp) -> bool {
        let mut pending = self.pending().map(|(_, batch)| batch).chain(&self.waiting);
        self.handed.is_empty() && !pending.any(|batch| batch.phase == Phase::Pending && batch.plan.exec_at < then)
    }

    fn is_nothing_pending(&self) -> bool {
        self.waiting.is_empty() && self.pending().next().is_none()
    }

    /// What the GPU was given first has ended, and the one behind it begins. Yields the buffer.
    pub(super) fn on_handed_ended(&mut self, now: Timestamp) -> usize {
        let Handed { buffer, .. } = self.handed.pop_front().expect("an execution ends only after it was asked for");
        if let Some(next) = self.handed.front_mut() {
            // Whoever was about to ask for it does not any more.
            next.is_asked_back = false;
            next.ends_at = self.buffers[next.buffer].as_ref().expect("the GPU has it").ends_at(now);
        }
        buffer
    }

    /// Asks for the batch behind the one that executes, or that waits alone, if it should not be there any more.
    pub(super) fn ask_back(&mut self, now: Timestamp) {
        let is_due = self.untaken(now).is_some_and(|(_, batch)| batch.reject_at() <= now || self.is_unfit(now));
        if is_due && let Some(handed) = self.handed.back_mut() {
            handed.is_asked_back = true;
            self.actions.push_back(Action::TakeBack);
        }
    }

    /// When [`Self::ask_back`] must be looked at although nothing else happens.
    pub(super) fn asks_back_at(&self) -> Option<Timestamp> {
        self.behind().map(|(_, behind)| behind.reject_at())
    }

    /// The batch behind the one that executes, unless it was asked back.
    fn behind(&self) -> Option<(&Handed, &Batch)> {
        let handed = self.handed.get(1).filter(|handed| !handed.is_asked_back)?;
        Some((handed, self.buffers[handed.buffer].as_ref()?))
    }

    /// The same, or the one that is alone there and waits for its window.
    fn untaken(&self, now: Timestamp) -> Option<(&Handed, &Batch)> {
        let waits = |handed: &&Handed| self.handed.len() == 1 && !handed.is_asked_back && now < self.taken_at(handed);
        let alone = self.handed.front().filter(waits);
        self.behind().or_else(|| alone.and_then(|handed| Some((handed, self.buffers[handed.buffer].as_ref()?))))
    }

    fn is_unfit(&self, now: Timestamp) -> bool {
        let Some((handed, batch)) = self.untaken(now) else { return false };
        let front = self.handed.front().and_then(|front| self.buffers[front.buffer].as_ref());
        let hangs = front.is_some_and(|front| front.phase == Phase::Abandoned);
        let is_part = |task: &&Task| task.progress == Progress::Executing;
        hangs
            || batch.tasks.iter().filter(is_part).any(|task| !task.is_wanted())
            || self.first_pending().is_some_and(|(_, first)| first.order() < batch.order())
            || (handed.has_sample && !self.is_nothing_pending())
    }

    /// The GPU gave back what [`Action::TakeBack`] asked for: it waits as before.
    ///
    /// # Panics
    /// If the GPU has none.
    pub fn handle_taken_back(&mut self, now: Timestamp) {
        let Handed { buffer, ahead, .. } = self.handed.pop_back().expect("only what was handed over is given back");
        self.ahead = ahead.or(self.ahead.take());
        let batch = self.batch_mut(buffer);
        batch.phase = Phase::Pending;
        let mut cancelled = Vec::new();
        for index in batch.indexes_in(Progress::Executing) {
            match batch.tasks[index] {
                Task { cut_off: true, .. } => batch.end_undelivered(index),
                Task { cancelled: true, .. } => {
                    batch.tasks[index].progress = Progress::Ended;
                    cancelled.push(batch.plan.tasks[index].task);
                }
                Task { .. } => batch.tasks[index].progress = Progress::Fetched,
            }
        }
        let plan = batch.plan.plan;
        cancelled.into_iter().for_each(|task| self.report(BackendToModelThread::Cancelled { plan, task }));
        self.on_change(now);
    }
}

impl Batch {
    /// Batches start in this order.
    fn order(&self) -> (Timestamp, PlanId) {
        (self.plan.exec_at, self.plan.plan)
    }

    /// When it should end, if it starts as soon as it may.
    fn ends_at(&self, now: Timestamp) -> Timestamp {
        self.plan.exec_at.max(now) + self.takes
    }
}
