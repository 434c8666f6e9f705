"""The way to the backend: lines of JSON over a socket, tensors in shared memory (docs/process.md)."""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections import deque
from threading import Condition
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence, TypeVar, Union

PROTOCOL = 2
#: Letters of all reasons on a line together, and of one. Even escaped they are less than a line may have.
_REASONS_LENGTH_MAX = 100_000
_REASON_LENGTH_MAX = 1_000
#: Observations of histograms that wait for a batch; the oldest are lost beyond.
_OBSERVED_MAX = 10_000
#: Changes to metrics on a line.
_CHANGES_MAX = 250


class Output(NamedTuple):
    """An output of so many tasks."""

    name: str
    datatype: str
    #: With the dimension for the tasks, if the model has it.
    shape: tuple[int, ...]
    #: Its bytes, one piece after another: `bytes`, or arrays of them.
    pieces: Sequence[Any]


class Done(NamedTuple):
    """Tasks that have run: their outputs in the model's order."""

    tasks: int
    outputs: Sequence[Output]


class Failed(NamedTuple):
    """Tasks that have not, and why."""

    tasks: int
    reason: str


Answer = Union[Done, Failed]
Found = TypeVar("Found")


class Carried(NamedTuple):
    """A tensor that goes to another model, or comes from it."""

    name: str
    datatype: str
    #: With the dimension for the tasks, if the other model has it.
    shape: tuple[int, ...]
    #: Its bytes.
    data: Any


class CallError(Exception):
    """Why another model has not answered."""


