"""The client that an operator cares for: asks for `digits` every 50 ms on connections that it keeps, and probes health every
250 ms on a new one. A process of its own, so that an attack does not slow it down itself.

usage: control.py HTTP_HOST PORT
Runs until its stdin ends, then prints what it saw as one line of JSON."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
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


class Control:
    """Its measurements so far."""

    def __init__(self, address, method_path_body):
        self.address = address
        self.request = http1.request(*method_path_body)
        self.idle = []
        self.under_way = set()
        self.asked = self.answered = self.probes = self.healthy = 0
        self.failed, self.unhealthy = Counter(), Counter()
        self.last_answer = None
        self.stalled = self.stalled_at_last = 0.0
        self.gap_s = self.slowest_s = 0.0

    async def exchange(self, source, raw, kept=None):
        """A request's status, on a connection that was kept or on a new one."""
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
        began = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                try:
                    status, body = await self.exchange(
                        http1.CONTROL, self.request, self.idle.pop() if self.idle else None
                    )
                except (asyncio.IncompleteReadError, ConnectionError):
                    # A kept connection may have been closed meanwhile: every client library asks once more.
                    status, body = await self.exchange(http1.CONTROL, self.request)
            outcome = self.judge(status, body)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            outcome = type(error).__name__
        now = time.monotonic()
        if outcome:
            self.failed[outcome] += 1
            return
        self.answered += 1
        self.slowest_s = max(self.slowest_s, now - began)
        self.close_gap(now)
        self.last_answer, self.stalled_at_last = now, self.stalled

    def close_gap(self, now):
        if self.last_answer is not None:
            self.gap_s = max(self.gap_s, now - self.last_answer - (self.stalled - self.stalled_at_last))

    @staticmethod
    def judge(status, body):
        """Why this is not the answer; `None` if it is."""
        if status != 200:
            return str(status)
        scores = json.loads(body)["outputs"][0]["data"]
        return None if max(range(len(scores)), key=scores.__getitem__) == 7 else "wrong answer"

    async def probe(self):
        self.probes += 1
        raw = http1.request("GET", "/v2/health/live", headers=[("Connection", "close")])
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                status, _ = await self.exchange(http1.PROBE, raw)
            if status == 200:
                self.healthy += 1
            else:
                self.unhealthy[str(status)] += 1
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.unhealthy[type(error).__name__] += 1

    async def every(self, span, action):
        due = time.monotonic()
        while True:
            due = max(due + span, time.monotonic() - span)
            if len(self.under_way) < UNDER_WAY_MAX:
                task = asyncio.create_task(action())
                self.under_way.add(task)
                task.add_done_callback(self.under_way.discard)
                self.asked += action == self.ask
            await asyncio.sleep(due - time.monotonic())

    async def watch_itself(self):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.02)
            late = time.monotonic() - before - 0.02
            self.stalled += late if late > STALL_S else 0.0

    async def run(self):
        loops = [self.every(ASK_EVERY_S, self.ask), self.every(PROBE_EVERY_S, self.probe), self.watch_itself()]
        loops = [asyncio.create_task(loop) for loop in loops]
        await asyncio.to_thread(sys.stdin.read)
        self.close_gap(time.monotonic())
        for loop in loops:
            loop.cancel()
        # What was asked just now has a moment.
        open_at_end = [task for task in self.under_way if not task.done()]
        if open_at_end:
            await asyncio.wait(open_at_end, timeout=0.3)
        report = {
            "asked": self.asked,
            "answered": self.answered,
            "failed": dict(self.failed),
            "gap_s": round(self.gap_s, 3),
            "slowest_s": round(self.slowest_s, 3),
            "stalled_s": round(self.stalled, 3),
            "probes": self.probes
            - sum(not task.done() for task in self.under_way if task.get_coro().__name__ == "probe"),
            "healthy": self.healthy,
            "unhealthy": dict(self.unhealthy),
        }
        print(json.dumps(report), flush=True)


@dataclass
class Measurement:
    """A control client that runs, as seen by the process that started it."""

    process: subprocess.Popen

    @classmethod
    def start(cls, address):
        command = [sys.executable, str(Path(__file__)), address[0], str(address[1])]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def end(self):
        """What it saw."""
        return json.loads(self.process.communicate()[0])


if __name__ == "__main__":
    asyncio.run(Control((sys.argv[1], int(sys.argv[2])), seven()).run())
