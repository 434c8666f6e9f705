//! What a page in a browser can make it send to us.

use super::{secure::refused, *};

#[test]
fn pages_of_other_sites_change_nothing() {
    with_server(limits(), async |address, peer| {
        let unload = "/v2/repository/models/double/unload";
        for (path, field, status) in [
            (unload, "content-type: text/plain\r\n", 403),
            (unload, "origin: http://evil.example\r\ncontent-type: application/json\r\n", 403),
            (unload, "sec-fetch-site: cross-site\r\n", 403),
            ("/v2/logging", "content-type: application/x-www-form-urlencoded\r\n", 403),
            ("/v2/trace/setting", "content-type: multipart/form-data; boundary=x\r\n", 403),
            ("/v2/models/double/trace/setting", "sec-fetch-site: same-site\r\n", 403),
            ("/v2/systemsharedmemory/region/r/register", "origin: null\r\n", 403),
            ("/v2/systemsharedmemory/unregister", "sec-fetch-site: cross-site\r\n", 403),
            // As tritonclient, KServe and curl send them.
            ("/v2/repository/index", "content-type: application/x-www-form-urlencoded\r\n", 200),
            ("/v2/logging", "", 200),
            ("/v2/logging", "content-type: application/json\r\n", 200),
            (INFER, "content-type: application/x-www-form-urlencoded\r\n", 400),
            ("/v2/logging", "origin: http://h\r\nsec-fetch-site: same-origin\r\n", 200),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let heard = ask(&mut stream, &post_of(path, field, b"{}")).await;
            assert_eq!(heard.status, status, "{path} {field}: {heard:?}");
            assert!(!heard.head.contains("access-control"), "{heard:?}");
            is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        }
        assert_eq!(refused(&peer, "cross_site"), 8);
    });
}

#[test]
fn without_tokens_other_names_than_ours_are_refused() {
    let ours = Hosts::Named(vec!["serve.example".to_owned()]);
    with_gate(Gate { hosts: ours, ..open_gate(limits()) }, async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let get = |host: &str| {
            format!("GET /v2/models/double HTTP/1.1\r\nhost: {host}\r\naccept-language: en\r\n\r\n").into_bytes()
        };
        for host in ["localhost:8000", "127.0.0.1:8000", "serve.example", "[::1]"] {
            assert_eq!(ask(&mut stream, &get(host)).await.status, 200, "{host}");
        }
        let heard = ask(&mut stream, &get("rebound.evil.example")).await;
        assert_eq!(heard.status, 421);
        let error = heard.json()["error"].as_str().unwrap().to_owned();
        assert!(error.starts_with("Host: found 'rebound.evil.example' from a browser, expected"), "{error}");
        for path in ["/v2/health/ready", "/metrics"] {
            let asked = format!("GET {path} HTTP/1.1\r\nhost: downbeat\r\naccept-language: en\r\n\r\n");
            assert_eq!(ask(&mut stream, asked.as_bytes()).await.status, 200, "{path}");
        }
        assert_eq!(refused(&peer, "host"), 1);
    });
}
