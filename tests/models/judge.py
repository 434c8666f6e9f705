"""Serves models as they are and compares their answers with ONNX Runtime's, for tests/models/run.

judge.py DOWNBEAT PACKAGES FOLDER [NAME..]

What came of all of them is a page, FOLDER/models.md.
"""

import os
import pathlib
import shutil
import sys

import numpy
import onnxruntime
import tritonclient.grpc
import tritonclient.http

import exports
import page
import subjects
from server import Server

# Numbers of ONNX Runtime's own differ by as much between two runs with other threads.
RELATIVE, ABSOLUTE = 1e-4, 1e-5
TYPES = {"float64": "FP64", "float32": "FP32", "float16": "FP16", "bool": "BOOL", "object": "BYTES"}


def type_of(array):
    return TYPES.get(array.dtype.name) or array.dtype.name.upper()


def ask(module, client, name, inputs, outputs):
    tensors = []
    for key, array in inputs.items():
        tensor = module.InferInput(key, list(array.shape), type_of(array))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    wanted = [module.InferRequestedOutput(output) for output in outputs]
    answer = client.infer(name, tensors, outputs=wanted)
    return [answer.as_numpy(output) for output in outputs]


def texts(array):
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel()]


def difference(found, expected):
    """What is wrong with an output; nothing if it is right."""
    if found is None:
        return "it is missing"
    if list(found.shape) != list(expected.shape):
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    if expected.dtype.kind in "OUS":
        return None if texts(found) == texts(expected) else f"{texts(found)[:3]}, expected {texts(expected)[:3]}"
    if found.dtype != expected.dtype:
        return f"type {found.dtype}, expected {expected.dtype}"
    if expected.dtype.kind != "f":
        return None if (found == expected).all() else f"{found.ravel()[:3]}, expected {expected.ravel()[:3]}"
    near = numpy.allclose(found, expected, RELATIVE, ABSOLUTE, equal_nan=True)
    return None if near else f"off by {numpy.nanmax(numpy.abs(found - expected)):.2g}"


def flat(value):
    """Outputs that are sequences of maps, as tensors with a column for each key."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return numpy.array([[row[key] for key in sorted(row)] for row in value], numpy.float32)
    return numpy.asarray(value)


def answers(session, inputs, is_apart):
    """ONNX Runtime's own, to all rows or to each of them."""
    if not is_apart:
        return [flat(value) for value in session.run(None, inputs)]
    count = len(next(iter(inputs.values())))
    rows = [answers(session, {name: array[row : row + 1] for name, array in inputs.items()}, False) for row in range(count)]
    return [numpy.concatenate(outputs) for outputs in zip(*rows)]


def judge(subject, clients):
    """What is wrong with its answers, of how many."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(subject.file, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    wrong, count = [], 0
    for request, inputs in subject.requests():
        expected = answers(session, inputs, subject.is_apart)
        for wire, (module, client) in clients.items():
            count += 1
            try:
                found = ask(module, client, subject.name, inputs, outputs)
                causes = [f"{name}: {cause}" for name, *pair in zip(outputs, found, expected) if (cause := difference(*pair))]
            except Exception as error:  # Whatever a client raises is an answer that is not right.
                causes = [str(error)]
            wrong += [f"{request} {wire}: {cause[:300]}" for cause in causes[:1]]
    return wrong, count


def repository(folder, chosen):
    """The files as they are, each with the configuration that lies beside it, if any."""
    shutil.rmtree(folder, ignore_errors=True)
    for subject in chosen:
        source = subject.file.parent.parent
        if subjects.STRANGERS in source.parents:
            shutil.copytree(source, folder / subject.name, symlinks=True)
            continue
        version = folder / subject.name / "1"
        version.mkdir(parents=True)
        shutil.copy(subject.file, version / "model.onnx")
        # Weights keep the name that the file has for them.
        for weights in subject.file.parent.glob(f"{subject.file.name}?data"):
            shutil.copy(weights, version)


def main():
    downbeat, packages, folder = sys.argv[1], *map(pathlib.Path, sys.argv[2:4])
    kinds = {
        "real": subjects.real(packages),
        "further": subjects.further(packages),
        "strangers": subjects.strangers(),
        "exports": exports.all_of(folder / "exports"),
    }
    names = sys.argv[4:]
    chosen = [subject for kind in kinds.values() for subject in kind if not names or subject.name in names]
    repository(folder / "repository", chosen)
    found = {}
    with open(folder / "log", "w") as log:
        server = Server(downbeat, folder / "repository", log, *os.environ.get("UP_ARGUMENTS", "").split())
        try:
            server.wait()
            print(f"ready after {server.took:.1f} s")
            index = server.index()
            clients = {
                "http": (
                    tritonclient.http,
                    tritonclient.http.InferenceServerClient(server.http, network_timeout=120, connection_timeout=120),
                ),
                "grpc": (tritonclient.grpc, tritonclient.grpc.InferenceServerClient(server.grpc)),
            }
            for subject in chosen:
                found[subject.name] = page.Found(*what_comes_of(subject, index.get(subject.name, {}), clients))
                print(found[subject.name].line(subject.name), flush=True)
        finally:
            server.end()
    failed = sum(not result.is_right() for result in found.values())
    print(f"{len(chosen) - failed} of {len(chosen)} models are served right")
    if not names:
        page.write(folder / "models.md", kinds, found, packages)
    sys.exit(failed > 0)


def what_comes_of(subject, state, clients):
    """Answers that are right, of how many, and what is wrong."""
    if state.get("state") != "READY":
        return 0, 0, [f"refused: {state.get('reason', 'it is not in the index')[:400]}"]
    wrong, count = judge(subject, clients)
    return count - len(wrong), count, wrong


main()
