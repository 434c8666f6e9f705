"""What stands in for the ResNet50 of the Python backend's example `preprocessing`, whose weights come from another host
and whose engine from TensorRT: the same network, its weights drawn.

    resnet50.py export FILE     writes it as ONNX
    resnet50.py judge PICTURE   runs the example's client on a picture; ends with 0 if it prints what torch says
"""

import subprocess
import sys

import torch
from PIL import Image
from torchvision import models, transforms

STATES = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def network():
    torch.manual_seed(1)
    return models.resnet50(weights=None).eval()


def export(file):
    axes = {"input": {0: "batch_size", 2: "height", 3: "width"}, "output": {0: "batch_size"}}
    torch.onnx.export(
        network(), torch.randn(1, 3, 224, 224), file, input_names=["input"], output_names=["output"],
        dynamic_axes=axes, dynamo=False,
    )


def judge(picture):
    steps = [transforms.Resize([224, 224]), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(*STATES)]
    with torch.no_grad():
        scores = network()(transforms.Compose(steps)(Image.open(picture)).unsqueeze(0))
    with open("model_repository/resnet50_trt/labels.txt") as labels:
        expected = labels.read().splitlines()[int(scores.argmax())].strip()
    told = subprocess.run([sys.executable, "client.py", "--image", picture], stdout=subprocess.PIPE, text=True, check=True).stdout
    print(told, f"torch: {expected}", sep="")
    sys.exit(f"Result is class: {expected}" not in told.splitlines())


{"export": export, "judge": judge}[sys.argv[1]](sys.argv[2])
