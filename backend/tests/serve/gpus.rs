//! The same with GPUs that are none ([`cuda::Fake`]): all of a backend but NVIDIA's libraries.

use backend::drive::run_on;
use cuda::Fake;
use proto::{
    GpuId,
    backend_to_scheduler::{ResidentModel, WeightsOutcome},
};
use repository::{Precision, Processor};

use super::*;

/// What is set aside of a GPU's memory, and some pages for weights.
const PAGES: usize = 400;
const GPU: GpuId = GpuId(7);
const MODEL: ModelId = ModelId(5);

/// A backend on two GPUs. When it has ended, all that it took of them has been given back, or they panic.
fn start(change: impl FnOnce(&mut Config)) -> Cluster {
    let fakes: Vec<Arc<Fake>> = (0..2).map(|seed| Fake::new(PAGES, seed)).collect();
    let open = move |name: &str| Ok(Arc::clone(&fakes[name.parse::<usize>().unwrap()]) as Arc<dyn cuda::Driver>);
    let on_cuda = |config: &mut Config| {
        (config.executor, config.precision) = (Processor::Cuda, Precision::Fp32);
        change(config);
    };
    Cluster::start_running(None, on_cuda, move |config, stop| run_on(config, stop, Box::new(open)))
}

#[test]
fn held_out_digits_are_classified_on_gpus_as_in_training() {
    let mut cluster = start(|_| {});
    assert_eq!(classify(&mut cluster), RIGHT);
    let offer = &cluster.hello.as_ref().unwrap().models[0];
    assert_eq!((offer.profile.max_batch(), &offer.gpu_indexes), (64, &vec![0, 1]));
    let l = |batch| offer.profile.latency(batch);
    assert_eq!((l(49), l(9), l(5)), (l(64), l(12), l(6)), "batches are rounded up to what was captured");
}

#[test]
fn batches_that_wait_for_each_other_have_their_inputs_sent_ahead_and_right_answers() {
    let mut cluster = start(|_| {});
    let images = held_out();
    for (slot, (_, image)) in images.iter().enumerate() {
        cluster.arena.write(slot * IMAGE_BYTES, image);
    }
    cluster.await_linked();
    let plans = 12;
    for id in 0..plans {
        cluster.plan(id, 0, id as usize * 30..(id as usize + 1) * 30);
    }
    let tasks = plans as usize * 30;
    cluster.run_until("the answers", |cluster| cluster.answers.len() == tasks);
    let best = |output: &[f32]| (0..CLASSES).max_by(|&a, &b| output[a].total_cmp(&output[b]));
    let answers = std::mem::take(&mut cluster.answers);
    let right = answers.iter().filter(|(slot, answer)| best(&answer.output) == Some(images[**slot].0)).count();
    assert!(answers.values().all(|answer| answer.header.status == AnswerStatus::Done));
    // Of all of them it is 440 in 450.
    assert!(right > tasks * 95 / 100, "{right} of {tasks}");
}

/// Waits for a report of weights, and drops the rest.
fn await_weights<T>(cluster: &mut Cluster, what: &str, wanted: impl Fn(&BackendToScheduler) -> Option<T>) -> T {
    let mut found = None;
    cluster.run_until(what, |cluster| {
        found = cluster.reports.drain(..).find_map(|report| wanted(&report));
        found.is_some()
    });
    found.unwrap()
}

fn load(cluster: &mut Cluster) -> WeightsOutcome {
    let now = cluster.clock.now();
    let latest = now + Span::from_millis(10_000);
    cluster.tell(&SchedulerToBackend::LoadWeights { gpu: GPU, model: MODEL, earliest: now, latest });
    await_weights(cluster, "the load", |report| match report {
        Addressed::ModelThread(BackendToModelThread::WeightsLoaded { gpu: GPU, model: MODEL, outcome }) => {
            Some(*outcome)
        }
        _ => None,
    })
}

/// Runs three tasks; whether they were executed.
fn runs(cluster: &mut Cluster, plan: u64) -> bool {
    cluster.plan(plan, 0, 0..3);
    cluster.run_until("the answers", |cluster| cluster.answers.len() == 3);
    let answers = std::mem::take(&mut cluster.answers);
    answers.values().all(|answer| answer.header.status == AnswerStatus::Done)
}

#[test]
fn weights_come_and_go_as_the_scheduler_says_and_no_batch_runs_without_them() {
    let mut cluster = start(|config| config.gpu_memory_mb = Some(40.0));
    let images = held_out();
    for (slot, (_, image)) in images.iter().take(3).enumerate() {
        cluster.arena.write(slot * IMAGE_BYTES, image);
    }
    cluster.await_linked();
    let weights = cluster.hello.as_ref().unwrap().models[0].weights;
    assert_eq!((weights.pages, weights.load > Span::ZERO), (1, true), "measured when it was registered");
    cluster.tell(&SchedulerToBackend::AskResident { gpu_index: 0, gpu: GPU });
    let resident = await_weights(&mut cluster, "what is resident", |report| match report {
        Addressed::Control(BackendToControl::Resident { gpu: GPU, models, is_last: true }) => Some(models.clone()),
        _ => None,
    });
    assert_eq!(resident, [] as [ResidentModel; 0], "it has left the GPU when it was registered");
    assert!(!runs(&mut cluster, 1));
    for turn in 0..3 {
        assert!(matches!(load(&mut cluster), WeightsOutcome::Loaded { .. }), "turn {turn}");
        assert!(runs(&mut cluster, 10 + turn), "turn {turn}");
        cluster.tell(&SchedulerToBackend::UnloadWeights { gpu: GPU, model: MODEL });
        assert!(!runs(&mut cluster, 20 + turn), "turn {turn}");
    }
}

#[test]
fn a_backend_without_the_gpu_that_it_needs_does_not_start_and_says_why() {
    let open = |_: &str| Err(cuda::DriverError("no libcuda: looked for libcuda.so.1 in /nowhere".into()));
    let text = "scheduler = '127.0.0.1:7000'\nsecret = 'known to the cluster'\nexecutor = 'cuda'\n";
    let config: Config = toml::from_str(&format!("{text}repository = '{}'", models().display())).unwrap();
    let error = run_on(&config, &AtomicBool::new(true), Box::new(open)).unwrap_err().to_string();
    assert_eq!(error, "GPU 0: no libcuda: looked for libcuda.so.1 in /nowhere");
}
