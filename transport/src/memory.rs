//! The memory that this process may use: its host's, or less where a control group bounds it. Beyond a group's bound
//! the kernel ends processes, so defaults follow it. It is read from `/proc` and `/sys`.
//!
//! A process is in one group of each hierarchy (cgroups(7)): of version 2, or of version 1's controller `memory`.
//! Bounds of groups above hold, too, as far as a container shows them; what it shows begins at its mount's root.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

/// The memory that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// So much.
    pub total_bytes: u64,
    /// Of that, what is not available to whoever wants some.
    pub used_bytes: u64,
    /// The host's.
    pub host_bytes: u64,
    /// The file that bounds it, if any does.
    pub bounded_by: Option<PathBuf>,
}

/// The files of a version of control groups.
struct Version {
    bound: &'static str,
    used: &'static str,
    /// In `memory.stat`: cached files, which are given back before anything else.
    cached: &'static str,
}

const FIRST: Version =
    Version { bound: "memory.limit_in_bytes", used: "memory.usage_in_bytes", cached: "total_inactive_file" };
const SECOND: Version = Version { bound: "memory.max", used: "memory.current", cached: "inactive_file" };

impl Memory {
    /// This process's; nothing where the system does not say.
    #[must_use]
    pub fn here() -> Option<Self> {
        Self::at(Path::new("/"))
    }

    /// The same by the files below a root.
    #[must_use]
    pub fn at(root: &Path) -> Option<Self> {
        let meminfo = read(&below(root, "/proc/meminfo"))?;
        let host_bytes = field(&meminfo, "MemTotal:")?.checked_mul(1024)?;
        let available = field(&meminfo, "MemAvailable:").unwrap_or_default().saturating_mul(1024);
        let host = Self {
            total_bytes: host_bytes,
            used_bytes: host_bytes.saturating_sub(available),
            host_bytes,
            bounded_by: None,
        };
        let bounds = groups(root).into_iter().filter_map(|(group, version)| {
            let total_bytes = number(&below(root, group.join(version.bound)))?;
            let used = number(&below(root, group.join(version.used))).unwrap_or_default();
            let stat = read(&below(root, group.join("memory.stat"))).unwrap_or_default();
            let used_bytes = used.saturating_sub(field(&stat, version.cached).unwrap_or_default()).min(total_bytes);
            Some(Self { total_bytes, used_bytes, host_bytes, bounded_by: Some(group.join(version.bound)) })
        });
        // Version 1 has a huge number for no bound.
        bounds.chain([host]).min_by_key(|memory| memory.total_bytes)
    }

    /// Bytes of a default that is an eighth of the memory at most.
    #[must_use]
    pub fn eighth_of(&self, most: usize) -> usize {
        usize::try_from(self.total_bytes / 8).map_or(most, |eighth| eighth.min(most))
    }
}

/// Where a file is below a root.
fn below(root: &Path, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The number in a file; nothing for `max`.
fn number(path: &Path) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

/// The number behind a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok())?)
}

/// This process's groups that may bound its memory, and those above that can be seen.
fn groups(root: &Path) -> Vec<(PathBuf, Version)> {
    let text = |path| read(&below(root, path)).unwrap_or_default();
    let (mounts, own) = (text("/proc/self/mountinfo"), text("/proc/self/cgroup"));
    let mut groups = Vec::new();
    for (mount, is_second) in mounts.lines().filter_map(Mount::parse) {
        // hierarchy-ID:controller-list:cgroup-path
        let path = own.lines().find_map(|line| {
            let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>().try_into().ok()?;
            let is_its =
                if is_second { controllers.is_empty() } else { controllers.split(',').any(|name| name == "memory") };
            is_its.then_some(Path::new(path))
        });
        let Some(path) = path else { continue };
        let group = mount.group(path);
        let seen = group.ancestors().take_while(|above| above.starts_with(&mount.point));
        groups.extend(seen.map(|group| (group.to_owned(), if is_second { SECOND } else { FIRST })));
    }
    groups
}

/// A hierarchy of control groups as it is mounted (proc_pid_mountinfo(5)).
struct Mount {
    /// What of the hierarchy is there.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// If it is of version 2, or of version 1's `memory`; and which.
    fn parse(line: &str) -> Option<(Self, bool)> {
        let (place, kind) = line.split_once(" - ")?;
        let (mut place, mut kind) = (place.split(' ').skip(3), kind.split(' '));
        let mount = Self { root: place.next()?.into(), point: place.next()?.into() };
        let (kind, options) = (kind.next()?, kind.nth(1).unwrap_or_default());
        match kind {
            "cgroup2" => Some((mount, true)),
            "cgroup" if options.split(',').any(|option| option == "memory") => Some((mount, false)),
            _ => None,
        }
    }

