"""Prometheus over the rules as they are shipped, but faster: their minutes are seconds here."""

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
# Beside builds, on two cores.
PATIENCE_S = 90
# How often members tell what they count, and the finer grid on which queries find each telling.
SCRAPE, GRID = "500ms", "100ms"


def faster(rules):
    """Spans of minutes become as many seconds. What is told in days is a bound that no run reaches."""
    return re.sub(r"(?<=[\[ ])(\d+)m\b", r"\1s", rules)


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class Prometheus:
    """What it is to scrape is told by the files that are shipped, with targets of the test's own."""

    def __init__(self, folder):
        self.folder, self.began = folder, time.time()
        rules = (SHIPPED / "rules.yml").read_text()
        (folder / "rules.yml").write_text(faster(rules))
        config = (SHIPPED / "prometheus.yml").read_text()
        config, count = re.subn(r"_interval: 15s", f"_interval: {SCRAPE}", config)
        if count != 2:
            raise SystemExit(f"FAILED prometheus.yml: found {count} intervals of 15 s, expected 2")
        (folder / "prometheus.yml").write_text(config)
        self.target({})
        self.port = free_port()
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"]
        self.log = open(folder / "prometheus.log", "wb")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)

    def target(self, jobs):
        """Jobs and their targets, from now on: it looks at the file as it is replaced."""
        told = [{"targets": targets, "labels": {"job": job}} for job, targets in jobs.items()]
        # JSON is YAML.
        (self.folder / "targets.new").write_text(json.dumps(told))
        (self.folder / "targets.new").rename(self.folder / "targets.yml")

    def ask(self, path, **parameters):
        """What it answers, or why it does not."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from error

    def query(self, query):
        return self.ask("query", query=query)["result"]

    def over_the_run(self, query):
        """The series of a query from the start until now: on a grid so fine that what one scrape told is seen."""
        return self.ask("query_range", query=query, start=self.began, end=time.time(), step=GRID)["result"]

    def wait_until_up(self):
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.query("1")
            except (OSError, ValueError) as error:
                if time.monotonic() > until or self.process.poll() is not None:
                    raise SystemExit(f"FAILED Prometheus: {error}\n{self.last_words()}") from error
                time.sleep(0.1)

    def alerts(self, job=None):
        """Those that fire, or soon will, of a job or of all; by name, with their labels and annotations."""
        alerts = self.ask("alerts")["alerts"]
        return [alert for alert in alerts if job in (None, alert["labels"].get("job"))]

    def firing(self, job):
        return [alert for alert in self.alerts(job) if alert["state"] == "firing"]

    def last_words(self):
        return (self.folder / "prometheus.log").read_text(errors="replace")[-2000:]

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()
