"""What the machine and its operator do: signals, a full disk, no files left, members that stop, hang or lose their
way."""

import ctypes
import os
import signal
import subprocess
import threading
import time

import http1
import http2
from cluster import FOLDER, REPOSITORY
from judge import Skipped, attack, told

JSON = [("Content-Type", "application/json")]
LOG_LEVEL = '{"log_verbose_level": %d}'
DRAIN_S = 25


@attack(cluster="few-files")
def no_files_left(scene):
    """1,000 connections to a frontend that may open 256 files; it says so now and then, not for each."""
    member = scene.cluster.members["frontend"]
    before = member.log_bytes()
    connections = http1.connect_many(scene.http, 1000, 1.5)
    time.sleep(1)
    logged = member.log_bytes() - before
    scene.expect(logged < 20_000, f"{logged} bytes were logged")
    return f"{len(connections)} connections, {logged} bytes logged"


def log_much(scene):
    """As an operator would who looks for something; then as it was."""
    status = scene.status("POST", "/v2/logging", (LOG_LEVEL % 2).encode(), JSON, timeout=1)
    # Every frame of HTTP/2 is told at that level: megabytes in a second, and still little work.
    connection = http2.Connection(scene.http, timeout=1)
    for _ in range(100):
        connection.send(http2.frame(http2.PING, 0, 0, bytes(8)) * 20)
        connection.pump(0.01)
    scene.ask("POST", "/v2/logging", (LOG_LEVEL % 0).encode(), JSON, timeout=1)
    return f"the level was set: {status}, {connection.frames[http2.PING]} of 2000 pings answered"


@attack(cluster="full-log")
def full_disk(scene):
    """The frontend's log is on a disk that is full, and much is logged."""
    return log_much(scene)


@attack(cluster="unread-log")
def unread_log(scene):
    """The frontend's log is a pipe that nobody reads, and much is logged."""
    return log_much(scene)


@attack(cluster="pair")
def stopped_backend(scene):
    """One of two backends stops for a second (SIGSTOP), as a machine does that swaps."""
    member = scene.cluster.members["backend-1"]
    member.signal(signal.SIGSTOP)
    time.sleep(1)
    member.signal(signal.SIGCONT)
    time.sleep(1)


@attack(cluster="pair", limit_s=12, is_last=True)
def hung_executor(scene):
    """The thread of a GPU hangs in the middle of its work; its process lives on, with heartbeats and all."""
    member = scene.cluster.members["backend-1"]
    before = {each.name: each.log_bytes() for each in scene.cluster.members.values()}
    with Frozen(member.process.pid, "gpu-0"):
        time.sleep(5)
        logged = [each.log_text(before[each.name]) for each in scene.cluster.members.values()]
        scene.expect(
            any(" WARN " in text or "ERROR " in text for text in logged), "no member said anything of it in 5 s"
        )
    gpus = "downbeat_scheduler_gpus 2"
    scene.expect(scene.wait_for(lambda: gpus in scene.metrics(), 4), "the GPU was not used again 4 s after it went on")


class Frozen:
    """One thread of a process, by its name, that does not run meanwhile (ptrace(2)): the others do."""

    ATTACH, DETACH, WAIT_ALL = 16, 17, 0x4000_0000

    def __init__(self, process, name):
        self.ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        folder = f"/proc/{process}/task"
        threads = {open(f"{folder}/{thread}/comm").read().strip(): int(thread) for thread in os.listdir(folder)}
        if name not in threads:
            raise Skipped(f"a thread {name}")
        self.thread = threads[name]

    def __enter__(self):
        if self.ptrace(self.ATTACH, self.thread, None, None) != 0:
            raise Skipped("ptrace")
        os.waitpid(self.thread, self.WAIT_ALL)

    def __exit__(self, *_):
        self.ptrace(self.DETACH, self.thread, None, None)


@attack(cluster="cut-off", limit_s=12, ends=("backend-1",), is_last=True)
def unreachable_frontend(scene):
    """The packets of one of two backends to the frontend are lost, those to the scheduler are not: first while it
    is linked, then from its start on."""
    scene.cluster.cut()
    time.sleep(3.5)
    scene.cluster.members["backend-1"].signal(signal.SIGKILL)
    newcomer = scene.cluster.start_backend(1, "backend-1-again")
    time.sleep(3)
    scene.expect(" linked" not in newcomer.log_text(), "the backend was linked although its packets are lost")
    return "joined" if " joined" in newcomer.log_text() else "not joined"


