//! What is measured after a model is served, and who is told.

use super::*;

const OTHER: ConnectionId = ConnectionId(3);
/// What the second scheduler calls the model.
const THEIRS: ModelId = ModelId(9);

fn first_only(name: &str) -> Loaded {
    Loaded { basis: Basis::One, ..loaded(name, 8) }
}

impl Backend {
    /// What is hosted under this name was measured.
    fn measured(&mut self, model: ModelId, profile: Option<LatencyProfile>) {
        let of = self.0.hosted(model).map(Arc::downgrade).unwrap_or_default();
        self.0.handle_measured(NOW, (model, &of), profile.map(|profile| (profile, None)));
    }
}

/// What is to be measured.
fn asked(outputs: &[Output]) -> Vec<(ModelId, bool)> {
    let of = |output: &Output| match output {
        Output::Measure { model, loaded } => Some((*model, loaded.upgrade().is_some())),
        _ => None,
    };
    outputs.iter().filter_map(of).collect()
}

fn faster() -> LatencyProfile {
    LatencyProfile::linear(0.5, 1.5, 4).unwrap()
}

fn measured(model: ModelId) -> BackendToScheduler {
    Addressed::Control(BackendToControl::Measured { model, profile: faster(), cost: None })
}

#[test]
fn models_are_measured_one_after_another_once_there_is_a_primary() {
    let models = vec![first_only("m"), loaded("n", 8), first_only("o")];
    let mut backend = Backend::with_all(1, models, (None, None));
    assert!(asked(&backend.outputs()).is_empty());
    let mut backend = backend.welcomed_as(&[], &[ModelId(5), ModelId(6), ModelId(7)]);
    assert_eq!(asked(&backend.outputs()), [(ModelId(0), true)]);
    backend.measured(ModelId(2), Some(faster()));
    assert!(backend.outputs().is_empty(), "nobody has asked for that");
    backend.measured(ModelId(0), Some(faster()));
    let (reports, others) = backend.reports_and_others();
    assert_eq!(reports, [(SCHEDULER, measured(ModelId(5)))]);
    assert_eq!(asked(&others), [(ModelId(2), true)], "n is known");
    backend.measured(ModelId(2), None);
    assert!(backend.outputs().is_empty());
    let bases: Vec<_> = backend.0.into_models().iter().map(|model| model.basis).collect();
    assert_eq!(bases, [Basis::Sizes, Basis::Sizes, Basis::One], "a next life measures what is left");
}

#[test]
fn what_was_offered_and_is_so_is_no_news() {
    let mut backend = Backend::with(1, first_only("m"), (None, None)).welcomed_by(&[]);
    backend.outputs();
    let same = loaded("m", 8);
    backend.measured(ModelId(0), Some(same.profile));
    assert!(backend.outputs().is_empty());
}

#[test]
fn a_standby_that_is_joining_hears_of_it_once_it_has_named_the_model() {
    let mut backend = Backend::with(2, first_only("m"), (None, None));
    let welcome = |models| BackendWelcome {
        backend: BackendId(3),
        models,
        model_threads: ModelThreads::default(),
        claim: claim(1),
    };
    backend.connected(SCHEDULER, encode(&welcome(vec![ModelId(5)])));
    backend.outputs();
    backend.0.handle_connecting(Peer::Scheduler(1), OTHER);
    backend.measured(ModelId(0), Some(faster()));
    assert_eq!(backend.reports(), [(SCHEDULER, measured(ModelId(5)))]);
    let standby = BackendWelcome { claim: Claim { epoch: Epoch::NONE, ..claim(1) }, ..welcome(vec![THEIRS]) };
    backend.connected(OTHER, encode(&standby));
    assert_eq!(backend.reports(), [(OTHER, measured(THEIRS))]);
}

#[test]
fn what_was_measured_of_one_that_has_been_replaced_does_not_count() {
    let mut backend = Backend::with(1, first_only("m"), (None, None)).welcomed_by(&[]);
    let outputs = backend.outputs();
    let former = outputs.iter().find_map(|output| match output {
        Output::Measure { loaded, .. } => Some(loaded.clone()),
        _ => None,
    });
    backend.tell(
        SCHEDULER,
        &SchedulerToBackend::Load { load: LoadId(1), name: "m".into(), brought: None, is_placed: false },
    );
    let outputs = backend.outputs();
    let [Output::Load { load, .. }] = outputs[..] else { panic!("{outputs:?}") };
    backend.0.handle_loaded(NOW, load, Ok(vec![first_only("m")]));
    backend.outputs();
    backend.tell(SCHEDULER, &SchedulerToBackend::Host { load: LoadId(1), version: "1".into(), model: ModelId(5) });
    assert_eq!(asked(&backend.outputs()), [(ModelId(0), true)], "it is measured anew");
    backend.0.handle_measured(NOW, (ModelId(0), &former.unwrap()), Some((faster(), None)));
    assert!(backend.outputs().is_empty());
    backend.measured(ModelId(0), Some(faster()));
    assert_eq!(backend.reports(), [(SCHEDULER, measured(ModelId(5)))]);
}

#[test]
fn one_that_goes_is_not_waited_for() {
    let mut backend = Backend::with_all(1, vec![first_only("m"), first_only("n")], (None, None));
    backend = backend.welcomed_as(&[], &[ModelId(5), ModelId(6)]);
    assert_eq!(asked(&backend.outputs()), [(ModelId(0), true)]);
    backend.tell(SCHEDULER, &SchedulerToBackend::Unload { model: ModelId(5) });
    let (reports, others) = backend.reports_and_others();
    assert_eq!(reports, [(SCHEDULER, Addressed::Control(BackendToControl::Unloaded { model: ModelId(5) }))]);
    assert_eq!(asked(&others), [(ModelId(1), true)]);
    backend.measured(ModelId(0), Some(faster()));
    assert!(backend.outputs().is_empty());
}
