"""A process that outlives a program killed with ``kill -9`` for just long enough to clean up after it.

The last resort of ``raftkv.local`` and of ``raftkvctl run``. It is run by path, alone (``python -I -S guard.py
DIRECTORY MARK``), and imports nothing of raftkv, so that it starts within milliseconds:

1. it leads the process group of all child processes, so that the kernel does not reuse the group's number;
2. it reads its standard input, a pipe whose other end only the program holds; at the end of the input it kills
   the group, for any reason;
3. a copy of it outside the group kills processes that have left the group (such as the children of torchrun) but
   still have the mark in their environment, waits until the group is empty, and removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading

MARK = "RAFTKV_WORKERS"
"""Environment variable of every worker of an agent and its child processes."""
POLL_S = 0.01
GIVE_UP_POLLS = 500


def main(directory: str, mark: str) -> None:
    """Wait for the end of the program, then remove its processes and files.

    Arguments:
        directory: directory of the program's temporary files.
        mark: mark in the environment of its child processes; empty: all are in the group.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.buffer.write(b"!")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    group = os.getpgrp()
    if os.fork() == 0:
        os.setsid()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        if mark:
            kill_marked(mark)
        _wait_empty(group)
        shutil.rmtree(directory, ignore_errors=True)


def _wait_empty(group: int) -> None:
    pause = threading.Event()
    with contextlib.suppress(ProcessLookupError):
        for _ in range(GIVE_UP_POLLS):
            os.killpg(group, 0)
            pause.wait(POLL_S)


def kill_marked(mark: str) -> None:
    """Kill all processes of this machine that carry the mark, until none is left; needs ``/proc``."""
    pause = threading.Event()
    for _ in range(GIVE_UP_POLLS):
        found = find_marked(mark)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        pause.wait(POLL_S)


def find_marked(mark: str) -> list[int]:
    """Find the processes that carry the mark, except those that have ended, which have no environment."""
    line = f"{MARK}={mark}".encode()
    found = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if line in file.read().split(b"\0"):
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
