"""Models that were written for Triton's Python backend: what they call `triton_python_backend_utils`, and what runs
them. What is here is what such models have in common; what is not has a name all the same, and says so when it is used.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from enum import Enum
from typing import Any, Coroutine, Iterable, Iterator, Optional, Sequence, Union

import numpy as np

from downbeat import calls, metrics
from downbeat.channel import Answer, Failed
from downbeat.model import Context
from downbeat.program import Group, done, reason_of
from downbeat.tensors import DTYPES, datatype_of, from_bytes, to_bytes

_NAMES = {**{f"TYPE_{name}": dtype for name, dtype in DTYPES.items()}, "TYPE_STRING": np.object_}
del _NAMES["TYPE_BYTES"]

#: Triton tells models on which kind of device they run.
_KIND, _DEVICE = "CPU", "0"


class TritonModelException(Exception):
    """What Triton's models raise, and are raised."""


class TritonError:
    """Why a request has no outputs."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL):
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


def _checked(what: str, found: Any, *kinds: type) -> Any:
    """An argument, which is refused as Triton's refuse it."""
    if not isinstance(found, kinds):
        raise TypeError(f"{what}: found {found!r:.100}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    return found


def _tensors(what: str, found: Iterable[Any]) -> list["Tensor"]:
    tensors = list(found)
    if any(not isinstance(tensor, Tensor) for tensor in tensors):
        raise TritonModelException(f"{what}: found something else, expected tensors")
    return tensors


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray):
        if not _checked("Tensor: name", name, str):
            raise TypeError("Tensor: name: found none, expected that of an input or output")
        self._name, self._array = name, _checked(f"Tensor {name}", array, np.ndarray)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def triton_dtype(self) -> str:
        return numpy_to_triton_type(self._array.dtype)

    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        try:
            return Tensor(name, np.from_dlpack(tensor))
        except (TypeError, AttributeError) as error:
            raise TritonModelException(f"Tensor.from_dlpack: {error}") from error

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class InferenceRequest:
    """A request as a model sees it: one task, a row of what a client has sent. Or one that it asks another model."""

    def __init__(
        self,
        model_name: Union[str, bytes] = "",
        requested_output_names: Sequence[str] = (),
        inputs: Sequence[Tensor] = (),
        request_id: str = "",
        correlation_id: Union[int, str] = 0,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        **rest: Any,
    ):
        # Triton takes what an input of strings has.
        self._model_name = model_name.decode() if isinstance(model_name, bytes) else model_name
        _checked("InferenceRequest: model_name", self._model_name, str)
        self._outputs = [_checked("InferenceRequest: output", name, str) for name in requested_output_names]
        self._inputs = _tensors("InferenceRequest: inputs", inputs)
        self._request_id = _checked("InferenceRequest: request_id", request_id, str)
        self._correlation_id = _checked("InferenceRequest: correlation_id", correlation_id, int, str)
        self._model_version = _checked("InferenceRequest: model_version", model_version, int)
        self._flags = _checked("InferenceRequest: flags", flags, int)
        self._timeout = _checked("InferenceRequest: timeout", timeout, int)

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> Union[int, str]:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return "{}"

    def is_cancelled(self) -> bool:
        return False

    def get_response_sender(self) -> Any:
        raise TritonModelException("decoupled responses: found get_response_sender, expected one response to each request")

    def exec(self, decoupled: bool = False) -> InferenceResponse:
        """Asks the model that the request names, and waits for its response."""
        call = self._begin(decoupled)
        return call if isinstance(call, InferenceResponse) else _called(call)

    def async_exec(self, decoupled: bool = False) -> Coroutine[Any, Any, InferenceResponse]:
        """The same, to be awaited: several may be under way."""
        call = self._begin(decoupled)

        async def response() -> InferenceResponse:
            if isinstance(call, InferenceResponse):
                return call
            return await asyncio.get_running_loop().run_in_executor(None, _called, call)

        return response()

    def _begin(self, decoupled: bool) -> Union[int, InferenceResponse]:
        """The call, or why there is none."""
        if decoupled:
            raise TritonModelException("InferenceRequest.exec: found decoupled=True, expected one response")
        if not self._model_name:
            raise TritonModelException("InferenceRequest.exec: model_name: found none, expected that of a model")
        inputs = {tensor.name(): tensor.as_numpy() for tensor in self._inputs}
        version = None if self._model_version < 0 else str(self._model_version)
        try:
            return calls.begin(self._model_name, inputs, self._outputs, version, self._timeout)
        except calls.CallError as error:
            return InferenceResponse(error=TritonError(str(error)))


