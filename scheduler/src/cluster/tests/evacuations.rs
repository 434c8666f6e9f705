//! Backends that are to go and alone host models: others host these first.

use proto::{
    backend_to_scheduler::LoadOutcome,
    draining::{DrainAnswer, DrainRequest, MemberKind},
};

use super::*;

const WITHIN: Span = Span::from_millis(20_000);

/// A frontend and backends of one GPU each, all linked to it.
struct World {
    cluster: Cluster,
    frontend: FrontendId,
    now: Timestamp,
}

/// What came of a turn, as far as it matters here.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Load(BackendId, String),
    Host(BackendId, ModelId),
    Unload(BackendId, ModelId),
    Discard(BackendId),
    Dismissed(BackendId),
    Drain(BackendId, bool),
    Dropped,
}

impl World {
    fn new() -> Self {
        let (mut cluster, now) = (scheduler(&config()), Timestamp(0));
        let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
        Self { cluster, frontend, now }
    }

    /// A backend that hosts these comes.
    fn add(&mut self, name: &str, models: &[&str]) -> BackendId {
        let offers = models.iter().map(|name| model_offer(1, name, 1)).collect();
        let hello = BackendHello { name: name.to_owned(), ..BackendHello::new(1, offers) };
        let backend = add_backend(&mut self.cluster, self.now, hello).backend;
        self.tell(backend, BackendToControl::Linked { frontend: self.frontend, link: LinkId(1) });
        backend
    }

    fn tell(&mut self, backend: BackendId, message: impl Into<BackendToScheduler>) {
        self.cluster.handle_backend_message(self.now, Port::Control, backend, message).unwrap();
    }

    fn leave(&mut self, backend: BackendId) {
        self.tell(backend, BackendToControl::Leaving { within: WITHIN });
    }

    /// What has come since, and the load that was asked for last.
    fn seen(&mut self) -> (Vec<Seen>, Option<LoadId>) {
        let (mut seen, mut asked) = (Vec::new(), None);
        for output in drain(&mut self.cluster) {
            seen.push(match output {
                ClusterOutput::ToBackend(_, to, SchedulerToBackend::Load { load, name, is_placed: true, .. }) => {
                    asked = Some(load);
                    Seen::Load(to, name)
                }
                ClusterOutput::ToBackend(_, to, SchedulerToBackend::Host { model, .. }) => Seen::Host(to, model),
                ClusterOutput::ToBackend(_, to, SchedulerToBackend::Unload { model }) => Seen::Unload(to, model),
                ClusterOutput::ToBackend(_, to, SchedulerToBackend::Discard { .. }) => Seen::Discard(to),
                ClusterOutput::ToBackend(_, to, SchedulerToBackend::Dismissed) => Seen::Dismissed(to),
                ClusterOutput::ToBackend(_, to, SchedulerToBackend::Drain { is_drained }) => {
                    Seen::Drain(to, is_drained)
                }
                ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Dropped { .. }) => Seen::Dropped,
                _ => continue,
            });
        }
        // Whoever has failed is told once more that nothing of it is wanted.
        seen.dedup();
        (seen, asked)
    }

    /// A backend has loaded what it was asked to, as a guest.
    fn loaded(&mut self, backend: BackendId, load: Option<LoadId>, name: &str, version: u32) {
        let offer = ModelOffer { is_guest: true, ..model_offer(1, name, version) };
        let outcome = LoadOutcome::Ready { offer, is_last: true };
        self.tell(backend, BackendToControl::Loaded { load: load.expect("it was asked to"), outcome });
    }

    fn failed(&mut self, backend: BackendId, load: Option<LoadId>) {
        let outcome = LoadOutcome::Failed("out of memory".to_owned());
        self.tell(backend, BackendToControl::Loaded { load: load.expect("it was asked to"), outcome });
    }

    /// Where a task for the first model is planned that comes now.
    fn planned_at(&mut self, sequence: u64) -> Option<BackendId> {
        self.now += Span::from_millis(1_000);
        let task = submit(self.frontend, sequence, self.now + Span::from_millis(25));
        self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, task).unwrap();
        loop {
            for output in drain(&mut self.cluster) {
                match output {
                    ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Plan(_)) => return Some(backend),
                    ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Dropped { .. }) => return None,
                    _ => {}
                }
            }
            let at = self.cluster.poll_timeout().expect("a task waits");
            self.cluster.handle_timeout(at);
        }
    }

    fn drains(&mut self, name: &str, is_drained: bool, is_forced: bool) -> Result<DrainAnswer, String> {
        let request = DrainRequest { kind: MemberKind::Backend, name: name.to_owned(), is_drained, is_forced };
        let answer = self.cluster.control().handle_drain(self.now, &request);
        self.cluster.handle_timeout(self.now);
        answer
    }
}

