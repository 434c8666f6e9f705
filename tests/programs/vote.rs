//! `examples/vote` under `downbeat up`: three models of digits of which one is wrong of half of them and one is in
//! Python. Feedback finds out who is wrong. Whoever is away is missing from the answer, which is there all the same.

use std::{fs, os::unix::fs::symlink, path::Path};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use super::{
    http::exchange,
    python::{Up, python},
    *,
};

const SEVEN: &str = include_str!("../../models/digits/seven.json");
const MEMBERS: [&str; 3] = ["digits", "digits_bad", "digits_nearest"];

/// The example, where a model in Python may leave files behind.
fn copy_example(to: &Path) {
    let example = Path::new("examples/vote").canonicalize().unwrap();
    for model in ["digits", "digits_bad", "vote"] {
        symlink(example.join(model), to.join(model)).unwrap();
    }
    fs::create_dir_all(to.join("digits_nearest/1")).unwrap();
    for file in ["config.pbtxt", "1/model.py", "1/means.npy"] {
        fs::copy(example.join("digits_nearest").join(file), to.join("digits_nearest").join(file)).unwrap();
    }
}

/// What a seven is taken for; how sure that is, by whom, and the ticket for feedback.
struct Vote {
    digit: usize,
    confidence: f64,
    members: Vec<String>,
    ticket: String,
}

fn ask(up: &Up) -> Vote {
    let (status, answer) = exchange(up.http, "POST", "/v2/models/vote/infer", SEVEN);
    assert_eq!(status, 200, "{answer}");
    let scores: Vec<f64> = serde_json::from_value(answer["outputs"][0]["data"].clone()).unwrap();
    let digit = (0..10).max_by(|&one, &other| scores[one].total_cmp(&scores[other])).unwrap();
    let told = &answer["parameters"];
    let [confidence, members, ticket] = ["confidence", "members", "feedback"].map(|key| &told[key]);
    let mut members: Vec<String> = members.as_str().unwrap().split(',').map(str::to_owned).collect();
    members.sort();
    Vote { digit, confidence: confidence.as_f64().unwrap(), members, ticket: ticket.as_str().unwrap().to_owned() }
}

fn tell(up: &Up, ticket: &str, digit: usize) -> Value {
    let item = json!({ "request": ticket, "outputs": [{ "name": "probabilities", "data": [digit] }] });
    let body = json!({ "feedback": [item] }).to_string();
    let (status, answer) = exchange(up.http, "POST", "/v2/models/vote/feedback", &body);
    assert_eq!(status, 200, "{answer}");
    answer["results"][0]["outcome"].clone()
}

#[test]
fn models_of_one_task_vote_and_who_is_wrong_counts_less() {
    let Some(interpreter) = python() else { return };
    let repository = tempfile::tempdir().unwrap();
    copy_example(repository.path());
    let up = Up::start(repository.path(), interpreter);
    eventually("an answer of all three", || ask(&up).members == MEMBERS);

    // All count alike at first. Two know a seven; feedback says so, and then they are nearly sure.
    let first = ask(&up);
    assert_eq!((first.digit, (first.confidence * 3.0).round()), (7, 2.0), "{}", first.confidence);
    for _ in 0..100 {
        let vote = ask(&up);
        assert_eq!((vote.digit, tell(&up, &vote.ticket, 7)), (7, json!("counted")));
    }
    assert_eq!(tell(&up, &first.ticket, 7), "counted");
    assert_eq!(tell(&up, &first.ticket, 7), "repeated");
    assert_eq!(tell(&up, &first.ticket, 8), "contradictory");
    assert_eq!(tell(&up, "nobody's", 7), "unknown");
    let learned = ask(&up);
    assert!(learned.confidence > 0.99, "{}", learned.confidence);

    // Whoever is away is missing, and nothing else.
    let change = |to: &str| {
        let path = format!("/v2/repository/models/digits_nearest/{to}");
        assert_eq!(exchange(up.http, "POST", &path, "{}").0, 200);
    };
    change("unload");
    let without = ask(&up);
    assert_eq!((without.digit, &without.members[..]), (7, &["digits".to_owned(), "digits_bad".to_owned()][..]));
    assert!((0.4..0.6).contains(&without.confidence), "half of the weight is away: {}", without.confidence);
    change("load");
    eventually("an answer of all three again", || ask(&up).members == MEMBERS);

    // Its process is killed, again and again: every request is answered.
    for _ in 0..3 {
        let folder = repository.path().canonicalize().unwrap();
        for process in processes_in(&folder) {
            let _ = kill_process(process, Signal::KILL);
        }
        eventually("an answer of all three again", || {
            let vote = ask(&up);
            assert_eq!(vote.digit, 7);
            vote.members == MEMBERS
        });
    }
}
