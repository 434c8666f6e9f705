"""HTTP/2 frame by frame (RFC 9113), with header blocks that use nothing of HPACK but literals (RFC 7541, section
6.2.2).

Replies' header blocks are not decoded: of a status, what their first byte says is enough here."""

import select
import struct
from collections import Counter

import http1

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 0x4, 0x5
FRAME_BYTES_MAX = 16_384
# Indexes of the static table (RFC 7541, appendix A) as a whole field.
STATUSES = {0x88: 200, 0x8C: 400, 0x8D: 404, 0x8E: 500}


def frame_head(length, kind, flags, stream):
    return struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream)


def frame(kind, flags, stream, payload=b""):
    return frame_head(len(payload), kind, flags, stream) + payload


def setting(number, value):
    return struct.pack(">HI", number, value)


def integer(value, prefix_bits, first=0):
    """An integer after the bits of `first` (RFC 7541, section 5.1)."""
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes([first | value])
    encoded, value = [first | limit], value - limit
    while value >= 128:
        encoded.append(value % 128 | 128)
        value //= 128
    return bytes([*encoded, value])


def text(value):
    value = value if isinstance(value, bytes) else value.encode("latin-1")
    return integer(len(value), 7) + value


def literal(name, value):
    """A field that is not to be put into the table."""
    return b"\0" + text(name) + text(value)


def indexed_literal(name, value):
    """A field that is put into the table."""
    return b"\x40" + text(name) + text(value)


def fields(method, path, *more):
    """The block of a request's fields."""
    pseudo = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    return b"".join(literal(name, value) for name, value in [*pseudo, *more])


class Connection:
    """A client's end. Reads only in `pump`, so that it can also read nothing."""

    def __init__(self, address, settings=b"", window=1 << 30, source=http1.ATTACKER, timeout=5.0):
        self.socket = http1.connect(address, source, timeout)
        self.next_stream = 1
        self.inbound = b""
        self.window, self.windows, self.initial_window = 65_535, {}, 65_535
        self.frame_bytes_max = FRAME_BYTES_MAX
        # What came, by kind of frame; statuses and ends, by stream.
        self.frames = Counter()
        self.statuses, self.ended, self.data_bytes = {}, set(), Counter()
        self.is_over = False
        start = PREFACE + frame(SETTINGS, 0, 0, settings)
        self.send(start + (frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", window)) if window else b""))

    def send(self, data):
        """False if the connection has ended, or nothing was taken in for long."""
        if self.is_over:
            return False
        try:
            self.socket.sendall(data)
        except OSError:
            self.is_over = True
        return not self.is_over

    def open(self, block, is_end=True):
        """Sends a request's head, and yields its stream."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.windows[stream] = self.initial_window
        pieces = [block[at : at + FRAME_BYTES_MAX] for at in range(0, len(block), FRAME_BYTES_MAX)]
        kinds = [(HEADERS, END_STREAM if is_end else 0)] + [(CONTINUATION, 0)] * (len(pieces) - 1)
        ends = [0] * (len(pieces) - 1) + [END_HEADERS]
        frames = zip(kinds, ends, pieces, strict=True)
        self.send(b"".join(frame(kind, flags | end, stream, piece) for (kind, flags), end, piece in frames))
        return stream

    def send_data(self, stream, data, is_end=True, until=lambda: False):
        """Sends a body as windows allow. False if it was not all taken in before `until` said so."""
        at, data = 0, memoryview(data)
        while at < len(data):
            room = min(self.frame_bytes_max, self.window, self.windows.get(stream, 0), len(data) - at)
            if room <= 0:
                if self.is_over or until() or stream in self.ended:
                    return False
                self.pump(0.05)
                continue
            at += room
            last = is_end and at == len(data)
            self.window, self.windows[stream] = self.window - room, self.windows[stream] - room
            head = frame_head(room, DATA, END_STREAM if last else 0, stream)
            if not (self.send(head) and self.send(data[at - room : at])):
                return False
        return not is_end or len(data) > 0 or self.send(frame(DATA, END_STREAM, stream))

    def reset(self, stream, code=8):
        return self.send(frame(RST_STREAM, 0, stream, struct.pack(">I", code)))

    def pump(self, seconds=0.0):
        """Takes in what comes, for at most so many seconds without anything. False once the connection has ended."""
        while not self.is_over and select.select([self.socket], [], [], seconds)[0]:
            try:
                data = self.socket.recv(1 << 18)
            except OSError:
                data = b""
            self.is_over |= not data
            self.inbound += data
            self.take_frames()
            seconds = 0.0
        return not self.is_over

    def pump_until(self, done, seconds):
        """Takes in what comes until `done()`, for so many rounds of 50 ms."""
        for _ in range(int(seconds / 0.05)):
            if done() or not self.pump(0.05):
                break
        return done()

    def take_frames(self):
        at = 0
        while len(self.inbound) - at >= 9:
            length = int.from_bytes(self.inbound[at : at + 3], "big")
            if len(self.inbound) - at < 9 + length:
                break
            kind, flags, stream = struct.unpack_from(">BBI", self.inbound, at + 3)
            self.on_frame(kind, flags, stream & 0x7FFF_FFFF, self.inbound[at + 9 : at + 9 + length])
            at += 9 + length
        self.inbound = self.inbound[at:]

    def on_frame(self, kind, flags, stream, payload):
        self.frames[kind] += 1
        if kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == INITIAL_WINDOW_SIZE:
                    change, self.initial_window = value - self.initial_window, value
                    self.windows = {stream: window + change for stream, window in self.windows.items()}
                elif number == MAX_FRAME_SIZE:
                    self.frame_bytes_max = value
            self.send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            increment = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += increment
            elif stream in self.windows:
                self.windows[stream] += increment
        elif kind == HEADERS and stream not in self.statuses:
            self.statuses[stream] = STATUSES.get(payload[0], 0) if payload else 0
        elif kind == DATA:
            self.data_bytes[stream] += len(payload)
        if (kind in (DATA, HEADERS) and flags & END_STREAM) or kind == RST_STREAM:
            self.ended.add(stream)

    def close(self):
        self.socket.close()
