//! Models in Python, with the package out of the binary; and repositories that mix them with others, served by `up`
//! with no other configuration. Skipped where there is no Python with what they need.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::OnceLock,
};

use load::{Arrivals, Encoding, Expected, Input, Stream, Tally, Target, Wire, generate};
use repository::DataType;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use testing::Port;

use super::{http::exchange, *};

/// The environment variable that names an interpreter with numpy and scikit-learn; otherwise `python3` may have both.
const PYTHON: &str = "DOWNBEAT_PYTHON";

/// That interpreter. Nothing is installed here.
pub(super) fn python() -> Option<&'static str> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let python = std::env::var(PYTHON).unwrap_or_else(|_| "python3".to_owned());
        let imports = Command::new(&python).args(["-c", "import numpy, sklearn"]).output();
        imports.is_ok_and(|output| output.status.success()).then_some(python)
    });
    if found.is_none() {
        testing::skip("tests/programs_python", "a python3 with numpy and scikit-learn (DOWNBEAT_PYTHON)");
    }
    found.as_deref()
}

/// Adds and subtracts, as Triton's first example of a model in Python does, and says itself what it takes and gives.
const ADD_SUB: &str = r#"
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for number in range(2):
            config.add_input({"name": f"INPUT{number}", "data_type": "TYPE_FP32", "dims": [2]})
            config.add_output({"name": f"OUTPUT{number}", "data_type": "TYPE_FP32", "dims": [2]})
        config.set_max_batch_size(4)
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "OUTPUT0")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            pairs = (("OUTPUT0", a + b), ("OUTPUT1", a - b))
            tensors = [pb_utils.Tensor(name, array.astype(self.dtype)) for name, array in pairs]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
"#;

/// Takes texts apart at blanks: as many words as there are, and not those that are shorter than `least`.
const TOKENS: &str = include_str!("tokens.py");

/// Tells kinds of irises by their leaves.
const IRIS: &str = r#"
import downbeat
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

class Iris(downbeat.Model):
    def load(self, context):
        irises = load_iris()
        self.names = irises.target_names.astype(object)
        self.model = LogisticRegression(max_iter=1000).fit(irises.data, irises.target)

    def predict(self, batch):
        found = self.model.predict(batch["leaves"])
        return {"label": found, "name": self.names[found].reshape(-1, 1)}
"#;
const IRIS_CONFIG: &str = r#"
    max_batch_size: 16
    input { name: "leaves" data_type: TYPE_FP32 dims: 4 }
    output [ { name: "label" data_type: TYPE_INT64 dims: 1 reshape { shape: [] } },
             { name: "name" data_type: TYPE_STRING dims: 1 } ]
"#;

/// Adds one to each byte; `misbehave` comes before.
fn adds_one(misbehave: &str) -> String {
    format!(
        "import os, time, downbeat\n\
         class Adds(downbeat.Model):\n    def predict(self, batch):\n        x = batch['x']\n        \
         {misbehave}\n        return x + 1\n"
    )
}

/// Has it answer how often it has run, in place of adding one.
const COUNTS: &str = "self.runs = getattr(self, 'runs', -1) + 1; x = x * 0 + self.runs";
const BYTES: usize = 16;

fn adds_config(python: &str, parameters: &str) -> String {
    format!(
        r#"backend: "python" max_batch_size: 64 {parameters}
        input {{ name: "x" data_type: TYPE_UINT8 dims: {BYTES} }}
        output {{ name: "y" data_type: TYPE_UINT8 dims: {BYTES} }}
        parameters {{ key: "python" value {{ string_value: "{python}" }} }}"#
    )
}

const SECOND: &str = "parameters { key: \"slo_ms\" value { string_value: \"1000\" } }";

/// A model in Python; one that says itself what it takes and gives has no configuration.
pub(super) fn write_model(repository: &Path, name: &str, config: &str, text: &str) {
    let folder = repository.join(name);
    fs::create_dir_all(folder.join("1")).unwrap();
    fs::write(folder.join("1/model.py"), text).unwrap();
    if !config.is_empty() {
        fs::write(folder.join("config.pbtxt"), config).unwrap();
    }
}

