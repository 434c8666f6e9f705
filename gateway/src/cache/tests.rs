use std::collections::BTreeSet;

use frontend::tasks::Timing;
use proptest::prelude::*;
use proto::{BackendId, stages::AnswerStamps};

use super::*;

const ONE: Client = Client(1);

fn question(number: u64) -> Question {
    Question(u128::from(number).to_le_bytes())
}

fn reply(outputs: Vec<Bytes>) -> Reply {
    let timing = Timing {
        admitted_at: Timestamp(0),
        deadline: Timestamp(0),
        stamps: AnswerStamps::default(),
        answered_at: Timestamp(0),
        batch_size: 1,
        backend: BackendId(0),
        gpu: 0,
    };
    Reply { outputs, shapes: Vec::new(), rows: 1, timing, batches: Vec::new(), was_late: false }
}

/// An answer that tells which question it is to, and of which asking.
fn answer(question: u64, asking: u64, bytes: usize) -> Reply {
    let told = [question, asking].map(u64::to_le_bytes).concat();
    reply(vec![told.into(), vec![7; bytes].into()])
}

fn asking(turn: Turn) -> Asking {
    match turn {
        Turn::Ask(asking) => asking,
        Turn::Answered(_) => panic!("found an answer, expected a turn"),
        Turn::Wait(_) => panic!("found a wait, expected a turn"),
    }
}

fn waiting(turn: Turn) -> Waiting {
    match turn {
        Turn::Wait(waiting) => waiting,
        _ => panic!("expected a wait"),
    }
}

fn word(waiting: &mut Waiting) -> Option<Word> {
    waiting.word.try_recv().ok()
}

fn place(input: usize, shape: &[usize]) -> Place {
    Place { input, shape: shape.to_vec(), rows: shape[0] }
}

fn rope(pieces: &[&[u8]]) -> Rope {
    let mut rope = Rope::default();
    pieces.iter().for_each(|piece| rope.push(Bytes::copy_from_slice(piece)));
    rope
}

#[test]
fn a_question_is_all_that_decides_and_nothing_else() {
    let digester = Digester::new([1; 16]);
    let of = |numbers: &[u64], inputs: &[(Place, Rope)]| digester.question(numbers, inputs, &[]);
    let (a, b) = ((place(0, &[1, 2]), rope(&[b"ab"])), (place(1, &[1, 1]), rope(&[b"c"])));
    let asked = of(&[5, 6], &[a.clone(), b.clone()]);
    assert_eq!(asked, of(&[5, 6], &[b.clone(), a.clone()]), "in any order");
    let in_pieces = (place(0, &[1, 2]), rope(&[b"a", b"b"]));
    assert_eq!(asked, of(&[5, 6], &[in_pieces, b.clone()]), "in any pieces");
    let moved = [(place(0, &[1, 2]), rope(&[b"a"])), (place(1, &[1, 1]), rope(&[b"bc"]))];
    let swapped = [(place(1, &[1, 2]), rope(&[b"ab"])), (place(0, &[1, 1]), rope(&[b"c"]))];
    let shaped = [(place(0, &[2, 1]), rope(&[b"ab"])), b.clone()];
    let pictured = digester.question(&[5, 6], std::slice::from_ref(&a), &[rope(&[b"c"])]);
    let others = [
        of(&[5, 7], &[a.clone(), b.clone()]),
        of(&[5], &[a.clone(), b.clone()]),
        of(&[5, 6], std::slice::from_ref(&a)),
        of(&[5, 6], &moved),
        of(&[5, 6], &swapped),
        of(&[5, 6], &shaped),
        pictured,
        Digester::new([2; 16]).question(&[5, 6], &[a, b], &[]),
    ];
    let all: BTreeSet<Question> = others.into_iter().chain([asked]).collect();
    assert_eq!(all.len(), 9);
}

#[test]
fn equal_questions_are_asked_once_and_all_get_the_answer() {
    let cache = Cache::new(1 << 20);
    let first = asking(cache.ask(question(1), Timestamp(10)));
    let mut others: Vec<Waiting> = (0..3).map(|_| waiting(cache.ask(question(1), Timestamp(10)))).collect();
    asking(cache.ask(question(2), Timestamp(10)));
    drop(others.remove(1));
    first.answered(&answer(1, 0, 4), ONE);
    for other in &mut others {
        assert!(matches!(word(other), Some(Word::Answered(kept)) if kept.outputs() == answer(1, 0, 4).outputs));
    }
    assert!(matches!(cache.ask(question(1), Timestamp(0)), Turn::Answered(_)));
    assert!(cache.0.borrow().asked.is_empty());
}

