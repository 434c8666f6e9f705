"""Every call of every stock client against a running cluster; writes the table of what was called and how it ended.

usage: compatibility.py HTTP_ADDRESS GRPC_ADDRESS OUT"""

import importlib
import subprocess
import sys

HEAD = """# Compatibility

Clients as PyPI has them, unmodified, against `downbeat up`. `tests/clients/run` makes every call below, judges its
answer, and fails if this table is not what it found (`tests/clients/run --update` writes it). `tests/triton/run` runs
Triton's own tests and its clients' examples, from checkouts of its repositories.

## Where it differs from Triton on purpose

Errors begin with Triton's words where its clients look for them, and go on with what to change. Besides:

| what | Triton | here |
| --- | --- | --- |
| a body that is too large | 400 | 413, and gRPC's `RESOURCE_EXHAUSTED` |
| a dimension below 0 in JSON | 500 | 400 |
| REST: a model that is not ready, or unknown | 400 | 503, 404 |
| shared memory that cannot be opened | 500, `INTERNAL` | 400, `INVALID_ARGUMENT` |
| JSON's elements that do not fit the shape | that they do not | how many were found and expected |
| `binary_data_output` beside outputs that say nothing | JSON | binary data, as the document of the extension has it |
| chunks of a body | 65,536 | any number, within the limit in bytes |
| nesting of JSON's tensors | 100 | any depth |
| a stream's answers | in the order of requests for models that are not decoupled | in the order of requests |
| names of files for the log and for traces | the operator's | none: the log goes to stderr, traces to the log or a collector |
| `log_format` | changes lines | is remembered; times are as in ISO 8601 anyway |
| `nv_inference_pending_request_count` | requests that do not run yet | requests without an answer yet |
| an objective that can never be met | - | refused at once |
"""
# Each in a process of its own: they register the same protocol buffers.
LIBRARIES = ["tritonclient_calls", "open_inference_calls", "grpcio_calls"]

http, grpc, out, *library = sys.argv[1:]
if library:
    tables = importlib.import_module(library[0]).run(http, grpc)
    with open(out, "a") as file:
        file.write("".join("\n" + table.markdown() for table in tables))
else:
    with open(out, "w") as file:
        file.write(HEAD)
    for library in LIBRARIES:
        subprocess.run([sys.executable, *sys.argv, library], check=True)
