use super::*;
use crate::{Batching, onnx};
use proptest::prelude::*;
use tempfile::TempDir;

const DIGITS: &str = r#"
backend: "onnxruntime"
max_batch_size: 16
input [ { name: "image" data_type: TYPE_FP32 dims: [ 64 ] } ]
output { name: "probabilities" data_type: TYPE_FP32 dims: 10 label_filename: "labels.txt" }
parameters { key: "slo_ms" value: { string_value: "20" } }
"#;

/// A repository with one model, `digits`, in versions 2 and 10.
fn repository(config: &str) -> TempDir {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path().join("digits");
    for version in ["2", "10", "notes"] {
        fs::create_dir_all(folder.join(version)).unwrap();
        fs::write(folder.join(version).join("model.onnx"), "").unwrap();
    }
    fs::write(folder.join("config.pbtxt"), config).unwrap();
    fs::write(folder.join("labels.txt"), "zero\none\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n").unwrap();
    repository
}

/// The error that a configuration gives, without the temporary folder's name.
fn error(config: &str) -> String {
    let repository = repository(config);
    let prefix = format!("{}/", repository.path().display());
    crate::load::load(repository.path()).unwrap().whole().unwrap_err().to_string().replace(&prefix, "")
}

/// The only model of a repository.
fn model(repository: &TempDir) -> Model {
    crate::load::load(repository.path()).unwrap().whole().unwrap().remove(0)
}

#[test]
fn a_model_of_files_loads() {
    let repository = repository(DIGITS);
    fs::write(repository.path().join("README"), "not a model").unwrap();
    let model = model(&repository);
    assert_eq!((model.name.as_str(), model.version.as_str()), ("digits", "10"), "10 is above 2 as a number");
    assert_eq!(model.inputs, [Tensor::new("image", DataType::Fp32, vec![64])]);
    assert_eq!((model.input_bytes(), model.output_bytes(), model.max_batch), (256, 40, 16));
    assert_eq!(model.slo, Span::from_millis(20));
    assert_eq!(
        model.executor,
        Executor::Onnx {
            file: repository.path().join("digits/10/model.onnx"),
            batching: Batching::equal(1, 1),
            profile: None,
            wanted: Wanted::default(),
        }
    );
    assert_eq!((model.labels[0].len(), model.labels[0][9].as_str()), (10, "nine"));
}

#[test]
fn the_models_that_come_with_the_project_load() {
    let models = crate::load::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")).unwrap().whole().unwrap();
    let emulated = |name: &str| models.iter().find(|model| model.name == name).unwrap();
    let resnet50 = emulated("resnet50");
    let profile = LatencyProfile::linear(1.053, 5.072, resnet50.max_batch).unwrap();
    assert_eq!(resnet50.executor, Executor::Emulated { profile });
    assert_eq!((resnet50.input_bytes(), resnet50.output_bytes()), (3 * 224 * 224, 16));
    assert_eq!(emulated("inception_resnet_v2").slo, Span::from_millis(70));
}

#[test]
fn fields_of_triton_that_change_nothing_are_accepted() {
    let config = format!(
        "{DIGITS} instance_group [ {{ count: 1 kind: KIND_GPU }} ] dynamic_batching {{ }} \
         version_policy: {{ latest {{ num_versions: 1 }} }}"
    );
    assert_eq!(model(&repository(&config)).max_batch, 16);
}

#[test]
fn what_would_change_answers_is_refused_by_name() {
    let cases = [
        ("sequence_batching { oldest { } }", "sequence_batching: found it, expected none: the requests of a sequence"),
        ("cc_model_filenames { key: \"7.5\" value: \"m\" }", "cc_model_filenames: found it, expected none: one file"),
        ("model_operations { op_library_filename: \"x.so\" }", "model_operations: found it, expected none"),
        ("model_repository_agents { agents { name: \"checksum\" } }", "model_repository_agents: found it"),
        ("model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled: found it, expected none"),
        ("input { name: \"s\" is_shape_tensor: true }", "input[1].is_shape_tensor: found it, expected none"),
        ("output { name: \"s\" is_shape_tensor: true }", "output[1].is_shape_tensor: found it, expected none"),
    ];
    for (field, expected) in cases {
        let found = error(&format!("{DIGITS} {field}"));
        assert!(found.starts_with("digits/config.pbtxt: ") && found.contains(expected), "`{found}`, `{expected}`");
    }
    let accepted = r#"
        optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt"
            parameters { key: "precision_mode" value: "FP16" } } ] } input_pinned_memory { enable: false } }
        dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
            default_queue_policy { timeout_action: DELAY max_queue_size: 4 }
            priority_levels: 2 default_priority_level: 1
            priority_queue_policy { key: 2 value: { max_queue_size: 7 } } }
        model_warmup [ { name: "w" batch_size: 1 inputs { key: "image" value: {
            data_type: TYPE_FP32 dims: 64 zero_data: true } } } ]
        response_cache { enable: true } model_transaction_policy { decoupled: false }
        metric_tags { key: "a" value: "b" } runtime: "x"
        model_metrics { metric_control: [ { metric_identifier { family: "f" }
            histogram_options { buckets: [ 1, 2.5 ] } } ] }
        instance_group [ { kind: KIND_GPU gpus: [ 0 ] rate_limiter { resources [ { name: "R" count: 4 } ] } } ]
    "#;
    assert_eq!(model(&repository(&format!("{DIGITS} {accepted}"))).priorities.levels, 2);
}

