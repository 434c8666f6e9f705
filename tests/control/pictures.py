"""Pictures of digits that are to be asked about, and what the right answer is."""

import csv
import json
import math
from pathlib import Path

import http1

HELD_OUT = Path("models/digits/heldout.csv")
# Of all, in which order they are asked.
COUNT = 100
# The model reads at least so many of them right, or something else answers.
RIGHT_MIN = 90
# Control requests have until then; the model's own objective is one of 20 ms, which a busy machine may miss.
PATIENCE_US = 2_000_000


class Picture:
    """One of them. What it is answered at first is right from then on: numbers that no other picture gets."""

    def __init__(self, label, pixels):
        self.label, self.answer = label, None
        tensor = {"name": "image", "shape": [1, len(pixels)], "datatype": "FP32", "data": pixels}
        body = json.dumps({"parameters": {"timeout": PATIENCE_US}, "inputs": [tensor]}).encode()
        self.request = http1.request("POST", "/v2/models/digits/infer", body)

    def judge(self, status, body):
        """Why this is not the answer; `None` if it is."""
        if status != 200:
            return str(status)
        scores = json.loads(body)["outputs"][0]["data"]
        if self.answer is None:
            self.answer = scores
        # A batch of another size may round otherwise.
        close = (math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-12) for a, b in zip(scores, self.answer, strict=True))
        return None if all(close) else "wrong answer"

    def is_read_right(self):
        return max(range(len(self.answer)), key=self.answer.__getitem__) == self.label


def pictures():
    with open(HELD_OUT) as lines:
        rows = [[int(cell) for cell in row] for row in csv.reader(lines)]
    return [Picture(label, pixels) for label, *pixels in rows[:COUNT]]
