//! The ways into GPUs' memories: a thread for each, which makes one copy of weights at a time. Where there is no GPU
//! they are emulated: a copy takes the time that its bytes take. What is not in host memory is read from its file
//! before, unless what runs the model holds no weights: then that time passes, too.
//!
//! What is to make room does so when something is about to be copied: nobody waits for it before.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
    thread::{Builder, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender};
use proto::Span;
use transport::{Clock, Waker};

use super::timers::{reduce_timer_slack, sleep_until};
use crate::{error::ExecutorError, executor::Executor};

/// A way has one copy to make at a time; a second waits only while one of a lost session ends.
const JOBS_MAX: usize = 2;

/// A copy to make.
pub(super) struct Job {
    /// Comes back with the result.
    pub(super) session: u64,
    /// How long it takes where it is emulated.
    pub(super) takes: Span,
    /// What runs the model.
    pub(super) executor: Arc<dyn Executor>,
    /// How long the weights should be read from disk for before; `None` if they should be in host memory.
    pub(super) read: Option<Span>,
    /// Whom to wake when it has ended.
    pub(super) waker: Waker,
}

/// A copy that has ended.
pub(super) struct Copied {
    pub(super) session: u64,
    pub(super) gpu: usize,
    /// How long the weights were read for before, or why they could not be.
    pub(super) read: Result<Span, ExecutorError>,
}

/// What is to leave a GPU's memory before anything comes in. Each was copied there once since it was here last, so they
/// are no more than what is there.
type Leaving = Mutex<Vec<Arc<dyn Executor>>>;

/// The threads.
pub(super) struct Copies {
    jobs: Vec<Sender<Job>>,
    leaving: Vec<Arc<Leaving>>,
    copied: Option<Receiver<Copied>>,
    threads: Vec<JoinHandle<()>>,
}

impl Copies {
    pub(super) fn start(clock: Clock, count: usize) -> io::Result<Self> {
        let (copied_sender, copied) = crossbeam_channel::bounded((count * (JOBS_MAX + 1)).max(1));
        let (jobs, leaving, threads) = (Vec::new(), Vec::new(), Vec::new());
        let mut copies = Self { jobs, leaving, copied: Some(copied), threads };
        for gpu in 0..count {
            let (sender, jobs) = crossbeam_channel::bounded(JOBS_MAX);
            let copied = copied_sender.clone();
            let leaving = Arc::new(Leaving::default());
            copies.leaving.push(Arc::clone(&leaving));
            let thread = Builder::new().name(format!("copy-{gpu}"));
            copies.threads.push(thread.spawn(move || run_jobs(clock, (gpu, &leaving), &jobs, &copied))?);
            copies.jobs.push(sender);
        }
        Ok(copies)
    }

    /// Gives a way its next copy; false if it still has too many of lost sessions.
    pub(super) fn post(&self, gpu: usize, job: Job) -> bool {
        self.jobs[gpu].try_send(job).is_ok()
    }

    /// A model's weights leave a GPU's memory before anything else comes in.
    pub(super) fn free(&self, gpu: usize, executor: Arc<dyn Executor>) {
        if let Some(leaving) = self.leaving.get(gpu).filter(|_| executor.on_gpus().is_some()) {
            leaving.lock().unwrap_or_else(PoisonError::into_inner).push(executor);
        }
    }

    /// The next copy that has ended.
    pub(super) fn poll_copied(&self) -> Option<Copied> {
        self.copied.as_ref()?.try_recv().ok()
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // As with GPUs' threads: they end after the copy that they make.
        self.copied = None;
        self.jobs.clear();
        for thread in self.threads.drain(..) {
            thread.join().expect("nothing in it panics");
        }
    }
}

fn run_jobs(clock: Clock, (gpu, leaving): (usize, &Leaving), jobs: &Receiver<Job>, copied: &Sender<Copied>) {
    reduce_timer_slack();
    for job in jobs {
        let leaving = std::mem::take(&mut *leaving.lock().unwrap_or_else(PoisonError::into_inner));
        leaving.iter().filter_map(|executor| executor.on_gpus()).for_each(|model| model.on(gpu).unload());
        drop(leaving);
        let read = read(clock, &job).and_then(|read| copy(clock, gpu, &job).map(|()| read));
        if copied.send(Copied { session: job.session, gpu, read }).is_err() {
            return;
        }
        job.waker.wake();
    }
}

/// Copies the weights to the GPU.
fn copy(clock: Clock, gpu: usize, job: &Job) -> Result<(), ExecutorError> {
    match job.executor.on_gpus() {
        Some(model) => Ok(model.on(gpu).load()?),
        None => {
            let now = clock.now();
            sleep_until(|| clock.now(), now + job.takes);
            Ok(())
        }
    }
}

/// Sees to it that the weights are in host memory. How long that took.
fn read(clock: Clock, job: &Job) -> Result<Span, ExecutorError> {
    let started_at = clock.now();
    let panicked = || ExecutorError("reading the weights panicked; see the backend's log".to_owned());
    // Also what should be there: a former session may have let it go.
    catch_unwind(AssertUnwindSafe(|| job.executor.read())).unwrap_or_else(|_| Err(panicked()))?;
    match job.read {
        None => return Ok(Span::ZERO),
        Some(_) if job.executor.holds_weights() => {}
        Some(takes) => sleep_until(|| clock.now(), started_at + takes),
    }
    Ok(clock.now() - started_at)
}
