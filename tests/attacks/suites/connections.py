"""Connections and heads over HTTP/1.1: too many, too slow, too large, ambiguous; and replies that nobody takes in."""

import os
import random
import socket
import struct
import time
from collections import Counter

import http1
from cluster import seven
from http1 import push
from judge import attack, told

LIVE = "/v2/health/live"
INFER = "/v2/models/digits/infer"


@attack()
def idle_connections(scene):
    """1,100 connections on which nothing is said: more than connections_max."""
    connections = http1.connect_many(scene.http, 1100, 2)
    time.sleep(1)
    return f"{sum(map(http1.is_open, connections))} of {len(connections)} open"


@attack()
def half_open_clients(scene):
    """Connections with half a preface, half a TLS hello, half a head, and ones that are reset at once, 3,000 in all."""
    beginnings = [
        b"PRI * HTTP/2.0\r\n\r\nSM",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /v2/health",
        b"POST / HTTP/1.1\r\nHost: x",
    ]
    connections = []
    for index in range(700):
        connections += http1.connect_many(scene.http, 1, 0.3, beginnings[index % 4])
    resets = 0
    while resets < 2300 and not scene.is_over(2):
        for connection in http1.connect_many(scene.http, 1, 0.3):
            # RST instead of FIN.
            connection.setsockopt(1, 13, struct.pack("ii", 1, 0))
            connection.close()
            resets += 1
    return f"{len(connections)} begun, {resets} reset"


def trickle(scene, beginning, byte):
    """900 requests that begin so, and go on with a byte at a time."""
    connections = http1.connect_many(scene.http, 900, 2, beginning)
    while not scene.is_over(2):
        connections = [connection for connection in connections if push(connection, byte, 0.001)]
        time.sleep(0.1)
    return f"{len(connections)} held"


