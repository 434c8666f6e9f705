//! REST: what clients are answered.

use super::*;

#[test]
fn health_and_metadata() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &get_of("/v2")).await;
        assert_eq!((heard.status, &heard.json()["extensions"][0]), (200, &json!("binary_tensor_data")));
        for probe in ["live", "ready"] {
            let heard = ask(&mut stream, &get_of(&format!("/v2/health/{probe}"))).await;
            assert_eq!((heard.status, heard.json()), (200, json!({ "live": true, "ready": true })));
        }
        for path in ["/v2/models/double", "/v2/models/double/versions/1"] {
            let metadata = ask(&mut stream, &get_of(path)).await.json();
            let expected = json!([{ "name": "x", "datatype": "UINT8", "shape": [-1, 4] }]);
            assert_eq!((&metadata["inputs"], &metadata["versions"]), (&expected, &json!(["1"])));
            let heard = ask(&mut stream, &get_of(&format!("{path}/ready"))).await;
            assert_eq!((heard.status, heard.json()), (200, json!({ "name": "double", "ready": true })));
        }
    });
}

#[test]
fn whatever_is_got_has_a_head() {
    with_server(limits(), async |address, _| {
        for path in
            ["/v2", "/v2/health/ready", "/v2/models/double", "/metrics", "/v2/models/none", "/v2/models/double/infer"]
        {
            let ask_for = async |method: &str| {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let request = format!("{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
                stream.write_all(request.as_bytes()).await.unwrap();
                let mut heard = String::new();
                stream.read_to_string(&mut heard).await.unwrap();
                let (head, body) = heard.split_once("\r\n\r\n").unwrap();
                let has_length = head.lines().any(|line| line.to_ascii_lowercase().starts_with("content-length: "));
                (head.lines().next().unwrap().to_owned(), has_length, body.len())
            };
            let (got, head) = (ask_for("GET").await, ask_for("HEAD").await);
            assert_eq!((&head.0, head.1, head.2), (&got.0, true, 0), "{path}");
            assert!(got.2 > 0, "{path}");
        }
    });
}

#[test]
fn what_is_optional_may_be_null() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let input = r#"{"name":"x","shape":[1,4],"datatype":"UINT8","parameters":null,"data":[1,2,3,4]}"#;
        for rest in [r#""id":null,"parameters":null,"outputs":null"#, r#""outputs":[{"name":"y","parameters":null}]"#] {
            let body = format!(r#"{{"inputs":[{input}],{rest}}}"#);
            let heard = ask(&mut stream, &post_of(INFER, "", body.as_bytes())).await;
            assert_eq!((heard.status, &heard.json()["outputs"][0]["data"]), (200, &json!([2, 4, 6, 8])), "{heard:?}");
        }
        for body in [r#"{"inputs":null}"#.to_owned(), format!(r#"{{"inputs":[{}]}}"#, input.replace("[1,4]", "null"))] {
            assert_eq!(ask(&mut stream, &post_of(INFER, "", body.as_bytes())).await.status, 400, "{body}");
        }
    });
}

#[test]
fn an_encoded_slash_is_part_of_a_name() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut stream, &get_of("/v2/models/d%6Fubl%65/ready")).await.status, 200);
        // Taken apart after decoding, this would be the route of infer requests.
        let heard = ask(&mut stream, &get_of("/v2/models/double%2Finfer")).await;
        assert_eq!(heard.status, 404);
        assert!(heard.json()["error"].as_str().unwrap().contains("'double/infer'"), "{heard:?}");
        let heard = ask(&mut stream, &get_of("/v2/models/double/infer")).await;
        assert_eq!((heard.status, heard.header("allow")), (405, Some("post")));
        let heard = ask(&mut stream, b"DELETE /v2/logging HTTP/1.1\r\nhost: h\r\n\r\n").await;
        assert_eq!((heard.status, heard.header("allow")), (405, Some("get, post")));
    });
}

