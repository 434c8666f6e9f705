"""served.py BINARY: what a notebook does with `downbeat.serve` and this binary: models of a folder are served where a loop of
asyncio runs, another cluster beside it refuses a wrong folder in a line, and nothing is left once it is stopped."""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import downbeat

DIGITS = Path("models/digits")
# Far more than a busy machine takes.
OBJECTIVE_US = 20_000_000


def is_seven(url):
    body = json.loads((DIGITS / "seven.json").read_text())
    body = json.dumps({**body, "parameters": {"timeout": OBJECTIVE_US}}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/digits/infer", body, timeout=30) as reply:
        scores = json.load(reply)["outputs"][0]["data"]
    return scores.index(max(scores)) == 7


async def cell(binary):
    with downbeat.serve(DIGITS.parent, binary=binary, models=["digits"]) as server:
        assert is_seven(server.url), "it is no seven"
        with downbeat.serve(DIGITS / "1" / "model.onnx", binary=binary) as other:
            assert other.url != server.url and other.grpc_url != server.grpc_url
        assert is_seven(server.url), "it ended with another one"
        try:
            downbeat.serve("/nowhere", binary=binary)
        except downbeat.ServeError as error:
            assert "exit code 2" in str(error) and "--repository" in str(error), error
        else:
            raise AssertionError("a folder that is not there is served")
    assert "stopped" in repr(server), f"{server}: {server.logs}"
    try:
        is_seven(server.url)
    except urllib.error.URLError:
        return
    raise AssertionError("it answers although it was stopped")


asyncio.run(cell(sys.argv[1]))
print("downbeat.serve: a seven is a seven, a wrong folder is refused, and it ends in good order")
