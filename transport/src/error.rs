//! Why operations fail: one type for each operation. Their texts are one line that tells the operator what to change.
//! What ends a connection that stands is text ([`crate::DisconnectReason`]), as peers tell it to each other.

use std::{
    fmt::Display,
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use thiserror::Error;

use crate::{
    Address, ArmName, CONNECTIONS_MAX, HELLO_BYTES_MAX, REGIONS_MAX, ROCE_PORT, SECRET_BYTES_MIN,
    limits::{RESOLVE_MAX, SECRET_FILE_BYTES_MAX, SECRETS_MAX},
};

/// Why an endpoint could not be opened, or a region not registered with it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A key of the configuration does not fit the arm.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An address of this host's own cannot be known.
    #[error(transparent)]
    OwnAddress(#[from] OwnAddressError),
    /// A file with a secret cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// Files with secrets cannot be followed.
    #[error("secret_file: no thread can be started that reads it anew: {0}")]
    SecretsThread(io::Error),
    /// Files with certificates cannot be followed.
    #[error("tls: no thread can be started that reads its files anew: {0}")]
    CertificatesThread(io::Error),
    /// A certificate or key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The arm.
    #[error(transparent)]
    Device(#[from] DeviceOpenError),
    /// `connections_max` is too large.
    #[error("connections_max = {found}: at most {CONNECTIONS_MAX}")]
    ConnectionsMax {
        /// As configured.
        found: usize,
    },
    /// There is nothing to wait with.
    #[error("no epoll instance: {0}")]
    Poller(io::Error),
    /// Nothing can listen there.
    #[error("cannot listen on TCP {at}: {cause}")]
    Listen {
        /// As configured.
        at: SocketAddr,
        /// What the system says.
        cause: io::Error,
    },
    /// What the device tells cannot be waited for.
    #[error("cannot watch a descriptor: {0}")]
    Watch(io::Error),
    /// Too many regions.
    #[error("cannot register one more region: {REGIONS_MAX} are registered")]
    RegionsMax,
    /// The device does not take the region.
    #[error("cannot register {bytes} bytes: {cause}")]
    Register {
        /// Of the region.
        bytes: usize,
        /// What the device says.
        cause: RegisterError,
    },
}

impl OpenError {
    /// Whether it may be right later without anybody's doing: names come to be, and routes.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::OwnAddress(error) if !matches!(error, OwnAddressError::Alone { .. }))
    }
}

/// Why a name leads nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NameError {
    /// The resolver says so.
    #[error("found `{name}`, which cannot be looked up ({cause}), expected a name that resolves to an address")]
    Failed {
        /// With its port.
        name: Address,
        /// What it says.
        cause: String,
    },
    /// There is such a name.
    #[error("found `{name}`, which resolves to no address, expected one or several")]
    Nothing {
        /// With its port.
        name: Address,
    },
    /// The resolver says nothing.
    #[error("found `{name}`, for which no resolver had an answer within {RESOLVE_MAX}, expected an address")]
    Late {
        /// With its port.
        name: Address,
    },
}

/// Why an address of this host's own cannot be known.
#[derive(Debug, Error)]
pub enum OwnAddressError {
    /// A key names it.
    #[error("{key}: {cause}")]
    Name {
        /// Of the configuration.
        key: &'static str,
        /// Why the name leads nowhere.
        cause: NameError,
    },
    /// A key leaves it to the route to a scheduler that cannot be looked up.
    #[error("{key}: found `auto`, and of the scheduler's address: {cause}")]
    Scheduler {
        /// Of the configuration.
        key: &'static str,
        /// Why the scheduler's name leads nowhere.
        cause: NameError,
    },
    /// A key leaves it to a route that there is not.
    #[error("{key}: found `auto` and no route to {to} ({cause}), expected one to a scheduler")]
    NoRoute {
        /// Of the configuration.
        key: &'static str,
        /// A scheduler's address.
        to: SocketAddr,
        /// What the system says.
        cause: io::Error,
    },
    /// A key leaves it to a route, and there is nobody to go to.
    #[error("{key}: found `auto`, expected an address, as there is no other scheduler with a route to it")]
    Alone {
        /// Of the configuration.
        key: &'static str,
    },
}

