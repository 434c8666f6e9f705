//! Child processes: the roles of a local cluster, each this same binary. None outlives this process, however it ends;
//! those that end before it are started again, if that is wanted.
#![allow(clippy::disallowed_methods)] // Waits for them, on a thread of its own when told to end.

mod lives;

use std::{
    borrow::BorrowMut,
    fmt,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum as _;
use proto::{Span, Timestamp};
use rustix::process::{Pid, Signal, kill_process};
use tracing::level_filters::LevelFilter;
use transport::Clock;

use crate::{
    role::LogFormat,
    signals::{self, Ask},
};
use lives::Lives;

/// How long frontends have to answer what is under way: more than they allow themselves by default.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(28);
/// How often they are looked at meanwhile.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// Where a member's log goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Logs {
    /// A file in the cluster's folder; its end is shown if the member fails.
    Files,
    /// This process's stderr, in this format, and as much as this level has.
    Inherited(LogFormat, LevelFilter),
}

/// Which members are started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Restarts {
    /// Those that [`Supervisor::kill`] has killed.
    Killed,
    /// All but those that end in good order (exit code 0), as somebody has told them to.
    All,
}

/// A running set of members.
pub(super) struct Supervisor {
    folder: tempfile::TempDir,
    logs: Logs,
    restarts: Restarts,
    clock: Clock,
    members: Arc<Mutex<Vec<Member>>>,
}

struct Member {
    role: Vec<String>,
    name: String,
    process: Process,
    lives: Lives,
    /// [`Supervisor::kill`] has killed it, and it has not ended yet.
    is_killed: bool,
    /// By [`Supervisor::end`].
    is_told_to_end: bool,
}

enum Process {
    Runs(Child),
    /// It is started again then.
    Waits(Timestamp),
}

/// Something happened to a member although nobody stopped all of them.
pub(super) enum Incident {
    /// It ended, or could not be started again.
    Fell(Casualty),
    /// It was started again.
    Restarted {
        /// As it was started first.
        name: String,
        /// Its process now.
        process: u32,
    },
}

/// A member that ended although nobody stopped it.
pub(super) struct Casualty {
    /// As it was started.
    pub name: String,
    /// How it ended.
    pub end: End,
    /// The last lines that it logged.
    pub last_words: String,
    /// What becomes of it.
    pub fate: Fate,
}

/// How a member ended.
pub(super) enum End {
    /// It was there.
    Ended(ExitStatus),
    /// Another process could not be had for it.
    NotStarted(anyhow::Error),
}

/// What becomes of a member that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is started again after this pause.
    Again(Span),
    /// It has been started again often enough.
    InVain,
    /// It is not started again.
    Left,
    /// Neither is it, as [`Supervisor::end`] has told it to end.
    AsTold,
}

impl End {
    /// It ended in good order.
    pub(super) fn is_success(&self) -> bool {
        matches!(self, Self::Ended(status) if status.success())
    }

    /// Somebody else ended it.
    fn is_by_signal(&self) -> bool {
        matches!(self, Self::Ended(status) if status.code().is_none())
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(status) => write!(f, "ended with {status}"),
            Self::NotStarted(error) => write!(f, "cannot be started: {error:#}"),
        }
    }
}

impl fmt::Display for Casualty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.end)?;
        match self.fate {
            Fate::Again(pause) => write!(f, "; it is started again in {pause}"),
            Fate::InVain => f.write_str(", as often as it was started"),
            Fate::Left | Fate::AsTold => Ok(()),
        }
    }
}

/// A folder that goes with what is yielded, and that no other user can look into: members' files name their secret.
pub(super) fn private_folder() -> Result<tempfile::TempDir> {
    let folder = tempfile::Builder::new().prefix("downbeat-").permissions(fs::Permissions::from_mode(0o700)).tempdir();
    folder.context("cannot make a temporary folder")
}

impl Supervisor {
    /// No members yet; their files are in `folder`, which is [private](private_folder) and goes with them. From now on
    /// SIGTERM and Ctrl-C (SIGINT, SIGHUP) let the frontends answer what they have, for `drain_timeout` at most, then
    /// end all members and this process: with 0 or, after Ctrl-C, 130. A second one ends it at once.
    ///
    /// Members end with the thread that starts them: who wants them to be started again calls [`Self::tend`], now and
    /// then, from the same thread.
    pub(super) fn new(
        folder: tempfile::TempDir,
        (logs, restarts): (Logs, Restarts),
        drain_timeout: Duration,
    ) -> Result<Self> {
        let members: Arc<Mutex<Vec<Member>>> = Arc::default();
        let (doomed, path) = (members.clone(), folder.path().to_owned());
        signals::handle(move |ask| {
            let (doomed, path) = (doomed.clone(), path.clone());
            thread::spawn(move || {
                // Held until the end: nobody else is to see that no member is left, and end this process as failed.
                let mut doomed = doomed.lock().expect("no holder of this lock panics");
                drain(&mut doomed, ask, drain_timeout);
                kill_all(&mut doomed);
                // `exit` runs no destructor; what cannot be removed is left to the system.
                let _ = fs::remove_dir_all(&path);
                std::process::exit(if ask == Ask::Terminate { 0 } else { 130 });
            });
        })?;
        Ok(Self { folder, logs, restarts, clock: Clock::start(), members })
    }

