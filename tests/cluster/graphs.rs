//! Ensembles through every process: their answers, and what becomes of them when members go, hang, or nobody waits.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::*;

const BYTES: usize = 64;

fn tensor(kind: &str, name: &str, datatype: &str, dims: usize) -> String {
    format!("{kind} {{ name: '{name}' data_type: TYPE_{datatype} dims: [ {dims} ] }}\n")
}

fn parameters(of: &[(&str, &str)]) -> String {
    let one =
        |(key, value): &(&str, &str)| format!("parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}\n");
    of.iter().map(one).collect()
}

fn step(model: &str, (input, from): (&str, &str), (output, to): (&str, &str)) -> String {
    format!(
        "step {{ model_name: '{model}' model_version: -1 input_map {{ key: '{input}' value: '{from}' }} \
         output_map {{ key: '{output}' value: '{to}' }} }}\n"
    )
}

/// `echo` gives its input back, `digest` digests it, `stuck` takes ten thousand times what it says; then ensembles of
/// these, and some that cannot be.
fn write_repository(folder: &Path) {
    let write = |name: &str, config: String| {
        fs::create_dir_all(folder.join(name).join("1")).unwrap();
        fs::write(folder.join(name).join("config.pbtxt"), config).unwrap();
    };
    let emulated = "backend: 'emulated' max_batch_size: 8\n";
    let quick = parameters(&[("alpha_ms", "1"), ("beta_ms", "1")]);
    let input = tensor("input", "x", "UINT8", BYTES);
    let same = tensor("output", "y", "UINT8", BYTES);
    let digest = tensor("output", "digest", "UINT64", 2);
    write("echo", [emulated, &input, &same, &quick].concat());
    write("echo_next", [emulated, &input, &same, &quick].concat());
    write("digest", [emulated, &input, &digest, &quick].concat());
    let slow = parameters(&[("cost_fixed_ms", "1"), ("cost_per_task", "1"), ("alone_ms", "normal:20000:0")]);
    write("stuck", [emulated, &input, &same, &quick, &slow].concat());

    let face = "platform: 'ensemble' max_batch_size: 8\n";
    let graph = |steps: &[String]| format!("ensemble_scheduling {{ {} }}", steps.concat());
    let image = tensor("input", "image", "UINT8", BYTES);
    let (echo, digested) =
        (|from, to| step("echo", ("x", from), ("y", to)), |from, to| step("digest", ("x", from), ("digest", to)));
    let chain = graph(&[echo("image", "t"), digested("t", "digest")]);
    write("chain", [face, &image, &digest, &chain].concat());
    let (left, diamond) =
        (tensor("output", "left", "UINT8", BYTES), [echo("image", "t"), echo("t", "left"), digested("t", "digest")]);
    write("diamond", [face, &image, &digest, &left, &graph(&diamond)].concat());
    let hangs = graph(&[echo("image", "t"), step("stuck", ("x", "t"), ("y", "u")), digested("u", "digest")]);
    write("hangs", [face, &image, &digest, &hangs].concat());
    // One in another, whose answer is the digest of what three echoes in all give back.
    let nested = [step("echoes", ("x", "image"), ("y", "t")), step("chain", ("image", "t"), ("digest", "digest"))];
    write("nested", [face, &image, &digest, &graph(&nested)].concat());
    let echoes = [echo("x", "t"), echo("t", "y")];
    write("echoes", [face, &input, &same, &graph(&echoes)].concat());
    let versions = graph(&["echo", "echo_next"].map(|model| step(model, ("x", "x"), ("y", "y"))));
    let rolled_out = parameters(&[("selection", "canary"), ("weights", "1, 0")]);
    write("rolled_out", [face, &input, &same, &versions, &rolled_out].concat());
    let mirrored = parameters(&[("selection", "shadow")]);
    write("mirrored", [face, &input, &same, &versions, &mirrored].concat());
    write("circle", [face, &image, &digest, &graph(&[digested("digest", "digest")])].concat());
}

fn body(number: usize, timeout_ms: u64) -> (String, Value) {
    let data: Vec<u8> = (0..BYTES).map(|at| (at as u8).wrapping_mul(31) ^ number as u8).collect();
    let input = json!({ "name": "image", "datatype": "UINT8", "shape": [1, BYTES], "data": data });
    let body = json!({ "inputs": [input], "parameters": { "timeout": timeout_ms * 1000 } });
    (body.to_string(), json!(repository::emulated::digest(&data)))
}

fn infer(address: SocketAddr, model: &str, body: &str) -> (u16, Value) {
    exchange(address, "POST", &format!("/v2/models/{model}/infer"), body)
}

/// Who answers `rolled_out`, by either frontend.
fn who_answers(up: &Up, expected: &str) -> bool {
    let body = body(1, 30_000).0.replace("image", "x");
    up.http.iter().all(|address| {
        let (status, answer) = infer(*address, "rolled_out", &body);
        assert_eq!(status, 200, "{answer}");
        answer["parameters"]["members"] == expected
    })
}

