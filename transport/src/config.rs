//! How an endpoint is opened.

mod network;
mod schedulers;
mod secret_key;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use proto::Span;

pub use network::{NetworkConfig, RoleDeserializer, serialize_beside};
pub use schedulers::{SCHEDULERS_MAX, scheduler_list};
pub use secret_key::SecretKey;
use serde::{Deserialize, Serialize};
pub use soft_roce::udp::{Faults, Sharing};

use crate::{
    Certificates, LocalPath, PeerName, Release, Secrets,
    arm_name::ArmName,
    error::{ConfigError, OpenError},
    limits::{CREDIT_MAX, ROCE_PORT, SECRET_BYTES_MIN},
};

/// Which network carries the queue pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arm {
    /// soft-RoCE over a UDP socket bound to this address. A specific IP; port 4791 unless told otherwise.
    Soft {
        /// Where our UDP socket binds.
        address: SocketAddr,
        /// Whether another port will do if this one is taken.
        any_port: bool,
        /// Injected faults, for tests.
        faults: Faults,
        /// Which other endpoints may have the same address; all of them must say so.
        sharing: Sharing,
        /// How packets go to peers of this host.
        local: LocalPath,
    },
    /// A device of libibverbs; in builds with the feature `verbs`.
    Verbs(VerbsConfig),
}

/// A verbs device, and how its queue pairs are set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsConfig {
    /// Its name, as `ibv_devices` shows it, or [`AUTO_DEVICE`](crate::AUTO_DEVICE).
    pub device: String,
    /// On Ethernet, the address of the port that is used; without it, the first that others can route to. With `auto`,
    /// from where packets leave to the scheduler.
    pub address: Option<IpAddr>,
    /// The rest.
    pub settings: VerbsSettings,
}

/// How the queue pairs of a verbs device are set up: the table `[verbs]` of a role's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VerbsSettings {
    /// The device's port, from 1.
    pub port: u8,
    /// An unanswered packet is sent again after 4.096 us * 2^this, or up to four times as much; 1 to 31.
    pub ack_timeout: u8,
    /// How often, before the connection is given up; 0 to 7 (and 7 is for ever on `rdma_rxe`).
    pub retry_count: u8,
    /// How often a request that met no receive is sent again; 0 to 6. Credits keep that from happening.
    pub rnr_retry: u8,
    /// The code of the time that a peer waits then (IBTA table 45); 0 to 31.
    pub min_rnr_timer: u8,
    /// The traffic class of RoCEv2 packets: by it, switches choose queues and whether to lose nothing.
    pub traffic_class: u8,
    /// The service level of InfiniBand packets: by it, switches choose virtual lanes; 0 to 15. On Ethernet, the
    /// priority of VLAN tags.
    pub service_level: u8,
    /// The partition that queue pairs are of, which those of their peers must be of, too (IBTA 10.9). The highest bit,
    /// of a full member, is not compared.
    pub partition_key: u16,
}

/// The partition that all ports are of.
const DEFAULT_PARTITION: u16 = 0xffff;

impl Default for VerbsSettings {
    /// Gives up a silent peer after two seconds or so, as the bootstrap does; `rdma_rxe`, which never takes longer than
    /// it is told, after half a second.
    fn default() -> Self {
        Self {
            port: 1,
            ack_timeout: 14,
            retry_count: 6,
            rnr_retry: 6,
            min_rnr_timer: 12,
            traffic_class: 0,
            service_level: 0,
            partition_key: DEFAULT_PARTITION,
        }
    }
}

impl VerbsSettings {
    /// # Errors
    /// One line that names the key that is out of bounds.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code))]
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let Self {
            port,
            ack_timeout,
            retry_count,
            rnr_retry,
            min_rnr_timer,
            traffic_class: _,
            service_level,
            partition_key,
        } = *self;
        for (key, found, bounds) in [
            ("port", port.into(), 1..=255),
            ("ack_timeout", ack_timeout.into(), 1..=31),
            ("retry_count", retry_count.into(), 0..=7),
            ("rnr_retry", rnr_retry.into(), 0..=6),
            ("min_rnr_timer", min_rnr_timer.into(), 0..=31),
            ("service_level", service_level.into(), 0..=15),
            // Nothing is of partition 0.
            ("partition_key", partition_key & 0x7fff, 1..=0x7fff),
        ] {
            if !bounds.contains(&found) {
                let (min, max) = bounds.into_inner();
                return Err(ConfigError::VerbsSetting { key, found, min, max });
            }
        }
        Ok(())
    }
}

