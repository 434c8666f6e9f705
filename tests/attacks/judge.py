"""What an attack is, and how a cluster is judged that has been under it: by what an operator would see."""

import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import http1
from cluster import Cluster, Unsupported

# Of the control client's answers, and of every member's memory.
GAP_MAX_S = 1.0
GROWTH_MAX = 600 << 20
# Of the control client's requests, how many may be refused. Some more may be late: a window that a backend misses, as
# happens on a machine that others use, too, is answered 504.
REFUSED_MAX, LATE = 3, "504"
# What is still there a moment after the attack: allocators keep some, nothing else may.
KEPT_MAX = 300 << 20
# Beyond this a member is killed, before it takes the machine with it.
DOOMED = 6 << 30
# The control client is watched for so long after the attack, too.
AFTER_S = 0.4
KEPT_WAIT_S = 2.5


@dataclass(frozen=True)
class Attack:
    """Something that a client, a stranger, a peer or the machine can do."""

    name: str
    body: Callable[["Scene"], str | None]
    # Of `cluster.LAYOUTS`.
    cluster: str
    # Left out unless it is asked for.
    is_slow: bool
    # The attack is stopped after so long, which is a failure.
    limit_s: float
    # Whether the control client and health are judged; not where nobody is left to answer them.
    is_control_judged: bool
    # Members that are to end.
    ends: tuple[str, ...]
    # The cluster has no further use afterwards.
    is_last: bool

    @property
    def text(self):
        return " ".join((self.body.__doc__ or "").split())


ATTACKS: dict[str, Attack] = {}


def attack(cluster="up", is_slow=False, limit_s=8.0, is_control_judged=True, ends=(), is_last=False):
    """Lists a function under its name. It is given the scene, and may tell in a few words what was answered."""

    def listed(body):
        name = body.__name__.replace("_", "-")
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, body, cluster, is_slow, limit_s, is_control_judged, ends, is_last)
        return body

    return listed


class Skipped(Exception):
    """The attack cannot be tried here; the text says what it needs."""


@dataclass
class Scene:
    """What an attack sees of the cluster. It runs in a process of its own."""

    cluster: Cluster
    failures: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def http(self):
        return self.cluster.http

    @property
    def grpc(self):
        return self.cluster.grpc

    def expect(self, holds, failure):
        """Something that this attack must not bring about; `failure` says what did happen."""
        if not holds:
            self.failures.append(failure)

    def is_over(self, seconds):
        """Whether the attack has lasted for so long."""
        return time.monotonic() - self.began > seconds

    def ask(self, method, path, body=b"", headers=(), source=http1.ATTACKER, timeout=5.0):
        """The reply to one request; `None` if there was none."""
        try:
            return http1.ask(self.http, method, path, body, headers, source, timeout)
        except OSError:
            return None

    def status(self, *request, **options):
        reply = self.ask(*request, **options)
        return reply.status if reply else None

    def metrics(self):
        """What is scraped, as its lines."""
        reply = self.ask("GET", "/metrics", source=http1.CONTROL)
        return reply.body.decode().splitlines() if reply else []

    def wait_for(self, happened, seconds):
        """Whether it happens within so many seconds."""
        until = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True


def told(counts):
    """Outcomes and how often there were any, such as `400 x 3, none x 1`."""
    return ", ".join(f"{outcome or 'none'} x {count}" for outcome, count in Counter(counts).most_common())


@dataclass
class Verdict:
    """What was seen during one attack."""

    name: str
    skipped: str | None = None
    failures: list[str] = field(default_factory=list)
    note: str = ""
    gap_s: float = 0.0
    growth_mb: int = 0
    kept_mb: int = 0
    health: str = ""
    control: str = ""
    seconds: float = 0.0

    @property
    def is_ok(self):
        return not self.failures

    def line(self):
        if self.skipped:
            return f"skipped attacks/{self.name}: needs {self.skipped}"
        seen = [f"worst gap {self.gap_s:.2f} s", f"growth {self.growth_mb} MB", f"kept {self.kept_mb} MB"]
        seen += [f"health {self.health}", f"control {self.control}", *([self.note] if self.note else [])]
        seen = f"{'ok' if self.is_ok else 'FAILED'} {self.name}: {', '.join(seen)}"
        return seen + "".join(f"\n    {failure}" for failure in self.failures)


