"""Models that were written for Triton's Python backend."""

import os
from pathlib import Path

import numpy as np
import pytest
from conftest import tensor

from downbeat import triton

ADD_SUB = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        assert args["model_name"] == "model" and args["model_version"] == "1"
        config = json.loads(args["model_config"])
        self.types = [
            pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        ]

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            outputs = [
                pb_utils.Tensor("OUTPUT1", (a - b).astype(self.types[1])),
                pb_utils.Tensor("OUTPUT0", (a + b).astype(self.types[0])),
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses

    def finalize(self):
        pb_utils.Logger.log_info("the end")
"""
CONFIG = {
    "max_batch_size": 8,
    "input": [{"name": f"INPUT{n}", "data_type": "TYPE_FP32", "dims": [4]} for n in range(2)],
    "output": [{"name": f"OUTPUT{n}", "data_type": "TYPE_FP32", "dims": [4]} for n in range(2)],
}
INPUTS = [tensor(f"INPUT{n}", "FP32", 4) for n in range(2)]
OUTPUTS = [tensor(f"OUTPUT{n}", "FP32", 4) for n in range(2)]


def check_add_sub(backend):
    assert backend.started == {"ready": {"protocol": 2}}
    a, b = np.random.default_rng(1).random((2, 3, 4), dtype=np.float32)
    added, subtracted = backend.run(("FP32", a), ("FP32", b))
    np.testing.assert_array_equal(added, a + b)
    np.testing.assert_array_equal(subtracted, a - b)


def test_add_sub(start, capfd):
    backend = start(ADD_SUB, INPUTS, OUTPUTS, CONFIG)
    check_add_sub(backend)
    assert backend.close() == 0
    assert "the end" in capfd.readouterr().err


@pytest.mark.skipif("TRITON_EXAMPLES" not in os.environ, reason="TRITON_EXAMPLES names no checkout's examples/")
def test_tritons_own_add_sub(start):
    check_add_sub(start((Path(os.environ["TRITON_EXAMPLES"]) / "add_sub/model.py").read_text(), INPUTS, OUTPUTS, CONFIG))


def test_each_task_is_a_request_and_an_error_is_its_own(start):
    text = """
    import numpy as np
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            assert len(requests) == 4
            return [self.answer(request) for request in requests]
        def answer(self, request):
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            assert x.shape == (1, 4)
            if x[0, 0] == 1:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("too long", pb_utils.TritonError.INVALID_ARG))
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x[:, :3] if x[0, 0] == 3 else x)])
    """
    x = np.repeat(np.arange(4, dtype=np.float32), 4).reshape(4, 4)
    answers = start(text, INPUTS[:1], OUTPUTS[:1], CONFIG).run_groups((4, [("FP32", x)]))
    assert [tasks for tasks, _ in answers] == [1, 1, 1, 1]
    np.testing.assert_array_equal(answers[0][1][0], x[:1])
    np.testing.assert_array_equal(answers[2][1][0], x[2:3])
    assert answers[1][1] == "too long"
    assert "output OUTPUT0 has shape [1, 3], expected [1, 4]" in answers[3][1]


def test_bytes_shapes_and_inputs_that_are_left_out(start):
    text = """
    import numpy as np
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]
        def answer(self, request):
            text = pb_utils.get_input_tensor_by_name(request, "text")
            assert text.triton_dtype() == "BYTES" and text.as_numpy().dtype == np.object_
            least = pb_utils.get_input_tensor_by_name(request, "least")
            least = 0 if least is None else least.as_numpy()[0, 0]
            words = [word for word in text.as_numpy()[0, 0].split() if len(word) >= least]
            ids = np.array([[len(word) for word in words]], np.int64)
            return pb_utils.InferenceResponse([pb_utils.Tensor("ids", ids), pb_utils.Tensor("words", np.array([words], object))])
    """
    inputs = [tensor("text", "BYTES", 1), tensor("least", "INT32", 1, optional=True)]
    backend = start(text, inputs, [tensor("words", "BYTES", -1), tensor("ids", "INT64", -1)], CONFIG)
    texts = ("BYTES", np.array([["a small thing"], ["one two"]], object))
    answers = backend.run_groups((2, [texts, None]), (2, [texts, ("INT32", np.array([[4], [3]], np.int32))]))
    words = [outputs[0][0].tolist() for _, outputs in answers]
    # Neighbours of one shape are one answer.
    assert words == [[b"a", b"small", b"thing"], [b"one", b"two"]]
    assert [tasks for tasks, _ in answers] == [1, 3]
    assert answers[1][1][0].tolist() == [[b"one", b"two"], [b"small", b"thing"], [b"one", b"two"]]


def test_a_model_that_raises_fails_its_batch(start):
    text = """
    class TritonPythonModel:
        def execute(self, requests):
            return requests[:-1] if len(requests) > 1 else 1 / 0
    """
    backend = start(text, INPUTS[:1], OUTPUTS[:1], CONFIG)
    assert backend.run(("FP32", np.ones((1, 4), np.float32))) == "ZeroDivisionError: division by zero"
    found = backend.run(("FP32", np.ones((2, 4), np.float32)))
    assert "execute gave 1 responses, expected 2: one for each request" in found


AUTO_COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        said = config.as_dict()
        assert said["name"] == "model" and said["backend"] == "python"
        for name in ("INPUT0", "INPUT1"):
            config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4], "optional": name == "INPUT1"})
        config.add_output({"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config
"""
EMPTY = {"name": "model", "backend": "python", "max_batch_size": 0, "input": [], "output": []}


