use std::fs;

use super::*;
use crate::{Ensemble, Refused, Repository};

fn parameters(of: &[(&str, &str)]) -> String {
    of.iter()
        .map(|(key, value)| format!("parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}\n"))
        .collect()
}

fn step(model: &str, from: &str, to: &str) -> String {
    let made = if model == "digest" { "digest" } else { "out" };
    format!(
        "step {{ model_name: '{model}' input_map {{ key: 'in' value: '{from}' }} \
         output_map {{ key: '{made}' value: '{to}' }} }}"
    )
}

/// An ensemble of two models of one task, with these parameters and steps.
fn load(of: &[(&str, &str)], steps: &[String], more: &str) -> Result<Ensemble, String> {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, config: String| {
        fs::create_dir_all(folder.path().join(name).join("1")).unwrap();
        fs::write(folder.path().join(name).join("config.pbtxt"), config).unwrap();
    };
    let tensors = |input: &str, output: &str, kind: &str, dims: usize| {
        format!(
            "max_batch_size: 4 input {{ name: '{input}' data_type: TYPE_FP32 dims: 3 }} \
             output {{ name: '{output}' data_type: TYPE_{kind} dims: {dims} }} "
        )
    };
    let times = parameters(&[("alpha_ms", "1"), ("beta_ms", "1")]);
    for (name, output, kind, dims) in
        [("a", "out", "FP32", 3), ("b", "out", "FP32", 3), ("digest", "digest", "UINT64", 2)]
    {
        write(name, format!("backend: 'emulated' {} {times}", tensors("in", output, kind, dims)));
    }
    let scheduling = format!("ensemble_scheduling {{ {} }}", steps.join(" "));
    let config =
        format!("platform: 'ensemble' {} {scheduling} {more} {}", tensors("X", "Y", "FP32", 3), parameters(of));
    write("e", config);
    let Repository { ensembles, refused, models } = crate::load(folder.path()).unwrap();
    assert_eq!(models.len(), 3, "all others are served: {refused:?}");
    match (&ensembles[..], &refused[..]) {
        ([face], []) => Ok(face.ensemble().unwrap().clone()),
        ([], [Refused { reason, .. }]) => Err(reason.clone()),
        other => panic!("{other:?}"),
    }
}

fn pair() -> Vec<String> {
    vec![step("a", "X", "Y"), step("b", "X", "Y")]
}

#[test]
fn steps_that_make_the_same_are_models_of_one_task() {
    let of = [
        ("selection", "weighted"),
        ("weights", "3, 1"),
        ("agreement:Y", "within 0.5"),
        ("default:Y", "0.25"),
        ("confidence", "0.6"),
        ("reply_ms", "2"),
    ];
    let ensemble = load(&of, &pair(), "").unwrap();
    assert_eq!((&ensemble.tensors[..], &ensemble.outputs[..]), (&["X".to_owned(), "Y".to_owned()][..], &[1][..]));
    let expected = Selection {
        policy: Policy::Weighted(vec![3.0, 1.0]),
        agreements: vec![Agreement::Within(0.5)],
        defaults: Some(vec![[0.25f32.to_le_bytes(); 3].concat()]),
        confidence: 0.6,
        reply: Span::from_millis(2),
        seed: 0,
    };
    assert_eq!(ensemble.selection, Some(expected));
    let learned = |of: &[(&str, &str)]| load(of, &pair(), "").unwrap().selection.unwrap().policy;
    assert_eq!(learned(&[("selection", "static")]), Policy::Static);
    assert_eq!(learned(&[("selection", "fallback")]), Policy::Fallback);
    assert_eq!(learned(&[("selection", "canary"), ("weights", "1,0")]), Policy::Canary(vec![1.0, 0.0]));
    assert_eq!(learned(&[("selection", "shadow")]), Policy::Shadow(1.0));
    assert_eq!(learned(&[("selection", "shadow"), ("mirrored", "0.1")]), Policy::Shadow(0.1));
    let exp3 = learned(&[("selection", "exp3"), ("eta", "0.5"), ("window", "80"), ("seed", "7")]);
    assert_eq!(exp3, Policy::Exp3(Learning { eta: 0.5, exploration: 0.1, window: 80 }));
    let defaults = load(&[("selection", "static"), ("default:Y", "1, 2,3")], &pair(), "").unwrap();
    let row = [1f32, 2.0, 3.0].map(f32::to_le_bytes).concat();
    assert_eq!(defaults.selection.unwrap().defaults, Some(vec![row]));
}

#[test]
fn without_selection_a_tensor_is_made_once() {
    let error = load(&[], &pair(), "").unwrap_err();
    assert!(error.contains("found 'Y', which is an input of the ensemble, or made elsewhere already"), "{error}");
}

