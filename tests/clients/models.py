"""Writes the models whose tensors differ in size between requests, from a seed.

usage: models.py REPOSITORY

`encoder`: a layer of self-attention over tokens, with random weights; ids INT64 [N, length] to states FP32
[N, length, 16] and scores FP32 [N, 4]. All but the bound of its tensors is as the file has it.
`padded`, `bucketed`, `masked`: a transformer of two layers with a mask, ids INT64 [N, length] to states FP32 [N, length, 32], scores
FP32 [N, 4] and width FP32 [N, 1], which is the length that ids had in the run. The mask is made for each run, or the client's.
`ragged`: the same with all ids of a run in one dimension; its width is their number.
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


class Transformer:
    """Nodes and weights of two layers of attention, by the operators that exporters write at opset 13."""

    LAYERS, WIDTH, HEADS, INNER, LENGTH = 2, 32, 4, 64, 256

    def __init__(self):
        self.random = np.random.default_rng(11)
        self.nodes, self.weights = [], []

    def constant(self, array):
        self.weights.append((f"c{len(self.weights)}", np.asarray(array)))
        return self.weights[-1][0]

    def weight(self, *shape):
        return self.constant(self.random.normal(0, shape[0] ** -0.5, shape).astype(np.float32))

    def ints(self, *numbers):
        return self.constant(np.array(numbers, np.int64))

    def __call__(self, kind, *inputs, name=None, **attributes):
        self.nodes.append((kind, list(inputs), [name or f"n{len(self.nodes)}"], attributes))
        return self.nodes[-1][2][0]

    def linear(self, x, inputs, outputs):
        return self("Add", self("MatMul", x, self.weight(inputs, outputs)), self.weight(outputs))

    def normalised(self, x):
        off = self("Sub", x, self("ReduceMean", x, axes=[-1]))
        variance = self("ReduceMean", self("Mul", off, off), axes=[-1])
        deviation = self("Sqrt", self("Add", variance, self.constant(np.float32(1e-5))))
        gain = self.constant(self.random.normal(1, 0.1, self.WIDTH).astype(np.float32))
        return self("Add", self("Mul", self("Div", off, deviation), gain), self.weight(self.WIDTH))

    def heads(self, x, perm):
        parts = self("Reshape", self.linear(x, self.WIDTH, self.WIDTH), self.ints(0, 0, self.HEADS, self.WIDTH // self.HEADS))
        return self("Transpose", parts, perm=perm)

    def embedded(self, ids, positions):
        words, places = self.weight(WORDS, self.WIDTH), self.weight(self.LENGTH, self.WIDTH)
        return self.normalised(self("Add", self("Gather", words, ids), self("Gather", places, positions)))

    def layers(self, x, bias):
        """x [N, length, WIDTH], bias as attention [N, 1, 1 or length, length]: 0, or -10000 where nothing is to be seen."""
        for _ in range(self.LAYERS):
            query, key = self.heads(x, [0, 2, 1, 3]), self.heads(x, [0, 2, 3, 1])
            scale = self.constant(np.float32((self.WIDTH / self.HEADS) ** -0.5))
            likeness = self("Add", self("Mul", self("MatMul", query, key), scale), bias)
            seen = self("MatMul", self("Softmax", likeness, axis=-1), self.heads(x, [0, 2, 1, 3]))
            seen = self("Reshape", self("Transpose", seen, perm=[0, 2, 1, 3]), self.ints(0, 0, self.WIDTH))
            x = self.normalised(self("Add", x, self.linear(seen, self.WIDTH, self.WIDTH)))
            inner = self.linear(x, self.WIDTH, self.INNER)
            half = self("Mul", inner, self.constant(np.float32(0.5)))
            erf = self("Erf", self("Div", inner, self.constant(np.float32(2**0.5))))
            gelu = self("Mul", half, self("Add", erf, self.constant(np.float32(1))))
            x = self.normalised(self("Add", x, self.linear(gelu, self.INNER, self.WIDTH)))
        return x

    def bias(self, seen):
        """0 where `seen` is 1, -10000 where it is 0."""
        hidden = self("Sub", self.constant(np.float32(1)), seen)
        return self("Mul", hidden, self.constant(np.float32(-10000)))

    def range(self, tensor, axis):
        """0, 1, .. as long as a tensor's axis."""
        length = self("Gather", self("Shape", tensor), self.constant(np.int64(axis)), axis=0)
        return self("Range", self.constant(np.int64(0)), length, self.constant(np.int64(1)))

    def sum(self, x, axis, keep, name=None):
        return self("ReduceSum", x, self.ints(axis), keepdims=keep, name=name)

    def ones(self, x):
        return self("Add", self("Sub", x, x), self.constant(np.float32(1)))

    def scores(self, sums, counts):
        self("MatMul", self("Div", sums, counts), self.weight(self.WIDTH, CLASSES), name="scores")

    def padded(self):
        mask = self("Cast", "mask", to=TensorProto.FLOAT)
        x = self.embedded("ids", self.range("ids", 1))
        states = self("Identity", self.layers(x, self.bias(self("Unsqueeze", mask, self.ints(1, 2)))), name="states")
        there = self("Mul", states, self("Unsqueeze", mask, self.ints(2)))
        self.scores(self.sum(there, 1, 0), self.sum(mask, 1, 1))
        self.sum(self.ones(mask), 1, 1, name="width")
        inputs = [(name, TensorProto.INT64, ["N", "length"]) for name in ("ids", "mask")]
        return self.model(inputs, ["N", "length", self.WIDTH])

    def ragged(self):
        """All ids in one dimension: bounds [N + 1] and ends [N] tell where each request's are."""
        place, ends = self.range("ids", 0), self("Cast", "ends", to=TensorProto.INT64)
        is_after = self("GreaterOrEqual", self("Unsqueeze", place, self.ints(1)), self("Unsqueeze", ends, self.ints(0)))
        owner = self.sum(self("Cast", is_after, to=TensorProto.INT64), 1, 0)
        positions = self("Sub", place, self("Gather", "bounds", owner))
        same = lambda one, other: self("Cast", self("Equal", one, other), to=TensorProto.FLOAT)
        rows, columns = self("Unsqueeze", owner, self.ints(1)), self("Unsqueeze", owner, self.ints(0))
        bias = self("Unsqueeze", self.bias(same(rows, columns)), self.ints(0, 1))
        x = self("Unsqueeze", self.embedded("ids", positions), self.ints(0))
        states = self("Squeeze", self.layers(x, bias), self.ints(0), name="states")
        is_of = same(self("Unsqueeze", self.range("ends", 0), self.ints(1)), columns)
        self.scores(self("MatMul", is_of, states), self.sum(is_of, 1, 1))
        self.sum(self.ones(is_of), 1, 1, name="width")
        inputs = [("ids", TensorProto.INT64, ["T"]), ("ends", TensorProto.INT32, ["N"]), ("bounds", TensorProto.INT64, ["M"])]
        return self.model(inputs, ["T", self.WIDTH])

    def model(self, inputs, states):
        outputs = [("states", states), ("scores", ["N", CLASSES]), ("width", ["N", 1])]
        return model(self.nodes, inputs, [(name, TensorProto.FLOAT, dims) for name, dims in outputs], self.weights)


