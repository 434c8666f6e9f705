//! The search against every placement of small problems, each judged by the paper's formulas as they stand.

use proptest::prelude::*;

use super::*;

/// Steps that find the best of a few hundred placements.
const STEPS: u64 = 100_000;

/// The paper's objective (3) with (6) and (7), or `None` where (4), (5), (8) to (10), or a pin, does not hold.
fn oracle(problem: &Problem, place: &[usize]) -> Option<f64> {
    let sub_clusters = problem.sub_clusters as f64;
    let mean = |of: &dyn Fn(&Model) -> f64| problem.models.iter().map(of).sum::<f64>() / sub_clusters;
    let (rate, memory) = (mean(&|model| model.rate_rps), mean(&|model| model.static_bytes as f64));
    let (mut rate_deviation, mut memory_deviation) = (0.0f64, 0.0f64);
    for at in 0..problem.sub_clusters {
        let here: Vec<&Model> =
            problem.models.iter().zip(place).filter(|(_, there)| **there == at).map(|pair| pair.0).collect();
        let rate_here: f64 = here.iter().map(|model| model.rate_rps).sum();
        let memory_here: u64 = here.iter().map(|model| model.static_bytes).sum();
        let dynamic = here.iter().map(|model| model.dynamic_bytes).max().unwrap_or(0);
        if problem.rate_max_rps.is_some_and(|max| rate_here > max + 1e-6)
            || problem.memory_max_bytes.is_some_and(|max| memory_here + dynamic > max)
        {
            return None;
        }
        rate_deviation = rate_deviation.max((rate_here - rate).abs());
        memory_deviation = memory_deviation.max((memory_here as f64 - memory).abs());
    }
    let cost: f64 = problem
        .models
        .iter()
        .zip(place)
        .map(|(model, &at)| if model.former.is_some_and(|former| former != at) { model.move_cost } else { 0.0 })
        .sum();
    if problem.disruption_max.is_some_and(|max| cost > max + 1e-6) {
        return None;
    }
    let index = |name: &str| problem.models.iter().position(|model| model.name == name).unwrap();
    if problem.pins.iter().any(|pin| place[index(&pin.model)] != pin.sub_cluster) {
        return None;
    }
    let part = |deviation: f64, mean: f64| if mean > 0.0 { deviation / mean } else { 0.0 };
    Some(part(rate_deviation, rate) + problem.memory_weight * part(memory_deviation, memory))
}

/// The lowest objective of all placements.
fn optimum(problem: &Problem) -> Option<f64> {
    let count = problem.sub_clusters.pow(problem.models.len() as u32);
    let place = |number: usize| -> Vec<usize> {
        (0..problem.models.len() as u32)
            .map(|model| number / problem.sub_clusters.pow(model) % problem.sub_clusters)
            .collect()
    };
    (0..count).filter_map(|number| oracle(problem, &place(number))).reduce(f64::min)
}

fn model(sub_clusters: usize) -> impl Strategy<Value = Model> {
    let former = prop_oneof![1 => Just(None), 4 => (0..sub_clusters).prop_map(Some)];
    (0u32..50, 0u64..20, 0u64..10, 0u32..4, former).prop_map(|(rate, static_bytes, dynamic_bytes, cost, former)| {
        Model {
            name: String::new(),
            rate_rps: f64::from(rate) / 4.0,
            static_bytes,
            dynamic_bytes,
            move_cost: f64::from(cost),
            former,
        }
    })
}

