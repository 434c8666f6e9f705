"""Every call of every stock client against a running cluster; writes the table of what was called and how it ended.

usage: compatibility.py HTTP_ADDRESS GRPC_ADDRESS OUT"""

import importlib
import subprocess
import sys

HEAD = """# Compatibility

Clients as PyPI has them, unmodified, against `downbeat up`. `tests/clients/run` makes every call below, judges its
answer, and fails if this table is not what it found (`tests/clients/run --update` writes it). `tests/triton/run` runs
Triton's own tests and its clients' examples, from checkouts of its repositories: in November 2026 386 of the 405 that
apply passed, and `DIFFERS` in `tests/triton/suites.py` says why each of the others does not. `tests/clients/sdks` calls
by KServe's SDK, MLServer's types, pytriton's clients and Ultralytics' client.

## Where it differs from Triton on purpose

Errors begin with Triton's words where its clients look for them, and go on with what to change. Besides:

| what | Triton | here |
| --- | --- | --- |
| a body that is too large | 400 | 413, and gRPC's `RESOURCE_EXHAUSTED` |
| a dimension below 0 in JSON | 500 | 400 |
| REST: a model that is not ready, or unknown | 400 | 503, 404 |
| shared memory that cannot be opened | 500, `INTERNAL` | 400, `INVALID_ARGUMENT` |
| JSON's elements that do not fit the shape | that they do not | how many were found and expected |
| a request with several wrong inputs | is told of any one | is told of the first |
| `binary_data_output` beside outputs that say nothing | JSON | binary data, as the document of the extension has it |
| an output in JSON with a string that is not UTF-8 | its bytes, which are no JSON then | 400: binary data can hold it |
| nesting of JSON's tensors | 100 | any depth |
| a stream's answers | in the order of requests for models that are not decoupled | in the order of requests |
| names of files for the log and for traces | the operator's | `trace_file` is the operator's, too (`[trace]`); the log goes to stderr |
| `log_format`; `log_frequency` and `TENSORS` of traces | change lines, files and traces | are remembered; times are as in ISO 8601 anyway, traces are written at once and have no tensors |
| `nv_inference_pending_request_count` | requests that do not run yet | requests without an answer yet |
| `response_cache` without `--cache-config` | changes nothing | [is obeyed](configuration.md#answers-that-are-kept), within `cache_bytes`; equal requests at once are asked once |
| `nv_gpu_*`, `nv_energy_consumption` | of the host's GPUs, beside the other metrics | of the GPUs that a backend has opened, at an address of its own ([`admin`](gpu.md#what-to-watch)); the energy is counted from then on |
| bodies of other calls than inferences | as large as those | 64 KiB |
| files that a load brings along (`file:..`) | are served | are, where [`load_files`](configuration.md#profiles-and-loading) says so; `<version>/<file>` only, and no programs |
| an objective that can never be met | - | refused at once |
| a request's `timeout` | how long it may wait, if the model's queue policy allows that and has a longer one | the objective of its answer, if the model has [no queue policy with a timeout](configuration.md#a-model-repositorymodelconfigpbtxt), or this allows it; 0 or none is the model's `slo_ms`, and [no objective](policy.md#what-has-no-objective) without that |
| a queue policy's timeout | how long a request may wait; it is rejected then, or delayed behind all others | the longest objective of its answer; with `DELAY` it changes nothing |
| an error of a model in Python | its own status, and its words alone | INTERNAL (500), and begins with `Failed to process the request(s) for model` |
| a request of several rows to a model in Python | one request | one for each row, each with its own end |
| a request of several rows in a `batch_input` | one request | one for each row |
| `auto_complete_config` | always called | only where the configuration lacks a tensor, its `data_type` or its `dims` |
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
