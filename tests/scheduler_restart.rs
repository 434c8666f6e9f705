//! The three roles as an operator starts them, each by its own command; the scheduler is killed and started again.
//! Nothing here asserts how long anything takes.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use load::{Arrivals, Expected, Input, Stream, Tally, Target, generate, is_ready};
use repository::DataType;
use testing::{Port, eventually};

#[path = "scheduler_restart/evacuation.rs"]
mod evacuation;

const MODEL: &str = "resnet50";
/// No request misses it for want of time, however busy the machine is, as the policy is an eager one.
const AMPLE_MS: f64 = 10_000.0;

/// A role's process and its configuration file.
struct Role {
    child: Child,
    config: tempfile::NamedTempFile,
}

impl Role {
    fn start(role: &str, text: &str) -> Self {
        let mut config = tempfile::NamedTempFile::new().unwrap();
        config.write_all(text.as_bytes()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat"));
        command.args([role, "--config"]).arg(config.path()).env("RUST_LOG", "error").stdout(Stdio::null());
        Self { child: command.spawn().unwrap(), config }
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send(http: SocketAddr, seconds: f64) -> Tally {
    let models = repository::load("models".as_ref()).unwrap().models;
    let model = models.iter().find(|model| model.name == MODEL).unwrap();
    let data: Vec<u8> = (0..model.input_bytes()).map(|at| (at % 253) as u8).collect();
    let input = Input::new("image", DataType::Uint8, &[3, 224, 224], &data, Some(AMPLE_MS), Expected::digest(&data));
    let arrivals = Arrivals::poisson(40.0);
    let stream = Stream { model: MODEL.into(), arrivals, slo_ms: AMPLE_MS, inputs: [input].into() };
    let target = Target::http(http, Duration::from_secs_f64(seconds), 3);
    generate(&target, &[stream], |_| {}).unwrap().remove(0)
}

/// What a role answers; nothing if it is not there.
fn asked(at: SocketAddr, path: &str) -> String {
    let mut answer = String::new();
    if let Ok(mut stream) = TcpStream::connect(at) {
        let sent = stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes());
        let _ = sent.and_then(|()| stream.read_to_string(&mut answer));
    }
    answer
}

/// What a command prints.
fn printed(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_downbeat")).args(args).output().unwrap();
    String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
}

fn status(at: SocketAddr) -> String {
    printed(&["status", "--scheduler", &at.to_string()])
}

/// An operator drains members and resumes them.
fn drains(&[listen, http, of_frontend]: &[SocketAddr; 3], config: &Path) {
    let (listen, config) = (listen.to_string(), config.to_str().unwrap());
    let asked_for = |args: &[&str]| printed(&[args, &["--scheduler", &listen, "--config", config]].concat());
    let refused = asked_for(&["drain", "backend", "gpus"]);
    assert!(refused.contains("no other backend that serves hosts ") && refused.contains("--force"), "{refused}");
    assert!(asked_for(&["drain", "backend", "nobody"]).contains("found no backend called nobody"));
    let drained = asked_for(&["drain", "frontend", "door"]);
    assert!(drained.contains("is not ready any more"), "{drained}");
    eventually("a frontend that is not ready", || asked(of_frontend, "/readyz").contains(" 503 Service Unavailable"));
    let meanwhile = send(http, 1.0);
    assert!(meanwhile.served > 0 && meanwhile.errors.is_empty(), "{meanwhile:?}");
    assert!(asked_for(&["resume", "frontend", "door"]).contains("takes part again"));
    eventually("a frontend that is ready again", || asked(of_frontend, "/readyz").contains(" 200 OK"));
    assert!(asked_for(&["drain", "backend", "gpus", "--force"]).contains("models are not served now"));
    eventually("a model that is not ready", || !is_ready(http, MODEL));
    assert!(asked_for(&["resume", "backend", "gpus"]).contains("takes part again"));
    eventually("a model that is ready once more", || is_ready(http, MODEL));
}

#[test]
fn a_cluster_outlives_its_scheduler() {
    let (x, y) = (rand::random_range(1..=254), rand::random_range(0..=255));
    let host = |last: u8, port: u16| SocketAddr::from((Ipv4Addr::new(127, x, y, last), port));
    let ports = [(); 5].map(|()| Port::hold());
    let [http, listen, of_scheduler, of_frontend, of_backend] = ports.each_ref().map(Port::address);
    let admin = |at: SocketAddr| format!("[admin]\nhttp = '{at}'\n");
    let secret = "the cluster's secret";
    let scheduler =
        format!("policy = 'eager'\nlisten = '{listen}'\naddress = '{}'\nsecret = \"{secret}\"\n", host(1, 4791));
    let scheduler = scheduler + &admin(of_scheduler);
    let member = format!("scheduler = '{listen}'\nsecret = \"{secret}\"\nrepository = 'models'\n");

    let first = Role::start("scheduler", &scheduler);
    let frontend = format!("{member}name = 'door'\naddress = '{}'\nhttp = '{http}'\n", host(2, 4791));
    let _frontend = Role::start("frontend", &(frontend + &admin(of_frontend)));
    let placement = format!("gpus = 2\nplacement = {{ {MODEL} = [0, 1] }}\n");
    let backend = format!("{member}name = 'gpus'\naddress = '{}'\n{placement}", host(3, 4791));
    let backend = Role::start("backend", &(backend + &admin(of_backend)));
    eventually("a model that is ready", || is_ready(http, MODEL));
    for at in [of_scheduler, of_frontend, of_backend] {
        eventually("a role that is ready", || asked(at, "/readyz").contains(" 200 OK"));
    }
    for (at, who) in [(of_frontend, "role=\"frontend\",name=\"door\""), (of_backend, "role=\"backend\",name=\"gpus\"")]
    {
        let text = asked(at, "/metrics");
        assert!(text.contains(who) && text.contains("\nprocess_cpu_seconds_total "), "{text}");
    }
    assert!(asked(of_frontend, "/metrics").contains("\nnv_inference_count{"), "what it counts itself, too");
    // What is shown is a quarter of a second old at most.
    for part in
        ["the primary, arm soft: epoch 1.0, ", "1 frontends, 1 backends, 2 GPUs", "frontend  door ", "no: only here "]
    {
        eventually(part, || status(of_scheduler).contains(part));
    }
    assert!(send(http, 1.0).served > 0);
    drains(&[listen, http, of_frontend], first.config.path());

    // Requests go on coming while there is none: each ends at once or by its deadline, with a reason.
    let load = thread::spawn(move || send(http, 3.0));
    drop(first);
    eventually("a model that is not ready", || !is_ready(http, MODEL));
    for at in [of_frontend, of_backend] {
        eventually("a member without a scheduler", || asked(at, "/readyz").contains(" 503 Service Unavailable"));
        assert!(asked(at, "/livez").ends_with("\r\n\r\nok\n"), "it lives");
    }
    let without = load.join().unwrap();
    assert_eq!((without.ended(), without.wrong), (without.sent, 0), "{without:?}");

    let _second = Role::start("scheduler", &scheduler);
    eventually("a model that is ready again", || is_ready(http, MODEL));
    let after = send(http, 2.0);
    assert_eq!((after.ended(), after.wrong), (after.sent, 0), "{after:?}");
    assert!(after.served > 0 && after.errors.is_empty(), "{after:?}");

    assert!(status(of_scheduler).contains("backend   gpus "));
    drop(backend);
    eventually("a backend that is gone", || !status(of_scheduler).contains("gpus"));
}