    /// Starts a member: `downbeat <role> --config FILE` with `config` as the file's text. Its process.
    pub(super) fn start(&self, role: &[&str], name: &str, config: &str) -> Result<u32> {
        let role = self.prepare(role, name, config)?;
        self.spawn(self.command(&role, name)?, role, name).map(|(process, _)| process)
    }

    /// As [`Self::start`], and yields the pipes from which it reads and into which it writes.
    pub(super) fn start_and_talk(&self, role: &[&str], name: &str, config: &str) -> Result<(ChildStdin, ChildStdout)> {
        let role = self.prepare(role, name, config)?;
        let mut command = self.command(&role, name)?;
        let (_, pipes) = self.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()), role, name)?;
        Ok(pipes.expect("both were asked for"))
    }

    /// Writes a member's file.
    fn prepare(&self, role: &[&str], name: &str, config: &str) -> Result<Vec<String>> {
        let file = self.config(name);
        fs::write(&file, config).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(role.iter().map(|&word| word.to_owned()).collect())
    }

    /// What runs a member, which neither reads nor writes.
    fn command(&self, role: &[String], name: &str) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe().context("cannot find this binary")?);
        // Its file may have a name that means something.
        command.arg0(env!("CARGO_PKG_NAME"));
        let parent = std::process::id().to_string();
        command
            .args(role)
            // Ctrl-C is ours to pass on.
            .process_group(0)
            .args(["--supervised-by", &parent, "--config"])
            .arg(self.config(name))
            // Whoever started the whole cluster is not told of its members.
            .env_remove(admin::SOCKET_VARIABLE)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        match self.logs {
            Logs::Inherited(format, level) => {
                let format = format.to_possible_value().expect("every format has a name");
                command.args(["--log-format", format.get_name(), "--log-level", &level.to_string()]);
            }
            Logs::Files => {
                // What it said in former lives stays.
                let path = self.log_file(name);
                let log = File::options().create(true).append(true).open(&path);
                command.stderr(log.with_context(|| format!("cannot create {}", path.display()))?);
            }
        }
        Ok(command)
    }

    /// The file that a member was started with.
    pub(super) fn config(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.toml"))
    }

    /// A folder for files that loads bring along; it goes with the cluster.
    pub(super) fn loaded_files(&self) -> PathBuf {
        self.folder.path().join("loaded")
    }

    fn log_file(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.log"))
    }

    /// What each member logged last, if that is in files.
    pub(super) fn last_words(&self) -> String {
        let members = self.members.lock().expect("no holder of this lock panics");
        let of = |member: &Member| {
            let name = &member.name;
            tail(&self.log_file(name)).map_or_else(|_| String::new(), |words| format!("{name} said last:\n{words}"))
        };
        members.iter().map(of).collect()
    }

    /// All that a member has logged, if that is in a file.
    pub(super) fn log(&self, name: &str) -> String {
        fs::read(self.log_file(name)).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    fn spawn(
        &self,
        mut command: impl BorrowMut<Command>,
        role: Vec<String>,
        name: &str,
    ) -> Result<(u32, Option<(ChildStdin, ChildStdout)>)> {
        let mut members = self.members.lock().expect("no holder of this lock panics");
        // Under the lock, so that an interrupt cannot miss a child that is just being born.
        let mut child = command.borrow_mut().spawn().with_context(|| format!("cannot start {name}"))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (id, lives) = (child.id(), Lives::new(self.clock.now()));
        let (name, process) = (name.to_owned(), Process::Runs(child));
        members.push(Member { role, name, process, lives, is_killed: false, is_told_to_end: false });
        Ok((id, pipes))
    }

    /// Tells a member to end in good order (SIGTERM); however it does, it is not started again. False if it has ended
    /// already: then it is gone.
    pub(super) fn end(&self, name: &str) -> bool {
        let mut members = self.members.lock().expect("no holder of this lock panics");
        let Some(at) = members.iter().position(|member| member.name == name) else { return false };
        match &members[at].process {
            // One that has ended meanwhile is still there to be waited for.
            Process::Runs(child) => drop(kill_process(Pid::from_child(child), Signal::TERM)),
            Process::Waits(_) => {
                members.remove(at);
                return false;
            }
        }
        members[at].is_told_to_end = true;
        true
    }

    /// Kills a member (SIGKILL); it is started again. False if there is no such member now.
    pub(super) fn kill(&self, name: &str) -> bool {
        let mut members = self.members.lock().expect("no holder of this lock panics");
        members.iter_mut().filter(|member| member.name == name).any(|member| match &mut member.process {
            Process::Runs(child) => {
                member.is_killed = child.kill().is_ok();
                member.is_killed
            }
            Process::Waits(_) => false,
        })
    }

    /// Finds members that ended by themselves, and starts again those whose time has come. What happened since the last
    /// call.
    pub(super) fn tend(&self) -> Vec<Incident> {
        let mut members = self.members.lock().expect("no holder of this lock panics");
        let now = self.clock.now();
        let mut incidents = Vec::new();
        members.retain_mut(|member| {
            let end = match &mut member.process {
                Process::Runs(child) => match child.try_wait() {
                    Ok(Some(status)) => End::Ended(status),
                    _ => return true,
                },
                Process::Waits(until) if now < *until => return true,
                // Under the lock, as the first time.
                Process::Waits(_) => match self.respawn(member) {
                    Ok(child) => {
                        incidents.push(Incident::Restarted { name: member.name.clone(), process: child.id() });
                        member.process = Process::Runs(child);
                        member.lives.handle_start(now);
                        return true;
                    }
                    Err(error) => End::NotStarted(error),
                },
            };
            let fate = self.fate(member, &end, now);
            if let Fate::Again(pause) = fate {
                member.process = Process::Waits(now + pause);
            }
            let name = member.name.clone();
            let last_words = tail(&self.log_file(&name)).unwrap_or_default();
            incidents.push(Incident::Fell(Casualty { name, end, last_words, fate }));
            matches!(fate, Fate::Again(_))
        });
        incidents
    }

    fn respawn(&self, member: &Member) -> Result<Child> {
        Ok(self.command(&member.role, &member.name)?.spawn()?)
    }

    fn fate(&self, member: &mut Member, end: &End, now: Timestamp) -> Fate {
        if member.is_told_to_end {
            return Fate::AsTold;
        }
        let is_killed = std::mem::take(&mut member.is_killed);
        let again = match self.restarts {
            Restarts::All => !end.is_success(),
            Restarts::Killed => is_killed || matches!(end, End::NotStarted(_)),
        };
        if !again {
            return Fate::Left;
        }
        member.lives.handle_end(now, !end.is_by_signal()).map_or(Fate::InVain, |at| Fate::Again(at - now))
    }

    /// Whether no member is left, not even one that is about to be started again.
    pub(super) fn is_empty(&self) -> bool {
        self.members.lock().expect("no holder of this lock panics").is_empty()
    }

    /// Process ids by name, of those that run.
    pub(super) fn process_ids(&self) -> Vec<(String, u32)> {
        let members = self.members.lock().expect("no holder of this lock panics");
        members.iter().filter_map(|member| Some((member.name.clone(), member.process.child()?.id()))).collect()
    }
}

