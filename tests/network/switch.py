"""A switch between hosts: it reads the packets of their TUN devices and passes them on by their destination, or does to
them what networks do. In a process of its own, which does not wait for others of this machine, as no switch would."""

import gc
import heapq
import itertools
import multiprocessing
import os
import random
import select
import time
from collections import Counter
from dataclasses import dataclass

# A packet that others overtake is kept until so many have, and for so long at most.
OVERTAKEN_BY, OVERTAKEN_S = (1, 3), 0.005
# Packets of one device at a time, so that each gets its turn.
BURST = 32
PACKET_MAX = 65_536
UDP = 17
ROCE_PORT = 4791


@dataclass(frozen=True)
class Faults:
    """What happens to packets of one direction: each with a probability, but for `delay_s`, which all have."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    delay_s: float = 0.0


CUT = Faults(loss=1.0)


class Held:
    """A packet that others overtake."""

    def __init__(self, packet, others):
        self.packet, self.others = packet, others


class Direction:
    """From one host to another."""

    def __init__(self, device, seed):
        self.device, self.random, self.faults, self.held = device, random.Random(seed), Faults(), []
        self.packets = 0


class Switch:
    """`devices` are TUN devices by their hosts' addresses, of four bytes. Chance comes from `seed` alone."""

    def __init__(self, devices, seed):
        pairs = itertools.permutations(devices, 2)
        self.devices = {device: address for address, device in devices.items()}
        self.directions = {a + b: Direction(devices[b], f"{seed} {a.hex()} {b.hex()}") for a, b in pairs}
        self.later, self.number, self.counts = [], itertools.count(), Counter()

    def set(self, faults):
        """From now on these are the faults, by both addresses; where none are, packets pass."""
        for pair, direction in self.directions.items():
            direction.faults = faults.get(pair, Faults())

    def on_packet(self, packet, now):
        direction = self.directions.get(packet[12:20])
        if direction is None or packet[0] >> 4 != 4:
            return
        direction.packets += 1
        for held in direction.held:
            held.others -= 1
        faults = direction.faults
        copies = self.copies(direction, packet, now) if faults != Faults() else (packet,)
        for copy in copies:
            if faults.delay_s:
                heapq.heappush(self.later, (now + faults.delay_s, next(self.number), direction, copy))
            else:
                self.send(direction, copy)
        while direction.held and direction.held[0].others <= 0:
            self.release(direction, direction.held[0])

    def copies(self, direction, packet, now):
        """What becomes of a packet at once: none, one or two."""
        faults, chance = direction.faults, direction.random.random
        if chance() < faults.loss:
            self.counts["lost"] += 1
            return ()
        if chance() < faults.corrupt:
            self.counts["corrupted"] += 1
            packet = corrupted(packet, direction.random)
        if chance() < faults.reorder:
            self.counts["overtaken"] += 1
            held = Held(packet, direction.random.randint(*OVERTAKEN_BY))
            direction.held.append(held)
            heapq.heappush(self.later, (now + OVERTAKEN_S, next(self.number), direction, held))
            return ()
        if chance() < faults.duplicate:
            self.counts["doubled"] += 1
            return (packet, packet)
        return (packet,)

    def release(self, direction, held):
        direction.held.remove(held)
        self.send(direction, held.packet)

    def send(self, direction, packet):
        try:
            os.write(direction.device, packet)
        except OSError:
            # One that became no packet.
            self.counts["unsendable"] += 1

    def on_time(self, now):
        while self.later and self.later[0][0] <= now:
            _, _, direction, packet = heapq.heappop(self.later)
            if not isinstance(packet, Held):
                self.send(direction, packet)
            elif packet in direction.held:
                self.release(direction, packet)

    def run(self, commands):
        """Passes packets on until the other end of `commands` is closed."""
        poll = select.epoll()
        for device in (*self.devices, commands.fileno()):
            poll.register(device, select.EPOLLIN)
        while True:
            wait = self.later[0][0] - time.monotonic() if self.later else None
            for device, _ in poll.poll(None if wait is None else max(0.0, wait)):
                if device == commands.fileno():
                    self.obey(commands)
                    continue
                for _ in range(BURST):
                    try:
                        packet = os.read(device, PACKET_MAX)
                    except BlockingIOError:
                        break
                    self.on_packet(packet, time.monotonic())
            self.on_time(time.monotonic())

    def obey(self, commands):
        try:
            faults = commands.recv()
        except EOFError:
            os._exit(0)
        self.set(faults)
        counts, self.counts = self.counts, Counter()
        packets = {pair: direction.packets for pair, direction in self.directions.items()}
        commands.send({"packets": packets, "cpu_s": time.process_time(), **counts})


def corrupted(packet, chance):
    """One byte is another. Every second RoCE packet gets a UDP checksum that fits, as where a switch's memory errs."""
    packet = bytearray(packet)
    place = chance.randrange(len(packet))
    packet[place] ^= chance.randrange(1, 256)
    head = (packet[0] & 15) * 4
    is_roce = packet[9] == UDP and packet[head + 2 : head + 4] == ROCE_PORT.to_bytes(2, "big")
    if is_roce and place >= head + 8 and chance.random() < 0.5:
        # None at all fits any packet.
        packet[head + 6 : head + 8] = bytes(2)
    return bytes(packet)


class Running:
    """A switch in its process."""

    def __init__(self, devices, seed):
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self.run, args=(Switch(devices, seed), theirs), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, switch, commands):
        self.pipe.close()
        gc.disable()
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except OSError:
            # It waits its turn then.
            pass
        switch.run(commands)

    def set(self, faults):
        """From now on these are the faults, by pairs of addresses. Of what was done to packets since the last time, how
        often; since the start, CPU time, and packets by both addresses."""
        self.pipe.send({a + b: each for (a, b), each in faults.items()})
        return self.pipe.recv()

    def end(self):
        self.pipe.close()
        self.process.join()
