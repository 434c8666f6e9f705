"""Arrays out of bytes and back."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

#: Element types by their names in the Open Inference Protocol. BYTES are objects: `bytes`.
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    # NumPy has none: the bits, which are the upper half of a float32.
    "BF16": np.uint16,
    "BYTES": np.object_,
}

_LENGTH_BYTES = 4


def datatype_of(dtype: Any) -> str:
    """The element type of an array; what has no fixed size is BYTES."""
    dtype = np.dtype(dtype)
    return next((name for name, known in DTYPES.items() if dtype == known), "BYTES")


def from_bytes(datatype: str, shape: Sequence[int], data: memoryview) -> np.ndarray:
    """The array that lies in `data`: a view that cannot be written, or new objects of BYTES."""
    if datatype != "BYTES":
        array = np.frombuffer(data, dtype=DTYPES[datatype]).reshape(shape)
        array.flags.writeable = False
        return array
    elements, at = [], 0
    while at < len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        elements.append(bytes(data[at + _LENGTH_BYTES : end]))
        at = end
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(shape)


def to_bytes(name: str, datatype: str, array: Any) -> tuple[tuple[int, ...], Any]:
    """The shape of an output and its bytes. What can be cast without changing kind is: FP64 to FP32, but not to INT32."""
    array = np.asarray(array)
    if datatype == "BYTES":
        elements = [_element(name, element) for element in array.reshape(-1).tolist()]
        data = b"".join(len(element).to_bytes(_LENGTH_BYTES, "little") + element for element in elements)
        return array.shape, data
    dtype = np.dtype(DTYPES[datatype])
    if array.dtype != dtype:
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"output {name} is {array.dtype}, expected {datatype} ({dtype})")
        array = array.astype(dtype)
    # A flat view of a slice may keep its strides, and bytes have none: what is not contiguous is copied.
    return array.shape, np.ascontiguousarray(array.reshape(-1)).view(np.uint8)


def _element(name: str, element: Any) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        return element.encode()
    raise TypeError(f"output {name} has an element of {type(element).__name__}, expected bytes or str")
