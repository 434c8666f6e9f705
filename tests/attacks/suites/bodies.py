"""Bodies of HTTP requests: in pieces, compressed, nested, repeated. Memory and time go with what is on the wire, or the
request is refused."""

import gzip
import json
import os
import struct
import time
import zlib

import http1
from cluster import PATIENCE_US
from http1 import chunk
from judge import attack, told

INFER = "/v2/models/digits/infer"
MB = 1 << 20
GZIP = ("Content-Encoding", "gzip")
CHUNKED = ("Transfer-Encoding", "chunked")


# What repeats itself becomes a thousandth, and takes half the time of the best level.
LEVEL = 6


def compressed(text):
    return gzip.compress(text.encode() if isinstance(text, str) else text, LEVEL)


def ask_all(scene, requests, seconds):
    """Sends each request on a connection of its own, and yields the statuses that came within so many seconds.
    Their last bytes are held back until all are there, so that all are to be answered at once."""
    connections = []
    for raw in requests:
        try:
            connection = http1.connect(scene.http, timeout=6)
            connection.sendall(memoryview(raw)[:-1])
        except OSError:
            connection = None
        connections.append(connection)
    statuses, until = [], time.monotonic() + seconds
    for connection, raw in zip(connections, requests):
        if connection:
            http1.push(connection, raw[-1:])
    for connection in connections:
        try:
            connection.settimeout(max(0.05, until - time.monotonic()))
            statuses.append(http1.read_reply(connection.makefile("rb")).status)
        except (OSError, AttributeError):
            statuses.append(None)
    # Refusals are answers. With none the frontend is silent, or the attack is none.
    scene.expect(any(statuses), f"none of {len(requests)} requests was answered")
    return statuses


@attack(limit_s=10)
def zero_byte_inputs(scene):
    """A thousand binary inputs of no bytes, before a body in 250,000 chunks of one byte."""
    tensor = {"name": "image", "shape": [1, 64], "datatype": "FP32", "parameters": {"binary_data_size": 0}}
    header = json.dumps({"inputs": [tensor] * 1000}).encode()
    length = ("Inference-Header-Content-Length", len(header))
    body = chunk(header) + chunk(b"x") * 250_000 + chunk(b"")
    raw = http1.head("POST", INFER, [CHUNKED, length]) + body
    return told(ask_all(scene, [raw], 4))


@attack()
def one_byte_chunks(scene):
    """Four bodies of a megabyte in chunks of one byte, none of which ends."""
    piece = chunk(b" ") * 10_000
    connections = http1.connect_many(scene.http, 4, 1, http1.head("POST", INFER, [CHUNKED]))
    for _ in range(100):
        if scene.is_over(2):
            break
        connections = [connection for connection in connections if http1.push(connection, piece, 0.2)]
    time.sleep(0.2)
    return f"{len(connections)} held"


def send_apart(scene, seconds):
    """Four bodies of which each byte comes in a segment of its own, with a length or in chunks. Between two bytes of
    one there is one of each other, so that they are also read apart."""
    heads = [http1.head("POST", INFER, [("Content-Length", 10_000_000)]), http1.head("POST", INFER, [CHUNKED])]
    pieces = zip(heads * 2, [b" ", chunk(b" ")] * 2)
    ways = [(http1.connect_many(scene.http, 1, 1, head)[0], piece) for head, piece in pieces]
    sent, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        # Bodies in more chunks than Triton takes are answered and cut.
        ways = [way for way in ways if http1.push(*way, 0.2)]
        sent += len(ways)
    grown = scene.cluster.members["frontend"].growth()
    scene.expect(len(ways) >= 2, f"{len(ways)} of 4 bodies went on, expected those with a length")
    # What it takes to keep a byte is bounded, however it came.
    scene.expect(grown < 16 * MB + 100 * sent, f"the frontend grew by {grown >> 20} MB for {sent} bytes")
    return f"{sent} bytes sent"


@attack()
def one_byte_segments(scene):
    """Four bodies, each byte of which comes in a segment of its own."""
    return send_apart(scene, 2)


@attack(is_slow=True, limit_s=20)
def one_byte_segments_for_long(scene):
    """As above, for the ten seconds that a body may take."""
    return send_apart(scene, 9)


@attack(limit_s=12)
def long_ids(scene):
    """Forty requests with an id of 30 MiB, which are 30 KB on the wire; ids are kept for /debug/requests."""
    tensor = {"name": "image", "shape": [1, 64], "datatype": "FP32", "data": [0] * 64}
    request = {"id": "i" * (30 * MB), "parameters": {"timeout": PATIENCE_US}, "inputs": [tensor]}
    raw = http1.request("POST", INFER, compressed(json.dumps(request)), [GZIP])
    statuses = []
    while len(statuses) < 40 and not scene.is_over(5):
        statuses += ask_all(scene, [raw] * 4, 3)
    return told(statuses)


