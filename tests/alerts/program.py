"""A model's program (docs/process.md): gives its only input back as its only output, and fails whatever comes while a
file `broken` is in its folder."""

import json
import mmap
import os
import socket

control = socket.socket(fileno=int(os.environ["DOWNBEAT_CONTROL_FD"]))
memory = mmap.mmap(int(os.environ["DOWNBEAT_MEMORY_FD"]), 0)
lines = control.makefile("rw")


def say(message):
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def answer(batch, area):
    if os.path.exists("broken"):
        return {"failed": {"id": batch["id"], "reason": "it is broken"}}
    groups, at = [], area["offset"]
    for group in batch["groups"]:
        tensor = group["inputs"][0]
        memory[at : at + tensor["bytes"]] = memory[tensor["offset"] : tensor["offset"] + tensor["bytes"]]
        output = {key: tensor[key] for key in ("datatype", "shape", "bytes")} | {"offset": at}
        groups.append({"tasks": group["tasks"], "outputs": [output]})
        at += -(-tensor["bytes"] // 64) * 64
    return {"done": {"id": batch["id"], "groups": groups}}


for line in lines:
    message = json.loads(line)
    if "model" in message:
        area = message["model"]["output_area"]
        say({"ready": {"protocol": 2}})
    elif "batch" in message:
        say(answer(message["batch"], area))
