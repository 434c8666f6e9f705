//! Hosts made of files.

use std::{fs, path::Path};

use cuda::{Brake, DirectAccess, GpuHealth, Health, Library};

use super::{direct::Direct, host::SoftArm, *};

/// A plain container: no RDMA device.
fn plain(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
    let root = tempfile::tempdir().unwrap();
    let common = [
        ("/proc/sys/net/core/rmem_max", "212992\n"),
        ("/proc/sys/net/core/wmem_max", "16777216\n"),
        ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
        (
            "/proc/meminfo",
            "MemTotal: 1 kB\nHugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n",
        ),
    ];
    for (path, text) in common.iter().chain(files) {
        write(root.path(), path, text);
    }
    let host = Host::at(root.path());
    (root, host)
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A RoCE device `mlx5_0` on eth0 with a link-local, a version 1 and two routable GIDs.
const ROCE: &[(&str, &str)] = &[
    ("/sys/class/infiniband/mlx5_0/device/numa_node", "1"),
    ("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
    ("/sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet"),
    ("/sys/class/infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth0"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0", "RoCE v2"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1", "IB/RoCE v1"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gids/2", "fd00:0000:0000:0000:0000:0000:0000:0001"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/2", "RoCE v2"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gids/10", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/10", "RoCE v2"),
    ("/sys/class/infiniband/mlx5_0/ports/1/gids/11", "0000:0000:0000:0000:0000:0000:0000:0000"),
    ("/sys/class/net/eth0/mtu", "1500"),
    ("/dev/infiniband/uverbs0", ""),
    ("/usr/lib/x86_64-linux-gnu/libibverbs.so.1", ""),
];

fn limits() -> Limits {
    let soft_arm =
        SoftArm { segments_sent_at_once: 64, segments_received_at_once: 64, receive_capacity_bytes: 1 << 20 };
    Limits { memlock_bytes: Some(8 << 20), open_files: Some(1024), cores: 2, soft_arm: Ok(soft_arm) }
}

/// A host without NVIDIA's libraries.
fn no_gpus() -> Gpus {
    let reason = "no libcuda: looked for libcuda.so.1".to_owned();
    let missing = Library { name: "libcuda", file: "libcuda.so.1", found: Err(reason.clone()) };
    Gpus {
        health: Err("no NVML".to_owned()),
        libraries: vec![missing],
        looked_in: "/opt/cuda".to_owned(),
        direct: Direct { gpus: Err(reason), takes_dma_bufs: |_| Ok(true) },
    }
}

fn verbs() -> ArmName {
    "verbs:mlx5_0".parse::<ArmName>().unwrap()
}

fn with<'a>(findings: &'a [Finding], subject: &str) -> &'a Finding {
    let found = findings.iter().find(|finding| finding.subject == subject);
    found.unwrap_or_else(|| panic!("no finding about {subject}: {findings:#?}"))
}

fn stops(findings: &[Finding]) -> Vec<&str> {
    findings.iter().filter(|finding| finding.level == Level::Stop).map(|finding| finding.subject.as_str()).collect()
}

#[test]
fn a_plain_container_has_the_soft_arm_and_is_told_so() {
    let (_root, host) = plain(&[("/.dockerenv", "")]);
    let findings = examine(&host, &limits(), &no_gpus(), (&ArmName::Soft, None));
    assert_eq!(stops(&findings), [""; 0]);
    assert!(with(&findings, "RDMA devices").found.contains("only the soft arm is available"));
    assert_eq!(with(&findings, "container").level, Level::Ok);
    assert_eq!(with(&findings, "RLIMIT_MEMLOCK").level, Level::Ok, "nothing is pinned on the soft arm");
}

