//! Which arm carries each node. `DOWNBEAT_NODES` names them in turn, with commas: `soft`, `soft@ADDRESS` (the first of
//! as many as there are nodes) or `verbs:DEVICE@ADDRESS`. Unless it is set, all are soft, on random loopback addresses.
//! Their packets go by rings, or as `DOWNBEAT_LOCAL_PATH` says.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::{Child, Command},
    sync::LazyLock,
};

use transport::{Arm, ArmName, EndpointConfig, Faults, LocalPath, ROCE_PORT, VerbsConfig, VerbsSettings};

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

pub(crate) fn is_soft(node: usize) -> bool {
    kind(node).name == ArmName::Soft
}

/// How a node is opened. The devices of several verbs nodes may be one; soft nodes need an address each.
pub(crate) fn config(node: usize) -> EndpointConfig {
    let kind = kind(node);
    let address = kind.address.map(|first| match first {
        IpAddr::V4(first) if is_soft(node) => IpAddr::V4((first.to_bits() + (node / KINDS.len()) as u32).into()),
        address => address,
    });
    let address = address.map(|ip| SocketAddr::new(ip, ROCE_PORT));
    let arm = Arm::choose(&kind.name, address, false, Faults::default(), VerbsSettings::default()).unwrap();
    let path = testing::local_path().map_or(LocalPath::Ring, |path| path.parse().unwrap());
    EndpointConfig::over(arm).with_local_path(path).with_secret(SECRET).listening("127.0.0.1:0".parse().unwrap())
}

/// The same for a network with these faults; a device's are its interface's ([`Interface::spoil`]).
///
/// No case ends by chance because of retries. A device has no end of them ([`patient`]). A soft node gives a message
/// up after 8 tries in a row without progress, of each of which the first packet or all answers are lost: at most
/// 1 - 0.9^2 = 0.19 under ten per cent of loss each way, and 0.04 under two. That meets one of a case's 8 rounds of 6
/// messages with a chance of at most 48 * 0.19^8 = 8e-5 and 48 * 0.04^8 = 3e-10.
pub(crate) fn config_with(node: usize, faults: Faults) -> EndpointConfig {
    let config = config(node);
    if is_soft(node) { config.with_faults(faults) } else { config }
}

/// A device that never gives a peer up by itself. By default `rdma_rxe` does after half a second without an answer. A
/// soft peer answers when its thread comes to it, and all nodes of a fabric share one: on an emulated processor that
/// others keep from running, a round of five of them has taken four seconds, in which the kernel's timers went on. It
/// also counts every gap that its peer tells of as a retry, even where packets came through before it, so over a bad
/// link a long message runs out of any number of them. A peer that is gone is noticed by the bootstrap.
pub(crate) fn patient(mut config: EndpointConfig) -> EndpointConfig {
    if let Arm::Verbs(VerbsConfig { settings, .. }) = &mut config.arm {
        // For ever, there.
        settings.retry_count = 7;
    }
    config
}

fn devices() -> impl Iterator<Item = &'static str> {
    KINDS.iter().filter_map(|kind| match &kind.name {
        ArmName::Verbs(device) => Some(device.as_str()),
        ArmName::Soft => None,
    })
}

/// RNR NAKs that the devices have received since the host started.
pub(crate) fn not_ready_of_devices() -> u64 {
    let count = |device| {
        let counter = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_rnr_err");
        std::fs::read_to_string(counter).unwrap().trim().parse::<u64>().unwrap()
    };
    devices().map(count).sum()
}

/// The network interface under a verbs device.
#[allow(dead_code)] // Only one of the test programs that include this file looks at the port.
pub(crate) struct Interface {
    device: &'static str,
    /// Of the device's port, as the kernel shows it.
    port: PathBuf,
    name: String,
    address: Option<IpAddr>,
}

/// Undoes something when it is dropped.
pub(crate) struct Undo {
    command: String,
}

#[allow(dead_code)] // As above.
impl Interface {
    /// None for a soft node.
    pub(crate) fn of(node: usize) -> Option<Self> {
        let Kind { name: ArmName::Verbs(device), address } = kind(node) else { return None };
        let port = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/1"));
        let name = std::fs::read_to_string(port.join("gid_attrs/ndevs/0")).unwrap().trim().to_owned();
        Some(Self { device, port, name, address: *address })
    }

    /// Takes the link down.
    pub(crate) fn down(&self) -> Undo {
        configure(&format!("ip link set {} down", self.name));
        Undo { command: format!("ip link set {} up", self.name) }
    }

    /// Takes the address away, which must be one of 24 bits of network.
    pub(crate) fn without_address(&self) -> Undo {
        let address = self.address.expect("a node with an address");
        configure(&format!("ip addr del {address}/24 dev {}", self.name));
        Undo { command: format!("ip addr add {address}/24 dev {}", self.name) }
    }

    /// Has the device removed, as far as its users let the kernel: this returns at once.
    pub(crate) fn remove_device(&self) -> Removal {
        let removing = in_namespace_of_rxe(&format!("rdma link delete {}", self.device)).spawn().unwrap();
        Removal { removing, again: format!("rdma link add {} type rxe netdev {}", self.device, self.name) }
    }

    /// Whether the device's port is up.
    pub(crate) fn is_active(&self) -> bool {
        std::fs::read_to_string(self.port.join("state")).unwrap().contains("ACTIVE")
    }

    /// Whether the device knows the address.
    pub(crate) fn has_gid(&self) -> bool {
        let known = (0..16).filter_map(|index| std::fs::read_to_string(self.port.join(format!("gids/{index}"))).ok());
        let known = known.filter_map(|gid| gid.trim().parse::<Ipv6Addr>().ok());
        known.map(|gid| gid.to_canonical()).any(|gid| Some(gid) == self.address)
    }

    /// The kernel's network emulator on what it sends.
    pub(crate) fn spoil(&self, faults: Faults) -> Undo {
        let Faults { loss, duplicate, reorder, corrupt } = faults;
        // A packet that netem "reorders" overtakes those that it delays.
        let reorder =
            if reorder > 0.0 { format!("delay 1ms reorder {}%", 100.0 - reorder * 100.0) } else { String::new() };
        configure(&format!(
            "tc qdisc replace dev {} root netem limit 100000 {reorder} loss {}% duplicate {}% corrupt {}%",
            self.name,
            loss * 100.0,
            duplicate * 100.0,
            corrupt * 100.0
        ));
        Undo { command: format!("tc qdisc del dev {} root", self.name) }
    }
}

/// A device that is being removed.
#[allow(dead_code)] // As above.
pub(crate) struct Removal {
    removing: Child,
    again: String,
}

#[allow(dead_code)] // As above.
impl Removal {
    /// Whether the device is gone, which the kernel waits for its users to allow.
    pub(crate) fn is_over(&mut self) -> bool {
        let status = self.removing.try_wait().unwrap();
        assert!(status.is_none_or(|status| status.success()), "{status:?}");
        status.is_some()
    }

    /// Adds the device again, once it is gone.
    pub(crate) fn undo(self) {
        configure(&self.again);
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        configure(&self.command);
    }
}

/// In the network namespace of process 1, as rdma_rxe's interfaces are, wherever our sockets may be.
fn in_namespace_of_rxe(command: &str) -> Command {
    let mut nsenter = Command::new("nsenter");
    nsenter.arg("--net=/proc/1/ns/net").args(command.split_whitespace());
    nsenter
}

fn configure(command: &str) {
    let status = in_namespace_of_rxe(command).status();
    assert!(status.as_ref().is_ok_and(|status| status.success()), "{command}: {status:?}");
}
