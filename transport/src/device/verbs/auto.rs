//! Which device `verbs:auto` is: the one that the route to the scheduler leaves by, as the kernel shows devices under
//! `/sys/class/infiniband`.
//!
//! On Ethernet a port's addresses are its GIDs. On InfiniBand they are those of the network interface (IPoIB) beside
//! it. Where the cluster's addresses are those of another network, say one for management, no port has the route's, and
//! the only port that is up is taken.

use std::{fs, net::IpAddr, path::Path};

use nix::ifaddrs::getifaddrs;

use super::gid;
use crate::{AUTO_DEVICE, VerbsConfig, error::AutoDeviceError};

/// A port that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Port {
    device: String,
    number: u8,
    is_ethernet: bool,
    /// By which others reach its host.
    addresses: Vec<IpAddr>,
}

/// The configuration with a device's name and port where it says `auto`. Its address stays if it is one of the port's.
///
/// # Errors
/// One line with the ports that there are.
pub(super) fn placed(config: VerbsConfig) -> Result<VerbsConfig, AutoDeviceError> {
    if config.device != AUTO_DEVICE {
        return Ok(config);
    }
    let ports = ports(Path::new(gid::CLASS), &addresses_of_interfaces());
    let port = choose(&ports, config.address)?;
    let address = config.address.filter(|wanted| port.is_ethernet && port.addresses.contains(wanted));
    let settings = crate::VerbsSettings { port: port.number, ..config.settings };
    tracing::info!(device = port.device, port = port.number, route = ?config.address, "arm verbs:auto is a device's");
    Ok(VerbsConfig { device: port.device.clone(), address, settings })
}

/// The port of the route, or the only one.
fn choose(ports: &[Port], route: Option<IpAddr>) -> Result<&Port, AutoDeviceError> {
    let of_route = route.and_then(|route| ports.iter().find(|port| port.addresses.contains(&route)));
    match (of_route, ports) {
        (Some(port), _) | (None, [port]) => Ok(port),
        (None, _) => {
            let told = |port: &Port| {
                let addresses: Vec<_> = port.addresses.iter().map(IpAddr::to_string).collect();
                format!("{} port {} ({})", port.device, port.number, addresses.join(", "))
            };
            Err(AutoDeviceError { route, found: ports.iter().map(told).collect() })
        }
    }
}

/// All ports that are up, by the names of their devices.
fn ports(class: &Path, interfaces: &[(String, IpAddr)]) -> Vec<Port> {
    let mut ports: Vec<Port> = names(class)
        .into_iter()
        .flat_map(|device| {
            names(&class.join(&device).join("ports")).into_iter().map(move |port| (device.clone(), port))
        })
        .filter_map(|(device, port)| up(class, device, port.parse().ok()?, interfaces))
        .collect();
    ports.sort_by(|one, other| (&one.device, one.number).cmp(&(&other.device, other.number)));
    ports
}

fn up(class: &Path, device: String, number: u8, interfaces: &[(String, IpAddr)]) -> Option<Port> {
    let folder = class.join(&device).join("ports").join(number.to_string());
    let text = |file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
    // "4: ACTIVE"
    if !text("state").starts_with("4:") {
        return None;
    }
    let is_ethernet = text("link_layer").trim() == "Ethernet";
    let addresses = match is_ethernet {
        true => gid::others_can_route_to(&folder),
        false => {
            let beside = class.join(&device).join("device/net");
            let is_of_port = |interface: &str| {
                let of_device = fs::read_to_string(beside.join(interface).join("dev_port"));
                of_device.ok().and_then(|index| index.trim().parse::<u8>().ok()) == Some(number - 1)
            };
            interfaces.iter().filter(|(name, _)| is_of_port(name)).map(|&(_, address)| address).collect()
        }
    };
    Some(Port { device, number, is_ethernet, addresses })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Of this host's interfaces, by their names.
fn addresses_of_interfaces() -> Vec<(String, IpAddr)> {
    let Ok(interfaces) = getifaddrs() else { return Vec::new() };
    interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            let ipv4 = address.as_sockaddr_in().map(|address| address.ip().into());
            let address = ipv4.or_else(|| address.as_sockaddr_in6().map(|address| address.ip().into()))?;
            Some((interface.interface_name, address))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a09:0002";

    /// Two cards on Ethernet, of which one is down, and one of two ports on InfiniBand.
    fn host() -> tempfile::TempDir {
        let class = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = class.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{text}\n")).unwrap();
        };
        for (port, state, layer) in [
            ("eth0/ports/1", "4: ACTIVE", "Ethernet"),
            ("eth1/ports/1", "1: DOWN", "Ethernet"),
            ("mlx5_0/ports/1", "4: ACTIVE", "InfiniBand"),
            ("mlx5_0/ports/2", "4: ACTIVE", "InfiniBand"),
        ] {
            write(&format!("{port}/state"), state);
            write(&format!("{port}/link_layer"), layer);
        }
        for device in ["eth0", "eth1"] {
            write(&format!("{device}/ports/1/gids/0"), IPV4);
            write(&format!("{device}/ports/1/gid_attrs/types/0"), "RoCE v2");
        }
        write("mlx5_0/device/net/ib0/dev_port", "0");
        write("mlx5_0/device/net/ib1/dev_port", "1");
        class
    }

    fn interfaces() -> Vec<(String, IpAddr)> {
        [("lo", "127.0.0.1"), ("ib0", "10.1.0.2"), ("ib1", "10.2.0.2"), ("ib1", "fd00::2"), ("mgmt", "192.168.0.2")]
            .map(|(name, address)| (name.to_owned(), address.parse().unwrap()))
            .to_vec()
    }

    #[test]
    fn the_device_is_the_one_of_the_route() {
        let class = host();
        let ports = ports(class.path(), &interfaces());
        for (route, device, number) in
            [("10.9.0.2", "eth0", 1), ("10.1.0.2", "mlx5_0", 1), ("10.2.0.2", "mlx5_0", 2), ("fd00::2", "mlx5_0", 2)]
        {
            let port = choose(&ports, Some(route.parse().unwrap())).unwrap();
            assert_eq!((port.device.as_str(), port.number, port.is_ethernet), (device, number, device == "eth0"));
        }
    }

    #[test]
    fn over_another_network_there_must_be_one_device() {
        let class = host();
        let route = Some("192.168.0.2".parse().unwrap());
        let error = choose(&ports(class.path(), &interfaces()), route).unwrap_err().to_string();
        let found = "eth0 port 1 (10.9.0.2); mlx5_0 port 1 (10.1.0.2); mlx5_0 port 2 (10.2.0.2, fd00::2)";
        assert!(error.contains("192.168.0.2") && error.contains(found), "{error}");
        fs::remove_dir_all(class.path().join("mlx5_0")).unwrap();
        let only = ports(class.path(), &interfaces());
        for route in [route, None] {
            assert_eq!(choose(&only, route).unwrap().device, "eth0");
        }
        fs::remove_dir_all(class.path().join("eth0")).unwrap();
        let error = choose(&ports(class.path(), &interfaces()), None).unwrap_err().to_string();
        assert!(error.contains("found no port that is up"), "{error}");
    }

    #[test]
    fn a_name_is_left_alone() {
        let config = VerbsConfig { device: "mlx5_9".to_owned(), address: None, settings: Default::default() };
        assert_eq!(placed(config.clone()).unwrap(), config);
    }
}