#[test]
fn every_piece_of_advice_says_what_to_do_and_the_script_holds_its_commands() {
    let (_root, host) = plain(&[
        ("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
        ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
        ("/sys/devices/system/clocksource/clocksource0/available_clocksource", "hpet tsc acpi_pm\n"),
        ("/sys/fs/cgroup/cpu.max", "150000 100000\n"),
    ]);
    let findings = examine(&host, &limits(), &no_gpus(), (&ArmName::Soft, None));
    for finding in &findings {
        assert_eq!(finding.level == Level::Ok, finding.remedy.is_none(), "{finding}");
        assert_eq!(finding.to_string().lines().count(), 1);
    }
    assert!(with(&findings, "processor quota").found.contains("1.5 cores"));
    let script = script(&findings);
    for command in [
        "sysctl -w net.core.rmem_max=8388608",
        "sysctl -w vm.nr_hugepages=64",
        "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
        "echo performance >",
    ] {
        assert!(script.contains(command), "no `{command}` in\n{script}");
    }
    assert!(!script.contains("wmem_max"), "that one is well");
}

#[test]
fn memory_is_what_control_groups_leave() {
    let bounded = |bound: &str| {
        let files = [
            ("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 1 kB\n"),
            ("/proc/self/mountinfo", "9 8 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"),
            ("/proc/self/cgroup", "0::/\n"),
            ("/sys/fs/cgroup/memory.max", bound),
        ];
        let (_root, host) = plain(&files);
        let findings = examine(&host, &limits(), &no_gpus(), (&ArmName::Soft, None));
        let memory = with(&findings, "memory");
        (memory.level, memory.found.clone())
    };
    let (level, found) = bounded("max");
    assert_eq!((level, &found[..]), (Level::Ok, "16384 MiB; by default clients of a frontend take up to 1696 MiB"));
    let (level, found) = bounded("314572800");
    let expected =
        "300 MiB by /sys/fs/cgroup/memory.max, of 16384 MiB; by default clients of a frontend take up to 150 MiB";
    assert_eq!((level, &found[..]), (Level::Advice, expected));
}

#[test]
fn the_arm_that_finds_its_device_needs_one() {
    let auto: ArmName = "verbs:auto".parse().unwrap();
    let pinned = Limits { memlock_bytes: None, ..limits() };
    let (_root, host) = plain(ROCE);
    assert_eq!(stops(&examine(&host, &pinned, &no_gpus(), (&auto, None))), [""; 0]);
    let (root, host) = plain(ROCE);
    write(root.path(), "/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
    assert_eq!(stops(&examine(&host, &pinned, &no_gpus(), (&auto, None))), ["mlx5_0 port 1"]);
    let (_root, host) = plain(&[]);
    assert!(stops(&examine(&host, &pinned, &no_gpus(), (&auto, None))).contains(&"RDMA devices"));
}

#[test]
fn a_socket_that_does_not_open_stops_the_soft_arm_only() {
    let broken = Limits { soft_arm: Err("UDP 127.1.2.3:4791: Address already in use".into()), ..limits() };
    let (_root, host) = plain(ROCE);
    assert_eq!(stops(&examine(&host, &broken, &no_gpus(), (&ArmName::Soft, None))), ["soft arm"]);
    let pinned = Limits { memlock_bytes: None, ..broken };
    assert_eq!(stops(&examine(&host, &pinned, &no_gpus(), (&verbs(), None))), [""; 0]);
}

#[test]
fn the_gid_is_chosen_by_address_and_never_by_index() {
    let (_root, host) = plain(ROCE);
    let chosen = |address: Option<&str>| {
        let findings =
            examine(&host, &limits(), &no_gpus(), (&verbs(), address.map(|address| address.parse().unwrap())));
        findings.iter().find(|finding| finding.subject == "mlx5_0 port 1 GID").map(|finding| finding.found.clone())
    };
    assert_eq!(chosen(None).unwrap(), "index 10: 10.0.0.1 would be chosen");
    assert_eq!(chosen(Some("fd00::1")).unwrap(), "index 2: fd00::1 would be chosen");
    assert_eq!(chosen(Some("10.0.0.9")), None);
    let findings = examine(&host, &limits(), &no_gpus(), (&verbs(), Some("10.0.0.9".parse().unwrap())));
    let finding = with(&findings, "mlx5_0 port 1");
    assert!(finding.level == Level::Ok, "the port is well");
    assert!(
        stops(&findings).contains(&"mlx5_0 port 1")
            && findings.iter().any(|finding| finding.to_string().contains("the address 10.0.0.9"))
    );
}

#[test]
fn a_small_interface_mtu_is_named_with_the_path_mtu_that_fits() {
    let (root, host) = plain(ROCE);
    let findings = examine(&host, &limits(), &no_gpus(), (&verbs(), None));
    assert_eq!(with(&findings, "mlx5_0 port 1 path MTU").found, "1024 (eth0 has 1500)");
    write(root.path(), "/sys/class/net/eth0/mtu", "4200");
    let findings = examine(&host, &limits(), &no_gpus(), (&verbs(), None));
    assert_eq!(with(&findings, "mlx5_0 port 1 path MTU").level, Level::Ok);
}

#[test]
fn what_the_verbs_arm_lacks_stops_it() {
    let (_root, host) = plain(&[]);
    let findings = examine(&host, &limits(), &no_gpus(), (&verbs(), None));
    assert_eq!(stops(&findings), ["RDMA devices", "/dev/infiniband", "libibverbs", "RLIMIT_MEMLOCK"]);

    let (root, host) = plain(ROCE);
    assert_eq!(stops(&examine(&host, &limits(), &no_gpus(), (&verbs(), None))), ["RLIMIT_MEMLOCK"]);
    write(root.path(), "/proc/self/status", "Name:\tdownbeat\nCapEff:\t0000000000004000\n");
    assert_eq!(stops(&examine(&host, &limits(), &no_gpus(), (&verbs(), None))), [""; 0]);
    write(root.path(), "/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
    assert_eq!(stops(&examine(&host, &limits(), &no_gpus(), (&verbs(), None))), ["mlx5_0 port 1"]);
    let advice = examine(&host, &limits(), &no_gpus(), (&ArmName::Soft, None));
    assert_eq!(with(&advice, "mlx5_0 port 1").commands, ["ip link set eth0 up"]);
}

#[test]
fn a_gpu_on_another_node_than_the_nic_is_named() {
    let gpu = "/sys/bus/pci/devices/0000:3b:00.0";
    let files = [("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "0")]
        .map(|(file, text)| (format!("{gpu}/{file}"), text));
    let files: Vec<(&str, &str)> =
        files.iter().map(|(path, text)| (path.as_str(), *text)).chain(ROCE.iter().copied()).collect();
    let (_root, host) = plain(&files);
    let findings = examine(&host, &limits(), &no_gpus(), (&ArmName::Soft, None));
    let finding = with(&findings, "NUMA node of mlx5_0");
    assert!(finding.level == Level::Advice && finding.remedy.as_ref().unwrap().contains("0000:3b:00.0"), "{finding}");
}

#[test]
fn gpus_are_told_with_what_drives_them_and_what_makes_them_unsteady() {
    let (_root, host) = plain(&[]);
    let findings = examine(&host, &limits(), &no_gpus(), (&ArmName::Soft, None));
    assert_eq!(with(&findings, "GPUs").level, Level::Ok, "a host without any needs nothing of NVIDIA's");
    assert!(findings.iter().all(|finding| finding.subject != "libcuda"));
    let libraries = with(&findings, "CUDA libraries");
    assert_eq!(libraries.found, "found: none; not usable: libcuda.so.1; looked for in /opt/cuda");
    assert_eq!(libraries.level, Level::Ok);

    let steady = GpuHealth {
        name: "NVIDIA H200".into(),
        uuid: "GPU-5a".into(),
        pci: "0000:3b:00.0".into(),
        memory_bytes: Some((140 << 30, 1 << 30)),
        temperature_c: Some(41),
        clock_mhz: Some((1500, 1980)),
        held_back_by: Some(vec![]),
        uncorrected_errors: Some(0),
        is_persistent: Some(true),
        is_exclusive: Some(true),
        is_split: Some(false),
        ..GpuHealth::default()
    };
    let hot = GpuHealth {
        held_back_by: Some(vec![Brake::Heat]),
        uncorrected_errors: Some(2),
        is_persistent: Some(false),
        is_exclusive: Some(false),
        ..steady.clone()
    };
    let health = Ok(Health { driver: "570.86".into(), gpus: vec![steady, hot] });
    let gpus = Gpus { health, ..no_gpus() };
    let findings = examine(&host, &limits(), &gpus, (&ArmName::Soft, None));
    assert_eq!(stops(&findings), [""; 0], "the CPU serves all the same");
    assert!(with(&findings, "NVIDIA driver").remedy.as_deref().unwrap().contains("580"));
    assert!(with(&findings, "libcuda").found.contains("looked for libcuda.so.1"));
    assert_eq!(with(&findings, "GPU 0").found, "NVIDIA H200, GPU-5a, 1024 of 143360 MiB in use, 41 C");
    let locked = ["nvidia-smi -i 0 --lock-gpu-clocks=1980"];
    assert_eq!(with(&findings, "clocks of GPU 0").commands, locked);
    assert!(with(&findings, "clocks of GPU 1").found.ends_with("held back by heat"));
    assert!(with(&findings, "memory of GPU 1").found.starts_with("2 errors"));
    assert!(findings.iter().all(|finding| finding.subject != "memory of GPU 0"));
    for subject in ["persistence of GPU 1", "compute mode of GPU 1"] {
        assert_eq!(with(&findings, subject).commands.len(), 1, "{subject}");
    }
}

#[test]
fn gpudirect_is_told_for_each_gpu_and_rdma_device_by_what_each_says() {
    let rxe =
        [("/sys/class/infiniband/rxe0/parent", "eth0"), ("/sys/class/infiniband/rxe0/device/uevent", "DRIVER=e1000e")];
    let nic = [("/sys/class/infiniband/mlx5_0/device/uevent", "DRIVER=mlx5_core\nPCI_CLASS=20000\n")];
    let files: Vec<(&str, &str)> = ROCE.iter().chain(&rxe).chain(&nic).copied().collect();
    let (root, host) = plain(&files);
    let gpu = |uuid: &str, pci: &str| GpuHealth { uuid: uuid.into(), pci: pci.into(), ..GpuHealth::default() };
    let health = [gpu("GPU-5a", "0000:3b:00.0"), gpu("GPU-5b", "0000:af:00.0"), gpu("GPU-5c", "0000:d8:00.0")];
    let (open, closed) = (
        DirectAccess { dma_buf: true, rdma: true, mapped: true },
        DirectAccess { dma_buf: false, rdma: true, mapped: true },
    );
    // CUDA may show them in another order, in other letters, and not all of them.
    let direct = Ok(vec![("0000:AF:00.0".to_owned(), closed), ("0000:3B:00.0".to_owned(), open)]);
    let gpus = Gpus {
        health: Ok(Health { driver: "580.95".into(), gpus: health.into() }),
        direct: Direct { gpus: direct, takes_dma_bufs: |_| Ok(true) },
        ..no_gpus()
    };
    let told = |number: usize| {
        let findings = examine(&host, &limits(), &gpus, (&ArmName::Soft, None));
        with(&findings, &format!("GPUDirect of GPU {number}")).found.clone()
    };
    let software = "rxe0 is software: it has no way into a GPU";
    let ending = "(a backend's key gpu_direct = true has inputs go that way)";
    assert_eq!(told(0), format!("mlx5_0 could, by dma-buf; {software} {ending}"));
    assert!(
        told(1).starts_with("mlx5_0 could not: ") && told(1).contains("nvidia-peermem is not loaded"),
        "{}",
        told(1)
    );
    assert_eq!(told(2), "not known: CUDA does not show this GPU");
    write(root.path(), "/sys/module/nvidia_peermem/refcnt", "0");
    assert_eq!(told(1), format!("mlx5_0 could, by nvidia-peermem; {software} {ending}"));
    let (_root, host) = plain(&[]);
    let findings = examine(&host, &limits(), &gpus, (&ArmName::Soft, None));
    assert!(findings.iter().all(|finding| !finding.subject.starts_with("GPUDirect")), "without an RDMA device");
}
