//! The server ends when it is told to, and nobody is cut off; and takes other tokens and limits while it runs.

use prost::Message as _;

use super::{
    grpc::{call, connect, double, finish, framed, head},
    secure::{TOKEN, bearer, gate, refused},
    *,
};
use crate::api::{ServerReadyRequest, ServerReadyResponse};

async fn until(mut holds: impl FnMut() -> bool) {
    while !holds() {
        tokio::task::yield_now().await;
    }
}

#[test]
fn what_is_under_way_is_answered_and_nothing_else_begins() {
    with_server(limits(), async |address, peer| {
        let mut idle = TcpStream::connect(address).await.unwrap();
        is_served(&mut idle).await;
        let mut next = TcpStream::connect(address).await.unwrap();
        is_served(&mut next).await;
        let mut health = TcpStream::connect(address).await.unwrap();
        is_served(&mut health).await;
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut held = TcpStream::connect(address).await.unwrap();
        held.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        until(|| !peer.kept.borrow().is_empty()).await;
        let server = Rc::clone(&peer.server);
        let drained = tokio::task::spawn_local(async move { server.drained().await });

        peer.server.begin_drain();
        let heard = ask(&mut health, &get_of("/v2/health/ready")).await;
        assert_eq!((heard.status, heard.json()["ready"].clone()), (503, json!(false)));
        peer.server.drain.end();
        let heard = ask(&mut next, &post_of(INFER, "", GOOD.as_bytes())).await;
        assert_eq!(
            (heard.status, heard.header("retry-after"), heard.header("connection")),
            (503, Some("1"), Some("close"))
        );
        assert!(heard.json()["error"].as_str().unwrap().contains("this frontend is being drained"), "{heard:?}");
        assert!(hear(&mut next).await.is_none());
        assert!(hear(&mut idle).await.is_none(), "an idle connection ends");
        assert_eq!(refused(&peer, "draining"), 1);
        assert!(!drained.is_finished());

        peer.drop_kept();
        assert_eq!(hear(&mut held).await.unwrap().status, 504, "it was answered");
        assert!(hear(&mut held).await.is_none(), "and its connection ends");
        drained.await.unwrap();
    });
}

/// A call whose message was not all there was refused, a body of REST was not.
#[test]
fn what_is_coming_in_is_under_way_whatever_the_protocol() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let (response, mut call) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
        call.send_data(message.slice(..9), false).unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = post_of(INFER, "", GOOD.as_bytes());
        let (first, last) = request.split_at(request.len() - 9);
        stream.write_all(first).await.unwrap();
        until(|| peer.server.bodies_bytes() == 9 + GOOD.len() - 9).await;

        peer.server.begin_drain();
        call.send_data(message.slice(9..), true).unwrap();
        let (status, text, _) = finish(response.await.unwrap()).await;
        assert_eq!((status, text.as_str()), (0, ""));
        assert_eq!(ask(&mut stream, last).await.status, 200);
        peer.server.drained().await;
    });
}

#[test]
fn grpc_clients_are_told_to_go_away_and_streams_end_between_messages() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        peer.fates.borrow_mut().extend([Fate::Keep; 2]);
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let (unary, mut stream) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
        stream.send_data(message.clone(), true).unwrap();
        let (streamed, mut stream) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        stream.send_data(message.clone(), false).unwrap();
        let (quiet, _open) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        until(|| peer.kept.borrow().len() == 2).await;

        peer.server.begin_drain();
        let (status, text, _) = finish(quiet.await.unwrap()).await;
        assert!(status == 14 && text.contains("being drained"), "{status} {text}");
        peer.drop_kept();
        assert_eq!(finish(unary.await.unwrap()).await.0, 4, "it was answered");
        let (status, _, messages) = finish(streamed.await.unwrap()).await;
        assert_eq!((status, messages.len()), (14, 1), "its message was answered");
        peer.server.drained().await;
        while client.send_request(get(), true).is_ok() {
            tokio::task::yield_now().await;
        }

        assert!(TcpStream::connect(address).await.is_err(), "the listener is closed");
        drop(TcpListener::bind(address).await.unwrap());
    });
}

/// Balancers send requests for a while after a server has said that it is not ready: 1 to 51 of 900 were lost.
#[test]
fn all_is_served_until_the_grace_is_over() {
    with_server(Limits { drain_grace: Duration::from_secs(60), ..limits() }, async |address, peer| {
        let mut idle = TcpStream::connect(address).await.unwrap();
        is_served(&mut idle).await;
        let silent = TcpStream::connect(address).await.unwrap();
        let mut former = connect(address).await;
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let infer = || head("ModelInfer").body(()).unwrap();
        assert_eq!(call(&mut former, infer(), message.clone()).await.0, 0);
        let server = Rc::clone(&peer.server);
        let drained = tokio::task::spawn_local(async move { server.drained().await });

        peer.server.begin_drain();
        let ready = framed(false, &ServerReadyRequest {}.encode_to_vec());
        let mut late = connect(address).await;
        let (status, _, messages) = call(&mut late, head("ServerReady").body(()).unwrap(), ready).await;
        assert!(status == 0 && !ServerReadyResponse::decode(messages[0].clone()).unwrap().ready);
        // Their clients are told to go away, and what they had begun until then is answered.
        while former.send_request(get(), true).is_ok() {
            tokio::task::yield_now().await;
        }
        let mut new = TcpStream::connect(address).await.unwrap();
        for stream in [&mut idle, &mut new] {
            let heard = ask(stream, &post_of(INFER, "", GOOD.as_bytes())).await;
            assert_eq!((heard.status, heard.header("connection")), (200, Some("close")));
        }
        assert!(!drained.is_finished());

        // Nobody has accepted it yet when the listener closes.
        let mut last = TcpStream::connect(address).await.unwrap();
        peer.server.close();
        let heard = ask(&mut last, &post_of(INFER, "", GOOD.as_bytes())).await;
        assert_eq!((heard.status, heard.header("connection")), (200, Some("close")));
        drop((silent, late));
        drained.await.unwrap();
        assert!(TcpStream::connect(address).await.is_err(), "the listener is closed");
        drop(TcpListener::bind(address).await.unwrap());
    });
}