#[test]
fn one_bad_model_leaves_the_others_and_says_why() {
    let repository = repository(DIGITS);
    let bad = repository.path().join("bad");
    fs::create_dir(&bad).unwrap();
    fs::write(bad.join("config.pbtxt"), "max_batch: 3").unwrap();
    let found = crate::load::load(repository.path()).unwrap();
    assert_eq!((found.models.len(), &found.models[0].name[..]), (1, "digits"));
    let refused = &found.refused[0];
    assert_eq!((found.refused.len(), &refused.name[..]), (1, "bad"));
    assert!(
        refused.reason.ends_with(
            "bad/config.pbtxt: line 1, column 1: field 'max_batch' not found for message \
        'inference.ModelConfig'"
        ),
        "{}",
        refused.reason
    );
    let strict = found.checked(true).unwrap_err().to_string();
    assert!(strict.contains("bad/config.pbtxt: line 1"), "{strict}");
}

#[test]
fn a_configuration_is_told_as_it_was_written_and_completed() {
    let config = DIGITS.replace("dims: [ 64 ]", "dims: [ 64 ] format: FORMAT_NHWC")
        + r#"
        dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 12345678901 }
        instance_group [ { count: 2 kind: KIND_CPU } ]
        parameters { key: "names" value: { string_value: "{0: 'cat'}" } }
    "#;
    let told = serde_json::to_value(&model(&repository(&config)).configuration).unwrap();
    assert_eq!(
        (&told["name"], &told["backend"], &told["platform"]),
        (&"digits".into(), &"onnxruntime".into(), &"onnxruntime_onnx".into())
    );
    assert_eq!(told["max_batch_size"], 16);
    assert_eq!(told["input"][0]["format"], "FORMAT_NHWC");
    assert_eq!((&told["input"][0]["data_type"], &told["input"][0]["dims"]), (&"TYPE_FP32".into(), &[64].into()));
    assert_eq!(told["input"][0]["is_shape_tensor"], false);
    assert_eq!(told["output"][0]["label_filename"], "labels.txt");
    assert_eq!(told["dynamic_batching"]["preferred_batch_size"], serde_json::json!([4, 8]));
    assert_eq!(told["dynamic_batching"]["max_queue_delay_microseconds"], 12_345_678_901_u64);
    assert_eq!(
        (&told["instance_group"][0]["kind"], &told["instance_group"][0]["count"]),
        (&"KIND_CPU".into(), &2.into())
    );
    assert_eq!(told["parameters"]["names"]["string_value"], "{0: 'cat'}");
    assert_eq!(told["parameters"]["slo_ms"]["string_value"], "20");
    assert_eq!(told["version_policy"], serde_json::json!({ "latest": { "num_versions": 1 } }));
    assert_eq!(told.get("optimization"), None);
    let file = onnx::tests::file(&[("x", 1, &[-1, 3])], &[("y", 7, &[-1])], &[]);
    let told = serde_json::to_value(&model(&plain(&file, None)).configuration).unwrap();
    assert_eq!((&told["max_batch_size"], &told["backend"]), (&32.into(), &"onnx".into()));
    assert_eq!((&told["output"][0]["dims"], told["output"][0].get("reshape")), (&serde_json::json!([]), None));
    assert_eq!(told["parameters"], serde_json::json!({}), "there is no objective");
}

#[test]
fn without_batches_dims_are_the_whole_shape() {
    let file = |x: &[i64], y: &[i64]| onnx::tests::file(&[("x", 1, x)], &[("y", 7, y)], &[]);
    let shapes = |file: &[u8], config: &str| {
        let model = model(&plain(file, Some(config)));
        let (x, y) = (&model.inputs[0], &model.outputs[0]);
        (model.is_batched, model.rows_max, x.shape.clone(), y.shape.clone(), y.model_shape().to_vec())
    };
    // As the file says.
    assert_eq!(shapes(&file(&[1, 3], &[4, 2]), ""), (false, 1, vec![1, 3], vec![4, 2], vec![4, 2]));
    assert_eq!(shapes(&file(&[1, 3], &[]), ""), (false, 1, vec![1, 3], vec![], vec![]));
    assert_eq!(shapes(&file(&[-1, 3], &[-1]), ""), (true, 32, vec![3], vec![], vec![]));
    // As the configuration says, which is the batch's if the file has one dimension more.
    let dims =
        |x: &str, y: &str| format!("input {{ name: \"x\" dims: [ {x} ] }} output {{ name: \"y\" dims: [ {y} ] }}");
    assert!(!shapes(&file(&[-1, 3], &[-1, 2]), &dims("5, 3", "5, 2")).0);
    assert!(shapes(&file(&[-1, 3], &[-1, 2]), &dims("3", "2")).0);
    let reshaped = |shape: &str| {
        let output = format!("output {{ name: \"y\" dims: [ 1000 ] reshape {{ shape: [ {shape} ] }} }}");
        format!("input {{ name: \"x\" dims: [ 3 ] }} {output}")
    };
    let found = shapes(&file(&[3], &[1, 1000, 1]), &reshaped("1, 1000, 1"));
    assert_eq!(found, (false, 1, vec![3], vec![1000], vec![1, 1000, 1]));
    let repository = plain(&file(&[3], &[2]), Some(&reshaped("3")));
    let error = crate::load::load(repository.path()).unwrap().whole().unwrap_err().to_string();
    assert!(
        error.ends_with("output[0].reshape.shape: found [3], expected as many elements as dims [1000] have"),
        "{error}"
    );
    // More rows than an execution takes.
    let model = model(&self::repository(&DIGITS.replace("size: 16", "size: 4096")));
    assert_eq!((model.rows_max, model.max_batch), (4096, LatencyProfile::MAX_BATCH));
}

