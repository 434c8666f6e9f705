//! Processors, clocks, memory and where devices sit.

use gateway::config::Shares;
use transport::Memory;

use super::{
    host::{Host, Limits},
    rdma::Device,
};
use crate::doctor::finding::{Finding, REGISTERED_BYTES_USUAL};

/// Threads that want a core of their own on a host that runs all three roles.
const CORES_WANTED: usize = 4;
/// What a scheduler, a frontend and a backend with small models take when they have nothing to do.
const ROLES_BYTES: u64 = 192 << 20;
const CPU: &str = "/sys/devices/system/cpu";
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0";

/// Everything about processors, clocks and memory.
pub(super) fn check(host: &Host, limits: &Limits, devices: &[Device]) -> Vec<Finding> {
    let findings = [
        cores(host, limits),
        quota(host),
        memory(host),
        governor(host),
        clock(host),
        hugepages(host),
        container(host, devices),
    ];
    findings.into_iter().flatten().collect()
}

fn cores(host: &Host, limits: &Limits) -> Option<Finding> {
    let isolated = host.read(&format!("{CPU}/isolated")).filter(|list| !list.is_empty());
    let found = match &isolated {
        Some(list) => format!("{} usable, isolated: {list}", limits.cores),
        None => format!("{} usable, none isolated", limits.cores),
    };
    Some(if limits.cores < CORES_WANTED {
        Finding::advice(
            "cores",
            found,
            "the scheduler, a frontend and a backend share them; a few requests in a hundred will miss tight \
             objectives",
        )
    } else if isolated.is_none() {
        Finding::advice(
            "cores",
            found,
            "for steady tails, isolate the scheduler's cores (kernel parameter isolcpus=) and start it there with \
             taskset",
        )
    } else {
        Finding::ok("cores", found)
    })
}

/// The control group's limit of processor time: threads that are stopped for the rest of a period miss their windows.
fn quota(host: &Host) -> Option<Finding> {
    let limit = match host.read("/sys/fs/cgroup/cpu.max") {
        Some(text) => text,
        None => format!(
            "{} {}",
            host.read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")?,
            host.read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")?
        ),
    };
    let (quota, period) = limit.split_once(' ')?;
    match (quota.parse::<i64>(), period.parse::<i64>()) {
        (Ok(quota), Ok(period)) if quota > 0 && period > 0 => {
            let found = format!("{:.1} cores by quota ({quota} of {period} us)", quota as f64 / period as f64);
            let remedy = "a process over its quota is stopped for the rest of the period, and windows are missed; give \
                          whole cores (cpuset) instead";
            Some(Finding::advice("processor quota", found, remedy))
        }
        _ => Some(Finding::ok("processor quota", "none")),
    }
}

/// What the kernel lets processes use before it ends one, and how much of that a frontend's clients may take.
fn memory(host: &Host) -> Option<Finding> {
    let memory = Memory::at(host.root())?;
    let mib = |bytes: u64| bytes >> 20;
    let whose = match &memory.bounded_by {
        Some(file) => format!(" by {}, of {} MiB", file.display(), mib(memory.host_bytes)),
        None => String::new(),
    };
    let clients = mib(Shares::of(Some(&memory)).bytes() as u64);
    let found =
        format!("{} MiB{whose}; by default clients of a frontend take up to {clients} MiB", mib(memory.total_bytes));
    let left = memory.total_bytes.saturating_sub(clients << 20);
    Some(if left >= ROLES_BYTES {
        Finding::ok("memory", found)
    } else {
        let remedy = format!(
            "the roles and small models take about {} MiB beside these; give more memory, or set arena_bytes, \
             bodies_bytes_max, untaken_bytes_max, cache_bytes and connections_max lower",
            mib(ROLES_BYTES)
        );
        Finding::advice("memory", found, remedy)
    })
}

fn governor(host: &Host) -> Option<Finding> {
    let names = host.names(CPU);
    let governors: std::collections::BTreeSet<String> = names
        .iter()
        .filter(|name| name.strip_prefix("cpu").is_some_and(|id| id.parse::<u32>().is_ok()))
        .filter_map(|name| host.read(&format!("{CPU}/{name}/cpufreq/scaling_governor")))
        .collect();
    if governors.is_empty() {
        return Some(Finding::ok("frequency governor", "set by the host or the hypervisor"));
    }
    let found = governors.iter().cloned().collect::<Vec<_>>().join(", ");
    Some(if found == "performance" {
        Finding::ok("frequency governor", found)
    } else {
        let command = "for governor in /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do echo performance \
                       > \"$governor\"; done";
        Finding::advice(
            "frequency governor",
            found,
            "cores that slow down when idle wake up late; `performance` keeps them ready",
        )
        .with_commands([command])
    })
}