#[test]
fn what_is_wrong_names_the_key_and_what_was_found_and_expected() {
    let majority = ("selection", "majority");
    let weighted = ("selection", "weighted");
    for (of, expected) in [
        (&[("selection", "best")][..], "selection: found \"best\", expected \"static\", \"majority\""),
        (&[weighted], "weights: found none, expected 2 numbers, one for each step"),
        (&[weighted, ("weights", "1")], "weights: found \"1\", expected 2 numbers"),
        (
            &[weighted, ("weights", "1, NaN")],
            "weights: found \"1, NaN\", expected 2 numbers, one for each step: finite",
        ),
        (&[weighted, ("weights", "1, inf")], "weights: found \"1, inf\""),
        (&[weighted, ("weights", "-1, 2")], "weights: found \"-1, 2\""),
        (&[weighted, ("weights", "0, 0")], "weights: found \"0, 0\""),
        (&[weighted, ("weights", "1e308, 1e308")], "weights: found \"1e308, 1e308\""),
        (
            &[majority, ("weights", "1, 1")],
            "weights: found it beside \"majority\", expected it for a selection of weighted, canary only",
        ),
        (
            &[majority, ("eta", "0.1")],
            "eta: found it beside \"majority\", expected it for a selection of exp3, exp4 only",
        ),
        (&[("selection", "canary")], "weights: found none, expected 2 numbers, one for each step"),
        (&[("selection", "canary"), ("weights", "0,0")], "weights: found \"0,0\", expected 2 numbers"),
        (&[("selection", "shadow"), ("mirrored", "1.5")], "mirrored: found \"1.5\", expected 0 to 1"),
        (&[("selection", "static"), ("mirrored", "1")], "mirrored: found it beside \"static\", expected it for"),
        (&[("selection", "exp3"), ("eta", "inf")], "eta: found \"inf\", expected above 0 and at most 10"),
        (&[("selection", "exp3"), ("exploration", "2")], "exploration: found \"2\", expected 0 to 1"),
        (&[("selection", "exp4"), ("window", "7")], "window: found \"7\", expected a whole number of requests, 8 to"),
        (&[("selection", "exp3"), ("seed", "x")], "seed: found \"x\", expected a whole number of 64 bits"),
        (
            &[("selection", "fallback"), ("weights", "1, 1")],
            "weights: found it beside \"fallback\", expected it for a selection of weighted, canary only",
        ),
        (&[majority, ("agreement:Z", "equal")], "agreement:Z: found no such output, expected one of: Y"),
        (&[majority, ("agreement:Y", "nearly")], "agreement:Y: found \"nearly\", expected \"equal\", \"argmax\" or"),
        (&[majority, ("agreement:Y", "within -1")], "agreement:Y: found \"within -1\""),
        (&[majority, ("default:Y", "1, 2")], "default:Y: found \"1, 2\", expected 3 numbers of FP32, or one for all"),
        (&[majority, ("default:Y", "NaN")], "default:Y: found \"NaN\", expected 3 numbers of FP32"),
        (&[majority, ("confidence", "1.1")], "confidence: found \"1.1\", expected 0 to 1"),
        (&[majority, ("reply_ms", "-1")], "reply_ms: found \"-1\", expected milliseconds, 0 to 1000"),
        (
            &[("selection", "cascade"), ("confidence", "0.5")],
            "agreement: found none of \"argmax\", expected \"argmax\" for some output",
        ),
        (&[("selection", "cascade"), ("agreement:Y", "argmax")], "confidence: found none, expected above 0"),
    ] {
        let error = load(of, &pair(), "").unwrap_err();
        assert!(error.contains(expected), "expected {expected}\nfound {error}");
        assert_eq!(error.lines().count(), 1);
    }
    let cached = load(&[majority], &pair(), "response_cache { enable: true }").unwrap_err();
    assert!(cached.contains("response_cache: found it beside selection, expected none"), "{cached}");
    for (steps, expected) in [
        (vec![step("a", "X", "Y"), step("a", "X", "Y")], "step[1].model_name: found 'a' again, expected another one"),
        (vec![step("a", "X", "Y"), step("b", "Y", "Y")], "step[1].input_map['in']: found another tensor"),
        (vec![step("a", "X", "Y"), step("b", "X", "T")], "step[1].output_map: found 1 tensors, expected each output"),
        (vec![step("digest", "X", "Y"), step("a", "X", "Y")], "output 'Y': found FP32 [n, 3], expected UINT64 [n, 2]"),
    ] {
        let error = load(&[majority], &steps, "").unwrap_err();
        assert!(error.contains(expected), "expected {expected}\nfound {error}");
    }
}

#[test]
fn the_example_can_be_served() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/vote");
    let Repository { models, ensembles, refused } = crate::load(&folder).unwrap();
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    assert_eq!((names, refused.len()), (vec!["digits", "digits_bad", "digits_nearest"], 0), "{refused:?}");
    let [vote] = &ensembles[..] else { panic!("{ensembles:?}") };
    let selection = vote.ensemble().unwrap().selection.as_ref().unwrap();
    assert_eq!((selection.policy.name(), &selection.agreements[..]), ("exp4", &[Agreement::Argmax][..]));
    assert_eq!(selection.defaults, Some(vec![[0.1f32.to_le_bytes(); 10].concat()]));
    assert_eq!(vote.labels[0].len(), 10, "those of the first step's output");
}

#[test]
fn a_shadow_needs_somebody_to_follow() {
    let error = load(&[("selection", "shadow")], &pair()[..1], "").unwrap_err();
    assert!(error.contains("ensemble_scheduling.step: found 1, expected at least 2"), "{error}");
}
