"""What a model in Python is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Mapping, Sequence, Union

if TYPE_CHECKING:
    import numpy as np

    #: Of all tasks; or, where lengths vary, a list with one for each task.
    Output = Union[np.ndarray, list[np.ndarray]]
    Outputs = Union[Output, Mapping[str, Output], Sequence[Output]]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a model."""

    name: str
    #: As the Open Inference Protocol spells it: `FP32`, `INT64`, `BYTES`, ...
    datatype: str
    #: Without the dimension for the tasks of a batch; -1 for a length that varies.
    shape: tuple[int, ...]
    #: Whether requests may leave it out.
    optional: bool
    #: Bytes of one task's elements, at most.
    bytes_max: int


@dataclass(frozen=True)
class Context:
    """What a model is told when it is loaded."""

    name: str
    version: str
    #: Its folder in the repository.
    folder: str
    #: Its `model.py`.
    file: str
    #: Tasks of a batch, at most.
    max_batch: int
    #: Whether tensors have a first dimension for the tasks of a batch. If not, a batch is one task.
    is_batched: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: `config.pbtxt` as JSON, in Triton's fields.
    config: dict[str, Any]

    def parameter(self, key: str, default: str = "") -> str:
        """The string that `parameters` of the configuration has for this key."""
        found = self.config.get("parameters", {}).get(key)
        return found["string_value"] if found else default


class Model:
    """A model: subclass it in `model.py` and say what `predict` does."""

    def load(self, context: Context) -> None:
        """Called once, before the first batch. An exception here refuses the model, with its text."""

    def predict(self, batch: Mapping[str, np.ndarray]) -> Outputs:
        """Runs a batch. Inputs come by their names, each for all tasks at once: `[tasks, *dims]`, or `dims` if the
        model has no batches; one that is left out is not there. They are views of memory that the next batch overwrites,
        and cannot be written. BYTES are objects: `bytes`. Where lengths vary, a call has tasks of one shape.

        Outputs are given by their names, or as a sequence in the configuration's order, or as the only one's array. One
        whose length varies may be a list, with an array for each task.
        An exception fails these tasks, with its text, and no others.
        """
        raise NotImplementedError

    def unload(self) -> None:
        """Called once, when the model is not wanted any more and has time to put things in order."""
