use std::{env, fs, path::Path};

use super::{samples::golden, *};

const UPDATE: &str = "UPDATE_GOLDEN";

/// The file that the version is a hash of says what this build's messages look like.
#[test]
fn the_golden_file_is_what_messages_look_like() {
    let now = golden();
    if env::var_os(UPDATE).is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/messages.txt"), now).unwrap();
        return;
    }
    let differs = GOLDEN.lines().zip(now.lines()).find(|(before, now)| before != now);
    assert!(
        now == GOLDEN,
        "messages have changed ({differs:?}), and with them the wire's version: if that is meant, write \
         golden/messages.txt with `{UPDATE}=1 cargo test -p proto wire`, and say so in CHANGELOG.md"
    );
}

/// Names, and what is written around messages, are not on the wire.
#[test]
fn the_version_depends_on_encoded_bytes_and_on_nothing_else() {
    let of = |golden| WireVersion::of(golden, 0);
    assert_eq!(of("Epoch 0102\nEra 03\n"), of("Term 0102\nAge 03\n"));
    assert_eq!(WireVersion::of(GOLDEN, MEANING), WireVersion::THIS);
    let renamed: String = GOLDEN.lines().map(|line| format!("x {}\n", line.split_once(' ').unwrap().1)).collect();
    assert_eq!(WireVersion::of(&renamed, MEANING), WireVersion::THIS);
    let others = ["Epoch 0103\nEra 03\n", "Epoch 01\nEra 0203\n", "Era 03\nEpoch 0102\n", "Epoch 010203\n"];
    others.iter().for_each(|other| assert_ne!(of(other), of("Epoch 0102\nEra 03\n"), "{other}"));
    assert_ne!(WireVersion::of(GOLDEN, MEANING + 1), WireVersion::THIS);
}

/// A change of one digit anywhere is another version.
#[test]
fn any_change_of_a_message_is_another_version() {
    let mut seen = std::collections::BTreeSet::from([WireVersion::THIS.0]);
    for (at, byte) in GOLDEN.bytes().enumerate().step_by(97) {
        if byte.is_ascii_digit() && GOLDEN[..at].rfind(' ') > GOLDEN[..at].rfind('\n') {
            let digit = if byte == b'0' { "1" } else { "0" };
            let changed = [&GOLDEN[..at], digit, &GOLDEN[at + 1..]].concat();
            assert!(seen.insert(WireVersion::of(&changed, MEANING).0), "at {at}");
        }
    }
    assert!(seen.len() > 100);
}

/// Whatever this crate can encode has a line, so nothing that travels is left out.
#[test]
fn every_type_that_can_be_encoded_is_in_the_golden_file() {
    let mut types = 0;
    for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for after in text.split("SchemaWrite)]\n").skip(1) {
            let declared =
                after.lines().find_map(|line| line.strip_prefix("pub struct ").or(line.strip_prefix("pub enum ")));
            let name = declared.and_then(|rest| rest.split(|letter: char| !letter.is_alphanumeric()).next()).unwrap();
            let is_there = |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', ':']));
            // Its constructor checks it, so it has no line of its own, only in offers.
            assert!(name == "LatencyProfile" || GOLDEN.lines().any(is_there), "{name} of {}", path.display());
            types += 1;
        }
    }
    assert!(types > 60, "{types}");
}

/// One connection can carry both because their tags differ.
#[test]
fn messages_to_control_and_to_model_threads_have_tags_of_their_own() {
    let mut found = [0, 0];
    for line in GOLDEN.lines() {
        let (name, digits) = line.split_once(' ').unwrap();
        let (is_to_control, is_to_thread) = (name.contains("ToControl::"), name.contains("ToModelThread::"));
        if is_to_control || is_to_thread {
            let tag = u32::from_str_radix(&digits[..8], 16).unwrap().swap_bytes();
            assert_eq!(tag >= crate::frame::MODEL_THREAD_TAG, is_to_thread, "{line}");
            found[usize::from(is_to_thread)] += 1;
        }
    }
    assert!(found.iter().all(|found| *found > 10), "{found:?}");
}

#[test]
fn a_version_is_shown_short() {
    assert_eq!(WireVersion(0x0123_4567_89ab_cdef).to_string(), "01234567");
}
