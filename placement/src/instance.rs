//! A checked problem, in whole numbers: sums of them do not depend on their order, however often models move.

use std::collections::BTreeMap;

use crate::problem::{MODELS_MAX, PlacementError, Problem, RATE_MAX_RPS, SUB_CLUSTERS_MAX};

/// Of a request a second, and of a move's cost.
const MILLIONTHS: f64 = 1e6;
/// The largest weight, and cost of a move.
const WEIGHT_MAX: f64 = 1e6;
/// The most that all models' memory may be: sums of it, and of a few models more, do not overflow.
const BYTES_MAX: u64 = 1 << 62;

/// What balances: requests a second in millionths, and bytes of static memory.
pub(crate) type Load = [u64; 2];
/// What stands for each in errors.
pub(crate) const LIMITS: [&str; 2] = ["rate_max_rps", "memory_max_bytes"];

/// A checked problem. All vectors are by model.
#[derive(Debug, Clone)]
pub(crate) struct Instance {
    pub clusters: usize,
    pub loads: Vec<Load>,
    pub dynamic_bytes: Vec<u64>,
    /// In millionths.
    pub costs: Vec<u64>,
    pub former: Vec<Option<u32>>,
    pub pins: Vec<Option<u32>>,
    /// `R_max`, and `S_max`.
    pub limits: [Option<u64>; 2],
    /// Means of all sub-clusters.
    pub means: [f64; 2],
    /// 1 and w; 0 where nobody has any.
    pub weights: [f64; 2],
    /// In millionths.
    pub disruption_max: Option<u64>,
}

type Result<T> = std::result::Result<T, PlacementError>;

fn in_range(key: impl Fn() -> String, found: f64, max: f64) -> Result<u64> {
    if (0.0..=max).contains(&found) {
        return Ok((found * MILLIONTHS).round() as u64);
    }
    Err(PlacementError::new(key(), found.to_string(), format!("a number from 0 to {max}")))
}

/// A load as it stands in errors.
pub(crate) fn shown(dimension: usize, load: u64) -> String {
    match dimension {
        0 => format!("{} requests/s", load as f64 / MILLIONTHS),
        _ => format!("{load} bytes"),
    }
}

impl Instance {
    pub(crate) fn new(problem: &Problem) -> Result<Self> {
        let clusters = problem.sub_clusters;
        if !(1..=SUB_CLUSTERS_MAX).contains(&clusters) {
            let expected = format!("1 to {SUB_CLUSTERS_MAX}");
            return Err(PlacementError::new("sub_clusters", clusters.to_string(), expected));
        }
        if !(1..=MODELS_MAX).contains(&problem.models.len()) {
            let found = problem.models.len().to_string();
            return Err(PlacementError::new("models", found, format!("1 to {MODELS_MAX}")));
        }
        let mut loads = Vec::new();
        let mut costs = Vec::new();
        let mut former = Vec::new();
        let mut bytes = 0u64;
        for model in &problem.models {
            let key = |key: &str| format!("model {:?}: {key}", model.name);
            let rate = in_range(|| key("rate_rps"), model.rate_rps, RATE_MAX_RPS)?;
            costs.push(in_range(|| key("move_cost"), model.move_cost, WEIGHT_MAX)?);
            if let Some(at) = model.former.filter(|&at| at >= clusters) {
                return Err(PlacementError::new(key("former"), at.to_string(), format!("below {clusters}")));
            }
            former.push(model.former.map(|at| at as u32));
            let both = model.static_bytes.saturating_add(model.dynamic_bytes);
            bytes = bytes.saturating_add(both);
            if bytes > BYTES_MAX {
                let expected = format!("at most {BYTES_MAX} bytes of all models together");
                return Err(PlacementError::new(key("static_bytes"), model.static_bytes.to_string(), expected));
            }
            loads.push([rate, model.static_bytes]);
        }
        let limit = |index: usize, found: f64| in_range(|| LIMITS[index].to_owned(), found, 1e12);
        let rate_max = problem.rate_max_rps.map(|found| limit(0, found)).transpose()?;
        in_range(|| "memory_weight".to_owned(), problem.memory_weight, WEIGHT_MAX)?;
        let sums = [0, 1].map(|index| loads.iter().map(|load: &Load| load[index]).sum::<u64>());
        let weight = |index: usize, weight: f64| if sums[index] > 0 { weight } else { 0.0 };
        let instance = Self {
            clusters,
            dynamic_bytes: problem.models.iter().map(|model| model.dynamic_bytes).collect(),
            costs,
            former,
            pins: pins(problem)?,
            limits: [rate_max, problem.memory_max_bytes],
            means: sums.map(|sum| sum as f64 / clusters as f64),
            weights: [weight(0, 1.0), weight(1, problem.memory_weight)],
            disruption_max: problem.disruption_max.map(disruption_max).transpose()?,
            loads,
        };
        instance.check_limits(problem, sums)?;
        instance.check_pins(problem)?;
        Ok(instance)
    }

