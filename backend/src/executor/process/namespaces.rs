//! Namespaces of a program's own: no network, and an end of all its processes with the first. The only module here with
//! `unsafe`.

use std::{fs, io};

use rustix::{
    process::{getgid, getuid},
    thread::{UnshareFlags, unshare_unsafe},
};

/// Gives the processes that this one starts from now on namespaces of their own, and this one another user's, who is
/// called as before. There must be one thread.
///
/// # Errors
/// If the kernel does not allow it; nothing has changed then.
pub(super) fn enter(network: bool) -> io::Result<()> {
    let (user, group) = (getuid().as_raw(), getgid().as_raw());
    let kept = if network { UnshareFlags::empty() } else { UnshareFlags::NEWNET };
    // SAFETY: only `FILES` takes other threads' descriptors from them, and it is not among these.
    unsafe { unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWPID | kept)? };
    let map = |file: &str, text: String| {
        if let Err(error) = fs::write(file, text) {
            // What it may do is the same as before, under whatever name.
            eprintln!("{file} cannot be written, so the program sees another user than its own: {error}");
        }
    };
    // Without privilege, groups can be mapped only once they cannot be changed any more.
    map("/proc/self/setgroups", "deny".to_owned());
    map("/proc/self/uid_map", format!("{user} {user} 1"));
    map("/proc/self/gid_map", format!("{group} {group} 1"));
    Ok(())
}
