"""The process that outlives an agent killed with ``kill -9`` just long enough to end its workers.

Owns the last resort of ``supervisor.Workers``, and the marks by which workers are found. It is run by path, alone
(``python -I -S guard.py MARK DIRECTORY``), and imports nothing of raftkv:

1. it leads the process group of all workers, so that the kernel gives the group's number to no other process;
2. it reads its standard input, a pipe whose other end only the agent holds; at its end, however the agent went, it
   kills the group;
3. a copy of itself outside the group kills processes that have left the group (a launcher's own children, as
   torchrun's) but still carry the mark in its environment, and removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading

MARK = "RAFTKV_WORKERS"
"""The variable that every worker, and what it starts, has in its environment."""
POLL_S = 0.01
GIVE_UP_POLLS = 500


def main(mark: str, directory: str) -> None:
    """Wait for the end of the agent, then leave nothing of it behind.

    Arguments:
        mark: in the environment of the agent's workers.
        directory: of the agent's temporary files.
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
        kill_marked(mark)
        shutil.rmtree(directory, ignore_errors=True)


def kill_marked(mark: str) -> None:
    """Kill every process of this machine that carries the mark, until there is none; only where ``/proc`` tells."""
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
    """Find the processes that carry the mark; one that has ended has no environment any more."""
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
