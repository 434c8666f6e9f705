//! 220 packets recorded from Linux's rdma_rxe and from a peer that it accepted: each decodes to its recorded fields,
//! has a correct ICRC, and encodes to the same bytes again.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;
use soft_roce::{
    Identification,
    wire::{
        Packet, Repr,
        icrc::{self, Path},
    },
};

fn packets() -> Vec<Value> {
    let text = include_str!("../data/roce_vectors.json");
    serde_json::from_str(text).expect("the recording is JSON")
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().expect("hex");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex digits")).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn flag(value: &Value) -> bool {
    number(value) == 1
}

/// The lengths of the IP header, by version.
fn ip_bytes(fields: &Value) -> usize {
    if number(&fields["ip"]["version"]) == 4 { 20 } else { 40 }
}

fn addresses(fields: &Value) -> (SocketAddr, SocketAddr) {
    let ip = |key: &str| fields["ip"][key].as_str().expect("address").parse::<IpAddr>().expect("address");
    let port = |key: &str| number(&fields["udp"][key]) as u16;
    (SocketAddr::new(ip("src"), port("sport")), SocketAddr::new(ip("dst"), port("dport")))
}

#[test]
fn every_packet_decodes_to_its_fields() {
    let packets = packets();
    assert_eq!(packets.len(), 220);
    for vector in &packets {
        let (name, fields) = (&vector["name"], &vector["fields"]);
        let datagram = bytes(&vector["ip_packet_hex"]);
        let packet = Packet::new_checked(&datagram[ip_bytes(fields) + 8..]).expect("a whole packet");
        let bth = &fields["bth"];
        assert_eq!(u64::from(packet.opcode().value()), number(&bth["opcode"]), "{name}");
        assert_eq!(packet.solicited(), flag(&bth["se"]), "{name}");
        assert_eq!(packet.migration_request(), flag(&bth["migreq"]), "{name}");
        assert_eq!(packet.pad_count() as u64, number(&bth["pad_count"]), "{name}");
        assert_eq!(u64::from(packet.partition_key()), number(&bth["pkey"]), "{name}");
        assert_eq!(packet.forward_congestion(), flag(&bth["fecn"]), "{name}");
        assert_eq!(packet.backward_congestion(), flag(&bth["becn"]), "{name}");
        assert_eq!(u64::from(packet.destination().0), number(&bth["dest_qpn"]), "{name}");
        assert_eq!(packet.ack_request(), flag(&bth["ackreq"]), "{name}");
        assert_eq!(u64::from(packet.psn().value()), number(&bth["psn"]), "{name}");
        assert_eq!(packet.payload(), bytes(&fields["payload_hex"]), "{name}");
        assert_eq!(packet.icrc().to_le_bytes().to_vec(), bytes(&fields["icrc_hex"]), "{name}");
        extensions_match(&packet, fields, name);
    }
}

fn extensions_match(packet: &Packet<'_>, fields: &Value, name: &Value) {
    let recorded = |key: &str| fields.get(key);
    assert_eq!(
        packet.reth().map(|it| (it.address, u64::from(it.rkey), u64::from(it.bytes))),
        recorded("reth").map(|it| (number(&it["va"]), number(&it["rkey"]), number(&it["dma_length"]))),
        "{name}"
    );
    assert_eq!(
        packet.aeth().map(|it| (u64::from(it.syndrome.value()), u64::from(it.message_sequence))),
        recorded("aeth").map(|it| (number(&it["syndrome"]), number(&it["msn"]))),
        "{name}"
    );
    assert_eq!(
        packet.atomic_eth().map(|it| (it.address, u64::from(it.rkey), it.swap_or_add, it.compare)),
        recorded("atomiceth")
            .map(|it| { (number(&it["va"]), number(&it["rkey"]), number(&it["swap_or_add"]), number(&it["compare"])) }),
        "{name}"
    );
    assert_eq!(packet.atomic_ack_eth(), recorded("atomicacketh").map(|it| number(&it["original"])), "{name}");
    assert_eq!(packet.immediate().map(u64::from), recorded("immdt").map(number), "{name}");
    assert_eq!(packet.invalidate().map(u64::from), recorded("ieth").map(|it| number(&it["rkey"])), "{name}");
    assert_eq!(
        packet.deth().map(|it| (u64::from(it.queue_key), u64::from(it.source.0))),
        recorded("deth").map(|it| (number(&it["qkey"]), number(&it["src_qpn"]))),
        "{name}"
    );
}