fn load_only(repository: &Path) -> Result<Arc<dyn Executor>, ExecutorError> {
    let model = repository::load(repository).unwrap().whole().unwrap().remove(0);
    let programs = Programs::launched_by(env!("CARGO_BIN_EXE_downbeat"));
    backend::executor::load(&model, (&[0], &1.into()), &OnnxRuntime::default(), &programs)
}

/// A model in ONNX, without an objective: the file alone.
fn copy_digits(repository: &Path) {
    let to = repository.join("digits/1");
    fs::create_dir_all(&to).unwrap();
    fs::copy("models/digits/1/model.onnx", to.join("model.onnx")).unwrap();
}

/// Requests to it. What is judged is who is answered, not how fast a busy machine is.
fn digits(rate_rps: f64) -> Stream {
    let zeros = Input::new("image", DataType::Fp32, &[64], &[0; 256], None, Expected::Any);
    let arrivals = Arrivals::poisson(rate_rps);
    Stream { model: "digits".into(), arrivals, slo_ms: f64::INFINITY, inputs: [zeros].into() }
}

/// Each was answered.
fn assert_all_served(tally: &Tally) {
    let Tally { sent, served, wrong, dropped, errors, .. } = tally;
    assert!(*sent > 0 && served == sent && *wrong == 0, "{served} of {sent}, {wrong} wrong: {dropped:?}, {errors:?}");
}

/// `downbeat up --repository DIR`, where the interpreter for tests is `python3`.
pub(super) struct Up {
    child: Child,
    pub(super) http: SocketAddr,
    _ports: [Port; 2],
}

impl Up {
    pub(super) fn start(repository: &Path, python: &str) -> Self {
        Self::start_with(repository, python, None)
    }

    /// The same, whose first frontend tells how it is at this address.
    pub(super) fn start_with(repository: &Path, python: &str, admin: Option<SocketAddr>) -> Self {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        if let Some(at) = admin {
            writeln!(file, "[frontend]\nadmin = {{ http = '{at}' }}").unwrap();
        }
        let path = std::env::var("PATH").unwrap_or_default();
        let path = Path::new(python).parent().map_or(path.clone(), |folder| format!("{}:{path}", folder.display()));
        let ports = [Port::hold(), Port::hold()];
        let [http, grpc] = ports.each_ref().map(Port::address);
        let mut child = Command::new(env!("CARGO_BIN_EXE_downbeat"))
            .args(["up", "--http", &http.to_string(), "--grpc", &grpc.to_string(), "--config"])
            .args([file.path(), Path::new("--repository"), repository])
            .env("PATH", path)
            .env("RUST_LOG", "warn")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.find(|line| line.as_ref().is_ok_and(|line| line.starts_with("ready: ")));
        assert!(ready.is_some(), "the cluster did not become ready: {:?}", child.wait());
        thread::spawn(move || lines.for_each(drop));
        Self { child, http, _ports: ports }
    }

    /// A request's status, and what it is answered.
    pub(super) fn ask(&self, model: &str, inputs: &Value) -> (u16, Value) {
        let body = json!({ "inputs": inputs }).to_string();
        exchange(self.http, "POST", &format!("/v2/models/{model}/infer"), &body)
    }

    /// Shapes and data of its outputs.
    fn outputs(&self, model: &str, inputs: &Value) -> Vec<(Value, Value)> {
        let (status, answer) = self.ask(model, inputs);
        assert_eq!(status, 200, "{inputs}: {answer}");
        let outputs = answer["outputs"].as_array().unwrap().iter();
        outputs.map(|output| (output["shape"].clone(), output["data"].clone())).collect()
    }

    fn send(&self, seconds: u64, streams: &[Stream]) -> Vec<Tally> {
        let target =
            Target { wire: Wire::Http(Encoding::Binary), ..Target::http(self.http, Duration::from_secs(seconds), 7) };
        generate(&target, streams, |_| {}).unwrap()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        let _ = self.child.wait();
    }
}

