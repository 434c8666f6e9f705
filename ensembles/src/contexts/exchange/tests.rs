use std::collections::BTreeMap;

use proptest::prelude::*;
use proto::Span;

use super::{
    super::{Contexts, tests::*},
    *,
};

/// A store as simple as can be: sums by context, and the number of each frontend's last batch.
#[derive(Default)]
struct Store {
    sums: BTreeMap<Arc<str>, Sums>,
    applied: BTreeMap<usize, u64>,
}

impl Store {
    fn take(&mut self, of: usize, batch: &Batch) -> Vec<Option<Read>> {
        let is_new = self.applied.get(&of).is_none_or(|last| *last < batch.number);
        self.applied.insert(of, batch.number);
        let mut read = |item: &Item| {
            let is_stored = item.sums.count() > 0 || self.sums.contains_key(&item.name);
            if is_new && is_stored {
                self.sums.entry(Arc::clone(&item.name)).or_default().add(&item.sums);
            }
            let sums = self.sums.get(&item.name).cloned().unwrap_or_default();
            Some(Read { sums, is_stored })
        };
        batch.items.iter().map(&mut read).collect()
    }
}

fn shared(bytes_max: usize) -> Contexts<u32> {
    let mut contexts = Contexts::new(bytes_max);
    contexts.share();
    contexts
}

fn at(ms: i64) -> Timestamp {
    Timestamp(0) + Span::from_millis(ms)
}

/// Exchanges all that waits, and yields when it is done.
fn settle(contexts: &mut Contexts<u32>, of: usize, store: &mut Store, mut now: Timestamp) -> Timestamp {
    while let Some(due) = contexts.poll_timeout() {
        now = now.max(due);
        let batch = contexts.poll_batch(now).unwrap();
        contexts.handle_exchanged(now, store.take(of, &batch));
    }
    now
}

#[test]
fn what_is_known_is_told_with_its_age_and_nobody_waits() {
    let (mut contexts, mut store) = (shared(1 << 20), Store::default());
    assert_eq!(contexts.poll_timeout(), None);
    assert!(select_at(&mut contexts, at(0), 1, "ann").is_stale, "nothing has been asked yet");
    let batch = contexts.poll_batch(at(0)).unwrap();
    assert_eq!((batch.number, batch.items.len(), contexts.poll_batch(at(0))), (1, 1, None), "one is under way");
    assert!(select_at(&mut contexts, at(1), 1, "ann").is_stale);
    contexts.handle_exchanged(at(2), store.take(0, &batch));
    assert!(!select_at(&mut contexts, at(3), 1, "ann").is_stale);
    assert_eq!(contexts.poll_timeout(), None, "it was asked lately");
    assert!(store.sums.is_empty(), "what has learned nothing is not stored");
    // Feedback goes at once, with all requests so far.
    let place = select_at(&mut contexts, at(3), 1, "ann").place;
    contexts.observe(at(3), &place, (3, 1.0), &[Some(1.0), None]).unwrap();
    assert_eq!(contexts.poll_timeout(), Some(at(7)), "what comes at once goes at once");
    let batch = contexts.poll_batch(at(7)).unwrap();
    assert_eq!((batch.items[0].sums.requests, batch.items[0].sums.count()), (4, 1));
    contexts.handle_exchanged(at(8), store.take(0, &batch));
    assert_eq!((contexts.counts().told, contexts.counts().lost, contexts.counts().is_silent), (1, 0, false));
    // Later it is asked anew, and is stale meanwhile.
    assert!(!select_at(&mut contexts, at(700), 1, "ann").is_stale);
    assert_eq!(contexts.poll_timeout(), Some(at(13)));
    assert!(select_at(&mut contexts, at(1_008), 1, "ann").is_stale);
}

#[test]
fn a_store_that_is_away_is_tried_later_each_time_and_hears_all_once() {
    let (mut contexts, mut store) = (shared(1 << 20), Store::default());
    let place = select_at(&mut contexts, at(0), 1, "ann").place;
    contexts.observe(at(0), &place, (0, 1.0), &[Some(1.0), None]).unwrap();
    let mut now = at(0);
    let mut waits = Vec::new();
    let first = contexts.poll_batch(now).unwrap();
    for _ in 0..10 {
        // It was taken in, but nobody hears of that.
        store.take(0, &first);
        contexts.handle_failed(now);
        contexts.observe(now, &place, (0, 1.0), &[Some(1.0), None]).unwrap();
        let due = contexts.poll_timeout().unwrap();
        waits.push((due - now).as_nanos() / 1_000_000);
        assert_eq!(contexts.poll_batch(Timestamp(due.0 - 1)), None);
        now = due;
        assert_eq!(contexts.poll_batch(now).as_ref(), Some(&first), "the same is sent again");
    }
    assert_eq!(waits, [50, 100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000, 5_000]);
    assert_eq!((contexts.counts().failures, contexts.counts().is_silent), (10, true));
    contexts.handle_exchanged(now, store.take(0, &first));
    settle(&mut contexts, 0, &mut store, now);
    assert_eq!(store.sums["ann"].since(0, 2), [(11.0, 11), (0.0, 0)]);
    assert_eq!((contexts.counts().told, contexts.counts().lost), (11, 0));
}

