//! What the embedded engine must do this must do, too, and what only this can. Where there is no library
//! (`ORT_DYLIB_PATH`, or the system's) the tests are skipped.

use std::{env, process::Command, thread};

use repository::onnx::proto::{AttributeProto, GRAPH, GraphProto, NodeProto, TensorProto};

use super::{super::source::REASON_BYTES_MAX, *};
use crate::{
    config::{Gpus, OnnxRuntime as Settings},
    executor::{
        Executor as _, Onnx,
        onnx::tests::{FP32, INT64, Value, graph, in_repository, node},
    },
};

const BOOL: i32 = 9;
const DOUBLE: i32 = 11;

/// Names what the tests of the embedded engine load models with.
const ENGINE_VARIABLE: &str = "ONNX_TESTS_ENGINE";

/// What the embedded engine alone does: ONNX Runtime believes what a file notes.
const OF_THE_EMBEDDED: &str = "lengths_that_a_file_notes_give_way_to_what_is_configured";

/// Two threads that stand for GPUs.
fn sessions(settings: Settings) -> Sessions {
    settings.sessions(&Gpus::Count(2), &[0, 1], Precision::default()).unwrap()
}

/// How those tests load models, if it is this arm that they are to judge.
pub(in crate::executor::onnx) fn instead() -> Option<Sessions> {
    env::var_os(ENGINE_VARIABLE).map(|_| sessions(Settings::default()))
}

fn is_here() -> bool {
    let found = library::environment(&Settings::default());
    if let Err(error) = &found {
        eprintln!("{error}");
        testing::skip("backend/onnxruntime", "ONNX Runtime's library (ORT_DYLIB_PATH, of PyPI's onnxruntime)");
    }
    found.is_ok()
}

fn load_with(settings: Settings, config: &str, graph: GraphProto) -> Result<Onnx, String> {
    in_repository(config, graph, |model, file| {
        let repository::Executor::Onnx { batching, .. } = &model.executor else { panic!("{:?}", model.executor) };
        Onnx::load_by_onnxruntime(model, (file, batching), &sessions(settings)).map_err(|error| error.to_string())
    })
}

fn load(config: &str, graph: GraphProto) -> Result<Onnx, String> {
    load_with(Settings::default(), config, graph)
}

fn int64s(bytes: &[u8]) -> Vec<i64> {
    bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
}

#[test]
fn what_the_embedded_engine_must_do_this_does() {
    if !is_here() {
        return;
    }
    let mut tests = Command::new(env::current_exe().unwrap());
    tests.args(["executor::onnx::tests::", "--skip", OF_THE_EMBEDDED]);
    let output = tests.env(ENGINE_VARIABLE, "onnxruntime").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let passed = text.lines().find_map(|line| line.strip_prefix("test result: ok. ")).unwrap_or_default();
    let passed: usize = passed.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or_default();
    assert!(passed > 20, "{text}");
}

/// y = 2 to the power of n, by as many additions, as numbers of a type that the embedded engine does not have.
fn doublings() -> GraphProto {
    let body = graph(
        &[("i", INT64, &[]), ("go", BOOL, &[]), ("before", DOUBLE, &[1])],
        vec![node("Identity", &["go"], "goes_on", &[]), node("Add", &["before", "before"], "after", &[])],
        &[("goes_on", BOOL, &[]), ("after", DOUBLE, &[1])],
    );
    let body = AttributeProto { name: "body".into(), r#type: GRAPH, g: Some(body), ..AttributeProto::default() };
    let repeat = NodeProto { attribute: vec![body], ..node("Loop", &["n", "", "one"], "y", &[]) };
    let one = TensorProto {
        name: "one".into(),
        data_type: DOUBLE,
        dims: vec![1],
        double_data: vec![1.0],
        ..TensorProto::default()
    };
    let mut doublings = graph(&[("n", INT64, &[1])], vec![repeat], &[("y", DOUBLE, &[1])]);
    doublings.initializer.push(one);
    doublings
}

#[test]
fn a_model_that_the_embedded_engine_refuses_runs_on_each_of_its_gpus() {
    if !is_here() {
        return;
    }
    let embedded = in_repository("", doublings(), |model, file| {
        crate::executor::onnx::tests::load_embedded(model, file).map_err(|error| error.to_string())
    });
    let error = embedded.err().unwrap();
    assert!(error.contains("the embedded engine lacks; ONNX Runtime has it"), "{error}");
    let model = load("", doublings()).unwrap();
    for (gpu, n) in [(0, 3i64), (1, 10)] {
        let mut outputs = [0xaa; 8];
        assert_eq!(model.execute_on(gpu, &n.to_le_bytes(), &mut outputs), Ok(vec![]));
        assert_eq!(outputs, 2f64.powi(n as i32).to_le_bytes());
    }
    let error = model.execute_on(2, &3i64.to_le_bytes(), &mut [0; 8]).unwrap_err().to_string();
    assert_eq!(error, "execution failed: that GPU does not host it");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "another thread comes in")]
fn a_run_that_is_given_up_ends_and_the_next_is_not_touched() {
    if !is_here() {
        return;
    }
    let model = load("", doublings()).unwrap();
    model.interrupt(0);
    let execute = |n: i64| model.execute_on(0, &n.to_le_bytes(), &mut [0; 8]);
    assert_eq!(execute(2), Ok(vec![]), "nothing ran when it was interrupted");
    thread::scope(|threads| {
        // As many additions take days. Whoever comes too early comes again.
        let endless = threads.spawn(|| execute(1 << 50));
        while !endless.is_finished() {
            model.interrupt(0);
            thread::yield_now();
        }
        assert!(endless.join().unwrap().is_err());
    });
    assert_eq!(execute(2), Ok(vec![]));
}