@attack()
def json_objects(scene):
    """2.2 million JSON objects among the parameters: trees of 1.4 GB from 40 KB on the wire."""
    body = '{"parameters": {"a": [' + '{"a":1},' * 2_200_000 + '{}]}, "inputs": []}'
    return told(ask_all(scene, [http1.request("POST", INFER, compressed(body), [GZIP])], 4))


@attack()
def deep_json(scene):
    """A hundred thousand nested arrays and objects, wherever JSON is read: whoever recurses overflows its stack."""
    arrays = "[" * 100_000 + "]" * 100_000
    objects = '{"a":' * 100_000 + "1" + "}" * 100_000
    requests = []
    for nested in (arrays, objects, "[" * 1_000_000):
        in_data = '{"inputs": [{"name": "image", "shape": [1, 64], "datatype": "FP32", "data": %s}]}' % nested
        for path, body in [
            (INFER, in_data),
            (INFER, f'{{"parameters": {{"a": {nested}}}, "inputs": []}}'),
            (INFER, f'{{"unknown": {nested}, "inputs": []}}'),
            (INFER, nested),
            ("/v2/logging", nested),
            ("/v2/repository/index", f'{{"ready": {nested}}}'),
            ("/v2/trace/setting", f'{{"trace_rate": {nested}}}'),
        ]:
            requests.append(http1.request("POST", path, body.encode(), [("Content-Type", "application/json")]))
    statuses = ask_all(scene, requests, 4)
    scene.expect(200 not in statuses, f"nonsense was answered: {told(statuses)}")
    return told(statuses)


@attack()
def many_keys(scene):
    """400,000 keys that differ in their last digits, and as many that do not differ at all."""
    distinct = ",".join(f'"key{number:07d}":{number}' for number in range(400_000))
    same = ",".join(['"timeout":1000000'] * 400_000)
    bodies = [f'{{"parameters": {{{keys}}}, "inputs": []}}'.encode() for keys in (distinct, same)]
    bodies += [f"{{{keys}}}".encode() for keys in (distinct, same)]
    requests = [http1.request("POST", INFER, body) for body in bodies]
    settings = [http1.request("POST", "/v2/logging", body) for body in bodies[2:]]
    return told(ask_all(scene, [*requests, *settings], 4))


@attack()
def repeated_outputs(scene):
    """An output asked for 200,000 times: an answer of gigabytes to a request of 6 MB."""
    tensor = {"name": "image", "shape": [1, 64], "datatype": "FP32", "data": [0] * 64}
    request = {"inputs": [tensor], "outputs": [{"name": "probabilities"}] * 200_000}
    status = scene.status("POST", INFER, json.dumps(request).encode())
    scene.expect(status == 400, f"it was answered by {status}")
    return told([status])


@attack()
def odd_numbers(scene):
    """Shapes whose product overflows, a million dimensions, numbers of five million digits, and other numbers that
    are none."""
    tensor = '{"inputs": [{"name": "image", "shape": %s, "datatype": "FP32", "data": %s}]}'
    zeros = str([0] * 64)
    shapes = [
        "[1, 18446744073709551615]",
        "[4294967296, 4294967296]",
        "[0, 64]",
        "[0]",
        "[]",
        "[-1, 64]",
        "[1e3, 64]",
        "7",
    ]
    shapes += ["[" + "1," * 1_000_000 + "64]", "[1, 64.0]", '["1", 64]', "[99999999999999999999999, 64]"]
    numbers = [
        "1" * 5_000_000,
        "0." + "0" * 5_000_000 + "1",
        "1e" + "9" * 100_000,
        "1e-400",
        "NaN",
        "-Infinity",
        "0x10",
        "1e999",
    ]
    rest = "[" + "0," * 63
    bodies = [tensor % (shape, zeros) for shape in shapes] + [
        tensor % ("[1, 64]", f"{rest}{number}]") for number in numbers
    ]
    bodies += [tensor % ("[1, 64]", '[["%s"]]' % ("a" * 1_000_000)), tensor % ("[1, 64]", "[" * 60 + "1" + "]" * 60)]
    timeouts = ["-1", "1e18", "9223372036854775807", "18446744073709551616", "[]", '"1"']
    bodies += [f'{{"parameters": {{"timeout": {value}}}, "inputs": []}}' for value in timeouts]
    statuses = ask_all(scene, [http1.request("POST", INFER, body.encode()) for body in bodies], 4)
    # Zeros that are written oddly, and NaN and -Infinity, which are values of FP32 that Triton's clients send.
    scene.expect(statuses.count(200) <= 4, f"nonsense was answered: {told(statuses)}")
    scene.expect(None not in statuses and 500 not in statuses, f"found {told(statuses)}, expected a refusal of each")
    return told(statuses)


