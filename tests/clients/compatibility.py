"""Every call of every stock client against a running cluster; writes the table of what was called and how it ended.

usage: compatibility.py HTTP_ADDRESS GRPC_ADDRESS OUT"""

import importlib
import subprocess
import sys

HEAD = """# Compatibility

Clients as PyPI has them, unmodified, against `downbeat up`. `tests/clients/run` makes every call below, judges its
answer, and fails if this table is not what it found (`tests/clients/run --update` writes it). CUDA shared memory is not
served.
"""
# Each in a process of its own: they register the same protocol buffers.
LIBRARIES = ["tritonclient_calls", "open_inference_calls"]

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
