//! What a frontend knows of its schedulers: who is the primary, what that one has to do, and how primaries came and
//! went. Read from the core when somebody scrapes.

use std::cell::Cell;

use frontend::core::{Core, Takeovers};
use prometheus::{Counter, Gauge, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use proto::{
    Wait,
    scheduler_to_frontend::SchedulerLoad,
    weights::{PAGE_BYTES, WeightsTally},
};

use super::{
    predictions::Predictions,
    register::{count_up_to, registered},
};

pub(super) struct SchedulerMetrics {
    connected: IntGauge,
    primary: IntGauge,
    epoch: IntGauge,
    sessions: IntGauge,
    takeovers: IntCounter,
    takeover_seconds: Gauge,
    lives: IntCounter,
    lower_epochs: IntCounter,
    /// Those that have lasted as long as they may, by their name.
    waits: IntCounterVec,
    settled_seconds: Gauge,
    /// Tasks, batches, GPUs, members and obeying members of the whole cluster.
    load: [IntGauge; 5],
    /// Cold tasks, loads, those from disk, failed loads, evictions and batches without weights.
    weights: [Restarting; 6],
    pcie_busy: Counter,
    pcie_busy_seen: Cell<f64>,
    /// All, and those in use.
    pages: [IntGauge; 2],
    /// The same of host memory, in bytes.
    host_bytes: [IntGauge; 2],
    predictions: Predictions,
}

/// A count of something that may begin anew: of a scheduler's life, or of those of backends.
struct Restarting {
    counter: IntCounter,
    seen: Cell<u64>,
}

impl Restarting {
    fn handle(&self, count: u64) {
        let seen = self.seen.replace(count);
        self.counter.inc_by(if count < seen { count } else { count - seen });
    }
}

impl SchedulerMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str| registered(registry, IntGauge::new(name, help));
        let counter = |name: &str, help: &str| registered(registry, IntCounter::new(name, help));
        Self {
            connected: gauge("downbeat_scheduler_connected", "1 while a scheduler that is the primary is joined"),
            primary: gauge("downbeat_scheduler_primary", "The primary's position in the list; -1 while there is none"),
            epoch: gauge(
                "downbeat_scheduler_epoch",
                "The number of the epoch that is obeyed, or was last; 0: none yet",
            ),
            sessions: gauge("downbeat_scheduler_sessions", "Schedulers that are joined, the primary among them"),
            takeovers: counter(
                "downbeat_scheduler_takeovers_total",
                "Times that another primary was obeyed than before",
            ),
            takeover_seconds: registered(
                registry,
                Gauge::new(
                    "downbeat_scheduler_takeover_seconds",
                    "How long there was no primary at the last takeover; 0 if the former was there until then",
                ),
            ),
            lives: counter(
                "downbeat_scheduler_lives_total",
                "Times that the frontend started over, and all its requests ended",
            ),
            lower_epochs: counter(
                "downbeat_scheduler_lower_epochs_total",
                "Times that a scheduler claimed an epoch below one that was claimed before, and was not believed",
            ),
            waits: registered(
                registry,
                IntCounterVec::new(
                    Opts::new("downbeat_waits_reached_total", "Waits on other members that lasted as long as they may"),
                    &["wait"],
                ),
            ),
            settled_seconds: registered(
                registry,
                Gauge::new(
                    "downbeat_scheduler_settled_seconds",
                    "How long it took the primary from its claim until all members obeyed it; 0 while they do not",
                ),
            ),
            load: [
                gauge("downbeat_scheduler_tasks_queued", "Tasks of all frontends that wait for their batch"),
                gauge("downbeat_scheduler_batches_in_flight", "Batches of all frontends that have no answer yet"),
                gauge("downbeat_scheduler_gpus", "GPUs of all backends that are connected to the scheduler"),
                gauge("downbeat_scheduler_members", "Frontends and backends that are joined to the primary"),
                gauge("downbeat_scheduler_members_obeying", "Of these, those that obey the primary"),
            ],
            weights: [
                ("downbeat_cold_starts_total", "Tasks that came while no GPU had their model's weights in memory"),
                ("downbeat_weights_loads_total", "Weights that were copied into a GPU's memory"),
                ("downbeat_weights_disk_loads_total", "Of these, weights that were read from disk before"),
                ("downbeat_weights_failed_total", "Loads that could not start in time, had no room, or failed"),
                ("downbeat_weights_evictions_total", "Weights that made room"),
                ("downbeat_weights_absent_total", "Batches that were rejected because their weights were not there"),
            ]
            .map(|(name, help)| Restarting { counter: counter(name, help), seen: Cell::new(0) }),
            pcie_busy: registered(
                registry,
                Counter::new(
                    "downbeat_pcie_busy_seconds_total",
                    "How long weights were on their way into GPUs' memory, from disk too",
                ),
            ),
            pcie_busy_seen: Cell::new(0.0),
            predictions: Predictions::new(registry),
            pages: [
                gauge("downbeat_weights_pages", "Pages of 16 MiB for weights, of GPUs that hold a part of all models"),
                gauge("downbeat_weights_pages_used", "Of these, pages that weights are in, or on their way to"),
            ],
            host_bytes: [
                gauge("downbeat_host_memory_bytes", "Host memory for weights, where that holds a part of all models"),
                gauge("downbeat_host_memory_used_bytes", "Of this, what weights are in, or are being read into"),
            ],
        }
    }

    pub(super) fn read(&self, core: &Core) {
        self.connected.set(i64::from(core.has_scheduler()));
        self.primary.set(core.primary().map_or(-1, |index| index as i64));
        self.epoch.set(core.obeys().epoch.number.into());
        self.sessions.set(core.schedulers_joined() as i64);
        let Takeovers { count, without, lives, lower_epochs, .. } = core.takeovers();
        count_up_to(&self.takeovers, count);
        self.takeover_seconds.set(without.as_secs_f64());
        count_up_to(&self.lives, lives);
        count_up_to(&self.lower_epochs, lower_epochs);
        for wait in Wait::ALL.into_iter().filter(|wait| wait.reached() > 0) {
            count_up_to(&self.waits.with_label_values(&[wait.name()]), wait.reached());
        }
        let load = core.scheduler_load();
        self.predictions.read(&load.predictions);
        let SchedulerLoad { queued, batches, gpus, members, obeying, settled, cold, weights, .. } = load;
        self.settled_seconds.set(settled.as_secs_f64());
        self.load
            .iter()
            .zip([queued, batches, gpus, members, obeying])
            .for_each(|(gauge, count)| gauge.set(count.into()));
        let WeightsTally { loads, reads, failed, evictions, absent, busy, .. } = weights;
        self.weights
            .iter()
            .zip([cold, loads, reads, failed, evictions, absent])
            .for_each(|(counter, count)| counter.handle(count));
        let busy = busy.as_secs_f64().max(0.0);
        let seen = self.pcie_busy_seen.replace(busy);
        self.pcie_busy.inc_by(if busy < seen { busy } else { busy - seen });
        let count = |pages: u64| i64::try_from(pages).unwrap_or(i64::MAX);
        let WeightsTally { pages, pages_used, host_pages, host_pages_used, .. } = weights;
        self.pages.iter().zip([pages, pages_used]).for_each(|(gauge, pages)| gauge.set(count(pages)));
        let bytes = |pages: u64| count(pages.saturating_mul(PAGE_BYTES));
        self.host_bytes.iter().zip([host_pages, host_pages_used]).for_each(|(gauge, pages)| gauge.set(bytes(pages)));
    }
}
