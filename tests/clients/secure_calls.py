"""tritonclient with certificates and a token, over HTTP and gRPC: what is covered is served, all else refused.

usage: secure_calls.py HTTP_ADDRESS GRPC_ADDRESS DIRECTORY TOKEN"""

import sys

import gevent.ssl
import tritonclient.grpc
import tritonclient.http
from judge import IMAGES, LABELS, MODEL, PATIENT, Table, expect
from tritonclient.utils import InferenceServerException

http, grpc, directory, token = sys.argv[1:]
AUTHORITY, CERTIFICATE, KEY = (f"{directory}/{name}" for name in ("ca.pem", "client.pem", "client.key"))


def context():
    context = gevent.ssl.create_default_context(cafile=AUTHORITY)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


def over_http():
    return tritonclient.http.InferenceServerClient(http, ssl=True, ssl_context_factory=context)


def over_grpc():
    files = {"root_certificates": AUTHORITY, "certificate_chain": CERTIFICATE, "private_key": KEY}
    return tritonclient.grpc.InferenceServerClient(grpc, ssl=True, **files)


def calls(library, name, client, header):
    call = Table(f"{name} over TLS")
    bearer = {header: f"Bearer {token}"}

    def infer(headers, model=MODEL):
        tensor = library.InferInput("image", [1, 64], "FP32")
        tensor.set_data_from_numpy(IMAGES[:1])
        return client.infer(model, [tensor], headers=headers, timeout=PATIENT).as_numpy("probabilities")

    call("infer", "classified right", lambda: expect(int(infer(bearer)[0].argmax()), LABELS[0]))
    call("is_server_live (no token)", "true", lambda: expect(client.is_server_live(), True))
    call.refused("infer (no token)", "found no token", InferenceServerException, lambda: infer({}))
    call.refused("infer (unknown token)", "an unknown token", InferenceServerException, lambda: infer({header: "Bearer x"}))
    call.refused("infer (another model)", "does not cover infer", InferenceServerException, lambda: infer(bearer, "resnet50"))
    call.refused(
        "get_trace_settings", "does not cover settings", InferenceServerException, lambda: client.get_trace_settings(headers=bearer)
    )
    client.close()


calls(tritonclient.http, "tritonclient[http]", over_http(), "Authorization")
calls(tritonclient.grpc, "tritonclient[grpc]", over_grpc(), "authorization")
