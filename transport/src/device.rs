//! What carries the queue pairs: soft-RoCE on a UDP socket or a verbs device. The rest of the crate sees this interface
//! and nothing behind it; work requests and completions are soft-RoCE's types, which are IBTA's.
//!
//! An arm is chosen once, when an endpoint is opened, and the choice is an enum: no call on the way of a packet goes
//! through a table. Life of a queue pair: created (it takes receives), connected (it receives and may send), moved to
//! ERROR, destroyed. When `destroy_queue_pair` has returned, nothing that its peer sends reaches our memory, and no
//! completion of it is left.

pub(crate) mod interface;
mod soft;
#[cfg(feature = "verbs")]
mod verbs;

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
};

pub(crate) use soft::{READ_BYTES_MAX, Soft};

use proto::Timestamp;
use soft_roce::{Completion, MemoryWindows, PathMtu, ProtectionDomain, Psn, QueuePairNumber, RecvRequest, SendRequest};

use crate::{
    Access, Arm, Region, RegionKey,
    bootstrap::{PacketAddress, Parameters, RingName},
    device::interface::{Demand, Descriptor, DeviceEvent, Moved, Offer},
    device_memory::{DeviceMemory, Way},
    error::{
        ConnectQueuePairError, CreateQueuePairError, DeviceOpenError, PathMtuError, RegisterError, WorkRequestError,
    },
    poller::Interest,
};

/// Ports that are tried where any will do.
const PORTS_TRIED: usize = 8;

/// One arm, opened.
pub(crate) enum Device {
    Soft(Box<soft::Soft>),
    #[cfg(feature = "verbs")]
    Verbs(Box<verbs::Verbs>),
}

/// Calls the same method on whichever arm it is.
macro_rules! each {
    ($self:expr, $device:ident => $call:expr) => {
        match $self {
            Device::Soft($device) => $call,
            #[cfg(feature = "verbs")]
            Device::Verbs($device) => $call,
        }
    };
}

/// Whether a verbs device registers memory that another one hands over as a dma-buf, as GPUs do. Opens the device, and
/// registers nothing.
///
/// # Errors
/// One line that says why this cannot be known.
pub fn takes_dma_bufs(device: &str) -> Result<bool, DeviceOpenError> {
    let device = device.to_owned();
    #[cfg(feature = "verbs")]
    return verbs::takes_dma_bufs(&device).map_err(|cause| DeviceOpenError::Verbs { device, cause });
    #[cfg(not(feature = "verbs"))]
    Err(DeviceOpenError::WithoutVerbs { device })
}

impl Device {
    /// Opens an arm.
    ///
    /// # Errors
    /// One line that names what is missing, taken or out of bounds.
    pub(crate) fn open(arm: Arm, demand: Demand) -> Result<Self, DeviceOpenError> {
        match arm {
            Arm::Soft { address, any_port, faults, sharing, local } => {
                let mut opened = soft::Soft::open(address, faults, sharing, local, demand);
                // Somebody may be quicker, also there.
                for _ in 0..PORTS_TRIED {
                    if !any_port || !opened.as_ref().is_err_and(DeviceOpenError::is_taken) {
                        break;
                    }
                    let free = soft::free_port(address.ip()).map(|port| SocketAddr::new(address.ip(), port));
                    let free = free.map_err(|cause| DeviceOpenError::Udp { address, cause })?;
                    opened = soft::Soft::open(free, faults, sharing, local, demand);
                }
                Ok(Self::Soft(Box::new(opened?)))
            }
            #[cfg(feature = "verbs")]
            Arm::Verbs(config) => {
                let device = config.device.clone();
                let opened = verbs::Verbs::open(config, demand);
                Ok(Self::Verbs(Box::new(opened.map_err(|cause| DeviceOpenError::Verbs { device, cause })?)))
            }
            #[cfg(not(feature = "verbs"))]
            Arm::Verbs(crate::VerbsConfig { device, .. }) => Err(DeviceOpenError::WithoutVerbs { device }),
        }
    }

    pub(crate) fn offer(&self) -> Offer {
        each!(self, device => device.offer())
    }

    /// Where our packets come from and arrive, as peers are told.
    pub(crate) fn address(&self) -> PacketAddress {
        each!(self, device => device.address())
    }

