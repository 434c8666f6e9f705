//! Tests of members within one host, whose packets go by rings, once more by UDP, as between hosts.

use std::{env, process::Command};

const PATH: &str = "DOWNBEAT_LOCAL_PATH";

/// The key `local_path` of this run, if it is said.
#[must_use]
pub fn local_path() -> Option<String> {
    env::var(PATH).ok()
}

/// From one of a program's tests: runs them all once more by UDP, but for those whose names have this text.
///
/// # Panics
/// If one fails.
#[allow(clippy::disallowed_methods)] // Waits for a process.
pub fn run_again_by_udp(but: Option<&str>) {
    if local_path().is_some() {
        return;
    }
    let mut again = Command::new(env::current_exe().expect("a test program knows itself"));
    let output = again.args(but.iter().flat_map(|but| ["--skip", but])).env(PATH, "udp").output();
    let output = output.expect("it runs already");
    assert!(output.status.success(), "by UDP: {}", String::from_utf8_lossy(&output.stdout));
}
