//! The whole scheduler on one thread: control, its ModelThreads and the RankThread, with their messages carried in
//! place. That is production where cores are few, with one ModelThread; with several it is how tests and simulations
//! run the same state machines that production runs on threads of their own.

use std::collections::{BTreeMap, VecDeque};

use proto::{
    BackendId, FrontendId, ModelId, ModelThreadId, Span, Timestamp,
    backend_to_scheduler::{BackendHello, BackendToControl, BackendToModelThread},
    frontend_to_scheduler::{FrontendHello, FrontendToControl, FrontendToModelThread},
    hello::Member,
    scheduler_to_backend::{BackendWelcome, SchedulerToBackend},
    scheduler_to_frontend::{FrontendWelcome, SchedulerToFrontend},
};

use crate::{
    advice::AdviceConfig,
    control::{Control, ControlConfig, ControlOutput, PeerOutput, SuccessionConfig},
    history::History,
    mailbox,
    messages::NetworkBudget,
    news::ShardToControl,
    placer::PlacementConfig,
    policy::{Policy, PolicyError},
    rank_loop::RankLoop,
    shard::{Shard, ShardConfig, ShardOutput},
};
pub use crate::{control::JoinError, shard::Violation};

/// How often ModelThreads tell control what they have to do.
pub const LOAD_INTERVAL: Span = Span::from_millis(500);

/// Limits and budgets.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// When batches run.
    pub policy: Policy,
    /// From the scheduler to a running batch.
    pub budget: NetworkBudget,
    /// What each megabyte (10^6 bytes) of a task's input adds to `budget.data_per_task`.
    pub data_per_megabyte: Span,
    /// From the end of execution to the client; taken off every deadline.
    pub resp: Span,
    /// Tasks that may wait for one model.
    pub queue_max: usize,
    /// Tasks that one frontend may have under way with one ModelThread.
    pub tasks_per_frontend_max: usize,
    /// Plan with what executions take, not only with what backends offered.
    pub reestimate: bool,
    /// ModelThreads; at least 1, and at most [`ModelThreadId::COUNT_MAX`].
    pub model_threads: u16,
    /// Where each ModelThread is reached; none if the only one shares control's connections.
    pub addresses: Vec<String>,
    /// Its place among the schedulers.
    pub succession: SuccessionConfig,
    /// The first ids that members are given follow from it.
    pub first_id: u32,
    /// What GPU time is worth to the owners of single models, by their names.
    pub gpu_prices: BTreeMap<String, f64>,
    /// How many GPUs are needed is worked out with this.
    pub advice: AdviceConfig,
    /// How models are placed on backends that leave it to the scheduler; without it they stay where they start.
    pub placement: Option<PlacementConfig>,
}

impl ClusterConfig {
    /// Control's part.
    #[must_use]
    pub fn control(&self) -> ControlConfig {
        let Self { policy, budget, data_per_megabyte, resp, model_threads, succession, first_id, advice, .. } = *self;
        let addresses = self.addresses.clone();
        let gpu_prices = self.gpu_prices.clone();
        ControlConfig {
            budget,
            data_per_megabyte,
            resp,
            model_threads,
            addresses,
            succession,
            policy,
            first_id,
            gpu_prices,
            advice,
            placement: self.placement.clone(),
        }
    }

    /// One ModelThread's part.
    #[must_use]
    pub fn shard(&self, id: ModelThreadId) -> ShardConfig {
        let Self { resp, budget, queue_max, tasks_per_frontend_max, .. } = *self;
        let learning = self.policy.learning(self.reestimate);
        let has_port = !self.addresses.is_empty();
        let NetworkBudget { ctrl, jitter, .. } = budget;
        ShardConfig { id, has_port, resp, ctrl, jitter, queue_max, tasks_per_frontend_max, learning }
    }
}

/// Which of the scheduler's connections with a member: to control, or to a ModelThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Port {
    /// The first one. With one ModelThread without an address it serves that, too.
    Control,
    /// One more.
    ModelThread(ModelThreadId),
}

/// Something to send.
#[derive(Debug, Clone, PartialEq)]
pub enum ClusterOutput {
    /// To a frontend.
    ToFrontend(Port, FrontendId, SchedulerToFrontend),
    /// To a backend.
    ToBackend(Port, BackendId, SchedulerToBackend),
    /// All of the member's connections are to be closed: it has lost one of them.
    Close(Member, String),
    /// About other schedulers.
    Peer(PeerOutput),
}