#[test]
fn a_version_policy_says_which_versions_are_served() {
    let versions = |policy: &str| -> Vec<String> {
        let folder = repository(&format!("{DIGITS} {policy}"));
        for name in ["3", "0", "04", "-7", "1x"] {
            fs::create_dir_all(folder.path().join("digits").join(name)).unwrap();
            fs::write(folder.path().join("digits").join(name).join("model.onnx"), "").unwrap();
        }
        let found = crate::load::load_named(&crate::Source::repository(folder.path()), "digits", None).unwrap();
        found.into_iter().map(|model| model.version).collect()
    };
    assert_eq!(versions(""), ["10"]);
    assert_eq!(versions("version_policy { latest { num_versions: 2 } }"), ["3", "10"]);
    assert_eq!(versions("version_policy { latest { num_versions: 9 } }"), ["2", "3", "10"]);
    assert_eq!(versions("version_policy { all { } }"), ["2", "3", "10"], "others are no versions");
    assert_eq!(versions("version_policy { specific { versions: [ 10, 1, 2 ] } }"), ["2", "10"]);
}

#[test]
fn a_version_without_its_file_keeps_no_other_from_being_served() {
    let folder = repository(&format!("{DIGITS} version_policy {{ all {{ }} }}"));
    fs::remove_file(folder.path().join("digits/2/model.onnx")).unwrap();
    let found = crate::load::load(folder.path()).unwrap();
    assert_eq!(found.models.iter().map(|model| &model.version[..]).collect::<Vec<_>>(), ["10"]);
    let [Refused { name, version, reason }] = &found.refused[..] else { panic!("{found:?}") };
    assert_eq!((&name[..], &version[..]), ("digits", "2"));
    assert!(reason.ends_with("digits/2/model.onnx: no such file, expected the model"), "{reason}");
    let error =
        crate::load::load_named(&crate::Source::repository(folder.path()), "digits", None).unwrap_err().to_string();
    assert_eq!(error, format!("load failed for model 'digits': version 2: {reason}"), "whoever asks is told");
}

#[test]
fn more_versions_than_can_be_served_at_once_are_refused() {
    let folder = repository(&format!("{DIGITS} version_policy {{ all {{ }} }}"));
    (100..200).for_each(|number| fs::create_dir_all(folder.path().join(format!("digits/{number}"))).unwrap());
    let error = crate::load::load_model(&folder.path().join("digits")).unwrap_err().to_string();
    assert!(error.contains("version_policy: found 102 versions, expected at most 64 at once"), "{error}");
}

/// A repository whose `digits`, in version 1, have this file and perhaps a configuration.
fn plain(model: &[u8], config: Option<&str>) -> TempDir {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path().join("digits");
    fs::create_dir_all(folder.join("1")).unwrap();
    fs::write(folder.join("1/model.onnx"), model).unwrap();
    config.into_iter().for_each(|config| fs::write(folder.join("config.pbtxt"), config).unwrap());
    repository
}

#[test]
fn a_model_without_a_configuration_is_as_its_file_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits/1/model.onnx");
    let repository = plain(&fs::read(&file).unwrap(), None);
    let model = model(&repository);
    let tensor = |name: &str, length| Tensor::new(name, DataType::Fp32, vec![length]);
    assert_eq!((model.name.as_str(), model.version.as_str()), ("digits", "1"));
    assert_eq!((model.inputs, model.outputs), (vec![tensor("image", 64)], vec![tensor("probabilities", 10)]));
    assert_eq!((model.max_batch, model.slo), (32, Span::ENDLESS));
    let file = repository.path().join("digits/1/model.onnx");
    let (batching, wanted) = (Batching::equal(1, 1), Wanted::default());
    assert_eq!(model.executor, Executor::Onnx { file, batching, profile: None, wanted });
}

#[test]
fn a_model_says_where_and_how_precisely_it_runs() {
    let wanted = |parameters: &[(&str, &str)]| {
        let entry = |(key, value): &(&str, &str)| {
            format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}\n")
        };
        let repository = repository(&format!("{DIGITS}{}", parameters.iter().map(entry).collect::<String>()));
        let model = crate::load::load(repository.path()).unwrap().whole().map_err(|error| error.to_string())?.remove(0);
        let name = model.executor_name();
        let Executor::Onnx { wanted, .. } = model.executor else { panic!("{:?}", model.executor) };
        Ok::<_, String>((name, wanted.processor, wanted.precision))
    };
    assert_eq!(wanted(&[]), Ok(("onnx", None, None)), "as each backend is configured");
    assert_eq!(wanted(&[("executor", "onnx")]), Ok(("onnx", Some(Processor::Cpu), None)));
    let runtime = wanted(&[("executor", "onnxruntime")]);
    assert_eq!(runtime, Ok(("onnxruntime", Some(Processor::Onnxruntime), None)), "its backend says so of any model");
    let half = wanted(&[("executor", "cuda"), ("precision", "fp16")]);
    assert_eq!(half, Ok(("cuda", Some(Processor::Cuda), Some(Precision::Fp16))));
    let error = wanted(&[("precision", "half")]).unwrap_err();
    assert!(error.ends_with("precision: found \"half\", expected \"fp32\", \"tf32\" or \"fp16\""), "{error}");
}

#[test]
fn what_a_configuration_says_stays_and_the_file_completes_it() {
    let file = onnx::tests::file(&[("x", 1, &[-1, 3, -1]), ("mask", 9, &[-1, 4])], &[("y", 7, &[-1, 2])], &[]);
    let config = r#"
        max_batch_size: 6
        input { name: "mask" } input { name: "x" dims: [ 3, 5 ] }
        parameters { key: "slo_ms" value { string_value: "30" } }
    "#;
    let completed = model(&plain(&file, Some(config)));
    let tensor = |name: &str, datatype, shape: &[usize]| Tensor::new(name, datatype, shape.to_vec());
    assert_eq!(completed.inputs, [tensor("mask", DataType::Bool, &[4]), tensor("x", DataType::Fp32, &[3, 5])]);
    assert_eq!(completed.outputs, [tensor("y", DataType::Int64, &[2])]);
    assert_eq!((completed.max_batch, completed.slo), (6, Span::from_millis(30)));
}

