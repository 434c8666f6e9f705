//! Which entry of a RoCE port's GID table is an address: the kernel shows the table under `/sys/class/infiniband`.
//!
//! The table's order depends on what addresses the network device got, and when; entry 0 is often a link-local one
//! that nobody else reaches. So the entry is chosen by the address that it stands for. Tables of real cards have an
//! entry for RoCEv1 and one for RoCEv2 for each address; only the latter can be routed, and is what soft-RoCE speaks.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
};

use crate::error::GidError;

/// Where the kernel shows devices.
pub(super) const CLASS: &str = "/sys/class/infiniband";
/// Entries looked at; tables of cards have 256 and more, and the kernel fills them from the start.
const ENTRIES_MAX: usize = 512;

/// An entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gid {
    pub index: u8,
    /// The address that it stands for: IPv4 where it is an IPv4-mapped one.
    pub address: IpAddr,
}

/// The folder of a port.
pub(super) fn port_folder(device: &str, port: u8) -> PathBuf {
    [CLASS, device, "ports", &port.to_string()].iter().collect()
}

/// The entry that is this address; without an address, the first that others can route to.
///
/// # Errors
/// One line with the addresses that there are.
pub(super) fn choose(port_folder: &Path, wanted: Option<IpAddr>) -> Result<Gid, GidError> {
    let gids = routable(port_folder);
    let found = match wanted {
        Some(wanted) => gids.iter().find(|gid| gid.address == wanted),
        None => gids.iter().find(|gid| !is_link_local(gid.address)),
    };
    found.copied().ok_or_else(|| GidError { wanted, found: gids.iter().map(|gid| gid.address).collect() })
}

/// The addresses of a port by which others reach it, in the table's order.
pub(super) fn others_can_route_to(port_folder: &Path) -> Vec<IpAddr> {
    routable(port_folder).into_iter().map(|gid| gid.address).filter(|&address| !is_link_local(address)).collect()
}

/// All RoCEv2 entries, in the table's order.
fn routable(port_folder: &Path) -> Vec<Gid> {
    (0..ENTRIES_MAX)
        .map_while(|index| Some((index, entry(port_folder, index)?)))
        .filter_map(|(index, entry)| {
            let index = u8::try_from(index).ok()?;
            Some(Gid { index, address: entry? })
        })
        .collect()
}

/// `None` behind the table's end; `Some(None)` for an entry that is empty or of another type.
fn entry(port_folder: &Path, index: usize) -> Option<Option<IpAddr>> {
    let gid = port_folder.join("gids").join(index.to_string());
    if !gid.exists() {
        return None;
    }
    let kind = fs::read_to_string(port_folder.join("gid_attrs/types").join(index.to_string()));
    let address = fs::read_to_string(gid).ok().and_then(|text| text.trim().parse::<Ipv6Addr>().ok());
    let is_rocev2 = kind.is_ok_and(|kind| kind.trim() == "RoCE v2");
    Some(address.filter(|address| is_rocev2 && !address.is_unspecified()).map(|address| address.to_canonical()))
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// The bytes of a GID that stands for an address.
pub(super) fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at a port's folder as the kernel shows it; an empty type stands for an entry whose type cannot be read.
    fn on_port<T>(entries: &[(&str, &str)], look: impl FnOnce(&Path) -> T) -> T {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("gids")).unwrap();
        fs::create_dir_all(folder.path().join("gid_attrs/types")).unwrap();
        for (index, (gid, kind)) in entries.iter().enumerate() {
            fs::write(folder.path().join("gids").join(index.to_string()), format!("{gid}\n")).unwrap();
            if !kind.is_empty() {
                fs::write(folder.path().join("gid_attrs/types").join(index.to_string()), format!("{kind}\n")).unwrap();
            }
        }
        look(folder.path())
    }

    const LINK_LOCAL: &str = "fe80:0000:0000:0000:5054:00ff:fe00:4702";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a09:0002";
    const EMPTY: &str = "0000:0000:0000:0000:0000:0000:0000:0000";
    const IPV6: &str = "fd00:0000:0000:0000:0000:0000:0000:0002";

    #[test]
    fn an_address_is_found_by_its_rocev2_entry() {
        let table = [(LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2"), (EMPTY, ""), (IPV6, "RoCE v2")];
        on_port(&table, |port| {
            for (address, index) in [("10.9.0.2", 2), ("fd00::2", 4), ("fe80::5054:ff:fe00:4702", 0)] {
                let address = address.parse().unwrap();
                assert_eq!(choose(port, Some(address)), Ok(Gid { index, address }));
            }
        });
    }

    #[test]
    fn without_an_address_a_link_local_one_is_not_chosen() {
        let first = on_port(&[(LINK_LOCAL, "RoCE v2"), (IPV4, "RoCE v2")], |port| choose(port, None));
        assert_eq!(first.unwrap().index, 1);
    }

    #[test]
    fn what_there_is_is_named() {
        let other = "10.9.0.7".parse().unwrap();
        let error = on_port(&[(IPV4, "RoCE v2")], |port| choose(port, Some(other))).unwrap_err().to_string();
        assert!(error.contains("10.9.0.7") && error.contains("its GIDs are: 10.9.0.2"), "{error}");
        let error = on_port(&[(LINK_LOCAL, "IB/RoCE v1")], |port| choose(port, None)).unwrap_err().to_string();
        assert!(error.contains("its GIDs are: none"), "{error}");
    }

    #[test]
    fn ipv4_addresses_are_mapped() {
        let octets = octets("10.9.0.2".parse().unwrap());
        assert_eq!(octets, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 2]);
    }
}