/// One of 126,000 was reset or refused that a proxy had sent on its way as the listener closed.
#[test]
fn who_has_connected_when_the_listener_closes_is_served() {
    with_server(limits(), async |address, peer| {
        let mut idle = TcpStream::connect(address).await.unwrap();
        is_served(&mut idle).await;
        let server = Rc::clone(&peer.server);
        let drained = tokio::task::spawn_local(async move { server.drained().await });
        let mut fresh = TcpStream::connect(address).await.unwrap();
        let mut fresh_http2 = connect(address).await;
        peer.server.close();
        // All are on their way before the server runs again.
        for stream in [&mut idle, &mut fresh] {
            stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        }
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let called = call(&mut fresh_http2, head("ModelInfer").body(()).unwrap(), message).await;
        assert_eq!(called.0, 0, "{called:?}");
        for stream in [&mut idle, &mut fresh] {
            let heard = hear(stream).await.unwrap();
            assert_eq!((heard.status, heard.header("connection")), (200, Some("close")));
        }
        assert_eq!(refused(&peer, "draining"), 0);
        drained.await.unwrap();
    });
}

/// A status of gRPC would be for the application; proxies and clients send a refused stream to another server.
#[test]
fn a_stream_that_comes_too_late_is_refused_as_proxies_see_it() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        let (held, _open) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let (late, mut stream) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
        // In the same turn as its head, before GOAWAY can be.
        peer.server.close();
        peer.server.drain.end();
        let _ = stream.send_data(message, true);
        let error = late.await.unwrap_err();
        assert_eq!(error.reason(), Some(h2::Reason::REFUSED_STREAM), "{error}");
        drop(held);
    });
}

fn get() -> Request<()> {
    Request::get("http://h/v2").body(()).unwrap()
}

#[test]
fn what_takes_too_long_is_given_up() {
    with_server(Limits { drain_timeout: Duration::from_millis(30), ..limits() }, async |address, peer| {
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut held = TcpStream::connect(address).await.unwrap();
        held.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        until(|| !peer.kept.borrow().is_empty()).await;
        peer.server.begin_drain();
        peer.server.drained().await;
        assert_eq!(peer.cancelled.get(), 0);
    });
}

#[test]
fn a_client_with_the_grant_may_begin_it() {
    let drain = post_of("/v2/drain", "", b"");
    with_server(limits(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut stream, &drain).await.status, 401, "who may do everything else may not");
        is_served(&mut stream).await;
    });
    with_gate(gate("operations = ['*']"), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut stream, &bearer(&drain, TOKEN)).await.status, 403);
    });
    with_gate(gate("operations = ['drain']"), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &bearer(&drain, TOKEN)).await;
        assert_eq!((heard.status, heard.header("connection")), (202, Some("close")));
        peer.server.drained().await;
    });
}

#[test]
fn other_tokens_and_limits_hold_from_the_next_request_on() {
    with_gate(gate("operations = ['infer']"), async |address, peer| {
        let good = bearer(&post_of(INFER, "", GOOD.as_bytes()), TOKEN);
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut stream, &good).await.status, 200);
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut held = TcpStream::connect(address).await.unwrap();
        held.write_all(&good).await.unwrap();
        until(|| !peer.kept.borrow().is_empty()).await;

        let new = "[[token]]\nname = 'y'\nsha256 = 'SHA'\nallow.operations = ['infer']".replace("SHA", &"0".repeat(64));
        let grants = toml::from_str::<Clients>(&new).unwrap().grants().unwrap();
        let limits = Limits { body_bytes_max: 10, ..limits() };
        peer.server.reload(Gate { grants, ..open_gate(limits) });
        let heard = ask(&mut stream, &good).await;
        assert_eq!(heard.status, 401, "the connection goes on, the token does not: {heard:?}");

        peer.server.reload(Gate { limits, ..gate("operations = ['infer']") });
        let mut other = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut other, &good).await.status, 413);
        peer.drop_kept();
        assert_eq!(hear(&mut held).await.unwrap().status, 504, "what was under way was answered");
    });
}

#[test]
fn a_frontend_that_an_operator_has_drained_is_not_ready_and_serves() {
    with_server(limits(), async |address, peer| {
        let mut client = TcpStream::connect(address).await.unwrap();
        for (is_drained, status) in [(true, 503), (false, 200)] {
            peer.tell(&SchedulerToFrontend::Drain { is_drained });
            assert_eq!(ask(&mut client, &get_of("/v2/health/ready")).await.status, status);
            assert_eq!(ask(&mut client, &get_of("/v2/models/double/ready")).await.status, 200);
            assert_eq!(ask(&mut client, &post_of(INFER, "", GOOD.as_bytes())).await.status, 200);
        }
    });
}
