"""`up` with the demo's three models, and pages of its scheduler and its frontend."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

PATIENCE_S = 120
HTTP, GRPC, UI, MODELS_UI = 28000, 28001, 28003, 28004
MODELS = ["digits", "inception_resnet_v2", "resnet50"]


class Up:
    def __init__(self, binary):
        self.binary, self.lines = binary, []
        self.host = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.1"
        at = {name: f"{self.host}:{port}" for name, port in [("http", HTTP), ("grpc", GRPC), ("ui", UI)]}
        flags = [f"--{name}={address}" for name, address in at.items()]
        self.http = f"http://{at['http']}"
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([binary, "up", *flags], stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.ready = threading.Event()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if "in a browser" in line:
                self.ready.set()
        self.ready.set()

    def __enter__(self):
        if not self.ready.wait(PATIENCE_S) or self.process.poll() is not None:
            self.fail("`up` is not ready")
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def fail(self, what):
        self.end()
        self.log.seek(0)
        sys.exit(f"FAILED {what}: {self.lines[-5:]} {self.log.read()[-2000:]}")

    def member(self, name):
        """The number of a member's first process."""
        return int(next(found[1] for line in self.lines if (found := re.search(rf"{name}: process (\d+)", line))))

    @property
    def cluster(self):
        return self.host, UI

    @property
    def models(self):
        return self.host, MODELS_UI

    def infer(self):
        """One request, which is answered."""
        body = json.dumps({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 64], "data": [0] * 64}]})
        began = time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(f"{self.http}/v2/models/digits/infer", body.encode(), timeout=30) as answer:
                    return answer.read()
            except urllib.error.URLError as error:
                if time.monotonic() - began > PATIENCE_S:
                    self.fail(f"no answer: {error}")
                time.sleep(0.1)

    def load(self, seconds):
        """Sends requests for all models for so long, in the background."""
        rates = [word for model, rate in zip(MODELS, [120, 12, 90]) for word in ("--model", f"{model}:{rate}")]
        command = [self.binary, "bench", "load", "--url", self.http, "--seconds", str(seconds), *rates]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
