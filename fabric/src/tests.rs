use super::*;

mod thousands;

/// Seeds that every test run goes through.
const SEEDS: u64 = 1_000;

fn options(seed: u64, mutation: Option<Mutation>) -> Options {
    Options { seed, faults: FaultKinds::ALL, mutation, is_traced: false }
}

/// Two tests go through the seeds, as tests of one binary run beside each other.
#[test]
fn no_seed_of_the_first_half_breaks_an_invariant() {
    no_seed_breaks_an_invariant(0..SEEDS / 2);
}

#[test]
fn no_seed_of_the_second_half_breaks_an_invariant() {
    no_seed_breaks_an_invariant(SEEDS / 2..SEEDS);
}

/// Replays one seed: `downbeat sim --fabric --seed 17`.
fn no_seed_breaks_an_invariant(seeds: std::ops::Range<u64>) {
    let count = seeds.end - seeds.start;
    let mut total = Summary::default();
    let mut kinds = std::collections::BTreeSet::new();
    for seed in seeds {
        let (result, _) = run(options(seed, None));
        let summary = result.unwrap_or_else(|failure| {
            panic!(
                "seed {seed}, after {}: {}; replay it: downbeat sim --fabric --seed {seed}",
                failure.at, failure.violation
            )
        });
        total.sent += summary.sent;
        total.served += summary.served;
        total.late += summary.late;
        total.samples += summary.samples;
        total.lower_epochs += summary.lower_epochs;
        kinds.extend(summary.failed.into_keys());
    }
    assert!(total.served * 2 > total.sent && total.late * 100 > total.served, "{total:?}");
    eprintln!("{total:?}");
    assert!(total.lower_epochs > count, "schedulers tell lower epochs: {total:?}");
    assert!(total.samples > count, "dynamic models' times are learned: {total:?}");
    // Runs are worth something only if faults reach every way in which a request can end.
    for kind in [
        "Dropped",
        "WindowMissed",
        "SchedulerLost",
        "NoScheduler",
        "NeverMet",
        "NoBackend",
        "Unloaded",
        "Failed",
        "InputLate",
        "Undecodable",
    ] {
        assert!(kinds.contains(kind), "no seed gave {kind}: {kinds:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let traced = |seed| run(Options { is_traced: true, ..options(seed, None) }).1;
    assert_eq!(traced(7), traced(7));
    assert_ne!(traced(7), traced(8));
}

#[test]
fn without_faults_all_that_can_be_served_is() {
    let (mut served, mut possible) = (0, 0);
    // Where models are placed, each has the GPUs of one backend, which may be too few for it.
    for seed in (0..60).filter(|seed| !is_placed(*seed)) {
        let (result, _) = run(Options { faults: FaultKinds::default(), ..options(seed, None) });
        let summary = result.unwrap();
        let of_seed = summary.sent - summary.gave_up();
        // In some worlds two models share memory for one and a half.
        assert!(summary.served * 100 >= of_seed * 94, "seed {seed}: {summary:?}");
        (served, possible) = (served + summary.served, possible + of_seed);
    }
    assert!(served * 100 >= possible * 99, "{served} of {possible}");
}

#[test]
fn a_backend_that_leaves_in_good_order_loses_nothing() {
    let faults = FaultKinds { leave: true, ..FaultKinds::default() };
    for seed in 0..100 {
        let (result, _) = run(Options { faults, ..options(seed, None) });
        let Summary { failed, .. } = result.unwrap();
        for kind in ["BackendLost", "NoAnswer", "Failed", "BadAnswer", "SchedulerLost"] {
            assert!(!failed.contains_key(kind), "seed {seed}: {failed:?}");
        }
    }
}

/// After the faults of this seed one batch of three requests misses its window, as an input is decoded at the last
/// moment: 26 of 29 requests are served, and all but a few of ten times as many.
#[test]
fn a_batch_that_misses_its_window_by_chance_is_no_fault() {
    let faults = FaultKinds { scheduler: true, ..FaultKinds::default() };
    let (result, _) = run(Options { faults, ..options(41_226, None) });
    assert!(result.is_ok(), "{result:?}");
}

/// What becomes of requests when this happens to the first of several schedulers in the middle of them: how many there
/// were, and how they failed.
fn failures(seeds: u64, what: impl Fn(Node) -> Vec<(Span, Happening)>) -> (u64, BTreeMap<String, u64>) {
    let leaves = !what(Node(0)).is_empty();
    let Summary { sent, failed, .. } = summary_of(seeds, leaves, what);
    (sent, failed)
}

/// The same, with all that happened, and whether the first scheduler is the primary no more afterwards.
fn summary_of(seeds: u64, is_primary_left: bool, what: impl Fn(Node) -> Vec<(Span, Happening)>) -> Summary {
    let faults = FaultKinds { scheduler: true, ..FaultKinds::default() };
    let mut total = Summary::default();
    for seed in 0..seeds {
        let mut fabric = Fabric::new(Options { faults, ..options(seed, None) });
        if fabric.schedulers.len() == 1 {
            continue;
        }
        for index in 0..fabric.env.members.len() {
            fabric.env.schedule(Timestamp::ZERO, Happening::Start(Node(index)));
        }
        fabric.run_until(WARM).unwrap();
        for (after, happening) in what(fabric.roles.schedulers[0]) {
            fabric.env.after(Span::from_millis(100) + after, happening);
        }
        fabric.serve(WARM + CALM, ENDS).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        fabric.check_settled().unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let primary = fabric.schedulers.iter_mut().position(|scheduler| scheduler.claim().is_primary());
        assert_eq!(primary != Some(0), is_primary_left, "seed {seed}: {primary:?} is the primary");
        total.add(&fabric.summary());
    }
    total
}

/// Clients give up, ask for what cannot be, or are late themselves.
const OWN_FAULTS: [&str; 4] = ["HungUp", "NeverMet", "InputLate", "Undecodable"];

#[test]
fn a_primary_that_dies_costs_only_what_its_death_makes_late() {
    let crash = |node| {
        let fault = Fault::Crash { node, tells: true };
        vec![(Span::ZERO, Happening::Fault(fault)), (Span::from_millis(700), Happening::Heal(fault))]
    };
    let (sent, mut failed) = failures(200, crash);
    failed.retain(|kind, _| !OWN_FAULTS.contains(&kind.as_str()));
    eprintln!("{sent} requests, {failed:?}");
    let late = ["Dropped", "WindowMissed", "BackendLost"].iter().filter_map(|kind| failed.remove(*kind)).sum::<u64>();
    assert_eq!(failed, BTreeMap::new(), "nobody is told that the scheduler was lost");
    assert!(sent > 5_000 && late * 50 < sent, "{late} of {sent}");
}

#[test]
fn a_primary_that_is_moved_costs_nothing() {
    // Nobody knows what requests of dynamic models take, so some are late whoever is the primary.
    let (_, by_chance) = failures(200, |_| Vec::new());
    let (sent, mut failed) = failures(200, |node| vec![(Span::ZERO, Happening::HandOver(Node(node.0 + 1)))]);
    failed.retain(|kind, _| !OWN_FAULTS.contains(&kind.as_str()));
    eprintln!("{sent} requests, {failed:?}, {by_chance:?} if nobody moves");
    let late = |failed: &BTreeMap<String, u64>| {
        ["Dropped", "WindowMissed"].iter().filter_map(|&kind| failed.get(kind)).sum::<u64>()
    };
    let (late, by_chance) = (late(&failed), late(&by_chance));
    failed.retain(|kind, _| !["Dropped", "WindowMissed"].contains(&kind.as_str()));
    assert_eq!(failed, BTreeMap::new());
    assert!(sent > 5_000 && late < by_chance + sent / 200, "{late} of {sent}, {by_chance} if nobody moves");
}

/// A frontend that heard a lower epoch from its primary once left it, and all its requests ended.
#[test]
fn a_lower_epoch_costs_nothing_whoever_tells_it() {
    let tell = |node: Node| {
        let tells = |node| Happening::Fault(Fault::LowerEpoch { node });
        [0, 20, 40].map(|ms| (Span::from_millis(ms), tells(Node(node.0 + usize::from(ms == 40))))).into()
    };
    let Summary { sent, mut failed, lower_epochs, .. } = summary_of(50, false, tell);
    // Some are late whoever says what.
    failed.retain(|kind, _| !OWN_FAULTS.contains(&kind.as_str()) && !["Dropped", "WindowMissed"].contains(&&**kind));
    assert_eq!(failed, BTreeMap::new());
    assert!(sent > 1_000 && lower_epochs > 3 * 50, "{lower_epochs} epochs, {sent} requests");
}

/// How many seeds it takes until a planted bug is found.
fn seeds_until_found(mutation: Mutation) -> u64 {
    let found = |seed: &u64| run(options(*seed, Some(mutation))).0.is_err();
    (0..SEEDS).find(found).map_or_else(|| panic!("{mutation:?} is not found"), |seed| seed + 1)
}

/// The scheduler's links go down again and again while READs and WRITEs are long on their way: frontends fence backends
/// that have not heard of it, and give slots to others at once. That a READ or WRITE meets another's slot is rare
/// otherwise: in a few of a thousand worlds with drawn partitions.
fn fenced(seed: u64, mutation: Option<Mutation>) -> Result<(), Violation> {
    let mut fabric = Fabric::new(Options { faults: FaultKinds::default(), ..options(seed, mutation) });
    for index in 0..fabric.env.members.len() {
        fabric.env.schedule(Timestamp::ZERO, Happening::Start(Node(index)));
    }
    fabric.run_until(WARM)?;
    let Roles { schedulers, frontends, backends } = fabric.roles.clone();
    for (frontend, backend) in frontends.iter().flat_map(|&frontend| backends.iter().map(move |&b| (frontend, b))) {
        let fault = Fault::SlowPair { pair: (frontend, backend), longer: Span::from_millis(20) };
        fabric.env.schedule(WARM, Happening::Fault(fault));
    }
    for cut in 1..=10 {
        let fault = Fault::Cut { node: schedulers[0] };
        fabric.env.schedule(WARM + Span::from_millis(cut * 100), Happening::Fault(fault));
    }
    fabric.serve(WARM + Span::from_millis(1_100), ENDS)?;
    Ok(())
}

#[test]
fn a_fence_that_is_skipped_is_found() {
    for seed in 0..20 {
        fenced(seed, None).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
    }
    let found = (0..20).find_map(|seed| fenced(seed, Some(Mutation::SkipFence)).err());
    assert!(matches!(found, Some(Violation::Slot(_))), "{found:?}");
}

#[test]
fn a_slot_that_is_reused_early_is_found() {
    eprintln!("found after {} seeds", seeds_until_found(Mutation::ReuseEarly));
}

#[test]
fn an_outcome_that_is_dropped_is_found() {
    eprintln!("found after {} seeds", seeds_until_found(Mutation::DropOutcome));
}

#[test]
fn a_guard_that_is_not_looked_at_is_found() {
    let faults = FaultKinds::default();
    let found = |seed| run(Options { faults, ..options(seed, Some(Mutation::SkipGuard)) }).0.unwrap_err().violation;
    assert!(matches!(found(0), Violation::Slot(text) if text.contains("found another input")));
}

/// A backend that broke its word was believed: its tasks had ended for all but their frontend, so their requests hung
/// until long after their deadlines, and their slots were lost.
#[test]
fn an_answer_that_was_never_written_ends_its_request_and_its_writers_links() {
    let mut failed = 0;
    for seed in 0..40 {
        let faults = FaultKinds::default();
        let mut fabric = Fabric::new(Options { faults, ..options(seed, Some(Mutation::SkipWrite)) });
        for index in 0..fabric.env.members.len() {
            fabric.env.schedule(Timestamp::ZERO, Happening::Start(Node(index)));
        }
        fabric.run_until(WARM).unwrap();
        fabric.serve(WARM + CALM, ENDS).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        fabric.check_settled().unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let summary = fabric.summary();
        assert!(!summary.failed.contains_key("NoAnswer"), "seed {seed}: {summary:?}");
        failed += summary.failed.get("NotWritten").copied().unwrap_or_default();
        // The other ones serve, as many as they can.
        let served = fabric.serve(fabric.env.now + CALM, ENDS).unwrap();
        assert!(served > 0.25, "seed {seed}: {served}");
    }
    assert!(failed > 40, "{failed}");
}

#[test]
fn faults_are_told_by_name() {
    assert_eq!("all".parse(), Ok(FaultKinds::ALL));
    assert_eq!("crash,clock".parse(), Ok(FaultKinds { crash: true, clock: true, ..FaultKinds::default() }));
    assert_eq!("none".parse(), Ok(FaultKinds::default()));
    let error = "crash,fire".parse::<FaultKinds>().unwrap_err();
    assert_eq!(error, format!("found 'fire', expected {}", FaultKinds::EXPECTED));
}
