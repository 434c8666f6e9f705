//! How much the constants of the policy `downbeat` matter: each is changed by a fifth, up and down, and the goodput of
//! each published workload measured again.
//!
//!     cargo test --release -p sim --test sensitivity -- --ignored --nocapture
//!
//! prints the whole table. The workloads and what goodput is are those of docs/policy.md.

use std::{
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use scheduler::{Policy, Tuning};
use sim::{Options, Workload, cluster};

const PUBLISHED: [&str; 7] = [
    "resnet50",
    "inception_resnet_v2",
    "zoo_1080ti",
    "zoo_a100",
    "resnet50_x20",
    "resnet50_x20_bursty",
    "strong_batching_x10",
];
const SEED: u64 = 11;
const FIFTH: [f64; 2] = [0.8, 1.2];

fn workload(name: &str) -> Workload {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../workloads/{name}.toml"));
    Workload::read(&file).unwrap()
}

/// The part of its requests that the model loses that fares worst.
fn worst_bad_rate(workload: &Workload, tuning: Tuning, rate_rps: f64, seconds: f64) -> f64 {
    let options = Options { policy: Policy::DownbeatTuned(tuning), rate_rps, seconds, seed: SEED };
    let report = cluster::run(workload, &options, &mut |_| (), &mut |_| ()).unwrap();
    report.models.iter().map(sim::report::ModelReport::worst_bad_rate).fold(0.0, f64::max)
}

/// The highest rate at which no model loses more than 1 %, to a thousandth of it, in requests a second.
fn goodput(workload: &Workload, tuning: Tuning, seconds: f64) -> f64 {
    let (mut good, mut bad) = (0.0, workload.capacity_rps());
    while bad - good > 0.001 * bad {
        let rate_rps = f64::midpoint(good, bad);
        let place = if worst_bad_rate(workload, tuning, rate_rps, seconds) <= 0.01 { &mut good } else { &mut bad };
        *place = rate_rps;
    }
    good
}

/// The constants as they are, and each changed by a fifth.
fn tunings() -> Vec<(&'static str, f64, Tuning)> {
    let usual = Tuning::default();
    let changed = Tuning::NAMES.iter().flat_map(|&name| FIFTH.map(|by| (name, by, usual.scaled(name, by))));
    [("none", 1.0, usual)].into_iter().chain(changed).collect()
}

/// At 2 % below goodput a change by a fifth does no harm.
#[test]
fn no_constant_decides_much() {
    for (name, rate_rps, seconds) in [("resnet50", 5400.0, 10.0), ("strong_batching_x10", 17_300.0, 5.0)] {
        let workload = workload(name);
        for (constant, by, tuning) in tunings() {
            let bad = worst_bad_rate(&workload, tuning, rate_rps, seconds);
            assert!(bad < 0.015, "{name}: {constant} times {by} loses {:.2} %", 100.0 * bad);
        }
    }
}

/// On all cores, as it simulates for minutes.
#[allow(clippy::disallowed_methods)]
#[test]
#[ignore = "takes nine minutes on two cores, in a release build"]
fn no_constant_moves_a_published_goodput_by_more_than_a_hundredth() {
    let (workloads, tunings) = (PUBLISHED.map(workload), tunings());
    let (next, goodputs) = (AtomicUsize::new(0), Mutex::new(vec![[0.0; PUBLISHED.len()]; tunings.len()]));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (row, column) = (at / PUBLISHED.len(), at % PUBLISHED.len());
            let Some((_, _, tuning)) = tunings.get(row) else { return };
            let found = goodput(&workloads[column], *tuning, 60.0);
            goodputs.lock().unwrap()[row][column] = found;
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let goodputs = goodputs.into_inner().unwrap();
    assert!(goodputs[0].iter().all(|&usual| usual > 0.0), "{:?}", goodputs[0]);
    println!("| constant | {} |\n|{}", PUBLISHED.join(" | "), " --- |".repeat(PUBLISHED.len() + 1));
    let mut most: f64 = 0.0;
    for ((name, by, tuning), row) in tunings.iter().zip(&goodputs) {
        let cells = row.iter().zip(&goodputs[0]).map(|(goodput, usual)| {
            let percent = 100.0 * (goodput / usual - 1.0);
            most = most.max(percent.abs());
            if *tuning == Tuning::default() { format!(" {goodput:.0} |") } else { format!(" {percent:+.2} % |") }
        });
        println!("| `{name}` × {by} |{}", cells.collect::<String>());
    }
    assert!(most <= 1.0, "a goodput moves by {most:.2} %");
}
