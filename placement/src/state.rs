//! A placement under change: what each sub-cluster has, and what a few moves at once would make of it.

use crate::instance::{Instance, Load};

/// Moves that are tried at once.
pub(crate) const MOVES_MAX: usize = 3;
/// Sub-clusters that so many moves change.
const TOUCHED_MAX: usize = 2 * MOVES_MAX;
const NOBODY: u32 = u32::MAX;

/// How good a placement is. Of two, the one that exceeds limits by less is better, then that of the lower objective.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Score {
    /// What all sub-clusters have above their limits, in parts of these: 0 where the constraints 4 and 5 hold.
    pub excess: f64,
    /// ΔR / R + w ΔS / S.
    pub objective: f64,
    /// (max - min) / mean of rates, as in Symphony's Figure 16.
    pub rate_imbalance: f64,
    /// (max - min) / mean of static memory.
    pub memory_imbalance: f64,
}

/// What the search weighs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Totals {
    pub excess: f64,
    /// The largest deviations, weighted: the objective.
    pub largest: f64,
    /// Roots of mean squares of deviations, weighted: they tell a way where the largest ones stay.
    pub mean: f64,
}

impl Totals {
    /// Whether a placement with these is better than one with others.
    pub(crate) fn is_better(self, other: Self) -> bool {
        (self.excess, self.largest) < (other.excess, other.largest)
    }
}

/// The largest dynamic memory of a sub-cluster, whose that is, and the largest of its other models.
#[derive(Debug, Clone, Copy)]
struct Largest {
    bytes: u64,
    model: u32,
    next_bytes: u64,
}

impl Default for Largest {
    fn default() -> Self {
        Self { bytes: 0, model: NOBODY, next_bytes: 0 }
    }
}

impl Largest {
    fn add(&mut self, model: u32, bytes: u64) {
        if self.model == NOBODY || bytes > self.bytes {
            *self = Self { bytes, model, next_bytes: self.bytes };
        } else {
            self.next_bytes = self.next_bytes.max(bytes);
        }
    }

    fn without(&self, model: u32) -> u64 {
        if self.model == model { self.next_bytes } else { self.bytes }
    }
}

/// What a sub-cluster loses and gains in a trial, and what it had.
#[derive(Debug, Clone, Copy, Default)]
struct Touched {
    cluster: usize,
    leaves: Option<u32>,
    comes: Option<u32>,
    load: Load,
    deviations: [f64; 2],
    excess: f64,
}

/// Where all models are. Vectors are by model, or by sub-cluster.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub place: Vec<u32>,
    pub members: Vec<Vec<u32>>,
    /// Where each model stands among the members.
    positions: Vec<u32>,
    /// Models that are not where they were, and where each stands among them.
    pub away: Vec<u32>,
    away_positions: Vec<u32>,
    loads: Vec<Load>,
    largest: Vec<Largest>,
    /// Weighted parts of the means, each without its sign.
    deviations: [Vec<f64>; 2],
    excess: Vec<f64>,
    /// What the moves cost.
    pub cost: u64,
    pub totals: Totals,
    touched: [Touched; TOUCHED_MAX],
    touched_len: usize,
}

impl State {
    pub(crate) fn new(instance: &Instance, place: &[u32]) -> Self {
        let clusters = instance.clusters;
        let mut state = Self {
            place: place.to_vec(),
            members: vec![Vec::new(); clusters],
            positions: vec![0; place.len()],
            away: Vec::new(),
            away_positions: vec![0; place.len()],
            loads: vec![[0; 2]; clusters],
            largest: vec![Largest::default(); clusters],
            deviations: [vec![0.0; clusters], vec![0.0; clusters]],
            excess: vec![0.0; clusters],
            cost: 0,
            totals: Totals::default(),
            touched: [Touched::default(); TOUCHED_MAX],
            touched_len: 0,
        };
        for (model, &at) in place.iter().enumerate() {
            state.insert(model as u32, at as usize);
            (0..2).for_each(|index| state.loads[at as usize][index] += instance.loads[model][index]);
            state.cost += instance.cost(model, at);
            if instance.is_away(model, at) {
                state.leave(model as u32);
            }
        }
        for cluster in 0..clusters {
            state.find_largest(instance, cluster);
            state.weigh(instance, cluster, state.largest[cluster].bytes);
        }
        state.totals = state.sum();
        state
    }

    /// As its user sees it.
    pub(crate) fn score(&self, instance: &Instance) -> Score {
        let imbalance = |index: usize| {
            let loads = || self.loads.iter().map(|load| load[index]);
            let between = loads().max().unwrap_or(0) - loads().min().unwrap_or(0);
            if between > 0 { between as f64 / instance.means[index] } else { 0.0 }
        };
        let Totals { excess, largest, .. } = self.totals;
        Score { excess, objective: largest, rate_imbalance: imbalance(0), memory_imbalance: imbalance(1) }
    }

    /// The sub-cluster that is farthest from the mean.
    pub(crate) fn farthest(&self, dimension: usize) -> usize {
        let by = |cluster: &usize| self.deviations[dimension][*cluster] + self.excess[*cluster];
        (0..self.loads.len()).max_by(|a, b| by(a).total_cmp(&by(b))).expect("there are sub-clusters")
    }

