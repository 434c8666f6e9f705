"""The fabric's own ports: strangers who do not know the secret, packets that nobody sent, and a member that lies."""

import os
import random
import re
import socket
import struct
import threading
import time

import http1
from judge import Skipped, attack

import fabric
from fabric import ACKNOWLEDGE, READ_REQUEST, SEND_ONLY, SEND_ONLY_INVALIDATE, WRITE_ONLY

# Who floods; another address, as these ports are not for clients.
STRANGER = "127.66.6.8"


def start_newcomer(scene, name="newcomer", **more):
    """A backend that comes in the middle of it; its models need no measuring."""
    offer = (1, ("resnet50",))
    return scene.cluster.start_backend(60, name, offer, **more)


def expect_joined(scene, newcomer, seconds):
    """Whether it joins and reaches the frontend as its log says."""
    began = time.monotonic()
    joined = scene.wait_for(lambda: " linked" in newcomer.log_text(), seconds)
    # It tries again, and may be lucky; a member is not to need luck.
    scene.expect("connections_max" not in newcomer.log_text(), "a new backend was refused because of strangers")
    text = "joined, but is not linked" if " joined" in newcomer.log_text() else "has not joined"
    scene.expect(joined, f"a new backend {text} after {seconds} s")
    newcomer.process.kill()
    return f"a new backend was linked after {time.monotonic() - began:.1f} s" if joined else ""


# How long a stranger may stay (transport/src/bootstrap.rs), and how long it takes until they are there.
STAY_S, FILL_S = 2.0, 2.5


class Flood(threading.Thread):
    """Connections from strangers, so many a second, each of which says `first` and then nothing. They begin slowly,
    so that later one or the other has to go at any time, and not all of them at once."""

    def __init__(self, address, each_second, first=b"", source=STRANGER):
        super().__init__(daemon=True)
        self.address, self.each_second, self.first, self.source = address, each_second, first, source
        self.count = 0

    def run(self):
        held, due = [], time.monotonic()
        slow_until = due + STAY_S
        while True:
            each_second = self.each_second if due > slow_until else 70
            due = max(due + 1 / each_second, time.monotonic() - 0.1)
            try:
                connection = http1.connect(self.address, self.source, 0.2)
                connection.send(self.first)
                held.append(connection)
                self.count += 1
            except OSError:
                pass
            # Long after whoever waits for a preface has given up.
            for connection in held[:-4000]:
                connection.close()
            del held[:-4000]
            time.sleep(max(0.0, due - time.monotonic()))


def newcomer_in_flood(scene, floods):
    """Whether a backend gets in where strangers keep coming, once as many are there as stay for two seconds."""
    for flood in floods:
        flood.start()
    time.sleep(FILL_S)
    joined = expect_joined(scene, start_newcomer(scene), 4)
    return f"{sum(flood.count for flood in floods)} connections; {joined}"


@attack(limit_s=10)
def scheduler_strangers(scene):
    """Strangers connect to the scheduler hundreds of times a second and say nothing, while a backend wants to join."""
    return newcomer_in_flood(scene, [Flood(scene.cluster.scheduler, 1000) for _ in range(2)])


@attack(limit_s=10)
def link_strangers(scene):
    """Strangers hold all that the frontend's link port has room for, and more come, while a backend wants to link."""
    return newcomer_in_flood(scene, [Flood(scene.cluster.link, 1000, b"downbeat") for _ in range(2)])


