//! Interleavings of two threads, with loom; run with `RUSTFLAGS="--cfg interleavings" cargo test -p scheduler loom`.

use loom::{model::Builder, thread};

use super::*;

/// All interleavings with so few preemptions that a candidate's many words do not take hours; each control falls with
/// fewer.
fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

fn candidate(serial: u32) -> Candidate {
    let at = Timestamp(i64::from(serial));
    let patience = Span(i64::from(serial));
    let [exec_at, anywhere_at, latest, due_at, expected_at] = [at; 5];
    let (size, grants_seen, traffic) = (serial, serial, None);
    Candidate { size, exec_at, anywhere_at, latest, due_at, grants_seen, expected_at, patience, traffic }
}

fn is_whole(candidate: Candidate) -> bool {
    let serial = candidate.size;
    candidate == self::candidate(serial)
}

/// What the RankThread has last seen of model 0, looking while the ModelThread posts and once more when it is done.
fn last_seen(poll: fn(&mut RankEnd) -> Option<FromModelThread>) -> u32 {
    let (mut model_end, mut rank_end) = link(1);
    let writer = thread::spawn(move || {
        model_end.post_candidate(ModelId(0), Some(candidate(1)));
        model_end.post_candidate(ModelId(0), Some(candidate(2)));
    });
    let mut seen = 0;
    let mut look = |rank_end: &mut RankEnd| {
        while let Some(FromModelThread::Candidate(_, candidate)) = poll(rank_end) {
            let candidate = candidate.expect("only candidates are posted");
            assert!(is_whole(candidate), "torn: {candidate:?}");
            assert!(candidate.size >= seen, "{} after {seen}", candidate.size);
            seen = candidate.size;
        }
    };
    look(&mut rank_end);
    writer.join().unwrap();
    look(&mut rank_end);
    seen
}

#[test]
fn loom_the_last_candidate_is_always_seen_and_none_is_torn() {
    model(|| assert_eq!(last_seen(RankEnd::poll), 2));
}

/// Control: clears the flag after the read. A write in between is lost.
fn poll_clearing_late(rank_end: &mut RankEnd) -> Option<FromModelThread> {
    while let Ok(index) = rank_end.changed.pop() {
        let slot = &rank_end.slots.slots[index as usize];
        let words = slot.read();
        slot.is_changed.swap(false, Ordering::AcqRel);
        if let Some(words) = words {
            return Some(FromModelThread::Candidate(ModelId(0), decode_candidate(words)));
        }
    }
    None
}

#[test]
#[should_panic(expected = "left: 1")]
fn loom_control_clearing_the_flag_late_loses_a_candidate() {
    model(|| assert_eq!(last_seen(poll_clearing_late), 2));
}

/// Control: does not look at the version again. A read that meets a write is torn.
fn poll_unchecked(rank_end: &mut RankEnd) -> Option<FromModelThread> {
    let index = rank_end.changed.pop().ok()?;
    let slot = &rank_end.slots.slots[index as usize];
    slot.is_changed.swap(false, Ordering::AcqRel);
    let words = load(&slot.words);
    Some(FromModelThread::Candidate(ModelId(0), decode_candidate(words)))
}

#[test]
#[should_panic(expected = "torn")]
fn loom_control_an_unchecked_read_is_torn() {
    model(|| assert_eq!(last_seen(poll_unchecked), 2));
}
