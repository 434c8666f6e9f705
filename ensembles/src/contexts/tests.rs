use proptest::prelude::*;
use proto::Span;
use repository::{Agreement, Learning, Policy, Selection};

use super::*;
use crate::selection::Sums;

pub(super) fn kind() -> Arc<Kind> {
    Arc::new(Kind { load: 3, key: "vote".to_owned(), members: 2, block: 10 })
}

fn learner() -> Learner {
    let policy = Policy::Exp4(Learning { eta: 0.5, exploration: 0.0, window: 80 });
    let agreements = vec![Agreement::Argmax];
    Learner::new(&Selection { policy, agreements, defaults: None, confidence: 0.0, reply: Span::ZERO, seed: 0 }, 2)
}

fn named(name: impl ToString) -> Arc<str> {
    name.to_string().into()
}

/// What one context takes, of a name of so many bytes.
fn bytes(name: usize) -> usize {
    bytes_of(&(0, "x".repeat(name).into()), &kind(), false)
}

/// The same where it is exchanged.
pub(super) fn shared_bytes(name: usize) -> usize {
    bytes_of(&(0, "x".repeat(name).into()), &kind(), true)
}

fn select(contexts: &mut Contexts<u32>, client: u32, name: impl ToString) -> Option<(Choice, Place)> {
    let selected = contexts.select((Timestamp(0), client), (&kind(), &named(name)), learner)?;
    Some((selected.choice, selected.place))
}

/// In a context that there is room for.
pub(super) fn select_at(contexts: &mut Contexts<u32>, now: Timestamp, client: u32, name: impl ToString) -> Selected {
    contexts.select((now, client), (&kind(), &named(name)), learner).unwrap()
}

fn observe(contexts: &mut Contexts<u32>, place: &Place, losses: [Option<f64>; 2]) -> Result<(), Unheard> {
    contexts.observe(Timestamp(0), place, (0, 1.0), &losses)
}

#[test]
fn each_context_learns_by_itself() {
    let mut contexts = Contexts::new(1 << 16);
    let (choice, ann) = select(&mut contexts, 1, "ann").unwrap();
    let (_, bob) = select(&mut contexts, 2, "bob").unwrap();
    assert_eq!((choice.request, &choice.weights[..]), (0, &[0.5, 0.5][..]), "equal at first");
    assert_eq!(observe(&mut contexts, &ann, [Some(1.0), Some(0.0)]), Ok(()));
    assert_eq!(observe(&mut contexts, &bob, [Some(0.0), Some(1.0)]), Ok(()));
    let weights = |contexts: &Contexts<u32>, name: &str| contexts.weights(&kind(), &named(name)).unwrap();
    let less = f64::exp(-0.5) / (1.0 + f64::exp(-0.5));
    assert!((weights(&contexts, "ann")[0] - less).abs() < 1e-12 && (weights(&contexts, "bob")[1] - less).abs() < 1e-12);
    let other = Kind { load: 4, ..(*kind()).clone() };
    assert_eq!(contexts.weights(&other, &named("ann")), None, "of another load nothing is known");
    assert_eq!(contexts.observe(Timestamp(0), &ann, (7, 1.0), &[None, None]), Err(Unheard::NoLoss));
    // Whoever names it, it is the same context.
    let (choice, again) = select(&mut contexts, 2, "ann").unwrap();
    assert_eq!((choice.request, again), (1, ann));
}

#[test]
fn contexts_draw_different_members_first() {
    let policy = Policy::Exp3(Learning { eta: 0.1, exploration: 0.1, window: 80 });
    let agreements = vec![Agreement::Argmax];
    let selection = Selection { policy, agreements, defaults: None, confidence: 0.0, reply: Span::ZERO, seed: 0 };
    let mut contexts = Contexts::new(1 << 24);
    let mut first = |name: u32| {
        let fresh = || Learner::new(&selection, 2);
        contexts.select((Timestamp(0), 0), (&kind(), &named(name)), fresh).unwrap().choice.members[0]
    };
    let firsts: usize = (0..1_000).map(&mut first).sum();
    // A standard deviation is 16.
    assert!((430..570).contains(&firsts), "{firsts}");
}