impl From<ArmName> for String {
    fn from(name: ArmName) -> Self {
        name.to_string()
    }
}

impl Arm {
    /// The arm that a role's keys `arm`, `address`, `shared_address`, `faults` and `[verbs]` choose. Without an
    /// address, the soft arm has a random one of the loopback network.
    ///
    /// # Errors
    /// One line that names the key that does not fit the arm, or is out of bounds.
    pub fn choose(
        name: &ArmName,
        address: Option<SocketAddr>,
        shared: bool,
        faults: Faults,
        settings: VerbsSettings,
    ) -> Result<Self, OpenError> {
        if let Some((key, found)) = faults.invalid() {
            return Err(ConfigError::Fault { key, found }.into());
        }
        let ArmName::Verbs(device) = name else {
            if shared && address.is_none_or(|address| address.port() == 0) {
                return Err(ConfigError::NothingToShare { address }.into());
            }
            let address = address.unwrap_or_else(|| SocketAddr::new(random_loopback().into(), ROCE_PORT));
            let sharing = if shared { Sharing::User } else { Sharing::Alone };
            let local = LocalPath::default();
            return Ok(Self::Soft { address, any_port: false, faults, sharing, local });
        };
        if shared {
            return Err(ConfigError::SharedDevice(name.clone()).into());
        }
        if faults != Faults::default() {
            return Err(ConfigError::FaultsOnDevice(name.clone()).into());
        }
        if let Some(address) = address.filter(|address| address.port() != ROCE_PORT) {
            return Err(ConfigError::DevicePort(address).into());
        }
        let address = address.map(|address| address.ip());
        Ok(Self::Verbs(VerbsConfig { device: device.clone(), address, settings }))
    }

    /// The same, whose packets go so to peers of this host; a device's go as they always do.
    #[must_use]
    pub fn with_local_path(mut self, path: LocalPath) -> Self {
        if let Self::Soft { local, .. } = &mut self {
            *local = path;
        }
        self
    }
}

/// How an endpoint is opened. `Default` gives an endpoint that only connects, on a random 127.x.y.z, with a random
/// secret that no peer knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointConfig {
    /// The network.
    pub arm: Arm,
    /// Where to listen for bootstrap connections (TCP); port 0 lets the system choose.
    pub listen: Option<SocketAddr>,
    /// Both ends of every connection must prove that they know it (HMAC-SHA-256 challenge), before any key is told. At
    /// least [`SECRET_BYTES_MIN`] bytes.
    /// While a cluster changes it, either of two is believed.
    pub secrets: Secrets,
    /// What peers show operators of us.
    pub name: PeerName,
    /// What this process is; peers whose wire has another version are refused with both names.
    pub release: Release,
    /// Certificates; with them both ends of every bootstrap also prove themselves by mutual TLS, and it is encrypted.
    pub tls: Option<Certificates>,
    /// Connections at once, both directions.
    pub connections_max: usize,
    /// Bytes of READs that may be outstanding at once, over all connections, shared fairly. 0: what suits the arm,
    /// which for soft-RoCE is half of what the socket's receive buffer really holds, and for a verbs device 1 MiB.
    pub read_budget_bytes: usize,
    /// What is to be sent waits so long for a credit until its peer is lost; [`CREDIT_MAX`] but in tests.
    pub credit_wait: Span,
    /// Whether there are no memory windows, as on verbs devices; false but in tests.
    pub is_windowless: bool,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self::soft(SocketAddr::new(random_loopback().into(), ROCE_PORT))
    }
}

impl EndpointConfig {
    /// An endpoint of the soft arm at this address that only connects.
    #[must_use]
    pub fn soft(address: SocketAddr) -> Self {
        let (faults, sharing, local) = (Faults::default(), Sharing::Alone, LocalPath::default());
        Self::over(Arm::Soft { address, any_port: false, faults, sharing, local })
    }

