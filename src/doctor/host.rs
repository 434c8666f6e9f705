//! What the checks look at: files below a root, and what only system calls tell.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::process::{Resource, getrlimit};
use soft_roce::udp::{Driver, Faults};
use transport::{ROCE_PORT, random_loopback};

/// The files of a host. `/sys`, `/proc` and the like are looked up below a root.
#[derive(Debug)]
pub(super) struct Host {
    root: PathBuf,
}

impl Host {
    /// This host.
    pub(super) fn here() -> Self {
        Self::at("/")
    }

    /// The host whose files lie below this directory.
    pub(super) fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Below which its files lie.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The trimmed text of a file; nothing if it cannot be read.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The number in a file.
    pub(super) fn number(&self, path: &str) -> Option<i64> {
        self.read(path)?.parse().ok()
    }

    /// Whether there is such a file or directory.
    pub(super) fn has(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The names in a directory, sorted; none if it cannot be read.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

/// What system calls tell of this process and its socket.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    /// Memory that may be pinned, in bytes; nothing means no limit.
    pub memlock_bytes: Option<u64>,
    /// Descriptors at once.
    pub open_files: Option<u64>,
    /// Processors that this process may run on.
    pub cores: usize,
    /// What a soft-RoCE socket offers here, or why there is none.
    pub soft_arm: Result<SoftArm, String>,
}

/// What a soft-RoCE socket offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SoftArm {
    /// Datagrams that one send carries (UDP_SEGMENT); 1 where the system cannot segment.
    pub segments_sent_at_once: usize,
    /// Datagrams that one receive carries (UDP_GRO).
    pub segments_received_at_once: usize,
    /// Payload bytes that may arrive between two looks without loss.
    pub receive_capacity_bytes: usize,
}

impl Limits {
    /// This process's.
    pub(super) fn here() -> Self {
        let address = (random_loopback(), ROCE_PORT).into();
        Self {
            memlock_bytes: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            soft_arm: Driver::bind(address, Faults::default(), 0)
                .map(|driver| SoftArm {
                    segments_sent_at_once: driver.segments_sent_at_once(),
                    segments_received_at_once: driver.segments_received_at_once(),
                    receive_capacity_bytes: driver.receive_capacity_bytes(),
                })
                .map_err(|error| format!("UDP {address}: {error}")),
        }
    }
}
