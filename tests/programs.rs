//! Programs of models as real processes (docs/process.md): what they do wrong costs the batch that they have, and
//! nothing else. They are Python without any package, since this must run where there is no other one.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

#[path = "programs/calls.rs"]
mod calls;
#[path = "common/http.rs"]
mod http;
#[path = "programs/metrics.rs"]
mod metrics;
#[path = "programs/python.rs"]
mod python;
#[path = "programs/vote.rs"]
mod vote;

use std::{
    fs,
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, SystemTime},
};

use backend::{
    config::OnnxRuntime,
    error::ExecutorError,
    executor::{Executor, Process, Programs},
};
use repository::Model;
use rustix::process::{Pid, test_kill_process};
use testing::{HANG, eventually};

/// What is done in every test: adds 1 to each byte. `misbehave(batch, number)` is the test's own.
const PROGRAM: &str = r#"
import json, mmap, os, socket, sys, time
def say(message): control.sendall(json.dumps(message).encode() + b"\n")
def answer(batch, **otherwise):
    group, = batch["groups"]
    place, = group["inputs"]
    count = place["bytes"]
    memory[area["offset"]:area["offset"] + count] = bytes((byte + 1) % 256 for byte in memory[:count])
    output = dict(place, **dict({"offset": area["offset"]}, **otherwise))
    say({"done": {"id": batch["id"], "groups": [{"tasks": group["tasks"], "outputs": [output]}]}})
control = socket.socket(fileno=int(os.environ["DOWNBEAT_CONTROL_FD"]))
lines = control.makefile("rb")
told = json.loads(lines.readline())["model"]
area = told["output_area"]
memory = mmap.mmap(int(os.environ["DOWNBEAT_MEMORY_FD"]), told["memory_bytes"])
here = os.path.dirname(os.path.abspath(__file__))
lives = os.path.join(here, "lives")
os.makedirs(lives, exist_ok=True)
life = 1
while True:
    try: os.mkdir(os.path.join(lives, str(life))); break
    except FileExistsError: life += 1
"#;
const LOOP: &str = r#"
say({"ready": {"protocol": 2}})
for number, line in enumerate(lines):
    batch = json.loads(line)["batch"]
    if misbehave(batch, number) is None: answer(batch)
"#;

/// Of the clock that file systems take their times from.
const TICK: Duration = Duration::from_millis(10);

/// A repository with one model, whose program does `misbehave`; its first batch is 0 0 0.
struct Odd {
    folder: tempfile::TempDir,
    programs: Programs,
}

impl Odd {
    fn new(misbehave: &str) -> Self {
        Self::with(&format!("def misbehave(batch, number):\n{misbehave}\n{LOOP}"), "")
    }

    /// The program's text after the common beginning, and further parameters.
    fn with(rest: &str, parameters: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let version = folder.path().join("odd/1");
        fs::create_dir_all(&version).unwrap();
        fs::write(version.join("program.py"), format!("{PROGRAM}{rest}")).unwrap();
        let config = format!(
            r#"backend: "process" max_batch_size: 8
            input {{ name: "x" data_type: TYPE_UINT8 dims: 1 }} output {{ name: "y" data_type: TYPE_UINT8 dims: 1 }}
            parameters {{ key: "program" value {{ string_value: "['python3', '1/program.py']" }} }} {parameters}"#
        );
        fs::write(folder.path().join("odd/config.pbtxt"), config).unwrap();
        Self { folder, programs: Programs::launched_by(env!("CARGO_BIN_EXE_downbeat")) }
    }

    fn model(&self) -> Model {
        repository::load(self.folder.path()).unwrap().whole().unwrap().remove(0)
    }

    fn load(&self) -> Result<Arc<dyn Executor>, ExecutorError> {
        backend::executor::load(&self.model(), (&[0], &1.into()), &OnnxRuntime::default(), &self.programs)
    }

    fn lives(&self) -> usize {
        fs::read_dir(self.folder.path().join("odd/1/lives")).map_or(0, Iterator::count)
    }

    fn began(&self, life: usize) -> SystemTime {
        let folder = self.folder.path().join(format!("odd/1/lives/{life}"));
        fs::metadata(folder).and_then(|found| found.modified()).unwrap()
    }
}

fn run(executor: &dyn Executor, inputs: &[u8]) -> Result<Vec<u8>, String> {
    run_on(0, executor, inputs)
}

