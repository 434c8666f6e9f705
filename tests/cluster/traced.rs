//! The last seconds of a cluster as a file, judged by what its frontend counts.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::*;

/// What ends before is no more in a file that is asked for then.
const KEPT: Duration = Duration::from_secs(10);

/// Batches of the model, and the microseconds that each of its requests was executed for, in all.
#[derive(Debug, PartialEq, Eq)]
struct Executed {
    batches: u64,
    request_us: u64,
}

fn counted(frontend: SocketAddr) -> Executed {
    let metrics = load::metrics(frontend).unwrap();
    let value = |name: &str| {
        let name = format!("{name}{{model=\"resnet50\",version=\"1\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |value| value.parse().unwrap())
    };
    Executed { batches: value("nv_inference_exec_count"), request_us: value("nv_inference_compute_infer_duration_us") }
}

/// Its batches, by where and when they began: tasks, and microseconds.
fn slices(scheduler: SocketAddr) -> BTreeMap<String, (u64, u64)> {
    let (status, trace) = exchange(scheduler, "GET", "/debug/trace?seconds=10", "");
    assert_eq!(status, 200, "{trace}");
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let its = events.filter(|event| event["ph"] == "X" && event["args"]["model"] == "resnet50");
    let slice = |event: &Value| {
        let (args, number) = (&event["args"], |value: &Value| value.as_f64().unwrap());
        let (ts, dur) = (number(&event["ts"]), number(&event["dur"]));
        // It is planned to start in its window, and does.
        assert!(number(&args["exec_at_us"]) <= ts && ts <= number(&args["latest_us"]), "{event}");
        (format!("{} {} {ts}", event["pid"], event["tid"]), (args["batch"].as_u64().unwrap(), dur as u64))
    };
    its.map(slice).collect()
}

/// A load between two scrapes: what the frontend counts, and what came into the file meanwhile. `None` if that took so
/// long that some of it may have left the file again.
fn measure(up: &Up, scheduler: SocketAddr) -> Option<(Executed, Executed)> {
    let began = Instant::now();
    let (before, known) = (counted(up.http[0]), slices(scheduler).into_keys().collect::<BTreeSet<_>>());
    let tally = up.send(0, 1.0, &emulated(80.0));
    assert_accounted_for(&tally);
    assert_eq!(tally.served, tally.sent, "{tally:?}");
    let after = counted(up.http[0]);
    let counts = Executed { batches: after.batches - before.batches, request_us: after.request_us - before.request_us };
    let mut seen = Executed { batches: 0, request_us: 0 };
    // Clients may have their answers before the scheduler is told.
    while began.elapsed() < KEPT && seen.batches < counts.batches {
        let new: Vec<(u64, u64)> =
            slices(scheduler).into_iter().filter(|(place, _)| !known.contains(place)).map(|(_, slice)| slice).collect();
        let request_us = new.iter().map(|(tasks, us)| tasks * us).sum();
        seen = Executed { batches: new.len() as u64, request_us };
    }
    (began.elapsed() < KEPT).then_some((counts, seen))
}

#[test]
fn a_file_of_the_last_seconds_has_the_batches_that_metrics_count() {
    let (ui, admin) = (Port::hold(), Port::hold());
    let (scheduler, frontend) = (ui.address(), admin.address());
    for threads in [1, 2] {
        let rest = format!("{EAGER}model_threads = {threads}\n[frontend]\nadmin = {{ http = '{frontend}' }}");
        let flags = ["--ui", &scheduler.to_string()];
        let up = Up::start_flagged(&flags, ("warn", Stdio::inherit()), (1, "resnet50", &[2]), &rest);
        let mut measured = None;
        eventually("a second of load within ten", || {
            measured = measure(&up, scheduler);
            measured.is_some()
        });
        let (counted, seen) = measured.unwrap();
        assert!(counted.batches > 0 && counted == seen, "{threads}: {counted:?} {seen:?}");
    }
}
