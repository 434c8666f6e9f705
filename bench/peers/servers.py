"""The servers that are compared: how each is configured for the same model (the sum of 64 floats), started and stopped."""

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

MODELS = Path(__file__).parent.absolute() / "models"
DOWNBEAT = "target/release/downbeat"
HOST = "127.0.0.1"
READY_SECONDS = 300
STOP_SECONDS = 20


class Server:
    """A server in a process group of its own. `name` is the product's, `variant` what was set beyond its defaults."""

    def __init__(self, name, variant, port, command, cwd=None, env=None):
        self.name, self.variant, self.port = name, variant, port
        self.command, self.cwd, self.env = [str(word) for word in command], cwd, {**os.environ, **(env or {})}
        self.url = f"http://{HOST}:{port}"
        self.version = None

    def __str__(self):
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @contextlib.contextmanager
    def running(self, work):
        path = work / f"{self}.log".replace(", ", "-").replace(" ", "-")
        with open(path, "w") as log:
            process = subprocess.Popen(self.command, cwd=self.cwd, env=self.env, stdout=log, stderr=log, start_new_session=True)
            try:
                self.wait_until_ready(process, path)
                yield
            finally:
                stop(process)

    def wait_until_ready(self, process, log):
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                self.check()
                return
            time.sleep(0.2)
        sys.exit(f"{self} does not serve: see {log}")

    def check(self):
        """Asks for the version, and for one sum, which must be right."""
        numbers = [n / 2 for n in range(64)]
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": numbers}
        answer = self.ask("/v2/models/sum/infer", {"inputs": [tensor]})
        if answer["outputs"][0]["data"] != [sum(numbers)]:
            sys.exit(f"{self}: expected {sum(numbers)}, found {answer}")
        self.version = self.ask("/v2")["version"]

    def ask(self, path, body=None):
        body = body and json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.load(response)


def stop(process):
    """SIGTERM to the server, then SIGKILL to what is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def downbeat(venvs, work):
    """The whole fabric. Deferral holds answers back on purpose, eager does not; a loopback costs less than a network."""
    repository = fresh_copy(MODELS / "downbeat", work / "downbeat")
    write_onnx(repository / "sum/1/model.onnx")
    config = work / "downbeat.toml"
    config.write_text(f'http = ["{HOST}:18101"]\ngrpc = []\nrepository = "{repository}"\npolicy = "eager"\n'
                      '[network]\nctrl_us = 30\ndata_us_per_request = 1\n'
                      '[[backend]]\ngpus = 1\nmodels = ["sum"]\n')
    return [Server("downbeat", "policy eager", 18101, [DOWNBEAT, "up", "--config", config])]


def write_onnx(path):
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=1)], "sum",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["n", 1])],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [1])])
    path.parent.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def triton(venvs, work):
    """The server in the wheel of pytriton; its only backend is Python's, which runs the model in a process of its own."""
    site = next((venvs / "triton/lib").glob("python3*/site-packages"))
    home = site / "pytriton/tritonserver"
    # The stub embeds the system's Python, and is looked for beside the backend.
    python = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2], sep='.')"], check=True,
                            capture_output=True, text=True).stdout.strip()
    shutil.copy(home / f"python_backend_stubs/{python}/triton_python_backend_stub", home / "backends/python")
    env = {"LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"), "PATH": "/usr/bin:/bin"}

    def serving(variant, settings):
        repository = fresh_copy(MODELS / "triton", work / f"triton {variant}".strip().replace(" ", "-"))
        with open(repository / "sum/config.pbtxt", "a") as config:
            config.write(settings)
        command = [home / "bin/tritonserver", "--model-repository", repository, "--backend-directory", home / "backends",
                   "--http-address", HOST, "--http-port", 18102, "--allow-grpc", "false", "--allow-metrics", "false",
                   "--log-info", "false"]
        return Server("Triton", variant, 18102, command, env=env)

    return [serving("", ""), serving("dynamic batching", "dynamic_batching { }\n")]


def mlserver(venvs, work):
    """The model in the server's own process: on two cores, workers of their own only add a hop."""
    def serving(variant, env):
        return Server("MLServer", variant, 18103, [venvs / "mlserver/bin/mlserver", "start", "."], MODELS / "mlserver", env)

    batching = {"MLSERVER_MODEL_MAX_BATCH_SIZE": "64", "MLSERVER_MODEL_MAX_BATCH_TIME": "0.001"}
    return [serving("", {}), serving("adaptive batching", batching)]


def ray(venvs, work):
    """With both of Ray's switches for high throughput; without them it does a tenth."""
    # A folder of its own, with a short path, as the names of Ray's sockets are long: it leaves its logs behind.
    folder = tempfile.mkdtemp(prefix="ray-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    env = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(os.cpu_count()),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy-state",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,
    }

    def serving(variant, batch_max):
        command = [venvs / "ray/bin/python", MODELS / "ray/sum_app.py", 18104, os.cpu_count(), batch_max]
        return Server("Ray Serve", variant, 18104, command, env=env)

    return [serving("", 1), serving("batching", 64)]


def fresh_copy(source, target):
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


PEERS = {"downbeat": downbeat, "triton": triton, "mlserver": mlserver, "ray": ray}
