//! Every way in which a request that was taken in may end without an answer, in both protocols: status, message, and a
//! connection that goes on.

use prost::Message as _;

use super::{
    grpc::{call, connect, double, framed, head, infer, is_served_here},
    *,
};
use crate::api::RepositoryModelLoadRequest;

/// What both protocols say now, on connections that served before: HTTP's status and gRPC's.
async fn is_refused(
    address: SocketAddr,
    status: (u16, u16),
    expected: &str,
    prepare: impl Fn(),
) -> (TcpStream, h2::client::SendRequest<Bytes>) {
    let (mut stream, mut client) = (TcpStream::connect(address).await.unwrap(), connect(address).await);
    prepare();
    let heard = ask(&mut stream, &post_of(INFER, "", GOOD.as_bytes())).await;
    assert_eq!((heard.status, heard.header("retry-after").is_some()), (status.0, status.0 == 503), "{heard:?}");
    assert!(heard.json()["error"].as_str().unwrap().contains(expected), "{heard:?}, expected {expected}");
    prepare();
    let (found, text, _) = infer(&mut client, &double(&[1, 2, 3, 4])).await;
    assert!(found == status.1 && text.contains(expected), "found {found} '{text}', expected {} {expected}", status.1);
    (stream, client)
}

#[test]
fn each_end_of_a_task_has_its_status_and_the_connection_goes_on() {
    use DropReason::{BackendLost, Cancelled, Deadline, NoBackend, QueueFull, Unloaded};
    with_server(limits(), async |address, peer| {
        let ends = [
            (Fate::Drop(Deadline), (504, 4), "dropped: Request timeout expired: its deadline could no longer be met"),
            (Fate::Drop(QueueFull), (503, 14), "dropped: Exceeds maximum queue size: the model's queue is full"),
            (Fate::Drop(NoBackend), (503, 14), "dropped: no backend hosts the model now"),
            (Fate::Drop(Cancelled), (503, 1), "dropped: it was cancelled"),
            (Fate::Drop(Unloaded), (503, 14), "dropped: the model was unloaded"),
            (Fate::Drop(BackendLost), (504, 4), "dropped: its backend failed and its deadline left no time"),
            (Fate::Answer(AnswerStatus::WindowMissed, ""), (504, 4), "the backend could not start its batch in time"),
            (
                Fate::Answer(AnswerStatus::Failed, "no memory"),
                (500, 13),
                "Failed to process the request(s) for model in its backend",
            ),
            (Fate::Answer(AnswerStatus::Done, "xyz"), (502, 13), "the backend's answer is malformed"),
        ];
        for (fate, status, expected) in ends {
            let prepare = || peer.fates.borrow_mut().push_back(fate);
            let (mut stream, mut client) = is_refused(address, status, expected, prepare).await;
            is_served(&mut stream).await;
            is_served_here(&mut client).await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_model_that_nobody_hosts_is_refused_until_somebody_does() {
    with_server(limits(), async |address, peer| {
        let gone = || peer.tell_gpus(0);
        let (mut stream, mut client) =
            is_refused(address, (503, 14), "no backend hosts model 'double' now", gone).await;
        peer.tell_gpus(1);
        is_served(&mut stream).await;
        is_served_here(&mut client).await;
    });
}

#[test]
fn without_a_scheduler_what_is_open_ends_and_what_comes_is_refused() {
    with_server(limits(), async |address, peer| {
        let (mut stream, mut client) = (TcpStream::connect(address).await.unwrap(), connect(address).await);
        peer.fates.borrow_mut().extend([Fate::Keep; 2]);
        stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        let kept = async {
            while peer.kept.borrow().len() < 2 {
                tokio::task::yield_now().await;
            }
            peer.disconnect(SCHEDULER);
            let mut other = TcpStream::connect(address).await.unwrap();
            ask(&mut other, &post_of(INFER, "", GOOD.as_bytes())).await
        };
        let message = double(&[1, 2, 3, 4]);
        let ((status, text, _), refused) = tokio::join!(infer(&mut client, &message), kept);
        let lost = "the connection to the scheduler was lost while the request was outstanding";
        assert_eq!((status, text.as_str()), (14, lost));
        let heard = hear(&mut stream).await.unwrap();
        assert_eq!((heard.status, &heard.json()["error"]), (503, &json!(lost)));
        assert_eq!(refused.status, 503);
        is_refused(address, (503, 14), "the frontend has no scheduler now", || ()).await;
        let heard = ask(&mut stream, &get_of("/v2/health/live")).await;
        assert_eq!((heard.status, heard.json()["ready"].clone()), (200, json!(false)), "the connection goes on");
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_task_that_nobody_speaks_of_is_given_up_after_its_deadline() {
    with_server(limits(), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        peer.fates.borrow_mut().push_back(Fate::Keep);
        stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        while peer.kept.borrow().is_empty() {
            tokio::task::yield_now().await;
        }
        peer.clock.set(Timestamp(1_000) + Span::from_millis(5_025));
        peer.desk.handle_timeout();
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
        let heard = hear(&mut stream).await.unwrap();
        let expected = "neither an answer nor a drop came within 5.000 s after the deadline";
        assert_eq!((heard.status, &heard.json()["error"]), (504, &json!(expected)));
        is_served(&mut stream).await;
    });
}

#[test]
fn clients_that_wait_for_loads_are_bounded() {
    with_server(Limits { requests_max: 1000, client_requests_max: 1000, ..limits() }, async |address, peer| {
        *peer.changes.borrow_mut() = Some(Vec::new());
        let mut client = connect(address).await;
        let load = RepositoryModelLoadRequest { model_name: "double".to_owned(), ..Default::default() };
        let load = framed(false, &load.encode_to_vec());
        let mut open = Vec::new();
        for waiting in 1..=256 {
            std::future::poll_fn(|context| client.poll_ready(context)).await.unwrap();
            let request = head("RepositoryModelLoad").body(()).unwrap();
            let (response, mut stream) = client.send_request(request, false).unwrap();
            stream.send_data(load.clone(), true).unwrap();
            open.push(response);
            while peer.changes.borrow().as_ref().unwrap().len() < waiting {
                tokio::task::yield_now().await;
            }
        }
        let expected = "too many clients wait for models to be loaded or unloaded; try again";
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = post_of("/v2/repository/models/double/load", "", b"");
        let heard = ask(&mut stream, &request).await;
        assert_eq!((heard.status, heard.header("retry-after")), (503, Some("1")), "{heard:?}");
        assert_eq!(heard.json()["error"], expected);
        let mut other = connect(address).await;
        let (status, text, _) = call(&mut other, head("RepositoryModelLoad").body(()).unwrap(), load).await;
        assert_eq!((status, text.as_str()), (8, expected));
        is_served(&mut stream).await;

        let waiting = peer.changes.borrow_mut().take().unwrap();
        waiting.into_iter().for_each(|change| peer.tell(&SchedulerToFrontend::ModelChanged { change, refused: None }));
        assert_eq!(ask(&mut stream, &request).await.status, 200);
        drop(open);
    });
}
