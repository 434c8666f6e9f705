//! What becomes known of a model when its GPUs run it for the first time: how long its weights take to each of them,
//! and l(b). Both are those of the slowest GPU, as one profile is offered for all.

use proto::{LatencyProfile, Span, Weights};
use repository::{Model, SLO_MAX, cell};
use transport::{Clock, Region};

use super::{
    profile::{self, Effort, Measured},
    turns::Trials,
};
use crate::{
    error::{ExecutorError, TaskError},
    executor::{Executor as _, OnGpus},
};

/// What was found.
pub(super) struct Tried {
    /// What was measured of each batch size that GPUs are prepared for; nothing if they have no room for it now.
    pub(super) measured: Vec<Measured>,
    /// l(b): a step function, as batches between those sizes are rounded up.
    pub(super) profile: LatencyProfile,
    /// What it takes in GPUs' memory, if that is short.
    pub(super) weights: Weights,
}

/// Runs a model on all its GPUs. If their memory is short it leaves it again; otherwise it stays there for good.
///
/// # Errors
/// If it cannot be run.
pub(super) fn run(
    clock: Clock,
    model: &Model,
    on_gpus: &OnGpus,
    (weights, is_short): (Weights, bool),
    (effort, trials): (Effort, &mut Trials<'_>),
    progress: &mut dyn FnMut(usize),
) -> Result<Tried, ExecutorError> {
    let mut tried = Tried { measured: Vec::new(), profile: registered(model, on_gpus), weights };
    let mut load = Span(1);
    for gpu in on_gpus.gpus() {
        trials.go_to(gpu);
        let on = On { name: &model.name, on_gpus, gpu, is_short };
        let started_at = clock.now();
        let measured = match on.load()? {
            Some(()) => {
                load = load.max(clock.now() - started_at);
                let measured = measure(model, (on, load), (effort, trials), progress);
                if is_short {
                    on_gpus.on(gpu).unload();
                }
                measured?
            }
            None => None,
        };
        let Some(measured) = measured else {
            tracing::info!(gpu, model = model.name, "l(b) is that of registration: other models fill the memory");
            load = weights.load;
            tried.measured.clear();
            break;
        };
        keep_slowest(&mut tried.measured, measured);
    }
    if !tried.measured.is_empty() {
        tried.profile = steps(tried.measured.iter().map(|size| (size.batch, size.estimate)));
    }
    let read = weights.read;
    let short = Weights { pages: on_gpus.pages(), load: load.clamp(Span(1), SLO_MAX), read };
    tried.weights = if is_short { short } else { Weights::default() };
    Ok(tried)
}

/// Where a model is tried.
#[derive(Clone, Copy)]
struct On<'a> {
    name: &'a str,
    on_gpus: &'a OnGpus,
    gpu: usize,
    /// Its memory is, and pages of it that are free are what the scheduler loads other models to.
    is_short: bool,
}

impl On<'_> {
    /// Takes the weights there; `None` if the memory is short, and has no room for them now.
    fn load(self) -> Result<Option<()>, ExecutorError> {
        match self.on_gpus.on(self.gpu).load() {
            Ok(()) => Ok(Some(())),
            Err(cuda::GpuError::NoRoom { .. }) if self.is_short => Ok(None),
            Err(error) => Err(ExecutorError(format!("model {} on GPU {}: {error}", self.name, self.gpu))),
        }
    }

    /// Runs which take so long together. Where memory is short they have one turn, and the weights are there in that
    /// only: what waits for a turn has no pages that the scheduler counts as free. `None` if there is no room for them.
    fn in_turns<T>(
        self,
        takes: Span,
        trials: &mut Trials<'_>,
        run: impl FnOnce(&mut Trials<'_>) -> Result<T, ExecutorError>,
    ) -> Result<Option<T>, ExecutorError> {
        if !self.is_short {
            return run(trials).map(Some);
        }
        let hosted = self.on_gpus.on(self.gpu);
        hosted.unload();
        trials.together(takes, |trials| {
            let result = self.load()?.map(|()| run(trials)).transpose();
            hosted.unload();
            result
        })
    }
}