#[test]
fn tensors_in_json_and_in_binary() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;
        let outputs = json!([{ "name": "y", "datatype": "UINT8", "shape": [1, 4], "data": [2, 4, 6, 8] }]);
        let expected = json!({ "id": "q", "model_name": "double", "model_version": "1", "outputs": outputs });
        assert_eq!(
            (heard.status, heard.json(), heard.header("content-type")),
            (200, expected, Some("application/json"))
        );
        let timing = heard.header("x-downbeat-timing").unwrap();
        assert!(timing.ends_with(";deadline=25000;batch=3;gpu=6:2"), "{timing}");

        let header = r#"{"parameters":{"binary_data_output":true},"inputs":[{"name":"x","shape":[2,4],
            "datatype":"UINT8","parameters":{"binary_data_size":8}}]}"#;
        let body = [header.as_bytes(), &[1, 2, 3, 4, 5, 6, 7, 200]].concat();
        let length = format!("Inference-Header-Content-Length: {}\r\n", header.len());
        let heard = ask(&mut stream, &post_of("/v2/models/double/versions/1/infer", &length, &body)).await;
        let header_length: usize = heard.header("inference-header-content-length").unwrap().parse().unwrap();
        let (header, binary) = heard.body.split_at(header_length);
        assert_eq!(binary, [2, 4, 6, 8, 10, 12, 14, 144]);
        let header: Value = serde_json::from_slice(header).unwrap();
        assert_eq!(header["outputs"][0]["parameters"]["binary_data_size"], 8);
    });
}

#[test]
fn a_body_can_be_nothing_but_the_one_input() {
    let request = |path: &str, body: &[u8]| post_of(path, "inference-header-content-length: 0\r\n", body);
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &request(INFER, &[1, 2, 3, 4])).await;
        let header_length: usize = heard.header("inference-header-content-length").unwrap().parse().unwrap();
        assert_eq!((heard.status, &heard.body[header_length..]), (200, &[2, 4, 6, 8][..]));
        let in_chunks = format!(
            "POST {INFER} HTTP/1.1\r\nhost: h\r\ninference-header-content-length: 0\r\n\
             transfer-encoding: chunked\r\n\r\n3\r\n\x01\x02\x03\r\n1\r\n\x04\r\n0\r\n\r\n"
        );
        assert_eq!(ask(&mut stream, in_chunks.as_bytes()).await.body, heard.body);
        let late = ask(&mut stream, &request(&format!("{INFER}?timeout=4999"), &[1, 2, 3, 4])).await;
        assert!(late.status == 400 && late.json()["error"].as_str().unwrap().contains("found 4.999 ms"), "{late:?}");
        let short = ask(&mut stream, &request(INFER, &[1, 2, 3])).await;
        assert!(
            short.status == 400 && short.json()["error"].as_str().unwrap().contains("Expected 4, got 3"),
            "{short:?}"
        );
        is_served(&mut stream).await;
    });
    let input = |name| tensor(name, DataType::Uint8, &[2]);
    let two = model("double", vec![input("a"), input("b")], vec![tensor("y", DataType::Uint8, &[4])]);
    with_model(two, open_gate(limits()), None, async |address, _| {
        let heard = ask(&mut TcpStream::connect(address).await.unwrap(), &request(INFER, &[1, 2, 3, 4])).await;
        let words = "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'double'";
        assert!(heard.status == 400 && heard.json()["error"].as_str().unwrap().starts_with(words), "{heard:?}");
    });
}

#[test]
fn only_inferences_are_compressed() {
    let long = "x".repeat(1500);
    let large =
        model("double", vec![tensor(&long, DataType::Uint8, &[512])], vec![tensor("y", DataType::Uint8, &[512])]);
    with_model(large, open_gate(limits()), None, async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let accept = "accept-encoding: gzip\r\n";
        let metadata = format!("GET /v2/models/double HTTP/1.1\r\nhost: h\r\n{accept}\r\n");
        let heard = ask(&mut stream, metadata.as_bytes()).await;
        assert_eq!((heard.status, heard.header("content-encoding")), (200, None));
        assert_eq!(heard.json()["inputs"][0]["name"], long);
        let infer = |rows: usize| {
            let input = json!({ "name": long, "shape": [rows, 512], "datatype": "UINT8", "data": vec![1; 512] });
            post_of(INFER, accept, json!({ "inputs": [input] }).to_string().as_bytes())
        };
        let heard = ask(&mut stream, &infer(2)).await;
        assert_eq!((heard.status, heard.header("content-encoding")), (400, None), "no client decodes an error");
        let heard = ask(&mut stream, &infer(1)).await;
        assert_eq!((heard.status, heard.header("content-encoding")), (200, Some("gzip")));
    });
}

