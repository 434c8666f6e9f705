use super::*;
use crate::control::joining::LINK_GRACE;

fn offer(name: &str, alpha_ms: f64, gpu_indexes: Vec<u32>) -> ModelOffer {
    let profile = LatencyProfile::linear(alpha_ms, 1.0, 8).unwrap();
    ModelOffer {
        name: name.into(),
        version: "1".into(),
        profile,
        input_bytes: 100,
        gpu_indexes,
        weights: Weights::default(),
        queue_max: Vec::new(),
        cost: None,
        is_guest: false,
    }
}

fn hello(gpus: u32, models: Vec<ModelOffer>) -> BackendHello {
    BackendHello::new(gpus, models)
}

/// Every model is wanted.
fn all(_: &str) -> bool {
    false
}

/// All backends obey.
fn used(members: &mut Members, now: i64) -> bool {
    members.backends.values_mut().for_each(|backend| backend.obeys = true);
    let reach = members.reach(Timestamp(now));
    members.set_reach(Timestamp(now), reach);
    members.hosted_anew();
    members.is_used(BackendId(0))
}

#[test]
fn a_backend_is_used_once_it_is_linked_to_all_who_are_served() {
    let mut members = Members::new(0);
    let early = members.add_frontend(Timestamp(0), "a:1".into(), 0, Known { id: None, token: 0 }).unwrap();
    assert!(!used(&mut members, 0) && members.is_served(early));
    let joined = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 1.0, vec![0])]), 0, all).unwrap();
    let late = members.add_frontend(Timestamp(0), "b:1".into(), 1, Known { id: None, token: 0 }).unwrap();
    assert!(!used(&mut members, 1));
    assert!(members.set_linked(joined.backend, early, Some(LinkId(1))));
    assert!(used(&mut members, 2) && members.is_served(early) && !members.is_served(late));
    assert_eq!((members.models[0].hosts, members.gpus_that_come()), (1, vec![GpuId(0)]));
    assert!(members.set_linked(joined.backend, late, Some(LinkId(1))));
    assert!(used(&mut members, 3) && !members.is_served(late), "it has yet to connect to a ModelThread");
    members.handle_connected(Member::Frontend(late));
    assert!(used(&mut members, 4) && members.is_served(late));
}

#[test]
fn a_frontend_that_cannot_be_reached_delays_a_backend_only_so_long() {
    let mut members = Members::new(0);
    let there = members.add_frontend(Timestamp(0), "a:1".into(), 0, Known { id: None, token: 0 }).unwrap();
    assert!(!used(&mut members, 0));
    let [one, other] = [5, 6].map(|at| members.add_backend(Timestamp(at), hello(1, vec![]), 0, all).unwrap().backend);
    members.set_linked(other, there, Some(LinkId(1)));
    let grace_ends = |at| Timestamp(at) + LINK_GRACE;
    assert!(!used(&mut members, 7) && members.is_used(other));
    assert_eq!(members.poll_timeout(), Some(grace_ends(5)));
    assert!(!used(&mut members, grace_ends(5).0) && members.is_used(other), "who reaches nobody stays out");
    assert_eq!((members.poll_timeout(), members.is_served(there)), (None, true));
    members.set_linked(one, there, Some(LinkId(1)));
    assert!(used(&mut members, grace_ends(6).0));
}

#[test]
fn two_offers_of_a_model_share_its_id_and_the_slower_profile() {
    let mut members = Members::new(0);
    let one = members.add_backend(Timestamp(0), hello(2, vec![offer("m", 1.0, vec![0, 1])]), 0, all).unwrap();
    let other = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 2.0, vec![0])]), 0, all).unwrap();
    let same = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 0.5, vec![0])]), 0, all).unwrap();
    assert_eq!((one.models.clone(), other.models), (vec![ModelId(0)], vec![ModelId(0)]));
    assert_eq!((other.reprofiled.len(), same.reprofiled.len()), (1, 0));
    assert_eq!(members.models[0].profile.latency(3), Span::from_millis(7));
    assert_eq!(members.gpus.len(), 4);
}

