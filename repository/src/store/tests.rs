use std::time::{Duration, Instant};

use super::*;

const MODEL: BroughtFile<'_> = BroughtFile { path: "1/model.onnx", bytes: b"one" };

fn kept(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "lock").collect();
    names.sort();
    names
}

/// What is let go of is removed by another thread: waits for it, and fails if it is not for a very long time.
fn wait_until_gone(folder: &Path) {
    let began = Instant::now();
    while !kept(folder).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(300), "{:?} is still there", kept(folder));
        std::thread::yield_now();
    }
}

#[test]
fn files_are_there_as_long_as_anybody_holds_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("made/if/needed");
    // As two processes have it.
    let [frontend, backend] = [(); 2].map(|()| Store::open(&folder).unwrap());
    let first = frontend.keep("m", &[MODEL], 3).unwrap();
    assert_eq!(fs::read(first.root().join("m/1/model.onnx")).unwrap(), b"one");
    assert_eq!(kept(&folder), [first.digest().to_string()]);
    let held = backend.hold(first.digest()).unwrap();
    assert!(held == first && held.root() == first.root());
    drop((first, frontend));
    sweep(&folder).unwrap();
    let again = backend.hold(held.digest()).unwrap();
    drop(held);
    sweep(&folder).unwrap();
    assert!(again.root().join("m/1/model.onnx").is_file(), "the other one still holds it");
    let digest = again.digest();
    drop(again);
    wait_until_gone(&folder);
    let error = backend.hold(digest).unwrap_err().to_string();
    assert!(error.contains(&format!("{digest}: No such file")) && error.lines().count() == 1, "{error}");
}

#[test]
fn what_a_process_left_behind_is_removed_by_the_next_one_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let left = folder.path().join("ab".repeat(32)).join("m/1");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("model.onnx"), "old").unwrap();
    fs::create_dir_all(folder.path().join(UNFINISHED).join("m")).unwrap();
    fs::create_dir_all(folder.path().join("photos")).unwrap();
    fs::write(folder.path().join("cd".repeat(32)), "a file").unwrap();
    let store = Store::open(folder.path()).unwrap();
    assert_eq!(kept(folder.path()), ["cd".repeat(32), "photos".to_owned()]);
    // The last one to end leaves nothing, even if its thread has no turn any more.
    let held = store.keep("m", &[MODEL], 100).unwrap();
    drop(store);
    drop(held);
    assert_eq!(kept(folder.path()), ["cd".repeat(32), "photos".to_owned()]);
}

#[test]
fn the_same_files_are_kept_once_and_all_together_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let labels = BroughtFile { path: "1/labels.txt", bytes: b"x" };
    let first = store.keep("m", &[MODEL, labels], 4).unwrap();
    assert_eq!(store.keep("m", &[labels, MODEL], 4).unwrap(), first, "in whatever order");
    let error = store.keep("n", &[MODEL, labels], 7).unwrap_err().to_string();
    assert!(error.contains("found 4 bytes") && error.contains("at most 7"), "{error}");
    assert_eq!(kept(folder.path()), [first.digest().to_string()], "nothing is left of it");
    let second = store.keep("n", &[MODEL, labels], 8).unwrap();
    assert_ne!(first, second, "another model's are others");
    drop(first);
    let third = store.keep("m", &[MODEL], 7).unwrap();
    assert_ne!(third, second, "what nobody holds any more is not counted");
}

#[test]
fn digests_tell_files_apart_however_they_are_cut() {
    let digest = |model: &str, files: &[(&str, &str)]| {
        let file = |&(path, text): &(&'static str, &'static str)| BroughtFile { path, bytes: text.as_bytes() };
        let files: Vec<(&'static str, &'static str)> =
            files.iter().map(|&(path, text)| (&*path.to_owned().leak(), &*text.to_owned().leak())).collect();
        digest_of(model, &files.iter().map(file).collect::<Vec<_>>())
    };
    let all = [
        digest("m", &[]),
        digest("m", &[("1/a", "bc")]),
        digest("m", &[("1/ab", "c")]),
        digest("m1", &[("/a", "bc")]),
        digest("m", &[("1/a", "b"), ("1/c", "")]),
        digest("m", &[("1/a", ""), ("1/c", "b")]),
    ];
    assert!((0..all.len()).all(|at| !all[..at].contains(&all[at])), "{all:?}");
}