def test_a_configuration_is_completed(start):
    backend = start(AUTO_COMPLETE, None, [], EMPTY)
    assert backend.close() == 0
    assert backend.started == {
        "config": {
            "max_batch_size": 8,
            "input": [
                {"name": f"INPUT{n}", "data_type": "TYPE_FP32", "dims": [4], "optional": n == 1} for n in range(2)
            ],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
            "dynamic_batching": {},
        }
    }


def test_what_was_written_is_kept(start):
    def refused(text, **written):
        backend = start(text, None, [], {**EMPTY, **written})
        assert backend.close() == 1
        return backend.started["refused"]

    written = {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": []}
    found = start(AUTO_COMPLETE, None, [], {**EMPTY, "input": [written]}).started["config"]["input"]
    assert found[0] == {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]} and len(found) == 2
    assert "max_batch_size: found 8, expected at least 9" in refused(AUTO_COMPLETE, max_batch_size=9)
    other = {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [4]}
    assert "data_type: found TYPE_FP32, expected TYPE_INT32" in refused(AUTO_COMPLETE, input=[other])
    assert "found no TritonPythonModel.auto_complete_config" in refused("class TritonPythonModel: pass")
    assert "auto_complete_config gave NoneType" in refused(AUTO_COMPLETE.replace("return config", "return None"))
    assert "expected dims too" in refused(AUTO_COMPLETE.replace('"dims": [-1]', '"optional": False'))
    assert "expected no shape" in refused(AUTO_COMPLETE.replace('"dims": [-1]', '"dims": [1], "shape": []'))
    assert "the Python package nothing_there is missing" in refused("import nothing_there")


def test_decoupled_responses_are_refused_by_name(start):
    sender = """
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender()
    """
    found = start(sender, INPUTS[:1], OUTPUTS[:1], CONFIG).run(("FP32", np.ones((1, 4), np.float32)))
    assert "get_response_sender" in found and "decoupled" in found
    policy = {**CONFIG, "model_transaction_policy": {"decoupled": True}}
    assert "model_transaction_policy.decoupled" in start(ADD_SUB, INPUTS, OUTPUTS, policy).started["refused"]


def test_what_there_is_not_says_so(start):
    text = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.PreferredMemory(0)
    """
    assert "triton_python_backend_utils.PreferredMemory" in start(text, INPUTS, OUTPUTS, CONFIG).started["refused"]


def test_arguments_are_refused_as_triton_refuses_them():
    array = np.zeros(2, np.int32)
    one = triton.Tensor("x", array)
    for wrong in (
        lambda: triton.Tensor(None, array),
        lambda: triton.Tensor("", array),
        lambda: triton.Tensor("x", None),
        lambda: triton.InferenceRequest("m", [], None),
        lambda: triton.InferenceRequest(None, [], [one]),
        lambda: triton.InferenceRequest("m", None, [one]),
        lambda: triton.InferenceRequest("m", [None], [one]),
        lambda: triton.InferenceRequest("m", [], [one], request_id=None),
        lambda: triton.InferenceRequest("m", [], [one], correlation_id=None),
        lambda: triton.InferenceRequest("m", [], [one], model_version=None),
        lambda: triton.InferenceRequest("m", [], [one], flags=None),
        lambda: triton.InferenceResponse(None),
        lambda: triton.Logger.log("a line", None),
        lambda: triton.Logger.log("a line", 1),
        lambda: triton.Logger.log_error(None),
    ):
        with pytest.raises(TypeError):
            wrong()
    for wrong in (
        lambda: triton.Tensor.from_dlpack("x", None),
        lambda: triton.Tensor.from_dlpack("", array),
        lambda: triton.InferenceRequest("m", [], [None]),
        lambda: triton.InferenceResponse([None]),
    ):
        with pytest.raises(triton.TritonModelException):
            wrong()
    request = triton.InferenceRequest("m", ["y"], [one], correlation_id="five", model_version=2, flags=1)
    assert (request.correlation_id(), request.model_version(), request.flags()) == ("five", 2, 1)
    assert triton.InferenceRequest("m", [], []).correlation_id() == 0
    assert triton.Tensor.from_dlpack("x", array).as_numpy().tolist() == [0, 0]


def test_lines_of_the_log_have_levels(capfd):
    logger = triton.Logger
    for level in (logger.INFO, logger.WARNING, logger.ERROR, logger.VERBOSE, logger.LogLevel.INFO):
        logger.log(f"as {level.name}", level)
    logger.log("as it is")
    assert capfd.readouterr().err.split("\n")[-3:] == ["as INFO", "as it is", ""]


BLS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensors = [pb_utils.Tensor(f"X{n}", tensor.as_numpy()) for n, tensor in enumerate(request.inputs())]
            asked = pb_utils.InferenceRequest(
                model_name=b"other", requested_output_names=["Y"], inputs=tensors, model_version=3, timeout=5000
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            y = pb_utils.get_output_tensor_by_name(answer, "Y").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", y), pb_utils.Tensor("OUTPUT1", -y)]))
        return responses
"""