#[test]
fn a_slower_backend_counts_while_it_is_there_and_equal_offers_are_one() {
    let mut members = Members::new(0);
    let [slow, fast, same] = [2.0, 1.0, 1.0].map(|alpha_ms| {
        let offers = vec![offer("m", alpha_ms, vec![0, 1])];
        members.add_backend(Timestamp(0), hello(3, offers), 0, all).unwrap().backend
    });
    let offers: Vec<_> = members.offers(ModelId(0)).collect();
    let ids = |backend: BackendId| members.backends[&backend].gpus[..2].to_vec();
    assert_eq!(offers.iter().map(|offer| offer.0).collect::<Vec<_>>(), [slow, fast, same]);
    assert!(offers.iter().all(|(backend, gpus, _)| *gpus == ids(*backend)));
    assert!(Arc::ptr_eq(offers[1].2, offers[2].2) && !Arc::ptr_eq(offers[0].2, offers[1].2));
    assert_eq!(members.remove_backend(fast).unwrap().1, []);
    assert_eq!(members.models[0].profile.latency(3), Span::from_millis(7));
    assert_eq!(members.remove_backend(slow).unwrap().1, [ModelId(0)]);
    assert_eq!(members.models[0].profile.latency(3), Span::from_millis(4));
    assert_eq!(members.remove_backend(same).unwrap().1, [], "who comes back is measured again");
    assert_eq!(members.models[0].profile.latency(3), Span::from_millis(4));
}

#[test]
fn what_a_backend_has_measured_counts_once_instead_of_what_it_had_offered() {
    let mut members = Members::new(0);
    let [one, other] = [1.0, 1.0].map(|alpha_ms| {
        let offers = vec![offer("m", alpha_ms, vec![0])];
        members.add_backend(Timestamp(0), hello(1, offers), 0, all).unwrap().backend
    });
    let (model, profile) = (ModelId(0), |alpha_ms| LatencyProfile::linear(alpha_ms, 1.0, 8).unwrap());
    let latency = |members: &Members| members.models[0].profile.latency(4);
    assert_eq!(members.set_measured((one, model), profile(0.5), None), Ok(true));
    assert_eq!(latency(&members), Span::from_millis(5), "the other one has yet to measure it");
    let cost = Some(BatchCost { fixed: Span(3), per_task_ppm: 7 });
    assert_eq!(members.set_measured((other, model), profile(0.25), cost), Ok(true));
    assert_eq!((latency(&members), members.cost(model)), (Span::from_millis(3), cost));
    let again = members.set_measured((other, model), profile(9.0), None).unwrap_err();
    assert_eq!((&again[..], latency(&members)), ("m: it was measured before", Span::from_millis(3)));
    assert_eq!(members.set_measured((other, ModelId(77)), profile(9.0), None), Ok(false), "it may have gone");
    let third = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 0.5, vec![0])]), 0, all).unwrap().backend;
    let short = members.set_measured((third, model), LatencyProfile::linear(1.0, 1.0, 7).unwrap(), None);
    assert_eq!(short.unwrap_err(), "m: l(b) was measured up to 7, expected 8");
}

#[test]
fn wrong_offers_are_refused_with_the_reason() {
    let mut members = Members::new(0);
    let mut refuse = |hello| members.add_backend(Timestamp(0), hello, 0, all).unwrap_err().to_string();
    assert!(refuse(hello(0, vec![])).contains("gpus is 0, expected 1 to 64"));
    assert!(refuse(hello(2, vec![offer("m", 1.0, vec![2])])).contains("m names GPU 2 of 2"));
    assert!(refuse(hello(1, vec![offer("", 1.0, vec![0])])).contains("name"));
}