/// The scheduler without its sockets.
pub struct Cluster {
    control: Control,
    shards: Vec<Shard>,
    /// With one ModelThread it is a part of that one's planner.
    rank: Option<RankLoop>,
    /// Whether ModelThreads have connections of their own.
    has_ports: bool,
    report_at: Timestamp,
    outputs: VecDeque<ClusterOutput>,
}

impl Cluster {
    /// A scheduler that knows nobody yet. Members must not be able to guess the seed.
    ///
    /// # Errors
    /// If the policy needs one queue for all models, and there are several ModelThreads.
    pub fn new(config: &ClusterConfig, seed: [u8; 32]) -> Result<Self, PolicyError> {
        let ids = (0..config.model_threads).map(ModelThreadId);
        let (shards, rank) = if config.model_threads == 1 {
            let planner = config.policy.planner(config.budget);
            (vec![Shard::new(config.shard(ModelThreadId(0)), planner)], None)
        } else {
            let links = ids.clone().map(|_| mailbox::link(crate::MODELS_MAX));
            let (model_ends, rank_ends): (Vec<_>, Vec<_>) = links.unzip();
            let shards = ids.zip(model_ends).map(|(id, end)| {
                let planner = config.policy.sharded_planner(config.budget, end)?;
                Ok(Shard::new(config.shard(id), planner))
            });
            (shards.collect::<Result<_, PolicyError>>()?, Some(RankLoop::new(config.budget, rank_ends)))
        };
        let has_ports = !config.addresses.is_empty();
        let (report_at, outputs) = (Timestamp::PAST, VecDeque::new());
        Ok(Self { control: Control::new(config.control(), seed), shards, rank, has_ports, report_at, outputs })
    }

    /// What GPUs do is left there from now on.
    pub fn record(&mut self, history: &History) {
        for (thread, shard) in (0..).map(ModelThreadId).zip(&mut self.shards) {
            shard.record(history.recorder(thread));
        }
    }

    /// A frontend connected.
    ///
    /// # Errors
    /// If there are too many, or its address is none.
    pub fn handle_frontend_joined(
        &mut self,
        now: Timestamp,
        hello: FrontendHello,
    ) -> Result<FrontendWelcome, JoinError> {
        let welcome = self.control.handle_frontend_joined(now, hello)?;
        self.settle(now);
        Ok(welcome)
    }

    /// A backend connected.
    ///
    /// # Errors
    /// If there are too many, or its offer is wrong.
    pub fn handle_backend_joined(&mut self, now: Timestamp, hello: BackendHello) -> Result<BackendWelcome, JoinError> {
        let welcome = self.control.handle_backend_joined(now, hello)?;
        self.settle(now);
        Ok(welcome)
    }

    /// A member that has joined wants to connect to a ModelThread. False if it is not who it says.
    pub fn handle_member_connected(&mut self, now: Timestamp, at: ModelThreadId, member: Member, pass: u64) -> bool {
        let Some(shard) = self.shards.get_mut(usize::from(at.0)).filter(|shard| shard.is_welcome(member, pass)) else {
            return false;
        };
        shard.handle_connected(member);
        self.settle(now);
        true
    }

    /// A member's connection ended. If it was one to a ModelThread, `Close` follows for the others.
    pub fn handle_disconnected(&mut self, now: Timestamp, at: Port, member: Member, reason: String) {
        match at {
            Port::Control => self.control.handle_left(now, member),
            Port::ModelThread(thread) => {
                if let Some(shard) = self.shards.get_mut(usize::from(thread.0)) {
                    shard.handle_disconnected(member, reason);
                }
            }
        }
        self.settle(now);
    }

