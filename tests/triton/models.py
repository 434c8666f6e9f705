"""Writes the models that Triton's tests take from its Python and C++ backends, as ONNX under the same names.

    models.py FOLDER LABELS            LABELS: the file of densenet's labels

Each folder is a model of a Triton repository, without more than Triton itself would need.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

TYPES = {
    "BOOL": T.BOOL, "INT8": T.INT8, "INT16": T.INT16, "INT32": T.INT32, "INT64": T.INT64, "UINT8": T.UINT8,
    "FP16": T.FLOAT16, "FP32": T.FLOAT, "FP64": T.DOUBLE, "STRING": T.STRING,
}
OPSET = [h.make_opsetid("", 17)]


def symbolic(dims, prefix):
    return [f"{prefix}{index}" if dim < 0 else dim for index, dim in enumerate(dims)]


def value(name, kind, dims, batch, prefix):
    return h.make_tensor_value_info(name, TYPES[kind], (["batch"] if batch else []) + symbolic(dims, prefix))


def config(name, batch, inputs, outputs, more=""):
    def tensors(key, of):
        one = [f'  {{ name: "{n}" data_type: TYPE_{kind} dims: {list(dims)} {extra} }}' for n, kind, dims, extra in of]
        return f"{key} [\n" + ",\n".join(one) + "\n]\n"

    head = f'name: "{name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: {batch}\n'
    return head + tensors("input", inputs) + tensors("output", outputs) + more


def write(folder, name, batch, inputs, outputs, nodes, weights=(), more=""):
    """Tensors are (name, type, dims[, more of the configuration]); dims without the batch."""
    inputs, outputs = ([(*t, "")[:4] for t in tensors] for tensors in (inputs, outputs))
    graph = h.make_graph(
        nodes, name,
        [value(n, kind, dims, batch, "d") for n, kind, dims, _ in inputs],
        [value(n, kind, dims, batch, "d") for n, kind, dims, _ in outputs],
        list(weights),
    )
    model = h.make_model(graph, opset_imports=OPSET, ir_version=8)
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / name / "1" / "model.onnx")
    (folder / name / "config.pbtxt").write_text(config(name, batch, inputs, outputs, more))


def identity(folder, name, kind, dims, batch, ios=(("INPUT0", "OUTPUT0"),), more=""):
    nodes = [h.make_node("Identity", [i], [o]) for i, o in ios]
    write(folder, name, batch, [(i, kind, dims) for i, _ in ios], [(o, kind, dims) for _, o in ios], nodes, more=more)


def add_sub(folder, name, kind, dims, batch, more=""):
    nodes = [h.make_node(op, ["INPUT0", "INPUT1"], [out]) for op, out in (("Add", "OUTPUT0"), ("Sub", "OUTPUT1"))]
    ins, outs = ([(f"{way}{n}", kind, dims) for n in (0, 1)] for way in ("INPUT", "OUTPUT"))
    write(folder, name, batch, ins, outs, nodes, more=more)


SLEEPER = '''"""Answers after `execute_delay_ms`: its input, or, if it has two, their sum and difference."""

import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.seconds = int(parameters["execute_delay_ms"]["string_value"]) / 1000

    def answer(self, request):
        given = [pb_utils.get_input_tensor_by_name(request, name) for name in ("INPUT0", "INPUT1")]
        first, *second = [tensor.as_numpy() for tensor in given if tensor is not None]
        outputs = [first + second[0], first - second[0]] if second else [first]
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(f"OUTPUT{index}", output) for index, output in enumerate(outputs)])

    def execute(self, requests):
        time.sleep(self.seconds)
        return [self.answer(request) for request in requests]
'''


def sleeping(folder, name, kind, dims, batch, delay_ms, tensors=1):
    """A model of Triton's Python backend, as Triton's own of that name is. What it takes stands in a file, as measuring
    it would take long."""
    inputs, outputs = ([(f"{way}{n}", kind, dims, "") for n in range(tensors)] for way in ("INPUT", "OUTPUT"))
    delay = f'parameters {{ key: "execute_delay_ms" value: {{ string_value: "{delay_ms}" }} }}\n'
    text = config(name, batch, inputs, outputs, delay).replace('platform: "onnxruntime_onnx"', 'backend: "python"')
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    (folder / name / "1" / "model.py").write_text(SLEEPER)
    (folder / name / "config.pbtxt").write_text(text)
    known = f'executor = "process"\nversion = "1"\nquantile = 0.99\nalpha_ms = 0.01\nbeta_ms = {delay_ms}.0\n'
    latency = [delay_ms + 0.01 * size for size in range(1, batch + 1)]
    (folder / name / "profile.toml").write_text(f"{known}latency_ms = {latency}\n")


def constant(folder, name, inputs, values, more=""):
    """OUTPUT0 is `values` whatever the inputs are; no batches."""
    weights = [numpy_helper.from_array(np.asarray(values, np.float32), "values")]
    nodes = [h.make_node("Identity", ["values"], ["OUTPUT0"])]
    write(folder, name, 0, inputs, [("OUTPUT0", "FP32", [len(values)])], nodes, weights, more)


def strings_of_numbers(folder, name):
    """Triton's simple_string: adds and subtracts the integers that strings spell."""
    nodes = [h.make_node("Cast", [f"INPUT{n}"], [f"n{n}"], to=T.INT32) for n in (0, 1)]
    nodes += [h.make_node("Add", ["n0", "n1"], ["s"]), h.make_node("Sub", ["n0", "n1"], ["d"])]
    nodes += [h.make_node("Cast", [n], [o], to=T.STRING) for n, o in (("s", "OUTPUT0"), ("d", "OUTPUT1"))]
    ins, outs = ([(f"{way}{n}", "STRING", [16]) for n in (0, 1)] for way in ("INPUT", "OUTPUT"))
    write(folder, name, 8, ins, outs, nodes)


