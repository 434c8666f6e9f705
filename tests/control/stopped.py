"""A thread of another process that stands still while the others go on, as ptrace(2) stops it. Whoever stops it lets it
go again, by the same thread."""

import contextlib
import ctypes
import os
from pathlib import Path

# From <sys/ptrace.h> and <linux/wait.h>.
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WALL = 0x4000_0000


def trace(request, task):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(request, task, 0, 0) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace({request:#x}): {os.strerror(ctypes.get_errno())}")


def name_of(task):
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""  # It has ended.


@contextlib.contextmanager
def stopped(process, thread=None):
    """The one of this name, or the main one."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    is_meant = lambda task: name_of(task) == thread if thread else int(task.name) == process
    [task] = [int(task.name) for task in tasks if is_meant(task)]
    trace(PTRACE_SEIZE, task)
    trace(PTRACE_INTERRUPT, task)
    os.waitpid(task, WALL)
    try:
        yield
    finally:
        trace(PTRACE_DETACH, task)
