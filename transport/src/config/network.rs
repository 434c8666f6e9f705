//! The keys of the network, which the file of every role has beside its own.
//!
//! serde can flatten one struct into another, but then names no unknown key together with the known ones, and forgets
//! the lines of all that is wrong. So the file's table is split while it is read: keys of the network are taken here,
//! the others by the role's own (derived) `Deserialize`, and a key that neither has is refused with the names of both.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use proto::member_name::{MEMBER_NAME_BYTES_MAX, is_member_name, member_name_like};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, IntoDeserializer as _, MapAccess, Visitor},
    forward_to_deserialize_any,
};

use super::{
    Arm, EndpointConfig, Faults, VerbsSettings,
    secret_key::{Inline, SecretKey},
};
use crate::{
    Address, Certificates, LocalPath, OpenError, OwnAddress, Secrets, TlsFiles,
    arm_name::ArmName,
    limits::ROCE_PORT,
    resolve::{own_or_routed, source_address},
    tls::Tls,
};

/// What the file of every role says of the network. A role's configuration has a field of this type whose keys
/// [`flatten_network!`](crate::flatten_network) puts beside its own.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct NetworkConfig {
    /// Shared with all members of the cluster; at least [`SECRET_BYTES_MIN`](crate::SECRET_BYTES_MIN) bytes.
    #[serde(flatten)]
    pub secret: SecretKey,
    /// How operators call this member; as its host if nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The network: `soft`, `verbs:DEVICE` or `verbs:auto`.
    pub arm: ArmName,
    /// Where packets come from and arrive. Without it, the soft arm takes the role's own address, or a random loopback
    /// address, and a verbs device its first that others can route to. `verbs:auto` is the device with this address.
    pub address: Option<OwnAddress>,
    /// Whether other processes of this user have the same `address`; all of them must say so. Soft arm only.
    pub shared_address: bool,
    /// How packets go to peers on this host. Soft arm only.
    pub local_path: LocalPath,
    /// How the queue pairs of a verbs device are set up.
    pub verbs: VerbsSettings,
    /// Faults injected into our packets, for tests. Soft arm only.
    pub faults: Faults,
    /// Certificates, with which members also prove themselves to each other by mutual TLS.
    pub tls: Option<TlsFiles>,
}

/// In the order in which an unknown key is told them.
const KEYS: [&str; 10] =
    ["secret", "secret_file", "name", "arm", "address", "shared_address", "local_path", "verbs", "faults", "tls"];

