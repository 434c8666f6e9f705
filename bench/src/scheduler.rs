//! `downbeat bench scheduler`: the highest rate that the scheduler's threads keep up with, and how late its timers are
//! (Symphony, section 5.5 and Figure 13).
//!
//! It keeps up while requests hardly wait to be taken in, batches leave within their windows, and the GPUs can take
//! all. On a machine that is shared, or has no core to spare, a large part of the longest waits is the operating
//! system's: what it takes is measured beside them, and nothing is subtracted. Where it takes so much that not even the
//! lowest rate is within the bounds, the result is the highest rate that was sustained, and says so (`keeps_up`).

use std::{num::NonZero, thread, time::Duration};

use clap::Args as ClapArgs;
use cli::{CommandError, positive};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::{Tail, stalls};

mod search;
mod trial;

pub use trial::{Measured, Polling, Setup, measure};

/// A load that falls short of its rate by more than a fiftieth is another load.
const GENERATED_PART_MIN: f64 = 0.98;
/// Of all waits until a request is taken in, 99.99 % are at most this long.
const WAIT_US_MAX: f64 = 2_000.0;
/// One batch in so many may leave after its window, as one request in so many may wait longer than that.
const BATCHES_FOR_A_LATE_ONE: u64 = 10_000;
/// Of all requests, dropped: goodput's bound.
const DROPPED_FRACTION_MAX: f64 = 0.01;

/// Search the highest rate that the scheduler's threads keep up with, or measure one.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// ModelThreads, each pinned to a core where there are enough; the RankThread has one more. From two on, the
    /// highest rates for 1, 2, 4, ... are searched, too.
    #[arg(long, default_value_t = 1)]
    pub model_threads: u32,
    /// Models, spread over the ModelThreads.
    #[arg(long, default_value_t = 10)]
    pub models: u32,
    /// Emulated GPUs; each hosts all models.
    #[arg(long, default_value_t = 600)]
    pub gpus: u32,
    /// Measure this aggregate rate, in requests per second, instead of searching the highest.
    #[arg(long)]
    pub rate: Option<f64>,
    /// Measured span of each try in seconds, after a warm-up of a tenth of it. A search takes 7 to 20 of them.
    #[arg(long, default_value_t = 5.0)]
    pub seconds: f64,
    /// How threads wait for work; by default `spin` where they leave a core to others, `adaptive` where they do not.
    #[arg(long)]
    pub polling: Option<Polling>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// The result.
#[derive(Debug, Clone, Serialize)]
pub struct Throughput {
    /// Requests a second that were planned in batches.
    pub rate_rps: f64,
    /// That waits, late and dropped requests were within their bounds. If not, a search found this for no rate; what it
    /// gives is the highest rate whose requests were all generated and planned, however late.
    pub keeps_up: bool,
    /// Time that ModelThreads were busy for each planned request.
    pub ns_per_request: f64,
    /// From the instant the first timer of the RankThread's turn was due to the final batch in the ModelThread.
    pub lateness_us: Tail,
    /// Time that the RankThread was busy, of the measured time.
    pub rank_busy_fraction: f64,
    /// As asked for.
    pub model_threads: u32,
    /// As asked for.
    pub models: u32,
    /// As asked for.
    pub gpus: u32,
    /// From the instant a request was due to the end of the turn that took it in.
    pub wait_us: Tail,
    /// Batches that left.
    pub batches: u64,
    /// Those that left after their window.
    pub batches_late: u64,
    /// Refused or given up, of all requests.
    pub dropped_fraction: f64,
    /// What the machine did meanwhile.
    pub machine: Machine,
    /// The highest rate with fewer ModelThreads, and with these; empty if one rate was measured.
    pub scaling: Vec<Scale>,
}