@attack(limit_s=10)
def large_json(scene):
    """Ten bodies of 29 MiB of JSON at once, all in order: what parses them is not to keep packets waiting."""
    rows, row = 64, 3 * 224 * 224
    data = b"10," * (rows * row - 1) + b"10"
    start = b'{"parameters": {"timeout": %d}, "inputs": [{"name": "image", "shape": [%d, 3, 224, 224], ' % (
        PATIENCE_US,
        rows,
    )
    raw = http1.request("POST", "/v2/models/resnet50/infer", start + b'"datatype": "UINT8", "data": [' + data + b"]}]}")
    return told(ask_all(scene, [raw] * 10, 4))


@attack(limit_s=12)
def decompression_bombs(scene):
    """Thirty bodies of 31 MiB from 31 KB each, one of a gigabyte, and a small one with 10 MB of empty gzip members."""
    bombs = [compressed(b" " * (31 * MB))] * 30
    deflated = zlib.compress(bytes(31 * MB), LEVEL)
    endless, empty = compressed(bytes(64 * MB)) * 16, compressed(b"") * 400_000
    requests = [http1.request("POST", INFER, bomb, [GZIP]) for bomb in [*bombs, endless, empty]]
    requests += [http1.request("POST", INFER, deflated, [("Content-Encoding", "deflate")])]
    return told(ask_all(scene, requests, 4))


