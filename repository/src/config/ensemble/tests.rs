use std::{collections::BTreeSet, fs, path::Path};

use proptest::prelude::*;

use super::*;
use crate::{Model, Refused, Repository};

fn write(repository: &Path, name: &str, config: &str) {
    fs::create_dir_all(repository.join(name).join("1")).unwrap();
    fs::write(repository.join(name).join("config.pbtxt"), config).unwrap();
}

/// An emulated model of one input and one output.
fn member(dims: &str, batch: usize) -> String {
    format!(
        r#"backend: "emulated" max_batch_size: {batch}
        input {{ name: "in" data_type: TYPE_UINT8 dims: {dims} }}
        output {{ name: "out" data_type: TYPE_UINT8 dims: {dims} label_filename: "labels.txt" }}
        parameters {{ key: "alpha_ms" value {{ string_value: "1" }} }}
        parameters {{ key: "beta_ms" value {{ string_value: "1" }} }}"#
    )
}

fn step(model: &str, from: &str, to: &str) -> String {
    let map = |key, value| format!(r#"{{ key: "{key}" value: "{value}" }}"#);
    let (inputs, outputs) = (map("in", from), map("out", to));
    format!(r#"{{ model_name: "{model}" model_version: -1 input_map {inputs} output_map {outputs} }}"#)
}

fn ensemble(steps: &[String]) -> String {
    format!(
        r#"platform: "ensemble" max_batch_size: 4
        input [ {{ name: "X" data_type: TYPE_UINT8 dims: [ 4 ] }} ]
        output [ {{ name: "Y" data_type: TYPE_UINT8 dims: [ 4 ] }} ]
        ensemble_scheduling {{ step [ {} ] }}"#,
        steps.join(", ")
    )
}

/// The repository with two members and this ensemble.
fn with(config: &str) -> Repository {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        write(folder.path(), name, &member("[ 4 ]", 8));
        fs::write(folder.path().join(name).join("labels.txt"), "one\ntwo\nthree\nfour\n").unwrap();
    }
    let small = member("[ 4 ]", 2).replace("label_filename: \"labels.txt\"", "");
    write(folder.path(), "small", &small);
    let wide = member("[ 5 ]", 8).replace("label_filename: \"labels.txt\"", "");
    write(folder.path(), "wide", &wide);
    write(folder.path(), "other", &ensemble(&[step("a", "X", "Y")]));
    write(folder.path(), "e", config);
    crate::load(folder.path()).unwrap()
}

fn face(repository: &Repository) -> &Model {
    repository.ensembles.iter().find(|face| face.name == "e").expect("it is served")
}

fn refused(config: &str) -> String {
    let Repository { models, ensembles, refused } = with(config);
    assert_eq!((models.len(), ensembles.len()), (4, 1), "all others are served");
    let [Refused { name, reason, .. }] = &refused[..] else { panic!("{refused:?}") };
    assert_eq!((name.as_str(), reason.lines().count()), ("e", 1));
    reason.clone()
}

#[test]
fn a_graph_is_read_in_an_order_in_which_it_can_run() {
    let repository = with(&ensemble(&[step("b", "t", "Y"), step("a", "X", "t")]));
    assert_eq!(repository.refused, []);
    let face = face(&repository);
    let ensemble = face.ensemble().unwrap();
    let named = |step: &EnsembleStep| (step.model.clone(), step.inputs[0].1, step.outputs[0].1);
    let steps: Vec<_> = ensemble.steps.iter().map(named).collect();
    assert_eq!(ensemble.tensors, ["X", "Y", "t"]);
    assert_eq!((steps, &ensemble.outputs[..]), (vec![("a".into(), 0, 2), ("b".into(), 2, 1)], &[1][..]));
    assert_eq!((face.version.as_str(), face.rows_max, face.is_batched), ("1", 4, true));
    assert_eq!(face.labels, [["one", "two", "three", "four"]], "as of the member that makes it");
    assert_eq!(face.configuration.platform(), "ensemble");
    let told = serde_json::to_value(&face.configuration).unwrap();
    assert_eq!(told["ensemble_scheduling"]["step"][0]["input_map"]["in"], "t");
    assert_eq!(told["backend"], "");
}

#[test]
fn what_cannot_run_is_refused_by_its_name_and_nothing_else_is() {
    let chain = |first: &str, second: &str| ensemble(&[step(first, "X", "t"), step(second, "t", "Y")]);
    let many: Vec<String> = (0..=STEPS_MAX).map(|at| step("a", "X", &format!("t{at}"))).collect();
    let one = || ensemble(&[step("a", "X", "Y")]);
    for (config, expected) in [
        (chain("a", "a").replace("\"X\" }", "\"Y\" }"), "step: found a cycle among the steps 0 (a), 1 (a)"),
        (ensemble(&[step("a", "u", "u"), step("a", "X", "Y")]), "step: found a cycle among the steps 0 (a)"),
        (ensemble(&[step("a", "t", "Y")]), "step[0].input_map['in']: found 't', expected an input of the ensemble"),
        (ensemble(&[step("a", "X", "t")]), "output 'Y': found no step that makes it, expected it in some output_map"),
        (ensemble(&[step("a", "X", "Y"), step("b", "X", "Y")]), "step[1].output_map['out']: found 'Y', which is an"),
        (ensemble(&[step("a", "X", "X")]), "step[0].output_map['out']: found 'X', which is an input of the ensemble"),
        (chain("a", "none"), "step[1].model_name: found 'none', expected a model of the repository"),
        (chain("a", "e"), "step[1].model_name: found 'e', the ensemble itself"),
        (chain("a", "small"), "found 'small' with max_batch_size 2, expected a model whose max_batch_size is at"),
        (chain("a", "wide"), "step[1].input_map: found 't', UINT8 [n, 4], expected UINT8 [n, 5], as input 'in'"),
        (chain("wide", "b"), "step[0].input_map: found 'X', UINT8 [n, 4], expected UINT8 [n, 5], as input 'in'"),
        (one().replacen("TYPE_UINT8", "TYPE_INT8", 1), "found 'X', INT8 [n, 4], expected UINT8 [n, 4]"),
        (
            one().replace("\"Y\" data_type: TYPE_UINT8", "\"Y\" data_type: TYPE_BOOL"),
            "output 'Y': found BOOL [n, 4], exp",
        ),
        (one().replace("\"in\"", "\"inn\""), "step[0].input_map: found none, expected one for input 'in' of model 'a'"),
        (one().replace("\"out\"", "\"o\""), "step[0].output_map: found key 'o', expected one of model 'a': out"),
        (
            one().replace("model_version: -1", "model_version: 7"),
            "model_name: found 'a' version 7, expected a model of",
        ),
        (one().replace("model_version: -1", "model_version: -2"), "model_version: found -2, expected -1 (the newest)"),
        (one().replace("\"a\"", "\"\""), "step[0].model_name: found none, expected the model that runs it"),
        (one().replace("model_version: -1", "model_namespace: \"n\""), "model_namespace: found 'n', expected none"),
        (ensemble(&many), "ensemble_scheduling.step: found 33, expected 1 to 32 steps"),
        (ensemble(&[]), "ensemble_scheduling.step: found 0, expected 1 to 32 steps"),
        (one().replace("platform: \"ensemble\"", ""), "platform: found \"\" beside ensemble_scheduling, expected"),
        (one().replace("ensemble_scheduling", "# "), "ensemble_scheduling: found none, expected the steps of the"),
    ] {
        let reason = refused(&config);
        assert!(reason.contains(expected), "{reason}\n{expected}");
    }
}

#[test]
fn clients_do_not_say_which_models_are_asked() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a", &member("[ 4 ]", 8).replace("label_filename: \"labels.txt\"", ""));
    write(folder.path(), "e", &ensemble(&[step("a", "X", "Y")]));
    let json = |model: &str| {
        let tensor = |name: &str| serde_json::json!([{ "name": name, "data_type": "TYPE_UINT8", "dims": ["4"] }]);
        let (inputs, outputs) = (serde_json::json!({ "in": "X" }), serde_json::json!({ "out": "Y" }));
        let step = serde_json::json!({
            "model_name": model, "model_version": "-1", "input_map": inputs, "output_map": outputs
        });
        let graph = serde_json::json!({ "step": [step] });
        serde_json::json!({
            "platform": "ensemble", "input": tensor("X"), "output": tensor("Y"), "ensemble_scheduling": graph,
            "max_batch_size": 2
        })
    };
    let load = |name: &str, json: &serde_json::Value| {
        crate::load_named(&crate::Source::repository(folder.path()), name, Some(&json.to_string()))
    };
    let loaded = load("e", &json("a")).unwrap();
    assert_eq!((loaded[0].rows_max, loaded[0].ensemble().unwrap().steps.len()), (2, 1), "the same graph");
    for name in ["e", "a"] {
        let error = load(name, &json("b")).unwrap_err().to_string();
        assert!(error.contains("ensemble_scheduling: found another graph, expected what config.pbtxt has"), "{error}");
    }
}

