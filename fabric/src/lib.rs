//! The whole fabric under one clock and one seed: the real cores of frontends, scheduler and backends over one
//! simulated network, while processes crash, links end late or one way, executors hang and clocks drift.
//!
//! A run serves requests without faults, then with them, then waits until all has settled, and serves again. After
//! every step the invariants of ARCHITECTURE.md are checked, from outside (`oracle`); at the end everything has
//! ended, and requests are served as before. The same seed and faults give the same run.
//!
//! | file | holds |
//! | --- | --- |
//! | `env` | what members share: time, randomness, what happens later |
//! | `network` | connections, memory, and when bytes land |
//! | `frontend`, `scheduler`, `backend` | drivers of the real cores |
//! | `faults` | what goes wrong when |
//! | `oracle` | what must hold |
//! | `mutation` | bugs to plant, which must be found |

mod backend;
mod env;
mod fault;
mod faults;
mod frontend;
mod models;
mod mutation;
mod network;
mod node;
mod oracle;
mod peers;
mod scheduler;

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use ::scheduler::{
    NetworkBudget, Policy, advice::AdviceConfig, cluster::ClusterConfig, control::SuccessionConfig,
    placer::PlacementConfig,
};
use proto::{Span, Timestamp, frontend_to_scheduler::ModelChange};
use rand::RngExt;

use self::{
    backend::BackendNode,
    env::{Env, Happening},
    faults::Roles,
    frontend::FrontendNode,
    models::{Dynamic, MODELS},
    network::Pair,
    scheduler::SchedulerNode,
};
use crate::{
    fault::{Fault, Trouble},
    node::Node,
};

pub use self::{faults::FaultKinds, mutation::Mutation, oracle::Violation};

/// When clients begin: members have found one another.
const WARM: Timestamp = Timestamp(1_500_000_000);
/// How long clients send requests before faults begin, and after all has settled.
const CALM: Span = Span::from_millis(500);
/// How long faults begin.
const TROUBLE: Span = Span::from_millis(2_000);
/// After the last fault has ended: silence is noticed after two seconds, then members wait two more at most before they
/// connect again, and a backend's GPUs wait as long for its links; requests end five seconds after their deadline.
const SETTLES: Span = Span::from_millis(9_000);
/// After the last request: its tasks end, and the scheduler tells how much it has to do.
const ENDS: Span = Span::from_millis(3_000);
/// The mean time between two requests of one frontend.
const GAP: Span = Span::from_millis(15);
/// Of the requests that could be served, those that must be.
const SERVED_MIN: f64 = 0.9;
/// How much longer those are looked at of which fewer were.
const MORE: i64 = 10;
/// More happens in no run: something goes in circles.
const STEPS_MAX: u64 = 3_000_000;
/// A primary whose heartbeat stands still for so long is suspected: longer than most reactions and packets take.
const SUSPECT: Span = Span::from_millis(60);

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Decides everything.
    pub seed: u64,
    /// What may go wrong.
    pub faults: FaultKinds,
    /// A bug to plant.
    pub mutation: Option<Mutation>,
    /// Whether to keep a line for each event.
    pub is_traced: bool,
}

/// What happened in a run.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Requests that clients sent.
    pub sent: u64,
    /// Of them, those answered with outputs.
    pub served: u64,
    /// Of these, those of which an input came so late that its task was submitted twice.
    pub late: u64,
    /// Tasks of dynamic models that backends ran again alone.
    pub samples: u64,
    /// Lower epochs that members who run at the end were told, and did not believe.
    pub lower_epochs: u64,
    /// How the others ended.
    pub failed: BTreeMap<String, u64>,
    /// Events.
    pub steps: u64,
}

impl Summary {
    /// Requests that could not be served because of what their clients did.
    fn gave_up(&self) -> u64 {
        ["HungUp", "NeverMet", "InputLate", "Undecodable"].iter().filter_map(|kind| self.failed.get(*kind)).sum()
    }

