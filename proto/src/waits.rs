//! Waits of one member on another. Each has a name, a bound, and a count of how often the bound was reached in this
//! process; `docs/threats.md` has the table that a test makes of them. Nothing waits on a peer for longer than is said
//! here: a test finds spans of time in all that the roles link that are neither of these nor known to bound no wait on
//! a peer.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::Span;

macro_rules! waits {
    ($($wait:ident, $name:literal, $ms:literal ms: $what:literal, $then:literal;)*) => {
        /// A wait on a peer.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Wait {
            $(#[doc = $what] $wait,)*
        }

        impl Wait {
            /// All of them, in the order of the table.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$wait),*];

            /// What logs and metrics call it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$wait => $name,)* }
            }

            /// How long it may last.
            #[must_use]
            pub const fn bound(self) -> Span {
                match self { $(Self::$wait => Span::from_millis($ms),)* }
            }

            /// Who waits, and for what.
            #[must_use]
            pub const fn what(self) -> &'static str {
                match self { $(Self::$wait => $what,)* }
            }

            /// What follows if it lasts longer.
            #[must_use]
            pub const fn then(self) -> &'static str {
                match self { $(Self::$wait => $then,)* }
            }
        }
    };
}

waits! {
    Handshake, "handshake", 2_000 ms:
        "either end of a new connection, for the other's proof, offer and queue pair",
        "the connection ends";
    Decision, "decision", 10_000 ms:
        "who has made an offer, for the answer; heartbeats come meanwhile",
        "the connection ends, and is tried again later";
    Heartbeat, "heartbeat", 2_000 ms:
        "either end of a connection, for anything that the other says; heartbeats come every 500 ms",
        "the peer is lost, and what was under way with it";
    Credit, "credit", 1_000 ms:
        "who has a frame or an answer to send, for a credit of a peer that lives, as its heartbeats say",
        "the connection ends; answers that waited there are fenced as those of a broken link";
    Input, "input", 250 ms:
        "a batch, for inputs that are still to come (20 ns more for each byte beyond 1 MiB); and a GPU's buffers, for \
         transfers of a frontend beside others",
        "the batch runs without; tasks of that frontend are given back until its transfers have ended";
    Join, "join", 10_000 ms:
        "a scheduler, for a member that it has welcomed: to connect to all ModelThreads, and to name all models that \
         it hosts",
        "the member is closed";
    Page, "page", 10_000 ms:
        "a scheduler, for a frontend to have read a page of what is told of models",
        "the frontend is closed";
    Link, "link", 2_000 ms:
        "a scheduler, for a new member's links to all others",
        "whoever misses more links than the others is not served, or not used";
    Plan, "plan", 4_000 ms:
        "a ModelThread, for word of a plan that should have ended, or 20 times what it was to take",
        "the backend is closed";
    UnequalPlan, "plan of unequal requests", 64_000 ms:
        "the same, where requests choose what they take",
        "the backend is closed";
    Answers, "answers", 30_000 ms:
        "a ModelThread, for word of a plan's answers, after that of its execution was due",
        "the backend is closed";
    Load, "load", 120_000 ms:
        "a scheduler, for backends to load a model and measure it",
        "nothing has changed; the client is told who was silent";
    Unload, "unload", 30_000 ms:
        "a scheduler, for backends to finish a model's batches",
        "the client is told who was silent; the model is withdrawn all the same";
    TakenOver, "taken over", 50 ms:
        "a new primary, for backends that were there to say what they run",
        "what they run is taken for lost, and fenced";
    HandedOver, "handed over", 1_000 ms:
        "an operator, for all members to obey the new primary",
        "the operator is told how far it is; it goes on";
    Learned, "learned", 100 ms:
        "a scheduler that is to take over, for what the primary has learned",
        "it takes over without";
    Misses, "misses", 20 ms:
        "a standby, for members to say whether they miss the primary",
        "those who are silent do not count";
    Missed, "missed", 5 ms:
        "a member that is asked by a standby, for anything from the primary",
        "it says that it misses the primary";
    Orphan, "orphan", 2_000 ms:
        "a member that has lost its primary, or found none, for another one to claim more",
        "it starts over";
    Announced, "announced", 1_000 ms:
        "a backend, for its new primary to announce the frontends of the former one",
        "their links end";
    Word, "word", 5_000 ms:
        "a frontend, for an answer or a drop, after a request's deadline",
        "the client is answered; the slot stays until its task has ended";
    Written, "written", 500 ms:
        "a frontend, for an answer that a backend says it has written",
        "the request fails, and that backend's link ends for good";
    Change, "change", 300_000 ms:
        "a frontend, for the primary's word of a load or an unload, before which others of the same model may come",
        "the client is told that nobody has said what became of it";
    Shadow, "shadow", 10_000 ms:
        "a frontend, for the answer of a shadow, which has no objective",
        "it counts as late, and its tasks are withdrawn";
    Also, "also", 250 ms:
        "a role whose metrics are asked for, for those of each role in its `admin.also`",
        "its own are told without, and `downbeat_also_up` is 0";
    Operator, "operator", 3_000 ms:
        "`handover`, `drain` or `resume`, for the scheduler's answer",
        "the command fails, and says so";
    Looked, "looked", 5_000 ms:
        "`status`, `top` and their like, for a member's `admin.http`: to connect, and then for all of a page",
        "it is told as a member that does not answer";
}

