"""A cluster of real processes, each role started by its own command as an operator does, on addresses of its own: a
random 127.x.y.0/24. What is not said in a layout has its default; the policy is `eager`, as what is judged is whether
requests are answered, not for how long a scheduler may hold them back."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import http1
from pictures import PATIENCE_US

# Where configurations and logs of all clusters of a run are.
FOLDER = Path("target/attacks")
REPOSITORY = FOLDER / "models"
READY_S = 40
# Of files that loads bring along.
LOADED_BYTES_MAX = 64 << 20
# Takes half a second for any batch, so that a test can have requests under way.
SLOW_MODEL = """name: "slow"
backend: "emulated"
max_batch_size: 64
input [ { name: "bytes" data_type: TYPE_UINT8 dims: [ 16 ] } ]
output [ { name: "digest" data_type: TYPE_UINT64 dims: [ 2 ] } ]
parameters { key: "slo_ms" value: { string_value: "8000" } }
parameters { key: "alpha_ms" value: { string_value: "0.1" } }
parameters { key: "beta_ms" value: { string_value: "500" } }
"""
# Gives a row back, and has answers kept.
KEPT_MODEL = """name: "{name}"
backend: "emulated"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_UINT8 dims: [ {bytes} ] }} ]
output [ {{ name: "x" data_type: TYPE_UINT8 dims: [ {bytes} ] }} ]
response_cache {{ enable: true }}
parameters {{ key: "slo_ms" value: {{ string_value: "8000" }} }}
parameters {{ key: "alpha_ms" value: {{ string_value: "0.1" }} }}
parameters {{ key: "beta_ms" value: {{ string_value: "{beta_ms}" }} }}
"""
KEPT_BYTES = 64 << 10
# Gives a row of 16 MiB back, and an ensemble that asks it sixteen times, side by side, for each request.
WIDE_BYTES, WIDE_STEPS = 16 << 20, 16
WIDE_TENSORS = f"""max_batch_size: 1
input [ {{ name: "x" data_type: TYPE_UINT8 dims: [ {WIDE_BYTES} ] }} ]
output [ {{ name: "y" data_type: TYPE_UINT8 dims: [ {WIDE_BYTES} ] }} ]
parameters {{ key: "slo_ms" value: {{ string_value: "20000" }} }}
"""
WIDE_MEMBER = f"""backend: "emulated"
{WIDE_TENSORS}
parameters {{ key: "alpha_ms" value: {{ string_value: "1" }} }}
parameters {{ key: "beta_ms" value: {{ string_value: "1" }} }}
"""
WIDE_STEP = """step { model_name: "wide_member" model_version: -1 input_map { key: "x" value: "x" }
output_map { key: "y" value: "%s" } }
"""
WIDE = f'platform: "ensemble"\n{WIDE_TENSORS}ensemble_scheduling {{\n'
WIDE += "".join(WIDE_STEP % (f"y{number}" if number else "y") for number in range(WIDE_STEPS)) + "}\n"
# Of all answers that a frontend keeps.
CACHE_BYTES = 8 << 20


@dataclass(frozen=True)
class Layout:
    """What a cluster consists of, besides one scheduler and one frontend."""

    # Of each backend: its GPUs and what they host. By default what `downbeat up` starts.
    backends: tuple[tuple[int, tuple[str, ...]], ...] = ((1, ("digits",)), (8, ("resnet50", "inception_resnet_v2")))
    # The frontend's limit of open files.
    files_max: int | None = None
    # Where the frontend's log goes, if not into a file: a device, or `unread`, a pipe that nobody reads.
    log: str | None = None
    # The last backend is in a network of its own, from where the way to the frontend alone can be cut.
    cut_off: bool = False


LAYOUTS = {
    "up": Layout(),
    "pair": Layout(backends=((1, ("digits", "slow")), (1, ("digits", "slow")))),
    "few-files": Layout(files_max=256),
    "full-log": Layout(log="/dev/full"),
    "unread-log": Layout(log="unread"),
    "kept": Layout(backends=((1, ("digits",)), (1, ("kept", "kept_slow")))),
    "wide": Layout(backends=((1, ("digits",)), (1, ("wide_member",)))),
    "cut-off": Layout(backends=((1, ("digits",)), (1, ("digits",))), cut_off=True),
}


class Failed(Exception):
    """A cluster did not become what it should be; the text says why."""


@dataclass
class Member:
    """A role's process."""

    name: str
    process: subprocess.Popen
    log: Path | None
    rss_before: int = 0

    def stat(self):
        """The fields of /proc/PID/stat from the state on; works in processes that are not its parent, too."""
        try:
            with open(f"/proc/{self.process.pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return ["X"]

    def is_alive(self):
        return self.stat()[0] not in "ZX"

    def ending(self):
        """How it ended, until somebody has waited for it: `exit code 0`, or `signal 9`."""
        code = int(self.stat()[-1])
        return f"signal {code & 0x7F}" if code & 0x7F else f"exit code {code >> 8}"

    def signal(self, number):
        """As `kill` does; `Popen` would ask whether the process still is, which only its parent is told."""
        os.kill(self.process.pid, number)

    def status(self, key):
        """A number of bytes from /proc/PID/status; 0 if the process is gone."""
        try:
            with open(f"/proc/{self.process.pid}/status") as lines:
                return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def mark(self):
        """From now on growth is counted anew."""
        self.rss_before = self.status("VmRSS")
        try:
            # proc_pid_clear_refs(5): 5 makes the peak what it is now.
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        except OSError:
            pass

    def growth(self):
        return max(0, self.status("VmHWM") - self.rss_before)

    def kept(self):
        return max(0, self.status("VmRSS") - self.rss_before)

    def log_bytes(self):
        return self.log.stat().st_size if self.log else 0

    def log_text(self, start=0):
        if self.log is None:
            return ""
        with open(self.log, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")


def make_repository():
    """The demo's models and one more, in a copy that attacks may spoil."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree("models", REPOSITORY)
    (REPOSITORY / "slow" / "1").mkdir(parents=True)
    (REPOSITORY / "slow" / "config.pbtxt").write_text(SLOW_MODEL)
    for name, beta_ms in (("kept", 0.5), ("kept_slow", 500)):
        (REPOSITORY / name / "1").mkdir(parents=True)
        text = KEPT_MODEL.format(name=name, bytes=KEPT_BYTES, beta_ms=beta_ms)
        (REPOSITORY / name / "config.pbtxt").write_text(text)
    for name, text in (("wide_member", WIDE_MEMBER), ("wide", WIDE)):
        (REPOSITORY / name / "1").mkdir(parents=True)
        (REPOSITORY / name / "config.pbtxt").write_text(text)


@dataclass
class Cluster:
    """A running cluster."""

    layout: Layout
    binary: str
    folder: Path
    host: str
    secret: str
    members: dict[str, Member] = field(default_factory=dict)
    namespace: str | None = None

    @classmethod
    def start(cls, name, binary):
        """Starts all roles and waits until the models can be served."""
        number = len(list(FOLDER.glob("cluster-*")))
        folder = FOLDER / f"cluster-{number}-{name}"
        folder.mkdir()
        # Not 127.0, where other servers are, nor 127.66, where the hostile client is.
        host = f"127.{random.randint(70, 250)}.{random.randint(0, 250)}"
        cluster = cls(LAYOUTS[name], binary, folder, host, f"{random.getrandbits(128):032x}")
        try:
            if cluster.layout.cut_off:
                cluster.make_namespace()
            cluster.start_role("scheduler", "scheduler", f'listen = "{cluster.at(1, 7400)}"\npolicy = "eager"\n')
            cluster.start_frontend()
            for index in reversed(range(len(cluster.layout.backends))):
                cluster.start_backend(index)
                # Of GPUs that are free the first that joined is taken: that of the last backend, which is attacked.
                cluster.wait_for_log(f"backend-{index}", " joined")
            cluster.wait_until_ready()
        except BaseException:
            cluster.end()
            raise
        return cluster

    @property
    def network(self):
        """Where members reach each other: what a backend must reach from a network of its own is no loopback
        address."""
        return "10.66.0" if self.layout.cut_off else self.host

    def at(self, host, port):
        return f"{self.network}.{host}:{port}"

    @property
    def http(self):
        return f"{self.host}.2", 8000

    @property
    def grpc(self):
        return f"{self.host}.2", 8001

    @property
    def scheduler(self):
        return f"{self.network}.1", 7400

    @property
    def link(self):
        """Where backends connect to the frontend."""
        return f"{self.network}.2", 7401

    @property
    def loaded(self):
        """Where members keep the files that loads bring along."""
        return self.folder.resolve() / "loaded"

    def packets(self, name):
        """Where the soft-RoCE packets of a member arrive."""
        host = {"scheduler": 1, "frontend": 2}.get(name) or 32 + int(name.removeprefix("backend-"))
        return f"{self.network}.{host}", 4791

    def start_frontend(self):
        layout = self.layout
        http, grpc = (f"{host}:{port}" for host, port in (self.http, self.grpc))
        keys = f'scheduler = "{self.at(1, 7400)}"\nlink = "{self.at(2, 7401)}"\naddress = "{self.at(2, 4791)}"\n'
        keys += f'repository = "{REPOSITORY}"\nhttp = "{http}"\ngrpc = "{grpc}"\n'
        keys += f"drain_grace_ms = 1000\ncache_bytes = {CACHE_BYTES}\n"
        keys += f'load_files = "{self.loaded}"\nload_files_bytes_max = {LOADED_BYTES_MAX}\n'
        self.start_role("frontend", "frontend", keys, log=layout.log, files_max=layout.files_max)

    def start_backend(self, index, name=None, offer=None, scheduler=None):
        """One of the layout's backends, or one with an offer of its own. It ends with the process that starts it."""
        gpus, models = offer or self.layout.backends[index]
        is_away = self.layout.cut_off and index == len(self.layout.backends) - 1
        address = self.at(32 + index, 4791)
        placement = ", ".join(f"{model} = {list(range(gpus))}" for model in models)
        keys = f'scheduler = "{scheduler or self.at(1, 7400)}"\naddress = "{address}"\n'
        keys += f'repository = "{REPOSITORY}"\ngpus = {gpus}\nplacement = {{ {placement} }}\n'
        keys += f'load_files = "{self.loaded}"\n'
        name = name or f"backend-{index}"
        return self.start_role("backend", name, keys, namespace=self.namespace if is_away else None)

    def start_role(self, role, name, keys, log=None, files_max=None, namespace=None):
        file = self.folder / f"{name}.toml"
        file.write_text(f'secret = "{self.secret}"\n{keys}')
        path = self.folder / f"{name}.log" if log is None else None
        command = [self.binary, role, "--supervised-by", str(os.getpid()), "--config", str(file)]
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]

        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))

        stderr = subprocess.PIPE if log == "unread" else open(path or log, "wb")
        environment = {key: value for key, value in os.environ.items() if key != "RUST_LOG"}
        # Any escape in a log is somebody's.
        environment["NO_COLOR"] = "1"
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            preexec_fn=limit if files_max else None,
        )
        self.members[name] = Member(name, process, path)
        return self.members[name]

    @property
    def cable(self):
        return f"attacked{os.getpid() % 100_000}"

    def make_namespace(self):
        """A cable into a network of its own for the last backend, with the addresses of both ends."""
        self.namespace = name = f"downbeat-{os.getpid()}"
        inside, cable = ["ip", "-n", name], self.cable
        for command in (
            ["ip", "netns", "add", name],
            ["ip", "link", "add", cable, "type", "veth", "peer", "name", "inside", "netns", name],
            ["ip", "address", "add", "10.66.0.1/24", "dev", cable],
            ["ip", "address", "add", "10.66.0.2/32", "dev", cable],
            ["ip", "address", "add", "10.66.0.32/32", "dev", cable],
            ["ip", "link", "set", cable, "up"],
            [*inside, "address", "add", "10.66.0.33/24", "dev", "inside"],
            [*inside, "link", "set", "inside", "up"],
            [*inside, "link", "set", "lo", "up"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}", file=sys.stderr)
                raise Unsupported("network namespaces")

    def cut(self):
        """From now on the last backend's packets to the frontend are lost."""
        command = ["ip", "-n", self.namespace, "route", "add", "blackhole", f"{self.network}.2/32"]
        subprocess.run(command, check=True)

    def wait_until_ready(self):
        deadline = time.monotonic() + READY_S
        missing = [model for _, models in self.layout.backends for model in models]
        while missing:
            dead = [member for member in self.members.values() if not member.is_alive()]
            if dead:
                raise Failed(f"{dead[0].name} ended: {dead[0].log_text()[-400:]}")
            if time.monotonic() > deadline:
                raise Failed(f"{missing[0]} is not ready after {READY_S} s; logs are in {self.folder}")
            missing = [model for model in missing if not self.is_model_ready(model)]
            time.sleep(0.05)
        if not self.is_healthy(deadline):
            raise Failed(f"digits is not served; logs are in {self.folder}")

    def wait_for_log(self, name, text, seconds=READY_S):
        deadline = time.monotonic() + seconds
        while text not in self.members[name].log_text():
            if time.monotonic() > deadline or not self.members[name].is_alive():
                raise Failed(f"{name} has not said '{text.strip()}': {self.members[name].log_text()[-400:]}")
            time.sleep(0.02)

    def is_model_ready(self, model):
        try:
            return http1.ask(self.http, "GET", f"/v2/models/{model}/ready", source=http1.CONTROL).status == 200
        except OSError:
            return False

    def is_healthy(self, deadline=None):
        """Whether all members live and three requests in a row are answered, at the latest after two seconds."""
        deadline = deadline or time.monotonic() + 2
        while all(member.is_alive() for member in self.members.values()):
            try:
                if all(http1.ask(self.http, *seven(), source=http1.CONTROL, timeout=1).status == 200 for _ in range(3)):
                    return True
            except OSError:
                pass
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return False

    def mark(self):
        for member in self.members.values():
            member.mark()

    def end(self):
        for member in self.members.values():
            if member.is_alive():
                # A stopped one too.
                member.process.send_signal(signal.SIGKILL)
        for member in self.members.values():
            member.process.wait()
        if self.namespace:
            subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)
            subprocess.run(["ip", "link", "delete", self.cable], capture_output=True)


class Unsupported(Exception):
    """This machine does not let us set that up; the text says what it needs."""


_SEVEN = json.loads(Path("models/digits/seven.json").read_text())


def seven(model="digits"):
    """Method, path and body of a request for the picture of a seven."""
    body = json.dumps({"parameters": {"timeout": PATIENCE_US}, **_SEVEN}).encode()
    return "POST", f"/v2/models/{model}/infer", body
