"""Serves models as they are and compares their answers with ONNX Runtime's, for tests/models/run.

judge.py DOWNBEAT PACKAGES FOLDER [NAME..]
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy
import onnxruntime
import tritonclient.grpc
import tritonclient.http

import exports
import subjects

# Numbers of ONNX Runtime's own differ by as much between two runs with other threads.
RELATIVE, ABSOLUTE = 1e-4, 1e-5
# Beside a build, on two cores.
READY_S = 300
TYPES = {"float64": "FP64", "float32": "FP32", "float16": "FP16", "bool": "BOOL", "object": "BYTES"}


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class Server:
    """`downbeat up` over a repository."""

    def __init__(self, downbeat, repository, log, *arguments):
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
        command = [downbeat, "up", "--repository", repository, "--http", self.http, "--grpc", self.grpc, *arguments]
        self.lines, self.is_ready, self.since = [], threading.Event(), time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("ready"):
                self.took = time.monotonic() - self.since
                self.is_ready.set()

    def wait(self):
        if not self.is_ready.wait(READY_S):
            sys.exit(f"judge: `up` was not ready within {READY_S} s: {self.lines[-3:]}")

    def index(self):
        request = urllib.request.Request(f"http://{self.http}/v2/repository/index", b"{}", method="POST")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as reply:
            return {model["name"]: model for model in json.load(reply)}

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(40)


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


def judge(subject, clients):
    """What is wrong with its answers, of how many."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(subject.file, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    wrong, count = [], 0
    for request, inputs in subject.requests():
        expected = [flat(value) for value in session.run(None, inputs)]
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


def main():
    downbeat, packages, folder = sys.argv[1], *map(pathlib.Path, sys.argv[2:4])
    chosen = [*subjects.real(packages), *subjects.further(packages), *subjects.strangers(), *exports.all_of(folder / "exports")]
    names = sys.argv[4:]
    chosen = [subject for subject in chosen if not names or subject.name in names]
    repository(folder / "repository", chosen)
    failed = 0
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
                state = index.get(subject.name, {})
                if state.get("state") != "READY":
                    failed += 1
                    print(f"refused {subject.name}: {state.get('reason', 'it is not in the index')[:400]}")
                    continue
                wrong, count = judge(subject, clients)
                failed += bool(wrong)
                print(f"{'wrong' if wrong else 'right'} {subject.name}: {count - len(wrong)} of {count}", *wrong[:2], sep="; ", flush=True)
        finally:
            server.end()
    print(f"{len(chosen) - failed} of {len(chosen)} models are served right")
    sys.exit(failed > 0)


main()