/// An emulated model with these tensors and parameters.
fn emulated(tensors: &str, parameters: &[(&str, &str)]) -> Result<Model, String> {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path().join("m");
    fs::create_dir(&folder).unwrap();
    let all = [("alpha_ms", "1"), ("beta_ms", "2")].iter().chain(parameters);
    let parameters = all
        .map(|(key, value)| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}"))
        .collect::<String>();
    fs::write(folder.join("config.pbtxt"), format!("backend: \"emulated\" {tensors} {parameters}")).unwrap();
    crate::load::load_model(&folder).map_err(|error| error.to_string().split_once(": ").unwrap().1.to_owned())
}

const DIGEST: &str = "output { name: \"digest\" data_type: TYPE_UINT64 dims: 2 }";

#[test]
fn lengths_that_requests_choose_are_bounded() {
    let with = |tensor: &str, parameters: &[(&str, &str)]| {
        let tensors = format!("max_batch_size: 4 input {{ name: \"x\" {tensor} }} {DIGEST}");
        emulated(&tensors, parameters).map(|model| model.inputs[0].clone())
    };
    let x = with("data_type: TYPE_FP32 dims: [ -1, 3 ]", &[]).unwrap();
    assert_eq!((x.shape.clone(), x.dims().collect::<Vec<_>>()), (vec![2_796_202, 3], vec![-1, 3]));
    assert!([&[0, 3][..], &[1, 3], &[2_796_202, 3]].iter().all(|shape| x.accepts(shape)));
    assert!(![&[2_796_203, 3][..], &[1, 4], &[1], &[], &[1, 3, 1]].iter().any(|shape| x.accepts(shape)));
    // Each may be the longest, but not all at once.
    let x = with("data_type: TYPE_INT8 dims: [ -1, -1 ]", &[("max_bytes", "100")]).unwrap();
    assert!(x.accepts(&[100, 1]) && x.accepts(&[10, 10]) && !x.accepts(&[11, 10]) && !x.accepts(&[101, 0]));
    assert!(!x.accepts(&[usize::MAX, 2]));
    let x = with("data_type: TYPE_FP64 dims: [ -1, -1 ]", &[("max_dims", "1000")]).unwrap();
    assert!(x.accepts(&[1000, 1000]) && !x.accepts(&[1001, 1]));
    assert_eq!(x.bytes(), 8_000_000 + 12);
    let x = with("data_type: TYPE_FP64 dims: [ -1, -1 ]", &[("max_dims", "1000"), ("max_bytes", "800")]).unwrap();
    assert!(x.accepts(&[100, 1]) && !x.accepts(&[101, 1]));
    let x = with("data_type: TYPE_STRING dims: [ 2, -1 ]", &[("max_dims", "5")]).unwrap();
    assert!(x.accepts(&[2, 5]) && !x.accepts(&[2, 6]));
    assert_eq!(x.variable.unwrap().bytes_max, 32 << 20);
    let fixed = with("data_type: TYPE_FP32 dims: [ 100000 ] optional: true", &[]).unwrap();
    assert!(fixed.is_optional() && fixed.accepts(&[100_000]) && !fixed.accepts(&[99_999]));
    assert_eq!(fixed.bytes(), 400_000 + 8, "its size is known");
    assert!(with("data_type: TYPE_FP64 dims: [ -1, -1 ]", &[("max_dims", "100000")]).unwrap().accepts(&[1, 1]));
    assert_eq!(with("data_type: TYPE_INT8 dims: [ 2, 3 ]", &[("max_dims", "1")]).unwrap().variable, None);
}

#[test]
fn reshapes_keep_the_lengths_that_requests_choose_in_their_order() {
    let with = |dims: &str, reshape: &str| {
        let x = format!("data_type: TYPE_INT8 dims: {dims} reshape {{ shape: {reshape} }}");
        let tensors = format!("max_batch_size: 4 input {{ name: \"x\" {x} }} {DIGEST}");
        emulated(&tensors, &[("max_dims", "9")]).map(|model| model.inputs[0].clone())
    };
    let x = with("[ -1, 6, -1 ]", "[ 2, -1, 3, 1, -1 ]").unwrap();
    assert_eq!(x.model_shape_of(&[4, 6, 0]), [2, 4, 3, 1, 0]);
    assert_eq!(x.client_shape_of(&[2, 4, 3, 1, 0]), Some(vec![4, 6, 0]));
    assert_eq!(
        [&[2, 10, 3, 1, 0][..], &[2, 4, 3, 1], &[1, 4, 3, 1, 2]].map(|found| x.client_shape_of(found)),
        [None, None, None]
    );
    for (dims, reshape) in [("[ -1, 6 ]", "[ 6 ]"), ("[ -1, 6 ]", "[ -1, 5 ]"), ("[ 6 ]", "[ -1, 6 ]")] {
        let error = with(dims, reshape).unwrap_err();
        assert!(error.starts_with("input[0].reshape.shape: found ["), "{error}");
    }
    // Lengths of one at the end do not matter.
    let y = Tensor { reshape: None, ..with("[ -1 ]", "[ -1 ]").unwrap() };
    assert_eq!(
        [&[5, 1, 1][..], &[5], &[0], &[], &[5, 2]].map(|found| y.client_shape_of(found)),
        [Some(vec![5]), Some(vec![5]), Some(vec![0]), None, None]
    );
    let fixed = Tensor::new("y", DataType::Fp32, vec![1, 3]);
    assert_eq!(fixed.client_shape_of(&[3, 1, 1]), Some(vec![1, 3]));
    assert_eq!(fixed.client_shape_of(&[3, 2]), None);
}

