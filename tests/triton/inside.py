"""One suite, within namespaces of its own: builds its repository, starts the server, runs the tests, and writes
`results`."""

import contextlib
import fnmatch
import json
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import suites  # noqa: E402

HTTP, METRICS = 8000, 8002
START_SECONDS = 240
# Of one test's process: some of Triton's tests would take all of a small machine's memory.
TEST_BYTES_MAX = 8 << 30


def limit_memory():
    resource.setrlimit(resource.RLIMIT_DATA, (TEST_BYTES_MAX, TEST_BYTES_MAX))


def post(path, body=b"{}"):
    request = urllib.request.Request(f"http://127.0.0.1:{HTTP}{path}", data=body, method="POST")
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read()
    return b""


def is_ready():
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/v2/health/ready", timeout=5) as reply:
            return reply.status == 200
    return False


def refusals():
    """Why models will not be served, however long one waits."""
    with contextlib.suppress(ValueError, TypeError):
        index = json.loads(post("/v2/repository/index") or b"[]")
        return {
            entry["name"]: entry["reason"] for entry in index
            if entry["state"] == "UNAVAILABLE" and entry["reason"] not in ("", "unloaded", "no backend hosts it now")
        }
    return {}


class NoModels(Exception):
    """The server takes none of a suite's models, so none of its tests can pass."""


class Server:
    """What is tested: downbeat, or a real Triton with the same models in its Python backend."""

    def __init__(self, job, suite, models):
        self.job, self.suite, self.models = job, suite, models
        self.out = Path(job["out"])
        self.log = self.out / "server.log"
        self.process = None
        self.pid = None
        # Models that the server does not take, and why.
        self.refused = {}

    def start(self):
        with open(self.log, "a") as log:
            log.write("--- start\n")
        if self.job["reference"]:
            self.start_triton()
        else:
            self.start_downbeat()

    def spawn(self, command, env=None):
        log = open(self.log, "a")
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=self.models.parent)

    def wait_ready(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            if is_ready():
                return True
            time.sleep(0.1)
        self.stop()
        return False

    def start_downbeat(self):
        """Sets aside what it refuses, until it starts."""
        while True:
            names = sorted(path.name for path in self.models.iterdir() if path.is_dir())
            if not names:
                raise NoModels("; ".join(f"{name}: {why}" for name, why in sorted(self.refused.items()))[:300])
            config = self.out / "cluster.toml"
            # Some tests compare the server's name.
            config.write_text(
                f'policy = "{self.suite.policy}"\nserver_name = "triton"\nrepository = {json.dumps(str(self.models))}\n'
                # Triton's metrics have a port of their own.
                f'frontend.admin.http = "127.0.0.1:{METRICS}"\n'
                f"{self.suite.toml}\n[[backend]]\ngpus = 1\n"
            )
            before = self.log.stat().st_size
            command = ["up", "--config", str(config), "--http", f"127.0.0.1:{HTTP}", "--grpc", "127.0.0.1:8001"]
            # Models in Python have numpy from there.
            path = f"{Path(self.job['python']).parent}:{os.environ['PATH']}"
            # .. and one of them looks for its folder below this one.
            own = {"PATH": path, "TRITON_DIR": str(self.models.parents[2])}
            self.spawn([self.job["binary"], *command], {**os.environ, **own})
            if self.wait_ready():
                break
            lines = self.log.read_text()[before:].splitlines()
            said = "\n".join(line for line in lines if line.strip() and not re.search(r"\b(INFO|WARN)\b", line))
            match = re.search(rf"{re.escape(str(self.models))}/([^/:\s]+)[/:]?([^\n]*)", said)
            if match is None or not (self.models / match[1]).exists():
                match = re.search(r"model '?\"?([A-Za-z0-9_.-]+)['\"]?([^\n]*)", said)
            if match is None or not (self.models / match[1]).exists():
                raise RuntimeError(f"does not start: {said.strip().splitlines()[-1:]}")
            self.set_aside(match[1], match[2].strip("/: "))
        text = self.log.read_text()[before:]
        # `up` tells the process of each member; the frontend's is the one that clients talk to.
        member = re.search(r"frontend-0: process (\d+)", text)
        self.pid = int(member[1]) if member else self.process.pid
        self.wait_models(names)
        for name in self.suite.unloaded(names):
            post(f"/v2/repository/models/{name}/unload")

    def wait_models(self, names):
        deadline = time.monotonic() + START_SECONDS
        for name in names:
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    with urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/v2/models/{name}/ready", timeout=5):
                        break
                if self.process.poll() is not None:
                    return
                if why := refusals().get(name):
                    self.refused[name] = why
                    break
                time.sleep(0.1)

    def set_aside(self, name, why):
        folder = self.models / name
        self.refused[name] = why
        aside = self.out / "refused"
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / name, ignore_errors=True)
        shutil.move(folder, aside / name)

    def start_triton(self):
        triton = Path(self.job["reference"])
        for folder in self.models.iterdir():
            suites.as_python(folder, HERE / "twin.py")
        env = dict(os.environ)
        env["LD_LIBRARY_PATH"] = str(triton / "libs")
        env["PATH"] = f"{triton / 'venv' / 'bin'}:/usr/bin:/bin"
        env["VIRTUAL_ENV"] = str(triton / "venv")
        self.spawn([
            str(triton / "bin" / "tritonserver"), "--model-repository", str(self.models),
            "--backend-directory", str(triton / "backends"),
            # What 2.51 allows anyway.
            *(flag for flag in self.suite.triton.split() if flag != "--allow-client-shm=true"),
        ], env)
        if not self.wait_ready():
            raise RuntimeError("Triton does not start")
        self.pid = self.process.pid

    def stop(self):
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def has_died(self):
        return self.process is not None and self.process.poll() is not None


