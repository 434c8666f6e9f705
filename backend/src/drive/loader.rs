//! A thread that loads models while others are served: reads them from the repository and prepares them. It touches
//! nothing that serves; what it has loaded is handed over whole. What is served it measures while nothing else runs.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Weak,
    thread::Builder,
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use proto::{BatchCost, Brought, LatencyProfile, LoadId, ModelId, Timestamp};
use repository::{Source, Stamp, Store};
use transport::Waker;

use super::{
    loading::{Means, choose_engine, load},
    measuring::{Measure, Measuring, Step},
    probe::{self, Origin},
    turns::Trials,
};
use crate::{
    config::{Config, Placed},
    error::{BackendError, ExecutorError},
    executor::Loaded,
};

/// Jobs that may wait for the one that runs.
const JOBS_MAX: usize = 64;
/// When GPUs that were not idle are asked for again.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// What it is to do.
pub(super) enum Job {
    Load(Load),
    Measure(Measure),
}

/// A model to load.
pub(super) struct Load {
    /// Comes back with the result.
    pub(super) session: u64,
    /// Comes back with the result.
    pub(super) load: LoadId,
    /// Its name in the repository.
    pub(super) name: String,
    /// What is to be loaded instead of what the repository has.
    pub(super) brought: Option<Brought>,
    /// On all GPUs where the configuration places it on none.
    pub(super) is_placed: bool,
    /// When it was asked for.
    pub(super) asked_at: Timestamp,
    /// Whom to wake when it has ended.
    pub(super) waker: Waker,
}

/// How a job ended.
pub(super) enum Done {
    Loaded {
        session: u64,
        load: LoadId,
        /// Its versions; none if the configuration places it on no GPU; `None` if it is an ensemble; otherwise why it
        /// cannot be run.
        result: Result<Option<Vec<Loaded>>, String>,
    },
    Measured {
        session: u64,
        model: ModelId,
        /// What was measured.
        of: Weak<Loaded>,
        /// `None` if nothing more could be learned.
        measured: Option<(LatencyProfile, Option<BatchCost>)>,
    },
}

/// The thread. It ends after its present load when this is dropped.
pub(super) struct Loader {
    jobs: Sender<Job>,
    done: Receiver<Done>,
}

impl Loader {
    pub(super) fn start(config: Config, store: Option<Store>, means: Means) -> io::Result<Self> {
        let (jobs, to_do) = crossbeam_channel::bounded(JOBS_MAX);
        let (results, done) = crossbeam_channel::bounded(JOBS_MAX);
        Builder::new().name("loader".to_owned()).spawn(move || {
            let with = With { config: &config, store: store.as_ref(), means: &means };
            run(with, &to_do, &results);
        })?;
        Ok(Self { jobs, done })
    }

    /// Begins a job; false if too many wait already.
    pub(super) fn post(&self, job: Job) -> bool {
        self.jobs.try_send(job).is_ok()
    }

    /// The next job that has ended.
    pub(super) fn poll_done(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}

/// What all loads have in common.
#[derive(Clone, Copy)]
struct With<'a> {
    config: &'a Config,
    store: Option<&'a Store>,
    means: &'a Means,
}

/// Loads go first; what is to be measured is, batch by batch, as long as there are none.
fn run(with: With<'_>, jobs: &Receiver<Job>, results: &Sender<Done>) {
    let mut measuring: Option<Measuring> = None;
    let mut is_put_off = false;
    loop {
        let job = match &measuring {
            None => jobs.recv().map_err(RecvTimeoutError::from),
            Some(_) if is_put_off => jobs.recv_timeout(AGAIN_AFTER),
            Some(_) => jobs.try_recv().map_err(|none| match none {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
        };
        is_put_off = false;
        let done = match job {
            Ok(Job::Load(load)) => Some(with.run_load(load, jobs)),
            Ok(Job::Measure(next)) => {
                measuring = Some(Measuring::new(next));
                None
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let step = measuring.as_mut().map_or(Step::Over(None), |measuring| with.step(measuring));
                is_put_off = matches!(step, Step::PutOff);
                match step {
                    Step::Over(measured) => measuring.take().map(|measuring| measuring.done(measured)),
                    Step::Made | Step::PutOff => None,
                }
            }
        };
        if let Some((done, waker)) = done {
            if results.send(done).is_err() {
                return;
            }
            waker.wake();
        }
    }
}

impl With<'_> {
    fn run_load(self, job: Load, jobs: &Receiver<Job>) -> (Done, Waker) {
        let Load { session, load, name, brought, is_placed, asked_at, waker } = job;
        let behind = || jobs.len();
        let trials = self.means.trials().of_load(asked_at, &behind);
        let result = catch_unwind(AssertUnwindSafe(|| self.load_named((&name, is_placed), brought.as_ref(), trials)));
        let result = result.unwrap_or_else(|_| Err(format!("loading {name} panicked; see the backend's log")));
        (Done::Loaded { session, load, result }, waker)
    }

    fn step(self, measuring: &mut Measuring) -> Step {
        let step = AssertUnwindSafe(|| measuring.step(self.means, self.config));
        catch_unwind(step).unwrap_or(Step::Over(None))
    }

    fn load_named(
        self,
        (name, is_placed): (&str, bool),
        brought: Option<&Brought>,
        mut trials: Trials<'_>,
    ) -> Result<Option<Vec<Loaded>>, String> {
        let Self { config, store, means } = self;
        let mut load = || -> Result<Option<Vec<Loaded>>, BackendError> {
            let source = Source::of(&config.repository, store, brought)?;
            let folder = repository::folder_of(source.root(), name)?;
            let stamp = Stamp::of(&folder)?;
            let written = brought.map(|brought| &brought.config[..]);
            let versions = repository::load_named(&source, name, written)?;
            if versions.iter().any(|model| model.ensemble().is_some()) {
                return Ok(None);
            }
            let origin = Origin { root: source.root(), config: written };
            let placed = versions.into_iter().filter_map(|model| {
                if is_placed { Some(config.place_guest(model)) } else { config.place_one(model).transpose() }
            });
            // As Triton says it.
            let failed = |version: &str, error: BackendError| {
                ExecutorError(format!("load failed for model '{name}': version {version}: {error}"))
            };
            let mut load_one = |mut placed: Placed| {
                means.lanes.give(&mut placed);
                let version = placed.model.version.clone();
                let placed = choose_engine(config, placed);
                let tried = probe::one(config, &placed.model, origin).map_err(BackendError::from);
                let loaded = tried.and_then(|()| load(means, config, placed, &mut trials));
                loaded.map_err(|error| BackendError::from(failed(&version, error)))
            };
            let loaded = placed.map(|placed| placed.and_then(&mut load_one)).collect::<Result<_, _>>()?;
            stamp.check(&folder)?;
            Ok(Some(loaded))
        };
        load().map_err(|error| error.to_string())
    }
}