    /// The descriptors to watch, and what for. What a descriptor is watched for may change with each
    /// [`Self::transmit`].
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = (Descriptor, BorrowedFd<'_>, Interest)> {
        each!(self, device => device.descriptors().to_vec()).into_iter()
    }

    /// soft-RoCE's own counters; a verbs device keeps its own, in `/sys/class/infiniband/DEV/ports/N/`.
    pub(crate) fn soft(&self) -> Option<&soft::Soft> {
        match self {
            Self::Soft(soft) => Some(soft),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => None,
        }
    }

    /// What the kernel calls the device, if it is one of its own.
    pub(crate) fn verbs_name(&self) -> Option<&str> {
        match self {
            Self::Soft(_) => None,
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => Some(verbs.name()),
        }
    }

    /// Begins a protection domain beside that of all else, which is the default.
    ///
    /// # Errors
    /// One line that names the limit that is reached.
    pub(crate) fn open_domain(&mut self) -> Result<ProtectionDomain, RegisterError> {
        each!(self, device => device.open_domain())
    }

    /// Ends such a protection domain. No region and no queue pair of it may be left.
    pub(crate) fn close_domain(&mut self, domain: ProtectionDomain) {
        each!(self, device => device.close_domain(domain))
    }

    /// Registers a region, for queue pairs of this protection domain alone; they may always fill it.
    ///
    /// # Errors
    /// One line that names the limit that is reached.
    pub(crate) fn register(
        &mut self,
        region: &Region,
        access: Access,
        domain: ProtectionDomain,
    ) -> Result<RegionKey, RegisterError> {
        each!(self, device => device.register(region, access, domain))
    }

    /// To bind windows to a region, if this arm has windows.
    pub(crate) fn windows(&self, lkey: u32) -> Option<MemoryWindows> {
        Some(self.soft()?.windows(lkey))
    }

    /// Registers memory of another device's, for our own queue pairs to fill.
    ///
    /// # Errors
    /// If this device has no way there.
    pub(crate) fn register_device_memory(&mut self, memory: &DeviceMemory) -> Result<(u32, Way), RegisterError> {
        each!(self, device => device.register_device_memory(memory))
    }

    /// Takes a region back: its keys open nothing any more. No queue pair that uses it may be left.
    pub(crate) fn deregister(&mut self, lkey: u32) {
        each!(self, device => device.deregister(lkey))
    }

    /// Lets a lost device go; no queue pair is left, and no descriptor of it is watched. It is opened again as soon as
    /// that is possible, which [`DeviceEvent::OpenedAgain`] tells. Keys of the old life open nothing then.
    pub(crate) fn let_go(&mut self, reason: String) {
        match self {
            Self::Soft(_) => unreachable!("soft-RoCE is never lost: {reason}"),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.let_go(reason),
        }
    }

    /// What our link carries towards a peer.
    ///
    /// # Errors
    /// One line if nothing does.
    pub(crate) fn path_mtu(&self, peer: IpAddr) -> Result<PathMtu, PathMtuError> {
        each!(self, device => device.path_mtu(peer))
    }

    /// A queue pair of this protection domain that takes receives.
    ///
    /// # Errors
    /// One line that names the limit that is reached.
    pub(crate) fn create_queue_pair(
        &mut self,
        domain: ProtectionDomain,
    ) -> Result<QueuePairNumber, CreateQueuePairError> {
        each!(self, device => device.create_queue_pair(domain))
    }

    /// Before a peer is told of a queue pair: invites it to a faster way, if there may be one to it.
    pub(crate) fn invite(&mut self, number: QueuePairNumber, peer: IpAddr) {
        match self {
            Self::Soft(soft) => soft.invite(number, peer),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => {}
        }
    }

    /// Whether packets of a queue pair go by rings, which lose none: where one is full, its queue pair waits.
    pub(crate) fn has_ring(&self, number: QueuePairNumber) -> bool {
        self.soft().is_some_and(|soft| soft.has_ring(number))
    }

    /// What a peer is told of that way: whither it is invited, or that we come.
    pub(crate) fn ring_name(&self, number: QueuePairNumber) -> RingName {
        self.soft().map_or(RingName::NONE, |soft| soft.ring_name(number))
    }