    /// Adds what happened in another run.
    pub fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.served += other.served;
        self.late += other.late;
        self.samples += other.samples;
        self.lower_epochs += other.lower_epochs;
        self.steps += other.steps;
        for (kind, count) in &other.failed {
            *self.failed.entry(kind.clone()).or_default() += count;
        }
    }
}

/// A run that broke an invariant.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Which one, and how.
    pub violation: Violation,
    /// When, since the start.
    pub at: Span,
}

/// Runs one seed. Yields how it ended, and the trace if there is one: a line for each event with time, who and what.
pub fn run(options: Options) -> (Result<Summary, Failure>, Vec<String>) {
    let mut fabric = Fabric::new(options);
    let run = catch_unwind(AssertUnwindSafe(|| fabric.run(options.faults)));
    let result = run.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(Violation::Panic(text.unwrap_or_else(|| "without a word".to_owned())))
    });
    let at = fabric.env.now - Timestamp::ZERO;
    let result = result.map_err(|violation| Failure { violation, at });
    (result, fabric.env.take_trace())
}

struct Fabric {
    seed: u64,
    env: Env,
    roles: Roles,
    /// By rank.
    schedulers: Vec<SchedulerNode>,
    frontends: Vec<FrontendNode>,
    backends: Vec<BackendNode>,
    /// Clients send requests until then.
    requests_until: Timestamp,
    /// What pairs cost while they are not slow.
    pairs: BTreeMap<(Node, Node), Pair>,
    reactions: BTreeMap<Node, Span>,
    steps: u64,
}

impl Fabric {
    fn new(options: Options) -> Self {
        let mut env = Env::new(options.seed, options.mutation, options.is_traced);
        let drift_max = if options.faults.clock { 30_000 } else { 0 };
        let several = options.faults.scheduler && env.chance(60);
        let schedulers = if several { env.rng.random_range(2..=3) } else { 1 };
        let schedulers: Vec<Node> =
            (0..schedulers).map(|i| env.add_member(format!("scheduler-{i}"), drift_max)).collect();
        let frontends = env.rng.random_range(1..=3);
        let frontends: Vec<Node> = (0..frontends).map(|i| env.add_member(format!("frontend-{i}"), drift_max)).collect();
        let backends = env.rng.random_range(2..=3);
        let backends: Vec<Node> = (0..backends).map(|i| env.add_member(format!("backend-{i}"), drift_max)).collect();
        let pairs = connect(&mut env);
        let reactions = (0..env.members.len()).map(|index| (Node(index), env.members[index].reaction)).collect();
        let mut config = cluster_config(&mut env);
        // In some worlds the scheduler chooses what backends host, with an advice that knows rates soon.
        let is_auto = is_placed(options.seed);
        if is_auto {
            config.placement = Some(placement_config());
            config.advice.window = Span::from_millis(2_000);
        }
        if config.policy == Policy::Downbeat {
            env.dynamic = Dynamic::draw(options.seed);
        }
        let new_scheduler = |(rank, &node): (usize, &Node)| {
            let succession =
                SuccessionConfig { rank: rank as u16, schedulers: schedulers.len() as u16, suspect: SUSPECT };
            let threads = config.model_threads;
            let addresses = if threads == 1 { vec![] } else { scheduler::addresses(node, threads) };
            SchedulerNode::new(node, schedulers.clone(), ClusterConfig { succession, addresses, ..config.clone() })
        };
        let new_backend = |env: &mut Env, &node: &Node| {
            let gpus = env.rng.random_range(1..=2);
            // In some worlds GPUs hold but a part of what they host.
            let memory_pages = options.seed.is_multiple_of(4).then_some(models::MEMORY_PAGES);
            // In some of these host memory holds no more than what they load at once.
            let host_pages = options.seed.is_multiple_of(8).then_some(gpus * models::WEIGHTS.pages);
            BackendNode::new(node, &schedulers, gpus, (memory_pages, host_pages), is_auto, env)
        };
        let mut backend_nodes: Vec<BackendNode> = backends.iter().map(|node| new_backend(&mut env, node)).collect();
        backend_nodes[0].lies = options.mutation == Some(Mutation::SkipWrite);
        Self {
            seed: options.seed,
            schedulers: schedulers.iter().enumerate().map(new_scheduler).collect(),
            frontends: frontends.iter().map(|&node| FrontendNode::new(options.seed, node, &schedulers)).collect(),
            backends: backend_nodes,
            roles: Roles { schedulers, frontends, backends },
            requests_until: Timestamp::PAST,
            pairs,
            reactions,
            steps: 0,
            env,
        }
    }

