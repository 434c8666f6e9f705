//! Every interleaving of two threads, with loom; run with `RUSTFLAGS="--cfg loom" cargo test -p scheduler loom`.

use loom::{model, thread};

use super::*;

fn candidate(serial: u32) -> Candidate {
    let at = Timestamp(i64::from(serial));
    Candidate { size: serial, exec_at: at, latest: at, due_at: at, grants_seen: serial }
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
    while let Some([model, ..]) = rank_end.changed.receive() {
        let slot = &rank_end.candidates.slots[model as usize];
        let words = slot.read();
        slot.is_changed.swap(false, Ordering::AcqRel);
        if let Some(words) = words {
            return Some(FromModelThread::Candidate(ModelId(model as u32), decode_candidate(words)));
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
    let [model, ..] = rank_end.changed.receive()?;
    let slot = &rank_end.candidates.slots[model as usize];
    slot.is_changed.swap(false, Ordering::AcqRel);
    let words = load(&slot.words);
    Some(FromModelThread::Candidate(ModelId(model as u32), decode_candidate(words)))
}

#[test]
#[should_panic(expected = "torn")]
fn loom_control_an_unchecked_read_is_torn() {
    model(|| assert_eq!(last_seen(poll_unchecked), 2));
}

#[test]
fn loom_rings_lose_nothing_and_keep_the_order() {
    model(|| {
        let (mut sender, mut receiver) = ring(2);
        let writer = thread::spawn(move || {
            for serial in 1..=2 {
                sender.send([serial, serial, serial]);
            }
        });
        let mut seen = 0;
        let mut look = |receiver: &mut Receiver| {
            while let Some(words) = receiver.receive() {
                seen += 1;
                assert_eq!(words, [seen; 3]);
            }
        };
        look(&mut receiver);
        writer.join().unwrap();
        look(&mut receiver);
        assert_eq!(seen, 2);
    });
}

/// A slot is written again only after it was taken out: the ring of one slot is used twice.
#[test]
fn loom_a_slot_is_reused_only_after_it_was_read() {
    model(|| {
        let (mut sender, mut receiver) = ring(1);
        let (mut back_sender, mut back_receiver) = ring(1);
        let reader = thread::spawn(move || {
            if let Some(words) = receiver.receive() {
                assert_eq!(words, [1; 3]);
                back_sender.send(words);
            }
            if let Some(words) = receiver.receive() {
                assert!(words == [1; 3] || words == [2; 3], "torn: {words:?}");
            }
        });
        sender.send([1; 3]);
        if back_receiver.receive().is_some() {
            sender.send([2; 3]);
        }
        reader.join().unwrap();
    });
}