impl NetworkConfig {
    /// The defaults, with this secret.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        Self { secret: secret.into().into(), ..Self::default() }
    }

    /// How operators call this member: as the key says, or as its host is called.
    #[must_use]
    pub fn member_name(&self) -> String {
        let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        self.name.clone().unwrap_or_else(|| member_name_like(host().trim_end()))
    }

    /// The secrets, which files are read for.
    ///
    /// # Errors
    /// One line that names the key and the file, what was found and what was expected.
    pub fn secrets(&self) -> Result<Secrets, OpenError> {
        self.secret.open()
    }

    /// The certificates, if there are any, which files are read for.
    ///
    /// # Errors
    /// One line that names the key and the file, and what is wrong with it.
    pub fn certificates(&self) -> Result<Option<Certificates>, OpenError> {
        self.tls.as_ref().map(Certificates::of_files).transpose()
    }

    /// Reads the files that these keys name, as a start does. No name is looked up, and nothing is opened.
    ///
    /// # Errors
    /// One line that names the key and, if it is about one, the file.
    pub fn check(&self) -> Result<(), OpenError> {
        self.secrets()?.check()?;
        self.tls.as_ref().map(Tls::load).transpose()?;
        let address = match &self.address {
            Some(OwnAddress::At(address)) => address.ip(),
            Some(OwnAddress::Auto(_)) | None => None,
        };
        // Whether there is one to share may only be known once names are looked up.
        let is_shared = self.shared_address && address.is_some();
        Arm::choose(&self.arm, address, is_shared, self.faults, self.verbs).map(drop)
    }

    /// The arm, if the role's own address (say, that of its TCP listener) is `own`. Names are looked up now, and so is
    /// the route to a scheduler if `address` leaves it to that.
    ///
    /// # Errors
    /// One line that names the key that does not fit the arm, or leads nowhere; [`OpenError::may_pass`] tells whether
    /// another attempt may be of use.
    pub fn arm(&self, own: Option<IpAddr>, schedulers: &[Address]) -> Result<Arm, OpenError> {
        let is_soft = self.arm == ArmName::Soft;
        let address = match &self.address {
            Some(address) => Some(own_or_routed("address", address, schedulers, ROCE_PORT)?),
            None if is_soft => own.map(|ip| SocketAddr::new(ip, ROCE_PORT)),
            None if self.arm.is_auto() => {
                let own = own.filter(|ip| !ip.is_unspecified());
                let routed = || (!schedulers.is_empty()).then(|| source_address("arm", schedulers)).transpose();
                own.map_or_else(routed, |ip| Ok(Some(ip)))?.map(|ip| SocketAddr::new(ip, ROCE_PORT))
            }
            None => None,
        };
        let is_port_said = matches!(self.address, Some(OwnAddress::At(_) | OwnAddress::Auto(Some(_))));
        let arm = Arm::choose(&self.arm, address, self.shared_address, self.faults, self.verbs)?;
        let mut arm = arm.with_local_path(self.local_path);
        if let Arm::Soft { any_port, .. } = &mut arm {
            // Two processes of one host need not agree on a port that nobody asked for.
            *any_port = !is_port_said && !self.shared_address;
        }
        Ok(arm)
    }

    /// An endpoint that only connects, over [`Self::arm`].
    ///
    /// # Errors
    /// As [`Self::arm`] and [`Self::secrets`].
    pub fn endpoint(&self, own: Option<IpAddr>, schedulers: &[Address]) -> Result<EndpointConfig, OpenError> {
        let endpoint = EndpointConfig::over(self.arm(own, schedulers)?);
        Ok(endpoint.with_secrets(self.secrets()?).with_tls(self.certificates()?))
    }

    /// Reads a table that holds these keys and a role's own, which `role` reads.
    ///
    /// # Errors
    /// What `role` refuses, and what is wrong with the keys of the network.
    #[doc(hidden)]
    pub fn deserialize_beside<'de, D: Deserializer<'de>, R>(
        deserializer: D,
        role: impl FnOnce(RoleDeserializer<'_, D>) -> Result<R, D::Error>,
    ) -> Result<(Self, R), D::Error> {
        let mut found = Found::default();
        let role = role(RoleDeserializer { table: deserializer, found: &mut found })?;
        Ok((found.into_config()?, role))
    }
}

/// Implements serde's traits for a role's configuration, whose field `$network` is a [`NetworkConfig`]: the keys of the
/// network stand beside the role's own.
///
/// ```
/// #[derive(Debug, serde::Serialize, serde::Deserialize)]
/// #[serde(remote = "Self", deny_unknown_fields)]
/// struct Config {
///     gpus: u32,
///     #[serde(skip)]
///     network: transport::NetworkConfig,
/// }
/// transport::flatten_network!(Config, network);
///
/// let config: Config = toml::from_str("gpus = 2\nsecret = 'sixteen bytes .. and more'\narm = 'verbs:mlx5_0'")?;
/// assert_eq!((config.gpus, config.network.arm.to_string()), (2, "verbs:mlx5_0".to_owned()));
/// let error = toml::from_str::<Config>("gpus = 2\nsecret = 'sixteen bytes .. and more'\nnarm = 'soft'").unwrap_err();
/// assert!(error.message().starts_with("unknown field `narm`, expected one of `gpus`, `secret`, `secret_file`"));
/// # Ok::<(), toml::de::Error>(())
/// ```
#[macro_export]
macro_rules! flatten_network {
    ($config:ty, $network:ident) => {
        impl<'de> ::serde::Deserialize<'de> for $config {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let (network, role) =
                    $crate::NetworkConfig::deserialize_beside(deserializer, |own| Self::deserialize(own))?;
                Ok(Self { $network: network, ..role })
            }
        }

        impl ::serde::Serialize for $config {
            fn serialize<S: ::serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                /// The keys of the role alone.
                struct Own<'a>(&'a $config);

                impl ::serde::Serialize for Own<'_> {
                    fn serialize<S: ::serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                        <$config>::serialize(self.0, serializer)
                    }
                }

                $crate::serialize_beside(&self.$network, &Own(self), serializer)
            }
        }
    };
}

