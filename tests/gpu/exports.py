"""Networks of PyTorch's as ONNX files and as models of a repository: modules that have NAME, CONFIG, the names of their
INPUT and OUTPUT, `network` and `inputs`."""

import pathlib

import torch

import bert
import resnet


def network(name):
    """By its module's name."""
    return {"bert": bert, "resnet": resnet}[name]


def export(net, model, inputs, file, is_batched):
    """Writes a file for batches of any size, or only for what these inputs have."""
    axes = {name: {0: "batch"} for name in [net.INPUT, net.OUTPUT]} if is_batched else None
    names = {"input_names": [net.INPUT], "output_names": [net.OUTPUT], "dynamic_axes": axes}
    torch.onnx.export(model, (inputs,), file, dynamo=False, **names)


def repository(folder, net, model, precision):
    """Puts the model into a repository."""
    name = f"{net.NAME}_{precision}"
    version = pathlib.Path(folder, name, "1")
    version.mkdir(parents=True)
    version.with_name("config.pbtxt").write_text(net.CONFIG.format(precision=precision))
    export(net, model, net.inputs(2), version / "model.onnx", is_batched=True)
    return name
