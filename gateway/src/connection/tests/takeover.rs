//! What operators see when one scheduler takes over from another.

use super::*;

async fn metrics(stream: &mut TcpStream, peer: &Peer) -> String {
    // None is as old as that.
    peer.clock.set(peer.clock.get() + Span::from_millis(300));
    String::from_utf8(ask(stream, &get_of("/metrics")).await.body).unwrap()
}

/// Of the gauges and counters that tell of primaries, in the order of the names.
const NAMES: [&str; 7] =
    ["connected", "epoch", "lives_total", "primary", "sessions", "takeover_seconds", "takeovers_total"];

fn one<'a>(text: &'a str, name: &str) -> &'a str {
    let prefix = format!("downbeat_scheduler_{name} ");
    text.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

fn told(text: &str) -> [&str; 7] {
    NAMES.map(|name| one(text, name))
}

/// A request that the scheduler keeps; its connection.
async fn kept(address: SocketAddr, peer: &Peer) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let before = peer.desk.with_core(Core::outstanding);
    peer.fates.borrow_mut().push_back(Fate::Keep);
    stream.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
    while peer.desk.with_core(Core::outstanding) == before || !peer.fates.borrow().is_empty() {
        tokio::task::yield_now().await;
    }
    stream
}

async fn epochs(stream: &mut TcpStream, number: u64) -> Value {
    ask(stream, &get_of(&format!("/debug/requests/{number}"))).await.json()["epochs"].take()
}

#[test]
fn a_takeover_is_measured_and_requests_name_the_epochs_that_they_lived_through() {
    with_schedulers(2, async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(told(&metrics(&mut stream, &peer).await), ["1", "1", "0", "0", "1", "0", "0"]);
        peer.desk.handle_timeout();
        peer.handle_outputs();
        assert_eq!(told(&metrics(&mut stream, &peer).await), ["1", "1", "0", "0", "2", "0", "0"], "the standby");
        is_served(&mut stream).await;
        assert_eq!(epochs(&mut stream, 1).await, json!(["1.0"]));

        let mut over = kept(address, &peer).await;
        peer.disconnect(SCHEDULER);
        assert_eq!(told(&metrics(&mut stream, &peer).await), ["0", "1", "0", "-1", "1", "0", "0"], "nobody");
        peer.take_over();
        assert_eq!(hear(&mut over).await.unwrap().status, 200);
        assert_eq!(epochs(&mut stream, 2).await, json!(["1.0", "2.1"]));
        assert_eq!(told(&metrics(&mut stream, &peer).await), ["1", "2", "0", "1", "1", "0.3", "1"]);
    });
}

#[test]
fn a_planned_takeover_takes_no_time() {
    with_schedulers(2, async |address, peer| {
        peer.desk.handle_timeout();
        peer.handle_outputs();
        peer.take_over();
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(told(&metrics(&mut stream, &peer).await), ["1", "2", "0", "1", "1", "0", "1"]);
    });
}

#[test]
fn a_frontend_that_starts_over_says_so_and_which_epoch_its_requests_were_of() {
    with_schedulers(1, async |address, peer| {
        let mut lost = kept(address, &peer).await;
        peer.disconnect(SCHEDULER);
        assert_eq!(hear(&mut lost).await.unwrap().status, 503);
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(told(&metrics(&mut stream, &peer).await), ["0", "0", "1", "-1", "0", "0", "0"]);
        assert_eq!(epochs(&mut stream, 1).await, json!(["1.0"]));
    });
}

#[test]
fn a_lower_epoch_is_counted_and_not_believed() {
    with_schedulers(1, async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(one(&metrics(&mut stream, &peer).await, "lower_epochs_total"), "0");
        peer.tell(&SchedulerToFrontend::Takeover { epoch: Epoch::NONE });
        let text = metrics(&mut stream, &peer).await;
        assert_eq!(one(&text, "lower_epochs_total"), "1");
        assert_eq!(told(&text), ["1", "1", "0", "0", "1", "0", "0"]);
        is_served(&mut stream).await;
    });
}
