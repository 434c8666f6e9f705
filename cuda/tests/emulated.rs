//! The driver on a GPU that is none: `emulated/` has libcuda, cuBLASLt and cuDNN as their documentation describes them,
//! on host memory. Everything that the examples `driver`, `conformance` and `model` try on a GPU is tried there, in a
//! process of its own that finds these libraries first, and that fails if anything of theirs is not given back.
//!
//! Without g++ there is nothing to build them with, and the test says `skipped`.

// Processes, one of which a person may wait for.
#![allow(clippy::disallowed_methods, reason = "measures how long the GPU takes")]

#[path = "../examples/conformance.rs"]
mod conformance;
#[path = "../examples/driver/main.rs"]
mod driver;
#[path = "../examples/model.rs"]
mod model;

use std::{
    path::Path,
    process::{Command, ExitCode},
};

/// Set for the process that has the libraries, to the example that it is.
const CHILD: &str = "DOWNBEAT_EMULATED";

fn main() -> ExitCode {
    match std::env::var(CHILD).as_deref() {
        Ok("conformance") => return conformance::main(),
        Ok("model") => return model::main(),
        Ok(_) => return driver::main(),
        Err(_) => {}
    }
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    if filter.is_some_and(|filter| !"emulated".contains(&filter)) {
        return ExitCode::SUCCESS;
    }
    if Command::new("g++").arg("--version").output().is_err() {
        println!("skipped: no g++");
        return ExitCode::SUCCESS;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated/build");
    let built = Command::new(script).arg(&folder).status().expect("a script that can be run");
    assert!(built.success(), "the emulated libraries cannot be built");
    let leaks = run(&folder, "driver", &["leak"], 0);
    assert_eq!(leaks, Some(LEAKED), "a process that keeps a page was not found out");
    let trace = folder.join("trace");
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/digits/1/model.onnx");
    for (example, arguments) in [
        ("driver", &["--trace", &trace.to_string_lossy(), "cases", "pages", "launches"][..]),
        ("conformance", &[]),
        ("model", &[digits, "--precision", "fp32", "--check", "--runs", "2", "--batches", "1,3,16"]),
        ("model", &[digits, "--precision", "fp16", "--check", "--runs", "2", "--batches", "1,3,16"]),
    ] {
        // Streams take turns by chance, and few threads are in the conformance cases for long.
        for seed in 0..if example == "conformance" { 4 } else { 1 } {
            let worked = run(&folder, example, arguments, seed);
            let meaning = format!("1: a case failed; {LEAKED}: something was not given back");
            assert_eq!(worked, Some(0), "{example} with seed {seed}; {meaning}");
        }
    }
    check_choices(&std::fs::read_to_string(trace).expect("a trace"));
    ExitCode::SUCCESS
}

/// Our own kernels convolve whatever nobody else can: a description that cuDNN refuses would not be noticed.
fn check_choices(trace: &str) {
    let chosen: Vec<&str> = trace.lines().filter(|line| line.contains("chose")).collect();
    for choice in ["Product", "Whole", "Bare", "Own"] {
        let name = format!("choice={choice}");
        assert!(chosen.iter().any(|line| line.contains(&name)), "no convolution is computed by {choice}");
    }
    let own = chosen.iter().find(|line| line.contains("choice=Own") && line.contains("groups: 1,"));
    assert_eq!(own, None, "cuDNN can compute what is in no groups");
    let nothing = trace.lines().find(|line| line.contains("proposes nothing"));
    assert_eq!(nothing, None, "cuDNN is not understood");
}

/// What a process ends with that has not given everything back.
const LEAKED: i32 = 97;

fn run(folder: &Path, example: &str, arguments: &[&str], seed: u32) -> Option<i32> {
    let this = std::env::current_exe().expect("this program");
    let mut child = Command::new(this);
    child.args(arguments).env(CHILD, example).env("LD_LIBRARY_PATH", folder).env("EMULATED_SEED", seed.to_string());
    child.status().expect("this program can be run").code()
}
