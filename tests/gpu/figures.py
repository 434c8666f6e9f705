"""What downbeat promises of a GPU in figures: a case says its goal and what was found, and has failed if it missed."""

import contextlib
import json
import os
import pathlib
import re
import tempfile

from host import HTTP, TOLERANCE, Skipped, cluster, example, has_met, measured, metrics, program, run, timed, torch

DIGITS = "models/digits"
MODEL = "1/model.onnx"
# How long load lasts; less says less.
SECONDS = os.environ.get("LOAD_SECONDS", "10")
# Of the fastest of many copies of pinned memory.
LOAD_SHARE = 0.9
LAUNCH_US = 30
IDLE_US = 50
PREDICTION_US = 100
# How far p99.99 may be above the median, and how many runs it takes to know.
TAIL_SHARE = 0.01
TAIL_RUNS = 20_000
# A batch is no slower than ONNX Runtime's; so much of torch.compile's time is aimed at.
AIM = 1 / 1.3
RUNS = 300


@contextlib.contextmanager
def exported(name):
    """A network of PyTorch's, `resnet` or `bert`, and its folder in a repository of its own, in FP16."""
    torch()
    from exports import network, repository

    net = network(name)
    with tempfile.TemporaryDirectory() as folder:
        model = net.network()
        yield net, model, pathlib.Path(folder, repository(folder, net, model, "fp16"))


def loads():
    """Weights come as fast as the link copies pinned memory, mapping and waiting included."""
    lines = [json.loads(line) for line in example("driver", "loads") if line.startswith('{"load_pages"')]
    found = {line["load_pages"]: (line["load_gb_per_s"], line["copy_gb_per_s"]) for line in lines}
    texts = [f"{pages} pages {load} of {copy} GB/s" for pages, (load, copy) in found.items()]
    is_met = found and all(load >= LOAD_SHARE * copy for load, copy in found.values())
    return has_met(is_met, f"goal {LOAD_SHARE} of a copy's bandwidth, found {', '.join(texts)}")


def launches(file):
    """What the call costs that sets off a batch, and what the host waits beyond the GPU's time."""
    sizes = timed(file, "fp16", [1, 8], 2000)
    texts = [
        f"batch {batch} {size['launch_us']} us (p99 {size['launch_p99_us']}, {size['beside_us']} with waiting)"
        for batch, size in sizes.items()
    ]
    is_met = all(size["launch_us"] < LAUNCH_US for size in sizes.values())
    return has_met(is_met, f"goal below {LAUNCH_US} us, found {', '.join(texts)}")


def launches_of_digits():
    return launches(f"{DIGITS}/{MODEL}")


def launches_of_resnet():
    with exported("resnet") as (_, _, folder):
        return launches(folder / MODEL)


def idle(folder, precision, batch):
    """From the end of a batch to that of the next, less what its graph takes on the GPU: whatever copies of inputs on
    the GPU, launches, and outputs on their way add, while more batches wait than can run."""
    printed = run(program("gaps"), str(folder), SECONDS, str(batch), seconds=300).strip().splitlines()[-1]
    found = re.fullmatch(r"batches .*: (\d+) ran, (\d+) missed; .* p50 (\S+), .*; from end to end: p50 (\S+)", printed)
    assert found and int(found[1]) > 20, f"expected batches, found {printed}"
    size = timed(pathlib.Path(folder, MODEL), precision, [batch], RUNS)[batch]
    idle_us = float(found[4]) - size["median_us"]
    text = f"{idle_us:.1f} us, of which {found[3]} between a batch's stamps, with {found[1]} batches of {batch}"
    return has_met(idle_us < IDLE_US, f"goal below {IDLE_US} us, found {text} that take {size['median_us']} us")


def idle_of_digits():
    return idle(DIGITS, "tf32", 8)


def idle_of_bert():
    with exported("bert") as (_, _, folder):
        return idle(folder, "fp16", 8)