fn problem() -> impl Strategy<Value = Problem> {
    (1usize..4).prop_flat_map(|sub_clusters| {
        let models = prop::collection::vec(model(sub_clusters), 1..7);
        let limits = (prop::option::of(5.0..80.0f64), prop::option::of(10u64..50), prop::option::of(1u32..9));
        let pins = prop::collection::vec((0..6usize, 0..sub_clusters), 0..3);
        (models, limits, pins, 0u32..4).prop_map(
            move |(mut models, (rate_max_rps, memory_max_bytes, moves), pins, weight)| {
                models.iter_mut().enumerate().for_each(|(index, model)| model.name = format!("m{index}"));
                let pins = pins.into_iter().filter(|(index, _)| *index < models.len());
                Problem {
                    rate_max_rps,
                    memory_max_bytes,
                    memory_weight: f64::from(weight) / 2.0,
                    disruption_max: moves.map(f64::from),
                    pins: pins.map(|(index, sub_cluster)| Pin { model: format!("m{index}"), sub_cluster }).collect(),
                    ..Problem::new(sub_clusters, models)
                }
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_found_is_the_best_that_the_papers_formulas_allow(problem in problem(), seed in 0..u64::MAX) {
        let best = optimum(&problem);
        let searched = Search::new(&problem, seed).and_then(|mut search| {
            search.poll(STEPS);
            search.best()
        });
        let found = match searched {
            Ok(found) => found,
            Err(error) => {
                prop_assert_eq!(best, None, "{}", error);
                return Ok(());
            }
        };
        let best = best.expect("what was found is one");
        let objective = oracle(&problem, &found.sub_clusters).expect("what is found keeps to all constraints");
        prop_assert!((objective - found.score.objective).abs() < 1e-6, "{objective} {found:?}");
        prop_assert!(objective <= best + 1e-5, "{objective} instead of {best}");
        prop_assert!(found.bound <= best + 1e-6, "a bound of {} above {best}", found.bound);
    }
}

/// So many models, each of a load of its own, that are in turn in each sub-cluster.
fn many(count: usize, sub_clusters: usize) -> Problem {
    let model = |index: usize| Model {
        name: format!("m{index}"),
        rate_rps: (1 + index * 7919 % 1009) as f64,
        static_bytes: (1 + index * 104_729 % 499) as u64 * 1_000_000,
        dynamic_bytes: 100_000_000,
        move_cost: 1.0,
        former: Some(index % sub_clusters),
    };
    Problem::new(sub_clusters, (0..count).map(model).collect())
}

#[test]
fn it_is_never_worse_than_its_start_nor_than_before_and_depends_on_steps_only() {
    let problem = many(120, 7);
    let now: Vec<usize> = problem.models.iter().map(|model| model.former.unwrap()).collect();
    let (mut whole, mut parts) = (Search::new(&problem, 3).unwrap(), Search::new(&problem, 3).unwrap());
    let mut best = whole.start();
    assert!(best.objective <= whole.score(&now).objective);
    for part in 1..=100 {
        parts.poll(10 * part);
        let found = parts.best().unwrap();
        assert!(found.score.objective <= best.objective, "{found:?} {best:?}");
        assert!(found.score == parts.score(&found.sub_clusters) && found.bound <= found.score.objective);
        best = found.score;
    }
    whole.poll(parts.steps());
    assert_eq!((whole.best(), whole.steps()), (parts.best(), 50_500));
    assert!(best.objective < 0.5 * whole.start().objective, "{best:?} {:?}", whole.start());
    let other = Search::new(&problem, 4).map(|mut search| {
        search.poll(50_500);
        search.best()
    });
    assert_ne!(other.unwrap(), whole.best());
}

#[test]
fn few_moves_lead_from_what_is_there_to_something_better_and_say_what_each_makes_of_it() {
    let problem = Problem { disruption_max: Some(9.0), ..many(60, 4) };
    let now: Vec<usize> = problem.models.iter().map(|model| model.former.unwrap()).collect();
    let mut search = Search::new(&problem, 1).unwrap();
    search.poll(200_000);
    let found = search.best().unwrap();
    let plan = search.plan(&found.sub_clusters);
    assert!((1..=9).contains(&plan.moves.len()) && found.disruption == plan.moves.len() as f64);
    assert_eq!(plan.before, search.score(&now));
    let mut place = now;
    for step in &plan.moves {
        assert_eq!(std::mem::replace(&mut place[step.model], step.to), step.from);
        assert_eq!(search.score(&place), step.after);
    }
    assert_eq!(place, found.sub_clusters);
    assert!(found.score.objective < 0.5 * plan.before.objective, "{found:?} {:?}", plan.before);
    assert!(found.bound <= found.score.objective, "{found:?}");
}

#[test]
fn a_former_placement_that_no_longer_fits_is_mended_within_the_bound() {
    let mut problem = many(40, 4);
    problem.models.iter_mut().for_each(|model| model.former = Some(usize::from(model.name == "m0")));
    let all: u64 = problem.models.iter().map(|model| model.static_bytes).sum();
    problem.memory_max_bytes = Some(all / 2);
    let found = |disruption_max: f64| {
        let mut search = Search::new(&Problem { disruption_max: Some(disruption_max), ..problem.clone() }, 1).unwrap();
        assert!(search.start().excess > 0.0);
        search.poll(50_000);
        search.best()
    };
    assert!(found(30.0).is_ok_and(|found| found.score.excess == 0.0 && found.disruption <= 30.0));
    let error = found(1.0).unwrap_err().to_string();
    assert!(error.starts_with("memory_max_bytes: found ") && error.ends_with("or a higher disruption_max"), "{error}");
}

/// A penalty that grew with each cycle froze the search where a sub-cluster had a hundredth too much.
#[test]
fn what_fits_in_two_ways_of_ten_thousand_is_found() {
    let static_bytes = [3458, 1010, 1203, 2703, 2215, 171, 4369, 4149, 3989, 2485];
    let dynamic_bytes = [1368, 461, 1468, 428, 1675, 552, 1619, 1490, 513, 1510];
    let model = |index: usize| Model {
        name: index.to_string(),
        rate_rps: 1.0,
        static_bytes: static_bytes[index],
        dynamic_bytes: dynamic_bytes[index],
        move_cost: 1.0,
        former: None,
    };
    let problem = Problem { memory_max_bytes: Some(10_256), ..Problem::new(3, (0..10).map(model).collect()) };
    for seed in 0..8 {
        let mut search = Search::new(&problem, seed).unwrap();
        assert!(search.start().excess > 0.0);
        search.poll(STEPS);
        let found = search.best().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(oracle(&problem, &found.sub_clusters).is_some(), "{found:?}");
    }
}

#[test]
fn a_bound_has_a_reason_where_no_placement_is_balanced() {
    let with = |rates: &[f64], pins: &[usize]| {
        let rates = rates.iter().enumerate();
        let models = rates.map(|(index, &rate_rps)| Model {
            name: index.to_string(),
            rate_rps,
            static_bytes: 0,
            dynamic_bytes: 0,
            move_cost: 1.0,
            former: None,
        });
        let mut problem = Problem::new(2, models.collect());
        let pin = |(index, &sub_cluster): (usize, &usize)| Pin { model: index.to_string(), sub_cluster };
        problem.pins = pins.iter().enumerate().map(pin).collect();
        Search::new(&problem, 1).unwrap().best().unwrap().bound
    };
    // One that is more than the mean; three equal ones; a sum that cannot be halved; more than half of it pinned.
    for (rates, pins, deviation) in [
        (&[7.0, 1.0, 1.0][..], &[][..], 2.5 / 4.5),
        (&[3.0, 3.0, 3.0], &[], 1.5 / 4.5),
        (&[2.0, 2.0, 4.0, 6.0, 4.0], &[], 1.0 / 9.0),
        (&[3.0, 2.0, 2.0, 1.0], &[1, 1], 1.0 / 4.0),
        (&[5.0], &[], 1.0),
    ] {
        let found = with(rates, pins);
        assert!((found - deviation).abs() < 1e-9, "{rates:?}: {found} instead of {deviation}");
    }
    // Eight equal ones in one of four sub-clusters, of which three may move: five stay, where two would be the mean.
    let mut problem = many(8, 4);
    for model in &mut problem.models {
        (model.rate_rps, model.static_bytes, model.former) = (1.0, 1, Some(0));
    }
    problem.disruption_max = Some(3.0);
    let found = Search::new(&problem, 1).unwrap().best().unwrap();
    assert!((found.bound - 2.0 * 3.0 / 2.0).abs() < 1e-6, "{found:?}");
}

#[test]
fn what_cannot_be_is_refused_by_its_key() {
    let gigabyte = 1_000_000_000;
    let with = |change: &dyn Fn(&mut Problem)| {
        let mut problem = many(6, 3);
        change(&mut problem);
        Search::new(&problem, 1).map(|_| ()).unwrap_err().to_string()
    };
    let pin = |model: &str, sub_cluster| Pin { model: model.to_owned(), sub_cluster };
    for (found, expected) in [
        (with(&|problem| problem.sub_clusters = 0), "sub_clusters: found 0, expected 1 to 4096"),
        (with(&|problem| problem.models.clear()), "models: found 0, expected 1 to 100000"),
        (with(&|problem| problem.models[1].name = "m0".into()), "models: found \"m0\" twice, expected unique names"),
        (
            with(&|problem| problem.models[1].rate_rps = f64::NAN),
            "model \"m1\": rate_rps: found NaN, expected a number from 0 to 100000000",
        ),
        (
            with(&|problem| problem.models[1].rate_rps = f64::INFINITY),
            "model \"m1\": rate_rps: found inf, expected a number from 0 to 100000000",
        ),
        (
            with(&|problem| problem.models[2].move_cost = -1.0),
            "model \"m2\": move_cost: found -1, expected a number from 0 to 1000000",
        ),
        (with(&|problem| problem.models[2].former = Some(3)), "model \"m2\": former: found 3, expected below 3"),
        (
            with(&|problem| problem.models[5].static_bytes = u64::MAX),
            "model \"m5\": static_bytes: found 18446744073709551615, expected at most 4611686018427387904 bytes of all \
             models together",
        ),
        (
            with(&|problem| problem.memory_max_bytes = Some(gigabyte / 2)),
            "model \"m1\": static_bytes + dynamic_bytes: found 539000000 bytes, expected at most memory_max_bytes, \
             500000000 bytes: it fits no sub-cluster",
        ),
        (
            with(&|problem| {
                problem.models.iter_mut().for_each(|model| model.rate_rps *= 100.0);
                problem.rate_max_rps = Some(1_000.0);
            }),
            "model \"m1\": rate_rps: found 85700 requests/s, expected at most rate_max_rps, 1000 requests/s: it fits \
             no sub-cluster",
        ),
        (
            with(&|problem| problem.rate_max_rps = Some(900.0)),
            "rate_max_rps: found 900 requests/s, expected at least 918.666667 requests/s, the mean of 3 sub-clusters, \
             or more of them",
        ),
        (
            with(&|problem| problem.memory_weight = f64::NAN),
            "memory_weight: found NaN, expected a number from 0 to 1000000",
        ),
        (
            with(&|problem| problem.disruption_max = Some(0.0)),
            "disruption_max: found 0, expected a number above 0, or none",
        ),
        (
            with(&|problem| problem.disruption_max = Some(f64::NAN)),
            "disruption_max: found NaN, expected a number from 0 to 1000000000000",
        ),
        (
            with(&|problem| problem.pins = vec![pin("x", 1)]),
            "pin of \"x\": found no such model, expected the name of a model",
        ),
        (with(&|problem| problem.pins = vec![pin("m1", 3)]), "pin of \"m1\": found 3, expected a sub-cluster below 3"),
        (
            with(&|problem| problem.pins = vec![pin("m1", 1), pin("m1", 2)]),
            "pin of \"m1\": found 1 and 2, expected one sub-cluster",
        ),
        (
            with(&|problem| {
                problem.pins = vec![pin("m1", 0), pin("m2", 0), pin("m3", 0)];
                problem.memory_max_bytes = Some(gigabyte);
            }),
            "pins: found 1234000000 bytes in sub-cluster 0, expected at most memory_max_bytes, 1000000000 bytes",
        ),
        (
            with(&|problem| {
                problem.pins = vec![pin("m0", 1), pin("m1", 0)];
                problem.disruption_max = Some(1.0);
            }),
            "pins: found moves to them that cost 2, expected at most disruption_max, 1",
        ),
    ] {
        assert!(found.starts_with(expected) && !found.contains('\n'), "{found}");
    }
}
