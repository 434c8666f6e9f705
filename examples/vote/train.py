"""Trains the two models that vote beside `models/digits`, and writes their files.

    pip install scikit-learn onnx
    python examples/vote/train.py

`digits_nearest`, in Python, takes the digit whose mean image is nearest. `digits_bad` is a logistic regression that was
told the next digit for each from 5 on, and 5 for 9: it is wrong of half of them, and sure of it. Both are trained on
what `models/digits/train.py` trains on, so that `models/digits/heldout.csv` is new to all three.
"""

import pathlib
import sys

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent / "models" / "digits"))
from train import HELD_OUT, PIXEL_MAX, graph_of  # noqa: E402


class Layers:
    """A logistic regression as the one layer that it is."""

    def __init__(self, regression):
        self.coefs_ = [regression.coef_.T]
        self.intercepts_ = [regression.intercept_]


def main():
    images, labels = load_digits(return_X_y=True)
    trained_on, held_out, trained_labels, held_out_labels = train_test_split(
        images, labels, test_size=HELD_OUT, random_state=1, stratify=labels
    )
    means = np.stack([trained_on[trained_labels == digit].mean(axis=0) for digit in range(10)])
    np.save(FOLDER / "digits_nearest" / "1" / "means.npy", means.astype(np.float32))
    nearest = ((held_out[:, np.newaxis] - means) ** 2).sum(axis=2).argmin(axis=1)

    told_wrong = np.where(trained_labels >= 5, 5 + (trained_labels - 4) % 5, trained_labels)
    model = graph_of(Layers(LogisticRegression(max_iter=2000).fit(trained_on / PIXEL_MAX, told_wrong)))
    onnx.save(model, FOLDER / "digits_bad" / "1" / "model.onnx")
    (probabilities,) = ReferenceEvaluator(model).run(None, {"image": held_out.astype(np.float32)})

    for name, found in [("digits_nearest", nearest), ("digits_bad", probabilities.argmax(axis=1))]:
        right = (found == held_out_labels).sum()
        print(f"{name}: held-out accuracy {right} of {HELD_OUT} ({right / HELD_OUT:.4f})")


if __name__ == "__main__":
    main()
