//! What backends say that they have answered, and those that frontends do not believe any more.

use super::*;
use proto::scheduler_to_frontend::ANSWERED_TASKS_MAX;

fn told(outputs: Vec<ClusterOutput>) -> Vec<(FrontendId, BackendId, Vec<TaskId>)> {
    let told = |output| match output {
        ClusterOutput::ToFrontend(_, frontend, SchedulerToFrontend::Answered { backend, tasks }) => {
            Some((frontend, backend, tasks))
        }
        _ => None,
    };
    outputs.into_iter().filter_map(told).collect()
}

#[test]
fn a_frontend_is_told_a_few_times_a_second_what_was_answered() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    let starts = [0, 50, 100, 1_000].map(|ms| Timestamp(ms * MS));
    for (sequence, now) in (0..).zip(starts) {
        run_one(&mut cluster, (frontend, backend), now, sequence, Span::from_millis(6));
        if sequence == 2 {
            let due = std::iter::from_fn(|| {
                cluster.poll_timeout().filter(|at| *at < Timestamp(900 * MS)).map(|at| cluster.handle_timeout(at))
            });
            assert!(due.count() > 0);
            let tasks = (0..3).map(|sequence| TaskId::new(frontend, sequence)).collect();
            assert_eq!(told(drain(&mut cluster)), [(frontend, backend, tasks)]);
        } else {
            assert!(told(drain(&mut cluster)).is_empty());
        }
    }
    cluster.handle_disconnected(Timestamp(1_100 * MS), Port::Control, Member::Frontend(frontend), String::new());
    cluster.handle_timeout(Timestamp(2_000 * MS));
    assert!(told(drain(&mut cluster)).is_empty(), "it is gone");
    assert!(cluster.is_idle());
    const { assert!(ANSWERED_TASKS_MAX * size_of::<TaskId>() < proto::frame::FRAME_BYTES_MAX) };
}

#[test]
fn a_backend_whose_frontend_refuses_it_is_planned_on_no_more_whatever_it_says() {
    let now = Timestamp(0);
    let (mut cluster, frontend, liar) = pair(now);
    let other = add_backend(&mut cluster, now, offer(1)).backend;
    let linked = BackendToControl::Linked { frontend, link: LinkId(2) };
    cluster.handle_backend_message(now, Port::Control, other, linked.clone()).unwrap();
    let unknown = FrontendToControl::Refuses { backend: BackendId(77) };
    cluster.handle_frontend_message(now, Port::Control, frontend, unknown).unwrap();
    let refuses = FrontendToControl::Refuses { backend: liar };
    cluster.handle_frontend_message(now, Port::Control, frontend, refuses).unwrap();
    cluster.handle_backend_message(now, Port::Control, liar, linked).unwrap();
    for sequence in 0..8 {
        let at = Timestamp(sequence as i64 * 100 * MS);
        run_one(&mut cluster, (frontend, other), at, sequence, Span::from_millis(6));
    }
}
