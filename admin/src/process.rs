//! What Linux tells of this process, under the names that Prometheus's clients have for it. Part of the driver, as it
//! reads `/proc`. What cannot be read is left out.

use std::{fmt::Write as _, fs};

use crate::pages::header;

/// Ticks of the clock that `/proc` counts by in a second: the same on all architectures that we run on.
const TICKS: f64 = 100.0;

pub(crate) fn metrics() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let files = fs::read_dir("/proc/self/fd").map(Iterator::count).ok();
    let [stat, status, limits] = ["stat", "status", "limits"].map(|file| read(&format!("/proc/self/{file}")));
    text([&stat, &status, &limits], &read("/proc/stat"), files)
}

fn text([stat, status, limits]: [&str; 3], host: &str, files: Option<usize>) -> String {
    let mut text = String::new();
    let mut tell = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            header(&mut text, name, help, kind);
            let _ = writeln!(text, "{name} {value}");
        }
    };
    // The name, in brackets, may have spaces; what follows it counts from the third field (proc_pid_stat(5)).
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let cpu = field(14).zip(field(15)).map(|(user, system)| (user + system) / TICKS);
    tell("process_cpu_seconds_total", "counter", "Processor time of this process", cpu);
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB"));
    let resident = resident.and_then(|kilobytes| kilobytes.trim().parse::<f64>().ok()).map(|found| found * 1024.0);
    tell("process_virtual_memory_bytes", "gauge", "Memory that it has mapped", field(23));
    tell("process_resident_memory_bytes", "gauge", "Memory that it has", resident);
    tell("process_threads", "gauge", "Its threads", field(20));
    let booted = host.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<f64>().ok());
    let started = booted.zip(field(22)).map(|(booted, ticks)| booted + ticks / TICKS);
    tell("process_start_time_seconds", "gauge", "When it was started, since 1970", started);
    tell("process_open_fds", "gauge", "Files that it has open", files.map(|files| files as f64));
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
    let limit = limit.and_then(|limit| limit.parse().ok());
    tell("process_max_fds", "gauge", "Files that it may have open", limit);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read() {
        let rest = "S 1 7 7 0 -1 4194304 300 0 0 0 250 150 0 0 20 0 12 0 5000 1048576 512 18446744073709551615";
        let limits =
            "Limit Soft Hard Units\nMax open files            1024                 4096                 files\n";
        let status = "Name:\ta\nVmRSS:\t    2048 kB\nThreads:\t1\n";
        let told = text([&format!("7 (a name) x) {rest}"), status, limits], "cpu 1\nbtime 1000\n", Some(9));
        for line in [
            "process_cpu_seconds_total 4",
            "process_virtual_memory_bytes 1048576",
            "process_resident_memory_bytes 2097152",
            "process_threads 12",
            "process_start_time_seconds 1050",
            "process_open_fds 9",
            "process_max_fds 1024",
        ] {
            assert!(told.lines().any(|found| found == line), "{line}: {told}");
        }
        assert_eq!(text([""; 3], "", None), "", "what cannot be read is left out");
        assert_eq!(metrics().lines().count(), 7 * 3);
    }
}
