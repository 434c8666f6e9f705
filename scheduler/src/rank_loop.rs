//! Step 5 on a thread of its own: the RankThread with the mailboxes of all ModelThreads and control's news.

use std::collections::{BTreeMap, BTreeSet};

use proto::{GpuId, ModelThreadId, Timestamp};

use crate::{
    mailbox::{FromModelThread, FromRankThread, RankEnd},
    messages::NetworkBudget,
    news::ControlToRank,
    rank_thread::RankThread,
};

/// The RankThread without its clock.
#[derive(Debug)]
pub struct RankLoop {
    rank: RankThread,
    /// By ModelThread.
    ends: Vec<RankEnd>,
    /// By model.
    owners: Vec<ModelThreadId>,
    /// ModelThreads that were posted something since [`Self::take_told`].
    told: BTreeSet<ModelThreadId>,
    /// GPUs that left and may come back: when what they were given will have ended.
    away: BTreeMap<GpuId, Timestamp>,
}

impl RankLoop {
    /// Without models and GPUs.
    #[must_use]
    pub fn new(budget: NetworkBudget, ends: Vec<RankEnd>) -> Self {
        let (owners, told, away) = (Vec::new(), BTreeSet::new(), BTreeMap::new());
        Self { rank: RankThread::new(budget), ends, owners, told, away }
    }

    /// What control says.
    pub fn handle_news(&mut self, now: Timestamp, news: ControlToRank) {
        match news {
            ControlToRank::Model(model, owner) => {
                let index = model.0 as usize;
                if self.owners.len() <= index {
                    self.owners.resize(index + 1, ModelThreadId(0));
                }
                self.owners[index] = owner;
            }
            ControlToRank::Budget(model, budget) => self.rank.handle_model_budget(model, budget),
            ControlToRank::Move(model, to) => {
                let former = std::mem::replace(&mut self.owners[model.0 as usize], to);
                self.rank.handle_model_moved(model);
                self.ends[usize::from(former.0)].post(FromRankThread::Release(model));
                self.told.insert(former);
            }
            ControlToRank::GpuBusy(gpu, until) => {
                let free_at = self.away.entry(gpu).or_insert(until);
                *free_at = until.max(*free_at);
            }
            ControlToRank::Weights(model, weights) => self.rank.handle_weights(model, weights),
            ControlToRank::GpuJoined { gpu, models, memory } => {
                let free_at = self.away.remove(&gpu).map_or(now, |at| at.max(now));
                self.rank.handle_gpu_joined(free_at, gpu, models, memory);
            }
            ControlToRank::HostMemory { gpus, models, is_there } => {
                for (&gpu, &model) in gpus.iter().flat_map(|gpu| models.iter().map(move |model| (gpu, model))) {
                    self.rank.handle_host_memory(gpu, model, is_there);
                }
            }
            ControlToRank::GpuLeft(gpu) => {
                let free_at = self.rank.handle_gpu_left(gpu);
                self.away.extend(free_at.map(|at| (gpu, at)));
            }
            ControlToRank::GpuRenamed { old, new } => {
                let free_at = self.away.remove(&old);
                self.away.extend(free_at.map(|at| (new, at)));
            }
            ControlToRank::GpuGone(gpu) => drop(self.away.remove(&gpu)),
        }
    }

    /// Takes in what ModelThreads have posted, fires timers, and posts grants. True if there was anything to do.
    pub fn turn(&mut self, now: Timestamp) -> bool {
        let mut is_busy = false;
        for (thread, end) in (0..).map(ModelThreadId).zip(&mut self.ends) {
            while let Some(message) = end.poll() {
                is_busy = true;
                match message {
                    FromModelThread::Gpu(gpu, update) => self.rank.handle_gpu(gpu, update),
                    // Of a model that it was told to release, and has not heard so yet.
                    FromModelThread::Candidate(model, _) | FromModelThread::Background(model, _)
                        if self.owners.get(model.0 as usize) != Some(&thread) => {}
                    FromModelThread::Candidate(model, candidate) => self.rank.handle_candidate(now, model, candidate),
                    FromModelThread::Background(model, background) => self.rank.handle_background(model, background),
                }
            }
        }
        if self.rank.poll_timeout().is_some_and(|at| at <= now) {
            is_busy = true;
            self.rank.handle_timeout(now);
        }
        while let Some((model, message)) = self.rank.poll_message() {
            is_busy = true;
            let owner = self.owners[model.0 as usize];
            self.ends[usize::from(owner.0)].post(message);
            self.told.insert(owner);
        }
        while let Some((model, price)) = self.rank.poll_price() {
            let owner = self.owners[model.0 as usize];
            self.ends[usize::from(owner.0)].post_price(model, price);
        }
        for end in &mut self.ends {
            is_busy |= end.flush();
        }
        is_busy
    }

    /// Whom to wake.
    pub fn take_told(&mut self) -> BTreeSet<ModelThreadId> {
        std::mem::take(&mut self.told)
    }

    /// When [`Self::turn`] must be called at the latest, if nothing is posted.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.rank.poll_timeout()
    }

    /// Whether a ModelThread has posted something.
    #[must_use]
    pub fn has_mail(&self) -> bool {
        self.ends.iter().any(|end| !end.is_empty())
    }
}
