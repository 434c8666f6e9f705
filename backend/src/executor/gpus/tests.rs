//! What every executor of ONNX models must do, on the CPU and on a GPU that is none ([`cuda::Fake`]), and what is
//! refused before any GPU is asked.

mod unequal;

use std::sync::Mutex;

use cuda::{DriverError, Fake};
use repository::{
    Variable,
    onnx::proto::{GraphProto, TensorProto},
};

use super::*;
use crate::{
    config::Config,
    executor::{
        Onnx,
        onnx::tests::{FP32, INT64, Value, floats, graph, in_repository, load_file, node, reshaped_by_numbers},
    },
};

/// Room for the weights of a few small models, and for what runs them.
const PAGES: usize = 40;

fn models() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")
}

fn digits() -> Model {
    let models = repository::load(&models()).unwrap().models;
    models.into_iter().find(|model| model.name == "digits").unwrap()
}

/// Images as they would lie in slots.
fn images() -> Vec<u8> {
    let text = std::fs::read_to_string(models().join("digits/heldout.csv")).unwrap();
    let pixels = text.lines().flat_map(|line| line.split(',').skip(1));
    pixels.flat_map(|pixel| f32::from(pixel.parse::<u8>().unwrap()).to_le_bytes()).collect()
}

/// GPUs that are none, of which so many pages are for weights.
fn devices(
    weights_pages: u32,
    open: impl Fn(&str) -> Result<Arc<dyn cuda::Driver>, DriverError> + Send + Sync + 'static,
) -> Arc<Devices> {
    let memory_mb = f64::from(weights_pages) * 16.777_216;
    let config: Config = toml::from_str(&format!(
        "scheduler = '127.0.0.1:7000'\nsecret = 'known to the cluster'\nrepository = 'models'\ngpus = 2\n\
         share_gpu = true\ngpu_memory_mb = {memory_mb}\n"
    ))
    .unwrap();
    Devices::new(&config, Box::new(open), crossbeam_channel::unbounded().0).unwrap()
}

/// The digits on GPUs 0 and 1.
pub(crate) fn on_gpus() -> (OnGpus, Vec<Arc<Fake>>) {
    let fakes = vec![Fake::new(PAGES, 1), Fake::new(PAGES, 2)];
    let opened = fakes.clone();
    let open = move |name: &str| Ok(Arc::clone(&opened[name.parse::<usize>().unwrap()]) as Arc<dyn cuda::Driver>);
    let how = (&*models().join("digits/1/model.onnx"), &Batching::equal(1, 1), Precision::Fp32);
    (OnGpus::load(&digits(), how, &[0, 1], &devices(4, open)).unwrap(), fakes)
}

