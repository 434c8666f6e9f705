"""A cluster of real processes on loopback, each role by its own command, on addresses of its own: 127.x.y.HOST."""

import functools
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

SECRET = "watched by prometheus, of enough bytes"
READY_S = 120
# Of HTTP for clients, of `admin.http`, where members connect, where backends connect to frontends, and of soft-RoCE.
CLIENTS, ADMIN, LISTEN, LINK, PACKETS = 28000, 28100, 27400, 27401, 24791
# Hosts of the network, by role; a member's number is added.
HOSTS = {"scheduler": 10, "frontend": 20, "backend": 30}
# What an emulated model takes and gives: numbers of a byte, and a digest.
EMULATED = """name: "{name}"
backend: "emulated"
max_batch_size: {batch}
input [ {{ name: "x" data_type: TYPE_UINT8 dims: [ {bytes} ] }} ]
output [ {{ name: "digest" data_type: TYPE_UINT64 dims: [ 2 ] }} ]
parameters {{ key: "alpha_ms" value: {{ string_value: "0.1" }} }}
parameters {{ key: "beta_ms" value: {{ string_value: "{beta_ms}" }} }}
"""
OBJECTIVE = 'parameters {{ key: "slo_ms" value: {{ string_value: "{slo_ms}" }} }}\n'
# An ONNX model that no backend can load, and one of a program that does as it is told.
OTHER = """name: "{name}"
{by}
max_batch_size: 4
input [ {{ name: "x" data_type: TYPE_UINT8 dims: [ 16 ] }} ]
output [ {{ name: "y" data_type: TYPE_UINT8 dims: [ 16 ] }} ]
"""
PROGRAM = "\"process\"\nparameters { key: \"program\" value: { string_value: \"['python3', 'program.py']\" } }"


@functools.cache
def row(count):
    tensor = {"name": "x", "shape": [1, count], "datatype": "UINT8", "data": [7] * count}
    return json.dumps({"inputs": [tensor]})


class Model:
    """An emulated model, and how many bytes a row of it has."""

    def __init__(self, name, beta_ms=1, slo_ms=2000, batch=8, row_bytes=16):
        self.name, self.row_bytes = name, row_bytes
        self.text = EMULATED.format(name=name, batch=batch, bytes=row_bytes, beta_ms=beta_ms)
        if slo_ms:
            self.text += OBJECTIVE.format(slo_ms=slo_ms)


def write(repository, models):
    for model in models:
        (repository / model.name / "1").mkdir(parents=True)
        (repository / model.name / "config.pbtxt").write_text(model.text)


def write_torn(repository):
    """A model that backends refuse."""
    (repository / "torn" / "1").mkdir(parents=True)
    (repository / "torn" / "1" / "model.onnx").write_bytes(b"not an ONNX model")
    (repository / "torn" / "config.pbtxt").write_text(OTHER.format(name="torn", by='platform: "onnxruntime_onnx"'))


def write_program(repository):
    """A model that gives its rows back, and fails all of them while `broken` is in its folder."""
    (repository / "program" / "1").mkdir(parents=True)
    (repository / "program" / "config.pbtxt").write_text(OTHER.format(name="program", by=f"backend: {PROGRAM}"))
    program = Path(__file__).with_name("program.py")
    (repository / "program" / "program.py").write_text(program.read_text())


class Cluster:
    """A job of Prometheus's: its members by name, such as `frontend-0`, and their keys beside the common ones."""

    def __init__(self, binary, folder, network, name, layout):
        self.binary, self.network, self.name, self.members = binary, network, f"downbeat-{name}", {}
        self.folder = folder / name
        self.repository = self.folder / "models"
        self.repository.mkdir(parents=True)
        self.secret = SECRET
        self.count = {role: sum(member.startswith(role) for member in layout) for role in HOSTS}
        self.layout, self.stops = layout, []

    def at(self, member, port):
        role, number = member.split("-")
        return f"{self.network}.{HOSTS[role] + int(number)}", port

    def address(self, member, port):
        return "{}:{}".format(*self.at(member, port))

    def targets(self):
        return [self.address(member, ADMIN) for member in self.layout]

    def keys(self, member, more):
        role, _ = member.split("-")
        schedulers = [self.address(f"scheduler-{number}", LISTEN) for number in range(self.count["scheduler"])]
        keys = {"secret": SECRET, "name": member, "schedulers": schedulers, "address": self.address(member, PACKETS)}
        if role == "scheduler":
            keys |= {"listen": self.address(member, LISTEN), "policy": "eager", "model_threads": 1, "suspect_ms": 200}
        else:
            keys |= {"repository": str(self.repository)}
        if role == "frontend":
            keys |= {"link": self.address(member, LINK), "http": self.address(member, CLIENTS), "drain_grace_ms": 0}
        top, tables = "", ""
        for key, value in (keys | more).items():
            if isinstance(value, dict):
                tables += f"[{key}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in value.items())
            else:
                top += f"{key} = {json.dumps(value)}\n"
        return f'{top}{tables}[admin]\nhttp = "{self.address(member, ADMIN)}"\n'

    def start(self, member, **more):
        """With keys other than the layout's, if there are any."""
        file = self.folder / f"{member}.toml"
        file.write_text(self.keys(member, self.layout[member] | more))
        file.chmod(0o600)
        command = [self.binary, member.split("-")[0], "--supervised-by", str(os.getpid()), "--config", file]
        with open(self.folder / f"{member}.log", "ab") as log:
            self.members[member] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start_all(self):
        for member in self.layout:
            self.start(member)

    def signal(self, member, number):
        self.members[member].send_signal(number)

    def kill(self, member):
        self.signal(member, signal.SIGKILL)
        self.members.pop(member).wait()

    def command(self, *words):
        """A command for the cluster, with the file of its first scheduler."""
        file = self.folder / "scheduler-0.toml"
        subprocess.run([self.binary, *words, "--config", file], check=True, stdout=subprocess.DEVNULL)

    def ask(self, member, path, body=None, port=CLIENTS, source=None):
        """The status of an answer and what it says, or 0 and why there is none."""
        host, port = self.at(member, port)
        connection = http.client.HTTPConnection(host, port, timeout=30, source_address=(source, 0) if source else None)
        try:
            head = {"Content-Type": "application/json"} if body else {}
            connection.request("POST" if body else "GET", path, body, head)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        finally:
            connection.close()

    def infer(self, member, model, row_bytes=16, source=None):
        return self.ask(member, f"/v2/models/{model}/infer", row(row_bytes), source=source)

    def traffic(self, member, model, clients=1, pause_s=0.05, **more):
        """Clients that ask one after another until they are told to stop. Yields what stops them."""
        stop = threading.Event()

        def ask():
            while not stop.is_set():
                self.infer(member, model, **more)
                stop.wait(pause_s)

        for _ in range(clients):
            threading.Thread(target=ask, daemon=True).start()
        self.stops.append(stop)
        return stop

    def wait_until(self, what, is_so):
        until = time.monotonic() + READY_S
        while not is_so():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name}: {what}: not within {READY_S} s\n{self.logs()}")
            time.sleep(0.1)

    def wait_until_served(self, member, model):
        is_ready = lambda: self.ask(member, f"/v2/models/{model}/ready")[0] == 200
        self.wait_until(f"{member} serves {model}", is_ready)

    def logs(self):
        return "".join(f"{log.name}:\n{log.read_text()[-1500:]}\n" for log in sorted(self.folder.glob("*.log")))

    def end(self):
        for stop in self.stops:
            stop.set()
        for member in list(self.members):
            self.kill(member)