    /// The folder of a group. One that is not below what is mounted is that of a container, which sees itself as root.
    fn group(&self, path: &Path) -> PathBuf {
        let is_plain = path.components().all(|part| part != Component::ParentDir);
        match path.strip_prefix(&self.root) {
            Ok(path) if is_plain => self.point.join(path),
            _ => self.point.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal:       4000 kB\nMemFree: 1 kB\nMemAvailable:  1000 kB\n");
    const UNBOUND: &str = "9223372036854771712\n";

    fn at(files: &[(&str, &str)]) -> Option<Memory> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = below(root.path(), path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Memory::at(root.path())
    }

    fn found(files: &[(&str, &str)]) -> (u64, u64, Option<String>) {
        let memory = at(&[&[MEMINFO], files].concat()).unwrap();
        assert_eq!(memory.host_bytes, 4_096_000);
        (memory.total_bytes, memory.used_bytes, memory.bounded_by.map(|path| path.display().to_string()))
    }

    #[test]
    fn without_groups_it_is_the_hosts() {
        assert_eq!(found(&[]), (4_096_000, 3_072_000, None));
        assert_eq!(found(&[("/proc/self/mountinfo", "torn - cgroup2\n\n"), ("/proc/self/cgroup", "0::\n:\n")]).2, None);
        assert_eq!(at(&[]), None);
        assert_eq!(at(&[("/proc/meminfo", "MemTotal: none\n")]), None);
    }

    #[test]
    fn the_least_bound_of_all_groups_above_counts() {
        let mount = ("/proc/self/mountinfo", "38 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n");
        let nested = [
            mount,
            ("/proc/self/cgroup", "0::/user.slice/user-1000.slice/app.scope\n"),
            ("/sys/fs/cgroup/user.slice/memory.max", "3000000\n"),
            ("/sys/fs/cgroup/user.slice/user-1000.slice/memory.max", "1000000\n"),
            ("/sys/fs/cgroup/user.slice/user-1000.slice/memory.current", "700000\n"),
            ("/sys/fs/cgroup/user.slice/user-1000.slice/memory.stat", "anon 1\ninactive_file 200000\n"),
            ("/sys/fs/cgroup/user.slice/user-1000.slice/app.scope/memory.max", "max\n"),
        ];
        let by = "/sys/fs/cgroup/user.slice/user-1000.slice/memory.max".to_owned();
        assert_eq!(found(&nested), (1_000_000, 500_000, Some(by)));
        // More than the host has bounds nothing.
        let wide = [mount, ("/proc/self/cgroup", "0::/a\n"), ("/sys/fs/cgroup/a/memory.max", "99999999\n")];
        assert_eq!(found(&wide), (4_096_000, 3_072_000, None));
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_root() {
        // With a namespace of its own (rootless, too), and without: then the mount begins at its group.
        let own = ("/proc/self/mountinfo", "9 8 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n");
        let bound = ("/sys/fs/cgroup/memory.max", "314572800\n");
        let small = ("/sys/fs/cgroup/memory.max", "3145728\n");
        assert_eq!(found(&[own, ("/proc/self/cgroup", "0::/\n"), bound]).0, 4_096_000);
        for path in ["0::/\n", "0::/../other\n", "0::/../../..\n"] {
            assert_eq!(found(&[own, ("/proc/self/cgroup", path), small]).0, 3_145_728, "{path}");
        }
        let host = ("/proc/self/mountinfo", "9 8 0:26 /docker/ab /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
        assert_eq!(found(&[host, ("/proc/self/cgroup", "0::/docker/ab\n"), small]).0, 3_145_728);
        assert_eq!(found(&[host, ("/proc/self/cgroup", "0::/elsewhere\n"), small]).0, 3_145_728);
    }

    #[test]
    fn groups_of_version_1_are_read_beside_those_of_version_2() {
        let files = [
            (
                "/proc/self/mountinfo",
                "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
                 35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("/proc/self/cgroup", "5:devices:/x\n4:hugetlb,memory:/jobs/one\n0::/\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", UNBOUND),
            ("/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", UNBOUND),
            ("/sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", "2000000\n"),
            ("/sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes", "1500000\n"),
            ("/sys/fs/cgroup/memory/jobs/one/memory.stat", "inactive_file 1\ntotal_inactive_file 500000\n"),
        ];
        let by = "/sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes".to_owned();
        assert_eq!(found(&files), (2_000_000, 1_000_000, Some(by)));
    }

    #[test]
    fn defaults_are_an_eighth_where_memory_is_short() {
        let memory = |total_bytes| Memory { total_bytes, used_bytes: 0, host_bytes: total_bytes, bounded_by: None };
        assert_eq!(memory(300 << 20).eighth_of(512 << 20), 300 << 17);
        assert_eq!(memory(u64::MAX).eighth_of(512 << 20), 512 << 20);
    }
}
