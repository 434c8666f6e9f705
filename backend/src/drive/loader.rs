//! A thread that loads models while others are served: reads them from the repository, prepares and measures them. It
//! touches nothing that serves; what it has loaded is handed over whole.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::Builder,
};

use crossbeam_channel::{Receiver, Sender};
use proto::LoadId;
use transport::{Clock, Waker};

use super::load;
use crate::{config::Config, loaded::Loaded};

/// Loads that may wait for the one that runs.
const JOBS_MAX: usize = 64;

/// A model to load.
pub(super) struct Job {
    /// Comes back with the result.
    pub(super) session: u64,
    /// Comes back with the result.
    pub(super) load: LoadId,
    /// Its name in the repository.
    pub(super) name: String,
    /// Whom to wake when it has ended.
    pub(super) waker: Waker,
}

/// How a load ended.
pub(super) struct Done {
    pub(super) session: u64,
    pub(super) load: LoadId,
    /// Nothing if the configuration places it on no GPU; otherwise why it cannot be run.
    pub(super) result: Result<Option<Loaded>, String>,
}

/// The thread. It ends after its present load when this is dropped.
pub(super) struct Loader {
    jobs: Sender<Job>,
    done: Receiver<Done>,
}

impl Loader {
    pub(super) fn start(clock: Clock, config: Config) -> io::Result<Self> {
        let (jobs, to_do) = crossbeam_channel::bounded(JOBS_MAX);
        let (results, done) = crossbeam_channel::bounded(JOBS_MAX);
        Builder::new().name("loader".to_owned()).spawn(move || run(clock, &config, &to_do, &results))?;
        Ok(Self { jobs, done })
    }

    /// Begins a load; false if too many wait already.
    pub(super) fn post(&self, job: Job) -> bool {
        self.jobs.try_send(job).is_ok()
    }

    /// The next load that has ended.
    pub(super) fn poll_done(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}

fn run(clock: Clock, config: &Config, jobs: &Receiver<Job>, results: &Sender<Done>) {
    for Job { session, load, name, waker } in jobs {
        let result = catch_unwind(AssertUnwindSafe(|| load_named(clock, config, &name)));
        let result = result.unwrap_or_else(|_| Err(format!("loading {name} panicked; see the backend's log")));
        if results.send(Done { session, load, result }).is_err() {
            return;
        }
        waker.wake();
    }
}

fn load_named(clock: Clock, config: &Config, name: &str) -> Result<Option<Loaded>, String> {
    let model = repository::load_named(&config.repository, name).map_err(|error| error.to_string())?;
    let Some(placed) = config.place_one(model).map_err(|error| error.to_string())? else { return Ok(None) };
    load(clock, placed).map(Some).map_err(|error| error.to_string())
}