@attack()
def chained_encodings(scene):
    """Encodings of encodings, and ones that are not what they say."""
    twice = compressed(compressed(bytes(300 * MB // 10)))
    names = [
        "gzip, gzip",
        "gzip,gzip",
        "identity, gzip",
        "gzip;q=1",
        "gzip\t,\tdeflate",
        "br",
        ",".join(["gzip"] * 1000),
    ]
    requests = [http1.request("POST", INFER, twice, [("Content-Encoding", name)]) for name in names]
    requests += [http1.request("POST", INFER, twice, [GZIP, GZIP])]
    requests += [http1.request("POST", INFER, b"\x1f\x8b" + os.urandom(1000), [GZIP])]
    statuses = ask_all(scene, requests, 3)
    scene.expect(set(statuses) <= {400, 415}, f"found {told(statuses)}, expected 400 and 415 only")
    return told(statuses)


@attack()
def unfinished_bodies(scene):
    """Sixteen bodies of 32 MiB without their last bytes: together all but 64 bytes of what all bodies may be."""
    length = 32 * MB
    connections = http1.connect_many(scene.http, 16, 1, http1.head("POST", INFER, [("Content-Length", length)]))
    piece, held = b" " * (length - 4), 0
    for connection in connections:
        held += http1.push(connection, piece, 2)
    time.sleep(1)
    return f"{held} held"


@attack()
def shared_memory_named_again(scene):
    """One input of 17 MB in shared memory, named a hundred times in 16 KB: it is read once at most."""
    rows, row = 64, 3 * 299 * 299
    tensor = {"name": "image", "shape": [rows, 3, 299, 299], "datatype": "UINT8"}
    tensor["parameters"] = {"shared_memory_region": "attack", "shared_memory_byte_size": rows * row}
    with Region("attacked", rows * row) as region:
        registered = region.register(scene, "attack")
        request = json.dumps({"inputs": [tensor] * 100}).encode()
        statuses = ask_all(scene, [http1.request("POST", "/v2/models/inception_resnet_v2/infer", request)] * 3, 4)
        scene.expect(
            registered != 200 or 200 not in statuses, f"an input that is there twice was taken: {told(statuses)}"
        )
        scene.ask("POST", "/v2/systemsharedmemory/unregister", b"{}", JSON)
        return f"registered {registered}; {told(statuses)}"


@attack()
def shared_memory_of_others(scene):
    """Another client looks at, reads, takes over and unregisters what somebody has registered."""
    other = {"source": "127.66.6.7"}
    paths = "/v2/systemsharedmemory/region/owned/"
    with Region("attacked-owned", 256) as region:
        if (registered := region.register(scene, "owned")) != 200:
            return f"registered {registered}"
        looks = [
            scene.ask("GET", "/v2/systemsharedmemory/status", **other),
            scene.ask("GET", paths + "status", **other),
        ]
        seen = any(reply and b"attacked-owned" in reply.body for reply in looks)
        scene.expect(not seen, "another client sees the region")
        tensor = {"name": "image", "shape": [1, 64], "datatype": "FP32"}
        tensor["parameters"] = {"shared_memory_region": "owned", "shared_memory_byte_size": 256}
        request = json.dumps({"parameters": {"timeout": PATIENCE_US}, "inputs": [tensor]}).encode()
        scene.expect(scene.status("POST", INFER, request, **other) != 200, "another client reads the region")
        for path in (paths + "unregister", "/v2/systemsharedmemory/unregister"):
            scene.status("POST", path, b"{}", JSON, **other)
        found = scene.status("POST", INFER, request)
        scene.expect(found == 200, f"the owner was answered {found} after another client had unregistered everything")
        scene.ask("POST", "/v2/systemsharedmemory/unregister", b"{}", JSON)


@attack()
def shared_memory_odd_files(scene):
    """Keys that name a pipe, a folder, a link out of the folder, a file that is not there, and paths out of it."""
    folder = f"/dev/shm/attacked-folder-{os.getpid()}"
    made = [f"/dev/shm/attacked-{kind}-{os.getpid()}" for kind in ("pipe", "link", "loop")]
    os.mkdir(folder)
    os.mkfifo(made[0])
    os.symlink("/etc/passwd", made[1])
    os.symlink(made[2], made[2])
    try:
        keys = [os.path.basename(path) for path in [folder, *made]]
        keys += ["../../etc/passwd", "..", ".", "", "/", "//", "a/b", "\0", "a" * 300, "nothing-there", "\n"]
        statuses = []
        for key in keys:
            body = json.dumps({"key": key, "offset": 0, "byte_size": 64}).encode()
            path = "/v2/systemsharedmemory/region/odd/register"
            statuses.append(scene.status("POST", path, body, JSON, timeout=1.5))
            scene.expect(statuses[-1] is not None and 400 <= statuses[-1] < 500, f"{key!r} was answered {statuses[-1]}")
        return told(statuses)
    finally:
        os.rmdir(folder)
        for path in made:
            os.unlink(path)


JSON = [("Content-Type", "application/json")]


class Region:
    """A file of shared memory, for as long as it is used."""

    def __init__(self, name, size):
        self.key, self.size = f"{name}-{os.getpid()}", size

    def __enter__(self):
        with open(f"/dev/shm/{self.key}", "wb") as file:
            file.truncate(self.size)
        return self

    def __exit__(self, *_):
        os.unlink(f"/dev/shm/{self.key}")

    def register(self, scene, name):
        """The status of registering it under a name."""
        body = json.dumps({"key": "/" + self.key, "offset": 0, "byte_size": self.size}).encode()
        return scene.status("POST", f"/v2/systemsharedmemory/region/{name}/register", body, JSON)


def jpeg(side, scans):
    """A progressive JPEG of one component, whose scans have a byte each."""
    tables = b"".join(b"\xff\xc4\0\x14" + bytes([number, 1]) + bytes(16) for number in (0, 16))
    frame = b"\xff\xc2\0\x0b\x08" + struct.pack(">HH", side, side) + b"\x01\x01\x11\0"
    first, again = (b"\xff\xda\0\x08\x01\x01\0" + band + b"\0" for band in (b"\0\0\0", b"\x01\x3f\0"))
    return b"\xff\xd8\xff\xdb\0\x43\0" + b"\x01" * 64 + frame + tables + first + again * (scans - 1) + b"\xff\xd9"


def png(width, height):
    """A grey picture of zeros, which compresses to next to nothing."""

    def part(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((width + 1) * height), LEVEL)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", pixels) + part(b"IEND", b"")


@attack()
def picture_bombs(scene):
    """Sixty pictures of 60 million pixels, 60 KB each, ones that are gone over 90 times, then ones whose sizes are lies."""
    picture = png(8000, 7500)
    image = ("Content-Type", "image/png")
    scans = http1.request("POST", f"{INFER}?timeout={PATIENCE_US}", jpeg(8000, 90), [("Content-Type", "image/jpeg")])
    requests = [scans] * 20
    requests += [http1.request("POST", f"{INFER}?timeout={PATIENCE_US}", picture, [image])] * 60
    for size in ((1 << 31) - 1, 100_000, 16_384):
        lie = bytearray(png(1, 1))
        lie[16:24] = struct.pack(">II", size, size)
        lie[29:33] = struct.pack(">I", zlib.crc32(lie[12:29]))
        requests.append(http1.request("POST", INFER, bytes(lie), [image]))
    return told(ask_all(scene, requests, 4))
