//! What a primary has learned and no member could tell the next one: how long executions and the network take, and the
//! averages of policies. Whoever is to take over in good order is told; after a death all is learned anew.
//!
//! What is told is about what both know by name: models, and the GPUs of backends. The reader looks it up, checks that
//! it can be, and drops the rest; it decides when batches run, never whose they are.

use proto::{
    GpuId, ModelId, Span, Timestamp,
    scheduler_to_scheduler::{FACTORS_MAX, LearnedFactor, LearnedModel, LearnedNetwork, SchedulerToScheduler},
};

use super::{Control, ControlOutput, PeerOutput};
use crate::news::{ControlToShard, Learned};

/// What is told at once: half of what a connection has room for. What is beyond is learned anew.
const TOLD_BYTES_MAX: usize = 256 * 1024;

/// Who is to be the primary.
#[derive(Debug)]
pub(super) struct Heir {
    rank: u16,
    /// ModelThreads that have yet to say what they have learned.
    threads: u16,
    ctrl: Option<Span>,
    /// Bytes that may still be told.
    bytes: usize,
}

impl Control {
    /// Another scheduler is to be the primary: it is told what we have learned, then that it may take over.
    pub(super) fn hand_over_to(&mut self, rank: u16) {
        let threads = self.config.model_threads;
        self.takeover.heir = Some(Heir { rank, threads, ctrl: None, bytes: TOLD_BYTES_MAX });
        self.tell_shards(|| ControlToShard::TellLearned);
    }

    /// What a ModelThread has learned.
    pub(super) fn on_thread_told(&mut self, ctrl: Option<Span>, models: Vec<(ModelId, Learned)>) {
        let Some(mut heir) = self.takeover.heir.take() else { return };
        heir.threads = heir.threads.saturating_sub(1);
        heir.ctrl = heir.ctrl.max(ctrl);
        for (model, learned) in models {
            for told in self.told(model, &learned) {
                let bytes = wincode::serialized_size(&told).map_or(usize::MAX, |bytes| bytes as usize);
                if let Some(left) = heir.bytes.checked_sub(bytes) {
                    heir.bytes = left;
                    self.tell_heir(heir.rank, SchedulerToScheduler::LearnedModel(told));
                }
            }
        }
        if heir.threads > 0 {
            self.takeover.heir = Some(heir);
            return;
        }
        let network = LearnedNetwork { ctrl: heir.ctrl, resp: self.resp.learned() };
        self.tell_heir(heir.rank, SchedulerToScheduler::LearnedNetwork(network));
        self.tell_heir(heir.rank, SchedulerToScheduler::HandOver);
        self.takeover.is_handed_over = true;
    }

    fn tell_heir(&mut self, rank: u16, message: SchedulerToScheduler) {
        self.outputs.push_back(ControlOutput::Peer(PeerOutput::Answer(rank, message)));
    }

    /// What was learned of a model, by names that all schedulers know.
    fn told(&self, model: ModelId, learned: &Learned) -> Vec<LearnedModel> {
        let Some(entry) = self.members.models.get(model.0 as usize) else { return Vec::new() };
        let named = |&(gpu, thousandths): &(GpuId, u32)| {
            let gpu = self.members.gpus.get(&gpu)?;
            Some(LearnedFactor { backend: gpu.backend, gpu_index: gpu.index, thousandths })
        };
        let factors: Vec<LearnedFactor> = learned.factors.iter().filter_map(named).collect();
        let told = |factors: &[LearnedFactor], data, averages| {
            let (name, version) = (entry.name.clone(), entry.version.clone());
            LearnedModel { name, version, factors: factors.to_vec(), data, averages }
        };
        let (first, rest) = factors.split_at(factors.len().min(FACTORS_MAX));
        let mut all = vec![told(first, learned.data, learned.averages)];
        all.extend(rest.chunks(FACTORS_MAX).map(|factors| told(factors, None, None)));
        all
    }

    /// What the primary has learned of a model.
    pub(super) fn on_learned_model(&mut self, told: LearnedModel) {
        let LearnedModel { name, version, factors, data, averages } = told;
        let mut models = self.members.models.iter();
        let Some(model) = models.position(|entry| entry.name == name && entry.version == version) else { return };
        let known = |factor: LearnedFactor| {
            let backend = self.members.backends.get(&factor.backend)?;
            Some((*backend.gpus.get(factor.gpu_index as usize)?, factor.thousandths))
        };
        let factors = factors.into_iter().filter_map(known).collect();
        let (model, learned) = (ModelId(model as u32), Learned { factors, data, averages });
        self.tell_owner(model, ControlToShard::Learned(model, Box::new(learned)));
    }

    /// What the network took the primary.
    pub(super) fn on_learned_network(&mut self, now: Timestamp, told: LearnedNetwork) {
        if told.resp.is_some_and(|resp| self.resp.handle_learned(now, resp)) {
            self.on_resp_changed();
        }
        if let Some(ctrl) = told.ctrl {
            self.tell_shards(|| ControlToShard::LearnedCtrl(ctrl));
        }
    }
}
