"""tritonclient[http] against a running cluster: every image it sends comes back as the model's own answer."""

import csv
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1])
# Microseconds: the objective of requests whose answers are judged, not their lateness.
PATIENT = 2_000_000


def infer(image, binary, name="digits", tensor="image", **options):
    tensor = triton.InferInput(tensor, image.shape, "FP32")
    tensor.set_data_from_numpy(image, binary_data=binary)
    output = triton.InferRequestedOutput("probabilities", binary_data=binary)
    return client.infer(name, [tensor], outputs=[output], **{"timeout": PATIENT, **options})


def refused(what, expected, call):
    try:
        call()
    except InferenceServerException as error:
        assert expected in str(error), f"{what}: {error}"
    else:
        raise AssertionError(f"{what} was not refused")


assert client.is_server_live() and client.is_server_ready()
assert client.is_model_ready("digits") and client.is_model_ready("digits", "1")
assert not client.is_model_ready("nothing")
metadata = client.get_model_metadata("digits")
assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 64]}], metadata
print("tritonclient: server and model metadata")

with open("models/digits/heldout.csv") as file:
    rows = [[int(cell) for cell in row] for row in csv.reader(file)][:60]
labels = [row[0] for row in rows]
images = np.array([row[1:] for row in rows], dtype=np.float32)

single = [infer(image[None, :], binary=True).as_numpy("probabilities")[0] for image in images]
right = sum(int(scores.argmax()) == label for scores, label in zip(single, labels))
assert right >= 55, f"only {right} of {len(labels)} classified right"
print(f"tritonclient: {right} of {len(labels)} images classified right, one request each")

batch = infer(images[:16], binary=True, request_id="sixteen")
assert batch.get_response()["id"] == "sixteen"
np.testing.assert_allclose(batch.as_numpy("probabilities"), np.array(single[:16]), atol=1e-5)
as_json = infer(images[:4], binary=False).as_numpy("probabilities")
np.testing.assert_allclose(as_json, np.array(single[:4]), atol=1e-5)
unnamed = triton.InferInput("image", [1, 64], "FP32")
unnamed.set_data_from_numpy(images[:1])
np.testing.assert_allclose(client.infer("digits", [unnamed], timeout=PATIENT).as_numpy("probabilities")[0], single[0], atol=1e-5)
print("tritonclient: batched, JSON and unnamed outputs agree")

refused("an unknown model", "nothing", lambda: infer(images[:1], True, name="nothing"))
refused("an unknown tensor", "wrong", lambda: infer(images[:1], True, tensor="wrong"))
refused("a wrong shape", "64", lambda: infer(images[:1, :63], True))
refused("an impossible objective", "timeout", lambda: infer(images[:1], True, timeout=1))
assert infer(images[:1], True, timeout=500_000).as_numpy("probabilities").shape == (1, 10)
print("tritonclient: bad requests are refused with the reason, and the connection goes on")