fn execute(executor: &dyn Executor, inputs: &[u8]) -> Vec<f32> {
    let model = digits();
    let mut outputs = vec![0xaa; inputs.len() / model.input_bytes() * model.output_bytes()];
    assert_eq!(executor.execute(inputs, &mut outputs), Ok(vec![]));
    outputs.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// What holds of every executor of the digits.
fn conforms(executor: &dyn Executor, expected: &dyn Executor) {
    let (images, task) = (images(), digits().input_bytes());
    for batch in [1, 2, 3, 5, 7, 16] {
        let inputs = &images[batch * 3 * task..][..batch * task];
        let found = execute(executor, inputs).into_iter().zip(execute(expected, inputs));
        let furthest = found.map(|(found, expected)| (found - expected).abs()).fold(0.0, f32::max);
        assert!(furthest <= 1e-4, "batch of {batch}: {furthest} apart");
    }
    assert!(executor.holds_weights() && executor.is_up() && executor.emulated_profile().is_none());
    let before = execute(executor, &images[..task]);
    executor.release();
    assert!(executor.execute(&images[..task], &mut vec![0; digits().output_bytes()]).is_err(), "its weights are gone");
    executor.read().unwrap();
    executor.read().unwrap();
    assert_eq!(execute(executor, &images[..task]), before);
}

#[test]
fn executors_of_onnx_models_agree_and_their_weights_come_and_go() {
    let cpu = Onnx::load(&digits(), &models().join("digits/1/model.onnx"), &Batching::equal(1, 1)).unwrap();
    conforms(&cpu, &cpu);
    let (gpu, _fakes) = on_gpus();
    conforms(&gpu, &cpu);
}

#[test]
fn the_inputs_of_larger_batches_are_there_when_smaller_ones_have_run() {
    let ((gpu, _fakes), model) = (on_gpus(), digits());
    let inputs = &images()[..4 * model.input_bytes()];
    let region = Region::allocate(4 * (model.input_bytes() + model.output_bytes())).unwrap();
    region.write(0, inputs);
    gpu.try_on(0, &region, |run| [1, 2, 4].into_iter().try_for_each(|tasks| run(tasks).map(drop))).unwrap();
    let mut left = vec![0; inputs.len()];
    region.read(0, &mut left);
    assert!(left == inputs, "a batch of one wrote its outputs over the second task");
}

/// A model on the CPU and on a GPU that is none.
fn both(config: &str, graph: GraphProto) -> Result<[Arc<dyn Executor>; 2], String> {
    in_repository(config, graph, |model, file| {
        let devices = devices(4, |_| Ok(Fake::new(PAGES, 5)));
        let repository::Executor::Onnx { batching, .. } = &model.executor else { panic!("it is {:?}", model.executor) };
        let how = (file, batching, Precision::Fp32);
        // First, as refusals are to be the GPU's.
        let gpu = OnGpus::load(model, how, &[0], &devices).map_err(|error| error.to_string())?;
        let cpu = load_file(model, file).map_err(|error| error.to_string())?;
        Ok([Arc::new(cpu) as Arc<dyn Executor>, Arc::new(gpu)])
    })
}

/// That both give this output.
fn agree(config: &str, graph: GraphProto, inputs: &[u8], expected: &[u8]) {
    for executor in both(config, graph).unwrap() {
        let mut outputs = vec![0xaa; expected.len()];
        assert_eq!(executor.execute(inputs, &mut outputs), Ok(vec![]));
        assert_eq!(outputs, expected, "on {}", if executor.on_gpus().is_some() { "a GPU" } else { "the CPU" });
    }
}

fn int64s(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn tensors_of_all_shapes_lie_where_clients_have_them() {
    let two = "max_batch_size: 4 ";
    let negate = || vec![node("Neg", &["x"], "y", &[])];
    let plain = graph(&[("x", FP32, &[2, 2])], negate(), &[("y", FP32, &[2, 2])]);
    agree("", plain, &floats(&[1.0, 2.0, 3.0, 4.0]), &floats(&[-1.0, -2.0, -3.0, -4.0]));
    let scalar = graph(&[("x", FP32, &[])], negate(), &[("y", FP32, &[])]);
    agree("", scalar, &floats(&[7.0]), &floats(&[-7.0]));
    let ones = format!(
        "{two} input {{ name: 'x' data_type: TYPE_FP32 dims: [ 3, 1, 1 ] }} \
         output {{ name: 'y' data_type: TYPE_FP32 dims: [ 3 ] }}"
    );
    let tail = graph(&[("x", FP32, &[-1, 3, 1, 1])], negate(), &[("y", FP32, &[-1, 3, 1, 1])]);
    agree(&ones, tail, &floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), &floats(&[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]));
    // Tasks lie one after another, each with all its tensors.
    let nodes =
        vec![node("Add", &["x", "y"], "sum", &[]), node("ArgMax", &["y"], "best", &[("axis", 1), ("keepdims", 0)])];
    let inputs: &[Value<'_>] = &[("x", FP32, &[-1, 2]), ("y", FP32, &[-1, 2])];
    let several = graph(inputs, nodes, &[("sum", FP32, &[-1, 2]), ("best", INT64, &[-1])]);
    let tasks = [floats(&[1.0, 2.0, 10.0, 30.0]), floats(&[3.0, 4.0, 30.0, 10.0]), floats(&[5.0, 6.0, 0.0, 1.0])];
    let expected = [
        [floats(&[11.0, 32.0]), int64s(&[1])].concat(),
        [floats(&[33.0, 14.0]), int64s(&[0])].concat(),
        [floats(&[5.0, 7.0]), int64s(&[1])].concat(),
    ];
    agree("", several, &tasks.concat(), &expected.concat());
}

#[test]
fn what_is_known_for_one_size_at_a_time_has_a_plan_for_each() {
    let rows: Vec<f32> = (0..9_u8).map(f32::from).collect();
    let negative: Vec<f32> = rows.iter().map(|number| -number).collect();
    agree("max_batch_size: 4", reshaped_by_numbers(false), &floats(&rows), &floats(&negative));
    let error = both("max_batch_size: 4", reshaped_by_numbers(true)).err().unwrap();
    assert!(error.contains("Reshape"), "{error}");
}

/// A word's vector.
fn embedding() -> GraphProto {
    let nodes = vec![node("Gather", &["table", "word"], "y", &[("axis", 0)])];
    let mut graph = graph(&[("word", INT64, &[-1, 1])], nodes, &[("y", FP32, &[-1, 1, 2])]);
    let float_data = vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5];
    graph.initializer.push(TensorProto {
        name: "table".into(),
        dims: vec![3, 2],
        data_type: FP32,
        float_data,
        ..TensorProto::default()
    });
    graph
}

#[test]
fn a_task_that_cannot_be_computed_has_no_output_and_others_have_none_that_is_wrong() {
    let words = int64s(&[2, 0, 1]);
    agree("", embedding(), &words, &floats(&[2.0, 2.5, 0.0, 0.5, 1.0, 1.5]));
    let [_cpu, gpu] = both("", embedding()).unwrap();
    let mut outputs = vec![0; 24];
    let unknown = int64s(&[2, 99, 1]);
    // tract panics, which loses the whole batch.
    let failed = gpu.execute(&unknown, &mut outputs).unwrap();
    assert_eq!(failed.iter().map(|failed| failed.task).collect::<Vec<_>>(), [1]);
    assert_eq!((&outputs[..8], &outputs[16..]), (&floats(&[2.0, 2.5])[..], &floats(&[1.0, 1.5])[..]));
    assert_eq!(gpu.execute(&words, &mut outputs), Ok(vec![]), "the next batch has nothing of it");
}

#[test]
fn an_operator_without_a_kernel_is_refused_by_name_with_what_runs_it() {
    let found = graph(&[("x", FP32, &[-1, 4])], vec![node("Atan", &["x"], "y", &[])], &[("y", FP32, &[-1, 4])]);
    let text = both("", found).err().unwrap();
    assert!(text.contains("Atan") && text.contains("parameters: executor \"onnx\""), "{text}");
    assert!(!text.contains('\n'), "{text}");
}

#[test]
fn a_batch_runs_on_each_gpu_that_has_the_weights_and_on_no_other() {
    let (model, fakes) = on_gpus();
    let (images, task) = (images(), digits().input_bytes());
    let run = |gpu: usize| {
        let region = Region::allocate(3 * (task + digits().output_bytes())).unwrap();
        region.write(0, &images[..3 * task]);
        let _pinned = model.on(gpu).gpu().pin(&region).unwrap();
        model.on(gpu).stage(Slot(0), &[Part { region: &region, offset: 0, bytes: 3 * task }]).unwrap();
        let rooms = [(0, 1), (1, 2)].map(|(at, tasks)| {
            let bytes = digits().output_bytes();
            Part { region: &region, offset: 3 * task + at * bytes, bytes: tasks * bytes }
        });
        let failed = model.run(gpu, Slot(0), 3, &rooms)?;
        let mut outputs = vec![0; 3 * digits().output_bytes()];
        region.read(3 * task, &mut outputs);
        assert_eq!(failed, []);
        Ok::<_, ExecutorError>(outputs)
    };
    let absent = run(0).unwrap_err().to_string();
    assert!(absent.contains("the weights of digits are not in the GPU's memory"), "{absent}");
    model.on(0).load().unwrap();
    let there = run(0).unwrap();
    assert!(run(1).is_err(), "only the other one has them");
    model.on(1).load().unwrap();
    model.on(0).unload();
    assert_eq!(run(1).unwrap(), there);
    assert!(run(0).is_err());
    assert_eq!((model.sizes().first(), model.sizes().last()), (Some(&1), Some(&digits().max_batch)));
    assert_eq!((model.pages(), model.gpus().collect::<Vec<_>>()), (1, vec![0, 1]));
    drop(model);
    for fake in fakes {
        assert_eq!(Arc::strong_count(&fake), 1, "the GPU was let go");
    }
}

#[test]
fn a_gpu_that_fails_loses_what_it_runs_and_says_that_it_is_down() {
    let (model, fakes) = on_gpus();
    let task = digits().input_bytes();
    let region = Region::allocate(task).unwrap();
    let _pinned = model.on(0).gpu().pin(&region).unwrap();
    let stage = || model.on(0).stage(Slot(0), &[Part { region: &region, offset: 0, bytes: task }]);
    fakes[0].fail(0);
    assert!(stage().is_err() && model.on(0).gpu().is_up(), "one call that fails is no reason to give it up");
    stage().unwrap();
    fakes[0].break_down();
    assert!(stage().is_err());
    assert!(!model.on(0).gpu().is_up() && !model.is_up());
    assert!(model.on(1).gpu().is_up(), "the other one is as it was");
}

#[test]
fn without_a_gpu_what_is_missing_is_one_line_that_names_it() {
    let open = |_: &str| Err(DriverError("no libcuda: looked for libcuda.so.1 in the system's directories".into()));
    let text = devices(1, open).gpu(1).err().unwrap().to_string();
    assert_eq!(text, "GPU 1: no libcuda: looked for libcuda.so.1 in the system's directories");
}

#[test]
fn a_gpu_is_one_backends_unless_all_say_that_they_share_it() {
    // What is set aside, and some pages for weights.
    let pages = 360 + PAGES;
    let fake = Fake::new(pages, 3);
    let open = || {
        let fake = Arc::clone(&fake);
        Box::new(move |_: &str| Ok(Arc::clone(&fake) as Arc<dyn cuda::Driver>))
    };
    let alone = |seed: u32| Devices::one(&crate::config::GpuName::Number(seed), open());
    let first = alone(0);
    first.gpu(0).unwrap();
    let error = alone(1).gpu(0).err().unwrap().to_string();
    assert!(error.contains("another backend of this host uses it") && error.contains("share_gpu"), "{error}");
    devices(1, open()).gpu(0).unwrap();
    drop(first);
    alone(1).gpu(0).unwrap();
}

#[test]
fn what_only_the_cpu_does_is_refused_before_any_gpu_is_asked() {
    let asked = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&asked);
    let devices = devices(1, move |_| {
        *counted.lock().unwrap() += 1;
        Err(DriverError("none".into()))
    });
    let refusal = |change: &dyn Fn(&mut Model, &mut Batching)| {
        let (mut model, mut batching) = (digits(), Batching::equal(1, 1));
        change(&mut model, &mut batching);
        let how = (&*models().join("digits/1/model.onnx"), &batching, Precision::Fp32);
        OnGpus::load(&model, how, &[0], &devices).err().unwrap().to_string()
    };
    let any = Variable { dims: vec![0], reshape_dims: vec![], bytes_max: 256, is_optional: false, any_rank: false };
    let text = refusal(&|model, _| model.inputs[0].variable = Some(any.clone()));
    let expected = "model digits: the size of image is a request's choice, and nothing says that tasks may be padded \
                    (parameters: batch_lengths \"padded\" or \"bucketed:64,256\", and mask_inputs or a mask of the \
                    clients' if the model must know what is padding), which executor = \"cuda\" cannot do; give it \
                    parameters: executor \"onnx\", which runs it on the CPU";
    assert_eq!(text, expected);
    let text = refusal(&|_, batching| batching.elements_max = 100);
    assert!(text.contains("inputs are made for a whole batch"), "{text}");
    let text = refusal(&|model, _| model.inputs[0].name = "picture".into());
    assert!(text.contains("names inputs picture, the file has image"), "as the CPU says it: {text}");
    assert_eq!(*asked.lock().unwrap(), 0);
}