/// What the machine adds to all waits.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Machine {
    /// As measured by as many threads that do nothing but look at the clock, before everything else.
    pub idle_wait_us: Tail,
    /// Time that the scheduler's threads were ready but had no core, of all their time; `null` where the system does
    /// not tell.
    pub no_core_fraction: Option<f64>,
    /// The longest turn of a thread: where it was interrupted for longest.
    pub turn_us_max: f64,
}

/// The highest rate with a number of ModelThreads.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Scale {
    /// So many.
    pub model_threads: u32,
    /// Requests a second; 0 if they sustained none.
    pub rate_rps: f64,
    /// As in [`Throughput`].
    pub keeps_up: bool,
    /// As in [`Throughput`].
    pub ns_per_request: f64,
    /// As in [`Throughput`].
    pub rank_busy_fraction: f64,
}

/// Runs the command and prints its result on stdout, its progress on stderr.
///
/// # Errors
/// On bad input, and if the machine cannot generate the rate or its threads keep up with none (exit code 2).
pub fn run(args: &Args) -> Result<(), CommandError> {
    let setup = check(args)?;
    let bar = ProgressBar::new(1000);
    let style = ProgressStyle::with_template("[{bar:40}] {percent} % {msg}");
    bar.set_style(style.expect("a constant template").progress_chars("=> "));
    let result = with_progress(args, setup, &bar);
    bar.finish_and_clear();
    let result = result?;
    if args.json {
        println!("{}", serde_json::to_string(&result).expect("plain data"));
    } else {
        println!("{}", result.text());
    }
    Ok(())
}

fn check(args: &Args) -> Result<Setup, CommandError> {
    positive("--model-threads", args.model_threads.into(), 256.0)?;
    positive("--models", args.models.into(), 100_000.0)?;
    positive("--gpus", args.gpus.into(), 1_000_000.0)?;
    positive("--seconds", args.seconds, 3600.0)?;
    if let Some(rate) = args.rate {
        positive("--rate", rate, 1e9)?;
    }
    if args.models < args.model_threads {
        return Err(CommandError::Flag {
            flag: "--models",
            expected: format!("at least one for each of the {} ModelThreads", args.model_threads),
            found: args.models.to_string(),
        });
    }
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let leaves_a_core = cores > args.model_threads as usize + 1;
    let polling = args.polling.unwrap_or(if leaves_a_core { Polling::Spin } else { Polling::Adaptive });
    let Args { model_threads, models, gpus, rate: rate_rps, seconds, .. } = *args;
    Ok(Setup { model_threads, models, gpus, rate_rps, seconds, polling })
}

fn with_progress(args: &Args, setup: Setup, bar: &ProgressBar) -> Result<Throughput, CommandError> {
    bar.set_message("idle threads");
    let idle_wait_us = stalls::measure(args.model_threads + 1, Duration::from_secs_f64(args.seconds));
    let Some(rate) = args.rate else { return searched(setup, idle_wait_us, bar) };
    let measured = measure(setup, &mut |part| {
        bar.set_message(format!("{rate:.0} requests/s"));
        bar.set_position((1000.0 * part) as u64);
    });
    if measured.generated_rps < GENERATED_PART_MIN * rate {
        return Err(CommandError::Flag {
            flag: "--rate",
            expected: format!("what this machine can generate now, at most {:.0}", measured.generated_rps),
            found: rate.to_string(),
        });
    }
    Ok(Throughput::new(setup, (rate, &measured), idle_wait_us, Vec::new()))
}

