//! Loads a model: finds its executor, warms it up, and measures it where its latency is not known.

use std::sync::Arc;

use proto::{BatchCost, LatencyProfile, Span, Weights};
use repository::{Model, Processor, SLO_MAX};
use transport::Clock;

use super::{
    measuring::Sizes,
    profile::{self, Effort},
    remembered::{self, Note, Of},
    rows, trial,
    turns::{Trials, Turns},
    warmup,
};
use crate::{
    config::{Config, Lanes, Placed, is_on_gpus, onnxruntime::Provider},
    error::{BackendError, ExecutorError},
    executor::{self, Basis, Executor, Loaded, OnGpus, Programs, gpus::Devices},
    staging::ModelShape,
};

/// What a task is taken to take of a model that no sample could be run of, until its requests tell.
const UNKNOWN: Span = Span::from_millis(10);

/// What models are loaded with.
#[derive(Clone)]
pub(crate) struct Means {
    pub(super) clock: Clock,
    pub(super) programs: Programs,
    pub(super) devices: Arc<Devices>,
    pub(super) turns: Turns,
    pub(super) lanes: Lanes,
}

impl Means {
    /// The trials of a load.
    pub(super) fn trials(&self) -> Trials<'_> {
        Trials::new(&self.turns, self.clock)
    }
}

pub(crate) fn load(
    means: &Means,
    config: &Config,
    placed: Placed,
    trials: &mut Trials<'_>,
) -> Result<Loaded, BackendError> {
    let Means { clock, programs, devices, .. } = means;
    let Placed { model, gpu_indexes, mut weights, is_pinned, is_guest } = placed;
    let started_at = clock.now();
    trials.begin(&gpu_indexes);
    let executor = load_executor(&model, &gpu_indexes, (config, programs, devices), trials)?;
    let folder = model.folder(&config.repository);
    let Costs { profile, cost, basis, source } = match executor.on_gpus() {
        Some(on_gpus) => {
            if weights.read > Span::ZERO {
                weights.read = trial::time_read(*clock, on_gpus)?;
            }
            let memory = (weights, config.memory_pages()?.is_some());
            let tried = trial::run(*clock, &model, on_gpus, memory, (Effort::AT_START, trials), &mut |_| {})?;
            weights = tried.weights;
            config.check_weights(&model.name, weights.pages)?;
            // What runs alone does so on the first of them.
            on_gpus.gpus().next().into_iter().for_each(|gpu| trials.go_to(gpu));
            warmup::run(&model, &folder, executor.as_ref(), trials)?;
            let cost = cost((config, &model), executor.as_ref(), (weights, &tried.profile), trials)?;
            Costs { profile: tried.profile, cost, basis: Basis::Sizes, source: "measured" }
        }
        None => {
            if weights.read > Span::ZERO && executor.holds_weights() {
                weights.read = (clock.now() - started_at).clamp(Span(1), SLO_MAX);
            }
            if let Some(gpu) = gpu_of_trials(&model, &gpu_indexes, config.onnxruntime.provider) {
                trials.go_to(gpu);
            }
            if !calls_others(&model) {
                warmup::run(&model, &folder, executor.as_ref(), trials)?;
            }
            if takes_samples(&model) {
                costs(config, &model, executor.as_ref(), trials)
            } else {
                unsampled_costs(&model, executor.as_ref())
            }
        }
    };
    let shape = ModelShape::from(&model);
    let (least, largest) = (profile.latency(1), profile.latency(profile.max_batch()));
    let (name, gpus, waited) = (&model.name, &gpu_indexes, trials.waited());
    tracing::info!(model = name, l_1 = %least, l_max = %largest, profile = source, ?gpus, %waited, "loaded");
    Ok(Loaded { model, shape, gpu_indexes, executor, profile, cost, basis, weights, is_pinned, is_guest })
}

