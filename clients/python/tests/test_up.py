"""`downbeat.serve`, with a small program in the place of `downbeat up`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, Callable, Iterator
from urllib.parse import urlsplit

import pytest

import downbeat
from downbeat import up

# Far more than a busy machine takes: nothing is waited for that does not come.
PATIENCE_S = 60
# It behaves as --server-name says. Whoever connects hears what it was started with; the connection ends with it.
FAKE = '''\
#!{python}
import os, signal, socket, sys

words = sys.argv[1:]
def value(flag):
    return words[words.index(flag) + 1] if flag in words else None
http, grpc, kind = value("--http"), value("--grpc"), value("--server-name")
if kind == "refuses":
    print("downbeat: --repository: found /nowhere, expected a folder", file=sys.stderr)
    sys.exit(2)
def end(number, frame):
    if kind == "does not end":
        return
    print("told to end", flush=True)
    os._exit(130)
signal.signal(signal.SIGINT, end)
print("scheduler: process 1", flush=True)
if kind == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "floods":
    sys.stderr.write("".join(f"line {{number}}\\n" for number in range(20_000)) + "x" * 1_000_000)
    sys.stderr.flush()
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
host, _, port = http.rpartition(":")
listener.bind((host, int(port)))
listener.listen()
ready = f"ready: digits at me, resnet50 at http://{{http}}, grpc://{{grpc}}"
if kind == "in JSON":
    print("{{ no object\\n" + '{{"level": "INFO", "message": "' + ready + '"}}', flush=True)
elif kind != "is never ready":
    print(ready, flush=True)
open_ = []
while True:
    peer, _ = listener.accept()
    open_.append(peer)
    peer.sendall((repr([os.getpgid(0), words]) + "\\n").encode())
'''


@pytest.fixture
def fake(tmp_path: Path) -> str:
    file = tmp_path / "fake up"
    file.write_text(FAKE.format(python=sys.executable))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.fixture
def serve(fake: str) -> Iterator[Callable[..., downbeat.Server]]:
    """Serves with the fake, of some kind; whatever is left is stopped."""
    made = []

    def serve(kind: str = "", repository: Any = None, args: Any = (), **options: Any) -> downbeat.Server:
        words = ["--server-name", kind, *args] if kind else args
        made.append(downbeat.serve(repository, binary=fake, args=words, timeout=options.pop("timeout", PATIENCE_S), **options))
        return made[-1]

    yield serve
    for server in made:
        server.stop(timeout=0)


class Caller:
    """A connection to the fake: what it was started with, and its end."""

    def __init__(self, url: str):
        at = urlsplit(url)
        self.socket = socket.create_connection((at.hostname, at.port), PATIENCE_S)
        self.lines = self.socket.makefile("rb")
        self.group, self.words = eval(self.lines.readline())

    def wait_for_end(self) -> None:
        try:
            assert self.lines.readline() == b""
        except ConnectionResetError:
            pass


def test_it_serves_on_free_ports_until_it_is_stopped(serve):
    server, other = serve(), serve()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.url) and server.grpc_url.startswith("grpc://127.0.0.1:")
    assert len({server.url, server.grpc_url, other.url, other.grpc_url}) == 4
    caller = Caller(server.url)
    assert caller.group != os.getpgid(0), "Ctrl-C would end it"
    server.stop()
    caller.wait_for_end()
    assert server.logs.endswith("told to end\n") and "stopped" in repr(server)
    server.stop()
    Caller(other.url)


def test_the_port_is_held_until_then(serve):
    server = serve()
    address = urlsplit(server.url)
    with socket.socket() as taken, pytest.raises(OSError):
        taken.bind((address.hostname, address.port))
    server.stop()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((address.hostname, address.port))


def test_keywords_are_flags(serve, tmp_path):
    options = {"models": ["a", "b"], "config": tmp_path / "c.toml", "args": ["--strict"], "grpc": None}
    server = serve(repository=tmp_path, **options)
    http = server.url[len("http://") :]
    expected = ["up", "--repository", str(tmp_path), "--config", str(tmp_path / "c.toml")]
    expected += ["--load-model", "a", "--load-model", "b", "--http", http, "--strict"]
    assert Caller(server.url).words == expected
    file = tmp_path / "m.onnx"
    file.write_text("")
    assert Caller(serve(repository=file).url).words[:3] == ["up", "--model", str(file)]


def test_it_is_ready_when_it_says_so_in_json_too(serve):
    Caller(serve("in JSON").url)


def test_what_refuses_is_shown_with_its_own_words(serve):
    with pytest.raises(downbeat.ServeError) as refused:
        serve("refuses")
    assert "ended with exit code 2" in str(refused.value)
    assert str(refused.value).endswith("downbeat: --repository: found /nowhere, expected a folder\n")
    with pytest.raises(downbeat.ServeError, match="ended by signal 9 before it was ready(.|\n)*scheduler: process 1"):
        serve("is killed")


def test_what_is_never_ready_is_ended(serve):
    held: list = []
    address = up.hold("127.0.0.1:0", held)
    with held[0], pytest.raises(TimeoutError, match="is not ready after 0.5 s"):
        serve("is never ready", http=address, timeout=0.5)
    with pytest.raises(ConnectionRefusedError):
        Caller(f"http://{address}")


def test_a_flood_neither_holds_it_up_nor_fills_the_memory(serve):
    server = serve("floods")
    server.stop()
    assert len(server._lines) <= up.LINES_MAX and len(server.logs) <= up.LINES_MAX * up.LINE_BYTES_MAX
    assert "\nline 1000\n" not in server.logs and "told to end\n" in server.logs


def test_what_does_not_end_is_killed(serve):
    server = serve("does not end")
    caller = Caller(server.url)
    server.stop(timeout=0)
    caller.wait_for_end()
    assert "ended by signal 9" in repr(server)


def test_it_may_be_stopped_by_several_threads_at_once(serve):
    server = serve()
    threads = [threading.Thread(target=server.stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.logs.count("told to end") == 1 and "stopped" in repr(server)


def test_it_starts_within_a_running_event_loop(serve):
    async def cell() -> str:
        with serve() as server:
            return server.url

    assert asyncio.run(cell()).startswith("http://")


def test_it_outlives_the_thread_that_asked_for_it(serve):
    made = []
    thread = threading.Thread(target=lambda: made.append(serve()))
    thread.start()
    thread.join()
    Caller(made[0].url).socket.close()
    assert "running" in repr(made[0])


def test_a_forked_process_does_not_stop_it(serve):
    server = serve()
    # Threads are why whoever forks with an interpreter should not go on in it; this one ends at once.
    forked = os.fork()
    if not forked:
        server.stop(timeout=0)
        os._exit(0 if server.logs else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    Caller(server.url)
    assert "running" in repr(server)


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_it_ends_with_the_interpreter_however_that_ends(fake, end):
    script = f"""
    import os, sys, threading
    import downbeat
    made = []
    thread = threading.Thread(target=lambda: made.append(downbeat.serve(binary=sys.argv[1])))
    thread.start()
    thread.join()
    print(made[0].url, flush=True)
    sys.stdin.readline()
    {end}
    """
    package = str(Path(downbeat.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), fake],
        env={**os.environ, "PYTHONPATH": package},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as interpreter:
        caller = Caller(interpreter.stdout.readline().strip())
        interpreter.stdin.write("\n")
        interpreter.stdin.flush()
        caller.wait_for_end()


def test_ctrl_c_while_it_starts_ends_it(fake, tmp_path):
    script = """
    import signal, sys, downbeat
    # Whoever runs tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        downbeat.serve(binary=sys.argv[1], http=sys.argv[2], args=["--server-name", "is never ready"])
    except KeyboardInterrupt:
        sys.exit(7)
    """
    held: list = []
    address = up.hold("127.0.0.1:0", held)
    interpreter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), fake, address],
        env={**os.environ, "PYTHONPATH": str(Path(downbeat.__file__).parents[1])}, stderr=subprocess.DEVNULL,
    )
    while True:
        try:
            caller = Caller(f"http://{address}")
            break
        except ConnectionRefusedError:
            assert interpreter.poll() is None
    interpreter.send_signal(signal.SIGINT)
    assert interpreter.wait(PATIENCE_S) == 7
    caller.wait_for_end()
    held[0].close()


def test_a_program_that_is_none_is_named(tmp_path, monkeypatch):
    with pytest.raises(downbeat.ServeError, match="binary: found /nowhere/downbeat, expected a program"):
        downbeat.serve(binary="/nowhere/downbeat")
    monkeypatch.setattr(up, "shipped_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(downbeat.ServeError, match="found no `downbeat`"):
        downbeat.serve()
    wrong = tmp_path / "downbeat"
    wrong.write_text("#!/nowhere/sh\n")
    wrong.chmod(0o755)
    with pytest.raises(downbeat.ServeError, match=f"cannot start {wrong}"):
        downbeat.serve()


def test_the_wheels_program_comes_first(tmp_path, monkeypatch):
    """As pip installs it: a package, and a script that its record names."""
    site, scripts = tmp_path / "lib" / "site-packages", tmp_path / "bin"
    about = site / "downbeat-1.0.dist-info"
    about.mkdir(parents=True)
    scripts.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: downbeat\nVersion: 1.0\n")
    (about / "RECORD").write_text("downbeat/__init__.py,,\n../../bin/downbeat,,\n")
    program = scripts / "downbeat"
    program.write_text("#!/bin/sh\n")
    monkeypatch.syspath_prepend(str(site))
    assert up.shipped_binary() is None, "it cannot be run"
    program.chmod(0o755)
    assert os.path.realpath(up.find_binary(None)) == os.path.realpath(program)
