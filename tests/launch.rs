//! How processes are launched: `tritonserver`'s command lines, as manifests have them, and `--check`.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

#[path = "common/http.rs"]
mod http;

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::fs::symlink,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use http::{exchange, try_exchange};
use rustix::process::{Pid, Signal, kill_process};
use testing::{Port, eventually};

const BINARY: &str = env!("CARGO_BIN_EXE_downbeat");

/// Emulated, so that it is loaded at once.
const MODEL: &str = r#"
    backend: "emulated"
    max_batch_size: 8
    input { name: "x" data_type: TYPE_UINT8 dims: 4 }
    output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
    parameters { key: "slo_ms" value { string_value: "20" } }
    parameters { key: "alpha_ms" value { string_value: "1" } }
    parameters { key: "beta_ms" value { string_value: "1" } }
"#;

/// A repository of these models, with `broken` beside them if it is to be there.
fn repository(folder: &Path, names: &[&str], is_one_broken: bool) {
    let add = |name: &str, config: &str| {
        fs::create_dir_all(folder.join(name).join("1")).unwrap();
        fs::write(folder.join(name).join("config.pbtxt"), config).unwrap();
    };
    names.iter().for_each(|name| add(name, MODEL));
    if is_one_broken {
        add("broken", "backend: \"emulated\"\nmax_batch_size: many\n");
    }
}

