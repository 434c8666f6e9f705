//! Streams and connections end: readers that take nothing in, streams without messages, floods of frames.

use h2::client::Builder;
use prost::Message as _;

use super::{
    grpc::{connect, double, finish, framed, head, is_served_here},
    secure::refused,
    *,
};
use crate::api::ModelStreamInferResponse;

/// Longer than a busy machine lets a client that is not slow wait.
const SHORT: Duration = Duration::from_millis(300);

/// A client that takes no reply in: none has room for a byte.
async fn closed_window(address: SocketAddr) -> (h2::client::SendRequest<Bytes>, tokio::task::JoinHandle<()>) {
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = Builder::new().initial_window_size(0).handshake(stream).await.unwrap();
    (client, tokio::task::spawn_local(async move { drop(connection.await) }))
}

fn get_metadata() -> Request<()> {
    Request::get("http://h/v2/models/double").body(()).unwrap()
}

#[test]
fn a_reader_that_takes_nothing_in_is_dropped_even_if_it_keeps_asking() {
    with_server(Limits { body_timeout: SHORT, ..limits() }, async |address, peer| {
        let (mut client, moved) = closed_window(address).await;
        let mut held = Vec::new();
        while !moved.is_finished() {
            if let Ok(asked) = client.send_request(get_metadata(), true) {
                held.push(asked);
            }
            tokio::task::yield_now().await;
        }
        assert_eq!(refused(&peer, "slow_reader"), 1);
        while peer.server.places.borrow().len() > 0 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_client_that_does_not_take_its_replies_in_gets_no_more_and_others_do() {
    with_server(Limits { client_untaken_bytes_max: 1000, ..limits() }, async |address, peer| {
        let (mut client, moved) = closed_window(address).await;
        let mut held = Vec::new();
        let status = loop {
            let (response, _) = client.send_request(get_metadata(), true).unwrap();
            let response = response.await.unwrap();
            if response.status() != 200 {
                break response.status();
            }
            held.push(response);
        };
        assert_eq!((status.as_u16(), refused(&peer, "untaken")), (429, 1));
        assert!((2..20).contains(&held.len()), "found {}", held.len());
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        is_served(&mut socket.connect(address).await.unwrap()).await;
        moved.abort();
        while ask(&mut TcpStream::connect(address).await.unwrap(), &get_of("/v2")).await.status != 200 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn streams_without_messages_end_and_their_connection_goes_on() {
    let limits = Limits { stream_first_timeout: SHORT, stream_idle_timeout: SHORT, ..limits() };
    with_server(limits, async |address, peer| {
        let mut client = connect(address).await;
        let (response, _silent) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        let (status, text, _) = finish(response.await.unwrap()).await;
        assert!(status == 4 && text.contains("(stream_first_timeout_ms)"), "{status} {text}");

        let (response, mut stream) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        stream.send_data(framed(false, &double(&[1, 2, 3, 4]).encode_to_vec()), false).unwrap();
        let (status, text, messages) = finish(response.await.unwrap()).await;
        assert!(status == 4 && text.contains("(stream_idle_timeout_ms)"), "{status} {text}");
        assert_eq!(messages.len(), 1);
        assert_eq!(refused(&peer, "stream"), 2);
        is_served_here(&mut client).await;
    });
}

#[test]
fn a_message_that_does_not_end_ends_its_stream() {
    with_server(Limits { body_timeout: SHORT, ..limits() }, async |address, peer| {
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let mut client = connect(address).await;
        let (response, mut stream) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        stream.send_data(Bytes::from([&message[..], &message[..9]].concat()), false).unwrap();
        let drip = async {
            for at in 9..message.len() - 1 {
                tokio::time::sleep(SHORT / 10).await;
                // The stream may have ended by now.
                let _ = stream.send_data(message.slice(at..=at), false);
            }
            std::future::pending::<()>().await;
        };
        let answers = async { finish(response.await.unwrap()).await };
        let (status, text, messages) = tokio::select! {
            ended = answers => ended,
            () = drip => unreachable!(),
        };
        assert!(status == 4 && text.contains("incomplete after 300ms"), "{status} {text}");
        let first = ModelStreamInferResponse::decode(messages[0].clone()).unwrap();
        assert_eq!((messages.len(), first.error_message.as_str()), (1, ""));
        assert_eq!(refused(&peer, "stream"), 1);
    });
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// `GET http://h/`, from HPACK's static table.
const GET: &[u8] = b"\x82\x86\x84\x41\x01h";

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The error of the GOAWAY that a connection ended with.
fn goaway(mut heard: &[u8]) -> Option<u32> {
    let mut found = None;
    while let Some((head, after)) = heard.split_at_checked(9) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some((payload, rest)) = after.split_at_checked(length) else { break };
        if head[3] == 7 {
            found = Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
        }
        heard = rest;
    }
    found
}

/// RFC 9113, section 7.
const ENHANCE_YOUR_CALM: u32 = 0xb;

#[test]
fn floods_of_resets_and_of_head_fragments_end_their_connection() {
    with_server(limits(), async |address, _| {
        let resets = (0..1000u32).flat_map(|index| {
            let stream = 2 * index + 1;
            [frame(1, 5, stream, GET), frame(3, 0, stream, &[0, 0, 0, 8])].concat()
        });
        let fragments = (0..10_000).flat_map(|_| frame(9, 0, 1, &[]));
        for flood in [resets.collect::<Vec<u8>>(), frame(1, 1, 1, GET).into_iter().chain(fragments).collect()] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let (mut read, mut write) = stream.split();
            let mut heard = Vec::new();
            let sent = async { drop(write.write_all(&[PREFACE, &flood].concat()).await) };
            let _ = tokio::join!(sent, read.read_to_end(&mut heard));
            assert_eq!(goaway(&heard), Some(ENHANCE_YOUR_CALM));
            is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        }
    });
}

#[test]
fn floods_of_pings_and_settings_do_not_stop_others() {
    with_server(limits(), async |address, _| {
        let mut good = TcpStream::connect(address).await.unwrap();
        for flood in [frame(6, 0, 0, &[0; 8]), frame(4, 0, 0, &[0, 3, 0, 0, 0, 9])] {
            let mut bad = TcpStream::connect(address).await.unwrap();
            bad.write_all(PREFACE).await.unwrap();
            let many = flood.repeat(1000);
            // Its answers are not read: sooner or later it is not read either.
            let flooding = tokio::task::spawn_local(async move { while bad.write_all(&many).await.is_ok() {} });
            for _ in 0..100 {
                is_served(&mut good).await;
            }
            flooding.abort();
        }
    });
}

#[test]
fn large_heads_over_http2_are_refused_before_they_are_kept() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        let value = "y".repeat(1000);
        let mut request = head("ModelInfer");
        for index in 0..64 {
            request = request.header(format!("x-{index}"), &value);
        }
        let (response, mut stream) = client.send_request(request.body(()).unwrap(), false).unwrap();
        let _ = stream.send_data(Bytes::new(), true);
        let refused = response.await.map_or(true, |response| response.status() == 431);
        assert!(refused, "it is more than twice of what is looked at");
        is_served_here(&mut connect(address).await).await;
    });
}