#[test]
fn a_loaded_version_takes_the_place_of_the_others_and_their_profile() {
    let mut members = Members::new(0);
    let one = members.add_backend(Timestamp(0), hello(2, vec![offer("m", 5.0, vec![0, 1])]), 0, all).unwrap();
    let other = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 5.0, vec![0])]), 0, all).unwrap();
    used(&mut members, 0);
    members.gpus_that_come();
    let newer = |alpha_ms| ModelOffer { version: "2".into(), ..offer("m", alpha_ms, vec![0]) };
    let offers = [(one.backend, vec![newer(1.0)]), (other.backend, vec![newer(2.0)])].into();
    let hosted = members.host(&offers);
    assert_eq!(hosted.models, [(one.backend, ModelId(1)), (other.backend, ModelId(1))].into());
    assert_eq!(hosted.replaced, [(one.backend, ModelId(0)), (other.backend, ModelId(0))].into());
    assert_eq!(members.models[1].profile.latency(1), Span::from_millis(3));
    assert!(hosted.replaced.iter().all(|&(backend, model)| members.let_go(backend, model)));
    assert!(!members.let_go(one.backend, ModelId(0)), "it is gone");
    // The second GPU of the first backend hosts nothing that is of use any more, so the planner need not know.
    let reach = members.reach(Timestamp(1));
    assert_eq!(members.gpus_that_leave(&reach), [one_gpu(&members, one.backend), one_gpu(&members, other.backend)]);
    let again = [(one.backend, vec![newer(0.5)]), (other.backend, vec![newer(0.5)])].into();
    assert_eq!(members.host(&again).replaced, BTreeSet::new());
    assert_eq!(members.models[1].profile.latency(1), Span::from_micros(1_500), "not the slower one of before");
    assert_eq!(members.withdraw("m"), [(one.backend, ModelId(1)), (other.backend, ModelId(1))].into());
    assert!(used(&mut members, 2) && members.is_known("m"));
    assert_eq!(members.models[1].hosts, 0);
}

fn one_gpu(members: &Members, backend: BackendId) -> GpuId {
    members.backends[&backend].gpus[0]
}

#[test]
fn a_load_hosts_several_versions_and_lets_go_of_those_that_it_does_not_name() {
    let mut members = Members::new(0);
    let version = |version: &str, alpha_ms| ModelOffer { version: version.into(), ..offer("m", alpha_ms, vec![0]) };
    let backend = members.add_backend(Timestamp(0), hello(1, vec![version("1", 1.0), version("2", 2.0)]), 0, all);
    let backend = backend.unwrap().backend;
    used(&mut members, 0);
    assert_eq!(members.models.iter().map(|model| model.hosts).collect::<Vec<_>>(), [1, 1]);
    let hosted = members.host(&[(backend, vec![version("2", 4.0), version("3", 3.0)])].into());
    assert_eq!(hosted.models, [(backend, ModelId(1)), (backend, ModelId(2))].into());
    assert_eq!((hosted.replaced, hosted.refused), ([(backend, ModelId(0))].into(), BTreeSet::new()));
    assert_eq!(*members.gpus[&one_gpu(&members, backend)].models, [ModelId(0), ModelId(1), ModelId(2)]);
    assert!(members.let_go(backend, ModelId(0)));
    assert_eq!(*members.gpus[&one_gpu(&members, backend)].models, [ModelId(1), ModelId(2)]);
    let alpha = |model: usize| members.models[model].profile.latency(2) - members.models[model].profile.latency(1);
    assert_eq!((alpha(1), alpha(2)), (Span::from_millis(4), Span::from_millis(3)), "each has its own l(b)");
    assert_eq!(members.withdraw("m"), [(backend, ModelId(1)), (backend, ModelId(2))].into());
}

/// A hello says how many models follow. Two that each were within the bound could pass it together, by a page each.
#[test]
fn backends_that_name_models_at_the_same_time_stay_within_the_bound() {
    let mut members = Members::new(0);
    let mut join = |more: usize| {
        let hello = BackendHello { more: more as u32, ..hello(1, vec![]) };
        members.add_backend(Timestamp(0), hello, 0, all).unwrap().backend
    };
    let (many, few) = (join(MODELS_MAX), join(20));
    let offers = |name: &str, count: usize| -> Vec<_> {
        (0..count).map(|number| offer(&format!("{name}{number}"), 1.0, vec![0])).collect()
    };
    members.add_offers(Timestamp(1), many, &offers("a", MODELS_MAX - 5), all).unwrap();
    let refused = members.add_offers(Timestamp(2), few, &offers("b", 6), all).unwrap_err();
    assert!(refused.contains("takes no more"), "{refused}");
    assert_eq!(members.models.len(), MODELS_MAX - 5);
    // Those that are known need no room.
    members.add_offers(Timestamp(3), few, &[offers("a", 6), offers("b", 5)].concat(), all).unwrap();
    assert_eq!(members.models.len(), MODELS_MAX);
}
