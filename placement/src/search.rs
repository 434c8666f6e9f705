//! The search: annealing in cycles, ever longer ones, so that no budget needs to be known.
//!
//! A step tries one to three moves at once: one model that moves, two that change places, a chain of three, a cycle, or
//! one that goes home so that another may leave in its place. It is taken if that is better, or by chance if it is not
//! much worse: up to twice the temperature, which falls over a cycle. A cycle begins at the best placement so far.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{
    bound, greedy,
    instance::{Instance, LIMITS, shown},
    problem::{PlacementError, Problem},
    state::{MOVES_MAX, Score, State, Totals},
};

/// Steps of the first cycle for each model.
const FIRST_CYCLE: u64 = 64;
/// Cycles of one length: what a cycle finds is decided while it is hot, which some repeat.
const EQUAL_CYCLES: u32 = 4;
/// The first temperature by the mean load of a model. Every other cycle starts cooler, and changes less of what
/// the others have found.
const HOT: f64 = 2.0;
const WARM: f64 = 0.02;
/// The last temperature is the first over e to this power. Nothing here is computed by a library's function that
/// another machine's may round otherwise: one seed finds one placement.
const COOLING: f64 = 11.0;
/// What an excess weighs beside the objective, for two cycles each: a high one keeps to what fits, and a low one leaves
/// ways from there to something better that fits, too.
const PENALTIES: [f64; 4] = [10.0, 3.0, 40.0, 1.0];
/// What the mean deviation weighs beside the largest at a cycle's start, and its end.
const GUIDE: f64 = 1.0;
/// Moves that are compared for each that a plan takes.
const LOOKED_AT: usize = 256;
/// An objective so near the bound is as good as optimal: a millionth of the mean load.
const SETTLED: f64 = 1e-6;

/// A placement, as good as was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// By model: its sub-cluster, from 0.
    pub sub_clusters: Vec<usize>,
    /// How good it is.
    pub score: Score,
    /// No placement has a lower objective.
    pub bound: f64,
    /// What all moves cost.
    pub disruption: f64,
}

/// A model that changes its sub-cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Move {
    /// Its index in the problem.
    pub model: usize,
    /// Where it is.
    pub from: usize,
    /// Where it goes.
    pub to: usize,
    /// All, after this move and those before it.
    pub after: Score,
}

/// The way from the former placement to another one.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The former placement, with new models where they go.
    pub before: Score,
    /// The one that helps most comes first.
    pub moves: Vec<Move>,
}

/// A search for a placement.
#[derive(Debug)]
pub struct Search {
    instance: Instance,
    /// What may move.
    free: Vec<u32>,
    state: State,
    start: Score,
    best: Vec<u32>,
    best_totals: Totals,
    best_cost: u64,
    bound: f64,
    rng: ChaCha8Rng,
    steps: u64,
    cycle: Cycle,
}

#[derive(Debug)]
struct Cycle {
    number: u32,
    steps: u64,
    left: u64,
    temperature: f64,
    /// What the temperature is multiplied with each step.
    cooling: f64,
    penalty: f64,
}

impl Cycle {
    /// Of the temperature's logarithm what is left to cool, from 1 to 0.
    fn heat(&self) -> f64 {
        self.left as f64 / self.steps as f64
    }
}

impl Search {
    /// Checks the problem and makes a start. Equal seeds find equal placements after equal numbers of steps.
    ///
    /// # Errors
    /// If the problem is not as it should be, or if it is plain that no placement satisfies it.
    pub fn new(problem: &Problem, seed: u64) -> Result<Self, PlacementError> {
        let instance = Instance::new(problem)?;
        let state = greedy::start(&instance);
        let start = state.score(&instance);
        let steps = FIRST_CYCLE * instance.loads.len() as u64;
        let mut search = Self {
            free: (0..instance.loads.len() as u32).filter(|&model| instance.pins[model as usize].is_none()).collect(),
            best: state.place.clone(),
            best_totals: state.totals,
            best_cost: state.cost,
            bound: bound::bound(&instance),
            rng: ChaCha8Rng::seed_from_u64(seed),
            steps: 0,
            cycle: Cycle { number: 0, steps, left: 0, temperature: 0.0, cooling: 1.0, penalty: 0.0 },
            instance,
            state,
            start,
        };
        search.heat();
        Ok(search)
    }

