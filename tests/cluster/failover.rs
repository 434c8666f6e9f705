//! Schedulers that die, stand still and are relieved under load, and members that are started again.

use std::{
    net::TcpListener,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, channel},
    },
};

use super::*;

const MEMBERS: usize = 3;
/// No busy machine keeps a primary from its heartbeat for so long: it is relieved when a test says so, and only then.
const SUSPECT_MS: u32 = 2_000;

/// A cluster with a standby, and what it says.
struct Cluster {
    up: Up,
    /// What `up` says, and what its members log.
    said: Receiver<String>,
    primary: Primary,
}

/// Number and position of an epoch.
type Primary = (u32, usize);

impl Cluster {
    /// Two schedulers, a frontend and two backends; both schedulers have all of them as members.
    fn start(model_threads: &str) -> Self {
        let rest = format!("{EAGER}schedulers = 2\nsuspect_ms = {SUSPECT_MS}\n{model_threads}");
        let level = "warn,scheduler=info";
        let mut up = Up::start_logging(level, Stdio::piped(), (1, "resnet50", &[2, 2]), &rest);
        let (say, said) = channel();
        let out: Box<dyn Read + Send> = Box::new(up.stdout.take().unwrap());
        let log: Box<dyn Read + Send> = Box::new(up.child.stderr.take().unwrap());
        for output in [out, log] {
            let say = say.clone();
            thread::spawn(move || {
                for line in BufReader::new(output).lines() {
                    let _ = say.send(line.unwrap());
                }
            });
        }
        let mut cluster = Self { up, said, primary: (0, 0) };
        // Members join both, in whatever order.
        cluster.hear(&[("all members obey", 1), (" joined ", 2 * MEMBERS)]);
        cluster
    }

    /// Reads on until what was said had each of these texts so many times, in whatever order.
    fn hear(&mut self, texts: &[(&str, usize)]) {
        let mut missing = texts.to_vec();
        while !missing.is_empty() {
            let line = self.said.recv_timeout(HANG).unwrap_or_else(|_| panic!("waiting in vain for {missing:?}"));
            // Shown if the test fails.
            println!("{line}");
            if let Some((name, pid)) = process(&line) {
                self.up.members.insert(name, pid);
            }
            if let Some((_, rest)) = line.split_once("all members obey").and_then(|(_, rest)| rest.split_once("epoch="))
            {
                let (number, index) = rest.split_whitespace().next().unwrap().split_once('.').unwrap();
                self.primary = self.primary.max((number.parse().unwrap(), index.parse().unwrap()));
            }
            if let Some(found) = missing.iter_mut().find(|(text, _)| line.contains(text)) {
                found.1 -= 1;
            }
            missing.retain(|(_, count)| *count > 0);
        }
    }

    fn scheduler(&self, index: usize) -> Pid {
        self.up.members[&format!("scheduler-{index}")]
    }

    /// The primary is killed, another one takes over, and the first one comes back as a standby of all members.
    fn kill(&mut self) {
        let (before, index) = self.primary;
        let name = format!("scheduler-{index}: process ");
        kill_process(self.scheduler(index), Signal::KILL).unwrap();
        self.hear(&[("all members obey", 1), (&name, 1), ("the scheduler is up", 1), (" joined ", MEMBERS)]);
        assert!(self.primary.0 > before && self.primary.1 != index, "{before}.{index}, then {:?}", self.primary);
    }

    /// The primary stands still until another one has taken over, and goes on as a standby of all members.
    fn stop(&mut self) {
        let (before, index) = self.primary;
        kill_process(self.scheduler(index), Signal::STOP).unwrap();
        self.hear(&[("all members obey", 1)]);
        kill_process(self.scheduler(index), Signal::CONT).unwrap();
        self.hear(&[(" joined ", MEMBERS)]);
        assert!(self.primary.0 > before && self.primary.1 != index, "{before}.{index}, then {:?}", self.primary);
    }

    /// Sends load all the while that `disturb` takes; yields what became of it, one tally after the other.
    fn send_while(&mut self, stream: &Stream, disturb: impl FnOnce(&mut Self)) -> Vec<Tally> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, stream, http) = (Arc::clone(&is_over), stream.clone(), self.up.http[0]);
        let (tell, told) = channel();
        let load = thread::spawn(move || {
            let mut tallies = Vec::new();
            while !over.load(Ordering::Relaxed) {
                let target = Target::http(http, Duration::from_secs(2), 7);
                let on_progress = |sent| {
                    let _ = tell.send(sent);
                };
                tallies.push(generate(&target, std::slice::from_ref(&stream), on_progress).unwrap().remove(0));
            }
            tallies
        });
        told.iter().find(|sent| *sent > 0.25).expect("the load goes on");
        disturb(self);
        is_over.store(true, Ordering::Relaxed);
        load.join().unwrap()
    }

    /// `downbeat handover` to this scheduler: what it says and its exit code.
    fn hand_over(&self, index: usize) -> (String, Option<i32>) {
        let (address, config) = &self.up.schedulers[index];
        hand_over(*address, config)
    }
}

fn hand_over(to: SocketAddr, config: &Path) -> (String, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat"));
    let output = command.args(["handover", "--to", &to.to_string(), "--config"]).arg(config).output().unwrap();
    (String::from_utf8([output.stdout, output.stderr].concat()).unwrap(), output.status.code())
}

