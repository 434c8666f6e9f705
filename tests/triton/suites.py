"""Which of Triton's tests are run, over which models. Models and order are those of each test's test.sh; nothing of the
tests themselves stands here."""

import fnmatch
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SEQUENCES = "needs sequence batching, which the server does not offer"
CUDA = "needs CUDA shared memory, of which the server has none"
FLAG = "tests a flag of tritonserver's command line"
DEBUG = "needs the delays that Triton takes from its environment"
PYTHON = "needs a model of the Python backend that no ONNX file can stand in for"
HELD_BACK = "needs max_queue_delay_microseconds to hold requests back, which changes nothing here"
PLATFORMS = "needs a model of another platform under its own name"
GENERATE = "needs the generate extension, which the server does not offer"
STREAM = "needs the header triton_grpc_error, by which a stream ends with its first error"
# Tests leave out the shared memory of Triton's own processes then, and CUDA's.
NO_PROBE = {"TEST_JETSON": "1"}
DECOUPLED = "needs a decoupled model (many answers to one request)"


# Tests that fail, by suite, and why; docs/compatibility.md says what is on purpose.
DIFFERS = {
    "http/*.test_json_recursion_depth_limit": "tensors in JSON may be nested to any depth",
    "http/*.test_negative_dimensions": "a dimension below 0 is the client's mistake: 400",
    "http/*.test_repository_index_deeply_nested_json": "a body that is no inference has 64 KiB at most: 413",
    "http-curl/*, 5": "`binary_data_output` is for all outputs that do not say otherwise, as in the extension's document",
    "http-curl/*, [67]": "an error says how many elements were found and expected",
    "http-size/*": "a body that is too large is answered with 413",
    "grpc/*.test_bytes_contents_many_elements_serialization":
        "ten million strings in typed contents take 1 GB to decode, more than bodies_bytes_max",
    "grpc-aio/*.test_register_system_shared_memory": "shared memory that is not there is the client's mistake: 400",
    "input-validation/*.test_input_validation_all_optional": "an ONNX file takes all inputs that it names",
    "input-shape/*.test_input_string_shape_validation": "of two inputs that are wrong the first is named",
    "python/*.test_init_args": "its model answers two rows with one number, in the shape of no batch",
    "python-lifecycle/*.test_error_code": "a model's error is INTERNAL, whatever its code is, and begins as all of them",
    "metrics-queue-*/*": "nv_inference_pending_request_count counts those that run, too",
}


def reason(rules, name):
    return next((why for glob, why in rules.items() if fnmatch.fnmatch(name, glob)), None)


class Model:
    """A model's folder, to be changed as test.sh changes it with sed."""

    def __init__(self, folder):
        self.folder, self.config = folder, folder / "config.pbtxt"

    def sub(self, old, new, count=0):
        self.config.write_text(re.sub(old, new, self.config.read_text(), count=count, flags=re.M))
        return self

    def append(self, text):
        with open(self.config, "a") as config:
            config.write("\n" + text + "\n")
        return self

    def without_versions(self, *versions):
        for version in versions:
            shutil.rmtree(self.folder / str(version))
        return self

    def without_config(self):
        self.config.unlink()
        return self


class Repository:
    def __init__(self, state, models, slo_ms, reference):
        self.state, self.models, self.slo_ms, self.reference = state, models, slo_ms, reference

    def add(self, source, name=None):
        """A copy of a generated model, under another name if one is given."""
        base = source.rsplit("/", 1)[1]
        folder = self.models / (name or base)
        shutil.copytree(self.state / "generated" / source, folder)
        model = Model(folder)
        if name and model.config.exists():
            model.sub(rf'^name: "{base}"', f'name: "{name}"')
        return model

    def names(self, source):
        return sorted(folder.name for folder in (self.state / "generated" / source).iterdir())

    def add_all(self, source, but=()):
        for name in self.names(source):
            if not any(fnmatch.fnmatch(name, glob) for glob in but):
                self.add(f"{source}/{name}")

    def build(self, models, suite):
        models(self)
        if self.slo_ms and not self.reference:
            for config in self.models.glob("*/config.pbtxt"):
                value = f'parameters {{ key: "slo_ms" value: {{ string_value: "{suite.slo_ms or self.slo_ms}" }} }}\n'
                # A list of parameters is one field; a second one adds to it.
                config.write_text(config.read_text() + "\n" + value)


def as_python(folder, twin):
    """The same model for Triton's Python backend, for a Triton that has no ONNX backend."""
    config = folder / "config.pbtxt"
    if not config.exists():
        return
    text = config.read_text()
    text = re.sub(r'^(platform|backend):.*$', "", text, flags=re.M) + '\nbackend: "python"\n'
    if "instance_group" not in text:
        text += "\ninstance_group [ { count: 1 kind: KIND_CPU } ]\n"
    config.write_text(text)
    for file in folder.glob("*/model.onnx"):
        shutil.copy(twin, file.parent / "model.py")


