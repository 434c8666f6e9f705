"""What operators read, and what browsers can be made to send: metrics, logs, the index, and pages of other sites."""

import base64
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import secrets
import select
import time
from collections import Counter

import grpc
import http1
import http2
from cluster import FOLDER, LOADED_BYTES_MAX
from judge import attack, told

INFER = "/v2/models/digits/infer"
JSON = [("Content-Type", "application/json")]


@attack()
def metrics_flood(scene):
    """/metrics as often as it goes on two hundred connections, with compression and without."""
    asks = [http1.head("GET", "/metrics", more) for more in ([], [("Accept-Encoding", "gzip")])]
    return ask_often(scene, asks, 200)


@attack()
def index_flood(scene):
    """The index, statistics, configurations and explanations as often as it goes on twenty connections."""
    paths = [
        "/v2/models/stats",
        "/v2/models/digits/config",
        "/v2/models/digits/stats",
        "/debug/requests/1",
        "/debug/requests/x",
    ]
    asks = [http1.head("GET", path, [("Accept-Encoding", "gzip")]) for path in paths]
    return ask_often(scene, [*asks, http1.request("POST", "/v2/repository/index", b"{}", JSON)], 20)


def ask_often(scene, asks, count, seconds=1.5):
    """Ten requests at a time on each connection, as soon as the last ten were answered. Replies are only counted."""
    batch, statuses = b"".join((asks * 10)[:10]), Counter()
    # Of each: how many replies it waits for, and what came last, in case it is half a status line.
    open_connections = {connection: (0, b"") for connection in http1.connect_many(scene.http, count, 1)}
    began = time.monotonic()
    while open_connections and time.monotonic() - began < seconds:
        for connection, (awaited, _) in list(open_connections.items()):
            if awaited == 0:
                open_connections[connection] = 10 * http1.push(connection, batch), b""
        for connection in select.select(open_connections, [], [], 0.05)[0]:
            awaited, rest = open_connections.pop(connection)
            connection.setblocking(False)
            try:
                data = connection.recv(1 << 20)
            except OSError:
                data = b""
            found = re.findall(rb"HTTP/1.1 (\d+) ", rest + data)
            statuses.update(int(status) for status in found)
            if data:
                open_connections[connection] = max(0, awaited - len(found)), (rest + data)[-12:]
    return f"{statuses.total() / seconds:.0f} a second: {told(statuses)}"


@attack()
def label_flood(scene):
    """A thousand names of models, versions, ids, tokens, hosts and methods that are none: /metrics is not to grow
    with them."""
    before = len(scene.metrics())
    connections = http1.connect_many(scene.http, 4, 1)
    streams = [connection.makefile("rb") for connection in connections]
    sent = 0
    while sent < 1000 and not scene.is_over(3):
        for connection, stream in list(zip(connections, streams)):
            sent += 1
            body = json.dumps({"id": f"id{sent}", "inputs": [], "parameters": {f"p{sent}": sent}}).encode()
            name = f"model{sent}" if sent % 2 else f"digits/versions/{sent}"
            more = [
                ("Authorization", f"Bearer t{sent}"),
                ("traceparent", f"00-{sent:032x}-{sent:016x}-01"),
                ("Host", f"h{sent}"),
            ]
            more = more[: sent % 4]
            connection.sendall(
                http1.request("POST" if sent % 5 else f"M{sent}", f"/v2/models/{name}/infer", body, more)
            )
            if (reply := http1.read_reply(stream)) is None or reply.headers.get("connection") == "close":
                connections.remove(connection)
                streams.remove(stream)
                connections += http1.connect_many(scene.http, 1, 0.5)
                streams.append(connections[-1].makefile("rb"))
    after = len(scene.metrics())
    scene.expect(before > 0 and after <= before + 20, f"/metrics had {before} lines and has {after}")
    return f"{sent} requests, {before} lines of metrics before and {after} after"


