"""A member that knows the secret and speaks the whole protocol, as far as it likes: the bootstrap at either end, RoCEv2's
reliable connection, frames and their credits (transport/src/), and the messages that attacks need (proto/src/)."""

import hashlib
import hmac
import os
import random
import socket
import struct
import threading
import time

import http1

import fabric

MTU = 1024
# Of BTH opcodes, what begins, goes on, ends, or is a whole message.
SENDS, WRITES = {0x00, 0x01, 0x02, 0x04}, {0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B}
FIRST, MIDDLE, LAST, ONLY = 0x00, 0x01, 0x02, 0x04
READ_REQUEST, RESPONSE_FIRST, RESPONSE_MIDDLE, RESPONSE_LAST, RESPONSE_ONLY = 0x0C, 0x0D, 0x0E, 0x0F, 0x10
ACKNOWLEDGED = 0x1F << 24
# The last are a name that operators are shown, and that of a ring, which is none here.
PARAMETERS = struct.Struct("<QII4sHIIHBHI81s16s")
NEVER = (1 << 63) - 1
# Bytes of a planned task.
TASK_BYTES = 66
# Bytes of a scheduler's messages to backends that say nothing here, by their tags.
FIXED = {0: 8, 1: 28, 11: 20, 12: 4, 13: 10, 14: 4}


class QueuePair:
    """One end of a reliable connection."""

    def __init__(self, number, receives):
        self.number, self.psn = number, random.getrandbits(24)
        self.sent = self.acknowledged = self.psn
        self.receives, self.taken, self.used = receives, 0, 0
        self.peer = self.peer_number = self.expected = None
        self.granted = self.messages = 0
        self.pieces = b""
        # Of the last READ or WRITE of its own: whether it was carried out.
        self.is_done = None

    def parameters(self, address):
        host, port = address
        where = (0, 0, socket.inet_aton(host), port)
        limits = (MTU, 16, self.receives, 1 << 20)
        return PARAMETERS.pack(random.getrandbits(64), *where, self.number, self.psn, *limits, b"", b"")

    def connect(self, parameters):
        _, _, _, host, port, self.peer_number, self.expected, _, _, self.granted, _, _, _ = PARAMETERS.unpack(parameters)
        self.peer = socket.inet_ntoa(host), port