/// Whoever waits would otherwise be late because somebody else has time.
#[test]
fn nobody_waits_for_one_with_a_later_deadline() {
    let cache = Cache::new(1 << 20);
    let late = asking(cache.ask(question(1), Timestamp::NEVER));
    let early = asking(cache.ask(question(1), Timestamp(5)));
    let mut waits = [6, 7].map(|until| waiting(cache.ask(question(1), Timestamp(until))));
    drop(early);
    let Some(Word::YourTurn(turn)) = word(&mut waits[0]) else { panic!("the other that asks has a later deadline") };
    assert!(word(&mut waits[1]).is_none());
    drop((turn, late));
    assert!(matches!(word(&mut waits[1]), Some(Word::YourTurn(_))));
}

#[test]
fn an_error_is_nobody_elses_and_whoever_gives_up_passes_its_turn_on() {
    let cache = Cache::new(1 << 20);
    let first = asking(cache.ask(question(1), Timestamp(1)));
    let mut waits: Vec<Waiting> = [9, 3, 5].map(|until| waiting(cache.ask(question(1), Timestamp(until)))).into();
    drop(first);
    // The earliest is told, and gone before it hears of it.
    drop(waits.remove(1));
    assert!(word(&mut waits[0]).is_none());
    let Some(Word::YourTurn(turn)) = word(&mut waits[1]) else { panic!("expected a turn") };
    turn.answered(&answer(1, 7, 0), ONE);
    assert!(matches!(word(&mut waits[0]), Some(Word::Answered(_))));
    drop(waits);
    assert!(cache.0.borrow().asked.is_empty(), "nothing is left behind");
}

#[test]
fn a_storm_of_those_who_give_up_leaves_nothing_behind() {
    let cache = Cache::new(1 << 20);
    let first = asking(cache.ask(question(1), Timestamp(1)));
    for _ in 0..10_000 {
        drop(waiting(cache.ask(question(1), Timestamp(2))));
    }
    assert_eq!(cache.0.borrow().asked[&question(1)].waiting.len(), 0);
    let waits: Vec<Waiting> = (0..10_000).map(|_| waiting(cache.ask(question(1), Timestamp(2)))).collect();
    drop(first);
    drop(waits);
    assert!(cache.0.borrow().asked.is_empty());
}

#[test]
fn what_is_larger_than_all_is_not_kept_and_still_heard() {
    let cache = Cache::new(1_000);
    let first = asking(cache.ask(question(1), Timestamp(1)));
    let mut waits = waiting(cache.ask(question(1), Timestamp(1)));
    first.answered(&answer(1, 0, 4_000), ONE);
    assert!(matches!(word(&mut waits), Some(Word::Answered(_))));
    assert_eq!(cache.bytes(), 0);
    asking(cache.ask(question(1), Timestamp(1)));
}

/// A client that asks for ever new things does not displace what is asked for often.
#[test]
fn a_scan_leaves_what_is_asked_for_again() {
    let cache = Cache::new(100 * 1_000);
    for number in 0..20 {
        asking(cache.ask(question(number), Timestamp(1))).answered(&answer(number, 0, 500), ONE);
    }
    for new in 1_000..20_000 {
        if new % 50 == 0 {
            let hits = (0..20).filter(|&n| matches!(cache.ask(question(n), Timestamp(1)), Turn::Answered(_))).count();
            assert_eq!(hits, 20, "after {new}");
        }
        asking(cache.ask(question(new), Timestamp(1))).answered(&answer(new, 0, 500), ONE);
        assert!(cache.bytes() <= 100 * 1_000);
    }
}

fn answered_for(cache: &Rc<Cache>, client: u64, number: u64, bytes: usize) {
    if let Turn::Ask(asking) = cache.ask(question(number), Timestamp(1)) {
        asking.answered(&answer(number, 0, bytes), Client(client));
    }
}

/// Asked for twice, everything of a scan is kept, and took all that others had asked for.
#[test]
fn one_that_asks_for_everything_twice_takes_its_own_share() {
    let cache = Cache::new(100 * 1_000);
    let hits = |of: std::ops::Range<u64>| of.filter(|&n| cache.0.borrow().kept.peek(&question(n)).is_some()).count();
    (0..20).for_each(|number| answered_for(&cache, 1, number, 500));
    for new in 1_000..6_000 {
        (0..3).for_each(|_| answered_for(&cache, 2, new, 500));
    }
    assert_eq!(hits(0..20), 20);
    // Alone it has it all.
    assert!(cache.bytes() > 90 * 1_000);
    // Whoever comes has a share, too.
    for number in 20..100 {
        answered_for(&cache, 1, number, 500);
    }
    let owned = |client| cache.0.borrow().owned[&Client(client)].bytes;
    assert!(owned(1) > 40 * 1_000 && owned(2) > 30 * 1_000, "{} and {}", owned(1), owned(2));
}

