"""Answers that are kept (`response_cache`): they are bounded, what is asked for often stays, and those who wait for the
answer to an equal question leave nothing behind when they go."""

import json
import socket
import struct
import time

import http1
from cluster import CACHE_BYTES, KEPT_BYTES
from judge import attack, told

FAST, SLOW = ("/v2/models/kept/infer", "/v2/models/kept_slow/infer")


def question(path, number, headers=()):
    """A request of a row that this number begins."""
    tensor = {"name": "x", "shape": [1, KEPT_BYTES], "datatype": "UINT8"}
    tensor["parameters"] = {"binary_data_size": KEPT_BYTES}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = header + struct.pack("<Q", number).ljust(KEPT_BYTES, b"k")
    length = ("Inference-Header-Content-Length", len(header))
    return http1.request("POST", path, body, [length, *headers])


def counted(scene, family, model):
    """What a counter of a model says."""
    start = f'{family}{{model="{model}",'
    return sum(float(line.rpartition(" ")[2]) for line in scene.metrics() if line.startswith(start))


def hits(scene, path, number):
    """Whether a question is answered by what was kept; nothing if it is not answered."""
    replies = http1.replies(scene.http, question(path, number), timeout=2)
    return replies[0].headers.get("x-downbeat-timing", "").startswith("cache") if replies else None


@attack(cluster="kept", limit_s=25)
def kept_answers_fill(scene):
    """A client asks for ever new things, so that their answers are ten times as large as what may be kept, while one
    asks for the same again and again."""
    frontend = scene.cluster.members["frontend"]
    total = 10 * CACHE_BYTES // KEPT_BYTES
    found = [hits(scene, FAST, 0) for _ in range(3)]
    scene.expect(found[1:] == [True, True], f"a question is found {found}, expected it to be kept")
    lost, asked, until = 0, 0, time.monotonic() + 15
    connection = http1.connect(scene.http, timeout=2)
    stream = connection.makefile("rb")
    for number in range(1, total + 1):
        if time.monotonic() > until:
            break
        connection.sendall(question(FAST, number))
        http1.read_reply(stream)
        asked += 1
        if number % 50 == 0:
            lost += hits(scene, FAST, 0) is False
    scene.expect(asked * KEPT_BYTES > 2 * CACHE_BYTES, f"{asked} new questions do not fill the cache")
    scene.expect(lost == 0, f"what is asked for often was lost {lost} times")
    grown = frontend.kept()
    scene.expect(grown < 4 * CACHE_BYTES + (32 << 20), f"the frontend keeps {grown >> 20} MB")
    return f"{asked} answers of {KEPT_BYTES >> 10} KB, {grown >> 20} MB kept"


@attack(cluster="kept", limit_s=15)
def kept_answers_cancelled(scene):
    """Hundreds ask the same and are gone at once, again and again; whoever stays is answered."""
    raw, storms, gone = question(SLOW, 1), 0, 0
    while not scene.is_over(4):
        connections = http1.connect_many(scene.http, 100, 0.5, raw)
        for connection in connections:
            # A reset: who only ends its half is answered.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        storms, gone = storms + 1, gone + len(connections)
    scene.expect(gone > 100, f"{gone} asked, expected hundreds")
    stays = http1.replies(scene.http, raw, timeout=5)
    scene.expect(stays and stays[0].status == 200, "who stays is not answered")
    executed = counted(scene, "nv_inference_count", "kept_slow")
    scene.expect(executed <= 40, f"an equal question was asked {executed:.0f} times for {gone}")
    pending = 'nv_inference_pending_request_count{model="kept_slow",version="1"} 0'
    is_over = scene.wait_for(lambda: pending in scene.metrics(), 4)
    scene.expect(is_over, "requests are pending whose clients have gone")
    return f"{gone} gone, asked {executed:.0f} times, {told([reply.status for reply in stays])}"
