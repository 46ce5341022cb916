"""Members that need not import raftkv: one process imports it, and forks for each start.

Most of the processor time of a start is imports (0.3 s), and the tests start some hundred members. ``start`` asks a
process, which is started at the first call, to fork; what it forks is a child of the caller like any other:

    process = start(["python", "-m", "raftkv", "serve", "--name=m0"], cwd=directory, log=file)
    process.send_signal(signal.SIGTERM)
    process.wait()

The member begins in ``raftkv.cli.main`` with its own words, environment, folder and log. Its `/proc` shows the command
line of the forking process, and what it imports late has been imported early: what looks at either starts a real one.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import raftkv.cli.main

ROOT = Path(__file__).resolve().parents[1]
REQUEST_BYTES_MAX = 1 << 20
PR_SET_CHILD_SUBREAPER = 36
IMPORTED_LATE = ("raftkv.cli.server.options", "raftkv.server.main")
"""What the command line imports once it knows that it is a server."""

is_used = False
"""Whether members of ``tests.procs`` are forked: in tests (``tests/conftest.py``), not where starts are measured."""

_lock = threading.Lock()


class Forked(subprocess.Popen[bytes]):
    """A process that another one has made for this one."""

    def __init__(self, pid: int, arguments: Sequence[str]) -> None:
        self.args = list(arguments)
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._communication_started = False
        self._waitpid_lock = threading.Lock()


def start(words: Sequence[str], *, cwd: Path, environment: Mapping[str, str], log: IO[bytes]) -> Forked:
    """Start a member; `words` are its command line, of which the first three are `python -m raftkv`."""
    request = json.dumps({"words": words[3:], "cwd": str(cwd), "environment": dict(environment)}).encode()
    with _lock:
        server = _server()
        # Whoever is made for this process has it as its parent once the process between them has ended.
        _adopt_orphans(True)
        try:
            socket.send_fds(server, [request], [log.fileno()])
            pid = int(server.recv(64))
        finally:
            _adopt_orphans(False)
    return Forked(pid, words)


def _adopt_orphans(is_on: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


@functools.cache
def _server() -> socket.socket:
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=its,
            stdout=subprocess.DEVNULL,
        ).returncode = 0  # it ends with this process, which does not wait for it
    own.recv(1)
    atexit.register(own.close)
    return own


# --- the process that forks ---------------------------------------------------------------------------------------


def serve() -> list[str] | None:
    """Fork for each request; return the words of a member in what was forked, and None in the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    with socket.socket(fileno=0) as client:
        client.send(b"+")
        while True:
            request, descriptors, _, _ = socket.recv_fds(client, REQUEST_BYTES_MAX, 1)
            if not request:
                return None
            (log,) = descriptors
            made, making = os.pipe()
            between = os.fork()
            if between == 0:
                member = os.fork()
                if member == 0:
                    break
                os.write(making, b"%d" % member)
                os._exit(0)
            os.waitpid(between, 0)
            client.send(os.read(made, 64))
            for descriptor in (log, made, making):
                os.close(descriptor)
    return _become(json.loads(request), log, made, making)


def _become(request: dict[str, object], log: int, *others: int) -> list[str]:
    """Give this process, just forked, what a new one would have."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    for descriptor in (nothing, log, *others):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as raftkv.cli.start does
    environment = request["environment"]
    words = request["words"]
    assert isinstance(environment, dict)
    assert isinstance(words, list)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(request["cwd"]))
    sys.argv = ["raftkv", *words]
    return words


def main() -> int:
    """Import what a member needs, and fork until there is no one left who asks."""
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    words = serve()
    return 0 if words is None else raftkv.cli.main.main(words)


if __name__ == "__main__":
    sys.exit(main())