class UnderWay:
    """Requests of half a second each."""

    def __init__(self, address, count=32):
        self.address, self.statuses = address, []
        body = b'{"inputs": [{"name": "bytes", "shape": [1, 16], "datatype": "UINT8", "data": [%s0]}]}' % (b"0," * 15)
        self.raw = http1.request("POST", "/v2/models/slow/infer", body)
        self.threads = [threading.Thread(target=self.ask, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()
        time.sleep(0.3)

    def ask(self):
        found = http1.replies(self.address, self.raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), timeout=20)
        self.statuses.append(found[0].status if found else None)

    def expect_answers(self, scene):
        for thread in self.threads:
            thread.join(15)
        lost = [status for status in self.statuses if status != 200]
        scene.expect(not lost, f"{len(lost)} of {len(self.threads)} requests under way were lost: {told(lost)}")
        return told(self.statuses)


def expect_ending(scene, member, code="exit code 0", seconds=DRAIN_S):
    """Whether a member that was told to end does so."""
    if scene.wait_for(lambda: not member.is_alive(), seconds):
        scene.expect(member.ending() == code, f"{member.name} ended with {member.ending()}, expected {code}")
    else:
        scene.expect(False, f"{member.name} had not ended after {seconds} s")


@attack(cluster="pair", limit_s=40, is_control_judged=False, ends=("frontend",), is_last=True)
def terminated_frontend(scene):
    """SIGTERM to the frontend with 32 requests under way: it is not ready at once, serves for a grace, answers those,
    and ends."""
    under_way = UnderWay(scene.http)
    idle = http2.Connection(scene.http)
    idle.pump(0.1)
    member = scene.cluster.members["frontend"]
    member.signal(signal.SIGTERM)
    time.sleep(0.1)
    for path, expected in (("/v2/health/ready", 503), ("/v2/health/live", 200)):
        found = scene.status("GET", path)
        scene.expect(found == expected, f"{path} was answered {found}, expected {expected}")
    closing = under_way.raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    found = http1.replies(scene.http, closing, timeout=20)
    scene.expect(
        [reply.status for reply in found] == [200], f"a new request was answered {told(r.status for r in found)}"
    )
    answered = under_way.expect_answers(scene)
    # It has asked nothing yet, so the end of the grace is soon enough.
    was_told = idle.pump_until(lambda: idle.frames[http2.GOAWAY] > 0, 5)
    scene.expect(was_told, "an HTTP/2 connection was not sent GOAWAY")
    expect_ending(scene, member)
    return answered


@attack(cluster="pair", limit_s=40, is_control_judged=False, ends=("frontend",), is_last=True)
def terminated_twice(scene):
    """A second SIGTERM ends a frontend at once, with requests under way."""
    under_way = UnderWay(scene.http)
    member = scene.cluster.members["frontend"]
    member.signal(signal.SIGTERM)
    time.sleep(0.1)
    scene.expect(member.is_alive(), "it ended with requests under way")
    if member.is_alive():
        member.signal(signal.SIGTERM)
    scene.expect(scene.wait_for(lambda: not member.is_alive(), 0.3), "it had not ended 0.3 s after the second one")
    return f"{len(under_way.statuses)} answered by then"


def terminate(scene, name):
    """SIGTERM to a member with requests under way, which are to be answered before it ends."""
    under_way = UnderWay(scene.http)
    member = scene.cluster.members[name]
    member.signal(signal.SIGTERM)
    answered = under_way.expect_answers(scene)
    expect_ending(scene, member)
    return answered


@attack(cluster="pair", limit_s=40, ends=("backend-1",), is_last=True)
def terminated_backend(scene):
    """SIGTERM to one of two backends with 32 requests under way: none is lost, and it ends."""
    return terminate(scene, "backend-1")


@attack(cluster="pair", limit_s=40, is_control_judged=False, ends=("scheduler",), is_last=True)
def terminated_scheduler(scene):
    """SIGTERM to the scheduler with 32 requests under way: none is lost, and it ends."""
    return terminate(scene, "scheduler")


@attack(limit_s=60)
def terminated_up(scene):
    """SIGTERM to `downbeat up` with 32 requests under way: all are answered, and nothing is left behind."""
    address = f"{scene.cluster.host}.5", 8000
    file = FOLDER / "up.toml"
    file.write_text(
        f'repository = "{REPOSITORY}"\npolicy = "eager"\ngrpc = []\n[[backend]]\ngpus = 2\nmodels = ["slow"]\n'
    )
    command = [scene.cluster.binary, "up", "--config", str(file), "--http", "%s:%d" % address]
    with open(FOLDER / "up.log", "wb") as log:
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    lines = []
    for line in up.stdout:
        lines.append(line)
        if line.startswith("ready"):
            break
    processes = [int(line.rpartition(" ")[2]) for line in lines if ": process " in line]
    under_way = UnderWay(address)
    up.send_signal(signal.SIGTERM)
    answered = under_way.expect_answers(scene)
    try:
        up.wait(DRAIN_S)
    except subprocess.TimeoutExpired:
        scene.expect(False, f"it had not ended after {DRAIN_S} s")
        up.kill()
    left = [process for process in processes if os.path.exists(f"/proc/{process}")]
    scene.expect(not left, f"{len(left)} of {len(processes)} members are left")
    return f"{answered}; exit code {up.returncode}"


@attack()
def hangup_signal(scene):
    """SIGHUP to the frontend, which reads its files anew then: nobody is cut off, nor is anything lost."""
    connection = http2.Connection(scene.http)
    connection.pump(0.1)
    member = scene.cluster.members["frontend"]
    for _ in range(3):
        member.signal(signal.SIGHUP)
        time.sleep(0.3)
    scene.expect(connection.pump(0.1), "a connection was cut")
