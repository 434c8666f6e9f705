//! c0 and c1 from executions. Backends measure both when they load a model, from samples of zeros; what batches of real
//! requests take shows what they are.
//!
//! By equation 3 of Orloj a batch of k requests whose longest takes a alone takes `a + c1 (k - 1) (a - c0)`. So what
//! each further request adds is a line over a, which rises by c1 and is 0 at c0. For each GPU that line is found by
//! least squares through its last batches, twice: without those the second time that are farthest off, which are
//! hiccups. a is what the largest of so many requests like these takes on average, so only batches count of whose
//! requests enough have run alone. The slowest GPU's line holds for all, as l(b) does, and is followed when it is off
//! by more than its tolerance. Both stay within half and four times what was measured.

use std::collections::{BTreeMap, VecDeque};

use proto::{GpuId, Span};

use super::BatchCost;
use crate::estimates::TOLERANCE;

/// A GPU's last batches ...
const BATCHES_MAX: usize = 64;
/// ... of which there must be so many.
const BATCHES_MIN: usize = 32;
/// One in so many is left out: those that are farthest off.
const OUTLIERS: usize = 8;
/// Lengths that differ by a smaller part of their mean tell nothing of c0.
const SPREAD_MIN: f64 = 0.2;
/// What is believed of what was measured: so many times as much, and its half.
const BELIEVED_MAX: f64 = 4.0;

/// A batch of several requests.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    /// k - 1.
    further: f64,
    /// What its longest request takes alone, in nanoseconds.
    alone: f64,
    /// What each further one added.
    added: f64,
}

/// c0 in nanoseconds and c1.
type Line = (f64, f64);

/// One model's.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fit {
    measured: BatchCost,
    gpus: BTreeMap<GpuId, VecDeque<Point>>,
}

impl Fit {
    pub(super) fn new(measured: BatchCost) -> Self {
        Self { measured, gpus: BTreeMap::new() }
    }

    /// Backends have measured it anew.
    pub(super) fn handle_measured(&mut self, measured: BatchCost) {
        self.measured = measured;
    }

    /// A GPU ran a batch of at least two requests, of which the longest takes so many nanoseconds alone.
    pub(super) fn handle_batch(&mut self, gpu: GpuId, batch: usize, alone: f64, took: Span) {
        let further = batch as f64 - 1.0;
        let points = self.gpus.entry(gpu).or_default();
        points.push_back(Point { further, alone, added: (took.as_nanos() as f64 - alone) / further });
        if points.len() > BATCHES_MAX {
            points.pop_front();
        }
    }

    pub(super) fn measured(&self) -> BatchCost {
        self.measured
    }

    pub(super) fn forget_gpus(&mut self) {
        self.gpus.clear();
    }

    pub(super) fn remove_gpu(&mut self, gpu: GpuId) {
        self.gpus.remove(&gpu);
    }

    /// What to plan with, if that has been `planned` so far.
    pub(super) fn cost(&self, planned: BatchCost) -> BatchCost {
        let known = || self.gpus.values().filter(|points| points.len() >= BATCHES_MIN);
        let count = known().map(VecDeque::len).sum::<usize>() as f64;
        let mean = |of: fn(&Point) -> f64| known().flatten().map(of).sum::<f64>() / count;
        let (further, alone) = (mean(|point| point.further), mean(|point| point.alone));
        // What one of all these batches would take.
        let takes = |(fixed, per_task): Line| alone + further * per_task * (alone - fixed);
        let lines = known().map(|points| self.line(points.iter().copied().collect()));
        let Some(slowest) = lines.max_by(|one, other| takes(*one).total_cmp(&takes(*other))) else { return planned };
        let (fixed, per_task) = slowest;
        let so_far = takes((planned.fixed.as_nanos() as f64, planned.per_task));
        if (takes(slowest) / so_far - 1.0).abs() <= TOLERANCE {
            return planned;
        }
        BatchCost { fixed: Span(fixed.round() as i64), per_task }
    }

    fn line(&self, mut points: Vec<Point>) -> Line {
        let (fixed, per_task) = self.least_squares(&points);
        let off = |point: &Point| {
            let expected = per_task * (point.alone - fixed);
            (point.further * (point.added - expected)).abs() / (point.alone + point.further * expected)
        };
        points.sort_by(|one, other| off(one).total_cmp(&off(other)));
        points.truncate(points.len() - points.len() / OUTLIERS);
        self.least_squares(&points)
    }

    /// Each point weighs as the square of how many requests it is about: what is measured is what all of them added.
    fn least_squares(&self, points: &[Point]) -> Line {
        let sum = |of: &dyn Fn(&Point) -> f64| -> f64 {
            points.iter().map(|point| point.further * point.further * of(point)).sum()
        };
        let weight = sum(&|_| 1.0);
        let (alone, added) = (sum(&|point| point.alone) / weight, sum(&|point| point.added) / weight);
        let variance = sum(&|point| (point.alone - alone).powi(2)) / weight;
        let slope = sum(&|point| (point.alone - alone) * (point.added - added)) / weight / variance;
        let measured = self.measured.fixed.as_nanos() as f64;
        let is_known = variance.sqrt() >= SPREAD_MIN * alone && slope > 0.0;
        let fixed = if is_known { alone - added / slope } else { measured };
        let fixed = fixed.clamp(measured / 2.0, measured * BELIEVED_MAX);
        // The slope through that point.
        let per_task = sum(&|point| point.added * (point.alone - fixed)) / sum(&|point| (point.alone - fixed).powi(2));
        let (least, most) = (self.measured.per_task / 2.0, self.measured.per_task * BELIEVED_MAX);
        let per_task = if per_task.is_finite() { per_task } else { self.measured.per_task };
        (fixed, per_task.clamp(least, most.min(1.0)))
    }
}
