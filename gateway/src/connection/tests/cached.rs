//! Answers that are kept, over REST and gRPC: who is answered so, who asks, and who is told nothing.

use std::{collections::BTreeMap, sync::Arc};

use prost::Message as _;
use repository::{Ensemble, EnsembleStep, Executor};

use super::{
    grpc::{connect, double as message, framed, head, infer},
    secure::{TOKEN, bearer, gate},
    *,
};
use crate::api::{InferParameter, ModelInferRequest, ModelInferResponse, infer_parameter::ParameterChoice};

const CHAIN: &str = "/v2/models/chain/infer";
/// One that has time without end: its deadline ends nobody's wait.
const ENDLESS: &str = r#"{"id":"q","parameters":{"background":true},
    "inputs":[{"name":"x","shape":[1,4],"datatype":"UINT8","data":[1,2,3,4]}]}"#;

fn endless() -> BTreeMap<String, InferParameter> {
    let endless = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
    [("background".to_owned(), endless)].into()
}

fn keeping(model: repository::Model) -> repository::Model {
    let platform = if model.ensemble().is_some() { "platform: 'ensemble'" } else { "" };
    let config = format!("name: '{}' max_batch_size: 8 {platform} response_cache {{ enable: true }}", model.name);
    repository::Model { configuration: config.parse().unwrap(), ..model }
}

/// `double` twice, where both answers can be wanted.
fn chain() -> repository::Model {
    let tensor = |name: &str| tensor(name, DataType::Uint8, &[4]);
    let step = |from: usize, to: usize| EnsembleStep {
        model: "double".to_owned(),
        version: None,
        inputs: vec![("x".to_owned(), from)],
        outputs: vec![("y".to_owned(), to)],
    };
    let tensors = ["x", "y", "z"].map(str::to_owned).into();
    let graph =
        Ensemble { steps: vec![step(0, 1), step(1, 2)], tensors, outputs: vec![1, 2], selection: None, nested: None };
    let face = model("chain", vec![tensor("x")], vec![tensor("y"), tensor("z")]);
    repository::Model { executor: Executor::Ensemble(Arc::new(graph)), labels: vec![Vec::new(); 2], ..face }
}

fn with_kept<F: Future<Output = ()>>(test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_kept_and_gate(open_gate(limits()), test);
}

/// The answers of models are kept, and those of the ensemble are not.
fn with_kept_steps<F: Future<Output = ()>>(test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_kept_models(vec![keeping(double()), chain()], open_gate(limits()), test);
}

fn with_kept_and_gate<F: Future<Output = ()>>(gate: Gate, test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_kept_models(vec![keeping(double()), keeping(chain())], gate, test);
}

fn with_kept_models<F: Future<Output = ()>>(
    models: Vec<repository::Model>,
    gate: Gate,
    test: impl FnOnce(SocketAddr, Rc<Peer>) -> F,
) {
    with_models_and_schedulers(models, 1, gate, None, async |address, peer| {
        test(address, Rc::clone(&peer)).await;
        until(|| peer.server.bodies_bytes() == 0 && peer.desk.pending().is_empty()).await;
    });
}

async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::task::yield_now().await;
    }
}

async fn asked(address: SocketAddr, path: &str, body: &str) -> Heard {
    ask(&mut TcpStream::connect(address).await.unwrap(), &post_of(path, "", body.as_bytes())).await
}

/// Connects and asks, and does not listen.
async fn begun(address: SocketAddr, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&post_of(INFER, "", body.as_bytes())).await.unwrap();
    stream
}

fn pending(peer: &Peer) -> usize {
    peer.desk.pending().get(&0).copied().unwrap_or_default()
}

fn data(heard: &Heard) -> Value {
    heard.json()["outputs"][0]["data"].clone()
}

