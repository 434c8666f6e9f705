//! Real processes with the driver that serves, on a GPU that is none: `cuda/tests/emulated` has libcuda, cuBLASLt,
//! cuDNN and NVML as their documentation describes them, on host memory. Without g++ there is nothing to build them
//! with, and the tests are skipped.
#![allow(clippy::disallowed_methods)] // Processes of its own.

use std::{
    fs::{self, Permissions},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
};

use tempfile::TempDir;
use testing::{Port, eventually};

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
        testing::skip("tests/emulated_gpu", "g++");
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

/// An ONNX file that negates a tensor of numbers, whose two lengths are a batch's and a request's choice.
fn negation() -> Vec<u8> {
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }
    let number = |field: u8, value: u8| vec![field << 3, value];
    let value = |name: &str| {
        let dims = ["batch", "length"].map(|dim| field(1, &field(2, dim.as_bytes()))).concat();
        let tensor = [number(1, 1), field(2, &dims)].concat();
        [field(1, name.as_bytes()), field(2, &field(1, &tensor))].concat()
    };
    let node = [field(1, b"x"), field(2, b"y"), field(4, b"Neg")].concat();
    let graph = [field(1, &node), field(2, b"negation"), field(11, &value("x")), field(12, &value("y"))].concat();
    [number(1, 8), field(7, &graph), field(8, &number(2, 17))].concat()
}

#[test]
fn a_model_whose_requests_choose_lengths_is_profiled_as_they_are_padded() {
    let Some(libraries) = libraries() else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("negation");
    fs::create_dir_all(model.join("1")).unwrap();
    fs::write(model.join("1/model.onnx"), negation()).unwrap();
    let parameters = [("batch_lengths", "padded"), ("max_dims", "40")];
    let parameters = parameters
        .map(|(key, value)| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}\n"));
    fs::write(model.join("config.pbtxt"), format!("max_batch_size: 4\n{}", parameters.concat())).unwrap();
    let model = model.display().to_string();
    let arguments = ["profile", "--model", &model, "--executor", "cuda", "--seconds", "0.01", "--json"];
    let done = downbeat(libraries, &arguments);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let sizes: Vec<u64> =
        report["sizes"].as_array().unwrap().iter().filter_map(|size| size["batch"].as_u64()).collect();
    assert_eq!(sizes, [1, 2, 3, 4]);
}

/// Models that are the classifier of digits, but in name.
const MODELS: [&str; 4] = ["digits1", "digits2", "digits3", "digits4"];

/// A cluster of one GPU.
struct Cluster {
    process: Child,
    http: String,
    folder: TempDir,
    _port: Port,
}

impl Cluster {
    /// One whose backend has these keys besides.
    fn start(libraries: &Path, models: &[&str], keys: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/digits");
        for name in models {
            let model = folder.path().join("models").join(name);
            fs::create_dir_all(model.join("1")).unwrap();
            fs::copy(digits.join("1/model.onnx"), model.join("1/model.onnx")).unwrap();
            fs::copy(digits.join("labels.txt"), model.join("labels.txt")).unwrap();
            let config = fs::read_to_string(digits.join("config.pbtxt")).unwrap();
            fs::write(model.join("config.pbtxt"), config.replace("\"digits\"", &format!("\"{name}\""))).unwrap();
        }
        let port = Port::hold();
        let http = port.address().to_string();
        let repository = folder.path().join("models");
        let config = format!(
            "repository = {repository:?}\nhttp = [\"{http}\"]\ngrpc = []\n[[backend]]\ngpus = 1\nexecutor = \"cuda\"\n\
             {keys}"
        );
        fs::write(folder.path().join("up.toml"), config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_downbeat"));
        command.args(["up", "--config"]).arg(folder.path().join("up.toml"));
        let log = fs::File::create(folder.path().join("log")).unwrap();
        command.env("LD_LIBRARY_PATH", libraries).env("TMPDIR", folder.path()).stderr(log);
        command.env("EMULATED_NVML", folder.path().join("nvml"));
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let is_ready = said.any(|line| line.starts_with(&format!("ready: {}", models.join(", "))));
        assert!(is_ready, "it ended before all models were served");
        Self { process, http, folder, _port: port }
    }

    /// How the GPU is from now on, as `cuda/tests/emulated/nvml.cpp` reads it.
    fn set_health(&self, lines: &str) {
        let file = self.folder.path().join("nvml");
        fs::write(file.with_extension("new"), lines).unwrap();
        fs::rename(file.with_extension("new"), file).unwrap();
    }

    /// How often its members' logs say something.
    fn said(&self, text: &str) -> usize {
        fs::read_to_string(self.folder.path().join("log")).unwrap().matches(text).count()
    }

    /// What the frontend's `/metrics` counts under this name.
    fn count(&self, name: &str) -> u64 {
        let answer = scrape(&self.http);
        let value = answer.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {answer}"))
    }
}

/// Who scrapes again and again uses up its address's share of connections, and is closed without an answer.
fn scrape(address: &str) -> String {
    let mut answer = String::new();
    eventually("an answer", || {
        answer.clear();
        try_scrape(address, &mut answer).is_ok_and(|bytes| bytes > 0)
    });
    answer
}

fn try_scrape(address: &str, answer: &mut String) -> io::Result<usize> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    stream.read_to_string(answer)
}

