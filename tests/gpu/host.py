"""What all cases of tests/gpu/run use: programs that run on this host, clusters, and libraries that it may lack."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
import urllib.request

HTTP = os.environ.get("HTTP", "127.0.0.1:18400")
METRICS = os.environ.get("METRICS", "127.0.0.1:18401")
READY_SECONDS = 300
# Of the largest value, whatever the model.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2}


class Skipped(Exception):
    """A case that this host cannot run."""


def set_environment(gpu):
    """For all that runs here this GPU is number 0, and libraries that came by pip are found."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    # A host's proxy knows nothing of what listens here.
    for name in ["no_proxy", "NO_PROXY"]:
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    folders = nvidia_folders()
    if folders and not os.environ.get("LD_LIBRARY_PATH"):
        os.environ["LD_LIBRARY_PATH"] = ":".join(folders)


def nvidia_folders():
    """Where pip has put NVIDIA's libraries, as it does for PyTorch, too."""
    found = importlib.util.find_spec("nvidia")
    places = found.submodule_search_locations if found else []
    return sorted({str(file.parent) for place in places for file in pathlib.Path(place).rglob("lib*.so.*")})


def run(*command, seconds=300, check=True):
    """What a command prints; its exit code is 0, or the case has failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout


def find_gpu():
    """Skips a case where there is none."""
    try:
        listed = run("nvidia-smi", "-L")
    except (FileNotFoundError, AssertionError) as error:
        raise Skipped(f"needs an NVIDIA GPU: {error}") from error
    if "GPU " not in listed:
        raise Skipped(f"needs an NVIDIA GPU: {listed.strip()}")


def torch():
    """PyTorch with a GPU, and what it exports models with."""
    try:
        import torch as found
    except ImportError as error:
        raise Skipped("needs PyTorch") from error
    if not found.cuda.is_available():
        raise Skipped("needs a PyTorch that sees the GPU")
    if importlib.util.find_spec("onnx") is None:
        raise Skipped("needs onnx, with which PyTorch exports models")
    return found


def has_met(goal, text):
    """What was found; the case has failed if that misses its goal."""
    assert goal, text
    return text


def program(name):
    """An example that was carried here."""
    path = pathlib.Path("examples", name)
    if not path.exists():
        raise Skipped(f"needs {path}")
    return str(path)


def example(name, *parts):
    """Examples say themselves what passed, and at the end that they have come there."""
    command = [program(name), *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    lines = done.stdout.splitlines()
    cases = [line for line in lines if re.match(r"(passed|failed) ", line)]
    for line in lines:
        if line.startswith(("failed ", "{")):
            print(f"  {line}")
    failed = [line for line in cases if line.startswith("failed")]
    assert not failed, f"{len(failed)} of {len(cases)} failed"
    last = (done.stderr.strip() or done.stdout.strip() or "it said nothing")[-600:]
    has_ended = done.returncode == 0 and lines[-1:] == ["0 failed"]
    assert has_ended and cases, f"{name} ended with {done.returncode} after {len(cases)} cases: {last}"
    return lines


def measured(file, precision, *arguments, seconds=900):
    """What the example `model` prints of a file."""
    command = [program("model"), str(file), "--precision", precision, *arguments]
    return [json.loads(line) for line in run(*command, seconds=seconds).splitlines()]


def timed(file, precision, batches, runs):
    """Of these, the times of each batch size."""
    sizes = ",".join(map(str, batches))
    lines = measured(file, precision, "--batches", sizes, "--runs", str(runs))
    return {line["batch"]: line for line in lines if "median_us" in line}


def onnxruntime_gpu():
    """ONNX Runtime's library, built with CUDA."""
    found = importlib.util.find_spec("onnxruntime")
    for place in found.submodule_search_locations if found else []:
        capi = pathlib.Path(place, "capi")
        if (capi / "libonnxruntime_providers_cuda.so").exists():
            return str(sorted(capi.glob("libonnxruntime.so.1.*"))[-1])
    raise Skipped("needs onnxruntime-gpu")


@contextlib.contextmanager
def cluster(repository, backend, executor="cuda"):
    """A cluster that serves a repository with these keys of its backend."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config, tempfile.TemporaryFile("w+") as log:
        config.write(f'repository = "{repository}"\nhttp = ["{HTTP}"]\ngrpc = []\n[[backend]]\ngpus = 1\n')
        config.write(f'executor = "{executor}"\n{backend}')
        config.flush()
        process = subprocess.Popen(["./downbeat", "up", "--config", config.name], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while "\nready:" not in said(log):
                assert process.poll() is None and time.monotonic() < deadline, f"not ready: {said(log)[-800:]}"
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(60)


def said(log):
    log.seek(0)
    return "\n" + log.read()


def metrics(address):
    """What somebody tells Prometheus, by name with labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^([^# ]+) (\S+)$", text, re.MULTILINE)}