fn run_on(gpu: usize, executor: &dyn Executor, inputs: &[u8]) -> Result<Vec<u8>, String> {
    let mut outputs = vec![0; inputs.len()];
    executor.execute_on(gpu, inputs, &mut outputs).map(|_| outputs).map_err(|ExecutorError(reason)| reason)
}

/// The program does this with its second batch; that fails for the reason, and the next one is served by another life.
fn assert_costs_one_batch(misbehave: &str, reason: &str) {
    let odd = Odd::new(&format!("    if number == 1 and life == 1:\n        {misbehave}"));
    let executor = odd.load().unwrap();
    assert_eq!(run(&*executor, &[1, 2, 255]).unwrap(), [2, 3, 0]);
    let found = run(&*executor, &[7]).unwrap_err();
    assert!(found.contains(reason), "found `{found}`, expected `{reason}`");
    eventually("another life", || executor.is_up());
    assert_eq!(run(&*executor, &[9, 9]).unwrap(), [10, 10]);
    assert_eq!(odd.lives(), 2);
}

#[test]
fn one_that_exits_in_a_batch() {
    assert_costs_one_batch("os._exit(3)", "it ended");
}

#[test]
fn one_that_crashes() {
    assert_costs_one_batch("import ctypes; ctypes.string_at(0)", "it ended");
}

#[test]
fn one_that_writes_garbage() {
    assert_costs_one_batch(r#"control.sendall(b"\xff\x00{]\n"); return 0"#, "it wrote `");
}

#[test]
fn one_that_writes_without_an_end() {
    assert_costs_one_batch(r#"while True: control.sendall(b"x" * 4096)"#, "a line of more than 1048576 bytes");
}

#[test]
fn one_that_answers_another_batch() {
    assert_costs_one_batch(r#"batch["id"] += 1; answer(batch); return 0"#, "it answered batch 2, expected 1");
}

#[test]
fn one_that_names_memory_outside_of_its_own() {
    let far = "answer(batch, offset=1 << 40); return 0";
    assert_costs_one_batch(far, "has 1 bytes at 1099511627776, expected 1 in the 64 bytes at 64");
    let inputs = "answer(batch, offset=0); return 0";
    assert_costs_one_batch(inputs, "has 1 bytes at 0, expected 1 in the 64 bytes at 64");
}

#[test]
fn one_that_claims_more_than_there_is() {
    let much = "answer(batch, shape=[1 << 60]); return 0";
    assert_costs_one_batch(much, "output y is UINT8 [1152921504606846976], expected UINT8 [1, 1]");
}

#[test]
fn one_that_says_more_than_it_was_asked() {
    let twice = r#"say({"done": {"id": 1, "groups": [{"tasks": 1}]}})"#;
    assert_costs_one_batch(twice, "it answered with 0 outputs, expected 1");
    let none = r#"say({"done": {"id": 1, "groups": []}})"#;
    assert_costs_one_batch(none, "it answered groups of [] tasks, expected 1 in all");
    let odd = Odd::new("    if number == 0 and life == 1: say({\"ready\": {\"protocol\": 2}})");
    let executor = odd.load().unwrap();
    let found = run(&*executor, &[7]).unwrap_err();
    assert!(found.contains("it said that it has started, expected an answer"), "{found}");
}

#[test]
fn one_that_cannot_run_a_batch_and_says_so_goes_on() {
    let odd = Odd::new(
        r#"    if number == 1: say({"failed": {"id": batch["id"],
        "reason": "no\nluck\u001b" + "x" * 5000}}); return 0"#,
    );
    let executor = odd.load().unwrap();
    run(&*executor, &[1]).unwrap();
    let found = run(&*executor, &[1]).unwrap_err();
    assert!(found.starts_with("no\\nluck\\u{1b}xxx") && found.len() < 1_100, "{found}");
    assert!(executor.is_up());
    assert_eq!(run(&*executor, &[4]).unwrap(), [5]);
    assert_eq!(odd.lives(), 1);
}

/// It is the watchdog that interrupts.
#[test]
fn one_that_hangs_is_killed_when_it_is_interrupted() {
    let hangs = "os.mkdir(os.path.join(here, 'hangs')); time.sleep(3600)";
    let odd = Odd::new(&format!("    if number == 1 and life == 1: {hangs}"));
    let executor = odd.load().unwrap();
    run(&*executor, &[1]).unwrap();
    let (sender, result) = mpsc::channel();
    let other = Arc::clone(&executor);
    let thread = thread::spawn(move || sender.send(run(&*other, &[1])).unwrap());
    eventually("the batch that hangs", || odd.folder.path().join("odd/1/hangs").exists());
    assert!(result.try_recv().is_err(), "it hangs");
    executor.interrupt(0);
    let found = result.recv_timeout(HANG).unwrap().unwrap_err();
    thread.join().unwrap();
    assert!(found.contains("the program of the model failed"), "{found}");
    eventually("another life", || executor.is_up());
    assert_eq!(run(&*executor, &[4]).unwrap(), [5]);
}

