//! Weights of GPUs whose memory is short: the primary's orders on their way to a [`Memory`], what that wants done, and
//! what has become of it all.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proto::{
    GpuId, ModelId, Span, Timestamp, Weights,
    backend_to_scheduler::{BackendToControl, BackendToModelThread, RESIDENT_MAX, ResidentModel},
    host_memory::{HostMemory, Moved},
    weights::{TALLY_INTERVAL, WeightsTally},
};

use super::{Core, Output, word::Word};
use crate::{
    executor::Loaded,
    memory::{Hosted, LoadOrder, Memory, MemoryAction},
};

/// The memories of all GPUs; none if weights are there all the time.
#[derive(Debug)]
pub(super) struct Memories {
    gpus: Vec<Gpu>,
    /// What lies before them, if that is bounded.
    host: Option<Host>,
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

/// Host memory that holds a part of what is hosted.
#[derive(Debug)]
struct Host {
    memory: HostMemory,
    /// Models that the primary takes for being on disk only.
    told: BTreeSet<ModelId>,
    /// Models that it may be wrong about.
    changed: BTreeSet<ModelId>,
    /// Models that have left it, or a GPU's memory: if they are nowhere, what runs them may let go of their weights.
    left: BTreeSet<ModelId>,
}

impl Host {
    fn new(pages: u32) -> Self {
        let (told, changed, left) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        Self { memory: HostMemory::new(pages), told, changed, left }
    }

    fn settle(&mut self) {
        while let Some(Moved { model, is_there }) = self.memory.poll_moved() {
            self.changed.insert(model);
            self.left.extend((!is_there).then_some(model));
        }
    }

    /// What the primary does not know: models that have come, and those that have gone.
    fn take_news(&mut self) -> [BTreeSet<ModelId>; 2] {
        let (mut come, mut gone) = (BTreeSet::new(), BTreeSet::new());
        for model in std::mem::take(&mut self.changed) {
            if self.memory.holds(model) {
                come.extend(self.told.take(&model));
            } else if self.told.insert(model) {
                gone.insert(model);
            }
        }
        [come, gone]
    }
}

impl Memories {
    /// So many GPUs with so many pages each, and host memory with as many as are said, which host these models.
    pub(super) fn new<'a>(
        gpus: usize,
        (pages, host): (Option<u32>, Option<u32>),
        models: impl Iterator<Item = (ModelId, &'a Loaded)>,
    ) -> Self {
        let gpu = |pages| Gpu { memory: Memory::new(pages), disputed: None };
        let gpus = pages.into_iter().flat_map(|pages| (0..gpus).map(move |_| gpu(pages))).collect();
        let mut memories = Self { gpus, host: host.map(Host::new), told: None, tell_at: Timestamp::PAST };
        models.for_each(|(model, loaded)| memories.handle_model(Timestamp::PAST, model, Some(loaded)));
        memories
    }

    /// Pages of each; `None` if all weights are there all the time.
    pub(super) fn pages(&self) -> Option<u32> {
        self.gpus.first().map(|gpu| gpu.memory.pages())
    }

    /// Whether weights of a model that was loaded fit its GPUs, beside what stays there.
    pub(super) fn check(&self, loaded: &Loaded) -> Result<(), String> {
        let (name, found) = (&loaded.model.name, loaded.weights.pages);
        for &index in &loaded.gpu_indexes {
            let Some(Gpu { memory, .. }) = self.gpus.get(index as usize) else { continue };
            let (pinned, largest) = memory.claims();
            let beside = if loaded.is_pinned { largest } else { 0 };
            let left = memory.pages().saturating_sub(pinned + beside);
            if found > left {
                let pages = memory.pages();
                return Err(format!(
                    "the weights of {name} take {found} pages of 16 MiB, and gpu_memory_mb has {left} of {pages} for \
                     them beside what stays there (key pinned)"
                ));
            }
        }
        Ok(())
    }

    /// A model is hosted from now on, or no more.
    pub(super) fn handle_model(&mut self, now: Timestamp, model: ModelId, loaded: Option<&Loaded>) {
        for (index, gpu) in (0..).zip(&mut self.gpus) {
            let hosted = loaded.filter(|loaded| loaded.gpu_indexes.contains(&index));
            let hosted = hosted.map(|loaded| Hosted { weights: loaded.weights, is_pinned: loaded.is_pinned });
            gpu.memory.handle_model(now, model, hosted);
        }
        let Some(Host { memory, told, .. }) = &mut self.host else { return };
        memory.remove(model);
        match loaded.map(|loaded| loaded.weights.pages) {
            // It has just been read.
            Some(pages) if pages > 0 => memory.insert(model, pages),
            Some(_) => {}
            None => drop(told.remove(&model)),
        }
    }

