//! Names, by resolvers of the tests' own; and routes over loopback.

use std::sync::{
    Condvar,
    atomic::{AtomicUsize, Ordering},
};

use super::*;

fn name(text: &str) -> Address {
    text.parse().unwrap()
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn a_name_is_looked_up_anew_each_time() {
    let count = AtomicUsize::new(0);
    let resolver = Resolver::new(move |host, port| {
        assert_eq!(host, "scheduler.example");
        let host = count.fetch_add(1, Ordering::Relaxed) as u8;
        Ok(vec![SocketAddr::from(([10, 0, 0, host], port))])
    });
    for host in 0..3 {
        let found = resolver.resolve(&name("scheduler.example:7400"));
        assert_eq!(found, Ok(vec![SocketAddr::from(([10, 0, 0, host], 7400))]));
    }
    assert!(resolver.under_way().is_empty());
}

#[test]
fn a_name_that_leads_nowhere_says_why() {
    let resolver = Resolver::new(|host, _| match host {
        "nothing.example" => Ok(Vec::new()),
        _ => Err(io::Error::other("no such host")),
    });
    let error = |text: &str| resolver.resolve(&name(text)).unwrap_err().to_string();
    assert!(error("nothing.example:1").starts_with("found `nothing.example:1`, which resolves to no address"));
    assert!(error("x.example:1").starts_with("found `x.example:1`, which cannot be looked up (no such host)"));
    assert_eq!(resolver.resolve(&name("127.0.0.1:9")), Ok(vec![at("127.0.0.1:9")]), "no resolver is asked");
}

#[test]
fn a_resolver_that_hangs_has_one_thread_for_each_name() {
    let (gate, asked) = (Arc::new((Mutex::new(false), Condvar::new())), Arc::new(AtomicUsize::new(0)));
    let (closed, count) = (Arc::clone(&gate), Arc::clone(&asked));
    let resolver = Resolver::new(move |_, port| {
        count.fetch_add(1, Ordering::Relaxed);
        let (open, opens) = &*closed;
        drop(opens.wait_while(open.lock().unwrap(), |open| !*open).unwrap());
        Ok(vec![SocketAddr::from(([10, 0, 0, 1], port))])
    });
    let (told, tells) = mpsc::channel();
    let look = |text: &str| {
        let told = told.clone();
        resolver.look_up(&name(text), move || told.send(()).unwrap())
    };
    for _ in 0..1_000 {
        assert!(look("a.example:1").answer().is_none());
    }
    let (one, other) = (look("a.example:1"), look("b.example:2"));
    assert_eq!(resolver.under_way()[&name("a.example:1")].len(), 1, "who gave up is forgotten");
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    (0..2).for_each(|_| tells.recv().unwrap());
    assert_eq!(one.answer(), Some(&Ok(vec![at("10.0.0.1:1")])));
    assert_eq!(other.answer(), Some(&Ok(vec![at("10.0.0.1:2")])));
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[test]
fn addresses_of_the_own_family_are_tried_in_turn() {
    let found = [at("[::1]:7"), at("127.0.0.1:7"), at("127.0.0.2:7")];
    let chosen =
        |own: Option<&str>| [0, 1, 2].map(|attempt| choose(&found, own.map(|ip| ip.parse().unwrap()), attempt));
    assert_eq!(chosen(Some("10.0.0.1")), [found[1], found[2], found[1]].map(Some));
    assert_eq!(chosen(Some("fe80::1")), [Some(found[0]); 3]);
    assert_eq!(chosen(None), found.map(Some));
    assert_eq!(
        choose(&found[1..], Some("::1".parse().unwrap()), 1),
        Some(found[2]),
        "another family is better than none"
    );
    assert_eq!(choose(&[], None, 0), None);
}

#[test]
fn the_source_of_the_route_is_this_hosts_address() {
    assert_eq!(source_address("address", &[name("127.0.0.1:7400")]).unwrap(), IpAddr::from([127, 0, 0, 1]));
    let alone = source_address("address", &[]).unwrap_err().to_string();
    assert!(alone.starts_with("address: found `auto`, expected an address"), "{alone}");
    // A broadcast is no peer.
    let refused = source_address("link", &[name("255.255.255.255:7400")]).unwrap_err().to_string();
    assert!(refused.starts_with("link: found `auto` and no route to 255.255.255.255:7400"), "{refused}");
}

#[test]
fn what_may_pass_is_tried_again_until_it_is_over() {
    let late = || OpenError::from(OwnAddressError::Name { key: "link", cause: NameError::Late { name: name("a:1") } });
    let mut attempts = 0;
    let waited = wait_for_names(
        || false,
        || {
            attempts += 1;
            if attempts == 1 { Err(late()) } else { Ok(attempts) }
        },
    );
    assert_eq!(waited.unwrap(), Some(2));
    assert!(wait_for_names(|| true, || Err::<(), _>(late())).unwrap().is_none());
    let alone = || Err::<(), _>(OwnAddressError::Alone { key: "address" }.into());
    assert!(wait_for_names(|| false, alone).is_err(), "no time helps");
}
