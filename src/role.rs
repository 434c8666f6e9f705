//! One role of a cluster: reads its configuration file and runs it.

use std::{
    collections::BTreeSet,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result, anyhow, ensure};
use backend::executor::Programs;
use gateway::service::SetLogLevel;
use repository::Repository;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::de::DeserializeOwned;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{
    Layer as _,
    filter::{LevelFilter, Targets},
    fmt,
    layer::SubscriberExt as _,
    reload,
    util::SubscriberInitExt as _,
};

use crate::{
    asking::Asking,
    config_file::read_config,
    notices, panics,
    signals::{self, Ask},
};

/// Arguments of `scheduler`, `frontend` and `backend`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The role's configuration file (TOML)
    #[arg(long)]
    config: PathBuf,
    /// Read this file and all that it names, say what that was, and end: nothing is opened or started
    #[arg(long)]
    check: bool,
    /// How the log is written to stderr
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
    /// How much it tells unless `RUST_LOG` says; set by `up`
    #[arg(long, hide = true, default_value = "info")]
    pub log_level: LevelFilter,
    /// End when this process ends; set by `demo` and `up`
    #[arg(long, hide = true)]
    supervised_by: Option<u32>,
}

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people (also by Triton's names: default, ISO8601)
    #[default]
    #[value(alias = "default", alias = "ISO8601")]
    Text,
    /// A JSON object on each line
    Json,
}

impl Args {
    /// Ties this process to its supervisor, if it has one, and reads its file.
    pub(crate) fn start<C: DeserializeOwned>(&self) -> Result<C> {
        if let Some(parent) = self.supervised_by {
            die_with(parent)?;
        }
        read_config(&self.config)
    }

    /// Says what has been read by `--check`.
    fn tell_checked(&self, member: &str) {
        notices::tell(&format!("{}: checked, and nothing opened: {member}", self.config.display()));
    }
}

/// A repository, for a line.
pub(crate) fn told(folder: &Path, found: &Repository) -> String {
    let models = found.models.iter().chain(&found.ensembles);
    let served: BTreeSet<&str> = models.map(|model| model.name.as_str()).collect();
    let refused: BTreeSet<&str> = found.refused.iter().map(|refused| refused.name.as_str()).collect();
    let list = |names: &BTreeSet<&str>| match names.is_empty() {
        true => "none".to_owned(),
        false => repository::told(names.iter().copied()),
    };
    format!("models of {}: {}; refused: {}", folder.display(), list(&served), list(&refused))
}

/// Ties this process's life to its parent's: called by a member as its first act.
fn die_with(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot tie this process to its parent")?;
    // The parent may have ended before the line above; then another process has adopted this one.
    let adopted = getppid().is_none_or(|found| found.as_raw_nonzero().get().unsigned_abs() != parent);
    ensure!(!adopted, "the parent process is gone");
    Ok(())
}

/// Lines that wait for whoever reads stderr; what comes beyond them is lost.
const LOG_LINES_MAX: usize = 8_192;

/// Crates whose lines the level is for, and what programs write. What we depend on only warns: some of it has a line
/// for each frame that a stranger sends.
const OWN_TARGETS: [&str; 12] = [
    "backend",
    "cuda",
    "downbeat",
    "frontend",
    "gateway",
    "lowering",
    "program",
    "proto",
    "repository",
    "scheduler",
    "soft_roce",
    "transport",
];

fn targets(level: LevelFilter) -> Targets {
    let own = OWN_TARGETS.map(|target| (target, level));
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_targets(own)
}

/// Logs to stderr; `RUST_LOG` chooses what. A thread of its own writes, so that a pipe which nobody reads holds nobody
/// up. Yields what sets another level later, and what writes the lines that are left when it is dropped.
pub(crate) fn init_logging(args: &Args) -> (SetLogLevel, WorkerGuard) {
    let chosen = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty()).and_then(|text| text.parse().ok());
    let (filter, handle) = reload::Layer::new(chosen.unwrap_or_else(|| targets(args.log_level)));
    let writer = NonBlockingBuilder::default().buffered_lines_limit(LOG_LINES_MAX).thread_name("log");
    let (writer, guard) = writer.finish(std::io::stderr());
    let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let lines = fmt::layer().with_ansi(wants_colour && std::io::stderr().is_terminal()).with_writer(writer);
    let lines = match args.log_format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).init();
    panics::report_to_log();
    (Box::new(move |level| handle.reload(targets(level)).map_err(|error| error.to_string())), guard)
}

