//! Whoever keeps the scheduler waiting is closed in the end: it keeps what it was given, and others are told less.

use super::*;
use proto::{Wait, frontend_to_scheduler::FrontendHello, pages::PAGES_UNREAD_MAX};

fn closed(cluster: &mut Cluster, now: Timestamp) -> Vec<Member> {
    cluster.handle_timeout(now);
    let closed = |output| match output {
        ClusterOutput::Close(member, _) => Some(member),
        _ => None,
    };
    drain(cluster).into_iter().filter_map(closed).collect()
}

/// As many models as make more pages than may be unread.
fn many() -> BackendHello {
    let models = (0..1_000).map(|number| model_offer(1, &format!("{number:0200}"), 1));
    BackendHello::new(1, models.collect())
}

#[test]
fn a_backend_that_does_not_offer_what_its_hello_tells_of_is_closed() {
    let mut cluster = scheduler(&config());
    let start = Timestamp(0);
    let slow = cluster.handle_backend_joined(start, BackendHello { more: 3, ..offer(1) }).unwrap().backend;
    let honest = cluster.handle_backend_joined(start, BackendHello { more: 1, ..offer(1) }).unwrap().backend;
    let too_much = cluster.handle_backend_joined(start, BackendHello { more: 1, ..offer(1) }).unwrap().backend;
    let offers = |count: u32| {
        let models = (0..count).map(|number| model_offer(1, &format!("n{number}"), 1)).collect();
        BackendToControl::Offers { models }
    };
    cluster.handle_backend_to_control(start, honest, offers(1)).unwrap();
    let error = cluster.handle_backend_to_control(start, too_much, offers(2)).unwrap_err().to_string();
    assert!(error.contains("it offers 2 models more, expected 1 to 1"), "{error}");
    cluster.handle_disconnected(start, Port::Control, Member::Backend(too_much), error);
    // Each page gives it time for the next.
    let later = start + Wait::Join.bound() - Span(1);
    cluster.handle_backend_to_control(later, slow, offers(1)).unwrap();
    assert_eq!(closed(&mut cluster, later + Span::from_millis(5_000)), []);
    let answers: Vec<_> = drain(&mut cluster).into_iter().collect();
    assert!(answers.is_empty(), "{answers:?}");
    let reached = Wait::Join.reached();
    assert_eq!(closed(&mut cluster, later + Wait::Join.bound()), [Member::Backend(slow)]);
    assert!(Wait::Join.reached() > reached);
    assert_eq!(closed(&mut cluster, later + Wait::Join.bound() * 2), [], "once is enough");
}

#[test]
fn a_frontend_that_reads_no_page_is_told_no_more_and_closed() {
    let mut cluster = scheduler(&config());
    let start = Timestamp(0);
    add_backend(&mut cluster, start, many());
    let hello = || FrontendHello::new("127.0.0.1:1");
    let [silent, reading] =
        [hello(), hello()].map(|hello| cluster.handle_frontend_joined(start, hello).unwrap().frontend);
    let mut told: BTreeMap<FrontendId, (usize, usize)> = BTreeMap::new();
    loop {
        let mut ends = 0;
        for output in drain(&mut cluster) {
            match output {
                ClusterOutput::ToFrontend(_, of, SchedulerToFrontend::Model { .. }) => {
                    told.entry(of).or_default().0 += 1
                }
                ClusterOutput::ToFrontend(_, of, SchedulerToFrontend::PageEnd) => {
                    told.entry(of).or_default().1 += 1;
                    ends += usize::from(of == reading);
                }
                _ => {}
            }
        }
        for _ in 0..ends {
            cluster.handle_frontend_to_control(start, reading, FrontendToControl::PageRead).unwrap();
        }
        if ends == 0 {
            break;
        }
    }
    assert!(told[&silent].1 == PAGES_UNREAD_MAX && told[&silent].0 < 1_000, "{told:?}");
    assert!(told[&reading].0 == 1_000, "{told:?}");
    assert_eq!(closed(&mut cluster, start), []);
    let late = start + Wait::Page.bound();
    assert_eq!(closed(&mut cluster, late - Span(1)), []);
    let reached = Wait::Page.reached();
    assert_eq!(closed(&mut cluster, late + Span::from_millis(1_000)), [Member::Frontend(silent)]);
    assert!(Wait::Page.reached() > reached);
    let unasked = cluster.handle_frontend_to_control(late, reading, FrontendToControl::PageRead);
    assert!(unasked.unwrap_err().to_string().contains("a page that it was not sent"));
}
