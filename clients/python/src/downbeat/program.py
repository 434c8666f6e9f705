"""What a backend starts to run a model in Python: `python3 -m downbeat.program`, or the same out of the backend's binary."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, NamedTuple, Optional, Protocol, Sequence

from downbeat import metrics
from downbeat.channel import Answer, Channel, Done, Failed, Output
from downbeat.model import Context, Model, TensorSpec

if TYPE_CHECKING:
    import numpy as np


class Group(NamedTuple):
    """Tasks of a batch whose inputs have the same shapes."""

    tasks: int
    #: By their names; those that are left out are not there.
    inputs: dict[str, "np.ndarray"]


class Runner(Protocol):
    """What runs batches, whichever kind of model it is."""

    def run(self, groups: Sequence[Group]) -> Iterable[Answer]:
        """What became of all tasks, in their order."""

    def close(self) -> None: ...


class PlainRunner:
    """Runs a `downbeat.Model`."""

    def __init__(self, model: Model, about: Context):
        self._model, self._about = model, about
        self._names = [output.name for output in about.outputs]
        model.load(about)

    def run(self, groups: Sequence[Group]) -> Iterator[Answer]:
        for group in groups:
            try:
                yield from self._run(group)
            except Exception as error:
                traceback.print_exc()
                yield Failed(group.tasks, reason_of(error))

    def _run(self, group: Group) -> list[Answer]:
        found = self._outputs(self._model.predict(group.inputs))
        specs = self._about.outputs
        is_apart = self._about.is_batched and any(
            isinstance(output, list) and -1 in spec.shape for spec, output in zip(specs, found)
        )
        if not is_apart:
            return [done(self._about, group.tasks, found)]
        for spec, output in zip(specs, found):
            if len(output) != group.tasks:
                raise ValueError(f"output {spec.name} has {len(output)} tasks, expected {group.tasks}")
        return [done(self._about, 1, [[of_task] for of_task in outputs]) for outputs in zip(*found)]

    def _outputs(self, found: Any) -> Sequence[Any]:
        if isinstance(found, dict):
            missing = [name for name in self._names if name not in found]
            if missing:
                raise KeyError(f"predict gave outputs {', '.join(map(str, found))}, expected {', '.join(missing)} too")
            return [found[name] for name in self._names]
        if len(self._names) == 1 and not isinstance(found, (list, tuple)):
            return [found]
        if len(found) != len(self._names):
            raise ValueError(f"predict gave {len(found)} outputs, expected {len(self._names)}: {', '.join(self._names)}")
        return found

    def close(self) -> None:
        self._model.unload()


def done(about: Context, tasks: int, arrays: Sequence[Any]) -> Done:
    """The model's outputs for so many tasks. Raises what is wrong with them."""
    from downbeat import tensors

    outputs = []
    for spec, array in zip(about.outputs, arrays):
        shape, data = tensors.to_bytes(spec.name, spec.datatype, array)
        expected = ((tasks,) if about.is_batched else ()) + spec.shape
        if len(shape) != len(expected) or any(want not in (-1, have) for want, have in zip(expected, shape)):
            raise ValueError(f"output {spec.name} has shape {list(shape)}, expected {list(expected)}")
        if len(data) > tasks * spec.bytes_max:
            most = f"at most {spec.bytes_max} a task (max_dims, max_bytes)"
            raise ValueError(f"output {spec.name} has {len(data)} bytes, expected {most}")
        outputs.append(Output(spec.name, spec.datatype, shape, (data,)))
    return Done(tasks, outputs)


def joined(about: Context, answers: Iterable[Answer]) -> Iterator[Answer]:
    """The same with neighbours as one whose outputs have the same shapes, or that fail for the same reason."""
    if not about.is_batched:
        yield from answers
        return

    def kind(answer: Answer) -> Any:
        return answer.reason if isinstance(answer, Failed) else [output.shape[1:] for output in answer.outputs]

    for _, same in groupby(answers, kind):
        first, *rest = same
        if not rest:
            yield first
            continue
        tasks = first.tasks + sum(answer.tasks for answer in rest)
        if isinstance(first, Failed):
            yield Failed(tasks, first.reason)
            continue
        columns = zip(*(answer.outputs for answer in (first, *rest)))
        outputs = [
            column[0]._replace(
                shape=(tasks, *column[0].shape[1:]), pieces=[piece for output in column for piece in output.pieces]
            )
            for column in columns
        ]
        yield Done(tasks, outputs)


