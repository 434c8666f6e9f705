//! Connections that come and go by the thousand leave nothing behind: no file descriptor, no memory, no slot. Alone in
//! its process, whose descriptors and memory it counts.
#![allow(clippy::disallowed_methods)] // Waits for another thread.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
};

use gateway::{Config, Gateway};
use testing::eventually;

/// Connections in all, and of one wave, which are open at once. Both ends of each are descriptors of this process,
/// which commonly may have 1024.
const CONNECTIONS: usize = 10_000;
const WAVE: usize = 250;
/// Memory may grow by so much after the first waves: less than 2 KiB for each connection, which a task and its buffers
/// exceed by far.
const GROWTH_MAX: usize = 16 << 20;

const CONFIG: &str = r#"
    backend: "emulated"
    max_batch_size: 8
    input { name: "x" data_type: TYPE_UINT8 dims: [ 4 ] }
    output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
    parameters { key: "slo_ms" value { string_value: "20" } }
    parameters { key: "alpha_ms" value { string_value: "1" } }
    parameters { key: "beta_ms" value { string_value: "1" } }
"#;

/// A frontend that never finds its scheduler: where it serves HTTP, and gRPC.
fn lonely_frontend() -> (SocketAddr, SocketAddr) {
    let (tell, told) = crossbeam_channel::bounded(1);
    thread::spawn(move || {
        let repository = tempfile::tempdir().unwrap();
        fs::create_dir_all(repository.path().join("m/1")).unwrap();
        fs::write(repository.path().join("m/config.pbtxt"), CONFIG).unwrap();
        let [nobody, any] = [1, 0].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let config = Config {
            http: Some(any.into()),
            grpc: Some(any.into()),
            ..Config::new(nobody, "a secret of nobody's", repository.path())
        };
        let gateway = Gateway::open(&config, None).unwrap();
        tell.send((gateway.http_address().unwrap(), gateway.grpc_address().unwrap())).unwrap();
        gateway.run(std::future::pending()).unwrap();
    });
    told.recv().unwrap()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Resident bytes of this process.
fn memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn ten_thousand_connections_leave_nothing_behind() {
    let (http, grpc) = lonely_frontend();
    assert!([http, grpc].into_iter().all(|listener| get(listener, "/v2/health/live").starts_with("HTTP/1.1 200")));
    let body = r#"{"inputs":[{"name":"x","shape":[1,4],"datatype":"UINT8","data":[1,2,3,4]}]}"#;
    let infer =
        format!("POST /v2/models/m/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    // The preface of HTTP/2, empty settings, and the head of a request of which nothing follows.
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x01\x01\x04\0\0\0\x01\x83";
    let before = descriptors();
    let mut settled = 0;
    for wave in 0..CONNECTIONS / WAVE {
        let open: Vec<TcpStream> = (0..WAVE)
            .map(|number| {
                let mut stream = TcpStream::connect(if number % 2 == 0 { http } else { grpc }).unwrap();
                // From nothing to a whole request, of each protocol on either listener.
                let sent = if number % 4 < 2 { infer.as_bytes() } else { &http2[..] };
                let length = (wave * WAVE + number) / 4 % (sent.len() + 1);
                stream.write_all(&sent[..length]).unwrap();
                stream
            })
            .collect();
        // Some answers are read before the connection ends, some are not.
        for mut stream in open.into_iter().skip(wave % 3) {
            let _ = stream.set_nonblocking(true).and_then(|()| stream.read(&mut [0; 512]));
        }
        eventually("the end of all connections", || descriptors() <= before);
        if wave == 7 {
            settled = memory();
        }
    }
    let grown = memory().saturating_sub(settled);
    assert!(grown < GROWTH_MAX, "memory grew by {grown} bytes");
    let metrics = get(http, "/metrics");
    assert!(metrics.lines().any(|line| line == "downbeat_slots_in_use 0"), "{metrics}");
    assert!(get(http, "/v2/health/live").starts_with("HTTP/1.1 200"));
}