@attack(limit_s=10)
def liars_at_the_door(scene):
    """Prefaces of other versions, wrong proofs, messages of gigabytes, HTTP and noise at the scheduler and the link
    port; what is logged of it."""
    versions = fabric.versions_of(scene.cluster.scheduler)
    whole, of_another_wire = fabric.preface(versions), fabric.preface((versions[0], versions[1] ^ 1))
    wrong = whole + fabric.message(fabric.PROOF, os.urandom(32))
    firsts = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        whole[:20],
        wrong,
        whole + b"\xff\xff\xff\xff" + bytes(1000),
    ]
    firsts += [
        b"downbeat\0\x09" + bytes(32),
        whole + fabric.message(fabric.CLOSE, fabric.sized(b"\x1b[31m\n" * 80)),
        of_another_wire + fabric.message(fabric.RELEASE, fabric.sized(b"\x1b[31m\n" * 80)),
        bytes(70_000),
    ]
    members = [scene.cluster.members[name] for name in ("scheduler", "frontend")]
    before = [member.log_bytes() for member in members]
    opened = 0
    while not scene.is_over(1.5):
        for first in firsts:
            for address in (scene.cluster.scheduler, scene.cluster.link):
                for connection in http1.connect_many(address, 5, 0.3):
                    http1.push(connection, first)
                    opened += 1
                    connection.close()
    logged = sum(member.log_bytes() - start for member, start in zip(members, before))
    scene.expect(logged < 100_000, f"{logged} bytes were logged of {opened} connections")
    escaped = any("\x1b[31m\n" in member.log_text(start) for member, start in zip(members, before))
    scene.expect(not escaped, "a stranger's escapes are in the log")
    return f"{opened} connections, {logged} bytes logged; {expect_joined(scene, start_newcomer(scene), 4)}"


@attack(limit_s=10)
def half_open_peers(scene):
    """Peers that stop in the middle of the bootstrap, send a byte at a time, close one half, or reset at once."""
    whole = fabric.preface(fabric.versions_of(scene.cluster.scheduler))
    connections, until = [], time.monotonic() + 1
    while time.monotonic() < until:
        for address in (scene.cluster.scheduler, scene.cluster.link):
            for cut in (0, 1, 8, len(whole) - 1, len(whole)):
                connections += http1.connect_many(address, 1, 0.2, whole[:cut])
            for connection in http1.connect_many(address, 2, 0.2, whole):
                connection.shutdown(socket.SHUT_WR)
                connections.append(connection)
            for connection in http1.connect_many(address, 3, 0.2, whole):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
        for connection in connections[-100:]:
            http1.push(connection, b"\0", 0.001)
    # What has not proved itself within two seconds is gone.
    time.sleep(2.5)
    left = sum(map(http1.is_open, connections))
    scene.expect(left == 0, f"{left} of {len(connections)} are still open")
    return f"{len(connections)} peers; {expect_joined(scene, start_newcomer(scene), 3)}"


@attack(limit_s=12)
def replayed_bootstrap(scene):
    """What a backend said to the scheduler, recorded on the way and said again: nobody joins by it."""
    recorder = Recorder(scene.cluster.scheduler)
    recorder.start()
    genuine = start_newcomer(scene, scheduler="%s:%d" % recorder.address)
    joined = scene.wait_for(lambda: " joined" in genuine.log_text(), 5)
    scene.expect(joined, "the genuine backend did not join through the recorder")
    time.sleep(0.2)
    genuine.process.kill()
    recorded = bytes(recorder.said)
    scheduler = scene.cluster.members["scheduler"]
    before, heard = scheduler.log_bytes(), []
    for cut in (None, fabric.PREFACE_BYTES, -1):
        connection = http1.connect(scene.cluster.scheduler, STRANGER, 1)
        http1.push(connection, recorded[:cut], 0.2)
        http1.push(connection, recorded[fabric.PREFACE_BYTES :], 0.2)
        try:
            connection.settimeout(0.5)
            while data := connection.recv(65536):
                heard.append(len(data))
        except OSError:
            pass
    scene.expect("a backend joined" not in scheduler.log_text(before), "a replayed bootstrap has joined")
    return f"{len(recorded)} bytes recorded, {sum(heard)} bytes were the answers"


