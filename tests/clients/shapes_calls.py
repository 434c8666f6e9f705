"""Tensors whose size requests choose, and strings: what tritonclient sends over HTTP or gRPC, beside ONNX Runtime."""

import queue

import numpy as np
import onnxruntime
import tritonclient.utils.shared_memory as shm
from judge import PATIENT, REPOSITORY, expect
from tritonclient.utils import InferenceServerException

LENGTHS = [*range(1, 257, 15), 256]
WORDS = np.array([["", "grün"], ["a,b", "x" * 500]], dtype=np.object_)


def run(triton):
    """All calls over one client."""
    call, client = triton.call, triton.client

    def metadata():
        told = triton.json(client.get_model_metadata, "encoder")
        shapes = [(t["name"], [int(dim) for dim in t["shape"]]) for t in told["inputs"] + told["outputs"]]
        expect(shapes, [("ids", [-1, -1]), ("states", [-1, -1, 16]), ("scores", [-1, 4])])
        expect(triton.json(client.get_model_metadata, "strings")["inputs"][0]["datatype"], "BYTES")

    call("get_model_metadata (any length)", "-1", metadata)
    alone = onnxruntime.InferenceSession(f"{REPOSITORY}/encoder/1/model.onnx", providers=["CPUExecutionProvider"])

    def tensor(ids):
        tensor = triton.library.InferInput("ids", ids.shape, "INT64")
        tensor.set_data_from_numpy(ids)
        return tensor

    def judge(ids, answer):
        for name, expected in zip(["states", "scores"], alone.run(["states", "scores"], {"ids": ids})):
            found = answer.as_numpy(name)
            expect(found.shape, expected.shape)
            np.testing.assert_allclose(found, expected, atol=1e-4)

    random = np.random.default_rng(1)
    ids_of = lambda rows, length: random.integers(0, 50, (rows, length), dtype=np.int64)

    def lengths():
        for length in LENGTHS:
            ids = ids_of(1 + length % 3, length)
            judge(ids, client.infer("encoder", [tensor(ids)], timeout=PATIENT))

    call("infer (lengths 1 to 256)", "each as ONNX Runtime has it", lengths)

    def together():
        requests = [ids_of(1, length) for length in LENGTHS * 4]
        judge_all(triton, requests, tensor, judge)

    call("infer (lengths 1 to 256 at once)", "each as ONNX Runtime has it", together)
    beyond = lambda: client.infer("encoder", [tensor(ids_of(1, 9_000))], timeout=PATIENT)
    call.refused("infer (a length beyond its bound)", "each -1 at most 8192", InferenceServerException, beyond)
    # Its answer would have more bytes than its slot.
    beyond = lambda: client.infer("encoder", [tensor(ids_of(1, 5_000))], timeout=PATIENT)
    call.refused("infer (an answer beyond its bound)", "(max_dims, max_bytes)", InferenceServerException, beyond)

    def echo(words, **options):
        x = triton.library.InferInput("x", words.shape, "BYTES")
        x.set_data_from_numpy(words, **options)
        answer = client.infer("strings", [x], timeout=PATIENT).as_numpy("y")
        expect(np.char.decode(answer.astype(np.bytes_), "utf-8").tolist(), words.astype(str).tolist())

    call("infer (strings)", "as they were sent", lambda: echo(WORDS))
    call("infer (no string)", "none", lambda: echo(WORDS[:, :0]))
    if triton.is_http:
        call("infer (strings in JSON)", "as they were sent", lambda: echo(WORDS, binary_data=False))
    refused = lambda reason, words: call.refused(f"infer (strings: {reason})", reason, InferenceServerException, lambda: echo(words))
    refused("at most 4096 (parameters: max_bytes)", np.array([["x" * 5000]], dtype=np.object_))
    refused("each -1 at most 8", np.array([["x"] * 9], dtype=np.object_))
    call("infer (strings in shared memory)", "as they were sent", lambda: through_memory(triton))


def run_tokens(triton):
    """A model for Triton's Python backend that says itself what it takes and gives."""
    call, client = triton.call, triton.client

    def infer(text, least=None):
        inputs = [triton.library.InferInput("text", [1, 1], "BYTES")]
        inputs[0].set_data_from_numpy(np.array([[text]], dtype=np.object_))
        if least is not None:
            inputs.append(triton.library.InferInput("least", [1, 1], "INT32"))
            inputs[1].set_data_from_numpy(np.array([[least]], dtype=np.int32))
        answer = client.infer("tokens", inputs, timeout=PATIENT)
        words = [word.decode() for word in answer.as_numpy("words")[0]]
        expect(answer.as_numpy("lengths").tolist(), [[len(word) for word in words]])
        return words

    def config():
        told = triton.json(client.get_model_config, "tokens")
        told = told.get("config", told)
        expect([told["backend"], int(told["max_batch_size"])], ["python", 8])
        expect([tensor["name"] for tensor in told["input"] + told["output"]], ["text", "least", "words", "lengths"])

    call("get_model_config (Python, no config.pbtxt)", "what the model says", config)
    call("infer (Python: strings)", "as many words as there are", lambda: expect(infer("a grün  word"), ["a", "grün", "word"]))
    call("infer (Python: no word)", "none", lambda: expect(infer(""), []))
    call("infer (Python: an optional input)", "it has an effect", lambda: expect(infer("a grün word", 4), ["grün", "word"]))
    call.refused("infer (Python: a request's error)", "'odd one' is no text", InferenceServerException, lambda: infer("odd one"))


def judge_all(triton, requests, tensor, judge):
    """All requests at once, so that batches have several lengths."""
    if triton.is_http:
        client = triton.library.InferenceServerClient(triton.address, concurrency=16)
        pending = [(ids, client.async_infer("encoder", [tensor(ids)], timeout=PATIENT)) for ids in requests]
        for ids, answer in pending:
            judge(ids, answer.get_result())
        client.close()
        return
    done = queue.Queue()
    for ids in requests:
        answered = lambda result, error, ids=ids: done.put((ids, result, error))
        triton.client.async_infer("encoder", [tensor(ids)], answered, timeout=PATIENT)
    for _ in requests:
        ids, result, error = done.get(timeout=60)
        assert error is None, error
        judge(ids, result)


def through_memory(triton):
    name = f"words_{triton.is_http}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 8192)
    try:
        encoded = b"".join(len(word.encode()).to_bytes(4, "little") + word.encode() for word in WORDS.flat)
        shm.set_shared_memory_region(handle, [np.frombuffer(encoded, np.uint8)])
        triton.client.register_system_shared_memory(name, f"/{name}", 8192)
        x = triton.library.InferInput("x", WORDS.shape, "BYTES")
        x.set_shared_memory(name, len(encoded))
        y = triton.library.InferRequestedOutput("y")
        y.set_shared_memory(name, 4096, 4096)
        triton.client.infer("strings", [x], outputs=[y], timeout=PATIENT)
        expect(shm.get_contents_as_numpy(handle, np.uint8, [len(encoded)], 4096).tobytes(), encoded)
    finally:
        triton.client.unregister_system_shared_memory(name)
        shm.destroy_shared_memory_region(handle)
