//! Memory that holds a part of what is hosted.

use proto::{
    GpuId,
    backend_to_scheduler::{ResidentModel, WeightsOutcome},
    weights::{TALLY_INTERVAL, WeightsTally},
};

use super::*;

const GPU: GpuId = GpuId(40);
const MODEL: ModelId = ModelId(5);

/// Has a link to the frontend, and memory for the weights of its model.
fn backend() -> Backend {
    let weights = Weights::new(7, Span::from_millis(8));
    let mut backend = Backend::with(1, Loaded { weights, ..loaded("m", 8) }, (Some(10), None)).welcomed_by(&[]);
    let nothing = WeightsTally { pages: 10, ..WeightsTally::default() };
    let expected = [(SCHEDULER, obeys(1)), (SCHEDULER, Addressed::Control(BackendToControl::Weights(nothing)))];
    assert_eq!(backend.reports(), expected);
    backend.link();
    assert_eq!(backend.reports(), [(SCHEDULER, LINKED)]);
    backend
}

fn ask(backend: &mut Backend, gpu: GpuId) -> Vec<ModelId> {
    backend.tell(SCHEDULER, &SchedulerToBackend::AskResident { gpu_index: 0, gpu });
    let reports = backend.reports();
    let [(SCHEDULER, Addressed::Control(BackendToControl::Resident { gpu: named, models, is_last: true }))] =
        &reports[..]
    else {
        panic!("{reports:?}")
    };
    assert_eq!(*named, gpu);
    models.iter().map(|resident| resident.model).collect()
}

/// Orders a load, which begins at once.
fn load(backend: &mut Backend) {
    let latest = NOW + Span::from_millis(20);
    backend.tell(SCHEDULER, &SchedulerToBackend::LoadWeights { gpu: GPU, model: MODEL, earliest: NOW, latest });
    let outputs = backend.outputs();
    assert!(
        matches!(outputs[..], [Output::CopyWeights { gpu: 0, takes, read: None, .. }] if takes == Span::from_millis(8)),
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
    backend.0.handle_copied(at, 0, Some(Span::ZERO));
    let outcome = WeightsOutcome::Loaded { started_at: NOW, finished_at: at, read: Span::ZERO };
    assert_eq!(
        backend.reports(),
        [(SCHEDULER, Addressed::ModelThread(BackendToModelThread::WeightsLoaded { gpu: GPU, model: MODEL, outcome }))]
    );
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
    assert!(reports.contains(&(SCHEDULER, Addressed::Control(BackendToControl::Weights(tally(7))))), "{reports:?}");
    backend.0.handle_executed(tells_at, 0, Execution::WindowMissed { rejected_at: NOW });
    assert!(backend.outputs().iter().any(|output| matches!(output, Output::FreeWeights { gpu: 0, .. })));
    backend.0.handle_timeout(tells_at + TALLY_INTERVAL);
    assert!(
        backend.reports().contains(&(SCHEDULER, Addressed::Control(BackendToControl::Weights(tally(0))))),
        "the batch has ended"
    );
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
            assert_eq!(reports.next(), Some(Addressed::Control(BackendToControl::WeightsMissing { gpu: GPU })));
        } else {
            let answered = reports.next();
            let is_it = matches!(answered, Some(Addressed::ModelThread(BackendToModelThread::Answered { .. })));
            assert!(is_it, "that of the first goes along: {answered:?}");
        }
        let missed = PlanOutcome::WindowMissed { rejected_at: NOW };
        let done = reports.next();
        let Some(Addressed::ModelThread(BackendToModelThread::PlanDone { outcome, .. })) = done else {
            panic!("{done:?}")
        };
        assert_eq!(outcome, missed);
        let token = transfer.token;
        backend.0.handle_event(NOW, Event::WriteDone { connection: *connection, token, result: Ok(()) });
    }
    assert_eq!(backend.late_reports(NOW).len(), 1, "answered");
}

