use std::{collections::BTreeMap, fs, path::Path};

use proptest::prelude::*;

use super::*;
use crate::{Refused, Repository};

fn write(repository: &Path, name: &str, config: &str) {
    fs::create_dir_all(repository.join(name).join("1")).unwrap();
    fs::write(repository.join(name).join("config.pbtxt"), config).unwrap();
}

/// A model that takes two inputs, the second if it is given, and makes two outputs. Nobody runs it.
const MEMBER: &str = r#"backend: "process" max_batch_size: 8
    input [ { name: "in" data_type: TYPE_UINT8 dims: 4 },
            { name: "more" data_type: TYPE_UINT8 dims: 4 optional: true } ]
    output [ { name: "out" data_type: TYPE_UINT8 dims: 4 }, { name: "rest" data_type: TYPE_UINT8 dims: 4 } ]
    parameters { key: "program" value { string_value: "none" } }"#;

fn map(pairs: &[(&str, &str)]) -> String {
    pairs.iter().map(|(key, value)| format!(r#"{{ key: "{key}" value: "{value}" }},"#)).collect()
}

fn step(model: &str, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> String {
    let maps = [map(inputs), map(outputs)].map(|map| map.trim_end_matches(',').to_owned());
    format!(r#"{{ model_name: "{model}" model_version: -1 input_map [ {} ] output_map [ {} ] }}"#, maps[0], maps[1])
}

/// One that takes and makes what a member does.
fn ensemble(steps: &[String]) -> String {
    let head = MEMBER.replace("backend: \"process\" max_batch_size: 8", "platform: \"ensemble\" max_batch_size: 4");
    let (head, _) = head.split_once("parameters").unwrap();
    format!("{head} ensemble_scheduling {{ step [ {} ] }}", steps.join(", "))
}

/// A member and these ensembles.
fn load(ensembles: &[(&str, String)]) -> Repository {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a", MEMBER);
    ensembles.iter().for_each(|(name, config)| write(folder.path(), name, config));
    crate::load(folder.path()).unwrap()
}

fn plain(model: &str) -> String {
    ensemble(&[step(model, &[("in", "in"), ("more", "more")], &[("out", "out"), ("rest", "rest")])])
}

fn graph<'r>(repository: &'r Repository, name: &str) -> &'r Ensemble {
    let face = repository.ensembles.iter().find(|face| face.name == name);
    face.unwrap_or_else(|| panic!("{:?}", repository.refused)).ensemble().unwrap()
}

#[test]
fn the_steps_of_an_inner_one_take_the_place_of_the_step_that_asks_it() {
    let chain = [
        step("a", &[("in", "in")], &[("out", "t")]),
        step("a", &[("in", "t"), ("more", "more")], &[("out", "out"), ("rest", "rest")]),
    ];
    // What is left out inside, what nobody takes, and a tensor of the same name on both sides.
    let outer = [
        step("chain", &[("in", "in")], &[("out", "t")]),
        step("chain", &[("in", "t"), ("more", "t")], &[("rest", "rest"), ("out", "u")]),
        step("a", &[("in", "u")], &[("out", "out")]),
    ];
    let repository = load(&[("chain", ensemble(&chain)), ("outer", ensemble(&outer)), ("z", plain("outer"))]);
    assert_eq!(repository.refused, []);
    let outer = graph(&repository, "outer");
    let tensor = |at: usize| outer.tensors[at].as_str();
    let told = outer.steps.iter().map(|step| {
        let of = |map: &[(String, usize)]| {
            map.iter().map(|(name, at)| format!("{name}={}", tensor(*at))).collect::<Vec<_>>()
        };
        format!("{} {} -> {}", step.model, of(&step.inputs).join(" "), of(&step.outputs).join(" "))
    });
    assert_eq!(
        told.collect::<Vec<_>>(),
        [
            "a in=in -> out=chain.t",
            "a in=chain.t -> out=t rest=chain.rest",
            "a in=t -> out=chain.t",
            "a in=chain.t more=t -> out=u rest=rest",
            "a in=u -> out=out",
        ]
    );
    let made: Vec<usize> = outer.steps.iter().flat_map(|step| step.outputs.iter().map(|(_, to)| *to)).collect();
    assert_eq!(made.iter().collect::<std::collections::BTreeSet<_>>().len(), made.len(), "each is made once");
    assert_eq!(outer.outputs.iter().map(|&at| tensor(at)).collect::<Vec<_>>(), ["out", "rest"]);
    let asked: Vec<_> = outer.asked().map(|(name, _)| name).collect();
    assert_eq!(asked, ["a", "a", "a", "a", "a", "chain", "chain"]);
    assert_eq!(outer.written().steps.len(), 3);
    let z = graph(&repository, "z");
    let inner: Vec<_> = z.asked().skip(5).map(|(name, _)| name).collect();
    assert_eq!((z.steps.len(), inner), (5, vec!["outer", "chain", "chain"]));
}

/// Why `e` is refused, beside `good`, which is not.
fn refused(ensembles: &[(&str, String)]) -> BTreeMap<String, String> {
    let all = [ensembles, &[("good", plain("a"))]].concat();
    let repository = load(&all);
    assert!(repository.ensembles.iter().any(|face| face.name == "good"), "{:?}", repository.refused);
    assert_eq!(repository.ensembles.len() + repository.refused.len(), all.len());
    repository.refused.into_iter().map(|Refused { name, reason, .. }| (name, reason)).collect()
}

#[test]
fn what_cannot_be_asked_in_another_is_named_and_so_are_those_that_ask_it() {
    let all = |model: &str| plain(model);
    let found = refused(&[("x", all("y")), ("y", all("z")), ("z", all("x")), ("e", all("x"))]);
    assert_eq!(found.len(), 4);
    assert!(found["x"].contains("a cycle: x, which asks y, which asks z asks it"), "{}", found["x"]);
    assert!(found["e"].contains("found 'x', an ensemble: ensemble 'x': ensemble_scheduling.step[0]"), "{}", found["e"]);

    let chain: Vec<(String, String)> = (0..9)
        .map(|at| (format!("d{at}"), all(&if at == 0 { "good".to_owned() } else { format!("d{}", at - 1) })))
        .collect();
    let chain: Vec<(&str, String)> = chain.iter().map(|(name, config)| (name.as_str(), config.clone())).collect();
    let found = refused(&chain);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["d7", "d8"], "`d6` has eight with `good`");
    assert!(found["d7"].contains("more than 8 inside one another: d7, d6, d5"), "{}", found["d7"]);

    let many = |model: &str, count: usize| {
        let steps = (0..count).map(|at| match at {
            0 => step(model, &[("in", "in")], &[("out", "out"), ("rest", "rest")]),
            at => step(model, &[("in", "in")], &[("out", &format!("t{at}"))]),
        });
        ensemble(&steps.collect::<Vec<_>>())
    };
    let found = refused(&[("six", many("a", 6)), ("full", many("six", 5)), ("e", many("six", 6))]);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["e"]);
    let expected = "ensemble_scheduling.step: found more with those of the ensembles that it asks, expected at most 32";
    assert_eq!(found["e"], format!("ensemble 'e': {expected} steps"));

    // The inner one says four, and its model more.
    let wrong =
        plain("a").replace("name: \"in\" data_type: TYPE_UINT8 dims: 4", "name: \"in\" data_type: TYPE_UINT8 dims: -1");
    let found = refused(&[
        ("loose", wrong),
        ("e", ensemble(&[step("loose", &[("inn", "in")], &[("out", "out"), ("rest", "rest")])])),
    ]);
    assert!(
        found["e"].contains("step[0].input_map: found none, expected one for input 'in' of model 'loose'"),
        "{}",
        found["e"]
    );
    let narrow = plain("good").replace("dims: 4 }", "dims: 5 }");
    let found = refused(&[("e", narrow)]);
    assert!(
        found["e"].contains("UINT8 [n, 5], expected UINT8 [n, 4], as input 'in' of model 'good'"),
        "{}",
        found["e"]
    );
    // An input that the inner one may leave out, and its model may not.
    let needs = ensemble(&[step("a", &[("in", "more")], &[("out", "out"), ("rest", "rest")])]);
    let found = refused(&[
        ("needs", needs),
        ("e", ensemble(&[step("needs", &[("in", "in")], &[("out", "out"), ("rest", "rest")])])),
    ]);
    assert!(found["e"].contains("input_map: found none, expected one for input 'in' of model 'a'"), "{}", found["e"]);
}

