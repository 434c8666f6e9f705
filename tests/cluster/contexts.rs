//! What is learned for each user, by two frontends that share a Redis: what one hears the other knows, and a Redis that
//! is killed costs no request.

use std::{fs, os::unix::fs::symlink, path::Path};

use serde_json::{Value, json};
use testing::RedisServer;

use super::*;

const SEVEN: &str = include_str!("../../models/digits/seven.json");

/// `examples/vote` without the member that needs Python: one member of two is wrong of a seven.
fn repository(to: &Path) {
    let example = Path::new("examples/vote").canonicalize().unwrap();
    ["digits", "digits_bad"].iter().for_each(|model| symlink(example.join(model), to.join(model)).unwrap());
    // Nothing is late on a busy machine.
    let config = fs::read_to_string(example.join("vote/config.pbtxt")).unwrap().replace("\"50\"", "\"60000\"");
    let at = config.find("    {\n      model_name: \"digits_nearest\"").unwrap();
    let behind = at + config[at..].find("    },\n").unwrap() + "    },\n".len();
    fs::create_dir(to.join("vote")).unwrap();
    // However often it is asked until all is known, nothing of that is forgotten.
    let window = "parameters { key: 'window' value { string_value: '1000000' } }\n";
    fs::write(to.join("vote/config.pbtxt"), [&config[..at], &config[behind..], window].concat()).unwrap();
}

/// What is said of an answer to this user: how sure it is, the ticket for feedback, and what was known.
struct Told {
    confidence: f64,
    ticket: Value,
    state: Value,
}

fn ask(at: SocketAddr, user: &str) -> Told {
    let mut body: Value = serde_json::from_str(SEVEN).unwrap();
    body["parameters"] = json!({ "context": user });
    let (status, answer) = exchange(at, "POST", "/v2/models/vote/infer", &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let told = &answer["parameters"];
    let confidence = told["confidence"].as_f64().unwrap();
    Told { confidence, ticket: told["feedback"].clone(), state: told["context_state"].clone() }
}

fn tell(at: SocketAddr, ticket: &Value) {
    let item = json!({ "request": ticket, "outputs": [{ "name": "probabilities", "data": [7] }] });
    let body = json!({ "feedback": [item] }).to_string();
    let (_, answer) = exchange(at, "POST", "/v2/models/vote/feedback", &body);
    assert_eq!(answer["results"][0]["outcome"], "counted", "{answer}");
}

#[test]
fn two_frontends_learn_the_same_for_each_user() {
    let [models, kept] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let Some(mut server) = RedisServer::start("cluster/contexts", kept.path(), &[]) else { return };
    repository(models.path());
    let rest = format!("[frontend.selection]\nredis = 'redis://{}'", server.address());
    let flags = ["--repository", models.path().to_str().unwrap()];
    let up = Up::start_flagged(&flags, ("warn", Stdio::inherit()), (2, "", &[1]), &rest);
    let [one, other] = [up.http[0], up.http[1]];
    for at in [one, other] {
        eventually("an answer of both members", || exchange(at, "POST", "/v2/models/vote/infer", SEVEN).0 == 200);
    }

    // The half of the weight is wrong at first. What one frontend hears of a user, the other one knows.
    for _ in 0..40 {
        tell(one, &ask(one, "ann").ticket);
    }
    let ann = ask(one, "ann").confidence;
    assert!(ann > 0.95, "{ann}");
    eventually("the other knows it all", || (ask(other, "ann").confidence - ann).abs() < 1e-9);
    assert!(ask(other, "bob").confidence < 0.6, "of others it is not known");

    // A Redis that is gone costs nothing, and hears of it when it is back.
    server.kill();
    eventually("it is told", || ask(one, "ann").state == "stale");
    for _ in 0..20 {
        let told = ask(one, "ann");
        assert!(told.confidence > 0.95, "{}", told.confidence);
        tell(one, &told.ticket);
    }
    server.run();
    eventually("both know the same again", || {
        let told = [one, other].map(|at| ask(at, "ann"));
        let is_known = told.iter().all(|told| told.state == "current" && told.confidence > 0.99);
        is_known && (told[0].confidence - told[1].confidence).abs() < 1e-9
    });
}