#[test]
fn a_primary_is_told_what_is_there_and_nothing_of_what_another_one_ordered() {
    let mut backend = backend();
    assert_eq!(ask(&mut backend, GPU), []);
    load(&mut backend);
    let again = GpuId(41);
    assert_eq!(ask(&mut backend, again), [], "it has not arrived");
    backend.0.handle_copied(NOW, 0, Some(Span::ZERO));
    assert!(matches!(backend.outputs()[..], [Output::FreeWeights { gpu: 0, .. }]));
    assert_eq!(ask(&mut backend, GPU), [], "and is not there");
    load(&mut backend);
    backend.0.handle_copied(NOW, 0, Some(Span::ZERO));
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
    let usable = |is_usable| (SCHEDULER, Addressed::Control(BackendToControl::Usable { gpu_index: 0, is_usable }));
    assert!(backend.reports().contains(&usable(false)));
    let back_at = gives_up_at + Span::from_millis(500);
    backend.0.handle_copied(back_at, 0, Some(Span::ZERO));
    backend.0.handle_timeout(back_at + Span::from_millis(1_000));
    assert!(backend.reports().contains(&usable(true)));
}

#[test]
fn a_scheduler_that_asks_for_what_is_not_there_is_lost() {
    let mut backend = Backend::linked();
    backend.tell(SCHEDULER, &SchedulerToBackend::AskResident { gpu_index: 0, gpu: GPU });
    assert_eq!(backend.0.ended(), Some("it asks what is in the memory of GPU 0, which has none"));
}

/// Weights of 7 pages and 8 ms, or 58 from disk, beside those of another model, in host memory of 10 pages.
fn with_host_memory() -> Backend {
    let weights = Weights { pages: 7, load: Span::from_millis(8), read: Span::from_millis(50) };
    let models = ["m", "n"].map(|name| Loaded { weights, ..loaded(name, 8) });
    let mut backend = Backend::with_all(1, models.into(), (Some(10), Some(10))).welcomed_as(&[], &[MODEL, OTHER]);
    let outputs = backend.outputs();
    assert_eq!(released(&backend, &outputs), [ModelId(0)], "the second has made the first leave");
    let reports = reports(&outputs);
    assert!(reports.contains(&on_disk(MODEL, false)), "{reports:?}");
    backend.link();
    backend.reports();
    backend
}

const OTHER: ModelId = ModelId(6);

/// Whose executors are told to let go of their weights, by our names.
fn released(backend: &Backend, outputs: &[Output]) -> Vec<ModelId> {
    let whose = |executor: &Arc<dyn Executor>| {
        let is_it = |loaded: &Loaded| Arc::ptr_eq(&loaded.executor, executor);
        backend.0.hosting.models.iter().find(|(_, loaded)| is_it(loaded)).map(|(&model, _)| model)
    };
    let executors = outputs.iter().filter_map(|output| match output {
        Output::ReleaseWeights { executor } => whose(executor),
        _ => None,
    });
    executors.collect()
}

fn on_disk(model: ModelId, is_there: bool) -> BackendToScheduler {
    Addressed::Control(BackendToControl::InHostMemory { models: vec![model], is_there })
}

fn reports(outputs: &[Output]) -> Vec<BackendToScheduler> {
    let frames = outputs.iter().filter_map(|output| match output {
        Output::Send { frame, .. } => Some(read_frame(frame).map(Result::unwrap).collect::<Vec<_>>()),
        _ => None,
    });
    frames.flatten().collect()
}

