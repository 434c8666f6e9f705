//! Memory that holds a part of what is hosted.

use proto::{
    GpuId,
    backend_to_scheduler::WeightsOutcome,
    weights::{TALLY_INTERVAL, WeightsTally},
};

use super::*;

const GPU: GpuId = GpuId(40);
const MODEL: ModelId = ModelId(5);

/// Has a link to the frontend, and memory for the weights of its model.
fn backend() -> Backend {
    let weights = Weights { pages: 7, load: Span::from_millis(8) };
    let mut backend = Backend::with(1, Loaded { weights, ..loaded("m", 8) }, Some(10)).welcomed_by(&[]);
    let nothing = WeightsTally { pages: 10, ..WeightsTally::default() };
    let expected = [(SCHEDULER, obeys(1)), (SCHEDULER, BackendToScheduler::Weights(nothing))];
    assert_eq!(backend.reports(), expected);
    backend.link();
    assert_eq!(backend.reports(), [(SCHEDULER, LINKED)]);
    backend
}

fn ask(backend: &mut Backend, gpu: GpuId) -> Vec<ModelId> {
    backend.tell(SCHEDULER, &SchedulerToBackend::AskResident { gpu_index: 0, gpu });
    let reports = backend.reports();
    let [(SCHEDULER, BackendToScheduler::Resident { gpu: named, models, is_last: true })] = &reports[..] else {
        panic!("{reports:?}")
    };
    assert_eq!(*named, gpu);
    models.clone()
}

/// Orders a load, which begins at once.
fn load(backend: &mut Backend) {
    let latest = NOW + Span::from_millis(20);
    backend.tell(SCHEDULER, &SchedulerToBackend::LoadWeights { gpu: GPU, model: MODEL, earliest: NOW, latest });
    let outputs = backend.outputs();
    assert!(
        matches!(outputs[..], [Output::CopyWeights { gpu: 0, takes, .. }] if takes == Span::from_millis(8)),
        "{outputs:?}"
    );
}

/// What becomes of a plan whose input has come.
fn executes(backend: &mut Backend) -> Vec<Output> {
    backend.tell(SCHEDULER, &plan(0, 0));
    let outputs = backend.outputs();
    let [Output::Read { connection, transfer, .. }] = outputs[..] else { panic!("a plan is read: {outputs:?}") };
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    backend.outputs()
}

#[test]
fn weights_come_before_their_batches_and_stay_while_these_run() {
    let mut backend = backend();
    assert_eq!(ask(&mut backend, GPU), []);
    load(&mut backend);
    let at = NOW + Span::from_millis(2);
    backend.0.handle_copied(at, 0, true);
    let outcome = WeightsOutcome::Loaded { started_at: NOW, finished_at: at };
    assert_eq!(backend.reports(), [(SCHEDULER, BackendToScheduler::WeightsLoaded { gpu: GPU, model: MODEL, outcome })]);
    assert!(matches!(executes(&mut backend)[..], [Output::Execute { gpu: 0, .. }]));
    backend.tell(SCHEDULER, &SchedulerToBackend::UnloadWeights { gpu: GPU, model: MODEL });
    assert!(backend.reports().is_empty());

    let tells_at = NOW + TALLY_INTERVAL;
    assert!(backend.0.poll_timeout() <= tells_at);
    backend.0.handle_timeout(tells_at);
    let reports = backend.reports();
    let tally = |pages_used| {
        let busy = Span::from_millis(2);
        WeightsTally { loads: 1, evictions: 1, busy, pages: 10, pages_used, ..WeightsTally::default() }
    };
    assert!(reports.contains(&(SCHEDULER, BackendToScheduler::Weights(tally(7)))), "{reports:?}");
    backend.0.handle_executed(tells_at, 0, Execution::WindowMissed { rejected_at: NOW });
    assert!(backend.outputs().iter().any(|output| matches!(output, Output::FreeWeights { gpu: 0, .. })));
    backend.0.handle_timeout(tells_at + TALLY_INTERVAL);
    assert!(backend.reports().contains(&(SCHEDULER, BackendToScheduler::Weights(tally(0)))), "the batch has ended");
}

#[test]
fn a_batch_without_its_weights_misses_its_window_and_the_primary_is_told_once() {
    let mut backend = backend();
    assert_eq!(ask(&mut backend, GPU), []);
    for is_first in [true, false] {
        let outputs = executes(&mut backend);
        let [Output::Write { connection, transfer, .. }, Output::Send { frame, .. }] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        let mut reports = read_frame(frame).map(Result::unwrap);
        if is_first {
            assert_eq!(reports.next(), Some(BackendToScheduler::WeightsMissing { gpu: GPU }));
        }
        let missed = PlanOutcome::WindowMissed { rejected_at: NOW };
        assert!(matches!(reports.next(), Some(BackendToScheduler::PlanDone { outcome, .. }) if outcome == missed));
        let token = transfer.token;
        backend.0.handle_event(NOW, Event::WriteDone { connection: *connection, token, result: Ok(()) });
        assert_eq!(backend.reports().len(), 1, "answered");
    }
}

#[test]
fn a_primary_is_told_what_is_there_and_nothing_of_what_another_one_ordered() {
    let mut backend = backend();
    assert_eq!(ask(&mut backend, GPU), []);
    load(&mut backend);
    let again = GpuId(41);
    assert_eq!(ask(&mut backend, again), [], "it has not arrived");
    backend.0.handle_copied(NOW, 0, true);
    assert!(matches!(backend.outputs()[..], [Output::FreeWeights { gpu: 0, .. }]));
    assert_eq!(ask(&mut backend, GPU), [], "and is not there");
    load(&mut backend);
    backend.0.handle_copied(NOW, 0, true);
    assert_eq!(backend.reports().len(), 1);
    assert_eq!(ask(&mut backend, again), [MODEL]);
    backend.tell(SCHEDULER, &SchedulerToBackend::UnloadWeights { gpu: GPU, model: MODEL });
    assert_eq!(ask(&mut backend, GPU), [MODEL], "nobody calls it so");
}

#[test]
fn a_copy_that_hangs_takes_its_gpu_out_of_use() {
    let mut backend = backend();
    assert_eq!(ask(&mut backend, GPU), []);
    load(&mut backend);
    let gives_up_at = NOW + Span::from_millis(1_000);
    backend.0.handle_timeout(gives_up_at);
    let usable = |is_usable| (SCHEDULER, BackendToScheduler::Usable { gpu_index: 0, is_usable });
    assert!(backend.reports().contains(&usable(false)));
    let back_at = gives_up_at + Span::from_millis(500);
    backend.0.handle_copied(back_at, 0, true);
    backend.0.handle_timeout(back_at + Span::from_millis(1_000));
    assert!(backend.reports().contains(&usable(true)));
}

#[test]
fn a_scheduler_that_asks_for_what_is_not_there_is_lost() {
    let mut backend = Backend::linked();
    backend.tell(SCHEDULER, &SchedulerToBackend::AskResident { gpu_index: 0, gpu: GPU });
    assert_eq!(backend.0.ended(), Some("it asks what is in the memory of GPU 0, which has none"));
}
