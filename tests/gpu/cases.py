"""The cases of tests/gpu/run, on the host that has the GPUs: beside this file lie the binary, examples and models."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request

HTTP = "127.0.0.1:18400"
METRICS = "127.0.0.1:18401"
# Of the largest value, whatever the model.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2}
READY_SECONDS = 300


class Skipped(Exception):
    """A case that this host cannot run."""


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
        raise Skipped(f"no NVIDIA GPU here: {error}") from error
    if "GPU " not in listed:
        raise Skipped(f"no NVIDIA GPU here: {listed.strip()}")


def torch():
    """PyTorch with a GPU."""
    try:
        import torch as found
    except ImportError as error:
        raise Skipped("needs PyTorch") from error
    if not found.cuda.is_available():
        raise Skipped("needs a PyTorch that sees the GPU")
    return found


def doctor():
    """It names the GPU, and finds all that drives it."""
    report = json.loads(run("./downbeat", "doctor", "--json", check=False))
    findings = {finding["subject"]: finding for finding in report["findings"]}
    assert any(subject.startswith("GPU ") for subject in findings), findings.keys()
    missing = [name for name in ["libcuda", "cuBLASLt", "cuDNN"] if findings[name]["level"] != "ok"]
    assert not missing, "; ".join(findings[name]["found"] for name in missing)
    return findings["GPU 0"]["found"]


def health():
    """What a backend tells of its GPU is what nvidia-smi does."""
    query = ["--query-gpu=uuid,memory.total,enforced.power.limit,clocks.max.sm", "--format=csv,noheader,nounits"]
    listed = [line.split(", ") for line in run("nvidia-smi", *query).strip().splitlines()]
    with cluster("models", f'models = ["digits"]\nmetrics_http = "{METRICS}"\n'):
        # It is read when it is opened, and once a second from then on.
        time.sleep(3)
        with urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
    found = {name: float(value) for name, value in re.findall(r"^([^# ]+) (\S+)$", metrics, re.MULTILINE)}
    [uuid] = {match[1] for match in map(re.compile('gpu_uuid="([^"]+)"').search, found)}
    if uuid.startswith("MIG-"):
        raise Skipped("nvidia-smi does not tell this of an instance")
    [(_, total, limit, clock)] = [line for line in listed if line[0] == uuid]
    for name, expected in [
        (f'nv_gpu_memory_total_bytes{{gpu_uuid="{uuid}"}}', float(total) * 2**20),
        (f'nv_gpu_power_limit{{gpu_uuid="{uuid}"}}', float(limit)),
        (f'downbeat_gpu_clock_max_hertz{{gpu_uuid="{uuid}",clock="sm"}}', float(clock) * 1e6),
    ]:
        assert abs(found[name] - expected) <= expected / 1000, f"{name}: found {found[name]}, expected {expected}"
    age = found[f'downbeat_gpu_readings_age_seconds{{gpu_uuid="{uuid}"}}']
    assert age < 3, f"readings are {age} s old"
    return f"{len(found)} values, {age:.1f} s old"


def example(name):
    """Examples say themselves what passed."""
    printed = run(f"examples/{name}", seconds=900, check=False)
    lines = printed.splitlines()
    cases = [line for line in lines if re.match(r"(passed|failed) ", line)]
    for line in lines:
        if line.startswith(("failed ", "{")):
            print(f"  {line}")
    failed = [line for line in cases if line.startswith("failed")]
    assert cases and not failed, f"{len(failed)} of {len(cases)} failed"
    return f"{len(cases)} cases"


def measured(file, precision, *arguments):
    """What the example `model` prints of a file."""
    return [json.loads(line) for line in run("examples/model", file, "--precision", precision, *arguments).splitlines()]


def digits():
    """A small model in each precision against what its plan means."""
    errors = []
    for precision in TOLERANCE:
        lines = measured("models/digits/1/model.onnx", precision, "--batches", "1,3,64", "--runs", "10", "--check")
        errors += [f"{precision} {line['worst_error']:.1e}" for line in lines if "worst_error" in line]
    return ", ".join(errors)


def demo():
    """Every answer is compared with what the CPU makes of the same image."""
    printed = run("./downbeat", "demo", "--executor", "cuda", "--seconds", "5", seconds=120)
    return printed.strip().splitlines()[-1]


@contextlib.contextmanager
def cluster(repository, backend):
    """A cluster that serves a repository with these keys of its backend."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config, tempfile.TemporaryFile("w+") as log:
        config.write(f'repository = "{repository}"\nhttp = ["{HTTP}"]\ngrpc = []\n[[backend]]\ngpus = 1\n')
        config.write(f'executor = "cuda"\n{backend}')
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


