//! The ways into GPUs' memories: a thread for each, which makes one copy of weights at a time. All of them are
//! emulated: a copy takes the time that its bytes take. What is not in host memory is read from its file before, unless
//! what runs the model holds no weights: then that time passes, too.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender};
use proto::Span;
use transport::{Clock, Waker};

use super::gpu::sleep_until;
use crate::executor::{Executor, ExecutorError};

/// A way has one copy to make at a time; a second waits only while one of a lost session ends.
const JOBS_MAX: usize = 2;

/// A copy to make.
pub(super) struct Job {
    /// Comes back with the result.
    pub(super) session: u64,
    /// How long it takes.
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

/// The threads.
pub(super) struct Copies {
    jobs: Vec<Sender<Job>>,
    copied: Option<Receiver<Copied>>,
    threads: Vec<JoinHandle<()>>,
}

impl Copies {
    pub(super) fn start(clock: Clock, count: usize) -> io::Result<Self> {
        let (copied_sender, copied) = crossbeam_channel::bounded((count * (JOBS_MAX + 1)).max(1));
        let mut copies = Self { jobs: Vec::new(), copied: Some(copied), threads: Vec::new() };
        for gpu in 0..count {
            let (sender, jobs) = crossbeam_channel::bounded(JOBS_MAX);
            let copied = copied_sender.clone();
            let thread = Builder::new().name(format!("copy-{gpu}"));
            copies.threads.push(thread.spawn(move || run_jobs(clock, gpu, &jobs, &copied))?);
            copies.jobs.push(sender);
        }
        Ok(copies)
    }

    /// Gives a way its next copy; false if it still has too many of lost sessions.
    pub(super) fn post(&self, gpu: usize, job: Job) -> bool {
        self.jobs[gpu].try_send(job).is_ok()
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

fn run_jobs(clock: Clock, gpu: usize, jobs: &Receiver<Job>, copied: &Sender<Copied>) {
    super::reduce_timer_slack();
    for job in jobs {
        let read = read(clock, &job);
        let now = clock.now();
        sleep_until(|| clock.now(), now + job.takes);
        if copied.send(Copied { session: job.session, gpu, read }).is_err() {
            return;
        }
        job.waker.wake();
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