#[test]
fn one_that_is_alone_is_kept_as_if_there_were_no_shares() {
    let cache = Cache::new(100 * 1_000);
    (0..2_000).for_each(|number| answered_for(&cache, 7, number, 500));
    assert!(cache.bytes() > 90 * 1_000);
    assert_eq!(cache.0.borrow().owned.len(), 1);
}

proptest! {
    /// The naive way: what each client has is counted anew from all that is there.
    #[test]
    fn shares_are_counted_right(
        asked in proptest::collection::vec((0..4u64, 0..30u64, 0..900usize), 1..200), max in 0..6_000usize,
    ) {
        let cache = Cache::new(max);
        for (client, number, bytes) in asked {
            let owned = || -> BTreeMap<u64, usize> {
                cache.0.borrow().owned.iter().map(|(client, owned)| (client.0, owned.bytes)).collect()
            };
            let before = owned();
            answered_for(&cache, client, number, bytes);
            let state = cache.0.borrow();
            let mut naive: BTreeMap<Client, (usize, usize)> = BTreeMap::new();
            for (_, entry) in state.kept.iter() {
                let of = naive.entry(entry.client).or_default();
                *of = (of.0 + entry.kept.bytes(), of.1 + 1);
            }
            let counted: BTreeMap<Client, (usize, usize)> =
                state.owned.iter().map(|(client, owned)| (*client, (owned.bytes, owned.questions.len()))).collect();
            prop_assert_eq!(&counted, &naive);
            prop_assert!(state.kept.weight() <= max as u64);
            // Who had more than a share before took nothing of others'.
            if before.get(&client).is_some_and(|bytes| *bytes > share(max)) {
                let is_others = |(other, _): &(u64, usize)| *other != client;
                prop_assert!(owned().into_iter().filter(is_others).eq(before.into_iter().filter(is_others)));
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Ask(u64, i64),
    Answer(prop::sample::Index, usize),
    Fail(prop::sample::Index),
    GiveUp(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        6 => (0..8u64, 0..4i64).prop_map(|(question, until)| Step::Ask(question, until)),
        3 => (index(), 0..600usize).prop_map(|(at, bytes)| Step::Answer(at, bytes)),
        1 => index().prop_map(Step::Fail),
        2 => index().prop_map(Step::GiveUp),
    ]
}

proptest! {
    /// The naive one remembers all answers to each question for ever. Every hit is one of them; nobody waits while
    /// nobody asks; and bytes are within bounds.
    #[test]
    fn a_hit_is_what_was_answered(steps in proptest::collection::vec(step(), 1..150), max in 0..3_000usize) {
        let cache = Cache::new(max);
        let (mut answered, mut asked, mut waits) = (BTreeSet::new(), Vec::<(u64, Asking)>::new(), Vec::new());
        let mut next = 0;
        for step in steps {
            match step {
                Step::Ask(number, until) => match cache.ask(question(number), Timestamp(until)) {
                    Turn::Answered(kept) => prop_assert!(answered.contains(&(number, kept.outputs()))),
                    Turn::Wait(waiting) => waits.push((number, until, waiting)),
                    Turn::Ask(asking) => asked.push((number, asking)),
                },
                Step::Answer(at, bytes) if !asked.is_empty() => {
                    let (number, asking) = asked.remove(at.index(asked.len()));
                    let reply = answer(number, next, bytes);
                    next += 1;
                    asking.answered(&reply, ONE);
                    answered.insert((number, reply.outputs));
                }
                Step::Fail(at) if !asked.is_empty() => drop(asked.remove(at.index(asked.len()))),
                Step::GiveUp(at) if !waits.is_empty() => drop(waits.remove(at.index(waits.len()))),
                _ => {}
            }
            let mut still = Vec::new();
            for (number, until, mut waiting) in waits {
                match word(&mut waiting) {
                    Some(Word::Answered(kept)) => prop_assert!(answered.contains(&(number, kept.outputs()))),
                    Some(Word::YourTurn(asking)) => asked.push((number, asking)),
                    None => still.push((number, until, waiting)),
                }
            }
            waits = still;
            for (number, until, _) in &waits {
                let asks = asked.iter().any(|(other, asking)| other == number && asking.until.0 <= *until);
                prop_assert!(asks, "somebody waits for {} and nobody asks", number);
            }
            prop_assert!(cache.bytes() <= max as u64);
        }
        asked.clear();
        while let Some((_, _, mut waiting)) = waits.pop() {
            drop(word(&mut waiting));
        }
        prop_assert!(cache.0.borrow().asked.is_empty());
    }
}