fn run(program: &Path, words: &[&str]) -> Output {
    Command::new(program).args(words).env_remove("RUST_LOG").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A cluster that runs until it is dropped, and what it said until it was ready.
struct Up {
    child: Child,
    said: Vec<String>,
}

impl Up {
    fn start(program: &Path, words: &[&str]) -> Self {
        let mut child = Command::new(program);
        let child = child.args(words).env("RUST_LOG", "warn").stdout(Stdio::piped()).spawn();
        let mut up = Self { child: child.unwrap(), said: Vec::new() };
        for line in BufReader::new(up.child.stdout.take().unwrap()).lines() {
            up.said.push(line.unwrap());
            if up.said.last().unwrap().starts_with("ready") {
                return up;
            }
        }
        panic!("it did not become ready: {:?}", up.said);
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        let _ = self.child.wait();
    }
}

/// What is answered to a request without a body, and its status.
fn get(address: SocketAddr, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut heard = String::new();
    stream.read_to_string(&mut heard).unwrap();
    let (head, body) = heard.split_once("\r\n\r\n").unwrap();
    (head[9..12].to_owned(), body.to_owned())
}

fn is_ready(address: SocketAddr) -> bool {
    try_exchange(address, "GET", "/v2/health/ready", "").is_some_and(|(status, _)| status == 200)
}

/// As KServe's runtime and the charts of Triton's own repository have them.
#[test]
fn a_command_line_of_tritonserver_serves_as_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    repository(&models, &["a", "b"], false);
    let program = folder.path().join("tritonserver");
    symlink(BINARY, &program).unwrap();
    let ports = [Port::hold(), Port::hold(), Port::hold()];
    let [http, grpc, metrics] = [0, 1, 2].map(|index: usize| ports[index].address());
    let words = [
        format!("--model-store={}", models.display()),
        format!("--http-port={}", http.port()),
        format!("--grpc-port={}", grpc.port()),
        format!("--metrics-port={}", metrics.port()),
        "--http-address=127.0.0.1".into(),
        "--grpc-address=127.0.0.1".into(),
        "--allow-grpc=true".into(),
        "--allow-gpu-metrics=false".into(),
        "--strict-model-config=false".into(),
        "--log-verbose=0".into(),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let up = Up::start(&program, &words);
    assert_eq!(up.said[0], "these change nothing here: --allow-gpu-metrics, --strict-model-config");
    assert_eq!(*up.said.last().unwrap(), format!("ready: a, b at http://{http}, grpc://{grpc}"));
    eventually("readiness", || is_ready(http));
    assert_eq!(exchange(http, "GET", "/v2", "").1["name"], "triton");
    let (status, text) = get(metrics, "/metrics");
    assert!(status == "200" && text.contains("\nnv_inference_request_success{model=\"a\""), "{text}");
    let (status, refused) = exchange(http, "POST", "/v2/repository/models/a/unload", "");
    assert_eq!(status, 400, "nobody loads and unloads models: {refused}");
    TcpStream::connect(grpc).unwrap();
}

/// Triton's clients then load what they want.
#[test]
fn a_server_without_models_is_ready_where_clients_load_them() {
    let folder = tempfile::tempdir().unwrap();
    repository(folder.path(), &["a", "b"], true);
    let http = Port::hold();
    let (repository, port) = (folder.path().display().to_string(), http.address().port().to_string());
    let words = ["--model-repository", &repository, "--http-port", &port, "--http-address", "127.0.0.1"];
    let rest = ["--allow-grpc=false", "--allow-metrics=false", "--model-control-mode=explicit"];
    let up = Up::start(Path::new(BINARY), &[&["tritonserver"][..], &words, &rest].concat());
    let last = up.said.last().unwrap();
    assert!(last.starts_with("ready: no model is loaded yet"), "{last}");
    let http = http.address();
    eventually("readiness", || is_ready(http));
    assert_eq!(get(http, "/v2/models/a/ready").0, "503");
    // A backend that has just joined takes loads once it obeys the scheduler.
    eventually("a load", || exchange(http, "POST", "/v2/repository/models/a/load", "").0 == 200);
    assert_eq!(get(http, "/v2/models/a/ready").0, "200");
}

#[test]
fn a_model_that_cannot_be_loaded_ends_tritonserver_before_it_serves() {
    let folder = tempfile::tempdir().unwrap();
    repository(folder.path(), &["a"], true);
    let store = format!("--model-store={}", folder.path().display());
    let ended = run(Path::new(BINARY), &["tritonserver", &store, "--http-address=127.0.0.1"]);
    let said = text(&ended.stderr);
    assert_eq!((ended.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.starts_with("downbeat: model broken: "), "{said}");
    let named = ["--model-control-mode=explicit", "--load-model=broken", "--http-address=127.0.0.1"];
    let named = run(Path::new(BINARY), &[&["tritonserver", &store][..], &named].concat());
    assert_eq!((named.status.code(), text(&named.stderr)), (Some(2), said));
    let unknown = run(Path::new(BINARY), &["tritonserver", &store, "--grpc-restricted-protocol=a,b=c"]);
    let said = text(&unknown.stderr);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(said.starts_with("downbeat: unexpected argument '--grpc-restricted-protocol' found"), "{said}");
}

/// What `--check` says of a role's file, or of a cluster's: a line and the exit code.
fn check(role: &str, file: &Path) -> (Option<i32>, String, String) {
    let ended = run(Path::new(BINARY), &[role, "--check", "--config", file.to_str().unwrap()]);
    (ended.status.code(), text(&ended.stdout), text(&ended.stderr))
}

#[test]
fn a_check_reads_what_a_start_reads_and_opens_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    repository(&models, &["a", "b"], true);
    let secret = folder.path().join("secret");
    fs::write(&secret, "a secret of many bytes\n").unwrap();
    // Another process has the port, which a start could not take.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap();
    let (shown, secret) = (models.display(), secret.display());
    let network = format!("name = 'm1'\nsecret_file = '{secret}'\naddress = '{at}'\n");
    let client = format!("scheduler = 'nowhere.invalid:7400'\nrepository = '{shown}'\n{network}");
    let found = format!("models of {shown}: a, b; refused: broken");
    let file = folder.path().join("file.toml");
    for (role, keys, expected) in [
        ("scheduler", format!("listen = '{at}'\n{network}"), format!("scheduler m1 at {at}, policy downbeat")),
        ("frontend", format!("http = '{at}'\n{client}"), format!("frontend m1, http://{at}, {found}")),
        ("backend", format!("gpus = 2\n{client}"), format!("backend m1, GPUs: 2, {found}")),
    ] {
        fs::write(&file, &keys).unwrap();
        let line = format!("{}: checked, and nothing opened: {expected}\n", file.display());
        let (code, said, log) = check(role, &file);
        assert_eq!((code, said), (Some(0), line), "{log}");
        assert_eq!(log.contains("model 'broken' is not served: "), role != "scheduler", "{log}");
        for (from, to, wrong) in [
            ("name = 'm1'", "name = '${NOT_SET}'", "name: found ${NOT_SET}, and no such variable"),
            ("secret'\n", "secrets'\n", "secret_file: "),
            ("name = ", "nime = ", "unknown field `nime`"),
            (
                "name = ",
                "tls = { certificate = 'c.pem', key = 'k.pem', authority = 'a.pem' }\nname = ",
                "tls.certificate",
            ),
            ("name = ", "faults = { loss = 2.0 }\nname = ", "faults.loss"),
        ] {
            fs::write(&file, keys.replace(from, to)).unwrap();
            let (code, said, log) = check(role, &file);
            assert_eq!((code, said.as_str(), log.lines().count()), (Some(2), "", 1), "{role}: {log}");
            assert!(log.contains(wrong), "{role}: {log}, expected {wrong}");
        }
    }
    for (role, keys, wrong) in [
        ("scheduler", format!("listen = '{at}'\npolicy = 'lazy'\n{network}"), "policy: "),
        ("frontend", format!("strict = true\n{client}"), "broken"),
        ("frontend", format!("arena_bytes = 1\n{client}"), "arena_bytes"),
        ("frontend", format!("clients.tls = {{ certificate = 'c.pem', key = 'k.pem' }}\n{client}"), "clients.tls."),
        ("frontend", client.replace("/models'", "/none'"), "none"),
        ("backend", format!("strict = true\n{client}"), "broken"),
        ("backend", format!("pinned = ['z']\n{client}"), "pinned: found z, expected some of: a, b, broken"),
        ("backend", client.replace("/models'", "/none'"), "none"),
    ] {
        fs::write(&file, keys).unwrap();
        let (code, said, log) = check(role, &file);
        assert_eq!((code, said.as_str()), (Some(2), ""), "{role}: {log}");
        assert!(log.lines().last().is_some_and(|line| line.contains(wrong)), "{role}: {log}, expected {wrong}");
    }
    fs::write(&file, format!("http = ['{at}']\ngrpc = []\nrepository = '{shown}'\n")).unwrap();
    let (code, said, log) = check("up", &file);
    assert_eq!((code, said), (Some(0), format!("checked, and nothing opened: backends: 1, {found}\n")), "{log}");
    fs::write(&file, format!("http = ['{at}']\ngrpc = []\nrepository = '{shown}'\npolicy = 'lazy'\n")).unwrap();
    let (code, said, log) = check("up", &file);
    assert!(code == Some(2) && said.is_empty() && log.contains("policy: "), "{log}");
}
