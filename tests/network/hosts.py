"""Hosts as namespaces that nobody else sees and that end with this process: each has a TUN device, which is its way to
all others, and a cable to this process, by which it is asked."""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from pathlib import Path

# From <sched.h>, <linux/if_tun.h>.
CLONE_NEWNET = 0x4000_0000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x4004_54CA, 1, 0x1000
# Of what waits for the switch; the default is 500.
QUEUE = 4096


class Unsupported(Exception):
    """This machine does not let us set that up; the text says what it needs."""


def call(function, *arguments):
    if function(*arguments) == -1:
        raise Unsupported("network namespaces")


def new_namespace():
    """This thread is in a new one from now on; its descriptor."""
    call(ctypes.CDLL(None, use_errno=True).unshare, CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace):
    call(ctypes.CDLL(None, use_errno=True).setns, namespace, CLONE_NEWNET)


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Host:
    """One of them."""

    def __init__(self, number, here):
        """`here` is the namespace of this process."""
        self.address, self.asked_at = f"10.79.0.{number}", f"10.80.{number}.2"
        self.namespace = new_namespace()
        self.device = open_tun("fabric")
        cable = f"host-{number}"
        ip("link", "set", "lo", "up")
        ip("address", "add", f"{self.address}/24", "dev", "fabric")
        ip("link", "set", "fabric", "txqueuelen", str(QUEUE), "up")
        outside = f"/proc/{os.getpid()}/fd/{here}"
        ip("link", "add", "outside", "type", "veth", "peer", "name", cable, "netns", outside)
        ip("address", "add", f"{self.asked_at}/30", "dev", "outside")
        ip("link", "set", "outside", "up")
        enter(here)
        ip("address", "add", f"10.80.{number}.1/30", "dev", cable)
        ip("link", "set", cable, "up")

    @property
    def packed(self):
        return socket.inet_aton(self.address)

    def command(self, *words):
        """The same command on this host."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self.namespace}", *words]

    def overrun(self):
        """Packets that were lost before the switch."""
        done = subprocess.run(self.command("cat", "/proc/self/net/dev"), capture_output=True, text=True, check=True)
        [line] = [line for line in done.stdout.splitlines() if line.strip().startswith("fabric:")]
        # Of what it transmits: bytes, packets, errors, dropped.
        return int(line.split(":")[1].split()[11])


def open_tun(name):
    """A TUN device of this thread's namespace, of whole packets."""
    if not Path("/dev/net/tun").exists():
        raise Unsupported("/dev/net/tun")
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError as error:
        raise Unsupported("/dev/net/tun") from error
    return device
