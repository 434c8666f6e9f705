//! Step 5 with prices: every so often the price of GPU time is found anew ([`crate::pricing`]), and how many GPUs may
//! start batches early.

use std::collections::VecDeque;

use proto::{ModelId, Span, Timestamp};

use super::{RankThread, SubCluster};
use crate::{messages::Price, pricing::Load};

/// Plans follow each other so fast while requests come.
const PLAN_INTERVAL: Span = Span::from_millis(20);
/// Nobody is told of a price that is off by less than this part.
const PRICE_TOLERANCE: f32 = 0.02;
/// Planning ends where GPUs are busy for less than this part of the time.
const BUSY_MIN: f64 = 0.02;

/// While GPUs are busy for less than the first of these parts of the time nobody queues for them early, and from the
/// second on everybody who should.
const PLENTY_PART: f64 = 0.5;
const SCARCE_PART: f64 = 0.8;

/// When prices are found, and who is to be told.
#[derive(Debug, Default)]
pub(super) struct Prices {
    looks_at: Option<Timestamp>,
    changed: VecDeque<ModelId>,
}

impl Prices {
    /// A model has told what is asked of it.
    pub(super) fn handle_traffic(&mut self, now: Timestamp) {
        self.looks_at.get_or_insert(now + PLAN_INTERVAL);
    }

    pub(super) fn looks_at(&self) -> Option<Timestamp> {
        self.looks_at
    }
}

impl RankThread {
    /// The next model whose price is another one.
    pub fn poll_price(&mut self) -> Option<(ModelId, Price)> {
        let id = self.prices.changed.pop_front()?;
        Some((id, self.price(id)))
    }

    /// What a model's batches are sized by.
    #[must_use]
    pub fn price(&self, id: ModelId) -> Price {
        self.models.get(id.0 as usize).map_or_else(Price::default, |model| model.price)
    }

    /// Plans for each sub-cluster. O(M) for each price that is looked at.
    pub(super) fn plan_prices(&mut self, now: Timestamp) {
        let mut prices = vec![Price::default(); self.models.len()];
        let mut is_idle = true;
        for host in 0..self.sub_clusters.len() as u32 {
            if let Some(is_host_idle) = self.plan_host(now, host, &mut prices) {
                is_idle &= is_host_idle;
            }
        }
        for (id, price) in (0..).map(ModelId).zip(prices) {
            let told = &mut self.models[id.0 as usize].price;
            // An infinite one is near none.
            let is_near = |one: f32, other: f32| {
                one == other || one.is_finite() && (one - other).abs() <= PRICE_TOLERANCE * one.abs()
            };
            if !is_near(told.price, price.price) || !is_near(told.execution_ms, price.execution_ms) {
                *told = price;
                self.prices.changed.push_back(id);
            }
        }
        self.prices.looks_at = (!is_idle).then(|| now + PLAN_INTERVAL);
    }

    /// Plans for one sub-cluster. Yields whether it has next to nothing to do.
    fn plan_host(&mut self, now: Timestamp, host: u32, prices: &mut [Price]) -> Option<bool> {
        let has_background = self.has_background(host);
        let mut sub_cluster = self.sub_clusters[host as usize].take()?;
        let gpus = sub_cluster.gpus.len();
        let traffic = |id: &ModelId| {
            let model = &self.models[id.0 as usize];
            let is_here = model.hosts.iter().any(|&(other, _)| other == host);
            let traffic = model.traffic.filter(|_| is_here)?;
            let others = model.hosts.iter().filter(|&&(other, _)| other != host);
            let others = others.filter_map(|&(other, _)| self.sub_clusters[other as usize].as_ref());
            let all = gpus + others.map(|other| other.gpus.len()).sum::<usize>();
            let mut load = Load::of(&traffic, now, gpus as f64 / all as f64);
            if has_background {
                load.gpu_price = f64::INFINITY;
            }
            Some((*id, load))
        };
        let (ids, loads): (Vec<_>, Vec<_>) = sub_cluster.models.iter().filter_map(traffic).unzip();
        let SubCluster { pricing, .. } = &mut sub_cluster;
        let plan = pricing.plan(&loads, gpus);
        let busy_part = plan.busy / gpus as f64;
        let scarcity = ((busy_part - PLENTY_PART) / (SCARCE_PART - PLENTY_PART)).clamp(0.0, 1.0);
        let execution_ms = scarcity * sub_cluster.execution_ns / 1e6;
        for (id, load) in ids.iter().zip(&loads) {
            let price = &mut prices[id.0 as usize];
            price.price = price.price.max(load.price(plan.price, plan.gpu_price) as f32);
            price.execution_ms = price.execution_ms.max(execution_ms as f32);
        }
        self.sub_clusters[host as usize] = Some(sub_cluster);
        self.set_open(host, plan.open);
        Some(plan.busy < BUSY_MIN * gpus as f64)
    }

    /// Whether tasks without an objective wait that could run there: GPU time is worth most to them.
    fn has_background(&self, host: u32) -> bool {
        self.background.ids().any(|id| self.models[id.0 as usize].hosts.iter().any(|&(other, _)| other == host))
    }
}