#[test]
fn what_selects_asks_models_and_is_asked_by_none() {
    let selects = |model: &str| {
        let steps = [step(model, &[("in", "in")], &[("out", "out"), ("rest", "rest")])];
        ensemble(&steps) + r#" parameters { key: "selection" value { string_value: "static" } }"#
    };
    let found = refused(&[("vote", selects("a")), ("e", plain("vote"))]);
    assert!(
        found["e"].contains("found 'vote', an ensemble: it selects from models of one task, expected"),
        "{}",
        found["e"]
    );
    let found = refused(&[("e", selects("good"))]);
    assert!(
        found["e"].contains("found 'good', an ensemble, expected a model that is none: with selection"),
        "{}",
        found["e"]
    );
}

/// What a tensor is made of, as text; nothing of one that is left out.
type Made = BTreeMap<String, Option<String>>;

/// The naive way: each ensemble is asked as a model would be, as it is written.
fn ask(repository: &Repository, name: &str, given: &Made) -> Made {
    let get = |of: &Made, key: &str| of.get(key).cloned().flatten();
    let Some(face) = repository.ensembles.iter().find(|face| face.name == name) else {
        let text = format!("{name}({}, {})", get(given, "in").unwrap(), get(given, "more").unwrap_or_default());
        return ["out", "rest"].map(|output| (output.to_owned(), Some(format!("{output} of {text}")))).into();
    };
    let graph = face.ensemble().unwrap().written();
    let mut tensors: Made = graph.tensors.iter().map(|name| (name.clone(), get(given, name))).collect();
    for EnsembleStep { model, inputs, outputs, .. } in &graph.steps {
        let given = inputs.iter().map(|(name, from)| (name.clone(), get(&tensors, &graph.tensors[*from]))).collect();
        let made = ask(repository, model, &given);
        outputs.iter().for_each(|(name, to)| drop(tensors.insert(graph.tensors[*to].clone(), get(&made, name))));
    }
    graph.outputs.iter().map(|&at| (graph.tensors[at].clone(), get(&tensors, &graph.tensors[at]))).collect()
}