@dataclass
class Unit:
    """The tests of a unittest file."""
    file: str
    tests: tuple = ()
    na: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    seconds: int = 120
    suffix: str = ""

    @property
    def name(self):
        return self.file

    def run(self, run):
        run.unit(self)

    def names(self, run):
        return [name + self.suffix for name in run.tests_of(self)[1]]


@dataclass
class Script:
    """A program that ends with 0, and prints what it should."""
    name: str
    argv: list
    says: tuple = ()
    na: str = ""
    ok: bool = True
    env: dict = field(default_factory=dict)
    seconds: int = 120
    # Whether it is a test, and not only something that the harness needs.
    counts: bool = True

    def run(self, run):
        run.script(self)

    def names(self, run):
        return [] if self.na else [self.name]


@dataclass
class Checks:
    """Checks that stand in a test.sh itself: the text between two lines, in parts, each of which sets RET to 1 if it
    fails."""
    file: str
    begin: str
    end: str
    split: str
    titles: str
    seconds: int = 60

    @property
    def name(self):
        return self.file

    def run(self, run):
        text = (run.folder / self.file).read_text()
        text = text[text.index(self.begin):]
        text = text[: text.index(self.end)]
        parts = re.split(self.split, text)
        for number, part in enumerate(part for part in parts if "curl" in part):
            file = run.out / f"check{number}.sh"
            file.write_text(f"RET=0\n{part}\nexit $RET\n")
            Script(f"{self.titles} {number + 1}", ["bash", str(file)], seconds=self.seconds).run(run)


@dataclass
class Suite:
    name: str
    folder: str
    models: object
    steps: list
    triton: str = ""
    env: dict = field(default_factory=dict)
    # Whether the server is started anew for each test, as its test.sh does.
    fresh: bool = False
    # How batches form: as soon as they can, or when requests have waited as long as Triton would hold them back.
    policy: str = "eager"
    toml: str = ""
    unloaded: object = lambda names: []
    # Models that a server may not look at before it is told to load them: they come once it has started.
    late: object = lambda repository: None
    slo_ms: int = 0
    # Whether it takes hours, or packages of gigabytes, and is run only when it is asked for by its name.
    long: bool = False
    packages: tuple = ()


def folder_of(suite, state):
    return state / suite.folder


QA = "server/qa/"
EXAMPLES = "client/src/python/examples"


def python(file, *args):
    return ["{python}", file, *args]


def example(file, *args, says=None, **more):
    """Of the gRPC ones test.sh wants PASS too."""
    says = says if says is not None else ("PASS",) if "grpc" in file else ()
    return Script(" ".join([file, *args]), python(file, *args), says=says, **more)


# --- the client's examples


def example_models(r):
    for name in ("simple", "simple_int8", "simple_sequence", "simple_dyna_sequence"):
        r.add(f"examples/{name}")
    for name in ("simple_string", "simple_identity", "densenet_onnx", "densenet_batches"):
        r.add(f"own/{name}")
    r.add("own/custom_identity_int32")
    r.add("own/image_preprocess")
    r.add("own/preprocess_inception_ensemble")


def image(file, *args, grpc=False):
    url = ["-i", "grpc", "-u", "localhost:8001"] if grpc and file == "image_client.py" else []
    picture = "{state}/server/qa/images/vulture.jpeg"
    argv = ["-s", "INCEPTION", "-c", "1", *args, *url, picture]
    shown = " ".join([file, *args, *(["-i grpc"] if url else [])])
    return Script(shown, python(file, *argv), says=("VULTURE",))


IMAGES = [
    image(file, "-m", model, "-b", batch, *more, grpc=grpc)
    for model, batch in (("densenet_onnx", "1"), ("densenet_batches", "1"), ("densenet_batches", "4"))
    for file, grpc in (("image_client.py", False), ("image_client.py", True), ("grpc_image_client.py", True))
    for more in ((), ("-a",), *([("-a", "--streaming")] if grpc else []))
]

