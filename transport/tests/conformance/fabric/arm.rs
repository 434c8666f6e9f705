//! Which arm carries each node. `DOWNBEAT_NODES` names them in turn, with commas: `soft`, `soft@ADDRESS` (the first of
//! as many as there are nodes) or `verbs:DEVICE@ADDRESS`. Unless it is set, all are soft, on random loopback addresses.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
    sync::LazyLock,
};

use transport::{Arm, ArmName, EndpointConfig, Faults, ROCE_PORT, VerbsSettings};

use super::SECRET;

struct Kind {
    name: ArmName,
    address: Option<IpAddr>,
}

static KINDS: LazyLock<Vec<Kind>> = LazyLock::new(|| {
    let nodes = std::env::var("DOWNBEAT_NODES").unwrap_or_else(|_| "soft".to_owned());
    nodes
        .split(',')
        .map(|node| {
            let (name, address) = node.split_once('@').map_or((node, None), |(name, at)| (name, Some(at)));
            Kind { name: name.parse().unwrap(), address: address.map(|at| at.parse().unwrap()) }
        })
        .collect()
});

fn kind(node: usize) -> &'static Kind {
    &KINDS[node % KINDS.len()]
}

pub fn is_soft(node: usize) -> bool {
    kind(node).name == ArmName::Soft
}

/// How a node is opened. The devices of several verbs nodes may be one; soft nodes need an address each.
pub fn config(node: usize) -> EndpointConfig {
    let kind = kind(node);
    let address = kind.address.map(|first| match first {
        IpAddr::V4(first) if is_soft(node) => IpAddr::V4((first.to_bits() + (node / KINDS.len()) as u32).into()),
        address => address,
    });
    let address = address.map(|ip| SocketAddr::new(ip, ROCE_PORT));
    let arm = Arm::choose(&kind.name, address, Faults::default(), VerbsSettings::default()).unwrap();
    EndpointConfig::over(arm).with_secret(SECRET).listening("127.0.0.1:0".parse().unwrap())
}

fn devices() -> impl Iterator<Item = &'static str> {
    KINDS.iter().filter_map(|kind| match &kind.name {
        ArmName::Verbs(device) => Some(device.as_str()),
        ArmName::Soft => None,
    })
}

/// RNR NAKs that the devices have received since the host started.
pub fn not_ready_of_devices() -> u64 {
    let count = |device| {
        let counter = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_rnr_err");
        std::fs::read_to_string(counter).unwrap().trim().parse::<u64>().unwrap()
    };
    devices().map(count).sum()
}

/// The kernel's network emulator on what a verbs device sends, until it is dropped.
pub struct Netem {
    interface: String,
}

impl Netem {
    /// None for a soft node, which injects faults by itself.
    pub fn on(node: usize, faults: Faults) -> Option<Self> {
        let ArmName::Verbs(device) = &kind(node).name else { return None };
        let interface = format!("/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0");
        let netem = Self { interface: std::fs::read_to_string(interface).unwrap().trim().to_owned() };
        let Faults { loss, duplicate, reorder, corrupt } = faults;
        // A packet that netem "reorders" overtakes those that it delays.
        let reorder =
            if reorder > 0.0 { format!("delay 1ms reorder {}%", 100.0 - reorder * 100.0) } else { String::new() };
        netem.tc(&format!(
            "replace dev {} root netem limit 100000 {reorder} loss {}% duplicate {}% corrupt {}%",
            netem.interface,
            loss * 100.0,
            duplicate * 100.0,
            corrupt * 100.0
        ));
        Some(netem)
    }

    /// In the network namespace of process 1, as rdma_rxe's interfaces are, wherever our sockets may be.
    fn tc(&self, what: &str) {
        let status = Command::new("nsenter")
            .args(["--net=/proc/1/ns/net", "tc", "qdisc"])
            .args(what.split_whitespace())
            .status();
        assert!(status.as_ref().is_ok_and(|status| status.success()), "tc qdisc {what}: {status:?}");
    }
}

impl Drop for Netem {
    fn drop(&mut self) {
        self.tc(&format!("del dev {} root", self.interface));
    }
}
