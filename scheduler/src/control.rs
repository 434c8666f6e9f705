//! The one place for what is not on a task's way: frontends and backends join and leave, ids are assigned, offers are
//! taken in, models are loaded, unloaded and dealt to ModelThreads, links decide who is used and served. What follows
//! for tasks, plans and GPUs is told to the ModelThreads and the RankThread.
//!
//! ModelThreads are told before the RankThread, so that a grant never names what its ModelThread has yet to hear of,
//! and before members, so that a message never does. No IO and no clock.

mod announcements;
mod balance;
mod changes;
mod copies;
mod draining;
mod failures;
mod joining;
mod learned;
mod lifecycle;
mod members;
mod names;
mod offers;
mod placing;
mod reach;
mod refuge;
mod refusals;
mod succession;
mod takeover;
mod topics;
mod weights;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use proto::{
    BackendId, FrontendId, LinkId, LinkPass, ModelId, ModelThreadId, Span, Standing, Timestamp, Wait,
    backend_to_scheduler::{BackendHello, BackendToControl, ModelOffer},
    clock::ClockReply,
    frontend_to_scheduler::{FrontendHello, FrontendToControl},
    hello::{Member, ModelThreads},
    scheduler_to_backend::{BackendWelcome, SchedulerToBackend},
    scheduler_to_frontend::{FrontendWelcome, SchedulerLoad, SchedulerToFrontend},
    scheduler_to_scheduler::{HandedOver, SchedulerToScheduler},
};

use rand_chacha::{
    ChaCha12Rng,
    rand_core::{Rng as _, SeedableRng as _},
};

use crate::{
    advice::{AdviceConfig, Advisor, Served},
    input_sizes::ReadTime,
    messages::NetworkBudget,
    network_times::NetworkTime,
    news::{ControlToRank, ControlToShard, Gpu, Offered, ShardToControl},
    placer::{PlacementConfig, Placer},
    policy::Policy,
    predictions::Predictions,
    shard::{ShardLoad, Unfinished, Violation},
    snapshot::{ModelName, Snapshot, Whereabouts},
};
use balance::Balance;
use changes::{Changes, Wish};
use failures::Failures;
pub use members::JoinError;
use members::{Joined, Known, Members};
use names::Names;
use refuge::Refuge;
use refusals::Refusals;
use succession::Succession;
pub use succession::SuccessionConfig;
use takeover::Takeover;
use topics::Topic;

/// How often it is looked who is overdue.
const WATCH_INTERVAL: Span = Span::from_millis(500);

/// What control plans with and deals to.
#[derive(Debug, Clone)]
pub struct ControlConfig {
    /// From the scheduler to a running batch.
    pub budget: NetworkBudget,
    /// What each megabyte (10^6 bytes) of a task's input adds to `budget.data_per_task`.
    pub data_per_megabyte: Span,
    /// From the end of execution to the client.
    pub resp: Span,
    /// ModelThreads; at least 1.
    pub model_threads: u16,
    /// Where each one is reached; none if the only one shares control's connections.
    pub addresses: Vec<String>,
    /// Its place among the schedulers.
    pub succession: SuccessionConfig,
    /// Whether it loads weights, decides who may join.
    pub policy: Policy,
    /// The first ids that members are given follow from it.
    pub first_id: u32,
    /// As [`cluster::ClusterConfig::gpu_prices`](crate::cluster::ClusterConfig::gpu_prices).
    pub gpu_prices: BTreeMap<String, f64>,
    /// As [`cluster::ClusterConfig::advice`](crate::cluster::ClusterConfig::advice).
    pub advice: AdviceConfig,
    /// As [`cluster::ClusterConfig::placement`](crate::cluster::ClusterConfig::placement).
    pub placement: Option<PlacementConfig>,
}

/// Something to send.
#[derive(Debug)]
pub enum ControlOutput {
    /// To a frontend.
    ToFrontend(FrontendId, SchedulerToFrontend),
    /// To a backend.
    ToBackend(BackendId, SchedulerToBackend),
    /// To one ModelThread.
    ToShard(ModelThreadId, ControlToShard),
    /// To the RankThread. Without one, when all is on one thread, there is nobody to tell.
    ToRank(ControlToRank),
    /// The member's connection to control is to be closed, and the rest of it will follow.
    Close(Member, String),
    /// About other schedulers.
    Peer(PeerOutput),
}

