//! Interleavings of two threads.

use loom::{model::Builder, thread};

use super::*;

/// As many words as make loom meet a torn value, and no more.
const WORDS: usize = 3;
type Reader = LatestReader<WORDS>;

/// All interleavings with so few preemptions that many words do not take hours; each control falls with fewer.
fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

/// What the reader has last seen in slot 0, looking while the writer posts and once more when it is done.
fn last_seen(poll: fn(&mut Reader) -> Option<[u64; WORDS]>) -> u64 {
    let (mut writer, mut reader) = latest(1);
    let posts = thread::spawn(move || {
        writer.post(0, [1; WORDS]);
        writer.post(0, [2; WORDS]);
    });
    let mut seen = 0;
    let mut look = |reader: &mut Reader| {
        while let Some(words) = poll(reader) {
            assert!(words.iter().all(|word| *word == words[0]), "torn: {words:?}");
            assert!(words[0] >= seen, "{} after {seen}", words[0]);
            seen = words[0];
        }
    };
    look(&mut reader);
    posts.join().unwrap();
    look(&mut reader);
    seen
}

#[test]
fn loom_the_last_value_is_always_seen_and_none_is_torn() {
    model(|| assert_eq!(last_seen(|reader| reader.poll().map(|(_, words)| words)), 2));
}

/// Control: clears the flag after the read. A write in between is lost.
fn poll_clearing_late(reader: &mut Reader) -> Option<[u64; WORDS]> {
    while let Some(index) = reader.changed.poll() {
        let slot = &reader.slots.0[index as usize];
        let words = slot.read();
        slot.is_changed.swap(false, Ordering::AcqRel);
        if words.is_some() {
            return words;
        }
    }
    None
}

#[test]
#[should_panic(expected = "left: 1")]
fn loom_control_clearing_the_flag_late_loses_a_value() {
    model(|| assert_eq!(last_seen(poll_clearing_late), 2));
}

/// Control: does not look at the version again. A read that meets a write is torn.
fn poll_unchecked(reader: &mut Reader) -> Option<[u64; WORDS]> {
    let slot = &reader.slots.0[reader.changed.poll()? as usize];
    slot.is_changed.swap(false, Ordering::AcqRel);
    Some(slot.load())
}

#[test]
#[should_panic(expected = "torn")]
fn loom_control_an_unchecked_read_is_torn() {
    model(|| assert_eq!(last_seen(poll_unchecked), 2));
}