EXAMPLE_STEPS = [
    example("simple_http_health_metadata.py"),
    example("simple_http_infer_client.py"),
    example("simple_http_infer_client.py", "-v"),
    example("simple_http_async_infer_client.py"),
    example("simple_http_aio_infer_client.py"),
    example("simple_http_string_infer_client.py"),
    example("simple_http_shm_client.py"),
    example("simple_http_shm_string_client.py"),
    example("simple_http_cudashm_client.py", na=CUDA),
    example("simple_http_sequence_sync_infer_client.py", na=SEQUENCES),
    example("simple_grpc_health_metadata.py", says=()),
    example("simple_grpc_infer_client.py"),
    example("simple_grpc_infer_client.py", "-C", "gzip"),
    example("simple_grpc_infer_client.py", "-C", "deflate"),
    example("simple_grpc_async_infer_client.py"),
    example("simple_grpc_aio_infer_client.py"),
    example("simple_grpc_aio_sequence_stream_infer_client.py", na=SEQUENCES),
    example("simple_grpc_string_infer_client.py"),
    example("simple_grpc_sequence_stream_infer_client.py", na=SEQUENCES),
    example("simple_grpc_sequence_sync_infer_client.py", na=SEQUENCES),
    example("simple_grpc_shm_client.py"),
    example("simple_grpc_shm_string_client.py"),
    example("simple_grpc_cudashm_client.py", na=CUDA),
    example("simple_grpc_keepalive_client.py"),
    example("simple_grpc_custom_args_client.py"),
    example("simple_grpc_custom_repeat.py", na=DECOUPLED),
    example("grpc_explicit_byte_content_client.py"),
    example("grpc_explicit_int_content_client.py"),
    example("grpc_explicit_int8_content_client.py"),
    example("grpc_client.py"),
    example("reuse_infer_objects_client.py"),
    example("reuse_infer_objects_client.py", "-i", "grpc", "-u", "localhost:8001"),
    *[
        Script(" ".join(["ensemble_image_client.py", *flags]),
               python("ensemble_image_client.py", *flags, "{state}/server/qa/images/vulture.jpeg"), says=("VULTURE", "PASS"))
        for flags in ((), ("-i", "grpc", "-u", "localhost:8001"))
    ],
    example("memory_growth_test.py", "-i", "http", "-r", "200", says=()),
    example("memory_growth_test.py", "-i", "grpc", "-r", "200", says=()),
    *[
        example(file, *flags)
        for file in ("simple_http_infer_client.py", "simple_http_aio_infer_client.py")
        for asked in ("deflate", "gzip", "") for answered in ("deflate", "gzip", "") if asked != answered
        for flags in [(
            *(["--request-compression-algorithm", asked] if asked else []),
            *(["--response-compression-algorithm", answered] if answered else []),
        )]
    ],
    *IMAGES,
]


def seven(r):
    """The seven models that simple_http_model_control.py counts; only `simple` is used."""
    r.add("examples/simple")
    for number in range(6):
        r.add("examples/simple", f"simple_{number}")


def eight(r):
    seven(r)
    r.add("examples/simple", "simple_6")


# --- qa/L0_http


def http_models(r):
    for name in ("onnx_zero_1_float32", "onnx_zero_1_object", "onnx_zero_1_float16", "onnx_zero_3_float32"):
        r.add(f"qa_identity_model_repository/{name}")
    r.add("qa_identity_model_repository/onnx_zero_1_object", "onnx_zero_1_object_1_element").sub("-1", "1", count=1)
    r.add("qa_identity_model_repository/onnx_zero_1_float32", "onnx_zero_1_float32_queue").append(
        "dynamic_batching { max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 8 ]\n"
        "  default_queue_policy { max_queue_size: 1 } }"
    )
    r.add("own/simple_identity")
    r.add("own/simple_identity_int64")


def simple(r):
    r.add("examples/simple")


def strings_too(r):
    r.add("examples/simple")
    r.add("own/string_identity_any", "string_identity")


def limit_models(r):
    r.add("qa_identity_model_repository/onnx_zero_1_float32")
    r.add("own/simple_identity")


# --- others


def repo(source, but=()):
    return lambda r: r.add_all(source, but)


def only(*sources):
    def models(r):
        for source in sources:
            r.add(source)
    return models


def of_python(*names, change=lambda models: None):
    """Models of Triton's tests of its Python backend, as they are. None is run but by the tests: some count how often
    they are executed."""
    def models(r):
        added = {}
        for name in names:
            source, folder = r.state / "server" / "qa" / "python_models" / name, r.models / name
            (folder / "1").mkdir(parents=True)
            shutil.copy(source / "model.py", folder / "1")
            shutil.copy(source / "config.pbtxt", folder)
            added[name] = Model(folder).sub("^name:.*$", "")
        change(added)
        for model in added.values():
            model.append('parameters { key: "samples" value { string_value: "false" } }')
    return models


def python_examples(r):
    """Those of Triton's Python backend, as its README lays them out; what stands in for the one that needs torch computes
    the same with numpy."""
    source = r.state / "python_backend" / "examples"
    for name, model, config in (
        ("add_sub", "add_sub/model.py", "add_sub/config.pbtxt"),
        ("pytorch", "add_sub/model.py", "pytorch/config.pbtxt"),
        ("bls_sync", "bls/sync_model.py", "bls/sync_config.pbtxt"),
        ("bls_async", "bls/async_model.py", "bls/async_config.pbtxt"),
        ("batch_auto_complete", "auto_complete/batch_model.py", None),
        ("nobatch_auto_complete", "auto_complete/nobatch_model.py", None),
        ("custom_metrics", "custom_metrics/model.py", "custom_metrics/config.pbtxt"),
    ):
        version = r.models / name / "1"
        version.mkdir(parents=True)
        shutil.copy(source / model, version / "model.py")
        if config:
            shutil.copy(source / config, version.parent / "config.pbtxt")


