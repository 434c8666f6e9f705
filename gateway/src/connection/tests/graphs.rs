//! Ensembles, over REST and gRPC: their steps are the tests' one model, which doubles every byte.

use std::sync::Arc;

use prost::Message as _;
use repository::{Ensemble, EnsembleStep, Executor, Priorities};

use super::{
    grpc::{connect, double as message, framed, head, infer},
    secure::bearer,
    *,
};
use crate::api::{ModelInferRequest, ModelInferResponse};

const CHAIN: &str = "/v2/models/chain/infer";
const DIAMOND: &str = "/v2/models/diamond/infer";

/// An ensemble of the model "double": each step takes and makes one tensor, `x` being what the request brings.
fn ensemble(name: &str, steps: &[(usize, usize)], outputs: &[usize]) -> repository::Model {
    let named = |tensor: usize| ["x", "t", "u", "y", "z"][tensor];
    let output = |tensor: &usize| tensor_of(named(*tensor));
    let face = model(name, vec![tensor_of("x")], outputs.iter().map(output).collect());
    let step = |(from, to): &(usize, usize)| EnsembleStep {
        model: "double".to_owned(),
        version: None,
        inputs: vec![("x".to_owned(), *from)],
        outputs: vec![("y".to_owned(), *to)],
    };
    let graph = Ensemble {
        steps: steps.iter().map(step).collect(),
        tensors: (0..5).map(|tensor| named(tensor).to_owned()).collect(),
        outputs: outputs.to_vec(),
        selection: None,
        nested: None,
    };
    repository::Model {
        executor: Executor::Ensemble(Arc::new(graph)),
        priorities: Priorities { levels: u8::MAX, default: 0 },
        labels: vec![Vec::new(); outputs.len()],
        configuration: format!("platform: 'ensemble' name: '{name}'").parse().unwrap(),
        ..face
    }
}

fn tensor_of(name: &str) -> repository::Tensor {
    tensor(name, DataType::Uint8, &[4])
}

/// `double`, twice it, and its double on two ways of which one is longer.
fn models() -> Vec<repository::Model> {
    let labelled = repository::Model { labels: vec![["a", "b", "c", "d"].map(str::to_owned).into()], ..double() };
    let chain = ensemble("chain", &[(0, 1), (1, 3)], &[3]);
    vec![labelled, chain, ensemble("diamond", &[(0, 1), (0, 2), (1, 3), (2, 4)], &[3, 4])]
}

fn with_graphs<F: Future<Output = ()>>(test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_gate_and_graphs(open_gate(limits()), test);
}

fn with_gate_and_graphs<F: Future<Output = ()>>(gate: Gate, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_models_and_schedulers(models(), 1, gate, None, async |address, peer| {
        test(address, Rc::clone(&peer)).await;
        while peer.desk.with_core(|core| core.outstanding()) > 0 || peer.server.bodies_bytes() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(peer.desk.pending().is_empty(), "{:?}", peer.desk.pending());
    });
}

fn data(heard: &Heard) -> Vec<Value> {
    let outputs = heard.json()["outputs"].as_array().unwrap_or_else(|| panic!("{heard:?}")).clone();
    outputs.into_iter().map(|output| json!([output["name"], output["data"]])).collect()
}

fn error(heard: &Heard) -> String {
    heard.json()["error"].as_str().unwrap_or_else(|| panic!("{heard:?}")).to_owned()
}