#[test]
fn an_emulated_model_may_give_its_inputs_back() {
    let x = "name: \"x\" data_type: TYPE_STRING dims: -1";
    let echo = |output: &str| emulated(&format!("input {{ {x} }} output {{ {output} }}"), &[]);
    let model = echo("name: \"y\" data_type: TYPE_STRING dims: -1").unwrap();
    assert_eq!((model.outputs[0].datatype, model.outputs[0].dims().next()), (DataType::Bytes, Some(-1)));
    for other in ["data_type: TYPE_STRING dims: 1", "data_type: TYPE_INT8 dims: -1"] {
        let error = echo(&format!("name: \"y\" {other}")).unwrap_err();
        assert!(
            error.starts_with("output: found \"y\", expected only \"digest\", TYPE_UINT64, dims [ 2 ], or one for")
        );
    }
}

#[test]
fn bounds_that_nobody_says_are_parts_of_a_batch() {
    let bytes_max = |rows: usize, tensors: usize| {
        let one = |at| format!("input {{ name: \"x{at}\" data_type: TYPE_INT8 dims: -1 }}");
        let inputs: String = (0..tensors).map(one).collect();
        let model = emulated(&format!("max_batch_size: {rows} {inputs} {DIGEST}"), &[]).unwrap();
        model.inputs[0].variable.as_ref().unwrap().bytes_max
    };
    assert_eq!(bytes_max(32, 2), 8 << 20, "a picture of 800 x 800, or 5,000 tokens of MiniLM");
    assert_eq!((bytes_max(1, 1), bytes_max(256, 4)), (32 << 20, 4 << 20), "the most and the least");
}

#[test]
fn the_batch_is_a_dimension_only_where_all_tensors_share_it() {
    let of = |input: &[i64], output: &[i64], config: &str| {
        let file = onnx::tests::file(&[("x", 1, input)], &[("y", 1, output)], &[]);
        let model = model(&plain(&file, Some(config)));
        let dims = |tensor: &Tensor| tensor.dims().collect::<Vec<_>>();
        (model.is_batched, dims(&model.inputs[0]), dims(&model.outputs[0]))
    };
    assert_eq!(of(&[-1, 6, 4], &[-1, 3], ""), (true, vec![6, 4], vec![3]));
    assert_eq!(of(&[-2, 4], &[-2], ""), (true, vec![4], vec![]), "rows without names, and one that has no dimension");
    assert_eq!(of(&[-1, 6, 4], &[-2, 3], ""), (false, vec![-1, 6, 4], vec![-1, 3]), "others than the input's");
    assert_eq!(of(&[-1, 6, 4], &[-1, 3], "max_batch_size: 0"), (false, vec![-1, 6, 4], vec![-1, 3]));
    assert_eq!(of(&[-1], &[-1], "max_batch_size: 0"), (false, vec![-1], vec![-1]));
    assert_eq!(of(&[-1, 4], &[1, 2], ""), (false, vec![-1, 4], vec![-1, 2]), "a note of the example that was traced");
    assert_eq!(of(&[3, 4], &[1, 2], ""), (false, vec![3, 4], vec![1, 2]));
    assert_eq!(of(&[3, 4], &[], ""), (false, vec![3, 4], vec![]), "a number");
}

#[test]
fn how_many_dimensions_an_output_has_is_the_graphs_to_say() {
    let file = onnx::tests::file(&[("x", 1, &[1, -1])], &[("y", 1, &[1, -1])], &[]);
    let any_rank = |config: &str| {
        let y = model(&plain(&file, Some(config))).outputs.remove(0);
        (y.variable.as_ref().unwrap().any_rank, y.client_shape_of(&[4, 1, 9]))
    };
    let (whole, dims) = ("output { name: \"y\" data_type: TYPE_FP32 dims: [ 1, -1 ] }", vec![4, 1, 9]);
    assert_eq!((any_rank(""), any_rank(whole)), ((true, Some(dims)), (false, None)), "unless somebody says it");
}

#[test]
fn a_number_is_taken_as_a_vector_of_one_too() {
    let file = onnx::tests::file(&[("x", 1, &[]), ("z", 1, &[3])], &[("y", 1, &[3])], &[]);
    let x = &model(&plain(&file, None)).inputs[0];
    assert!(x.accepts(&[]) && x.accepts(&[1]) && !x.accepts(&[2]) && !x.accepts(&[1, 1]));
}

#[test]
fn labels_of_any_count_and_files_as_windows_writes_them() {
    let folder = repository(&format!("\u{feff}{}", DIGITS.replace("dims: 10", "dims: 9")));
    assert_eq!(model(&folder).labels[0].len(), 10, "one more than there are elements");
    fs::write(folder.path().join("digits/labels.txt"), b"\xef\xbb\xbfzero\r\none\r\n").unwrap();
    assert_eq!(model(&folder).labels[0], ["zero", "one"]);
    fs::write(folder.path().join("digits/labels.txt"), b"caf\xe9\n").unwrap();
    assert_eq!(model(&folder).labels[0], ["caf\u{e9}"]);
}

#[test]
fn a_file_of_any_length_needs_no_configuration() {
    let file = onnx::tests::file(&[("x", 7, &[-1, -1, 3]), ("s", 8, &[-1, 1])], &[("y", 1, &[-1, -1])], &[]);
    let completed = model(&plain(&file, None));
    let dims = |tensor: &Tensor| (tensor.datatype, tensor.dims().collect::<Vec<_>>());
    let inputs: Vec<_> = completed.inputs.iter().map(dims).collect();
    assert_eq!(inputs, [(DataType::Int64, vec![-1, 3]), (DataType::Bytes, vec![1])]);
    assert_eq!((dims(&completed.outputs[0]), completed.max_batch), ((DataType::Fp32, vec![-1]), 32));
}

