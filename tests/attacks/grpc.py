"""gRPC and Protocol Buffers by hand: the messages of `inference.GRPCInferenceService` that are attacked, in any
shape."""

import gzip
import struct

import http2

SERVICE = "/inference.GRPCInferenceService/"
# Fields of ModelInferRequest, InferInputTensor and InferTensorContents (gateway/proto/inference_service.proto).
MODEL_NAME, ID, PARAMETERS, INPUTS, OUTPUTS, RAW = 1, 3, 4, 5, 6, 7
INPUT_NAME, INPUT_DATATYPE, INPUT_SHAPE, INPUT_CONTENTS = 1, 2, 3, 5
INT64_CONTENTS, BYTES_CONTENTS = 3, 8


def varint(value):
    encoded = bytearray()
    while value >= 128:
        encoded.append(value % 128 | 128)
        value //= 128
    return bytes([*encoded, value])


def field(number, value):
    """A field that has a length: text, bytes or a message."""
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(name, datatype, shape, more=b""):
    dims = b"".join(varint(dim) for dim in shape)
    return field(INPUT_NAME, name) + field(INPUT_DATATYPE, datatype) + field(INPUT_SHAPE, dims) + more


def request(*parts, model="digits"):
    """A ModelInferRequest."""
    return field(MODEL_NAME, model) + b"".join(parts)


def seven():
    """A request for zeros, which any model of digits answers."""
    return request(field(INPUTS, tensor("image", "FP32", [1, 64])), field(RAW, bytes(256)))


def framed(message, compress=False):
    """A message with its five bytes before it."""
    message = gzip.compress(message, 6) if compress else message
    return struct.pack(">BI", compress, len(message)) + message


def head(method, compress=False):
    """The block of a call's fields."""
    more = [("content-type", "application/grpc"), ("te", "trailers")]
    return http2.fields("POST", SERVICE + method, *more, *([("grpc-encoding", "gzip")] if compress else []))


def call(connection, method, message, compress=False, until=lambda: False):
    """Begins a unary call, and yields its stream."""
    stream = connection.open(head(method, compress), is_end=False)
    connection.send_data(stream, framed(message, compress), until=until)
    return stream


def outcomes(connections, seconds):
    """How the calls of these connections ended, once they have or so many seconds are over: `(answered, refused,
    open)`."""
    for connection in connections:
        connection.pump_until(lambda: len(connection.ended) >= len(connection.windows), seconds)
    ended = [(connection, stream) for connection in connections for stream in connection.ended]
    answered = sum(connection.data_bytes[stream] > 0 for connection, stream in ended)
    return answered, len(ended) - answered, sum(len(connection.windows) for connection in connections) - len(ended)