/// Runs a scheduler until it is told to end, and has finished what it had.
pub(crate) fn scheduler(args: &Args) -> Result<()> {
    let (_, _log) = init_logging(args);
    let config: scheduler::config::Config = args.start()?;
    if args.check {
        scheduler::process::check(&config)?;
        let (name, listen) = (config.fabric.member_name(), &config.listen);
        args.tell_checked(&format!("scheduler {name} at {listen}, policy {}", config.policy));
        return Ok(());
    }
    Ok(scheduler::process::run(&config, &*stop_flag()?)?)
}

/// Runs a frontend until it has been drained, by a signal or by a client that may. SIGHUP reads limits, tokens and
/// certificates anew.
pub(crate) fn frontend(args: &Args) -> Result<()> {
    let (set_log_level, _log) = init_logging(args);
    let config: gateway::Config = args.start()?;
    if args.check {
        let found = gateway::check(&config)?;
        let at = [("http", &config.http), ("grpc", &config.grpc)].map(|(protocol, address)| {
            address.as_ref().map(|address| format!(", {protocol}://{address}")).unwrap_or_default()
        });
        let (name, found) = (config.network.member_name(), told(&config.repository, &found));
        args.tell_checked(&format!("frontend {name}{}, {found}", at.concat()));
        return Ok(());
    }
    let running = Arc::new(OnceLock::<gateway::Control>::new());
    let (control, file) = (Arc::clone(&running), args.config.clone());
    signals::handle(move |ask| match (ask, control.get()) {
        (Ask::Terminate, Some(running)) => running.drain(),
        // Whoever sits at the keyboard waits for it.
        (Ask::Interrupt, Some(running)) => running.close(),
        // Nobody has been served yet.
        (Ask::Terminate | Ask::Interrupt, None) => std::process::exit(0),
        (Ask::Reload, None) => tracing::warn!("nothing is read anew: the frontend is just about to start"),
        (Ask::Reload, Some(running)) => {
            let reloaded = read_config(&file).and_then(|config| running.reload(&config).map_err(|text| anyhow!(text)));
            if let Err(error) = reloaded {
                tracing::warn!("nothing is read anew: {error:#}");
            }
        }
    })?;
    Ok(gateway::run(&config, set_log_level, |control| drop(running.set(control)))?)
}

/// Runs a backend until it is told to end, and has finished its plans.
pub(crate) fn backend(args: &Args) -> Result<()> {
    let (_, _log) = init_logging(args);
    let config: backend::config::Config = args.start()?;
    if args.check {
        let found = told(&config.repository, &backend::drive::check(&config)?);
        let (name, gpus) = (config.network.member_name(), config.gpus.count());
        args.tell_checked(&format!("backend {name}, GPUs: {gpus}, {found}"));
        return Ok(());
    }
    let programs = Programs::default().asking(Asking::of(&config)?);
    Ok(backend::drive::run_with(&config, programs, &*stop_flag()?)?)
}

/// Is set when a signal asks this process to end.
fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    signals::handle(move |ask| match ask {
        Ask::Terminate | Ask::Interrupt => flag.store(true, Ordering::Relaxed),
        Ask::Reload => tracing::warn!("nothing is read anew: this role has neither clients nor certificates of theirs"),
    })?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    /// A client that had set the level to 2 let anybody's pings of HTTP/2 write 90 MB of log a second.
    #[test]
    fn levels_are_for_our_own_crates() {
        let verbose = targets(LevelFilter::TRACE);
        for own in ["downbeat::role", "gateway::connection", "frontend::core", "soft_roce::endpoint", "program"] {
            assert!(verbose.would_enable(own, &Level::TRACE), "{own}");
        }
        for other in ["h2::codec::framed_read", "hyper::proto::h1::io", "rten", "rustls::server", "tonic"] {
            assert!(verbose.would_enable(other, &Level::WARN) && !verbose.would_enable(other, &Level::INFO), "{other}");
        }
        let errors = targets(LevelFilter::ERROR);
        assert!(errors.would_enable("h2", &Level::ERROR) && !errors.would_enable("h2", &Level::WARN));
        assert!(!targets(LevelFilter::OFF).would_enable("gateway", &Level::ERROR));
    }
}
