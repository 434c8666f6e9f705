"""Clients of other servers that speak the Open Inference Protocol, each as its package has it.

usage: sdk_calls.py kserve|mlserver|pytriton|ultralytics HTTP_ADDRESS GRPC_ADDRESS"""

import asyncio
import importlib.util
import sys
import urllib.request
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from judge import IMAGES, LABELS, MODEL, Table, expect  # noqa: E402


def right(scores, rows=1):
    expect(np.asarray(scores).reshape(rows, 10).argmax(axis=1).tolist(), LABELS[:rows])


def kserve(http, grpc):
    import grpc as grpcio
    import httpx
    from kserve import InferInput, InferRequest, InferenceGRPCClient, InferenceRESTClient, RESTConfig

    def request(is_binary=True, model=MODEL):
        tensor = InferInput("image", [4, 64], "FP32")
        tensor.set_data_from_numpy(IMAGES[:4], binary_data=is_binary)
        return InferRequest(model_name=model, infer_inputs=[tensor])

    def scores(answer):
        right(answer.outputs[0].as_numpy(), 4)

    async def rest(call):
        client, url = InferenceRESTClient(RESTConfig(protocol="v2", timeout=30)), f"http://{http}"

        async def infer(is_binary=True, model=MODEL):
            return await client.infer(url, request(is_binary, model), model_name=model)

        await calls(call, [
            ("is_server_live", "true", client.is_server_live(url), lambda found: expect(found, True)),
            ("is_server_ready", "true", client.is_server_ready(url), lambda found: expect(found, True)),
            ("is_model_ready", "true", client.is_model_ready(url, MODEL), lambda found: expect(found, True)),
            ("is_model_ready (unknown model)", "false", client.is_model_ready(url, "nothing"),
             lambda found: expect(found, False)),
            ("infer", "classified right", infer(), scores),
            ("infer (JSON)", "classified right", infer(False), scores),
        ])
        await refused(call, "infer (unknown model)", "is not found", httpx.HTTPStatusError, infer(model="nothing"))
        await client.close()

    async def over_grpc(call):
        async with InferenceGRPCClient(url=grpc) as client:
            await calls(call, [
                ("is_server_live", "true", client.is_server_live(), lambda found: expect(found, True)),
                ("is_server_ready", "true", client.is_server_ready(), lambda found: expect(found, True)),
                ("is_model_ready", "true", client.is_model_ready(MODEL), lambda found: expect(found, True)),
                ("is_model_ready (unknown model)", "false", client.is_model_ready("nothing"),
                 lambda found: expect(found, False)),
                ("infer", "classified right", client.infer(request()), scores),
                ("infer (typed contents)", "classified right", client.infer(request(False)), scores),
            ])
            unknown = client.infer(request(model="nothing"))
            await refused(call, "infer (unknown model)", "is not found", grpcio.RpcError, unknown)

    asyncio.run(rest(Table("kserve, REST")))
    asyncio.run(over_grpc(Table("kserve, gRPC")))


async def calls(call, wanted):
    for name, outcome, asked, judge in wanted:
        answer = await asked
        call(name, outcome, lambda: judge(answer))


async def refused(call, name, reason, kind, asked):
    try:
        await asked
    except kind as error:
        # httpx keeps the body apart from its own words.
        text = f"{error} {getattr(getattr(error, 'response', None), 'text', '')}"
        call(name, f"refused: {reason}", lambda: expect(reason in text, True))
    else:
        raise AssertionError(f"{name}: it was not refused")


