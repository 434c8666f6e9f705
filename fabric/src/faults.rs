//! What goes wrong in a simulated fabric, and when: drawn from the seed before a run begins.

use std::str::FromStr;

use proto::{ModelId, ModelThreadId, Span, Timestamp, frontend_to_scheduler::ModelChange};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{
    env::{Env, Happening},
    models::MODELS,
};
use crate::{
    fault::{Fault, Trouble},
    node::Node,
};

/// Whoever is to leave has so long at least for the batches that it was given.
const LEAVES: Span = Span::from_millis(50);

/// What may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultKinds {
    /// Processes end and come back, or the scheduler is lost.
    pub crash: bool,
    /// Members cannot reach each other, both ways or one; links end, and one side learns of it late.
    pub partition: bool,
    /// The network or a process is slow, or does nothing at all for a while.
    pub slow: bool,
    /// Executors take too long, or fail.
    pub hang: bool,
    /// Clocks drift.
    pub clock: bool,
    /// Clients load and unload models, which may fail; models move between ModelThreads.
    pub change: bool,
    /// Backends leave in good order, and come back.
    pub leave: bool,
    /// There are several schedulers: they end one after another, stall, do not hear of each other or of members, tell
    /// members lower epochs than before, and operators want another one to be the primary.
    pub scheduler: bool,
}

impl FaultKinds {
    /// Everything.
    pub const ALL: Self = Self {
        crash: true,
        partition: true,
        slow: true,
        hang: true,
        clock: true,
        change: true,
        leave: true,
        scheduler: true,
    };

    /// What [`Self::from_str`] takes.
    pub const EXPECTED: &'static str =
        "a comma list of none, crash, partition, slow, hang, clock, change, leave, scheduler, all";
}

impl FromStr for FaultKinds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut kinds = Self::default();
        for word in text.split(',') {
            match word {
                "none" => {}
                "crash" => kinds.crash = true,
                "partition" => kinds.partition = true,
                "slow" => kinds.slow = true,
                "hang" => kinds.hang = true,
                "clock" => kinds.clock = true,
                "change" => kinds.change = true,
                "leave" => kinds.leave = true,
                "scheduler" => kinds.scheduler = true,
                "all" => kinds = Self::ALL,
                _ => return Err(format!("found '{word}', expected {}", Self::EXPECTED)),
            }
        }
        Ok(kinds)
    }
}

/// The members of a fabric, by what they are.
#[derive(Debug, Clone)]
pub(super) struct Roles {
    /// By rank.
    pub(super) schedulers: Vec<Node>,
    pub(super) frontends: Vec<Node>,
    pub(super) backends: Vec<Node>,
}

impl Roles {
    fn pick(&self, env: &mut Env) -> Node {
        // The scheduler is lost less often than others, or nothing else would be seen.
        let count = self.frontends.len() + self.backends.len();
        match env.rng.random_range(0..4 * count + 1) / 4 {
            index if index < self.frontends.len() => self.frontends[index],
            index if index < count => self.backends[index - self.frontends.len()],
            _ => self.pick_scheduler(env),
        }
    }

    /// The first of the list mostly, which is the primary at first.
    fn pick_scheduler(&self, env: &mut Env) -> Node {
        let index = if env.chance(50) { 0 } else { env.rng.random_range(0..self.schedulers.len()) };
        self.schedulers[index]
    }

    /// A scheduler and somebody whom it is connected to.
    fn pick_scheduler_pair(&self, env: &mut Env) -> (Node, Node) {
        let scheduler = self.pick_scheduler(env);
        let others: Vec<Node> = self.schedulers.iter().chain(&self.frontends).chain(&self.backends).copied().collect();
        loop {
            let other = others[env.rng.random_range(0..others.len())];
            if other != scheduler {
                return (scheduler, other);
            }
        }
    }

    /// Two members that are connected.
    fn pick_pair(&self, env: &mut Env) -> (Node, Node) {
        let frontend = self.frontends[env.rng.random_range(0..self.frontends.len())];
        let backend = self.backends[env.rng.random_range(0..self.backends.len())];
        match env.rng.random_range(0..6) {
            0 => (self.pick_scheduler(env), frontend),
            1 => (backend, self.pick_scheduler(env)),
            _ => (frontend, backend),
        }
    }
}

/// Draws when schedulers tell lower epochs, which those of one seed in four do. It has randomness of its own: all else
/// that a seed draws is as it was before there was such a fault.
pub(super) fn draw_lower_epochs(env: &mut Env, seed: u64, roles: &Roles, (from, until): (Timestamp, Timestamp)) {
    let mut rng = ChaCha8Rng::seed_from_u64(!seed);
    if rng.random_range(0..4) > 0 {
        return;
    }
    for _ in 0..rng.random_range(1..=6) {
        let node = roles.schedulers[rng.random_range(0..roles.schedulers.len())];
        let at = from + Span(rng.random_range(0..(until - from).0));
        env.schedule(at, Happening::Fault(Fault::LowerEpoch { node }));
    }
}