/// Writes a table that holds the keys of the network and a role's own.
///
/// # Errors
/// What the serializer refuses.
#[doc(hidden)]
pub fn serialize_beside<S: Serializer>(
    network: &NetworkConfig,
    role: &impl Serialize,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Both<'a, R> {
        #[serde(flatten)]
        network: &'a NetworkConfig,
        #[serde(flatten)]
        role: &'a R,
    }
    Both { network, role }.serialize(serializer)
}

/// How a member is called, as it is read.
struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if is_member_name(&name) {
            return Ok(Self(name));
        }
        let like = member_name_like(&name);
        Err(D::Error::custom(format_args!(
            "name: found {} bytes like `{like}`, expected 1 to {MEMBER_NAME_BYTES_MAX} letters, digits, `-`, `_` and \
             `.`",
            name.len()
        )))
    }
}

/// What a table said of the network so far.
#[derive(Default)]
struct Found {
    secret: Option<SecretKey>,
    /// All but the secret.
    rest: NetworkConfig,
}

impl Found {
    /// Takes the value of one of [`KEYS`].
    fn take<'de, M: MapAccess<'de>>(&mut self, key: &'static str, table: &mut M) -> Result<(), M::Error> {
        let rest = &mut self.rest;
        match key {
            "secret" | "secret_file" if self.secret.is_some() => {
                return Err(M::Error::custom("secret, secret_file: found both keys, expected one of them"));
            }
            "secret" => self.secret = Some(SecretKey::Inline(table.next_value::<Inline>()?.0)),
            "secret_file" => self.secret = Some(SecretKey::Files(table.next_value()?)),
            "name" => rest.name = Some(table.next_value::<Name>()?.0),
            "arm" => rest.arm = table.next_value()?,
            "address" => rest.address = table.next_value()?,
            "shared_address" => rest.shared_address = table.next_value()?,
            "local_path" => rest.local_path = table.next_value()?,
            "verbs" => rest.verbs = table.next_value()?,
            "faults" => rest.faults = table.next_value()?,
            "tls" => rest.tls = table.next_value()?,
            _ => unreachable!("`key` is one of KEYS"),
        }
        Ok(())
    }

    fn into_config<E: serde::de::Error>(self) -> Result<NetworkConfig, E> {
        let Self { secret, rest } = self;
        let secret = secret.ok_or_else(|| E::custom("secret, secret_file: found neither key, expected one of them"))?;
        Ok(NetworkConfig { secret, ..rest })
    }
}

/// The keys of the network alone: those of a role are passed over.
impl<'de> Deserialize<'de> for NetworkConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyRole;

        impl<'de> Visitor<'de> for AnyRole {
            type Value = NetworkConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the keys of a role")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut table: M) -> Result<NetworkConfig, M::Error> {
                let mut found = Found::default();
                while let Some(key) = table.next_key::<String>()? {
                    match KEYS.iter().find(|known| **known == key) {
                        Some(key) => found.take(key, &mut table)?,
                        None => drop(table.next_value::<IgnoredAny>()?),
                    }
                }
                found.into_config()
            }
        }

        deserializer.deserialize_map(AnyRole)
    }
}

/// Gives a role's own `Deserialize` the keys that are its own.
#[doc(hidden)]
pub struct RoleDeserializer<'a, D> {
    table: D,
    found: &'a mut Found,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for RoleDeserializer<'_, D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        role: V,
    ) -> Result<V::Value, D::Error> {
        self.table.deserialize_map(TableVisitor { role, fields, found: self.found })
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, D::Error> {
        Err(D::Error::custom("a role's configuration is a struct"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

struct TableVisitor<'a, V> {
    role: V,
    fields: &'static [&'static str],
    found: &'a mut Found,
}

impl<'de, V: Visitor<'de>> Visitor<'de> for TableVisitor<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.role.expecting(f)
    }

    fn visit_map<M: MapAccess<'de>>(self, table: M) -> Result<V::Value, M::Error> {
        self.role.visit_map(RoleAccess { table, fields: self.fields, found: self.found })
    }
}

