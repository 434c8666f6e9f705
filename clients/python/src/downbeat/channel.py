"""The way to the backend: lines of JSON over a socket, tensors in shared memory (docs/process.md)."""

from __future__ import annotations

import json
import mmap
import os
import socket
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence, Union

PROTOCOL = 2
#: Letters of all reasons on a line together, and of one. Even escaped they are less than a line may have.
_REASONS_LENGTH_MAX = 100_000
_REASON_LENGTH_MAX = 1_000


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


class Channel:
    """Both ends' words, and the memory once the model is known."""

    def __init__(self, control: socket.socket, memory: int):
        self._control = control
        self._lines = control.makefile("rb")
        self._memory_fd = memory
        self.memory: memoryview = memoryview(b"")
        self._area = (0, 0)

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
        for line in self._lines:
            yield json.loads(line)["batch"]

    def ready(self) -> None:
        self._say({"ready": {"protocol": PROTOCOL}})

    def complete(self, config: dict[str, Any]) -> None:
        """What the configuration lacked."""
        self._say({"config": config})

    def refuse(self, reason: str) -> None:
        """The model cannot be loaded, or its configuration not completed."""
        self._say({"refused": reason[:_REASON_LENGTH_MAX]})

    def fail(self, batch: int, reason: str) -> None:
        self._say({"failed": {"id": batch, "reason": reason[:_REASON_LENGTH_MAX]}})

    def answer(self, batch: int, answers: Iterable[Answer]) -> None:
        """Puts outputs into the memory, and says where they are and what became of the other tasks."""
        answers = list(answers)
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
        self._control.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