/// Why a file with a secret cannot be used.
#[derive(Debug, Error)]
pub enum SecretError {
    /// The system does not let us.
    #[error("secret_file: {} cannot be read: {cause}; expected a file with a secret", .path.display())]
    Unreadable {
        /// As configured.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// It is a folder, a device or a pipe.
    #[error("secret_file: {} is no file, expected one with a secret", .path.display())]
    NoFile {
        /// As configured.
        path: PathBuf,
    },
    /// It could be guessed, or is something else.
    #[error(
        "secret_file: found {found} bytes in {}, expected {SECRET_BYTES_MIN} to {SECRET_FILE_BYTES_MAX} random ones \
         (such as `openssl rand -hex 16`)",
        .path.display()
    )]
    Length {
        /// As configured.
        path: PathBuf,
        /// Without the end of the line.
        found: usize,
    },
}

/// Why keys of a configuration do not fit each other, or what they are for.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ConfigError {
    /// There is no one address to share.
    #[error(
        "shared_address: found `address` {}, expected one IP address and port for all that share it",
        or_none(.address.as_ref())
    )]
    NothingToShare {
        /// As configured.
        address: Option<SocketAddr>,
    },
    /// A device is shared anyway.
    #[error("shared_address: only arm `soft` has it, found arm `{0}`, which processes share anyway")]
    SharedDevice(ArmName),
    /// A device injects no faults.
    #[error("faults: only arm `soft` injects them, found arm `{0}`")]
    FaultsOnDevice(ArmName),
    /// A fault is no probability.
    #[error("faults.{key}: found {found}, expected 0 to 1, the share of packets")]
    Fault {
        /// Which.
        key: &'static str,
        /// As configured.
        found: f64,
    },
    /// It could be guessed.
    #[error(
        "secret: found {found} bytes, expected at least {SECRET_BYTES_MIN} random ones (such as `openssl rand -hex 16`)"
    )]
    ShortSecret {
        /// Its length.
        found: usize,
    },
    /// There is none, or more than there can be.
    #[error(
        "secret, secret_file: found {found} secrets, expected one, or {SECRETS_MAX} while a cluster changes its own"
    )]
    Secrets {
        /// How many.
        found: usize,
    },
    /// A device has one port.
    #[error("address: found {0}, expected port {ROCE_PORT}, as a verbs device has no other")]
    DevicePort(SocketAddr),
    /// A key of the table `[verbs]` is out of bounds.
    #[error("verbs.{key}: found {found}, expected {min} to {max}")]
    VerbsSetting {
        /// Which.
        key: &'static str,
        /// As configured.
        found: u16,
        /// The least.
        min: u16,
        /// The most.
        max: u16,
    },
}

/// Why TLS cannot be had.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file that a key names.
    #[error("{key}: {}: {cause}", .path.display())]
    File {
        /// Of the configuration, with its table.
        key: String,
        /// As configured.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// `tls.name` is no DNS name.
    #[error("tls.name: `{name}`: {cause}")]
    Name {
        /// As configured.
        name: String,
        /// What is wrong with it.
        cause: String,
    },
}

/// Why an arm could not be opened.
#[derive(Debug, Error)]
pub enum DeviceOpenError {
    /// The UDP socket of the soft arm.
    #[error("cannot open UDP address {address}: {cause}{}", keys_of(.cause))]
    Udp {
        /// As configured.
        address: SocketAddr,
        /// What to change.
        cause: io::Error,
    },
    /// The program lacks the feature `verbs`.
    #[error("arm verbs:{device}: this program is built without libibverbs; build it with `--features verbs`")]
    WithoutVerbs {
        /// As configured.
        device: String,
    },
    /// The verbs device.
    #[error("arm verbs:{device}: {cause}")]
    Verbs {
        /// As configured.
        device: String,
        /// What to change.
        cause: VerbsOpenError,
    },
}

impl DeviceOpenError {
    /// Whether somebody else has the address.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self, Self::Udp { cause, .. } if cause.kind() == io::ErrorKind::AddrInUse)
    }
}

