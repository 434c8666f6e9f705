//! Sockets: the soft arm's own, the limits of their buffers, and how many there may be.

use transport::ArmName;

use super::host::{Host, Limits, SoftArm};
use crate::doctor::finding::Finding;

/// What a soft-RoCE socket asks for (`BUFFER_BYTES_WANTED` of its driver).
const BUFFER_BYTES_WANTED: i64 = 8 << 20;
/// Below this, a reader cannot have two 150 KB objects on their way to it.
const RECEIVE_CAPACITY_BYTES_MIN: usize = 400 << 10;
/// A frontend has a descriptor for each client, and clients come by the thousand.
const OPEN_FILES_MIN: u64 = 4096;

/// Whether a soft-RoCE socket opens, and what it offers.
pub(super) fn soft_arm(wanted: &ArmName, probe: Result<&SoftArm, &String>) -> Vec<Finding> {
    let subject = "soft arm";
    let offer = match (probe, wanted) {
        (Ok(offer), _) => offer,
        (Err(error), ArmName::Soft) => {
            let remedy =
                "the soft arm needs one UDP socket on port 4791; free the port, or allow sockets in this sandbox";
            return vec![Finding::stop(subject, error, remedy)];
        }
        (Err(error), ArmName::Verbs(_)) => {
            return vec![Finding::advice(subject, error, "not needed for the verbs arm")];
        }
    };
    let found = format!("a UDP socket opens and takes {} KiB at once", offer.receive_capacity_bytes >> 10);
    let socket = if offer.receive_capacity_bytes < RECEIVE_CAPACITY_BYTES_MIN {
        Finding::advice(subject, found, "larger READs are cut into small pieces; raise net.core.rmem_max")
    } else {
        Finding::ok(subject, found)
    };
    vec![
        socket,
        offload("GSO", "UDP_SEGMENT", offer.segments_sent_at_once),
        offload("GRO", "UDP_GRO", offer.segments_received_at_once),
    ]
}

fn offload(name: &str, option: &str, segments: usize) -> Finding {
    if segments > 1 {
        Finding::ok(name, format!("{option} carries {segments} packets a system call"))
    } else {
        let remedy = "each packet costs a system call of its own; Linux 5.0 or later has it";
        Finding::advice(name, format!("{option} is not offered by this kernel"), remedy)
    }
}

/// The most that a socket may ask for.
pub(super) fn socket_buffers(host: &Host) -> Vec<Finding> {
    ["rmem_max", "wmem_max"]
        .into_iter()
        .filter_map(|name| {
            let bytes = host.number(&format!("/proc/sys/net/core/{name}"))?;
            let subject = format!("net.core.{name}");
            let found = format!("{} KiB", bytes >> 10);
            Some(if bytes >= BUFFER_BYTES_WANTED {
                Finding::ok(subject, found)
            } else {
                let remedy = format!(
                    "the soft arm asks for {} KiB and moves large tensors faster with it",
                    BUFFER_BYTES_WANTED >> 10
                );
                let command = format!("sysctl -w net.core.{name}={BUFFER_BYTES_WANTED}");
                Finding::advice(subject, found, remedy).with_commands([command])
            })
        })
        .collect()
}

/// How many descriptors this process may have.
pub(super) fn open_files(limits: &Limits) -> Option<Finding> {
    let files = limits.open_files?;
    let found = format!("{files} descriptors at once");
    Some(if files >= OPEN_FILES_MIN {
        Finding::ok("RLIMIT_NOFILE", found)
    } else {
        let remedy =
            format!("a frontend needs one for each client; `ulimit -n {OPEN_FILES_MIN}`, or LimitNOFILE= in its unit");
        Finding::advice("RLIMIT_NOFILE", found, remedy)
    })
}
