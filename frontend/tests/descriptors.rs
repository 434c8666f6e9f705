//! Connections that come and go leave no descriptor behind. Alone in its file: other tests open descriptors too.
#![allow(clippy::disallowed_methods)] // Clients have sockets of their own.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
};

use frontend::{Client, Config};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Waits until the server answers on a connection of its own: by then it has seen all that came before.
fn is_live(address: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /v2/health/live HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.starts_with("HTTP/1.1 200")
}

#[test]
fn ten_thousand_connections_leave_no_descriptor_behind() {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path().join("m");
    std::fs::create_dir_all(folder.join("1")).unwrap();
    let config = "backend: 'emulated' max_batch_size: 4 \
        input: [{ name: 'x' data_type: TYPE_UINT8 dims: [4] }] output: [{ name: 'digest' data_type: TYPE_UINT64 dims: [2] }] \
        parameters: { key: 'slo_ms' value: { string_value: '50' } } \
        parameters: { key: 'alpha_ms' value: { string_value: '1' } } \
        parameters: { key: 'beta_ms' value: { string_value: '1' } }";
    std::fs::write(folder.join("config.pbtxt"), config).unwrap();
    let (http, grpc) = (free_address(), free_address());
    let config = Config {
        http: Some(http),
        grpc: Some(grpc),
        // Nobody is there, which a frontend survives.
        ..Config::new(free_address(), "s", repository.path())
    };
    let _client = Client::start(config).unwrap();
    assert!(is_live(http) && is_live(grpc), "both listeners answer both protocols");
    let before = descriptors();
    let parts: [&[u8]; 4] =
        [b"", b"GET /v2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /v2 HTTP/1.1\r\nhost: h\r\n\r\n"];
    for round in 0..10_000 {
        let mut stream = TcpStream::connect(if round % 2 == 0 { http } else { grpc }).unwrap();
        let _ = stream.write_all(parts[round / 2 % parts.len()]);
    }
    // Connections end in the server's own time, and it opens no other descriptors meanwhile.
    while descriptors() > before {
        std::thread::yield_now();
    }
}