def test_a_model_asks_another_and_waits(start):
    backend = start(BLS, INPUTS, OUTPUTS, CONFIG)
    asked = []

    def other(call, inputs):
        asked.append(call)
        return {"Y": inputs["X0"] * inputs["X1"]}

    backend.callee = other
    a, b = np.random.default_rng(1).random((2, 3, 4), dtype=np.float32)
    product, negative = backend.run(("FP32", a), ("FP32", b))
    np.testing.assert_array_equal(product, a * b)
    np.testing.assert_array_equal(negative, -(a * b))
    first = {key: asked[0][key] for key in ("model", "version", "outputs", "timeout_us")}
    assert len(asked) == 3 and first == {"model": "other", "version": "3", "outputs": ["Y"], "timeout_us": 5000}
    backend.callee = lambda call, inputs: "it is not there"
    assert "it is not there" in backend.run(("FP32", a), ("FP32", b))
    assert backend.close() == 0


ASYNC = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        def ask(request, model):
            return pb_utils.InferenceRequest(model_name=model, inputs=request.inputs()).async_exec()

        asked = [ask(request, model) for request in requests for model in ("first", "second")]
        left = ask(requests[0], "never")
        left.close()
        answers = await asyncio.gather(*asked)
        responses = []
        for first, second in zip(answers[::2], answers[1::2]):
            outputs = [first.output_tensors()[0].as_numpy(), second.output_tensors()[0].as_numpy()]
            tensors = [pb_utils.Tensor(f"OUTPUT{n}", array) for n, array in enumerate(outputs)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""


def test_calls_are_under_way_together_and_come_in_any_order(start):
    backend = start(ASYNC, INPUTS, OUTPUTS, CONFIG)
    under_way = []

    def other(call, inputs):
        under_way.append((call, inputs))
        if call["model"] != "never":
            return
        # All have begun by now; the last is answered first.
        for call, inputs in reversed(under_way[:-1]):
            backend.answer(call["id"], {"Y": inputs["INPUT0"] * (1 if call["model"] == "first" else 10)})

    backend.callee = other
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    for batch in range(2):
        under_way.clear()
        first, second = backend.run(("FP32", array), ("FP32", array))
        np.testing.assert_array_equal(first, array)
        np.testing.assert_array_equal(second, 10 * array)
        # What nobody waits for any more is answered in the next batch, or before it.
        backend.answer(under_way[-1][0]["id"], {"Y": array})
    assert backend.close() == 0


def test_threads_of_a_model_ask_at_once(start):
    text = """
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.pool = ThreadPoolExecutor(8)
            request = pb_utils.InferenceRequest(model_name="other")
            assert "found no batch that runs" in request.exec().error().message()

        def execute(self, requests):
            def answer(request):
                inputs = [pb_utils.Tensor("X", request.inputs()[0].as_numpy())]
                (y,) = pb_utils.InferenceRequest(model_name="other", inputs=inputs).exec().output_tensors()
                return pb_utils.InferenceResponse([pb_utils.Tensor(f"OUTPUT{n}", y.as_numpy()) for n in range(2)])

            return list(self.pool.map(answer, requests))
    """
    backend = start(text, INPUTS, OUTPUTS, CONFIG)
    assert backend.started == {"ready": {"protocol": 2}}
    backend.callee = lambda call, inputs: {"Y": inputs["X"] + 1}
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    for _ in range(20):
        first, _ = backend.run(("FP32", array), ("FP32", array))
        np.testing.assert_array_equal(first, array + 1)
    assert backend.close() == 0
