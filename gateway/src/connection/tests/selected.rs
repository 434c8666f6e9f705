//! Ensembles of models of one task: who answers, what is said of it, and what becomes of feedback. All members are the
//! tests' one model, which doubles every byte.

use std::sync::Arc;

use prost::Message as _;
use repository::{Agreement, Ensemble, EnsembleStep, Executor, Learning, Policy, Selection};

use super::{
    grpc::{call, connect, double as message, framed, head, infer},
    secure::bearer,
    *,
};
use crate::{
    access::Clients,
    api::{
        InferParameter, ModelInferRequest, ModelInferResponse,
        feedback::{
            FeedbackRequest, FeedbackResponse,
            feedback_request::{Item, Output},
        },
        infer_parameter::ParameterChoice,
        model_infer_request::InferInputTensor,
    },
    config::RedisUrl,
    redis::{Redis, tests as redis},
};

const DOUBLED: Fate = Fate::Answer(AnswerStatus::Done, "\x02\x04\x06\x08");
const OTHER: Fate = Fate::Answer(AnswerStatus::Done, "\x09\x04\x06\x08");
const TORN: Fate = Fate::Answer(AnswerStatus::Failed, "it is torn");

/// An ensemble of three members with this policy, of whose output the largest element counts.
fn ensemble(policy: Policy, defaults: Option<Vec<u8>>, confidence: f64) -> repository::Model {
    ensemble_of(&["double"; 3], policy, defaults, confidence)
}

fn ensemble_of(members: &[&str], policy: Policy, defaults: Option<Vec<u8>>, confidence: f64) -> repository::Model {
    let tensor_of = |name| tensor(name, DataType::Uint8, &[4]);
    let face = model("vote", vec![tensor_of("x")], vec![tensor_of("y")]);
    let step = |member: &&str| EnsembleStep {
        model: (*member).to_owned(),
        version: None,
        inputs: vec![("x".to_owned(), 0)],
        outputs: vec![("y".to_owned(), 1)],
    };
    let selection = Selection {
        policy,
        agreements: vec![Agreement::Argmax],
        defaults: defaults.map(|row| vec![row]),
        confidence,
        reply: Span::from_millis(1),
        seed: 0,
    };
    let graph = Ensemble {
        steps: members.iter().map(step).collect(),
        tensors: ["x", "y"].map(str::to_owned).into(),
        outputs: vec![1],
        selection: Some(selection),
        nested: None,
    };
    let configuration = "platform: 'ensemble' name: 'vote'".parse().unwrap();
    repository::Model { executor: Executor::Ensemble(Arc::new(graph)), labels: vec![Vec::new()], configuration, ..face }
}

fn with<F: Future<Output = ()>>(vote: repository::Model, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_gate_and(open_gate(limits()), vote, test);
}

fn with_gate_and<F: Future<Output = ()>>(
    gate: Gate,
    vote: repository::Model,
    test: impl FnOnce(SocketAddr, Rc<Peer>) -> F,
) {
    // Nobody hosts the last one.
    let absent = repository::Model { name: "absent".to_owned(), ..double() };
    with_models_and_schedulers(vec![double(), vote, absent], 1, gate, None, async |address, peer| {
        test(address, Rc::clone(&peer)).await;
        while peer.desk.with_core(|core| core.outstanding()) > 0 || peer.server.bodies_bytes() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(peer.desk.pending().is_empty(), "{:?}", peer.desk.pending());
    });
}