    /// A copy into a GPU's memory begins. How long the weights are read from disk for before, if they are.
    fn begin_read(&mut self, model: ModelId, weights: Weights) -> Option<Span> {
        let host = self.host.as_mut()?;
        (!host.memory.begin(model, weights.pages)).then_some(weights.read)
    }

    /// Models that are in no memory any more.
    fn take_gone(&mut self) -> Vec<ModelId> {
        let Some(host) = &mut self.host else { return Vec::new() };
        host.settle();
        let gpus = &self.gpus;
        let is_anywhere = |model: ModelId| host.memory.holds(model) || gpus.iter().any(|gpu| gpu.memory.holds(model));
        let left = std::mem::take(&mut host.left);
        left.into_iter().filter(|&model| !is_anywhere(model)).collect()
    }

    /// The primary's orders do not count any more, and the next one has yet to be told everything.
    pub(super) fn forget_orders(&mut self) {
        self.gpus.iter_mut().for_each(|gpu| gpu.memory.forget_orders());
        self.told = None;
        if let Some(host) = &mut self.host {
            host.changed.append(&mut host.told);
        }
    }

    /// A batch has ended.
    pub(super) fn handle_ran(&mut self, now: Timestamp, gpu: usize) {
        if let Some(gpu) = self.gpus.get_mut(gpu) {
            gpu.memory.handle_ran(now);
        }
    }

    /// A batch that was handed over last was taken back.
    pub(super) fn handle_taken_back(&mut self, now: Timestamp, gpu: usize) {
        if let Some(gpu) = self.gpus.get_mut(gpu) {
            gpu.memory.handle_taken_back(now);
        }
    }

    /// Whether a batch of the model could run now.
    pub(super) fn has_weights(&self, gpu: usize, model: ModelId) -> bool {
        self.gpus.get(gpu).is_none_or(|gpu| gpu.memory.can_run(model))
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
        let host = self.host.as_ref().map_or((0, 0), |host| (host.memory.pages(), host.memory.pages_used()));
        let (host_pages, host_pages_used) = (host.0.into(), host.1.into());
        let host = WeightsTally { host_pages, host_pages_used, ..WeightsTally::default() };
        self.gpus.iter().fold(host, |sum, gpu| sum.plus(gpu.memory.tally()))
    }

    /// The memory that orders call so.
    fn named(&mut self, name: GpuId) -> Option<&mut Memory> {
        self.gpus.iter_mut().map(|gpu| &mut gpu.memory).find(|memory| memory.name() == Some(name))
    }
}

/// A scheduler's names of our models.
fn their_names(word: &Word) -> BTreeMap<ModelId, ModelId> {
    word.models.iter().map(|(&theirs, &ours)| (ours, theirs)).collect()
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
        gpu.memory.handle_asked(scheduler_now, name);
    }

    /// Tells the primary, which is `session`, what is in a GPU's memory.
    fn report_resident(&mut self, session: usize, name: GpuId, resident: &[ResidentModel]) {
        let ours = their_names(&self.membership[session].word);
        let theirs = |resident: &ResidentModel| Some(ResidentModel { model: *ours.get(&resident.model)?, ..*resident });
        let theirs: Vec<_> = resident.iter().filter_map(theirs).collect();
        let mut parts = theirs.chunks(RESIDENT_MAX).peekable();
        loop {
            let models = parts.next().unwrap_or_default().to_vec();
            let is_last = parts.peek().is_none();
            self.report(&BackendToControl::Resident { gpu: name, models, is_last });
            if is_last {
                return;
            }
        }
    }

    /// Tells the primary, which is `session`, what has come into host memory and what has left it.
    fn report_host_memory(&mut self, session: usize) {
        let Some(host) = self.memories.host.as_mut().filter(|host| !host.changed.is_empty()) else { return };
        let hosted = &self.hosting.models;
        host.changed.retain(|model| hosted.contains_key(model));
        let news = host.take_news();
        let ours = their_names(&self.membership[session].word);
        for (models, is_there) in news.iter().zip([true, false]) {
            let theirs: Vec<ModelId> = models.iter().filter_map(|model| ours.get(model).copied()).collect();
            for models in theirs.chunks(RESIDENT_MAX) {
                let models = models.to_vec();
                self.report(&BackendToControl::InHostMemory { models, is_there });
            }
        }
    }

