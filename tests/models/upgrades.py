"""Loads ten newer versions of a model one after another while two clients ask it, for tests/models/run. No request may
be lost, and none that is sent after a load has ended may be answered by a former version.

upgrades.py DOWNBEAT FOLDER
"""

import http.client
import json
import pathlib
import shutil
import sys
import threading

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

from server import Server

UPGRADES, CLIENTS = 10, 2
# Answers that each client has of a version before the next one comes.
ANSWERS = 50
HANG_S = 120
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]}


def write(repository, version):
    """A version that adds its number; it comes whole."""
    side = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy"]
    number = numpy_helper.from_array(numpy.float32(version), "number")
    graph = helper.make_graph([helper.make_node("Add", ["x", "number"], ["y"])], "adds", side[:1], side[1:], [number])
    begun = repository.parent / "version"
    begun.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), begun / "model.onnx")
    begun.rename(repository / "adds" / str(version))


def post(connection, path, body):
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read()


class Clients:
    """Ask until they are told to stop."""

    def __init__(self, address):
        self.address, self.changed = address, threading.Condition()
        self.loaded, self.count, self.is_over, self.wrong = 1, 0, False, []
        self.answered = [{} for _ in range(CLIENTS)]
        self.threads = [threading.Thread(target=self.ask, args=(own,)) for own in self.answered]
        for thread in self.threads:
            thread.start()

    def ask(self, own):
        connection = http.client.HTTPConnection(self.address, timeout=HANG_S)
        while not self.is_over:
            least = self.loaded
            try:
                status, reply = post(connection, "/v2/models/adds/infer", REQUEST)
                version = json.loads(reply)["outputs"][0]["data"][0] if status == 200 else None
                is_right = version is not None and version >= least
                cause = None if is_right else f"{status} {reply[:200]} after version {least}"
            except (OSError, http.client.HTTPException) as error:
                version, cause = None, repr(error)
                connection.close()
            with self.changed:
                self.count += 1
                own[version] = own.get(version, 0) + 1
                if cause:
                    self.wrong.append(cause)
                self.changed.notify_all()

    def wait_for(self, version):
        """Until each has had answers of this version."""
        with self.changed:
            self.loaded = version
            seen = self.changed.wait_for(lambda: all(own.get(version, 0) >= ANSWERS for own in self.answered), HANG_S)
        if not seen:
            self.wrong.append(f"version {version} was not answered within {HANG_S} s")

    def end(self):
        self.is_over = True
        for thread in self.threads:
            thread.join()


def main():
    downbeat, folder = sys.argv[1], pathlib.Path(sys.argv[2]) / "upgrades"
    shutil.rmtree(folder, ignore_errors=True)
    repository = folder / "repository"
    (repository / "adds").mkdir(parents=True)
    write(repository, 1)
    with open(folder / "log", "w") as log:
        server = Server(downbeat, repository, log)
        try:
            server.wait()
            clients = Clients(server.http)
            connection = http.client.HTTPConnection(server.http, timeout=HANG_S)
            for version in range(1, UPGRADES + 2):
                if version > 1:
                    write(repository, version)
                    status, reply = post(connection, "/v2/repository/models/adds/load", {})
                    if status != 200:
                        clients.wrong.append(f"load of version {version}: {status} {reply[:300]}")
                        break
                clients.wait_for(version)
            clients.end()
        finally:
            server.end()
    result = f"{UPGRADES} upgrades under {CLIENTS} clients: {len(clients.wrong)} of {clients.count} requests failed"
    print(result, *clients.wrong[:3], sep="; ")
    sys.exit(bool(clients.wrong))


main()
