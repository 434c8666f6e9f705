//! What requests hold is charged to their clients, and given back however they end.

use prost::Message as _;

use super::{
    grpc::{call, connect, double, framed, head, infer, is_served_here},
    *,
};
use crate::api::{InferParameter, infer_parameter::ParameterChoice};

/// A connection from another address than that of the others.
async fn connect_as_somebody_else(address: SocketAddr) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    socket.connect(address).await.unwrap()
}

/// Waits until requests hold so many bytes.
async fn grown(peer: &Peer, bytes: usize) {
    while peer.server.bodies_bytes() < bytes {
        tokio::task::yield_now().await;
    }
}

#[test]
fn a_client_that_takes_all_it_can_leaves_room_for_others() {
    with_server(
        Limits { bodies_bytes_max: 40_000, connections_max: 100, client_connections_max: 100, ..limits() },
        async |address, peer| {
            let request = post_of(INFER, "", &[b' '; 4000]);
            let mut held = Vec::new();
            let refused = loop {
                let mut greedy = connect_as_somebody_else(address).await;
                greedy.write_all(&request[..request.len() - 1]).await.unwrap();
                let before = peer.server.bodies_bytes();
                tokio::select! {
                    heard = hear(&mut greedy) => break heard.unwrap(),
                    () = grown(&peer, before + 3999) => {}
                }
                held.push(greedy);
            };
            assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{refused:?}");
            let expected = "it may hold 4 times what is free of bodies_bytes_max (40000)";
            assert!(refused.json()["error"].as_str().unwrap().contains(expected), "{refused:?}");
            assert_eq!((held.len(), peer.server.bodies_bytes()), (8, 8 * 3999), "four fifths");
            for _ in 0..20 {
                is_served(&mut TcpStream::connect(address).await.unwrap()).await;
            }
            drop(held);
            while peer.server.bodies_bytes() > 0 {
                tokio::task::yield_now().await;
            }
        },
    );
}

#[test]
fn messages_of_a_stream_give_back_what_they_held_however_they_end() {
    with_server(Limits { bodies_bytes_max: 20_000, ..limits() }, async |address, peer| {
        let mut client = connect(address).await;
        let (response, mut stream) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        let mut unknown = double(&[0; 3000]);
        unknown.model_name = "triple".to_owned();
        let mut body = response.await.unwrap().into_body();
        for message in [unknown.encode_to_vec(), vec![0xff; 3000]].into_iter().cycle().take(20) {
            stream.send_data(framed(false, &message), false).unwrap();
            let answer = body.data().await.unwrap().unwrap();
            body.flow_control().release_capacity(answer.len()).unwrap();
            assert_eq!(peer.server.bodies_bytes(), 0, "the message is answered");
        }
        // The stream is open, and another message has begun.
        stream.send_data(framed(false, &[0; 3000]).slice(..1000), false).unwrap();
        while peer.server.bodies_bytes() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(peer.server.bodies_bytes(), 1000);
        is_served_here(&mut client).await;
        stream.send_reset(h2::Reason::CANCEL);
        while peer.server.bodies_bytes() > 0 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_body_is_compressed_once() {
    with_server(limits(), async |address, _| {
        for (headers, found) in [
            ("content-encoding: gzip, gzip\r\n", r#"found "gzip, gzip""#),
            ("content-encoding: gzip\r\ncontent-encoding: gzip\r\n", r#"found "gzip" and another one"#),
            ("content-encoding: identity\r\ncontent-encoding: gzip\r\n", r#"found "identity" and another one"#),
        ] {
            let heard = ask(&mut TcpStream::connect(address).await.unwrap(), &post_of(INFER, headers, b"xx")).await;
            assert_eq!((heard.status, heard.header("connection")), (415, Some("close")), "{heard:?}");
            assert!(heard.json()["error"].as_str().unwrap().contains(found), "{heard:?}");
        }
        let mut client = connect(address).await;
        let packed = head("ModelInfer").header("grpc-encoding", "br").body(()).unwrap();
        let (status, text, _) = call(&mut client, packed, framed(true, b"xx")).await;
        assert!(status == 12 && text.contains("expected gzip, deflate or identity"), "{status} {text}");
    });
}

#[test]
fn messages_are_framed_as_they_should_be() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        let good = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let mut flag = good.to_vec();
        flag[0] = 7;
        for (body, expected) in [
            (Bytes::new(), "found no message, expected one"),
            (good.slice(..3), "expected the rest of a message"),
            (good.slice(..good.len() - 1), "expected the rest of a message"),
            ([&good[..], &good].concat().into(), "found several messages, expected one"),
            (flag.into(), "found a message with flag 7"),
            (framed(true, b"xx"), "grpc-encoding: found none"),
        ] {
            let (status, text, _) = call(&mut client, head("ModelInfer").body(()).unwrap(), body).await;
            assert!(status == 13 && text.contains(expected), "found {status} '{text}', expected '{expected}'");
            is_served_here(&mut client).await;
        }
        // A message in pieces, cut everywhere.
        let (response, mut stream) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        let mut body = response.await.unwrap().into_body();
        let two = [&good[..], &good].concat();
        for cut in 0..two.len() {
            stream.send_data(Bytes::copy_from_slice(&two[..cut]), false).unwrap();
            tokio::task::yield_now().await;
            stream.send_data(Bytes::copy_from_slice(&two[cut..]), false).unwrap();
            // Both may come in one frame.
            let mut answers = Vec::new();
            while answers.windows(4).filter(|window| *window == [2, 4, 6, 8]).count() < 2 {
                let piece = body.data().await.unwrap().unwrap();
                body.flow_control().release_capacity(piece.len()).unwrap();
                answers.extend_from_slice(&piece);
            }
        }
    });
}

#[test]
fn long_ids_are_told_and_large_requests_are_served_from_the_pool() {
    let limits = Limits { body_bytes_max: 1 << 20, bodies_bytes_max: 32 << 20, ..limits() };
    with_server(limits, async |address, peer| {
        let mut client = connect(address).await;
        let mut message = double(&[1, 2, 3, 4]);
        message.id = "i".repeat(257);
        let (status, text, _) = infer(&mut client, &message).await;
        assert_eq!((status, text.as_str()), (3, "id: found 257 bytes, expected at most 256"));
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &post_of(INFER, "", GOOD.replace('q', &message.id).as_bytes())).await;
        assert!(heard.status == 400 && heard.json()["error"].as_str().unwrap().contains("id: found 257"), "{heard:?}");

        // Spaces count.
        let large = GOOD.replace("1,2,3,4", &format!("1,{}2,3,4", " ".repeat(100_000)));
        let wrong = large.replace("4]}", "4,5]}");
        for _ in 0..3 {
            let heard = ask(&mut stream, &post_of(INFER, "", large.as_bytes())).await;
            assert_eq!((heard.status, &heard.json()["outputs"][0]["data"]), (200, &json!([2, 4, 6, 8])), "{heard:?}");
            let heard = ask(&mut stream, &post_of(INFER, "", wrong.as_bytes())).await;
            let expected = "inputs['x'].data: found more than the expected 4 elements";
            assert_eq!((heard.status, &heard.json()["error"]), (400, &json!(expected)));
        }
        // Parameters that mean nothing are parsed, too.
        message.id = "q".to_owned();
        let value = InferParameter { parameter_choice: Some(ParameterChoice::StringParam("x".repeat(100_000))) };
        message.parameters.insert("mine".to_owned(), value);
        let (status, text, _) = infer(&mut client, &message).await;
        assert_eq!(status, 0, "{text}");
        assert_eq!(peer.server.bodies_bytes(), 0);
    });
}
