//! Work for `bench/instructions`, which counts it: a workload in virtual time under the default policy.

use std::path::Path;

use scheduler::Policy;
use sim::{Options, Workload, cluster};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, rate_rps, seconds] = &arguments[..] else {
        eprintln!("usage: simulated_instructions WORKLOAD RATE SECONDS");
        std::process::exit(2);
    };
    let workload = Workload::read(Path::new(path)).expect("a workload of this repository");
    let number = |text: &str| text.parse().expect("a number");
    let options = Options { policy: Policy::Downbeat, rate_rps: number(rate_rps), seconds: number(seconds), seed: 1 };
    let report = cluster::run(&workload, &options, &mut |_| (), &mut |_| ()).expect("no invariant is broken");
    // What is counted is a cluster that serves, not one that drops.
    assert!(report.totals.on_time_fraction > 0.99, "{}", report.table());
}
