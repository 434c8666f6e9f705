//! RDMA devices as the kernel shows them in /sys/class/infiniband: ports, GIDs, and which would be chosen.

use std::net::{IpAddr, Ipv6Addr};

use transport::ArmName;

use super::host::{Host, Limits};
use crate::doctor::finding::{Finding, REGISTERED_BYTES_USUAL};

const CLASS: &str = "/sys/class/infiniband";
/// A frontend registers its slots once more for each backend that is linked, here eight.
const LOCKED_BYTES_USUAL: u64 = 9 * REGISTERED_BYTES_USUAL / 2;
/// Headers that a RoCEv2 packet carries beside its payload: 40 IPv6, 8 UDP, 12 BTH, 28 the longest extended header,
/// 4 XRC, 4 ICRC. The path MTU must leave room for them (as Linux's `iboe_get_mtu` does).
const HEADERS_BYTES: i64 = 96;

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    /// As libibverbs names it.
    pub name: String,
    /// Where it sits, on a machine with several nodes.
    pub numa_node: Option<i64>,
    ports: Vec<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Port {
    number: String,
    /// Such as ACTIVE or DOWN.
    state: String,
    link_layer: String,
    rate: String,
    /// The Ethernet interface below, and its MTU.
    interface: Option<(String, i64)>,
    gids: Vec<Gid>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Gid {
    index: usize,
    address: Ipv6Addr,
    /// `RoCE v2`, or `IB/RoCE v1`.
    kind: String,
}

impl Gid {
    /// RoCEv2's address of the host, as a peer would dial it.
    fn ip(&self) -> IpAddr {
        self.address.to_canonical()
    }

    fn is_routable(&self) -> bool {
        self.kind == "RoCE v2" && !self.address.is_unicast_link_local()
    }
}

/// All devices with their ports.
pub(super) fn devices(host: &Host) -> Vec<Device> {
    let numa_node = |name: &str| host.number(&format!("{CLASS}/{name}/device/numa_node")).filter(|node| *node >= 0);
    let names = host.names(CLASS);
    names.into_iter().map(|name| Device { numa_node: numa_node(&name), ports: ports(host, &name), name }).collect()
}

fn ports(host: &Host, device: &str) -> Vec<Port> {
    let numbers = host.names(&format!("{CLASS}/{device}/ports"));
    let port = |number: String| {
        let at = format!("{CLASS}/{device}/ports/{number}");
        let text = |file: &str| host.read(&format!("{at}/{file}")).unwrap_or_default();
        let interface = host.names(&format!("{at}/gid_attrs/ndevs")).iter().find_map(|index| {
            let name = host.read(&format!("{at}/gid_attrs/ndevs/{index}"))?;
            let mtu = host.number(&format!("/sys/class/net/{name}/mtu"))?;
            Some((name, mtu))
        });
        let state = text("state");
        Port {
            // "4: ACTIVE"
            state: state.split_once(": ").map_or(state.clone(), |(_, name)| name.to_owned()),
            link_layer: text("link_layer"),
            rate: text("rate"),
            interface,
            gids: gids(host, &at),
            number,
        }
    };
    numbers.into_iter().map(port).collect()
}

/// The entries of a port's GID table that are in use; an empty slot's type cannot even be read.
fn gids(host: &Host, port: &str) -> Vec<Gid> {
    let mut gids: Vec<Gid> = host
        .names(&format!("{port}/gids"))
        .into_iter()
        .filter_map(|index| {
            let address: Ipv6Addr = host.read(&format!("{port}/gids/{index}"))?.parse().ok()?;
            let kind = host.read(&format!("{port}/gid_attrs/types/{index}"))?;
            (!address.is_unspecified()).then_some(Gid { index: index.parse().ok()?, address, kind })
        })
        .collect();
    gids.sort_by_key(|gid| gid.index);
    gids
}

/// What the devices offer, and whether the one asked for can be used.
pub(super) fn check(host: &Host, devices: &[Device], wanted: &ArmName, address: Option<IpAddr>) -> Vec<Finding> {
    let mut findings = vec![presence(devices, wanted)];
    // Of several, a cluster's addresses tell which one `auto` is.
    let is_only_one = devices.len() == 1;
    for device in devices {
        let needed = matches!(wanted, ArmName::Verbs(name) if *name == device.name) || wanted.is_auto() && is_only_one;
        for port in &device.ports {
            findings.extend(check_port(device, port, needed, address));
        }
    }
    if !devices.is_empty() || *wanted != ArmName::Soft {
        findings.extend(access(host, wanted));
    }
    findings
}

fn presence(devices: &[Device], wanted: &ArmName) -> Finding {
    let subject = "RDMA devices";
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let found = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    match wanted {
        ArmName::Verbs(_) if wanted.is_auto() && names.is_empty() => {
            let remedy = "--arm verbs:auto needs an RDMA device; load its driver, or use --arm soft";
            Finding::stop(subject, found, remedy)
        }
        ArmName::Verbs(device) if !wanted.is_auto() && !names.contains(&device.as_str()) => {
            let remedy = format!(
                "--arm verbs:{device} needs that device; name one that exists, load its driver, or use --arm soft"
            );
            Finding::stop(subject, found, remedy)
        }
        ArmName::Soft if names.is_empty() => {
            Finding::ok(subject, "none: only the soft arm is available, and it needs none")
        }
        _ => Finding::ok(subject, found),
    }
}

fn check_port(device: &Device, port: &Port, needed: bool, address: Option<IpAddr>) -> Vec<Finding> {
    let subject = format!("{} port {}", device.name, port.number);
    let bad = |found: String, remedy: String| {
        if needed { Finding::stop(&subject, found, remedy) } else { Finding::advice(&subject, found, remedy) }
    };
    if port.state != "ACTIVE" {
        let interface = port.interface.as_ref().map(|(name, _)| name.clone());
        let finding = bad(
            format!("{} ({})", port.state, port.link_layer),
            "the port must be ACTIVE: bring its link up, check cable and switch".into(),
        );
        return vec![match interface {
            Some(name) => finding.with_commands([format!("ip link set {name} up")]),
            None => finding,
        }];
    }
    let mut findings = vec![Finding::ok(&subject, format!("ACTIVE, {}, {}", port.link_layer, port.rate))];
    if port.link_layer != "Ethernet" {
        return findings;
    }
    let listed = || {
        let gids: Vec<String> =
            port.gids.iter().map(|gid| format!("{} {} ({})", gid.index, gid.ip(), gid.kind)).collect();
        if gids.is_empty() { "none".to_owned() } else { gids.join(", ") }
    };
    findings.push(match choose(&port.gids, address) {
        Some(gid) => {
            Finding::ok(format!("{subject} GID"), format!("index {}: {} would be chosen", gid.index, gid.ip()))
        }
        None => {
            let wanted = address.map_or("an IP address".into(), |address| format!("the address {address}"));
            bad(format!("GIDs: {}", listed()), format!("no routable RoCEv2 GID with {wanted}; give its interface one"))
        }
    });
    if let Some((interface, mtu)) = &port.interface {
        findings.push(path_mtu(&subject, interface, *mtu));
    }
    findings
}

/// The routable RoCEv2 GID of this address; without one asked for, IPv4 before IPv6. By address and never by index:
/// indexes differ between hosts and change when interfaces come and go.
fn choose(gids: &[Gid], address: Option<IpAddr>) -> Option<&Gid> {
    let mut routable = gids.iter().filter(|gid| gid.is_routable());
    match address {
        Some(address) => routable.find(|gid| gid.ip() == address),
        None => routable.min_by_key(|gid| (gid.ip().is_ipv6(), gid.index)),
    }
}

/// The largest path MTU that fits the interface: two ends that differ lose large messages only, which is hard to see.
fn path_mtu(subject: &str, interface: &str, mtu: i64) -> Finding {
    let subject = format!("{subject} path MTU");
    match [4096, 2048, 1024, 512, 256].into_iter().find(|path| path + HEADERS_BYTES <= mtu) {
        Some(4096) => Finding::ok(subject, format!("4096 ({interface} has {mtu})")),
        fits => {
            let found = format!("{} ({interface} has {mtu})", fits.map_or("none".into(), |path: i64| path.to_string()));
            let remedy = "4096 needs an interface MTU of 4200 or more, on every host and switch of the path alike";
            Finding::advice(subject, found, remedy).with_commands([format!("ip link set {interface} mtu 4200")])
        }
    }
}

/// Whether this process may open devices: the kernel's node, and the library.
fn access(host: &Host, wanted: &ArmName) -> Vec<Finding> {
    let missing = |subject: &str, found: &str, remedy: &str| match wanted {
        ArmName::Soft => Finding::advice(subject, found, remedy),
        ArmName::Verbs(_) => Finding::stop(subject, found, remedy),
    };
    let nodes: Vec<String> =
        host.names("/dev/infiniband").into_iter().filter(|name| name.starts_with("uverbs")).collect();
    let node = if nodes.is_empty() {
        missing("/dev/infiniband", "no uverbs node", "load ib_uverbs, or pass /dev/infiniband into this container")
            .with_commands(["modprobe ib_uverbs"])
    } else {
        Finding::ok("/dev/infiniband", nodes.join(", "))
    };
    let directories = ["/usr/lib64", "/usr/lib", "/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
    let library = match directories.iter().find(|directory| host.has(&format!("{directory}/libibverbs.so.1"))) {
        Some(directory) => Finding::ok("libibverbs", format!("{directory}/libibverbs.so.1")),
        None => missing(
            "libibverbs",
            "libibverbs.so.1 not found",
            "install rdma-core (Debian: libibverbs1 ibverbs-providers)",
        )
        .with_commands(["apt-get install -y libibverbs1 ibverbs-providers"]),
    };
    vec![node, library]
}

/// Memory that a device reaches is pinned, as often as it is registered, and the usual limit of 8 MiB is less than one
/// arena.
pub(super) fn memlock(host: &Host, devices: &[Device], limits: &Limits, wanted: &ArmName) -> Finding {
    let subject = "RLIMIT_MEMLOCK";
    let found = limits.memlock_bytes.map_or("unlimited".into(), |bytes| format!("{} MiB", bytes >> 20));
    if limits.memlock_bytes.is_none_or(|bytes| bytes >= LOCKED_BYTES_USUAL) {
        return Finding::ok(subject, found);
    }
    if may_pin_without_limit(host) {
        return Finding::ok(subject, format!("{found}, not enforced for this process (CAP_IPC_LOCK)"));
    }
    if devices.is_empty() && *wanted == ArmName::Soft {
        return Finding::ok(subject, format!("{found} (only the verbs arm pins memory)"));
    }
    let remedy = "registered memory is pinned; set LimitMEMLOCK=infinity in the unit, `--ulimit memlock=-1` for a \
                  container, or `ulimit -l unlimited`";
    match wanted {
        ArmName::Soft => Finding::advice(subject, found, remedy),
        ArmName::Verbs(_) => Finding::stop(subject, found, remedy),
    }
}

fn may_pin_without_limit(host: &Host) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = host.read("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    effective.is_some_and(|capabilities| capabilities & CAP_IPC_LOCK != 0)
}
