//! A batch behind the one that executes.

use proto::GpuId;

use super::*;

const GPU: GpuId = GpuId(40);
const OTHER: ModelId = ModelId(6);

fn after(ms: i64) -> Timestamp {
    NOW + Span::from_millis(ms)
}

/// Another plan, to start from so many milliseconds on.
fn second(exec_at: i64, latest: i64, model: ModelId) -> SchedulerToBackend {
    let SchedulerToBackend::Plan(mut second) = plan(0, 0) else { unreachable!("it is a plan") };
    (second.plan, second.model) = (PlanId::new(ModelThreadId(0), 2), model);
    (second.exec_at, second.latest) = (after(exec_at), after(latest));
    second.tasks[0].task = second_task();
    SchedulerToBackend::Plan(second)
}

fn second_task() -> TaskId {
    TaskId::new(FRONTEND, 2)
}

/// Takes in a plan and its input. What comes of that.
fn fetched(backend: &mut Backend, plan: &SchedulerToBackend) -> Vec<Output> {
    backend.tell(SCHEDULER, plan);
    let outputs = backend.outputs();
    let [Output::Read { connection, transfer, .. }] = outputs[..] else { panic!("a plan is read: {outputs:?}") };
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    backend.outputs()
}

fn done(started_at: Timestamp, finished_at: Timestamp) -> Execution {
    Execution::Done { started_at, finished_at, outputs: Outputs::default() }
}

/// Has a second batch behind the one that executes, whose window ends so late.
fn behind(latest: i64) -> Backend {
    let mut backend = executing();
    // l(1) = 2 ms.
    let outputs = fetched(&mut backend, &second(2, latest, ModelId(5)));
    assert!(matches!(&outputs[..], [Output::Execute { gpu: 0, job }] if job.exec_at == after(2)), "{outputs:?}");
    backend
}

#[test]
fn a_batch_whose_client_hung_up_is_taken_back_from_behind_another() {
    let mut backend = behind(9);
    let plan = PlanId::new(ModelThreadId(0), 2);
    backend.tell(SCHEDULER, &SchedulerToBackend::Cancel { plan, task: second_task() });
    assert!(matches!(backend.outputs()[..], [Output::TakeBack { gpu: 0 }]));
    backend.0.handle_taken_back(NOW, 0);
    let reports = backend.reports();
    let cancelled = Addressed::ModelThread(BackendToModelThread::Cancelled { plan, task: second_task() });
    assert_eq!((&reports[0].1, reports.len()), (&cancelled, 3), "done and answered, too: {reports:?}");
    backend.0.handle_executed(after(2), 0, done(NOW, after(2)));
    assert!(matches!(backend.outputs()[..], [Output::Write { .. }, Output::Send { .. }]));
}

#[test]
fn a_batch_is_not_asked_back_once_the_one_before_has_ended() {
    let mut backend = behind(9);
    let plan = PlanId::new(ModelThreadId(0), 2);
    backend.tell(SCHEDULER, &SchedulerToBackend::Cancel { plan, task: second_task() });
    // Both are known before anything comes of either.
    backend.0.handle_executed(after(2), 0, done(NOW, after(2)));
    let outputs = backend.outputs();
    assert!(matches!(outputs[..], [Output::Write { .. }, Output::Send { .. }]), "{outputs:?}");
    backend.0.handle_executed(after(4), 0, done(after(2), after(4)));
    assert_eq!(backend.0.plans(), 2, "both are being answered");
}

#[test]
fn a_batch_that_waits_alone_for_its_window_is_taken_back() {
    let mut backend = behind(9);
    // Its window opens at 2 ms.
    backend.0.handle_executed(after(1), 0, done(NOW, after(1)));
    assert!(matches!(backend.outputs()[..], [Output::Write { .. }, Output::Send { .. }]));
    let plan = PlanId::new(ModelThreadId(0), 2);
    backend.tell_at(after(1), SCHEDULER, &SchedulerToBackend::Cancel { plan, task: second_task() });
    let outputs = backend.outputs();
    assert!(matches!(outputs[..], [Output::TakeBack { gpu: 0 }]), "{outputs:?}");
    backend.0.handle_taken_back(after(1), 0);
    let reports = backend.reports();
    assert_eq!(reports[0].1, Addressed::ModelThread(BackendToModelThread::Cancelled { plan, task: second_task() }));
    backend.0.handle_timeout(after(20_000));
    let (_, others) = backend.reports_and_others();
    assert!(others.is_empty(), "nothing hangs: {others:?}");
}

#[test]
fn a_batch_behind_one_that_hangs_is_taken_back_or_has_its_own_time() {
    let mut backend = behind(60_000);
    // The first one's window ends after 5 ms.
    backend.0.handle_timeout(after(1_005));
    let (_, others) = backend.reports_and_others();
    assert!(matches!(others[..], [Output::Interrupt { gpu: 0 }, Output::TakeBack { gpu: 0 }]), "{others:?}");
    backend.0.handle_taken_back(after(1_005), 0);
    let (_, others) = backend.reports_and_others();
    assert!(others.is_empty(), "nothing goes behind one that hangs: {others:?}");
    backend.0.handle_executed(after(3_000), 0, done(NOW, after(3_000)));
    let (_, others) = backend.reports_and_others();
    assert!(matches!(others[..], [Output::Execute { gpu: 0, .. }]), "{others:?}");

    // The GPU begins it just then.
    let mut backend = behind(6);
    backend.0.handle_timeout(after(1_005));
    backend.outputs();
    backend.0.handle_executed(after(1_006), 0, done(NOW, after(1_006)));
    assert_eq!(backend.0.plans(), 1, "the first one was given up before");
    backend.0.handle_timeout(after(2_005));
    let (_, others) = backend.reports_and_others();
    assert!(others.is_empty(), "its second begins with the end of the first: {others:?}");
    backend.0.handle_timeout(after(2_006));
    let (_, others) = backend.reports_and_others();
    assert!(matches!(others[..], [Output::Interrupt { gpu: 0 }]), "{others:?}");
}

