"""ResNet50 (He et al., 2015) with random weights."""

import torch
from torch import nn

NAME = "resnet50"
INPUT, OUTPUT = "image", "scores"
CONFIG = """
backend: "onnxruntime"
max_batch_size: 64
input {{ name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }}
output {{ name: "scores" data_type: TYPE_FP32 dims: [ 1000 ] }}
parameters {{ key: "slo_ms" value {{ string_value: "1000" }} }}
parameters {{ key: "precision" value {{ string_value: "{precision}" }} }}
"""


def convolution(inputs, outputs, kernel, stride=1):
    """With its normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.path = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(),
            convolution(width, width, 3, stride),
            nn.ReLU(),
            convolution(width, 4 * width, 1),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x):
        return torch.relu(self.path(x) + self.shortcut(x))


def network():
    """With weights that are the same each time, whose activations neither vanish nor grow."""
    torch.manual_seed(1)
    layers = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        for block in range(blocks):
            width = 64 << stage
            layers.append(Block(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)).eval()
    for block in model.modules():
        if isinstance(block, Block):
            # The sum of two branches would double the variance in each block.
            nn.init.constant_(block.path[-1][1].weight, 0.5)
    return model


def inputs(batch):
    """The same images each time."""
    return torch.rand(batch, 3, 224, 224, generator=torch.Generator().manual_seed(2))
