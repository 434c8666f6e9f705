//! A region that one peer alone reaches.
//!
//! Life: registered in a protection domain of its own, in which the peer's queue pair is created then; over another
//! queue pair its key opens nothing, whoever knows it. It ends after that queue pair, and so with the connection,
//! whatever ends that. No IO of its own.

use soft_roce::ProtectionDomain;

use crate::{Access, Region, RegionKey, device::Device, error::ChannelError};

/// A registration for one connection.
pub(crate) struct Opening {
    domain: ProtectionDomain,
    key: RegionKey,
}

impl Opening {
    /// Registers the region once more.
    ///
    /// # Errors
    /// One line if the device has no room for it. Nothing is left then.
    pub(crate) fn open(device: &mut Device, region: &Region, access: Access) -> Result<Self, ChannelError> {
        let failed = |cause| ChannelError::Open { bytes: region.len(), cause };
        let domain = device.open_domain().map_err(failed)?;
        match device.register(region, access, domain) {
            Ok(key) => Ok(Self { domain, key }),
            Err(cause) => {
                device.close_domain(domain);
                Err(failed(cause))
            }
        }
    }

    /// That of the queue pair.
    pub(crate) fn domain(&self) -> ProtectionDomain {
        self.domain
    }

    /// What the peer is to be told.
    pub(crate) fn key(&self) -> RegionKey {
        self.key
    }

    /// The queue pair has ended: the key opens nothing any more.
    pub(crate) fn close(&self, device: &mut Device) {
        device.deregister(self.key.lkey);
        device.close_domain(self.domain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EndpointConfig, device::interface::Demand};

    #[test]
    fn one_that_has_ended_or_found_no_room_leaves_nothing_behind() {
        let mut device = Device::open(EndpointConfig::default().arm, Demand::LEAST).unwrap();
        let (region, access) = (Region::allocate(4096).unwrap(), Access { remote_read: true, remote_write: true });
        let mut former = None;
        for _ in 0..3 {
            let opening = Opening::open(&mut device, &region, access).unwrap();
            assert_ne!(Some((opening.domain(), opening.key())), former);
            let refused = Opening::open(&mut device, &region, access).err().expect("there is room for one").to_string();
            assert!(refused.starts_with("4096 bytes cannot be opened to one more peer: "), "{refused}");
            opening.close(&mut device);
            former = Some((opening.domain(), opening.key()));
        }
    }
}
