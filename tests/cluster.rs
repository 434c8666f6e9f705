//! The whole fabric as real processes: members are killed, packets lost, and every request must still end once, with
//! the right answer or a reason. Nothing here asserts how long anything takes.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

#[path = "cluster/calls.rs"]
mod calls;
#[path = "cluster/contexts.rs"]
mod contexts;
#[path = "cluster/elastic.rs"]
mod elastic;
#[path = "cluster/failover.rs"]
mod failover;
#[path = "cluster/files.rs"]
mod files;
#[path = "cluster/graphs.rs"]
mod graphs;
#[path = "common/http.rs"]
mod http;
#[path = "cluster/later.rs"]
mod later;
#[path = "cluster/memory.rs"]
mod memory;
#[path = "cluster/shapes.rs"]
mod shapes;
#[path = "cluster/traced.rs"]
mod traced;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    sync::{Mutex, MutexGuard, Once, PoisonError},
    thread,
    time::Duration,
};

use http::{exchange, try_exchange};
use load::{Arrivals, Encoding, Expected, Input, Stream, Tally, Target, Wire, generate, is_ready};
use repository::DataType;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use testing::{HANG, Port, eventually};

/// One cluster at a time: the machine may have two cores.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A cluster under `downbeat up`, and the process ids that it printed.
struct Up {
    child: Child,
    members: BTreeMap<String, Pid>,
    http: Vec<SocketAddr>,
    _ports: Vec<Port>,
    /// Where schedulers are, and their files.
    schedulers: Vec<(SocketAddr, PathBuf)>,
    /// Kept open: a cluster whose output nobody reads any more must not be what ends it.
    stdout: Option<BufReader<ChildStdout>>,
    _config: tempfile::NamedTempFile,
    _alone: MutexGuard<'static, ()>,
}

impl Up {
    /// Starts a cluster of one backend process for each entry of `gpus`, all of which host `model`, or all there are if
    /// it has no name.
    fn start(frontends: usize, model: &str, gpus: &[u32], rest: &str) -> Self {
        Self::start_logging("warn", Stdio::inherit(), (frontends, model, gpus), rest)
    }

    /// The same, with this `RUST_LOG`.
    fn start_logging(level: &str, log: Stdio, layout: (usize, &str, &[u32]), rest: &str) -> Self {
        Self::start_flagged(&[], (level, log), layout, rest)
    }

    /// The same, with these flags.
    fn start_flagged(
        flags: &[&str],
        (level, log): (&str, Stdio),
        (frontends, model, gpus): (usize, &str, &[u32]),
        rest: &str,
    ) -> Self {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let ports: Vec<Port> = (0..frontends).map(|_| Port::hold()).collect();
        let http: Vec<SocketAddr> = ports.iter().map(Port::address).collect();
        let quoted: Vec<String> = http.iter().map(|address| format!("\"{address}\"")).collect();
        let mut config = tempfile::NamedTempFile::new().unwrap();
        writeln!(config, "http = [{}]\ngrpc = []\n{rest}", quoted.join(", ")).unwrap();
        for gpus in gpus {
            let models = if model.is_empty() { String::new() } else { format!("\"{model}\"") };
            writeln!(config, "[[backend]]\ngpus = {gpus}\nmodels = [{models}]").unwrap();
        }
        let mut child = Command::new(env!("CARGO_BIN_EXE_downbeat"))
            .args(["up", "--config"])
            .arg(config.path())
            .args(flags)
            .env("RUST_LOG", level)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let (mut members, mut schedulers) = (BTreeMap::new(), Vec::new());
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while stdout.read_line(&mut line).unwrap() > 0 {
            if line.starts_with("ready") {
                let stdout = Some(stdout);
                let (_ports, _config, _alone) = (ports, config, alone);
                return Self { child, members, http, _ports, schedulers, stdout, _config, _alone };
            }
            if let Some((name, pid)) = process(&line) {
                members.insert(name, pid);
            } else if let Some((address, file)) = line.trim_end().split_once(", --config ") {
                let address = address.split_once(": ").unwrap().1.parse().unwrap();
                schedulers.push((address, file.into()));
            }
            line.clear();
        }
        let ended = child.wait().unwrap();
        panic!("the cluster did not become ready: {ended}");
    }

    fn send(&self, frontend: usize, seconds: f64, stream: &Stream) -> Tally {
        self.send_over(Wire::Http(Encoding::Binary), frontend, seconds, stream)
    }

    /// Every listener answers gRPC, too.
    fn send_over(&self, wire: Wire, frontend: usize, seconds: f64, stream: &Stream) -> Tally {
        self.send_while(wire, (frontend, seconds), stream, |_| {})
    }