static REACHED: [AtomicU64; Wait::ALL.len()] = [const { AtomicU64::new(0) }; Wait::ALL.len()];

impl Wait {
    /// One has lasted for as long as it may.
    pub fn note_reached(self) {
        REACHED[self as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How often one has, in this process.
    #[must_use]
    pub fn reached(self) -> u64 {
        REACHED[self as usize].load(Ordering::Relaxed)
    }

    /// All of them as a table of Markdown.
    #[must_use]
    pub fn table() -> String {
        let mut table = "| wait | at most | who waits, and for what | then |\n| --- | --- | --- | --- |\n".to_owned();
        for wait in Self::ALL {
            let (name, bound, what, then) = (wait.name(), wait.bound(), wait.what(), wait.then());
            writeln!(table, "| `{name}` | {bound} | {what} | {then} |").expect("writing to a string cannot fail");
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        fs,
        path::{Path, PathBuf},
    };

    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
    }

    #[test]
    fn the_table_in_the_documents_is_that_of_the_code() {
        let text = fs::read_to_string(root().join("docs/threats.md")).unwrap();
        let table = Wait::table();
        assert!(text.contains(&table), "docs/threats.md must have this table:\n{table}");
        assert_eq!(text.matches("| wait | at most |").count(), 1);
    }

    #[test]
    fn each_wait_has_a_name_of_its_own_and_is_counted() {
        let names: BTreeSet<&str> = Wait::ALL.iter().map(|wait| wait.name()).collect();
        assert_eq!(names.len(), Wait::ALL.len());
        assert!(Wait::ALL.iter().all(|wait| wait.bound() > Span::ZERO));
        let before = Wait::Learned.reached();
        Wait::Learned.note_reached();
        assert!(Wait::Learned.reached() > before);
    }

    /// Spans of time in a file, with what they are: constants by their names, others as they stand there.
    fn spans(text: &str) -> impl Iterator<Item = (&str, &str)> {
        // Tests come last, and wait for what they like.
        let code = text.split("\nmod tests {").next().unwrap_or_default();
        code.lines().map(str::trim_start).filter(|line| !line.starts_with("//")).flat_map(|line| {
            let constant = line.split_once("const ").and_then(|(_, rest)| {
                let (name, rest) = rest.split_once(": ")?;
                let (of, value) = rest.split_once(" =")?;
                let is_span = matches!(of.rsplit("::").next(), Some("Span" | "Duration"));
                is_span.then(|| (name, value.trim_matches([' ', ';'])))
            });
            constant.map_or_else(|| literals(line), |constant| vec![constant])
        })
    }

    fn literals(line: &str) -> Vec<(&str, &str)> {
        let starts = ["Span::from_", "Duration::from_"].into_iter().flat_map(|text| line.match_indices(text));
        let found = starts.filter_map(|(at, _)| {
            let literal = line[at..].split_inclusive(')').next()?;
            let (_, number) = literal.split_once('(')?;
            number.starts_with(|digit: char| digit.is_ascii_digit()).then_some((literal, literal))
        });
        found.collect()
    }

    /// Where modules of a file are that only tests have: their files, and their folders.
    fn only_in_tests(path: &Path, text: &str) -> Vec<PathBuf> {
        let is_root = matches!(path.file_stem().and_then(|stem| stem.to_str()), Some("lib" | "main" | "mod"));
        let folder = if is_root { path.parent().unwrap().to_owned() } else { path.with_extension("") };
        let modules = text.lines().zip(text.lines().skip(1)).filter(|(line, _)| *line == "#[cfg(test)]");
        let names = modules.filter_map(|(_, line)| line.split_once("mod ")?.1.strip_suffix(';'));
        names.flat_map(|name| [folder.join(format!("{name}.rs")), folder.join(name)]).collect()
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let of = |path: PathBuf| match path.is_dir() {
            true => files(&path),
            false => vec![path],
        };
        entries.flat_map(of).collect()
    }

    /// Folders of what runs in a serving process: the roles, and all crates of ours that they link.
    const SERVING: [&str; 16] = [
        "src",
        "proto/src",
        "repository/src",
        "soft-roce/src",
        "transport/src",
        "admin/src",
        "member/src",
        "spsc/src",
        "placement/src",
        "scheduler/src",
        "frontend/src",
        "ensembles/src",
        "gateway/src",
        "lowering/src",
        "cuda/src",
        "backend/src",
    ];
    /// Local clusters, simulators and load: no role has them.
    const TOOLS: &str = "src/tools";

    /// What is in [`SERVING`] and not in tests alone, and where it is from the workspace's root.
    fn serving() -> Vec<(String, String)> {
        let root = root();
        let paths = SERVING.iter().flat_map(|folder| files(&root.join(folder)));
        let is_served = |path: &PathBuf| {
            path.extension().is_some_and(|extension| extension == "rs") && !path.starts_with(root.join(TOOLS))
        };
        let texts: Vec<(PathBuf, String)> =
            paths.filter(is_served).map(|path| (path.clone(), fs::read_to_string(&path).unwrap())).collect();
        let in_tests: Vec<PathBuf> = texts.iter().flat_map(|(path, text)| only_in_tests(path, text)).collect();
        let of = |path: &Path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let is_there = |path: &PathBuf| !in_tests.iter().any(|test| path.starts_with(test));
        texts.into_iter().filter(|(path, _)| is_there(path)).map(|(path, text)| (of(&path), text)).collect()
    }

    #[test]
    fn spans_are_found_by_name_and_without_one() {
        let text = "    pub(crate) const A: Span = Wait::Word.bound();\n// const B: Span = Span::from_millis(1);\n\
            const C: [Span; 2] = [Span::from_millis(2), Span::from_secs_f64(3.5)];\n\
            sleep(Duration::from_millis(4)).await; Duration::from_millis(limit)\n\
            #[cfg(test)]\nmod tests {\n    const D: Duration = Duration::ZERO;\n}\n";
        let names: Vec<&str> = spans(text).map(|(name, _)| name).collect();
        assert_eq!(names, ["A", "Span::from_millis(2)", "Span::from_secs_f64(3.5)", "Duration::from_millis(4)"]);

        let text = "#[cfg(test)]\npub(crate) mod testing;\nmod other;\n#[cfg(test)]\nmod tests;\n";
        let found = |path: &str| only_in_tests(Path::new(path), text);
        let expected = |paths: [&str; 4]| paths.map(PathBuf::from).to_vec();
        assert_eq!(found("a/b.rs"), expected(["a/b/testing.rs", "a/b/testing", "a/b/tests.rs", "a/b/tests"]));
        assert_eq!(found("a/lib.rs"), expected(["a/testing.rs", "a/testing", "a/tests.rs", "a/tests"]));
    }

    /// A crate that roles come to link is looked at, too.
    #[test]
    fn all_that_roles_link_is_looked_at() {
        let roots = ["Cargo.toml"].into_iter().map(str::to_owned);
        let crates = SERVING.iter().filter_map(|folder| folder.strip_suffix("/src"));
        for manifest in roots.chain(crates.map(|name| format!("{name}/Cargo.toml"))) {
            let text = fs::read_to_string(root().join(&manifest)).unwrap();
            let dependencies = text.split("\n[dependencies]\n").nth(1).unwrap_or_default();
            let dependencies = dependencies.split("\n[").next().unwrap_or_default();
            for line in dependencies.lines().filter(|line| !line.contains("optional = true")) {
                let name = line.split([' ', '.']).next().unwrap_or_default();
                let is_ours = !name.is_empty() && root().join(name).join("Cargo.toml").exists();
                let is_looked_at = SERVING.iter().any(|folder| folder.strip_suffix("/src") == Some(name));
                assert!(!is_ours || is_looked_at, "{manifest} links {name}, whose waits nobody looks for");
            }
        }
    }

    /// Whoever adds a span of time to a role says which wait it bounds, or that it bounds none on a peer.
    #[test]
    fn no_wait_on_a_peer_is_without_a_name() {
        let others = include_str!("waits/others.txt");
        let known: BTreeSet<&str> = others.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        let (mut found, mut unnamed, mut named) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
        for (of, text) in serving().iter().filter(|(of, _)| of != "proto/src/waits.rs") {
            named.extend(Wait::ALL.iter().map(|wait| format!("Wait::{wait:?}")).filter(|wait| text.contains(wait)));
            for (name, value) in spans(text) {
                let entry = format!("{of} {name}");
                match value.starts_with("Wait::") {
                    true => {}
                    false if known.contains(&entry[..]) => {
                        found.insert(entry);
                    }
                    false => unnamed.push(format!("{entry} = {value}")),
                }
            }
        }
        assert!(unnamed.is_empty(), "neither waits of proto/src/waits.rs nor in others.txt: {unnamed:#?}");
        let gone: Vec<_> = known.iter().filter(|known| !found.contains(**known)).collect();
        assert!(gone.is_empty(), "others.txt names what is not there: {gone:?}");
        let unused: Vec<_> = Wait::ALL.iter().filter(|wait| !named.contains(&format!("Wait::{wait:?}"))).collect();
        assert!(unused.is_empty(), "no role waits so: {unused:?}");
    }
}
