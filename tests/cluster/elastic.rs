//! Backends that come and go with the load (`[autoscale]` of `up`).

use std::{
    io::{Seek as _, SeekFrom},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, channel},
    },
    thread::ScopedJoinHandle,
};

use super::*;

/// One GPU answers 20 requests a second, one after the other.
const CONFIG: &str = "backend: \"emulated\" max_batch_size: 1\n\
                      input { name: \"image\" data_type: TYPE_UINT8 dims: [ 64 ] }\n\
                      output { name: \"digest\" data_type: TYPE_UINT64 dims: [ 2 ] }\n\
                      parameters { key: \"alpha_ms\" value { string_value: \"1\" } }\n\
                      parameters { key: \"beta_ms\" value { string_value: \"49\" } }\n";

fn stream(arrivals: Arrivals) -> Stream {
    let data = [7; 64];
    let input = Input::new("image", DataType::Uint8, &[64], &data, Some(AMPLE_MS), Expected::digest(&data));
    Stream { model: "slow".into(), arrivals, slo_ms: AMPLE_MS, inputs: [input].into() }
}

/// All lines up to the first that has this text; nothing if it does not come.
fn until(lines: &Receiver<String>, text: &str) -> Option<Vec<String>> {
    let mut heard = Vec::new();
    while !heard.last().is_some_and(|line: &String| line.contains(text)) {
        heard.push(lines.recv_timeout(HANG).ok()?);
    }
    Some(heard)
}

#[test]
fn backends_come_with_the_load_and_leave_with_it_and_no_request_is_lost() {
    let repository = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(repository.path().join("slow/1")).unwrap();
    std::fs::write(repository.path().join("slow/config.pbtxt"), CONFIG).unwrap();
    let scaled = "autoscale = { gpus = '1..3' }\nadvice = { window_ms = 10000, gpu_comes_after_ms = 0 }";
    let rest = format!("repository = {:?}\n{EAGER}{scaled}", repository.path());
    let mut up = Up::start(1, "slow", &[1], &rest);
    let ((sender, lines), stdout) = (channel(), up.stdout.take().unwrap());
    thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let (is_busy, is_over) = (AtomicBool::new(true), AtomicBool::new(false));
    let (heard, tallies) = thread::scope(|scope| {
        let sends: ScopedJoinHandle<'_, Vec<Tally>> = scope.spawn(|| {
            let mut tallies = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let is_busy = is_busy.load(Ordering::Relaxed);
                // All GPUs that there are, or a quarter of one.
                let arrivals = if is_busy { Arrivals::Closed { requests: 16 } } else { Arrivals::poisson(5.0) };
                tallies.push(up.send(0, 1.0, &stream(arrivals)));
            }
            tallies
        });
        // It is started once the first of those that have come serves.
        let comes = until(&lines, "backend-2: process");
        is_busy.store(false, Ordering::Relaxed);
        let leaves = comes.is_some().then(|| until(&lines, "backend-1 has left")).flatten();
        is_over.store(true, Ordering::Relaxed);
        (comes.zip(leaves), sends.join().unwrap())
    });
    let (comes, leaves) = heard.expect("backends come and leave");
    let starts = |line: &&String| line.contains(" starts: ");
    assert_eq!(comes.iter().filter(starts).count(), 2, "{comes:?}");
    assert_eq!(leaves.iter().filter(starts).count(), 0, "{leaves:?}");
    let left: Vec<_> = leaves.iter().filter(|line| line.contains(" has left; ")).map(|line| &line[..]).collect();
    assert_eq!(left, ["autoscale: backend-2 has left; GPUs here: 2", "autoscale: backend-1 has left; GPUs here: 1"]);
    for tally in tallies {
        assert_accounted_for(&tally);
        assert_eq!(tally.served, tally.sent, "{tally:?}");
    }
}

#[test]
fn the_example_is_taken() {
    let checks = ["up", "--check", "--config", "examples/elastic.toml"];
    let output = Command::new(env!("CARGO_BIN_EXE_downbeat")).args(checks).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("checked, and nothing opened: backends: 1"), "{output:?}");
}

#[test]
fn bounds_that_are_none_are_one_line() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for (text, expected) in [
        ("autoscale = { gpus = '4..2' }", "autoscale.gpus: found `4..2`: expected MIN..MAX"),
        ("autoscale = { gpus = 4 }", "autoscale.gpus"),
        ("autoscale = { gpus = '1..2' }", "backend: found 2 of them, expected one beside [autoscale]"),
        ("advice = { window_ms = 1 }", "advice.window_ms must be 10000 to 3600000, found 1"),
    ] {
        file.as_file().set_len(0).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        writeln!(file, "{text}").unwrap();
        let output =
            Command::new(env!("CARGO_BIN_EXE_downbeat")).args(["up", "--config"]).arg(file.path()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(expected) && stderr.lines().count() == 1, "{stderr}");
    }
}
