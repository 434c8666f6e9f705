"""`downbeat.serve(repository)`: a cluster on this host that lives as long as this interpreter, for notebooks and tests.

It is a process of `downbeat up`. `stop()` and the interpreter's exit tell it to end, as Ctrl-C does (SIGINT): it answers
what is under way, and gives no load balancer time to look elsewhere. Should the interpreter be killed, Linux tells it so:
not of the end of the process that started it, but of that of the thread (prctl(2), PR_SET_PDEATHSIG). Cells and requests
come and go on threads, so a thread of its own starts `up`, and reads what it says until it has ended.
"""

from __future__ import annotations

import atexit
import collections
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Callable, Optional, Sequence, Union

PathLike = Union[str, "os.PathLike[str]"]

#: Lines of logs that are kept, and bytes of one; a longer one is several.
LINES_MAX = 1_000
LINE_BYTES_MAX = 4_096
#: Lines that an error shows.
LAST_LINES = 20
#: How long `up` may take to end: more than it lets requests that are under way take.
STOP_TIMEOUT_S = 40.0
#: Its exit codes where it ends in good order.
STOPPED = (0, 130)
#: How long it may take where it serves nobody yet; and the end of the log is waited for so long, as members end with `up`.
PATIENCE_S = 5.0

# What becomes `up`: python -c TIED PARENT PROGRAM ARGUMENT... It asks for the signal itself, as `preexec_fn` may hang where
# there are threads; the parent may have ended before that. Python's own choices of signals are not for `up`.
TIED = """
import os, signal, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal.SIGINT))
except (ImportError, OSError):
    pass  # At the interpreter's exit it is told to end all the same.
if os.getppid() != int(sys.argv[1]):
    sys.exit("the interpreter has ended")
for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error}")
"""


class ServeError(RuntimeError):
    """`downbeat up` could not be started, or has ended before it was ready. The text has what it said last."""


def serve(
    repository: Optional[PathLike] = None,
    *,
    models: Sequence[str] = (),
    config: Optional[PathLike] = None,
    http: Optional[str] = "127.0.0.1:0",
    grpc: Optional[str] = "127.0.0.1:0",
    args: Sequence[str] = (),
    binary: Optional[PathLike] = None,
    timeout: float = 120.0,
) -> Server:
    """Serves a repository of models, or an ONNX file; without either, the demo's models. Yields once they are ready.

    `models` are those that are loaded from the start, if not all. `config` is a file for `downbeat up --config`, and
    `args` are further flags of it. `http` and `grpc` say where to serve: port 0 is a free one, and None leaves it to
    `config`. `binary` is the program, else the one of downbeat's wheel, or of $PATH.

    Raises `ServeError` if `up` ends or refuses, and `TimeoutError` if it is not ready within `timeout` seconds.
    """
    program, words, held = find_binary(binary), ["up"], []
    if repository is not None:
        words += ["--model" if os.path.isfile(repository) else "--repository", os.fspath(repository)]
    if config is not None:
        words += ["--config", os.fspath(config)]
    for name in models:
        words += ["--load-model", name]
    try:
        for flag, address in (("--http", http), ("--grpc", grpc)):
            if address is not None:
                words += [flag, hold(address, held)]
        return Server([program, *words, *args], held, timeout)
    except BaseException:
        for port in held:
            port.close()
        raise


def find_binary(binary: Optional[PathLike]) -> str:
    """The program's path."""
    if binary is not None:
        found = shutil.which(os.fspath(binary))
        if found is None:
            raise ServeError(f"binary: found {os.fspath(binary)}, expected a program")
        return os.path.abspath(found)
    found = shipped_binary() or shutil.which("downbeat")
    if found is None:
        raise ServeError("found no `downbeat`, expected its wheel, a program of that name in $PATH, or `binary`")
    return os.path.abspath(found)


def shipped_binary() -> Optional[str]:
    """The one that came with this package: where its scripts were put, whatever kind of installation it is."""
    from importlib import metadata

    try:
        files = metadata.files("downbeat") or []
    except metadata.PackageNotFoundError:
        return None
    scripts = (str(file.locate()) for file in files if file.name == "downbeat" and file.parent.name in ("bin", "scripts"))
    return next(filter(shutil.which, scripts), None)


