//! Models whose requests choose how long their tasks are.

use proto::BatchCost;
use repository::Variable;

use super::*;

/// The window of a plan.
const WINDOW_MS: i64 = 5;

/// A model of up to 4096 bytes a task; l(1) = 200 ms, of tasks of 256.
fn any_length() -> Backend {
    let mut any = loaded("m", 4_096);
    any.model.inputs[0].variable =
        Some(Variable { dims: vec![0], reshape_dims: vec![], bytes_max: 4_096, is_optional: false, any_rank: false });
    any.shape = ModelShape::from(&any.model);
    any.cost = Some(BatchCost { fixed: Span::from_millis(100), per_task_ppm: 500_000 });
    any.profile = LatencyProfile::linear(100.0, 100.0, 4).unwrap();
    let mut backend = Backend::with(1, any, (None, None)).welcomed_by(&[]);
    backend.reports();
    backend.link();
    backend
}

/// Whether a batch of one task of this length is given up so long after its window.
fn is_given_up(length: u32, after: Span) -> bool {
    let mut backend = any_length();
    let SchedulerToBackend::Plan(mut plan) = plan(0, 0) else { unreachable!("it is a plan") };
    // A record's head, and a cell's length and dimension.
    plan.tasks[0].slot.input_bytes = 12 + length;
    backend.tell(SCHEDULER, &SchedulerToBackend::Plan(plan));
    let (_, outputs) = backend.reports_and_others();
    let [Output::Read { connection, transfer, .. }] = outputs[..] else { panic!("a plan is read: {outputs:?}") };
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    assert!(matches!(backend.outputs()[..], [Output::Execute { .. }]));
    backend.0.handle_timeout(NOW + Span::from_millis(WINDOW_MS) + after);
    backend.outputs().iter().any(|output| matches!(output, Output::Interrupt { gpu: 0 }))
}

#[test]
fn a_batch_of_tasks_longer_than_those_that_were_measured_may_take_their_time() {
    // Twice as long takes four times as much, and so on; but nothing is waited for without end.
    for (length, patience_ms) in [(1, 2_000), (256, 2_000), (512, 8_000), (2_048, 60_000), (4_000, 60_000)] {
        let patience = Span::from_millis(patience_ms);
        assert!(!is_given_up(length, patience - Span(1)), "{length}: too early");
        assert!(is_given_up(length, patience), "{length}: too late");
    }
}
