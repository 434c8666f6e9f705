//! Weights of GPUs whose memory is short: the primary's orders on their way to a [`Memory`], what that wants done, and
//! what has become of it all.

use std::collections::BTreeMap;

use proto::{
    GpuId, ModelId, ModelThreadId, Timestamp,
    backend_to_scheduler::{BackendToScheduler, RESIDENT_MAX},
    weights::{TALLY_INTERVAL, WeightsTally},
};

use super::{Core, Output, Reader};
use crate::{
    loaded::Loaded,
    memory::{LoadOrder, Memory, MemoryAction},
};

/// The memories of all GPUs; none if weights are there all the time.
#[derive(Debug)]
pub(super) struct Memories {
    gpus: Vec<Gpu>,
    /// What the primary was last told; `None` if nothing yet.
    told: Option<WeightsTally>,
    /// When it may be told again, on this process's clock.
    tell_at: Timestamp,
}

#[derive(Debug)]
struct Gpu {
    memory: Memory,
    /// The name under which a batch came whose weights were not there: once is enough.
    disputed: Option<GpuId>,
}

impl Memories {
    /// So many GPUs with so many pages each, which host these models.
    pub(super) fn new<'a>(
        gpus: usize,
        pages: Option<u32>,
        models: impl Iterator<Item = (ModelId, &'a Loaded)>,
    ) -> Self {
        let gpu = |pages| Gpu { memory: Memory::new(pages), disputed: None };
        let gpus = pages.into_iter().flat_map(|pages| (0..gpus).map(move |_| gpu(pages))).collect();
        let mut memories = Self { gpus, told: None, tell_at: Timestamp::PAST };
        models.for_each(|(model, loaded)| memories.handle_model(Timestamp::PAST, model, Some(loaded)));
        memories
    }

    /// Pages of each; `None` if all weights are there all the time.
    pub(super) fn pages(&self) -> Option<u32> {
        self.gpus.first().map(|gpu| gpu.memory.pages())
    }

    /// Whether weights of a model that was loaded fit a GPU.
    pub(super) fn check(&self, loaded: &Loaded) -> Result<(), String> {
        match self.pages().filter(|&pages| loaded.weights.pages > pages) {
            None => Ok(()),
            Some(pages) => {
                let (name, found) = (&loaded.model.name, loaded.weights.pages);
                Err(format!("the weights of {name} take {found} pages of 16 MiB, and gpu_memory_mb has {pages}"))
            }
        }
    }

    /// A model is hosted from now on, or no more.
    pub(super) fn handle_model(&mut self, now: Timestamp, model: ModelId, loaded: Option<&Loaded>) {
        for (index, gpu) in (0..).zip(&mut self.gpus) {
            let hosted = loaded.filter(|loaded| loaded.gpu_indexes.contains(&index));
            gpu.memory.handle_model(now, model, hosted.map(|loaded| loaded.weights));
        }
    }

    /// The primary's orders do not count any more, and the next one has yet to be told everything.
    pub(super) fn forget_orders(&mut self) {
        self.gpus.iter_mut().for_each(|gpu| gpu.memory.forget_orders());
        self.told = None;
    }

    /// A batch has ended.
    pub(super) fn handle_ran(&mut self, now: Timestamp, gpu: usize) {
        if let Some(gpu) = self.gpus.get_mut(gpu) {
            gpu.memory.handle_ran(now);
        }
    }

    /// Runs every timer that is due.
    pub(super) fn handle_timeout(&mut self, now: Timestamp) {
        let due = self.gpus.iter_mut().filter(|gpu| gpu.memory.poll_timeout() <= now);
        due.for_each(|gpu| gpu.memory.handle_timeout(now));
    }

    /// When [`Self::handle_timeout`] must be called, on the scheduler's clock.
    pub(super) fn poll_timeout(&self) -> Timestamp {
        self.gpus.iter().map(|gpu| gpu.memory.poll_timeout()).min().unwrap_or(Timestamp::NEVER)
    }

    /// When [`Self::poll_tally`] has something to yield, on this process's clock.
    pub(super) fn tells_at(&self) -> Timestamp {
        if self.is_news() { self.tell_at } else { Timestamp::NEVER }
    }

    /// What has become of weights, if the primary is to be told.
    fn poll_tally(&mut self, now: Timestamp) -> Option<WeightsTally> {
        (self.tells_at() <= now).then(|| {
            self.tell_at = now + TALLY_INTERVAL;
            *self.told.insert(self.tally())
        })
    }

    fn is_news(&self) -> bool {
        !self.gpus.is_empty() && self.told != Some(self.tally())
    }

    fn tally(&self) -> WeightsTally {
        self.gpus.iter().fold(WeightsTally::default(), |sum, gpu| sum.plus(gpu.memory.tally()))
    }

