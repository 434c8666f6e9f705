//! Models that ask other models, through every process: by a program without any package, so that it runs everywhere.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::*;

const BYTES: usize = 16;

/// Asks the model that its argument names for each task of a batch, all at once, and gives what that has answered.
const PROGRAM: &str = r#"
import json, mmap, os, socket, sys
control = socket.socket(fileno=int(os.environ["DOWNBEAT_CONTROL_FD"]))
lines = control.makefile("rb")
told = json.loads(lines.readline())["model"]
area = told["output_area"]["offset"]
memory = mmap.mmap(int(os.environ["DOWNBEAT_MEMORY_FD"]), told["memory_bytes"])
width = told["inputs"][0]["shape"][0]
def say(message): control.sendall(json.dumps(message).encode() + b"\n")
say({"ready": {"protocol": 2}})
asked = 0
for line in lines:
    batch = json.loads(line)["batch"]
    (group,) = batch["groups"]
    tasks, first = group["tasks"], asked
    for task in range(tasks):
        tensor = {"name": "x", "datatype": "UINT8", "shape": [1, width], "bytes": width}
        say({"call": {"id": asked, "model": sys.argv[1], "outputs": ["y"], "inputs": [tensor]}})
        control.sendall(memory[task * width:(task + 1) * width])
        asked += 1
    answers = {}
    while len(answers) < tasks:
        called = json.loads(lines.readline())["called"]
        (output,) = called.get("outputs", [None])
        answers[called["id"]] = (called.get("failed"), lines.read(output["bytes"]) if output else None)
    groups = []
    for task in range(tasks):
        failed, data = answers[first + task]
        if failed:
            groups.append({"tasks": 1, "failed": failed})
            continue
        at = area + task * width
        memory[at:at + width] = data
        output = {"datatype": "UINT8", "shape": [1, width], "offset": at, "bytes": width}
        groups.append({"tasks": 1, "outputs": [output]})
    say({"done": {"id": batch["id"], "groups": groups}})
"#;

/// `echo` gives its input back; `asks` asks that, `asks_asks` that one, `asks_face` an ensemble of `echo`; `left` and
/// `right` ask each other, `itself` itself, and `stuck` one that takes twenty thousand times what it says.
fn write_repository(folder: &Path) {
    let tensors = format!(
        "max_batch_size: 8\ninput {{ name: 'x' data_type: TYPE_UINT8 dims: [ {BYTES} ] }}\n\
         output {{ name: 'y' data_type: TYPE_UINT8 dims: [ {BYTES} ] }}\n"
    );
    let parameter =
        |key: &str, value: &str| format!("parameters {{ key: '{key}' value {{ string_value: \"{value}\" }} }}\n");
    let write = |name: &str, config: &[&str]| {
        fs::create_dir_all(folder.join(name).join("1")).unwrap();
        fs::write(folder.join(name).join("config.pbtxt"), config.concat()).unwrap();
    };
    let quick = [("alpha_ms", "1"), ("beta_ms", "1")].map(|(key, value)| parameter(key, value)).concat();
    let slow = [("cost_fixed_ms", "1"), ("cost_per_task", "1"), ("alone_ms", "normal:20000:0")];
    let slow = slow.map(|(key, value)| parameter(key, value)).concat();
    write("echo", &["backend: 'emulated'\n", &tensors, &quick]);
    write("slow", &["backend: 'emulated'\n", &tensors, &quick, &slow]);
    let step = "ensemble_scheduling { step { model_name: 'echo' model_version: -1 input_map { key: 'x' value: 'x' } \
                output_map { key: 'y' value: 'y' } } }\n";
    write("face", &["platform: 'ensemble'\n", &tensors, step]);
    for (name, whom) in [
        ("asks", "echo"),
        ("asks_asks", "asks"),
        ("asks_face", "face"),
        ("left", "right"),
        ("right", "left"),
        ("itself", "itself"),
        ("stuck", "slow"),
    ] {
        let program = parameter("program", &format!("['python3', '1/program.py', '{whom}']"));
        write(name, &["backend: 'process'\n", &tensors, &program, &parameter("calls", "true")]);
        fs::write(folder.join(name).join("1/program.py"), PROGRAM).unwrap();
    }
}

fn infer(address: SocketAddr, model: &str, number: usize, timeout_ms: u64) -> (u16, Value, Value) {
    let data: Vec<u8> = (0..BYTES).map(|at| (at as u8).wrapping_mul(31) ^ number as u8).collect();
    let input = json!({ "name": "x", "datatype": "UINT8", "shape": [1, BYTES], "data": data });
    let body = json!({ "inputs": [input], "parameters": { "timeout": timeout_ms * 1000 } }).to_string();
    let (status, answer) = exchange(address, "POST", &format!("/v2/models/{model}/infer"), &body);
    (status, answer, json!(data))
}

/// It is answered by what it asks; in the end, as members may just have come.
fn is_answered(address: SocketAddr, model: &str) -> bool {
    let (status, answer, expected) = infer(address, model, 1, 30_000);
    assert!(status != 200 || answer["outputs"][0]["data"] == expected, "{model}: {answer}");
    status == 200
}

fn change(address: SocketAddr, model: &str, to: &str) -> u16 {
    exchange(address, "POST", &format!("/v2/repository/models/{model}/{to}"), "{}").0
}

#[test]
fn models_that_ask_models() {
    let folder = tempfile::tempdir().unwrap();
    write_repository(folder.path());
    let up = Up::start(1, "", &[1], &format!("repository = {:?}\n", folder.path()));
    let [http] = up.http[..] else { panic!("one frontend") };
    for model in ["asks", "asks_asks", "asks_face"] {
        eventually("an answer by way of another model", || is_answered(http, model));
    }

    // There is one GPU, which the model needs that all of them wait for.
    let mut asked = Vec::new();
    thread::scope(|scope| {
        let ask = |number: usize| {
            let model = ["asks", "asks_asks", "asks_face"][number % 3];
            scope.spawn(move || infer(http, model, number, 60_000))
        };
        asked.extend((0..64).map(ask).collect::<Vec<_>>().into_iter().map(|one| one.join().unwrap()));
    });
    for (status, answer, expected) in asked {
        assert_eq!((status, &answer["outputs"][0]["data"]), (200, &expected), "{answer}");
    }

    // Whoever would wait for itself is told so.
    for (model, text) in [
        ("itself", "model itself calls itself, which waits for it: found a cycle, expected none"),
        ("left", "model right calls left, which waits for it: found a cycle, expected none"),
    ] {
        let (status, answer, _) = infer(http, model, 1, 30_000);
        assert!(status != 200 && answer["error"].as_str().is_some_and(|error| error.contains(text)), "{answer}");
    }

    // One that is not there any more, and one that does not come back within the objective: others go on.
    assert_eq!(change(http, "echo", "unload"), 200);
    let (status, answer, _) = infer(http, "asks", 1, 30_000);
    assert!(status != 200 && answer["error"].as_str().is_some_and(|error| error.contains("'echo'")), "{answer}");
    assert_eq!(change(http, "echo", "load"), 200);
    eventually("its return", || is_answered(http, "asks"));
    let (status, answer, _) = infer(http, "stuck", 1, 1_000);
    assert_eq!(status, 504, "{answer}");
    eventually("answers of others", || ["asks", "asks_asks", "asks_face"].iter().all(|model| is_answered(http, model)));
}