fn clock(host: &Host) -> Option<Finding> {
    let source = host.read(&format!("{CLOCK}/current_clocksource"))?;
    let fast = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];
    if fast.contains(&source.as_str()) {
        return Some(Finding::ok("clock source", source));
    }
    let offered = host.read(&format!("{CLOCK}/available_clocksource")).unwrap_or_default();
    let better = fast.iter().find(|name| offered.split_whitespace().any(|offer| offer == **name));
    let finding = Finding::advice(
        "clock source",
        &source,
        "every look at the clock is a system call; use a clock that user space can read",
    );
    Some(match better {
        Some(name) => finding.with_commands([format!("echo {name} > {CLOCK}/current_clocksource")]),
        None => finding,
    })
}

/// Registered memory lies in huge pages where there are any: fewer translations on the device.
fn hugepages(host: &Host) -> Option<Finding> {
    let meminfo = host.read("/proc/meminfo")?;
    let value = |key: &str| {
        meminfo.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next()?.parse::<u64>().ok())
    };
    let (total, free, kib) = (value("HugePages_Total:")?, value("HugePages_Free:")?, value("Hugepagesize:")?);
    let found = format!("{free} of {total} pages of {kib} KiB free");
    Some(if free > 0 {
        Finding::ok("huge pages", found)
    } else {
        let pages = REGISTERED_BYTES_USUAL.div_ceil(kib << 10);
        let remedy = "registered memory then lies in ordinary pages, and a device translates more addresses";
        Finding::advice("huge pages", found, remedy).with_commands([format!("sysctl -w vm.nr_hugepages={pages}")])
    })
}

fn container(host: &Host, devices: &[Device]) -> Option<Finding> {
    let marks = ["/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io"];
    let mark = marks.into_iter().find(|path| host.has(path))?;
    let found = format!("inside one ({mark})");
    Some(if !devices.is_empty() && host.names("/dev/infiniband").is_empty() {
        let remedy = "it sees RDMA devices in /sys but may not use them; pass /dev/infiniband, the capability \
                      IPC_LOCK, and host networking or the device's own interface";
        Finding::advice("container", found, remedy)
    } else {
        Finding::ok("container", found)
    })
}

/// A NIC and a GPU on different nodes: every tensor crosses the link between processors.
pub(super) fn numa(gpus: &[(String, Option<i64>)], devices: &[Device]) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        gpus.iter().map(|(slot, node)| Finding::ok(format!("GPU {slot}"), node_text(*node))).collect();
    for device in devices {
        let Some(node) = device.numa_node else { continue };
        let far: Vec<&str> = gpus
            .iter()
            .filter(|(_, of_gpu)| of_gpu.is_some_and(|of_gpu| of_gpu != node))
            .map(|(slot, _)| slot.as_str())
            .collect();
        if !far.is_empty() {
            let remedy = format!(
                "tensors for GPU {} cross between processors; use a device on its node, or place such backends \
                 elsewhere",
                far.join(", ")
            );
            findings.push(Finding::advice(format!("NUMA node of {}", device.name), node.to_string(), remedy));
        }
    }
    findings
}

fn node_text(node: Option<i64>) -> String {
    node.map_or("on the only NUMA node".into(), |node| format!("on NUMA node {node}"))
}

/// NVIDIA's 3D and VGA controllers on the PCI bus, with their nodes where there are several.
pub(super) fn gpus(host: &Host) -> Vec<(String, Option<i64>)> {
    const PCI: &str = "/sys/bus/pci/devices";
    let of = |slot: &str, file: &str| host.read(&format!("{PCI}/{slot}/{file}")).unwrap_or_default();
    host.names(PCI)
        .into_iter()
        .filter(|slot| {
            of(slot, "vendor") == "0x10de"
                && ["0x0300", "0x0302"].iter().any(|class| of(slot, "class").starts_with(class))
        })
        .map(|slot| {
            let node = host.number(&format!("{PCI}/{slot}/numa_node")).filter(|node| *node >= 0);
            (slot, node)
        })
        .collect()
}
