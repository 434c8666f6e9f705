"""`downbeat up`, for tests/models/run."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

# Beside builds, on two cores, with nothing remembered.
READY_S = 900


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class Server:
    """`downbeat up` over a repository."""

    def __init__(self, downbeat, repository, log, *arguments):
        self.http, self.grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
        command = [downbeat, "up", "--repository", repository, "--http", self.http, "--grpc", self.grpc, *arguments]
        self.lines, self.is_ready, self.since = [], threading.Event(), time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("ready"):
                self.took = time.monotonic() - self.since
                self.is_ready.set()

    def wait(self):
        if not self.is_ready.wait(READY_S):
            sys.exit(f"`up` was not ready within {READY_S} s: {self.lines[-3:]}")

    def index(self):
        request = urllib.request.Request(f"http://{self.http}/v2/repository/index", b"{}", method="POST")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as reply:
            return {model["name"]: model for model in json.load(reply)}

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(40)
