"""Writes cases for tests/onnx/run: kinds of models that users bring, made here or kept in tests/models/strangers, with
made-up inputs, and what ONNX Runtime computes of them.

    kinds.py STRANGERS FOLDER

Each case is a folder with `model.onnx`, `config.pbtxt`, a file `tolerance`, and requests, whose tensors have a row for each
task where the model takes batches. The tolerance is relative and absolute.
"""

import itertools
import pathlib
import shutil
import sys
import tempfile

import ml_dtypes
import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

EXACT, HALF = (1e-4, 1e-5), (1e-2, 1e-2)
ML = "ai.onnx.ml"
F, I64, STRING, F16 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.FLOAT16
random = numpy.random.default_rng(1)


def normal(*shape):
    return random.standard_normal(shape).astype(numpy.float32)


def model(nodes, inputs, outputs, weights=(), opset=17, functions=(), ml=3):
    """A model. Inputs and outputs are names with a type and lengths."""
    value = lambda name, kind, shape: helper.make_tensor_value_info(name, kind, shape)
    graph = helper.make_graph(
        nodes,
        "g",
        [value(*one) for one in inputs],
        [value(*one) if len(one) == 3 else one[0] for one in outputs],
        [numpy_helper.from_array(array, name) for name, array in dict(weights).items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(ML, ml)]
    imports += [helper.make_opsetid(function.domain, 1) for function in functions]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


class Reader(CalibrationDataReader):
    """Some inputs to find ranges by."""

    def __init__(self, feeds):
        self.feeds = iter(feeds)

    def get_next(self):
        return next(self.feeds, None)


class Cases:
    def __init__(self, folder):
        self.folder = folder

    def add(self, name, proto, feeds, batch=None, tolerance=EXACT, config=None, keys=None):
        """A case with these requests. `proto` may be a file. With a batch, feeds have rows. Maps have these keys."""
        file = self.write(name, proto, batch, tolerance, config)
        session, unfused = run_by(file), run_by(file, "ORT_DISABLE_ALL")
        for number, feed in enumerate(feeds):
            outputs = [rows_of_maps(found, keys) for found in session.run(None, feed)]
            sides = {"input": [feed[found.name] for found in session.get_inputs()], "output": outputs}
            if name.startswith("quantised"):
                # Several roundings have become one where ONNX Runtime takes operators together: up to 19 steps.
                sides["unfused"] = unfused.run(None, feed)
            self.request(name, number, sides)

    def write(self, name, proto, batch, tolerance, config):
        case = self.folder / name
        case.mkdir(parents=True)
        if isinstance(proto, pathlib.Path):
            shutil.copy(proto, case / "model.onnx")
        else:
            (case / "model.onnx").write_bytes(proto.SerializeToString())
        config = config or f"max_batch_size: {batch or 0}\n"
        (case / "config.pbtxt").write_text(config)
        (case / "tolerance").write_text("{} {}\n".format(*tolerance))
        return case / "model.onnx"

    def request(self, name, number, sides):
        request = self.folder / name / f"test_data_set_{number}"
        request.mkdir()
        for side, arrays in sides.items():
            for index, array in enumerate(arrays):
                if array.dtype.kind == "U":
                    array = array.astype(object)
                tensor = bfloat16(array) if array.dtype.name == "bfloat16" else numpy_helper.from_array(array)
                (request / f"{side}_{index}.pb").write_bytes(tensor.SerializeToString())


def run_by(file, level="ORT_ENABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def rows_of_maps(found, keys):
    """What ZipMap gives as a row for each map, in the order of the file's keys, which are not sorted as a map's are."""
    if not isinstance(found, list):
        return found
    return numpy.array([[row[key] for key in keys or row] for row in found], numpy.float32)


def bfloat16(array):
    return helper.make_tensor("", TensorProto.BFLOAT16, array.shape, array.tobytes(), raw=True)


def networks():
    """Floats to be quantised: a convolutional network with branches, and attention."""
    weights = {"w1": normal(8, 3, 3, 3) * 0.3, "b1": normal(8) * 0.1, "w2": normal(8, 8, 1, 1) * 0.3}
    weights |= {"w3": normal(8, 8, 3, 3) * 0.2, "fc": normal(16, 10), "b": normal(10)}
    conv = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "w2"], ["left"]),
        helper.make_node("Conv", ["p1", "w3"], ["right"], pads=[1, 1, 1, 1]),
        helper.make_node("Concat", ["left", "right"], ["both"], axis=1),
        helper.make_node("AveragePool", ["both"], ["p2"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p2"], ["p3"]),
        helper.make_node("Flatten", ["p3"], ["flat"]),
        helper.make_node("Gemm", ["flat", "fc", "b"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"], axis=-1),
    ]
    yield "conv", model(conv, [("x", F, ["b", 3, 16, 16])], [("y", F, ["b", 10])], weights), [3, 16, 16]
    weights = {name: normal(16, 16) * 0.4 for name in ("q", "k", "v", "o")} | {"scale": numpy.float32(0.25)}
    attention = [helper.make_node("MatMul", ["x", name], [f"x{name}"]) for name in "qkv"] + [
        helper.make_node("Transpose", ["xk"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["xq", "kt"], ["raw"]),
        helper.make_node("Mul", ["raw", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "xv"], ["mixed"]),
        helper.make_node("MatMul", ["mixed", "o"], ["out"]),
        helper.make_node("Add", ["out", "x"], ["y"]),
    ]
    yield "attention", model(attention, [("x", F, ["b", 8, 16])], [("y", F, ["b", 8, 16])], weights), [8, 16]


def quantised(cases):
    with tempfile.TemporaryDirectory() as folder:
        float_file, file = pathlib.Path(folder, "float.onnx"), pathlib.Path(folder, "int.onnx")
        for name, proto, shape in networks():
            onnx.save(proto, float_file)
            ranges = [{"x": normal(4, *shape)} for _ in range(4)]
            choices = itertools.product((False, True), ("QInt8", "QUInt8"), ("QDQ", "QOperator"))
            for per_channel, kind, form in choices:
                quantize_static(
                    float_file,
                    file,
                    Reader(ranges),
                    quant_format=QuantFormat[form],
                    per_channel=per_channel,
                    activation_type=QuantType[kind],
                    weight_type=QuantType.QInt8,
                )
                found = onnx.load(file)
                scales = {one.name: numpy_helper.to_array(one) for one in found.graph.initializer}
                last = next(node for node in found.graph.node if "y" in node.output)
                quantum = float(scales[last.input[1]]) if last.op_type == "DequantizeLinear" else 1e-5
                case = f"quantised-{name}-{kind}-{form}-{'channel' if per_channel else 'tensor'}".lower()
                feeds = [{"x": normal(rows, *shape)} for rows in (1, 3)]
                cases.add(case, found, feeds, 8, (1e-4, quantum * 1.001))


def ml_node(operator, inputs, outputs, **attributes):
    return helper.make_node(operator, inputs, outputs, domain=ML, **attributes)


def stump(classes, regression=False, **more):
    """Two trees of one split each; `classes` are labels, or None to regress."""
    tree = dict(
        nodes_treeids=[0, 0, 0, 1, 1, 1],
        nodes_nodeids=[0, 1, 2, 0, 1, 2],
        nodes_featureids=[0, 0, 0, 2, 0, 0],
        nodes_values=[0.1, 0.0, 0.0, -0.2, 0.0, 0.0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * 2,
        nodes_truenodeids=[1, 0, 0] * 2,
        nodes_falsenodeids=[2, 0, 0] * 2,
    )
    side = "target" if regression else "class"
    ids = [0, 0, 0, 0] if regression else [index % max(1, len(classes) if len(classes) > 2 else 1) for index in range(4)]
    tree |= {
        f"{side}_treeids": [0, 0, 1, 1],
        f"{side}_nodeids": [1, 2, 1, 2],
        f"{side}_ids": ids,
        f"{side}_weights": [0.7, -0.4, 0.3, -0.6],
    }
    return tree | more


def labels(classes):
    key = "classlabels_strings" if isinstance(classes[0], str) else "classlabels_int64s"
    return {key: classes}


def machine_learning(cases):
    rows = [{"x": normal(count, 4)} for count in (1, 5)]
    x = [("x", F, ["b", 4])]
    scores = lambda classes: [
        ("label", STRING if isinstance(classes[0], str) else I64, ["b"]),
        ("scores", F, ["b", len(classes)]),
    ]
    for classes in ([0, 1], [7, 5], ["no", "yes"], [0, 1, 2], ["a", "b", "c"]):
        of = f"{len(classes)}{'strings' if isinstance(classes[0], str) else 'numbers'}{classes[0]}"
        for transform in ("NONE", "LOGISTIC", "SOFTMAX"):
            key = "classlabels_strings" if isinstance(classes[0], str) else "classlabels_int64s"
            tree = stump(classes, post_transform=transform, **{key: classes})
            node = ml_node("TreeEnsembleClassifier", ["x"], ["label", "scores"], **tree)
            cases.add(f"ml-trees-{of}-{transform}".lower(), model([node], x, scores(classes)), rows, 8)
            key = "classlabels_strings" if isinstance(classes[0], str) else "classlabels_ints"
            width = len(classes)
            linear = dict(coefficients=list(map(float, normal(width * 4))), intercepts=list(map(float, normal(width))))
            node = ml_node("LinearClassifier", ["x"], ["label", "scores"], post_transform=transform, **linear, **{key: classes})
            cases.add(f"ml-linear-{of}-{transform}".lower(), model([node], x, scores(classes)), rows, 8)
        node = ml_node("TreeEnsembleClassifier", ["x"], ["label", "probabilities"], **stump(classes, **labels(classes)))
        zipped = ml_node("ZipMap", ["probabilities"], ["maps"], **labels(classes))
        maps = helper.make_value_info(
            "maps",
            helper.make_sequence_type_proto(
                helper.make_map_type_proto(
                    STRING if isinstance(classes[0], str) else I64, helper.make_tensor_type_proto(F, [])
                )
            ),
        )
        cases.add(f"ml-zipmap-{of}", model([node, zipped], x, [scores(classes)[0], (maps,)]), rows, 8, keys=classes)
    whole = [("y", F, ["b", 4])]
    one = [("y", F, ["b", 1])]
    for name, node, outputs in (
        ("regression", ml_node("TreeEnsembleRegressor", ["x"], ["y"], n_targets=1, **stump([], True)), one),
        (
            "average",
            ml_node("TreeEnsembleRegressor", ["x"], ["y"], n_targets=1, aggregate_function="AVERAGE", **stump([], True)),
            one,
        ),
        ("scaler", ml_node("Scaler", ["x"], ["y"], offset=[0.1, 0.2, 0.3, 0.4], scale=[1.0, 2.0, 3.0, 4.0]), whole),
        ("imputer", ml_node("Imputer", ["x"], ["y"], imputed_value_floats=[1.0, 2.0, 3.0, 4.0]), whole),
        ("binarizer", ml_node("Binarizer", ["x"], ["y"], threshold=0.1), whole),
        ("normalizer-l1", ml_node("Normalizer", ["x"], ["y"], norm="L1"), whole),
        ("normalizer-l2", ml_node("Normalizer", ["x"], ["y"], norm="L2"), whole),
        ("normalizer-max", ml_node("Normalizer", ["x"], ["y"], norm="MAX"), whole),
        (
            "linear-regression",
            ml_node("LinearRegressor", ["x"], ["y"], coefficients=[0.1, -0.2, 0.3, 0.4], intercepts=[0.5], targets=1),
            one,
        ),
        (
            "vector-regression",
            ml_node(
                "SVMRegressor",
                ["x"],
                ["y"],
                coefficients=[0.3, -0.7],
                kernel_params=[0.5, 0.0, 3.0],
                kernel_type="RBF",
                n_supports=2,
                rho=[0.1],
                support_vectors=[0.1, 0.2, 0.3, 0.4, -0.4, -0.3, -0.2, -0.1],
            ),
            one,
        ),
    ):
        cases.add(f"ml-{name}", model([node], x, outputs), rows, 8)
    texts = [{"s": numpy.array([["b"], ["zzz"], ["a"]], object)}]
    encoder = ml_node("LabelEncoder", ["s"], ["y"], keys_strings=["a", "b"], values_int64s=[3, 4], default_int64=-1)
    cases.add("ml-label-encoder", model([encoder], [("s", STRING, ["b", 1])], [("y", I64, ["b", 1])]), texts, 8)
    encoder = ml_node("OneHotEncoder", ["s"], ["y"], cats_strings=["a", "b"], zeros=1)
    cases.add("ml-one-hot", model([encoder], [("s", STRING, ["b", 1])], [("y", F, ["b", 1, 2])]), texts, 8)


def recurrent(cases):
    for operator, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        for direction, ways in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
            for reset in (0, 1) if operator == "GRU" else (None,):
                weights = {"w": normal(ways, gates * 3, 2), "r": normal(ways, gates * 3, 3), "b": normal(ways, gates * 6)}
                more = {} if reset is None else {"linear_before_reset": reset}
                node = helper.make_node(
                    operator, ["x", "w", "r", "b"], ["y", "h"], hidden_size=3, direction=direction, **more
                )
                proto = model([node], [("x", F, ["t", "b", 2])], [("y", F, ["t", ways, "b", 3]), ("h", F, [ways, "b", 3])], weights)
                feeds = [{"x": normal(length, rows, 2)} for length, rows in ((1, 1), (4, 3))]
                cases.add(f"recurrent-{operator}-{direction}{'' if reset is None else reset}".lower(), proto, feeds)


def shapes(cases):
    feeds = [{"x": normal(rows, 2, 4, 4)} for rows in (1, 3)]
    for mode, transform in itertools.product(
        ("nearest", "linear", "cubic"), ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    ):
        nodes = [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Slice", ["shape", "zero", "two"], ["front"]),
            helper.make_node("Concat", ["front", "size"], ["sizes"], axis=0),
            helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode=mode, coordinate_transformation_mode=transform),
        ]
        weights = {name: numpy.array(numbers, numpy.int64) for name, numbers in (("zero", [0]), ("two", [2]), ("size", [7, 8]))}
        proto = model(nodes, [("x", F, ["b", 2, 4, 4])], [("y", F, ["b", 2, 7, 8])], weights)
        cases.add(f"resize-sizes-{mode}-{transform}", proto, feeds, 8)
    for opset, name in ((11, "old"), (17, "new")):
        nodes = [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Squeeze", ["p"], ["y"])]
        proto = model(nodes, [("x", F, [1, 3, 4, 4])], [("y", F, [3])], opset=opset)
        cases.add(f"squeeze-no-axes-{name}", proto, [{"x": normal(1, 3, 4, 4)}])
    sides = [
        helper.make_graph([helper.make_node(operator, ["x"], [name])], name, [], [helper.make_tensor_value_info(name, F, None)])
        for operator, name in (("Exp", "then"), ("Neg", "else"))
    ]
    node = helper.make_node("If", ["c"], ["y"], then_branch=sides[0], else_branch=sides[1])
    proto = model([node], [("c", TensorProto.BOOL, [1]), ("x", F, ["n", 4])], [("y", F, ["n", 4])])
    cases.add("if", proto, [{"c": numpy.array([side]), "x": normal(2, 4)} for side in (True, False)])
    body = [
        helper.make_node("Mul", ["a", "a"], ["square"]),
        helper.make_node("Sigmoid", ["square"], ["s"]),
        helper.make_node("Mul", ["a", "s"], ["r"]),
    ]
    function = helper.make_function("own", "gate", ["a"], ["r"], body, [helper.make_opsetid("", 17)])
    node = helper.make_node("gate", ["x"], ["y"], domain="own")
    proto = model([node], [("x", F, ["b", 4])], [("y", F, ["b", 4])], functions=[function])
    cases.add("function", proto, [{"x": normal(rows, 4)} for rows in (1, 3)], 8)
    noise = [
        helper.make_node("RandomNormalLike", ["x"], ["n"], seed=1.0),
        helper.make_node("Mul", ["n", "zero"], ["none"]),
        helper.make_node("Add", ["x", "none"], ["y"]),
    ]
    proto = model(noise, [("x", F, ["b", 4])], [("y", F, ["b", 4])], {"zero": numpy.float32(0)})
    cases.add("random-normal-like", proto, [{"x": normal(rows, 4)} for rows in (1, 3)], 8)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Softmax", ["m"], ["y"])]
    proto = model(nodes, [("x", F16, ["b", 8])], [("y", F16, ["b", 8])], {"w": normal(8, 8).astype(numpy.float16)})
    cases.add("half", proto, [{"x": normal(rows, 8).astype(numpy.float16)} for rows in (1, 3)], 8, HALF)


def strangers(cases, folder):
    """Files that users brought, or that have what failed in them."""
    zeros = numpy.zeros
    rows = lambda *shape, name="x": [{name: normal(count, *shape)} for count in (1, 5)]
    feeds = {
        "binary-trees/forest2": (8, rows(30, name="X")),
        "binary-trees/tree2": (8, rows(30, name="X")),
        "local-functions/attr_ref": (8, rows(4)),
        "qdq-softmax/net_qdq": (8, rows(3, 16, 16)),
        "qdq-softmax/softmax_i8": (8, rows(4, 4)),
        "random-like/vits_noise": (0, [{"x": normal(2, 4), "scale": zeros(1, numpy.float32)}]),
        "recurrent-free-batch/lstm_f": (None, [{"x": normal(4, 3, 2)}]),
        "recurrent-free-batch/rnn_bi": (None, [{"x": normal(4, 3, 2)}]),
        "reduce-over-nothing/reducesum": (None, [{"x": normal(3, 1)}]),
        "resize-sizes-free-batch/fpn_b_8_near": (8, rows(3, 8, 8)),
        "sklearn-ml/logreg_strings_nozip": (8, rows(4, name="X")),
        "sklearn-ml/rf": (8, rows(4, name="X")),
        "sklearn-ml/rfr": (8, rows(10, name="X")),
        "sklearn-ml/scaled_nozip": (8, rows(4, name="X")),
        "squeeze-no-axes/squeeze_op11": (0, [{"x": normal(1, 3, 4, 4)}]),
        "crash-on-short/pnet_like": (8, rows(3, 24, 24)),
        "if-branches/if_shapes": (None, [{"c": numpy.array([side]), "x": normal(2, 4)} for side in (True, False)]),
    }
    # Whoever takes numbers to the next step of eight bits may take the next but one.
    steps = {"qdq-softmax/net_qdq": (1e-4, 1 / 255), "qdq-softmax/softmax_i8": (1e-4, 1 / 127)}
    for name, (batch, requests) in feeds.items():
        own = folder / name / "config.pbtxt"
        config = own.read_text() if batch is None and own.exists() else None
        file = folder / name / "1/model.onnx"
        cases.add(f"stranger-{name.replace('/', '-')}", file, requests, batch, steps.get(name, EXACT), config)
    # Python's arrays have no BF16 that ONNX Runtime takes; what comes in comes out.
    brains = [normal(count, 4).astype(ml_dtypes.bfloat16) for count in (1, 5)]
    cases.write("stranger-bf16-id", folder / "bf16/id_BF16/1/model.onnx", 8, EXACT, None)
    for number, array in enumerate(brains):
        cases.request("stranger-bf16-id", number, {"input": [array], "output": [array]})


def main():
    strange, folder = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    cases = Cases(folder)
    for kind in (quantised, machine_learning, recurrent, shapes):
        kind(cases)
    strangers(cases, strange)
    print(f"{len(list(folder.iterdir()))} cases")


main()
