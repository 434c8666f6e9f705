"""A backend for tests: its end of the socket, and the memory."""

from __future__ import annotations

import json
import mmap
import os
import socket
import textwrap
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import numpy as np
import pytest

from downbeat import program, tensors
from downbeat.channel import Channel

AREA = 1 << 14


class Backend:
    """Runs `program` on a thread for the model in `file`; without inputs it is asked for its configuration."""

    def __init__(self, file: Path, inputs: Optional[list[dict]], outputs: list[dict], config: Optional[dict] = None, batched: bool = True, told: Callable[[dict], dict] = lambda change: {}):
        ours, theirs = socket.socketpair()
        self._memory_fd = os.memfd_create("tensors")
        os.ftruncate(self._memory_fd, 2 * AREA)
        self._memory = memoryview(mmap.mmap(self._memory_fd, 2 * AREA))
        self._control, self._lines = ours, ours.makefile("rb")
        self._number = 0
        #: Changes to metrics that it has said, and what becomes of those that it asks about.
        self.changes: list[dict] = []
        self.told: Callable[[dict], dict] = told
        #: What calls are answered with: outputs by name, or why there are none. Nothing says that there is no answer.
        self.callee: Callable[[dict, dict[str, np.ndarray]], Any] = lambda call, inputs: "nobody can be asked"
        channel = Channel(theirs, os.dup(self._memory_fd))

        def run() -> None:
            try:
                self.code = program.serve(channel)
            finally:
                theirs.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        about = {
            "protocol": 2, "name": "model", "version": "1", "folder": str(file.parent.parent), "file": str(file),
            "max_batch": 8, "is_batched": batched, "inputs": inputs, "outputs": outputs, "memory_bytes": 2 * AREA,
            "output_area": {"offset": AREA, "bytes": AREA}, "config": config or {"input": [], "output": []},
        }
        if inputs is None:
            self._say({"complete": {key: about[key] for key in ("protocol", "name", "version", "folder", "file", "config")}})
        else:
            self._say({"model": about})
        self.started = self.hear()

    def _say(self, message: Any) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Any:
        """What it says next that is neither a call nor about metrics."""
        while {"call", "metrics"} & (said := json.loads(self._lines.readline())).keys():
            if "metrics" in said:
                self._take(said["metrics"])
                continue
            call = said["call"]
            data = [memoryview(self._lines.read(found["bytes"])) for found in call["inputs"]]
            inputs = {
                found["name"]: tensors.from_bytes(found["datatype"], found["shape"], of)
                for found, of in zip(call["inputs"], data)
            }
            answer = self.callee(call, inputs)
            if answer is not None:
                self.answer(call["id"], answer)
        return said

    def _take(self, said: dict) -> None:
        self.changes += said["changes"]
        if "id" in said:
            self._say({"metrics": {"id": said["id"], **self.told(said["changes"][-1])}})

    def answer(self, call: int, answer: Any) -> None:
        if isinstance(answer, str):
            self._say({"called": {"id": call, "failed": answer}})
            return
        told, data = [], b""
        for name, array in answer.items():
            datatype = tensors.datatype_of(array.dtype)
            shape, of = tensors.to_bytes(name, datatype, array)
            told.append({"name": name, "datatype": datatype, "shape": shape, "bytes": len(of)})
            data += bytes(of)
        self._say({"called": {"id": call, "outputs": told}})
        self._control.sendall(data)

    def run(self, *arrays: tuple[str, np.ndarray]) -> Any:
        """The outputs of a batch of one group, or why there are none."""
        answers = self.run_groups((len(arrays[0][1]), arrays))
        if isinstance(answers, str):
            return answers
        assert len(answers) == 1, answers
        (_, outputs), = answers
        return outputs

    def run_groups(self, *groups: tuple[int, Sequence[Optional[tuple[str, np.ndarray]]]]) -> Any:
        """Groups of the answer: tasks, and their outputs or why there are none. Or why the whole batch has none."""
        told, offset = [], 0
        for tasks, arrays in groups:
            placed = []
            for given in arrays:
                if given is None:
                    placed.append(None)
                    continue
                shape, data = tensors.to_bytes("input", *given)
                self._memory[offset : offset + len(data)] = bytes(data)
                placed.append({"datatype": given[0], "shape": shape, "offset": offset, "bytes": len(data)})
                offset += -(-len(data) // 64) * 64
            told.append({"tasks": tasks, "inputs": placed})
        self._number += 1
        self._say({"batch": {"id": self._number, "groups": told}})
        answer = self.hear()
        if "failed" in answer:
            assert answer["failed"]["id"] == self._number
            return answer["failed"]["reason"]
        assert answer["done"]["id"] == self._number
        answers = answer["done"]["groups"]
        assert sum(found["tasks"] for found in answers) == sum(tasks for tasks, _ in groups)
        return [(found["tasks"], found.get("failed") or list(map(self._output, found["outputs"]))) for found in answers]

    def _output(self, placed: dict) -> np.ndarray:
        begin, end = placed["offset"], placed["offset"] + placed["bytes"]
        assert AREA <= begin and end <= 2 * AREA
        return tensors.from_bytes(placed["datatype"], placed["shape"], self._memory[begin:end])

    def close(self) -> int:
        self._control.shutdown(socket.SHUT_WR)
        self._thread.join(10)
        return self.code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Backend]]:
    """Starts a backend for a model whose `model.py` has this text."""

    def start(text: str, *args: Any, **rest: Any) -> Backend:
        file = tmp_path / "model" / "1" / "model.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return Backend(file, *args, **rest)

    yield start


def tensor(name: str, datatype: str, *shape: int, optional: bool = False) -> dict:
    return {"name": name, "datatype": datatype, "shape": list(shape), "optional": optional, "bytes_max": 512}