@attack()
def slow_heads(scene):
    """900 heads that come a byte at a time (Slowloris)."""
    return trickle(scene, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a")


@attack()
def slow_bodies(scene):
    """900 bodies that come a byte at a time (R-U-Dead-Yet)."""
    return trickle(scene, http1.head("POST", INFER, [("Content-Length", 30 << 20)]), b" ")


@attack()
def silent_readers(scene):
    """300 connections that ask for /metrics, the index and statistics over and over, and take nothing in."""
    asks = [http1.head("GET", path) for path in ("/metrics", "/v2/models/stats")]
    asks += [http1.request("POST", "/v2/repository/index", b"{}", [("Content-Type", "application/json")])]
    raw = b"".join(asks) * 100
    connections = http1.connect_many(scene.http, 300, 2)
    for connection in connections:
        connection.setsockopt(1, 8, 4096)
    while connections and not scene.is_over(2.5):
        connections = [connection for connection in connections if push(connection, raw, 0.002)]
    return f"{len(connections)} held"


@attack()
def unread_replies(scene):
    """250 connections that ask for /metrics a hundred times at once and take nothing in: what the kernel keeps for them
    is bounded."""
    before = kernel_bytes()
    raw = http1.head("GET", "/metrics") * 100
    connections = http1.connect_many(scene.http, 250, 2)
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        # What a client keeps of its own requests is not the server's doing: four megabytes, if its kernel likes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    peak = 0
    while connections and not scene.is_over(2.5):
        connections = [connection for connection in connections if push(connection, raw, 0.002)]
        peak = max(peak, kernel_bytes() - before)
    # Twice what is sent and unsent, and what each end has received and not read, with room to spare: a megabyte each
    # was found, and three where the send buffer is not bounded.
    bound = 250 * (3 << 19)
    scene.expect(peak < bound, f"the kernel kept {peak >> 20} MiB, expected at most {bound >> 20}")
    return f"{len(connections)} held, {peak >> 20} MiB in the kernel"


def kernel_bytes():
    """What TCP holds on this host, of all sockets."""
    with open("/proc/net/sockstat") as lines:
        words = next(line for line in lines if line.startswith("TCP:")).split()
    return int(words[words.index("mem") + 1]) * os.sysconf("SC_PAGE_SIZE")


@attack()
def half_closed_clients(scene):
    """Forty clients that close their sending half once they have asked, and forty that ask three times before: all are
    answered, and their connections end."""
    raw = http1.request(*seven(), [("Content-Type", "application/json")])
    answered = Counter()
    for asked in [1, 3] * 40:
        with http1.connect(scene.http) as connection:
            connection.sendall(raw * asked)
            connection.shutdown(socket.SHUT_WR)
            heard = b""
            while piece := connection.recv(1 << 16):
                heard += piece
        answered[heard.count(b"HTTP/1.1 200 ") == asked] += 1
    scene.expect(not answered[False], f"{answered[False]} of 80 were not answered in full")
    return f"{answered[True]} answered"


@attack()
def pipelined_requests(scene):
    """A hundred thousand requests on one connection at once, answered one after another."""
    connections = http1.connect_many(scene.http, 8, 1)
    raw = http1.head("GET", LIVE) * 12_500
    alive = [push(connection, raw, 0.3) for connection in connections]
    time.sleep(1)
    return f"{sum(alive)} of {len(connections)} connections took them in"


@attack()
def header_bombs(scene):
    """Heads with 20,000 fields, with one of 10 MB, with a path of 10 MB, folded, and without an end."""
    raw = [
        http1.head("GET", LIVE, [(f"X-{number}", "a") for number in range(20_000)]),
        http1.head("GET", LIVE, [("X-A", "a" * 10_000_000)]),
        http1.head("GET", LIVE, [("X" * 10_000_000, "a")]),
        http1.head("GET", "/" + "a" * 10_000_000),
        http1.head("GET", LIVE, [("X-A", "a" * 100_000)]),
        http1.head("GET", LIVE, [("X-A", "")] * 99_000),
        http1.head("GET", LIVE, [("Cookie", "a=b")] * 5000),
        b"GET / HTTP/1.1\r\nHost: x\r\nX-A: b\r\n" + b" c\r\n" * 500_000,
        b"\r\n" * 5_000_000 + http1.head("GET", LIVE),
        b"A" * 10_000_000,
    ]
    statuses = []
    for bytes_of_head in raw:
        connection = http1.connect(scene.http, timeout=1)
        push(connection, bytes_of_head, 0.5)
        try:
            reply = http1.read_reply(connection.makefile("rb"))
        except (OSError, ValueError):
            reply = None
        statuses.append(reply.status if reply else None)
    # Empty lines before a request may be ignored (RFC 9112, section 2.2).
    refused = statuses[:8] + statuses[9:]
    scene.expect(200 not in refused, f"found {told(refused)}, expected no head of this size to be answered")
    return told(statuses)


# What a proxy before us might read as one request and we as two, or the other way round (RFC 9112, section 11.2).
SMUGGLED = http1.head("GET", "/smuggled")
AMBIGUOUS = {
    "a length and chunks": b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(SMUGGLED))
    + SMUGGLED,
    "two lengths": b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "a list of lengths": b"Content-Length: 0, %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "a signed length": b"Content-Length: +0\r\n\r\n" + SMUGGLED,
    "a length in hex": b"Content-Length: 0x0\r\n\r\n" + SMUGGLED,
    "a length with a space": b"Content-Length : 0\r\n\r\n" + SMUGGLED,
    "an encoding with a space": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "an unknown encoding": b"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    "chunks before an encoding": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two encodings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a folded encoding": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a vertical tab": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a bare carriage return": b"X: a\rContent-Length: 0\r\n\r\n" + SMUGGLED,
    "a field without a name": b": a\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    "a zero in a field": b"X: a\0b\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    "a size that overflows": b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n\r\n" + SMUGGLED,
    "a signed size": b"Transfer-Encoding: chunked\r\n\r\n-0\r\n\r\n" + SMUGGLED,
    "a size in C": b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n" + SMUGGLED,
    "a chunk that is too long": b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk that ends in a bare newline": b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n" + SMUGGLED,
}


@attack()
def request_smuggling(scene):
    """Requests whose ends proxies and servers disagree about: none hides another one, and none keeps its connection."""
    seen = []
    for name, rest in AMBIGUOUS.items():
        found = http1.replies(scene.http, b"POST /first HTTP/1.1\r\nHost: localhost\r\n" + rest, timeout=0.15)
        seen += [reply.status for reply in found]
        scene.expect(len(found) < 2, f"{name}: the hidden request was answered, too ({told(r.status for r in found)})")
    return told(seen)