def mlserver(http, grpc):
    import grpc as grpcio
    from mlserver.codecs import NumpyCodec, NumpyRequestCodec
    from mlserver.grpc import converters, dataplane_pb2 as pb
    from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
    from mlserver.types import InferenceRequest, InferenceResponse, MetadataModelResponse, MetadataServerResponse

    call, url = Table("mlserver, REST"), f"http://{http}/v2"

    def request():
        # Its converters take the data out.
        tensor = NumpyCodec.encode_input("image", IMAGES[:4])
        return InferenceRequest(inputs=[tensor])

    def ask(path, body=None):
        with urllib.request.urlopen(url + path, data=body and body.encode(), timeout=30) as reply:
            return reply.read()

    def infer(body):
        answer = InferenceResponse.model_validate_json(ask(f"/models/{MODEL}/infer", body))
        right(NumpyRequestCodec.decode_response(answer), 4)

    def server():
        expect(MetadataServerResponse.model_validate_json(ask("")).name, "downbeat")

    def model():
        expect(MetadataModelResponse.model_validate_json(ask(f"/models/{MODEL}")).name, MODEL)

    call("server metadata", "its types hold it", server)
    call("model metadata", "its types hold it", model)
    call("infer", "classified right", lambda: infer(request().model_dump_json(exclude_none=True)))
    call("infer (all fields)", "classified right", lambda: infer(request().model_dump_json()))

    call = Table("mlserver, gRPC")
    with grpcio.insecure_channel(grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)

        def over_grpc(raw):
            message = converters.ModelInferRequestConverter.from_types(
                request(), model_name=MODEL, model_version=None, use_raw=raw)
            answer = converters.ModelInferResponseConverter.to_types(stub.ModelInfer(message))
            right(NumpyCodec.decode_output(answer.outputs[0]), 4)

        def ready(name, expected):
            expect(stub.ModelReady(pb.ModelReadyRequest(name=name)).ready, expected)

        call("ServerReady", "true", lambda: expect(stub.ServerReady(pb.ServerReadyRequest()).ready, True))
        call("ModelReady", "true", lambda: ready(MODEL, True))
        call("ModelReady (unknown model)", "false", lambda: ready("nothing", False))
        call("ModelInfer (raw contents)", "classified right", lambda: over_grpc(True))
        call("ModelInfer (typed contents)", "classified right", lambda: over_grpc(False))


def pytriton(http, grpc):
    from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient
    from pytriton.client.exceptions import PyTritonClientModelUnavailableError, PyTritonClientTimeoutError

    for url in (f"http://{http}", f"grpc://{grpc}"):
        call = Table(f"pytriton, {url.split(':')[0]}")
        with ModelClient(url, MODEL) as client:
            call("wait_for_model", "ready", lambda: client.wait_for_model(30))
            call("model_config", "its batch size", lambda: expect(client.model_config.max_batch_size, 64))
            call("infer_batch", "classified right", lambda: right(
                client.infer_batch(image=IMAGES[:4])["probabilities"], 4))
            call("infer_batch (by position)", "classified right", lambda: right(
                client.infer_batch(IMAGES[:4])["probabilities"], 4))
            call("infer_sample", "classified right", lambda: right(
                client.infer_sample(IMAGES[0])["probabilities"]))
            call("from_existing_client", "classified right", lambda: right(
                ModelClient.from_existing_client(client).infer_sample(IMAGES[0])["probabilities"]))
        with FuturesModelClient(url, MODEL) as client:
            futures = [client.infer_sample(image) for image in IMAGES[:8]]
            call("futures: infer_sample", "classified right", lambda: right(
                np.stack([future.result()["probabilities"] for future in futures]), 8))

        async def many():
            async with AsyncioModelClient(url, MODEL) as client:
                answers = [client.infer_sample(image) for image in IMAGES[:8]]
                return np.stack([answer["probabilities"] for answer in await asyncio.gather(*answers)])

        call("asyncio: infer_sample", "classified right", lambda: right(asyncio.run(many()), 8))

        def unknown():
            with ModelClient(url, "nothing", init_timeout_s=2) as client:
                client.infer_sample(IMAGES[0])

        errors = (PyTritonClientModelUnavailableError, PyTritonClientTimeoutError)
        call.refused("infer_sample (unknown model)", "nothing", errors, unknown)


def ultralytics(http, grpc):
    """Its client alone: the package's own modules would bring a framework."""
    folder = Path(importlib.util.find_spec("tritonclient").origin).parents[1] / "ultralytics"
    spec = importlib.util.spec_from_file_location("triton", folder / "utils" / "triton.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for scheme, address in (("http", http), ("grpc", grpc)):
        call = Table(f"ultralytics, {scheme}")
        client = call("TritonRemoteModel", "reads the configuration", lambda: module.TritonRemoteModel(
            url=address, endpoint=MODEL, scheme=scheme))
        call("names", "as configured", lambda: expect(
            (client.input_names, client.output_names), (["image"], ["probabilities"])))
        call("call", "classified right", lambda: right(client(IMAGES[:4])[0], 4))


name, http, grpc = sys.argv[1:]
globals()[name](http, grpc)