def vulture(folder, name, labels, batch):
    """Takes pictures as densenet does, and says of each that it is a vulture. Without batches as Triton's example has
    densenet: its file has a batch of 1, its configuration none."""
    classes = [line.strip() for line in labels.read_text().splitlines()]
    scores = np.zeros((1, len(classes), 1, 1), np.float32)
    scores[0, classes.index(next(c for c in classes if "VULTURE" in c)), 0, 0] = 1
    weights = [
        numpy_helper.from_array(scores, "bias"),
        numpy_helper.from_array(np.full((len(classes), 3, 1, 1), 1e-4, np.float32), "kernel"),
    ]
    nodes = [
        h.make_node("GlobalAveragePool", ["data_0"], ["pooled"]),
        h.make_node("Conv", ["pooled", "kernel"], ["scores"]),
        h.make_node("Add", ["scores", "bias"], ["fc6_1" if not batch else "column"]),
    ]
    first = "N" if batch else 1
    shape, dims = [first, len(classes), 1, 1], "[ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] }"
    if batch:
        nodes.append(h.make_node("Flatten", ["column"], ["fc6_1"]))
        shape, dims = [first, len(classes)], "[ 1000 ]"
    reshape = "" if batch else "reshape { shape: [ 1, 3, 224, 224 ] }"
    graph = h.make_graph(
        nodes, name,
        [h.make_tensor_value_info("data_0", T.FLOAT, [first, 3, 224, 224])],
        [h.make_tensor_value_info("fc6_1", T.FLOAT, shape)],
        weights,
    )
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(h.make_model(graph, opset_imports=OPSET, ir_version=8), folder / name / "1" / "model.onnx")
    (folder / name / "densenet_labels.txt").write_text(labels.read_text())
    (folder / name / "config.pbtxt").write_text(
        f'name: "{name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: {batch}\n'
        f"input [ {{ name: \"data_0\" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] {reshape} }} ]\n"
        f'output [ {{ name: "fc6_1" data_type: TYPE_FP32 dims: {dims} label_filename: "densenet_labels.txt" }} ]\n'
    )


PREPROCESS = '''"""Decodes pictures, each to what densenet takes: Triton's image_preprocess, of which only the C++ is public."""

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image


def decoded(file):
    picture = Image.open(io.BytesIO(file)).convert("RGB").resize((224, 224))
    return np.asarray(picture, np.float32).transpose(2, 0, 1) / 127.5 - 1


class TritonPythonModel:
    def execute(self, requests):
        files = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        pictures = [np.stack([decoded(file) for file in rows.reshape(-1)]) for rows in files]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", of)]) for of in pictures]
'''


def ensemble_of_pictures(folder, name, classifier):
    """The ensemble that ensemble_image_client.py asks: files of pictures in, classes out."""
    inputs, pictures = [("INPUT", "STRING", [1], "")], [("OUTPUT", "FP32", [3, 224, 224], "")]
    text = config("image_preprocess", 8, inputs, pictures).replace('platform: "onnxruntime_onnx"', 'backend: "python"')
    (folder / "image_preprocess" / "1").mkdir(parents=True)
    (folder / "image_preprocess" / "1" / "model.py").write_text(PREPROCESS)
    (folder / "image_preprocess" / "config.pbtxt").write_text(text)
    steps = """ensemble_scheduling { step [
  { model_name: "image_preprocess" model_version: -1
    input_map { key: "INPUT" value: "INPUT" } output_map { key: "OUTPUT" value: "preprocessed" } },
  { model_name: "%s" model_version: -1
    input_map { key: "data_0" value: "preprocessed" } output_map { key: "fc6_1" value: "OUTPUT" } }
] }
""" % classifier
    text = config(name, 8, inputs, [("OUTPUT", "FP32", [1000], "")], steps)
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(text.replace("onnxruntime_onnx", "ensemble"))


