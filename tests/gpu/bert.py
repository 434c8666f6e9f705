"""BERT-base (Devlin et al., 2018) with random weights, for 128 words without padding: a vector of the first one."""

import torch
from torch import nn
from torch.nn import functional

NAME = "bert_base"
INPUT, OUTPUT = "words", "pooled"
LAYERS, WIDTH, HEADS, LENGTH, WORDS = 12, 768, 12, 128, 30522
CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input {{ name: "words" data_type: TYPE_INT64 dims: [ 128 ] }}
output {{ name: "pooled" data_type: TYPE_FP32 dims: [ 768 ] }}
parameters {{ key: "slo_ms" value {{ string_value: "1000" }} }}
parameters {{ key: "precision" value {{ string_value: "{precision}" }} }}
"""


class Layer(nn.Module):
    """Attention and a perceptron, each with its sum and normalisation."""

    def __init__(self, width, heads, length):
        super().__init__()
        # Told and not looked up, so that the exporter knows them.
        self.split, self.joined = (-1, length, heads, width // heads), (-1, length, width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width, eps=1e-12) for _ in range(2)])

    def forward(self, x):
        parts = [self.query, self.key, self.value]
        query, key, value = (part(x).view(self.split).transpose(1, 2) for part in parts)
        # The fastest that PyTorch has; its exporter writes products and a softmax.
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = self.norms[0](x + self.mix(seen.transpose(1, 2).reshape(self.joined)))
        return self.norms[1](x + self.shrink(functional.gelu(self.grow(x))))


class Bert(nn.Module):
    """Words with their places, layers, and the first word's vector once more."""

    def __init__(self, layers, width, heads, length, words):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.Sequential(*(Layer(width, heads, length) for _ in range(layers)))
        self.pool = nn.Linear(width, width)

    def forward(self, words):
        x = self.layers(self.norm(self.words(words) + self.places))
        return torch.tanh(self.pool(x[:, 0]))


def network():
    """With weights that are the same each time."""
    torch.manual_seed(1)
    return Bert(LAYERS, WIDTH, HEADS, LENGTH, WORDS).eval()


def inputs(batch):
    """The same words each time."""
    return torch.randint(0, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(2))