    /// The same; `on_progress` is told now and then which part of the load has been sent.
    fn send_while(
        &self,
        wire: Wire,
        (frontend, seconds): (usize, f64),
        stream: &Stream,
        on_progress: impl Fn(f64),
    ) -> Tally {
        let target = Target { wire, ..Target::http(self.http[frontend], Duration::from_secs_f64(seconds), 7) };
        generate(&target, std::slice::from_ref(stream), on_progress).unwrap().remove(0)
    }

    /// Kills a member with SIGKILL when a quarter of the load has been sent.
    fn send_and_kill(&self, frontend: usize, seconds: f64, stream: &Stream, member: &str) -> Tally {
        let (victim, once) = (self.members[member], Once::new());
        self.send_while(Wire::Http(Encoding::Binary), (frontend, seconds), stream, |sent| {
            if sent >= 0.25 {
                once.call_once(|| kill_process(victim, Signal::KILL).unwrap());
            }
        })
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        let _ = self.child.wait();
    }
}

/// A member and its process, if the line tells of one.
fn process(line: &str) -> Option<(String, Pid)> {
    let (name, pid) = line.trim_end().split_once(": process ")?;
    Some((name.to_owned(), Pid::from_raw(pid.parse().unwrap()).unwrap()))
}

/// An objective that no request misses for want of time, however busy the machine is: one that does was lost. A policy
/// that waits until the last moment would leave as little time as with any other one, so this goes with [`EAGER`].
const AMPLE_MS: f64 = 30_000.0;
const EAGER: &str = "policy = 'eager'\n";

/// Requests whose answers name every byte of their input.
fn emulated(rate_rps: f64) -> Stream {
    let models = repository::load("models".as_ref()).unwrap().models;
    let model = models.iter().find(|model| model.name == "resnet50").unwrap();
    let inputs = (0..16u8).map(|number| {
        let data: Vec<u8> = (0..model.input_bytes()).map(|at| (at as u8).wrapping_mul(31) ^ number).collect();
        Input::new("image", DataType::Uint8, &[3, 224, 224], &data, Some(AMPLE_MS), Expected::digest(&data))
    });
    let (arrivals, inputs) = (Arrivals::poisson(rate_rps), inputs.collect());
    Stream { model: "resnet50".into(), arrivals, slo_ms: AMPLE_MS, inputs }
}

/// Each request ended once, and none with a wrong answer or an error that is no reason.
fn assert_accounted_for(tally: &Tally) {
    assert!(tally.sent > 0);
    assert_eq!(tally.ended(), tally.sent, "{tally:?}");
    assert_eq!(tally.wrong, 0, "{tally:?}");
    assert!(tally.errors.is_empty(), "{tally:?}");
    assert!(tally.served > 0, "{tally:?}");
}

#[test]
fn clients_of_a_cluster_may_need_a_token() {
    let token = "[[clients.token]]\nname = \"camera\"\nallow = { operations = [\"infer\", \"metadata\"] }\n\
                 sha256 = \"7b467437ad0215a143a8d995fea9a9e55d93a0c2ff3367e4a7990aec3f6fbd6b\"";
    let up = Up::start(1, "resnet50", &[4], &format!("{EAGER}{token}"));
    assert!(!is_ready(up.http[0], "resnet50"), "a stranger is not told");
    let stranger = up.send(0, 0.5, &emulated(20.0));
    assert_eq!(stranger.errors.values().sum::<u64>(), stranger.sent, "{stranger:?}");
    let known =
        Target { token: Some("open sesame, please".to_owned()), ..Target::http(up.http[0], Duration::from_secs(1), 1) };
    assert_accounted_for(&generate(&known, &[emulated(20.0)], |_| {}).unwrap().remove(0));
}

/// A model that takes 24 ms for one request and has no objective, asked by 64 clients at once: under an objective of
/// 100 ms most of them were lost.
#[test]
fn requests_without_an_objective_wait_for_their_turn() {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path().join("slow");
    std::fs::create_dir_all(folder.join("1")).unwrap();
    let config = "backend: \"emulated\" max_batch_size: 1\n\
                  input { name: \"image\" data_type: TYPE_UINT8 dims: [ 64 ] }\n\
                  output { name: \"digest\" data_type: TYPE_UINT64 dims: [ 2 ] }\n\
                  parameters { key: \"alpha_ms\" value { string_value: \"1\" } }\n\
                  parameters { key: \"beta_ms\" value { string_value: \"23\" } }\n";
    std::fs::write(folder.join("config.pbtxt"), config).unwrap();
    let up = Up::start(1, "slow", &[1], &format!("repository = \"{}\"", repository.path().display()));
    let data = [7; 64];
    let input = Input::new("image", DataType::Uint8, &[64], &data, None, Expected::digest(&data));
    let arrivals = Arrivals::Closed { requests: 64 };
    let stream = Stream { model: "slow".into(), arrivals, slo_ms: f64::INFINITY, inputs: [input].into() };
    for wire in [Wire::Http(Encoding::Binary), Wire::Grpc] {
        let tally = up.send_over(wire, 0, 4.0, &stream);
        assert_accounted_for(&tally);
        assert_eq!(tally.served, tally.sent, "{tally:?}");
    }
}

