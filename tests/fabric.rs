//! `bench fabric` as a whole: its processes start, answer everything right, and end with it. No figure is judged.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(flags: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_downbeat"))
        .args(["bench", "fabric"])
        .args(flags.split_whitespace())
        .env("RUST_LOG", "warn")
        .output()
        .unwrap()
}

fn measured(flags: &str) -> Value {
    let output = bench(&format!("{flags} --seconds 1 --json"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{flags}: {said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_answer_is_right_in_open_and_in_closed_loop() {
    let open = "--frontends 2 --backends 2 --gpus 1 --models 3 --rows 5 --bytes 33 --rate 1000 --slo-ms 2000";
    let by_udp = "--path udp --closed 4 --rows 1 --bytes 150000 --slo-ms 2000";
    for flags in [open, "--schedulers 2 --closed 4 --rows 64 --slo-ms 2000", by_udp] {
        let measured = measured(flags);
        assert_eq!(measured["tasks_wrong"], 0, "{flags}: {measured}");
        assert!(measured["tasks_answered"].as_u64().unwrap() > 0, "{flags}: {measured}");
        assert!(measured["latency_us"]["p50"].as_f64().unwrap() > 0.0, "{flags}: {measured}");
        let on_time = measured["on_time_fraction"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&on_time), "{flags}: {measured}");
        for role in ["scheduler", "frontend", "backend", "load"] {
            let ns = &measured["cpu_ns_per_task"][role];
            assert!(ns.is_null() || ns.as_f64().unwrap() > 0.0, "{flags}: {role}: {measured}");
        }
    }
}

#[test]
fn what_cannot_be_is_one_line_and_2() {
    for (flags, expected) in [
        ("--rows 0", "--rows: expected"),
        ("--schedulers 0", "--schedulers: expected 1 to 4, found 0"),
        ("--policy fifo", "--policy"),
        ("--arm tcp", "--arm"),
        ("--rate 1 --closed 1", "--rate"),
    ] {
        let output = bench(flags);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags}: {said}");
        assert!(said.contains(expected) && said.lines().count() == 1, "{flags}: {said}");
    }
}