/// Which keys of a configuration change an address that is taken.
fn keys_of(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::AddrInUse { " (keys address, shared_address)" } else { "" }
}

/// Why a verbs device could not be opened.
#[derive(Debug, Error)]
pub enum VerbsOpenError {
    /// The table `[verbs]`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Nothing says which device `auto` is.
    #[error(transparent)]
    Auto(#[from] AutoDeviceError),
    /// libibverbs.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// libibverbs knows of no devices.
    #[error("no list of RDMA devices: {0}")]
    NoList(io::Error),
    /// There is none of that name.
    #[error("no RDMA device {device}{}", others(.found))]
    NoDevice {
        /// As configured.
        device: String,
        /// All that there are.
        found: Vec<String>,
    },
    /// The driver does not let us.
    #[error("{device} cannot be opened: {cause}; is /dev/infiniband accessible?")]
    NotOpened {
        /// As configured.
        device: String,
        /// What the system says.
        cause: io::Error,
    },
    /// Its port.
    #[error(transparent)]
    Port(#[from] PortError),
    /// It reads nothing.
    #[error("{device} carries no READs (max_qp_rd_atom is 0)")]
    NoReads {
        /// As configured.
        device: String,
    },
    /// It is too small.
    #[error("{device} has {requests} requests a queue pair and {completions} completions; {needed} are needed")]
    TooSmall {
        /// As configured.
        device: String,
        /// Of one queue pair.
        requests: usize,
        /// Of one completion queue.
        completions: usize,
        /// Of both.
        needed: usize,
    },
    /// One of its objects could not be made, or not be asked.
    #[error("{what}: {cause}")]
    Object {
        /// What there is not.
        what: &'static str,
        /// What the system says.
        cause: io::Error,
    },
    /// It is not what it was when it was lost.
    #[error("{device} came back with other limits; restart this process")]
    Changed {
        /// As configured.
        device: String,
    },
    /// Memory that it had before it was lost.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

/// Why `verbs:auto` is no device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{}, found {}; name the device with `arm = \"verbs:DEVICE\"`, or its address with the key `address`",
    route_of(.route.as_ref()), ports_of(.found)
)]
pub struct AutoDeviceError {
    /// From where packets leave to the scheduler.
    pub route: Option<IpAddr>,
    /// Ports that are up, with their addresses.
    pub found: Vec<String>,
}

fn keys(found: &[u16]) -> String {
    let told: Vec<_> = found.iter().map(|key| format!("{key:#06x}")).collect();
    if told.is_empty() { "none".to_owned() } else { told.join(", ") }
}

fn route_of(route: Option<&IpAddr>) -> String {
    let of_route = |route| {
        format!(
            "expected a port with the address {route}, from where the route to the scheduler leaves, or a single one"
        )
    };
    route.map_or_else(|| "expected a single port that is up".to_owned(), of_route)
}

fn ports_of(found: &[String]) -> String {
    if found.is_empty() { "no port that is up".to_owned() } else { found.join("; ") }
}

fn others(found: &[String]) -> String {
    if found.is_empty() {
        ", nor any other; is its driver loaded?".to_owned()
    } else {
        format!("; found {}", found.join(", "))
    }
}

/// Why libibverbs could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LibraryError {
    /// There is none.
    #[error("{name} cannot be loaded; install libibverbs (rdma-core), or use the soft arm")]
    Missing {
        /// Of the library.
        name: &'static str,
    },
    /// It lacks a function.
    #[error("libibverbs has no {function}; it is older than rdma-core")]
    Old {
        /// Which.
        function: &'static str,
    },
}

/// Why a device's port cannot be used.
#[derive(Debug, Error)]
pub enum PortError {
    /// There is none.
    #[error("{device} has no port {port}: {cause}")]
    Missing {
        /// As configured.
        device: String,
        /// As configured.
        port: u8,
        /// What the system says.
        cause: io::Error,
    },
    /// It is down.
    #[error("port {port} of {device} is down; bring its link up")]
    Down {
        /// As configured.
        device: String,
        /// As configured.
        port: u8,
    },
    /// It is not of a partition.
    #[error(
        "verbs.partition_key: found {wanted:#06x}, expected one of port {port} of {device}: {}", keys(.found)
    )]
    Partition {
        /// As configured.
        device: String,
        /// As configured.
        port: u8,
        /// As configured.
        wanted: u16,
        /// Of the port.
        found: Vec<u16>,
    },
    /// It has no address that fits.
    #[error("{device}: {cause}")]
    Address {
        /// As configured.
        device: String,
        /// What it has.
        cause: GidError,
    },
}