fn a_version_is_rolled_out_and_back(up: &Up) {
    let load = |parameters: &Value| {
        let body = json!({ "parameters": parameters }).to_string();
        exchange(up.http[0], "POST", "/v2/repository/models/rolled_out/load", &body)
    };
    assert!(who_answers(up, "echo"), "what its configuration says");
    let (status, text) = load(&json!({ "weights": "0, 1" }));
    assert_eq!(status, 200, "{text}");
    eventually("the other version by both frontends", || who_answers(up, "echo_next"));
    for (wrong, expected) in [("1", "expected 2 numbers"), ("NaN, 1", "finite"), ("-1, 2", "none below 0")] {
        let (status, text) = load(&json!({ "weights": wrong }));
        assert!(status >= 400 && text["error"].as_str().unwrap().contains(expected), "{status} {text}");
    }
    let (status, text) = exchange(
        up.http[0],
        "POST",
        "/v2/repository/models/chain/load",
        &json!({ "parameters": { "weights": "1" } }).to_string(),
    );
    assert!(status == 400 && text["error"].as_str().unwrap().starts_with("weights: found chain, expected"), "{text}");
    assert!(who_answers(up, "echo_next"));
    let (status, text) = load(&json!({ "weights": "1, 0" }));
    assert_eq!(status, 200, "{text}");
    eventually("the first version by both frontends", || who_answers(up, "echo"));
}

fn a_shadow_is_compared(address: SocketAddr) {
    let body = body(1, 30_000).0.replace("image", "x");
    let (status, answer) = infer(address, "mirrored", &body);
    assert!(status == 200 && answer["parameters"]["members"] == "echo", "{answer}");
    let agreed = r#"downbeat_shadow_requests_total{member="echo_next",model="mirrored",outcome="agreed",version="1"}"#;
    eventually("an answer that agrees", || metric(address, agreed) == Some(1.0));
}

fn change(address: SocketAddr, model: &str, to: &str) -> u16 {
    exchange(address, "POST", &format!("/v2/repository/models/{model}/{to}"), "{}").0
}

fn is_told_ready(address: SocketAddr, model: &str) -> bool {
    exchange(address, "GET", &format!("/v2/models/{model}/ready"), "").0 == 200
}

