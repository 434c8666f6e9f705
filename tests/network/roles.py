"""A cluster of two schedulers, two backends and two frontends, each on a host of its own, by configurations that
operators would write."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from hosts import Host, new_namespace
from switch import Running

NUMBERS = {"scheduler-0": 1, "scheduler-1": 2, "backend-0": 11, "backend-1": 12, "frontend-0": 21, "frontend-1": 22}
SECRET = "over a bad network, thirty bytes"
HTTP, ADMIN = 8000, 8100
# Members that start load and measure their models first.
WHOLE_S, PRIMARY_S = 40, 5
ROLES = ("scheduler", "backend", "frontend")


class Failed(Exception):
    """The cluster did not become what it should be; the text says why."""


class Cluster:
    """`repository` has `digits`. All processes end with this one."""

    def __init__(self, binary, folder, repository, seed):
        self.binary, self.folder, self.repository, self.processes = binary, folder, repository, {}
        here = new_namespace()
        self.hosts = {name: Host(number, here) for name, number in NUMBERS.items()}
        self.switch = Running({host.packed: host.device for host in self.hosts.values()}, seed)
        for name in NUMBERS:
            self.configure(name)
            self.start(name)

    def named(self, role):
        return [name for name in NUMBERS if name.startswith(role)]

    def frontends(self):
        """Where they are asked."""
        return {name: (self.hosts[name].asked_at, HTTP) for name in self.named("frontend")}

    def configure(self, name):
        host, role = self.hosts[name], name.split("-")[0]
        schedulers = [f"{self.hosts[each].address}:7400" for each in self.named("scheduler")]
        keys = f'name = "{name}"\nsecret = "{SECRET}"\nschedulers = {json.dumps(schedulers)}\n'
        keys += f'address = "{host.address}:4791"\n'
        keys += {
            "scheduler": f'listen = "{host.address}:7400"\nmodel_threads = 1\n',
            "backend": f'repository = "{self.repository}"\ngpus = 1\n',
            "frontend": f'repository = "{self.repository}"\nlink = "{host.address}:7401"\n'
            f'http = "{host.asked_at}:{HTTP}"\n',
        }[role]
        file = self.folder / f"{name}.toml"
        file.write_text(f'{keys}[admin]\nhttp = "{host.asked_at}:{ADMIN}"\n')
        file.chmod(0o600)

    def log(self, name):
        return self.folder / f"{name}.log"

    def lines(self):
        """How many lines each member has logged."""
        return {name: self.log(name).read_bytes().count(b"\n") for name in NUMBERS}

    def start(self, name):
        command = [self.binary, name.split("-")[0], "--supervised-by", str(os.getpid())]
        command = self.hosts[name].command(*command, "--config", self.folder / f"{name}.toml")
        with open(self.log(name), "ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"NO_COLOR": "1"})

    def kill(self, name):
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def ended(self):
        """Members that have ended by themselves."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def ask(self, name, path, port=ADMIN):
        """The body of an answer, whatever its status is; `None` if there is none."""
        try:
            with urllib.request.urlopen(f"http://{self.hosts[name].asked_at}:{port}{path}", timeout=2) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            return None

    def is_ready(self, name):
        return self.ask(name, "/readyz") == "ok\n"

    def seen_by(self, scheduler):
        answer = self.ask(scheduler, "/v2/cluster")
        return json.loads(answer) if answer and answer.startswith("{") else None

    def primary(self):
        """The scheduler that is it; where one is taking over, the next one."""
        until = time.monotonic() + PRIMARY_S
        while time.monotonic() < until:
            found = {name: self.seen_by(name) for name in self.named("scheduler")}
            names = [name for name, seen in found.items() if seen and seen["is_primary"]]
            if len(names) == 1:
                return names[0]
            time.sleep(0.05)
        raise Failed(f"{len(names)} schedulers are the primary")

    def epoch(self):
        """Of the primary: how often there was another one."""
        return max(int(seen["epoch"].split(".")[0]) for name in self.named("scheduler") if (seen := self.seen_by(name)))

    def missing(self):
        """What is not yet as it should be; `None` if all members serve, for both schedulers."""
        primaries = 0
        for scheduler in self.named("scheduler"):
            seen = self.seen_by(scheduler)
            if seen is None:
                return f"{scheduler} does not answer"
            primaries += seen["is_primary"]
            for kind in ("backend", "frontend"):
                serving = sorted(row["name"] for row in seen[f"{kind}s"] if row["state"] == "serving")
                if serving != self.named(kind):
                    return f"{scheduler} knows of {kind}s that serve: {', '.join(serving) or 'none'}"
        if primaries != 1:
            return f"{primaries} schedulers are the primary"
        unready = [name for name in NUMBERS if not self.is_ready(name)]
        return f"{unready[0]} is not ready" if unready else None

    def wait_until_whole(self):
        """How long it took."""
        began = time.monotonic()
        while missing := self.missing():
            if dead := self.ended():
                raise Failed(f"{dead[0]} ended: {self.log(dead[0]).read_text()[-400:]}")
            if time.monotonic() - began > WHOLE_S:
                raise Failed(f"after {WHOLE_S} s {missing}")
            time.sleep(0.1)
        return time.monotonic() - began

    def counts(self, name, *kinds):
        """What a member has counted with each peer: for each kind, which is names of counters, their sum."""
        counts = [Counter() for _ in kinds]
        for line in (self.ask(name, "/metrics") or "").splitlines():
            found = re.fullmatch(r'downbeat_roce_peer_(\w+)_total\{peer="\w+ ([^"]+)"\} (\d+)', line)
            for count, kind in zip(counts, kinds):
                if found and found[1] in kind:
                    count[found[2]] += int(found[3])
        return counts

    def overrun(self):
        return sum(host.overrun() for host in self.hosts.values())

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.switch.end()