/// Why none of a port's GIDs can be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "no RoCEv2 GID {}; its GIDs are: {}; give its network device that address",
    wanted_gid(.wanted.as_ref()), or_none((!.found.is_empty()).then(|| join(.found)).as_ref())
)]
pub struct GidError {
    /// As configured.
    pub wanted: Option<IpAddr>,
    /// All of RoCEv2.
    pub found: Vec<IpAddr>,
}

fn wanted_gid(wanted: Option<&IpAddr>) -> String {
    wanted.map_or("that others can route to".to_owned(), |wanted| format!("for address {wanted}"))
}

fn join(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn or_none(found: Option<&impl Display>) -> String {
    found.map_or("none".to_owned(), ToString::to_string)
}

/// Why a device is not there now; it is opened again as soon as that is possible.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct DeviceLost(pub String);

/// Why a region could not be registered.
#[derive(Debug, Error)]
pub enum RegisterError {
    /// A limit of soft-RoCE.
    #[error(transparent)]
    Soft(#[from] soft_roce::RegisterError),
    /// Memory of another device is for hardware to reach.
    #[error("soft-RoCE copies with the CPU, which has no way there; arm `verbs` may have one")]
    Software,
    /// No way into another device's memory is open.
    #[error(
        "{device} takes it neither as a dma-buf ({dma_buf}) nor by its address ({address}; is nvidia-peermem loaded?)"
    )]
    NoWay {
        /// As configured.
        device: String,
        /// What became of the dma-buf.
        dma_buf: String,
        /// What the system says to the address.
        address: io::Error,
    },
    /// There is no device.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// The device refuses one more protection domain.
    #[error("{device} has no room for one more protection domain: {cause}")]
    Domain {
        /// As configured.
        device: String,
        /// What the system says.
        cause: io::Error,
    },
    /// The device refuses.
    #[error("{device}: {cause}; is the limit of locked memory (ulimit -l) large enough?")]
    Verbs {
        /// As configured.
        device: String,
        /// What the system says.
        cause: io::Error,
    },
}

