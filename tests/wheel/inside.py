"""inside.py BINARY: what a user does who has installed the wheel, in a folder that is no source tree. Python 3.9 and
nothing else: the environment that has the wheel is not active."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

MODEL = """
import numpy as np
import downbeat


class Sum(downbeat.Model):
    def predict(self, batch):
        return {"sum": batch["values"].sum(axis=1, keepdims=True)}
"""
CONFIG = """
backend: "python"
max_batch_size: 64
input { name: "values" data_type: TYPE_FP32 dims: 16 }
output { name: "sum" data_type: TYPE_FP32 dims: 1 }
parameters { key: "slo_ms" value { string_value: "1000" } }
"""


def infer(url: str, body: bytes) -> list:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as reply:
        return json.load(reply)["outputs"][0]["data"]


@contextlib.contextmanager
def up(binary: str, *words: str):
    """A running `downbeat up`, which must end in good order when it is told to."""
    with subprocess.Popen([binary, "up", *words], stdout=subprocess.PIPE, text=True) as cluster:
        try:
            yield cluster.stdout
        finally:
            cluster.send_signal(signal.SIGTERM)
            code = cluster.wait(timeout=60)
    assert code == 0, f"`up` ended with {code}"


def line(lines, pattern: str) -> re.Match:
    """The first line that looks like this; fails where there is none before the end."""
    for text in lines:
        print(text, end="", flush=True)
        if found := re.match(pattern, text):
            return found
    raise AssertionError(f"`up` ended before it said `{pattern}`")


def demo(binary: str) -> None:
    started = time.monotonic()
    subprocess.run([binary, "demo", "--seconds", "2"], check=True)
    print(f"demo --seconds 2: {time.monotonic() - started:.1f} s", flush=True)


def seven(binary: str) -> None:
    """What `up` says is to be tried."""
    started = time.monotonic()
    with up(binary) as lines:
        _, url, file = line(lines, r"(try: curl -s (\S+) --data @(\S+)$)").groups()
        with open(file, "rb") as body:
            scores = infer(url, body.read())
        print(f"up: {time.monotonic() - started:.1f} s to the first answer", flush=True)
        assert scores.index(max(scores)) == 7, scores


def python(binary: str) -> None:
    """The model of the Python package's README, with numpy from the wheel's environment."""
    os.makedirs("models/sum/1")
    for name, text in [("config.pbtxt", CONFIG), ("1/model.py", MODEL)]:
        with open(f"models/sum/{name}", "w") as file:
            file.write(text)
    values = {"name": "values", "datatype": "FP32", "shape": [1, 16], "data": list(range(16))}
    started = time.monotonic()
    with up(binary, "--repository", "models") as lines:
        url = line(lines, r"ready: sum at (http\S+),")[1]
        answer = infer(f"{url}/v2/models/sum/infer", json.dumps({"inputs": [values]}).encode())
        print(f"a model in Python: {time.monotonic() - started:.1f} s to the first answer", flush=True)
        assert answer == [120], answer


def notebook(binary: str) -> None:
    """The same model by `downbeat.serve`, which finds the program that came with it."""
    cell = """
import json, urllib.request
import downbeat
with downbeat.serve("models") as server:
    values = {"name": "values", "datatype": "FP32", "shape": [1, 16], "data": list(range(16))}
    body = json.dumps({"inputs": [values]}).encode()
    with urllib.request.urlopen(f"{server.url}/v2/models/sum/infer", body, timeout=30) as reply:
        assert json.load(reply)["outputs"][0]["data"] == [120]
assert "stopped" in repr(server), server
"""
    interpreter = os.path.join(os.path.dirname(binary), "python")
    subprocess.run([interpreter, "-c", cell], check=True, timeout=300)
    print("downbeat.serve: served, and ended in good order", flush=True)


if __name__ == "__main__":
    for check in demo, seven, python, notebook:
        check(os.path.abspath(sys.argv[1]))