fn vote_of(parameters: &str) -> Vec<u8> {
    let body = GOOD.replace(r#""id":"q""#, &format!(r#""id":"q","parameters":{{{parameters}}}"#));
    post_of("/v2/models/vote/infer", "", body.as_bytes())
}

/// What the answer says of itself, and its data.
fn told(heard: &Heard) -> (Value, Value) {
    assert_eq!(heard.status, 200, "{heard:?}");
    (heard.json()["parameters"].clone(), heard.json()["outputs"][0]["data"].clone())
}

fn members(count: usize) -> String {
    vec!["double"; count].join(",")
}

async fn metric(stream: &mut TcpStream, line: &str) -> Option<f64> {
    let text = String::from_utf8(ask(stream, &get_of("/metrics")).await.body).unwrap();
    text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
}

fn of_model(family: &str) -> String {
    format!(r#"{family}{{model="vote",version="1"}}"#)
}

#[test]
fn the_majority_answers_and_says_how_sure_it_is() {
    with(ensemble(Policy::Majority, None, 0.5), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!(data, json!([2, 4, 6, 8]), "the first one is outvoted");
        let expected = json!({ "confidence": 2.0 / 3.0, "members": members(3), "default": false });
        assert_eq!(parameters, expected);
        // A member that fails, or whose queue is full, is a missing prediction.
        peer.fates.borrow_mut().extend([TORN, DOUBLED, Fate::Drop(DropReason::QueueFull)]);
        let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!(data, json!([2, 4, 6, 8]));
        assert_eq!(parameters, json!({ "confidence": 1.0 / 3.0, "members": members(1), "default": false }));
        let missing =
            |step: &str| format!(r#"downbeat_selection_missing_total{{member="{step}",model="vote",version="1"}}"#);
        assert_eq!(metric(&mut stream, &missing("double")).await, Some(1.0), "of the first of that name");
        assert_eq!(metric(&mut stream, &of_model("downbeat_selection_doubted_total")).await, Some(1.0));
        // If all fail, that is why there is no answer.
        peer.fates.borrow_mut().extend([TORN, TORN, TORN]);
        let heard = ask(&mut stream, &vote_of("")).await;
        let error = heard.json()["error"].as_str().unwrap().to_owned();
        assert!(
            heard.status == 500 && error.starts_with("in ensemble 'vote', ") && error.contains("torn"),
            "{heard:?}"
        );

        let mut client = connect(address).await;
        let asked = ModelInferRequest { model_name: "vote".to_owned(), ..message(&[1, 2, 3, 4]) };
        let (status, text, messages) = infer(&mut client, &asked).await;
        assert_eq!(status, 0, "{text}");
        let reply = ModelInferResponse::decode(messages[0].clone()).unwrap();
        let parameter = |key: &str| reply.parameters[key].parameter_choice.clone().unwrap();
        assert_eq!(parameter("confidence"), ParameterChoice::DoubleParam(1.0));
        assert_eq!(parameter("members"), ParameterChoice::StringParam(members(3)));
        assert_eq!(parameter("default"), ParameterChoice::BoolParam(false));
    });
}

/// Asks while one member hangs, and lets so many milliseconds pass once it is asked.
async fn ask_late(stream: &mut TcpStream, peer: &Peer, hanging: usize, ms: i64, parameters: &str) -> Heard {
    stream.write_all(&vote_of(parameters)).await.unwrap();
    while peer.kept.borrow().len() < hanging {
        tokio::task::yield_now().await;
    }
    peer.clock.set(peer.clock.get() + Span::from_millis(ms));
    let heard = hear(stream).await.unwrap();
    let before = peer.cancelled.get();
    while peer.cancelled.get() < before.max(hanging) {
        tokio::task::yield_now().await;
    }
    peer.kept.borrow_mut().clear();
    heard
}

#[test]
fn the_answer_leaves_in_time_with_what_is_there() {
    with(ensemble(Policy::Majority, None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        peer.fates.borrow_mut().extend([DOUBLED, Fate::Keep, DOUBLED]);
        // The objective is 25 ms, of which one is the reply's.
        let (parameters, data) = told(&ask_late(&mut stream, &peer, 1, 24, "").await);
        assert_eq!(data, json!([2, 4, 6, 8]));
        assert_eq!(parameters, json!({ "confidence": 2.0 / 3.0, "members": members(2), "default": false }));
        is_served(&mut stream).await;
    });
}

#[test]
fn a_default_is_given_to_who_takes_it() {
    with(ensemble(Policy::Majority, Some(vec![7, 7, 7, 7]), 0.5), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let hang = || peer.fates.borrow_mut().extend([Fate::Keep; 3]);
        hang();
        let heard = ask_late(&mut stream, &peer, 3, 24, "").await;
        assert_eq!(heard.status, 504, "{heard:?}");
        hang();
        let (parameters, data) = told(&ask_late(&mut stream, &peer, 3, 24, r#""allow_default":true"#).await);
        let given = json!({ "confidence": 0.0, "members": "", "default": true });
        assert_eq!((parameters, data), (given, json!([7, 7, 7, 7])));
        // What is in doubt is answered to who takes no default, and says how sure it is.
        let doubt = || peer.fates.borrow_mut().extend([DOUBLED, TORN, TORN]);
        doubt();
        let (parameters, data) = told(&ask(&mut stream, &vote_of(r#""allow_default":false"#)).await);
        assert_eq!((&parameters["default"], data), (&json!(false), json!([2, 4, 6, 8])));
        doubt();
        let (parameters, data) = told(&ask(&mut stream, &vote_of(r#""allow_default":true"#)).await);
        assert_eq!((&parameters["default"], data), (&json!(true), json!([7, 7, 7, 7])));
        assert_eq!(metric(&mut stream, &of_model("downbeat_selection_defaults_total")).await, Some(2.0));
        let wrong = ask(&mut stream, &vote_of(r#""allow_default":1"#)).await;
        assert!(wrong.status == 400 && String::from_utf8_lossy(&wrong.body).contains("parameters.allow_default"));
        assert!(is_ready(&mut stream).await);
    });
}

#[test]
fn who_cannot_be_asked_is_missing() {
    let vote = ensemble_of(&["absent", "double"], Policy::Majority, None, 0.0);
    with(vote, async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert!(is_ready(&mut stream).await, "one of both can be asked");
        let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((data, peer.submitted.get().0), (json!([2, 4, 6, 8]), 1));
        assert_eq!(parameters, json!({ "confidence": 0.5, "members": "double", "default": false }));
        let unload = post_of("/v2/repository/models/double/unload", "", b"");
        assert_eq!(ask(&mut stream, &unload).await.status, 200);
        assert!(!is_ready(&mut stream).await, "nobody is left");
        let heard = ask(&mut stream, &vote_of("")).await;
        assert!(heard.status == 503, "{heard:?}");
    });
}

async fn is_ready(stream: &mut TcpStream) -> bool {
    ask(stream, &get_of("/v2/models/vote/ready")).await.status == 200
}

#[test]
fn a_cascade_asks_the_next_only_if_it_must() {
    // Elements of bytes are above 1, which is as sure as it gets.
    with(ensemble(Policy::Cascade, None, 0.5), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let (parameters, _) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((peer.submitted.get().0, &parameters["confidence"]), (1, &json!(1.0)));
        let unsure = Fate::Answer(AnswerStatus::Done, "\0\0\0\0");
        peer.fates.borrow_mut().extend([unsure, DOUBLED]);
        let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((peer.submitted.get().0, data), (3, json!([2, 4, 6, 8])));
        assert_eq!(parameters, json!({ "confidence": 1.0, "members": members(1), "default": false }));
        // One that fails is not sure either; if the others do so too, the unsure one's answer stands.
        peer.fates.borrow_mut().extend([TORN, unsure, TORN]);
        let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((&parameters["confidence"], data), (&json!(0.0), json!([0, 0, 0, 0])));
    });
}

#[test]
fn a_cheaper_variant_answers_where_the_better_one_cannot() {
    with(ensemble_of(&["double", "double"], Policy::Fallback, None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let weight = async |stream: &mut TcpStream| {
            // No text is as old as that.
            peer.clock.set(peer.clock.get() + Span::from_millis(300));
            metric(stream, r#"downbeat_selection_weight{member="double",model="vote",version="1"}"#).await.unwrap()
        };
        told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((peer.submitted.get().0, weight(&mut stream).await), (1, 1.0), "the better one is enough");
        peer.fates.borrow_mut().extend([Fate::Drop(DropReason::Deadline), OTHER]);
        let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((peer.submitted.get().0, data), (3, json!([9, 4, 6, 8])));
        assert_eq!(parameters, json!({ "confidence": 1.0, "members": members(1), "default": false }));
        let less = weight(&mut stream).await;
        assert!(less < 1.0, "{less}");
        let asked = peer.submitted.get().0;
        let (parameters, _) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((peer.submitted.get().0, &parameters["members"]), (asked + 1, &json!(members(1))), "not tried");
        // What fails otherwise is passed over, and does not make it less likely to be tried.
        peer.fates.borrow_mut().extend([TORN, DOUBLED]);
        told(&ask(&mut stream, &vote_of("")).await);
        assert!(weight(&mut stream).await > less);
        peer.fates.borrow_mut().extend([Fate::Drop(DropReason::Deadline); 2]);
        let heard = ask(&mut stream, &vote_of("")).await;
        assert_eq!(heard.status, 504, "{heard:?}");
        let nobody = weight(&mut stream).await;
        assert!(nobody < less, "{nobody}");
        is_served(&mut stream).await;
    });
}

#[test]
fn an_unloaded_variant_is_passed_over() {
    with(ensemble_of(&["absent", "double"], Policy::Fallback, None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let (parameters, _) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!((peer.submitted.get().0, &parameters["members"]), (1, &json!("double")));
    });
}

/// Lets the metrics' text be made anew.
async fn metric_now(stream: &mut TcpStream, peer: &Peer, line: &str) -> Option<f64> {
    // No text is as old as that.
    peer.clock.set(peer.clock.get() + Span::from_millis(300));
    metric(stream, line).await
}

#[test]
fn a_version_that_cannot_answer_leaves_its_part_to_the_others() {
    with(ensemble_of(&["absent", "double"], Policy::Canary(vec![1.0, 1.0]), None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        for _ in 0..20 {
            let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
            assert_eq!((&parameters["members"], data), (&json!("double"), json!([2, 4, 6, 8])));
        }
        let count = async |stream: &mut TcpStream, family: &str, member: &str| {
            let line = format!(r#"{family}{{member="{member}",model="vote",version="1"}}"#);
            metric_now(stream, &peer, &line).await.unwrap()
        };
        let missing = count(&mut stream, "downbeat_selection_missing_total", "absent").await;
        assert!((1.0..20.0).contains(&missing), "{missing}");
        assert_eq!(count(&mut stream, "downbeat_selection_predictions_total", "double").await, 20.0);
        assert_eq!(count(&mut stream, "downbeat_selection_weight", "absent").await, 0.5);
        // Whom all leave says why.
        peer.fates.borrow_mut().push_back(TORN);
        let heard = ask(&mut stream, &vote_of("")).await;
        assert!(matches!(heard.status, 500 | 503), "the last one's reason: {heard:?}");
    });
}

fn shadow(outcome: &str) -> String {
    let member = r#"member="double",model="vote""#;
    format!(r#"downbeat_shadow_requests_total{{{member},outcome="{outcome}",version="1"}}"#)
}

#[test]
fn what_is_mirrored_is_compared_and_answers_nobody() {
    with(ensemble_of(&["double", "double"], Policy::Shadow(1.0), None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let outcomes = ["agreed", "disagreed", "failed", "failed"];
        for (at, (fate, outcome)) in
            [DOUBLED, OTHER, TORN, Fate::Drop(DropReason::QueueFull)].into_iter().zip(outcomes).enumerate()
        {
            peer.fates.borrow_mut().extend([DOUBLED, fate]);
            let (parameters, data) = told(&ask(&mut stream, &vote_of("")).await);
            assert_eq!((data, &parameters["members"]), (json!([2, 4, 6, 8]), &json!("double")));
            let expected = outcomes[..=at].iter().filter(|other| **other == outcome).count() as f64;
            while metric_now(&mut stream, &peer, &shadow(outcome)).await != Some(expected) {
                tokio::task::yield_now().await;
            }
            assert_eq!(peer.submitted.get().0, 2 * (at + 1));
        }
        let seconds =
            r#"downbeat_shadow_seconds_total{member="double",model="vote",of="shadow",part="total",version="1"}"#;
        assert!(metric_now(&mut stream, &peer, seconds).await.is_some());
        // A request without an answer is not mirrored.
        peer.fates.borrow_mut().push_back(TORN);
        let asked = peer.submitted.get().0;
        assert_eq!((ask(&mut stream, &vote_of("")).await.status, peer.submitted.get().0), (500, asked + 1));
        // The ensemble had five requests, none of which was its shadow's.
        let stats = ask(&mut stream, &get_of("/v2/models/vote/stats")).await.json();
        let stats = &stats["model_stats"][0]["inference_stats"];
        assert_eq!([&stats["success"]["count"], &stats["fail"]["count"]], [&json!(4), &json!(1)]);
    });
}

#[test]
fn shadows_that_hang_keep_nobody_and_are_bounded() {
    with(ensemble_of(&["double", "double"], Policy::Shadow(1.0), None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut skipped = 0.0;
        for at in 1..=70 {
            peer.fates.borrow_mut().extend([DOUBLED, Fate::Keep]);
            told(&ask(&mut stream, &vote_of("")).await);
            while peer.kept.borrow().len() as f64 + skipped < f64::from(at) {
                skipped = metric_now(&mut stream, &peer, &shadow("skipped")).await.unwrap_or_default();
            }
            peer.fates.borrow_mut().clear();
        }
        let kept = peer.kept.borrow().len();
        assert!((1..=64).contains(&kept), "{kept}");
        peer.drop_kept();
        while metric_now(&mut stream, &peer, &shadow("failed")).await != Some(kept as f64) {
            tokio::task::yield_now().await;
        }
        told(&ask(&mut stream, &vote_of("")).await);
        while metric_now(&mut stream, &peer, &shadow("agreed")).await != Some(1.0) {
            tokio::task::yield_now().await;
        }
    });
}

fn learning() -> Policy {
    Policy::Exp4(Learning { eta: 0.5, exploration: 0.0, window: 80 })
}

fn feedback_of(items: &[Value]) -> Vec<u8> {
    post_of("/v2/models/vote/feedback", "", json!({ "feedback": items }).to_string().as_bytes())
}

fn right(ticket: &Value, class: usize) -> Value {
    json!({ "request": ticket, "outputs": [{ "name": "y", "data": [class] }] })
}

fn outcomes(heard: &Heard) -> Vec<String> {
    assert_eq!(heard.status, 200, "{heard:?}");
    let results = heard.json()["results"].as_array().unwrap().clone();
    results.into_iter().map(|result| result["outcome"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn feedback_moves_weights_once() {
    with(ensemble(learning(), None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let (parameters, _) = told(&ask(&mut stream, &vote_of("")).await);
        let ticket = &parameters["feedback"];
        let second = told(&ask(&mut stream, &vote_of("")).await).0["feedback"].clone();
        let heard = ask(&mut stream, &feedback_of(&[right(ticket, 3), right(ticket, 3), right(ticket, 2)])).await;
        assert_eq!(outcomes(&heard), ["counted", "repeated", "contradictory"]);
        // The first member lost 1, the others nothing.
        let first = r#"downbeat_selection_weight{member="double",model="vote",version="1"}"#;
        let expected = f64::exp(-0.5) / (f64::exp(-0.5) + 2.0);
        let weight = metric(&mut stream, first).await.unwrap();
        assert!((weight - expected).abs() < 1e-9, "{weight}");
        let unknown = [json!("0000000000000000-9"), json!("1234567890abcdef-0"), json!("x")];
        let heard = ask(&mut stream, &feedback_of(&unknown.map(|ticket| right(&ticket, 3)))).await;
        assert_eq!(outcomes(&heard), ["unknown"; 3]);
        let wrong = [
            json!({ "request": second, "outputs": [{ "name": "y", "data": [1, 2] }] }),
            json!({ "request": second, "outputs": [{ "name": "z", "data": [1] }] }),
            json!({ "request": second, "outputs": [{ "name": "y", "data": ["NaN"] }] }),
            json!({ "request": second, "outputs": [] }),
            json!({ "outputs": [{ "name": "y", "data": [1] }] }),
            json!(7),
        ];
        let heard = ask(&mut stream, &feedback_of(&wrong)).await;
        assert_eq!(outcomes(&heard), ["malformed"; 6]);
        let error = heard.json()["results"][0]["error"].as_str().unwrap().to_owned();
        assert_eq!(error, "outputs['y'].data: found 2, expected 1 classes, one a row");
        assert_eq!(metric(&mut stream, first).await, Some(weight), "nothing of that counts");
        // What is too old is late: ten minutes, and what the tests' service keeps.
        peer.clock.set(peer.clock.get() + Span::from_millis(60_000));
        assert_eq!(outcomes(&ask(&mut stream, &feedback_of(&[right(&second, 3)])).await), ["late"]);
        let counted =
            |outcome: &str| format!(r#"downbeat_feedback_total{{model="vote",outcome="{outcome}",version="1"}}"#);
        for (outcome, count) in
            [("counted", 1.0), ("repeated", 1.0), ("unknown", 3.0), ("malformed", 6.0), ("late", 1.0)]
        {
            assert_eq!(metric(&mut stream, &counted(outcome)).await, Some(count), "{outcome}");
        }
        let many = format!(r#"{{"feedback":[{}0]}}"#, "0,".repeat(1024));
        for (body, expected) in [
            (&many[..], "feedback: found 1025, expected a list of at most 1024"),
            (r#"{"feedback":{}}"#, "feedback: found something else, expected a list"),
            ("{}", "feedback: found none"),
        ] {
            let heard = ask(&mut stream, &post_of("/v2/models/vote/feedback", "", body.as_bytes())).await;
            assert!(heard.status == 400 && heard.json()["error"].as_str().unwrap().starts_with(expected), "{heard:?}");
        }
        let heard = ask(&mut stream, &post_of("/v2/models/double/feedback", "", br#"{"feedback":[]}"#)).await;
        let expected = "model: found 'double', which does not learn, expected an ensemble with selection exp3, exp4";
        assert!(heard.status == 400 && heard.json()["error"].as_str().unwrap().starts_with(expected), "{heard:?}");
    });
}

#[test]
fn feedback_comes_by_grpc_as_well() {
    with(ensemble(learning(), None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let ticket = told(&ask(&mut stream, &vote_of("")).await).0["feedback"].as_str().unwrap().to_owned();
        let mut client = connect(address).await;
        let item = |ticket: &str, data: &[f64]| Item {
            request: ticket.to_owned(),
            outputs: vec![Output { name: "y".to_owned(), data: data.to_vec() }],
            asked: None,
        };
        let items = [item(&ticket, &[3.0]), item(&ticket, &[3.0]), item("x", &[3.0]), item(&ticket, &[f64::NAN])];
        let mut tell = async |model: &str, feedback: Vec<Item>| {
            let (model_name, model_version) = (model.to_owned(), String::new());
            let asked = FeedbackRequest { model_name, model_version, feedback }.encode_to_vec();
            let path = head("").uri("http://h/downbeat.Feedback/Tell").body(()).unwrap();
            call(&mut client, path, framed(false, &asked)).await
        };
        let (status, text, messages) = tell("vote", items.to_vec()).await;
        assert_eq!(status, 0, "{text}");
        let FeedbackResponse { model_name, results } = FeedbackResponse::decode(messages[0].clone()).unwrap();
        let outcomes: Vec<&str> = results.iter().map(|result| &result.outcome[..]).collect();
        assert_eq!((&model_name[..], &outcomes[..]), ("vote", &["counted", "repeated", "unknown", "malformed"][..]));
        assert_eq!(results[3].error, "outputs['y'].data: found NaN, expected finite numbers");
        let (status, text, _) = tell("vote", vec![Item::default(); 1025]).await;
        assert_eq!((status, &text[..]), (3, "feedback: found 1025, expected a list of at most 1024"));
        let (status, ..) = tell("nobody", items.to_vec()).await;
        assert_eq!(status, 5);
        // By the request, of which the latest counts.
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let ticket = told(&ask(&mut stream, &vote_of("")).await).0["feedback"].as_str().unwrap().to_owned();
        let of = |ticket: &str, row: [u8; 4]| {
            let input = InferInputTensor {
                name: "x".to_owned(),
                datatype: "UINT8".to_owned(),
                shape: vec![1, 4],
                ..InferInputTensor::default()
            };
            let raw_input_contents = vec![Bytes::copy_from_slice(&row)];
            let asked = ModelInferRequest { inputs: vec![input], raw_input_contents, ..ModelInferRequest::default() };
            Item { asked: Some(asked), ..item(ticket, &[3.0]) }
        };
        let asked = [of("", [1, 2, 3, 4]), of("", [9, 2, 3, 4]), of(&ticket, [1, 2, 3, 4])];
        let (status, text, messages) = tell("vote", asked.to_vec()).await;
        assert_eq!(status, 0, "{text}");
        let results = FeedbackResponse::decode(messages[0].clone()).unwrap().results;
        let outcomes: Vec<&str> = results.iter().map(|result| &result.outcome[..]).collect();
        assert_eq!((outcomes, &results[0].request), (vec!["counted", "unknown", "malformed"], &ticket));
    });
}

#[test]
fn feedback_may_name_the_inputs_instead() {
    with(ensemble(learning(), None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let inputs = serde_json::from_str::<Value>(GOOD).unwrap()["inputs"].clone();
        let of = |inputs: &Value, context: Option<&str>| {
            let item = json!({ "inputs": inputs, "outputs": [{ "name": "y", "data": [3] }] });
            let mut item = item.as_object().unwrap().clone();
            item.extend(context.map(|context| ("context".to_owned(), json!(context))));
            Value::Object(item)
        };
        let heard = ask(&mut stream, &feedback_of(&[of(&inputs, None)])).await;
        assert_eq!(outcomes(&heard), ["unknown"], "nobody has asked that");
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let ticket = told(&ask(&mut stream, &vote_of("")).await).0["feedback"].clone();
        told(&ask(&mut stream, &vote_of(r#""context":"ann""#)).await);
        let mut others = inputs.clone();
        others[0]["data"] = json!([1, 2, 3, 5]);
        let heard = ask(&mut stream, &feedback_of(&[of(&inputs, None), of(&inputs, None), of(&others, None)])).await;
        assert_eq!(outcomes(&heard), ["counted", "repeated", "unknown"]);
        assert_eq!(heard.json()["results"][0]["request"], ticket);
        let heard = ask(&mut stream, &feedback_of(&[of(&inputs, Some("ann")), of(&inputs, Some("bob"))])).await;
        assert_eq!(outcomes(&heard), ["counted", "unknown"], "each context is asked by itself");
        let first = r#"downbeat_selection_weight{member="double",model="vote",version="1"}"#;
        let weight = metric_now(&mut stream, &peer, first).await.unwrap();
        assert!((weight - f64::exp(-0.5) / (f64::exp(-0.5) + 2.0)).abs() < 1e-9, "{weight}");
        let mut both = of(&inputs, None);
        both["request"] = ticket;
        let mut short = inputs.clone();
        short[0]["data"] = json!([1]);
        let wrong = [both, of(&short, None), of(&json!(7), None), of(&inputs, Some(""))];
        let heard = ask(&mut stream, &feedback_of(&wrong)).await;
        assert_eq!(outcomes(&heard), ["malformed"; 4], "{heard:?}");
        assert_eq!(heard.json()["results"][0]["error"], "request, inputs: found both, expected one of them");
    });
}

#[test]
fn a_request_names_its_context_over_both_protocols() {
    with(ensemble(learning(), None, 0.0), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let (parameters, _) = told(&ask(&mut stream, &vote_of(r#""context":"ann""#)).await);
        assert_eq!(parameters["context_state"], json!("current"));
        let heard = ask(&mut stream, &feedback_of(&[right(&parameters["feedback"], 3)])).await;
        assert_eq!(outcomes(&heard), ["counted"]);
        // The first member has lost in this context, and in no other.
        let parts: [f64; 2] = [f64::exp(-0.5) / (f64::exp(-0.5) + 2.0), 1.0 / 3.0];
        let mut client = connect(address).await;
        for (context, part) in [("ann", parts[0]), ("bob", parts[1])] {
            let asked = ModelInferRequest { model_name: "vote".to_owned(), ..message(&[1, 2, 3, 4]) };
            let named = InferParameter { parameter_choice: Some(ParameterChoice::StringParam(context.to_owned())) };
            let asked = ModelInferRequest { parameters: [("context".to_owned(), named)].into(), ..asked };
            peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
            let (status, text, messages) = infer(&mut client, &asked).await;
            assert_eq!(status, 0, "{text}");
            let reply = ModelInferResponse::decode(messages[0].clone()).unwrap();
            let parameter = |key: &str| reply.parameters[key].parameter_choice.clone().unwrap();
            let ParameterChoice::DoubleParam(confidence) = parameter("confidence") else { panic!("{reply:?}") };
            assert!((confidence - (1.0 - part)).abs() < 1e-9, "{context}: {confidence}");
            assert_eq!(parameter("context_state"), ParameterChoice::StringParam("current".to_owned()));
        }
        let (parameters, _) = told(&ask(&mut stream, &vote_of("")).await);
        assert_eq!(parameters.get("context_state"), None);
        assert_eq!(metric_now(&mut stream, &peer, "downbeat_selection_contexts").await, Some(2.0));
        let long = format!(r#""context":"{}""#, "x".repeat(65));
        for wrong in [&long[..], r#""context":"""#, r#""context":7"#] {
            let heard = ask(&mut stream, &vote_of(wrong)).await;
            assert_eq!(heard.status, 400, "{heard:?}");
            let error = heard.json()["error"].as_str().unwrap().to_owned();
            assert!(error.starts_with("parameters.context: found ") && error.ends_with("1 to 64 bytes"), "{error}");
        }
    });
}

/// Asks in a context once a second has gone by, and tells what was known of it.
async fn state_of(stream: &mut TcpStream, peer: &Peer, ms: i64) -> Value {
    peer.clock.set(peer.clock.get() + Span::from_millis(ms));
    told(&ask(stream, &vote_of(r#""context":"ann""#)).await).0["context_state"].clone()
}

#[test]
fn no_request_waits_for_a_redis() {
    let Some(mut server) = redis::Server::start(&[]) else { return };
    let config = redis::config(server.url(""), 10_000);
    with(ensemble(learning(), None, 0.0), async |address, peer| {
        let exchanging = Rc::clone(&peer);
        let store = Redis::start(&config, &peer.server.service.selections).unwrap();
        tokio::task::spawn_local(async move { store.run(&exchanging.server.service).await });
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(state_of(&mut stream, &peer, 0).await, json!("stale"), "it has not been asked yet");
        while state_of(&mut stream, &peer, 10).await != json!("current") {}
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let (parameters, _) = told(&ask(&mut stream, &vote_of(r#""context":"ann""#)).await);
        let heard = ask(&mut stream, &feedback_of(&[right(&parameters["feedback"], 3)])).await;
        assert_eq!(outcomes(&heard), ["counted"]);
        let taken = r#"downbeat_selection_context_updates_total{outcome="told"}"#;
        while metric_now(&mut stream, &peer, taken).await != Some(3.0) {
            tokio::task::yield_now().await;
        }
        server.process.kill();
        let silent = "downbeat_selection_context_store_silent";
        while metric_now(&mut stream, &peer, silent).await != Some(1.0) {
            state_of(&mut stream, &peer, 1_000).await;
        }
        assert_eq!(state_of(&mut stream, &peer, 1_000).await, json!("stale"), "it is told, and answered");
        peer.fates.borrow_mut().extend([OTHER, DOUBLED, DOUBLED]);
        let (parameters, _) = told(&ask(&mut stream, &vote_of(r#""context":"ann""#)).await);
        let part = f64::exp(-0.5) / (f64::exp(-0.5) + 2.0);
        assert!((parameters["confidence"].as_f64().unwrap() - (1.0 - part)).abs() < 1e-9, "by what was known last");
        server.process.run();
        while state_of(&mut stream, &peer, 1_000).await != json!("current") {}
        assert_eq!(metric_now(&mut stream, &peer, silent).await, Some(0.0));
    });
}

#[test]
fn a_redis_that_never_answers_holds_up_nobody() {
    // Longer than the test may take: whoever waited for it would be seen to.
    let config = redis::config(RedisUrl(format!("redis://{}", redis::pretend(b""))), 3_600_000);
    with(ensemble(learning(), None, 0.0), async |address, peer| {
        let exchanging = Rc::clone(&peer);
        let store = Redis::start(&config, &peer.server.service.selections).unwrap();
        tokio::task::spawn_local(async move { store.run(&exchanging.server.service).await });
        let mut stream = TcpStream::connect(address).await.unwrap();
        for _ in 0..20 {
            let (parameters, _) = told(&ask(&mut stream, &vote_of(r#""context":"ann""#)).await);
            assert_eq!(parameters["context_state"], json!("stale"));
            let heard = ask(&mut stream, &feedback_of(&[right(&parameters["feedback"], 3)])).await;
            assert_eq!(outcomes(&heard), ["counted"]);
        }
    });
}

#[test]
fn a_context_is_no_matter_of_models_that_do_not_learn() {
    with(ensemble(Policy::Majority, None, 0.0), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        for context in [r#""context":"ann""#, r#""context":7"#] {
            let (parameters, _) = told(&ask(&mut stream, &vote_of(context)).await);
            assert_eq!(parameters.get("context_state"), None);
        }
    });
}

#[test]
fn feedback_needs_its_permission_and_its_own_request() {
    // The digests of the tokens "mine", "yours" and "deaf".
    let token = |name: &str, digest: &str, operations: &str| {
        format!("[[token]]\nname = '{name}'\nsha256 = '{digest}'\nallow.operations = [{operations}]\n")
    };
    let clients = [
        token("mine", "3fd30542fe3f61b14bd4a4b2dc0b6fb30fa6f63ebce52dd1778aaa8c4dc02cff", "'infer', 'feedback'"),
        token("yours", "5eb2da9c26b65531549c8863fa023f9b48c1d3f0e17e01d7c4978876c724b21f", "'infer', 'feedback'"),
        token("deaf", "820effb874a485bf6151ec364d24e3cfccef1dd81e54740cb175e3e0adced243", "'infer'"),
    ];
    let grants = toml::from_str::<Clients>(&clients.concat()).unwrap().grants().unwrap();
    let gate = Gate { grants, ..open_gate(limits()) };
    with_gate_and(gate, ensemble(learning(), None, 0.0), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let body = GOOD.as_bytes();
        let heard = ask(&mut stream, &bearer(&post_of("/v2/models/vote/infer", "", body), "mine")).await;
        let ticket = told(&heard).0["feedback"].clone();
        let heard = ask(&mut stream, &bearer(&feedback_of(&[right(&ticket, 3)]), "yours")).await;
        assert_eq!(outcomes(&heard), ["unknown"], "as if it had never been");
        let heard = ask(&mut stream, &bearer(&feedback_of(&[right(&ticket, 3)]), "deaf")).await;
        assert_eq!(heard.status, 403, "{heard:?}");
        assert_eq!(outcomes(&ask(&mut stream, &bearer(&feedback_of(&[right(&ticket, 3)]), "mine")).await), ["counted"]);
    });
}