fn load(to: BackendId, name: &str) -> Seen {
    Seen::Load(to, name.to_owned())
}

#[test]
fn a_backend_that_leaves_serves_on_until_another_one_hosts_its_models() {
    let mut world = World::new();
    let [a, b] = [world.add("a", &["m", "n"]), world.add("b", &["n"])];
    world.leave(a);
    let (seen, asked) = world.seen();
    assert_eq!(seen, [load(b, "m")], "n is there already");
    assert_eq!(world.planned_at(1), Some(a), "it serves on");
    world.loaded(b, asked, "m", 1);
    assert_eq!(world.seen().0, [Seen::Host(b, ModelId(0)), Seen::Dismissed(a)]);
    assert_eq!(world.planned_at(2), Some(b));

    // Its successor hosts what it did, and the guest goes.
    world.cluster.handle_disconnected(world.now, Port::Control, Member::Backend(a), "it has left".to_owned());
    assert_eq!(world.planned_at(3), Some(b));
    let again = world.add("a", &["m", "n"]);
    assert_eq!(world.seen().0, [Seen::Unload(b, ModelId(0))]);
    assert_eq!(world.planned_at(4), Some(again));
    world.leave(again);
    assert_eq!(world.seen().0, [load(b, "m")], "a guest can come again");
}

#[test]
fn a_model_is_tried_at_each_backend_once_and_its_backend_leaves_all_the_same() {
    let mut world = World::new();
    let [a, b, c] = [world.add("a", &["m"]), world.add("b", &["n"]), world.add("c", &["n", "o"])];
    world.leave(a);
    let (seen, asked) = world.seen();
    assert_eq!(seen, [load(b, "m")], "it hosts fewer models");
    world.failed(b, asked);
    let (seen, asked) = world.seen();
    assert_eq!(seen, [Seen::Discard(b), load(c, "m")]);
    // Its repository is ahead of what is served.
    world.loaded(c, asked, "m", 2);
    assert_eq!(world.seen().0, [Seen::Discard(c), Seen::Dismissed(a)]);
    assert_eq!(world.planned_at(1), None);
}

#[test]
fn a_load_that_takes_too_long_is_waited_for_in_bounds() {
    let mut world = World::new();
    let [a, b] = [world.add("a", &["m"]), world.add("b", &["n"])];
    world.leave(a);
    let (seen, asked) = world.seen();
    assert_eq!(seen, [load(b, "m")]);
    assert_eq!(world.planned_at(1), Some(a));
    let until = Timestamp(0) + WITHIN * 3 / 4;
    world.cluster.handle_timeout(until + Span(-1));
    assert_eq!(world.seen().0, []);
    world.now = until;
    world.cluster.handle_timeout(until);
    assert_eq!(world.seen().0, [Seen::Dismissed(a)], "a quarter of its time is left for its batches");
    // Better late than never.
    world.loaded(b, asked, "m", 1);
    assert_eq!(world.seen().0, [Seen::Host(b, ModelId(0))]);
    assert_eq!(world.planned_at(2), Some(b));
}