/// A task may fail by itself, with a reason of its own.
#[test]
fn one_that_cannot_run_a_task_and_says_so_fails_that_alone() {
    let odd = Odd::new(
        r#"    if number == 1:
        memory[area["offset"]:area["offset"] + 2] = bytes([8, 9])
        rows = [{"datatype": "UINT8", "shape": [1, 1], "offset": area["offset"] + at, "bytes": 1} for at in range(2)]
        say({"done": {"id": batch["id"], "groups": [{"tasks": 1, "outputs": [rows[0]]},
            {"tasks": 2, "failed": "no\nluck" + "x" * 5000}, {"tasks": 1, "outputs": [rows[1]]}]}})
        return 0"#,
    );
    let executor = odd.load().unwrap();
    run(&*executor, &[1]).unwrap();
    let mut outputs = [0; 4];
    let failed = executor.execute(&[1, 2, 3, 4], &mut outputs).unwrap();
    assert_eq!((failed.len(), failed[0].task, failed[1].task), (2, 1, 2));
    assert!(failed[1].reason.starts_with("no\\nluckxxx") && failed[1].reason.len() < 1_100, "{failed:?}");
    assert_eq!((outputs[0], outputs[3]), (8, 9));
    assert_eq!((run(&*executor, &[4]).unwrap(), odd.lives()), (vec![5], 1));
}

/// One that ends as soon as it has said something has said it, however much that is.
#[test]
fn one_that_completes_its_configuration_may_end_at_once() {
    Programs::launched_by(env!("CARGO_BIN_EXE_downbeat")).complete_configurations();
    let odd = Odd::new("");
    let program = r#"
import json, os, socket
control = socket.socket(fileno=int(os.environ["DOWNBEAT_CONTROL_FD"]))
asked = json.loads(control.makefile("rb").readline())["complete"]
assert asked["protocol"] == 2 and asked["config"]["backend"] == "process", asked
tensor = {"name": "x", "data_type": "TYPE_UINT8", "dims": [3]}
config = {"input": [tensor], "output": [tensor], "platform": "x" * 500000}
control.sendall(json.dumps({"config": config}).encode() + b"\n")
os._exit(0)
"#;
    fs::write(odd.folder.path().join("odd/1/program.py"), program).unwrap();
    let config = odd.folder.path().join("odd/config.pbtxt");
    let text = fs::read_to_string(&config).unwrap();
    let parameters = &text[text.find("parameters").unwrap()..];
    fs::write(&config, format!("backend: \"process\" {parameters}")).unwrap();
    assert_eq!(odd.model().input_bytes(), 3);
}

/// What does not fit the memory that it may use is known before it starts.
#[test]
fn tensors_beyond_its_memory_are_refused_with_what_to_change() {
    let parameters = "parameters { key: \"max_bytes\" value { string_value: \"1073741824\" } }";
    let odd = Odd::with("", parameters);
    let config = odd.folder.path().join("odd/config.pbtxt");
    fs::write(&config, fs::read_to_string(&config).unwrap().replace("dims: 1", "dims: -1")).unwrap();
    let error = odd.load().err().unwrap().to_string();
    assert!(
        error.contains("tensors of 8 tasks take 17179869184 bytes") && error.ends_with("or raise memory_mb"),
        "{error}"
    );
    assert_eq!(odd.lives(), 0);
}

#[test]
fn batches_that_find_no_program_fail_at_once() {
    let odd = Odd::with(&format!("{LOOP}    os._exit(1)\n").replace("if misbehave(batch, number) is None: ", ""), "");
    let executor = odd.load().unwrap();
    run(&*executor, &[1]).unwrap();
    let mut failures = 0;
    while executor.is_up() || failures == 0 {
        failures += usize::from(run(&*executor, &[1]).is_err());
    }
    eventually("another life", || run(&*executor, &[1]).is_ok());
}