/// With the scheduler on one thread, and on threads that each have connections of their own.
#[test]
fn a_backend_is_killed_under_load() {
    for scheduler in ["", "model_threads = 2"] {
        let up = Up::start(1, "resnet50", &[4, 4], &format!("{EAGER}{scheduler}"));
        let tally = up.send_and_kill(0, 4.0, &emulated(100.0), "backend-1");
        assert_accounted_for(&tally);
        // What the lost backend held runs again on the other one.
        assert_eq!(tally.served, tally.sent, "{tally:?}");
        assert_accounted_for(&up.send(0, 1.0, &emulated(50.0)));
    }
}

#[test]
fn a_frontend_is_killed_under_load() {
    let up = Up::start(2, "resnet50", &[4], EAGER);
    let rest = thread::scope(|scope| {
        scope.spawn(|| {
            // Its own client sees broken connections; what counts is that the others see nothing.
            let _ = up.send_and_kill(1, 2.0, &emulated(50.0), "frontend-1");
        });
        up.send(0, 4.0, &emulated(50.0))
    });
    eventually("the frontend that is started again", || is_ready(up.http[1], "resnet50"));
    assert_accounted_for(&rest);
    assert_eq!(rest.served, rest.sent, "{rest:?}");
}

#[test]
fn two_percent_of_all_packets_are_lost() {
    let up = Up::start(1, "resnet50", &[8], &format!("{EAGER}faults = {{ loss = 0.02 }}"));
    for wire in [Wire::Http(Encoding::Binary), Wire::Grpc] {
        assert_accounted_for(&up.send_over(wire, 0, 3.0, &emulated(40.0)));
    }
}

#[test]
fn an_idle_cluster_hardly_runs_and_an_interrupt_leaves_nothing_behind() {
    let mut up = Up::start(1, "resnet50", &[1, 8], "");
    // It is ready with one of the backends; the other one may not have begun yet.
    let used = || up.members.values().map(|pid| cpu_seconds(*pid)).sum::<f64>();
    eventually("four seconds in which an idle cluster uses less than 5 % of a CPU", || {
        let before = used();
        thread::sleep(Duration::from_secs(4));
        used() - before < 0.05 * 4.0
    });
    kill_process(Pid::from_child(&up.child), Signal::INT).unwrap();
    assert_eq!(up.child.wait().unwrap().code(), Some(130));
    for (member, pid) in &up.members {
        assert!(test_kill_process(*pid).is_err(), "{member} is still there");
    }
}

/// Sends requests at once, and `then` does something as soon as the first is being answered; yields the status of every
/// answer, none of those that were cut.
fn statuses(address: SocketAddr, requests: usize, then: impl FnOnce()) -> Vec<Option<String>> {
    // Without an objective: what is looked at is whether they are answered, not when.
    let body = std::fs::read_to_string("models/digits/seven.json").unwrap();
    let body = body.replacen('{', "{\"parameters\": {\"background\": true}, ", 1);
    let head =
        format!("POST /v2/models/digits/infer HTTP/1.1\r\nhost: {address}\r\ncontent-length: {}\r\n", body.len());
    let mut streams: Vec<TcpStream> = (0..requests).map(|_| TcpStream::connect(address).unwrap()).collect();
    streams.iter_mut().for_each(|stream| write!(stream, "{head}\r\n{body}").unwrap());
    assert!(streams[0].peek(&mut [0]).is_ok_and(|bytes| bytes > 0), "the first is not answered");
    then();
    let answer = |mut stream: TcpStream| {
        let mut heard = String::new();
        // Unless it is drained the connection stays open.
        stream.set_read_timeout(Some(HANG)).unwrap();
        let _ = stream.read_to_string(&mut heard);
        let (head, body) = heard.split_once("\r\n\r\n")?;
        let length: usize = head.lines().find_map(|line| line.strip_prefix("content-length: "))?.parse().ok()?;
        (body.len() == length).then(|| head[9..12].to_owned())
    };
    streams.into_iter().map(answer).collect()
}