class InferenceResponse:
    """What a model answers to a request."""

    def __init__(self, output_tensors: Iterable[Tensor] = (), error: Optional[TritonError] = None):
        self._outputs, self._error = _tensors("InferenceResponse: output_tensors", output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> Optional[TritonError]:
        return self._error


def _called(call: int) -> InferenceResponse:
    """What came of a call."""
    try:
        return InferenceResponse([Tensor(name, array) for name, array in calls.wait_for(call).items()])
    except calls.CallError as error:
        return InferenceResponse(error=TritonError(str(error)))


class MetricFamily(metrics.Family):
    """Metrics of the model's own, on the backend's page for Prometheus."""

    error = TritonModelException
    COUNTER, GAUGE, HISTOGRAM = metrics.Kind


class LogLevel(Enum):
    """What a line of the log is. The backend's has them all alike."""

    INFO, WARNING, ERROR, VERBOSE = range(4)


class Logger:
    """Into the backend's log."""

    LogLevel = LogLevel
    INFO, WARNING, ERROR, VERBOSE = LogLevel

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        _checked("Logger: level", level, LogLevel)
        print(_checked("Logger: message", message, str), file=sys.stderr)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message)

    log_warn = log_error = log_verbose = log_info


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Optional[Tensor]:
    return _named(request.inputs(), name)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Optional[Tensor]:
    return _named(response.output_tensors(), name)


