//! One role of a cluster: reads its configuration file and runs it.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use anyhow::{Context, Result, anyhow};
use frontend::service::SetLogLevel;
use serde::de::DeserializeOwned;
use tracing_subscriber::{EnvFilter, reload};

use crate::supervisor;

/// Arguments of `scheduler`, `frontend` and `backend`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The role's configuration file (TOML)
    #[arg(long)]
    config: PathBuf,
    /// How the log is written to stderr
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
    /// End when this process ends; set by `demo` and `up`
    #[arg(long, hide = true)]
    supervised_by: Option<u32>,
}

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// A JSON object on each line
    Json,
}

impl Args {
    fn start<C: DeserializeOwned>(&self) -> Result<C> {
        if let Some(parent) = self.supervised_by {
            supervisor::die_with(parent)?;
        }
        read_config(&self.config)
    }
}

/// Reads a TOML file. What is wrong with it is told in one line, with the number of the line where it stands.
pub fn read_config<C: DeserializeOwned>(file: &Path) -> Result<C> {
    let text = std::fs::read_to_string(file).with_context(|| format!("--config: cannot read {}", file.display()))?;
    toml::from_str(&text).map_err(|error| {
        let line = text[..error.span().map_or(0, |span| span.start)].lines().count().max(1);
        anyhow!("--config: {}, line {line}: {}", file.display(), error.message().replace('\n', "; "))
    })
}

/// Logs to stderr; `RUST_LOG` chooses what. Yields what sets another level later.
fn init_logging(format: LogFormat) -> SetLogLevel {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let builder = tracing_subscriber::fmt().with_writer(std::io::stderr).with_env_filter(filter);
    match format {
        LogFormat::Text => {
            let subscriber = builder.with_filter_reloading();
            let set_level = reloading(subscriber.reload_handle());
            subscriber.init();
            set_level
        }
        LogFormat::Json => {
            let subscriber = builder.json().flatten_event(true).with_filter_reloading();
            let set_level = reloading(subscriber.reload_handle());
            subscriber.init();
            set_level
        }
    }
}

fn reloading<S: 'static>(filter: reload::Handle<EnvFilter, S>) -> SetLogLevel {
    Box::new(move |level| filter.reload(EnvFilter::default().add_directive(level.into())).map_err(|e| e.to_string()))
}

/// Runs a scheduler until the process is ended.
pub fn scheduler(args: &Args) -> Result<()> {
    let _ = init_logging(args.log_format);
    match scheduler::drive::run(&args.start()?)? {}
}

/// Runs a frontend until the process is ended.
pub fn frontend(args: &Args) -> Result<()> {
    let set_log_level = init_logging(args.log_format);
    Ok(frontend::drive::run(&args.start()?, set_log_level, &AtomicBool::new(false))?)
}

/// Runs a backend until the process is ended.
pub fn backend(args: &Args) -> Result<()> {
    let _ = init_logging(args.log_format);
    Ok(backend::drive::run(&args.start()?, &AtomicBool::new(false))?)
}