    /// An endpoint of this arm that only connects, with a random secret.
    #[must_use]
    pub fn over(arm: Arm) -> Self {
        let secrets = Secrets::fixed([rand::random::<[u8; SECRET_BYTES_MIN]>()]);
        let release = Release::this();
        let credit_wait = CREDIT_MAX;
        let (connections_max, read_budget_bytes) = (256, 0);
        let (listen, name, tls) = (None, PeerName::NONE, None);
        Self {
            arm,
            listen,
            secrets,
            name,
            release,
            tls,
            connections_max,
            read_budget_bytes,
            credit_wait,
            is_windowless: false,
        }
    }

    /// The same, and listens there (TCP).
    #[must_use]
    pub fn listening(mut self, at: SocketAddr) -> Self {
        self.listen = Some(at);
        self
    }

    /// The same, and peers show operators a member of this kind and name.
    #[must_use]
    pub fn with_name(self, role: &str, name: &str) -> Self {
        Self { name: PeerName::new(role, name), ..self }
    }

    /// The same with this secret.
    #[must_use]
    pub fn with_secret(self, secret: impl AsRef<[u8]>) -> Self {
        self.with_secrets(Secrets::fixed([secret]))
    }

    /// The same with these secrets.
    #[must_use]
    pub fn with_secrets(mut self, secrets: Secrets) -> Self {
        self.secrets = secrets;
        self
    }

    /// The same with these certificates, if any.
    #[must_use]
    pub fn with_tls(mut self, certificates: Option<Certificates>) -> Self {
        self.tls = certificates;
        self
    }

    /// The same, and other processes of this user may have the same address.
    ///
    /// # Panics
    /// If it is not of the soft arm; a device is shared anyway.
    #[must_use]
    pub fn sharing_address(mut self) -> Self {
        let Arm::Soft { sharing, .. } = &mut self.arm else { panic!("a shared address on {:?}", self.arm) };
        *sharing = Sharing::User;
        self
    }

    /// The same, and other endpoints of this process may have the same address, each for a thread of its own: all of
    /// them must say so. Nothing changes if other processes may have it too, or on a verbs device, which any number of
    /// endpoints open.
    #[must_use]
    pub fn sharing_address_within_process(mut self) -> Self {
        if let Arm::Soft { sharing: sharing @ Sharing::Alone, .. } = &mut self.arm {
            *sharing = Sharing::Process;
        }
        self
    }

    /// The same with [`Arm::with_local_path`].
    #[must_use]
    pub fn with_local_path(self, path: LocalPath) -> Self {
        Self { arm: self.arm.with_local_path(path), ..self }
    }

    /// The same with these faults injected.
    ///
    /// # Panics
    /// If it is not of the soft arm, which alone has faults to inject.
    #[must_use]
    pub fn with_faults(mut self, injected: Faults) -> Self {
        let Arm::Soft { faults, .. } = &mut self.arm else { panic!("faults on {:?}", self.arm) };
        *faults = injected;
        self
    }
}

