"""Starts programs of raftkv without importing it each time: one process imports raftkv and forks for each start.

Most of the processor time of a start is spent on imports (0.2 to 0.3 s), and the tests start many hundred programs.
``start`` asks a process, which is started at the first call, to fork; the forked process becomes a child of the caller:

    process = start(["python", "-m", "raftkv", "serve", "--name=m0"], cwd=directory, environment=os.environ, log=file)
    process.send_signal(signal.SIGTERM)
    process.wait()

``run`` runs a program to its end, like ``subprocess.run``. A program starts in its ``main`` with its own words,
environment, folder and standard streams. Its `/proc` shows the command line of the forking process, and late imports
have already been done. A test that depends on either, or sets a variable that Python or an import reads, must start a
real process; failpoints are armed anew.
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
from tempfile import TemporaryFile
from typing import IO, Any

from raftkv.storage import failpoints

ROOT = Path(__file__).resolve().parents[1]
REQUEST_BYTES_MAX = 1 << 20
PR_SET_CHILD_SUBREAPER = 36
_RANKS = ("torch.distributed.run", "tests.torch.checkpoint.ranks", "tests.torch.recovery_rank")
PROGRAMS = {
    "raftkv": ("raftkv.cli.main", "raftkv.cli.server_options", "raftkv.server.main"),
    "raftkv.cli.ctl": (
        "raftkv.cli.ctl.__main__",
        *(f"raftkv.cli.ctl.{name}" for name in ("contest", "kv", "mirror", "watch")),
        "raftkv.cli.bench.check",
        "raftkv.cli.bench.command",
    ),
    **dict.fromkeys(_RANKS, (*_RANKS, "raftkv.torch.rendezvous")),
}
"""By the word after ``python -m``: its imports. The first has its ``main``, unless its own module is among them. One
process forks all programs with the same imports."""

is_used = False
"""Whether programs are forked: in tests (``tests/conftest.py``), not where they are measured."""

_lock = threading.Lock()


class Forked(subprocess.Popen[bytes]):
    """A process forked by another one for this process."""

    def __init__(self, pid: int, arguments: Sequence[str]) -> None:
        self.args = list(arguments)
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._communication_started = False
        self._waitpid_lock = threading.Lock()


def is_forkable(words: Sequence[str]) -> bool:
    """Return whether a command line can be forked: it begins with `python -m` and a known program."""
    return list(words[:2]) == [sys.executable, "-m"] and words[2] in PROGRAMS


def start(
    words: Sequence[str], *, cwd: Path, environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a program that prints to a log and reads nothing; the first of its `words` are `python -m raftkv`."""
    with open(os.devnull, "rb") as nothing:
        return spawn(words, (nothing, log, log), cwd=cwd, environment=environment)


def spawn(
    words: Sequence[str],
    streams: tuple[IO[Any], IO[Any], IO[Any]],
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str],
    is_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program, forked if ``is_used``.

    Arguments:
        words: its command line, see ``is_forkable``.
        streams: its standard input, output and error.
        cwd: its folder.
        environment: all its variables.
        is_session: whether it leads a session of its own.
    """
    if not is_used:
        source, output, errors = streams
        return subprocess.Popen(
            words, cwd=cwd, env=environment, stdin=source, stdout=output, stderr=errors, start_new_session=is_session
        )
    told = {
        "program": words[2],
        "words": words[3:],
        "cwd": str(cwd),
        "environment": dict(environment),
        "is_session": is_session,
    }
    with _lock:
        server = _server(PROGRAMS[words[2]])
        # A forked process becomes a child of this one when the process between them has ended.
        _adopt_orphans(True)
        try:
            socket.send_fds(server, [json.dumps(told).encode()], [stream.fileno() for stream in streams])
            pid = int(server.recv(64))
        finally:
            _adopt_orphans(False)
    return Forked(pid, words)


def run(
    words: Sequence[str],
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    is_one_stream: bool = False,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    :param environment: None: that of this process.
    :param is_one_stream: have its errors among its output.
    :raises subprocess.TimeoutExpired: it did not end; it is killed.
    """
    given = os.environ if environment is None else environment
    with open(os.devnull, "rb") as nothing, TemporaryFile() as output, TemporaryFile() as errors:
        streams = nothing, output, output if is_one_stream else errors
        process = spawn(words, streams, cwd=cwd, environment=given)
        try:
            status = process.wait(timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(list(words), status, _text_of(output), _text_of(errors))


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _adopt_orphans(is_on: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


@functools.cache
def _server(modules: Sequence[str]) -> socket.socket:
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *modules],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=its,
            stdout=subprocess.DEVNULL,
        ).returncode = 0  # it ends with this process, which does not wait for it
    own.recv(1)
    atexit.register(own.close)
    return own


# --- the process that forks ---------------------------------------------------------------------------------------


def serve() -> str:
    """Fork for each request; return the program in a forked child, once it resembles a new process, "" at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    with socket.socket(fileno=0) as client:
        client.send(b"+")
        while True:
            request, streams, _, _ = socket.recv_fds(client, REQUEST_BYTES_MAX, 3)
            if not request:
                return ""
            made, making = os.pipe()
            between = os.fork()
            if between == 0:
                forked = os.fork()
                if forked == 0:
                    break
                os.write(making, b"%d" % forked)
                os._exit(0)
            os.waitpid(between, 0)
            client.send(os.read(made, 64))
            for descriptor in (*streams, made, making):
                os.close(descriptor)
    return _become(json.loads(request), streams, (made, making))


def _become(request: dict[str, Any], streams: Sequence[int], others: Sequence[int]) -> str:
    """Give this process, just forked, the state of a new one."""
    for new, stream in enumerate(streams):
        os.dup2(stream, new)
    for descriptor in (*streams, *others):
        os.close(descriptor)
    if request["is_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as raftkv.cli.start does
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = [request["program"], *request["words"]]
    failpoints.arm_from(os.environ)
    return sys.argv[0]


def main(names: Sequence[str]) -> int:
    """Import what programs need, and fork until the last client is gone."""
    modules = {name: importlib.import_module(name) for name in names}
    gc.collect()
    gc.freeze()
    program = serve()
    if not program:
        return 0
    main_module = sys.modules["__main__"] = modules.get(program, modules[names[0]])
    return main_module.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