#[test]
fn a_client_who_unloads_a_model_is_not_kept_waiting_by_its_copy() {
    let mut world = World::new();
    let [a, b] = [world.add("a", &["m"]), world.add("b", &["n"])];
    world.leave(a);
    let (seen, asked) = world.seen();
    assert_eq!(seen, [load(b, "m")]);
    let (change, to) = (ChangeId(0), ModelChange::Unload);
    let message = FrontendToControl::ChangeModel { change, to, name: "m".into(), brought: None };
    world.cluster.handle_frontend_message(world.now, Port::Control, world.frontend, message).unwrap();
    assert_eq!(world.seen().0, [Seen::Discard(b), Seen::Unload(a, ModelId(0)), Seen::Dismissed(a)]);
    world.loaded(b, asked, "m", 1);
    assert_eq!(world.seen().0, [Seen::Discard(b)], "it had been at it");
}

#[test]
fn a_backend_that_alone_hosts_a_model_is_drained_once_another_one_does() {
    let mut world = World::new();
    let [a, b] = [world.add("a", &["m"]), world.add("b", &["n"])];
    let moving = Ok(DrainAnswer { id: a.0, only_there: 1, is_moving: true });
    assert_eq!(world.drains("a", true, false), moving);
    let (seen, asked) = world.seen();
    assert_eq!(seen, [load(b, "m")]);
    assert_eq!(world.drains("a", true, false), moving, "it is on its way");
    assert_eq!((world.seen().0, world.planned_at(1)), (vec![], Some(a)));
    world.failed(b, asked);
    assert_eq!(world.seen().0, [Seen::Discard(b)]);
    assert_eq!(world.planned_at(2), Some(a), "it is not drained, as nobody else hosts its model");

    assert_eq!(world.drains("a", true, false), moving, "another try");
    let (seen, asked) = world.seen();
    assert_eq!(seen, [load(b, "m")]);
    world.loaded(b, asked, "m", 1);
    assert_eq!(world.seen().0, [Seen::Drain(a, true), Seen::Host(b, ModelId(0))]);
    assert_eq!(world.planned_at(3), Some(b));
    assert_eq!(world.drains("a", false, false), Ok(DrainAnswer { id: a.0, only_there: 0, is_moving: false }));
    assert_eq!(world.seen().0, [Seen::Drain(a, false), Seen::Unload(b, ModelId(0))]);
    assert_eq!(world.planned_at(4), Some(a));
}

#[test]
fn a_drain_that_waits_can_be_forced_or_taken_back() {
    let mut world = World::new();
    let [a, b] = [world.add("a", &["m"]), world.add("b", &["n"])];
    world.drains("a", true, false).unwrap();
    let (seen, asked) = world.seen();
    assert_eq!(seen, [load(b, "m")]);
    world.drains("a", false, false).unwrap();
    assert_eq!(world.seen().0, [Seen::Drain(a, false)]);
    world.loaded(b, asked, "m", 1);
    // Both host it for a moment, and the guest is not needed.
    assert_eq!(world.seen().0, [Seen::Host(b, ModelId(0)), Seen::Unload(b, ModelId(0))]);
    assert_eq!(world.planned_at(1), Some(a));

    world.drains("a", true, false).unwrap();
    assert_eq!(world.seen().0, [load(b, "m")]);
    assert_eq!(world.drains("a", true, true), Ok(DrainAnswer { id: a.0, only_there: 1, is_moving: false }));
    assert_eq!((world.seen().0, world.planned_at(2)), (vec![Seen::Drain(a, true)], None));
}

#[test]
fn of_two_that_leave_at_once_the_second_has_what_both_hosted_loaded_elsewhere() {
    let mut world = World::new();
    let [a, b, c] = [world.add("a", &["m"]), world.add("b", &["m"]), world.add("c", &["n"])];
    world.leave(a);
    assert_eq!(world.seen().0, [Seen::Dismissed(a)]);
    world.leave(b);
    let (seen, asked) = world.seen();
    assert_eq!((seen, world.planned_at(1)), (vec![load(c, "m")], Some(b)));
    world.loaded(c, asked, "m", 1);
    assert_eq!(world.seen().0, [Seen::Host(c, ModelId(0)), Seen::Dismissed(b)]);
    world.leave(c);
    assert_eq!(world.seen().0, [Seen::Dismissed(c)], "nobody is left to ask");
}