#[test]
fn a_cluster_that_is_told_to_end_answers_every_request_first() {
    let mut up = Up::start(1, "digits", &[1], "");
    let told = Pid::from_child(&up.child);
    let heard = statuses(up.http[0], 32, || kill_process(told, Signal::TERM).unwrap());
    // Those that came before are answered, those that came after are told to go elsewhere.
    assert!(heard.iter().all(|status| matches!(status.as_deref(), Some("200" | "503"))), "{heard:?}");
    assert!(heard.iter().any(|status| status.as_deref() == Some("200")), "{heard:?}");
    assert_eq!(up.child.wait().unwrap().code(), Some(0));
    for (member, pid) in &up.members {
        assert!(test_kill_process(*pid).is_err(), "{member} is still there");
    }
}

#[test]
fn a_frontend_reads_its_tokens_anew_by_one_signal_and_ends_by_another() {
    let ports = [Port::hold(), Port::hold()];
    let [http, nobody] = ports.each_ref().map(Port::address);
    let folder = tempfile::tempdir().unwrap();
    let (token, config) = (folder.path().join("token"), folder.path().join("frontend.toml"));
    std::fs::write(&token, "the-first-of-the-tokens").unwrap();
    let text = format!(
        "scheduler = '{nobody}'\nsecret = 'a secret of enough bytes'\nrepository = 'models'\nhttp = '{http}'\n\
         [[clients.token]]\nname = 'x'\nfile = '{}'\nallow.operations = ['metadata']\n",
        token.display()
    );
    std::fs::write(&config, text).unwrap();
    let mut frontend = Command::new(env!("CARGO_BIN_EXE_downbeat"));
    let mut frontend = frontend.args(["frontend", "--config"]).arg(&config).env("RUST_LOG", "warn").spawn().unwrap();
    let answers = |token: &str, status: &str| {
        let Ok(mut stream) = TcpStream::connect(http) else { return false };
        let request = format!("GET /v2/models/digits HTTP/1.1\r\nhost: {http}\r\nauthorization: Bearer {token}\r\n");
        let mut heard = [0; 12];
        write!(stream, "{request}connection: close\r\n\r\n").is_ok_and(|()| stream.read_exact(&mut heard).is_ok())
            && heard.ends_with(status.as_bytes())
    };
    let until = |token: &str, status: &str| eventually(status, || answers(token, status));
    until("the-first-of-the-tokens", "200");
    std::fs::write(&token, "the-second-of-the-tokens").unwrap();
    kill_process(Pid::from_child(&frontend), Signal::HUP).unwrap();
    until("the-second-of-the-tokens", "200");
    until("the-first-of-the-tokens", "401");
    // What is wrong changes nothing.
    std::fs::write(&token, "short").unwrap();
    kill_process(Pid::from_child(&frontend), Signal::HUP).unwrap();
    until("the-second-of-the-tokens", "200");
    // A file that is replaced is noticed without a signal.
    let next = folder.path().join("next");
    std::fs::write(&next, "the-third-of-the-tokens").and_then(|()| std::fs::rename(&next, &token)).unwrap();
    until("the-third-of-the-tokens", "200");
    until("the-second-of-the-tokens", "401");
    kill_process(Pid::from_child(&frontend), Signal::TERM).unwrap();
    assert_eq!(frontend.wait().unwrap().code(), Some(0));
}

/// User and system time of a process so far (proc_pid_stat(5), fields 14 and 15, in ticks of 10 ms).
fn cpu_seconds(pid: Pid) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    let ticks = after_name.split_whitespace().skip(11).take(2).map(|field| field.parse::<f64>().unwrap());
    ticks.sum::<f64>() / 100.0
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let bad: [(&[&str], &str); 14] = [
        (&["demo", "--policy", "sometimes"], "sometimes"),
        (&["demo", "--fault", "loss=2"], "a probability in 0 to 1"),
        (&["up", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (&["up", "--repository", "/nonexistent"], "/nonexistent: cannot be listed"),
        (&["up", "--schedulers", "0"], "schedulers: expected 1 to 4, found 0"),
        (&["up", "--schedulers", "5"], "schedulers: expected 1 to 4, found 5"),
        (&["demo", "--schedulers", "5"], "--schedulers must be 1 to 4, found 5"),
        (&["demo", "--kill", "scheduler"], "--kill scheduler: expected --schedulers 2 to 4, found 1"),
        (&["demo", "--schedulers", "2", "--kill", "switch"], "expected scheduler"),
        (&["handover", "--to", "127.0.0.1:1", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (&["handover", "--to", "127.0.0.1:1", "--config", "Cargo.toml"], "secret"),
        (&["bench", "load", "--url", "ftp://x", "--model", "m", "--rate", "1"], "--url"),
        (&["bench", "load", "--url", "http://127.0.0.1:1", "--model", "m:1e9"], "--rate: expected 0.001 to 1000000"),
        (&["scheduler", "--config", "Cargo.toml"], "Cargo.toml"),
    ];
    for (args, expected) in bad {
        let output = Command::new(env!("CARGO_BIN_EXE_downbeat")).args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
}