    /// What these moves would make of it; `None` if they cost too much or two of them leave or reach one sub-cluster.
    /// Until [`State::keep`] or [`State::give_up`] nothing else may be asked.
    pub(crate) fn try_moves(&mut self, instance: &Instance, moves: &[(u32, u32)]) -> Option<Totals> {
        if !self.may_try(instance, moves) {
            self.touched_len = 0;
            return None;
        }
        for index in 0..self.touched_len {
            let Touched { cluster, leaves, comes, .. } = self.touched[index];
            let touched = &mut self.touched[index];
            touched.load = self.loads[cluster];
            touched.deviations = [0, 1].map(|index| self.deviations[index][cluster]);
            touched.excess = self.excess[cluster];
            let load = &mut self.loads[cluster];
            let mut dynamic_bytes = self.largest[cluster].bytes;
            if let Some(model) = leaves {
                (0..2).for_each(|index| load[index] -= instance.loads[model as usize][index]);
                dynamic_bytes = self.largest[cluster].without(model);
            }
            if let Some(model) = comes {
                (0..2).for_each(|index| load[index] += instance.loads[model as usize][index]);
                dynamic_bytes = dynamic_bytes.max(instance.dynamic_bytes[model as usize]);
            }
            self.weigh(instance, cluster, dynamic_bytes);
        }
        Some(self.sum())
    }

    /// Notes which sub-clusters the moves touch.
    fn may_try(&mut self, instance: &Instance, moves: &[(u32, u32)]) -> bool {
        self.touched_len = 0;
        let mut cost = self.cost;
        for &(model, to) in moves {
            let from = self.place[model as usize];
            if from == to
                || self.touch(from).leaves.replace(model).is_some()
                || self.touch(to).comes.replace(model).is_some()
            {
                return false;
            }
            cost = cost + instance.cost(model as usize, to) - instance.cost(model as usize, from);
        }
        instance.disruption_max.is_none_or(|max| cost <= max)
    }

    /// Takes what was tried.
    pub(crate) fn keep(&mut self, instance: &Instance, moves: &[(u32, u32)], totals: Totals) {
        for &(model, to) in moves {
            let from = std::mem::replace(&mut self.place[model as usize], to);
            self.cost = self.cost + instance.cost(model as usize, to) - instance.cost(model as usize, from);
            let position = self.positions[model as usize] as usize;
            self.members[from as usize].swap_remove(position);
            if let Some(&moved) = self.members[from as usize].get(position) {
                self.positions[moved as usize] = position as u32;
            }
            self.insert(model, to as usize);
            match (instance.is_away(model as usize, from), instance.is_away(model as usize, to)) {
                (false, true) => self.leave(model),
                (true, false) => self.come_home(model),
                _ => {}
            }
        }
        for index in 0..self.touched_len {
            self.find_largest(instance, self.touched[index].cluster);
        }
        self.totals = totals;
    }

    /// Leaves all as it was before the trial.
    pub(crate) fn give_up(&mut self) {
        for index in 0..self.touched_len {
            let Touched { cluster, load, deviations, excess, .. } = self.touched[index];
            self.loads[cluster] = load;
            (0..2).for_each(|index| self.deviations[index][cluster] = deviations[index]);
            self.excess[cluster] = excess;
        }
    }

    fn touch(&mut self, cluster: u32) -> &mut Touched {
        let cluster = cluster as usize;
        let found = self.touched[..self.touched_len].iter().position(|touched| touched.cluster == cluster);
        let index = found.unwrap_or_else(|| {
            self.touched[self.touched_len] = Touched { cluster, ..Touched::default() };
            self.touched_len += 1;
            self.touched_len - 1
        });
        &mut self.touched[index]
    }

    fn insert(&mut self, model: u32, cluster: usize) {
        self.positions[model as usize] = self.members[cluster].len() as u32;
        self.members[cluster].push(model);
    }

    fn leave(&mut self, model: u32) {
        self.away_positions[model as usize] = self.away.len() as u32;
        self.away.push(model);
    }

    fn come_home(&mut self, model: u32) {
        let position = self.away_positions[model as usize] as usize;
        self.away.swap_remove(position);
        if let Some(&moved) = self.away.get(position) {
            self.away_positions[moved as usize] = position as u32;
        }
    }

    fn find_largest(&mut self, instance: &Instance, cluster: usize) {
        // Nobody asks for it otherwise.
        if instance.limits[1].is_some() {
            let mut largest = Largest::default();
            for &model in &self.members[cluster] {
                largest.add(model, instance.dynamic_bytes[model as usize]);
            }
            self.largest[cluster] = largest;
        }
    }

    /// From the sub-cluster's load to how far it is from the means (equations 6 and 7), and above the limits (4 and 5).
    fn weigh(&mut self, instance: &Instance, cluster: usize, dynamic_bytes: u64) {
        let load = self.loads[cluster];
        for (index, load) in load.into_iter().enumerate() {
            if instance.weights[index] > 0.0 {
                let mean = instance.means[index];
                self.deviations[index][cluster] = instance.weights[index] * (load as f64 - mean).abs() / mean;
            }
        }
        let needs = [load[0], load[1] + dynamic_bytes];
        let above = |(need, limit): (u64, Option<u64>)| {
            limit.map_or(0.0, |limit| need.saturating_sub(limit) as f64 / limit.max(1) as f64)
        };
        self.excess[cluster] = needs.into_iter().zip(instance.limits).map(above).sum();
    }

    fn sum(&self) -> Totals {
        let mut totals = Totals { excess: self.excess.iter().sum(), ..Totals::default() };
        for deviations in &self.deviations {
            totals.largest += deviations.iter().copied().fold(0.0, f64::max);
            let squares: f64 = deviations.iter().map(|deviation| deviation * deviation).sum();
            totals.mean += (squares / deviations.len() as f64).sqrt();
        }
        totals
    }
}