METADATA = "{'names': {0: 'person', 1: 'bicycle'}, 'task': 'detect', 'stride': 32, 'batch': 1, 'imgsz': [64, 64]}"
# As in Ultralytics' guide to Triton.
YOLO = f"""
parameters {{ key: "metadata" value {{ string_value: "{METADATA}" }} }}
"""
YOLO_TENSORRT = """
optimization { execution_accelerators { gpu_execution_accelerator {
  name: "tensorrt"
  parameters { key: "precision_mode" value: "FP16" }
  parameters { key: "max_workspace_size_bytes" value: "3221225472" }
} } }
"""


def yolo(folder, name, dims, more):
    """Of the form of YOLO's export with dynamic=True: (batch, 3, height, width) to (batch, 84, anchors)."""
    nodes = [
        h.make_node("ReduceMean", ["images"], ["gray"], axes=[1], keepdims=0),
        h.make_node("Slice", ["gray", "zero", "one", "two"], ["row"]),
        h.make_node("Expand", ["row", "shape"], ["output0"]),
    ]
    weights = [numpy_helper.from_array(np.asarray(values, np.int64), n) for n, values in (
        ("zero", [0]), ("one", [1]), ("two", [1]), ("shape", [1, 84, 1]))]
    graph = h.make_graph(
        nodes, name,
        [h.make_tensor_value_info("images", T.FLOAT, ["batch", 3, "height", "width"])],
        [h.make_tensor_value_info("output0", T.FLOAT, ["batch", 84, "anchors"])],
        weights,
    )
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(h.make_model(graph, opset_imports=OPSET, ir_version=8), folder / name / "1" / "model.onnx")
    (folder / name / "config.pbtxt").write_text(dims + more)


def main():
    folder, labels = Path(sys.argv[1]), Path(sys.argv[2])
    identity(folder, "simple_identity", "STRING", [-1], 8)
    identity(folder, "simple_identity_int64", "INT64", [-1], 8)
    # A test of class_count sends a million elements.
    long = "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
        for key, value in (("max_dims", 1_100_000), ("max_bytes", 4_400_000)))
    identity(folder, "identity_fp32", "FP32", [-1], 4, more=long)
    identity(folder, "identity_bytes", "STRING", [-1], 64)
    identity(folder, "identity_uint8", "UINT8", [-1], 64)
    identity(folder, "string_identity", "STRING", [8], 0)
    identity(folder, "python_string", "STRING", [-1], 0)
    identity(folder, "string_identity_any", "STRING", [-1], 0)
    identity(folder, "custom_identity_int32", "INT32", [-1], 1024)
    identity(folder, "custom_zero_1_float32", "FP32", [-1], 8)
    identity(folder, "identity_zero_1_int32", "INT32", [-1], 0)
    identity(folder, "pt_identity", "FP32", [8], 8, more="dynamic_batching { max_queue_delay_microseconds: 1000000 }\n")
    strings_of_numbers(folder, "simple_string")
    add_sub(folder, "add_sub", "FP32", [4], 0)
    sleeping(folder, "slow_identity_int32", "INT32", [1], 1, 3000)
    sleeping(folder, "slow_identity_int32_10s", "INT32", [1], 1, 10000)
    sleeping(folder, "slow_identity_fp32_2s", "FP32", [1], 4, 2000)
    sleeping(folder, "slow_simple", "INT32", [16], 1, 6000, tensors=2)
    three = [(f"INPUT{n}", "FP32", [-1]) for n in range(3)]
    constant(folder, "input_all_required", three, [1])
    constant(folder, "input_optional", [*three, ("INPUT3", "FP32", [-1], "optional: true")], [1])
    constant(folder, "input_all_optional", [(*tensor, "optional: true") for tensor in three], [1])
    constant(folder, "nan_inf_output", [("INPUT0", "FP32", [-1])], [np.nan, np.inf, -np.inf, 1, 2, 3])
    yolo(folder, "yolo", "", YOLO + YOLO_TENSORRT)
    fixed = """max_batch_size: 1
platform: "onnxruntime_onnx"
input [ { name: "images" data_type: TYPE_FP32 dims: [ 3, 64, 64 ] } ]
output [ { name: "output0" data_type: TYPE_FP32 dims: [ 84, 64 ] } ]
"""
    yolo(folder, "yolo_fixed", fixed, YOLO)
    vulture(folder, "densenet_onnx", labels, 0)
    vulture(folder, "densenet_batches", labels, 8)
    ensemble_of_pictures(folder, "preprocess_inception_ensemble", "densenet_batches")


main()