def prediction(repository, name, rate):
    """How long executions took beside what the scheduler had planned them to."""
    with cluster(repository, f'models = ["{name}"]\n'):
        load = ["--model", f"{name}:{rate}", "--seconds", SECONDS, "--slo-ms", "1000", "--json"]
        report = json.loads(run("./downbeat", "bench", "load", "--url", f"http://{HTTP}", *load))
        found = metrics(HTTP)
    [model] = report["models"]
    actions = found['downbeat_predicted_actions_total{action="infer"}']

    def p99_of(of, side):
        """Of those that were off, as Prometheus's histogram_quantile has it."""
        labels = f'{{action="infer",of="{of}",side="{side}"'
        prefix = f"downbeat_prediction_error_seconds_bucket{labels},le=\""
        buckets = sorted((float(name[len(prefix) : -2]), count) for name, count in found.items() if name.startswith(prefix))
        rank, before = 0.99 * buckets[-1][1], (0.0, 0.0)
        for bound, count in buckets[:-1]:
            if count >= rank > 0:
                return 1e6 * (before[0] + (bound - before[0]) * (rank - before[1]) / (count - before[1]))
            before = (bound, count)
        return 1e6 * before[0] if rank else 0.0

    def p99(of):
        return max(p99_of(of, side) for side in ["over", "under"])

    text = f"{p99('duration'):.0f} us in {actions:.0f} batches (of their ends {p99('completion'):.0f} us)"
    served = f"{model['served_rps']:.0f} requests/s served and {model['errors']} errors"
    is_met = actions > 0 and model["errors"] == 0 and p99("duration") < PREDICTION_US
    return has_met(is_met, f"goal p99 below {PREDICTION_US} us, found {text}, {served}")


def prediction_of_digits():
    return prediction("models", "digits", 1000)


def prediction_of_resnet():
    with exported("resnet") as (_, _, folder):
        return prediction(folder.parent, folder.name, 200)


def tail():
    """A batch takes as long as any other of its size."""
    with exported("resnet") as (_, _, folder):
        size = timed(folder / MODEL, "fp16", [1], TAIL_RUNS)[1]
    above = size["p9999_us"] / size["median_us"] - 1
    text = f"{above:.2%}: {size['p9999_us']} us above {size['median_us']} us in {TAIL_RUNS} runs"
    return has_met(above <= TAIL_SHARE, f"goal p99.99 within {TAIL_SHARE:.0%} of the median, found {text}")


def bert_values():
    """A batch of eight in each precision, as the example `model` compares it with what PyTorch makes of it in FP64."""
    t = torch()
    with exported("bert") as (net, model, folder):
        inputs = net.inputs(8)
        with t.no_grad():
            expected = model.double()(inputs).float()
        for name, tensor in [("inputs", inputs), ("outputs", expected)]:
            (folder / name).write_bytes(tensor.numpy().tobytes())
        files = ["--inputs", str(folder / "inputs"), "--outputs", str(folder / "outputs")]
        errors = {}
        for precision in TOLERANCE:
            lines = measured(folder / MODEL, precision, "--batches", "8", "--runs", "10", *files)
            [errors[precision]] = [line["worst_error"] for line in lines if "worst_error" in line]
    text = ", ".join(f"{precision} {error:.1e}" for precision, error in errors.items())
    is_met = all(error <= TOLERANCE[precision] for precision, error in errors.items())
    return has_met(is_met, f"goal {TOLERANCE}, found {text} of the largest value of PyTorch's in FP64")


def speed(name, batches):
    """Batches as graphs of ours beside what others make of the same network in FP16; l(b) has copies, too."""
    with exported(name) as (net, model, folder):
        import peers

        profile = ["profile", "--model", str(folder), "--executor", "cuda", "--json"]
        report = json.loads(run("./downbeat", *profile, seconds=600))
        graphs = timed(folder / MODEL, "fp16", batches, RUNS)
        theirs = peers.of(net, model, batches)
    planned = {size["batch"]: size["median_ms"] for size in report["sizes"]}
    texts, is_met = [], True
    for batch in batches:
        own = graphs[batch]["median_us"] / 1e3
        whole = own + graphs[batch]["beside_us"] / 1e3
        reference = theirs[batch][peers.ONNX_RUNTIME]
        if isinstance(reference, str):
            raise Skipped(f"needs onnxruntime-gpu: {reference}")
        is_met &= whole <= reference
        others = ", ".join(peers.beside(own, whole, peer, found) for peer, found in theirs[batch].items())
        texts.append(f"batch {batch} {own:.3f} ms (l(b) = {planned[batch]:.3f} ms), {others}")
    goal = f"goal 1 of {peers.ONNX_RUNTIME} (aim {AIM:.2f} of torch.compile)"
    return has_met(is_met, f"{goal}, found {'; '.join(texts)}")


def resnet_speed():
    return speed("resnet", [1, 8, 32, 64])


def bert_speed():
    return speed("bert", [8])