/// Draws faults that begin in `[from, until]`, and end soon after.
pub(super) fn draw(env: &mut Env, kinds: FaultKinds, roles: &Roles, (from, until): (Timestamp, Timestamp)) {
    let FaultKinds { crash, partition, slow, hang, change, leave, scheduler, clock: _ } = kinds;
    let wanted = [crash, partition, slow, hang, change, leave, scheduler && roles.schedulers.len() > 1];
    let wanted: Vec<usize> = (0..wanted.len()).filter(|&index| wanted[index]).collect();
    if wanted.is_empty() {
        return;
    }
    for _ in 0..env.rng.random_range(1..=6) {
        let begins = from + Span(env.rng.random_range(0..(until - from).0));
        match wanted[env.rng.random_range(0..wanted.len())] {
            0 => draw_crash(env, roles, begins),
            1 => draw_partition(env, roles, begins),
            2 => draw_slow(env, roles, begins),
            3 => draw_executors(env, roles, begins),
            4 => draw_change(env, roles, begins),
            6 => draw_succession(env, roles, begins),
            _ => {
                let node = roles.backends[env.rng.random_range(0..roles.backends.len())];
                lasts(env, begins, Fault::Leave { node }, 1_500);
            }
        }
    }
}

fn lasts(env: &mut Env, at: Timestamp, fault: Fault, millis_max: i64) {
    let lasts = Span::from_micros(env.rng.random_range(1_000..millis_max * 1_000));
    let least = if matches!(fault, Fault::Leave { .. }) { LEAVES } else { Span::ZERO };
    env.schedule(at, Happening::Fault(fault));
    env.schedule(at + lasts.max(least), Happening::Heal(fault));
}

fn draw_crash(env: &mut Env, roles: &Roles, at: Timestamp) {
    let (node, tells) = (roles.pick(env), env.chance(70));
    lasts(env, at, Fault::Crash { node, tells }, 1_500);
}

/// Schedulers in particular. What follows one fault at once meets the takeover that it causes.
fn draw_succession(env: &mut Env, roles: &Roles, at: Timestamp) {
    let mut at = at;
    for _ in 0..env.rng.random_range(1..=3) {
        let scheduler = roles.pick_scheduler(env);
        match env.rng.random_range(0..6) {
            0..=2 => {
                let tells = env.chance(70);
                lasts(env, at, Fault::Crash { node: scheduler, tells }, 1_500);
            }
            3 => {
                let micros_max = if env.chance(50) { 300_000 } else { 3_500_000 };
                let span = Span::from_millis(1) + env.micros(micros_max);
                env.schedule(at, Happening::Fault(Fault::Stall { node: scheduler, span }));
            }
            4 => {
                let (from, to) = roles.pick_scheduler_pair(env);
                let millis_max = if env.chance(50) { 300 } else { 3_500 };
                lasts(env, at, Fault::Partition { from, to }, millis_max);
                if env.chance(60) {
                    lasts(env, at, Fault::Partition { from: to, to: from }, millis_max);
                }
            }
            _ => env.schedule(at, Happening::HandOver(scheduler)),
        }
        at += env.micros(60_000);
    }
}

fn draw_partition(env: &mut Env, roles: &Roles, at: Timestamp) {
    let (from, to) = roles.pick_pair(env);
    // Long enough to be noticed, or not.
    let millis_max = if env.chance(50) { 300 } else { 3_500 };
    match env.rng.random_range(0..4) {
        0 => env.schedule(at, Happening::Fault(Fault::Cut { node: from })),
        1 => env.schedule(at, Happening::Fault(Fault::Cut { node: to })),
        2 => {
            let (from, to) = if env.chance(50) { (from, to) } else { (to, from) };
            lasts(env, at, Fault::Partition { from, to }, millis_max);
        }
        _ => {
            lasts(env, at, Fault::Partition { from, to }, millis_max);
            lasts(env, at, Fault::Partition { from: to, to: from }, millis_max);
        }
    }
}

fn draw_slow(env: &mut Env, roles: &Roles, at: Timestamp) {
    match env.rng.random_range(0..3) {
        0 => {
            let (pair, longer) = (roles.pick_pair(env), Span::from_millis(1) + env.micros(40_000));
            lasts(env, at, Fault::SlowPair { pair, longer }, 1_000);
        }
        1 => {
            let (node, reaction) = (roles.pick(env), Span::from_millis(1) + env.micros(30_000));
            lasts(env, at, Fault::SlowMember { node, reaction }, 1_000);
        }
        _ => {
            let micros_max = if env.chance(50) { 200_000 } else { 3_500_000 };
            let (node, span) = (roles.pick(env), Span::from_millis(1) + env.micros(micros_max));
            env.schedule(at, Happening::Fault(Fault::Stall { node, span }));
        }
    }
}

fn draw_executors(env: &mut Env, roles: &Roles, at: Timestamp) {
    let node = roles.backends[env.rng.random_range(0..roles.backends.len())];
    let trouble = match env.rng.random_range(0..3) {
        0 => Trouble::Slow(env.rng.random_range(2..10)),
        1 => Trouble::Hang(Span::from_millis(20) + env.micros(2_000_000)),
        _ => Trouble::Fail,
    };
    lasts(env, at, Fault::Executors { node, trouble }, 500);
}

fn draw_change(env: &mut Env, roles: &Roles, at: Timestamp) {
    if env.chance(30) {
        let (model, to) = (ModelId(env.rng.random_range(0..4)), ModelThreadId(env.rng.random_range(0..3)));
        return env.schedule(at, Happening::Move(model, to));
    }
    let node = roles.frontends[env.rng.random_range(0..roles.frontends.len())];
    let (name, _) = MODELS[env.rng.random_range(0..MODELS.len())];
    if env.chance(50) {
        env.schedule(at, Happening::Publish(name));
    }
    let to = if env.chance(60) { ModelChange::Load } else { ModelChange::Unload };
    env.schedule(at, Happening::Change(node, to, name));
}
