//! Namespaces of a program's own: no network, and an end of all its processes with the first. The only module here with
//! `unsafe`.

use std::{fs, io, os::unix::process::CommandExt, path::Path, process::Command};

use rustix::{
    mount::{MountFlags, mount},
    process::{getgid, getuid},
    stdio::stderr,
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
    unsafe { unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWPID | UnshareFlags::NEWNS | kept)? };
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

/// The first process of the namespaces finds itself in `/proc`, where kernels allow it (they do not where a container
/// hides part of it). CUDA looks for itself there, and finds no GPU (error 304) where it is somebody else, or nobody.
pub(super) fn with_own_proc(command: &mut Command) {
    let has_gpu = Path::new("/dev/nvidiactl").exists();
    let mount_proc = move || {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        if mount(c"proc", c"/proc", c"proc", flags, None).is_err() && has_gpu {
            let text = b"the kernel mounts no /proc of the program's own, so CUDA finds no GPU in it: run the backend \
                         where all of /proc can be seen, or where there are no namespaces of users\n";
            let _ = rustix::io::write(stderr(), text);
        }
        Ok(())
    };
    // SAFETY: between fork and exec it only makes two system calls with what it has been given: it takes no lock and
    // allocates nothing.
    unsafe { command.pre_exec(mount_proc) };
}