#[test]
fn an_ensemble_is_asked_as_a_model_is() {
    with_graphs(async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await;
        assert_eq!((heard.status, data(&heard)), (200, vec![json!(["y", [4, 8, 12, 16]])]));
        assert_eq!((&heard.json()["model_name"], &heard.json()["id"]), (&json!("chain"), &json!("q")));
        let heard = ask(&mut stream, &post_of(DIAMOND, "", GOOD.as_bytes())).await;
        let both = vec![json!(["y", [4, 8, 12, 16]]), json!(["z", [4, 8, 12, 16]])];
        assert_eq!((heard.status, data(&heard), peer.submitted.get().0), (200, both, 6));

        let only = GOOD.replace(r#""id":"q""#, r#""outputs":[{"name":"z","parameters":{"classification":2}}]"#);
        let heard = ask(&mut stream, &post_of(DIAMOND, "", only.as_bytes())).await;
        let best = json!(["z", ["16:3:d", "12:2:c"]]);
        assert_eq!((data(&heard), peer.submitted.get().0), (vec![best], 8), "steps of other outputs are not asked");
        let binary = GOOD.replace(r#""id":"q""#, r#""parameters":{"binary_data_output":true}"#);
        let heard = ask(&mut stream, &post_of(CHAIN, "", binary.as_bytes())).await;
        assert!(heard.body.ends_with(&[4, 8, 12, 16]), "{heard:?}");

        let mut client = connect(address).await;
        let asked = ModelInferRequest { model_name: "chain".to_owned(), ..message(&[1, 2, 3, 4, 9, 8, 7, 6]) };
        let (status, text, messages) = infer(&mut client, &asked).await;
        assert_eq!(status, 0, "{text}");
        let reply = ModelInferResponse::decode(messages[0].clone()).unwrap();
        let (output, raw) = (&reply.outputs[0], &reply.raw_output_contents[0]);
        assert_eq!((&output.shape[..], &raw[..]), (&[2, 4][..], &[4, 8, 12, 16, 36, 32, 28, 24][..]), "two rows");
    });
}

#[test]
fn what_is_told_of_an_ensemble_is_told_of_its_members_too() {
    with_graphs(async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let metadata = ask(&mut stream, &get_of("/v2/models/chain")).await.json();
        assert_eq!((&metadata["platform"], &metadata["versions"]), (&json!("ensemble"), &json!(["1"])));
        assert_eq!(metadata["inputs"], json!([{ "name": "x", "datatype": "UINT8", "shape": [-1, 4] }]));
        assert_eq!(ask(&mut stream, &get_of("/v2/models/chain/config")).await.json()["platform"], "ensemble");
        let ready = ask(&mut stream, &get_of("/v2/models/chain/versions/1/ready")).await;
        assert_eq!((ready.status, ready.json()), (200, json!({ "name": "chain", "ready": true })));

        assert_eq!(ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await.status, 200);
        let explained = ask(&mut stream, &get_of("/debug/requests/q")).await.json();
        let steps = explained["steps"].as_array().unwrap();
        assert_eq!((&explained["model"], &explained["outcome"], steps.len()), (&json!("chain"), &json!("answered"), 2));
        assert_eq!((&steps[1]["model"], &steps[1]["batch"]["gpu"]), (&json!("double"), &json!(2)));
        // 5 ms, and of the 15 that both leave over what is due to one that another follows; the clock stands still.
        let deadlines = [0, 1].map(|step| steps[step]["microseconds_since_arrival"]["deadline"].as_f64().unwrap());
        assert_eq!(deadlines, [5_000.0 + 15_000.0 * 1.4 / 2.4, 25_000.0]);

        let counts = async |stream: &mut TcpStream, name: &str| {
            let told = ask(stream, &get_of(&format!("/v2/models/{name}/stats"))).await.json();
            let stats = &told["model_stats"][0];
            let success = &stats["inference_stats"]["success"]["count"];
            [&stats["inference_count"], &stats["execution_count"], success].map(|count| count.as_u64().unwrap_or(0))
        };
        assert_eq!(counts(&mut stream, "chain").await, [1, 1, 1]);
        assert_eq!(counts(&mut stream, "double").await[2], 2);
        let metrics = String::from_utf8(ask(&mut stream, &get_of("/metrics")).await.body).unwrap();
        for expected in [
            r#"nv_inference_request_success{model="chain",version="1"} 1"#,
            r#"nv_inference_request_success{model="double",version="1"} 2"#,
            r#"downbeat_stage_seconds_count{stage="execute"} 2"#,
        ] {
            assert!(metrics.lines().any(|line| line == expected), "{expected}\n{metrics}");
        }
    });
}

