//! `completions`: what a shell completes, written from the same description as the command line is read by.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::Cli;

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The shell that is to read it
    shell: Shell,
}

/// Prints the shell's script.
pub(crate) fn print(args: &Args) {
    print!("{}", script(args.shell));
}

fn script(shell: Shell) -> String {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), env!("CARGO_PKG_NAME"), &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn every_shell_completes_commands_and_their_flags() {
        for &shell in Shell::value_variants() {
            let script = script(shell);
            for word in ["scheduler", "frontend", "backend", "completions", "log-format", "check"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
