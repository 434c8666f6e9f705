//! Which entry of a port's partition table is a key: the kernel shows the table under `/sys/class/infiniband`.

use std::{fs, path::Path};

use super::gid::port_folder;
use crate::{VerbsConfig, error::PortError};

/// Entries looked at: as many as a table can have.
const ENTRIES_MAX: u32 = 1 << 16;
/// Set where a port is a full member. One that is not talks to those that are (IBTA 10.9.3).
const FULL_MEMBER: u16 = 1 << 15;

/// The entry that is the configured partition's.
///
/// # Errors
/// One line with the keys that there are.
pub(super) fn index(config: &VerbsConfig) -> Result<u16, PortError> {
    let (port, wanted) = (config.settings.port, config.settings.partition_key);
    index_in(&port_folder(&config.device, port).join("pkeys"), wanted).map_err(|found| {
        let device = config.device.clone();
        PortError::Partition { device, port, wanted, found }
    })
}

fn index_in(folder: &Path, wanted: u16) -> Result<u16, Vec<u16>> {
    let keys: Vec<u16> = (0..ENTRIES_MAX)
        .map_while(|index| fs::read_to_string(folder.join(index.to_string())).ok())
        .map(|text| u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap_or_default())
        .collect();
    // A container may hide the table, whose first entry is of all ports' own partition (IBTA 10.9.1.2).
    if keys.is_empty() && wanted | FULL_MEMBER == u16::MAX {
        return Ok(0);
    }
    let place = keys.iter().position(|key| (key ^ wanted) & !FULL_MEMBER == 0);
    let index = place.and_then(|place| u16::try_from(place).ok());
    // An entry that is not in use has key 0.
    index.ok_or_else(|| keys.into_iter().filter(|&key| key != 0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_is_found_whichever_kind_of_member_the_port_is() {
        let folder = tempfile::tempdir().unwrap();
        for (index, key) in ["0xffff", "0x0000", "0x0012", "0x8013"].iter().enumerate() {
            fs::write(folder.path().join(index.to_string()), format!("{key}\n")).unwrap();
        }
        for (wanted, index) in [(0xffff, 0), (0x7fff, 0), (0x8012, 2), (0x0013, 3)] {
            assert_eq!(index_in(folder.path(), wanted), Ok(index), "{wanted:#x}");
        }
        assert_eq!(index_in(folder.path(), 0x8014), Err(vec![0xffff, 0x0012, 0x8013]));
        let hidden = folder.path().join("none");
        assert_eq!((index_in(&hidden, 0xffff), index_in(&hidden, 0x8012)), (Ok(0), Err(Vec::new())));
    }
}
