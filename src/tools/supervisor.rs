//! Child processes: the roles of a local cluster, each this same binary. None outlives this process, however it ends.
#![allow(clippy::disallowed_methods)] // Waits for them, on a thread of its own when told to end.

use std::{
    borrow::BorrowMut,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum as _;
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    role::LogFormat,
    signals::{self, Ask},
};

/// How long frontends have to answer what is under way: more than they allow themselves by default.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(28);
/// How often they are looked at meanwhile.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// Where a member's log goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Logs {
    /// A file in the cluster's folder; its end is shown if the member fails.
    Files,
    /// This process's stderr, in this format.
    Inherited(LogFormat),
}

/// A running set of members.
pub(super) struct Supervisor {
    folder: tempfile::TempDir,
    logs: Logs,
    members: Arc<Mutex<Vec<Member>>>,
}

struct Member {
    name: String,
    child: Child,
    log: Option<PathBuf>,
}

/// A member that ended although nobody stopped it.
pub(super) struct Casualty {
    /// As it was started.
    pub name: String,
    /// How it ended.
    pub status: ExitStatus,
    /// The last lines that it logged.
    pub last_words: String,
}

impl Supervisor {
    /// No members yet. From now on SIGTERM and Ctrl-C (SIGINT, SIGHUP) let the frontends answer what they have, then
    /// end all members and this process: with 0 or, after Ctrl-C, 130. A second one ends it at once.
    pub(super) fn new(logs: Logs) -> Result<Self> {
        let members: Arc<Mutex<Vec<Member>>> = Arc::default();
        let folder =
            tempfile::Builder::new().prefix("downbeat-").tempdir().context("cannot make a temporary folder")?;
        let (doomed, path) = (members.clone(), folder.path().to_owned());
        signals::handle(move |ask| {
            let (doomed, path) = (doomed.clone(), path.clone());
            thread::spawn(move || {
                // Held until the end: nobody else is to see that no member is left, and end this process as failed.
                let mut doomed = doomed.lock().expect("no holder of this lock panics");
                drain(&mut doomed);
                kill_all(&mut doomed);
                // `exit` runs no destructor; what cannot be removed is left to the system.
                let _ = fs::remove_dir_all(&path);
                std::process::exit(if ask == Ask::Terminate { 0 } else { 130 });
            });
        })?;
        Ok(Self { folder, logs, members })
    }

    /// Starts a member: `downbeat <role> --config FILE` with `config` as the file's text.
    pub(super) fn start(&self, role: &[&str], name: &str, config: &str) -> Result<()> {
        self.spawn(self.command(role, name, config)?, name).map(drop)
    }

    /// As [`Self::start`], and yields the pipes from which it reads and into which it writes.
    pub(super) fn start_and_talk(&self, role: &[&str], name: &str, config: &str) -> Result<(ChildStdin, ChildStdout)> {
        let mut command = self.command(role, name, config)?;
        let pipes = self.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()), name)?;
        Ok(pipes.expect("both were asked for"))
    }

    /// What runs a member, which neither reads nor writes.
    fn command(&self, role: &[&str], name: &str, config: &str) -> Result<Command> {
        let file = self.folder.path().join(format!("{name}.toml"));
        fs::write(&file, config).with_context(|| format!("cannot write {}", file.display()))?;
        let mut command = Command::new(std::env::current_exe().context("cannot find this binary")?);
        let parent = std::process::id().to_string();
        command
            .args(role)
            // Ctrl-C is ours to pass on.
            .process_group(0)
            .args(["--supervised-by", &parent, "--config"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        match self.logs {
            Logs::Inherited(format) => {
                let format = format.to_possible_value().expect("every format has a name");
                command.args(["--log-format", format.get_name()]);
            }
            Logs::Files => {
                let path = self.log(name);
                command.stderr(File::create(&path).with_context(|| format!("cannot create {}", path.display()))?);
            }
        }
        Ok(command)
    }

    /// Where a member logs, if that is a file.
    fn log(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.log"))
    }

    fn spawn(&self, mut command: impl BorrowMut<Command>, name: &str) -> Result<Option<(ChildStdin, ChildStdout)>> {
        let log = (self.logs == Logs::Files).then(|| self.log(name));
        let mut members = self.members.lock().expect("no holder of this lock panics");
        // Under the lock, so that an interrupt cannot miss a child that is just being born.
        let mut child = command.borrow_mut().spawn().with_context(|| format!("cannot start {name}"))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        members.push(Member { name: name.to_owned(), child, log });
        Ok(pipes)
    }

    /// Members that ended by themselves since the last call.
    pub(super) fn casualties(&self) -> Vec<Casualty> {
        let mut members = self.members.lock().expect("no holder of this lock panics");
        let mut fallen = Vec::new();
        members.retain_mut(|member| match member.child.try_wait() {
            Ok(Some(status)) => {
                let last_words = member.log.as_deref().map(|log| tail(log).unwrap_or_default()).unwrap_or_default();
                fallen.push(Casualty { name: member.name.clone(), status, last_words });
                false
            }
            _ => true,
        });
        fallen
    }

    /// Process ids by name, for tests that kill one.
    pub(super) fn process_ids(&self) -> Vec<(String, u32)> {
        let members = self.members.lock().expect("no holder of this lock panics");
        members.iter().map(|member| (member.name.clone(), member.child.id())).collect()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        kill_all(&mut self.members.lock().expect("no holder of this lock panics"));
    }
}

/// Lets frontends answer what is under way, while there are a scheduler and backends that they need for it.
fn drain(members: &mut [Member]) {
    let mut frontends: Vec<&mut Member> =
        members.iter_mut().filter(|member| member.name.starts_with("frontend")).collect();
    for member in &frontends {
        // It may have ended already.
        let _ = kill_process(Pid::from_child(&member.child), Signal::TERM);
    }
    let until = Instant::now() + DRAIN_TIMEOUT;
    while frontends.iter_mut().any(|member| matches!(member.child.try_wait(), Ok(None))) && Instant::now() < until {
        thread::sleep(DRAIN_POLL);
    }
}

fn kill_all(members: &mut Vec<Member>) {
    for member in members.iter_mut() {
        // It may have ended already; then there is nothing to kill.
        let _ = member.child.kill();
    }
    for mut member in members.drain(..) {
        let _ = member.child.wait();
    }
}

/// The end of a log: its last 2 KiB.
fn tail(path: &Path) -> io::Result<String> {
    const BYTES: u64 = 2048;
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(BYTES)))?;
    let mut bytes = Vec::new();
    file.take(BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
