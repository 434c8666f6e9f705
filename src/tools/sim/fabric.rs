//! `downbeat sim --fabric`: runs seeds of the whole fabric, and says how to replay the first that breaks an invariant.

use std::collections::BTreeMap;

use cli::CommandError;
use fabric::{FaultKinds, Options, Summary, run};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{super::demo::Failed, Args};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    seeds: u64,
    events: u64,
    requests: u64,
    served: u64,
    failed: BTreeMap<String, u64>,
    /// The first that broke an invariant.
    failed_seed: Option<u64>,
    violation: Option<String>,
}

/// Runs the seeds and prints what came of them; without `--seeds`, the trace of the one.
///
/// # Errors
/// On a flag that is wrong, and if an invariant is broken.
pub(super) fn run_seeds(args: &Args) -> anyhow::Result<()> {
    let faults: FaultKinds = args.faults.parse().map_err(|error| CommandError::failed("--faults", error))?;
    let count = args.seeds.unwrap_or(1);
    let is_traced = args.seeds.is_none() && !args.json;
    let bar = ProgressBar::new(count);
    bar.set_style(
        ProgressStyle::with_template("simulating [{bar:40}] {pos}/{len} seeds")
            .expect("a constant template")
            .progress_chars("=> "),
    );
    // A core's panic is told as a broken invariant, once.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let (mut total, mut broken, mut done) = (Summary::default(), None, 0);
    for seed in args.seed..args.seed.saturating_add(count) {
        let (result, trace) = run(Options { seed, faults, mutation: None, is_traced });
        bar.suspend(|| trace.iter().for_each(|line| println!("{line}")));
        done += 1;
        bar.set_position(done);
        match result {
            Ok(summary) => total.add(&summary),
            Err(failure) => {
                broken = Some((seed, failure));
                break;
            }
        }
    }
    std::panic::set_hook(hook);
    bar.finish_and_clear();
    let report = Report {
        seeds: done,
        events: total.steps,
        requests: total.sent,
        served: total.served,
        failed: total.failed,
        failed_seed: broken.as_ref().map(|(seed, _)| *seed),
        violation: broken.as_ref().map(|(_, failure)| failure.violation.to_string()),
    };
    if args.json {
        println!("{}", serde_json::to_string(&report).expect("a report has no maps with other keys than text"));
    } else if broken.is_none() {
        let Report { seeds, events, requests, served, failed, .. } = report;
        println!("{seeds} seeds, {events} events, {requests} requests: {served} served, others ended as {failed:?}");
    }
    let Some((seed, failure)) = broken else { return Ok(()) };
    Err(Failed(format!(
        "seed {seed}, after {:.6} s: {}; replay it: downbeat sim --fabric --seed {seed} --faults {}",
        failure.at.as_secs_f64(),
        failure.violation,
        args.faults
    ))
    .into())
}
