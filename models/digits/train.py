"""Trains the digit classifier that the demo serves, and writes everything this folder holds beside this script.

    pip install scikit-learn onnx
    python models/digits/train.py

Data: scikit-learn's bundled copy of the UCI "Optical Recognition of Handwritten Digits" test set (1797 images of
8 x 8 pixels, each 0 to 16; CC BY 4.0). A quarter is held out, never trained on, and written to heldout.csv.
Seeds are fixed, so a run gives the same weights again up to the rounding of the local BLAS.
"""

import json
import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

FOLDER = pathlib.Path(__file__).resolve().parent
PIXEL_MAX = 16.0
HELD_OUT = 450
HIDDEN = (256, 128)
LABELS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def graph_of(classifier):
    """The classifier as plain ONNX operators with a symbolic batch dimension: scaling, dense layers, softmax."""
    nodes = [helper.make_node("Mul", ["image", "scale"], ["layer0"])]
    weights = [numpy_helper.from_array(np.float32(1 / PIXEL_MAX), "scale")]
    layers = list(zip(classifier.coefs_, classifier.intercepts_))
    for number, (coefficients, intercepts) in enumerate(layers, start=1):
        weights.append(numpy_helper.from_array(coefficients.astype(np.float32), f"weight{number}"))
        weights.append(numpy_helper.from_array(intercepts.astype(np.float32), f"bias{number}"))
        inputs = [f"layer{number - 1}", f"weight{number}", f"bias{number}"]
        last = number == len(layers)
        output = "logits" if last else f"dense{number}"
        nodes.append(helper.make_node("Gemm", inputs, [output]))
        if not last:
            nodes.append(helper.make_node("Relu", [output], [f"layer{number}"]))
    nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 64])
    probabilities = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "digits", [image], [probabilities], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def write_held_out(images, labels):
    """One line an image: its label, then its 64 pixels in rows from the top left."""
    lines = [",".join(str(int(value)) for value in (label, *image)) for image, label in zip(images, labels)]
    (FOLDER / "heldout.csv").write_text("\n".join(lines) + "\n")


def write_sample_request(image):
    """An inference request of the Open Inference Protocol, to be sent with curl."""
    tensor = {"name": "image", "shape": [1, 64], "datatype": "FP32", "data": [int(pixel) for pixel in image]}
    (FOLDER / "seven.json").write_text(json.dumps({"inputs": [tensor]}) + "\n")


def main():
    images, labels = load_digits(return_X_y=True)
    trained_on, held_out, trained_labels, held_out_labels = train_test_split(
        images, labels, test_size=HELD_OUT, random_state=1, stratify=labels
    )
    classifier = MLPClassifier(HIDDEN, alpha=1e-3, max_iter=200, random_state=1)
    classifier.fit(trained_on / PIXEL_MAX, trained_labels)

    model = graph_of(classifier)
    (FOLDER / "1").mkdir(exist_ok=True)
    onnx.save(model, FOLDER / "1" / "model.onnx")
    (FOLDER / "labels.txt").write_text("\n".join(LABELS) + "\n")
    write_held_out(held_out, held_out_labels)

    (probabilities,) = ReferenceEvaluator(model).run(None, {"image": held_out.astype(np.float32)})
    right = probabilities.argmax(axis=1) == held_out_labels
    sevens = np.flatnonzero(right & (held_out_labels == 7))
    write_sample_request(held_out[sevens[probabilities[sevens, 7].argmax()]])
    print(f"held-out accuracy: {right.sum()} of {len(right)} ({right.mean():.4f})")


if __name__ == "__main__":
    main()
