//! Who gets a connection, and that health is answered whoever has them all.

use prost::Message as _;

use super::{
    grpc::{call, connect, double, framed, head},
    secure::refused,
    *,
};
use crate::api::{ServerLiveRequest, ServerReadyRequest};

/// A connection with a request under way.
async fn busy(address: SocketAddr, peer: &Peer) -> TcpStream {
    let before = peer.kept.borrow().len();
    peer.fates.borrow_mut().push_back(Fate::Keep);
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
    while peer.kept.borrow().len() == before {
        tokio::task::yield_now().await;
    }
    stream
}

#[test]
fn idle_connections_make_room_for_newcomers() {
    with_server(Limits { connections_max: 2, ..limits() }, async |address, peer| {
        let mut idle = TcpStream::connect(address).await.unwrap();
        is_served(&mut idle).await;
        let _busy = busy(address, &peer).await;
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        assert!(hear(&mut idle).await.is_none(), "it was closed");
        assert_eq!((refused(&peer, "idle"), refused(&peer, "connections")), (1, 0));
        assert_eq!(peer.cancelled.get(), 0, "what is under way goes on");
    });
}

#[test]
fn a_thousand_silent_connections_are_in_nobodys_way() {
    let many = Limits { connections_max: 100, client_connections_max: 100, ..limits() };
    with_server(many, async |address, peer| {
        let mut silent = Vec::new();
        for _ in 0..400 {
            silent.push(TcpStream::connect(address).await.unwrap());
            tokio::task::yield_now().await;
        }
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        while peer.server.places.borrow().len() > 100 {
            tokio::task::yield_now().await;
        }
        assert!(refused(&peer, "idle") >= 300);
    });
}

#[test]
fn health_is_answered_beyond_all_limits_and_nothing_else() {
    let full = Limits { connections_max: 2, requests_max: 2, client_requests_max: 1, ..limits() };
    with_server(full, async |address, peer| {
        let _held = [busy(address, &peer).await, busy(address, &peer).await];
        for path in ["/v2/health/live", "/v2/health/ready", "/v2/models/double/ready"] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let heard = ask(&mut stream, &get_of(path)).await;
            assert_eq!((heard.status, heard.header("connection")), (200, Some("close")), "{path}");
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;
        assert_eq!((heard.status, heard.header("retry-after")), (503, Some("1")), "{heard:?}");
        assert!(heard.json()["error"].as_str().unwrap().contains("client_connections_max, connections_max"));
        assert!(refused(&peer, "connections") >= 4);

        let mut client = connect(address).await;
        let live = framed(false, &ServerLiveRequest {}.encode_to_vec());
        assert_eq!(call(&mut client, head("ServerLive").body(()).unwrap(), live).await.0, 0);
        let infer = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let (status, text, _) = call(&mut client, head("ModelInfer").body(()).unwrap(), infer).await;
        assert_eq!(status, 8, "{text}");
    });
}

#[test]
fn health_is_answered_when_all_requests_are_taken() {
    with_server(Limits { requests_max: 1, ..limits() }, async |address, peer| {
        let _held = busy(address, &peer).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut stream, &get_of("/v2")).await.status, 503);
        for path in ["/v2/health/live", "/v2/health/ready", "/v2/models/double/versions/1/ready"] {
            assert_eq!(ask(&mut stream, &get_of(path)).await.status, 200, "{path}");
        }
        let mut client = connect(address).await;
        let ready = framed(false, &ServerReadyRequest {}.encode_to_vec());
        assert_eq!(call(&mut client, head("ServerReady").body(()).unwrap(), ready).await.0, 0);
    });
}

#[test]
fn one_client_leaves_room_for_others() {
    let limits = Limits { connections_max: 8, client_connections_max: 2, client_requests_max: 1, ..limits() };
    with_server(limits, async |address, peer| {
        let _held = [busy(address, &peer).await, busy(address, &peer).await];
        let mut third = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut third, &post_of(INFER, "", GOOD.as_bytes())).await.status, 503, "its third connection");
        // Another one of this host.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        is_served(&mut socket.connect(address).await.unwrap()).await;
    });
}

#[test]
fn a_client_has_so_many_requests_on_a_connection_and_one_on_each_at_least() {
    with_server(Limits { client_requests_max: 2, ..limits() }, async |address, peer| {
        let mut client = connect(address).await;
        let infer = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let mut held = Vec::new();
        for under_way in 1..=2 {
            peer.fates.borrow_mut().push_back(Fate::Keep);
            let (response, mut stream) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
            stream.send_data(infer.clone(), true).unwrap();
            held.push(response);
            while peer.kept.borrow().len() < under_way {
                tokio::task::yield_now().await;
            }
        }
        let (status, text, _) = call(&mut client, head("ModelInfer").body(()).unwrap(), infer).await;
        assert!(status == 8 && text.contains("2 requests under way already (client_requests_max)"), "{text}");
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
    });
}

#[test]
fn metrics_are_rendered_once_for_all_who_ask_at_once() {
    with_server(limits(), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let first = ask(&mut stream, &get_of("/metrics")).await.body;
        is_served(&mut stream).await;
        assert_eq!(ask(&mut stream, &get_of("/metrics")).await.body, first, "the clock stands still");
        let gzip = b"GET /metrics HTTP/1.1\r\nhost: h\r\naccept-encoding: gzip\r\n\r\n";
        let packed = ask(&mut stream, gzip).await;
        assert_eq!(packed.header("content-encoding"), Some("gzip"));
        assert_eq!(ask(&mut stream, gzip).await.body, packed.body);
        peer.clock.set(peer.clock.get() + Span::from_millis(250));
        assert_ne!(ask(&mut stream, &get_of("/metrics")).await.body, first);
    });
}
