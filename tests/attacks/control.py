"""The client that an operator cares for: asks for `digits` every 50 ms on connections that it keeps, and probes health
every 250 ms on a new one. A process of its own, so that an attack does not slow it down itself.

usage: control.py HTTP_HOST PORT
Says `ready` after its first answer. Each line on its stdin asks for what it has seen since the last one, as one line of
JSON; it ends when its stdin does."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import http1
from cluster import seven

ASK_EVERY_S = 0.05
PROBE_EVERY_S = 0.25
# What orchestrators wait for a probe unless they are told otherwise.
PROBE_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 20.0
# Requests under way at once, beyond which it waits as any client would.
UNDER_WAY_MAX = 64
# An interval in which this process itself did not run is nobody's silence.
STALL_S = 0.1
FAILURES = (OSError, asyncio.IncompleteReadError, ValueError)


@dataclass
class Seen:
    """What was seen from some instant on."""

    asked: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    probes: int = 0
    healthy: int = 0
    unhealthy: Counter[str] = field(default_factory=Counter)
    # The longest time without an answer, and the longest that one took.
    gap_s: float = 0.0
    slowest_s: float = 0.0


class Control:
    """Asks and probes."""

    def __init__(self, address, request):
        self.address, self.request = address, request
        self.idle, self.under_way = [], set()
        self.seen = Seen()
        self.last_answer = time.monotonic()
        # For how long this process itself did not run, in all and by the last answer.
        self.stalled = self.stalled_at_answer = 0.0

    async def exchange(self, source, raw, kept=None):
        """A reply's status and body, on a connection that was kept or on a new one."""
        reader, writer = kept or await asyncio.open_connection(*self.address, local_addr=(source, 0))
        keep = False
        try:
            writer.write(raw)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(head.partition("content-length:")[2].split("\r\n", 1)[0] or 0)
            body = await reader.readexactly(length)
            keep = "connection: close" not in head
            return int(head.split()[1]), body
        finally:
            if keep and source == http1.CONTROL:
                self.idle.append((reader, writer))
            else:
                writer.close()

    async def ask(self):
        seen, began = self.seen, time.monotonic()
        seen.asked += 1
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                try:
                    kept = self.idle.pop() if self.idle else None
                    outcome = self.judge(*await self.exchange(http1.CONTROL, self.request, kept))
                except (asyncio.IncompleteReadError, ConnectionError):
                    # A kept connection may have been closed meanwhile: every client library asks once more.
                    outcome = self.judge(*await self.exchange(http1.CONTROL, self.request))
        except FAILURES as error:
            outcome = type(error).__name__
        if outcome:
            seen.failed[outcome] += 1
            return
        now = time.monotonic()
        seen.answered += 1
        seen.slowest_s = max(seen.slowest_s, now - began)
        self.close_gap(now)
        self.last_answer, self.stalled_at_answer = now, self.stalled

    def close_gap(self, now):
        gap = now - self.last_answer - (self.stalled - self.stalled_at_answer)
        self.seen.gap_s = max(self.seen.gap_s, gap)

    @staticmethod
    def judge(status, body):
        """Why this is not the answer; `None` if it is."""
        if status != 200:
            return str(status)
        scores = json.loads(body)["outputs"][0]["data"]
        return None if max(range(len(scores)), key=scores.__getitem__) == 7 else "wrong answer"

    async def probe(self):
        seen = self.seen
        raw = http1.request("GET", "/v2/health/live", headers=[("Connection", "close")])
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                status, _ = await self.exchange(http1.PROBE, raw)
            outcome = None if status == 200 else str(status)
        except FAILURES as error:
            outcome = type(error).__name__
        seen.probes += 1
        if outcome:
            seen.unhealthy[outcome] += 1
        else:
            seen.healthy += 1

    async def every(self, span, action):
        due = time.monotonic()
        while True:
            due = max(due + span, time.monotonic() - span)
            if len(self.under_way) < UNDER_WAY_MAX:
                task = asyncio.create_task(action())
                self.under_way.add(task)
                task.add_done_callback(self.under_way.discard)
            await asyncio.sleep(due - time.monotonic())

    async def watch_itself(self):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.02)
            late = time.monotonic() - before - 0.02
            self.stalled += late if late > STALL_S else 0.0

    def report(self):
        """What was seen; from now on all is counted anew."""
        now = time.monotonic()
        self.close_gap(now)
        seen, self.seen = self.seen, Seen()
        self.last_answer, self.stalled_at_answer = now, self.stalled
        return vars(seen)

    async def run(self):
        loops = [self.every(ASK_EVERY_S, self.ask), self.every(PROBE_EVERY_S, self.probe), self.watch_itself()]
        loops = [asyncio.create_task(loop) for loop in loops]
        while not self.seen.answered:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(self.report()), flush=True)
        os._exit(0)


class Measurement:
    """A control client that runs, as seen by the process that started it."""

    def __init__(self, address):
        command = [sys.executable, str(Path(__file__)), address[0], str(address[1])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # Returns when it has had an answer.
        self.process.stdout.readline()

    def seen(self):
        """What it has seen since the last call."""
        print(file=self.process.stdin, flush=True)
        seen = json.loads(self.process.stdout.readline())
        return Seen(**seen | {key: Counter(seen[key]) for key in ("failed", "unhealthy")})

    def end(self):
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    asyncio.run(Control((sys.argv[1], int(sys.argv[2])), http1.request(*seven())).run())