/// The highest rates with 1, 2, 4, ... ModelThreads and with all.
fn searched(setup: Setup, idle_wait_us: Tail, bar: &ProgressBar) -> Result<Throughput, CommandError> {
    let powers = (0..).map(|power| 1 << power).take_while(|&threads| threads < setup.model_threads);
    let mut scaling = Vec::new();
    for model_threads in powers {
        let found = search_with(Setup { model_threads, ..setup }, bar);
        scaling.push(Scale::new(model_threads, found.kept.as_ref()));
    }
    let found = search_with(setup, bar);
    let Some((rate_rps, measured)) = &found.kept else {
        let refused = found.refused.map_or_else(String::new, |(_, measured)| why_refused(setup, &measured));
        return Err(CommandError::Failed(format!(
            "the scheduler sustained no rate: {refused}; threads without work waited up to {:.0} us (p99.99 {:.0} us)",
            idle_wait_us.max, idle_wait_us.p9999
        )));
    };
    scaling.push(Scale::new(setup.model_threads, found.kept.as_ref()));
    Ok(Throughput::new(setup, (*rate_rps, measured), idle_wait_us, scaling))
}

/// A rate that was asked for, and what was measured at it.
type Try = (f64, Measured);

/// Between nothing and what the threads plan if they are given all they take.
fn search_with(setup: Setup, bar: &ProgressBar) -> search::Found<Try> {
    let threads = setup.model_threads;
    bar.set_message(format!("{threads} ModelThreads, all they take"));
    let most = measure(Setup { rate_rps: None, ..setup }, &mut |part| bar.set_position((1000.0 * part) as u64));
    let try_rate = |rate_rps: f64, done: f64| {
        bar.set_message(format!("{threads} ModelThreads, {rate_rps:.0} requests/s"));
        bar.set_position((1000.0 * done) as u64);
        (rate_rps, measure(Setup { rate_rps: Some(rate_rps), ..setup }, &mut |_| ()))
    };
    let keeps_up = |(rate_rps, measured): &Try| measured.keeps_up(*rate_rps);
    // A machine that does not let the threads keep up with next to nothing would refuse every rate.
    let least = search::attempt(|| try_rate(search::RESOLUTION * most.planned_rps, 0.0), keeps_up);
    if keeps_up(&least) {
        let found = search::search(most.planned_rps, try_rate, keeps_up);
        return search::Found { kept: found.kept.or(Some(least)), ..found };
    }
    let found = search::search(most.planned_rps, try_rate, |(rate_rps, measured)| measured.sustains(*rate_rps));
    match found {
        // Nothing at all was planned, so no rate was tried.
        search::Found { kept: None, refused: None } => {
            search::Found { kept: None, refused: Some((most.generated_rps, most)) }
        }
        found => found,
    }
}

fn why_refused(setup: Setup, measured: &Measured) -> String {
    format!(
        "at {:.0} requests/s with {} ModelThreads p99.99 of waits was {:.0} us, {} of {} batches were late and {:.2} % \
         of requests dropped",
        measured.generated_rps,
        setup.model_threads,
        measured.wait_us.p9999,
        measured.batches_late,
        measured.batches,
        100.0 * measured.dropped_fraction
    )
}

impl Measured {
    fn keeps_up(&self, rate_rps: f64) -> bool {
        self.sustains(rate_rps)
            && self.wait_us.p9999 <= WAIT_US_MAX
            && self.batches_late * BATCHES_FOR_A_LATE_ONE <= self.batches
    }

    /// However long requests wait and batches are late.
    fn sustains(&self, rate_rps: f64) -> bool {
        self.planned_rps > 0.0
            && self.generated_rps >= GENERATED_PART_MIN * rate_rps
            && self.dropped_fraction <= DROPPED_FRACTION_MAX
    }
}

impl Scale {
    fn new(model_threads: u32, kept: Option<&Try>) -> Self {
        let figure = |of: fn(&Measured) -> f64| kept.map_or(0.0, |(_, measured)| of(measured));
        Self {
            model_threads,
            rate_rps: figure(|measured| measured.planned_rps),
            keeps_up: kept.is_some_and(|(rate_rps, measured)| measured.keeps_up(*rate_rps)),
            ns_per_request: figure(|measured| measured.ns_per_request),
            rank_busy_fraction: figure(|measured| measured.rank_busy_fraction),
        }
    }
}

