//! What is printed to a pipe that nobody reads any more ends the process quietly, as other tools do.

use std::process::{Command, Stdio};

/// What a shell shows for a process that ended by SIGPIPE.
const BROKEN_PIPE: i32 = 141;

#[test]
fn a_reader_that_leaves_ends_the_process_quietly() {
    let simulated = "sim --workload workloads/resnet50.toml --policy eager --rate 100 --seconds 1";
    let commands = [
        simulated,
        &format!("{simulated} --json"),
        "place --workload workloads/clockwork_fig8.toml --partitions 30 --steps 0 --json",
        "bench verbs --op send --bytes 64 --iters 10",
        "bench incast --arm tcp --servers 2 --objects 2 --bytes 1000 --rounds 2",
        "demo --seconds 1",
    ];
    for command in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_downbeat"))
            .args(command.split(' '))
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(BROKEN_PIPE), "{command}: {said}");
        assert!(!said.contains("panicked"), "{command}: {said}");
    }
}
