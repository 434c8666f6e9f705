//! The rounds of `bench verbs`: who has his turn when, and the clock.
//!
//! The calling thread plays every initiator, one other thread every target. Both go through the same list of turns; the
//! target's thread goes on to the next contestant when the initiator's has finished with this one. Both spin: what is
//! measured is the way of the packets, not that of a wake-up. This is a driver: it owns threads and reads the clock.
#![allow(clippy::disallowed_methods)]

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::percentiles::Percentiles;

/// Rounds after the warm-up, if there are operations for so many.
const ROUNDS: u64 = 50;
/// An operation that takes longer is lost, and with it the measurement.
const PATIENCE: Duration = Duration::from_secs(5);
/// Turns between two looks at the clock while operations are under way.
const LOOK_EVERY: u32 = 4096;

/// The end that posts operations.
pub(super) trait Initiator: Send {
    /// Begins one operation. The caller keeps as many under way as its schedule says.
    ///
    /// # Errors
    /// One line; ends the measurement.
    fn post(&mut self) -> Result<(), String>;
    /// One look, without blocking: how many operations have completed.
    ///
    /// # Errors
    /// One line; ends the measurement.
    fn poll(&mut self) -> Result<u64, String>;
    /// All objects' bytes, once all is over: the target must hold the same, if there were enough operations.
    fn objects(&self) -> Option<Vec<u8>>;
}

/// The end that answers.
pub(super) trait Target: Send {
    /// One look, without blocking.
    ///
    /// # Errors
    /// One line; ends the measurement.
    fn serve(&mut self) -> Result<(), String>;
    /// Whether it has nothing to serve, ever: its thread sleeps then, and leaves its core to whoever has.
    fn is_idle(&self) -> bool {
        false
    }
    /// See [`Initiator::objects`].
    fn objects(&self) -> Option<Vec<u8>>;
}

/// One way to move objects, on one host.
pub(super) struct Contestant {
    /// For errors.
    pub name: &'static str,
    /// Played by one thread,
    pub initiator: Box<dyn Initiator>,
    /// and by another.
    pub target: Box<dyn Target>,
}

/// What every contestant does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    /// Operations of the latency pass, and again of the bandwidth pass.
    pub iters: u64,
    /// Of one object.
    pub bytes: u32,
    /// Operations under way in the bandwidth pass.
    pub window: usize,
    /// How often an operation's object crosses the network, one after the other.
    pub crossings: u32,
}

impl Schedule {
    /// Rounds, with the first, which warms up.
    pub(super) fn rounds(&self) -> u64 {
        1 + self.measured_rounds()
    }

    fn measured_rounds(&self) -> u64 {
        // A round of the bandwidth pass should fill its window more than once.
        (self.iters / (4 * self.window as u64)).clamp(1, ROUNDS)
    }

    /// Operations of each pass in a round; the warm-up does what the first does.
    fn iters_of(&self, round: u64) -> u64 {
        let (rounds, index) = (self.measured_rounds(), round.saturating_sub(1));
        self.iters * (index + 1) / rounds - self.iters * index / rounds
    }
}

/// What is known of a contestant so far.
struct Tally {
    latency_ns: Histogram<u64>,
    gbps: Vec<f64>,
}

/// Measures all contestants; `progress` is told each finished round.
///
/// # Errors
/// Who failed, and why.
pub(super) fn run(
    schedule: &Schedule,
    contestants: Vec<Contestant>,
    progress: impl Fn(u64),
) -> Result<Vec<Figures>, (&'static str, String)> {
    let names: Vec<_> = contestants.iter().map(|contestant| contestant.name).collect();
    let (mut initiators, targets): (Vec<_>, Vec<_>) =
        contestants.into_iter().map(|contestant| (contestant.initiator, contestant.target)).unzip();
    let new = || Tally { latency_ns: Histogram::new(3).expect("three digits are allowed"), gbps: Vec::new() };
    let mut tallies: Vec<_> = names.iter().map(|_| new()).collect();
    let shared = Shared { turns_over: AtomicU64::new(0), stop: AtomicBool::new(false), failed: Mutex::new(None) };
    let targets = thread::scope(|scope| {
        let serving = scope.spawn(|| shared.serve(targets));
        let mut outcome = Ok(());
        'rounds: for round in 0..schedule.rounds() {
            for (index, (initiator, tally)) in initiators.iter_mut().zip(&mut tallies).enumerate() {
                let turn = Turn { schedule, shared: &shared, round };
                if let Err(cause) = turn.take(&mut **initiator, tally) {
                    outcome = Err((names[index], cause));
                    break 'rounds;
                }
                shared.turns_over.fetch_add(1, Ordering::Relaxed);
                serving.thread().unpark();
            }
            progress(round + 1);
        }
        shared.stop.store(true, Ordering::Relaxed);
        serving.thread().unpark();
        let targets = serving.join().expect("the serving thread panicked");
        outcome.map(|()| targets)
    })?;
    for ((name, initiator), target) in names.iter().zip(&initiators).zip(&targets) {
        if schedule.iters >= schedule.window as u64 && initiator.objects() != target.objects() {
            return Err((
                name,
                "an object arrived with other bytes than it had: this is a bug, please report it".into(),
            ));
        }
    }
    Ok(tallies.into_iter().map(Tally::figures).collect())
}