@attack()
def log_flood(scene):
    """Thousands of requests of every wrong kind, with newlines, escapes and forged records in all names; and what
    they log."""
    forged = "x\n2030-01-01T00:00:00Z ERROR forged: record\r\n\x1b[31mred\x1b[0m\u202e\0"
    quoted = "x%0a2030-01-01T00%3a00%3a00Z%20ERROR%20forged%3a%20record%0d%0a%1b%5b31mred"
    member = scene.cluster.members["frontend"]
    before = member.log_bytes()
    tensor = {"name": forged, "shape": [1, 64], "datatype": forged, "data": [0]}
    body = json.dumps({"id": forged, "inputs": [tensor], "parameters": {forged: forged}}).encode()
    right = {"id": forged, "inputs": [{"name": "image", "shape": [1, 64], "datatype": "FP32", "data": [0] * 64}]}
    asks = [http1.request("POST", f"/v2/models/{quoted}/infer", body), http1.request("POST", INFER, body)]
    asks += [http1.request("POST", INFER, b"\x1b[2J{")]
    asks += [http1.request("POST", f"/v2/repository/models/{quoted}/load", b"{}", JSON)]
    asks += [http1.request("POST", "/v2/trace/setting", json.dumps({forged: forged}).encode(), JSON)]
    path = "/v2/systemsharedmemory/region/x/register"
    asks += [http1.request("POST", path, json.dumps({"key": forged, "byte_size": 1}).encode(), JSON)]
    answered = ask_often(scene, asks, 20)
    scene.ask("POST", INFER, json.dumps(right).encode())
    connection = http2.Connection(scene.grpc)
    for _ in range(100):
        grpc.call(connection, "ModelInfer", grpc.request(grpc.field(grpc.ID, forged), model=forged))
    connection.pump(0.2)
    time.sleep(0.2)
    grown = member.log_bytes() - before
    logged = member.log_text(before)
    # A line a second of each kind is enough to know.
    scene.expect(grown < 100_000, f"{grown} bytes were logged")
    scene.expect("\n2030-01-01T" not in logged and "\x1b[31mred" not in logged, f"a forged record is in {member.log}")
    return f"{answered}; {grown} bytes logged"


@attack()
def loaded_programs(scene):
    """Loads that bring a configuration along by which hosts would start what the client chooses: a program, an
    interpreter, a file of its own, as what runs the model or to be asked what it takes and gives."""
    marker = FOLDER / "started"
    script = FOLDER / "mine.py"
    script.write_text(f"#!/bin/sh\ntouch {marker.resolve()}\n")
    script.chmod(0o755)
    tensors = {kind: [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}] for kind in ("input", "output")}
    parameters = [
        ("process", {"program": f"['touch', '{marker.resolve()}']"}),
        ("process", {"program": str(script.resolve())}),
        ("python", {"python": str(script.resolve())}),
    ]
    configs = [
        {"backend": backend, "parameters": {key: {"string_value": value} for key, value in found.items()}}
        for backend, found in parameters
    ]
    files = [str(script.resolve()), f"../../../{script.name}"]
    configs += [{"backend": backend, "default_model_filename": name} for backend in ("process", "python") for name in files]
    # The same by files that come along.
    code = base64.b64encode(f"#!/bin/sh\ntouch {marker.resolve()}\n".encode()).decode()
    python = base64.b64encode(f"open({str(marker.resolve())!r}, 'w')\n".encode()).decode()
    brought = [{}, {"file:1/model": code}, {"file:1/model.py": python}, {"file:1/model": code, "file:1/model.py": python}]
    configs += [{}, {"backend": "python"}, {"backend": "process"}]
    statuses = set()
    for config, files in itertools.product(configs, brought):
        if not (config or files):
            continue
        for whole in (config, {**config, **tensors}):
            body = json.dumps({"parameters": {"config": json.dumps(whole), **files}}).encode()
            statuses.add(scene.status("POST", "/v2/repository/models/digits/load", body, JSON))
    time.sleep(0.5)
    # As Triton answers loads that fail.
    scene.expect(statuses == {500}, f"loads were answered with {statuses}")
    scene.expect(not marker.exists(), "what the client chose was started")
    return f"{2 * len(configs) * len(brought) - 2} loads: {statuses}"


def number(field, value):
    return grpc.varint(field << 3) + grpc.varint(value)