#[test]
fn a_context_that_is_forgotten_hears_nothing_of_its_former_life() {
    let mut contexts = Contexts::new(bytes(1));
    let (_, before) = select(&mut contexts, 1, "a").unwrap();
    let (_, other) = select(&mut contexts, 1, "b").unwrap();
    assert_eq!(observe(&mut contexts, &before, [Some(1.0), None]), Err(Unheard::Old));
    assert_eq!(observe(&mut contexts, &other, [Some(1.0), None]), Ok(()));
    select(&mut contexts, 1, "a").unwrap();
    assert_eq!(observe(&mut contexts, &before, [Some(1.0), None]), Err(Unheard::Old), "it has begun anew");
    assert_eq!(contexts.counts(), Counts { kept: 1, bytes: bytes(1), forgotten: 2, ..Counts::default() });
    // There is room for none that is larger.
    assert!(select(&mut contexts, 1, "too long").is_none());
    assert_eq!(contexts.counts(), Counts { kept: 1, bytes: bytes(1), forgotten: 2, refused: 1, ..Counts::default() });
}

#[test]
fn ten_thousand_contexts_a_second_of_one_client_are_nobody_elses_matter() {
    let max = 100 * bytes(8);
    let mut contexts = Contexts::new(max);
    let others: Vec<Place> =
        (0..20).map(|at| select(&mut contexts, 1 + at % 2, format!("user{at:04}")).unwrap().1).collect();
    for at in 0..10_000 {
        select(&mut contexts, 9, format!("{at:08}")).unwrap();
        assert!(contexts.counts().bytes <= max);
    }
    assert_eq!(contexts.counts().kept, 100);
    for place in &others {
        assert_eq!(observe(&mut contexts, place, [Some(1.0), Some(0.0)]), Ok(()), "{place:?}");
    }
    // The flood's own latest are there.
    assert_eq!((0..10_000).filter(|at| contexts.weights(&kind(), &named(format!("{at:08}"))).is_some()).count(), 80);
    assert!(contexts.weights(&kind(), &named("00009999")).is_some());
}

proptest! {
    /// The oracle looks through a list for who takes the most room, and for what that one has not used for longest.
    #[test]
    fn what_is_kept_is_what_a_list_would_keep(
        uses in prop::collection::vec((0u32..4, 0u32..24), 1..300),
        room in 1usize..12,
    ) {
        let mut contexts = Contexts::new(room * bytes(2));
        let mut list: Vec<(u32, String)> = Vec::new();
        for (client, name) in uses {
            let name = format!("{name:02}");
            let is_there = select(&mut contexts, client, &name).is_some();
            let at = list.iter().position(|(_, other)| *other == name);
            let owner = at.map_or(client, |at| list.remove(at).0);
            list.push((owner, name.clone()));
            if list.len() > room {
                let taken = |owner: u32| list.iter().filter(|(other, _)| *other == owner).count();
                let most = (0..4).max_by_key(|owner| (taken(*owner), *owner)).unwrap();
                let oldest = list.iter().position(|(owner, _)| *owner == most).unwrap();
                list.remove(oldest);
            }
            prop_assert_eq!(is_there, list.iter().any(|(_, other)| *other == name));
            let mut expected: Vec<&str> = list.iter().map(|(_, name)| &name[..]).collect();
            expected.sort_unstable();
            let kept: Vec<&str> = contexts.entries.keys().map(|(_, name)| &name[..]).collect();
            prop_assert_eq!(kept, expected);
            prop_assert_eq!(contexts.counts().bytes, list.len() * bytes(2));
            prop_assert!(contexts.owned.len() <= list.len() && contexts.by_bytes.len() == contexts.owned.len());
        }
    }

    /// The oracle adds up all that was ever said, at once.
    #[test]
    fn sums_are_the_same_in_any_order(
        told in prop::collection::vec((0u64..6, 0u64..3, 0u32..16, any::<bool>()), 0..60),
        order in any::<prop::sample::Index>(),
    ) {
        let of = |&(block, requests, loss, _): &(u64, u64, u32, bool)| Sums {
            requests,
            // Sixteenths add up exactly.
            blocks: [(block, vec![(f64::from(loss) / 16.0, 1), (0.0, 0)])].into(),
        };
        let mut at_once = Sums::default();
        told.iter().for_each(|one| at_once.add(&of(one)));
        // Two have each their own, which are added up from the middle on.
        let (mut one, mut other) = (Sums::default(), Sums::default());
        told.iter().for_each(|item| if item.3 { one.add(&of(item)) } else { other.add(&of(item)) });
        let mut from_middle = Sums::default();
        let middle = order.index(told.len() + 1);
        told[middle..].iter().chain(&told[..middle]).for_each(|item| from_middle.add(&of(item)));
        one.add(&other);
        prop_assert_eq!(&one, &at_once);
        prop_assert_eq!(&from_middle, &at_once);
        let count: u64 = told.len() as u64;
        prop_assert_eq!(at_once.count(), count);
    }
}