/// What is to be done about other schedulers, which are named by their positions in the list.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerOutput {
    /// Connect to this one, with [`Control::claim`] in the hello; then call [`Control::handle_peer_connected`].
    Dial(u16),
    /// Over the connection that we made to it.
    Tell(u16, SchedulerToScheduler),
    /// Over the connection that it made to us.
    Answer(u16, SchedulerToScheduler),
    /// READ its heartbeat, then call [`Control::handle_heartbeat`].
    ReadHeartbeat(u16),
    /// Set the clock that all of this is told forward, or a little back.
    ShiftClock(Span),
    /// The operator who wanted this one to be the primary is answered.
    HandedOver(HandedOver),
    /// The process is to end, for this reason.
    End(String),
}

/// The scheduler's control without its sockets.
pub struct Control {
    config: ControlConfig,
    members: Members,
    names: Names,
    changes: Changes,
    failures: Failures,
    refusals: Refusals,
    balance: Balance,
    /// From the end of execution to the client.
    resp: NetworkTime,
    /// By ModelThread: what it last said.
    loads: Vec<ShardLoad>,
    advisor: Advisor,
    /// Makes passes that members cannot guess.
    passes: ChaCha12Rng,
    /// It is about to end.
    leaves: bool,
    succession: Succession,
    takeover: Takeover,
    /// When it is looked who is overdue.
    watch_at: Timestamp,
    /// Versions that newer ones have replaced, by when they go.
    retiring: BTreeMap<(BackendId, ModelId), Timestamp>,
    refuge: Refuge,
    /// If models of some backends are ours to place.
    placer: Option<Placer>,
    /// It is to be looked whether guests can go.
    are_guests_due: bool,
    outputs: VecDeque<ControlOutput>,
}

impl Control {
    /// Knows nobody yet. Members must not be able to guess the seed.
    #[must_use]
    pub fn new(config: ControlConfig, seed: [u8; 32]) -> Self {
        let mut new = Self {
            members: Members::new(config.first_id),
            names: Names::default(),
            changes: Changes::default(),
            failures: Failures::default(),
            refusals: Refusals::default(),
            balance: Balance::new(config.model_threads),
            resp: NetworkTime::new(config.resp),
            loads: vec![ShardLoad::default(); usize::from(config.model_threads)],
            advisor: Advisor::new(config.advice),
            passes: ChaCha12Rng::from_seed(seed),
            leaves: false,
            succession: Succession::new(config.succession),
            takeover: Takeover::default(),
            watch_at: Timestamp::PAST,
            retiring: BTreeMap::new(),
            refuge: Refuge::default(),
            placer: config.placement.clone().map(Placer::new),
            are_guests_due: false,
            outputs: VecDeque::new(),
            config,
        };
        // The only scheduler is the primary from the start.
        new.follow_succession(Timestamp::PAST);
        new
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
        self.check_open(now, hello.standing)?;
        names::check(&hello.name).map_err(|found| JoinError::BadName { found })?;
        let link_address = hello.link_address.clone();
        let threads = self.config.addresses.len();
        let known = Known { id: hello.known_as, token: hello.standing.token };
        let frontend = self.members.add_frontend(now, hello.link_address, threads, known)?;
        self.names.add(Member::Frontend(frontend), hello.name);
        let model_threads = self.admit(Member::Frontend(frontend));
        for &backend in self.members.backends.keys() {
            let (link_address, pass) = (link_address.clone(), LinkPass::of(known.token, backend));
            let message = SchedulerToBackend::FrontendJoined { frontend, link_address, pass };
            self.outputs.push_back(ControlOutput::ToBackend(backend, message));
        }
        self.refresh(now);
        self.tell_all(frontend);
        self.succession.handle_joined(now);
        Ok(FrontendWelcome { frontend, model_threads, claim: self.succession.claim() })
    }