def context(told: dict[str, Any]) -> Context:
    def specs(tensors: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                found["name"], found["datatype"], tuple(found["shape"]), found["optional"], found["bytes_max"]
            )
            for found in tensors
        )

    return Context(
        name=told["name"],
        version=told["version"],
        folder=told["folder"],
        file=told["file"],
        max_batch=told["max_batch"],
        is_batched=told["is_batched"],
        inputs=specs(told["inputs"]),
        outputs=specs(told["outputs"]),
        config=told["config"],
    )


def load(about: Context) -> Runner:
    """Runs the model's file, and finds the model in it."""
    module = load_file(about.file)
    if hasattr(module, "TritonPythonModel"):
        from downbeat.triton import TritonRunner

        return TritonRunner(module.TritonPythonModel, about)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Model) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        raise TypeError(f"{about.file}: found {names}, expected one subclass of downbeat.Model, or TritonPythonModel")
    return PlainRunner(found[0](), about)


def load_file(file: str) -> ModuleType:
    from downbeat import triton

    # Triton's name for what its models import, and files beside the model's own.
    sys.modules["triton_python_backend_utils"] = triton
    sys.path.insert(0, os.path.dirname(file))
    spec = importlib.util.spec_from_file_location("model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    spec.loader.exec_module(module)
    return module


def completed(told: dict[str, Any]) -> dict[str, Any]:
    """What the model's file adds to its configuration."""
    model = getattr(load_file(told["file"]), "TritonPythonModel", None)
    if not hasattr(model, "auto_complete_config"):
        raise TypeError("found no TritonPythonModel.auto_complete_config; say input and output in config.pbtxt")
    from downbeat.triton import auto_completed

    return auto_completed(model, told["config"])


def reason_of(error: BaseException) -> str:
    """The last line of a traceback."""
    return "".join(traceback.format_exception_only(type(error), error)).strip().replace("\n", " ")


def or_refuse(channel: Channel, file: str, load: Callable[[], Any]) -> Optional[Any]:
    """What `load` yields; nothing if it fails, which the backend is told."""
    try:
        return load()
    except ImportError as error:
        missing = f"the Python package {error.name} is missing for {sys.executable}" if error.name else str(error)
        hint = f"install it there, or name another interpreter by the parameter `python` ({reason_of(error)})"
        channel.refuse(f"{missing}: {hint}")
    except Exception as error:
        traceback.print_exc()
        channel.refuse(f"{file}: {reason_of(error)}" if file not in str(error) else reason_of(error))
    return None


def serve(channel: Channel) -> int:
    """Does what the backend has started this process for: runs batches until it wants no more, or completes a configuration."""
    purpose, told = channel.first()
    metrics.use(channel)
    if purpose == "complete":
        config = or_refuse(channel, told["file"], lambda: completed(told))
        if config is None:
            return 1
        channel.complete(config)
        return 0
    about = context(told)

    def load_calling() -> Runner:
        runner = load(about)
        # It needs numpy, which is told about if it is missing.
        from downbeat import calls

        calls.use(channel)
        return runner

    runner = or_refuse(channel, about.file, load_calling)
    if runner is None:
        return 1
    channel.ready()
    for batch in channel.batches():
        try:
            groups = [group(about, channel.memory, found) for found in batch["groups"]]
            channel.answer(batch["id"], joined(about, runner.run(groups)))
        except Exception as error:
            traceback.print_exc()
            channel.fail(batch["id"], reason_of(error))
    runner.close()
    return 0


def group(about: Context, memory: memoryview, told: dict[str, Any]) -> Group:
    """Tasks with their inputs, as they lie in memory."""
    from downbeat import tensors

    def array(placed: dict[str, Any]) -> "np.ndarray":
        data = memory[placed["offset"] : placed["offset"] + placed["bytes"]]
        return tensors.from_bytes(placed["datatype"], placed["shape"], data)

    given = zip(about.inputs, told["inputs"])
    return Group(told["tasks"], {spec.name: array(placed) for spec, placed in given if placed is not None})


def main() -> None:
    """Ends the process."""
    try:
        code = serve(Channel.from_environment())
    except KeyError as error:
        sys.exit(f"downbeat: {error} is not set; backends start this program (docs/process.md)")
    except BrokenPipeError:
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
