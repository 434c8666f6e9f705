//! Members that operators drain and resume.

use proto::draining::{DrainAnswer, DrainRequest, MemberKind};

use super::*;

fn request(name: &str, is_drained: bool, is_forced: bool) -> DrainRequest {
    DrainRequest { kind: MemberKind::Backend, name: name.to_owned(), is_drained, is_forced }
}

/// What an operator who asks is answered.
fn asked(cluster: &mut Cluster, now: Timestamp, request: DrainRequest) -> Result<DrainAnswer, String> {
    let answer = cluster.control().handle_drain(now, &request);
    cluster.handle_timeout(now);
    answer
}

/// A frontend linked to two backends of one GPU each, called `a` and `b`, which host the same model.
fn two() -> (Cluster, FrontendId, [BackendId; 2]) {
    let (mut cluster, now) = (scheduler(&config()), Timestamp(0));
    let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
    let backends = ["a", "b"].map(|name| {
        let hello = BackendHello { name: name.to_owned(), ..offer(1) };
        let backend = add_backend(&mut cluster, now, hello).backend;
        let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
        cluster.handle_backend_message(now, Port::Control, backend, linked).unwrap();
        backend
    });
    drain(&mut cluster);
    (cluster, frontend, backends)
}

/// GPUs that the frontend is told of, and whom backends are told to be drained or resumed.
fn told(cluster: &mut Cluster) -> (Option<u32>, Vec<(BackendId, bool)>) {
    let (mut gpus, mut drained) = (None, Vec::new());
    for output in drain(cluster) {
        match output {
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Model { gpus: told, .. }) => gpus = Some(told),
            ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Drain { is_drained }) => {
                drained.push((backend, is_drained));
            }
            _ => {}
        }
    }
    (gpus, drained)
}

/// Whom a task is planned at that comes now.
fn planned_at(cluster: &mut Cluster, frontend: FrontendId, now: Timestamp, sequence: u64) -> Option<BackendId> {
    let task = submit(frontend, sequence, now + Span::from_millis(25));
    cluster.handle_frontend_message(now, Port::Control, frontend, task).unwrap();
    loop {
        for output in drain(cluster) {
            match output {
                ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Plan(_)) => return Some(backend),
                ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Dropped { .. }) => return None,
                _ => {}
            }
        }
        let at = cluster.poll_timeout().expect("a task waits");
        cluster.handle_timeout(at);
    }
}

#[test]
fn a_drained_backend_is_sent_no_plans_until_it_is_resumed() {
    let (mut cluster, frontend, [a, b]) = two();
    let drained = asked(&mut cluster, Timestamp(0), request("a", true, false));
    assert_eq!(drained, Ok(DrainAnswer { id: a.0, only_there: 0, is_moving: false }));
    assert_eq!(told(&mut cluster), (Some(1), vec![(a, true)]));
    let at = |number: i64| Timestamp(number * 1_000 * MS);
    assert_eq!(planned_at(&mut cluster, frontend, at(1), 1), Some(b));
    // It says so itself, which is nothing new.
    let says = BackendToControl::Drained { is_drained: true };
    cluster.handle_backend_message(at(5), Port::Control, a, says).unwrap();
    assert_eq!(told(&mut cluster), (None, vec![]));

    // The other one is all that is left now.
    let refused = asked(&mut cluster, at(5), request("b", true, false)).unwrap_err();
    assert!(refused.starts_with("no other backend that serves hosts 1 of its models (m): "), "{refused}");
    assert_eq!(told(&mut cluster), (None, vec![]));
    let forced = asked(&mut cluster, at(5), request("b", true, true));
    assert_eq!(forced, Ok(DrainAnswer { id: b.0, only_there: 1, is_moving: false }));
    assert_eq!(told(&mut cluster), (Some(0), vec![(b, true)]));
    assert_eq!(planned_at(&mut cluster, frontend, at(6), 6), None);

    let resumed = asked(&mut cluster, at(7), request("a", false, false));
    assert_eq!(resumed, Ok(DrainAnswer { id: a.0, only_there: 0, is_moving: false }));
    assert_eq!(told(&mut cluster), (Some(1), vec![(a, false)]));
    assert_eq!(planned_at(&mut cluster, frontend, at(8), 8), Some(a));
}

#[test]
fn a_backend_that_joins_anew_says_whether_it_is_drained() {
    let (mut cluster, frontend, [a, b]) = two();
    let says = BackendToControl::Drained { is_drained: true };
    cluster.handle_backend_message(Timestamp(0), Port::Control, a, says).unwrap();
    assert_eq!(told(&mut cluster), (Some(1), vec![]), "as it was told by a primary that is gone");
    assert_eq!(planned_at(&mut cluster, frontend, Timestamp(MS), 1), Some(b));
    cluster.handle_disconnected(Timestamp(0), Port::Control, Member::Backend(a), "it died".to_owned());
    let again = add_backend(&mut cluster, Timestamp(0), BackendHello { name: "a".to_owned(), ..offer(1) }).backend;
    let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
    cluster.handle_backend_message(Timestamp(0), Port::Control, again, linked).unwrap();
    assert_eq!(told(&mut cluster).0, Some(2), "a drain ends with the process that kept it");
}

#[test]
fn a_drained_frontend_is_told_and_served() {
    let (mut cluster, frontend, _) = two();
    let request = DrainRequest { kind: MemberKind::Frontend, ..request("frontend", true, false) };
    assert_eq!(
        asked(&mut cluster, Timestamp(0), request),
        Ok(DrainAnswer { id: frontend.0, only_there: 0, is_moving: false })
    );
    let drained = ClusterOutput::ToFrontend(Port::Control, frontend, SchedulerToFrontend::Drain { is_drained: true });
    assert_eq!(drain(&mut cluster), [drained]);
    assert!(planned_at(&mut cluster, frontend, Timestamp(MS), 1).is_some());
}

#[test]
fn what_cannot_be_drained_is_refused_in_one_line() {
    let (mut cluster, ..) = two();
    let mut refused = |request| asked(&mut cluster, Timestamp(0), request).unwrap_err();
    assert_eq!(refused(request("c", true, true)), "found no backend called c; `downbeat status` names all");
    let long = refused(request(&"\n".repeat(60_000), true, true));
    assert!(long.len() < 200 && long.lines().count() == 1, "{long}");
    let frontend = DrainRequest { kind: MemberKind::Frontend, ..request("a", true, false) };
    assert_eq!(refused(frontend), "found no frontend called a; `downbeat status` names all");
    let succession = SuccessionConfig { rank: 1, schedulers: 2, ..SuccessionConfig::ALONE };
    let mut standby = scheduler(&ClusterConfig { succession, ..config() });
    let refused = asked(&mut standby, Timestamp(0), request("a", true, false)).unwrap_err();
    assert!(refused.starts_with("this scheduler is not the primary"), "{refused}");
}