/// The entries of a table that are a role's own; the others are taken on the way.
struct RoleAccess<'a, M> {
    table: M,
    fields: &'static [&'static str],
    found: &'a mut Found,
}

impl<'de, M: MapAccess<'de>> MapAccess<'de> for RoleAccess<'_, M> {
    type Error = M::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, M::Error> {
        loop {
            match self.table.next_key_seed(KeySeed { fields: self.fields })? {
                None => return Ok(None),
                Some(Key::Role(key)) => return seed.deserialize(key.into_deserializer()).map(Some),
                Some(Key::Network(key)) => self.found.take(key, &mut self.table)?,
            }
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, M::Error> {
        self.table.next_value_seed(seed)
    }
}

enum Key {
    Role(&'static str),
    Network(&'static str),
}

struct KeySeed {
    fields: &'static [&'static str],
}

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for KeySeed {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<Key, E> {
        let among = |keys: &[&'static str]| keys.iter().copied().find(|known| *known == key);
        let role = among(self.fields).map(Key::Role);
        role.or_else(|| among(&KEYS).map(Key::Network)).ok_or_else(|| {
            let known: Vec<_> = self.fields.iter().chain(&KEYS).map(|known| format!("`{known}`")).collect();
            E::custom(format_args!("unknown field `{key}`, expected one of {}", known.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(remote = "Self", deny_unknown_fields)]
    struct Config {
        gpus: u32,
        #[serde(default)]
        names: Vec<String>,
        #[serde(skip)]
        network: NetworkConfig,
    }
    crate::flatten_network!(Config, network);

    /// The error's text and the line where it says that it is.
    fn error(text: &str) -> (String, usize) {
        let error = toml::from_str::<Config>(text).unwrap_err();
        (error.message().to_owned(), 1 + text[..error.span().map_or(0, |span| span.start)].matches('\n').count())
    }

    #[test]
    fn keys_of_both_are_read_and_written() {
        let text = "arm = 'verbs:rxe0'\ngpus = 3\naddress = '10.0.0.1:4791'\nshared_address = true\n\
                    local_path = 'udp'\n\
                    secret = 'a secret of 20 bytes'\nname = 'a-1'\n\
                    names = ['a', 'b']\n[verbs]\nport = 2\n[faults]\nloss = 0.5\n\
                    [tls]\ncertificate = 'c'\nkey = 'k'\nauthority = 'a'\n";
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!((config.gpus, config.names.as_slice()), (3, ["a".to_owned(), "b".to_owned()].as_slice()));
        let NetworkConfig { secret, name, arm, address, shared_address, local_path, verbs, faults, tls } =
            &config.network;
        assert!(*secret == "a secret of 20 bytes".to_owned().into());
        assert_eq!((name.as_deref(), arm.to_string().as_str()), (Some("a-1"), "verbs:rxe0"));
        assert_eq!((address, *shared_address), (&Some("10.0.0.1:4791".parse().unwrap()), true));
        assert_eq!(*local_path, LocalPath::Udp);
        assert_eq!((verbs.port, faults.loss, tls.is_some()), (2, 0.5, true));
        let written = toml::to_string(&config).unwrap();
        assert_eq!(toml::from_str::<Config>(&written).unwrap(), config, "{written}");
    }

    #[test]
    fn what_is_left_out_is_the_default_but_for_the_secret() {
        let config: Config = toml::from_str("gpus = 1\nsecret = 'a secret of 20 bytes'").unwrap();
        assert_eq!(config.network, NetworkConfig::new("a secret of 20 bytes"));
        assert_eq!(error("gpus = 1").0, "secret, secret_file: found neither key, expected one of them");
        assert_eq!(error("secret = 'a secret of 20 bytes'").0, "missing field `gpus`");
        let (text, line) = error("gpus = 1\nsecret = 'hush'\n");
        assert!(text.starts_with("secret: found 4 bytes, expected at least 16"), "{text}");
        assert_eq!(line, 2);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let (text, line) = error("gpus = 1\nsecret = 'a secret of 20 bytes'\n\ngpu = 2\n");
        assert_eq!(
            text,
            "unknown field `gpu`, expected one of `gpus`, `names`, `secret`, `secret_file`, `name`, `arm`, `address`, \
             `shared_address`, `local_path`, `verbs`, `faults`, `tls`"
        );
        assert_eq!(line, 4);
        let (text, line) = error("gpus = 1\nsecret = 'a secret of 20 bytes'\narm = 'tcp'\n");
        assert!(text.contains("expected `soft`, `verbs:auto` or `verbs:DEVICE`"), "{text}");
        assert_eq!(line, 3);
        let (text, line) = error("gpus = 'one'\nsecret = 'a secret of 20 bytes'\n");
        assert!(text.contains("invalid type: string \"one\", expected u32"), "{text}");
        assert_eq!(line, 1);
        let (text, line) = error("gpus = 1\nsecret = 'a secret of 20 bytes'\n[verbs]\nprot = 1\n");
        assert!(text.contains("unknown field `prot`"), "{text}");
        assert_eq!(line, 4);
        assert!(error("network = 1").0.contains("unknown field `network`"), "the field's own name is no key");
    }

    #[test]
    fn two_secrets_can_be_known_at_once_inline_or_in_files() {
        let read =
            |keys: &str| toml::from_str::<Config>(&format!("gpus = 1\n{keys}")).map_err(|e| e.message().to_owned());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("s");
        std::fs::write(&file, "a secret of 20 bytes\n").unwrap();
        let known = |keys: &str| read(keys).unwrap().network.secrets().map(|secrets| secrets.known().to_vec());
        let (first, second) = ("a secret of 20 bytes", "another one, as long");
        let expected = vec![first.as_bytes().into(), second.as_bytes().into()];
        assert_eq!(known(&format!("secret = ['{first}', '{second}']")).unwrap(), expected);
        assert_eq!(known(&format!("secret_file = '{}'", file.display())).unwrap(), expected[..1]);
        let error = known("secret_file = ['/nowhere/s']").unwrap_err().to_string();
        assert!(error.starts_with("secret_file: /nowhere/s cannot be read"), "{error}");
        let config = read(&format!("secret = ['{first}', '{second}']")).unwrap();
        assert_eq!(toml::from_str::<Config>(&toml::to_string(&config).unwrap()).unwrap(), config);
        for (keys, told) in [
            ("secret = ['a secret of 20 bytes', 'short']", "secret: found 5 bytes, expected at least 16"),
            ("secret = []", "secret, secret_file: found 0 secrets, expected one, or 2"),
            ("secret = ['a', 'b', 'c']", "secret, secret_file: found 3 secrets, expected one, or 2"),
            ("secret = 7", "invalid type: integer `7`, expected a string, or a list of one or two"),
            ("secret = 'a secret of 20 bytes'\nsecret_file = 's'", "secret, secret_file: found both keys"),
            (
                "secret = 'a secret of 20 bytes'\nname = 'a b'",
                "name: found 3 bytes like `a-b`, expected 1 to 63 letters",
            ),
        ] {
            let error = read(keys).unwrap_err();
            assert!(error.starts_with(told), "{error}");
        }
    }

    #[test]
    fn a_member_is_called_as_its_host_if_nothing_is_said() {
        let network = NetworkConfig::new("a secret of 20 bytes");
        assert!(is_member_name(&network.member_name()));
        let named = NetworkConfig { name: Some("rack7".to_owned()), ..network };
        assert_eq!(named.member_name(), "rack7");
    }

    #[test]
    fn the_file_of_any_role_tells_of_the_network() {
        let network: NetworkConfig =
            toml::from_str("listen = 'a'\nsecret = 'a secret of 20 bytes'\narm = 'verbs:x'\n[network]\nctrl_us = 1")
                .unwrap();
        assert_eq!(network.arm, ArmName::Verbs("x".to_owned()));
        assert!(toml::from_str::<NetworkConfig>("listen = 'a'").is_err());
    }

    #[test]
    fn an_address_is_said_or_follows_from_the_route() {
        let network = |address: &str| NetworkConfig {
            address: Some(address.parse().unwrap()),
            ..NetworkConfig::new("a secret of 20 bytes")
        };
        let scheduler: Address = "127.0.0.1:7400".parse().unwrap();
        let at = |address: &str| match network(address).arm(None, std::slice::from_ref(&scheduler)).unwrap() {
            Arm::Soft { address, .. } => address.to_string(),
            Arm::Verbs(_) => panic!("not soft"),
        };
        assert_eq!((at("auto:0"), at("auto:5")), ("127.0.0.1:0".to_owned(), "127.0.0.1:5".to_owned()));
        assert_eq!(at("localhost:6"), "127.0.0.1:6");
        let alone = network("auto").arm(None, &[]).unwrap_err();
        assert!(!alone.may_pass() && alone.to_string().starts_with("address: found `auto`"), "{alone}");
        let broadcast = network("auto").arm(None, &["255.255.255.255:1".parse().unwrap()]).unwrap_err();
        assert!(broadcast.may_pass(), "a route may come");
    }

    #[test]
    fn two_on_one_address_need_not_agree_on_a_port() {
        let own = crate::random_loopback().into();
        let open = |network: &NetworkConfig| crate::Endpoint::open(network.endpoint(Some(own), &[]).unwrap());
        let network = NetworkConfig::new("a secret of 20 bytes");
        let both = [(), ()].map(|()| open(&network).unwrap());
        let ports = both.each_ref().map(|endpoint| endpoint.packet_address().unwrap().port());
        assert!(ports[0] == ROCE_PORT && ports[1] != ROCE_PORT, "{ports:?}");
        let shared = network.endpoint(Some(own), &[]).unwrap().sharing_address_within_process();
        let third = crate::Endpoint::open(shared).unwrap().packet_address().unwrap().port();
        assert!(!ports.contains(&third) && third != 0);
        let said = Some(SocketAddr::new(own, ROCE_PORT).into());
        let taken = open(&NetworkConfig { address: said, ..network }).err().expect("it is taken").to_string();
        assert!(taken.contains("keys address, shared_address"), "{taken}");
    }

    #[test]
    fn a_log_does_not_tell_the_secret() {
        let text = format!("{:?}", NetworkConfig::new("hush"));
        assert!(!text.contains("hush") && text.contains("shared_address: false"), "{text}");
    }

    #[test]
    fn the_soft_arm_has_the_role_s_own_address_by_default() {
        let own = Some("10.0.0.9".parse().unwrap());
        let address = |config: &NetworkConfig| match config.arm(own, &[]).unwrap() {
            Arm::Soft { address, .. } => Some(address.to_string()),
            Arm::Verbs(verbs) => verbs.address.map(|ip| ip.to_string()),
        };
        let soft = NetworkConfig::new("a secret of 20 bytes");
        assert_eq!(address(&soft).unwrap(), "10.0.0.9:4791");
        let named = NetworkConfig { address: Some("10.0.0.1:4792".parse().unwrap()), ..soft.clone() };
        assert_eq!(address(&named).unwrap(), "10.0.0.1:4792");
        assert_eq!(address(&NetworkConfig { arm: ArmName::Verbs("rxe0".into()), ..soft.clone() }), None);
        // That is how its device is found; without one, by the route.
        let auto = NetworkConfig { arm: ArmName::Verbs("auto".into()), ..soft };
        assert_eq!(address(&auto).unwrap(), "10.0.0.9");
        let scheduler: Address = "127.0.0.1:7400".parse().unwrap();
        for own in [None, Some("0.0.0.0".parse().unwrap())] {
            let Arm::Verbs(verbs) = auto.arm(own, std::slice::from_ref(&scheduler)).unwrap() else { panic!("soft") };
            assert_eq!((verbs.device.as_str(), verbs.address.unwrap()), ("auto", "127.0.0.1".parse().unwrap()));
        }
    }
}