/// Scrapes until what comes is as wanted.
fn scrape_until(address: &str, what: &str, mut is_it: impl FnMut(&str) -> bool) {
    eventually(what, || is_it(&scrape(address)));
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
    let cluster = Cluster::start(libraries, &MODELS, "gpu_memory_mb = 34\nhost_memory_mb = 34\ngpu_direct = true\n");
    assert_eq!(cluster.said("gpu_direct: inputs pass through host memory"), 1, "soft-RoCE has no way into a GPU");
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
fn how_a_gpu_is_can_be_scraped_and_a_driver_that_hangs_holds_nobody_up() {
    const GPU: &str = "gpu_uuid=\"GPU-00112233-4455-6677-8899-aabbccddeeff\"";
    let Some(libraries) = libraries() else { return };
    let metrics = Port::hold();
    let address = metrics.address().to_string();
    let cluster = Cluster::start(libraries, &["digits"], &format!("admin = {{ http = \"{address}\" }}\n"));
    let line = |name: &str, rest: &str| format!("\n{name}{{{GPU}{rest}\n");
    scrape_until(&address, "a reading", |text| {
        text.starts_with("HTTP/1.1 200 OK\r\n")
            && text.contains(&line("downbeat_gpu_temperature_celsius", "} 41"))
            && text.contains(&line("nv_gpu_power_usage", "} 250.5"))
    });
    // Its clocks are held back by heat (bit 5), and its memory has errors.
    cluster.set_health("reasons 32\nuncorrected 2\ntemperature 93\n");
    scrape_until(&address, "the fault", |text| {
        text.contains(&line("downbeat_gpu_clocks_held_back", ",by=\"heat\"} 1"))
            && text.contains(&line("downbeat_gpu_memory_errors_total", ",kind=\"uncorrected\"} 2"))
            && text.contains(&line("downbeat_gpu_temperature_celsius", "} 93"))
    });
    cluster.set_health("hang 1\n");
    let age = |text: &str| {
        let name = format!("downbeat_gpu_readings_age_seconds{{{GPU}}} ");
        text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok()).unwrap()
    };
    scrape_until(&address, "a great age", |text| {
        age(text) > 3.0 && text.contains(&line("downbeat_gpu_temperature_celsius", "} 93"))
    });
    let url = format!("http://{}", cluster.http);
    let load = [
        "bench",
        "load",
        "--url",
        &url,
        "--model",
        "digits",
        "--rate",
        "5",
        "--seconds",
        "1",
        "--slo-ms",
        "3000",
        "--json",
    ];
    let done = downbeat(libraries, &load);
    let report: serde_json::Value = serde_json::from_str(&text(&done.stdout)).unwrap();
    assert!(report["models"][0]["served_rps"].as_f64().unwrap() > 0.0, "requests are answered meanwhile: {report}");
    cluster.set_health("");
    scrape_until(&address, "the end of it", |text| {
        text.contains(&line("downbeat_gpu_clocks_held_back", ",by=\"heat\"} 0"))
            && text.contains(&line("downbeat_gpu_memory_errors_total", ",kind=\"uncorrected\"} 0"))
    });
    cluster.set_health("lost 1\n");
    scrape_until(&address, "a lost GPU's age", |text| age(text) > 3.0);
    let once =
        ["clocks are held back", "memory has errors that", "memory has no errors any more", "errors are not known"];
    assert_eq!(once.map(|text| cluster.said(text)), [1; 4], "each is logged once");
}