/// A random address of the loopback network, other than 127.0.x.y, so that the processes of one host need not agree on
/// addresses: among a hundred, two collide with a chance of 1 in 3000, and then the second fails to bind.
#[must_use]
pub fn random_loopback() -> Ipv4Addr {
    Ipv4Addr::new(127, rand::random_range(1..=254), rand::random_range(0..=255), rand::random_range(1..=254))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_does_not_tell_the_secret() {
        let text = format!("{:?}", EndpointConfig::default().with_secret([77; 16]));
        assert!(!text.contains("77, 77") && text.contains("connections_max: 256"), "{text}");
    }

    #[test]
    fn a_short_secret_is_refused_in_one_line_that_names_the_key() {
        let open = |secret: &[u8]| crate::Endpoint::open(EndpointConfig::default().with_secret(secret)).map(drop);
        let error = open(&[7; SECRET_BYTES_MIN - 1]).unwrap_err().to_string();
        assert_eq!(error, "secret: found 15 bytes, expected at least 16 random ones (such as `openssl rand -hex 16`)");
        assert!(open(b"").is_err() && open(&[7; SECRET_BYTES_MIN]).is_ok());
    }

    #[test]
    fn arms_are_named_and_what_does_not_fit_them_is_refused() {
        assert_eq!("soft".parse(), Ok(ArmName::Soft));
        assert_eq!("verbs:mlx5_0".parse(), Ok(ArmName::Verbs("mlx5_0".into())));
        for wrong in ["", "verbs", "verbs:", "soft:x", "tcp"] {
            assert!(wrong.parse::<ArmName>().unwrap_err().to_string().contains(&format!("found `{wrong}`")));
        }
        let (settings, verbs) = (VerbsSettings::default(), ArmName::Verbs("rxe0".into()));
        let choose =
            |address: &str, faults| Arm::choose(&verbs, Some(address.parse().unwrap()), false, faults, settings);
        let Arm::Verbs(config) = choose("10.0.0.1:4791", Faults::default()).unwrap() else { panic!("not verbs") };
        assert_eq!((config.device.as_str(), config.address), ("rxe0", Some([10, 0, 0, 1].into())));
        let error = choose("10.0.0.1:4792", Faults::default()).unwrap_err().to_string();
        assert!(error.contains("10.0.0.1:4792") && error.contains("expected port 4791"), "{error}");
        let error = choose("10.0.0.1:4791", Faults { loss: 0.1, ..Faults::default() }).unwrap_err().to_string();
        assert!(error.contains("faults: only arm `soft`"), "{error}");
    }

    #[test]
    fn a_fault_that_is_no_probability_is_named() {
        let faults = Faults { loss: 3.0, ..Faults::default() };
        let address = Some("127.0.0.1:4791".parse().unwrap());
        for arm in [ArmName::Soft, ArmName::Verbs("rxe0".into())] {
            let error = Arm::choose(&arm, address, false, faults, VerbsSettings::default()).unwrap_err();
            assert_eq!(error.to_string(), "faults.loss: found 3, expected 0 to 1, the share of packets");
        }
    }

    #[test]
    fn an_address_is_shared_where_there_is_one_to_share() {
        let share = |arm: ArmName, address: Option<&str>| {
            let address = address.map(|address| address.parse().unwrap());
            Arm::choose(&arm, address, true, Faults::default(), VerbsSettings::default())
        };
        let Arm::Soft { address, sharing: Sharing::User, .. } = share(ArmName::Soft, Some("10.0.0.1:4791")).unwrap()
        else {
            panic!("not shared")
        };
        assert_eq!(address, "10.0.0.1:4791".parse().unwrap());
        for (arm, address, told) in [
            (ArmName::Soft, None, "found `address` none"),
            (ArmName::Soft, Some("10.0.0.1:0"), "found `address` 10.0.0.1:0"),
            (ArmName::Verbs("rxe0".into()), Some("10.0.0.1:4791"), "found arm `verbs:rxe0`"),
        ] {
            let error = share(arm, address).unwrap_err().to_string();
            assert!(error.starts_with("shared_address: ") && error.contains(told), "{error}");
        }
    }

    #[test]
    fn settings_out_of_bounds_are_named() {
        assert_eq!(VerbsSettings::default().check(), Ok(()));
        let wrong = VerbsSettings { rnr_retry: 7, ..VerbsSettings::default() };
        assert_eq!(wrong.check().unwrap_err().to_string(), "verbs.rnr_retry: found 7, expected 0 to 6");
        let wrong = VerbsSettings { ack_timeout: 0, ..VerbsSettings::default() };
        assert!(wrong.check().is_err());
        let wrong = VerbsSettings { service_level: 16, ..VerbsSettings::default() };
        assert_eq!(wrong.check().unwrap_err().to_string(), "verbs.service_level: found 16, expected 0 to 15");
        let wrong = VerbsSettings { partition_key: 0x8000, ..VerbsSettings::default() };
        assert!(wrong.check().is_err(), "no partition has number 0");
    }

    #[test]
    fn random_addresses_are_loopback_and_differ() {
        let addresses: std::collections::BTreeSet<_> = (0..20).map(|_| random_loopback()).collect();
        assert!(addresses.len() > 1 && addresses.iter().all(Ipv4Addr::is_loopback));
    }
}