    /// Searches for so many steps more, and tells whether there may be something better than was found.
    pub fn poll(&mut self, steps: u64) -> bool {
        for _ in 0..steps {
            if self.is_settled() {
                break;
            }
            self.step();
        }
        !self.is_settled()
    }

    /// How good the start is.
    #[must_use]
    pub fn start(&self) -> Score {
        self.start
    }

    /// Steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The best placement so far.
    ///
    /// # Errors
    /// If none was found that keeps to the limits: which is broken where.
    pub fn best(&self) -> Result<Placement, PlacementError> {
        if self.best_totals.excess > 0.0 {
            return Err(self.unfound());
        }
        Ok(Placement {
            sub_clusters: self.best.iter().map(|&at| at as usize).collect(),
            score: State::new(&self.instance, &self.best).score(&self.instance),
            bound: self.bound.min(self.best_totals.largest),
            disruption: self.best_cost as f64 / 1e6,
        })
    }

    /// How good any placement is: what each model's sub-cluster is, in the order of the problem.
    ///
    /// # Panics
    /// If it is not one of this problem.
    #[must_use]
    pub fn score(&self, sub_clusters: &[usize]) -> Score {
        assert_eq!(sub_clusters.len(), self.instance.loads.len(), "each model has a sub-cluster");
        let place: Vec<u32> = sub_clusters.iter().map(|&at| at as u32).collect();
        State::new(&self.instance, &place).score(&self.instance)
    }

    /// The moves from the former placement to another one, each the best of the next few hundred. New models are loaded
    /// before.
    ///
    /// # Panics
    /// If it is not one of this problem.
    #[must_use]
    pub fn plan(&self, sub_clusters: &[usize]) -> Plan {
        assert_eq!(sub_clusters.len(), self.instance.loads.len(), "each model has a sub-cluster");
        let now = |(model, &to): (usize, &usize)| self.instance.former[model].unwrap_or(to as u32);
        let place: Vec<u32> = sub_clusters.iter().enumerate().map(now).collect();
        let mut left: Vec<usize> =
            (0..place.len()).filter(|&model| place[model] as usize != sub_clusters[model]).collect();
        let instance = Instance { disruption_max: None, ..self.instance.clone() };
        let mut state = State::new(&instance, &place);
        let before = state.score(&instance);
        let mut moves = Vec::with_capacity(left.len());
        while !left.is_empty() {
            let mut tried = |(index, &model): (usize, &usize)| {
                let totals = state.try_moves(&instance, &[(model as u32, sub_clusters[model] as u32)]);
                state.give_up();
                (index, totals.expect("a single move without a bound may be tried"))
            };
            let all: Vec<(usize, Totals)> = left.iter().take(LOOKED_AT).enumerate().map(&mut tried).collect();
            let better = |a: (usize, Totals), b: (usize, Totals)| if b.1.is_better(a.1) { b } else { a };
            let (index, _) = all.into_iter().reduce(better).expect("some are left");
            let model = left.remove(index);
            let (from, to) = (state.place[model] as usize, sub_clusters[model]);
            let step = [(model as u32, to as u32)];
            let totals = state.try_moves(&instance, &step).expect("it was tried");
            state.keep(&instance, &step, totals);
            moves.push(Move { model, from, to, after: state.score(&instance) });
        }
        Plan { before, moves }
    }

    fn is_settled(&self) -> bool {
        self.free.is_empty()
            || self.instance.clusters == 1
            || self.best_totals.excess == 0.0 && self.best_totals.largest <= self.bound + SETTLED
    }

    fn unfound(&self) -> PlacementError {
        let place: Vec<usize> = self.best.iter().map(|&at| at as usize).collect();
        let above = |dimension: usize| {
            let limit = self.instance.limits[dimension]?;
            let needs = |cluster: usize| {
                let members = (0..place.len()).filter(|&model| place[model] == cluster);
                let load: u64 = members.clone().map(|model| self.instance.loads[model][dimension]).sum();
                let dynamic_bytes = members.map(|model| self.instance.dynamic_bytes[model]).max().unwrap_or(0);
                load + if dimension == 1 { dynamic_bytes } else { 0 }
            };
            let most = (0..self.instance.clusters).max_by_key(|&cluster| needs(cluster))?;
            let found = shown(dimension, needs(most));
            let limit_shown = shown(dimension, limit);
            (needs(most) > limit).then(|| {
                let found = format!("{limit_shown}, and {found} in sub-cluster {most} after {} steps", self.steps);
                let more = match self.instance.disruption_max {
                    Some(_) => ", more sub-clusters or a higher disruption_max",
                    None => " or more sub-clusters",
                };
                PlacementError::new(LIMITS[dimension], found, format!("a higher one{more}"))
            })
        };
        above(0).or_else(|| above(1)).expect("an excess is one of these")
    }