/// Runs the model's batch sizes on one GPU, with the inputs' copies: batches that were planned late are as slow. `None`
/// if there is no room any more; `load` is what its weights take to it.
fn measure(
    model: &Model,
    (on, load): (On<'_>, Span),
    (effort, trials): (Effort, &mut Trials<'_>),
    progress: &mut dyn FnMut(usize),
) -> Result<Option<Vec<Measured>>, ExecutorError> {
    let On { on_gpus, gpu, .. } = on;
    let once = |result: Result<Vec<TaskError>, ExecutorError>| profile::all_ran(result?);
    let batch_takes = |batch: usize| on_gpus.registered(batch, profile::QUANTILE);
    let sizes = on_gpus.sizes().iter();
    if !on_gpus.takes_inputs_ahead() {
        return on_gpus.try_records_on(gpu, |execute| {
            let takes = load + batch_takes(1);
            let sample = on.in_turns(takes, trials, |trials| profile::sample(model, execute, trials))?;
            let Some(sample) = sample else { return Ok(None) };
            let measured = sizes.map(|&batch| {
                progress(batch);
                let (inputs, mut outputs) = (sample.repeat(batch), vec![0; batch * model.output_bytes()]);
                on.in_turns(load + effort.takes(batch_takes(batch)), trials, |trials| {
                    profile::time((effort, trials), batch, &mut || once(execute(&inputs, &mut outputs)))
                })
            });
            measured.collect()
        });
    }
    let sample = cell::sample(&model.inputs, &model.outputs, 1);
    let largest = on_gpus.sizes().last().copied().unwrap_or(1);
    let bytes = largest * (model.input_bytes() + model.output_bytes());
    let region = Region::allocate(bytes).map_err(|error| ExecutorError(format!("memory for a batch: {error}")))?;
    region.write(0, &sample.repeat(largest));
    on_gpus.try_on(gpu, &region, |run_batch| {
        let measured = sizes.map(|&batch| {
            progress(batch);
            on.in_turns(load + effort.takes(batch_takes(batch)), trials, |trials| {
                profile::time((effort, trials), batch, &mut || once(run_batch(batch)))
            })
        });
        measured.collect()
    })
}

fn keep_slowest(slowest: &mut Vec<Measured>, measured: Vec<Measured>) {
    if slowest.is_empty() {
        *slowest = measured;
        return;
    }
    for (slowest, measured) in slowest.iter_mut().zip(measured) {
        if measured.estimate > slowest.estimate {
            *slowest = measured;
        }
    }
}

/// l(b) as the GPUs' own clocks had it when the model was registered, without what comes before and after.
fn registered(model: &Model, on_gpus: &OnGpus) -> LatencyProfile {
    let sizes = on_gpus.sizes().iter();
    let points: Vec<_> = sizes.map(|&batch| (batch, on_gpus.registered(batch, profile::QUANTILE))).collect();
    debug_assert_eq!(points.last().map(|point| point.0), Some(model.max_batch));
    steps(points.into_iter())
}

/// l(b) for every b: what the next of these sizes takes, and never less than a smaller one.
fn steps(points: impl Iterator<Item = (usize, Span)>) -> LatencyProfile {
    let mut table: Vec<Span> = Vec::new();
    for (batch, measured) in points {
        let reached = table.last().copied().unwrap_or(Span(1)).max(measured);
        table.resize(batch, reached);
    }
    LatencyProfile::from_table(table).expect("positive and monotone by construction")
}

/// How long a model's weights take from disk: as long as they are read now.
///
/// # Errors
/// If they cannot be read any more.
pub(super) fn time_read(clock: Clock, on_gpus: &OnGpus) -> Result<Span, ExecutorError> {
    on_gpus.release();
    let started_at = clock.now();
    on_gpus.read()?;
    Ok((clock.now() - started_at).clamp(Span(1), SLO_MAX))
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use std::{path::Path, sync::Arc, thread};

    use cuda::Fake;
    use repository::{Batching, Precision};
    use transport::{Endpoint, EndpointConfig};

    use super::*;
    use crate::{config::Config, drive::turns::Turns, executor::gpus::Devices};

    fn digits() -> Model {
        repository::load_model(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits")).unwrap()
    }

    /// A GPU that is none, with a page for weights: as many as the digits take.
    fn short() -> Arc<Devices> {
        let config: Config = toml::from_str(
            "scheduler = '127.0.0.1:7000'\nsecret = 'known to the cluster'\nrepository = 'models'\ngpus = 1\n\
             share_gpu = true\ngpu_memory_mb = 16.777216\n",
        )
        .unwrap();
        Devices::new(&config, Box::new(|_| Ok(Fake::new(40, 1))), crossbeam_channel::unbounded().0).unwrap()
    }

    fn on(devices: &Arc<Devices>) -> Arc<OnGpus> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits/1/model.onnx");
        let how = (&*file, &Batching::equal(1, 1), Precision::Fp32);
        Arc::new(OnGpus::load(&digits(), how, &[0], devices).unwrap())
    }

    /// Tries the digits while a session serves. `waits` is told of each turn that is waited for, and of how many there
    /// were before.
    fn run_beside(on_gpus: &Arc<OnGpus>, mut waits: impl FnMut(usize)) -> Tried {
        let turns = Turns::default();
        let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
        turns.open(endpoint.waker());
        let (loader, on_gpus) = (turns.clone(), Arc::clone(on_gpus));
        let tried = thread::spawn(move || {
            let effort = Effort { every_size: false, warm_up: 0, runs_max: 3, span: Span::ZERO };
            let (clock, memory) = (Clock::start(), (Weights::new(1, Span(1)), true));
            let mut trials = Trials::new(&loader, clock);
            run(clock, &digits(), &on_gpus, memory, (effort, &mut trials), &mut |_| {}).unwrap()
        });
        let mut before = 0;
        while !tried.is_finished() {
            if turns.poll_wanted().is_some() {
                waits(before);
                before += 1;
                turns.give(true);
            }
            thread::yield_now();
        }
        tried.join().unwrap()
    }

    #[test]
    fn what_waits_for_a_turn_has_no_pages_of_a_short_memory() {
        let on_gpus = on(&short());
        let (gpu, mut turns) = (on_gpus.on(0).gpu(), 0);
        let tried = run_beside(&on_gpus, |before| {
            turns = before + 1;
            assert_eq!(gpu.weights_pages_free(), 1, "the scheduler loads other models there");
        });
        assert_eq!((turns, tried.measured.len()), (on_gpus.sizes().len(), on_gpus.sizes().len()));
        assert_eq!((gpu.weights_pages_free(), tried.weights.pages), (1, 1));
    }

    #[test]
    fn a_memory_that_fills_between_two_turns_leaves_what_registration_has_measured() {
        let devices = short();
        let (on_gpus, other) = (on(&devices), on(&devices));
        let tried = run_beside(&on_gpus, |before| {
            if before == 1 {
                other.on(0).load().unwrap();
            }
        });
        assert!(tried.measured.is_empty() && other.on(0).is_resident());
        assert_eq!(tried.profile, registered(&digits(), &on_gpus));
    }

    #[test]
    fn sizes_between_those_that_were_captured_take_as_long_as_the_next() {
        let profile = steps([(1, Span(10)), (2, Span(8)), (4, Span(30))].into_iter());
        let found: Vec<Span> = (1..=4).map(|batch| profile.latency(batch)).collect();
        assert_eq!(found, [10, 10, 30, 30].map(Span));
    }
}
