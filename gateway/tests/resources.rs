//! What one client can make the gateway hold: memory at its peak, for what was sent. Alone in its process, whose
//! allocations it counts. The server is real and so are its sockets; it never finds a scheduler, so that all that is
//! measured is taking requests apart.
#![allow(clippy::disallowed_methods)] // Waits for another thread.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use flate2::{Compression, write::GzEncoder};
use gateway::{
    Config, Gateway,
    api::{ModelInferRequest, model_infer_request::InferInputTensor},
};
use h2::client::SendRequest;
use prost::Message as _;
use serde_json::Value;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts the bytes that the process holds.
struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `pointer` came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of one body, and of what all may hold: smaller than the defaults, so that the tests are quick.
const BODY_BYTES_MAX: usize = 4 << 20;
const BODIES_BYTES_MAX: usize = 16 << 20;
/// What is held may exceed what is charged for it by so much: lists grow by doubling, and what is small is not charged.
const UNCHARGED_TIMES: usize = 2;
/// Buffers of connections and threads, of both ends.
const BUFFERS_BYTES: usize = 24 << 20;
/// Clients at once, all of the same address.
const CLIENTS: usize = 24;

const NUMBERS: &str = r#"
    backend: "emulated"
    max_batch_size: 64
    input { name: "x" data_type: TYPE_FP64 dims: [ 10000 ] }
    output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
    parameters { key: "slo_ms" value { string_value: "20" } }
    parameters { key: "alpha_ms" value { string_value: "1" } }
    parameters { key: "beta_ms" value { string_value: "1" } }
"#;

const PICTURES: &str = r#"
    backend: "emulated"
    max_batch_size: 8
    input { name: "x" data_type: TYPE_UINT8 dims: [ 32, 32, 3 ] }
    output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
    parameters { key: "slo_ms" value { string_value: "20" } }
    parameters { key: "alpha_ms" value { string_value: "1" } }
    parameters { key: "beta_ms" value { string_value: "1" } }
    parameters { key: "image" value { string_value: "{ color = 'rgb', layout = 'hwc' }" } }
"#;

/// A server that all tests share, one after another.
fn server() -> (SocketAddr, impl Drop) {
    static SERVER: OnceLock<SocketAddr> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let address = *SERVER.get_or_init(|| {
        let (tell, told) = crossbeam_channel::bounded(1);
        thread::spawn(move || {
            let repository = tempfile::tempdir().unwrap();
            for (name, config) in [("numbers", NUMBERS), ("pictures", PICTURES)] {
                fs::create_dir_all(repository.path().join(name).join("1")).unwrap();
                fs::write(repository.path().join(name).join("config.pbtxt"), config).unwrap();
            }
            let [nobody, any] = ["127.0.0.1:1", "127.0.0.1:0"].map(|address| address.parse().unwrap());
            let config = Config {
                http: Some(any),
                body_bytes_max: BODY_BYTES_MAX,
                bodies_bytes_max: BODIES_BYTES_MAX,
                arena_bytes: Some(64 << 20),
                body_timeout_ms: 60_000,
                load_files: Some(repository.path().join(".loaded")),
                ..Config::new(nobody, "a secret of enough bytes", repository.path())
            };
            let gateway = Gateway::open(&config, None).unwrap();
            tell.send(gateway.http_address().unwrap()).unwrap();
            gateway.run(std::future::pending()).unwrap();
        });
        told.recv().unwrap()
    });
    (address, alone)
}

/// The most that was held at once during `attack`, beyond what was held before.
fn peak_of(attack: impl FnOnce()) -> usize {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    attack();
    PEAK.load(Relaxed) - before
}

fn post(address: SocketAddr, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n");
    // Who is refused early may not read on.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text).into_owned();
    (text.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0), text)
}

fn infer(address: SocketAddr, model: &str, headers: &str, body: &[u8]) -> (u16, String) {
    let headers = format!("content-length: {}\r\n{headers}", body.len());
    post(address, &format!("/v2/models/{model}/infer"), &headers, body)
}