impl Process {
    fn child(&self) -> Option<&Child> {
        match self {
            Self::Runs(child) => Some(child),
            Self::Waits(_) => None,
        }
    }

    fn child_mut(&mut self) -> Option<&mut Child> {
        match self {
            Self::Runs(child) => Some(child),
            Self::Waits(_) => None,
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        kill_all(&mut self.members.lock().expect("no holder of this lock panics"));
    }
}

/// Lets frontends answer what is under way, while there are a scheduler and backends that they need for it; they are
/// told as this process was.
fn drain(members: &mut [Member], ask: Ask, timeout: Duration) {
    let signal = if ask == Ask::Terminate { Signal::TERM } else { Signal::INT };
    let frontends = members.iter_mut().filter(|member| member.name.starts_with("frontend"));
    let mut frontends: Vec<&mut Child> = frontends.filter_map(|member| member.process.child_mut()).collect();
    for child in &frontends {
        // It may have ended already.
        let _ = kill_process(Pid::from_child(child), signal);
    }
    let until = Instant::now() + timeout;
    while frontends.iter_mut().any(|child| matches!(child.try_wait(), Ok(None))) && Instant::now() < until {
        thread::sleep(DRAIN_POLL);
    }
}

fn kill_all(members: &mut Vec<Member>) {
    for child in members.iter_mut().filter_map(|member| member.process.child_mut()) {
        // It may have ended already; then there is nothing to kill.
        let _ = child.kill();
    }
    for child in members.iter_mut().filter_map(|member| member.process.child_mut()) {
        let _ = child.wait();
    }
    members.clear();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_else_looks_into_a_clusters_folder() {
        let folder = private_folder().unwrap();
        assert_eq!(fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