class Run:
    def __init__(self, job):
        self.job = job
        self.suite = next(suite for suite in suites.SUITES if suite.name == job["suite"])
        self.state, self.out = Path(job["state"]), Path(job["out"])
        self.folder = suites.folder_of(self.suite, self.state)
        self.results = open(self.out / "results", "w")
        self.server = None

    def tell(self, test, outcome, why="", text=""):
        print(json.dumps({"test": test, "outcome": outcome, "why": why}), file=self.results, flush=True)
        if text:
            (self.out / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', test)[:100]}.log").write_text(text)

    def build(self):
        """The repository as the suite's test.sh has it. It lies where tests that change it look for it."""
        models = self.folder / "models"
        if models.is_symlink() or models.exists():
            original = self.folder / "models.triton"
            if not original.exists() and not (self.folder / ".built").exists():
                shutil.move(models, original)
            else:
                shutil.rmtree(models)
        (self.folder / ".built").touch()
        models.mkdir()
        self.repository = suites.Repository(self.state, models, self.job["slo_ms"], bool(self.job["reference"]))
        self.repository.build(self.suite.models, self.suite)
        if self.job["reference"]:
            self.repository.build(self.suite.late, self.suite)
        return models

    def restart(self):
        if self.server is not None:
            self.server.stop()
        old = self.server
        self.server = Server(self.job, self.suite, self.build())
        self.server.log.touch()
        self.server.start()
        if not self.job["reference"]:
            self.repository.build(self.suite.late, self.suite)
        if old is None:
            for name, why in sorted(self.server.refused.items()):
                self.tell(f"model {name}", "note", f"refused: {why}")

    def env(self, more):
        return {
            **os.environ, "PYTHONUNBUFFERED": "1", "SERVER_PID": str(self.server.pid if self.server else ""),
            "CUDA_VISIBLE_DEVICES": "", "TRITON_SERVER_CPU_ONLY": "1", "BACKENDS": "onnx", "ENSEMBLES": "0",
            "ONNX_ONLY": "1",
            "TRITON_SERVER_VERSION": self.version(), "PATH": f"{Path(self.job['python']).parent}:{os.environ['PATH']}",
            **({"ANY_WORDS": "1"} if self.job["any_words"] else {}), **self.suite.env, **more,
        }

    def version(self):
        """Tests compare the version that the server tells with the one that this says."""
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/v2", timeout=5) as reply:
                return json.load(reply)["version"]
        return ""

    def wanted(self, test):
        return not self.job["tests"] or any(fnmatch.fnmatch(test, glob) for glob in self.job["tests"])

    def go(self):
        try:
            self.restart()
        except NoModels as refused:
            for step in self.suite.steps:
                for name in step.names(self):
                    self.tell(name, "failed", f"the server refuses its models: {refused}")
            return
        for step in self.suite.steps:
            step.run(self)
            if self.server.has_died():
                self.tell(f"(server after {step.name})", "failed", "the server ended")
                self.restart()
        self.server.stop()

    def tests_of(self, step):
        """Those of a file that are to be run; tells of those that are not applicable."""
        command = [self.job["python"], str(HERE / "cases.py"), str(self.folder / step.file)]
        listed = subprocess.run([*command, "--list"], env=self.env(step.env), capture_output=True, text=True)
        if listed.returncode:
            why = f"cannot be imported: {listed.stderr.strip().splitlines()[-1:]}"
            self.tell(step.file, "failed", why, listed.stderr)
            return command, []
        names = []
        for name in json.loads(listed.stdout):
            if step.tests and not any(fnmatch.fnmatch(name, glob) for glob in step.tests) or not self.wanted(name):
                continue
            reason = suites.reason(step.na, name)
            if reason:
                self.tell(name + step.suffix, "not applicable", reason)
            else:
                names.append(name)
        return command, names

    def unit(self, step):
        """The tests of a file, by `cases.py`, which is started again after one that takes too long."""
        command, names = self.tests_of(step)
        while names:
            batch = names[:1] if self.suite.fresh else names
            done = self.cases(command, batch, step)
            names = names[len(done):]
            if self.server.has_died():
                self.tell(f"(server during {done[-1]})", "failed", "the server ended")
                self.restart()
            elif names and self.suite.fresh:
                self.restart()

    def cases(self, command, names, step):
        """Yields those of the tests that are done with."""
        errors = open(self.out / "stderr.log", "a")
        process = subprocess.Popen(
            [*command, *names], env=self.env(step.env), stdout=subprocess.PIPE, stderr=errors, preexec_fn=limit_memory,
        )
        done, rest = [], b""
        deadline = time.monotonic() + step.seconds
        while len(done) < len(names):
            readable, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
            data = os.read(process.stdout.fileno(), 65536) if readable else b""
            if not data:
                why = "ended its process" if readable else f"took more than {step.seconds} s"
                process.kill()
                process.wait()
                self.tell(names[len(done)] + step.suffix, "failed", why)
                return [*done, names[len(done)]]
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                deadline = time.monotonic() + step.seconds
                if "test" in told:
                    done.append(told["test"])
                    self.tell(told["test"] + step.suffix, told["outcome"], told["why"], told["text"])
                    if self.server.has_died():
                        process.kill()
                        process.wait()
                        return done
        process.wait()
        return done

    def script(self, step):
        if not self.wanted(step.name):
            return
        if step.na:
            self.tell(step.name, "not applicable", step.na)
            return
        if self.suite.fresh and self.server.process is not None:
            self.restart()
        log = self.out / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', step.name)[:100]}.log"
        argv = [part.format(python=self.job["python"], state=self.state, here=HERE, out=self.out) for part in step.argv]
        try:
            ended = subprocess.run(
                argv, cwd=self.folder, env=self.env(step.env), stdout=open(log, "w"), stderr=subprocess.STDOUT,
                timeout=step.seconds, preexec_fn=limit_memory,
            )
        except subprocess.TimeoutExpired:
            self.tell(step.name, "failed", f"took more than {step.seconds} s")
            return
        text = log.read_text(errors="replace")
        says = [f"without '{said}' in what it prints" for said in step.says if said not in text]
        if ended.returncode and step.ok or says:
            lines = [line for line in text.strip().splitlines() if line.strip()]
            telling = [line for line in lines if re.search(r"Error|Exception|error|FAIL|\*\*\*.*\w", line)] or lines
            why = telling[-1][:600] if telling else f"exit {ended.returncode}"
            self.tell(step.name, "failed", "; ".join([why, *says]))
        else:
            self.tell(step.name, "passed" if step.counts else "note")


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", "/dev/shm"], check=True)
    Run(job).go()


main()