#[test]
fn what_is_not_in_host_memory_is_read_and_what_makes_room_is_let_go() {
    let mut backend = with_host_memory();
    assert_eq!(ask(&mut backend, GPU), []);
    let latest = NOW + Span::from_millis(20);
    let load = |model| SchedulerToBackend::LoadWeights { gpu: GPU, model, earliest: NOW, latest };
    backend.tell(SCHEDULER, &load(MODEL));
    let outputs = backend.outputs();
    let read = Some(Span::from_millis(50));
    let is_read = |output: &Output| matches!(output, Output::CopyWeights { read: found, .. } if *found == read);
    assert!(outputs.iter().any(is_read), "{outputs:?}");
    assert_eq!(released(&backend, &outputs), [ModelId(1)]);
    assert_eq!(reports(&outputs), [on_disk(OTHER, false)], "the first is being read");
    let at = NOW + Span::from_millis(60);
    backend.0.handle_copied(at, 0, Some(Span::from_millis(51)));
    let outcome = WeightsOutcome::Loaded { started_at: NOW, finished_at: at, read: Span::from_millis(51) };
    let loaded = Addressed::ModelThread(BackendToModelThread::WeightsLoaded { gpu: GPU, model: MODEL, outcome });
    let reports = reports(&backend.outputs());
    assert!(reports.contains(&loaded) && reports.contains(&on_disk(MODEL, true)), "{reports:?}");
    backend.0.handle_timeout(at + TALLY_INTERVAL);
    let tally = backend.reports().into_iter().find_map(|(_, report)| match report {
        Addressed::Control(BackendToControl::Weights(tally)) => Some(tally),
        _ => None,
    });
    let WeightsTally { loads, reads, host_pages, host_pages_used, .. } = tally.unwrap();
    assert_eq!((loads, reads, host_pages, host_pages_used), (1, 1, 10, 7));
}

/// What makes room in host memory may be in a GPU's: its batches run on, and it is let go when it leaves there.
#[test]
fn what_a_gpu_has_is_not_let_go() {
    let mut backend = with_host_memory();
    assert_eq!(ask(&mut backend, GPU), []);
    let latest = NOW + Span::from_millis(20);
    let load = |model| SchedulerToBackend::LoadWeights { gpu: GPU, model, earliest: NOW, latest };
    backend.tell(SCHEDULER, &load(OTHER));
    backend.0.handle_copied(NOW, 0, Some(Span::ZERO));
    backend.outputs();
    backend.tell(SCHEDULER, &SchedulerToBackend::UnloadWeights { gpu: GPU, model: OTHER });
    backend.tell(SCHEDULER, &load(MODEL));
    let outputs = backend.outputs();
    let place = |wanted: fn(&Output) -> bool| outputs.iter().position(wanted);
    let freed = place(|output| matches!(output, Output::FreeWeights { model: ModelId(1), .. }));
    assert!(freed.is_some() && freed < place(|output| matches!(output, Output::ReleaseWeights { .. })), "{outputs:?}");
    assert_eq!(released(&backend, &outputs), [ModelId(1)]);
}

#[test]
fn the_next_primary_is_told_what_is_on_disk() {
    let mut backend = with_host_memory();
    backend.0.memories.forget_orders();
    backend.0.settle(NOW);
    assert!(reports(&backend.outputs()).contains(&on_disk(MODEL, false)));
    backend.0.settle(NOW);
    assert!(reports(&backend.outputs()).is_empty(), "once");
}

#[test]
fn what_is_pinned_is_there_before_the_answer() {
    let weights = Weights::new(7, Span::from_millis(8));
    let model = Loaded { weights, is_pinned: true, ..loaded("m", 8) };
    let mut backend = Backend::with(1, model, (Some(10), None)).welcomed_by(&[]);
    backend.reports();
    backend.link();
    backend.reports();
    backend.tell(SCHEDULER, &SchedulerToBackend::AskResident { gpu_index: 0, gpu: GPU });
    let outputs = backend.outputs();
    assert!(matches!(outputs[..], [Output::CopyWeights { gpu: 0, .. }]), "{outputs:?}");
    backend.0.handle_copied(NOW, 0, Some(Span::ZERO));
    let models = vec![ResidentModel { model: MODEL, is_pinned: true }];
    let answer = Addressed::Control(BackendToControl::Resident { gpu: GPU, models, is_last: true });
    assert!(backend.reports().contains(&(SCHEDULER, answer)));
}
