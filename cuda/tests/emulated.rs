//! The driver on a GPU that is none: `emulated/` has libcuda, cuBLASLt, cuDNN and NVML as their documentation
//! describes them, on host memory. Everything that the examples `driver`, `conformance` and `model` try on a GPU is
//! tried there, in a process of its own that finds these libraries first, and that fails if anything of theirs is not
//! given back.
//!
//! Without g++ there is nothing to build them with, and the test is skipped.

// Processes, one of which a person may wait for.
#![allow(clippy::disallowed_methods, reason = "measures how long the GPU takes")]

#[path = "../examples/conformance.rs"]
mod conformance;
#[path = "../examples/driver/main.rs"]
mod driver;
#[path = "../examples/model.rs"]
mod model;

use cuda::{DirectAccess, GpuHealth, Management, driver::real};
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
        Ok("health") => return health(),
        Ok(_) => return driver::main(),
        Err(_) => {}
    }
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    if filter.is_some_and(|filter| !"emulated".contains(&filter)) {
        return ExitCode::SUCCESS;
    }
    if Command::new("g++").arg("--version").output().is_err() {
        testing::skip("cuda/emulated", "g++");
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
        ("driver", &["--trace", &trace.to_string_lossy(), "cases", "pages", "loads", "launches"][..]),
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
    assert_eq!(run(&folder, "health", &[], 0), Some(0), "the GPU's health is not what it says");
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

/// What the management library and libcuda tell of the GPU, in NVIDIA's units and by NVIDIA's numbers.
fn health() -> ExitCode {
    let health = cuda::health().expect("a management library");
    assert_eq!(health.driver, "580.95.05");
    let steady = GpuHealth {
        name: "Emulated GPU".to_owned(),
        uuid: "GPU-00112233-4455-6677-8899-aabbccddeeff".to_owned(),
        pci: "0000:00:00.0".to_owned(),
        memory_bytes: Some((4 << 30, 1 << 30)),
        utilization_percent: Some(37),
        temperature_c: Some(41),
        clock_mhz: Some((1500, 1980)),
        memory_clock_mhz: Some((2600, 3200)),
        power_mw: Some(250_500),
        power_limit_mw: Some(700_000),
        energy_mj: Some(5_000_000),
        held_back_by: Some(vec![]),
        corrected_errors: Some(3),
        uncorrected_errors: Some(0),
        is_persistent: Some(true),
        is_exclusive: Some(true),
        is_split: None,
    };
    assert_eq!(health.gpus, std::slice::from_ref(&steady));
    let devices = real::devices().expect("libcuda");
    assert_eq!(devices[0].uuid, steady.uuid, "both know it by one name");
    let management = Management::open().expect("a management library");
    assert_eq!(management.at(&devices[0].pci), Ok(steady));
    let nowhere = management.at("0000:3b:00.0").expect_err("there is no other one");
    assert!(nowhere.starts_with("NVML: "), "{nowhere}");
    let access = real::direct_access().expect("libcuda");
    assert_eq!(access, [(devices[0].pci.clone(), DirectAccess { dma_buf: false, rdma: true, mapped: true })]);
    ExitCode::SUCCESS
}

/// What a process ends with that has not given everything back.
const LEAKED: i32 = 97;

fn run(folder: &Path, example: &str, arguments: &[&str], seed: u32) -> Option<i32> {
    let this = std::env::current_exe().expect("this program");
    let mut child = Command::new(this);
    child.args(arguments).env(CHILD, example).env("LD_LIBRARY_PATH", folder).env("EMULATED_SEED", seed.to_string());
    child.status().expect("this program can be run").code()
}