def hold(address: str, held: list[socket.socket]) -> str:
    """The address with a free port, if its port is 0. A socket in `held` keeps it: nobody else is given that port, while
    `up` may listen there by name, also when it has to start its frontend again."""
    host, _, port = address.rpartition(":")
    if port != "0":
        return address
    family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
    holder = socket.socket(family, kind, protocol)
    held.append(holder)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(place)
    return f"{host}:{holder.getsockname()[1]}"


class Server:
    """A running `downbeat up`; `serve` makes it. As a context manager it is stopped at the end."""

    #: Where HTTP is served, as `http://127.0.0.1:8000`; the first such place, if there are several.
    url: str
    #: The same of gRPC, as `grpc://127.0.0.1:8001`; None if it is not served.
    grpc_url: Optional[str]

    def __init__(self, command: Sequence[str], held: list[socket.socket], timeout: float):
        self.url, self.grpc_url = "", None
        self._held, self._owner = held, os.getpid()
        self._lines: collections.deque[str] = collections.deque(maxlen=LINES_MAX)
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._failure: Optional[Exception] = None
        self._told, self._telling = False, threading.Lock()
        # It is ready, or it has ended.
        self._started, self._ended = threading.Event(), threading.Event()
        atexit.register(self.stop)
        threading.Thread(target=self._run, args=[list(command)], name="downbeat up", daemon=True).start()
        try:
            self._wait(timeout)
        except BaseException:
            self.stop(PATIENCE_S)
            raise

    def _wait(self, timeout: float) -> None:
        """Until it is ready."""
        is_in_time = self._started.wait(timeout)
        if self.url:
            return
        if self._failure:
            raise ServeError(f"`downbeat up` cannot be started: {self._failure}") from self._failure
        last = "".join(list(self._lines.copy())[-LAST_LINES:]) or "nothing"
        if not is_in_time:
            raise TimeoutError(f"`downbeat up` is not ready after {timeout:g} s; it said last:\n{last}")
        raise ServeError(f"`downbeat up` {self._end()} before it was ready; it said last:\n{last}")

    @property
    def logs(self) -> str:
        """The last lines of `up` and of its members, `LINES_MAX` at most."""
        # As other threads write, and a forked process must not wait for them, it is copied in one piece.
        return "".join(self._lines.copy())

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Lets it answer what is under way, and end; after `timeout` seconds it is killed, and its members with it. It may
        have ended already. In a process that was forked from this one it does nothing."""
        if os.getpid() != self._owner:
            return
        with self._telling:
            # A second signal would end it at once.
            if not self._told:
                self._told = True
                self._signal(signal.SIGINT)
        if not self._ended.wait(timeout):
            self._signal(signal.SIGKILL)
            self._ended.wait()
        for port in self._held:
            port.close()
        atexit.unregister(self.stop)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<downbeat.Server at {self.url or 'no address'}, {self._end()}>"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "running" if self._process else "not started"
        if self._told and code in STOPPED:
            return "stopped"
        return f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"

    def _run(self, command: list[str]) -> None:
        """Starts it, and reads until it has ended: on a thread whose end would end it."""
        tied = [sys.executable, "-I", "-S", "-c", TIED, str(self._owner), *command]
        pipe = subprocess.PIPE
        try:
            with self._telling:
                if self._told:
                    return
                # Ctrl-C, and a kernel that is interrupted, are for the interpreter.
                self._process = subprocess.Popen(
                    tied, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
                )
            log = threading.Thread(target=self._read, args=[self._process.stderr], name="downbeat log", daemon=True)
            log.start()
            self._read(self._process.stdout, self._hear)
            self._process.wait()
            log.join(PATIENCE_S)
        except Exception as error:
            self._failure = error
        finally:
            self._ended.set()
            self._started.set()

    def _read(self, pipe: Any, hear: Callable[[str], None] = lambda text: None) -> None:
        with pipe:
            for line in iter(lambda: pipe.readline(LINE_BYTES_MAX), b""):
                text = line.decode(errors="replace")
                self._lines.append(text)
                hear(text)

    def _hear(self, text: str) -> None:
        """What `up` itself says: where models are served, once they are."""
        if self.url:
            return
        if text.startswith("{"):
            # As --log-format json has it.
            try:
                text = json.loads(text)["message"]
            except (ValueError, LookupError):
                return
        ready = re.match(r"ready: .* at (\S+(?:, \S+)*)$", text)
        if ready is None:
            return
        places = ready[1].split(", ")
        self.grpc_url = next((place for place in places if place.startswith("grpc://")), None)
        self.url = next((place for place in places if place.startswith("http://")), "")
        self._started.set()