    /// The first packet sequence number of a queue pair of ours.
    pub(crate) fn random_psn(&mut self) -> Psn {
        each!(self, device => device.random_psn())
    }

    /// Tells a queue pair who its peer is. From now on it receives, and sends what is posted.
    ///
    /// # Errors
    /// One line if this device cannot reach that peer.
    pub(crate) fn connect_queue_pair(
        &mut self,
        number: QueuePairNumber,
        psn: Psn,
        peer: &Parameters,
        path_mtu: PathMtu,
    ) -> Result<(), ConnectQueuePairError> {
        each!(self, device => device.connect_queue_pair(number, psn, peer, path_mtu))
    }

    /// Takes a work request in; it leaves after the next [`Self::ring`].
    ///
    /// # Errors
    /// One line if it cannot be carried out; nothing of it happens then.
    pub(crate) fn post_send(&mut self, number: QueuePairNumber, request: SendRequest) -> Result<(), WorkRequestError> {
        each!(self, device => device.post_send(number, request))
    }

    /// Takes a receive in; it stands before anything that is posted as a send after it leaves.
    ///
    /// # Errors
    /// As [`Self::post_send`].
    pub(crate) fn post_recv(&mut self, number: QueuePairNumber, request: RecvRequest) -> Result<(), WorkRequestError> {
        each!(self, device => device.post_recv(number, request))
    }

    /// Hands what was posted since to the device.
    pub(crate) fn ring(&mut self) {
        each!(self, device => device.ring());
    }

    /// Before its owner sleeps: from now on [`Descriptor::Data`] gets ready with what comes. True if something has come
    /// already.
    pub(crate) fn request_notification(&mut self) -> bool {
        each!(self, device => device.request_notification())
    }

    /// One of the descriptors is ready.
    pub(crate) fn handle_ready(&mut self, descriptor: Descriptor) {
        each!(self, device => device.handle_ready(descriptor))
    }

    /// What the device has told of itself.
    pub(crate) fn poll_event(&mut self) -> Option<DeviceEvent> {
        each!(self, device => device.poll_event())
    }

    /// Takes in what has come, up to a bound.
    pub(crate) fn receive(&mut self, now: Timestamp) -> Moved {
        each!(self, device => device.receive(now))
    }

    /// Runs timers that are due.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        each!(self, device => device.handle_timeout(now))
    }

    /// Sends what there is to send, up to a bound.
    pub(crate) fn transmit(&mut self, now: Timestamp) -> Moved {
        each!(self, device => device.transmit(now))
    }

    /// What has ended.
    pub(crate) fn poll_completion(&mut self) -> Option<Completion> {
        each!(self, device => device.poll_completion())
    }

    /// When [`Self::handle_timeout`] or [`Self::transmit`] have something to do.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        each!(self, device => device.poll_timeout())
    }

    /// Whether timers are due.
    pub(crate) fn is_timer_due(&self, now: Timestamp) -> bool {
        each!(self, device => device.is_timer_due(now))
    }

    /// Stops a queue pair: it flushes what is outstanding.
    pub(crate) fn modify_to_error(&mut self, number: QueuePairNumber) {
        each!(self, device => device.modify_to_error(number))
    }

    /// Ends a queue pair; the module's text says what holds afterwards.
    pub(crate) fn destroy_queue_pair(&mut self, number: QueuePairNumber) {
        each!(self, device => device.destroy_queue_pair(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_had_is_named_with_what_is_missing() {
        let arm = Arm::Verbs(crate::VerbsConfig {
            device: "nonesuch0".to_owned(),
            address: None,
            settings: crate::VerbsSettings::default(),
        });
        let error = crate::Endpoint::open(crate::EndpointConfig::over(arm)).err().expect("no such device").to_string();
        let missing = if cfg!(feature = "verbs") {
            ["no RDMA device nonesuch0", "libibverbs.so.1 cannot be loaded", "no list of RDMA devices"].as_slice()
        } else {
            &["build it with `--features verbs`"]
        };
        assert!(error.starts_with("arm verbs:nonesuch0: "), "{error}");
        assert!(missing.iter().any(|missing| error.contains(missing)), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}