/// The number behind a metric's name and labels.
fn metric(address: SocketAddr, name: &str) -> Option<f64> {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn ensembles_of_real_members() {
    let folder = tempfile::tempdir().unwrap();
    write_repository(folder.path());
    let up = Up::start(2, "", &[3, 3], &format!("repository = {:?}\n{EAGER}", folder.path()));
    let [first, second] = up.http[..] else { panic!("two frontends") };
    for name in ["chain", "diamond", "hangs", "echoes", "nested", "rolled_out", "mirrored"] {
        eventually("a ready ensemble", || up.http.iter().all(|address| is_told_ready(*address, name)));
    }

    answers_are_those_of_the_members(&up);
    a_version_is_rolled_out_and_back(&up);
    a_shadow_is_compared(first);
    programs_that_link_the_frontend_ask_them_too(&up, folder.path());
    let circle = exchange(first, "POST", "/v2/repository/index", "{}").1;
    let circle = circle.as_array().unwrap().iter().find(|model| model["name"] == "circle").unwrap().clone();
    assert!(circle["reason"].as_str().unwrap().contains("found a cycle among the steps 0 (digest)"), "{circle}");

    members_come_and_go((first, second));

    // What hangs is one step; others are asked again as soon as its GPU is known to hang.
    let (asked, _) = body(1, 700);
    let (status, text) = infer(first, "hangs", &asked);
    assert_eq!(status, 504, "{text}");
    let (asked, expected) = body(1, 30_000);
    let is_answered = || {
        let (status, answer) = infer(first, "chain", &asked);
        assert!(status != 200 || answer["outputs"][0]["data"] == expected, "{answer}");
        status == 200
    };
    eventually("an answer of other GPUs", is_answered);

    // A client that resets its connection leaves nothing behind.
    let stream = TcpStream::connect(first).unwrap();
    let (asked, _) = body(2, 60_000);
    let head = format!("POST /v2/models/hangs/infer HTTP/1.1\r\nhost: h\r\ncontent-length: {}\r\n\r\n", asked.len());
    (&stream).write_all(format!("{head}{asked}").as_bytes()).unwrap();
    let pending = || metric(first, "nv_inference_pending_request_count{model=\"hangs\",version=\"1\"}");
    eventually("a request under way", || pending() == Some(1.0));
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    drop(stream);
    eventually("its end", || pending() == Some(0.0) && metric(first, "downbeat_slots_in_use") == Some(0.0));
}

fn answers_are_those_of_the_members(up: &Up) {
    let inputs = || {
        (0..16u8).map(|number| {
            let data: Vec<u8> = (0..BYTES).map(|at| (at as u8).wrapping_mul(31) ^ number).collect();
            Input::new("image", DataType::Uint8, &[BYTES], &data, Some(AMPLE_MS), Expected::digest(&data))
        })
    };
    for (frontend, model, wire) in [
        (0, "chain", Wire::Http(Encoding::Binary)),
        (1, "chain", Wire::Grpc),
        (1, "diamond", Wire::Grpc),
        (0, "nested", Wire::Grpc),
    ] {
        let arrivals = Arrivals::poisson(50.0);
        let stream = Stream { model: model.into(), arrivals, slo_ms: AMPLE_MS, inputs: inputs().collect() };
        let tally = up.send_over(wire, frontend, 1.0, &stream);
        assert_accounted_for(&tally);
        assert_eq!(tally.served, tally.sent, "{model}: {tally:?}");
    }
}

fn programs_that_link_the_frontend_ask_them_too(up: &Up, repository: &Path) {
    let (scheduler, file) = &up.schedulers[0];
    let config = fs::read_to_string(file).unwrap();
    let secret = config.lines().find_map(|line| line.strip_prefix("secret = ")).unwrap().trim_matches('"');
    let client = ensembles::client::start(frontend::Config::new(*scheduler, secret, repository)).unwrap();
    eventually("a ready ensemble", || client.is_ready_blocking("chain") == Ok(true));
    let data: Vec<u8> = (0..BYTES as u8).collect();
    let ask = |model: &str, name: &str| {
        let input = frontend::InputTensor {
            name: name.to_owned(),
            datatype: DataType::Uint8,
            shape: vec![1, BYTES],
            data: data.clone().into(),
        };
        client.infer_blocking(frontend::Infer {
            model: model.to_owned(),
            version: None,
            inputs: vec![input],
            slo: None,
        })
    };
    let expected: Vec<u8> = repository::emulated::digest(&data).iter().flat_map(|word| word.to_le_bytes()).collect();
    for (model, name) in [("chain", "image"), ("digest", "x")] {
        let inferred = ask(model, name).unwrap();
        assert_eq!((&inferred.outputs[0].data[..], &inferred.outputs[0].shape[..]), (&expected[..], &[1, 2][..]));
    }
    let error = ask("chain", "x").unwrap_err().to_string();
    assert_eq!(error, "inputs[].name: found 'x', expected one of: image");
}

/// A member is unloaded by one frontend and loaded again while both ask its ensemble: each request ends once, rightly,
/// or says why.
fn members_come_and_go((first, second): (SocketAddr, SocketAddr)) {
    let reasons = ["unloaded", "no backend hosts", "was loaded anew"];
    let ask = |address: SocketAddr| {
        move || {
            let mut served = 0;
            for number in 0..60 {
                let (asked, expected) = body(number, 30_000);
                let (status, answer) = infer(address, "chain", &asked);
                match status {
                    200 => assert_eq!(answer["outputs"][0]["data"], expected),
                    503 => {
                        let error = answer["error"].as_str().unwrap();
                        assert!(reasons.iter().any(|reason| error.contains(reason)), "{error}");
                    }
                    other => panic!("{other}: {answer}"),
                }
                served += usize::from(status == 200);
            }
            served
        }
    };
    let asking: Vec<_> = [first, second, first, second].map(|address| thread::spawn(ask(address))).into();
    for _ in 0..3 {
        assert_eq!(change(first, "digest", "unload"), 200);
        eventually("an ensemble that is not ready", || [first, second].iter().all(|at| !is_told_ready(*at, "chain")));
        // Its member with it, as in Triton.
        assert_eq!(change(second, "chain", "load"), 200);
        eventually("one that is", || [first, second].iter().all(|at| is_told_ready(*at, "chain")));
    }
    let served: usize = asking.into_iter().map(|asking| asking.join().unwrap()).sum();
    assert!(served > 0);
    // All frontends agree on what has become of the ensemble itself.
    assert_eq!(change(first, "chain", "unload"), 200);
    eventually("an ensemble that is unloaded", || [first, second].iter().all(|at| !is_told_ready(*at, "chain")));
    assert!(is_told_ready(second, "diamond") && is_told_ready(second, "digest"));
    assert_eq!(change(second, "chain", "load"), 200);
    eventually("one that is loaded", || [first, second].iter().all(|at| is_told_ready(*at, "chain")));
    let (asked, expected) = body(9, 30_000);
    let (status, answer) = infer(first, "chain", &asked);
    assert_eq!((status, &answer["outputs"][0]["data"]), (200, &expected), "{answer}");
    // One that asks an ensemble needs it, and loads it.
    assert_eq!(change(first, "echoes", "unload"), 200);
    eventually("one that asks what is unloaded", || [first, second].iter().all(|at| !is_told_ready(*at, "nested")));
    let (status, answer) = infer(first, "nested", &asked);
    assert!(status == 503 && answer.to_string().contains("'echoes', which it asks, is unloaded"), "{status}: {answer}");
    assert_eq!(change(second, "nested", "load"), 200);
    eventually("one that is loaded with it", || [first, second].iter().all(|at| is_told_ready(*at, "nested")));
    let (status, answer) = infer(first, "nested", &asked);
    assert_eq!((status, &answer["outputs"][0]["data"]), (200, &expected), "{answer}");
}
