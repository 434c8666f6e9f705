"""gRPC: messages that are small on the wire and large in memory, and streams that never end."""

import struct
import time

import grpc
import http2
from grpc import field
from judge import attack
from suites.bodies import png

MB = 1 << 20


def send_at_once(scene, message, times, seconds):
    """The same compressed message on connections of its own each; tells what became of the calls."""
    until = lambda: scene.is_over(seconds)
    connections = [http2.Connection(scene.grpc) for _ in range(times)]
    block, message = grpc.head("ModelInfer", compress=True), grpc.framed(message, compress=True)
    for connection in connections:
        connection.send_data(connection.open(block, is_end=False), message, until=until)
    answered, refused, still_open = grpc.outcomes(connections, seconds)
    return f"{len(message) // 1000} KB on the wire; {answered} answered, {refused} refused, {still_open} open"


@attack()
def grpc_empty_inputs(scene):
    """A message of 3.5 million empty inputs, 7 KB on the wire."""
    return send_at_once(scene, grpc.request(field(grpc.INPUTS, b"") * 3_500_000), 1, 3)


@attack(limit_s=12)
def grpc_wide_contents(scene):
    """Messages of 30 million elements that take one byte each on the way and eight in memory, or more."""
    elements = field(grpc.INT64_CONTENTS, bytes(30 * MB))
    wide = grpc.request(
        field(grpc.INPUTS, grpc.tensor("image", "INT64", [1, 64], field(grpc.INPUT_CONTENTS, elements)))
    )
    strings = field(grpc.BYTES_CONTENTS, b"") * (15 * MB)
    many = grpc.request(field(grpc.INPUTS, grpc.tensor("image", "BYTES", [1, 64], field(grpc.INPUT_CONTENTS, strings))))
    shape = grpc.request(field(grpc.INPUTS, field(grpc.INPUT_SHAPE, bytes(30 * MB))))
    return "; ".join(send_at_once(scene, message, 2, 1) for message in (wide, many, shape))


@attack(limit_s=12)
def grpc_parameters(scene):
    """Messages with 200,000 parameters, and with three million outputs and raw contents."""
    keys = b"".join(field(grpc.PARAMETERS, field(1, b"%06x" % number)) for number in range(200_000))
    raw = field(grpc.RAW, b"") * 3_000_000
    outputs = field(grpc.OUTPUTS, b"") * 3_000_000
    return "; ".join(send_at_once(scene, grpc.request(part), 1, 1) for part in (keys, raw, outputs))


@attack(limit_s=12)
def grpc_pictures(scene):
    """Sixty clients with a picture of 30 MiB each, which are 32 KB on the wire."""
    picture = png(16, 16) + bytes(30 * MB)
    raw = field(grpc.RAW, struct.pack("<I", len(picture)) + picture)
    message = grpc.request(field(grpc.INPUTS, grpc.tensor("image", "BYTES", [1])), raw)
    return send_at_once(scene, message, 60, 3)


@attack()
def grpc_nested_groups(scene):
    """Unknown fields: a hundred thousand groups within each other, lengths that lie, varints that never end."""
    bodies = [b"\x7b" * 100_000, b"\x7b" * 100_000 + b"\x7c" * 100_000, b"\xff" * 100_000]
    bodies += [grpc.varint(100 << 3 | 2) + b"\xff\xff\xff\xff\x0f", field(grpc.INPUTS, b"\x0a\xff\xff\xff\xff\x0f")]
    connection = http2.Connection(scene.grpc)
    for body in bodies:
        grpc.call(connection, "ModelInfer", grpc.request(body))
    answered, refused, still_open = grpc.outcomes([connection], 1)
    scene.expect(answered == 0 and still_open == 0, f"{answered} answered, {still_open} open, expected neither")
    return f"{refused} refused"


@attack(limit_s=12)
def grpc_failed_messages(scene):
    """One stream whose messages fail until 512 MiB were sent, and then stays open: other clients still have room."""
    connection = http2.Connection(scene.grpc)
    stream = connection.open(grpc.head("ModelStreamInfer"), is_end=False)
    failing = lambda length: grpc.framed(grpc.request(field(grpc.RAW, bytes(length - 64)), model="nothing"))
    message, sent = failing(8 * MB), 0
    while sent < 512 * MB - 100 and not scene.is_over(6):
        # The last one leaves room for hardly any other body.
        message = message if sent + len(message) < 512 * MB else failing(512 * MB - 100 - sent)
        if not connection.send_data(stream, message, is_end=False, until=lambda: scene.is_over(6)):
            break
        sent += len(message) if sent < 504 * MB else 8 * MB
        connection.pump()
    connection.pump(0.2)
    # Idle, with all of that on its account.
    time.sleep(0.7)
    return f"{sent >> 20} MiB sent, {'open' if connection.pump() and stream not in connection.ended else 'ended'}"


@attack(limit_s=12)
def grpc_unfinished_messages(scene):
    """Sixteen messages of 32 MiB without their last byte: together all but 64 bytes of what all bodies may be."""
    message = grpc.framed(grpc.request(field(grpc.RAW, bytes(32 * MB - 21))))[:-1]
    connections = [http2.Connection(scene.grpc) for _ in range(16)]
    taken = 0
    for connection in connections:
        stream = connection.open(grpc.head("ModelStreamInfer"), is_end=False)
        taken += connection.send_data(stream, message, is_end=False, until=lambda: scene.is_over(5))
    time.sleep(0.7)
    return f"{taken} taken in, {sum(connection.pump() for connection in connections)} connections open"


@attack()
def grpc_idle_streams(scene):
    """64 connections with 256 streams each on which nothing is said."""
    block = grpc.head("ModelStreamInfer")
    connections, opened = [], 0
    while len(connections) < 64 and not scene.is_over(3):
        connections.append(http2.Connection(scene.grpc, timeout=0.5))
        for _ in range(256):
            connections[-1].open(block, is_end=False)
    time.sleep(1.5)
    for connection in connections:
        connection.pump()
        opened += len(connection.windows) - len(connection.ended)
    return f"{opened} streams open on {sum(not connection.is_over for connection in connections)} connections"
