//! Where somebody is, as operators write it: an IP address and a port, or a name and a port.

use std::{fmt, net::SocketAddr, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// `IP:PORT`, or `NAME:PORT`, whose name is looked up anew each time that somebody connects there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address(Kind);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Ip(SocketAddr),
    Name { host: String, port: u16 },
}

/// What is no [`Address`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("found `{0}`, expected IP:PORT or NAME:PORT, such as 10.0.0.1:7400 or scheduler-0.example:7400")]
pub struct AddressError(String);

/// Bytes of a name, and of what is between two dots of it (RFC 1035, section 2.3.4).
const NAME_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;
/// Bytes of a wrong address that an error shows.
const SHOWN_BYTES_MAX: usize = 64;

impl Address {
    /// The address, if there is no name to look up.
    #[must_use]
    pub fn ip(&self) -> Option<SocketAddr> {
        match self.0 {
            Kind::Ip(at) => Some(at),
            Kind::Name { .. } => None,
        }
    }

    /// The same host's, with another port.
    #[must_use]
    pub fn with_port(&self, port: u16) -> Self {
        Self(match &self.0 {
            Kind::Ip(at) => Kind::Ip(SocketAddr::new(at.ip(), port)),
            Kind::Name { host, .. } => Kind::Name { host: host.clone(), port },
        })
    }

    /// The name and the port, if there is one to look up.
    #[must_use]
    pub fn name(&self) -> Option<(&str, u16)> {
        match &self.0 {
            Kind::Ip(_) => None,
            Kind::Name { host, port } => Some((host, *port)),
        }
    }
}

/// Whether this can be a host's name. One that ends with a number is an IP address that went wrong.
fn is_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_label = |label: &str| {
        (1..=LABEL_BYTES_MAX).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    let ends_with_number = host.rsplit('.').next().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()));
    host.len() <= NAME_BYTES_MAX && !ends_with_number && host.split('.').all(is_label)
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Ok(at) = text.parse() {
            return Ok(Self(Kind::Ip(at)));
        }
        let name = text.rsplit_once(':').filter(|(host, _)| is_name(host));
        // `+80` parses as a number, too.
        let name = name.filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
        let parsed = name.and_then(|(host, port)| Some(Kind::Name { host: host.to_owned(), port: port.parse().ok()? }));
        parsed.map(Self).ok_or_else(|| AddressError(text[..text.floor_char_boundary(SHOWN_BYTES_MAX)].to_owned()))
    }
}

impl TryFrom<String> for Address {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

impl From<SocketAddr> for Address {
    fn from(at: SocketAddr) -> Self {
        Self(Kind::Ip(at))
    }
}

impl From<([u8; 4], u16)> for Address {
    fn from(at: ([u8; 4], u16)) -> Self {
        Self(Kind::Ip(at.into()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Ip(at) => at.fmt(f),
            Kind::Name { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// An address of this host's own: one that is said, or the one from which packets to the scheduler leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum OwnAddress {
    /// `auto` or `auto:PORT`: the source address of the route to the scheduler.
    Auto(Option<u16>),
    /// This one.
    At(Address),
}

impl FromStr for OwnAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.strip_prefix("auto") {
            Some("") => Ok(Self::Auto(None)),
            Some(rest) if rest.starts_with(':') => match text.parse::<Address>()?.name() {
                Some((_, port)) => Ok(Self::Auto(Some(port))),
                None => Err(AddressError(text.to_owned())),
            },
            _ => text.parse().map(Self::At),
        }
    }
}

impl TryFrom<String> for OwnAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<OwnAddress> for String {
    fn from(address: OwnAddress) -> Self {
        address.to_string()
    }
}

impl From<SocketAddr> for OwnAddress {
    fn from(at: SocketAddr) -> Self {
        Self::At(at.into())
    }
}

impl fmt::Display for OwnAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto(None) => f.write_str("auto"),
            Self::Auto(Some(port)) => write!(f, "auto:{port}"),
            Self::At(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_read_as_they_are_written() {
        for text in ["10.0.0.1:7400", "[fe80::1]:1", "localhost:0", "db-scheduler-0.db_x.svc.:7400", "a:65535"] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_ne!(address.ip().is_some(), address.name().is_some());
        }
        assert_eq!("h.example:80".parse::<Address>().unwrap().name(), Some(("h.example", 80)));
        let at: SocketAddr = "127.0.0.1:5".parse().unwrap();
        assert_eq!(Address::from(at).ip(), Some(at));
    }

    #[test]
    fn what_is_no_address_is_shown_with_what_was_expected() {
        let long = format!("{}.example:1", "l".repeat(LABEL_BYTES_MAX + 1));
        let longer = format!("{}e:1", "l.".repeat(NAME_BYTES_MAX));
        for text in [
            "",
            "localhost",
            ":7400",
            "h:",
            "h:65536",
            "h:+80",
            "10.0.0.300:7400",
            "1.2.3:4",
            "a b:1",
            "h..e:1",
            "::1:80x",
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("found `{text}`, expected IP:PORT or NAME:PORT")), "{error}");
        }
        for text in [&long, &longer] {
            assert!(text.parse::<Address>().unwrap_err().to_string().len() < 200);
        }
    }

    #[test]
    fn own_addresses_can_be_left_to_the_route() {
        assert_eq!("auto".parse(), Ok(OwnAddress::Auto(None)));
        assert_eq!("auto:4791".parse(), Ok(OwnAddress::Auto(Some(4791))));
        assert_eq!("automat:1".parse::<OwnAddress>().unwrap().to_string(), "automat:1");
        assert_eq!(OwnAddress::Auto(Some(0)).to_string(), "auto:0");
        for wrong in ["auto:", "auto:x", "auto:99999", "automatic", "auto:1:2"] {
            assert!(
                wrong.parse::<OwnAddress>().unwrap_err().to_string().contains(&format!("found `{wrong}`")),
                "{wrong}"
            );
        }
    }
}
