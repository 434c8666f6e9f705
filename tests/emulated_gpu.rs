//! Real processes with the driver that serves, on a GPU that is none: `cuda/tests/emulated` has libcuda, cuBLASLt and
//! cuDNN as their documentation describes them, on host memory. Without g++ there is nothing to build them with, and
//! the tests say `skipped`.
#![allow(clippy::disallowed_methods)] // Processes of its own.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
};

use tempfile::TempDir;

/// Where the libraries are, if they can be built.
fn libraries() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        Command::new("g++").arg("--version").output().ok()?;
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated-gpu");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/tests/emulated/build");
        assert!(Command::new(script).arg(&folder).status().unwrap().success(), "the libraries cannot be built");
        Some(folder)
    };
    let built = BUILT.get_or_init(build);
    if built.is_none() {
        eprintln!("skipped: no g++");
    }
    built.as_deref()
}

fn downbeat(libraries: &Path, arguments: &[&str]) -> Output {
    // Each process has a GPU of its own, which all call alike: locks of one are not those of another.
    let locks = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat"));
    command.args(arguments).env("LD_LIBRARY_PATH", libraries).env("TMPDIR", locks.path());
    command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_demo_answers_rightly_from_a_gpu() {
    let Some(libraries) = libraries() else { return };
    let done = downbeat(libraries, &["demo", "--executor", "cuda", "--seconds", "2", "--rate", "40"]);
    let (out, error) = (text(&done.stdout), text(&done.stderr));
    assert!(done.status.success() && out.contains("every answer was right"), "{out}{error}");
}

#[test]
fn a_model_is_profiled_at_the_sizes_that_a_gpu_is_prepared_for() {
    let Some(libraries) = libraries() else { return };
    let arguments = ["profile", "--model", "models/digits", "--executor", "cuda", "--seconds", "0.01", "--json"];
    for precision in ["fp32", "tf32", "fp16"] {
        let done = downbeat(libraries, &[&arguments[..], &["--precision", precision]].concat());
        assert!(done.status.success(), "{precision}: {}", text(&done.stderr));
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        let sizes: Vec<u64> =
            report["sizes"].as_array().unwrap().iter().filter_map(|size| size["batch"].as_u64()).collect();
        assert_eq!(sizes, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
        let latency = report["latency_ms"].as_array().unwrap();
        assert_eq!((latency.len(), &latency[24]), (64, &latency[31]), "25 tasks take as long as 32");
    }
}

/// Models that are the classifier of digits, but in name.
const MODELS: [&str; 4] = ["digits1", "digits2", "digits3", "digits4"];

/// A cluster whose one GPU has room for two of [`MODELS`], and its host for as many.
struct Cluster {
    process: Child,
    http: String,
    _folder: TempDir,
}

impl Cluster {
    fn start(libraries: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/digits");
        for name in MODELS {
            let model = folder.path().join("models").join(name);
            fs::create_dir_all(model.join("1")).unwrap();
            fs::copy(digits.join("1/model.onnx"), model.join("1/model.onnx")).unwrap();
            fs::copy(digits.join("labels.txt"), model.join("labels.txt")).unwrap();
            let config = fs::read_to_string(digits.join("config.pbtxt")).unwrap();
            fs::write(model.join("config.pbtxt"), config.replace("\"digits\"", &format!("\"{name}\""))).unwrap();
        }
        let http = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let repository = folder.path().join("models");
        let config = format!(
            "repository = {repository:?}\nhttp = [\"{http}\"]\ngrpc = []\n[[backend]]\ngpus = 1\nexecutor = \"cuda\"\n\
             gpu_memory_mb = 34\nhost_memory_mb = 34\n"
        );
        fs::write(folder.path().join("up.toml"), config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat"));
        command.args(["up", "--config"]).arg(folder.path().join("up.toml"));
        command.env("LD_LIBRARY_PATH", libraries).env("TMPDIR", folder.path()).stderr(Stdio::null());
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let is_ready = said.any(|line| line.starts_with("ready: digits1, digits2, digits3, digits4"));
        assert!(is_ready, "it ended before all models were served");
        Self { process, http, _folder: folder }
    }

    /// What `/metrics` counts under this name.
    fn count(&self, name: &str) -> u64 {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let value = answer.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {answer}"))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Its members end with it.
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

#[test]
fn more_models_than_fit_are_served_as_their_weights_come_and_go() {
    let Some(libraries) = libraries() else { return };
    let cluster = Cluster::start(libraries);
    let url = format!("http://{}", cluster.http);
    let mut arguments =
        vec!["bench", "load", "--url", &url, "--rate", "5", "--seconds", "3", "--slo-ms", "3000", "--json"];
    MODELS.iter().for_each(|model| arguments.extend(["--model", model]));
    let done = downbeat(libraries, &arguments);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let report = text(&done.stdout);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    for model in report["models"].as_array().unwrap() {
        // A busy machine may be late, but never wrong.
        assert_eq!((&model["errors"], &model["wrong"]), (&0.into(), &0.into()), "{model}");
        assert!(model["served_rps"].as_f64().unwrap() > 0.0, "{model}");
    }
    let counts = ["loads", "disk_loads", "evictions", "failed", "absent"]
        .map(|what| cluster.count(&format!("downbeat_weights_{what}_total")));
    let [loads, reads, evictions, failed, absent] = counts;
    assert!(loads >= 4 && reads >= 1 && evictions >= 2, "{counts:?}");
    assert_eq!((failed, absent), (0, 0));
}

#[test]
fn without_libraries_one_line_says_which_is_missing_and_where_it_was_looked_for() {
    let nowhere = tempfile::tempdir().unwrap();
    let done = downbeat(nowhere.path(), &["profile", "--model", "models/digits", "--executor", "cuda"]);
    let error = text(&done.stderr);
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: this host may have a GPU");
        return;
    }
    assert_eq!(done.status.code(), Some(2), "{error}");
    assert!(error.trim().lines().count() == 1 && error.contains("libcuda.so.1"), "{error}");
    assert!(error.contains(&nowhere.path().display().to_string()), "{error}");
}