def judge(attack, cluster, control):
    """Runs an attack against a cluster and judges what came of it."""
    verdict = Verdict(attack.name)
    members = dict(cluster.members)
    cluster.mark()
    control.seen()
    outcome = run_apart(attack, cluster, members.values())
    time.sleep(AFTER_S)
    seen = control.seen()
    verdict.skipped = outcome.get("skipped")
    verdict.failures += outcome.get("failures", [])
    verdict.note = outcome.get("note") or ""
    if attack.is_control_judged:
        judge_control(verdict, seen)
    judge_members(verdict, members, attack.ends)
    return verdict


def judge_control(verdict, seen):
    verdict.gap_s = round(seen.gap_s, 3)
    verdict.health = f"{seen.healthy}/{seen.probes}"
    verdict.control = f"{seen.answered}/{seen.asked}"
    if seen.gap_s >= GAP_MAX_S:
        verdict.failures.append(f"the control client had no answer for {seen.gap_s:.2f} s")
    if seen.failed:
        text = f"the control client was refused: {told(seen.failed)}"
        refused = sum(count for outcome, count in seen.failed.items() if outcome != LATE)
        if refused > REFUSED_MAX or seen.failed[LATE] > max(REFUSED_MAX, seen.asked // 5):
            verdict.failures.append(text)
        else:
            verdict.note = f"{verdict.note + '; ' if verdict.note else ''}{text}"
    if seen.unhealthy:
        verdict.failures.append(f"health was not answered: {told(seen.unhealthy)}")


def judge_members(verdict, members, ends):
    grown = max(members.values(), key=lambda member: member.growth())
    verdict.growth_mb = grown.growth() >> 20
    until = time.monotonic() + KEPT_WAIT_S
    while (kept := max(member.kept() for member in members.values())) >= KEPT_MAX and time.monotonic() < until:
        time.sleep(0.1)
    verdict.kept_mb = kept >> 20
    if grown.growth() >= GROWTH_MAX:
        verdict.failures.append(f"{grown.name} grew by {verdict.growth_mb} MB")
    if kept >= KEPT_MAX:
        verdict.failures.append(f"{verdict.kept_mb} MB stay")
    dead = [member for name, member in members.items() if name not in ends and not member.is_alive()]
    verdict.failures += [f"{member.name} ended with {member.ending()}" for member in dead]


def run_apart(attack, cluster, members):
    """What an attack says, which runs in a process of its own until it ends or has had its time."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=perform, args=(attack, cluster, theirs), daemon=True)
    process.start()
    theirs.close()
    until = time.monotonic() + attack.limit_s
    outcome = {"failures": [f"the attack had not ended after {attack.limit_s:.0f} s"]}
    is_doomed = False
    while time.monotonic() < until and not is_doomed:
        if ours.poll(0.05):
            try:
                outcome = ours.recv()
            except EOFError:
                outcome = {"failures": ["the attack's process died"]}
            break
        for member in members:
            if member.growth() > DOOMED:
                outcome = {"failures": [f"{member.name} was killed when it had grown by {member.growth() >> 20} MB"]}
                member.process.kill()
                is_doomed = True
    process.kill()
    process.join()
    return outcome


def perform(attack, cluster, pipe):
    # One machine stands for two here: the client's part of it is not to be taken from the cluster.
    os.nice(5)
    scene = Scene(cluster)
    outcome = {}
    try:
        outcome["note"] = attack.body(scene)
    except (Skipped, Unsupported) as reason:
        outcome["skipped"] = str(reason)
    except BaseException:
        scene.failures.append(f"the attack itself failed: {traceback.format_exc(limit=-3)}")
    outcome["failures"] = scene.failures
    pipe.send(outcome)
    # What it has open is closed all at once, as when a client goes away.
    os._exit(0)