def infer(name, rows):
    """One request; the scores of each row."""
    data = [value for row in rows for value in row]
    body = {"inputs": [{"name": "image", "datatype": "FP32", "shape": [len(rows), 3, 224, 224], "data": data}]}
    request = urllib.request.Request(f"http://{HTTP}/v2/models/{name}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        scores = json.load(answer)["outputs"][0]["data"]
    return [scores[at : at + 1000] for at in range(0, len(scores), 1000)]


def furthest(found, expected):
    """The largest difference, relative to the largest value."""
    largest = max(abs(value) for row in expected for value in row)
    return max(abs(a - b) for one, other in zip(found, expected) for a, b in zip(one, other)) / largest


def repositories():
    """ResNet50 in each precision, and what PyTorch makes of some images in FP64."""
    torch()
    import torch as t

    from resnet import repository, resnet50

    model = resnet50()
    folder = tempfile.TemporaryDirectory()
    names = {precision: repository(folder.name, model, precision) for precision in TOLERANCE}
    images = t.rand(3, 3, 224, 224, generator=t.Generator().manual_seed(2))
    with t.no_grad():
        expected = model.double()(images.double()).tolist()
    model.float()
    return folder, names, images.flatten(1).tolist(), expected


def values():
    """All precisions, batches of one and three."""
    folder, names, images, expected = repositories()
    errors = {}
    with folder, cluster(folder.name, ""):
        for precision, name in names.items():
            found = infer(name, images) + infer(name, images[:1])
            errors[precision] = furthest(found, expected + expected[:1])
    wrong = [precision for precision, error in errors.items() if error > TOLERANCE[precision]]
    text = ", ".join(f"{precision} {error:.1e}" for precision, error in errors.items())
    assert not wrong, f"too far from PyTorch in FP64: {text}"
    return text


def paged():
    """Memory for one model at a time: each request for the other one is a load and an unload."""
    folder, names, images, expected = repositories()
    # ResNet50's weights take 7 pages of 16 MiB in FP32 and 4 in FP16.
    with folder, cluster(folder.name, "gpu_memory_mb = 135\n"):
        for turn in range(10):
            precision = list(names)[turn % len(names)]
            error = furthest(infer(names[precision], images[:1]), expected[:1])
            assert error <= TOLERANCE[precision], f"turn {turn}, {precision}: {error:.1e}"
        with urllib.request.urlopen(f"http://{HTTP}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
    loads = re.search(r"^downbeat_weights_loads_total (\d+)", metrics, re.MULTILINE)
    assert loads and int(loads[1]) >= 8, f"found {loads and loads[1]} loads, expected one for almost each turn"
    return f"{loads[1]} loads"


def speed():
    """l(b) of ResNet50 in FP16, and how its graphs compare with PyTorch's in channels-last FP16."""
    t = torch()
    from resnet import repository, resnet50

    with tempfile.TemporaryDirectory() as folder:
        model = resnet50()
        name = repository(folder, model, "fp16")
        report = json.loads(
            run("./downbeat", "profile", "--model", f"{folder}/{name}", "--executor", "cuda", "--json")
        )
        lines = measured(f"{folder}/{name}/1/model.onnx", "fp16", "--batches", "1,8,32,64", "--runs", "200")
    graphs = {line["batch"]: line["median_us"] / 1000 for line in lines if "median_us" in line}
    ours = {size["batch"]: size["median_ms"] for size in report["sizes"]}
    model = model.cuda().half().to(memory_format=t.channels_last)
    texts = []
    for batch in [1, 8, 32, 64]:
        images = t.rand(batch, 3, 224, 224).cuda().half().to(memory_format=t.channels_last)
        theirs = graph_ms(t, model, images)
        own = f"{graphs[batch]:.2f} ms, with copies l(b) = {ours[batch]:.2f} ms"
        texts.append(f"batch {batch}: {own}, PyTorch {theirs:.2f} ms")
    return "; ".join(texts)


def graph_ms(t, model, images):
    """The median of a captured graph's runs."""
    with t.no_grad():
        for _ in range(3):
            model(images)
        graph = t.cuda.CUDAGraph()
        with t.cuda.graph(graph):
            model(images)
    times = []
    for _ in range(50):
        begin, end = (t.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main():
    """Runs every case, whatever becomes of the others."""
    os.chdir(pathlib.Path(__file__).parent)
    if len(sys.argv) > 1:
        # For all that runs here it is number 0 then.
        os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
    cases = {
        "doctor": doctor,
        "the driver, call by call": lambda: example("driver"),
        "conformance": lambda: example("conformance"),
        "values of digits": digits,
        "demo": demo,
        "health in /metrics": health,
        "values of ResNet50": values,
        "weights in pages": paged,
        "speed of ResNet50": speed,
    }
    has_failed = False
    for name, case in cases.items():
        try:
            find_gpu()
            print(f"passed {name}: {case()}", flush=True)
        except Skipped as reason:
            print(f"skipped {name}: {reason}", flush=True)
        except Exception as error:  # Whatever it is, the next case is run.
            has_failed = True
            print(f"failed {name}: {error or traceback.format_exc()}".replace("\n", " "), flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
