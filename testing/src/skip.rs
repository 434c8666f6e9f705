//! A test that cannot run says so in one line, and fails where nothing may be skipped that no list names.

use std::{
    collections::BTreeSet,
    env,
    io::Write as _,
    sync::{Mutex, PoisonError},
};

/// Tests that may be skipped where [`STRICT`] is set, and what each lacks: `NAME: WHAT` on a line.
const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../.ci/skips");
/// The environment variable that makes every skip that [`LIST`] does not name a failure.
const STRICT: &str = "DOWNBEAT_NO_SKIPS";

/// Says that the test `name` is skipped since this machine lacks what it `needs`; the caller returns.
///
/// # Panics
/// Where `DOWNBEAT_NO_SKIPS` is set, unless `.ci/skips` names the test with what it needs.
pub fn skip(name: &str, needs: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let line = format!("\nskipped {name}: needs {needs}\n");
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(line.clone()) {
        // Past the capture of `eprintln!`: who runs the tests shall see it, though the test passes. In one piece, on a
        // line of its own: the harness writes meanwhile.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    if env::var_os(STRICT).is_some() {
        let list = std::fs::read_to_string(LIST).unwrap_or_else(|error| panic!("{LIST}: {error}"));
        assert!(is_listed(&list, name, needs), "{name} was skipped: install {needs}, or name it in .ci/skips");
    }
}

fn is_listed(list: &str, name: &str, needs: &str) -> bool {
    let lines: BTreeSet<&str> = list.lines().collect();
    lines.contains(&*format!("{name}: {needs}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_is_listed_with_what_it_needs() {
        let list = "# why\ntests/a: a device\ntests/b: root\n";
        assert!(is_listed(list, "tests/a", "a device") && is_listed(list, "tests/b", "root"));
        assert!(
            !is_listed(list, "tests/a", "root") && !is_listed(list, "tests/", "a") && !is_listed(list, "# why", "")
        );
    }

    #[test]
    fn the_list_can_be_read_and_has_a_need_for_each_name() {
        let list = std::fs::read_to_string(LIST).unwrap();
        for line in list.lines().filter(|line| !line.starts_with('#')) {
            let (name, needs) = line.split_once(": ").unwrap_or_else(|| panic!("`{line}`, expected NAME: WHAT"));
            assert!(!name.contains(' ') && !needs.is_empty(), "`{line}`, expected NAME: WHAT");
        }
    }
}
