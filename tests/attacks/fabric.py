"""What members say to each other: the bootstrap over TCP (transport/src/bootstrap.rs), and RoCEv2 packets over UDP."""

import hashlib
import hmac
import os
import socket
import struct
import zlib

import http1

MAGIC = b"downbeat"
PREFACE_BYTES = len(MAGIC) + 2 + 8 + 32
# Of the bootstrap's messages.
PROOF, OFFER, ANSWER, READY, HEARTBEAT, CLOSE, RELEASE = range(7)
# BTH opcodes of the reliable connection (IBTA table 38).
SEND_ONLY, WRITE_ONLY, READ_REQUEST, ACKNOWLEDGE, SEND_ONLY_INVALIDATE = 0x04, 0x0A, 0x0C, 0x11, 0x17


def preface(versions, nonce=None):
    return MAGIC + struct.pack(">HQ", *versions) + (nonce or os.urandom(32))


def versions_of(address):
    """The versions of a server's bootstrap and of its wire: it says so to whoever comes with another bootstrap."""
    with http1.connect(address) as connection:
        connection.sendall(preface((0, 0)))
        return struct.unpack_from(">HQ", read_exactly(connection, PREFACE_BYTES), len(MAGIC))


def message(kind, content=b""):
    encoded = struct.pack("<I", kind) + content
    return struct.pack(">I", len(encoded)) + encoded


def sized(data):
    return struct.pack("<Q", len(data)) + data


# Of a member that no scheduler has named, and that obeys nobody: its token, and the era and epoch of nobody.
STANDING = struct.pack("<QQIH", 0, 0, 0, 0)


NAME = b"stranger"


def frontend_hello(link_address, name=NAME):
    """A `SchedulerHello::Frontend` that is whole (proto/src/frontend_to_scheduler.rs)."""
    return struct.pack("<I", 0) + sized(name) + sized(link_address) + b"\0" + STANDING


def backend_hello(gpus, models=0, more=0, name=NAME):
    """A `SchedulerHello::Backend` without models that says how many of them follow, here or later."""
    return struct.pack("<I", 1) + sized(name) + struct.pack("<IBQI", gpus, 0, models, more) + b"\0" + STANDING + b"\0"


def link_hello(backend, frontend, epoch, link_pass):
    """A `LinkHello`, of a link that is newer than any (proto/src/backend_to_frontend.rs)."""
    return struct.pack("<IIIIHQ", backend, frontend, (1 << 32) - 2, *epoch, link_pass)


def read_exactly(connection, count):
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("closed")
        data += piece
    return data


def read_message(connection):
    """A message's kind and content."""
    encoded = read_exactly(connection, struct.unpack(">I", read_exactly(connection, 4))[0])
    return struct.unpack_from("<I", encoded)[0], encoded[4:]


def join(address, versions, secret, hello, packets):
    """Joins as a member that knows the secret and says what it likes. Yields the connection and the server's answer
    to the offer: its kind and content."""
    connection = http1.connect(address)
    nonce = os.urandom(32)
    connection.sendall(preface(versions, nonce))
    theirs = read_exactly(connection, PREFACE_BYTES)
    label, wire = b"downbeat bootstrap %d, client" % versions[0], struct.pack(">Q", versions[1])
    proven = label + nonce + wire + theirs[-32:] + wire
    proof = hmac.new(secret.encode(), proven, hashlib.sha256).digest()
    connection.sendall(message(PROOF, proof))
    kind, content = read_message(connection)
    if kind == PROOF:
        host, port = packets
        where = struct.pack("<II4sH", 0, 0, socket.inet_aton(host), port)
        queue_pair = struct.pack("<IIHBHI", 0x1234, 0x5678, 4096, 16, 256, 1 << 20)
        name, ring = bytes(81), bytes(16)
        connection.sendall(message(OFFER, os.urandom(8) + where + queue_pair + name + ring + sized(hello)))
        kind, content = read_message(connection)
        while kind == HEARTBEAT:
            kind, content = read_message(connection)
    return connection, kind, content


def packet(source, destination, opcode, queue_pair, psn, rest=b"", is_whole=True, pad=0):
    """A RoCEv2 packet as it lies in UDP, with the invariant CRC that holds between these two addresses. The last `pad`
    bytes of the rest make it a multiple of four."""
    bth = struct.pack(">BBHII", opcode, pad << 4, 0xFFFF, queue_pair, 0x8000_0000 | psn) + rest
    udp_bytes = 8 + len(bth) + 4
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(destination[0])
    # RoCEv2 annex A17.3.3: what routers may change counts as ones, as does a local routing header that is not there.
    ip = struct.pack(">BBHHHBBH", 0x45, 0xFF, 20 + udp_bytes, 0, 0x4000, 0xFF, 17, 0xFFFF) + addresses
    udp = struct.pack(">HHHH", source[1], destination[1], udp_bytes, 0xFFFF)
    covered = b"\xff" * 8 + ip + udp + bth[:4] + b"\xff" + bth[5:]
    return bth + struct.pack("<I", zlib.crc32(covered) ^ (0 if is_whole else 1))


def datagram(source, destination, payload):
    """An IPv4 datagram for a raw socket, from whatever address it says."""
    udp = struct.pack(">HHHH", source[1], destination[1], 8 + len(payload), 0) + payload
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(destination[0])
    # The kernel fills in the length and the checksum.
    return struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0x4000, 64, 17, 0) + addresses + udp