    /// The primary, which is `session`, wants weights in a GPU's memory.
    pub(super) fn on_load_weights(&mut self, now: Timestamp, session: usize, order: LoadOrder) {
        let scheduler_now = self.scheduler_now(now);
        let model = self.membership[session].word.models.get(&order.theirs).copied();
        if let Some(memory) = self.memories.named(order.gpu) {
            memory.handle_load(scheduler_now, LoadOrder { model, ..order });
        }
    }

    /// The primary, which is `session`, wants weights to make room.
    pub(super) fn on_unload_weights(&mut self, now: Timestamp, session: usize, (gpu, theirs): (GpuId, ModelId)) {
        let scheduler_now = self.scheduler_now(now);
        let model = self.membership[session].word.models.get(&theirs).copied();
        if let (Some(memory), Some(model)) = (self.memories.named(gpu), model) {
            memory.handle_unload(scheduler_now, gpu, model);
        }
    }

    /// A copy that [`Output::CopyWeights`] asked for has ended: with how much of its time the weights were read from
    /// disk for, or, with `None`, without success.
    pub fn handle_copied(&mut self, now: Timestamp, gpu: usize, read: Option<Span>) {
        if self.ended.is_none() {
            let scheduler_now = self.scheduler_now(now);
            self.watchdog.handle_copied(scheduler_now, gpu);
            let model = self.memories.gpus[gpu].memory.handle_copied(scheduler_now, read);
            if let Some(host) = &mut self.memories.host {
                host.memory.end(model, read.is_some());
                host.left.insert(model);
            }
            self.settle(now);
        }
    }

    /// A copy that [`Output::CopyWeights`] gave out was not taken: the way is still in use by what earlier lives asked
    /// for.
    pub fn handle_copy_stuck(&mut self, now: Timestamp, gpu: usize) {
        let scheduler_now = self.scheduler_now(now);
        self.watchdog.handle_stuck(scheduler_now, gpu);
        self.handle_copied(now, gpu, None);
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
            self.report(&BackendToControl::WeightsMissing { gpu: name });
        }
        false
    }

    /// Does what memories want.
    pub(super) fn settle_weights(&mut self, now: Timestamp) {
        for index in 0..self.memories.gpus.len() {
            while let Some(action) = self.memories.gpus[index].memory.poll_action() {
                match action {
                    MemoryAction::Free { model } => {
                        if let Some(host) = &mut self.memories.host {
                            host.left.insert(model);
                        }
                        let executor = self.hosting.models.get(&model).map(|loaded| Arc::clone(&loaded.executor));
                        self.outputs.push_back(Output::FreeWeights { gpu: index, model, executor });
                    }
                    MemoryAction::Copy { model, takes } => {
                        let scheduler_now = self.scheduler_now(now);
                        let Some(loaded) = self.hosting.models.get(&model) else {
                            // It has just gone.
                            self.memories.gpus[index].memory.handle_copied(scheduler_now, None);
                            continue;
                        };
                        let executor = Arc::clone(&loaded.executor);
                        let read = self.memories.begin_read(model, loaded.weights);
                        let all = takes + read.unwrap_or(Span::ZERO);
                        self.watchdog.handle_copy_started(index, scheduler_now, all);
                        self.outputs.push_back(Output::CopyWeights { gpu: index, model, executor, takes, read });
                    }
                    MemoryAction::Report { gpu, model, outcome } => {
                        self.report_to_thread(now, BackendToModelThread::WeightsLoaded { gpu, model, outcome });
                    }
                }
            }
        }
        let gone = self.memories.take_gone();
        let gone = gone.iter().filter_map(|model| self.hosting.models.get(model));
        // It goes with the output: the model may be hosted anew before that is looked at.
        let releases = gone.map(|loaded| Output::ReleaseWeights { executor: Arc::clone(&loaded.executor) });
        self.outputs.extend(releases);
        let Some(primary) = self.primary() else { return };
        self.report_host_memory(primary);
        for index in 0..self.memories.gpus.len() {
            let memory = &mut self.memories.gpus[index].memory;
            if let Some((resident, name)) = memory.poll_answer().zip(memory.name()) {
                self.report_resident(primary, name, &resident);
            }
        }
        if let Some(tally) = self.memories.poll_tally(now) {
            self.report(&BackendToControl::Weights(tally));
        }
    }
}