impl Throughput {
    fn new(setup: Setup, (rate_rps, measured): (f64, &Measured), idle_wait_us: Tail, scaling: Vec<Scale>) -> Self {
        Self {
            rate_rps: measured.planned_rps,
            keeps_up: measured.keeps_up(rate_rps),
            ns_per_request: measured.ns_per_request,
            lateness_us: measured.lateness_us,
            rank_busy_fraction: measured.rank_busy_fraction,
            model_threads: setup.model_threads,
            models: setup.models,
            gpus: setup.gpus,
            wait_us: measured.wait_us,
            batches: measured.batches,
            batches_late: measured.batches_late,
            dropped_fraction: measured.dropped_fraction,
            machine: Machine {
                idle_wait_us,
                no_core_fraction: measured.no_core_fraction,
                turn_us_max: measured.turn_us_max,
            },
            scaling,
        }
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let tail = |tail: &Tail| {
            let Tail { p50, p99, p999, p9999, max } = tail;
            format!("p50 {p50:.1}, p99 {p99:.1}, p99.9 {p999:.1}, p99.99 {p9999:.1}, max {max:.1}")
        };
        let no_core = self
            .machine
            .no_core_fraction
            .map_or_else(|| "an unknown part".to_owned(), |fraction| format!("{:.2} %", 100.0 * fraction));
        let mut lines = vec![
            format!(
                "{:.0} requests/s on {} ModelThreads and the RankThread, {} models, {} GPUs",
                self.rate_rps, self.model_threads, self.models, self.gpus
            ),
            format!("until a request is taken in, us: {}", tail(&self.wait_us)),
            format!("dispatch lateness, us: {}", tail(&self.lateness_us)),
            format!(
                "{} batches, {} after their window; {:.3} % of requests dropped",
                self.batches,
                self.batches_late,
                100.0 * self.dropped_fraction
            ),
            format!(
                "{:.1} ns of a ModelThread per request; RankThread busy {:.1} % of the time",
                self.ns_per_request,
                100.0 * self.rank_busy_fraction
            ),
            format!(
                "this machine: threads had no core for {no_core} of their time, the longest turn took {:.1} us; \
                 threads without work waited, us: {}",
                self.machine.turn_us_max,
                tail(&self.machine.idle_wait_us)
            ),
        ];
        if !self.keeps_up {
            lines.push(self.out_of_bounds());
        }
        if !self.scaling.is_empty() {
            lines.push(format!(
                "\n{:>12}{:>14}{:>10}{:>12}{:>18}",
                "ModelThreads", "requests/s", "keeps up", "ns/request", "RankThread busy"
            ));
        }
        lines.extend(self.scaling.iter().map(|scale| {
            format!(
                "{:>12}{:>14.0}{:>10}{:>12.1}{:>16.1} %",
                scale.model_threads,
                scale.rate_rps,
                if scale.keeps_up { "yes" } else { "no" },
                scale.ns_per_request,
                100.0 * scale.rank_busy_fraction
            )
        }));
        lines.join("\n")
    }

