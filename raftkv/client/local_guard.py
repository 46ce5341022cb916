"""A process that outlives a program killed with ``kill -9`` for just long enough to clean up after it.

The last resort of ``raftkv.local``. It is run as a script (``python -I -S local_guard.py DIRECTORY``) and imports
nothing of raftkv, so that it starts within milliseconds:

1. it reads its standard input, a pipe whose other end only the program holds;
2. when the pipe is closed, however the program ended, it kills its own process group, which contains all members;
3. a copy of itself outside the group waits until the group is empty and removes the directory.

Members are found by their process group, not by their process ids, which other processes may have reused.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading

POLL_S = 0.01
GIVE_UP_POLLS = 1000


def main(directory: str) -> None:
    """Wait for the end of the program, then kill the members and remove their directory."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    group = os.getpgrp()
    if os.fork() == 0:
        os.setsid()
        os.killpg(group, signal.SIGKILL)
        _wait_empty(group)
        shutil.rmtree(directory, ignore_errors=True)


def _wait_empty(group: int) -> None:
    pause = threading.Event()
    for _ in range(GIVE_UP_POLLS):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        pause.wait(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1])