/// What the two threads tell each other.
struct Shared {
    turns_over: AtomicU64,
    stop: AtomicBool,
    /// Why a target cannot go on.
    failed: Mutex<Option<String>>,
}

impl Shared {
    fn serve(&self, mut targets: Vec<Box<dyn Target>>) -> Vec<Box<dyn Target>> {
        while !self.stop.load(Ordering::Relaxed) {
            let index = self.turns_over.load(Ordering::Relaxed) % targets.len() as u64;
            let target = &mut targets[index as usize];
            if target.is_idle() {
                // Until the next turn, or at any time: then it looks again.
                thread::park();
            } else if let Err(cause) = target.serve() {
                *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(cause);
                break;
            }
        }
        targets
    }

    fn check(&self) -> Result<(), String> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }
}

struct Turn<'a> {
    schedule: &'a Schedule,
    shared: &'a Shared,
    round: u64,
}

impl Turn<'_> {
    /// Both passes of one contestant.
    fn take(&self, initiator: &mut dyn Initiator, tally: &mut Tally) -> Result<(), String> {
        let iters = self.schedule.iters_of(self.round);
        let warm = self.round > 0;
        // The end of one is the start of the next, and they are counted when all are over, as in perftest: a clock may
        // be a system call, and counting takes about as long as a look at a device.
        let mut times = Vec::with_capacity(iters as usize + 1);
        times.push(Instant::now());
        for _ in 0..iters {
            initiator.post()?;
            self.await_completions(initiator, times[times.len() - 1])?;
            times.push(Instant::now());
        }
        if warm {
            for pair in times.windows(2) {
                let nanoseconds = ((pair[1] - pair[0]) / self.schedule.crossings).as_nanos().max(1) as u64;
                tally.latency_ns.record(nanoseconds).expect("the histogram resizes");
            }
        }
        let (start, mut posted, mut completed) = (Instant::now(), 0, 0);
        while completed < iters {
            while posted < iters && posted - completed < self.schedule.window as u64 {
                initiator.post()?;
                posted += 1;
            }
            completed += self.await_completions(initiator, Instant::now())?;
        }
        if warm {
            let bits = 8.0 * f64::from(self.schedule.bytes) * f64::from(self.schedule.crossings) * iters as f64;
            tally.gbps.push(bits / start.elapsed().as_nanos().max(1) as f64);
        }
        Ok(())
    }

    /// Spins until something has completed.
    fn await_completions(&self, initiator: &mut dyn Initiator, since: Instant) -> Result<u64, String> {
        loop {
            for _ in 0..LOOK_EVERY {
                match initiator.poll()? {
                    0 => {}
                    completed => return Ok(completed),
                }
            }
            self.shared.check()?;
            if since.elapsed() > PATIENCE {
                return Err(format!("nothing has completed for {} s: does a firewall drop it?", PATIENCE.as_secs()));
            }
        }
    }
}

impl Tally {
    fn figures(mut self) -> Figures {
        self.gbps.sort_by(f64::total_cmp);
        Figures { latency_us: Percentiles::of(&self.latency_ns), gbps: self.gbps[self.gbps.len() / 2] }
    }
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Two-sided: fills a posted receive.
    Send,
    /// One-sided: pushes into the peer's memory.
    Write,
    /// One-sided: pulls from the peer's memory.
    Read,
    /// A SEND that is answered by a SEND; latency is half of both, as perftest's `ib_send_lat` has it.
    Pingpong,
}

impl Op {
    /// How often the object crosses the network.
    pub(super) fn crossings(self) -> u32 {
        if self == Self::Pingpong { 2 } else { 1 }
    }
}

/// What was measured of one contestant.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Figures {
    /// From posting an operation to its completion, one at a time; of a ping-pong half of that.
    pub latency_us: Percentiles,
    /// Payload bits in a nanosecond with many operations under way: the median of all rounds.
    pub gbps: f64,
}