    /// A frontend's message to control.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_frontend_to_control(
        &mut self,
        now: Timestamp,
        frontend: FrontendId,
        message: FrontendToControl,
    ) -> Result<(), Violation> {
        self.note_loads(now);
        self.control.handle_frontend_message(now, frontend, message)?;
        self.settle(now);
        Ok(())
    }

    /// A frontend's message to a ModelThread.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_frontend_to_model_thread(
        &mut self,
        now: Timestamp,
        thread: ModelThreadId,
        frontend: FrontendId,
        message: FrontendToModelThread,
    ) -> Result<(), Violation> {
        if let Some(shard) = self.shards.get_mut(usize::from(thread.0)) {
            shard.handle_frontend_message(now, frontend, message)?;
        }
        self.settle(now);
        Ok(())
    }

    /// A backend's message to control.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_backend_to_control(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        message: BackendToControl,
    ) -> Result<(), Violation> {
        self.control.handle_backend_message(now, backend, message)?;
        self.settle(now);
        Ok(())
    }

    /// A backend's message to a ModelThread.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_backend_to_model_thread(
        &mut self,
        now: Timestamp,
        thread: ModelThreadId,
        backend: BackendId,
        message: BackendToModelThread,
    ) -> Result<(), Violation> {
        if let Some(shard) = self.shards.get_mut(usize::from(thread.0)) {
            shard.handle_backend_message(now, backend, message)?;
        }
        self.settle(now);
        Ok(())
    }

    /// The operator wants it to end: it takes nothing more, and finishes what it has.
    pub fn handle_leaving(&mut self, now: Timestamp) {
        self.control.handle_leaving();
        self.settle(now);
    }

    /// Whether no task waits, runs, is in doubt or is counted.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.shards.iter().all(Shard::is_idle)
    }

    /// Timers of all parts.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.control.handle_timeout(now);
        if self.report_at <= now {
            self.report_at = now + LOAD_INTERVAL;
            match &mut self.shards[..] {
                // All else that a ModelThread tells is asked for when it is needed.
                [shard] => self.control.advise(now, shard.take_served(now)),
                _ => self.note_loads(now),
            }
        }
        self.settle(now);
    }

    /// When [`Self::handle_timeout`] must be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let shards = self.shards.iter().filter_map(Shard::poll_timeout).min();
        let rank = self.rank.as_ref().and_then(RankLoop::poll_timeout);
        [shards, rank, self.control.poll_timeout()].into_iter().flatten().min()
    }

    /// The next thing to send.
    pub fn poll_output(&mut self) -> Option<ClusterOutput> {
        self.outputs.pop_front()
    }

    /// The connection that a model's tasks are submitted to.
    #[must_use]
    pub fn port_of(&self, model: ModelId) -> Port {
        if self.has_ports { Port::ModelThread(self.control.owner(model)) } else { Port::Control }
    }

    /// Moves a model to another ModelThread; control does so by itself when their loads differ.
    pub fn move_model(&mut self, now: Timestamp, model: ModelId, to: ModelThreadId) {
        self.control.move_model(model, to);
        self.settle(now);
    }

    /// What is not on a task's way; [`Self::poll_output`] has what follows from what it is told.
    ///
    /// [`Self::handle_timeout`] must be called after it, with the same `now`.
    pub fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    fn note_loads(&mut self, now: Timestamp) {
        for (thread, shard) in (0..).map(ModelThreadId).zip(&mut self.shards) {
            self.control.handle_news(now, ShardToControl::Load(thread, Box::new(shard.take_load(now))));
        }
    }

    /// Carries messages until all are silent.
    fn settle(&mut self, now: Timestamp) {
        loop {
            let mut is_silent = true;
            while let Some(output) = self.control.poll_output() {
                is_silent = false;
                match output {
                    ControlOutput::ToFrontend(frontend, message) => {
                        self.outputs.push_back(ClusterOutput::ToFrontend(Port::Control, frontend, message));
                    }
                    ControlOutput::ToBackend(backend, message) => {
                        self.outputs.push_back(ClusterOutput::ToBackend(Port::Control, backend, message));
                    }
                    ControlOutput::ToShard(thread, news) => self.shards[usize::from(thread.0)].handle_news(now, news),
                    ControlOutput::ToRank(news) => {
                        if let Some(rank) = &mut self.rank {
                            rank.handle_news(now, news);
                        }
                    }
                    ControlOutput::Close(member, reason) => {
                        self.outputs.push_back(ClusterOutput::Close(member, reason));
                    }
                    ControlOutput::Peer(output) => self.outputs.push_back(ClusterOutput::Peer(output)),
                }
            }
            for (thread, shard) in (0..).map(ModelThreadId).zip(&mut self.shards) {
                let port = if self.has_ports { Port::ModelThread(thread) } else { Port::Control };
                shard.handle_timeout(now);
                while let Some(output) = shard.poll_output() {
                    is_silent = false;
                    match output {
                        ShardOutput::ToFrontend(frontend, message) => {
                            self.outputs.push_back(ClusterOutput::ToFrontend(port, frontend, message));
                        }
                        ShardOutput::ToBackend(backend, message) => {
                            self.outputs.push_back(ClusterOutput::ToBackend(port, backend, message));
                        }
                        ShardOutput::ToControl(news) => self.control.handle_news(now, news),
                    }
                }
            }
            if let Some(rank) = &mut self.rank {
                is_silent &= !rank.turn(now);
            }
            if is_silent {
                return;
            }
        }
    }
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