/// Requests to a model that adds one to each byte.
fn adds(rate_rps: f64) -> Stream {
    let inputs = (0..8u8).map(|number| {
        let data = [number; BYTES];
        let expected = Expected::Bytes(data.map(|byte| byte + 1).to_vec());
        Input::new("x", DataType::Uint8, &[BYTES], &data, None, expected)
    });
    let (arrivals, inputs) = (Arrivals::poisson(rate_rps), inputs.collect());
    Stream { model: "adds".into(), arrivals, slo_ms: f64::INFINITY, inputs }
}

#[test]
fn models_of_both_kinds_run_with_the_package_of_the_binary() {
    let Some(python) = python() else { return };
    let repository = tempfile::tempdir().unwrap();
    write_model(repository.path(), "adds", &adds_config(python, SECOND), &adds_one("assert len(x) <= 64"));
    let executor = load_only(repository.path()).unwrap();
    let inputs: Vec<u8> = (0..3 * BYTES as u8).collect();
    let expected: Vec<u8> = inputs.iter().map(|byte| byte + 1).collect();
    assert_eq!(run(&*executor, &inputs).unwrap(), expected);

    Programs::launched_by(env!("CARGO_BIN_EXE_downbeat")).complete_configurations();
    let repository = tempfile::tempdir().unwrap();
    let parameter = format!("parameters {{ key: \"python\" value {{ string_value: \"{python}\" }} }}");
    write_model(repository.path(), "add_sub", &parameter, ADD_SUB);
    let executor = load_only(repository.path()).unwrap();
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let found = run(&*executor, &bytes(&[1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0])).unwrap();
    assert_eq!(found, bytes(&[11.0, 22.0, -9.0, -18.0, 33.0, 44.0, -27.0, -36.0]));
}

#[test]
fn numpy_that_is_missing_is_named_in_one_line() {
    let repository = tempfile::tempdir().unwrap();
    let bare = repository.path().join("bare-python");
    fs::write(&bare, "#!/bin/sh\nunset PYTHONPATH\nexec python3 -S \"$@\"\n").unwrap();
    fs::set_permissions(&bare, fs::Permissions::from_mode(0o755)).unwrap();
    write_model(repository.path(), "adds", &adds_config(&bare.display().to_string(), SECOND), &adds_one("pass"));
    let error = load_only(repository.path()).err().unwrap().to_string();
    assert!(error.contains("the Python package numpy is missing for") && error.lines().count() == 1, "{error}");
}

