//! Clients that are slow, greedy or wrong: they hurt nobody else, and leave nothing behind.

use rand::{Rng as _, RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;

#[test]
fn what_cannot_be_read_on_ends_its_connection_with_an_answer() {
    with_server(limits(), async |address, _| {
        let announced = format!("POST {INFER} HTTP/1.1\r\nhost: h\r\ncontent-length: 999999999\r\n\r\n");
        let chunked = format!(
            "POST {INFER} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2000\r\n{}\r\n",
            " ".repeat(0x2000)
        );
        let packed = String::from_utf8(post_of(INFER, "content-encoding: br\r\n", b"xx")).unwrap();
        let unclear = String::from_utf8(post_of(INFER, "inference-header-content-length: -1\r\n", b"xx")).unwrap();
        for (request, status, expected) in [
            (announced, 413, "found 999999999 bytes, expected at most 4096 (body_bytes_max)"),
            (chunked, 413, "found more bytes, expected at most 4096"),
            (packed, 415, "Content-Encoding: found \"br\", expected gzip or deflate"),
            (unclear, 400, "Inference-Header-Content-Length: found"),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let heard = ask(&mut stream, request.as_bytes()).await;
            assert_eq!((heard.status, heard.header("connection")), (status, Some("close")), "{heard:?}");
            assert!(heard.json()["error"].as_str().unwrap().contains(expected), "{heard:?}");
            assert!(hear(&mut stream).await.is_none());
            is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        }
    });
}

#[test]
fn a_body_has_65536_chunks_at_most() {
    with_server(Limits { body_bytes_max: 1 << 20, ..limits() }, async |address, _| {
        let head = format!("POST {INFER} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n");
        for (chunks, end, expected) in [
            (65_536, "0\r\n\r\n", "the request is not a JSON object"),
            (65_537, "", "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger"),
        ] {
            let request = format!("{head}{}{end}", "1\r\n \r\n".repeat(chunks));
            let heard = ask(&mut TcpStream::connect(address).await.unwrap(), request.as_bytes()).await;
            assert_eq!((heard.status, heard.header("connection")), (400, end.is_empty().then_some("close")));
            assert!(heard.json()["error"].as_str().unwrap().starts_with(expected), "{heard:?}");
        }
    });
}

const SHORT: Duration = Duration::from_millis(30);

/// With timeouts this short a good client can be too slow as well, on a busy machine; another attempt is not.
async fn is_served_at_last(address: SocketAddr) {
    loop {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let sent = stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await;
        if sent.is_ok() && hear(&mut stream).await.is_some_and(|heard| heard.status == 200) {
            return;
        }
    }
}

#[test]
fn slow_heads_and_idle_connections_end_and_others_go_on() {
    with_server(Limits { head_timeout: SHORT, ..limits() }, async |address, _| {
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"POST /v2/mod").await.unwrap();
        assert!(hear(&mut slow).await.is_none_or(|heard| heard.status == 408));

        let mut idle = TcpStream::connect(address).await.unwrap();
        assert!(hear(&mut idle).await.is_none(), "an idle connection does not stay for ever");
        is_served_at_last(address).await;
    });
}