def _named(tensors: list[Tensor], name: str) -> Optional[Tensor]:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> Optional[dict[str, Any]]:
    return next((found for found in model_config.get("input", ()) if found["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> Optional[dict[str, Any]]:
    return next((found for found in model_config.get("output", ()) if found["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(name: str) -> Any:
    """`TYPE_FP32` is `numpy.float32`."""
    return _NAMES[name]


def numpy_to_triton_type(dtype: Any) -> str:
    """`numpy.float32` is `FP32`; what has no fixed size is BYTES."""
    return datatype_of(dtype)


def serialize_byte_tensor(tensor: np.ndarray) -> Optional[np.ndarray]:
    """An array of BYTES as they lie in a request, in one element."""
    return np.frombuffer(to_bytes("tensor", "BYTES", tensor)[1], dtype=np.uint8) if tensor.size else None


def deserialize_bytes_tensor(encoded: bytes) -> np.ndarray:
    """The other way round."""
    return from_bytes("BYTES", (-1,), memoryview(encoded))


def __getattr__(name: str) -> Any:
    raise AttributeError(f"triton_python_backend_utils.{name} does not exist here: see docs/process.md for what does")


class ModelConfig:
    """What `auto_complete_config` completes."""

    #: What a tensor may say.
    _NEEDED = ("name", "data_type", "dims")
    _KNOWN = (*_NEEDED, "optional", "reshape", "format", "label_filename", "is_shape_tensor", "allow_ragged_batch")

    def __init__(self, config: dict[str, Any]):
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, size: int) -> None:
        said = self._config.get("max_batch_size", 0)
        if said > size:
            raise ValueError(f"max_batch_size: found {size}, expected at least {said}, as the configuration says")
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        if policy.get("decoupled"):
            raise ValueError("model_transaction_policy.decoupled: found true, expected one response to each request")
        self._config["model_transaction_policy"] = dict(policy)

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor)

    def _add(self, kind: str, tensor: dict[str, Any]) -> None:
        missing = [key for key in self._NEEDED if key not in tensor]
        unknown = [key for key in tensor if key not in self._KNOWN]
        if missing or unknown:
            expected = f"{', '.join(missing)} too" if missing else f"no {', '.join(unknown)}"
            raise ValueError(f"{kind}: found {sorted(tensor)}, expected {expected}")
        tensors = self._config.setdefault(kind, [])
        known = next((found for found in tensors if found["name"] == tensor["name"]), None)
        if known is None:
            tensors.append(dict(tensor))
            return
        for key in ("data_type", "dims"):
            if known.get(key) not in (tensor[key], [], "TYPE_INVALID", None):
                name, found, said = tensor["name"], tensor[key], known[key]
                raise ValueError(f"{kind} {name}: {key}: found {found}, expected {said}, as the configuration says")
            known[key] = tensor[key]


#: Parts of a configuration that a model may complete.
_COMPLETED = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")


def auto_completed(model: type, config: dict[str, Any]) -> dict[str, Any]:
    """What a `TritonPythonModel` makes of a configuration."""
    found = model.auto_complete_config(ModelConfig(config))
    if not isinstance(found, ModelConfig):
        raise TypeError(f"auto_complete_config gave {type(found).__name__}, expected the ModelConfig that it was given")
    return {key: found.as_dict()[key] for key in _COMPLETED if key in found.as_dict()}


class TritonRunner:
    """Runs a `TritonPythonModel`. Each task is a request of its own, so that each has its own response."""

    def __init__(self, kind: type, about: Context):
        if using_decoupled_model_transaction_policy(about.config):
            raise TritonModelException("model_transaction_policy.decoupled: found true, expected one response a request")
        self._about = about
        self._outputs = [output.name for output in about.outputs]
        self._model = kind()
        #: Of models whose `execute` is a coroutine, once it has run.
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        if hasattr(self._model, "initialize"):
            self._model.initialize(arguments(about))

    def run(self, groups: Sequence[Group]) -> Iterator[Answer]:
        requests = [request for group in groups for request in self._requests(group)]
        responses = self._model.execute(requests)
        if inspect.isawaitable(responses):
            self._loop = self._loop or asyncio.new_event_loop()
            responses = self._loop.run_until_complete(responses)
        if responses is None or len(responses) != len(requests):
            found = "none" if responses is None else len(responses)
            raise TritonModelException(f"execute gave {found} responses, expected {len(requests)}: one for each request")
        return map(self._answer, responses)

    def _requests(self, group: Group) -> Iterator[InferenceRequest]:
        for task in range(group.tasks):
            inputs = [
                Tensor(name, array[task : task + 1] if self._about.is_batched else array)
                for name, array in group.inputs.items()
            ]
            yield InferenceRequest(self._about.name, self._outputs, inputs)

    def _answer(self, response: InferenceResponse) -> Answer:
        try:
            if response.has_error():
                return Failed(1, str(response.error()))
            found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            missing = [name for name in self._outputs if name not in found]
            if missing:
                raise TritonModelException(f"execute gave outputs {', '.join(found)}, expected {', '.join(missing)} too")
            return done(self._about, 1, [found[name] for name in self._outputs])
        except Exception as error:
            return Failed(1, reason_of(error))

    def close(self) -> None:
        if hasattr(self._model, "finalize"):
            self._model.finalize()


def arguments(context: Context) -> dict[str, str]:
    """What `initialize` is told."""
    return {
        "model_config": json.dumps(context.config),
        "model_instance_kind": _KIND,
        "model_instance_name": f"{context.name}_0_0",
        "model_instance_device_id": _DEVICE,
        "model_repository": context.folder,
        "model_version": context.version,
        "model_name": context.name,
    }