    /// A backend connected.
    ///
    /// # Errors
    /// If there are too many, or its offer is wrong.
    pub fn handle_backend_joined(&mut self, now: Timestamp, hello: BackendHello) -> Result<BackendWelcome, JoinError> {
        self.check_open(now, hello.standing)?;
        names::check(&hello.name).map_err(|found| JoinError::BadName { found })?;
        self.check_memory(&hello)?;
        if hello.known_as.is_some_and(|backend| self.takeover.has_gone(backend)) {
            self.end_handover(now);
        }
        let threads = self.config.addresses.len();
        let name = hello.name.clone();
        let joined = self.members.add_backend(now, hello, threads, is_unwanted(&self.changes))?;
        self.names.add(Member::Backend(joined.backend), name);
        let model_threads = self.admit(Member::Backend(joined.backend));
        let (backend, models) = (joined.backend, self.on_joined(joined));
        for (&frontend, member) in &self.members.frontends {
            let (link_address, pass) = (member.link_address.clone(), LinkPass::of(member.token, backend));
            let message = SchedulerToBackend::FrontendJoined { frontend, link_address, pass };
            self.outputs.push_back(ControlOutput::ToBackend(backend, message));
        }
        self.refresh(now);
        self.succession.handle_joined(now);
        let claim = self.succession.claim();
        Ok(BackendWelcome { backend, models, model_threads, claim })
    }

