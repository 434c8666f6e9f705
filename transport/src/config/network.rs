//! The keys of the network, which the file of every role has beside its own.
//!
//! serde can flatten one struct into another, but then names no unknown key together with the known ones, and forgets
//! the lines of all that is wrong. So the file's table is split while it is read: keys of the network are taken here,
//! the others by the role's own (derived) `Deserialize`, and a key that neither has is refused with the names of both.

use std::{fmt, net::SocketAddr};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeSeed, Error as _, IntoDeserializer as _, MapAccess, Visitor},
    forward_to_deserialize_any,
};

use super::{Arm, EndpointConfig, Faults, VerbsSettings, deserialize_secret};
use crate::{OpenError, TlsFiles, arm_name::ArmName, limits::ROCE_PORT};

/// What the file of every role says of the network. A role's configuration has a field of this type whose keys
/// [`flatten_network!`](crate::flatten_network) puts beside its own.
#[derive(Clone, PartialEq, Eq, Default, Serialize)]
pub struct NetworkConfig {
    /// Shared with all members of the cluster; at least [`SECRET_BYTES_MIN`](crate::SECRET_BYTES_MIN) bytes.
    pub secret: String,
    /// The network: `soft`, or `verbs:DEVICE`.
    pub arm: ArmName,
    /// Where packets come from and arrive. Without it, the soft arm takes the role's own address, or a random loopback
    /// address, and a verbs device its first that others can route to.
    pub address: Option<SocketAddr>,
    /// Whether other processes of this user have the same `address`; all of them must say so. Soft arm only.
    pub shared_address: bool,
    /// How the queue pairs of a verbs device are set up.
    pub verbs: VerbsSettings,
    /// Faults injected into our packets, for tests. Soft arm only.
    pub faults: Faults,
    /// Certificates, with which members also prove themselves to each other by mutual TLS.
    pub tls: Option<TlsFiles>,
}

/// In the order in which an unknown key is told them.
const KEYS: [&str; 7] = ["secret", "arm", "address", "shared_address", "verbs", "faults", "tls"];

impl NetworkConfig {
    /// The defaults, with this secret.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        Self { secret: secret.into(), ..Self::default() }
    }

    /// The arm, if the role's own address (say, that of its TCP listener) is `own`.
    ///
    /// # Errors
    /// One line that names the key that does not fit the arm.
    pub fn choose_arm(&self, own: Option<SocketAddr>) -> Result<Arm, OpenError> {
        let own = own.filter(|_| self.arm == ArmName::Soft).map(|own| SocketAddr::new(own.ip(), ROCE_PORT));
        Arm::choose(&self.arm, self.address.or(own), self.shared_address, self.faults, self.verbs)
    }

    /// An endpoint that only connects, over [`Self::choose_arm`].
    ///
    /// # Errors
    /// As [`Self::choose_arm`].
    pub fn endpoint(&self, own: Option<SocketAddr>) -> Result<EndpointConfig, OpenError> {
        Ok(EndpointConfig::over(self.choose_arm(own)?).with_secret(self.secret.as_bytes()).with_tls(self.tls.clone()))
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
        let Found { secret, rest } = found;
        let secret = secret.ok_or_else(|| D::Error::missing_field("secret"))?;
        Ok((Self { secret, ..rest }, role))
    }
}

impl fmt::Debug for NetworkConfig {
    /// Without the secret, which has no place in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { secret: _, arm, address, shared_address, verbs, faults, tls } = self;
        f.debug_struct("NetworkConfig")
            .field("arm", arm)
            .field("address", address)
            .field("shared_address", shared_address)
            .field("verbs", verbs)
            .field("faults", faults)
            .field("tls", tls)
            .finish_non_exhaustive()
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
/// assert!(error.message().starts_with("unknown field `narm`, expected one of `gpus`, `secret`, `arm`"));
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

/// The secret as it is read: checked while its line is known.
struct Secret(String);

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_secret(deserializer).map(Self)
    }
}

