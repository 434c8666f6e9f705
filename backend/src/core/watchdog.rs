//! Which GPUs can be used. An executor that takes ten times what its batch may is taken to hang: the batch is given
//! up, and the GPU is out of use until the executor comes back, and a while longer. One whose executor panics again and
//! again rests, too, and one whose only model has lost its program, and one to whose memory a copy of weights does not
//! end. Each time it rests longer, until a batch has gone well.

use std::collections::VecDeque;

use proto::{Span, Timestamp, backoff::Backoff};

use crate::worker::Execution;

/// An executor hangs when it takes so many times what it should ...
const TIMES: i64 = 10;
/// ... and at least this long.
const LEAST: Span = Span::from_millis(1_000);
/// Panics one after another until the executor rests: one may be the fault of the request.
const PANICS_MAX: u32 = 3;
/// The first rest; each doubles it.
const REST_MIN: Span = Span::from_millis(1_000);
/// The longest rest.
const REST_MAX: Span = Span::from_millis(60_000);

/// What has become of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its executor hangs; an `Unusable` went before it.
    Hangs(usize),
    /// It is out of use.
    Unusable(usize),
    /// It is in use again.
    Usable(usize),
}

/// All GPUs of a backend. Instants are on the scheduler's clock.
#[derive(Debug)]
pub(super) struct Watchdog {
    gpus: Vec<Gpu>,
    verdicts: VecDeque<Verdict>,
}

#[derive(Debug)]
struct Gpu {
    batch: Lane,
    /// The way to its memory.
    copy: Lane,
    rests_until: Option<Timestamp>,
    panics: u32,
    backoff: Backoff,
}

/// What does one thing at a time.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    /// When what is under way is given up.
    patience_ends: Option<Timestamp>,
    /// When what comes behind it may start at the latest, and how long that should take.
    behind: Option<(Timestamp, Span)>,
    /// It was given up.
    hangs: bool,
}

impl Lane {
    fn handle_started(&mut self, latest: Timestamp, takes: Span) {
        if self.patience_ends.is_some() || self.hangs {
            self.behind = Some((latest, takes));
        } else {
            self.patience_ends = Some(latest + (takes * TIMES).max(LEAST));
        }
    }

    /// What was handed over last has not begun and will not.
    fn handle_taken_back(&mut self) {
        if self.behind.take().is_none() {
            self.patience_ends = None;
        }
    }

    /// What was under way has ended, and what is behind it begins. Whether it had been given up.
    fn handle_ended(&mut self, now: Timestamp) -> bool {
        let hung = std::mem::take(&mut self.hangs);
        self.patience_ends = None;
        if let Some((latest, takes)) = self.behind.take() {
            self.handle_started(latest.max(now), takes);
        }
        hung
    }

    /// Whether it is given up now.
    fn handle_timeout(&mut self, now: Timestamp) -> bool {
        let hangs = self.patience_ends.take_if(|at| *at <= now).is_some();
        self.hangs |= hangs;
        hangs
    }
}

impl Gpu {
    fn is_usable(&self) -> bool {
        !self.hangs() && self.rests_until.is_none()
    }

    fn hangs(&self) -> bool {
        self.batch.hangs || self.copy.hangs
    }
}

impl Watchdog {
    /// All can be used.
    pub(super) fn new(gpus: usize) -> Self {
        let backoff = Backoff::new(REST_MIN, REST_MAX);
        let lane = Lane::default();
        let gpu = || Gpu { batch: lane, copy: lane, rests_until: None, panics: 0, backoff: backoff.clone() };
        Self { gpus: std::iter::repeat_with(gpu).take(gpus).collect(), verdicts: VecDeque::new() }
    }

    /// A batch that may take `latency` was handed over, to start at `latest` at the latest; behind the one that
    /// runs, if there is one, and then nothing is counted before that has ended.
    pub(super) fn handle_started(&mut self, gpu: usize, latest: Timestamp, latency: Span) {
        self.gpus[gpu].batch.handle_started(latest, latency);
    }

    /// The batch that was handed over last was taken back.
    pub(super) fn handle_taken_back(&mut self, gpu: usize) {
        self.gpus[gpu].batch.handle_taken_back();
    }

    /// A copy of weights that should take so long was handed over.
    pub(super) fn handle_copy_started(&mut self, gpu: usize, now: Timestamp, takes: Span) {
        self.gpus[gpu].copy.handle_started(now, takes);
    }

    /// It has ended.
    pub(super) fn handle_copied(&mut self, now: Timestamp, index: usize) {
        let gpu = &mut self.gpus[index];
        if gpu.copy.handle_ended(now) {
            gpu.rests_until = Some(gpu.backoff.handle_failure(now));
        }
    }

