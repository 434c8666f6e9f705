"""HTTP/1.1 on sockets, by hand: most of what is sent here no library would send."""

import json
import socket
import time
from dataclasses import dataclass

# The hostile client has an address of its own, so that what is meant for it alone is seen to hit it alone.
ATTACKER = "127.66.6.6"
# Others: who asks all the time, and who probes health.
CONTROL = "127.0.0.1"
PROBE = "127.0.0.2"
# linux/in.h: the port is chosen at connect, so thousands of connections do not use up the address's ports.
IP_BIND_ADDRESS_NO_PORT = 24


@dataclass
class Reply:
    """An answer. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)


def connect(address, source=ATTACKER, timeout=5.0):
    """A TCP connection that sends at once."""
    connection = socket.socket()
    connection.settimeout(timeout)
    connection.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        connection.bind((source, 0))
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def request(method, path, body=b"", headers=()):
    """The bytes of a request with a length. `headers` are pairs, and are sent as they are."""
    return head(method, path, [("Content-Length", len(body)), *headers]) + body


def head(method, path, headers=()):
    """The bytes of a request's head."""
    names = {name.lower() for name, _ in headers}
    lines = [f"{method} {path} HTTP/1.1", *([] if "host" in names else ["Host: localhost"])]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")


def chunk(data):
    """One chunk of a chunked body; none is its end."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def read_reply(stream):
    """The next reply of a buffered stream; `None` if the connection has ended before it."""
    status_line = stream.readline(65537)
    if not status_line.startswith(b"HTTP/1."):
        return None
    headers = {}
    while (line := stream.readline(65537).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    if "chunked" in headers.get("transfer-encoding", ""):
        body = b""
        while (size := int(stream.readline(64) or b"0", 16)) > 0:
            body += stream.read(size)
            stream.readline(64)
        stream.readline(64)
    else:
        body = stream.read(int(headers.get("content-length", 0)))
    return Reply(int(status_line.split()[1]), headers, body)


def ask(address, method, path, body=b"", headers=(), source=ATTACKER, timeout=5.0):
    """One request on a connection of its own. Raises `OSError` if there is no answer."""
    with connect(address, source, timeout) as connection:
        connection.sendall(request(method, path, body, [*headers, ("Connection", "close")]))
        reply = read_reply(connection.makefile("rb"))
    if reply is None:
        raise ConnectionResetError("closed without an answer")
    return reply


def replies(address, raw, timeout=1.0, source=ATTACKER):
    """Sends bytes, and yields all that is answered within `timeout` seconds or until the connection ends."""
    found = []
    try:
        with connect(address, source, timeout) as connection:
            connection.sendall(raw)
            stream = connection.makefile("rb")
            while (reply := read_reply(stream)) is not None:
                found.append(reply)
    except (OSError, ValueError):
        pass
    return found


def connect_many(address, count, seconds, first=b""):
    """Up to `count` connections within so many seconds, each of which says `first`."""
    connections, until = [], time.monotonic() + seconds
    while len(connections) < count and time.monotonic() < until:
        try:
            connection = connect(address, timeout=0.5)
            connections.append(connection)
            if first:
                connection.sendall(first)
        except OSError:
            pass
    return connections


def push(connection, data, seconds=0.05):
    """Sends what the peer takes in within so many seconds. False if the connection has ended."""
    connection.settimeout(seconds)
    try:
        connection.sendall(data)
    except TimeoutError:
        pass
    except OSError:
        return False
    return True


def is_open(connection):
    """Whether the peer still has this connection; what it has sent is lost."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