#[test]
fn what_a_file_cannot_complete_names_the_file_and_the_key() {
    let error = |file: &[u8], config: &str| {
        let repository = plain(file, Some(config));
        let prefix = format!("{}/", repository.path().display());
        crate::load::load(repository.path()).unwrap().whole().unwrap_err().to_string().replace(&prefix, "")
    };
    let of = |elem_type, dims: &[i64]| onnx::tests::file(&[("x", elem_type, dims)], &[("y", 1, &[-1, 2])], &[]);
    let cases = [
        (error(b"no model", ""), "digits/1/model.onnx: found no ONNX model ("),
        (error(&of(14, &[-1, 3]), ""), "digits/1/model.onnx: input 'x': data_type: found none that the protocol has"),
        (
            error(&of(1, &[-1, 0]), ""),
            "digits/1/model.onnx: input 'x': dims: found shape [N, 0], expected lengths above 0",
        ),
        (
            error(&of(1, &[-1, 3]), "input { name: \"z\" }"),
            "digits/config.pbtxt: input.name: found \"z\", expected one of the model file's: x",
        ),
        (
            error(&of(1, &[-1, 3]), "default_model_filename: \"m.onnx\""),
            "digits/1/m.onnx: no such file, expected the model",
        ),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected) && !found.contains('\n'), "found `{found}`, expected `{expected}`");
    }
}

#[test]
fn priorities_are_levels_from_1_and_what_is_no_level_is_the_default() {
    let with = |fields: &str| format!("{DIGITS} dynamic_batching {{ {fields} }}");
    let model = |config: &str| model(&repository(config));
    assert_eq!(model(DIGITS).priorities.of(1), 0, "no levels");
    let priorities = model(&with("priority_levels: 3 default_priority_level: 2")).priorities;
    assert_eq!([0, 1, 2, 3, 4, 258, u64::MAX].map(|asked| priorities.of(asked)), [2, 1, 2, 3, 2, 2, 2]);
    let cases = [
        ("priority_levels: 256", "dynamic_batching.priority_levels: found 256, expected at most 255"),
        ("priority_levels: 2", "dynamic_batching.default_priority_level: found 0, expected 1 to priority_levels"),
        (
            "priority_levels: 2 default_priority_level: 3",
            "dynamic_batching.default_priority_level: found 3, expected 1 to priority_levels",
        ),
        (
            "default_priority_level: 1",
            "dynamic_batching.default_priority_level: found 1, expected 0, as there are no priority_levels",
        ),
    ];
    for (fields, expected) in cases {
        let found = error(&with(fields));
        assert!(found.ends_with(expected), "found `{found}`, expected `{expected}`");
    }
}

#[test]
fn queue_policies_give_objectives_and_bounds_by_priority() {
    let with = |fields: &str| format!("{DIGITS} dynamic_batching {{ {fields} }}");
    let read = |fields: &str| model(&repository(&with(fields)));
    let levels = "priority_levels: 3 default_priority_level: 2";
    let policies = read(&format!(
        "{levels} default_queue_policy {{ default_timeout_microseconds: 9000 max_queue_size: 4 }}
        priority_queue_policy {{ key: 1 value {{ default_timeout_microseconds: 5000 allow_timeout_override: true }} }}
        priority_queue_policy {{ key: 3 value {{ timeout_action: DELAY default_timeout_microseconds: 7000 }} }}"
    ))
    .queue;
    let (ms, endless) = (Span::from_millis, Span::ENDLESS);
    // Priority, what the request asks for, what the model has, and the objective.
    let cases = [
        (2, None, endless, ms(9)),
        (2, Some(ms(4)), endless, ms(9)),
        (2, None, ms(8), ms(8)),
        (1, None, endless, ms(5)),
        (1, Some(ms(4)), endless, ms(4)),
        (1, Some(ms(6)), ms(3), ms(5)),
        (3, None, endless, endless),
        (3, Some(ms(4)), ms(8), ms(4)),
    ];
    for (priority, asked, slo, expected) in cases {
        assert_eq!(policies.objective(priority, asked, slo), expected, "{priority} {asked:?} {slo}");
    }
    assert_eq!((policies.requests_max(3), policies.requests_max(0)), (vec![4, 0, 4, 0], vec![4]));
    assert_eq!(read("").queue.requests_max(0), [0; 0]);
    let cases = [
        (
            "default_queue_policy { default_timeout_microseconds: 600000001 }",
            "dynamic_batching.default_queue_policy.default_timeout_microseconds: found 600000001, expected \
             microseconds, at most 600000000, or 0 for none",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { max_queue_size: 1 } }",
            "dynamic_batching.priority_queue_policy.key: found 3, expected 1 to priority_levels, which is 2",
        ),
    ];
    for (fields, expected) in cases {
        let found = error(&with(fields));
        assert!(found.ends_with(expected), "found `{found}`, expected `{expected}`");
    }
}