def preprocessing(r):
    """As its README lays it out, but for the network's file."""
    source = r.state / "python_backend" / "examples" / "preprocessing"
    shutil.copytree(source / "model_repository", r.models, dirs_exist_ok=True)
    for name in ("ensemble_python_resnet50", "preprocess", "resnet50_trt"):
        (r.models / name / "1").mkdir()
    shutil.copy(source / "model.py", r.models / "preprocess" / "1")
    network = Model(r.models / "resnet50_trt").sub("tensorrt_plan", "onnxruntime_onnx").folder
    script, python = Path(__file__).with_name("resnet50.py"), r.state / "venv" / "bin" / "python"
    subprocess.run([python, script, "export", network / "1" / "model.onnx"], check=True)


def bools(models):
    """test.sh makes this one of another, by sed."""
    source = models.pop("identity_fp32").folder
    folder = source.rename(source.parent / "identity_bool")
    models["identity_bool"] = Model(folder).sub("TYPE_FP32", "TYPE_BOOL")


def wrong(models):
    models["wrong_model"].sub("TYPE_FP32", "TYPE_UINT32")


def lifecycle(*names, source="qa_model_repository", more=lambda r: None):
    """ONNX files stand in for the other platforms' models: each of Triton's lifecycle tests wants several platforms."""
    def models(r):
        for name in names:
            platform, rest = name.split("_", 1)
            r.add(f"{source}/onnx_{rest}", name)
        more(r)
    return models


def all_of(names):
    return names


F3 = "float32_float32_float32"
UINT8 = {glob: "does nothing for ONNX: Triton's tests leave UINT8 out" for glob in ("*_uuu", "*_fuu", "*_uff", "*_fuh")}


def placeholder(r):
    """What a server that loads everything that it finds can start with."""
    r.add("examples/simple", "placeholder")


def torn(r):
    model = r.add(f"qa_model_repository/onnx_{F3}").sub("^max_batch_size:.*", "max_batch_size: 1")
    for file in model.folder.glob("*/*"):
        file.unlink()


def ensemble_models(r):
    """`simple` in two versions, and the ensemble that asks both."""
    simple = r.add("examples/simple").append("version_policy: { all { } }")
    shutil.copytree(simple.folder / "1", simple.folder / "2")
    name = "ensemble_add_sub_int32_int32_int32"
    (r.add(f"ensembles/{name}").folder / "1").mkdir()


def second_version(r):
    model = r.add(f"qa_model_repository/onnx_{F3}")
    for version in "13":
        (model.folder / version / "model.onnx").unlink()


def reload_models(r):
    model = r.add("own/identity_zero_1_int32")
    model.sub(r"dims: \[ *-1 *\]", "dims: [ 16 ]")


SHM_RESTART = (
    "invalid_create_shm", "valid_create_set_register", "unregister_before_register", "unregister_after_register",
    "reregister_after_register", "unregister_after_inference", "register_after_inference", "too_big_shm",
    "mixed_raw_shm", "unregisterall", "infer_offset_out_of_bound", "infer_byte_size_out_of_bound",
    "infer_integer_overflow",
    "register_out_of_bound", "register_reserved_names", "register_invalid_shm_key",
)
SHM_TESTS = tuple(f"SharedMemoryTest.test_{name}" for name in SHM_RESTART)


def metrics_models(r):
    r.add("own/identity_fp32", "identity_cache_off").sub(r"dims: \[ *-1 *\]", "dims: [ 4 ]")


QUEUE_POLICIES = {
    "default": "",
    "dynamic": "dynamic_batching { max_queue_delay_microseconds: 100000 }",
    "max_queue_size":
        "dynamic_batching { max_queue_delay_microseconds: 100000 default_queue_policy { max_queue_size: 4 } }",
}


def queue_model(name):
    """Triton's identity_delay: two seconds a batch, of four at most."""
    return lambda r: r.add("own/slow_identity_fp32_2s", name).append(QUEUE_POLICIES[name])


def slow_as(name, source):
    def models(r):
        r.add(f"own/{source}", name)
    return models


def batcher_models(r):
    for policy in ("",):
        model = r.add(f"qa_model_repository/onnx_{F3}").without_versions(2, 3)
        model.sub("^max_batch_size:.*", "max_batch_size: 8").sub(
            "^version_policy:.*", "version_policy: { specific { versions: [1] }}"
        ).append("dynamic_batching { preferred_batch_size: [ 2, 6 ], max_queue_delay_microseconds: 10000000 }")


