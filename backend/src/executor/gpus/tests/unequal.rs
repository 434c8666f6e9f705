//! Models whose requests choose lengths, on the CPU and on a GPU that is none.

use proptest::prelude::*;

use super::*;
use crate::executor::onnx::tests::{
    Answer, STRING, record, run_records_of,
    unequal::{WIDTH, attention_graph, floats_of, parameter},
};

/// A model with its executors.
struct Both {
    model: Model,
    cpu: Onnx,
    gpu: OnGpus,
    fake: Arc<Fake>,
}

fn load(config: &str, graph: GraphProto) -> Result<Both, String> {
    in_repository(config, graph, load_both)
}

fn load_both(model: &Model, file: &Path) -> Result<Both, String> {
    let repository::Executor::Onnx { batching, .. } = &model.executor else { panic!("it is {:?}", model.executor) };
    let fake = Fake::new(PAGES, 5);
    let opened = Arc::clone(&fake);
    let devices = devices(4, move |_| Ok(Arc::clone(&opened) as Arc<dyn cuda::Driver>));
    let gpu = OnGpus::load(model, (file, batching, Precision::Fp32), &[0], &devices);
    // First, as refusals are to be the GPU's.
    let gpu = gpu.map_err(|error| error.to_string())?;
    let cpu = load_file(model, file).map_err(|error| error.to_string())?;
    Ok(Both { model: model.clone(), cpu, gpu, fake })
}

fn config(how: &str, longest: usize, more: &[(&str, &str)]) -> String {
    let mut all = vec![("batch_lengths", how)];
    let longest = longest.to_string();
    if how == "padded" {
        all.push(("max_dims", &longest));
    }
    all.extend(more);
    let all = all.iter().map(|(key, value)| parameter(key, value)).collect::<String>();
    format!("max_batch_size: 5 {all}")
}

const MASK: (&str, &str) = ("mask_inputs", "{ mask = 'x' }");

impl Both {
    fn answers(&self, tasks: &[Vec<u8>]) -> [Vec<Answer>; 2] {
        [&self.cpu as &dyn Executor, &self.gpu].map(|executor| run_records_of(executor, &self.model.outputs, tasks))
    }

    fn task(&self, x: &[f32]) -> Vec<u8> {
        record(&self.model.inputs, &[(&[x.len() / WIDTH, WIDTH], &floats(x))])
    }
}

/// That all but the last output, which says how long tasks were in their run, are what the CPU answers; yields the
/// last.
fn agree(both: &Both, xs: &[Vec<f32>]) -> Result<Vec<usize>, TestCaseError> {
    let tasks: Vec<Vec<u8>> = xs.iter().map(|x| both.task(x)).collect();
    let [expected, found] = both.answers(&tasks);
    let mut widths = Vec::new();
    for (found, expected) in found.into_iter().zip(expected) {
        let (found, expected) = (found.unwrap(), expected.unwrap());
        for ((shape, found), (same, expected)) in found.iter().zip(&expected).take(3) {
            prop_assert_eq!(shape, same);
            for (found, expected) in floats_of(found).into_iter().zip(floats_of(expected)) {
                prop_assert!((found - expected).abs() < 1e-4, "{found} instead of {expected}");
            }
        }
        widths.push(floats_of(&found[3].1)[0] as usize);
    }
    Ok(widths)
}