/// What a table said of the network so far.
#[derive(Default)]
struct Found {
    secret: Option<String>,
    /// All but the secret.
    rest: NetworkConfig,
}

impl Found {
    /// Takes the value of one of [`KEYS`].
    fn take<'de, M: MapAccess<'de>>(&mut self, key: &'static str, table: &mut M) -> Result<(), M::Error> {
        let rest = &mut self.rest;
        match key {
            "secret" => self.secret = Some(table.next_value::<Secret>()?.0),
            "arm" => rest.arm = table.next_value()?,
            "address" => rest.address = table.next_value()?,
            "shared_address" => rest.shared_address = table.next_value()?,
            "verbs" => rest.verbs = table.next_value()?,
            "faults" => rest.faults = table.next_value()?,
            "tls" => rest.tls = table.next_value()?,
            _ => unreachable!("`key` is one of KEYS"),
        }
        Ok(())
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
                    secret = 'a secret of 20 bytes'\n\
                    names = ['a', 'b']\n[verbs]\nport = 2\n[faults]\nloss = 0.5\n\
                    [tls]\ncertificate = 'c'\nkey = 'k'\nauthority = 'a'\n";
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!((config.gpus, config.names.as_slice()), (3, ["a".to_owned(), "b".to_owned()].as_slice()));
        let NetworkConfig { secret, arm, address, shared_address, verbs, faults, tls } = &config.network;
        assert_eq!((secret.as_str(), arm.to_string().as_str()), ("a secret of 20 bytes", "verbs:rxe0"));
        assert_eq!((*address, *shared_address), (Some("10.0.0.1:4791".parse().unwrap()), true));
        assert_eq!((verbs.port, faults.loss, tls.is_some()), (2, 0.5, true));
        let written = toml::to_string(&config).unwrap();
        assert_eq!(toml::from_str::<Config>(&written).unwrap(), config, "{written}");
    }

    #[test]
    fn what_is_left_out_is_the_default_but_for_the_secret() {
        let config: Config = toml::from_str("gpus = 1\nsecret = 'a secret of 20 bytes'").unwrap();
        assert_eq!(config.network, NetworkConfig::new("a secret of 20 bytes"));
        assert_eq!(error("gpus = 1").0, "missing field `secret`");
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
            "unknown field `gpu`, expected one of `gpus`, `names`, `secret`, `arm`, `address`, `shared_address`, \
             `verbs`, `faults`, `tls`"
        );
        assert_eq!(line, 4);
        let (text, line) = error("gpus = 1\nsecret = 'a secret of 20 bytes'\narm = 'tcp'\n");
        assert!(text.contains("expected `soft` or `verbs:DEVICE`"), "{text}");
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
    fn a_log_does_not_tell_the_secret() {
        let text = format!("{:?}", NetworkConfig::new("hush"));
        assert!(!text.contains("hush") && text.contains("shared_address: false"), "{text}");
    }

    #[test]
    fn the_soft_arm_has_the_role_s_own_address_by_default() {
        let own = Some("10.0.0.9:7000".parse().unwrap());
        let address = |config: &NetworkConfig| match config.choose_arm(own).unwrap() {
            Arm::Soft { address, .. } => Some(address.to_string()),
            Arm::Verbs(verbs) => verbs.address.map(|ip| ip.to_string()),
        };
        let soft = NetworkConfig::new("a secret of 20 bytes");
        assert_eq!(address(&soft).unwrap(), "10.0.0.9:4791");
        let named = NetworkConfig { address: Some("10.0.0.1:4792".parse().unwrap()), ..soft.clone() };
        assert_eq!(address(&named).unwrap(), "10.0.0.1:4792");
        assert_eq!(address(&NetworkConfig { arm: ArmName::Verbs("rxe0".into()), ..soft }), None);
    }
}