/// A member's file, with other values for some keys.
fn changed(file: &Path, keys: &[(&str, toml::Value)]) -> tempfile::NamedTempFile {
    let mut table: toml::Table = std::fs::read_to_string(file).unwrap().parse().unwrap();
    table.extend(keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    let mut changed = tempfile::NamedTempFile::new().unwrap();
    changed.write_all(toml::to_string(&table).unwrap().as_bytes()).unwrap();
    changed
}

/// Answers whoever connects as a scheduler of the next release would: with the same preface but for its version.
fn of_another_release() -> SocketAddr {
    const PREFACE_BYTES: usize = 8 + 2 + 8 + 32;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, mut preface) = (stream.unwrap(), [0; PREFACE_BYTES]);
            stream.read_exact(&mut preface).unwrap();
            preface[9] += 1;
            stream.write_all(&preface).unwrap();
            // Its end shows that the other one has read it.
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    address
}

#[test]
fn schedulers_are_killed_and_stand_still_and_no_request_is_lost() {
    for model_threads in ["", "model_threads = 2"] {
        let mut cluster = Cluster::start(model_threads);
        let tallies = cluster.send_while(&emulated(60.0), |cluster| {
            (0..3).for_each(|_| cluster.kill());
            cluster.stop();
        });
        let (mut sent, mut served) = (0, 0);
        for tally in &tallies {
            assert_accounted_for(tally);
            (sent, served) = (sent + tally.sent, served + tally.served);
        }
        // Some may have had no time left.
        assert!(served * 4 >= sent * 3, "{tallies:?}");
    }
}

#[test]
fn an_operator_moves_the_primary_and_no_request_fails() {
    let mut cluster = Cluster::start("");
    let tallies = cluster.send_while(&emulated(60.0), |cluster| {
        let to = 1 - cluster.primary.1;
        let (said, code) = cluster.hand_over(to);
        assert_eq!(code, Some(0), "{said}");
        let address = cluster.up.schedulers[to].0;
        assert!(said.starts_with(&format!("{address} is the primary, in epoch ")), "{said}");
        // The former primary is its standby now.
        cluster.hear(&[("all members obey", 1), (" joined ", MEMBERS)]);
        assert_eq!(cluster.primary.1, to);
        let (said, code) = cluster.hand_over(to);
        assert!(code == Some(2) && said.lines().count() == 1 && said.contains("is the primary already"), "{said}");
    });
    for tally in &tallies {
        assert_accounted_for(tally);
        assert_eq!(tally.served, tally.sent, "{tally:?}");
    }
}

#[test]
fn members_that_end_are_started_again_unless_they_were_told_to_end() {
    let (level, log) = ("warn", Stdio::inherit());
    let mut up = Up::start_logging(level, log, (1, "resnet50", &[1, 1]), EAGER);
    let mut stdout = up.stdout.take().unwrap();
    for member in ["backend-1", "frontend-0", "scheduler"] {
        kill_process(up.members[member], Signal::KILL).unwrap();
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let (name, pid) = process(&line).unwrap();
        assert_eq!(name, member);
        assert_ne!(up.members.insert(name, pid), Some(pid));
        eventually("a cluster that is ready again", || is_ready(up.http[0], "resnet50"));
    }
    assert_accounted_for(&up.send(0, 1.0, &emulated(20.0)));
    // This one is told, and the next line is another's.
    let told = up.members["backend-0"];
    kill_process(told, Signal::TERM).unwrap();
    eventually("the end of the backend that was told", || test_kill_process(told).is_err());
    kill_process(up.members["scheduler"], Signal::KILL).unwrap();
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(process(&line).unwrap().0, "scheduler");
}

#[test]
fn a_handover_that_cannot_be_is_one_line_and_changes_nothing() {
    let cluster = Cluster::start("");
    let ((number, primary), to) = (cluster.primary, 1 - cluster.primary.1);
    let (address, config) = &cluster.up.schedulers[to];
    let is_refused = |to, config: &Path, expected: &str| {
        let (said, code) = hand_over(to, config);
        assert!(code == Some(2) && said.lines().count() == 1 && said.contains(expected), "{code:?}: {said}");
    };
    let stranger = changed(config, &[("secret", "nobody else knows this one".into())]);
    is_refused(*address, stranger.path(), "secret");
    is_refused(of_another_release(), config, "run releases with one wire version");
    // The last of a list whose others are not there waits for them for fifteen seconds.
    let ports: Vec<Port> = (0..16).map(|_| Port::hold()).collect();
    let list: Vec<String> = ports.iter().map(|port| port.address().to_string()).collect();
    let lonely_at = ports[15].address();
    let packets = SocketAddr::from((transport::random_loopback(), transport::ROCE_PORT)).to_string();
    let keys = [("listen", list[15].clone().into()), ("schedulers", list.into()), ("address", packets.into())];
    let lonely = changed(config, &keys);
    let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat"));
    let mut process = command.args(["scheduler", "--config"]).arg(lonely.path()).stderr(Stdio::null()).spawn().unwrap();
    eventually("a scheduler that listens", || TcpStream::connect(lonely_at).is_ok());
    let (said, code) = hand_over(lonely_at, lonely.path());
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(code == Some(2) && said.lines().count() == 1 && said.contains("is not warm"), "{code:?}: {said}");
    // Who is the primary, and in which epoch, has not changed.
    let (at, config) = &cluster.up.schedulers[primary];
    is_refused(*at, config, &format!("is the primary already, in epoch {number}.{primary}"));
}