    /// What ran has ended.
    pub(super) fn handle_ended(&mut self, now: Timestamp, index: usize, execution: &Execution) {
        let gpu = &mut self.gpus[index];
        if gpu.batch.handle_ended(now) {
            gpu.rests_until = Some(gpu.backoff.handle_failure(now));
            return;
        }
        match execution {
            Execution::Panicked { .. } => gpu.panics += 1,
            Execution::Done { .. } => {
                gpu.panics = 0;
                if gpu.is_usable() {
                    gpu.backoff.handle_success();
                }
            }
            Execution::Failed { .. }
            | Execution::Lost { .. }
            | Execution::WindowMissed { .. }
            | Execution::Skipped { .. } => {}
        }
        if gpu.panics >= PANICS_MAX {
            self.suspend(now, index);
        }
    }

    /// What ran lost its executor, and nothing else runs there: it rests until there may be another one.
    pub(super) fn handle_lost(&mut self, now: Timestamp, gpu: usize) {
        self.suspend(now, gpu);
    }

    /// The GPU cannot take the copy that it was given: a thread of it has not come back since an earlier session.
    pub(super) fn handle_stuck(&mut self, now: Timestamp, gpu: usize) {
        self.suspend(now, gpu);
    }

    /// Time passed.
    pub(super) fn handle_timeout(&mut self, now: Timestamp) {
        for (index, gpu) in self.gpus.iter_mut().enumerate() {
            let was_usable = gpu.is_usable();
            let (batch_hangs, copy_hangs) = (gpu.batch.handle_timeout(now), gpu.copy.handle_timeout(now));
            if was_usable && (batch_hangs || copy_hangs) {
                self.verdicts.push_back(Verdict::Unusable(index));
            }
            if batch_hangs {
                self.verdicts.push_back(Verdict::Hangs(index));
            }
            if gpu.rests_until.take_if(|at| *at <= now).is_some() && !gpu.hangs() {
                self.verdicts.push_back(Verdict::Usable(index));
            }
        }
    }

    /// The first GPU with something that was given up and has not come back.
    pub(super) fn hanging(&self) -> Option<usize> {
        self.gpus.iter().position(Gpu::hangs)
    }

    /// The GPUs that cannot be used.
    pub(super) fn unusable(&self) -> Vec<usize> {
        (0..self.gpus.len()).filter(|&index| !self.gpus[index].is_usable()).collect()
    }

    /// When [`Self::handle_timeout`] must be called; [`Timestamp::NEVER`] if not at all.
    pub(super) fn poll_timeout(&self) -> Timestamp {
        let instants = self
            .gpus
            .iter()
            .flat_map(|gpu| [gpu.batch.patience_ends, gpu.copy.patience_ends, gpu.rests_until])
            .flatten();
        instants.min().unwrap_or(Timestamp::NEVER)
    }

    /// The next thing to be done about.
    pub(super) fn poll_verdict(&mut self) -> Option<Verdict> {
        self.verdicts.pop_front()
    }