#[test]
fn paths_of_clients_lead_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("store");
    let store = Store::open(&inner).unwrap();
    let long = format!("1/{}", "x".repeat(NAME_BYTES_MAX + 1));
    for path in [
        "",
        "/",
        "1",
        "1/",
        "/1/a",
        "1//a",
        "1/.",
        "1/..",
        "1/.a",
        "../a",
        "../../root/.bashrc",
        "1/../../a",
        "1/b/c",
        "0/a",
        "01/a",
        "-1/a",
        "1x/a",
        "\u{661}/a",
        "1000000000000000000/a",
        "1\\a",
        "1/a\\b",
        "1/a\0",
        "1/a\n",
        "config.pbtxt",
        "warmup/a",
        "/etc/passwd",
        "~/a",
        "1/\u{7f}",
        &long,
    ] {
        let error = store.keep("m", &[BroughtFile { path, bytes: b"x" }], 1000).unwrap_err().to_string();
        let expected = "expected file:<version>/<file>, as in file:1/model.onnx";
        assert!(error.ends_with(expected) && error.lines().count() == 1 && error.len() < 1500, "{path:?}: {error}");
    }
    for model in ["", ".", "..", ".m", "a/b", "a\\b", "a\0", "a\nb", &"m".repeat(NAME_BYTES_MAX + 1)] {
        let error = store.keep(model, &[MODEL], 1000).unwrap_err().to_string();
        assert!(error.starts_with("model: found") && error.lines().count() == 1, "{model:?}: {error}");
    }
    let error = store.keep("m", &[MODEL; FILES_MAX + 1], 10_000).unwrap_err().to_string();
    assert_eq!(error, "parameters: found 257 files, expected at most 256");
    assert!(kept(&inner).is_empty());
    assert_eq!(kept(folder.path()), ["store"]);
    let path = format!("{}/{}", "9".repeat(VERSION_DIGITS_MAX), "x".repeat(NAME_BYTES_MAX));
    assert!(store.keep("m", &[BroughtFile { path: &path, bytes: b"" }], 0).is_ok());
}

#[test]
fn a_model_of_files_needs_a_store_and_is_no_program() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let onnx = crate::onnx::tests::file(&[("x", 1, &[-1, 3])], &[("y", 1, &[-1, 2])], &[]);
    let [python, program] = ["1/model.py", "1/model"].map(|path| BroughtFile { path, bytes: b"#!/bin/sh" });
    let load = |files: &[BroughtFile<'_>], config: &str| {
        let held = store.keep("m", files, 10_000).unwrap();
        let brought = Brought { config: config.to_owned(), files: Some(held.digest()) };
        let source = Source::of(Path::new("/nowhere"), Some(&store), Some(&brought))?;
        crate::load::load_named(&source, "m", Some(config)).map(|mut versions| versions.remove(0))
    };
    let model = load(&[BroughtFile { path: "2/model.onnx", bytes: &onnx }], "{}").unwrap();
    assert_eq!((&model.version[..], model.inputs[0].shape.len()), ("2", 1));
    assert_eq!(model.folder(Path::new("/nowhere")), model.files.as_ref().unwrap().root().join("m"));
    let tensors = r#""input": [{ "name": "x", "dataType": "TYPE_FP32", "dims": [3] }],
        "output": [{ "name": "y", "dataType": "TYPE_FP32", "dims": [3] }]"#;
    for config in [
        "{}".to_owned(),
        r#"{ "backend": "python" }"#.to_owned(),
        format!(r#"{{ "backend": "python", {tensors} }}"#),
        format!(r#"{{ "backend": "process", {tensors} }}"#),
        format!(r#"{{ "parameters": {{ "executor": {{ "string_value": "process" }} }}, {tensors} }}"#),
    ] {
        let error = load(&[python, program], &config).unwrap_err().to_string();
        assert!(error.ends_with("clients bring no programs, as they do not choose what is started"), "{error}");
    }
    let json = format!(r#"{{ "parameters": {{ "program": {{ "string_value": "sh" }} }}, {tensors} }}"#);
    let error = load(&[python], &json).unwrap_err().to_string();
    assert!(error.contains("expected what config.pbtxt says: clients do not choose what is started"), "{error}");
    let brought = Brought { config: "{}".to_owned(), files: Some(FilesDigest([0; 32])) };
    let error = Source::of(Path::new("/nowhere"), None, Some(&brought)).unwrap_err().to_string();
    assert!(error.starts_with("load_files: found none, expected the folder that frontends share"), "{error}");
}