#[test]
fn an_equal_request_is_answered_without_its_model() {
    with_kept(async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        is_served(&mut stream).await;
        let again = ask(&mut stream, &post_of(INFER, "", &GOOD.replace(r#""q""#, r#""r""#).into_bytes())).await;
        assert_eq!((again.status, data(&again), peer.submitted.get().0), (200, json!([2, 4, 6, 8]), 1));
        assert_eq!(again.json()["id"], "r", "what is the client's own");
        assert!(again.header("x-downbeat-timing").unwrap().starts_with("cache;"), "{again:?}");

        // The same elements in another form, wanted in another form.
        let mut client = connect(address).await;
        let (status, text, messages) = infer(&mut client, &message(&[1, 2, 3, 4])).await;
        assert_eq!((status, peer.submitted.get().0), (0, 1), "{text}");
        let reply = ModelInferResponse::decode(messages[0].clone()).unwrap();
        assert_eq!(&reply.raw_output_contents[0][..], [2, 4, 6, 8]);
        let best = GOOD.replace(r#""id":"q""#, r#""outputs":[{"name":"y","parameters":{"classification":1}}]"#);
        let best = ask(&mut stream, &post_of(INFER, "", best.as_bytes())).await;
        assert_eq!((best.json()["outputs"][0]["data"].clone(), peer.submitted.get().0), (json!(["8:3"]), 1));

        let other = ask(&mut stream, &post_of(INFER, "", GOOD.replace("4]}", "5]}").as_bytes())).await;
        assert_eq!((data(&other), peer.submitted.get().0), (json!([2, 4, 6, 10]), 2));
        let application = GOOD.replace(r#""id":"q""#, r#""parameters":{"application":"a"}"#);
        ask(&mut stream, &post_of(INFER, "", application.as_bytes())).await;
        assert_eq!(peer.submitted.get().0, 3, "another workload");

        let explained = ask(&mut stream, &get_of("/debug/requests/r")).await.json();
        assert_eq!((&explained["outcome"], &explained["source"]), (&json!("answered"), &json!("cache")));
        let stats = ask(&mut stream, &get_of("/v2/models/double/stats")).await.json()["model_stats"][0].clone();
        let counts = ["success", "cache_hit", "cache_miss"].map(|of| stats["inference_stats"][of]["count"].clone());
        assert_eq!(counts, [6, 3, 3].map(Value::from), "{stats}");
        assert_eq!((&stats["inference_count"], &stats["execution_count"]), (&json!(3), &json!(1)), "{stats}");
        let metrics = String::from_utf8(ask(&mut stream, &get_of("/metrics")).await.body).unwrap();
        for (family, count) in [("nv_cache_num_hits", 3), ("nv_cache_num_misses", 3)] {
            let line = format!("{family}_per_model{{model=\"double\",version=\"1\"}} {count}\n");
            assert!(metrics.contains(&line), "{line}{metrics}");
        }
    });
}

#[test]
fn a_step_is_answered_as_a_request_for_its_model_is() {
    with_kept_steps(async |address, peer| {
        let heard = asked(address, CHAIN, GOOD).await;
        assert_eq!((heard.status, data(&heard), peer.submitted.get().0), (200, json!([2, 4, 6, 8]), 2));
        let again = asked(address, CHAIN, &GOOD.replace(r#""q""#, r#""r""#)).await;
        assert_eq!((&again.json()["outputs"], peer.submitted.get().0), (&heard.json()["outputs"], 2));
        // Whichever asks first, the ensemble or a client.
        let mut stream = TcpStream::connect(address).await.unwrap();
        is_served(&mut stream).await;
        assert_eq!(peer.submitted.get().0, 2);
        let other = GOOD.replace("4]}", "5]}");
        assert_eq!(data(&ask(&mut stream, &post_of(INFER, "", other.as_bytes())).await), json!([2, 4, 6, 10]));
        let heard = asked(address, CHAIN, &other).await;
        assert_eq!((heard.json()["outputs"][1]["data"].clone(), peer.submitted.get().0), (json!([4, 8, 12, 20]), 4));
        let application = GOOD.replace(r#""id":"q""#, r#""parameters":{"application":"a"}"#);
        asked(address, CHAIN, &application).await;
        assert_eq!(peer.submitted.get().0, 6, "another workload");

        let explained = ask(&mut stream, &get_of("/debug/requests/r")).await.json();
        let sources: Vec<&Value> = explained["steps"].as_array().unwrap().iter().map(|step| &step["source"]).collect();
        assert_eq!(sources, ["cache", "cache"], "{explained}");
        assert_eq!((&explained["outcome"], &explained["source"]), (&json!("answered"), &Value::Null));
        let metrics = String::from_utf8(ask(&mut stream, &get_of("/metrics")).await.body).unwrap();
        for (family, model, count) in [
            ("nv_cache_num_hits_per_model", "double", 4),
            ("nv_cache_num_misses_per_model", "double", 6),
            ("nv_inference_request_success", "chain", 4),
        ] {
            let line = format!("{family}{{model=\"{model}\",version=\"1\"}} {count}\n");
            assert!(metrics.contains(&line), "{line}{metrics}");
        }
    });
}

#[test]
fn a_step_waits_for_whoever_asks_the_same_and_asks_in_its_place() {
    with_kept_steps(async |address, peer| {
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut first = begun(address, ENDLESS).await;
        until(|| peer.submitted.get().0 == 1).await;
        let mut ensemble = TcpStream::connect(address).await.unwrap();
        ensemble.write_all(&post_of(CHAIN, "", ENDLESS.as_bytes())).await.unwrap();
        until(|| pending(&peer) == 2).await;
        assert_eq!(peer.submitted.get().0, 1, "its first step waits");
        peer.drop_kept();
        assert_eq!(hear(&mut first).await.unwrap().status, 504);
        let heard = hear(&mut ensemble).await.unwrap();
        assert_eq!((heard.status, data(&heard), peer.submitted.get().0), (200, json!([2, 4, 6, 8]), 3));

        // The other way round: a client waits for a step, whose request hangs up.
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let body = ENDLESS.replace("4]}", "7]}");
        let mut client = connect(address).await;
        let (response, mut call) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
        let message =
            ModelInferRequest { model_name: "chain".to_owned(), parameters: endless(), ..message(&[1, 2, 3, 7]) };
        call.send_data(framed(false, &message.encode_to_vec()), true).unwrap();
        until(|| peer.submitted.get().0 == 4).await;
        let mut second = begun(address, &body).await;
        until(|| pending(&peer) == 2).await;
        assert_eq!(peer.submitted.get().0, 4);
        call.send_reset(h2::Reason::CANCEL);
        drop((response, client));
        let heard = hear(&mut second).await.unwrap();
        assert_eq!((heard.status, data(&heard)), (200, json!([2, 4, 6, 14])));
    });
}

#[test]
fn equal_requests_at_once_are_asked_once() {
    with_kept(async |address, peer| {
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut first = begun(address, ENDLESS).await;
        until(|| peer.submitted.get().0 == 1).await;
        let mut second = begun(address, ENDLESS).await;
        until(|| pending(&peer) == 2).await;
        assert_eq!(peer.submitted.get().0, 1);
        // It fails, and the other asks in its place.
        peer.drop_kept();
        assert_eq!(hear(&mut first).await.unwrap().status, 504);
        let heard = hear(&mut second).await.unwrap();
        assert_eq!((heard.status, data(&heard), peer.submitted.get().0), (200, json!([2, 4, 6, 8]), 2));
        is_served(&mut second).await;
        assert_eq!(peer.submitted.get().0, 2, "an answer is kept, and an error was not");
    });
}

#[test]
fn who_waits_asks_in_the_place_of_one_that_hangs_up() {
    with_kept(async |address, peer| {
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut client = connect(address).await;
        let (response, mut call) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
        let asked = ModelInferRequest { parameters: endless(), ..message(&[1, 2, 3, 4]) };
        call.send_data(framed(false, &asked.encode_to_vec()), true).unwrap();
        until(|| peer.submitted.get().0 == 1).await;
        let mut others = vec![begun(address, ENDLESS).await, begun(address, ENDLESS).await];
        until(|| pending(&peer) == 3).await;
        drop(response);
        call.send_reset(h2::Reason::CANCEL);
        for other in &mut others {
            assert_eq!(data(&hear(other).await.unwrap()), json!([2, 4, 6, 8]));
        }
        assert_eq!(peer.submitted.get().0, 2);
    });
}

/// Its own deadline ends its wait, and nobody's time makes another late.
#[test]
fn each_keeps_its_own_deadline() {
    with_kept(async |address, peer| {
        peer.fates.borrow_mut().extend([Fate::Keep, Fate::Keep]);
        let mut first = begun(address, ENDLESS).await;
        until(|| peer.submitted.get().0 == 1).await;
        let mut second = begun(address, GOOD).await;
        until(|| peer.submitted.get().0 == 2).await;
        let third = asked(address, INFER, GOOD).await;
        assert_eq!((third.status, peer.submitted.get().0), (504, 2), "{third:?}");
        peer.drop_kept();
        assert_eq!(hear(&mut second).await.unwrap().status, 504);
        assert_eq!(hear(&mut first).await.unwrap().status, 504);
    });
}

#[test]
fn no_answer_outlives_the_load_that_gave_it() {
    with_kept(async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        is_served(&mut stream).await;
        let chained = ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await;
        assert_eq!((chained.json()["outputs"][1]["data"].clone(), peer.submitted.get().0), (json!([4, 8, 12, 16]), 2));
        ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await;
        assert_eq!(peer.submitted.get().0, 2);
        let only = GOOD.replace(r#""id":"q""#, r#""outputs":[{"name":"y"}]"#);
        let first = ask(&mut stream, &post_of(CHAIN, "", only.as_bytes())).await;
        assert_eq!((data(&first), peer.submitted.get().0), (json!([2, 4, 6, 8]), 2), "another question, a known step");

        for change in ["unload", "load"] {
            let path = format!("/v2/repository/models/double/{change}");
            assert_eq!(ask(&mut stream, &post_of(&path, "", b"{}")).await.status, 200);
            let heard = ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;
            let expected = if change == "load" { (200, 3) } else { (503, 2) };
            assert_eq!((heard.status, peer.submitted.get().0), expected, "{heard:?}");
        }
        ask(&mut stream, &post_of(CHAIN, "", GOOD.as_bytes())).await;
        assert_eq!(peer.submitted.get().0, 4, "an ensemble's answers are its members', of which one has answered anew");
    });
}

#[test]
fn who_may_not_ask_is_told_nothing_of_what_is_kept() {
    with_kept_and_gate(gate("operations = ['infer'], models = ['chain']"), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let chain = bearer(&post_of(CHAIN, "", GOOD.as_bytes()), TOKEN);
        assert_eq!([ask(&mut stream, &chain).await.status, ask(&mut stream, &chain).await.status], [200, 200]);
        assert_eq!(peer.submitted.get().0, 2);
        for (request, status) in
            [(post_of(CHAIN, "", GOOD.as_bytes()), 401), (bearer(&post_of(INFER, "", GOOD.as_bytes()), TOKEN), 403)]
        {
            assert_eq!(ask(&mut stream, &request).await.status, status);
        }
    });
}
