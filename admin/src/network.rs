//! What this process has seen of the network, in Prometheus's text format: soft-RoCE's counters, in all and by peer,
//! and those that the kernel keeps of RDMA devices. Part of the driver, as it reads `/sys`.

use std::{fmt::Write as _, fs, path::Path};

use transport::{PeerTraffic, Traffic};

use crate::pages::header;

/// Ports of a device that are looked at.
const PORTS: std::ops::RangeInclusive<u8> = 1..=4;

/// The kernel's counters of a port that tell whether the network is to blame: files below it, and what they count.
/// Which of them there are is the driver's choice.
const OF_PORTS: [(&str, &str); 18] = [
    ("hw_counters/out_of_buffer", "Requests that met no receive"),
    ("hw_counters/out_of_sequence", "Packets that came out of order"),
    ("hw_counters/packet_seq_err", "Gaps that peers reported"),
    ("hw_counters/implied_nak_seq_err", "Responses that were missing"),
    ("hw_counters/local_ack_timeout_err", "Times that nothing came back in time"),
    ("hw_counters/rnr_nak_retry_err", "Requests that met no receive at a peer"),
    ("hw_counters/duplicate_request", "Requests that arrived again"),
    ("hw_counters/rx_icrc_encapsulated", "Packets with a wrong ICRC"),
    ("hw_counters/roce_adp_retrans", "Adaptive retransmissions"),
    ("hw_counters/np_cnp_sent", "Congestion notifications sent"),
    ("hw_counters/rp_cnp_handled", "Congestion notifications handled"),
    ("hw_counters/out_of_seq_request", "Requests that came out of order"),
    ("hw_counters/rcvd_seq_err", "Gaps that peers reported"),
    ("hw_counters/rcvd_rnr_err", "Requests that met no receive at a peer"),
    ("hw_counters/send_rnr_err", "Requests that met no receive"),
    ("hw_counters/retry_exceeded_err", "Requests that were given up"),
    ("counters/port_rcv_errors", "Packets with errors"),
    ("counters/port_xmit_discards", "Packets that were not sent"),
];

/// The text, of a host whose `/sys` is there.
pub(crate) fn metrics(traffic: &Traffic, sys: &Path) -> String {
    let mut text = String::new();
    for (name, help, count) in traffic.counters.all() {
        let name = format!("downbeat_roce_{name}_total");
        header(&mut text, &name, help.trim().trim_end_matches('.'), "counter");
        let _ = writeln!(text, "{name} {count}");
    }
    let driver = &traffic.driver;
    let of_socket = [
        ("receive_calls", "System calls that received something", driver.receive_calls),
        ("send_calls", "System calls that sent something", driver.send_calls),
        ("send_blocked", "Batches that waited because the socket's buffer was full", driver.send_blocked),
        ("send_errors", "Batches that the system refused", driver.send_errors),
    ];
    for (name, help, count) in of_socket {
        let name = format!("downbeat_roce_socket_{name}_total");
        header(&mut text, &name, help, "counter");
        let _ = writeln!(text, "{name} {count}");
    }
    peers(&mut text, traffic);
    devices(&mut text, traffic, sys);
    text
}

/// By peer: the way to it, and what was counted with it. What was counted with no peer is left out.
fn peers(text: &mut String, traffic: &Traffic) {
    let paths = traffic.peers.iter().filter_map(|(peer, seen)| Some((peer, seen.path?.to_string())));
    for (number, (peer, path)) in paths.enumerate() {
        let name = "downbeat_link_info";
        if number == 0 {
            header(text, name, "1: which arm carries packets to a peer, and where they go", "gauge");
        }
        let (arm, to) = path.split_once(' ').unwrap_or((&path, ""));
        let _ = writeln!(text, "{name}{{peer=\"{peer}\",arm=\"{arm}\",to=\"{to}\"}} 1");
    }
    let count = |seen: &PeerTraffic, index: usize| seen.counters.all().nth(index).map_or(0, |(.., count)| count);
    for (index, (name, help, _)) in traffic.counters.all().enumerate() {
        let name = format!("downbeat_roce_peer_{name}_total");
        let mut counted = traffic.peers.iter().map(|(peer, seen)| (peer, count(seen, index))).peekable();
        if traffic.peers.values().all(|seen| count(seen, index) == 0) || counted.peek().is_none() {
            continue;
        }
        header(text, &name, help.trim().trim_end_matches('.'), "counter");
        for (peer, count) in counted {
            let _ = writeln!(text, "{name}{{peer=\"{peer}\"}} {count}");
        }
    }
}