/// The same with the graph of models that it has become.
fn run(graph: &Ensemble, given: &[Option<&str>]) -> Vec<Option<String>> {
    let mut tensors: Vec<Option<String>> = given.iter().map(|given| given.map(str::to_owned)).collect();
    tensors.resize(graph.tensors.len(), None);
    for EnsembleStep { model, inputs, outputs, .. } in &graph.steps {
        let get = |key: &str| inputs.iter().find(|(name, _)| name == key).and_then(|(_, from)| tensors[*from].clone());
        let text =
            format!("{model}({}, {})", get("in").expect("it comes after its maker"), get("more").unwrap_or_default());
        outputs.iter().for_each(|(name, to)| tensors[*to] = Some(format!("{name} of {text}")));
    }
    graph.outputs.iter().map(|&at| tensors[at].clone()).collect()
}

proptest! {
    /// Whatever ensembles ask each other: what is read answers as if each had asked the others.
    #[test]
    fn joined_graphs_answer_as_nested_ones(
        shapes in proptest::collection::vec(
            proptest::collection::vec((0..5usize, 0..9usize, 0..9usize, any::<bool>()), 1..4),
            1..5,
        ),
        with_more in any::<bool>(),
    ) {
        let names = ["e0", "e1", "e2", "e3"];
        let ensembles = shapes.iter().enumerate().map(|(at, steps)| {
            let mut known = vec!["in".to_owned()];
            let last = steps.len() - 1;
            let steps: Vec<String> = steps.iter().enumerate().map(|(number, &(model, first, second, has_more))| {
                // One that is read before it, or the model.
                let model = names[..at].get(model).copied().unwrap_or("a");
                let (from, more) = (known[first % known.len()].clone(), known[second % known.len()].clone());
                let more = if second % 3 == 0 { "more".to_owned() } else { more };
                let mut inputs = vec![("in", from.as_str())];
                inputs.extend(has_more.then_some(("more", more.as_str())));
                let name = |of: &str| if number == last { of.to_owned() } else { format!("{of}{number}") };
                let (out, rest) = (name("out"), name("rest"));
                let text = step(model, &inputs, &[("out", &out), ("rest", &rest)]);
                known.extend([out, rest]);
                text
            }).collect();
            (names[at], ensemble(&steps))
        });
        let ensembles: Vec<(&str, String)> = ensembles.collect();
        let repository = load(&ensembles);
        let given = [Some("x"), with_more.then_some("y")];
        for face in &repository.ensembles {
            let graph = face.ensemble().unwrap();
            prop_assert!(graph.steps.len() <= STEPS_MAX);
            let named = ["in", "more"].into_iter().zip(given);
            let named = named.map(|(name, given)| (name.to_owned(), given.map(str::to_owned)));
            let made = ask(&repository, &face.name, &named.collect());
            prop_assert_eq!(run(graph, &given), vec![made["out"].clone(), made["rest"].clone()]);
        }
        let too_large = |Refused { reason, .. }: &Refused| {
            reason.contains("expected at most 32 steps") || reason.contains("an ensemble")
        };
        prop_assert!(repository.refused.iter().all(too_large), "{:?}", repository.refused);
    }
}