#[test]
fn every_icrc_is_right_and_gives_the_identification_away() {
    for vector in packets() {
        let (name, fields) = (&vector["name"], &vector["fields"]);
        let (source, destination) = addresses(fields);
        let datagram = bytes(&vector["ip_packet_hex"]);
        let packet = Packet::new_checked(&datagram[ip_bytes(fields) + 8..]).expect("a whole packet");
        let found = icrc::verify(source, destination, packet.covered(), packet.icrc(), Identification::Any);
        let expected = if source.is_ipv4() {
            let (id, flags) = (number(&fields["ip"]["id"]), number(&fields["ip"]["flags_frag"]));
            Path { source, destination, identification: id as u16, dont_fragment: flags & 0x4000 != 0 }
        } else {
            Path::segment(source, destination, 0)
        };
        assert_eq!(found, Some(expected), "{name}");
        let ours = usize::from(expected.identification) < icrc::BATCH_SEGMENTS_MAX;
        let strict = icrc::verify(source, destination, packet.covered(), packet.icrc(), Identification::SegmentIndex);
        assert_eq!(strict.is_some(), ours, "{name}");
        let damaged = packet.icrc() ^ 0x0100_0000;
        assert_eq!(
            icrc::verify(source, destination, packet.covered(), damaged, Identification::SegmentIndex),
            None,
            "{name}"
        );
    }
}

#[test]
fn every_packet_encodes_to_the_same_bytes() {
    for vector in packets() {
        let (name, fields) = (&vector["name"], &vector["fields"]);
        let datagram = bytes(&vector["ip_packet_hex"]);
        let packet = Packet::new_checked(&datagram[ip_bytes(fields) + 8..]).expect("a whole packet");
        let repr = Repr::parse(&packet);
        let mut again = vec![0xee; repr.packet_bytes()];
        repr.emit(&mut again).copy_from_slice(packet.payload());
        let covered = again.len() - 4;
        let (source, destination) = addresses(fields);
        let path = Path {
            source,
            destination,
            identification: fields["ip"]["id"].as_u64().unwrap_or(0) as u16,
            dont_fragment: fields["ip"]["flags_frag"].as_u64().is_none_or(|flags| flags & 0x4000 != 0),
        };
        let icrc = icrc::compute(&path, &again[..covered]);
        again[covered..].copy_from_slice(&icrc.to_le_bytes());
        let mut whole = headers(fields, again.len());
        whole.extend(again);
        assert_eq!(whole, datagram, "{name}");
    }
}

/// IP and UDP headers from the recorded fields and the length of what follows.
fn headers(fields: &Value, packet_bytes: usize) -> Vec<u8> {
    let (source, destination) = addresses(fields);
    let (ip, udp) = (&fields["ip"], &fields["udp"]);
    let udp_bytes = (packet_bytes + 8) as u16;
    let mut out = Vec::new();
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            out.extend([0x45, number(&ip["tos"]) as u8]);
            out.extend((20 + udp_bytes).to_be_bytes());
            out.extend((number(&ip["id"]) as u16).to_be_bytes());
            out.extend((number(&ip["flags_frag"]) as u16).to_be_bytes());
            out.extend([number(&ip["ttl"]) as u8, 17, 0, 0]);
            out.extend(source.octets());
            out.extend(destination.octets());
            let sum: u32 = out.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
            let sum = (sum & 0xffff) + (sum >> 16);
            let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
            out[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let first = 6 << 28 | number(&ip["traffic_class"]) << 20 | number(&ip["flow_label"]);
            out.extend((first as u32).to_be_bytes());
            out.extend(udp_bytes.to_be_bytes());
            out.extend([17, number(&ip["hop_limit"]) as u8]);
            out.extend(source.octets());
            out.extend(destination.octets());
        }
        _ => panic!("mixed families"),
    }
    for key in ["sport", "dport"] {
        out.extend((number(&udp[key]) as u16).to_be_bytes());
    }
    out.extend(udp_bytes.to_be_bytes());
    out.extend((number(&udp["checksum"]) as u16).to_be_bytes());
    out
}