#[test]
fn a_file_that_does_not_take_what_it_is_given_is_refused_in_one_line() {
    if !is_here() {
        return;
    }
    let negate = |x: Value<'_>, y: Value<'_>| graph(&[x], vec![node("Neg", &["x"], "y", &[])], &[y]);
    let tensors = |dims: &str| {
        format!("max_batch_size: 4 input {{ name: \"x\" dims: [ {dims} ] }} output {{ name: \"y\" dims: [ {dims} ] }}")
    };
    let unknown = graph(&[("x", FP32, &[-1, 2])], vec![node("Nonsense", &["x"], "y", &[])], &[("y", FP32, &[-1, 2])]);
    let mut no_tensor = negate(("x", FP32, &[-1, 2]), ("y", FP32, &[-1, 2]));
    no_tensor.output[0].name = "z".into();
    let lengths = "parameters { key: \"batch_lengths\" value { string_value: \"padded\" } }";
    let doubled = graph(
        &[("x", FP32, &[-1, -2])],
        vec![node("Concat", &["x", "x"], "y", &[("axis", 1)])],
        &[("y", FP32, &[-1, -3])],
    );
    let cases = [
        (
            tensors("3"),
            negate(("x", FP32, &[-1, 2]), ("y", FP32, &[-1, 2])),
            "input x: config.pbtxt says dims [3], the file has [2]",
        ),
        (tensors("2"), negate(("x", FP32, &[1, 2]), ("y", FP32, &[1, 2])), "gives it batch,2,FP32"),
        (
            "input { name: \"x\" data_type: TYPE_INT64 }".into(),
            negate(("x", FP32, &[-1, 2]), ("y", FP32, &[-1, 2])),
            "input x: config.pbtxt says data_type TYPE_INT64, the file has TYPE_FP32",
        ),
        (String::new(), unknown, "Nonsense"),
        (String::new(), no_tensor, "z"),
        (lengths.into(), doubled, "dimension 1 of output y is M3 in the file, whose inputs have M2: expected one of"),
    ];
    for (config, graph, expected) in cases {
        let error = load(&config, graph).err().unwrap_or_else(|| panic!("it was loaded, expected {expected}"));
        assert!(error.contains(expected) && error.starts_with("model m: "), "found `{error}`, expected `{expected}`");
        assert!(!error.contains('\n') && error.len() < 1_000, "{error}");
    }
}

#[test]
fn a_task_that_the_library_cannot_compute_fails_alone_and_says_why() {
    if !is_here() {
        return;
    }
    let mut gather = graph(
        &[("ids", INT64, &[-1, -2])],
        vec![node("Gather", &["table", "ids"], "y", &[])],
        &[("y", INT64, &[-1, -2])],
    );
    gather.initializer.push(TensorProto {
        name: "table".into(),
        data_type: INT64,
        dims: vec![3],
        int64_data: vec![10, 11, 12],
        ..TensorProto::default()
    });
    let model = load("parameters { key: \"max_dims\" value { string_value: \"4\" } }", gather).unwrap();
    let room = repository::cell::bytes_max(&model.groups.outputs);
    let record = |ids: &[i64]| {
        let data: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let mut record = vec![0; repository::cell::bytes_max(&model.groups.inputs)];
        let cell = repository::cell::Cell { shape: vec![ids.len()], data: &data };
        let bytes = repository::cell::write(&model.groups.inputs, &[Some(cell)], &mut record).unwrap();
        record.truncate(bytes);
        record
    };
    let tasks = [record(&[0, 2]), record(&[1, 7]), record(&[2, 1])];
    let mut outputs = vec![0; room * tasks.len()];
    let failed = model.execute(&tasks.concat(), &mut outputs).unwrap();
    assert_eq!(failed.iter().map(|failure| failure.task).collect::<Vec<_>>(), [1]);
    let reason = &failed[0].reason;
    assert!(reason.starts_with("execution failed: ") && !reason.contains('\n'), "{reason}");
    for (task, expected) in [(0, [10, 12]), (2, [12, 11])] {
        let output = &outputs[task * room..][..room];
        let output = &output[..repository::cell::record_bytes(output).unwrap()];
        let cells = repository::cell::read(&model.groups.outputs, output).unwrap();
        assert_eq!(int64s(cells[0].as_ref().unwrap().data), expected);
    }
}

#[test]
fn a_provider_that_the_library_lacks_is_refused_and_so_is_what_it_cannot_do() {
    if !is_here() {
        return;
    }
    if library::has_cuda() {
        testing::skip("backend/onnxruntime_without_cuda", "an ONNX Runtime without CUDA");
        return;
    }
    let settings = Settings { provider: Provider::Cuda, ..Settings::default() };
    let error = load_with(settings, "", doublings()).err().unwrap();
    assert!(error.contains("onnxruntime.provider is cuda, expected cpu, as the library was built without"), "{error}");
    let error = check_cuda(Precision::Fp16).unwrap_err().to_string();
    assert!(error.contains("precision is fp16, expected fp32 or tf32"), "{error}");
}

#[test]
fn reasons_are_one_line_of_bounded_length() {
    assert_eq!(one_line(&"Non-zero status\n  while running\tNeg"), "Non-zero status while running Neg");
    let long = one_line(&"\u{e9}".repeat(REASON_BYTES_MAX));
    assert!(long.len() <= REASON_BYTES_MAX + 2 && long.ends_with("\u{e9}.."), "{long}");
}