/// A model that cannot say what it takes and gives is refused, in one line, and in time; the others are read.
#[test]
fn a_model_that_cannot_complete_its_configuration_is_refused_alone() {
    let Some(python) = python() else { return };
    Programs::launched_by(env!("CARGO_BIN_EXE_downbeat")).complete_configurations();
    let repository = tempfile::tempdir().unwrap();
    let parameter =
        |key: &str, value: &str| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }} ");
    let config = parameter("python", python);
    let completes = |body: &str| {
        format!(
            "import os, sys, time\nclass TritonPythonModel:\n    @staticmethod\n    \
             def auto_complete_config(config):\n        {body}\n        return config\n"
        )
    };
    let tensors = "for add in (config.add_input, config.add_output):\n            \
                   add({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [2]})\n        ";
    let cases = [
        ("a", "class TritonPythonModel: pass".to_owned(), "found no TritonPythonModel.auto_complete_config"),
        ("b", completes("raise ValueError('no\\nluck')"), "ValueError: no luck"),
        ("c", completes("os._exit(3)"), "it ended with exit code 3"),
        ("d", completes("time.sleep(60)"), "it was not ready within 1.000 s (parameter start_timeout_ms)"),
        ("e", completes(&format!("{tensors}config.as_dict()['dynamic_batching'] = {{'odd': 1}}")), "odd"),
        (
            "f",
            completes(&format!("{tensors}config.as_dict()['input'] *= 100000")),
            "it wrote a line of more than 1048576 bytes",
        ),
        (
            "g",
            completes("config.add_input({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [2]})"),
            "output: found none",
        ),
        (
            "h",
            completes(&format!("{tensors}config.as_dict()['model_transaction_policy'] = {{'decoupled': True}}")),
            "model_transaction_policy.decoupled",
        ),
        ("i", completes(&format!("{tensors}config.as_dict()['input'][0]['dims'] = [-7]")), "input[0].dims: found -7"),
    ];
    for (name, text, _) in &cases {
        let in_time = if *name == "d" { parameter("start_timeout_ms", "1000") } else { String::new() };
        write_model(repository.path(), name, &format!("{config}{in_time}"), text);
    }
    write_model(repository.path(), "whole", &config, &completes(&format!("{tensors}config.set_max_batch_size(3)")));
    let found = repository::load(repository.path()).unwrap();
    let [model] = &found.models[..] else { panic!("{:?}", found.models) };
    assert_eq!((&model.name[..], model.max_batch, model.input_bytes()), ("whole", 3, 8));
    for ((name, _, expected), refused) in cases.iter().zip(&found.refused) {
        assert_eq!(&refused.name, name);
        let reason = &refused.reason;
        assert!(reason.contains(expected) && reason.lines().count() == 1, "{name}: `{reason}`, `{expected}`");
    }
    assert_eq!(found.refused.len(), cases.len());
    let left = || processes_in(&repository.path().canonicalize().unwrap());
    eventually("the end of those that were asked", || left().is_empty());
}

/// A tensor of a request.
fn tensor(name: &str, datatype: &str, shape: &[usize], data: Value) -> Value {
    json!({ "name": name, "datatype": datatype, "shape": shape, "data": data })
}

