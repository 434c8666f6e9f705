"""Ensembles: what one request makes of itself is charged to whoever asked."""

import json
import socket
import struct

import http1
from cluster import WIDE_BYTES, WIDE_STEPS
from judge import attack, told

PATH = "/v2/models/wide/infer"


def question():
    tensor = {"name": "x", "shape": [1, WIDE_BYTES], "datatype": "UINT8"}
    tensor["parameters"] = {"binary_data_size": WIDE_BYTES}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = ("Inference-Header-Content-Length", len(header))
    return http1.request("POST", PATH, header + bytes(WIDE_BYTES), [length])


def status_of(scene, raw):
    """What a request is answered with; nothing if it is not."""
    try:
        with http1.connect(scene.http, timeout=20) as connection:
            connection.sendall(raw)
            reply = http1.read_reply(connection.makefile("rb"))
            return reply.status if reply else None
    except OSError:
        return None


@attack(cluster="wide", limit_s=60)
def graph_of_large_members(scene):
    """Requests of 16 MB for an ensemble that gives each of sixteen members all of it, and gets as much back from each:
    half a gigabyte a request. Most of those who ask do not wait for the answer. Whatever members grow by, they keep to
    their bounds, and alone the request is answered."""
    raw, found = question(), []
    scene.expect(scene.wait_for(lambda: scene.cluster.is_model_ready("wide"), 20), "the ensemble is not ready")
    while not scene.is_over(8):
        leaving = [http1.connect(scene.http, timeout=10) for _ in range(2)]
        for connection in leaving:
            try:
                connection.sendall(raw)
            except OSError:
                pass
        found.append(status_of(scene, raw))
        for connection in leaving:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    scene.expect(set(found) <= {None, 200, 429, 503, 504}, f"they were answered with {told(found)}")
    pending = 'nv_inference_pending_request_count{model="wide_member",version="1"} 0'
    scene.expect(scene.wait_for(lambda: pending in scene.metrics(), 20), "members are asked for nobody")
    alone = status_of(scene, raw)
    scene.expect(alone == 200, f"alone it is answered with {alone}")
    return f"{told(found)}, alone {alone}, {WIDE_STEPS} members"