class Recorder(threading.Thread):
    """Passes on what is said between one client and a server, and keeps what the client says."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.said = server, bytearray()
        self.listener = socket.create_server(("127.66.6.9", 0))
        self.address = self.listener.getsockname()

    def run(self):
        client, _ = self.listener.accept()
        server = http1.connect(self.server, STRANGER)
        threading.Thread(target=self.pass_on, args=(server, client, bytearray()), daemon=True).start()
        self.pass_on(client, server, self.said)

    @staticmethod
    def pass_on(source, destination, kept):
        source.settimeout(None)
        try:
            while data := source.recv(65536):
                kept += data
                destination.sendall(data)
        except OSError:
            pass
        destination.close()


@attack()
def false_server(scene):
    """A server that does not know the secret, where a backend looks for its scheduler: it learns nothing to try secrets
    against."""
    versions = fabric.versions_of(scene.cluster.scheduler)
    listener = socket.create_server(("127.66.6.9", 0))
    listener.settimeout(3)
    backend = start_newcomer(scene, scheduler="%s:%d" % listener.getsockname())
    connection, _ = listener.accept()
    connection.settimeout(1)
    connection.sendall(fabric.preface(versions))
    said = bytearray()
    try:
        said += fabric.read_exactly(connection, fabric.PREFACE_BYTES)
        while data := connection.recv(65536):
            said += data
    except OSError:
        pass
    backend.process.kill()
    scene.expect(len(said) >= fabric.PREFACE_BYTES, f"the backend said {len(said)} bytes, expected its preface")
    # A proof is an HMAC of 32 bytes.
    extra = len(said) - fabric.PREFACE_BYTES
    scene.expect(extra < 32, f"the backend proved itself first: {extra} bytes to a server that had not")


@attack(limit_s=10)
def hostile_member(scene):
    """A member that knows the secret says that it can be reached at an address of 20,000 bytes, or at none, offers no
    GPU, or four billion models; then hellos that do not decode. The same hellos with what a member says are taken."""
    cluster, seen = scene.cluster, []
    versions = fabric.versions_of(cluster.scheduler)

    def said(hello, address):
        try:
            connection, kind, content = fabric.join(address, versions, cluster.secret, hello, (STRANGER, 4791))
            connection.close()
        except OSError:
            return "closed"
        named = {fabric.ANSWER: "taken", fabric.CLOSE: "refused: "}.get(kind, str(kind))
        return named + (content[8:].decode(errors="replace") if kind == fabric.CLOSE else "")

    frontend, backend = fabric.frontend_hello, fabric.backend_hello
    whole = {
        # Each beside its control: what it says that is wrong is all that is wrong.
        frontend(b"127.0.0.1:1"): "taken",
        frontend(b"a" * 128): "taken",
        frontend(b"\n\x1b[31m127.0.0.1:1"): "taken",
        frontend(b"a" * 129): "link_address has 129 bytes",
        frontend(b"a" * 20_000): "link_address has 20000 bytes",
        frontend(b""): "link_address has 0 bytes",
        backend(1): "taken",
        backend(0): "gpus is 0, expected 1 to 64",
        backend(65): "gpus is 65, expected 1 to 64",
        backend(1, more=1): "taken",
        backend(1, more=0xFFFF_FFFF): "takes no more",
    }
    torn = [
        frontend(b"\xff\xfe"),
        frontend(b"127.0.0.1:1")[:-1],
        backend(1, models=1 << 61),
        b"",
        struct.pack("<IQ", 0, 1 << 62),
        struct.pack("<I", 77),
        struct.pack("<IIQ", 1, 1 << 31, 1 << 61),
        os.urandom(500),
    ]
    for hello, expected in whole.items():
        found = said(hello, cluster.scheduler)
        scene.expect(expected in found, f"a hello of {len(hello)} bytes: found {found}, expected {expected}")
        seen.append(found.split(":")[0])
    for hello in torn:
        found = said(hello, cluster.scheduler)
        scene.expect("does not decode" in found, f"a torn hello of {len(hello)} bytes: found {found}")
        seen.append(found.split(":")[0])
    # No frontend takes a scheduler's hello for a backend's.
    for hello in [*whole, *torn]:
        scene.expect("taken" != said(hello, cluster.link), f"a frontend took a hello of {len(hello)} bytes")
    scene.expect(cluster.members["scheduler"].is_alive(), "the scheduler died")
    return ", ".join(f"{what} x {seen.count(what)}" for what in sorted(set(seen)))


@attack(limit_s=10)
def borrowed_links(scene):
    """A member that knows the secret, and all ids, says to the frontend that it is one of its backends, or one that no
    scheduler knows: it is told nothing, and no link ends."""
    cluster = scene.cluster
    versions = fabric.versions_of(cluster.scheduler)

    def told(name, pattern):
        return [tuple(map(int, found.groups())) for found in re.finditer(pattern, cluster.members[name].log_text())]

    frontend = told("frontend", r"knows us as frontend (\d+)")[-1][0]
    epoch = told("frontend", r"is obeyed in epoch (\d+)\.(\d+)")[-1]
    backend = told("backend-0", r"joined .*backend=(\d+)")[-1][0]
    marks = {name: member.log_bytes() for name, member in cluster.members.items()}
    hellos = [fabric.link_hello(who, frontend, epoch, link_pass) for who in (backend, 7) for link_pass in (0, 1 << 63)]
    for hello in hellos:
        connection, kind, content = fabric.join(cluster.link, versions, cluster.secret, hello, (STRANGER, 4791))
        connection.close()
        text = content[8:].decode(errors="replace")
        scene.expect(kind == fabric.CLOSE and text.startswith("pass: "), f"the frontend answered {kind}: {text}")
        scene.expect(not re.search(r"\d", text), f"a refusal tells a number: {text}")
    ended = [name for name, mark in marks.items() if "is down" in cluster.members[name].log_text(mark)]
    scene.expect(not ended, f"a link ended, say {ended}")
    return f"{len(hellos)} refused"


def targets(scene):
    return [scene.cluster.packets(name) for name in ("frontend", "scheduler", "backend-0")]


@attack()
def udp_garbage(scene):
    """Noise, scraps and the largest datagrams to every member's RoCE port."""
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.bind((STRANGER, 0))
    sizes = [0, 1, 11, 12, 15, 16, 40, 1500, 4096, 9000, 60_000]
    noise = [random.randbytes(size) for size in sizes]
    source = sender.getsockname()
    sent = 0
    while not scene.is_over(1.5):
        for target in targets(scene):
            # The last: whole packets but for their CRC, for queue pairs that may be there.
            broken = [
                fabric.packet(source, target, SEND_ONLY, number, 0, bytes(256), is_whole=False)
                for number in range(2, 6)
            ]
            for piece in noise + broken:
                try:
                    sent += bool(sender.sendto(piece, target))
                except OSError:
                    pass
    return f"{sent} datagrams"