def ragged_models(r):
    """As L0_batch_input/test.sh makes them; an answer that grows with its batch is bounded here."""
    source, fields = "qa_ragged_model_repository/onnx_batch_input", {
        "ragged_element_count_acc_zero": {},
        "ragged_acc_shape": {"BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"},
        "batch_item_flatten": {"BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": "BATCH_ITEM_SHAPE_FLATTEN"},
    }
    for name, changed in fields.items():
        model = r.add(source, name)
        if changed:
            model.sub("BATCH_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT")
        for old, new in changed.items():
            model.sub(old, new)
    model.sub("-1", "-1, -1", count=1)
    model.append('parameters { key: "max_bytes" value: { string_value: "2000000" } }')
    r.add("qa_ragged_model_repository/onnx_batch_item", "batch_item")
    r.add("qa_identity_model_repository/onnx_nobatch_zero_1_float32", "ragged_io").sub(
        "^max_batch_size:.*", "max_batch_size: 4"
    ).sub('name: "INPUT0"', 'name: "INPUT0" allow_ragged_batch: true').append(
        'batch_output [{ target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0" }]'
    )


def warmed(r):
    sample = "\n".join(
        f'inputs {{ key: "INPUT{n}" value: {{ data_type: TYPE_FP32 dims: 16 {kind}: true }} }}'
        for n, kind in ((0, "zero_data"), (1, "random_data"))
    )
    r.add(f"qa_model_repository/onnx_{F3}").append(
        f'model_warmup [{{ name: "regular sample" batch_size: 1 {sample} }}]'
    )


def prioritised(r):
    for priority in ("DEFAULT", "MAX", "MIN"):
        r.add(f"qa_model_repository/onnx_{F3}", f"onnx_{priority.lower()}").without_versions(2, 3).sub(
            "^version_policy:.*", ""
        ).append(f"optimization {{ priority: PRIORITY_{priority} }}")


def infers(name):
    """Whether a served model of two FP32 inputs of 16 answers; the harness's own few lines."""
    return Script(f"infer {name}", python("{here}/ask.py", name), seconds=60)