    fn suspend(&mut self, now: Timestamp, index: usize) {
        let gpu = &mut self.gpus[index];
        if gpu.is_usable() {
            gpu.panics = 0;
            gpu.rests_until = Some(gpu.backoff.handle_failure(now));
            self.verdicts.push_back(Verdict::Unusable(index));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::Outputs;

    const DONE: Execution = Execution::Done {
        started_at: Timestamp(0),
        finished_at: Timestamp(0),
        outputs: Outputs { failed: Vec::new(), bytes: Vec::new() },
    };
    const PANICKED: Execution = Execution::Panicked { started_at: Timestamp(0), finished_at: Timestamp(0) };

    fn at(ms: i64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    /// What is said by then, and when it must be asked next.
    fn look(dog: &mut Watchdog, ms: i64) -> (Vec<Verdict>, Timestamp) {
        dog.handle_timeout(at(ms));
        (std::iter::from_fn(|| dog.poll_verdict()).collect(), dog.poll_timeout())
    }

    #[test]
    fn an_executor_that_hangs_is_given_up_and_rests_when_it_comes_back() {
        let mut dog = Watchdog::new(2);
        dog.handle_started(1, at(5), Span::from_millis(200));
        assert_eq!(look(&mut dog, 2_004), (vec![], at(2_005)));
        assert_eq!(look(&mut dog, 2_005), (vec![Verdict::Unusable(1), Verdict::Hangs(1)], Timestamp::NEVER));
        assert_eq!(look(&mut dog, 90_000), (vec![], Timestamp::NEVER), "it has not come back");
        dog.handle_ended(at(100_000), 1, &DONE);
        assert_eq!(look(&mut dog, 100_999), (vec![], at(101_000)));
        assert_eq!(look(&mut dog, 101_000), (vec![Verdict::Usable(1)], Timestamp::NEVER));
    }

    #[test]
    fn what_is_behind_a_batch_has_all_its_time_once_that_has_ended() {
        let mut dog = Watchdog::new(1);
        dog.handle_started(0, at(5), Span::from_millis(1));
        dog.handle_started(0, at(7), Span::from_millis(150));
        assert_eq!(look(&mut dog, 900), (vec![], at(1_005)), "only the first one counts");
        dog.handle_ended(at(1_000), 0, &DONE);
        assert_eq!(look(&mut dog, 2_499), (vec![], at(2_500)));
        assert_eq!(look(&mut dog, 2_500).0, [Verdict::Unusable(0), Verdict::Hangs(0)]);
        // Behind one that hangs.
        dog.handle_started(0, at(2_600), Span::from_millis(1));
        dog.handle_ended(at(3_000), 0, &DONE);
        assert_eq!(look(&mut dog, 3_999), (vec![], at(4_000)), "the rest ends, and its time");
        dog.handle_ended(at(3_999), 0, &DONE);
        // One that is taken back does not count.
        dog.handle_started(0, at(5_000), Span::from_millis(1));
        dog.handle_started(0, at(5_000), Span::from_millis(1));
        dog.handle_taken_back(0);
        dog.handle_ended(at(5_001), 0, &DONE);
        assert_eq!(look(&mut dog, 9_000), (vec![Verdict::Usable(0)], Timestamp::NEVER));
        // Nor does one that waits alone for its window.
        dog.handle_started(0, at(9_000), Span::from_millis(1));
        dog.handle_taken_back(0);
        assert_eq!(look(&mut dog, 20_000), (vec![], Timestamp::NEVER));
    }

    #[test]
    fn a_copy_that_hangs_takes_its_gpu_out_of_use_but_no_batch() {
        let mut dog = Watchdog::new(1);
        dog.handle_copy_started(0, at(0), Span::from_millis(8));
        dog.handle_started(0, at(900), Span::from_millis(1));
        assert_eq!(look(&mut dog, 1_000), (vec![Verdict::Unusable(0)], at(1_900)));
        dog.handle_ended(at(1_001), 0, &DONE);
        dog.handle_copied(at(5_000), 0);
        assert_eq!(look(&mut dog, 5_000), (vec![], at(6_000)));
        assert_eq!(look(&mut dog, 6_000), (vec![Verdict::Usable(0)], Timestamp::NEVER));
        dog.handle_copy_started(0, at(7_000), Span::from_millis(8));
        dog.handle_copied(at(7_008), 0);
        assert_eq!(look(&mut dog, 9_000), (vec![], Timestamp::NEVER));
    }

    #[test]
    fn short_batches_have_a_second_and_each_rest_is_longer_until_one_goes_well() {
        let mut dog = Watchdog::new(1);
        for (since, rest) in [(0, 1_000), (10_000, 2_000), (20_000, 4_000)] {
            dog.handle_started(0, at(since), Span::from_millis(1));
            assert_eq!(look(&mut dog, since + 999).0, []);
            assert_eq!(look(&mut dog, since + 1_000).0, [Verdict::Unusable(0), Verdict::Hangs(0)]);
            dog.handle_ended(at(since + 1_500), 0, &DONE);
            assert_eq!(look(&mut dog, since + 1_500), (vec![], at(since + 1_500 + rest)));
            assert_eq!(look(&mut dog, since + 1_500 + rest).0, [Verdict::Usable(0)]);
        }
        dog.handle_ended(at(30_000), 0, &DONE);
        dog.handle_stuck(at(30_000), 0);
        assert_eq!(look(&mut dog, 30_000), (vec![Verdict::Unusable(0)], at(31_000)));
    }

    #[test]
    fn one_panic_is_the_requests_and_three_in_a_row_are_the_executors() {
        let mut dog = Watchdog::new(1);
        for execution in [PANICKED, PANICKED, DONE, PANICKED, PANICKED] {
            dog.handle_ended(at(1), 0, &execution);
        }
        assert_eq!(look(&mut dog, 1).0, []);
        dog.handle_ended(at(2), 0, &PANICKED);
        assert_eq!(look(&mut dog, 2), (vec![Verdict::Unusable(0)], at(1_002)));
        dog.handle_ended(at(3), 0, &PANICKED);
        assert_eq!(look(&mut dog, 1_002).0, [Verdict::Usable(0)], "what was under way does not count twice");
    }
}