#[test]
fn what_is_wrong_is_said_of_the_ensemble() {
    with_graphs(async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        for (body, expected) in [
            (GOOD.replace("[1,4]", "[1,5]").replace("[1,2,3,4]", "[1,2,3,4,5]"), "inputs['x'].shape: found [1, 5]"),
            (GOOD.replace("\"x\"", "\"w\""), "inputs[].name: found 'w', expected one of: x"),
            (GOOD.replace("UINT8", "INT8"), "inputs['x'].datatype: found 'INT8', expected 'UINT8'"),
            (r#"{"inputs":[]}"#.to_owned(), "expected 1 inputs but got 0 inputs for model 'chain'"),
            (GOOD.replace(r#""id":"q""#, r#""parameters":{"timeout":9999}"#), "parameters.timeout: found 9.999 ms"),
        ] {
            let heard = ask(&mut stream, &post_of(CHAIN, "", body.as_bytes())).await;
            assert!(heard.status == 400 && error(&heard).starts_with(expected), "{expected}: {heard:?}");
        }
        assert_eq!(peer.submitted.get().0, 0, "no step was asked");
        let enough = GOOD.replace(r#""id":"q""#, r#""parameters":{"timeout":10000,"priority":300}"#);
        assert_eq!(ask(&mut stream, &post_of(CHAIN, "", enough.as_bytes())).await.status, 200);
    });
}

#[test]
fn the_first_step_that_fails_ends_the_request_with_its_reason() {
    with_graphs(async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let full = Fate::Drop(DropReason::QueueFull);
        let torn = Fate::Answer(AnswerStatus::Failed, "it is torn");
        let answered = Fate::Answer(AnswerStatus::Done, "abcd");
        for (fates, status, reason) in [
            (vec![full], 503, "dropped: Exceeds maximum queue size: the model's queue is full"),
            (vec![answered, full], 503, "dropped: Exceeds maximum queue size: the model's queue is full"),
            (vec![answered, torn], 500, "Failed to process the request(s) for model in its backend: it is torn"),
            (vec![answered, Fate::Answer(AnswerStatus::Done, "ab")], 502, "the backend's answer is malformed"),
        ] {
            peer.fates.borrow_mut().extend(fates);
            let heard = ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await;
            let expected = format!("in ensemble 'chain', {reason}");
            assert!(heard.status == status && error(&heard).starts_with(&expected), "{expected}: {heard:?}");
            assert!(error(&heard).ends_with("(in its step 'double')"), "{heard:?}");
        }
        assert_eq!(peer.cancelled.get(), 0);
        // Of a diamond the other steps are cancelled, and say so.
        peer.fates.borrow_mut().extend([Fate::Keep, full]);
        let heard = ask(&mut stream, &post_of(DIAMOND, "", GOOD.as_bytes())).await;
        assert_eq!((heard.status, peer.cancelled.get()), (503, 1), "{heard:?}");
        let explained = ask(&mut stream, &get_of("/debug/requests/q")).await.json();
        assert_eq!(explained["steps"][0]["outcome"], "cancelled, as nobody waited for it any more");
        is_served(&mut stream).await;
        assert_eq!(ask(&mut stream, &post_of(DIAMOND, "", GOOD.as_bytes())).await.status, 200);
    });
}

#[test]
fn a_step_that_hangs_ends_the_request_at_its_deadline() {
    with_graphs(async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        peer.fates.borrow_mut().extend([Fate::Answer(AnswerStatus::Done, "abcd"), Fate::Keep]);
        stream.write_all(&post_of(CHAIN, "", GOOD.as_bytes())).await.unwrap();
        while peer.kept.borrow().is_empty() {
            tokio::task::yield_now().await;
        }
        peer.clock.set(peer.clock.get() + Span::from_millis(25));
        let heard = hear(&mut stream).await.unwrap();
        let expected = "dropped: Request timeout expired: its deadline could no longer be met";
        assert_eq!((heard.status, error(&heard).as_str()), (504, expected));
        while peer.cancelled.get() == 0 {
            tokio::task::yield_now().await;
        }
        is_served(&mut stream).await;
    });
}

#[test]
fn a_client_that_goes_away_cancels_all_steps() {
    with_graphs(async |address, peer| {
        peer.fates.borrow_mut().extend([Fate::Keep, Fate::Keep]);
        let mut client = connect(address).await;
        let (response, mut call) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
        let asked = ModelInferRequest { model_name: "diamond".to_owned(), ..message(&[1, 2, 3, 4]) };
        call.send_data(framed(false, &asked.encode_to_vec()), true).unwrap();
        while peer.kept.borrow().len() < 2 {
            tokio::task::yield_now().await;
        }
        let pending = peer.desk.pending();
        assert_eq!(pending.into_iter().collect::<Vec<_>>(), [(0, 2), (2, 1)], "two steps of the one request");
        call.send_reset(h2::Reason::CANCEL);
        drop(response);
        while peer.cancelled.get() < 2 {
            tokio::task::yield_now().await;
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        let stats = ask(&mut stream, &get_of("/v2/models/diamond/stats")).await.json();
        assert_eq!(stats["model_stats"][0]["inference_stats"]["fail"]["count"].to_string().trim_matches('"'), "1");
    });
}

#[test]
fn ensembles_are_loaded_with_their_members_and_unloaded() {
    with_graphs(async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let change = |model: &str, to: &str, body: &str| {
            post_of(&format!("/v2/repository/models/{model}/{to}"), "", body.as_bytes())
        };
        let ready = async |stream: &mut TcpStream| {
            let mut statuses = Vec::new();
            for name in ["double", "chain", "diamond"] {
                statuses.push(ask(stream, &get_of(&format!("/v2/models/{name}/ready"))).await.status);
            }
            statuses
        };
        assert_eq!(ask(&mut stream, &change("double", "unload", "")).await.status, 200);
        assert_eq!(ready(&mut stream).await, [503, 503, 503]);
        let index = ask(&mut stream, &post_of("/v2/repository/index", "", b"")).await.json();
        let of = |name: &str| index.as_array().unwrap().iter().find(|model| model["name"] == name).unwrap().clone();
        let reason = "its step 'double' is not ready: Request for unknown model: 'double' has no available versions, \
                      as it was unloaded";
        assert_eq!((&of("chain")["state"], &of("chain")["reason"]), (&json!("UNAVAILABLE"), &json!(reason)));
        let heard = ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await;
        assert!(
            heard.status == 503 && error(&heard).starts_with("in ensemble 'chain', Request for unknown"),
            "{heard:?}"
        );

        assert_eq!(ask(&mut stream, &change("chain", "load", "")).await.status, 200);
        assert_eq!(ready(&mut stream).await, [200, 200, 200], "its member is loaded with it");
        assert_eq!(ask(&mut stream, &change("chain", "unload", "")).await.status, 200);
        assert_eq!(ready(&mut stream).await, [200, 503, 200]);
        let heard = ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await;
        let gone = "Request for unknown model: 'chain' has no available versions, as it was unloaded";
        assert_eq!((heard.status, error(&heard).as_str()), (503, gone));
        assert_eq!(ask(&mut stream, &change("chain", "load", "")).await.status, 200);
        let with = |flag| format!(r#"{{"parameters":{{"unload_dependents":{flag}}}}}"#);
        assert_eq!(ask(&mut stream, &change("diamond", "unload", &with(false))).await.status, 200);
        assert_eq!(ready(&mut stream).await, [200, 200, 503]);
        assert_eq!(ask(&mut stream, &change("chain", "unload", &with(true))).await.status, 200);
        assert_eq!(ready(&mut stream).await, [503, 503, 503]);
    });
}

#[test]
fn whoever_may_ask_an_ensemble_may_have_its_members_asked_and_nothing_more() {
    let token = "a-token-of-sixteen-bytes";
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), token).unwrap();
    let allow = "{ operations = ['infer', 'repository'], models = ['chain'] }";
    let text = format!("[[token]]\nname = 't'\nfile = '{}'\nallow = {allow}\n", file.path().display());
    let gate = Gate { grants: toml::from_str::<Clients>(&text).unwrap().grants().unwrap(), ..open_gate(limits()) };
    with_gate_and_graphs(gate, async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let post = |path: &str, body: &[u8]| bearer(&post_of(path, "", body), token);
        assert_eq!(ask(&mut stream, &post(CHAIN, GOOD.as_bytes())).await.status, 200);
        for path in [INFER, DIAMOND, "/v2/repository/models/double/unload"] {
            assert_eq!(ask(&mut stream, &post(path, GOOD.as_bytes())).await.status, 403, "{path}");
        }
        let all = br#"{"parameters":{"unload_dependents":true}}"#;
        assert_eq!(ask(&mut stream, &post("/v2/repository/models/chain/unload", all)).await.status, 200);
        let heard = ask(&mut stream, &post(CHAIN, GOOD.as_bytes())).await;
        assert!(error(&heard).contains("'chain' has no available versions"), "{heard:?}");
        let is_ready = peer.desk.with_model("double", None, |_, _, is_ready| is_ready);
        assert_eq!(is_ready, Ok(true), "its member is not this client's to unload");
    });
}

#[test]
fn what_goes_between_steps_is_charged_to_the_client() {
    let rows = "1,".repeat(31) + "1";
    let body = format!(r#"{{"inputs":[{{"name":"x","shape":[8,4],"datatype":"UINT8","data":[{rows}]}}]}}"#);
    // A client may hold four fifths: the body fits, and 32 bytes that the first step makes do not.
    let bodies_bytes_max = body.len() * 5 / 4 + 8;
    with_gate_and_graphs(open_gate(Limits { bodies_bytes_max, ..limits() }), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &post_of(CHAIN, "", body.as_bytes())).await;
        let expected = format!("bodies_bytes_max ({bodies_bytes_max})");
        assert!(heard.status == 503 && error(&heard).contains(&expected), "{heard:?}");
        assert_eq!(peer.submitted.get().0, 8, "the second step was not asked");
    });
}