SUITES = [
    Suite("examples", EXAMPLES, example_models, EXAMPLE_STEPS, triton="--allow-client-shm=true"),
    Suite("examples-control-http", EXAMPLES, seven, [example("simple_http_model_control.py")],
          triton="--model-control-mode=explicit", unloaded=all_of),
    Suite("examples-control-grpc", EXAMPLES, eight, [example("simple_grpc_model_control.py")],
          triton="--model-control-mode=explicit", unloaded=all_of),
    Suite("http", QA + "L0_http", http_models, [
        Unit("http_test.py", seconds=200, na={
            "*.test_loading_large_invalid_model": "takes 12 GB of memory itself",
            "*.test_descriptive_status_code": HELD_BACK,
        }),
    ],
          triton="--model-control-mode=explicit --load-model=*"),
    Suite("http-aio", QA + "L0_http", seven, [
        Unit("python_http_aio_test.py", na={
            "*.test_load_model": "expects Triton's default, no model control",
            "*.test_unload_model": "expects Triton's default, no model control",
        }),
        Unit("http_client_plugin_test.py"),
    ]),
    Suite("http-curl", QA + "L0_http", simple, [
        Checks("test.sh", "# no parameters, no outputs == json output", "kill $SERVER_PID", r"rm -f \./curl\.out",
               "curl with binary and JSON tensors,"),
        Script("simple_http_infer_client.py -u localhost:8000/base_path",
               python("{state}/" + EXAMPLES + "/simple_http_infer_client.py", "-u", "localhost:8000/base_path", "-v"),
               ok=False, says=("POST /base_path/v2/models/simple/infer",)),
    ]),
    Suite("http-size", QA + "L0_http", limit_models, [
        Unit("http_input_size_limit_test.py", tests=("*default*", "*large_string*", "*dtype_size*", "*no_leak*"),
             seconds=300, na={"*dtype_size_expansion*": GENERATE}),
    ]),
    Suite("http-chunks", QA + "L0_http", simple, [Unit("http_request_many_chunks.py", seconds=500)],
          triton="--model-control-mode=explicit --load-model=simple"),
    Suite("http-fuzz", QA + "L0_http_fuzz", only("qa_identity_model_repository/onnx_zero_1_object", "examples/simple"),
          [Unit("fuzztest.py", seconds=20000)], long=True),
    Suite("grpc", QA + "L0_grpc", strings_too, [
        Unit("python_unit_test.py", tests=("GrpcTest.*",), seconds=200),
    ]),
    Suite("grpc-aio", QA + "L0_grpc", eight, [
        Unit("python_grpc_aio_test.py", na={
            "*.test_load_model": "expects Triton's default, no model control",
            "*.test_unload_model": "expects Triton's default, no model control",
        }),
        Script("grpc health probe (grpc.health.v1)", python("{here}/probe.py", "")),
        Script("grpc health probe (grpc.health.v1), of a model", python("{here}/probe.py", "simple")),
    ]),
    Suite("input-validation", QA + "L0_input_validation",
          only("own/input_all_required", "own/input_optional", "own/input_all_optional"),
          [Unit("input_validation_test.py", tests=("InputValTest.*",))]),
    Suite("input-shape", QA + "L0_input_validation",
          only("own/pt_identity", "qa_model_repository/onnx_object_int32_int32"),
          [Unit("input_validation_test.py", tests=("InputShapeTest.*",),
                na={"*test_wrong_input_shape_tensor_size": "needs TensorRT's shape tensors"})]),
    Suite("model-names", QA + "L0_input_validation", simple,
          [Unit("input_validation_test.py", tests=("ModelNameValidationTest.*",))],
          triton="--model-control-mode=explicit"),
    Suite("infer", QA + "L0_infer", repo("qa_model_repository", but=("*bf16*", "*nobatch*")), [
        Unit("infer_test.py", env={"NOBATCH": "0"}, na=UINT8),
    ]),
    Suite("infer-nobatch", QA + "L0_infer",
          lambda r: [r.add(f"qa_model_repository/{name}") for name in r.names("qa_model_repository")
                     if "nobatch" in name and "bf16" not in name and "object" not in name],
          [Unit("infer_test.py", tests=("InferTest.test_raw_?*", "InferTest.test_class_*", "InferTest.test_mix_*"),
                env={"BATCH": "0"}, 
                na={**UINT8, "*version*": "as with batches", "*_o??": "as with batches", "*_?o?": "as with batches",
                    "*_??o": "as with batches"})]),
    Suite("infer-shm", QA + "L0_infer", repo("qa_model_repository", but=("*bf16*", "*nobatch*", "*object*")), [
        Unit("infer_test.py", env={"NOBATCH": "0", "TEST_SYSTEM_SHARED_MEMORY": "1"},
             tests=("InferTest.test_raw_[bsilhfu][bsilhfu][bsilhfu]",), na=UINT8),
    ]),
    Suite("infer-zero", QA + "L0_infer_zero", repo("qa_identity_model_repository"), [Unit("infer_zero_test.py")]),
    Suite("infer-variable", QA + "L0_infer_variable", repo("qa_variable_model_repository", but=("*bf16*",)), [
        Unit("infer_variable_test.py"),
    ]),
    Suite("infer-reshape", QA + "L0_infer_reshape", repo("qa_reshape_model_repository"), [
        Unit("infer_reshape_test.py"),
    ]),
    Suite("string-io", QA + "L0_string_io", only("own/string_identity"), [Unit("string_client_test.py")]),
    Suite("nullchar", QA + "L0_nullchar_string", only("own/python_string"), [
        Script("nullchar_string_client.py http", python("nullchar_string_client.py", "-m", "python_string")),
        Script("nullchar_string_client.py grpc",
               python("nullchar_string_client.py", "-m", "python_string", "-i", "grpc", "-u", "localhost:8001")),
    ]),
    Suite("scalar", QA + "L0_scalar_io", repo("qa_scalar_models"), [Unit("scalar_test.py")]),
    Suite("nan-inf", QA + "L0_nan_inf", only("own/nan_inf_output"), [Unit("nan_inf_test.py")]),
    Suite("class-count", QA + "L0_parameters", only("own/identity_fp32", "own/identity_bytes"), [
        Unit("class_count_test.py", env={"CLIENT_TYPE": kind}, suffix=f" {kind}") for kind in ("http", "grpc")
    ]),
    Suite("shared-memory", QA + "L0_shared_memory", simple, [
        Unit("shared_memory_test.py", tests=SHM_TESTS, env={"CLIENT_TYPE": kind}, suffix=f" {kind}")
        for kind in ("http", "grpc")
    ], fresh=True, triton="--allow-client-shm=true"),
    Suite("shared-memory-offset", QA + "L0_shared_memory",
          lambda r: r.add("qa_model_repository/onnx_int32_int32_int32").without_versions(2, 3), [
        Unit("shared_memory_test.py", tests=("*.test_large_shm_register_offset",), env={"CLIENT_TYPE": kind},
             suffix=f" {kind}")
        for kind in ("http", "grpc")
    ], fresh=True, triton="--allow-client-shm=true"),
    Suite("shared-memory-busy", QA + "L0_shared_memory", slow_as("simple", "slow_simple"), [
        Unit("shared_memory_test.py", tests=("TestSharedMemoryUnregister.*_http",), env={"CLIENT_TYPE": "http"}),
        Unit("shared_memory_test.py", tests=("TestSharedMemoryUnregister.*_grpc",), env={"CLIENT_TYPE": "grpc"}),
    ], fresh=True, triton="--allow-client-shm=true", slo_ms=60000),
    Suite("client-timeout", QA + "L0_client_timeout", slow_as("custom_identity_int32", "slow_identity_int32"), [
        Unit("client_infer_timeout_test.py"),
    ], slo_ms=60000),
    Suite("cancellation", QA + "L0_request_cancellation", slow_as("custom_identity_int32", "slow_identity_int32_10s"), [
        Unit("grpc_cancellation_test.py", tests=(
            "*.test_grpc_async_infer", "*.test_grpc_stream_infer", "*.test_aio_grpc_async_infer",
            "*.test_aio_grpc_stream_infer",
        )),
    ], slo_ms=120000),
    Suite("metrics", QA + "L0_metrics", metrics_models, [
        Script("ask.py, so that there is something to count", python("{here}/ask.py", "identity_cache_off"),
               counts=False),
        Unit("metrics_config_test.py", tests=(
            "*.test_inf_counters_exist", "*.test_inf_histograms_missing", "*.test_inf_summaries_missing",
            "*.test_cache_counters_missing", "*.test_cache_summaries_missing", "*.test_model_namespacing_label_*_off",
            "*.test_pinned_memory_metrics_exist",
        )),
        Unit("cpu_metrics_test.py", tests=("*.test_cpu_metrics_ranges",)),
    ]),
    Suite("metrics-histograms", QA + "L0_metrics", metrics_models, [
        Unit("metrics_config_test.py", tests=("*.test_inf_histograms_exist", "*.test_inf_summaries_exist")),
    ], triton="--metrics-config histogram_latencies=true --metrics-config summary_latencies=true",
          toml="[metrics]\nhistogram_latencies = true\nsummary_latencies = true"),
    *[
        Suite(f"metrics-queue-{name}", QA + "L0_metrics", queue_model(name),
              [Unit("metrics_queue_size_test.py", tests=(test,))], slo_ms=120000)
        for name, test in (
            ("default", "*.test_default_scheduler"), ("dynamic", "*.test_dynamic_batch_scheduler"),
            ("max_queue_size", "*.test_fail_max_queue_size"),
        )
    ],
    Suite("server-status", QA + "L0_server_status", lifecycle(
        f"plan_{F3}", f"libtorch_{F3}", f"onnx_{F3}", "plan_int32_int32_int32", "onnx_int32_int32_int32",
        "libtorch_int32_int8_int8", "onnx_int32_int8_int8"), [
        Unit("server_status_test.py", tests=("ServerMetadataTest.*",), na={
            "*.test_basic": "wants the extension `sequence`: the server has no sequences",
            "*.test_model_latest_infer": PLATFORMS,
        }),
    ]),
    Suite("trace", QA + "L0_trace", simple, [Unit("trace_endpoint_test.py")],
          toml='[trace]\nfile = "global_unittest.log"\nrate = 1',
          triton="--trace-config triton,file=global_unittest.log --trace-config level=TIMESTAMPS "
                 "--trace-config rate=1"),
    Suite("logging", QA + "L0_logging", simple, [Unit("logging_endpoint_test.py")]),
    Suite("warmup", QA + "L0_warmup", warmed, [infers(f"onnx_{F3}")]),
    Suite("priority", QA + "L0_priority", prioritised, [infers(f"onnx_{p}") for p in ("default", "max", "min")]),
    Suite("batcher", QA + "L0_batcher", batcher_models, [
        Unit("batcher_test.py", tests=(
            "*.test_static_batch_preferred", "*.test_static_batch_lt_any_preferred",
            "*.test_static_batch_not_preferred", "*.test_static_batch_gt_max_preferred",
        ), na={"*": HELD_BACK}),
    ], fresh=True),
    Suite("batch-input", QA + "L0_batch_input", ragged_models, [Unit("batch_input_test.py")], policy="timeout:1000"),
    Suite("model-queue", QA + "L0_model_queue", only("own/custom_zero_1_float32"), [
        Unit("model_queue_test.py", tests=("*.test_max_queue_size",), na={
            "*": "goes through an ensemble and a backend that sleeps, in one test",
        }),
    ]),
    *[
        Suite(f"ensemble-{outputs}", QA + "L0_simple_ensemble", ensemble_models, [
            Unit("ensemble_test.py", tests=tests, na={
                "*.test_ensemble_sequence_flags": SEQUENCES,
                "*.test_ensemble_partial_add_sub": "its model leaves out an output that it says it has",
            }),
        ])
        # Which versions were asked is counted from the start.
        for outputs, tests in (
            ("all-outputs", ("*.test_ensemble_add_sub", "*.test_ensemble_sequence_flags", "*.test_ensemble_partial_*")),
            ("one-output", ("*.test_ensemble_add_sub_one_output",)),
        )
    ],
    Suite("lifecycle-control", QA + "L0_lifecycle", placeholder, [
        Unit("lifecycle_test.py", tests=("*.test_model_control_fail",)),
    ], triton="--model-control-mode=explicit --strict-readiness=false", late=torn),
    Suite("lifecycle-config", QA + "L0_lifecycle", placeholder, [
        Unit("lifecycle_test.py", tests=("*.test_config_override",)),
    ], triton="--model-control-mode=explicit --strict-model-config=false", late=second_version),
    Suite("lifecycle-file", QA + "L0_lifecycle",
          lambda r: r.add(f"qa_model_repository/onnx_{F3}").without_versions(1, 2).sub("^version_policy:.*", ""), [
              Unit("lifecycle_test.py", tests=("*.test_file_override", "*.test_file_override_security")),
          ], toml="load_files = true",
          triton=f"--model-control-mode=explicit --load-model=onnx_{F3} --strict-model-config=false"),
    Suite("python", QA + "L0_backend_python", of_python(
        "identity_fp32", "init_args", "string", "string_fixed", "optional", "non_contiguous", change=bools,
    ), [
        Unit("python_test.py", na={
            "*.test_growth_error": "needs 1 GB in one request",
            "*.test_async_infer": HELD_BACK, "*.test_bf16": "needs torch",
            "*.test_infer_pytorch": "needs torch",
        }),
    ], env=NO_PROBE),
    Suite("python-logging", QA + "L0_backend_python/logging", of_python("identity_fp32_logging"), [
        Unit("logging_test.py"),
    ], env=NO_PROBE),
    Suite("python-lifecycle", QA + "L0_backend_python/lifecycle", of_python(
        "error_code", "wrong_model", "execute_grpc_error", change=wrong,
    ), [
        Unit("lifecycle_test.py", na={
            "*.test_execute_cancel": "needs a model that is told that its request was cancelled",
            "*.test_batch_error": HELD_BACK + ", and counts requests of two rows, of which each is one here",
            "*.test_triton_grpc_error_decoupled_delayed_final": DECOUPLED,
            **{f"*.test_triton_grpc_error_{which}": STREAM for which in ("error_on", "multithreaded", "cancel")},
        }),
    ], env=NO_PROBE),
    Suite("python-examples", "python_backend/examples", python_examples, [
        Script(f"{name}/{file}", python(f"{name}/{file}"), says=says)
        for name, file, says in (
            ("add_sub", "client.py", ("PASS: add_sub",)),
            ("bls", "sync_client.py", ("PASS: BLS Sync",)),
            ("bls", "async_client.py", ("PASS: BLS Async",)),
            ("auto_complete", "client.py", ("PASS: auto_complete",)),
            ("custom_metrics", "client.py", ("PASS: custom_metrics",)),
        )
    ], env=NO_PROBE),
    Suite("python-preprocessing", "python_backend/examples/preprocessing", preprocessing, [
        Script("preprocessing/client.py", python("{here}/resnet50.py", "judge", "{state}/server/qa/images/mug.jpg")),
    ], env=NO_PROBE, long=True, packages=("torch", "torchvision")),
    Suite("lifecycle-stress", QA + "L0_lifecycle", reload_models, [
        Unit("lifecycle_test.py", tests=("*.test_concurrent_same_model_load_unload_stress",), seconds=400),
    ], triton="--model-control-mode=explicit"),
]