#[test]
fn doctor_tells_of_the_libraries_with_and_without_a_gpu() {
    let told = |libraries: &Path| {
        let done = downbeat(libraries, &["doctor", "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        let findings: Vec<serde_json::Value> = report["findings"].as_array().unwrap().clone();
        move |subject: &str| {
            let found = findings.iter().find(|finding| finding["subject"] == subject);
            found.map(|finding| finding["found"].as_str().unwrap().to_owned())
        }
    };
    if Path::new("/dev/nvidiactl").exists() {
        testing::skip("tests/emulated_gpu_missing", "a host without GPUs");
        return;
    }
    let nowhere = tempfile::tempdir().unwrap();
    let without = told(nowhere.path())("CUDA libraries").unwrap();
    let place = format!("looked for in LD_LIBRARY_PATH={} and", nowhere.path().display());
    assert!(without.contains("libcuda.so.1") && without.contains("libnvidia-ml.so.1"), "{without}");
    assert!(without.contains(&place), "{without}");
    let Some(libraries) = libraries() else { return };
    let with = told(libraries);
    assert!(with("GPU 0").unwrap().contains("Emulated GPU"));
    assert!(with("libcuda").unwrap().starts_with(&libraries.display().to_string()));
    assert_eq!(with("NVML").unwrap(), "libnvidia-ml.so.1");
}

#[test]
fn without_libraries_one_line_says_which_is_missing_and_where_it_was_looked_for() {
    let nowhere = tempfile::tempdir().unwrap();
    let done = downbeat(nowhere.path(), &["profile", "--model", "models/digits", "--executor", "cuda"]);
    let error = text(&done.stderr);
    if Path::new("/dev/nvidiactl").exists() {
        testing::skip("tests/emulated_gpu_missing", "a host without GPUs");
        return;
    }
    assert_eq!(done.status.code(), Some(2), "{error}");
    assert!(error.trim().lines().count() == 1 && error.contains("libcuda.so.1"), "{error}");
    assert!(error.contains(&nowhere.path().display().to_string()), "{error}");
}

const UUID: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

/// Whether the example `model` is there as it is now: `cargo test` of this package alone builds none.
fn is_built(example: &Path) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let changed = |file: &Path| fs::metadata(file).and_then(|found| found.modified()).ok();
    changed(example).is_some_and(|built| Some(built) > changed(&root.join("cuda/examples/model.rs")))
}

/// What `tests/gpu/run` carries to a host with GPUs, and an `nvidia-smi` that tells of the GPU that is none.
fn bundle(folder: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let binary = Path::new(env!("CARGO_BIN_EXE_downbeat"));
    symlink(binary, folder.join("downbeat")).unwrap();
    symlink(root.join("models"), folder.join("models")).unwrap();
    for entry in fs::read_dir(root.join("tests/gpu")).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|extension| extension == "py") {
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
    }
    fs::create_dir(folder.join("examples")).unwrap();
    let example = binary.with_file_name("examples").join("model");
    if is_built(&example) {
        symlink(example, folder.join("examples/model")).unwrap();
    }
    let script = |path: &str, text: String| {
        fs::write(folder.join(path), text).unwrap();
        fs::set_permissions(folder.join(path), Permissions::from_mode(0o755)).unwrap();
    };
    // It ends before its last line, with all that it has said so far having passed.
    script("examples/conformance", "#!/bin/sh\necho passed one\necho a fault >&2\nexit 139\n".to_owned());
    let list = format!("#!/bin/sh\ncase $1 in -L) echo 'GPU 0: none';; *) echo '{UUID}, 4096, 700.00, 1980';; esac\n");
    script("nvidia-smi", list);
}

/// Those for which PyTorch has to be there are not tried, nor how fast anything is: only that it is told.
#[test]
fn what_is_asked_of_a_host_with_gpus_is_answered_by_one_with_none() {
    let Some(libraries) = libraries() else { return };
    if Command::new("python3").arg("--version").output().is_err() {
        testing::skip("tests/emulated_gpu_cases", "python3");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    bundle(folder.path());
    let right = ["doctor", "health in /metrics"];
    let told = ["launches of digits", "prediction error of digits"];
    let mut command = Command::new("python3");
    command.args(["-B", "cases.py", "0"]).args(right).args(told).arg("conformance").current_dir(folder.path());
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    command.env("PATH", path).env("LD_LIBRARY_PATH", libraries).env("TMPDIR", folder.path());
    let ports = [Port::hold(), Port::hold()];
    let [http, metrics] = ports.each_ref().map(|port| port.address().to_string());
    command.env("HTTP", http).env("METRICS", metrics).env("LOAD_SECONDS", "1");
    let done = command.output().unwrap();
    let (out, error) = (text(&done.stdout), text(&done.stderr));
    let line = |name: &str| {
        let said = |line: &&str| line.split_once(' ').is_some_and(|(_, rest)| rest.starts_with(&format!("{name}: ")));
        out.lines().find(said).unwrap_or_else(|| panic!("nothing of {name}: {out}{error}"))
    };
    let needs_example = |line: &str| line.starts_with("skipped") && line.contains(": needs examples/");
    for name in right {
        assert!(line(name).starts_with("passed"), "{out}{error}");
    }
    for name in told {
        let has_figures = line(name).contains(": goal ") && line(name).contains(", found ");
        assert!(has_figures || needs_example(line(name)), "{out}{error}");
    }
    assert_eq!(out.lines().filter(|line| !line.starts_with("  ")).count(), right.len() + told.len() + 1, "{out}");
    let died = line("conformance");
    assert_eq!(died, "failed conformance: conformance ended with 139 after 1 cases: a fault");
}
