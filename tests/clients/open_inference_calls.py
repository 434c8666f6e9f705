"""open-inference-openapi and open-inference-grpc, the clients generated from the protocol's own definitions."""

import grpc
import numpy as np
from judge import IMAGES, LABELS, MODEL, PATIENT, Table, expect
from open_inference.grpc import protocol as messages
from open_inference.grpc.service import GRPCInferenceServiceStub
from open_inference.openapi.client import InferenceRequest, OpenInferenceClient
from open_inference.openapi.core.api_error import ApiError


def openapi(http):
    client, call = OpenInferenceClient(base_url=f"http://{http}"), Table("open-inference-openapi")
    call("check_server_liveness", "live", client.check_server_liveness)
    call("check_server_readiness", "ready", client.check_server_readiness)
    call("check_model_readiness", "ready", lambda: client.check_model_readiness(MODEL))
    call("check_model_version_readiness", "ready", lambda: client.check_model_version_readiness(MODEL, "1"))
    call("read_server_metadata", "name", lambda: expect(client.read_server_metadata().name, "downbeat"))
    call("read_model_metadata", "name", lambda: expect(client.read_model_metadata(MODEL).name, MODEL))
    call("read_model_version_metadata", "name", lambda: expect(client.read_model_version_metadata(MODEL, "1").name, MODEL))
    tensor = {"name": "image", "shape": [1, 64], "datatype": "FP32", "data": IMAGES[0].tolist()}
    request = InferenceRequest(inputs=[tensor], parameters={"timeout": PATIENT})

    def right(answer):
        expect(int(np.argmax(answer.dict()["outputs"][0]["data"])), LABELS[0])

    call("model_infer", "classified right", lambda: right(client.model_infer(MODEL, request=request)))
    call("model_version_infer", "classified right", lambda: right(client.model_version_infer(MODEL, "1", request=request)))
    call.refused("model_infer (unknown model)", "expected one of", ApiError, lambda: client.model_infer("nothing", request=request))
    return call


def grpc_stub(address):
    call = Table("open-inference-grpc")
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        call("ServerLive", "live", lambda: expect(stub.ServerLive(messages.ServerLiveRequest()).live, True))
        call("ServerReady", "ready", lambda: expect(stub.ServerReady(messages.ServerReadyRequest()).ready, True))
        call("ModelReady", "ready", lambda: expect(stub.ModelReady(messages.ModelReadyRequest(name=MODEL)).ready, True))
        call("ServerMetadata", "name", lambda: expect(stub.ServerMetadata(messages.ServerMetadataRequest()).name, "downbeat"))
        call("ModelMetadata", "name", lambda: expect(stub.ModelMetadata(messages.ModelMetadataRequest(name=MODEL)).name, MODEL))

        def request(typed, model=MODEL):
            tensor = messages.ModelInferRequest.InferInputTensor(name="image", datatype="FP32", shape=[1, 64])
            request = messages.ModelInferRequest(model_name=model, inputs=[tensor])
            request.parameters["timeout"].int64_param = PATIENT
            if typed:
                request.inputs[0].contents.fp32_contents.extend(IMAGES[0].tolist())
            else:
                request.raw_input_contents.append(IMAGES[0].tobytes())
            return request

        def right(request):
            scores = np.frombuffer(stub.ModelInfer(request).raw_output_contents[0], np.float32)
            expect(int(scores.argmax()), LABELS[0])

        call("ModelInfer (raw contents)", "classified right", lambda: right(request(False)))
        call("ModelInfer (typed contents)", "classified right", lambda: right(request(True)))
        call.refused("ModelInfer (unknown model)", "expected one of", grpc.RpcError, lambda: stub.ModelInfer(request(False, "nothing")))
    return call


def run(http, grpc_address):
    return [openapi(http), grpc_stub(grpc_address)]