# What is not even tried.
NOT_APPLICABLE = {
    "L0_http/http_basic_auth_test": "tests nginx in front of the server",
    "L0_http/http_restricted_api_test, L0_grpc RestrictedProtocolTest": FLAG + "; the server has tokens instead",
    "L0_http/generate_endpoint_test": PYTHON + "; the generate extension is not offered",
    "L0_grpc/grpc_client_plugin_test": PYTHON + " (it answers with the request's headers)",
    "L0_parameters/parameters_test": PYTHON + " (it answers with the request's parameters)",
    "L0_response_statistics": DECOUPLED,
    "L0_sequence_*, L0_decoupled, L0_implicit_state": "no sequences or decoupled models",
    "L0_simple_ensemble/ensemble_backpressure_test": DECOUPLED,
    "L0_client_timeout/client_non_infer_timeout_test": DEBUG,
    "L0_long_running_stress": "needs perf_analyzer and sequences",
    "L0_buffer_attributes, L0_dlpack_*": PYTHON,
    "L0_backend_python/argument_validation": "its model has no input",
    "L0_backend_python/async_execute, bls": "need decoupled models, torch, or CUDA's shared memory",
    "L0_backend_python/custom_metrics": "its model asks for the metrics of its own server, and a model has no network",
    "L0_backend_python/request_rescheduling": "a request is not given back to be run again",
    "python_backend/examples/decoupled, preprocessing, rate_limiter and others":
        "answer many times, or need torch, JAX or TensorRT",
    "L0_backend_python/decoupled, response_sender": DECOUPLED,
    "L0_backend_python/ensemble, io": "needs CUDA, or which outputs a request wants",
    "L0_backend_python/env": "a model's interpreter is named by `python`, not packed",
    "L0_backend_python/model_control": "needs an ensemble, or loads that bring a program along, which none may",
    "L0_backend_python/model_readiness": "models are not asked whether they are ready",
    "L0_backend_python/parameters": "requests and responses of a model have no parameters",
    "L0_backend_python/python_based_backends, variants": FLAG + " (where its backends are)",
    "L0_backend_python/restart": "its model uses the shared memory of Triton's own process",
    "L0_large_payload": "takes 20 GB of memory itself",
    "L0_response_cache": FLAG + " (how large its cache is)",
}