#[test]
fn there_is_never_any_cuda_shared_memory() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &get_of("/v2/cudasharedmemory/status")).await;
        assert_eq!((heard.status, heard.json()), (200, json!([])));
        assert_eq!(ask(&mut stream, &get_of("/v2/cudasharedmemory/region/r/status")).await.status, 404);
        for path in ["/v2/cudasharedmemory/unregister", "/v2/cudasharedmemory/region/r/unregister"] {
            assert_eq!(ask(&mut stream, &post_of(path, "", b"")).await.status, 200);
        }
        let heard = ask(&mut stream, &post_of("/v2/cudasharedmemory/region/r/register", "", b"{}")).await;
        let expected = "failed to register shared memory region 'r': invalid args, GPUs not supported";
        assert_eq!((heard.status, &heard.json()["error"]), (400, &json!(expected)));
    });
}

#[test]
fn errors_have_their_status_and_the_connection_goes_on() {
    with_server(limits(), async |address, peer| {
        let infer = |body: &str| post_of(INFER, "", body.as_bytes());
        let length = "inference-header-content-length: 5000\r\n";
        let cases = [
            (get_of("/v1"), 404, "path: found '/v1'"),
            (
                get_of("/v2/models/triple"),
                404,
                "Request for unknown model: 'triple' is not found, expected one of: double",
            ),
            (
                get_of("/v2/models/double/versions/2/ready"),
                404,
                "Request for unknown model: 'double' version 2 is not found, expected one of: 1",
            ),
            (get_of(INFER), 405, "method: found GET, expected POST"),
            (post_of("/v2", "", b""), 405, "method: found POST, expected GET"),
            (infer(&GOOD.replace("[1,4]", "[1,5]")), 400, "inputs['x'].shape: found [1, 5]"),
            (infer(&GOOD.replace("UINT8", "INT8")), 400, "inputs['x'].datatype: found 'INT8', expected 'UINT8'"),
            (
                post_of("/v2/models/triple/infer", "", &[b' '; 4000]),
                404,
                "Request for unknown model: 'triple' is not found, expected one of: double",
            ),
            (infer(&GOOD[..30]), 400, "the request is not a JSON object of this protocol"),
            (infer(""), 400, "the request is not a JSON object of this protocol"),
            (
                post_of(INFER, "content-type: image/png\r\n", b"\x89PNG"),
                400,
                "Content-Type: found an image, expected application/json: model 'double' takes no pictures",
            ),
            (post_of(INFER, length, GOOD.as_bytes()), 400, "Inference-Header-Content-Length: found 5000"),
            (
                infer(&GOOD.replace(r#""id":"q""#, r#""parameters":{"timeout":4999}"#)),
                400,
                "parameters.timeout: found 4.999 ms, expected at least 5.000 ms",
            ),
        ];
        let mut stream = TcpStream::connect(address).await.unwrap();
        for (request, status, expected) in cases {
            let heard = ask(&mut stream, &request).await;
            let error = heard.json()["error"].as_str().unwrap().to_owned();
            assert!(heard.status == status && error.contains(expected), "{heard:?}: expected {status} {expected}");
            is_served(&mut stream).await;
        }
        let fates = [
            (Fate::Drop(DropReason::Deadline), 504, "its deadline could no longer be met"),
            (Fate::Drop(DropReason::QueueFull), 503, "the model's queue is full"),
            (Fate::Drop(DropReason::NoBackend), 503, "no backend hosts the model now"),
            (Fate::Answer(AnswerStatus::Failed, "out of memory"), 500, "out of memory"),
        ];
        for (fate, status, expected) in fates {
            peer.fates.borrow_mut().push_back(fate);
            let heard = ask(&mut stream, &infer(GOOD)).await;
            assert_eq!((heard.status, heard.header("retry-after").is_some()), (status, status == 503));
            assert!(heard.json()["error"].as_str().unwrap().contains(expected), "{heard:?}");
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_client_that_resets_its_connection_cancels_its_task() {
    with_server(limits(), async |address, peer| {
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        while peer.kept.borrow().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 1);
        stream.set_zero_linger().unwrap();
        drop(stream);
        while peer.cancelled.get() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_full_arena_refuses_at_once_and_serves_again() {
    with_server(Limits { connections_max: 1000, ..limits() }, async |address, peer| {
        let rows = r#"{"inputs":[{"name":"x","shape":[8,4],"datatype":"UINT8","data":[RR]}]}"#
            .replace("RR", &vec!["1"; 32].join(","));
        let mut held = Vec::new();
        let refused = loop {
            peer.fates.borrow_mut().extend([Fate::Keep; 8]);
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&post_of(INFER, "", rows.as_bytes())).await.unwrap();
            let before = peer.kept.borrow().len();
            tokio::select! {
                heard = hear(&mut stream) => break heard.unwrap(),
                () = async { while peer.kept.borrow().len() == before { tokio::task::yield_now().await } } => {}
            }
            held.push(stream);
        };
        assert!(!held.is_empty());
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
        assert!(refused.json()["error"].as_str().unwrap().contains("raise arena_bytes"), "{refused:?}");
        peer.fates.borrow_mut().clear();
        let kept = std::mem::take(&mut *peer.kept.borrow_mut());
        kept.into_iter()
            .for_each(|task| peer.tell(&SchedulerToFrontend::Dropped { task, reason: DropReason::Deadline }));
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
    });
}

#[test]
fn extensions_answer_as_tritons() {
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        is_served(&mut stream).await;
        let config = ask(&mut stream, &get_of("/v2/models/double/config")).await.json();
        let input = &config["input"][0];
        assert_eq!(
            (&input["name"], &input["data_type"], &input["dims"], &input["format"], &config["max_batch_size"]),
            (&json!("x"), &json!("TYPE_UINT8"), &json!([4]), &json!("FORMAT_NONE"), &json!(8))
        );
        for path in ["/v2/models/stats", "/v2/models/double/stats", "/v2/models/double/versions/1/stats"] {
            let stats = ask(&mut stream, &get_of(path)).await.json();
            let stats = &stats["model_stats"][0];
            assert_eq!((&stats["inference_count"], &stats["execution_count"]), (&json!(1), &json!(1)), "{path}");
            assert_eq!(stats["inference_stats"]["success"]["count"], 1);
            assert_eq!(stats["batch_stats"][0]["batch_size"], 3);
        }
        let index = ask(&mut stream, &post_of("/v2/repository/index", "", b"{\"ready\":true}")).await.json();
        assert_eq!(index, json!([{ "name": "double", "version": "1", "state": "READY", "reason": "" }]));
        let index = ask(&mut stream, &post_of("/v2/repository/index", "", b"{}")).await.json();
        let reason = "broken/config.pbtxt: dims: found 0";
        let broken = json!({ "name": "broken", "version": "", "state": "UNAVAILABLE", "reason": reason });
        assert_eq!((index.as_array().map(Vec::len), &index[0]), (Some(2), &broken));
        let changed = ask(&mut stream, &post_of("/v2/logging", "", b"{\"log_verbose_level\":1}")).await.json();
        assert_eq!(changed["log_verbose_level"], 1);
        assert_eq!(ask(&mut stream, &get_of("/v2/logging")).await.json(), changed);
        let trace = b"{\"trace_rate\":\"7\"}";
        assert_eq!(ask(&mut stream, &post_of("/v2/trace/setting", "", trace)).await.json()["trace_rate"], "7");
        assert_eq!(ask(&mut stream, &get_of("/v2/models/double/trace/setting")).await.json()["trace_rate"], "7");
        for (request, status) in [
            (get_of("/v2/models/triple/config"), 404),
            (get_of("/v2/models/broken/config"), 404),
            (get_of("/v2/models/double/versions/2/stats"), 404),
            (get_of("/v2/systemsharedmemory/region/none/status"), 404),
            (post_of("/v2/systemsharedmemory/region/r/register", "", b"{\"key\":\"/a/b\",\"byte_size\":1}"), 400),
            (post_of("/v2/systemsharedmemory/region/r/register", "", b"[]"), 400),
            (post_of("/v2/logging", "", b"{\"log_info\":7}"), 400),
            (post_of("/v2/models/stats", "", b""), 405),
            (get_of("/v2/repository/index"), 405),
        ] {
            let heard = ask(&mut stream, &request).await;
            assert_eq!((heard.status, heard.json()["error"].is_string()), (status, true), "{heard:?}");
            assert_eq!(heard.header("allow").is_some(), status == 405);
            is_served(&mut stream).await;
        }
    });
}

#[test]
fn metrics_count_what_happened_and_single_requests_are_explained() {
    with_server(limits(), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;
        let number = heard.header("x-downbeat-request").unwrap().to_owned();
        peer.fates.borrow_mut().push_back(Fate::Drop(DropReason::Deadline));
        ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;

        let metrics = ask(&mut stream, &get_of("/metrics")).await;
        assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
        let text = String::from_utf8(metrics.body).unwrap();
        let label = r#"model="double",version="1""#;
        for expected in [
            format!("nv_inference_request_success{{{label}}} 1"),
            format!("nv_inference_count{{{label}}} 1"),
            format!("nv_inference_exec_count{{{label}}} 1"),
            format!("nv_inference_pending_request_count{{{label}}} 0"),
            r#"nv_inference_request_failure{model="double",reason="REJECTED",version="1"} 1"#.to_owned(),
            r#"nv_inference_request_failure{model="double",reason="BACKEND",version="1"} 0"#.to_owned(),
            r#"downbeat_dropped_total{model="double",reason="deadline",version="1"} 1"#.to_owned(),
            format!("downbeat_request_seconds_count{{{label}}} 1"),
            r#"downbeat_stage_seconds_count{stage="execute"} 1"#.to_owned(),
            r#"downbeat_stage_seconds_count{stage="receive"} 2"#.to_owned(),
            "downbeat_slots_in_use 0".to_owned(),
            "downbeat_backends_linked 1".to_owned(),
            "downbeat_scheduler_connected 1".to_owned(),
            "downbeat_scheduler_tasks_queued 3".to_owned(),
            "downbeat_scheduler_batches_in_flight 2".to_owned(),
            "downbeat_scheduler_gpus 1".to_owned(),
            "downbeat_scheduler_members 3".to_owned(),
            "downbeat_scheduler_members_obeying 2".to_owned(),
            "downbeat_scheduler_settled_seconds 0.0045".to_owned(),
            r#"downbeat_predicted_actions_total{action="infer"} 9"#.to_owned(),
            r#"downbeat_prediction_error_seconds_bucket{action="infer",of="duration",side="under",le="0.000016"} 2"#
                .to_owned(),
            r#"downbeat_prediction_error_seconds_bucket{action="infer",of="duration",side="under",le="0.000192"} 6"#
                .to_owned(),
            r#"downbeat_prediction_error_seconds_count{action="infer",of="duration",side="under"} 7"#.to_owned(),
            r#"downbeat_prediction_error_seconds_sum{action="infer",of="duration",side="under"} 0.005"#.to_owned(),
            r#"downbeat_prediction_error_seconds_count{action="infer",of="completion",side="over"} 0"#.to_owned(),
            r#"downbeat_network_budget_seconds{model="double",part="ctrl",version="1"} 0.0003"#.to_owned(),
            r#"downbeat_network_budget_seconds{model="double",part="resp",version="1"} 0.002"#.to_owned(),
        ] {
            assert!(text.lines().any(|line| line == expected), "no `{expected}` in\n{text}");
        }

        let of_model = ask(&mut stream, &get_of("/metrics?model=double")).await;
        let text = String::from_utf8(of_model.body).unwrap();
        let expected = r#"downbeat_stage_seconds_count{model="double",stage="execute",version="1"} 1"#;
        assert!(text.lines().any(|line| line == expected), "no `{expected}` in\n{text}");
        assert_eq!(ask(&mut stream, &get_of("/metrics?model=triple")).await.status, 404);

        let explained = ask(&mut stream, &get_of(&format!("/debug/requests/{number}"))).await.json();
        assert_eq!((&explained["outcome"], &explained["id"]), (&json!("answered"), &json!("q")));
        assert_eq!(explained["batch"], json!({ "size": 3, "backend": 6, "gpu": 2 }));
        let by_id = ask(&mut stream, &get_of("/debug/requests/q")).await.json();
        assert_eq!(
            by_id["outcome"], "dropped: Request timeout expired: its deadline could no longer be met",
            "the last one with that id"
        );
        let unknown = ask(&mut stream, &get_of("/debug/requests/99")).await;
        assert_eq!(unknown.status, 404);
    });
}

#[test]
fn models_are_unloaded_and_loaded() {
    with_server(limits(), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let change = |model: &str, to: &str| post_of(&format!("/v2/repository/models/{model}/{to}"), "", b"");
        let index = post_of("/v2/repository/index", "", b"");
        assert_eq!(ask(&mut stream, &change("double", "unload")).await.status, 200);
        let heard = ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;
        let error = "Request for unknown model: 'double' has no available versions, as it was unloaded";
        assert_eq!((heard.status, &heard.json()["error"]), (503, &json!(error)));
        assert_eq!(ask(&mut stream, &get_of("/v2/models/double/ready")).await.status, 503);
        let unloaded = json!({ "name": "double", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded" });
        assert_eq!(ask(&mut stream, &index).await.json()[1], unloaded);

        let dependents = br#"{"parameters":{"unload_dependents":true}}"#;
        let again = post_of("/v2/repository/models/double/unload", "", dependents);
        assert_eq!(ask(&mut stream, &again).await.status, 200);
        let long = format!("failed to load 'double', parameter config: {}", "7".repeat(900));
        let seven = format!(r#""config":"{}""#, "7".repeat(900));
        let too_long = format!(r#""config":"{}""#, "7".repeat(12_289));
        let files =
            "failed to load 'double', failed to poll from model repository: parameters: found file:1/model.onnx";
        for (status, given, expected) in [
            (500, &seven[..], &long[..]),
            (400, &too_long, "config: found 12289 bytes, expected at most 12288"),
            (400, r#""config":{}"#, "config: found something else, expected a text: a model's configuration in JSON"),
            (500, r#""file:1/model.onnx":"aa""#, files),
            (400, r#""force":true"#, "parameters: found force, expected config"),
        ] {
            let body = format!(r#"{{"parameters":{{{given}}}}}"#);
            let heard = ask(&mut stream, &post_of("/v2/repository/models/double/load", "", body.as_bytes())).await;
            let heard = (heard.status, heard.json()["error"].as_str().unwrap().to_owned());
            assert!(heard.0 == status && heard.1.starts_with(expected), "{given}: {heard:?}");
        }
        let why = |reason: Option<&str>| {
            let (name, version, reason) = ("double".to_owned(), String::new(), reason.map(str::to_owned));
            peer.tell(&SchedulerToFrontend::NotLoaded { name, version, reason });
        };
        why(Some("backend 3: model.onnx: it is torn"));
        let torn = json!("backend 3: model.onnx: it is torn");
        while ask(&mut stream, &index).await.json()[1]["reason"] != torn {}
        why(None);
        while ask(&mut stream, &index).await.json()[1]["reason"] != "unloaded" {}

        let heard = ask(&mut stream, &change("triple", "load")).await;
        let error = "failed to load 'triple', there is no such folder";
        assert_eq!((heard.status, &heard.json()["error"]), (500, &json!(error)));

        assert_eq!(ask(&mut stream, &change("double", "load")).await.status, 200);
        let ready = json!({ "name": "double", "version": "1", "state": "READY", "reason": "" });
        assert_eq!(ask(&mut stream, &index).await.json()[1], ready);
        is_served(&mut stream).await;
        assert_eq!(ask(&mut stream, &get_of("/v2/repository/models/double/load")).await.status, 405);
    });
}