fn xs() -> impl Strategy<Value = Vec<Vec<f32>>> {
    let x = prop_oneof![1usize..8, 1usize..=20]
        .prop_flat_map(|length| proptest::collection::vec(-1.0f32..1.0, length * WIDTH));
    proptest::collection::vec(x, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn tasks_that_are_padded_to_a_rung_are_answered_as_on_the_cpu(xs in xs()) {
        static BOTH: std::sync::LazyLock<Both> = std::sync::LazyLock::new(|| {
            let how = config("padded", 20, &[("pad_values", "{ x = 3.5 }"), MASK]);
            load(&how, attention_graph()).unwrap()
        });
        for (x, width) in xs.iter().zip(agree(&BOTH, &xs)?) {
            prop_assert!([1, 2, 4, 8, 16, 20].contains(&width) && width >= x.len() / WIDTH, "{width}");
        }
    }

    #[test]
    fn tasks_in_buckets_are_answered_as_on_the_cpu(xs in xs()) {
        static BOTH: std::sync::LazyLock<Both> =
            std::sync::LazyLock::new(|| load(&config("bucketed:3,20", 0, &[MASK]), attention_graph()).unwrap());
        for (x, width) in xs.iter().zip(agree(&BOTH, &xs)?) {
            prop_assert_eq!(width, if x.len() / WIDTH <= 3 { 3 } else { 20 });
        }
    }
}

#[test]
fn two_lengths_have_a_plan_for_what_requests_can_choose_of_them() {
    let shape: &[i64] = &[-1, -2, -3];
    let negate = graph(&[("x", FP32, shape)], vec![node("Neg", &["x"], "y", &[])], &[("y", FP32, shape)]);
    let how = config("padded", 16, &[("max_bytes", "256")]);
    let both = load(&how, negate).unwrap();
    let forms = both.gpu.unequal.as_ref().unwrap().rungs().forms();
    let lengths: Vec<&[usize]> = forms.iter().map(|form| &form.lengths[..]).collect();
    // 64 elements: 9 x 7 are padded to 16 x 8, 9 x 9 are too many.
    assert!(lengths.contains(&&[16, 8][..]) && !lengths.contains(&&[16, 16][..]), "{lengths:?}");
    let shapes = [[1, 1], [9, 7], [7, 9], [1, 16], [16, 1], [2, 3], [3, 2], [8, 8]];
    let numbers = |[rows, columns]: [usize; 2]| (0..rows * columns).map(|at| at as f32 - 3.0).collect::<Vec<_>>();
    for shapes in shapes.chunks(5) {
        let task = |shape: &[usize; 2]| record(&both.model.inputs, &[(&shape[..], &floats(&numbers(*shape)))]);
        let [expected, found] = both.answers(&shapes.iter().map(task).collect::<Vec<_>>());
        assert!(found == expected && found.iter().all(Result::is_ok), "{found:?}");
    }
}

#[test]
fn a_run_has_no_more_elements_than_the_configuration_says() {
    let both = load(&config("padded", 16, &[MASK, ("batch_elements_max", "64")]), attention_graph()).unwrap();
    for form in both.gpu.unequal.as_ref().unwrap().rungs().forms() {
        let elements = form.lengths[0] * WIDTH;
        let largest = *form.sizes.last().unwrap();
        assert!(largest == 5.min(64 / elements), "{form:?}");
    }
    // l(b) is that of the longest: two of them are a run.
    let [one, two, five] = [1, 2, 5].map(|batch| both.gpu.registered(batch, 0.9));
    assert!(one > Span::ZERO && five == two + two + one, "{one:?} {two:?} {five:?}");
    let xs: Vec<Vec<f32>> = [13, 16, 9, 2, 1].map(|length| vec![0.25; length * WIDTH]).into();
    agree(&both, &xs).unwrap();
}

/// Rows of a table with weights, as many as a request asks for.
fn lookup() -> GraphProto {
    let nodes = vec![node("Gather", &["table", "words"], "y", &[("axis", 0)])];
    let mut lookup = graph(&[("words", INT64, &[-1, -2])], nodes, &[("y", FP32, &[-1, -2, 2])]);
    lookup.initializer.push(embedding().initializer.remove(0));
    lookup
}

#[test]
fn a_task_that_cannot_be_computed_fails_alone_and_one_without_length_too() {
    let both = load(&config("padded", 8, &[]), lookup()).unwrap();
    let task = |words: &[i64]| record(&both.model.inputs, &[(&[words.len()], &int64s(words))]);
    let found = run_records_of(&both.gpu, &both.model.outputs, &[&[1, 2][..], &[0, 7, 1], &[], &[2, 0, 0]].map(task));
    let rows = |values: &[f32]| Ok(vec![(vec![values.len() / 2, 2], floats(values))]);
    assert_eq!(found[0], rows(&[1.0, 1.5, 2.0, 2.5]));
    assert_eq!(found[1], Err(INDEX_OUT_OF_RANGE.to_owned()));
    let none = found[2].as_ref().unwrap_err();
    assert!(none.contains("lengths [0] are none that executor = \"cuda\" runs, which begin at 1"), "{none}");
    assert_eq!(found[3], rows(&[2.0, 2.5, 0.0, 0.5, 0.0, 0.5]));
}

#[test]
fn a_gpu_that_fails_loses_the_batch_and_a_call_that_fails_loses_one() {
    let both = load(&config("padded", 8, &[MASK]), attention_graph()).unwrap();
    let tasks = [1, 8, 3].map(|length| both.task(&vec![0.5; length * WIDTH])).concat();
    let hosted = both.gpu.on(0);
    hosted.load().unwrap();
    let run = || {
        let mut outputs = vec![0; 3 * both.model.output_bytes()];
        both.gpu.run_records(0, Slot(0), &tasks, &mut outputs).map(|failed| (failed, outputs))
    };
    let before = run().unwrap();
    assert!(before.0.is_empty() && !both.gpu.takes_inputs_ahead());
    let mut failures = 0;
    loop {
        both.fake.fail(failures);
        match run() {
            Ok(after) => break assert!(after == before),
            Err(_) => failures += 1,
        }
    }
    assert!(failures > 20 && both.gpu.is_up(), "{failures}");
    both.fake.break_down();
    assert!(run().is_err() && !both.gpu.is_up());
}

#[test]
fn weights_leave_and_come_back_for_all_lengths() {
    let checked = in_repository(&config("bucketed:2,8", 0, &[]), lookup(), |model, file| {
        let both = load_both(model, file)?;
        let tasks = [record(&model.inputs, &[(&[3], &int64s(&[1, 2, 0]))])];
        let before = run_records_of(&both.gpu, &model.outputs, &tasks);
        both.gpu.release();
        assert!(both.gpu.execute(&tasks[0], &mut vec![0; model.output_bytes()]).is_err());
        both.gpu.read().map_err(|error| error.to_string())?;
        assert_eq!(run_records_of(&both.gpu, &model.outputs, &tasks), before);
        assert!(before[0].is_ok());
        Ok(())
    });
    checked.unwrap();
}

#[test]
fn what_cannot_be_padded_is_refused_with_what_to_write() {
    let refusal = |config: &str, graph: GraphProto| load(config, graph).err().unwrap();
    let negate =
        |ty: i32, shape: &[i64]| graph(&[("x", ty, shape)], vec![node("Neg", &["x"], "y", &[])], &[("y", ty, shape)]);
    let text = refusal("max_batch_size: 4", negate(FP32, &[-1, -2]));
    assert!(text.contains("nothing says that tasks may be padded (parameters: batch_lengths \"padded\""), "{text}");
    let identity =
        graph(&[("x", STRING, &[-1, 2])], vec![node("Identity", &["x"], "y", &[])], &[("y", STRING, &[-1, 2])]);
    let text = refusal("max_batch_size: 4", identity);
    assert!(text.contains("x has strings") && text.contains("parameters: executor \"onnx\""), "{text}");
    let many = refusal(&config("padded", 4096, &[("max_bytes", "1000000")]), negate(FP32, &[-1, -2, -3]));
    for part in ["M2", "M3", " plans with", "expected at most 512", "bucketed:64,256", "max_dims", "max_batch_size"] {
        assert!(many.contains(part) && !many.contains('\n'), "{part}: {many}");
    }
    let text = refusal(&config("padded", 64, &[]), negate(FP32, &[-1, -2, -3, -4]));
    assert!(text.contains("make 729 combinations, each with plans of several sizes, expected at most 512"), "{text}");
    let optional = "max_batch_size: 4 input { name: 'x' data_type: TYPE_FP32 dims: [ -1 ] optional: true } \
                    output { name: 'y' data_type: TYPE_FP32 dims: [ -1 ] }";
    let text = refusal(&[optional, &parameter("batch_lengths", "padded")].concat(), negate(FP32, &[-1, -2]));
    assert!(text.contains("requests may leave x out"), "{text}");
    let atan = graph(&[("x", FP32, &[-1, -2])], vec![node("Atan", &["x"], "y", &[])], &[("y", FP32, &[-1, -2])]);
    let text = refusal(&config("padded", 8, &[]), atan);
    assert!(text.contains("Atan") && text.contains("with lengths [1]"), "{text}");
}