    /// The next cycle.
    fn heat(&mut self) {
        let cycle = &mut self.cycle;
        let models = self.instance.loads.len() as f64;
        let hot = if cycle.number.is_multiple_of(2) { HOT } else { WARM };
        cycle.temperature = (hot * self.instance.clusters as f64 / models).min(hot);
        cycle.cooling = 1.0 - COOLING / cycle.steps as f64;
        cycle.left = cycle.steps;
        cycle.penalty = PENALTIES[cycle.number as usize / 2 % PENALTIES.len()];
    }

    fn step(&mut self) {
        if self.cycle.left == 0 {
            self.state = State::new(&self.instance, &self.best);
            self.cycle.number += 1;
            if self.cycle.number.is_multiple_of(EQUAL_CYCLES) {
                self.cycle.steps = self.cycle.steps.saturating_mul(2);
            }
            self.heat();
        }
        self.cycle.left -= 1;
        self.cycle.temperature *= self.cycle.cooling;
        self.steps += 1;
        let mut moves = [(0, 0); MOVES_MAX];
        let drawn = self.draw(&mut moves);
        let moves = &moves[..drawn];
        if moves.is_empty() {
            return;
        }
        if let Some(totals) = self.state.try_moves(&self.instance, moves) {
            let worse = self.energy(totals) - self.energy(self.state.totals);
            if worse <= 0.0 || worse < 2.0 * self.cycle.temperature * self.rng.random::<f64>() {
                self.state.keep(&self.instance, moves, totals);
                if totals.is_better(self.best_totals) {
                    self.best.clone_from(&self.state.place);
                    self.best_totals = totals;
                    self.best_cost = self.state.cost;
                }
            } else {
                self.state.give_up();
            }
        }
    }

    fn energy(&self, totals: Totals) -> f64 {
        totals.largest + GUIDE * self.cycle.heat() * totals.mean + self.cycle.penalty * totals.excess
    }

    /// Draws what to try.
    fn draw(&mut self, moves: &mut [(u32, u32); MOVES_MAX]) -> usize {
        let Some(first) = self.draw_model() else { return 0 };
        let home = self.state.place[first as usize];
        if self.instance.disruption_max.is_some() && !self.state.away.is_empty() && self.rng.random() {
            // It moves in place of another, which goes back.
            let second = self.state.away[self.rng.random_range(0..self.state.away.len())];
            moves[0] = (first, self.draw_cluster());
            moves[1] = (second, self.instance.former[second as usize].expect("what is away has been somewhere"));
            return if self.instance.pins[second as usize].is_none() { 2 } else { 0 };
        }
        match self.rng.random_range(0..7) {
            // It moves.
            0 | 1 => {
                moves[0] = (first, self.draw_cluster());
                1
            }
            // It changes places with another.
            2..=5 => {
                let second = self.draw_free();
                moves[0] = (first, self.state.place[second as usize]);
                moves[1] = (second, home);
                2
            }
            // It goes where another leaves, which goes where a third leaves, which closes the cycle or goes anywhere.
            _ => {
                let (second, third) = (self.draw_free(), self.draw_free());
                moves[0] = (first, self.state.place[second as usize]);
                moves[1] = (second, self.state.place[third as usize]);
                moves[2] = (third, if self.rng.random() { home } else { self.draw_cluster() });
                3
            }
        }
    }

    /// Half of the time one of a sub-cluster that is farthest from its mean.
    fn draw_model(&mut self) -> Option<u32> {
        if self.rng.random() {
            return Some(self.draw_free());
        }
        let dimension = usize::from(self.rng.random::<bool>());
        let members = &self.state.members[self.state.farthest(dimension)];
        let model = *members.get(self.rng.random_range(0..members.len().max(1)))?;
        self.instance.pins[model as usize].is_none().then_some(model)
    }

    fn draw_free(&mut self) -> u32 {
        self.free[self.rng.random_range(0..self.free.len())]
    }

    fn draw_cluster(&mut self) -> u32 {
        self.rng.random_range(0..self.instance.clusters as u32)
    }
}