class Member:
    """An address, its queue pairs, and what it keeps to."""

    def __init__(self, cluster, host, receives=256, answers_reads=True, grants=True):
        self.cluster, self.host, self.receives = cluster, host, receives
        self.answers_reads, self.grants = answers_reads, grants
        self.versions = fabric.versions_of(cluster.scheduler)
        self.pairs, self.connections, self.lock = {}, [], threading.RLock()
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind((host, 4791))
        self.reads = self.writes = 0
        self.frames = []
        for body in (self.receive, self.beat):
            threading.Thread(target=body, daemon=True).start()

    def new_pair(self):
        pair = QueuePair(random.randrange(2, 1 << 24), self.receives)
        self.pairs[pair.number] = pair
        return pair

    # The bootstrap.

    def proof(self, role, client, server):
        wire = struct.pack(">Q", self.versions[1])
        proven = b"downbeat bootstrap %d, %s" % (self.versions[0], role) + client + wire + server + wire
        return fabric.message(fabric.PROOF, hmac.new(self.cluster.secret.encode(), proven, hashlib.sha256).digest())

    def dial(self, address, hello):
        """Connects to a member. Yields the queue pair and the welcome."""
        connection, nonce, pair = http1.connect(address, self.host), os.urandom(32), self.new_pair()
        connection.settimeout(5)
        connection.sendall(fabric.preface(self.versions, nonce))
        theirs = fabric.read_exactly(connection, fabric.PREFACE_BYTES)[-32:]
        connection.sendall(self.proof(b"client", nonce, theirs))
        offer = pair.parameters((self.host, 4791)) + fabric.sized(hello)
        connection.sendall(fabric.message(fabric.OFFER, offer))
        kind, content = fabric.read_message(connection)
        while kind in (fabric.HEARTBEAT, fabric.PROOF):
            kind, content = fabric.read_message(connection)
        if kind != fabric.ANSWER:
            raise ConnectionRefusedError(content[8:].decode(errors="replace"))
        pair.connect(content[: PARAMETERS.size])
        connection.sendall(fabric.message(fabric.READY))
        self.connections.append(connection)
        return pair, content[PARAMETERS.size + 8 :]

    def listen(self, welcome):
        """Takes in whoever knows the secret. Yields where."""
        listener = socket.create_server((self.host, 0))
        threading.Thread(target=self.accept, args=(listener, welcome), daemon=True).start()
        return listener.getsockname()

    def accept(self, listener, welcome):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.answer, args=(connection, welcome), daemon=True).start()

    def answer(self, connection, welcome):
        try:
            connection.settimeout(5)
            theirs, nonce = fabric.read_exactly(connection, fabric.PREFACE_BYTES)[-32:], os.urandom(32)
            connection.sendall(fabric.preface(self.versions, nonce) + self.proof(b"server", theirs, nonce))
            kind, content = fabric.read_message(connection)
            while kind != fabric.OFFER:
                kind, content = fabric.read_message(connection)
            pair = self.new_pair()
            pair.connect(content[: PARAMETERS.size])
            answer = pair.parameters((self.host, 4791)) + fabric.sized(welcome)
            connection.sendall(fabric.message(fabric.ANSWER, answer))
            self.connections.append(connection)
        except OSError:
            connection.close()

    def beat(self):
        """Says that it lives, and listens to nothing."""
        while True:
            for connection in list(self.connections):
                try:
                    connection.sendall(fabric.message(fabric.HEARTBEAT))
                    connection.setblocking(False)
                    while connection.recv(1 << 16):
                        pass
                except BlockingIOError:
                    pass
                except OSError:
                    self.connections.remove(connection)
                finally:
                    connection.settimeout(5)
            time.sleep(0.3)

    # Packets.

    def packet(self, pair, opcode, psn, rest=b"", pad=0):
        packet = fabric.packet(
            (self.host, 4791), pair.peer, opcode, pair.peer_number, psn & 0xFFFFFF, rest + bytes(pad), pad=pad
        )
        self.socket.sendto(packet, pair.peer)

    def receive(self):
        while True:
            data, _ = self.socket.recvfrom(1 << 16)
            pair = self.pairs.get(int.from_bytes(data[5:8], "big"))
            if pair and pair.peer and len(data) >= 16:
                with self.lock:
                    self.take(pair, data[0], data[1] >> 4 & 3, int.from_bytes(data[9:12], "big"), data[12:-4])

    def take(self, pair, opcode, pad, psn, rest):
        if opcode == fabric.ACKNOWLEDGE:
            pair.acknowledged = (psn + 1) & 0xFFFFFF
            pair.is_done = rest[0] < 0x20
            return
        if RESPONSE_FIRST <= opcode <= RESPONSE_ONLY:
            pair.is_done = True
            return
        if psn != pair.expected:
            # One that was answered before, or one behind it.
            behind = (pair.expected - psn) & 0xFFFFFF
            if 0 < behind < 1 << 23:
                self.packet(pair, fabric.ACKNOWLEDGE, pair.expected - 1, self.acknowledgement(pair))
            return
        if opcode == READ_REQUEST:
            self.reads += 1
            if self.answers_reads:
                self.respond(pair, psn, struct.unpack_from(">I", rest, 12)[0])
            return
        pair.expected = (psn + 1) & 0xFFFFFF
        if opcode in SENDS:
            pair.pieces += rest[: len(rest) - pad]
        is_end = opcode in (LAST, ONLY, 0x08, 0x09, 0x0A, 0x0B)
        pair.messages += is_end
        self.packet(pair, fabric.ACKNOWLEDGE, psn, self.acknowledgement(pair))
        if is_end and opcode in SENDS:
            header, frame = pair.pieces[:8], pair.pieces[8:]
            pair.pieces, pair.granted = b"", struct.unpack_from(">I", header)[0]
            pair.taken += header[4]
            if header[4]:
                self.frames.append((pair, frame))
        elif is_end:
            self.writes += 1
            pair.taken += 1

    @staticmethod
    def acknowledgement(pair):
        return struct.pack(">I", ACKNOWLEDGED | pair.messages & 0xFFFFFF)

    def respond(self, pair, psn, length):
        """Zeros."""
        count = max(1, -(-length // MTU))
        pair.messages += 1
        pair.expected = (psn + count) & 0xFFFFFF
        for index in range(count):
            opcode = RESPONSE_MIDDLE
            if index in (0, count - 1):
                opcode = RESPONSE_ONLY if count == 1 else RESPONSE_FIRST if index == 0 else RESPONSE_LAST
            extended = self.acknowledgement(pair) if opcode != RESPONSE_MIDDLE else b""
            payload = min(MTU, length - index * MTU)
            self.packet(pair, opcode, psn + index, extended + bytes(payload), -payload % 4)

    # Frames.

    def send(self, pair, frame):
        """One frame, once there is a credit for it; waits until it is acknowledged."""
        until = time.monotonic() + 5
        while pair.granted - pair.used <= 0 and time.monotonic() < until:
            time.sleep(0.001)
        pair.used += 1
        granted = pair.receives + (pair.taken if self.grants else 0)
        message = struct.pack(">IB3x", granted, 1) + frame
        pieces = [message[at : at + MTU] for at in range(0, len(message), MTU)]
        first, pair.psn = pair.psn, (pair.psn + len(pieces)) & 0xFFFFFF
        while pair.acknowledged != pair.psn and time.monotonic() < until:
            for index, piece in enumerate(pieces):
                opcode = ONLY if len(pieces) == 1 else FIRST if index == 0 else MIDDLE
                opcode = LAST if 0 < index == len(pieces) - 1 else opcode
                self.packet(pair, opcode, first + index, piece, -len(piece) % 4)
            retry = time.monotonic() + 0.1
            while pair.acknowledged != pair.psn and time.monotonic() < retry:
                time.sleep(0.0005)

    def end(self):
        for connection in self.connections:
            connection.close()


class Frontend(Member):
    """One that submits what it likes. Its arena is nowhere."""

    def __init__(self, cluster, host, **keeps_to):
        super().__init__(cluster, host, **keeps_to)
        arena = struct.pack("<QQIQI", 1 << 32, 1 << 30, 7, 1 << 29, 7)
        link_host, link_port = self.listen(arena)
        hello = fabric.frontend_hello(f"{link_host}:{link_port}".encode(), b"hostile")
        self.scheduler, welcome = self.dial(cluster.scheduler, hello)
        self.id, threads = struct.unpack_from("<IQ", welcome)
        assert threads == 0, "its only ModelThread is reached by the same connection"
        _, _, *epoch = struct.unpack_from("<QQIH", welcome, 12)
        # Obeys, and AllOpen.
        self.send(self.scheduler, struct.pack("<IIH", 3, *epoch) + struct.pack("<I", 67))

    def submit(self, first, count, models, input_bytes, answer_bytes=256):
        """Tasks without an objective, as many to a frame as fit."""
        tasks = []
        for number in range(first, first + count):
            slot = struct.pack("<IQIQII", number % 4096, 4096 * (number % 4096), input_bytes, 1 << 28, answer_bytes, 0)
            model = models[number % len(models)]
            tasks.append(struct.pack("<IQIqBI?", 65, self.id << 40 | number, model, NEVER, 0, 0, True) + slot)
        for at in range(0, len(tasks), 200):
            self.send(self.scheduler, b"".join(tasks[at : at + 200]))


class Backend(Member):
    """One that says it hosts a model, and answers plans by what it says alone, if at all."""

    def __init__(self, cluster, host, model, input_bytes, latency_ns, reports=True, **keeps_to):
        super().__init__(cluster, host, **keeps_to)
        # Of slots of its tasks: where inputs and answers are, and the key.
        self.reports, self.frontend, self.arena, self.slots = reports, None, None, []
        table = struct.pack("<Q64q", 64, *(latency_ns + batch for batch in range(64)))
        offer = fabric.sized(model) + fabric.sized(b"1") + table + struct.pack("<IQI", input_bytes, 1, 0)
        offer += struct.pack("<IqqBQ?", 0, 0, 0, 0, 0, False)
        hello = struct.pack("<I", 1) + fabric.sized(b"hostile") + struct.pack("<IBQ", 1, 0, 1) + offer
        hello += struct.pack("<I", 0) + b"\0" + fabric.STANDING + b"\0"
        self.scheduler, welcome = self.dial(cluster.scheduler, hello)
        self.id, models = struct.unpack_from("<IQ", welcome)
        threads, _, _, *self.epoch = struct.unpack_from("<QQQIH", welcome, 12 + 4 * models)
        assert threads == 0, "its only ModelThread is reached by the same connection"
        self.send(self.scheduler, struct.pack("<IIH", 14, *self.epoch))
        self.plans, self.links = 0, 0
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            frames, self.frames = self.frames, []
            for pair, frame in frames:
                if pair is self.scheduler:
                    self.hear(frame)
            time.sleep(0.001)

    def hear(self, frame):
        while frame:
            tag = struct.unpack_from("<I", frame)[0]
            if tag == 2:
                frontend, length = struct.unpack_from("<IQ", frame, 4)
                address, link_pass = frame[16 : 16 + length], struct.unpack_from("<Q", frame, 16 + length)[0]
                frame = frame[24 + length :]
                threading.Thread(target=self.link, args=(frontend, address, link_pass), daemon=True).start()
            elif tag == 15:
                plan, _, _, exec_at, _, tasks = struct.unpack_from("<QIIqqQ", frame, 4)
                for at in range(44, 44 + TASK_BYTES * tasks, TASK_BYTES):
                    _, input_offset, _, answer_offset, _, key = struct.unpack_from("<IQIQII", frame, at + 10)
                    self.slots.append((input_offset, answer_offset, key))
                frame = frame[44 + TASK_BYTES * tasks :]
                frame = frame[3 if frame[0] else 1 :]
                self.plans += 1
                if self.reports:
                    self.report(plan, exec_at)
            elif tag in FIXED:
                frame = frame[FIXED[tag] :]
            else:
                return

    def link(self, frontend, address, link_pass):
        self.frontend = frontend, address, link_pass
        try:
            self.new_link()
        except OSError:
            return
        self.send(self.scheduler, struct.pack("<III", 0, frontend, 1))

    def new_link(self):
        """Another link to the frontend that came last. Yields the queue pair."""
        frontend, address, link_pass = self.frontend
        host, _, port = address.decode().rpartition(":")
        hello = struct.pack("<IIIIHQ", self.id, frontend, self.links + 1, *self.epoch, link_pass)
        pair, self.arena = self.dial((host, int(port)), hello)
        self.links += 1
        return pair

    def reach(self, is_write, address, key, length=64):
        """READs or WRITEs there, on a link of its own. Whether that is carried out; `None` if nobody answers."""
        pair = self.new_link()
        extended = struct.pack(">QII", address, key, length)
        opcode, payload = (fabric.WRITE_ONLY, b"\x55" * length) if is_write else (READ_REQUEST, b"")
        self.packet(pair, opcode, pair.psn, extended + payload)
        until = time.monotonic() + 1
        while pair.is_done is None and time.monotonic() < until:
            time.sleep(0.001)
        return pair.is_done

    def report(self, plan, exec_at):
        """Done, and answered; nothing was."""
        done = struct.pack("<IQIqqQqq", 69, plan, 0, exec_at, exec_at + 1, 0, exec_at, exec_at)
        self.send(self.scheduler, done + struct.pack("<IQQ", 68, plan, 0))