#[test]
fn slow_and_torn_bodies_end_and_others_go_on() {
    with_server(Limits { body_timeout: SHORT, ..limits() }, async |address, peer| {
        let request = post_of(INFER, "", GOOD.as_bytes());
        let mut slow = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut slow, &request[..request.len() - 1]).await;
        assert_eq!((heard.status, heard.header("connection")), (408, Some("close")));

        let mut torn = TcpStream::connect(address).await.unwrap();
        torn.write_all(&request[..request.len() - 1]).await.unwrap();
        drop(torn);
        is_served_at_last(address).await;
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn bodies_that_are_under_way_share_one_budget() {
    with_server(Limits { bodies_bytes_max: 150, ..limits() }, async |address, peer| {
        let request = post_of(INFER, "", GOOD.as_bytes());
        let mut held = TcpStream::connect(address).await.unwrap();
        held.write_all(&request[..request.len() - 1]).await.unwrap();
        // The server takes the held body in some turns later; until then the others are served.
        let refused = loop {
            let heard = ask(&mut TcpStream::connect(address).await.unwrap(), &request).await;
            if heard.status != 200 {
                break heard;
            }
        };
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
        assert!(refused.json()["error"].as_str().unwrap().contains("exceed bodies_bytes_max (150)"), "{refused:?}");
        assert_eq!(peer.server.bodies_bytes(), request.len() - 1 - (request.len() - GOOD.len()));
        let heard = ask(&mut held, &request[request.len() - 1..]).await;
        assert_eq!(heard.status, 200, "what was taken in goes on: {heard:?}");
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
    });
}

#[test]
fn half_a_preface_and_idle_http2_connections_end() {
    with_server(Limits { head_timeout: SHORT, ..limits() }, async |address, _| {
        // The first bytes of HTTP/2, then nothing: neither protocol's own timer runs yet.
        let mut undecided = TcpStream::connect(address).await.unwrap();
        undecided.write_all(b"PRI * HT").await.unwrap();
        assert!(hear(&mut undecided).await.is_none());

        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        assert!(idle.read_to_end(&mut Vec::new()).await.is_ok(), "an idle connection does not stay for ever");
        is_served_at_last(address).await;
    });
}

#[test]
fn half_closed_connections_end_whatever_was_sent_before() {
    with_server(limits(), async |address, peer| {
        let request = post_of(INFER, "", GOOD.as_bytes());
        // What was asked in full is answered first.
        for asked in [1, 3] {
            let mut half = TcpStream::connect(address).await.unwrap();
            half.write_all(&request.repeat(asked)).await.unwrap();
            half.shutdown().await.unwrap();
            let mut heard = Vec::new();
            half.read_to_end(&mut heard).await.unwrap();
            let heard = String::from_utf8(heard).unwrap();
            assert_eq!(heard.matches("HTTP/1.1 200").count(), asked, "{heard}");
        }
        for sent in [&b""[..], b"PRI * HT", b"POST /v2", &request[..request.len() - 1]] {
            let mut half = TcpStream::connect(address).await.unwrap();
            half.write_all(sent).await.unwrap();
            half.shutdown().await.unwrap();
            let _ = half.read_to_end(&mut Vec::new()).await;
            is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn compressed_bodies_are_bounded_as_decoded() {
    with_server(limits(), async |address, _| {
        let gzip = |bytes: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            std::io::Write::write_all(&mut encoder, bytes).unwrap();
            encoder.finish().unwrap()
        };
        let coding = "content-encoding: gzip\r\n";
        let mut stream = TcpStream::connect(address).await.unwrap();
        let served = ask(&mut stream, &post_of(INFER, coding, &gzip(GOOD.as_bytes()))).await;
        assert_eq!((served.status, &served.json()["id"]), (200, &json!("q")));
        for (body, status, expected) in [
            (gzip(&[b' '; 1 << 20]), 413, "found more decoded bytes, expected at most 4096 (body_bytes_max)"),
            (gzip(GOOD.as_bytes())[..40].to_vec(), 400, "body: it is not gzip"),
            (b"plain".to_vec(), 400, "body: it is not gzip"),
        ] {
            let heard = ask(&mut stream, &post_of(INFER, coding, &body)).await;
            assert_eq!(heard.status, status, "{heard:?}");
            assert!(heard.json()["error"].as_str().unwrap().contains(expected), "{heard:?}");
            is_served(&mut stream).await;
        }
    });
}

/// Each connection is a task that holds the server.
#[test]
fn ten_thousand_connections_leave_no_task_behind() {
    with_server(Limits { connections_max: 64, ..limits() }, async |address, peer| {
        let before = Rc::strong_count(&peer.server);
        let request = post_of(INFER, "", GOOD.as_bytes());
        for round in 0..10_000 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // From nothing to a whole request whose answer nobody waits for.
            let _ = stream.write_all(&request[..round % (request.len() + 1)]).await;
        }
        while peer.server.places.borrow().len() > 0 || Rc::strong_count(&peer.server) > before {
            tokio::task::yield_now().await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
    });
}

/// A good request with any stretch replaced by any bytes; the seed that fails is in the panic's text.
#[test]
fn no_bytes_hurt_others() {
    with_server(limits(), async |address, peer| {
        let mut good = TcpStream::connect(address).await.unwrap();
        for seed in 0..150 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut request = post_of(INFER, "inference-header-content-length: 81\r\n", GOOD.as_bytes());
            let start = rng.random_range(0..request.len());
            let end = (start + rng.random_range(0..40)).min(request.len());
            let mut junk = vec![0; rng.random_range(0..20)];
            rng.fill_bytes(&mut junk);
            request.splice(start..end, junk);
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(&request).await;
            let _ = stream.shutdown().await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
            is_served(&mut good).await;
            assert_eq!(peer.desk.with_core(Core::outstanding), 0, "seed {seed}");
        }
    });
}
