//! The `downbeat` binary: dispatches subcommands, nothing else.
fn main() {}
