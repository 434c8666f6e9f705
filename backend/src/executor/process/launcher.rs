//! What stands between a backend and a program: this same binary, started anew, which takes away what the program is
//! not
//! to have, and becomes it. A backend never forks: copying the tables of its memory would hold up all that it serves.
//!
//! Where the kernel gives it namespaces, a first process stays outside and waits for the program, which is the first
//! one
//! inside: when it ends, so do all that it has started. They end with the backend's thread, however that ends.
//! stdin is the socket and stdout the shared memory here; the program has them under other numbers.

use std::{
    fs::File,
    io::{self, Write as _},
    os::{
        fd::{AsRawFd as _, IntoRawFd as _, OwnedFd},
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    path::PathBuf,
    process::{Command, ExitCode, ExitStatus, Stdio},
};

use repository::{Launch, Program};
use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::{Resource, Rlimit, Signal, getppid, set_parent_process_death_signal, setrlimit},
    stdio::{dup2_stdin, dup2_stdout, stderr, stdin, stdout},
};
use serde::{Deserialize, Serialize};

use super::{namespaces, package};

/// The word that makes this binary a launcher.
const WORD: &str = "launch-program";
/// This binary, wherever it lies, and even if there is another one at its place by now.
pub(crate) const THIS_BINARY: &str = "/proc/self/exe";
/// What a shell says of a program that cannot be started.
const NOT_STARTED: u8 = 127;

/// What the launcher is told.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    /// The program and its arguments; for a model in Python, the interpreter.
    words: Vec<String>,
    is_python: bool,
    folder: PathBuf,
    memory_bytes: u64,
    files: u64,
    processes: u64,
    network: bool,
    /// The backend's process.
    parent: i32,
    /// There are namespaces already.
    is_inside: bool,
}

impl Order {
    /// To run `program`, for this process.
    pub(super) fn new(program: &Program) -> Self {
        let limits = program.limits;
        let (words, is_python) = match &program.launch {
            Launch::Python { interpreter, .. } => (vec![interpreter.clone()], true),
            Launch::Program(words) => (words.clone(), false),
        };
        Self {
            words,
            is_python,
            folder: program.folder.clone(),
            memory_bytes: limits.memory_bytes,
            files: limits.files,
            processes: limits.processes,
            network: limits.network,
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            is_inside: false,
        }
    }

    /// A command that does as it says, of this binary or one like it.
    pub(super) fn command(&self, launcher: &str) -> Command {
        let mut command = Command::new(launcher);
        command.arg(WORD).arg(serde_json::to_string(self).expect("plain data"));
        command
    }
}

/// Becomes a model's program, if this process was started for that: the first thing that `main` does, while there is
/// one thread. Otherwise there is nothing to be done.
#[must_use]
pub fn launch_if_asked() -> Option<ExitCode> {
    let mut words = std::env::args();
    if words.nth(1).as_deref() != Some(WORD) {
        return None;
    }
    let order = words.next().and_then(|text| serde_json::from_str::<Order>(&text).ok());
    let Some(order) = order else {
        eprintln!("downbeat: {WORD} is for backends, which start programs of models by it");
        return Some(ExitCode::from(2));
    };
    let result = if order.is_inside { become_program(&order, true) } else { launch(order) };
    Some(result.unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::from(NOT_STARTED)
    }))
}

fn launch(order: Order) -> io::Result<ExitCode> {
    let entered = namespaces::enter(order.network);
    end_with_parent()?;
    // It may have ended before the line above; then another process has adopted this one.
    if getppid().is_none_or(|found| found.as_raw_nonzero().get() != order.parent) {
        return Err(io::Error::other("the backend is gone"));
    }
    if let Err(error) = entered {
        let network = if order.network { "" } else { "it may use the network, and " };
        eprintln!(
            "the kernel gives the program no namespaces ({error}): {network}what it starts in other process groups is \
             not ended with it"
        );
        return become_program(&order, false);
    }
    let inside = Order { is_inside: true, ..order };
    let mut command = inside.command(THIS_BINARY);
    namespaces::with_own_proc(&mut command);
    let mut child = command.spawn()?;
    Ok(exit_code(child.wait()?))
}

fn end_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// As a shell tells of signals.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(code as u8)
}

fn become_program(order: &Order, has_namespaces: bool) -> io::Result<ExitCode> {
    end_with_parent()?;
    let (control, memory) = (inherited(rustix::io::dup(stdin())?), inherited(rustix::io::dup(stdout())?));
    dup2_stdin(File::open("/dev/null")?)?;
    dup2_stdout(stderr())?;
    let mut words = order.words.clone();
    if order.is_python {
        let mut file = File::from(memfd_create("downbeat", MemfdFlags::empty())?);
        file.write_all(&package::zip())?;
        words.push(format!("/proc/self/fd/{}", inherited(file.into())));
    }
    limit(Resource::Core, 0)?;
    limit(Resource::Nofile, order.files)?;
    if has_namespaces {
        // Elsewhere it would count all processes of this user.
        limit(Resource::Nproc, order.processes)?;
    }
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).current_dir(&order.folder).stdin(Stdio::inherit());
    command.env("DOWNBEAT_CONTROL_FD", control.to_string()).env("DOWNBEAT_MEMORY_FD", memory.to_string());
    if order.is_python {
        // The repository may be somebody else's, and lines are to be seen when they are written.
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
    }
    // Not its addresses: CUDA reserves as many as all GPUs and the host have memory, and touches few of them.
    limit(Resource::Data, order.memory_bytes)?;
    let error = command.exec();
    Err(io::Error::new(error.kind(), format!("cannot start `{}`: {error}", words[0])))
}

/// The number of a descriptor that the program is to have.
fn inherited(descriptor: OwnedFd) -> i32 {
    debug_assert!(descriptor.as_raw_fd() > 2);
    descriptor.into_raw_fd()
}

/// Lowers a limit, also for those who could raise it again.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let allowed = rustix::process::getrlimit(resource).maximum.map_or(most, |maximum| maximum.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(allowed), maximum: Some(allowed) })?)
}
