//! The `downbeat` binary: dispatches subcommands, nothing else.
#![forbid(unsafe_code)]

mod asking;
mod completions;
mod config_file;
mod doctor;
mod draining;
mod handover;
mod notices;
mod operator;
mod page;
mod panics;
mod role;
mod signals;
mod status;
#[cfg(feature = "tools")]
mod tools;

use std::{process::ExitCode, sync::LazyLock};

use clap::{Parser, Subcommand, error::ErrorKind};
#[cfg(feature = "tools")]
use tools::words;

/// Which release this is, and which wire it speaks: the members of a cluster must have one wire.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (wire {})", env!("CARGO_PKG_VERSION"), proto::WireVersion::THIS));

/// A serving fabric for DNN inference under tight latency objectives.
#[derive(Debug, Parser)]
#[command(version = VERSION.as_str(), about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[cfg(feature = "tools")]
    #[command(flatten)]
    Tool(Box<tools::Command>),
    /// Run the scheduler
    Scheduler(role::Args),
    /// Run a frontend
    Frontend(role::Args),
    /// Run a backend
    Backend(role::Args),
    /// Move the primary to another scheduler, before the present one is upgraded
    Handover(handover::Args),
    /// Give a backend no more batches, or take a frontend out of load balancing
    Drain(draining::DrainArgs),
    /// End a drain
    Resume(draining::ResumeArgs),
    /// Show who is in a cluster, what is served, and which backends can go
    Status(status::Args),
    /// Tell what this host offers and what to change
    Doctor(doctor::Args),
    /// Print what a shell needs to complete this command line
    Completions(completions::Args),
}

/// Bad input: one line on stderr says what to change.
const BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    if let Some(code) = backend::executor::process::launch_if_asked() {
        return code;
    }
    if let Some(code) = backend::drive::try_if_asked() {
        return code;
    }
    backend::executor::Programs::default().complete_configurations();
    panics::report();
    let cli = match Cli::try_parse_from(words(std::env::args_os().collect())) {
        Ok(cli) => cli,
        // Of a command without its subcommand, too.
        Err(help) if !help.use_stderr() || help.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            help.exit();
        }
        Err(error) => {
            notices::fail(&misused(&error.to_string()));
            return ExitCode::from(BAD_INPUT);
        }
    };
    match &cli.command {
        #[cfg(feature = "tools")]
        Command::Tool(command) => notices::write_as(command.log_format()),
        Command::Scheduler(args) | Command::Frontend(args) | Command::Backend(args) => {
            notices::write_as(args.log_format);
        }
        Command::Handover(_) | Command::Drain(_) | Command::Resume(_) | Command::Status(_) => {}
        Command::Doctor(_) | Command::Completions(_) => {}
    }
    let result = match cli.command {
        #[cfg(feature = "tools")]
        Command::Tool(command) => tools::run(&command),
        Command::Scheduler(args) => role::scheduler(&args),
        Command::Frontend(args) => role::frontend(&args),
        Command::Backend(args) => role::backend(&args),
        Command::Handover(args) => handover::run(&args),
        Command::Drain(args) => draining::drain(&args),
        Command::Resume(args) => draining::resume(&args),
        Command::Status(args) => status::run(&args),
        Command::Doctor(args) => match doctor::run(&args) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
        Command::Completions(args) => {
            completions::print(&args);
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            notices::fail(&one_line(&error));
            ExitCode::from(if ran(&error) { 1 } else { BAD_INPUT })
        }
    }
}

/// What clap says of a command line, in one line: its paragraphs, of which some list something, without the usage.
fn misused(text: &str) -> String {
    let text = text.trim_start_matches("error: ");
    let hint = "For more information, try";
    let paragraphs = text.split("\n\n").filter(|paragraph| !paragraph.starts_with("Usage:"));
    let one_line = |paragraph: &str| {
        let mut lines = paragraph.lines().map(str::trim);
        let head = lines.next().unwrap_or_default();
        let between = if head.ends_with(':') { ", " } else { " " };
        let rest = lines.collect::<Vec<_>>().join(between);
        let head = head.strip_prefix(hint).map_or_else(|| head.to_owned(), |help| format!("try{help}"));
        format!("{head} {rest}").trim_end().trim_end_matches('.').to_owned()
    };
    paragraphs.map(one_line).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Whether the command did its work and found something wrong, which is not bad input.
#[cfg(feature = "tools")]
fn ran(error: &anyhow::Error) -> bool {
    error.is::<tools::Failed>() || matches!(error.downcast_ref(), Some(cli::CommandError::Found(_)))
}

#[cfg(not(feature = "tools"))]
fn words(words: Vec<std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    words
}

#[cfg(not(feature = "tools"))]
fn ran(_: &anyhow::Error) -> bool {
    false
}

/// The error and its causes, less those that the text before names already.
fn one_line(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(args: &[&str]) -> String {
        let error = Cli::try_parse_from(["downbeat"].iter().chain(args)).unwrap_err();
        misused(&error.to_string())
    }

    #[test]
    fn a_misused_command_line_is_told_in_one_line_with_what_is_missing() {
        let missing = "the following required arguments were not provided: --config <CONFIG>; try '--help'";
        assert_eq!(line(&["scheduler"]), missing);
        let unknown = line(&["scheduler", "--config", "x", "--log-format", "xml"]);
        assert_eq!(
            unknown,
            "invalid value 'xml' for '--log-format <LOG_FORMAT>' [possible values: text, json]; try '--help'"
        );
        let misspelt = line(&["scheduler", "--confg", "x"]);
        assert!(misspelt.starts_with("unexpected argument '--confg' found; tip: "), "{misspelt}");
    }

    #[cfg(feature = "tools")]
    #[test]
    fn all_that_is_missing_is_named() {
        let missing = line(&["bench", "verbs"]);
        assert!(missing.contains("not provided: --op <OP>, --bytes <BYTES>, --iters <ITERS>; "), "{missing}");
    }

    #[test]
    fn the_version_names_the_wire() {
        let version = Cli::try_parse_from(["downbeat", "--version"]).unwrap_err().to_string();
        let wire = proto::WireVersion::THIS;
        assert_eq!(version, format!("downbeat {} (wire {wire})\n", env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn a_command_without_its_subcommand_gets_the_help() {
        let error = Cli::try_parse_from(["downbeat"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand);
        assert_eq!(error.exit_code(), i32::from(BAD_INPUT));
    }
}