#[test]
fn what_a_store_never_takes_in_is_counted_as_lost() {
    let mut contexts = shared(2 * shared_bytes(3));
    let feed = |contexts: &mut Contexts<u32>, name: &str| {
        let place = select_at(contexts, at(0), 1, name).place;
        contexts.observe(at(0), &place, (0, 1.0), &[Some(1.0), Some(0.0)]).unwrap();
    };
    ["ann", "bob"].iter().for_each(|name| feed(&mut contexts, name));
    let batch = contexts.poll_batch(at(0)).unwrap();
    // Of one it cannot: its key is something else's.
    contexts.handle_exchanged(at(1), batch.items.iter().map(|_| None).collect());
    assert_eq!((contexts.counts().lost, contexts.counts().told), (4, 0));
    assert!(select_at(&mut contexts, at(2), 1, "ann").is_stale, "what is known counts on");
    assert!(contexts.weights(&kind(), &"ann".into()).unwrap()[0] < 0.5);
    // What is forgotten while it waits is lost, too; and waits no more.
    ["ann", "cid", "dan"].iter().for_each(|name| feed(&mut contexts, name));
    assert_eq!((contexts.counts().lost, contexts.counts().forgotten), (6, 2));
    assert_eq!(contexts.poll_batch(at(9)).unwrap().items.len(), 2);
}

#[test]
fn a_flood_of_contexts_holds_up_nobody_else() {
    let mut contexts = shared(1 << 24);
    let mut store = Store::default();
    (0..2_000).for_each(|name| drop(select_at(&mut contexts, at(0), 9, format!("{name:08}"))));
    select_at(&mut contexts, at(0), 1, "ann");
    let batch = contexts.poll_batch(at(0)).unwrap();
    assert_eq!(batch.items.len(), BATCH_MAX);
    assert!(batch.items.iter().any(|item| &*item.name == "ann"), "clients take turns");
    contexts.handle_exchanged(at(1), store.take(0, &batch));
    settle(&mut contexts, 0, &mut store, at(1));
    assert!(store.sums.is_empty());
}

#[test]
fn a_store_that_has_forgotten_is_believed() {
    let (mut contexts, mut store) = (shared(1 << 20), Store::default());
    let mut now = at(0);
    for _ in 0..3 {
        let selected = select_at(&mut contexts, now, 1, "ann");
        contexts.observe(now, &selected.place, (selected.choice.request, 1.0), &[Some(1.0), None]).unwrap();
        now = settle(&mut contexts, 0, &mut store, now);
    }
    let place = select_at(&mut contexts, now, 1, "ann").place;
    store.sums.clear();
    now += Span::from_millis(600);
    select_at(&mut contexts, now, 1, "ann");
    now = settle(&mut contexts, 0, &mut store, now);
    // What is said of a request that the store knows nothing of counts as of its newest.
    contexts.observe(now, &place, (3, 1.0), &[Some(1.0), None]).unwrap();
    settle(&mut contexts, 0, &mut store, now);
    assert_eq!(store.sums["ann"].since(0, 2), [(1.0, 1), (0.0, 0)]);
}

#[derive(Debug, Clone)]
enum Op {
    Ask { frontend: usize, name: u32, lost: u32 },
    Send { frontend: usize, arrives: bool, is_heard: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let ask = (0usize..2, 0u32..3, 0u32..17).prop_map(|(frontend, name, lost)| Op::Ask { frontend, name, lost });
    let send = (0usize..2, any::<bool>(), any::<bool>()).prop_map(|(frontend, arrives, is_heard)| Op::Send {
        frontend,
        arrives,
        is_heard,
    });
    prop_oneof![2 => ask, 1 => send]
}

proptest! {
    /// The oracle adds up what was counted, whoever was told; batches and answers get lost and are sent again.
    #[test]
    fn frontends_of_one_store_come_to_the_same(ops in prop::collection::vec(op(), 0..80)) {
        let mut frontends = [(); 2].map(|()| shared(1 << 20));
        let (mut store, mut now) = (Store::default(), at(0));
        let mut oracle: BTreeMap<String, Vec<(f64, u64)>> = BTreeMap::new();
        for op in ops {
            now += Span::from_millis(1);
            match op {
                Op::Ask { frontend, name, lost } => {
                    let contexts = &mut frontends[frontend];
                    let selected = select_at(contexts, now, 1, name);
                    // Sixteenths add up exactly.
                    let losses = [Some(f64::from(lost.min(16)) / 16.0), Some(0.5)];
                    contexts.observe(now, &selected.place, (selected.choice.request, 1.0), &losses).unwrap();
                    let sums = oracle.entry(name.to_string()).or_insert_with(|| vec![(0.0, 0); 2]);
                    sums.iter_mut().zip(losses).for_each(|(sum, loss)| {
                        *sum = (sum.0 + loss.unwrap(), sum.1 + 1);
                    });
                }
                Op::Send { frontend, arrives, is_heard } => {
                    let contexts = &mut frontends[frontend];
                    let Some(due) = contexts.poll_timeout() else { continue };
                    now = now.max(due);
                    let batch = contexts.poll_batch(now).unwrap();
                    let known = arrives.then(|| store.take(frontend, &batch));
                    match known.filter(|_| is_heard) {
                        Some(known) => contexts.handle_exchanged(now, known),
                        None => contexts.handle_failed(now),
                    }
                }
            }
        }
        // Each is told what is new at the other, once it is used again.
        for _ in 0..2 {
            for (of, contexts) in frontends.iter_mut().enumerate() {
                now += Span::from_millis(600);
                (0..3).for_each(|name| drop(select_at(contexts, now, 1, name)));
                now = settle(contexts, of, &mut store, now);
            }
        }
        for (name, sums) in &oracle {
            prop_assert_eq!(&store.sums[&**name].since(0, 2), sums);
            let name: Arc<str> = (&**name).into();
            let [one, other] = [0, 1].map(|of| frontends[of].weights(&kind(), &name).unwrap());
            prop_assert_eq!(one, other);
        }
        let told: u64 = frontends.iter().map(|contexts| contexts.counts().told + contexts.counts().lost).sum();
        prop_assert_eq!(told, oracle.values().flatten().map(|(_, count)| count).sum::<u64>());
    }
}
