"""The client that an operator cares for: asks for `digits` at regular times on connections that it keeps, frontend by
frontend, and probes the health of each every 250 ms on a new one. A process of its own, so that an attack does not slow
it down itself. What its pictures are answered before it is ready is what must be answered later.

usage: control.py MILLISECONDS HOST:PORT..
Says `ready` after its first answers. `seen` on its stdin asks for what it has seen since the last time, as one line of
JSON; `rest` the same, when it has stopped asking and all has ended that it has asked. It ends when its stdin does."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import http1
from pictures import RIGHT_MIN, pictures

ASK_EVERY_S = 0.05
PROBE_EVERY_S = 0.25
# What orchestrators wait for a probe unless they are told otherwise.
PROBE_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 20.0
# Requests under way at once are those of so long, beyond which it waits as any client would.
UNDER_WAY_S = 3.2
# An interval in which this process itself did not run is nobody's silence.
STALL_S = 0.1
FAILURES = (OSError, asyncio.IncompleteReadError, ValueError)
# What `failed` calls a request that has not ended in all that time, and one that got another's answer.
UNANSWERED, WRONG = "TimeoutError", "wrong answer"


@dataclass
class Seen:
    """What was seen from some instant on."""

    asked: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    probes: int = 0
    healthy: int = 0
    unhealthy: Counter[str] = field(default_factory=Counter)
    # The longest time without an answer, of all frontends and of each, and the longest that an answer took.
    gap_s: float = 0.0
    gaps_s: dict[str, float] = field(default_factory=dict)
    slowest_s: float = 0.0


class Frontend:
    """One that is asked."""

    def __init__(self, name):
        self.name = name
        host, _, port = name.rpartition(":")
        self.address = host, int(port)
        # Where addresses are this machine's own, each client has another one.
        self.is_local = host.startswith("127.")
        self.idle, self.silence = [], Silence()


class Silence:
    """The time since an answer."""

    def __init__(self):
        self.longest, self.since, self.stalled = 0.0, time.monotonic(), 0.0

    def until(self, now, stalled):
        """It has lasted until now; `stalled` is for how long this process itself did not run, ever."""
        self.longest = max(self.longest, now - self.since - (stalled - self.stalled))

    def ends(self, now, stalled):
        self.until(now, stalled)
        self.since, self.stalled = now, stalled

    def told(self, now, stalled):
        """How long the longest was. From now on it is counted anew."""
        self.ends(now, stalled)
        longest, self.longest = self.longest, 0.0
        return longest


class Control:
    """Asks and probes."""

    def __init__(self, every_s, names):
        self.every_s = every_s * len(names)
        self.frontends = [Frontend(name) for name in names]
        self.pictures = pictures()
        self.seen, self.silence, self.stalled = Seen(), Silence(), 0.0
        self.under_way, self.is_resting = [], False

    async def exchange(self, frontend, source, raw, kept=None):
        """A reply's status and body, on a connection that was kept or on a new one."""
        local = (source, 0) if frontend.is_local else None
        reader, writer = kept or await asyncio.open_connection(*frontend.address, local_addr=local)
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
                frontend.idle.append((reader, writer))
            else:
                writer.close()

    async def ask(self, frontend, picture):
        seen, began = self.seen, time.monotonic()
        seen.asked += 1
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                try:
                    kept = frontend.idle.pop() if frontend.idle else None
                    reply = await self.exchange(frontend, http1.CONTROL, picture.request, kept)
                except (asyncio.IncompleteReadError, ConnectionError):
                    # A kept connection may have been closed meanwhile: every client library asks once more.
                    reply = await self.exchange(frontend, http1.CONTROL, picture.request)
                outcome = picture.judge(*reply)
        except FAILURES as error:
            outcome = type(error).__name__
        if outcome:
            seen.failed[outcome] += 1
            return
        now = time.monotonic()
        seen.answered += 1
        seen.slowest_s = max(seen.slowest_s, now - began)
        for silence in (self.silence, frontend.silence):
            silence.ends(now, self.stalled)

    async def probe(self, frontend):
        seen = self.seen
        raw = http1.request("GET", "/v2/health/live", headers=[("Connection", "close")])
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                status, _ = await self.exchange(frontend, http1.PROBE, raw)
            outcome = None if status == 200 else str(status)
        except FAILURES as error:
            outcome = type(error).__name__
        seen.probes += 1
        if outcome:
            seen.unhealthy[outcome] += 1
        else:
            seen.healthy += 1

    async def every(self, span, first, action):
        due, under_way = time.monotonic() + first, set()
        self.under_way.append(under_way)
        while True:
            await asyncio.sleep(due - time.monotonic())
            due = max(due + span, time.monotonic() - span)
            if len(under_way) < UNDER_WAY_S / span and not self.is_resting:
                task = asyncio.create_task(action())
                under_way.add(task)
                task.add_done_callback(under_way.discard)

    async def watch_itself(self):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.02)
            late = time.monotonic() - before - 0.02
            self.stalled += late if late > STALL_S else 0.0

    def gaps(self):
        """The longest silences, of all frontends and of each. From now on they are counted anew."""
        now = time.monotonic()
        each = {frontend.name: frontend.silence.told(now, self.stalled) for frontend in self.frontends}
        return {"gap_s": self.silence.told(now, self.stalled), "gaps_s": each}

    def report(self):
        """What was seen; from now on all is counted anew."""
        seen, self.seen = self.seen, Seen()
        return vars(seen) | self.gaps()

    async def report_at_rest(self):
        """The same when all that was asked has ended; that nothing is asked meanwhile is nobody's silence."""
        self.is_resting, gaps = True, self.gaps()
        while any(self.under_way):
            await asyncio.sleep(0.01)
        self.is_resting = False
        return self.report() | gaps

    async def learn(self):
        """All right answers; those of the first frontend, as soon as it serves."""
        first = self.frontends[0]
        for picture in self.pictures:
            while picture.answer is None:
                await self.ask(first, picture)
                await asyncio.sleep(0.001)
        right = sum(picture.is_read_right() for picture in self.pictures)
        if right < RIGHT_MIN:
            sys.exit(f"digits reads {right} of {len(self.pictures)} pictures right, expected {RIGHT_MIN}")

    async def run(self):
        loops = [asyncio.create_task(self.watch_itself())]
        await self.learn()
        self.report()
        for place, each in enumerate(self.frontends):
            # In turn, and another picture each time.
            first = self.every_s * place / len(self.frontends)
            turn = itertools.cycle(self.pictures[place:] + self.pictures[:place])
            ask, probe = lambda each=each, turn=turn: self.ask(each, next(turn)), lambda each=each: self.probe(each)
            for span, action in ((self.every_s, ask), (PROBE_EVERY_S, probe)):
                loops.append(asyncio.create_task(self.every(span, first, action)))
        print("ready", flush=True)
        while word := await asyncio.to_thread(sys.stdin.readline):
            report = await self.report_at_rest() if word == "rest\n" else self.report()
            print(json.dumps(report), flush=True)
        os._exit(0)


class Measurement:
    """A control client that runs, as seen by the process that started it."""

    def __init__(self, *addresses, every_s=ASK_EVERY_S):
        names = [f"{host}:{port}" for host, port in addresses]
        command = [sys.executable, str(Path(__file__)), str(every_s * 1e3), *names]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # Returns when it has had an answer.
        self.process.stdout.readline()

    def seen(self):
        """What it has seen since the last call."""
        return self.told("seen")

    def rested(self):
        """The same, once all that it has asked has ended, answered or not."""
        return self.told("rest")

    def told(self, word):
        print(word, file=self.process.stdin, flush=True)
        seen = json.loads(self.process.stdout.readline())
        return Seen(**seen | {key: Counter(seen[key]) for key in ("failed", "unhealthy")})

    def end(self):
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    asyncio.run(Control(float(sys.argv[1]) / 1e3, sys.argv[2:]).run())