    /// The memory that orders call so.
    fn named(&mut self, name: GpuId) -> Option<&mut Memory> {
        self.gpus.iter_mut().map(|gpu| &mut gpu.memory).find(|memory| memory.name() == Some(name))
    }
}

impl Core {
    /// The primary, which is `session`, gives a GPU a name and asks what is in its memory.
    pub(super) fn on_ask_resident(&mut self, now: Timestamp, session: usize, gpu_index: u32, name: GpuId) {
        let scheduler_now = self.scheduler_now(now);
        let Some(gpu) = self.memories.gpus.get_mut(gpu_index as usize) else {
            return self.lose(
                now,
                session,
                format!("it asks what is in the memory of GPU {gpu_index}, which has none"),
            );
        };
        let resident = gpu.memory.handle_asked(scheduler_now, name);
        let ours: BTreeMap<_, _> =
            self.sessions[session].models.iter().map(|(&theirs, &ours)| (ours, theirs)).collect();
        let theirs: Vec<ModelId> = resident.iter().filter_map(|model| ours.get(model).copied()).collect();
        let mut parts = theirs.chunks(RESIDENT_MAX).peekable();
        loop {
            let models = parts.next().unwrap_or_default().to_vec();
            let is_last = parts.peek().is_none();
            self.report(Reader::Scheduler, &BackendToScheduler::Resident { gpu: name, models, is_last });
            if is_last {
                return;
            }
        }
    }

    /// The primary, which is `session`, wants weights in a GPU's memory.
    pub(super) fn on_load_weights(&mut self, now: Timestamp, session: usize, order: LoadOrder) {
        let scheduler_now = self.scheduler_now(now);
        let model = self.sessions[session].models.get(&order.theirs).copied();
        if let Some(memory) = self.memories.named(order.gpu) {
            memory.handle_load(scheduler_now, LoadOrder { model, ..order });
        }
    }

    /// The primary, which is `session`, wants weights to make room.
    pub(super) fn on_unload_weights(&mut self, now: Timestamp, session: usize, (gpu, theirs): (GpuId, ModelId)) {
        let scheduler_now = self.scheduler_now(now);
        let model = self.sessions[session].models.get(&theirs).copied();
        if let (Some(memory), Some(model)) = (self.memories.named(gpu), model) {
            memory.handle_unload(scheduler_now, gpu, model);
        }
    }

    /// A copy that [`Output::CopyWeights`] asked for has ended, well or not.
    pub fn handle_copied(&mut self, now: Timestamp, gpu: usize, is_done: bool) {
        if self.ended.is_none() {
            let scheduler_now = self.scheduler_now(now);
            self.watchdog.handle_copied(scheduler_now, gpu);
            self.memories.gpus[gpu].memory.handle_copied(scheduler_now, is_done);
            self.settle(now);
        }
    }

    /// A copy that [`Output::CopyWeights`] gave out was not taken: the way is still in use by what earlier lives asked
    /// for.
    pub fn handle_copy_stuck(&mut self, now: Timestamp, gpu: usize) {
        let scheduler_now = self.scheduler_now(now);
        self.watchdog.handle_stuck(scheduler_now, gpu);
        self.handle_copied(now, gpu, false);
    }

    /// Whether a batch of the model can run. If its weights are not there, the primary takes them for resident, and is
    /// told.
    pub(super) fn has_weights(&mut self, gpu_index: usize, model: ModelId) -> bool {
        let Some(gpu) = self.memories.gpus.get_mut(gpu_index) else { return true };
        if gpu.memory.handle_run(model) {
            return true;
        }
        if let Some(name) = gpu.memory.name().filter(|name| gpu.disputed != Some(*name)) {
            gpu.disputed = Some(name);
            tracing::warn!(gpu = gpu_index, model = model.0, "a batch came whose weights are not in memory");
            self.report(Reader::Scheduler, &BackendToScheduler::WeightsMissing { gpu: name });
        }
        false
    }

    /// Does what memories want.
    pub(super) fn settle_weights(&mut self, now: Timestamp) {
        for index in 0..self.memories.gpus.len() {
            while let Some(action) = self.memories.gpus[index].memory.poll_action() {
                match action {
                    MemoryAction::Free { model } => self.outputs.push_back(Output::FreeWeights { gpu: index, model }),
                    MemoryAction::Copy { model, takes } => {
                        let scheduler_now = self.scheduler_now(now);
                        self.watchdog.handle_copy_started(index, scheduler_now, takes);
                        self.outputs.push_back(Output::CopyWeights { gpu: index, model, takes });
                    }
                    MemoryAction::Report { gpu, model, outcome } => {
                        let report = BackendToScheduler::WeightsLoaded { gpu, model, outcome };
                        self.report(Reader::ModelThread(ModelThreadId(0)), &report);
                    }
                }
            }
        }
        if self.primary().is_some()
            && let Some(tally) = self.memories.poll_tally(now)
        {
            self.report(Reader::Scheduler, &BackendToScheduler::Weights(tally));
        }
    }
}
