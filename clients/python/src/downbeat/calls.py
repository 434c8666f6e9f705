"""Other models, as a model asks them while it runs a batch."""

from __future__ import annotations

from typing import Mapping, Optional, Sequence

import numpy as np

from downbeat import tensors
from downbeat.channel import CallError, Carried, Channel

__all__ = ["CallError", "begin", "use", "wait_for"]

_channel: Optional[Channel] = None


def use(channel: Channel) -> None:
    """Calls go this way from now on."""
    global _channel
    _channel = channel


def begin(
    model: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = (), version: Optional[str] = None, timeout_us: int = 0
) -> int:
    """Asks another model or ensemble, and does not wait. Without outputs all of them are wanted."""
    carried = []
    for name, array in inputs.items():
        datatype = tensors.datatype_of(array.dtype)
        shape, data = tensors.to_bytes(name, datatype, array)
        carried.append(Carried(name, datatype, shape, data))
    return _way().call(model, version, outputs, timeout_us, carried)


def wait_for(call: int) -> dict[str, np.ndarray]:
    """The outputs of a call. Raises `CallError` with the reason if there are none."""
    answer = _way().wait_for(call)
    return {name: tensors.from_bytes(datatype, shape, memoryview(data)) for name, datatype, shape, data in answer}


def _way() -> Channel:
    if _channel is None:
        raise CallError("found no backend that runs this model, expected one")
    return _channel