@attack(limit_s=10)
def udp_spoofed(scene):
    """Whole packets of every kind for guessed queue pairs, numbers and keys, from the addresses of the very peers."""
    try:
        sender = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    except PermissionError as error:
        raise Skipped("raw sockets") from error
    names = ["scheduler", "frontend", "backend-0"]
    pairs = [(scene.cluster.packets(a), scene.cluster.packets(b)) for a in names for b in names if a != b]
    pairs += [(scene.cluster.packets("backend-0")[:1] + (5000,), scene.cluster.packets("frontend"))]
    # What is guessed first: small numbers, such as queue pairs and keys that are counted up from one.
    small = [(number, psn, key) for number in range(1, 300) for psn in (0, 1) for key in (0, 1, 2, 256, 257)]
    made = []
    for _ in range(4000):
        source, target = random.choice(pairs)
        number, psn, key = random.choice(small) if random.random() < 0.7 else map(random.getrandbits, (24, 24, 32))
        reth = struct.pack(">QII", random.getrandbits(47) & ~7, key, 64)
        kinds = [(SEND_ONLY, bytes(64)), (WRITE_ONLY, reth + bytes(64)), (READ_REQUEST, reth)]
        kinds += [(SEND_ONLY_INVALIDATE, struct.pack(">I", key)), (ACKNOWLEDGE, struct.pack(">I", 0x6000_0001))]
        opcode, rest = random.choice(kinds)
        packet = fabric.packet(source, target, opcode, number, psn, rest)
        made.append((fabric.datagram(source, target, packet), target[0]))
    sent, until = 0, time.monotonic() + 1.5
    while time.monotonic() < until:
        for datagram, host in made[:500]:
            sender.sendto(datagram, (host, 0))
        sent += 500
        made = made[500:] + made[:500]
    return f"{sent} packets"