#[test]
fn an_emulated_model_needs_no_version_folder() {
    let repository = tempfile::tempdir().unwrap();
    let folder = repository.path().join("m");
    fs::create_dir(&folder).unwrap();
    let config = r#"
        parameters { key: "executor" value { string_value: "emulated" } }
        max_batch_size: 4
        input { name: "x" data_type: TYPE_INT8 dims: 3 }
        output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
        parameters { key: "slo_ms" value { string_value: "9.5" } }
        parameters { key: "alpha_ms" value { string_value: "1" } }
        parameters { key: "beta_ms" value { string_value: "2" } }
    "#;
    fs::write(folder.join("config.pbtxt"), config).unwrap();
    let model = model(&repository);
    assert_eq!((model.version.as_str(), model.slo), ("1", Span::from_micros(9500)));

    assert_eq!(model.weights, WeightsSize::default());
    let parameter =
        |key: &str, value: &str| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}");
    let load = parameter("load_ms", "8.5");
    fs::write(folder.join("config.pbtxt"), format!("{config} {} {load}", parameter("weights_mb", "102.3"))).unwrap();
    let model = crate::load::load(repository.path()).unwrap().models.remove(0);
    let weights = WeightsSize { bytes: Some(102_300_000), load: Some(Span::from_micros(8500)) };
    assert_eq!(model.weights, weights);
    fs::write(folder.join("config.pbtxt"), format!("{config} {load}")).unwrap();
    let error = crate::load::load(repository.path()).unwrap().whole().unwrap_err().to_string();
    assert!(error.ends_with("load_ms: found 8.500 ms, expected weights_mb beside it"), "{error}");

    fs::write(folder.join("config.pbtxt"), config.replace("9.5", "2.5")).unwrap();
    let error = crate::load::load(repository.path()).unwrap().whole().unwrap_err().to_string();
    assert!(error.ends_with("slo_ms: found 2.500 ms, expected at least l(1) = 3.000 ms"), "{error}");
}

#[test]
fn errors_name_the_file_the_key_what_was_found_and_what_was_expected() {
    let wrong = |from: &str, to: &str| {
        assert!(DIGITS.contains(from));
        error(&DIGITS.replace(from, to))
    };
    let weights = |key: &str, found: &str| {
        error(&format!("{DIGITS} parameters {{ key: \"{key}\" value {{ string_value: \"{found}\" }} }}"))
    };
    let cases = [
        (wrong("size: 16", "size: -1"), "digits/config.pbtxt: max_batch_size: found -1, expected 0 to 4096"),
        (wrong("size: 16", "size: 4097"), "digits/config.pbtxt: max_batch_size: found 4097, expected 0 to 4096"),
        (wrong("backend", "name: \"digit\" backend"), "name: found \"digit\", expected the folder's name, \"digits\""),
        (
            wrong("onnxruntime", "pytorch"),
            "backend: found \"pytorch\", expected \"onnxruntime\", \"onnx\", \"python\", \"process\" or \"emulated\"",
        ),
        (
            wrong("[ 64 ]", "[ -2 ]"),
            "input[0].dims: found -2, expected lengths above 0, or -1 for what requests choose",
        ),
        (wrong("[ 64 ]", "[ 0 ]"), "input[0].dims: found 0, expected lengths above 0"),
        (
            wrong("[ 64 ]", "[ -1, 70000000 ]"),
            "max_bytes: found 33554432, expected 280000000 or more, for the dimensions of",
        ),
        (
            weights("max_dims", "0"),
            "max_dims: found \"0\", expected the longest of any dimension that is -1, 1 to 1073741824",
        ),
        (weights("max_bytes", "all"), "max_bytes: found \"all\", expected bytes of any tensor whose size requests"),
        (wrong("[ 64 ]", "[ 70000, 70000 ]"), "input[0].dims: found 4 GiB or more"),
        (wrong("[ 64 ]", "[ 9223372036854775807, 9223372036854775807 ]"), "input[0].dims: found 4 GiB or more"),
        (wrong("TYPE_FP32 dims: [", "99 dims: ["), "input[0].data_type: found 99, expected TYPE_BOOL"),
        (wrong("\"20\"", "\"fast\""), "slo_ms: found \"fast\", expected milliseconds, above 0 and at most 600000"),
        (wrong("\"20\"", "\"nan\""), "slo_ms: found \"nan\", expected milliseconds, above 0 and at most 600000"),
        (
            weights("weights_mb", "-1"),
            "weights_mb: found \"-1\", expected megabytes of 10^6 bytes, above 0 and at most",
        ),
        (weights("weights_mb", "0"), "weights_mb: found \"0\", expected megabytes of 10^6 bytes, above 0 and at most"),
        (
            weights("weights_mb", "inf"),
            "weights_mb: found \"inf\", expected megabytes of 10^6 bytes, above 0 and at most",
        ),
        (weights("load_ms", "nan"), "load_ms: found \"nan\", expected milliseconds, above 0 and at most 600000"),
        (weights("load_ms", "0"), "load_ms: found \"0\", expected milliseconds, above 0 and at most 600000"),
        (wrong("labels.txt", "l.txt"), "digits/l.txt: No such file"),
        (
            wrong("max_batch", "ensemble_scheduling { } max_batch"),
            "digits/config.pbtxt: platform: found \"onnxruntime\" beside ensemble_scheduling, expected \"ensemble\"",
        ),
        (wrong("[ 64 ]", "[ 64"), "digits/config.pbtxt: line 4, column 57: expected ',' or ']'"),
        (wrong("output {", "# output {"), "digits/10/model.onnx: found no graph, expected an ONNX model"),
        (
            wrong("backend: \"onnxruntime\"", "backend: \"emulated\""),
            "output: found \"probabilities\", expected only \"digest\"",
        ),
        (
            wrong("backend", "version_policy { specific { versions: [ 3, 4 ] } } backend"),
            "version_policy.specific: found none of the versions [3, 4], expected one of: 2, 10",
        ),
        (
            wrong("backend", "default_model_filename: \"m.onnx\" backend"),
            "digits/10/m.onnx: no such file, expected the model",
        ),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected) && !found.contains('\n'), "found `{found}`, expected `{expected}`");
    }
}