#[test]
fn what_ends_as_it_is_given_up_is_not_ended_with_what_is_behind_it() {
    let mut backend = behind(60_000);
    // Both are known before anything comes of either, and then the one behind runs.
    backend.0.handle_timeout(after(1_005));
    backend.0.handle_executed(after(1_005), 0, done(NOW, after(1_005)));
    let (_, others) = backend.reports_and_others();
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn one_that_leaves_finishes_what_is_behind() {
    let mut backend = behind(9);
    backend.0.handle_leaving(NOW, WITHIN);
    backend.tell(SCHEDULER, &SchedulerToBackend::Dismissed);
    for at in [after(2), after(4)] {
        assert!(!backend.0.has_left());
        backend.0.handle_executed(at, 0, done(at, at));
        let (_, outputs) = backend.reports_and_others();
        let [Output::Write { connection, transfer, .. }] = outputs[..] else { panic!("{outputs:?}") };
        backend.0.handle_event(at, Event::WriteDone { connection, token: transfer.token, result: Ok(()) });
    }
    assert!(backend.0.has_left());
}

/// Two models, of which the first is in memory, which has room for both.
fn with_weights() -> Backend {
    let weights = Weights::new(4, Span::from_millis(1));
    let models = ["m", "n"].map(|name| Loaded { weights, ..loaded(name, 8) });
    let mut backend = Backend::with_all(1, models.into(), (Some(8), None)).welcomed_as(&[], &[ModelId(5), OTHER]);
    backend.reports();
    backend.link();
    backend.tell(SCHEDULER, &SchedulerToBackend::AskResident { gpu_index: 0, gpu: GPU });
    load(&mut backend, ModelId(5));
    backend.0.handle_copied(NOW, 0, Some(Span::ZERO));
    backend.outputs();
    backend
}

fn load(backend: &mut Backend, model: ModelId) {
    let order = SchedulerToBackend::LoadWeights { gpu: GPU, model, earliest: NOW, latest: after(20) };
    backend.tell(SCHEDULER, &order);
    let (_, others) = backend.reports_and_others();
    assert!(matches!(others[..], [Output::CopyWeights { gpu: 0, .. }]), "{others:?}");
}

#[test]
fn a_batch_goes_behind_another_once_its_weights_are_there() {
    let mut backend = with_weights();
    assert!(matches!(fetched(&mut backend, &plan(0, 0))[..], [Output::Execute { .. }]));
    load(&mut backend, OTHER);
    assert!(fetched(&mut backend, &second(1, 9, OTHER)).is_empty(), "they are on their way");
    backend.0.handle_timeout(after(1));
    let (_, others) = backend.reports_and_others();
    assert!(others.is_empty() && backend.0.poll_timeout() > after(1), "{others:?}");
    backend.0.handle_copied(after(1), 0, Some(Span::ZERO));
    let (_, others) = backend.reports_and_others();
    assert!(matches!(&others[..], [Output::Execute { gpu: 0, job }] if job.model == ModelId(1)), "{others:?}");

    // They stay until the batch behind has ended, and no longer.
    backend.tell(SCHEDULER, &SchedulerToBackend::UnloadWeights { gpu: GPU, model: OTHER });
    backend.tell(SCHEDULER, &SchedulerToBackend::UnloadWeights { gpu: GPU, model: ModelId(5) });
    let freed = |backend: &mut Backend| {
        let freed = |output| if let Output::FreeWeights { model, .. } = output { Some(model) } else { None };
        backend.outputs().into_iter().filter_map(freed).collect::<Vec<_>>()
    };
    assert_eq!(freed(&mut backend), []);
    backend.0.handle_executed(after(2), 0, done(NOW, after(2)));
    assert_eq!(freed(&mut backend), [ModelId(0)]);
    backend.0.handle_executed(after(4), 0, done(after(2), after(4)));
    assert_eq!(freed(&mut backend), [ModelId(1)]);
}

#[test]
fn weights_of_a_batch_that_was_taken_back_make_room() {
    let mut backend = with_weights();
    load(&mut backend, OTHER);
    backend.0.handle_copied(NOW, 0, Some(Span::ZERO));
    backend.outputs();
    assert!(matches!(fetched(&mut backend, &plan(0, 0))[..], [Output::Execute { .. }]));
    assert!(matches!(fetched(&mut backend, &second(1, 9, OTHER))[..], [Output::Execute { .. }]));
    backend.tell(SCHEDULER, &SchedulerToBackend::UnloadWeights { gpu: GPU, model: OTHER });
    let plan = PlanId::new(ModelThreadId(0), 2);
    backend.tell(SCHEDULER, &SchedulerToBackend::Cancel { plan, task: second_task() });
    let (_, others) = backend.reports_and_others();
    assert!(matches!(others[..], [Output::TakeBack { gpu: 0 }]), "{others:?}");
    backend.0.handle_taken_back(NOW, 0);
    let (_, others) = backend.reports_and_others();
    assert!(matches!(others[..], [Output::FreeWeights { gpu: 0, model: ModelId(1), .. }]), "{others:?}");
}
