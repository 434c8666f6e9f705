//! When a model that is being loaded is tried.

use super::*;

const PATIENCE: Span = Span::from_millis(2_000);

fn after(ms: i64) -> Timestamp {
    NOW + Span::from_millis(ms)
}

/// Has a plan that begins in 3 ms, whose input is there.
fn planned() -> Backend {
    let mut backend = Backend::linked();
    let SchedulerToBackend::Plan(mut plan) = plan(0, 0) else { unreachable!("it is a plan") };
    (plan.exec_at, plan.latest) = (after(3), after(60_000));
    backend.tell(SCHEDULER, &SchedulerToBackend::Plan(plan));
    let [Output::Read { connection, transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    assert!(backend.outputs().is_empty());
    backend
}

/// Whether a trial may begin.
fn begins(backend: &mut Backend) -> bool {
    backend.outputs().iter().any(|output| matches!(output, Output::Try { has_turn: true }))
}

fn try_for(backend: &mut Backend, at: Timestamp, gpus: &[usize], ms: i64) -> bool {
    backend.0.handle_trial(at, gpus.to_vec(), Span::from_millis(ms), PATIENCE, false);
    begins(backend)
}

#[test]
fn a_trial_begins_if_it_should_end_before_what_is_planned() {
    let mut backend = planned();
    assert!(try_for(&mut backend, NOW, &[0], 3));
    assert!(!begins(&mut backend), "once");
    assert!(try_for(&mut backend, after(1), &[0], 2));
    assert!(!try_for(&mut backend, after(2), &[0], 2));
    assert!(try_for(&mut planned(), NOW, &[7], 9), "nothing is planned elsewhere");
    assert!(!try_for(&mut planned(), NOW, &[7, 0], 9));
}

#[test]
fn a_trial_waits_until_what_was_planned_has_ended() {
    let mut backend = planned();
    assert!(!try_for(&mut backend, NOW, &[0], 9));
    backend.0.handle_timeout(after(3));
    let outputs = backend.outputs();
    assert!(matches!(outputs[..], [Output::Execute { .. }, ..]), "what is planned goes first: {outputs:?}");
    let (started_at, finished_at) = (after(3), after(5));
    let outputs = Outputs::default();
    backend.0.handle_executed(after(5), 0, Execution::Done { started_at, finished_at, outputs });
    assert!(begins(&mut backend), "its answer is on its way, which takes no GPU");
}

#[test]
fn a_trial_that_has_waited_for_too_long_begins_beside_what_runs() {
    let mut backend = planned();
    backend.0.handle_timeout(after(3));
    backend.outputs();
    assert!(!try_for(&mut backend, after(3), &[0], 1));
    let ends_at = after(3) + PATIENCE;
    backend.0.handle_timeout(ends_at - Span(1));
    assert!(!begins(&mut backend) && backend.0.poll_timeout() <= ends_at);
    backend.0.handle_timeout(ends_at);
    assert!(begins(&mut backend));
}

#[test]
fn a_trial_that_can_be_put_off_is_not_made_beside_what_runs() {
    let mut backend = planned();
    backend.0.handle_timeout(after(3));
    backend.outputs();
    backend.0.handle_trial(after(3), vec![0], Span(1), PATIENCE, true);
    backend.0.handle_timeout(after(3) + PATIENCE);
    let is_refused = |output: &Output| matches!(output, Output::Try { has_turn: false });
    assert!(backend.outputs().iter().any(is_refused));
    backend.0.handle_trial(after(3) + PATIENCE, vec![7], Span(1), PATIENCE, true);
    assert!(begins(&mut backend), "nothing runs there");
}