class Channel:
    """Both ends' words, and the memory once the model is known. Threads of the model may call others at once: whichever
    waits first reads for all of them."""

    def __init__(self, control: socket.socket, memory: int):
        self._control = control
        self._lines = control.makefile("rb")
        self._memory_fd = memory
        self.memory: memoryview = memoryview(b"")
        self._area = (0, 0)
        #: Guards what is below; notified when anything of it has changed.
        self._changed = Condition()
        self._is_read = False
        self._is_over = False
        self._batches: deque[dict[str, Any]] = deque()
        #: Calls of this batch, with what came of them.
        self._calls: dict[int, Union[None, CallError, list[Carried]]] = {}
        self._last_call = 0
        self._has_batch = False
        self._is_ready = False
        #: Changes to metrics that the backend is not told yet: of each number what becomes of it, and what is observed.
        self._numbers: dict[tuple[Any, ...], tuple[str, float]] = {}
        self._observed: deque[dict[str, Any]] = deque(maxlen=_OBSERVED_MAX)
        #: Questions about metrics, with what came of them.
        self._told: dict[int, Optional[dict[str, Any]]] = {}
        self._last_question = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Channel":
        """That of the backend which has started this process."""
        control, memory = (int(environment[f"DOWNBEAT_{name}_FD"]) for name in ("CONTROL", "MEMORY"))
        # What the model starts is not to have them.
        for descriptor in (control, memory):
            os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=control), memory)

    def first(self) -> tuple[str, dict[str, Any]]:
        """What this process is for: to run a `model`, whose memory is mapped then, or to `complete` its configuration."""
        line = self._lines.readline()
        if not line:
            raise EOFError("the backend is gone")
        ((purpose, told),) = json.loads(line).items()
        if purpose == "model":
            if told["memory_bytes"] > 0:
                self.memory = memoryview(mmap.mmap(self._memory_fd, told["memory_bytes"]))
            self._area = (told["output_area"]["offset"], told["output_area"]["bytes"])
        return purpose, told

    def batches(self) -> Iterator[dict[str, Any]]:
        """Batches, until the backend wants this process to end."""
        while (batch := self._wait(self._next_batch)) is not None:
            with self._changed:
                self._has_batch = True
            yield batch["batch"]

    def _next_batch(self) -> Optional[tuple[Optional[dict[str, Any]]]]:
        if self._batches:
            return (self._batches.popleft(),)
        return (None,) if self._is_over else None

    def call(self, model: str, version: Optional[str], outputs: Sequence[str], timeout_us: int, inputs: list[Carried]) -> int:
        """Asks another model; `wait_for` yields what comes of it. A timeout of 0 is that of the model."""
        carried = [(name, datatype, shape, memoryview(data).cast("B")) for name, datatype, shape, data in inputs]
        with self._changed:
            if not self._has_batch:
                raise CallError("found no batch that runs, expected calls within execute")
            self._last_call += 1
            number = self._last_call
            said: dict[str, Any] = {"id": number, "model": model, "outputs": list(outputs)}
            said["inputs"] = [
                {"name": name, "datatype": datatype, "shape": shape, "bytes": len(data)}
                for name, datatype, shape, data in carried
            ]
            if version is not None:
                said["version"] = version
            if timeout_us > 0:
                said["timeout_us"] = timeout_us
            self._calls[number] = None
            self._say({"call": said})
            for *_, data in carried:
                self._control.sendall(data)
        return number

    def wait_for(self, call: int) -> list[Carried]:
        """What the other model has answered. Raises `CallError` if it has not."""

        def answer() -> Optional[tuple[Union[CallError, list[Carried]]]]:
            if call not in self._calls:
                return (CallError("the batch has ended that it belonged to"),)
            if self._is_over:
                return (CallError("the backend is gone"),)
            return None if self._calls[call] is None else (self._calls.pop(call),)  # type: ignore[return-value]

        found = self._wait(answer)
        if isinstance(found, CallError):
            raise found
        return found

    def change_metric(self, how: str, family: str, labels: dict[str, str], value: float) -> None:
        """Adds to a number, sets it or has a histogram observe it. The backend is told with what this process says next."""
        with self._changed:
            if how == "observe":
                self._observed.append({how: {"family": family, "labels": labels, "value": value}})
                if len(self._observed) >= _CHANGES_MAX and self._may_say():
                    self._say_changes()
                return
            key = (family, *sorted(labels.items()))
            before, was = self._numbers.get(key, ("increment", 0.0))
            self._numbers[key] = (how, value) if how == "set" else (before, was + value)

    def ask_metrics(self, change: dict[str, Any]) -> dict[str, Any]:
        """Makes a change to metrics, and waits for what became of it; nothing where nobody listens any more."""
        with self._changed:
            if self._is_over:
                return {}
            if not self._may_say():
                return {"failed": "found no batch that runs, expected it within initialize or execute"}
            self._say_changes()
            self._last_question += 1
            number = self._last_question
            self._told[number] = None
            self._say({"metrics": {"id": number, "changes": [change]}})

        def answer() -> Optional[tuple[dict[str, Any]]]:
            if self._is_over:
                return ({},)
            return None if self._told[number] is None else (self._told.pop(number),)  # type: ignore[return-value]

        return self._wait(answer)

    def _may_say(self) -> bool:
        """Between batches nobody hears it."""
        return self._has_batch or not self._is_ready

    def _say_changes(self) -> None:
        changes: list[dict[str, Any]] = [
            {how: {"family": family, "labels": dict(labels), "value": value}}
            for (family, *labels), (how, value) in self._numbers.items()
        ]
        changes += self._observed
        self._numbers.clear()
        self._observed.clear()
        for begin in range(0, len(changes), _CHANGES_MAX):
            self._say({"metrics": {"changes": changes[begin : begin + _CHANGES_MAX]}})

    def _wait(self, find: Callable[[], Optional[tuple[Found]]]) -> Found:
        """Waits until `find` has found something, in what others read or by reading."""
        with self._changed:
            while (found := find()) is None:
                if self._is_read:
                    self._changed.wait()
                    continue
                self._is_read = True
                self._changed.release()
                try:
                    said = self._read()
                finally:
                    self._changed.acquire()
                    self._is_read = False
                    self._changed.notify_all()
                self._take(said)
            return found[0]

    def _read(self) -> Optional[tuple[dict[str, Any], list[bytes]]]:
        """The next that the backend says, with the bytes that follow."""
        line = self._lines.readline()
        if not line:
            return None
        said = json.loads(line)
        outputs = said.get("called", {}).get("outputs", ())
        return said, [self._lines.read(output["bytes"]) for output in outputs]

    def _take(self, read: Optional[tuple[dict[str, Any], list[bytes]]]) -> None:
        if read is None:
            self._is_over = True
            return
        said, data = read
        called, told = said.get("called"), said.get("metrics")
        if told is not None:
            if told["id"] in self._told:
                self._told[told["id"]] = told
        elif called is None:
            self._batches.append(said)
        elif called["id"] in self._calls:
            outputs = zip(called.get("outputs", ()), data)
            answer = [Carried(found["name"], found["datatype"], tuple(found["shape"]), of) for found, of in outputs]
            self._calls[called["id"]] = CallError(called["failed"]) if "failed" in called else answer

    def _end_batch(self) -> None:
        """Calls that nobody waits for any more end with their batch."""
        with self._changed:
            self._say_changes()
            self._has_batch = False
            self._calls.clear()
            self._changed.notify_all()

    def ready(self) -> None:
        with self._changed:
            self._say_changes()
            self._is_ready = True
            self._say({"ready": {"protocol": PROTOCOL}})

    def complete(self, config: dict[str, Any]) -> None:
        """What the configuration lacked."""
        self._say({"config": config})

    def refuse(self, reason: str) -> None:
        """The model cannot be loaded, or its configuration not completed."""
        self._say({"refused": reason[:_REASON_LENGTH_MAX]})

    def fail(self, batch: int, reason: str) -> None:
        self._end_batch()
        self._say({"failed": {"id": batch, "reason": reason[:_REASON_LENGTH_MAX]}})

    def answer(self, batch: int, answers: Iterable[Answer]) -> None:
        """Puts outputs into the memory, and says where they are and what became of the other tasks."""
        answers = list(answers)
        self._end_batch()
        failures = sum(isinstance(answer, Failed) for answer in answers)
        longest = min(_REASON_LENGTH_MAX, _REASONS_LENGTH_MAX // max(failures, 1))
        groups, offset = [], self._area[0]
        for answer in answers:
            if isinstance(answer, Failed):
                groups.append({"tasks": answer.tasks, "failed": answer.reason[:longest]})
                continue
            placed = []
            for output in answer.outputs:
                end = self._write(output, offset)
                placed.append({"datatype": output.datatype, "shape": output.shape, "offset": offset, "bytes": end - offset})
                offset = end
            groups.append({"tasks": answer.tasks, "outputs": placed})
        self._say({"done": {"id": batch, "groups": groups}})

    def _write(self, output: Output, offset: int) -> int:
        """Yields where it ends."""
        room = sum(self._area) - offset
        found = sum(map(len, output.pieces))
        if found > room:
            raise ValueError(f"output {output.name} has {found} bytes, expected at most {room}")
        for piece in output.pieces:
            self.memory[offset : offset + len(piece)] = piece
            offset += len(piece)
        return offset

    def _say(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._changed:
            self._control.sendall(line)