    fn run(&mut self, faults: FaultKinds) -> Result<Summary, Violation> {
        for index in 0..self.env.members.len() {
            let at = Timestamp::ZERO + self.env.micros(50_000);
            self.env.schedule(at, Happening::Start(Node(index)));
        }
        self.run_until(WARM)?;
        let before = self.serve(WARM + CALM, Span::from_millis(200))?;
        let trouble = self.env.now;
        self.env.loads_fail = true;
        faults::draw(&mut self.env, faults, &self.roles, (trouble, trouble + TROUBLE));
        if faults.scheduler {
            faults::draw_lower_epochs(&mut self.env, self.seed, &self.roles, (trouble, trouble + TROUBLE));
        }
        self.serve(trouble + TROUBLE, Span::ZERO)?;
        self.run_until(self.last_heals_at().max(self.env.now))?;
        self.env.loads_fail = false;
        self.run_until(self.env.now + SETTLES / 2)?;
        // Whatever clients have unloaded is wanted again.
        for (name, _) in MODELS {
            self.frontends[0].change(&mut self.env, ModelChange::Load, name);
        }
        self.run_until(self.env.now + SETTLES / 2)?;
        self.check_settled()?;
        let mut after = self.serve(self.env.now + CALM, ENDS)?;
        if after < SERVED_MIN.min(before) {
            // Of thirty requests one batch may miss its window by chance, and four may be in it. What does not serve
            // any more does not do so in a longer time either.
            after = self.serve(self.env.now + CALM * MORE, ENDS)?;
        }
        self.check_settled()?;
        if after < SERVED_MIN.min(before) {
            let text = format!("{:.0} % of requests are served, {:.0} % were before", after * 100.0, before * 100.0);
            return Err(Violation::Liveness(text));
        }
        Ok(self.summary())
    }

    /// Clients send requests until then; the run goes on for a while after that. Yields the fraction that was served,
    /// of those that could be.
    fn serve(&mut self, until: Timestamp, then: Span) -> Result<f64, Violation> {
        let before = self.summary();
        self.requests_until = until;
        for node in self.roles.frontends.clone() {
            let wait = self.env.micros(10_000);
            self.env.after(wait, Happening::Request(node));
        }
        self.run_until(until + then)?;
        let after = self.summary();
        let possible = (after.sent - after.gave_up()) - (before.sent - before.gave_up());
        Ok((after.served - before.served) as f64 / possible.max(1) as f64)
    }

    fn run_until(&mut self, until: Timestamp) -> Result<(), Violation> {
        while let Some(happening) = self.env.next(until) {
            self.steps += 1;
            self.step(happening);
            if let Some(violation) = self.env.oracle.violation() {
                return Err(violation.clone());
            }
            if self.steps > STEPS_MAX {
                return Err(Violation::Liveness(format!("{STEPS_MAX} events have happened, without end")));
            }
        }
        self.env.now = until;
        Ok(())
    }