@attack()
def chunk_extensions(scene):
    """Chunks of a byte with 10 KB of extensions each (CVE-2023-39326), and trailers of megabytes."""
    lines = [b"1;" + b"a" * 10_000 + b"\r\nx\r\n", b"1" + b" " * 10_000 + b"\r\nx\r\n", b"0" * 10_000 + b"1\r\nx\r\n"]
    trailers = b"0\r\n" + b"".join(b"X-%d: a\r\n" % number for number in range(100_000))
    for pieces in [*(line * 1000 for line in lines), trailers]:
        connection = http1.connect(scene.http)
        push(connection, http1.head("POST", INFER, [("Transfer-Encoding", "chunked")]), 0.2)
        push(connection, pieces, 0.5)
    return "4 bodies"


@attack()
def odd_paths(scene):
    """Paths of 60 KB, of escapes and of thousands of segments; names that are no UTF-8, no names or out of the
    folder."""
    names = [
        "%2e%2e%2f" * 5000,
        "%00",
        "%ff%fe",
        "%",
        "%2",
        "%zz",
        "..%2f..%2fetc%2fpasswd",
        "a" * 60_000,
        "%0a%0dX: y",
        "%1b[2J",
    ]
    names += [
        "\x7f",
        "{model}",
        "*",
        "%25" * 10_000,
        "//" * 20_000,
        "/." * 20_000,
        ";" * 1000,
        "digits%00",
        "digits/../digits",
    ]
    raw = [
        http1.head("GET", f"/v2/models/{name}{rest}") for name in names for rest in ("", "/config", "/versions/%2e%2e")
    ]
    loads = [http1.request("POST", f"/v2/repository/models/{name}/load", b"{}") for name in names]
    raw += [
        http1.head("GET", target)
        for target in ("*", "http://evil.example/v2", "a:80", "//x/v2", "/v2?" + "a=b&" * 15_000)
    ]
    statuses = Counter()
    for _ in range(3):
        for bytes_of_request in raw + loads:
            found = http1.replies(
                scene.http, bytes_of_request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), timeout=0.5
            )
            status = found[0].status if found else None
            # A load that fails is answered with 500, as by Triton.
            statuses.update(["load failed" if status == 500 and bytes_of_request in loads else status])
        if scene.is_over(1.5):
            break
    scene.expect(statuses[500] == 0, f"found {told(statuses)}, expected no 500")
    return told(statuses)


@attack()
def odd_protocols(scene):
    """Other methods, versions and protocols; noise; upgrades; and a body after a method that has none."""
    raw = [
        f"{method} {LIVE} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        for method in ("CONNECT", "TRACE", "OPTIONS", "PATCH", "A" * 9000)
    ]
    raw += [f"GET {LIVE} {version}\r\n\r\n".encode() for version in ("HTTP/0.9", "HTTP/9.9", "HTTP/1.0", "HTTP", "")]
    upgrades = [("Upgrade", "h2c"), ("Connection", "Upgrade, HTTP2-Settings"), ("HTTP2-Settings", "AAMAAABkAAQAAP__")]
    raw += [
        http1.head("GET", LIVE, upgrades),
        http1.head("GET", LIVE, [("Upgrade", "websocket"), ("Connection", "Upgrade")]),
    ]
    raw += [
        http1.request("GET", LIVE, b"x" * 100_000),
        b"\x16\x03\x01" + os.urandom(500),
        b"\0" * 5000,
        b"SSH-2.0-x\r\n",
    ]
    raw += [random.randbytes(2000) for _ in range(50)] + [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.randbytes(500)
    ] * 20
    seen = [
        reply.status for bytes_of_request in raw for reply in http1.replies(scene.http, bytes_of_request, timeout=0.05)
    ]
    scene.expect(101 not in seen, "a protocol was changed")
    return told(seen)


@attack()
def expectations(scene):
    """500 clients that wait for `100 Continue`, with and without a length, and then say nothing."""
    heads = [http1.head("POST", INFER, [("Content-Length", 30 << 20), ("Expect", "100-continue")])]
    heads += [http1.head("POST", INFER, [("Transfer-Encoding", "chunked"), ("Expect", "100-continue")])]
    heads += [http1.head("POST", INFER, [("Content-Length", 10**18), ("Expect", "100-continue")])]
    connections = []
    for index in range(500):
        connections += http1.connect_many(scene.http, 1, 0.2, heads[index % 3])
    time.sleep(1)
    return f"{sum(map(http1.is_open, connections))} of {len(connections)} open"