/// With what runs it, where its configuration and this backend's leave that open.
pub(crate) fn choose_engine(config: &Config, mut placed: Placed) -> Placed {
    let model = &mut placed.model;
    if let repository::Executor::Onnx { wanted, .. } = &mut model.executor
        && wanted.processor == Some(Processor::Auto)
    {
        let (engine, why) = executor::choose_engine(&config.onnxruntime, None);
        tracing::info!(model = model.name, "run by {why}");
        wanted.processor = Some(engine);
        config.keep_profile(model);
    }
    placed
}

/// What batches of a model take.
struct Costs {
    profile: LatencyProfile,
    cost: Option<BatchCost>,
    basis: Basis,
    /// How that is known.
    source: &'static str,
}

/// What batches of a model take that we do not run on GPUs ourselves: as it says, as it was measured ahead of time or
/// at an earlier start, or as one task does.
fn costs(config: &Config, model: &Model, executor: &dyn Executor, trials: &mut Trials<'_>) -> Costs {
    let basis = Basis::Sizes;
    if let Some(profile) = known_profile(model, executor) {
        rows::settle(model, executor, Some(profile.latency(1)), trials);
        let cost = profile::first_cost(model, executor, profile.latency(1), trials);
        return Costs { profile, cost, basis, source: "known" };
    }
    // One task runs all the same: the first is slower than others.
    let execute = &mut |inputs: &[u8], outputs: &mut [u8]| executor.execute(inputs, outputs);
    let note = note_of(config, model);
    if let Some((profile, cost, is_apart)) = note.and_then(|note| recall(&note, model.max_batch))
        && profile::sample(model, execute, trials).is_ok()
    {
        if is_apart {
            executor.run_apart();
        }
        return Costs { profile, cost, basis, source: "remembered" };
    }
    match profile::first(model, executor, trials) {
        Ok((_, l_1)) => {
            rows::settle(model, executor, Some(l_1), trials);
            let cost = profile::first_cost(model, executor, l_1, trials);
            Costs { profile: profile::in_turn(l_1, model.max_batch), cost, basis: Basis::One, source: "l(1) measured" }
        }
        Err(error) => {
            let name = &model.name;
            tracing::warn!("model {name}: what it takes is learned from requests, as no sample runs: {error}");
            rows::settle(model, executor, None, trials);
            unknown_costs(model)
        }
    }
}

/// What batches of a model take that runs no samples: as was measured ahead of time, or what requests will take.
fn unsampled_costs(model: &Model, executor: &dyn Executor) -> Costs {
    match known_profile(model, executor) {
        Some(profile) => Costs { profile, cost: None, basis: Basis::Sizes, source: "known" },
        None => unknown_costs(model),
    }
}

/// A model of which nothing is known takes what its requests take.
fn unknown_costs(model: &Model) -> Costs {
    let cost = Some(BatchCost { fixed: UNKNOWN, per_task_ppm: BatchCost::PER_TASK_MAX });
    let profile = profile::in_turn(UNKNOWN, model.max_batch);
    Costs { profile, cost, basis: Basis::Guess, source: "unknown" }
}

/// Whether it asks models that may not be loaded yet.
fn calls_others(model: &Model) -> bool {
    matches!(&model.executor, repository::Executor::Process { program, .. } if program.calls)
}

/// Whether batches that no client has sent may run, and tell what the model takes by itself.
fn takes_samples(model: &Model) -> bool {
    !calls_others(model)
        && !matches!(&model.executor, repository::Executor::Process { program, .. } if !program.samples)
}

/// Where it is remembered what batches of a model take; `None` of what is no file, or is said to take some time.
fn note_of(config: &Config, model: &Model) -> Option<Note> {
    let repository::Executor::Onnx { file, wanted, .. } = &model.executor else { return None };
    let processor = wanted.processor.filter(|processor| *processor != Processor::Cuda)?;
    let mut settings = config.onnxruntime.clone();
    if processor == Processor::Onnxruntime {
        settings.library = Some(executor::onnxruntime_library(&settings, None).ok()?.path);
    }
    Note::of_costs(Of { model, file, processor, settings: &settings }, config.gpus.count() as usize)
}

