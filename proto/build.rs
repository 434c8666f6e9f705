//! Refuses targets other than Linux in one line, before anything of ours is compiled: all roles need this crate, and
//! this script needs no other, so no error of code that knows Linux alone comes first.
use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Some(refusal) = refusal(&env::var("CARGO_CFG_TARGET_OS").expect("cargo tells build scripts")) {
        println!("cargo::error={refusal}");
    }
}

/// What to do instead, if downbeat does not run there.
fn refusal(os: &str) -> Option<String> {
    let way = "build it in a Linux container or in WSL2, as README.md says under Install";
    (os != "linux").then(|| format!("target: found {os}, expected linux; {way}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_other_than_linux_are_refused_with_the_way_that_there_is() {
        assert_eq!(refusal("linux"), None);
        for os in ["macos", "windows", "freebsd"] {
            let line = refusal(os).unwrap();
            assert!(line.contains(os) && line.contains("container") && line.contains("WSL2"), "{line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }
}
