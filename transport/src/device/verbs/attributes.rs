//! What a queue pair is set up with, from RESET to RTS (IBTA 11.2.5.2 lists what each transition needs). Plain values:
//! the calls are `sys`'s.

use rdma_sys::{ibv_access_flags as Flags, ibv_qp_attr, ibv_qp_attr_mask as Mask, ibv_qp_state};
use soft_roce::{PathMtu, Psn};

use super::{Offer, Route, gid};
use crate::{VerbsSettings, bootstrap::Parameters};

/// Hops that RoCEv2 packets may take.
const HOP_LIMIT: u8 = 64;

/// What [`initialised`] sets.
pub(super) fn initialised_mask() -> Mask {
    Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS
}

/// RESET to INIT: receives can be posted. The partition is an entry of the port's table.
pub(super) fn initialised(to: &mut ibv_qp_attr, settings: &VerbsSettings, partition_index: u16) {
    to.qp_state = ibv_qp_state::IBV_QPS_INIT;
    (to.port_num, to.pkey_index) = (settings.port, partition_index);
    to.qp_access_flags =
        (Flags::IBV_ACCESS_LOCAL_WRITE | Flags::IBV_ACCESS_REMOTE_READ | Flags::IBV_ACCESS_REMOTE_WRITE).0;
}

/// What [`ready_to_receive`] sets.
pub(super) fn ready_to_receive_mask() -> Mask {
    Mask::IBV_QP_STATE
        | Mask::IBV_QP_AV
        | Mask::IBV_QP_PATH_MTU
        | Mask::IBV_QP_DEST_QPN
        | Mask::IBV_QP_RQ_PSN
        | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | Mask::IBV_QP_MIN_RNR_TIMER
}

/// INIT to RTR: it answers this peer.
pub(super) fn ready_to_receive(
    to: &mut ibv_qp_attr,
    settings: &VerbsSettings,
    offer: &Offer,
    (route, path_mtu): (Route, PathMtu),
    peer: &Parameters,
) {
    to.qp_state = ibv_qp_state::IBV_QPS_RTR;
    // IBTA 14.2.5.6: 1 is 256 bytes, each further code is twice as much.
    to.path_mtu = path_mtu.bytes().ilog2() - 7;
    (to.dest_qp_num, to.rq_psn) = (peer.queue_pair, peer.psn);
    to.max_dest_rd_atomic = offer.reads_answered_max;
    to.min_rnr_timer = settings.min_rnr_timer;
    let address = &mut to.ah_attr;
    (address.port_num, address.sl) = (settings.port, settings.service_level);
    match route {
        Route::Roce { gid_index, peer } => {
            address.is_global = 1;
            address.grh.dgid = rdma_sys::ibv_gid { raw: gid::octets(peer) };
            address.grh.sgid_index = gid_index;
            address.grh.hop_limit = HOP_LIMIT;
            address.grh.traffic_class = settings.traffic_class;
        }
        // Within one subnet the LID is all that a packet needs.
        Route::InfiniBand { lid } => address.dlid = lid,
    }
}

/// What [`ready_to_send`] sets.
pub(super) fn ready_to_send_mask() -> Mask {
    Mask::IBV_QP_STATE
        | Mask::IBV_QP_TIMEOUT
        | Mask::IBV_QP_RETRY_CNT
        | Mask::IBV_QP_RNR_RETRY
        | Mask::IBV_QP_SQ_PSN
        | Mask::IBV_QP_MAX_QP_RD_ATOMIC
}

/// RTR to RTS: it asks this peer, too.
pub(super) fn ready_to_send(
    to: &mut ibv_qp_attr,
    settings: &VerbsSettings,
    offer: &Offer,
    psn: Psn,
    peer: &Parameters,
) {
    to.qp_state = ibv_qp_state::IBV_QPS_RTS;
    (to.timeout, to.retry_cnt, to.rnr_retry) = (settings.ack_timeout, settings.retry_count, settings.rnr_retry);
    to.sq_psn = psn.value();
    // More than the peer answers at once would be refused. The bootstrap has refused a peer that answers none.
    to.max_rd_atomic = offer.reads_max.min(peer.max_dest_rd_atomic);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        PeerName,
        bootstrap::{PacketAddress, RingName},
        device::verbs::sys,
    };

    const OFFER: Offer = Offer {
        read_budget_bytes: 1 << 20,
        read_bytes_max: 1 << 20,
        reads_max: 16,
        reads_answered_max: 8,
        peer_window_bytes: 1 << 18,
    };

    fn settings() -> VerbsSettings {
        VerbsSettings { port: 2, min_rnr_timer: 9, traffic_class: 106, service_level: 3, ..VerbsSettings::default() }
    }

    fn peer(max_dest_rd_atomic: u8) -> Parameters {
        Parameters {
            name: PeerName::NONE,
            incarnation: 1,
            address: PacketAddress::InfiniBand { lid: 77 },
            queue_pair: 0x1234,
            psn: 0xabcdef,
            path_mtu_bytes: 2048,
            max_dest_rd_atomic,
            receive_depth: 8,
            window_bytes: 1 << 18,
            ring: RingName::NONE,
        }
    }

    fn received(route: Route, path_mtu: PathMtu) -> ibv_qp_attr {
        let mut to = sys::no_attributes();
        ready_to_receive(&mut to, &settings(), &OFFER, (route, path_mtu), &peer(4));
        to
    }

    #[test]
    fn on_infiniband_a_packet_goes_by_its_lid() {
        let to = received(Route::InfiniBand { lid: 77 }, PathMtu::Mtu2048);
        assert_eq!((to.ah_attr.is_global, to.ah_attr.dlid, to.ah_attr.port_num, to.ah_attr.sl), (0, 77, 2, 3));
        assert_eq!((to.qp_state, to.path_mtu), (ibv_qp_state::IBV_QPS_RTR, 4));
        assert_eq!((to.dest_qp_num, to.rq_psn), (0x1234, 0xabcdef));
        assert_eq!((to.max_dest_rd_atomic, to.min_rnr_timer), (8, 9));
    }

    #[test]
    fn on_ethernet_a_packet_goes_by_gids_and_carries_its_class() {
        let to = received(Route::Roce { gid_index: 3, peer: "10.9.0.2".parse().unwrap() }, PathMtu::Mtu1024);
        let address = to.ah_attr;
        assert_eq!((address.is_global, address.dlid, address.port_num), (1, 0, 2));
        assert_eq!((address.grh.sgid_index, address.grh.hop_limit, address.grh.traffic_class), (3, 64, 106));
        assert_eq!(sys::octets(address.grh.dgid), gid::octets("10.9.0.2".parse().unwrap()));
        assert_eq!(to.path_mtu, 3);
    }

    #[test]
    fn reads_asked_for_at_once_are_what_both_devices_can() {
        for (answered_by_peer, asked) in [(4, 4), (16, 16), (128, 16)] {
            let mut to = sys::no_attributes();
            ready_to_send(&mut to, &settings(), &OFFER, Psn::new(5), &peer(answered_by_peer));
            assert_eq!((to.max_rd_atomic, to.sq_psn), (asked, 5));
            assert_eq!((to.timeout, to.retry_cnt, to.rnr_retry), (14, 6, 6));
        }
    }

    #[test]
    fn peers_may_read_and_write_but_not_count() {
        let mut to = sys::no_attributes();
        initialised(&mut to, &settings(), 5);
        assert_eq!((to.port_num, to.pkey_index, to.qp_access_flags), (2, 5, 1 | 2 | 4));
    }
}
