//! What dashboards for Triton show of the host that serves: its processors, its memory, and the memory that devices
//! reach. Part of the driver, as it reads `/proc`.

use std::{cell::Cell, fs};

use frontend::core::Core;
use prometheus::{Gauge, IntGauge, Registry};
use transport::Memory;

use super::register::registered;

pub(super) struct HostMetrics {
    utilization: Gauge,
    memory: [IntGauge; 2],
    pinned: [IntGauge; 2],
    /// Since the host was started, when somebody scraped last.
    last: Cell<Ticks>,
}

/// Time of all processors, in ticks of the kernel's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    all: u64,
}

impl HostMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str| registered(registry, IntGauge::new(name, help));
        Self {
            utilization: registered(
                registry,
                Gauge::new(
                    "nv_cpu_utilization",
                    "The part of this host's processors that was busy since the last scrape",
                ),
            ),
            memory: [
                gauge("nv_cpu_memory_total_bytes", "Memory of this host, or what a control group leaves of it"),
                gauge("nv_cpu_memory_used_bytes", "Of that, what is not available to whoever wants some"),
            ],
            pinned: [
                gauge(
                    "nv_pinned_memory_pool_total_bytes",
                    "Registered memory for slots, which backends read and write",
                ),
                gauge("nv_pinned_memory_pool_used_bytes", "Of that, blocks with a slot that is leased"),
            ],
            last: Cell::default(),
        }
    }

    /// A file that cannot be read leaves its gauges as they were.
    pub(super) fn read(&self, core: &Core) {
        if let Some(now) = fs::read_to_string("/proc/stat").ok().and_then(|text| ticks(&text)) {
            let last = self.last.replace(now);
            self.utilization.set(now.utilization_since(last));
        }
        if let Some(Memory { total_bytes, used_bytes, .. }) = Memory::here() {
            let bytes = [total_bytes, used_bytes].map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
            self.memory.iter().zip(bytes).for_each(|(gauge, bytes)| gauge.set(bytes));
        }
        let (total, used) = core.arena_bytes();
        self.pinned.iter().zip([total, used]).for_each(|(gauge, bytes)| gauge.set(bytes as i64));
    }
}

impl Ticks {
    fn utilization_since(self, last: Self) -> f64 {
        let (busy, all) = (self.busy.saturating_sub(last.busy), self.all.saturating_sub(last.all));
        // Counts of single processors may go back a little (proc_stat(5), "iowait").
        if all == 0 { 0.0 } else { (busy as f64 / all as f64).min(1.0) }
    }
}

/// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in these.
fn ticks(text: &str) -> Option<Ticks> {
    let counts = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(8);
    let counts: Vec<u64> = counts.map(|count| count.parse().ok()).collect::<Option<_>>()?;
    let idle = counts.get(3)? + counts.get(4)?;
    let all = counts.iter().sum();
    Some(Ticks { busy: all - idle, all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read() {
        let then = ticks("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4").unwrap();
        assert_eq!(then, Ticks { busy: 150, all: 1000 });
        let now = ticks("cpu  160 0 90 850 50 0 0 0 0 0\n").unwrap();
        assert_eq!(now.utilization_since(then), 100.0 / 150.0);
        assert_eq!(now.utilization_since(now), 0.0);
        for torn in ["", "cpu 1 x", "cpu  1 2 3", "intr 5"] {
            assert_eq!(ticks(torn), None, "{torn}");
        }
    }
}