#[test]
fn a_repository_may_be_empty_and_must_be_there() {
    let repository = tempfile::tempdir().unwrap();
    let found = crate::load::load(repository.path()).unwrap();
    assert!(found.models.is_empty() && found.refused.is_empty());
    assert!(
        crate::load::load(&repository.path().join("missing")).unwrap_err().to_string().contains("cannot be listed")
    );
}

proptest! {
    /// A configuration with any stretch replaced by any text gives a model or an error of one line.
    #[test]
    fn no_text_panics(start in 0..DIGITS.len(), length in 0usize..40, text in "[a-z0-9_:{}\\[\\]\" \n.-]{0,20}") {
        let end = (start + length).min(DIGITS.len());
        let config = format!("{}{text}{}", &DIGITS[..start], &DIGITS[end..]);
        if let Err(error) = crate::load::load(repository(&config).path()).unwrap().whole() {
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }
}

#[test]
fn a_load_may_bring_its_own_configuration() {
    let folder = repository(DIGITS);
    let told = crate::load::load_model(&folder.path().join("digits")).unwrap().configuration;
    let mut json = serde_json::to_value(&told).unwrap();
    json["max_batch_size"] = 4.into();
    json["version_policy"] = serde_json::json!({ "specific": { "versions": [2] } });
    let load = |json: &str| crate::load::load_named(&crate::Source::repository(folder.path()), "digits", Some(json));
    let [model] = &load(&json.to_string()).unwrap()[..] else { panic!("one version") };
    assert_eq!((model.version.as_str(), model.max_batch), ("2", 4), "what is told can be told again");
    assert_eq!(model.labels[0].len(), 10, "files are those of the folder");
    let camel = r#"{ "backend": "onnxruntime", "maxBatchSize": 2, "input": [{ "name": "image", "dataType": "TYPE_FP32",
        "dims": ["64"] }], "output": [{ "name": "p", "data_type": "TYPE_FP32", "dims": [10] }] }"#;
    assert_eq!(load(camel).unwrap()[0].max_batch, 2);
    let negative = camel.replace("maxBatchSize\": 2", "maxBatchSize\": -1");
    for (json, expected) in [
        ("", "parameter config: EOF while parsing a value at line 1 column 0; expected a ModelConfig in JSON"),
        ("{} x", "parameter config: trailing characters at line 1 column 4; expected a ModelConfig in JSON"),
        (r#"{ "max_batch": 2 }"#, "parameter config: unrecognized field name 'max_batch'"),
        (&negative, "parameter config: max_batch_size: found -1, expected 0 to 4096"),
        (r#"{ "name": "other" }"#, "parameter config: name: found \"other\", expected the folder's name, \"digits\""),
    ] {
        let error = load(json).unwrap_err().to_string();
        let error = error.trim_start_matches("load failed for model 'digits': version 10: ");
        assert!(error.starts_with(expected) && error.lines().count() == 1, "{json}: {error}");
    }
}

/// A configuration with a sample, whose input is this.
fn warmed(input: &str) -> String {
    let input = format!("key: \"image\" value: {{ data_type: TYPE_FP32 dims: 64 {input} }}");
    format!("{DIGITS} model_warmup [ {{ name: \"s\" batch_size: 2 count: 3 inputs {{ {input} }} }} ]")
}

#[test]
fn samples_to_warm_up_with_are_read_and_checked() {
    let data = |input: &str| {
        let folder = repository(&warmed(input));
        let of_model = folder.path().join("digits");
        fs::create_dir(of_model.join("warmup")).unwrap();
        fs::write(of_model.join("warmup/raw"), [7; 2 * 64 * 4]).unwrap();
        let model = crate::load::load_model(&of_model).map_err(|error| error.to_string())?;
        let [sample] = &model.configuration.warmup(&model, &of_model).unwrap()[..] else { panic!("one sample") };
        assert_eq!((&sample.name[..], sample.rows, sample.runs), ("s", 2, 3));
        sample.inputs[0].bytes(&model.inputs[0], 2, || 9).map_err(|error| error.to_string())
    };
    assert_eq!(data("zero_data: true"), Ok(vec![0; 512]));
    assert_eq!(data("random_data: true"), Ok(vec![9; 512]));
    assert_eq!(data("input_data_file: \"raw\""), Ok(vec![7; 512]));
    for file in ["", "none", "../config.pbtxt", ".", "a/b"] {
        let error = data(&format!("input_data_file: \"{file}\"")).unwrap_err();
        assert!(error.contains(&format!("input_data_file: found \"{file}\", expected the name of a file")), "{error}");
    }
}

#[test]
fn samples_that_the_model_cannot_run_refuse_it() {
    let sample = warmed("zero_data: true");
    for (from, to, expected) in [
        ("batch_size: 2", "batch_size: 17", "model_warmup \"s\": batch_size: found 17, expected at most 16"),
        ("count: 3", "count: 10001", "model_warmup: found 10001 runs, expected at most 10000"),
        ("key: \"image\"", "key: \"picture\"", "inputs: found \"picture\", expected the model's: image"),
        ("FP32 dims: 64 zero", "INT8 dims: 64 zero", "data_type: found TYPE_INT8, expected TYPE_FP32"),
        ("dims: 64 zero", "dims: 63 zero", "dims: found [63], expected [64]"),
    ] {
        let error = error(&sample.replace(from, to));
        assert!(error.contains(expected), "{to}: {error}");
    }
    let short = WarmupInput { shape: vec![3], data: WarmupData::File("/dev/null".into()) };
    let error = short.bytes(&Tensor::new("x", DataType::Int8, vec![3]), 2, || 0).unwrap_err().to_string();
    assert_eq!(error, "/dev/null: found 0 bytes, expected 6, 2 rows of input \"x\"");
}
