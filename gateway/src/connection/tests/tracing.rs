//! Spans at a collector: those of sampled requests and no others; and what a collector cannot do to requests.

use hyper_util::rt::TokioExecutor;

use prost::Message as _;

use super::{
    grpc::{connect, double, finish, framed, head},
    *,
};
use crate::config::Otlp;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn otlp(address: SocketAddr, trace_rate: u32) -> Otlp {
    let endpoint = format!("http://{address}");
    Otlp { endpoint, authority: None, trace_rate, queue_max: 4, timeout_ms: 60_000 }
}

fn traced(flags: &str) -> Vec<u8> {
    post_of(INFER, &format!("traceparent: 00-{TRACE}-00f067aa0ba902b7-{flags}\r\n"), GOOD.as_bytes())
}

/// What `/metrics` says became of so many traces.
fn traces(peer: &Peer, outcome: &str) -> u64 {
    let text = peer.server.service.record.read_metrics(&peer.desk).text();
    let line = format!("downbeat_traces_total{{outcome=\"{outcome}\"}} ");
    text.lines().find_map(|found| found.strip_prefix(&line)).expect("a counter of the outcome").parse().unwrap()
}

/// Takes requests to export in until they brought so many spans of whole requests; all spans, in order.
async fn collect(listener: &TcpListener, requests: usize) -> Vec<Value> {
    let mut spans: Vec<Value> = Vec::new();
    while spans.iter().filter(|span| span["kind"] == 2).count() < requests {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut bytes = Vec::new();
        // A request and a response have the same frame.
        let (head, length) = loop {
            assert_ne!(stream.read_buf(&mut bytes).await.unwrap(), 0, "a request is cut off");
            let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            break (end + 4, length.parse::<usize>().unwrap());
        };
        assert!(bytes.starts_with(b"POST /v1/traces HTTP/1.1\r\n"));
        while bytes.len() < head + length {
            assert_ne!(stream.read_buf(&mut bytes).await.unwrap(), 0, "a request is cut off");
        }
        let body: Value = serde_json::from_slice(&bytes[head..]).unwrap();
        spans.extend(body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().iter().cloned());
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    }
    spans
}

fn listen() -> (std::net::TcpListener, SocketAddr) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[test]
fn a_collector_gets_sampled_requests_with_their_stages_and_no_others() {
    let (listener, collector) = listen();
    with_collector(Some(otlp(collector, 2)), async |address, peer| {
        let listener = TcpListener::from_std(listener).unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut stream, &traced("00")).await.status, 200);
        assert_eq!(ask(&mut stream, &traced("01")).await.status, 200);
        // Without a caller's word, every second one, and that is dropped.
        is_served(&mut stream).await;
        peer.fates.borrow_mut().push_back(Fate::Drop(DropReason::Deadline));
        assert_eq!(ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await.status, 504);

        let spans = collect(&listener, 2).await;
        let (of_caller, own): (Vec<_>, Vec<_>) = spans.iter().partition(|span| span["traceId"] == TRACE);
        let names: Vec<&str> = of_caller.iter().map(|span| span["name"].as_str().unwrap()).collect();
        let stages = ["receive", "submit", "defer", "queue", "grant", "fetch", "wait", "execute", "push", "reply"];
        assert_eq!((names[0], &names[1..]), ("infer double", &stages[..]));
        assert_eq!(of_caller[0]["parentSpanId"], "00f067aa0ba902b7");
        assert!(of_caller[1..].iter().all(|span| span["parentSpanId"] == of_caller[0]["spanId"]));
        let attribute = |span: &Value, key: &str| {
            let all = span["attributes"].as_array().unwrap().clone();
            all.into_iter().find(|attribute| attribute["key"] == key).map(|attribute| attribute["value"].clone())
        };
        assert_eq!(attribute(of_caller[0], "downbeat.batch_size"), Some(json!({ "intValue": "3" })));
        assert_eq!(attribute(of_caller[0], "downbeat.gpu"), Some(json!({ "intValue": "2" })));
        assert_eq!((own[0]["name"].as_str(), own[0].get("parentSpanId")), (Some("infer double"), None));
        assert_eq!(attribute(own[0], "downbeat.drop_reason"), Some(json!({ "stringValue": "deadline" })));
        assert_eq!(own[0]["status"]["code"], 2);
        while traces(&peer, "exported") < 2 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn calls_of_grpc_carry_the_trace_in_their_metadata() {
    let (listener, collector) = listen();
    with_collector(Some(otlp(collector, 0)), async |address, _| {
        let listener = TcpListener::from_std(listener).unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (mut client, connection) = handshake.await.unwrap();
        tokio::task::spawn_local(async move { connection.await.is_ok() });
        let request = Request::post("http://h/inference.GRPCInferenceService/ModelInfer")
            .header("content-type", "application/grpc")
            .header("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-01"))
            .body(Full::new(Bytes::from_static(&[0, 0, 0, 0, 0])))
            .unwrap();
        // A message without anything in it names no model.
        assert_eq!(client.send_request(request).await.unwrap().headers()["grpc-status"], "5");
        let spans = collect(&listener, 1).await;
        assert_eq!((&spans[0]["traceId"], &spans[0]["status"]["code"]), (&json!(TRACE), &json!(2)));
    });
}

