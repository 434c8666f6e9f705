"""The cases of tests/gpu/run, on the host that has the GPUs: beside this file lie the binary, examples and models.

python3 cases.py [GPU [PART OF A NAME..]]
"""

import json
import os
import pathlib
import re
import sys
import tempfile
import time
import traceback
import urllib.request

import figures
from host import (
    HTTP,
    METRICS,
    TOLERANCE,
    Skipped,
    cluster,
    example,
    find_gpu,
    measured,
    metrics,
    onnxruntime_gpu,
    run,
    set_environment,
    torch,
)


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
    with cluster("models", f'models = ["digits"]\nadmin = {{ http = "{METRICS}" }}\n'):
        # It is read when it is opened, and once a second from then on.
        time.sleep(3)
        found = metrics(METRICS)
    [uuid] = {match[1] for match in map(re.compile('gpu_uuid="([^"]+)"').search, found) if match}
    if uuid.startswith("MIG-"):
        raise Skipped("needs a whole GPU: nvidia-smi does not tell this of an instance")
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


def passed(name):
    """How many cases of an example did."""
    return f"{sum(line.startswith('passed ') for line in example(name))} cases"


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


def ask(model, tensor, shape, data):
    """One request with one FP32 tensor; all numbers of the first output."""
    body = {"inputs": [{"name": tensor, "datatype": "FP32", "shape": shape, "data": data}]}
    request = urllib.request.Request(f"http://{HTTP}/v2/models/{model}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["outputs"][0]["data"]


def infer(name, rows):
    """One request; the scores of each row."""
    scores = ask(name, "image", [len(rows), 3, 224, 224], [value for row in rows for value in row])
    return [scores[at : at + 1000] for at in range(0, len(scores), 1000)]


def furthest(found, expected):
    """The largest difference, relative to the largest value."""
    largest = max(abs(value) for row in expected for value in row)
    return max(abs(a - b) for one, other in zip(found, expected) for a, b in zip(one, other)) / largest


def repositories():
    """ResNet50 in each precision, and what PyTorch makes of some images in FP64."""
    t = torch()
    import resnet
    from exports import repository

    model = resnet.network()
    folder = tempfile.TemporaryDirectory()
    names = {precision: repository(folder.name, resnet, model, precision) for precision in TOLERANCE}
    images = resnet.inputs(3)
    with t.no_grad():
        expected = model.double()(images.double()).tolist()
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
        # The scheduler tells frontends once a second.
        time.sleep(3)
        loads = metrics(HTTP).get("downbeat_weights_loads_total")
    assert loads and loads >= 8, f"found {loads} loads, expected one for almost each turn"
    return f"{loads:.0f} loads"


def provider():
    """ONNX Runtime runs a network on the GPU, and the backend gives it batches."""
    library = onnxruntime_gpu()
    folder, names, images, expected = repositories()
    name = names["tf32"]
    keys = f'models = ["{name}"]\n[backend.onnxruntime]\nlibrary = "{library}"\nprovider = "cuda"\n'
    with folder, cluster(folder.name, keys, executor="onnxruntime"):
        error = furthest(infer(name, images), expected)
    assert error <= TOLERANCE["tf32"], f"too far from PyTorch in FP64: {error:.1e}"
    return f"{error:.1e}"


PROGRAM = """
import downbeat
import torch


class Scaled(downbeat.Model):
    def load(self, context):
        self.weights = torch.arange(16.0, device="cuda")

    def predict(self, batch):
        values = torch.from_numpy(batch["values"]).cuda()
        return {"scaled": (values * self.weights).cpu().numpy()}
"""
PROGRAM_CONFIG = f"""
backend: "python"
max_batch_size: 8
input {{ name: "values" data_type: TYPE_FP32 dims: 16 }}
output {{ name: "scaled" data_type: TYPE_FP32 dims: 16 }}
parameters {{ key: "python" value {{ string_value: "{sys.executable}" }} }}
"""


def torch_program():
    """A model in Python that computes on the GPU with PyTorch, within the limits that programs have by default."""
    torch()
    values = [float(value) for value in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        version = pathlib.Path(folder, "scaled", "1")
        version.mkdir(parents=True)
        (version / "model.py").write_text(PROGRAM)
        version.with_name("config.pbtxt").write_text(PROGRAM_CONFIG)
        with cluster(folder, 'models = ["scaled"]\n', executor="auto"):
            found = ask("scaled", "values", [2, 16], values)
    expected = [value * (index % 16) for index, value in enumerate(values)]
    assert found == expected, f"found {found}, expected {expected}"
    return "two rows"


CASES = {
    "doctor": doctor,
    "the driver, call by call": lambda: passed("driver"),
    "conformance": lambda: passed("conformance"),
    "values of digits": digits,
    "demo": demo,
    "health in /metrics": health,
    "values of ResNet50": values,
    "values of BERT": figures.bert_values,
    "weights in pages": paged,
    "ONNX Runtime's CUDA provider": provider,
    "a program with PyTorch": torch_program,
    "loads beside copies": figures.loads,
    "launches of digits": figures.launches_of_digits,
    "launches of ResNet50": figures.launches_of_resnet,
    "idle between batches of digits": figures.idle_of_digits,
    "idle between batches of BERT": figures.idle_of_bert,
    "prediction error of digits": figures.prediction_of_digits,
    "prediction error of ResNet50": figures.prediction_of_resnet,
    "p99.99 of ResNet50": figures.tail,
    "speed of ResNet50": figures.resnet_speed,
    "speed of BERT": figures.bert_speed,
}


def main():
    """Runs every case that is asked for, whatever becomes of the others."""
    os.chdir(pathlib.Path(__file__).parent)
    set_environment(sys.argv[1] if len(sys.argv) > 1 else "0")
    parts = sys.argv[2:]
    has_failed = False
    for name, case in CASES.items():
        if parts and not any(part in name for part in parts):
            continue
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