/// Two of the models in Python say themselves what they take and give; one in ONNX (x + x) takes any length.
#[test]
fn models_of_scikit_learn_of_strings_and_of_triton_are_served_beside_onnx() {
    let Some(python) = python() else { return };
    let repository = tempfile::tempdir().unwrap();
    copy_digits(repository.path());
    write_model(repository.path(), "iris", IRIS_CONFIG, IRIS);
    write_model(repository.path(), "tokens", "", TOKENS);
    write_model(repository.path(), "add_sub", "", ADD_SUB);
    fs::create_dir_all(repository.path().join("twice/1")).unwrap();
    fs::copy("tests/programs/twice.onnx", repository.path().join("twice/1/model.onnx")).unwrap();
    let unsampled = "parameters { key: \"samples\" value { string_value: \"false\" } }";
    write_model(repository.path(), "counts", &adds_config(python, unsampled), &adds_one(COUNTS));
    let up = Up::start(repository.path(), python);
    let x = json!([tensor("x", "UINT8", &[1, BYTES], json!(vec![0; BYTES]))]);
    for runs in 0..3 {
        assert_eq!(up.outputs("counts", &x)[0].1, json!(vec![runs + 1; BYTES]), "nobody but clients has it run");
    }
    let ask_iris = || {
        let leaves = json!([5.1, 3.5, 1.4, 0.2, 6.3, 3.3, 6.0, 2.5]);
        let found = up.outputs("iris", &json!([tensor("leaves", "FP32", &[2, 4], leaves)]));
        let expected = [(json!([2, 1]), json!([0, 2])), (json!([2, 1]), json!(["setosa", "virginica"]))];
        assert_eq!(found, expected);
    };
    let ask_add_sub = |number: usize| {
        let input = |name: &str, data: Value| tensor(name, "FP32", &[1, 2], data);
        let inputs = json!([input("INPUT0", json!([number, 2])), input("INPUT1", json!([1, 1]))]);
        let found: Vec<Value> = up.outputs("add_sub", &inputs).into_iter().map(|(_, data)| data).collect();
        assert_eq!(found, [json!([number as f64 + 1.0, 3.0]), json!([number as f64 - 1.0, 1.0])]);
    };
    let ask_twice = |number: usize| {
        let (numbers, shape) = ((0..number).map(|at| at as f64), json!([1, number]));
        let twice: Vec<f64> = numbers.clone().map(|number| 2.0 * number).collect();
        let inputs = json!([tensor("x", "FP32", &[1, number], json!(numbers.collect::<Vec<f64>>()))]);
        assert_eq!(up.outputs("twice", &inputs), [(shape, json!(twice))]);
    };
    let ask_tokens = |number: usize| {
        let words: Vec<String> = (0..number % 4).map(|at| "\u{fc}".repeat(number % 7 + at)).collect();
        let text = if number % 5 == 3 { format!("odd {number}") } else { words.join(" ") };
        let mut inputs = vec![tensor("text", "BYTES", &[1, 1], json!([text]))];
        let least = number % 3;
        if least > 0 {
            inputs.push(tensor("least", "INT32", &[1, 1], json!([least])));
        }
        if number % 5 == 3 {
            let (status, answer) = up.ask("tokens", &json!(inputs));
            let told = answer["error"].as_str().unwrap();
            assert!(status >= 400 && told.contains(&format!("'odd {number}' is no text")), "{status}: {told}");
            return;
        }
        let words: Vec<&String> =
            words.iter().filter(|word| !word.is_empty() && word.chars().count() >= least).collect();
        let lengths: Vec<usize> = words.iter().map(|word| word.chars().count()).collect();
        let shape = json!([1, words.len()]);
        let expected = [(shape.clone(), json!(words)), (shape, json!(lengths))];
        assert_eq!(up.outputs("tokens", &json!(inputs)), expected, "{text}");
    };
    thread::scope(|scope| {
        for client in 0..8 {
            scope.spawn(move || (0..160).skip(client).step_by(8).for_each(ask_tokens));
        }
        scope.spawn(|| (0..20).for_each(ask_add_sub));
        scope.spawn(|| (0..20).for_each(ask_twice));
        scope.spawn(|| (0..20).for_each(|_| ask_iris()));
        assert_all_served(&up.send(2, &[digits(20.0)])[0]);
    });
}

/// Side by side: a model in ONNX, one in Python, one whose program ends whenever it is asked, and one that hangs. The
/// first two lose nothing.
#[test]
fn a_repository_of_all_kinds_is_served_and_who_fails_fails_alone() {
    let Some(python) = python() else { return };
    let repository = tempfile::tempdir().unwrap();
    copy_digits(repository.path());
    write_model(repository.path(), "adds", &adds_config(python, ""), &adds_one("pass"));
    // Not while they are measured, which is with zeros.
    write_model(repository.path(), "crashes", &adds_config(python, SECOND), &adds_one("if x.any(): os._exit(1)"));
    write_model(repository.path(), "hangs", &adds_config(python, SECOND), &adds_one("if x.any(): time.sleep(3600)"));
    let up = Up::start(repository.path(), python);
    let bad = |model: &str| {
        let input = Input::new("x", DataType::Uint8, &[BYTES], &[7; BYTES], Some(1_000.0), Expected::Any);
        let arrivals = Arrivals::poisson(50.0);
        Stream { model: model.into(), arrivals, slo_ms: 1_000.0, inputs: vec![input].into() }
    };
    let tallies = up.send(5, &[digits(50.0), adds(50.0), bad("crashes"), bad("hangs")]);
    tallies[..2].iter().for_each(assert_all_served);
    for Tally { sent, served, .. } in &tallies[2..] {
        assert!(*sent > 0 && *served == 0, "{served} of {sent}");
    }
    assert!(tallies.iter().all(|tally| tally.ended() == tally.sent), "each has one end");
    let left = processes_in(&repository.path().canonicalize().unwrap());
    assert!(!left.is_empty(), "the program of one model runs");
    drop(up);
    eventually("the end of all programs", || left.iter().all(|pid| test_kill_process(*pid).is_err()));
}