/// Waits until some of a body has come in.
async fn is_coming(peer: &Peer) {
    while peer.server.bodies_bytes() == 0 {
        tokio::task::yield_now().await;
    }
    peer.clock.set(peer.clock.get() + Span::from_millis(7));
}

/// Each has had the first of its body 7 ms before the last. Calls of gRPC were not told in metrics, and messages of
/// streams nowhere.
#[test]
fn how_long_a_request_came_in_is_told_of_every_wire_in_metrics_traces_and_by_request() {
    let (listener, collector) = listen();
    with_collector(Some(otlp(collector, 1)), async |address, peer| {
        let listener = TcpListener::from_std(listener).unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = post_of(INFER, "", GOOD.as_bytes());
        let (first, last) = request.split_at(request.len() - 9);
        stream.write_all(first).await.unwrap();
        is_coming(&peer).await;
        assert_eq!(ask(&mut stream, last).await.status, 200);

        let mut client = connect(address).await;
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        for method in ["ModelInfer", "ModelStreamInfer"] {
            let (response, mut call) = client.send_request(head(method).body(()).unwrap(), false).unwrap();
            call.send_data(message.slice(..9), false).unwrap();
            is_coming(&peer).await;
            call.send_data(message.slice(9..), true).unwrap();
            let (status, text, messages) = finish(response.await.unwrap()).await;
            assert_eq!((status, messages.len()), (0, 1), "{method}: {text}");
        }

        let metrics = peer.server.service.record.read_metrics(&peer.desk).text();
        for (what, told) in [("count", "3"), ("sum", "0.021")] {
            let line = format!("downbeat_stage_seconds_{what}{{stage=\"receive\"}} {told}");
            assert!(metrics.lines().any(|found| found == line), "no `{line}` in\n{metrics}");
        }
        let spans = collect(&listener, 3).await;
        let ns = |span: &Value, at: &str| span[at].as_str().unwrap().parse::<i64>().unwrap();
        let received = spans.iter().filter(|span| span["name"] == "receive");
        let took = received.map(|span| ns(span, "endTimeUnixNano") - ns(span, "startTimeUnixNano"));
        assert_eq!(took.collect::<Vec<_>>(), [7_000_000; 3]);
        for number in 1..=3 {
            let explained = ask(&mut stream, &get_of(&format!("/debug/requests/{number}"))).await.json();
            let at = &explained["microseconds_since_admission"];
            assert_eq!((&at["arrived"], &at["received"]), (&json!(-7000.0), &json!(0.0)), "{explained}");
        }
    });
}

#[test]
fn a_collector_that_is_busy_is_asked_again_and_one_that_refuses_is_not() {
    for (answers, outcome) in
        [(&["503 Busy", "429 Busy", "200 OK"][..], "exported"), (&["400 Bad"], "collector_failed")]
    {
        let (listener, collector) = listen();
        with_collector(Some(otlp(collector, 0)), async |address, peer| {
            let listener = TcpListener::from_std(listener).unwrap();
            let mut stream = TcpStream::connect(address).await.unwrap();
            assert_eq!(ask(&mut stream, &traced("01")).await.status, 200);
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                assert_ne!(stream.read(&mut [0; 1 << 16]).await.unwrap(), 0);
                let answer = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            while traces(&peer, outcome) < 1 {
                tokio::task::yield_now().await;
            }
        });
    }
}

#[test]
fn a_collector_that_is_gone_or_silent_costs_traces_and_nothing_else() {
    let (gone, nowhere) = listen();
    drop(gone);
    // Never accepts: the kernel does, and nobody answers.
    let (_silent, silence) = listen();
    for (collector, timeout_ms) in [(nowhere, 60_000), (silence, 20)] {
        with_collector(Some(Otlp { timeout_ms, ..otlp(collector, 0) }), async |address, peer| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            for _ in 0..40 {
                assert_eq!(ask(&mut stream, &traced("01")).await.status, 200);
            }
            while traces(&peer, "queue_full") + traces(&peer, "collector_failed") < 40 {
                tokio::task::yield_now().await;
            }
            assert_eq!(traces(&peer, "exported"), 0);
            assert_eq!(peer.desk.with_core(Core::outstanding), 0);
        });
    }
}