def adding(weights):
    """An ONNX file that adds 64 numbers, which it says are in another file, to its input."""
    f = grpc.field

    def value(name):
        dims = f(1, f(2, "N")) + f(1, number(1, 64))
        return f(1, name) + f(2, f(1, number(1, 1) + f(2, dims)))

    # With the place and a name as exporters write them: not every engine does without.
    place = [("location", weights), ("offset", "0"), ("length", "256")]
    external = b"".join(f(13, f(1, key) + f(2, value)) for key, value in place)
    initializer = number(1, 1) + number(1, 64) + number(2, 1) + f(8, "w") + external + number(14, 1)
    node = f(1, "x") + f(1, "w") + f(2, "y") + f(4, "Add")
    graph = f(1, node) + f(2, "g") + f(5, initializer) + f(11, value("x")) + f(12, value("y"))
    return number(1, 8) + f(7, graph) + f(8, f(1, "") + number(2, 13))


def bytes_in(folder):
    """Of all files in it; one that is removed meanwhile, or its folder, counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


@attack(limit_s=20.0)
def loaded_files(scene):
    """Loads that bring files along: to other places, with weights from other places, by the gigabyte, ever other ones
    at once, and as no models."""
    load, loaded = "/v2/repository/models/resnet50/load", scene.cluster.loaded

    def bring(files, address=load):
        encoded = {f"file:{path}": base64.b64encode(data).decode() for path, data in files.items()}
        body = json.dumps({"parameters": {"config": "{}", **encoded}}).encode()
        return scene.status("POST", address, body, JSON, timeout=20)

    outside = FOLDER / "outside.bin"
    outside.write_bytes(bytes(256))
    far = ["../" * 5 + outside.name, str(outside.resolve())]
    # That it is the place, and nothing else, that is wrong with the others.
    right = bring({"1/model.onnx": adding("w.data"), "1/w.data": bytes(256)})
    scene.expect(right == 200, f"a model with its weights was answered with {right}")
    wrong = Counter(bring({"1/model.onnx": adding(path)}) for path in far)
    odd = ["../x", "1/../../x", "/tmp/x", "1/.x", "x", "0/x", "1/2/x", "config.pbtxt", "1/\0", "\n/x", f"1/{'x' * 300}"]
    wrong += Counter(bring({path: b"x"}) for path in odd)
    wrong += Counter(bring({"1/model.onnx": bytes([7]) * 10_000}) for _ in range(5))
    wrong += Counter(bring({f"1/{at}": b"" for at in range(257)}) for _ in range(2))
    scene.expect(set(wrong) == {500}, f"loads were answered with {told(wrong)}")
    # Ten gigabytes are not waited for.
    huge = http1.head("POST", load, [*JSON, ("Content-Length", str(10 << 30))])
    refused = [reply.status for reply in http1.replies(scene.http, huge)]
    scene.expect(refused[:1] == [413], f"ten gigabytes were answered with {refused}")
    # More than may be kept, of which nothing is a model, by sixteen at once.
    random = secrets.token_bytes(6 << 20)
    at_once = concurrent.futures.ThreadPoolExecutor(16)
    files = [{"1/model.onnx": bytes([at]) + random} for at in range(32)]
    flood = Counter(at_once.map(bring, files))
    scene.expect(set(flood) <= {None, 429, 500, 503}, f"floods were answered with {told(flood)}")
    kept = bytes_in(loaded)
    scene.expect(kept <= LOADED_BYTES_MAX, f"{kept} bytes are kept")
    address = "/v2/repository/models/resnet50"
    undone = [scene.status("POST", f"{address}/{what}", b"{}", JSON, timeout=20) for what in ("unload", "load")]
    scene.expect(undone == [200, 200], f"the repository's model is not back: {undone}")
    scene.wait_for(lambda: [path.name for path in loaded.iterdir()] == ["lock"], 10)
    left = [path.name for path in loaded.iterdir()]
    scene.expect(left == ["lock"], f"{left} is left in {loaded}")
    return f"{told(wrong)}, then {told(flood)}"


@attack(is_last=True)
def cross_site_posts(scene):
    """What pages of other sites can make a browser send: unloads, settings, shared memory and a drain, as forms and
    as JSON."""
    frontend = scene.cluster.members["frontend"]
    forms = [
        ("Content-Type", kind) for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
    ]
    # As browsers mark them, whatever their type; and by a name that its owner points to this host (DNS rebinding).
    marked = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-site"), ("Origin", "https://evil.example")]
    marked += [("Origin", "null")]
    language = ("Accept-Language", "en")
    rebound = [[("Host", host), language, *JSON] for host in ("evil.example", "evil.example:8000")]
    headers = [[form] for form in forms] + [[mark, *JSON] for mark in marked] + rebound
    headers += [[("Sec-Fetch-Site", "cross-site"), forms[0]]]
    level = b'{"log_verbose_level": 2}'
    routes = [("/v2/repository/models/digits/unload", b"{}"), ("/v2/logging", level), ("/v2/drain", b"{}")]
    routes += [("/v2/trace/setting", b'{"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}')]
    routes += [("/v2/systemsharedmemory/unregister", b"{}")]
    taken = []
    for more in headers:
        for path, body in routes:
            if (status := scene.status("POST", path, body, more)) == 200:
                taken.append(f"{path} with {more[0][0]}: {more[0][1]}")
        preflight = scene.ask("OPTIONS", routes[0][0], headers=[*more, ("Access-Control-Request-Method", "POST")])
        allowed = preflight and any(name.startswith("access-control-") for name in preflight.headers)
        scene.expect(not allowed, f"a preflight with {more} is answered by CORS headers")
    reads = scene.ask("GET", "/v2/models/digits/config", headers=[("Host", "evil.example"), language])
    scene.expect(reads is None or reads.status != 200, "a page can read the configuration by a name of its own (Host)")
    scene.expect(not taken, f"{len(taken)} were obeyed: {'; '.join(taken[:3])}, ..")
    index = scene.ask("GET", "/v2/models/digits/ready", source=http1.CONTROL)
    scene.expect(index and index.status == 200, "digits is not ready any more")
    ready = scene.ask("GET", "/v2/health/ready", source=http1.CONTROL)
    scene.expect(ready and ready.status == 200, "the frontend is not ready any more")
    settings = scene.ask("GET", "/v2/logging")
    scene.expect(settings and settings.json()["log_verbose_level"] == 0, "the log's level has changed")
    # Stock clients name no origin, and send JSON or nothing.
    for more in ([], JSON):
        status = scene.status("POST", "/v2/repository/models/digits/load", b"{}", more)
        scene.expect(status == 200, f"a load as stock clients send it was answered {status}")
    return f"{len(headers) * len(routes)} posts, {len(taken)} obeyed, {frontend.log_bytes()} bytes of log"


@attack()
def compared_fields(scene):
    """Heads of HTTP/2 with 700 hosts and 700 origins, and calls without a body whose tracestate has 10,000 keys: all of
    them could be compared with one another, on the thread that moves packets."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    keys = itertools.islice(itertools.product(letters, letters, letters), 10_000)
    traced = [
        ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"),
        ("tracestate", ",".join(f"{''.join(key)}=b" for key in keys)),
    ]
    blocks = [
        http2.fields("POST", "/v2/logging", ("content-type", "application/json"))
        + 700 * (http2.literal("host", "h") + http2.literal("origin", "o")),
        grpc.head("ModelInfer") + b"".join(http2.literal(name, value) for name, value in traced),
    ]
    connections, asked = [http2.Connection(scene.http) for _ in range(8)], 0
    while connections and not scene.is_over(1.5):
        for connection in list(connections):
            if connection.next_stream // 2 - len(connection.ended) < 8:
                connection.open(blocks[asked % 2])
                asked += 1
            if not connection.pump():
                connections.remove(connection)
    ended = sum(len(connection.ended) for connection in connections)
    scene.expect(ended > 0, "no head was answered")
    return f"{asked} heads, {ended} of them answered on {len(connections)} connections"


@attack()
def wrong_tokens(scene):
    """Thousands of tokens that nobody has, some of 60 KB, in every spelling of the header."""
    values = [
        "Bearer " + "a" * 60_000,
        "Bearer",
        "Bearer  ",
        "bearer x",
        "Basic eDp5",
        "Bearer a b",
        "\t",
        "Bearer \x80\xff",
    ]
    asks = [http1.head("GET", "/v2", [("Authorization", value)]) for value in values]
    asks += [http1.head("GET", "/v2", [("Authorization", "Bearer x")] * 100)]
    return ask_often(scene, asks, 10, 1)