    fn out_of_bounds(&self) -> String {
        let found =
            if self.scaling.is_empty() { "this rate is not" } else { "no rate was; this is the highest sustained" };
        let cause = if self.machine.idle_wait_us.p9999 > WAIT_US_MAX {
            "threads without work waited longer than that, too: this machine has no cores for them"
        } else {
            "threads without work did not wait as long"
        };
        format!(
            "within the bounds of {WAIT_US_MAX:.0} us for 99.99 % of requests and one late batch in \
             {BATCHES_FOR_A_LATE_ONE} {found}; {cause}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(model_threads: u32, models: u32, rate: Option<f64>) -> Args {
        Args { model_threads, models, gpus: 16, rate, seconds: 0.2, polling: None, json: true }
    }

    #[test]
    fn one_rate_is_measured() {
        let args = args(2, 4, Some(20_000.0));
        let measure = || with_progress(&args, check(&args).unwrap(), &ProgressBar::hidden());
        // A busy machine that stops the threads for a while at the end has not generated the rate, and says so.
        let result = (0..20).find_map(|_| match measure() {
            Err(CommandError::Flag { flag: "--rate", .. }) => None,
            result => Some(result.unwrap()),
        });
        let result = result.expect("one run of twenty has its rate");
        assert!(result.rate_rps > 0.0 && result.ns_per_request > 0.0, "{}", result.text());
        assert!(result.wait_us.max >= result.wait_us.p50 && result.batches > 0, "{}", result.text());
        let json = serde_json::to_value(&result).unwrap();
        let documented = [
            "batches",
            "batches_late",
            "dropped_fraction",
            "gpus",
            "keeps_up",
            "lateness_us",
            "machine",
            "model_threads",
            "models",
            "ns_per_request",
            "rank_busy_fraction",
            "rate_rps",
            "scaling",
            "wait_us",
        ];
        assert!(json.as_object().unwrap().keys().eq(documented), "{json}");
    }

    /// The search as a whole, whatever this machine can do now.
    #[test]
    fn a_search_ends_with_a_rate_or_with_why_there_is_none() {
        let args = Args { seconds: 0.05, ..args(2, 4, None) };
        match with_progress(&args, check(&args).unwrap(), &ProgressBar::hidden()) {
            Ok(result) => {
                let threads: Vec<_> = result.scaling.iter().map(|scale| scale.model_threads).collect();
                assert_eq!(threads, [1, 2]);
                assert!(result.rate_rps > 0.0, "{}", result.text());
                let said_so = result.text().contains("no rate was; this is the highest sustained");
                assert_eq!(result.wait_us.p9999 <= WAIT_US_MAX && !said_so, result.keeps_up, "{}", result.text());
            }
            Err(error) => assert!(error.to_string().starts_with("the scheduler sustained no rate: at "), "{error}"),
        }
    }

    #[test]
    fn what_keeping_up_means() {
        let tail = Tail { p50: 1.0, p99: 2.0, p999: 3.0, p9999: 2_000.0, max: 9_000.0 };
        let good = Measured {
            generated_rps: 980.0,
            planned_rps: 970.0,
            dropped_fraction: 0.01,
            batches: 20_000,
            batches_late: 2,
            wait_us: tail,
            lateness_us: tail,
            ns_per_request: 1.0,
            rank_busy_fraction: 0.1,
            no_core_fraction: None,
            turn_us_max: 9_000.0,
        };
        assert!(good.keeps_up(1000.0));
        for bad in [
            Measured { generated_rps: 979.0, ..good.clone() },
            Measured { dropped_fraction: 0.011, ..good.clone() },
            Measured { batches_late: 3, ..good.clone() },
            Measured { wait_us: Tail { p9999: 2_001.0, ..tail }, ..good.clone() },
        ] {
            assert!(!bad.keeps_up(1000.0), "{bad:?}");
        }
        let late = Measured { batches_late: 20_000, wait_us: Tail { p9999: 90_000.0, ..tail }, ..good.clone() };
        assert!(late.sustains(1000.0));
        assert!(!late.sustains(1001.0));
        assert!(!Measured { dropped_fraction: 0.011, ..late }.sustains(1000.0));
    }

    #[test]
    fn a_rate_that_no_machine_generates_is_refused() {
        let error = run(&args(1, 1, Some(1e9))).unwrap_err().to_string();
        assert!(error.starts_with("--rate: expected what this machine can generate now, at most "), "{error}");
        assert!(error.ends_with(", found 1000000000"), "{error}");
    }

    #[test]
    fn bad_flags_say_what_is_expected() {
        assert_eq!(
            run(&args(3, 2, None)).unwrap_err().to_string(),
            "--models: expected at least one for each of the 3 ModelThreads, found 2"
        );
    }
}