/// l(b), what unequal tasks cost, and whether tasks run one after another.
fn recall(note: &Note, batch_max: usize) -> Option<(LatencyProfile, Option<BatchCost>, bool)> {
    let costs = note.read::<remembered::Costs>()?;
    let (sizes, cost) = costs.checked(batch_max)?;
    Some((Sizes::new(sizes, batch_max).profile(), cost, costs.is_apart))
}

/// The next start need not measure what was measured.
pub(super) fn remember(config: &Config, model: &Model, costs: &remembered::Costs) {
    if let Some(note) = note_of(config, model) {
        note.write(costs);
    }
}

/// What a batch of unequal tasks takes on GPUs of ours.
fn cost(
    (config, model): (&Config, &Model),
    executor: &dyn Executor,
    (weights, profile): (Weights, &LatencyProfile),
    trials: &mut Trials<'_>,
) -> Result<Option<BatchCost>, BackendError> {
    let is_chosen = ModelShape::from(model).records.inputs;
    if !is_chosen || config.memory_pages()?.is_none() {
        return Ok(profile::cost(model, executor, trials));
    }
    // The weights are there all the time: while it waited for turns they would have pages that the scheduler counts as
    // free.
    let takes = weights.load + Effort::AT_START.takes(profile.latency(profile.max_batch())) * 3;
    Ok(trials.together(takes, |trials| profile::cost(model, executor, trials)))
}

/// The one GPU that a model is tried on that we do not run on GPUs ourselves, if it takes one: ONNX Runtime has a
/// session for each, and what is for none of them runs in the first. What the CPU computes takes it from all of the
/// threads that stand for GPUs.
pub(crate) fn gpu_of_trials(model: &Model, gpu_indexes: &[u32], provider: Provider) -> Option<usize> {
    let runs_it = matches!(
        model.executor,
        repository::Executor::Onnx { wanted, .. } if wanted.processor == Some(Processor::Onnxruntime)
    );
    let first = gpu_indexes.first().map(|&gpu| gpu as usize);
    first.filter(|_| runs_it && provider == Provider::Cuda)
}

pub(crate) fn load_executor(
    model: &Model,
    gpu_indexes: &[u32],
    (config, programs, devices): (&Config, &Programs, &Arc<Devices>),
    trials: &mut Trials<'_>,
) -> Result<Arc<dyn Executor>, ExecutorError> {
    match &model.executor {
        repository::Executor::Onnx { file, batching, wanted, .. } if is_on_gpus(model) => {
            let how = (file.as_path(), batching, wanted.precision.unwrap_or_default());
            let mut turn = |gpu, took| {
                trials.go_to(gpu);
                trials.wait(took);
            };
            Ok(Arc::new(OnGpus::load_in_turns(model, how, gpu_indexes, devices, &mut turn)?))
        }
        _ => executor::load(model, (gpu_indexes, &config.gpus), &config.onnxruntime, programs),
    }
}

/// l(b) without measuring: an emulated GPU says what it is, and a model may have been measured ahead of time.
pub(crate) fn known_profile(model: &Model, executor: &dyn Executor) -> Option<LatencyProfile> {
    let stored = match &model.executor {
        repository::Executor::Onnx { profile, .. } => profile.as_ref().map(|(_, profile)| profile.clone()),
        repository::Executor::Process { profile, .. } => profile.clone(),
        repository::Executor::Emulated { .. } | repository::Executor::Ensemble(_) => None,
    };
    executor.emulated_profile().cloned().or(stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_runs_in_one_session_at_a_time_is_tried_on_the_gpu_of_that() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits");
        let mut model = repository::load_model(&folder).unwrap();
        let mut tried_by = |processor, provider| {
            let repository::Executor::Onnx { wanted, .. } = &mut model.executor else { panic!("it is an ONNX model") };
            wanted.processor = Some(processor);
            gpu_of_trials(&model, &[3, 5], provider)
        };
        assert_eq!(tried_by(Processor::Onnxruntime, Provider::Cuda), Some(3));
        assert_eq!(tried_by(Processor::Onnxruntime, Provider::Cpu), None, "all of them share the CPU");
        assert_eq!(tried_by(Processor::Cpu, Provider::Cuda), None);
    }
}