    /// A backend that has joined names more models.
    fn on_offers(&mut self, now: Timestamp, backend: BackendId, offers: &[ModelOffer]) -> Result<(), Violation> {
        let joined = self.members.add_offers(now, backend, offers, is_unwanted(&self.changes)).map_err(Violation)?;
        let models = self.on_joined(joined);
        self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::Offered { models }));
        if self.members.has_offered(backend) {
            self.refresh(now);
        }
        Ok(())
    }

    /// ModelThreads hear of what a backend has offered. Yields the ids of the models, in their order.
    fn on_joined(&mut self, Joined { backend, models, reprofiled }: Joined) -> Vec<ModelId> {
        self.assign_new_models();
        for &model in models.iter().filter(|model| !reprofiled.contains(model)) {
            self.tell_offers(model, Some(backend));
        }
        self.on_offers_changed(reprofiled);
        models
    }

    /// Whether it takes members in: it knows who is the primary, and is not about to end.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.leaves && self.succession.is_warm()
    }

    /// What operators call a member that is here, which no other one of its kind is called.
    #[must_use]
    pub fn name_of(&self, member: Member) -> &str {
        self.names.of(member).unwrap_or_default()
    }

    /// What operators are shown, and the models from this id on. The driver knows where members are.
    #[must_use]
    pub fn snapshot(
        &self,
        at: impl Fn(Member) -> Option<Whereabouts>,
        models_from: usize,
    ) -> (Snapshot, Vec<ModelName>) {
        let snapshot = Snapshot {
            epoch: self.succession.epoch(),
            rank: self.config.succession.rank,
            schedulers: self.succession.states(),
            frontends: self.members.shown_frontends(&self.names, &at),
            backends: self.members.shown_backends(&self.names, &at),
            models: self.members.shown_models(&self.advisor),
            advice: self.advisor.advice(),
        };
        (snapshot, self.members.model_names(models_from))
    }

    /// Whether members can be taken in now. What a new one says of the primary that it obeys is noted.
    fn check_open(&mut self, now: Timestamp, standing: Standing) -> Result<(), JoinError> {
        self.succession.handle_claim(standing.obeys);
        self.follow_succession(now);
        match () {
            () if self.leaves => Err(JoinError::Leaving),
            () if !self.succession.is_warm() => Err(JoinError::NotWarm),
            () => Ok(()),
        }
    }

    /// The scheduler is about to end: another one is asked to take over, or, if there is none, frontends are told to
    /// give it nothing more. Nobody joins.
    pub fn handle_leaving(&mut self) {
        if !std::mem::replace(&mut self.leaves, true) && !self.hand_over() {
            let frontends = self.members.frontends.keys();
            let told = frontends.map(|&frontend| ControlOutput::ToFrontend(frontend, SchedulerToFrontend::Leaving));
            self.outputs.extend(told);
        }
    }

    /// Whether no task waited, ran or was in doubt when the ModelThreads last said so.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.loads.iter().all(|load| load.queued == 0 && load.batches == 0 && load.doubtful == 0)
    }

    /// A member's connection ended, to control or to a ModelThread.
    pub fn handle_left(&mut self, now: Timestamp, member: Member) {
        self.names.remove(member);
        self.refusals.handle_left(member);
        match member {
            Member::Frontend(frontend) => {
                if self.members.remove_frontend(frontend).is_none() {
                    return;
                }
                self.changes.handle_frontend_left(frontend);
                self.tell_shards(|| ControlToShard::FrontendLeft(frontend));
                for &backend in self.members.backends.keys() {
                    let message = SchedulerToBackend::FrontendLeft { frontend };
                    self.outputs.push_back(ControlOutput::ToBackend(backend, message));
                }
            }
            Member::Backend(backend) if self.takeover.is_handed_over => return self.note_gone(now, backend),
            Member::Backend(backend) => {
                self.refuge.end(backend);
                self.forget_failures_at(backend);
                let planned = self.members.planned_gpus(backend);
                let Some((gpus, reprofiled)) = self.members.remove_backend(backend) else { return };
                for gpu in gpus {
                    if planned.contains(&gpu) {
                        self.tell_shards(|| ControlToShard::GpuLeft(gpu));
                        self.outputs.push_back(ControlOutput::ToRank(ControlToRank::GpuLeft(gpu)));
                    }
                    self.tell_shards(|| ControlToShard::GpuGone(gpu));
                    self.outputs.push_back(ControlOutput::ToRank(ControlToRank::GpuGone(gpu)));
                }
                self.tell_shards(|| ControlToShard::BackendLeft(backend));
                self.on_offers_changed(reprofiled.into_iter().collect());
                self.changes.handle_backend_left(backend);
                self.takeover.handle_backend_left(backend);
            }
        }
        self.settle(now);
        self.refresh(now);
        self.settle_heirs(now);
    }

    /// A frontend's message.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_frontend_message(
        &mut self,
        now: Timestamp,
        frontend: FrontendId,
        message: FrontendToControl,
    ) -> Result<(), Violation> {
        match message {
            FrontendToControl::ClockRequest { sent_at, resp } => {
                self.on_frontend_clock(now, frontend, sent_at);
                self.on_resp(now, resp);
            }
            FrontendToControl::ChangeModel { change, to, name, brought } => {
                self.on_change_asked(now, (frontend, change), Wish { to, brought }, &name);
                self.settle(now);
            }
            FrontendToControl::Link { backend, link } => self.on_link_named(frontend, (backend, link))?,
            FrontendToControl::Obeys { epoch } => self.on_frontend_obeys(now, frontend, epoch),
            FrontendToControl::Misses { misses } => self.on_misses(now, misses),
            FrontendToControl::PageRead => self.on_page_read(frontend)?,
            FrontendToControl::Refuses { backend } => {
                self.on_refuses(now, frontend, backend);
                self.settle(now);
            }
            FrontendToControl::Drained { is_drained } => {
                self.set_drained(now, Member::Frontend(frontend), is_drained);
            }
        }
        Ok(())
    }

    /// A backend's message.
    ///
    /// # Errors
    /// If it breaks the protocol.
    pub fn handle_backend_message(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        message: BackendToControl,
    ) -> Result<(), Violation> {
        match message {
            BackendToControl::ClockRequest { sent_at } => {
                let reply = ClockReply { sent_at, received_at: now, replied_at: now };
                self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::Clock(reply)));
            }
            BackendToControl::Linked { frontend, link } => self.on_link(now, backend, frontend, Some(link)),
            BackendToControl::Unlinked { frontend } => self.on_link(now, backend, frontend, None),
            BackendToControl::Unfinished { plan, gpu_index, model, frees_at, tasks } => {
                self.on_unfinished(backend, Unfinished { plan, gpu_index, model, frees_at, tasks })?;
            }
            BackendToControl::Obeys { epoch } => self.on_backend_obeys(now, backend, epoch),
            BackendToControl::Misses { misses } => self.on_misses(now, misses),
            BackendToControl::Loaded { load, outcome } => self.on_loaded(backend, load, outcome),
            BackendToControl::NotLoaded { name, version, reason } => {
                self.on_not_loaded(backend, (&name, &version), reason);
            }
            BackendToControl::Offers { models } => self.on_offers(now, backend, &models)?,
            BackendToControl::Measured { model, profile, cost } => {
                if self.members.set_measured((backend, model), profile, cost).map_err(Violation)? {
                    self.tell_offers(model, None);
                }
            }
            BackendToControl::Unloaded { model } => self.changes.handle_unloaded(backend, model),
            BackendToControl::Usable { gpu_index, is_usable } => {
                if !self.members.set_usable(backend, gpu_index, is_usable) {
                    return Err(Violation(format!("it speaks of GPU {gpu_index}, which it does not have")));
                }
                tracing::warn!(backend = backend.0, gpu_index, is_usable, "whether a GPU can be used has changed");
                self.refresh(now);
            }
            BackendToControl::Drained { is_drained } => self.set_drained(now, Member::Backend(backend), is_drained),
            BackendToControl::Leaving { within } => self.on_backend_leaving(now, backend, within),
            BackendToControl::Assigned { sub_cluster } => self.members.set_sub_cluster(backend, sub_cluster),
            BackendToControl::Resident { gpu, models, is_last } => {
                self.on_resident(now, (backend, gpu), models, is_last)?;
            }
            BackendToControl::InHostMemory { models, is_there } => {
                self.on_host_memory(backend, models, is_there)?;
            }
            BackendToControl::WeightsMissing { gpu } => self.on_weights_missing(now, backend, gpu),
            BackendToControl::Weights(tally) => self.members.set_tally(backend, tally),
            BackendToControl::Inherited(report) => self.on_inherited(backend, report),
        }
        self.settle(now);
        Ok(())
    }

    fn on_frontend_clock(&mut self, now: Timestamp, frontend: FrontendId, sent_at: Timestamp) {
        let reply = ClockReply { sent_at, received_at: now, replied_at: now };
        let load = SchedulerToFrontend::Load(Box::new(self.load()));
        let replies = [SchedulerToFrontend::Clock(reply), load];
        self.outputs.extend(replies.map(|reply| ControlOutput::ToFrontend(frontend, reply)));
    }

    /// What a frontend tells is a high percentile of its own already; each counts as often as it takes to be one here.
    fn on_resp(&mut self, now: Timestamp, resp: Span) {
        if resp > Span::ZERO && self.resp.handle_percentile(now, resp) {
            self.on_resp_changed();
        }
    }

    fn on_resp_changed(&mut self) {
        let resp = self.resp.planned();
        self.tell_shards(|| ControlToShard::Resp(resp));
        self.announce();
    }

    /// A frontend takes no link of a backend any more.
    fn on_refuses(&mut self, now: Timestamp, frontend: FrontendId, backend: BackendId) {
        if self.members.backends.contains_key(&backend) && self.members.frontends.contains_key(&frontend) {
            tracing::warn!(
                frontend = frontend.0,
                backend = backend.0,
                "a frontend takes no link of a backend any more"
            );
            self.refusals.insert(frontend, backend);
            self.on_link(now, backend, frontend, None);
        }
    }

    fn on_link(&mut self, now: Timestamp, backend: BackendId, frontend: FrontendId, link: Option<LinkId>) {
        let link = link.filter(|_| !self.refusals.has(frontend, backend));
        if self.members.set_linked(backend, frontend, link) {
            self.refresh(now);
        }
    }

    /// What a ModelThread says.
    pub fn handle_news(&mut self, now: Timestamp, news: ShardToControl) {
        match news {
            ShardToControl::Connected(member) => {
                self.members.handle_connected(member);
                self.refresh(now);
            }
            ShardToControl::AllOpen(frontend) => self.on_all_open(now, frontend),
            ShardToControl::Lost(member, reason) => self.outputs.push_back(ControlOutput::Close(member, reason)),
            ShardToControl::Planned(model, planned) => {
                self.members.models[model.0 as usize].planned = Some(planned);
                self.outputs.push_back(ControlOutput::ToRank(ControlToRank::Budget(model, planned.budget)));
                self.announce_models([model]);
            }
            ShardToControl::Load(thread, load) => self.on_load(now, thread, *load),
            ShardToControl::Released(moved) => {
                let owner = self.members.models[moved.model.0 as usize].owner;
                self.outputs.push_back(ControlOutput::ToShard(owner, ControlToShard::Adopt(moved)));
            }
            ShardToControl::Learned(ctrl, models) => self.on_thread_told(ctrl, models),
            ShardToControl::Forward(model, forwarded) => {
                // A frontend may name any model; what nobody knows ends with any thread.
                let owner = self.members.models.get(model.0 as usize).map_or(ModelThreadId(0), |entry| entry.owner);
                self.outputs.push_back(ControlOutput::ToShard(owner, ControlToShard::Forwarded(model, forwarded)));
            }
        }
    }

    /// Timers of all parts.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.members.poll_timeout().is_some_and(|at| at <= now) {
            self.refresh(now);
        }
        if self.watch_at <= now {
            self.watch_at = now + WATCH_INTERVAL;
            self.close_overdue(now);
        }
        self.retire(now);
        self.succession.handle_timeout(now);
        self.follow_succession(now);
        self.end_waiting(now);
        self.settle(now);
    }

    /// Who takes too long to join, or to read what it is told, is closed.
    fn close_overdue(&mut self, now: Timestamp) {
        let joining = self.members.overdue(now).into_iter().map(|member| (member, Wait::Join));
        let reading = self.members.frontends.iter_mut().filter_map(|(&frontend, entry)| {
            entry.announcements.is_overdue(now).then_some((Member::Frontend(frontend), Wait::Page))
        });
        for (member, wait) in joining.chain(reading) {
            wait.note_reached();
            let reason = format!("it took more than {} ({}: docs/threats.md)", wait.bound(), wait.name());
            self.outputs.push_back(ControlOutput::Close(member, reason));
        }
    }

    /// When [`Self::handle_timeout`] must be called at the latest. That members are overdue is found in passing.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let retires = self.retiring.values().min().copied();
        let own = [self.members.poll_timeout(), self.changes.poll_timeout(), self.refuge.poll_timeout(), retires];
        let placer = self.placer.as_ref().and_then(Placer::poll_timeout);
        let others = [self.succession.poll_timeout(), self.takeover.poll_timeout()];
        own.into_iter().chain(others).chain([placer]).flatten().min()
    }

    /// The next thing to send.
    pub fn poll_output(&mut self) -> Option<ControlOutput> {
        self.outputs.pop_front()
    }

    /// Who owns a model; the first thread, if nobody has ever offered it.
    #[must_use]
    pub fn owner(&self, model: ModelId) -> ModelThreadId {
        self.members.models.get(model.0 as usize).map_or(ModelThreadId(0), |entry| entry.owner)
    }

    /// Moves a model to another ModelThread. Its tasks go with it; what is under way is finished where it was planned.
    pub fn move_model(&mut self, model: ModelId, to: ModelThreadId) {
        let Some(entry) = self.members.models.get_mut(model.0 as usize) else { return };
        // Tasks and plans of earlier primaries must meet at one thread.
        if entry.owner == to || to.0 >= self.config.model_threads || self.takeover.is_under_way() {
            return;
        }
        tracing::info!(model = entry.name, from = entry.owner.0, to = to.0, "moved a model to another ModelThread");
        entry.owner = to;
        let hosted = entry.hosted;
        self.tell_offers(model, None);
        self.tell_owner(model, ControlToShard::Hosted(model, hosted));
        self.outputs.push_back(ControlOutput::ToRank(ControlToRank::Move(model, to)));
        self.announce_models([model]);
    }

    fn on_load(&mut self, now: Timestamp, thread: ModelThreadId, mut load: ShardLoad) {
        self.advise(now, std::mem::take(&mut load.served));
        for (model, times) in std::mem::take(&mut load.request_times) {
            self.members.models[model.0 as usize].request_times = Some(times);
            self.tell_each(&Topic::RequestTimes(model));
        }
        let owner = |model: ModelId| self.members.models.get(model.0 as usize).map(|entry| entry.owner);
        let shift = self.balance.handle_load(thread, &load.tasks, owner);
        self.loads[usize::from(thread.0)] = load;
        if let Some((model, to)) = shift {
            self.move_model(model, to);
        }
    }

    /// Works out how many GPUs are needed, if it is time, with what one more ModelThread has counted.
    pub(crate) fn advise(&mut self, now: Timestamp, served: Vec<(ModelId, Served)>) {
        self.advisor.handle_standing(now, self.succession.claim().is_primary());
        served.into_iter().for_each(|(model, served)| self.advisor.handle_served(model, &served));
        if self.advisor.is_due(now) {
            self.advisor.handle_gpus(now, self.members.gpus.values().filter_map(|gpu| gpu.planned.clone()));
        }
    }

    /// What a new member needs to connect to ModelThreads, which are told.
    fn admit(&mut self, member: Member) -> ModelThreads {
        let pass = self.passes.next_u64();
        self.tell_shards(|| ControlToShard::Joined { member, pass });
        ModelThreads { addresses: self.config.addresses.clone(), pass }
    }

    /// Deals models that were offered for the first time.
    fn assign_new_models(&mut self) {
        let owners = self.members.models.iter().map(|entry| entry.owner);
        let mut counts = vec![0usize; usize::from(self.config.model_threads)];
        owners.take(self.members.dealt).for_each(|owner| counts[usize::from(owner.0)] += 1);
        for index in self.members.dealt..self.members.models.len() {
            let least = (0..counts.len()).min_by_key(|&thread| counts[thread]).expect("there is a thread");
            counts[least] += 1;
            let (model, owner) = (ModelId(index as u32), ModelThreadId(least as u16));
            self.members.models[index].owner = owner;
            self.outputs.push_back(ControlOutput::ToRank(ControlToRank::Model(model, owner)));
        }
        self.members.dealt = self.members.models.len();
    }

    /// Models with a new common profile; each GPU is held against that anew.
    fn on_offers_changed(&mut self, models: BTreeSet<ModelId>) {
        for model in models {
            self.tell_offers(model, None);
        }
    }

    /// Tells a model's owner what one backend offers, or, if it is none in particular, everything anew.
    fn tell_offers(&mut self, model: ModelId, only: Option<BackendId>) {
        let offers = self.members.offers(model).filter(|(backend, ..)| only.is_none_or(|only| only == *backend));
        let offers = offers.map(|(_, gpus, offered)| (gpus, Arc::clone(offered))).collect();
        let cost = self.members.cost(model);
        let entry = &mut self.members.models[model.0 as usize];
        // Where requests are unequal they choose how large inputs are.
        entry.input_bytes_min = if cost.is_some() { 0 } else { entry.input_bytes };
        let (weights, common) = (entry.weights, only.is_none().then(|| entry.profile.clone()));
        let queue_max = entry.queue_max.clone();
        if only.is_none() {
            self.outputs.push_back(ControlOutput::ToRank(ControlToRank::Weights(model, weights)));
        }
        let gpu_price = self.config.gpu_prices.get(&entry.name).copied();
        let read_time = self.read_time(model);
        let offered = Offered { model, read_time, weights, queue_max, cost, gpu_price, common, offers };
        self.tell_owner(model, ControlToShard::Offered(offered));
    }

    /// Ends changes of models, and goes on with what waits for members to host them.
    fn settle(&mut self, now: Timestamp) {
        while let Some(ended) = self.changes.poll_ended(now) {
            self.on_change_ended(now, ended);
        }
        self.evacuate_due(now);
        self.dismiss_guests(now);
        self.place_due(now);
    }

    /// Members, links or what is hosted have changed: who is used and served, what GPUs host, and what frontends know
    /// of it, follow.
    fn refresh(&mut self, now: Timestamp) {
        let reach = self.members.reach(now);
        for gpu in self.members.gpus_that_leave(&reach) {
            self.tell_shards(|| ControlToShard::GpuLeft(gpu));
            self.outputs.push_back(ControlOutput::ToRank(ControlToRank::GpuLeft(gpu)));
            let new = self.members.rename_gpu(gpu);
            self.tell_shards(|| ControlToShard::GpuRenamed { old: gpu, new });
            self.outputs.push_back(ControlOutput::ToRank(ControlToRank::GpuRenamed { old: gpu, new }));
        }
        let (served, unserved) = self.members.set_reach(now, reach);
        for model in self.members.hosted_anew() {
            self.tell_owner(model, ControlToShard::Hosted(model, Ok(())));
        }
        self.ask_resident();
        for gpu in self.members.gpus_that_come() {
            let memory = self.take_resident(gpu);
            let entry = &self.members.gpus[&gpu];
            let news =
                Gpu { id: gpu, backend: entry.backend, index: entry.index, models: entry.models.to_vec(), memory };
            self.outputs.extend(
                shards(&self.config)
                    .map(|shard| ControlOutput::ToShard(shard, ControlToShard::GpuJoined(news.clone()))),
            );
            self.outputs.push_back(ControlOutput::ToRank(ControlToRank::GpuJoined {
                gpu,
                models: news.models,
                memory: news.memory,
            }));
        }
        for model in self.members.unhosted() {
            let reason = self.reason_unhosted(model);
            self.members.models[model.0 as usize].hosted = Err(reason);
            self.tell_owner(model, ControlToShard::Hosted(model, Err(reason)));
        }
        self.on_whereabouts_changed();
        self.are_guests_due = true;
        unserved.iter().for_each(|_| Wait::Link.note_reached());
        for (frontends, is_served) in [(served, true), (unserved, false)] {
            for frontend in frontends {
                self.tell_shards(|| ControlToShard::Served(frontend, is_served));
            }
        }
        self.announce();
    }

    /// What reading one of a model's inputs takes, as configured.
    fn read_time(&self, model: ModelId) -> ReadTime {
        let entry = &self.members.models[model.0 as usize];
        let (least, most) = (entry.input_bytes_min, entry.input_bytes);
        let (fixed, per_megabyte) = (self.config.budget.data_per_task, self.config.data_per_megabyte);
        ReadTime { fixed, per_megabyte, bytes: least..=most }
    }

    fn load(&self) -> SchedulerLoad {
        let sum = |of: fn(&ShardLoad) -> usize| self.loads.iter().map(of).sum::<usize>() as u32;
        let (queued, batches) = (sum(|load| load.queued), sum(|load| load.batches));
        let members = (self.members.frontends.len() + self.members.backends.len()) as u32;
        let frontends = self.members.frontends.values().filter(|entry| entry.heir.obeys).count();
        let obeying = (frontends + self.members.obeying().count()) as u32;
        let cold = self.loads.iter().map(|load| load.cold).sum();
        let weights = self.members.tally();
        let (gpus, settled) = (self.members.gpus.len() as u32, self.takeover.settled());
        let mut predictions = Predictions::default();
        self.loads.iter().for_each(|load| predictions.add(&load.predictions));
        let predictions = predictions.told();
        SchedulerLoad { queued, batches, gpus, members, obeying, settled, cold, weights, predictions }
    }

    fn tell_shards(&mut self, news: impl Fn() -> ControlToShard) {
        self.outputs.extend(shards(&self.config).map(|shard| ControlOutput::ToShard(shard, news())));
    }

    fn tell_owner(&mut self, model: ModelId, news: ControlToShard) {
        let owner = self.members.models[model.0 as usize].owner;
        self.outputs.push_back(ControlOutput::ToShard(owner, news));
    }
}

/// Of what a new backend hosts, what nobody wants: what is served with what a client brought along is loaded once the
/// backend obeys.
fn is_unwanted(changes: &Changes) -> impl Fn(&str) -> bool {
    |model| changes.is_unloaded(model) || changes.brought(model).is_some()
}

fn shards(config: &ControlConfig) -> impl Iterator<Item = ModelThreadId> + use<> {
    (0..config.model_threads).map(ModelThreadId)
}