#[test]
fn one_that_loops_in_crashes_is_started_ever_more_rarely() {
    let odd = Odd::with("if life > 1: os._exit(1)\nsay({'ready': {'protocol': 2}}); lines.readline(); os._exit(1)", "");
    let executor = odd.load().unwrap();
    run(&*executor, &[1]).unwrap_err();
    eventually("the fifth life", || odd.lives() >= 5);
    assert!(!executor.is_up());
    let found = run(&*executor, &[1]).unwrap_err();
    assert!(found.contains("is started again") || found.contains("being started"), "{found}");
    let began: Vec<SystemTime> = (1..=5).map(|life| odd.began(life)).collect();
    // After 0.1, 0.2, 0.4 and 0.8 s, and what starting takes; a folder's time may be a tick of the clock old.
    for (life, least_ms) in [100, 200, 400, 800].into_iter().enumerate() {
        let after = began[life + 1].duration_since(began[life]).unwrap_or_default();
        assert!(after + TICK >= Duration::from_millis(least_ms), "life {} came after {after:?}", life + 2);
    }
}

#[test]
fn what_cannot_start_says_why() {
    let refused = |rest: &str, parameters: &str| {
        let odd = Odd::with(rest, parameters);
        let error = odd.load().err().unwrap().to_string();
        assert!(error.starts_with("model odd: its program: ") && error.lines().count() == 1, "{error}");
        error
    };
    let parameter =
        |key: &str, value: &str| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}");
    let cases = [
        (refused("sys.exit('no weights')", ""), "it ended with exit code 1; its last words: no weights"),
        (refused("say({'refused': 'no weights'}); time.sleep(9)", ""), "no weights"),
        (refused("say({'ready': {'protocol': 1}}); time.sleep(9)", ""), "it speaks protocol 1, expected 2"),
        (refused("say({'config': {}}); time.sleep(9)", ""), "it completed a configuration, expected that it is ready"),
        (refused("time.sleep(3600)", &parameter("start_timeout_ms", "500")), "it was not ready within 500.000 ms"),
        (
            refused("control.sendall(b'hello\\n'); time.sleep(9)", ""),
            "it wrote `hello`, expected a line of docs/process.md",
        ),
        (refused("while True: control.sendall(b'x')", ""), "a line of more than 1048576 bytes"),
        (
            refused("say({'failed': {'id': 0, 'reason': ''}}); time.sleep(9)", ""),
            "it answered a batch that it was not given",
        ),
        (refused("os.kill(os.getpid(), 9); os.abort()", ""), "it ended with "),
        (
            refused("x = bytearray(1 << 30); time.sleep(3)", &parameter("memory_mb", "500")),
            "its last words: MemoryError",
        ),
        (refused("a = [open('/dev/null') for _ in range(99)]", &parameter("files_max", "64")), "Too many open files"),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected), "found `{found}`, expected `{expected}`");
    }
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let odd = Odd::new("    pass");
    let config = odd.folder.path().join("odd/config.pbtxt");
    let text = fs::read_to_string(&config).unwrap().replace("'python3'", "'python-of-nobody'");
    fs::write(&config, text).unwrap();
    let error = odd.load().err().unwrap().to_string();
    assert!(error.contains("cannot start `python-of-nobody`"), "{error}");
}

#[test]
fn a_flood_of_output_does_not_hold_up_batches() {
    let odd = Odd::new("    sys.stdout.write('y\\n' * 10000); sys.stderr.write('z' * 10000)");
    let executor = odd.load().unwrap();
    for _ in 0..20 {
        assert_eq!(run(&*executor, &[1, 2]).unwrap(), [2, 3]);
    }
}

/// What it has started goes with it, even what has a session of its own, where the kernel gives namespaces.
#[test]
fn it_ends_with_its_executor_and_so_does_what_it_has_started() {
    let odd = Odd::with(
        &format!("import subprocess\nsubprocess.Popen(['sleep', '3600'], start_new_session=True)\n{LOOP}")
            .replace("if misbehave(batch, number) is None: ", ""),
        "",
    );
    let folder = odd.folder.path().canonicalize().unwrap();
    let executor = odd.load().unwrap();
    run(&*executor, &[1]).unwrap();
    let started = processes_in(&folder);
    assert!(started.len() >= 2, "{started:?}");
    drop(executor);
    odd.programs.wait_until_ended();
    if namespaces_are_given() {
        eventually("the end of all of them", || started.iter().all(|pid| test_kill_process(*pid).is_err()));
    }
}

