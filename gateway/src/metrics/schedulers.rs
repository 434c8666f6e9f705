//! What a frontend knows of its schedulers: who is the primary, what that one has to do, and how primaries came and
//! went. Read from the core when somebody scrapes.

use frontend::core::{Core, Takeovers};
use prometheus::{Gauge, IntCounter, IntGauge, Registry};
use proto::scheduler_to_frontend::SchedulerLoad;

use super::{count_up_to, registered};

pub(super) struct SchedulerMetrics {
    connected: IntGauge,
    primary: IntGauge,
    epoch: IntGauge,
    sessions: IntGauge,
    takeovers: IntCounter,
    takeover_seconds: Gauge,
    lives: IntCounter,
    settled_seconds: Gauge,
    /// Tasks, batches, GPUs, members and obeying members of the whole cluster.
    load: [IntGauge; 5],
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
        }
    }

    pub(super) fn read(&self, core: &Core) {
        self.connected.set(i64::from(core.has_scheduler()));
        self.primary.set(core.primary().map_or(-1, |index| index as i64));
        self.epoch.set(core.obeys().epoch.number.into());
        self.sessions.set(core.schedulers_joined() as i64);
        let Takeovers { count, without, lives, .. } = core.takeovers();
        count_up_to(&self.takeovers, count);
        self.takeover_seconds.set(without.as_secs_f64());
        count_up_to(&self.lives, lives);
        let SchedulerLoad { queued, batches, gpus, members, obeying, settled } = core.scheduler_load();
        self.settled_seconds.set(settled.as_secs_f64());
        self.load
            .iter()
            .zip([queued, batches, gpus, members, obeying])
            .for_each(|(gauge, count)| gauge.set(count.into()));
    }
}