fn at_once(clients: usize, attack: impl Fn() + Sync) {
    thread::scope(|scope| (0..clients).for_each(|_| drop(scope.spawn(&attack))));
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Whether one more client is served as far as that is possible without a scheduler.
fn assert_served(address: SocketAddr) {
    let json =
        format!(r#"{{"inputs":[{{"name":"x","shape":[1,10000],"datatype":"FP64","data":[{}1]}}]}}"#, "1,".repeat(9999));
    let (status, text) = infer(address, "numbers", "", json.as_bytes());
    assert!(status == 503 && text.contains("the frontend has no scheduler now"), "{text}");
}

const CHARGED: usize = UNCHARGED_TIMES * BODIES_BYTES_MAX + BUFFERS_BYTES;

/// Pieces of 20 bytes, as HTTP/1.1 yields them: nearly as many as a body may have.
fn in_small_chunks(bytes: &[u8]) -> Vec<u8> {
    let chunk = |bytes: &[u8]| [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
    bytes.chunks(20).flat_map(chunk).chain(*b"0\r\n\r\n").collect()
}

#[test]
fn a_body_in_small_chunks_holds_little_more_than_its_bytes() {
    let (address, _alone) = server();
    let body = in_small_chunks(&[b' '; 1_000_000]);
    let mut said = String::new();
    let peak = peak_of(|| said = post(address, "/v2/models/numbers/infer", "transfer-encoding: chunked\r\n", &body).1);
    assert!(said.starts_with("HTTP/1.1 400"), "{said}");
    assert!(peak < 5 * 1_000_000, "{peak} bytes at once");
    assert_served(address);
}

/// Its steps are counted where they are made (`frontend::rope`, `protocol`); here the whole way is gone.
#[test]
fn a_thousand_empty_inputs_in_small_chunks_are_refused() {
    let (address, _alone) = server();
    let input = r#"{"name":"x","shape":[1,10000],"datatype":"FP64","parameters":{"binary_data_size":0}}"#;
    let json = format!(r#"{{"inputs":[{}]}}"#, vec![input; 1000].join(","));
    let body = in_small_chunks(&[json.as_bytes(), &[0; 1_000_000]].concat());
    let headers = format!("transfer-encoding: chunked\r\ninference-header-content-length: {}\r\n", json.len());
    let mut said = String::new();
    let peak = peak_of(|| said = post(address, "/v2/models/numbers/infer", &headers, &body).1);
    assert!(said.contains("inputs: found more than the model's 1"), "{said}");
    assert!(peak < 5 * 1_000_000, "{peak} bytes at once");
}

#[test]
fn long_ids_are_refused_and_not_kept() {
    let (address, _alone) = server();
    let json = format!(r#"{{"id":"{}","inputs":[]}}"#, "i".repeat(BODY_BYTES_MAX - 100));
    let body = gzip(json.as_bytes());
    let before = HELD.load(Relaxed);
    let peak = peak_of(|| {
        for _ in 0..40 {
            let (status, text) = infer(address, "numbers", "content-encoding: gzip\r\n", &body);
            let expected = format!("id: found {} bytes, expected at most 256", BODY_BYTES_MAX - 100);
            assert!(status == 400 && text.contains(&expected), "{text}");
        }
    });
    assert!(peak < 5 * BODY_BYTES_MAX, "{peak} bytes at once");
    let kept = HELD.load(Relaxed).saturating_sub(before);
    assert!(kept < 1 << 20, "{kept} bytes are kept");
}

#[test]
fn compressed_bodies_of_many_hold_no_more_than_is_charged() {
    let (address, _alone) = server();
    let body = gzip(&vec![b' '; BODY_BYTES_MAX]);
    let peak = peak_of(|| {
        at_once(CLIENTS, || {
            let (status, text) = infer(address, "numbers", "content-encoding: gzip\r\n", &body);
            assert!([400, 429, 503].contains(&status), "{text}");
        });
    });
    assert!(peak < CHARGED, "{peak} bytes at once, {} for each on the wire", peak / body.len() / CLIENTS);
    assert_served(address);
}

#[test]
fn json_objects_that_mean_nothing_take_no_memory() {
    let (address, _alone) = server();
    let objects = format!("[{}{{}}]", "{},".repeat((BODY_BYTES_MAX - 200) / 3));
    for json in [
        format!(r#"{{"parameters":{{"mine":{objects}}},"inputs":[]}}"#),
        format!(r#"{{"parameters":{{"timeout":{objects}}},"inputs":[]}}"#),
        format!(r#"{{"inputs":{objects}}}"#),
        format!(r#"{{"inputs":[],"outputs":{objects}}}"#),
        "[".repeat(BODY_BYTES_MAX),
    ] {
        let body = gzip(json.as_bytes());
        let peak = peak_of(|| {
            let (status, text) = infer(address, "numbers", "content-encoding: gzip\r\n", &body);
            assert!(status == 400 || text.contains("no scheduler"), "{text}");
        });
        assert!(peak < 6 * BODY_BYTES_MAX, "{peak} bytes at once for {}", &json[..60]);
    }
}

#[test]
fn objects_of_other_routes_are_small() {
    let (address, _alone) = server();
    let body = format!(r#"{{"ready":[{}{{}}]}}"#, "{},".repeat(1_000_000 / 3));
    for path in ["/v2/repository/index", "/v2/logging", "/v2/repository/models/numbers/unload"] {
        let mut said = (0, String::new());
        let headers = format!("content-length: {}\r\n", body.len());
        let peak = peak_of(|| said = post(address, path, &headers, body.as_bytes()));
        assert!([0, 413].contains(&said.0), "{}", said.1);
        assert!(peak < 5_000_000, "{peak} bytes at once");
    }
}

#[test]
fn large_json_of_many_holds_no_more_than_is_charged() {
    let (address, _alone) = server();
    let rows = 64;
    let numbers = "1,".repeat(rows * 10_000 - 1);
    let json = format!(r#"{{"inputs":[{{"name":"x","shape":[{rows},10000],"datatype":"FP64","data":[{numbers}1]}}]}}"#);
    let peak = peak_of(|| {
        at_once(CLIENTS, || {
            let (status, text) = infer(address, "numbers", "", json.as_bytes());
            // Who is refused while it sends may not hear why.
            assert!([0, 429, 503].contains(&status), "{text}");
        });
    });
    assert!(peak < CHARGED, "{peak} bytes at once");
    assert_served(address);
}

#[test]
fn files_of_many_hold_no_more_than_is_charged() {
    let (address, _alone) = server();
    let load = |body: &str| {
        let headers = format!("content-length: {}\r\n", body.len());
        post(address, "/v2/repository/models/numbers/load", &headers, body.as_bytes())
    };
    // The slashes are escaped, so that no text is as it came.
    let file = r"ab\/c".repeat(BODY_BYTES_MAX / 5 - 100);
    let body = format!(r#"{{"parameters":{{"config":"{{}}","file:1/model.onnx":"{file}"}}}}"#);
    let peak = peak_of(|| {
        at_once(CLIENTS, || {
            let (status, text) = load(&body);
            assert!([0, 429, 503].contains(&status), "{text}");
        });
    });
    assert!(peak < CHARGED, "{peak} bytes at once");
    // What is no parameter is passed over, and a thousandth file is one too many.
    let nothing = format!(r#"{{"nothing":[{}{{}}]}}"#, "{},".repeat(1_000_000));
    let many: String = (0..200_000).map(|number| format!(r#""file:1/{number}":"","#)).collect();
    for (body, expected) in [(nothing, 503), (format!(r#"{{"parameters":{{{many}"config":"{{}}"}}}}"#), 400)] {
        let mut said = (0, String::new());
        let peak = peak_of(|| said = load(&body));
        assert_eq!(said.0, expected, "{}", said.1);
        assert!(peak < 6 * BODY_BYTES_MAX, "{peak} bytes at once");
    }
    assert_served(address);
}

async fn call(client: &mut SendRequest<bytes::Bytes>, is_compressed: bool, message: &[u8]) -> (u16, String) {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = [&[u8::from(is_compressed)], &length[..], message].concat();
    let request = hyper::Request::post("http://h/inference.GRPCInferenceService/ModelInfer")
        .header("content-type", "application/grpc")
        .header("grpc-encoding", "gzip");
    std::future::poll_fn(|context| client.poll_ready(context)).await.unwrap();
    let (response, mut stream) = client.send_request(request.body(()).unwrap(), false).unwrap();
    stream.send_data(body.into(), true).unwrap();
    let (head, mut body) = response.await.unwrap().into_parts();
    while body.data().await.is_some() {}
    let trailers = body.trailers().await.unwrap().unwrap_or(head.headers);
    let text = |name: &str| trailers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    let message = percent_encoding::percent_decode_str(&text("grpc-message")).decode_utf8_lossy().into_owned();
    (text("grpc-status").parse().unwrap(), message)
}

/// Calls of as many clients at once, each on a connection of its own; what each was answered.
fn calls(address: SocketAddr, clients: usize, is_compressed: bool, message: &[u8]) -> Vec<(u16, String)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let mut open = tokio::task::JoinSet::new();
        for _ in 0..clients {
            let message = message.to_vec();
            open.spawn_local(async move {
                let stream = tokio::net::TcpStream::connect(address).await.unwrap();
                let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
                tokio::task::spawn_local(async move { drop(connection.await) });
                call(&mut client, is_compressed, &message).await
            });
        }
        open.join_all().await
    })
}

#[test]
fn messages_of_empty_elements_are_refused_before_they_are_decoded() {
    let (address, _alone) = server();
    let name = ModelInferRequest { model_name: "numbers".into(), ..Default::default() }.encode_to_vec();
    // Fields 4 to 7 (parameters, inputs, outputs, contents) of no bytes.
    for (field, what) in [(5, "inputs"), (6, "outputs"), (7, "raw_input_contents"), (4, "parameters")] {
        let message = [&name[..], &[field << 3 | 2, 0].repeat(BODY_BYTES_MAX / 2 - 50)].concat();
        let packed = gzip(&message);
        let mut said = Vec::new();
        let peak = peak_of(|| said = calls(address, 1, true, &packed));
        let expected = format!("{what}: found {}, expected at most", BODY_BYTES_MAX / 2 - 50);
        assert!(said[0].0 == 3 && said[0].1.starts_with(&expected), "{said:?}");
        assert!(peak < 4 * BODY_BYTES_MAX, "{peak} bytes at once for {what}");
    }
    assert_served(address);
}

#[test]
fn messages_of_many_hold_no_more_than_is_charged() {
    let (address, _alone) = server();
    let contents = gateway::api::InferTensorContents { int64_contents: vec![1; 3 << 20], ..Default::default() };
    let input = InferInputTensor { name: "x".into(), contents: Some(contents), ..Default::default() };
    let message = ModelInferRequest { model_name: "numbers".into(), inputs: vec![input], ..Default::default() };
    let packed = gzip(&message.encode_to_vec());
    let mut said = Vec::new();
    let peak = peak_of(|| said = calls(address, CLIENTS, true, &packed));
    assert!(said.iter().all(|(status, _)| *status == 8), "{said:?}");
    assert!(peak < CHARGED, "{peak} bytes at once");
    assert_served(address);
}

/// A PNG of so many black pixels a side.
fn black(side: u32) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, side, side);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&vec![0; (3 * side * side) as usize]).unwrap();
    file
}

#[test]
fn pictures_of_many_hold_no_more_than_is_charged() {
    let (address, _alone) = server();
    let png = black(1000);
    let served = infer(address, "pictures", "content-type: image/png\r\n", &png).1;
    assert!(served.contains("no scheduler"), "{served}");
    let peak = peak_of(|| {
        at_once(CLIENTS, || {
            let (status, text) = infer(address, "pictures", "content-type: image/png\r\n", &png);
            assert!([429, 503].contains(&status), "{text}");
        });
    });
    assert!(peak < CHARGED, "{peak} bytes at once");
    // Three times what all may hold.
    let large = black(4000);
    let mut said = String::new();
    let peak = peak_of(|| said = infer(address, "pictures", "content-type: image/png\r\n", &large).1);
    let error: Value = serde_json::from_str(said.rsplit("\r\n").next().unwrap()).unwrap();
    assert!(error["error"].as_str().unwrap().contains("bodies_bytes_max (16777216)"), "{error}");
    assert!(peak < 4 << 20, "{peak} bytes at once: it was not decoded");
}
