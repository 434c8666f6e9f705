"""Writes the models whose tensors differ in size between requests, from a seed.

usage: models.py REPOSITORY

`encoder`: a layer of self-attention over tokens, with random weights; ids INT64 [N, length] to states FP32
[N, length, 16] and scores FP32 [N, 4]. There is nothing but the file, as users have it.
`strings`: an identity of strings of any shape within `max_dims` and `max_bytes`.
`tokens`: a model for Triton's Python backend, without configuration: texts to their words and their words' lengths."""

import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

WORDS, WIDTH, CLASSES = 50, 16, 4


def model(nodes, inputs, outputs, weights=()):
    tensors = [[helper.make_tensor_value_info(*tensor) for tensor in side] for side in (inputs, outputs)]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights]
    graph = helper.make_graph([helper.make_node(*node[:3], **node[3]) for node in nodes], "graph", *tensors, initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(made)
    return made


def encoder():
    random = np.random.default_rng(7)
    names = ["query", "key", "value"]
    weights = [(name, random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)) for name in names]
    weights.append(("words", random.normal(0, 1, (WORDS, WIDTH)).astype(np.float32)))
    weights.append(("head", random.normal(0, 1, (WIDTH, CLASSES)).astype(np.float32)))
    weights.append(("scale", np.array(WIDTH**-0.5, np.float32)))
    nodes = [("Gather", ["words", "ids"], ["embedded"], {})]
    nodes += [("MatMul", ["embedded", name], [f"{name}s"], {}) for name in names]
    nodes += [
        ("Transpose", ["keys"], ["turned"], {"perm": [0, 2, 1]}),
        ("MatMul", ["querys", "turned"], ["likeness"], {}),
        ("Mul", ["likeness", "scale"], ["scaled"], {}),
        ("Softmax", ["scaled"], ["attention"], {"axis": -1}),
        ("MatMul", ["attention", "values"], ["attended"], {}),
        ("Add", ["attended", "embedded"], ["states"], {}),
        ("ReduceMean", ["states"], ["mean"], {"axes": [1], "keepdims": 0}),
        ("MatMul", ["mean", "head"], ["scores"], {}),
    ]
    ids = ("ids", TensorProto.INT64, ["N", "length"])
    states = ("states", TensorProto.FLOAT, ["N", "length", WIDTH])
    return model(nodes, [ids], [states, ("scores", TensorProto.FLOAT, ["N", CLASSES])], weights)


def strings():
    shape = ["N", "length"]
    nodes = [("Identity", ["x"], ["y"], {})]
    return model(nodes, [("x", TensorProto.STRING, shape)], [("y", TensorProto.STRING, shape)])


TOKENS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_input({"name": "least", "data_type": "TYPE_INT32", "dims": [1], "optional": True})
        config.add_output({"name": "words", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "lengths", "data_type": "TYPE_INT64", "dims": [-1]})
        config.set_max_batch_size(8)
        return config

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0, 0].decode()
        if text.startswith("odd"):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"'{text}' is no text"))
        least = pb_utils.get_input_tensor_by_name(request, "least")
        least = 0 if least is None else least.as_numpy()[0, 0]
        words = [word for word in text.split() if len(word) >= least]
        lengths = np.array([[len(word) for word in words]], np.int64)
        tensors = [pb_utils.Tensor("words", np.array([words], object)), pb_utils.Tensor("lengths", lengths)]
        return pb_utils.InferenceResponse(tensors)
"""


if __name__ == "__main__":
    repository = Path(sys.argv[1])
    for name, made in [("encoder", encoder()), ("strings", strings())]:
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        save(made, repository / name / "1" / "model.onnx")
    bounds = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in [("max_dims", 8), ("max_bytes", 4096)]]
    (repository / "strings" / "config.pbtxt").write_text("".join(bounds))
    (repository / "tokens" / "1").mkdir(parents=True, exist_ok=True)
    (repository / "tokens" / "1" / "model.py").write_text(TOKENS)
