"""Tensors whose size requests choose, and strings: what tritonclient sends over HTTP or gRPC, beside ONNX Runtime."""

import queue
from concurrent.futures import ThreadPoolExecutor

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


def run_unequal(triton):
    """Lengths 1 to 256 from several threads, so that batches have several: each answer beside that of running it alone."""
    alone = onnxruntime.InferenceSession(f"{REPOSITORY}/padded/1/model.onnx", providers=["CPUExecutionProvider"])
    random = np.random.default_rng(3)
    requests = [random.integers(0, 50, (1, length), dtype=np.int64) for length in random.permutation(np.arange(1, 257))]
    expected = [alone.run(["states", "scores"], {"ids": ids, "mask": np.ones_like(ids)}) for ids in requests]

    def share(model, which):
        """Every 16th request, by a client of this thread's own; yields how long each was in its run."""
        widths = []
        with triton.library.InferenceServerClient(triton.address) as client:
            for index in range(which, len(requests), 16):
                ids = requests[index]
                tensors = {"ids": ids, "mask": np.ones_like(ids)} if model == "masked" else {"ids": ids}
                inputs = [triton.library.InferInput(name, ids.shape, "INT64") for name in tensors]
                for tensor, data in zip(inputs, tensors.values()):
                    tensor.set_data_from_numpy(data)
                # Whoever plans by what requests take is told which are alike; here nobody does.
                application = {"application": "short" if ids.shape[1] < 64 else "long"}
                answer = client.infer(model, inputs, timeout=PATIENT, parameters=application)
                for name, right in zip(["states", "scores"], expected[index]):
                    found = answer.as_numpy(name)
                    expect(found.shape, right.shape)
                    np.testing.assert_allclose(found, right, atol=1e-4)
                widths.append((ids.shape[1], int(answer.as_numpy("width")[0, 0])))
        return widths

    def mixed(model, is_right):
        with ThreadPoolExecutor(16) as threads:
            widths = [pair for widths in threads.map(lambda which: share(model, which), range(16)) for pair in widths]
        expect(sorted(length for length, _ in widths), list(range(1, 257)))
        assert all(is_right(length, width) for length, width in widths), widths
        # No two requests have one length, so whoever was longer in its run ran with others.
        return sum(width > length for length, width in widths)

    def together(model):
        # Batches form while others run, which no client can order: asks until some have.
        for _ in range(10):
            if mixed(model, lambda length, width: length <= width <= 256 or model == "ragged"):
                return
        raise AssertionError("no two requests ran together in ten rounds")

    call = triton.call
    call("infer (lengths 1 to 256, padded)", "each as alone in ONNX Runtime, some with others", lambda: together("padded"))
    call("infer (padded, with the client's mask)", "each as alone in ONNX Runtime, some with others", lambda: together("masked"))
    call("infer (lengths 1 to 256, joined)", "each as alone in ONNX Runtime, some with others", lambda: together("ragged"))
    bound = lambda length: next(bound for bound in [16, 64, 128, 256] if bound >= length)
    bucketed = lambda: mixed("bucketed", lambda length, width: width == bound(length))
    call("infer (lengths 1 to 256, in buckets)", "each as alone in ONNX Runtime, in its bucket", bucketed)
    beyond = triton.library.InferInput("ids", [1, 257], "INT64")
    beyond.set_data_from_numpy(np.ones((1, 257), np.int64))
    refused = lambda: triton.client.infer("bucketed", [beyond], timeout=PATIENT)
    call.refused("infer (a length beyond the last bound)", "each -1 at most 256", InferenceServerException, refused)


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
