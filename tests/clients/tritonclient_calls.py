"""tritonclient over HTTP or gRPC: every call that both have, then what only one of them has."""

import asyncio
import json
import queue
import urllib.request

import numpy as np
import shapes_calls
import tritonclient.grpc
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils.shared_memory as shm
from judge import IMAGES, LABELS, MODEL, PATIENT, PLAIN, REPOSITORY, Table, close, expect
from tritonclient.utils import InferenceServerException

REGION_BYTES = 16 * 64 * 4


class Triton:
    """One client library against one address."""

    def __init__(self, library, name, address):
        self.library = library
        self.is_http = library is tritonclient.http
        self.address = address
        self.client = library.InferenceServerClient(address)
        self.call = Table(name)
        self.known = None

    def tensor(self, images, binary=True, name="image"):
        tensor = self.library.InferInput(name, images.shape, "FP32")
        if self.is_http:
            tensor.set_data_from_numpy(images, binary_data=binary)
        else:
            tensor.set_data_from_numpy(images)
        return tensor

    def infer(self, images, model=MODEL, tensor="image", binary=True, **options):
        inputs = [self.tensor(images, binary, tensor)]
        return self.client.infer(model, inputs, **{"timeout": PATIENT, **options})

    def scores(self, images, **options):
        return self.infer(images, **options).as_numpy("probabilities")

    def json(self, method, *arguments, **options):
        """A call's answer as plain data, which is what the HTTP client yields anyway."""
        return method(*arguments, **options) if self.is_http else method(*arguments, as_json=True, **options)

    def run(self):
        self.health_and_metadata()
        self.inference()
        self.statistics()
        self.classes()
        self.settings()
        self.shared_memory()
        shapes_calls.run(self)
        shapes_calls.run_unequal(self)
        shapes_calls.run_tokens(self)
        self.refusals()
        self.loading()
        self.asynchronous()
        self.http_only() if self.is_http else self.grpc_only()
        self.client.close()
        return self.call

    def health_and_metadata(self):
        call, client = self.call, self.client
        call("is_server_live", "true", lambda: expect(client.is_server_live(), True))
        call("is_server_ready", "true", lambda: expect(client.is_server_ready(), True))
        call("is_model_ready", "true", lambda: expect(client.is_model_ready(MODEL), True))
        call("is_model_ready (version)", "true", lambda: expect(client.is_model_ready(MODEL, "1"), True))
        call("is_model_ready (unknown model)", "false", lambda: expect(client.is_model_ready("nothing"), False))
        call("is_model_ready (unknown version)", "false", lambda: expect(client.is_model_ready(MODEL, "9"), False))
        metadata = call("get_server_metadata", "name and extensions", lambda: self.json(client.get_server_metadata))
        expect(metadata["name"], "downbeat")
        assert "statistics" in metadata["extensions"], metadata

        def model_metadata(*version):
            inputs = self.json(client.get_model_metadata, MODEL, *version)["inputs"]
            expect([(t["name"], t["datatype"], [int(dim) for dim in t["shape"]]) for t in inputs], [("image", "FP32", [-1, 64])])

        call("get_model_metadata", "inputs and outputs", model_metadata)
        call("get_model_metadata (version)", "inputs and outputs", lambda: model_metadata("1"))

        def config():
            config = self.json(client.get_model_config, MODEL)
            config = config if self.is_http else config["config"]
            expect((config["name"], config["backend"], config["input"][0]["data_type"]), ("digits", "onnx", "TYPE_FP32"))
            expect([int(dim) for dim in config["input"][0]["dims"]], [64])
            expect(config["parameters"]["slo_ms"]["string_value"], "20")

        call("get_model_config", "types, shapes, batch size and objective", config)

        def completed():
            config = self.json(client.get_model_config, PLAIN)
            config = config if self.is_http else config["config"]
            tensors = [(t["name"], t["data_type"], [int(dim) for dim in t["dims"]]) for t in config["input"] + config["output"]]
            expect(tensors, [("image", "TYPE_FP32", [64]), ("probabilities", "TYPE_FP32", [10])])
            expect(int(config["max_batch_size"]), 32)

        call("get_model_config (no config.pbtxt)", "what the model's file says", completed)

        def index():
            models = self.json(client.get_model_repository_index)
            models = models if self.is_http else models["models"]
            expect({model["name"]: model["state"] for model in models}[MODEL], "READY")

        call("get_model_repository_index", "every model and its state", index)

    def inference(self):
        call = self.call

        def one_by_one():
            scores = [self.scores(image[None, :])[0] for image in IMAGES]
            right = sum(int(s.argmax()) == label for s, label in zip(scores, LABELS))
            assert right >= 55, f"only {right} of {len(LABELS)} classified right"
            return np.array(scores)

        self.known = call("infer", "60 images, one request each, classified as the model does", one_by_one)
        call("infer (batch)", "as one by one", lambda: close(self.scores(IMAGES[:16]), self.known[:16]))

        def with_id():
            response = self.infer(IMAGES[:1], request_id="seven").get_response()
            expect(response["id"] if self.is_http else response.id, "seven")

        call("infer (request_id)", "comes back", with_id)
        outputs = [self.library.InferRequestedOutput("probabilities")]
        call("infer (outputs)", "those that are named", lambda: close(self.scores(IMAGES[:1], outputs=outputs), self.known[:1]))
        call("infer (priority)", "as without: nothing has to give way", lambda: close(self.scores(IMAGES[:1], priority=1), self.known[:1]))
        call("infer (no config.pbtxt)", "as with one", lambda: close(self.scores(IMAGES[:9], model=PLAIN), self.known[:9]))
        call("infer (version)", "as without", lambda: close(self.scores(IMAGES[:1], model_version="1"), self.known[:1]))

    def statistics(self):
        def counts(*model):
            stats = self.json(self.client.get_inference_statistics, *model)["model_stats"]
            stats = {entry["name"]: entry for entry in stats}[MODEL]
            return int(stats["inference_count"]), int(stats["inference_stats"]["success"]["count"])

        def counted():
            rows, requests = counts(MODEL)
            self.infer(IMAGES[:3])
            expect(counts(MODEL), (rows + 3, requests + 1))

        self.call("get_inference_statistics", "count every row and request", counted)
        self.call("get_inference_statistics (all models)", "the same", lambda: expect(counts(), counts(MODEL)))

    def classes(self):
        top = self.library.InferRequestedOutput("probabilities", class_count=3)

        def labelled(answer):
            best = answer.as_numpy("probabilities")
            expect(list(best.shape), [1, 3])
            score, index, label = best[0][0].decode().split(":")
            expect((int(index), label), (7, "seven"))
            assert float(score) > 0.5, best

        def picture():
            with open("models/digits/seven.png", "rb") as file:
                pixels = np.array([[file.read()]], dtype=np.object_)
            tensor = self.library.InferInput("image", pixels.shape, "BYTES")
            tensor.set_data_from_numpy(pixels)
            return self.client.infer(MODEL, [tensor], outputs=[top], timeout=PATIENT)

        self.call("infer (a picture as BYTES, its classes)", "a seven", lambda: labelled(picture()))
        seven = next(index for index, label in enumerate(LABELS) if label == 7)
        first = IMAGES[seven : seven + 1]
        self.call("infer (class_count)", "a seven", lambda: labelled(self.infer(first, outputs=[top])))

        def torn():
            tensor = self.library.InferInput("image", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[b"\x89PNG\r\n\x1a\n torn"]], dtype=np.object_))
            self.client.infer(MODEL, [tensor], timeout=PATIENT)

        self.call.refused("infer (a torn picture)", "the picture cannot be used", InferenceServerException, torn)

    def settings(self):
        call, client = self.call, self.client

        def trace(settings):
            return settings if self.is_http else {key: entry["value"] for key, entry in settings["settings"].items()}

        def update_trace(**options):
            settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "500"}
            told = trace(self.json(client.update_trace_settings, settings=settings, **options))
            expect(told["trace_level"], ["TIMESTAMPS"])
            expect(told, trace(self.json(client.get_trace_settings, **options)))
            cleared = self.json(client.update_trace_settings, settings={"trace_level": None, "trace_rate": None}, **options)
            expect(trace(cleared)["trace_level"], ["OFF"])

        call("get_trace_settings", "off", lambda: expect(trace(self.json(client.get_trace_settings))["trace_level"], ["OFF"]))
        call("update_trace_settings", "set and cleared", update_trace)
        call("update_trace_settings (model)", "set and cleared", lambda: update_trace(model_name=MODEL))

        def log(settings):
            if self.is_http:
                return settings
            return {key: next(iter(entry.values()), None) for key, entry in settings["settings"].items()}

        def update_log():
            expect(log(self.json(client.update_log_settings, {"log_verbose_level": 1}))["log_verbose_level"], 1)
            client.update_log_settings({"log_verbose_level": 0})

        call("get_log_settings", "info", lambda: expect(log(self.json(client.get_log_settings))["log_info"], True))
        call("update_log_settings", "the level follows", update_log)

    def shared_memory(self):
        call, client = self.call, self.client
        name = f"downbeat {self.call.client.split('[')[1][:4]}"
        handle = shm.create_shared_memory_region(name, "/" + name.replace(" ", "_"), 2 * REGION_BYTES)
        try:
            key = "/" + name.replace(" ", "_")
            call("register_system_shared_memory", "done", lambda: client.register_system_shared_memory(name, key, 2 * REGION_BYTES))

            def status():
                status = self.json(client.get_system_shared_memory_status, name)
                entries = status if self.is_http else list(status["regions"].values())
                expect([(entry["name"], int(entry["byte_size"])) for entry in entries], [(name, 2 * REGION_BYTES)])

            call("get_system_shared_memory_status", "what was registered", status)

            def through_memory():
                shm.set_shared_memory_region(handle, [IMAGES[:16]])
                tensor = self.library.InferInput("image", [16, 64], "FP32")
                tensor.set_shared_memory(name, 16 * 64 * 4)
                output = self.library.InferRequestedOutput("probabilities")
                output.set_shared_memory(name, 16 * 10 * 4, REGION_BYTES)
                client.infer(MODEL, [tensor], outputs=[output], timeout=PATIENT)
                close(shm.get_contents_as_numpy(handle, np.float32, [16, 10], REGION_BYTES), self.known[:16])

            call("infer (shared memory)", "input and output through it, as without", through_memory)

            def truncated():
                tensor = self.library.InferInput("image", [1, 64], "FP32")
                tensor.set_shared_memory(name, 64 * 4)
                with open(f"/dev/shm{key}", "r+b") as file:
                    file.truncate(16)
                client.infer(MODEL, [tensor], timeout=PATIENT)

            call.refused("infer (truncated shared memory)", "was it truncated?", InferenceServerException, truncated)
            call("unregister_system_shared_memory", "done", lambda: client.unregister_system_shared_memory(name))
            call("unregister_system_shared_memory (all)", "done", lambda: client.unregister_system_shared_memory())
            call.refused(
                "register_system_shared_memory (a path)",
                "without further path separators",
                InferenceServerException,
                lambda: client.register_system_shared_memory("evil", "/../etc/passwd", 16),
            )
        finally:
            shm.destroy_shared_memory_region(handle)
        none = [] if self.is_http else {}
        call("get_cuda_shared_memory_status", "none", lambda: expect(self.json(client.get_cuda_shared_memory_status), none))
        call("unregister_cuda_shared_memory", "done", lambda: client.unregister_cuda_shared_memory("none"))
        call.refused(
            "register_cuda_shared_memory",
            "GPUs not supported",
            InferenceServerException,
            lambda: client.register_cuda_shared_memory("none", b"", 0, 16),
        )

    def refusals(self):
        refused = lambda call, reason, function: self.call.refused(call, reason, InferenceServerException, function)
        refused("infer (unknown model)", "Request for unknown model: 'nothing' is not found", lambda: self.infer(IMAGES[:1], model="nothing"))
        refused("infer (unknown version)", "version 9 is not found", lambda: self.infer(IMAGES[:1], model_version="9"))
        refused("infer (unknown input)", "found 'wrong', expected one of", lambda: self.infer(IMAGES[:1], tensor="wrong"))
        refused("infer (wrong shape)", "expected [n, 64]", lambda: self.infer(IMAGES[:1, :63]))
        refused("infer (objective that cannot be met)", "it can never be met", lambda: self.infer(IMAGES[:1], timeout=1))
        refused("get_model_metadata (unknown model)", "expected one of", lambda: self.client.get_model_metadata("nothing"))
        refused("load_model (unknown model)", "failed to load 'nothing'", lambda: self.client.load_model("nothing"))
        refused("load_model (a path)", "expected the name of a folder", lambda: self.client.load_model(".."))
        refused("load_model (a wrong config)", "parameter config: ", lambda: self.client.load_model(MODEL, config="{ 1 }"))
        self.call("unload_model (unknown model)", "done", lambda: self.client.unload_model("nothing"))
        refused("update_log_settings (a file)", "the log goes to stderr", lambda: self.client.update_log_settings({"log_file": "/tmp/x"}))
        self.call("infer (after all of these)", "as before", lambda: close(self.scores(IMAGES[:1]), self.known[:1]))

    def state(self):
        models = self.json(self.client.get_model_repository_index)
        models = models if self.is_http else models["models"]
        entry = {model["name"]: model for model in models}[MODEL]
        return entry["state"], entry.get("reason", "")

    def loading(self):
        call, client = self.call, self.client

        def unload():
            client.unload_model(MODEL)
            expect(client.is_model_ready(MODEL), False)
            expect(self.state(), ("UNAVAILABLE", "unloaded"))

        def load():
            client.load_model(MODEL)
            expect(client.is_model_ready(MODEL), True)
            expect(self.state(), ("READY", ""))

        call("unload_model", "not ready, and the index says why", unload)
        refused = "has no available versions, as it was unloaded"
        call.refused("infer (unloaded model)", refused, InferenceServerException, lambda: self.infer(IMAGES[:1]))
        call("unload_model (again)", "done", unload)
        call("load_model", "ready", load)
        call("infer (loaded again)", "as before", lambda: close(self.scores(IMAGES[:1]), self.known[:1]))
        call("load_model (again)", "ready", load)

        def objective():
            config = self.json(client.get_model_config, MODEL)
            return (config if self.is_http else config["config"])["parameters"]["slo_ms"]["string_value"]

        def configured():
            config = self.json(client.get_model_config, MODEL)
            config = config if self.is_http else config["config"]
            config["parameters"]["slo_ms"]["string_value"] = "50"
            client.load_model(MODEL, config=json.dumps(config))
            expect((client.is_model_ready(MODEL), objective()), (True, "50"))
            client.unload_model(MODEL)
            client.load_model(MODEL)
            expect((client.is_model_ready(MODEL), objective()), (True, "20"))

        call("load_model (config)", "served with it, until it is unloaded", configured)

        def broken():
            path = f"{REPOSITORY}/{MODEL}/1/model.onnx"
            with open(path, "rb") as file:
                whole = file.read()
            try:
                with open(path, "wb") as file:
                    file.write(whole[: len(whole) // 2])
                client.load_model(MODEL)
            finally:
                with open(path, "wb") as file:
                    file.write(whole)

        with open(f"{REPOSITORY}/{MODEL}/1/model.onnx", "rb") as file:
            whole = file.read()
        config = json.dumps({"backend": "onnxruntime", "parameters": {"slo_ms": {"string_value": "50"}}})

        def files():
            # More than is read at once, which what lies beside a model may be.
            client.load_model(MODEL, config=config, files={"file:1/model.onnx": whole, "file:1/notes": bytes(3 << 20)})
            expect((client.is_model_ready(MODEL), objective()), (True, "50"))
            close(self.scores(IMAGES[:1]), self.known[:1])
            client.load_model(MODEL)
            expect((client.is_model_ready(MODEL), objective()), (True, "50"))
            client.unload_model(MODEL)
            client.load_model(MODEL)
            expect((client.is_model_ready(MODEL), objective()), (True, "20"))

        def load_files(files, config=config):
            return lambda: client.load_model(MODEL, config=config, files=files)

        call("load_model (files)", "served instead, until it is unloaded", files)
        refused = "failed to load 'digits', failed to poll from model repository"
        for what, files, config_of in (
            ("files without config", {"file:1/model.onnx": whole}, None),
            ("a file elsewhere", {"file:../../../root/.bashrc": whole}, config),
        ):
            call.refused(f"load_model ({what})", refused, InferenceServerException, load_files(files, config_of))
        call.refused(
            "load_model (a program)",
            "clients bring no programs",
            InferenceServerException,
            load_files({"file:1/model.py": b"raise SystemExit"}, "{}"),
        )
        call.refused("load_model (a torn file)", "failed to load 'digits', backend", InferenceServerException, broken)
        call("infer (after that)", "as before", lambda: close(self.scores(IMAGES[:1]), self.known[:1]))

    def asynchronous(self):
        if self.is_http:
            start = lambda: self.client.async_infer(MODEL, [self.tensor(IMAGES[:2])], timeout=PATIENT)
            self.call("async_infer", "as infer", lambda: close(start().get_result().as_numpy("probabilities"), self.known[:2]))
            return
        done = queue.Queue()

        def wait():
            self.client.async_infer(MODEL, [self.tensor(IMAGES[:2])], lambda result, error: done.put((result, error)), timeout=PATIENT)
            result, error = done.get(timeout=60)
            assert error is None, error
            close(result.as_numpy("probabilities"), self.known[:2])

        self.call("async_infer", "as infer", wait)

    def http_only(self):
        call = self.call
        call("infer (JSON)", "as in binary", lambda: close(self.scores(IMAGES[:4], binary=False), self.known[:4]))
        for coding in ("gzip", "deflate"):
            # Large enough that its answer is worth compressing too.
            def compressed():
                options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
                close(self.scores(IMAGES[:48], **options), self.known[:48])

            call(f"infer ({coding} both ways)", "as without", compressed)
        output = [tritonclient.http.InferRequestedOutput("probabilities", binary_data=False)]
        call("infer (a raw body)", "as in binary", self.raw)
        call("aio: get_inference_statistics", "the same, not compressed", lambda: asyncio.run(self.over_asyncio()))
        call("infer (output in JSON)", "as in binary", lambda: close(self.scores(IMAGES[:4], outputs=output), self.known[:4]))

    def raw(self):
        """A body that is nothing but the input, as Triton's documentation sends it with curl."""
        headers = {"Inference-Header-Content-Length": "0"}
        url = f"http://{self.address}/v2/models/{MODEL}/infer?timeout={PATIENT}"
        request = urllib.request.Request(url, data=IMAGES[0].tobytes(), headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            body = reply.read()[int(reply.headers["Inference-Header-Content-Length"]) :]
        close(np.frombuffer(body, np.float32), self.known[0])

    async def over_asyncio(self):
        """This client offers to read gzip, and decodes it only of inferences."""
        async with tritonclient.http.aio.InferenceServerClient(self.address) as client:
            told = await client.get_inference_statistics()
            assert MODEL in [entry["name"] for entry in told["model_stats"]], told

    def grpc_only(self):
        call, client = self.call, self.client
        for coding in ("gzip", "deflate"):
            call(f"infer ({coding})", "as without", lambda: close(self.scores(IMAGES[:16], compression_algorithm=coding), self.known[:16]))
        call("infer (client_timeout)", "as without", lambda: close(self.scores(IMAGES[:1], client_timeout=30), self.known[:1]))
        answers = queue.Queue()

        def stream():
            client.start_stream(lambda result, error: answers.put((result, error)))
            for index in range(8):
                client.async_stream_infer(MODEL, [self.tensor(IMAGES[index : index + 1])], request_id=str(index), timeout=PATIENT)
            for _ in range(8):
                result, error = answers.get(timeout=60)
                assert error is None, error
                index = int(result.get_response().id)
                close(result.as_numpy("probabilities")[0], self.known[index])

        call("start_stream, async_stream_infer", "8 requests, each with its answer", stream)

        def in_order():
            # Batches of many sizes would overtake each other.
            for index in range(32):
                rows = 16 if index % 2 == 0 else 1
                client.async_stream_infer(MODEL, [self.tensor(IMAGES[index : index + rows])], timeout=PATIENT)
            for index in range(32):
                result, error = answers.get(timeout=60)
                assert error is None, error
                close(result.as_numpy("probabilities")[0], self.known[index])

        call("async_stream_infer (without ids)", "32 requests, answered in their order", in_order)

        def stream_error():
            client.async_stream_infer("nothing", [self.tensor(IMAGES[:1])])
            result, error = answers.get(timeout=60)
            assert result is None and "expected one of" in str(error), error
            client.async_stream_infer(MODEL, [self.tensor(IMAGES[:1])], timeout=PATIENT)
            result, error = answers.get(timeout=60)
            assert error is None, error

        call("async_stream_infer (unknown model)", "its error, and the stream goes on", stream_error)
        call("stop_stream", "done", client.stop_stream)


def run(http, grpc):
    return [
        Triton(tritonclient.http, "tritonclient[http]", http).run(),
        Triton(tritonclient.grpc, "tritonclient[grpc]", grpc).run(),
    ]