    /// What a model needs of a limit if it is alone: memory to run in, too.
    pub(crate) fn alone(&self, model: usize, dimension: usize) -> u64 {
        self.loads[model][dimension] + if dimension == 1 { self.dynamic_bytes[model] } else { 0 }
    }

    /// What a model costs where it is.
    pub(crate) fn cost(&self, model: usize, at: u32) -> u64 {
        if self.is_away(model, at) { self.costs[model] } else { 0 }
    }

    /// Whether it was elsewhere.
    pub(crate) fn is_away(&self, model: usize, at: u32) -> bool {
        self.former[model].is_some_and(|former| former != at)
    }

    /// That each model fits somewhere, and all of them together.
    fn check_limits(&self, problem: &Problem, sums: Load) -> Result<()> {
        for (index, limit) in self.limits.iter().enumerate() {
            let Some(limit) = *limit else { continue };
            let most = (0..self.loads.len()).max_by_key(|&model| self.alone(model, index)).expect("there are models");
            if self.alone(most, index) > limit {
                let name = &problem.models[most].name;
                let key = ["rate_rps", "static_bytes + dynamic_bytes"][index];
                let expected = format!("at most {}, {}: it fits no sub-cluster", LIMITS[index], shown(index, limit));
                let found = shown(index, self.alone(most, index));
                return Err(PlacementError::new(format!("model {name:?}: {key}"), found, expected));
            }
            let least = sums[index].div_ceil(self.clusters as u64);
            if least > limit {
                let expected = format!(
                    "at least {}, the mean of {} sub-clusters, or more of them",
                    shown(index, least),
                    self.clusters
                );
                return Err(PlacementError::new(LIMITS[index], shown(index, limit), expected));
            }
        }
        Ok(())
    }

    /// That what is pinned fits where it is pinned, and may be moved there.
    fn check_pins(&self, problem: &Problem) -> Result<()> {
        let mut pinned: BTreeMap<u32, (Load, u64)> = BTreeMap::new();
        let mut cost = 0;
        for (model, at) in self.pins.iter().enumerate().filter_map(|(model, pin)| Some((model, (*pin)?))) {
            let (load, dynamic) = pinned.entry(at).or_default();
            (0..2).for_each(|index| load[index] += self.loads[model][index]);
            *dynamic = self.dynamic_bytes[model].max(*dynamic);
            cost += self.cost(model, at);
        }
        for (at, (load, dynamic)) in pinned {
            for (index, needed) in [load[0], load[1] + dynamic].into_iter().enumerate() {
                let Some(limit) = self.limits[index].filter(|&limit| needed > limit) else { continue };
                let found = format!("{} in sub-cluster {at}", shown(index, needed));
                let expected = format!("at most {}, {}", LIMITS[index], shown(index, limit));
                return Err(PlacementError::new("pins", found, expected));
            }
        }
        match problem.disruption_max {
            Some(max) if self.disruption_max.is_some_and(|limit| cost > limit) => {
                let found = format!("moves to them that cost {}", cost as f64 / MILLIONTHS);
                Err(PlacementError::new("pins", found, format!("at most disruption_max, {max}")))
            }
            _ => Ok(()),
        }
    }
}

fn disruption_max(found: f64) -> Result<u64> {
    match in_range(|| "disruption_max".to_owned(), found, 1e12)? {
        0 => Err(PlacementError::new("disruption_max", found.to_string(), "a number above 0, or none")),
        max => Ok(max),
    }
}

/// The pin of each model.
fn pins(problem: &Problem) -> Result<Vec<Option<u32>>> {
    let mut by_name = BTreeMap::new();
    for (index, model) in problem.models.iter().enumerate() {
        if by_name.insert(model.name.as_str(), index).is_some() {
            return Err(PlacementError::new("models", format!("{:?} twice", model.name), "unique names"));
        }
    }
    let mut pins = vec![None; problem.models.len()];
    for pin in &problem.pins {
        let key = || format!("pin of {:?}", pin.model);
        let Some(&model) = by_name.get(pin.model.as_str()) else {
            return Err(PlacementError::new(key(), "no such model", "the name of a model"));
        };
        if pin.sub_cluster >= problem.sub_clusters {
            let expected = format!("a sub-cluster below {}", problem.sub_clusters);
            return Err(PlacementError::new(key(), pin.sub_cluster.to_string(), expected));
        }
        let before = pins[model].replace(pin.sub_cluster as u32);
        if let Some(other) = before.filter(|&other| other != pin.sub_cluster as u32) {
            return Err(PlacementError::new(key(), format!("{other} and {}", pin.sub_cluster), "one sub-cluster"));
        }
    }
    Ok(pins)
}
