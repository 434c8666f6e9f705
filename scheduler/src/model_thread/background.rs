//! Step 4, Step 6 for tasks that have no objective: they wait in the order of their arrival, and the RankThread says
//! when a GPU may run some of them and until when. Those of a dynamic model, whatever their applications are, are taken
//! to need what nearly none of its batches exceeds.

use super::*;

/// Weight of a batch in what is usual, unless it is larger, or its head had less time.
const USUAL_WEIGHT: f64 = 1.0 / 16.0;

/// How late a batch may start. None of its tasks is ever too late, and what is rejected would be lost: only who stands
/// still for so long, and is given up by all others before, rejects it. It ends so that a batch that hangs is noticed.
const WINDOW: Span = Span::from_millis(5_000);

/// What the batches of tasks with an objective are like.
#[derive(Debug)]
pub(super) struct Usual {
    /// Tasks; nearly the most of late.
    size: f64,
    rounded: usize,
    /// [`Candidate::patience`].
    pub(super) patience: Span,
}

/// A model that was never asked for.
impl Default for Usual {
    fn default() -> Self {
        Self { size: 1.0, rounded: 1, patience: Span::ENDLESS }
    }
}

impl Usual {
    /// A batch was planned, whose head could have waited so long from its arrival on.
    pub(super) fn handle_planned(&mut self, size: usize, patience: Span) {
        let size = size as f64;
        self.size = size.max(self.size + USUAL_WEIGHT * (size - self.size));
        self.rounded = self.size.round() as usize;
        let longer =
            (self.patience.as_nanos() as f64) * (1.0 - USUAL_WEIGHT) + patience.as_nanos() as f64 * USUAL_WEIGHT;
        self.patience = patience.min(Span(longer as i64));
    }

    /// What a batch grows to that is held back: the largest one never is.
    pub(super) fn size(&self, max_batch: usize) -> usize {
        self.rounded.min(max_batch - 1)
    }
}

/// Tasks of a model that have no objective.
#[derive(Debug)]
pub(super) struct Waiting<P> {
    /// Oldest first, as all have the same deadline.
    pub(super) queue: TaskQueue<P>,
    pub(super) grants_seen: u32,
    /// As the RankThread was told last, or is about to be.
    told: Option<Background>,
    is_changed: bool,
}

impl<P> Waiting<P> {
    pub(super) fn new(length_max: usize) -> Self {
        Self { queue: TaskQueue::new(length_max), grants_seen: 0, told: None, is_changed: false }
    }
}

impl<P> ModelThread<P> {
    /// The RankThread is to know of the oldest task, and of how many could run at once.
    pub(super) fn update_background(&mut self, id: ModelId) {
        let Some(Model { background, times, dynamic, .. }) = self.models[id.0 as usize].as_deref_mut() else { return };
        let Times { profile, .. } = dynamic.as_ref().map_or_else(|| times.common(), |dynamic| &dynamic.longest);
        let size = background.queue.keys().len().min(profile.max_batch());
        let news = background.queue.keys().front().map(|oldest| Background {
            size: size as u32,
            since: oldest.queued_at,
            least: profile.latency(1),
            most: profile.latency(size),
            grants_seen: background.grants_seen,
        });
        if background.told != news {
            background.told = news;
            if !std::mem::replace(&mut background.is_changed, true) {
                self.changed_background.push_back(id);
            }
        }
    }

    pub(super) fn poll_background(&mut self) -> Option<Output<P>> {
        let id = self.changed_background.pop_front()?;
        let background = &mut self.models[id.0 as usize].as_mut().expect("only known models change").background;
        background.is_changed = false;
        Some(Output::Background(id, background.told))
    }

    /// A GPU may run as many of the tasks as it has done by `until`.
    pub(super) fn on_background_grant(&mut self, now: Timestamp, grant: Grant, until: Timestamp) {
        let Grant { model: id, gpu, free_at, timer_at, .. } = grant;
        let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return self.outputs.push_back(Output::Gpu(gpu, GpuUpdate::Returned));
        };
        model.background.grants_seen = model.background.grants_seen.wrapping_add(1);
        let queue = &mut model.background.queue;
        let waiting = queue.keys().len();
        let times = model.dynamic.as_ref().map_or_else(|| model.times.of(gpu), |dynamic| &dynamic.longest);
        let view = view((now, free_at), queue.keys(), times, (model.jitter, model.price));
        let size = if waiting == 0 { 0 } else { view.longest_batch_by(until, waiting) };
        let update = if size == 0 {
            GpuUpdate::Returned
        } else {
            let (exec_at, execution) = (view.earliest_start(size), view.profile.latency(size));
            let (latest, tasks) = (exec_at + WINDOW, queue.take(0..size));
            // Nothing is held back.
            let due_at = Timestamp::PAST;
            let batch = Batch { model: id, gpu, due_at, timer_at, exec_at, latest, execution, tasks };
            self.outputs.push_back(Output::Batch(batch));
            GpuUpdate::Planned { exec_at, free_at: exec_at + execution, is_certain: model.dynamic.is_none() }
        };
        self.outputs.push_back(Output::Gpu(gpu, update));
        self.update_background(id);
    }
}