    fn step(&mut self, happening: Happening) {
        let env = &mut self.env;
        match happening {
            Happening::Deliver(side) => env.deliver(side),
            Happening::Silence(side) => env.handle_silence(side),
            Happening::Retries(side, token) => env.handle_retries(side, token),
            Happening::Handshake(side) => env.handle_handshake(side),
            Happening::Wake(node) => {
                if env.take_wake(node) {
                    self.turn(node);
                }
            }
            Happening::Request(node) => self.on_request(node),
            Happening::HangUp(node, life, request) => {
                if let Some(frontend) = self.frontends.iter_mut().find(|other| (other.node, other.life) == (node, life))
                {
                    frontend.hang_up(env, request);
                }
            }
            Happening::Inputs(node, life, request) => {
                if let Some(frontend) = self.frontends.iter_mut().find(|other| (other.node, other.life) == (node, life))
                {
                    frontend.handle_inputs(env, request);
                }
            }
            Happening::Change(node, to, name) => {
                if let Some(frontend) = self.frontends.iter_mut().find(|other| other.node == node) {
                    frontend.change(env, to, name);
                }
            }
            Happening::HandOver(node) => {
                if let Some(scheduler) = self.schedulers.iter_mut().find(|other| other.node == node) {
                    scheduler.hand_over(env);
                }
            }
            Happening::Move(model, to) => {
                self.schedulers.iter_mut().for_each(|scheduler| scheduler.move_model(env, model, to));
            }
            Happening::Publish(name) => *env.repository.entry(name).or_default() += 1,
            Happening::ModelRead(node, life, name) => {
                if let Some(frontend) = self.frontends.iter_mut().find(|other| (other.node, other.life) == (node, life))
                {
                    frontend.handle_model_read(env, &name);
                }
            }
            Happening::Execute(node, life, gpu) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.process_life) == (node, life)) {
                    backend.handle_due(env, gpu);
                }
            }
            Happening::Executed(node, life, gpu, execution) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.process_life) == (node, life)) {
                    backend.handle_executed(env, gpu, execution);
                }
            }
            Happening::Ended(node, life, gpu) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.process_life) == (node, life)) {
                    backend.handle_ended(env, gpu);
                }
            }
            Happening::RanAlone(node, life, plan, took) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.life) == (node, life)) {
                    backend.handle_ran_alone(env, plan, took);
                }
            }
            Happening::Copied(node, life, gpu) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.life) == (node, life)) {
                    backend.handle_copied(env, gpu);
                }
            }
            Happening::Loaded(node, life, load, name) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.life) == (node, life)) {
                    backend.handle_loaded(env, load, &name);
                }
            }
            Happening::Measured(node, life, model) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.life) == (node, life)) {
                    backend.handle_measured(env, model);
                }
            }
            Happening::Session(node, life) => {
                if let Some(backend) = self.backends.iter_mut().find(|b| (b.node, b.life) == (node, life)) {
                    backend.open_session(env);
                }
            }
            Happening::Start(node) => self.start(node),
            Happening::Fault(fault) => self.on_fault(fault),
            Happening::Heal(fault) => self.on_healed(fault),
        }
    }

    /// Whose clock the others are held against.
    fn note_primary(&mut self) {
        let claims = self.schedulers.iter_mut().map(|scheduler| (scheduler.claim(), scheduler.node));
        let primaries = claims.filter(|(claim, _)| claim.is_primary());
        if let Some((claim, node)) = primaries.max_by_key(|(claim, _)| claim.epoch) {
            self.env.set_primary(claim, node);
        }
    }

    fn turn(&mut self, node: Node) {
        let env = &mut self.env;
        if let Some(scheduler) = self.schedulers.iter_mut().find(|scheduler| scheduler.node == node) {
            scheduler.turn(env);
            return self.note_primary();
        }
        if let Some(frontend) = self.frontends.iter_mut().find(|frontend| frontend.node == node) {
            return frontend.turn(env);
        }
        if let Some(backend) = self.backends.iter_mut().find(|backend| backend.node == node) {
            backend.turn(env);
        }
    }

    fn on_request(&mut self, node: Node) {
        if self.env.now >= self.requests_until {
            return;
        }
        let frontend = self.frontends.iter_mut().find(|frontend| frontend.node == node);
        frontend.expect("only frontends have clients").request(&mut self.env);
        // Some come together.
        let is_burst = self.env.chance(25);
        let gap = if is_burst { Span::ZERO } else { Span(self.env.rng.random_range(0..2 * GAP.0)) };
        self.env.after(gap, Happening::Request(node));
    }

    /// A process starts, if it is not running.
    fn start(&mut self, node: Node) {
        let env = &mut self.env;
        if let Some(scheduler) = self.schedulers.iter_mut().find(|other| other.node == node && !other.is_running()) {
            scheduler.start(env);
        }
        if let Some(frontend) = self.frontends.iter_mut().find(|other| other.node == node && !other.is_running()) {
            frontend.start(env);
        }
        if let Some(backend) = self.backends.iter_mut().find(|other| other.node == node && !other.is_running()) {
            backend.start(env);
        }
    }

    fn on_fault(&mut self, fault: Fault) {
        let env = &mut self.env;
        match fault {
            Fault::Crash { node, tells } => {
                if let Some(scheduler) = self.schedulers.iter_mut().find(|s| s.node == node && s.is_running()) {
                    scheduler.die(env, tells);
                }
                if let Some(frontend) = self.frontends.iter_mut().find(|f| f.node == node && f.is_running()) {
                    frontend.die(env, tells);
                }
                if let Some(backend) = self.backends.iter_mut().find(|b| b.node == node && b.is_running()) {
                    backend.die(env, tells);
                }
            }
            Fault::Partition { from, to } => {
                env.trace(from, || format!("is not heard any more by member {}", to.0));
                env.block(from, to);
            }
            Fault::Cut { node } => env.cut(node),
            Fault::SlowPair { pair, longer } => {
                let usual = self.pairs[&pair];
                env.network.set_pair(pair, Pair { latency: usual.latency + longer, ..usual });
            }
            Fault::SlowMember { node, reaction } => env.members[node.0].reaction = reaction,
            Fault::Stall { node, span } => {
                env.trace(node, || format!("does nothing for {span}"));
                env.members[node.0].stalled_until = env.now + span;
                env.handle_stalled(node);
            }
            Fault::Leave { node } => {
                if let Some(backend) = self.backends.iter_mut().find(|b| b.node == node && b.is_running()) {
                    backend.leave(env);
                }
            }
            Fault::Executors { node, trouble } => self.set_trouble(node, trouble),
            Fault::LowerEpoch { node } => {
                if let Some(scheduler) = self.schedulers.iter_mut().find(|other| other.node == node) {
                    scheduler.tell_lower_epoch(env);
                }
            }
        }
    }

    fn on_healed(&mut self, fault: Fault) {
        let env = &mut self.env;
        match fault {
            Fault::Crash { node, .. } => self.start(node),
            Fault::Leave { node } => {
                // Its time is up, whatever it still has.
                if let Some(backend) = self.backends.iter_mut().find(|b| b.node == node && b.is_leaving()) {
                    backend.die(env, true);
                }
                self.start(node);
            }
            Fault::Partition { from, to } => {
                env.trace(from, || format!("is heard again by member {}", to.0));
                env.unblock(from, to);
            }
            Fault::SlowPair { pair, .. } => env.network.set_pair(pair, self.pairs[&pair]),
            Fault::SlowMember { node, .. } => env.members[node.0].reaction = self.reactions[&node],
            Fault::Executors { node, .. } => self.set_trouble(node, Trouble::None),
            Fault::Cut { .. } | Fault::Stall { .. } | Fault::LowerEpoch { .. } => {}
        }
    }

    fn set_trouble(&mut self, node: Node, trouble: Trouble) {
        self.env.trace(node, || format!("has executors with this trouble: {trouble:?}"));
        if let Some(backend) = self.backends.iter_mut().find(|backend| backend.node == node) {
            backend.trouble = trouble;
        }
    }

    /// When the last fault ends that has been drawn.
    fn last_heals_at(&self) -> Timestamp {
        let stalls = self.env.members.iter().map(|member| member.stalled_until);
        stalls.chain(self.env.last_heal_at()).max().unwrap_or(Timestamp::PAST)
    }

    /// Nothing is left to do for anybody.
    fn check_settled(&mut self) -> Result<(), Violation> {
        let primaries = self.schedulers.iter_mut().filter_map(|scheduler| scheduler.claim().is_primary().then_some(()));
        let primaries = primaries.count();
        if primaries != 1 {
            return Err(Violation::Liveness(format!("{primaries} schedulers take themselves for the primary")));
        }
        let frontends = self.frontends.iter().map(|frontend| (frontend.node, frontend.unfinished()));
        let backends = self.backends.iter().map(|backend| (backend.node, backend.unfinished()));
        let schedulers = self.schedulers.iter().map(|scheduler| (scheduler.node, scheduler.unfinished()));
        for (node, unfinished) in frontends.chain(backends).chain(schedulers) {
            if let Some(what) = unfinished {
                return Err(Violation::Liveness(format!("{}: {what}", self.env.members[node.0].name)));
            }
        }
        if let Some(frontend) = self.frontends.iter().find(|frontend| !frontend.is_ready()) {
            let name = &self.env.members[frontend.node.0].name;
            return Err(Violation::Liveness(format!("{name} cannot serve every model")));
        }
        Ok(())
    }

    fn summary(&self) -> Summary {
        let mut summary = Summary { steps: self.steps, samples: self.env.samples, ..Summary::default() };
        let backends = self.backends.iter().map(BackendNode::lower_epochs);
        summary.lower_epochs = backends.chain(self.frontends.iter().map(FrontendNode::lower_epochs)).sum();
        for clients in self.frontends.iter().map(|frontend| &frontend.clients) {
            summary.sent += clients.sent;
            summary.served += clients.served;
            summary.late += clients.late;
            for (kind, count) in &clients.failed {
                *summary.failed.entry(kind.clone()).or_default() += count;
            }
        }
        summary
    }
}