def parameters(**values):
    return "".join(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items())


RAGGED = """
max_batch_size: 8
input { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
batch_input [
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32 source_input: "ids" },
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "bounds" data_type: TYPE_INT64 source_input: "ids" }
]
batch_output { target_name: "states" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "ids" }
output { name: "states" dims: [ -1, 32 ] }
output { name: "scores" dims: [ 4 ] }
output { name: "width" dims: [ 1 ] }
""" + parameters(max_dims=256, batch_elements_max=1024)

# Less than by default, so that no client has to send and no attention to compute megabytes of ids.
ENCODER = parameters(max_bytes=65536)
STRINGS = parameters(max_dims=8, max_bytes=4096, executor="onnxruntime")
UNEQUAL = {
    "padded": parameters(batch_lengths="padded", mask_inputs="{ mask = 'ids' }", pad_values="{ ids = 1 }", max_dims=256),
    "bucketed": parameters(batch_lengths="bucketed:16,64,128,256", mask_inputs="{ mask = 'ids' }"),
    "masked": parameters(batch_lengths="padded", max_dims=256),
    "ragged": RAGGED,
}


def strings():
    shape = ["N", "length"]
    nodes = [("Identity", ["x"], ["y"], {})]
    return model(nodes, [("x", TensorProto.STRING, shape)], [("y", TensorProto.STRING, shape)])


# A model in Python whose answers are as long as their texts.
TOKENS = Path(__file__).resolve().parent.parent / "programs" / "tokens.py"


if __name__ == "__main__":
    repository = Path(sys.argv[1])
    padded = {name: Transformer().padded() for name in ["padded", "bucketed", "masked"]}
    made = {"encoder": encoder(), "strings": strings(), "ragged": Transformer().ragged(), **padded}
    for name, made in made.items():
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        save(made, repository / name / "1" / "model.onnx")
    for name, config in {"encoder": ENCODER, "strings": STRINGS, **UNEQUAL}.items():
        (repository / name / "config.pbtxt").write_text(config)
    (repository / "tokens" / "1").mkdir(parents=True, exist_ok=True)
    (repository / "tokens" / "1" / "model.py").write_text(TOKENS.read_text())