/// By device and port, what the kernel counts.
fn devices(text: &mut String, traffic: &Traffic, sys: &Path) {
    for (file, help) in OF_PORTS {
        let name = format!("downbeat_verbs_{}_total", file.rsplit('/').next().unwrap_or(file));
        let mut is_first = true;
        for device in &traffic.devices {
            for port in PORTS {
                let path = sys.join("class/infiniband").join(device).join(format!("ports/{port}")).join(file);
                let count = fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
                let Some(count) = count else { continue };
                if std::mem::take(&mut is_first) {
                    header(text, &name, help, "counter");
                }
                let _ = writeln!(text, "{name}{{device=\"{device}\",port=\"{port}\"}} {count}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(text: &str, line: &str) -> bool {
        text.lines().any(|found| found == line)
    }

    #[test]
    fn counters_are_told_in_all_and_by_peer() {
        let mut traffic = Traffic::default();
        traffic.counters.retransmits_timeout = 5;
        traffic.driver.send_errors = 2;
        let lossy = traffic.peers.entry("backend rack7".to_owned()).or_default();
        lossy.counters.retransmits_timeout = 5;
        lossy.path = Some(transport::Path::soft(([10, 0, 0, 7], 4791).into()));
        traffic.peers.entry("backend rack8".to_owned()).or_default();
        let text = metrics(&traffic, Path::new("/nowhere"));
        for line in [
            "downbeat_roce_retransmits_timeout_total 5",
            "downbeat_roce_dropped_icrc_total 0",
            "downbeat_roce_socket_send_errors_total 2",
            "downbeat_roce_peer_retransmits_timeout_total{peer=\"backend rack7\"} 5",
            "downbeat_roce_peer_retransmits_timeout_total{peer=\"backend rack8\"} 0",
            "downbeat_link_info{peer=\"backend rack7\",arm=\"soft\",to=\"10.0.0.7:4791\"} 1",
            "# TYPE downbeat_roce_peer_retransmits_timeout_total counter",
        ] {
            assert!(has(&text, line), "{line}: {text}");
        }
        assert!(!text.contains("downbeat_roce_peer_probes_total") && !text.contains("downbeat_verbs"), "{text}");
        let families = text.lines().filter(|line| line.starts_with("# TYPE ")).count();
        let names: std::collections::BTreeSet<_> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        assert_eq!(families, names.len(), "each family is told once");
    }

    #[test]
    fn what_the_kernel_counts_of_a_device_is_told_by_port() {
        let sys = tempfile::tempdir().unwrap();
        let port = sys.path().join("class/infiniband/mlx5_0/ports/1/hw_counters");
        fs::create_dir_all(&port).unwrap();
        fs::write(port.join("packet_seq_err"), "17\n").unwrap();
        fs::write(port.join("out_of_buffer"), "broken\n").unwrap();
        let devices = ["mlx5_0".to_owned()].into();
        let text = metrics(&Traffic { devices, ..Traffic::default() }, sys.path());
        assert!(has(&text, "downbeat_verbs_packet_seq_err_total{device=\"mlx5_0\",port=\"1\"} 17"), "{text}");
        assert!(!text.contains("out_of_buffer"), "{text}");
    }
}