/// Pairs are near or far, and fast or slow.
fn connect(env: &mut Env) -> BTreeMap<(Node, Node), Pair> {
    let mut pairs = BTreeMap::new();
    for b in 0..env.members.len() {
        for a in 0..b {
            let pair = Pair {
                latency: Span::from_micros(5) + env.micros(400),
                jitter: Span::from_micros(1) + env.micros(150),
                ns_per_kilobyte: env.rng.random_range(100..20_000),
            };
            env.network.set_pair((Node(a), Node(b)), pair);
            pairs.extend([((Node(a), Node(b)), pair), ((Node(b), Node(a)), pair)]);
        }
    }
    pairs
}

/// Whether the scheduler chooses what backends host in a seed's world.
fn is_placed(seed: u64) -> bool {
    seed % 3 == 1
}

/// Two sub-clusters, of which each model has one, and may change it every now and then.
fn placement_config() -> PlacementConfig {
    PlacementConfig {
        sub_clusters: 2,
        epoch: Span::from_millis(400),
        moves_max: 1,
        rate_max_rps: None,
        memory_max_bytes: None,
        memory_weight: 1.0,
        pins: BTreeMap::new(),
    }
}

/// Of all schedulers, but for their places.
fn cluster_config(env: &mut Env) -> ClusterConfig {
    let model_threads = env.rng.random_range(1..=3);
    let policies = ["downbeat", "downbeat", "deferred", "eager"];
    let policy = policies[env.rng.random_range(0..policies.len())];
    ClusterConfig {
        policy: Policy::of_cluster(policy).expect("these are policies of a cluster"),
        budget: NetworkBudget {
            ctrl: Span::from_millis(2),
            data_per_task: Span::from_micros(300),
            jitter: Span::from_millis(1),
        },
        data_per_megabyte: Span::ZERO,
        resp: Span::from_millis(3),
        queue_max: 256,
        tasks_per_frontend_max: 256,
        reestimate: env.chance(50),
        model_threads,
        addresses: Vec::new(),
        succession: SuccessionConfig::ALONE,
        first_id: 0,
        gpu_prices: BTreeMap::new(),
        advice: AdviceConfig::default(),
        placement: None,
    }
}

#[cfg(test)]
mod tests;