/// Why nothing is known of what a link carries.
#[derive(Debug, Error)]
pub enum PathMtuError {
    /// There is no way to the peer.
    #[error("no UDP route from {local} to {peer}: {cause}")]
    NoRoute {
        /// Ours.
        local: IpAddr,
        /// The peer's.
        peer: IpAddr,
        /// What the system says.
        cause: io::Error,
    },
    /// Not even the smallest path MTU fits.
    #[error("the link from {local} to {peer} has an MTU of {bytes}; it needs 336")]
    TooSmall {
        /// Ours.
        local: IpAddr,
        /// The peer's.
        peer: IpAddr,
        /// Of an IP packet.
        bytes: u32,
    },
    /// There is no device.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// The device's port.
    #[error(transparent)]
    Port(#[from] PortError),
}

/// Why a queue pair was not created.
#[derive(Debug, Error)]
pub enum CreateQueuePairError {
    /// A limit of soft-RoCE.
    #[error(transparent)]
    Soft(#[from] soft_roce::CreateError),
    /// There is no device.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// The device refuses.
    #[error("{device}: {cause}")]
    Verbs {
        /// As configured.
        device: String,
        /// What the system says.
        cause: io::Error,
    },
}

/// Why a queue pair cannot reach its peer.
#[derive(Debug, Error)]
pub enum ConnectQueuePairError {
    /// Packets of soft-RoCE are UDP's.
    #[error("the peer is on InfiniBand, where soft-RoCE has no packets; give both sides one arm")]
    PeerOnInfiniBand,
    /// soft-RoCE refuses what the peer told.
    #[error(transparent)]
    Soft(#[from] soft_roce::ModifyError),
    /// The peer on this host has come for a ring.
    #[error("no ring to the peer, the next connection does without (`local_path`): {0}")]
    Ring(io::Error),
    /// There is no device.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// A device sends to one port.
    #[error(
        "the peer is at UDP port {0}, but a device sends to {ROCE_PORT} only: give the peer an `address` with that port"
    )]
    PeerPort(u16),
    /// Ethernet and InfiniBand.
    #[error("one side is on Ethernet, the other on InfiniBand; use ports of one network")]
    TwoNetworks,
    /// The device does not take receives.
    #[error("its receives cannot be posted: {0}")]
    Receives(io::Error),
    /// The device refuses.
    #[error("{device} cannot reach {peer}: {cause}")]
    Verbs {
        /// As configured.
        device: String,
        /// Where the peer's packets come from.
        peer: String,
        /// What the system says.
        cause: io::Error,
    },
}

/// Why a queue pair does not take a work request.
#[derive(Debug, Error)]
pub enum WorkRequestError {
    /// soft-RoCE refuses it.
    #[error(transparent)]
    Soft(#[from] soft_roce::PostError),
    /// There is no device.
    #[error(transparent)]
    Lost(#[from] DeviceLost),
    /// It is too long for one message.
    #[error("a message of {bytes} bytes, where {device} carries {most}")]
    TooLong {
        /// As configured.
        device: String,
        /// Of the message.
        bytes: u32,
        /// Of the device's port.
        most: u32,
    },
}

/// What a [`RawQueuePair`](crate::RawQueuePair) cannot do.
#[derive(Debug, Error)]
pub enum RawError {
    /// Be opened.
    #[error(transparent)]
    Open(#[from] DeviceOpenError),
    /// Be created.
    #[error(transparent)]
    Create(#[from] CreateQueuePairError),
    /// Use that memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// Tell its path MTU.
    #[error(transparent)]
    PathMtu(#[from] PathMtuError),
    /// Reach its peer.
    #[error(transparent)]
    Connect(#[from] ConnectQueuePairError),
    /// Take that work request.
    #[error(transparent)]
    WorkRequest(#[from] WorkRequestError),
    /// Carry out any other operation.
    #[error("expected SEND, WRITE or READ, found {0}")]
    Operation(String),
}

/// Why a connection's queue pair cannot be made, or cannot go on.
#[derive(Debug, Error)]
pub(crate) enum ChannelError {
    #[error("no memory for one more connection ({bytes} bytes): {cause}")]
    Memory { bytes: usize, cause: io::Error },
    #[error("no registration for one more connection: {0}")]
    Register(RegisterError),
    #[error("{bytes} bytes cannot be opened to one more peer: {cause}")]
    Open { bytes: usize, cause: RegisterError },
    #[error("no queue pair for one more connection: {0}")]
    Create(CreateQueuePairError),
    #[error("the queue pair cannot be connected: {0}")]
    Connect(ConnectQueuePairError),
    #[error(transparent)]
    WorkRequest(#[from] WorkRequestError),
    #[error("the peer sent {bytes} bytes without our header")]
    NoHeader { bytes: u32 },
    #[error("the peer granted credits that it cannot have")]
    Credits,
}

/// Why a connection was not begun.
#[derive(Debug, Error)]
pub(crate) enum ConnectError {
    #[error("connections_max = {0} is reached")]
    ConnectionsMax(usize),
    #[error("a hello of {0} bytes, where at most {HELLO_BYTES_MAX} are allowed")]
    HelloTooLong(usize),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

/// Why a connection ended while it was set up, or with its bootstrap.
#[derive(Debug, Error)]
pub(crate) enum BootstrapError {
    #[error("a welcome of {0} bytes, where at most {HELLO_BYTES_MAX} are allowed")]
    WelcomeTooLong(usize),
    #[error(transparent)]
    PathMtu(#[from] PathMtuError),
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("{REGIONS_MAX} regions are registered already, and one more peer needs one")]
    RegionsMax,
    #[error("a bootstrap message out of order")]
    OutOfOrder,
    /// What the bootstrap, or the peer by it, says.
    #[error("{0}")]
    Closed(String),
}
