"""Hosts in network namespaces: each has a name, an address on every network, and the names of all in its /etc/hosts."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 60


def skip(what):
    print(f"skipped tests/operate: needs {what}")
    sys.exit(0)


def install(programs, packages):
    """What is needed, from apt where that works."""
    if os.geteuid() != 0:
        skip("network namespaces")
    if not all(map(shutil.which, programs)):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], **quiet)
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        skip(missing[0])


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def name_of(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # It has ended.


class Hosts:
    """Hosts of these names on these networks: `{"": "10.78.0"}` gives the first one 10.78.0.1, which is its name's; an
    address of the network "-ib" is that of its name with "-ib" behind it."""

    def __init__(self, tag, names, networks):
        self.tag, self.names, self.networks = f"{tag}{os.getpid() % 10000}", names, networks
        self.switch = f"{self.tag}x"
        if subprocess.run(["ip", "netns", "add", self.switch], capture_output=True).returncode:
            skip("network namespaces")
        ip("-n", self.switch, "link", "set", "lo", "up")
        for suffix in networks:
            ip("-n", self.switch, "link", "add", f"sw{suffix}", "type", "bridge")
            ip("-n", self.switch, "link", "set", f"sw{suffix}", "up")
        hosts = "127.0.0.1 localhost\n"
        for number, name in enumerate(names, 1):
            space = self.space(name)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            for suffix, network in networks.items():
                link, port = f"eth{suffix}", f"p{number}{suffix}"
                ip("link", "add", link, "netns", space, "type", "veth", "peer", "name", port, "netns", self.switch)
                ip("-n", self.switch, "link", "set", port, "master", f"sw{suffix}", "up")
                ip("-n", space, "address", "add", f"{network}.{number}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
                hosts += f"{network}.{number} {name}{suffix}\n"
        for name in names:
            self.etc(name).mkdir(parents=True)
            (self.etc(name) / "hosts").write_text(hosts)

    def space(self, name):
        return self.tag + name

    def etc(self, name):
        """What takes the place of files of the same name in this host's /etc."""
        return Path("/etc/netns") / self.space(name)

    def on(self, name, *command):
        """The command that runs this one on a host, under its name."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh", *map(str, command)]
        return ["ip", "netns", "exec", self.space(name), *named]

    def processes(self, name, command):
        """Those of a command on a host."""
        pids = subprocess.run(["ip", "netns", "pids", self.space(name)], capture_output=True, text=True).stdout.split()
        return [pid for pid in pids if name_of(pid) == command]

    def end(self):
        for name in self.names:
            space = self.space(name)
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
            subprocess.run(["kill", "-9", *pids], capture_output=True)
            subprocess.run(["ip", "netns", "del", space])
            shutil.rmtree(self.etc(name), ignore_errors=True)
        subprocess.run(["ip", "netns", "del", self.switch])


def wait_for(what, is_there, told):
    """Until something is there; `told` is shown if it does not come."""
    until = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > until:
            sys.exit(f"FAILED {what}: not within {PATIENCE_S} s\n{told()}")
        time.sleep(0.2)
    print(f"passed {what}", flush=True)