#[test]
fn batch_dimensions_of_an_ensemble_without_batches_are_its_own() {
    let config = ensemble(&[step("a", "X", "Y")]).replace("max_batch_size: 4", "max_batch_size: 0");
    assert!(refused(&config).contains("found 'X', UINT8 [4], expected UINT8 [n, 4]"));
    assert_eq!(with(&config.replace("dims: [ 4 ]", "dims: [ 3, 4 ]")).refused, []);
    assert_eq!(with(&config.replace("dims: [ 4 ]", "dims: [ -1, 4 ]")).refused, []);
}

proptest! {
    /// Whatever the steps' tensors are: a graph is read if and only if all of it can run, and then in an order in which
    /// it can, which a naive walk finds.
    #[test]
    fn graphs_are_read_as_a_naive_walk_finds_them(maps in proptest::collection::vec((0..6usize, 0..6usize), 1..6)) {
        let name = |tensor: usize| ["X", "Y", "t2", "t3", "t4", "t5"][tensor];
        let steps: Vec<String> = maps.iter().map(|(from, to)| step("a", name(*from), name(*to))).collect();
        let repository = with(&ensemble(&steps));
        let made: BTreeSet<usize> = maps.iter().map(|(_, to)| *to).collect();
        let is_made_once = made.len() == maps.len() && !made.contains(&0);
        let mut known = BTreeSet::from([0]);
        for _ in &maps {
            known.extend(maps.iter().filter(|(from, _)| known.contains(from)).map(|(_, to)| *to).collect::<Vec<_>>());
        }
        let can_run = is_made_once && made.contains(&1) && maps.iter().all(|(from, _)| known.contains(from));
        prop_assert_eq!(repository.refused.is_empty(), can_run, "{:?}", repository.refused);
        if can_run {
            let ensemble = face(&repository).ensemble().unwrap();
            let mut known = BTreeSet::from([0]);
            for step in &ensemble.steps {
                prop_assert!(step.inputs.iter().all(|(_, from)| known.contains(from)));
                known.extend(step.outputs.iter().map(|(_, to)| *to));
            }
            prop_assert_eq!(known.len(), maps.len() + 1);
        }
    }
}