/// One that forks without end is stopped by its limit (which the kernel does not hold against root), and then killed
/// with all that it has started.
#[test]
fn a_fork_bomb_ends_with_its_batch() {
    let odd = Odd::with(
        &format!(
            "def misbehave(batch, number):\n    if number != 1 or life != 1: return\n    try:\n        \
             for _ in range(200):\n            if os.fork() == 0: time.sleep(3600)\n    \
             finally: os.mkdir(os.path.join(here, 'forked')); os._exit(1)\n{LOOP}"
        ),
        "parameters { key: \"processes_max\" value { string_value: \"50\" } }",
    );
    let folder = odd.folder.path().canonicalize().unwrap();
    let executor = odd.load().unwrap();
    run(&*executor, &[1]).unwrap();
    // All of them hold the socket open: it is the end of the first that counts, or the watchdog.
    let other = Arc::clone(&executor);
    let batch = thread::spawn(move || run(&*other, &[1]));
    eventually("the end of its forks", || odd.folder.path().join("odd/1/forked").exists() || batch.is_finished());
    eventually("the end of the batch", || {
        executor.interrupt(0);
        batch.is_finished()
    });
    batch.join().unwrap().unwrap_err();
    eventually("another life", || executor.is_up());
    assert_eq!(run(&*executor, &[1]).unwrap(), [2]);
    if namespaces_are_given() {
        eventually("the end of all of them", || processes_in(&folder).len() <= 3);
    }
}

#[test]
fn it_has_no_network_unless_it_is_given() {
    if !namespaces_are_given() {
        testing::skip("tests/programs_network", "namespaces of users");
        return;
    }
    let try_it = "import socket as s\nl = s.socket(); l.bind(('127.0.0.1', 0)); l.listen()\n\
                  s.create_connection(l.getsockname(), 5)\n";
    let refused = Odd::with(try_it, "").load().err().unwrap().to_string();
    assert!(refused.contains("Network is unreachable"), "{refused}");
    let network = "parameters { key: \"network\" value { string_value: \"true\" } }";
    Odd::with(&format!("{try_it}\n{LOOP}"), network).load().unwrap();
}

/// CUDA finds no GPU where `/proc` shows the processes of other namespaces.
#[test]
fn it_finds_itself_in_proc() {
    if !succeeds("unshare", &["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]) {
        testing::skip("tests/programs_proc", "namespaces of users that may mount /proc");
        return;
    }
    let look = "if os.readlink('/proc/self') != str(os.getpid()): sys.exit('it is somebody else')";
    Odd::with(&format!("{look}\n{LOOP}"), "").load().unwrap();
}

/// Each GPU has a process, and one that fails does not keep the others from being used.
#[test]
fn as_many_processes_as_gpus() {
    // The first batch takes until it is told to end, and the second hangs.
    let odd = Odd::new(
        "    first, hangs, end = (os.path.join(here, name) for name in ['first', 'hangs', 'end'])\n    \
         try: os.mkdir(first)\n    except FileExistsError: os.mkdir(hangs); time.sleep(3600)\n    \
         while not os.path.exists(end): time.sleep(0.01)",
    );
    let place = |name: &str| odd.folder.path().join("odd/1").join(name);
    let executor: Arc<dyn Executor> = {
        let model = odd.model();
        let repository::Executor::Process { program, .. } = &model.executor else { panic!("{model:?}") };
        Arc::new(Process::load(&model, program, (2, false), &odd.programs).unwrap())
    };
    assert_eq!(odd.lives(), 2);
    thread::scope(|scope| {
        let first = scope.spawn(|| run_on(0, &*executor, &[1]));
        eventually("the first batch", || place("first").exists());
        let second = scope.spawn(|| run_on(1, &*executor, &[1]));
        eventually("one that hangs", || place("hangs").exists());
        executor.interrupt(1);
        let ended = second.join().unwrap();
        assert!(ended.is_err(), "it hung: {ended:?}");
        fs::create_dir(place("end")).unwrap();
        assert_eq!(first.join().unwrap(), Ok(vec![2]), "what another GPU executes goes on, though it is older");
    });
}

/// Whether the kernel gives this user namespaces.
fn namespaces_are_given() -> bool {
    succeeds("unshare", &["--user", "--net", "--pid", "--fork", "true"])
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    std::process::Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// Processes that run in a folder below this one.
fn processes_in(folder: &Path) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id: &i32| fs::read_link(format!("/proc/{id}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder)))
        .filter_map(Pid::from_raw)
        .collect()
}
